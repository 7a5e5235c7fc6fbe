"""What a pipeline rank uses, by class: of the ranks of one layout, or of thousands at once.

What lasts (weights, gradients, optimizer states, buffers) is counted from the parameter tensors; what passes
(activations of the micro-batches in flight, logits, what a backward pass makes) from the tensors that autograd saves.
What a layer keeps, and how far its backward pass rises, is linear in the sequences of a micro-batch and depends on few
axes of a layout beside, so that it is counted once for each distinct cell of them. All else is sums and products of
counts: arrays with a number for each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.layout import OPTIMIZER_STATES, SIZE_OF, Parallelism, Training, Transformer
from lumos_nb.transformer import Weight
from lumos_nb.workloads.llm.tensors import layer_tensors, op_of

CLASSES = (
    "weights",  # with ZeRO 3 the sharded fp32 ones that layers are gathered from
    "gradients",
    "optimizer",  # states, and master weights where they are not the weights
    "activations",  # of layers, for the micro-batches in flight
    "bookkeeping",  # statistics of norms and softmax, token ids, the embedding's mask
    "logits",  # with the inputs of the last norm and of the head
    "workspace",  # what the backward pass of a layer makes and frees, or computes again
    "buffers",  # of communication: gathered weights, buckets, messages between stages, keys and values of others
    "fragmentation",  # the share that was asked for
)
"""What memory is used for."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Parts = dict[str, Floats]
"""Bytes by class, of each rank."""


class _Layer(NamedTuple):
    """Bytes of a layer for a micro-batch: what it keeps, by class, how far its backward pass rises, what is put off."""

    activations: Floats
    bookkeeping: Floats
    rise: Floats
    put_off: Floats


@lru_cache(maxsize=4096)
def _layer(
    model: Transformer, layout: Parallelism, train: Training, experts: bool, recompute: str
) -> tuple[float, float, float, float]:
    made = layer_tensors(model, layout, train, experts=experts)
    sums = [0.0, 0.0]
    for name, size in made.kept(recompute).items():
        sums[name.endswith("statistics")] += size
    return sums[0], sums[1], made.rise(recompute), made.put_off()


@lru_cache(maxsize=4096)
def _climbs(
    model: Transformer, layout: Parallelism, train: Training, weights: tuple[Weight, ...], recompute: str
) -> tuple[float, ...]:
    """How far the backward pass of a layer rises until the first of its weights has a gradient, and behind each."""
    made = layer_tensors(model, layout, train, experts=any(weight.part == "experts" for weight in weights))
    return tuple(made.climbs(recompute, {op_of(weight) for weight in weights}))


@lru_cache(maxsize=4096)
def _stay(model: Transformer, layout: Parallelism, train: Training, weights: tuple[Weight, ...]) -> tuple[float, ...]:
    """Numbers of the gradients that are there by then, where they stay until the layer is done."""
    made = layer_tensors(model, layout, train, experts=any(weight.part == "experts" for weight in weights))
    of_op: dict[str, float] = {}
    for weight in weights:
        of_op[op_of(weight)] = of_op.get(op_of(weight), 0) + numbers_held(weight, model, layout)
    return tuple(accumulate((of_op[op.name] for op in reversed(made.ops) if op.name in of_op), initial=0.0))


class _Numbers(NamedTuple):
    """Parameters on a rank: of all but experts, and of these, which ZeRO spreads over fewer ranks."""

    dense: Floats
    experts: Floats


@lru_cache(maxsize=4096)
def _numbers(model: Transformer, layout: Parallelism, weights: tuple[Weight, ...]) -> tuple[float, float]:
    sums = [0.0, 0.0]
    for weight in weights:
        sums[weight.part == "experts"] += numbers_held(weight, model, layout)
    return sums[0], sums[1]


def numbers_held(weight: Weight, model: Transformer, layout: Parallelism) -> float:
    """Parameters of a weight on one rank."""
    if weight.part == "experts":
        return weight.size / layout.ep / (layout.expert_tp if weight.split != "none" else 1)
    if weight.split == "none":
        return weight.size
    if weight.name.startswith("qkv") and layout.tp > model.keys:  # keys and values of a rank are copies
        return weight.size * (model.heads / layout.tp + 2) / (model.heads + 2 * model.keys)
    if weight.part in ("embedding", "head"):
        return math.ceil(weight.shape[0] / layout.tp) * math.prod(weight.shape[1:])
    return weight.size / layout.tp


def alone(layout: Parallelism, train: Training) -> pl.DataFrame:
    """A layout as a row of a table of them."""
    fields = {name: getattr(layout, name) for name in layout.__struct_fields__ if name != "split"}
    return coded(pl.DataFrame(fields | {"micro_batch": train.micro_batch, "recompute": train.recompute}))


OF_LAYER, OF_NUMBERS = ("tp", "sequence_parallel", "cp", "etp", "recompute"), ("tp", "ep", "etp")
"""Axes on which tensors of a layer depend, and numbers of parameters."""


def coded(layouts: pl.DataFrame) -> pl.DataFrame:
    """Layouts with the number of each one's combination of `OF_LAYER` and of `OF_NUMBERS`."""
    for names in (OF_LAYER, OF_NUMBERS):
        cells = layouts.select(names).unique(maintain_order=True).with_row_index("/".join(names))
        layouts = layouts.join(cells, on=names, how="left", maintain_order="left")
    return layouts


Known = dict[str, dict[tuple[Any, ...], Floats]]
"""What was counted before of the same model and training, by what it is and the axes that it depends on."""


class Ranks:
    """Pipeline ranks of `coded` layouts: `row` is the layout of each, `stage` its place; `split` cuts unevenly."""

    tp: Ints
    pp: Ints
    v: Ints

    def __init__(
        self, model: Transformer, train: Training, layouts: pl.DataFrame, row: Ints, stage: Ints,
        split: tuple[int, ...] = (), known: Known | None = None,
    ) -> None:  # fmt: skip
        self.known: Known = {} if known is None else known
        self.one = msgspec.structs.replace(train, micro_batch=1)
        self.model, self.train, self.layouts, self.row, self.stage = model, train, layouts, row, stage
        self.number, self.grad_bytes = SIZE_OF[train.kept_dtype], SIZE_OF[train.grad_dtype]
        self.bounds = np.cumsum([0, *split]) if split else None
        self.experts = experts = tuple(model.has_experts(layer) for layer in range(model.layers))
        self.layer_of = {kind: experts.index(kind) for kind in (False, True) if kind in experts}
        self.experts_before = np.cumsum([0, *experts])
        self.tp, self.cp, self.pp, self.v = (self.axis(name) for name in ("tp", "cp", "pp", "chunks"))
        self.zero, self.micro_batch = self.axis("zero"), self.axis("micro_batch")
        dp, shard, ep, etp = (self.axis(name) for name in ("dp", "shard", "ep", "etp"))
        self.replicas = dp * self.cp
        self.sharded = np.where(self.zero > 0, np.where(shard > 0, shard, self.replicas), 1)
        self.expert_shards = np.maximum(self.sharded * self.tp / (ep * np.where(etp > 0, etp, self.tp)), 1)
        self.spread = np.where(self.axis("sequence_parallel"), self.tp, 1)
        self.tokens: Floats = self.micro_batch * train.seq / self.cp
        self.count = train.global_batch // (self.micro_batch * dp)
        self.schedule = self.axis("schedule")
        self.folded = self.schedule == "zb-v"  # the second chunk goes the ranks back
        self.apart = self.folded | (self.schedule == "zb-h1")  # weight gradients are passes of their own
        self.first, self.last = stage == 0, stage == np.where(self.folded, 0, self.pp - 1)

    # Counts, an array with a number for each rank

    def axis(self, name: str) -> NDArray[Any]:
        """A column of the layouts, for each rank."""
        return self.layouts[name].to_numpy()[self.row]

    def cells(self, what: str, names: Sequence[str], count: Callable[[Parallelism, str], Sequence[float]]) -> Floats:
        """What depends on some axes alone, counted once for each of their combinations: (k, layouts)."""
        known, layouts = self.known.setdefault(what, {}), self.layouts
        _, first, of = np.unique(layouts["/".join(names)].to_numpy(), return_index=True, return_inverse=True)
        rows = layouts.select(names)[first].rows()
        for row in rows:
            if row not in known:
                cell = dict(zip(names, row, strict=True))
                recompute = cell.pop("recompute", "none")
                room = cell.get("ep", 1) * (cell.get("etp", 0) or cell["tp"])
                known[row] = np.array(count(Parallelism(dp=room, **cell), recompute), np.float64)
        found: Floats = np.stack([known[row] for row in rows], axis=1)[:, of]
        return found

    @cached_property
    def layer(self) -> dict[bool, _Layer]:
        """A layer without and with experts."""
        kinds, size = [*self.layer_of], len(_Layer._fields)
        per = self.cells(
            "layer",
            OF_LAYER,
            lambda layout, how: [x for kind in kinds for x in _layer(self.model, layout, self.one, kind, how)],
        )
        per = (per * self.layouts["micro_batch"].to_numpy())[:, self.row]
        return {kind: _Layer(*per[size * i : size * (i + 1)]) for i, kind in enumerate(kinds)}

    @cached_property
    def grown(self) -> dict[bool, Floats]:
        """Gradients of a layer without and with experts that are there at the peak of its own backward pass."""
        return {
            kind: self._grown(kind, self.trained(self.model.weights(layer))) for kind, layer in self.layer_of.items()
        }

    def _grown(self, kind: bool, weights: tuple[Weight, ...]) -> Floats:
        climbs = self.cells(
            f"climbs {kind}", OF_LAYER, lambda layout, how: _climbs(self.model, layout, self.one, weights, how)
        )
        stay = self.cells(f"stay {kind}", OF_NUMBERS, lambda layout, _: _stay(self.model, layout, self.one, weights))
        climbs = climbs * self.layouts["micro_batch"].to_numpy()
        grown: Floats = ((climbs + self.number * stay).max(axis=0) - climbs.max(axis=0)) / self.number
        return grown[self.row]

    def trained(self, weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
        """What is trained of some weights of a layer."""
        rank = self.train.lora
        return tuple(a for w in weights for a in w.adapters(rank)) if rank else weights

    @cached_property
    def numbers(self) -> dict[str | bool | tuple[bool, str], _Numbers]:
        """Parameters of the model's ends, of a layer without and with experts, and what is trained of one."""
        model, first = self.model, self.model.first_weights()
        parts: dict[str | bool | tuple[bool, str], tuple[Weight, ...]] = {
            "first": first, "last": model.last_weights(), "copy": first[:1] if model.tied else (),
        }  # fmt: skip
        for kind, layer in self.layer_of.items():
            parts[kind], parts[kind, "trained"] = model.weights(layer), self.trained(model.weights(layer))
        per = self.cells(
            "numbers",
            OF_NUMBERS,
            lambda layout, _: [x for some in parts.values() for x in _numbers(model, layout, some)],
        )[:, self.row]
        return {name: _Numbers(*per[2 * i : 2 * i + 2]) for i, name in enumerate(parts)}

    def routed(self, begin: Ints, end: Ints) -> Ints:
        """Layers with experts among some."""
        if len(self.layer_of) == 1:
            return (end - begin) * (True in self.layer_of)
        count: Ints = self.experts_before[end] - self.experts_before[begin]
        return count

    def by_kind(self, count: Ints, routed: Ints, of: Mapping[bool, Floats]) -> Floats:
        """A sum over so many layers, of which some have experts: of what one of a kind has."""
        if len(of) == 1:
            return count * next(iter(of.values()))
        total: Floats = (count - routed) * of[False] + routed * of[True]
        return total

    def of_layers(self, term: str, count: Ints, routed: Ints) -> Floats:
        """Bytes of so many layers: of a term of `_Layer`."""
        return self.by_kind(count, routed, {kind: getattr(layer, term) for kind, layer in self.layer.items()})

    def kept(self, count: Ints, routed: Ints) -> Parts:
        """What so many layers keep of a micro-batch."""
        return {name: self.of_layers(name, count, routed) for name in ("activations", "bookkeeping")}

    def rise(self, layer: Ints) -> Parts:
        """What the backward pass of one layer makes."""
        there = layer.clip(0, self.model.layers - 1)  # a rank may hold none
        return {"workspace": self.of_layers("rise", np.ones_like(layer), self.routed(there, there + 1))}

    def put_off(self, count: Ints, routed: Ints) -> Parts:
        """What the weight passes of so many layers wait with."""
        return {"activations": self.of_layers("put_off", count, routed)}

    def chunk(self, chunk: Ints | int) -> tuple[Ints, Ints]:
        """The layers of a chunk of each rank: first, and the one behind the last."""
        back = self.folded & (chunk == 1)
        place = np.where(back, 2 * self.pp - 1 - self.stage, chunk * self.pp + self.stage)
        if self.bounds is not None:
            return self.bounds[place], self.bounds[place + 1]
        per = self.model.layers // (self.pp * self.v)
        return place * per, (place + 1) * per

    @cached_property
    def layers(self) -> tuple[Ints, Ints]:
        """Layers of all chunks, and those of them with experts."""
        count, routed = np.zeros((2, len(self.row)), np.int64)
        for begin, end in self.chunks():
            count += end - begin
            routed += self.routed(begin, end)
        return count, routed

    def chunks(self) -> Iterator[tuple[Ints, Ints]]:
        """The layers of each chunk; of those that a rank has not, none."""
        for chunk in range(int(self.v.max())):
            begin, end = self.chunk(np.minimum(chunk, self.v - 1))
            yield begin, np.where(chunk < self.v, end, begin)

    def parameters(self, numbers: _Numbers, *, sharded: bool) -> Floats:
        """Whole, or the shard that ZeRO leaves."""
        split = numbers.dense / self.sharded + numbers.experts / self.expert_shards
        return split if sharded else numbers.dense + numbers.experts

    @cached_property
    def of_kind(self) -> dict[tuple[bool, bool], dict[bool, Floats]]:
        """Parameters of a layer of each kind, by whether of what is trained alone, and of a shard."""
        return {
            (trained, sharded): {
                kind: self.parameters(self.numbers[(kind, "trained") if trained else kind], sharded=sharded)
                for kind in self.layer_of
            }
            for trained in (False, True)
            for sharded in (False, True)
        }

    def layers_numbers(self, count: Ints, routed: Ints, *, trained: bool = True, sharded: bool = False) -> Floats:
        """Parameters of so many layers, of which some have experts."""
        return self.by_kind(count, routed, self.of_kind[trained, sharded])

    @cached_property
    def ends(self) -> Floats:
        """Parameters of embedding and head; a tied head on another rank than the embedding is a copy of it."""
        copied = self.numbers["copy"].dense * ~self.first
        numbers: Floats = self.embedding + self.last * (self.numbers["last"].dense + copied)
        return numbers

    @cached_property
    def embedding(self) -> Floats:
        """Parameters before the first layer."""
        numbers: Floats = self.first * self.numbers["first"].dense
        return numbers

    @cached_property
    def trained_ends(self) -> Floats:
        """What is trained of embedding and head: no adapter is there."""
        return np.zeros_like(self.ends) if self.train.lora else self.ends

    @cached_property
    def largest(self) -> dict[bool, Floats]:
        """Parameters of the largest layer, by whether of what is trained alone."""
        count, routed = self.layers
        there = {False: routed < count, True: routed > 0}
        return {
            trained: np.maximum.reduce([there[kind] * size for kind, size in self.of_kind[trained, False].items()])
            for trained in (False, True)
        }

    # Bytes by class

    def lasting(self) -> Parts:
        """What is there throughout a step."""
        train, zero = self.train, self.zero
        count, routed = self.layers
        whole, shard, frozen, frozen_shard = (
            ends / (self.sharded if cut else 1) + self.layers_numbers(count, routed, trained=trained, sharded=cut)
            for trained, ends in ((True, self.trained_ends), (False, self.ends))
            for cut in (False, True)
        )
        master = 4.0 if train.master and self.number < 4 else 0.0
        weights = np.where(zero == 3, shard * (master or self.number), whole * self.number)
        if train.lora:  # else what is trained is all there is
            weights = weights + np.where(zero == 3, frozen_shard, frozen) * self.number
        states = 4.0 * OPTIMIZER_STATES[train.optimizer] + np.where(zero < 3, master, 0.0)
        return {
            "weights": weights,
            "gradients": np.where(zero >= 2, shard, whole) * self.grad_bytes,
            "optimizer": np.where(zero > 0, shard, whole) * states,
            "buffers": self.buffers(whole),
        }

    def buffers(self, whole: Floats) -> Floats:
        """Of messages between stages, keys and values of other ranks, and gradients in buckets."""
        model, train = self.model, self.train
        message = model.hidden * self.number * self.tokens / self.spread
        pair = self.tokens * self.number * np.maximum(model.keys / self.tp, 1) * (model.head + model.head_v)
        rings = np.where(self.axis("cp_mode") == "ring", 2, self.cp)
        copied: Floats = (train.bucket_copies & (self.replicas > 1) & (self.zero < 2)) * self.number * whole
        return copied + 2 * message * (self.pp > 1) + rings * pair * (self.cp > 1)

    def gathered(
        self, layers: Ints | int, made: Floats | float, copied: Floats | float, *, without: Floats | float = 0.0
    ) -> Parts:
        """What ZeRO 2 and 3 have beside their shards: gathered weights, gradients that are `made`, a copy to reduce.

        As FSDP does: embedding and head stay gathered (`without` those whose gradients are reduced), a layer's
        gradients are reduced when it is done, from a copy in the format of reduction that lasts until the next layer
        is done.
        """
        held = (self.ends - without + layers * self.largest[False]) * (self.zero == 3)
        there = (self.zero >= 2) & (self.sharded > 1)
        return {"buffers": there * (self.number * (held + made) + copied * self.grad_bytes)}

    def unfused(self, numbers: Floats) -> Parts:
        """Gradients of a micro-batch in the format of compute, before they are added to those that last."""
        return {"gradients": numbers * self.number * ((self.zero < 2) & (not self.train.fused_grads))}

    def embedded(self) -> Parts:
        """What the embedding keeps of a micro-batch: token ids, and its mask."""
        mask = self.train.dropout * self.model.hidden / self.spread
        return {"bookkeeping": self.first * self.tokens * (8 * (not self.train.lora) + mask)}

    @property
    def hidden_bytes(self) -> tuple[Floats, Floats, Floats]:
        """Of one tensor of hidden states, whole and in this rank's part, and of what the head keeps."""
        whole = self.tokens * self.model.hidden * self.number
        part = whole / self.spread
        needed = 0.0 if self.train.lora else part if self.train.regather else whole  # by the gradient of the head
        return whole, part, part + needed

    @property
    def logits(self) -> Floats:
        """Numbers of a micro-batch on a rank."""
        return np.ceil(self.model.vocab / self.tp) * self.tokens

    @property
    def loss_keeps(self) -> float:
        """Bytes of a logit that the loss keeps: fp32, or as few as are ever alive at once."""
        return min(4.0, self.train.logit_bytes)

    def kept_logits(self) -> Parts:
        """What the head and the loss keep of a micro-batch."""
        return {"logits": self.last * (self.loss_keeps * self.logits + self.hidden_bytes[2])}

    def one_loss(self) -> Parts:
        """What the loss has beyond that."""
        return {"logits": self.last * (self.train.logit_bytes - self.loss_keeps) * self.logits}

    def head(self) -> Parts:
        """What the backward pass of the head makes and needs."""
        whole, part, inputs = self.hidden_bytes
        anew = (1 + self.train.regather) * whole * (part < whole)  # its gradient gathered, and again its input
        return {"logits": inputs + self.logits * self.number, "workspace": anew + part}

    def head_put_off(self) -> Parts:
        """What the weight pass of the head waits with."""
        needed = {"logits": self.logits * self.number + self.hidden_bytes[2]}
        return times(needed, self.last * (not self.train.lora))


def summed(parts: Sequence[Parts]) -> Parts:
    """Bytes of several parts together."""
    found: Parts = {}
    for part in parts:
        for name, size in part.items():
            found[name] = found[name] + size if name in found else size
    return found


def times(part: Parts, factor: Any) -> Parts:
    """A part so many times."""
    return {name: factor * size for name, size in part.items()}


def total(part: Parts) -> Floats:
    """Bytes of all classes."""
    every: Floats = sum(part.values(), np.zeros(1))
    return every
