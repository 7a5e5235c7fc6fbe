"""Predicted steps drawn: beside measured ones, by pipeline rank, and over the layouts of a search."""

from __future__ import annotations

from typing import Any

import altair as alt
import polars as pl

from lumos_nb.charts.style import (
    CLASS_COLOURS,
    EDGE,
    GREY,
    LOG_LOOK,
    NOTHING,
    ON_LIGHT,
    PREDICTED,
    SERIES,
    as_annotated,
    check_rows,
    heading,
    room,
    seconds,
    told,
)
from lumos_nb.errors import ABOVE_0, LumosError, require_number
from lumos_nb.workloads.llm.candidates import AXES

OTHER_SERIES = (("#D55E00", "cross"), ("#009E73", "diamond"), ("#CC79A7", "square"))
"""Colour and shape of what stands beside measured and predicted."""
CLOSE = 0.1
"""Half the width of the band that a scatter shades."""
SPAN = ("low_s", "high_s")
PER_TOKENS = "cost of a billion tokens (USD)"
MEMORY = alt.Tooltip("memory_gb:Q", format=".1f", title="memory (GB)")
OBSTACLE = r"^(?:[A-Z]\w+: )?(\w+)"
"""What is in the way: the field that a reason names, or memory."""


@as_annotated
def agreement(
    scored: pl.DataFrame, *, by: str = "source", title: str = "Predicted against measured", width_px: int = 430
) -> alt.LayerChart:
    """Draw predicted step times over measured ones, with their intervals, the diagonal and 10 % on either side.

    Parameters
    ----------
    scored
        `measured_s`, `predicted_s`, `low_s`, `high_s`, and `by`; tooltips show `run`, if it is there.
    by
        The column whose values have colours, in the order in which they first stand.
    title, width_px
        Heading, and width and height of the plot.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> step = {"source": "vTrain", "measured_s": 1.0, "predicted_s": 1.1, "low_s": 0.8, "high_s": 1.4}
    >>> agreement(pl.DataFrame([step]))
    """
    times = ("measured_s", "predicted_s", *SPAN)
    scored = check_rows(scored, "scored", labels=(by,), numbers=times)
    rows = scored.with_columns(error=pl.col("predicted_s") / pl.col("measured_s") - 1)
    ends = room(pl.concat([rows[name].cast(pl.Float64) for name in times]))
    scale = alt.Scale(type="log", domain=ends, nice=False)
    look = alt.Axis(format="~g", tickCount=6, **LOG_LOOK)
    x = alt.X("measured_s:Q", scale=scale, axis=look, title="measured step time (s)")
    y = alt.Y("predicted_s:Q", scale=scale, axis=look, title="predicted step time (s)")
    span = {"y": alt.Y("low_s:Q", scale=scale, title="predicted step time (s)"), "y2": alt.Y2("high_s:Q")}
    at = pl.DataFrame({"measured_s": ends, "predicted_s": ends})
    at = at.with_columns(low_s=pl.col("measured_s") * (1 - CLOSE), high_s=pl.col("measured_s") * (1 + CLOSE))
    band = alt.Chart(at).mark_area(opacity=0.15, color=GREY, clip=True).encode(x=x, **span)
    line = alt.Chart(at).mark_line(color=GREY, strokeWidth=1).encode(x=x, y=y)
    order = rows[by].unique(maintain_order=True).to_list()
    colour = (
        alt.Color(f"{by}:N")
        .scale(domain=order, range=CLASS_COLOURS)
        .title(None)
        .legend(labelLimit=420, symbolOpacity=1)
    )
    tooltip = [
        *told(*rows.select(pl.col("^run$")).columns, by),
        *seconds(*times),
        alt.Tooltip("error:Q", format="+.1%"),
    ]
    spans = alt.Chart(rows).mark_rule(opacity=0.5).encode(x=x, color=colour, **span)
    points = alt.Chart(rows).mark_point(size=36, filled=True, opacity=0.9)
    points = points.encode(x=x, y=y, color=colour, tooltip=tooltip)
    text = heading(title, f"shaded: within {100 * CLOSE:g} % of the measured; bars: nominal 90 % intervals")
    return alt.LayerChart(layer=[band, line, spans, points], title=text, width=width_px, height=width_px)


@as_annotated
def step_times(rows: pl.DataFrame, *, title: str = "Step times", step_px: int = 44) -> alt.LayerChart:
    """Draw the times of several steps, a column each: measured, predicted with its interval, and what else there is.

    Parameters
    ----------
    rows
        `label` (of the step), `series` ("measured", "predicted", up to three others), `time_s`, and `low_s` and
        `high_s`, null where there is no interval. Labels come in the order in which they first stand.
    title, step_px
        Heading, and width of a column.

    Raises
    ------
    LumosError
        There is no row, or there are more series than colours.
    SchemaError
        A column is missing.

    Examples
    --------
    >>> rows = [("2 x 2", "measured", 1.0, None, None), ("2 x 2", "predicted", 1.1, 0.8, 1.4)]
    >>> step_times(pl.DataFrame(rows, ["label", "series", "time_s", "low_s", "high_s"], orient="row"))
    """
    rows = check_rows(rows, "step time", labels=("label", "series"), numbers=("time_s", *SPAN))
    named = rows["series"].unique(maintain_order=True).to_list()
    others = [series for series in named if series not in SERIES]
    if len(others) > len(OTHER_SERIES):
        raise LumosError(f"there are {len(others)} series beside measured and predicted: give {len(OTHER_SERIES)}.")
    looks = {**SERIES, **dict(zip(others, OTHER_SERIES, strict=False))}
    colours, shapes = ([looks[series][n] for series in named] for n in range(2))
    colour = alt.Color("series:N").scale(domain=named, range=colours).title(None).legend(symbolOpacity=1)
    labels = rows["label"].unique(maintain_order=True).to_list()
    x = alt.X("label:N").scale(domain=labels).title(None).axis(labelAngle=-40, labelLimit=200, ticks=False)
    y_title = "step time (s)"
    spans = alt.Chart(rows.drop_nulls(SPAN)).mark_rule(strokeWidth=4, opacity=0.45)
    spans = spans.encode(x=x, y=alt.Y("low_s:Q").title(y_title), y2="high_s:Q", color=colour)
    points = alt.Chart(rows).mark_point(size=110, strokeWidth=2, opacity=1)
    points = points.encode(
        x=x,
        y=alt.Y("time_s:Q").title(y_title),
        color=colour,
        shape=alt.Shape("series:N").scale(domain=named, range=shapes).title(None),
        tooltip=[*told("label", "series"), *seconds("time_s", *SPAN)],
    )
    text = heading(title, "bars: nominal 90 % intervals")
    return alt.LayerChart(layer=[spans, points], title=text, width=alt.Step(step_px), height=240)


@as_annotated
def layouts(
    frame: pl.DataFrame,
    *,
    x: str = "pp",
    y: str = "tp",
    title: str = "The fastest layouts",
    cell_px: tuple[int, int] = (74, 30),
) -> alt.LayerChart:
    """Draw the fastest step over two axes of a search; cells in grey say what keeps all of their layouts from running.

    Parameters
    ----------
    frame
        `Found.frame` of a search, or some of its rows.
    x, y
        The two axes, of `candidates.AXES`. Tooltips tell the others of the fastest layout, or why there is none: of the
        one that needs least memory, where memory is what is missing.
    title, cell_px
        Heading, and width and height of a cell.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> found = search(model, cluster, train, keep=1, schedule="1f1b", cp=1)
    >>> layouts(found.frame)
    """
    numbers = ("step_s", "memory_bytes")
    frame = check_rows(frame, "search", labels=(x, y), words=("why_not",), numbers=numbers, flags=("feasible",))
    axes = [name for name in AXES if name in frame.columns]
    best = frame.sort("feasible", "step_s", "memory_bytes", descending=[True, False, False], nulls_last=True)
    cells = best.unique([x, y], keep="first", maintain_order=True).with_columns(
        text=pl.when("feasible").then(_three_digits("step_s")).otherwise(pl.col("why_not").str.extract(OBSTACLE)),
        memory_gb=pl.col("memory_bytes") / 1e9,
    )
    scales = {name: frame[column].unique().sort().to_list() for name, column in (("x", x), ("y", y))}
    look: dict[str, Any] = {"ticks": False, "domain": False, "labelAngle": 0}
    where = {
        "x": alt.X(f"{x}:O").scale(domain=scales["x"]).axis(**look),
        "y": alt.Y(f"{y}:O").scale(domain=scales["y"]).axis(**look),
    }
    tooltip = [*told(*axes), *seconds("step_s"), MEMORY, *told("why_not")]
    fits, fails = cells.filter("feasible", pl.col("step_s").is_not_null()), cells.filter(~pl.col("feasible"))
    colour = alt.Color("step_s:Q").scale(type="log", scheme="blues", reverse=True).title("step time (s)")
    drawn = [
        alt.Chart(fails).mark_rect(color=NOTHING, stroke=EDGE).encode(**where, tooltip=tooltip),
        alt.Chart(fails).mark_text(fontSize=10, color=ON_LIGHT).encode(**where, text="text:N", tooltip=tooltip),
    ]
    if fits.height:
        middle = float((fits["step_s"].min() * fits["step_s"].max()) ** 0.5)  # type: ignore[operator]
        ink = alt.condition(f"datum.step_s < {middle}", alt.value("white"), alt.value(ON_LIGHT))
        rects = alt.Chart(fits).mark_rect(stroke=EDGE)
        drawn.append(rects.encode(**where, color=colour.legend(format=".3~r", tickCount=4), tooltip=tooltip))
        drawn.append(alt.Chart(fits).mark_text().encode(**where, text="text:N", color=ink, tooltip=tooltip))
    width, height = (alt.Step(size) for size in cell_px)
    text = heading(
        title, "step time (s) of the fastest in each cell; grey: what is in the way of all; empty: no such layout"
    )
    return alt.LayerChart(layer=drawn, title=text, width=width, height=height)


def _three_digits(column: str) -> pl.Expr:
    return pl.col(column).round_sig_figs(3).cast(pl.String)


def _usd_of_tokens(usd_per_gpu_hour: float | None) -> list[pl.Expr]:
    """What a billion tokens cost, as `usd`; nothing without a price."""
    if usd_per_gpu_hour is None:
        return []
    require_number(ABOVE_0, 1e9, usd_per_gpu_hour=usd_per_gpu_hour)
    gpu_hours = pl.col("gpus") / pl.col("tokens_per_s") * 1e9 / 3600
    return [(gpu_hours * float(usd_per_gpu_hour)).alias("usd")]


@as_annotated
def pareto(
    frame: pl.DataFrame,
    front: pl.DataFrame,
    *,
    usd_per_gpu_hour: float | None = None,
    title: str = "Time and memory",
    width_px: int = 480,
    max_points: int = 2000,
) -> alt.LayerChart | alt.HConcatChart:
    """Draw step time over memory of all layouts that fit, and the front: those than which none is better in both.

    Parameters
    ----------
    frame, front
        `Found.feasible` and `Found.pareto` of a search.
    usd_per_gpu_hour
        What a GPU costs; then the time is drawn over the price of a billion tokens too, beside it.
    title, width_px
        Heading, and width of a plot.
    max_points
        Layouts drawn behind the front; of more, so many at random.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing or of another type.
    InputError
        The price is no positive number.

    Examples
    --------
    >>> found = search(model, cluster, train, keep=1, schedule="1f1b", cp=1)
    >>> pareto(found.feasible, found.pareto, usd_per_gpu_hour=2.5)
    """
    usd = _usd_of_tokens(usd_per_gpu_hour)
    needed = ("gpus", "step_s", "memory_bytes", *(["tokens_per_s"] if usd else []))
    frame, front = (check_rows(table, what, numbers=needed) for table, what in ((frame, "search"), (front, "front")))
    behind = frame.sample(min(max_points, frame.height), seed=0)
    varied = {name for name in frame.columns if frame[name].n_unique() > 1} & {*front.columns} - {"gpus"}
    axes = [name for name in AXES if name in varied]
    behind, marked = (
        table.select(*axes, "gpus", "step_s", (pl.col("memory_bytes") / 1e9).alias("memory_gb"), *usd)
        for table in (behind, front)
    )
    y = (
        alt.Y("step_s:Q")
        .scale(type="log", nice=False, domain=room(frame["step_s"]))
        .title("step time (s)")
        .axis(format="~g", **LOG_LOOK)
    )
    colour = alt.Color("gpus:N").scale(range=(PREDICTED, *CLASS_COLOURS[1:])).title("GPUs")
    cost = [alt.Tooltip("usd:Q", format=",.4~r", title=PER_TOKENS)] if usd else []
    tooltip = [*told(*axes), alt.Tooltip("gpus:Q", title="GPUs"), *seconds("step_s"), MEMORY, *cost]

    def over(x: alt.X, *between: alt.Chart) -> alt.LayerChart:
        dots = alt.Chart(behind).mark_point(size=18, filled=True, color="#999999", opacity=0.6)
        marks = alt.Chart(marked).mark_point(size=50, filled=True, opacity=1)
        layers = [dots.encode(x=x, y=y, tooltip=tooltip), *(one.encode(x=x, y=y, color=colour) for one in between)]
        layers.append(marks.encode(x=x, y=y, color=colour, tooltip=tooltip))
        return alt.LayerChart(layer=layers, width=width_px, height=300)

    line = alt.Chart(marked).mark_line(interpolate="step-after", strokeWidth=1.5)
    drawn = over(alt.X("memory_gb:Q").scale(zero=False).title("memory of the fullest rank (GB)"), line)
    count = f"{behind.height:,} of {frame.height:,} layouts that fit; coloured: the {front.height} that none beats"
    if not usd:
        return drawn.properties(title=heading(title, count))
    beside = over(alt.X("usd:Q").scale(zero=False).title(PER_TOKENS))
    return alt.HConcatChart(
        hconcat=[drawn, beside], title=heading(title, f"{count}; at {float(usd_per_gpu_hour or 0):g} USD a GPU-hour")
    )
