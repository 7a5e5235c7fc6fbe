"""From samples of this machine to its calibration: a CPU's data sheet, and which of an op's times counts."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from benchmarks.machine.clock import l2_bytes
from lumos_nb.config import Gpu, find_gpu, read_sheet
from lumos_nb.costs.calibration import GENERIC, Calibration, load_calibration
from lumos_nb.costs.collectives import fit_collectives
from lumos_nb.costs.fitting import fit_gpu
from lumos_nb.costs.host import Overheads
from lumos_nb.errors import CalibrationError
from lumos_nb.number_formats import ELEMENT_BYTES
from lumos_nb.schema import panics_told

MAPPED_BYTES = 128 * 2**10
"""From this size on glibc asks the operating system for a block of its own (M_MMAP_THRESHOLD, as a process starts)."""
WRITES_IN_PLACE = ("copy any", "fill any", "reduction any", "nll_loss fwd")
"""Ops and passes whose output is an operand or small, beside those of the optimizer."""


def read_samples(folder: str | Path) -> tuple[pl.DataFrame, pl.DataFrame | None, dict[str, Any]]:
    """What `record` wrote: kernels, collectives (None if there were none), and where they are from.

    Raises
    ------
    CalibrationError
        A file is missing, or is not the one that `provenance.json` describes.
    """
    tables: dict[str, pl.DataFrame] = {}
    try:
        about = json.loads(Path(folder, "provenance.json").read_text())
        for name in ("kernels", "collectives"):
            if isinstance(about[name], dict):
                raw = Path(folder, f"{name}.parquet").read_bytes()
                if hashlib.sha256(raw).hexdigest() != about[name]["sha256"]:
                    raise CalibrationError(
                        f"{folder}: {name}.parquet is not the file of provenance.json; record again."
                    )
                with panics_told():
                    tables[name] = pl.read_parquet(raw)
        return tables["kernels"], tables.get("collectives"), about
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pl.exceptions.PolarsError) as error:
        raise CalibrationError(f"{folder}: no samples that can be read ({error}); run make calibrate.") from error


def machine_sheet(kernels: pl.DataFrame) -> Gpu:
    """A data sheet of one thread of this CPU, its rates the best that samples reached: nothing measured is below it.

    Of `memory_bytes_per_s` it is bytes beyond those that L2 can hold, as a roofline counts them. Where the system does
    not tell the clock rate it is 1 GHz; the sheet's source says which.

    Raises
    ------
    CalibrationError
        The samples have no product in fp32, or no copy of more bytes than L2 holds.
    """
    least_us = pl.min_horizontal("min_us", "warm_us")
    products = kernels.filter(pl.col("op").is_in(["gemm", "bmm"])).group_by("dtype")
    peaks = dict(
        products.agg((2e6 * pl.col("batch") * pl.col("m") * pl.col("n") * pl.col("k") / least_us).max()).rows()
    )
    beyond_l2 = 8 * pl.col("rows") * pl.col("cols") - l2_bytes()
    copies = kernels.filter((pl.col("op") == "copy") & (pl.col("dtype") == "fp32"))
    bytes_per_s = copies.select((1e6 * beyond_l2 / least_us).max()).item() or 0.0
    if "fp32" not in peaks or bytes_per_s <= 0:
        raise CalibrationError(
            "a sheet needs a product in fp32 and a copy beyond L2; measure gemm and copy for longer."
        )
    clock_hz = _clock_hz()
    return Gpu(
        name="cpu",
        source=f"{kernels['source'][0]}; one thread; clock {'as the system says' if clock_hz else 'unknown'}",
        cores=1,
        clock_hz=clock_hz or 1e9,
        memory_bytes=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        memory_bytes_per_s=bytes_per_s,
        l2_bytes=float(l2_bytes()),
        peak_flops=peaks,
    )


def _clock_hz() -> float | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    return next((1e6 * float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")), None)


def in_training(kernels: pl.DataFrame) -> pl.DataFrame:
    """Samples of a CPU with the `time_us` that a training step sees: of each row's states the one that a step leaves.

    `fresh_us` where a layer's output is a block of `MAPPED_BYTES` or more: what forward keeps goes back to the
    operating system after backward, and comes back page by page. How much of it does depends on what else the process
    has freed; where it does not, as in `benchmarks.dlrm_steps`, the output still is in no cache, and a product takes
    about as long. `warm_us` for the rest: an op's operands are what the ops before it made, the optimizer goes through
    one parameter's tensors op by op and its temporaries are handed on, and what the host takes to come back to an op is
    apart (`host`). A GPU's samples, and those without these states, stay.

    Examples
    --------
    >>> kernels, _, _ = read_samples(FOLDER)                # doctest: +SKIP
    >>> fit_kernels(in_training(kernels), {"cpu": sheet})   # doctest: +SKIP
    """
    made = {"bwd_grad_act": pl.col("m") * pl.col("k"), "bwd_grad_w": pl.col("n") * pl.col("k")}
    product = pl.col("m") * pl.col("n")
    for name, elements in made.items():
        product = pl.when(pl.col("pass") == name).then(elements).otherwise(product)
    table = (pl.col("op") == "embedding_lookup") & (pl.col("pass") == "bwd")
    elements = pl.coalesce(
        pl.col("batch") * product,
        pl.col("batch") * pl.col("seq_q") * pl.col("heads") * pl.col("head_dim"),
        pl.when(table).then(pl.col("n")).otherwise("rows") * pl.col("cols"),
    )
    size = pl.coalesce("out_dtype", "dtype").replace_strict(ELEMENT_BYTES, return_dtype=pl.Float64)
    kept = (pl.col("role") == "parameter") | pl.format("{} {}", "op", "pass").is_in(WRITES_IN_PLACE)
    state = pl.when(~kept & (elements * size >= MAPPED_BYTES)).then("fresh_us").otherwise("warm_us")
    return kernels.with_columns(time_us=pl.when(pl.col("fresh_us").is_null()).then("time_us").otherwise(state))


def fit_recorded(
    folder: str | Path,
    base: Calibration | None = None,
    *,
    sheet: Gpu | None = None,
    executor: Executor | str | None = None,
) -> Calibration:
    """The calibration of a machine from what `record` wrote.

    Parameters
    ----------
    folder
        With the tables and, of a CPU, `sheet.json`.
    base
        What prices the ops that were not measured; by default the bundled generic calibration.
    sheet
        Of the machine; by default that of the folder, else the bundled one of the GPU.
    executor
        Maps the fits; none: one after the other.

    Raises
    ------
    CalibrationError
        There are no samples, or a CPU's have no sheet.
    InputError
        No bundled sheet has the GPU's name; give one.
    """
    kernels, collectives, about = read_samples(folder)
    file = Path(folder, "sheet.json")
    if sheet is None and about["machine"]["device"] == "cpu" and not file.exists():
        raise CalibrationError(f"{folder}: no sheet.json; record again, or give a sheet.")
    sheet = sheet or (read_sheet(file, Gpu) if file.exists() else find_gpu(kernels["gpu"][0]))
    rows = in_training(kernels).with_columns(licence=pl.lit("this package, MIT"), model="group")
    made = fit_gpu(sheet, rows, (base or load_calibration(GENERIC)).for_gpu(sheet), executor=executor)
    if about.get("host"):
        made = msgspec.structs.replace(made, overheads=msgspec.convert(about["host"], Overheads))
    if collectives is None:
        return made
    return msgspec.structs.replace(made, collectives=fit_collectives(collectives, folds=8))


def held_out(made: Calibration) -> str:
    """What was measured, and the error of each class on groups of shapes that its fit had not seen."""
    measured = made.coverage().filter(pl.col("basis") == "measured")
    lines = [f"{'class':30}{'pass':14}{'rows':>6}{'median':>9}{'mean':>9}{'in 90 %':>9}"]
    columns = ("cell", "passes", "rows", "median_error", "mean_error", "coverage")
    for cell, passes, rows, *errors in measured.select(columns).rows():
        told = (f"{error:8.1%}" if error is not None else f"{'-':>8}" for error in errors)
        lines.append(f"{cell:30}{passes:14}{rows:6} {' '.join(told)}")
    return "\n".join(lines)
