"""What embedding tables can be cut into, as arrays: a search adds up rows of these and prices sums.

A free piece is a table or some of its columns, which lies on any one device. A spread table lies on all devices: cut by
rows, or whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.workloads.dlrm.plan import element_bytes, row_blocks, shard_bytes
from lumos_nb.workloads.dlrm.sharding_costs import ShardingCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SPREAD = ("row_wise", "data_parallel")
SMALLEST = 4
"""Columns of a piece are a multiple of this: what a kernel reads at once."""


@dataclass(frozen=True)
class Pieces:
    """Every free piece of the tables, the whole tables first, and every table as it can be spread.

    Attributes
    ----------
    table, dim, size_bytes, parts, alone_us
        [pieces]: whose it is, its columns, its bytes, what adds up over a device ([pieces, k]), its time on its own.
    half
        [pieces]: the piece of half its columns, else -1.
    spread_parts, spread_bytes
        [tables, kinds of SPREAD, devices, k] and [tables, kinds, devices]: what a device has of a spread table.
    can_spread
        [tables, kinds]: whether every device would have something of it.
    gradient_bytes
        [tables]: what is added up if it is data-parallel.
    """

    table: Ints
    dim: Ints
    size_bytes: Floats
    parts: Floats
    alone_us: Floats
    half: Ints
    spread_parts: Floats
    spread_bytes: Floats
    can_spread: NDArray[np.bool_]
    gradient_bytes: Floats

    @classmethod
    def of(cls, tables: pl.DataFrame, costs: ShardingCosts, optimizer: str) -> Pieces:
        """Cut and price the tables of a complete frame.

        Raises
        ------
        LayoutError
            A piece has no finite price, or the optimizer is unknown.
        """
        devices, table = len(costs.speed), np.arange(tables.height)
        dim, element = tables["dim"].to_numpy(), element_bytes(tables)
        levels, half = [(table, dim)], []
        while len(table):
            even = dim % (2 * SMALLEST) == 0
            first = sum(len(one) for one, _ in levels)
            half.append(np.where(even, first + np.cumsum(even) - 1, -1))
            table, dim = table[even], dim[even] // 2
            levels.append((table, dim))
        table, dim = (np.concatenate(column) for column in zip(*levels, strict=True))
        cut = tables[table].with_columns(dim=pl.Series(dim))
        parts = costs.parts(cut)
        blocks = np.array([row_blocks(rows, devices) for rows in tables["rows"]])
        gradients = tables["rows"].to_numpy() * tables["dim"].to_numpy() * element
        whole = shard_bytes(tables["rows"].to_numpy(), tables["dim"].to_numpy(), element, optimizer)
        by_row = shard_bytes(blocks, tables["dim"].to_numpy()[:, None], element[:, None], optimizer)
        several = np.full(tables.height, devices > 1)
        return cls(
            table=table,
            dim=dim,
            size_bytes=shard_bytes(cut["rows"].to_numpy(), dim, element[table], optimizer),
            parts=parts,
            alone_us=costs.lookup_us(parts).sum(axis=1),
            half=np.concatenate(half),
            spread_parts=_spread_parts(tables, blocks, costs),
            spread_bytes=np.stack([by_row, np.repeat((whole + gradients)[:, None], devices, axis=1)], axis=1),
            can_spread=np.stack([several & (blocks > 0).all(axis=1), several], axis=1),
            gradient_bytes=gradients,
        )


def _spread_parts(tables: pl.DataFrame, blocks: Ints, costs: ShardingCosts) -> Floats:
    """[tables, kinds of SPREAD, devices, k]: a device has its rows' share of the lookups, or its share of the batch."""
    devices = blocks.shape[1]
    first, last = (_row_parts(tables, blocks[:, at], costs) for at in (0, -1))  # all but the last block are alike
    by_row = first[:, None].repeat(devices, axis=1)
    by_row[:, -1] = last
    copies = costs.parts(tables, 1 / devices)[:, None].repeat(devices, axis=1)
    return np.stack([by_row, copies], axis=1)


def _row_parts(tables: pl.DataFrame, block: Ints, costs: ShardingCosts) -> Floats:
    rows = pl.Series("rows", np.maximum(block, 1))
    return costs.parts(tables.with_columns(rows, pooling=pl.col("pooling") * rows / tables["rows"]))
