"""Traces cut into ops a rank at a time, and put on the clock of all ranks: `Recording.of` without all events at once.

The ops of a rank lie in files; in memory are, of all ranks, their communication ops and how long other ops take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import polars as pl

from lumos_nb import hidden, lanes, repairs
from lumos_nb.clocks import (
    about_messages,
    begun_early,
    corrected,
    early_messages,
    match_collectives,
    rank_offsets,
    shift_device_clocks,
    unmatched,
)
from lumos_nb.errors import RunError, TraceError
from lumos_nb.executors import spread
from lumos_nb.graph import groups_of, is_cuda, with_group_sizes, world_size_of
from lumos_nb.ops import ops_and_report, step_marks
from lumos_nb.schema import EVENTS
from lumos_nb.step_times import extents
from lumos_nb.traces.export import read_table
from lumos_nb.traces.files import Files, loaded, read_file
from lumos_nb.traces.run import Extent, FileRead, about, claims, each_file, events_of, first_row, numbered
from lumos_nb.traces.trace import Trace
from lumos_nb.waits import identify, sync_records
from lumos_nb.whole_files import told, write_parquet

_OF_WORK = ("op_id", "rank", "step", "device", "kind")
_OF_COMM = ("collective", "group", "group_size", "comm_seq", "comm_bytes", "peer")
_TIMES = ("launch_ns", "start_ns", "dur_ns")


class Cut(NamedTuple):
    """One rank of a file cut into ops, which are in files: what other ranks need to know of them."""

    own: int
    extent: Extent
    files: Path
    ops: int
    on_device: bool
    marks: pl.DataFrame
    profiles: pl.DataFrame
    """The profiles that its marks were taken to be of (`repairs.profiles_of`)."""
    steps: list[int]
    comm: pl.DataFrame
    longest: pl.DataFrame
    report: pl.DataFrame

    @property
    def path(self) -> Path:
        """Of its ops."""
        return self.files.with_suffix(".ops")


class RunRead(NamedTuple):
    """What the files of a run say of all ranks."""

    steps: tuple[int, ...]
    world_size: int
    groups: pl.DataFrame
    report: pl.DataFrame


def read_ranks(
    path: str | Path | Sequence[str | Path], scratch: Path, executor: Executor | str | None, *, cache: bool
) -> tuple[dict[int, Cut], RunRead]:
    """Cut the events of each file into ops; what there is of each rank, and of all."""

    def reader(files: Files) -> Callable[[Path], tuple[FileRead, list[Cut]] | str]:
        beside = files.beside if cache else None
        places = {file: scratch / f"{at:06}" for at, file in enumerate(files.traces)}
        return partial(_cut_file, places, beside, files.alone)

    with each_file(path, executor, reader) as (outcomes, files):
        of = {file: made for file, made in outcomes if not isinstance(made, str)}
        ranks, copies = numbered([read for read, _ in of.values()])
        cuts = {one.rank: next(cut for cut in of[one.file.path][1] if cut.own == one.own) for one in ranks}
        table, told = about(ranks, [cut.extent for cut in cuts.values()], copies, files)
        profiles = repairs.profiles_of(_of_ranks({rank: cut.marks for rank, cut in cuts.items()}))
        again = [one for one in ranks if not cuts[one.rank].profiles.equals(profiles)]
        cutting = partial(_cut_again, profiles)
        for one, cut in zip(again, spread(executor, cutting, [(o.file, cuts[o.rank]) for o in again]), strict=True):
            cuts[one.rank] = cut
    groups = groups_of(table, {one.rank: one.file.metadata for one in ranks})
    steps = tuple(sorted({step for cut in cuts.values() for step in cut.steps}))
    reports = [_as_assumed(told), _of_ranks({rank: cut.report for rank, cut in cuts.items()})]
    reports += [] if steps else [repairs.unmarked()]
    return cuts, RunRead(steps or (0,), world_size_of(table, groups), groups, pl.concat(reports))


def _cut_file(
    places: dict[Path, Path], beside: Path | None, alone: bool, path: Path
) -> tuple[FileRead, list[Cut]] | str:
    made = read_file(path, cache=beside, by_path=False, strict=alone)
    if isinstance(made, str):
        return made
    trace = made if isinstance(made, Trace) else loaded(path, made)
    again = partial(_trace, path, beside)
    read = FileRead(path, trace.metadata, trace.notes, *first_row(trace.events), again)
    several = len(read.ranks) > 1
    cuts = []
    for own in [own for _, _, own in claims(path, trace.metadata)]:
        place = places[path].with_name(f"{places[path].name}-{own}")
        cuts.append(_cut(events_of(trace, own if several else None), own, place, None))
    return read, cuts


def _trace(path: Path, beside: Path | None) -> Trace:
    """A file that was read before, once more."""
    made = read_file(path, cache=beside, by_path=False, strict=True)
    return made if isinstance(made, Trace) else loaded(path, Path(made))


def _cut_again(profiles: pl.DataFrame, given: tuple[FileRead, Cut]) -> Cut:
    """A rank that was taken to be of other profiles than all ranks together."""
    read, cut = given
    events = events_of(read.trace(), cut.own if len(read.ranks) > 1 else None)
    return _cut(events, cut.own, cut.files, profiles)


def _cut(events: pl.DataFrame, own: int, files: Path, profiles: pl.DataFrame | None) -> Cut:
    extent, events = Extent.of(events), EVENTS.check(events.with_columns(rank=pl.lit(0, pl.Int32)))
    every = step_marks(events)
    profiles = repairs.profiles_of(every) if profiles is None else profiles
    events, marks, left_out = repairs.one_profile(events, every, profiles)
    ops, odd = ops_and_report(events, marks)
    ops, shifts = shift_device_clocks(ops)
    on_device = ops["device"].null_count() < ops.height
    cut = Cut(
        own, extent, files, ops.height, on_device, every, profiles, marks["step"].unique().to_list(),
        ops.filter(pl.col("kind") == "comm").select(*_OF_WORK, *_OF_COMM, *_TIMES),
        hidden.longest(ops), pl.concat([left_out, odd, shifts]),
    )  # fmt: skip
    _write(ops, cut.path)
    _write(sync_records(events), files.with_suffix(".records"))
    return cut


def _write(table: pl.DataFrame, path: Path) -> None:
    with told(path, RunError):
        write_parquet(table, path, compression="lz4", statistics=False)


def read_again(path: Path, columns: list[str] | None = None) -> pl.DataFrame:
    """What an earlier pass wrote."""
    try:
        return read_table(path, columns)
    except (OSError, pl.exceptions.PolarsError, TraceError) as error:
        raise RunError(f"{path} has changed while the job was made ({error}): load it again.") from error


def _of_ranks(tables: dict[int, pl.DataFrame]) -> pl.DataFrame:
    """One table of those of each rank."""
    return pl.concat(table.with_columns(rank=pl.lit(rank, pl.Int32)) for rank, table in tables.items())


def _as_assumed(told: pl.DataFrame) -> pl.DataFrame:
    """A report on files (`Run.report`) as one on graphs."""
    detail = pl.concat_str("path", "reason", separator=": ", ignore_nulls=True)
    return told.select("what", "rank", "count", time_ns=pl.lit(None, pl.Int64), detail=detail)


def counted_from(base: int, table: pl.DataFrame) -> pl.DataFrame:
    """A table of one rank whose op ids count on from `base`, as if those of all ranks were in one."""
    return table.with_columns(pl.col("op_id") + base)


@dataclass(frozen=True, slots=True)
class _Clock:
    """What puts the ops of a rank on the clock of all, and makes collectives of them; op ids are its own."""

    rank: int
    cut: Cut
    groups: pl.DataFrame
    world_size: int
    offsets: pl.DataFrame
    match: pl.DataFrame
    early: pl.DataFrame
    hidden: pl.DataFrame
    late: pl.DataFrame
    members: pl.DataFrame
    renumber: bool = False

    def ops(self, columns: list[str] | None = None) -> pl.DataFrame:
        """The rank's ops on the clock of all."""
        ops = read_again(self.cut.path, columns).with_columns(rank=pl.lit(self.rank, pl.Int32))
        return corrected(ops, self.offsets)


class Clocked(NamedTuple):
    """A rank on the clock of all."""

    rank: int
    files: Path
    ops: int
    comm: pl.DataFrame
    extents: pl.DataFrame
    cuda: bool
    report: pl.DataFrame


def on_one_clock(
    cuts: dict[int, Cut], read: RunRead, executor: Executor | str | None
) -> tuple[list[Clocked], pl.DataFrame]:
    """Match the collectives of all ranks, align their clocks, find what no record names."""
    bases = bases_of([cut.ops for cut in cuts.values()])
    comm = _of_ranks(
        {rank: counted_from(base, cut.comm) for (rank, cut), base in zip(cuts.items(), bases, strict=True)}
    )
    comm = match_collectives(with_group_sizes(comm, read.groups, read.world_size))
    offsets, report = rank_offsets(comm, pl.Series([rank for rank, cut in cuts.items() if cut.ops], dtype=pl.Int32))
    counts = [cut.ops for cut in cuts.values()]
    matches = own_rows(comm.select("op_id", "match").drop_nulls(), bases, counts)
    early = early_messages(corrected(comm, offsets))
    nothing = hidden.numbered(hidden.NOWHERE, 0)
    clocks = [
        _Clock(rank, cut, read.groups, read.world_size, offsets, match, sends, nothing, hidden.NEVER, nothing)
        for (rank, cut), match, sends in zip(cuts.items(), matches, own_rows(early, bases, counts), strict=True)
    ]
    if sum(count > 0 for count in counts) > 1:
        clocks = _with_hidden(clocks, comm, executor)
    return [*spread(executor, _align, clocks)], pl.concat([report, unmatched(comm), about_messages(early)])


def bases_of(counts: Sequence[int]) -> list[int]:
    """What the op ids of each rank begin with where those of all are numbered in turn."""
    return [0, *accumulate(counts)][: len(counts)]


def own_rows(table: pl.DataFrame, bases: Sequence[int], counts: Sequence[int]) -> list[pl.DataFrame]:
    """The rows of each rank's ops, with its own op ids; those of first parts (`hidden.in_gaps`) are below 0."""
    first = pl.col("op_id") < 0
    at = table.with_columns(whole=pl.when(first).then(-1 - pl.col("op_id")).otherwise("op_id")).sort("whole")
    found = []
    for base, count in zip(bases, counts, strict=True):
        here = at.slice(
            begin := int(at["whole"].search_sorted(base)), int(at["whole"].search_sorted(base + count)) - begin
        )
        own_id = pl.col("op_id") + pl.when(first).then(base).otherwise(-base)
        found.append(here.with_columns(op_id=own_id).drop("whole"))
    return found


def _with_hidden(clocks: list[_Clock], comm: pl.DataFrame, executor: Executor | str | None) -> list[_Clock]:
    """Add the collectives that no record names."""
    counts = [one.cut.ops for one in clocks]
    bases, there = bases_of(counts), [one for one in clocks if one.cut.ops]
    longest = pl.concat(one.cut.longest for one in there).group_by(hidden.WORK).agg(pl.col("longest_ns").max())
    all_hosts = not any(one.cut.on_device for one in there)
    spans, gaps = None, []
    looked = spread(executor, partial(_candidates, longest, all_hosts), [*zip(bases, clocks, strict=True)])
    for count, (found, of_gaps) in zip(counts, looked, strict=True):
        spans = found if spans is None else hidden.joined(spans, found) if count else spans
        gaps.append(of_gaps)
    hiding = hidden.hiding(spans, len(there))  # type: ignore[arg-type]
    first = int(comm["match"].max() or 0)  # type: ignore[arg-type]
    in_ops = [hidden.NOWHERE]
    if hiding.height:
        in_ops = [*spread(executor, partial(_hiding, longest, hiding), [*zip(bases, clocks, strict=True)])]
    found = hidden.numbered(pl.concat(in_ops), first)
    late, members = hidden.in_gaps(pl.concat(gaps)) if all_hosts else (hidden.NEVER, hidden.NOWHERE)
    of_gaps = hidden.numbered(members, first + found["match"].n_unique())
    slices = (own_rows(table, bases, counts) for table in (found, late, of_gaps))
    return [
        replace(one, hidden=in_ops, late=cuts, members=in_gaps, renumber=late.height > 0)
        for one, in_ops, cuts, in_gaps in zip(clocks, *slices, strict=True)
    ]


_LOOKED_AT = ["op_id", "lane", "step", *hidden.WORK, "call", *_TIMES]


def _candidates(longest: pl.DataFrame, all_hosts: bool, given: tuple[int, _Clock]) -> tuple[pl.DataFrame, pl.DataFrame]:
    work = hidden.candidates(counted_from(given[0], given[1].ops(_LOOKED_AT)), longest)
    return hidden.spans(work), work.filter((pl.col("kind") == "gap") & all_hosts)


def _hiding(longest: pl.DataFrame, hiding: pl.DataFrame, given: tuple[int, _Clock]) -> pl.DataFrame:
    return hidden.in_ops(hidden.candidates(counted_from(given[0], given[1].ops(_LOOKED_AT)), longest), hiding)


def _align(clock: _Clock) -> Clocked:
    ops = with_group_sizes(clock.ops(), clock.groups, clock.world_size)
    ops = ops.join(clock.match, on="op_id", how="left", maintain_order="left")
    ops, found = hidden.mark(ops, clock.hidden, clock.late, clock.members, renumber=clock.renumber)
    ops, overlaps = lanes.in_turn(begun_early(ops, clock.early))
    report = pl.concat([found, overlaps, repairs.unlaunched(ops)])
    ops = identify(ops)
    _write(ops, clock.cut.path)
    return Clocked(clock.rank, clock.cut.path, ops.height, lanes.communication(ops), extents(ops), is_cuda(ops), report)
