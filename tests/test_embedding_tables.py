"""Frames of embedding tables, reuse factors against counts by hand, and indices that have the reuse asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.embedding_tables import (
    BINS,
    EMBEDDING_TABLES,
    MEAN_LOOKUPS,
    complete_tables,
    reuse_factor,
    reused_indices,
    uniform_indices,
    zipf_indices,
)
from lumos_nb.errors import InputError, LayoutError, SchemaError

ONE: dict[str, Any] = {"table": ["users"], "rows": [1000], "dim": [64], "pooling": [2.5]}


def test_what_is_left_out_is_filled_in() -> None:
    whole = complete_tables(pl.DataFrame({"rows": [10, 20], "dim": [4, 8], "pooling": [1, 2], "kept": ["a", "b"]}))
    assert whole.columns == [*EMBEDDING_TABLES.columns, "kept"]
    assert whole["table"].to_list() == ["0", "1"]
    assert whole["dtype"].to_list() == ["fp32", "fp32"]
    assert whole.select(BINS).to_numpy().sum() == 0
    assert complete_tables(whole).equals(whole)


def test_formats_have_one_spelling_and_bins_sum_to_one() -> None:
    bins = {name: [0.333] for name in BINS[:3]}
    whole = complete_tables(pl.DataFrame({**ONE, "dtype": ["torch.bfloat16"], **bins}))
    assert whole["dtype"].item() == "bf16"
    assert whole.select(BINS).to_numpy().sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": [0]}, "'users'.*rows = 0"),
        ({"rows": [None]}, "'users'.*rows = None"),
        ({"dim": [-4]}, "'users'.*dim = -4"),
        ({"dim": [2.5]}, "'users'.*dim = 2.5"),
        ({"pooling": [-1.0]}, "'users'.*pooling = -1.0"),
        ({"pooling": [float("nan")]}, "'users'.*pooling = nan"),
        ({"pooling": [float("inf")]}, "'users'.*pooling = inf"),
        ({"bin_3": [float("nan")]}, "'users'.*bin_3 = nan"),
        ({"bin_3": [0.5]}, "'users'.*sum to 0.5"),
        ({"dtype": ["fp33"]}, "'users'.*fp33"),
        ({"table": [None]}, "has no name"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    frame = pl.DataFrame(ONE | change)
    if frame["rows"].dtype == pl.Null:
        frame = frame.with_columns(pl.col("rows").cast(pl.Int64))
    with pytest.raises(LayoutError, match=said):
        complete_tables(frame)


def test_a_name_stands_once_and_columns_hold_numbers() -> None:
    twice = pl.DataFrame({"table": ["a", "b", "b"], "rows": 10, "dim": 4, "pooling": 1.0})
    with pytest.raises(LayoutError, match=r"'b' \(row 1\) is there twice"):
        complete_tables(twice)
    with pytest.raises(SchemaError, match="dim is String"):
        complete_tables(pl.DataFrame(ONE | {"dim": ["64"]}))
    with pytest.raises(SchemaError, match=r"lacks column.*pooling"):
        complete_tables(pl.DataFrame(ONE).drop("pooling"))
    with pytest.raises(InputError, match="dict"):
        complete_tables(ONE)  # type: ignore[arg-type]


def test_reuse_factor_of_counts_by_hand() -> None:
    counts = [1, 1, 2, 3, 4, 5, 8, 9, 32768, 32769]
    of_each = dict(zip(range(17), reuse_factor(np.repeat(np.arange(len(counts)), counts)), strict=True))
    expected = {0: 0.2, 1: 0.1, 2: 0.2, 3: 0.2, 4: 0.1, 15: 0.1, 16: 0.1}
    assert of_each == pytest.approx(dict.fromkeys(range(17), 0.0) | expected)
    assert reuse_factor([]).tolist() == [0.0] * 17
    with pytest.raises(InputError, match="float64"):
        reuse_factor([0.5])


def test_mean_lookups_lie_in_their_bins() -> None:
    assert MEAN_LOOKUPS[:2].tolist() == [1.0, 2.0]
    assert (MEAN_LOOKUPS[2:] > 2.0 ** np.arange(1, 16)).all()
    assert (MEAN_LOOKUPS[2:] <= 2.0 ** np.arange(2, 17)).all()
    assert MEAN_LOOKUPS[2] == pytest.approx(3 * np.log2(3 / 2) + 4 * np.log2(4 / 3))


def test_uniform_indices_hit_the_expected_number_of_rows() -> None:
    found = uniform_indices(10_000, 20_000, seed=1)
    assert len(np.unique(found)) == pytest.approx(10_000 * (1 - np.exp(-2.0)), rel=0.01)
    assert (found == uniform_indices(10_000, 20_000, seed=1)).all()


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.2])
def test_zipf_indices_are_as_popular_as_their_rank_says(alpha: float) -> None:
    rows, count = 500, 200_000
    counts = np.sort(np.bincount(zipf_indices(rows, count, alpha, seed=3), minlength=rows))[::-1]
    weight = np.arange(1, rows + 1) ** -alpha
    expected = count * weight / weight.sum()
    assert counts.sum() == count
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())  # sorted counts are apart from random ones


PUBLIC_2021 = [0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001]
"""Shares of rows by reuse, facebookresearch/dlrm_datasets, locality_stats.txt, fbgemm_t856_bs65536."""


@pytest.mark.parametrize(
    "bins", [PUBLIC_2021, [0, 0, 1.0], [0.5] + [0] * 9 + [0.5], [1.0]], ids=["public", "3 to 4", "two kinds", "once"]
)
def test_indices_have_the_reuse_asked_for(bins: list[float]) -> None:
    asked = np.pad(np.array(bins) / np.sum(bins), (0, 17 - len(bins)))
    found = reused_indices(2_000_000, 400_000, asked, seed=2)
    assert len(found) == 400_000
    assert found.min() >= 0
    assert found.max() < 2_000_000
    assert np.abs(reuse_factor(found) - asked).sum() < 0.01


def test_more_rows_than_a_table_has_are_refused() -> None:
    with pytest.raises(LayoutError, match="spread over 1000 rows; the table has 999"):
        reused_indices(999, 1000, np.eye(17)[0])
    assert sorted(reused_indices(1000, 1000, np.eye(17)[0])) == list(range(1000))


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 300), count=st.integers(0, 500), alpha=st.floats(0, 3), seed=st.integers(0, 9))
def test_indices_lie_in_the_table(rows: int, count: int, alpha: float, seed: int) -> None:
    for found in (uniform_indices(rows, count, seed), zipf_indices(rows, count, alpha, seed)):
        assert len(found) == count
        assert ((found >= 0) & (found < rows)).all()


@pytest.mark.parametrize(
    "draw", [uniform_indices, lambda r, n: zipf_indices(r, n, 1.0), lambda r, n: reused_indices(r, n, np.eye(17)[0])]
)
def test_sizes_that_cannot_be_are_refused(draw: Any) -> None:
    with pytest.raises(LayoutError, match="0 rows"):
        draw(0, 5)
    with pytest.raises(LayoutError, match="-1 indices"):
        draw(5, -1)


def test_distributions_that_cannot_be_are_refused() -> None:
    for alpha in (-0.5, float("nan"), float("inf")):
        with pytest.raises(LayoutError, match="alpha"):
            zipf_indices(10, 10, alpha)
    for bins in (np.zeros(17), -np.eye(17)[0], np.ones(16), np.full(17, np.nan)):
        with pytest.raises(LayoutError, match="17 shares"):
            reused_indices(10, 10, bins)
