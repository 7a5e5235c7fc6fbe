"""Memory of each pipeline rank by class, at the moment of a step when most is in use.

What lasts (weights, gradients, optimizer states, buffers) is counted from the parameter tensors; what passes
(activations of the micro-batches in flight, logits, what a backward pass makes) from the tensors that autograd saves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import polars as pl

from lumos_nb.errors import LayoutError
from lumos_nb.layout import OPTIMIZER_STATES, SIZE_OF, Parallelism, Training, Transformer, check
from lumos_nb.transformer import Weight
from lumos_nb.workloads.llm.tensors import LayerTensors, layer_tensors

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
    columns: dict[str, list[object]] = {"stage": [], "class": [], "bytes": [], "moment": []}
    for stage in range(layout.pp):
        moment, used = _Rank(model, layout, train, stage).peak()
        used["fragmentation"] = fragmentation * sum(used.values())
        for name in CLASSES:
            for column, value in zip(columns, (stage, name, round(used.get(name, 0.0)), moment), strict=True):
                columns[column].append(value)
    return pl.DataFrame(columns, schema_overrides={"stage": pl.Int32, "bytes": pl.Int64})


def memory_over_time(model: Transformer, layout: Parallelism, train: Training, ops: pl.DataFrame) -> pl.DataFrame:
    """Bytes of each pipeline rank by class, at every instant at which a pass of a replayed step changes them.

    What `memory` counts at its moments comes and goes with the passes: a layer's activations are there from the end of
    its forward pass to that of its backward pass, its workspace and gradients of a micro-batch during the latter.
    What ZeRO gathers counts as there throughout.

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
            (stage, at_ns, name, size)
            for stage in range(layout.pp)
            for at_ns, used in _Rank(model, layout, train, stage).changes(
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
    """Most bytes that any rank uses, without fragmentation; checks nothing (for a search over many layouts)."""
    return max(sum(_Rank(model, layout, train, stage).peak()[1].values()) for stage in range(layout.pp))


_tensors = lru_cache(maxsize=1024)(layer_tensors)


@dataclass(frozen=True)
class _Rank:
    """One pipeline rank: its chunks of layers, and the parameters that it holds."""

    model: Transformer
    layout: Parallelism
    train: Training
    stage: int

    @cached_property
    def chunks(self) -> tuple[range, ...]:
        """The layers of each chunk."""
        sizes, pp = self.layout.layers_of(self.model), self.layout.pp
        places = [chunk * pp + self.stage for chunk in range(self.layout.chunks)]
        if self.layout.schedule == "zb-v":  # the second chunk goes the ranks back
            places[1] = 2 * pp - 1 - self.stage
        return tuple(range(sum(sizes[:place]), sum(sizes[: place + 1])) for place in places)

    @cached_property
    def first(self) -> bool:
        """Whether the embedding is here."""
        return self.stage == 0

    @cached_property
    def last(self) -> bool:
        """Whether the head is here."""
        return self.stage == (0 if self.layout.schedule == "zb-v" else self.layout.pp - 1)

    def size(self, weights: Iterable[Weight], *, sharded: bool = False, trained: bool = False) -> float:
        """Parameters of some weights on this rank, or what is `trained` of them; or the shard that ZeRO leaves."""
        rank = self.train.lora
        chosen = (one for w in weights for one in w.adapters(rank)) if trained and rank else weights
        return _size(tuple(chosen), self.model, self.layout, sharded)

    def size_of(self, layers: Iterable[int], *, sharded: bool = False, trained: bool = False) -> float:
        """The same of layers."""
        kinds = Counter(self.model.has_experts(layer) for layer in layers)
        return sum(
            n * self.size(_weights(self.model, kind), sharded=sharded, trained=trained) for kind, n in kinds.items()
        )

    def of_layer(self, layer: int) -> LayerTensors:
        """The tensors of a layer."""
        return _tensors(self.model, self.layout, self.train, experts=self.model.has_experts(layer))

    @cached_property
    def ends(self) -> tuple[Weight, ...]:
        """Weights of embedding and head; a tied head on another rank than the embedding is a copy of it."""
        first, last = self.model.first_weights(), self.model.last_weights()
        copy = first[:1] if self.model.tied and not self.first else ()
        return (*(first if self.first else ()), *((*last, *copy) if self.last else ()))

    @cached_property
    def every(self) -> tuple[int, ...]:
        """All layers of this rank."""
        return tuple(layer for chunk in self.chunks for layer in chunk)

    def in_flight(self) -> list[int]:
        """Micro-batches whose activations each chunk holds when this rank begins its first backward pass."""
        pp, count, layout = self.layout.pp, self.train.micro_batches(self.layout), self.layout
        if layout.schedule == "gpipe":
            return [count]
        if layout.schedule == "zb-v":  # as much as the first rank of 1F1B, on every rank
            return [min(pp, count)] * 2
        if layout.schedule == "interleaved":
            passes = min(2 * (pp - self.stage) - 1 + (layout.chunks - 1) * pp, layout.chunks * count)
            held_by = Counter(number // pp % layout.chunks for number in range(passes))
            return [held_by[chunk] for chunk in range(layout.chunks)]
        return [min(pp - self.stage, count)]

    def kept(self, layers: Iterable[int]) -> dict[str, float]:
        """What layers keep of a micro-batch, by class."""
        kinds = Counter(self.model.has_experts(layer) for layer in layers)
        return _sum([_times(_kept(self.model, self.layout, self.train, kind), n) for kind, n in kinds.items()])

    def lasting(self) -> dict[str, float]:
        """Bytes of what is there throughout a step, by class."""
        train, layout = self.train, self.layout
        number = max(2, SIZE_OF[train.dtype])
        frozen, frozen_shard, whole, shard = (
            self.size(self.ends, sharded=cut, trained=trained) + self.size_of(self.every, sharded=cut, trained=trained)
            for trained in (False, True)
            for cut in (False, True)
        )
        if not train.lora:  # what is trained is all there is
            frozen = frozen_shard = 0.0
        master = 4.0 if train.master and number < 4 else 0.0
        weights = shard * (master or number) if layout.zero == 3 else whole * number
        return {
            "weights": weights + (frozen_shard if layout.zero == 3 else frozen) * number,
            "gradients": (shard if layout.zero >= 2 else whole) * SIZE_OF[train.grad_dtype],
            "optimizer": (shard if layout.zero else whole)
            * (4.0 * OPTIMIZER_STATES[train.optimizer] + (master if layout.zero < 3 else 0.0)),
            "buffers": self._buffers(number, whole),
        }

    @cached_property
    def layers(self) -> range:
        """The layers of the chunk whose backward is the first."""
        return self.chunks[-1] or self.chunks[0]

    def _buffers(self, number: int, whole: float) -> float:
        """Of messages between stages, keys and values of other ranks, and gradients in buckets."""
        train, layout, model = self.train, self.layout, self.model
        tokens = train.micro_batch * train.seq / layout.cp
        message = model.hidden * number * tokens / (layout.tp if layout.sequence_parallel else 1)
        found = 2 * message if layout.pp > 1 else 0.0
        if layout.cp > 1:
            pair = tokens * number * max(model.keys / layout.tp, 1) * (model.head + model.head_v)
            found += 2 * pair if layout.cp_mode == "ring" else layout.cp * pair
        if train.bucket_copies and layout.dp * layout.cp > 1 and layout.zero < 2:
            found += number * whole
        return found

    def _gathered(self, layers: int, made: Iterable[Weight], copied: float) -> dict[str, float]:
        """What ZeRO 2 and 3 have beside their shards: gathered weights, gradients that are `made`, a copy to reduce.

        As FSDP does: embedding and head stay gathered, a layer's gradients are reduced when it is done, from a copy in
        the format of reduction that lasts until the next layer is done.
        """
        if self.layout.zero < 2 or self.layout.sharded == 1:
            return {}
        number = max(2, SIZE_OF[self.train.dtype])
        held = self.size(self.ends) + min(layers, len(self.layers)) * self.largest() if self.layout.zero == 3 else 0.0
        copy = copied * SIZE_OF[self.train.grad_dtype]
        return {"buffers": number * (held + self.size(made, trained=True)) + copy}

    def largest(self, *, trained: bool = False) -> float:
        """Parameters of the largest layer, or what is trained of them."""
        return max((self.size_of([layer], trained=trained) for layer in self.every), default=0.0)

    def peak(self) -> tuple[str, dict[str, float]]:
        """The moment when most is in use, and bytes by class at it."""
        moments = dict(self._moments())
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        return moment, _sum([self.lasting(), moments[moment]])

    def changes(
        self, begin_ns: int, end_ns: int, passes: Iterable[tuple[int, int | None, str, int, int]]
    ) -> Iterator[tuple[int, dict[str, float]]]:
        """When what is in use changes, and by how much, of passes: micro-batch, layer, phase, begin and end.

        Nothing changes when the step ends, which is told too.
        """
        apart = self.layout.schedule.startswith("zb")  # weight gradients are passes of their own
        unfused: dict[int, list[tuple[int, dict[str, float]]]] = {}
        yield begin_ns, self.lasting()
        yield end_ns, {"weights": 0.0}
        yield begin_ns, self._gathered(1 + self.train.prefetch, self.ends, self.largest(trained=True))
        for micro_batch, layer, phase, first_ns, last_ns in passes:
            if layer is None:
                kept, rise = self._kept_logits(), self._one_loss()
            else:
                kept, rise = self._kept_of(layer), {"workspace": self.of_layer(layer).rise(self.train.recompute)}
            waiting = {"activations": 0.0 if layer is None or not apart else self.of_layer(layer).put_off()}
            if phase == "forward":
                yield last_ns, kept
            elif phase == "backward":
                yield first_ns, rise
                yield last_ns, _sum([waiting, _times(kept, -1), _times(rise, -1)])
                made = self._unfused(self.ends) if layer is None else self._unfused((), [layer])
                unfused.setdefault(micro_batch, []).append((last_ns, made))
            else:
                yield last_ns, _times(waiting, -1)
        for made_at in unfused.values():
            yield from made_at
            yield max(at_ns for at_ns, _ in made_at), _times(_sum([made for _, made in made_at]), -1)

    def _kept_of(self, layer: int) -> dict[str, float]:
        """What a layer keeps of a micro-batch, the first of all with token ids and the mask of the embedding."""
        first = self.first and layer == self.every[0]
        return _sum([self.kept([layer]), *([self._embedded()] if first else [])])

    def _moments(self) -> Iterator[tuple[str, dict[str, float]]]:
        """What passes, by class, at each moment that may be the peak."""
        held, layers, recompute = self._held(), self.layers, self.train.recompute
        ahead = 1 + self.train.prefetch
        head = self.ends if self.last else ()
        if self.last:
            yield "loss", _sum([held, self._logits(), self._gathered(0, (), 0)])
            yield "head", _sum([held, self._head(), self._unfused(head), self._gathered(ahead, head, 0)])
        if layers:
            rise = {"workspace": self.of_layer(layers[-1]).rise(recompute)}
            yield "backward", _sum([held, rise, self._unfused(head), self._gathered(ahead, head, 0)])
        if len(layers) > 1:
            rise = {"workspace": self.of_layer(layers[-2]).rise(recompute)}
            freed = self._freed(layers[-1:])
            yield "next layer", _sum([held, freed, rise, self._gathered(ahead, head, self.largest(trained=True))])
        if layers:
            rise = {"workspace": self.of_layer(layers[0]).rise(recompute)}
            freed = self._freed(layers[1:])
            apart = self._unfused(head, [layer for layer in self.every if layer != layers[0]])
            reduced = self._gathered(1, head, self.largest(trained=True))
            yield "gradients", _sum([held, freed, rise, apart, reduced])
        freed = self._freed(layers)
        ends = self._gathered(0, self.ends, self.size(self.ends, trained=True))
        yield "last gradients", _sum([held, freed, self._unfused(self.ends, self.every), ends])

    def _freed(self, layers: Sequence[int]) -> dict[str, float]:
        """What a micro-batch holds less once layers have gone back, but for what weight passes wait for."""
        waiting = sum(self.of_layer(i).put_off() for i in layers) if self.layout.schedule.startswith("zb") else 0.0
        return _sum([_times(self.kept(layers), -1), {"activations": waiting}])

    def _held(self) -> dict[str, float]:
        """What micro-batches in flight keep, by class."""
        parts = [_times(self.kept(c), n) for c, n in zip(self.chunks, self.in_flight(), strict=True)]
        if self.first:
            parts.append(_times(self._embedded(), self.in_flight()[0]))
        if self.layout.schedule == "zb-h1":  # a rank puts off weight gradients until it holds as much as the first
            waiting = min(self.layout.pp, self.train.micro_batches(self.layout)) - self.in_flight()[0]
            parts.append({"activations": waiting * sum(self.of_layer(i).put_off() for i in self.every)})
        return _sum(parts)

    def _embedded(self) -> dict[str, float]:
        """What the embedding keeps of a micro-batch."""
        mask = self.train.dropout * self.model.hidden / (self.layout.tp if self.layout.sequence_parallel else 1)
        return {"bookkeeping": self.train.micro_batch * self.train.seq / self.layout.cp * (8 + mask)}

    def _inputs(self) -> tuple[float, float, float]:
        """Bytes of one tensor of hidden states, whole and in this rank's part, and of what the head keeps."""
        train, layout = self.train, self.layout
        whole = train.micro_batch * train.seq / layout.cp * self.model.hidden * max(2, SIZE_OF[train.dtype])
        part = whole / layout.tp if layout.sequence_parallel else whole
        needed = 0.0 if train.lora else part if train.regather else whole  # by the gradient of the head
        return whole, part, part + needed

    def _logits(self) -> dict[str, float]:
        return _sum([_times(self._kept_logits(), self.in_flight()[-1]), self._one_loss()])

    def _kept_logits(self) -> dict[str, float]:
        """What the head and the loss keep of a micro-batch."""
        return {"logits": 4.0 * self._numbers() + self._inputs()[2]} if self.last else {}

    def _one_loss(self) -> dict[str, float]:
        """What the loss has beyond that."""
        return {"logits": (self.train.logit_bytes - 4.0) * self._numbers()} if self.last else {}

    def _numbers(self) -> float:
        """Logits of a micro-batch on this rank."""
        tokens = self.train.micro_batch * self.train.seq / self.layout.cp
        return math.ceil(self.model.vocab / self.layout.tp) * tokens

    def _head(self) -> dict[str, float]:
        whole, part, inputs = self._inputs()
        gathered = (1 + self.train.regather) * whole if part < whole else 0.0  # its gradient, and again its input
        gradient = math.ceil(self.model.vocab / self.layout.tp) / self.model.hidden * whole
        return {"logits": inputs + gradient, "workspace": gathered + part}

    def _unfused(self, ends: Iterable[Weight], layers: Iterable[int] = ()) -> dict[str, float]:
        """Gradients of a micro-batch in the format of compute, before they are added to those that last."""
        number = max(2, SIZE_OF[self.train.dtype])
        apart = not self.train.fused_grads and self.layout.zero < 2
        numbers = self.size(ends, trained=True) + self.size_of(layers, trained=True)
        return {"gradients": number * numbers if apart else 0.0}


@lru_cache(maxsize=1024)
def _kept(model: Transformer, layout: Parallelism, train: Training, experts: bool) -> dict[str, float]:
    sums = {"activations": 0.0, "bookkeeping": 0.0}
    for name, size in _tensors(model, layout, train, experts=experts).kept(train.recompute).items():
        sums["bookkeeping" if name.endswith("statistics") else "activations"] += size
    return sums


@lru_cache(maxsize=64)
def _weights(model: Transformer, experts: bool) -> tuple[Weight, ...]:
    """The weights of a layer of a kind."""
    return model.weights(next(layer for layer in range(model.layers) if model.has_experts(layer) == experts))


@lru_cache(maxsize=1024)
def _size(weights: tuple[Weight, ...], model: Transformer, layout: Parallelism, sharded: bool) -> float:
    return sum(numbers_held(w, model, layout) / (_shards(w, layout) if sharded else 1) for w in weights)


def _sum(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(n for p in parts for n in p)}


def _times(part: dict[str, float], factor: float) -> dict[str, float]:
    return {name: factor * size for name, size in part.items()}


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


def _shards(weight: Weight, layout: Parallelism) -> float:
    """Ranks that ZeRO spreads a weight over."""
    if weight.part != "experts":
        return layout.sharded
    return max(layout.sharded * layout.tp / (layout.ep * layout.expert_tp), 1)
