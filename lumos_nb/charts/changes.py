"""Where a step goes as a sum, what differs between two, what a change would buy, and what can grow without cost."""

from __future__ import annotations

import altair as alt
import polars as pl

from lumos_nb.charts.lane_bars import with_activity
from lumos_nb.charts.steps import part_rows
from lumos_nb.charts.style import (
    ACTIVITY_COLOURS,
    GREY,
    MEASURED,
    PART_COLOURS,
    PREDICTED,
    as_annotated,
    check_rows,
    heading,
    in_ms,
    names,
    texts,
    told,
)
from lumos_nb.display import format_ns, format_share
from lumos_nb.errors import InputError, LumosError, shown
from lumos_nb.partition import HasOps
from lumos_nb.schema import OPS, require

CHANGE_COLOURS = {"shorter": "#01665E", "longer": "#BF812D", "in all": GREY}
"""What a change does to a step."""
SLACKS_NS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
"""Bounds between which ops are counted by slack."""


@as_annotated
def waterfall(parts: pl.DataFrame, *, rank: int | None = None, title: str = "", width_px: int = 560) -> alt.LayerChart:
    """Draw where the step of one rank goes as a sum: each part begins where the one before it ends.

    Parameters
    ----------
    parts : breakdown
        `partition.breakdown`'s `rank`, `part`, `time_ns`.
    rank
        Whose step; None takes the longest.
    title, width_px
        Heading, and width of the step.

    Raises
    ------
    LumosError
        There is no row.
    SchemaError
        A column is missing, or a part is none of `partition.PARTS`.
    InputError
        There is no such rank.

    Examples
    --------
    >>> waterfall(breakdown(graph), rank=0)
    """
    rows = part_rows(parts, "")
    if rows.is_empty():
        raise LumosError("nothing to draw: no part of any rank takes time. Pass what `breakdown` returns.")
    step_ns = dict(rows.group_by("rank").agg(pl.col("time_ns").sum()).sort("rank").rows())
    if rank is not None and rank not in step_ns:
        raise InputError(f"the breakdown has no rank {rank}; it has {', '.join(map(str, step_ns))}.")
    chosen = max(step_ns, key=lambda one: step_ns[one]) if rank is None else rank
    own = rows.filter(pl.col("rank").eq_missing(chosen)).sort("place")
    end_ns = pl.col("time_ns").cum_sum()
    steps = own.select("part", "share", start_ns=end_ns - pl.col("time_ns"), end_ns=end_ns, text="time")
    whole = {"part": "step", "share": "", "start_ns": 0, "end_ns": step_ns[chosen], "text": format_ns(step_ns[chosen])}
    steps = pl.concat([steps, pl.DataFrame([whole], schema=steps.schema)])
    colours = PART_COLOURS | {"step": GREY}
    title = title or f"The step of rank {chosen}"
    return _cascade(steps, "part", colours, x="time in the step (ms)", title=title, width_px=width_px)


@as_annotated
def difference(
    changes: pl.DataFrame, *, level: str = "part", most: int = 12, title: str = "What changed", width_px: int = 520
) -> alt.LayerChart:
    """Draw what makes one step longer or shorter than another, change after change, down to the whole difference.

    Parameters
    ----------
    changes : comparison
        `partition.compare`'s `level`, `key`, `a_ns`, `b_ns`, `diff_ns`: times of all ranks together.
    level
        Of its levels: part, op, phase, layer, collective or rank.
    most
        Keys drawn, those that changed most; the others are one bar.
    title, width_px
        Heading, and width of the plot.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.
    InputError
        There is no such level.

    Examples
    --------
    >>> difference(compare(graph, another), level="op")
    """
    changes = check_rows(changes, "comparison", words=("level", "key"), numbers=("a_ns", "b_ns", "diff_ns"))
    rows = changes.filter(pl.col("level") == level).sort(pl.col("diff_ns").abs(), "key", descending=[True, False])
    if rows.is_empty():
        levels = ", ".join(changes["level"].drop_nulls().unique().sort())
        raise InputError(f"the comparison has no level {shown(level)}; it has {levels}.")
    drawn = rows.head(most).select("key", "a_ns", "b_ns", "diff_ns")
    sums = pl.col("a_ns", "b_ns", "diff_ns").sum()
    if (rest := rows[most:]).height:
        drawn = pl.concat([drawn, rest.select(pl.lit(f"{rest.height} others").alias("key"), sums)])
    end_ns, diff_ns = pl.col("diff_ns").cum_sum(), rows["diff_ns"].sum()
    signed = [format_ns(value) if value <= 0 else f"+{format_ns(value)}" for value in (*drawn["diff_ns"], diff_ns)]
    whole = rows.select(pl.lit("in all").alias("key"), sums).with_columns(
        start_ns=pl.lit(0, pl.Int64), end_ns="diff_ns"
    )
    steps = pl.concat([drawn.with_columns(start_ns=end_ns - pl.col("diff_ns"), end_ns=end_ns), whole])
    way = pl.when(pl.col("key") == "in all").then(pl.lit("in all")).when(pl.col("diff_ns") > 0).then(pl.lit("longer"))
    steps = steps.select(
        *("key", "start_ns", "end_ns"),
        way=way.otherwise(pl.lit("shorter")),
        a=texts(steps["a_ns"], format_ns),
        b=texts(steps["b_ns"], format_ns),
        text=pl.Series(signed, dtype=pl.String),
    )
    x = "b less a, all ranks together (ms)"
    return _cascade(steps, "way", CHANGE_COLOURS, x=x, title=title, width_px=width_px)


def _cascade(
    steps: pl.DataFrame, by: str, colours: dict[str, str], *, x: str, title: str, width_px: int
) -> alt.LayerChart:
    """Bars from where the one above ends, named by the first column, with their size behind them."""
    rows = in_ms(steps.with_columns(right_ns=pl.max_horizontal("start_ns", "end_ns")))
    y = names(rows.columns[0])
    present = [name for name in colours if name in set(rows[by])]
    scale = alt.Scale(domain=present, range=[colours[name] for name in present])
    shown = [name for name in rows.columns if not name.endswith("_ms") and name != "way"]
    bars = (
        alt.Chart(rows)
        .mark_bar(height={"band": 0.8})
        .encode(
            x=alt.X("start_ms:Q").title(x),
            x2=alt.X2("end_ms:Q"),
            y=y,
            color=alt.Color(f"{by}:N", scale=scale).legend(None),
            tooltip=told(*shown),
        )
    )
    sizes = alt.Chart(rows).mark_text(align="left", dx=5).encode(x="right_ms:Q", y=y, text="text:N")
    zero = alt.Chart(pl.DataFrame({"zero": [0]})).mark_rule(color=GREY).encode(x="zero:Q")
    return alt.LayerChart(layer=[bars, sizes, zero], title=heading(title), width=width_px, height=alt.Step(24))


@as_annotated
def sensitivity(
    swept: pl.DataFrame, *, most: int = 20, title: str = "What each change does to the step", width_px: int = 520
) -> alt.LayerChart:
    """Draw which scenarios shorten the step most: which class of ops buys most, if each is made as much faster.

    Parameters
    ----------
    swept
        `sweep`'s `scenario`, `step_ns`, `change`, a row a scenario.
    most
        Scenarios drawn: those that change the step most.
    title, width_px
        Heading, and width of the plot.

    Raises
    ------
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> halves = [{"scenario": f"{kind} x 0.5", kind: 0.5} for kind in ("cpu", "comm", "gap")]
    >>> sensitivity(sweep(graph, halves))
    """
    swept = check_rows(swept, "sweep", labels=("scenario",), numbers=("step_ns", "change"))
    rows = swept.top_k(min(most, swept.height), by=pl.col("change").abs()).sort("change", "scenario")
    rows = rows.select(
        pl.col("scenario").cast(pl.String),
        "change",
        step=texts(rows["step_ns"], format_ns),
        text=texts(rows["change"], format_share),
        way=pl.when(pl.col("change") > 0).then(pl.lit("longer")).otherwise(pl.lit("shorter")),
        right=pl.max_horizontal("change", 0.0),
    )
    y = names("scenario")
    ways = ["shorter", "longer"]
    colour = alt.Color("way:N").scale(domain=ways, range=[CHANGE_COLOURS[way] for way in ways]).legend(None)
    x = alt.X("change:Q").title("change of the step time").axis(format="+.0%")
    bars = alt.Chart(rows).mark_bar().encode(x=x, y=y, color=colour, tooltip=told("scenario", "step", "text"))
    sizes = alt.Chart(rows).mark_text(align="left", dx=5).encode(x="right:Q", y=y, text="text:N")
    return alt.LayerChart(layer=[bars, sizes], title=heading(title), width=width_px, height=alt.Step(22))


@as_annotated
def slack_bars(
    source: HasOps | pl.DataFrame, *, title: str = "How much longer ops could take", width_px: int = 520
) -> alt.Chart:
    """Draw how much time of ops has how much slack: what they could grow by before the step does.

    Parameters
    ----------
    source : Result, or its op table
        With `slack_ns`; ops without one end after nothing that counts.
    title, width_px
        Heading, and width of the plot.

    Raises
    ------
    LumosError
        No op takes time.
    SchemaError
        The op table lacks a column: it was not replayed.

    Examples
    --------
    >>> slack_bars(replay(graph))
    """
    if not isinstance(source, pl.DataFrame):
        require(source, "ops")
    ops = with_activity(OPS.check(source if isinstance(source, pl.DataFrame) else source.ops))
    ops = ops.filter(pl.col("dur_ns") > 0, pl.col("kind") != "boundary")
    ops = check_rows(ops, "replayed op", numbers=("slack_ns",))
    classes = ["none: critical", *(f"below {format_ns(bound)}" for bound in SLACKS_NS), "more", "matters to no step"]
    place = pl.sum_horizontal(pl.lit(0), *(pl.col("slack_ns") >= bound for bound in (1, *SLACKS_NS)))
    rows = ops.group_by(
        place=pl.when(pl.col("slack_ns").is_null()).then(len(classes) - 1).otherwise(place), activity="activity"
    ).agg(ops=pl.len(), time_ns=pl.col("dur_ns").sum())
    rows = rows.sort("place", "activity")
    rows = rows.with_columns(slack=pl.Series(classes).gather(rows["place"]), time=texts(rows["time_ns"], format_ns))
    present = [name for name in ACTIVITY_COLOURS if name in set(rows["activity"])]
    colours = [ACTIVITY_COLOURS[name] for name in present]
    chart: alt.Chart = (
        alt.Chart(in_ms(rows), title=heading(title))
        .mark_bar()
        .encode(
            x=alt.X("time_ms:Q").title("time of ops, all ranks together (ms)"),
            y=names("slack", [name for name in classes if name in set(rows["slack"])], title="slack"),
            color=alt.Color("activity:N").scale(domain=present, range=colours).title(None),
            tooltip=told("slack", "activity", "ops", "time"),
        )
        .properties(width=width_px, height=alt.Step(24))
    )
    return chart


@as_annotated
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
    LumosError, SchemaError
        There is no row, or a column is missing.

    Examples
    --------
    >>> alike = ln.benchmark.compare(datasets.path("gpt-ddp"), datasets.path("gpt-ddp-paired"))
    >>> similarity_bars(alike.classes)
    """
    classes = check_rows(classes, "similarity", words=("where", "class"), numbers=("time_ns", "replayed_time_ns"))
    rows = classes.select(
        name=pl.col("class") + pl.when(pl.col("where") == "device").then(pl.lit(" (device)")).otherwise(pl.lit("")),
        original=pl.col("time_ns") / 1e6,
        benchmark=pl.col("replayed_time_ns") / 1e6,
    )
    times = [alt.Tooltip(f"{name}:Q", format=",.4~r", title=f"{name} (ms)") for name in ("original", "benchmark")]
    base = alt.Chart(rows).encode(y=names("name").sort("-x"), tooltip=[*told("name"), *times])
    bars = base.mark_bar(color=PREDICTED).encode(x=alt.X("benchmark:Q").title("ms a step: benchmark, and | original"))
    ticks = base.mark_tick(color=MEASURED, thickness=3).encode(x="original:Q")
    return alt.LayerChart(layer=[bars, ticks], title=heading(title), width=width_px)
