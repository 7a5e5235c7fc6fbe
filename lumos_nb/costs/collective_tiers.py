"""Which fabrics a collective crosses: inside a node the hardware's own, beyond it what `interconnect` names.

Sheets are found by their names and aliases. An alias `interconnect: hardware` holds for this hardware alone, as where
"PCIe" is another generation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.config import Fabric, fabrics, names_of, same_name
from lumos_nb.costs.tables import Table, as_frame, numbers, spelled, words
from lumos_nb.errors import InputError, SchemaError, shown

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


def requests_of(table: Table, known: Collection[str], others: Mapping[str, str]) -> pl.DataFrame:
    """The columns of `REQUEST` and `method` of a collective frame, as numbers and in the spelling of `known`.

    Raises
    ------
    SchemaError, InputError
        As `CollectiveModel.predict`.
    """
    frame = as_frame(table, "collective")
    if missing := [column for column in REQUEST if column not in frame.columns]:
        raise SchemaError(
            f"the collective table lacks column(s) {', '.join(missing)}; it has {', '.join(frame.columns) or 'none'}."
        )
    texts = [words(frame, name, "collective") for name in ("hardware", "interconnect", "collective", "method")]
    asked = numbers(frame, ("nodes", "gpus", "size_bytes"), "collective").with_columns(texts)
    asked = asked.with_columns(spelled(asked["collective"], known, others))
    names = ", ".join(known)
    needs = {
        "collective": (pl.col("collective").is_in(list(known)), f"one of {names}: the one that moves the same bytes"),
        "nodes": (_whole("nodes", 1), "a whole number of 1 or more"),
        "gpus": (_whole("gpus", 2), "a whole number of 2 or more (the ranks of all nodes)"),
        "size_bytes": (pl.col("size_bytes").is_between(0, _LARGEST), "a number of 0 or more, below 2**63"),
    }
    for name, (fits, wanted) in needs.items():
        refuse(~asked.select(fits.fill_null(value=False)).to_series(), asked, name, wanted)
    refuse(asked["gpus"] % asked["nodes"] != 0, asked, "gpus", "as many on each node: nodes must divide it")
    return asked


_LARGEST = 2.0**63 - 1024  # the float before it


def _whole(name: str, least: int) -> pl.Expr:
    return pl.col(name).is_between(least, 2**31) & (pl.col(name) == pl.col(name).floor())


def refuse(bad: pl.Series, asked: pl.DataFrame, name: str, wanted: str) -> None:
    """Raise InputError for the first bad row: its value of `name`, and what it needs."""
    if bad.any():
        row = int(bad.arg_max() or 0)
        given = ", ".join(f"{column}={_text(asked[column][row])}" for column in REQUEST)
        raise InputError(
            f"collective frame, row {row}: {name} is {_text(asked[name][row])}; it needs {wanted}. The row: {given}."
        )


def _text(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, float) else repr(value)


def priceable(table: Table) -> pl.Series:
    """Whether there are sheets for the tiers of each row of a collective frame; what `predict` would refuse else.

    Examples
    --------
    >>> samples = datasets.load("measured-collectives")
    >>> samples.filter(priceable(samples)).height <= samples.height
    True
    """
    frame = as_frame(table, "collective")
    sheets = list(fabrics())
    asked = numbers(frame, ["nodes"], "collective").select(
        *(words(frame, name, "collective") for name in ("hardware", "interconnect")), several=pl.col("nodes") > 1
    )
    first, kind = kinds(*asked.get_columns())
    return pl.Series(
        "priceable", [_has_tiers(row[0], row[1], row[2], sheets) for row in asked[first].rows()], dtype=pl.Boolean
    )[kind]


def _has_tiers(hardware: str | None, interconnect: str | None, several: bool, sheets: list[Fabric]) -> bool:
    try:
        _tiers(hardware, interconnect, several, sheets)
    except InputError:
        return False
    return True


def layout_of(asked: pl.DataFrame, sheets: list[Fabric]) -> Layout:
    """Where the groups of `requests_of` lie, with the first of `sheets` that has a name of theirs.

    Raises
    ------
    InputError
        As `CollectiveModel.predict`.
    """
    n, nodes = asked["gpus"].to_numpy(), asked["nodes"].to_numpy()
    by_tiers = asked.select("hardware", "interconnect", several=pl.col("nodes") > 1)
    first, kind = kinds(*by_tiers.get_columns())
    found = [_tiers(row[0], row[1], row[2], sheets) for row in by_tiers[first].rows()]
    used = tuple(dict.fromkeys(chain.from_iterable(found)))
    near, far = (np.array([used.index(tiers[i]) for tiers in found], dtype=np.int64)[kind] for i in (0, 1))
    reach = np.array([sheet.max_gpus or np.inf for sheet in used])
    most = reach[near]
    beyond = n > reach[far]
    if beyond.any():
        outermost = used[far[beyond.argmax()]]
        joins = f"{outermost.max_gpus} at most, which {outermost.name} joins, or an interconnect that joins more"
        refuse(pl.Series(beyond), asked, "gpus", joins)
    split = (nodes > 1) | (n > most)
    group = np.where(split, np.minimum(n / nodes, most), n)
    return Layout(n, group, n / group, near, far, used)


def _tiers(
    hardware: str | None, interconnect: str | None, several: bool, sheets: list[Fabric]
) -> tuple[Fabric, Fabric]:
    """The sheets inside a node and beyond it: the hardware's own, and what `interconnect` names (for this hardware)."""
    inside = _sheet(hardware, sheets)
    beyond = _sheet(interconnect and f"{interconnect}: {hardware}", sheets) or _sheet(interconnect, sheets)
    if beyond is None or (several and inside is None):
        name, what = (interconnect, "") if beyond is None else (hardware, ", for the tier inside its nodes")
        raise InputError(
            f"no data sheet of a fabric is called {shown(name)}{what}; there are: {', '.join(s.name for s in sheets)}. "
            f"Write one, Fabric(name={name or '...'!r}, source=..., bytes_per_s=..., latency_us=...): extra takes it."
        )
    if inside is None or not (several or (inside.max_gpus or np.inf) < (beyond.max_gpus or np.inf)):
        return beyond, beyond
    return inside, beyond


def _sheet(name: str | None, sheets: list[Fabric]) -> Fabric | None:
    if not name:
        return None
    return next((sheet for sheet in sheets if any(same_name(name, other) for other in names_of(sheet))), None)
