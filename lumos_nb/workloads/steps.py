"""The ops of a predicted step and what waits for what: rows of a priced table, issued on ranks, as a graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS

Ints = NDArray[np.int64]
HOST_ROW = {"kind": "cpu", "part": "host", "op": "launch", "stream": "host", "basis": "data sheet", "family": "host"}
"""What a row of a host issuing an op is called in the table of a step."""


@dataclass(frozen=True, slots=True)
class Waits:
    """`dst` starts no earlier than `lag_us` after the end (or start) of `src`; ops by their numbers (e,)."""

    src: Ints
    dst: Ints
    rule: str
    lag_us: NDArray[np.float64] | float = 0.0
    from_start: bool = False


@dataclass(frozen=True)
class Step:
    """The ops of a step in issue order, rank by rank (n,), and what waits for what.

    Attributes
    ----------
    table
        The priced rows that `row` counts.
    row, rank, micro_batch, chunk
        Of each op: its row of `table`, and where it runs; what ends a step has micro-batch -1.
    waits
        All waits, by rule.
    lanes
        Names of what `lane` counts: a rank's streams, and its host.
    """

    table: pl.DataFrame
    row: Ints
    rank: Ints
    micro_batch: Ints
    chunk: Ints
    lane: Ints
    waits: tuple[Waits, ...]
    lanes: tuple[str, ...]

    def graph(self) -> Graph:
        """The step as a graph of ops and edges."""
        took = self.table["dur_us"].to_numpy()[self.row]
        taken = self.table.select(
            "phase", "flops", "bytes", "dtype", "collective", "group", "group_size", "peer",
            kind=pl.col("kind").replace({"compute": "kernel"}),
            name=pl.concat_str("part", "weight", pl.coalesce("op", "collective"), separator=" ", ignore_nulls=True),
            layer=pl.col("layer").cast(pl.String),
            comm_bytes="size_bytes",
        )[self.row]  # fmt: skip
        here = {"rank": self.rank, "micro_batch": self.micro_batch, "chunk": self.chunk}
        ops = taken.with_columns(
            *(pl.Series(name, values) for name, values in here.items()),
            lane=pl.Series(self.lanes, dtype=pl.String).gather(self.lane),
            op_id=pl.int_range(pl.len()),
            dur_ns=pl.Series(_ns(took)),
            start_ns=0,
            step=0,
        )
        ops = ops.with_columns(device=pl.when(pl.col("lane").str.starts_with("gpu")).then(0))
        ops = ops.with_columns(pl.lit(None).alias(name) for name in OPS.columns if name not in ops.columns)
        ops = ops.select(*(pl.col(name).cast(kind) for name, kind in OPS.columns.items()), "chunk")
        return Graph(OPS.check(ops), EDGES.check(self._edges()), step=0)

    def _edges(self) -> pl.DataFrame:
        parts = [
            pl.DataFrame({"src": one.src, "dst": one.dst}).with_columns(
                lag_ns=pl.Series(np.broadcast_to(_ns(np.asarray(one.lag_us, np.float64)), one.src.shape)),
                from_start=pl.lit(one.from_start),
                rule=pl.lit(one.rule),
            )
            for one in self.waits
        ]
        edges = pl.concat(parts).with_columns(evidence=pl.lit("exact"), hard=True)
        return edges.select(pl.col(name).cast(kind) for name, kind in EDGES.columns.items())


def _ns(time_us: NDArray[np.float64]) -> Ints:
    rounded: Ints = np.rint(time_us * 1e3).astype(np.int64)
    return rounded
