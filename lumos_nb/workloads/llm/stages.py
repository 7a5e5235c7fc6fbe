"""The work table of one pipeline stage: its layers in order, its messages, and what a step adds to micro-batches.

What is distinct (a dense layer, one with experts, the two ends) is made once for a model, a layout and a training, and
a stage is an index into it: a model of any depth costs one gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.errors import InputError
from lumos_nb.layout import Parallelism, Training
from lumos_nb.transformer import Transformer, Weight
from lumos_nb.workloads.llm.layers import PARTS, Rank
from lumos_nb.workloads.work_rows import FIRST_BUCKET_BYTES, OPTIMIZER_OPS, Block, Row, as_table

MESSAGES = (("forward", "recv", -1), ("forward", "send", 1), ("backward", "recv", 1), ("backward", "send", -1))
"""Phase, direction and peer (stages further) of what stages tell each other."""


Page = tuple[str | bool, str, int]
"""Name of some rows: a block ("first", "last", or whether a layer has experts), which of them, and whose: `ALL` or a
stage."""
ALL = -1


class _Insert(NamedTuple):
    """A page that comes into another, behind so many of its rows; with the layer that it serves."""

    behind: int
    page: Page
    place: int


Inserts = dict[tuple[int, str, int], list[_Insert]]
"""What comes into the pages of a stage, a phase and a layer."""


class _Book(NamedTuple):
    """Distinct rows, where those of a page lie, and what comes in between."""

    rows: pl.DataFrame
    pages: dict[Page, NDArray[np.int64]]
    inserts: Inserts


class Held(NamedTuple):
    """A rank's part of a weight, and its layer (at a stage's ends just outside the stage's own)."""

    place: int
    weight: Weight


@lru_cache(maxsize=32)
def _book(model: Transformer, layout: Parallelism, train: Training) -> _Book:
    rank = Rank(model, layout, train)
    kinds = {model.has_experts(layer): layer for layer in reversed(range(model.layers))}
    weights = {kind: in_order(model.weights(layer)) for kind, layer in kinds.items()}
    last = layout.pp * layout.chunks - 1
    blocks: dict[tuple[str | bool, int], Block] = {("first", 0): rank.first(), ("last", last): rank.last()}
    blocks |= {(kind, ALL): rank.layer(weights[kind]) for kind in kinds}
    pages: dict[Page, list[Row]] = {
        (name, phase, stage): [{"when": "each"} | row for row in rows]
        for (name, stage), block in blocks.items()
        for phase, rows in zip(("forward", "backward"), block, strict=True)
    }
    for kind in kinds:
        trained = units_of(Held(0, rank.shard(weight)) for weight in rank.trained(weights[kind]))
        for unit, members in units_of(Held(0, rank.shard(weight)) for weight in weights[kind]).items():
            pages[kind, f"gather {unit}", ALL] = _gathered(rank, members)
            pages[kind, f"reduce {unit}", ALL] = _reduced(rank, trained.get(unit, []))
    inserts: Inserts = {}
    ready = _ready(pages)
    for stage, layers in enumerate(_layers(model, layout)):
        held = held_by(rank, weights, stage, layers)
        buckets = buckets_of(rank, held)
        whole = [h for h in held_by(rank, weights, stage, layers, frozen=True) if h.place not in layers]
        for (what, phase), rows in _added(rank, held, whole, buckets, stage, layers).items():
            pages[what, phase, stage] = rows
        for i, (place, weight) in enumerate(bucket[-1] for bucket in buckets):
            name = model.has_experts(place) if place in layers else "first" if place < layers.start else "last"
            key = name, weight.part, weight.name
            at = ready.get(key) or ready[*key[:2], weight.name.removesuffix(" bias")]
            inserts.setdefault((stage, "backward", place), []).append(_Insert(at, ("due", str(i), stage), place))
        if layout.zero == 3:
            _fetch(rank, pages, inserts, stage, layers)
    ends = np.cumsum([0, *(len(rows) for rows in pages.values())])
    places = {name: np.arange(*span) for name, span in zip(pages, pairwise(ends), strict=True)}
    return _Book(as_table([row for rows in pages.values() for row in rows]), places, inserts)


def _ready(pages: Mapping[Page, list[Row]]) -> dict[tuple[str | bool, str, str], int]:
    """How many rows of a backward page have run when the gradient of a weight is there."""
    return {
        (name, row["part"], row["weight"]): i + 1
        for (name, what, _), rows in pages.items()
        for i, row in enumerate(rows)
        if what == "backward" and row.get("weight") and not row.get("again")
    }


def _fetch(rank: Rank, pages: Mapping[Page, list[Row]], inserts: Inserts, stage: int, layers: range) -> None:
    """ZeRO 3, as FSDP2: a unit's weights are gathered when it begins, backward some units ahead, and reduced behind."""
    model, units = rank.model, []

    def insert(phase: str, place: int, behind: int, what: str, of: int) -> None:
        page = model.has_experts(of), what, ALL
        inserts.setdefault((stage, phase, place), []).append(_Insert(behind, page, of))

    for layer in reversed(layers):
        kind = model.has_experts(layer)
        for unit in ("dense", "experts")[: 1 + kind]:
            for phase in ("forward", "backward"):
                rows = pages[kind, phase, ALL]
                new = (i for i, row in enumerate(rows) if row["part"] == "experts" and not row.get("again"))
                own = [*new] if unit == "experts" else range(len(rows))
                if phase == "forward":
                    insert(phase, layer, own[0], f"gather {unit}", layer)
                else:
                    insert(phase, layer, own[-1] + 1, f"reduce {unit}", layer)
                    units.append((layer, own[0], unit))
    last = rank.layout.pp * rank.layout.chunks - 1
    ends = stage in (0, last)  # their weights are there still: the first unit is fetched before their backward
    begins = [*([(layers.stop, 0, "")] if stage == last else units[:1] if ends else ()), *units]
    ahead, wanted = iter(units), rank.train.prefetch + (not ends)
    for place, behind, _ in begins:
        for layer, _, unit in islice(ahead, wanted):
            insert("backward", place, behind, f"gather {unit}", layer)
        wanted = 1


def _layers(model: Transformer, layout: Parallelism) -> list[range]:
    """The layers of each virtual stage."""
    return [range(*span) for span in pairwise(accumulate(layout.layers_of(model), initial=0))]


def in_order(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """A layer's weights in the order of their use; each bias behind what it is added to."""
    order = {key: i for i, key in reversed([*enumerate((part, name) for part, name, _ in PARTS)])}
    return tuple(sorted(weights, key=lambda w: order[w.part, w.name.removesuffix(" bias")]))


def held_by(
    rank: Rank, weights: Mapping[bool, tuple[Weight, ...]], stage: int, layers: range, *, frozen: bool = False
) -> list[Held]:
    """Everything that a stage trains, or has with what is `frozen`, in the order of use."""
    model, layout = rank.model, rank.layout
    last = stage == layout.pp * layout.chunks - 1
    copied = (Weight("head", "head", (model.vocab, model.hidden), "out"),) if stage and _is_copied(rank) else ()

    def parts(members: Iterable[Weight]) -> list[Weight]:
        chosen = members if frozen else rank.trained(members)
        return [rank.shard(weight) for weight in chosen if weight.name != "router bias"]  # steered, not trained

    of_layer = {kind: parts(members) for kind, members in weights.items()}
    every = (
        (layers.start - 1, parts(model.first_weights() if stage == 0 else ())),
        *((layer, of_layer[model.has_experts(layer)]) for layer in layers),
        (layers.stop, parts((*model.last_weights(), *copied) if last else ())),
    )
    return [Held(place, weight) for place, members in every for weight in members]


def _is_copied(rank: Rank) -> bool:
    """Whether a tied head is a copy of the embedding: on another rank (`zb-v` has both on the first)."""
    return rank.model.tied and rank.layout.pp > 1 and rank.layout.schedule != "zb-v"


def units_of(held: Iterable[Held]) -> dict[str, list[Held]]:
    """Dense weights and those of experts, which other ranks have copies of."""
    units: dict[str, list[Held]] = {}
    for one in held:
        units.setdefault("experts" if one.weight.part == "experts" else "dense", []).append(one)
    return units


def _groups(held: Sequence[Held]) -> tuple[str, str]:
    """Groups that add up the gradients of a unit, and that ZeRO spreads it over."""
    return ("edp", "edp") if held and held[0].weight.part == "experts" else ("dp_cp", "shard")


def padded(weight: Weight, n: int) -> int:
    """Numbers of a weight whose first dimension is filled up to a multiple of n, as FSDP2 does."""
    first = weight.copies if weight.part == "experts" else weight.shape[0]
    return math.ceil(first / n) * n * (weight.size // first)


def _gathered(rank: Rank, held: Sequence[Held]) -> list[Row]:
    """ZeRO 3: the weights of a unit, from those who hold them."""
    _, group = _groups(held)
    numbers = sum(padded(h.weight, rank.group_sizes[group]) for h in held)
    return [{"part": "weights", "when": "each"} | row for row in rank.comm(group, "all_gather", rank.width(numbers))]


def _reduced(rank: Rank, held: Sequence[Held]) -> list[Row]:
    """Gradients of a unit, added up over the replicas; with ZeRO each keeps a part of them."""
    layout, (whole, shard) = rank.layout, _groups(held)
    n = rank.group_sizes[shard]
    numbers = sum(padded(h.weight, n) if layout.zero == 3 else h.weight.size for h in held)
    size = rank.width(math.ceil(numbers / n) * n if layout.zero else numbers, rank.train.grad_dtype)
    if layout.zero:
        rows = rank.comm(shard, "reduce_scatter", size)
        rows += rank.comm("replica", "all_reduce", size // n) if shard == "shard" else []
    else:
        rows = rank.comm(whole, "all_reduce", size)
    made = {"phase": "backward", "part": "gradients", "when": "each" if layout.zero > 1 else "last"}
    return [made | row for row in rows]


def buckets_of(rank: Rank, held: Sequence[Held]) -> list[list[Held]]:
    """Weights in the order in which their gradients are ready, in buckets that close once they are full."""
    most = rank.train.bucket_bytes or math.inf
    buckets: list[list[Held]] = []
    for members in units_of(held).values() if rank.layout.zero < 3 else ():
        size, limit = math.inf, min(FIRST_BUCKET_BYTES, most) if most < math.inf else most
        for one in reversed(members):
            if size >= limit:
                limit = most if size < math.inf else limit
                size = 0
                buckets.append([])
            buckets[-1].append(one)
            size += rank.width(one.weight.size, rank.train.grad_dtype)
    return buckets


def _step(rank: Rank, held: Sequence[Held], buckets: Sequence[Sequence[Held]], stage: int) -> list[Row]:
    """What ends a step: sums that micro-batches leave open, the optimizer, the new weights to all (ZeRO 1 and 2)."""
    layout, train, model = rank.layout, rank.train, rank.model
    open_sums, rows = [], []
    if layout.sequence_parallel:  # what is whole on every tensor rank saw a part of the sequence
        whole = sum(h.weight.size for h in held if h.weight.split == "none" and h.weight.name != "positions")
        spread = rank.group_sizes["shard"] if layout.zero == 3 else 1
        open_sums += rank.comm("tp", "all_reduce", rank.width(whole / spread, train.grad_dtype))
    if _is_copied(rank) and not train.lora and stage in (0, layout.pp * layout.chunks - 1):
        size = rank.width(model.vocab * model.hidden // layout.tp, train.grad_dtype)
        open_sums += [row | {"group_size": 2} for row in rank.comm("pp", "all_reduce", size)]
    for members in units_of(held).values():
        spread = rank.group_sizes[_groups(members)[1]] if layout.zero else 1
        width = sum(h.weight.size for h in members) / spread / model.hidden
        update = rank.moves(OPTIMIZER_OPS[train.optimizer], width, model.hidden, "fp32").forward
        cast = rank.moves("cast", width, model.hidden, "fp32").forward if train.master else []
        rows += [row | {"pass": "any"} for row in update] + [row | {"out_dtype": rank.train.kept_dtype} for row in cast]
    for bucket in reversed(buckets) if layout.zero else ():
        _, group = _groups(bucket)
        n = rank.group_sizes[group]
        size = rank.width(math.ceil(sum(h.weight.size for h in bucket) / n) * n)
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
    book, layers, turns = _book(model, layout, train), stages[stage], []
    for name, phase, place in _order(model, layers):
        page = book.pages.get((name, phase, stage), book.pages.get((name, phase, ALL)))
        if page is None:
            continue
        done = 0
        for behind, inner, of in sorted(book.inserts.get((stage, phase, place), ()), key=itemgetter(0)):
            turns += [(page[done:behind], phase, place), (book.pages[inner], phase, of)]
            done = behind
        turns.append((page[done:], phase, place))
    counts = [len(rows) for rows, *_ in turns]
    layer = np.repeat([place for *_, place in turns], counts)
    inside = pl.Series((layer >= layers.start) & (layer < layers.stop))
    phases = pl.Series(np.repeat([phase for _, phase, _ in turns], counts))
    return book.rows[np.concatenate([rows for rows, *_ in turns])].with_columns(
        phase=pl.when(pl.col("phase").is_null()).then(phases).otherwise("phase"),
        layer=pl.when(inside).then(pl.Series(layer, dtype=pl.Int32)),
    )


def _added(
    rank: Rank, held: Sequence[Held], ends: Sequence[Held], buckets: Sequence[Sequence[Held]], stage: int, layers: range
) -> dict[tuple[str, str], list[Row]]:
    """Rows of one stage alone: messages, weights and gradients of its `ends`, reductions when due, the step's."""
    layout, last = rank.layout, rank.layout.pp * rank.layout.chunks - 1
    root = [h for h in held if h.place not in layers]
    added = {("due", str(i)): _reduced(rank, bucket) for i, bucket in enumerate(buckets)}
    if layout.zero == 3 and ends:
        added |= {("root", "forward"): _gathered(rank, ends), ("root", "backward"): _reduced(rank, root)}
    size, made = rank.width(rank.rows * rank.model.hidden), {"part": "message", "when": "each"}
    for phase, collective, peer in MESSAGES:
        if layout.schedule == "zb-v" and stage + max(peer, 0) == layout.pp:
            continue  # the last rank's second chunk follows its first
        if stage > 0 if peer < 0 else stage < last:
            added[collective, phase] = [made | row for row in rank.comm("pp", collective, size, peer)]
    return added | {("step", ""): _step(rank, held, buckets, stage)}


def _order(model: Transformer, layers: range) -> Iterator[tuple[str | bool, str, int]]:
    """Pages in order (name and phase), with their layers; those that a stage lacks are named all the same."""
    before, behind = layers.start - 1, layers.stop
    yield from ((name, "forward", before) for name in ("recv", "root", "first"))
    yield from ((model.has_experts(layer), "forward", layer) for layer in layers)
    yield from (("last", "forward", behind), ("send", "forward", behind))
    yield from (("recv", "backward", behind), ("last", "backward", behind))
    yield from ((model.has_experts(layer), "backward", layer) for layer in reversed(layers))
    yield from ((name, "backward", before) for name in ("first", "root", "send"))
    yield "step", "", before
