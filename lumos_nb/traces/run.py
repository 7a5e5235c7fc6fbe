"""The rank files of a folder, or one file, as one run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import polars as pl

from lumos_nb.display import how_many
from lumos_nb.errors import RunError, require_flags
from lumos_nb.executors import spread
from lumos_nb.schema import EVENTS
from lumos_nb.traces.export import OnAClock
from lumos_nb.traces.files import Files, files_of, loaded, printable, read_file
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
        return f"Run of {how_many(n, 'rank')}: {kept:,} events, {dropped:,} dropped (see .report)"

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
    require_flags(cache=cache)

    def reader(files: Files) -> Callable[[Path], Trace | Path | str]:
        beside = files.beside if cache else None
        return partial(read_file, cache=beside, by_path=executor is not None, strict=files.alone)

    with each_file(path, executor, reader) as (parsed, files):
        traces = [(file, made if isinstance(made, Trace) else loaded(file, Path(made))) for file, made in parsed]
        read = [FileRead(file, t.metadata, t.notes, *first_row(t.events), partial(_same, t)) for file, t in traces]
        ranks, copies = numbered(read)
        tables = [one.events() for one in ranks]
        table, report = about(ranks, [Extent.of(events) for events in tables], copies, files)
    metadata = {one.rank: one.file.metadata for one in ranks}
    return Run(EVENTS.check(pl.concat(tables)), table, report, metadata)


Made = TypeVar("Made")
"""What is made of a file; text where it cannot be read."""


def _same(trace: Trace) -> Trace:
    return trace


@contextmanager
def each_file(
    path: str | Path | Sequence[str | Path],
    executor: Executor | str | None,
    reader: Callable[[Files], Callable[[Path], Made]],
) -> Iterator[tuple[list[tuple[Path, Made]], Files]]:
    """What a reader makes of each file of a run; those of which it says why they cannot be read join `Files.others`.

    Raises
    ------
    RunError, ExecutorError, TraceError
        As `load_run`, of single files.
    """
    try:
        with files_of(path) as files:
            parsed: list[tuple[Path, Made]] = []
            for file, outcome in zip(files.traces, spread(executor, reader(files), files.traces), strict=True):
                if isinstance(outcome, str):
                    files.others.append((file, outcome))
                else:
                    parsed.append((file, outcome))
            if not parsed:
                named = "".join(f"\n  {file.name}: {why}" for file, why in files.others[:_NAMED])
                named += f"\n  and {len(files.others) - _NAMED:,} more" if len(files.others) > _NAMED else ""
                raise RunError(f"{path} holds no trace that can be read:{named}")
            yield parsed, files
    except OSError as error:  # no right to read, a name that is too long, a disk that fails
        raise RunError(f"{path} cannot be read: {error}. Put that right, or leave the file out.") from error


class FileRead(NamedTuple):
    """What is known of a file that was read, and how to have its events."""

    path: Path
    metadata: dict[str, Any]
    notes: pl.DataFrame
    rows: int
    first_ns: int | None
    """When the first of them starts."""
    trace: Callable[[], Trace]

    @property
    def ranks(self) -> list[int]:
        """The ranks that it holds, as it numbers them; none if it does not tell."""
        held: list[int] = self.metadata.get("ranks", [])
        return held


def first_row(events: pl.DataFrame) -> tuple[int, int | None]:
    """How many events there are, and when the first one starts."""
    return events.height, events["start_ns"][0] if events.height else None


class Ranked(NamedTuple):
    """One rank of a run."""

    rank: int
    source: str
    file: FileRead
    own: int
    """The rank that it has in its file."""

    @property
    def several(self) -> bool:
        """Whether its file holds further ranks."""
        return len(self.file.ranks) > 1

    def events(self) -> pl.DataFrame:
        """The rank's rows."""
        events = events_of(self.file.trace(), self.own if self.several else None)
        return events.with_columns(rank=pl.lit(self.rank, pl.Int32))


def events_of(trace: Trace, own: int | None) -> pl.DataFrame:
    """The rows of one of several ranks of a file, or all."""
    return trace.events if own is None else trace.events.filter(pl.col("rank") == own)


class Extent(NamedTuple):
    """How many events of a rank were kept, when they start and end, and the devices that they ran on."""

    kept: int
    start_ns: int | None
    end_ns: int | None
    devices: list[int]

    @classmethod
    def of(cls, events: pl.DataFrame) -> Extent:
        """Of a rank's rows."""
        end_ns = (pl.col("start_ns") + pl.col("dur_ns")).max()
        start_ns, end_ns = events.select(pl.col("start_ns").min(), end_ns=end_ns).row(0)
        return cls(len(events), start_ns, end_ns, events["device"].unique().drop_nulls().sort().to_list())


def claims(path: Path, metadata: dict[str, Any]) -> list[tuple[int | None, str, int]]:
    """(rank or None if nothing says which, where it comes from, rank in the file) of each rank of a file."""
    ranks = metadata.get("ranks", [])
    counted = metadata.get("ranks_counted", False)  # in the order in which the file has them, no more
    if len(ranks) > 1 or (ranks and not counted and rank_of(metadata) is None):
        return [(None, "order", rank) if counted else (rank, "file", rank) for rank in ranks]
    if (stated := rank_of(metadata)) is not None:
        return [(stated, "distributedInfo", stated)]
    named = _rank_in_name(path.name)
    return [(named, "order" if named is None else "file name", 0)]


def _rank_in_name(name: str) -> int | None:
    match = RANK_PATTERN.search(name)
    return int(match.group(1)) if match and int(match.group(1)) < 2**31 else None


def numbered(read: list[FileRead]) -> tuple[list[Ranked], list[tuple[Path, str]]]:
    """The ranks, in their order, none of them twice; and the files that are copies of others."""
    found: dict[int, Ranked] = {}
    nameless: list[Ranked] = []
    copies: dict[Path, str] = {}
    for file in read:
        path = file.path
        for rank, source, own in claims(path, file.metadata):
            one = Ranked(-1 if rank is None else rank, source, file, own)
            others = nameless if rank is None else [found[rank]] if rank in found else []
            if same := next((o.file for o in others if o.file.path != path and _is_copy(o.file, file)), None):
                copies[path] = f"a copy of {same.path}: the same events"
            elif rank is None:
                nameless.append(one)
            elif rank in found:
                raise RunError(
                    f"{found[rank].file.path} ({found[rank].source}) and {path} ({source}) both claim rank {rank}, and "
                    "differ: move one of them out of the folder, or give load_run a list of the files that you mean."
                )
            else:
                found[rank] = one
    free = (rank for rank in count() if rank not in found)
    ordered = [one._replace(rank=rank) for rank, one in zip(free, nameless, strict=False)]
    return sorted([*found.values(), *ordered], key=lambda one: one.rank), list(copies.items())


def _is_copy(one: FileRead, other: FileRead) -> bool:
    """Whether two files hold the same events, to the ns: two ranks never do."""
    if one.rows != other.rows or one.rows == 0 or one.first_ns != other.first_ns:
        return False
    return one.trace().events.drop("rank").equals(other.trace().events.drop("rank"))


def about(
    ranks: list[Ranked], extents: list[Extent], copies: list[tuple[Path, str]], files: Files
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`Run.ranks` and `Run.report`.

    Raises
    ------
    RunError
        The files are of different jobs.
    """
    rows = [_rank_row(one, extent) for one, extent in zip(ranks, extents, strict=True)]
    table = pl.DataFrame(rows, schema=RANKS, orient="row")
    _refuse_two_jobs(table, ranks)
    report: list[tuple[int | None, str | None, str, int, str]] = []
    for one in ranks:
        path = str(one.file.path)
        if not one.several or one.own == one.file.ranks[0]:
            report += [(None if one.several else one.rank, path, *note) for note in one.file.notes.rows()]
        if one.source in ("file name", "order"):
            reason = f"the file names no rank: {one.rank} is from its {one.source}"
            report.append((one.rank, path, "rank", 1, reason))
    report += [(None, printable(path), "not read", 1, why) for path, why in [*copies, *files.others]]
    world = table["world_size"].max()
    if isinstance(world, int) and world > len(ranks):
        held = {one.rank for one in ranks}
        absent = list(islice((rank for rank in range(world) if rank not in held), 21))
        named = ", ".join(map(str, absent[:20])) + (", ..." if len(absent) > 20 else "")
        reason = f"the files speak of {world} ranks; there is none of rank {named}"
        report.append((None, None, "missing ranks", world - len(ranks), reason))
    told = pl.DataFrame(report, schema=REPORT, orient="row")
    if files.archive is not None:  # the files themselves are about to go
        member, archive = pl.col("path").str.split("/").list.last(), pl.lit(str(files.archive))
        told = told.with_columns(reason=pl.format("{}: {}", member.fill_null(""), "reason"), path=archive)
        table = table.with_columns(path=archive)
    return table, told


def _rank_row(one: Ranked, extent: Extent) -> tuple[Any, ...]:
    """A row of `RANKS`."""
    metadata, kept = one.file.metadata, extent.kept
    dropped = metadata["event_count"] - kept
    if "ranks" in metadata:  # a count for all ranks of the file, some of whose events may be several rows or none
        lost = one.file.notes.filter(pl.col("what").str.contains("^(dropped|unreadable)"))["count"].sum()
        dropped = lost if one.own == metadata["ranks"][0] else 0
    counts = (kept + dropped, kept, dropped)
    world, path = world_size_of(metadata), one.file.path
    return (one.rank, str(path), one.source, world, *counts, *extent[1:], path.stat().st_size)


def _refuse_two_jobs(table: pl.DataFrame, ranks: list[Ranked]) -> None:
    """Raise if files speak of jobs that differ, or were recorded at another time: their ranks are not of one run."""
    sizes = zip(ranks, table["world_size"], strict=True)
    said = {one.file.path: f"{size} ranks" for one, size in sizes if size is not None}
    groups = {one.file.path: f"ranks {group}" for one in ranks if (group := _default_group(one.file.metadata))}
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
