"""What lookups in embedding tables take, forward and backward: the interface of all models.

A model describes every table of a frame by parts that add up over the tables of a fused call, and gives microseconds of
such sums. So a search over placements prices tables once, and then adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Protocol

import numpy as np
import polars as pl

from lumos_nb.embedding_tables import Floats, complete_tables
from lumos_nb.errors import InputError, LayoutError, is_whole, items_of, shown


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
    >>> from lumos_nb.costs.embeddings import PhysicalLookup
    >>> model = PhysicalLookup.of_sheet(find_gpu("A100-SXM-80GB"))
    >>> tables = pl.DataFrame({"rows": [10**6, 10**3], "dim": [64, 64], "pooling": [20.0, 20.0]})
    >>> lookup_us(model, tables, 65536, [[0], [1], [0, 1], []])[:, 0].astype(int).tolist()
    [228, 87, 310, 0]
    """
    if isinstance(model, type) or not (hasattr(model, "parts") and hasattr(model, "of_sums")):
        raise InputError(f"the model of lookups is {shown(model)}; give one: PhysicalLookup, LookupNet.")
    parts = model.parts(complete_tables(tables), _checked_batch(batch))
    of_calls = [_positions(number, one, len(parts)) for number, one in enumerate(items_of("sets", sets, _A_SET_EACH))]
    sums = np.stack([parts[one].sum(axis=0) for one in of_calls]) if of_calls else np.zeros((0, parts.shape[1]))
    called = np.array([len(one) > 0 for one in of_calls], dtype=bool)
    return np.where(called[:, None], model.of_sums(sums), 0.0)


_A_SET_EACH = "positions of tables of each call, such as [[0, 1], [2]]"


def _positions(number: int, given: object, tables: int) -> list[int]:
    """Positions of the tables of one call, in a frame of so many."""
    positions = items_of(f"sets[{number}]", given, _A_SET_EACH)
    if not all(is_whole(table, 0, tables - 1) for table in positions):
        raise LayoutError(f"set {number} is {shown(positions)}; there are {tables} tables, counted from 0.")
    return [index(table) for table in positions]


def _checked_batch(batch: int) -> int:
    """The samples of a call, if there are any."""
    if not is_whole(batch, 1):
        raise LayoutError(
            f"a call of {shown(batch)} samples looks up nothing; give the samples a device has, 1 or more."
        )
    return batch
