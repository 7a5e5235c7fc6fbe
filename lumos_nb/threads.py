"""Threads of events -> ops: their runtime calls and the stretches between them, and what encloses each."""

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
from lumos_nb.scopes import layers_of

FRAME_CATEGORIES = ("cpu_op", "user_annotation")

Int64s = NDArray[np.int64]

_LIST = r"\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\]"
_SHAPES = rf'"Input Dims":\s*({_LIST})'
_DTYPE = r'"Input type":\s*\[[^\]]*?"([^"\]]+)"'


def thread_ops(events: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """The calls of all threads of all ranks and the stretches between them, by rank, thread and time."""
    work, lanes = _by_lane(events, _meanings(events["name"]))
    is_call = pl.col("call").is_not_null()
    calls = _clip(_sorted(work.filter(is_call), "event_id"))
    frames = _Frames(_sorted(work.filter(~is_call), -pl.col("end_ns")))
    ranks = _numbers(lanes["rank"])
    of_rank = np.searchsorted(_numbers(marks["rank"]), np.stack([ranks, ranks + 1], axis=1))
    lane, start, end, call, mark = call_stacks.cut(
        *frames.tops(lanes.height), *_edges(calls, lanes.height), of_rank, _numbers(marks["start_ns"])
    )
    between = call < 0
    inner = frames.innermost_at(lane, start, ~between)
    described = [
        _calls(calls, frames, inner[~between]),
        _stretches(start[between], end[between], frames, inner[between]),
    ]
    rows = pl.concat(described, how="diagonal_relaxed")[np.where(between, calls.height + np.cumsum(between) - 1, call)]
    # Before a rank's first mark lies the step before it; a rank without marks is in step 0.
    numbers = np.append(_numbers(marks["step"]), 0)
    first = np.where(of_rank[:, 0] < of_rank[:, 1], numbers[of_rank[:, 0]] - 1, 0)
    follows = pl.Series(np.append(lane[1:] == lane[:-1], [False])[: lane.size])
    following = pl.when(follows).then(pl.coalesce("parent", "name").shift(-1)).fill_null("the next step")
    return rows.with_columns(
        *lanes.select("rank", "thread", lane=pl.format("cpu:{}", "thread"))[lane].get_columns(),
        name=pl.when(pl.col("kind") == "gap").then(pl.lit("before ") + following).otherwise("name"),
        dur_ns=pl.col("end_ns") - pl.col("start_ns"),
        step=pl.Series(np.where(mark >= 0, numbers[mark], first[lane]).astype(np.int32)),
        shapes=pl.col("args").str.extract(_SHAPES),
        dtype=pl.col("args").str.extract(_DTYPE),
    )


def _meanings(names: pl.Series) -> pl.DataFrame:
    """What each distinct name says, one row a name: the patterns look at names once, not at every event."""
    name = pl.col("name")
    labelled = name.str.extract(COMM_LABEL, 1)
    return (
        names.unique()
        .to_frame("name")
        .select(
            "name",
            does=classify(name, CALL_PATTERNS),
            labelled=labelled.replace_strict({"comm": "launch", "wait": "wait_comm"}, default=None),
            # A number that the issue and the wait of one labelled collective share, in place of a correlation id.
            label_id=pl.when(labelled.is_not_null()).then((name.str.slice(6).hash(7) // 2).cast(pl.Int64)),
            # Its sequence number is another one each step; without it the same call has the same name in every step.
            plain=name.str.replace(r"^((?:comm|wait)::.*) seq=\d+", "$1"),
            ignored=name.str.contains(f"{STEP_MARK}|{HOST_COMM}"),
            hash=name.hash(1),
            phase=_PHASE,
            micro_batch=name.str.extract(r"(?i)micro_?batch[ =#:]*(\d+)"),
        )
    )


_PHASE = (
    pl.when(pl.col("name").str.contains(ENGINE_OPERATORS))
    .then(pl.lit("backward"))
    .when(pl.col("name").str.contains(r"(?i)^optimizer\b"))
    .then(pl.lit("optimizer"))
    .when(pl.col("name").str.contains(r"(?i)^(#+ *)?backward\b"))
    .then(pl.lit("backward"))
    .when(pl.col("name").str.contains(r"(?i)forward"))
    .then(pl.lit("forward"))
)


def _by_lane(events: pl.DataFrame, meanings: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What shows on threads, each row with its `lane`; and the lanes, `rank` and `thread` of each."""
    category, call = pl.col("category"), pl.col("call")
    is_call, is_collective = category.is_in(CALL_CATEGORIES), category == COLLECTIVE_CATEGORY
    known = is_call | is_collective | category.is_in(FRAME_CATEGORIES)
    on_threads = events.filter(pl.col("thread").is_not_null() & (pl.col("dur_ns") >= 0) & known)
    work = on_threads.with_row_index("row").join(meanings, on="name", how="left", maintain_order="left").with_columns(
        call=pl.when(is_call).then("does").when(is_collective).then(pl.lit(HOST_COLLECTIVE)).otherwise("labelled"),
        correlation=pl.coalesce("label_id", "correlation"),
        end_ns=pl.col("start_ns") + pl.col("dur_ns"),
        own_args=pl.when(is_collective).then("args"),
        lane=pl.col("row").first().over("rank", "thread").cast(pl.Int64),
    )
    work = work.filter(call.is_not_null() | ~(is_call | pl.col("ignored")))
    layers = layers_of(events)
    work = (
        work.join(layers, on=["rank", "event_id"], how="left", maintain_order="left")
        if layers.height
        else work.with_columns(layer=pl.lit(None, pl.String))
    )
    lanes = work.select("lane", "rank", "thread").unique().sort("lane")
    return work.with_columns(lane=pl.Series(np.searchsorted(lanes["lane"], work["lane"]))), lanes


def _numbers(column: pl.Series) -> Int64s:
    return column.cast(pl.Int64).to_numpy(writable=True)


def _sorted(rows: pl.DataFrame, then: str | pl.Expr) -> pl.DataFrame:
    """Rows by lane, start and `then`; files have them nearly so, which this sort makes use of and polars' does not."""
    keys = rows.select(then, pl.col("start_ns"), pl.col("lane"))
    return rows[np.lexsort([_numbers(key) for key in keys.get_columns()])]


def _clip(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls without overlap on their thread: rounding and nesting make some end after the next one starts."""
    return calls.with_columns(end_ns=pl.min_horizontal("end_ns", pl.col("start_ns").shift(-1).over("lane")))


def _edges(rows: pl.DataFrame, lanes: int) -> tuple[Int64s, Int64s]:
    """Offset of each lane's first row, and starts and ends of all rows in turn."""
    edges = np.stack([_numbers(rows["start_ns"]), _numbers(rows["end_ns"])], axis=1).ravel()
    return np.searchsorted(_numbers(rows["lane"]), np.arange(lanes + 1)), edges


def _gather(values: pl.Series, index: Int64s) -> pl.Series:
    """`values[index]`, null where the index is negative."""
    where = pl.Series(index).cast(pl.UInt32, strict=False)  # -1 does not fit, so it becomes null
    return values.gather(where) if len(values) else pl.Series(values.name, [None] * index.size, dtype=values.dtype)


def _through(index: Int64s, at: Int64s) -> Int64s:
    """`index[at]`, -1 where `at` is."""
    return np.append(index, -1)[at]


class _Frames:
    """The operators and annotations of all threads, what encloses what, and what each inherits from those around it."""

    def __init__(self, frames: pl.DataFrame) -> None:
        in_forward = pl.col("sequence").is_not_null() & (pl.col("category") == "cpu_op")
        self.table = frames.with_columns(
            phase=pl.coalesce("phase", pl.when(in_forward).then(pl.lit("forward"))),
            micro_batch=pl.coalesce("micro_batch", pl.col("args").str.extract(r'"micro_batch":(\d+)')).cast(
                pl.Int32, strict=False
            ),
        )
        self.lane, self.start, self.end = (_numbers(frames[c]) for c in ("lane", "start_ns", "end_ns"))
        self.parent = call_stacks.nearest_encloser(self.lane, self.start, self.end)
        # An annotation that holds nothing else is host work that the user named: an operator like any other.
        holds = np.zeros(self.parent.size, bool)
        holds[self.parent[self.parent >= 0]] = True
        self.top = call_stacks.outermost(self.parent, (frames["category"] == "cpu_op").to_numpy(writable=True) | ~holds)

    def tops(self, lanes: int) -> tuple[Int64s, Int64s]:
        """`_edges` of the outermost ones."""
        return _edges(self.table[np.flatnonzero(self.top == np.arange(self.top.size))], lanes)

    def innermost_at(self, lane: Int64s, at: Int64s, strictly: NDArray[np.bool_]) -> Int64s:
        """The innermost one open at each time, -1 if none; `strictly` if it must have begun before."""
        return call_stacks.innermost_at(self.lane, self.start, self.end, lane, at, strictly)

    def inherited(self, column: str, inner: Int64s) -> pl.Series:
        """What the outermost frame that has it says to those inside."""
        values = self.table[column]
        says = call_stacks.outermost(self.parent, values.is_not_null().to_numpy(writable=True))
        return _gather(values, _through(says, inner))

    def around(self, inner: Int64s) -> dict[str, pl.Series]:
        """What is known of work inside these innermost frames from all around it."""
        return {
            "parent": _gather(self.table["name"], _through(self.top, inner)),
            "phase": self.inherited("phase", inner).fill_null("other"),
            "micro_batch": self.inherited("micro_batch", inner),
            "layer": self.inherited("layer", inner),
        }

    def sites(self, inner: Int64s) -> pl.Series:
        """A hash of the names down to the outermost operator, or down to the innermost annotation outside all."""
        paths = call_stacks.path_hash(self.parent, self.table["hash"].to_numpy(writable=True))
        top = _through(self.top, inner)
        return _gather(pl.Series(paths), np.where(top >= 0, top, inner)).fill_null(0)


def _stretches(start: Int64s, end: Int64s, frames: _Frames, inner: Int64s) -> pl.DataFrame:
    """What lies between two cuts and outside every call."""
    top = _through(frames.top, inner)
    return pl.DataFrame(
        {"start_ns": start, "end_ns": end, "args": _gather(frames.table["args"], top)} | frames.around(inner)
    ).with_columns(name="parent", kind=pl.when(pl.col("parent").is_null()).then(pl.lit("gap")).otherwise(pl.lit("cpu")))


_KINDS = {
    "launch": "launch",
    "alloc": "alloc",
    "free": "alloc",
    "record": "launch",
    "wait_event": "launch",
    "elapsed": "cpu",
    HOST_COLLECTIVE: "comm",
}
"""Kind of op of what a call does; the others are a `wait`."""


def _calls(calls: pl.DataFrame, frames: _Frames, inner: Int64s) -> pl.DataFrame:
    outside = {
        "frame": _gather(frames.table["event_id"], inner),
        "top_frame": _gather(frames.table["event_id"], _through(frames.top, inner)),
        "around": _gather(frames.table["name"], inner),
        "args": _gather(frames.table["args"], inner),
        "path": frames.sites(inner),
    }
    table = calls.select(
        "start_ns",
        "end_ns",
        "call",
        "correlation",
        "event_id",
        "own_args",
        label=pl.when(pl.col("labelled").is_not_null()).then("name"),
        name="plain",
        call_name="plain",
        launch_ns="start_ns",
        kind=pl.col("call").replace_strict(_KINDS, default="wait"),
    ).with_columns(**outside, **frames.around(inner))
    return table.with_columns(site=pl.struct("path", "name").hash(2)).drop("path")
