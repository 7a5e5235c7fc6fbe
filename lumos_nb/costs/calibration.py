"""A calibration: what prices one GPU's work, in one readable JSON file, with how far each part is to be trusted.

What was measured on the GPU itself is fitted on its own samples; what was measured on other GPUs only is fitted on
those and *transferred* by the data sheets; what nobody measured is priced by the *data sheet* and the constants that
hold before any sample. Every interval comes from samples that the fit had not seen: whole groups of shapes of this GPU,
whole GPUs for what is transferred, and all measured kernels for what is priced by the sheet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal, Self

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb import datasets
from lumos_nb.config import Gpu, find_gpu, names_of, same_name
from lumos_nb.costs.collectives import CollectiveModel
from lumos_nb.costs.heldout import Score
from lumos_nb.costs.host import Overheads
from lumos_nb.costs.intervals import Band
from lumos_nb.costs.kernels import KernelModel, difficulty, prior_cell, prior_model
from lumos_nb.costs.tables import Table, as_frame, words
from lumos_nb.costs.work import joined, text_of, work_of
from lumos_nb.errors import UNDECODABLE, CalibrationError, InputError, LumosError, named, shown
from lumos_nb.traces.export import Tables
from lumos_nb.whole_files import whole

VERSION = 1
"""Of the file's layout. A file of another version is refused: numbers under old names are worse than none."""

GENERIC = "generic"
"""Name of the calibration that was fitted on all GPUs together; it prices a GPU that has a sheet and no samples."""

Basis = Literal["measured", "transferred", "data sheet"]

REGION = ("work_batch", "work_m", "work_n", "work_k", "bytes")
"""Columns of `with_work` whose least and greatest value say where a class was measured."""


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows that something was fitted on; `sha256` is that of their values, as `digest` makes it."""

    source: str
    licence: str
    gpu: str
    rows: int
    sha256: str


class Covered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One class of kernels: which cell prices it, on what basis, and over which sizes that was measured."""

    cell: str
    passes: str
    basis: Basis
    rows: int = 0
    region: dict[str, tuple[float, float]] = {}


class Calibration(Tables, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of one GPU and of collectives over any fabric with a sheet. `load_calibration` reads one.

    Attributes
    ----------
    gpu
        The data sheet that all kernel constants are relative to.
    kernels
        The fitted cells; each has the band of its own held-out groups.
    covered
        The coverage matrix: a row for every class of kernels.
    bands
        Intervals of what a cell was not measured for, by basis.
    held_out
        Errors of every cell on groups that its fit had not seen.
    sources
        What was fitted on.
    collectives, overheads
        Costs of collectives and of the host, where they were measured.
    """

    _most_rows: ClassVar[int] = 60

    version: int
    name: str
    gpu: Gpu
    kernels: KernelModel
    covered: tuple[Covered, ...]
    bands: dict[str, Band]
    held_out: tuple[Score, ...]
    sources: tuple[Source, ...]
    collectives: CollectiveModel | None = None
    overheads: Overheads | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no fit gives: they would price silently wrong."""
        if wrong := next(_impossible(self), None):
            raise CalibrationError(
                f"calibration {self.name}: {wrong}. It was damaged or edited; fit or fetch it again."
            )

    def predict_kernels(self, table: Table) -> pl.DataFrame:
        """Price kernels on this GPU.

        Parameters
        ----------
        table
            A kernel frame: `op`, `dtype`, sizes (see `lumos_nb.costs.work`), or an op table with requests
            (`lumos_nb.costs.samples.with_requests`). polars, pandas, a mapping of columns or a list of rows. A column
            `gpu` names this GPU or nothing.

        Returns
        -------
        frame
            The same rows and `cell`, `floor_us` (the roofline), `dur_us`, `low_us` and `high_us` (nominal 90 %),
            `basis` ("measured", "transferred" or "data sheet") and `out_of_range`: a size outside what was measured.

        Raises
        ------
        InputError
            A row is of another GPU, has an unknown op, or lacks a size.
        CalibrationError
            Nothing prices a row; the message says what to measure.

        Examples
        --------
        >>> cal = load_calibration("H100-SXM-80GB")
        >>> rows = pl.DataFrame({"op": "gemm", "dtype": "bf16", "pass": "fwd", "m": [4096], "n": [4096], "k": [4096]})
        >>> cal.predict_kernels(rows)["basis"].to_list()
        ['measured']
        """
        frame = as_frame(table, "kernel")
        self._check_gpu(frame)
        work = work_of(frame)
        priced = self._completed(work.kinds).predict(frame, self.gpu, work=work)
        known = {(c.cell, "any"): i for i, c in reversed([*enumerate(self.covered)])}  # no pass said: one that it has
        known |= {(c.cell, c.passes): i for i, c in enumerate(self.covered)}
        kinds = priced.select("cell", passes=pass_of(frame))
        pairs = kinds.unique()
        none = len(self.covered)
        pairs = pairs.with_columns(number=pl.Series([known.get(pair, none) for pair in pairs.rows()], dtype=pl.Int64))
        number = kinds.join(pairs, on=["cell", "passes"], how="left", maintain_order="left")["number"].to_numpy()
        return self._stated(priced, joined(frame, work), number)

    def _completed(self, kinds: pl.DataFrame) -> KernelModel:
        """The cells, and one at its priors for every family and format of some rows that has none."""
        there = {(cell.family, cell.format) for cell in self.kernels.cells}
        asked = [kind for kind in kinds.select("family", "format").unique().rows() if kind not in there]
        return KernelModel(cells=(*self.kernels.cells, *prior_model(asked).cells))

    def _stated(self, priced: pl.DataFrame, work: pl.DataFrame, number: NDArray[np.int64]) -> pl.DataFrame:
        """Basis, range and interval; `number` is a row's place in `covered`, or the one behind its end for none.

        What a fitted cell was not measured for (another pass) has the interval of what is transferred.
        """
        fitted = priced["cell"].is_in([cell.key for cell in self.kernels.cells])
        bases = pl.Series([*(c.basis for c in self.covered), "transferred"]).gather(number)
        basis = pl.select(pl.when(fitted).then(bases).otherwise(pl.lit("data sheet")).alias("basis"))["basis"]
        outside = np.zeros(priced.height, dtype=bool)
        for column in REGION:
            least, most = np.array([*(c.region[column] for c in self.covered), (np.inf, -np.inf)])[number].T
            values = work[column].to_numpy()
            outside |= (values < least * (1 - 1e-9)) | (values > most * (1 + 1e-9))
        time, low, high = (priced[name].to_numpy().copy() for name in ("dur_us", "low_us", "high_us"))
        hard = difficulty(time, priced["floor_us"].to_numpy(), *work["flops", "bytes"].to_numpy().T)
        loose = np.isnan(low) | (number == len(self.covered))
        for name in basis.filter(pl.Series(loose)).unique():
            at = loose & (basis == name).to_numpy()
            band = self.bands.get(name, self.bands["transferred"])  # measured on one group alone: nothing was left out
            low[at], high[at] = band.around(time[at], hard[at])
        ends = (pl.Series("low_us", low), pl.Series("high_us", high))
        return priced.with_columns(*ends, basis, pl.Series("out_of_range", outside))

    def _check_gpu(self, frame: pl.DataFrame) -> None:
        if "gpu" not in frame.columns:
            return
        names = words(frame, "gpu", "kernel")
        for name in names.unique(maintain_order=True).drop_nulls():
            if not any(same_name(name, other) for other in names_of(self.gpu)):
                raise InputError(
                    f"kernel frame, row {names.index_of(name)}: gpu is {shown(name)}, but this calibration is of "
                    f"{self.gpu.name}. Price these rows with load_calibration({shown(name)}), or drop the column to "
                    "price them here."
                )

    def predict_collectives(self, table: Table) -> pl.DataFrame:
        """Price collectives over the fabrics that their rows name; see `CollectiveModel.predict`.

        Raises
        ------
        CalibrationError
            This calibration has no collectives: measure some (nccl-tests, or `make calibrate`).
        """
        if self.collectives is None:
            raise CalibrationError(
                f"the calibration {self.name} has no collectives; measure a size sweep of each (nccl-tests, or make "
                "calibrate)."
            )
        return self.collectives.predict(table)

    def coverage(self) -> pl.DataFrame:
        """The coverage matrix: `gpu`, `cell`, `passes`, `basis`, `rows`, and the held-out error of the cell."""
        rows = [(self.name, c.cell, c.passes, c.basis, c.rows) for c in self.covered]
        table = pl.DataFrame(rows, schema=["gpu", "cell", "passes", "basis", "rows"], orient="row")
        scores = pl.DataFrame(
            [(s.cell, s.left_out, s.median, s.mean, s.coverage, s.width) for s in self.held_out],
            schema={"cell": pl.String, "left_out": pl.String}
            | dict.fromkeys(("median_error", "mean_error", "coverage", "width"), pl.Float64),
            orient="row",
        )
        return table.join(scores, on="cell", how="left", maintain_order="left")

    def for_gpu(self, gpu: Gpu) -> Self:
        """The same cells on another GPU, by its data sheet: whatever was measured becomes *transferred*.

        Examples
        --------
        >>> mine = msgspec.structs.replace(find_gpu("L40S"), name="my L40S")
        >>> load_calibration("generic").for_gpu(mine).coverage()["basis"].unique().to_list()
        ['transferred']
        """
        if not isinstance(gpu, Gpu):
            raise InputError(f"for_gpu takes a data sheet, Gpu(...) or find_gpu(name); it was given {shown(gpu)}.")
        if gpu == self.gpu and self.name != GENERIC:
            return self
        covered = tuple(
            msgspec.structs.replace(c, basis="transferred") if c.basis == "measured" else c for c in self.covered
        )
        return msgspec.structs.replace(self, name=gpu.name, gpu=gpu, covered=covered)

    def save(self, path: str | Path) -> Path:
        """Write the calibration as JSON, to a file that ends in .json; `load_calibration` reads it.

        Raises
        ------
        InputError
            The file has another ending, or cannot be written.
        """
        file = _file(path)
        if file.suffix != ".json":
            raise InputError(f"{file}: save to a file that ends in .json, which load_calibration then takes for one.")
        with whole(file, InputError) as part:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        return file

    def _tables(self) -> dict[str, pl.DataFrame]:
        return {"coverage": self.coverage(), "sources": pl.DataFrame(msgspec.to_builtins(self.sources))}

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._caption(), self.coverage())]

    def _caption(self) -> str:
        measured = sum(c.basis == "measured" for c in self.covered)
        return f"Calibration of {self.name}: {measured} of {len(self.covered)} classes measured"


def pass_of(frame: pl.DataFrame) -> pl.Series:
    """The pass of every row of a kernel frame; "any" where none is said."""
    return text_of(frame, "pass").alias("passes")


def calibrations() -> dict[str, Path]:
    """The bundled calibrations: name -> file."""
    return {file.stem: file for file in sorted((datasets.root() / "calibrations").glob("*.json"))}


def load_calibration(name: str | Path) -> Calibration:
    """The calibration of a GPU by the name of its data sheet (or an alias), or one from a file.

    A GPU of which no samples are bundled has the generic calibration by its sheet: everything is *transferred*.

    Raises
    ------
    CalibrationError
        No data sheet has the name, or the file is of another version or damaged; the message names what is wrong.

    Examples
    --------
    >>> load_calibration("a100").gpu.name
    'A100-SXM-80GB'
    """
    file = _file(name)
    return _read(file) if file.suffix == ".json" else _bundled(str(name))


def _read(file: Path) -> Calibration:
    try:
        data = file.read_bytes()
        version = msgspec.json.decode(data, type=_Header).version
        if version != VERSION:
            raise CalibrationError(f"{file}: version {version}, but this package reads {VERSION}; fit it again.")
        return msgspec.json.decode(data, type=Calibration)
    except (OSError, *UNDECODABLE, LumosError) as error:
        if isinstance(error, CalibrationError) and str(error).startswith(f"{file}: "):
            raise
        raise CalibrationError(f"{file}: not a calibration: {error}") from error


class _Header(msgspec.Struct):
    version: int


def _file(path: object) -> Path:
    if not isinstance(path, str | Path) or "\0" in str(path):
        raise InputError(f"{shown(path)} names no calibration: give the name of a GPU, or the path of a .json file.")
    return named(Path(path).expanduser(), CalibrationError)


def _bundled(name: str) -> Calibration:
    there = calibrations()
    for known, file in there.items():
        if same_name(known, name):
            return _read(file)
    try:
        sheet = find_gpu(name)
    except InputError as error:
        raise CalibrationError(
            f"no calibration is called {shown(name)}; there are: {', '.join(there)}. {error} Then "
            f'load_calibration("{GENERIC}").for_gpu(sheet) prices by it; calibrate(run) and make calibrate measure.'
        ) from error
    return _read(there[sheet.name]) if sheet.name in there else _read(there[GENERIC]).for_gpu(sheet)


def _impossible(calibration: Calibration) -> Iterator[str]:
    """What of a calibration no fit gives, in words."""
    for cell in calibration.kernels.cells:
        prior = prior_cell(cell.family, cell.format, cell.implementation)
        for what in ("constants", "tiles", "bends"):
            if (has := set(getattr(cell, what))) != (due := set(getattr(prior, what))):
                yield f"cell {cell.key!r} has other {what} than this version: {', '.join(sorted(has ^ due))}"
        for name, value in (cell.constants | cell.tiles).items():
            if not 1 / _FAR < value < _FAR:
                yield f"{name} of cell {cell.key!r} is {value}"
        for name, value in (cell.bends | cell.levels).items():
            if not abs(value) < np.log(_FAR):
                yield f"{name} of cell {cell.key!r} is {value}"
    collectives = calibration.collectives
    for link in (collectives.shared, *collectives.links.values()) if collectives else ():
        for name, value in msgspec.structs.asdict(link).items():
            if not 1 / _FAR < value < _FAR:
                yield f"{name} of a fabric is {value}"
    of_cells = ((f"cell {cell.key!r}", cell.band) for cell in calibration.kernels.cells if cell.band)
    for name, band in (*calibration.bands.items(), *of_cells, *(collectives.bands.items() if collectives else ())):
        ends = (band.centres, band.low, band.high)
        if not 0 < len(band.centres) == len(band.low) == len(band.high) or list(band.centres) != sorted(band.centres):
            yield f"the interval of {name} has {', '.join(str(len(end)) for end in ends)} numbers, or not in order"
        elif not all(-_WIDE < low <= high < _WIDE for low, high in zip(band.low, band.high, strict=True)):
            yield f"the interval of {name} has a lower end above the upper one, or none"
    if missing := {"transferred", "data sheet"} - set(calibration.bands):
        yield f"there is no interval for what is {' or '.join(sorted(missing))}"
    for covered in calibration.covered:
        if missing := set(REGION) - set(covered.region):
            yield f"the region of {covered.cell} lacks {', '.join(sorted(missing))}"


_FAR = 1e15
"""A constant further from 1 than this is damage, not a fit."""
_WIDE = 20.0
"""So is an end of an interval as many times off, in log."""


def digest(rows: pl.DataFrame) -> str:
    """sha256 of a table's values, whatever order its rows are in."""
    return hashlib.sha256(np.sort(rows.hash_rows().to_numpy()).tobytes()).hexdigest()
