"""A row of a published training table -> model, layout, training and cluster, with every assumption that takes.

Columns are those of `COLUMNS`; what a cell leaves open is taken from the words of the row (`table_words`: how its
framework, its family of models and its GPU's usual platform are), and said. What cannot be read is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from lumos_nb.costs.calibration import Calibration
from lumos_nb.errors import InputError, LayoutError
from lumos_nb.layout import Cluster, Parallelism, Training, problems
from lumos_nb.transformer import Transformer
from lumos_nb.workloads import table_words as words
from lumos_nb.workloads.llm.estimates import Estimate, estimate
from lumos_nb.workloads.llm.memory import peak_bytes
from lumos_nb.workloads.llm.table_models import model_of
from lumos_nb.workloads.table_cells import Reader
from lumos_nb.workloads.table_clusters import cluster_of

COLUMNS = (
    "row_id", "source", "gpu", "num_gpus", "precision", "model", "params_b", "hidden", "heads", "layers", "vocab",
    "ffn", "kv_heads", "moe_experts", "moe_topk", "seq", "tp", "pp", "cp", "vp", "ep", "dp", "sharding", "micro_batch",
    "global_batch", "recompute", "task", "notes",
)  # fmt: skip
"""Columns that are read; any may be missing, and others do not matter."""

LORA_RANK = 16
"""Of adapters where a task has them: that of MLPerf's LoRA, and of most recipes. They are a hundredth of a step."""
ENOUGH = 1.25
"""Up to how many times a GPU's memory a step that recomputes nothing is taken to have been made to fit."""
IN_FP8 = 0.7
"""Share of the memory that a step in fp8 is taken to need, where inputs of products are kept in one byte: `memory` does
not count that. A round number; it decides only whether a row that states no recomputation recomputes."""


@dataclass(frozen=True)
class Setup:
    """What `estimate` takes, read from a row: in `assumptions` what the row did not say, in `stated` what it did."""

    model: Transformer
    layout: Parallelism
    train: Training
    cluster: Cluster
    assumptions: tuple[str, ...]
    stated: Mapping[str, str]


def read_row(row: object) -> Setup:
    """Read a row of a table of measured training runs.

    Parameters
    ----------
    row
        A mapping with (some of) the columns of `COLUMNS`, a row of pandas, or a polars frame of one row. Numbers may be
        text; None, NaN, "" and "not stated" are no value.

    Returns
    -------
    Setup

    Raises
    ------
    InputError
        A size that nothing implies is missing, a cell cannot be read, or the sizes do not go together; the message
        names column, value and what to do.

    Examples
    --------
    >>> row = {"gpu": "H100", "num_gpus": 8, "model": "Llama-3-8B", "seq": 8192, "micro_batch": 1, "global_batch": 128}
    >>> setup = read_row(row | {"sharding": "fsdp", "precision": "bf16", "recompute": "full"})
    >>> setup.layout.dp, setup.layout.zero, setup.model.hidden
    (8, 3, 4096)
    >>> "hidden is not stated: 4096, of llama-3-8b" in setup.assumptions
    True
    """
    reader = Reader(row)
    try:
        return _setup(reader)
    except (LayoutError, InputError) as error:
        label = reader.cells.get("row_id")
        raise InputError(f"row {label}: {error}" if label else str(error)) from error


def estimate_row(row: object, calibration: Calibration | None = None) -> Estimate:
    """Estimate the step of a row of a table of training runs, as `read_row` reads it and `estimate` predicts it.

    Parameters
    ----------
    row
        As `read_row` takes it.
    calibration
        As `estimate` takes it.

    Returns
    -------
    Estimate
        With the `assumptions` that reading the row took.

    Raises
    ------
    InputError, CalibrationError
        As `read_row` and `estimate`.

    Examples
    --------
    >>> row = {"gpu": "H100", "num_gpus": 8, "model": "Llama-3-8B", "seq": 8192, "micro_batch": 1, "global_batch": 128}
    >>> 10 < estimate_row(row | {"sharding": "fsdp", "precision": "bf16", "recompute": "full"}).step_s < 30
    True
    """
    setup = read_row(row)
    found = estimate(setup.model, setup.layout, setup.train, setup.cluster, calibration)
    return replace(found, assumptions=setup.assumptions)


def _setup(reader: Reader) -> Setup:
    tp, pp, cp, ep, chunks = (reader.count(name, 1) for name in ("tp", "pp", "cp", "ep", "vp"))
    style = _style(reader, tp)
    count = reader.count("num_gpus", tp * pp * cp * reader.count("dp", 1) if reader.has("dp") else None)
    if count % (tp * pp * cp):
        raise reader.refusal("num_gpus", f"tp x pp x cp is {tp * pp * cp}: give a multiple of it")
    dp = count // (tp * pp * cp)
    if reader.has("dp") and reader.count("dp") not in (dp, dp / ep):  # the latter: replicas of experts
        raise reader.refusal("dp", f"{count} GPUs over tp x pp x cp = {tp * pp * cp} leave {dp}: give that, or nothing")
    model = model_of(reader, style.fields.get("tied"), tp)
    cluster = cluster_of(reader, count)
    batches = _batches(reader, dp)
    schedule, chunks = _schedule(reader, pp, chunks, batches["global_batch"] // max(1, batches["micro_batch"] * dp))
    layout = Parallelism(
        tp=tp, pp=pp, cp=cp, ep=ep, etp=_expert_tp(reader, tp, ep, cp * dp), dp=dp, chunks=chunks, schedule=schedule,
        sequence_parallel=tp > 1 and style.sp,
        split=_split(reader, model, pp, pp * chunks, by_cost=style.name.startswith("nanotron")),
        **_sharding(reader, style, dp * cp, cluster.gpus_per_node // min(cluster.gpus_per_node, tp)),
    )  # fmt: skip
    dtype = style.named(reader, "precision", words.PRECISIONS, "bf16")
    fields: dict[str, Any] = {"grad_dtype": "fp16" if dtype == "fp16" else "fp32"}
    fields |= {name: value for name, value in style.fields.items() if name in Training.__struct_fields__}
    fields["bucket_bytes"] = max(fields.get("bucket_bytes", 0), style.fields.get("bucket_bytes_a_replica", 0) * dp * cp)
    train = Training(**batches, seq=reader.count("seq"), dtype=dtype, **fields)
    if re.search(r"\blora\b", reader.text("task")):
        reader.assume(f"adapters of rank {LORA_RANK} beside the products of attention are trained, nothing else")
        train = msgspec.structs.replace(train, lora=LORA_RANK)
    train = _recomputed(reader, model, layout, train, cluster)
    if found := problems(model, layout, train, cluster):
        raise InputError(" ".join(found))
    return Setup(model, layout, train, cluster, tuple(reader.assumptions), reader.stated)


@dataclass(frozen=True)
class _Style:
    """What a row's framework and notes settle beside its columns."""

    name: str
    fields: Mapping[str, Any]

    @property
    def sp(self) -> bool:
        return bool(self.fields["sequence_parallel"])

    def named(self, reader: Reader, column: str, table: tuple[tuple[str, str, str], ...], default: str) -> Any:
        """What a cell means by a table of patterns; `default` if there is none."""
        if not (text := reader.text(column)):
            reader.assume(f"{column} is not stated: {default}")
            return default
        for pattern, value, assumption in table:
            if re.search(pattern, text):
                if assumption:
                    reader.assume(f"{column} {text}: {assumption}")
                return value
        raise reader.refusal(column, f"give one of {', '.join(dict.fromkeys(value for _, value, _ in table))}")


def _style(reader: Reader, tp: int) -> _Style:
    said = " | ".join(reader.text(name) for name in ("gpu", "recompute", "source", "sharding", "model", "notes"))
    framework = next(f for f in words.FRAMEWORKS if re.search(f.pattern, said))
    told: dict[str, Any] = {}
    for pattern, fields in words.FACTS:
        if re.search(pattern, said):
            told |= fields
    if (capacity := reader.noted("capacity")) is not None:
        told["capacity"] = capacity
    aside = {*told, "zero", *(("sequence_parallel",) if tp == 1 else ())}  # zero: said with the sharding
    listed = ", ".join(f"{name} {value}" for name, value in framework.fields.items() if name not in aside)
    reader.assume(f"as {framework.name} does: {listed}")
    return _Style(framework.name, {**framework.fields, **told})


def _batches(reader: Reader, dp: int) -> dict[str, Any]:
    """Micro-batch and global batch; either follows from the other and the notes' accumulation of gradients."""
    steps = int(reader.noted("grad_accum") or 0)
    if reader.has("global_batch") and not reader.has("micro_batch") and steps:
        size = reader.count("global_batch")
        return {"micro_batch": max(1, size // (steps * dp)), "global_batch": size}
    micro = reader.count("micro_batch", 1)
    return {"micro_batch": micro, "global_batch": reader.count("global_batch", steps * micro * dp or None)}


def _schedule(reader: Reader, pp: int, chunks: int, micro_batches: int) -> tuple[Any, int]:
    """The pipeline's schedule, and chunks of layers a rank."""
    found = re.search(r"schedule\s*[=:]\s*(\S+?)[;,]?(\s|$)", reader.text("notes"))
    kind = "interleaved" if chunks > 1 else "1f1b"
    if found:
        kind = next((kind for pattern, kind in words.SCHEDULES if re.search(pattern, found[1])), "")
        if not kind:
            raise reader.refusal("notes", f"no schedule is called {found[1]!r}; give 1f1b, interleaved or zb-v")
    if pp == 1 or (kind == "interleaved" and (micro_batches % pp or chunks == 1)):
        if chunks > 1 and pp > 1:
            reader.assume(f"{micro_batches} micro-batches cannot be interleaved over {pp} stages: 1F1B (too slow)")
        return "1f1b", 1
    return kind, {"zb-v": 2, "interleaved": chunks}.get(kind, 1)


def _expert_tp(reader: Reader, tp: int, ep: int, replicas: int) -> int:
    """Ranks that cut an expert: as many as cut the rest, where there are so many."""
    if ep == 1 or tp == 1 or not tp * replicas % (ep * tp):
        return 0
    reader.assume(f"{tp * replicas} ranks hold {ep} parts of the experts: each expert is whole")
    return 1


def _split(reader: Reader, model: Transformer, pp: int, stages: int, *, by_cost: bool) -> tuple[int, ...]:
    """Layers of each virtual stage, where a framework does not cut them evenly, or cannot."""
    if pp > 1 and by_cost:
        layer = 4 * model.hidden**2 + 3 * model.hidden * model.ffn
        reader.assume("stages end with the layer that reaches their share of weights, as nanotron cuts them")
        return stages_by_cost(model.layers, pp, layer, model.hidden * model.vocab)
    if pp > model.layers or stages > model.layers + 2:  # the embedding and the head may have a stage of their own
        column = "pp" if pp > model.layers else "vp"
        raise reader.refusal(column, f"{model.layers} layers leave some of {stages} stages empty: give fewer")
    if not model.layers % stages:
        return ()
    whole, rest = divmod(model.layers + 2, stages)
    if not rest:
        reader.assume(f"{model.layers} layers over {stages} stages: the embedding and the head stand for one each")
        return (whole - 1, *[whole] * (stages - 2), whole - 1)
    reader.assume(f"{model.layers} layers over {stages} stages: the first ones have one more")
    whole, rest = divmod(model.layers, stages)
    return tuple(whole + (stage < rest) for stage in range(stages))


def stages_by_cost(layers: int, pp: int, layer_cost: float, head_cost: float) -> tuple[int, ...]:
    """Layers of each stage as nanotron cuts them: a stage ends with the block that reaches its share of the cost."""
    if pp == 1:
        return ()
    reached = np.cumsum([layer_cost] * layers)
    shares = (reached[-1] + head_cost) * np.arange(1, pp + 1) / pp
    counts, stage = [0] * pp, 0
    for cost in reached:
        counts[stage] += 1
        stage += int(cost > shares[stage])
    return tuple(counts)


def _sharding(reader: Reader, style: _Style, replicas: int, in_node: int) -> dict[str, Any]:
    """ZeRO stage, and ranks of a shard where that stays inside a node."""
    if text := reader.text("sharding"):
        found = next(((zero, inside) for pattern, zero, inside in words.SHARDINGS if re.search(pattern, text)), None)
        if not found:
            raise reader.refusal("sharding", "give ddp, zero1, zero2, zero3, fsdp or hsdp")
        zero, inside = found
    else:
        zero, inside = style.fields.get("zero", 0), False
        reader.assume(f"sharding is not stated: ZeRO {zero}")
    if inside and replicas > in_node and replicas % in_node == 0:
        reader.assume(f"hybrid sharding is inside a node, over {in_node}")
        return {"zero": zero, "shard": in_node}
    return {"zero": zero}


def _recomputed(reader: Reader, model: Transformer, layout: Parallelism, train: Training, cluster: Cluster) -> Training:
    """With the recomputation that is stated; else none, and full where memory would be far from enough.

    Where little is missing, a few layers are repeated in practice, which costs next to nothing.
    """
    if text := reader.text("recompute"):
        found = next((kind for pattern, kind in words.RECOMPUTES if re.search(pattern, text)), None)
        if not found:
            raise reader.refusal("recompute", "give none, selective or full")
        if found == "selective":
            reader.assume("recompute selective: the core of attention")
        return msgspec.structs.replace(train, recompute=found)
    if problems(model, layout, train):
        reader.assume("recompute is not stated: none")
        return train
    room = cluster.gpu_sheet.memory_bytes
    needed = peak_bytes(model, layout, train) * (IN_FP8 if train.dtype == "fp8" else 1)
    found = "none" if needed < ENOUGH * room else "full"
    reader.assume(f"recompute is not stated: {found}, as memory without any is {needed / 1e9:.3g} of {room / 1e9:g} GB")
    return msgspec.structs.replace(train, recompute=found)
