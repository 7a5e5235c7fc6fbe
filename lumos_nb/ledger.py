"""Predictions saved before the run that tests them, and a ledger of how they came out."""

from __future__ import annotations

import hashlib
import os
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import polars as pl

from lumos_nb._replay_plan import LONGEST_NS
from lumos_nb.display import format_ns, format_share, how_many
from lumos_nb.errors import UNDECODABLE, LumosError, named, require_kinds, require_number, require_text
from lumos_nb.findings import inner_steps, step_spread
from lumos_nb.graph import Recording
from lumos_nb.schema import require
from lumos_nb.traces.run import Run
from lumos_nb.whole_files import whole

_Ns = Annotated[int, msgspec.Meta(ge=0, lt=LONGEST_NS)]
_Share = Annotated[float, msgspec.Meta(ge=0)]
_Moment = Annotated[datetime, msgspec.Meta(tz=True)]

_MOST = 10**18  # above it Python's numbers may be too large to be multiplied
_WALL_CLOCK_NS = 10**18  # September 2001: a trace that begins earlier counts from its machine's start


class Prediction(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="lumos_nb prediction 1"):
    """What a change should make of a run's steps, said before the changed run is made.

    Attributes
    ----------
    change
        What is changed, in words.
    times
        The predicted step as a multiple of the base's.
    predicted_ns
        `times` the median step of the base.
    low_ns, high_ns
        The interval: `times` the shortest and the longest step of the base, wider by the share `model_error` each way.
    coverage
        How often one more step of an unchanged run lies between the shortest and longest of n: (n - 1) / (n + 1).
    null_ns
        What somebody would say who thinks that the change does nothing: the median step of the base.
    base, base_digest, base_steps
        The base: its first file, a hash of the content of all of them, and n, its steps.
    package, made
        Version of lumos_nb, and when the prediction was made (UTC).
    """

    change: str
    times: _Share
    predicted_ns: _Ns
    low_ns: _Ns
    high_ns: _Ns
    coverage: _Share
    model_error: _Share
    null_ns: _Ns
    base: str
    base_digest: str
    base_steps: _Ns
    package: str
    made: _Moment

    @property
    def interval(self) -> str:
        """`low_ns` to `high_ns`, in words."""
        return f"{format_ns(self.low_ns)} to {format_ns(self.high_ns)}"

    def __str__(self) -> str:
        base = f"{how_many(self.base_steps, 'step')} of the base"
        null = f"null {format_ns(self.null_ns)}, from {base}"
        return f"{self.change}: {format_ns(self.predicted_ns)} a step, {self.interval}; {null}"


class Outcome(Prediction, frozen=True, kw_only=True, tag="lumos_nb outcome 1"):
    """A prediction and what was measured; printed, it is a sentence.

    Attributes
    ----------
    measured_ns
        Median step of the run.
    error, null_error
        Predicted and null over measured, less 1.
    within, covered
        Whether `measured_ns` lies in the interval, and the share of the run's steps that do.
    noise
        Median distance of the run's steps from their median, as a share of it; None of one step.
    afterwards
        Whether the run began after the prediction was made; None where its clock does not tell.
    run, run_digest, checked
        The run's first file, a hash of the content of all of them, and when it was checked (UTC).
    """

    measured_ns: _Ns
    error: float
    null_error: float
    within: bool
    covered: float
    noise: float | None
    afterwards: bool | None
    run: str
    run_digest: str
    checked: _Moment

    def __str__(self) -> str:
        late = "" if self.afterwards is not False else " The run is older than the prediction."
        noise = "" if self.noise is None else f"; its steps scatter by {format_share(self.noise)}"
        times = f"predicted {format_ns(self.predicted_ns)}, measured {format_ns(self.measured_ns)}"
        errors = f"an error of {format_share(self.error)} (null {format_share(self.null_error)})"
        return (
            f"{self.change}: {times}, {errors}. "
            f"The run is {'inside' if self.within else 'outside'} the interval of {self.interval}{noise}.{late}"
        )


def save_prediction(
    path: str | Path,
    run: Run,
    *,
    change: str = "the same again",
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
        `times` or `model_error` is not a finite number >= 0, or the file cannot be written.

    Examples
    --------
    >>> change = sweep(repeat(build_graph(run)), [{"comm": 0.5}])["change"][0]
    >>> save_prediction("faster.json", run, change="network twice as fast", times=1 + change).change
    'network twice as fast'
    """
    require(run, "events")
    require_number(0, times=times, model_error=model_error)
    times, model_error = float(times), float(model_error)
    require_text(change=change)
    require_kinds(recording=(recording, Recording | None))
    steps, median_ns, least_ns, most_ns, _ = step_spread(Recording.of(run) if recording is None else recording).row(0)
    if max(times, model_error) > _MOST or times * most_ns * (1 + model_error) >= LONGEST_NS:
        raise LumosError("times and model_error predict steps of over a century: give multiples of the base's steps.")
    prediction = Prediction(
        change=str(change),  # of numpy, it may be of a kind of its own
        times=times,
        predicted_ns=round(times * median_ns),
        low_ns=round(times * least_ns * max(1 - model_error, 0)),
        high_ns=round(times * most_ns * (1 + model_error)),
        coverage=(steps - 1) / (steps + 1),
        model_error=model_error,
        null_ns=round(median_ns),
        base=run.ranks["path"][0],
        base_digest=run_digest(run),
        base_steps=steps,
        package=version("lumos-nb"),
        made=datetime.now(UTC),
    )
    with whole(path) as part:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(prediction)) + b"\n")
    return prediction


def check_prediction(prediction: Prediction | str | Path, run: Run, *, ledger: str | Path | None = None) -> Outcome:
    """Hold a saved prediction against the run that was made to test it.

    Parameters
    ----------
    prediction
        The file that `save_prediction` wrote, or what it returned.
    run
        The changed run.
    ledger
        A file of JSON lines to which the outcome is added.

    Raises
    ------
    LumosError
        The file is no prediction, the run is the one that it was made from, its steps take no time, or the ledger
        cannot be written.

    Examples
    --------
    >>> same = save_prediction("same.json", run)
    >>> check_prediction("same.json", load_run(datasets.path("gpt-ddp-paired")), ledger="ledger.jsonl").afterwards
    False
    """
    require(run, "events")
    said = prediction if isinstance(prediction, Prediction) else load_prediction(prediction)
    first, digest = run.ranks["path"][0], run_digest(run)
    if digest == said.base_digest:
        raise LumosError(f"{first} is the run that the prediction was made from; check it against a run made since.")
    recording = Recording.of(run)
    measured_ns, noise = step_spread(recording).select("median_ns", "noise_share").row(0)
    if measured_ns <= 0:
        raise LumosError(f"the steps of {first} take no time by their trace: there is nothing to check against.")
    steps = inner_steps(recording)["step_ns"]
    began_ns: int = run.ranks["start_ns"].min() or 0  # type: ignore[assignment]
    outcome = Outcome(
        **msgspec.structs.asdict(said),
        measured_ns=round(measured_ns),
        error=said.predicted_ns / measured_ns - 1,
        null_error=said.null_ns / measured_ns - 1,
        within=said.low_ns <= measured_ns <= said.high_ns,
        covered=int(steps.is_between(said.low_ns, said.high_ns).sum()) / len(steps),
        noise=noise,
        afterwards=began_ns > said.made.timestamp() * 1e9 if began_ns > _WALL_CLOCK_NS else None,
        run=first,
        run_digest=digest,
        checked=datetime.now(UTC),
    )
    if ledger is not None:
        try:
            path = named(ledger)
            torn = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")  # it must not spoil this line too
            with path.open("ab") as file:
                file.write(b"\n" * torn + msgspec.json.encode(outcome) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except (OSError, ValueError) as error:
            raise LumosError(f"the ledger cannot be written: {error}.") from error
    return outcome


def load_prediction(path: str | Path) -> Prediction:
    """Read what `save_prediction` wrote; LumosError if the file is anything else."""
    try:
        return msgspec.json.decode(named(path).read_bytes(), type=Prediction)
    except (OSError, ValueError, *UNDECODABLE) as error:
        raise LumosError(f"{path} is no saved prediction: {error}. Give what save_prediction wrote.") from error


def read_ledger(path: str | Path) -> pl.DataFrame:
    """All outcomes of a ledger, in the order in which they were added: a row each, the fields of `Outcome`.

    Raises
    ------
    LumosError
        The file cannot be read, or a line of it is no outcome; the message names the line.

    Examples
    --------
    >>> again = load_run(datasets.path("gpt-ddp-paired"))
    >>> check_prediction(save_prediction("same.json", run), again, ledger="ledger.jsonl")
    >>> read_ledger("ledger.jsonl")["change"].to_list()
    ['the same again']
    """
    decoder, rows, place = msgspec.json.Decoder(Outcome), [], ""
    try:
        for number, line in enumerate(named(path).read_bytes().split(b"\n"), 1):
            place = f" (line {number})"
            if line.strip():
                rows.append(decoder.decode(line))
    except (OSError, ValueError, *UNDECODABLE) as error:
        raise LumosError(f"{path}{place} is no ledger: {error}. Give what check_prediction wrote.") from error
    return pl.DataFrame([msgspec.structs.asdict(row) for row in rows], infer_schema_length=None)


def run_digest(run: Run) -> str:
    """A hash of the content of all files of a run, whatever they are called; LumosError of one that is gone."""
    if run.ranks["path"].null_count():
        raise LumosError("the run was not read of files, so that it cannot be known again: load what load_run reads.")
    digest = hashlib.sha256()
    for path in dict.fromkeys(run.ranks["path"]):
        try:
            with Path(path).open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise LumosError(f"{path}, of which the run was read, cannot be read again: {error}.") from error
    return f"sha256:{digest.hexdigest()}"
