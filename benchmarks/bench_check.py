"""A guard against slow-downs: `make bench-check` measures ratios in two minutes and fails where one has grown.

Each ratio is processor time of ours over that of a limit, or of plain work on the same data, in turn in one process: no
seconds, so that another machine may check what this one recorded. What sorts is stable, hence the same code everywhere:
numpy's other sort is far faster on processors with AVX-512. `python -m benchmarks.bench_check --record` stores
the median of several takes in group `check` of results.json, with the farthest take as noise.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    os.environ |= dict.fromkeys(("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")

import numpy as np

import lumos_nb as ln
from benchmarks.bench_chakra import many
from benchmarks.bench_replay import N_RANKS, synthetic_graph
from benchmarks.bench_search import CLUSTER, GPT3, TRAIN
from benchmarks.make_large_trace import write_large_trace
from benchmarks.rows import RESULTS, Row, read, record_timed
from benchmarks.timing import in_turn, ratio
from lumos_nb import datasets, widgets
from lumos_nb._replay_kernels import starts
from lumos_nb._replay_plan import Plan, SweepPlan
from lumos_nb.critical_path import replay, sweep_block
from lumos_nb.graph import Recording, build_graph
from lumos_nb.traces.kineto import read_kineto
from lumos_nb.traces.run import load_run
from lumos_nb.workloads.llm.screening import search

TAKES = 5
"""Of which the recorded ratio is the median."""
AGAIN = 2
"""A ratio beyond its bound is measured so many times more: a slow-down is there each time."""
SPREADS, LEAST = 3, 0.15
"""The bound is so many times the noise above the recorded ratio, and at least so much of it: the same code in another
process differs by a tenth, by where its memory happens to lie."""
ROUNDS, SCENARIOS, EVENTS, OPS = 5, 64, 200_000, 1_000_000


class Check(NamedTuple):
    """Ours, and what it is held against."""

    name: str
    ours: Callable[[], object]
    limit: Callable[[], object]

    def measured(self) -> float:
        """Ours over the limit: the median of several rounds, after one that warms up."""
        self.ours()
        times = in_turn(self.ours, self.limit, repeats=ROUNDS)
        return ratio(times[:, 0], times[:, 1]).median


def checks() -> Iterator[Check]:
    """One after the other, each with data of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from trace_checks(folder)
        nodes = many(folder)
        ln.chakra.write_file(nodes, folder / "read.et")
        frames = (folder / "read.et").read_bytes()
        yield Check(
            "Chakra read over a digest of its bytes",
            partial(ln.chakra.read_file, folder / "read.et"),
            lambda: [blake2b(frames) for _ in range(4)],
        )
    yield from replay_checks()
    graph = build_graph(load_run(datasets.path("gpt-ddp")))
    panel, moves = widgets.what_if(graph), iter(range(1, 1000))

    def moved() -> None:
        panel.controls["cpu"].value = 1 + next(moves) / 100

    yield Check("a slider's move over its replay", moved, partial(replay, graph))
    values = np.random.default_rng(0).random(10_000_000)
    yield Check(
        "layouts screened over sorting ten million numbers",
        partial(search, GPT3, CLUSTER, TRAIN, keep=0),
        partial(np.sort, values, kind="stable"),
    )


def trace_checks(folder: Path) -> Iterator[Check]:
    """From a file to the graph of a step."""
    path = write_large_trace(folder / "rank-0.json.gz", EVENTS)
    packed = path.read_bytes()
    yield Check("loading over inflating", partial(read_kineto, path), partial(zlib.decompress, packed, 47))
    run = load_run(path, cache=False)
    yield Check(
        "events to a graph over loading them", lambda: build_graph(Recording.of(run)), partial(read_kineto, path)
    )


def replay_checks() -> Iterator[Check]:
    """The longest path, its plan and a sweep."""
    graph = synthetic_graph(OPS // N_RANKS)
    plan = Plan.of(graph)
    (read,), start = plan.forward(len(plan.row)), np.empty(len(plan.row), np.int64)
    copied = np.ones(sum(array.nbytes for array in (*read, start)) // 2, np.uint8)
    copy = partial(np.copyto, np.empty_like(copied), copied)

    def often(run: Callable[[], object]) -> Callable[[], object]:
        return lambda: [run() for _ in range(20)]

    yield Check("longest path over copying what it reads", often(partial(starts, *read, start, start)), often(copy))
    yield Check(
        "plan over sorting its edges", partial(Plan.of, graph), partial(np.argsort, plan.apart_ns, kind="stable")
    )
    swept = SweepPlan.of(graph, plan, "kind")
    scale = np.random.default_rng(1).uniform(0.5, 1.5, (len(swept.classes), SCENARIOS))
    numbers = np.ones(len(start) * SCENARIOS)
    yield Check(
        f"a sweep of {SCENARIOS} over copying a number for each op",
        partial(sweep_block, swept, scale),
        partial(np.copyto, np.empty_like(numbers), numbers),
    )


def bound(stored: Row) -> float:
    """From which ratio on a check fails."""
    return stored.value + max(SPREADS * (stored.noise or 0), LEAST * stored.value)


def failures(every: Iterable[Check], stored: Mapping[str, Row]) -> list[str]:
    """Measure and print each check; the names of those that have grown, or were never recorded."""
    failed, known = [], set[str]()
    for check in every:
        known.add(check.name)
        if (row := stored.get(check.name)) is None:
            print(f"{check.name:50} not recorded: python -m benchmarks.bench_check --record", flush=True)
            failed.append(check.name)
            continue
        value, limit = check.measured(), bound(row)
        for _ in range(AGAIN):
            value = value if value <= limit else min(value, check.measured())
        said = "ok" if value <= limit else "GROWN"
        print(f"{check.name:50} {value:9.3g} x, recorded {row.value:9.3g}, bound {limit:9.3g}  {said}", flush=True)
        failed += [check.name] if value > limit else []
    for name in sorted(set(stored) - known):
        print(f"{name:50} recorded, but no check any more: python -m benchmarks.bench_check --record")
        failed.append(name)
    return failed


def recorded(every: Iterable[Check]) -> Iterator[Row]:
    """Measure each check several times."""
    for check in every:
        takes = np.array([check.measured() for _ in range(TAKES)])
        middle = float(np.median(takes))
        yield Row(f"check/{check.name}", middle, "x", noise=float(np.abs(takes - middle).max()))


def main(arguments: list[str]) -> int:
    """Check, or record; 1 where a ratio has grown."""
    if arguments == ["--record"]:
        record_timed(RESULTS, list(recorded(checks())))
        return 0
    stored = {row.name.partition("/")[2]: row for row in read(RESULTS) if row.group == "check"}
    failed = failures(checks(), stored)
    print(f"grown: {', '.join(failed)}" if failed else "no ratio has grown")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
