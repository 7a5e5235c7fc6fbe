"""Edges of an edited graph: what waits for what once ops are gone, inserted or fused."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from lumos_nb._replay_plan import Plan
from lumos_nb.errors import ScenarioError
from lumos_nb.graph import Graph
from lumos_nb.lanes import ABSENT

OWN_RULES = ("launch", "issue", "queue", "sync", "event", "collective", "insert")
"""Rules by which an op waits for what concerns it alone: what comes after it does not wait for that once it is gone."""

ISSUED_RULES = ("launch", "issue", "queue", "collective")
"""Rules by which others wait for an op itself, not for whatever comes behind it on its lane."""


def _companions(graph: Graph) -> pl.DataFrame:
    """`src`, `dst`: rows that only exist for the one behind them: its delay, its arrival, its wait for absent ranks."""
    about = graph.ops.select("op_id", "kind", "name", "rank", "lane", "collective")
    ends = graph.edges.join(about, left_on="src", right_on="op_id").join(about, left_on="dst", right_on="op_id")
    same_lane = (pl.col("rank") == pl.col("rank_right")) & (pl.col("lane") == pl.col("lane_right"))
    enters = (pl.col("kind") == "event") & pl.col("collective").is_not_null() | (pl.col("name") == ABSENT)
    return ends.filter((pl.col("rule") == "delay") | (same_lane & enters)).select("src", "dst").unique()


def with_companions(graph: Graph, op_id: pl.Series) -> pl.Series:
    """Ops and all that only exists for them."""
    companions = _companions(graph)
    while True:
        more = companions.filter(
            pl.col("dst").is_in(op_id.implode()) & ~pl.col("src").is_in(op_id.implode())
        )["src"].unique()  # fmt: skip
        if more.is_empty():
            return op_id
        op_id = pl.concat([op_id, more])


def heads(graph: Graph, op_id: pl.Series) -> pl.Series:
    """The first companion of each op, or the op itself."""
    before = dict(_companions(graph).select("dst", "src").iter_rows())
    heads = []
    for op in op_id:
        while op in before:
            op = before[op]
        heads.append(op)
    return pl.Series(heads, dtype=pl.Int64)


def and_all_of(edges: pl.DataFrame, holder: str, member: str, gone: pl.Series) -> pl.Series:
    """`gone` and the holders all of whose members are gone."""
    held = edges.select(holder, is_gone=pl.col(member).is_in(gone.implode())).group_by(holder).agg(pl.all().all())
    return pl.concat([gone, held.filter("is_gone")[holder]]).unique()


def and_launches(graph: Graph, gone: pl.Series) -> pl.Series:
    """`gone`, the launches all of whose work is gone, and the waits in which these block until it is done."""
    launches = and_all_of(graph.edges.filter(pl.col("rule") == "launch"), "src", "dst", gone)
    call = ["rank", "step", "correlation"]
    ops = graph.ops.join(launches.to_frame("op_id"), on="op_id", how="semi")
    blocked = graph.ops.filter(pl.col("kind") == "wait").join(
        ops.filter(pl.col("kind") == "launch"), on=call, how="semi"
    )
    return pl.concat([launches, blocked["op_id"]]).unique()


def after(graph: Graph, new: pl.DataFrame) -> pl.DataFrame:
    """The edges with each new op between the op that it is beside and what came after that."""
    swap = new.select(src="beside", new="op_id")
    moves = ~pl.col("from_start") & ~pl.col("rule").is_in(ISSUED_RULES)
    edges = graph.edges.join(swap, on="src", how="left", maintain_order="left")
    edges = edges.with_columns(src=pl.when(moves).then(pl.coalesce("new", "src")).otherwise("src"))
    return _linked(edges.select(graph.edges.columns), new.select(src="beside", dst="op_id", rule=_order_of_lane()))


def before(graph: Graph, new: pl.DataFrame) -> pl.DataFrame:
    """The edges with each new op before the one that it is beside, and after all that this waits for."""
    rule = pl.when(pl.col("kind") == "unexplained").then(pl.lit("delay")).otherwise(_order_of_lane())
    links = new.select(src="op_id", dst="beside", rule=rule)
    into = graph.edges.join(new.select(dst="beside", new="op_id"), on="dst", maintain_order="left")
    # Only what was launched is `launch`ed: `repeat` counts the launch queue by that.
    into = into.with_columns(dst="new", rule=pl.col("rule").replace("launch", "before")).select(graph.edges.columns)
    return _linked(pl.concat([graph.edges, into]), links)


def _order_of_lane() -> pl.Expr:
    return pl.when(pl.col("device").is_null()).then(pl.lit("thread")).otherwise(pl.lit("stream"))


def on_lane(edges: pl.DataFrame, ops: pl.DataFrame, new: pl.DataFrame) -> pl.DataFrame:
    """The edges with each new op after the one that it is beside, and in row order on the lane where it is."""
    lane = ops.filter(pl.col("lane") == new["lane"][0])
    pairs = lane.select(src=pl.col("op_id").shift(1).over("rank"), dst="op_id", rule=_order_of_lane()).drop_nulls()
    is_new = pl.col("src").is_in(new["op_id"].implode()) | pl.col("dst").is_in(new["op_id"].implode())
    return _linked(
        edges, pl.concat([new.select(src="beside", dst="op_id", rule=pl.lit("insert")), pairs.filter(is_new)])
    )


def _linked(edges: pl.DataFrame, links: pl.DataFrame) -> pl.DataFrame:
    """The edges and others, `src`, `dst`, `rule`, without lag."""
    plain = {"lag_ns": pl.lit(0, pl.Int64), "from_start": pl.lit(value=False), "hard": pl.lit(value=True)}
    return pl.concat([edges, links.with_columns(evidence=pl.lit("exact"), **plain).select(edges.columns)])


def undelayed(edges: pl.DataFrame, gone: pl.Series) -> pl.DataFrame:
    """The edges into delays that are gone, now into the ops that these delayed."""
    is_gone = (pl.col("rule") == "delay") & pl.col("src").is_in(gone.implode())
    delayed = dict(edges.filter(is_gone).select("src", "dst").iter_rows())
    for src, dst in delayed.items():
        while dst in delayed:
            dst = delayed[dst]
        delayed[src] = dst
    return edges.filter(~is_gone).with_columns(pl.col("dst").replace(delayed))


def without(graph: Graph, gone: pl.Series) -> Graph:
    """The graph without ops; each op behind them comes after the ops before them, as it came after what is gone."""
    is_gone = {end: pl.col(end).is_in(gone.implode()) for end in ("src", "dst")}
    dropped = is_gone["dst"] & pl.col("rule").is_in(OWN_RULES) | is_gone["src"] & (pl.col("rule") == "collective")
    edges = graph.edges.filter(~dropped)
    ops = graph.ops[Plan.of(graph).row]
    before: dict[int, dict[int, bool]] = {op: {} for op in ops.filter(pl.col("op_id").is_in(gone.implode()))["op_id"]}
    into = edges.filter(is_gone["dst"]).group_by("dst").agg("src", "from_start").rows_by_key("dst", unique=True)
    for op, found in before.items():  # in topological order
        for src, from_start in zip(*into.get(op, ((), ())), strict=True):
            for u, at_start in before.get(src, {src: from_start}).items():
                found[u] = found.get(u, True) and at_start
    bridges = [(op, u, at_start) for op, found in before.items() for u, at_start in found.items()]
    schema = {"src": pl.Int64, "to": pl.Int64, "at_start": pl.Boolean}
    bridged = edges.filter(is_gone["src"] & ~is_gone["dst"]).join(
        pl.DataFrame(bridges, schema=schema, orient="row"), on="src", maintain_order="left"
    ).with_columns(src="to", from_start="at_start")  # fmt: skip
    kept = edges.filter(~is_gone["src"] & ~is_gone["dst"])
    return replace(
        graph,
        ops=graph.ops.filter(~pl.col("op_id").is_in(gone.implode())),
        edges=pl.concat([kept, bridged.select(kept.columns)]).unique(maintain_order=True),
    )


def runs(graph: Graph, chosen: pl.Series) -> pl.DataFrame:
    """The chosen ops that make runs of two or more, in row order, with `run`."""
    ops, edges = graph.ops.with_columns(chosen=chosen), graph.edges
    companions = _companions(graph).join(ops.filter("chosen").select(dst="op_id"), on="dst", how="semi")
    lane = ops.join(companions.select(op_id="src"), on="op_id", how="anti", maintain_order="left")
    lane = lane.with_columns(pl.col("op_id", "chosen", "step").shift(1).over("rank", "lane").name.prefix("before_"))
    # In-edges of the delay before an op are its own.
    entering = edges.join(companions.select(dst="src", op="dst"), on="dst", how="left")
    entering = entering.with_columns(op_id=pl.coalesce("op", "dst"))
    entering = entering.filter(~pl.col("rule").is_in(["launch", "before", "delay"])).select("op_id", before_op_id="src")
    entered = entering.join(lane.select("op_id", "before_op_id"), on=["op_id", "before_op_id"], how="anti")["op_id"]
    left_at_start = edges.filter("from_start")["src"]
    begins = (
        ~pl.col("before_chosen").fill_null(value=False)
        | pl.col("step").ne_missing(pl.col("before_step"))
        | pl.col("op_id").is_in(pl.concat([entered, left_at_start]).implode())
    )
    members = lane.sort("rank", "lane", maintain_order=True).filter("chosen").with_columns(run=begins.cum_sum())
    runs = members.filter(pl.len().over("run") > 1)
    if runs.is_empty():
        raise ScenarioError("no two of the chosen ops follow one another on a lane; choose more ops, or other ones.")
    return runs
