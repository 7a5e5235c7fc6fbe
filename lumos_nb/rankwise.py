"""From traces to a job, a rank at a time: no more than the events of one are in memory, and what ranks tell each other.

Each pass does what `Recording.of` and `build_graph` do with all ranks at once, by the same functions: cut events into
ops; put them on one clock; look for the step's waits, asking what other ranks say of a call site; and lay out rows and
edges. Between passes stand the tables of all ranks: communication ops, when steps begin and end, call sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import polars as pl

from lumos_nb import lanes
from lumos_nb._job_files import EDGES_TO_RANK, replaced, write_rank
from lumos_nb.cut_ranks import Clocked, bases_of, counted_from, on_one_clock, own_rows, read_again, read_ranks
from lumos_nb.errors import RunError, named, require_flags
from lumos_nb.executors import spread
from lumos_nb.graph import AllSteps, Shared, finished, rows_and_edges
from lumos_nb.jobs import Job, finish_job
from lumos_nb.repetitions import asked, pooled
from lumos_nb.step_times import StepTimes
from lumos_nb.waits import ROUNDS, SEEN, Sightings, chosen_waits
from lumos_nb.whole_files import scratch


def load_job(
    path: str | Path | Sequence[str | Path],
    folder: str | Path,
    *,
    step: int | None = None,
    executor: Executor | str | None = None,
    cache: bool = True,
) -> Job:
    """Read the traces of a run and write the graph of one step as a job, a rank at a time.

    What `save_job(build_graph(load_run(path), step), folder)` gives, where the events of all ranks are more than a
    memory holds: replayed, it is the same to the nanosecond. Op ids differ from those of the graph. That the ranks'
    traces contradict each other (a cycle) is only found by the first replay.

    Parameters
    ----------
    path, cache
        As of `load_run`. Of a file that holds several ranks all are read at once.
    folder
        Of the job; made where it is not there. A job in it is replaced when all of the new one is made. Until then
        that, and the ops of all steps, lie in it under names that begin with a dot.
    step
        As of `build_graph`.
    executor
        Takes a rank each (`executors.spread`); workers elsewhere see traces and folder under the same paths.

    Returns
    -------
    Job
        `report` says what was not read, and what was assumed.

    Raises
    ------
    RunError, TraceError
        As `load_run`; or the folder cannot be written.
    GraphError
        As `build_graph`, but for cycles over several ranks.
    ExecutorError
        As `executors.spread`.

    Examples
    --------
    >>> job = load_job("runs/gpt", "build/job", step=3)
    >>> job.replay().step_ns
    """
    require_flags(cache=cache)
    folder = named(folder, RunError)
    with replaced(folder) as made, scratch(folder, RunError) as cut:
        ranks, read = read_ranks(path, cut, executor, cache=cache)
        clocked, told = on_one_clock(ranks, read, executor)
        bases = bases_of([one.ops for one in clocked])
        comm = pl.concat(counted_from(base, one.comm) for base, one in zip(bases, clocked, strict=True))
        times = StepTimes(pl.concat([one.extents for one in clocked]), read.steps)
        step = times.default() if step is None else times.known(step)
        shared = Shared.of(step, comm, times, read.world_size, {}, cuda=any(one.cuda for one in clocked))
        answers = _answers(clocked, step, executor)
        built = [*spread(executor, partial(_build, made, answers), _parts(clocked, comm, shared))]
        report = pl.concat([read.report, told, *(one.report for one in clocked), *(report for _, report in built)])
        job = finish_job(made, [row for row, _ in built if row is not None], _summed(report))
    return job.moved(folder)


def _summed(report: pl.DataFrame) -> pl.DataFrame:
    """What each rank reports without naming one, added up."""
    by = ["what", "rank", "detail"]
    rows = report.group_by(by, maintain_order=True).agg(
        pl.col("count").sum(), pl.when(pl.col("time_ns").is_not_null().any()).then(pl.col("time_ns").sum())
    )
    return rows.select("what", "rank", "count", "time_ns", "detail")


Answers = list[list[pl.DataFrame]]
"""What all ranks said to each of `Sightings.searches`, in turn."""


def _answers(clocked: list[Clocked], step: int, executor: Executor | str | None) -> Answers:
    """What all ranks say to each other in search for the step's waits."""
    answers: Answers = []
    files = [(one.rank, one.files) for one in clocked]
    for _ in range(ROUNDS):
        of_ranks = [*spread(executor, partial(_ask, step, answers), files)]
        answers = answers or [[] for _ in of_ranks[0]]
        for known, tables in zip(answers, zip(*of_ranks, strict=True), strict=True):
            known += [pooled(said)] if (said := [table for table in tables if table is not None]) else []
    return answers


def _ops_of(rank: int, path: Path, columns: list[str] | None = None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The ops of a rank, or some of their columns, and its synchronisation records."""
    records = read_again(path.with_suffix(".records"))
    return read_again(path, columns), records.with_columns(rank=pl.lit(rank, pl.Int32))


def _ask(step: int, answers: Answers, files: tuple[int, Path]) -> list[pl.DataFrame | None]:
    """What a rank says next in each search; None where it ends."""
    asking = Sightings(*_ops_of(*files, SEEN)).searches(step, step)
    return [asked(search, known)[0] for search, known in zip(asking, answers or repeat([]), strict=False)]


class _Part(NamedTuple):
    """What a rank's part of the graph is built from, besides its ops."""

    rank: int
    files: Path
    shared: Shared
    arrivals: pl.DataFrame
    """Of other ranks at joins that stand with this one: `match`, `rank`, `op_id` of that rank."""


def _parts(clocked: list[Clocked], comm: pl.DataFrame, shared: Shared) -> list[_Part]:
    counts = [one.ops for one in clocked]
    bases = bases_of(counts)
    of = pl.DataFrame(
        {"rank": [one.rank for one in clocked], "base": bases}, schema={"rank": pl.Int32, "base": pl.Int64}
    )
    here = comm.filter(pl.col("step") == shared.step).join(of, on="rank", maintain_order="left")
    here = here.select("match", "rank", pl.col("op_id") - pl.col("base"))
    meetings = here.join(shared.joins.select("match", owner="rank"), on="match", maintain_order="left")
    at, foreign = meetings.partition_by("rank", as_dict=True), meetings.filter(pl.col("rank") != pl.col("owner"))
    arrivals = foreign.partition_by("owner", as_dict=True)
    parts = []
    for one, transfers in zip(clocked, own_rows(shared.transfers, bases, counts), strict=True):
        joins = shared.joins.join(at.get((one.rank,), meetings.clear()), on="match", how="semi")
        starts = shared.starts.filter(rank=one.rank)
        own = shared._replace(joins=joins, transfers=transfers, starts=starts)
        parts.append(_Part(one.rank, one.files, own, arrivals.get((one.rank,), foreign.clear())))
    return parts


def _build(folder: Path, answers: Answers, part: _Part) -> tuple[pl.DataFrame | None, pl.DataFrame]:
    """Write a rank's part of the graph; what `write_rank` says of it (None: it has none), and the report."""
    (ops, records), step = _ops_of(part.rank, part.files), part.shared.step
    searches = Sightings(ops, records).searches(step, step)
    found = [asked(search, known)[1] for search, known in zip(searches, answers, strict=True)]
    waits = chosen_waits(step, [table for table in found if table is not None])
    every = AllSteps(ops, records, cuda=part.shared.cuda)
    rows, edges, report = rows_and_edges(every, waits, part.shared)
    graph = finished(rows, edges, step, report, every.queue_sizes)
    ids, ranks, (src, dst) = rows["id"].cast(pl.Int64), rows["rank"], (graph.edges["src"], graph.edges["dst"])
    ends = {
        "src_rank": ranks.gather(src),
        "dst_rank": ranks.gather(dst),
        "src": ids.gather(src),
        "dst": ids.gather(dst),
    }
    own = graph.edges.with_columns(**ends).filter(dst_rank=part.rank).select(*EDGES_TO_RANK.columns)
    arriving = part.arrivals.select(
        src_rank="rank", src=lanes.row_id("op_id", lanes.ARRIVAL), dst=-1 - pl.col("match"), lag_ns=pl.lit(0, pl.Int64),
        from_start=pl.lit(value=False), rule=pl.lit("collective"), evidence=pl.lit("exact"), hard=pl.lit(value=True),
    )  # fmt: skip
    mine = graph.ops.with_columns(op_id=ids).filter(rank=part.rank)
    if mine.is_empty():
        return None, report
    return write_rank(folder, part.rank, mine, pl.concat([own, arriving])), report
