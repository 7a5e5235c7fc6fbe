"""Gloo ranks for the tests of the recorder; the model and the script of the bundled runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1] / "datasets"))

import gpt
import make_datasets

__all__ = ["TINY", "WORLD_SIZE", "gpt", "make_datasets", "run_ranks"]

WORLD_SIZE = 2
TINY = gpt.GptConfig(layers=2, hidden=32, heads=2, vocab=64, seq=8, batch=4, micro_batches=4)


def _rank(rank: int, target: Callable[[int, Path], None], folder: str, ranks: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    target(rank, Path(folder))
    dist.barrier()  # no thread of the group may be at work when it goes
    dist.destroy_process_group()


def run_ranks(target: Callable[[int, Path], None], folder: Path, ranks: int = WORLD_SIZE) -> None:
    """`target(rank, folder)` in two processes, or as many as are said, of one job; raises what a rank raised."""
    mp.start_processes(_rank, (target, str(folder), ranks), ranks, start_method="spawn")
