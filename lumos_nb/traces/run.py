"""A folder of rank files, or one file, as one run."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from lumos_nb.display import html_table, text_table
from lumos_nb.errors import RunError, UnsupportedFormat
from lumos_nb.schema import EVENTS
from lumos_nb.traces import cache as cached
from lumos_nb.traces.formats import read_trace
from lumos_nb.traces.kineto import rank_of, world_size_of
from lumos_nb.traces.trace import NOTES, Trace

SUFFIXES = (".json", ".json.gz")
"""Files of a folder that are taken for traces; the others are named in the report."""

RANK_PATTERNS = (re.compile(r"(?i)(?<![a-z])(?:rank|worker)[-_. ]?(\d+)"),)
"""What a file's name says about its rank, first match first."""

RANKS = {
    "rank": pl.Int32(),
    "path": pl.String(),
    "rank_source": pl.String(),
    "world_size": pl.Int32(),
    "events": pl.Int64(),
    "kept": pl.Int64(),
    "dropped": pl.Int64(),
    "start_ns": pl.Int64(),
    "end_ns": pl.Int64(),
    "devices": pl.List(pl.Int32()),
    "bytes": pl.Int64(),
}
REPORT = {"rank": pl.Int32(), "path": pl.String(), "what": pl.String(), "count": pl.Int64(), "reason": pl.String()}


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The events of all ranks of a run, and what was read to get them.

    Attributes
    ----------
    events
        `schema.EVENTS` of all ranks, rank after rank, each in its file's order.
    ranks
        One row a rank: `rank`, `path`, `rank_source` ("distributedInfo", "file name" or "order"), `world_size` (null if
        the file does not say), `events` in the file, `kept` and `dropped` of them, `start_ns` and `end_ns` of the kept
        ones, `devices` that they ran on, `bytes` of the file.
    report
        Columns `rank`, `path`, `what`, `count`, `reason`: every event and file that was not read, and every assumption.
    metadata
        Rank -> the top-level keys of its file besides the events: `distributedInfo`, `deviceProperties`, ...
    """

    events: pl.DataFrame
    ranks: pl.DataFrame
    report: pl.DataFrame
    metadata: dict[int, dict[str, Any]]

    def _title(self) -> str:
        kept, dropped = self.ranks["kept"].sum(), self.ranks["dropped"].sum()
        n = len(self.ranks)
        return f"Run of {n} rank{'s' if n > 1 else ''}: {kept:,} events, {dropped:,} dropped (see .report)"

    def _overview(self) -> pl.DataFrame:
        start = self.ranks["start_ns"].min()
        return self.ranks.select(
            "rank",
            pl.col("path").str.split("/").list.last().alias("file"),
            "rank_source",
            "kept",
            "dropped",
            (pl.col("start_ns") - start).alias("start_ns"),
            (pl.col("end_ns") - pl.col("start_ns")).alias("length_ns"),
            "devices",
            "bytes",
        )

    def __repr__(self) -> str:
        return text_table(self._overview(), caption=self._title())

    def _repr_html_(self) -> str:
        return html_table(self._overview(), caption=self._title())


def load_run(path: str | Path, *, executor: Executor | None = None, cache: bool = True) -> Run:
    """Read a folder of Kineto traces, one file a rank, or one file, as one run.

    Parameters
    ----------
    path
        A folder, whose `*.json` and `*.json.gz` files are taken (not those of its sub-folders), or one file.
    executor
        Reads the files in parallel; None reads them one after the other in this process. A pool of processes must not
        fork: give `ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"))`.
    cache
        Keep what was parsed as Parquet, by content, and use it next time: in the folder that the environment variable
        `LUMOS_NB_CACHE` names, else beside the files where that folder is the user's own, else in the user's cache.

    Returns
    -------
    Run
        Events of all ranks; `report` says what was not read and why.

    Raises
    ------
    RunError
        There is no such path, no trace in it, two files claim one rank or speak of jobs of different sizes, a file
        cannot be opened, or the executor forks.
    TraceError
        A file is damaged beyond use. Files of other formats are no error beside traces; the report names them.

    Examples
    --------
    >>> run = load_run("runs/gpt-pp8")  # doctest: +SKIP
    >>> run.report  # doctest: +SKIP
    """
    path = Path(path)
    _refuse_forks(executor)
    parsed: list[tuple[Path, Trace]] = []
    try:
        files, others = _files(path)
        read = partial(_read, cache=cache, by_path=executor is not None, strict=path.is_file())
        for file, outcome in zip(files, executor.map(read, files) if executor else map(read, files), strict=True):
            if isinstance(outcome, str):
                others.append((file, outcome))
            else:
                parsed.append((file, _loaded(file, outcome) if isinstance(outcome, Path) else outcome))
    except OSError as error:  # no right to read, a name that is too long, a disk that fails
        raise RunError(f"{path} cannot be read: {error}. Put that right, or leave the file out.") from error
    if not parsed:
        named = "; ".join(f"{file.name}: {why}" for file, why in others[:3])
        named = named or ("it holds folders only, which are not read" if any(path.iterdir()) else "it is empty")
        raise RunError(
            f"{path} holds no Kineto trace ({named}). Give a folder of *.json or *.json.gz traces, or one file."
        )
    return _run(_numbered(parsed), others)


def _refuse_forks(executor: Executor | None) -> None:
    """Raise for a pool whose workers are forks: polars' threads are not there in a fork, which waits for them for ever.

    It is what ProcessPoolExecutor does by default on Linux before Python 3.14.
    """
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise RunError(
            "the executor forks this process, and polars hangs in a fork; give "
            'ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")), or threads.'
        )


def _files(path: Path) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Files that may be traces, in the order of the numbers in their names, and the others with the reason."""
    if path.is_file():
        return [path], []
    if not path.is_dir():
        raise RunError(f"{path} does not exist: give a folder of traces, or one file.")
    entries = sorted(path.iterdir(), key=lambda entry: _natural(entry.name))
    files = [entry for entry in entries if entry.is_file()]
    traces = [file for file in files if file.name.endswith(SUFFIXES) and not file.name.startswith(".")]
    reason = f"its name does not end in {' or '.join(SUFFIXES)}, or it is hidden"
    return traces, [(file, reason) for file in files if file not in traces]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts rank-2 before rank-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _read(path: Path, *, cache: bool, by_path: bool, strict: bool) -> Trace | Path | str:
    """One rank's file: its parse, or the file of the cache that holds it, or why it is no trace.

    A worker process answers `by_path` where it can: a table need not be sent then.
    """
    target = cached.cache_path(path) if cache else None
    if target and target.exists():
        return target
    try:
        parsed = _parsed(path, target)
    except UnsupportedFormat as error:
        if strict:
            raise
        return str(error)
    return target if target and by_path and target.exists() else parsed


def _parsed(path: Path, target: Path | None, *notes: tuple[str, int, str]) -> Trace:
    """Read `path` and keep the parse at `target`."""
    parsed = read_trace(path)
    if target:
        try:
            cached.store(parsed, target)
        except OSError as error:
            notes += (("cache", 1, f"not written: {error}"),)
    return parsed._replace(notes=parsed.notes.extend(pl.DataFrame(list(notes), schema=NOTES, orient="row")))


def _loaded(path: Path, target: Path) -> Trace:
    """The parse kept at `target`; a damaged one is made anew."""
    try:
        return cached.load(target)
    except (OSError, ValueError) as error:
        return _parsed(path, target, ("cache", 1, f"read again: {error}"))


def _numbered(parsed: list[tuple[Path, Trace]]) -> list[tuple[int, str, Path, Trace]]:
    """(rank, where it comes from, path, parse), by rank; no rank twice."""
    found: dict[int, tuple[int, str, Path, Trace]] = {}
    nameless: list[tuple[Path, Trace]] = []
    for path, kineto in parsed:
        rank, source = rank_of(kineto.metadata), "distributedInfo"
        if rank is None:
            rank, source = _rank_in_name(path.name), "file name"
        if rank is None:
            nameless.append((path, kineto))
        elif rank in found:
            _, other_source, other, _ = found[rank]
            raise RunError(
                f"{other} ({other_source}) and {path} ({source}) both claim rank {rank}: "
                "a run has one file a rank, so move one of them out of the folder."
            )
        else:
            found[rank] = (rank, source, path, kineto)
    free = (rank for rank in itertools.count() if rank not in found)
    ordered = [(rank, "order", path, kineto) for rank, (path, kineto) in zip(free, nameless, strict=False)]
    return sorted([*found.values(), *ordered], key=lambda row: row[0])


def _rank_in_name(name: str) -> int | None:
    matches = (pattern.search(name) for pattern in RANK_PATTERNS)
    rank = next((int(match.group(1)) for match in matches if match), None)
    return rank if rank is not None and rank < 2**31 else None


def _run(ranks: list[tuple[int, str, Path, Trace]], others: list[tuple[Path, str]]) -> Run:
    report: list[tuple[int | None, str | None, str, int, str]] = []
    for rank, source, path, kineto in ranks:
        report += [(rank, str(path), *note) for note in kineto.notes.rows()]
        if source != "distributedInfo":
            report.append((rank, str(path), "rank", 1, f"the file names no rank: {rank} is from its {source}"))
    report += [(None, str(path), "not read", 1, why) for path, why in others]
    rows = [_rank_row(rank, source, path, kineto) for rank, source, path, kineto in ranks]
    table = pl.DataFrame(rows, schema=RANKS, orient="row")
    _refuse_two_jobs(table)
    world = table["world_size"].max()
    if isinstance(world, int) and world > len(ranks):
        report.append((None, None, "missing ranks", world - len(ranks), f"the files speak of {world} ranks"))
    events = pl.concat([k.events.with_columns(rank=pl.lit(rank, pl.Int32)) for rank, _, _, k in ranks])
    return Run(
        EVENTS.check(events),
        table,
        pl.DataFrame(report, schema=REPORT, orient="row"),
        {rank: kineto.metadata for rank, _, _, kineto in ranks},
    )


def _refuse_two_jobs(ranks: pl.DataFrame) -> None:
    """Raise if files speak of jobs of different sizes: their ranks are not ranks of one run."""
    stated = ranks.drop_nulls("world_size").unique("world_size", keep="first", maintain_order=True)
    if len(stated) > 1:
        said = "; ".join(f"{path} of {size} ranks" for path, size in stated.select("path", "world_size").head(3).rows())
        raise RunError(f"the files are of different jobs: {said}. Give each job a folder of its own.")


def _rank_row(rank: int, source: str, path: Path, kineto: Trace) -> tuple[Any, ...]:
    """A row of `RANKS`."""
    events, kept = kineto.metadata["event_count"], len(kineto.events)
    start, end = kineto.events.select(pl.col("start_ns").min(), end=(pl.col("start_ns") + pl.col("dur_ns")).max()).row(
        0
    )
    devices = kineto.events["device"].unique().drop_nulls().sort().to_list()
    world = world_size_of(kineto.metadata)
    return (rank, str(path), source, world, events, kept, events - kept, start, end, devices, path.stat().st_size)
