"""A graph made of the runs of another one, in another order, some several times, some not, some on other ranks.

A run is a stretch of a rank's work with all that it issues (`structure`). A *plan* says which runs the new graph has:
`source` (number of the run), `to_rank`, `place` (order on that rank), `share` of its time (1 but for timelines, where a
run may be of several layers), and `layer` and `micro_batch` as they are then.
Edges inside a run come with each copy of it. Order on a thread or stream is made anew. What else led from run to run
leads from the nearest copy before, or between ranks from the copy of the same number.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from lumos_nb.graph import Graph

LANE_RULES = ("thread", "stream", "boundary")
"""Rules by which an op only follows the one before it on its lane."""

UNORDERED = "net"
"""The lane of joins, which are in no order."""

PLAN = {
    "source": pl.Int64(),
    "to_rank": pl.Int32(),
    "place": pl.Int64(),
    "share": pl.Float64(),
    "layer": pl.Int32(),
    "micro_batch": pl.Int32(),
}

EDGE = ("lag_ns", "from_start", "rule", "evidence", "hard")


def splice(graph: Graph, source: pl.Series, plan: pl.DataFrame) -> tuple[Graph, pl.DataFrame]:
    """The graph of a plan.

    Parameters
    ----------
    graph
        Of one step.
    source
        Number of each op's run (null: of no run, such as what was going on before), unique over ranks.
    plan
        `PLAN`. The first row of a run keeps its ops' ids.

    Returns
    -------
    graph, copies
        `copies`: a row an op, with `from_id`, the op that it is a copy of, `source`, `copy` (its number), `to_rank`,
        `place` and `row` (its order within the run).
    """
    copies = _copies(graph, source, plan)
    ops = _ops(graph, copies)
    edges = pl.concat([_inner(graph, copies), _outer(graph, copies), _lanes(graph, copies)]).select(graph.edges.columns)
    edges = edges.unique(["src", "dst"], keep="first", maintain_order=True).sort("src", "dst")
    spliced = replace(graph, ops=ops, edges=edges)
    return spliced, copies


def _copies(graph: Graph, source: pl.Series, plan: pl.DataFrame) -> pl.DataFrame:
    """A row an op of the new graph: `from_id`, `source`, `copy`, `to_rank`, `place`, `row`, `lane`, `op_id`."""
    rows = graph.ops.select(from_id="op_id", rank="rank", lane="lane", source=source).with_row_index("row")
    numbered = plan.with_columns(copy=pl.int_range(pl.len()).over("source"))
    mine = rows.filter(pl.col("source").is_not_null()).join(numbered, on="source")
    both = pl.concat([_before(rows, plan), mine], how="diagonal_relaxed")
    if (both["rank"] != both["to_rank"]).any():  # work of several ranks shares a rank's threads and streams
        both = both.join(_lane_names(graph), on=["rank", "lane"]).with_columns(lane="lane_name").drop("lane_name")
    both = both.sort("to_rank", "place", "row", maintain_order=True).drop("rank")
    fresh = int(graph.ops["op_id"].max()) + 1  # type: ignore[arg-type]
    number = (pl.col("copy") > 0).cum_sum() - 1
    return both.with_columns(op_id=pl.when(pl.col("copy") > 0).then(number + fresh).otherwise("from_id").cast(pl.Int64))


def _before(rows: pl.DataFrame, plan: pl.DataFrame) -> pl.DataFrame:
    """What was going on before the step, on every rank; on one that was not measured what was on the first one."""
    rest = rows.filter(pl.col("source").is_null())
    ranks = plan.select(pl.col("to_rank").unique().sort())
    ranks = ranks.with_columns(rank=pl.when(pl.col("to_rank").is_in(rest["rank"].implode())).then("to_rank"))
    ranks = ranks.with_columns(pl.col("rank").fill_null(rest["rank"].min()))
    copies = rest.join(ranks, on="rank").with_columns(copy=pl.int_range(pl.len()).over("from_id"))
    return copies.with_columns(place=pl.lit(-1, pl.Int64))


def _lane_names(graph: Graph) -> pl.DataFrame:
    """`rank`, `lane`, `lane_name`: the lane of the first rank that is of the same kind and as busy among its kind."""
    lanes = graph.ops.group_by("rank", "lane", maintain_order=True).len()
    kind = pl.col("lane").str.extract(r"^([a-z]+)")
    lanes = lanes.with_columns(kind=kind)
    lanes = lanes.with_columns(role=pl.col("len").rank("ordinal", descending=True).over("rank", "kind"))
    first = lanes.unique(["kind", "role"], keep="first", maintain_order=True).select("kind", "role", lane_name="lane")
    named = lanes.join(first, on=["kind", "role"], maintain_order="left")
    return named.select("rank", "lane", lane_name=pl.when(pl.col("kind") == "net").then("lane").otherwise("lane_name"))


def _ops(graph: Graph, copies: pl.DataFrame) -> pl.DataFrame:
    about = copies.select("from_id", "copy", "to_rank", "layer", "micro_batch", "share", new_id="op_id", to_lane="lane")
    ops = about.join(graph.ops, left_on="from_id", right_on="op_id", suffix="_was", maintain_order="left")
    ops = ops.with_columns(
        op_id="new_id",
        rank="to_rank",
        lane="to_lane",
        dur_ns=(pl.col("dur_ns") * pl.col("share").fill_null(1.0)).round().cast(pl.Int64),
        device=pl.when(pl.col("device").is_not_null()).then(
            pl.coalesce(pl.col("to_lane").str.extract(r"^gpu(\d+)").cast(pl.Int32), "device")
        ),
        layer=pl.when(pl.col("layer") >= 0).then(pl.col("layer").cast(pl.String)),
        micro_batch=pl.col("micro_batch"),
    )
    if "nth" in ops.columns:  # a call site and its number name one op of a rank
        ops = ops.with_columns(nth=pl.col("nth") + (pl.col("copy") * pl.col("of")).cast(ops.schema["nth"]))
    return ops.select(pl.col(c).cast(t) for c, t in graph.ops.schema.items())


def _inner(graph: Graph, copies: pl.DataFrame) -> pl.DataFrame:
    """Edges within a run, once a copy; and those of what belongs to no run."""
    at = copies.select("from_id", "source", "copy", "op_id")
    edges = graph.edges.filter(~pl.col("rule").is_in(LANE_RULES))
    src = at.rename({"from_id": "src", "op_id": "new_src"})
    dst = at.rename({"from_id": "dst", "op_id": "new_dst"})
    both = edges.join(src, on="src").join(dst, on=["dst", "source", "copy"], nulls_equal=True)
    return both.select(*EDGE, src="new_src", dst="new_dst")


def _outer(graph: Graph, copies: pl.DataFrame) -> pl.DataFrame:
    """Edges from run to run: from the nearest copy before on its rank, from the copy of the same number elsewhere."""
    at = copies.select("from_id", "source", "copy", "to_rank", "place", "op_id")
    edges = graph.edges.filter(~pl.col("rule").is_in(LANE_RULES)).with_row_index("edge")
    ends = edges.join(at, left_on="dst", right_on="from_id").rename({"op_id": "new_dst"})
    run_of = graph.ops.select(src="op_id").join(
        at.unique("from_id").select(src="from_id", src_source="source"), on="src", how="left"
    )
    ends = ends.join(run_of, on="src").filter(pl.col("source").ne_missing(pl.col("src_source")))
    starts = at.select(src="from_id", src_copy="copy", src_rank="to_rank", src_place="place", new_src="op_id")
    count = starts.group_by("src").agg(copies=pl.len().cast(pl.Int64))
    ends = ends.join(count, on="src")
    pairs = ends.join(starts, on="src")
    near = pairs.filter((pl.col("src_rank") == pl.col("to_rank")) & (pl.col("src_place") < pl.col("place")))
    near = near.sort("src_place").unique(["edge", "new_dst"], keep="last")
    apart = pairs.join(near, on=["edge", "new_dst"], how="anti")  # joins are in no order with their rank's runs
    apart = apart.filter(pl.col("src_copy") == pl.col("copy") % pl.col("copies"))
    return pl.concat([near, apart], how="diagonal_relaxed").select(*EDGE, src="new_src", dst="new_dst")


def _lanes(graph: Graph, copies: pl.DataFrame) -> pl.DataFrame:
    """Order on threads and streams: edges as they were where two ops still follow one another, else plain ones."""
    old = graph.ops.filter(pl.col("lane") != UNORDERED)
    were = old.select(src=pl.col("op_id").shift(1).over("rank", "lane"), dst="op_id", device="device").drop_nulls("src")
    edges = graph.edges.filter(pl.col("rule").is_in(LANE_RULES)).unique(["src", "dst"])
    were = were.join(edges, on=["src", "dst"], how="left").with_columns(neighbours=True)
    new = copies.filter(pl.col("lane") != UNORDERED)
    lane = ["to_rank", "lane"]
    pairs = new.select(
        new_src=pl.col("op_id").shift(1).over(lane),
        src=pl.col("from_id").shift(1).over(lane),
        new_dst="op_id",
        dst="from_id",
        rule_here=pl.when(pl.col("lane").str.starts_with("cpu:")).then(pl.lit("thread")).otherwise(pl.lit("stream")),
    ).drop_nulls("new_src")
    found = pairs.join(were, on=["src", "dst"], how="left", maintain_order="left")
    fresh = pl.col("neighbours").is_null()
    found = found.filter(fresh | pl.col("rule").is_not_null()).with_columns(
        lag_ns=pl.when(fresh).then(0).otherwise("lag_ns"),
        from_start=pl.when(fresh).then(False).otherwise("from_start"),
        rule=pl.when(fresh).then("rule_here").otherwise("rule"),
        evidence=pl.when(fresh).then(pl.lit("exact")).otherwise("evidence"),
        hard=pl.when(fresh).then(True).otherwise("hard"),
    )
    return found.select(*EDGE, src="new_src", dst="new_dst")
