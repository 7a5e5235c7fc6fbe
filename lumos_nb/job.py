"""What a process knows of its machine and of the torch.distributed job that it belongs to."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any


def describe_machine(device: str) -> dict[str, object]:
    """Hardware and versions that times depend on, as JSON can hold them."""
    import torch

    about: dict[str, object] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if device == "cuda":
        cuda: Any = torch.cuda
        properties = cuda.get_device_properties(cuda.current_device())
        about |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "gpu_multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        }
    return about


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def world() -> tuple[int, int]:
    """Rank and number of ranks; (0, 1) without torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def barrier() -> None:
    """Let every rank begin a phase together: what one rank writes must not look like a straggler on the others."""
    if world()[1] > 1:
        import torch.distributed as dist

        dist.barrier()


def gather(mine: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The objects of all ranks in order, on rank 0; an empty list on the others.

    Through the job's key-value store rather than a collective: gloo may drop a collective's tensors late, from a thread
    that then waits for Python's lock while the process group that is being destroyed waits for that thread.
    """
    rank, size = world()
    if size == 1:
        return [mine]
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.set(f"{key}/{rank}", json.dumps(mine))
    if rank != 0:
        return []
    every = [json.loads(store.get(f"{key}/{r}")) for r in range(size)]
    for r in range(size):
        store.delete_key(f"{key}/{r}")  # a later capture of the same name must not read these
    return every


def groups() -> dict[str, list[int]]:
    """Process groups that this rank is in: name -> global ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {}
    from torch.distributed.distributed_c10d import _world as state

    members = state.pg_group_ranks.items()  # groups that the rank is not in stand there too, under no name
    return {state.pg_names[group]: sorted(ranks) for group, ranks in members if group in state.pg_names}
