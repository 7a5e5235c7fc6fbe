"""Memory of each pipeline rank by class, at the moment of a step when most is in use; of one layout or of thousands."""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from lumos_nb.errors import LayoutError
from lumos_nb.layout import Parallelism, Training, Transformer, check
from lumos_nb.workloads.llm.passing_memory import PassingRank
from lumos_nb.workloads.llm.rank_memory import CLASSES, Floats, Ints, Ranks, total

__all__ = ["CLASSES", "memory", "memory_over_time", "peak_bytes", "peaks"]


def memory(model: Transformer, layout: Parallelism, train: Training, *, fragmentation: float = 0.0) -> pl.DataFrame:
    """Bytes of each pipeline rank by class, when it uses most; ranks of one stage are alike.

    Parameters
    ----------
    model, layout, train
        What is trained, and how. The optimizer is taken to be fused, without temporaries of its own.
    fragmentation
        What the allocator holds beyond what is in use, as a share of it. No default but 0 would be a measurement.

    Returns
    -------
    DataFrame
        `stage` (pipeline rank), `class` (one of `CLASSES`), `bytes`, `moment`: "loss" (logits are there), "head" (its
        backward), "backward" (of a rank's last layer, everything in flight), "next layer", "gradients" (of the first
        layer, all others made) or "last gradients" (of the embedding).

    Raises
    ------
    LayoutError
        The three do not go together, or `fragmentation` is negative.

    Examples
    --------
    >>> train = Training(micro_batch=1, global_batch=64, seq=4096)
    >>> frame = memory(Transformer.named("llama-3-8b"), Parallelism(dp=8, zero=1), train)
    >>> dict(frame.filter(pl.col("class").is_in(["weights", "optimizer"])).select("class", "bytes").rows())
    {'weights': 16060522496, 'optimizer': 12045391872}
    """
    check(model, layout, train)
    if not 0 <= fragmentation < math.inf:
        raise LayoutError(f"fragmentation is {fragmentation}; give a share of at least 0.")
    moment, used = Ranks.of(model, layout, train, range(layout.pp)).peak()
    used["fragmentation"] = fragmentation * total(used)
    by_class = np.stack([used[name] for name in CLASSES], axis=1)
    return pl.DataFrame(
        {
            "stage": np.repeat(np.arange(layout.pp), len(CLASSES)),
            "class": CLASSES * layout.pp,
            "bytes": np.rint(by_class).ravel(),
            "moment": np.repeat(moment, len(CLASSES)),
        },
        schema={"stage": pl.Int32, "class": pl.String, "bytes": pl.Int64, "moment": pl.String},
        strict=False,
    )


def memory_over_time(model: Transformer, layout: Parallelism, train: Training, ops: pl.DataFrame) -> pl.DataFrame:
    """Bytes of each pipeline rank by class, at every instant at which a pass of a replayed step changes them.

    What `memory` counts at its moments comes and goes with the passes: a layer's activations are there from the end of
    its forward pass to that of its backward pass, its workspace and gradients of a micro-batch during the latter.
    So do the weights that ZeRO gathers, and the gradients that it reduces.

    Parameters
    ----------
    model, layout, train
        As `memory`.
    ops : op table
        Of an estimate's result: `rank` (pipeline rank), `micro_batch`, `layer`, `phase` of its kernels.

    Returns
    -------
    DataFrame
        `stage`, `time_ns` (on the op table's clock), `class`, `bytes`: every class that is ever used at every instant.

    Raises
    ------
    LayoutError
        As `memory`, or the ops are not those of this layout.

    Examples
    --------
    >>> memory_over_time(found.model, found.layout, found.train, found.result.ops)
    """
    check(model, layout, train)
    pass_of = ("micro_batch", "layer", "phase")
    kernels = ops.filter(pl.col("kind") == "kernel", pl.col("micro_batch") >= 0, pl.col("phase") != "optimizer")
    kernels = kernels.filter(~pl.col("name").str.starts_with("embedding")).with_columns(pl.col("layer").cast(pl.Int32))
    spans = kernels.group_by("rank", *pass_of).agg(
        begin_ns=pl.min("start_ns"), end_ns=(pl.col("start_ns") + pl.col("dur_ns")).max()
    )
    if sorted(spans["rank"].unique()) != [*range(layout.pp)]:
        raise LayoutError(
            f"the ops are of ranks {sorted(spans['rank'].unique())}; pp is {layout.pp}: give an estimate's."
        )
    begin_ns, end_ns = ops.select(begin=pl.min("start_ns"), end=(pl.col("start_ns") + pl.col("dur_ns")).max()).row(0)
    changes = pl.DataFrame(
        [
            (stage, at_ns, name, size.item())
            for stage in range(layout.pp)
            for at_ns, used in PassingRank.of(model, layout, train, [stage]).changes(
                begin_ns, end_ns, spans.filter(rank=stage).select(*pass_of, "begin_ns", "end_ns").rows()
            )
            for name, size in used.items()
        ],
        schema={"stage": pl.Int32, "time_ns": pl.Int64, "class": pl.String, "bytes": pl.Float64},
        orient="row",
    )
    sums = changes.group_by("stage", "time_ns", "class").agg(pl.col("bytes").sum())
    every = sums.select("stage", "time_ns").unique().join(sums.select("class").unique(), how="cross")
    dense = every.join(sums, on=every.columns, how="left").sort("stage", "class", "time_ns")
    in_use = pl.col("bytes").fill_null(0.0).cum_sum().over("stage", "class")
    return dense.with_columns(in_use.round().cast(pl.Int64)).sort("stage", "time_ns", "class")


def peak_bytes(model: Transformer, layout: Parallelism, train: Training) -> float:
    """Most bytes that any rank uses, without fragmentation; checks nothing."""
    return float(total(Ranks.of(model, layout, train, range(layout.pp)).peak()[1]).max())


BLOCK = 4096
"""Layouts at a time, so that their arrays stay in the cache."""


def peaks(model: Transformer, train: Training, layouts: pl.DataFrame) -> tuple[Floats, Ints]:
    """Most bytes that a rank of each layout uses, without fragmentation, and the pipeline rank that does.

    Parameters
    ----------
    model, train
        What is trained; micro-batch and recomputation are the layouts'.
    layouts
        A frame with the columns `candidates.AXES`, of layouts that can be.

    Returns
    -------
    (n,) float, (n,) int
        Bytes and pipeline rank, of every row of `layouts`.
    """
    found = [_peaks(model, train, block) for block in layouts.iter_slices(BLOCK)]
    most, stage = (np.concatenate(parts) for parts in zip(*found, strict=True)) if found else (np.zeros(0),) * 2
    return most, stage.astype(np.int64)


def _peaks(model: Transformer, train: Training, layouts: pl.DataFrame) -> tuple[Floats, Ints]:
    pp = layouts["pp"].to_numpy()
    row = np.repeat(np.arange(len(pp)), pp)
    stage = np.arange(len(row)) - (np.cumsum(pp) - pp)[row]
    if len({model.has_experts(layer) for layer in range(model.layers)}) == 1:
        told = (stage < 2) | (stage >= pp[row] - 2)  # ranks between these have like layers, and as many in flight
        row, stage = row[told], stage[told]
    used = Ranks(model, train, layouts, row, stage).most()
    begins = np.searchsorted(row, np.arange(len(pp)))
    most = np.maximum.reduceat(used, begins)
    return most, np.minimum.reduceat(np.where(used == most[row], stage, np.iinfo(np.int64).max), begins)
