"""Costs of lookups: cache misses against a simulated cache, and sums of parts against calls priced whole."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import polars as pl
import pytest

from lumos_nb.config import find_gpu
from lumos_nb.costs.embeddings import PhysicalLookup, lookup_us, misses, parts_named, reuse
from lumos_nb.embedding_tables import BINS, complete_tables, reuse_factor, uniform_indices, zipf_indices
from lumos_nb.errors import LayoutError

A100 = PhysicalLookup.of_sheet(find_gpu("A100-SXM-80GB"))
TABLES = complete_tables(
    pl.DataFrame({"rows": [10**6, 10**3, 10**5], "dim": [64, 64, 6], "pooling": [20.0, 20.0, 0.0]})
)


def lru_misses(indices: np.ndarray, held: int) -> int:
    """What a cache of so many rows that drops the least recently used one has to load."""
    cache: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for index in indices.tolist():
        missed += index not in cache
        cache[index] = None
        cache.move_to_end(index)
        if len(cache) > held:
            cache.popitem(last=False)
    return missed


@pytest.mark.parametrize("alpha", [None, 0.7, 1.0])
@pytest.mark.parametrize("held", [10, 1000, 5000, 15000])
def test_misses_are_those_of_a_simulated_cache(alpha: float | None, held: int) -> None:
    rows, count = 20_000, 50_000
    drawn = uniform_indices(rows, count) if alpha is None else zipf_indices(rows, count, alpha)
    bins = {name: [share] for name, share in zip(BINS, reuse_factor(drawn), strict=True)}
    table = complete_tables(pl.DataFrame({"rows": [rows], "dim": [64], "pooling": [50.0], **bins}))
    found = misses(*reuse(table, 1000), np.array([float(held)]))
    assert found == pytest.approx(lru_misses(drawn, held), rel=0.08)


def test_tables_of_unknown_reuse_are_looked_up_uniformly() -> None:
    table = complete_tables(pl.DataFrame({"rows": [20_000], "dim": [64], "pooling": [50.0]}))
    drawn = uniform_indices(20_000, 50_000)
    distinct, often = reuse(table, 1000)
    assert distinct.sum() == pytest.approx(len(np.unique(drawn)), rel=0.01)
    assert (distinct * often).sum() == pytest.approx(50_000)
    assert misses(distinct, often, np.array([5000.0])) == pytest.approx(lru_misses(drawn, 5000), rel=0.02)


def test_never_more_rows_than_a_table_has() -> None:
    once = {"bin_0": [1.0]}
    distinct, often = reuse(complete_tables(pl.DataFrame({"rows": [10], "dim": [4], "pooling": [5.0], **once})), 100)
    assert distinct.sum() == 10
    assert (distinct * often).sum() == pytest.approx(500)


def test_parts_are_the_traffic_of_a_table() -> None:
    first, _, last = (dict(zip(parts_named(A100.caches_bytes), row, strict=True)) for row in A100.parts(TABLES, 65536))
    assert (first["samples"], first["lookups"]) == (65536, 20 * 65536)
    assert first["lines"] == 8 * 20 * 65536  # 64 elements of 4 bytes in sectors of 32
    assert first["lines beyond cache 1"] <= first["lines"]
    assert first["lines beyond cache 1"] >= 8 * 10**6 * (1 - np.exp(-20 * 0.065536))
    assert first["streamed bytes"] == 65536 * (20 * 12 + 8 + 256)
    assert (last["lookups"], last["lines beyond cache 1"]) == (0, 0)


def test_a_call_costs_what_its_parts_sum_to() -> None:
    sets = [[0], [1], [2], [0, 1, 2], []]
    priced = lookup_us(A100, TABLES, 65536, sets)
    call = np.array(A100.forward_us[0]), np.array(A100.backward_us[0])
    assert priced[3] == pytest.approx(priced[:3].sum(axis=0) - 2 * np.array(call))
    assert priced[4].tolist() == [0.0, 0.0]
    assert lookup_us(A100, TABLES, 65536, []).shape == (0, 2)


def test_reuse_makes_a_lookup_faster_and_a_larger_table_slower() -> None:
    hot = TABLES[:1].with_columns(bin_10=pl.lit(1.0))
    assert (lookup_us(A100, hot, 65536, [[0]]) < 0.8 * lookup_us(A100, TABLES, 65536, [[0]])).all()
    small, large = lookup_us(A100, TABLES, 65536, [[1], [0]])
    assert (small < large).all()


def test_calls_that_cannot_be_are_refused() -> None:
    with pytest.raises(LayoutError, match="0 samples"):
        lookup_us(A100, TABLES, 0, [[0]])
    with pytest.raises(LayoutError, match=r"set 1 is \[3\]"):
        lookup_us(A100, TABLES, 1, [[0], [3]])
    with pytest.raises(LayoutError, match="rows = 0"):
        lookup_us(A100, TABLES.with_columns(rows=pl.lit(0)), 1, [[0]])
