"""Timing of a call on one device, in the states that `record` describes."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

from benchmarks.machine.ops import Call
from lumos_nb.errors import CaptureError, InputError

CALLS = 3
"""Of an op in one state and round; two if they take longer than `STATE_S`."""
STATE_S = 0.01
STATES = ("time_us", "warm_us", "fresh_us")
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's mallopt


def over_rounds(rounds: Sequence[float]) -> dict[str, float]:
    """A row's `time_us` (the median), least time, median distance of a round from it, and last round over first."""
    time_us = statistics.median(rounds)
    return {
        "time_us": round(time_us, 3),
        "min_us": round(min(rounds), 3),
        "spread": round(statistics.median(abs(us - time_us) for us in rounds) / time_us, 4),
        "drift": round(rounds[-1] / rounds[0], 4),
    }


def source_of(about: Mapping[str, object]) -> str:
    """What a row of a machine that `describe_machine` describes has for a source."""
    name = about.get("gpu") or f"{about['cpu']}, {about['cpus_allowed']} cores"
    return f"microbenchmark, {name}, torch {about['torch']}, {datetime.now(UTC):%Y-%m-%d}"


class Clock:
    """Times calls on one device; the smallest of several, in microseconds.

    `flush_bytes` are written before a call that is not to find its operands in caches; twice the size of L2 if not
    given.
    """

    def __init__(self, device: str, flush_bytes: int | None = None) -> None:
        import torch

        self.torch, self.device = torch, device
        l2 = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else l2_bytes()
        self.flush_bytes = flush_bytes or 2 * l2
        self._allocator = Allocator()
        self._scratch = torch.ones(self.flush_bytes // 4, device=device)
        self.empty_us, self.autograd_us = 0.0, 0.0
        self.empty_us = statistics.median(self.least(lambda: None, "warm_us") for _ in range(200))
        x = torch.ones(1, device=device, requires_grad=True)
        with torch.enable_grad():
            out = x.view_as(x)
        nothing = partial(torch.autograd.grad, out, [x], x.detach(), retain_graph=True)
        self.autograd_us = (
            statistics.median(self.least(nothing, "warm_us") for _ in range(50)) if device == "cpu" else 0
        )

        self.states = STATES if device == "cpu" and self._allocator.known else STATES[:2]

    def least(self, call: Call, state: str, calls: int = CALLS) -> float:
        """The shortest of some calls, less what an empty one takes."""
        return min((self._cuda if self.device == "cuda" else self._cpu)(call, state, calls)) - self.empty_us

    def _prepare(self, state: str) -> None:
        if state == "fresh_us":
            self._allocator.give_back()
        if state != "warm_us":
            self._scratch.add_(1.0)

    def _cpu(self, call: Call, state: str, calls: int) -> list[float]:
        took: list[float] = []
        until = time.perf_counter() + STATE_S
        while len(took) < calls and (len(took) < 2 or time.perf_counter() < until):
            self._prepare(state)
            start = time.thread_time_ns()
            out = call()
            took.append((time.thread_time_ns() - start) / 1e3)
            del out  # outside: a training step frees it later
        return took

    def _cuda(self, call: Call, state: str, calls: int) -> list[float]:
        cuda: Any = self.torch.cuda
        pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(calls)]
        for first, last in pairs:
            cuda._sleep(400_000)  # cycles: the host gets ahead
            self._prepare(state)
            first.record()
            call()
            last.record()
        cuda.synchronize()
        return [first.elapsed_time(last) * 1e3 for first, last in pairs]


def l2_bytes() -> int:
    """Of a core's second cache; 2 MiB where the system does not tell."""
    names = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    return (os.sysconf("SC_LEVEL2_CACHE_SIZE") if "SC_LEVEL2_CACHE_SIZE" in names else 0) or 2**21


class Allocator:
    """glibc's, told to keep what it gets, and, before a call, to give back every page that is free."""

    def __init__(self) -> None:
        self.known = platform.libc_ver()[0] == "glibc"
        if self.known:
            self._libc = ctypes.CDLL(None)
            self._libc.mallopt(_MMAP_THRESHOLD, 2**25)
            self._libc.mallopt(_TRIM_THRESHOLD, 2**30)

    def give_back(self) -> None:
        """Let what is allocated next be on pages that the operating system has yet to hand out."""
        self._libc.malloc_trim(0)


def check_device(device: str) -> None:
    """Raise InputError or CaptureError unless samples can be taken of this device here."""
    import torch

    if device not in ("cpu", "cuda"):
        raise InputError(f"there are samples of cpu and cuda; device is {device!r}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise CaptureError(
            f"torch {torch.__version__} sees no CUDA device here: run this on a machine with one, or take device cpu."
        )


@contextmanager
def quiet_process() -> Iterator[None]:
    """One thread, no autograd unless asked, no garbage collection; as before afterwards."""
    import torch

    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
