"""Transformer layers in plain torch as one tensor parallel rank of a job, and the bytes that are alive as they train.

Everything runs on the meta device: shapes, storages and autograd are real, no number is computed. A collective is what
it does to memory: a gather makes a tensor of the whole sequence, a scatter one of a part.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lumos_nb.layout import Parallelism, Training, Transformer

META: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Alive(TorchDispatchMode):
    """Adds up the storages made under it that somebody holds, after each op; `most` is the peak in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.count(made)
        return made

    def count(self, made: Any) -> None:
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                key = id(storage)
                self.storages[key] = weakref.ref(storage, lambda _, key=key: self.storages.pop(key, None))
        self.most = max(self.most, self.bytes)

    @property
    def bytes(self) -> int:
        """Of all that is alive; FSDP empties the storages of gathered weights instead of dropping them."""
        return sum(storage.nbytes() for held in list(self.storages.values()) if (storage := held()) is not None)


def saved_bytes(run: Any, *, but: set[int]) -> int:
    """Bytes that autograd saves in `run`, each storage once, without those whose `_cdata` is in `but`."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in but:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = run()  # as long as this is held, no storage is used for another tensor
    del held
    return sum(kept.values())


class Gather(torch.autograd.Function):
    """The whole sequence from its parts; backward a part of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return part.new_empty(part.shape[0] * ranks, *part.shape[1:])

    @staticmethod
    def backward(ctx: Any, whole: Tensor) -> tuple[Tensor, None]:
        return whole.new_empty(whole.shape[0] // ctx.ranks, *whole.shape[1:]), None


class Scatter(torch.autograd.Function):
    """A part of the sequence from partial sums of the whole; backward the whole gradient from its parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return whole.new_empty(whole.shape[0] // ranks, *whole.shape[1:])

    @staticmethod
    def backward(ctx: Any, part: Tensor) -> tuple[Tensor, None]:
        return part.new_empty(part.shape[0] * ctx.ranks, *part.shape[1:]), None


class GatheredLinear(torch.autograd.Function):
    """Megatron's column parallel layer: keeps its part of the sequence, gathers the whole again in the backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, ranks: int) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.ranks = ranks
        return F.linear(part.new_empty(part.shape[0] * ranks, *part.shape[1:]), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        part, weight = ctx.saved_tensors
        whole = part.new_empty(part.shape[0] * ctx.ranks, *part.shape[1:])
        of_whole = gradient @ weight
        of_weight = gradient.flatten(0, -2).T @ whole.flatten(0, -2)
        return of_whole.new_empty(part.shape), of_weight, None


class FlashAttention(torch.autograd.Function):
    """Attention that keeps queries, keys, values, its output and a statistic a query: what fused kernels keep."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, width: int) -> Tensor:
        mixed = qkv.new_empty(*qkv.shape[:2], heads * width)
        ctx.save_for_backward(qkv, mixed, qkv.new_empty(*qkv.shape[:2], heads, dtype=torch.float32))
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None, None


class RmsNorm(torch.autograd.Function):
    """A fused root-mean-square norm: keeps its input and a scale a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class InPlaceLoss(torch.autograd.Function):
    """A loss that writes the gradient of the logits where they were: what fused kernels do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


class Layer(nn.Module):
    """One layer of one tensor parallel rank: sequence first, as Megatron has it."""

    def __init__(self, model: Transformer, layout: Parallelism, train: Training, device: str = "meta") -> None:
        super().__init__()
        self.model, self.train_as, self.ranks = model, train, layout.tp
        self.spread = layout.sequence_parallel
        self.heads, self.keys = model.heads // layout.tp, max(model.keys // layout.tp, 1)
        ffn, hidden = model.ffn // layout.tp, model.hidden
        make = {"device": device, "dtype": FORMATS[train.dtype]}
        self.norms = nn.ModuleList(self.norm(hidden, make) for _ in range(2))
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.keys) * model.head, bias=model.bias, **make)
        self.projection = nn.Linear(self.heads * model.head, hidden, bias=model.bias, **make)
        self.up = nn.Linear(hidden, (1 + model.gated) * ffn, bias=model.bias, **make)
        self.down = nn.Linear(ffn, hidden, bias=model.bias, **make)
        self.adapters = nn.ModuleDict()
        if train.lora:
            self.requires_grad_(False)
            for name in ("qkv", "projection"):
                into, out = getattr(self, name).in_features, getattr(self, name).out_features
                narrow = (
                    nn.Linear(into, train.lora, bias=False, **make),
                    nn.Linear(train.lora, out, bias=False, **make),
                )
                self.adapters[name] = nn.Sequential(*narrow)

    def adapted(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        return out + self.adapters[name](x) if name in self.adapters else out

    def norm(self, hidden: int, make: dict[str, Any]) -> nn.Module:
        if self.model.norm == "layer":
            return nn.LayerNorm(hidden, **make)
        holder = nn.Module()
        holder.weight = nn.Parameter(torch.ones(hidden, **make))
        return holder

    def normed(self, x: Tensor, at: int) -> Tensor:
        norm = self.norms[at]
        return norm(x) if self.model.norm == "layer" else RmsNorm.apply(x, norm.weight)

    def column(self, x: Tensor, linear: nn.Linear) -> Tensor:
        if self.spread and self.train_as.regather:
            out = GatheredLinear.apply(x, linear.weight, self.ranks)
            return out if linear.bias is None else out + linear.bias
        return linear(Gather.apply(x, self.ranks) if self.spread else x)

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        out = linear(x)
        return Scatter.apply(out, self.ranks) if self.spread else out

    def core(self, qkv: Tensor) -> Tensor:
        heads, head = self.heads, self.model.head
        if self.train_as.flash:
            return FlashAttention.apply(qkv, heads, head)
        parts = qkv.unflatten(-1, (heads, 3, head)).unbind(-2)  # a head's queries, keys, values side by side
        q, k, v = (part.reshape(part.shape[0], -1, head).transpose(0, 1) for part in parts)
        shares = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
        mixed = torch.bmm(self.dropped(shares), v)
        return mixed.transpose(0, 1).reshape(*qkv.shape[:2], heads * head)

    def dropped(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.1, True)[0] if self.train_as.dropout else x

    def mlp(self, x: Tensor) -> Tensor:
        up = self.column(x, self.up)
        if not self.model.gated:
            return self.row(F.gelu(up), self.down)
        gate, up = up.chunk(2, -1)
        return self.row(F.silu(gate) * up, self.down)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.normed(x, 0)
        qkv = self.adapted("qkv", normed, self.column(normed, self.qkv))
        again = self.train_as.recompute == "selective"
        mixed = checkpoint(self.core, qkv, use_reentrant=False) if again else self.core(qkv)
        x = x + self.dropped(self.adapted("projection", mixed, self.row(mixed, self.projection)))
        return x + self.dropped(self.mlp(self.normed(x, 1)))


class Decoder(nn.Module):
    """Embedding, layers, head and loss of one rank."""

    def __init__(self, model: Transformer, layout: Parallelism, train: Training, device: str = "meta") -> None:
        super().__init__()
        make = {"device": device, "dtype": FORMATS[train.dtype]}
        self.model, self.layout, self.train_as = model, layout, train
        self.embedding = nn.Embedding(math.ceil(model.vocab / layout.tp), model.hidden, **make)
        self.layers = nn.ModuleList(Layer(model, layout, train, device) for _ in range(model.layers))
        self.last = Layer.norm(self.layers[0], model.hidden, make)
        self.head = nn.Linear(model.hidden, math.ceil(model.vocab / layout.tp), bias=False, **make)
        if train.lora:
            for part in (self.embedding, self.last, self.head):
                part.requires_grad_(False)

    def repeated(self, layer: nn.Module, x: Tensor) -> Tensor:
        again = self.train_as.recompute == "full"
        return checkpoint(layer, x, use_reentrant=False) if again else layer(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.train_as.lora:  # as PEFT does, so that checkpoints have something to go back to
            x.requires_grad_()
        if self.layers[0].spread:
            x = Scatter.apply(x, self.layout.tp)
        x = self.layers[0].dropped(x)
        for layer in self.layers:
            x = self.repeated(layer, x)
        x = self.last(x) if self.model.norm == "layer" else RmsNorm.apply(x, self.last.weight)
        logits = self.layers[0].column(x, self.head)
        del x
        if self.train_as.logit_bytes == logits.element_size():
            return InPlaceLoss.apply(logits)
        return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
