"""Speed, each figure beside something measured in the same run: `python -m benchmarks.bench` writes results.json."""

from __future__ import annotations

import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import (
    TRACES,
    bench_chakra,
    bench_execution,
    bench_graph,
    bench_load,
    bench_panels,
    bench_replay,
    bench_search,
)
from benchmarks.rows import RESULTS, Row, record_timed
from lumos_nb import datasets
from lumos_nb.critical_path import replay
from lumos_nb.graph import Recording, build_graph
from lumos_nb.traces.run import load_run

LARGEST = "hta/df_index_resolver"
REPEATS = 3


def best(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Shortest of several wall times, in seconds: the others hold what else the machine did."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def pipeline_rows(folder: Path) -> Iterator[Row]:
    """From trace to replayed graph, on a run of one rank."""
    run = load_run(folder, cache=False)
    events = int(run.ranks["events"].sum())
    packed = [path.read_bytes() for path in map(Path, run.ranks["path"])]
    inflate_s = best(lambda: [zlib.decompress(data, 47) for data in packed if data[:2] == b"\x1f\x8b"])
    load_s = best(lambda: load_run(folder, cache=False))
    recording = Recording.of(run)
    ops_s = best(lambda: Recording.of(run))
    graph = build_graph(recording)
    graph_s = best(lambda: build_graph(replace(recording)))  # without what it found for earlier graphs
    replay_s = best(lambda: replay(graph))
    note = f"{folder.name}, {events:,} events"
    yield Row(
        "pipeline/trace to replayed step",
        events / (load_s + ops_s + graph_s + replay_s),
        "events/s",
        target=">= 100000",
        note=note,
    )
    yield Row("pipeline/trace to events", load_s, "s", "inflating alone", inflate_s, note=note)
    yield Row("pipeline/events to ops of all steps", ops_s, "s", note=f"{recording.ops.height:,} ops")
    yield Row(
        "pipeline/ops to the graph of one step",
        graph_s,
        "s",
        note=f"{graph.ops.height:,} ops, {graph.edges.height:,} edges",
    )
    yield Row("pipeline/replay with slack and path", replay_s, "s")


def cost_rows() -> Iterator[Row]:
    """A million prices on one core, in processor time of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_costs"]
    kernels_s, collectives_s = map(float, subprocess.run(command, capture_output=True, check=True).stdout.split())
    note = "distinct sizes, six families, intervals and basis included; processor time of one thread"
    yield Row("costs/a million kernels", kernels_s, "s", target="<= 2", note=note)
    yield Row("costs/a million collectives", collectives_s, "s", target="<= 2")


def main() -> None:
    """Measure and write down."""
    shared = TRACES / LARGEST
    folder = shared if shared.is_dir() else datasets.path("gpt-ddp")
    rows = [*pipeline_rows(folder), *bench_graph.rows(), *bench_load.rows()]
    rows += [*bench_replay.rows(), *cost_rows(), *bench_search.rows(), *bench_execution.rows(), *bench_chakra.rows()]
    rows += bench_panels.rows()
    record_timed(RESULTS, rows)
    for row in rows:
        print(f"{row.name:45} {row.value:14.6g} {row.unit:14} {row.baseline} {row.baseline_value or ''} {row.target}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
