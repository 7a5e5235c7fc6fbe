"""What a kernel costs: one model for all families, a physical floor times a fitted utilisation.

    time = launch + slowdown x || compute, memory ||,   never below the roofline
    compute = least over tilings of  waves x (tile's work / (core's peak x efficiency) + cycles to begin and end)
    memory  = bytes / (bandwidth x efficiency), less for what the L2 may hold

A kernel cuts its output into tiles, one core takes one at a time, and the last wave may be partial (NVIDIA, *Matrix
Multiplication Background*, 2023; tiles as the unit of prediction: Lee et al., *NeuSight*, ASPLOS 2025). Which tiling a
library takes is not known: a smooth minimum over usual ones stands for it. Attention is a product whose tiles are
stretches of queries; a kernel that only moves data has rows for tiles, or none. `slowdown` is a regression in log space
on what the op is and how wide its rows are. All constants are relative to the data sheet (shares of a peak, clock
cycles), so that a cell fitted on some GPUs prices another one by its sheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lumos_nb.config import Gpu, find_gpu
from lumos_nb.costs._kernel_math import busy_us
from lumos_nb.costs.intervals import Band
from lumos_nb.costs.work import with_work
from lumos_nb.errors import CalibrationError, InputError, SchemaError

Floats = NDArray[np.float64]
Prior = tuple[float, float]


_PRIORS: Mapping[str, Prior] = {
    "launch_cycles": (5000, 0.7),  # from one kernel's end to the next one's begin, or what a profiler counts as such
    "memory": (1.2, 0.3),  # inverse share of the bandwidth
    "cached": (0.5, 1.0),  # odds of what the L2 saves of a working set that it holds
    "cache": (0.7, 0.5),  # share of the L2 that holds a working set
    "power": (4.0, 0.4),  # 1: compute and memory follow each other; large: they overlap
    "cost": (1.2, 0.3),  # inverse share of a core's peak that a large tile reaches
    "begin_cycles": (2000, 1.0),  # of a tile: first operands
    "whole": (2.7, 1.5),  # odds that a partial wave takes as long as a whole one
    "edge": (0.2, 0.5),  # how much more a small tile costs, in log space by 64 / height + 64 / width
    "end_cycles": (1000, 1.0),  # of a tile of 128 x 128: results
    "partial": (0.5, 1.0),  # of writing and reading each split's results
    "wide": (45, 0.7),  # FLOPs / 2 a key beyond those of attention's products: its softmax
    "diagonal": (96, 0.5),  # keys beyond a causal mask that a tile computes all the same
}
"""What a constant is before anything is measured, and how many times it may well differ, in log space."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a family's kernels are cut, and the constants that it has.

    `tiles` are height and width (0: all of n); each may split k into `splits` parts. `bends` are the widths of rows at
    which the slowdown may change.
    """

    constants: Mapping[str, Prior]
    tiles: tuple[tuple[int, int], ...] = ()
    splits: tuple[int, ...] = (1,)
    bends: tuple[int, ...] = ()
    granule: float = 1.0

    def options(self) -> list[tuple[int, int, int]]:
        """Every tiling: height, width, splits."""
        return [(*tile, split) for tile in self.tiles for split in self.splits]


def _constants(names: str, **others: Prior) -> dict[str, Prior]:
    return {name: _PRIORS[name] for name in names.split()} | others


_STREAM = Form(_constants("launch_cycles memory cached cache"))
_ROWS = Form(
    _constants("launch_cycles cached cache power begin_cycles whole", cost=(1.0, 0.5), memory=(1.3, 0.5)),
    tiles=((1, 0),),
    bends=(64, 256, 1024, 4096, 16384),
)
_PRODUCT = Form(
    _constants("launch_cycles memory cached cache power cost begin_cycles whole edge end_cycles partial"),
    tiles=(
        *((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128)),
        *((64, 64), (32, 128), (32, 64), (16, 64), (16, 128), (128, 32)),
    ),
    splits=(1, 2, 3, 4, 6, 8),
    granule=32.0,
)
_ATTENTION = Form(_constants("launch_cycles memory cost begin_cycles whole wide diagonal", cost=(1.4, 0.3)), tiles=((128, 0),))
FORMS: Mapping[str, Form] = {
    **{"gemm": _PRODUCT, "convolution": _PRODUCT, "attention": _ATTENTION},
    **dict.fromkeys(("norm", "softmax", "cross_entropy", "gated_activation", "rope", "embedding_lookup", "index"), _ROWS),
    **dict.fromkeys(("reduction", "interaction"), _ROWS),
}
"""Families whose kernels are cut otherwise than a plain stream of elements."""

_TILE_SIGMA, _BEND_SIGMA, _LEVEL_SIGMA, _SCATTER = 0.15, 0.4, 0.15, 0.07
LEVELS = ("op", "pass", "trans")
"""Columns of which every value has a slowdown of its own, pulled towards none."""
_ROWS_A_CELL = 2500
"""Rows that a cell is fitted on, the GPUs in equal parts: more add time, not knowledge (there are 30 constants)."""



class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of one family, number format and (attention) implementation, and what they were fitted on."""

    family: str
    format: str
    implementation: str
    constants: dict[str, float]
    tiles: dict[str, float]
    bends: dict[str, float]
    levels: dict[str, float]
    rows: int
    gpus: tuple[str, ...]
    slowness: float
    band: Band | None = None

    @property
    def key(self) -> str:
        """What the cell is called."""
        return " ".join(part for part in (self.family, self.format, self.implementation) if part)


class KernelModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fitted cells; `predict` prices a kernel frame on any GPU that has a data sheet."""

    cells: tuple[Cell, ...]

    def predict(self, frame: pl.DataFrame, gpu: Gpu) -> pl.DataFrame:
        """Price every row on one GPU.

        Parameters
        ----------
        frame
            A kernel frame as `with_work` takes it. For attention, `method` up to the first ";" names the
            implementation; without it, the fastest of those fitted is meant.
        gpu
            The data sheet to price on, that of a fitted GPU or another one.

        Returns
        -------
        frame
            The same rows with `cell`, `floor_us` (the roofline) and `dur_us`, and `low_us` and `high_us` where the
            cell has a band (else null).

        Raises
        ------
        CalibrationError
            Rows of a family, format or implementation that nothing was fitted on; the message says what to measure.
        InputError, SheetError
            As `with_work`; the sheet has no rate for a format.

        Examples
        --------
        >>> model.predict(requests, find_gpu("A100"))["dur_us"]  # doctest: +SKIP
        """
        work = with_work(frame)
        of_row = self._cell_of(work)
        found = {name: np.full(frame.height, np.nan) for name in ("floor_us", "dur_us", "low_us", "high_us")}
        for index in np.unique(of_row):
            cell, rows = self.cells[index], np.flatnonzero(of_row == index)
            part = work if len(rows) == work.height else work[rows]
            floor = floor_us(part, gpu)
            time = np.maximum(_Sample.of(part, gpu, cell.family).time_us(cell), floor)
            found["floor_us"][rows], found["dur_us"][rows] = floor, time
            if cell.band is not None:
                found["low_us"][rows], found["high_us"][rows] = cell.band.around(time, np.log(time))
        keys = pl.Series("cell", [cell.key for cell in self.cells])
        columns = [pl.Series(name, values, nan_to_null=True) for name, values in found.items()]
        return frame.with_columns(keys.gather(of_row), *columns)

    def _cell_of(self, work: pl.DataFrame) -> NDArray[np.int64]:
        """Which cell prices each row."""
        known = {(c.family, c.format, c.implementation): i for i, c in enumerate(self.cells)}
        for i in sorted(range(len(self.cells)), key=lambda i: self.cells[i].slowness, reverse=True):
            known[self.cells[i].family, self.cells[i].format, ""] = i  # the fastest is the last to be written
        asked = work.select("family", "format", implementation=_implementation(work))
        kinds = asked.unique()
        missing = [kind for kind in kinds.rows() if kind not in known]
        if missing:
            there = ", ".join(cell.key for cell in self.cells) or "none"
            names = ", ".join(sorted(" ".join(filter(None, kind)) for kind in missing))
            raise CalibrationError(
                f"nothing was fitted on {names}; there are: {there}. Measure some kernels of this kind on the GPU (its op, "
                "dtype and shapes with time_us) and fit again, or leave these rows out."
            )
        kinds = kinds.with_columns(cell=pl.Series([known[kind] for kind in kinds.rows()], dtype=pl.Int64))
        return asked.join(kinds, on=asked.columns, how="left", maintain_order="left")["cell"].to_numpy()


def _implementation(work: pl.DataFrame) -> pl.Expr:
    """What runs attention, as the samples call it; other families have one cell for all."""
    if "method" not in work.columns:
        return pl.lit("")
    named = pl.col("method").cast(pl.String).str.split_exact(";", 1).struct.field("field_0").fill_null("")
    return pl.when(pl.col("family") == "attention").then(named).otherwise(pl.lit(""))


def floor_us(work: pl.DataFrame, gpu: Gpu) -> Floats:
    """The roofline: FLOPs of products at the peak rate, or bytes, less what an L2 may hold, at the bandwidth."""
    moved = 1e6 * np.maximum(work["bytes"].to_numpy() - gpu.l2_bytes, 0.0) / gpu.memory_bytes_per_s
    if not work["family"].is_in(["gemm", "convolution", "attention"]).any():
        return moved
    peak = work["dtype"].replace_strict({d: gpu.peak(d) for d in work["dtype"].unique()}, return_dtype=pl.Float64)
    computed = 1e6 * work["flops"] / peak
    return np.maximum(moved, computed.to_numpy())


@dataclass(frozen=True, slots=True)
class _Sample:
    """Kernels of one cell as arrays, on one GPU or several."""

    work: Floats
    """Columns as `busy_us` has them; attention's n and k without what its constants add."""
    products: Floats
    masked: Floats
    cols: Floats
    levels: pl.DataFrame

    @classmethod
    def of(cls, work: pl.DataFrame, gpu: Gpu, family: str) -> _Sample:
        count = work.height
        if family in ("gemm", "convolution", "attention"):
            rate = {dtype: 2e6 * gpu.cores / gpu.peak(dtype) for dtype in work["dtype"].unique()}
            unit = work["dtype"].replace_strict(rate, return_dtype=pl.Float64).to_numpy()
        else:
            unit = np.full(count, 1e6 * gpu.cores / gpu.memory_bytes_per_s)
        table = np.column_stack([
            work.select("work_batch", "work_m", "work_n", "work_k").to_numpy(),
            unit,
            np.full(count, 1e6 / gpu.clock_hz),
            np.full(count, float(gpu.cores)),
            np.full(count, 1e6 / gpu.memory_bytes_per_s),
            work["bytes"].to_numpy(),
            np.full(count, gpu.l2_bytes),
        ])
        cols = work["cols"].cast(pl.Float64).fill_null(1.0).to_numpy() if "cols" in work.columns else np.ones(count)
        levels = work.select(
            (pl.lit(f"{name}=") + pl.col(name).cast(pl.String).fill_null("")).alias(name) for name in LEVELS if name in work.columns
        )
        return cls(np.ascontiguousarray(table), work["work_products"].to_numpy(), work["work_masked"].to_numpy(), cols, levels)

    @classmethod
    def joined(cls, parts: list[_Sample]) -> _Sample:
        arrays = (np.concatenate([getattr(p, name) for p in parts]) for name in ("work", "products", "masked", "cols"))
        return cls(*arrays, pl.concat([part.levels for part in parts]))

    def time_us(self, cell: Cell) -> Floats:
        """Microseconds of every kernel by a cell's constants."""
        form = FORMS.get(cell.family, _STREAM)
        level = np.zeros(len(self.work))
        for column in self.levels:
            level += column.replace_strict(cell.levels, default=0.0, return_dtype=pl.Float64).to_numpy()
        tiles, bends = (np.array(list(values.values())) for values in (cell.tiles, cell.bends))
        return self._time_us(form, cell.constants, tiles, bends, level)

    def _time_us(
        self, form: Form, constants: Mapping[str, float], tiles: Floats, bends: Floats, slowdown: Floats
    ) -> Floats:
        value = {name: prior[0] for name, prior in _PRIORS.items()} | dict(constants)
        work = self.work
        if self.products.any():  # attention
            work = work.copy()
            work[:, 2] += value["wide"] * self.products
            work[:, 3] += value["diagonal"] * self.masked
        share = {name: value[name] / (1.0 + value[name]) for name in ("whole", "cached")}
        scalars = [share["whole"], value["partial"], value["memory"], share["cached"], value["cache"], value["power"]]
        time = np.empty(len(work))
        busy_us(work, _tilings(form, value, tiles), np.array([*scalars, form.granule]), time)
        if form.bends:
            slowdown = slowdown + np.interp(np.log(self.cols), np.log(form.bends), bends)
        return value["launch_cycles"] * work[:, 5] + time * np.exp(slowdown)


def _tilings(form: Form, value: Mapping[str, float], factors: Floats) -> Floats:
    """The table of tilings that `busy_us` chooses from."""
    table = np.array(form.options(), dtype=np.float64).reshape(-1, 3)
    height, width = table[:, 0], table[:, 1]
    whole = width == 0.0
    edge = np.where(whole, 0.0, 64.0 / height + 64.0 / np.where(whole, 1.0, width))
    cost = value["cost"] * np.exp(value["edge"] * edge) * np.repeat(factors, len(form.splits))
    begin = value["begin_cycles"] + value["end_cycles"] * height * width / 128.0**2
    return np.column_stack([table, cost, begin])


def fit_kernels(samples: pl.DataFrame, sheets: Mapping[str, Gpu] | None = None) -> KernelModel:
    """Fit every cell that the samples have rows for.

    Parameters
    ----------
    samples
        A kernel frame with `gpu` and `time_us`. Rows of several GPUs share constants, which are relative to the sheets.
    sheets
        Data sheets by the names in `gpu`; the bundled ones by default.

    Returns
    -------
    model
        One cell for each family, number format and (attention) implementation.

    Raises
    ------
    SchemaError, InputError
        As `with_work`; `gpu` or `time_us` is absent, a time is not positive, or a GPU has no sheet.

    Examples
    --------
    >>> model = fit_kernels(pl.DataFrame({
    ...     "gpu": "A100", "op": "add", "dtype": "fp16", "rows": [4096] * 4, "cols": [256, 1024, 4096, 16384],
    ...     "time_us": [6.0, 15.0, 56.0, 220.0]}))
    >>> [cell.key for cell in model.cells]
    ['elementwise half']
    """
    if missing := [name for name in ("gpu", "time_us") if name not in samples.columns]:
        raise SchemaError(f"the samples lack column(s) {', '.join(missing)}; they have {', '.join(samples.columns)}.")
    time = samples["time_us"].cast(pl.Float64).to_numpy()
    if bad := np.flatnonzero(~(np.isfinite(time) & (time > 0.0))).tolist():
        raise InputError(f"the samples' time_us is {time[bad[0]]} in row {bad[0]}; a sample needs a positive time.")
    named = {name: find_gpu(name) for name in samples["gpu"].unique() if name not in (sheets or {})} | dict(sheets or {})
    work = with_work(samples)
    work = work.with_columns(implementation=_implementation(work))
    groups = work.sort("family", "format", "implementation").partition_by("family", "format", "implementation")
    return KernelModel(cells=tuple(_fitted(group, named) for group in groups))


def _fitted(group: pl.DataFrame, sheets: Mapping[str, Gpu]) -> Cell:
    """One cell: constants of greatest posterior probability, as least squares of log residuals and log priors."""
    family, number, implementation = group.select("family", "format", "implementation").row(0)
    form = FORMS.get(family, _STREAM)
    gpus = group["gpu"].unique().sort().to_list()
    parts = [group.filter(pl.col("gpu") == gpu) for gpu in gpus]
    parts = [part.sample(min(part.height, _ROWS_A_CELL // len(parts)), seed=0, shuffle=True) for part in parts]
    of_gpu = [_Sample.of(part, sheets[gpu], family) for part, gpu in zip(parts, gpus, strict=True)]
    sample = _Sample.joined(of_gpu)
    target = np.log(np.concatenate([part["time_us"].to_numpy() for part in parts]))
    levels = [sorted(column.unique()) for column in sample.levels]
    names = [name for values in levels if len(values) > 1 for name in values]
    position = {name: i for i, name in enumerate(names)}
    coded = [column.replace_strict(position, default=-1, return_dtype=pl.Int64).to_numpy() for column in sample.levels]
    ends = np.cumsum([len(form.constants), len(form.tiles), len(form.bends)])
    prior = np.concatenate([np.log([p[0] for p in form.constants.values()]), np.zeros(len(form.tiles) + len(form.bends) + len(names))])
    sigma = np.concatenate([
        [p[1] for p in form.constants.values()],
        np.full(len(form.tiles), _TILE_SIGMA), np.full(len(form.bends), _BEND_SIGMA), np.full(len(names), _LEVEL_SIGMA),
    ])

    def unpacked(theta: Floats) -> tuple[dict[str, float], Floats, Floats, Floats]:
        constants, tiles, bends, level = np.split(theta, ends)
        return dict(zip(form.constants, np.exp(constants).tolist(), strict=True)), np.exp(tiles), bends, level

    def misses(theta: Floats) -> Floats:
        constants, tiles, bends, level = unpacked(theta)
        padded = np.append(level, 0.0)  # -1: a value that is alone has no level
        slowdown = np.sum([padded[code] for code in coded], axis=0)
        residual = np.log(sample._time_us(form, constants, tiles, bends, slowdown)) - target
        return np.concatenate([_robust(residual / _SCATTER), (theta - prior) / sigma])

    found = least_squares(misses, prior, x_scale=sigma, max_nfev=40)
    constants, tiles, bends, level = unpacked(found.x)
    cell = Cell(
        family=family, format=number, implementation=implementation, constants=constants,
        tiles={f"{h}x{w or 'n'}": float(x) for (h, w), x in zip(form.tiles, tiles, strict=True)},
        bends={str(width): float(x) for width, x in zip(form.bends, bends, strict=True)},
        levels=dict(zip(names, level.tolist(), strict=True)),
        rows=group.height, gpus=tuple(gpus), slowness=0.0,
    )
    floors = np.concatenate([floor_us(part, sheets[gpu]) for part, gpu in zip(parts, gpus, strict=True)])
    return msgspec.structs.replace(cell, slowness=float(np.median(np.exp(target) / np.maximum(floors, 1e-3))))


def _robust(z: Floats) -> Floats:
    """Residuals whose squares are a soft absolute value: a row that is far off counts by its distance, not its square."""
    return np.sign(z) * np.sqrt(2.0 * (np.sqrt(1.0 + z * z) - 1.0))
