"""What passes while ranks run: bytes by class at each moment of a pass, with all that is in flight beside it.

A step's passes are counted once (`counted`), from a schedule or from what a replay ran. For a peak, those passes are
enough beside which no other of its kind has more in flight (`fullest`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.layout import Parallelism, Training, Transformer
from lumos_nb.workloads.llm.rank_memory import CLASSES, Floats, Ints, Known, Parts, Ranks, alone, summed, times, total
from lumos_nb.workloads.llm.schedule import order

FORWARD, BACKWARD, WEIGHTS, BETWEEN = range(4)
"""Phases of a pass, the first three as `schedule.order` numbers them; and the time between two."""
HEAD, NONE = -1, -2
"""In the place of a layer: the head with the loss, and none."""


class Passes(NamedTuple):
    """Passes of pipeline ranks: stage, phase and chunk, (n,), and micro-batches that a chunk has beside: (chunks, n).

    `flying` keep activations, `waiting` have gone back but for the gradients of weights.
    """

    stage: Ints
    phase: Ints
    chunk: Ints
    flying: Ints
    waiting: Ints

    def take(self, which: NDArray[np.bool_] | Ints) -> Passes:
        """Some of them."""
        return Passes(*(field[..., which] for field in self))


class Moment(NamedTuple):
    """A moment of passes: its name, the layer at work, which passes have it, bytes by class."""

    name: str
    layer: Ints | int
    there: NDArray[np.bool_]
    parts: Parts


def counted(stage: Ints, phase: Ints, chunk: Ints, chunks: int) -> Passes:
    """Passes with what is in flight beside them: all of some ranks, rank by rank in their order."""
    own = chunk == np.arange(chunks)[:, None]
    first = np.searchsorted(stage, stage)

    def before(more: int, less: int) -> Ints:
        change = own * ((phase == more).astype(np.int64) - (phase == less))
        count = np.cumsum(change, axis=1) - change
        beside: Ints = count - count[:, first] - own * (phase == less)
        return beside

    apart = (phase == WEIGHTS).any()
    waiting = before(BACKWARD, WEIGHTS) if apart else np.zeros(own.shape, np.int64)
    return Passes(stage, phase, chunk, before(FORWARD, BACKWARD), waiting)


@lru_cache(maxsize=1024)
def fullest(
    kind: str, pp: int, count: int, chunks: int, experts: tuple[bool, ...], split: tuple[int, ...], each: bool
) -> Passes:
    """The passes of a schedule of which one has the peak: with `each` of every rank, else of all ranks together.

    `experts` says which layers of the model have any. Bytes are sums of what is in flight, each count times a size that
    passes of one group share. So no pass has the peak than which another of its group, or a mean of two, has as much or
    more of every count. Ranks whose chunks are like another's are of one group, and chunks of as many layers of each
    kind are counted together. Of even stages a forward pass has no more than the next backward pass of its rank: the
    passes before that are forward too, and free nothing.
    """
    stage, phase, _, chunk, depth = order(kind, pp, count, chunks)
    every = counted(stage, phase, chunk, chunks)
    if not split:
        told = phase != FORWARD
        every, depth = every.take(told), depth[told]
    ends = np.cumsum([0, *(split or (len(experts) // (pp * chunks),) * (pp * chunks))])
    orders = [experts[begin:end] for begin, end in pairwise(ends)]
    of_order, of_mix = _numbered(orders), _numbered([(len(some), sum(some)) for some in orders])
    at = np.arange(chunks)[:, None] * pp + np.arange(pp)
    if kind == "zb-v":
        at[1] = at[1, ::-1]  # the second chunk goes the ranks back
    mixes, is_first, is_last = of_mix[at], np.arange(pp) == 0, np.arange(pp) == (0 if kind == "zb-v" else pp - 1)
    alike = np.arange(pp) if each else _numbered(zip(*mixes.tolist(), is_first.tolist(), is_last.tolist(), strict=True))
    first, last, here = is_first[every.stage], is_last[every.stage], mixes[:, every.stage]
    groups = [
        alike[every.stage],
        every.phase,
        of_order[depth],
        first & (every.chunk == 0),
        last & (every.chunk == chunks - 1),
    ]
    sizes = [(some * (here == mix)).sum(axis=0) for some in every[3:] for mix in range(of_mix.max() + 1)]
    sizes += [first * every.flying[0], last * every.flying[-1], last * every.waiting[-1]]
    return every.take(_unsurpassed(groups, sizes))


def _numbered(things: Iterable[Hashable]) -> Ints:
    """The number of each thing, like ones having the same."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(thing, len(numbers)) for thing in things])


@lru_cache(maxsize=4096)
def _turning(experts: tuple[bool, ...], bend: int | None = None) -> tuple[int, ...]:
    """Layers of a chunk, backward, that beside its first and its last may be those of a peak.

    From a layer to the next one of its kind, bytes change by the layers between: evenly while these are as many, and so
    is what is gathered on each side of the `bend`, where there is one. The first and the last of each such run are
    enough; where something bends, the last layer alone is unlike the others.
    """
    count, found = len(experts), set[int]()
    spans = [range(count)] if bend is None else [range(min(bend + 1, count - 1)), range(bend, count - 1)]
    before = [0, *accumulate(experts)]
    for span in spans:
        for kind in (False, True):
            layers = [layer for layer in span if experts[layer] == kind]
            steps = [(b - a, before[b] - before[a]) for a, b in pairwise(layers)]
            found.update(
                layers[:1],
                layers[-1:],
                (at for at, (a, b) in zip(layers[1:-1], pairwise(steps), strict=True) if a != b),
            )
    return tuple(sorted(found - {0, count - 1}, reverse=True))


def _unsurpassed(groups: list[Ints], sizes: list[Ints]) -> Ints:
    """Rows of which one has the greatest sum of its group whatever sizes weigh: the first of several like ones."""
    keys = np.stack([*groups, *(-size for size in sizes)])
    rows = np.lexsort(keys[::-1])  # by group, and in it the greatest first
    keys = keys[:, rows]
    new = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    rows, keys = (some[..., np.r_[True, new]] for some in (rows, keys))
    begins = np.flatnonzero(np.r_[True, (keys[: len(groups), 1:] != keys[: len(groups), :-1]).any(axis=0)])
    of_group = np.split(-keys[len(groups) :], begins[1:], axis=1)
    kept = np.concatenate([begin + _outer(some) for begin, some in zip(begins, of_group, strict=True)])
    return np.sort(rows[kept])


def _outer(sizes: Ints) -> Ints:
    """Of distinct points, greatest first, those above whatever lies below others; of two sizes, below means of two."""
    left, kept = np.arange(sizes.shape[1]), []
    while len(left):  # the greatest of those that are left is below none of them
        kept.append(left[0])
        left = left[(sizes[:, left] > sizes[:, left[:1]]).any(axis=0)]
    telling = [size for size in sizes[:, kept] if (size != size[0]).any()]
    if len(telling) != 2:
        return np.array(kept)
    outer: list[tuple[int, int, int]] = []
    for x, y, at in zip(*(size.tolist() for size in telling), kept, strict=True):  # x falls, y rises
        outer.append((x, y, at))
        while len(outer) > 2 and _bent_in(*outer[-3:]):
            del outer[-2]
    return np.array([at for *_, at in outer])


def _bent_in(before: tuple[int, int, int], point: tuple[int, int, int], behind: tuple[int, int, int]) -> bool:
    """Whether a point lies on or below the line between two."""
    (x, y, _), (to_x, to_y, _) = before, behind
    return (point[0] - x) * (to_y - y) <= (point[1] - y) * (to_x - x)


class Passing(Ranks):
    """Ranks in the midst of a pass, one pass a row."""

    def __init__(
        self, model: Transformer, train: Training, layouts: pl.DataFrame, row: Ints, passes: Passes,
        split: tuple[int, ...] = (), known: Known | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, train, layouts, row, passes.stage, split, known)
        self.passes = passes
        self.begin, self.end = self.chunk(passes.chunk)
        top = passes.chunk == self.v - 1
        self.embeds, self.heads = self.first & (passes.chunk == 0), self.last & top
        made = np.zeros_like(self.ends) if train.lora else self.numbers["last"].dense + self.numbers["copy"].dense
        self.of_head: Floats = self.heads * made
        self.of_embedding: Floats = self.embeds * self.embedding * (not train.lora)

    @classmethod
    def of(cls, model: Transformer, layout: Parallelism, train: Training, passes: Passes) -> Passing:
        """Passes of ranks of one layout."""
        return cls(model, train, alone(layout, train), np.zeros(len(passes.stage), np.int64), passes, layout.split)

    @classmethod
    def fullest(
        cls, model: Transformer, train: Training, layouts: pl.DataFrame, split: tuple[int, ...] = (), *, each: bool,
        known: Known | None = None,
    ) -> Passing:  # fmt: skip
        """The passes of layouts of which one has the peak: with `each` of every rank, else of a layout."""
        experts = tuple(model.has_experts(layer) for layer in range(model.layers))
        count = train.global_batch // (pl.col("micro_batch") * pl.col("dp"))
        # Rounds of a pipeline repeat after the second; of gpipe all are in flight together.
        told = pl.when(pl.col("schedule") == "gpipe").then(count).otherwise(pl.min_horizontal(count, 3 * pl.col("pp")))
        keys = layouts.select("schedule", "pp", told.alias("count"), "chunks")
        distinct = keys.unique(maintain_order=True).with_row_index("cell")
        of = keys.join(distinct, on=keys.columns, how="left", maintain_order="left")["cell"].to_numpy()
        cells = [fullest(*cell, experts, split, each) for cell in distinct.drop("cell").iter_rows()]
        sizes = np.array([len(cell.stage) for cell in cells])
        row = np.repeat(np.arange(len(of)), sizes[of])
        begins = np.cumsum(sizes[of]) - sizes[of]
        at = (np.cumsum(sizes) - sizes)[of][row] + np.arange(len(row)) - begins[row]
        wide = max(len(cell.flying) for cell in cells)
        padded = (cell._replace(flying=_rows(cell.flying, wide), waiting=_rows(cell.waiting, wide)) for cell in cells)
        joined = Passes(*(np.concatenate(field, axis=-1) for field in zip(*padded, strict=True)))
        return cls(model, train, layouts, row, joined.take(at), split, known)

    def beside(self) -> Parts:
        """What other micro-batches have in flight."""
        flying, waiting, top = self.passes.flying, self.passes.waiting, (self.v - 1, np.arange(len(self.row)))
        layers = np.zeros((4, len(self.row)), np.int64)  # in flight, those with experts, and the same of what waits
        for chunk, (begin, end) in enumerate(self.chunks()):
            for count, more in zip(layers[::2], (flying[chunk], waiting[chunk]), strict=True):
                count += more * (end - begin)
            for count, more in zip(layers[1::2], (flying[chunk], waiting[chunk]), strict=True):
                count += more * self.routed(begin, end)
        parts = [times(self.embedded(), flying[0]), self.kept(*layers[:2]), times(self.kept_logits(), flying[top])]
        if self.apart.any():
            put_off = summed([self.put_off(*layers[2:]), times(self.head_put_off(), waiting[top])])
            parts.append(times(put_off, self.apart))
        return summed(parts)

    def moments(self, *, whole: bool = False) -> Iterator[Moment]:
        """All moments that may be the peak; with `whole` each pass layer by layer, and what is between them."""
        beside, phase = self.beside(), self.passes.phase
        layers = range(int((self.end - self.begin).max()))
        if whole or (phase == FORWARD).any():
            yield from self._forward(beside, layers)
        every = [self.end - 1 - number for number in layers[1:]] if whole else []
        yield from self._backward(beside, every if whole else self.turning(self.train.prefetch), ends=not whole)
        if self.apart.any():
            yield from self._weights(beside, every if whole else self.turning(), ends=not whole)
        if whole:
            yield Moment("between", NONE, phase == BETWEEN, summed([beside, self.gathered(0, 0.0, 0.0)]))

    def _forward(self, beside: Parts, layers: Iterable[int]) -> Iterator[Moment]:
        ids = times(self.embedded(), self.embeds)
        for number in layers:
            layer = np.minimum(self.begin + number, self.end)
            there = (self.passes.phase == FORWARD) & (layer < self.end)
            gathered = self.gathered(np.minimum(1 + self.train.prefetch, self.end - layer), 0.0, 0.0)
            yield Moment(
                "forward", layer, there, summed([beside, ids, self.kept(*self.span(self.begin, layer)), gathered])
            )

    def _backward(self, beside: Parts, layers: Iterable[Ints], *, ends: bool) -> Iterator[Moment]:
        begin, end, backward, here = self.begin, self.end, self.passes.phase == BACKWARD, ~self.apart
        ahead, copied = 1 + self.train.prefetch, self.largest[True]
        beside = summed([beside, times(self.embedded(), self.embeds)])
        every = summed([beside, self.kept(*self.span(begin, end))])
        loss = times(summed([self.kept_logits(), self.one_loss()]), self.heads)
        yield Moment(
            "loss",
            HEAD,
            backward & self.heads,
            summed([every, loss, self.gathered(np.minimum(1, end - begin), 0.0, 0.0)]),
        )
        made = here * self.of_head
        gathered = self.gathered(np.minimum(ahead, end - begin), made, 0.0)
        yield Moment("head", HEAD, backward & self.heads, summed([every, self.head(), self.unfused(made), gathered]))
        waiting = times(self.head_put_off(), self.apart * self.heads)

        def going(layer: Ints, name: str) -> Moment:
            there = backward & (layer >= begin) & (layer < end)
            layer = layer.clip(begin, (end - 1).clip(begin)).clip(0, self.model.layers - 1)  # there may be none
            behind = np.minimum(layer + 1, end)
            own = here * self.growing(layer)
            sums = made + own + here * self.made(behind, end)
            gathered = self.gathered(np.minimum(ahead, behind - begin), made + own, here * copied * (behind < end))
            gone = [waiting, times(self.put_off(*self.span(behind, end)), self.apart), self.unfused(sums), gathered]
            return Moment(
                name, layer, there, summed([beside, self.kept(*self.span(begin, behind)), self.rise(layer), *gone])
            )

        yield going(end - 1, "backward")
        for layer in layers:
            yield going(layer, "next layer")
        if ends:
            yield going(begin, "gradients")
        sums, several = made + self.of_embedding, here * copied * (begin < end)
        waits = [
            waiting,
            times(self.put_off(*self.span(begin, end)), self.apart),
            self.unfused(sums + here * self.made(begin, end)),
        ]
        reduced = self.trained_ends * (self.embeds & self.heads) + (self.embeds ^ self.heads) * sums
        made, gone = self.gathered(0, sums, several), self.gathered(0, sums, reduced, without=reduced)
        most = {name: np.maximum(size, gone[name]) for name, size in made.items()}
        yield Moment("last gradients", NONE, backward, summed([beside, *waits, most]))

    def _weights(self, beside: Parts, layers: Iterable[Ints], *, ends: bool) -> Iterator[Moment]:
        """Of passes for the gradients of weights alone: each layer's are there, what it waited with has gone."""
        begin, end, weights, head = self.begin, self.end, self.passes.phase == WEIGHTS, self.of_head
        parts = [beside, self.put_off(*self.span(begin, end)), self.unfused(head), self.gathered(0, head, 0.0)]
        yield Moment("weights", HEAD, weights & self.heads, summed(parts))

        def done(layer: Ints) -> Moment:
            there = weights & (layer >= begin) & (layer < end)
            layer = layer.clip(begin, (end - 1).clip(begin))
            behind = np.minimum(layer + 1, end)
            reduced = self.gathered(0, head + self.made(layer, behind), self.largest[True])
            parts = [
                beside,
                self.put_off(*self.span(begin, layer)),
                self.unfused(head + self.made(layer, end)),
                reduced,
            ]
            return Moment("weights", layer, there, summed(parts))

        yield done(end - 1)
        for layer in layers:
            yield done(layer)
        if ends:
            yield done(begin)
        parts = [beside, self.unfused(head + self.made(begin, end)), self.gathered(0, head, head, without=head)]
        yield Moment("weights", NONE, weights, summed(parts))

    def turning(self, bend: int | None = None) -> list[Ints]:
        """Layers of each pass beside the ends of its chunk that may be those of a peak (`_turning`)."""
        cells, of = np.unique(self.begin * (self.model.layers + 1) + self.end, return_inverse=True)
        spans = [divmod(cell, self.model.layers + 1) for cell in cells.tolist()]
        found = [[begin + at for at in _turning(self.experts[begin:end], bend)] for begin, end in spans]
        most = max(map(len, found))
        table = np.array(
            [[*some, *[begin] * (most - len(some))] for some, (begin, _) in zip(found, spans, strict=True)]
        )
        return [*table.T[:, of]]

    def span(self, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
        """How many layers some are, and how many of them have experts."""
        return end - begin, self.routed(begin, end)

    def made(self, begin: Ints, end: Ints) -> Floats:
        """Numbers of the gradients of some layers."""
        return self.layers_numbers(*self.span(begin, end))

    def growing(self, layer: Ints) -> Floats:
        """Numbers of the gradients of a layer's weights at the peak of its own backward pass, where they stay."""
        routed = self.routed(layer, layer + 1)
        stay = (self.zero >= 2) & (self.sharded > 1) | (self.zero < 2) & (not self.train.fused_grads)
        if not stay.any():
            return np.zeros(len(layer))
        return stay * self.by_kind(np.ones_like(layer), routed, self.grown)

    def most(self) -> Floats:
        """Most bytes in use in each pass."""
        passing = [np.where(moment.there, total(moment.parts), 0.0) for moment in self.moments()]
        most: Floats = total(self.lasting()) + np.maximum.reduce(passing)
        return most

    def peak(self) -> tuple[NDArray[np.str_], Parts]:
        """The moment of each pass when most is in use, and bytes by class at it."""
        moments = [*self.moments()]
        totals = [np.where(moment.there, total(moment.parts), -np.inf) for moment in moments]
        at, rows = np.argmax(totals, axis=0), np.arange(len(self.row))
        zero = np.zeros(len(self.row))
        passing = {name: np.stack([moment.parts.get(name, zero) for moment in moments])[at, rows] for name in CLASSES}
        return np.array([moment.name for moment in moments])[at], summed([passing, self.lasting()])


def _rows(counts: Ints, wide: int) -> Ints:
    """Counts of so many chunks, of which the last are none."""
    return np.pad(counts, ((0, wide - len(counts)), (0, 0)))
