"""Ops -> edges: the graph of one step, one function a dependency rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import polars as pl

from lumos_nb import lanes, measure, repairs, rules
from lumos_nb.clocks import align_clocks
from lumos_nb.display import Shown
from lumos_nb.ops import ops_and_report, step_marks
from lumos_nb.schema import DEVICE_KINDS, EDGES, EVENTS, OPS, require
from lumos_nb.step_times import StepTimes, extents
from lumos_nb.traces.export import OnAClock
from lumos_nb.traces.run import Run
from lumos_nb.waits import Sightings, identify, sync_records


@dataclass(frozen=True, slots=True, repr=False)
class Graph(OnAClock):
    """A workload: a table of ops and a table of edges.

    Attributes
    ----------
    ops
        `schema.OPS`, rows in issue order (a topological order of `edges`). `start_ns` and `dur_ns` are those of the
        op's own *work*: time spent waiting for another op is not in `dur_ns`, it is the gap before the op on its lane.
    edges
        `schema.EDGES`: `dst` starts no earlier than `lag_ns` after the end (or start, `from_start`) of `src`.
    step
        The step that the graph is of. Boundary ops carry `step - 1`. In a repeated graph the steps count up.
    report
        What was assumed while the graph was made: columns `what`, `rank`, `count`, `time_ns`, `detail`.
    queue_sizes
        Rank -> how many device ops may be outstanding on each of its devices before its launches wait; ranks without a
        known limit are absent.
    filled
        Rank without a trace -> the rank whose copy it is (`fill_ranks`); empty where all ops were measured.
    run
        The run that it is of, whose events show what its ops hold; None where it was not built from one.
    """

    ops: pl.DataFrame
    edges: pl.DataFrame
    step: int
    report: pl.DataFrame = field(default_factory=pl.DataFrame)
    queue_sizes: Mapping[int, int] = field(default_factory=dict)
    filled: Mapping[int, int] = field(default_factory=dict)
    run: Run | None = field(default=None, repr=False, compare=False)

    def _title(self) -> str:
        own = self.ops.filter(pl.col("kind") != "boundary")["step"].unique().drop_nulls().to_list()
        first = min(own, default=self.step)
        steps = f"step {self.step}" if first == self.step else f"steps {first} to {self.step}"
        copies = f", {len(self.filled)} ranks filled (see .filled)" if self.filled else ""
        return f"Graph of {steps}: {len(self.ops):,} ops, {len(self.edges):,} edges{copies} (see .ops, .edges, .report)"

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._title(), _kinds(self.ops))]


def _kinds(ops: pl.DataFrame) -> pl.DataFrame:
    """How many ops of each kind there are, and how long they take together."""
    kinds = ops.group_by("kind").agg(ops=pl.len(), time_ns=pl.col("dur_ns").sum())
    return kinds.sort("time_ns", "kind", descending=[True, False])


GROUPS = {"group": pl.String(), "description": pl.String(), "ranks": pl.List(pl.Int32())}
"""Columns of `Recording.groups`."""


class AllSteps:
    """What ops of all steps say to the graph of any of them: each thing is made once, when first needed.

    Parameters
    ----------
    ops, records
        As of `Recording`, of all ranks or of one.
    cuda
        Whether any rank calls CUDA (`is_cuda`).
    """

    def __init__(self, ops: pl.DataFrame, records: pl.DataFrame, *, cuda: bool) -> None:
        self._raw, self._records, self.cuda = ops, records, cuda

    @cached_property
    def seen(self) -> Sightings:
        """What the ops say of waits."""
        return Sightings(self._raw, self._records)

    @cached_property
    def ops(self) -> pl.DataFrame:
        """The ops by rank, lane and time, with lanes and kinds as numbers."""
        return lanes.in_numbers(self._raw, self._records)

    @cached_property
    def on_threads(self) -> pl.DataFrame:
        """Those that stand on a thread."""
        return self.ops.filter(~lanes.ON_STREAM)

    @cached_property
    def on_streams(self) -> pl.DataFrame:
        """Those that stand on a stream, by rank, lane and time."""
        return self.ops.filter(lanes.ON_STREAM).sort("rank", "lane", "start_ns", "op_id")

    @cached_property
    def work(self) -> pl.DataFrame:
        """Those of `DEVICE_KINDS`."""
        return self.ops.filter(pl.col("kind").is_in(DEVICE_KINDS))

    @cached_property
    def comm(self) -> pl.DataFrame:
        """As `lanes.communication`."""
        return lanes.communication(self._raw)

    @cached_property
    def _launches(self) -> pl.DataFrame:
        return rules.outstanding(self._raw)

    @cached_property
    def queue_sizes(self) -> dict[int, int]:
        """As `Graph.queue_sizes`."""
        return rules.queue_size(self._launches, cuda=self.cuda)

    @cached_property
    def queue(self) -> pl.DataFrame:
        """As `rules.launch_queue`."""
        return rules.launch_queue(self._launches, self._raw, self.queue_sizes)

    @cached_property
    def full_queue(self) -> pl.Series:
        """Launches that found the queue full: raw op ids."""
        return self.queue.filter("full")["op_id"]

    @cached_property
    def usual_issues(self) -> pl.DataFrame:
        """As `lanes.usual_issues`."""
        return lanes.usual_issues(self._raw, self.full_queue)


def is_cuda(ops: pl.DataFrame) -> bool:
    """Whether calls of CUDA stand among these."""
    return bool(ops["call_name"].unique().str.contains(r"^cu(da)?[A-Z]").any())


@dataclass(frozen=True, repr=False)
class Recording(Shown):
    """A run's ops on one clock, before any step is cut out: what graphs of several steps have in common.

    Attributes
    ----------
    ops
        Raw ops (`ops.build_ops`) of all ranks and steps, with `match` and `nth`.
    records
        The trace's own synchronisation records (`waits.sync_records`).
    world_size
        Ranks of the job, of which the recording may hold fewer.
    report
        As in `Graph.report`.
    steps
        The steps that the profiler marked, in order; the whole window is step 0 if it marked none.
    groups
        The process groups that the files list: `group`, `description`, `ranks` (all members, traced or not; null where
        the file lists none, which is all ranks of the job).
    filled, run
        As in `Graph`.
    """

    ops: pl.DataFrame
    records: pl.DataFrame
    world_size: int
    report: pl.DataFrame
    steps: tuple[int, ...]
    groups: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=GROUPS))
    filled: Mapping[int, int] = field(default_factory=dict)
    run: Run | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: not what was found out in the meantime, which may be larger and is found out again."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def _title(self) -> str:
        ranks = f"{self.ops['rank'].n_unique() - len(self.filled)} of {self.world_size} ranks"
        ranks += f" and {len(self.filled)} filled from these" if self.filled else ""
        steps = f"{len(self.steps)} steps, {self.steps[0]} to {self.steps[-1]}"
        return f"Recording of {steps}, on {ranks}: {len(self.ops):,} ops (see .step_times(), .report)"

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._title(), _kinds(self.ops))]

    @classmethod
    def of(cls, run: Run) -> Recording:
        """Put a run's events on one clock and cut them into ops."""
        require(run, "events")
        marks = step_marks(EVENTS.check(run.events))
        events, marks, left_out = repairs.one_profile(run.events, marks)
        ops, odd = ops_and_report(events, marks)
        groups = groups_of(run.ranks, run.metadata)
        world_size = world_size_of(run.ranks, groups)
        ops, clocks = align_clocks(with_group_sizes(ops, groups, world_size))
        ops, overlaps = lanes.in_turn(ops)
        report = pl.concat([left_out, odd, clocks, overlaps, repairs.unlaunched(ops)])
        steps = tuple(marks["step"].unique().sort().to_list())
        if not steps:
            report = pl.concat([report, repairs.unmarked()])
        return cls(identify(ops), sync_records(events), world_size, report, steps or (0,), groups, run=run)

    @cached_property
    def all_steps(self) -> AllSteps:
        """What graphs of several steps have in common."""
        return AllSteps(self.ops, self.records, cuda=is_cuda(self.ops))

    @cached_property
    def _times(self) -> StepTimes:
        return StepTimes(extents(self.ops), self.steps)

    def times(self) -> StepTimes:
        """When each rank worked on each step."""
        return self._times

    def rank_starts(self, step: int) -> pl.DataFrame:
        """When each rank had done what it did for earlier steps, else its first op: `rank`, `device`, `at_ns`."""
        return self.times().rank_starts(step)

    def step_times(self) -> pl.DataFrame:
        """Measured steps: `step`, `start_ns`, `end_ns`, `step_ns`, `edge`.

        A step is the interval between the latest ends, over ranks, of the device ops that it and the steps before it
        launched; where there is no device, of their last host ops. `edge` marks the first and last profiled steps,
        which the profiler's own start and end disturb. The first begins with its first op if nothing earlier was
        recorded: then it is longer than the others by as much as the device runs behind the host.
        """
        return self.times().measured

    def known_step(self, step: object) -> int:
        """`step`, if it is one whose beginning is known."""
        return self.times().known(step)

    def default_step(self) -> int:
        """The step of median length, not counting the first and last profiled ones if there are others."""
        return self.times().default()


def world_size_of(ranks: pl.DataFrame, groups: pl.DataFrame) -> int:
    """How many ranks the job has: as many as have a trace, as the files state, or as their groups list."""
    stated = (ranks.height, ranks["world_size"].max(), groups["ranks"].explode().drop_nulls().n_unique())
    return max(count for count in stated if isinstance(count, int))


def groups_of(ranks: pl.DataFrame, metadata: Mapping[int, Mapping[str, Any]]) -> pl.DataFrame:
    """The process groups that the files list, each once.

    A group that lists no rank is of all ranks, and stays a null: a file of a kilobyte may state a world of any size
    and any number of such groups.
    """
    rows: dict[tuple[str, tuple[int, ...] | None], str] = {}
    world = ranks["world_size"].max()
    for said in metadata.values():
        about = {key: said[key] for key in ("distributedInfo", "layout") if isinstance(said.get(key), dict)}
        listed = [about.get("distributedInfo", {}).get("pg_config"), about.get("layout", {}).get("groups")]
        for group in (group for groups in listed if isinstance(groups, list) for group in groups):
            members = (group.get("ranks") or []) if isinstance(group, dict) else None
            if isinstance(members, list) and all(isinstance(r, int) and 0 <= r < 2**31 for r in members):
                key = str(group.get("pg_name")), tuple(sorted(members)) or None
                rows[key] = str(group.get("pg_desc") or "")
    in_full = {name for name, members in rows if members and len(members) == world}
    table = [
        (name, description, members and list(members))
        for (name, members), description in rows.items()
        if members or name not in in_full
    ]
    return pl.DataFrame(table, schema=GROUPS, orient="row")


def with_group_sizes(ops: pl.DataFrame, groups: pl.DataFrame, world_size: int) -> pl.DataFrame:
    """`ops` whose `group_size` is that of the listed group where the op itself does not say."""
    size = pl.col("ranks").list.len().fill_null(world_size).cast(pl.Int32)
    sizes = groups.select("group", listed=size).unique("group", keep="none")
    ops = ops.join(sizes, on="group", how="left", maintain_order="left")
    return ops.with_columns(group_size=pl.coalesce("group_size", "listed")).drop("listed")


def build_graph(run: Run | Recording, step: int | None = None, *, unseen: int | None = None) -> Graph:
    """Ops and edges of one step over all ranks, as it was measured.

    Parameters
    ----------
    run
        A run, or its `Recording` if graphs of several steps are wanted.
    step
        The step's number as the profiler gave it; None takes the one of median length, not the first or the last.
    unseen
        A step whose times must not serve as evidence for waits that the trace does not name: by default `step`
        itself. To predict one step from others, build theirs with that step unseen too.

    Returns
    -------
    Graph
        With boundary ops for what was going on when the step began (carry "measured"): replay gives the step as it was.
        For what-ifs that change what earlier steps leave behind use `repeat`.

    Raises
    ------
    GraphError
        The step is not in the run, or its rules contradict each other.

    Examples
    --------
    >>> graph = build_graph(load_run("runs/gpt"), step=3)
    """
    recording = run if isinstance(run, Recording) else Recording.of(run)
    step = recording.default_step() if step is None else recording.known_step(step)
    unseen = step if unseen is None else recording.known_step(unseen)
    every, waits = recording.all_steps, recording.all_steps.seen.waits(step, unseen)
    shared = Shared.of(step, every.comm, recording.times(), recording.world_size, recording.filled, cuda=every.cuda)
    rows, edges, report = rows_and_edges(every, waits, shared)
    report = pl.concat([recording.report, report])
    return replace(finished(rows, edges, step, report, every.queue_sizes), filled=recording.filled, run=recording.run)


class Shared(NamedTuple):
    """What the graph of a rank needs to know of all ranks."""

    step: int
    origin_ns: int
    starts: pl.DataFrame
    """When each rank begins the step (`StepTimes.rank_starts`)."""
    joins: pl.DataFrame
    transfers: pl.DataFrame
    """Of collectives that lack ranks (`lanes.absent_transfers`)."""
    cuda: bool
    filled: Mapping[int, int]

    @classmethod
    def of(
        cls, step: int, comm: pl.DataFrame, times: StepTimes, world_size: int, filled: Mapping[int, int], *, cuda: bool
    ) -> Shared:
        """From the communication (`lanes.communication`) and the step times of all ranks."""
        joins = lanes.join_rows(comm.filter(pl.col("step") == step), filled)
        transfers = lanes.absent_transfers(comm, step, world_size, filled)
        return cls(step, times.origin_ns(step), times.rank_starts(step), joins, transfers, cuda, filled)


def rows_and_edges(
    every: AllSteps, waits: pl.DataFrame, shared: Shared
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Rows of a step in issue order, edges between their places, and the report."""
    rows, edges, notes = _rows_and_edges(every, waits, shared)
    rows, edges = measure.in_issue_order(rows, edges)
    rows, edges = measure.add_lags(measure.settle(rows, edges), edges)
    return rows, edges, pl.concat([notes, measure.evidence(rows, edges)])


def _rows_and_edges(
    every: AllSteps, waits: pl.DataFrame, shared: Shared
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    step, origin_ns = shared.step, shared.origin_ns
    lane = every.ops.schema["lane"]
    waits, joins = waits.cast({"lane": lane, "record_lane": lane}), shared.joins.cast({"lane": lane})
    calls, work = (table.filter(pl.col("step") == step) for table in (every.on_threads, every.on_streams))
    hosts = lanes.host_rows(calls, waits, every.full_queue, every.usual_issues)
    hosts, engine_edges = rules.engine(rules.on_threads(hosts))
    hosts, wake_edges = rules.idle_threads(hosts)
    streams = lanes.stream_rows(work, waits, calls)
    streams, estimated = lanes.absent_peers(streams, joins, shared.transfers, shared.filled)
    hosts, guessed = lanes.absent_peers(hosts, joins, shared.transfers, shared.filled)
    backlog = lanes.backlog_rows(every.work, waits["target"], step, origin_ns)
    started = pl.concat([engine_edges["dst"], wake_edges["dst"]])
    leads = lanes.lead_rows(hosts, started, step, origin_ns)
    begins = lanes.start_rows(shared.starts, step, origin_ns).cast({"lane": lane})
    rows = pl.concat([hosts, streams, joins, backlog, leads, begins], how="diagonal_relaxed").with_columns(
        pl.col("ago").fill_null(0)
    )
    edges = pl.concat(
        [
            engine_edges,
            wake_edges,
            rules.lane_order(hosts, "thread"),
            rules.lane_order(streams, "stream"),
            rules.launches(hosts, streams),
            rules.event_waits(waits, rows),
            rules.host_waits(waits, streams, backlog),
            rules.collectives(pl.concat([streams, hosts], how="diagonal_relaxed"), joins),
            rules.queue_edges(every.queue.filter(pl.col("step") == step), rows),
            rules.first_on_lane(leads, hosts),
            rules.first_on_lane(backlog, streams),
        ]
    )
    blocked = rows.filter("blocks")["id"]
    sound = (pl.col("rule") != "sync") | pl.col("dst").is_in(blocked.implode())
    ids = rows["id"].implode()
    sound &= pl.col("src") != pl.col("dst")
    edges = edges.filter(sound & pl.col("src").is_in(ids) & pl.col("dst").is_in(ids)).unique(
        ["src", "dst"], keep="first", maintain_order=True
    )
    detail = "other ranks have no trace: the low quantile of equal calls; the rest is a wait of its own"
    comm = rows.select("id", "rank", time_ns="dur_ns").join(pl.concat([estimated, guessed]), on="id", how="semi")
    return rows, edges, repairs.counted("transfers estimated", comm, detail)


KEPT = ("site", "nth", "of", "call_name", "match", "ago", "operator", "operator_id")
"""Columns of a graph's ops beyond the schema: `site` and `nth` (of `of`) name an op in any step and rank; `ago` is how
many steps earlier a boundary op was launched, 0 for others; `operator` (event `operator_id` of its rank) is the
innermost one with shapes around a launch, also of the work that it launches."""


def finished(
    rows: pl.DataFrame, edges: pl.DataFrame, step: int, report: pl.DataFrame, queue_sizes: Mapping[int, int]
) -> Graph:
    """A graph of these rows, whose ops are their places, and of edges between places."""
    edges = edges.select(pl.col(c).cast(t) for c, t in EDGES.columns.items()).sort("src", "dst")
    numbered = rows.with_columns(op_id=pl.int_range(pl.len(), dtype=pl.Int64))
    ops = numbered.with_columns(phase=pl.col("phase").fill_null("other")).select(
        *(pl.col(c).cast(t) for c, t in OPS.columns.items()), *KEPT
    )
    return Graph(ops, edges, step, report, queue_sizes)
