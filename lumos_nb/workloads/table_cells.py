"""The cells of one row of a table: text and numbers as people write them, and what had to be assumed for empty ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import polars as pl

from lumos_nb.errors import InputError
from lumos_nb.workloads.table_words import MISSING, NUMBERS

MOST = 1e12
"""What is beyond it counts nothing that is trained."""


class Reader:
    """The cells of a row, those that had a value, and what was assumed for others."""

    def __init__(self, row: object) -> None:
        self.cells = {str(name): cell for name, cell in _cells(row).items() if _present(cell)}
        self.stated: dict[str, str] = {}
        self.assumptions: list[str] = []

    def has(self, column: str) -> bool:
        """Whether a column has a value."""
        return column in self.cells

    def assume(self, line: str) -> None:
        """Note an assumption, once."""
        if line not in self.assumptions:
            self.assumptions.append(line)

    def refusal(self, column: str, advice: str) -> InputError:
        """The error that names a column, its value and what to do."""
        return InputError(f"column {column} is {self.cells.get(column, 'not stated')!r}; {advice}.")

    def text(self, column: str) -> str:
        """A cell in lower case; "" where there is none."""
        if column in self.cells:
            self.stated[column] = str(self.cells[column]).strip()
        return self.stated.get(column, "").lower()

    def number(self, column: str) -> float | None:
        """A number; None where there is none."""
        if not (text := self.text(column)) or text == "none":
            return None
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            raise self.refusal(column, "give a number") from None
        if not abs(value) <= MOST:
            raise self.refusal(column, f"give a number of at most {MOST:.0e}")
        return value

    def count(self, column: str, default: int | None = None, why: str = "", least: int = 1) -> int:
        """A whole number; `default` where none is stated (for a column that starts at 1, where it is 0)."""
        value = self.number(column)
        if value is None or (value == 0 < least and default is not None):
            if default is None:
                raise self.refusal(column, "the row cannot be read without it: give it")
            self.assume(f"{column} is not stated: {default}{why}")
            return default
        if value != int(value) or value < least:
            raise self.refusal(column, f"give a whole number of at least {least}")
        return int(value)

    def noted(self, what: str) -> float | None:
        """A number of `table_NUMBERS` that the notes give."""
        found = re.search(NUMBERS[what], self.text("notes"))
        return float(next(group for group in reversed(found.groups()) if group)) if found else None


def _cells(row: object) -> Mapping[Any, Any]:
    if isinstance(row, Mapping):
        return row
    if isinstance(row, pl.DataFrame):
        if row.height != 1:
            raise InputError(f"read_row takes one row; it was given a frame of {row.height}. Filter it, or iterate.")
        return row.row(0, named=True)
    to_dict = getattr(row, "to_dict", None)
    if not callable(to_dict) or getattr(row, "ndim", 1) != 1:
        raise InputError(f"read_row takes a mapping of columns or a row of a frame, not a {type(row).__name__}.")
    cells: Mapping[Any, Any] = to_dict()
    return cells


def _present(cell: object) -> bool:
    return cell is not None and str(cell).strip().lower() not in MISSING
