"""Pipelines drawn: which micro-batch runs when, and what memory each rank uses."""

from __future__ import annotations

import altair as alt
import polars as pl

from lumos_nb.charts.style import (
    EDGE,
    INK,
    NOTHING,
    ON_LIGHT,
    as_annotated,
    check_rows,
    heading,
    in_ms,
    names,
    texts,
    told,
)
from lumos_nb.display import format_ns
from lumos_nb.errors import LumosError, SchemaError
from lumos_nb.partition import HasOps
from lumos_nb.schema import OPS, require
from lumos_nb.workloads.llm.memory import CLASSES

MEMORY_COLOURS = dict(
    zip(
        CLASSES,
        ("#0072B2", "#56B4E9", "#009E73", "#D55E00", INK, "#E69F00", "#CC79A7", "#F0E442", NOTHING),
        strict=True,
    )
)
PASSES = {"forward": 0.92, "backward": 0.62, "weight gradients": 0.32}
"""What a pass does, and how much of its row's height its bar has."""
GB = alt.Tooltip("gb:Q", format=".3~f", title="GB")
NUMBERED = 250
"""Passes up to which each bar bears the number of its micro-batch."""


@as_annotated
def schedule(
    source: HasOps | pl.DataFrame, *, title: str = "Pipeline schedule", width_px: int = 860, max_bars: int = 5000
) -> alt.LayerChart:
    """Draw which micro-batch each rank works on and when: a bar a pass, coloured by micro-batch.

    Parameters
    ----------
    source : Graph, Result or op table
        With `micro_batch` and `phase` of its ops, as estimates have them; of a trace join those of `Structure.ops`.
    title, width_px
        Heading, and width of the plot.
    max_bars
        Passes that the chart may hold.

    Raises
    ------
    LumosError
        No op belongs to a micro-batch, or there are more passes than `max_bars`.
    SchemaError
        The op table lacks a column.

    Examples
    --------
    >>> schedule(found.result)
    """
    if not isinstance(source, pl.DataFrame):
        require(source, "ops")
    passes = _passes(OPS.check(source if isinstance(source, pl.DataFrame) else source.ops))
    if passes.is_empty():
        raise LumosError("nothing to draw: no op belongs to a micro-batch. Join the ops of `find_structure(graph)`.")
    if passes.height > max_bars:
        raise LumosError(f"there are {passes.height:,} passes, more than max_bars={max_bars:,}. Choose fewer ranks.")
    x = alt.X("start_ms:Q").title("time (ms)").scale(nice=False)
    y = names("rank", passes["rank"].unique(maintain_order=True).to_list())
    colour = alt.Color("micro_batch:Q").scale(scheme="viridis").title("micro-batch").legend(format="d")
    tooltip = told("rank", "micro_batch", "pass", "chunk", "start", "duration", "ops")
    drawn = in_ms(passes)
    layers = [
        alt.Chart(drawn.filter(pl.col("pass") == name))
        .mark_bar(height={"band": height}, stroke=EDGE, strokeWidth=0.4)
        .encode(x=x, x2=alt.X2("end_ms:Q"), y=y, color=colour, tooltip=tooltip)
        for name, height in PASSES.items()
        if name in set(drawn["pass"])
    ]
    if passes.height <= NUMBERED:
        text = alt.Chart(drawn).mark_text(fontSize=9)
        light = f"datum.micro_batch > {0.6 * max(drawn['micro_batch'])}"
        ink = alt.condition(light, alt.value(ON_LIGHT), alt.value("white"))
        layers.append(text.encode(x="middle_ms:Q", y=y, text="micro_batch:Q", color=ink))
    said = "; ".join(f"{what}: {name}" for what, name in zip(("full height", "lower", "lowest"), PASSES, strict=True))
    return alt.LayerChart(layer=layers, title=heading(title, said), width=width_px, height=alt.Step(30))


def _passes(ops: pl.DataFrame) -> pl.DataFrame:
    """Consecutive work of a rank for one micro-batch, in one direction, as one row."""
    on_device = pl.col("device").is_not_null().any().over("rank")
    work = pl.when(on_device).then(pl.col("kind") == "kernel").otherwise(pl.col("kind") == "cpu")
    ops = ops.filter(work, pl.col("micro_batch") >= 0, pl.col("phase").str.contains("^(forward|backward)"))
    chunk = pl.col("chunk") if "chunk" in ops.columns else pl.lit(0, pl.Int64)
    ops = ops.with_columns(chunk=chunk, forward=pl.col("phase") == "forward").sort("rank", "start_ns")
    keys = ("rank", "micro_batch", "forward", "chunk")
    begin_ns, end_ns = pl.col("start_ns").min(), (pl.col("start_ns") + pl.col("dur_ns")).max()
    passes = ops.group_by(pl.struct(keys).rle_id().alias("pass"), maintain_order=True).agg(
        pl.col(keys).first(),
        weights=(pl.col("phase") == "backward_weight").all(),
        start_ns=begin_ns,
        end_ns=end_ns,
        ops=pl.len(),
    )
    kind = pl.when("forward").then(pl.lit("forward")).when("weights").then(pl.lit("weight gradients"))
    zero_ns = pl.col("start_ns").min()
    return passes.select(
        *("micro_batch", "chunk", "ops"),
        pl.format("rank {}", "rank").alias("rank"),
        kind.otherwise(pl.lit("backward")).alias("pass"),
        start=texts(passes["start_ns"] - (passes["start_ns"].min() or 0), format_ns),
        duration=texts(passes["end_ns"] - passes["start_ns"], format_ns),
        start_ns=pl.col("start_ns") - zero_ns,
        middle_ns=(pl.col("start_ns") + pl.col("end_ns")) / 2 - zero_ns,
        end_ns=pl.col("end_ns") - zero_ns,
    )


@as_annotated
def memory_bars(
    memory: pl.DataFrame, *, limit_bytes: float | None = None, title: str = "Memory at its peak", width_px: int = 500
) -> alt.LayerChart:
    """Draw what memory each pipeline rank needs when it needs most, by class.

    Parameters
    ----------
    memory
        `stage`, `class`, `bytes`, `moment`: what `memory` and `Estimate.memory` give.
    limit_bytes
        What a GPU has, drawn as a line.
    title, width_px
        Heading, and width of the plot.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> memory_bars(found.memory, limit_bytes=found.cluster.gpu_sheet.memory_bytes)
    """
    memory = check_rows(memory, "memory", labels=("stage",), words=("class", "moment"), numbers=("bytes",))
    used = memory.filter(pl.col("bytes") > 0)
    present = _classes(used)
    rows = used.select(
        "class", "moment", gb=pl.col("bytes") / 1e9, label=pl.format("pipeline rank {}", "stage"),
        place=pl.col("class").cast(pl.Enum(CLASSES)).to_physical(),
    )  # fmt: skip
    colours = [MEMORY_COLOURS[name] for name in present]
    labels = memory.sort("stage").select(pl.format("pipeline rank {}", "stage").unique(maintain_order=True))
    bars = alt.Chart(rows).mark_bar()
    bars = bars.encode(
        x=alt.X("gb:Q").title("memory (GB)"),
        y=names("label", labels.to_series().to_list()),
        color=alt.Color("class:N").scale(domain=present, range=colours).title(None),
        order=alt.Order("place:Q"),
        tooltip=[*told("label", "class"), GB, *told("moment")],
    )
    layers: list[alt.Chart] = [bars]
    if limit_bytes is not None:
        limit = alt.Chart(pl.DataFrame({"gb": [limit_bytes / 1e9]}))
        layers.append(limit.mark_rule(strokeDash=[6, 3], strokeWidth=1.5, stroke=INK).encode(x=alt.X("gb:Q")))
    text = heading(title, "dashed: what a GPU has" if limit_bytes is not None else "")
    return alt.LayerChart(layer=layers, title=text, width=width_px, height=alt.Step(26))


def _classes(memory: pl.DataFrame) -> list[str]:
    """The classes of rows that use memory, in their order."""
    there = set(memory["class"])
    if unknown := there - {*CLASSES}:
        raise SchemaError(f"memory table has the class {min(map(str, unknown))!r}; classes are {', '.join(CLASSES)}.")
    if not there:
        raise LumosError("nothing to draw: no class uses memory.")
    return [name for name in CLASSES if name in there]


@as_annotated
def memory_over_time(
    memory: pl.DataFrame,
    *,
    limit_bytes: float | None = None,
    title: str = "Memory over the step",
    width_px: int = 620,
    max_rows: int = 4000,
) -> alt.FacetChart:
    """Draw what memory each pipeline rank uses over a step, class upon class, a panel a rank.

    Parameters
    ----------
    memory
        `stage`, `time_ns`, `class`, `bytes`, every class at every instant: `Estimate.memory_over_time`.
    limit_bytes
        What a GPU has, drawn as a line.
    title, width_px
        Heading, and width of the plots.
    max_rows
        Rows that the chart may hold: of instants that lie too close, the one at which most is used is drawn.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> memory_over_time(found.memory_over_time)
    """
    memory = check_rows(memory, "memory", labels=("stage",), words=("class",), numbers=("time_ns", "bytes"))
    used = memory.filter((pl.col("bytes") > 0).any().over("class"))
    present = _classes(used)
    used = used.with_columns(pl.col("time_ns") - pl.col("time_ns").min())
    rows = _thinned(used, max_rows // (len(present) * used["stage"].n_unique()) - 2).select(
        "time_ns",
        "class",
        panel=pl.format("pipeline rank {}", "stage"),
        gb=pl.col("bytes") / 1e9,
        place=pl.col("class").cast(pl.Enum(CLASSES)).to_physical(),
        limit=pl.lit(None if limit_bytes is None else limit_bytes / 1e9, pl.Float64),
    )
    base = alt.Chart()
    colours = [MEMORY_COLOURS[name] for name in present]
    y = alt.Y("gb:Q").title("memory (GB)")
    area = base.mark_area(interpolate="step-after").encode(
        x=alt.X("time_ms:Q").title("time in the step (ms)").scale(nice=False),
        y=y.stack("zero"),
        color=alt.Color("class:N").scale(domain=present, range=colours).title(None),
        order=alt.Order("place:Q"),
        tooltip=[*told("class"), GB],
    )
    layers = [area]
    if limit_bytes is not None:
        layers.append(base.mark_rule(strokeDash=[6, 3], strokeWidth=1.5, stroke=INK).encode(y=alt.Y("max(limit):Q")))
    panel = alt.Row("panel:N").sort(rows["panel"].unique(maintain_order=True).to_list()).title(None)
    panel = panel.header(labelOrient="top", labelAnchor="start", labelPadding=3)
    text = heading(title, "dashed: what a GPU has" if limit_bytes is not None else "")
    together = alt.layer(*layers, data=in_ms(rows)).properties(width=width_px, height=110)
    chart: alt.FacetChart = together.facet(row=panel, spacing=14).properties(title=text)
    return chart


def _thinned(memory: pl.DataFrame, max_points: int) -> pl.DataFrame:
    """Of each part of the time the instant at which most is used, and the first and the last."""
    at = memory.group_by("stage", "time_ns").agg(total=pl.col("bytes").sum()).sort("stage", "time_ns")
    time, last_ns = pl.col("time_ns"), pl.col("time_ns").max().over("stage")
    part = pl.when(time == 0).then(-1).when(time == last_ns).then(-2).otherwise(time * max(max_points, 1) // last_ns)
    most = (
        at.with_columns(part=part)
        .sort("total", descending=True, maintain_order=True)
        .unique(["stage", "part"], keep="first", maintain_order=True)
    )
    return memory.join(most, on=["stage", "time_ns"], how="semi").sort("stage", "time_ns")
