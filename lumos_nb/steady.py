"""The steady state of a step: its graph repeated, so that each repetition begins where the last one left off."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from lumos_nb.errors import GraphError, SchemaError, is_whole, require_memory, shown
from lumos_nb.graph import KEPT, Graph
from lumos_nb.rules import QUEUE
from lumos_nb.schema import DEVICE_KINDS, EDGES, OPS, require


def repeat(graph: Graph, times: int = 4) -> Graph:
    """The graph of one step repeated back to back, its boundary replaced by the repetition before.

    Replaying it gives the period of the steady state: `Result.step_ns` is the last repetition's. What-ifs need this
    where a change also changes what earlier steps leave behind: a host that runs ahead, a full launch queue, a
    stream's backlog.

    Parameters
    ----------
    graph
        As `build_graph` made it.
    times
        How many repetitions. The first begins with idle streams and an empty queue; a queue of Q ops fills in about Q
        / (ops a step) of them, and the last two must be equal for a steady state: `Result.step_ends` shows them.

    Raises
    ------
    GraphError
        `times` is below 2, or the graph is repeated already.

    Examples
    --------
    >>> replay(repeat(build_graph(run))).step_ns
    """
    if not is_whole(times, 2):
        raise GraphError(f"a steady state needs a whole number of at least 2 repetitions, not {shown(times)}.")
    times = int(times)
    require(graph, "edges")
    EDGES.check(graph.edges)
    if missing := [column for column in KEPT if column not in OPS.check(graph.ops).columns]:
        raise SchemaError(f"op table lacks column(s) {', '.join(missing)}, which build_graph gives; repeat its graph.")
    if graph.ops.filter(pl.col("kind") != "boundary").is_empty():
        raise GraphError("the graph has no op of its step to repeat, only what was going on when it began.")
    boundary = graph.ops.filter(pl.col("kind") == "boundary")
    own = graph.ops.filter(pl.col("kind") != "boundary")
    if own["step"].n_unique() > 1:
        raise GraphError("the graph holds several steps, so it is repeated already; give what build_graph made.")
    inner = graph.edges.join(boundary.select(src="op_id"), on="src", how="anti").filter(pl.col("rule") != "queue")
    between = pl.concat([_lane_to_lane(own), _across(graph, boundary, own)])
    row_bytes = 2 * (graph.ops.estimated_size() + graph.edges.estimated_size())  # with what they are put together from
    require_memory(times * int(row_bytes), f"times={times:,}")
    queue = _queue(graph, own, times)
    size = int(graph.ops["op_id"].max()) + 1  # type: ignore[arg-type]
    ops = pl.concat(
        [own.with_columns(op_id=pl.col("op_id") + n * size, step=pl.lit(n, pl.Int32)) for n in range(times)]
    )
    copies = [_shift(inner, n * size, n * size) for n in range(times)]
    links = [
        _shift(
            between.filter(pl.col("ago") <= n).with_columns(src=pl.col("src") - pl.col("ago") * size),
            n * size,
            n * size,
        )
        for n in range(1, times)
    ]
    edges = pl.concat(
        [*copies, *(link.select(graph.edges.columns) for link in links), queue.select(graph.edges.columns)]
    )
    known = ops["op_id"].implode()
    edges = edges.filter(pl.col("src").is_in(known) & pl.col("dst").is_in(known))
    return replace(graph, ops=ops, edges=edges, step=times - 1)


def _shift(edges: pl.DataFrame, src: int, dst: int) -> pl.DataFrame:
    return edges.with_columns(src=pl.col("src") + src, dst=pl.col("dst") + dst)


def _edge(frame: pl.DataFrame, rule: str) -> pl.DataFrame:
    return frame.select(
        "src",
        "dst",
        "ago",
        lag_ns=pl.lit(0, pl.Int64),
        from_start=pl.lit(value=False),
        rule=pl.lit(rule),
        evidence=pl.lit("exact"),
        hard=pl.lit(value=True),
    )


def _lane_to_lane(own: pl.DataFrame) -> pl.DataFrame:
    """The last op of each lane, then the first of the same lane in the next repetition."""
    lanes = own.filter(pl.col("kind") != "join").group_by("rank", "lane", maintain_order=True)
    ends = lanes.agg(src=pl.col("op_id").last(), dst=pl.col("op_id").first(), ago=pl.lit(1))
    return _edge(ends, "repetition")


def _across(graph: Graph, boundary: pl.DataFrame, own: pl.DataFrame) -> pl.DataFrame:
    """Waits for work of earlier steps, now for the same op of an earlier repetition."""
    name = ["rank", "site", "nth"]
    twins = own.filter(pl.col("kind").is_in(DEVICE_KINDS)).select(*name, src_twin="op_id").unique(name, keep="first")
    earlier = boundary.select(*name, "ago", src="op_id").join(twins, on=name)
    crossing = (
        graph.edges.filter(pl.col("rule").is_in(["sync", "event"])).join(earlier, on="src").with_columns(src="src_twin")
    )
    return crossing.select("src", "dst", "ago", "lag_ns", "from_start", "rule", "evidence", "hard")


def _queue(graph: Graph, own: pl.DataFrame, times: int) -> pl.DataFrame:
    """Rule 8 over all repetitions: each launch after the device op that the queue's size puts before its own."""
    launched = graph.edges.filter(pl.col("rule") == "launch").select("src", "dst")
    delays = graph.edges.filter(pl.col("rule") == "delay").select(dst="src", behind="dst")
    transfers = own.filter(pl.col("kind") == "comm").select("rank", "correlation", transfer="op_id")
    launched = launched.join(delays, on="dst", how="left")
    launched = launched.join(own.select("rank", "start_ns", "correlation", src="op_id"), on="src")
    launched = launched.join(own.select("device", dst="op_id"), on="dst")
    launched = launched.join(transfers, on=["rank", "correlation"], how="left").sort(*QUEUE, "start_ns", "src")
    launched = launched.with_columns(work=pl.coalesce("transfer", "behind", "dst"))
    size = int(graph.ops["op_id"].max()) + 1  # type: ignore[arg-type]
    queue = pl.col("rank").replace_strict(dict(graph.queue_sizes), default=None, return_dtype=pl.Int64)
    per_step = launched.with_columns(number=pl.int_range(pl.len()).over(QUEUE), count=pl.len().over(QUEUE), size=queue)
    all_steps = pl.concat(
        [
            per_step.with_columns(
                place=pl.col("number") + n * pl.col("count"),
                src=pl.col("src") + n * size,
                work=pl.col("work") + n * size,
            )
            for n in range(times)
        ]
    )
    before = all_steps.select(*QUEUE, room="place", blocker="work")
    pairs = all_steps.with_columns(room=pl.col("place") - pl.col("size")).join(before, on=[*QUEUE, "room"])
    return _edge(pairs.select(src="blocker", dst="src", ago=pl.lit(0)), "queue").with_columns(
        evidence=pl.lit("pattern")
    )
