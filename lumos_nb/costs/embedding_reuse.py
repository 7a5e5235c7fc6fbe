"""How often lookups find a row in a cache, from the reuse factor of a batch.

A batch looks up its rows in random order, so that a row with c lookups is in none of a share t of them with chance
(1 - t) to the c, and a cache holds what was touched in the last share t, where t is such that this fills it (Che,
Tung and Wang, "Hierarchical web caching systems", IEEE JSAC 2002). Which rows the batch before has not touched follows
from how many are looked up once, twice, ... (Good and Toulmin, "The number of new species", Biometrika 1956).
"""

from __future__ import annotations

import numpy as np
import polars as pl
from scipy.special import pdtr

from lumos_nb.embedding_tables import BINS, MEAN_LOOKUPS, Floats


def bins_of(tables: pl.DataFrame, batch: int) -> Floats:
    """The reuse factors of tables, (n, 17); where they are not known, those expected of uniform indices."""
    share = tables.select(BINS).to_numpy().copy()
    unknown = share.sum(axis=1) == 0
    often = batch * tables["pooling"].to_numpy()[unknown] / tables["rows"].to_numpy()[unknown]
    below = pdtr(np.array([0, *2 ** np.arange(16), np.inf]), np.maximum(often, 1e-9)[:, None])  # Poisson
    share[unknown] = np.diff(below, axis=1) / (1 - below[:, :1])
    return share


def reuse(tables: pl.DataFrame, batch: int) -> tuple[Floats, Floats]:
    """Rows of each table that a batch looks up, by bin, and mean lookups of one of these: (n, 17) both.

    Never more rows than a table has: where bins of another batch would have it so, rows are looked up more often.
    """
    rows, lookups = tables["rows"].cast(pl.Float64).to_numpy(), batch * tables["pooling"].to_numpy()
    share = bins_of(tables, batch)
    known = tables.select(pl.sum_horizontal(BINS)).to_series().to_numpy() > 0
    mean = share @ MEAN_LOOKUPS
    distinct = np.where(known, np.minimum(lookups / mean, rows), -rows * np.expm1(-lookups / rows))
    stretch = np.divide(lookups, distinct * mean, out=np.ones_like(mean), where=distinct > 0)
    return distinct[:, None] * share, stretch[:, None] * MEAN_LOOKUPS


def in_units(distinct: Floats, often: Floats, rows: Floats, units: Floats) -> tuple[Floats, Floats]:
    """The same of units that a cache loads at once, where a row takes `units` of one, less than 1: rows share it.

    Looked-up rows lie scattered, so that of 1 / units rows at least one is touched with the chance of independent ones.
    """
    per = np.maximum(1 / units, 1.0)
    some = np.maximum(distinct.sum(axis=1), 1e-9)
    touched = rows / per * -np.expm1(per * np.log1p(-np.minimum(some / rows, 1 - 1e-9)))
    fewer = np.minimum(touched / some, 1.0)[:, None]
    return distinct * fewer, often / fewer


def new_rows(distinct: Floats, rows: Floats) -> Floats:
    """Rows that a batch looks up and the batch before, of the same distribution, did not: (n,), by Good and Toulmin.

    Their series is rows looked up once, less twice, plus thrice, ...; within a bin terms cancel but for the first two.
    """
    once, twice = distinct[:, 0], distinct[:, 1]
    return np.clip(once - twice, 0.0, np.maximum(rows - distinct.sum(axis=1), 0.0))


_WINDOWS = np.exp(np.linspace(np.log(1e-6), 0.0, 97))
"""Shares of a batch, at which what is touched and what is missed are known; between them both are interpolated."""


def misses(distinct: Floats, often: Floats, held: Floats) -> Floats:
    """Lookups of each table whose row a cache does not hold: (n,).

    Parameters
    ----------
    distinct, often
        As `reuse` gives them, (n, 17).
    held
        Rows that the cache holds, (n,). At first it holds none.
    """
    gone = (1 - _WINDOWS) ** often[:, :, None]  # of a row, the chance to be in no lookup of a window: (n, 17, windows)
    touched = np.einsum("nb,nbw->nw", distinct, 1 - gone)
    again = np.einsum("nb,nbw->nw", distinct * np.maximum(often - 1, 0), gone)
    at = [np.interp(held[i], touched[i], again[i], right=0.0) for i in range(len(held))]
    missed: Floats = distinct.sum(axis=1) + np.array(at)
    return missed
