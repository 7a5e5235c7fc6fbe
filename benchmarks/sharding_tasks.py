"""Tasks of sharding as NeuroShard draws them, and what other planners make of them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from lumos_nb import datasets
from lumos_nb.embedding_tables import BINS, Floats, complete_tables, reuse_factor, zipf_indices
from lumos_nb.errors import LayoutError
from lumos_nb.workloads.dlrm.plan import Plan

MAX_DIMS = (4, 8, 16, 32, 64, 128)
SETTINGS = {4: ((10, 60), 15 * 2**30), 8: ((20, 120), 31 * 2**30)}
"""Devices -> from and below how many tables, and bytes of all. Those of 8 devices are said to be the paper's, not its
code's."""
MEMORY_BYTES = 4 * 2**30
BATCH = 512
"""Samples of a step: within what lookups were measured for."""
POOL, MEAN_POOLING = 200, 15.8
LARGEST_ROWS = 4_000_000


class Task(NamedTuple):
    """Tables that are to be placed on so many devices."""

    name: str
    devices: int
    max_dim: int
    tables: pl.DataFrame


@cache
def pool() -> pl.DataFrame:
    """Tables that tasks draw from, without their dims; `alpha` is of the Zipf distribution of a table's indices.

    The public lists of tables have neither rows nor lookups; so MLPerf's tables that fit are here, and others drawn to
    have the mean lookups of the list of 2021: log-normal, with Zipf's indices.
    """
    known = pl.read_parquet(datasets.path("embedding-tables")).filter(pl.col("rows") <= LARGEST_ROWS)
    rng = np.random.default_rng(2023)
    count, spread = POOL - known.height, 1.2
    drawn = {
        "rows": np.clip(rng.lognormal(np.log(2e5), 1.8, count), 100, LARGEST_ROWS).astype(np.int64),
        "pooling": rng.lognormal(np.log(MEAN_POOLING) - spread**2 / 2, spread, count).clip(0.1, 200),
        "alpha": rng.uniform(0.0, 1.4, count),
    }
    named = known.select("rows", pooling=pl.col("pooling_factor").cast(pl.Float64), alpha=pl.lit(0.0))
    every = pl.concat([named, pl.DataFrame(drawn)])
    bins = [
        reuse_factor(zipf_indices(rows, max(1, round(BATCH * pooling)), alpha, rng))
        for rows, pooling, alpha in every.rows()
    ]
    return every.hstack(pl.DataFrame(np.array(bins), schema=list(BINS)))


def drawn_tasks(devices: int, max_dim: int, count: int) -> list[Task]:
    """So many tasks, the same ones for the same numbers: tables of the pool at random, widths of powers of two."""
    (fewest, most), limit = SETTINGS[devices]
    rng, tasks = np.random.default_rng([devices, max_dim]), []
    dims = [dim for dim in MAX_DIMS if dim <= max_dim]
    while len(tasks) < count:
        chosen = pool()[rng.integers(POOL, size=rng.integers(fewest, most))]
        tables = chosen.with_columns(dim=pl.Series(rng.choice(dims, chosen.height)))
        if (tables["rows"] * tables["dim"]).sum() * 4 <= limit:
            name = f"{devices} devices, dims to {max_dim}, task {len(tasks)}"
            tasks.append(Task(name, devices, max_dim, complete_tables(tables)))
    return tasks


def torchrec_missing() -> str:
    """Why TorchRec's planner cannot be asked; nothing if it can."""
    return "" if importlib.util.find_spec("torchrec") else "torchrec is not installed"


def torchrec_plan(task: Task, memory_bytes: float) -> Plan:
    """The plan of TorchRec's planner, table-wise and column-wise, for GPUs with so much memory.

    Raises
    ------
    LayoutError
        TorchRec finds none, or a device would hold more than it may: TorchRec counts memory otherwise.
    """
    planner, config, modules, types = (
        importlib.import_module(f"torchrec.{name}")
        for name in (
            "distributed.planner",
            "modules.embedding_configs",
            "modules.embedding_modules",
            "distributed.types",
        )
    )
    sharders, kernels = (
        importlib.import_module(f"torchrec.distributed.{name}") for name in ("embeddingbag", "planner.types")
    )
    import torch

    rows = list(task.tables.iter_rows(named=True))
    tables = [
        config.EmbeddingBagConfig(
            name=row["table"], embedding_dim=row["dim"], num_embeddings=row["rows"], feature_names=[row["table"]]
        )
        for row in rows
    ]
    bags = modules.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    ways = [types.ShardingType.TABLE_WISE.value, types.ShardingType.COLUMN_WISE.value]
    constraints = {
        row["table"]: kernels.ParameterConstraints(
            sharding_types=ways, pooling_factors=[row["pooling"]], min_partition=max(4, row["dim"] // 8)
        )
        for row in rows
    }
    topology = planner.Topology(world_size=task.devices, compute_device="cuda", hbm_cap=int(memory_bytes))
    asked = planner.EmbeddingShardingPlanner(
        topology=topology, batch_size=BATCH // task.devices, constraints=constraints
    )
    try:
        made = asked.plan(bags, [sharders.EmbeddingBagCollectionSharder()])
    except kernels.PlannerError as error:
        raise LayoutError(f"TorchRec finds no plan: {error}") from error
    return Plan.of(task.tables, _shards(made), [MEMORY_BYTES] * task.devices)


def _shards(made: Any) -> pl.DataFrame:
    """The shards of a TorchRec plan of one module; adjacent columns of a table on one device are one."""
    found: list[Sequence[Any]] = []
    (parameters,) = made.plan.values()
    for table, sharding in parameters.items():
        parts: dict[int, int] = {}
        rows = 0
        for shard in sharding.sharding_spec.shards:
            rows, dim = shard.shard_sizes
            device = shard.placement.rank()
            parts[device] = parts.get(device, 0) + dim
        first = 0
        for device, dim in parts.items():
            found.append((table, device, "column_wise" if len(parts) > 1 else "table_wise", 0, rows, first, dim))
            first += dim
    return pl.DataFrame(
        found, schema=["table", "device", "kind", "first_row", "rows", "first_column", "dim"], orient="row"
    )


def fastest_of_all(task: Task, costs: Any) -> float:
    """The least total time of all placements of whole tables."""
    count, devices = task.tables.height, task.devices
    placed = np.indices((devices,) * count).reshape(count, -1).T
    on: Floats = placed[:, None, :] == np.arange(devices)[:, None]
    parts = costs.parts(task.tables)
    sums = (on @ parts).reshape(-1, parts.shape[1])
    took = np.where(on.any(axis=2)[..., None], costs.lookup_us(sums).reshape(*on.shape[:2], 2), 0.0)
    size = (task.tables["rows"] * task.tables["dim"] * 4).to_numpy()
    sent = (on @ task.tables["dim"].to_numpy()).astype(np.float64)
    total = costs.device_us(took, sent, np.zeros(len(placed))).sum(axis=2).max(axis=1)
    return float(total[(on @ size <= MEMORY_BYTES).all(axis=1)].min())
