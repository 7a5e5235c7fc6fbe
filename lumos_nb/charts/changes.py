"""What differs between two steps, what a change would buy, and what can grow without cost."""

from __future__ import annotations

import altair as alt
import polars as pl

from lumos_nb.charts.style import MEASURED, PREDICTED, check_rows, heading


def similarity_bars(
    classes: pl.DataFrame, *, title: str = "Operator time of a step", width_px: int = 460
) -> alt.LayerChart:
    """Draw the time of each class of operators in a benchmark (bars) and in what it was made from (ticks).

    Parameters
    ----------
    classes
        `Similarity.classes`: `where`, `class`, `time_ns`, `replayed_time_ns`.
    title, width_px
        Heading, and width of the plot.

    Raises
    ------
    LumosError
        There is no row.
    SchemaError
        A column is missing.

    Examples
    --------
    >>> similarity_bars(similarity.classes)  # doctest: +SKIP
    """
    check_rows(classes, ("where", "class", "time_ns", "replayed_time_ns"), "similarity")
    rows = classes.select(
        name=pl.col("class") + pl.when(pl.col("where") == "device").then(pl.lit(" (device)")).otherwise(pl.lit("")),
        original=pl.col("time_ns") / 1e6,
        benchmark=pl.col("replayed_time_ns") / 1e6,
    )
    base = alt.Chart(rows).encode(y=alt.Y("name:N").sort("-x").title(None), tooltip=["name", "original", "benchmark"])
    bars = base.mark_bar(color=PREDICTED).encode(x=alt.X("benchmark:Q").title("ms a step: benchmark, and | original"))
    ticks = base.mark_tick(color=MEASURED, thickness=3).encode(x="original:Q")
    return alt.LayerChart(layer=[bars, ticks], title=heading(title), width=width_px)
