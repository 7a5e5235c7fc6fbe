"""The spread of a step's time, drawn from other steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pytest
from trace_builder import Trace, recording_of

from lumos_nb import Recording, datasets, jitter, load_run
from lumos_nb.errors import GraphError, InputError
from lumos_nb.graph import build_graph
from lumos_nb.resampling import resampled_steps

WORKS = {1: 100, 2: 300, 3: 200, 4: 400}
"""Step -> how long the work of rank 0 takes in it, in µs; rank 1 takes what rank 0 takes in the step after."""


def pair(work: Callable[[int, int], float]) -> Recording:
    """Two ranks that work, then meet in a collective of 50 µs; the next step begins 10 µs after it."""
    traces = [Trace(rank=rank) for rank in range(2)]
    s = 0.0
    for step in WORKS:
        end = s + max(work(0, step), work(1, step)) + 50
        for rank, trace in enumerate(traces):
            words, done = f"group=0 seq={step} bytes=4 dtype=float32", s + work(rank, step)
            trace.step(step, s, end + 10)
            trace.op("aten::work", s, done)
            trace.annotation(f"comm::all_reduce {words}", done, done + 1)
            trace.annotation("gloo:all_reduce", done + 1, end, thread=9)
            trace.annotation(f"wait::all_reduce {words}", done + 1, end)
        s = end + 10
    return recording_of(*traces)


def test_every_rank_is_drawn_for_itself_and_a_join_meets_the_latest():
    recording = pair(lambda rank, step: WORKS[step] if rank == 0 else WORKS[step % 4 + 1])
    graphs = [build_graph(recording, step) for step in (2, 3, 4)]
    drawn = resampled_steps(graphs[0], graphs, draws=400, rng=np.random.default_rng(0))
    # Rank 0 takes 300, 200 or 400, rank 1 200, 400 or 100: the latest is one of these.
    works = sorted({round(ns / 1000) for ns in np.unique(drawn)})
    latest = sorted({max(a, b) for a in (300, 200, 400) for b in (200, 400, 100)})
    assert len(works) == len(latest)
    assert [w - works[0] for w in works] == [x - latest[0] for x in latest]
    share = np.mean(drawn == drawn.max())
    assert share == pytest.approx(5 / 9, abs=0.08)  # 400 is drawn by one or the other


def test_steps_that_are_alike_leave_no_spread():
    table = jitter(pair(lambda rank, step: 100 + 50 * rank), (1, 2, 3))  # after the last, nothing follows
    assert (table["high_ns"] - table["low_ns"]).to_list() == [0, 0, 0]
    assert table["inside"].all()
    assert table["null_inside"].all()


def test_equal_seeds_give_equal_tables_and_wider_levels_wider_intervals():
    recording = Recording.of(load_run(datasets.path("gpt-ddp"), cache=False))
    first, again = (jitter(recording, range(2, 6), draws=20) for _ in range(2))
    assert first.equals(again)
    narrow = jitter(recording, range(2, 6), draws=20, level=0.5)
    assert ((narrow["high_ns"] - narrow["low_ns"]) <= (first["high_ns"] - first["low_ns"])).all()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        pytest.param({"level": 1.0}, InputError, id="a level that nothing meets"),
        pytest.param({"draws": 0}, InputError, id="no draw"),
        pytest.param({"steps": [2, 3]}, GraphError, id="two steps"),
    ],
)
def test_impossible_questions_are_refused(options, error):
    with pytest.raises(error):
        jitter(pair(lambda rank, step: 100), **options)


def test_the_spread_of_the_published_job_holds_its_steps_at_about_the_nominal_rate(traces):
    recording = Recording.of(load_run(traces / "straggler" / "trace-ST.parquet", cache=False))
    table = jitter(recording, recording.step_times()["step"].to_list(), draws=100)
    # Of 32 steps 0.9 are expected inside; fewer than 25 have a chance of 3 %.
    assert table["inside"].sum() >= 25
    assert table.select(pl.col("low_ns").le(pl.col("median_ns")).all()).item()
