"""What lookups in embedding tables take, forward and backward: the interface of all models, and the physical one.

A model describes every table of a frame by parts that add up over the tables of a fused call, and gives microseconds of
such sums. So a search over placements prices tables once, and then adds.

`PhysicalLookup` counts cache lines. A batch looks up its rows in random order, so that a row with c lookups comes again
after a share 1/c of the batch, and a cache holds what was touched in the last share t of it, where t is such that this
fills the cache (Che, Tung and Wang, "Hierarchical web caching systems", IEEE JSAC 2002). Both follow from the reuse
factor. On a GPU tables whose samples run at once share the cache, as in Lin et al., "Building a Performance Model for
Deep Learning Recommendation Model Training on GPUs" (HiPC 2022), whose hit rate for uniform indices this generalises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.special import pdtr

from lumos_nb.config import Gpu
from lumos_nb.embedding_tables import BINS, MEAN_LOOKUPS, complete_tables
from lumos_nb.errors import LayoutError
from lumos_nb.number_formats import ELEMENT_BYTES

Floats = NDArray[np.float64]


class LookupModel(Protocol):
    """What prices lookups: `batch` is the samples of one call on one device."""

    def parts(self, tables: pl.DataFrame, batch: int) -> Floats:
        """What adds up over tables: (n, k), a row a table of a complete frame."""
        ...

    def of_sums(self, sums: Floats) -> Floats:
        """Forward and backward (with the optimizer) microseconds of calls on sets of tables, from sums of parts.

        (m, k) -> (m, 2).
        """
        ...


def lookup_us(model: LookupModel, tables: pl.DataFrame, batch: int, sets: Sequence[Sequence[int]]) -> Floats:
    """Forward and backward microseconds of one fused call on each set of tables: (m, 2).

    Parameters
    ----------
    model
        Any with `parts` and `of_sums`.
    tables, batch
        A frame of embedding tables (`complete_tables`), and the samples of a call.
    sets
        Positions of the tables of each call; of an empty set no call is made: zeros.

    Raises
    ------
    LayoutError
        There are no samples, a position is not in the frame, or a table cannot be.

    Examples
    --------
    >>> from lumos_nb.config import find_gpu
    >>> model = PhysicalLookup.of_sheet(find_gpu("A100-SXM-80GB"))
    >>> tables = pl.DataFrame({"rows": [10**6, 10**3], "dim": [64, 64], "pooling": [20.0, 20.0]})
    >>> lookup_us(model, tables, 65536, [[0], [1], [0, 1], []])[:, 0].astype(int).tolist()
    [228, 87, 310, 0]
    """
    sums = summed(model.parts(complete_tables(tables), checked_batch(batch)), sets)
    called = np.array([len(one) > 0 for one in sets], dtype=bool)
    return np.where(called[:, None], model.of_sums(sums), 0.0)


def summed(parts: Floats, sets: Sequence[Sequence[int]]) -> Floats:
    """Sums of parts over the tables of each set: (n, k) -> (m, k)."""
    for number, one in enumerate(sets):
        if any(not 0 <= table < len(parts) for table in one):
            raise LayoutError(f"set {number} is {list(one)}; there are {len(parts)} tables, counted from 0.")
    return np.stack([parts[list(one)].sum(axis=0) for one in sets]) if sets else np.zeros((0, parts.shape[1]))


def checked_batch(batch: int) -> int:
    """The samples of a call, if there are any."""
    if not batch >= 1:
        raise LayoutError(f"a call of {batch} samples looks up nothing; give the samples a device has, 1 or more.")
    return batch


class PhysicalLookup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lookups priced by the cache lines that they move: every kind of traffic costs its own time, and times add up.

    Attributes
    ----------
    name
        Of the device.
    line_bytes
        What a cache loads at once: 32 on a GPU (a sector), 64 on a CPU.
    caches_bytes
        Sizes of the caches, nearest first; lines that one misses count beside those that the one before misses.
    resident_bags
        Samples of all tables that are looked up at once, which decides how many tables share a cache; 1 on a CPU.
    forward_us, backward_us
        Of a call, then of each of `parts_named(caches_bytes)`.

    Examples
    --------
    >>> from lumos_nb.config import find_gpu
    >>> PhysicalLookup.of_sheet(find_gpu("H100-SXM-80GB")).parts(tables, 65536)     # doctest: +SKIP
    """

    name: str
    line_bytes: int
    caches_bytes: tuple[float, ...]
    resident_bags: float = 1.0
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]

    @classmethod
    def of_sheet(cls, gpu: Gpu) -> PhysicalLookup:
        """What holds before any measurement: the sheet's bandwidth, an L2 2.5 times as fast, 5 us for a launch.

        The ratio is between those that Lin et al. measured (1.6 on an A100, 3.5 on a V100), the launch theirs; 45 warps
        a multiprocessor, a sample each, are those of FBGEMM's kernel. A backward pass reads and writes what a forward
        pass reads.
        """
        missed, hit = 1e6 * 32 / gpu.memory_bytes_per_s, 1e6 * 32 / (2.5 * gpu.memory_bytes_per_s)
        forward = (5.0, 0.0, 0.0, 0.0, missed / 32, hit, missed)
        backward = (5.0, 0.0, 0.0, 0.0, missed / 32, 2 * hit, 2 * missed)
        return cls(
            name=gpu.name, line_bytes=32, caches_bytes=(0.9 * gpu.l2_bytes,), resident_bags=45.0 * gpu.cores,
            forward_us=forward, backward_us=backward,
        )  # fmt: skip

    def parts(self, tables: pl.DataFrame, batch: int) -> Floats:
        """Traffic of each table: (n, k), columns as `parts_named` has them."""
        columns = ("rows", "dim", "pooling")
        rows, dim, pooling = (tables[name].cast(pl.Float64).to_numpy() for name in columns)
        row_bytes = dim * tables["dtype"].replace_strict(ELEMENT_BYTES, return_dtype=pl.Float64).to_numpy()
        lookups, lines = batch * pooling, np.ceil(row_bytes / self.line_bytes)
        distinct, often = reuse(tables, batch)
        shared = max(self.resident_bags / batch, 1.0)
        missed = [
            lines * misses(distinct, often, size / shared / (lines * self.line_bytes)) for size in self.caches_bytes
        ]
        streamed = 12 * lookups + 8 * batch + batch * row_bytes  # an index and a weight, an offset, a result
        ones = np.ones(len(rows))
        return np.column_stack([ones, ones * batch, lookups, streamed, lines * lookups, *missed])

    def of_sums(self, sums: Floats) -> Floats:
        """Forward and backward microseconds from sums of parts: (m, k) -> (m, 2)."""
        priced: Floats = np.column_stack([np.ones(len(sums)), sums]) @ np.array([self.forward_us, self.backward_us]).T
        return priced


def parts_named(caches_bytes: Sequence[float]) -> list[str]:
    """Names of the parts of a `PhysicalLookup`."""
    missed = [f"lines beyond cache {level + 1}" for level in range(len(caches_bytes))]
    return ["tables", "samples", "lookups", "streamed bytes", "lines", *missed]


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
