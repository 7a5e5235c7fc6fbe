"""The benchmark of sharding: tasks by the published rules, and rows that follow from scores by hand."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from benchmarks.sharding import Scored, comparison_rows, selection_rows
from benchmarks.sharding_tasks import SETTINGS, Task, drawn_tasks, pool
from lumos_nb.embedding_tables import BINS


def test_the_pool_has_reuse_and_about_the_mean_lookups_of_the_public_list():
    tables = pool()
    assert tables.height == 200
    assert tables.select(pl.sum_horizontal(BINS)).to_series().to_list() == pytest.approx([1.0] * 200)
    assert 8 < tables["pooling"].mean() < 25


@pytest.mark.parametrize("devices", SETTINGS)
def test_tasks_are_within_the_published_limits_and_the_same_again(devices):
    (fewest, most), limit = SETTINGS[devices]
    tasks = drawn_tasks(devices, 32, 12)
    for task in tasks:
        assert fewest <= task.tables.height < most
        assert set(task.tables["dim"]) <= {4, 8, 16, 32}
        assert (task.tables["rows"] * task.tables["dim"]).sum() * 4 <= limit
    assert all(one.tables.equals(other.tables) for one, other in zip(tasks, drawn_tasks(devices, 32, 12), strict=True))
    assert np.ptp([task.tables.height for task in tasks]) > 5


def test_gains_are_over_the_best_rule_of_each_task():
    tasks = [Task(f"task {n}", 4, 8, pl.DataFrame()) for n in range(3)]
    scores = [
        Scored(tasks[0], "dim", 0.1, 200.0), Scored(tasks[0], "size", 0.1, 100.0),
        Scored(tasks[0], "search by both", 1.0, 80.0),
        Scored(tasks[1], "dim", 0.1, 100.0), Scored(tasks[1], "size", 0.1, None),
        Scored(tasks[1], "search by both", 2.0, 110.0),
        Scored(tasks[2], "dim", 0.1, None), Scored(tasks[2], "size", 0.1, None),
        Scored(tasks[2], "search by both", 3.0, 50.0),
    ]  # fmt: skip
    rows = {row.name: row for row in comparison_rows(scores)}
    found = rows["sharding/4 devices, dims to 8"]
    assert found.value == pytest.approx((20 - 10) / 2)
    assert "at most 20.0 %, at least -10.0 %; plans for 3 of 3 tasks, rules for 2; 2.00 s" in found.note
    assert rows["sharding/all, dim"].value == pytest.approx((-100 + 0) / 2)


def test_a_pick_is_right_within_a_tenth(monkeypatch):
    picks = pl.DataFrame(
        {
            "task": ["a"] * 3 + ["b"] * 3,
            "rule": ["dim", "size", "random"] * 2,
            "judged": [100.0, 109.0, 200.0, 100.0, 120.0, 300.0],
            "model": [3.0, 1.0, 2.0, 3.0, 1.0, 2.0],  # picks "size" in both
        }
    )
    monkeypatch.setattr("benchmarks.sharding.models", lambda: {"model": None})
    (row,) = selection_rows(picks)
    assert (row.value, row.baseline_value) == (50.0, pytest.approx(100 * (2 / 3 + 1 / 3) / 2))
    assert "worst pick 20 % slower" in row.note
