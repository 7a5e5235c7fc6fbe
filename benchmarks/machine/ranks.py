"""How long collectives take between processes of this machine: gloo over loopback, or NCCL between its GPUs.

Sizes are those of nccl-tests: an all-gather's total output, a reduce-scatter's total input, an all-to-all's whole send
buffer of a rank. A collective lasts from the last rank's arrival to the last rank's end: ranks of one machine share a
clock, so that lateness at the barrier before it does not count. Rounds as for kernels.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from benchmarks.machine.clock import over_rounds, source_of
from lumos_nb.errors import CaptureError, InputError
from lumos_nb.job import describe_machine

if TYPE_CHECKING:
    from torch import Tensor

SIZES_BYTES = tuple(2**power for power in range(10, 25))
BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
ITERATIONS, MOST_ITERATIONS = 3, 40
"""In a round of one size; as many as the budget allows, within these."""
ROUNDS = 3


def _send_recv(dist: Any, whole: Tensor) -> None:
    """One message from the first rank to the last; ranks between them do nothing."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == 0:
        dist.send(whole, last)
    elif rank == last:
        dist.recv(whole, 0)


COLLECTIVES: dict[str, Callable[..., object]] = {
    # of torch.distributed and two tensors of the row's size and one of a rank's share of it
    "all_reduce": lambda dist, whole, other, part: dist.all_reduce(whole),
    "all_gather": lambda dist, whole, other, part: dist.all_gather_single(whole, part),
    "reduce_scatter": lambda dist, whole, other, part: dist.reduce_scatter_single(part, whole),
    "all_to_all": lambda dist, whole, other, part: dist.all_to_all_single(other, whole),
    "broadcast": lambda dist, whole, other, part: dist.broadcast(whole, 0),
    "send_recv": lambda dist, whole, other, part: _send_recv(dist, whole),
}


def measure_collectives(
    world_size: int,
    backend: str = "gloo",
    budget_s: float = 30.0,
    sizes_bytes: tuple[int, ...] | None = None,
    seed: int = 0,
) -> pl.DataFrame:
    """How long collectives between `world_size` processes of this machine take.

    Parameters
    ----------
    world_size
        Ranks, each a process with one thread; with nccl each has a GPU.
    backend
        "gloo" or "nccl".
    budget_s
        Seconds for all rounds, beside the start of processes; every size is measured nine times however little it is.
    sizes_bytes
        In the convention of nccl-tests; None: `SIZES_BYTES`, every third of them if the budget is less than 5 s.
    seed
        Of the order in which sizes and collectives take turns.

    Returns
    -------
    frame
        A collective frame with `time_us` (median over rounds of a round's median), `min_us` (of rounds), `spread` and
        `drift` as kernels have them.

    Raises
    ------
    CaptureError
        There are fewer GPUs than ranks, or the backend lacks a collective; the message has its own words.
    InputError
        A backend is unknown, there are fewer than two ranks, or a size is no multiple of four bytes a rank.
    """
    import torch
    import torch.multiprocessing

    mp: Any = torch.multiprocessing
    sizes_bytes = sizes_bytes or SIZES_BYTES[:: 1 if budget_s >= 5 else 3]
    if backend not in BACKENDS or world_size < 2 or any(size % (4 * world_size) for size in sizes_bytes):
        raise InputError(
            f"collectives are measured over {' or '.join(BACKENDS)}, between two ranks or more, on sizes that "
            f"{4 * world_size} divides; given were {backend!r}, {world_size} ranks, sizes {sizes_bytes}."
        )
    if BACKENDS[backend] == "cuda" and torch.cuda.device_count() < world_size:
        raise CaptureError(
            f"{world_size} ranks of nccl need as many GPUs; torch sees {torch.cuda.device_count()} here."
        )
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                _rank, (world_size, backend, budget_s, sizes_bytes, seed, folder), world_size, start_method="spawn"
            )
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise CaptureError(f"a rank of {backend} failed; nothing was kept: {error}") from error
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]
    return _frame(ranks, world_size, backend)


def _rank(
    rank: int, world_size: int, backend: str, budget_s: float, sizes_bytes: tuple[int, ...], seed: int, folder: str
) -> None:
    """One process: rows of (collective, size, round, starts, ends) in ns of the machine's clock, as JSON."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device(BACKENDS[backend], rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    wait: Callable[[], object] = torch.cuda.synchronize if backend == "nccl" else lambda: None
    turns, rows = [(name, size) for name in COLLECTIVES for size in sizes_bytes], []
    rng, cell_s = random.Random(seed), budget_s / (ROUNDS * len(COLLECTIVES) * len(sizes_bytes))
    for number in range(ROUNDS):
        for name, size in rng.sample(turns, len(turns)):
            tensors = [torch.ones(n, device=device) for n in (size // 4, size // 4, size // 4 // world_size)]
            starts, ends = _iterations(name, tensors, wait, cell_s)
            rows.append((name, size, number, starts, ends))
    Path(folder, f"{rank}.json").write_text(json.dumps(rows))
    dist.barrier()  # no thread of the group may be at work when it goes
    dist.destroy_process_group()


def _iterations(
    name: str, tensors: list[Tensor], wait: Callable[[], object], cell_s: float
) -> tuple[list[int], list[int]]:
    """Start and end of every iteration on this rank; as many as rank 0 finds that `cell_s` has room for."""
    import torch
    import torch.distributed as dist

    starts, ends = [], []
    took_ns, count = 1, torch.ones(1, dtype=torch.int64, device=tensors[0].device)
    for number in range(MOST_ITERATIONS + 1):  # the first is not kept: connections are made in it
        if number == 2:
            count.fill_(min(max(round(cell_s * 1e9 / took_ns), ITERATIONS), MOST_ITERATIONS))
            dist.broadcast(count, 0)
        if number > max(int(count), 1):
            break
        tensors[0].fill_(1.0)  # repeated sums would overflow
        begun = time.perf_counter_ns()
        dist.barrier()
        wait()
        start = time.perf_counter_ns()
        COLLECTIVES[name](dist, *tensors)
        wait()
        end = time.perf_counter_ns()
        took_ns = end - begun
        idle = name == "send_recv" and 0 < dist.get_rank() < dist.get_world_size() - 1
        starts.append(0 if idle else start)
        ends.append(0 if idle else end)
    return starts[1:], ends[1:]


def _frame(ranks: list[list[Any]], world_size: int, backend: str) -> pl.DataFrame:
    cells: dict[tuple[str, int], list[float]] = {}
    for of_ranks in zip(*ranks, strict=True):
        name, size = of_ranks[0][:2]
        starts, ends = (np.array([row[i] for row in of_ranks], dtype=np.int64).max(axis=0) for i in (3, 4))
        cells.setdefault((name, size), []).append(float(np.median(ends - starts)) / 1e3)
    about, is_gpu = describe_machine(BACKENDS[backend]), backend == "nccl"
    frame = pl.DataFrame(
        [
            {"collective": name, "dtype": "fp32", "size_bytes": size, **over_rounds(rounds)}
            for (name, size), rounds in cells.items()
        ]
    )
    return frame.select(
        pl.lit(str(about["gpu"]) if is_gpu else "cpu").alias("hardware"),
        pl.lit("between the GPUs of a machine" if is_gpu else "loopback").alias("interconnect"),
        pl.lit(1).alias("nodes"),
        pl.lit(world_size).alias("gpus"),
        pl.lit(world_size).alias("gpus_per_node"),
        *frame.columns,
        pl.lit(source_of(about)).alias("source"),
        pl.lit(f"{backend}, from the last arrival to the last end, median of {ROUNDS} rounds' medians").alias("method"),
    ).sort("collective", "size_bytes")
