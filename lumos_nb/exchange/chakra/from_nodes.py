"""Chakra nodes -> ops and edges, so that a Chakra trace is replayed, broken down and drawn like any other.

Every dependency is an edge. Collectives of equal number in a group become an arrival on each rank, a join and a
transfer on each; a receive waits for the send of its tag. What we wrote carries lanes, kinds and phases; of other files
lanes are made of `stream`, `tid` and `is_cpu_op`, and what lies on one lane goes in turn, as streams and threads do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from lumos_nb.errors import ChakraError
from lumos_nb.exchange.chakra.messages import COLLECTIVES
from lumos_nb.exchange.chakra.ranks import MESSAGE_TYPES, Job
from lumos_nb.exchange.chakra.to_nodes import GATHERS, LAG
from lumos_nb.graph import Graph
from lumos_nb.repairs import REPORT
from lumos_nb.schema import EDGES, OPS

LATEST_US = 2**62 // 1000
"""A time beyond does not fit into whole nanoseconds."""
_MEMORY = {"MEM_LOAD_NODE": "memcpy", "MEM_STORE_NODE": "memcpy"}


def to_graph(path: str | Path) -> Graph:
    """The ops and edges of a job's Chakra files, or of one file.

    Parameters
    ----------
    path
        A folder of `<prefix>.<rank>.et`, perhaps with the JSON file of its groups, or one file.

    Returns
    -------
    Graph
        One step. Times are those of the nodes, whole microseconds.

    Raises
    ------
    ChakraError
        There is no file, one is no Chakra file, or a node needs the data of one that is not there. (Callers that are
        not there, as in what the reference converter writes, are counted in the graph's report.)

    Examples
    --------
    >>> ln.chakra.write(graph, "out/")
    >>> abs(replay(to_graph("out/")).makespan_ns / replay(graph).makespan_ns - 1) < 0.01  # times are whole us there
    True
    """
    job = Job.read(path)
    late = job.nodes.filter(pl.max_horizontal("start_us", "dur_us") > LATEST_US)
    if not late.is_empty():
        raise ChakraError(f"{path}: node {late['id'][0]} of {late['file'][0]} has a time of more than 146 years.")
    lost = job.edges.filter(pl.col("src").is_null())
    if not (needed := lost.filter("data")).is_empty():
        needs, row = needed.select("needs", "dst").row(0)
        of = f"node {job.nodes['id'][row]} of {job.nodes['file'][row]}"
        raise ChakraError(
            f"{path}: {of} depends on node {needs}, which is not there ({len(needed)} such): "
            "ln.chakra.validate lists them all."
        )
    ops = _ops(job)
    edges = _dependencies(job, ops)
    edges = pl.concat([edges, _turns(job, ops, edges)])
    ops, edges = _joined(job, ops, edges)
    ops, edges = _without_lags(ops, edges)
    return _graph(ops, edges, len(lost))


def _ops(job: Job) -> pl.DataFrame:
    """A row a node, in an order that dependencies allow."""
    nodes = job.nodes[job.order].with_columns(row=pl.col("row").cast(pl.Int64))
    comm = pl.col("row").is_in(pl.concat([job.collectives["row"], job.messages["row"]]).cast(pl.Int64).implode())
    host = pl.col("is_cpu_op").fill_null(value=False) & ~comm
    stream = pl.when(comm).then(pl.lit("comm")).otherwise(pl.lit("0"))
    device = pl.format("gpu0:{}", pl.coalesce(pl.col("stream").cast(pl.String), stream))
    lane = pl.when(host).then(pl.format("cpu:{}", pl.col("tid").fill_null(0))).otherwise(device)
    named = pl.when(comm).then(pl.lit("comm")).when(host).then(pl.lit("cpu"))
    kind = named.otherwise(pl.col("type").replace_strict(_MEMORY, default="kernel", return_dtype=pl.String))
    collective = pl.col("comm_type").replace_strict(dict(enumerate(COLLECTIVES)), default=None, return_dtype=pl.String)
    message = pl.col("type").replace_strict(
        dict(zip(MESSAGE_TYPES, ("send", "recv"), strict=True)), default=None, return_dtype=pl.String
    )
    nodes = nodes.with_columns(
        ours=pl.col("kind").is_not_null(), lane=pl.coalesce("lane", lane), kind=pl.coalesce("kind", kind)
    )
    sizes = {name: len(ranks) for name, ranks in job.groups.items()}
    size = pl.col("pg_name").replace_strict(
        sizes, default=len(job.files) if job.several else None, return_dtype=pl.Int32
    )
    gathers = collective.str.to_lowercase().is_in(GATHERS)
    return nodes.select(
        "row", "rank", "lane", "kind", "name", "phase", "layer", "parent", "micro_batch", "ours", "stream",
        "rendezvous", comm_seq=pl.lit(None, pl.Int64), place=pl.int_range(pl.len()).cast(pl.Float64),
        step=pl.col("step").fill_null(0),
        device=pl.col("lane").str.extract(r"^gpu(\d+)").cast(pl.Int32),
        start_ns=1000 * pl.col("start_us").cast(pl.Int64),
        dur_ns=1000 * pl.col("dur_us").cast(pl.Int64),
        flops=pl.col("num_ops").cast(pl.Float64),
        bytes=pl.col("tensor_size").cast(pl.Float64),
        collective=pl.when(pl.col("kind") == "comm").then(pl.coalesce(message, collective.str.to_lowercase())),
        group="pg_name",
        group_size=size,
        comm_bytes=pl.col("comm_size") * pl.when(gathers).then(size).otherwise(1).fill_null(1),
        peer=pl.when(message == "send").then("comm_dst").when(message == "recv").then("comm_src"),
    )  # fmt: skip


def _dependencies(job: Job, ops: pl.DataFrame) -> pl.DataFrame:
    """Edges between rows, by rule: what two lanes say of an edge."""
    lanes = ops.select("row", "lane", host=pl.col("device").is_null())
    src, dst = job.known_edges
    edges = pl.DataFrame({"src": src, "dst": dst})
    for end in ("src", "dst"):
        edges = edges.join(lanes.rename({"row": end, "lane": f"{end}_lane", "host": f"{end}_host"}), on=end)
    same = pl.col("src_lane") == pl.col("dst_lane")
    from_host, to_host = pl.col("src_host"), pl.col("dst_host")
    on_lane = pl.when(same & from_host).then(pl.lit("thread")).when(same).then(pl.lit("stream"))
    by_host = on_lane.when(from_host & to_host).then(pl.lit("autograd")).when(from_host).then(pl.lit("launch"))
    rule = by_host.when(to_host).then(pl.lit("sync")).otherwise(pl.lit("event"))
    return edges.select("src", "dst", rule=rule, evidence=pl.lit("exact"), hard=True)


def _turns(job: Job, ops: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """What no file of others says: a thread and a stream do one thing after another. Messages go as they can."""
    in_turn = (pl.col("kind") != "comm") | (
        pl.col("stream").is_not_null() & ~pl.col("collective").is_in(["send", "recv"])
    )
    lanes = ops.filter(~pl.col("ours") & in_turn.fill_null(value=False))
    turns = lanes.select(
        src=pl.col("row").shift(1).over("rank", "lane"), dst="row",
        rule=pl.when(pl.col("device").is_null()).then(pl.lit("thread")).otherwise(pl.lit("stream")),
        evidence=pl.lit("pattern"), hard=pl.lit(value=False),
    ).drop_nulls("src")  # fmt: skip
    return turns.join(edges, on=["src", "dst"], how="anti")


def _joined(job: Job, ops: pl.DataFrame, edges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Collectives, and messages that begin when both sides are there, with arrivals and joins; other messages."""
    pair = ["source", "target", "comm_tag", "nth"]
    sends, receives = (job.messages.filter(type=kind) for kind in MESSAGE_TYPES)
    sent = sends.join(receives, on=pair, nulls_equal=True).with_columns(pl.col("row", "row_right").cast(pl.Int64))
    eager = sent.filter(~pl.col("rendezvous").fill_null(value=False))
    direct = eager.select(src="row", dst="row_right", rule=pl.lit("collective"), evidence=pl.lit("exact"), hard=True)
    number = pl.int_range(pl.len(), dtype=pl.Int64)
    both = sent.join(eager, on="row", how="anti").select("row", "row_right", meeting=-1 - number, nth="nth")
    of_group = pl.struct("pg_name", "nth").rank("dense").cast(pl.Int64)
    met = pl.concat([
        job.collectives.select(pl.col("row").cast(pl.Int64), meeting=of_group, nth="nth"),
        both.select("row", "meeting", "nth"), both.select("meeting", "nth", row="row_right"),
    ], how="diagonal").filter(pl.len().over("meeting") > 1)  # fmt: skip
    beyond = len(job.nodes)
    met = (
        ops.drop("comm_seq")
        .join(met.rename({"nth": "comm_seq"}), on="row", maintain_order="left")
        .with_columns(arrival=beyond + number, join=beyond + pl.len() + pl.col("meeting").rank("dense").cast(pl.Int64))
    )
    arrivals = met.with_columns(
        place=pl.col("place") - 0.5,
        row="arrival",
        kind=pl.lit("event"),
        name=pl.lit("arrival"),
        dur_ns=pl.lit(0, pl.Int64),
    )
    first = pl.col("place", "rank", "step", "collective", "group", "start_ns", "group_size").first()
    joins = met.sort("rank", "place").group_by("join", maintain_order=True).agg(first, n=pl.len())
    joins = joins.with_columns(
        row="join", lane=pl.lit("net"), kind=pl.lit("join"), dur_ns=pl.lit(0, pl.Int64), place=pl.col("place") - 0.25,
        name=pl.format("{} of {} ranks", pl.col("collective").fill_null("collective"), "n"),
    )  # fmt: skip
    moved = dict(met.select("row", "arrival").iter_rows())
    edges = edges.with_columns(pl.col("dst").replace(moved))
    steps = (("arrival", "join", "collective"), ("join", "row", "collective"), ("arrival", "row", "stream"))
    made = [met.select(src=a, dst=b, rule=pl.lit(rule), evidence=pl.lit("exact"), hard=True) for a, b, rule in steps]
    seq = ops.select("row").join(met.select("row", "comm_seq"), on="row", how="left", maintain_order="left")
    ops = ops.with_columns(seq["comm_seq"])
    ops = pl.concat([ops, arrivals.select(ops.columns), joins.drop("join", "n")], how="diagonal")
    return ops.sort("place", maintain_order=True), pl.concat([edges, direct, *made])


def _without_lags(ops: pl.DataFrame, edges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Nodes that stand for a lag behind one other as the lag of edges."""
    edges = edges.with_columns(lag_ns=pl.lit(0, pl.Int64))
    to = edges.select(row="src", to="dst")
    of = edges.group_by(row="dst").agg(sources=pl.len(), of=pl.first("src")).filter(sources=1)
    lags = ops.filter((pl.col("kind") == LAG) & pl.col("row").is_in(to["row"].implode())).join(of, on="row")
    lags = lags.filter(~pl.col("of").is_in(lags["row"].implode()))
    back = lags.join(to, on="row").select(
        src="of", dst="to",
        rule=pl.col("name").str.extract(f"^{LAG}: (.+)").fill_null(LAG),
        evidence=pl.lit("exact"), hard=True, lag_ns="dur_ns",
    )  # fmt: skip
    gone = lags["row"].implode()
    edges = pl.concat([edges.filter(~pl.col("src").is_in(gone) & ~pl.col("dst").is_in(gone)), back])
    kept = ops.filter(~pl.col("row").is_in(gone))
    return kept.with_columns(kind=pl.col("kind").replace(LAG, "unexplained")), edges


def _graph(ops: pl.DataFrame, edges: pl.DataFrame, lost: int) -> Graph:
    number = pl.DataFrame({"row": ops["row"], "op_id": np.arange(len(ops))})
    ops = ops.with_columns(op_id=pl.int_range(pl.len(), dtype=pl.Int64), phase=pl.col("phase").fill_null("other"))
    ops = ops.with_columns(pl.lit(None).alias(name) for name in OPS.columns if name not in ops.columns)
    for end in ("src", "dst"):
        edges = edges.join(number.rename({"row": end, "op_id": f"{end}_id"}), on=end, maintain_order="left")
    edges = edges.sort("lag_ns", descending=True, maintain_order=True).unique(
        ["src_id", "dst_id"], keep="first", maintain_order=True
    )
    edges = edges.with_columns(src="src_id", dst="dst_id", from_start=False).sort("src", "dst")
    step = ops["step"].max()
    rows = [("control dependencies left out", None, lost, None, "the nodes that they name are not in the file")]
    return Graph(
        OPS.check(ops.select(pl.col(name).cast(kind) for name, kind in OPS.columns.items())),
        EDGES.check(edges.select(pl.col(name).cast(kind) for name, kind in EDGES.columns.items())),
        step=step if isinstance(step, int) else 0,
        report=pl.DataFrame(rows, schema=REPORT, orient="row"),
    )
