"""Speed of replay and sweeps on a synthetic job of ten million ops, beside numpy and a copy of memory.

All times are CPU time, the best of several runs: wall time on a shared machine says more about its other users.
`python -m benchmarks.bench_replay` prints the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from benchmarks.rows import Row, table
from benchmarks.timing import in_turn
from lumos_nb._replay_kernels import starts
from lumos_nb._replay_plan import Plan, SweepPlan
from lumos_nb.critical_path import replay, slack_of, sweep_block
from lumos_nb.engine import Resources, simulate
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS
from tests.reference_replay import Levels

Int64s = npt.NDArray[np.int64]

N_RANKS, N_STREAMS, N_COLLECTIVES = 64, 4, 200
EVENT_SHARE, SYNC_SHARE = 0.05, 0.002


class Cost(NamedTuple):
    """CPU time of repeated runs."""

    best_s: float
    median_s: float

    def rate(self, count: float) -> float:
        """Millions a second in the best run."""
        return count / self.best_s / 1e6

    def noise(self, count: float) -> float:
        """How far the median run falls short of that rate."""
        return self.rate(count) * (1 - self.best_s / self.median_s)


def costs(*runs: Callable[[], object], repeats: int = 5) -> list[Cost]:
    """Time several runs in turn, so that what else happens on the machine happens to all of them."""
    times = in_turn(*runs, repeats=repeats)
    return [Cost(best, median) for best, median in zip(times.min(axis=0), np.median(times, axis=0), strict=True)]


def synthetic_graph(ops_per_rank: int, *, n_ranks: int = N_RANKS, seed: int = 0) -> Graph:
    """A job in issue order: on each rank a host that launches one kernel after the other to four streams.

    Launches are 5 to 9 us before their kernel at the earliest, a kernel in twenty waits for another stream, a launch in
    500 for a stream, and 200 times all ranks meet in a join of no length. 1.52 edges an op.
    """
    random = np.random.default_rng(seed)
    turns = ops_per_rank // 2
    shape = (turns, n_ranks)
    meet = np.unique(np.linspace(2, turns - 3, min(N_COLLECTIVES, turns // 8)).astype(int))
    joins_before = np.searchsorted(meet, np.arange(turns))
    launch = (2 * n_ranks * np.arange(turns) + joins_before)[:, None] + 2 * np.arange(n_ranks)
    kernel, join = launch + 1, launch[meet, -1] + 2
    stream = random.integers(0, N_STREAMS, shape)
    stream[meet] = stream[meet + 1] = 0
    dur = np.zeros(2 * turns * n_ranks + len(meet), np.int64)
    dur[launch], dur[kernel] = random.integers(2_000, 12_000, shape), random.integers(1_000, 20_000, shape)
    dur[kernel[meet]] = 0  # an arrival; the transfer comes next on that stream
    edges = [
        _edges("thread", launch[:-1], launch[1:]),
        _edges("launch", launch, kernel, random.integers(5_000, 9_000, shape)),
        _edges("collective", kernel[meet], np.repeat(join, n_ranks)),
        _edges("collective", np.repeat(join, n_ranks), kernel[meet + 1]),
    ]
    for s in range(N_STREAMS):
        on = np.where(stream == s, np.arange(turns)[:, None], -1)
        before = np.roll(np.maximum.accumulate(on, axis=0), 1, axis=0)
        before[0] = -1
        chance = random.random(shape) * N_STREAMS
        for rule, at, to in (
            ("stream", stream == s, kernel),
            ("event", (stream != s) & (chance < EVENT_SHARE), kernel),
            ("sync", chance > N_STREAMS - SYNC_SHARE, launch),
        ):
            turn, rank = np.nonzero(at & (before >= 0))
            edges.append(_edges(rule, kernel[before[turn, rank], rank], to[turn, rank]))
    kind, rank, lane = np.full(len(dur), 2), np.zeros(len(dur), int), np.full(len(dur), N_STREAMS + 1)
    kind[launch], kind[kernel], kind[kernel[meet + 1]] = 0, 1, 3
    rank[launch] = rank[kernel] = np.arange(n_ranks)
    lane[launch], lane[kernel] = N_STREAMS, stream
    return Graph(_op_table(dur, kind, rank, lane), pl.concat(edges), step=0)


def _edges(rule: str, src: Int64s, dst: Int64s, lag_ns: Int64s | int = 0) -> pl.DataFrame:
    return pl.DataFrame({"src": src.ravel(), "dst": dst.ravel()}).select(
        "src",
        "dst",
        lag_ns=pl.Series(np.broadcast_to(lag_ns, src.shape).ravel(), dtype=pl.Int64),
        from_start=pl.lit(rule == "launch"),
        rule=pl.lit(rule),
        evidence=pl.lit("exact"),
        hard=pl.lit(rule != "stream"),
    ).select(*EDGES.columns)  # fmt: skip


def _op_table(dur: Int64s, kind: Int64s, rank: Int64s, lane: Int64s) -> pl.DataFrame:
    kinds = pl.Series(["launch", "kernel", "join", "comm"])
    lanes = pl.Series([*(f"gpu0:{s}" for s in range(N_STREAMS)), "cpu:1", "net"])
    columns: dict[str, pl.Series | pl.Expr] = {
        "op_id": pl.Series(np.arange(len(dur))),
        "rank": pl.Series(rank),
        "step": pl.lit(0),
        "lane": lanes[lane],
        "device": pl.when(pl.Series(lane < N_STREAMS)).then(0),
        "kind": kinds[kind],
        "name": kinds[kind],
        "start_ns": pl.lit(0),
        "dur_ns": pl.Series(dur),
    }
    table: pl.DataFrame = pl.select([c.alias(name) for name, c in columns.items()]).with_columns(
        pl.lit(None).alias(c) for c in OPS.columns if c not in columns
    )
    return table.select(pl.col(c).cast(t) for c, t in OPS.columns.items())


def replay_rows(graph: Graph) -> list[Row]:
    """The longest path alone, slack alone, and all that `replay` does."""
    plan, n = Plan.of(graph), len(graph.ops)
    levels = Levels.of(n, plan.src.astype(np.int64), np.repeat(np.arange(n), np.diff(plan.ptr)))
    apart, start = plan.apart_ns[levels.edge], np.empty(n, np.int64)
    (read,), copied, to = plan.forward(n), np.ones(1 << 25), np.ones(1 << 25)
    forward, by_level, copy, arranged = costs(
        lambda: starts(*read, start, start),
        lambda: levels.starts(apart),
        lambda: np.copyto(to, copied),
        plan.starts,
        repeats=7,
    )
    moved = sum(array.nbytes for array in (*read, start)) / n
    allowed = 2 * copied.nbytes / copy.best_s / moved / 1e6
    if not np.array_equal(levels.starts(apart), start[levels.op]):
        raise AssertionError("the compiled pass and numpy by level disagree.")
    end = start + plan.dur_ns
    (slack,) = costs(lambda: slack_of(plan, end, int(end.max())), repeats=3)
    (whole,) = costs(lambda: replay(graph), repeats=2)
    rate, beside = forward.rate(n), by_level.rate(n)
    size = f"{n:,} ops, {len(graph.edges):,} edges, {N_RANKS} ranks"
    return [
        Row("replay/longest path", rate, "M ops/s", "numpy by level", beside, forward.noise(n), note=size),
        Row("replay/longest path of what a copy of memory allows", 100 * rate / allowed, "%", target=">= 70",
            note=f"a copy of the {moved:.1f} bytes that the pass reads and writes an op: {allowed:.0f} M ops/s"),
        Row("replay/longest path over numpy by level", rate / beside, "x", target=">= 20"),
        Row("replay/longest path, its edges arranged first", arranged.rate(n), "M ops/s", noise=arranged.noise(n)),
        Row("replay/slack", slack.rate(n), "M ops/s", noise=slack.noise(n)),
        Row("replay/all of replay", whole.rate(n), "M ops/s", note="checks, order, path, slack, tables"),
    ]  # fmt: skip


def sweep_rows(graph: Graph) -> list[Row]:
    """A block of scenarios, with slopes, beside copying a float64 for each op and scenario: less than a table costs."""
    plan, n = SweepPlan.of(graph, Plan.of(graph), "kind"), len(graph.ops)
    copied, to = np.ones(1 << 25), np.ones(1 << 25)
    rows = []
    for k in (64, 256):
        scale = np.random.default_rng(1).uniform(0.5, 1.5, (len(plan.classes), k))
        block, copy = costs(partial(sweep_block, plan, scale), partial(np.copyto, to, copied), repeats=4)
        rate, name = block.rate(n * k), f"replay/sweep of {k} scenarios"
        rows.append(Row(name, rate, "M op scenarios/s", "copying a float64", copy.rate(len(to)), block.noise(n * k)))
    return rows


def rows(n_ops: int = 10_000_000) -> list[Row]:
    """All rows of group `replay`."""
    small = synthetic_graph(1_000_000 // N_RANKS)
    (plan,) = costs(lambda: Plan.of(small), repeats=3)
    size = f"checks and order of {len(small.ops):,} ops, {len(small.edges):,} edges"
    planned = Row("replay/plan", plan.best_s, "s", noise=plan.median_s - plan.best_s, target="<= 1", note=size)
    (events, contended, passes) = costs(
        lambda: simulate(small), lambda: simulate(small, Resources()), lambda: replay(small), repeats=3
    )
    n, beside_replay = len(small.ops), ("all of replay", passes.rate(len(small.ops)))
    simulated = [
        Row("replay/simulation of every edge", events.rate(n), "M ops/s", *beside_replay, noise=events.noise(n)),
        Row("replay/simulation of streams and syncs", contended.rate(n), "M ops/s", *beside_replay,
            noise=contended.noise(n), note=f"{n:,} ops; the order of each stream found out, then replayed"),
    ]  # fmt: skip
    graph = synthetic_graph(n_ops // N_RANKS)
    return [*replay_rows(graph), planned, *simulated, *sweep_rows(graph)]


if __name__ == "__main__":
    print(table(rows()))
