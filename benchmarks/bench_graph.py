"""From loaded events to the graph of one step: `python -m benchmarks.bench_graph [TRACE ...]` prints events a second.

Events are those of the files, kept or not; seconds are those of `Recording.of` and `build_graph`, warm, in one process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.rows import RESULTS, Row, record
from lumos_nb import datasets
from lumos_nb.graph import Recording, build_graph
from lumos_nb.traces.run import load_run

TRACES = Path(__file__).parents[1] / ".." / "shared" / "traces"
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
    graph_s, graph_core_s = fastest(lambda: build_graph(recording))
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
    """Rows of all large runs; of the bundled data set where there are none. The target is for the first, one rank's."""
    found = folders or [TRACES / name for name in LARGE if (TRACES / name).is_dir()]
    for number, folder in enumerate(found or [datasets.path("gpt-ddp")]):
        yield from graph_rows(folder, target=TARGET if found and not number else "")


def main() -> None:
    """Measure the runs that are named, or the large ones, which are written down."""
    named = [Path(argument) for argument in sys.argv[1:]]
    measured = list(rows(named))
    if not named:
        record(RESULTS, measured)
    for row in measured:
        print(f"{row.name:70} {row.value:12.6g} {row.unit:9} {row.baseline_value:12.6g} {row.baseline}")


if __name__ == "__main__":
    main()
