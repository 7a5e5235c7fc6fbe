"""Ranks of a benchmark: process groups with those that are launched, and time for those that are not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DEFAULT = "0"
"""Name of the group of all ranks."""


class Unusable(Exception):
    """A workload, or a part of it, cannot be run here; the message says why and what to do."""


def issue(what: str, out: Sequence[Any], given: Sequence[Any], said: dict[str, Any], group: Any) -> Any:
    """Begin a collective or a message on the tensors for its results (in place: all) and those that it gives."""
    later, peer = {"group": group, "async_op": True}, said["peer"]
    match what:
        case "all_reduce":
            return [dist.all_reduce(one, **later) for one in out][-1]
        case "all_gather" if len(out) == 1:
            return dist.all_gather_into_tensor(out[0], given[0], **later)
        case "all_gather":
            return dist.all_gather(list(out), given[0], **later)
        case "reduce_scatter" if len(given) == 1:
            return dist.reduce_scatter_tensor(out[0], given[0], **later)
        case "reduce_scatter":
            return dist.reduce_scatter(out[0], list(given), **later)
        case "all_to_all" if len(given) == 1:
            return dist.all_to_all_single(out[0], given[0], *said["splits"], **later)
        case "all_to_all":
            return dist.all_to_all(list(out), list(given), **later)
        case "broadcast":
            return dist.broadcast(out[0], group_src=peer, **later)
        case "reduce":
            return dist.reduce(out[0], group_dst=peer, **later)
        case "gather":
            return dist.gather(given[0], list(out) or None, group_dst=peer, **later)
        case "scatter":
            return dist.scatter(out[0], list(given) or None, group_src=peer, **later)
        case "send":
            return dist.isend(out[0], group=group, group_dst=peer)
        case "recv":
            return dist.irecv(out[0], group=group, group_src=peer)
        case "barrier":
            return dist.barrier(**later)
    raise Unusable(f"{what[:80]!r} is no collective")


def join(groups: dict[str, list[int]], source: dict[str, Any], device: str) -> dict[str, Any]:
    """Process groups by the trace's names; torch's fake group is those some of whose ranks are not launched."""
    every, launched = [*range(len(groups[DEFAULT]))], int(os.environ.get("WORLD_SIZE", "0"))
    present, library = source["ranks"] if launched else [], "nccl" if device == "cuda" else "gloo"
    if launched not in (0, len(source["ranks"])):
        raise Unusable(f"{len(present)} rank(s) can be launched: as many, or one without torchrun, with fake peers.")
    if not dist.is_initialized() and present == every:
        dist.init_process_group(library, timeout=timedelta(seconds=120))
    elif not dist.is_initialized():
        from torch.distributed.rendezvous import rendezvous
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = next(iter(rendezvous("env://")))[0] if launched else FakeStore()
        dist.init_process_group("fake", store=store, rank=source["rank"], world_size=len(every))
    mine = {name: dist.group.WORLD for name, ranks in groups.items() if ranks == every}
    for name, ranks in sorted(groups.items()):
        if name not in mine and dist.get_rank() in ranks:
            backend = library if {*ranks} <= {*present} else "fake"
            mine[name] = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return mine


class Absent:
    """A group whose peers are not there: each collective takes its time after the last, on the host or on a stream."""

    def __init__(self, device: str) -> None:
        self.free_ns = 0
        self.stream: Any = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]
        self.cycles_per_ns = cycles_per_ns() if device == "cuda" else 0.0

    def begin(self, delay_ns: int) -> Callable[[], None]:
        """Begin one; what is given back waits for its end."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(int(delay_ns * self.cycles_per_ns))  # type: ignore[no-untyped-call]
            ended = self.stream.record_event()
            return lambda: torch.cuda.current_stream().wait_event(ended)
        self.free_ns = until = max(self.free_ns, time.perf_counter_ns()) + delay_ns

        def wait() -> None:
            while time.perf_counter_ns() < until:
                pass

        return wait


def cycles_per_ns() -> float:
    """How fast the clock goes that `torch.cuda._sleep` counts."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for cycles in (1_000_000, 10_000_000):  # the first warms up
        begin.record()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
    return 1e-6 * cycles / float(begin.elapsed_time(end))
