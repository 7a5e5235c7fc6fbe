"""Generated benchmark programs beside the training steps that they were made from, on this machine.

    python -m benchmarks.benchmark_programs                 all kinds, LAUNCHES each; or name some: gpt ddp
    python -m benchmarks.benchmark_programs --launches 2
    python -m benchmarks.benchmark_programs --speed         how long making and starting a program takes

A step is captured once (its profile gives the coverage), a program is generated, and then original and program are
launched in turns, unprofiled, each in processes of its own: a launch is the median of its steps. The row is the median
over launches of the program over that of the original, with a 95 % interval bootstrapped over launches; beside it, as
noise, how far the ratios of one original launch to the next lie from 1 (half their 5 to 95 % range). Nothing of the
measured times goes into a program.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.captured_models import ALONE, ON_TWO, Step
from benchmarks.rows import ACCURACY, RESULTS, Row, read, record
from datasets import gpt
from lumos_nb import benchmark
from lumos_nb.exchange.benchmark.tables import Workload
from lumos_nb.recorder import capture
from lumos_nb.traces.execution_trace import load_execution_trace

GROUP = "benchmark_programs"
LAUNCHES, STEPS, WARMUP = 10, 15, 3
BOOTSTRAPS = 2000
SKEW = {"dlrm": 1.0}
"""Of indices, which no trace has: what is known of the data."""
ROOT = Path(__file__).parents[1]


def make(kind: str) -> Step:
    """The step of a kind, on the ranks of this launch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return (ALONE | ON_TWO)[kind]()


def original(kind: str, folder: str) -> None:
    """One rank of a launch: time the steps (no folder), or capture them."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    step = make(kind)
    if folder:
        with capture(folder, steps=4, warmup=WARMUP, timed=3, device="cpu") as recorder:
            for _ in recorder.wrap(range(recorder.total_steps)):
                step()
    else:
        times = []
        for _ in range(WARMUP + STEPS):
            began = time.perf_counter_ns()
            step()
            times.append(time.perf_counter_ns() - began)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(float(np.median(times[WARMUP:]))))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def launch(kind: str, *command: str) -> str:
    """What rank 0 prints; on two ranks where the kind has two."""
    run = [sys.executable]
    if kind in ON_TWO:
        run += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29613"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*run, *command], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=240)
    if done.returncode:
        raise RuntimeError(f"{kind}: {' '.join(command)} failed:\n{done.stdout}\n{done.stderr[-3000:]}")
    return done.stdout


def measured(kind: str, launches: int, folder: Path) -> tuple[Workload, np.ndarray]:
    """What the program runs, and the times of original and program in every launch (launches, 2), in ns."""
    script = str(Path(__file__))
    launch(kind, script, "--original", kind, "--capture", str(folder / "capture"))
    made = benchmark.generate(folder / "capture", folder / "program", alpha=SKEW.get(kind, 0.0))
    program = [str(folder / "program" / "bench.py"), "--device", "cpu", "--iterations", str(STEPS)]
    times = []
    for _ in range(launches):
        ours = json.loads(launch(kind, script, "--original", kind).splitlines()[-1])
        printed = launch(kind, *program, "--warmup", str(WARMUP)).splitlines()[-1]
        times.append((ours, 1e6 * float(printed.partition(" calls, ")[2].partition(" ms")[0])))
    return made, np.array(times)


def rows_of(kind: str, launches: int) -> Iterator[Row]:
    """Coverage and the ratio of step times of one kind."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        made, times = measured(kind, launches, Path(folder))
    rng = np.random.default_rng(0)
    picks = rng.integers(launches, size=(BOOTSTRAPS, launches))
    drawn = np.median(times[picks, 1], axis=1) / np.median(times[picks, 0], axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    ours, theirs = np.median(times, axis=0)
    again = times[1:, 0] / times[:-1, 0] if launches > 1 else np.ones(1)
    spread = float(np.subtract(*np.quantile(again, [0.95, 0.05]))) / 2
    off = 100 * abs(theirs / ours - 1)
    note = f"ratio {theirs / ours:.3f} ({low:.3f} to {high:.3f}), {ours / 1e6:.1f} ms, {launches} launches"
    if kind in SKEW:
        note += f"; lookups drawn by Zipf's law with {SKEW[kind]:g}, as the original's"
    said = f"{100 * made.coverage:.1f} % of operators; of their time {100 * (made.composite_share or 0):.1f} % is the "
    said += f"composites' own; all took {time.monotonic() - began:.0f} s"
    yield Row(f"{GROUP}/{kind}, operator time covered", 100 * (made.time_coverage or 0), "%", target=">= 99", note=said)
    yield Row(f"{GROUP}/{kind}, step off by", off, "%", noise=100 * spread,
              target=f"<= {max(10.0, 100 * spread):.1f}", note=note)  # fmt: skip


def speed_rows() -> Iterator[Row]:
    """How long it takes to make a program of 15,000 nodes, and to start it."""
    config = gpt.GptConfig(layers=22, hidden=32, heads=2, vocab=96, seq=16, batch=2)
    with tempfile.TemporaryDirectory() as name:
        folder, step = Path(name), gpt.single(config)
        with capture(folder / "capture", steps=1, warmup=1, timed=1, device="cpu") as recorder:
            for _ in recorder.wrap(range(recorder.total_steps)):
                step()
        trace = load_execution_trace(folder / "capture" / "rank-0.et.json.gz")
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            benchmark.generate(trace.path, folder / "program")
            seconds.append(time.perf_counter() - began)
        program = [str(folder / "program" / "bench.py"), "--device", "cpu", "--iterations", "1", "--warmup", "0"]
        started = [seconds_of(program) - seconds_of(["-c", "import torch"]) for _ in range(3)]
    note = f"{len(trace.nodes):,} nodes"
    yield Row("benchmark_speed/generate", min(seconds), "s", target="<= 3", note=f"{note}, reading included")
    yield Row("benchmark_speed/start", min(started), "s", target="<= 5", note=f"{note}, one iteration, beyond torch")


def seconds_of(command: list[str]) -> float:
    """Wall time of a process of this Python."""
    began = time.perf_counter()
    launch("", *command)
    return time.perf_counter() - began


def main() -> None:
    """Measure the kinds that are named, or all; rows of others stay as they are."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--launches", type=int, default=LAUNCHES)
    parser.add_argument("--original", metavar="KIND")
    parser.add_argument("--capture", default="", metavar="FOLDER")
    parser.add_argument(
        "--speed", action="store_true", help="how long making and starting a program takes; results.json"
    )
    parser.add_argument("--dry", action="store_true", help="print the rows, and keep accuracy.json")
    arguments = parser.parse_args()
    if arguments.original:
        original(arguments.original, arguments.capture)
        return
    if arguments.speed:
        rows = [*speed_rows()]
        for row in rows:
            print(f"{row.name:50} {row.value:8.2f} s {row.target} {row.note}")
        if not arguments.dry:
            record(RESULTS, rows)
        return
    kinds = arguments.kinds or [*ALONE, *ON_TWO]
    rows = []
    for kind in kinds:
        rows += rows_of(kind, arguments.launches)
        for row in rows[-2:]:
            print(f"{row.name:50} {row.value:8.2f} % {row.noise or 0:8.2f} {row.target} {row.note}", flush=True)
    if not arguments.dry:
        kept = [row for row in read(ACCURACY) if row.group == GROUP]
        kept = [row for row in kept if row.name.partition("/")[2].partition(",")[0] not in kinds]
        record(ACCURACY, [*kept, *rows])


if __name__ == "__main__":
    main()
