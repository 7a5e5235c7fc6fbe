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


RUNS_AS = {"reduce_scatter": "all_reduce"}
"""Collectives that gloo executes under another name: both wait in one queue."""


def executed(events: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """Collectives that CPU threads execute, each with the labelled call, or the operator, that issued it."""
    name = pl.col("name")
    runs = events.filter(pl.col("category") == "user_annotation").filter(name.str.contains(HOST_COMM))
    runs = runs.with_columns(ran=classify(name, COMM_TYPES)).with_columns(queue=pl.col("ran").replace(RUNS_AS))
    label, issuer = pl.col("label"), pl.col("call_name").str.contains(COMM_ISSUE)
    issues = host.filter((pl.col("call") == "launch") & (label.str.contains(COMM_LABEL) | issuer))
    issues = issues.select(
        "rank",
        "correlation",
        "start_ns",
        issued=pl.coalesce(label.str.extract(COMM_LABEL, 2), classify(pl.col("call_name"), COMM_TYPES)),
        group=label.str.extract(COMM_LABEL, 3),
        comm_seq=label.str.extract(COMM_LABEL, 4).cast(pl.Int64, strict=False),
        comm_bytes=label.str.extract(COMM_LABEL, 5).cast(pl.Int64, strict=False),
        peer=label.str.extract(COMM_LABEL, 7).cast(pl.Int32, strict=False),
    ).with_columns(queue=pl.col("issued").replace(RUNS_AS))
    runs, issues = _in_turn(runs.drop("correlation"), issues)
    paired = runs.join(issues, on=["rank", "queue", "nth"], how="left", maintain_order="left")
    paired = paired.with_columns(collective=pl.coalesce("issued", "ran"))
    message = pl.col("collective").is_in(["send", "recv"])
    lane = pl.when(message).then(pl.format("net:{}:{}", "collective", pl.col("peer").fill_null(-1)))
    paired = paired.with_columns(lane=lane.otherwise(pl.format("cpu:{}", "thread")), beside=message)
    paired = paired.with_columns(beside=_beside(paired))
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
        lane=pl.when(pl.col("beside") > 0).then(pl.format("{}:{}", "lane", "beside")).otherwise("lane"),
    )


def _beside(paired: pl.DataFrame) -> pl.Series:
    """Beside how many others of its lane, still under way, each message begins: these do not wait for each other."""
    under_way: dict[tuple[int, str], list[int]] = {}
    found = []
    columns = paired.select("rank", "lane", "beside", "start_ns", end_ns=_END)
    for rank, lane, message, start_ns, end_ns in columns.iter_rows():
        ends = under_way.setdefault((rank, lane), []) if message else [start_ns]
        at = next((at for at, until_ns in enumerate(ends) if until_ns <= start_ns), len(ends))
        ends[at : at + 1] = [end_ns]
        found.append(at)
    return pl.Series(found, dtype=pl.Int64)


def _in_turn(runs: pl.DataFrame, issues: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Both in the order of time, with `nth`: equal for an execution and its issue, of one rank and queue.

    An execution names no call. A queue is first in, first out, and nothing runs before it was issued. Where an issue
    finds its queue empty, it and what runs later begin anew (`_empty_at`): what is missing on one side moves nothing
    elsewhere. Between two such executions are paired from the first on where there are enough of them, else from the
    last: then some issues are no collectives of the host, or ended after the window.
    """
    key = ["rank", "queue"]
    issues = issues.sort("start_ns", maintain_order=True).with_columns(nth=pl.int_range(1, pl.len() + 1).over(key))
    runs = runs.sort("start_ns", "event_id")
    last, begins = issues.select(*key, "start_ns", last="nth"), _empty_at(runs, issues)
    for table in (last, begins):
        runs = runs.join_asof(table, on="start_ns", by=key, check_sortedness=False)
    block = [*key, "first"]
    until = pl.col("last").max().over(block)
    enough = pl.col("first").is_not_null() & (pl.len().over(block) > until - pl.col("first"))
    place = pl.int_range(1, pl.len() + 1).over(block)
    # How many are served after each, where each takes one issue if one has begun that no other has.
    begun = pl.col("last") - pl.col("first") + 1
    served = place + pl.min_horizontal((begun - place).cum_min().over(block), 0)
    takes = served > served.shift(1, fill_value=0).over(block)
    from_first = pl.when(takes).then(served + pl.col("first") - 1)
    from_end = pl.len().over(block) - place
    from_last = (pl.col("last") + from_end).cum_min(reverse=True).over(block) - from_end
    from_last = pl.when(from_last >= pl.col("first").fill_null(1)).then(from_last)
    runs = runs.with_columns(nth=pl.when(enough).then(from_first).otherwise(from_last))
    return runs.drop("last", "first"), issues.drop("start_ns")


def _empty_at(runs: pl.DataFrame, issues: pl.DataFrame) -> pl.DataFrame:
    """`start_ns`, `first` (its `nth`) of the issues that find their queue empty and none of its executions under way.

    It is empty if as many have begun to run as were issued, or more: some were issued before the window.
    """
    key = ["rank", "queue"]
    nth = pl.int_range(1, pl.len() + 1).over(key)
    begun = runs.select(*key, "start_ns", begun=nth, busy_ns=_END.cum_max().over(key))
    # What begins in the same ns as an issue may be its own, or what ended in it made room for.
    found = issues.join_asof(begun, on="start_ns", by=key, allow_exact_matches=False, check_sortedness=False)
    idle = found.filter((pl.col("busy_ns") < pl.col("start_ns")) | pl.col("busy_ns").is_null())
    ahead = pl.col("begun").fill_null(0) - (pl.col("nth") - 1)
    most = pl.max_horizontal(ahead.cum_max(), 0)
    return idle.filter((ahead >= most).over(key)).select(*key, "start_ns", first="nth")


_END = pl.col("start_ns") + pl.col("dur_ns")


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
