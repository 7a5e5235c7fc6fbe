"""Samples of the machine at hand: how long torch's ops and collectives take here, over a grid of random models.

    python -m benchmarks.machine.record --device cpu --out FOLDER --budget 300

It ends with a calibration of the machine, fitted on them.

What is timed. On a CPU: one thread's processor time in a call, which is wall time without what other processes took of
it, less that of an empty call. Each op is in three states:
`time_us` with its inputs out of the nearest large cache (twice the size of L2 was written since), as training leaves
most of them; `warm_us` called again at once; `fresh_us` as `time_us`, its output on memory that the operating system
has yet to hand out page by page, as an allocator gives for a process's largest tensors. On CUDA: events round the call
while the device works off a backlog, so that the host is not in them; L2 flushed, or not for `warm_us`.

How. Every round visits all rows, in another order each time, so that a drift of a shared machine hits all alike and can
be seen. Of a round counts its least time, of the rounds the median; `spread` is the median distance of a round from it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from benchmarks.machine.clock import (
    CALLS,
    STATES,
    Clock,
    check_device,
    l2_bytes,
    over_rounds,
    quiet_process,
    source_of,
)
from benchmarks.machine.fit import fit_recorded, held_out, machine_sheet, read_samples
from benchmarks.machine.host import measure_host
from benchmarks.machine.lookups import measure_lookups
from benchmarks.machine.ops import FORWARD, OPS, Op, Tensors, cases, large_copy
from benchmarks.machine.ranks import measure_collectives
from benchmarks.machine.shapes import Case, models
from lumos_nb.config import Gpu, read_sheet
from lumos_nb.errors import InputError, LumosError
from lumos_nb.job import describe_machine
from lumos_nb.whole_files import whole, write_parquet

ROUNDS = 5
"""So many fit in the budget, as far as the first one can tell; never fewer than three are measured."""


@dataclass(slots=True)
class Row:
    """An op on a shape, and the times of each round by state."""

    op: Op
    case: Case
    times: dict[str, list[float]] = field(default_factory=lambda: {state: [] for state in STATES})

    def visit(self, tensors: Tensors, clock: Clock) -> None:
        """One round's times. The tensors are made anew and dropped: the grid does not fit in memory at once."""
        call = tensors.call(self.op, self.case)
        call()  # once for what a first call does
        engine = clock.autograd_us if self.op.differentiated else 0.0
        for state in clock.states:
            self.times[state].append(max(clock.least(call, state) - engine, 0.001))  # 1 ns is the clock's resolution

    def sizes(self) -> dict[str, Any]:
        """The case as a kernel frame has it: of a gradient the sizes of the forward product."""
        executed = self.case._asdict()
        forward = FORWARD.get(self.case.pass_, "mnk")
        return executed | dict(zip("mnk", [executed[size] for size in forward], strict=True))

    def values(self) -> dict[str, object]:
        """The row of the frame."""
        rounds = self.times["time_us"]
        return {
            **{"pass" if column == "pass_" else column: value for column, value in self.sizes().items()},
            **{state: round(statistics.median(times), 3) if times else None for state, times in self.times.items()},
            **over_rounds(rounds),
            "rounds": len(rounds),
        }


def _number_formats(device: str) -> tuple[str, ...]:
    import torch

    if device == "cpu":
        return ("fp32", "bf16")
    major_minor = torch.cuda.get_device_capability()
    fine = [("tf32", (8, 0)), ("bf16", (8, 0)), ("fp8", (8, 9))]
    return ("fp32", "fp16", *(dtype for dtype, least in fine if major_minor >= least))


def measure_kernels(
    device: str = "cpu", budget_s: float = 240.0, families: Sequence[str] | None = None, seed: int = 0
) -> pl.DataFrame:
    """How long the ops of random models take on this machine.

    Parameters
    ----------
    device
        "cpu" (fp32 and bf16, one thread) or "cuda" (fp32, tf32, fp16, bf16, fp8 as the device can).
    budget_s
        Seconds for all rounds, at least one model's ops three times. It decides how many models and how large ones.
    families
        Names of ops, as "gemm" or "softmax"; None: all.
    seed
        Of the models.

    Returns
    -------
    frame
        A kernel frame with `time_us`, `warm_us`, `fresh_us` (null where not measured), `min_us` (over rounds), `spread`
        (median relative distance of a round from `time_us`), `drift` (last round / first), `rounds`, and `group`: the
        model, as "3:h256" for the fourth, of hidden size 256. For lookups `rows` counts indices and `n` the table's.

    Raises
    ------
    CaptureError
        There is no CUDA device.
    InputError
        A device or a family is unknown.

    Examples
    --------
    >>> frame = measure_kernels(budget_s=2, families=["gemm"])      # doctest: +SKIP
    """
    known = {op.op for op in OPS}
    if unknown := set(families or ()) - known:
        raise InputError(f"unknown families {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}.")
    check_device(device)
    with quiet_process():
        rows = _measured(device, budget_s, tuple(families) if families else None, seed)
    about = describe_machine(device)
    how = "events" if device == "cuda" else "processor time of 1 thread"
    frame = pl.DataFrame([row.values() for row in rows], infer_schema_length=None)
    return frame.select(
        pl.lit(device if device == "cpu" else str(about["gpu"])).alias("gpu"),
        *(pl.col(column) for column in frame.columns if column != "group"),
        "group",
        pl.lit(source_of(about)).alias("source"),
        method=pl.lit(f"torch; median over rounds of the least of up to {CALLS} calls, {how} less an empty call's"),
    )


def _measured(device: str, budget_s: float, families: tuple[str, ...] | None, seed: int) -> list[Row]:
    """Round one takes model after model while its share lasts; the others visit the same rows in random order."""
    tensors, clock, rng = Tensors(device), Clock(device), random.Random(seed)
    scale = 1.0 if device == "cpu" else 250.0  # of work that fits in the same time
    stream = models(device, 5e6 * (10 + budget_s) * scale, min(2**13 * (10 + budget_s), 2**21) * scale, seed)
    rows: list[Row] = []
    started = time.monotonic()
    for number, model in enumerate(stream):
        new = [Row(op, case) for op, case in cases(model, number, _number_formats(device), families)]
        if number == 0 and device == "cpu" and families is None:
            new.append(Row(*large_copy(8 * l2_bytes())))  # the sheet's bandwidth, however small the models
        if number == 0:
            for row in new:
                tensors.call(row.op, row.case)()  # first calls load a second's worth of modules
            started = time.monotonic()
        for row in rng.sample(new, len(new)):
            row.visit(tensors, clock)
        rows += new
        if (round_s := time.monotonic() - started) > budget_s / ROUNDS:
            break
    done = 1
    while done < 3 or time.monotonic() - started + round_s < budget_s:
        for row in rng.sample(rows, len(rows)):
            row.visit(tensors, clock)
        done += 1
    return rows


def profiler_overhead(calls: int = 300) -> dict[str, float]:
    """What a trace adds to an op: traced and bare durations, of an op and of one with three others inside."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    x, w = torch.ones(8, 8), torch.ones(8, 8)
    ops: dict[str, Callable[[], object]] = {
        "aten::mul": lambda: x * w,
        "aten::linear": lambda: torch.nn.functional.linear(x, w),
    }
    figures: dict[str, float] = {}
    with quiet_process():
        clock = Clock("cpu")
        for name, call in ops.items():
            bare = statistics.median(clock.least(call, "warm_us") for _ in range(calls))
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
                for _ in range(calls):
                    call()
            traced = statistics.median(e.time_range.elapsed_us() for e in trace.events() if e.name == name)
            figures |= {f"{name} bare_us": round(bare, 3), f"{name} traced_us": round(traced, 3)}
    return figures | {"empty_call_us": round(clock.empty_us, 3), "autograd_us": round(clock.autograd_us, 3)}


TABLES = ("kernels", "collectives", "lookups")
"""What is recorded, a file each."""


def record(
    device: str,
    out: Path,
    budget_s: float,
    seed: int = 0,
    world_sizes: Sequence[int] = (2, 4),
    only: Sequence[str] = TABLES,
) -> dict[str, Any]:
    """Measure kernels, collectives and lookups; write a table of each, `provenance.json`, and of a CPU `sheet.json`.

    Kernels take four fifths of the budget, collectives one, and lookups half as long again. Where some of them are
    recorded `only`, what `provenance.json` says of the others stays, and what is new says when it was recorded.

    Returns
    -------
    about
        What the JSON file says: machine, versions, date, command, what each table took, its rows and its hash.

    Raises
    ------
    CaptureError
        There is no such device, or a rank failed.
    InputError
        A device or a table is unknown.
    CalibrationError
        Only some tables are wanted, and the others are not there.
    """
    check_device(device)
    if unknown := {*only} - {*TABLES}:
        raise InputError(f"unknown tables {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}.")
    every = {*only} == {*TABLES}
    out.mkdir(parents=True, exist_ok=True)
    backend = "nccl" if device == "cuda" else "gloo"
    sizes = [n for n in world_sizes if device == "cpu" or n <= _gpus()]
    tables: dict[str, Callable[[], pl.DataFrame]] = {
        "kernels": lambda: measure_kernels(device, 0.8 * budget_s, seed=seed),
        "collectives": lambda: pl.concat(measure_collectives(n, backend, 0.1 * budget_s, seed=seed) for n in sizes),
        "lookups": lambda: measure_lookups(device, 0.5 * budget_s, seed=seed),
    }
    command = f"--device {device} --budget {budget_s:g} --seed {seed} --ranks {','.join(map(str, world_sizes))}"
    command += "" if every else f" --only {','.join(only)}"
    now = {
        "machine": describe_machine(device),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": f"python -m benchmarks.machine.record {command} --out FOLDER",
        "budget_s": budget_s,
        "seed": seed,
        "threads": 1,
        "load": os.getloadavg(),
    }
    about: dict[str, Any] = dict(now) if every else read_samples(out)[2]
    for name in only:
        if name == "collectives" and not sizes:
            about[name] = f"not measured: {_gpus()} GPUs are here, collectives were wanted of {world_sizes}"
            (out / f"{name}.parquet").unlink(missing_ok=True)
            continue
        started, file = time.monotonic(), out / f"{name}.parquet"
        frame = tables[name]()
        if name == "kernels" and device == "cpu":
            (out / "sheet.json").write_text(machine_sheet(frame).to_json() + "\n")
        _write(file, frame)
        about[name] = {"rows": frame.height, "seconds": round(time.monotonic() - started, 1)} | _quality(frame)
        about[name] |= {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()} | ({} if every else now)
    if every:
        about["overhead"] = profiler_overhead() if device == "cpu" else _clocks()
        about["host"] = msgspec.to_builtins(measure_host()) if device == "cpu" else None
    with whole(out / "provenance.json") as part:
        part.write_text(json.dumps(about, indent=1) + "\n")
    return about


def _write(file: Path, frame: pl.DataFrame) -> None:
    with whole(file) as part:
        write_parquet(frame, part, compression="zstd", compression_level=19)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _quality(frame: pl.DataFrame) -> dict[str, float]:
    columns = [column for column in frame.columns if column.endswith(("spread", "drift"))]
    return {f"median_{column}": round(float(frame[column].median()), 4) for column in columns}  # type: ignore[arg-type]


def _clocks() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,power.limit", "--format=csv"]
    try:
        return {"nvidia-smi": subprocess.run(query, capture_output=True, text=True, check=True).stdout}
    except (OSError, subprocess.CalledProcessError) as error:
        return {"nvidia-smi": f"clocks unknown: {error}"}


def _summary(out: Path) -> str:
    kernels, collectives, about = read_samples(out)
    lines = [f"{'op':24}{'rows':>6}{'spread':>9}{'drift':>8}{'least us':>11}{'most us':>12}"]
    for name, column, frame in (("kernels", "op", kernels), ("collectives", "collective", collectives)):
        if frame is None:
            lines.append(about[name])
            continue
        table = frame.group_by(column).agg(
            pl.len(), pl.median("spread", "drift"), least=pl.min("time_us"), most=pl.max("time_us")
        )
        lines += [f"{op:24}{n:6}{s:9.1%}{d:8.3f}{a:11.1f}{b:12.1f}" for op, n, s, d, a, b in table.sort(column).rows()]
        lines.append(f"{name}: {about[name]['rows']} rows in {about[name]['seconds']:.0f} s")
    lookups = {
        key: value for key, value in about.get("lookups", {}).items() if key.startswith(("rows", "sec", "median"))
    }
    return "\n".join([*lines, f"lookups: {json.dumps(lookups)}", json.dumps(about["overhead"]), f"written to {out}"])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Record samples, fit them and print what there is; 1 and a line on stderr if it cannot be done."""
    parser = argparse.ArgumentParser(prog="benchmarks.machine.record", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables and their provenance")
    parser.add_argument("--calibration", type=Path, help="folder for the calibration; by default that of the tables")
    parser.add_argument("--sheet", type=Path, help="data sheet of a GPU that no bundled one is of")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for everything")
    parser.add_argument("--ranks", type=_numbers, default=(2, 4), help="of collectives, with commas between")
    parser.add_argument("--only", type=lambda text: text.split(","), default=TABLES, help="tables, commas between")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        record(options.device, options.out, options.budget, options.seed, options.ranks, options.only)
        sys.stdout.write(_summary(options.out) + "\n")
        if {*options.only} == {"lookups"}:
            return 0  # a calibration is of the others
        made = fit_recorded(options.out, sheet=read_sheet(options.sheet, Gpu) if options.sheet else None)
        folder = options.calibration or options.out
        folder.mkdir(parents=True, exist_ok=True)
        sys.stdout.write(f"calibration: {made.save(folder / f'{made.name}.json')}\n{held_out(made)}\n")
    except (LumosError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
