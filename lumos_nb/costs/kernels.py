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
from typing import Any, Self

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lumos_nb.config import Gpu, find_gpu, names_of, same_name
from lumos_nb.costs._kernel_math import OWN, busy_us
from lumos_nb.costs.forms import (
    BEND_SIGMA,
    COMPUTED,
    LEVELS,
    PRIORS,
    SCATTER,
    TILE_SIGMA,
    Form,
    form_of,
    sustained_flops,
)
from lumos_nb.costs.intervals import Band
from lumos_nb.costs.work import Part, Work, with_work, work_of
from lumos_nb.errors import CalibrationError, InputError, SchemaError, SheetError

Floats = NDArray[np.float64]


CELL = ("family", "format", "implementation")
"""What has constants of its own."""
_ROWS_A_CELL = 2500
"""Rows that a cell is fitted on, the GPUs in equal parts: more add time, not knowledge (there are 30 constants)."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of one family, number format and (attention) implementation, and what they were fitted on."""

    family: str
    format: str
    implementation: str = ""
    constants: dict[str, float]
    tiles: dict[str, float]
    bends: dict[str, float]
    levels: dict[str, float]
    slowness: float = 1.0
    rows: int = 0
    gpus: tuple[str, ...] = ()
    band: Band | None = None

    @property
    def key(self) -> str:
        """What the cell is called."""
        return " ".join(part for part in (self.family, self.format, self.implementation) if part)

    def time_us(self, sample: _Sample) -> Floats:
        """Microseconds of kernels of this family, before the floor."""
        curve = _Curve(form_of(self.family, self.implementation), self.levels)
        return np.exp(curve.log_us(curve.vector(self), sample, curve.codes(sample), slope=False)[0])


class KernelModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fitted cells; `predict` prices a kernel frame on any GPU that has a data sheet."""

    cells: tuple[Cell, ...]

    def predict(
        self, frame: pl.DataFrame, gpu: Gpu, *, missing_ok: bool = False, work: Work | None = None
    ) -> pl.DataFrame:
        """Price every row on one GPU.

        Parameters
        ----------
        frame
            A kernel frame as `with_work` takes it. For attention, `method` up to the first ";" names the
            implementation; where it names none that was fitted, the fastest of those is meant; `cell` tells which.
        gpu
            The data sheet to price on, that of a fitted GPU or another one.
        missing_ok
            Leave the rows of which no cell knows the family and format without a price (null), instead of an error.
        work
            `work_of(frame)`, if it is there already.

        Returns
        -------
        frame
            The same rows with `cell`, `floor_us` (the roofline, the L2's share of the bytes left out) and `dur_us`, and
            `low_us` and `high_us` where the cell has a band (else null).

        Raises
        ------
        CalibrationError
            Rows of a family or format that nothing was fitted on; the message says what to measure.
        InputError, SheetError
            As `with_work`; the sheet has no rate for a format.

        Examples
        --------
        >>> model = KernelModel(cells=(prior_cell("elementwise", "half"),))
        >>> copied = pl.DataFrame({"op": ["gelu"], "dtype": ["fp16"], "rows": [4096], "cols": [16384]})
        >>> model.predict(copied, find_gpu("A100"))["dur_us"].round().item()
        161.0
        """
        work = work or work_of(frame)
        of_kind = self._cell_of(work.kinds, gpu, missing_ok)
        of_row = np.full(frame.height, len(self.cells), dtype=np.uint32)
        found = np.full((4, frame.height), np.nan)
        for part in work.parts:
            cells = of_kind[part.sizes["kind"].to_numpy()]
            for index in np.unique(cells[cells < len(self.cells)]):
                chosen = slice(None) if (cells == index).all() else np.flatnonzero(cells == index)
                sample = _Sample.of(work.kinds, part, gpu, chosen)
                rows, cell = part.rows[chosen], self.cells[index]
                time = np.maximum(cell.time_us(sample), sample.floor_us)
                of_row[rows], found[0, rows], found[1, rows] = index, sample.floor_us, time
                if cell.band is not None:
                    size = part.sizes["flops", "bytes"].to_numpy()[chosen].T
                    found[2, rows], found[3, rows] = cell.band.around(time, difficulty(time, sample.floor_us, *size))
        keys = pl.Series("cell", [*(cell.key for cell in self.cells), None], dtype=pl.String)
        names = ("floor_us", "dur_us", "low_us", "high_us")
        columns = (pl.Series(name, values).fill_nan(None) for name, values in zip(names, found, strict=True))
        return frame.with_columns(keys.gather(of_row), *columns)

    def _cell_of(self, kinds: pl.DataFrame, gpu: Gpu, missing_ok: bool) -> NDArray[np.int64]:
        """Which cell prices each kind of row; one more than the last for none."""

        def rank(i: int) -> tuple[bool, int, float]:
            """Where no implementation is named: one measured on this GPU, on many GPUs, a fast one; the last wins."""
            cell = self.cells[i]
            here = any(same_name(one, other) for one in cell.gpus for other in names_of(gpu))
            return here, 0 if here else len(cell.gpus), -cell.slowness

        known = {(self.cells[i].family, self.cells[i].format, ""): i for i in sorted(range(len(self.cells)), key=rank)}
        known |= {(c.family, c.format, c.implementation): i for i, c in enumerate(self.cells)}
        asked = kinds.select(*CELL).rows()
        of_kind = [known.get(kind, known.get((*kind[:2], ""), len(self.cells))) for kind in asked]
        missing = {" ".join(kind[:2]) for kind, cell in zip(asked, of_kind, strict=True) if cell == len(self.cells)}
        if missing and not missing_ok:
            there = ", ".join(cell.key for cell in self.cells) or "none"
            raise CalibrationError(
                f"nothing was fitted on {', '.join(sorted(missing))}; there are: {there}. Measure some kernels of this "
                "kind on the GPU (op, dtype and sizes, with time_us) and fit again, or leave these rows out."
            )
        return np.array(of_kind, dtype=np.int64)


def difficulty(dur_us: Floats, floor_us: Floats, flops: Floats, size_bytes: Floats) -> Floats:
    """What the width of an interval depends on (rows x 3): the time, how far it is from the roofline, FLOPs a byte."""
    return np.column_stack([np.log(dur_us), np.log(dur_us / (floor_us + 0.1)), np.log1p(flops / size_bytes)])


def cell_keys(work: pl.DataFrame) -> pl.Series:
    """The key of the cell that each row of a frame with the columns of `with_work` is a sample of."""
    parts = [pl.when(pl.col(name) != "").then(pl.col(name)) for name in CELL]
    return work.select(pl.concat_str(parts, separator=" ", ignore_nulls=True).alias("cell"))["cell"]


@dataclass(frozen=True, slots=True)
class _Sample:
    """Kernels of one family as arrays, on one GPU or several."""

    work: Floats
    """Columns as `busy_us` has them; attention's n and k without what its constants add."""
    scores: Floats
    masked: Floats
    cols: Floats
    floor_us: Floats
    """The roofline: FLOPs of products at the peak rate, or bytes, less what an L2 may hold, at the bandwidth."""
    gap: Floats
    """1 where the time has the gap between launches in it."""
    kind: NDArray[np.int64]
    levels: pl.DataFrame
    """Of every kind of row, the names of its levels."""

    @classmethod
    def of(cls, kinds: pl.DataFrame, part: Part, gpu: Gpu, chosen: NDArray[np.int64] | slice) -> Self:
        """The chosen rows of a part."""
        size = {name: part.sizes[name].to_numpy()[chosen] for name in part.sizes.columns}
        kind, count = size["kind"], len(size["kind"])
        byte_us = 1e6 / gpu.memory_bytes_per_s
        unit, flop_us = np.full(kinds.height, gpu.cores * byte_us), np.zeros(kinds.height)
        if part.family in COMPUTED:
            for i in np.unique(kind):
                op, dtype = kinds["op", "dtype"].row(int(i))
                try:
                    unit[i], flop_us[i] = 2e6 * gpu.cores / sustained_flops(gpu, dtype), 1e6 / gpu.peak(dtype)
                except SheetError as error:
                    row = part.rows[chosen][np.argmax(kind == i)]
                    raise SheetError(f"kernel frame, row {row} (op {op!r}): {error}") from error
        floor = np.maximum(np.maximum(size["bytes"] - gpu.l2_bytes, 0.0) * byte_us, size["flops"] * flop_us[kind])
        work = np.empty((count, 10))
        for column, name in enumerate(("work_batch", "work_m", "work_n", "work_k")):
            work[:, column] = size[name]
        work[:, 4], work[:, 8] = unit[kind], size["bytes"]
        work[:, [5, 6, 7, 9]] = 1e6 / gpu.clock_hz, gpu.cores, byte_us, gpu.l2_bytes
        said = {name: pl.lit(gpu.name) if name == "gpu" else pl.when(pl.col(name) != "").then(name) for name in LEVELS}
        levels = kinds.select(pl.format(name + "={}", value).alias(name) for name, value in said.items())
        gap = kinds["gap"].to_numpy()[kind]
        sizes = (size["work_scores"], size["work_masked"], size["cols"])
        return cls(work, *sizes, floor, gap, kind.astype(np.int64), levels)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Samples of several GPUs below each other."""
        names = ("work", "scores", "masked", "cols", "floor_us", "gap")
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        before = np.cumsum([0, *(part.levels.height for part in parts)])
        kind = np.concatenate([part.kind + start for part, start in zip(parts, before, strict=False)])
        return cls(**arrays, kind=kind, levels=pl.concat([part.levels for part in parts]))


class _Curve:
    """The model of one form as a function of one vector: log constants, log tile factors, bends, levels."""

    def __init__(self, form: Form, levels: Iterable[str]) -> None:
        self.form, self.levels = form, tuple(levels)
        self.ends = np.cumsum([len(form.constants), len(form.tiles), len(form.bends)])
        values, spread = zip(*form.constants.values(), strict=True)
        counts = (len(form.tiles), len(form.bends), len(self.levels))
        self.prior = np.concatenate([np.log(values), np.zeros(sum(counts))])
        level_sigma = [(LEVELS | form.levels)[name.split("=")[0]] for name in self.levels]
        shared = np.repeat([TILE_SIGMA, BEND_SIGMA], counts[:2])
        self.sigma = np.concatenate([spread, shared, level_sigma])
        self.table = np.array(form.options(), dtype=np.float64).reshape(-1, 3)
        height, width = self.table[:, 0], self.table[:, 1]
        self.edge = np.where(width == 0.0, 0.0, 64.0 / height + 64.0 / np.maximum(width, 1.0))
        self.area = height * width / 128.0**2

    def vector(self, cell: Cell) -> Floats:
        """A cell's numbers in this layout; a level that it has not is none."""
        form = self.form
        tiles, bends = (f"{height}x{width or 'n'}" for height, width in form.tiles), map(str, form.bends)
        logs = np.log([*(cell.constants[name] for name in form.constants), *(cell.tiles[name] for name in tiles)])
        levels = (cell.levels.get(name, 0.0) for name in self.levels)
        return np.array([*logs, *(cell.bends[name] for name in bends), *levels])

    def named(self, theta: Floats) -> dict[str, Any]:
        """The numbers by name, as a cell holds them."""
        logs, tiles, bends, levels = (part.tolist() for part in np.split(theta, self.ends))
        return {
            "constants": {name: float(np.exp(x)) for name, x in zip(self.form.constants, logs, strict=True)},
            "tiles": {f"{h}x{w or 'n'}": float(np.exp(x)) for (h, w), x in zip(self.form.tiles, tiles, strict=True)},
            "bends": {
                str(width): x for width, x in zip(self.form.bends, np.maximum.accumulate(bends).tolist(), strict=True)
            },
            "levels": dict(zip(self.levels, levels, strict=True)),
        }

    def codes(self, sample: _Sample) -> NDArray[np.int64]:
        """Which levels each kind of row has; one more than the last for none."""
        position = {name: i for i, name in enumerate(self.levels)}
        other = len(self.levels)
        return sample.levels.select(pl.all().replace_strict(position, default=other, return_dtype=pl.Int64)).to_numpy()

    def log_us(self, theta: Floats, sample: _Sample, codes: NDArray[np.int64], slope: bool) -> tuple[Floats, Floats]:
        """Log microseconds of every row and, if asked for, their gradient (rows x constants)."""
        logs, tiles, bends, levels = np.split(theta, self.ends)
        value = {name: prior[0] for name, prior in PRIORS.items()}
        value |= dict(zip(self.form.constants, np.exp(logs), strict=True))
        work, count, joint = sample.work, len(self.table), self.form.joint
        if "score_cycles" in self.form.constants:
            work = work.copy()
            scores = value["score_cycles"] * sample.scores * work[:, 5] / (work[:, 4] * value["cost"])
            work[:, 2] = (work[:, 2] ** joint + scores**joint) ** (1.0 / joint)
            beyond = np.minimum(value["diagonal"] if "diagonal" in self.form.constants else np.inf, sample.masked)
            work[:, 3] += beyond
        else:
            scores = beyond = np.zeros(len(work))
        by_scores = (scores / work[:, 2]) ** joint
        whole, cached = (value[name] / (1.0 + value[name]) for name in ("whole", "cached"))
        scalars = [whole, value["partial"], value["memory"], cached, value["cache"], value["power"], self.form.granule]
        cost = value["cost"] * np.exp(value["edge"] * self.edge + np.repeat(tiles, len(self.form.splits)))
        end = value["end_cycles"] * self.area
        tilings = np.column_stack([self.table, cost, value["begin_cycles"] + end])
        busy, raw = np.empty(len(work)), np.empty((len(work) if slope else 0, OWN + 2 * count))
        busy_us(work, tilings, np.array(scalars), busy, raw)
        busy *= np.exp(np.append(levels, 0.0)[codes].sum(axis=1))[sample.kind]
        rising = np.maximum.accumulate(bends)  # a wider row never takes less time
        if self.form.bends:
            busy *= np.exp(np.interp(np.log(sample.cols), np.log(self.form.bends), rising))
        launch, gap = value["launch_cycles"] * work[:, 5], value["gap_cycles"] * sample.gap * work[:, 5]
        time = busy + launch + gap
        if not slope:
            return np.log(time), raw
        share = (busy / time)[:, None]
        by_cost, by_cycles = raw[:, OWN : OWN + count], raw[:, OWN + count :]
        ending = end / (value["begin_cycles"] + end)
        of = {
            "launch_cycles": launch / busy,
            "gap_cycles": gap / busy,
            "whole": raw[:, 0] * whole * (1.0 - whole),
            "partial": raw[:, 1],
            "memory": raw[:, 2],
            "cached": raw[:, 3] * cached * (1.0 - cached),
            "cache": raw[:, 4],
            "power": raw[:, 5],
            "cost": by_cost.sum(axis=1) * (1.0 - by_scores),
            "edge": by_cost @ (value["edge"] * self.edge),
            "begin_cycles": by_cycles @ (1.0 - ending),
            "end_cycles": by_cycles @ ending,
            "score_cycles": by_cost.sum(axis=1) * by_scores,
            "diagonal": by_cost.sum(axis=1) * np.where(beyond < sample.masked, beyond / work[:, 3], 0.0),
        }
        by_tile = by_cost.reshape(len(work), len(self.form.tiles), len(self.form.splits)).sum(axis=2)
        by_level = np.zeros((len(codes), len(levels) + 1))
        for code in codes.T:
            by_level[np.arange(len(codes)), code] = 1.0
        columns = np.column_stack([of[name] for name in self.form.constants])
        return np.log(time), np.hstack(
            [columns, by_tile, self._hats(sample.cols, bends), by_level[sample.kind, :-1]]
        ) * share

    def _hats(self, cols: Floats, bends: Floats) -> Floats:
        """The gradient by the bends: each row's width lies between two, of which the greatest so far counts."""
        knots, place, rising = np.log(self.form.bends), np.log(cols), np.maximum.accumulate(bends)
        weights = np.array([np.interp(place, knots, one) for one in np.eye(len(knots))]).reshape(-1, len(cols)).T
        leads: Floats = weights @ (np.arange(len(bends)) == np.searchsorted(rising, rising)[:, None])
        return leads


def fit_kernels(
    samples: pl.DataFrame, sheets: Mapping[str, Gpu] | None = None, *, start: KernelModel | None = None
) -> KernelModel:
    """Fit every cell that the samples have rows for.

    Parameters
    ----------
    samples
        A kernel frame with `gpu` and `time_us`. Rows of several GPUs share constants, which are relative to the sheets.
    sheets
        Data sheets by the names in `gpu`; the bundled ones where it has none.
    start
        Cells to begin at: a few samples move them a little, many decide.

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
    own, before = dict(sheets or {}), {cell.key: cell for cell in start.cells} if start else {}
    cells = []
    for key, group in sorted(with_work(samples).group_by(*CELL), key=lambda kept: kept[0]):
        cell = prior_cell(*key)
        cell = before.get(cell.key, cell)
        names = tuple(sorted(group["gpu"].unique()))
        cell = msgspec.structs.replace(cell, rows=group.height, gpus=names, band=None)
        cells.append(_fitted(cell, *_measured(group, own)))
    return KernelModel(cells=tuple(cells))


def _measured(rows: pl.DataFrame, sheets: Mapping[str, Gpu]) -> tuple[_Sample, Floats]:
    """Samples of one family as arrays, at most `_ROWS_A_CELL` of them, and the logarithms of their times."""
    by_gpu = rows.partition_by("gpu", maintain_order=True)
    parts = [part.sample(min(part.height, _ROWS_A_CELL // len(by_gpu)), seed=0) for part in by_gpu]
    found = []
    for part in parts:
        work, name = work_of(part), part["gpu"][0]
        found.append(_Sample.of(work.kinds, work.parts[0], sheets.get(name) or find_gpu(name), slice(None)))
    return _Sample.joined(found), np.log(np.concatenate([part["time_us"].to_numpy() for part in parts]))


def prior_cell(family: str, number_format: str, implementation: str = "") -> Cell:
    """The cell that holds before anything is measured: what the constants usually are, for a GPU's data sheet alone."""
    curve = _Curve(form_of(family, implementation), ())
    return Cell(family=family, format=number_format, implementation=implementation, **curve.named(curve.prior))


def prior_model(kinds: Iterable[tuple[str, str]]) -> KernelModel:
    """`prior_cell` of each of some families and formats."""
    return KernelModel(cells=tuple(prior_cell(*kind) for kind in sorted(kinds)))


def _fitted(start: Cell, sample: _Sample, target: Floats) -> Cell:
    """A cell's constants of greatest posterior probability: least squares of log residuals and of log departures."""
    used = sample.levels[np.unique(sample.kind)]
    several = {name for column in used for name in column.drop_nulls().unique() if column.drop_nulls().n_unique() > 1}
    curve = _Curve(form_of(start.family, start.implementation), sorted(several | set(start.levels)))
    codes, begin = curve.codes(sample), curve.vector(start)

    def misses(theta: Floats) -> Floats:
        miss = (curve.log_us(theta, sample, codes, slope=False)[0] - target) / SCATTER
        return np.concatenate([_soft(miss)[0], (theta - begin) / curve.sigma])

    def slopes(theta: Floats) -> Floats:
        log_us, gradient = curve.log_us(theta, sample, codes, slope=True)
        soft = _soft((log_us - target) / SCATTER)[1]
        return np.vstack([gradient / SCATTER * soft[:, None], np.diag(1.0 / curve.sigma)])

    found = least_squares(misses, begin, jac=slopes, x_scale=curve.sigma, ftol=1e-4, xtol=1e-4, max_nfev=50)
    slowness = float(np.median(np.exp(target) / np.maximum(sample.floor_us, 1e-3)))
    return msgspec.structs.replace(start, slowness=slowness, **curve.named(found.x))


def _soft(z: Floats) -> tuple[Floats, Floats]:
    """Values whose squares grow as |z| beyond 1, and their derivative: what is far off counts by its distance.

    A trial step of a fit may be infinitely far off: its value is infinite then and its derivative 0, and the solver
    takes a shorter one.
    """
    root = np.hypot(1.0, z)
    return np.sign(z) * np.sqrt(2.0 * (root - 1.0)), np.sqrt((1.0 + 1.0 / root) / (2.0 * root))
