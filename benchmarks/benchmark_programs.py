"""Generated benchmark programs beside the training steps that they were made from, on this machine.

    python -m benchmarks.benchmark_programs                 all kinds, LAUNCHES each, in ten minutes; or name some
    python -m benchmarks.benchmark_programs gpt --launches 2 --dry
    python -m benchmarks.benchmark_programs --speed         how long making and starting a program takes

A step is captured once (its profile gives the coverage), a program is generated, and then original and program are
launched in turns, unprofiled, in fresh processes: a launch's time is the median of its steps, on rank 0. The ratio is
the median over launches of the program over that of the original, with a 95 % interval bootstrapped over launches.
Beside it stands how far the original is off from itself, every other launch against the rest, and as noise how far the
ratios of one launch of the original to the next lie from 1 (half their 5 to 95 % range). No time of an original's
launch goes into a program; gaps, where a kind says so, are those of the capture's profile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
from benchmarks.rows import ACCURACY, RESULTS, Row, read, record, record_timed
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
GAPS = {"tp": "recorded"}
"""Kinds whose step is in good part Python between operators (DTensor's), which a program waits for if asked to."""
PORT = 29613
TIMEOUT_S = 240
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
            began = time.perf_counter_ns(), time.process_time_ns()
            step()
            times.append((time.perf_counter_ns() - began[0], time.process_time_ns() - began[1]))
        print(json.dumps(np.median(times[WARMUP:], axis=0).tolist()))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def launch(kind: str, *command: str) -> str:
    """What rank 0 prints; two processes where the kind has two ranks, as torchrun starts them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    ranks: list[dict[str, str]] = [{}]
    if kind in ON_TWO:
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
        ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    started = [subprocess.Popen([sys.executable, *command], env=environment | of, **said) for of in ranks]
    try:
        texts = [one.communicate(timeout=TIMEOUT_S) for one in started]
    finally:
        for one in started:
            one.kill()
    if any(one.returncode for one in started):
        raise RuntimeError(
            f"{kind}: {' '.join(command)} failed:\n" + "\n".join(text[-3000:] for both in texts for text in both)
        )
    return texts[0][0]


def measured(kind: str, launches: int, folder: Path) -> tuple[Workload, np.ndarray]:
    """What the program runs, and wall and processor time of original and program (launches, 2, 2), in ms."""
    script = str(Path(__file__))
    launch(kind, script, "--original", kind, "--capture", str(folder / "capture"))
    made = benchmark.generate(folder / "capture", folder / "program", alpha=SKEW.get(kind, 0.0))
    program = [str(folder / "program" / "bench.py"), "--device", "cpu", "--gaps", GAPS.get(kind, "none")]
    program += ["--iterations", str(STEPS), "--warmup", str(WARMUP)]
    times = []
    for _ in range(launches):
        ours = json.loads(launch(kind, script, "--original", kind).splitlines()[-1])
        theirs = re.search(r"takes ([\d.]+) ms, ([\d.]+) ms", launch(kind, *program))
        if theirs is None:
            raise RuntimeError(f"{kind}: bench.py has printed no time")
        times.append(([ns / 1e6 for ns in ours], [float(ms) for ms in theirs.groups()]))
    return made, np.array(times)


def rows_of(kind: str, launches: int) -> Iterator[Row]:
    """Coverage and the ratio of step times of one kind."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        made, times = measured(kind, launches, Path(folder))
    wall, (ours, theirs) = times[..., 0], np.median(times, axis=0)
    picks = np.random.default_rng(0).integers(launches, size=(BOOTSTRAPS, launches))
    drawn = np.median(wall[picks, 1], axis=1) / np.median(wall[picks, 0], axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    again = wall[1:, 0] / wall[:-1, 0] if launches > 1 else np.ones(1)
    spread = 50 * float(np.subtract(*np.quantile(again, [0.95, 0.05])))
    itself = float(np.median(wall[::2, 0]) / np.median(wall[1::2, 0])) if launches > 1 else 1.0
    ratio, processor = theirs / ours
    note = f"ratio {ratio:.3f} ({low:.3f} to {high:.3f}), of processor time {processor:.3f}; {ours[0]:.1f} ms, "
    note += f"{launches} launches" + (", gaps as recorded" if kind in GAPS else "")
    if kind in SKEW:
        note += f"; lookups drawn by Zipf's law with {SKEW[kind]:g}, as the original's"
    yield Row(f"{GROUP}/{kind}, step off by", 100 * abs(ratio - 1), "%", "original from itself",
              100 * abs(itself - 1), spread, f"<= {max(10.0, spread):.1f}", note)  # fmt: skip
    said = f"{100 * (made.called_share or 0):.1f} % in the calls themselves; all of {kind} took "
    said += f"{time.monotonic() - began:.0f} s"
    yield Row(f"{GROUP}/{kind}, operator time covered", 100 * (made.time_coverage or 0), "%", "of operators",
              100 * made.coverage, target=">= 99", note=said)  # fmt: skip


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
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(ALONE | ON_TWO)}")
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
            record_timed(RESULTS, rows)
        return
    for kind in arguments.kinds or [*ALONE, *ON_TWO]:
        rows = [*rows_of(kind, arguments.launches)]
        for row in rows:
            print(f"{row.name:50} {row.value:8.2f} % {row.noise or 0:8.2f} {row.target} {row.note}", flush=True)
        if not arguments.dry:
            record(ACCURACY, [row for row in read(ACCURACY) if row.group == GROUP and not _is_of(row, kind)] + rows)


def _is_of(row: Row, kind: str) -> bool:
    return row.name.startswith(f"{GROUP}/{kind},")


if __name__ == "__main__":
    main()
