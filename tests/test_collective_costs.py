"""Costs of collectives: constants found again, floors, monotony, uneven all-to-alls, what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest

from lumos_nb import datasets
from lumos_nb.config import Fabric, find_fabric
from lumos_nb.costs.collective_plans import BUS_FACTOR, CHANNELS, Constants
from lumos_nb.costs.collectives import CollectiveModel, collective_samples, fit_collectives, priceable
from lumos_nb.errors import CalibrationError, InputError, SchemaError
from lumos_nb.graph import build_graph
from lumos_nb.ops import build_ops
from lumos_nb.traces.run import load_run

SIZES = 2 ** np.arange(10, 35)
COLLECTIVES = tuple(BUS_FACTOR)
ONE_NODE = {"hardware": "H100-SXM-80GB", "interconnect": "NVLink4/NVSwitch", "nodes": 1, "gpus": 8}
TWO_NODES = {**ONE_NODE, "interconnect": "InfiniBand NDR 400", "nodes": 2, "gpus": 16}
PAIRS = {"hardware": "A40", "interconnect": "NVLink bridge pairs + PCIe", "nodes": 1, "gpus": 4}
A100 = {"hardware": "A100-SXM", "interconnect": "NVLink3/NVSwitch", "nodes": 1, "gpus": 8}
LAYOUTS = {"one node": ONE_NODE, "two nodes": TWO_NODES, "bridged pairs": PAIRS, "a node without NVLS": A100}
DEFAULT = CollectiveModel(shared=Constants(), links={}, seen=())


def sweep(collective: str, layout: dict[str, object] = ONE_NODE) -> pl.DataFrame:
    return pl.DataFrame({**layout, "collective": collective, "size_bytes": SIZES})


def sweeps(*layouts: dict[str, object]) -> pl.DataFrame:
    return pl.concat([sweep(collective, layout) for layout in layouts for collective in COLLECTIVES])


def measured_by(model: CollectiveModel, frame: pl.DataFrame, noise: float = 0.0) -> pl.DataFrame:
    scatter = np.exp(np.random.default_rng(0).normal(0, noise, frame.height))
    return frame.with_columns(time_us=model.predict(frame)["dur_us"] * scatter)


def test_a_fit_finds_the_constants_that_made_its_samples() -> None:
    truth = Constants(
        launch_us=6.0, step=0.6, gather=12.0, ring=0.72, tree=0.4, switch=0.5, pair=0.65, half=4.0, pair_half=2.0
    )
    made_by = CollectiveModel(shared=Constants(), links={"NVLink4 NVSwitch": truth}, seen=())
    layouts = [{**ONE_NODE, "gpus": gpus} for gpus in (2, 4, 8)]
    found = fit_collectives(measured_by(made_by, sweeps(*layouts), noise=0.02)).links["NVLink4 NVSwitch"]
    for name in ("ring", "switch", "pair"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02), name
    for name in ("launch_us", "step", "half", "pair_half"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.25), name


def test_a_fabric_with_few_samples_stays_near_the_shared_constants_and_one_without_has_them() -> None:
    slow = CollectiveModel(shared=Constants(ring=0.5), links={}, seen=())
    model = fit_collectives(measured_by(slow, sweeps(ONE_NODE, A100)))
    assert model.shared.ring < 0.65
    assert set(model.links) == {"NVLink4 NVSwitch", "NVLink3 NVSwitch"}
    unseen = model.predict(sweep("all_gather", {**ONE_NODE, "hardware": "B200", "interconnect": "NVLink5/NVSwitch"}))
    assert unseen["basis"].unique().to_list() == ["data sheet"]
    assert unseen["out_of_range"].all()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_times_grow_with_size_and_never_beat_the_wire(collective: str, layout: dict[str, object]) -> None:
    priced = DEFAULT.predict(sweep(collective, layout))
    dur_us = priced["dur_us"].to_numpy()
    assert (np.diff(dur_us) >= 0).all()
    n, nodes = float(layout["gpus"]), float(layout["nodes"])  # type: ignore[arg-type]
    inside = find_fabric(str(layout["hardware"]))
    tier = inside if n <= (inside.max_gpus or n) else find_fabric(str(layout["interconnect"]))
    if tier is inside and inside.reduces and collective == "all_reduce":
        assert priced["busbw_gbs"].max() > 0.9 * tier.bytes_per_s / 1e9  # switches that add may beat a ring's wire
    elif tier is inside:
        assert priced["busbw_gbs"].max() < tier.bytes_per_s / 1e9
    else:  # what must leave a group of GPUs that share the inner tier, over all of its GPUs
        group = n / nodes if nodes > 1 else float(inside.max_gpus or 1)
        groups = n / group
        leaves = {"all_to_all": (n - group) / n, "send_recv": 1.0, "broadcast": 1 / group}
        other = (groups - 1) / groups / group * (2 if collective == "all_reduce" else 1)
        assert (dur_us > SIZES * leaves.get(collective, other) / tier.bytes_per_s * 1e6).all()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_large_collectives_take_half_the_time_on_a_fabric_twice_as_fast(collective: str) -> None:
    mine = Fabric(name="mine", source="a test", bytes_per_s=20e9, latency_us=3.0, max_gpus=8)
    twice = msgspec.structs.replace(mine, bytes_per_s=40e9)
    frame = sweep(collective, {**ONE_NODE, "hardware": "any", "interconnect": "mine", "gpus": 2})
    slow, fast = (DEFAULT.predict(frame, extra=[sheet])["dur_us"][-1] for sheet in (mine, twice))
    assert slow / fast == pytest.approx(2.0, rel=0.03)


def test_only_switches_that_add_make_an_all_reduce_faster() -> None:
    adds = Fabric(name="mine", source="a test", bytes_per_s=400e9, latency_us=3.0, max_gpus=8, reduces=True)
    frame = sweep("all_reduce", {**ONE_NODE, "hardware": "any", "interconnect": "mine"})
    with_them = DEFAULT.predict(frame, extra=[adds])["dur_us"].to_numpy()
    without = DEFAULT.predict(frame, extra=[msgspec.structs.replace(adds, reduces=False)])["dur_us"].to_numpy()
    assert (with_them <= without).all()
    assert with_them[-1] < 0.9 * without[-1]


def test_a_message_to_one_peer_has_its_share_of_the_channels_until_it_is_large() -> None:
    sent = DEFAULT.predict(sweep("send_recv")).filter(pl.col("size_bytes").is_in([1 << 26, 1 << 29]))
    share = Constants().channel_bytes_per_s * CHANNELS / 8
    assert sent["dur_us"][0] == pytest.approx((1 << 26) / share * 1e6, rel=0.05)
    assert sent["busbw_gbs"][1] > 3 * share / 1e9


@pytest.mark.parametrize("layout", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
def test_an_all_to_all_of_equal_messages_costs_what_the_even_one_does(layout: dict[str, object]) -> None:
    n = int(layout["gpus"])  # type: ignore[call-overload]
    even = DEFAULT.predict(sweep("all_to_all", layout))["dur_us"].to_numpy()
    messages = np.broadcast_to(SIZES[:, None, None] / n, (len(SIZES), n, n))
    about = (str(layout["hardware"]), str(layout["interconnect"]), int(layout["nodes"]))  # type: ignore[call-overload]
    assert DEFAULT.predict_uneven(messages, *about) == pytest.approx(even)


@pytest.mark.parametrize("layout", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
def test_an_uneven_all_to_all_is_never_faster_than_its_largest_message(layout: dict[str, object]) -> None:
    random, n = np.random.default_rng(1), int(layout["gpus"])  # type: ignore[call-overload]
    messages = np.floor(random.lognormal(14, 3, (200, n, n)))
    messages[:, 0, n - 1] = 2 * messages.max(axis=(1, 2))  # the largest goes to the other node where there is one
    about = (str(layout["hardware"]), str(layout["interconnect"]), int(layout["nodes"]))  # type: ignore[call-overload]
    uneven = DEFAULT.predict_uneven(messages, *about)
    largest = pl.DataFrame({**layout, "collective": "send_recv", "size_bytes": messages[:, 0, n - 1]})
    assert (uneven >= DEFAULT.predict(largest)["dur_us"].to_numpy() * (1 - 1e-9)).all()


def test_the_busiest_rank_decides_whether_it_sends_or_receives() -> None:
    sent = np.full((8, 8), 1 << 20)
    sending, receiving = sent.copy(), sent.copy()
    sending[0, 1:] *= 8
    receiving[1:, 0] *= 8
    about = (ONE_NODE["hardware"], ONE_NODE["interconnect"])
    even, sends, receives = DEFAULT.predict_uneven(np.stack([sent, sending, receiving]), *map(str, about))
    assert sends == receives > 2 * even


def test_what_was_measured_is_told_from_what_is_transferred() -> None:
    model = fit_collectives(measured_by(DEFAULT, sweep("all_gather")), folds=0)
    rows = pl.concat([sweep("all_gather"), sweep("all_reduce")])
    priced = model.predict(rows.with_columns(size_bytes=pl.col("size_bytes") * 2))
    assert priced["basis"].to_list() == ["measured"] * len(SIZES) + ["transferred"] * len(SIZES)
    assert priced["out_of_range"].to_list() == ([False] * (len(SIZES) - 1) + [True]) * 2


def test_intervals_come_from_sweeps_that_the_fit_had_not_seen() -> None:
    model = fit_collectives(measured_by(DEFAULT, sweeps(ONE_NODE), noise=0.1), folds=3)
    assert sum(band.groups for band in model.bands.values()) == len(COLLECTIVES)
    priced = model.predict(sweep("all_gather"))
    assert (priced["low_us"] < priced["dur_us"]).all()
    assert (priced["dur_us"] < priced["high_us"]).all()


def test_a_model_is_the_same_after_a_round_trip_through_json() -> None:
    model = fit_collectives(measured_by(DEFAULT, sweep("all_gather")))
    assert msgspec.json.decode(msgspec.json.encode(model), type=CollectiveModel) == model
    assert model.table()["fabric"].to_list() == ["NVLink4 NVSwitch", "any other"]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"collective": "all_swap"}, InputError, "row 0: collective is 'all_swap'; it needs one of all_reduce"),
        ({"interconnect": "tin cans"}, InputError, "called 'tin cans'; there are: .* Write one, Fabric"),
        ({"hardware": "abacus", "nodes": 2}, InputError, "called 'abacus', for the tier inside its nodes"),
        ({"gpus": 1}, InputError, "row 0: gpus is 1; it needs a whole number of 2 or more"),
        ({"gpus": 9, "nodes": 2}, InputError, "gpus is 9; it needs as many on each node"),
        ({"gpus": 16}, InputError, "gpus is 16; it needs 8 at most, which NVLink4 NVSwitch joins"),
        ({"size_bytes": -1}, InputError, "size_bytes is -1; it needs a number of 0 or more"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_priced_says_what_to_do(change: dict[str, object], error: type[Exception], words: str) -> None:
    row = {**ONE_NODE, "collective": "all_reduce", "size_bytes": 1 << 20, **change}
    with pytest.raises(error, match=words):
        DEFAULT.predict(pl.DataFrame(row))


def test_samples_of_a_step_last_from_the_last_arrival_to_the_last_end() -> None:
    run = load_run(datasets.path("gpt-tp"))
    graph = build_graph(run)
    samples = collective_samples(graph, "cpu", "loopback", gpus_per_node=2)
    comm = build_ops(run.events).filter((pl.col("kind") == "comm") & (pl.col("step") == samples["step"][0]))
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    truth = comm.group_by("group", "comm_seq").agg(us=(end_ns.max() - pl.col("start_ns").max()) / 1e3)
    assert sorted(samples["time_us"]) == pytest.approx(sorted(truth["us"]), rel=0.02)  # clocks are aligned by 3 us
    assert samples.select("gpus", "nodes", "collective").unique().rows() == [(2, 1, "all_reduce")]
    assert (samples["size_bytes"] > 0).all()
    assert fit_collectives(samples).predict(samples)["basis"].unique().to_list() == ["measured"]


def test_a_message_of_a_step_is_timed_between_its_two_ranks() -> None:
    samples = collective_samples(build_graph(load_run(datasets.path("gpt-pp"))), "cpu", "loopback", gpus_per_node=1)
    assert samples.select("gpus", "nodes", "collective").unique().rows() == [(2, 2, "send_recv")]


def test_a_graph_of_one_rank_has_no_collective_to_measure() -> None:
    with pytest.raises(InputError, match="record every rank"):
        collective_samples(build_graph(load_run(datasets.path("gpt-single"))), "cpu", "loopback", 1)


def test_rows_without_sheets_can_be_told_beforehand() -> None:
    rows = pl.concat([sweep("all_reduce"), sweep("all_reduce", {**TWO_NODES, "interconnect": "not stated"})])
    assert priceable(rows).to_list() == [True] * len(SIZES) + [False] * len(SIZES)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(SchemaError, match="interconnect, gpus; it has hardware"):
        DEFAULT.predict(sweep("all_reduce").drop("interconnect", "gpus"))


@pytest.mark.parametrize("frame", [sweep("all_reduce"), sweep("all_reduce").with_columns(time_us=0.0)])
def test_a_fit_without_times_says_what_to_measure(frame: pl.DataFrame) -> None:
    with pytest.raises(CalibrationError, match="measure a sweep over sizes"):
        fit_collectives(frame)


def test_matrices_that_are_not_square_are_refused() -> None:
    with pytest.raises(InputError, match=r"\(8, 7\)"):
        DEFAULT.predict_uneven(np.ones((8, 7)), "B200", "NVLink5/NVSwitch")


def test_a_million_rows_take_about_a_second() -> None:
    rows = pl.concat([sweeps(*LAYOUTS.values())] * 1700, rechunk=True)
    assert rows.height > 1_000_000
    began = time.process_time()
    priced = DEFAULT.predict(rows)
    assert time.process_time() - began < 3.0  # about one on a free core
    assert np.isfinite(priced["dur_us"].to_numpy()).all()


def test_published_sweeps_are_met_within_a_tenth(measured: Path) -> None:
    rows = pl.read_csv(measured / "collectives.csv").filter(
        pl.col("source").str.contains("Vultr|dgxc|vTrain") & (pl.col("nodes") == 1)
    )
    large = fit_collectives(rows).predict(rows).filter(pl.col("size_bytes") >= 1 << 20)
    assert (large["dur_us"] / large["time_us"] - 1).abs().mean() < 0.1  # type: ignore[operator]
