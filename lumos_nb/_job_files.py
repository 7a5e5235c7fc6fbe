"""A job in a folder: tables of each rank's ops and edges, and the plan that is made of them.

All that was checked when it was written counts on what is read being the same, so every file has a checksum elsewhere:
those of tables stand in `RANKS`, its own beside it, those of a plan in its `SEALS`. A table that has
changed is refused. A plan that has, or that is of other tables, is made anew.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import polars as pl
from isal import isal_zlib

from lumos_nb._array_files import load, save
from lumos_nb._replay_kernels import Int32s, Int64s, find
from lumos_nb._replay_plan import ON_DEVICE, Plan, check_groups, check_times, check_total, step_groups
from lumos_nb.errors import (
    GraphError,
    InputError,
    RunError,
    SchemaError,
    TraceError,
    files_in,
    folder_for,
    is_whole,
    named,
    require_kinds,
    require_whole,
    shown,
)
from lumos_nb.schema import EDGES, OPS, TableSchema, panics_told
from lumos_nb.traces.export import read_table, table_in
from lumos_nb.whole_files import lock, scratch, sync, told, whole, write_parquet

RANKS = TableSchema(
    "rank",
    {
        "rank": pl.Int32(),
        "ops": pl.Int64(),
        "edges": pl.Int64(),
        "start_ns": pl.Int64(),  # of its first op, as measured
        "step": pl.Int32(),  # its last one, not counting joins: a breakdown has them on no rank
        "on_device": pl.Boolean(),  # it has work on devices
        "total_ns": pl.Float64(),  # of its durations and lags
        "ops_crc": pl.UInt32(),  # checksums of its files
        "edges_crc": pl.UInt32(),
    },
    keys=("rank",),
)
"""What a job knows of its ranks without reading their ops."""

EDGES_TO_RANK = TableSchema("edge", {"src_rank": pl.Int32(), **EDGES.columns})
"""Edges that lead to the ops of a rank, each with the rank of its source."""

MOST = 2**31 - 1
"""Ops, or edges, that a plan can number."""

_ARRAYS = [field.name for field in fields(Plan) if field.name != "groups"]


_SEALED, TIMES = (*(f"{name}.npy" for name in _ARRAYS), "groups.parquet"), ("start_ns", "slack_ns")
"""Files of a plan, and arrays of a replay."""

_OF_RANK = re.compile(r"(ops|edges)-\d{5,}\.parquet")

SEALS = "seals.json"
"""Of a plan: checksums of its files and of the ranks that it is of. Written last."""

_CRC = "lumos_nb_crc"
"""Key of the Parquet file's own metadata with the checksum of `RANKS`."""

_REPORT_CRC = "lumos_nb_report_crc"
"""The same of the report."""


class Files:
    """The files of a job: its folder, and what `RANKS` says of its ranks."""

    def __init__(self, folder: Path, ranks: pl.DataFrame) -> None:
        self.folder, self.ranks = folder.absolute(), ranks
        self._places = {rank: at for at, rank in enumerate(ranks["rank"])}

    def place(self, rank: int) -> int:
        """Which row of `ranks` a rank has."""
        if not is_whole(rank, -MOST, MOST) or (at := self._places.get(operator.index(rank))) is None:
            raise InputError(f"the job has no rank {shown(rank)}; it has {len(self.ranks)}, see .ranks.")
        return at

    def table(self, what: str, rank: int, columns: list[str] | None = None) -> pl.DataFrame:
        """The "ops" of a rank, or the "edges" that lead to them."""
        about = self.ranks.row(self.place(rank), named=True)
        path = _path(self.folder, what, about["rank"])
        schema = OPS if what == "ops" else EDGES_TO_RANK
        if columns is not None:
            schema = TableSchema(schema.name, {c: schema.columns[c] for c in columns})
        try:
            with path.open("rb") as file:  # once: a writer may put another there
                if _checksum_in(file) != about[f"{what}_crc"]:
                    raise RunError(f"{path} has changed since the job was written: write that rank, or the job, anew.")
                return schema.check(table_in(file, path, columns))
        except (OSError, pl.exceptions.PolarsError, SchemaError, TraceError) as error:
            raise RunError(f"{path} cannot be read ({error}): write the job anew.") from error

    def report(self) -> pl.DataFrame:
        """What was assumed while the job was made."""
        path, ranks = self.folder / "report.parquet", self.folder / "ranks.parquet"
        try:
            with panics_told(), ranks.open("rb") as file:
                said = pl.read_parquet_metadata(file)
            with path.open("rb") as file:
                if (said.get(_CRC), said.get(_REPORT_CRC)) != (_checksum_of(self.ranks), str(_checksum_in(file))):
                    raise RunError(f"{path} has changed since the job was written: write the job anew.")
                return table_in(file, path)
        except (OSError, pl.exceptions.PolarsError, TraceError) as error:
            raise RunError(f"{path} cannot be read ({error}): write the job anew.") from error

    def begins(self, what: str) -> Int64s:
        """The first row of each rank in the whole job's "ops" or "edges", and how many rows there are."""
        return np.concatenate([[0], np.cumsum(self.ranks[what].to_numpy())])

    def rows(self, what: str, rows: Int32s, columns: Mapping[str, pl.DataType]) -> pl.DataFrame:
        """Rows of the whole job's "ops" or "edges", as they were asked for."""
        begins = self.begins(what)
        of = np.searchsorted(begins, rows, side="right") - 1
        found = [pl.DataFrame(schema={**columns, "at": pl.Int64()})]
        for i in np.unique(of):
            at = np.flatnonzero(of == i)
            table = self.table(what, self.ranks["rank"][int(i)], [*columns])[rows[at] - begins[i]]
            found.append(table.with_columns(at=pl.Series(at)))
        return pl.concat(found).sort("at").drop("at")

    def plan(self) -> Plan:
        """The plan of the job: made once, then read from the folder as it is needed."""
        kept = self.folder / "plan"
        with told(self.folder, RunError), lock(self.folder, wait=True, shared=True):
            if _is_sealed(kept, self.ranks):
                return _kept_plan(kept)
        plan = self._planned()
        with told(self.folder, RunError), lock(self.folder, wait=True):  # or files of two jobs' plans would be sealed
            if _read(self.folder).ranks.rows() != self.ranks.rows():
                raise RunError(f"the job in {self.folder} has been replaced since it was opened: open it anew.")
            save(kept, **{name: getattr(plan, name) for name in _ARRAYS})
            with whole(kept / "groups.parquet", RunError) as part:
                write_parquet(plan.groups, part)
            _seal(kept, self.ranks)
            return _kept_plan(kept)

    def _planned(self) -> Plan:
        """Numbers of the ranks' tables, read one after another, put together."""
        n, e = int(self.ranks["ops"].sum()), int(self.ranks["edges"].sum())
        src, dst, group = np.empty(e, np.int32), np.empty(e, np.int32), np.empty(n, np.int32)
        lag_ns, from_start, dur_ns = np.empty(e, np.int64), np.empty(e, bool), np.empty(n, np.int64)
        on_device, groups, known = bool(self.ranks["on_device"].any()), [], 0
        ids = _Ids(self)
        for rank, begin, edge in zip(self.ranks["rank"], self.begins("ops"), self.begins("edges"), strict=False):
            ops = self.table("ops", rank, ["rank", "step", "device", "kind", "dur_ns"])
            edges = self.table("edges", rank, ["src_rank", "src", "dst", "lag_ns", "from_start", "rule"])
            own, named = step_groups(ops, on_device=on_device)
            here, there = slice(begin, begin + len(ops)), slice(edge, edge + len(edges))
            dur_ns[here], group[here] = ops["dur_ns"].to_numpy(), np.where(own < 0, -1, own + known)
            src[there], dst[there] = ids.ends(rank, edges)
            lag_ns[there], from_start[there] = edges["lag_ns"].to_numpy(), edges["from_start"].to_numpy()
            groups.append(named)
            known += len(named)
        every = pl.concat(groups).with_row_index("was").sort("step", "rank")
        check_groups(every, n)
        now = np.full(known + 1, -1, np.int32)  # the last one for ops that end no step
        now[every["was"].to_numpy()] = np.arange(known, dtype=np.int32)
        del ids
        return Plan.ordered(src, dst, lag_ns, from_start, dur_ns, now[group], every.drop("was"), self._op_at)

    def _op_at(self, row: int) -> dict[str, object]:
        return self.rows("ops", np.array([row], np.int32), OPS.columns).row(0, named=True)


@dataclass(frozen=True, slots=True)
class Times:
    """When the ops of a replayed job run, and their slack, in files; `checksums` are of the part of each rank."""

    checksums: tuple[int, ...]

    @classmethod
    def saved(cls, files: Files, start_ns: Int64s, slack_ns: Int64s) -> Times:
        """Write those of all ops (n,)."""
        save(files.folder / "replayed", start_ns=start_ns, slack_ns=slack_ns)
        parts = (slice(a, b) for a, b in pairwise(files.begins("ops")))
        return cls(tuple(_checksum_of_times(start_ns[part], slack_ns[part]) for part in parts))

    def of(self, files: Files, rank: int) -> pl.DataFrame:
        """The ops of a rank as they run, with `slack_ns`."""
        ops, at, kept = files.table("ops", rank), files.place(rank), files.folder / "replayed"
        begin = files.begins("ops")[at]
        start_ns, slack_ns = (load(kept, name)[begin : begin + len(ops)] for name in TIMES)
        if _checksum_of_times(start_ns, slack_ns) != self.checksums[at]:
            raise RunError(f"what is in {kept} is of another replay, or has changed since: replay the job again.")
        return ops.with_columns(
            start_ns=start_ns, measured_start_ns=pl.col("start_ns"), slack_ns=pl.Series(slack_ns).replace(-1, None)
        )


def _checksum_of_times(start_ns: Int64s, slack_ns: Int64s) -> int:
    about = [f"{array.dtype}{array.shape}".encode() for array in (start_ns, slack_ns)]
    return isal_zlib.crc32(b"".join([*about, start_ns.tobytes(), slack_ns.tobytes()]))


class _Ids:
    """Where the ops of all ranks are in the whole job, by rank and op id."""

    def __init__(self, files: Files) -> None:
        self.begins = dict(zip(files.ranks["rank"], files.begins("ops"), strict=False))
        self.ids: dict[int, Int64s] = {}
        self.order: dict[int, Int64s] = {}
        for rank in self.begins:
            ids = files.table("ops", rank, ["op_id"])["op_id"].to_numpy(writable=True)
            if (ids[1:] <= ids[:-1]).any():
                self.order[rank] = np.argsort(ids, kind="stable")
                ids = ids[self.order[rank]]
            self.ids[rank] = ids

    def ends(self, rank: int, edges: pl.DataFrame) -> tuple[Int64s, Int64s]:
        """Rows of the sources and destinations of the edges that lead to a rank."""
        src = np.empty(len(edges), np.int64)
        of = edges["src_rank"].to_numpy()
        for source in np.unique(of):
            here = np.flatnonzero(of == source)
            src[here] = self._rows(int(source), edges[here], "src")
        return src, self._rows(rank, edges, "dst")

    def _rows(self, rank: int, edges: pl.DataFrame, end: str) -> Int64s:
        if rank not in self.ids:
            missing = np.arange(len(edges))
        else:
            at = find(self.ids[rank], edges[end].to_numpy(writable=True))
            missing = np.flatnonzero(at < 0)
        if len(missing):
            r = edges.row(int(missing[0]), named=True)
            raise GraphError(
                f"edge {r['src']} -> {r['dst']} (rule {r['rule']}): rank {rank} has no op with op_id {r[end]} "
                f"({len(missing)} such edge(s)); drop the edge, or write the op and its rank."
            )
        rows: Int64s = self.begins[rank] + (self.order[rank][at] if rank in self.order else at)
        return rows


def _path(folder: Path, what: str, rank: int) -> Path:
    return folder / f"{what}-{rank:05}.parquet"


def _checksum(path: Path) -> int:
    with path.open("rb") as file:
        return _checksum_in(file)


def _checksum_in(file: IO[bytes]) -> int:
    """Of all of an open file, of which the next reader is at the beginning again."""
    checksum = 0
    while piece := file.read(1 << 20):
        checksum = isal_zlib.crc32(piece, checksum)
    file.seek(0)
    return checksum


def _checksum_of(ranks: pl.DataFrame) -> str:
    return f"{isal_zlib.crc32(repr(ranks.rows()).encode()):08x}"


def _seals(kept: Path, ranks: pl.DataFrame) -> dict[str, object]:
    return {"ranks": _checksum_of(ranks), **{file: _checksum(kept / file) for file in _SEALED}}


def _seal(kept: Path, ranks: pl.DataFrame) -> None:
    with whole(kept / SEALS, RunError) as part:
        part.write_text(json.dumps(_seals(kept, ranks)))


def _is_sealed(kept: Path, ranks: pl.DataFrame) -> bool:
    """Whether a plan is of these ranks, and as it was written."""
    try:
        said = json.loads((kept / SEALS).read_bytes())
        return bool(said == _seals(kept, ranks))
    except (OSError, ValueError, RecursionError):
        return False


def _kept_plan(kept: Path) -> Plan:
    return Plan(groups=read_table(kept / "groups.parquet"), **{name: load(kept, name) for name in _ARRAYS})


def write_rank(folder: str | Path, rank: int, ops: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """Write one rank of a job: its ops and the edges that lead to them. Workers may write one each.

    Parameters
    ----------
    folder
        The job's; it must be there.
    rank
        Whose ops these are.
    ops
        `schema.OPS`, with op ids that differ within the rank.
    edges
        `EDGES_TO_RANK`.

    Returns
    -------
    DataFrame
        The row of `RANKS` that `finish_job` takes.

    Raises
    ------
    SchemaError
        A table lacks a column, has one of the wrong type, or repeats an op id.
    GraphError
        There is no op, one is of another rank or has no duration >= 0, or an edge has no lag >= 0.
    """
    require_whole(-(2**31), 2**31 - 1, rank=rank)
    folder, ops, edges = named(folder, RunError), OPS.check(ops), EDGES_TO_RANK.check(edges)
    total_ns = check_times(ops, edges)
    if ops.is_empty() or not (ops["rank"] == rank).all():
        raise GraphError(f"the table of rank {rank} has no op, or ops of other ranks; give those of this rank alone.")
    if edges["src_rank"].has_nulls():
        raise GraphError(f"row {edges['src_rank'].is_null().arg_max()} of the edges to rank {rank} has no src_rank.")
    checksums = {}
    for what, table in (("ops", ops), ("edges", edges)):
        path = _path(folder, what, rank)
        with whole(path, RunError) as part:
            (folder / "ranks.parquet").unlink(missing_ok=True)  # no job until all is written again
            write_parquet(table, part, compression="lz4")
        checksums[f"{what}_crc"] = pl.lit(_checksum(path), pl.UInt32)
    row = ops.select(
        rank=pl.lit(rank, pl.Int32),
        ops=pl.len().cast(pl.Int64),
        edges=pl.lit(len(edges), pl.Int64),
        start_ns=pl.col("start_ns").min(),
        step=pl.col("step").filter(pl.col("kind") != "join").max(),
        on_device=ON_DEVICE.any(),
        total_ns=pl.lit(total_ns, pl.Float64),
        **checksums,
    )
    return RANKS.check(row)


def finish(folder: Path, ranks: Iterable[pl.DataFrame], report: pl.DataFrame) -> Files:
    """Make a job of what `write_rank` wrote and returned, and of a report on it."""
    require_kinds(ranks=(ranks, Iterable))
    table = RANKS.check(pl.concat([RANKS.empty(), *map(RANKS.check, ranks)]).sort("rank"))
    if table.is_empty():
        raise GraphError("a job has at least one rank; there is none.")
    for what in ("ops", "edges"):
        if (count := table[what].sum()) > MOST:
            raise GraphError(f"the ranks have {count:,} {what}, of at most {MOST:,}: replay fewer of them.")
    check_total(float(table["total_ns"].sum()))
    _remove_others(folder, table)
    with whole(folder / "report.parquet", RunError) as part:
        write_parquet(report, part)
    with whole(folder / "ranks.parquet", RunError) as part:
        about = {_CRC: _checksum_of(table), _REPORT_CRC: str(_checksum(folder / "report.parquet"))}
        write_parquet(table, part, metadata=about)
    return Files(folder, table)


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A folder to make a job in, which takes the place of that in `folder` when all of it is made."""
    there = folder.exists()
    folder_for(folder, RunError)
    try:
        with scratch(folder, RunError) as made:
            yield made
            with told(folder, RunError), lock(folder, wait=True):  # or two jobs would be mixed
                _replace(folder, made)
    except BaseException:
        with suppress(OSError):
            if not there:
                folder.rmdir()
        raise


def _replace(folder: Path, made: Path) -> None:
    ranks = _read(made).ranks
    (folder / "ranks.parquet").unlink(missing_ok=True)  # no job until all is there
    for path in sorted(made.iterdir(), key=lambda path: path.name == "ranks.parquet"):
        path.replace(folder / path.name)
    _remove_others(folder, ranks)
    sync(folder)


def _remove_others(folder: Path, ranks: pl.DataFrame) -> None:
    """Remove what earlier jobs left: of other ranks, plans and times; nothing that none of them wrote."""
    own = {_path(folder, what, rank) for rank in ranks["rank"] for what in ("ops", "edges")}
    for path in files_in(folder, RunError):
        if _OF_RANK.fullmatch(path.name) and path not in own:
            _remove_file(path)
    for kept in (folder / "plan", folder / "replayed"):
        for name in (*_SEALED, SEALS, *(f"{name}.npy" for name in TIMES)):
            _remove_file(kept / name)
        with suppress(OSError):  # it is not there, or holds what is somebody else's
            kept.rmdir()


def _remove_file(path: Path) -> None:
    with told(path, RunError), suppress(FileNotFoundError, NotADirectoryError):
        if not path.is_dir():  # which no job has under such a name
            path.unlink()


def found(folder: Path) -> Files:
    """The job in a folder; of one that is being replaced, the new one."""
    try:
        with lock(folder, wait=True, shared=True):
            return _read(folder)
    except OSError as error:
        raise RunError(f"{folder} has no job ({error}): save_job(graph, folder) writes one.") from error


def _read(folder: Path) -> Files:
    path = folder / "ranks.parquet"
    try:
        ranks = RANKS.check(read_table(path))
        with panics_told(), path.open("rb") as file:  # of a path polars would take brackets for a pattern
            crc = pl.read_parquet_metadata(file).get(_CRC)
    except (OSError, pl.exceptions.PolarsError, SchemaError, TraceError) as error:
        raise RunError(f"{folder} has no job ({error}): save_job(graph, folder) writes one.") from error
    if crc != _checksum_of(ranks):
        raise RunError(f"{path} has changed since the job was written: write the job anew.")
    for rank in ranks["rank"]:
        for what in ("ops", "edges"):
            if not (file_of_rank := _path(folder, what, rank)).exists():
                raise RunError(f"{file_of_rank} is missing, but the job has that rank: write the job anew.")
    return Files(folder, ranks)
