"""The rank files of a folder, or one file, as one run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from lumos_nb.errors import RunError
from lumos_nb.executors import spread
from lumos_nb.schema import EVENTS
from lumos_nb.traces.export import OnAClock
from lumos_nb.traces.files import files_of, loaded, printable, read_file
from lumos_nb.traces.kineto import rank_of, world_size_of
from lumos_nb.traces.trace import Trace

RANK_PATTERN = re.compile(r"(?i)(?<![a-z])(?:rank|worker)[-_. ]?(\d+)")
"""What a file's name says about its rank."""

WALL_CLOCK_NS = 10**18
"""Times beyond this (2001) count from 1970; others from the start of a machine, which need not be the same for all."""

MAX_APART_NS = 60 * 10**9
"""Ranks of one run were recorded at one time: on wall clocks that differ by seconds at most, not by a minute."""

_NAMED = 10
"""Files that an error names; a folder may hold 100,000."""

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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Run(OnAClock):
    """The events of all ranks of a run, and what was read to get them.

    Attributes
    ----------
    events
        `schema.EVENTS` of all ranks, rank after rank, each in its file's order.
    ranks
        One row a rank: `rank`, `path`, `rank_source` ("distributedInfo", "file", "file name" or "order"), `world_size`
        (null if the file does not say), `events` in the file, `kept` and `dropped` of them, `start_ns` and `end_ns` of
        the kept ones, `devices` that they ran on, `bytes` of the file. What was dropped of a file of several ranks
        counts for its first.
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

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._title(), self._overview())]


def load_run(
    path: str | Path | Sequence[str | Path], *, executor: Executor | str | None = None, cache: bool = True
) -> Run:
    """Read traces of any supported format, one file a rank or one of several ranks, as one run.

    Parameters
    ----------
    path
        A folder, whose files with the endings `files.SUFFIXES` are taken (not those of its sub-folders); a tar archive
        of such a folder; one file; or a list of files, to name those that are meant.
    executor
        Reads the files in parallel, as in `executors.spread`; workers elsewhere see the files under the same paths.
    cache
        Keep what was parsed as Parquet, by content, and use it next time: in the folder that the environment variable
        `LUMOS_NB_CACHE` names, else beside the files where that folder is the user's own, else in the user's cache.

    Returns
    -------
    Run
        Events of all ranks. `report` says what was not read and why: of several files those that are damaged beyond
        use or of other formats are left out, and their ranks are missing; so is a copy of another file.

    Raises
    ------
    RunError
        There is no such path, or no trace in it that can be read; two different files claim one rank; the files are of
        different jobs (of other sizes or default groups, or recorded at another time); or a file cannot be opened.
    ExecutorError
        As `executors.spread`.
    TraceError
        The one file given is damaged beyond use, or (`UnsupportedFormat`) of a format that is not read here.

    Examples
    --------
    >>> run = load_run("runs/gpt")
    >>> run.ranks["rank"].to_list()
    [0, 1]
    >>> run.report.columns
    ['rank', 'path', 'what', 'count', 'reason']
    """
    try:
        with files_of(path) as (files, others, beside, alone, archive):
            read = partial(read_file, cache=beside if cache else None, by_path=executor is not None, strict=alone)
            parsed: list[tuple[Path, Trace]] = []
            for file, outcome in zip(files, spread(executor, read, files), strict=True):
                if isinstance(outcome, str):
                    others.append((file, outcome))
                else:
                    parsed.append((file, loaded(file, outcome) if isinstance(outcome, Path) else outcome))
            if not parsed:
                named = "".join(f"\n  {file.name}: {why}" for file, why in others[:_NAMED])
                named += f"\n  and {len(others) - _NAMED:,} more" if len(others) > _NAMED else ""
                raise RunError(f"{path} holds no trace that can be read:{named}")
            return _run(parsed, others, archive)
    except OSError as error:  # no right to read, a name that is too long, a disk that fails
        raise RunError(f"{path} cannot be read: {error}. Put that right, or leave the file out.") from error


class _Ranked(NamedTuple):
    """One rank of a run."""

    rank: int
    source: str
    path: Path
    trace: Trace
    own: int
    """The rank that it has in its file."""

    @property
    def several(self) -> bool:
        """Whether its file holds further ranks."""
        return len(self.trace.metadata.get("ranks", [])) > 1

    def events(self) -> pl.DataFrame:
        """The rank's rows."""
        events = self.trace.events.filter(pl.col("rank") == self.own) if self.several else self.trace.events
        return events.with_columns(rank=pl.lit(self.rank, pl.Int32))


def _claims(path: Path, trace: Trace) -> list[tuple[int | None, str, int]]:
    """(rank or None if nothing says which, where it comes from, rank in the file) of each rank of a file."""
    ranks = trace.metadata.get("ranks", [])
    counted = trace.metadata.get("ranks_counted", False)  # in the order in which the file has them, no more
    if len(ranks) > 1 or (ranks and not counted and rank_of(trace.metadata) is None):
        return [(None, "order", rank) if counted else (rank, "file", rank) for rank in ranks]
    if (stated := rank_of(trace.metadata)) is not None:
        return [(stated, "distributedInfo", stated)]
    named = _rank_in_name(path.name)
    return [(named, "order" if named is None else "file name", 0)]


def _rank_in_name(name: str) -> int | None:
    match = RANK_PATTERN.search(name)
    return int(match.group(1)) if match and int(match.group(1)) < 2**31 else None


def _numbered(parsed: list[tuple[Path, Trace]]) -> tuple[list[_Ranked], list[tuple[Path, str]]]:
    """The ranks, in their order, none of them twice; and the files that are copies of others."""
    found: dict[int, _Ranked] = {}
    nameless: list[_Ranked] = []
    copies: dict[Path, str] = {}
    for path, trace in parsed:
        for rank, source, own in _claims(path, trace):
            one = _Ranked(-1 if rank is None else rank, source, path, trace, own)
            others = nameless if rank is None else [found[rank]] if rank in found else []
            if same := next((o for o in others if o.path != path and _is_copy(o.trace, trace)), None):
                copies[path] = f"a copy of {same.path}: the same events"
            elif rank is None:
                nameless.append(one)
            elif rank in found:
                raise RunError(
                    f"{found[rank].path} ({found[rank].source}) and {path} ({source}) both claim rank {rank}, and "
                    "differ: move one of them out of the folder, or give load_run a list of the files that you mean."
                )
            else:
                found[rank] = one
    free = (rank for rank in count() if rank not in found)
    ordered = [one._replace(rank=rank) for rank, one in zip(free, nameless, strict=False)]
    return sorted([*found.values(), *ordered], key=lambda one: one.rank), list(copies.items())


def _is_copy(one: Trace, other: Trace) -> bool:
    """Whether two files hold the same events, to the ns: two ranks never do."""
    mine, theirs = one.events.drop("rank"), other.events.drop("rank")
    return len(mine) == len(theirs) > 0 and mine["start_ns"][0] == theirs["start_ns"][0] and mine.equals(theirs)


def _run(parsed: list[tuple[Path, Trace]], others: list[tuple[Path, str]], archive: Path | None) -> Run:
    ranks, copies = _numbered(parsed)
    tables = [one.events() for one in ranks]
    rows = [_rank_row(one, events) for one, events in zip(ranks, tables, strict=True)]
    table = pl.DataFrame(rows, schema=RANKS, orient="row")
    _refuse_two_jobs(table, ranks)
    report: list[tuple[int | None, str | None, str, int, str]] = []
    for one in ranks:
        if not one.several or one.own == one.trace.metadata["ranks"][0]:
            report += [(None if one.several else one.rank, str(one.path), *note) for note in one.trace.notes.rows()]
        if one.source in ("file name", "order"):
            reason = f"the file names no rank: {one.rank} is from its {one.source}"
            report.append((one.rank, str(one.path), "rank", 1, reason))
    report += [(None, printable(path), "not read", 1, why) for path, why in [*copies, *others]]
    world = table["world_size"].max()
    if isinstance(world, int) and world > len(ranks):
        held = {one.rank for one in ranks}
        absent = list(islice((rank for rank in range(world) if rank not in held), 21))
        named = ", ".join(map(str, absent[:20])) + (", ..." if len(absent) > 20 else "")
        reason = f"the files speak of {world} ranks; there is none of rank {named}"
        report.append((None, None, "missing ranks", world - len(ranks), reason))
    about = pl.DataFrame(report, schema=REPORT, orient="row")
    if archive is not None:  # the files themselves are about to go
        member = pl.col("path").str.split("/").list.last()
        about = about.with_columns(
            reason=pl.format("{}: {}", member.fill_null(""), "reason"), path=pl.lit(str(archive))
        )
        table = table.with_columns(path=pl.lit(str(archive)))
    return Run(
        EVENTS.check(pl.concat(tables)),
        table,
        about,
        {one.rank: one.trace.metadata for one in ranks},
    )


def _rank_row(one: _Ranked, events: pl.DataFrame) -> tuple[Any, ...]:
    """A row of `RANKS`."""
    metadata, kept = one.trace.metadata, len(events)
    dropped = metadata["event_count"] - kept
    if "ranks" in metadata:  # a count for all ranks of the file, some of whose events may be several rows or none
        lost = one.trace.notes.filter(pl.col("what").str.contains("^(dropped|unreadable)"))["count"].sum()
        dropped = lost if one.own == metadata["ranks"][0] else 0
    end_ns = (pl.col("start_ns") + pl.col("dur_ns")).max()
    times = events.select(pl.col("start_ns").min(), end_ns=end_ns).row(0)
    devices = events["device"].unique().drop_nulls().sort().to_list()
    counts = (kept + dropped, kept, dropped)
    world = world_size_of(metadata)
    return (one.rank, str(one.path), one.source, world, *counts, *times, devices, one.path.stat().st_size)


def _refuse_two_jobs(table: pl.DataFrame, ranks: list[_Ranked]) -> None:
    """Raise if files speak of jobs that differ, or were recorded at another time: their ranks are not of one run."""
    said = {one.path: f"{size} ranks" for one, size in zip(ranks, table["world_size"], strict=True) if size is not None}
    groups = {one.path: f"ranks {group}" for one in ranks if (group := _default_group(one.trace.metadata))}
    for facts in (said, groups):
        if len(set(facts.values())) > 1:
            shown = "; ".join(f"{path} of {fact}" for fact, path in list({v: k for k, v in facts.items()}.items())[:3])
            raise RunError(f"the files are of different jobs: {shown}. Give each job a folder of its own.")
    windows = table.filter(pl.col("start_ns") > WALL_CLOCK_NS).sort("start_ns")
    windows = windows.with_columns(until_ns=pl.col("end_ns").cum_max().shift(1), before=pl.col("path").shift(1))
    late = windows.filter(pl.col("start_ns") - pl.col("until_ns") > MAX_APART_NS)
    for path, before, start_ns, until_ns in late.select("path", "before", "start_ns", "until_ns").head(1).rows():
        raise RunError(
            f"{path} begins {(start_ns - until_ns) / 1e9:,.0f} s after {before} has ended: they are not of one run. "
            "Give each run a folder of its own, or give load_run a list of the files that belong together."
        )


def _default_group(metadata: dict[str, Any]) -> str | None:
    """The ranks of the process group of all ranks, as the profiler lists them; None if it does not."""
    info = metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, dict) else None
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and (group.get("pg_desc") == "default_pg" or group.get("pg_name") == "default_pg"):
            return str(group.get("ranks"))
    return None
