"""What waits for whom in a window of a step: a graph of boxes that stays readable, for layers or phases are one box."""

from __future__ import annotations

from collections.abc import Collection
from functools import reduce
from operator import or_
from typing import Any

import altair as alt
import polars as pl

from lumos_nb.charts.lane_bars import LABEL, in_order, with_activity
from lumos_nb.charts.style import (
    ACTIVITY_COLOURS,
    CLASS_COLOURS,
    GREY,
    INK,
    as_annotated,
    check_window,
    heading,
    names,
    texts,
    told,
)
from lumos_nb.critical_path import Result
from lumos_nb.display import format_ns
from lumos_nb.errors import InputError, LumosError, shown
from lumos_nb.graph import Graph
from lumos_nb.schema import require

DETAILS = ("op", "layer", "phase", "lane")
"""What a box holds: one op, or those of a lane that follow one another in a layer, in a phase, or at all."""
_COLUMN_PX, _ROW_PX = 78, 46
_OF_RULE = {"launch": "launch", "collective": "communication", "event": "event", "sync": "wait of the host"}
_WIDE = 0.84
"""Of a column, what a box takes; lines have the rest."""
_RULES = (*dict.fromkeys(_OF_RULE.values()), "other")


@as_annotated
def dependencies(
    source: Graph | Result,
    *,
    window_ns: tuple[int, int] | None = None,
    ranks: Collection[int] | None = None,
    detail: str | None = None,
    title: str | None = None,
    width_px: int = 1100,
) -> alt.LayerChart:
    """Draw which ops of a window wait for which, as boxes on their lanes.

    A box stands to the right of all that it waits for, so the axis is an order and no time. Boxes of a lane go in turn;
    lines lead to other lanes and end in a dot at what waits. What other lines imply is left out. Of a result, boxes on
    the critical path are outlined.

    Parameters
    ----------
    source
        A measured graph, or a replayed one.
    window_ns
        From and to, in ns after the first start in the table, as `timeline` counts; None takes all.
    ranks
        The ranks to draw; None takes all.
    detail
        What a box holds, of `DETAILS`; None takes the finest of them that leaves boxes wide enough to be read.
    title
        None says what a box is.
    width_px
        Width of the chart.

    Raises
    ------
    InputError
        The source is no graph, or the detail unknown.
    LumosError
        Nothing runs in the window, or there is no room for so much of it.

    Examples
    --------
    >>> dependencies(replay(graph), window_ns=(0, 5_000_000), ranks=[0, 1])
    """
    graph = source.graph if isinstance(source, Result) else source
    require(graph, "edges")
    if detail not in (None, *DETAILS):
        raise InputError(f"detail is {shown(detail)}; it may be {', '.join(DETAILS)}, or None.")
    check_window(window_ns)
    ops = _in_window(source.ops, window_ns, ranks)
    room = max(width_px // _COLUMN_PX, 1)
    found = (boxes_of(ops, graph.edges, level, room) for level in (DETAILS if detail is None else (detail,)))
    if (fitting := next((one for one in found if one is not None), None)) is None:
        raise LumosError(
            f"the window has {len(ops):,} ops, whose boxes would be narrower than {_COLUMN_PX} px: choose a shorter "
            f"window_ns, a coarser detail ({', '.join(DETAILS)}) or a larger width_px."
        )
    boxes, links = fitting
    path = source.path["op_id"] if isinstance(source, Result) else pl.Series([], dtype=pl.Int64)
    on_path = ops.filter(pl.col("op_id").is_in(path.implode()))["op_id"].implode()
    boxes = boxes.with_columns(critical=pl.col("members").list.set_intersection(on_path).list.len() > 0)
    outlined = "; outlined: the critical path" if boxes["critical"].any() else ""
    text = heading(
        "What waits for whom" if title is None else title, f"{len(ops):,} ops of step {graph.step}{outlined}"
    )
    return _drawn(boxes, links, width_px).properties(
        width=width_px, height=_ROW_PX * boxes["label"].n_unique(), title=text
    )


def _in_window(ops: pl.DataFrame, window_ns: tuple[int, int] | None, ranks: Collection[int] | None) -> pl.DataFrame:
    """Ops by when they run, with `label` of their lane and `activity`; joins of all ranks are on one lane."""
    joins = pl.col("lane") == "net"
    ops = with_activity(ops.drop_nulls("start_ns")).with_columns(
        label=pl.when(joins).then(pl.lit("network")).otherwise(LABEL), start_ns=pl.col("start_ns") - pl.min("start_ns")
    )
    begin, end = window_ns or (0, int(ops["start_ns"].max() or 0))  # type: ignore[arg-type]
    chosen = ops.filter(pl.col("start_ns") <= end, pl.col("start_ns") + pl.col("dur_ns") >= begin)
    chosen = chosen.filter(True if ranks is None else pl.col("rank").is_in(list(ranks)) | joins)
    if chosen.filter(~joins).is_empty():
        raise LumosError(f"nothing runs from {begin} to {end} ns on the ranks chosen; the table has {len(ops):,} ops.")
    return chosen.with_columns(rank=pl.when(~joins).then("rank")).sort("start_ns", "op_id")


def boxes_of(
    ops: pl.DataFrame, edges: pl.DataFrame, detail: str, room: int
) -> tuple[pl.DataFrame, pl.DataFrame] | None:
    """Ops of a lane that belong together as one box, and the edges between boxes of different lanes.

    A box ends where its lane waits for one that began later; so boxes make no cycle. Of `detail` "lane" it goes on.

    Returns
    -------
    boxes
        `box`, `rank`, `lane`, `label`, `phase`, `layers`, `activity` (of most of its time), `name` (of its longest op),
        `text`, `ops` (how many), `members` (their `op_id`), `dur_ns` (their time), `took`, `column`.
    links
        `src`, `dst` (boxes), `rule`, `edges` (how many).
    None
        More boxes than `room` would stand side by side.
    """
    keys = {"op": ["op_id"], "layer": ["phase", "layer"], "phase": ["phase"], "lane": []}[detail]
    ops = _placed(ops).with_columns(key=pl.struct(pl.lit(""), *keys))
    of = ops.select("op_id", "label", at=pl.int_range(pl.len()))
    edges = edges.join(of, left_on="src", right_on="op_id").join(of, left_on="dst", right_on="op_id", suffix="_to")
    cut = _cut(ops, edges, room, cycles=detail == "lane")
    if cut is None:
        return None
    box, column, direct = cut
    ops = ops.with_columns(box=box)
    longest = pl.col("name").sort_by("dur_ns").last()
    most = ops.group_by("box", "activity").agg(pl.sum("dur_ns")).sort("dur_ns").group_by("box").agg(pl.last("activity"))
    boxes = ops.group_by("box", maintain_order=True).agg(
        pl.col("rank", "lane", "label", "phase").first(), longest, pl.sum("dur_ns"),
        layers=pl.col("layer").drop_nulls().unique(maintain_order=True), ops=pl.len(), members="op_id",
    ).join(most, on="box", maintain_order="left")  # fmt: skip
    rule = pl.col("rule").replace_strict(_OF_RULE, default="other")
    across = edges.filter(pl.col("label") != pl.col("label_to"))
    links = across.select(src=box.gather(across["at"]), dst=box.gather(across["at_to"]), rule=rule)
    pairs = pl.DataFrame(direct, schema={"src": pl.Int64, "dst": pl.Int64}, orient="row")
    links = links.join(pairs, on=["src", "dst"], how="semi")
    boxes = boxes.with_columns(column=pl.Series(column)[boxes["box"]])
    return _named(boxes, detail), links.group_by("src", "dst", "rule", maintain_order=True).len("edges")


def _placed(ops: pl.DataFrame) -> pl.DataFrame:
    """Ops with phase and layer: what has none, as a gap, has those before it; between parts of a layer all is of it."""
    named = ~pl.col("kind").is_in(["gap", "unexplained"])
    own = pl.when(named).then(pl.struct(pl.col("phase").fill_null("other"), "layer"))
    ops = ops.with_columns(own.forward_fill().backward_fill().over("label").struct.unnest())
    before, after = (getattr(pl.col("layer"), f"{way}_fill")().over("label") for way in ("forward", "backward"))
    return ops.with_columns(layer=pl.coalesce("layer", pl.when(before == after).then(before)))


def _cut(
    ops: pl.DataFrame, edges: pl.DataFrame, room: int, *, cycles: bool
) -> tuple[pl.Series, list[int], list[tuple[int, int]]] | None:
    """The box of every op; the column of every box, behind all that it waits for; pairs of boxes to be linked.

    None if there is no room.
    """
    sources: dict[int, list[int]] = {}
    for src, dst in edges.filter(pl.col("at") < pl.col("at_to")).select("at", "at_to").iter_rows():
        sources.setdefault(dst, []).append(src)
    box: list[int] = []
    last: dict[str, tuple[int, object]] = {}
    follows: list[set[int]] = []  # of each box those that it waits for, unless of `cycles` all before it
    for at, (label, key) in enumerate(ops.select("label", "key").iter_rows()):
        now, was = last.get(label, (-1, None))
        into = {box[src] for src in sources.get(at, ())} - {now}
        if key != was or (not cycles and max(into, default=-1) > now):
            into |= {now} - {-1}
            now = len(follows)
            follows.append(set())
            if now >= room * (len(last) + 1):
                return None
        last[label] = now, key
        box.append(now)
        follows[now] |= into
    behind: list[int] = []
    column: list[int] = []
    direct: list[tuple[int, int]] = []
    for now, into in enumerate(follows):
        before = [one for one in into if one < now]
        column.append(1 + max((column[one] for one in before), default=-1))
        behind.append(reduce(or_, (behind[one] | 1 << one for one in before), 0))  # as bits
        direct += [(one, now) for one in into if cycles or not any(behind[other] >> one & 1 for other in into)]
    return (pl.Series(box, dtype=pl.Int64), column, direct) if max(column) < room else None


def _named(boxes: pl.DataFrame, detail: str) -> pl.DataFrame:
    """Boxes with `text`: what it is, and how long its ops take."""
    layers, several = pl.col("layers").list, pl.format("{} ops", "ops")
    of_layers = pl.when(layers.len() > 1).then(pl.format("{}, {} layers", "phase", layers.len())).when(layers.len() > 0)
    what = of_layers.then(pl.format("{} {}", "phase", layers.first())).otherwise("phase")
    what = pl.when(pl.col("ops") > 1).then(several if detail == "lane" else what).otherwise("name")
    boxes = boxes.with_columns(took=texts(boxes["dur_ns"], format_ns), what=what.str.replace(r"^.*::", ""))
    return boxes.with_columns(text=pl.concat_str("what", "took", separator="\n")).drop("what")


def _drawn(boxes: pl.DataFrame, links: pl.DataFrame, width_px: int) -> alt.LayerChart:
    present = [activity for activity in ACTIVITY_COLOURS if activity in set(boxes["activity"])]
    colours = alt.Scale(domain=present, range=[ACTIVITY_COLOURS[activity] for activity in present])
    boxes = boxes.with_columns(to=pl.col("column") + _WIDE)
    at = boxes.select("box", "label", "column", "to")
    ends = links.join(at, left_on="src", right_on="box").join(at, left_on="dst", right_on="box", suffix="_to")
    turns = at.sort("label", "column").with_columns(to=pl.col("to").shift(1).over("label")).drop_nulls()
    end = float(at["to"].max())  # type: ignore[arg-type]
    y, y2 = (names(name, in_order(boxes)) for name in ("label", "label_to"))
    x = {
        name: alt.X(f"{name}:Q").scale(domain=[0, end], nice=False).axis(None) for name in ("column", "to", "column_to")
    }
    rules = [rule for rule in _RULES if rule in set(links["rule"])]
    ink = alt.Color("rule:N").scale(domain=rules, range=[CLASS_COLOURS[1 + _RULES.index(rule)] for rule in rules])
    box = alt.Chart(boxes.drop("members", "layers")).encode(x=x["column"], x2="to:Q", y=y)
    line = alt.Chart(ends)
    shape: dict[str, Any] = {"height": _ROW_PX - 12, "cornerRadius": 3}
    layers = (
        alt.Chart(turns).mark_rule(stroke=GREY).encode(x=x["to"], x2="column:Q", y=y),
        box.mark_bar(opacity=0.35, **shape).encode(
            color=alt.Color("activity:N", scale=colours).title("mostly"),
            tooltip=told("label", "phase", "name", "ops", "took", "activity"),
        ),
        box.transform_filter("datum.critical").mark_bar(filled=False, stroke=INK, strokeWidth=1.4, **shape),
        line.mark_rule(strokeWidth=1.3).encode(
            x=x["to"],
            x2="column_to:Q",
            y=y,
            y2="label_to:N",
            color=ink.title("waits for"),
            tooltip=told("rule", "edges"),
        ),
        line.mark_point(filled=True, size=22, opacity=1).encode(x=x["column_to"], y=y2, color=ink.legend(None)),
        box.mark_text(align="left", dx=5, dy=-6, lineBreak="\n", fontSize=10, limit=width_px / end * _WIDE - 8).encode(
            x=x["column"], x2=alt.X2(), text="text:N"
        ),
    )
    chart: alt.LayerChart = alt.layer(*layers).resolve_scale(color="independent")
    return chart
