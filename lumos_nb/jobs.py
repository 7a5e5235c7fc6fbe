"""Jobs of more ranks than a memory holds: a graph cut by rank, on disk, replayed and broken down as `Graph`s are.

A folder has, of each rank, a table of its ops and one of the edges that lead to them; the join of a collective may
belong to any of its ranks. What a replay must hold at once is numbers alone (`Plan`, 20 bytes an op and 17 an edge);
names and all else that is known of an op stay on disk and pass through memory one rank at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl

from lumos_nb import _job_files
from lumos_nb._job_files import EDGES_TO_RANK, Files, Times, write_rank
from lumos_nb._replay_kernels import last_ops
from lumos_nb._replay_plan import rows_of_ends
from lumos_nb.critical_path import composition_of, path_of, slack_of, step_bounds
from lumos_nb.display import Shown, format_ns, how_many
from lumos_nb.errors import GraphError, RunError, named
from lumos_nb.executors import spread
from lumos_nb.graph import Graph
from lumos_nb.partition import breakdown_of
from lumos_nb.repairs import REPORT
from lumos_nb.schema import EDGES, OPS, require

_ON_PATH = {c: OPS.columns[c] for c in ("op_id", "rank", "lane", "kind", "name", "start_ns", "dur_ns")}
_TAKEN = {c: EDGES.columns[c] for c in ("rule", "evidence", "lag_ns")}


@dataclass(frozen=True, repr=False)
class Job(Shown):
    """A graph of many ranks in a folder.

    Attributes
    ----------
    files
        What is in the folder.
    """

    files: Files

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._caption(), self.ranks)]

    def _caption(self) -> str:
        ops, edges = (f"{self.ranks[what].sum():,} {what}" for what in ("ops", "edges"))
        return f"Job of {how_many(len(self.ranks), 'rank')}: {ops}, {edges}, in {self.files.folder} (see .replay())"

    def moved(self, folder: Path) -> Job:
        """The same job, now that it lies in `folder`; not what another writer may have put there since."""
        return Job(Files(folder, self.files.ranks))

    @property
    def ranks(self) -> pl.DataFrame:
        """One row a rank: how many ops and edges it has, when it starts, its last step, whether it is `on_device`."""
        return self.files.ranks.drop("ops_crc", "edges_crc")

    @property
    def report(self) -> pl.DataFrame:
        """What was assumed while the job was made, as in `Graph.report`, and what was not read for it."""
        return self.files.report()

    def ops_of(self, rank: int) -> pl.DataFrame:
        """The op table of a rank, as in `Graph.ops`."""
        return self.files.table("ops", rank)

    def edges_to(self, rank: int) -> pl.DataFrame:
        """The edges that lead to a rank's ops, as in `Graph.edges`, with `src_rank`: op ids differ within a rank."""
        return self.files.table("edges", rank)

    def replay(self) -> ReplayedJob:
        """When every op of every rank runs: what `ln.replay` says of a graph, to the nanosecond.

        The first replay puts the numbers of all ranks together and keeps them in the folder, as it does when ops run.
        Of several ops that bind equally the critical path goes by that of the lowest rank, then row.

        Raises
        ------
        GraphError
            An edge leads from an op or a rank that is not there, no op ends a step, or the edges make a cycle.

        Examples
        --------
        >>> result = save_job(graph, "job").replay()
        >>> result.step_ns, result.composition
        """
        plan = self.files.plan()
        start = plan.starts()
        end = start + plan.dur_ns
        first_ns = self.ranks["start_ns"].min()
        origin_ns = first_ns if isinstance(first_ns, int) else 0
        lasts = last_ops(end, plan.group, plan.row, len(plan.groups))
        last, before = step_bounds(plan, end, lasts)
        step_end = int(end[last])
        ops_at, edges_at = (
            partial(self.files.rows, "ops", columns=_ON_PATH),
            partial(self.files.rows, "edges", columns=_TAKEN),
        )
        path = path_of(plan, start, last, origin_ns, ops_at, edges_at)
        slack_ns = slack_of(plan, end, step_end)
        start_ns = np.empty_like(start)
        start_ns[plan.row] = origin_ns + start
        return ReplayedJob(
            job=self,
            times=Times.saved(self.files, start_ns, slack_ns),
            origin_ns=origin_ns,
            step_ns=step_end - before,
            step_ends=plan.groups.with_columns(end_ns=origin_ns + end[lasts]),
            makespan_ns=int(end.max()),
            path=path,
            composition=composition_of(path, origin_ns + before, origin_ns + step_end),
            composition_from_origin=composition_of(path, origin_ns, origin_ns + step_end),
        )


@dataclass(frozen=True, repr=False)
class ReplayedJob(Shown):
    """A replayed job: the attributes of `Result`, but ops by rank.

    Attributes
    ----------
    job
        What was replayed.
    times
        When each op runs, and its slack, in files.
    origin_ns, step_ns, step_ends, makespan_ns, path, composition, composition_from_origin
        As in `Result`.
    """

    job: Job
    times: Times
    origin_ns: int
    step_ns: int
    step_ends: pl.DataFrame
    makespan_ns: int
    path: pl.DataFrame
    composition: pl.DataFrame
    composition_from_origin: pl.DataFrame

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._caption(), self.composition)]

    def _caption(self) -> str:
        on = how_many(len(self.job.ranks), "rank")
        return f"Step of {format_ns(self.step_ns)} on {on}: its critical path, {len(self.path):,} ops"

    def ops_of(self, rank: int) -> pl.DataFrame:
        """The ops of a rank with when they run, their slack and whether they are critical: as in `Result.ops`."""
        ops = self.times.of(self.job.files, rank)
        path = self.path.filter(rank=rank)["op_id"]
        return ops.with_columns(critical=pl.col("op_id").is_in(path.implode()))

    def breakdown(self, *, by: str = "rank", executor: Executor | str | None = None) -> pl.DataFrame:
        """Where the step's time goes on each rank: what `ln.breakdown` says of a replayed graph.

        Parameters
        ----------
        by
            As of `ln.breakdown`.
        executor
            Takes a rank each (`executors.spread`); workers elsewhere see the folder under the same path.

        Returns
        -------
        DataFrame
            As of `ln.breakdown`.

        Examples
        --------
        >>> save_job(graph, "job").replay().breakdown(by="phase")
        """
        files, ranks = self.job.files, self.job.ranks
        one = partial(_broken_down, files, self.times, by, ranks.select(pl.max("step")).item(), self._first_ns())
        return pl.concat(spread(executor, one, ranks["rank"].to_list()))

    def _first_ns(self) -> int | None:
        """When the first op on a rank's own lanes starts: mostly one of the first rank does so at the origin."""
        earliest: int | None = None
        for rank in self.job.ranks["rank"]:
            own = self.times.of(self.job.files, rank).filter(pl.col("kind") != "join")
            starts_ns = [*own.select(pl.min("start_ns")).to_series().drop_nulls()]
            earliest = min(starts_ns if earliest is None else [*starts_ns, earliest], default=None)
            if earliest == self.origin_ns:
                break
        return earliest


def _broken_down(files: Files, times: Times, by: str, step: int, begin_ns: int | None, rank: int) -> pl.DataFrame:
    return breakdown_of(times.of(files, rank), by, last_step=step, begin_ns=begin_ns)


def finish_job(folder: str | Path, ranks: Iterable[pl.DataFrame], report: pl.DataFrame | None = None) -> Job:
    """Make a job of what `write_rank` wrote and returned, with a report as `Graph` has it.

    Raises
    ------
    SchemaError
        A rank is there twice.
    GraphError
        There is no rank, or there are more ops or edges, or longer ones, than can be numbered.
    """
    told = pl.DataFrame(schema=REPORT) if report is None else report
    return Job(_job_files.finish(named(folder, RunError), ranks, told))


def open_job(folder: str | Path) -> Job:
    """Open a job that was written before.

    Raises
    ------
    RunError
        The folder has no job, or one of which a file is missing or has changed since it was written.

    Examples
    --------
    >>> written = save_job(graph, "job")
    >>> open_job("job").replay().breakdown()
    """
    return Job(_job_files.found(named(folder, RunError)))


def save_job(graph: Graph, folder: str | Path) -> Job:
    """Write a graph as a job.

    Parameters
    ----------
    graph
        Every op has a rank.
    folder
        Made where it is not there; a job in it is replaced.

    Raises
    ------
    GraphError
        An op has no rank, or an edge names an op that is not there.

    Examples
    --------
    >>> save_job(graph, "job").replay().step_ns == replay(graph).step_ns
    True
    """
    require(graph, "edges")
    ops, edges = OPS.check(graph.ops), EDGES.check(graph.edges)
    if ops["rank"].has_nulls():
        raise GraphError(f"row {ops['rank'].is_null().arg_max()} of the ops has no rank; a job has its ops by rank.")
    folder = named(folder, RunError)
    src, dst = rows_of_ends(ops, edges)
    edges = edges.with_columns(src_rank=ops["rank"].gather(src), dst_rank=ops["rank"].gather(dst))
    with _job_files.replaced(folder) as made:
        ranks = [
            write_rank(made, rank, ops.filter(rank=rank), edges.filter(dst_rank=rank).select(*EDGES_TO_RANK.columns))
            for rank in ops["rank"].unique().sort()
        ]
        job = finish_job(made, ranks, graph.report if graph.report.width else None)
    return job.moved(folder)
