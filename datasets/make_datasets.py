"""Record the bundled runs: a small GPT alone, on two ranks and on 20, and what changes to it do to its step time.

    python datasets/make_datasets.py                                  the CPU runs: 12 minutes at most, 2 cores
    python datasets/make_datasets.py --paired                         only gpt-single-paired, gpt-ddp-paired: a minute
    python datasets/make_datasets.py --device cuda --pack --out DIR   one GPU: depths, widths, batches
    python datasets/make_datasets.py --hash                           only renew the table of files in README.md

Nothing else may run meanwhile: times are only worth what the quiet of the machine is worth. Within a launch the
variants take turns with the base, round after round, since launches differ by far more than what is to be measured;
what is kept is the ratio to the base of the same round, of several launches, beside a copy of the base (`again`).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpt
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lumos_nb.job import describe_machine
from lumos_nb.labels import ddp_hook
from lumos_nb.recorder import capture

HERE = Path(__file__).parent
DELAYED_RANK = 1
DELAYS_MS = (0, 5, 10, 20, 40)
BOOTSTRAP_SAMPLES = 2000
MAX_TOTAL_BYTES = 30 * 2**20
RATIO_COLUMNS = (
    *("kind", "launch", "variant", "base", "n", "base_ms", "variant_ms", "delta_ms"),
    *("ratio", "ratio_lo", "ratio_hi", "cpu_ratio"),
)
STEP_COLUMNS = ("kind", "launch", "round", "turn", "variant", "rank", "step_ns", "wall_ns", "cpu_ns")


@dataclass(frozen=True, slots=True)
class Variant:
    """A change to the base: other sizes, or a delay on one rank."""

    config: gpt.GptConfig
    delay_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to record."""

    device: str = "cpu"
    launches: int = 6
    rounds: int = 30
    warmup: int = 5
    timed: int = 30
    traced: int = 10
    lead_in: int = 0  # steps of a turn before the measured ones: on a device the host gets its lead in them
    burst: int = 1  # measured steps of a turn

    @property
    def base(self) -> gpt.GptConfig:
        """The model that all variants change."""
        if self.device == "cpu":
            return gpt.GptConfig()
        return gpt.GptConfig(layers=12, hidden=1024, heads=16, vocab=32768, seq=1024, batch=8, dtype=torch.bfloat16)


CHANGES: dict[str, dict[str, dict[str, int]]] = {
    "single": {
        "layers_1": {"layers": 1},
        "layers_4": {"layers": 4},
        "hidden_256": {"hidden": 256},
        "layers_4_hidden_256": {"layers": 4, "hidden": 256},
        "batch_4": {"batch": 4},
        "batch_16": {"batch": 16},
        "seq_128": {"seq": 128},
    },
    "ddp": {"layers_4": {"layers": 4}, "hidden_256": {"hidden": 256}, "batch_16": {"batch": 16}},
    "tp": {"layers_4": {"layers": 4}, "hidden_256": {"hidden": 256}, "batch_16": {"batch": 16}},
    "pp": {
        "layers_4": {"layers": 4},
        "hidden_256": {"hidden": 256},
        "batch_16": {"batch": 16},
        "micro_batches_2": {"micro_batches": 2},
        "micro_batches_8": {"micro_batches": 8},
    },
    "cuda": {
        "layers_6": {"layers": 6},
        "layers_24": {"layers": 24},
        "hidden_512": {"hidden": 512},
        "hidden_2048": {"hidden": 2048},
        "batch_4": {"batch": 4},
        "batch_16": {"batch": 16},
        "seq_512": {"seq": 512},
    },
}
"""What each kind of run varies, one process holding the base and all of them."""

STEPS: dict[str, Callable[[gpt.GptConfig, str], gpt.Step]] = {
    "single": gpt.single,
    "cuda": gpt.single,
    "ddp": lambda config, device: gpt.data_parallel(config, device, hook=ddp_hook),
    "tp": gpt.tensor_parallel,
    "pp": gpt.pipeline_parallel,
    "grid": gpt.grid_parallel,
}
WORLD_SIZE = {"single": 1, "cuda": 1, "ddp": 2, "tp": 2, "pp": 2, "grid": 20}
CAPTURED = {"single": ("base",), "ddp": ("base",), "tp": ("base",), "pp": ("base",), "grid": ("base",)}
CAPTURED |= {"cuda": ("base", "layers_24", "hidden_2048", "batch_16")}
PAIRED = {"single": "gpt-single-paired", "ddp": "gpt-ddp-paired"}
"""Runs whose execution traces are of the traced steps, so that ids link the two; few steps, since these are large."""

GRID = gpt.GptConfig(layers=4, hidden=32, heads=2, vocab=64, seq=16, batch=8, micro_batches=4)
"""The model of the run on 20 ranks, five pipelines of four stages: so small because they share a few cores."""


def variants(kind: str, plan: Plan) -> dict[str, Variant]:
    """The base, a copy of it, and every change to it."""
    base = Variant(GRID if kind == "grid" else plan.base)
    every = {"base": base, "again": base}
    every |= {name: Variant(replace(plan.base, **changes)) for name, changes in CHANGES.get(kind, {}).items()}
    return every if kind == "single" else every | {"delay_20": Variant(plan.base, 20.0)}


# --- in the processes of one launch


def join_launch(rank: int, world_size: int, store: str, device: str) -> None:
    """One thread a rank, each on a core of its own, and the ranks' process group."""
    torch.set_num_threads(1)
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= world_size:
            os.sched_setaffinity(0, {cores[rank]})
    if world_size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


def leave_launch() -> None:
    """End the process group when no thread of it is at work any more."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def take_turn(step: gpt.Step, delay_ms: float, plan: Plan) -> tuple[int, int, int]:
    """End (host clock), wall time and process time of a step, in ns, the mean over a burst."""
    for _ in range(plan.lead_in):
        step(delay_ms)
    cpu, start = time.process_time_ns(), time.perf_counter_ns()
    if plan.device == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
    for _ in range(plan.burst):
        step(delay_ms)
    if plan.device == "cuda":
        last.record()
        torch.cuda.synchronize()
        wall = round(first.elapsed_time(last) * 1e6)
    else:
        wall = time.perf_counter_ns() - start
    return time.perf_counter_ns(), wall // plan.burst, (time.process_time_ns() - cpu) // plan.burst


def measure(rank: int, world_size: int, store: str, kind: str, plan: Plan, folder: str) -> None:
    """One rank of one launch: variants take turns; rows of (round, turn, variant, end, wall, cpu) as JSON."""
    join_launch(rank, world_size, store, plan.device)
    every = variants(kind, plan)
    steps = {name: STEPS[kind](variant.config, plan.device) for name, variant in every.items()}
    delays = {name: variant.delay_ms if rank == world_size - 1 else 0.0 for name, variant in every.items()}
    for _ in range(plan.warmup):
        for step in steps.values():
            step(0.0)
    rows: list[tuple[Any, ...]] = [(-1, -1, "start", *take_turn(steps["base"], 0.0, plan))]
    for k in range(plan.rounds):
        names = random.Random(k).sample([*steps], len(steps))  # each follows another one in another round
        rows += [(k, turn, name, *take_turn(steps[name], delays[name], plan)) for turn, name in enumerate(names)]
    Path(folder, f"{rank}.json").write_text(json.dumps(rows))
    del steps
    leave_launch()


def record(
    rank: int, world_size: int, store: str, kind: str, name: str, variant: Variant, delayed: bool, plan: Plan, out: str
) -> None:
    """One rank of one captured run, with a delay that changes from step to step or none."""
    join_launch(rank, world_size, store, plan.device)
    step = STEPS[kind](variant.config, plan.device)
    folder, log = Path(out, name), []
    sizes = {key: value if isinstance(value, int) else str(value) for key, value in fields_of(variant.config).items()}
    arguments = {"kind": kind, **sizes, "delayed_rank": DELAYED_RANK if delayed else None}
    steps, timed = (plan.traced * 3 // 2, plan.timed * 4 // 3) if delayed else (plan.traced, plan.timed)
    counts = {"steps": steps, "warmup": plan.warmup, "timed": timed}
    slim = {"executed": 0, "record_shapes": False} if kind == "grid" else {}
    with capture(
        folder, **counts, **slim, paired=name in PAIRED.values(), device=plan.device, arguments=arguments
    ) as rec:
        shuffled = shuffled_delays(rec.total_steps) if delayed else [0] * rec.total_steps
        for delay_ms in rec.wrap(shuffled):
            log.append((rec.phase, rec.phase_step, DELAYED_RANK, delay_ms))
            step(delay_ms if rank == DELAYED_RANK else 0.0)
    if delayed and rank == 0:
        write_csv(folder / "delays.csv", ("phase", "step", "rank", "delay_ms"), log)
    del step
    leave_launch()


def fields_of(config: gpt.GptConfig) -> dict[str, Any]:
    """The fields of a frozen dataclass with slots."""
    return {name: getattr(config, name) for name in config.__slots__}


def shuffled_delays(n: int) -> list[int]:
    """`n` delays: every five steps have each of the five, in an order of their own."""
    rng = random.Random(0)
    return [ms for _ in range(0, n, len(DELAYS_MS)) for ms in rng.sample(DELAYS_MS, len(DELAYS_MS))][:n]


# --- in the process that launches


def launch(target: Callable[..., None], world_size: int, *args: Any, timeout_s: float = 300) -> None:
    """Run `target(rank, world_size, store, *args)` in fresh processes."""
    method = "spawn" if world_size <= 2 else "forkserver"  # many processes load torch once
    multiprocessing.set_forkserver_preload(["torch.distributed.pipelining", "torch.distributed.tensor.parallel"])
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            target, (world_size, str(Path(folder, "store")), *args), world_size, join=False, start_method=method
        )
        deadline = time.monotonic() + timeout_s
        while not processes.join(max(deadline - time.monotonic(), 0.1)):
            if time.monotonic() > deadline:
                for process in processes.processes:
                    process.kill()
                raise TimeoutError(f"{target.__name__}{args[:2]} took longer than {timeout_s:.0f} s; nothing was kept")


def measured_rows(kind: str, number: int, plan: Plan) -> list[tuple[Any, ...]]:
    """One launch's rows of STEP_COLUMNS. A step lasts from the latest end over ranks of the step before to its own."""
    world_size = WORLD_SIZE[kind]
    with tempfile.TemporaryDirectory() as folder:
        launch(measure, world_size, kind, plan, folder)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]
    rows, before = [], 0
    for turns in zip(*ranks, strict=True):
        end = max(turn[3] for turn in turns)
        step_ns = end - before if world_size > 1 else turns[0][4]
        if turns[0][0] >= 0:
            for rank, (k, turn, name, _, wall, cpu) in enumerate(turns):
                rows.append((kind, number, k, turn, name, rank, step_ns, wall, cpu))
        before = end
    return rows


def ratios(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """RATIO_COLUMNS: each variant against the base of the same round, with a bootstrap interval of the median."""
    kind, number = rows[0][:2]
    step: dict[str, dict[int, int]] = {}
    cpu: dict[str, dict[int, int]] = {}
    for _, _, k, _, name, _, step_ns, _, cpu_ns in rows:
        step.setdefault(name, {})[k] = step_ns
        cpu.setdefault(name, {})[k] = cpu.get(name, {}).get(k, 0) + cpu_ns
    rng, table = np.random.default_rng(0), []
    for name in (name for name in step if name != "base"):
        pairs = np.array([(step[name][k], step["base"][k]) for k in sorted(step["base"])]) / 1e6
        ratio = pairs[:, 0] / pairs[:, 1]
        draws = np.median(ratio[rng.integers(len(ratio), size=(BOOTSTRAP_SAMPLES, len(ratio)))], axis=1)
        low, high = np.quantile(draws, (0.025, 0.975))
        cpu_ratio = statistics.median(cpu[name][k] / cpu["base"][k] for k in cpu["base"])
        figures = (*np.median(pairs, axis=0)[::-1], np.median(pairs[:, 0] - pairs[:, 1]), np.median(ratio), low, high)
        table.append((kind, number, name, "base", len(ratio), *(f"{x:.5g}" for x in (*figures, cpu_ratio))))
    return sorted(table, key=lambda row: str(row[2]))


def write_csv(path: Path, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def record_all(kinds: list[str], plan: Plan, out: Path) -> None:
    """Every capture, and the data-parallel run with delays."""
    for kind in kinds:
        for name in CAPTURED[kind]:
            folder = f"gpt-{kind}" if name == "base" else f"gpt-{kind}-{name}"
            print(f"recording {folder}", flush=True)
            shutil.rmtree(out / folder, ignore_errors=True)
            variant = variants(kind, plan)[name]
            own = replace(plan, timed=min(plan.timed, 10)) if kind == "grid" else plan
            launch(record, WORLD_SIZE[kind], kind, folder, variant, False, own, str(out))
            for path in (out / folder).glob("rank-*.json.gz") if kind == "grid" else ():
                keep_outermost(path)
    record_paired([kind for kind in kinds if kind in PAIRED], plan, out)
    if "ddp" in kinds:
        print("recording gpt-ddp-delay", flush=True)
        shutil.rmtree(out / "gpt-ddp-delay", ignore_errors=True)
        launch(record, 2, "ddp", "gpt-ddp-delay", Variant(plan.base), True, plan, str(out))


def record_paired(kinds: Iterable[str], plan: Plan, out: Path) -> None:
    """Profile and execution trace of the same three steps."""
    for kind in kinds:
        print(f"recording {PAIRED[kind]}", flush=True)
        shutil.rmtree(out / PAIRED[kind], ignore_errors=True)
        own = replace(plan, traced=3, timed=min(plan.timed, 10))
        launch(record, WORLD_SIZE[kind], kind, PAIRED[kind], Variant(plan.base), False, own, str(out))


def keep_outermost(path: Path) -> None:
    """Leave out of a trace what operators call and which backward belongs to which forward: a quarter remains."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    kept, until = [], {}
    for event in sorted(trace["traceEvents"], key=lambda e: (float(e.get("ts", 0)), -float(e.get("dur", 0)))):
        if event.get("cat") == "cpu_op":
            end = event["ts"] + event["dur"]
            if end <= until.get(event["tid"], 0):
                continue
            until[event["tid"]] = end
        if event.get("cat") != "fwdbwd":
            kept.append(event)
    path.write_bytes(gzip.compress(json.dumps(trace | {"traceEvents": kept}).encode(), mtime=0))


def measure_all(kinds: list[str], plan: Plan, out: Path, deadline: float) -> list[tuple[Any, ...]]:
    """Every launch of every kind, launch by launch, until the deadline; the ratios."""
    rows: list[tuple[Any, ...]] = []
    table: list[tuple[Any, ...]] = []
    for number in range(plan.launches):
        for kind in kinds:
            if time.monotonic() > deadline:
                print(f"out of time: {kind} has {number} launches of {plan.launches}", flush=True)
                continue
            print(f"launch {number + 1} of {plan.launches}: {kind}", flush=True)
            new = measured_rows(kind, number, plan)
            rows += new
            table += ratios(new)
    prefix = "cuda-" if plan.device == "cuda" else ""
    write_csv(out / f"{prefix}variant-steps.csv", STEP_COLUMNS, rows)
    write_csv(out / f"{prefix}variants.csv", RATIO_COLUMNS, table)
    about = {**describe_machine(plan.device), "launches": plan.launches, "rounds": plan.rounds, "threads": 1}
    (out / f"{prefix}variants.json").write_text(json.dumps(about, indent=1) + "\n")
    return table


def print_summary(table: list[tuple[Any, ...]], out: Path, started: float) -> None:
    """The ratio of every variant, with its spread over launches."""
    print("kind     variant                launches   ratio  lowest highest  delta ms    cpu")
    for kind, name in sorted({(row[0], row[2]) for row in table}):
        mine = [row for row in table if (row[0], row[2]) == (kind, name)]
        ratio, delta, cpu = ([float(row[i]) for row in mine] for i in (8, 7, 11))
        print(
            f"{kind:8} {name:22} {len(mine):8} {statistics.median(ratio):7.3f} {min(ratio):7.3f} {max(ratio):7.3f} "
            f"{statistics.median(delta):9.2f} {statistics.median(cpu):6.2f}"
        )
    files = data_files(out)
    total = sum(path.stat().st_size for path in files)
    print(f"{len(files)} files, {total / 2**20:.1f} MiB in {out}, {time.monotonic() - started:.0f} s")
    if total > MAX_TOTAL_BYTES:
        sys.exit(f"{total} bytes is more than the {MAX_TOTAL_BYTES} that may be committed; trace fewer steps")


def data_files(folder: Path) -> list[Path]:
    """What the README's table lists: everything but code, the README itself and what is hidden (caches)."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".md")]
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def write_readme(folder: Path) -> None:
    """The README beside the data, its table of files renewed."""
    text = (HERE / "README.md").read_text()
    head, _, rest = text.partition("<!-- files -->\n")
    _, _, tail = rest.partition("<!-- end of files -->")
    lines = ["| file | bytes | sha256 |", "|---|---|---|"]
    for path in data_files(folder):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"| {path.relative_to(folder).as_posix()} | {path.stat().st_size} | {digest} |")
    table = "\n".join(lines)
    (folder / "README.md").write_text(f"{head}<!-- files -->\n{table}\n<!-- end of files -->{tail}")


def pack(out: Path) -> None:
    """Each capture in one tar file of its own."""
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        with tarfile.open(out / f"{folder.name}.tar", "w") as archive:
            archive.add(folder, folder.name)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", help="kinds, with commas between: single, ddp, tp, pp, grid; give --out too")
    parser.add_argument("--launches", type=int)
    parser.add_argument("--minutes", type=float, help="start no launch after this long (10, on CUDA 7)")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    parser.add_argument("--pack", action="store_true", help="each capture as one tar file")
    parser.add_argument("--paired", action="store_true", help="only record profiles with their execution traces")
    parser.add_argument("--hash", action="store_true", help="only renew the README's table of files")
    options = parser.parse_args()
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.hash:
        write_readme(options.out)
        return
    plan = Plan(options.device)
    if options.paired:
        record_paired(PAIRED, plan, options.out)
        write_readme(options.out)
        return
    if options.device == "cuda":
        plan = replace(plan, launches=5, rounds=20, traced=6, lead_in=1, burst=3)
    if options.quick:
        plan = replace(plan, launches=1, rounds=2, warmup=1, timed=3, traced=2)
    plan = replace(plan, launches=options.launches or plan.launches)
    kinds = ["cuda"] if options.device == "cuda" else (options.only or "single,ddp,tp,pp,grid").split(",")
    record_all(kinds, plan, options.out)
    minutes = options.minutes or (7 if options.device == "cuda" else 10)
    measured = [kind for kind in kinds if kind in CHANGES]
    table = measure_all(measured, plan, options.out, started + 60 * minutes) if measured else []
    if options.pack:
        pack(options.out)
    write_readme(options.out)
    print_summary(table, options.out, started)


if __name__ == "__main__":
    main()
