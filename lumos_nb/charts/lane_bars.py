"""What a timeline draws: a bar for each stretch of a lane, short ones merged, and where the critical path runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import polars as pl

from lumos_nb.errors import LumosError, SchemaError, shown
from lumos_nb.partition import HasOps
from lumos_nb.schema import OPS, require

ACTIVITIES = {
    "kernel": "compute",
    "comm": "transfer",
    "memcpy": "copy",
    "memset": "copy",
    "cpu": "host operator",
    "launch": "runtime call",
    "alloc": "runtime call",
    "wait": "runtime call",
    "gap": "between operators",
    "event": "waiting",
    "join": "waiting",
    "unexplained": "unexplained",
    "boundary": "before the step",
}
"""Kind of op -> what its lane is doing. A rank without a device computes in its operators: there `cpu` is "compute"."""

LANE = ("rank", "lane")
_LENGTH = pl.col("end_ns") - pl.col("start_ns")
LABEL = pl.format("rank {} · {}", "rank", "lane")
_NO_PATH = pl.DataFrame(schema={"rank": pl.Int32, "lane": pl.String, "start_ns": pl.Int64, "path_ns": pl.Int64})


@runtime_checkable
class HasPath(HasOps, Protocol):
    """A `Result`: replayed ops and the critical path through them."""

    @property
    def path(self) -> pl.DataFrame:
        """In time order: `rank`, `lane`, `start_ns`, `path_ns` (0 where the path leaves an op at its start)."""


@dataclass(frozen=True, slots=True)
class LaneBars:
    """Rows to draw, in ns after the first start of the op table, cut to the window.

    Attributes
    ----------
    window_ns
        From and to.
    lanes
        Labels of the lanes that have any row: by rank, CPU threads first.
    bars
        `rank`, `lane`, `label`, `waits` (the lane does nothing but wait), `kind`, `name`, `activity`, `dur_ns` (of the
        whole op) of the longest op in the bar, `slack_ns` (the least of any), `ops` (how many), `busy_ns` (their time
        in the window together), `start_ns`, `end_ns`.
    stays
        Where the critical path is: `rank`, `lane`, `label`, `start_ns`, `end_ns`.
    links
        From a stay to the next one on another lane: `from_label`, `from_ns`, `label`, `start_ns`.
    step_ns
        When the last step of the op table begins, if it does so in the window: the work of earlier ones has ended.
    """

    window_ns: tuple[int, int]
    lanes: list[str]
    bars: pl.DataFrame
    stays: pl.DataFrame
    links: pl.DataFrame
    step_ns: int | None

    @property
    def rows(self) -> int:
        """How many rows there are to draw."""
        return len(self.bars) + len(self.stays) + len(self.links)


def lane_bars(
    source: HasOps | pl.DataFrame,
    *,
    window_ns: tuple[int, int] | None = None,
    ranks: Collection[int] | None = None,
    columns: int = 900,
    max_rows: int = 3000,
) -> LaneBars:
    """Bars of what every lane does and when, and the critical path if the source has one.

    Stretches shorter than a column of the window that begin in the same column of a lane become one bar; longer ones
    stay as they are. Stays of the path are merged in the same way. Where that leaves more than `max_rows` rows, columns
    are doubled in width until it does not.

    Parameters
    ----------
    source, window_ns, ranks, max_rows
        As in `charts.timeline`.
    columns
        Into how many columns the window is divided: pixels.

    Raises
    ------
    LumosError, SchemaError
        As `charts.timeline`.
    """
    if not isinstance(source, pl.DataFrame):
        require(source, "ops")
    ops = OPS.check(source if isinstance(source, pl.DataFrame) else source.ops)
    zero_ns = ops.select(pl.min("start_ns").fill_null(0)).item()
    chosen = ops.filter(pl.col("rank").is_in(list(ranks))) if ranks is not None else ops
    spans = _spans(chosen, zero_ns)
    begin_ns, end_ns = window_ns or (0, spans.select(pl.max("end_ns").fill_null(0)).item())
    within = _clip(spans, begin_ns, end_ns).filter(pl.col("end_ns") > pl.col("start_ns"))
    if within.is_empty():
        raise LumosError(_why_nothing(spans, ops, begin_ns, end_ns))
    stays = _stays(source.path if isinstance(source, HasPath) else _NO_PATH, zero_ns)
    column_ns = max((end_ns - begin_ns) // columns, 1)
    step_ns = _step_begin(ops, zero_ns)
    step_ns = step_ns if step_ns is not None and begin_ns <= step_ns <= end_ns else None
    while (drawn := _drawn(within, stays, (begin_ns, end_ns), column_ns, step_ns)).rows > max_rows:
        if column_ns > end_ns - begin_ns:  # one bar a lane, and still too many
            raise LumosError(
                f"max_rows is {max_rows}, but {len(drawn.lanes)} lanes need {drawn.rows} rows. Choose fewer `ranks`."
            )
        column_ns *= 2
    return drawn


def _step_begin(ops: pl.DataFrame, zero_ns: int) -> int | None:
    """When the work of all steps before the last has ended, on devices if there are any."""
    work = ops.filter(~pl.col("kind").is_in(["event", "join"]))
    on_device = work.filter(pl.col("device").is_not_null())
    earlier = (on_device if len(on_device) else work).filter(pl.col("step") < ops["step"].max())
    end_ns: int | None = earlier.select((pl.col("start_ns") + pl.col("dur_ns")).max()).item()
    return None if end_ns is None else end_ns - zero_ns


def _why_nothing(spans: pl.DataFrame, ops: pl.DataFrame, begin_ns: int, end_ns: int) -> str:
    if spans.is_empty():
        there = ops["rank"].unique().sort().to_list()
        return f"nothing to draw: no op takes time on the ranks chosen. The table has {len(ops)} ops, of ranks {there}."
    first_ns, last_ns = spans.select(pl.min("start_ns"), pl.max("end_ns")).row(0)
    return f"nothing runs from {begin_ns} to {end_ns} ns; the ops run from {first_ns} to {last_ns} ns."


def with_activity(ops: pl.DataFrame) -> pl.DataFrame:
    """Ops with what each means for its lane, `activity`.

    Raises
    ------
    SchemaError
        An op is of a kind that `schema.OP_KINDS` lacks.
    """
    kind = pl.col("kind")
    if (unknown := ops.filter(~kind.is_in(list(ACTIVITIES))).head(1)).height:
        op_id, bad = unknown.select("op_id", "kind").row(0)
        raise SchemaError(f"op {op_id} is of kind {shown(bad)}; kinds are {', '.join(ACTIVITIES)}.")
    computes = (kind == "cpu") & ~pl.col("device").is_not_null().any().over("rank")
    activity = pl.when(computes).then(pl.lit("compute")).otherwise(kind.replace_strict(ACTIVITIES))
    return ops.with_columns(activity=activity)


def _spans(ops: pl.DataFrame, zero_ns: int) -> pl.DataFrame:
    """What takes time on each lane, waiting included."""
    ops = with_activity(ops).with_columns(waits=pl.lit(value=False), start_ns=pl.col("start_ns") - zero_ns)
    ops = ops.filter(pl.col("lane") != "net").drop_nulls([*LANE, "start_ns", "dur_ns"])
    ops = ops.with_columns(end_ns=pl.col("start_ns") + pl.col("dur_ns")).sort("start_ns", maintain_order=True)
    slack = pl.col("slack_ns") if "slack_ns" in ops.columns else pl.lit(None, pl.Int64)
    columns = (*LANE, "kind", "name", "shapes", "activity", "waits", "start_ns", "end_ns", "dur_ns", "slack_ns")
    ops = ops.with_columns(slack_ns=slack).select(*columns, "collective")
    return pl.concat([_waits(ops), ops]).filter(pl.col("end_ns") > pl.col("start_ns")).with_columns(label=LABEL)


def _waits(ops: pl.DataFrame) -> pl.DataFrame:
    """Waiting is the gap on a lane after an arrival at a collective, and before what remains of a blocking call."""
    arrival = (pl.col("kind") == "event") & pl.col("collective").is_not_null()
    blocking = pl.col("kind") == "wait"
    before, after = pl.col("end_ns").shift(1).over(LANE), pl.col("start_ns").shift(-1).over(LANE)
    gaps = ops.with_columns(
        start_ns=pl.when(arrival).then("end_ns").when(blocking).then(before),
        end_ns=pl.when(arrival).then(after).when(blocking).then("start_ns"),
        name=pl.format("waiting: {}", pl.when(arrival).then("collective").otherwise("name")),
        activity=pl.lit("waiting"),
        waits=pl.lit(value=True),
    )
    return gaps.with_columns(dur_ns=_LENGTH, slack_ns=pl.lit(None, pl.Int64))


def _stays(path: pl.DataFrame, zero_ns: int) -> pl.DataFrame:
    """The path as stays on lanes, in order."""
    start = pl.col("start_ns") - zero_ns
    visits = path.filter(pl.col("lane") != "net").group_by(pl.struct(LANE).rle_id().alias("visit"), maintain_order=True)
    stays = visits.agg(pl.col(LANE).first(), start_ns=start.min(), end_ns=(start + pl.col("path_ns")).max())
    return stays.drop("visit").with_columns(label=LABEL)


def _clip(rows: pl.DataFrame, begin_ns: int, end_ns: int) -> pl.DataFrame:
    """Rows that touch the window, cut to it."""
    touching = rows.filter((pl.col("end_ns") >= begin_ns) & (pl.col("start_ns") <= end_ns))
    return touching.with_columns(pl.col("start_ns", "end_ns").clip(begin_ns, end_ns))


def _drawn(
    spans: pl.DataFrame, stays: pl.DataFrame, window_ns: tuple[int, int], column_ns: int, step_ns: int | None
) -> LaneBars:
    """The rows that columns of this width leave."""
    longest_first = spans.sort(_LENGTH, descending=True, maintain_order=True)
    bars = _merge(
        longest_first,
        (*LANE, "label", "waits"),
        window_ns[0],
        column_ns,
        pl.col("kind", "name", "shapes", "activity", "dur_ns").first(),
        pl.col("slack_ns").min(),
        busy_ns=_LENGTH.sum(),
        ops=pl.len(),
    ).sort(pl.col("kind") != "boundary", ~pl.col("waits"), "start_ns", "label")  # the last is on top
    merged = _merge(stays, (*LANE, "label"), window_ns[0], column_ns).sort("start_ns", maintain_order=True)
    ranks = spans["rank"].unique().implode()
    linked = merged.with_columns(
        pl.col("label", "rank").shift(1).name.prefix("from_"),
        from_ns=pl.min_horizontal(pl.col("end_ns").shift(1), "start_ns"),
    )
    links = linked.filter(
        pl.col("label") != pl.col("from_label"),
        pl.col("rank").is_in(ranks),
        pl.col("from_rank").is_in(ranks),
        pl.col("from_ns") >= window_ns[0],
        pl.col("start_ns") <= window_ns[1],
    ).select("from_label", "from_ns", "label", "start_ns")
    shown = _clip(merged, *window_ns).filter(pl.col("rank").is_in(ranks))
    lanes = pl.concat(rows.select(*LANE, "label") for rows in (bars, shown)).unique()
    return LaneBars(window_ns, in_order(lanes), bars, shown, links, step_ns)


def _merge(
    rows: pl.DataFrame, keys: tuple[str, ...], begin_ns: int, column_ns: int, *more: pl.Expr, **named: pl.Expr
) -> pl.DataFrame:
    """Rows shorter than a column of time, one for all that begin in it; the longer ones as they are."""
    short = pl.col("end_ns") - pl.col("start_ns") < column_ns
    column = pl.when(short).then((pl.col("start_ns") - begin_ns) // column_ns)
    own = pl.when(~short).then(pl.int_range(pl.len()))
    groups = rows.group_by(*keys, column.alias("column"), own.alias("own"), maintain_order=True)
    return groups.agg(pl.col("start_ns").min(), pl.col("end_ns").max(), *more, **named).drop("column", "own")


def in_order(lanes: pl.DataFrame) -> list[str]:
    """Labels by rank, CPU threads first, then by the numbers in a lane's name."""
    lane = pl.col("lane")
    numbers = [lane.str.extract(pattern).cast(pl.Int64, strict=False) for pattern in (r"^gpu(\d+)", r":(\d+)$")]
    in_order = lanes.sort("rank", ~lane.str.starts_with("cpu"), *numbers, "lane", nulls_last=True)
    return [str(label) for label in in_order["label"]]
