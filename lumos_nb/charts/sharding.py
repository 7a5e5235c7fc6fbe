"""Plans of embedding tables drawn."""

from __future__ import annotations

import altair as alt
import polars as pl

from lumos_nb.charts.style import CLASS_COLOURS, MEASURED, PREDICTED, check_rows, figures, heading


def device_loads(devices: pl.DataFrame, *, title: str = "", width_px: int = 460) -> alt.VConcatChart:
    """Draw what each device of a sharding plan does and holds: times by part, and memory with what there is.

    Parameters
    ----------
    devices
        `Plan.devices` of a plan that is priced.
    title, width_px
        Heading, and width of the plots.

    Raises
    ------
    LumosError
        There is no row.
    SchemaError
        A column is missing: the plan has no times.

    Examples
    --------
    >>> device_loads(costs.price(plan).devices)  # doctest: +SKIP
    """
    parts = {
        "backward_us": "lookups backward", "forward_us": "lookups forward", "backward_exchange_us": "exchange backward",
        "forward_exchange_us": "exchange forward, with waiting",
    }  # fmt: skip
    check_rows(devices, ("device", "bytes", "memory_bytes", *parts), "device")
    long = devices.unpivot(list(parts), index="device", variable_name="part", value_name="us").with_columns(
        pl.col("part").replace_strict(parts),
        ms=pl.col("us") / 1e3,
        place=pl.col("part").replace_strict(list(parts), range(len(parts))),
    )
    y = alt.Y("device:O").title("device").axis(ticks=False, domain=False)
    times = alt.Chart(long).mark_bar()
    times = times.encode(
        x=alt.X("ms:Q").title("time (ms)"),
        y=y,
        color=alt.Color("part:N").scale(domain=list(parts.values()), range=CLASS_COLOURS).title(None),
        order=alt.Order("place:Q"),
        tooltip=["device", "part", *figures("ms")],
    )
    held = devices.select("device", gb=pl.col("bytes") / 1e9, limit=pl.col("memory_bytes") / 1e9)
    tooltip = ["device", alt.Tooltip("gb:Q", format=",.3~r", title="GB"), alt.Tooltip("limit:Q", format=",.3~r")]
    bars = alt.Chart(held).mark_bar(color=PREDICTED).encode(x=alt.X("gb:Q").title("memory (GB)"), y=y, tooltip=tooltip)
    most = alt.Chart(held).mark_tick(color=MEASURED, thickness=2, size=14).encode(x="limit:Q", y=y)
    plots = [alt.LayerChart(layer=marks, width=width_px, height=alt.Step(16)) for marks in ([times], [bars, most])]
    return alt.VConcatChart(vconcat=plots, title=heading(title, "memory: the line is what a device may hold"))
