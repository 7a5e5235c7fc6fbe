"""Steps of small transformers for language on this machine, predicted from a dry run and calibration, beside measured.

    python -m benchmarks.nlp_steps      writes its rows down; three minutes on a quiet machine

Models like BERT, GPT-2 and XLNet at four batch sizes, as in Lin et al. (TPDS 2024). A dry run (`ln.dry_run`, nothing is
computed) lists the operators of a step with their shapes; this machine's calibration prices those that it knows sizes
of, and all of them pay what torch's Python took between two operators of another model
(`gpt-single`: overhead T1). Measured as `dlrm_steps` does: one process, turns in random order, processor time; scored
is the ratio to GPT-2 at the second batch size. The baseline prices by FLOPs and bytes at the data sheet's rates.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from benchmarks.cpu_accuracy import by_sheet
from benchmarks.dlrm_steps import LAUNCHES, Scores, ratios
from benchmarks.here import between_ns, prices
from benchmarks.rows import ACCURACY, Row, record
from datasets import gpt, nlp
from lumos_nb.costs.operators import OPERATORS, Call, listed, operator_key, sizes_of
from lumos_nb.costs.work import with_work
from lumos_nb.fake_group import DryRun, dry_run

KINDS, BATCHES = ("gpt2", "bert", "xlnet"), (4, 8, 16, 32)
TASKS = [("gpt2", 8), *((kind, batch) for kind in KINDS for batch in BATCHES if (kind, batch) != ("gpt2", 8))]
ROUNDS, STEPS = 12, 2
LISTS = ("aten::cat", "aten::stack")
SECOND = ("aten::add", "aten::sub", "aten::mul", "aten::div", "aten::pow", "aten::lerp")
"""Operators of two operands; one that is a number is no tensor, so that a dry run does not list it."""


def dry(make: Callable[[], nlp.Step]) -> DryRun:
    """The operators of a step, optimizer states made before."""

    def warm() -> nlp.Step:
        step = make()
        step()
        return step

    return dry_run(lambda step: step(), world_size=1, setup=warm)


def requests(run: DryRun) -> pl.DataFrame:
    """A kernel frame of the operators that have sizes; `ops` in all are in the run."""
    keyed = run.ops.with_columns(key=operator_key(pl.col("name").str.replace(r"^(\w+)\.(\w+).*$", "$1::$2")))
    rows = []
    for key, shapes, dtype in keyed.select("key", "shapes", "dtype").iter_rows():
        if key in OPERATORS and dtype:
            dims = listed(shapes)
            dims = [dims] if key in LISTS else [*dims, []] if key in SECOND and len(dims) == 1 else dims
            rows.append(sizes_of(key, Call(dims, types=[dtype] * len(dims))))
    frame = pl.DataFrame(rows, infer_schema_length=None)
    return frame.filter(pl.col("why").is_null()).drop("why")


@cache
def between_us() -> float:
    """Time between two operators (T1) of a traced step of another model, for each operator that its dry run lists."""
    return between_ns() / 1e3 / dry(lambda: gpt.single(gpt.GptConfig(), "cpu")).ops.height


def predicted_us(kind: str, batch: int) -> tuple[float, float]:
    """A step by calibration, and by FLOPs and bytes; both with what is between operators."""
    run, made = dry(lambda: nlp.training(kind, batch)), prices()[0]
    frame = requests(run)
    priced, between = made.predict_kernels(frame), between_us() * run.ops.height
    plain = with_work(frame)
    return priced["dur_us"].sum() + between, plain.select(by_sheet(plain, made.gpu).sum()).item() + between


def _launch(_: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    steps = [nlp.training(*task) for task in TASKS]
    turns = []
    for number in range(rounds + 1):
        for task in random.Random(number).sample(range(len(steps)), len(steps)):
            steps[task]()
            wall, cpu = time.perf_counter_ns(), time.process_time_ns()
            for _ in range(STEPS):
                steps[task]()
            taken = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
            turns.append((number, task, taken[0] // STEPS, taken[1] // STEPS))
    Path(folder, "0.json").write_text(json.dumps([turn for turn in turns if turn[0]]))


@cache
def measured(launches: int = LAUNCHES, rounds: int = ROUNDS) -> pl.DataFrame:
    """`launch`, `round`, `task`, `wall_ns`, `cpu_ns` of every turn."""
    mp: Any = torch.multiprocessing
    found = []
    for launch in range(launches):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_launch, (folder, rounds), 1, start_method="spawn")
            turns = json.loads(Path(folder, "0.json").read_text())
        frame = pl.DataFrame(turns, schema=["round", "task", "wall_ns", "cpu_ns"], orient="row")
        found.append(frame.with_columns(launch=pl.lit(launch)))
    return pl.concat(found)


def nlp_rows() -> Iterator[Row]:
    """Rows of `accuracy.json`."""
    truth = ratios(measured(), "cpu_ns")
    found = np.array([predicted_us(*task) for task in TASKS]) / 1e6
    ours, plain = (Scores.of(found[:, i], truth["ratio"].to_numpy()) for i in (0, 1))
    whole_s = measured().group_by("task").agg(pl.median("cpu_ns")).sort("task")["cpu_ns"].to_numpy() / 1e9
    times, plainly = (Scores(100 * (found[:, i] / whole_s - 1)) for i in (0, 1))
    for i, (kind, batch) in enumerate(TASKS[1:]):
        note = f"{truth['ratio'][i]:.3f} times the base measured, {found[i + 1, 0] / found[0, 0]:.3f} predicted"
        yield Row(
            f"nlp_steps/{kind}, batch {batch}", abs(ours.errors[i]), "%", "FLOPs and bytes", abs(plain.errors[i]),
            truth["spread"][i], note=note,
        )  # fmt: skip
    note = f"{len(TASKS) - 1} tasks, {measured()['launch'].n_unique()} launches; "
    note += f"base {1e3 * whole_s[0]:.1f} ms measured, {1e3 * found[0, 0]:.1f} ms predicted; "
    note += f"mean {np.abs(ours.errors).mean():.1f} %, greatest {np.abs(ours.errors).max():.1f} %"
    yield Row(
        "nlp_steps/geometric mean", ours.geomean, "%", "FLOPs and bytes", plain.geomean,
        float(truth["spread"].median()), "<= 6.0", note,  # type: ignore[arg-type]
    )  # fmt: skip
    note = (
        f"the step itself and no ratio; mean {np.abs(times.errors).mean():.1f} %, signed {times.errors.mean():+.1f} %"
    )
    yield Row(
        "nlp_steps/time of a step, geometric mean", times.geomean, "%", "FLOPs and bytes", plainly.geomean, note=note
    )


def main() -> None:
    """Write the rows down and print them, and how long it took."""
    started, rows = time.monotonic(), [*nlp_rows()]
    record(ACCURACY, rows)
    for row in rows:
        beside = f"{row.baseline} {row.baseline_value:.2f}" if row.baseline_value is not None else ""
        print(f"{row.name:30} {row.value:7.2f} {row.unit:3} {beside:24} noise {row.noise or 0:5.2f}  {row.note}")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
