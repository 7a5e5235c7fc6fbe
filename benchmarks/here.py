"""What was recorded on the machine at hand, for predictions of steps that are then measured on it: `make here`.

    python -m benchmarks.here      ten minutes on a quiet machine; into build/this-machine

The bundled samples are another machine's, as the bundled runs are. A step that is measured today is predicted from what
`make calibrate` would record today: kernels, collectives, lookups and the host's time; and from a profile of one model,
a small GPT, for what lies between operators.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl

import lumos_nb as ln
from benchmarks.machine import record
from datasets import gpt
from lumos_nb.costs.calibration import Calibration, load_calibration
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.host import host_parts
from lumos_nb.costs.lookups import LookupModel
from lumos_nb.errors import CalibrationError
from lumos_nb.graph import Recording, build_graph
from lumos_nb.traces.run import load_run

FOLDER = Path(__file__).parents[1] / "build" / "this-machine"
CALIBRATION, TRACED = FOLDER / "cpu.json", FOLDER / "gpt-single"
STEPS = 6


def record_here() -> int:
    """Record samples and a profile; the status of the first that fails."""
    asked = ("--device", "cpu", "--out", FOLDER, "--calibration", FOLDER, "--budget", 300)
    if status := record.main([str(word) for word in asked]):
        return status
    step = gpt.single(gpt.GptConfig(), "cpu")
    with ln.capture(TRACED, steps=STEPS, device="cpu") as recording:
        for _ in recording.wrap(range(1000)):
            step()
    return 0


def there(path: Path) -> Path:
    """A path, or a CalibrationError that says how to record what should be there."""
    if not path.exists():
        raise CalibrationError(f"{path} is not there: run make here, which records this machine in ten minutes.")
    return path


@cache
def prices() -> tuple[Calibration, LookupModel]:
    """The calibration of this machine and its lookups."""
    made = load_calibration(there(CALIBRATION))
    return made, PhysicalLookup.fit(pl.read_parquet(FOLDER / "lookups.parquet"), made.gpu)


@cache
def between_ns() -> float:
    """Mean time between two operators (T1) of a step of the small GPT, all of it together."""
    recording = Recording.of(load_run(there(TRACED)))
    inner = recording.step_times().filter(~pl.col("edge"))["step"]
    parts = [host_parts(build_graph(recording, step).ops) for step in inner]
    return float(np.mean([part.filter(pl.col("overhead") == "T1")["dur_ns"].sum() for part in parts]))


if __name__ == "__main__":
    sys.exit(record_here())
