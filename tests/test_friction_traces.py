"""How frictions are measured: slopes under fixed effects, scatter, the law of jitter, and two real recordings."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from benchmarks.friction_jitter import jitter_law, passes
from benchmarks.friction_traces import fixed_effects, scatter, slope
from benchmarks.frictions import layers


def test_a_slope_is_found_beneath_kernels_of_very_different_durations():
    random = np.random.default_rng(0)
    kernel = np.repeat(np.arange(60), 10)
    share = random.uniform(0, 1, 600)
    log = random.normal(5, 2, 60)[kernel] + 0.2 * share + random.normal(0, 0.02, 600)
    rows = pl.DataFrame({"kernel": kernel, "job": kernel % 3, "share": share, "log": log})
    value, low, high = slope(fixed_effects(rows, pl.col("share"), "job"))
    assert low < 0.2 < high
    assert value == pytest.approx(0.2, abs=0.01)
    assert high - low < 0.03


def test_jobs_that_differ_widen_the_interval():
    share = np.tile([0.0, 1.0], 40)
    rows = pl.DataFrame({"kernel": np.repeat(np.arange(40), 2), "job": np.repeat(np.arange(4), 20), "share": share})
    rows = rows.with_columns(log=pl.col("share") * pl.col("job") * 0.1)
    value, low, high = slope(fixed_effects(rows, pl.col("share"), "job"))
    assert value == pytest.approx(0.15)
    assert low < 0.08
    assert high > 0.22


def test_scatter_is_a_standard_deviation_that_outliers_leave_alone():
    values = np.append(np.random.default_rng(2).normal(1, 0.5, 20_000), np.full(100, 1e6))
    assert pl.DataFrame({"x": values}).select(scatter(pl.col("x"))).item() == pytest.approx(0.5, rel=0.03)


def test_the_law_of_jitter_is_found_again():
    usual = np.array([10, 30, 100, 300, 1000, 3000.0])
    table = pl.DataFrame({"usual_us": usual, "sigma_us": np.hypot(0.4, 0.006 * usual)})
    assert jitter_law(table) == pytest.approx((0.4, 0.006), rel=1e-4)


def test_a_broken_rank_is_left_out_of_a_jobs_scatter(traces):
    told = passes("AR")
    assert told["faults"] == 1
    assert told["ranks"] < 0.01
    assert told["own"] < told["documents"]


def test_kernels_of_a_layer_repeat_as_the_sequence_of_names_does(traces):
    assert dict(layers().select("trace", "kernels").rows())["H100_Qwen"] == 42
