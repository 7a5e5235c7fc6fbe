"""An execution trace joined with a profile of the same program: what each op took, and which device work is its."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.call_stacks import innermost, innermost_at, nearest_encloser
from lumos_nb.calls import CALL_CATEGORIES, DEVICE_CATEGORIES
from lumos_nb.display import format_share
from lumos_nb.errors import ChakraError, InputError, shown
from lumos_nb.exchange.chakra.alignment import align, windows
from lumos_nb.traces.execution_trace import ExecutionTrace, load_execution_trace
from lumos_nb.traces.export import Tables
from lumos_nb.traces.run import Run, load_run

Int64s = NDArray[np.int64]

RULES = ("record function", "external id", "order")
LEAST_SHARE = 0.5
"""Of the ids that two files of one session share, at least so many belong to equal names; else they are of two."""

_HOST_CATEGORIES = ("cpu_op", "user_annotation")
_FRAMES = ("process", "thread", "group", "device")
"""Kinds of node that no profiler records as an event of a thread."""

_NAME = (  # without the numbers of steps and of collectives
    pl.col("name")
    .str.replace(r"^ProfilerStep#?\d+$", "ProfilerStep")
    .str.replace(r"^((comm|wait)::.* seq=)\d+", "${1}n")
)
_RECORD_FUNCTION = r'"Record function id":\s*"?(\d+)'
_PAIRED_BY = (1, 4, 16)
"""Names in a row, by which threads of the two files are told to be the same."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Linked(Tables):
    """An execution trace with the times of a profile.

    Attributes
    ----------
    nodes
        `ExecutionTrace.nodes`, once for each `iteration` of the profile; `event_id` of the event that the node is
        in the profile (null if none is), its `start_ns`, `dur_ns` and `host_thread`, and the `rule` that found it.
    device
        One row for every kernel, copy and memset of the profile: `event_id`, `node_id` and `iteration` of the op that
        launched it (null if it is not linked), `launch_id` (event of the launching call), `correlation`, `name`,
        `category`, `device`, `stream`, `start_ns`, `dur_ns` and `rule`.
    report
        Columns `what` (nodes, host ops, device work, device time), `rule` (null: not linked), `amount` (events, or ns),
        `share`; and of `nesting`, whether a linked op lies within the event of its parent.
    unlinked
        Columns `side` (execution trace, profile), `name`, `count`: what has no partner.
    execution_trace
        What was linked.
    rank
        The rank of the profile.
    """

    nodes: pl.DataFrame
    device: pl.DataFrame
    report: pl.DataFrame
    unlinked: pl.DataFrame
    execution_trace: ExecutionTrace
    rank: int

    def share(self, what: str) -> float:
        """What share of nodes, host ops, device work or device time is linked; 1 where there is none of it."""
        rows = self.report.filter(what=what)
        return float(rows.filter(pl.col("rule").is_not_null())["share"].sum()) if len(rows) else 1.0

    def _title(self) -> str:
        shares = ", ".join(f"{format_share(self.share(what))} of the {what}" for what in ("nodes", "host ops"))
        if len(self.device):
            shares += f", {format_share(self.share('device time'))} of the device time"
        iterations = self.nodes["iteration"].max()
        return f"Linked trace of rank {self.rank}, {int(str(iterations)) + 1} iteration(s): {shares}"

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._title(), self.report)]


def link(execution_trace: ExecutionTrace | str | Path, run: Run | str | Path, *, rank: int | None = None) -> Linked:
    """Find the event of a profile for every node of an execution trace, and the device work that it launched.

    Ids decide where the two were recorded together: the record function's, else Kineto's external id. Whatever they
    leave is linked by the order of names on each thread (`alignment.align`): other iterations of the profile, files
    of two sessions, traces of a torch that writes no ids. Neither device work nor marks of steps are needed.

    Parameters
    ----------
    execution_trace
        `load_execution_trace`'s result, or a path.
    run
        `load_run`'s result, or a path: a Kineto trace of the same program, of one iteration or several.
    rank
        Which rank of the run, and of several execution traces at the path; not needed where there is one.

    Returns
    -------
    Linked
        The tables, and a report of what was linked by which rule.

    Raises
    ------
    ChakraError
        Nothing can be linked: the two are not of one program; or the profile has no ops.
    InputError
        The run has several ranks and none is named, or not that one.

    Examples
    --------
    >>> folder = datasets.path("gpt-single-paired")
    >>> linked = ln.chakra.link(folder / "rank-0.et.json.gz", folder / "rank-0.json.gz")
    >>> linked.share("operators")
    """
    run = run if isinstance(run, Run) else load_run(run)
    if not isinstance(execution_trace, ExecutionTrace):
        execution_trace = load_execution_trace(execution_trace, rank=rank)
    rank = _one_rank(run, rank)
    events = run.events.filter(pl.col("rank") == rank)
    host, nodes = _host_events(events), _linkable(execution_trace.nodes)
    if host.is_empty():
        raise ChakraError(f"the profile of rank {rank} has no event of {' or '.join(_HOST_CATEGORIES)} to link.")
    host = _across_threads(nodes, _in_iterations(nodes, _by_order(nodes, _by_ids(nodes, host))))
    if not host["node_id"].count():
        raise ChakraError(
            f"no node of {execution_trace.path} is an event of rank {rank}: neither ids nor the order of names agree. "
            "Give the profile of the same program, recorded in the same session if possible."
        )
    device = _device_work(events, host)
    linked = _nodes(execution_trace.nodes, host)
    return Linked(
        linked, device, _report(linked, nodes, host, device), _unlinked(linked, nodes, host), execution_trace, rank
    )


def _one_rank(run: Run, rank: int | None) -> int:
    ranks = run.ranks["rank"].to_list()
    if rank is None and len(ranks) == 1:
        return int(ranks[0])
    if rank is None or rank not in ranks:
        few = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        raise InputError(f"rank is {shown(rank)}: give one of the run's ranks, {few}.")
    return rank


def _linkable(nodes: pl.DataFrame) -> pl.DataFrame:
    """Nodes that a profiler records too, thread by thread in the order in which they began."""
    own = nodes.filter(~pl.col("kind").is_in(_FRAMES))
    thread = pl.col("thread").fill_null(-1)
    return own.select("node_id", _NAME, "rf_id", thread).sort("thread", "rf_id", "node_id")


def _host_events(events: pl.DataFrame) -> pl.DataFrame:
    """Ops and annotations, thread by thread in the order in which they began, the outer before the inner."""
    own = events.filter(pl.col("category").is_in(_HOST_CATEGORIES) & pl.col("thread").is_not_null())
    rf_id = pl.col("args").str.extract(_RECORD_FUNCTION).cast(pl.Int64, strict=False).alias("rf_id")
    columns = ("event_id", "thread", _NAME, "category", "start_ns", "dur_ns", "external_id")
    longest_first = [False, False, True, False, False]
    return own.select(*columns, rf_id).sort(
        "thread", "start_ns", "dur_ns", "external_id", "event_id", descending=longest_first
    )


def _by_ids(nodes: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """The events with the `node_id` that has the same id and name, by the first kind of id that tells; and `rule`."""
    ids = nodes.filter(pl.col("rf_id") > 0).select("node_id", "rf_id", said="name").unique("rf_id", keep="none")
    for rule, column in zip(RULES, ("rf_id", "external_id"), strict=False):
        both = host.join(ids, left_on=column, right_on="rf_id", how="left", maintain_order="left")
        same = both["said"] == both["name"]
        if same.sum() and same.sum() >= LEAST_SHARE * min(len(nodes), len(host)):
            found = both.select(pl.when(same).then("node_id"))["node_id"]
            found = found.to_frame().select(pl.when(found.is_first_distinct()).then("node_id"))["node_id"]
            return host.with_columns(found, rule=pl.when(found.is_not_null()).then(pl.lit(rule)))
    return host.with_columns(node_id=pl.lit(None, pl.Int64), rule=pl.lit(None, pl.String))


def _by_order(nodes: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """The events that ids leave, by the order of names on their threads; `repetition` of the execution trace."""
    names = pl.concat([nodes["name"], host["name"]]).rank("dense").cast(pl.Int64).to_numpy(writable=True)
    ours, theirs = names[: len(nodes)], names[len(nodes) :]
    rows = nodes.select("node_id", row=pl.int_range(pl.len()))
    known = host.join(rows, on="node_id", how="left", maintain_order="left")["row"].fill_null(-1).to_numpy()
    row, repetition = known.copy(), np.zeros(len(host), np.int64)
    for mine, its in _paired_threads(nodes["thread"].to_numpy(), ours, host["thread"].to_numpy(), theirs, known):
        inside = (known[its] >= mine.start) & (known[its] < mine.stop)
        place, repetition[its] = align(ours[mine], theirs[its], np.where(inside, known[its] - mine.start, -1))
        row[its] = np.where(place >= 0, place + mine.start, row[its])
    found = pl.Series("node_id", nodes["node_id"].to_numpy()[row], pl.Int64)
    by_order = pl.col("rule").is_null() & pl.Series(row >= 0)
    return host.with_columns(
        node_id=pl.when(pl.Series(row >= 0)).then(found),
        rule=pl.when(by_order).then(pl.lit(RULES[-1])).otherwise("rule"),
        repetition=pl.Series(repetition),
    )


def _paired_threads(
    mine: Int64s, ours: Int64s, its: Int64s, theirs: Int64s, known: Int64s
) -> list[tuple[slice, slice]]:
    """Rows of each thread of the execution trace, and of the profile's thread that runs the same ops."""
    own, other = _slices(mine), _slices(its)
    scores = []
    hashed = [[np.unique(windows(theirs[there], size)) for size in _PAIRED_BY] for there in other]
    for a, here in enumerate(own):
        found = [np.unique(windows(ours[here], size)) for size in _PAIRED_BY]
        for b, there in enumerate(other):
            by_id = ((known[there] >= here.start) & (known[there] < here.stop)).sum()
            alike = sum(np.isin(x, y, assume_unique=True).sum() for x, y in zip(found, hashed[b], strict=True))
            if by_id or alike:
                scores.append((by_id, alike, a, b))
    pairs, left_a, left_b = [], set(range(len(own))), set(range(len(other)))
    for _, _, a, b in sorted(scores, key=lambda score: (-score[0], -score[1], score[2], score[3])):
        if a in left_a and b in left_b:
            pairs.append((own[a], other[b]))
            left_a.remove(a)
            left_b.remove(b)
    return pairs


def _slices(threads: Int64s) -> list[slice]:
    """Rows of each thread; the threads stand one after the other."""
    edges = [0, *(np.flatnonzero(np.diff(threads)) + 1).tolist(), len(threads)]
    return [slice(a, b) for a, b in pairwise(edges) if b > a]


def _in_iterations(nodes: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """`iteration`, by the repetitions of the thread that begins; no node twice in one, ids before order before time."""
    linked = host.filter(pl.col("node_id").is_not_null())
    first = linked.join(nodes.select("node_id", began="rf_id"), on="node_id").sort("began", "thread")["thread"].head(1)
    begins = linked.filter(pl.col("thread").is_in(first.implode())).group_by("repetition").agg(pl.col("start_ns").min())
    edges = np.sort(begins["start_ns"].to_numpy())
    iteration = np.maximum(np.searchsorted(edges, host["start_ns"].to_numpy(), side="right") - 1, 0)
    host = host.with_columns(iteration=pl.Series(iteration, dtype=pl.Int64), row=pl.int_range(pl.len()))
    ranked = host.filter(pl.col("node_id").is_not_null()).sort(pl.col("rule") == RULES[-1], "start_ns", "row")
    kept = pl.col("row").is_in(ranked.unique(["node_id", "iteration"], keep="first")["row"].implode())
    return host.with_columns(pl.when(kept).then(pl.col("node_id", "rule"))).drop("row", "repetition")


def _across_threads(nodes: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """Names that are left as often on both sides of an iteration: gloo's ops begin on one thread and end on another."""
    taken = host.filter(pl.col("node_id").is_not_null()).select("iteration", "node_id")
    left = taken.select(pl.col("iteration").unique()).join(nodes, how="cross").join(taken, on=taken.columns, how="anti")
    free = host.with_row_index("row").filter(pl.col("node_id").is_null())
    key, number = ["iteration", "name"], pl.int_range(pl.len())
    left = left.sort("rf_id").select(*key, "node_id", nth=number.over(key), size=pl.len().over(key))
    free = free.sort("start_ns").select(*key, "row", nth=number.over(key), size=pl.len().over(key))
    found = free.join(left, on=[*key, "nth", "size"]).select("row", also="node_id")
    both = host.with_row_index("row").join(found, on="row", how="left", maintain_order="left")
    rule = pl.when(pl.col("also").is_not_null()).then(pl.lit(RULES[-1])).otherwise("rule")
    return both.with_columns(pl.coalesce("node_id", "also"), rule=rule).drop("row", "also")


def _device_work(events: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """Every event of a device, with the linked op around the call that launched it."""
    columns = ("event_id", "correlation", "name", "category", "device", "stream", "start_ns", "dur_ns")
    work = events.filter(pl.col("category").is_in(list(DEVICE_CATEGORIES))).select(*columns, "external_id")
    calls = events.filter(
        pl.col("category").is_in(CALL_CATEGORIES) & (pl.col("correlation") != 0) & pl.col("thread").is_not_null()
    ).select("correlation", "thread", launch_id="event_id", at_ns="start_ns")
    before = pl.col("at_ns") <= pl.col("start_ns")
    launched = work.join(calls, on="correlation", how="left").sort(before.fill_null(value=False), "at_ns")
    launched = launched.unique("event_id", keep="last").sort("thread", "at_ns", "event_id", nulls_last=True)
    called = launched.filter(pl.col("launch_id").is_not_null())
    codes = pl.concat([host["thread"], called["thread"]]).rank("dense").cast(pl.Int64).to_numpy(writable=True)
    lane, at_lane = codes[: len(host)], codes[len(host) :]
    start = host["start_ns"].to_numpy(writable=True)
    end = start + host["dur_ns"].to_numpy()
    at = called["at_ns"].to_numpy(writable=True)
    inner = innermost_at(lane, start, end, at_lane, at, np.zeros(len(at), np.bool_))
    linked = host["node_id"].is_not_null().to_numpy()
    around = np.where(inner >= 0, innermost(nearest_encloser(lane, start, end), linked)[inner], -1)
    rows = host.select("node_id", "iteration", "rule", "external_id")[np.where(around >= 0, around, 0)]
    found = called.select("event_id").hstack(
        rows.select(pl.when(pl.Series(around >= 0)).then(pl.all().exclude("external_id")))
    )
    by_id = host.filter(pl.col("node_id").is_not_null()).unique("external_id", keep="first")
    orphans = launched.filter(pl.col("launch_id").is_null() & (pl.col("external_id") != pl.col("correlation")))
    orphans = orphans.join(by_id, on="external_id").select("event_id", "node_id", "iteration", rule=pl.lit(RULES[1]))
    work = launched.join(pl.concat([found, orphans]), on="event_id", how="left").sort("event_id")
    return work.select("event_id", "node_id", "iteration", "launch_id", *columns[1:], "rule")


def _nodes(nodes: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """All nodes, for every iteration, with the event that each is."""
    found = host.filter(pl.col("node_id").is_not_null()).select(
        "node_id", "iteration", "event_id", "start_ns", "dur_ns", host_thread="thread", rule="rule"
    )
    iterations = found.select(pl.col("iteration").unique().sort())
    repeated = iterations.join(nodes.drop("start_ns", "dur_ns", "category", "args"), how="cross")
    return repeated.join(found, on=["node_id", "iteration"], how="left", maintain_order="left")


def _report(linked: pl.DataFrame, nodes: pl.DataFrame, host: pl.DataFrame, device: pl.DataFrame) -> pl.DataFrame:
    each = linked.filter(pl.col("node_id").is_in(nodes["node_id"].implode()))
    parts = {
        "nodes": each.group_by("rule").agg(amount=pl.len()),
        "host ops": host.group_by("rule").agg(amount=pl.len()),
        "device work": device.group_by("rule").agg(amount=pl.len()),
        "device time": device.group_by("rule").agg(amount=pl.col("dur_ns").sum()),
    }
    above = each.select("iteration", parent="node_id", begin="start_ns", end=pl.col("start_ns") + pl.col("dur_ns"))
    inside = each.filter(pl.col("event_id").is_not_null()).join(above.drop_nulls(), on=["iteration", "parent"])
    within = (pl.col("start_ns") >= pl.col("begin")) & (pl.col("start_ns") + pl.col("dur_ns") <= pl.col("end"))
    rule = pl.when(within).then(pl.lit("within its parent"))
    parts["nesting"] = inside.group_by(rule=rule).agg(amount=pl.len())
    shares = [
        part.sort(
            pl.col("rule").replace_strict({rule: k for k, rule in enumerate(RULES)}, default=len(RULES)), "rule"
        ).select(
            pl.lit(what).alias("what"),
            "rule",
            pl.col("amount").cast(pl.Int64),
            share=pl.col("amount") / pl.col("amount").sum(),
        )
        for what, part in parts.items()
    ]
    return pl.concat(shares)


def _unlinked(linked: pl.DataFrame, nodes: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    missing = linked.filter(pl.col("event_id").is_null() & pl.col("node_id").is_in(nodes["node_id"].implode()))
    sides = (("execution trace", missing), ("profile", host.filter(pl.col("node_id").is_null())))
    counts = [
        rows.group_by("name").agg(count=pl.len().cast(pl.Int64)).select(pl.lit(side).alias("side"), "name", "count")
        for side, rows in sides
    ]
    return pl.concat(counts).sort("side", "count", "name", descending=[False, True, False])
