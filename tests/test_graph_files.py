"""Graphs of every real Kineto recording: they can be built, and they are consistent with their own times.

A graph that is given a step's own durations gives its own times by construction, even with wrong edges: nothing here
says that a prediction is any good.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest

from lumos_nb.critical_path import replay
from lumos_nb.evaluate import score_waits
from lumos_nb.graph import Recording, build_graph
from lumos_nb.traces import cache
from lumos_nb.traces.run import load_run
from tests.test_kineto_files import KINETO_FILES

RUNS = [
    "torchrec/resnet18",
    "torchrec/sst_long_a2a_optimizer_2",
    "torchrec/sst_long_a2a_optimizer_3",
    "torchrec/sst_long_a2a_optimizer_4",
    *(name for name in KINETO_FILES if not name.startswith("torchrec")),
]
INFERENCE = ("mtia", "tracelens/inference", "google_owlv2", "large_integer")
"""Large, and of one step or none."""

TRAINING = [name for name in RUNS if not any(word in name for word in INFERENCE)]


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache that belongs to these tests."""
    patch = pytest.MonkeyPatch()
    patch.setenv(cache.CACHE_ENV, str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.mark.parametrize("name", TRAINING)
def test_every_step_replays_within_a_thousandth_of_itself_which_proves_nothing_about_prediction(
    traces: Path, cached: None, name: str
) -> None:
    recording = Recording.of(load_run(traces / name))
    times = recording.step_times()
    assert times.height > 0
    for step, measured_ns in times.select("step", "step_ns").iter_rows():
        result = replay(build_graph(recording, step))
        assert result.step_ns == pytest.approx(measured_ns, rel=1e-3)
        own = result.ops.filter(pl.col("kind") != "boundary")
        off = (own["start_ns"] - own["measured_start_ns"]).abs()
        worst = own.select("name", "lane", off_ns=off).sort("off_ns").row(-1)
        assert worst[-1] <= 1e-3 * measured_ns, worst


@pytest.mark.parametrize(
    ("name", "event", "sync"),
    [
        # links found, found wrongly, missed, of waits for events and of stream synchronises
        ("hta/critical_path/alexnet", (4, 0, 2), (16, 0, 0)),
        ("hta/critical_path/cuda_event_sync", (0, 0, 1), (1, 0, 0)),
        ("hta/critical_path/end_to_end/simple_add/input", (2, 0, 4), (16, 0, 0)),
        ("kineto/docs/traces/after_fix_trace.json", (0, 0, 0), (0, 0, 0)),
    ],
)
def test_waits_inferred_without_the_records_that_name_them(
    traces: Path, cached: None, name: str, event: tuple[int, ...], sync: tuple[int, ...]
) -> None:
    score = score_waits(load_run(traces / name))
    found = {row["rule"]: (row["tp"], row["fp"], row["fn"]) for row in score.iter_rows(named=True)}
    assert (found["event"], found["sync"]) == (event, sync)
    for tp, fp, fn, precision, recall in score.select("tp", "fp", "fn", "precision", "recall").rows():
        assert precision == (tp / (tp + fp) if tp + fp else None)
        assert recall == (tp / (tp + fn) if tp + fn else None)
