"""Closed forms of others beside which step times are shown, each from what `estimate` takes to seconds.

`calculon_like` is what Calculon (Isaev et al., SC 2023) computes: a layer's products and vector operations at an
efficiency that depends on their size alone, bandwidths at a fixed share, the bubble of 1F1B, no vocabulary and no host.
Its constants are round numbers, fitted to nothing. `six_pt` is 6 x parameters x tokens, and attention, at a constant
MFU; the harness fits that one number on the other sources.
"""

from __future__ import annotations

from typing import NamedTuple

from lumos_nb.layout import SIZE_OF, Cluster, Parallelism, Training
from lumos_nb.transformer import Transformer

NOMINAL_MFU = 0.4
EFFICIENCY = ((100e9, 0.9), (10e9, 0.8), (1e9, 0.6), (0.0, 0.4))
"""Share of the peak that a product of at least so many FLOPs reaches."""
BANDWIDTH, NETWORK = 0.85, 0.8
"""Share of the memory's and of a network's bandwidth."""
VECTOR_PASSES = 16
"""How often a layer's vector operations read or write the hidden state, forward."""


class Job(NamedTuple):
    """What is predicted: what `estimate` takes, and whose run it is."""

    model: Transformer
    layout: Parallelism
    train: Training
    cluster: Cluster
    origin: str = ""


def six_pt(job: Job) -> float:
    """Seconds of 6 x parameters x tokens and attention at `NOMINAL_MFU`."""
    model, _, train, cluster, _ = job
    active = model.size
    if moe := model.moe:
        layers = sum(model.has_experts(layer) for layer in range(model.layers))
        active -= layers * (moe.experts - moe.topk) * (2 + model.gated) * moe.ffn * model.hidden
    flops = 6 * active + 6 * model.layers * model.heads * model.head * train.seq  # attention: its causal half
    peak = cluster.gpu_sheet.peak(train.dtype) * cluster.gpus
    return flops * train.global_batch * train.seq / peak / NOMINAL_MFU


def calculon_like(job: Job) -> float:
    """Seconds of a step by Calculon's kind of closed form."""
    model, layout, train, _, _ = job
    layers, count = model.layers / layout.pp, train.micro_batches(layout)
    forward, backward = _layer(job)
    tokens = train.micro_batch * train.seq / layout.cp
    reduced = _collective(job, "tp", 2 * tokens * model.hidden * SIZE_OF["bf16"]) if layout.tp > 1 else 0.0
    repeats = 2 if train.recompute == "full" else 1
    compute = layers * (repeats * forward + backward)
    shared = layers * 2 * (repeats + 1) * reduced
    message = _collective(job, "pp", tokens * model.hidden * SIZE_OF["bf16"] / 2) if layout.pp > 1 else 0.0
    weights = [w.size / (layout.ep if w.part == "experts" else 1) for w in model.weights(model.layers - 1)]
    of_rank = model.layers * sum(weights) / (layout.tp * layout.pp)
    one = compute + shared + 2 * layout.chunks * message
    spread = _collective(job, "dp", of_rank * SIZE_OF[train.grad_dtype] * 2) if layout.dp * layout.cp > 1 else 0.0
    if layout.zero == 3:  # two gathers and a reduction each micro-batch, beside compute
        one, spread = max(one, 2 * spread), 0.0
    hidden = layers * backward if train.overlap_grads else 0.0
    return (count + (layout.pp - 1) / layout.chunks) * one + max(0.0, spread - hidden)


def _layer(job: Job) -> tuple[float, float]:
    """Seconds of one layer's compute for a micro-batch on one rank, forward and backward."""
    model, layout, train, cluster, _ = job
    gpu, width = cluster.gpu_sheet, SIZE_OF["bf16"]
    tokens, peak = train.micro_batch * train.seq / layout.cp, gpu.peak(train.dtype)
    active = model.moe.topk if model.moe else 1
    ffn = model.moe.ffn if model.moe else model.ffn
    inner = model.heads * model.head

    def seconds(flops: float, moved: float) -> float:
        reached = next(share for least, share in EFFICIENCY if flops >= least)
        return max(flops / (peak * reached), moved / (gpu.memory_bytes_per_s * BANDWIDTH))

    def product(n: float, k: float) -> float:
        return seconds(2 * tokens * n * k, width * (tokens * (n + k) + n * k))

    products = sum(
        times * product(n, k)
        for times, n, k in (
            (1, (inner + 2 * model.keys * model.head) / layout.tp, model.hidden),
            (1, model.hidden, inner / layout.tp),
            (active, (1 + model.gated) * ffn / layout.tp, model.hidden),
            (active, model.hidden, ffn / layout.tp),
        )
    )
    scores = train.micro_batch * model.heads / layout.tp * train.seq**2 / layout.cp
    kept = 0 if train.flash else 8 * scores * width
    attention = seconds(4 * scores * model.head * (0.5 if train.flash else 1), kept)
    vector = VECTOR_PASSES * tokens * model.hidden * width / (layout.tp if layout.sequence_parallel else 1)
    moved = vector / (gpu.memory_bytes_per_s * BANDWIDTH)
    return products + attention + moved, 2 * products + 2.5 * attention + moved


def _collective(job: Job, group: str, size_bytes: float) -> float:
    """Seconds of a ring over a group of ranks, whose members on a node share its network; a message: `size_bytes`."""
    layout, cluster = job.layout, job.cluster
    ranks = layout.groups("dp_cp" if group == "dp" else group)
    nodes, members = cluster.span(ranks[:, :2] if group == "pp" else ranks)
    fabric = cluster.between_sheet if nodes > 1 else cluster.inside_sheet
    assert fabric is not None
    at_once = members if nodes > 1 else 1
    steps = 1 if group == "pp" else (ranks.shape[1] - 1) / ranks.shape[1]
    return size_bytes * steps / (fabric.bytes_per_s * NETWORK * at_once) + fabric.latency_us * 1e-6
