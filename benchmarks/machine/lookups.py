"""Samples of lookups in embedding tables on the machine at hand, forward and backward with the optimizer's step.

Random tables, in groups; each sample is a call on 1 to 15 tables of one group, so that a model can be scored on groups
that it has not seen. Indices are uniform, Zipf's, or of the reuse that public traces have; every call looks up the next
of several batches, as training does. On a CPU and on a GPU without FBGEMM a set is a sequence of
`torch.nn.functional.embedding_bag` (sum, weights per index, sparse gradients) and one `torch.optim.SGD` step, so that
its overheads add up too; with FBGEMM on a GPU it is one table-batched call with a fused step. The clock, its states and
the rounds are those of `record`: here the L2 cache was flushed before each call.

All weights are views of one large buffer. So the tables need not fit in memory together, and what one sample leaves in
the last cache is as likely to be of use to the next as what a model's other tables leave.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.machine.clock import CALLS, Clock, check_device, over_rounds, quiet_process, source_of
from lumos_nb import datasets
from lumos_nb.embedding_tables import (
    BINS,
    MEAN_LOOKUPS,
    Floats,
    Indices,
    reuse_factor,
    reused_indices,
    uniform_indices,
    zipf_indices,
)
from lumos_nb.job import describe_machine

GROUPS, TABLES = 8, 20
"""Groups, and tables in each."""
MOST_TABLES = 15
"""Of a call, as NeuroShard's."""
BUFFER_BYTES = 1.5 * 2**30
TABLE_BYTES = 2**29
DRAWN = 2**19
"""Indices that are drawn for a table; batches are stretches of them, one behind the other."""
DIMS = (4, 8, 16, 32, 64, 128, 256)
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MOST_BYTES = {"cpu": 4e7, "cuda": 4e9}
"""Of weights that a sample looks up."""
LEARNING_RATE = 1e-6
ROUNDS, VARIANTS = 6, 1 + CALLS
"""Visits of a sample that fit in the budget, and batches that its calls take in turn: none comes again in a visit."""


class Bag(NamedTuple):
    """A table of the pool, with the indices that it is looked up by."""

    table: str
    rows: int
    dim: int
    pooling: float
    fixed: bool
    distribution: str
    drawn: NDArray[np.int32]

    def batches(self, samples: int, rng: np.random.Generator) -> Iterator[tuple[Indices, Indices]]:
        """Indices of so many samples, and where each sample's begin, of one batch after another."""
        at = int(rng.integers(len(self.drawn)))
        while True:
            lengths = np.full(samples, round(self.pooling)) if self.fixed else rng.poisson(self.pooling, samples)
            ends = np.cumsum(lengths)
            where = (at + np.arange(ends[-1])) % len(self.drawn)
            yield self.drawn[where].astype(np.int64), ends - lengths
            at += int(ends[-1])


def public_reuse() -> Floats:
    """Reuse factor of the public traces of 2021: from shares of lookups, since those of hot rows round to nothing."""
    first = datasets.load("embedding-locality")
    assert isinstance(first, pl.DataFrame)
    names = [name for name in first.columns if name.startswith("frac_accesses")]
    rows = first.select(names).to_numpy()[0] / MEAN_LOOKUPS
    share: Floats = rows / rows.sum()
    return share


def drawn_table(group: int, number: int, seed: int = 0) -> Bag:
    """A table of a group, with its indices, the same for the same seed."""
    rng, public, name = np.random.default_rng([seed, group, number]), public_reuse(), f"{group}:{number}"
    dim, kind = DIMS[int(rng.integers(len(DIMS)))], ("uniform", "zipf", "zipf", "public")[int(rng.integers(4))]
    fewest = 10_000 if kind == "public" else 100
    rows = int(np.exp(rng.uniform(np.log(fewest), np.log(min(5e6, TABLE_BYTES / (4 * dim))))))
    pooling, fixed = float(np.exp(rng.uniform(0, np.log(100)))), bool(rng.uniform() < 0.5)
    alpha = round(float(rng.uniform(0.4, 1.4)), 2)
    if kind == "uniform":
        drawn = uniform_indices(rows, DRAWN, rng)
    elif kind == "zipf":
        kind, drawn = f"Zipf {alpha}", zipf_indices(rows, DRAWN, alpha, rng)
    else:  # part of a batch of 65,536 samples, or of fewer where the table has too few rows for it
        whole = int(min(1.036e6, 0.5 * rows * float(public @ MEAN_LOOKUPS)))
        drawn = reused_indices(rows, whole, public, rng)[:DRAWN]
    return Bag(name, rows, dim, pooling, fixed, kind, drawn.astype(np.int32))


@dataclass(slots=True)
class Sample:
    """A set of tables and a batch, and the times of each round."""

    group: int
    bags: list[Bag]
    batch: int
    seed: int
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def batches(self) -> list[list[tuple[Indices, Indices]]]:
        """Indices and offsets of all tables, of each of the batches that calls take in turn."""
        rng = np.random.default_rng(self.seed)
        streams = [bag.batches(self.batch, rng) for bag in self.bags]
        return [[next(stream) for stream in streams] for _ in range(VARIANTS)]

    def visit(self, buffer: Any, clock: Clock) -> None:
        """One round's times: as in training, forward and backward take turns."""
        if buffer.is_cuda and has_fbgemm():
            forward, backward = fbgemm_calls(self.bags, self.batches(), buffer)
        else:
            size = sum(bag.rows * bag.dim for bag in self.bags)
            at = random.Random(self.seed).randrange(len(buffer) - size + 1) // 16 * 16  # at a cache line
            forward, backward = torch_calls(self.bags, self.batches(), buffer[at : at + size])
        forward()
        backward()
        turns = [[clock.least(call, "time_us", calls=1) for call in (forward, backward)] for _ in range(CALLS)]
        for times, took_us in zip((self.forward, self.backward), zip(*turns, strict=True), strict=True):
            times.append(max(min(took_us), 0.001))

    def rows(self, number: int) -> Iterator[dict[str, object]]:
        """A row a table; the times are the call's."""
        drawn = self.batches()
        times = {f"forward_{key}": value for key, value in over_rounds(self.forward).items()}
        times |= {f"backward_{key}": value for key, value in over_rounds(self.backward).items()}
        for at, bag in enumerate(self.bags):
            indices = [of[at][0] for of in drawn]
            bins = np.mean([reuse_factor(one) for one in indices], axis=0).round(5)
            yield {
                "call": number, "group": f"{self.group}", "batch": self.batch, "table": bag.table, "rows": bag.rows,
                "dim": bag.dim, "pooling": sum(map(len, indices)) / (VARIANTS * self.batch), "dtype": "fp32",
                **dict(zip(BINS, bins.tolist(), strict=True)), "distribution": bag.distribution, **times,
                "rounds": len(self.forward),
            }  # fmt: skip


def drawn_samples(device: str, seed: int = 0) -> Iterator[Sample]:
    """Random samples without end, a group after another; a fifth and more of them are single tables."""
    rng, table = np.random.default_rng(seed), cache(partial(drawn_table, seed=seed))
    for number in range(10**9):
        group = number % GROUPS
        count = 1 if rng.uniform() < 0.2 else int(rng.integers(1, MOST_TABLES + 1))
        bags = [table(group, int(at)) for at in rng.choice(TABLES, count, replace=False)]
        per_sample = 4 * sum(bag.pooling * bag.dim for bag in bags)
        most = min(MOST_BYTES[device] / per_sample, DRAWN / VARIANTS / max(bag.pooling for bag in bags))
        batches = [batch for batch in BATCHES if batch <= most]
        if batches and sum(4 * bag.rows * bag.dim for bag in bags) <= BUFFER_BYTES:
            yield Sample(group, bags, int(rng.choice(batches)), int(rng.integers(2**31)))


Call = Callable[[], object]


def torch_calls(bags: Sequence[Bag], batches: list[list[tuple[Indices, Indices]]], buffer: Any) -> tuple[Call, Call]:
    """Forward and backward on the next batch, with weights in a buffer of their size.

    Backward keeps the graph, so that it can be timed by itself.
    """
    import torch

    weights: list[torch.Tensor] = []
    at = 0
    for bag in bags:
        weights.append(buffer[at : at + bag.rows * bag.dim].view(bag.rows, bag.dim).requires_grad_())
        at += bag.rows * bag.dim
    of_torch = [[tuple(torch.from_numpy(a).to(buffer.device) for a in pair) for pair in batch] for batch in batches]
    scales = [[torch.ones(len(indices), device=buffer.device) for indices, _ in batch] for batch in of_torch]
    optimizer = torch.optim.SGD(weights, lr=LEARNING_RATE)

    def look_up(batch: Any, scale: Any) -> list[Any]:
        bag = torch.nn.functional.embedding_bag
        with torch.enable_grad():
            return [
                bag(indices, weight, offsets, mode="sum", sparse=True, per_sample_weights=factor)
                for weight, (indices, offsets), factor in zip(weights, batch, scale, strict=True)
            ]

    made = [look_up(*one) for one in zip(of_torch, scales, strict=True)]
    gradients = [torch.ones_like(out) for out in made[0]]
    turns, done = cycle(zip(of_torch, scales, strict=True)), cycle(made)

    def backward() -> None:
        torch.autograd.backward(next(done), gradients, retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: look_up(*next(turns)), backward


def has_fbgemm() -> bool:
    """Whether FBGEMM's table-batched lookups can be had; no extra of the package brings them."""
    return importlib.util.find_spec("fbgemm_gpu") is not None


def fbgemm_calls(bags: Sequence[Bag], batches: list[list[tuple[Indices, Indices]]], buffer: Any) -> tuple[Call, Call]:
    """The same as one table-batched call, its step (exact SGD) fused into the backward pass; weights of its own."""
    import torch

    ops = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    location = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common").EmbeddingLocation
    step = importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_SGD
    device = ops.ComputeDevice
    where = (location.DEVICE, device.CUDA) if buffer.is_cuda else (location.HOST, device.CPU)
    kept = [(bag.rows, bag.dim, *where) for bag in bags]
    lookups = ops.SplitTableBatchedEmbeddingBagsCodegen(kept, optimizer=step, learning_rate=LEARNING_RATE)
    ready = []
    for batch in batches:
        starts = np.cumsum([0, *(len(indices) for indices, _ in batch)])
        offsets = [at + offset for at, (_, offset) in zip(starts, batch, strict=False)]
        flat = (np.concatenate([indices for indices, _ in batch]), np.concatenate([*offsets, starts[-1:]]))
        on_device = [torch.from_numpy(a).to(buffer.device) for a in flat]
        ready.append((*on_device, torch.ones(starts[-1], device=buffer.device)))

    def look_up(batch: Any) -> Any:
        with torch.enable_grad():
            return lookups(*batch)

    made = [look_up(batch) for batch in ready]
    turns, done, gradient = cycle(ready), cycle(made), torch.ones_like(made[0])
    return lambda: look_up(next(turns)), lambda: next(done).backward(gradient, retain_graph=True)


def measure_lookups(device: str = "cpu", budget_s: float = 150.0, seed: int = 0) -> pl.DataFrame:
    """How long random lookups take on this machine.

    Parameters
    ----------
    device
        "cpu" (fp32, one thread) or "cuda".
    budget_s
        Seconds for all rounds; it decides how many samples there are.
    seed
        Of tables, samples and indices.

    Returns
    -------
    frame
        A row a table of a call: `call`, `group`, `batch`, the columns of an embedding table (its reuse factor counted
        on the batches that were looked up), `distribution`, and of the call `forward_time_us`, `forward_min_us`,
        `forward_spread`, `forward_drift` (as in `measure_kernels`), the same of `backward`, `rounds`, `implementation`,
        `device`, `source`.

    Raises
    ------
    CaptureError
        There is no CUDA device.

    Examples
    --------
    >>> frame = measure_lookups(budget_s=2)      # doctest: +SKIP
    """
    check_device(device)
    import torch

    with quiet_process():
        buffer = torch.full((int(BUFFER_BYTES / 4),), 0.01, device=device)
        return _framed(_measured(device, budget_s, buffer, seed), device)


def measure_zipf(
    alphas: Sequence[float],
    rows: int = 10**6,
    dim: int = 64,
    pooling: int = 20,
    batch: int = 512,
    device: str = "cpu",
    seed: int = 0,
) -> pl.DataFrame:
    """How long a table's lookups take the more its indices repeat: a call for each alpha of a Zipf distribution.

    Parameters
    ----------
    alphas
        0 is uniform; public traces are round 1.
    rows, dim, pooling, batch
        Of the table, and samples of a call, each with so many indices.
    device, seed
        As `measure_lookups`.

    Returns
    -------
    frame
        As `measure_lookups` gives it; `distribution` names the alpha. Predicted and measured, `charts.sweeps`
        draws it.

    Raises
    ------
    LayoutError
        There are no rows, or an alpha is negative or not finite.
    CaptureError
        There is no CUDA device.

    Examples
    --------
    >>> measure_zipf([0.0, 0.6, 1.2])["forward_time_us"]      # doctest: +SKIP
    """
    check_device(device)
    import torch

    count, samples = VARIANTS * batch * pooling, []
    for alpha in alphas:
        drawn = zipf_indices(rows, count, alpha, seed).astype(np.int32)
        bag = Bag("0", rows, dim, float(pooling), True, f"Zipf {alpha:g}", drawn)
        samples.append(Sample(0, [bag], batch, seed))
    with quiet_process():
        buffer, clock, rng = torch.full((rows * dim,), 0.01, device=device), Clock(device), random.Random(seed)
        for _ in range(ROUNDS):
            for sample in rng.sample(samples, len(samples)):
                sample.visit(buffer, clock)
    return _framed(samples, device)


def _framed(samples: Sequence[Sample], device: str) -> pl.DataFrame:
    """What was measured, and where."""
    about, fused = describe_machine(device), device == "cuda" and has_fbgemm()
    rows = [row for number, sample in enumerate(samples) for row in sample.rows(number)]
    return pl.DataFrame(rows).with_columns(
        implementation=pl.lit("FBGEMM, one call" if fused else "embedding_bag, a call a table; one SGD step"),
        device=pl.lit(device if device == "cpu" else str(about["gpu"])),
        source=pl.lit(source_of(about)),
    )


def _measured(device: str, budget_s: float, buffer: Any, seed: int) -> list[Sample]:
    """Round one takes sample after sample while its share lasts; the others visit the same ones in random order.

    What drawing the indices of a table takes, once, is not counted.
    """
    clock, rng, stream = Clock(device), random.Random(seed), drawn_samples(device, seed)
    next(stream).visit(buffer, clock)  # a first call loads modules
    samples, round_s, done = [], 0.0, 1
    while round_s < budget_s / ROUNDS:
        samples.append(next(stream))
        started = time.monotonic()
        samples[-1].visit(buffer, clock)
        round_s += time.monotonic() - started
    started = time.monotonic()
    while done < 3 or time.monotonic() - started + 2 * round_s < budget_s:
        for sample in rng.sample(samples, len(samples)):
            sample.visit(buffer, clock)
        done += 1
    return samples
