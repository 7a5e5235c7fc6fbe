"""Communication of a rewritten graph: what there is gets the size and group that it has then; what there was not comes.

Groups of a trace are told apart by where they communicate: in the layers of the forward pass (tensor parallelism),
between stages, or else (gradients). New ones stand where `stages.work` has them. Ranks that are added are not copied:
those that were measured stand for all, and a collective takes what the calibration says of the whole group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from lumos_nb import whatif
from lumos_nb.costs.calibration import Calibration
from lumos_nb.graph import Graph
from lumos_nb.layout import Cluster
from lumos_nb.workloads.llm.reading import Setup
from lumos_nb.workloads.llm.stages import work
from lumos_nb.workloads.llm.structure import Structure
from lumos_nb.workloads.pricing import with_prices


@dataclass(frozen=True, slots=True)
class Prices:
    """What collectives take on a cluster."""

    cluster: Cluster
    calibration: Calibration

    def ns(self, collective: pl.Series, size_bytes: pl.Series, group_size: pl.Series) -> np.ndarray:
        """Time of each, shape (n,); a group fills a node before it takes the next one."""
        per_node = self.cluster.gpus_per_node
        rows = pl.DataFrame({"collective": collective, "size_bytes": size_bytes, "gpus": group_size}).with_columns(
            pl.col("collective").replace({"recv": "send"}), pl.col("size_bytes").cast(pl.Int64),
            pl.col("gpus").cast(pl.Int64), kind=pl.lit("comm"),
            nodes=(pl.col("gpus") + per_node - 1) // per_node,
        )  # fmt: skip
        return with_prices(rows, self.cluster, self.calibration)["dur_us"].to_numpy() * 1e3


def gradients(setup: Setup, stage: int) -> pl.DataFrame:
    """What replicas exchange in a step on one pipeline stage: rows of `work`, once each."""
    return _work(setup, stage).filter((pl.col("kind") == "comm") & (pl.col("stream") == "dp"))


def _work(setup: Setup, stage: int) -> pl.DataFrame:
    """What one rank of a pipeline stage does, all of its chunks."""
    model, layout, train = setup
    stages = [chunk * layout.pp + stage for chunk in range(layout.chunks)]
    return pl.concat([work(model, layout, train, virtual) for virtual in stages])


def resized(
    comm: pl.DataFrame, measured: pl.DataFrame, structure: Structure, was: Setup, target: Setup
) -> pl.DataFrame:
    """Communication with `new_bytes`, `new_size`: activations by tokens and width, gradients by their weights.

    `measured` is all communication of the trace. Where layers were repeated, so were the buckets in them: all together
    then have the bytes of the new model.
    """
    tokens = [train.micro_batch * train.seq * model.hidden for model, _, train in (was, target)]
    pieces = []
    for (rank, of), rows in comm.group_by("rank", "of", maintain_order=True):
        by = np.full(rows.height, tokens[1] / tokens[0])
        if of == "dp":
            stage = structure.stage.get(int(str(rank)), 0)
            old, new = (gradients(s, min(stage, s[1].pp - 1))["size_bytes"].to_numpy() for s in (was, target))
            alike = len(old) == len(new) == rows.height
            had = measured.filter((pl.col("rank") == rank) & pl.col("group").is_in(rows["group"].implode()))
            all_of = new.sum() / max(old.sum(), 1) * had["comm_bytes"].sum() / rows["comm_bytes"].sum()
            by = new / old if alike else np.full(rows.height, all_of)
        before, after = (getattr(layout, str(of)) for layout in (was[1], target[1]))
        size = pl.col("group_size") if before == after or of == "pp" else pl.lit(after, pl.Int32)
        pieces.append(rows.with_columns(new_bytes=(pl.col("comm_bytes") * pl.Series(by)).round(), new_size=size))
    return pl.concat(pieces)


def without_groups(graph: Graph, comm: pl.DataFrame, gone: list[str]) -> Graph:
    """The graph without the communication of some kinds, and without all ranks but the first of their groups."""
    rows = comm.filter(pl.col("of").is_in(gone))
    if rows.is_empty():
        return graph
    kept = rows.group_by("group").agg(pl.col("rank").min())["rank"].unique()
    left = whatif.remove(graph, pl.col("op_id").is_in(rows["op_id"].implode()))
    ops = left.ops.filter(pl.col("rank").is_in(kept.implode()))
    known = ops["op_id"].implode()
    edges = left.edges.filter(pl.col("src").is_in(known) & pl.col("dst").is_in(known))
    return replace(left, ops=ops, edges=edges)


def cut_points(parts: pl.DataFrame) -> pl.DataFrame:
    """`op_id`, `phase` of the ops behind which tensor ranks add up: the attention's and the MLP's last products.

    Forward these are the last product before the MLP's first one and the layer's last; backward that of the MLP's
    first weight and the layer's last.
    """
    products = parts.filter(pl.col("op").is_in(["gemm", "gemm_bias"]) & (pl.col("layer") >= 0))
    into_mlp = pl.col("meaning").str.contains("(ffn|gate_up) hidden$")
    key = ["rank", "phase", "micro_batch", "layer"]
    ids = products.group_by(key, maintain_order=True).agg(
        last=pl.col("op_id").last(),
        inner=pl.when(pl.col("phase").first() == "forward")
        .then(pl.col("op_id").filter(into_mlp.cum_sum() == 0).last())
        .otherwise(pl.col("op_id").filter(into_mlp).last()),
    )
    long = pl.concat([ids.select("phase", op_id=side) for side in ("inner", "last")])
    return long.filter(pl.col("phase").is_in(["forward", "backward"])).drop_nulls().unique("op_id", maintain_order=True)


def with_sums(graph: Graph, structure: Structure, points: pl.DataFrame, target: Setup, prices: Prices) -> Graph:
    """The graph with what tensor ranks exchange, for which all that follows waits.

    What `work` has of layers is spread evenly over their `points`; what it has of the model's ends comes when these are
    through.
    """
    due = pl.concat([points.select("op_id", "phase", inside=pl.lit(value=True)), _ends(structure)])
    ranks = structure.ops.select("op_id", "rank", stage=pl.col("rank").replace_strict(structure.stage))
    costs = pl.concat([_sums(target, stage, prices) for stage in sorted(set(structure.stage.values()))])
    due = due.join(ranks, on="op_id").join(costs.cast({"stage": ranks["stage"].dtype}), on=["phase", "inside", "stage"])
    passes = structure.ops["micro_batch"].max()
    share = (1 + max(passes, 0) if isinstance(passes, int) else 1) / pl.len().over("rank", "phase", "inside")
    due = due.with_columns(pl.col("ns", "size") * share)
    if due.is_empty():
        return graph
    due = due.group_by("op_id").agg(pl.col("ns", "size").sum().round().cast(pl.Int64))
    dur_ns = pl.col("op_id").replace_strict(dict(due.select("op_id", "ns").iter_rows()), default=0)
    where = pl.col("op_id").is_in(due["op_id"].implode())
    made = whatif.insert(graph, where, "sum of tensor ranks", dur_ns, kind="comm")
    sizes = dict(due.select("op_id", "size").iter_rows())
    behind = pl.col("op_id").shift(1).replace_strict(sizes, default=None, return_dtype=pl.Int64)
    return _said(made, graph, collective="all_reduce", group="tp", group_size=target[1].tp, comm_bytes=behind)


def _sums(target: Setup, stage: int, prices: Prices) -> pl.DataFrame:
    """`phase`, `inside` (the layers), `stage`, `ns`, `size`: what tensor ranks exchange for one micro-batch."""
    rows = _work(target, stage).filter((pl.col("stream") == "tp") & (pl.col("when") == "each"))
    ns = prices.ns(rows["collective"], rows["size_bytes"], rows["group_size"])
    by = rows.select("phase", inside=pl.col("layer").is_not_null(), ns=pl.Series(ns), size="size_bytes")
    return by.group_by("phase", "inside").sum().with_columns(stage=pl.lit(stage))


def _ends(structure: Structure) -> pl.DataFrame:
    """The ops with which the passes outside the layers end: `op_id`, `phase`, `inside` (false)."""
    passes = structure.ops.filter(pl.col("phase").is_in(["forward", "backward"]) & (pl.col("micro_batch") >= 0))
    outside = passes.filter(pl.col("layer") < 0).group_by("rank", "phase", "micro_batch", maintain_order=True)
    return outside.agg(pl.col("op_id").last()).select("op_id", "phase", inside=pl.lit(value=False))


def _said(made: Graph, before: Graph, **fields: str | int | pl.Expr) -> Graph:
    """The graph with these fields in what is new in it."""
    new = ~pl.col("op_id").is_in(before.ops["op_id"].implode())
    ops = made.ops.with_columns(
        pl.when(new)
        .then(value if isinstance(value, pl.Expr) else pl.lit(value))
        .otherwise(c)
        .cast(made.ops.schema[c])
        .alias(c)
        for c, value in fields.items()
    )
    return replace(made, ops=ops)


def with_gradients(graph: Graph, structure: Structure, target: Setup, prices: Prices) -> Graph:
    """The graph with the sums of replicas: each bucket when its gradients are there, and the optimizer behind them."""
    for rank, stage in structure.stage.items():
        rows = gradients(target, stage)
        rows = rows.filter(pl.col("phase") != "forward")
        trained = structure.ops.filter(pl.col("rank") == rank, pl.col("phase") == "backward")
        if rows.is_empty() or trained.is_empty():  # a trace of inference has no gradients
            continue
        took = prices.ns(rows["collective"], rows["size_bytes"], rows["group_size"])
        at = [_ready(structure, rank, layer) for layer in rows["layer"].to_list()]
        due = pl.DataFrame({"op_id": at, "ns": took, "size": rows["size_bytes"]}).group_by("op_id").sum()
        lane = "gpu0:gradients" if graph.ops["device"].is_not_null().any() else "cpu:gradients"
        whole = due.select("op_id", pl.col("ns").round().cast(pl.Int64))
        dur_ns = pl.col("op_id").replace_strict(dict(whole.iter_rows()), default=0)
        made = whatif.insert(
            graph, pl.col("op_id").is_in(due["op_id"].implode()), "sum of gradients", dur_ns, kind="comm", lane=lane
        )
        said = _said(made, graph, collective="all_reduce", group="dp", group_size=target[1].dp)
        last = said.ops.filter((pl.col("rank") == rank) & (pl.col("lane") == lane))["op_id"][-1]
        graph = _awaited(said, structure, rank, int(last))
    return graph


def _ready(structure: Structure, rank: int, layer: int | None) -> int:
    """The op with which the last backward pass has made a layer's gradients; those of an end of the model, the last."""
    rows = structure.ops.filter((pl.col("rank") == rank) & (pl.col("phase") == "backward"))
    rows = rows.filter(pl.col("micro_batch") == pl.col("micro_batch").max())
    own = rows.filter(pl.col("layer") == layer) if layer is not None else rows
    return int((own if own.height else rows)["op_id"][-1])


def _awaited(graph: Graph, structure: Structure, rank: int, last: int) -> Graph:
    """The graph in which a rank's optimizer waits for an op."""
    rows = structure.ops.filter((pl.col("rank") == rank) & (pl.col("phase") == "optimizer"))
    done = structure.ops.filter((pl.col("rank") == rank) & (pl.col("phase") == "backward"))["run"].max()
    rows = rows.filter(pl.col("run") > (done if isinstance(done, int) else -1))
    if rows.is_empty():
        return graph
    plain = {"lag_ns": 0, "from_start": False, "rule": "sync", "evidence": "exact", "hard": True}
    edge = pl.DataFrame([{"src": last, "dst": int(rows["op_id"][0]), **plain}], schema=graph.edges.schema)
    return replace(graph, edges=pl.concat([graph.edges, edge]))
