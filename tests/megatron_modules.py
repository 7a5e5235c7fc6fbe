"""Transformers of plain torch, split over ranks as Megatron-LM splits them: what a work table is held against.

Nothing here knows of the package. A module holds its rank's shard of the weights and calls torch.distributed itself.
Activations are (sequence, batch, width); under sequence parallelism the norms see a tensor rank's part of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_exchange import (
    ColumnProduct,
    Exchange,
    FromParts,
    Gathered,
    MyPart,
    Ring,
    Split,
    ToHeads,
    all_reduce,
    gather,
    scatter,
)
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `layers` says which have experts, and `kv_rank` above 0 is latent attention (MLA).

    With `counts` ranks tell each other how many tokens their experts get, since none is dropped.
    """

    hidden: int = 256
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 32
    ffn: int = 512
    vocab: int = 2048
    layers: tuple[bool, ...] = (False,) * 4
    seq: int = 128
    batch: int = 2
    llama: bool = False
    experts: int = 0
    top_k: int = 2
    expert_ffn: int = 128
    shared_ffn: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 16
    counts: bool = True


class Linear(nn.Module):
    """A product with `outputs` (or for `rows` the inputs) split over the tensor ranks."""

    def __init__(self, inputs: int, outputs: int, split: Split, bias: bool, rows: bool = False) -> None:
        super().__init__()
        self.split, self.rows, t = split, rows, split.size("tp")
        shape = (outputs, inputs // t) if rows else (outputs // t, inputs)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(outputs if rows else outputs // t)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.rows:
            y = FromParts.apply(x @ self.weight.t(), self.split)
        else:
            y = ColumnProduct.apply(x, self.weight, self.split)
        return y if self.bias is None else y + self.bias


def norm(width: int, llama: bool) -> nn.Module:
    return nn.RMSNorm(width) if llama else nn.LayerNorm(width)


def attend(q: Tensor, k: Tensor, v: Tensor, split: Split) -> Tensor:
    """Attention of (sequence, batch, heads, width); fewer heads of keys and values than of queries are repeated."""
    if split.size("cp") > 1 and split.cp_mode == "all_gather":
        k, v = Gathered.apply(k, split), Gathered.apply(v, split)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if split.size("cp") > 1 and split.cp_mode == "ring":
        heads, kv = q.shape[1], torch.stack([k, v])
        grouped = q.reshape(q.shape[0], k.shape[1], heads // k.shape[1] * q.shape[2], q.shape[3])
        y = Ring.apply(grouped, kv, split).reshape(*q.shape[:3], v.shape[3])
    else:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y.permute(2, 0, 1, 3).flatten(2)


class Attention(nn.Module):
    def __init__(self, shape: Shape, split: Split) -> None:
        super().__init__()
        self.shape, self.split, bias = shape, split, not shape.llama
        width = shape.heads * shape.head_dim
        self.qkv = Linear(shape.hidden, width + 2 * shape.kv_heads * shape.head_dim, split, bias)
        self.out = Linear(width, shape.hidden, split, bias, rows=True)

    def forward(self, x: Tensor) -> Tensor:
        s, t = self.shape, self.split.size("tp")
        sizes = [s.heads // t * s.head_dim, *[s.kv_heads // t * s.head_dim] * 2]
        qkv = [y.unflatten(-1, (-1, s.head_dim)) for y in self.qkv(x).split(sizes, -1)]
        y = again(self.split, "selective", lambda q, k, v: attend(q, k, v, self.split), *qkv)
        return self.out(y)


class LatentAttention(nn.Module):
    """MLA: queries, keys and values from low ranks; the down projections are whole on every tensor rank."""

    def __init__(self, shape: Shape, split: Split) -> None:
        super().__init__()
        self.shape, self.split = shape, split
        self.q_down = nn.Linear(shape.hidden, shape.q_rank, bias=False)
        self.q_norm = norm(shape.q_rank, True)
        self.q_up = Linear(shape.q_rank, shape.heads * (shape.head_dim + shape.rope_dim), split, False)
        self.kv_down = nn.Linear(shape.hidden, shape.kv_rank + shape.rope_dim, bias=False)
        self.kv_norm = norm(shape.kv_rank, True)
        self.kv_up = Linear(shape.kv_rank, shape.heads * 2 * shape.head_dim, split, False)
        self.out = Linear(shape.heads * shape.head_dim, shape.hidden, split, False, rows=True)

    def forward(self, x: Tensor) -> Tensor:
        s, heads = self.shape, self.shape.heads // self.split.size("tp")
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (heads, -1))
        low, rotary = self.kv_down(x).split([s.kv_rank, s.rope_dim], -1)
        rotary = ToHeads.apply(rotary, self.split) if self.split.size("tp") > 1 else rotary
        k, v = self.kv_up(self.kv_norm(low)).unflatten(-1, (heads, -1)).split(s.head_dim, -1)
        k = torch.cat([k, rotary.unsqueeze(2).expand(-1, -1, heads, -1)], -1)
        return self.out(attend(q, k, v, self.split))


class Mlp(nn.Module):
    def __init__(self, shape: Shape, split: Split, ffn: int) -> None:
        super().__init__()
        self.llama = shape.llama
        self.up = Linear(shape.hidden, ffn * (2 if shape.llama else 1), split, not shape.llama)
        self.down = Linear(ffn, shape.hidden, split, not shape.llama, rows=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activation(self.up(x), self.llama))


def activation(x: Tensor, llama: bool) -> Tensor:
    if not llama:
        return F.gelu(x)
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


class Experts(nn.Module):
    """The experts that a rank has, or its part of each: one product a layer for all of them."""

    def __init__(self, shape: Shape, split: Split) -> None:
        super().__init__()
        n, ffn = shape.experts // split.size("ep"), shape.expert_ffn // split.size("etp")
        self.llama = shape.llama
        self.up = nn.Parameter(torch.empty(n, shape.hidden, ffn * (2 if shape.llama else 1)))
        self.down = nn.Parameter(torch.empty(n, ffn, shape.hidden))

    def forward(self, x: Tensor) -> Tensor:
        return activation(x @ self.up, self.llama) @ self.down


class Moe(nn.Module):
    """Top-k experts of equal load, and what all tokens share."""

    def __init__(self, shape: Shape, split: Split) -> None:
        super().__init__()
        self.shape, self.split = shape, split
        self.router = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.experts = Experts(shape, split)
        self.shared = Mlp(shape, split, shape.shared_ffn) if shape.shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        s, ranks = self.shape, self.split.size("ep")
        tokens = x.flatten(0, 1)
        weights, _ = (tokens @ self.router.t()).softmax(-1).topk(s.top_k, -1)
        order = torch.arange(tokens.shape[0] * s.top_k)  # as if the router spread them evenly
        sent = tokens.index_select(0, order // s.top_k)
        if ranks > 1 and s.counts:
            gather(torch.zeros(1, s.experts, dtype=torch.long), self.split, "ep")
        if ranks > 1:
            sent = Exchange.apply(sent, self.split)
        sent = ToHeads.apply(sent, self.split.of_experts)
        parts = sent.shape[0] // (tokens.shape[0] * s.top_k) * ranks  # of other ranks of the two groups
        local = sent.reshape(parts, s.experts // ranks, -1, s.hidden).transpose(0, 1).flatten(1, 2)
        got = self.experts(local).unflatten(1, (parts, -1)).transpose(0, 1).reshape(-1, s.hidden)
        got = FromParts.apply(got, self.split.of_experts)
        if ranks > 1:
            got = Exchange.apply(got, self.split)
        y = (got.reshape(-1, s.top_k, s.hidden) * weights.unsqueeze(-1)).sum(1).view_as(x)
        return y if self.shared is None else y + self.shared(x)


def again(split: Split, what: str, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The function's result, made again in the backward pass where `what` is recomputed."""
    return checkpoint(function, *inputs, use_reentrant=True) if split.recompute == what else function(*inputs)


class Layer(nn.Module):
    def __init__(self, shape: Shape, split: Split, experts: bool) -> None:
        super().__init__()
        self.split = split
        self.norm_1 = norm(shape.hidden, shape.llama)
        self.attention = (LatentAttention if shape.kv_rank else Attention)(shape, split)
        self.norm_2 = norm(shape.hidden, shape.llama)
        self.mlp = Moe(shape, split) if experts else Mlp(shape, split, shape.ffn)

    def inner(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))

    def forward(self, x: Tensor) -> Tensor:
        return again(self.split, "full", self.inner, x)


class CrossEntropy(Function):
    """The loss of logits whose vocabulary is split."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, split: Split) -> Tensor:
        logits = logits.float()
        logits = logits - all_reduce(logits.max(-1).values, split, dist.ReduceOp.MAX).unsqueeze(-1)
        first = dist.get_rank(split.groups["tp"]) * logits.shape[-1] if "tp" in split.groups else 0
        theirs = (target < first) | (target >= first + logits.shape[-1])
        index = (target - first).masked_fill(theirs, 0)
        predicted = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(theirs, 0.0)
        predicted = all_reduce(predicted, split)
        exp = logits.exp()
        total = all_reduce(exp.sum(-1), split)
        ctx.save_for_backward(exp / total.unsqueeze(-1), index, theirs)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        p, index, theirs = ctx.saved_tensors
        hit = torch.zeros_like(p).scatter(-1, index.unsqueeze(-1), (~theirs).float().unsqueeze(-1))
        return (p - hit) * grad.unsqueeze(-1), None, None


class Embedding(nn.Module):
    """Rows of a vocabulary that is split, summed over the ranks; GPT adds learnt positions."""

    def __init__(self, shape: Shape, split: Split) -> None:
        super().__init__()
        self.split = split
        self.weight = nn.Parameter(torch.empty(shape.vocab // split.size("tp"), shape.hidden))
        self.positions = None if shape.llama else nn.Parameter(torch.empty(shape.seq, shape.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        mine, n = self.weight, self.weight.shape[0]
        first = dist.get_rank(self.split.groups["tp"]) * n if "tp" in self.split.groups else 0
        theirs = (tokens < first) | (tokens >= first + n)
        x = F.embedding((tokens - first).masked_fill(theirs, 0), mine).masked_fill(theirs.unsqueeze(-1), 0.0)
        if self.positions is None:
            return FromParts.apply(x, self.split)
        x = FromParts.apply(x, replace(self.split, sp=False))
        x = x + self.positions[: x.shape[0]].unsqueeze(1)  # positions of another part of the sequence are as many
        return MyPart.apply(x, self.split) if self.split.sp else x


class Stage(nn.Module):
    """The layers of one pipeline stage, with the embedding before the first and the head behind the last."""

    def __init__(self, shape: Shape, split: Split) -> None:
        super().__init__()
        self.shape, self.split = shape, split
        self.embedding = Embedding(shape, split) if split.first else None
        self.layers = nn.ModuleList(Layer(shape, split, experts) for experts in shape.layers)
        self.norm = norm(shape.hidden, shape.llama) if split.last else None
        self.head = Linear(shape.hidden, shape.vocab, split, bias=False) if split.last else None

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.norm is None or self.head is None:
            return x
        return CrossEntropy.apply(self.head(self.norm(x)), target, self.split).mean()


class Replicas:
    """Gradients of a stage added up in buckets as they become ready; `sharded`, each rank keeps a part (ZeRO 1).

    Experts have buckets of their own: other ranks have copies of them.
    """

    def __init__(self, stage: nn.Module, split: Split, bucket_bytes: int, sharded: bool) -> None:
        self.stage, self.split, self.sharded = stage, split, sharded
        self.buckets: list[tuple[str, list[nn.Parameter]]] = []
        named = [*stage.named_parameters()]
        for group, experts in (("dp_cp", False), ("edp", True)):
            mine = [p for name, p in reversed(named) if (".experts." in name) == experts]
            bucket: list[nn.Parameter] = []
            for p in mine:
                bucket.append(p)
                if sum(q.numel() for q in bucket) * p.element_size() >= bucket_bytes or p is mine[-1]:
                    self.watch(group, bucket)
                    bucket = []

    def watch(self, group: str, bucket: list[nn.Parameter]) -> None:
        """Add up a bucket once all its gradients are there."""
        self.buckets.append((group, bucket))
        ready: list[nn.Parameter] = []

        def note(p: nn.Parameter) -> None:
            ready.append(p)
            if len(ready) == len(bucket):
                ready.clear()
                numbers = self.padded(group, bucket)
                (scatter if self.sharded else all_reduce)(numbers, self.split, group=group)

        for p in bucket:
            p.register_post_accumulate_grad_hook(note)

    def padded(self, group: str, bucket: list[nn.Parameter]) -> Tensor:
        n, size = self.split.size(group) if self.sharded else 1, sum(p.numel() for p in bucket)
        return bucket[0].new_empty(-(-size // n) * n)

    def finish(self) -> None:
        """What ends a step: gradients of what saw a part of the sequence only, then the new weights to all."""
        if self.split.sp:
            whole = (nn.LayerNorm, nn.RMSNorm, nn.Linear)
            parts = [p for m in self.stage.modules() if isinstance(m, whole) for p in m.parameters()]
            parts += [m.bias for m in self.stage.modules() if isinstance(m, Linear) and m.rows and m.bias is not None]
            parts += [m.router for m in self.stage.modules() if isinstance(m, Moe)]
            all_reduce(torch.cat([p.grad.flatten() for p in parts if p.grad is not None]), self.split)
        for group, bucket in reversed(self.buckets) if self.sharded else ():
            gather(self.padded(group, bucket).chunk(self.split.size(group))[0], self.split, group)


def micro_batch(stage: nn.Module, shape: Shape, split: Split, dtype: torch.dtype, before: int, behind: int) -> None:
    """One micro-batch forward and backward, with its messages to the ranks before and behind."""
    rows = shape.seq // split.size("cp")
    inner = (rows // (split.size("tp") if split.sp else 1), shape.batch, shape.hidden)
    tokens = torch.zeros(rows, shape.batch, dtype=torch.long)
    x = tokens
    if not split.first:
        x = torch.empty(inner, dtype=dtype, requires_grad=True)
        dist.recv(x.detach(), before)
    y = stage(x, tokens)
    if split.last:
        y.backward()
    else:
        dist.send(y.detach(), behind)
        grad = torch.empty(inner, dtype=dtype)
        dist.recv(grad, behind)
        y.backward(grad)
    if x.grad is not None:
        dist.send(x.grad, before)
