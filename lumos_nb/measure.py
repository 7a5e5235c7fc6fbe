"""From what was measured to work, lags and delays: what remains of each row once its edges are taken into account."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb._jit import jit
from lumos_nb._replay_kernels import offsets, order_by, topological
from lumos_nb.errors import GraphError
from lumos_nb.lanes import DELAY, in_role
from lumos_nb.schema import DEVICE_KINDS

MIN_DELAY_NS = 3_000
"""A row that starts less than this after all that it waits for needs no explanation: the rest is in its edge's lag."""

USUAL = 0.9
"""Quantile of launch latencies and of gaps in a busy stream that still counts as usual; what is beyond is a delay."""

LATENCY_RULES = ("launch", "stream", "queue")
"""Rules whose edges carry a latency of the hardware: it belongs to the edge, not to a delay."""


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


def in_issue_order(rows: pl.DataFrame, edges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows in a topological order of the edges, as close to the order of their raw starts as that allows.

    Ends of edges are ids on entry and places in `rows` on return.
    """
    rows = rows.sort(pl.coalesce("issue_ns", "from_ns"), "from_ns", "id", maintain_order=True)
    ids = rows["id"].to_numpy()
    by_id = np.argsort(ids).astype(np.int32)
    src, dst = (by_id[np.searchsorted(ids, edges[end].to_numpy(), sorter=by_id)] for end in ("src", "dst"))
    n = rows.height
    order = topological(offsets(src, n), dst[order_by(src, np.arange(src.size, dtype=np.int32), n)])
    if order.size < n:
        stuck = rows.with_row_index("row").filter(~pl.col("row").is_in(pl.Series(order).implode()))
        first = stuck.row(0, named=True)
        raise GraphError(
            f"the rules of step {first['step']} make a cycle of {stuck.height} ops, one of them {first['name']!r} "
            f"on rank {first['rank']}, lane {first['lane']}, at {first['from_ns']} ns: the "
            "trace's times contradict its order."
        )
    place = np.empty(n, np.int32)
    place[order] = np.arange(n, dtype=np.int32)
    return rows[order], edges.with_columns(src=pl.Series(place[src]), dst=pl.Series(place[dst]))


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


def add_lags(rows: pl.DataFrame, edges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Edges with `lag_ns` and `from_start`, and rows with a delay before each that starts later than these explain.

    An edge of `LATENCY_RULES` carries the latency that was measured, up to what is usual for its rule and rank; on
    edges that did not bind, at most the usual. Delays are rows of kind `unexplained` on the lane of the row that they
    hold up. Ends of edges are places in `rows`, before and after.
    """
    sources = rows.select(src_start_ns="start_ns", src_end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    targets = rows.select("rank", dst_start_ns="start_ns", dst_kind="kind")
    timed = edges.hstack(sources[edges["src"]]).hstack(targets[edges["dst"]])
    early = (pl.col("rule") == "launch") & (pl.col("dst_start_ns") < pl.col("src_end_ns"))
    wakes = pl.col("rule") == "wake"  # how long a thread takes to wake is not known, so all of it is the edge's
    timed = timed.with_columns(
        from_start=early,
        apart_ns=pl.col("dst_start_ns") - pl.when(early).then("src_start_ns").otherwise("src_end_ns"),
        latent=(pl.col("rule").is_in(LATENCY_RULES) & pl.col("dst_kind").is_in([*DEVICE_KINDS, "event", "launch"]))
        | wakes,
    )
    timed = _binding(timed.with_columns(binds=pl.col("apart_ns") == pl.col("apart_ns").min().over("dst")))
    usual = (
        timed.filter(pl.col("latent") & pl.col("binds") & ~pl.col("from_start") & (pl.col("apart_ns") >= 0))
        .group_by("rank", "rule")
        .agg(
            most_ns=pl.col("apart_ns").quantile(USUAL, "lower").cast(pl.Int64),
            usual_ns=pl.col("apart_ns").median().cast(pl.Int64),
        )
    )
    timed = timed.join(usual, on=["rank", "rule"], how="left", maintain_order="left")
    cap = (
        pl.when(pl.col("from_start") | wakes)
        .then("apart_ns")
        .when(pl.col("binds"))
        .then("most_ns")
        .otherwise("usual_ns")
        .fill_null(0)
    )
    lag = pl.when(pl.col("latent")).then(pl.min_horizontal("apart_ns", cap)).otherwise(0)
    timed = timed.with_columns(lag_ns=lag.clip(0)).with_columns(left_ns=pl.col("apart_ns") - pl.col("lag_ns"))
    timed = timed.with_columns(delay_ns=pl.col("left_ns").min().over("dst"))
    small = (
        (pl.col("delay_ns") > 0)
        & (pl.col("delay_ns") <= MIN_DELAY_NS)
        & (pl.col("left_ns") == pl.col("delay_ns"))
        & pl.col("latent")
    )
    timed = timed.with_columns(lag_ns=pl.col("lag_ns") + pl.when(small).then("delay_ns").otherwise(0))
    held = timed.filter(pl.col("delay_ns") > MIN_DELAY_NS).select(at="dst", delay_ns="delay_ns")
    return _delays(rows, timed, held.unique("at"))


def _binding(timed: pl.DataFrame) -> pl.DataFrame:
    """Edges with `binds`: a row hangs on what ended last, but on its launch wherever that explains when it started.

    What passes between two kernels that a slow host launches one by one is no latency of the stream, even if it is
    shorter than that of a launch. The latencies of launches are those of streams that were idle.
    """
    launch = pl.col("rule") == "launch"
    idle = (
        timed.filter(launch & pl.col("binds") & ~pl.col("from_start") & (pl.col("apart_ns") >= 0))
        .group_by("rank")
        .agg(idle_ns=pl.col("apart_ns").quantile(USUAL, "lower"))
    )
    timed = timed.join(idle, on="rank", how="left", maintain_order="left")
    explains = launch & (pl.col("from_start") | (pl.col("apart_ns") <= pl.col("idle_ns")))
    return timed.with_columns(binds=pl.when(explains.any().over("dst")).then(launch).otherwise("binds")).drop("idle_ns")


def _delays(rows: pl.DataFrame, edges: pl.DataFrame, delays: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Put a row of kind `unexplained` before each row that is held up, and move its in-edges there."""
    held = rows.with_row_index("at").cast({"at": pl.Int32})
    held = held.filter(pl.col("kind").is_in([*DEVICE_KINDS, "event", "launch"]) & ~pl.col("blocks"))
    held = held.join(delays, on="at", maintain_order="left").with_columns(
        id=in_role("id", DELAY),
        kind=pl.lit("unexplained"),
        name=pl.format("delay of {}", "name"),
        start_ns=pl.col("start_ns") - pl.col("delay_ns"),
        dur_ns="delay_ns",
    )
    at = held["at"].to_numpy()
    row = np.arange(rows.height, dtype=np.int32)
    place = row + np.searchsorted(at, row, side="right").astype(np.int32)
    enter = place.copy()
    enter[at] -= 1  # what the row waited for, its delay now does
    moved = edges.with_columns(
        src=pl.Series(place[edges["src"].to_numpy()]), dst=pl.Series(enter[edges["dst"].to_numpy()])
    )
    after = pl.DataFrame({"src": enter[at], "dst": place[at]}).with_columns(
        lag_ns=pl.lit(0, pl.Int64),
        from_start=pl.lit(value=False),
        rule=pl.lit("delay"),
        evidence=pl.lit("exact"),
        hard=pl.lit(value=True),
    )
    columns = ["src", "dst", "lag_ns", "from_start", "rule", "evidence", "hard"]
    both = pl.concat([rows, held.select(rows.columns)])[np.argsort(np.concatenate([place, enter[at]]))]
    return both, pl.concat([moved.select(columns), after.select(columns)])
