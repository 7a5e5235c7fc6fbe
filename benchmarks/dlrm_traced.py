"""A DLRM's step with other batches and other tables, predicted from one trace of the base, beside measured.

    python -m benchmarks.dlrm_traced      writes its rows down; a minute on a quiet machine

The base is recorded, then it and its variants take turns in one process, as in `dlrm_steps`. Predicted is the ratio of
the rescaled, replayed step to the step as traced, the mean over traced steps but the first and last; lookups are priced
by the bundled samples. The baseline multiplies the base by the batch.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from benchmarks.dlrm_steps import BUFFER_BYTES, LAUNCHES, STEPS, described, ratios
from benchmarks.here import prices
from benchmarks.rows import ACCURACY, Row, record
from datasets import dlrm
from lumos_nb.critical_path import replay
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.recorder import capture
from lumos_nb.traces.run import load_run
from lumos_nb.workloads.dlrm.rescaling import rescale_batch

TABLES = 13
BASE = dlrm.DlrmConfig(
    bottom=(256, 64), top=(256, 128, 1), rows=(100_000,) * TABLES, dims=(64,) * TABLES, pooling=(10,) * TABLES
)
VARIANTS = {f"batch {batch}": replace(BASE, batch=batch) for batch in (128, 256, 1024, 2048)}
VARIANTS |= {
    "pooling 30": replace(BASE, pooling=(30,) * TABLES),
    "tables of 1,000,000 rows": replace(BASE, rows=(1_000_000,) * TABLES),
}
ROUNDS, TRACED = 12, 10


def _launch(_: int, folder: str, rounds: int) -> None:
    """Record the base, then measure it and its variants in turn."""
    torch.set_num_threads(1)
    buffer = torch.full((BUFFER_BYTES,), 0.01)  # four times as large: of tables of a million rows
    steps = [dlrm.single(config, buffer) for config in (BASE, *VARIANTS.values())]
    with capture(Path(folder, "run"), steps=TRACED, timed=1, executed=0, device="cpu") as recorder:
        for _ in range(recorder.total_steps):
            steps[0]()
            recorder.step()
    turns = []
    for number in range(rounds + 1):
        for task in random.Random(number).sample(range(len(steps)), len(steps)):
            steps[task]()
            cpu = time.process_time_ns()
            for _ in range(STEPS):
                steps[task]()
            turns.append((number, task, (time.process_time_ns() - cpu) // STEPS))
    Path(folder, "0.json").write_text(json.dumps([turn for turn in turns if turn[0]]))


@cache
def measured(launches: int = LAUNCHES, rounds: int = ROUNDS) -> tuple[pl.DataFrame, tuple[Graph, ...]]:
    """`launch`, `round`, `task`, `cpu_ns` of every turn, and the traced steps of the first launch."""
    mp: Any = torch.multiprocessing
    found, graphs = [], ()
    for launch in range(launches):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_launch, (folder, rounds), 1, start_method="spawn")
            turns = json.loads(Path(folder, "0.json").read_text())
            if not graphs:
                recording = Recording.of(load_run(Path(folder, "run")))
                inner = recording.step_times().filter(~pl.col("edge"))["step"]
                graphs = tuple(build_graph(recording, step) for step in inner)
        frame = pl.DataFrame(turns, schema=["round", "task", "cpu_ns"], orient="row")
        found.append(frame.with_columns(launch=pl.lit(launch)))
    return pl.concat(found), graphs


def traced_rows() -> Iterator[Row]:
    """Rows of `accuracy.json`."""
    turns, graphs = measured()
    truth, (made, lookups) = ratios(turns, "cpu_ns"), prices()
    tables, errors = described(BASE), []
    for (name, config), ratio, spread in zip(VARIANTS.items(), truth["ratio"], truth["spread"], strict=True):
        kept = {"tables": tables, "to_tables": described(config), "lookups": lookups, "calibration": made}
        guess = np.mean(
            [replay(rescale_batch(g, BASE.batch, config.batch, **kept)).step_ns / replay(g).step_ns for g in graphs]
        )
        errors.append(100 * (guess / ratio - 1))
        yield Row(
            f"dlrm_traced/{name}", abs(errors[-1]), "%", "in proportion to the batch",
            abs(100 * (config.batch / BASE.batch / ratio - 1)), spread,
            note=f"{ratio:.3f} times the base measured, {guess:.3f} predicted",
        )  # fmt: skip
    yield Row(
        "dlrm_traced/mean", float(np.abs(errors).mean()), "%", note=f"batch {BASE.batch} traced, {len(graphs)} steps"
    )


def main() -> None:
    """Write the rows down and print them, and how long it took."""
    started, rows = time.monotonic(), [*traced_rows()]
    record(ACCURACY, rows)
    for row in rows:
        beside = f"{row.baseline} {row.baseline_value:.2f}" if row.baseline_value is not None else ""
        print(f"{row.name:38} {row.value:7.2f} {row.unit:3} {beside:36} noise {row.noise or 0:5.2f}  {row.note}")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
