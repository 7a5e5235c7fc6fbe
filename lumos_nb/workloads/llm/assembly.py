"""Work tables and a pipeline schedule -> the graph of one step: every pass of every pipeline rank, row by row.

A rank's rows stand one below another as its host issues them, and every rule is a comparison of row numbers: a row
waits for the last one before it that is of some kind. Ranks that a symmetry makes equal (tensor, data, context and
expert parallel ones) are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.layout import Parallelism, Training
from lumos_nb.workloads.llm.schedule import schedule
from lumos_nb.workloads.steps import HOST_ROW, Ints, Step, Waits

Bools = NDArray[np.bool_]

LANES = ("gpu0:0", "gpu0:tp", "gpu0:cp", "gpu0:dp", "gpu0:forward", "gpu0:backward", "gpu0:recv", "cpu:0")
"""Streams of a rank: products, collectives by group, messages by direction and received ones; and the host."""
COMPUTE, TP, CP, DP, FORWARD, BACKWARD, RECV, HOST = range(len(LANES))
STREAMS = {"compute": COMPUTE, "tp": TP, "cp": CP, "dp": DP}
SENT_TO = {"forward": 1, "backward": -1, "backward_input": -1}
"""How many depths further a pass sends its result."""


def assembled(table: pl.DataFrame, layout: Parallelism, train: Training) -> Step:
    """Lay out the passes of one step.

    Parameters
    ----------
    table
        The priced work tables of all virtual stages, in the order of their `depth`; with `launch_us`, what the host
        takes to issue each row, where it may be late.
    layout, train
        The schedule, the number of micro-batches, and what overlaps.

    Returns
    -------
    step
        Every row of every pass, with its waits.
    """
    plan = schedule(layout.schedule, layout.pp, train.micro_batches(layout), layout.chunks)
    plan = plan.with_columns(pl.col("phase").cast(pl.String))
    table, pages = _pages(table, plan, train)
    rows = _Rows.of(table, pages, plan, layout, train)
    return Step(table, rows.row, rows.rank, rows.micro_batch, rows.chunk, rows.lane, tuple(_waits(rows)), LANES)


Pages = dict[tuple[int, str, bool], Ints]
"""Rows of the passes of a depth and phase, of the last micro-batch or of another. Phase "step" is what ends a step,
"new weights" what the next one begins with: the one step stands for many alike."""


def _pages(table: pl.DataFrame, plan: pl.DataFrame, train: Training) -> tuple[pl.DataFrame, Pages]:
    """Which rows make which pass; where the host takes time each begins with its op, which the table gets too."""
    split = bool((plan["phase"] == "backward_weight").any())
    by_weight = (pl.col("phase") == "backward_weight") | (pl.col("part") == "gradients")
    back = pl.when(by_weight).then(pl.lit("backward_weight")).otherwise(pl.lit("backward_input"))
    late = (pl.col("part") == "weights") & (pl.col("phase") == "optimizer") & train.overlap_weights
    passes = table.with_row_index("row").with_columns(
        made=pl.when(late)
        .then(pl.lit("new weights"))
        .when(pl.col("when") == "step")
        .then(pl.lit("step"))
        .when(pl.col("phase") == "forward")
        .then(pl.lit("forward"))
        .otherwise(back if split else pl.lit("backward"))
    )
    pages = {
        (depth, made, last): np.array(page, np.int64)
        for last in (False, True)
        for depth, made, page in passes.filter(last | (pl.col("when") != "last"))
        .group_by("depth", "made")
        .agg(pl.col("row").sort())
        .iter_rows()
    }
    launch_us = table["launch_us"].to_numpy() if "launch_us" in table.columns else np.zeros(len(table))
    if not launch_us.any():
        return table, pages
    launched = {key: page for key, page in pages.items() if key[1] != "new weights"}
    took = [float(launch_us[page].sum()) for page in launched.values()]
    host = pl.DataFrame({"dur_us": took, "low_us": took, "high_us": took}).with_columns(
        pl.lit(text).alias(name) for name, text in HOST_ROW.items()
    )
    for i, (key, page) in enumerate(launched.items()):
        pages[key] = np.concatenate([[len(table) + i], page])
    return pl.concat([table, host], how="diagonal_relaxed"), pages


@dataclass(frozen=True)
class _Rows:
    """All ops in issue order: where each comes from, and where it runs."""

    table: pl.DataFrame
    plan: pl.DataFrame
    layout: Parallelism
    train: Training
    row: Ints
    rank: Ints
    micro_batch: Ints
    chunk: Ints
    which: Ints  # the pass, by its row of `plan`; len(plan) outside of all
    lane: Ints

    @classmethod
    def of(cls, table: pl.DataFrame, pages: Pages, plan: pl.DataFrame, layout: Parallelism, train: Training) -> _Rows:
        """Pages in the order of each rank's passes, and what begins and ends a step around them."""
        ends = plan.filter(~pl.col("phase").is_in(["forward", "backward_input"]))
        last = set(ends.group_by("stage", "chunk").agg(pl.col("position").max()).select("stage", "position").rows())
        parts: list[tuple[Ints, tuple[int, int, int, int]]] = []
        none, outside = np.empty(0, np.int64), len(plan)
        columns = ("stage", "which", "position", "phase", "micro_batch", "chunk", "depth")
        ordered = plan.with_row_index("which").sort("stage", "position").select(columns).rows()
        for stage, group in groupby(ordered, key=itemgetter(0)):
            passes = list(group)
            chunks = sorted({(chunk, depth) for *_, chunk, depth in passes})
            for chunk, depth in chunks:
                gathers = pages.get((depth, "new weights", True), none)
                parts.append((gathers[::-1], (stage, -1, chunk, outside)))
            for _, which, position, phase, micro_batch, chunk, depth in passes:
                page = pages.get((depth, phase, (stage, position) in last), none)  # a stage may have no layers
                parts.append((page, (stage, micro_batch, chunk, which)))
            for chunk, depth in chunks:
                parts.append((pages.get((depth, "step", True), none), (stage, -1, chunk, outside)))
        row = np.concatenate([page for page, _ in parts])
        counts = [len(page) for page, _ in parts]
        rank, micro_batch, chunk, which = np.repeat(np.array([about for _, about in parts]).T, counts, axis=1)
        return cls(table, plan, layout, train, row, rank, micro_batch, chunk, which, _lanes(table)[row])

    def has(self, condition: pl.Expr) -> Bools:
        """Ops whose row meets a condition (n,)."""
        met: Bools = self.table.select(condition.fill_null(value=False)).to_series().to_numpy()[self.row]
        return met

    def before(self, wanted: Bools) -> Ints:
        """The last op before each one, on its rank, that is wanted (n,); -1 for none."""
        number = np.where(wanted, np.arange(len(wanted)), -1)
        found = np.concatenate([[-1], np.maximum.accumulate(number)[:-1]])
        return np.where(found >= self.begins, found, -1)

    def after(self, wanted: Bools) -> Ints:
        """The first op behind each one, on its rank, that is wanted (n,); -1 for none."""
        n = len(wanted)
        number = np.where(wanted, np.arange(n), n)
        found = np.concatenate([np.minimum.accumulate(number[::-1])[::-1][1:], [n]])
        return np.where((found < n) & (self.rank[np.minimum(found, n - 1)] == self.rank), found, -1)

    @cached_property
    def begins(self) -> Ints:
        """The first op of each one's rank (n,)."""
        first: Ints = np.searchsorted(self.rank, self.rank)
        return first


def _lanes(table: pl.DataFrame) -> Ints:
    """The lane of every row of a table."""
    on_pp = pl.col("stream") == "pp"
    lane = (
        pl.when(on_pp & (pl.col("collective") == "recv"))
        .then(RECV)
        .when(on_pp & (pl.col("phase") == "forward"))
        .then(FORWARD)
        .when(on_pp)
        .then(BACKWARD)
        .otherwise(pl.col("stream").replace_strict(STREAMS, default=HOST, return_dtype=pl.Int64))
    )
    return table.select(lane.cast(pl.Int64)).to_series().to_numpy()


def _waits(rows: _Rows) -> Iterator[Waits]:
    """Every rule. The *chain* is what a rank does one after another: products, and collectives that these wait for."""
    part, collective, group = (pl.col(name) for name in ("part", "collective", "group"))
    compute = rows.lane == COMPUTE
    grads = rows.has((part == "gradients") & (pl.col("stream") == "dp"))
    gathers = rows.has(part == "weights") & (rows.which < len(rows.plan))
    early = rows.has(part == "weights") & ~gathers & (rows.before(compute) < 0)
    sends = rows.has((collective == "send") & (group == "pp"))
    recvs = rows.lane == RECV
    ring = rows.lane == CP if rows.layout.cp_mode == "ring" else np.zeros_like(compute)
    free = early | ring | (rows.lane == HOST)
    free |= grads if rows.train.overlap_grads else False
    free |= gathers if rows.train.overlap_weights else False
    free |= sends if rows.train.overlap_pp else False
    blocking = ~compute & ~free & ~recvs
    product = rows.before(compute)

    order = np.lexsort((np.arange(len(compute)), rows.lane, rows.rank))
    same = (rows.lane[order][1:] == rows.lane[order][:-1]) & (rows.rank[order][1:] == rows.rank[order][:-1])
    yield Waits(order[:-1][same], order[1:][same], "stream")
    yield _joined(product, blocking | sends | ring, "event")
    yield _joined(rows.before(blocking), blocking | sends | ring, "event")
    yield from _products(rows, compute, blocking, product)
    received, user = np.flatnonzero(recvs), rows.after(compute)[recvs]
    yield Waits(received[user >= 0], user[user >= 0], "event")
    yield from _rings(rows, compute, ring)
    yield from _gradients(rows, grads, product)
    if rows.train.overlap_weights:
        yield from _weights(rows, compute, gathers, product)
        yield from _new_weights(rows, compute, early)
    yield from _messages(rows, sends, recvs)
    yield from _launches(rows)


def _joined(source: Ints, wanted: Bools, rule: str) -> Waits:
    """Each wanted op waits for its source, where it has one."""
    dst = np.flatnonzero(wanted & (source >= 0))
    return Waits(source[dst], dst, rule)


def _products(rows: _Rows, compute: Bools, blocking: Bools, product: Ints) -> Iterator[Waits]:
    """Products wait for the collectives before them; those for weights only for what is gathered for them.

    A layer's input gradient is summed up while the product for its weight's gradient runs (Megatron's asynchronous
    all-reduce). With `overlap_tp` a tensor-parallel collective and its product go piece by piece, as many as there are
    ranks (Transformer Engine's user buffers): the later one begins a piece behind the earlier and ends one behind it.
    """
    by_weight = rows.has(pl.col("phase") == "backward_weight")
    for products, collectives in (
        ((compute & ~by_weight, blocking & ~by_weight), (compute & by_weight, blocking & by_weight))
        if rows.train.overlap_wgrad
        else ((compute, blocking),)
    ):
        latest = rows.before(collectives)
        piped = np.zeros_like(compute)
        if rows.train.overlap_tp and rows.layout.tp > 1:
            piped = products & (latest == np.arange(len(compute)) - 1) & (rows.lane[latest] == TP)
            after = np.flatnonzero(piped)
            lag = rows.table["dur_us"].to_numpy()[rows.row[latest[after]]] / rows.layout.tp
            yield Waits(latest[after], after, "event", lag, from_start=True)
            later = rows.after(compute)[after]
            yield Waits(latest[after][later >= 0], later[later >= 0], "event")
        yield _joined(latest, products & ~piped, "event")


def _rings(rows: _Rows, compute: Bools, ring: Bools) -> Iterator[Waits]:
    """Keys and values arrive while the attention before goes on with others; whatever is not attention has them all."""
    if not ring.any():
        return
    attention = rows.has(pl.col("part") == "attention") & rows.has(pl.col("op").is_in(["attention", "bmm", "softmax"]))
    latest = rows.before(ring)
    before = rows.before(compute)
    one_behind = np.where(before >= 0, latest[before], -1)
    yield _joined(np.where(attention, one_behind, latest), compute, "event")


def _gradients(rows: _Rows, grads: Bools, product: Ints) -> Iterator[Waits]:
    """Gradients are added up as soon as they are there; what ends a step waits for all."""
    yield _joined(product, grads, "event")
    outside = rows.has(pl.col("when") == "step")
    yield _joined(rows.before(grads), outside & ~grads & (rows.lane != HOST), "event")


def _weights(rows: _Rows, compute: Bools, gathers: Bools, product: Ints) -> Iterator[Waits]:
    """ZeRO 3: a unit waits for its weights, which are gathered once those before have been taken out of the buffer."""
    if not gathers.any():
        return
    expert = rows.has(pl.col("part") == "experts") | rows.has(pl.col("group") == "edp")
    layer = rows.table["layer"].fill_null(-1).to_numpy()[rows.row].astype(np.int64)
    n = len(compute)
    unit = ((rows.rank * 2 + expert) * (layer.max() + 2) + layer + 1) * n
    users = np.sort((unit + np.arange(n))[compute])
    at = np.flatnonzero(gathers)
    found = users[np.minimum(np.searchsorted(users, unit[at] + at), len(users) - 1)]
    known = found // n == unit[at] // n
    user = np.where(known, found % n, rows.after(compute)[at])
    yield Waits(at[user >= 0], user[user >= 0], "event")
    emptied = product[user[:-1]]
    next_one, fits = at[1:], (emptied >= 0) & (rows.rank[at[1:]] == rows.rank[at[:-1]]) & (emptied < at[1:])
    yield Waits(emptied[fits], next_one[fits], "event")


def _new_weights(rows: _Rows, compute: Bools, early: Bools) -> Iterator[Waits]:
    """ZeRO 1 and 2: the first forward pass begins while the last step's weights are still being gathered.

    Of a chunk's buckets each is awaited where its share of the bytes begins.
    """
    size = rows.table["size_bytes"].fill_null(0).to_numpy()[rows.row]
    for rank, chunk in np.unique(np.column_stack([rows.rank, rows.chunk])[early], axis=0):
        here = (rows.rank == rank) & (rows.chunk == chunk)
        gathers, users = np.flatnonzero(here & early), np.flatnonzero(here & compute & (rows.micro_batch == 0))
        users = users[rows.which[users] == rows.which[users[0]]]
        share = np.concatenate([[0], np.cumsum(size[gathers])[:-1]]) / size[gathers].sum()
        yield Waits(gathers, users[(share * len(users)).astype(np.int64)], "event")


def _messages(rows: _Rows, sends: Bools, recvs: Bools) -> Iterator[Waits]:
    """What a pass sends is what the pass of the next depth receives; on one rank it is there at once."""
    passes = rows.plan.with_row_index("which").with_columns(
        to=pl.col("depth") + pl.col("phase").replace_strict(SENT_TO, default=0, return_dtype=pl.Int32)
    )
    key = ["micro_batch", "phase"]
    pairs = passes.join(passes, left_on=["to", *key], right_on=["depth", *key], how="inner")
    pairs = pairs.filter(pl.col("to") != pl.col("depth"))
    of_send, of_recv = (np.full(len(rows.plan) + 1, -1) for _ in range(2))
    of_send[rows.which[sends]] = np.flatnonzero(sends)
    of_recv[rows.which[recvs]] = np.flatnonzero(recvs)
    src, dst = of_send[pairs["which"].to_numpy()], of_recv[pairs["which_right"].to_numpy()]
    there = (src >= 0) & (dst >= 0)
    yield Waits(src[there], dst[there], "collective")
    shared = rows.has((pl.col("group") == "pp") & (pl.col("collective") == "all_reduce"))
    product, ends = rows.before(rows.lane == COMPUTE), np.flatnonzero(shared)
    yield Waits(product[ends[::-1]], ends, "collective")


def _launches(rows: _Rows) -> Iterator[Waits]:
    """The host issues the ops of a pass one after another."""
    host = rows.lane == HOST
    if not host.any():
        return
    issued = rows.before(host)
    dst = np.flatnonzero(~host & (issued >= 0))
    taken = np.cumsum(np.where(host, 0.0, rows.table["launch_us"].fill_null(0).to_numpy()[rows.row]))
    lag_us = taken[dst] - taken[issued[dst]]
    yield Waits(issued[dst], dst, "launch", lag_us, from_start=True)
