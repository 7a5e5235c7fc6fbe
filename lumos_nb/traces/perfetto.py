"""A step, or a run, as a file for ui.perfetto.dev or chrome://tracing, in Chrome's JSON trace format.

Measured and replayed ranks are processes side by side on one clock, lanes are threads, the critical path is arrows. A
viewer draws what lies in a thread as a stack of nested slices and drops those that merely overlap; rows of a lane that
do so go to a further thread of it. Its ids start at 1, for process and thread 0 mean "idle" to Perfetto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import msgspec
import numpy as np
import polars as pl

from lumos_nb.errors import TraceError, named
from lumos_nb.schema import EVENTS, OPS, require
from lumos_nb.whole_files import whole_file

_BATCH = 50_000
_ROLES = ("", "measured", "replayed", "trace")
_PROCESS = ("rank", "role")
_THREAD = ("lane", "strand")
_PLACED = (*_PROCESS, *_THREAD, "pid", "tid", "category", "title", "start_ns", "end_ns")
"""Columns that say where a slice is and what it looks like; the others become its arguments, nulls left out."""


class HasOps(Protocol):
    """A `Graph`, or anything else with an op table."""

    @property
    def ops(self) -> pl.DataFrame:
        """`schema.OPS`, perhaps with columns beyond it."""


@runtime_checkable
class Replayed(HasOps, Protocol):
    """A `Result`: replayed ops, the graph of the measured ones, and the critical path through the replayed."""

    @property
    def graph(self) -> HasOps:
        """What was replayed."""

    @property
    def path(self) -> pl.DataFrame:
        """In time order: `op_id`, `path_ns` (0 where the path leaves an op at its start), `rule` that led to the op."""


@runtime_checkable
class HasEvents(Protocol):
    """A `Run`, or anything else with an event table."""

    @property
    def events(self) -> pl.DataFrame:
        """`schema.EVENTS`."""


class _Record(msgspec.Struct, omit_defaults=True, gc=False):
    """One entry of `traceEvents`."""

    ph: str
    name: str
    pid: int
    tid: int | None = None
    ts: float | None = None
    dur: float | None = None
    cat: str | None = None
    id: int | None = None
    bp: str | None = None
    args: Any = None


def write_perfetto(source: HasOps | HasEvents, path: str | Path, *, run: HasEvents | None = None) -> Path:
    """Write a step, or all that was recorded, for Perfetto or chrome://tracing.

    Every rank is a process, every lane a thread: CPU threads first, then streams. A slice has its op's kind as category
    and the columns of the op table as arguments. Waiting for the peers of a collective is a slice from the arrival to
    the lane's next op. Times are microseconds from `baseTimeNanoseconds`, the first start, exact to the ns.

    Parameters
    ----------
    source : Graph, Result or Run
        A graph gives processes "rank r". A result gives "rank r measured" and "rank r replayed", with the critical path
        as arrows between replayed slices, named after the rule by which one op waits for the other. A run gives "rank r
        trace".
    path
        A file, `*.json`, or `*.json.gz` to compress it. An existing file is replaced.
    run
        Adds "rank r trace": what the profiler recorded while the step ran, with call stacks, on the rank's own clock.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    TraceError
        No op has a start, or no event was recorded, so that there is nothing to draw; or the file cannot be written.

    Examples
    --------
    >>> write_perfetto(replay(graph), "step.json.gz")
    """
    path = named(path, TraceError)
    replayed = source if isinstance(source, Replayed) else None
    if replayed is not None:
        tables = [_slices(replayed.graph.ops, "measured"), _slices(replayed.ops, "replayed")]
    elif isinstance(source, HasEvents):
        tables = [_recorded(EVENTS.check(source.events))]
    else:
        require(source, "ops")
        tables = [_slices(source.ops, "")]
    times = pl.concat(table.select("start_ns", "end_ns") for table in tables)
    if times.is_empty():
        what = "no event was recorded" if isinstance(source, HasEvents) else "no op has a start"
        raise TraceError(f"{path} is not written: {what}. Replay a graph of a recorded step, and write the result.")
    if run is not None:
        require(run, "events")
        begin_ns, end_ns = times.select(pl.min("start_ns"), pl.max("end_ns")).row(0)
        while_it_ran = (pl.col("start_ns") + pl.col("dur_ns") >= begin_ns) & (pl.col("start_ns") <= end_ns)
        tables.append(_recorded(EVENTS.check(run.events).filter(while_it_ran)))
        times = pl.concat([times, tables[-1].select("start_ns", "end_ns")])
    zero_ns = times.select(pl.min("start_ns")).item()
    tables = [_disentangled(table) for table in tables]
    threads = _threads(tables)
    tables = [
        table.join(threads, on=[*_PROCESS, *_THREAD], nulls_equal=True, maintain_order="left") for table in tables
    ]
    records = chain(_names(threads), *(_drawn(table, zero_ns) for table in tables))
    if replayed is not None:
        records = chain(records, _arrows(replayed.path, tables[1], zero_ns))
    with whole_file(path, TraceError) as file:
        file.write(b'{"displayTimeUnit":"ns","baseTimeNanoseconds":%d,"traceEvents":[\n' % zero_ns)
        for n, batch in enumerate(_batches(records)):
            file.write(b",\n" * (n > 0) + msgspec.json.encode(batch)[1:-1])
        file.write(b"\n]}\n")
    return path


def _batches(records: Iterator[_Record]) -> Iterator[list[_Record]]:
    while batch := list(islice(records, _BATCH)):
        yield batch


def _slices(ops: pl.DataFrame, role: str) -> pl.DataFrame:
    """Ops that have a time, with waiting drawn, and the columns that say where; other columns are arguments."""
    lane = ["rank", "lane"]
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    ops = OPS.check(ops).drop_nulls(["start_ns", "dur_ns"]).sort("start_ns", maintain_order=True)
    waits = (pl.col("kind") == "event") & pl.col("collective").is_not_null()
    next_ns = pl.col("start_ns").shift(-1).over(lane)
    return ops.select(
        *lane,
        role=pl.lit(role),
        category=pl.when(waits).then(pl.lit("waiting")).otherwise("kind"),
        title=pl.when(waits).then(pl.format("wait for peers: {}", "collective")).otherwise(pl.coalesce("name", "kind")),
        start_ns="start_ns",
        end_ns=pl.when(waits).then(pl.max_horizontal(end_ns, next_ns)).otherwise(end_ns),
        stream=pl.when(pl.col("device").is_not_null()).then(pl.col("lane").str.extract(r":(\d+)$").cast(pl.Int64)),
        **{c: pl.col(c) for c in ops.columns if c not in (*_PLACED, "name", "dur_ns", "measured_start_ns")},
    ).with_columns(pl.when(pl.col(pl.Boolean)).then(pl.lit(True)))


def _recorded(events: pl.DataFrame) -> pl.DataFrame:
    """Events as slices."""
    thread, stream = pl.format("cpu:{}", "thread"), pl.format("gpu{}:{}", "device", "stream")
    return events.select(
        "rank", lane=pl.coalesce(thread, stream, pl.lit("none")), role=pl.lit("trace"), category="category",
        title="name", start_ns="start_ns", end_ns=pl.col("start_ns") + pl.col("dur_ns"), args="args",
    )  # fmt: skip


def _disentangled(slices: pl.DataFrame) -> pl.DataFrame:
    """Give each slice a `strand` of its lane in which slices nest or lie apart: 0 for nearly all."""
    slices = slices.sort(*_PROCESS, "lane", "start_ns", -pl.col("end_ns"), maintain_order=True)
    lanes = slices.group_by(*_PROCESS, "lane", maintain_order=True).agg("start_ns", "end_ns")
    strands = [k for start, end in lanes.select("start_ns", "end_ns").iter_rows() for k in _strands(start, end)]
    return slices.with_columns(strand=pl.Series(strands, dtype=pl.Int64))


def _strands(starts: list[int], ends: list[int]) -> Iterator[int]:
    """The first strand into which each slice fits; slices by start, the longer first."""
    open_ends: list[list[int]] = []
    for start, end in zip(starts, ends, strict=True):
        for strand, stack in enumerate(open_ends):
            while stack and stack[-1] <= start:
                stack.pop()
            if not stack or end <= stack[-1]:
                stack.append(end)
                yield strand
                break
        else:
            open_ends.append([end])
            yield len(open_ends) - 1


def _threads(tables: list[pl.DataFrame]) -> pl.DataFrame:
    """Number the processes and threads, in the order in which they are to be seen."""
    threads = pl.concat(table.select(*_PROCESS, *_THREAD) for table in tables).unique()
    lane = pl.col("lane")
    numbers = [lane.str.extract(pattern).cast(pl.Int64) for pattern in (r"^gpu(\d+)", r":(\d+)$")]
    order = ["rank", pl.col("role").cast(pl.Enum(_ROLES)), ~lane.str.starts_with("cpu"), *numbers, "lane", "strand"]
    threads = threads.sort(order, nulls_last=True)
    return threads.with_columns(pid=pl.struct(_PROCESS).rle_id().cast(pl.Int64) + 1, tid=pl.int_range(pl.len()) + 1)


def _names(threads: pl.DataFrame) -> Iterator[_Record]:
    """Metadata records: what processes and threads are called, and their order."""
    for rank, role, pid in threads.select(*_PROCESS, "pid").unique(maintain_order=True).iter_rows():
        name = f"{'all ranks' if rank is None else f'rank {rank}'} {role}".strip()
        yield _Record("M", "process_name", pid, args={"name": name})
        yield _Record("M", "process_sort_index", pid, args={"sort_index": pid})
    for lane, strand, pid, tid in threads.select(*_THREAD, "pid", "tid").iter_rows():
        yield _Record("M", "thread_name", pid, tid, args={"name": f"{lane} ({strand + 1})" if strand else lane})
        yield _Record("M", "thread_sort_index", pid, tid, args={"sort_index": tid})


def _drawn(slices: pl.DataFrame, zero_ns: int) -> Iterator[_Record]:
    """One record a slice, outer before inner."""
    columns = [c for c in slices.columns if c not in _PLACED]
    for batch in slices.iter_slices(_BATCH):
        ts = _microseconds(batch["start_ns"] - zero_ns)
        dur = _microseconds(batch["end_ns"] - batch["start_ns"])
        if "args" in columns:  # as the profiler wrote them
            args: Iterable[Any] = map(msgspec.Raw, batch["args"].fill_null("{}"))
        else:
            args = ({c: v for c, v in zip(columns, row, strict=True) if v is not None} for row in batch[columns].rows())
        place = (batch[c] for c in ("title", "pid", "tid", "category"))
        for name, pid, tid, category, at, length, arguments in zip(*place, ts, dur, args, strict=True):
            yield _Record("X", name, pid, tid, at, length, category, args=arguments)


def _arrows(path: pl.DataFrame, slices: pl.DataFrame, zero_ns: int) -> Iterator[_Record]:
    """Arrows from each op of the path to the next, past those of no length, which a viewer cannot tie an arrow to."""
    ops = slices.filter(pl.col("end_ns") > pl.col("start_ns"))
    hops = path.select("op_id", "path_ns", "rule").join(
        ops["op_id", "pid", "tid", "start_ns"], on="op_id", maintain_order="left"
    )
    # An arrow begins in the last ns of its op, for at the end the slice is closed.
    left_ns = _microseconds(hops["start_ns"] + (hops["path_ns"] - 1).clip(0) - zero_ns)
    reached_ns = _microseconds(hops["start_ns"] - zero_ns)
    rows = zip(hops["rule"], hops["pid"], hops["tid"], left_ns, reached_ns, strict=True)
    for n, ((_, pid, tid, left, _), (rule, to_pid, to_tid, _, reached)) in enumerate(pairwise(rows), start=1):
        yield _Record("s", rule, pid, tid, left, cat="critical_path", id=n)
        yield _Record("f", rule, to_pid, to_tid, reached, cat="critical_path", id=n, bp="e")


def _microseconds(ns: pl.Series) -> list[float]:
    """Times of fewer than 15 digits as floats that JSON writes as the exact decimals.

    A reader that multiplies by 1000 and cuts off the rest would take 0.6 % of them for 1 ns less, so that slices that
    touch would overlap, and Perfetto drops slices that overlap. Those times are the next float above.
    """
    exact = ns.to_numpy()
    us = exact / 1000
    us = np.where((us * 1000).astype(np.int64) < exact, np.nextafter(us, np.inf), us)
    return cast(list[float], us.tolist())
