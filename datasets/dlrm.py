"""A small DLRM and its training step: alone, and with its embedding tables spread over ranks.

Plain torch, nothing of lumos_nb. `benchmarks/dlrm_steps.py` measures these steps; the tests run the same code under the
fake process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

BATCHES = 3
"""Batches that steps take in turn, so that no step finds the rows of the one before it in a cache."""


@dataclass(frozen=True, slots=True)
class DlrmConfig:
    """Sizes of the model and of the batch over all ranks; a table is `rows`, `dims` and `pooling` of one place."""

    batch: int = 512
    dense: int = 13
    bottom: tuple[int, ...] = (128, 32)
    top: tuple[int, ...] = (128, 1)
    rows: tuple[int, ...] = (100_000,) * 8
    dims: tuple[int, ...] = (32,) * 8
    pooling: tuple[int, ...] = (10,) * 8
    alpha: float = 1.0
    interaction: str = "dot"
    seed: int = 0

    @property
    def features(self) -> int:
        """Inputs of the top MLP."""
        vectors = len(self.dims) + 1
        if self.interaction == "cat":
            return self.bottom[-1] + sum(self.dims)
        return self.bottom[-1] + vectors * (vectors - 1) // 2


def mlp(widths: tuple[int, ...], *, ends_in_relu: bool) -> nn.Sequential:
    """Linear layers with a ReLU behind each, behind the last one if it `ends_in_relu`."""
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*(layers if ends_in_relu else layers[:-1]))


class Dense(nn.Module):
    """Everything but the tables."""

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.bottom = mlp((config.dense, *config.bottom), ends_in_relu=True)
        self.top = mlp((config.features, *config.top), ends_in_relu=False)
        self.interaction, self.vectors = config.interaction, len(config.dims) + 1
        self.register_buffer("pairs", torch.tril_indices(self.vectors, self.vectors, -1))

    def interact(self, x: Tensor, pooled: list[Tensor]) -> Tensor:
        """One vector of the dense and the pooled ones."""
        joined = torch.cat([x, *pooled], 1)
        if self.interaction == "cat":
            return joined
        vectors = joined.view(len(x), self.vectors, -1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([x, products[:, self.pairs[0], self.pairs[1]]], 1)


class AllToAll(torch.autograd.Function):
    """An exchange of rows, whose gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, given: list[int], got: list[int]) -> Tensor:
        ctx.sizes = given, got
        received = sent.new_empty(sum(got))
        dist.all_to_all_single(received, sent, got, given)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        given, got = ctx.sizes
        back = gradient.new_empty(sum(given))
        dist.all_to_all_single(back, gradient.contiguous(), given, got)
        return back, None, None


def zipf(rng: np.random.Generator, rows: int, count: int, alpha: float) -> np.ndarray:
    """Indices of a table whose k-th most popular row, somewhere in it, has weight k to the power of -alpha."""
    weight = np.cumsum(np.arange(1, rows + 1, dtype=float) ** -alpha)
    rank = np.searchsorted(weight, rng.uniform(0, weight[-1], count), side="right")
    return rng.permutation(rows)[np.minimum(rank, rows - 1)]


def table_batches(config: DlrmConfig, table: int) -> list[np.ndarray]:
    """Indices of a table, of each batch, the same on every rank and in every launch."""
    rng, count = np.random.default_rng((config.seed, table)), config.batch * config.pooling[table]
    drawn = zipf(rng, config.rows[table], BATCHES * count, config.alpha)
    return np.split(drawn.astype(np.int64), BATCHES)


Step = Callable[[], None]


class Tables:
    """The tables of a rank, all of them views of one buffer."""

    def __init__(self, config: DlrmConfig, mine: list[int], buffer: Tensor) -> None:
        self.config, self.mine, self.weights, at = config, mine, [], 0
        for table in mine:
            size = config.rows[table] * config.dims[table]
            whole = buffer[at : at + size].view(config.rows[table], config.dims[table])
            self.weights.append(whole.detach().requires_grad_())
            at += size
        self.offsets = [torch.arange(0, config.batch * config.pooling[t], config.pooling[t]) for t in mine]
        self.factors = [torch.ones(config.batch * config.pooling[t]) for t in mine]

    def look_up(self, indices: list[Tensor]) -> list[Tensor]:
        """Sums of rows, one a sample and table."""
        given = zip(indices, self.weights, self.offsets, self.factors, strict=True)
        return [
            F.embedding_bag(i, weight, offsets, mode="sum", sparse=True, per_sample_weights=factors)
            for i, weight, offsets, factors in given
        ]


def _optimizers(dense: nn.Module, tables: Tables) -> list[torch.optim.Optimizer]:
    both = [list(dense.parameters()), tables.weights]
    return [torch.optim.SGD(parameters, lr=1e-4) for parameters in both if parameters]


def _inputs(config: DlrmConfig, batch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(config.seed)
    return torch.rand(batch, config.dense, generator=generator), torch.rand(batch, 1, generator=generator).round()


def single(config: DlrmConfig, buffer: Tensor) -> Step:
    """A step of one process, which has all tables."""
    torch.manual_seed(0)
    dense, tables = Dense(config), Tables(config, [*range(len(config.dims))], buffer)
    optimizers, (x, labels) = _optimizers(dense, tables), _inputs(config, config.batch)
    drawn = [table_batches(config, table) for table in tables.mine]
    turns = cycle([[torch.from_numpy(of[k]) for of in drawn] for k in range(BATCHES)])

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        pooled = tables.look_up(next(turns))
        logits = dense.top(dense.interact(dense.bottom(x), pooled))
        F.binary_cross_entropy_with_logits(logits, labels).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def sharded(config: DlrmConfig, owner: tuple[int, ...], buffer: Tensor) -> Step:
    """A step of one rank of several, each with the tables that `owner` gives it and its part of the batch.

    Indices of its samples go to the tables' ranks, what these look up comes back; at the end gradients of the dense
    part are added up. Nothing overlaps.
    """
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tables_of = [[table for table, of in enumerate(owner) if of == r] for r in range(ranks)]
    part = config.batch // ranks
    dense, tables = Dense(config), Tables(config, tables_of[rank], buffer)
    optimizers, (x, labels) = _optimizers(dense, tables), _inputs(config, part)
    columns = [sum(config.dims[table] for table in of) for of in tables_of]
    index_counts = [part * sum(config.pooling[table] for table in of) for of in tables_of]
    turns = cycle(_index_parts(config, tables_of, rank, part))

    def indices() -> list[Tensor]:
        """Of the whole batch, for this rank's tables: parts come rank by rank, in each table by table."""
        received = torch.zeros(ranks * index_counts[rank], dtype=torch.int64)
        dist.all_to_all_single(received, next(turns), [index_counts[rank]] * ranks, index_counts)
        counts = [part * config.pooling[table] for table in tables.mine]
        pieces = [of_rank.split(counts) for of_rank in received.split(index_counts[rank])]
        return [torch.cat(of_table) for of_table in zip(*pieces, strict=True)]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        looked_up = tables.look_up(indices())
        mine = torch.cat(looked_up, 1).flatten() if looked_up else torch.empty(0, requires_grad=True)
        sizes = [part * columns[rank]] * ranks, [part * count for count in columns]
        received = AllToAll.apply(mine, *sizes)
        pooled = [of.view(part, -1) for of in received.split(sizes[1]) if of.numel()]
        logits = dense.top(dense.interact(dense.bottom(x), pooled))
        F.binary_cross_entropy_with_logits(logits, labels).backward()
        gradients = torch.cat([p.grad.flatten() for p in dense.parameters() if p.grad is not None])
        dist.all_reduce(gradients)
        for parameter, gradient in zip(dense.parameters(), _views(gradients, dense), strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()

    return step


def _index_parts(config: DlrmConfig, tables_of: list[list[int]], rank: int, part: int) -> list[Tensor]:
    """What this rank sends of each batch: its samples' indices, by the rank of the table."""
    drawn = [table_batches(config, table) for table in range(len(config.dims))]
    return [
        torch.from_numpy(
            np.concatenate(
                [
                    drawn[t][k][rank * part * config.pooling[t] : (rank + 1) * part * config.pooling[t]]
                    for of in tables_of
                    for t in of
                ]
            )
        )
        for k in range(BATCHES)
    ]


def _views(flat: Tensor, module: nn.Module) -> Iterator[Tensor]:
    at = 0
    for parameter in module.parameters():
        yield flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
