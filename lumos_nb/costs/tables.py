"""What a person hands in as a table -> columns of known type and spelling, or an error that names the row.

Rows come from polars, pandas or by hand, with numbers as text and names as torch, a trace or a paper spell them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import polars as pl

from lumos_nb.errors import InputError, SchemaError, shown
from lumos_nb.number_formats import bare

if TYPE_CHECKING:
    import pandas as pd

Table: TypeAlias = "pl.DataFrame | pl.LazyFrame | pd.DataFrame | Mapping[str, Any] | Sequence[Mapping[str, Any]]"
"""What stands for a frame: a mapping is of columns, a sequence of rows."""


def as_frame(table: Table, what: str) -> pl.DataFrame:
    """A table as a polars frame: polars (lazy too), pandas, a mapping of columns, or a list of rows.

    Raises
    ------
    InputError
        It is none of these; `what` says what for, as "kernel".
    """
    try:
        if isinstance(table, pl.DataFrame):
            return table
        if isinstance(table, pl.LazyFrame):
            return table.collect()
        if hasattr(table, "iloc") and hasattr(table, "columns"):
            return pl.from_pandas(table)
        if isinstance(table, Mapping) or (_is_list(table) and all(isinstance(row, Mapping) for row in table)):
            return pl.DataFrame(table, infer_schema_length=None)
    except (pl.exceptions.PolarsError, ValueError, TypeError, ImportError) as error:
        raise InputError(f"the {what} frame cannot be read as a table: {error}") from error
    raise InputError(
        f"a {what} frame is a polars or pandas DataFrame, a mapping of columns or a list of rows; this is a "
        f"{type(table).__name__}."
    )


def _is_list(table: object) -> bool:
    return isinstance(table, Sequence) and not isinstance(table, str | bytes)


def numbers(frame: pl.DataFrame, names: Sequence[str], what: str) -> pl.DataFrame:
    """These columns as Float64; null where a frame has no such column, or a NaN, which is pandas' null.

    Raises
    ------
    SchemaError
        A column does not hold numbers (or text of numbers).
    InputError
        A text is no number; the message names the row.
    """
    return frame.select(_number(frame, name, what) for name in names)


def _number(frame: pl.DataFrame, name: str, what: str) -> pl.Series:
    if name not in frame.columns:
        return pl.Series(name, [None], dtype=pl.Float64).new_from_index(0, frame.height)
    column = frame[name]
    if column.dtype.is_numeric() or column.dtype == pl.Null:
        values = column.cast(pl.Float64)
        return values.fill_nan(None) if column.dtype.is_float() else values
    if column.dtype != pl.String:
        raise SchemaError(f"{what} frame: column {name} is {column.dtype}; it needs numbers. Cast it before the call.")
    values = column.str.strip_chars().cast(pl.Float64, strict=False)
    if (lost := values.is_null() & column.is_not_null()).any():
        row = int(lost.arg_max() or 0)
        raise InputError(f"{what} frame, row {row}: {name} is {shown(column[row])}, which is no number.")
    return values.fill_nan(None)


def words(frame: pl.DataFrame, name: str, what: str) -> pl.Series:
    """A column as text; null where a frame has no such column.

    Raises
    ------
    SchemaError
        The column holds neither text nor numbers.
    """
    if name not in frame.columns:
        return pl.Series(name, [None], dtype=pl.String).new_from_index(0, frame.height)
    column = frame[name]
    if column.dtype == pl.Object:  # torch.bfloat16 and its like
        return pl.Series(name, [None if word is None else str(word) for word in column], dtype=pl.String)
    if column.dtype.is_nested():
        raise SchemaError(f"{what} frame: column {name} is {column.dtype}; it needs text. Cast it before the call.")
    return column.cast(pl.String)


def spelled(column: pl.Series, known: Collection[str], others: Mapping[str, str]) -> pl.Series:
    """Text as `known` spells it, whatever its case and torch's prefix, or as `others` say; what is neither stays."""
    plain = {word.lower(): word for word in known} | dict(others)
    changed = {}
    for word in column.unique().drop_nulls().to_list():
        short = bare(word)
        if plain.get(short, word) != word:
            changed[word] = plain[short]
    return column.replace(changed) if changed else column
