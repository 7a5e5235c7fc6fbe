"""CSV files of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from lumos_nb.errors import LumosError, named

_PACKED = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda", b"\x28\xb5\x2f\xfd")
"""How gzip, zlib and zstd begin: polars would unpack them, to whatever size they claim."""


def read_csv(path: Path, error: type[LumosError]) -> pl.DataFrame:
    """The table of a CSV file with a header; raises `error` of what is none, or is compressed."""
    path = named(path, error)  # no pipe, which would be waited for
    try:
        with path.open("rb") as file:  # of ~, brackets or file: in a path polars would make others
            packed = file.read(4).startswith(_PACKED)
            file.seek(0)
            if not packed:
                return pl.read_csv(file)
    except (OSError, pl.exceptions.PolarsError, UnicodeDecodeError) as why:
        raise error(f"{path} is no table: {why}. Give CSV with a header.") from why
    raise error(f"{path} is compressed. Unpack it first.")


def read_numbers(files: Sequence[Path], columns: Sequence[str], error: type[LumosError]) -> pl.DataFrame:
    """Columns of numbers of several CSV files, one below the other, rows that lack one left out; as `read_csv`."""
    rows = [pl.DataFrame(schema=dict.fromkeys(columns, pl.Float64()))]
    for file in files:
        try:
            rows.append(read_csv(file, error).select(pl.col(columns).cast(pl.Float64)).drop_nulls())
        except (error, pl.exceptions.PolarsError) as why:
            raise error(f"{file} is no table of numbers with the columns {', '.join(columns)}.") from why
        for name, column in zip(columns, rows[-1], strict=True):
            if (endless := column.filter(~column.is_finite())).len():
                raise error(f"{file}: column {name} holds {endless[0]}; give finite numbers.")
    return pl.concat(rows)
