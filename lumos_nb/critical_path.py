"""The longest path through a graph: when each op runs, what the step's end hangs on, what it could be otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from lumos_nb._replay_kernels import NEVER, Int32s, Int64s, ends, last_ops, latest_ends, path_to
from lumos_nb._replay_plan import Plan
from lumos_nb.graph import Graph


@dataclass(frozen=True, slots=True)
class Result:
    """A replayed graph. Times are int64 ns.

    Attributes
    ----------
    graph
        What was replayed.
    ops
        `graph.ops` with `start_ns` and `dur_ns` as replayed, and `measured_start_ns` (the graph's own start), `slack_ns`
        (how much longer the op could run before the last step ends later; null if it could run for ever) and
        `critical` (on `path`).
    origin_ns
        The earliest measured start: the 0 of the replay's clock, so that replayed and measured times compare.
    step_ns
        Time of the last step: from the end of the step before it (from the origin if there is none) to its own end.
        A step ends when its last rank ends it.
    step_ends
        `rank`, `step`, `end_ns`: when each rank finished each step.
    makespan_ns
        From the origin to the end of the last op of all, which may be an op that no step's end waits for.
    path
        The critical path, in time order, to the op that ends the last step: `op_id`, `rank`, `lane`, `kind`, `name`,
        `start_ns`, `dur_ns`, `path_ns` (what the op adds to the path: all of `dur_ns`, or 0 where the path leaves it at
        its start), and of the edge by which the op was reached `rule`, `evidence` and `lag_ns` (null for the first
        op). Where several edges or ops bind equally it goes by the op in the lowest row.
    composition
        The part of the path inside the step: `kind`, `rank`, `time_ns`, `share` (of the step), longest first. A lag is
        of kind `lag:<rule>` and of the rank that its edge leads to. `time_ns` sums to `step_ns`.
    composition_from_origin
        The same for the whole path, which starts at the origin: sums to the time at which the last step ends.
    """

    graph: Graph
    ops: pl.DataFrame
    origin_ns: int
    step_ns: int
    step_ends: pl.DataFrame
    makespan_ns: int
    path: pl.DataFrame
    composition: pl.DataFrame
    composition_from_origin: pl.DataFrame

    def __repr__(self) -> str:
        return (
            f"Result(step {self.step_ns / 1e6:.3f} ms, makespan {self.makespan_ns / 1e6:.3f} ms, {len(self.ops)} ops, "
            f"{len(self.path)} on the critical path)"
        )


def replay(graph: Graph) -> Result:
    """When every op of `graph` runs if each starts as soon as its edges let it.

    The longest path in the (max, +) sense, in int64: exact as long as no duration depends on when an op runs and every
    resource keeps its order. An op without in-edges starts at the origin. Slack is that of the critical path method
    (Kelley and Walker, 1959), for growth of an op's duration: an edge that counts from an op's start doesn't limit it.

    Parameters
    ----------
    graph
        Ops and edges. Rows need not be in a topological order, but replay is faster if they are.

    Raises
    ------
    SchemaError
        A table lacks a column or has one of the wrong type.
    GraphError
        The edges make a cycle or name unknown ops, an op is repeated, or a duration or lag is negative.

    Examples
    --------
    >>> result = replay(graph)
    >>> result.step_ns, result.path.tail(3), result.composition
    """
    plan = Plan.of(graph)
    end = ends(plan.ptr, plan.src, plan.lag_ns, plan.from_start, plan.dur_ns)
    origin_ns = graph.ops["start_ns"].min() or 0
    assert isinstance(origin_ns, int)
    lasts = last_ops(end, plan.group, plan.row, len(plan.groups))
    step_ends = plan.groups.with_columns(end_ns=origin_ns + end[lasts])
    last, before = _step_bounds(plan, end, lasts)
    path = _path(graph, plan, end, last, origin_ns)
    step_end = int(end[last]) if last >= 0 else 0
    return Result(
        graph=graph,
        ops=_replayed_ops(graph, plan, end, step_end, path, origin_ns),
        origin_ns=origin_ns,
        step_ns=step_end - before,
        step_ends=step_ends,
        makespan_ns=int(end.max(initial=0)),
        path=path,
        composition=_composition(path, origin_ns + before, origin_ns + step_end),
        composition_from_origin=_composition(path, origin_ns, origin_ns + step_end),
    )


def _step_bounds(plan: Plan, end: Int64s, lasts: Int32s) -> tuple[int, int]:
    """Position of the op that ends the last step (-1: no ops), and when the step before it ended (0: there is none)."""
    by_step = plan.groups.select("step", end=end[lasts], row=plan.row[lasts], position=lasts)
    steps = (
        by_step.sort("end", "row", descending=[True, False]).group_by("step", maintain_order=True).first().sort("step")
    )
    if steps.is_empty():
        return -1, 0
    return steps["position"][-1], steps["end"][-2] if len(steps) > 1 else 0


def _replayed_ops(
    graph: Graph, plan: Plan, end: Int64s, step_end: int, path: pl.DataFrame, origin_ns: int
) -> pl.DataFrame:
    due = np.full_like(end, NEVER)
    if len(plan.groups):
        due[plan.group >= int(np.argmax(plan.groups["step"] == plan.groups["step"][-1]))] = step_end
    latest = latest_ends(plan.ptr, plan.src, plan.lag_ns, plan.from_start, plan.dur_ns, due)
    start, slack = np.empty_like(end), np.empty_like(end)
    start[plan.row] = origin_ns + end - plan.dur_ns
    slack[plan.row] = np.where(latest == NEVER, -1, latest - end)
    return graph.ops.with_columns(
        start_ns=start,
        measured_start_ns=pl.col("start_ns"),
        slack_ns=pl.Series(slack).replace(-1, None),
        critical=pl.col("op_id").is_in(path["op_id"].implode()),
    )


def _path(graph: Graph, plan: Plan, end: Int64s, last: int, origin_ns: int) -> pl.DataFrame:
    at, by = path_to(plan.ptr, plan.src, plan.lag_ns, plan.from_start, plan.dur_ns, end, last).T
    edges = graph.edges[plan.edge[by[1:]]].select("rule", "evidence", "lag_ns")
    left_at_start = np.append(plan.from_start[by[1:]], [False])[: len(at)]
    ops = graph.ops[plan.row[at]].select("op_id", "rank", "lane", "kind", "name", "start_ns", "dur_ns")
    return ops.with_columns(
        start_ns=origin_ns + end[at] - plan.dur_ns[at], path_ns=np.where(left_at_start, 0, plan.dur_ns[at])
    ).with_columns(pl.concat([edges.clear(min(len(at), 1)), edges]))


def _composition(path: pl.DataFrame, from_ns: int, to_ns: int) -> pl.DataFrame:
    """Time of `path` between two times by kind and rank, lags by rule."""
    start = pl.col("start_ns")
    spans = pl.concat(
        [
            path.select("kind", "rank", start="start_ns", end=start + pl.col("path_ns")),
            path.filter(pl.col("lag_ns") > 0)
            .select("rank", kind="lag:" + pl.col("rule"), start=start - pl.col("lag_ns"), end="start_ns")
            .select("kind", "rank", "start", "end"),
        ]
    )
    inside = pl.col("end").clip(from_ns, to_ns) - pl.col("start").clip(from_ns, to_ns)
    return (
        spans.select("kind", "rank", time_ns=inside)
        .group_by("kind", "rank")
        .agg(pl.col("time_ns").sum())
        .filter(pl.col("time_ns") > 0)
        .with_columns(share=pl.col("time_ns") / max(to_ns - from_ns, 1))
        .sort("time_ns", "kind", "rank", descending=[True, False, False])
    )
