"""A step drawn: what runs when, where the time goes, and what was predicted of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import altair as alt
import polars as pl

from lumos_nb.charts.lane_bars import LaneBars, lane_bars
from lumos_nb.charts.style import (
    ACTIVITY_COLOURS,
    COMPUTE,
    COPY,
    INK,
    PART_COLOURS,
    SERIES,
    TRANSFER,
    UNEXPLAINED,
    as_annotated,
    check_rows,
    check_window,
    heading,
    in_ms,
    names,
    texts,
    told,
)
from lumos_nb.display import format_ns, format_share
from lumos_nb.errors import LumosError, SchemaError, shown
from lumos_nb.graph import Graph
from lumos_nb.partition import PARTS, HasOps


@as_annotated
def timeline(
    source: HasOps | pl.DataFrame,
    *,
    window_ns: tuple[int, int] | None = None,
    ranks: Collection[int] | None = None,
    title: str | None = None,
    width_px: int = 900,
    max_rows: int = 3000,
) -> alt.LayerChart:
    """Draw what every lane does and when: rank below rank, of each the CPU threads first.

    Stretches shorter than a pixel are merged with their neighbours in it into one bar that counts them, and in more
    than a pixel where there would be too many rows; the longest are always drawn by themselves. The critical path of a
    result is outlined wherever it runs, and lines lead from lane to lane. A dashed line marks where the step begins,
    once the work of earlier ones has ended. Waiting is drawn too: after the arrival at a
    collective until the last rank arrives, and before what remains of a blocking call.

    Parameters
    ----------
    source : Graph, Result or op table
        Measured or replayed ops.
    window_ns
        From and to, in ns after the first start in the table, as the axis counts; None takes all.
    ranks
        The ranks to draw; None takes all.
    title
        None says what the source is.
    width_px
        Width of the lanes: a pixel is that part of the window.
    max_rows
        Bars and lines that the chart may hold.

    Raises
    ------
    LumosError
        Nothing runs in the window, or `max_rows` is less than the lanes need.
    SchemaError
        The op table lacks a column or has a kind that `schema.OP_KINDS` lacks.

    Examples
    --------
    >>> timeline(replay(graph), window_ns=(0, 5_000_000), ranks=[0, 1])
    """
    check_window(window_ns)
    rows = lane_bars(source, window_ns=window_ns, ranks=ranks, columns=width_px, max_rows=max_rows)
    begin_ns, end_ns = rows.window_ns
    x = alt.X("start_ms:Q").scale(domain=[begin_ns / 1e6, end_ns / 1e6], nice=False).title("time (ms)")
    y = names("label", rows.lanes)
    present = [activity for activity in ACTIVITY_COLOURS if activity in set(rows.bars["activity"])]
    scale = alt.Scale(domain=present, range=[ACTIVITY_COLOURS[activity] for activity in present])
    bars = alt.Chart(_bar_rows(rows.bars)).mark_bar()
    stays = alt.Chart(in_ms(rows.stays)).mark_bar(filled=False, stroke=INK, strokeWidth=1.2)
    links = alt.Chart(in_ms(rows.links)).mark_rule(stroke=INK, strokeWidth=1.2)
    layers = [
        bars.encode(
            x=x,
            x2=alt.X2("end_ms:Q"),
            y=y,
            color=alt.Color("activity:N", scale=scale).title(None),
            tooltip=told("name", "kind", "shapes", "rank", "lane", "start", "duration", "slack", "ops"),
        ),
        stays.encode(x=x, x2=alt.X2("end_ms:Q"), y=y),
        links.encode(x=alt.X("from_ms:Q"), x2=alt.X2("start_ms:Q"), y=alt.Y("from_label:N"), y2=alt.Y2("label:N")),
    ]
    if rows.step_ns is not None:
        begins = alt.Chart(in_ms(pl.DataFrame({"step_ns": [rows.step_ns]})))
        layers.append(begins.mark_rule(strokeDash=[6, 3], strokeWidth=1.5, stroke=INK).encode(x=alt.X("step_ms:Q")))
    text = heading(_title(source) if title is None else title, _subtitle(rows))
    return alt.LayerChart(layer=layers, width=width_px, height=alt.Step(22), title=text)


def _title(source: HasOps | pl.DataFrame) -> str:
    if isinstance(source, Graph):
        return f"Step {source.step} as measured"
    graph = getattr(source, "graph", None)
    return f"Step {graph.step} as replayed" if isinstance(graph, Graph) else "Ops"


def _subtitle(rows: LaneBars) -> str:
    """What was merged, and what the outline means."""
    merged = rows.bars.filter(pl.col("ops") > 1)
    ops, many = rows.bars["ops"].sum(), merged["ops"].sum()
    drawn = f"{many:,} of {ops:,} ops are short: merged into {len(merged):,} bars" if many else "every op drawn"
    path = "; outlined: the critical path" if len(rows.stays) else ""
    return f"{drawn}{path}{'; dashed: the step begins' if rows.step_ns is not None else ''}"


def _bar_rows(bars: pl.DataFrame) -> pl.DataFrame:
    """Bars with what their tooltips say; of a merged bar `duration` is the time of its ops together."""
    several = pl.col("ops") > 1
    dur_ns = bars.select(pl.when(several).then("busy_ns").otherwise("dur_ns")).to_series()
    named = bars.with_columns(
        name=pl.when(several).then(pl.format("{} ops, the longest: {}", "ops", "name")).otherwise("name"),
        start=texts(bars["start_ns"], format_ns),
        duration=texts(dur_ns, format_ns),
        slack=texts(bars["slack_ns"], format_ns),
    )
    return in_ms(named.drop("waits", "dur_ns", "slack_ns"))


@as_annotated
def breakdown_bars(
    parts: pl.DataFrame | Mapping[str, pl.DataFrame], *, title: str = "Where the step goes", width_px: int = 500
) -> alt.Chart:
    """Draw where each rank's step goes, as one bar of parts that add up to it.

    Parameters
    ----------
    parts : breakdown, or several by name
        `partition.breakdown`'s `rank`, `part`, `time_ns`. Several, such as measured and replayed, go side by side.
    title, width_px
        Heading, and width of the longest bar.

    Raises
    ------
    LumosError
        There is no time to draw.
    SchemaError
        A column is missing, or a part is none of `partition.PARTS`.

    Examples
    --------
    >>> breakdown_bars({"measured": breakdown(graph), "replayed": breakdown(result)})
    """
    named = parts if isinstance(parts, Mapping) else {"": parts}
    frames = [part_rows(frame, name) for name, frame in named.items()]
    if not any(len(frame) for frame in frames):
        raise LumosError("nothing to draw: no part of any rank takes time. Pass what `breakdown` returns.")
    rows = pl.concat(frames)
    bars = [f"rank {rank} {name}".strip() for rank in rows["rank"].unique().sort() for name in named]
    present = [part for part in PARTS if part in set(rows["part"])]
    colours = [PART_COLOURS[part] for part in present]
    chart: alt.Chart = (
        alt.Chart(in_ms(rows), title=heading(title))
        .mark_bar()
        .encode(
            x=alt.X("time_ms:Q").title("time in the step (ms)"),
            y=names("label", bars),
            color=alt.Color("part:N").scale(domain=present, range=colours).title(None),
            order=alt.Order("place:Q"),
            tooltip=told("part", "rank", "time", "share"),
        )
        .properties(width=width_px, height=alt.Step(26))
    )
    return chart


def part_rows(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    """The parts of a breakdown that take time, with their bar's `label`, their `place` in it and texts."""
    frame = check_rows(frame, "breakdown", labels=("rank",), words=("part",), numbers=("time_ns",))
    if unknown := sorted(set(frame["part"].drop_nulls()) - set(PARTS)):
        raise SchemaError(f"breakdown table has the part {shown(unknown[0])}; parts are {', '.join(PARTS)}.")
    step_ns = pl.col("time_ns").sum().over("rank")
    rows = frame.select("rank", "part", "time_ns", of_step=pl.col("time_ns") / step_ns).filter(pl.col("time_ns") > 0)
    return rows.select(
        "rank",
        "part",
        "time_ns",
        label=pl.format("rank {}{}", "rank", pl.lit(f" {name}" if name else "")),
        place=pl.col("part").cast(pl.Enum(PARTS)).to_physical(),
        time=texts(rows["time_ns"], format_ns),
        share=texts(rows["of_step"], format_share),
    )


@as_annotated
def structure_bars(table: pl.DataFrame, *, title: str = "Layers found", width_px: int = 400) -> alt.Chart:
    """Draw how much of each rank's phases lies in the layers that were found, and how sure that is.

    Parameters
    ----------
    table : structure table
        `find_structure(graph).table`. Colour says how layers were found; bars are the paler the less sure that is.
    title, width_px
        Heading, and width of a phase that lies wholly in layers.

    Raises
    ------
    SchemaError
        A column is missing.

    Examples
    --------
    >>> structure_bars(find_structure(graph).table)
    """
    labels, numbers = ("rank", "phase", "found"), ("layers", "share", "confidence")
    table = check_rows(table, "structure", labels=labels, numbers=numbers)
    many = pl.when(pl.col("layers") == 1).then(pl.lit("layer")).otherwise(pl.lit("layers"))
    label = pl.format("rank {}, {}: {} {}", "rank", "phase", "layers", many)
    rows = table.select(*labels, *numbers).with_columns(label=label)
    chart: alt.Chart = (
        alt.Chart(rows, title=heading(title))
        .mark_bar()
        .encode(
            x=alt.X("share:Q").scale(domain=[0, 1]).axis(format="%").title("of the phase's time"),
            y=names("label"),
            color=alt.Color("found:N").scale(range=[COMPUTE, COPY, TRANSFER, UNEXPLAINED]).title("found by"),
            opacity=alt.Opacity("confidence:Q").scale(domain=[0, 1], range=[0.15, 1]).legend(None),
            tooltip=told(*labels, *numbers),
        )
        .properties(width=width_px, height=alt.Step(20))
    )
    return chart


@as_annotated
def predicted_vs_measured(
    scored: pl.DataFrame, *, title: str = "Each step predicted from the others", width_px: int = 500
) -> alt.Chart:
    """Draw each step's time as measured, as predicted, and as a null prediction has it.

    Parameters
    ----------
    scored : table
        `step`, `measured_ns`, `predicted_ns`, `null_ns`: what `evaluate.mechanistic` and `delayed_steps` return.
    title, width_px
        Heading, and width of the plot.

    Raises
    ------
    LumosError
        The table has no row.
    SchemaError
        It lacks a column.

    Examples
    --------
    >>> predicted_vs_measured(mechanistic(run))
    """
    columns = [f"{series}_ns" for series in SERIES]
    scored = check_rows(scored, "prediction", labels=("step",), numbers=columns)
    rows = scored.unpivot(columns, index=["step"], variable_name="series", value_name="time_ns").join(
        scored.select("step", "measured_ns"), on="step"
    )
    error = (pl.col("time_ns") / pl.col("measured_ns") - 1).alias("error")
    rows = rows.select(
        "step",
        pl.col("series").str.strip_suffix("_ns"),
        "time_ns",
        time=texts(rows["time_ns"], format_ns),
        error=texts(rows.select(error).to_series(), format_share),
    )
    domain = list(SERIES)
    colours, shapes = ([SERIES[series][n] for series in domain] for n in range(2))
    chart: alt.Chart = (
        alt.Chart(in_ms(rows), title=heading(title))
        .mark_point(size=120, strokeWidth=2, opacity=1)
        .encode(
            x=alt.X("step:O").title("step").axis(labelAngle=0),
            y=alt.Y("time_ms:Q").scale(zero=False).title("step time (ms)"),
            color=alt.Color("series:N").scale(domain=domain, range=colours).title(None),
            shape=alt.Shape("series:N").scale(domain=domain, range=shapes).title(None),
            tooltip=told("step", "series", "time", "error"),
        )
        .properties(width=width_px, height=220)
    )
    return chart
