"""What a fit misses on groups of samples that it has not seen: the source of every error and interval of a calibration.

Rows of one sweep resemble each other, so a random split flatters; whole models, shapes or GPUs are left out in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from functools import partial

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.config import Gpu, find_gpu
from lumos_nb.costs.intervals import Band
from lumos_nb.costs.kernels import KernelModel, difficulty, fit_kernels
from lumos_nb.costs.work import with_work
from lumos_nb.executors import spread

FOLDS = 6
"""Groups beyond this number are left out several at a time: each fold costs a fit."""


_GROUPED = ("model", "n", "k", "cols", "head_dim", "seq_q")


class Score(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Errors |predicted / measured - 1| of one cell on groups left out, and how its interval did on them.

    `coverage` is the share of rows inside the nominal 90 % interval, which for each group comes from the others;
    `width` is its median width as a share of the prediction.
    """

    cell: str
    left_out: str
    groups: int
    rows: int
    median: float
    mean: float
    coverage: float
    width: float


def shape_groups(samples: pl.DataFrame) -> pl.Series:
    """What to leave out together: the `model` that shapes were taken from, else what its weights, widths or heads are.

    Rows that differ only in the number of tokens or in batch are one sweep and stay together.
    """
    absent = [pl.lit(None, pl.String).alias(name) for name in _GROUPED if name not in samples.columns]
    work = with_work(samples).with_columns(absent)
    wide = pl.col("cols").cast(pl.Float64).log(2).round().cast(pl.String)
    by_family = (
        pl.when(pl.col("family") == "attention")
        .then(pl.concat_str("head_dim", "seq_q", separator="/"))
        .otherwise(pl.coalesce(pl.concat_str("n", "k", separator="x"), wide, pl.lit("")))
    )
    return work.select(pl.coalesce(pl.col("model").cast(pl.String), by_family).alias("group"))["group"]


def leave_groups_out(
    samples: pl.DataFrame,
    group: pl.Series,
    *,
    sheets: Mapping[str, Gpu] | None = None,
    executor: Executor | str | None = None,
    start: KernelModel | None = None,
) -> pl.DataFrame:
    """Each row priced by a fit without its group.

    Parameters
    ----------
    samples
        A kernel frame with `gpu` and `time_us`; all of one cell, or of several.
    group
        One value a row. Of more than `FOLDS` groups several are left out at a time.
    sheets
        As in `fit_kernels`.
    executor
        Maps the fits, as in `executors.spread`.
    start
        As in `fit_kernels`.

    Returns
    -------
    frame
        `cell`, `group`, `time_us`, `dur_us`, `floor_us`, `flops`, `bytes`; a cell of one group has no
        rows in it, since nothing was left to fit.
    """
    names = {name: i for i, name in enumerate(group.unique().sort().to_list())}
    fold = group.replace_strict(names, return_dtype=pl.Int64).to_numpy() % FOLDS
    tasks = [(samples.filter(fold != i), samples.filter(fold == i)) for i in np.unique(fold)]
    tasks = [task for task in tasks if task[0].height]
    done = spread(executor, partial(_priced_without, sheets=sheets, start=start), tasks)
    groups = [group.filter(pl.Series(fold == i)) for i in np.unique(fold) if tasks]
    parts = [
        part.with_columns(group=names).filter(pl.col("dur_us").is_not_null())
        for part, names in zip(done, groups, strict=True)
    ]
    texts, numbers = ("cell", "group"), ("time_us", "dur_us", "floor_us", "flops", "bytes")
    empty = pl.DataFrame(schema=dict.fromkeys(texts, pl.String) | dict.fromkeys(numbers, pl.Float64))
    return pl.concat([empty, *(part.select(empty.columns) for part in parts)])


def _priced_without(
    split: tuple[pl.DataFrame, pl.DataFrame], sheets: Mapping[str, Gpu] | None, start: KernelModel | None
) -> pl.DataFrame:
    """The second of two tables priced by a fit on the first; null where that has no cell for a row."""
    train, test = split
    model = fit_kernels(train, sheets, start=start)
    parts = []
    for (gpu,), rows in with_work(test).group_by("gpu", maintain_order=True):
        sheet = (sheets or {}).get(gpu) or find_gpu(gpu)
        parts.append(model.predict(rows, sheet, missing_ok=True))
    return pl.concat(parts)


def score(priced: pl.DataFrame, left_out: str) -> Iterator[Score]:
    """A score for each cell of a table of `leave_groups_out`."""
    for (cell,), rows in priced.group_by("cell", maintain_order=True):
        error = np.abs((rows["dur_us"] / rows["time_us"]).to_numpy() - 1.0)
        inside, width = _interval_check(rows)
        yield Score(
            cell=cell, left_out=left_out, groups=rows["group"].n_unique(), rows=rows.height,
            median=float(np.median(error)), mean=float(error.mean()), coverage=inside, width=width,
        )  # fmt: skip


def band_of(rows: pl.DataFrame) -> Band:
    """The interval that residuals of rows left out give; columns as `leave_groups_out` has them."""
    residual = (rows["time_us"] / rows["dur_us"]).log().to_numpy()
    return Band.fitted(residual, difficulty_of(rows), rows["group"].to_numpy())


def difficulty_of(rows: pl.DataFrame) -> NDArray[np.float64]:
    """What the width depends on, of rows that are priced: `dur_us`, `floor_us`, `flops`, `bytes`."""
    return difficulty(*rows.select("dur_us", "floor_us", "flops", "bytes").to_numpy().T)


def _interval_check(rows: pl.DataFrame) -> tuple[float, float]:
    """Share of rows inside the interval that the other groups give, and its median relative width."""
    inside, width = [], []
    for (_,), part in rows.group_by("group", maintain_order=True):
        others = rows.filter(pl.col("group") != part["group"][0])
        if others.is_empty():
            return float("nan"), float("nan")
        dur_us, time_us = part["dur_us"].to_numpy(), part["time_us"].to_numpy()
        low, high = band_of(others).around(dur_us, difficulty_of(part))
        inside.append((low <= time_us) & (time_us <= high))
        width.append((high - low) / dur_us)
    return float(np.concatenate(inside).mean()), float(np.median(np.concatenate(width)))
