"""What ranks of a split tell each other, as autograd functions of plain torch after Megatron-LM: for megatron_modules.

Nothing here knows of the package. Activations are (sequence, batch, width).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Split:
    """How it is split: process groups by name (a missing one is of one rank), and the switches."""

    groups: dict[str, Any]
    sp: bool = False
    cp_mode: str = "ring"
    recompute: str = "none"
    regather: bool = True
    first: bool = True
    last: bool = True

    @property
    def of_experts(self) -> Split:
        """The same with the ranks that share experts in the place of the tensor ranks."""
        groups = {name: group for name, group in self.groups.items() if name != "tp"}
        return replace(self, groups=groups | ({"tp": groups["etp"]} if "etp" in groups else {}))

    def size(self, name: str) -> int:
        return dist.get_world_size(self.groups[name]) if name in self.groups else 1


def all_reduce(x: Tensor, split: Split, op: Any = dist.ReduceOp.SUM, group: str = "tp") -> Tensor:
    x = x.contiguous()
    if split.size(group) > 1:
        dist.all_reduce(x, op, group=split.groups[group])
    return x


def gather(x: Tensor, split: Split, group: str = "tp") -> Tensor:
    if split.size(group) == 1:
        return x
    out = x.new_empty(x.shape[0] * split.size(group), *x.shape[1:])
    dist.all_gather_single(out, x.contiguous(), group=split.groups[group])
    return out


def scatter(x: Tensor, split: Split, group: str = "tp") -> Tensor:
    if split.size(group) == 1:
        return x
    out = x.new_empty(x.shape[0] // split.size(group), *x.shape[1:])
    dist.reduce_scatter_single(out, x.contiguous(), group=split.groups[group])
    return out


class ColumnProduct(Function):
    """x W, with the outputs split; with sequence parallelism x is gathered, and then kept, or gathered again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, split: Split) -> Tensor:
        whole = gather(x, split) if split.sp else x
        ctx.save_for_backward(x if split.regather else whole, weight)
        ctx.split = split
        return whole @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        x = gather(x, ctx.split) if ctx.split.sp and ctx.split.regather else x
        grad_x = grad @ weight
        grad_x = scatter(grad_x, ctx.split) if ctx.split.sp else all_reduce(grad_x, ctx.split)
        return grad_x, grad.flatten(0, 1).t() @ x.flatten(0, 1), None


class FromParts(Function):
    """The sum of every tensor rank's partial result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return scatter(x, split) if split.sp else all_reduce(x.clone(), split)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather(grad, ctx.split) if ctx.split.sp else grad, None


class MyPart(Function):
    """A tensor rank's part of a whole sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return x.chunk(split.size("tp"))[dist.get_group_rank(split.groups["tp"], dist.get_rank())]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather(grad, ctx.split), None


class ToHeads(Function):
    """A small tensor that every tensor rank's heads use: the rotary part of a latent key."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return gather(x, split) if split.sp else x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scatter(grad, ctx.split) if ctx.split.sp else all_reduce(grad, ctx.split), None


class Ring(Function):
    """Attention over keys and values that travel round the context ranks; their gradients travel behind them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, split: Split) -> Tensor:
        ctx.save_for_backward(q, kv)
        ctx.split = split
        n, here, scores, values = split.size("cp"), kv, [], []
        for step in range(n):
            there = shift(here, split) if step < n - 1 else here
            k, v = here.unbind(0)
            scores.append(q @ k.transpose(-1, -2))
            values.append(v)
            here = there
        weights = torch.cat(scores, -1).softmax(-1)
        return weights @ torch.cat(values, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, kv = ctx.saved_tensors
        n, here, grad_kv, grad_q = ctx.split.size("cp"), kv, torch.zeros_like(kv), torch.zeros_like(q)
        for step in range(n):
            there = shift(here, ctx.split) if step < n - 1 else here
            k, v = here.unbind(0)
            weights = (q @ k.transpose(-1, -2)).softmax(-1)
            grad_scores = grad @ v.transpose(-1, -2) * weights
            grad_q = grad_q + grad_scores @ k
            part = torch.stack([grad_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad])
            grad_kv = shift(grad_kv + part, ctx.split)
            here = there
        return grad_q, grad_kv, None


def shift(x: Tensor, split: Split) -> Tensor:
    """What the context rank before sends, after sending x to the one behind."""
    group, got = split.groups["cp"], torch.empty_like(x)
    ranks = dist.get_process_group_ranks(group)
    me = ranks.index(dist.get_rank())
    works = [
        dist.isend(x.contiguous(), ranks[(me + 1) % len(ranks)], group=group),
        dist.irecv(got, ranks[me - 1], group=group),
    ]
    for work in works:
        work.wait()
    return got


class Gathered(Function):
    """A context rank's keys or values, from all ranks; the gradients go back where they came from."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return gather(x, split, "cp")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scatter(grad, ctx.split, "cp"), None


class Exchange(Function):
    """Tokens to the ranks of their experts, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=split.groups["ep"])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Exchange.forward(ctx, grad, ctx.split), None
