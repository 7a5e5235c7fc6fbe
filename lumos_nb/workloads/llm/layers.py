"""What one rank does in a layer and at the ends of a model: every kernel and collective in order.

A layer is a list of parts (`PARTS`). Each is a `Block`: what it does forward and what it does backward. A layer's
forward is its blocks' one after another, its backward theirs in reverse. Splits follow Megatron-LM (Shoeybi et al.,
2019, and Korthikanti et al., 2022): column and row parallel products, vocabulary-parallel embedding and loss; weights
spread over replicas follow torch's FSDP2; context parallelism is ring attention with balanced halves (Liu et al., 2023;
Transformer Engine) or gathered keys (Llama 3); experts are dispatched by all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from lumos_nb.layout import GROUPS, SIZE_OF, Parallelism, Training
from lumos_nb.transformer import Transformer, Weight
from lumos_nb.workloads.work_rows import Block, Row, chain

STREAMS = {"tp": "tp", "etp": "tp", "ep": "tp", "cp": "cp", "pp": "pp"}
"""Stream of a group's collectives; those of the other groups run on "dp"."""


@dataclass(frozen=True)
class Rank:
    """Sizes that one rank sees, and the blocks made of them."""

    model: Transformer
    layout: Parallelism
    train: Training

    @cached_property
    def group_sizes(self) -> dict[str, int]:
        """Ranks in a group of each kind."""
        return {group: self.layout.group_size(group) for group in GROUPS}

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch, of which context parallelism leaves each rank a part."""
        return self.train.micro_batch * self.train.seq // self.layout.cp

    @cached_property
    def rows(self) -> int:
        """Tokens that norms and residuals see."""
        return self.tokens // (self.layout.tp if self.layout.sequence_parallel else 1)

    def width(self, numbers: float, dtype: str = "") -> int:
        """Bytes of so many numbers."""
        return math.ceil(numbers) * SIZE_OF[dtype or self.train.kept_dtype]

    def shard(self, weight: Weight) -> Weight:
        """A rank's part of a weight; where there are fewer keys than tensor ranks, each has a copy of one."""
        experts = weight.part == "experts"
        cut, spread = (self.layout.expert_tp, self.layout.ep) if experts else (self.layout.tp, 1)
        shape = [*weight.shape]
        if weight.split != "none":
            axis = weight.split == "in"
            shape[axis] = math.ceil(shape[axis] / cut)
        if weight.name.startswith("qkv"):
            shape[0] = (self.heads[0] + 2 * self.heads[1]) * self.model.head
        return weight._replace(shape=tuple(shape), copies=weight.copies // spread)

    def trained(self, weights: Iterable[Weight]) -> list[Weight]:
        """What of some weights has gradients: all, or with LoRA their adapters."""
        rank = self.train.lora
        return [one for weight in weights for one in (weight.adapters(rank) if rank else (weight,))]

    # Blocks of one kind of op

    def comm(self, group: str, collective: str, size_bytes: float, peer: int | None = None) -> list[Row]:
        """A collective, or nothing in a group of one."""
        n = self.group_sizes[group]
        row = {"kind": "comm", "stream": STREAMS.get(group, "dp"), "collective": collective, "group": group}
        return [row | {"group_size": n, "size_bytes": int(size_bytes), "peer": peer}] if n > 1 and size_bytes else []

    def sums(self, group: str, size_bytes: float, sp: bool) -> Block:
        """Partial results added up behind a row-parallel product: whole ones, or a part of the sequence each."""
        if sp:
            return Block(self.comm(group, "reduce_scatter", size_bytes), self.comm(group, "all_gather", size_bytes))
        return Block(self.comm(group, "all_reduce", size_bytes), [])

    def spreads(self, group: str, size_bytes: float, sp: bool) -> Block:
        """The mirror of `sums`, in front of a column-parallel product."""
        return Block(*reversed(self.sums(group, size_bytes, sp)))

    def moves(self, op: str, rows: float, cols: int, dtype: str = "", weight: str | None = None) -> Block:
        """An op that moves data, and its gradient."""
        row: Row = {"kind": "compute", "op": op, "dtype": dtype or self.train.kept_dtype}
        row |= {"rows": math.ceil(rows), "cols": cols, "weight": weight}
        return Block([row | {"pass": "fwd"}], [row | {"pass": "bwd"}])

    def product(self, weight: Weight, rows: float) -> Block:
        """Rows by a weight, and its gradients by activations and, unless it is frozen, by weights.

        These are added to those before.
        """
        mine, experts = self.shard(weight), weight.part == "experts"
        bias = self.model.bias and weight.part not in ("head", "router")
        op = "grouped_gemm" if experts else "gemm_bias" if bias else "gemm"
        (n, k), m = mine.shape, max(1, math.ceil(rows))
        dtype = self.train.kept_dtype if weight.is_adapter else self.train.dtype
        row = {"kind": "compute", "op": op, "dtype": dtype, "groups": mine.copies, "m": m, "n": n, "k": k}
        row["weight"] = weight.name
        back = row | {"op": op.removesuffix("_bias")}
        by_input = back | {"pass": "bwd_grad_act"}
        if self.train.lora and not weight.is_adapter:
            return Block([row | {"pass": "fwd"}], [by_input])
        apart = self.adds_apart
        by_weight = {"pass": "bwd_grad_w", "accumulate": not apart}
        by_weight["out_dtype"] = self.train.kept_dtype if apart else self.train.grad_dtype
        add: Row = {"kind": "compute", "op": "add", "dtype": self.train.grad_dtype, "pass": "fwd"}
        add |= {"phase": "backward_weight", "weight": weight.name, "rows": mine.copies * n, "cols": k}
        backward = [by_input, back | by_weight, *([add] if apart else [])]
        return Block([row | {"pass": "fwd"}], backward)

    @cached_property
    def adds_apart(self) -> bool:
        """Whether a gradient is added to those of other micro-batches by a kernel of its own."""
        train, layout = self.train, self.layout
        several = train.micro_batches(layout) > 1 or train.grad_dtype != self.train.kept_dtype
        return not train.fused_grads and layout.zero < 3 and several

    def linear(self, weight: Weight) -> Block:
        """A product with a weight, cut as it says, and what tensor parallelism exchanges before and after."""
        (out, into), sp = weight.shape, self.layout.sequence_parallel
        if weight.split == "none":
            return chain([self.product(weight, self.rows), self.adapter(weight, self.rows)])
        forward, (act, *by_weight) = product = self.product(weight, self.tokens)
        adapter = self.adapter(weight, self.tokens)
        if weight.split == "in":
            return chain([product, adapter, self.sums("tp", self.wide(out), sp)])
        before, after = self.spreads("tp", self.wide(into), sp)
        needed = self.train.regather and (by_weight or adapter.backward)
        anew = [row | {"phase": "backward_weight"} for row in before] if needed else []
        return Block([*before, *forward, *adapter.forward], [*anew, *adapter.backward, act, *after, *by_weight])

    def adapter(self, weight: Weight, rows: float) -> Block:
        """With LoRA the two narrow products beside one of attention; partial results are summed with its own."""
        narrow = weight.adapters(self.train.lora) if self.train.lora else ()
        products = [self.product(one, rows) for one in narrow]
        return chain([*products, self.moves("add", rows, self.shard(narrow[1]).shape[0])]) if narrow else Block([], [])

    def wide(self, numbers: int) -> int:
        """Bytes of so many numbers for every token."""
        return self.width(self.tokens * numbers)

    # Parts of a layer

    def norm(self, weight: Weight) -> Block:
        """A norm over a tensor rank's part of the sequence."""
        op = "rmsnorm" if self.model.norm == "rms" else "layernorm"
        return self.moves(op, self.rows, weight.shape[0], weight=weight.name)

    def residual(self, weight: Weight) -> Block:
        """What a half layer adds to its input, a bias with it."""
        dropped = [self.moves("dropout", self.rows, self.model.hidden)] if self.train.dropout else []
        bias = f"{weight.name} bias" if self.model.bias and weight.split == "in" else None
        return chain([*dropped, self.moves("add", self.rows, self.model.hidden, weight=bias)])

    def activation(self, down: Weight) -> Block:
        """What is between the two products of an MLP."""
        rows = self.expert_tokens if down.part == "experts" else self.tokens
        return self.moves("act_mul" if self.model.gated else "gelu", rows, self.shard(down).shape[1])

    def rotary(self, _: Weight) -> Block:
        """The part of a latent key that all heads share, to all tensor ranks."""
        mla = self.model.mla
        return self.spreads("tp", self.wide(mla.rope), self.layout.sequence_parallel) if mla else Block([], [])

    def rope(self, _: Weight) -> Block:
        """Rotary positions of queries and keys."""
        model, mla = self.model, self.model.mla
        if model.positions != "rope":
            return Block([], [])
        cols = model.heads // self.layout.tp * mla.rope + mla.rope if mla else self.heads[0] * model.head
        return self.moves("rope", self.tokens, cols if mla else cols + self.heads[1] * model.head)

    @cached_property
    def heads(self) -> tuple[int, int]:
        """A tensor rank's heads of queries, and of keys and values: at least one."""
        return self.model.heads // self.layout.tp, max(1, self.model.keys // self.layout.tp)

    def core(self, _: Weight) -> Block:
        """Attention of queries with keys, and how context parallelism brings the keys there."""
        cp, ring = self.layout.cp, self.layout.cp_mode == "ring"
        here, half = self.train.seq // cp, self.train.seq // (2 * cp)
        # Ranks hold two stretches of the sequence, the n-th and the n-th last, so that masks leave all the same work.
        gathered = [(half, half, True), (half, 2 * cp * half, True)] if cp > 1 else [(here, here, True)]
        tiles = [(here, here, True), *[(here, half, False)] * (cp - 1)] if ring else gathered
        blocks = [self.attend(*tile) for tile in tiles]
        numbers = self.tokens * self.heads[1]
        if ring:
            kv = self.width(numbers * (self.model.head + self.model.head_v))
            shift = self.comm("cp", "send", kv, 1) + self.comm("cp", "recv", kv, -1)
            passes = [shift] * (cp - 1) + [[]]
            block = Block(
                [r for by, b in zip(passes, blocks, strict=True) for r in (*by, *b.forward)],
                [r for by, b in zip(passes, blocks, strict=True) for r in (*by, *b.backward, *shift)],
            )
        else:
            sizes = [self.width(numbers * d) * cp for d in (self.model.head, self.model.head_v)]
            block = chain([*(self.spreads("cp", size, True) for size in sizes), *blocks])
        return _repeated(block) if self.train.recompute == "selective" else block

    def attend(self, seq_q: int, seq_kv: int, causal: bool) -> Block:
        """Some queries with some keys."""
        batch, (heads, keys), model = self.train.micro_batch, self.heads, self.model
        dtype = "bf16" if self.train.dtype == "fp8" else self.train.dtype
        row: Row = {"kind": "compute", "dtype": dtype, "batch": batch}
        if self.train.flash:
            row |= {"op": "attention", "seq_q": seq_q, "seq_kv": seq_kv, "heads": heads, "kv_heads": keys}
            row |= {"head_dim": model.head, "head_dim_v": model.head_v, "causal": causal}
            row["method"] = self.train.attention or None
            return Block([row | {"pass": "fwd"}], [row | {"pass": "bwd"}])
        row |= {"op": "bmm", "batch": batch * heads, "m": seq_q}
        scores, values = row | {"n": seq_kv, "k": model.head}, row | {"n": model.head_v, "k": seq_kv}
        dropped = [self.moves("dropout", batch * heads * seq_q, seq_kv)] if self.train.dropout else []
        multiply = [Block([r | {"pass": "fwd"}], [r | {"pass": "bwd"}]) for r in (scores, values)]
        return chain([multiply[0], self.moves("softmax", batch * heads * seq_q, seq_kv), *dropped, multiply[1]])

    # Experts

    @cached_property
    def sent(self) -> int:
        """Tokens that a rank sends to experts; each `topk` times, or as the capacity of experts has it."""
        moe, capacity = self.model.moe, self.train.capacity
        if moe is None:
            return 0
        mean = self.rows * moe.topk / moe.experts
        return moe.experts * math.ceil(mean * capacity) if capacity else self.rows * moe.topk

    @cached_property
    def got(self) -> int:
        """Tokens that the busiest rank gets; a capacity leaves all the same."""
        return self.sent if self.train.capacity else math.ceil(self.sent * self.train.imbalance)

    @cached_property
    def expert_tokens(self) -> int:
        """Tokens of the experts of a rank, with those of the ranks that share them."""
        return self.got * (self.layout.expert_tp if self.layout.sequence_parallel else 1)

    def dispatch(self, router: Weight) -> Block:
        """Tokens to the ranks of their experts, and to the ranks that share an expert."""
        experts, counts = router.shape[0], SIZE_OF["fp32"] * 2 * router.shape[0] * self.layout.ep
        return chain(
            [
                self.moves("softmax", self.rows, experts, "fp32"),
                Block(self.comm("ep", "all_gather", 0 if self.train.capacity else counts), []),  # tokens an expert
                self.moves("index", self.sent, self.model.hidden),
                self.all_to_all(),
                self.spreads("etp", self.width(self.expert_tokens * self.model.hidden), self.layout.sequence_parallel),
            ]
        )

    def combine(self, _: Weight) -> Block:
        """And back."""
        added = self.sums("etp", self.width(self.expert_tokens * self.model.hidden), self.layout.sequence_parallel)
        return chain([added, self.all_to_all(), self.moves("index", self.sent, self.model.hidden)])

    def all_to_all(self) -> Block:
        """Tokens between the ranks that have different experts."""
        row = self.comm("ep", "all_to_all", self.width(self.got * self.model.hidden))
        return Block(row, row)

    def experts(self, weight: Weight) -> Block:
        """One product for all experts of a rank."""
        return self.product(weight, self.expert_tokens * self.layout.ep / weight.copies)

    # The ends of the model

    def first(self) -> Block:
        """The embedding, whose vocabulary is split."""
        model, sp, learned = self.model, self.layout.sequence_parallel, self.model.positions == "learned"
        summed = self.sums("tp", self.wide(model.hidden), sp)
        dropped = [self.moves("dropout", self.rows, model.hidden)] if self.train.dropout else []
        lookup = self.moves("embedding_lookup", self.tokens, model.hidden, weight="tokens")
        parts = [lookup, summed, *dropped]
        if learned:  # positions are added to the whole sequence, which is then cut
            whole, cut = self.sums("tp", self.wide(model.hidden), False), Block([], summed.backward)
            added = self.moves("add", self.tokens, model.hidden, weight="positions")
            parts = [lookup, whole, added, cut, *dropped]
        block = _parted("embedding", chain(parts))
        return block._replace(backward=[]) if self.train.lora else block

    def last(self) -> Block:
        """The last norm, the head and the loss over a split vocabulary."""
        model, scores = self.model, self.width(self.tokens, "fp32")
        norm = self.norm(model.last_weights()[0])
        head = self.linear(Weight("head", "head", (model.vocab, model.hidden), "out"))
        loss = self.moves("cross_entropy", self.tokens, math.ceil(model.vocab / self.layout.tp), "fp32")
        summed = Block(self.comm("tp", "all_reduce", scores) * 3, [])  # greatest logit, the target's, sum of exp
        return chain([_parted("norm", norm), _parted("head", head), _parted("loss", chain([summed, loss]))])

    def layer(self, weights: Iterable[Weight]) -> Block:
        """One layer, by the weights that it has."""
        named = {(w.part, w.name): w for w in weights}
        parts = [(part, make, named.get((part, of))) for part, of, make in PARTS]
        block = chain(_parted(part, make(self, weight)) for part, make, weight in parts if weight)
        return _repeated(block, early_stop=self.train.early_stop) if self.train.recompute == "full" else block


Maker = Callable[[Rank, Weight], Block]
PARTS: tuple[tuple[str, str, Maker], ...] = (
    ("norm", "before attention", Rank.norm),
    ("attention", "q down", Rank.linear),
    ("attention", "q norm", Rank.norm),
    ("attention", "q", Rank.linear),
    ("attention", "kv down", Rank.linear),
    ("attention", "kv", Rank.rotary),
    ("attention", "kv norm", Rank.norm),
    ("attention", "kv", Rank.linear),
    ("attention", "qkv", Rank.linear),
    ("attention", "projection", Rank.rope),
    ("attention", "projection", Rank.core),
    ("attention", "projection", Rank.linear),
    ("attention", "projection", Rank.residual),
    ("norm", "before mlp", Rank.norm),
    ("mlp", "up", Rank.linear),
    ("mlp", "down", Rank.activation),
    ("mlp", "down", Rank.linear),
    ("mlp", "down", Rank.residual),
    ("router", "router", Rank.linear),
    ("router", "router", Rank.dispatch),
    ("experts", "up", Rank.experts),
    ("experts", "down", Rank.activation),
    ("experts", "down", Rank.experts),
    ("router", "router", Rank.combine),
    ("shared", "up", Rank.linear),
    ("shared", "down", Rank.activation),
    ("shared", "down", Rank.linear),
    ("router", "router", Rank.residual),
)
"""Parts of a layer in order: the part, the weight without which it is not there, and what makes its block."""


def _parted(part: str, block: Block) -> Block:
    return Block(*([{"part": part} | row for row in rows] for rows in block))


def _repeated(block: Block, *, early_stop: bool = False) -> Block:
    """Backward begins with forward once more; stopping early, without the last product and what comes behind it."""
    again = block.forward
    if early_stop:
        again = again[: max(i for i, row in enumerate(again) if row.get("weight") and row.get("k"))]
    return block._replace(backward=[*(row | {"again": True} for row in again), *block.backward])
