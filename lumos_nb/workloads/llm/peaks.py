"""Peak memory of thousands of layouts at once: `memory` with arrays for numbers, a row a layout and pipeline rank.

What a layer keeps, and how far its backward pass rises, is linear in the sequences of a micro-batch and depends on few
axes beside, so that it is counted once for each distinct cell of them. All else is sums and products of counts. A test
holds this to `memory`, where every term here has its reason and its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.layout import OPTIMIZER_STATES, SIZE_OF, Parallelism, Training, Transformer
from lumos_nb.transformer import Weight
from lumos_nb.workloads.llm.memory import numbers_held
from lumos_nb.workloads.llm.tensors import layer_tensors

Part = str | bool | tuple[bool, str]
"""The model's ends, a layer without or with experts, and what is trained of one."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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


BLOCK = 4096
"""Layouts at a time, so that their arrays stay in the cache."""


def _peaks(model: Transformer, train: Training, layouts: pl.DataFrame) -> tuple[Floats, Ints]:
    pp = layouts["pp"].to_numpy()
    row = np.repeat(np.arange(len(pp)), pp)
    stage = np.arange(len(row)) - (np.cumsum(pp) - pp)[row]
    if len({model.has_experts(layer) for layer in range(model.layers)}) == 1:
        told = (stage < 2) | (stage >= pp[row] - 2)  # ranks between these have like layers, and as many in flight
        row, stage = row[told], stage[told]
    used = _Ranks(model, train, layouts, row, stage).peak()
    begins = np.searchsorted(row, np.arange(len(pp)))
    most = np.maximum.reduceat(used, begins)
    return most, np.minimum.reduceat(np.where(used == most[row], stage, np.iinfo(np.int64).max), begins)


class _Ranks:
    """Pipeline ranks of many layouts: `row` is the layout of each, and `stage` its place."""

    tp: Ints
    cp: Ints
    pp: Ints
    v: Ints
    zero: Ints
    micro_batch: Ints

    def __init__(self, model: Transformer, train: Training, layouts: pl.DataFrame, row: Ints, stage: Ints) -> None:
        self.model, self.train, self.layouts, self.row, self.stage = model, train, layouts, row, stage
        self.number, self.grad_bytes = max(2, SIZE_OF[train.dtype]), SIZE_OF[train.grad_dtype]
        experts = [model.has_experts(layer) for layer in range(model.layers)]
        self.layer_of = {kind: experts.index(kind) for kind in (False, True) if kind in experts}
        self.experts_before = np.cumsum([0, *experts])
        self.tp, self.cp, self.pp, self.v = (self.axis(name) for name in ("tp", "cp", "pp", "chunks"))
        self.zero, self.micro_batch = self.axis("zero"), self.axis("micro_batch")
        dp, shard, ep, etp = (self.axis(name) for name in ("dp", "shard", "ep", "etp"))
        self.replicas = dp * self.cp
        self.sharded = np.where(self.zero > 0, np.where(shard > 0, shard, self.replicas), 1)
        self.expert_shards = np.maximum(self.sharded * self.tp / (ep * np.where(etp > 0, etp, self.tp)), 1)
        self.spread = np.where(self.axis("sequence_parallel"), self.tp, 1)
        self.tokens = self.micro_batch * train.seq / self.cp
        self.count = train.global_batch // (self.micro_batch * dp)
        self.per = model.layers // (self.pp * self.v)
        self.schedule = self.axis("schedule")
        self.folded = self.schedule == "zb-v"  # the second chunk goes the ranks back
        self.first, self.last = stage == 0, stage == np.where(self.folded, 0, self.pp - 1)

    def axis(self, name: str) -> NDArray[Any]:
        """A column of the layouts, for each rank."""
        return self.layouts[name].to_numpy()[self.row]

    def cells(self, names: Sequence[str], count: Callable[[Parallelism, str], Sequence[float]]) -> Floats:
        """What depends on some axes alone, counted once for each of their combinations: (k, ranks)."""
        keys = self.layouts.select(names)
        distinct = keys.unique(maintain_order=True).with_row_index("cell")
        of = keys.join(distinct, on=names, how="left", maintain_order="left")["cell"].to_numpy()
        counted = []
        for cell in distinct.drop("cell").iter_rows(named=True):
            recompute = cell.pop("recompute", "none")
            room = cell.get("ep", 1) * (cell.get("etp", 0) or cell["tp"])
            counted.append(count(Parallelism(dp=room, **cell), recompute))
        return np.array(counted, np.float64).T[:, of[self.row]]

    @cached_property
    def layer(self) -> dict[bool, tuple[Floats, Floats, Floats]]:
        """Of a layer without and with experts: bytes kept, risen and put off."""
        one = msgspec.structs.replace(self.train, micro_batch=1)

        def count(layout: Parallelism, recompute: str) -> list[float]:
            found = []
            for kind in self.layer_of:
                made = layer_tensors(self.model, layout, one, experts=kind)
                found += [sum(made.kept(recompute).values()), made.rise(recompute), made.put_off()]
            return found

        per = self.cells(("tp", "sequence_parallel", "cp", "etp", "recompute"), count) * self.micro_batch
        return {kind: (per[3 * i], per[3 * i + 1], per[3 * i + 2]) for i, kind in enumerate(self.layer_of)}

    @cached_property
    def numbers(self) -> dict[Part, tuple[Floats, Floats]]:
        """Parameters of the first end, of the last, and of a layer of each kind: dense ones, and those of experts."""
        model = self.model
        copy = model.first_weights()[:1] if model.tied else ()
        parts: dict[Part, tuple[Weight, ...]] = {
            "first": model.first_weights(), "last": model.last_weights(), "copy": copy,
        }  # fmt: skip
        parts |= {kind: model.weights(layer) for kind, layer in self.layer_of.items()}
        rank = self.train.lora
        parts |= {
            (kind, "trained"): tuple(a for w in parts[kind] for a in w.adapters(rank)) if rank else parts[kind]
            for kind in self.layer_of
        }

        def count(layout: Parallelism, _: str) -> list[float]:
            def of(weights: Iterable[Weight], experts: bool) -> float:
                return sum(numbers_held(w, model, layout) for w in weights if (w.part == "experts") == experts)

            return [of(weights, experts) for weights in parts.values() for experts in (False, True)]

        per = self.cells(("tp", "ep", "etp"), count)
        return {name: (per[2 * i], per[2 * i + 1]) for i, name in enumerate(parts)}

    def experts(self, begin: Ints, end: Ints) -> Ints:
        """Layers with experts among some."""
        count: Ints = self.experts_before[end] - self.experts_before[begin]
        return count

    def of_layers(self, term: int, begin: Ints, end: Ints) -> Floats:
        """Bytes kept (0) or put off (2) by some layers."""
        routed = self.experts(begin, end)
        counts = {False: end - begin - routed, True: routed}
        return sum((counts[kind] * self.layer[kind][term] for kind in self.layer), np.zeros(len(self.row)))

    def freed(self, begin: Ints, end: Ints) -> Floats:
        """What a micro-batch no longer holds once some layers have gone back, but for what weight passes wait for."""
        split = self.folded | (self.schedule == "zb-h1")
        held: Floats = self.of_layers(0, begin, end) - split * self.of_layers(2, begin, end)
        return held

    def of_one(self, values: dict[bool, Floats], layer: Ints) -> Floats:
        """A value of one layer a rank, by its kind."""
        if len(values) == 1:
            return next(iter(values.values()))
        return np.where(self.experts(layer, layer + 1) > 0, values[True], values[False])

    def chunk(self, chunk: Ints | int) -> tuple[Ints, Ints]:
        """The layers of a chunk of each rank: first, and the one behind the last."""
        back = self.folded & (chunk == 1)
        place = np.where(back, 2 * self.pp - 1 - self.stage, chunk * self.pp + self.stage)
        return place * self.per, (place + 1) * self.per

    def in_flight(self, chunk: Ints | int) -> Ints:
        """Micro-batches whose activations a chunk holds when its rank begins its first backward pass."""
        pp, v, held = self.pp, self.v, np.minimum(self.pp - self.stage, self.count)
        passes = np.minimum(2 * (pp - self.stage) - 1 + (v - 1) * pp, v * self.count)
        turns, rest = np.divmod(passes, pp * v)
        held = np.where(self.schedule == "interleaved", turns * pp + np.clip(rest - chunk * pp, 0, pp), held)
        held = np.where(self.schedule == "gpipe", self.count, held)
        return np.where(self.folded, np.minimum(pp, self.count), held)

    @cached_property
    def chunks(self) -> tuple[Floats, Ints, Floats]:
        """Of all chunks: bytes in flight, layers with experts, and what weight passes put off would hold."""
        kept, routed, put_off = (np.zeros(len(self.row)) for _ in range(3))
        for chunk in range(int(self.v.max())):
            begin, end = self.chunk(chunk)
            there = chunk < self.v
            begin, end = np.where(there, begin, 0), np.where(there, end, 0)
            kept += self.in_flight(chunk) * self.of_layers(0, begin, end)
            routed += self.experts(begin, end)
            put_off += self.of_layers(2, begin, end)
        return kept, routed.astype(np.int64), put_off

    def parameters(self, dense: Floats, experts: Floats, *, shard: bool) -> Floats:
        """Whole, or the shard that ZeRO leaves."""
        return dense / self.sharded + experts / self.expert_shards if shard else dense + experts

    def layers_numbers(self, routed: Ints, count: Ints, *, shard: bool = False, trained: bool = True) -> Floats:
        """Parameters of so many layers, of which some have experts: what is trained, or all."""
        counts = {False: count - routed, True: routed}
        of = {kind: self.numbers[(kind, "trained") if trained else kind] for kind in self.layer_of}
        return sum(
            (counts[kind] * self.parameters(*of[kind], shard=shard) for kind in self.layer_of), np.zeros(len(self.row))
        )

    @cached_property
    def ends(self) -> Floats:
        """Parameters of embedding and head on each rank."""
        copied = self.numbers["copy"][0] * ~self.first
        numbers: Floats = self.first * self.numbers["first"][0] + self.last * (self.numbers["last"][0] + copied)
        return numbers

    @cached_property
    def trained_ends(self) -> Floats:
        """What is trained of them: no adapter is there."""
        return np.zeros_like(self.ends) if self.train.lora else self.ends

    def largest(self, *, trained: bool = False) -> Floats:
        """Parameters of the largest layer, or what is trained of them."""
        routed, count = self.chunks[1], self.per * self.v
        there = {False: routed < count, True: routed > 0}
        of = {kind: self.numbers[(kind, "trained") if trained else kind] for kind in self.layer_of}
        most: Floats = np.maximum.reduce([there[kind] * self.parameters(*of[kind], shard=False) for kind in of])
        return most

    def lasting(self) -> Floats:
        """What is there throughout a step."""
        train, zero = self.train, self.zero
        master = 4.0 if train.master and self.number < 4 else 0.0
        routed, count = self.chunks[1], self.per * self.v
        whole, shard, frozen, frozen_shard = (
            ends / (self.sharded if cut else 1) + self.layers_numbers(routed, count, shard=cut, trained=trained)
            for trained, ends in ((True, self.trained_ends), (False, self.ends))
            for cut in (False, True)
        )
        weights = np.where(zero == 3, shard * (master or self.number), whole * self.number)
        if train.lora:
            weights = weights + np.where(zero == 3, frozen_shard, frozen) * self.number
        gradients = np.where(zero >= 2, shard, whole) * self.grad_bytes
        states = 4.0 * OPTIMIZER_STATES[train.optimizer] + np.where(zero < 3, master, 0.0)
        total: Floats = weights + gradients + np.where(zero > 0, shard, whole) * states + self.buffers(whole)
        return total

    def buffers(self, whole: Floats) -> Floats:
        """Of communication."""
        model, train = self.model, self.train
        message = model.hidden * self.number * self.tokens / self.spread
        pair = self.tokens * self.number * np.maximum(model.keys / self.tp, 1) * (model.head + model.head_v)
        rings = np.where(self.axis("cp_mode") == "ring", 2, self.cp)
        copies = train.bucket_copies & (self.replicas > 1) & (self.zero < 2)
        return 2 * message * (self.pp > 1) + rings * pair * (self.cp > 1) + copies * self.number * whole

    def gathered(self, layers: int, made: Floats | float, copied: Floats | float) -> Floats:
        """What ZeRO 2 and 3 have beside their shards."""
        held = (self.ends + np.minimum(layers, self.per) * self.largest()) * (self.zero == 3)
        there = (self.zero >= 2) & (self.sharded > 1)
        total: Floats = there * (self.number * (held + made) + copied * self.grad_bytes)
        return total

    def unfused(self, numbers: Floats) -> Floats:
        """Gradients of a micro-batch before they are added to those that last."""
        return numbers * self.number * ((self.zero < 2) & (not self.train.fused_grads))

    def held(self) -> Floats:
        """What micro-batches in flight keep."""
        mask = self.train.dropout * self.model.hidden / self.spread
        ids = self.first * self.in_flight(0) * self.tokens * (8 + mask)
        waiting = np.minimum(self.pp, self.count) - self.in_flight(0)
        kept: Floats = self.chunks[0] + ids + (self.schedule == "zb-h1") * waiting * self.chunks[2]
        return kept

    def peak(self) -> Floats:
        """Most bytes in use."""
        most: Floats = self.lasting() + np.maximum.reduce([*self.moments()])
        return most

    def moments(self) -> Iterator[Floats]:
        """What passes, at each moment that may be the peak; those that a rank has not are its least."""
        held, ahead, largest = self.held(), 1 + self.train.prefetch, self.largest(trained=True)
        head = self.trained_ends * self.last
        begin, end = self.chunk(self.v - 1)
        rise = {kind: terms[1] for kind, terms in self.layer.items()}
        yield from (np.where(self.last, moment, 0.0) for moment in self.of_head(held, head))
        yield held + self.of_one(rise, end - 1) + self.unfused(head) + self.gathered(ahead, head, 0)
        freed = self.freed(end - 1, end)
        after = held - freed + self.of_one(rise, np.maximum(end - 2, 0)) + self.gathered(ahead, head, largest)
        yield np.where(self.per > 1, after, 0.0)
        routed = self.chunks[1]
        made = head + self.layers_numbers(routed - self.experts(begin, begin + 1), self.per * self.v - 1)
        freed = self.freed(begin + 1, end)
        yield held - freed + self.of_one(rise, begin) + self.unfused(made) + self.gathered(1, head, largest)
        made, ends = self.trained_ends + self.layers_numbers(routed, self.per * self.v), self.trained_ends
        yield held - self.freed(begin, end) + self.unfused(made) + self.gathered(0, ends, ends)

    def of_head(self, held: Floats, head: Floats) -> Iterator[Floats]:
        """The moments of logits and of their gradients."""
        train, model, tokens = self.train, self.model, self.tokens
        whole = tokens * model.hidden * self.number
        part, vocab = whole / self.spread, np.ceil(model.vocab / self.tp)
        inputs = part + (0.0 if train.lora else part if train.regather else whole)
        before = (self.in_flight(self.v - 1) - 1) * (4.0 * vocab * tokens + inputs)
        yield held + tokens * train.logit_bytes * vocab + inputs + before + self.gathered(0, 0.0, 0)
        anew = (1 + train.regather) * whole * (part < whole)
        logits = inputs + vocab / model.hidden * whole
        ahead = 1 + train.prefetch
        yield held + logits + anew + part + self.unfused(head) + self.gathered(ahead, head, 0)
