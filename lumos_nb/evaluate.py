"""Predicted against measured: what a graph says of a step from costs that other steps gave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import polars as pl

from lumos_nb.costs.host import Pool, with_families
from lumos_nb.critical_path import replay, sweep
from lumos_nb.errors import GraphError, items_of
from lumos_nb.executors import spread
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.lanes import ABSENT
from lumos_nb.partition import breakdown
from lumos_nb.schema import DEVICE_KINDS
from lumos_nb.steady import repeat
from lumos_nb.traces.run import Run
from lumos_nb.waits import WAITS, Sightings

OWN_KINDS = ("kernel", "memcpy", "memset", "cpu", "alloc")
"""What a mechanistic prediction takes from the step that it predicts: computation. All else comes from other steps."""

POOLED_KINDS = ("gap", "launch", "wait", "comm", "unexplained")

OP_LADDER = {
    # `of`: how many ops of the site the step has. Only where that is equal is the nth here the nth there.
    "op": ("rank", "kind", "site", "of", "nth"),
    "name": ("rank", "kind", "name"),
    "family": ("rank", "kind", "family"),
    "all": ("kind",),
}
LAG_LADDER = {"edge": ("rank", "rule", "site", "nth"), "rule": ("rank", "rule"), "all": ("rule",)}


@dataclass(frozen=True, slots=True)
class PooledCosts:
    """What steps cost besides computation, pooled over the graphs of several steps.

    Attributes
    ----------
    ops
        `mean_ns`, and `delay_ns`, the median of what held the op up without an explanation: of the same op of the same
        call site in the other steps, else of what has its name, and so on.
    lags
        `lag_ns`, the median latency of an edge: of that rule to the same op in the other steps, else of all of it.
    """

    ops: Pool
    lags: Pool

    def __repr__(self) -> str:
        return f"<PooledCosts of {self.ops} and {self.lags}>"

    @classmethod
    def of(cls, graphs: Iterable[Graph]) -> PooledCosts:
        """Pool the graphs of several steps of one run."""
        graphs = list(graphs)
        ops = with_families(pl.concat([_with_delays(g) for g in graphs]))
        # Gaps add up along a thread, so their mean is wanted, long ones included; not so with transfers.
        is_comm, dur_ns = pl.col("kind").first() == "comm", pl.col("dur_ns")
        mean_ns = pl.when(is_comm).then(dur_ns.median()).otherwise(dur_ns.mean())
        lag_ns = pl.col("lag_ns").median()
        edges = pl.concat([_named_edges(g) for g in graphs])
        return cls(
            Pool.of(ops, OP_LADDER, mean_ns=mean_ns, delay_ns=pl.col("delay_ns").median()),
            Pool.of(edges, LAG_LADDER, pooled_ns=lag_ns),
        )


def _with_delays(graph: Graph) -> pl.DataFrame:
    """Ops of the step with the unexplained delay before each (0 where there is none), without the delays' own rows."""
    delays = (
        graph.edges.filter(pl.col("rule") == "delay")
        .join(graph.ops.select(src="op_id", delay_ns="dur_ns"), on="src")
        .select(op_id="dst", delay_ns="delay_ns")
    )
    own = graph.ops.filter((pl.col("step") == graph.step) & ~pl.col("op_id").is_in(_delay_rows(graph).implode()))
    return (
        own.join(delays, on="op_id", how="left", maintain_order="left")
        .with_columns(pl.col("delay_ns").fill_null(0))
        .select("op_id", *OP_LADDER["op"], "name", "dur_ns", "delay_ns")
    )


def _delay_rows(graph: Graph) -> pl.Series:
    """`op_id` of the rows that delay the op behind them: the other unexplained rows stand for waits of their own."""
    return graph.edges.filter(pl.col("rule") == "delay")["src"]


def _named_edges(graph: Graph) -> pl.DataFrame:
    """Edges that carry a latency, named after the op that they lead to (through its delay)."""
    through = graph.edges.filter(pl.col("rule") == "delay").select(dst="src", to="dst")
    named = graph.edges.filter(pl.col("rule").is_in(["launch", "stream", "queue"])).join(through, on="dst", how="left")
    about = graph.ops.select("rank", "site", "nth", to="op_id")
    return named.with_columns(to=pl.coalesce("to", "dst")).join(about, on="to").select(*LAG_LADDER["edge"], "lag_ns")


def with_pooled_costs(graph: Graph, costs: PooledCosts, *, absent_given: bool = False) -> Graph:
    """The graph of a step with everything but its own computation replaced by what other steps cost.

    Of a kind of which the other steps have nothing at all it stays as measured. `absent_given` keeps the step's own
    collectives where ranks without a trace take part: their lateness is then taken as given, not predicted.
    """
    ops = costs.ops.find(with_families(graph.ops), "mean_ns", "delay_ns")
    pooled = pl.coalesce("mean_ns", "dur_ns").round().cast(pl.Int64)
    here = pl.col("step") == graph.step
    # Behind the wait for ranks without a trace lies an estimated transfer: only the two together were measured.
    absent = graph.ops.filter((pl.col("name") == ABSENT) & absent_given).select(src="op_id")
    estimated = graph.edges.filter(pl.col("rule") == "collective").join(absent, on="src", how="semi")["dst"]
    given = pl.concat([absent["src"], estimated])
    through = graph.edges.filter(pl.col("rule") == "delay").select(dst="src", to="dst")
    ops = ops.with_columns(
        dur_ns=pl.when(here & pl.col("op_id").is_in(through["dst"].implode()))
        .then(0)
        .when(here & pl.col("kind").is_in(POOLED_KINDS) & ~pl.col("op_id").is_in(given.implode()))
        .then(pooled)
        .otherwise("dur_ns"),
        delay_ns=pl.when(here).then(pl.col("delay_ns").fill_null(0).round().cast(pl.Int64)).otherwise(0),
    )
    about = ops.select("rank", "site", "nth", "delay_ns", to="op_id")
    edges = graph.edges.join(through, on="dst", how="left", maintain_order="left").with_columns(
        to=pl.coalesce("to", "dst")
    )
    edges = costs.lags.find(edges.join(about, on="to", how="left", maintain_order="left"), "pooled_ns")
    lag = pl.coalesce("pooled_ns", "lag_ns").round().cast(pl.Int64)
    delay = pl.when(pl.col("rule") == "delay").then(0).otherwise("delay_ns").fill_null(0)
    edges = edges.with_columns(lag_ns=lag + delay).select(graph.edges.columns)
    return replace(graph, ops=ops.select(graph.ops.columns), edges=edges)


def without_rules(graph: Graph, *dropped: str) -> Graph:
    """The graph without the edges of some rules: an ablation."""
    return replace(graph, edges=graph.edges.filter(~pl.col("rule").is_in(dropped)))


def mechanistic(
    run: Run | Recording, steps: Sequence[int] | None = None, *, executor: Executor | str | None = None
) -> pl.DataFrame:
    """Predict each step from its own computation and the other steps' launch latencies, host gaps, waits and transfers.

    Parameters
    ----------
    run
        A run with at least two steps whose beginning is known.
    steps
        The steps to predict and to pool; None takes all but the first profiled one, which holds one-off costs.
    executor
        Builds and predicts a step each, as in `executors.spread`.

    Returns
    -------
    table
        A row a step: `step`, `measured_ns`, `predicted_ns`, `error`, `null_ns` (the step before, or after the first),
        `null_error`, `absent_given_error` (with the step's own collectives where ranks without a trace take part), then
        the errors of ablations (`no_events_error`: without waits between streams; `no_waits_error`: without waits of
        host threads too; `no_joins_error`: without joins of ranks), and of the predicted path `wait_share` (that only
        waits), `host_share` (that is the host's) and `own_share` (that the prediction was given: near 1 the error says
        nothing about the graph).
    """
    recording = run if isinstance(run, Recording) else Recording.of(run)
    times = recording.step_times()
    chosen = chosen_steps(recording, steps, least=2)
    measured = _measured(times)
    own = dict(zip(chosen, spread(executor, partial(build_graph, recording), chosen), strict=True))
    return pl.DataFrame([*spread(executor, partial(_predicted, recording, own, measured), chosen)])


def _predicted(
    recording: Recording, own: Mapping[int, Graph], measured: Mapping[int, int], step: int
) -> dict[str, object]:
    """A row of `mechanistic`."""
    costs = PooledCosts.of(left_out(recording, own, step).values())
    given = with_pooled_costs(own[step], costs, absent_given=True)
    return _scored(with_pooled_costs(own[step], costs), given, measured[step], measured[before(step, [*own])])


def chosen_steps(recording: Recording, steps: Sequence[int] | None, *, least: int) -> list[int]:
    """`steps`, each once and known, or all but the first profiled one, which holds one-off costs; at least `least`."""
    known = recording.step_times()["step"][1:] if steps is None else items_of("steps", steps, "a list of steps")
    chosen = list(dict.fromkeys(map(recording.known_step, known)))
    if len(chosen) < least:
        raise GraphError(
            f"a prediction from other steps needs at least {least} steps besides the first, not {chosen}: record more "
            "(active= of the profiler's schedule, steps= of ln.capture)."
        )
    return chosen


def leave_one_out(recording: Recording, steps: Sequence[int]) -> Iterator[tuple[int, Graph, dict[int, Graph]]]:
    """Each step: the one `before` it, its graph, and the others' graphs, which know nothing of it (`left_out`)."""
    own = {step: build_graph(recording, step) for step in steps}
    for step in steps:
        yield before(step, steps), own[step], left_out(recording, own, step)


def before(step: int, steps: Sequence[int]) -> int:
    """The one of some steps before one of them; of the first the next."""
    place = steps.index(step)
    return steps[place - 1] if place else steps[1]


def left_out(recording: Recording, own: Mapping[int, Graph], step: int) -> dict[int, Graph]:
    """The graphs of some steps but for one, of which they know nothing."""
    # Only waits that the trace does not name are told by other steps, so only they make a graph depend on `unseen`.
    told = any((graph.edges["evidence"] == "time").any() for graph in own.values())
    others = {other: graph for other, graph in own.items() if other != step}
    return {other: build_graph(recording, other, unseen=step) for other in others} if told else others


def _measured(times: pl.DataFrame) -> dict[int, int]:
    """Step -> its time. A step of no time has no error: its work had ended before the step before it."""
    for step in times.filter(pl.col("step_ns") <= 0)["step"].head(1):
        raise GraphError(f"step {step} took no time by the trace: all its work had ended when the step before it did.")
    return dict(times.select("step", "step_ns").iter_rows())


def _scored(graph: Graph, given: Graph, measured_ns: int, null_ns: int) -> dict[str, object]:
    result = replay(graph)
    path = dict(result.composition.group_by("kind").agg(pl.col("time_ns").sum()).iter_rows())

    def error(predicted_ns: int) -> float:
        return predicted_ns / measured_ns - 1

    def share(kinds: Iterable[str]) -> float:
        return float(sum(path.get(kind, 0) for kind in kinds) / max(result.step_ns, 1))

    return {
        "step": graph.step,
        "measured_ns": measured_ns,
        "predicted_ns": result.step_ns,
        "error": error(result.step_ns),
        "null_ns": null_ns,
        "null_error": error(null_ns),
        "absent_given_error": error(replay(given).step_ns),
        "no_events_error": error(replay(without_rules(graph, "event")).step_ns),
        "no_waits_error": error(replay(without_rules(graph, "event", "sync")).step_ns),
        "no_joins_error": error(replay(without_rules(graph, "collective")).step_ns),
        "wait_share": share(["wait"]),
        "host_share": share(["cpu", "gap", "alloc", "launch"]),
        "own_share": share(OWN_KINDS),
    }


HALVED = {
    "kernels": ("kernel", "memcpy", "memset"),
    "host": ("cpu", "gap", "launch"),
    "transfers": ("comm",),
}


def what_ifs(graph: Graph) -> pl.DataFrame:
    """What halving all kernels, all host work or all transfers makes of a step, in its steady state, beside bounds.

    A graph may replay a step exactly and still answer every what-if wrongly; these answers can be held against what
    anyone can add up: no step is shorter than what its busiest thread, stream or link must do.

    Returns
    -------
    table
        A row a change: `change`, `step_ns`, `times` (of the unchanged step), `bound_ns` (busiest lane after the
        change).
    """
    steady = repeat(graph)
    present = set(steady.ops["kind"].unique())
    changes = {"none": ()} | HALVED
    scenarios = [{"scenario": name} | {k: 0.5 for k in kinds if k in present} for name, kinds in changes.items()]
    swept = sweep(steady, scenarios)
    work = graph.ops.filter((pl.col("kind") != "boundary") & (pl.col("lane") != "net"))
    bounds = []
    for kinds in changes.values():
        dur = pl.col("dur_ns") * pl.when(pl.col("kind").is_in(kinds)).then(0.5).otherwise(1.0)
        bounds.append(work.group_by("rank", "lane").agg(dur.sum())["dur_ns"].max())
    base = swept["step_ns"][0]
    return swept.select(
        change="scenario",
        step_ns="step_ns",
        times=pl.when(base > 0).then(pl.col("step_ns") / base),
        bound_ns=pl.Series(bounds, dtype=pl.Float64),
    )


DELAY_MARK = r"^delay=([0-9]+(?:\.[0-9]+)?)(?:ms)?$"
"""Host work that a recording names so was delayed by that many milliseconds on purpose."""


def delayed_steps(run: Run | Recording) -> pl.DataFrame:
    """Predict each step of a run with logged delays from the steps that were delayed otherwise.

    The graph of another step gets this step's logged delay in place of its own, and is replayed; the prediction is
    the median over all such steps, the null their median time unchanged.

    Returns
    -------
    table
        A row a step: `step`, `delay_ns`, `delayed_rank`, `measured_ns`, `predicted_ns`, `error`, `null_ns`,
        `null_error`, `shifted_error` (of plain arithmetic: the other steps' times plus the difference of the delays),
        `path_share` (of the measured step's path that lies on the delayed rank), `peer_wait_ns` (the
        others' waiting for it).
    """
    recording = run if isinstance(run, Recording) else Recording.of(run)
    times = _measured(recording.step_times().filter(~pl.col("edge")))
    graphs = {step: build_graph(recording, step) for step in times}
    logged = {step: _logged_delay(graph) for step, graph in graphs.items()}
    delayed = [mark for mark in logged.values() if mark is not None]
    if not delayed:
        raise GraphError("no step logs a delay; the recording needs a range named 'delay=<ms>ms' around it.")
    if len({delay_ns for delay_ns, _ in delayed}) < 2:
        raise GraphError(
            f"every logged delay is {delayed[0][0]} ns; a prediction needs steps that were delayed otherwise."
        )
    rank = delayed[0][1]
    rows = []
    for step, measured_ns in times.items():
        delay_ns = (logged[step] or (0, rank))[0]
        others = [s for s, mark in logged.items() if mark is not None and mark[0] != delay_ns]
        predicted = [replay(_with_delay(graphs[s], delay_ns)).step_ns for s in others]
        result = replay(graphs[step])
        on_rank = result.composition.filter(pl.col("rank") == rank)["time_ns"].sum() / result.step_ns
        waits = (
            breakdown(graphs[step])
            .filter((pl.col("rank") != rank) & (pl.col("part") == "exposed_wait"))["time_ns"]
            .sum()
        )
        predicted_ns, null_ns = median(predicted), median(times[s] for s in others)
        shifted_ns = median(times[s] + delay_ns - (logged[s] or (0, rank))[0] for s in others)
        rows.append(
            {
                "step": step,
                "delay_ns": delay_ns,
                "delayed_rank": rank,
                "measured_ns": measured_ns,
                "predicted_ns": predicted_ns,
                "error": predicted_ns / measured_ns - 1,
                "null_ns": null_ns,
                "null_error": null_ns / measured_ns - 1,
                "shifted_error": shifted_ns / measured_ns - 1,
                "path_share": on_rank,
                "peer_wait_ns": waits,
            }
        )
    return pl.DataFrame(rows)


def _logged_delay(graph: Graph) -> tuple[int, int] | None:
    """The delay that a step logs, in ns, and its rank; None for a step without one."""
    marked = graph.ops.filter(pl.col("name").str.contains(DELAY_MARK) & (pl.col("kind") == "cpu"))
    if marked.is_empty():
        return None
    delay_ms = marked["name"].str.extract(DELAY_MARK).cast(pl.Float64)
    return round(float(delay_ms[0]) * 1e6), int(marked["rank"][0])


def _with_delay(graph: Graph, delay_ns: int) -> Graph:
    marked = pl.col("name").str.contains(DELAY_MARK) & (pl.col("kind") == "cpu")
    return replace(graph, ops=graph.ops.with_columns(dur_ns=pl.when(marked).then(delay_ns).otherwise("dur_ns")))


SCORED_CALLS = {
    "event": ("wait_event", "sync_event"),
    "sync": ("sync_stream",),
    "all": ("wait_event", "sync_event", "sync_stream"),
}


def score_waits(run: Run | Recording) -> pl.DataFrame:
    """How well waits are inferred where a trace names none: its `cuda_sync` records against what is found without them.

    A wait links two ops: the first that the waiting stream was issued after the call, or the blocked call itself, and
    the last that the awaited stream had been issued at the record. So a wait for a stream without work, which holds
    nothing up, is none, and waits that say the same count once. Calls that no record names are not scored.

    Returns
    -------
    table
        Rows `rule`: "event" (streams, and threads in an event synchronise), "sync" (stream synchronises), "all". `tp`,
        `fp`, `fn`: links found, found wrongly, missed. `precision`, `recall`: null where there is nothing to share.

    Examples
    --------
    >>> score_waits(run)["rule"].to_list()  # on a CPU there is nothing to score
    ['event', 'sync', 'all']
    """
    recording = run if isinstance(run, Recording) else Recording.of(run)

    def found(records: pl.DataFrame) -> pl.DataFrame:
        steps = recording.ops["step"].drop_nulls().unique().sort()
        seen = Sightings(recording.ops, records)
        waits = [seen.waits(step, step) for step in steps]
        return pl.concat([pl.DataFrame(schema=WAITS), *waits])

    named = found(recording.records).filter(pl.col("pattern") == "cuda_sync")
    guessed = found(recording.records.clear()).join(named, on="op_id", how="semi")
    true, predicted = _links(recording.ops, named), _links(recording.ops, guessed)
    rows = []
    for rule, calls in SCORED_CALLS.items():
        is_rule = pl.col("call").is_in(calls)
        want, have = (set(links.filter(is_rule).select("src", "dst").iter_rows()) for links in (true, predicted))
        tp, fp, fn = len(want & have), len(have - want), len(want - have)
        share = {"precision": tp / len(have) if have else None, "recall": tp / len(want) if want else None}
        rows.append({"rule": rule, "tp": tp, "fp": fp, "fn": fn} | share)
    return pl.DataFrame(rows, schema_overrides={"precision": pl.Float64, "recall": pl.Float64})


def _links(ops: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """`call`, `src`, `dst` of waits: raw ids of the op waited for, and of the op or blocked call that waits."""
    work = ops.filter(pl.col("kind").is_in(DEVICE_KINDS)).select(
        "rank", "lane", issue_ns=pl.coalesce("launch_ns", "start_ns"), op="op_id"
    )
    work = work.sort("issue_ns", "op")
    calls = ops.select("op_id", "call", call_ns="start_ns")
    waits = waits.join(calls, on="op_id").sort("record_ns").join_asof(
        work.rename({"lane": "record_lane", "op": "held"}), left_on="record_ns", right_on="issue_ns",
        by=["rank", "record_lane"], check_sortedness=False,
    ).drop("issue_ns")  # fmt: skip
    waits = waits.sort("call_ns").join_asof(
        work.rename({"op": "first"}), left_on="call_ns", right_on="issue_ns", by=["rank", "lane"], strategy="forward",
        check_sortedness=False,
    )  # fmt: skip
    dst = pl.when(pl.col("lane").is_null()).then("op_id").otherwise("first")
    return waits.select("call", src=pl.coalesce("target", "held"), dst=dst).drop_nulls()
