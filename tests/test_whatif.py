"""Edits of a graph on hand-made graphs, as properties, and on real traces beside what anyone can add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb import datasets, whatif
from lumos_nb.critical_path import Result, replay, sweep
from lumos_nb.errors import InputError, ScenarioError
from lumos_nb.graph import Graph, build_graph
from lumos_nb.steady import repeat
from lumos_nb.traces.run import load_run
from tests.test_critical_path import ORIGIN, edge, graph_of, graphs
from tests.test_critical_path import op as plain_op
from tests.trace_builder import Trace, second_step, step_us

ALL = pl.lit(value=True)


def op(
    op_id: int, name: str, dur: int, lane: str = "gpu0:7", kind: str | None = None, **more: Any
) -> dict[str, object]:
    """An op whose kind follows from its lane."""
    kind = kind or ("kernel" if lane.startswith("gpu") else "cpu")
    return plain_op(op_id, kind, dur, lane, name=name, **more)


def times(source: Graph | Result) -> dict[str, tuple[int, int]]:
    """Name -> start and end from the origin; of several the last."""
    result = replay(source) if isinstance(source, Graph) else source
    start = pl.col("start_ns") - ORIGIN
    return {n: (s, e) for n, s, e in result.ops.select("name", s=start, e=start + pl.col("dur_ns")).iter_rows()}


def named(*names: str) -> pl.Expr:
    return pl.col("name").is_in(names)


def launched(kernels: list[tuple[str, int]], gap: int = 1) -> Graph:
    """A thread of launches that take 2, each `gap` of work apart, and a stream; a launch takes 3 to arrive."""
    ops, edges = [], []
    for i, (name, dur) in enumerate(kernels):
        ops += [
            op(10 * i, f"work {name}", gap, "cpu:1"),
            op(10 * i + 1, f"launch {name}", 2, "cpu:1", "launch"),
            op(10 * i + 2, name, dur),
        ]
        edges += [edge(10 * i, 10 * i + 1, rule="thread"), edge(10 * i + 1, 10 * i + 2, 3, "launch")]
        if i:
            edges += [edge(10 * i - 9, 10 * i, rule="thread"), edge(10 * i - 8, 10 * i + 2)]
    return graph_of(ops, edges)


ABC = launched([("a", 10), ("b", 20), ("c", 30)])


def test_edits_compose_and_leave_what_they_were_given():
    before = (ABC.ops.clone(), ABC.edges.clone())
    graph = whatif.scale(whatif.insert(whatif.remove(ABC, named("a")), named("b"), "new", 4, kind="kernel"), ALL, 2)
    assert times(graph)["new"] == (2 + 2 + 4 + 3 + 40, 2 + 2 + 4 + 3 + 40 + 8)
    assert ABC.ops.equals(before[0])
    assert ABC.edges.equals(before[1])


# --- scale ------------------------------------------------------------------------------------------------------------


def test_the_unchanged_graph():
    assert times(ABC) == {
        "work a": (0, 1), "launch a": (1, 3), "a": (6, 16),
        "work b": (3, 4), "launch b": (4, 6), "b": (16, 36),
        "work c": (6, 7), "launch c": (7, 9), "c": (36, 66),
    }  # fmt: skip


def test_scaling_multiplies_what_is_chosen_and_rounds_to_whole_ns():
    graph = whatif.scale(ABC, named("a", "c"), 0.25)
    durations = dict(graph.ops.select("name", "dur_ns").iter_rows())
    assert durations == dict(ABC.ops.select("name", "dur_ns").iter_rows()) | {"a": 2, "c": 8}  # 2.5, 7.5 to even
    assert times(graph)["b"] == (9, 29)  # 3 after its launch, no longer behind a
    assert times(graph)["c"] == (29, 37)


def test_a_factor_may_be_an_expression_such_as_a_new_duration():
    graph = whatif.scale(ABC, pl.col("kind") == "kernel", 7 / pl.col("dur_ns"))
    assert graph.ops.filter(pl.col("kind") == "kernel")["dur_ns"].to_list() == [7, 7, 7]


def test_scaling_lags_goes_by_the_edge_and_the_op_that_it_leads_to():
    graph = whatif.scale_lags(ABC, (pl.col("rule") == "launch") & (pl.col("name") == "a"), 2)
    assert times(graph)["a"] == (9, 19)
    assert times(whatif.scale_lags(ABC, pl.col("rule") == "launch", 0))["a"] == (3, 13)
    with pytest.raises(ScenarioError, match="chooses no edge; the graph's rules are launch, stream, thread"):
        whatif.scale_lags(ABC, pl.col("rule") == "queue", 0)
    with pytest.raises(ScenarioError, match="cannot be evaluated on the edge table"):
        whatif.scale_lags(ABC, pl.col("rule") == "launch", pl.col("latency"))


@settings(deadline=None, max_examples=40)
@given(graph=graphs())
def test_scaling_by_one_changes_nothing(graph: Graph):
    same = whatif.scale(graph, ALL, 1)
    assert same.ops.equals(graph.ops)
    assert same.edges.equals(graph.edges)


@settings(deadline=None, max_examples=40)
@given(graph=graphs(), factor=st.integers(0, 4))
def test_scaling_a_kind_is_a_scenario_of_a_sweep(graph: Graph, factor: int):
    kind = graph.ops["kind"][0]
    swept = sweep(graph, [{kind: factor}])
    result = replay(whatif.scale(graph, pl.col("kind") == kind, factor))
    assert (result.step_ns, result.makespan_ns) == (swept["step_ns"][0], swept["makespan_ns"][0])


@pytest.mark.parametrize(
    ("where", "by", "message"),
    [
        (pl.col("nmae") == "a", 2, "unable to find column.*its columns are op_id"),
        (pl.col("dur_ns"), 2, "gives Int64, not Boolean"),
        (named("d"), 2, "chooses no op; the graph's most frequent names are"),
        (named("a"), -1, "by=-1: give a finite factor"),
        (named("a"), pl.lit(-1), "would be multiplied by -1.0"),
        (named("a"), True, "by=True: give a finite factor"),
        (named("a"), "2", "by='2': give a finite factor"),
        (named("a"), 10**400, "by=1000.*: give a finite factor"),
        (named("a"), pl.lit("2"), "it gives String; give a finite factor"),
        (named("a"), pl.col("kind") == "kernel", "it gives Boolean; give a finite factor"),
        (named("a"), float("nan"), "give a finite factor"),
        (named("a"), float("inf"), "give a finite factor"),
        (named("a"), None, "give a finite factor"),
        (named("a"), [2], "cannot be evaluated|give a finite factor"),
        (named("a"), pl.col("flops"), "give a finite factor"),
        (named("a"), 1e18, "stays below"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_cannot_be_scaled_says_why(where: pl.Expr, by: object, message: str):
    with pytest.raises(ScenarioError, match=f"(?s){message}"):
        whatif.scale(ABC, where, by)  # type: ignore[arg-type]


def test_ops_are_chosen_by_an_expression():
    with pytest.raises(InputError, match="where is a str; give a polars expression"):
        whatif.remove(ABC, "nccl")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="this takes a Graph"):
        whatif.remove(ABC.ops, named("a"))  # type: ignore[arg-type]


# --- remove -----------------------------------------------------------------------------------------------------------


def test_a_kernel_goes_with_its_launch_and_its_place_on_the_stream_closes():
    assert times(whatif.remove(ABC, named("b"))) == {
        "work a": (0, 1), "launch a": (1, 3), "a": (6, 16),
        "work b": (3, 4),
        "work c": (4, 5), "launch c": (5, 7), "c": (16, 46),
    }  # fmt: skip


def test_a_launch_may_stay_without_its_kernel():
    graph = whatif.remove(ABC, named("b"), launches=False)
    assert times(graph)["launch b"] == (4, 6)
    assert times(graph)["c"] == (16, 46)


def test_a_stream_of_which_everything_goes_leaves_the_host():
    graph = whatif.remove(ABC, pl.col("kind") == "kernel")
    assert times(graph) == {"work a": (0, 1), "work b": (1, 2), "work c": (2, 3)}
    assert graph.edges.height == 2


def test_removing_a_blocking_call_removes_the_wait():
    ops = [op(1, "k", 100), op(2, "sync", 1, "cpu:1", "wait"), op(3, "before", 5, "cpu:1"), op(4, "after", 5, "cpu:1")]
    edges = [edge(1, 2, rule="sync"), edge(3, 2, rule="thread"), edge(2, 4, rule="thread")]
    graph = graph_of(ops, edges)
    assert times(graph)["after"] == (101, 106)
    assert times(whatif.remove(graph, named("sync")))["after"] == (5, 10)


def test_who_waited_for_a_removed_op_waits_for_what_was_before_it():
    ops = [op(1, "a", 10), op(2, "b", 20), op(3, "w", 1, "gpu0:20"), op(4, "head", 4, "gpu0:7", "boundary")]
    graph = graph_of(ops, [edge(4, 1), edge(1, 2), edge(2, 3, 2, "event")])
    assert times(graph)["w"] == (36, 37)
    assert times(whatif.remove(graph, named("b")))["w"] == (16, 17)
    assert times(whatif.remove(graph, named("a", "b")))["w"] == (6, 7)


def joined(*arrive: int, transfer: int = 5, size: int = 3) -> Graph:
    """Ranks that compute for `arrive`, meet at an all-reduce whose transfer takes `transfer`, and compute for 10."""
    ops = [op(0, "all-reduce of ranks", 0, "net", "join", device=None, collective="all_reduce")]
    edges = []
    for rank, dur in enumerate(arrive):
        i = 10 * (rank + 1)
        about = {"rank": rank, "collective": "all_reduce", "group": "dp", "comm_seq": 1}
        ops += [
            op(i, f"compute {rank}", dur, rank=rank),
            op(i + 1, f"arrival {rank}", 0, kind="event", **about),
            op(i + 2, f"reduce {rank}", transfer, kind="comm", **about),
            op(i + 3, f"after {rank}", 10, rank=rank),
        ]
        edges += [edge(i + j, i + j + 1) for j in range(3)]
        edges += [edge(i + 1, 0, rule="collective"), edge(0, i + 2, rule="collective")]
    return graph_of(ops, edges)


def test_a_removed_collective_no_longer_joins_its_ranks():
    graph = joined(10, 50)
    assert times(graph)["after 0"] == (55, 65)
    without = whatif.remove(graph, pl.col("kind") == "comm")
    assert sorted(without.ops["name"]) == ["after 0", "after 1", "compute 0", "compute 1"]
    assert times(without)["after 0"] == (10, 20)
    assert times(without)["after 1"] == (50, 60)


def test_a_rank_that_leaves_a_collective_holds_up_nobody():
    without = whatif.remove(joined(10, 50, 20), (pl.col("kind") == "comm") & (pl.col("rank") == 1))
    assert times(without)["reduce 0"] == times(without)["reduce 2"] == (20, 25)
    assert times(without)["after 1"] == (50, 60)


# --- insert -----------------------------------------------------------------------------------------------------------


def test_an_op_inserted_after_another_holds_up_what_waited_for_that():
    graph = whatif.insert(ABC, named("a"), "cast", 7, kind="kernel")
    assert times(graph)["cast"] == (16, 23)
    assert times(graph)["b"] == (23, 43)
    assert graph.ops["name"].to_list().index("cast") == graph.ops["name"].to_list().index("a") + 1


def test_what_an_op_launched_does_not_wait_for_what_is_inserted_after_that():
    graph = whatif.insert(ABC, named("launch a"), "hook", 7, kind="cpu")
    assert times(graph)["a"] == (6, 16)
    assert times(graph)["work b"] == (10, 11)


def test_an_op_whose_delay_is_removed_still_waits_for_its_launch():
    delay = op(30, "delay of a", 4, kind="unexplained")
    edges = [e | {"dst": 30} if e["rule"] == "launch" and e["dst"] == 2 else e for e in ABC.edges.to_dicts()]
    delayed = graph_of([*ABC.ops.to_dicts(), delay], [*edges, edge(30, 2, rule="delay")])
    assert times(delayed)["a"] == (10, 20)
    undelayed = whatif.remove(delayed, pl.col("kind") == "unexplained")
    assert undelayed.edges.sort("src", "dst").equals(ABC.edges.sort("src", "dst"))
    assert times(whatif.remove(delayed, named("a"))) == times(whatif.remove(ABC, named("a")))
    twice = whatif.insert(delayed, named("a"), "late", 7, kind="unexplained", before=True)
    assert times(twice)["a"] == (17, 27)
    assert times(whatif.remove(twice, pl.col("kind") == "unexplained")) == times(ABC)


def test_an_op_inserted_before_another_takes_over_what_that_waited_for():
    graph = whatif.insert(ABC, named("a"), "late", 7, kind="unexplained", before=True)
    assert times(graph)["late"] == (6, 13)
    assert times(graph)["a"] == (13, 23)


def test_a_delay_before_a_collective_holds_up_its_arrival_and_so_all_ranks():
    graph = whatif.insert(joined(10, 50), named("reduce 0"), "late", 60, kind="unexplained", before=True)
    assert times(graph)["late"] == (10, 70)
    assert times(graph)["reduce 1"] == (70, 75)


def test_an_op_on_another_lane_keeps_the_order_in_which_that_was_issued():
    """The copy waits for b, and is in the graph before c: what follows a goes before it, what follows c behind it."""
    rows = [*ABC.ops.head(6).to_dicts(), op(30, "copy", 4, "gpu0:20", "memcpy"), *ABC.ops.tail(3).to_dicts()]
    graph = graph_of(rows, [*ABC.edges.to_dicts(), edge(12, 30, rule="event")])
    assert times(graph)["copy"] == (36, 40)
    after_a = whatif.insert(graph, named("a"), "offload", 100, kind="memcpy", lane="gpu0:20")
    assert times(after_a)["offload"] == (16, 116)
    assert times(after_a)["copy"] == (116, 120)
    assert times(after_a)["c"] == times(graph)["c"]
    after_both = whatif.insert(graph, named("a", "c"), "offload", 100, kind="memcpy", lane="gpu0:20")
    assert times(after_both)["offload"] == (120, 220)
    on_new_lane = whatif.insert(graph, named("a", "b"), "offload", 100, kind="memcpy", lane="gpu0:21")
    assert times(on_new_lane)["offload"] == (116, 216)
    assert on_new_lane.ops.filter(named("offload"))["device"].to_list() == [0, 0]


def test_an_inserted_delay_goes_with_the_op_that_it_delays():
    delayed = whatif.insert(ABC, named("b"), "late", 7, kind="unexplained", before=True)
    assert times(whatif.remove(delayed, named("b"))) == times(whatif.remove(ABC, named("b")))


@settings(deadline=None, max_examples=40)
@given(graph=graphs(), before=st.booleans())
def test_removing_what_was_inserted_gives_the_same_times(graph: Graph, before: bool):
    more = whatif.insert(graph, ALL, "new", 5, kind="cpu", before=before)
    assert replay(more).makespan_ns >= replay(graph).makespan_ns + 5
    less = whatif.remove(more, pl.col("name") == "new")
    assert replay(less).ops.select("op_id", "start_ns").sort("op_id").equals(
        replay(graph).ops.select("op_id", "start_ns").sort("op_id")
    )  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(graph=graphs(), lane=st.sampled_from(["gpu0:7", "cpu:1", "cpu:9"]))
def test_ops_on_another_lane_follow_theirs_one_after_the_other(graph: Graph, lane: str):
    ops = replay(whatif.insert(graph, ALL, "new", 5, kind="cpu", lane=lane)).ops
    new = ops.filter(pl.col("name") == "new").sort("rank", "start_ns")
    assert new.height == graph.ops.height
    assert (new.select(pl.col("start_ns").diff().over("rank").fill_null(5)).to_series() >= 5).all()
    before_ns = replay(graph).ops.select((pl.col("start_ns") + pl.col("dur_ns")).sum()).item()
    assert new["start_ns"].sum() >= before_ns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "join"}, "an op of kind 'join' cannot be inserted; choose one of cpu"),
        ({"kind": "kernel", "lane": "net"}, "lane='net'"),
        ({"kind": "kernel", "lane": "gpu0:20", "before": True}, "before=True"),
        ({"kind": "kernel", "dur_ns": -1}, "dur_ns=-1 gives -1; give whole ns"),
        ({"kind": "kernel", "dur_ns": 1.5}, "dur_ns=1.5 gives Float64"),
    ],
    ids=str,
)
def test_what_cannot_be_inserted_says_why(options: dict[str, Any], message: str):
    with pytest.raises(ScenarioError, match=message):
        whatif.insert(ABC, named("a"), "new", **({"dur_ns": 1} | options))


# --- fuse -------------------------------------------------------------------------------------------------------------


def test_a_run_becomes_one_op_with_the_first_launch():
    graph = whatif.fuse(ABC, named("a", "b"), "ab", by=0.5)
    assert times(graph) == {
        "work a": (0, 1), "launch a": (1, 3), "ab": (6, 21),
        "work b": (3, 4),
        "work c": (4, 5), "launch c": (5, 7), "c": (21, 51),
    }  # fmt: skip
    assert times(whatif.fuse(ABC, named("b", "c"), "bc", dur_ns=8))["bc"] == (16, 24)


def test_a_run_ends_at_an_op_that_waits_for_something_else():
    other = op(50, "other", 100, "gpu0:20")
    graph = graph_of([*ABC.ops.to_dicts(), other], [*ABC.edges.to_dicts(), edge(50, 22, rule="event")])
    fused = whatif.fuse(graph, pl.col("kind") == "kernel", "abc")
    kernels = fused.ops.filter(pl.col("kind") == "kernel")
    assert sorted(kernels.select("name", "dur_ns").iter_rows()) == [("abc", 30), ("c", 30), ("other", 100)]
    assert replay(fused).makespan_ns == replay(graph).makespan_ns == 130


def test_a_run_does_not_reach_over_an_event():
    ops = [*ABC.ops.head(6).to_dicts(), op(30, "record", 0, kind="event"), *ABC.ops.tail(3).to_dicts()]
    edges = [e for e in ABC.edges.to_dicts() if (e["src"], e["dst"]) != (12, 22)]
    graph = graph_of(ops, [*edges, edge(12, 30), edge(30, 22)])
    fused = whatif.fuse(graph, pl.col("kind") == "kernel", "fused")
    assert sorted(fused.ops.filter(pl.col("kind") == "kernel")["dur_ns"]) == [30, 30]


def test_the_delays_inside_a_run_go_and_that_before_it_stays():
    late = whatif.insert(ABC, named("a", "b"), "late", 7, kind="unexplained", before=True)
    fused = whatif.fuse(late, pl.col("kind") == "kernel", "abc")
    assert times(fused)["late"] == (6, 13)
    assert times(fused)["abc"] == (13, 73)
    assert fused.ops.filter(named("late")).height == 1


def test_nothing_to_fuse_is_said():
    with pytest.raises(ScenarioError, match="no two of the chosen ops follow one another"):
        whatif.fuse(ABC, named("a", "c"), "ac")
    with pytest.raises(ScenarioError, match="only ops of kind launch, which this leaves alone"):
        whatif.fuse(ABC, pl.col("kind") == "launch", "launches")
    with pytest.raises(ScenarioError, match="give one of them"):
        whatif.fuse(ABC, named("a", "b"), "ab", by=0.5, dur_ns=3)


# --- network ----------------------------------------------------------------------------------------------------------


def test_a_faster_network_shortens_transfers_but_no_waiting():
    graph = whatif.network(joined(10, 50), pl.col("group") == "dp", bandwidth_factor=2, latency_ns=1)
    assert times(graph)["reduce 0"] == times(graph)["reduce 1"] == (50, 53)  # 2.5 to 2, and 1
    assert times(whatif.network(joined(10, 50), ALL, latency_ns=-9))["reduce 0"] == (50, 50)


def test_a_network_needs_communication_and_a_bandwidth():
    with pytest.raises(ScenarioError, match="chooses only ops of kind kernel"):
        whatif.network(ABC, named("a"), bandwidth_factor=2)
    for factor in (0, -1, float("nan")):
        with pytest.raises(ScenarioError, match="bandwidth_factor="):
            whatif.network(joined(10, 50), ALL, bandwidth_factor=factor)


# --- repeated graphs --------------------------------------------------------------------------------------------------


def busy(trace: Trace, step: int, s: float) -> None:
    trace.op("aten::mm", s, s + 40)
    trace.launch("gemm", (s + 40, s + 44), (s + 50, s + 450))
    trace.op("aten::add", s + 44, s + 60)
    trace.launch("add", (s + 60, s + 64), (s + 450, s + 950))
    trace.call("cudaStreamSynchronize", s + 70, s + 955)


FIRST_ON_HOST = (pl.col("name") == "aten::mm") & (pl.col("kind") == "cpu")


@pytest.mark.parametrize(
    ("edit", "period_us"),
    [
        (lambda g: whatif.scale(g, named("add"), 0.5), 750),
        (lambda g: whatif.remove(g, named("add")), 500),
        (lambda g: whatif.insert(g, named("gemm"), "new", 100_000, kind="kernel"), 1100),
        (lambda g: whatif.insert(g, named("add"), "new", 100_000, kind="kernel"), 1100),
        (lambda g: whatif.insert(g, FIRST_ON_HOST, "late", 100_000, kind="unexplained", before=True), 1100),
        (lambda g: whatif.fuse(g, named("gemm", "add"), "both", dur_ns=600_000), 700),
        (lambda g: whatif.remove(g, pl.col("call_name") == "cudaStreamSynchronize"), 900),
    ],
    ids=["scale", "remove", "insert between", "insert at the end", "delay at the beginning", "fuse", "no synchronise"],
)
def test_edits_and_repetition_commute(edit: Any, period_us: float):
    graph = second_step(busy)
    assert step_us(repeat(graph)) == 1000
    assert step_us(repeat(edit(graph))) == step_us(edit(repeat(graph))) == period_us


def test_the_wait_of_a_blocking_copy_goes_with_the_copy():
    def copying(trace: Trace, step: int, s: float) -> None:
        trace.launch("k", (s + 10, s + 14), (s + 20, s + 420))
        trace.copy("Memcpy DtoH (Device -> Pageable)", (s + 20, s + 505), (s + 420, s + 500))
        trace.op("aten::after", s + 505, s + 605)

    graph = repeat(second_step(copying))
    without = whatif.remove(graph, pl.col("kind") == "memcpy")
    assert without.ops.filter(pl.col("kind") == "wait").is_empty()
    host_us = without.ops.filter(pl.col("device").is_null())["dur_ns"].sum() / 4 / 1000
    assert step_us(without) == max(host_us, 400)
    kept = whatif.remove(graph, pl.col("kind") == "memcpy", launches=False)
    assert kept.ops.filter(pl.col("kind") == "wait").height == 4


# --- real steps -------------------------------------------------------------------------------------------------------


def busiest_ns(graph: Graph) -> int:
    """What the busiest thread or stream has to do in the last step."""
    own = graph.ops.filter((pl.col("kind") != "boundary") & (pl.col("step") == graph.step))
    return int(own.group_by("rank", "lane").agg(pl.col("dur_ns").sum())["dur_ns"].max())  # type: ignore[arg-type]


def test_without_communication_a_pipeline_takes_what_its_busiest_thread_does():
    graph = repeat(build_graph(load_run(datasets.path("gpt-pp"))))
    alone = whatif.remove(graph, pl.col("kind") == "comm")
    assert replay(alone).step_ns == busiest_ns(alone) < replay(graph).step_ns
    assert not set(alone.ops["kind"]) & {"join", "comm"}


def test_edits_of_a_real_step_stay_within_what_anyone_can_add_up(traces: Path):
    graph = repeat(build_graph(load_run(traces / "torchrec" / "sst_long_a2a_optimizer_4")))
    base = replay(graph).step_ns
    kernels, comm = pl.col("kind") == "kernel", pl.col("kind") == "comm"
    halved = replay(whatif.scale(graph, kernels, 0.5)).step_ns
    assert halved == pytest.approx(sweep(graph, [{"kernel": 0.5}])["step_ns"][0], abs=graph.ops.height)
    no_comm = whatif.remove(graph, comm)
    assert busiest_ns(no_comm) <= replay(no_comm).step_ns <= replay(whatif.scale(graph, comm, 0)).step_ns < base
    no_device = whatif.remove(graph, kernels | comm | pl.col("kind").is_in(["memcpy", "memset"]))
    assert busiest_ns(no_device) <= replay(no_device).step_ns < replay(no_comm).step_ns
    delayed = whatif.insert(graph, kernels, "late", 10_000, kind="unexplained", before=True)
    most = graph.ops.filter(kernels & (pl.col("step") == graph.step)).height
    assert base < replay(delayed).step_ns <= base + most * 10_000
    fused = whatif.fuse(graph, kernels, "fused")
    assert fused.ops.filter(kernels)["dur_ns"].sum() == graph.ops.filter(kernels)["dur_ns"].sum()
    assert fused.ops.filter(pl.col("kind") == "launch").height < graph.ops.filter(pl.col("kind") == "launch").height
    assert (
        replay(whatif.network(graph, comm, bandwidth_factor=2)).step_ns
        == replay(whatif.scale(graph, comm, 0.5)).step_ns
    )
