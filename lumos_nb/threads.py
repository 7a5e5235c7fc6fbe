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
    COMM_ISSUE,
    COMM_LABEL,
    ENGINE_OPERATORS,
    HOST_COLLECTIVE,
    HOST_COMM,
    STEP_MARK,
    classify,
)
from lumos_nb.repairs import counted

FRAME_CATEGORIES = ("cpu_op", "user_annotation")

Int64s = NDArray[np.int64]

_LIST = r"\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\]"
_SHAPES = rf'"Input Dims":\s*({_LIST})'
_DTYPE = r'"Input type":\s*\[[^\]]*?"([^"\]]+)"'


def thread_ops(events: pl.DataFrame, marks: pl.DataFrame, layers: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The calls of all threads of all ranks and the stretches between them, by rank, thread and time; overlaps."""
    calls, frames, lanes = _by_lane(events, layers)
    ranks = _numbers(lanes["rank"])
    of_rank = np.searchsorted(_numbers(marks["rank"]), np.stack([ranks, ranks + 1], axis=1))
    lane, start, end, call, mark = call_stacks.cut(
        *frames.tops(lanes.height), *_edges(calls, lanes.height), of_rank, _numbers(marks["start_ns"])
    )
    inner = frames.innermost_at(lane, start, strictly=call >= 0)
    rows = rows_at(calls.drop("lane", "start_ns", "end_ns", "over_ns"), call).with_columns(
        *rows_at(lanes.select("rank", "thread", lane=pl.format("cpu:{}", "thread")), lane).get_columns(),
        *frames.around(inner, is_call=call >= 0),
        start_ns=pl.Series(start),
        dur_ns=pl.Series(end - start),
        step=_steps(marks, of_rank, lane, mark),
    )
    is_call, is_gap = pl.col("call").is_not_null(), pl.col("call_name").is_null() & pl.col("parent").is_null()
    last = pl.Series(np.append(lane[1:] != lane[:-1], [True])[: lane.size])
    after = pl.when(last).then(None).otherwise(pl.coalesce("parent", "call_name").shift(-1)).fill_null("the next step")
    rows = rows.with_columns(
        name=pl.coalesce("call_name", "parent", pl.lit("before ") + pl.when(is_gap).then(after)),
        kind=pl.coalesce("kind", pl.when(pl.col("parent").is_null()).then(pl.lit("gap")).otherwise(pl.lit("cpu"))),
        site=pl.when(is_call).then(pl.struct(pl.col("path"), name="call_name").hash(2)),
        launch_ns=pl.when(is_call).then("start_ns"),
        shapes=pl.col("args").str.extract(_SHAPES),
        dtype=pl.col("args").str.extract(_DTYPE),
    )
    over = pl.concat([calls.select("lane", "over_ns"), frames.overlaps()]).filter(pl.col("over_ns") > 0)
    over = over.select(rank=lanes["rank"].gather(over["lane"]), time_ns="over_ns")
    detail = "calls and operators that end after the next or the outer one has: calls end there, operators stay inside"
    return rows.drop("path", "args"), counted("overlaps on a thread", over, detail)


def _steps(marks: pl.DataFrame, of_rank: Int64s, lane: Int64s, mark: Int64s) -> pl.Series:
    """The step at each mark (-1: before the rank's first, in the step before it; a rank without marks is in step 0)."""
    numbers = np.append(_numbers(marks["step"]), 0)
    first = np.where(of_rank[:, 0] < of_rank[:, 1], numbers[of_rank[:, 0]] - 1, 0)
    return pl.Series(np.where(mark >= 0, numbers[mark], first[lane]).astype(np.int32))


def _meanings(names: pl.Series) -> pl.DataFrame:
    """What each distinct name says, one row a name: the patterns look at names once, not at every event."""
    name = pl.col("name")
    labelled = name.str.extract(COMM_LABEL, 1)
    return (
        names.unique()
        .to_frame("name")
        .with_row_index("word")
        .select(
            "name",
            "word",
            does=classify(name, CALL_PATTERNS),
            labelled=labelled.replace_strict({"comm": "launch", "wait": "wait_comm"}, default=None),
            # A number that the issue and the wait of one labelled collective share, in place of a correlation id.
            label_id=pl.when(labelled.is_not_null()).then((name.str.slice(6).hash(7) // 2).cast(pl.Int64)),
            # Its sequence number is another one each step; without it the same call has the same name in every step.
            plain=name.str.replace(r"^((?:comm|wait)::.*) seq=\d+", "$1"),
            ignored=name.str.contains(f"{STEP_MARK}|{HOST_COMM}"),
            executes=name.str.contains(HOST_COMM),
            issues=name.str.contains(COMM_ISSUE),
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


def _by_lane(events: pl.DataFrame, layers: pl.DataFrame) -> tuple[pl.DataFrame, _Frames, pl.DataFrame]:
    """The calls and the frames of all threads, each with its `lane`; and the lanes, `rank` and `thread` of each."""
    category, call = pl.col("category"), pl.col("call")
    is_call, is_collective = category.is_in(CALL_CATEGORIES), category == COLLECTIVE_CATEGORY
    known = is_call | is_collective | category.is_in(FRAME_CATEGORIES)
    on_threads = events.filter(pl.col("thread").is_not_null() & (pl.col("dur_ns") >= 0) & known)
    words = _meanings(on_threads["name"])
    looked_up = words.select("name", "word", "does", "labelled", "ignored", "issues")
    work = (
        on_threads.drop("device", "stream", "external_id")
        .with_row_index("row")
        .join(looked_up, on="name", how="left", maintain_order="left")
        .with_columns(
            call=pl.when(is_call).then("does").when(is_collective).then(pl.lit(HOST_COLLECTIVE)).otherwise("labelled"),
            end_ns=pl.col("start_ns") + pl.col("dur_ns"),
            lane=pl.col("row").first().over("rank", "thread").cast(pl.Int64),
        )
    )
    lanes = work.filter(pl.col("row") == pl.col("lane")).select("lane", "rank", "thread")
    work = work.with_columns(lane=pl.Series(np.searchsorted(lanes["lane"], work["lane"])))
    if words["executes"].any():
        ranks = work.filter(pl.col("name").is_in(words.filter("executes")["name"].implode()))["rank"].unique()
        issues = pl.col("rank").is_in(ranks.implode()) & _unlabelled(work)
        work = work.with_columns(call=pl.when(issues).then(pl.lit("launch")).otherwise("call"))
    calls = _sorted(work.filter(call.is_not_null()), "event_id")
    frames = _sorted(work.filter(call.is_null() & ~(is_call | pl.col("ignored"))), -pl.col("end_ns"))
    return _calls(calls, words), _Frames(frames, words, layers), lanes


def _unlabelled(work: pl.DataFrame) -> pl.Series:
    """Which operators issue a collective that CPU threads execute, without a label of the recorder around them.

    Those that call the runtime of a device issue one there, and those around another that issues are no issue of
    their own.
    """
    labels = work.filter(labelled="launch").select("lane", "start_ns", until_ns="end_ns").sort("start_ns")
    is_call = pl.col("category").is_in(CALL_CATEGORIES)
    calls = work.filter(is_call).select("lane", "start_ns", call_ns="start_ns").sort("start_ns")
    issues = work.filter(pl.col("issues") & (pl.col("category") == "cpu_op"))
    issues = issues.select("row", "lane", "start_ns", "end_ns").sort("start_ns", -pl.col("end_ns"), maintain_order=True)
    then_ns, until_ns = (pl.col(at).shift(-1).over("lane") for at in ("start_ns", "end_ns"))
    holds = (then_ns < pl.col("end_ns")) & (until_ns <= pl.col("end_ns"))
    issues = issues.filter(~holds.fill_null(value=False))
    issues = issues.join_asof(labels, on="start_ns", by="lane", check_sortedness=False)
    issues = issues.join_asof(calls, on="start_ns", by="lane", strategy="forward", check_sortedness=False)
    apart = (pl.col("end_ns") > pl.col("until_ns")) | pl.col("until_ns").is_null()
    on_host = (pl.col("call_ns") >= pl.col("end_ns")) | pl.col("call_ns").is_null()
    return work["row"].is_in(issues.filter(apart & on_host)["row"].implode())


def _numbers(column: pl.Series) -> Int64s:
    return column.cast(pl.Int64).to_numpy(writable=True)


def _sorted(rows: pl.DataFrame, then: str | pl.Expr) -> pl.DataFrame:
    """Rows by lane, start and `then`; files have them nearly so, which this sort makes use of and polars' does not."""
    keys = rows.select(then, pl.col("start_ns"), pl.col("lane"))
    return rows[np.lexsort([_numbers(key) for key in keys.get_columns()])]


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


def _calls(calls: pl.DataFrame, words: pl.DataFrame) -> pl.DataFrame:
    """Calls without overlap on their thread: rounding and nesting make some end after the next one starts."""
    meant = words[calls["word"]]
    end_ns = pl.min_horizontal("end_ns", pl.col("start_ns").shift(-1).over("lane"))
    own_id = (pl.col("event_id").hash(7) // 2).cast(pl.Int64)  # beside those of labels
    return calls.select(
        "lane",
        "start_ns",
        "call",
        "event_id",
        end_ns=end_ns,
        over_ns=pl.col("end_ns") - end_ns,
        correlation=pl.coalesce(meant["label_id"], "correlation", pl.when("issues").then(own_id)),
        own_args=pl.when(pl.col("call") == HOST_COLLECTIVE).then("args"),
        label=pl.when(pl.col("labelled").is_not_null()).then("name"),
        call_name=meant["plain"],
        kind=pl.col("call").replace_strict(_KINDS, default="wait"),
    )


def _edges(rows: pl.DataFrame, lanes: int) -> tuple[Int64s, Int64s]:
    """Offset of each lane's first row, and starts and ends of all rows in turn."""
    edges = np.stack([_numbers(rows["start_ns"]), _numbers(rows["end_ns"])], axis=1).ravel()
    return np.searchsorted(_numbers(rows["lane"]), np.arange(lanes + 1)), edges


def rows_at(table: pl.DataFrame, index: Int64s) -> pl.DataFrame:
    """Rows of `table`, null where the index is negative."""
    return table[pl.Series(index).cast(pl.UInt32, strict=False)]  # -1 does not fit, so it becomes null


def _through(index: Int64s, at: Int64s) -> Int64s:
    """`index[at]`, -1 where `at` is."""
    return np.append(index, -1)[at]


class _Frames:
    """The operators and annotations of all threads, what encloses what, and what each inherits from those around it."""

    def __init__(self, frames: pl.DataFrame, words: pl.DataFrame, layers: pl.DataFrame) -> None:
        in_forward = pl.col("sequence").is_not_null() & (pl.col("category") == "cpu_op")
        micro_batch = pl.coalesce("named", pl.col("args").str.extract(r'"micro_batch":(\d+)'))
        self.table = frames.hstack(words.select("hash", "phase", named="micro_batch")[frames["word"]]).select(
            "lane",
            "start_ns",
            "end_ns",
            "name",
            "args",
            "event_id",
            "hash",
            phase=pl.coalesce("phase", pl.when(in_forward).then(pl.lit("forward"))),
            micro_batch=micro_batch.cast(pl.Int32, strict=False),
            layer=pl.lit(None, pl.String) if layers.is_empty() else _layer(frames, layers),
        )
        self.lane, self.start, self.end = (_numbers(frames[c]) for c in ("lane", "start_ns", "end_ns"))
        self.parent = call_stacks.nearest_encloser(self.lane, self.start, self.end)
        has_shapes = frames["args"].str.contains('"Input Dims"', literal=True).fill_null(value=False)
        self.shaped = call_stacks.innermost(self.parent, has_shapes.to_numpy(writable=True))
        # An annotation that holds nothing else is host work that the user named: an operator like any other.
        holds = np.zeros(self.parent.size, bool)
        holds[self.parent[self.parent >= 0]] = True
        self.top = call_stacks.outermost(self.parent, (frames["category"] == "cpu_op").to_numpy(writable=True) | ~holds)

    def tops(self, lanes: int) -> tuple[Int64s, Int64s]:
        """`_edges` of the outermost ones."""
        return _edges(self.table[np.flatnonzero(self.top == np.arange(self.top.size))], lanes)

    def overlaps(self) -> pl.DataFrame:
        """How much later than the one around it each frame ends: `lane`, `over_ns`."""
        outer = np.where(self.parent >= 0, self.end[self.parent], self.end)
        return pl.DataFrame({"lane": self.lane, "over_ns": self.end - outer})

    def innermost_at(self, lane: Int64s, at: Int64s, strictly: NDArray[np.bool_]) -> Int64s:
        """The innermost one open at each time, -1 if none; `strictly` if it must have begun before."""
        return call_stacks.innermost_at(self.lane, self.start, self.end, lane, at, strictly)

    def around(self, inner: Int64s, is_call: NDArray[np.bool_]) -> list[pl.Series]:
        """What is known of work inside these innermost frames from all around it; of calls also who made them."""
        top = _through(self.top, inner)
        own = rows_at(self.table.select(frame="event_id", around="name"), np.where(is_call, inner, -1))
        shaped = np.where(is_call, _through(self.shaped, inner), -1)
        operators = rows_at(self.table.select(operator="name", operator_id="event_id"), shaped)
        tops = rows_at(self.table.select(parent="name", top_frame="event_id"), top)
        return [
            *own.get_columns(),
            *operators.get_columns(),
            tops["parent"],
            tops.select(pl.when(pl.Series(is_call)).then("top_frame").alias("top_frame")).to_series(),
            *rows_at(self.table.select("args"), np.where(is_call, shaped, top)).get_columns(),
            self._inherited("phase", inner).fill_null("other"),
            self._inherited("micro_batch", inner),
            self._inherited("layer", inner),
            self._paths(np.where(top >= 0, top, inner)),
        ]

    def _inherited(self, column: str, inner: Int64s) -> pl.Series:
        """What the outermost frame that has it says to those inside."""
        says = call_stacks.outermost(self.parent, self.table[column].is_not_null().to_numpy(writable=True))
        return rows_at(self.table.select(column), _through(says, inner)).to_series()

    def _paths(self, frames: Int64s) -> pl.Series:
        """A hash of the names down to each frame; 0 for none."""
        paths = call_stacks.path_hash(self.parent, self.table["hash"].to_numpy(writable=True))
        return rows_at(pl.DataFrame({"path": paths}), frames).to_series().fill_null(0)


def _layer(frames: pl.DataFrame, layers: pl.DataFrame) -> pl.Series:
    return frames.join(layers, on=["rank", "event_id"], how="left", maintain_order="left")["layer"]
