"""Costs of plans learned from samples: how right they are about others, saved and read again."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import polars as pl
import pytest

from lumos_nb.config import find_gpu
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.networks import evaluated, layer_shapes, trained
from lumos_nb.errors import CalibrationError, InputError
from lumos_nb.layout import Cluster
from lumos_nb.workloads.dlrm.exchange_net import ExchangeNet, drawn_placements, priced_exchanges
from lumos_nb.workloads.dlrm.heuristics import place_by_rule
from lumos_nb.workloads.dlrm.pretraining import augmented, load_costs, pretrain, priced_lookups, save_costs
from lumos_nb.workloads.dlrm.sharding import shard
from lumos_nb.workloads.dlrm.sharding_costs import FabricExchange, ShardingCosts

CLUSTER = Cluster(gpu="A100-SXM-80GB", gpus_per_node=2, inside="NVLink3 NVSwitch")
BATCH = 16384
PHYSICAL = PhysicalLookup.of_sheet(find_gpu("A100-SXM-80GB"))


def tables(count: int, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "rows": rng.lognormal(11, 2, count).astype(int) + 100,
            "dim": rng.choice([16, 32, 64, 128], count),
            "pooling": rng.lognormal(2, 1, count),
        }
    )


BASE = msgspec.structs.replace(PhysicalLookup.of_sheet(find_gpu("H100-SXM-80GB")), errors=(0.5, 0.5))
"""Of another GPU, so that there is something to learn."""


@pytest.fixture(scope="module")
def costs():
    exchange = ShardingCosts.of(PHYSICAL, CLUSTER, BATCH).exchange
    samples = priced_lookups(PHYSICAL, tables(60), [BATCH, BATCH // 2], count=240)
    return pretrain(samples, CLUSTER, BATCH, exchanges=priced_exchanges(exchange, 2, count=600), base=BASE)


def test_networks_rank_what_they_have_not_seen(costs):
    report = costs.report
    assert report["net"].to_list() == ["lookup forward", "lookup backward", "forward exchange", "backward exchange"]
    assert (report["rank_correlation"] > 0.95).all()
    assert (report["median_error"] < 0.1).all()
    # what was to be learned: an A100 is slower than an H100
    plan = place_by_rule("dim", tables(20), [1e11] * 2)
    wrong, right = (ShardingCosts.of(model, CLUSTER, BATCH).price(plan).total_us for model in (BASE, PHYSICAL))
    assert abs(costs.price(plan).total_us / right - 1) < 0.5 * abs(wrong / right - 1)


def test_a_plan_by_networks_is_better_than_a_random_one(costs):
    task, truth = tables(20), ShardingCosts.of(PHYSICAL, CLUSTER, BATCH)
    plan = truth.price(shard(task, CLUSTER, costs, rounds=2))
    assert plan.total_us < truth.price(place_by_rule("random", task, [1e11] * 2)).total_us


def test_exchanges_without_samples_stay_priced_by_the_fabric(costs, tmp_path):
    bare = replace(costs, exchange=costs.exchange.rest)
    again = load_costs(save_costs(bare, tmp_path / "costs"))
    assert isinstance(again.exchange, FabricExchange)


def test_saved_costs_price_the_same(costs, tmp_path):
    plan = place_by_rule("dim", tables(20, seed=7), [1e11] * 2)
    again = load_costs(save_costs(costs, tmp_path / "costs"))
    assert again.price(plan).devices.equals(costs.price(plan).devices)
    assert again.report.equals(costs.report)


def test_costs_that_cannot_be_saved_or_read_are_refused(costs, tmp_path):
    with pytest.raises(InputError, match="not of pretrain"):
        save_costs(ShardingCosts.of(PHYSICAL, CLUSTER, BATCH), tmp_path)
    with pytest.raises(CalibrationError, match="nowhere"):
        load_costs(tmp_path / "nowhere")
    folder = save_costs(costs, tmp_path / "costs")
    arrays = dict(np.load(folder / "exchange.npz"))
    np.savez(folder / "exchange.npz", **{**arrays, "forward_0": np.zeros((3, 3))})
    with pytest.raises(CalibrationError, match="forward layers are not of 2 devices"):
        load_costs(folder)


def test_a_table_is_augmented_by_its_halves():
    found = augmented(pl.DataFrame({"table": ["a", "b"], "rows": 9, "dim": [16, 12], "pooling": 1.0}))
    assert found.sort("table", "dim").select("table", "dim").rows() == [("a", 4), ("a", 8), ("a", 16), ("b", 12)]


def test_sets_are_of_one_group_and_tables_of_one_group_only():
    samples = priced_lookups(PHYSICAL, tables(40), [BATCH], count=100, seed=3)
    assert samples.group_by("call").agg(pl.col("group").n_unique())["group"].max() == 1
    assert samples.group_by("table").agg(pl.col("group").n_unique())["group"].max() == 1
    sizes = samples.group_by("call").len()["len"]
    assert (sizes.min(), sizes.max()) == (1, 15)
    assert samples.equals(priced_lookups(PHYSICAL, tables(40), [BATCH], count=100, seed=3))
    with pytest.raises(CalibrationError, match="9 tables are too few"):
        priced_lookups(PHYSICAL, tables(9), [BATCH])


def test_placements_are_even_to_random_and_the_first_device_is_not_late():
    dims, late = drawn_placements(4, 300)
    uneven = dims.max(axis=1) / dims.mean(axis=1)
    assert uneven.min() < 1.05
    assert uneven.max() > 1.5
    assert (dims.sum(axis=1) >= 10 * 4).all()
    assert (late.min(axis=1) == 0).all()
    assert late.max() <= 20_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda s: s.head(20), "10 exchanges between 2 devices", id="few"),
        pytest.param(lambda s: s.tail(-1), "give 50 exchanges or more, and of each one row", id="a device missing"),
        pytest.param(lambda s: s.with_columns(forward_us=0.0), "forward_us that is not positive", id="no time"),
        pytest.param(lambda s: s.with_columns(backward_us=np.nan), "backward_us that is not positive", id="NaN"),
    ],
)
def test_samples_of_exchanges_that_cannot_be_are_refused(change, message):
    exchange = ShardingCosts.of(PHYSICAL, CLUSTER, BATCH).exchange
    with pytest.raises(CalibrationError, match=message):
        ExchangeNet.fit(change(priced_exchanges(exchange, 2, count=60)), exchange)


def test_layers_learn_a_line_and_stop():
    import torch

    x = np.linspace(-1, 1, 200)[:, None]
    rows, y = torch.from_numpy(x).float(), torch.from_numpy(3 * x - 1).float()

    def loss(layers, some):
        hidden = torch.relu(torch.nn.functional.linear(rows[some], *layers[:2]))
        return torch.mean((torch.nn.functional.linear(hidden, *layers[2:]) - y[some]) ** 2)

    order = np.random.default_rng(0).permutation(200)
    layers = trained(
        layer_shapes([1, 32, 1]), loss, order[50:], order[:50], seed=0, minibatch=16, epochs=200, patience=20
    )
    assert np.abs(evaluated(layers, x) - (3 * x - 1)).max() < 0.25  # of values from -4 to 2
