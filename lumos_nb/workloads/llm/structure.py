"""Which layer, pass and phase of the model every op of a trace's graph belongs to, and how sure that is.

Annotations come first: what the op table says of phases and layers. Where it names no layer, a layer is the longest
block of operators or kernels that stands several times in a row (`repeats.tandem`), by names, shapes and, where these
are missing, bytes; on pipeline stages of one layer each, the longest block that the stages have in common. Passes of
several micro-batches are found so too. What a host op launches is where that op is.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from lumos_nb.clocks import MESSAGES as MESSAGES
from lumos_nb.display import Shown
from lumos_nb.errors import GraphError
from lumos_nb.graph import Graph
from lumos_nb.schema import require
from lumos_nb.workloads.llm.layer_search import ANNOTATION, NOTHING, OUTSIDE, PLACED, find_layers, with_phases

ISSUED_RULES = ("launch", "issue", "collective", "delay")
"""Rules whose edges tie ops that belong to one place."""

MESSAGE = "message"
"""Phase of what goes from stage to stage, and of the calls for it."""

PLACES = {
    "op_id": pl.Int64(),
    "rank": pl.Int32(),
    "phase": pl.String(),
    "layer": pl.Int32(),  # counted from 0 in the order of the forward pass; OUTSIDE of the layers
    "micro_batch": pl.Int32(),  # number of the pass, null where there is one only
    "run": pl.Int32(),  # number of the stretch of one phase, pass and layer, in order on its rank
}
"""Columns of `Structure.ops`; all but the ids are null for what was going on before the step."""


@dataclass(frozen=True, slots=True, repr=False)
class Structure(Shown):
    """Where every op of a graph belongs: `find_structure` makes one.

    Attributes
    ----------
    ops
        `PLACES`, a row an op, in the graph's order.
    layers
        Rank -> the layers that it holds, in order.
    stage
        Rank -> its place in the pipeline.
    table
        How sure it is: `rank`, `stage`, `phase`, `found` (annotation, repetition, stages in common, whole passes,
        nothing), `layers`, `passes`, `count` (ops in layers), `time_ns`, `share` (of the phase's time on that rank that
        layers cover) and `confidence`: 1 for annotations; of repetitions the share of the rank's phases that agree on
        the number of layers, less where layers cover less than half of the phase.
    """

    ops: pl.DataFrame
    layers: dict[int, list[int]]
    stage: dict[int, int]
    table: pl.DataFrame

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._caption(), self.table)]

    def _caption(self) -> str:
        layers = len({layer for of_rank in self.layers.values() for layer in of_rank})
        return f"Structure: {layers} layers on {len(set(self.stage.values()))} pipeline stage(s) (see .ops, .table)"


def find_structure(graph: Graph) -> Structure:
    """Find the layers, passes and phases of a transformer's step in a trace.

    Parameters
    ----------
    graph
        Of one step, as `build_graph` or `rewrite` made it.

    Raises
    ------
    GraphError
        The graph holds several steps.

    Examples
    --------
    >>> find_structure(build_graph(load_run(datasets.path("gpt-pp")))).layers
    {0: [0], 1: [1]}
    """
    require(graph, "edges")
    own = graph.ops.filter(pl.col("kind") != "boundary")
    if own["step"].n_unique() > 1:
        raise GraphError("the graph holds several steps; give what build_graph made of one.")
    stage = _stages(graph)
    threads = _in_phases(own)
    anchors = _anchors(own, threads)
    found, summary = find_layers(anchors, stage)
    placed = _filled(own, threads, found)
    runs = _with_runs(_spread(graph, placed))
    held = placed.filter(pl.col("layer") >= 0).select("rank", "layer").unique().sort("rank", "layer")
    layers = {int(str(rank)): rows["layer"].to_list() for (rank,), rows in held.group_by("rank", maintain_order=True)}
    runs = runs.drop("rank", "row", "main")
    ops = graph.ops.select("op_id", "rank").join(runs, on="op_id", how="left", maintain_order="left")
    ops = ops.select(pl.col(c).cast(dtype) for c, dtype in PLACES.items())
    return Structure(ops, layers, stage, _table(graph, ops, summary, stage))


WORK = ("kernel", "memcpy", "memset")
_ON_THREAD = pl.col("kind").is_in(["cpu", "gap", "launch", "alloc", "wait"]) & pl.col("lane").str.starts_with("cpu:")


def _in_phases(ops: pl.DataFrame) -> pl.DataFrame:
    """Rows of the host's threads with their `phase`, null in gaps."""
    own = pl.col("lane").str.starts_with("cpu:") & pl.col("collective").is_in(MESSAGES)  # as in timelines
    rows = ops.filter(_ON_THREAD | own.fill_null(False)).with_row_index("row")
    sent = ops.filter(pl.col("collective").is_in(MESSAGES)).select("rank", "correlation").drop_nulls().unique()
    rows = rows.join(sent.with_columns(sent=True), on=["rank", "correlation"], how="left", maintain_order="left")
    message = (pl.col("sent") | pl.col("collective").is_in(MESSAGES)).fill_null(False)
    known = pl.when(~pl.col("phase").is_in(["other", MESSAGE]) & ~message).then("phase")
    lane = ["rank", "lane"]
    return rows.with_columns(
        phase=pl.when(pl.col("kind") == "gap").then(None).when(message).then(pl.lit(MESSAGE))
        .otherwise(pl.coalesce(known, known.forward_fill().over(lane), known.backward_fill().over(lane), "phase"))
    ).drop("sent")  # fmt: skip


def _anchors(ops: pl.DataFrame, threads: pl.DataFrame) -> pl.DataFrame:
    """What layers are found by: device work, else operators; with `token`, a number for what each does."""
    work = ops.filter(pl.col("kind").is_in(WORK))
    named = work.filter(pl.col("phase") != "other").group_by("rank").agg(named=pl.len())
    told = work.group_by("rank").len().join(named, on="rank", how="left").filter(2 * pl.col("named") > pl.col("len"))
    on_device = work.with_columns(phase=pl.when(pl.col("rank").is_in(told["rank"].implode())).then("phase"))
    operators = threads.filter((pl.col("kind") == "cpu") & (pl.col("phase") != MESSAGE))
    anchors = on_device if work.height else operators
    token = pl.struct("name", "shapes", bytes=pl.col("bytes").fill_null(0)).rank("dense").cast(pl.Int64)
    anchors = anchors.select(
        "op_id", "rank", "phase", "layer", "name", "correlation", "kind", "micro_batch", token=token
    )
    parts = anchors.partition_by("rank", maintain_order=True)
    return pl.concat([with_phases(part) for part in parts]) if parts else anchors


def _stages(graph: Graph) -> dict[int, int]:
    """Pipeline stage of every rank: a stage's first message comes from the one before it, the first stage sends."""
    ranks = graph.ops["rank"].unique().sort().to_list()
    exchange = pl.col("collective") == "send_recv"
    messages = graph.ops.filter(
        exchange & (pl.col("kind") == "comm")
        | pl.col("collective").is_in(["send", "recv"]) & pl.col("kind").is_in(["event", "comm"])
    )
    first = messages.group_by("rank", maintain_order=True).first()
    receives = pl.when(exchange).then(~pl.col("name").str.contains("send")).otherwise(pl.col("collective") == "recv")
    first = first.filter(receives).join(_met(graph, first), on="op_id", how="left")
    before = dict(first.select("rank", pl.coalesce("peer", "met")).drop_nulls().iter_rows())

    def depth(rank: int, seen: int = 0) -> int:
        return 0 if rank not in before or seen > len(ranks) else 1 + depth(before[rank], seen + 1)

    return {rank: depth(rank) for rank in ranks}


def _met(graph: Graph, comm: pl.DataFrame) -> pl.DataFrame:
    """`op_id`, `met`: the lowest other rank that each of some communication ops meets."""
    ties = graph.edges.filter(pl.col("rule") == "collective")
    joins = comm.select("op_id", "rank").join(ties.select(op_id="dst", join="src"), on="op_id")
    others = ties.select("src", join="dst").join(graph.ops.select(src="op_id", met="rank"), on="src")
    met = joins.join(others, on="join").filter(pl.col("met") != pl.col("rank"))
    return met.group_by("op_id").agg(pl.col("met").min())


def _filled(ops: pl.DataFrame, threads: pl.DataFrame, found: pl.DataFrame) -> pl.DataFrame:
    """`PLACED` of what is on threads and of all anchors.

    A gap is where that is which follows it. So is what leads to a launch; a call between operators is where the one
    before it is.
    """
    place = ["phase", "layer", "micro_batch"]
    found = found.with_columns(pl.col("layer", "micro_batch").cast(pl.Int32))
    calls = (
        found.filter(pl.col("kind").is_in(WORK)).drop_nulls("correlation").unique(["rank", "correlation"], keep="first")
    )
    launches = threads.filter(pl.col("kind") == "launch").select("op_id", "rank", "correlation")
    launches = launches.join(calls.drop("op_id", "kind"), on=["rank", "correlation"]).select("op_id", *place)
    at = pl.concat([found.filter(pl.col("kind") == "cpu").select("op_id", *place), launches])
    rows = threads.rename({"phase": "told"}).drop("layer", "micro_batch")
    rows = rows.join(at, on="op_id", how="left", maintain_order="left").sort("row")
    lane, gap = ["rank", "lane"], pl.col("kind") == "gap"
    if calls.is_empty():
        message = pl.col("told") == MESSAGE
        rows = rows.with_columns(
            phase=pl.when(~gap).then("told"),
            layer=pl.when(message).then(OUTSIDE).when(~gap).then(pl.col("layer").forward_fill().over(*lane, "told")),
            micro_batch=pl.when(~gap).then(pl.col("micro_batch").forward_fill().over(lane)),
        ).with_columns(pl.when(~gap).then(pl.col(c).fill_null(OUTSIDE)).alias(c) for c in place[1:])
    rows = rows.with_columns(
        pl.coalesce(c, pl.col(c).backward_fill().over(lane), pl.col(c).forward_fill().over(lane)) for c in place
    )
    rest = found.filter(~pl.col("op_id").is_in(rows["op_id"].implode()))
    return pl.concat([rows.select(PLACED), rest.select(PLACED)])


def _spread(graph: Graph, placed: pl.DataFrame) -> pl.DataFrame:
    """What host rows issue is where they are, and joins are where their first member is; the rest by its lane."""
    columns = ("phase", "layer", "micro_batch")
    known = placed.select("op_id", *columns)
    calls = placed.filter(pl.col("kind") == "launch").select("rank", "correlation", *columns).drop_nulls("correlation")
    issued = graph.ops.select("op_id", "rank", "correlation").join(
        calls.unique(["rank", "correlation"], keep="first"), on=["rank", "correlation"]
    )
    known = pl.concat([known, issued.join(known, on="op_id", how="anti").select(known.columns)])
    rows = graph.ops.filter(pl.col("kind") != "boundary").select("op_id", "rank", "lane").with_row_index("row")
    edges = graph.edges.filter(pl.col("rule").is_in(ISSUED_RULES))
    backward = edges.filter(pl.col("rule") == "delay").select(src="dst", dst="src")
    near = pl.concat([edges.filter(pl.col("rule") != "collective").select("src", "dst"), backward])
    for ties in (near, pl.concat([near, edges.select("src", "dst")])):
        while True:
            more = ties.join(known, left_on="src", right_on="op_id").drop("src").rename({"dst": "op_id"})
            more = more.join(known, on="op_id", how="anti").unique("op_id", keep="first", maintain_order=True)
            if more.is_empty():
                break
            known = pl.concat([known, more.select(known.columns)])
    threads = placed.filter(~pl.col("kind").is_in(WORK))
    main = (threads if threads.height else placed)["op_id"]
    rows = rows.join(known, on="op_id", how="left", maintain_order="left").with_columns(
        main=pl.col("op_id").is_in(main.implode())
    )
    return rows.with_columns(
        pl.coalesce(c, pl.col(c).forward_fill().over("rank", "lane"), pl.col(c).backward_fill().over("rank", "lane"))
        for c in columns
    )


def _with_runs(rows: pl.DataFrame) -> pl.DataFrame:
    """Number the stretches of one phase, pass and layer on each rank; what is issued has its issuer's number."""
    same = pl.struct("phase", "layer", "micro_batch")
    host = rows.filter("main").select(
        "row", "rank", "phase", "layer", "micro_batch",
        run=(same != same.shift(1)).fill_null(True).cum_sum().over("rank").cast(pl.Int32),
    )  # fmt: skip
    key = ["rank", "phase", "layer", "micro_batch"]
    placed = rows.join_asof(host.select(*key, "row", "run").sort("row"), on="row", by=key, check_sortedness=False)
    nearest = pl.coalesce("run", pl.col("run").forward_fill().over("rank"), pl.col("run").backward_fill().over("rank"))
    return placed.sort("row").with_columns(run=nearest)


def _table(graph: Graph, ops: pl.DataFrame, summary: list[dict[str, object]], stage: dict[int, int]) -> pl.DataFrame:
    """`Structure.table`."""
    timed = ops.with_columns(graph.ops["dur_ns"]).drop_nulls("phase")
    inside = pl.col("layer") >= 0
    spent = timed.group_by("rank", "phase").agg(
        count=inside.sum().cast(pl.Int64),
        time_ns=pl.col("dur_ns").filter(inside).sum(),
        share=pl.col("dur_ns").filter(inside).sum() / pl.col("dur_ns").sum(),
    )
    schema = {"rank": pl.Int32, "phase": pl.String, "found": pl.String, "layers": pl.Int64, "passes": pl.Int64}
    table = pl.DataFrame(summary, schema=schema, orient="row").join(spent, on=["rank", "phase"], how="left")
    agree = (pl.col("layers") == pl.col("layers").mode().max()).mean().over("rank")
    table = table.filter((pl.col("phase") != "other") | (pl.col("layers") > 0)).with_columns(
        stage=pl.col("rank").replace_strict(stage, return_dtype=pl.Int32),
        confidence=pl.when(pl.col("found") == ANNOTATION)
        .then(1.0)
        .when(pl.col("found") == NOTHING)
        .then(0.0)
        .otherwise(agree * (2 * pl.col("share")).clip(0, 1)),
    )
    columns = ("rank", "stage", "phase", "found", "layers", "passes", "count", "time_ns", "share", "confidence")
    return table.select(columns).sort("rank", maintain_order=True)
