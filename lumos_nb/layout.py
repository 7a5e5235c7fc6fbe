"""How a model is trained: `Parallelism` over ranks, `Training` in batches, on a `Cluster`; and what cannot be.

All are frozen, as the `Transformer` is, and go to JSON and back. What is impossible by itself is refused when it is
made; what is impossible together, by `check` (`problems` lists every reason instead).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from lumos_nb.config import Fabric, Gpu, find_fabric, find_gpu
from lumos_nb.errors import InputError, LayoutError, require_kinds, shown
from lumos_nb.transformer import MOST_RANKS, Spec
from lumos_nb.transformer import Transformer as Transformer

SIZE_OF = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of a number by its format."""

OPTIMIZER_STATES = {"adam": 2, "momentum": 1, "sgd": 0}
"""Numbers that an optimizer keeps for a parameter, besides a master copy."""

GROUPS = ("tp", "cp", "dp", "dp_cp", "pp", "ep", "etp", "edp", "shard", "replica")
"""Groups of ranks: `dp_cp` adds up gradients, `edp` those of experts, `shard` is what ZeRO spreads over, and `replica`
joins the copies of a shard (hybrid sharding)."""

CHUNKS = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved": (2, 2**16), "zb-h1": (1, 1), "zb-v": (2, 2)}
"""Pipeline schedule -> fewest and most chunks of layers that a rank holds."""


MOST_TOKENS = 2**40
"""Of a step: a million times what is usual."""


class Parallelism(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model and its batch are spread over ranks.

    `tp` tensor parallelism (with `sequence_parallel`, norms and residuals are spread as well), `pp` pipeline stages
    with `chunks` (virtual stages) a rank under a `schedule`, `dp` replicas of which ZeRO `zero` spreads optimizer (1),
    gradients (2) and weights (3) over `shard` ranks (all replicas where it is 0), `cp` context parallelism, `ep` ranks
    that experts are spread over, each cut `etp`-fold (0: as `tp`). `split` counts the layers of each virtual stage,
    chunk by chunk (chunk 0 of every stage first); empty is evenly.

    Ranks lie as Megatron places them by default: tp fastest, then cp, dp, pp; experts: etp, ep, edp, pp.

    Raises
    ------
    LayoutError
        A size is not positive, or two contradict each other; the message names field and value.

    Examples
    --------
    >>> Parallelism(tp=2, dp=2, pp=2).groups("dp").tolist()
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    chunks: int = 1
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = "1f1b"
    dp: int = 1
    zero: int = 0
    shard: int = 0
    cp: int = 1
    cp_mode: Literal["ring", "all_gather"] = "ring"
    ep: int = 1
    etp: int = 0
    split: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._checked("zero", "shard", "etp")
        if self.world > MOST_RANKS:
            raise self.refusal("dp", f"tp x cp x dp x pp is {self.world:,} ranks: give {MOST_RANKS:,} at most")
        fewest, most = CHUNKS[self.schedule]
        if not fewest <= self.chunks <= most:
            advice = f"{self.schedule} takes {fewest if fewest == most else f'{fewest} or more'} chunk(s) a rank"
            raise self.refusal("chunks", f"{advice}: give that, or another schedule (several: interleaved, zb-v)")
        if self.chunks > 1 and self.pp == 1:
            raise self.refusal("chunks", "with pp=1 there is no pipeline: give 1")
        if self.zero > 3:
            raise self.refusal("zero", "give 0 (nothing spread), 1, 2 or 3")
        if self.shard and (not self.zero or self.dp * self.cp % self.shard):
            raise self.refusal("shard", f"give a divisor of dp x cp ({self.dp * self.cp}) together with zero=1, 2 or 3")
        if self.sequence_parallel and self.tp == 1:
            raise self.refusal("sequence_parallel", "with tp=1 there is nothing to spread over: give False")
        if self.tp * self.cp * self.dp % (self.ep * self.expert_tp):
            room = f"tp x cp x dp ({self.tp * self.cp * self.dp})"
            raise self.refusal("ep", f"ep x etp ({self.ep * self.expert_tp}) must divide {room}")
        if self.split and len(self.split) != self.pp * self.chunks:
            raise self.refusal("split", f"give the layers of each of the pp x chunks = {self.pp * self.chunks} stages")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """Ranks that one expert is cut over."""
        return self.etp or self.tp

    @property
    def sharded(self) -> int:
        """Ranks over which ZeRO spreads dense parameters; 1 without ZeRO."""
        return (self.shard or self.dp * self.cp) if self.zero else 1

    def layers_of(self, model: Transformer) -> tuple[int, ...]:
        """Number of layers of each virtual stage: stage s of chunk c is number c * pp + s (zb-v: as it runs)."""
        require_kinds(model=(model, Transformer))
        return self.split or (model.layers // (self.pp * self.chunks),) * (self.pp * self.chunks)

    def group_size(self, group: str) -> int:
        """Ranks in each group of a kind of `GROUPS`."""
        return int(self.groups(group).shape[1])

    def groups(self, group: str) -> npt.NDArray[np.int64]:
        """The ranks of every group of a kind of `GROUPS`, one row a group.

        Raises
        ------
        InputError
            There is no such kind.
        """
        require_kinds(group=(group, str))
        if group not in GROUPS:
            raise InputError(f"no group is called {shown(group)}; there are: {', '.join(GROUPS)}.")
        ranks = np.arange(self.world)
        if group in ("ep", "etp", "edp"):
            experts = ranks.reshape(self.pp, -1, self.ep, self.expert_tp)
            return _rows(experts, {"edp": (1,), "ep": (2,), "etp": (3,)}[group])
        if group in ("shard", "replica"):
            shards = ranks.reshape(self.pp, -1, self.sharded, self.tp)
            return _rows(shards, (2,) if group == "shard" else (1,))
        dense = ranks.reshape(self.pp, self.dp, self.cp, self.tp)
        return _rows(dense, {"pp": (0,), "dp": (1,), "cp": (2,), "dp_cp": (1, 2), "tp": (3,)}[group])


def _rows(ranks: npt.NDArray[np.int64], axes: tuple[int, ...]) -> npt.NDArray[np.int64]:
    size = math.prod(ranks.shape[axis] for axis in axes)
    return np.moveaxis(ranks, axes, range(-len(axes), 0)).reshape(-1, size)


class Training(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step: batches in sequences of `seq` tokens, number formats, recomputation, optimizer and what overlaps.

    `recompute` "selective" repeats the attention core, "full" every layer from its input (with `early_stop` only what
    the backward pass needs, as torch's non-reentrant checkpoints do). `flash` attention keeps no seq x seq matrices,
    and `attention` is the implementation whose price it has (of those that a calibration knows; "" is the fastest of
    them); `dropout` keeps masks. `master` holds weights and optimizer states in fp32 beside those of
    `dtype`. `capacity` is the experts' capacity factor (0: no token is dropped) and `imbalance` the ratio of the
    busiest expert rank's tokens to the mean. `bucket_bytes` is what one reduction of gradients takes (0: all at once).

    With `lora` all weights are frozen, and adapters of that rank beside the products of attention are trained (LoRA, Hu
    et al., 2021): there are gradients, their sums and optimizer states of adapters alone. 0 trains everything.

    What memory depends on beside: `fused_grads` adds gradients of weights to those of `grad_dtype` as they are made,
    else those of `dtype` of a whole micro-batch are there too; `bucket_copies` holds gradients a second time, in the
    buckets that are reduced; `regather` gathers a sequence that is spread anew in the backward pass, where else the
    whole is kept; `logit_bytes` are alive at once for each logit of a micro-batch (12 in torch's
    cross_entropy: three fp32 copies; in bf16 2 where the gradient takes the logits' place), of which the loss keeps 4
    at most until its backward pass.

    What runs beside products: `overlap_grads` sums of gradients, `overlap_weights` gathered weights (of ZeRO 1 and 2 in
    the next step's first pass, of ZeRO 3 one unit ahead), `overlap_pp` messages between stages, `overlap_wgrad` sums of
    a layer's input gradients (beside the product for its weights' gradients), `overlap_tp` all tensor-parallel
    collectives, piece by piece. `kernels` tells how what is no product is made: by kernels fused by hand (Megatron,
    Transformer Engine), by a compiler, or one by one; `launch_us` is what the host takes to issue a row of the step
    (None: what is usual for such kernels; 0: it is never late, as with CUDA graphs).

    Raises
    ------
    LayoutError
        A size is not positive, or a format or optimizer is unknown; the message names field and value.
    """

    micro_batch: int
    global_batch: int
    seq: int
    dtype: Literal["bf16", "fp16", "fp32", "tf32", "fp8"] = "bf16"
    grad_dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    recompute: Literal["none", "selective", "full"] = "none"
    early_stop: bool = False
    flash: bool = True
    attention: str = "FlashAttention-2"
    dropout: bool = False
    optimizer: Literal["adam", "momentum", "sgd"] = "adam"
    master: bool = True
    lora: int = 0
    capacity: float = 0.0
    imbalance: float = 1.0
    bucket_bytes: int = 100 * 2**20
    fused_grads: bool = True
    bucket_copies: bool = False
    regather: bool = True
    logit_bytes: int = 12
    prefetch: int = 1
    overlap_grads: bool = True
    overlap_weights: bool = True
    overlap_tp: bool = False
    overlap_wgrad: bool = True
    overlap_pp: bool = True
    kernels: Literal["fused", "compiled", "eager"] = "fused"
    launch_us: float | None = None

    def __post_init__(self) -> None:
        self._checked("bucket_bytes", "prefetch", "logit_bytes", "lora")
        if (tokens := self.global_batch * self.seq) > MOST_TOKENS:
            raise self.refusal("global_batch", f"that makes {tokens:,} tokens a step: give {MOST_TOKENS:,} at most")
        if self.logit_bytes < (least := SIZE_OF[self.kept_dtype]):
            advice = f"the head makes logits of {least} bytes ({self.kept_dtype}): give at least {least}"
            raise self.refusal("logit_bytes", advice)
        if not 0 <= self.capacity < math.inf:
            raise self.refusal("capacity", "give the capacity factor of experts, or 0 where no token is dropped")
        if not 0 <= (self.launch_us or 0) < math.inf:
            raise self.refusal("launch_us", "give what the host takes to issue an op, or 0 where it never is late")
        if not 1 <= self.imbalance < math.inf:
            raise self.refusal("imbalance", "give the busiest rank's share over the mean: at least 1")

    @property
    def kept_dtype(self) -> str:
        """Format of activations and of weights that travel: fp8 and tf32 are for products only."""
        return {"fp8": "bf16", "tf32": "fp32"}.get(self.dtype, self.dtype)

    def micro_batches(self, layout: Parallelism) -> int:
        """Micro-batches of a step that each replica works on."""
        require_kinds(layout=(layout, Parallelism))
        return self.global_batch // (self.micro_batch * layout.dp)


class Cluster(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`nodes` nodes of `gpus_per_node` GPUs; fabrics `inside` a node and `between` nodes. Data sheets or their names.

    Raises
    ------
    LayoutError
        A count is not positive, or a fabric joins fewer GPUs than a node has, or is missing.
    InputError
        No bundled data sheet is called so.

    Examples
    --------
    >>> Cluster(gpu="H100-SXM-80GB", nodes=8, inside="NVLink4 NVSwitch", between="InfiniBand NDR 400").gpus
    64
    """

    gpu: Gpu | str
    nodes: int = 1
    gpus_per_node: int = 8
    inside: Fabric | str | None = None
    between: Fabric | str | None = None

    def __post_init__(self) -> None:
        self._checked()
        if self.gpus > MOST_RANKS:
            raise self.refusal("nodes", f"that makes {self.gpus:,} GPUs: give {MOST_RANKS:,} at most")
        for field, needed in (("inside", self.gpus_per_node > 1), ("between", self.nodes > 1)):
            if needed and getattr(self, field) is None:
                raise self.refusal(field, "give a Fabric, or the name of one: 'NVLink4 NVSwitch', 'InfiniBand NDR 400'")
        _ = self.gpu_sheet, self.between_sheet
        if (inside := self.inside_sheet) and inside.max_gpus and inside.max_gpus < self.gpus_per_node:
            raise self.refusal("gpus_per_node", f"{inside.name} joins {inside.max_gpus}: give another fabric inside")

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def gpu_sheet(self) -> Gpu:
        """The GPU's data sheet."""
        return find_gpu(self.gpu) if isinstance(self.gpu, str) else self.gpu

    @property
    def inside_sheet(self) -> Fabric | None:
        """The data sheet of the fabric inside a node."""
        return find_fabric(self.inside) if isinstance(self.inside, str) else self.inside

    @property
    def between_sheet(self) -> Fabric | None:
        """The data sheet of the fabric between nodes."""
        return find_fabric(self.between) if isinstance(self.between, str) else self.between

    @property
    def fabrics(self) -> list[Fabric]:
        """The data sheets that there are: inside a node, then between nodes."""
        return [sheet for sheet in (self.inside_sheet, self.between_sheet) if sheet]

    def span(self, ranks: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Nodes that the widest of some groups (one row a group) touches, and most of its GPUs on one of them."""
        require_kinds(ranks=(ranks, np.ndarray))
        if ranks.ndim != 2 or not ranks.size or ranks.dtype.kind not in "iu":
            raise InputError(f"ranks is {shown(ranks)}: give an array of whole numbers with a row a group.")
        nodes = np.sort(ranks // self.gpus_per_node, axis=1)
        new = np.diff(nodes, axis=1, prepend=-1) > 0
        touched = new.sum(axis=1)
        widest = int(touched.argmax())
        return int(touched[widest]), int(np.unique(nodes[widest], return_counts=True)[1].max())


def check(model: Transformer, layout: Parallelism, train: Training, cluster: Cluster | None = None) -> None:
    """Raise LayoutError unless the four go together; the message lists each of the `problems`."""
    if found := problems(model, layout, train, cluster):
        raise LayoutError("\n".join(found))


def problems(model: Transformer, layout: Parallelism, train: Training, cluster: Cluster | None = None) -> list[str]:
    """Why a model cannot be trained so: one line a reason, which names field, value and what to do; empty if it can.

    Examples
    --------
    >>> train = Training(micro_batch=1, global_batch=8, seq=8192)
    >>> problems(Transformer.named("llama-3-8b"), Parallelism(tp=3), train)[0]
    'Parallelism: tp is 3; heads (32) is no multiple of it: give a divisor.'
    """
    if layout.split:
        uneven = sum(layout.split) != model.layers or min(layout.split) < 0
        advice = f"give {model.layers} layers in all"
    else:
        stages = layout.pp * layout.chunks
        uneven = model.layers % stages > 0
        advice = f"layers ({model.layers}) is no multiple of pp x chunks ({stages})"
        advice += ": give a divisor, or the layers of each stage as split"
    return [
        *_of_tp(model, layout, train),
        *_complain(layout, "split" if layout.split else "pp", uneven, advice),
        *_of_batch(layout, train),
        *_complain(
            train, "lora", train.lora > model.hidden, f"adapters are narrow: give at most hidden ({model.hidden})"
        ),
        *_of_experts(model, layout),
        *(_of_cluster(layout, train, cluster) if cluster else ()),
        *_complain(
            train, "seq", 0 < model.max_seq < train.seq, f"the model has {model.max_seq} learned positions (max_seq)"
        ),
    ]


def _complain(spec: Spec, field: str, wrong: bool, advice: str) -> list[str]:
    return [str(spec.refusal(field, advice))] if wrong else []


def _of_tp(model: Transformer, layout: Parallelism, train: Training) -> list[str]:
    cut = {"heads": model.heads, "ffn": model.ffn}
    if model.moe and model.moe.shared:
        cut["ffn of shared experts"] = model.moe.shared * model.moe.ffn
    if layout.sequence_parallel:
        cut["seq / cp"] = train.seq // layout.cp
    if not model.mla and layout.tp % model.keys:  # else each rank holds a copy of one
        cut["kv_heads"] = model.keys
    wrong = [(name, size) for name, size in cut.items() if size % layout.tp]
    return [
        line
        for name, size in wrong
        for line in _complain(layout, "tp", True, f"{name} ({size}) is no multiple of it: give a divisor")
    ]


def _of_batch(layout: Parallelism, train: Training) -> list[str]:
    replicas = train.micro_batch * layout.dp
    uneven = train.global_batch % replicas
    advice = f"give a multiple of micro_batch x dp ({replicas})"
    found = _complain(train, "global_batch", uneven > 0, advice)
    least = 2 if layout.cp > 1 else 1  # each rank takes a piece of the front and one of the back: causal work is equal
    advice = f"seq ({train.seq}) is no multiple of {least} x cp: give a divisor of half of it"
    found += _complain(layout, "cp", train.seq % (least * layout.cp) > 0, advice)
    count = train.micro_batches(layout)
    rounds = layout.schedule == "interleaved" and not uneven and count % layout.pp > 0
    advice = f"{count} micro-batches are no multiple of pp ({layout.pp}): give another global_batch"
    found += _complain(layout, "schedule", rounds, advice)
    alone = layout.pp == 1 and layout.schedule != "1f1b"
    return found + _complain(layout, "schedule", alone, "with pp=1 there is no pipeline: leave it out")


def _of_experts(model: Transformer, layout: Parallelism) -> list[str]:
    if not (moe := model.moe):
        return _complain(layout, "ep", layout.ep > 1, "the model has no experts: give 1")
    advice = f"experts ({moe.experts}) is no multiple of it: give a divisor"
    found = _complain(layout, "ep", moe.experts % layout.ep > 0, advice)
    advice = f"ffn of experts ({moe.ffn}) is no multiple of {layout.expert_tp}: give a divisor"
    return found + _complain(layout, "etp", moe.ffn % layout.expert_tp > 0, advice)


def _of_cluster(layout: Parallelism, train: Training, cluster: Cluster) -> list[str]:
    advice = f"tp x cp x dp x pp is {layout.world} ranks of {cluster.gpus} GPUs: give as many of both"
    found = _complain(cluster, "nodes", layout.world != cluster.gpus, advice)
    sheet = cluster.gpu_sheet
    advice = f"{sheet.name} computes in {', '.join(sheet.peak_flops)}: give one of them"
    return found + _complain(train, "dtype", train.dtype not in sheet.peak_flops, advice)
