"""Objects that hold tables for other programs: pandas, Parquet, Perfetto."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import polars as pl

from lumos_nb.display import Shown
from lumos_nb.errors import TraceError, folder_for
from lumos_nb.schema import panics_told
from lumos_nb.traces.json_stream import check_unpacked
from lumos_nb.traces.parquet_pages import check_pages
from lumos_nb.traces.perfetto import HasEvents, write_perfetto
from lumos_nb.whole_files import whole_file

if TYPE_CHECKING:
    import pandas as pd


def write_table(table: pl.DataFrame, path: Path) -> None:
    """Write Parquet to just this path: polars would take ~ for the user's home."""
    with whole_file(path, TraceError) as file:
        table.write_parquet(file)


def read_table(path: Path, columns: list[str] | None = None) -> pl.DataFrame:
    """Read Parquet of just this path, or some of its columns: of brackets in it polars would make a pattern.

    Raises
    ------
    TraceError
        It would unpack to more than a file of its size may, or its pages claim what cannot be.
    pl.exceptions.PolarsError, OSError
        It cannot be read.
    """
    with path.open("rb") as file:
        check_pages(path, file)
        return table_in(file, path, columns)


def table_in(file: IO[bytes], path: Path, columns: list[str] | None = None) -> pl.DataFrame:
    """The same of an open file whose checksum was compared: what stands under its name by now may be another."""
    with panics_told():
        rows, width = pl.scan_parquet(file).select(pl.len()).collect().item(), len(pl.read_parquet_schema(file))
        check_unpacked(path, os.fstat(file.fileno()).st_size, 8 * rows * width)
        file.seek(0)
        return pl.read_parquet(file, columns=columns)


class Tables(Shown):
    """What is made of tables that can be handed on; the first is the main one."""

    __slots__ = ()

    def _tables(self) -> dict[str, pl.DataFrame]:
        named: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: table for name, table in named.items() if isinstance(table, pl.DataFrame)}

    def to_pandas(self) -> pd.DataFrame:
        """The main table for pandas, with Arrow's types.

        That is the events of a run, the ops of a graph, a result or an estimate, the layouts of a search, the shards of
        a plan, the coverage of a calibration.
        So nulls stay nulls, and ids and times keep all their digits. Needs `pip install lumos-nb[pandas]`.

        Examples
        --------
        >>> run.to_pandas().groupby("category")["dur_ns"].sum()
        """
        return next(iter(self._tables().values())).to_pandas(use_pyarrow_extension_array=True)

    def to_parquet(self, folder: str | Path) -> Path:
        """Write every table as `<name>.parquet` into a folder, made if it is not there; returns the folder.

        Raises
        ------
        TraceError
            The folder cannot be made, or a file in it not written.

        Examples
        --------
        >>> run.to_parquet("out")  # out/events.parquet, out/ranks.parquet, out/report.parquet
        """
        folder = folder_for(folder, TraceError)
        for name, table in self._tables().items():
            write_table(table, folder / f"{name}.parquet")
        return folder


class OnAClock(Tables):
    """What can be drawn as a timeline besides."""

    __slots__ = ()

    def to_perfetto(self, path: str | Path, *, run: HasEvents | None = None) -> Path:
        """Write a file for ui.perfetto.dev or chrome://tracing: see `write_perfetto`.

        Examples
        --------
        >>> run.to_perfetto("run.json.gz")
        """
        return write_perfetto(self, path, run=run)  # type: ignore[arg-type]
