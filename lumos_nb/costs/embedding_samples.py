"""Samples of lookups, as `measure_lookups` makes them: a row a table of a call, and what models are fitted on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from lumos_nb.costs.lookups import LookupModel
from lumos_nb.embedding_tables import EMBEDDING_TABLES, Floats
from lumos_nb.errors import CalibrationError
from lumos_nb.schema import TableSchema

PASSES = ("forward", "backward")
LOOKUPS = TableSchema(
    "lookup sample",
    {
        "call": pl.Int64(),
        "group": pl.String(),  # of tables: calls of different groups have none in common
        "batch": pl.Int64(),
        **EMBEDDING_TABLES.columns,
        **{f"{which}_time_us": pl.Float64() for which in PASSES},
    },
)


def checked_samples(samples: pl.DataFrame) -> pl.DataFrame:
    """The samples, calls in order.

    Raises
    ------
    SchemaError
        A column is missing or of another type.
    CalibrationError
        There are none, or a call has a time that is not positive and finite; the message names it.
    """
    frame = LOOKUPS.check(samples).sort("call", maintain_order=True)
    if frame.is_empty():
        raise CalibrationError("there are no samples of lookups; record some with make calibrate.")
    for name in (f"{which}_time_us" for which in PASSES):
        bad = frame.filter(~(pl.col(name).is_finite() & (pl.col(name) > 0)).fill_null(value=False))
        if not bad.is_empty():
            raise CalibrationError(f"sample of lookups {bad['call'][0]} has {name} = {bad[name][0]}; leave it out.")
    return frame


def per_call(samples: pl.DataFrame) -> pl.DataFrame:
    """Checked samples, a row a call: its `group`, `batch` and times."""
    names = ["group", "batch", *(f"{which}_time_us" for which in PASSES)]
    return samples.group_by("call", maintain_order=True).agg(pl.col(names).first())


def call_times(samples: pl.DataFrame) -> Floats:
    """Forward and backward microseconds of checked samples: (m, 2)."""
    return per_call(samples).select(f"{which}_time_us" for which in PASSES).to_numpy()


def per_table(samples: pl.DataFrame, describe: Callable[[pl.DataFrame, int], Floats]) -> Floats:
    """What `describe` makes of the tables of each batch, in the order of the samples: (rows, k)."""
    numbered = samples.with_row_index("at")
    found = [(part["at"].to_numpy(), describe(part, int(batch))) for (batch,), part in numbered.group_by("batch")]
    at, values = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    ordered: Floats = values[np.argsort(at)]
    return ordered


def call_sums(samples: pl.DataFrame, model: LookupModel) -> Floats:
    """Sums of a model's parts over the tables of each call of checked samples: (m, k)."""
    parts = per_table(samples, model.parts)
    first = samples["call"].rle_id().to_numpy()
    return np.add.reduceat(parts, np.unique(first, return_index=True)[1])


def predicted_times(model: LookupModel, samples: pl.DataFrame) -> Floats:
    """Forward and backward microseconds that a model gives the calls of checked samples: (m, 2)."""
    return model.of_sums(call_sums(samples, model))


def unseen_times(samples: pl.DataFrame, fit: Callable[[pl.DataFrame], LookupModel], folds: int = 8) -> Floats:
    """Each call of checked samples priced by a model that was fitted without its group of tables: (m, 2).

    Raises
    ------
    CalibrationError
        All calls are of one group.
    """
    groups = samples["group"].unique().sort()
    if len(groups) < 2:
        raise CalibrationError(f"samples of lookups of one group ({groups.to_list()}) leave no tables to be unseen.")
    fold = samples["group"].replace_strict(groups, np.arange(len(groups)) % folds, return_dtype=pl.Int64)
    found = np.full((samples["call"].n_unique(), len(PASSES)), np.nan)
    of_call = per_call(samples.with_columns(group=fold))["group"].to_numpy()
    for number in np.unique(of_call):
        found[of_call == number] = predicted_times(fit(samples.filter(fold != number)), samples.filter(fold == number))
    return found


def median_errors(predicted: Floats, measured: Floats) -> tuple[float, float]:
    """Median |predicted / measured - 1|, forward and backward."""
    forward, backward = np.median(np.abs(predicted / measured - 1), axis=0)
    return float(forward), float(backward)
