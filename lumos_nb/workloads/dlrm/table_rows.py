"""A row of a table of published DLRM steps -> a prediction, with every assumption that it takes.

The rows are of MLPerf's DLRM-DCNv2, which is one model on one set of tables; what a row leaves open is how HugeCTR, in
which all of them were trained, is known to do it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import polars as pl

from lumos_nb import datasets
from lumos_nb.costs.calibration import Calibration
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.lookups import LookupModel
from lumos_nb.errors import InputError, LayoutError
from lumos_nb.workloads.dlrm.estimates import DlrmEstimate, estimate_dlrm
from lumos_nb.workloads.dlrm.model import Dlrm, DlrmTraining
from lumos_nb.workloads.dlrm.node_sharding import shard_over_nodes
from lumos_nb.workloads.dlrm.sharding import shard
from lumos_nb.workloads.dlrm.sharding_costs import ShardingCosts
from lumos_nb.workloads.pricing import prices_of
from lumos_nb.workloads.table_cells import Reader
from lumos_nb.workloads.table_clusters import cluster_of

COLUMNS = ("gpu", "num_gpus", "gpus_per_node", "network", "model", "global_batch", "sharding_plan")
"""Columns that are read; others do not matter."""

DCN = Dlrm(
    dense=13, bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1), interaction="cross", cross_layers=3, cross_rank=512
)
"""MLPerf's DLRM-DCNv2."""
USUAL: dict[str, Any] = {"dtype": "fp16", "prefetch": True, "overlap": True, "comm_streams": 2, "kernels": "fused"}
USUAL |= {"launch_us": 0, "fused": True}
ASSUMED = (
    "bottom 512-256-128, three cross layers of rank 512, top 1024-1024-512-256-1: MLPerf's definition",
    "products and exchanges in fp16, tables in fp32 with Adagrad's state, the dense optimizer is as fast as SGD's",
    "indices are uniform, as MLPerf's multi-hot data are made",
    "CUDA graphs: the host is never late; indices of the next batch come meanwhile",
    "embeddings travel beside the bottom MLP, gradients of the MLPs beside what is left of the backward pass",
    "the plan is ours (ln.shard, for hierarchical ones shard_over_nodes, by the physical model of lookups), not theirs",
    "a lookup costs what the data sheet's bandwidth says: none was measured on this GPU",
)


def dlrm_tables() -> pl.DataFrame:
    """The 26 embedding tables of MLPerf's DLRM-DCNv2."""
    found = datasets.load("embedding-tables")
    assert isinstance(found, pl.DataFrame)
    return found.select(
        pl.col("table").cast(pl.String), "rows", "dim", pooling=pl.col("pooling_factor").cast(pl.Float64),
        dtype="weights_dtype",
    )  # fmt: skip


def estimate_dlrm_row(
    row: object, calibration: Calibration | None = None, *, lookups: LookupModel | None = None
) -> DlrmEstimate:
    """Predict the step of a row of a table of DLRM-DCNv2 steps.

    Parameters
    ----------
    row
        A mapping with the columns of `COLUMNS`, a row of pandas, or a polars frame of one row.
    calibration, lookups
        As `estimate_dlrm` takes them.

    Returns
    -------
    DlrmEstimate
        With `assumptions`: what the row does not say.

    Raises
    ------
    InputError
        The row is of another model, a cell is missing or cannot be read, or the batch does not divide.

    Examples
    --------
    >>> row = {"gpu": "H100-SXM5-80GB", "num_gpus": 8, "model": "DLRM-DCNv2", "global_batch": 55296}
    >>> 1e-3 < estimate_dlrm_row(row | {"gpus_per_node": 8, "network": ""}).step_s < 10e-3
    True
    """
    cells = Reader(row).cells
    network = re.findall(r"(\d+)x[^,;]*?([EHN]DR)\s*(\d+)", str(cells.get("network", "")))
    said = "{}x {} {}".format(*max(network, key=lambda found: int(found[0]))) if network else ""
    reader = Reader(cells | {"notes": f"{said}; nodes of {cells.get('gpus_per_node', '')}"})
    if "dcn" not in reader.text("model"):
        raise reader.refusal("model", "rows of DLRM-DCNv2 can be read: give one")
    try:
        cluster = cluster_of(reader, reader.count("num_gpus"))
        train = DlrmTraining(global_batch=reader.count("global_batch"), **USUAL)
        prices = prices_of(cluster, calibration)
        lookup = PhysicalLookup.of_sheet(cluster.gpu_sheet) if lookups is None else lookups
        train.local_batch(cluster.gpus)
        costs = ShardingCosts.of(lookup, cluster, train.global_batch, calibration=prices)
        within_nodes = str(cells.get("sharding_plan", "")).startswith("hier") and cluster.nodes > 1
        planned = shard_over_nodes if within_nodes else shard
        plan = planned(dlrm_tables(), cluster, costs, optimizer="adagrad")
        found = estimate_dlrm(DCN, plan, train, cluster, prices, lookups=lookup)
    except LayoutError as error:
        raise InputError(f"the row cannot be as it stands: {error}") from error
    return replace(found, assumptions=(*ASSUMED, *reader.assumptions))
