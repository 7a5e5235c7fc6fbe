"""Event-driven simulation of a graph: streams that serve whoever issues first, and resources that ops share.

`replay` is exact while every resource keeps the order in which it was measured. Where that order hangs on times (two
threads that issue to one stream, streams of different priority, transfers on one link), `simulate` finds it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import polars as pl

from lumos_nb import _engine_kernels as kernels
from lumos_nb._replay_kernels import Bools, Floats, Int32s, Int64s, offsets, order_by
from lumos_nb._replay_plan import Plan, codes
from lumos_nb.calls import CALL_PATTERNS, classify
from lumos_nb.critical_path import Result, result_of
from lumos_nb.display import format_ns
from lumos_nb.errors import GraphError, InputError, ScenarioError, is_number, require_flags, shown
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS, require

ISSUE_RULES = ("launch", "issue")
"""Rules of the edges from a call to what it puts on a stream."""

DEVICE_STREAMS = pl.when(pl.col("device").is_not_null() & (pl.col("lane") != "net")).then(
    pl.format("rank {}, {}", "rank", "lane")
)
WAITS_FOR_ALL = classify(pl.col("name"), CALL_PATTERNS).is_in(["sync_stream", "sync_device", "free"])
"""Calls that wait for all that a stream holds when they are reached, not for one op."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Things of capacity 1 that ops use at the same time: the SMs of each device, each link.

    Attributes
    ----------
    of
        Which of them an op uses, by name; null: none. Ops of different ranks that give the same name share it.
    demand
        Share of the capacity that an op uses alone, above 0 and at most 1; where it gets it, it takes its `dur_ns`.
    in_turn
        False: all run at once. Those of the highest priority get what they demand; where demands exceed what is left,
        each of them runs slower by the same factor, and lower ones stand still.
        True: an op starts when what it demands is free and is not interrupted. The next is the one of the highest
        priority, of equals the one that was ready first; none overtakes it. Such an op can use no other pool.
    """

    of: pl.Expr
    demand: pl.Expr | float = 1.0
    in_turn: bool = False


@dataclass(frozen=True, slots=True)
class Resources:
    """What a simulation does not take from the edges.

    Attributes
    ----------
    pools
        What ops share. An op that uses several runs at the lowest of the speeds that they allow it.
    priority
        Of each op in its pools, e.g. that of its stream: whole numbers, higher ones go first.
    streams
        Which stream an op runs on; null: none. A stream runs one op at a time in the order in which they are *issued*:
        when the call at the other end of a `launch` or `issue` edge starts. What no call issues is issued with the op
        before it on its stream, if an edge ties them (a transfer with its arrival), else when it is ready.
    whole_stream
        Which ops wait, by their `sync` edges, for all that the stream at the other end holds when they are reached.
    """

    pools: tuple[Pool, ...] = ()
    priority: pl.Expr | int = 0
    streams: pl.Expr = DEVICE_STREAMS
    whole_stream: pl.Expr = WAITS_FOR_ALL


def simulate(graph: Graph, resources: Resources | None = None) -> Result:
    """Run `graph` event by event, with what it says of order replaced by what `resources` make of it.

    Without resources every edge holds, and the times are those of `replay` to the ns. With them, the edges between ops
    of one stream that are not `hard` (two threads issued them, in today's order) are dropped, and so are those of syncs
    that wait for a whole stream; the order of issue decides instead. The launch queue stays as its edges have it. An
    op slowed down by others ends at the next whole ns.

    Parameters
    ----------
    graph
        Ops and edges. Where two things happen at the same ns, the op in the lower row goes first.
    resources
        Streams, pools and syncs; `Resources()` has the streams of the devices and nothing that ops share.

    Returns
    -------
    Result
        Its `graph` is the one that was found: `dur_ns` as they became, the order of streams and the ops that syncs
        waited for as edges, and of rule `pool` the op that made room. Replaying that graph gives the same times.

    Raises
    ------
    SchemaError, GraphError
        As `replay`; or the ops wait for each other: the message names them.
    ScenarioError
        An expression of `resources` fails on the ops, or a demand or priority is impossible.

    Examples
    --------
    >>> sms = Pool(of=pl.when(pl.col("kind") == "kernel").then(pl.format("SMs of rank {}", "rank")), demand=0.7)
    >>> simulate(graph, Resources(pools=(sms,))).step_ns, replay(graph).step_ns
    """
    require(graph, "edges")
    if resources is None:
        plan = Plan.of(graph)
        op, _ = _run(plan, graph, _Setup.without(len(graph.ops)))
        return result_of(graph, plan, op[:, kernels.START].copy())
    _check(resources)
    graph = replace(graph, ops=OPS.check(graph.ops), edges=EDGES.check(graph.edges))
    kept, setup = _Setup.of(graph, resources)
    plan = Plan.of(kept)
    op, syncs = _run(plan, kept, setup)
    found = _found(kept, plan, op, syncs)
    if (op[:, kernels.END] < 0).any():
        _refuse_deadlock(found, op)
    start = np.empty(len(op), np.int64)
    start[plan.row] = op[:, kernels.START]
    plan = Plan.of(found)
    return result_of(found, plan, start[plan.row])


def _check(resources: object) -> None:
    """Raise InputError unless these are resources, with a sequence of pools."""
    pools: object = resources.pools if isinstance(resources, Resources) else None
    if not isinstance(pools, tuple | list):
        raise InputError(f"resources={shown(resources)}: give Resources(pools=(Pool(...), ...)), or None.")
    for pool in pools:
        if not isinstance(pool, Pool) or not isinstance(pool.in_turn, bool):
            raise InputError(f"{shown(pool)} is no Pool(of=..., demand=..., in_turn=True or False).")


@dataclass(frozen=True, slots=True)
class _Setup:
    """Streams, syncs and pools of the ops, by row; -1 where an op has none."""

    stream: Int32s  # (n,)
    syncs: pl.DataFrame  # dst, stream, lag_ns, evidence
    pool: Int32s  # (kinds, n)
    priority: Int32s  # (n,)
    demand: Floats  # (kinds, n)
    kind_of: Int32s  # (pools,)
    in_turn: Bools  # (pools,)

    @classmethod
    def without(cls, n: int) -> _Setup:
        """Nothing but edges."""
        none = np.empty((0, n), np.int32)
        syncs = pl.DataFrame(schema={"dst": pl.Int64, "stream": pl.Int32, "lag_ns": pl.Int64, "evidence": pl.String})
        no_pools = np.empty(0, np.int32)
        alike = np.zeros(n, np.int32)
        return cls(alike - 1, syncs, none, alike, np.empty((0, n)), no_pools, no_pools.astype(np.bool_))

    @classmethod
    def of(cls, graph: Graph, resources: Resources) -> tuple[Graph, _Setup]:
        """What `resources` say of the ops, and the graph without the edges that they replace."""
        empty = cls.without(len(graph.ops))
        stream = _streams(graph.ops, resources.streams)
        whole = _values(graph.ops, "whole_stream", resources.whole_stream, pl.Boolean())
        about = graph.ops.select("op_id", stream=pl.Series(stream).replace(-1, None), whole=whole)
        sources = about.select(src="op_id", stream="stream")
        edges = graph.edges.join(sources, on="src", how="left", maintain_order="left")
        targets = about.select(dst="op_id", to="stream", whole="whole")
        edges = edges.join(targets, on="dst", how="left", maintain_order="left")
        todays = ~pl.col("hard") & (pl.col("stream") == pl.col("to"))
        drains = (pl.col("rule") == "sync") & pl.col("whole") & pl.col("stream").is_not_null()
        syncs = edges.filter(drains).group_by("dst", "stream").agg(pl.col("lag_ns").max(), pl.col("evidence").first())
        kept = edges.filter((todays | drains).fill_null(value=False).not_()).select(graph.edges.columns)
        priority = _values(graph.ops, "priority", resources.priority, pl.Int32()).fill_null(0).to_numpy()
        setup = replace(empty, stream=stream, syncs=syncs, priority=priority)
        return replace(graph, edges=kept), setup._with(graph.ops, resources.pools)

    def _with(self, ops: pl.DataFrame, pools: Sequence[Pool]) -> _Setup:
        setup = self
        for kind, pool in enumerate(pools):
            require_flags(in_turn=pool.in_turn)
            names, of = codes(_values(ops, "of", pool.of, pl.String()))
            used = np.where(of < 0, -1, of + len(setup.kind_of)).astype(np.int32)
            setup = replace(
                setup,
                pool=np.vstack([setup.pool, used]),
                demand=np.vstack([setup.demand, _demands(ops, pool, used)]),
                kind_of=np.append(setup.kind_of, np.full(len(names), kind, np.int32)),
                in_turn=np.append(setup.in_turn, np.full(len(names), pool.in_turn)),
            )
        turns = np.isin(setup.pool, np.flatnonzero(setup.in_turn)).any(axis=0)
        several = turns & ((setup.pool >= 0).sum(axis=0) > 1)
        if several.any():
            row = int(np.argmax(several))
            raise ScenarioError(
                f"op {ops['op_id'][row]} ({ops['name'][row]!r}) goes in turn in one pool and uses another, so that two "
                "such ops could wait for each other; give it one pool, or in_turn=False."
            )
        return setup


def _values(ops: pl.DataFrame, what: str, value: object, dtype: pl.DataType) -> pl.Series:
    """An expression or a constant over the ops."""
    try:
        if not (isinstance(value, pl.Expr | str | bool | int | float | np.bool_) or value is None or is_number(value)):
            raise TypeError("neither an expression nor a constant")  # of some others polars panics
        expression = value if isinstance(value, pl.Expr) else pl.lit(value)
        return ops.select(expression.cast(dtype).alias(what), pl.col("op_id"))[what]
    except (pl.exceptions.PolarsError, TypeError, OverflowError, UnicodeEncodeError) as error:
        raise ScenarioError(
            f"{what}={shown(value)} gives no {dtype} of each op ({error}); the op table has {', '.join(ops.columns)}."
        ) from error


def _demands(ops: pl.DataFrame, pool: Pool, of: Int32s) -> Floats:
    demand = _values(ops, "demand", pool.demand, pl.Float64()).fill_null(float("nan")).to_numpy()
    wrong = (of >= 0) & ~((demand > 0) & (demand <= 1))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ScenarioError(
            f"op {ops['op_id'][row]} ({ops['name'][row]!r}) demands {demand[row]} of its pool; "
            "give the share of the capacity that it uses alone, above 0 and at most 1."
        )
    return np.where(of >= 0, demand, 0.0)


def _streams(ops: pl.DataFrame, streams: pl.Expr) -> Int32s:
    """Of each op its stream. What earlier steps left there runs at once: the last of it stands for all."""
    backlog = pl.col("kind") == "boundary"
    named = ops.select("kind", stream=_values(ops, "streams", streams, pl.String())).with_columns(
        last=pl.int_range(pl.len()) == pl.int_range(pl.len()).filter(backlog).max().over("stream")
    )
    own = named.select(pl.when(~backlog | pl.col("last")).then("stream")).to_series()
    return codes(own)[1].astype(np.int32)


def _run(plan: Plan, graph: Graph, setup: _Setup) -> tuple[Int64s, pl.DataFrame]:
    """The final state of the ops of `plan`, of `graph`; and the syncs with `last`, the op that each waited for.

    Ops are positions in the plan; see `_engine_kernels` for their state.
    """
    n, e = len(plan.row), len(plan.edge)
    src, dst = plan.src.astype(np.int32), np.repeat(np.arange(n, dtype=np.int32), np.diff(plan.ptr))
    stream = setup.stream[plan.row]
    memory = np.full((n + 1) * kernels.N_FIELDS, -1, np.int64)
    begin = -memory.ctypes.data // memory.itemsize % kernels.N_FIELDS
    op = memory[begin : begin + n * kernels.N_FIELDS].reshape(n, kernels.N_FIELDS)
    op[:, kernels.READY], op[:, kernels.MISSING], op[:, kernels.PLACE] = 0, np.diff(plan.ptr), 0
    op[:, kernels.DUR], op[:, kernels.STREAM] = plan.dur_ns, stream
    op[stream >= 0, kernels.BEFORE] = kernels.UNISSUED
    calls = graph.edges["rule"].is_in(ISSUE_RULES).fill_null(value=False).to_numpy()[plan.edge]
    issues = calls & (stream[src] < 0) & (stream[dst] >= 0)
    issued = np.zeros(n, np.bool_)
    issued[dst[issues]] = True
    kernels.chain_followers(op, plan.ptr, plan.src, issued, np.empty((n, 2), np.int64))
    place = pl.DataFrame({"dst": graph.ops["op_id"].gather(plan.row), "at": np.arange(n)})
    frame = setup.syncs.join(place, on="dst").sort("at", "stream")
    syncs = np.full((len(frame), 5), -1, np.int64)
    syncs[:, : kernels.LAST] = frame.select("at", "stream", "lag_ns").to_numpy()
    op[syncs[::-1, kernels.OF], kernels.SYNC] = np.arange(len(syncs))[::-1]
    out = order_by(src, np.arange(e, dtype=np.int32), n)
    kind = kernels.AFTER_START * plan.from_start + kernels.ISSUES * issues
    edges = offsets(src, n), np.column_stack([dst, plan.lag_ns, kind])[out]
    pool, demand = np.take(setup.pool, plan.row, 1), np.take(setup.demand, plan.row, 1)
    kinds, m = pool.shape[0], len(setup.kind_of)
    pools = np.column_stack([setup.kind_of, setup.in_turn, np.full((m, 2), -1), np.zeros(m)]).astype(np.int64)
    tail = np.full(int(stream.max(initial=-1)) + 1, -1, np.int32)
    events, stack = np.zeros((n + 1, 2), np.int64), np.zeros(m + 1, np.int64)
    after, priority, share = np.full((kinds, n), -1, np.int32), setup.priority[plan.row], np.ones((kinds, n))
    work = np.zeros((2, n if kinds else 0))
    kernels.run(op, events, *edges, tail, syncs, pools, stack, pool, after, priority, demand, share, work)
    return op, frame.with_columns(last=pl.Series(syncs[:, kernels.LAST]))


def _found(graph: Graph, plan: Plan, op: Int64s, syncs: pl.DataFrame) -> Graph:
    """`graph` with durations as they became, and with edges for what decided the order."""
    op_id = graph.ops["op_id"].gather(plan.row)

    def edges(column: int, rule: str) -> pl.DataFrame:
        has = np.flatnonzero(op[:, column] >= 0)
        found = {"src": op_id.gather(op[has, column]), "dst": op_id.gather(has), "lag_ns": 0, "from_start": False}
        return pl.DataFrame(found | {"rule": rule, "evidence": "exact", "hard": False}, schema=EDGES.columns)

    known = graph.edges.filter(~pl.col("from_start"))
    in_order = edges(kernels.BEFORE, "stream").join(known, on=["src", "dst"], how="anti", maintain_order="left")
    waited = syncs.filter(pl.col("last") >= 0).with_columns(
        src=op_id.gather(syncs["last"].filter(syncs["last"] >= 0)), from_start=False, rule=pl.lit("sync"), hard=True
    )
    added = pl.concat([in_order, edges(kernels.FREED_BY, "pool"), waited.select(*EDGES.columns)])
    ended = op[:, kernels.END] >= 0
    dur_ns = np.empty(len(op), np.int64)
    dur_ns[plan.row] = np.where(ended, op[:, kernels.END] - op[:, kernels.START], plan.dur_ns)
    ops = graph.ops.with_columns(dur_ns=pl.Series(dur_ns))
    return replace(graph, ops=ops, edges=pl.concat([graph.edges, added]))


def _refuse_deadlock(found: Graph, op: Int64s) -> NoReturn:
    """Raise GraphError: some of the ops that never ran wait for each other."""
    end = op[:, kernels.END]
    try:
        Plan.of(found)
    except GraphError as error:
        raise GraphError(
            f"after {format_ns(int(end.max()))} nothing can run any more, and {(end < 0).sum()} of {len(op)} op(s) "
            f"have not: {error} The order in which ops are issued to a stream is one of these edges."
        ) from error
    raise AssertionError("ops are left over that wait for nothing.")
