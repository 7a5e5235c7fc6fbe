"""Run the benchmark that workload.json beside this file describes: the operators of a trace, on tensors of its shapes.

Needs torch only; binding.py makes functions of the table.

    python bench.py --iterations 20              on the GPU if there is one; --device cpu
    python bench.py --profile out                also a Kineto trace and step times, for lumos_nb's benchmark.compare
    torchrun --nproc-per-node 2 bench.py         with as many ranks as were traced
    python bench.py --only Optimizer.step        a part: by name; --range 0:100; --part compute or comm
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from lumos_nb.device_activity import write_activity
from lumos_nb.exchange.benchmark.binding import Bench, Run, Unusable, telling_damage


def with_gaps(program: list[Run], gaps_ns: list[int]) -> list[Run]:
    """Calls that each begin so long after the last has ended, as the host's other work let them."""
    clock, ended = time.perf_counter_ns, [time.perf_counter_ns()]

    def later(run: Run, gap_ns: int) -> Run:
        def wait_and_run() -> None:
            until = ended[0] + gap_ns
            while clock() < until:
                pass
            run()
            ended[0] = clock()

        return wait_and_run

    return [later(run, gap_ns) for run, gap_ns in zip(program, gaps_ns, strict=True)]


def measure(program: list[Run], iterations: int, device: str, after: Callable[[], None]) -> list[tuple[int, int]]:
    """(wall_ns, cpu_ns) of each iteration; on a GPU by events on its stream, so that none waits for the last."""
    marks: list[tuple[Any, int]] = []
    for at in range(iterations + 1):
        if at:
            for run in program:
                run()
            after()
        mark: Any = time.perf_counter_ns()
        if device == "cuda":
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record()
        marks.append((mark, time.process_time_ns()))
    if device == "cuda":
        torch.cuda.synchronize()
        return [(round(a.elapsed_time(b) * 1e6), d - c) for (a, c), (b, d) in itertools.pairwise(marks)]
    return [(b - a, d - c) for (a, c), (b, d) in itertools.pairwise(marks)]


def profile(program: list[Run], device: str, folder: Path, times: list[tuple[int, int]]) -> None:
    """Write a Kineto trace of three iterations, and the times of those without."""
    from torch.profiler import ProfilerActivity, schedule
    from torch.profiler import profile as profiler

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    phases = schedule(wait=0, warmup=1, active=3, repeat=1)
    with profiler(activities=kinds, record_shapes=True, schedule=phases) as recorded:
        measure(program, 4, device, recorded.step)
    folder.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ.get("RANK", "0"))
    recorded.export_chrome_trace(str(folder / f"rank-{rank}.json.gz"))
    with (folder / f"steps{f'-{rank}' if rank else ''}.csv").open("w", newline="") as file:
        rows = [(rank, step, *both) for step, both in enumerate(times)]
        csv.writer(file).writerows([("rank", "step", "wall_ns", "cpu_ns"), *rows])


class Parser(argparse.ArgumentParser):
    """One that raises what this module raises, so that a caller in Python is not ended."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser`."""
        raise Unusable(f"{message}; --help lists what can be chosen.")


def whole_number(least: int, most: int = 10**9) -> Callable[[str], int]:
    """What reads a whole number between these."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text[:20]) <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number from {least} to {most}")
        return int(text)

    return read


def span(text: str) -> tuple[int, int]:
    """FROM:TO as numbers, each of which may be left out."""
    found = re.fullmatch(r"(\d{0,18}):(\d{0,18})", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no FROM:TO, such as 0:100")
    return int(found[1] or 0), int(found[2] or sys.maxsize)


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description="Run the operators of a trace, on tensors of its shapes.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--iterations", type=whole_number(1), default=10, metavar="N", help="timed ones (10)")
    parser.add_argument("--warmup", type=whole_number(0), default=3, metavar="N", help="before them (3)")
    parser.add_argument("--profile", type=Path, metavar="OUT", help="a folder for step times and a Kineto trace")
    parser.add_argument("--gaps", choices=["none", "recorded"], default="none", help="between calls, on the host")
    parser.add_argument("--only", metavar="NAME", help="calls of this operator, or within what has NAME in its name")
    parser.add_argument("--range", type=span, default=":", metavar="FROM:TO", help="calls by their numbers")
    threads = whole_number(1, 1024)
    parser.add_argument("--threads", type=threads, metavar="N", help="of each operator on a CPU (as traced, if known)")
    parser.add_argument("--part", choices=["all", "compute", "comm"], default="all")
    return parser.parse_args(argv)


def chosen(arguments: argparse.Namespace) -> Callable[[int, list[str], bool], bool]:
    """Whether a call shall be made, by its number, the names of what it is within, and whether it communicates."""
    start, end = arguments.range

    def wanted(at: int, path: list[str], talks: bool) -> bool:
        within = arguments.only is None or any(arguments.only in name for name in path)
        return start <= at < end and within and arguments.part in ("all", "comm" if talks else "compute")

    return wanted


def main(argv: Sequence[str] | None = None, folder: Path | None = None) -> list[tuple[int, int]]:
    """Run what the command line says; wall and process time of the iterations, in ns."""
    arguments, joined, threads = arguments_of(argv), dist.is_initialized(), torch.get_num_threads()
    try:
        with torch.enable_grad():  # as operators were called: some save more then; no tensor asks for a gradient
            return run(arguments, folder or Path(__file__).parent)
    finally:
        torch.set_num_threads(threads)
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()


def run(arguments: argparse.Namespace, folder: Path) -> list[tuple[int, int]]:
    """Prepare the calls, time them, and say what they took."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise Unusable("torch finds no GPU here; --device cpu runs without one.")
    with telling_damage():
        bench = Bench(folder, arguments.device, chosen(arguments))
        if threads := arguments.threads or bench.table["source"].get("threads"):
            torch.set_num_threads(threads)
        bench.allocate()
    program = bench.bind()
    if arguments.gaps == "recorded":
        program = with_gaps(program, [call.get("gap_ns", 0) for call in bench.calls])
    measure(program, arguments.warmup, arguments.device, lambda: None)
    times = measure(program, arguments.iterations, arguments.device, lambda: None)
    if arguments.profile:
        if arguments.device == "cuda":
            rank = int(os.environ.get("RANK", "0"))
            write_activity(arguments.profile / f"device-{rank}.csv", rank)
        profile(program, arguments.device, arguments.profile, times)
    if not dist.is_initialized() or dist.get_rank() == 0 or dist.get_backend() == "fake":
        for (name, reason), count in sorted(bench.stand_ins.items()):
            print(f"stand-in for {count} x {name}: {reason}")
        wall_ms, cpu_ms = (statistics.median(side) / 1e6 for side in zip(*times, strict=True))
        print(f"{len(program)} calls; an iteration takes {wall_ms:.3f} ms, {cpu_ms:.3f} ms of processor time (medians)")
    return times


if __name__ == "__main__":
    try:
        main()
    except Unusable as error:
        sys.exit(f"bench.py: {error}")
