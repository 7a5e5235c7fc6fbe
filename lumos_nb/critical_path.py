"""The longest path through a graph: when each op runs, what the step's end hangs on, what it could be otherwise."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import polars as pl

from lumos_nb._replay_kernels import (
    NEVER,
    Floats,
    Int32s,
    Int64s,
    last_ops,
    latest_ends,
    path_times,
    path_to,
    scaled_ends,
)
from lumos_nb._replay_plan import LONGEST_NS, Plan, SweepPlan
from lumos_nb.display import format_ns
from lumos_nb.errors import ScenarioError, is_number, is_whole, require_flags, require_memory, shown
from lumos_nb.executors import spread
from lumos_nb.graph import Graph
from lumos_nb.traces.export import OnAClock


@dataclass(frozen=True, slots=True, repr=False)
class Result(OnAClock):
    """A replayed graph. Times are int64 ns.

    Attributes
    ----------
    graph
        What was replayed.
    ops
        `graph.ops` with `start_ns` and `dur_ns` as replayed, and `measured_start_ns` (the graph's own start),
        `slack_ns` (how much longer the op could run before the last step ends later; null if it could run for ever)
        and `critical` (on `path`).
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

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._caption(), self.composition)]

    def _caption(self) -> str:
        return f"Step of {format_ns(self.step_ns)}: its critical path, {len(self.path):,} of {len(self.ops):,} ops"


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
    return result_of(graph, plan, plan.starts())


def result_of(graph: Graph, plan: Plan, start: Int64s) -> Result:
    """What follows from when the ops of `plan` start (n,), from the replay's 0: steps, slack, path."""
    end = start + plan.dur_ns
    origin_ns = graph.ops["start_ns"].min() or 0
    assert isinstance(origin_ns, int)
    lasts = last_ops(end, plan.group, plan.row, len(plan.groups))
    step_ends = plan.groups.with_columns(end_ns=origin_ns + end[lasts])
    last, before = step_bounds(plan, end, lasts)
    path = path_of(plan, start, last, origin_ns, graph.ops.__getitem__, graph.edges.__getitem__)
    step_end = int(end[last]) if last >= 0 else 0
    return Result(
        graph=graph,
        ops=_replayed_ops(graph, plan, end, step_end, path, origin_ns),
        origin_ns=origin_ns,
        step_ns=step_end - before,
        step_ends=step_ends,
        makespan_ns=int(end.max(initial=0)),
        path=path,
        composition=composition_of(path, origin_ns + before, origin_ns + step_end),
        composition_from_origin=composition_of(path, origin_ns, origin_ns + step_end),
    )


def step_bounds(plan: Plan, end: Int64s, lasts: Int32s) -> tuple[int, int]:
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
    start = np.empty_like(end)
    start[plan.row] = origin_ns + end - plan.dur_ns
    return graph.ops.with_columns(
        start_ns=start,
        measured_start_ns=pl.col("start_ns"),
        slack_ns=pl.Series(slack_of(plan, end, step_end)).replace(-1, None),
        critical=pl.col("op_id").is_in(path["op_id"].implode()),
    )


def slack_of(plan: Plan, end: Int64s, step_end: int) -> Int64s:
    """How much longer each row (n,) could run before the last step ends after `step_end`; -1: for ever."""
    latest, slack = np.full((len(end), 2), NEVER), np.empty_like(end)
    if len(plan.groups):
        last = int(np.argmax(plan.groups["step"] == plan.groups["step"][-1]))
        latest[:, 1] = np.where(plan.group >= last, step_end, NEVER)
    latest_ends(plan.ptr, plan.src, plan.lag_ns, plan.from_start, plan.dur_ns, latest)
    slack[plan.row] = np.where(latest[:, 1] > NEVER // 2, -1, latest[:, 1] - end)
    return slack


Rows = Callable[[Int32s], pl.DataFrame]
"""The rows of a table that are asked for."""


def path_of(plan: Plan, start: Int64s, last: int, origin_ns: int, ops_at: Rows, edges_at: Rows) -> pl.DataFrame:
    """`Result.path` to the op at position `last`."""
    at, by = path_to(plan.ptr, plan.src, plan.lag_ns, plan.from_start, plan.dur_ns, start, last).T
    edges = edges_at(plan.edge[by[1:]]).select("rule", "evidence", "lag_ns")
    left_at_start = np.append(plan.from_start[by[1:]], [False])[: len(at)]
    ops = ops_at(plan.row[at]).select("op_id", "rank", "lane", "kind", "name", "start_ns", "dur_ns")
    return ops.with_columns(
        start_ns=origin_ns + start[at], path_ns=np.where(left_at_start, 0, plan.dur_ns[at])
    ).with_columns(pl.concat([edges.clear(min(len(at), 1)), edges]))


def composition_of(path: pl.DataFrame, from_ns: int, to_ns: int) -> pl.DataFrame:
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


class PandasFrame(Protocol):
    """What a sweep asks of a table of scenarios that is not polars'."""

    def to_dict(self, orient: Literal["list"]) -> Mapping[Hashable, list[Any]]:
        """Return the columns by name."""

    def isna(self) -> PandasFrame:
        """Return where there is no value."""


@dataclass(frozen=True, slots=True)
class _Block:
    """What a sweep finds out about k scenarios."""

    step_ns: Floats  # (k,)
    makespan_ns: Floats  # (k,)
    rank_end_ns: Floats  # (ranks, k)
    slope_ns: Int64s  # (classes, k) d step_ns / d scale

    @classmethod
    def joined(cls, blocks: Sequence[_Block]) -> _Block:
        return cls(*(np.concatenate([getattr(b, f.name) for b in blocks], axis=-1) for f in fields(cls)))


def sweep(
    graph: Graph,
    scenarios: pl.DataFrame | PandasFrame | Sequence[Mapping[str, Any]],
    *,
    by: str | pl.Expr = "kind",
    executor: Executor | str | None = None,
    block: int = 64,
    rank_ends: bool = False,
) -> pl.DataFrame:
    """Replay `graph` in many scenarios, each a scale factor a class of ops or lags.

    Equal to `replay` of a graph with the scaled durations, at about 1e9 ops x scenarios a second and core, and without
    a table of ops x scenarios: one pass over the ops runs a block of scenarios, its durations are base times scale, and
    ends live in rows that are taken over when no op needs them any more. Which edge bound an op is kept as one bit a
    scenario, so that one pass back gives all slopes: an end is convex and piecewise linear in the scales, and its slope
    is the time on the path to it.

    Parameters
    ----------
    graph
        Ops and edges.
    scenarios
        One row a scenario, one column a class with its scale (finite, >= 0; 1 where absent or null), and optionally
        `scenario`, a label. polars, pandas, or a list of mappings.
    by
        What classes the ops: a column of the op table, or an expression over it. Ops whose class is null are never
        scaled. The lags of the edges of a rule are of class `lag:<rule>`.
    executor
        Maps blocks over its workers (`executors.spread`): threads share the graph (the passes run without Python's
        lock), other processes are sent it with every block.
    block
        Scenarios in one pass, rounded up to a multiple of 64. Wider ones take less time a scenario and more memory.
    rank_ends
        Also give `rank<r>_end_ns`, when each rank ends the last step, in ns after the replay's origin.

    Returns
    -------
    DataFrame
        One row a scenario: `scenario` (its label, else its row), `step_ns`, `makespan_ns`, `change` (of `step_ns`, as a
        fraction of the unscaled step), and for each class `d_<class>`, the slope of `step_ns` in ns per unit of scale:
        time of the class on the path to the step's end less that on the path to the end of the step before. The
        slopes times the scales sum to `step_ns`. Where paths tie it is the slope of one of them.

    Raises
    ------
    ScenarioError
        A class that the graph lacks, a scale that is not a finite number >= 0, or times that replay would not take.
    SchemaError, GraphError
        As `replay`.

    Examples
    --------
    >>> launches = {"scenario": "launches", "lag:launch": 0, "launch": 0.5}
    >>> sweep(graph, [{"scenario": "operators", "cpu": 0.5}, launches])
    """
    _require(block, rank_ends)
    plan = Plan.of(graph)
    swept = SweepPlan.of(graph, plan, by)
    labels, scale = _scales(scenarios, swept.classes)
    _check_totals(swept, scale, labels)
    blocks = np.split(scale, range(int(block), scale.shape[1], int(block)), axis=1)
    found = _Block.joined(list(spread(executor, partial(sweep_block, swept), blocks)))
    base_ns = pl.lit(_base_step_ns(plan) or None, pl.Float64)
    rank_end_ns = found.rank_end_ns if rank_ends else ()
    return pl.DataFrame({"scenario": labels, "step_ns": found.step_ns, "makespan_ns": found.makespan_ns}).with_columns(
        ((pl.col("step_ns") - base_ns) / base_ns).alias("change"),
        *(pl.Series(f"d_{c}", slope) for c, slope in zip(swept.classes, found.slope_ns, strict=True)),
        *(pl.Series(f"rank{r}_end_ns", end) for r, end in zip(swept.ranks, rank_end_ns, strict=bool(rank_ends))),
    )


def _base_step_ns(plan: Plan) -> int:
    end = plan.starts() + plan.dur_ns
    last, before = step_bounds(plan, end, last_ops(end, plan.group, plan.row, len(plan.groups)))
    return int(end[last]) - before if last >= 0 else 0


def sweep_block(plan: SweepPlan, scale: Floats) -> _Block:
    """One pass forward and one back for scenarios of `scale` (classes, k)."""
    k = scale.shape[1]
    words = -(-k // 64)
    padded = np.ones((len(plan.classes) + 1, 64 * words))
    padded[:-1, :k] = scale
    n_rows = int(plan.row.max(initial=0)) + 1
    latest = np.zeros((2 + len(plan.ranks), 64 * words))
    last = np.full(latest.shape, -1, np.int32)
    later_edges = len(plan.src) - np.count_nonzero(np.diff(plan.ptr))
    won = np.empty((later_edges, words), np.uint64)
    edges = (plan.ptr, plan.src, plan.kind, plan.lag_ns, plan.lag_class)
    ops = (plan.dur_ns, plan.dur_class, plan.row, plan.group)
    scaled_ends(*edges, *ops, padded, np.empty((n_rows, 64 * words)), latest, last, won)
    ends_last = np.argmax(latest[2:], axis=0) + 2 if plan.ranks else np.zeros(64 * words, int)
    every = np.arange(64 * words)
    slope_ns = np.zeros(padded.shape, np.int64)
    through = np.zeros((2, n_rows, words), np.uint64)
    path_times(*edges, *ops, won, last[ends_last, every], last[1], through[0], through[1], slope_ns)
    return _Block(
        step_ns=(latest[ends_last, every] - latest[1])[:k],
        makespan_ns=latest.max(axis=0)[:k],
        rank_end_ns=latest[2:, :k],
        slope_ns=slope_ns[:-1, :k],
    )


_Column = pl.Series | Sequence[Any]


def _scales(
    scenarios: pl.DataFrame | PandasFrame | Sequence[Mapping[str, Any]], classes: Sequence[str]
) -> tuple[pl.Series, Floats]:
    """Labels (k,) and scales (classes, k) of scenarios."""
    columns, count = _columns(scenarios)
    taken_bytes = 3 * 8 * len(classes) * count  # with what is found out of each
    require_memory(taken_bytes, f"a sweep of {count:,} scenarios")
    labels = _labels(columns.pop("scenario", range(count)))
    scale = np.ones((len(classes), count))
    for name, column in columns.items():
        if name not in classes:
            raise ScenarioError(
                f"unchanged: no op or lag is of class {shown(name)}; the graph has {', '.join(classes) or 'none'}."
            )
        scale[classes.index(name)] = _checked_scales(name, column, labels)
    return labels, scale


def _require(block: object, rank_ends: object) -> None:
    require_flags(rank_ends=rank_ends)
    if not is_whole(block, 1):
        raise ScenarioError(f"block={shown(block)}: a block is a whole number of scenarios, at least one.")


def _columns(scenarios: Any) -> tuple[dict[str, Any], int]:
    """Columns of scenarios by name (`_Column`), and how many scenarios there are."""
    if isinstance(scenarios, pl.DataFrame):
        return {column.name: column for column in scenarios}, len(scenarios)
    if hasattr(scenarios, "to_dict") and hasattr(scenarios, "isna") and hasattr(scenarios, "columns"):
        lacks = scenarios.isna().to_dict("list")
        named = {
            _as_text(c): [None if lack else v for v, lack in zip(values, lacks[c], strict=True)]
            for c, values in scenarios.to_dict("list").items()
        }
        return named, len(next(iter(named.values()), ()))
    if (
        isinstance(scenarios, Sequence)
        and not isinstance(scenarios, str | bytes)
        and all(isinstance(scenario, Mapping) for scenario in scenarios)
    ):
        rows = [{_as_text(c): scale for c, scale in scenario.items()} for scenario in scenarios]
        return {c: [row.get(c) for row in rows] for c in dict.fromkeys(c for row in rows for c in row)}, len(rows)
    raise ScenarioError(
        f"scenarios are a {type(scenarios).__name__}; give a list of mappings from class to scale, or a dataframe."
    )


def _as_text(name: object) -> str:
    try:
        return str(name).encode(errors="backslashreplace").decode()  # a table takes no halves of characters
    except ValueError:  # of a number more digits than Python would write
        return shown(name)


def _labels(given: _Column) -> pl.Series:
    """Labels of any kind, as text where they are of several or of one that a table does not take."""
    if isinstance(given, pl.Series):
        return given
    there = [label for label in given if label is not None]
    if all(type(label) is int and abs(label) < 2**63 for label in there):
        return pl.Series("scenario", given, dtype=pl.Int64)
    if all(is_number(label) for label in there):
        return pl.Series("scenario", [None if label is None else float(label) for label in given], dtype=pl.Float64)
    texts = [None if label is None else _as_text(label) for label in given]
    return pl.Series("scenario", texts, dtype=pl.String)


def _checked_scales(name: str, column: _Column, labels: pl.Series) -> Floats:
    """Scales (k,) of a class, 1 where there is none. What is a number is what `errors.is_number` says."""
    if not isinstance(column, pl.Series) and {*map(type, column)} <= {float, type(None)}:  # as they mostly are
        column = pl.Series(column, dtype=pl.Float64)
    if isinstance(column, pl.Series) and column.dtype.is_numeric():
        numbers = column.cast(pl.Float64)
        possible = numbers.is_finite() & (numbers >= 0)
        wrong = ~possible.fill_null(value=True)  # null is 1
    else:
        bad = [scale is not None and not is_number(scale, 0) for scale in column]
        wrong = pl.Series(bad, dtype=pl.Boolean)
        given = [None if scale is None or no else float(scale) for scale, no in zip(column, bad, strict=True)]
        numbers = pl.Series(given, dtype=pl.Float64)
    for row in wrong.arg_true().head(1):
        raise ScenarioError(
            f"scenario {shown(labels[row])} in row {row}: the scale of {shown(name)} is {shown(column[row])}; "
            "give a finite number >= 0, or null for 1."
        )
    return numbers.fill_null(1.0).to_numpy()


def _check_totals(plan: SweepPlan, scale: Floats, labels: pl.Series) -> None:
    """Refuse what `replay` does of a graph with the scaled times: more in all than an int64 has room for."""
    rows = len(plan.classes) + 1  # the last for what is not scaled
    base_ns = np.bincount(plan.dur_class, plan.dur_ns, rows) + np.bincount(plan.lag_class, plan.lag_ns, rows)
    with np.errstate(over="ignore"):
        total_ns = base_ns[:-1] @ scale + base_ns[-1]
    for row in np.flatnonzero(total_ns >= LONGEST_NS).tolist()[:1]:
        most = int(np.argmax(np.log(np.maximum(base_ns[:-1], 1)) + np.log(np.maximum(scale[:, row], 1))))
        raise ScenarioError(
            f"scenario {shown(labels[row])} in row {row}: the scale of {shown(plan.classes[most])} is "
            f"{scale[most, row]:g}, which makes durations and lags of {total_ns[row]:.3g} ns, over a century: give a "
            "smaller one."
        )
