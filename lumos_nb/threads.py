"""One thread of events -> ops: its runtime calls and the stretches between them, and what encloses each."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb import call_stacks
from lumos_nb.calls import (
    CALL_CATEGORIES,
    CALL_PATTERNS,
    COLLECTIVE_CATEGORY,
    COMM_LABEL,
    ENGINE_OPERATORS,
    HOST_COLLECTIVE,
    HOST_COMM,
    STEP_MARK,
    classify,
)

FRAME_CATEGORIES = ("cpu_op", "user_annotation")


def thread_ops(events: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """One thread's calls and the stretches between them."""
    name = pl.col("name")
    is_call = pl.col("category").is_in(CALL_CATEGORIES)
    is_collective = pl.col("category") == COLLECTIVE_CATEGORY
    is_frame = pl.col("category").is_in(FRAME_CATEGORIES) & ~name.str.contains(f"{STEP_MARK}|{HOST_COMM}")
    label = name.str.extract(COMM_LABEL, 1).replace_strict({"comm": "launch", "wait": "wait_comm"}, default=None)
    work = events.filter(is_call | is_frame | is_collective).with_columns(
        call=pl.when(is_call)
        .then(classify(name, CALL_PATTERNS))
        .when(is_collective)
        .then(pl.lit(HOST_COLLECTIVE))
        .otherwise(label),
        own_args=pl.when(is_collective).then("args"),
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
    .when(pl.col("name").str.contains(r"(?i)^optimizer\b"))
    .then(pl.lit("optimizer"))
    .when(pl.col("name").str.contains(r"(?i)^(#+ *)?backward\b"))
    .then(pl.lit("backward"))
    .when(pl.col("name").str.contains(r"(?i)forward"))
    .then(pl.lit("forward"))
    .when(pl.col("sequence").is_not_null() & (pl.col("category") == "cpu_op"))
    .then(pl.lit("forward"))
)
_MICRO_BATCH = pl.coalesce(
    pl.col("name").str.extract(r"(?i)micro_?batch[ =#:]*(\d+)"), pl.col("args").str.extract(r'"micro_batch":(\d+)')
).cast(pl.Int32, strict=False)


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
        [calls.select("start_ns", "end_ns", "name", "call", "correlation", "event_id", "own_args"), around],
        how="horizontal",
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
            HOST_COLLECTIVE: "comm",
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
