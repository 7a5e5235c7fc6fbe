"""Simulation against replay, and against answers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lumos_nb import datasets
from lumos_nb.critical_path import Result, replay
from lumos_nb.engine import Pool, Resources, simulate
from lumos_nb.errors import GraphError, ScenarioError
from lumos_nb.graph import Graph, build_graph
from lumos_nb.schema import EDGES, OPS
from lumos_nb.steady import repeat
from lumos_nb.traces.run import load_run
from tests.test_critical_path import ORIGIN, edge, graph_of, graphs, op

COLUMNS = ("op_id", "start_ns", "dur_ns", "slack_ns", "critical")


def assert_same(simulated: Result, replayed: Result) -> None:
    """Times, slack, path and steps are equal to the ns."""
    assert simulated.ops.select(COLUMNS).equals(replayed.ops.select(COLUMNS))
    assert simulated.path.equals(replayed.path)
    assert (simulated.step_ns, simulated.makespan_ns) == (replayed.step_ns, replayed.makespan_ns)
    assert simulated.step_ends.equals(replayed.step_ends)


def starts(result: Result) -> dict[int, int]:
    """When each op starts, by its id, from the origin."""
    return {i: s - ORIGIN for i, s in result.ops.select("op_id", "start_ns").iter_rows()}


def ends(result: Result) -> dict[int, int]:
    """When each op ends, by its id, from the origin."""
    return {i: s - ORIGIN + d for i, s, d in result.ops.select("op_id", "start_ns", "dur_ns").iter_rows()}


# --- every edge, nothing shared: replay -----------------------------------------------------------------------------


@given(graphs())
@settings(max_examples=80, deadline=None)
def test_without_resources_it_is_replay(graph: Graph):
    assert_same(simulate(graph), replay(graph))


@given(graphs(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_pools_that_nothing_fills_change_nothing(graph: Graph, in_turn: bool):
    roomy = Pool(of=pl.lit("all"), demand=1 / len(graph.ops), in_turn=in_turn)
    assert_same(simulate(graph, Resources((roomy,), streams=pl.lit(None))), replay(graph))


@pytest.mark.parametrize("name", [name for name in datasets.names() if datasets.DATASETS[name].is_run])
def test_bundled_run_is_simulated_as_it_is_replayed(name: str):
    graph = build_graph(load_run(datasets.path(name)))
    for each in (graph, repeat(graph)):
        assert_same(simulate(each), replay(each))


# --- any resources: what was found is a graph that replays to the same times ------------------------------------------


POOLS: list[list[tuple[int, bool]]] = [[], [(1, True)], [(3, True)], [(1, False), (2, False)], [(4, False)]]
"""Kinds of pool: of one op in how many, and whether in turn."""


@st.composite
def contended(draw: st.DrawFn) -> tuple[Graph, Resources]:
    """Any graph with some order only for today, calls that issue and syncs; any pools, streams or none."""
    graph = draw(graphs())
    rules = draw(st.lists(st.sampled_from(["launch", "stream", "sync"]), min_size=len(graph.edges), max_size=60))
    edges = graph.edges.with_columns(
        rule=pl.Series(rules[: len(graph.edges)], dtype=pl.String),
        hard=pl.Series(
            draw(st.lists(st.booleans(), min_size=len(graph.edges), max_size=60))[: len(graph.edges)], dtype=pl.Boolean
        ),
    )
    number = st.lists(st.sampled_from([0.25, 1 / 3, 0.5, 0.7, 1.0]), min_size=12, max_size=12)
    pools = tuple(
        Pool(
            of=pl.when(pl.col("op_id") % divisor == 0).then("kind"),
            demand=pl.col("op_id").replace_strict(dict(zip(range(100, 112), draw(number), strict=True)), default=1.0),
            in_turn=in_turn,
        )
        for divisor, in_turn in draw(st.sampled_from(POOLS))
    )
    priority = pl.col("op_id") % draw(st.integers(1, 3))
    streams = draw(st.sampled_from([Resources().streams, pl.lit(None)]))
    return replace(graph, edges=edges), Resources(pools, priority, streams, whole_stream=pl.col("kind") == "cpu")


@given(contended())
@settings(max_examples=100, deadline=None)
def test_what_was_found_replays_to_the_same_times(case: tuple[Graph, Resources]):
    graph, resources = case
    try:
        result = simulate(graph, resources)
    except GraphError as error:
        assume("nothing can run any more" not in str(error))  # hypothesis fails if that is so too often
        raise
    assert_same(result, replay(result.graph))
    assert (result.graph.ops["dur_ns"] >= graph.ops["dur_ns"]).all()
    if all(pool.in_turn for pool in resources.pools):
        assert result.graph.ops["dur_ns"].equals(graph.ops["dur_ns"])
    on_streams = result.ops.with_columns(stream=resources.streams).filter(pl.col("stream").is_not_null())
    for _, ops in on_streams.filter(pl.col("dur_ns") > 0).sort("start_ns").group_by("stream"):
        assert ((ops["start_ns"] + ops["dur_ns"]).shift(1) <= ops["start_ns"]).all()


# --- streams ----------------------------------------------------------------------------------------------------------


def work(before_a: int) -> Graph:
    """Threads 1 and 2 each launch a kernel to one stream; the order of the kernels is that of `before_a` = 1."""
    ops = [
        op(1, "cpu", before_a, "cpu:1"),
        op(2, "launch", 2, "cpu:1"),
        op(3, "cpu", 5, "cpu:2"),
        op(4, "launch", 2, "cpu:2"),
        op(5, "kernel", 20),
        op(6, "kernel", 30),
    ]
    return graph_of(ops, [*_launched(1, 2, 5), *_launched(3, 4, 6), edge(5, 6) | {"hard": False}])


def _launched(cpu: int, launch: int, kernel: int) -> list[dict[str, object]]:
    return [edge(cpu, launch, rule="thread"), edge(launch, kernel, 3, "launch")]


def test_stream_serves_the_thread_that_issues_first():
    assert starts(simulate(work(1), Resources())) == {1: 0, 2: 1, 3: 0, 4: 5, 5: 6, 6: 26}
    late = simulate(work(9), Resources())
    assert starts(late) == {1: 0, 2: 9, 3: 0, 4: 5, 6: 10, 5: 40}
    assert late.path["op_id"].to_list() == [3, 4, 6, 5]
    assert starts(replay(work(9)))[6] == 34  # held to an order that is no longer so


def test_op_at_the_head_of_a_stream_holds_up_what_was_issued_after_it():
    graph = work(1)
    blocker = graph_of([op(7, "kernel", 50, "gpu0:20")], [edge(7, 5, rule="event")])
    graph = replace(graph, ops=pl.concat([graph.ops, blocker.ops]), edges=pl.concat([graph.edges, blocker.edges]))
    assert starts(simulate(graph, Resources())) == {1: 0, 2: 1, 3: 0, 4: 5, 7: 0, 5: 50, 6: 70}


def test_op_that_an_edge_puts_after_another_on_its_stream_is_not_issued_before_it():
    ops = [op(1, "launch", 0, "cpu:1"), op(2, "launch", 3, "cpu:1"), op(3, "event", 0), op(4, "kernel", 9)]
    edges = [edge(1, 2, rule="thread"), edge(1, 3, rule="issue"), edge(2, 4, rule="launch"), edge(4, 3)]
    assert starts(simulate(graph_of(ops, edges), Resources())) == {1: 0, 2: 0, 3: 12, 4: 3}


def test_transfer_goes_with_its_arrival_before_what_others_issue_meanwhile():
    ops = [
        op(1, "launch", 2, "cpu:1"),
        op(2, "event", 0),
        op(3, "join", 0, "net"),
        op(4, "comm", 10),
        op(5, "cpu", 5, "cpu:2"),
        op(6, "launch", 2, "cpu:2"),
        op(7, "kernel", 30),
        op(8, "event", 0, "cpu:9", rank=1),
        op(9, "cpu", 40, "cpu:9", rank=1),
    ]
    edges = [edge(1, 2, rule="launch"), edge(2, 3, rule="collective"), edge(3, 4, rule="collective"), edge(2, 4)]
    edges += [edge(9, 8, rule="thread"), edge(8, 3, rule="collective"), edge(5, 6, rule="thread")]
    edges += [edge(6, 7, rule="launch"), edge(4, 7) | {"hard": False}]
    result = simulate(graph_of(ops, edges), Resources())
    assert {i: starts(result)[i] for i in (2, 4, 7)} == {2: 2, 4: 40, 7: 50}


def test_what_earlier_steps_left_on_a_stream_comes_first_whoever_issues():
    backlog = graph_of([op(7, "boundary", 3, step=0), op(8, "boundary", 100, step=0)], [edge(8, 5, rule="boundary")])
    graph = work(9)
    graph = replace(graph, ops=pl.concat([backlog.ops, graph.ops]), edges=pl.concat([graph.edges, backlog.edges]))
    found = starts(simulate(graph, Resources()))
    assert {i: found[i] for i in (5, 6, 7, 8)} == {7: 0, 8: 0, 6: 100, 5: 130}


def syncing(first: int) -> Graph:
    """Thread 1 waits for a kernel of `first` ns, then for stream 7, to which thread 2 launches at 0 and at 50."""
    ops = [
        op(1, "kernel", first, "gpu0:20"),
        op(2, "wait", 0, "cpu:1", name="cudaEventSynchronize"),
        op(3, "wait", 1, "cpu:1", name="cudaStreamSynchronize"),
        op(4, "launch", 50, "cpu:2"),
        op(5, "launch", 2, "cpu:2"),
        op(6, "kernel", 30),
        op(7, "kernel", 60),
    ]
    edges = [edge(1, 2, rule="sync"), edge(2, 3, rule="thread"), edge(6, 3, 4, rule="sync")]
    edges += [
        edge(4, 5, rule="thread"),
        edge(4, 6, 1, "launch", from_start=True),
        edge(5, 7, rule="launch"),
        edge(6, 7),
    ]
    return graph_of(ops, edges)


@pytest.mark.parametrize(
    ("first", "last", "starts_at"),
    [
        pytest.param(10, 6, 31 + 4, id="short, so the sync comes before the second launch"),
        pytest.param(49, 6, 49, id="until just before the second launch, when the first kernel is long done"),
        pytest.param(100, 7, 112 + 4, id="long, so the sync waits for the second kernel as well"),
    ],
)
def test_longer_kernel_changes_what_a_sync_waits_for(first: int, last: int, starts_at: int):
    result = simulate(syncing(first), Resources())
    assert starts(result)[3] == starts_at
    waited = result.graph.edges.filter((pl.col("dst") == 3) & (pl.col("rule") == "sync"))
    assert waited.select("src", "lag_ns", "hard").rows() == [(last, 4, True)]
    assert starts(replay(syncing(first)))[3] == max(31 + 4, first)  # held to the first kernel


def test_sync_of_an_event_or_a_copy_waits_for_its_own_op():
    named = syncing(100).ops.with_columns(name=pl.col("name").replace("cudaStreamSynchronize", "cudaEventSynchronize"))
    assert starts(simulate(replace(syncing(100), ops=named), Resources()))[3] == 100


def test_sync_of_a_stream_that_holds_nothing_waits_for_nothing():
    slow = syncing(1).edges.with_columns(lag_ns=pl.when(pl.col("rule") == "thread").then(0).otherwise("lag_ns"))
    late = graph_of([op(0, "cpu", 20, "cpu:2")], [edge(0, 4, rule="thread")])
    graph = replace(syncing(1), ops=pl.concat([late.ops, syncing(1).ops]), edges=pl.concat([slow, late.edges]))
    assert starts(simulate(graph, Resources()))[3] == 1


# --- pools ------------------------------------------------------------------------------------------------------------

SMS = Pool(of=pl.when(pl.col("kind") == "kernel").then(pl.lit("SMs")), demand=pl.col("flops"))


def kernels(*rows: tuple[int, int, float, int]) -> Graph:
    """Kernels 1, 2, ... on streams of their own: when each is ready, its length, its demand and its priority."""
    ops, edges = [], []
    for i, (ready, dur, demand, priority) in enumerate(rows, 1):
        ops += [op(-i, "cpu", ready, f"cpu:{i}")]
        ops += [op(i, "kernel", dur, f"gpu0:{i}", flops=demand, layer=priority)]
        edges += [edge(-i, i, rule="launch")]
    return graph_of(ops, edges)


def spans(graph: Graph, *pools: Pool) -> list[tuple[int, int]]:
    """Start and end of each kernel."""
    result = simulate(graph, Resources(pools, priority=pl.col("layer")))
    return [(starts(result)[i], ends(result)[i]) for i in range(1, len(graph.ops) // 2 + 1)]


@pytest.mark.parametrize(
    ("rows", "shared", "in_turn"),
    [
        pytest.param(
            [(0, 10, 1, 0), (4, 10, 1, 0)], [(0, 16), (4, 20)], [(0, 10), (10, 20)],
            id="two that fill it run at half speed together, or one after the other",
        ),
        pytest.param(
            [(0, 10, 0.5, 0), (4, 10, 0.5, 0)], [(0, 10), (4, 14)], [(0, 10), (4, 14)],
            id="two halves fit",
        ),
        pytest.param(
            [(0, 12, 1, 0), (0, 12, 0.5, 0)], [(0, 18), (0, 18)], [(0, 12), (12, 24)],
            id="demands of one and a half take half as long again",
        ),
        pytest.param(
            [(0, 12, 1, 0), (4, 12, 1, 0), (8, 12, 1, 0)], [(0, 26), (4, 34), (8, 36)], [(0, 12), (12, 24), (24, 36)],
            id="a third one slows both",
        ),
        pytest.param(
            [(0, 5, 0.7, 0), (0, 5, 0.6, 0)], [(0, 7), (0, 7)], [(0, 5), (5, 10)],
            id="six and a half ns are seven",
        ),
        pytest.param(
            [(0, 10, 1, 0), (5, 7, 1, 1)], [(0, 17), (5, 12)], [(0, 10), (10, 17)],
            id="the higher priority interrupts, or is next",
        ),
        pytest.param(
            [(0, 10, 1, 0), (1, 5, 1, 0), (2, 7, 1, 1)], [(0, 22), (1, 18), (2, 9)], [(0, 10), (17, 22), (10, 17)],
            id="the higher priority overtakes what was ready before it",
        ),
        pytest.param(
            [(0, 10, 0.5, 0), (0, 10, 0.75, 1)], [(0, 15), (0, 10)], [(10, 20), (0, 10)],
            id="the lower priority gets what is left",
        ),
        pytest.param(
            [(0, 30, 0.5, 0), (3, 29, 1, 0), (6, 30, 0.5, 0)],
            [(0, 56), (3, 59), (6, 62)],
            [(0, 30), (30, 59), (59, 89)],
            id="none overtakes the one whose turn it is",
        ),
        pytest.param(
            [(0, 10, 1, 0), (5, 0, 1, 1), (5, 0, 1, 0)], [(0, 10), (5, 5), (5, 5)], [(0, 10), (10, 10), (10, 10)],
            id="what takes no time shares at once, or waits for its turn",
        ),
    ],
)  # fmt: skip
def test_kernels_share_the_device(
    rows: list[tuple[int, int, float, int]], shared: list[tuple[int, int]], in_turn: list[tuple[int, int]]
):
    assert spans(kernels(*rows), SMS) == shared
    assert spans(kernels(*rows), replace(SMS, in_turn=True)) == in_turn


def test_transfers_of_two_ranks_share_one_link_and_slow_the_kernels_beside_them():
    ops = [
        op(1, "comm", 40, "gpu0:20"),
        op(2, "comm", 20, "gpu1:20", rank=1),
        op(3, "kernel", 30),
        op(4, "kernel", 30, rank=1),
    ]
    graph = graph_of(ops, [])
    link = Pool(of=pl.when(pl.col("kind") == "comm").then(pl.lit("link")))
    assert ends(simulate(graph, Resources((link,)))) == {1: 60, 2: 40, 3: 30, 4: 30}
    # On rank 0 the transfer takes half of the SMs and the kernel all: both at 2/3, until the kernel ends at 45.
    sms = Pool(of=pl.format("SMs of {}", "rank"), demand=pl.when(pl.col("kind") == "comm").then(0.5).otherwise(1.0))
    assert ends(simulate(graph, Resources((sms,)))) == {1: 55, 2: 30, 3: 45, 4: 40}
    # With both a transfer runs at the lower of its speeds, 1/2 while there are two of them.
    assert ends(simulate(graph, Resources((link, sms)))) == {1: 62, 2: 40, 3: 45, 4: 44}


def test_room_made_in_a_pool_is_on_the_critical_path():
    result = simulate(kernels((0, 10, 1, 0), (4, 10, 1, 0)), Resources((replace(SMS, in_turn=True),)))
    assert result.path.select("op_id", "rule").rows() == [(-1, None), (1, "launch"), (2, "pool")]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_ops_that_wait_for_each_other_are_named():
    crossed = graph_of([op(7, "kernel", 4, "gpu0:20")], [edge(6, 7, rule="event"), edge(7, 5, rule="event")])

    def graph(before_a: int) -> Graph:
        ops, edges = work(before_a).ops, work(before_a).edges.filter("hard")
        return Graph(pl.concat([ops, crossed.ops]), pl.concat([edges, crossed.edges]), step=1)

    assert starts(simulate(graph(9), Resources()))[5] == 44
    with pytest.raises(GraphError, match=r"after 7 ns nothing can run any more, and 3 of 7 op\(s\) have not") as error:
        simulate(graph(1), Resources())
    assert "op 5 (kernel 'kernel', rank 0, gpu0:7)" in str(error.value)
    assert "op 6 (kernel 'kernel', rank 0, gpu0:7)" in str(error.value)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        pytest.param(Pool(pl.lit("SMs"), demand=1.5), "op -1 .*demands 1.5", id="more than all"),
        pytest.param(Pool(pl.lit("SMs"), demand=0), "op -1 .*demands 0.0", id="nothing"),
        pytest.param(Pool(pl.lit("SMs"), demand=pl.col("flops")), "op -1 .*demands nan", id="unknown"),
        pytest.param(Pool(pl.col("color")), "of=.*color.*the op table has op_id", id="a column that is not there"),
    ],
)
def test_impossible_pool_is_named(pool: Pool, message: str):
    with pytest.raises(ScenarioError, match=message):
        simulate(kernels((0, 1, 1, 0)), Resources((pool,)))


def test_empty_graph_takes_no_time():
    assert simulate(Graph(OPS.empty(), EDGES.empty(), step=0), Resources((SMS,))).makespan_ns == 0


def test_impossible_resources_are_named():
    graph = kernels((0, 1, 1, 0))
    with pytest.raises(ScenarioError, match=r"priority=.* gives no Int32"):
        simulate(graph, Resources(priority=pl.col("name")))
    with pytest.raises(ScenarioError, match=r"op 1 .* goes in turn in one pool and uses another"):
        simulate(graph, Resources((SMS, replace(SMS, in_turn=True))))
