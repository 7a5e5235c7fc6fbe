"""Write a made-up Kineto trace of 1.3 million events: `python -m benchmarks.make_large_trace FILE.json.gz`.

Its mixture is that of a data-parallel training job: operators that nest, calls that launch kernels to three streams,
allocations, an arrow for each launch; two threads, steps, the arguments that Kineto writes, and its white space.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

EVENTS = 1_300_000
PID, THREADS, DEVICE = 783_658, (783_658, 785_244), 1
FIRST_US = 1_669_783_687_464_181
TURNS_A_STEP = 5_000

_NAMES = (
    "linear addmm matmul mm bmm add mul div cat copy_ empty empty_strided as_strided view t transpose relu gelu "
    "softmax layer_norm native_layer_norm dropout embedding index_select sum mean select slice"
)
_OPS = [f"aten::{name}" for name in _NAMES.split()]
_BACKWARD = [f"autograd::engine::evaluate_function: {name.removeprefix('aten::').title()}Backward0" for name in _OPS]
_KERNELS = [
    f"void at::native::vectorized_elementwise_kernel<4, at::native::{op}_functor<{kind}>, "
    f"at::detail::Array<char*, {arity}>>(int, char*)"
    for op, kind, arity in itertools.product(_NAMES.split(), ("float", "c10::Half"), (2, 3))
]
_GEMMS = [f"volta_{kind}gemm_{m}x{n}_{t}" for kind in "sh" for m in (64, 128) for n in (32, 128) for t in ("nn", "tn")]

_OP = """  {{
    "ph": "X", "cat": "cpu_op", "name": "{}", "pid": {}, "tid": {},
    "ts": {}, "dur": {},
    "args": {{
      "External id": {},"Ev Idx": {}{}
    }}
  }}"""
_ALLOCATION = """  {{
    "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]",
    "pid": {}, "tid": {},
    "ts": {},
    "args": {{
      "Ev Idx": {}, "Device Type": 1, "Device Id": 1, "Addr": {}, "Bytes": {}, "Total Allocated": {}
    }}
  }}"""
_CALL = """  {{
    "ph": "X", "cat": "cuda_runtime", "name": "{}", "pid": {}, "tid": {},
    "ts": {}, "dur": {},
    "args": {{
      "External id": {}, "cbid": {}, "correlation": {}
    }}
  }}"""
_KERNEL = """  {{
    "ph": "X", "cat": "kernel", "name": "{}", "pid": {}, "tid": {},
    "ts": {}, "dur": {},
    "args": {{
      "External id": {}, "queued": 0, "device": {}, "context": 1, "stream": {}, "correlation": {},
      "grid": [{}, 1, 1], "block": [128, 1, 1]
    }}
  }}"""
_ARROW = """  {{
    "ph": "{}", "id": {}, "pid": {}, "tid": {}, "ts": {},
    "cat": "ac2g", "name": "ac2g"{}
  }}"""
_STEP = """  {{
    "ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{}", "pid": {}, "tid": {},
    "ts": {}, "dur": {},
    "args": {{
      "External id": {}, "Ev Idx": {}
    }}
  }}"""
_NCCL = """  {{
    "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "pid": {}, "tid": {}, "ts": {}, "dur": {},
    "args": {{
      "External id": {}, "device": {}, "stream": {}, "correlation": {}, "Collective name": "allreduce",
      "In msg nelems": {}, "Out msg nelems": {}, "dtype": "BFloat16", "Process Group Name": "{}", "Group size": {}
    }}
  }}"""
_EVENTS_A_TURN = 9
TURNS_A_MEETING, MEETING_US = 50, 5_000
NEIGHBOURS = 8
"""Ranks of the groups of neighbours, which meet in every collective but each fourth, of all ranks."""


class Place(NamedTuple):
    """A rank of a job whose ranks meet in collectives, and how long its steps are."""

    rank: int
    ranks: int
    turns_a_step: int = TURNS_A_STEP

    def groups(self) -> list[dict[str, object]]:
        """As the profiler lists them."""
        first = self.rank // NEIGHBOURS * NEIGHBOURS
        members = {
            "0": list(range(self.ranks)),
            str(1 + first): list(range(first, min(first + NEIGHBOURS, self.ranks))),
        }
        said = {"0": "default_pg", str(1 + first): "tp"}
        return [{"pg_name": name, "pg_desc": said[name], "ranks": ranks} for name, ranks in members.items()]

    def meeting(self, nth: int, now: int, number: int) -> tuple[list[str], int]:
        """A collective that ends at one time on all its ranks, for which the host waits; and when it goes on."""
        ends, correlation = FIRST_US + (nth + 1) * MEETING_US, 10_000_000 + 4 * nth
        group = self.groups()[nth % 4 > 0]
        named = (
            ("cudaStreamWaitEvent", now, 2, 147),
            ("cudaLaunchKernel", now + 4, 5, 211),
            ("cudaStreamWaitEvent", now + 11, 2, 147),
            ("cudaStreamSynchronize", now + 14, ends - now - 8, 131),
        )
        calls = [
            _CALL.format(name, PID, THREADS[0], at, lasts, number, kind, correlation + place)
            for place, (name, at, lasts, kind) in enumerate(named)
        ]
        size = 1 << 20 + nth % 5
        about = (number, DEVICE, 24, correlation + 1, size, size, group["pg_name"], len(group["ranks"]))  # type: ignore[arg-type]
        return [*calls, _NCCL.format(DEVICE, 24, now + 12, ends - now - 12, *about)], ends + 8


def events(count: int, place: Place | None = None) -> Iterator[str]:
    """About `count` events as text, the same each time; of a rank of a job, or of one that works alone."""
    noise = random.Random(3 if place is None else place.rank)
    now, free, step_began = FIRST_US, [FIRST_US] * 3, FIRST_US
    turns_a_step = TURNS_A_STEP if place is None else place.turns_a_step
    for turn in range(count // _EVENTS_A_TURN):
        backward = turn // (turns_a_step // 2) % 2
        thread, op = THREADS[backward], noise.randrange(len(_OPS))
        number = 2 * turn + 3000
        shapes = "" if backward else f', "Input Dims": [[{32 << op % 5}, 768], [768]], "Input type": ["float", "float"]'
        tied = f', "Fwd thread id": 1, "Sequence number": {turn % TURNS_A_STEP}' if backward else shapes
        length = noise.randrange(30, 90)
        yield _OP.format((_BACKWARD if backward else _OPS)[op], PID, thread, now, length, number, number, tied)
        inner = _OPS[(op + turn) % len(_OPS)]
        yield _OP.format(inner, PID, thread, now + 2, length - 4, number + 1, number + 1, "")
        address, size = noise.randrange(1 << 30) * 512 + (1 << 46), noise.randrange(1, 4000) * 512
        yield _ALLOCATION.format(PID, thread, now + 4, number + 1, address, size, turn % 7919 * 512)
        correlation, stream = turn + 100_000, noise.choice([7, 7, 7, 20, 24])
        called = now + noise.randrange(6, 12)
        yield _CALL.format("cudaLaunchKernel", PID, thread, called, length // 4, number + 1, 211, correlation)
        yield _ARROW.format("s", correlation, PID, thread, called, "")
        lane = (7, 20, 24).index(stream)
        begins, lasts = max(free[lane], called + 5), noise.randrange(3, 80)
        free[lane] = begins + lasts
        name = noise.choice(_GEMMS if inner in _OPS[:5] else _KERNELS)
        yield _KERNEL.format(name, DEVICE, stream, begins, lasts, number + 1, DEVICE, stream, correlation,
                             1 << op % 12)  # fmt: skip
        yield _ARROW.format("f", correlation, DEVICE, stream, begins, ', "bp": "e"')
        yield _CALL.format("cudaEventRecord", PID, thread, called + 20, 2, number + 1, 135, correlation + 2_000_000)
        yield _ARROW.format("f", correlation, PID, thread, called + 20, ', "bp": "e"')
        now += length + noise.randrange(1, 9)
        if place is not None and (turn + 1) % TURNS_A_MEETING == 0:
            met, now = place.meeting(turn // TURNS_A_MEETING, now, number)
            free = [max(end, now) if lane == 2 else end for lane, end in enumerate(free)]
            yield from met
        if (turn + 1) % turns_a_step == 0:
            yield _STEP.format(turn // turns_a_step, PID, THREADS[0], step_began, now - step_began, number, number)
            step_began = now + 1


def write_large_trace(path: Path, count: int = EVENTS, place: Place | None = None) -> Path:
    """Write the trace, packed if its name ends in .gz."""
    head = {"schemaVersion": 1, "deviceProperties": [{"id": DEVICE, "name": "made up", "numSms": 80}]}
    told = (
        {"rank": place.rank, "world_size": place.ranks, "pg_config": place.groups()}
        if place
        else {"rank": 0, "world_size": 1}
    )
    head |= {"distributedInfo": {"backend": "nccl", **told}}
    with gzip.open(path, "wt", compresslevel=6) if path.suffix == ".gz" else path.open("w") as file:
        file.write(json.dumps(head, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        separator = ""
        for event in events(count, place):
            file.write(separator + event)
            separator = ",\n"
        file.write('\n  ],\n  "traceName": "made up"\n}\n')
    return path


if __name__ == "__main__":
    write_large_trace(Path(sys.argv[1]))
