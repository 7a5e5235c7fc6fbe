"""The step of a recommendation model: against the papers' algorithm, torch's own collectives, and closed forms."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.config import find_fabric, find_gpu
from lumos_nb.costs.calibration import load_calibration
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.host import Overhead, Overheads
from lumos_nb.critical_path import replay
from lumos_nb.embedding_tables import complete_tables
from lumos_nb.errors import CalibrationError, InputError, LayoutError
from lumos_nb.fake_group import dry_run
from lumos_nb.layout import Cluster
from lumos_nb.workloads.dlrm.estimates import DlrmEstimate, estimate_dlrm
from lumos_nb.workloads.dlrm.model import Dlrm, DlrmTraining
from lumos_nb.workloads.dlrm.passes import Passes, passes
from lumos_nb.workloads.dlrm.plan import Plan
from lumos_nb.workloads.dlrm.steps import assembled, issued, sent_bytes
from lumos_nb.workloads.surcharges import Surcharges
from lumos_nb.workloads.work_rows import WORK

sys.path.insert(0, str(Path(__file__).parents[1] / "datasets"))
import dlrm

GPU = find_gpu("H100-SXM-80GB")
NONE = Surcharges()
MODEL = Dlrm(dense=13, bottom=(64, 32), top=(64, 1))


def tables(count: int = 4, dim: int = 32, pooling: float = 10.0) -> pl.DataFrame:
    names = pl.DataFrame({"table": [f"t{i}" for i in range(count)]})
    return names.with_columns(rows=pl.lit(10_000), dim=pl.lit(dim), pooling=pl.lit(pooling), dtype=pl.lit("fp32"))


def plan_of(count: int, devices: int, dim: int = 32) -> Plan:
    """Table-wise, one after another."""
    frame = tables(count, dim)
    return Plan.of(frame, frame.select("table", device=pl.int_range(count) % devices), [80e9] * devices)


def cluster(devices: int) -> Cluster:
    return Cluster(gpu=GPU, gpus_per_node=devices, inside=find_fabric("NVLink4 NVSwitch"))


def of(plan: Plan, model: Dlrm = MODEL, extra: Surcharges = NONE, **train: Any) -> DlrmEstimate:
    made = DlrmTraining(**{"global_batch": 1024, "launch_us": 0, **train})
    return estimate_dlrm(model, plan, made, cluster(plan.devices.height), surcharges=extra)


# --- the papers' algorithm (Lin et al., TPDS 2024), without its constants of 1 and 5 us

Op = dict[str, Any]


def two_streams(ops: list[Op], ranks: int) -> float:
    """End of a step in us: ops have `comm`, `reads` (the last collective), `t1`, `t2`, `t4`, `t3`, `us` a rank."""
    cpu, streams = np.zeros(ranks), {"compute": np.zeros(ranks), "comm": np.zeros(ranks)}
    front = np.zeros(ranks)
    for op in ops:
        if op["reads"] or op["comm"]:
            streams["compute"], streams["comm"] = front.copy(), front.copy()
        cpu += op["t1"] + op["t2"]
        name = "comm" if op["comm"] else "compute"
        streams[name] = np.maximum(streams[name], cpu + op["t4"])
        if op["comm"]:
            streams[name] = np.maximum(streams["compute"], streams[name])
        streams[name] = streams[name] + op["us"]
        cpu += op["t4"]
        if op["comm"]:
            streams[name] = np.full(ranks, streams[name].max())
        cpu += op["t3"]
        front = np.maximum(streams["compute"], streams["comm"])
    return float(np.maximum(front, cpu).max())


def replayed(ops: list[Op], ranks: int) -> float:
    """The same by the graph of a step."""
    rows = [
        {"kind": "comm", "collective": "all_reduce", "stream": "comm"}
        if op["comm"]
        else {"kind": "compute", "stream": "compute"}
        for op in ops
    ]
    page = pl.DataFrame(rows, schema={**WORK, "flops": pl.Float64(), "bytes": pl.Float64()})
    last = -1
    waits = []
    for at, op in enumerate(ops):
        if op["reads"]:
            waits.append((last, at))
        last = at if op["comm"] else last
    parts = [
        page.with_columns(
            rank=pl.lit(rank), dur_us=pl.Series([op["us"][rank] for op in ops]), low_us=0.0, high_us=0.0,
            launch_us=pl.Series([float(op["t1"] + op["t2"] + op["t4"]) for op in ops]),
            after_us=pl.Series([float(op["t3"]) for op in ops]),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    graph = assembled(pl.concat(parts), Passes(page, tuple(waits)), ranks).graph()
    return replay(graph).makespan_ns / 1e3


def op(
    us: list[float],
    *,
    comm: bool = False,
    reads: bool = False,
    t1: float = 0,
    t2: float = 0,
    t4: float = 0,
    t3: float = 0,
) -> Op:
    return {"us": np.array(us, dtype=float), "comm": comm, "reads": reads, "t1": t1, "t2": t2, "t4": t4, "t3": t3}


HAND = [
    # two ranks, launches of 10 us: lookups end at 60 and 110, so both exchanges run from 110 to 150; meanwhile an MLP
    # of 30 us, to 140 at the later rank; what reads the exchange runs from 150 to 170, the host is done at 40
    op([50, 100], t4=10),
    op([40, 40], t4=10, comm=True),
    op([30, 30], t4=10),
    op([20, 20], t4=10, reads=True),
]


def test_a_step_worked_out_by_hand() -> None:
    assert two_streams(HAND, 2) == 170.0
    assert replayed(HAND, 2) == 170.0


times = st.integers(0, 50).map(float)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Op], int]:
    """Operators in which each collective is read before the next one begins, as in a model's forward and backward."""
    ranks, found, open_ = draw(st.integers(1, 3)), [], False
    for _ in range(draw(st.integers(1, 12))):
        comm = not open_ and draw(st.booleans())
        reads = open_ and draw(st.booleans())
        # of a collective the paper lets the slowest rank's count for all
        us = [draw(times)] * ranks if comm else [draw(times) for _ in range(ranks)]
        found.append(op(us, comm=comm, reads=reads, t1=draw(times), t2=draw(times), t4=draw(times), t3=draw(times)))
        open_ = (open_ or comm) and not reads
    return found, ranks


@settings(max_examples=60, deadline=None)
@given(programs())
def test_replay_agrees_with_the_algorithm_of_two_streams(program: tuple[list[Op], int]) -> None:
    assert replayed(*program) == pytest.approx(two_streams(*program), abs=1e-3)


# --- what a device does


@pytest.mark.parametrize("interaction", ["dot", "cat", "cross"])
def test_backward_products_are_twice_those_of_forward_but_for_the_first_input(interaction: Any) -> None:
    crossed = {"cross_layers": 2, "cross_rank": 16} if interaction == "cross" else {}
    model = Dlrm(dense=13, bottom=(64, 32), top=(64, 1), interaction=interaction, **crossed)
    table = passes(model, plan_of(4, 1), DlrmTraining(global_batch=128)).table
    flops = dict(table.filter(pl.col("op").is_in(["gemm", "gemm_bias"])).group_by("pass").agg(pl.sum("flops")).rows())
    weights = model.weights([32] * 4)
    assert flops["fwd"] == sum(2 * 128 * n * k for _, n, k in weights)
    assert flops["bwd_grad_w"] == flops["fwd"]
    assert flops["bwd_grad_act"] == flops["fwd"] - 2 * 128 * 64 * 13


def test_the_optimizer_updates_every_parameter_once() -> None:
    model, batch = Dlrm(dense=13, bottom=(64, 32), top=(64, 1), interaction="cross", cross_layers=1, cross_rank=8), 128
    config = dlrm.DlrmConfig(bottom=(64, 32), top=(64, 1), dims=(32,) * 4, rows=(100,) * 4, pooling=(1,) * 4)
    torch_parameters = [p.numel() for p in dlrm.Dense(config).parameters()]
    for one, count in (
        (MODEL, sum(torch_parameters)),
        (model, 13 * 64 + 64 + 64 * 32 + 32 + 2 * 8 * 160 + 160 + 160 * 64 + 64 + 65),
    ):
        for fused in (True, False):
            table = passes(one, plan_of(4, 1), DlrmTraining(global_batch=batch, fused=fused)).table
            assert table.filter(phase="optimizer")["cols"].sum() == count
    single = passes(MODEL, plan_of(4, 1), DlrmTraining(global_batch=batch, fused=False)).table
    assert sorted(single.filter(phase="optimizer")["cols"]) == sorted(torch_parameters)


def test_collectives_are_those_of_torch_on_two_ranks() -> None:
    import torch

    config = dlrm.DlrmConfig(batch=64, rows=(50,) * 3, dims=(32,) * 3, pooling=(2, 3, 4))
    owner = (0, 1, 0)
    made = lambda: dlrm.sharded(config, owner, torch.zeros(10_000))  # noqa: E731
    found = dry_run(lambda step: step(), world_size=2, rank=0, setup=made, fake=False)
    seen = found.collectives.select("collective", "comm_bytes").rows()
    frame = tables(3).with_columns(pooling=pl.Series([2.0, 3.0, 4.0]))
    plan = Plan.of(frame, pl.DataFrame({"table": frame["table"], "device": owner}), [1e9] * 2)
    model = Dlrm(dense=13, bottom=config.bottom, top=config.top)
    train = DlrmTraining(global_batch=64, prefetch=False, overlap=False, bucket_bytes=0, fused=False)
    table = passes(model, plan, train).table
    assert [name for name, _ in seen] == table["collective"].drop_nulls().to_list()
    sent = sent_bytes(plan, train)
    # offsets do not travel here, since every sample has as many lookups; torch counts what stays at home too
    assert sent["indices"][0, 1] == 32 * (3 + 1) * 8
    assert sent["pooled"].tolist() == [[0.0, 32 * 64 * 4.0], [32 * 32 * 4.0, 0.0]]
    assert sent["gradients"].tolist() == [[0.0, 32 * 32 * 4.0], [32 * 64 * 4.0, 0.0]]
    assert seen[-1][1] == table.filter(collective="all_reduce")["size_bytes"].item()


# --- whole steps


def test_a_plan_that_is_even_takes_what_an_even_exchange_takes() -> None:
    found = of(plan_of(8, 4), prefetch=False)
    price = load_calibration("H100-SXM-80GB").predict_collectives(
        pl.DataFrame(
            {
                "hardware": "NVLink4 NVSwitch", "interconnect": "NVLink4 NVSwitch", "nodes": 1, "gpus": 4,
                "collective": "all_to_all", "size_bytes": 4 * 256 * 64 * 4,
            }
        )
    )["dur_us"].item()  # fmt: skip
    pooled = found.step.table.filter((pl.col("weight") == "pooled") & (pl.col("kind") == "comm"))
    assert pooled["dur_us"].to_list() == pytest.approx([price] * 4)


def test_one_device_sends_nothing_and_its_step_is_the_sum_of_its_rows() -> None:
    found = of(plan_of(4, 1), launch_us=0)
    rows = found.step.table.filter(pl.col("kind") == "compute")
    assert found.step.table["collective"].null_count() == found.step.table.height
    assert found.step_s * 1e6 == pytest.approx(rows["dur_us"].sum(), abs=0.1)
    assert found.busiest_stream_s == pytest.approx(found.step_s)


def test_a_breakdown_sums_to_each_device_s_step() -> None:
    found = of(plan_of(6, 4), overlap=False, prefetch=False)
    sums = found.breakdown.group_by("rank").agg(pl.sum("time_ns"), pl.sum("share"))
    assert sums["share"].to_list() == pytest.approx([1.0] * 4)
    assert sums["time_ns"].max() == found.step_ns
    waits = found.breakdown.filter(part="exposed_wait")
    assert waits.filter(pl.col("rank") >= 2)["time_ns"].min() > 0  # they have one table, the first two have two


def test_nothing_is_faster_for_waiting() -> None:
    plan = plan_of(12, 4)
    together, apart = of(plan, comm_streams=2), of(plan, overlap=False, prefetch=False)
    assert together.busiest_stream_s <= together.step_s < apart.step_s
    assert of(plan, global_batch=2048).step_s > together.step_s


@pytest.mark.parametrize("kind", ["column_wise", "row_wise", "data_parallel"])
def test_tables_may_be_cut_and_copied(kind: str) -> None:
    frame = tables(1)
    cut = {"column_wise": ("first_column", "dim", 16), "row_wise": ("first_row", "rows", 5000)}.get(kind)
    shards = pl.DataFrame({"table": ["t0", "t0"], "device": [0, 1], "kind": kind})
    if cut:
        first, size, half = cut
        shards = shards.with_columns(pl.Series(first, [0, half]), pl.Series(size, [half, half]))
    plan = Plan.of(frame, shards, [1e9, 1e9])
    table, sent = of(plan).step.table, sent_bytes(plan, DlrmTraining(global_batch=1024))
    exchanges = table.filter((pl.col("collective") == "all_to_all") & (pl.col("kind") == "comm"))
    width = {"column_wise": 16, "row_wise": 32, "data_parallel": 0}[kind]  # of partial sums all columns travel
    assert sent["pooled"].tolist() == [[0.0, 512 * width * 4.0], [512 * width * 4.0, 0.0]]
    assert exchanges.is_empty() == (kind == "data_parallel")
    sums = table.filter(pl.col("collective") == "all_reduce").filter(rank=0, kind="comm")["size_bytes"].to_list()
    assert (10_000 * 32 * 4 in sums) == (kind == "data_parallel")
    added = table.filter(rank=0, part="interaction", phase="forward", op="add").height
    assert added == (kind == "row_wise")


def grid_plan(nodes: int, each: int, optimizer: str = "sgd") -> Plan:
    """Three tables on nodes, cut by rows inside, one of them with its columns in two nodes; and one on a device."""
    frame = tables(4).with_columns(dim=pl.Series([32, 16, 48, 8]))
    blocks = [("t0", 0, 0, 32), ("t1", nodes - 1, 0, 16), ("t2", 0, 0, 12), ("t2", nodes - 1, 12, 36)]
    size = 10_000 // each
    shards = [
        (table, node * each + at, "grid_shard", at * size, size, first, dim)
        for table, node, first, dim in blocks
        for at in range(each)
    ]
    shards.append(("t3", 1, "table_wise", 0, 10_000, 0, 8))
    names = ["table", "device", "kind", "first_row", "rows", "first_column", "dim"]
    return Plan.of(frame, pl.DataFrame(shards, schema=names, orient="row"), [1e9] * nodes * each, optimizer=optimizer)


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (3, 4), (2, 8)])
def test_sums_inside_nodes_send_what_is_counted_number_by_number(nodes: int, each: int) -> None:
    plan, n = grid_plan(nodes, each), nodes * each
    sent = sent_bytes(plan, DlrmTraining(global_batch=5 * n), each)
    inside, between, direct = np.zeros((3, n, n))
    held: dict[tuple[str, int], list[int]] = {}  # of each column of a table the devices that have rows of it
    for row in plan.frame.iter_rows(named=True):
        for column in range(row["first_column"], row["first_column"] + row["dim"]):
            held.setdefault((row["table"], column), []).append(row["device"])
    for (table, _), devices in held.items():
        for sample in range(5 * n):
            home = sample // 5
            if table == "t3":
                direct[devices[0], home] += 4
                continue
            adder = devices[0] // each * each + home % each  # of the tables' node, with the number of the sample's
            for device in devices:
                inside[device, adder] += 4
            between[adder, home] += 4
    for name, counted in (("inside", inside), ("between", between), ("pooled", direct), ("gradients", direct.T)):
        np.fill_diagonal(counted, 0)
        assert np.array_equal(sent[name], counted), name


def test_sums_inside_nodes_spare_the_network() -> None:
    many = Cluster(
        gpu=GPU, nodes=2, gpus_per_node=8, inside=find_fabric("NVLink4 NVSwitch"), between="InfiniBand NDR 400"
    )
    frame, train = tables(4, dim=128), DlrmTraining(global_batch=65536, launch_us=0)
    wide = Dlrm(dense=13, bottom=(128,), top=(64, 1))
    halves = [
        (f"t{table}", device, 625 * device, 625)
        if every
        else (f"t{table}", 8 * (table % 2) + device, 1250 * device, 1250)
        for every in (True, False)
        for table in range(4)
        for device in range(16 if every else 8)
    ]
    names = ["table", "device", "first_row", "rows"]
    rows, grid = (
        Plan.of(frame, pl.DataFrame(some, schema=names, orient="row").with_columns(kind=pl.lit(kind)), [1e9] * 16)
        for some, kind in ((halves[:64], "row_wise"), (halves[64:], "grid_shard"))
    )
    took = [
        estimate_dlrm(wide, plan, train, many, surcharges=NONE).step.table.filter(
            (pl.col("weight") == "pooled") & (pl.col("kind") == "comm")
        )["dur_us"][0]
        for plan in (rows, grid)
    ]
    assert took[1] < took[0] / 3  # across the network 8 times fewer bytes, and as many more inside as nothing
    with pytest.raises(LayoutError, match="'t0' is a grid_shard with the same columns in several nodes of 4"):
        sent_bytes(grid, train, 4)


def test_lookups_are_priced_by_what_each_device_has() -> None:
    frame, model = tables(3), PhysicalLookup.of_sheet(GPU)
    plan = Plan.of(frame, frame.select("table", device=pl.Series([0, 0, 1])), [1e9, 1e9])
    rows = of(plan).step.table.filter(op="lookup").sort("rank")
    one, two = (model.of_sums(model.parts(complete_tables(frame.head(n)), 1024).sum(axis=0)[None])[0] for n in (1, 2))
    assert rows.filter(pl.col("pass") == "fwd")["dur_us"].to_list() == pytest.approx([two[0], one[0]])
    assert rows.filter(pl.col("pass") == "bwd")["dur_us"].to_list() == pytest.approx([two[1], one[1]])


def overheads(*kinds: str) -> Overheads:
    us = {"T1": 3.0, "T2": 2.0, "T4": 4.0, "T3": 1.0}
    return Overheads(
        tuple(
            Overhead(
                overhead=kind, name=None, pooled_from="all", count=1, outliers=0, mean_us=us[kind], trimmed_us=us[kind],
                median_us=us[kind], p10_us=us[kind], p90_us=us[kind],
            )
            for kind in kinds
        )
    )  # fmt: skip


def test_a_host_that_is_late_decides() -> None:
    plan = plan_of(2, 1)
    train = DlrmTraining(global_batch=8)
    slow = estimate_dlrm(MODEL, plan, train, cluster(1), surcharges=NONE, overheads=overheads("T1", "T2", "T3", "T4"))
    rows = slow.step.table.filter(kind="compute")
    # each row is issued 9 us after the host began with it, the next one begins a microsecond later; the last row runs
    until_last = 10.0 * rows.height - 1.0
    assert slow.step_s * 1e6 == pytest.approx(max(until_last + rows["dur_us"][-1], until_last + 1), abs=0.1)
    assert slow.breakdown.filter(part="host_bound")["share"].item() > 0.2
    with pytest.raises(CalibrationError, match="T4"):
        issued(rows, overheads("T1", "T2", "T3"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"global_batch": 1023}, "global_batch is 1023; 2 devices"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"launch_us": float("nan")}, "launch_us is nan"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        of(plan_of(2, 2), **change)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bottom": ()}, "bottom is"),
        ({"top": (4,)}, "top is"),
        ({"interaction": "cross"}, "cross_layers is 0"),
        ({"cross_layers": 2}, "cross_layers is 2"),
        ({"dense": 0}, "dense is 0"),
        ({"interaction": "mean"}, "interaction is 'mean'"),
    ],
)
def test_a_model_that_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Dlrm(**{"dense": 13, "bottom": (64, 32), "top": (64, 1), **fields})


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(LayoutError, match="dim 16 and the bottom MLP ends in 32"):
        of(plan_of(2, 1, dim=16))
    with pytest.raises(LayoutError, match="2 device"):
        estimate_dlrm(MODEL, plan_of(2, 2), DlrmTraining(global_batch=8), cluster(4))
    with pytest.raises(InputError, match="plan"):
        estimate_dlrm(MODEL, tables(), DlrmTraining(global_batch=8), cluster(1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="overheads"):
        estimate_dlrm(MODEL, plan_of(2, 1), DlrmTraining(global_batch=8), cluster(1), overheads=3)  # type: ignore[arg-type]


def test_an_estimate_shows_itself() -> None:
    found = of(plan_of(2, 2))
    assert "samples/s" in repr(found)
    assert "<table" in found._repr_html_()
