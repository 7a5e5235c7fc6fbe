"""How much faster or slower the same operators would be on other devices, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from lumos_nb.costs.calibration import Calibration, load_calibration
from lumos_nb.costs.samples import kernel_samples
from lumos_nb.errors import InputError
from lumos_nb.exchange.benchmark.steps import marked_steps
from lumos_nb.traces.run import Run, load_run

PORTABILITY = {
    "device": pl.String(),
    "predicted_ns": pl.Float64(),
    "predicted_ratio": pl.Float64(),
    "measured_basis_share": pl.Float64(),
    "measured_ns": pl.Float64(),
    "measured_ratio": pl.Float64(),
}
"""Columns of `portability`."""


def portability(
    recording: Run | str | Path,
    devices: Sequence[str | Calibration],
    *,
    measured: Mapping[str, Run | str | Path] | None = None,
) -> pl.DataFrame:
    """Predict the time of a recording's operators on several devices, beside what was measured there.

    Parameters
    ----------
    recording
        A run with shapes and marked steps: what was benchmarked, or a benchmark's own recording (`--profile`).
    devices
        Calibrations or their names (`load_calibration`), two or more; ratios are to the first.
    measured
        By such a name, the recording of the same benchmark on that device.

    Returns
    -------
    frame
        Columns of `PORTABILITY`, a row a device: `predicted_ns` of a step, of operators (on a GPU kernels) whose sizes
        are known; the share of it by costs that were measured on the device itself (the rest is transferred from others
        or from data sheets); `measured_ns` of the same kind of work, null where no recording is given. Communication
        and the host's own time are in none of these.

    Raises
    ------
    InputError
        There are fewer than two devices, one twice, a recording is of none of them, or has no operator with sizes.
    RunError
        A recording has no marked step.
    CalibrationError
        No calibration has such a name.

    Examples
    --------
    >>> portability("runs/gpt", ["A100-SXM-80GB", "H100-SXM-80GB"])
    """
    known = [one if isinstance(one, Calibration) else load_calibration(one) for one in devices]
    names = [one.name for one in known]
    if len(set(names)) < max(len(names), 2):
        raise InputError(f"devices are {', '.join(names) or 'none'}; give two or more that differ.")
    if strange := set(measured or {}) - set(names):
        raise InputError(f"a recording on {min(strange)} is given; devices are {', '.join(names)}.")
    work, steps = _work(recording)
    found = {name: _work(source) for name, source in (measured or {}).items()}
    rows = []
    for name, calibration in zip(names, known, strict=True):
        priced = calibration.predict_kernels(work.drop("gpu"))
        total_us, own_us = (float(part["dur_us"].sum()) for part in (priced, priced.filter(basis="measured")))
        there = found.get(name)
        measured_ns = None if there is None else float(there[0]["time_us"].sum()) * 1e3 / there[1]
        rows.append((name, total_us * 1e3 / steps, None, own_us / total_us, measured_ns, None))
    frame = pl.DataFrame(rows, schema=PORTABILITY, orient="row")
    return frame.with_columns(
        predicted_ratio=pl.col("predicted_ns") / pl.col("predicted_ns").first(),
        measured_ratio=pl.col("measured_ns") / pl.col("measured_ns").first(),
    )


def _work(source: Run | str | Path) -> tuple[pl.DataFrame, int]:
    """Operators or kernels whose sizes are known, in the typical steps, and how many steps these are."""
    run = source if isinstance(source, Run) else load_run(source)
    steps = marked_steps(run)["step"].unique()
    samples = kernel_samples(run).filter(pl.col("step").is_in(steps.implode()) & pl.col("why").is_null())
    if samples.is_empty():
        raise InputError("a recording has no operator whose sizes are known: record it with record_shapes=True.")
    return samples, len(steps)
