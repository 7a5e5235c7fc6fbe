"""Embedding tables to nodes, cut by rows over the devices of each: plans whose sums are made before they leave a node.

What crosses the network is then a node's sums, evenly from all of its devices, as in HugeCTR's hierarchical plans and
in TorchRec's table_row_wise and grid_shard.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import polars as pl

from lumos_nb.embedding_tables import complete_tables
from lumos_nb.errors import LayoutError, require_kinds
from lumos_nb.layout import Cluster
from lumos_nb.workloads.dlrm.plan import Plan, element_bytes, row_blocks, shard_bytes
from lumos_nb.workloads.dlrm.sharding import memory_of, shard
from lumos_nb.workloads.dlrm.sharding_costs import FabricExchange, ShardingCosts


def shard_over_nodes(
    tables: pl.DataFrame,
    cluster: Cluster,
    costs: ShardingCosts,
    *,
    memory_bytes: float | None = None,
    optimizer: str = "sgd",
    **search: Any,
) -> Plan:
    """Find a plan of tables, or of some of their columns, on nodes, each cut by rows inside of its node.

    A node is taken for one device with the memory, the speed and the network of all of its GPUs, and `shard` finds who
    has what.

    Parameters
    ----------
    tables, cluster, optimizer
        As `shard` takes them; the cluster has several nodes.
    costs
        Of `ShardingCosts.of`, for the cluster's GPUs, all of one speed.
    memory_bytes
        What each GPU may hold.
    search
        `beam`, `candidates`, `rounds`, `caps` and `seed` of `shard`.

    Returns
    -------
    plan
        Without times: `estimate_dlrm` gives those of a step.

    Raises
    ------
    LayoutError
        As `shard`; or the cluster is one node, or the costs are others.

    Examples
    --------
    >>> nodes = ln.Cluster(gpu="A100-SXM-80GB", nodes=2, inside="NVLink3 NVSwitch", between="InfiniBand HDR 200")
    >>> costs = ln.ShardingCosts.of(ln.PhysicalLookup.of_sheet(nodes.gpu_sheet), nodes, batch=4096)
    >>> shard_over_nodes(tables, nodes, costs, optimizer="adagrad").frame["table"].n_unique()
    2
    """
    require_kinds(cluster=(cluster, Cluster), costs=(costs, ShardingCosts))
    exchange, each = costs.exchange, cluster.gpus_per_node
    if cluster.nodes < 2 or not isinstance(exchange, FabricExchange) or len(set(costs.speed)) > 1:
        raise LayoutError(
            f"a cluster of {cluster.nodes} node(s), exchanges of {type(exchange).__name__}: give several nodes, equal "
            "speeds and costs of ShardingCosts.of, or take shard."
        )
    memory, frame = memory_of(cluster, costs, memory_bytes), complete_tables(tables)
    sizes = np.ones(frame.height, dtype=np.int64), frame["dim"].to_numpy(), element_bytes(frame)
    rest = each * (memory[0] - shard_bytes(*sizes, optimizer).sum())  # a block may have a row more than its share
    nodes = msgspec.structs.replace(cluster, gpus_per_node=1, inside=None)
    exchange = replace(exchange, cluster=nodes, batch=-(-costs.batch // each), _known={})
    of_nodes = replace(costs, exchange=exchange, speed=(costs.speed[0] * each,) * cluster.nodes)
    found = shard(
        frame, nodes, of_nodes, memory_bytes=max(rest, 1.0), optimizer=optimizer, splits=("column_wise",), **search
    )
    shards = [
        row | {"kind": "grid_shard", "device": row["device"] * each + at, "first_row": first, "rows": rows}
        for row in found.frame.iter_rows(named=True)
        for blocks in [row_blocks(row["rows"], each)]
        for at, (first, rows) in enumerate(zip(np.cumsum([0, *blocks]).tolist(), blocks, strict=False))
        if rows
    ]
    return Plan.of(frame, pl.DataFrame(shards).drop("bytes"), memory.tolist(), optimizer=optimizer)
