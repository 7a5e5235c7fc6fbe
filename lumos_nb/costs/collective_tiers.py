"""Which fabrics a collective crosses: inside a node the hardware's own, beyond it what `interconnect` names.

Sheets are found by their names and aliases. An alias `interconnect: hardware` holds for this hardware alone, as where
"PCIe" is another generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.config import Fabric, fabrics, names_of, same_name
from lumos_nb.errors import InputError, SchemaError

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

REQUEST = ("hardware", "interconnect", "nodes", "gpus", "collective", "size_bytes")
"""Columns of a request. `interconnect` is the outermost tier that a group uses; `hardware` names its node's fabric.
`size_bytes` as in nccl-tests: an all-gather's whole output, a reduce-scatter's whole input, one rank's whole send
buffer of an all-to-all."""


class Layout(NamedTuple):
    """Where each row's group lies, and the sheets of its two tiers; one tier alone is `near`, with `nodes` of 1."""

    n: Floats
    g: Floats
    nodes: Floats
    near: Rows  # positions in `sheets`
    far: Rows
    sheets: tuple[Fabric, ...]

    def take(self, rows: Rows) -> Layout:
        """The same for some rows."""
        return Layout(self.n[rows], self.g[rows], self.nodes[rows], self.near[rows], self.far[rows], self.sheets)

    def tiers(self) -> tuple[list[str], Rows]:
        """Names of the tiers that rows use, and which of them each row does."""
        code = np.where(self.nodes > 1, self.far + 1, 0) + self.near * (len(self.sheets) + 1)
        used, of_row = np.unique(code, return_inverse=True)
        pairs = [divmod(int(one), len(self.sheets) + 1) for one in used]
        names = [self.sheets[near].name + (f" + {self.sheets[far - 1].name}" if far else "") for near, far in pairs]
        return names, of_row


def kinds(*columns: pl.Series) -> tuple[Rows, Rows]:
    """The row where each distinct combination of values first stands, in that order, and which of them each row has."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        value = column.cast(pl.String).cast(pl.Categorical).to_physical().cast(pl.Int64).fill_null(-1).to_numpy() + 1
        if code.max(initial=0) >= 2**31:  # so that no product overflows
            code = np.unique(code, return_inverse=True)[1]
        code = code * (value.max(initial=0) + 1) + value
    _, first, kind = np.unique(code, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[kind]


def priceable(frame: pl.DataFrame, extra: Iterable[Fabric] = ()) -> pl.Series:
    """Whether there are sheets for the tiers of each row of a collective frame; what `predict` would refuse else.

    Examples
    --------
    >>> samples = samples.filter(priceable(samples))                                         # doctest: +SKIP
    """
    sheets = [*extra, *fabrics()]
    asked = frame.select("hardware", "interconnect", several=pl.col("nodes") > 1)
    first, kind = kinds(*asked.get_columns())
    return pl.Series(
        "priceable", [_has_tiers(row[0], row[1], row[2], sheets) for row in asked[first].rows()], dtype=pl.Boolean
    )[kind]


def _has_tiers(hardware: str, interconnect: str, several: bool, sheets: list[Fabric]) -> bool:
    try:
        _tiers(hardware, interconnect, several, sheets)
    except InputError:
        return False
    return True


def layout_of(frame: pl.DataFrame, sheets: list[Fabric]) -> Layout:
    """Where the groups of a collective frame lie, with the first of `sheets` that has a name of theirs.

    Raises
    ------
    SchemaError, InputError
        As `CollectiveModel.predict`.
    """
    if missing := [column for column in REQUEST if column not in frame.columns]:
        raise SchemaError(
            f"the collective table lacks column(s) {', '.join(missing)}; it has {', '.join(frame.columns) or 'none'}."
        )
    n, nodes = (frame[column].cast(pl.Float64).to_numpy() for column in ("gpus", "nodes"))
    _refuse(
        ~((n >= 2) & (nodes >= 1) & (n % np.where(nodes >= 1, nodes, 1) == 0)),
        frame,
        "of two GPUs or more a node count divides",
    )
    _refuse(~(frame["size_bytes"].cast(pl.Float64).to_numpy() >= 0), frame, "with size_bytes of 0 or more")
    asked = frame.select("hardware", "interconnect", several=pl.col("nodes") > 1)
    first, kind = kinds(*asked.get_columns())
    found = [_tiers(row[0], row[1], row[2], sheets) for row in asked[first].rows()]
    used = tuple(dict.fromkeys(chain.from_iterable(found)))
    near, far = (np.array([used.index(tiers[i]) for tiers in found], dtype=np.int64)[kind] for i in (0, 1))
    most = np.array([sheet.max_gpus or np.inf for sheet in used])[near]
    split = (nodes > 1) | (n > most)
    _refuse(split & (nodes == 1) & (near == far), frame, "that one node's fabric joins (max_gpus of its sheet)")
    group = np.where(split, np.minimum(n / nodes, most), n)
    return Layout(n, group, n / group, near, far, used)


def _refuse(bad: NDArray[np.bool_], frame: pl.DataFrame, wanted: str) -> None:
    if bad.any():
        row = int(bad.argmax())
        given = ", ".join(f"{name}={value!r}" for name, value in frame.select(REQUEST).row(row, named=True).items())
        raise InputError(f"collective frame, row {row}: no group {wanted}: {given}. Correct the row or leave it out.")


def _tiers(hardware: str, interconnect: str, several: bool, sheets: list[Fabric]) -> tuple[Fabric, Fabric]:
    """The sheets inside a node and beyond it: the hardware's own, and what `interconnect` names (for this hardware)."""
    inside = _sheet(hardware, sheets)
    beyond = _sheet(f"{interconnect}: {hardware}", sheets) or _sheet(interconnect, sheets)
    if beyond is None or (several and inside is None):
        name, what = (interconnect, "") if beyond is None else (hardware, ", for the tier inside its nodes")
        raise InputError(
            f"no data sheet of a fabric is called {name!r}{what}; there are: {', '.join(s.name for s in sheets)}. "
            f"Write one, Fabric(name={name!r}, source=..., bytes_per_s=..., latency_us=...), and pass it as extra."
        )
    if inside is None or not (several or (inside.max_gpus or np.inf) < (beyond.max_gpus or np.inf)):
        return beyond, beyond
    return inside, beyond


def _sheet(name: str | None, sheets: list[Fabric]) -> Fabric | None:
    return next((sheet for sheet in sheets if any(same_name(str(name), other) for other in names_of(sheet))), None)
