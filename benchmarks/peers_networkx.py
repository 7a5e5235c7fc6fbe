"""The longest path beside networkx's, the textbook's, on one graph: `make bench-peers` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import networkx as nx
import numpy as np

from benchmarks.bench_replay import N_RANKS, synthetic_graph
from benchmarks.peers import hand_over
from benchmarks.rows import Row
from benchmarks.timing import in_turn, ratio
from lumos_nb._replay_kernels import path_to, starts
from lumos_nb._replay_plan import Plan, SweepPlan
from lumos_nb.critical_path import sweep_block

OPS, SCENARIOS, LOOPS = 100_000, 64, 100
"""Ours is run so many times a round: once is too short to be timed."""


def rows() -> Iterator[Row]:
    """Rows of the path and of a sweep."""
    made = synthetic_graph(OPS // N_RANKS)
    plan = Plan.of(made)
    n, theirs = len(plan.row), nx.DiGraph()
    to = np.repeat(np.arange(n), np.diff(plan.ptr))
    theirs.add_nodes_from(range(n))
    theirs.add_weighted_edges_from(zip(plan.src.tolist(), to.tolist(), plan.apart_ns.tolist(), strict=True))
    (read,), start = plan.forward(n), np.empty(n, np.int64)
    edges = plan.ptr, plan.src, plan.lag_ns, plan.from_start, plan.dur_ns

    def longest() -> int:
        starts(*read, start, start)
        return len(path_to(*edges, start, int(start.argmax())))

    def many(run: Callable[[], object]) -> None:
        for _ in range(LOOPS):
            run()

    found = nx.dag_longest_path(theirs)
    longest()
    if nx.path_weight(theirs, found, "weight") != start.max():
        raise AssertionError("networkx finds a longest path of another length.")
    swept = SweepPlan.of(made, plan, "kind")
    scale = np.random.default_rng(1).uniform(0.5, 1.5, (len(swept.classes), SCENARIOS))
    copied = np.ones(sum(array.nbytes for array in (*read, start)) // 2, np.uint8)
    times = in_turn(
        partial(nx.dag_longest_path, theirs),
        partial(many, longest),
        partial(many, partial(starts, *read, start, start)),
        partial(sweep_block, swept, scale),
        partial(many, partial(np.copyto, np.empty_like(copied), copied)),
    )
    path, alone, sweep, allowed = (
        ratio(times[:, 0], times[:, i] / count) for i, count in ((1, LOOPS), (2, LOOPS), (3, SCENARIOS), (4, LOOPS))
    )
    rate = n / float(np.median(times[:, 0]))
    note = f"{n:,} ops, {len(plan.src):,} edges, both graphs built before; networkx: {rate:,.0f} ops/s"
    beside = ("that a copy of what is read and written allows", allowed.median)
    yield Row("peers/longest path over networkx", path.median, "x", *beside, path.noise, ">= 5000",
              f"{note}; the ops of the path included")  # fmt: skip
    yield Row("peers/longest path over networkx, lengths alone", alone.median, "x", *beside, alone.noise)
    yield Row(f"peers/a scenario of {SCENARIOS} over networkx", sweep.median, "x", noise=sweep.noise, target=">= 5000")


if __name__ == "__main__":
    hand_over(rows())
