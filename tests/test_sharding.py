"""Plans that the search finds: never over memory, never worse than rules of thumb, close to the best there is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.costs.calibration import load_calibration
from lumos_nb.errors import InputError, LayoutError
from lumos_nb.layout import Cluster
from lumos_nb.workloads.dlrm.estimates import estimate_dlrm
from lumos_nb.workloads.dlrm.heuristics import HEURISTICS, place_by_rule
from lumos_nb.workloads.dlrm.model import Dlrm, DlrmTraining
from lumos_nb.workloads.dlrm.node_sharding import shard_over_nodes
from lumos_nb.workloads.dlrm.plan import FIGURES, Plan
from lumos_nb.workloads.dlrm.sharding import shard
from lumos_nb.workloads.dlrm.sharding_costs import FabricExchange, ShardingCosts

MB = 10**6


@dataclass(frozen=True)
class Fused:
    """A fused call whose time bends: a launch, a price a table, and lookups that get cheaper as there are more."""

    per_table_us: float = 2.0
    per_number_us: float = 1e-5
    power: float = 0.9

    def parts(self, tables: pl.DataFrame, batch: int) -> np.ndarray:
        dim, pooling = (tables[name].cast(pl.Float64).to_numpy() for name in ("dim", "pooling"))
        return np.column_stack([np.ones(len(dim)), batch * pooling * (dim + 8.0)])

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        forward = 10 + sums[:, 0] * self.per_table_us + (sums[:, 1] * self.per_number_us) ** self.power
        return np.column_stack([forward, 2 * forward])


def cluster(devices: int, nodes: int = 1) -> Cluster:
    return Cluster(
        gpu="A100-SXM-80GB",
        nodes=nodes,
        gpus_per_node=devices // nodes,
        inside="NVLink3 NVSwitch",
        between="InfiniBand HDR 200" if nodes > 1 else None,
    )


def costs_of(devices: int, **more) -> ShardingCosts:
    return ShardingCosts.of(Fused(), cluster(devices), more.pop("batch", 16384), **more)


def task(count: int, seed: int, max_dim: int = 128) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    dims = 4 * 2 ** np.arange(int(np.log2(max_dim // 4)) + 1)
    return pl.DataFrame(
        {
            "rows": rng.lognormal(11, 2, count).astype(int) + 100,
            "dim": rng.choice(dims, count),
            "pooling": rng.lognormal(2, 1.2, count),
        }
    )


def by_rules(tables, costs, memory, **more):
    """Total time of each heuristic that finds room."""
    found = {}
    for rule in HEURISTICS:
        try:
            found[rule] = costs.price(place_by_rule(rule, tables, memory, **more)).total_us
        except LayoutError:
            continue
    return found


@settings(max_examples=12, deadline=None)
@given(
    count=st.integers(1, 24),
    devices=st.sampled_from([2, 4]),
    seed=st.integers(0, 10**6),
    room=st.floats(1.05, 3.0),
    optimizer=st.sampled_from(["sgd", "row_wise_adagrad", "adam"]),
)
def test_plans_keep_to_memory_are_repeatable_and_not_worse_than_any_rule(count, devices, seed, room, optimizer):
    tables, costs = task(count, seed), costs_of(devices)
    per_number = {"sgd": 4, "row_wise_adagrad": 6, "adam": 12}[optimizer]
    need = float((tables["rows"] * tables["dim"]).sum() * per_number)
    memory = [max(room * need / devices, 1e5) * (1 + device % 2) for device in range(devices)]
    plan = shard(tables, cluster(devices), costs, memory_bytes=memory, optimizer=optimizer, rounds=3)
    assert (plan.devices["bytes"] <= plan.devices["memory_bytes"]).all()
    again = shard(tables, cluster(devices), costs, memory_bytes=memory, optimizer=optimizer, rounds=3)
    assert again.frame.equals(plan.frame)
    for rule, total in by_rules(tables, costs, memory, optimizer=optimizer).items():
        assert plan.total_us <= total * (1 + 1e-9), rule


def best_placement(tables: pl.DataFrame, costs: ShardingCosts, memory: float) -> float:
    """The least total time of all placements of whole tables, each of them priced."""
    frame = Plan.of(tables, pl.DataFrame({"table": map(str, range(tables.height)), "device": 0}), [np.inf]).tables
    devices = len(costs.speed)
    placed = np.array(list(itertools.product(range(devices), repeat=tables.height)))
    on = placed[:, None, :] == np.arange(devices)[:, None]  # [placements, devices, tables]
    parts, size = costs.parts(frame), (tables["rows"] * tables["dim"] * 4).to_numpy()
    took = np.where(
        on.any(axis=2)[..., None], costs.lookup_us((on @ parts).reshape(-1, 2)).reshape(*on.shape[:2], 2), 0
    )
    times = costs.device_us(took, on @ tables["dim"].to_numpy().astype(float), np.zeros(len(placed)))
    total = times.sum(axis=2).max(axis=1)
    return float(total[(on @ size <= memory).all(axis=1)].min())


@pytest.mark.parametrize("seed", range(16))
def test_small_tasks_are_within_two_percent_of_the_best_of_all_placements(seed):
    devices, count = (2, 8) if seed % 2 else (3, 7)
    tables, costs = task(count, seed), costs_of(devices)
    memory = 1.4 * float((tables["rows"] * tables["dim"]).sum() * 4) / devices
    largest = float((tables["rows"] * tables["dim"]).max() * 4)
    memory = max(memory, largest)
    plan = shard(tables, cluster(devices), costs, memory_bytes=memory, splits=())
    assert plan.total_us <= 1.02 * best_placement(tables, costs, memory)
    assert plan.splits.is_empty()


def test_a_plan_costs_what_its_devices_do_one_by_one():
    tables = pl.DataFrame(
        {"table": ["a", "b", "c"], "rows": [1000, 500, 64], "dim": [16, 8, 4], "pooling": [4.0, 2.0, 1]}
    )
    shards = pl.DataFrame(
        [("a", 0, "column_wise", 0, 1000, 0, 4), ("a", 1, "column_wise", 0, 1000, 4, 12),
         ("b", 0, "row_wise", 0, 300, 0, 8), ("b", 1, "row_wise", 300, 200, 0, 8),
         ("c", 0, "data_parallel", 0, 64, 0, 4), ("c", 1, "data_parallel", 0, 64, 0, 4)],
        schema=["table", "device", "kind", "first_row", "rows", "first_column", "dim"], orient="row",
    )  # fmt: skip
    costs = costs_of(2, batch=1000, speed=(1.0, 0.5))
    plan = costs.price(Plan.of(tables, shards, [MB, MB]))
    # numbers looked up: batch x pooling x (dim + 8); b by its rows, c for half the samples
    of_b, of_c = 1000 * 2.0 * 16, 500 * 1.0 * 12
    numbers = [1000 * 4.0 * 12 + of_b * 0.6 + of_c, 1000 * 4.0 * 20 + of_b * 0.4 + of_c]
    forward = [10 + 3 * 2.0 + (count * 1e-5) ** 0.9 for count in numbers]
    assert plan.devices["forward_us"].to_list() == pytest.approx([forward[0], 2 * forward[1]])
    assert plan.devices["backward_us"].to_list() == pytest.approx([2 * forward[0], 4 * forward[1]])
    # what it has in the backward exchange beyond the all-to-all is the all-reduce of c's gradients
    exchange = costs.exchange
    back = exchange.backward_us(np.array([[12.0, 20.0]]))[0] + exchange.all_reduce_us(np.array([64 * 4 * 4.0]))
    assert plan.devices["backward_exchange_us"].to_list() == pytest.approx(back.tolist())
    # both end together: the fast device waits for the slow one
    assert plan.devices["total_us"].to_list() == pytest.approx([plan.total_us] * 2)
    assert plan.balanced_us < plan.total_us


@pytest.mark.parametrize(("devices", "nodes"), [(4, 1), (8, 2)])
def test_exchanges_cost_what_the_collectives_say_of_uneven_messages(devices, nodes):
    model = load_calibration("A100-SXM-80GB").collectives
    exchange = FabricExchange(cluster(devices, nodes), model, 8192)
    dims = np.array([[64, 128, 4, 0], [256, 256, 256, 256], [0, 0, 0, 0]], dtype=float)
    dims = np.concatenate([dims] * (devices // 4), axis=1)
    sent = np.repeat((dims * 8192 / devices * 4)[:, :, None], devices, axis=2)
    sheets = [sheet for sheet in (exchange.cluster.inside_sheet, exchange.cluster.between_sheet) if sheet]
    expected = model.predict_uneven(sent[:2], sheets[0].name, sheets[-1].name, nodes, extra=sheets)
    assert exchange.backward_us(dims)[:, 0] == pytest.approx([*expected, 0.0])
    late = np.zeros_like(dims)
    late[:, 0] = 7.0
    assert exchange.forward_us(dims, late)[0] == pytest.approx([expected[0], *[expected[0] + 7] * (devices - 1)])


def test_nothing_is_exchanged_on_one_device():
    plan = shard(task(5, 0), cluster(1), costs_of(1))
    assert plan.devices.select(FIGURES[2:]).row(0) == (0.0, 0.0)
    assert plan.frame.height == 5


def test_a_slow_device_is_given_less_and_a_small_one_holds_less():
    tables = task(40, 3)
    slow = shard(tables, cluster(4), costs_of(4, speed=(1.0, 1.0, 1.0, 0.25)), splits=())
    lookups = slow.devices.select(pl.col("forward_us") * pl.Series([1.0, 1.0, 1.0, 0.25]))["forward_us"]
    assert lookups[3] < 0.5 * lookups[:3].min()
    need = float((tables["rows"] * tables["dim"]).sum() * 4)
    small = shard(tables, cluster(4), costs_of(4), memory_bytes=[need, need, need, need / 50])
    assert small.devices["bytes"][3] <= need / 50


@pytest.mark.parametrize(("devices", "count"), [(64, 26), (64, 100), (128, 40)])
def test_many_devices_all_have_their_share(devices, count):
    tables = task(count, devices, max_dim=128).with_columns(dim=128)
    costs = ShardingCosts.of(Fused(), cluster(devices, devices // 8), 131072)
    plan = shard(tables, cluster(devices, devices // 8), costs, rounds=2)
    assert plan.devices["shards"].min() > 0
    assert plan.total_us < 1.3 * plan.balanced_us
    assert (plan.devices["output_dim"].max() or 0) < 2 * plan.devices["output_dim"].mean()


@settings(max_examples=8, deadline=None)
@given(count=st.integers(1, 20), seed=st.integers(0, 10**6), room=st.floats(1.2, 4.0))
def test_plans_over_nodes_keep_to_memory_and_columns_to_a_node(count, seed, room):
    tables, many = task(count, seed), cluster(8, 2)
    costs = ShardingCosts.of(Fused(), many, 16384)
    largest = float((tables["rows"] * 24).max())  # of four columns with Adagrad's state, on a device of eight
    memory = room * float((tables["rows"] * tables["dim"]).sum() * 8) / 8 + largest + 1e5
    plan, again = (shard_over_nodes(tables, many, costs, memory_bytes=memory, optimizer="adagrad") for _ in range(2))
    assert plan.frame.equals(again.frame)
    assert (plan.devices["bytes"] <= memory).all()
    node = plan.frame.with_columns(node=pl.col("device") // 4).group_by("table", "first_column").agg("node")
    assert (node["node"].list.n_unique() == 1).all()
    rows = plan.frame.group_by("table", "first_column").agg(pl.sum("rows")).join(
        plan.tables.select("table", all="rows"), on="table"
    )  # fmt: skip
    assert (rows["rows"] == rows["all"]).all()
    with pytest.raises(LayoutError, match="is summed up inside of nodes"):
        costs.price(plan)


@pytest.mark.parametrize("seed", range(3))
def test_an_objective_is_never_worse_than_without_it(seed):
    tables, costs = task(20, seed), costs_of(4)
    plain = shard(tables, cluster(4), costs)
    asked = []

    def bytes_sent(plan: Plan) -> float:
        asked.append(plan)
        return float(plan.devices["output_dim"].max() + plan.total_us / 1e6)

    least = shard(tables, cluster(4), costs, objective=bytes_sent)
    assert bytes_sent(least) <= bytes_sent(plain)
    assert bytes_sent(least) == min(map(bytes_sent, asked[:]))
    assert any(one.frame.equals(plain.frame) for one in asked)
    same = shard(tables, cluster(4), costs, objective=lambda plan: plan.total_us)
    assert same.total_us <= plain.total_us
    assert same.frame.equals(shard(tables, cluster(4), costs, objective=lambda plan: plan.total_us).frame)


def test_the_step_s_time_can_be_the_objective():
    tables, costs = task(12, 3).with_columns(dim=64), costs_of(4)
    model, train = Dlrm(dense=13, bottom=(1024, 64), top=(64, 1)), DlrmTraining(global_batch=16384, launch_us=0)

    def step_s(plan: Plan) -> float:
        return estimate_dlrm(model, plan, train, cluster(4), lookups=Fused()).step_s

    plain = step_s(shard(tables, cluster(4), costs, rounds=2))
    assert step_s(shard(tables, cluster(4), costs, rounds=2, objective=step_s)) <= plain


def test_one_node_has_no_plan_over_nodes():
    with pytest.raises(LayoutError, match=r"a cluster of 1 node.*or take shard"):
        shard_over_nodes(GOOD, cluster(4), costs_of(4))


def test_a_table_larger_than_a_device_is_split_and_says_why():
    tables = pl.DataFrame({"table": ["giant", "dwarf"], "rows": [10**6, 100], "dim": [64, 8], "pooling": [1.0, 1.0]})
    plan = shard(tables, cluster(4), costs_of(4), memory_bytes=100 * MB)
    assert plan.splits.row(0)[:2] == ("giant", "column_wise")
    assert "larger than what a device may hold (100 MB)" in plan.splits["why"][0]
    narrow = tables.with_columns(dim=pl.Series([4, 8]), rows=pl.Series([16 * 10**6, 100]))
    plan = shard(narrow, cluster(4), costs_of(4), memory_bytes=100 * MB)
    assert plan.splits.row(0)[:3] == ("giant", "row_wise", 4)


def test_large_tables_that_fit_only_in_part_by_columns_are_cut_by_rows():
    # five tables of 5 MB and 8 devices of 3.6: eight halves leave room for no other, but for a table cut by rows
    tables = pl.DataFrame({"rows": [10**4] * 5, "dim": [128] * 5, "pooling": [1.0] * 5})
    plan = shard(tables, cluster(8), costs_of(8), memory_bytes=3.6 * MB)
    assert set(plan.splits["kind"]) == {"column_wise", "row_wise"}
    assert (plan.devices["bytes"] <= 3.6 * MB).all()


def test_splits_beyond_columns_never_make_a_plan_worse():
    tables = pl.concat([task(12, 5), pl.DataFrame({"rows": [200] * 6, "dim": [128] * 6, "pooling": [0.1] * 6})])
    costs = costs_of(4, batch=262144)
    columns = shard(tables, cluster(4), costs, splits=("column_wise",))
    every = shard(tables, cluster(4), costs)
    assert every.total_us < columns.total_us
    assert "data_parallel" in every.splits["kind"].to_list()  # six small tables whose outputs are large


def test_a_split_says_what_it_changed():
    tables = pl.DataFrame({"rows": [10**5, 10**5, 10**5], "dim": [128, 4, 4], "pooling": [100.0, 1, 1]})
    plan = shard(tables, cluster(2), costs_of(2), splits=("column_wise",))
    assert plan.splits.row(0)[:3] == ("0", "column_wise", 2)
    assert plan.splits["why"][0].startswith("halved to 64 columns: ")


GOOD = pl.DataFrame({"table": ["a", "b"], "rows": [100, 1000], "dim": [8, 8], "pooling": [1.0, 1.0]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"rows": [100, 0]}, "table 'b'.*rows = 0", id="no rows"),
        pytest.param({"pooling": [1.0, -1.0]}, "table 'b'.*pooling = -1", id="negative pooling"),
        pytest.param({"pooling": [1.0, float("nan")]}, "table 'b'.*pooling = nan", id="pooling that is no number"),
        pytest.param({"dim": [8, -8]}, "table 'b'.*dim = -8", id="negative dim"),
        pytest.param({"rows": [100, 10**9]}, r"table 'b' \(32\.0 GB, with sgd\) finds no room", id="too large"),
    ],
)
def test_tables_that_cannot_be_are_named(change, message):
    tables = GOOD.with_columns(pl.Series(name, values) for name, values in change.items())
    with pytest.raises(LayoutError, match=message):
        shard(tables, cluster(2), costs_of(2), memory_bytes=MB)


class Broken(Fused):
    def parts(self, tables: pl.DataFrame, batch: int) -> np.ndarray:
        parts = super().parts(tables, batch)
        parts[(tables["table"] == "b").to_numpy(), 1] = np.nan
        return parts


def test_costs_that_are_no_number_name_the_table():
    costs = ShardingCosts.of(Broken(), cluster(2), 1024)
    with pytest.raises(LayoutError, match="table 'b' has no finite price by Broken"):
        shard(GOOD, cluster(2), costs)
    plan = place_by_rule("dim", GOOD, [MB, MB])
    with pytest.raises(LayoutError, match="table 'b' has no finite price"):
        costs.price(plan)


def test_costs_of_another_cluster_memory_and_words_are_refused():
    with pytest.raises(LayoutError, match="costs are of 4 devices, the cluster has 2"):
        shard(GOOD, cluster(2), costs_of(4))
    with pytest.raises(LayoutError, match="memory_bytes is"):
        shard(GOOD, cluster(2), costs_of(2), memory_bytes=[MB, -MB])
    with pytest.raises(LayoutError, match="memory_bytes is 'all'"):
        shard(GOOD, cluster(2), costs_of(2), memory_bytes="all")
    with pytest.raises(InputError, match="costs"):
        shard(GOOD, cluster(2), Fused())
    with pytest.raises(LayoutError, match="splits has 'grid'"):
        shard(GOOD, cluster(2), costs_of(2), splits=("grid",))
    with pytest.raises(LayoutError, match="speed is"):
        costs_of(2, speed=(1.0, 0.0))
    with pytest.raises(LayoutError, match="the plan has 3 devices"):
        costs_of(2).price(place_by_rule("dim", GOOD, [MB] * 3))


RULES = {
    # 4 tables: rows, dim and pooling such that every rule has another order
    "dim": [0, 1, 1, 1],
    "lookup": [1, 0, 0, 1],
    "size": [1, 0, 1, 1],
    "naive": [0, 1, 0, 1],
    "naive_chunk": [0, 0, 1, 1],
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_place_by_their_size_largest_first(rule):
    tables = pl.DataFrame(
        {"table": list("wxyz"), "rows": [10, 1000, 20, 30], "dim": [32, 16, 8, 8], "pooling": [1.0, 3.0, 1.0, 2.0]}
    )
    plan = place_by_rule(rule, tables, [MB, MB])
    assert plan.frame.sort("table")["device"].to_list() == RULES[rule]


def test_rules_look_at_memory_and_name_what_finds_none():
    tables = pl.DataFrame({"table": ["a", "b", "c"], "rows": [100] * 3, "dim": [8, 8, 8], "pooling": [1.0] * 3})
    assert place_by_rule("dim", tables, [3200, 6400]).devices["shards"].to_list() == [1, 2]
    with pytest.raises(LayoutError, match=r"table 'c' of 3\.20 kB finds no room by the rule 'dim'"):
        place_by_rule("dim", tables, [3200, 3200])
    with pytest.raises(InputError, match="no rule is called 'best'"):
        place_by_rule("best", tables, [MB])


@pytest.mark.parametrize(
    "asked",
    [
        {"beam": 1.5},
        {"caps": 10**12},
        {"rounds": "a"},
        {"candidates": 0},
        {"seed": -1},
        {"splits": 3},
        {"objective": 3},
    ],
)
def test_a_search_in_no_whole_numbers_is_refused_by_name(asked):
    with pytest.raises(InputError, match=next(iter(asked))):
        shard(GOOD, cluster(2), costs_of(2), **asked)


@pytest.mark.parametrize("said", [None, "a", float("nan"), [1.0]])
def test_an_objective_that_gives_no_number_is_refused(said):
    with pytest.raises(InputError, match="the objective gave"):
        shard(GOOD, cluster(2), costs_of(2), rounds=1, objective=lambda _: said)


def test_an_objective_may_say_that_a_plan_is_impossible():
    assert shard(GOOD, cluster(2), costs_of(2), rounds=1, objective=lambda _: float("inf")).frame.height >= 2


@pytest.mark.parametrize("huge", [{"dim": [8, 10**15]}, {"rows": [100, 2**52], "dim": [8, 2**40]}])
def test_tables_beyond_all_devices_are_refused_before_they_are_cut(huge):
    tables = GOOD.with_columns(pl.Series(name, values) for name, values in huge.items())
    with pytest.raises(
        LayoutError, match=r"all devices 2\.00 MB \(memory_bytes=; by default 80% of each\): table 'b' .* finds no room"
    ):
        shard(tables, cluster(2), costs_of(2), memory_bytes=MB)


@pytest.mark.parametrize("asked", [{"lookup": 3}, {"cluster": None}, {"batch": "a"}, {"batch": float("inf")}])
def test_costs_of_what_is_none_are_refused_by_name(asked):
    with pytest.raises(InputError, match=next(iter(asked))):
        ShardingCosts.of(**{"lookup": Fused(), "cluster": cluster(2), "batch": 1024, **asked})
