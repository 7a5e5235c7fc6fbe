"""Events -> ops: threads cut into stretches and calls, device work with the call that launched it."""

from __future__ import annotations

import polars as pl

from lumos_nb.calls import (
    CALL_CATEGORIES,
    CALL_PATTERNS,
    COMM_KERNELS,
    COMM_TYPES,
    DEVICE_CATEGORIES,
    HOST_COLLECTIVE,
    STEP_MARK,
    arguments,
    classify,
)
from lumos_nb.host_collectives import executed, with_waits
from lumos_nb.number_formats import ELEMENT_BYTES, number_format
from lumos_nb.repairs import REPORT, counted
from lumos_nb.schema import EVENTS, OPS
from lumos_nb.scopes import layers_of
from lumos_nb.threads import thread_ops

RAW_COLUMNS: dict[str, pl.DataType] = {
    "call": pl.String(),  # what a runtime call does (calls.CALL_PATTERNS); null for stretches and device work
    "call_name": pl.String(),  # the runtime call; for device work the one that launched it
    "site": pl.UInt64(),  # hash of the operators around the call and its name: equal in every step and rank
    "thread": pl.Int64(),  # CPU thread of the op, or of the call that launched it
    "stream": pl.Int64(),
    "launch_ns": pl.Int64(),  # start of the launching call; null where the trace lacks it
    "frame": pl.Int64(),  # event_id of the innermost operator or annotation around the call
    "top_frame": pl.Int64(),  # event_id of the outermost operator around it
    "around": pl.String(),  # name of the innermost one
    "operator": pl.String(),  # of a call and of its device work: the innermost operator around it that has shapes
    "operator_id": pl.Int64(),  # its event_id
    "event_id": pl.Int64(),
}
"""Columns of raw ops beyond `schema.OPS`, which the dependency rules need and a finished graph does not."""

_ALL_COLUMNS = {**OPS.columns, **RAW_COLUMNS}

COMM_ARGUMENTS = {
    "Collective name": pl.String(),
    "Process Group Name": pl.String(),
    "Group size": pl.Int64(),
    "In msg nelems": pl.Int64(),
    "Out msg nelems": pl.Int64(),
    "dtype": pl.String(),
    "Seq": pl.Int64(),
    "Src Rank": pl.Int64(),
    "Dst Rank": pl.Int64(),
}


def build_ops(events: pl.DataFrame) -> pl.DataFrame:
    """Ops of all ranks and steps, with their measured extents.

    Threads are cut at the start and end of every outermost operator and of every runtime call that launches, waits,
    records or allocates; what lies between two cuts is one op: `cpu` inside an operator (its name), `gap` outside
    (named after what follows). Every device event is one op with the step, site and outermost operator of its launch.

    Parameters
    ----------
    events : table
        `schema.EVENTS`, any number of ranks.

    Returns
    -------
    table
        `schema.OPS` plus `RAW_COLUMNS`; by rank, then lane, then start. Durations include waiting: `build_graph`
        takes it out.

    Examples
    --------
    >>> import lumos_nb as ln
    >>> run = ln.load_run("runs/gpt")
    >>> ln.build_ops(run.events).group_by("kind").len()
    """
    events = EVENTS.check(events)
    return ops_and_report(events, step_marks(events))[0]


def ops_and_report(events: pl.DataFrame, marks: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`build_ops` with these steps, and what was irregular in the events (`Graph.report`)."""
    events, ids = _distinct_ids(events)
    threads, overlaps = thread_ops(events, marks, layers_of(events))
    nccl = (pl.col("kind") == "kernel") & pl.col("name").str.contains(COMM_KERNELS)
    threads, linked, guessed = with_waits(threads, _device_ops(events, threads))
    device = _communication(linked, nccl)
    ops = pl.concat([_communication(threads, pl.col("call") == HOST_COLLECTIVE), device], how="diagonal_relaxed")
    ops = ops.sort("rank", maintain_order=True) if ops["rank"].n_unique() > 1 else ops
    ops = ops.with_columns(
        op_id=pl.int_range(pl.len(), dtype=pl.Int64), bytes=pl.col("own_args").str.extract(_BYTES).cast(pl.Float64)
    )
    nowhere = device.filter(pl.col("device") == NO_DEVICE).with_columns(time_ns="dur_ns")
    detail = f"device ops that name no device: they are on streams of a device {NO_DEVICE}"
    report = pl.concat([ids, overlaps, guessed, counted("no device named", nowhere, detail)])
    return ops.select(
        (pl.col(c) if c in ops.columns else pl.lit(None)).cast(dtype).alias(c) for c, dtype in _ALL_COLUMNS.items()
    ), report


NO_DEVICE = -1
"""The device of work that names none: rather one of its own than the host's."""


def step_marks(events: pl.DataFrame) -> pl.DataFrame:
    """The profiler's step marks: `rank`, `step`, `thread`, `start_ns`, `end_ns` (the next mark's start if any)."""
    number = pl.col("name").str.extract(STEP_MARK).cast(pl.Int32, strict=False)
    marks = (
        events.filter(pl.col("thread").is_not_null() & pl.col("name").str.starts_with("ProfilerStep"))
        .select("rank", number.alias("step"), "thread", "start_ns", end_ns=pl.col("start_ns") + pl.col("dur_ns"))
        .drop_nulls("step")
        .sort("rank", "start_ns")
    )
    following = pl.col("start_ns").shift(-1).over("rank")
    return marks.with_columns(end_ns=pl.coalesce(following, "end_ns"))


def _distinct_ids(events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """No correlation id of 0 (it means none) nor one that launches share: work belongs to the last one before it."""
    is_call = pl.col("category").is_in(CALL_CATEGORIES)
    ids = events.select("rank", "correlation", "category").filter(is_call & (pl.col("correlation") != 0))
    events = events.with_columns(pl.col("correlation").replace(0, None))
    distinct = ids.group_by("rank").agg(pl.col("correlation").n_unique() == pl.len())["correlation"]
    if distinct.all():
        return events, pl.DataFrame(schema=REPORT)
    ids = ids.select("rank", "correlation")
    shared = ids.filter(ids.is_duplicated()).unique()
    launches = (is_call & (classify(pl.col("name"), CALL_PATTERNS) == "launch")).fill_null(value=False)
    nth = launches.cum_sum().over("rank", "correlation", order_by="start_ns")
    fresh = (pl.struct("correlation", nth=nth).hash(8) // 2).cast(pl.Int64)
    again = pl.struct("rank", "correlation").is_in(shared.to_struct().implode()) & (nth > 1)
    detail = "launches whose correlation id an earlier launch has: work of that id belongs to the last one before it"
    twice = events.filter(launches & again).with_columns(time_ns=0)
    events = events.with_columns(correlation=pl.when(again).then(fresh).otherwise("correlation"))
    return events, counted("correlation ids used again", twice, detail)


_BYTES = r'"bytes":\s*(\d+)'


def _device_ops(events: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """Kernels, copies, sets and CPU collectives, each with what its launching call knows."""
    device = (
        events.filter(pl.col("category").is_in(list(DEVICE_CATEGORIES)))
        .select(
            "rank",
            "event_id",
            "name",
            "start_ns",
            "dur_ns",
            "correlation",
            pl.col("device").fill_null(NO_DEVICE),
            pl.col("stream").fill_null(NO_DEVICE),
            own_args="args",
            kind=pl.col("category").replace_strict(DEVICE_CATEGORIES),
        )
        .with_columns(lane=pl.format("gpu{}:{}", "device", "stream"))
        .sort("rank", "device", "stream", "start_ns", "event_id")
    )
    device = pl.concat([device, executed(events, host)], how="diagonal_relaxed")
    launches = host.filter((pl.col("call") == "launch") & pl.col("correlation").is_not_null()).select(
        "rank",
        "correlation",
        "step",
        "thread",
        "parent",
        "around",
        "operator",
        "operator_id",
        "frame",
        "top_frame",
        "shapes",
        "dtype",
        "phase",
        "micro_batch",
        "layer",
        "site",
        "call_name",
        "launch_ns",
    )
    key = ["rank", "correlation"]
    linked = device.join(launches.unique(key, keep="first"), on=key, how="left", maintain_order="left")
    # Work whose launch is not in the trace belongs to the step of the work before it on its stream. Only the backlog,
    # launched ahead of the window, has none before it.
    return linked.with_columns(pl.col("step").forward_fill().over("rank", "lane"))


def _communication(ops: pl.DataFrame, which: pl.Expr) -> pl.DataFrame:
    """Mark the communication ops and say which collective each is, of how many bytes, in which group."""
    ops = ops.with_row_index("at")
    comm = ops.filter(which)
    if comm.is_empty():
        return ops
    comm = comm.drop("dtype").with_columns(arguments(comm["own_args"], COMM_ARGUMENTS))
    stated = classify(pl.col("Collective name"), COMM_TYPES)
    around = classify(pl.col("around"), COMM_TYPES)
    comm = comm.with_columns(told=pl.coalesce(stated, around))
    # A kernel whose launch is not in the trace is what all others of its name on its stream are.
    least, most = (bound.over("rank", "lane", "name") for bound in (pl.col("told").min(), pl.col("told").max()))
    like_others = pl.when(least == most).then(least)
    by_name = classify(pl.col("name"), COMM_TYPES)
    elements = pl.max_horizontal("In msg nelems", "Out msg nelems")
    sizes = {word: ELEMENT_BYTES.get(number_format(word) or "") for word in comm["dtype"].drop_nulls().unique()}
    element_bytes = pl.col("dtype").replace_strict(sizes, default=None, return_dtype=pl.Float64)
    comm = comm.select(
        "at",
        pl.coalesce("told", like_others, by_name, pl.lit("unknown")).alias("collective"),
        group=pl.col("Process Group Name"),
        group_size=pl.col("Group size").cast(pl.Int32, strict=False),
        comm_bytes=(elements * element_bytes).cast(pl.Int64, strict=False),
        comm_seq=pl.col("Seq"),
        peer=pl.when(stated == "send").then("Dst Rank").when(stated == "recv").then("Src Rank").cast(pl.Int32),
    )
    known = [c for c in comm.columns if c in ops.columns and c != "at"]
    joined = ops.join(comm, on="at", how="left", maintain_order="left", suffix="_stated")
    joined = joined.with_columns(pl.coalesce(f"{c}_stated", c).alias(c) for c in known)
    return joined.with_columns(kind=pl.when(pl.col("collective").is_not_null()).then(pl.lit("comm")).otherwise("kind"))
