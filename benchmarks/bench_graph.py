"""From loaded events to the graph of one step: `python -m benchmarks.bench_graph [TRACE ...]` prints events a second.

Events are those of the files, kept or not; seconds are those of `Recording.of` and `build_graph`, warm, in one process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import TRACES
from benchmarks.make_large_trace import write_large_trace
from benchmarks.rows import RESULTS, Row, record_timed
from lumos_nb.graph import Recording, build_graph
from lumos_nb.traces.run import load_run

LARGE = ("hta/df_index_resolver", "hta/mtia_trace_single_rank", "torchrec/sst_long_a2a_optimizer_4")
REPEATS = 5
TARGET = ">= 500000"


def fastest(run: Callable[[], object]) -> tuple[float, float]:
    """Least wall time and least processor time (of all threads) of several calls, in seconds."""
    walls, processors = [], []
    for _ in range(REPEATS):
        wall, processor = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return min(walls), min(processors)


def graph_rows(folder: Path, *, target: str = "") -> Iterator[Row]:
    """Speed of each stage on one run, and of both together."""
    run = load_run(folder)
    events = int(run.ranks["events"].sum())
    recording = Recording.of(run)
    graph = build_graph(recording)
    ops_s, ops_core_s = fastest(lambda: Recording.of(run))
    graph_s, graph_core_s = fastest(lambda: build_graph(replace(recording)))
    note = f"{events:,} events, {recording.ops.height:,} ops, {graph.edges.height:,} edges"
    rate, core_rate = events / (ops_s + graph_s), events / (ops_core_s + graph_core_s)
    yield Row(
        f"graph/{folder.name}: events to the graph of one step",
        rate,
        "events/s",
        "a second of one core",
        core_rate,
        target=target,
        note=note,
    )
    yield Row(f"graph/{folder.name}: events to ops", ops_s, "s", "of one core", ops_core_s)
    yield Row(f"graph/{folder.name}: ops to graph", graph_s, "s", "of one core", graph_core_s)


def rows(folders: list[Path] | None = None) -> Iterator[Row]:
    """Rows of the runs named, else of a made-up one of 1.3 million events, which has the target, and of large ones."""
    with tempfile.TemporaryDirectory() as folder:
        if not folders:
            made = Path(folder) / "made_up"
            made.mkdir()
            write_large_trace(made / "rank-0.json.gz")
            yield from graph_rows(made, target=TARGET)
        for path in folders or [TRACES / name for name in LARGE if (TRACES / name).is_dir()]:
            yield from graph_rows(path)


def main() -> None:
    """Measure the runs that are named, or the large ones, which are written down."""
    named = [Path(argument) for argument in sys.argv[1:]]
    measured = list(rows(named))
    if not named:
        record_timed(RESULTS, measured)
    for row in measured:
        print(f"{row.name:70} {row.value:12.6g} {row.unit:9} {row.baseline_value:12.6g} {row.baseline}")


if __name__ == "__main__":
    main()
