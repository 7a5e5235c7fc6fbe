"""Fitted costs drawn: samples beside predictions, where errors come from, and what was measured at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import altair as alt
import polars as pl

from lumos_nb.charts.style import (
    CLASS_COLOURS,
    EDGE,
    GREY,
    LOG_LOOK,
    MEASURED,
    ON_LIGHT,
    PREDICTED,
    as_annotated,
    check_rows,
    figures,
    heading,
    names,
    room,
    series_colour,
    told,
)
from lumos_nb.config import Gpu
from lumos_nb.errors import items_of, require_kinds, require_word

BASIS_COLOURS = {"measured": "#5E3C99", "transferred": "#B2ABD2", "data sheet": "#EFEDF5"}
"""What a price rests on; darker is better."""

Heat = Literal["basis", "error", "signed error"]


@as_annotated
def roofline(
    priced: pl.DataFrame, gpu: Gpu, dtype: str, *, title: str = "", max_points: int = 1200, width_px: int = 560
) -> alt.LayerChart:
    """Draw the rates that kernels reached, and those predicted, below the roof of a GPU's data sheet.

    Parameters
    ----------
    priced : kernel frame
        `flops`, `bytes` (`work.with_work`), `time_us`, `dur_us`; tooltips show `m`, `n`, `k` where it has them.
    gpu, dtype
        The sheet whose peak rate in this format, and whose bandwidth, are the roof.
    title, width_px
        Heading, and width of the plot.
    max_points
        Kernels drawn; of more, so many at random.

    Raises
    ------
    LumosError
        There is no row; SheetError: the GPU has no rate for the format.
    SchemaError
        A column is missing.

    Examples
    --------
    >>> from lumos_nb.costs.work import with_work
    >>> samples = datasets.load("measured-kernels").filter(gpu="H100-SXM-80GB", op="gemm").head(100)
    >>> roofline(with_work(cal.predict_kernels(samples)), cal.gpu, "fp16")
    """
    priced = check_rows(priced, "kernel", numbers=("flops", "bytes", "time_us", "dur_us"))
    drawn = priced.sample(min(max_points, priced.height), seed=0)
    rates = {"measured": "time_us", "predicted": "dur_us"}
    shape = [name for name in ("op", "m", "n", "k") if name in drawn.columns]
    points = pl.concat(
        drawn.select(
            *shape,
            series=pl.lit(series),
            intensity=pl.col("flops") / pl.col("bytes"),
            rate=pl.col("flops") / pl.col(time) / 1e6,
            time_us=pl.col(time).cast(pl.Float64),
        )
        for series, time in rates.items()
    )
    peak, slope = gpu.peak(dtype) / 1e12, gpu.memory_bytes_per_s / 1e12
    x_ends, y_ends = (room(points[name]) for name in ("intensity", "rate"))
    corners = pl.Series("intensity", sorted([*x_ends, peak / slope]))
    roof = pl.DataFrame({"intensity": corners, "rate": (corners * slope).clip(upper_bound=peak)})
    x = alt.X("intensity:Q").title("FLOPs for every byte that must be moved")
    x = x.scale(type="log", nice=False, domain=x_ends).axis(**LOG_LOOK)
    y = alt.Y("rate:Q").title("TFLOP/s")
    y = y.scale(type="log", nice=False, domain=[y_ends[0], max(y_ends[1], 1.4 * peak)]).axis(**LOG_LOOK)
    marks = (
        alt.Chart(points)
        .mark_point(size=14, filled=True, opacity=0.45)
        .encode(
            x, y, color=series_colour(), tooltip=[*told(*shape, "series"), *figures("time_us", "rate", "intensity")]
        )
    )
    line = alt.Chart(roof).mark_line(color=GREY, strokeWidth=2, clip=True).encode(x, y)
    count = f"{drawn.height:,} of {priced.height:,} kernels; the line is the data sheet's roof"
    text = heading(title or f"{gpu.name}, {dtype}", count)
    return alt.LayerChart(layer=[line, marks], title=text, width=width_px, height=320)


@as_annotated
def sweeps(
    frame: pl.DataFrame,
    *,
    x: str,
    panel: str,
    titles: Mapping[str, str],
    log_x: bool = False,
    shared_y: bool = False,
    columns: int = 3,
    width_px: int = 230,
) -> alt.FacetChart:
    """Draw what was measured along one size as points and what is predicted as a line, a panel for each sweep.

    Parameters
    ----------
    frame
        Columns `x` and `panel`, `measured`, `predicted`, and maybe `low` and `high`, an interval that is shaded.
    x, panel
        Names of the columns along the axis and of the panels, which come in the order of the rows.
    titles
        Of `x` and `y`, with units, and of the `chart`.
    log_x, shared_y
        Whether the axis is logarithmic, and whether panels have one scale.
    columns, width_px
        Panels beside one another, and the width of each.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> times = {"measured": [5.0, 6.0, 8.0], "predicted": [5.5, 6.0, 7.5]}
    >>> frame = pl.DataFrame({"m": [1, 2, 4], "weight": "4096 x 4096", **times})
    >>> sweeps(frame, x="m", panel="weight", titles={"x": "tokens", "y": "time (us)"})
    """
    require_kinds(frame=(frame, pl.DataFrame))
    ends = [name for name in ("low", "high") if name in frame.columns]
    frame = check_rows(frame, "sweep", labels=(panel,), numbers=(x, "measured", "predicted", *ends))
    along = alt.X(f"{x}:Q").scale(type="log" if log_x else "linear", nice=False).title(titles.get("x"))
    if log_x:
        along = along.axis(format="~s", tickCount=5, grid=False)
    y_title = titles.get("y")
    legend = pl.DataFrame({"series": ["measured", "predicted"]}, schema={"series": pl.String})
    tooltip = [*told(panel), *figures(x, "measured", "predicted")]
    base = alt.Chart()
    layers: list[alt.Chart] = []
    if len(ends) == 2:
        shade = base.mark_area(opacity=0.18, color=PREDICTED)
        layers.append(shade.encode(along, alt.Y("low:Q").title(y_title), alt.Y2("high:Q")))
    named = {name: base.transform_calculate(series=f"'{name}'") for name in legend["series"]}
    line = named["predicted"].mark_line(strokeWidth=1.5)
    dots = named["measured"].mark_point(size=14, filled=True, opacity=0.7)
    layers.append(line.encode(along, alt.Y("predicted:Q").title(y_title), color=series_colour()))
    layers.append(dots.encode(along, alt.Y("measured:Q").title(y_title), color=series_colour(), tooltip=tooltip))
    order = frame[panel].drop_nulls().unique(maintain_order=True).to_list()
    facet = alt.Facet(f"{panel}:N", sort=order, title=None, header=alt.Header(labelLimit=width_px + 40))
    together = alt.layer(*layers, data=frame).properties(width=width_px, height=round(width_px * 0.6))
    chart: alt.FacetChart = together.facet(facet=facet, columns=columns)
    if not shared_y:
        chart = chart.resolve_scale(y="independent")
    return chart.properties(title=heading(titles.get("chart", "")))


@as_annotated
def learning_curve(scored: pl.DataFrame, *, title: str = "", width_px: int = 460) -> alt.Chart:
    """Draw the error on what was left out over the number of rows that the fit had.

    Parameters
    ----------
    scored
        `rows`, `error` (a share), `series` (a line each).
    title, width_px
        Heading, and width of the plot.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> learning_curve(pl.DataFrame({"rows": [10, 100], "error": [0.3, 0.08], "series": "gemm"}))
    """
    scored = check_rows(scored, "learning curve", labels=("series",), numbers=("rows", "error"))
    chart: alt.Chart = (
        alt.Chart(scored, title=heading(title))
        .mark_line(point=True)
        .encode(
            x=alt.X("rows:Q")
            .scale(type="log", nice=False, domain=room(scored["rows"]))
            .title("rows that the fit had")
            .axis(format=",", tickCount=6, **LOG_LOOK),
            y=alt.Y("error:Q").scale(zero=True).title("median error on the rest").axis(format="%"),
            color=alt.Color("series:N").scale(range=CLASS_COLOURS).title(None).legend(labelLimit=260),
            tooltip=[*told("series"), alt.Tooltip("rows:Q", format=","), alt.Tooltip("error:Q", format=".1%")],
        )
        .properties(width=width_px, height=220)
    )
    return chart


@as_annotated
def heat_map(
    frame: pl.DataFrame,
    *,
    x: str,
    y: str,
    value: str,
    heat: Heat,
    titles: Mapping[str, str],
    text: str | None = None,
    orders: Mapping[str, Sequence[str]] | None = None,
    cell_px: tuple[int, int] = (62, 20),
) -> alt.LayerChart:
    """Draw a matrix whose cells are coloured: by what a price rests on, by an error, or by its sign and size.

    Parameters
    ----------
    frame
        One row a cell; where there is none the matrix stays white.
    x, y, value
        Names of the columns. `value` is a basis ("measured", "transferred", "data sheet"), or an error as a share.
    heat
        How `value` is coloured.
    titles
        Of `x`, `y`, `value` and the `chart`.
    text
        A column of what is written into the cells; by default an error is written as percent.
    orders
        Which values of `x` and `y` come in which order; by default that in which they first stand.
    cell_px
        Width and height of a cell.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> cells = pl.DataFrame({"gpu": ["A100", "H100"], "cell": "gemm", "basis": ["measured", "data sheet"]})
    >>> heat_map(cells, x="gpu", y="cell", value="basis", heat="basis", titles={})
    """
    require_word(get_args(Heat), heat=heat)
    written = [] if text is None else [text]
    labels, numbers = ((x, y, *written, value), ()) if heat == "basis" else ((x, y, *written), (value,))
    frame = check_rows(frame, "matrix", labels=labels, numbers=numbers)
    order = _orders(orders, x=frame[x], y=frame[y])
    angle = 0 if max(len(str(label)) for label in order["x"]) * 6 < cell_px[0] else -35
    look: dict[str, Any] = {"ticks": False, "domain": False, "labelLimit": 300}
    axes = {
        "x": alt.X(f"{x}:N").scale(domain=order["x"]).title(titles.get("x")).axis(labelAngle=angle, **look),
        "y": alt.Y(f"{y}:N").scale(domain=order["y"]).title(titles.get("y")).axis(**look),
    }
    kind = "N" if heat == "basis" else "Q"
    colour = alt.Color(f"{value}:{kind}").scale(_heat_scale(heat)).title(titles.get("value"))
    if heat != "basis":
        colour = colour.legend(format="+.0%" if heat == "signed error" else ".0%")
    figure = alt.Tooltip(f"{value}:{kind}") if heat == "basis" else alt.Tooltip(f"{value}:Q", format=".1%")
    cells = (
        alt.Chart(frame)
        .mark_rect(stroke=EDGE)
        .encode(**axes, color=colour, tooltip=[*told(x, y), figure, *told(*written)])
    )
    label = alt.Text(f"{text}:N") if text else alt.Text(f"{value}:Q", format="+.0%" if "signed" in heat else ".0%")
    dark = {"basis": f"datum['{value}'] == 'measured'", "error": f"datum['{value}'] > 0.3"}.get(
        heat, f"abs(datum['{value}']) > 0.25"
    )
    ink = alt.condition(dark, alt.value("white"), alt.value(ON_LIGHT))
    letters = alt.Chart(frame).mark_text(fontSize=9).encode(**axes, text=label, color=ink)
    width, height = (alt.Step(size) for size in cell_px)
    return alt.LayerChart(layer=[cells, letters], title=heading(titles.get("chart", "")), width=width, height=height)


def _orders(given: Mapping[str, Sequence[str]] | None, **columns: pl.Series) -> dict[str, list[Any]]:
    """The values of each axis in the order asked for, or in that in which they first stand."""
    require_kinds(orders=(given, Mapping | None))
    first = {name: column.unique(maintain_order=True).to_list() for name, column in columns.items()}
    return first | {name: items_of("orders", each, "the values of each axis") for name, each in (given or {}).items()}


def _heat_scale(heat: Heat) -> alt.Scale:
    if heat == "basis":
        return alt.Scale(domain=list(BASIS_COLOURS), range=list(BASIS_COLOURS.values()))
    if heat == "error":
        return alt.Scale(scheme="purples", domain=[0, 0.5], clamp=True)
    return alt.Scale(scheme="blueorange", domain=[-0.4, 0.4], domainMid=0, clamp=True)


@as_annotated
def error_spread(rows: pl.DataFrame, *, by: str, title: str = "", width_px: int = 460) -> alt.LayerChart:
    """Draw how signed errors lie in each class: the median, the middle half, and the middle nine tenths.

    Parameters
    ----------
    rows
        `by` and `error`, predicted / measured - 1.
    by
        The column of the classes, which come in the order in which they first stand.
    title, width_px
        Heading, and width of the plot.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> error_spread(pl.DataFrame({"op": ["add"] * 3, "error": [-0.1, 0.0, 0.2]}), by="op")
    """
    rows = check_rows(rows, "error", labels=(by,), numbers=("error",))
    shares = {"p05": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95}
    quantiles = {name: pl.col("error").quantile(share, "linear") for name, share in shares.items()}
    classes = rows.group_by(by, maintain_order=True).agg(rows=pl.len(), **quantiles)
    y = names(by, classes[by].to_list())
    x_title = "predicted / measured - 1; bars: the middle 50 % and 90 %"
    tooltip = [alt.Tooltip(by), *figures("rows"), *(alt.Tooltip(f"{name}:Q", format="+.1%") for name in shares)]
    base = alt.Chart(classes).encode(y=y, tooltip=tooltip)

    def bar(low: str, high: str, height: int, opacity: float) -> alt.Chart:
        span = base.mark_bar(height=height, opacity=opacity, color=PREDICTED)
        drawn: alt.Chart = span.encode(x=alt.X(f"{low}:Q").title(x_title).axis(format="+.0%"), x2=f"{high}:Q")
        return drawn

    middle = base.mark_tick(color=MEASURED, thickness=2, size=15).encode(x="median:Q")
    none = alt.Chart(pl.DataFrame({"x": [0.0]})).mark_rule(color=GREY, strokeDash=[4, 3]).encode(x="x:Q")
    layers = [bar("p05", "p95", 5, 0.5), bar("p25", "p75", 11, 0.9), middle, none]
    return alt.LayerChart(layer=layers, title=heading(title), width=width_px, height=alt.Step(19))


@as_annotated
def interval_check(scores: pl.DataFrame, *, title: str = "", width_px: int = 460) -> alt.LayerChart:
    """Draw what share of rows left out nominal 90 % intervals cover over how wide they are; shaded: 85 to 95 %.

    Parameters
    ----------
    scores
        `coverage` and `width` (shares), `left_out` (colours), `name`, `groups`, `rows`.
    title, width_px
        Heading, and width of the plot.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> score = {"name": "gemm", "left_out": "model", "coverage": 0.9, "width": 0.3, "groups": 4, "rows": 100}
    >>> interval_check(pl.DataFrame([score]))
    """
    scores = check_rows(scores, "score", labels=("name", "left_out"), numbers=("coverage", "width", "groups", "rows"))
    y = alt.Y("coverage:Q").scale(domain=[0, 1]).title("rows inside the interval").axis(format="%")
    wanted = alt.Chart(pl.DataFrame({"low": [0.85], "high": [0.95]})).mark_rect(opacity=0.18, color="#009E73")
    points = alt.Chart(scores).mark_point(size=60, filled=True, opacity=0.75)
    points = points.encode(
        x=alt.X("width:Q")
        .scale(type="log", nice=False, domain=room(scores["width"]))
        .title("median width of the intervals, of the prediction")
        .axis(format="%", **LOG_LOOK),
        y=y,
        color=alt.Color("left_out:N").scale(range=CLASS_COLOURS).title("left out"),
        tooltip=[
            *(*told("name", "left_out", "groups"), alt.Tooltip("rows:Q", format=",")),
            *(alt.Tooltip(f"{name}:Q", format=".1%") for name in ("coverage", "width")),
        ],
    )
    layers = [wanted.encode(y=alt.Y("low:Q"), y2="high:Q"), points]
    return alt.LayerChart(layer=layers, title=heading(title), width=width_px, height=260)
