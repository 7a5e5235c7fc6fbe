"""Embedding tables as a frame, how often a batch uses their rows again, and indices that do so as one asks.

A frame of tables has a row a table: `table` (its name), `rows`, `dim`, `pooling` (mean indices a sample), `dtype`, and
`bin_0` to `bin_16`, the reuse factor of a batch: of the distinct rows that it looks up, the share that it looks up
once, twice, 3 to 4, 5 to 8, ... 16,385 to 32,768 times, and more often. Bins of zeros say that nobody looked: models
take such a table's indices as uniform. The reuse factor belongs to one number of samples: a smaller batch has less.

The bins are those of Lin et al., "Towards Universal Performance Modeling for Machine Learning Training on Multi-GPU
Platforms" (TPDS 2024), and of Zha et al., "Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained
Neural Cost Models" (MLSys 2023).
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from lumos_nb.errors import InputError, LayoutError, SchemaError, shown
from lumos_nb.number_formats import ELEMENT_BYTES, number_format
from lumos_nb.schema import TableSchema

BINS = tuple(f"bin_{i}" for i in range(17))
_EDGES = 2 ** np.arange(16)
"""Most lookups of a row in each bin; the last bin has no edge."""

EMBEDDING_TABLES = TableSchema(
    "embedding",
    {
        "table": pl.String(),
        "rows": pl.Int64(),
        "dim": pl.Int64(),
        "pooling": pl.Float64(),
        "dtype": pl.String(),
        **dict.fromkeys(BINS, pl.Float64()),
    },
)
Rng = np.random.Generator | int
"""A generator, or the seed of one."""
Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


def _mean_lookups() -> Floats:
    """Mean lookups of a row in each bin, if their logarithm is uniform in it; the last bin as if it ended at 65,536."""
    counts = np.arange(1, 2**16 + 1, dtype=float)
    share = np.diff(np.log2(counts), prepend=0.0)
    return np.array([1.0, *(np.sum((counts * share)[2**i : 2 ** (i + 1)]) for i in range(16))])


MEAN_LOOKUPS = _mean_lookups()


def complete_tables(tables: pl.DataFrame) -> pl.DataFrame:
    """Check a frame of embedding tables and fill in what may be left out.

    Parameters
    ----------
    tables
        `rows`, `dim` and `pooling`, and maybe `table` (else the position), `dtype` (else fp32), `bin_0` to `bin_16`
        (else zeros: not known). Other columns are kept, behind these.

    Returns
    -------
    frame
        With the columns of `EMBEDDING_TABLES` in their order; known bins sum to 1 exactly.

    Raises
    ------
    InputError
        It is no polars frame.
    SchemaError
        A column is missing, or holds no numbers.
    LayoutError
        A table cannot be: no rows or no width, a negative pooling, a NaN, an unknown number format, a name that another
        table has, bins that are no shares. The message names the table.

    Examples
    --------
    >>> complete_tables(pl.DataFrame({"rows": [1000], "dim": [64], "pooling": [2]})).select("table", "dtype").rows()
    [('0', 'fp32')]
    """
    if not isinstance(tables, pl.DataFrame):
        raise InputError(
            f"embedding tables are a polars DataFrame with a row a table; this is a {type(tables).__name__}."
        )
    defaults = {"table": pl.int_range(pl.len()), "dtype": pl.lit("fp32"), **dict.fromkeys(BINS, pl.lit(0.0))}
    if "table" in tables.columns and tables["table"].dtype.is_nested():
        raise SchemaError(f"the column table is {tables['table'].dtype}; give names as text.")
    frame = tables.with_columns(value.alias(name) for name, value in defaults.items() if name not in tables.columns)
    wanted = EMBEDDING_TABLES.columns
    numbers = [c for c in wanted if c in frame.columns and wanted[c].is_numeric() and frame[c].dtype.is_numeric()]
    frame = frame.with_columns(pl.col("table").cast(pl.String), pl.col(numbers).cast(pl.Float64))
    _refuse(frame, pl.col("table").is_null(), "has no name")
    _refuse(frame, pl.col("table").is_duplicated(), "is there twice; names are the key of a plan")
    for name in ("rows", "dim"):
        if name in numbers:
            whole = pl.col(name).is_between(1, 2**53) & (pl.col(name).round() == pl.col(name))
            _refuse(frame, ~whole.fill_null(value=False), f"has {name} = {{}}; it needs a whole number from 1 on", name)
    for name in {"pooling", *BINS} & {*numbers}:
        good = pl.col(name).is_finite() & (pl.col(name) >= 0)
        _refuse(frame, ~good.fill_null(value=False), f"has {name} = {{}}; it needs a finite number from 0 on", name)
    frame = EMBEDDING_TABLES.check(frame.with_columns(pl.col(name).cast(wanted[name]) for name in numbers))
    formats = {word: number_format(word or "") for word in frame["dtype"].unique()}
    known = pl.col("dtype").replace_strict(formats, return_dtype=pl.String)
    _refuse(frame, known.is_null(), f"has dtype {{}}; there are {', '.join(ELEMENT_BYTES)}", "dtype")
    total = pl.sum_horizontal(BINS)
    frame = frame.with_columns(known.alias("dtype"), total=total)
    odd = ~(pl.col("total").is_between(0.99, 1.01) | (pl.col("total") == 0))
    _refuse(frame, odd, "has bins that sum to {}; shares sum to 1, or are all 0 where the reuse is not known", "total")
    scale = pl.when(pl.col("total") > 0).then("total").otherwise(1.0)
    return frame.with_columns(pl.col(BINS) / scale).drop("total")


def _refuse(frame: pl.DataFrame, which: pl.Expr, why: str, value: str = "table") -> None:
    """Raise an error that names the first table for which an expression holds; `{}` becomes what it has."""
    if not (bad := frame.filter(which)).is_empty():
        at = frame.with_row_index("at").filter(which)["at"][0]
        raise LayoutError(f"embedding table {shown(bad['table'][0])} (row {at}) {why.format(bad[value][0])}.")


def reuse_factor(indices: ArrayLike) -> Floats:
    """Of the distinct indices of a batch, the share in each bin of how often they occur: (17,), zeros of no indices.

    Raises
    ------
    InputError
        They are no whole numbers.

    Examples
    --------
    >>> reuse_factor([7, 7, 7, 1, 2])[:3].tolist()      # two once, none twice, one thrice
    [0.666..., 0.0, 0.333...]
    """
    found = np.asarray(indices)
    if found.size and found.dtype.kind not in "iu":
        raise InputError(f"indices are whole numbers; these are {found.dtype}.")
    counts = np.unique(found, return_counts=True)[1]
    bins = np.bincount(np.searchsorted(_EDGES, counts), minlength=len(BINS))
    return bins / max(len(counts), 1)


def uniform_indices(rows: int, count: int, seed: Rng = 0) -> Indices:
    """So many indices of a table, each row as likely as any other.

    Raises
    ------
    LayoutError
        There are no rows, or a negative number of indices.

    Examples
    --------
    >>> uniform_indices(10, 3).tolist()
    [8, 6, 5]
    """
    _check_sizes(rows, count)
    return np.random.default_rng(seed).integers(0, rows, count)


def zipf_indices(rows: int, count: int, alpha: float, seed: Rng = 0) -> Indices:
    """So many indices of a table whose k-th most popular row has weight k to the power of -alpha; 0 is uniform.

    Popular rows lie scattered over the table. Drawn by inverting the cumulative weights.

    Raises
    ------
    LayoutError
        There are no rows, a negative number of indices, or an alpha that is negative or not finite.

    Examples
    --------
    >>> counts = np.unique(zipf_indices(1000, 10_000, 1.0), return_counts=True)[1]
    >>> int(counts.max())                                # of the most popular row; 10,000 / H(1000) is 1336
    1364
    """
    _check_sizes(rows, count)
    if not isinstance(alpha, int | float) or not 0 <= alpha < math.inf:  # type: ignore[redundant-expr]
        raise LayoutError(f"alpha of a Zipf distribution is {alpha}; it needs a finite number from 0 on.")
    weight = np.cumsum(np.arange(1, rows + 1, dtype=float) ** -alpha)
    rank = np.searchsorted(weight, np.random.default_rng(seed).uniform(0, weight[-1], count), side="right")
    return _scattered(np.minimum(rank, rows - 1), rows)


def reused_indices(rows: int, count: int, bins: ArrayLike, seed: Rng = 0) -> Indices:
    """So many indices of a table, in random order, whose reuse factor is close to the one given.

    Raises
    ------
    LayoutError
        There are no rows, a negative number of indices, bins that are no 17 shares, or fewer rows than so many indices
        of so little reuse are spread over.

    Examples
    --------
    >>> twice = reused_indices(10**6, 10**5, np.eye(17)[1])       # every row that is looked up at all: twice
    >>> reuse_factor(twice)[:3].tolist()
    [0.0, 1.0, 0.0]
    """
    _check_sizes(rows, count)
    share = np.asarray(bins, dtype=float)
    if share.shape != (len(BINS),) or not (share >= 0).all() or not 0 < share.sum() < math.inf:
        raise LayoutError(f"a reuse factor is {len(BINS)} shares from 0 on, not all 0; these are {share.tolist()}.")
    share, rng = share / share.sum(), np.random.default_rng(seed)
    lookups = np.zeros(0, dtype=np.int64)
    while (left := count - lookups.sum()) > 0:
        lookups = np.append(lookups, _lookups(share, 1.02 * left / (share @ MEAN_LOOKUPS), rng))
    used = int(np.searchsorted(np.cumsum(lookups), count)) + 1 if count else 0
    if used > rows:
        raise LayoutError(
            f"{count} indices with this reuse are spread over {used} rows; the table has {rows}. "
            "Ask for fewer indices, or for more reuse."
        )
    lookups = lookups[:used]
    if count:
        lookups[-1] -= lookups.sum() - count
    found = np.repeat(rng.choice(rows, used, replace=False), lookups)
    return rng.permutation(found)


def _lookups(share: Floats, distinct: float, rng: np.random.Generator) -> Indices:
    """How often each of so many rows is looked up, in random order: shares rounded at random, logs uniform in a bin."""
    number = np.floor(share * distinct + rng.uniform(size=len(share))).astype(np.int64)
    bin_of = np.repeat(np.arange(len(share)), number)
    drawn = np.ceil(2.0 ** (bin_of - rng.uniform(size=len(bin_of)))).astype(np.int64)
    return rng.permutation(np.where(bin_of == 0, 1, drawn))


def _scattered(rank: Indices, rows: int) -> Indices:
    """Ranks as indices: a multiple of them, modulo the rows, by a step that has no factor in common with those."""
    step = max(round(0.618 * rows), 1)
    while math.gcd(step, rows) > 1:
        step += 1
    return rank * step % rows


def _check_sizes(rows: int, count: int) -> None:
    if rows < 1:
        raise LayoutError(f"a table of {rows} rows has nothing to look up; it needs one row at least.")
    if count < 0:
        raise LayoutError(f"{count} indices cannot be drawn; ask for 0 or more.")
