"""Ops and edges -> Chakra nodes: every dependency rule as data dependencies, every lag as a node of its own.

Chakra knows no lags, no joins and whole microseconds alone. An op of which others wait for a part is cut there; a lag
is a node between two others; a collective, which here is an arrival on each rank, a join and a transfer on each, is one
node a rank, for the reader joins those of equal number in a group. Durations are rounded by where they end on their
lane, so that their sum is kept.
"""

from __future__ import annotations

import polars as pl

from lumos_nb.critical_path import replay
from lumos_nb.errors import ChakraError
from lumos_nb.exchange.chakra.messages import COLLECTIVES
from lumos_nb.graph import Graph

LAG = "lag"
NORM_BYTES = 4
"""What ranks exchange in a collective that no record names: the norm of the gradients."""
GATHERS = ("all_gather", "gather")
"""Collectives whose result is larger than what a rank gives: our size is the larger, as nccl-tests count, Chakra's what
goes in."""
AS_COLLECTIVE = {"hidden": "ALL_REDUCE", "send_recv": "ALL_TO_ALL"}
"""A batch of messages joins its ranks as an all-to-all does."""


def nodes_of(graph: Graph, *, latencies: bool = True, rings: bool = False) -> pl.DataFrame:
    """The nodes of all ranks: columns of `NODES`, with `rank`; of collectives `group`, `members` and `meeting`.

    `latencies` False leaves out what passes between a launch's end and its kernel's start. With `rings` a message
    without another side goes round a ring of equal ranks: `ring` is its group, and its peers are yet to be told.

    Raises
    ------
    ChakraError
        An edge joins ranks outside of collectives and messages, or a collective has no counterpart in Chakra.
    GraphError
        The edges make a cycle, or the graph is unsound otherwise.
    """
    result = replay(graph)
    ops = result.ops.with_columns(
        pl.int_range(pl.len(), dtype=pl.Int64).alias("row"), start_ns=pl.col("start_ns") - result.origin_ns
    )
    edges = _by_row(ops, graph.edges)
    meetings = _meetings(ops, edges)
    ops = ops.join(meetings.drop("arrival"), on="row", how="left", maintain_order="left")
    ops, edges = _met(ops, edges, meetings)
    cut, pieces = _cut(ops, edges)
    nodes, links = _with_lags(pieces, cut, latencies=latencies)
    if rings:
        nodes = _in_rings(nodes)
    return _numbered(nodes, links)


def _by_row(ops: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """Edges between rows, with what decides how they are written."""
    about = ops.select("op_id", "row", "rank", "kind", "collective", on_cpu=pl.col("lane").str.starts_with("cpu"))
    for end in ("src", "dst"):
        named = about.rename({name: f"{end}_{name}" for name in about.columns if name != "op_id"})
        edges = edges.join(named, left_on=end, right_on="op_id", maintain_order="left")
    return edges.drop("src", "dst").rename({"src_row": "src", "dst_row": "dst"})


def _meetings(ops: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """Transfers that begin with those of other ranks: `row`, `meeting`, `arrival` (row of the event), `members`."""
    into = edges.filter(pl.col("dst_kind") == "join").select(meeting="dst", rank="src_rank", arrival="src")
    out = edges.filter(pl.col("src_kind") == "join").select("dst_kind", meeting="src", rank="dst_rank", row="dst")
    if not (out["dst_kind"] == "comm").all() or out.select("meeting", "rank").is_duplicated().any():
        raise ChakraError(
            "a join leads to something else than one transfer on each rank, which Chakra has no words for."
        )
    met = out.drop("dst_kind").join(into, on=["meeting", "rank"], how="left")
    ranks = met.group_by("meeting").agg(members=pl.col("rank").sort())
    return met.join(ranks, on="meeting", how="left").drop("rank")


def _met(ops: pl.DataFrame, edges: pl.DataFrame, meetings: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ops without joins and arrivals, what these waited for put on the transfers; messages get their peers."""
    joined = pl.col("src_kind").eq("join") | pl.col("dst_kind").eq("join")
    crosses = pl.col("src_rank") != pl.col("dst_rank")
    sent = (pl.col("src_collective") == "send") & (pl.col("dst_collective") == "recv") & crosses
    to_collective = (pl.col("dst_kind") == "comm") & ~pl.col("dst_collective").is_in(["send", "recv"])
    messages = edges.filter(sent.fill_null(value=False) & ~joined)
    stray = edges.filter(crosses & ~joined & ~sent.fill_null(value=False) & ~to_collective.fill_null(value=False))
    if not stray.is_empty():
        a, b, rule = stray.select("src_rank", "dst_rank", "rule").row(0)
        raise ChakraError(
            f"an edge of rule {rule!r} leads from rank {a} to rank {b}; Chakra's nodes wait for others of their rank, "
            "and for other ranks in collectives and messages alone."
        )
    own = edges.filter(~crosses & ~joined)
    arrivals = meetings.drop_nulls("arrival").select("arrival", transfer="row")
    beyond = own.join(arrivals, left_on="src", right_on="arrival").filter(pl.col("dst") != pl.col("transfer"))
    gone = arrivals.filter(~pl.col("arrival").is_in(beyond["src"].implode()))
    gone = gone.join(ops.filter(pl.col("dur_ns") == 0).select(arrival="row"), on="arrival", how="semi")
    own = own.filter(~pl.col("src").is_in(gone["arrival"].implode()))
    own = own.join(gone, left_on="dst", right_on="arrival", how="left").with_columns(
        dst=pl.coalesce("transfer", "dst"),
        dst_kind=pl.when(pl.col("transfer").is_not_null()).then(pl.lit("comm")).otherwise("dst_kind"),
    )
    ops = ops.filter((pl.col("kind") != "join") & ~pl.col("row").is_in(gone["arrival"].implode()))
    return _with_peers(ops, messages), own.drop("transfer")


def _with_peers(ops: pl.DataFrame, messages: pl.DataFrame) -> pl.DataFrame:
    """Who sends to whom (`other`), and the `tag`, counted for every pair; those of a meeting begin together."""
    paired = ops.filter(pl.col("collective").is_in(["send", "recv"]) & (pl.col("members").list.len() == 2))
    both = paired.select("meeting", "row", "rank", "collective")
    met = both.filter(collective="send").join(both.filter(collective="recv"), on="meeting", suffix="_to")
    direct = messages.select(row="src", rank="src_rank", row_to="dst", rank_to="dst_rank")
    pairs = pl.concat([met.select(*direct.columns, rendezvous=True), direct.with_columns(rendezvous=False)])
    pairs = pairs.sort("row").with_columns(tag=pl.int_range(pl.len(), dtype=pl.Int64).over("rank", "rank_to"))
    sides = pl.concat([
        pairs.select("row", "tag", "rendezvous", other="rank_to"),
        pairs.select("tag", "rendezvous", row="row_to", other="rank"),
    ], how="diagonal")  # fmt: skip
    sizes = ops.select("row", "comm_bytes")
    sent = pairs.join(sizes, on="row").select(row="row_to", sent="comm_bytes")
    ops = ops.join(sides, on="row", how="left", maintain_order="left")
    ops = ops.join(sent, on="row", how="left", maintain_order="left")
    return ops.with_columns(comm_bytes=pl.coalesce("sent", "comm_bytes")).drop("sent")


def _cut(ops: pl.DataFrame, edges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Ops cut where others wait for their parts; and the edges between pieces, with the lag that remains.

    What waits for a part of a transfer, which cannot be cut, waits as long from the transfer's own readiness on.
    """
    edges = edges.join(ops.select(src="row", src_dur="dur_ns"), on="src")
    part = pl.col("from_start") & (pl.col("src_kind") != "comm")
    at = pl.when(part & (pl.col("lag_ns") < pl.col("src_dur"))).then("lag_ns")
    edges = edges.with_columns(at_ns=at, shadow=pl.col("from_start") & (pl.col("src_kind") == "comm"))
    cuts = edges.drop_nulls("at_ns").select(row="src", to_ns="at_ns").unique()
    ends = pl.concat([cuts, ops.select("row", to_ns="dur_ns")]).unique().sort("row", "to_ns")
    ends = ends.with_columns(piece=pl.int_range(pl.len(), dtype=pl.Int64).over("row"))
    ends = ends.with_columns(from_ns=pl.col("to_ns").shift(1).over("row").fill_null(0))
    pieces = ends.join(ops, on="row", maintain_order="left").with_columns(
        start_ns=pl.col("start_ns") + pl.col("from_ns"), dur_ns=pl.col("to_ns") - pl.col("from_ns")
    )
    last = ends.group_by("row").agg(last=pl.max("piece"))
    parts = ends.select(src="row", at_ns="to_ns", cut_piece="piece")
    edges = edges.join(parts, on=["src", "at_ns"], how="left").join(last, left_on="src", right_on="row")
    past = pl.when(part).then(pl.col("lag_ns") - pl.col("src_dur")).otherwise("lag_ns")
    edges = edges.with_columns(
        src_piece=pl.coalesce("cut_piece", "last"),
        lag_ns=pl.when(pl.col("at_ns").is_not_null()).then(0).otherwise(past),
        dst_piece=pl.lit(0, pl.Int64),
    )
    chain = ends.filter(pl.col("piece") > 0).select(
        src="row", dst="row", src_piece=pl.col("piece") - 1, dst_piece="piece", lag_ns=pl.lit(0, pl.Int64)
    )
    return pl.concat([edges, chain.with_columns(shadow=False)], how="diagonal"), pieces


def _with_lags(pieces: pl.DataFrame, edges: pl.DataFrame, *, latencies: bool) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Nodes, lags among them, and links between them by `node`."""
    nodes = pieces.with_columns(
        node=pl.int_range(pl.len(), dtype=pl.Int64), on_cpu=pl.col("lane").str.starts_with("cpu")
    )
    at = nodes.select("row", "piece", "node", "on_cpu", end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    for end in ("src", "dst"):
        named = at.rename({name: f"{end}_{name}" for name in ("piece", "node", "end_ns", "on_cpu")} | {"row": end})
        edges = edges.drop(f"{end}_on_cpu", strict=False).join(named, on=[end, f"{end}_piece"], how="inner")
    if not latencies:
        launched = pl.col("src_on_cpu") & ~pl.col("dst_on_cpu") & ~pl.col("shadow")
        edges = edges.with_columns(lag_ns=pl.when(launched).then(0).otherwise("lag_ns"))
    lagged = edges.filter((pl.col("lag_ns") > 0) | pl.col("shadow"))
    lagged = lagged.with_columns(node=pl.int_range(len(nodes), len(nodes) + len(lagged), dtype=pl.Int64))
    plain = edges.filter((pl.col("lag_ns") == 0) & ~pl.col("shadow")).select("src_node", "dst_node")
    before = pl.concat([plain, lagged.filter(~pl.col("shadow")).select(src_node="node", dst_node="dst_node")])
    shadows = lagged.filter("shadow").select("src_node", dst="node")
    shadowed = shadows.join(before, left_on="src_node", right_on="dst_node", suffix="_in")
    links = [
        plain,
        lagged.filter(~pl.col("shadow")).select("src_node", dst_node="node"),
        lagged.select(src_node="node", dst_node="dst_node"),
        shadowed.select(src_node="src_node_in", dst_node="dst"),
    ]  # fmt: skip
    own = lagged.select(
        "node", dur_ns="lag_ns",
        rank="dst_rank", row="dst", piece=pl.lit(-1, pl.Int64), start_ns="src_end_ns", kind=pl.lit(LAG),
        name=pl.format("lag: {}", "rule"), on_cpu="src_on_cpu",
    )  # fmt: skip
    return pl.concat([nodes, own], how="diagonal"), pl.concat(links)


def _in_rings(nodes: pl.DataFrame) -> pl.DataFrame:
    """Messages without another side, to the next rank of their group and from the one before: `ring` is the group.

    The n-th that a rank sends is the n-th that the next one receives.
    """
    message = (pl.col("kind") == "comm") & pl.col("collective").is_in(["send", "recv"]) & pl.col("other").is_null()
    nth = message.cum_sum().over("rank", "group", "collective").cast(pl.Int64) - 1
    return nodes.sort("rank", "row", "piece").with_columns(
        ring=pl.when(message).then("group"),
        other=pl.when(message).then("rank").otherwise("other"),
        tag=pl.when(message).then(nth).otherwise("tag"),
        rendezvous=pl.when(message).then(False).otherwise("rendezvous"),
    )


def _numbered(nodes: pl.DataFrame, links: pl.DataFrame) -> pl.DataFrame:
    """Columns of `NODES`: ids by rank in issue order, whole microseconds, dependencies."""
    nodes = nodes.sort("rank", "row", "piece", maintain_order=True)
    nodes = nodes.with_columns(id=pl.int_range(pl.len(), dtype=pl.UInt64).over("rank"))
    lane = ["rank", pl.col("lane").fill_null(LAG)]
    end_us = (pl.col("dur_ns").cum_sum() + 500) // 1000
    ids = nodes.select("node", "id")
    needs = (
        links.join(ids, left_on="src_node", right_on="node")
        .group_by("dst_node")
        .agg(data_deps=pl.col("id").unique().sort())
    )
    dur_us = (end_us - end_us.shift(1).fill_null(0)).over(lane)
    nodes = nodes.with_columns(dur_us=dur_us.cast(pl.UInt64))
    nodes = nodes.join(needs, left_on="node", right_on="dst_node", how="left", maintain_order="left")
    return _described(nodes)


def _described(nodes: pl.DataFrame) -> pl.DataFrame:
    comm = pl.col("kind") == "comm"
    collective = pl.col("collective").replace(AS_COLLECTIVE).str.to_uppercase()
    is_message = comm & pl.col("collective").is_in(["send", "recv"])
    unknown = nodes.filter(comm & ~is_message & ~collective.is_in(COLLECTIVES).fill_null(value=False))
    if not unknown.is_empty():
        name, what = unknown.select("name", "collective").row(0)
        raise ChakraError(f"{name!r} is a collective of kind {what!r}, for which Chakra has no number.")
    lonely = nodes.filter(is_message & pl.col("other").is_null())
    if not lonely.is_empty():
        name, rank = lonely.select("name", "rank").row(0)
        raise ChakraError(f"{name!r} of rank {rank} is a message of which the other side is not in the graph.")
    numbers = {name: i for i, name in enumerate(COLLECTIVES)}
    # Where no group is named, or a batch of messages joins a part of one, those go together that meet alike.
    number = collective.replace_strict(numbers, default=None, return_dtype=pl.Int64)
    who = pl.coalesce(pl.col("members").cast(pl.List(pl.String)).list.join("+"), pl.format("rank {}", "rank"))
    alike = pl.format("{} {} of {}", pl.col("group").fill_null("any"), "collective", who)
    named = pl.col("group").is_not_null() & (pl.col("collective") != "send_recv")
    known = pl.when(pl.col("collective") == "hidden").then(NORM_BYTES).otherwise("comm_bytes")
    of = pl.when(pl.col("collective").is_in(GATHERS)).then(pl.coalesce("group_size", pl.col("members").list.len()))
    given = (known / of.fill_null(1).cast(pl.Int64)).ceil()
    is_send, is_recv = comm & (pl.col("collective") == "send"), comm & (pl.col("collective") == "recv")
    on_lane = pl.col("lane").str.extract(r":(-?\d+)$").cast(pl.Int64, strict=False)
    return nodes.select(
        "rank", "id", "data_deps", "dur_us", "lane", "kind", "phase", "layer", "parent",
        "group_size", "members", "meeting", *(["ring"] if "ring" in nodes.columns else []),
        group=pl.when(named).then("group").otherwise(alike),
        name=pl.col("name").fill_null(""),
        type=pl.when(is_send).then(pl.lit("COMM_SEND_NODE")).when(is_recv).then(pl.lit("COMM_RECV_NODE"))
        .when(comm).then(pl.lit("COMM_COLL_NODE")).otherwise(pl.lit("COMP_NODE")),
        start_us=(pl.col("start_ns") // 1000).cast(pl.UInt64),
        is_cpu_op=~comm & pl.col("on_cpu").fill_null(value=False),
        num_ops=pl.when(~comm).then(pl.col("flops").round().cast(pl.Int64, strict=False)),
        tensor_size=pl.when(~comm).then(pl.col("bytes").round().cast(pl.Int64, strict=False)),
        comm_type=pl.when(comm & ~is_message).then(number),
        comm_size=pl.when(comm).then(given.cast(pl.Int64)),
        comm_src=pl.when(is_send).then("rank").when(is_recv).then("other").cast(pl.Int64),
        comm_dst=pl.when(is_recv).then("rank").when(is_send).then("other").cast(pl.Int64),
        comm_tag=pl.when(is_message).then("tag"),
        rendezvous=pl.when(is_message).then("rendezvous"),
        tid=pl.when(pl.col("lane").str.starts_with("cpu")).then(on_lane),
        stream=pl.when(pl.col("lane").str.starts_with("gpu")).then(on_lane),
        micro_batch=pl.col("micro_batch").cast(pl.Int64),
        step=pl.col("step").cast(pl.Int64),
    )  # fmt: skip
