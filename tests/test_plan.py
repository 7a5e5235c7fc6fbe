"""Plans: what lies where, what no plan can be, and what is shown and exported."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from lumos_nb.errors import InputError, LayoutError
from lumos_nb.workloads.dlrm.plan import Plan, row_blocks, shard_bytes

TABLES = pl.DataFrame(
    {
        "table": ["users", "items", "days"],
        "rows": [1000, 500, 7],
        "dim": [16, 8, 4],
        "pooling": [10.0, 2.0, 1.0],
        "dtype": ["fp32", "bf16", "fp32"],
    }
)
ROOM = [1e6, 1e6]


def shards(*rows: tuple[object, ...]) -> pl.DataFrame:
    """Shards of (table, device, kind, first_row, rows, first_column, dim) rows."""
    names = ["table", "device", "kind", "first_row", "rows", "first_column", "dim"]
    return pl.DataFrame(rows, schema=names, orient="row")


MIXED = shards(
    ("users", 0, "column_wise", 0, 1000, 0, 4),
    ("users", 1, "column_wise", 0, 1000, 4, 12),
    ("items", 0, "row_wise", 0, 300, 0, 8),
    ("items", 1, "row_wise", 300, 200, 0, 8),
    ("days", 0, "data_parallel", 0, 7, 0, 4),
    ("days", 1, "data_parallel", 0, 7, 0, 4),
)


def test_devices_hold_and_send_what_their_shards_do():
    plan = Plan.of(TABLES, MIXED, ROOM)
    # weights; the data-parallel table's gradients as well
    assert plan.devices["bytes"].to_list() == [16_000 + 4_800 + 224, 48_000 + 3_200 + 224]
    assert plan.devices["output_dim"].to_list() == [4 + 8, 12 + 8]
    assert plan.devices["shards"].to_list() == [3, 3]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [("sgd", 100 * 8 * 4), ("row_wise_adagrad", 100 * (8 * 4 + 4)), ("adagrad", 100 * 8 * 8), ("adam", 100 * 8 * 12)],
)
def test_optimizer_state_counts(optimizer, expected):
    assert shard_bytes(np.array([100]), np.array([8]), np.array([4.0]), optimizer).tolist() == [expected]


def test_lookups_of_shards_are_tables_of_their_own():
    lookups = Plan.of(TABLES, MIXED, ROOM).lookups.filter(pl.col("device") == 1)
    rows = {row["table"]: row for row in lookups.iter_rows(named=True)}
    assert (rows["users"]["dim"], rows["users"]["pooling"], rows["users"]["batch_share"]) == (12, 10.0, 1.0)
    assert (rows["items"]["rows"], rows["items"]["pooling"]) == (200, pytest.approx(0.8))
    assert rows["days"]["batch_share"] == 0.5


def test_a_table_and_a_device_are_enough():
    plan = Plan.of(TABLES, pl.DataFrame({"table": ["users", "items", "days"], "device": [1, 0, 0]}), ROOM)
    assert plan.frame.filter(pl.col("table") == "users").row(0) == ("users", 1, "table_wise", 0, 1000, 0, 16, 64_000)
    assert plan.splits.height == 0


CASES = {
    "a hole": (shards(("users", 0, "column_wise", 0, 1000, 0, 4), ("users", 1, "column_wise", 0, 1000, 8, 8)),
               "'users' has a shard from first_column 8"),
    "an overlap": (shards(("users", 0, "row_wise", 0, 600, 0, 16), ("users", 1, "row_wise", 500, 500, 0, 16)),
                   "'users' has a shard from first_row 500"),
    "too short": (shards(("users", 0, "column_wise", 0, 1000, 0, 4), ("users", 1, "column_wise", 0, 1000, 4, 8)),
                  "'users' has shards of dim 12 in all, not 16"),
    "two kinds": (shards(("users", 0, "column_wise", 0, 1000, 0, 8), ("users", 1, "table_wise", 0, 1000, 0, 16)),
                  "'users' has shards of several kinds"),
    "twice": (shards(("users", 0, "table_wise", 0, 1000, 0, 16), ("users", 1, "table_wise", 0, 1000, 0, 16)),
              "'users' is table_wise but has several"),
    "part of a table": (shards(("users", 0, "table_wise", 0, 999, 0, 16)), "'users' is not row_wise, yet"),
    "not everywhere": (shards(("users", 0, "data_parallel", 0, 1000, 0, 16)), "'users' is data_parallel: give one"),
    "a grid of dims": (shards(("users", 0, "grid_shard", 0, 500, 0, 16), ("users", 1, "grid_shard", 500, 500, 0, 8)),
                       "'users' has shards of several dims from 0 on"),
    "a torn grid": (shards(("users", 0, "grid_shard", 0, 1000, 0, 8), ("users", 0, "grid_shard", 0, 500, 8, 8),
                           ("users", 1, "grid_shard", 600, 400, 8, 8)), "'users' has a shard from first_row 600"),
    "a narrow grid": (shards(("users", 0, "grid_shard", 0, 500, 0, 8), ("users", 1, "grid_shard", 500, 500, 0, 8)),
                      "'users' has shards of dim 8 in all, not 16"),
    "a short grid": (shards(("users", 0, "grid_shard", 0, 500, 0, 16)), "'users' has shards of rows 500 in all, not 1"),
    "no such device": (shards(("users", 2, "table_wise", 0, 1000, 0, 16)), "'users' has a shard on device 2"),
    "no such table": (shards(("user", 0, "table_wise", 0, 1000, 0, 16)), "'user' is not among the tables"),
    "no such kind": (shards(("users", 0, "grid", 0, 1000, 0, 16)), "'users' has a shard of unknown kind"),
    "nothing": (shards(("users", 0, "row_wise", 0, 0, 0, 16)), "'users' has a shard of 0 rows"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "message"), [pytest.param(*case, id=name) for name, case in CASES.items()])
def test_what_is_no_plan_is_refused_by_table(given, message):
    with pytest.raises(LayoutError, match=message):
        Plan.of(TABLES.head(1), given, ROOM)


def test_a_forgotten_table_is_named():
    with pytest.raises(LayoutError, match="'days' has no shard"):
        Plan.of(TABLES, pl.DataFrame({"table": ["users", "items"], "device": [0, 1]}), ROOM)


def test_a_full_device_is_named_with_its_largest_table():
    with pytest.raises(LayoutError, match=r"device 1 would hold 64\.0 kB of 60\.0 kB, 64\.0 kB of it table 'users'"):
        Plan.of(TABLES.head(1), pl.DataFrame({"table": ["users"], "device": [1]}), [1e6, 6e4])


def test_tables_of_one_name_are_refused():
    twice = pl.concat([TABLES, TABLES.head(1)])
    with pytest.raises(LayoutError, match=r"'users' .* is there twice"):
        Plan.of(twice, pl.DataFrame({"table": ["users"], "device": [1]}), ROOM)


def test_times_give_the_slowest_device_and_an_even_spread():
    plan = Plan.of(TABLES, MIXED, ROOM)
    with pytest.raises(InputError, match="has no times"):
        _ = plan.total_us
    times = [np.array([1.0, 5.0]), np.array([2.0, 4.0]), np.array([3.0, 1.0]), np.array([1.0, 1.0])]
    names = ("forward_us", "backward_us", "forward_exchange_us", "backward_exchange_us")
    priced = plan.with_figures(**dict(zip(names, times, strict=True)))
    assert (priced.total_us, priced.balanced_us) == (11.0, 6.0 + 1.0 + 1.0)
    assert "11 µs" in repr(priced) or "11.0 µs" in repr(priced)


def test_the_table_shows_devices_and_why_tables_are_split():
    plan = Plan.of(TABLES, MIXED, ROOM, why={"users": "<b>large</b>"})
    assert plan.splits.filter(pl.col("table") == "users").row(0) == ("users", "column_wise", 2, "<b>large</b>")
    assert "3 tables in 6 shards on 2 devices" in repr(plan)
    assert "&lt;b&gt;large" in plan._repr_html_()


def test_torchrec_json_has_offsets_sizes_and_ranks():
    parameters = json.loads(Plan.of(TABLES, MIXED, ROOM).to_torchrec("model.ebc"))["plan"]["model.ebc"]
    assert parameters["users"]["ranks"] == [0, 1]
    assert parameters["users"]["sharding_spec"]["shards"][1] == {
        "shard_offsets": [0, 4],
        "shard_sizes": [1000, 12],
        "placement": "rank:1/cuda:1",
    }
    assert parameters["items"]["sharding_type"] == "row_wise"
    assert parameters["days"] == {
        "sharding_type": "data_parallel",
        "compute_kernel": "dense",
        "ranks": [0, 1],
        "sharding_spec": None,
    }


def test_a_grid_is_columns_of_nodes_cut_by_rows():
    grid = shards(("users", 0, "grid_shard", 0, 500, 0, 4), ("users", 1, "grid_shard", 500, 500, 0, 4),
                  ("users", 2, "grid_shard", 0, 600, 4, 12), ("users", 3, "grid_shard", 600, 400, 4, 12))  # fmt: skip
    plan = Plan.of(TABLES.head(1), grid, [1e6] * 4)
    assert plan.devices["bytes"].to_list() == [500 * 16, 500 * 16, 600 * 48, 400 * 48]
    assert plan.lookups["pooling"].to_list() == [5.0, 5.0, 6.0, 4.0]
    assert json.loads(plan.to_torchrec("m"))["plan"]["m"]["users"]["sharding_type"] == "grid_shard"
    one = grid.filter(pl.col("device") < 2).with_columns(dim=16)
    assert '"table_row_wise"' in Plan.of(TABLES.head(1), one, [1e6] * 2).to_torchrec("m")


@pytest.mark.parametrize(
    ("rows", "devices", "blocks"), [(10, 4, [3, 3, 3, 1]), (8, 4, [2, 2, 2, 2]), (5, 4, [2, 2, 1, 0])]
)
def test_row_blocks_are_torchrecs(rows, devices, blocks):
    assert row_blocks(rows, devices) == blocks


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        pytest.param("device", "x", "have a column that is none", id="text"),
        pytest.param("device", float("nan"), "have a column that is none", id="no number"),
        pytest.param("device", 0.5, "a shard has device = 0.5", id="half a device"),
        pytest.param("rows", 999.5, "a shard has rows = 999.5", id="half a row"),
    ],
)
def test_shards_in_no_whole_numbers_are_refused(column, value, message):
    placed = pl.DataFrame({"table": ["users"], "device": [0]}).with_columns(pl.lit(value).alias(column))
    with pytest.raises(LayoutError, match=message):
        Plan.of(TABLES.head(1), placed, ROOM)


@pytest.mark.parametrize("memory", [["a"], [10**400], [[1e9]], [float("nan")], []])
def test_memory_that_is_none_is_refused(memory):
    with pytest.raises(LayoutError, match="memory_bytes is"):
        Plan.of(TABLES.head(1), pl.DataFrame({"table": ["users"], "device": [0]}), memory)


def test_what_is_no_table_of_shards_and_no_node_is_refused():
    with pytest.raises(InputError, match="shards is None; give a DataFrame"):
        Plan.of(TABLES, None, ROOM)
    plan = Plan.of(TABLES.head(1), pl.DataFrame({"table": ["users"], "device": [0]}), ROOM)
    with pytest.raises(InputError, match="gpus_per_node=0"):
        plan.to_torchrec(gpus_per_node=0)
