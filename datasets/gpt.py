"""A small GPT and its training steps: alone, data parallel, tensor parallel and as a pipeline of stages.

Plain torch, nothing of lumos_nb. `make_datasets.py` records these steps; the tests and
notebooks use the same code under the fake process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


@dataclass(frozen=True, slots=True)
class GptConfig:
    """Sizes of the model and of one rank's batch."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    vocab: int = 512
    seq: int = 64
    batch: int = 8
    micro_batches: int = 4
    dtype: torch.dtype = torch.float32


class Attention(nn.Module):
    """Causal self-attention; the number of heads follows from the (possibly sharded) projections."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.query, self.key, self.value, self.proj = (
            nn.Linear(config.hidden, config.hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (f(x).view(heads).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers with a GELU between, four times as wide inside."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.down = nn.Linear(4 * config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One transformer layer, pre-norm; its forward shows in a trace as `layer=<index>`."""

    def __init__(self, config: GptConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention, self.mlp = Attention(config), Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function(f"layer={self.index}"):
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Token and position embedding."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.seq, config.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Gpt(nn.Module):
    """Layers `first` to `last` of a GPT; the first stage embeds, the last one has the head."""

    def __init__(self, config: GptConfig, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        first, last = (config.layers * s // stages for s in (stage, stage + 1))
        self.embed = Embedding(config) if stage == 0 else None
        self.blocks = nn.ModuleList(Block(config, i) for i in range(first, last))
        is_last = stage == stages - 1
        self.norm = nn.LayerNorm(config.hidden) if is_last else None
        self.head = nn.Linear(config.hidden, config.vocab, bias=False) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


Step = Callable[..., None]
"""One training step with `delay_ms` of sleep: before the backward pass, in a pipeline before the first micro-batch."""


def delay(delay_ms: float) -> None:
    """Sleep, and let the trace say how long: a range `delay=<ms>ms`. No sleep, no range."""
    if delay_ms:
        with torch.profiler.record_function(f"delay={delay_ms:g}ms"):
            time.sleep(delay_ms / 1e3)


def make_batch(config: GptConfig, device: str) -> Tensor:
    """Tokens, (batch, seq + 1), the same on every rank and in every launch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab, (config.batch, config.seq + 1), generator=generator).to(device)


def make_model(config: GptConfig, device: str, stage: int = 0, stages: int = 1) -> Gpt:
    """A model with the same weights on every rank and in every launch."""
    torch.manual_seed(0)
    return Gpt(config, stage, stages).to(device, config.dtype)


def plain_step(model: nn.Module, config: GptConfig, device: str) -> Step:
    tokens, optimizer = make_batch(config, device), torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(delay_ms: float = 0.0) -> None:
        optimizer.zero_grad()
        loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:])
        delay(delay_ms)
        loss.backward()
        optimizer.step()

    return step


def single(config: GptConfig, device: str = "cpu") -> Step:
    """The whole model on one rank."""
    return plain_step(make_model(config, device), config, device)


def data_parallel(config: GptConfig, device: str = "cpu", *, hook: Hook | None = None) -> Step:
    """DDP over all ranks; `batch` is that of each rank. `hook` is DDP's communication hook."""
    model = nn.parallel.DistributedDataParallel(make_model(config, device))
    if hook is not None:
        model.register_comm_hook(None, hook)
    return plain_step(model, config, device)


def parallelize(model: Gpt, mesh: DeviceMesh) -> Gpt:
    """Megatron's tensor parallelism over a mesh of one dimension: two all-reduces a layer forward, two backward."""
    replicated = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    columns = ("attention.query", "attention.key", "attention.value", "mlp.up")
    plan = {"attention": replicated, "mlp": replicated, **{name: ColwiseParallel() for name in columns}}
    plan |= {"attention.proj": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def tensor_parallel(config: GptConfig, device: str = "cpu") -> Step:
    """The layers split over all ranks, embedding and head on each; every rank has the same batch."""
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    return plain_step(parallelize(make_model(config, device), mesh), config, device)


class Stage(PipelineStage):
    """A stage that names its chunks in a trace as torch's GPipe does: `Forward <micro-batch>` and `Backward ...`."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(f"Forward {fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with torch.profiler.record_function(f"Backward {bwd_chunk_id}"):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def pipeline_parallel(config: GptConfig, device: str = "cpu") -> Step:
    """As many stages as ranks, 1F1B."""
    return _pipeline(config, device, dist.group.WORLD, lambda model: None)


def grid_parallel(config: GptConfig, device: str = "cpu", *, stages: int = 4) -> Step:
    """Pipelines of `stages` ranks side by side, 1F1B; replicas of a stage average their gradients in one all-reduce."""
    replicas = dist.get_world_size() // stages
    mesh = init_device_mesh(device, (replicas, stages), mesh_dim_names=("dp", "pp"))

    def average(model: nn.Module) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads]) / replicas
        dist.all_reduce(flat, group=mesh.get_group("dp"))
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))

    return _pipeline(config, device, mesh.get_group("pp"), average)


def _pipeline(config: GptConfig, device: str, group: Any, average: Callable[[nn.Module], None]) -> Step:
    """One stage of a pipeline over the ranks of a group, with what its replicas do between backward and optimizer."""
    rank, stages = dist.get_rank(group), dist.get_world_size(group)
    model = make_model(config, device, rank, stages)
    stage = Stage(model, rank, stages, torch.device(device), group=group)
    schedule = Schedule1F1B(stage, config.micro_batches, loss_fn=loss_fn)
    tokens, optimizer = make_batch(config, device), torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(delay_ms: float = 0.0) -> None:
        optimizer.zero_grad()
        delay(delay_ms)
        if rank == 0:
            schedule.step(tokens[:, :-1], target=tokens[:, 1:])
        else:
            schedule.step(target=tokens[:, 1:])
        average(model)
        optimizer.step()

    return step
