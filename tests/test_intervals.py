"""Intervals from residuals of groups left out: coverage of new groups, width where it is needed, weights, refusals."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.costs.intervals import Band
from lumos_nb.errors import InputError


def drawn(groups, rows, seed, shift=0.1):
    """Residuals whose spread falls with the difficulty, in groups that are each off by something of their own."""
    random = np.random.default_rng(seed)
    difficulty = random.uniform(0.0, 8.0, groups * rows)
    group = np.repeat(np.arange(groups), rows)
    own = random.normal(0.0, shift, groups)[group]
    return own + random.normal(0.0, 0.02 + 0.3 * np.exp(-difficulty)), difficulty, group


def covered(band, residual, difficulty):
    low, high = band.around(np.ones(len(residual)), difficulty)
    inside = (np.exp(residual) >= low) & (np.exp(residual) <= high)
    return inside.mean(), np.median(high - low)


def test_new_groups_are_covered_at_the_nominal_rate():
    shares = []
    for seed in range(20):
        band = Band.fitted(*drawn(30, 60, seed))
        residual, difficulty, _ = drawn(30, 60, 1000 + seed)
        shares.append(covered(band, residual, difficulty)[0])
    assert 0.87 < np.mean(shares) < 0.94


def test_a_band_by_difficulty_is_narrower_than_one_width_for_all():
    sample, new = drawn(30, 200, 1, shift=0.01), drawn(30, 200, 2, shift=0.01)
    by_difficulty, constant = Band.fitted(*sample), Band.fitted(*sample, bins=1)
    share, width = covered(by_difficulty, *new[:2])
    constant_share, constant_width = covered(constant, *new[:2])
    assert share > 0.87
    assert constant_share > 0.87
    assert width < 0.75 * constant_width


def test_every_group_weighs_the_same_however_many_rows_it_has():
    random = np.random.default_rng(5)
    many, few = random.normal(0.0, 0.01, 10_000), random.normal(0.0, 0.2, 9 * 20)
    group = np.concatenate([np.zeros(10_000), np.repeat(np.arange(1.0, 10.0), 20)])
    band = Band.fitted(np.concatenate([many, few]), np.zeros(10_180), group, bins=1)
    assert band.groups == 10
    assert band.high[0] == pytest.approx(1.64 * 0.2, rel=0.2)


@pytest.mark.parametrize("groups", [2, 3, 4, 6, 12])
def test_a_new_group_is_covered_from_few_others(groups):
    shares = []
    for seed in range(150):
        random = np.random.default_rng(seed)
        rows = np.repeat(random.normal(0.0, 0.1, groups + 1), 60) + random.normal(0.0, 0.1, 60 * (groups + 1))
        band = Band.fitted(rows[60:], np.zeros(60 * groups), np.repeat(np.arange(groups), 60))
        shares.append(covered(band, rows[:60], np.zeros(60))[0])
    assert 0.86 < np.mean(shares) < 0.985


def test_many_groups_have_the_quantiles_of_all_rows_together():
    residual, _, group = drawn(400, 50, 6)
    residual = residual - np.random.default_rng(7).normal(0.0, 0.1, len(residual))
    low, high = Band.fitted(residual, np.zeros(len(residual)), group, bins=1).around(np.ones(1), np.zeros(1))
    assert np.log([low[0], high[0]]) == pytest.approx(np.quantile(residual, [0.05, 0.95]), rel=0.1)


def test_of_several_difficulties_those_that_tell_are_found():
    random = np.random.default_rng(8)
    several = random.normal(0.0, 1.0, (4000, 3))
    residual = random.normal(0.0, 0.05 * np.exp(0.8 * several[:, 1]))
    band = Band.fitted(residual, several, np.repeat(np.arange(40), 100))
    assert np.array(band.slopes) == pytest.approx([0.0, 0.8, 0.0], abs=0.12)
    low, high = band.around(np.ones(2), np.array([[0.0, -1.5, 0.0], [0.0, 1.5, 0.0]]))
    assert (high - low)[1] > 4 * (high - low)[0]


def test_few_rows_are_one_bin_and_their_extremes():
    band = Band.fitted(np.array([-0.1, 0.0, 0.2]), np.array([1.0, 2.0, 3.0]), np.array(["a", "b", "c"]))
    assert (band.low, band.high, band.rows) == ((-0.1,), (0.2,), 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.5, 0.98))
def test_a_higher_level_is_never_narrower(seed, level):
    sample = drawn(8, 40, seed)
    less, more = Band.fitted(*sample, level=level), Band.fitted(*sample, level=min(0.99, level + 0.01))
    assert all(a >= b for a, b in zip(less.low, more.low, strict=True))
    assert all(a <= b for a, b in zip(less.high, more.high, strict=True))


def test_an_interval_holds_the_prediction_of_a_fit_that_is_right():
    residual, difficulty, group = drawn(10, 100, 3, shift=0.0)
    low, high = Band.fitted(residual, difficulty, group).around(np.full(5, 7.0), np.linspace(-3.0, 12.0, 5))
    assert (low < 7.0).all()
    assert (high > 7.0).all()


@pytest.mark.parametrize(
    ("residual", "difficulty", "group"),
    [
        pytest.param([], [], [], id="no rows"),
        pytest.param([0.1, 0.2], [1.0], ["a", "b"], id="lengths that differ"),
        pytest.param([0.1, np.nan], [1.0, 2.0], ["a", "b"], id="a residual that is no number"),
        pytest.param([0.1, 0.2], [1.0, np.inf], ["a", "b"], id="a difficulty without bound"),
    ],
)
def test_residuals_are_refused(residual, difficulty, group):
    with pytest.raises(InputError, match="needs finite residuals"):
        Band.fitted(np.array(residual), np.array(difficulty), np.array(group))


def test_a_band_is_the_same_after_json():
    band = Band.fitted(*drawn(5, 50, 4))
    assert msgspec.json.decode(msgspec.json.encode(band), type=Band) == band
