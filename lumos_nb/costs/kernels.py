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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lumos_nb.config import Gpu, find_gpu
from lumos_nb.costs._kernel_math import OWN, busy_us
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
    "score_cycles": (1 / 16, 0.7),  # of a core for one score of attention: 16 exponentials a cycle
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
_ATTENTION = Form(
    _constants("launch_cycles memory cost begin_cycles whole score_cycles diagonal", cost=(1.4, 0.3)), tiles=((128, 0),)
)
_UNFUSED = Form(
    # every score goes to memory and back several times, also those that the mask hides
    _constants("launch_cycles memory cost begin_cycles whole score_cycles", cost=(1.4, 0.3), score_cycles=(1.0, 1.0)),
    tiles=((128, 0),),
)
FORMS: Mapping[str, Form] = {
    **{"gemm": _PRODUCT, "convolution": _PRODUCT, "attention": _ATTENTION},
    **dict.fromkeys(("norm", "softmax", "cross_entropy", "gated_activation", "rope", "embedding_lookup", "index"), _ROWS),
    **dict.fromkeys(("reduction", "interaction"), _ROWS),
}
"""Families whose kernels are cut otherwise than a plain stream of elements."""


def _form(family: str, implementation: str) -> Form:
    return _UNFUSED if "unfused" in implementation else FORMS.get(family, _STREAM)


_TILE_SIGMA, _BEND_SIGMA, _LEVEL_SIGMA, _SCATTER = 0.15, 0.4, 0.15, 0.07
_COMPUTED = ("gemm", "convolution", "attention")
"""Families whose tiles are bound by the peak rate; the others' by the bandwidth."""
_CELL = ("family", "format", "implementation")

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

    def time_us(self, work: pl.DataFrame, gpu: Gpu) -> Floats:
        """Microseconds of rows of this family, with the columns of `with_work`."""
        curve = _Curve(_form(self.family, self.implementation), self.levels)
        logs = np.log([*self.constants.values(), *self.tiles.values()])
        theta = np.array([*logs, *self.bends.values(), *self.levels.values()])
        sample = _Sample.of(work, gpu)
        return np.exp(curve.log_us(theta, sample, curve.codes(sample), slope=False)[0])


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
            time = np.maximum(cell.time_us(part, gpu), floor)
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
    if not work["family"].is_in(_COMPUTED).any():
        return moved
    peak = work["dtype"].replace_strict({d: gpu.peak(d) for d in work["dtype"].unique()}, return_dtype=pl.Float64)
    computed = 1e6 * work["flops"] / peak
    return np.maximum(moved, computed.to_numpy())


@dataclass(frozen=True, slots=True)
class _Sample:
    """Kernels of one family as arrays, on one GPU or several."""

    work: Floats
    """Columns as `busy_us` has them; attention's n and k without what its constants add."""
    scores: Floats
    masked: Floats
    cols: Floats
    levels: tuple[pl.Series, ...]

    @classmethod
    def of(cls, work: pl.DataFrame, gpu: Gpu) -> Self:
        count, byte_us, cycle_us = work.height, 1e6 / gpu.memory_bytes_per_s, 1e6 / gpu.clock_hz
        if work["family"][0] in _COMPUTED:
            rate = {dtype: 2e6 * gpu.cores / gpu.peak(dtype) for dtype in work["dtype"].unique()}
            unit = work["dtype"].replace_strict(rate, return_dtype=pl.Float64).to_numpy()
        else:
            unit = np.full(count, gpu.cores * byte_us)
        shape = work.select("work_batch", "work_m", "work_n", "work_k").to_numpy()
        sheet = np.tile([cycle_us, gpu.cores, byte_us], (count, 1))
        sizes = np.column_stack([work["bytes"].to_numpy(), np.full(count, gpu.l2_bytes)])
        cols = work["cols"].cast(pl.Float64).fill_null(1.0).to_numpy() if "cols" in work.columns else np.ones(count)
        named = (pl.lit(f"{name}=") + pl.col(name).cast(pl.String).fill_null("") for name in LEVELS if name in work.columns)
        return cls(
            work=np.column_stack([shape, unit, sheet, sizes]),
            scores=work["work_scores"].to_numpy(),
            masked=work["work_masked"].to_numpy(),
            cols=cols,
            levels=tuple(work.select(named.alias(str(i)) for i, named in enumerate(named))),
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Samples of several GPUs below each other."""
        levels = zip(*(part.levels for part in parts), strict=True)
        return cls(
            work=np.concatenate([part.work for part in parts]),
            scores=np.concatenate([part.scores for part in parts]),
            masked=np.concatenate([part.masked for part in parts]),
            cols=np.concatenate([part.cols for part in parts]),
            levels=tuple(pl.concat(column) for column in levels),
        )


class _Curve:
    """The model of one form as a function of one vector: log constants, log tile factors, bends, levels."""

    def __init__(self, form: Form, levels: Iterable[str]) -> None:
        self.form, self.levels = form, tuple(levels)
        self.ends = np.cumsum([len(form.constants), len(form.tiles), len(form.bends)])
        values, spread = zip(*form.constants.values(), strict=True)
        counts = (len(form.tiles), len(form.bends), len(self.levels))
        self.prior = np.concatenate([np.log(values), np.zeros(sum(counts))])
        self.sigma = np.concatenate([spread, np.repeat([_TILE_SIGMA, _BEND_SIGMA, _LEVEL_SIGMA], counts)])
        self.table = np.array(form.options(), dtype=np.float64).reshape(-1, 3)
        height, width = self.table[:, 0], self.table[:, 1]
        self.edge = np.where(width == 0.0, 0.0, 64.0 / height + 64.0 / np.maximum(width, 1.0))
        self.area = height * width / 128.0**2

    def codes(self, sample: _Sample) -> list[NDArray[np.int64]]:
        """For every column of levels, which level each row has; one more than the last for none."""
        position = {name: i for i, name in enumerate(self.levels)}
        other = len(self.levels)
        return [c.replace_strict(position, default=other, return_dtype=pl.Int64).to_numpy() for c in sample.levels]

    def log_us(self, theta: Floats, sample: _Sample, codes: list[NDArray[np.int64]], slope: bool) -> tuple[Floats, Floats]:
        """Log microseconds of every row and, if asked for, their gradient (rows x constants)."""
        logs, tiles, bends, levels = np.split(theta, self.ends)
        value = {name: prior[0] for name, prior in _PRIORS.items()} | dict(zip(self.form.constants, np.exp(logs), strict=True))
        work, count = sample.work, len(self.table)
        if "score_cycles" in self.form.constants:
            work = work.copy()
            scores = value["score_cycles"] * sample.scores * work[:, 5] / (work[:, 4] * value["cost"])
            work[:, 2] += scores
            beyond = np.minimum(value["diagonal"] if "diagonal" in self.form.constants else np.inf, sample.masked)
            work[:, 3] += beyond
        else:
            scores = beyond = np.zeros(len(work))
        whole, cached = (value[name] / (1.0 + value[name]) for name in ("whole", "cached"))
        scalars = [whole, value["partial"], value["memory"], cached, value["cache"], value["power"], self.form.granule]
        cost = value["cost"] * np.exp(value["edge"] * self.edge + np.repeat(tiles, len(self.form.splits)))
        end = value["end_cycles"] * self.area
        tilings = np.column_stack([self.table, cost, value["begin_cycles"] + end])
        busy, raw = np.empty(len(work)), np.empty((len(work) if slope else 0, OWN + 2 * count))
        busy_us(work, tilings, np.array(scalars), busy, raw)
        slowdown = np.append(levels, 0.0)[np.array(codes)].sum(axis=0) if codes else np.zeros(len(work))
        hats = self._hats(sample.cols)
        busy *= np.exp(slowdown + hats @ bends)
        time = busy + value["launch_cycles"] * work[:, 5]
        if not slope:
            return np.log(time), raw
        share = (busy / time)[:, None]
        by_cost, by_cycles = raw[:, OWN : OWN + count], raw[:, OWN + count :]
        ending = end / (value["begin_cycles"] + end)
        of = {
            "launch_cycles": 1.0 / share[:, 0] - 1.0,
            "whole": raw[:, 0] * whole * (1.0 - whole),
            "partial": raw[:, 1],
            "memory": raw[:, 2],
            "cached": raw[:, 3] * cached * (1.0 - cached),
            "cache": raw[:, 4],
            "power": raw[:, 5],
            "cost": by_cost.sum(axis=1) * (1.0 - scores / work[:, 2]),
            "edge": by_cost @ (value["edge"] * self.edge),
            "begin_cycles": by_cycles @ (1.0 - ending),
            "end_cycles": by_cycles @ ending,
            "score_cycles": by_cost.sum(axis=1) * scores / work[:, 2],
            "diagonal": by_cost.sum(axis=1) * np.where(beyond < sample.masked, beyond / work[:, 3], 0.0),
        }
        by_tile = by_cost.reshape(len(work), len(self.form.tiles), -1).sum(axis=2)
        by_level = np.zeros((len(work), len(levels) + 1))
        for code in codes:
            by_level[np.arange(len(work)), code] += 1.0
        columns = np.column_stack([of[name] for name in self.form.constants])
        return np.log(time), np.hstack([columns, by_tile, hats, by_level[:, :-1]]) * share

    def _hats(self, cols: Floats) -> Floats:
        """Weights of the bends: linear in the logarithm of a row's width between two."""
        knots = np.log(self.form.bends)
        return np.stack([np.interp(np.log(cols), knots, one) for one in np.eye(len(knots))], axis=1) if len(knots) else np.empty((len(cols), 0))


def fit_kernels(samples: pl.DataFrame, sheets: Mapping[str, Gpu] | None = None) -> KernelModel:
    """Fit every cell that the samples have rows for.

    Parameters
    ----------
    samples
        A kernel frame with `gpu` and `time_us`. Rows of several GPUs share constants, which are relative to the sheets.
    sheets
        Data sheets by the names in `gpu`; the bundled ones where it has none.

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
    if len(bad := np.flatnonzero(~(np.isfinite(time) & (time > 0.0)))):
        raise InputError(f"the samples' time_us is {time[bad[0]]} in row {bad[0]}; a sample needs a positive time.")
    own = dict(sheets or {})
    named = own | {name: find_gpu(name) for name in samples["gpu"].unique() if name not in own}
    work = with_work(samples)
    work = work.with_columns(implementation=_implementation(work))
    groups = work.sort(*_CELL).partition_by(_CELL, maintain_order=True)
    return KernelModel(cells=tuple(_fitted(group, named) for group in groups))


def sheet_cell(family: str, number_format: str, implementation: str = "") -> Cell:
    """The cell that holds before anything is measured: what the constants usually are, for a GPU's data sheet alone."""
    curve = _Curve(_form(family, implementation), ())
    return _cell(curve, curve.prior, (family, number_format, implementation))


def _cell(curve: _Curve, theta: Floats, key: tuple[str, str, str], rows: int = 0, gpus: Sequence[str] = (), slowness: float = np.inf) -> Cell:
    logs, tiles, bends, levels = (part.tolist() for part in np.split(theta, curve.ends))
    return Cell(
        **dict(zip(_CELL, key, strict=True)),
        constants={name: float(np.exp(x)) for name, x in zip(curve.form.constants, logs, strict=True)},
        tiles={f"{h}x{w or 'n'}": float(np.exp(x)) for (h, w), x in zip(curve.form.tiles, tiles, strict=True)},
        bends={str(width): x for width, x in zip(curve.form.bends, bends, strict=True)},
        levels=dict(zip(curve.levels, levels, strict=True)),
        rows=rows, gpus=tuple(gpus), slowness=slowness,
    )


def _fitted(group: pl.DataFrame, sheets: Mapping[str, Gpu]) -> Cell:
    """One cell: constants of greatest posterior probability, as least squares of log residuals and log priors."""
    key = group.select(_CELL).row(0)
    gpus = group["gpu"].unique().sort().to_list()
    parts = [group.filter(pl.col("gpu") == gpu) for gpu in gpus]
    parts = [part.sample(min(part.height, _ROWS_A_CELL // len(parts)), seed=0, shuffle=True) for part in parts]
    sample = _Sample.joined([_Sample.of(part, sheets[gpu]) for part, gpu in zip(parts, gpus, strict=True)])
    target = np.log(np.concatenate([part["time_us"].to_numpy() for part in parts]))
    values = [sorted(column.unique()) for column in sample.levels]
    curve = _Curve(_form(key[0], key[2]), [name for names in values if len(names) > 1 for name in names])
    codes = curve.codes(sample)

    def misses(theta: Floats) -> Floats:
        miss = (curve.log_us(theta, sample, codes, slope=False)[0] - target) / _SCATTER
        return np.concatenate([_soft(miss)[0], (theta - curve.prior) / curve.sigma])

    def slopes(theta: Floats) -> Floats:
        log_us, gradient = curve.log_us(theta, sample, codes, slope=True)
        return np.vstack([gradient / _SCATTER * _soft((log_us - target) / _SCATTER)[1][:, None], np.diag(1.0 / curve.sigma)])

    found = least_squares(misses, curve.prior, jac=slopes, x_scale=curve.sigma, max_nfev=80)
    floors = np.concatenate([floor_us(part, sheets[gpu]) for part, gpu in zip(parts, gpus, strict=True)])
    slowness = float(np.median(np.exp(target) / np.maximum(floors, 1e-3)))
    return _cell(curve, found.x, key, group.height, gpus, slowness)


def _soft(z: Floats) -> tuple[Floats, Floats]:
    """Values whose squares grow as |z| beyond 1, and their derivative: what is far off counts by its distance."""
    root = np.sqrt(1.0 + z * z)
    soft = np.sign(z) * np.sqrt(2.0 * (root - 1.0))
    return soft, np.where(np.abs(soft) < 1e-6, 1.0, z / (root * np.where(soft == 0.0, 1.0, soft)))
