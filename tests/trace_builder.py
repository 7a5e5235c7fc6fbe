"""Hand-made traces, written as calls on threads and work on streams. Times are in µs from a common zero."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from lumos_nb.critical_path import Result, replay
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.schema import EVENTS
from lumos_nb.traces.run import RANKS, REPORT, Run
from lumos_nb.waits import Sightings

ZERO_NS = 1_700_000_000_000_000_000  # as traces have it
MAIN, ENGINE = 1, 2
"""Threads: the one that runs the training loop, and autograd's."""


class Trace:
    """The events of one rank, added call by call.

    `host_us` and `device_us` are what this rank's clocks show too much; every time given is a true one.
    """

    def __init__(
        self, rank: int = 0, *, host_us: float = 0, device_us: float = 0, world_size: int | None = None
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.host_us, self.device_us = host_us, device_us
        self.rows: list[dict[str, Any]] = []
        self.correlations = 100

    def _add(self, category: str, name: str, start: float, end: float, **columns: Any) -> None:
        clock = self.host_us + (self.device_us if columns.get("device") is not None else 0)
        args = json.dumps(columns.pop("args", {}))
        row = {"rank": self.rank, "event_id": len(self.rows), "category": category, "name": name, "args": args}
        times = {"start_ns": ZERO_NS + round((start + clock) * 1000), "dur_ns": round((end - start) * 1000)}
        self.rows.append(row | times | columns)

    def _correlation(self, given: int | None) -> int:
        self.correlations += given is None
        return self.correlations if given is None else given

    def step(self, number: int, start: float, end: float, thread: int = MAIN) -> None:
        self._add("user_annotation", f"ProfilerStep#{number}", start, end, thread=thread)

    def op(self, name: str, start: float, end: float, thread: int = MAIN, **columns: Any) -> None:
        self._add("cpu_op", name, start, end, thread=thread, **columns)

    def annotation(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self._add("user_annotation", name, start, end, thread=thread)

    def call(self, name: str, start: float, end: float, thread: int = MAIN, correlation: int | None = None) -> int:
        """A runtime call; returns its correlation id."""
        correlation = self._correlation(correlation)
        self._add("cuda_runtime", name, start, end, thread=thread, correlation=correlation)
        return correlation

    def device(
        self, name: str, start: float, end: float, stream: int = 7, correlation: int | None = None, **columns: Any
    ) -> None:
        """Work on a stream, without the call that launched it."""
        category = columns.pop("category", "kernel")
        place = {"device": columns.pop("device", 0), "stream": stream, "correlation": correlation}
        self._add(category, name, start, end, **place, **columns)

    def launch(
        self,
        name: str,
        at: tuple[float, float],
        runs: tuple[float, float],
        stream: int = 7,
        thread: int = MAIN,
        call: str = "cudaLaunchKernel",
        **columns: Any,
    ) -> int:
        """A call during `at` and the work that it launched, which ran during `runs`."""
        correlation = self.call(call, *at, thread=thread)
        self.device(name, *runs, stream=stream, correlation=correlation, **columns)
        return correlation

    def copy(self, name: str, at: tuple[float, float], runs: tuple[float, float], **columns: Any) -> int:
        return self.launch(name, at, runs, call="cudaMemcpyAsync", category="gpu_memcpy", **columns)

    def record(self, start: float, end: float, thread: int = MAIN) -> int:
        return self.call("cudaEventRecord", start, end, thread)

    def wait_event(
        self, start: float, end: float, waits: tuple[int, int, int] | None = None, thread: int = MAIN
    ) -> int:
        """cudaStreamWaitEvent; `waits` (stream, stream waited for, the record's correlation) adds a cuda_sync row."""
        correlation = self.call("cudaStreamWaitEvent", start, end, thread)
        if waits is not None:
            stream, on, record = waits
            self.names("Stream Wait Event", start, end, correlation, stream, on, record)
        return correlation

    def names(
        self, kind: str, start: float, end: float, correlation: int, stream: int, on: int | None, record: int | None
    ) -> None:
        """A cuda_sync row: what a call of that correlation id waited for."""
        args = {"cuda_sync_kind": kind, "stream": stream, "wait_on_stream": on}
        args["wait_on_cuda_event_record_corr_id"] = record
        given = {key: value for key, value in args.items() if value is not None}
        self._add("cuda_sync", kind, start, end, device=0, stream=stream, correlation=correlation, args=given)


def run_of(*traces: Trace) -> Run:
    """The traces as one run, as `load_run` would give it."""
    events = pl.DataFrame([row for trace in traces for row in trace.rows], schema=dict(EVENTS.columns), orient="row")
    ranks = [{"rank": trace.rank, "world_size": trace.world_size} for trace in traces]
    return Run(events, pl.DataFrame(ranks, schema=RANKS), pl.DataFrame(schema=REPORT), {})


def recording_of(*traces: Trace) -> Recording:
    return Recording.of(run_of(*traces))


Body = Callable[[Trace, int, float], None]
"""Fills a trace with one step, of that number and from that time on."""

PERIOD = 1000
"""µs a step, where no test needs another."""


def repeated(body: Body, period: float = PERIOD, steps: int = 4, **options: Any) -> Trace:
    """A trace of `steps` profiled steps, numbered from 1 and `period` apart; `body(trace, step, start)` fills each."""
    trace = Trace(**options)
    for step in range(1, steps + 1):
        start = (step - 1) * period
        trace.step(step, start, start + period)
        body(trace, step, start)
    return trace


def graph_of(*traces: Trace, step: int | None = None) -> Graph:
    return build_graph(recording_of(*traces), step)


def second_step(body: Body) -> Graph:
    """Step 2 of 4, whose times are 1000 more than those that `body` gives."""
    return graph_of(repeated(body, PERIOD), step=2)


def waits(recording: Recording, step: int = 2) -> list[tuple[str, str | None, str | None, str, str]]:
    """Of every wait of a step: the call, the stream that waits, what for (op or stream), evidence and pattern."""
    found = Sightings(recording.ops, recording.records).waits(step, step)
    names = recording.ops.select("op_id", "name")
    named = found.join(names, on="op_id", how="left").join(
        names.rename({"op_id": "target", "name": "awaited"}), on="target", how="left"
    )
    awaited = pl.coalesce("awaited", "record_lane")
    return sorted(named.select("name", "lane", awaited, "evidence", "pattern").rows(), key=str)


def waits_of(body: Body) -> list[tuple[str, str | None, str | None, str, str]]:
    """`waits` of step 2 of 4."""
    return waits(recording_of(repeated(body, PERIOD)))


def scaled(graph: Graph, scales: Mapping[str, float] | None = None, **more: float) -> Graph:
    """The graph with durations multiplied by the scale of their name or kind."""
    scale = pl.lit(1.0)
    for word, factor in {**(scales or {}), **more}.items():
        scale = pl.when((pl.col("name") == word) | (pl.col("kind") == word)).then(factor).otherwise(scale)
    ops = graph.ops.with_columns((pl.col("dur_ns") * scale).round().cast(pl.Int64))
    return replace(graph, ops=ops)


def spans(source: Graph | Result, name: str, rank: int | None = None) -> list[tuple[float, float]]:
    """Start and end, in µs from zero, of every op of that name (or kind), in order; of a graph as it replays.

    What was going on before the step is asked for by its kind, "boundary".
    """
    result = replay(source) if isinstance(source, Graph) else source
    wanted = pl.col("kind") == name if name == "boundary" else (pl.col("name") == name) | (pl.col("kind") == name)
    ops = result.ops.filter(wanted & ((pl.col("kind") != "boundary") | (name == "boundary")))
    ops = ops.filter(pl.col("rank") == rank) if rank is not None else ops
    start = pl.col("start_ns") - ZERO_NS
    return ops.sort("start_ns").select(s=start / 1000, e=(start + pl.col("dur_ns")) / 1000).rows()


def step_us(graph: Graph) -> float:
    return replay(graph).step_ns / 1000


def write_kineto(trace: Trace, path: Path) -> Path:
    """The trace as the file that the profiler would have written."""
    events = []
    for row in trace.rows:
        given = {"device": "device", "stream": "stream", "correlation": "correlation", "sequence": "Sequence number"}
        args = {key: row[column] for column, key in given.items() if row.get(column) is not None}
        place = (row["device"], row["stream"]) if row.get("device") is not None else (4711, row["thread"])
        times = {"ts": (row["start_ns"] - ZERO_NS) / 1000, "dur": row["dur_ns"] / 1000}
        args |= json.loads(row["args"])
        events.append(
            {"ph": "X", "cat": row["category"], "name": row["name"], "pid": place[0], "tid": place[1], "args": args}
            | times
        )
    info = {"rank": trace.rank, "world_size": trace.world_size or 1}
    whole = {"schemaVersion": 1, "baseTimeNanoseconds": ZERO_NS, "distributedInfo": info, "traceEvents": events}
    path.write_text(json.dumps(whole))
    return path
