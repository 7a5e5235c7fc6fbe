"""Memory of each pipeline rank by class, at the moment of a step when most is in use; of one layout or of thousands."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.errors import LayoutError, require_number, shown
from lumos_nb.layout import Parallelism, Training, Transformer, check
from lumos_nb.workloads.llm.passing_memory import BACKWARD, BETWEEN, FORWARD, HEAD, WEIGHTS, Passing, counted
from lumos_nb.workloads.llm.rank_memory import CLASSES, Floats, Ints, Known, Parts, alone, coded, summed, total
from lumos_nb.workloads.llm.schedule import order

__all__ = ["CLASSES", "memory", "memory_over_time", "peak_bytes", "peaks"]

MOST_BYTES = 2**62
"""Of a rank: what an int64 counts."""


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
        backward), "backward" (of a chunk's last layer, everything in flight), "next layer", "gradients" (of the first
        layer, all others made), "last gradients" (of the embedding), "weights" (of a pass for the gradients of weights
        alone) or "forward" (of uneven stages).

    Raises
    ------
    LayoutError
        The three do not go together, or a rank needs more bytes than an int64 counts.
    InputError
        `fragmentation` is no finite number of at least 0.

    Examples
    --------
    >>> train = Training(micro_batch=1, global_batch=64, seq=4096)
    >>> frame = memory(Transformer.named("llama-3-8b"), Parallelism(dp=8, zero=1), train)
    >>> dict(frame.filter(pl.col("class").is_in(["weights", "optimizer"])).select("class", "bytes").rows())
    {'weights': 16060522496, 'optimizer': 12045391872}
    """
    check(model, layout, train)
    require_number(0, fragmentation=fragmentation)
    moment, used = _fullest(model, layout, train)
    with np.errstate(over="ignore"):
        used["fragmentation"] = float(fragmentation) * total(used)
    _require_countable(total(used).max(), fragmentation)
    by_class = np.stack([used[name] for name in CLASSES], axis=1)
    return pl.DataFrame(
        {
            "stage": np.repeat(np.arange(layout.pp), len(CLASSES)),
            "class": CLASSES * layout.pp,
            "bytes": np.rint(by_class).ravel().astype(np.int64),
            "moment": np.repeat(moment, len(CLASSES)),
        },
        schema={"stage": pl.Int32, "class": pl.String, "bytes": pl.Int64, "moment": pl.String},
    )


def _require_countable(most: float, fragmentation: float = 0.0) -> None:
    """Raise LayoutError for a rank that needs more bytes than an int64 counts."""
    if not most < MOST_BYTES:
        raise LayoutError(
            f"a rank needs {most:.1e} bytes, with fragmentation={shown(fragmentation)}, of {MOST_BYTES:.1e} at most: "
            "give less of it, a shorter seq or a smaller micro_batch."
        )


def memory_over_time(model: Transformer, layout: Parallelism, train: Training, ops: pl.DataFrame) -> pl.DataFrame:
    """Bytes of each pipeline rank by class, at every instant at which a pass of a replayed step changes them.

    The moments of `memory`, at each layer of each pass: what is in flight beside follows from the passes that the step
    ran. A moment without an op of its own (the loss, the end of a pass) lasts a nanosecond.

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
        As `memory`, or the ops are not those of this layout and training.

    Examples
    --------
    >>> memory_over_time(found.model, found.layout, found.train, found.result.ops)
    """
    check(model, layout, train)
    if "chunk" not in ops.columns or set(ops["rank"].unique()) != {*range(layout.pp)}:
        raise LayoutError(
            f"the ops are of ranks {sorted(ops['rank'].unique())}; pp is {layout.pp}: give an estimate's."
        )
    (passes, spans), begin_ns = _passes(model, layout, train, ops), int(ops.select(pl.min("start_ns")).item())
    ranks = [
        _over_passes(model, layout, train, stage, passes.filter(rank=stage), spans.filter(rank=stage), begin_ns)
        for stage in range(layout.pp)
    ]
    last_ns = [ops.select((pl.col("start_ns") + pl.col("dur_ns")).max()).item(), *(own["time_ns"][-1] for own in ranks)]
    ends = [own.tail(1).with_columns(time_ns=pl.lit(max(last_ns), pl.Int64)) for own in ranks]
    dense = pl.concat([*ranks, *ends]).unique(["stage", "time_ns"], keep="last", maintain_order=True)
    _require_countable(dense.select(pl.sum_horizontal(CLASSES).max()).item())
    long = dense.unpivot(index=["stage", "time_ns"], variable_name="class", value_name="bytes")
    used = long.filter((pl.col("bytes") > 0).any().over("class")).with_columns(pl.col("bytes").round().cast(pl.Int64))
    return used.sort("stage", "time_ns", "class")


PASS = ("rank", "micro_batch", "chunk", "phase")


def _passes(
    model: Transformer, layout: Parallelism, train: Training, ops: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The passes of each rank, and when it is at a layer of one (or at `HEAD`; None: at the embedding).

    They are those of the schedule, counted by `row` (1, 3, 5..): one for which nothing runs, as of a frozen embedding
    without layers, frees what its forward pass kept when its turn comes, at the end of the pass before.
    """
    count = train.micro_batches(layout)
    rank, phase, micro_batch, chunk, depth = order(layout.schedule, layout.pp, count, layout.chunks)
    passes = pl.DataFrame(dict(zip(PASS, (rank, micro_batch, chunk, phase), strict=True)))
    passes = passes.with_columns(
        row=2 * pl.int_range(pl.len()).over("rank") + 1, layers=pl.Series(np.array(layout.layers_of(model))[depth])
    )
    kernels = ops.filter(pl.col("kind") == "kernel", pl.col("micro_batch") >= 0, pl.col("phase") != "optimizer")
    layer = pl.col("layer").cast(pl.Int64).fill_null(HEAD)
    apart = (phase == WEIGHTS).any()  # else gradients of weights are made in the backward pass
    numbers = {"forward": FORWARD, "backward": BACKWARD, "backward_weight": WEIGHTS if apart else BACKWARD}
    spans = kernels.group_by(
        pl.col(PASS[:3]).cast(pl.Int64),
        phase=pl.col("phase").replace_strict(numbers, default=None, return_dtype=pl.Int64),
        layer=pl.when(~pl.col("name").str.starts_with("embedding")).then(layer),
    ).agg(begin_ns=pl.min("start_ns"), end_ns=(pl.col("start_ns") + pl.col("dur_ns")).max())  # fmt: skip
    spans = spans.join(passes, on=PASS, how="left")
    ended = spans.group_by("rank", "row").agg(pl.max("end_ns"))
    passes = passes.join(ended, on=["rank", "row"], how="left", maintain_order="left")
    idle, ran = pl.col("end_ns").is_null(), passes.drop_nulls("end_ns")
    early = ran.filter((pl.col("end_ns").diff() < 0).over("rank"))
    if spans["row"].null_count() or early.height or passes.filter(idle, pl.col("layers") > 0).height:
        raise LayoutError(
            f"the ops are of other passes than {layout.schedule} has of {count} micro-batches: give an estimate's, "
            "with its layout and training."
        )
    return passes, spans


def _over_passes(
    model: Transformer, layout: Parallelism, train: Training, stage: int, passes: pl.DataFrame, spans: pl.DataFrame,
    begin_ns: int,
) -> pl.DataFrame:  # fmt: skip
    """Bytes of one rank, a column a class, at each moment of its passes and between them."""
    count, ended = 2 * passes.height + 1, passes["end_ns"].forward_fill().fill_null(begin_ns)
    phase, chunk, time_ns = np.full(count, BETWEEN), np.zeros(count, np.int64), np.full(count, begin_ns)
    phase[1::2], chunk[1::2] = passes["phase"], passes["chunk"]
    time_ns[2::2] = ended
    time_ns[1::2] = ended - passes["end_ns"].is_not_null().cast(pl.Int64)  # a moment before the pass has ended
    ranks = Passing.of(model, layout, train, counted(np.full(count, stage), phase, chunk, layout.chunks))
    lasting, parts = ranks.lasting(), []
    for name, layer, there, part in ranks.moments(whole=True):
        used, zero = summed([lasting, part]), np.zeros(count)
        frame = pl.DataFrame(
            {"row": np.arange(count), "layer": np.broadcast_to(layer, count), "time_ns": time_ns}
            | {of: used.get(of, zero) for of in CLASSES}
        )
        parts.append(frame.filter(there).with_columns(head=pl.lit(name == "head")))
    placed = pl.concat(parts).join(spans.select("row", "layer", "begin_ns"), on=["row", "layer"], how="left")
    at = pl.coalesce(pl.col("begin_ns") + pl.col("head").cast(pl.Int64), "time_ns")
    placed, nth = placed.with_columns(at.alias("at")).sort("row", "at", maintain_order=True), pl.int_range(pl.len())
    in_turn = (pl.col("at") - nth).cum_max() + nth  # each lasts a nanosecond at least, so that none is lost
    return placed.select(pl.lit(stage, pl.Int32).alias("stage"), in_turn.alias("time_ns"), *CLASSES)


def peak_bytes(model: Transformer, layout: Parallelism, train: Training) -> float:
    """Most bytes that any rank uses, without fragmentation; checks nothing."""
    return float(Passing.fullest(model, train, alone(layout, train), layout.split, each=False).most().max())


def _fullest(model: Transformer, layout: Parallelism, train: Training) -> tuple[NDArray[np.str_], Parts]:
    """The moment of each rank when most is in use, and bytes by class at it."""
    passes = Passing.fullest(model, train, alone(layout, train), layout.split, each=True)
    moment, used = passes.peak()
    by_size = np.lexsort((total(used), passes.stage))
    most = by_size[np.searchsorted(passes.stage[by_size], np.arange(layout.pp), side="right") - 1]
    return moment[most], {name: size[most] for name, size in used.items()}


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
    known: Known = {}
    by_passes = (
        coded(layouts).with_row_index("at").sort("schedule", "chunks", "pp")
    )  # so that those of a block have like ones
    found = [_peaks(model, train, block, known) for block in by_passes.iter_slices(BLOCK)]
    most, stage, at = np.zeros(layouts.height), np.zeros(layouts.height, np.int64), by_passes["at"].to_numpy()
    if found:
        most[at], stage[at] = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return most, stage


def _peaks(model: Transformer, train: Training, layouts: pl.DataFrame, known: Known) -> tuple[Floats, Ints]:
    passes = Passing.fullest(model, train, layouts, each=False, known=known)
    used = passes.most()
    most = np.maximum.reduceat(used, np.searchsorted(passes.row, np.arange(layouts.height)))
    stage = np.where(used == most[passes.row], passes.stage, np.iinfo(np.int64).max)
    return most, np.minimum.reduceat(stage, np.searchsorted(passes.row, np.arange(layouts.height)))
