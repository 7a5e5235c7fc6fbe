"""Events -> ops: threads cut into stretches and calls, device work with the call that launched it."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb import call_stacks
from lumos_nb.calls import (
    CALL_CATEGORIES,
    CALL_PATTERNS,
    COMM_KERNELS,
    COMM_LABEL,
    COMM_TYPES,
    DEVICE_CATEGORIES,
    ENGINE_OPERATORS,
    HOST_COMM,
    STEP_MARK,
    arguments,
    classify,
)
from lumos_nb.schema import EVENTS, OPS
from lumos_nb.scopes import layers_of

RAW_COLUMNS: dict[str, pl.DataType] = {
    "call": pl.String(),  # what a runtime call does (calls.CALL_PATTERNS); null for stretches and device work
    "call_name": pl.String(),  # the runtime call; for device work the one that launched it
    "site": pl.UInt64(),  # hash of the operators around the call and its name: equal in every step and rank
    "thread": pl.Int64(),  # CPU thread of the op, or of the call that launched it
    "stream": pl.Int64(),
    "launch_ns": pl.Int64(),  # start of the launching call; null where the trace lacks it
    "frame": pl.Int64(),  # event_id of the innermost operator or annotation around the call
    "top_frame": pl.Int64(),  # event_id of the outermost operator around it
    "around": pl.String(),  # its name
    "event_id": pl.Int64(),
}
"""Columns of raw ops beyond `schema.OPS`, which the dependency rules need and a finished graph does not."""

FRAME_CATEGORIES = ("cpu_op", "user_annotation")

_ALL_COLUMNS = {**OPS.columns, **RAW_COLUMNS}

COMM_ARGUMENTS = {
    "Collective name": pl.String(),
    "Process Group Name": pl.String(),
    "Group size": pl.Int64(),
    "In msg nelems": pl.Int64(),
    "Out msg nelems": pl.Int64(),
    "dtype": pl.String(),
    "Seq": pl.Int64(),
}
ELEMENT_BYTES = {
    "Float": 4,
    "Half": 2,
    "BFloat16": 2,
    "Double": 8,
    "Int": 4,
    "Long": 8,
    "Char": 1,
    "Byte": 1,
    "Bool": 1,
    "Short": 2,
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
    >>> run = ln.load_run("runs/gpt")           # doctest: +SKIP
    >>> ln.build_ops(run.events).group_by("kind").len()  # doctest: +SKIP
    """
    events = EVENTS.check(events)
    ranks = [_rank_ops(part) for part in events.partition_by("rank", maintain_order=True)]
    if not ranks:
        return OPS.empty().with_columns(pl.lit(None, dtype).alias(name) for name, dtype in RAW_COLUMNS.items())
    ops = pl.concat(ranks).with_columns(op_id=pl.int_range(pl.len(), dtype=pl.Int64))
    return OPS.check(ops)


def step_marks(events: pl.DataFrame) -> pl.DataFrame:
    """The profiler's step marks: `rank`, `step`, `thread`, `start_ns`, `end_ns` (the next mark's start if any)."""
    number = pl.col("name").str.extract(STEP_MARK).cast(pl.Int32, strict=False)
    marks = (
        events.filter(pl.col("thread").is_not_null() & pl.col("name").str.contains(STEP_MARK))
        .select("rank", number.alias("step"), "thread", "start_ns", end_ns=pl.col("start_ns") + pl.col("dur_ns"))
        .drop_nulls("step")
        .sort("rank", "start_ns")
    )
    following = pl.col("start_ns").shift(-1).over("rank")
    return marks.with_columns(end_ns=pl.coalesce(following, "end_ns"))


def _rank_ops(events: pl.DataFrame) -> pl.DataFrame:
    events = _distinct_ids(events)
    marks = step_marks(events)
    host = events.filter(pl.col("thread").is_not_null() & (pl.col("dur_ns") >= 0))
    host = host.join(layers_of(events), on="event_id", how="left", maintain_order="left")
    lanes = [_thread_ops(lane, marks) for lane in host.partition_by("thread", maintain_order=True)]
    threads = pl.concat([_EMPTY, *lanes], how="diagonal_relaxed")
    ops = pl.concat([threads, _device_ops(events, threads)], how="diagonal_relaxed")
    ops = ops.with_columns(
        shapes=pl.col("args").str.extract(_SHAPES),
        dtype=pl.col("args").str.extract(_DTYPE),
        bytes=pl.col("own_args").str.extract(_BYTES).cast(pl.Float64),
    )
    missing = [pl.lit(None, dtype).alias(c) for c, dtype in _ALL_COLUMNS.items() if c not in ops.columns]
    return ops.with_columns(missing).select(pl.col(c).cast(dtype) for c, dtype in _ALL_COLUMNS.items())


def _distinct_ids(events: pl.DataFrame) -> pl.DataFrame:
    """No correlation id of 0 (it means none) nor one that launches share: work belongs to the last one before it."""
    events = events.with_columns(pl.col("correlation").replace(0, None))
    is_call = pl.col("category").is_in(CALL_CATEGORIES)
    ids = events.filter(is_call)["correlation"].drop_nulls()
    shared = ids.filter(ids.is_duplicated()).unique()
    if shared.is_empty():
        return events
    launches = (is_call & (classify(pl.col("name"), CALL_PATTERNS) == "launch")).fill_null(value=False)
    nth = launches.cum_sum().over("correlation", order_by="start_ns")
    fresh = (pl.struct("correlation", nth=nth).hash(8) // 2).cast(pl.Int64)
    again = pl.col("correlation").is_in(shared.implode()) & (nth > 1)
    return events.with_columns(correlation=pl.when(again).then(fresh).otherwise("correlation"))


_EMPTY = pl.DataFrame(
    schema={
        "name": pl.String,
        "start_ns": pl.Int64,
        "call": pl.String,
        "correlation": pl.Int64,
        "step": pl.Int32,
        "thread": pl.Int64,
        "parent": pl.String,
        "around": pl.String,
        "frame": pl.Int64,
        "top_frame": pl.Int64,
        "args": pl.String,
        "phase": pl.String,
        "micro_batch": pl.Int32,
        "layer": pl.String,
        "site": pl.UInt64,
        "call_name": pl.String,
        "label": pl.String,
        "launch_ns": pl.Int64,
    }
)
_LIST = r"\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\]"
_SHAPES = rf'"Input Dims":\s*({_LIST})'
_DTYPE = r'"Input type":\s*\[[^\]]*?"([^"\]]+)"'
_BYTES = r'"bytes":\s*(\d+)'


def _thread_ops(events: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """One thread's calls and the stretches between them."""
    name = pl.col("name")
    is_call = pl.col("category").is_in(CALL_CATEGORIES)
    is_frame = pl.col("category").is_in(FRAME_CATEGORIES) & ~name.str.contains(f"{STEP_MARK}|{HOST_COMM}")
    label = name.str.extract(COMM_LABEL, 1).replace_strict({"comm": "launch", "wait": "wait_comm"}, default=None)
    work = events.filter(is_call | is_frame).with_columns(
        call=pl.when(is_call).then(classify(name, CALL_PATTERNS)).otherwise(label),
        correlation=pl.coalesce(_label_id(name), "correlation"),
    )
    calls = work.filter(pl.col("call").is_not_null()).sort("start_ns", "event_id")
    frames = work.filter(pl.col("category").is_in(FRAME_CATEGORIES) & pl.col("call").is_null()).with_columns(
        end_ns=pl.col("start_ns") + pl.col("dur_ns")
    )
    frames = frames.sort("start_ns", "end_ns", descending=[False, True], maintain_order=True)
    if calls.is_empty() and frames.is_empty():
        return pl.DataFrame()
    stack = _Frames(frames)
    call_rows = _clip(calls)
    call_cuts = (call_rows["start_ns"].to_numpy(writable=True), call_rows["end_ns"].to_numpy(writable=True))
    cuts = np.unique(np.concatenate([stack.cuts, *call_cuts]))
    starts = marks["start_ns"].filter(marks["start_ns"].is_between(int(cuts[0]), int(cuts[-1])))
    cuts = np.union1d(cuts, starts.to_numpy(writable=True))
    stretches = _stretches(cuts, call_rows, stack)
    rows = pl.concat([_describe_calls(call_rows, stack), stretches], how="diagonal_relaxed")
    thread = events["thread"][0]
    rank = events["rank"][0]
    rows = rows.with_columns(
        rank=pl.lit(rank, pl.Int32),
        thread=pl.lit(thread, pl.Int64),
        lane=pl.lit(f"cpu:{thread}"),
        dur_ns=pl.col("end_ns") - pl.col("start_ns"),
    ).sort("start_ns", "end_ns", maintain_order=True)
    following = pl.coalesce("parent", "name").shift(-1).fill_null("the next step")
    return rows.with_columns(
        name=pl.when(pl.col("kind") == "gap").then(pl.lit("before ") + following).otherwise("name"),
        step=_step_at(rows["start_ns"].to_numpy(writable=True), marks),
    )


class _Frames:
    """The operators and annotations of one thread, what encloses what, and what each inherits from those around it."""

    def __init__(self, frames: pl.DataFrame) -> None:
        self.start = frames["start_ns"].to_numpy(writable=True)
        self.end = frames["end_ns"].to_numpy(writable=True)
        self.parent = call_stacks.nearest_encloser(self.start, self.end)
        # An annotation that holds nothing else is host work that the user named: an operator like any other.
        holds = np.zeros(self.parent.size, bool)
        holds[self.parent[self.parent >= 0]] = True
        top = call_stacks.outermost(self.parent, (frames["category"] == "cpu_op").to_numpy(writable=True) | ~holds)
        tops = top == np.arange(top.size)
        self.cuts = np.unique(np.concatenate([self.start[tops], self.end[tops]]))
        inherited = frames.select(phase=_PHASE, micro_batch=_MICRO_BATCH)
        paths = pl.Series(call_stacks.path_hash(self.parent, frames["name"].hash(1).to_numpy(writable=True)))
        self.table = pl.DataFrame(
            {
                "frame": frames["event_id"],
                "top_frame": _gather(frames["event_id"], top),
                "around": frames["name"],
                "args": frames["args"],
                "path": paths.gather(np.where(top >= 0, top, np.arange(top.size))),
                "parent": _gather(frames["name"], top),
                "top_args": _gather(frames["args"], top),
                "phase": self._inherit(inherited["phase"]),
                "micro_batch": self._inherit(inherited["micro_batch"]),
                "layer": self._inherit(frames["layer"]),
            }
        )

    def _inherit(self, values: pl.Series) -> pl.Series:
        return _gather(values, call_stacks.outermost(self.parent, values.is_not_null().to_numpy(writable=True)))

    def at(self, times: NDArray[np.int64], *, strictly: bool = False) -> pl.DataFrame:
        """`table` rows of the innermost frame open at each (sorted) time; all null where there is none."""
        inner = call_stacks.innermost_at(self.start, self.end, times, strictly)
        return pl.DataFrame([_gather(column, inner) for column in self.table.get_columns()])


def _gather(values: pl.Series, index: NDArray[np.int64]) -> pl.Series:
    """`values[index]`, null where the index is negative."""
    where = pl.Series(index).cast(pl.UInt32, strict=False)  # -1 does not fit, so it becomes null
    return values.gather(where) if len(values) else pl.Series(values.name, [None] * index.size, dtype=values.dtype)


_PHASE = (
    pl.when(pl.col("name").str.contains(ENGINE_OPERATORS))
    .then(pl.lit("backward"))
    .when(pl.col("name").str.starts_with("Optimizer."))
    .then(pl.lit("optimizer"))
    .when(pl.col("name").str.contains(r"(?i)^#+ *backward"))
    .then(pl.lit("backward"))
    .when(pl.col("name").str.contains(r"(?i)forward"))
    .then(pl.lit("forward"))
    .when(pl.col("sequence").is_not_null() & (pl.col("category") == "cpu_op"))
    .then(pl.lit("forward"))
)
_MICRO_BATCH = pl.col("name").str.extract(r"(?i)micro_?batch[ =#:]*(\d+)").cast(pl.Int32, strict=False)


def _clip(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls of one thread without overlap: rounding and nesting make some end after the next one starts."""
    end = pl.col("start_ns") + pl.col("dur_ns")
    return calls.with_columns(end_ns=pl.min_horizontal(end, pl.col("start_ns").shift(-1).fill_null(2**62)))


def _stretches(cuts: NDArray[np.int64], calls: pl.DataFrame, frames: _Frames) -> pl.DataFrame:
    """What lies between two cuts and outside every call."""
    start, end = cuts[:-1], cuts[1:]
    last_call = np.searchsorted(calls["start_ns"].to_numpy(writable=True), start, side="right") - 1
    call_end = np.append(calls["end_ns"].to_numpy(writable=True), np.iinfo(np.int64).min)
    free = call_end[last_call] <= start
    start, end = start[free], end[free]
    inside = frames.at(start)
    operator = pl.col("parent").is_not_null()
    return inside.select(
        pl.Series("start_ns", start),
        pl.Series("end_ns", end),
        "parent",
        "micro_batch",
        "layer",
        pl.col("phase").fill_null("other"),
        kind=pl.when(operator).then(pl.lit("cpu")).otherwise(pl.lit("gap")),
        name="parent",
        args="top_args",
    )


def _describe_calls(calls: pl.DataFrame, frames: _Frames) -> pl.DataFrame:
    around = frames.at(calls["start_ns"].to_numpy(writable=True), strictly=True)
    table = pl.concat(
        [calls.select("start_ns", "end_ns", "name", "call", "correlation", "event_id"), around], how="horizontal"
    )
    # A label's sequence number is another one each step; without it the same call has the same name in every step.
    table = table.with_columns(label="name", name=pl.col("name").str.replace(r"^((?:comm|wait)::.*) seq=\d+", "$1"))
    site = pl.struct(pl.col("path").fill_null(0), "name").hash(2)
    kind = pl.col("call").replace_strict(
        {
            "launch": "launch",
            "alloc": "alloc",
            "free": "alloc",
            "record": "launch",
            "wait_event": "launch",
            "elapsed": "cpu",
        },
        default="wait",
    )
    return table.with_columns(
        kind=kind, call_name="name", site=site, phase=pl.col("phase").fill_null("other"), launch_ns="start_ns"
    ).drop("path")


def _step_at(times: NDArray[np.int64], marks: pl.DataFrame) -> pl.Series:
    """The step at each time: before the first mark the one before it, after the last the last; without marks 0."""
    if marks.is_empty():
        return pl.Series("step", np.zeros(times.size, np.int32))
    steps = marks["step"].to_numpy(writable=True)
    at = np.searchsorted(marks["start_ns"].to_numpy(writable=True), times, side="right") - 1
    return pl.Series("step", np.where(at >= 0, steps[np.maximum(at, 0)], steps[0] - 1).astype(np.int32))


def _label_id(name: pl.Expr) -> pl.Expr:
    """A number that the issue and the wait of one labelled collective share, in place of a correlation id."""
    return pl.when(name.str.contains(COMM_LABEL)).then((name.str.slice(6).hash(7) // 2).cast(pl.Int64))


def _host_comm(events: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """Collectives that CPU threads execute, each with the labelled call that issued it.

    An execution names no call, so the last execution of a type belongs to the last issue of that type, and so on back.
    """
    name = pl.col("name")
    from_end = pl.int_range(pl.len(), 0, -1).over("collective")
    runs = events.filter((pl.col("category") == "user_annotation") & name.str.contains(HOST_COMM)).sort(
        "start_ns", "event_id"
    )
    runs = runs.with_columns(collective=classify(name, COMM_TYPES)).with_columns(from_end=from_end)
    label = pl.col("label")
    issues = host.filter((pl.col("call") == "launch") & label.str.contains(COMM_LABEL)).sort("start_ns")
    issues = issues.select(
        "correlation",
        collective=label.str.extract(COMM_LABEL, 2),
        group=label.str.extract(COMM_LABEL, 3),
        comm_seq=label.str.extract(COMM_LABEL, 4).cast(pl.Int64, strict=False),
        comm_bytes=label.str.extract(COMM_LABEL, 5).cast(pl.Int64, strict=False),
        peer=label.str.extract(COMM_LABEL, 7).cast(pl.Int32, strict=False),
    ).with_columns(from_end=from_end)
    paired = runs.drop("correlation").join(issues, on=["collective", "from_end"], how="left")
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


def _device_ops(events: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """Kernels, copies, sets and CPU collectives, each with what its launching call knows."""
    device = (
        events.filter(pl.col("category").is_in(list(DEVICE_CATEGORIES)))
        .select(
            "rank",
            "event_id",
            "name",
            "device",
            "stream",
            "start_ns",
            "dur_ns",
            "correlation",
            own_args="args",
            kind=pl.col("category").replace_strict(DEVICE_CATEGORIES),
            lane=pl.format("gpu{}:{}", pl.col("device"), pl.col("stream")),
        )
        .sort("device", "stream", "start_ns", "event_id")
    )
    device = pl.concat([device, _host_comm(events, host)], how="diagonal_relaxed")
    launches = host.filter((pl.col("call") == "launch") & pl.col("correlation").is_not_null()).select(
        "correlation",
        "step",
        "thread",
        "parent",
        "around",
        "frame",
        "top_frame",
        "args",
        "phase",
        "micro_batch",
        "layer",
        "site",
        "call_name",
        "launch_ns",
    )
    linked = device.join(
        launches.unique("correlation", keep="first"), on="correlation", how="left", maintain_order="left"
    )
    # Work whose launch is not in the trace belongs to the step of the work before it on its stream. Only the backlog,
    # launched ahead of the window, has none before it.
    return _communication(linked.with_columns(pl.col("step").forward_fill().over("lane")))


def _communication(device: pl.DataFrame) -> pl.DataFrame:
    """Mark the communication kernels and say which collective each is, of how many bytes, in which group."""
    is_comm = (pl.col("kind") == "kernel") & pl.col("name").str.contains(COMM_KERNELS)
    comm = device.filter(is_comm)
    comm = comm.with_columns(arguments(comm["own_args"], COMM_ARGUMENTS))
    if comm.is_empty():
        return device
    stated = classify(pl.col("Collective name"), COMM_TYPES)
    around = classify(pl.col("around"), COMM_TYPES)
    elements = pl.max_horizontal("In msg nelems", "Out msg nelems")
    comm = comm.select(
        "event_id",
        pl.coalesce(stated, around, classify(pl.col("name"), COMM_TYPES), pl.lit("unknown")).alias("collective"),
        group=pl.col("Process Group Name"),
        group_size=pl.col("Group size").cast(pl.Int32, strict=False),
        comm_bytes=elements * pl.col("dtype").replace_strict(ELEMENT_BYTES, default=None),
        comm_seq=pl.col("Seq"),
    )
    known = [c for c in comm.columns if c in device.columns and c != "event_id"]
    joined = device.join(comm, on="event_id", how="left", maintain_order="left", suffix="_stated")
    joined = joined.with_columns(pl.coalesce(f"{c}_stated", c).alias(c) for c in known)
    return joined.with_columns(kind=pl.when(pl.col("collective").is_not_null()).then(pl.lit("comm")).otherwise("kind"))
