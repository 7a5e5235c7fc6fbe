"""Graphs as Chakra files and back: the same times, nothing dangling, and what a simulator would get wrong refused."""

from __future__ import annotations

import msgspec
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb.errors import ChakraError, GraphError, InputError
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS
from tests.chakra_files import published

MODEL = msgspec.structs.replace(ln.Transformer.named("gpt3-175b"), layers=8)
TRAIN = ln.Training(micro_batch=1, global_batch=8, seq=2048)


def cluster(gpus: int) -> ln.Cluster:
    return ln.Cluster(
        gpu="H100-SXM-80GB", nodes=max(1, gpus // 8), gpus_per_node=min(gpus, 8),
        inside="NVLink4 NVSwitch", between="InfiniBand NDR 400",
    )  # fmt: skip


def graph(ops: list[dict[str, object]], edges: list[tuple[object, ...]]) -> Graph:
    """Ops by number, and edges (src, dst, lag_ns, from_start, rule)."""
    table = pl.DataFrame(ops, infer_schema_length=None)
    table = table.with_columns(
        op_id=pl.int_range(pl.len()), name=pl.format("op{}", pl.int_range(pl.len())), start_ns=0, step=0
    )
    table = table.with_columns(pl.lit(None).alias(name) for name in OPS.columns if name not in table.columns)
    frame = pl.DataFrame(edges, schema=["src", "dst", "lag_ns", "from_start", "rule"], orient="row")
    frame = frame.with_columns(evidence=pl.lit("exact"), hard=True)
    return Graph(
        table.select(pl.col(name).cast(kind) for name, kind in OPS.columns.items()),
        frame.select(pl.col(name).cast(kind) for name, kind in EDGES.columns.items()),
        step=0,
    )


@pytest.mark.parametrize("name", ["gpt-ddp", "gpt-tp", "gpt-pp"])
@pytest.mark.parametrize("target", [None, "astra-sim"])
def test_bundled_runs_take_the_same_time_as_chakra_files_and_pass(tmp_path, name, target):
    run = ln.build_graph(ln.load_run(ln.datasets.path(name)))
    written = ln.chakra.write(run, tmp_path, target=target)
    assert [path.name for path in written] == ["chakra.0.et", "chakra.1.et", "chakra.groups.json"]
    assert ln.chakra.validate(tmp_path, target).is_empty()
    again = ln.chakra.to_graph(tmp_path)
    was, now = ln.replay(run), ln.replay(again)
    assert abs(now.makespan_ns - was.makespan_ns) <= 1000 * len(was.path)  # a microsecond an op on the path,
    assert abs(now.makespan_ns - was.makespan_ns) <= 5000  # and far less, for sums are kept
    assert abs(now.step_ns - was.step_ns) <= 5000
    for rank in (0, 1):  # durations of every lane add up
        here = [one.filter((pl.col("rank") == rank) & (pl.col("lane") != "net")) for one in (run.ops, again.ops)]
        was_us, now_us = (dict(one.group_by("lane").agg(pl.sum("dur_ns") / 1000).iter_rows()) for one in here)
        assert now_us == pytest.approx(was_us, abs=1)
    parts = [dict(ln.breakdown(one).group_by("part").agg(pl.sum("time_ns")).iter_rows()) for one in (was, now)]
    assert parts[1] == pytest.approx(parts[0], abs=50_000)


def test_real_device_traces_take_the_same_time(traces, tmp_path):
    for path in ("torchrec/sst_long_a2a_optimizer_4", "straggler/timeline-ST.json.gz", "hta/ns_resolution_trace"):
        run = ln.build_graph(ln.load_run(traces / path, cache=False))
        folder = tmp_path / path.replace("/", "_")
        ln.chakra.write(run, folder)
        assert set(ln.chakra.validate(folder)["rule"]) <= {"attribute"}  # the profiler wrote no sizes
        was, now = ln.replay(run), ln.replay(ln.chakra.to_graph(folder))
        assert abs(now.makespan_ns - was.makespan_ns) <= min(1000 * len(was.path), 20_000)


LAYOUTS = {
    4: ln.Parallelism(tp=2, pp=2),
    8: ln.Parallelism(dp=8, zero=3),
    16: ln.Parallelism(tp=2, pp=4, dp=2, schedule="interleaved", chunks=2, zero=1),
    24: ln.Parallelism(cp=4, tp=2, pp=3, split=(3, 3, 2)),
    32: ln.Parallelism(tp=4, sequence_parallel=True, pp=4, dp=2, zero=1),
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_estimates_are_written_for_every_rank_and_pass(tmp_path, ranks):
    layout = LAYOUTS[ranks]
    found = ln.estimate(MODEL, layout, TRAIN, cluster(ranks))
    ln.chakra.write(found, tmp_path, target="astra-sim")
    assert list(ln.chakra.rank_files(tmp_path)) == list(range(ranks))
    assert ln.chakra.validate(tmp_path, "astra-sim").is_empty()
    groups = ln.chakra.read_groups(tmp_path)
    kinds = [kind for kind in ("tp", "dp", "shard") if layout.group_size(kind) > 1]
    assert {tuple(group) for kind in kinds for group in layout.groups(kind).tolist()} & {*map(tuple, groups.values())}
    now = ln.replay(ln.chakra.to_graph(tmp_path))
    assert abs(now.makespan_ns - found.result.makespan_ns) <= 5000


def test_thousands_of_ranks_are_written_one_at_a_time(tmp_path):
    """Each as it is asked for: three of 4,096, whose groups are those of all."""
    layout = ln.Parallelism(tp=8, pp=4, dp=128, zero=1)
    found = ln.estimate(MODEL, layout, msgspec.structs.replace(TRAIN, global_batch=512), cluster(4096))
    told = []
    ln.chakra.write(found, tmp_path, ranks=(0, 17, 4095), progress=told.append)
    assert told == ["writing rank 0, 1 of 3", "writing rank 17, 2 of 3", "writing rank 4095, 3 of 3"]
    groups = ln.chakra.read_groups(tmp_path)
    of_17 = ln.chakra.read_file(tmp_path / "chakra.17.et").table
    assert {tuple(groups[name]) for name in of_17["pg_name"].drop_nulls().unique()} >= {
        tuple(range(16, 24)), tuple(range(1, 1024, 8)),
    }  # fmt: skip
    last = ln.chakra.read_file(tmp_path / "chakra.4095.et").table
    assert {*of_17.filter(type="COMM_SEND_NODE")["comm_dst"]} == {17 + 1024}
    assert {*last.filter(type="COMM_RECV_NODE")["comm_src"]} == {4095 - 1024}


def test_more_ranks_than_any_job_has_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lumos_nb.exchange.chakra.conversion.MOST_RANKS", 23)
    with pytest.raises(InputError, match="has 24 ranks; files are made of 23 at most"):
        ln.chakra.write(ln.estimate(MODEL, LAYOUTS[24], TRAIN, cluster(24)), tmp_path)


def test_rings_of_an_estimate_go_round(tmp_path):
    ln.chakra.write(ln.estimate(MODEL, LAYOUTS[24], TRAIN, cluster(24)), tmp_path)
    nodes = ln.chakra.read_file(tmp_path / "chakra.12.et").table  # in the ring 8, 10, 12, 14
    ring = nodes.filter(
        pl.col("type").is_in(["COMM_SEND_NODE", "COMM_RECV_NODE"]), ~pl.col("name").str.contains("message")
    )
    assert {*ring.select("type", "comm_src", "comm_dst").rows()} == {
        ("COMM_SEND_NODE", 12, 14), ("COMM_RECV_NODE", 10, 12),
    }  # fmt: skip


def test_sizes_of_gathers_are_what_a_rank_gives(tmp_path):
    """As ASTRA-sim and the reference converter count; ours are what it gets, as nccl-tests count."""
    found = ln.estimate(MODEL, LAYOUTS[8], TRAIN, cluster(8))
    ln.chakra.write(found, tmp_path)
    nodes = ln.chakra.read_file(tmp_path / "chakra.5.et").table
    for number, kind, share in ((2, "all_gather", 8), (7, "reduce_scatter", 1)):
        was = found.graph.ops.filter(collective=kind)["comm_bytes"]
        assert len(was) > 8
        assert nodes.filter(comm_type=number)["comm_size"].to_list() == [-(-size // share) for size in was]
    again = ln.chakra.to_graph(tmp_path).ops.filter(kind="comm", rank=5)
    assert (again["comm_bytes"] / found.graph.ops.filter(kind="comm")["comm_bytes"]).max() == pytest.approx(1, abs=1e-6)


def test_peers_of_an_estimate_are_the_ranks_of_the_next_stage(tmp_path):
    ln.chakra.write(ln.estimate(MODEL, LAYOUTS[16], TRAIN, cluster(16)), tmp_path)
    for rank in (0, 3, 14):
        sends = ln.chakra.read_file(tmp_path / f"chakra.{rank}.et").table.filter(type="COMM_SEND_NODE")
        stage, place = divmod(rank, 4)
        assert set(sends["comm_dst"]) == {(stage + 1) % 4 * 4 + place, (stage - 1) % 4 * 4 + place}


def test_lags_parts_and_joins_become_nodes(tmp_path):
    """A launch of 4 us of which the kernel waits for 3, and one that it waits for 2 us beyond; an all-reduce; a lag."""
    host, device, comm = {"kind": "launch"}, {"kind": "kernel", "device": 0}, {"kind": "comm", "device": 0}
    meets = {"collective": "all_reduce", "group": "default", "comm_bytes": 64}
    ops = [
        part | {"rank": rank}
        for rank in (0, 1)
        for part in (
            host | {"lane": "cpu:7", "dur_ns": 4000},
            device | {"lane": "gpu0:7", "dur_ns": 10_400 + 1000 * rank},
            {"kind": "event", "lane": "gpu0:20", "device": 0, "dur_ns": 0} | meets,
            comm | {"lane": "gpu0:20", "dur_ns": 5300} | meets,
            device | {"lane": "gpu0:7", "dur_ns": 1300},
        )
    ] + [{"rank": 0, "lane": "net", "kind": "join", "dur_ns": 0} | meets]
    edges = [
        edge
        for at in (0, 5)
        for edge in (
            (at, at + 1, 3000, True, "launch"), (at, at + 2, 6000, True, "launch"), (at + 1, at + 2, 0, False, "event"),
            (at + 2, 10, 0, False, "collective"), (10, at + 3, 0, False, "collective"),
            (at + 2, at + 3, 0, False, "stream"), (at + 3, at + 4, 1500, False, "event"),
            (at + 1, at + 4, 0, False, "stream"),
        )
    ]  # fmt: skip
    made = graph(ops, edges)
    assert ln.replay(made).makespan_ns == 3000 + 11_400 + 5300 + 1500 + 1300
    ln.chakra.write(made, tmp_path)
    nodes = ln.chakra.read_file(tmp_path / "chakra.0.et").table
    assert nodes.select("id", "name", "type", "dur_us", "data_deps", "is_cpu_op").rows() == [
        (0, "op0", "COMP_NODE", 3, [], True),
        (1, "op0", "COMP_NODE", 1, [0], True),
        (2, "op1", "COMP_NODE", 10, [0], False),
        (3, "lag: launch", "COMP_NODE", 2, [1], True),
        (4, "op3", "COMM_COLL_NODE", 5, [2, 3], False),
        (5, "lag: event", "COMP_NODE", 2, [4], False),
        (6, "op4", "COMP_NODE", 2, [2, 5], False),
    ]
    assert nodes.filter(id=4).select("comm_type", "comm_size", "pg_name").row(0) == (0, 64, "0")
    assert ln.chakra.read_groups(tmp_path) == {"0": [0, 1]}
    again = ln.replay(ln.chakra.to_graph(tmp_path))
    assert again.makespan_ns == 3000 + 11_000 + 5000 + 2000 + 2000
    assert set(again.graph.edges.filter(pl.col("lag_ns") > 0)["rule"]) == {"launch", "event"}
    ln.chakra.write(made, tmp_path, target="astra-sim")
    assert ln.chakra.read_file(tmp_path / "chakra.0.et").table["name"].to_list().count("lag: launch") == 0


def test_what_waits_for_a_part_of_a_transfer_waits_from_its_readiness(tmp_path):
    comm = {
        "rank": 0,
        "kind": "comm",
        "lane": "gpu0:tp",
        "device": 0,
        "collective": "all_gather",
        "group": "tp",
        "comm_bytes": 8,
    }
    ops = [{"rank": 0, "kind": "kernel", "lane": "gpu0:0", "device": 0, "dur_ns": 7000}, comm | {"dur_ns": 8000}]
    ops += [{"rank": 0, "kind": "kernel", "lane": "gpu0:0", "device": 0, "dur_ns": 5000}]
    made = graph(ops, [(0, 1, 0, False, "event"), (1, 2, 2000, True, "event"), (0, 2, 0, False, "stream")])
    ln.chakra.write(made, tmp_path)
    assert ln.replay(ln.chakra.to_graph(tmp_path)).makespan_ns == ln.replay(made).makespan_ns == 15_000
    nodes = ln.chakra.read_file(tmp_path / "chakra.0.et").table
    assert nodes.select("name", "dur_us", "data_deps").rows() == [
        ("op0", 7, []), ("op1", 8, [0]), ("lag: event", 2, [0]), ("op2", 5, [0, 2]),
    ]  # fmt: skip


def kernel(rank: int, **more: object) -> dict[str, object]:
    return {"rank": rank, "kind": "kernel", "lane": "gpu0:7", "device": 0, "dur_ns": 1000} | more


@pytest.mark.parametrize(
    ("ops", "edges", "target", "error", "said"),
    [
        ([kernel(0), kernel(1)], [(0, 1, 0, False, "magic")], None, ChakraError, "from rank 0 to rank 1"),
        ([kernel(0), kernel(0)], [(0, 1, 0, False, "stream"), (1, 0, 0, False, "event")], None, GraphError, "cycle"),
        ([kernel(0, kind="comm", collective="shout")], [], None, ChakraError, "kind 'shout'"),
        ([kernel(0, kind="comm", collective="send", peer=1)], [], None, ChakraError, "other side"),
        ([kernel(0, kind="comm", collective="barrier")], [], "astra-sim", ChakraError, "never finishes"),
        ([kernel(0, kind="comm", collective="all_reduce")], [], "astra-sim", ChakraError, "no comm_size"),
        (
            [kernel(0, kind="comm", collective="all_reduce", comm_bytes=8, group="dp", group_size=4)],
            *([], "astra-sim", ChakraError, "has 4 ranks, of which 1"),
        ),
        ([kernel(0), kernel(2)], [], "astra-sim", ChakraError, "a file for each rank"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_or_run_is_refused_and_nothing_written(tmp_path, ops, edges, target, error, said):
    columns = {"src": 0, "dst": 0, "lag_ns": 0, "from_start": False, "rule": ""}
    made = graph(ops, edges or [tuple(columns.values())])
    made = made if edges else Graph(made.ops, made.edges.clear(), step=0)
    with pytest.raises(error, match=said):
        ln.chakra.write(made, tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_what_is_no_workload_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a str"):
        ln.chakra.write("graph", tmp_path)
    with pytest.raises(InputError, match="'ns3'"):
        ln.chakra.write(graph([kernel(0)], [(0, 0, 0, False, "")]), tmp_path, target="ns3")


def test_a_folder_with_files_of_other_ranks_is_refused(tmp_path):
    ln.chakra.write(ln.chakra.pattern(3, compute_us=1), tmp_path)
    with pytest.raises(ChakraError, match=r"chakra\.2\.et is none of this job's 2 files"):
        ln.chakra.write(ln.chakra.pattern(2, compute_us=1), tmp_path)
    ln.chakra.write(ln.chakra.pattern(2, compute_us=1), tmp_path, prefix="other")


def longest(nodes: pl.DataFrame) -> int:
    """End of the last node if each starts when those that it depends on have ended: a plain loop."""
    deps = dict(nodes.select("id", "data_deps").iter_rows())
    took = dict(nodes.select("id", "dur_us").iter_rows())
    end: dict[int, int] = {}
    while len(end) < len(deps):
        for id in [id for id in deps if id not in end and all(dep in end for dep in deps[id])]:
            end[id] = max((end[dep] for dep in deps[id]), default=0) + took[id]
    return max(end.values())


def test_published_files_are_replayed(traces, tmp_path):
    published(traces, tmp_path)
    path = tmp_path / "Resnet50_DataParallel.0.et"
    result = ln.replay(ln.chakra.to_graph(path))
    table = ln.chakra.read_file(path).table
    assert result.makespan_ns == 1000 * max(longest(table), table.filter(type="COMP_NODE")["dur_us"].sum())
    ring = ln.replay(ln.chakra.to_graph(traces / "astra-sim/custom_ring_allreduce_8npus_1MB"))
    nodes = [ln.chakra.read_file(one).table for one in (traces / "astra-sim").rglob("custom*.et")]
    busiest = max(one["dur_us"].sum() for one in nodes)
    assert 1000 * busiest <= ring.makespan_ns <= 1000 * sum(one["dur_us"].sum() for one in nodes)
    assert ring.graph.edges.filter(rule="collective").height == 8 * 14


def test_what_the_reference_converter_wrote_waits_for_itself(traces, tmp_path):
    """Its file has callers that it had removed, nodes that depend on themselves, and pairs on each other."""
    published(traces, tmp_path)
    path = tmp_path / "tests/data/chakra.0.et"
    findings = ln.chakra.validate(path)
    assert findings.filter(rule="cycle", node=3369)["message"].to_list() == ["it depends on itself"]
    graph = ln.chakra.to_graph(path)
    assert graph.report["count"].to_list() == [1277]
    with pytest.raises(GraphError, match="cycle"):
        ln.replay(graph)


def test_lags_in_a_row_and_of_several_are_read_as_they_wait(tmp_path):
    lag = {"name": "lag: launch", "kind": "lag", "dur_us": 5}
    nodes = [
        {"id": 0, "kind": "cpu", "dur_us": 7, "lane": "cpu:1"},
        lag | {"id": 1, "data_deps": [0]},
        lag | {"id": 2, "data_deps": [1]},
    ]
    nodes += [
        {"id": k, "kind": "kernel", "dur_us": 1, "lane": f"gpu0:{k}", "data_deps": [k // 5 + 1]} for k in (3, 4, 5)
    ]
    table = pl.DataFrame(nodes, infer_schema_length=None)
    graph = ln.chakra.to_graph(ln.chakra.write_file(ln.chakra.Nodes.of(table), tmp_path / "a.0.et"))
    assert graph.edges["lag_ns"].to_list() == [5000, 5000, 5000, 0]
    assert ln.replay(graph).makespan_ns == 18_000


def test_data_of_nodes_that_are_not_there_is_refused(tmp_path):
    nodes = ln.chakra.Nodes.of(pl.DataFrame({"id": [1], "data_deps": [[9]], "dur_us": [1]}))
    with pytest.raises(ChakraError, match="depends on node 9"):
        ln.chakra.to_graph(ln.chakra.write_file(nodes, tmp_path / "a.0.et"))
