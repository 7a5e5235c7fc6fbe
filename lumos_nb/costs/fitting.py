"""Samples -> calibrations: the generic one of all GPUs, that of one GPU, and one adapted to a run of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import msgspec
import polars as pl

from lumos_nb.config import Gpu, find_gpu, gpus
from lumos_nb.costs.calibration import (
    GENERIC,
    REGION,
    VERSION,
    Basis,
    Calibration,
    Covered,
    Source,
    calibrations,
    digest,
    load_calibration,
    pass_of,
)
from lumos_nb.costs.heldout import band_of, leave_groups_out, score, shape_groups
from lumos_nb.costs.host import overheads
from lumos_nb.costs.kernels import Cell, KernelModel, cell_keys, fit_kernels, prior_model
from lumos_nb.costs.samples import kernel_samples
from lumos_nb.costs.work import with_work
from lumos_nb.errors import CalibrationError, InputError, shown
from lumos_nb.traces.run import Run


def fit_generic(samples: pl.DataFrame, *, executor: Executor | str | None = None) -> Calibration:
    """Fit all samples together, and find what that misses on a GPU it has not seen.

    Parameters
    ----------
    samples
        A kernel frame with `gpu`, `time_us`, `source` and `licence`; every GPU has a bundled sheet.
    executor
        Maps the fits, as in `executors.spread`.

    Returns
    -------
    calibration
        All its classes are *transferred*; `for_gpu` makes it one of a GPU. Its own sheet is a placeholder.
    """
    named = samples["gpu"].replace_strict({name: find_gpu(name).name for name in samples["gpu"].unique()})
    unseen = leave_groups_out(samples, named, executor=executor)
    return Calibration(
        version=VERSION,
        name=GENERIC,
        gpu=find_gpu("A100"),
        kernels=KernelModel(cells=_banded(fit_kernels(samples).cells, unseen)),
        covered=tuple(_covered(samples, "transferred")),
        bands={"transferred": band_of(unseen), "data sheet": band_of(_by_priors(samples, named))},
        held_out=tuple(score(unseen, "GPU")),
        sources=tuple(_sources(samples)),
    )


def fit_gpu(
    gpu: Gpu, samples: pl.DataFrame, base: Calibration, *, adapt: bool = False, executor: Executor | str | None = None
) -> Calibration:
    """Fit a GPU's own samples; what it has none of comes from `base`.

    Parameters
    ----------
    gpu, samples
        The sheet, and a kernel frame of this GPU alone with `time_us`, `source` and `licence`.
    base
        What prices the rest: the generic calibration, or an earlier one of this GPU.
    adapt
        Begin at the cells of `base`, as few samples ask for, instead of at what holds before any sample.
    executor
        Maps the fits.
    """
    sheets = dict.fromkeys(samples["gpu"].unique(), gpu)
    start = _with_unnamed(base.kernels) if adapt else None
    unseen = leave_groups_out(samples, shape_groups(samples), sheets=sheets, executor=executor, start=start)
    own = _banded(fit_kernels(samples, sheets, start=start).cells, unseen)
    mine = {cell.key for cell in own}
    return Calibration(
        version=VERSION,
        name=gpu.name,
        gpu=gpu,
        kernels=KernelModel(cells=(*own, *(cell for cell in base.kernels.cells if cell.key not in mine))),
        covered=(*_covered(samples, "measured"), *(c for c in base.covered if c.cell not in mine)),
        bands=base.bands,
        held_out=(*score(unseen, "shapes"), *(s for s in base.held_out if s.cell not in mine)),
        sources=(*_sources(samples), *base.sources),
        collectives=base.collectives,
        overheads=base.overheads,
    )


def calibrate(run: Run, base: Calibration | None = None, *, gpu: Gpu | str | None = None) -> Calibration:
    """Adapt a calibration to what a run of one's own measured.

    The run's kernels become samples, the cells of the shipped calibration are where their fit begins, so that a few
    kernels move it a little and many decide; its host overheads replace those of the shipped one.

    Parameters
    ----------
    run
        A run with shapes of operators (`record_shapes`), as `capture` records.
    base
        What to begin at; by default the bundled calibration of the run's GPU, else the generic one.
    gpu
        The data sheet, or the name of a bundled one; by default that of the GPU that the trace names. A run on a CPU
        has that of `base`.

    Raises
    ------
    CalibrationError
        The trace has no kernels with sizes, or of several kinds of device, or does not name its device, or is of a CPU
        and the sheet is of another device.
    InputError
        No bundled sheet has the GPU's name, and none is given; `base` or `gpu` is of another kind.

    Examples
    --------
    >>> ln.calibrate(run).coverage()                           # doctest: +SKIP
    """
    if not isinstance(base, Calibration | None):
        raise InputError(
            f"calibrate begins at a calibration, base=load_calibration(name); it was given {shown(base)}. Of which GPU "
            "the run is, gpu=name says."
        )
    if not isinstance(gpu, Gpu | str | None):
        raise InputError(f"gpu is a data sheet, Gpu(...), or the name of a bundled one; it was given {shown(gpu)}.")
    samples = kernel_samples(run).filter(pl.col("why").is_null() & (pl.col("time_us") > 0))
    samples = samples.with_columns(licence=pl.lit("own")).drop("method")  # a profiler's, no implementation's name
    names = samples["gpu"].unique().to_list()
    if len(names) != 1:
        raise CalibrationError(
            f"the run has kernels with sizes of {len(names)} kinds of device ({', '.join(map(str, names)) or 'none'}); "
            "calibrate takes one. Record the run with record_shapes=True, and one kind of device at a time."
        )
    if base is None:
        base = load_calibration(names[0] if names[0] in calibrations() else GENERIC)
    sheet = (find_gpu(gpu) if isinstance(gpu, str) else gpu) or (base.gpu if base.name != GENERIC else None)
    if sheet is None and names[0] is None:
        raise CalibrationError("the trace does not name its device; say which it is: gpu=find_gpu(name).")
    sheet = sheet or find_gpu(names[0])
    if names[0] == "cpu" and (sheet != base.gpu or sheet in gpus()):
        raise CalibrationError(
            f"the run has operators of a CPU and no kernels of a GPU; {sheet.name} is another device. Leave gpu out; "
            "for another CPU than the bundled one, give the calibration that make calibrate writes on it as base."
        )
    made = fit_gpu(sheet, samples.with_columns(gpu=pl.lit(sheet.name)), base.for_gpu(sheet), adapt=True)
    return msgspec.structs.replace(made, overheads=overheads(run))


def _with_unnamed(model: KernelModel) -> KernelModel:
    """The cells, and as cells of their own those that price rows which name no implementation: a fit begins at them."""
    slowest_first = sorted(model.cells, key=lambda cell: -cell.slowness)
    unnamed = {(c.family, c.format): msgspec.structs.replace(c, implementation="") for c in slowest_first}
    there = {cell.key for cell in model.cells}
    return KernelModel(cells=(*model.cells, *(cell for cell in unnamed.values() if cell.key not in there)))


def _banded(cells: tuple[Cell, ...], unseen: pl.DataFrame) -> tuple[Cell, ...]:
    """The cells, each with the interval of its rows in a table of rows priced unseen; none where it has none."""
    of = {key: rows for (key,), rows in unseen.group_by("cell")}
    return tuple(msgspec.structs.replace(c, band=band_of(of[c.key]) if c.key in of else None) for c in cells)


def _by_priors(samples: pl.DataFrame, gpu: pl.Series) -> pl.DataFrame:
    """All samples priced by what holds before any sample, a group for every GPU: what a data sheet alone is worth."""
    model = prior_model(with_work(samples).select("family", "format").unique().rows())
    plain = samples.drop("method", strict=False)  # no implementation of attention is known before any sample
    parts = [
        model.predict(rows, find_gpu(name)).with_columns(group=pl.lit(name))
        for (name,), rows in plain.with_columns(sheet=gpu).group_by("sheet", maintain_order=True)
    ]
    return with_work(pl.concat(parts))


def _covered(samples: pl.DataFrame, basis: Basis) -> Iterator[Covered]:
    """A class for every cell and pass of the samples, with the sizes that they cover."""
    work = with_work(samples)
    work = work.with_columns(cell=cell_keys(work), passes=pass_of(work))
    ends = [e(pl.col(c)).alias(f"{c}/{n}") for c in REGION for n, e in (("least", pl.Expr.min), ("most", pl.Expr.max))]
    for row in work.group_by("cell", "passes").agg(pl.len().alias("rows"), *ends).sort("cell", "passes").to_dicts():
        region = {column: (row[f"{column}/least"], row[f"{column}/most"]) for column in REGION}
        yield Covered(cell=row["cell"], passes=row["passes"], basis=basis, rows=row["rows"], region=region)


def _sources(samples: pl.DataFrame) -> Iterator[Source]:
    by = ("source", "licence", "gpu")
    for (source, licence, gpu), rows in samples.sort("source", "gpu").group_by(by, maintain_order=True):
        yield Source(source=source, licence=licence, gpu=gpu, rows=rows.height, sha256=digest(rows))
