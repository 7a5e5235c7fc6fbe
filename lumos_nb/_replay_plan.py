"""A graph as the arrays that replay runs over, with every fault of the graph named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import numpy as np
import polars as pl

from lumos_nb._replay_kernels import (
    FROM_START,
    LAGGED,
    PLAIN,
    Bools,
    Bytes,
    Int32s,
    Int64s,
    UInt32s,
    Words,
    find,
    least_apart,
    offsets,
    order_by,
    pair,
    recycled_rows,
    starts,
    topological,
)
from lumos_nb.errors import GraphError, ScenarioError, require_kinds
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS, TableSchema, require

_OPS = TableSchema(
    "op",
    {c: OPS.columns[c] for c in ("op_id", "rank", "step", "lane", "device", "kind", "name")}
    | {c: OPS.columns[c] for c in ("start_ns", "dur_ns")},
)
_EDGES = TableSchema("edge", {c: EDGES.columns[c] for c in ("src", "dst", "lag_ns", "from_start", "rule", "evidence")})
_RANKS = 2**32  # more than there are ranks
LONGEST_NS = 2**62  # ends and differences of ends stay in an int64 below it
_SHOWN = 8  # ops of a cycle that its error names
_BLOCK = 1 << 14  # ops whose in-edges, arranged for the pass forward, stay in a core's cache


OpAt = Callable[[int], dict[str, object]]
"""The op of a row, by column."""

Forward = tuple[Words, Words, UInt32s, UInt32s, UInt32s, Int64s]
"""What `_replay_kernels.starts` reads."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A graph's ops in topological order with their in-edges (CSR), n ops and e edges.

    In-edges are ordered by the row of their source, so that the first of several that bind is the canonical one.
    """

    row: Int32s  # (n,) row of graph.ops at each position
    ptr: UInt32s  # (n + 1,) in-edges of position v: ptr[v] to ptr[v + 1]
    src: UInt32s  # (e,) position
    edge: Int32s  # (e,) row of graph.edges
    lag_ns: Int64s  # (e,)
    from_start: Bools  # (e,)
    dur_ns: Int64s  # (n,)
    group: Int32s  # (n,) row of `groups` whose end the op takes part in, -1: of none
    groups: pl.DataFrame  # rank, step; by step, then rank

    @classmethod
    def of(cls, graph: Graph) -> Plan:
        """The plan of `graph`.

        Raises
        ------
        SchemaError
            A table lacks a column or has one of the wrong type.
        GraphError
            An op is repeated, an edge names an unknown op, a duration or lag is missing or negative, no op has a step,
            or the edges make a cycle. The message names the op or edge.
        """
        require(graph, "edges")
        ops, edges = _OPS.check(graph.ops), _EDGES.check(graph.edges)
        check_times(ops, edges)
        group, groups = step_groups(ops, on_device=ops.select(ON_DEVICE.any()).item())
        check_groups(groups, len(ops))
        return cls.ordered(
            *rows_of_ends(ops, edges),
            edges["lag_ns"].to_numpy(),
            edges["from_start"].to_numpy(),
            ops["dur_ns"].to_numpy(),
            group,
            groups,
            lambda row: ops.row(row, named=True),
        )

    @classmethod
    def ordered(
        cls,
        src: Int32s,
        dst: Int32s,
        lag_ns: Int64s,
        from_start: Bools,
        dur_ns: Int64s,
        group: Int32s,
        groups: pl.DataFrame,
        op_at: OpAt,
    ) -> Plan:
        """The plan of rows (n,) and edges between rows (e,), which have been checked; `op_at` gives a row for errors.

        Raises
        ------
        GraphError
            The edges make a cycle.
        """
        n, e = len(dur_ns), len(src)
        row = np.arange(n, dtype=np.int32)
        by_source = order_by(src, np.arange(e, dtype=np.int32), n)
        position = row
        if not (src < dst).all():
            row = _topological_rows(op_at, n, src, dst, by_source)
            position = np.empty_like(row)
            position[row] = np.arange(n, dtype=np.int32)
        at = position[dst]
        edge = order_by(at, by_source, n)
        return cls(
            row=row,
            ptr=offsets(at, n),
            src=position[src][edge].astype(np.uint32),
            edge=edge,
            lag_ns=lag_ns[edge],
            from_start=from_start[edge],
            dur_ns=dur_ns[row],
            group=group[row],
            groups=groups,
        )

    @property
    def apart_ns(self) -> Int64s:
        """Least time (e,) from the start of each in-edge's source to the start of the op."""
        apart = np.empty_like(self.lag_ns)  # numpy's memory: for large arrays it faults far less than numba's
        least_apart(self.src, self.lag_ns, self.from_start, self.dur_ns, apart)
        return apart

    def starts(self) -> Int64s:
        """Start of every op (n,), from the replay's 0."""
        start, at = np.empty_like(self.dur_ns), 0
        for pairs in self.forward(_BLOCK):
            starts(*pairs, start, start[at : at + len(pairs[0])])
            at += len(pairs[0])
        return start

    def forward(self, block: int) -> Iterator[Forward]:
        """The in-edges as a pass forward reads them, of a block of ops after the other, all in the same memory."""
        bounds = np.append(np.arange(0, len(self.row), max(block, 1)), len(self.row))
        n, e = (int(np.diff(of).max(initial=0)) for of in (bounds, self.ptr[bounds].astype(np.int64)))
        near, apart = np.empty((2, n), np.uint64)
        more, at = np.empty((2, n + 1), np.uint32)
        others, others_apart = np.empty(e, np.uint32), np.empty(e, np.int64)
        edges = self.src, self.lag_ns, self.from_start, self.dur_ns
        for lo, hi in pairwise(bounds.tolist()):
            i, x = pair(self.ptr[lo : hi + 1], *edges, near, apart, more, at, others, others_apart)
            yield near[: hi - lo], apart[: hi - lo], more[:i], at[:i], others[:x], others_apart[:x]


def check_times(ops: pl.DataFrame, edges: pl.DataFrame) -> float:
    """All durations and lags added, in ns; GraphError for an op or an edge that lacks one, or an id."""
    _check_ops(ops)
    _check_lags(edges)
    total_ns = sum(float(times.cast(pl.Float64).sum()) for times in (ops["dur_ns"], edges["lag_ns"]))
    check_total(total_ns)
    return total_ns


def _check_ops(ops: pl.DataFrame) -> None:
    if ops["op_id"].has_nulls():
        raise GraphError(f"row {ops['op_id'].is_null().arg_max()} of the ops has no op_id; give each op its own.")
    bad = ops.with_row_index().filter(pl.col("dur_ns").is_null() | (pl.col("dur_ns") < 0))
    if not bad.is_empty():
        r = bad.row(0, named=True)
        was = "has no dur_ns" if r["dur_ns"] is None else f"has dur_ns {r['dur_ns']}"
        raise GraphError(
            f"{_describe(r)} in row {r['index']} of the ops {was} ({len(bad)} such op(s)); give each a duration >= 0."
        )


def _check_lags(edges: pl.DataFrame) -> None:
    needed = [c for c in _EDGES.columns if c not in ("rule", "evidence")]
    empty = pl.any_horizontal(pl.col(needed).is_null())
    bad = edges.with_row_index().filter(empty | (pl.col("lag_ns") < 0))
    if not bad.is_empty():
        r = bad.row(0, named=True)
        nulls = [c for c in needed if r[c] is None]
        was = f"has no {', '.join(nulls)}" if nulls else f"has lag_ns {r['lag_ns']}"
        raise GraphError(
            f"edge {r['src']} -> {r['dst']} (rule {r['rule']}) in row {r['index']} of the edges {was} "
            f"({len(bad)} such edge(s)); an op can't be made to start before what it waits for: give a lag >= 0."
        )


def check_total(total_ns: float) -> None:
    """Raise if all durations and lags one after the other might not fit into an int64."""
    if total_ns >= LONGEST_NS:
        raise GraphError(
            f"durations and lags add up to {total_ns:.3g} ns, which is over a century: they can't be in nanoseconds; "
            "give times in ns."
        )


def rows_of_ends(ops: pl.DataFrame, edges: pl.DataFrame) -> tuple[Int32s, Int32s]:
    """Rows of ops that the edges join: src (e,), dst (e,)."""
    ids = ops["op_id"].to_numpy()
    order = np.argsort(ids, kind="stable").astype(np.int32)
    ids = ids[order]
    if (same := np.flatnonzero(ids[1:] == ids[:-1])).size:
        first, second = order[same[0]], order[same[0] + 1]
        raise GraphError(f"op_id {ids[same[0]]} stands in rows {first} and {second} of the ops; make op ids unique.")

    def rows(column: str) -> Int32s:
        at = find(ids, edges[column].to_numpy(writable=True))
        missing = at < 0
        if missing.any():
            first = int(np.argmax(missing))
            r = edges.row(first, named=True)
            raise GraphError(
                f"edge {r['src']} -> {r['dst']} (rule {r['rule']}) in row {first} of the edges: no op has "
                f"op_id {r[column]} ({int(missing.sum())} such edge(s)); drop the edge or add the op."
            )
        found: Int32s = order[at]
        return found

    return rows("src"), rows("dst")


def _topological_rows(op_at: OpAt, n: int, src: Int32s, dst: Int32s, by_source: Int32s) -> Int32s:
    """Rows of ops in topological order, as close to the order of rows as that allows."""
    order = topological(offsets(src, n), dst[by_source])
    if len(order) < n:
        _refuse_cycle(op_at, n, src, dst, order)
    return order


def _refuse_cycle(op_at: OpAt, n: int, src: Int32s, dst: Int32s, done: Int32s) -> NoReturn:
    """Raise GraphError with the ops of one cycle: among the ops that can't be ordered each has a predecessor."""
    stuck = np.ones(n, bool)
    stuck[done] = False
    inside = stuck[src] & stuck[dst]
    before = np.full(n, -1, np.int32)
    before[dst[inside]] = src[inside]
    seen: dict[int, int] = {}
    v = int(np.argmax(stuck))
    while v not in seen:
        seen[v] = len(seen)
        v = int(before[v])
    cycle = list(seen)[seen[v] :][::-1]
    shown = [_describe(op_at(r)) for r in cycle[:_SHOWN]]
    more = [f"{len(cycle) - _SHOWN} more"] if len(cycle) > _SHOWN else []
    raise GraphError(
        f"the edges make a cycle of {len(cycle)} op(s): {' -> '.join([*shown, *more, shown[0]])}. "
        "Each waits for the one before it; remove an edge."
    )


def _describe(op: dict[str, object]) -> str:
    return f"op {op['op_id']} ({op['kind']} {op['name']!r}, rank {op['rank']}, {op['lane']})"


ON_DEVICE = pl.col("device").is_not_null() & (pl.col("kind") != "event").fill_null(value=True)
"""Work of a device. Points of events are no work: they don't end a step."""


def step_groups(ops: pl.DataFrame, *, on_device: bool) -> tuple[Int32s, pl.DataFrame]:
    """Each op's (rank, step), if it takes part in the end of one: ops on devices, or all where no rank has a device."""
    counts = pl.col("step").is_not_null() & (ON_DEVICE if on_device else pl.lit(value=True))
    rank = pl.col("rank").cast(pl.Int64).fill_null(-1)
    key = ops.select(pl.when(counts).then(pl.col("step").cast(pl.Int64) * _RANKS + rank + 1)).to_series()
    keys = key.drop_nulls().unique().sort()
    groups = keys.to_frame("key").select(
        rank=(pl.col("key") % _RANKS - 1).replace(-1, None).cast(pl.Int32),
        step=(pl.col("key") // _RANKS).cast(pl.Int32),
    )
    group = keys.search_sorted(key.fill_null(0)).cast(pl.Int32)
    return pl.select(pl.when(key.is_null()).then(-1).otherwise(group)).to_series().to_numpy(writable=True), groups


def check_groups(groups: pl.DataFrame, n_ops: int) -> None:
    """Raise GraphError where there are ops and none of them ends a step."""
    if groups.is_empty() and n_ops:
        raise GraphError("no op that could end a step has one; give the ops (those on devices, if any) their step.")


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a worker needs to run blocks of scenarios: a `Plan` with classes, and rows of the buffer of ends.

    Class `len(classes)` is that of what is never scaled. Groups are of ops whose end may be the one asked for: 0 what
    nothing waits for, 1 the step before the last, 2 and on the last step by rank.
    """

    ptr: UInt32s  # (n + 1,)
    src: UInt32s  # (e,)
    kind: Bytes  # (e,) PLAIN, LAGGED or FROM_START
    lag_ns: Int64s  # (e,)
    lag_class: Int32s  # (e,)
    dur_ns: Int64s  # (n,)
    dur_class: Int32s  # (n,)
    row: UInt32s  # (n,)
    group: Int32s  # (n,) -1: no end asked for
    classes: tuple[str, ...]
    ranks: tuple[int | None, ...]  # of groups 2 and on

    @classmethod
    def of(cls, graph: Graph, plan: Plan, by: str | pl.Expr) -> SweepPlan:
        """The plan of `graph`'s sweep, ops classed by a column or an expression, lags by their rule."""
        of_ops, dur_class = codes(_op_classes(graph.ops, by))
        lags = graph.edges.select(pl.when(pl.col("lag_ns") > 0).then("lag:" + pl.col("rule"))).to_series()
        of_lags, lag_class = codes(lags)
        classes = (*of_ops, *of_lags)
        if both := set(of_ops) & set(of_lags):
            raise ScenarioError(
                f"class {min(both)!r} is both of ops and of edges; give the class of the ops another name."
            )
        lag_ns = plan.lag_ns
        unscaled = len(classes)
        group, ranks = _asked_for(plan)
        return cls(
            ptr=plan.ptr,
            src=plan.src,
            kind=np.where(plan.from_start, FROM_START, np.where(lag_ns > 0, LAGGED, PLAIN)).astype(np.uint8),
            lag_ns=lag_ns,
            lag_class=np.where(lag_class < 0, unscaled, lag_class + len(of_ops)).astype(np.int32)[plan.edge],
            dur_ns=plan.dur_ns,
            dur_class=np.where(dur_class < 0, unscaled, dur_class).astype(np.int32)[plan.row],
            row=recycled_rows(plan.ptr, plan.src),
            group=group,
            classes=classes,
            ranks=ranks,
        )


def _op_classes(ops: pl.DataFrame, by: str | pl.Expr) -> pl.Series:
    """The class of every op as text; null: never scaled."""
    require_kinds(by=(by, str | pl.Expr))
    try:
        classes = ops.select(by).to_series()
    except (pl.exceptions.PolarsError, UnicodeEncodeError) as error:
        raise ScenarioError(
            f"by={str(by)!r} gives no class of the ops ({error}); the op table has {', '.join(ops.columns)}."
        ) from error
    if len(classes) != len(ops):
        raise ScenarioError(
            f"by={str(by)!r} gives {len(classes)} class(es) for {len(ops)} ops; it must give one an op."
        )
    return classes.cast(pl.String)


def codes(values: pl.Series) -> tuple[list[str], Int64s]:
    """Distinct values in order, and of each value its place among them (-1: null)."""
    names = values.drop_nulls().unique().sort()
    return names.to_list(), values.cast(pl.Enum(names)).to_physical().cast(pl.Int64).fill_null(-1).to_numpy()


def _asked_for(plan: Plan) -> tuple[Int32s, tuple[int | None, ...]]:
    """Group of the ops whose end can be the one asked for, and the ranks of the last step."""
    steps = plan.groups["step"].unique().sort()[-2:]
    of_group = np.zeros(len(plan.groups) + 1, np.int32)  # the last one for ops that take part in no end of a step
    is_last = (plan.groups["step"] == steps[-1]).to_numpy() if len(steps) else np.zeros(0, bool)
    of_group[:-1][is_last] = 2 + np.arange(is_last.sum())
    if len(steps) > 1:
        of_group[:-1][(plan.groups["step"] == steps[0]).to_numpy()] = 1
    group = of_group[plan.group]
    after_end = ~plan.from_start
    src, dst = plan.src[after_end], np.repeat(np.arange(len(group)), np.diff(plan.ptr))[after_end]
    outlived = group[src] == group[dst]  # an op of the same group can't end before it
    outlived |= group[src] == 0  # the makespan is a later op's end
    asked_for = np.ones(len(group), bool)
    asked_for[src[outlived]] = False
    return np.where(asked_for, group, -1).astype(np.int32), tuple(plan.groups["rank"].to_numpy()[is_last].tolist())
