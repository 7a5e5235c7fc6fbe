"""The work table of one pipeline stage: its layers in order, its messages, and what a step adds to micro-batches.

What is distinct (a dense layer, one with experts, the two ends) is made once for a model, a layout and a training, and
a stage is an index into it: a model of any depth costs one gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.costs.work import with_work
from lumos_nb.errors import InputError
from lumos_nb.layout import Parallelism, Training
from lumos_nb.transformer import Transformer, Weight
from lumos_nb.workloads.llm.layers import PARTS, WORK, Block, Rank, Row

OPTIMIZER_OPS = {"adam": "adamw", "momentum": "sgd_momentum", "sgd": "sgd"}
FIRST_BUCKET_BYTES = 2**20
"""Where torch's DDP closes its first bucket, so that the first reduction starts early."""
MESSAGES = (("forward", "recv", -1), ("forward", "send", 1), ("backward", "recv", 1), ("backward", "send", -1))
"""Phase, direction and peer (stages further) of what stages tell each other."""


Page = tuple[str | bool, str | int, int]
"""Name of some rows: a block ("first", "last", or whether a layer has experts), which of them, and whose: `ALL` or a
stage."""
ALL = -1


class _Book(NamedTuple):
    """Distinct rows, and where those of a page lie."""

    rows: pl.DataFrame
    pages: dict[Page, NDArray[np.int64]]


class _Held(NamedTuple):
    """A rank's part of a weight, and its layer (at a stage's ends just outside the stage's own)."""

    place: int
    weight: Weight


@lru_cache(maxsize=32)
def _book(model: Transformer, layout: Parallelism, train: Training) -> _Book:
    rank = Rank(model, layout, train)
    kinds = {model.has_experts(layer): layer for layer in reversed(range(model.layers))}
    weights = {kind: _in_order(model.weights(layer)) for kind, layer in kinds.items()}
    last = layout.pp * layout.chunks - 1
    blocks: dict[tuple[str | bool, int], Block] = {("first", 0): rank.first(), ("last", last): rank.last()}
    blocks |= {(kind, ALL): rank.layer(weights[kind]) for kind in kinds}
    pages: dict[Page, list[Row]] = {
        (name, phase, stage): [{"phase": phase, "when": "each"} | row for row in rows]
        for (name, stage), block in blocks.items()
        for phase, rows in zip(("forward", "backward"), block, strict=True)
    }
    for kind in kinds:
        held = [_Held(0, rank.shard(weight)) for weight in weights[kind]]
        for phase in ("forward", "backward"):
            pages[kind, f"gather {phase}", ALL] = _gathered(rank, held, phase)
        pages[kind, "reduce", ALL] = _reduced(rank, held) if layout.zero == 3 else []
    for stage, layers in enumerate(_layers(model, layout)):
        for (name, what), rows in _added(rank, _held(rank, weights, stage, layers), stage, layers).items():
            pages[name, what, stage] = rows
    ends = np.cumsum([0, *(len(rows) for rows in pages.values())])
    places = {name: np.arange(*span) for name, span in zip(pages, pairwise(ends), strict=True)}
    return _Book(_frame([row for rows in pages.values() for row in rows]), places)


def _layers(model: Transformer, layout: Parallelism) -> list[range]:
    """The layers of each virtual stage."""
    return [range(*span) for span in pairwise(accumulate(layout.layers_of(model), initial=0))]


def _frame(rows: Sequence[Row]) -> pl.DataFrame:
    """Rows as a work table, with FLOPs and bytes of what computes."""
    by_weight = (pl.col("phase") == "backward") & (pl.col("pass") == "bwd_grad_w").fill_null(False)
    frame = pl.DataFrame(rows, schema=dict(WORK), strict=False).with_columns(
        phase=pl.when(by_weight).then(pl.lit("backward_weight")).otherwise("phase"),
        again=pl.col("again").fill_null(False),
        stream=pl.col("stream").fill_null("compute"),
    )
    frame = frame.with_row_index("row")
    compute = with_work(frame.filter(pl.col("kind") == "compute")).select("row", "flops", "bytes")
    return frame.join(compute, on="row", how="left", maintain_order="left").drop("row")


def _in_order(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """A layer's weights in the order of their use; each bias behind what it is added to."""
    order = {key: i for i, key in reversed([*enumerate((part, name) for part, name, _ in PARTS)])}
    return tuple(sorted(weights, key=lambda w: order[w.part, w.name.removesuffix(" bias")]))


def _held(rank: Rank, weights: Mapping[bool, tuple[Weight, ...]], stage: int, layers: range) -> list[_Held]:
    """Everything that a stage trains, in the order of use."""
    model, layout = rank.model, rank.layout
    last = stage == layout.pp * layout.chunks - 1
    copied = (Weight("head", "head", (model.vocab, model.hidden), "out"),) if model.tied and stage else ()
    every = (
        (layers.start - 1, model.first_weights() if stage == 0 else ()),
        *((layer, weights[model.has_experts(layer)]) for layer in layers),
        (layers.stop, (*model.last_weights(), *copied) if last else ()),
    )
    return [
        _Held(place, rank.shard(weight))
        for place, members in every
        for weight in members
        if weight.name != "router bias"  # steered by load, not trained
    ]


def _spread_over(held: Sequence[_Held]) -> tuple[tuple[str, str, list[_Held]], ...]:
    """Dense weights and those of experts: the groups that add up their gradients and that ZeRO spreads them over."""
    experts = [h.weight.part == "experts" for h in held]
    dense = [h for h, is_expert in zip(held, experts, strict=True) if not is_expert]
    return ("dp_cp", "shard", dense), ("edp", "edp", [h for h, e in zip(held, experts, strict=True) if e])


def _padded(weight: Weight, n: int) -> int:
    """Numbers of a weight whose first dimension is filled up to a multiple of n, as FSDP2 does."""
    first = weight.copies if weight.part == "experts" else weight.shape[0]
    return math.ceil(first / n) * n * (weight.size // first)


def _gathered(rank: Rank, held: Sequence[_Held], phase: str) -> list[Row]:
    """ZeRO 3: the weights of a layer or of the stage's ends, from those who hold them."""
    if rank.layout.zero < 3:
        return []
    made = {"phase": phase, "part": "weights", "when": "each"}
    return [
        made | row
        for _, group, members in _spread_over(held)
        for row in rank.comm(
            group, "all_gather", rank.width(sum(_padded(h.weight, rank.group_sizes[group]) for h in members))
        )
    ]


def _reduced(rank: Rank, held: Sequence[_Held]) -> list[Row]:
    """Gradients of some weights, added up over the replicas; with ZeRO each keeps a part of them."""
    layout, rows = rank.layout, []
    for whole, shard, members in _spread_over(held):
        n = rank.group_sizes[shard]
        numbers = sum(_padded(h.weight, n) if layout.zero == 3 else h.weight.size for h in members)
        if not layout.zero:
            rows += rank.comm(whole, "all_reduce", rank.width(numbers, rank.train.grad_dtype))
            continue
        size = rank.width(math.ceil(numbers / n) * n, rank.train.grad_dtype)
        rows += rank.comm(shard, "reduce_scatter", size)
        rows += rank.comm("replica", "all_reduce", size // n) if shard == "shard" else []
    made = {"phase": "backward", "part": "gradients", "when": "each" if layout.zero > 1 else "last"}
    return [made | row for row in rows]


def _buckets(rank: Rank, held: Sequence[_Held]) -> list[list[_Held]]:
    """Weights in the order in which their gradients are ready, in buckets that close once they are full."""
    most = rank.train.bucket_bytes or math.inf
    buckets: list[list[_Held]] = []
    for *_, members in _spread_over(held) if rank.layout.zero < 3 else ():
        size, limit = math.inf, min(FIRST_BUCKET_BYTES, most) if most < math.inf else most
        for one in reversed(members):
            if size >= limit:
                limit = most if size < math.inf else limit
                size = 0
                buckets.append([])
            buckets[-1].append(one)
            size += rank.width(one.weight.size, rank.train.grad_dtype)
    return buckets


def _step(rank: Rank, held: Sequence[_Held], buckets: Sequence[list[_Held]], stage: int) -> list[Row]:
    """What ends a step: sums that micro-batches leave open, the optimizer, the new weights to all (ZeRO 1 and 2)."""
    layout, train, model = rank.layout, rank.train, rank.model
    open_sums, rows = [], []
    if layout.sequence_parallel:  # what is whole on every tensor rank saw a part of the sequence
        whole = sum(h.weight.size for h in held if h.weight.split == "none" and h.weight.name != "positions")
        spread = rank.group_sizes["shard"] if layout.zero == 3 else 1
        open_sums += rank.comm("tp", "all_reduce", rank.width(whole / spread, train.grad_dtype))
    if model.tied and layout.pp > 1 and stage in (0, layout.pp * layout.chunks - 1):
        size = rank.width(model.vocab * model.hidden // layout.tp, train.grad_dtype)
        open_sums += [row | {"group_size": 2} for row in rank.comm("pp", "all_reduce", size)]
    for _, group, members in _spread_over(held):
        numbers = sum(h.weight.size for h in members) / (rank.group_sizes[group] if layout.zero else 1)
        if numbers:
            update = rank.moves(OPTIMIZER_OPS[train.optimizer], numbers / model.hidden, model.hidden, "fp32").forward
            cast = rank.moves("cast", numbers / model.hidden, model.hidden, "fp32").forward if train.master else []
            rows += [row | {"pass": "any"} for row in update] + [row | {"out_dtype": rank.dtype} for row in cast]
    if layout.zero in (1, 2):
        for *_, group, members in (spread for bucket in reversed(buckets) for spread in _spread_over(bucket)):
            n = rank.group_sizes[group]
            size = rank.width(math.ceil(sum(h.weight.size for h in members) / n) * n)
            rows += [{"part": "weights"} | row for row in rank.comm(group, "all_gather", size)]
    made: Row = {"phase": "backward", "part": "gradients", "when": "step"}
    return [made | row for row in open_sums] + [made | {"phase": "optimizer", "part": "optimizer"} | r for r in rows]


def work(model: Transformer, layout: Parallelism, train: Training, stage: int = 0) -> pl.DataFrame:
    """Everything that one rank of a pipeline stage does for a micro-batch, and what it adds once a step.

    Parameters
    ----------
    model, layout, train
        What is trained and how it is spread.
    stage
        The virtual stage, 0-based: of `layout.pp` x `layout.chunks`.

    Returns
    -------
    frame
        The columns of `WORK`, `flops` and `bytes`, in the order in which the host issues them. Rows whose `when` is
        "each" are every micro-batch's; those of "last" only the last one's of a step (gradients are added up then),
        those of "step" come once behind it. Compute rows are a kernel frame, sizes of collectives are nccl-tests'.

    Raises
    ------
    InputError
        There is no such stage.

    Examples
    --------
    >>> train = Training(micro_batch=1, global_batch=8, seq=8192)
    >>> table = work(Transformer.named("llama-3-8b"), Parallelism(tp=2), train)
    >>> table.filter(collective="all_reduce", phase="forward").height
    68
    """
    stages = _layers(model, layout)
    if not 0 <= stage < len(stages):
        raise InputError(f"stage is {stage}; this layout has {len(stages)} virtual stages, counted from 0.")
    rows, pages = _book(model, layout, train)
    layers = stages[stage]
    found = [
        (pages.get((*name, stage), pages.get((*name, ALL))), layer) for name, layer in _order(model, train, layers)
    ]
    turns = [(place, layer) for place, layer in found if place is not None]
    index = np.concatenate([place for place, _ in turns])
    layer = np.repeat([layer for _, layer in turns], [len(place) for place, _ in turns])
    inside = pl.Series((layer >= layers.start) & (layer < layers.stop))
    return rows[index].with_columns(layer=pl.when(inside).then(pl.Series(layer, dtype=pl.Int32)))


def _added(rank: Rank, held: Sequence[_Held], stage: int, layers: range) -> dict[tuple[str, str | int], list[Row]]:
    """Rows of one stage alone: messages, weights and gradients of its ends, reductions when due, the step's."""
    layout, last = rank.layout, rank.layout.pp * rank.layout.chunks - 1
    added: dict[tuple[str, str | int], list[Row]] = {}
    if layout.zero == 3:
        root = [h for h in held if h.place not in layers]
        added |= {("root", "gather"): _gathered(rank, root, "forward"), ("root", "reduce"): _reduced(rank, root)}
    for bucket in (buckets := _buckets(rank, held)):
        added.setdefault(("due", bucket[-1].place), []).extend(_reduced(rank, bucket))
    size, made = rank.width(rank.rows * rank.model.hidden), {"part": "message", "when": "each"}
    for phase, collective, peer in MESSAGES:
        if stage > 0 if peer < 0 else stage < last:
            rows = rank.comm("pp", collective, size, peer)
            added[phase, collective] = [made | {"phase": phase} | row for row in rows]
    return added | {("step", ""): _step(rank, held, buckets, stage)}


def _order(model: Transformer, train: Training, layers: range) -> Iterator[tuple[tuple[str | bool, str | int], int]]:
    """Pages in order, with their layers; those that a stage lacks are named all the same."""
    kind = {layer: model.has_experts(layer) for layer in layers}
    yield from (((name), layers.start - 1) for name in (("forward", "recv"), ("root", "gather"), ("first", "forward")))
    for layer in layers:
        yield from (((kind[layer], page), layer) for page in ("gather forward", "forward"))
    yield from ((name, layers.stop) for name in (("last", "forward"), ("forward", "send"), ("backward", "recv")))
    ahead, wanted = iter(reversed(layers)), 1 + train.prefetch
    if layers.start == 0 or layers.stop == model.layers:  # weights of the ends are there still, the next are fetched
        yield from (((kind[early], "gather backward"), early) for early in islice(ahead, train.prefetch))
        wanted = 1
    yield from ((name, layers.stop) for name in (("last", "backward"), ("due", layers.stop)))
    for layer in reversed(layers):
        yield from (((kind[early], "gather backward"), early) for early in islice(ahead, wanted))
        wanted = 1
        yield from (((kind[layer], page), layer) for page in ("backward", "reduce"))
        yield ("due", layer), layer
    ends = (("first", "backward"), ("due", layers.start - 1), ("root", "reduce"))
    yield from ((name, layers.start - 1) for name in (*ends, ("backward", "send"), ("step", "")))
