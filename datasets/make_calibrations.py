"""Fit the bundled calibrations: on what others measured (`measured/`), on what we did (`calibration-samples/`).

    python -m datasets.make_calibrations

Writes `calibrations/*.json` and prints, for each, what is measured and how well.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import polars as pl

from benchmarks.collective_accuracy import LEFT_OUT
from benchmarks.machine.fit import fit_recorded
from lumos_nb import datasets
from lumos_nb.config import find_gpu
from lumos_nb.costs.calibration import Calibration
from lumos_nb.costs.collective_tiers import priceable
from lumos_nb.costs.collectives import fit_collectives
from lumos_nb.costs.fitting import fit_generic, fit_gpu
from lumos_nb.errors import CalibrationError

HERE = Path(__file__).parent
OUT = HERE / "calibrations"


def main() -> int:
    """Fit and write all of them."""
    OUT.mkdir(exist_ok=True)
    # A forked process would inherit polars' locks, and wait for ever.
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        samples = datasets.load("measured-kernels")
        measured = datasets.load("measured-collectives")
        usable = measured.filter(priceable(measured) & ~pl.any_horizontal(LEFT_OUT.values()))
        collectives = fit_collectives(usable, folds=8)
        generic = msgspec.structs.replace(fit_generic(samples, executor=executor), collectives=collectives)
        write(generic)
        named = {name: find_gpu(name) for name in samples["gpu"].unique()}
        for name in sorted({gpu.name for gpu in named.values()}):
            sheet = find_gpu(name)
            mine = samples.filter(pl.col("gpu").is_in([alias for alias, gpu in named.items() if gpu == sheet]))
            write(fit_gpu(sheet, mine, generic.for_gpu(sheet), executor=executor))
        for folder in sorted((HERE / "calibration-samples").iterdir()):
            write(fit_recorded(folder, generic, executor=executor))
    return 0


def write(made: Calibration) -> None:
    """Save one and say what it is worth."""
    file = made.save(OUT / f"{made.name}.json")
    print(f"{time.strftime('%H:%M:%S')} {file.name}: {file.stat().st_size:,} bytes")
    print(made, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CalibrationError as error:
        sys.exit(str(error))
