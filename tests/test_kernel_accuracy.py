"""Held-out groups of kernel costs: that splits do not leak, and the arithmetic of errors, intervals and noise."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest

from benchmarks import kernel_accuracy as accuracy
from benchmarks.baselines import BASELINES, roofline_us
from benchmarks.kernel_accuracy import BAR, FAMILIES, OURS, Family, errors, kernel_rows, priced, views, with_band
from lumos_nb.costs.work import with_work
from lumos_nb.errors import CalibrationError


def gemms(gpu="A100-SXM-80GB", model="one", slowdown=1.25, sizes=range(64, 2048, 64), op="gemm"):
    """Kernels that take `slowdown` times their roofline, of one model on one GPU."""
    shape = pl.DataFrame({"m": list(sizes)}).with_columns(n=1024, k=4096)
    named = shape.with_columns(
        gpu=pl.lit(gpu), model=pl.lit(model), op=pl.lit(op), part=pl.lit(op), dtype=pl.lit("fp16")
    )
    absent = ["groups", "rows", "cols", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim"]
    frame = with_work(
        named.with_columns(
            pl.lit("fwd").alias("pass"),
            *(pl.lit(None, pl.Int64).alias(name) for name in absent),
            batch=1,
            trans=pl.lit("TN"),
            causal=pl.lit(None, pl.Boolean),
            method=pl.lit("profiler"),
            scatter=0.01,
        )
    )
    return frame.with_columns(time_us=pl.Series(slowdown * roofline_us(frame)))


def scored(time, dur, **columns):
    """Predictions of one split as `predictions` has them."""
    frame = pl.DataFrame({"time_us": time, "dur_us": dur}, schema={"time_us": float, "dur_us": float})
    rest = {"family": "f", "gpu": "g", "left_out": "x", "method": OURS, "part": "gemm", "scatter": 0.02}
    ends = {"low_us": pl.lit(None, pl.Float64), "high_us": pl.lit(None, pl.Float64)}
    return frame.with_columns(**{name: pl.lit(value) for name, value in rest.items()}, **ends).with_columns(**columns)


MODELS = Family("model unseen", pl.lit(True), ("model",), ("gpu",))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_row_is_trained_on_that_shares_what_is_left_out(family):
    splits = list(family.splits(accuracy.samples()))
    assert splits
    for split in splits:
        assert not set(split.train["row"]) & set(split.test["row"])
        for column in family.unseen:
            assert split.test[column].unique().to_list() == [split.key[column]]
            assert split.key[column] not in split.train[column].unique()
        for column in family.same:
            assert split.train[column].unique().to_list() == [split.key[column]]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_intervals_are_fitted_on_training_rows_alone(family):
    for split in list(family.splits(accuracy.samples()))[::5]:
        allowed = set(split.train["row"])
        for inner in family.within().splits(split.train):
            assert allowed >= set(inner.train["row"]) | set(inner.test["row"])
            assert not set(inner.train["row"]) & set(inner.test["row"])


def test_the_thirteen_splits_by_model_cover_every_row_once():
    rows = pl.concat(split.test for split in FAMILIES[0].splits(accuracy.samples()))
    assert rows["row"].n_unique() == rows.height == accuracy.samples().filter(FAMILIES[0].rows).height
    assert rows.select("gpu", "model").n_unique() == 13


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_finds_a_constant_slowdown(name):
    train = pl.concat([gemms(), gemms(model="two", sizes=range(96, 1500, 160))])
    test = gemms(model="three", sizes=range(112, 1900, 130))
    assert BASELINES[name](train)(test) == pytest.approx(test["time_us"].to_numpy(), rel=0.02)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_prices_what_it_has_not_seen_with_a_finite_time(name):
    train = pl.concat([gemms(), gemms(gpu="A40", slowdown=1.5)])
    unseen = pl.concat([gemms(gpu="H100-SXM-80GB"), gemms(gpu="B200", op="bmm")])
    times = BASELINES[name](train)(unseen)
    assert np.isfinite(times).all()
    assert (times > 0).all()


def test_a_tree_fits_three_rows():
    assert np.isfinite(BASELINES["tree"](gemms(sizes=[64, 128, 256]))(gemms(sizes=[512]))).all()


def test_errors_of_known_predictions():
    low_us, high_us = pl.Series([90.0, 150.0, 10.0, 45.0]), pl.Series([120.0, 160.0, 90.0, 55.0])
    rows = scored([100.0, 100.0, 100.0, 50.0], [100.0, 104.0, 80.0, 57.5], low_us=low_us, high_us=high_us)
    row = errors(rows, "family").row(0, named=True)
    assert row["rows"] == 4
    assert row["unpriced"] == 0
    assert row["median"] == pytest.approx((4 + 15) / 2)
    assert row["mean"] == pytest.approx((0 + 4 + 20 + 15) / 4)
    assert row["worst"] == pytest.approx(20)
    assert row["within_5"] == 50
    assert row["within_10"] == 50
    assert row["coverage"] == 50
    assert row["width"] == pytest.approx(100 * (30 / 100 + 10 / 104 + 80 / 80 + 10 / 57.5) / 4)
    assert row["width_constant"] == pytest.approx(100 * (1.04 - 1 / 1.04)), (
        "the smallest factor that covers two of four"
    )
    assert row["noise"] == pytest.approx(2)


def test_geometric_mean_of_errors():
    row = errors(scored([100.0, 100.0], [101.0, 104.0]), "family").row(0, named=True)
    assert row["geomean"] == pytest.approx(2)


def test_rows_not_priced_are_counted_and_no_error():
    row = errors(scored([100.0, 100.0], [110.0, None]), "family").row(0, named=True)
    assert (row["rows"], row["unpriced"]) == (2, 1)
    assert row["mean"] == pytest.approx(10)


def test_a_mean_over_splits_weighs_splits_alike():
    large = scored([100.0] * 9, [110.0] * 9, left_out=pl.lit("large"))
    small = scored([100.0], [130.0], left_out=pl.lit("small"))
    row = accuracy.summary(pl.concat([large, small]), "family").row(0, named=True)
    assert row["mean"] == pytest.approx(20)
    assert row["splits"] == 2
    assert row["worst"] == pytest.approx(30)


def test_parts_and_rows_above_20_us_are_shown_apart():
    rows = scored([10.0, 30.0, 40.0], [10.0, 30.0, 40.0], part=pl.Series(["gemm", "bandwidth", "bandwidth"]))
    seen = views(rows.with_columns(family=pl.lit("fp32, GPU unseen"))).group_by("family").len()
    assert dict(seen.rows()) == {
        "fp32, GPU unseen": 3,
        "fp32, GPU unseen: gemm": 1,
        "fp32, GPU unseen: bandwidth": 2,
        "fp32, GPU unseen: bandwidth, above 20 us": 2,
    }


def test_an_op_without_samples_is_null_and_others_are_priced():
    def only_gemm(train):
        def predict(frame):
            if frame["op"][0] != "gemm":
                raise CalibrationError("nothing to price bmm by; measure some.")
            return frame["time_us"].to_numpy()

        return predict

    samples = pl.concat([gemms(), gemms(model="two"), gemms(model="two", op="bmm")])
    split = next(split for split in MODELS.splits(samples) if split.key["model"] == "two")
    rows = priced(split, only_gemm).group_by("op").agg(pl.col("dur_us").null_count(), pl.len())
    assert dict(rows.select("op", pl.col("dur_us") / pl.col("len")).rows()) == {"gemm": 0, "bmm": 1}


def test_an_interval_is_as_wide_as_the_groups_of_the_training_rows_differ():
    slowdowns = {"one": 1.0, "two": 1.2, "three": 1.2, "four": 1.4}
    samples = pl.concat(
        gemms(model=model, slowdown=1.3 * s, sizes=range(64, 8192, 64)) for model, s in slowdowns.items()
    )
    split = next(split for split in MODELS.splits(samples) if split.key["model"] == "two")
    fit = BASELINES["roofline"]
    rows = with_band(split, priced(split, fit), fit)
    assert rows["dur_us"].to_numpy() == pytest.approx(rows["time_us"].to_numpy())
    # one, three and four, each priced by the mean of the others: off by 1 of 1.3, 1.2 of 1.2 and 1.4 of 1.1
    off = np.log([1 / 1.3, 1.0, 1.4 / 1.1])
    spread = np.sqrt((np.square(off - off.mean()).sum()) / 3 * 4 / 3) * 2.3534  # Student's t, of 3 degrees of freedom
    for end, sign in (("low_us", -1), ("high_us", 1)):
        found = (rows[end] / rows["dur_us"]).log().to_numpy()
        assert found == pytest.approx(off.mean() + sign * spread, rel=1e-3)


def test_no_interval_comes_from_a_single_group():
    samples = pl.concat([gemms(), gemms(model="two")])
    split = next(MODELS.splits(samples))
    rows = with_band(split, priced(split, BASELINES["roofline"]), BASELINES["roofline"])
    assert rows["low_us"].null_count() == rows.height


def test_noise_is_what_repeats_differ_by_and_what_a_sweep_is_off_its_line():
    sweep = {"source": "microsoft/vidur", "tp": 1, "role": "up", "method": "profiler"}
    frame = gemms(sizes=[64, 128, 192]).with_columns(**{name: pl.lit(value) for name, value in sweep.items()})
    frame = frame.with_columns(time_us=pl.Series([10.0, 22.0, 30.0]), qkv_contiguous=None)
    scatter = accuracy.with_scatter(frame.drop("scatter"))["scatter"].to_list()
    assert scatter == [None, pytest.approx(22 / 20 - 1), None]
    repeated = pl.concat([frame.head(1)] * 2).with_columns(time_us=pl.Series([9.0, 11.0]), source=pl.lit("elsewhere"))
    scatter = accuracy.with_scatter(repeated.drop("scatter"))["scatter"].to_list()
    assert scatter == pytest.approx([0.1 * math.sqrt(2)] * 2)


def test_rows_say_where_the_tree_is_better():
    family = "half gemm, model unseen"
    ours = pl.concat(
        scored([100.0] * 3, [100 + e] * 3, left_out=pl.lit(model)) for model, e in {"a": 4.0, "b": 9.0}.items()
    )
    tree = scored([100.0] * 6, [106.0] * 6, left_out=pl.Series(["a", "a", "a", "b", "b", "b"]))
    others = [tree.with_columns(method=pl.lit(name)) for name in (BAR, "roofline")]
    rows = pl.concat([ours, *others]).with_columns(family=pl.lit(family), gpu=pl.lit("A40"))
    found = {row.name: row for row in kernel_rows(rows)}
    mean = found[f"kernels/{family}, all, mean"]
    assert mean.value == pytest.approx(6.5)
    assert mean.baseline_value == pytest.approx(6)
    assert mean.met
    assert "worst 9.0 % on A40, b" in mean.note
    assert "the tree is better on 1, by most (3.0 points) on A40, b" in mean.note
    assert found[f"kernels/{family}, all, median"].met is False
    assert found[f"kernels/{family}, A40, mean"].value == pytest.approx(6.5)


@pytest.mark.parametrize(("width", "met"), [(40.0, True), (42.9, False)])
def test_intervals_wider_than_constant_ones_are_a_miss(width, met):
    row = accuracy.width_row("half gemm", width, 42.867776, "")
    assert (row.met, row.target, row.baseline_value) == (met, "<= 42.87", 42.867776)
