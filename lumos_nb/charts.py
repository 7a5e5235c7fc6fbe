"""Tables drawn: a frame, a graph or a result in, a chart out, which is returned and never shown.

Only this module, `cost_charts` and `llm_charts` import altair. Importing one in a notebook makes charts appear there:
JupyterLab draws them itself, without a network, and what cannot run scripts (GitHub, nbviewer) shows the PNG beside it.
A PNG takes 0.1 to 1.5 s a chart; the environment variable `LUMOS_NB_STATIC=0` leaves it out.

One colour means one thing in all charts. The colours are Okabe and Ito's (2008), which the colour-blind tell apart.
"""

from __future__ import annotations

import base64
import builtins
import os
import struct
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import altair as alt
import polars as pl

from lumos_nb.display import format_ns, format_share
from lumos_nb.errors import InputError, LumosError, SchemaError
from lumos_nb.graph import Graph
from lumos_nb.lane_bars import LaneBars, lane_bars
from lumos_nb.partition import PARTS, HasOps

COMPUTE, TRANSFER, WAITING, COPY, HOST, UNEXPLAINED, NOTHING = (
    *("#0072B2", "#D55E00", "#F7CDB0", "#009E73", "#56B4E9"),
    *("#4D4D4D", "#E6E6E6"),
)
ACTIVITY_COLOURS = {
    "compute": COMPUTE,  # a kernel; on a rank without a device, an operator
    "transfer": TRANSFER,
    "waiting": WAITING,
    "copy": COPY,
    "host operator": HOST,
    "runtime call": "#F0E442",
    "between operators": "#B9DDF5",
    "unexplained": UNEXPLAINED,
    "before the step": NOTHING,
}
PART_COLOURS = {
    "compute": COMPUTE,
    "overlapped": "#CC79A7",
    "exposed_transfer": TRANSFER,
    "exposed_wait": WAITING,
    "copies": COPY,
    "host_bound": HOST,
    "unexplained": UNEXPLAINED,
    "other": NOTHING,
}
SERIES = {
    # series of a prediction, held in <series>_ns: its colour and shape
    "measured": ("#000000", "stroke"),
    "predicted": ("#0072B2", "circle"),
    "null": ("#E69F00", "cross"),
}


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
    >>> timeline(replay(graph), window_ns=(0, 5_000_000), ranks=[0, 1])  # doctest: +SKIP
    """
    rows = lane_bars(source, window_ns=window_ns, ranks=ranks, columns=width_px, max_rows=max_rows)
    begin_ns, end_ns = rows.window_ns
    x = alt.X("start_ms:Q").scale(domain=[begin_ns / 1e6, end_ns / 1e6], nice=False).title("time (ms)")
    y = alt.Y("label:N").scale(domain=rows.lanes).title(None).axis(labelLimit=240, ticks=False, domain=False, grid=True)
    present = [activity for activity in ACTIVITY_COLOURS if activity in set(rows.bars["activity"])]
    scale = alt.Scale(domain=present, range=[ACTIVITY_COLOURS[activity] for activity in present])
    bars = alt.Chart(_bar_rows(rows.bars)).mark_bar()
    stays = alt.Chart(_in_ms(rows.stays)).mark_bar(filled=False, stroke="black", strokeWidth=1.2)
    links = alt.Chart(_in_ms(rows.links)).mark_rule(stroke="black", strokeWidth=1.2)
    layers = [
        bars.encode(
            x=x,
            x2="end_ms:Q",
            y=y,
            color=alt.Color("activity:N", scale=scale).title(None),
            tooltip=["name", "kind", "rank", "lane", "start", "duration", "slack", "ops"],
        ),
        stays.encode(x=x, x2="end_ms:Q", y=y),
        links.encode(x="from_ms:Q", x2="start_ms:Q", y="from_label:N", y2="label:N"),
    ]
    if rows.step_ns is not None:
        begins = alt.Chart(_in_ms(pl.DataFrame({"step_ns": [rows.step_ns]})))
        layers.append(begins.mark_rule(strokeDash=[6, 3], strokeWidth=1.5).encode(x="step_ms:Q"))
    text = heading(_title(source) if title is None else title, _subtitle(rows))
    return alt.LayerChart(layer=layers, width=width_px, height=alt.Step(22), title=text)


def heading(text: str, subtitle: str = "") -> alt.Title:
    """A title flush with the plot, so that charts below one another line up."""
    return alt.Title(text, subtitle=subtitle, anchor="start", frame="group")


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
        start=_texts(bars["start_ns"], format_ns),
        duration=_texts(dur_ns, format_ns),
        slack=_texts(bars["slack_ns"], format_ns),
    )
    return _in_ms(named.drop("waits", "dur_ns", "slack_ns"))


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
    >>> breakdown_bars({"measured": breakdown(graph), "replayed": breakdown(result)})  # doctest: +SKIP
    """
    named = parts if isinstance(parts, Mapping) else {"": parts}
    frames = [_part_rows(frame, name) for name, frame in named.items()]
    if not any(len(frame) for frame in frames):
        raise LumosError("nothing to draw: no part of any rank takes time. Pass what `breakdown` returns.")
    rows = pl.concat(frames)
    bars = [f"rank {rank} {name}".strip() for rank in rows["rank"].unique().sort() for name in named]
    present = [part for part in PARTS if part in set(rows["part"])]
    colours = [PART_COLOURS[part] for part in present]
    chart: alt.Chart = (
        alt.Chart(_in_ms(rows), title=heading(title))
        .mark_bar()
        .encode(
            x=alt.X("time_ms:Q").title("time in the step (ms)"),
            y=alt.Y("label:N").scale(domain=bars).title(None).axis(labelLimit=240, ticks=False, domain=False),
            color=alt.Color("part:N").scale(domain=present, range=colours).title(None),
            order=alt.Order("place:Q"),
            tooltip=["part", "rank", "time", "share"],
        )
        .properties(width=width_px, height=alt.Step(26))
    )
    return chart


def _part_rows(frame: pl.DataFrame, name: str) -> pl.DataFrame:
    """The parts of a breakdown that take time, with their bar's `label`, their `place` in it and texts."""
    check_rows(frame, ("rank", "part", "time_ns"), "breakdown")
    if unknown := sorted(set(frame["part"].drop_nulls()) - set(PARTS)):
        raise SchemaError(f"breakdown table has the part {unknown[0]!r}; parts are {', '.join(PARTS)}.")
    step_ns = pl.col("time_ns").sum().over("rank")
    rows = frame.select("rank", "part", "time_ns", of_step=pl.col("time_ns") / step_ns).filter(pl.col("time_ns") > 0)
    return rows.select(
        "rank",
        "part",
        "time_ns",
        label=pl.format("rank {}{}", "rank", pl.lit(f" {name}" if name else "")),
        place=pl.col("part").cast(pl.Enum(PARTS)).to_physical(),
        time=_texts(rows["time_ns"], format_ns),
        share=_texts(rows["of_step"], format_share),
    )


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
    >>> structure_bars(find_structure(graph).table)  # doctest: +SKIP
    """
    columns = ("rank", "phase", "found", "layers", "share", "confidence")
    check_rows(table, columns, "structure")
    rows = table.select(columns).with_columns(label=pl.format("rank {}, {}: {} layers", "rank", "phase", "layers"))
    chart: alt.Chart = (
        alt.Chart(rows, title=heading(title))
        .mark_bar()
        .encode(
            x=alt.X("share:Q").scale(domain=[0, 1]).axis(format="%").title("of the phase's time"),
            y=alt.Y("label:N").sort(None).title(None).axis(labelLimit=240, ticks=False, domain=False),
            color=alt.Color("found:N").scale(range=[COMPUTE, COPY, TRANSFER, UNEXPLAINED]).title("found by"),
            opacity=alt.Opacity("confidence:Q").scale(domain=[0, 1], range=[0.15, 1]).legend(None),
            tooltip=list(columns),
        )
        .properties(width=width_px, height=alt.Step(20))
    )
    return chart


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
    >>> predicted_vs_measured(mechanistic(run))  # doctest: +SKIP
    """
    columns = [f"{series}_ns" for series in SERIES]
    check_rows(scored, ("step", *columns), "prediction")
    rows = scored.unpivot(columns, index=["step"], variable_name="series", value_name="time_ns").join(
        scored.select("step", "measured_ns"), on="step"
    )
    error = (pl.col("time_ns") / pl.col("measured_ns") - 1).alias("error")
    rows = rows.select(
        "step",
        pl.col("series").str.strip_suffix("_ns"),
        "time_ns",
        time=_texts(rows["time_ns"], format_ns),
        error=_texts(rows.select(error).to_series(), format_share),
    )
    domain = list(SERIES)
    colours, shapes = ([SERIES[series][n] for series in domain] for n in range(2))
    chart: alt.Chart = (
        alt.Chart(_in_ms(rows), title=heading(title))
        .mark_point(size=120, strokeWidth=2)
        .encode(
            x=alt.X("step:O").title("step").axis(labelAngle=0),
            y=alt.Y("time_ms:Q").scale(zero=False).title("step time (ms)"),
            color=alt.Color("series:N").scale(domain=domain, range=colours).title(None),
            shape=alt.Shape("series:N").scale(domain=domain, range=shapes).title(None),
            tooltip=["step", "series", "time", "error"],
        )
        .properties(width=width_px, height=220)
    )
    return chart


def check_rows(frame: pl.DataFrame, columns: tuple[str, ...], what: str) -> None:
    """Raise unless there is something to draw.

    Raises
    ------
    InputError
        `frame` is no DataFrame.
    SchemaError
        It lacks a column.
    LumosError
        It has no row.
    """
    if not isinstance(frame, pl.DataFrame):
        raise InputError(f"this takes the {what} table, a polars DataFrame; it was given a {type(frame).__name__}.")
    if missing := [c for c in columns if c not in frame.columns]:
        raise SchemaError(f"{what} table lacks column(s) {', '.join(missing)}; it has {', '.join(frame.columns)}.")
    if frame.is_empty():
        raise LumosError(f"nothing to draw: the {what} table has no row.")


def _in_ms(frame: pl.DataFrame) -> pl.DataFrame:
    """Columns in ns as ms: JavaScript counts exactly to 2**53 only."""
    return frame.select(
        (pl.col(c) / 1e6).alias(f"{c.removesuffix('_ns')}_ms") if c.endswith("_ns") else c for c in frame.columns
    )


def _texts(values: pl.Series, write: Callable[[float], str]) -> pl.Series:
    return pl.Series([None if value is None else write(value) for value in values], dtype=pl.String)


CHART = alt.TopLevelMixin
"""What every function of the chart modules returns."""
JUPYTERLAB_MIME = "application/vnd.vegalite.v5+json"
"""JupyterLab 4 brings Vega-Lite 5, which draws these charts; altair's own type it ignores, and nbformat refuses it."""


def mime_bundle(spec: dict[str, Any], *, still: bool = True, **_options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A chart as notebooks keep it: its specification, a PNG of it (unless `LUMOS_NB_STATIC=0`), and a line of text.

    A panel that redraws it leaves the PNG out (`still=False`).

    altair's renderer "lumos_nb".
    """
    interactive = {**spec, "$schema": "https://vega.github.io/schema/vega-lite/v5.json"}
    bundle: dict[str, Any] = {JUPYTERLAB_MIME: interactive, "text/plain": "a chart, which this program cannot show"}
    if os.environ.get("LUMOS_NB_STATIC") == "0" or not still:
        return bundle, {}
    png = to_png(spec)
    width, height = struct.unpack(">II", png[16:24])
    size = {"width": width // 2, "height": height // 2}
    return {**bundle, "image/png": base64.b64encode(png).decode()}, {"image/png": size}


def to_png(chart: alt.TopLevelMixin | dict[str, Any], *, scale: float = 2) -> bytes:
    """Draw a chart, or its specification, as the bytes of a PNG file with `scale` times the chart's pixels.

    Examples
    --------
    >>> Path("step.png").write_bytes(to_png(timeline(result)))  # doctest: +SKIP
    """
    import vl_convert

    spec = chart if isinstance(chart, dict) else chart.to_dict()
    return _deflated(vl_convert.vegalite_to_png(spec, vl_version=_vega_lite(), scale=scale))


def to_svg(chart: alt.TopLevelMixin) -> str:
    """Draw a chart as the text of an SVG file, without what its tooltips say.

    Examples
    --------
    >>> Path("step.svg").write_text(to_svg(timeline(result)))  # doctest: +SKIP
    """
    import vl_convert

    spec = chart.to_dict()
    spec["config"] = spec.get("config", {}) | {"aria": False}  # else each bar repeats its tooltip
    spec["padding"] = {"left": 40, "right": 40, "top": 5, "bottom": 5}  # for a reader whose letters are wider
    svg: str = vl_convert.vegalite_to_svg(spec, vl_version=_vega_lite())
    return svg


def _vega_lite() -> str:
    """The version of Vega-Lite that altair writes, as vl-convert calls it."""
    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def _deflated(png: bytes) -> bytes:
    """The same image, its pixels compressed as well as zlib can: vl-convert leaves it five times as large."""
    chunks, at = [], 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4]) + 12
        chunks.append((png[at + 4 : at + 8], png[at + 8 : at + size - 4]))
        at += size
    pixels = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    before, after = ([c for c in chunks if (c[0] == b"IEND") == end and c[0] != b"IDAT"] for end in (False, True))
    kept = [*before, (b"IDAT", zlib.compress(pixels, 9)), *after]
    return png[:8] + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in kept
    )


alt.renderers.register("lumos_nb", mime_bundle)
if hasattr(builtins, "__IPYTHON__"):
    alt.renderers.enable("lumos_nb")
