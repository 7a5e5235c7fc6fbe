"""Predictions saved before the run that tests them, and a ledger of how they came out."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl

from lumos_nb.display import format_ns, format_share
from lumos_nb.errors import LumosError
from lumos_nb.findings import step_spread
from lumos_nb.graph import Recording
from lumos_nb.schema import require
from lumos_nb.traces.run import Run

FORMAT = "lumos_nb prediction 1"
_WALL_CLOCK_NS = 1_000_000_000 * 10**9  # September 2001: a trace that starts earlier counts from its machine's start


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a change should make of a run's steps, said before the changed run is made.

    Attributes
    ----------
    change
        What is changed, in words; "none" for the same again.
    times
        The predicted step as a multiple of the base's.
    predicted_ns
        `times` the median step of the base.
    low_ns, high_ns
        The interval: `times` the shortest and the longest step of the base, wider by the share `model_error` each way.
    coverage
        How often one more step of an unchanged run lies between the shortest and longest of as many: (n - 1) / (n + 1).
    null_ns
        What somebody would say who thinks that the change does nothing: the median step of the base.
    base, base_digest, steps
        The base: its first file, a hash of the content of all its files, and how many steps stand behind the figures.
    package, made
        Version of lumos_nb, and when the prediction was made (UTC).
    """

    change: str
    times: float
    predicted_ns: int
    low_ns: int
    high_ns: int
    coverage: float
    model_error: float
    null_ns: int
    base: str
    base_digest: str
    steps: int
    package: str
    made: str

    def __str__(self) -> str:
        interval = f"{format_ns(self.low_ns)} to {format_ns(self.high_ns)}"
        change = "the same again" if self.change == "none" else self.change
        return f"{change}: {format_ns(self.predicted_ns)} a step ({interval}); null {format_ns(self.null_ns)}"

    @classmethod
    def load(cls, path: str | Path) -> Prediction:
        """Read what `save_prediction` wrote; LumosError if the file is anything else."""
        hint = "give the prediction.json that save_prediction or `lumos-nb replay --out` wrote"
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LumosError(f"{path} is no saved prediction: {error}; {hint}.") from error
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise LumosError(f"{path} is no saved prediction of the format {FORMAT!r}; {hint}.")
        kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
        for column in fields(cls):
            value = found.get(column.name)
            if not isinstance(value, kinds[str(column.type)]) or isinstance(value, bool):
                raise LumosError(f"{path}: {column.name} is {value!r}, not of type {column.type}; {hint}.")
        return cls(**{column.name: found[column.name] for column in fields(cls)})


def save_prediction(
    path: str | Path,
    run: Run,
    *,
    change: str = "none",
    times: float = 1.0,
    model_error: float = 0.0,
    recording: Recording | None = None,
) -> Prediction:
    """Write down what a change should make of a run's steps, to be checked once the changed run is made.

    Parameters
    ----------
    path
        The JSON file to write; an existing one is replaced.
    run
        The base.
    change
        What will be changed, in words.
    times
        The predicted step as a multiple of the base's: of any what-if, its step over the unchanged one's.
    model_error
        By which share the interval is wider each way than the base's own scatter: the greatest error of `mechanistic`.
    recording
        The run's, where it is made already.

    Raises
    ------
    LumosError
        `times` or `model_error` is not finite or below 0, or the file cannot be written.

    Examples
    --------
    >>> change = sweep(repeat(build_graph(run)), [{"comm": 0.5}])["change"][0]                     # doctest: +SKIP
    >>> save_prediction("faster.json", run, change="network twice as fast", times=1 + change)      # doctest: +SKIP
    """
    require(run, "events")
    for name, value in {"times": times, "model_error": model_error}.items():
        if not (math.isfinite(value) and value >= 0):
            raise LumosError(f"{name} is {value!r}; give a finite number >= 0.")
    spread = step_spread(recording or Recording.of(run)).row(0, named=True)
    prediction = Prediction(
        change=change,
        times=float(times),
        predicted_ns=round(times * spread["median_ns"]),
        low_ns=round(times * spread["least_ns"] * max(1 - model_error, 0)),
        high_ns=round(times * spread["most_ns"] * (1 + model_error)),
        coverage=(spread["steps"] - 1) / (spread["steps"] + 1),
        model_error=float(model_error),
        null_ns=round(spread["median_ns"]),
        base=str(run.ranks["path"][0]),
        base_digest=run_digest(run),
        steps=spread["steps"],
        package=version("lumos-nb"),
        made=_now(),
    )
    with whole(path) as part:
        part.write_text(json.dumps({"format": FORMAT} | asdict(prediction), indent=2) + "\n", encoding="utf-8")
    return prediction


def _began_after(run: Run, made: str) -> bool | None:
    start_ns = run.ranks["start_ns"].min()
    if not isinstance(start_ns, int) or start_ns < _WALL_CLOCK_NS:
        return None
    return start_ns > datetime.fromisoformat(made).timestamp() * 1e9


CHECKED = {
    "change": pl.String(),
    "measured_ns": pl.Int64(),
    "predicted_ns": pl.Int64(),
    "error": pl.Float64(),
    "null_ns": pl.Int64(),
    "null_error": pl.Float64(),
    "low_ns": pl.Int64(),
    "high_ns": pl.Int64(),
    "within": pl.Boolean(),
    "covered": pl.Float64(),
    "coverage": pl.Float64(),
    "noise": pl.Float64(),
    "steps": pl.Int64(),
    "afterwards": pl.Boolean(),
    "run": pl.String(),
    "run_digest": pl.String(),
    "base": pl.String(),
    "base_digest": pl.String(),
    "package": pl.String(),
    "made": pl.String(),
    "checked": pl.String(),
}
"""A row of the ledger; see `check_prediction`."""


def check_prediction(
    prediction: Prediction | str | Path, run: Run, *, ledger: str | Path | None = None
) -> pl.DataFrame:
    """Hold a saved prediction against the run that was made to test it.

    Parameters
    ----------
    prediction
        The file that `save_prediction` wrote, or what it returned.
    run
        The changed run.
    ledger
        A file of JSON lines to which the outcome is added; `read_ledger` reads it.

    Returns
    -------
    DataFrame
        One row of `CHECKED`: `measured_ns` (median step of the run), `error` and `null_error` (predicted and null over
        measured, less 1), `within` (the measured one lies in the interval), `covered` (share of the run's steps that
        do; `coverage` is the nominal one), `noise` (median distance of the measured steps from their median, as a
        share), `afterwards` (the run began after the prediction was made; null if its clock is not the wall's), and
        what both were made from.

    Raises
    ------
    LumosError
        The file is no prediction, the run is the one that it was made from, its steps take no time, or the ledger
        cannot be written.

    Examples
    --------
    >>> check_prediction("faster.json", load_run("runs/faster"), ledger="ledger.jsonl")  # doctest: +SKIP
    """
    require(run, "events")
    said = prediction if isinstance(prediction, Prediction) else Prediction.load(prediction)
    digest = run_digest(run)
    if digest == said.base_digest:
        raise LumosError(
            f"{run.ranks['path'][0]} is the run that the prediction was made from; check it against a run made since."
        )
    recording = Recording.of(run)
    spread = step_spread(recording).row(0, named=True)
    measured_ns = round(spread["median_ns"])
    if measured_ns <= 0:
        raise LumosError(f"the steps of {run.ranks['path'][0]} take no time by their trace: nothing to check against.")
    times = recording.step_times()
    steps = times.filter(~pl.col("edge")) if spread["steps"] < times.height else times
    row: dict[str, Any] = {
        **{name: value for name, value in asdict(said).items() if name in CHECKED},
        "measured_ns": measured_ns,
        "error": said.predicted_ns / measured_ns - 1,
        "null_error": said.null_ns / measured_ns - 1,
        "within": said.low_ns <= measured_ns <= said.high_ns,
        "covered": float(steps["step_ns"].is_between(said.low_ns, said.high_ns).mean()),  # type: ignore[arg-type]
        "noise": spread["noise_share"],
        "steps": spread["steps"],
        "afterwards": _began_after(run, said.made),
        "run": str(run.ranks["path"][0]),
        "run_digest": digest,
        "checked": _now(),
    }
    row = {name: row[name] for name in CHECKED}
    if ledger is not None:
        try:
            with Path(ledger).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise LumosError(f"the ledger cannot be written: {error}.") from error
    return pl.DataFrame([row], schema=CHECKED)


def read_ledger(path: str | Path) -> pl.DataFrame:
    """All outcomes of a ledger, in the order in which they were added: rows of `CHECKED`.

    Raises
    ------
    LumosError
        The file cannot be read, or a line of it is none of `check_prediction`'s.

    Examples
    --------
    >>> read_ledger("ledger.jsonl").select("change", "error", "null_error", "within")  # doctest: +SKIP
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise LumosError(f"{path} is no ledger: {error}.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append(pl.DataFrame([{name: row[name] for name in CHECKED}], schema=CHECKED))
        except (ValueError, TypeError, KeyError, pl.exceptions.PolarsError) as error:
            raise LumosError(f"{path}, line {number} is no outcome of a check ({error!r}): take it out.") from error
    return pl.concat([pl.DataFrame(schema=CHECKED), *rows])


def verdict(outcome: pl.DataFrame) -> str:
    """One row of `CHECKED` as a sentence.

    Examples
    --------
    >>> print(verdict(check_prediction("faster.json", run)))  # doctest: +SKIP
    """
    row = outcome.row(0, named=True)
    inside = "inside" if row["within"] else "outside"
    noise = f"; measured steps scatter by {format_share(row['noise'])}" if row["noise"] is not None else ""
    return (
        f"predicted {format_ns(row['predicted_ns'])}, measured {format_ns(row['measured_ns'])}: an error of "
        f"{format_share(row['error'])} (null {format_share(row['null_error'])}), {inside} the interval of "
        f"{format_ns(row['low_ns'])} to {format_ns(row['high_ns'])}{noise}."
    )


def run_digest(run: Run) -> str:
    """A hash of the content of all files of a run, whatever they are called.

    Raises
    ------
    LumosError
        A file is no longer there.
    """
    digest = hashlib.sha256()
    for path in run.ranks["path"]:
        try:
            with Path(path).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise LumosError(f"{path}, of which the run was read, cannot be read again: {error}.") from error
    return f"sha256:{digest.hexdigest()}"


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """A path to write to that takes the place of `path` in the end: so there is all of the file or none of it.

    Raises
    ------
    LumosError
        The file cannot be written.
    """
    path = Path(path)
    part = path.with_name(f".part-{os.getpid()}-{path.name}")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise LumosError(f"{path} cannot be written: {error}. Give a file in a folder that is there.") from error
    finally:
        part.unlink(missing_ok=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
