"""Record a live torch training loop: step times, Kineto traces, execution traces and process groups.

The phases follow one another, each in steps of its own, because each disturbs what the others measure: warm-up, timed
(nothing attached), traced (profiler), executed (execution-trace observer). A capture is a folder:

    capture.json         hardware, versions, arguments, phases
    groups.json          process group name -> global ranks
    steps.csv            rank, step, wall_ns, cpu_ns of the timed steps
    device-<r>.csv       activity and power of the GPU at the end of these, where pynvml is there
    rank-<r>.json.gz     Kineto trace, ProfilerStep#<k> round every step
    rank-<r>.et.json.gz  execution trace

Needs torch only, so that it runs where nothing else is installed.
"""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from lumos_nb.device_activity import write_activity
from lumos_nb.errors import CaptureError, folder_for, is_whole, is_word, named, require_flags, shown
from lumos_nb.job import barrier, describe_machine, gather, groups, world
from lumos_nb.labels import label_collectives
from lumos_nb.whole_files import compress, whole

T = TypeVar("T")
PROFILER_WARMUP_STEPS = 1  # the profiler's buffers are allocated in it; it is thrown away
_UNDER_WAY: list[Path] = []  # the folder of the capture that this process is recording


class Phase(Protocol):
    """A part of a capture."""

    name: str
    steps: int

    def start(self) -> None:
        """Attach what the phase records with."""

    def step(self) -> None:
        """End an iteration."""

    def stop(self) -> None:
        """Take off what was attached, and write."""


class _WarmUp:
    """Steps of which nothing is kept."""

    name = "warmup"

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def start(self) -> None: ...
    def step(self) -> None: ...
    def stop(self) -> None: ...


class _Timed:
    """Wall and process time of every step, nothing else attached.

    On a device `wall_ns` is the time between events at the ends of the steps on the current stream, so that no
    synchronisation is added between steps; the device is idle when the first step begins.
    """

    name = "timed"

    def __init__(self, steps: int, device: str, rank: int, activity: Path) -> None:
        self.steps, self.device, self.rank, self.activity = steps, device, rank, activity
        self.marks: list[tuple[Any, int]] = []

    def start(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
        self.step()

    def step(self) -> None:
        import torch

        wall: Any = time.perf_counter_ns()
        if self.device == "cuda":
            wall = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            wall.record()
        self.marks.append((wall, time.process_time_ns()))

    def stop(self) -> None:
        import torch

        if self.device == "cuda":
            write_activity(self.activity, self.rank)
            torch.cuda.synchronize()

    def rows(self) -> list[tuple[int, int, int]]:
        """(step, wall_ns, cpu_ns) of every step."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [
            (k, round(a.elapsed_time(b) * 1e6) if self.device == "cuda" else b - a, cpu_b - cpu_a)
            for k, ((a, cpu_a), (b, cpu_b)) in enumerate(pairs)
        ]


class _Traced:
    """Kineto trace of every step but the profiler's warm-up step; the execution trace of these too if it has a path."""

    name = "traced"

    def __init__(
        self, steps: int, path: Path, device: str, annotate: bool, record_shapes: bool, executed: Path | None
    ) -> None:
        self.steps, self.executed = steps + PROFILER_WARMUP_STEPS, executed
        self.path, self.device, self.annotate, self.record_shapes = path, device, annotate, record_shapes
        self.stack = ExitStack()

    def start(self) -> None:
        import torch
        from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

        config = self.observer = None
        if self.executed:
            self.observer = ExecutionTraceObserver()
            self.observer.register_callback(str(self.executed.with_suffix("")))
        activities = [ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
            config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
        active = self.steps - PROFILER_WARMUP_STEPS
        self.profiler = profile(
            activities=activities,
            record_shapes=self.record_shapes,
            schedule=schedule(wait=0, warmup=PROFILER_WARMUP_STEPS, active=active, repeat=1),
            on_trace_ready=self._export,
            experimental_config=config,
            execution_trace_observer=self.observer,
        )
        self.profiler.start()
        if self.annotate:
            self.stack.enter_context(label_collectives())

    def step(self) -> None:
        self.profiler.step()

    def stop(self) -> None:
        self.stack.close()
        self.profiler.stop()
        if self.executed and self.observer:
            self.observer.unregister_callback()
            compress(self.executed.with_suffix(""), self.executed)

    def _export(self, profiler: Any) -> None:
        raw = self.path.with_suffix("")
        profiler.export_chrome_trace(str(raw))
        with raw.open("r+b") as file:  # its last field is the full path on this machine: nobody else's business
            file.seek(-min(4096, raw.stat().st_size), os.SEEK_END)
            start, tail = file.tell(), file.read()
            if match := re.search(rb'"traceName": "[^"]*"', tail):
                file.seek(start + match.start())
                file.write((b'"traceName": "%s"' % raw.name.encode()).ljust(len(match[0])))
        compress(raw, self.path)


class _Executed:
    """Execution trace of the steps."""

    name = "executed"

    def __init__(self, steps: int, path: Path, annotate: bool) -> None:
        self.steps, self.path, self.annotate = steps, path, annotate
        self.stack = ExitStack()

    def start(self) -> None:
        from torch.profiler import ExecutionTraceObserver

        self.observer = ExecutionTraceObserver()
        self.observer.register_callback(str(self.path.with_suffix("")))
        self.observer.start()
        if self.annotate:
            self.stack.enter_context(label_collectives())

    def step(self) -> None: ...

    def stop(self) -> None:
        self.stack.close()
        self.observer.stop()
        self.observer.unregister_callback()
        compress(self.path.with_suffix(""), self.path)


class Recorder:
    """A capture under way; made by `capture`.

    Attributes
    ----------
    total_steps, steps_done
        Iterations in all phases, and so far.
    phase_step
        Iterations so far in the phase under way. In the traced phase it is the number in the trace's ProfilerStep#.
    """

    def __init__(self, folder: Path, phases: list[Phase], device: str, arguments: Mapping[str, object]) -> None:
        self.folder = folder
        self.total_steps = sum(phase.steps for phase in phases)
        self.steps_done = 0
        self._phases = [phase for phase in phases if phase.steps]
        self._device, self._arguments = device, dict(arguments)
        self._waiting = iter(self._phases)
        self._running: Phase | None = None
        self.phase_step = 0

    def __repr__(self) -> str:
        return f"<Recorder of {self.folder}: {self.steps_done} of {self.total_steps} steps, phase {self.phase}>"

    @property
    def done(self) -> bool:
        """Whether every phase is complete; further steps are not recorded."""
        return self.steps_done == self.total_steps

    @property
    def phase(self) -> str:
        """Name of the phase under way: warmup, timed, traced, executed, done, or outside the context."""
        if self.done:
            return "done"
        return self._running.name if self._running else "outside"

    def __enter__(self) -> Self:
        self._refuse_a_second()
        folder_for(self.folder, CaptureError)
        rank = world()[0]
        old = [*self.folder.glob("rank-*.json.gz"), *self.folder.glob("capture.json")]
        if any(path.name == "capture.json" or path.name.startswith(f"rank-{rank}.") for path in old):
            raise CaptureError(
                f"{self.folder} already holds a capture ({old[0].name}, ...); give another folder or remove it first."
            )
        self._next_phase()
        _UNDER_WAY.append(self.folder)
        return self

    def _refuse_a_second(self) -> None:
        """Raise if something records already: torch has one profiler a process, and a second start may crash it."""
        import torch

        other = f"a capture into {_UNDER_WAY[0]}" if _UNDER_WAY else "a torch profiler"
        if _UNDER_WAY or torch._C._autograd._profiler_enabled():
            raise CaptureError(f"{other} is recording in this process; leave its context before another capture.")
        if self.steps_done:
            raise CaptureError(f"this capture into {self.folder} has been used; make another one with ln.capture.")

    def step(self) -> None:
        """End an iteration. After the last phase it does nothing."""
        if self.done:
            return
        if self._running is None:
            raise CaptureError("step() was called outside the capture; call it inside `with ln.capture(...) as rec:`.")
        self._running.step()
        self.steps_done += 1
        self.phase_step += 1
        if self.phase_step == self._running.steps:
            self._stop_phase()
            if not self.done:
                self._next_phase()

    def wrap(self, batches: Iterable[T]) -> Iterator[T]:
        """The same items, with a step() after each; ends early, once every phase is complete."""
        for batch in batches:
            yield batch
            self.step()
            if self.done:
                return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        phase = self.phase
        _UNDER_WAY.clear()
        if not self.done:
            self._abandon()
        if kind is None and phase != "done":
            plan = " + ".join(f"{p.steps} {p.name}" for p in self._phases)
            raise CaptureError(
                f"the loop ended after {self.steps_done} of {self.total_steps} steps ({plan}), in the {phase} phase; "
                f"run at least {self.total_steps} iterations (rec.total_steps), call rec.step() in each, "
                "or ask capture for fewer steps."
            )
        if kind is None:
            self._write()

    def _abandon(self) -> None:
        """Stop recording and remove this rank's files: half a capture would read as a whole one."""
        self._stop_phase()
        for path in self.folder.glob(f"rank-{world()[0]}.*"):
            path.unlink()

    def _next_phase(self) -> None:
        phase = next(self._waiting)
        barrier()
        phase.start()
        self._running, self.phase_step = phase, 0

    def _stop_phase(self) -> None:
        if self._running is not None:
            phase, self._running = self._running, None
            phase.stop()

    def _write(self) -> None:
        """Gather what every rank knows; rank 0 writes it."""
        import torch

        rows = [row for phase in self._phases if isinstance(phase, _Timed) for row in phase.rows()]
        mine = {"steps": rows, "groups": groups(), "host": socket.gethostname(), "seed": torch.initial_seed()}
        ranks = gather(mine, f"lumos_nb/{self.folder}")
        if not ranks:
            return
        with whole(self.folder / "steps.csv", CaptureError) as part, part.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["rank", "step", "wall_ns", "cpu_ns"])
            writer.writerows((rank, *row) for rank, one in enumerate(ranks) for row in one["steps"])
        merged = {name: members for one in ranks for name, members in one["groups"].items()}
        _write_json(self.folder / "groups.json", dict(sorted(merged.items())))
        hosts = [one["host"] for one in ranks]
        about = {
            "world_size": len(ranks),
            "nodes": [sorted(set(hosts), key=hosts.index).index(host) for host in hosts],
            "seeds": [one["seed"] for one in ranks],
            "phases": {phase.name: phase.steps for phase in self._phases},
            "wall_clock": "device events" if self._device == "cuda" else "host",
            **describe_machine(self._device),
            "arguments": self._arguments,
        }
        _write_json(self.folder / "capture.json", about)


def capture(
    folder: str | os.PathLike[str],
    *,
    steps: int = 5,
    warmup: int = 3,
    timed: int = 20,
    executed: int = 1,
    paired: bool = False,
    device: str | None = None,
    annotate: bool = True,
    record_shapes: bool = True,
    arguments: Mapping[str, object] | None = None,
) -> Recorder:
    """Record a training loop into `folder`, in one process or on every rank of a torch.distributed job.

    Parameters
    ----------
    folder
        Where the files go; every rank names the same. It must not hold a capture yet.
    steps
        Traced steps, after one that the profiler throws away: 3 or more, as graphs leave out the first and the last.
    warmup
        Steps before anything is measured.
    timed
        Steps that are only timed. Their times are the truth: a profiled step is 1.0 to 1.3 times as long.
    executed
        Steps of the execution trace (2 to 3 times as long as unprofiled ones); 0 for none.
    paired
        Record the execution trace in the traced steps instead, so that ids link the two (`ln.chakra.link`).
    device
        "cuda" or "cpu"; by default "cuda" where torch sees one.
    annotate
        Name the collectives of CPU tensors and their waits in the traces (see `lumos_nb.labels`); never while timing.
        DDP issues and waits in C++, out of reach: register `lumos_nb.labels.ddp_hook` on the model.
    record_shapes
        Input shapes and types of every op in the Kineto trace.
    arguments
        What else `capture.json` should say: model sizes, seeds, the command line. Values that JSON can hold.

    Returns
    -------
    Recorder
        A context manager; `rec.step()` ends an iteration, `rec.wrap(batches)` does it; it takes `rec.total_steps`.

    Raises
    ------
    CaptureError
        If the folder holds a capture, a count makes no sense, or the loop ends before the phases are complete.

    Examples
    --------
    >>> import torch
    >>> net, batches = torch.nn.Linear(8, 8), [torch.ones(4, 8)] * 100
    >>> with ln.capture("runs/x", steps=5) as rec:
    ...     for batch in rec.wrap(batches):
    ...         net(batch).sum().backward()
    >>> run = ln.load_run("runs/x")
    """
    _check_counts(steps=(steps, 1), warmup=(warmup, 0), timed=(timed, 0), executed=(executed, 0))
    flags = {"annotate": annotate, "record_shapes": record_shapes, "paired": paired}
    require_flags(**flags)
    given, device, path, rank = _json_values(arguments), _seen_device(device), named(folder, CaptureError), world()[0]
    et = path / f"rank-{rank}.et.json.gz"
    phases: list[Phase] = [
        _WarmUp(warmup),
        _Timed(timed, device, rank, path / f"device-{rank}.csv"),
        _Traced(steps, path / f"rank-{rank}.json.gz", device, annotate, record_shapes, et if paired else None),
        _Executed(0 if paired else executed, et, annotate),
    ]
    return Recorder(path, phases, device, {**flags, **given})


def _check_counts(**counts: tuple[object, int]) -> None:
    for name, (value, least) in counts.items():
        if not is_whole(value, least):
            raise CaptureError(f"capture got {name}={shown(value)}; give a whole number, {least} or more.")


def _seen_device(device: str | None) -> str:
    """The device asked for, or the best that torch sees."""
    import torch

    seen = torch.cuda.is_available()
    chosen = ("cuda" if seen else "cpu") if device is None else device
    if not is_word(chosen, ("cpu", "cuda")) or (chosen == "cuda" and not seen):
        raise CaptureError(
            f'capture got device={shown(device)}, which torch does not see here; give "cpu" or leave it out.'
        )
    return chosen


def _json_values(arguments: Mapping[str, object] | None) -> dict[str, object]:
    """`arguments` as a dict that JSON can hold."""
    try:
        given = dict(arguments or {})
        json.dumps(given)
    except (TypeError, ValueError) as error:
        raise CaptureError(
            f"capture got arguments={shown(arguments)}: {error}; give names with values for JSON."
        ) from error
    return given


def _write_json(path: Path, value: object) -> None:
    with whole(path, CaptureError) as part:
        part.write_text(json.dumps(value, indent=1) + "\n")
