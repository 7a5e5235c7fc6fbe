"""What one rank does, as data: rows of a work table, and blocks of rows forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from lumos_nb.costs.work import with_work

Row = dict[str, Any]

WORK: Mapping[str, pl.DataType] = {
    "phase": pl.String(),  # forward, backward, backward_weight (may be put off), optimizer
    "layer": pl.Int32(),  # of the whole model; null outside the layers
    "part": pl.String(),
    "weight": pl.String(),  # of what has one, its name in Transformer.weights
    "kind": pl.String(),  # compute, comm
    "when": pl.String(),  # each micro-batch, the last one of a step, or the step's end
    "again": pl.Boolean(),  # repeated in the backward pass (recompute)
    "stream": pl.String(),
    **{name: pl.String() for name in ("op", "dtype", "pass", "out_dtype")},
    **{name: pl.Int64() for name in ("batch", "groups", "m", "n", "k", "rows", "cols", "seq_q", "seq_kv", "heads")},
    **{name: pl.Int64() for name in ("kv_heads", "head_dim", "head_dim_v")},
    "causal": pl.Boolean(),
    "accumulate": pl.Boolean(),
    "method": pl.String(),  # of attention: the implementation
    "collective": pl.String(),  # as dry_run's: all_reduce, all_gather, reduce_scatter, all_to_all, send, recv
    "group": pl.String(),  # one of layout.GROUPS
    "group_size": pl.Int32(),
    "size_bytes": pl.Int64(),  # the larger of what the rank gives and gets
    "peer": pl.Int32(),  # of send and recv: how many places further in the group
}
"""Columns of a work table; `flops` and `bytes` of the compute rows come behind them."""

OPTIMIZER_OPS = {"adam": "adamw", "momentum": "sgd_momentum", "sgd": "sgd"}
FIRST_BUCKET_BYTES = 2**20
"""Where torch's DDP closes its first bucket, so that the first reduction starts early."""


class Block(NamedTuple):
    """What a part does, forward and backward."""

    forward: list[Row]
    backward: list[Row]


def chain(blocks: Iterable[Block]) -> Block:
    """Blocks one after another; backward in reverse."""
    blocks = list(blocks)
    return Block([r for b in blocks for r in b.forward], [r for b in reversed(blocks) for r in b.backward])


def as_table(rows: Sequence[Row]) -> pl.DataFrame:
    """Rows as a work table, with FLOPs and bytes of what computes."""
    by_weight = (pl.col("pass") == "bwd_grad_w").fill_null(False)
    frame = pl.DataFrame(rows, schema=dict(WORK), strict=False).with_columns(
        phase=pl.when(by_weight).then(pl.lit("backward_weight")).otherwise("phase"),
        again=pl.col("again").fill_null(False),
        stream=pl.col("stream").fill_null("compute"),
    )
    frame = frame.with_row_index("row")
    compute = with_work(frame.filter(pl.col("kind") == "compute")).select("row", "flops", "bytes")
    return frame.join(compute, on="row", how="left", maintain_order="left").drop("row")
