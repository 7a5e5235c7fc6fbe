"""What a report says of a step, each as a table: waits, the path by name, exposed communication, evidence, spread."""

from __future__ import annotations

import polars as pl

from lumos_nb.critical_path import Result
from lumos_nb.errors import InputError, is_whole, shown
from lumos_nb.graph import Graph, Recording
from lumos_nb.partition import PARTS, HasOps, breakdown

_END = pl.col("start_ns") + pl.col("dur_ns")


def inner_steps(recording: Recording) -> pl.DataFrame:
    """`Recording.step_times` without the first and last profiled steps where there are others."""
    times = recording.step_times()
    inner = times.filter(~pl.col("edge"))
    return inner if inner.height else times


def step_spread(recording: Recording) -> pl.DataFrame:
    """How long the inner steps took, and how far they scatter.

    Returns
    -------
    DataFrame
        One row: `steps`, `median_ns`, `least_ns`, `most_ns`, `noise_share` (median distance of a step from the median,
        as a share of it; null of one step).

    Examples
    --------
    >>> step_spread(Recording.of(run))["noise_share"].item()
    """
    step, middle = pl.col("step_ns"), pl.col("step_ns").median()
    return inner_steps(recording).select(
        steps=pl.len(),
        median_ns=middle,
        least_ns=step.min(),
        most_ns=step.max(),
        noise_share=pl.when((pl.len() > 1) & (middle > 0)).then((step - middle).abs().median() / middle),
    )


def parts_by_rank(source: HasOps) -> pl.DataFrame:
    """`partition.breakdown`, a row a rank: `rank`, a column `<part>_ns` a part that takes time, their sum `step_ns`.

    Examples
    --------
    >>> parts_by_rank(replay(graph))
    """
    parts = breakdown(source).with_columns(pl.col("part") + "_ns")
    wide = parts.pivot("part", index="rank", values="time_ns")
    columns = [f"{part}_ns" for part in PARTS if wide[f"{part}_ns"].sum() > 0]
    return wide.select("rank", *columns, step_ns=pl.sum_horizontal(pl.exclude("rank")))


def exposed_communication(source: HasOps) -> pl.DataFrame:
    """Communication during which its rank does nothing else, by collective.

    Returns
    -------
    DataFrame
        `collective`, `rank`, `wait_ns` (arrived, and a peer had not), `transfer_ns`, `exposed_ns` (their sum), `share`
        (of the rank's step), the most exposed first.

    Examples
    --------
    >>> exposed_communication(replay(graph)).group_by("rank").agg(pl.sum("share"))
    """
    part, time = pl.col("part"), pl.col("time_ns")
    exposed = breakdown(source, by="collective").filter(part.str.starts_with("exposed_"))
    return (
        exposed.group_by("collective", "rank")
        .agg(
            wait_ns=time.filter(part == "exposed_wait").sum(),
            transfer_ns=time.filter(part == "exposed_transfer").sum(),
            exposed_ns=time.sum(),
            share=pl.col("share").sum(),
        )
        .sort("exposed_ns", "collective", "rank", descending=[True, False, False], nulls_last=True)
    )


def path_by_name(result: Result) -> pl.DataFrame:
    """What the critical path is made of inside the step, by name of op; a latency has the name of its rule.

    Returns
    -------
    DataFrame
        `name`, `kind`, `ops` (how many of the path), `time_ns`, `share` (of the step), longest first. `time_ns` sums to
        `result.step_ns`.

    Examples
    --------
    >>> path_by_name(replay(graph)).head(10)
    """
    end_ns = result.step_ends.filter(pl.col("step") == pl.col("step").max())["end_ns"].max()
    assert isinstance(end_ns, int)
    start, lag = pl.col("start_ns"), pl.col("lag_ns").fill_null(0)
    spans = pl.concat(
        [
            result.path.select("name", "kind", begin=start, end=start + pl.col("path_ns")),
            result.path.select(name=pl.format("latency: {}", "rule"), kind=pl.lit("lag"), begin=start - lag, end=start),
        ]
    ).with_columns(pl.col("begin", "end").clip(end_ns - result.step_ns, end_ns))
    spans = spans.with_columns(time_ns=pl.col("end") - pl.col("begin")).filter(pl.col("time_ns") > 0)
    named = spans.group_by("name", "kind").agg(ops=pl.len(), time_ns=pl.col("time_ns").sum())
    shares = named.with_columns(share=pl.col("time_ns") / max(result.step_ns, 1))
    return shares.sort("time_ns", "name", "kind", descending=[True, False, False])


def waits_for(source: Graph | Result) -> pl.DataFrame:
    """Which lanes stand still, and for the work of which: threads for streams, streams for launches, ranks for ranks.

    The time before an op on its lane counts as waiting for the op whose edge was satisfied last; of a collective, for
    the rank that arrived last. It is the lane's own time, whatever else its rank does meanwhile.

    Returns
    -------
    DataFrame
        `rank`, `lane`, `for_rank`, `for_lane`, `rule`, `evidence` (of the longest wait), `waits`, `time_ns`, `mostly`
        (the op of the longest wait, or its collective), longest first.

    Examples
    --------
    >>> waits_for(replay(graph)).filter(pl.col("rank") != pl.col("for_rank"))
    """
    graph = source.graph if isinstance(source, Result) else source
    if not isinstance(graph, Graph):
        raise InputError(f"this takes a Graph or a Result; it was given a {type(source).__name__}.")
    ops = source.ops
    starts = ops.select(src="op_id", src_start_ns="start_ns", src_end_ns=_END)
    ready = pl.when("from_start").then("src_start_ns").otherwise("src_end_ns") + pl.col("lag_ns")
    own_order = pl.col("rule").is_in(["thread", "stream"])
    last = (
        graph.edges.join(starts, on="src")
        .sort(ready, ~own_order, "src", "rule")
        .unique("dst", keep="last", maintain_order=True)
    )
    joins = ops.filter(pl.col("kind") == "join")["op_id"].implode()
    arrivals = last.filter(pl.col("dst").is_in(joins)).select(src="dst", latest="src")
    last = last.join(arrivals, on="src", how="left").with_columns(src=pl.coalesce("latest", "src"))
    lane = ["rank", "lane"]
    in_order = ops.sort(*lane, "start_ns", maintain_order=True)
    waiting = in_order.filter(pl.col("kind") != "boundary")
    waiting = waiting.select(*lane, dst="op_id", time_ns=pl.col("start_ns") - _END.shift(1).over(lane))
    waiting = waiting.filter((pl.col("lane") != "net") & (pl.col("time_ns") > 0))
    # A record stands for what its stream had been given before it.
    awaited = pl.when(pl.col("name") != "record").then(pl.coalesce("collective", "name")).forward_fill().over(lane)
    about = in_order.select(src="op_id", for_rank="rank", for_lane="lane", awaited=awaited.fill_null("record"))
    waits = last.join(waiting, on="dst").join(about, on="src").filter(~own_order)
    waits = waits.sort("time_ns", "dst", descending=[True, False])
    return (
        waits.group_by("rank", "lane", "for_rank", "for_lane", "rule", maintain_order=True)
        .agg(
            pl.col("evidence").first(),
            waits=pl.len(),
            time_ns=pl.col("time_ns").sum(),
            mostly=pl.col("awaited").first(),
        )
        .sort("time_ns", "rank", "lane", "for_rank", "for_lane", "rule", descending=[True] + [False] * 5)
    )


def neighbours(result: Result, op_id: int) -> pl.DataFrame:
    """An op, what it waits for, and what waits for it.

    Parameters
    ----------
    result
        A replayed step.
    op_id
        Of one of its ops.

    Returns
    -------
    DataFrame
        `relation` ("waits for", "itself", "awaited by"), `op_id`, `rank`, `lane`, `kind`, `name`, `rule` and `evidence`
        of the edge, `spare_ns` (from when the edge lets the later op start to when it does: 0 of the one that decides),
        `start_ns`, `dur_ns`, `slack_ns`; the nearest to deciding first.

    Raises
    ------
    InputError
        The result has no such op.

    Examples
    --------
    >>> neighbours(replay(graph), 17).filter(pl.col("relation") == "waits for")
    """
    if not hasattr(result, "graph"):
        raise InputError(f"this takes a Result: replay(graph) gives one; it was given a {type(result).__name__}.")
    ops, edges = result.ops, result.graph.edges
    if not is_whole(op_id, -(2**63), 2**63 - 1) or ops.filter(pl.col("op_id") == op_id).is_empty():
        raise InputError(f"step {result.graph.step} has no op {shown(op_id)}; take one of its ops' op_id.")
    near = edges.filter((pl.col("src") == op_id) | (pl.col("dst") == op_id))
    ends = [ops.select(pl.col("op_id").alias(at), pl.col("start_ns").alias(f"{at}_ns"), _END.alias(f"{at}_end_ns"))
            for at in ("src", "dst")]  # fmt: skip
    near = near.join(ends[0], on="src").join(ends[1], on="dst")
    ready = pl.when("from_start").then("src_ns").otherwise("src_end_ns") + pl.col("lag_ns")
    before = pl.col("dst") == op_id
    beside = near.select(
        relation=pl.when(before).then(pl.lit("waits for")).otherwise(pl.lit("awaited by")),
        op_id=pl.when(before).then("src").otherwise("dst"),
        rule="rule",
        evidence="evidence",
        spare_ns=pl.col("dst_ns") - ready,
    ).sort("relation", "spare_ns", descending=[True, False], maintain_order=True)
    itself = pl.DataFrame({"relation": ["itself"], "op_id": [op_id]}, schema_overrides={"op_id": pl.Int64})
    about = ops.select("op_id", "rank", "lane", "kind", "name", "start_ns", "dur_ns", "slack_ns")
    found = pl.concat([beside, itself], how="diagonal").join(about, on="op_id", maintain_order="left")
    in_order = pl.col("relation").replace_strict({"waits for": 0, "itself": 1, "awaited by": 2})
    columns = ("relation", "op_id", "rank", "lane", "kind", "name", "rule", "evidence", "spare_ns")
    return found.sort(in_order, maintain_order=True).select(*columns, "start_ns", "dur_ns", "slack_ns")


def op_at(result: Result, rank: int, lane: str, window_ns: tuple[int, int]) -> int:
    """The op that fills most of a window on a lane; where the lane stands still, the nearest to its beginning.

    Parameters
    ----------
    result
        A replayed step.
    rank, lane
        Of the op.
    window_ns
        From and to, in ns after the first start in the step, as `charts.timeline` counts.

    Raises
    ------
    InputError
        The lane has no op.

    Examples
    --------
    >>> lane = graph.ops.filter(rank=0, kind="cpu")["lane"][0]
    >>> op_at(replay(graph), 0, lane, (5_000_000, 6_000_000)) in graph.ops["op_id"]
    True
    """
    begin_ns, end_ns = (at + (result.ops["start_ns"].min() or 0) for at in window_ns)  # type: ignore[operator]
    on_lane = result.ops.filter(pl.col("rank") == rank, pl.col("lane") == lane)
    if on_lane.is_empty():
        raise InputError(f"rank {rank} has no lane {shown(lane)} with an op.")
    shared = pl.min_horizontal(_END, pl.lit(end_ns)) - pl.max_horizontal("start_ns", pl.lit(begin_ns))
    nearest = on_lane.sort(shared.clip(0), (pl.col("start_ns") - begin_ns).abs(), descending=[True, False])
    return int(nearest["op_id"][0])


def evidence_shares(graph: Graph) -> pl.DataFrame:
    """How much waiting hangs on links that are exact, on those of a pattern or of times, and how much on nothing.

    Returns
    -------
    DataFrame
        `evidence` (exact, pattern, time, nothing), `links`, `time_ns` (waiting that hangs on them), `share`.

    Examples
    --------
    >>> evidence_shares(build_graph(run))
    """
    what, detail = pl.col("what"), pl.col("detail")
    kind = (
        pl.when(what == "explained by nothing")
        .then(pl.lit("nothing"))
        .when(what.str.starts_with("edges of rule "))
        .then(detail.str.strip_prefix("evidence: "))
    )
    named = graph.report.with_columns(evidence=kind).drop_nulls("evidence")
    sums = named.group_by("evidence", maintain_order=True).agg(links=pl.col("count").sum(), time_ns=pl.sum("time_ns"))
    order = pl.Enum(["exact", "pattern", "time", "nothing"])
    total_ns = pl.col("time_ns").sum()
    return sums.sort(pl.col("evidence").cast(order)).with_columns(
        share=pl.when(total_ns > 0).then(pl.col("time_ns") / total_ns)
    )
