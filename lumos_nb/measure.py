"""From what was measured to work, lags and delays: what remains of each row once its edges are taken into account."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb._jit import jit
from lumos_nb._replay_kernels import Bools, Int32s, Int64s, offsets, order_by, topological
from lumos_nb.errors import GraphError
from lumos_nb.lanes import DELAY, EVIDENCES, KINDS, RULES, in_role
from lumos_nb.repairs import REPORT
from lumos_nb.schema import DEVICE_KINDS

MIN_DELAY_NS = 3_000
"""A row that starts less than this after all that it waits for needs no explanation: the rest is in its edge's lag."""

USUAL = 0.9
"""Quantile of launch latencies and of gaps in a busy stream that still counts as usual; what is beyond is a delay."""

LAUNCH, QUEUE, WAKE = 0, 2, 3
"""Places in `lanes.RULES`. Edges of rules up to `QUEUE` carry a latency of the hardware, no delay of what waits."""

NEVER = 2**62


@jit("void(uint32[::1], int32[::1], int64[::1], int64[::1], bool_[::1])")
def _settle(
    ptr: NDArray[np.uint32],
    src: NDArray[np.int32],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    blocks: NDArray[np.bool_],
) -> None:
    """Move the start of every row that waits to the end of what it waited for; a row of no length moves as a whole."""
    for v in range(start.size):
        if not blocks[v]:
            continue
        bound = start[v]
        for e in range(ptr[v], ptr[v + 1]):
            bound = max(bound, end[src[e]])
        if start[v] == end[v]:
            end[v] = bound
        start[v] = min(bound, end[v])


@jit("int32[::1](int64[::1], int64[::1])")
def _places(ids: Int64s, wanted: Int64s) -> Int32s:
    """Places of wanted ids among `ids`, which ascend and hold them: most stand right behind the one wanted before."""
    found = np.empty(wanted.size, np.int32)
    at = 0
    for i in range(wanted.size):
        at = min(at + 1, ids.size - 1)
        if ids[at] != wanted[i]:
            at = np.searchsorted(ids, wanted[i])
        found[i] = at
    return found


def in_issue_order(rows: pl.DataFrame, edges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows in a topological order of the edges, as close to the order of their raw starts as that allows.

    Ends of edges are ids on entry and places in `rows` on return.
    """
    issued = rows.select("id", "from_ns", issued_ns=pl.coalesce("issue_ns", "from_ns")).get_columns()
    by_start = np.lexsort([key.to_numpy() for key in issued]).astype(np.int32)
    ids = issued[0].to_numpy()[by_start]
    by_id = np.argsort(ids).astype(np.int32)
    src, dst = (by_id[_places(ids[by_id], edges[end].to_numpy(writable=True))] for end in ("src", "dst"))
    n = rows.height
    order = topological(offsets(src, n), dst[order_by(src, np.arange(src.size, dtype=np.int32), n)])
    if order.size < n:
        stuck = rows[by_start].with_row_index("row").filter(~pl.col("row").is_in(pl.Series(order).implode()))
        first = stuck.row(0, named=True)
        raise GraphError(
            f"the rules of step {first['step']} make a cycle of {stuck.height} ops, one of them {first['name']!r} "
            f"on rank {first['rank']}, lane {first['lane']}, at {first['from_ns']} ns: the "
            "trace's times contradict its order."
        )
    place = np.empty(n, np.int32)
    place[order] = np.arange(n, dtype=np.int32)
    return rows[by_start[order]], edges.with_columns(src=pl.Series(place[src]), dst=pl.Series(place[dst]))


def settle(rows: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """Start and duration of each row's own work; rows in topological order, ends of edges their places.

    A row that `blocks` has its raw end and starts when the last thing it waits for has ended. `start_ns`, `dur_ns` of
    the others stay.
    """
    src, dst = (edges[end].to_numpy(writable=True) for end in ("src", "dst"))
    n = rows.height
    by_dst = order_by(dst, np.arange(dst.size, dtype=np.int32), n)
    start = rows.select(pl.when("blocks").then("from_ns").otherwise("start_ns")).to_series().to_numpy(writable=True)
    end = (
        rows.select(pl.when("blocks").then("to_ns").otherwise(pl.col("start_ns") + pl.col("dur_ns")))
        .to_series()
        .to_numpy(writable=True)
    )
    _settle(offsets(dst, n), src[by_dst], start, end, rows["blocks"].to_numpy(writable=True))
    return rows.with_columns(start_ns=pl.Series(start), dur_ns=pl.Series(end - start))


@jit("int64[:, ::1](int64[::1], int32[::1], int64)")
def _usual(values: Int64s, key: Int32s, keys: int) -> Int64s:
    """The quantile `USUAL` and the median of the values of each key (-1: of none), (2, keys); below all if none."""
    ptr = np.zeros(keys + 1, np.int64)
    for k in key[key >= 0]:
        ptr[k + 1] += 1
    ptr = np.cumsum(ptr)
    place, ordered = ptr.copy(), np.empty(ptr[keys], np.int64)
    for e in range(key.size):
        if key[e] >= 0:
            ordered[place[key[e]]] = values[e]
            place[key[e]] += 1
    found = np.full((2, keys), -NEVER)
    for k in range(keys):
        n = ptr[k + 1] - ptr[k]
        if n:
            own = np.sort(ordered[ptr[k] : ptr[k + 1]])
            found[0, k] = own[int((n - 1) * USUAL)]
            found[1, k] = (own[(n - 1) // 2] + own[n // 2]) // 2
    return found


@jit(
    "void(int32[::1], int32[::1], uint8[::1], int32[::1], bool_[::1], int64[::1], int64[::1], int64,"
    "int64[::1], bool_[::1], int64[::1])"
)
def _lags(
    src: Int32s,
    dst: Int32s,
    rule: NDArray[np.uint8],
    rank: Int32s,
    takes: Bools,
    start: Int64s,
    end: Int64s,
    ranks: int,
    lag: Int64s,
    from_start: Bools,
    delay: Int64s,
) -> None:
    """Fill `lag` and `from_start` of the edges, and the `delay` of the rows, which do not start for so much longer.

    A row hangs on (`binds`) what ended last, but on its launch wherever that explains when it started: what passes
    between two kernels that a slow host launches one by one is no latency of the stream, even if it is shorter than
    that of a launch. The latencies of launches are those of streams that were idle.
    """
    apart, binds = np.empty(src.size, np.int64), np.empty(src.size, np.bool_)
    least = np.full(start.size, NEVER)
    for e in range(src.size):
        u, v = src[e], dst[e]
        from_start[e] = rule[e] == LAUNCH and start[v] < end[u]
        apart[e] = start[v] - (start[u] if from_start[e] else end[u])
        least[v] = min(least[v], apart[e])
    key = np.full(src.size, -1, np.int32)
    for e in range(src.size):
        binds[e] = apart[e] == least[dst[e]]
        if binds[e] and rule[e] == LAUNCH and not from_start[e] and apart[e] >= 0:
            key[e] = rank[dst[e]]
    idle = _usual(apart, key, ranks)[0]
    launched = np.zeros(start.size, np.bool_)
    for e in range(src.size):
        if rule[e] == LAUNCH and (from_start[e] or apart[e] <= idle[rank[dst[e]]]):
            launched[dst[e]] = True
    key[:] = -1
    for e in range(src.size):
        v = dst[e]
        binds[e] = rule[e] == LAUNCH if launched[v] else binds[e]
        latent = rule[e] <= WAKE and (takes[v] or rule[e] == WAKE)
        if latent and binds[e] and not from_start[e] and apart[e] >= 0:
            key[e] = rank[v] * (WAKE + 1) + rule[e]
    most, usual = _usual(apart, key, ranks * (WAKE + 1))
    delay[:] = NEVER
    for e in range(src.size):
        v = dst[e]
        lag[e] = 0
        if rule[e] <= WAKE and (takes[v] or rule[e] == WAKE):
            k = rank[v] * (WAKE + 1) + rule[e]
            cap = max(most[k] if binds[e] else usual[k], 0)
            lag[e] = max(apart[e] if from_start[e] or rule[e] == WAKE else min(apart[e], cap), 0)
        delay[v] = min(delay[v], apart[e] - lag[e])
    for e in range(src.size):
        v = dst[e]
        latent = rule[e] <= WAKE and (takes[v] or rule[e] == WAKE)
        if latent and 0 < delay[v] <= MIN_DELAY_NS and apart[e] - lag[e] == delay[v]:
            lag[e] += delay[v]
    for v in range(start.size):
        delay[v] = delay[v] if MIN_DELAY_NS < delay[v] < NEVER else 0


def add_lags(rows: pl.DataFrame, edges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Edges with `lag_ns` and `from_start`, and rows with a delay before each that starts later than these explain.

    An edge of a rule up to `QUEUE` carries the latency that was measured, up to what is usual for its rule and rank; on
    edges that did not bind, at most the usual. How long a thread takes to wake is not known, so that all of it is the
    edge's. Delays are rows of kind `unexplained` on the lane of the row that they hold up. Ends of edges are places in
    `rows`, before and after.
    """
    takes = rows.select(pl.col("kind").is_in([*DEVICE_KINDS, "event", "launch"])).to_series().to_numpy(writable=True)
    start, dur = (rows[column].to_numpy(writable=True) for column in ("start_ns", "dur_ns"))
    src, dst = (edges[end].to_numpy(writable=True) for end in ("src", "dst"))
    rule = edges["rule"].to_physical().to_numpy(writable=True)
    lag, from_start, delay = np.empty(src.size, np.int64), np.empty(src.size, bool), np.empty(start.size, np.int64)
    ranks, rank = np.unique(rows["rank"].to_numpy(), return_inverse=True)
    _lags(src, dst, rule, rank.astype(np.int32), takes, start, start + dur, ranks.size, lag, from_start, delay)
    timed = edges.with_columns(lag_ns=pl.Series(lag), from_start=pl.Series(from_start))
    at = np.flatnonzero(takes & (delay > 0) & ~rows["blocks"].to_numpy()).astype(np.int32)
    return _delays(rows, timed, at, delay[at])


def _delays(rows: pl.DataFrame, edges: pl.DataFrame, at: Int32s, delay: Int64s) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Put a row of kind `unexplained` before each row `at` that is held up, and move its in-edges there."""
    delay_ns = pl.lit(pl.Series(delay))
    held = rows[at].with_columns(
        id=in_role("id", DELAY),
        kind=pl.lit("unexplained", KINDS),
        name=pl.format("delay of {}", "name"),
        start_ns=pl.col("start_ns") - delay_ns,
        dur_ns=delay_ns,
    )
    row = np.arange(rows.height, dtype=np.int32)
    place = row + np.searchsorted(at, row, side="right").astype(np.int32)
    enter = place.copy()
    enter[at] -= 1  # what the row waited for, its delay now does
    moved = edges.with_columns(
        src=pl.Series(place[edges["src"].to_numpy()]), dst=pl.Series(enter[edges["dst"].to_numpy()])
    )
    after = pl.select(
        src=pl.Series(enter[at]),
        dst=pl.Series(place[at]),
        lag_ns=pl.lit(0, pl.Int64),
        from_start=pl.lit(value=False),
        rule=pl.lit("delay", RULES),
        evidence=pl.lit("exact", EVIDENCES),
        hard=pl.lit(value=True),
    )
    both = pl.concat([rows, held])[np.argsort(np.concatenate([place, enter[at]]))]
    return both, pl.concat([moved.select(after.columns), after])


@jit("int64[::1](int32[::1], int64[::1], bool_[::1], int64)")
def _last(dst: Int32s, ready: Int64s, other: Bools, n: int) -> Int64s:
    """The edge to each of n rows that was satisfied last, of equals one of an `other` rule than its lane's."""
    last = np.full(n, -1)
    for e in range(dst.size):
        b = last[dst[e]]
        if b < 0 or ready[e] > ready[b] or (ready[e] == ready[b] and other[e] >= other[b]):
            last[dst[e]] = e
    return last


def evidence(rows: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """Links by rule and evidence, with the waiting time that hangs on each; and the delays that hang on nothing.

    The time between a row and the one before it on its lane hangs on the edge that was satisfied last.
    """
    on_lane = rows.select((pl.col("kind") != "boundary") & (pl.col("lane") != "net")).to_series().to_numpy()
    start, dur = rows["start_ns"].to_numpy(), rows["dur_ns"].to_numpy()
    end = start + dur
    lane = rows["rank"].to_numpy().astype(np.int64) << 32 | rows["lane"].to_physical().to_numpy()
    order = np.lexsort((start, lane))
    order = order[on_lane[order]]
    before, after = order[:-1], order[1:]
    waited = np.zeros(start.size, np.int64)
    waited[after] = np.where(lane[after] == lane[before], np.maximum(start[after] - end[before], 0), 0)
    src, dst = (edges[end].to_numpy(writable=True) for end in ("src", "dst"))
    ready = np.where(edges["from_start"].to_numpy(), start[src], end[src]) + edges["lag_ns"].to_numpy()
    other = edges.select(~pl.col("rule").is_in(["thread", "stream"])).to_series().to_numpy(writable=True)
    last = _last(dst, ready, other, start.size)
    time_ns = np.where(last[dst] == np.arange(dst.size), waited[dst], 0)
    hanging = edges.select("rule", "evidence", time_ns=time_ns).group_by("rule", "evidence")
    links = hanging.agg(count=pl.len().cast(pl.Int64), time_ns=pl.sum("time_ns"))
    links = links.cast({"rule": pl.String, "evidence": pl.String})
    unexplained = rows.select(pl.col("kind") == "unexplained").to_series().to_numpy()
    nothing = (
        "explained by nothing",
        None,
        int(unexplained.sum()),
        int(dur[unexplained].sum()),
        "rows of kind unexplained",
    )
    return pl.concat(
        [
            links.sort("rule", "evidence")
            .select(
                "count",
                "time_ns",
                what=pl.format("edges of rule {}", "rule"),
                rank=pl.lit(None, pl.Int32),
                detail=pl.format("evidence: {}", "evidence"),
            )
            .select(list(REPORT)),
            pl.DataFrame([nothing], schema=REPORT, orient="row"),
        ]
    )
