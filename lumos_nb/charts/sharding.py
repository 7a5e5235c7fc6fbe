"""Plans of embedding tables drawn."""

from __future__ import annotations

import altair as alt
import polars as pl

from lumos_nb.charts.style import (
    CLASS_COLOURS,
    EDGE,
    MEASURED,
    PREDICTED,
    as_annotated,
    check_rows,
    figures,
    heading,
    names,
    told,
)
from lumos_nb.workloads.dlrm.plan import KINDS, SHARDS

KIND_COLOURS = dict(zip(KINDS, CLASS_COLOURS, strict=False))


@as_annotated
def sharding_plan(shards: pl.DataFrame, *, title: str = "Which device holds what", width_px: int = 620) -> alt.Chart:
    """Draw what each device holds of which embedding table: a bar a shard, as long as it is large.

    Parameters
    ----------
    shards
        `Plan.frame`.
    title, width_px
        Heading, and width of the fullest device.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> sharding_plan(plan.frame)
    """
    shards = check_rows(SHARDS.check(shards), "shard")
    rows = shards.select(
        *("table", "kind", "first_row", "rows", "first_column", "dim"),
        device=pl.format("device {}", "device"),
        gb=pl.col("bytes") / 1e9,
        place=pl.int_range(pl.len()).over("device"),
    )
    present = [kind for kind in KINDS if kind in set(rows["kind"])]
    colour = alt.Color("kind:N").scale(domain=present, range=[KIND_COLOURS[kind] for kind in present]).title(None)
    devices = shards["device"].unique().sort()
    chart: alt.Chart = (
        alt.Chart(rows, title=heading(title, f"{rows['table'].n_unique()} tables in {rows.height} shards"))
        .mark_bar(stroke=EDGE, strokeWidth=0.6)
        .encode(
            x=alt.X("gb:Q").title("memory (GB)"),
            y=names("device", [f"device {device}" for device in devices]),
            color=colour.legend(labelExpr="replace(datum.label, '_', ' ')"),
            order=alt.Order("place:Q"),
            tooltip=[*told("device", "table", "kind"), *figures("gb", "first_row", "rows", "first_column", "dim")],
        )
        .properties(width=width_px, height=alt.Step(18))
    )
    return chart


@as_annotated
def device_loads(
    devices: pl.DataFrame, *, title: str = "What each device does and holds", width_px: int = 460
) -> alt.VConcatChart:
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
    >>> device_loads(costs.price(plan).devices)
    """
    parts = {
        "backward_us": "lookups backward", "forward_us": "lookups forward", "backward_exchange_us": "exchange backward",
        "forward_exchange_us": "exchange forward, with waiting",
    }  # fmt: skip
    devices = check_rows(devices, "device", labels=("device",), numbers=("bytes", "memory_bytes", *parts))
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
        tooltip=[*told("device", "part"), *figures("ms")],
    )
    held = devices.select("device", gb=pl.col("bytes") / 1e9, limit=pl.col("memory_bytes") / 1e9)
    of_gb = {"gb": "holds (GB)", "limit": "may hold (GB)"}
    tooltip = [*told("device"), *(alt.Tooltip(f"{of}:Q", format=",.3~r", title=text) for of, text in of_gb.items())]
    bars = alt.Chart(held).mark_bar(color=PREDICTED).encode(x=alt.X("gb:Q").title("memory (GB)"), y=y, tooltip=tooltip)
    most = alt.Chart(held).mark_tick(color=MEASURED, thickness=2, size=14).encode(x="limit:Q", y=y)
    plots = [alt.LayerChart(layer=marks, width=width_px, height=alt.Step(16)) for marks in ([times], [bars, most])]
    return alt.VConcatChart(vconcat=plots, title=heading(title, "memory: the line is what a device may hold"))
