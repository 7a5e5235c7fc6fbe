"""Costs of lookups: cache misses against a simulated cache, and sums of parts against calls priced whole."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest

from lumos_nb.config import Gpu, find_gpu
from lumos_nb.costs import embedding_net
from lumos_nb.costs.embedding_net import LookupNet
from lumos_nb.costs.embedding_reuse import in_units, misses, new_rows, reuse
from lumos_nb.costs.embedding_samples import call_times, median_errors, predicted_times, unseen_times
from lumos_nb.costs.embeddings import PhysicalLookup, costs_named, parts_named
from lumos_nb.costs.lookups import lookup_us
from lumos_nb.embedding_tables import BINS, complete_tables, reuse_factor, uniform_indices, zipf_indices
from lumos_nb.errors import CalibrationError, InputError, LayoutError, SchemaError

SHEET = Gpu(
    name="cpu", source="a test's", cores=1, clock_hz=2e9, memory_bytes=2e10, memory_bytes_per_s=2e10, l2_bytes=2e6,
    peak_flops={"fp32": 1e11},
)  # fmt: skip
TIMES = ("forward_time_us", "backward_time_us")
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


@pytest.fixture(scope="module")
def lookups() -> pl.DataFrame:
    """Random calls of six groups of tables, with times that a physical model of known costs gives, and noise of 2 %."""
    rng, rows = np.random.default_rng(0), []
    for call in range(240):
        batch = int(2 ** rng.integers(6, 12))
        for table in range(int(rng.integers(1, 8))):
            bins = dict(zip(BINS, rng.dirichlet(np.linspace(3, 0.2, 17)), strict=True))
            size, dim, pooling = np.exp(rng.uniform(5, 15)), 2 ** rng.integers(2, 8), np.exp(rng.uniform(0, 4))
            about = {"call": call, "group": f"{call % 6}", "batch": batch, "table": f"{table}", "dtype": "fp32"}
            rows.append(about | {"rows": int(size), "dim": int(dim), "pooling": float(pooling), **bins})
    frame = pl.DataFrame(rows).with_columns(pl.lit(1.0).alias(name) for name in TIMES)
    start = PhysicalLookup.of_sheet(SHEET)
    costs = (20.0, 15.0, 0.01, 0.002, 5e-5, 6e-4, 0.0, 3e-3, 0.01, 0.0, 0.0, 3e-3, 0.0, 2e-3)
    known = msgspec.structs.replace(start, forward_us=costs, backward_us=tuple(4 * cost for cost in costs))
    times = predicted_times(known, frame) * np.exp(rng.normal(0, 0.02, (240, 2)))
    of_call = pl.DataFrame({"call": np.arange(240), **dict(zip(TIMES, times.T, strict=True))})
    return frame.drop(TIMES).join(of_call, on="call", maintain_order="left")


@pytest.fixture(autouse=True)
def short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network's training, cut short: what is tested is there by then."""
    monkeypatch.setattr(embedding_net, "EPOCHS", 80)


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
    first, _, last = (dict(zip(parts_named(A100.caches), row, strict=True)) for row in A100.parts(TABLES, 65536))
    assert (first["samples"], first["lookups"]) == (65536, 20 * 65536)
    assert first["lines"] == 8 * 20 * 65536  # 64 elements of 4 bytes in sectors of 32
    assert first["units beyond L2"] <= first["lines"]
    assert first["units beyond L2"] >= 8 * 10**6 * (1 - np.exp(-20 * 0.065536))
    assert first["streamed bytes"] == 65536 * (20 * 12 + 8 + 256)
    assert (last["lookups"], last["units beyond L2"]) == (0, 0)


def test_a_call_costs_what_its_parts_sum_to() -> None:
    sets = [[0], [1], [2], [0, 1, 2], []]
    priced = lookup_us(A100, TABLES, 65536, sets)
    call = np.array(A100.forward_us[0]), np.array(A100.backward_us[0])
    assert priced[3] == pytest.approx(priced[:3].sum(axis=0) - 2 * np.array(call))
    assert priced[4].tolist() == [0.0, 0.0]
    assert lookup_us(A100, TABLES, 65536, []).shape == (0, 2)


def test_a_call_of_more_lines_than_a_cache_holds_costs_more_than_its_tables() -> None:
    start = PhysicalLookup.of_sheet(SHEET)
    nothing = [0.0] * len(start.forward_us)
    costs = dict.fromkeys(costs_named(start.caches), 0.0) | {"call's lines beyond L2": 1.0}
    model = msgspec.structs.replace(start, forward_us=tuple(nothing), backward_us=tuple(costs.values()))
    tables = pl.DataFrame({"rows": [10**5, 10**5], "dim": [16, 16], "pooling": [20.0, 20.0]})  # a line a lookup
    found = lookup_us(model, tables, 1000, [[0], [1], [0, 1]])
    assert found.tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 40_000 - 2e6 / 64]]


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


def test_narrow_rows_share_lines() -> None:
    rows, count = 4000, 3000
    drawn = uniform_indices(rows, count)
    table = complete_tables(pl.DataFrame({"rows": [rows], "dim": [4], "pooling": [float(count)]}))
    size = np.array([float(rows)])
    distinct, often = in_units(*reuse(table, 1), size, np.array([0.25]))
    assert distinct.sum() == pytest.approx(len(np.unique(drawn // 4)), rel=0.02)
    assert (distinct * often).sum() == pytest.approx(count)
    alone = in_units(*reuse(table, 1), size, np.array([2.0]))
    assert alone[0].sum() == pytest.approx(len(np.unique(drawn)), rel=0.02)


@pytest.mark.parametrize("alpha", [None, 0.8])
def test_new_rows_are_those_that_the_batch_before_did_not_touch(alpha: float | None) -> None:
    rows, count = 50_000, 20_000
    drawn = uniform_indices(rows, 2 * count) if alpha is None else zipf_indices(rows, 2 * count, alpha)
    bins = {name: [share] for name, share in zip(BINS, reuse_factor(drawn[count:]), strict=True)}
    table = complete_tables(pl.DataFrame({"rows": [rows], "dim": [64], "pooling": [float(count)], **bins}))
    distinct, _ = reuse(table, 1)
    found = len(set(drawn[count:].tolist()) - set(drawn[:count].tolist()))
    assert new_rows(distinct, np.array([float(rows)])) == pytest.approx(found, rel=0.06)


def test_a_fit_finds_the_costs_that_made_the_times(lookups: pl.DataFrame, tmp_path: Path) -> None:
    made = PhysicalLookup.fit(lookups, SHEET)
    assert made.calls == lookups["call"].n_unique()
    assert made.errors is not None
    assert max(made.errors) < 0.03  # the noise is 2 %
    assert "none left out" in repr(PhysicalLookup.fit(lookups, SHEET, folds=0))
    assert "nothing measured" in repr(PhysicalLookup.of_sheet(SHEET))
    costs = dict(made.costs().select("cost", "forward_ns").iter_rows())
    assert costs["call"] == pytest.approx(20_000, rel=0.3)
    assert "240 calls; median error on tables that it had not seen 1." in repr(made)
    assert "forward" in made._repr_html_()
    assert PhysicalLookup.load(made.save(tmp_path / "made.json")) == made


@pytest.mark.parametrize(
    "text", ["{}", "no JSON", "negative", "short"], ids=["nothing", "text", "a negative cost", "a cost too few"]
)
def test_files_that_hold_no_model_are_refused(text: str, tmp_path: Path) -> None:
    file = A100.save(tmp_path / "model.json")
    good = json.loads(file.read_text())
    costs = {"negative": [-1.0] * len(good["forward_us"]), "short": good["forward_us"][1:]}
    file.write_text(json.dumps(good | {"forward_us": costs[text]}) if text in costs else text)
    with pytest.raises(CalibrationError, match=r"model\.json"):
        PhysicalLookup.load(file)
    with pytest.raises(CalibrationError, match=r"missing\.json"):
        PhysicalLookup.load(tmp_path / "missing.json")
    with pytest.raises(InputError, match="cannot be written"):
        A100.save(tmp_path / "no folder" / "model.json")


def test_samples_that_cannot_be_are_refused(lookups: pl.DataFrame) -> None:
    nan = pl.when(pl.col("call") == 3).then(float("nan")).otherwise("forward_time_us")
    with pytest.raises(CalibrationError, match="10 calls cannot tell 14 costs apart"):
        PhysicalLookup.fit(lookups.filter(pl.col("call") < 10), SHEET)
    with pytest.raises(CalibrationError, match=r"sample of lookups 3 has forward_time_us = nan"):
        PhysicalLookup.fit(lookups.with_columns(forward_time_us=nan), SHEET)
    with pytest.raises(CalibrationError, match="no samples"):
        PhysicalLookup.fit(lookups.clear(), SHEET)
    with pytest.raises(SchemaError, match="backward_time_us"):
        PhysicalLookup.fit(lookups.drop("backward_time_us"), SHEET)
    with pytest.raises(CalibrationError, match="one group"):
        unseen_times(lookups.filter(pl.col("group") == "0"), lambda samples: PhysicalLookup.fit(samples, SHEET))


def test_no_group_is_in_the_fit_that_prices_it(lookups: pl.DataFrame) -> None:
    fitted: list[set[str]] = []

    def fit(samples: pl.DataFrame) -> PhysicalLookup:
        fitted.append(set(samples["group"]))
        return PhysicalLookup.of_sheet(SHEET)

    assert np.isfinite(unseen_times(lookups, fit)).all()
    everything = set(lookups["group"])
    assert sorted(len(everything - seen) for seen in fitted) == [1] * len(everything)
    assert set.union(*(everything - seen for seen in fitted)) == everything


def test_a_network_learns_and_is_saved_as_arrays(lookups: pl.DataFrame, tmp_path: Path) -> None:
    times = call_times(lookups)
    made = LookupNet.fit(lookups, seed=1)
    sheet_alone = LookupNet.fit(lookups.filter(pl.col("call") < 60), base=PhysicalLookup.of_sheet(SHEET))
    assert LookupNet.load(sheet_alone.save(tmp_path / "base.npz")).base == sheet_alone.base
    constant = np.exp(np.log(times).mean(axis=0))
    assert max(made.errors) < 0.7 * min(median_errors(np.broadcast_to(constant, times.shape), times))
    again = LookupNet.load(made.save(tmp_path / "net.npz"))
    assert (predicted_times(again, lookups) == predicted_times(made, lookups)).all()
    assert (again.calls, again.errors, again.base) == (made.calls, made.errors, None)
    assert repr(again) == repr(made)
    assert (LookupNet.fit(lookups, seed=1).layers[0] == made.layers[0]).all()


def test_a_network_on_the_physical_model_learns_what_that_misses(lookups: pl.DataFrame, tmp_path: Path) -> None:
    many = pl.len().over("call") >= 5  # what no sum of traffic tells: a factor
    times = {name: pl.col(name) * pl.when(many).then(2.0).otherwise(1.0) for name in TIMES}
    samples = lookups.with_columns(**times)
    base = PhysicalLookup.fit(samples, SHEET)
    made = LookupNet.fit(samples, base=base)
    assert base.errors is not None
    assert max(made.errors) < 0.8 * max(base.errors)
    again = LookupNet.load(made.save(tmp_path / "net.npz"))
    assert again.base == base
    assert (predicted_times(again, samples) == predicted_times(made, samples)).all()


def test_sums_price_a_call_whatever_the_model(lookups: pl.DataFrame) -> None:
    net = LookupNet.fit(lookups, features="neuroshard")
    parts = net.parts(TABLES, 512)
    assert parts.shape == (3, 32)
    expected = net.of_sums(parts[[0, 2]].sum(axis=0, keepdims=True))
    assert lookup_us(net, TABLES, 512, [[0, 2], []])[:1] == pytest.approx(expected)


def test_files_that_hold_no_network_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", features=np.array("lin"))
    np.save(tmp_path / "pickled.npz", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "pickled.npz.npy").rename(tmp_path / "pickled.npz")
    for name in ("other.npz", "pickled.npz", "missing.npz"):
        with pytest.raises(CalibrationError, match=name):
            LookupNet.load(tmp_path / name)


def test_a_network_needs_groups_to_stop_by_and_a_file_to_go_to(lookups: pl.DataFrame, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="3 groups"):
        LookupNet.fit(lookups.filter(pl.col("group").is_in(["0", "1"])))
    net = LookupNet.fit(lookups.filter(pl.col("group").is_in(["0", "1", "2"])))
    with pytest.raises(InputError, match="npz"):
        net.save(tmp_path / "net.json")
