"""A job in a folder: tables of each rank's ops and edges, and the plan that is made of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb._replay_kernels import Int32s, Int64s, find
from lumos_nb._replay_plan import ON_DEVICE, Plan, check_groups, check_times, check_total, step_groups
from lumos_nb.errors import GraphError, InputError, RunError
from lumos_nb.schema import EDGES, OPS, TableSchema, panics_told
from lumos_nb.whole_files import whole

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
    },
    keys=("rank",),
)
"""What a job knows of its ranks without reading their ops."""

EDGES_TO_RANK = TableSchema("edge", {"src_rank": pl.Int32(), **EDGES.columns})
"""Edges that lead to the ops of a rank, each with the rank of its source."""

MOST = 2**31 - 1
"""Ops, or edges, that a plan can number."""

_ARRAYS = [field.name for field in fields(Plan) if field.name != "groups"]


class Files:
    """The files of a job: its folder, and what `RANKS` says of its ranks."""

    def __init__(self, folder: Path, ranks: pl.DataFrame) -> None:
        self.folder, self.ranks = folder, ranks

    def table(self, what: str, rank: int, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """The "ops" of a rank, or the "edges" that lead to them."""
        if not hasattr(rank, "__index__") or rank not in self.ranks["rank"]:
            raise InputError(f"the job has no rank {rank!r}; it has {len(self.ranks)}, see .ranks.")
        path = _path(self.folder, what, rank)
        try:
            with panics_told():
                table = pl.read_parquet(path, columns=None if columns is None else list(columns))
        except (OSError, pl.exceptions.PolarsError) as error:
            raise RunError(f"{path} cannot be read ({error}): write the job anew.") from error
        if len(table) != (count := self.ranks.row(by_predicate=pl.col("rank") == rank, named=True)[what]):
            raise RunError(f"{path} has {len(table):,} rows, but the job {count:,} {what} of that rank: write it anew.")
        return table

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
        if not (kept / "groups.parquet").exists():
            plan = self._planned()
            save(kept, **{name: getattr(plan, name) for name in _ARRAYS})
            with whole(kept / "groups.parquet") as part:
                plan.groups.write_parquet(part)
        arrays = {name: load(kept, name) for name in _ARRAYS}
        try:
            with panics_told():
                groups = pl.read_parquet(kept / "groups.parquet")
        except (OSError, pl.exceptions.PolarsError) as error:
            raise RunError(f"{kept} cannot be read ({error}): delete it, and replay the job again.") from error
        if {*groups.columns} != {"rank", "step"} or not len(groups) == len(groups.drop_nulls()) > arrays["group"].max():
            raise RunError(f"{kept / 'groups.parquet'} is not of this plan: delete {kept}, and replay the job again.")
        return Plan(groups=groups, **arrays)

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
    ops, edges = OPS.check(ops), EDGES_TO_RANK.check(edges)
    total_ns = check_times(ops, edges)
    if ops.is_empty() or not (ops["rank"] == rank).all():
        raise GraphError(f"the table of rank {rank} has no op, or ops of other ranks; give those of this rank alone.")
    if edges["src_rank"].has_nulls():
        raise GraphError(f"row {edges['src_rank'].is_null().arg_max()} of the edges to rank {rank} has no src_rank.")
    (Path(folder) / "ranks.parquet").unlink(missing_ok=True)  # no job until all is written again
    for what, table in (("ops", ops), ("edges", edges)):
        with whole(_path(Path(folder), what, rank)) as part:
            table.write_parquet(part, compression="lz4")
    row = ops.select(
        rank=pl.lit(rank, pl.Int32),
        ops=pl.len().cast(pl.Int64),
        edges=pl.lit(len(edges), pl.Int64),
        start_ns=pl.col("start_ns").min(),
        step=pl.col("step").filter(pl.col("kind") != "join").max(),
        on_device=ON_DEVICE.any(),
        total_ns=pl.lit(total_ns, pl.Float64),
    )
    return RANKS.check(row)


def finish(folder: Path, ranks: Iterable[pl.DataFrame]) -> Files:
    """Make a job of what `write_rank` wrote and returned."""
    table = RANKS.check(pl.concat([RANKS.empty(), *ranks]).sort("rank"))
    if table.is_empty():
        raise GraphError("a job has at least one rank; there is none.")
    for what in ("ops", "edges"):
        if (count := table[what].sum()) > MOST:
            raise GraphError(f"the ranks have {count:,} {what}, of at most {MOST:,}: replay fewer of them.")
    check_total(float(table["total_ns"].sum()))
    for made in ("plan", "replayed"):  # of what was there before
        shutil.rmtree(folder / made, ignore_errors=True)
    with whole(folder / "ranks.parquet") as part:
        table.write_parquet(part)
    return Files(folder, table)


def found(folder: Path) -> Files:
    """The job in a folder."""
    try:
        with panics_told():
            ranks = RANKS.check(pl.read_parquet(folder / "ranks.parquet"))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise RunError(f"{folder} has no job ({error}): save_job(graph, folder) writes one.") from error
    if ranks.drop_nulls().height < ranks.height:
        raise RunError(f"{folder / 'ranks.parquet'} lacks numbers of a rank: write the job anew.")
    for rank in ranks["rank"]:
        for what in ("ops", "edges"):
            if not (path := _path(folder, what, rank)).exists():
                raise RunError(f"{path} is missing, but the job has that rank: write the job anew.")
    return Files(folder, ranks)


def save(folder: Path, **arrays: NDArray[Any]) -> None:
    """Write arrays, a file each."""
    folder.mkdir(exist_ok=True)
    for name, array in arrays.items():
        with whole(folder / f"{name}.npy") as part, part.open("wb") as file:
            np.save(file, array)


def load(folder: Path, name: str) -> NDArray[Any]:
    """An array in a file, of which only what is looked at is read; what is written to it stays in memory."""
    path = folder / f"{name}.npy"
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="c")
    except (OSError, EOFError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}): delete {folder}, and replay the job again.") from error
    return array
