"""Collectives that CPU threads execute: which call issued each, and which stretch of its thread waited for it.

The recorder's labels say both. Where there are none (DDP's own collectives without `ddp_hook`, runs of the profiler
alone), the operator that issued it is in the trace, and the wait is a gap of the same thread that ends with it.
"""

from __future__ import annotations

import polars as pl

from lumos_nb.calls import COMM_ISSUE, COMM_LABEL, COMM_TYPES, HOST_COMM, classify
from lumos_nb.repairs import REPORT, counted

LATE_RECORD_NS = 80_000
"""So much later the record of an execution may end than the thread that waited for it has gone on."""

LEAST_WAIT_NS = 20_000
"""Gaps of less are what Python takes between two operators, whatever ends meanwhile."""


def executed(events: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """Collectives that CPU threads execute, each with the labelled call, or the operator, that issued it.

    An execution names no call, so the last execution of a type belongs to the last issue of that type, and so on back.
    """
    name = pl.col("name")
    from_end = pl.int_range(pl.len(), 0, -1).over("rank", "collective")
    runs = events.filter(pl.col("category") == "user_annotation").filter(name.str.contains(HOST_COMM))
    runs = runs.sort("start_ns", "event_id")
    runs = runs.with_columns(collective=classify(name, COMM_TYPES)).with_columns(from_end=from_end)
    label, issuer = pl.col("label"), pl.col("call_name").str.contains(COMM_ISSUE)
    issues = host.filter((pl.col("call") == "launch") & (label.str.contains(COMM_LABEL) | issuer)).sort("start_ns")
    issues = issues.select(
        "rank",
        "correlation",
        collective=pl.coalesce(label.str.extract(COMM_LABEL, 2), classify(pl.col("call_name"), COMM_TYPES)),
        group=label.str.extract(COMM_LABEL, 3),
        comm_seq=label.str.extract(COMM_LABEL, 4).cast(pl.Int64, strict=False),
        comm_bytes=label.str.extract(COMM_LABEL, 5).cast(pl.Int64, strict=False),
        peer=label.str.extract(COMM_LABEL, 7).cast(pl.Int32, strict=False),
    ).with_columns(from_end=from_end)
    paired = runs.drop("correlation").join(issues, on=["rank", "collective", "from_end"], how="left")
    p2p = pl.col("collective").is_in(["send", "recv"])
    return paired.select(
        "rank",
        "event_id",
        "name",
        "start_ns",
        "dur_ns",
        "correlation",
        "collective",
        "group",
        "comm_seq",
        "comm_bytes",
        "peer",
        own_args="args",
        kind=pl.lit("comm"),
        lane=pl.when(p2p)
        .then(pl.format("net:{}:{}", "collective", pl.col("peer").fill_null(-1)))
        .otherwise(pl.format("cpu:{}", "thread")),
    )


def with_waits(threads: pl.DataFrame, device: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Gaps in which a thread waits for an unlabelled collective that it issued, as such waits; and what they end with.

    It is the first gap after the issue that goes on until the collective ends, and then ends soon: what lies after the
    collective is the smaller half of it. Where the record of a collective ends after its waiter, it ends with that.

    Returns
    -------
    threads, device, report
        Threads with these gaps as calls that wait, device work with these ends, and how many (`Graph.report`).
    """
    device = device.with_row_index("at")
    comm = _unlabelled(device)
    if comm.is_empty():
        return threads, device.drop("at"), pl.DataFrame(schema=REPORT)
    threads = threads.with_row_index("row")
    gaps = threads.filter((pl.col("kind") == "gap") & (pl.col("dur_ns") >= LEAST_WAIT_NS))
    gaps = gaps.select("row", "rank", "thread", from_ns="start_ns", to_ns=pl.col("start_ns") + pl.col("dur_ns"))
    # Of several collectives that end in one gap it is the last that ends it.
    waits = _met(comm, gaps).sort("ended_ns").unique("row", keep="last", maintain_order=True)
    called = waits.select(
        "row",
        "correlation",
        launch_ns="from_ns",
        kind=pl.lit("wait"),
        call=pl.lit("wait_comm"),
        name=pl.lit("wait for ") + pl.col("collective"),
    )
    called = called.with_columns(call_name="name", site=pl.struct("name").hash(2))
    ends = waits.select("at", dur_ns=pl.min_horizontal("ended_ns", "to_ns") - pl.col("start_ns"))
    detail = "gaps that end with a collective that no label names: the thread that issued it waits there"
    report = counted("waits found", waits.with_columns(time_ns=pl.col("to_ns") - pl.col("from_ns")), detail)
    return threads.update(called, on="row").drop("row"), device.update(ends, on="at").drop("at"), report


def _unlabelled(device: pl.DataFrame) -> pl.DataFrame:
    """Executions of which only an operator says who issued them."""
    comm = device.filter(pl.col("kind") == "comm")  # no kernel is called so yet
    return comm.filter(pl.col("call_name").str.contains(COMM_ISSUE)).select(
        "at",
        "rank",
        "thread",
        "correlation",
        "collective",
        "launch_ns",
        "start_ns",
        ended_ns=pl.col("start_ns") + pl.col("dur_ns"),
    )


def _met(comm: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """Executions with the gap that ends with each."""
    soonest = comm.with_columns(soonest_ns=pl.col("ended_ns") - LATE_RECORD_NS).sort("soonest_ns")
    met = soonest.join_asof(
        gaps.sort("to_ns"),
        left_on="soonest_ns",
        right_on="to_ns",
        by=["rank", "thread"],
        strategy="forward",
        coalesce=False,
        check_sortedness=False,
    )
    begun = pl.max_horizontal("launch_ns", "start_ns")
    soon = 2 * (pl.col("to_ns") - pl.col("ended_ns")) <= pl.col("to_ns") - pl.col("from_ns")
    return met.filter(
        (pl.col("to_ns") > begun)
        & (pl.col("from_ns") >= pl.col("launch_ns"))
        & (pl.col("from_ns") < pl.col("ended_ns"))
        & soon
    )
