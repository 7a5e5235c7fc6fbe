"""Replay and sweeps against a plain loop, against numpy by level, and on hand-made graphs."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb._replay_kernels import starts
from lumos_nb._replay_plan import Plan, SweepPlan
from lumos_nb.critical_path import replay, sweep
from lumos_nb.errors import GraphError, ScenarioError, SchemaError
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS
from tests.reference_replay import Levels, step_by_loop, step_ends_by_loop, times_by_loop

ORIGIN = 1_700_000_000_000_000_000  # as traces have it


def op(op_id: int, kind: str, dur: int, lane: str = "gpu0:7", **more: object) -> dict[str, object]:
    """One op of rank 0 in step 1, measured at the origin; the device follows from the lane."""
    device = 0 if lane.startswith("gpu") else None
    row = {"op_id": op_id, "rank": 0, "step": 1, "lane": lane, "device": device, "kind": kind, "name": kind}
    return row | {"start_ns": ORIGIN, "dur_ns": dur} | more


def edge(src: int, dst: int, lag: int = 0, rule: str = "stream", *, from_start: bool = False) -> dict[str, object]:
    row = {"src": src, "dst": dst, "lag_ns": lag, "from_start": from_start, "rule": rule}
    return row | {"evidence": "exact", "hard": True}


def graph_of(ops: list[dict[str, object]], edges: list[dict[str, object]]) -> Graph:
    return Graph(pl.DataFrame(ops, schema=dict(OPS.columns)), pl.DataFrame(edges, schema=dict(EDGES.columns)), step=1)


@st.composite
def graphs(draw: st.DrawFn, *, longest: int = 6) -> Graph:
    """Any small graph: ranks, steps, hosts and devices, lags, ties, repeated edges, rows in any order."""
    n = draw(st.integers(1, 12))
    ids = draw(st.permutations(range(100, 100 + n)))
    lanes = draw(st.sampled_from([["cpu:1"], ["gpu0:7"], ["cpu:1", "gpu0:7", "gpu0:20"]]))
    step = st.sampled_from([0, 1, 1, 2, None])
    ops = [
        op(
            i,
            draw(st.sampled_from(["cpu", "launch", "kernel"])),
            draw(st.integers(0, longest)),
            draw(st.sampled_from(lanes)),
            rank=draw(st.integers(0, 2)),
            step=draw(step) if place else 1,  # one op at least has a step
        )
        for place, i in enumerate(ids)
    ]
    ops[0] |= {"lane": lanes[-1], "device": 0 if lanes[-1].startswith("gpu") else None}
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] < p[1])
    edges = [
        edge(ids[a], ids[b], draw(st.integers(0, longest)), draw(st.sampled_from("xy")), from_start=draw(st.booleans()))
        for a, b in (draw(st.lists(pairs, max_size=2 * n)) if n > 1 else [])
    ]
    return graph_of(draw(st.permutations(ops)), draw(st.permutations(edges)))


def durations_scaled(graph: Graph, scale: dict[str, int]) -> Graph:
    """The graph with durations and lags multiplied by the scale of their kind or rule."""
    by_kind, by_rule = (
        pl.col("kind").replace_strict(scale, default=1),
        ("lag:" + pl.col("rule")).replace_strict(scale, default=1),
    )
    ops = graph.ops.with_columns((pl.col("dur_ns") * by_kind).cast(pl.Int64))
    return Graph(ops, graph.edges.with_columns((pl.col("lag_ns") * by_rule).cast(pl.Int64)), graph.step)


# --- replay -----------------------------------------------------------------------------------------------------------

LAUNCHED = graph_of(
    [
        op(1, "boundary", 5, step=0),
        op(2, "cpu", 3, "cpu:1"),
        op(3, "launch", 4, "cpu:1"),
        op(4, "kernel", 10),
        op(5, "cpu", 100, "cpu:1"),
    ],
    [
        edge(2, 3, rule="thread"),
        edge(3, 4, 8, "launch", from_start=True),
        edge(1, 4, rule="stream"),
        edge(3, 5, rule="thread"),
    ],
)
"""A launch whose kernel starts 8 ns after it began, and a host that goes on after the kernel."""


def test_launch_counts_from_its_start_and_host_tail_is_not_the_step():
    result = replay(LAUNCHED)
    assert result.ops["start_ns"].to_list() == [ORIGIN + t for t in (0, 0, 3, 11, 7)]
    assert (result.step_ns, result.makespan_ns, result.origin_ns) == (21 - 5, 107, ORIGIN)
    assert result.step_ends.rows() == [(0, 0, ORIGIN + 5), (0, 1, ORIGIN + 21)]
    assert result.path["op_id"].to_list() == [2, 3, 4]
    assert result.path["path_ns"].to_list() == [3, 0, 10]
    assert result.path.select("rule", "evidence", "lag_ns").rows() == [
        (None, None, None),
        ("thread", "exact", 0),
        ("launch", "exact", 8),
    ]


def test_slack_is_null_where_growth_never_reaches_the_step_end():
    assert replay(LAUNCHED).ops["slack_ns"].to_list() == [6, 0, None, 0, None]


def test_composition_is_of_the_step_and_from_the_origin():
    result = replay(LAUNCHED)
    assert result.composition.rows() == [("kernel", 0, 10, 10 / 16), ("lag:launch", 0, 6, 6 / 16)]
    assert result.composition_from_origin["time_ns"].to_list() == [10, 8, 3]


def test_of_equal_paths_the_one_of_the_lowest_rows_is_reported():
    ops = [op(9, "kernel", 5, rank=1), op(8, "kernel", 5), op(7, "kernel", 2), op(6, "kernel", 2)]
    result = replay(graph_of(ops, [edge(8, 7), edge(9, 7), edge(8, 6)]))
    assert result.path["op_id"].to_list() == [9, 7]
    assert result.ops["slack_ns"].to_list() == [0, 0, 0, 0]


def test_steps_that_count_up_give_the_last_period():
    ops = [op(i, "kernel", 10 + i, step=i) for i in range(4)]
    result = replay(graph_of(ops, [edge(i, i + 1) for i in range(3)]))
    assert result.step_ns == 13


def test_path_crosses_to_the_rank_that_everyone_waits_for():
    ops = [op(0, "kernel", 1), op(1, "kernel", 9, rank=1), op(2, "join", 0, "net"), op(3, "comm", 4)]
    result = replay(graph_of(ops, [edge(0, 2), edge(1, 2), edge(2, 3)]))
    assert result.path["rank"].to_list() == [1, 0, 0]
    assert result.ops["slack_ns"].to_list() == [8, 0, 0, 0]


def test_graph_of_no_ops_takes_no_time():
    result = replay(Graph(OPS.empty(), EDGES.empty(), step=0))
    assert (result.step_ns, result.makespan_ns) == (0, 0)
    frames = (result.ops, result.path, result.step_ends, result.composition, result.composition_from_origin)
    assert all(frame.is_empty() for frame in frames)
    assert sweep(Graph(OPS.empty(), EDGES.empty(), step=0), [{}, {}])["step_ns"].to_list() == [0.0, 0.0]


def test_notebook_shows_the_composition():
    result = replay(LAUNCHED)
    assert "lag:launch" in repr(result)
    assert "3 of 5 ops" in repr(result)
    assert result._repr_html_().startswith("<table><caption>Step of 16 ns")


@given(graphs())
@settings(max_examples=80, deadline=None)
def test_replay_equals_a_plain_loop(graph: Graph):
    times = times_by_loop(graph)
    result = replay(graph)
    ids, start, dur = (result.ops[c].to_list() for c in ("op_id", "start_ns", "dur_ns"))
    assert {i: (s - ORIGIN, s - ORIGIN + d) for i, s, d in zip(ids, start, dur, strict=True)} == times
    assert result.step_ns == step_by_loop(graph)[0]
    assert result.makespan_ns == max(end for _, end in times.values())
    ends = result.step_ends.group_by("step").agg(pl.col("end_ns").max() - ORIGIN).sort("step")
    assert dict(ends.iter_rows()) == step_ends_by_loop(graph, times)


@given(graphs())
@settings(max_examples=80, deadline=None)
def test_numpy_by_level_gives_the_same_starts(graph: Graph):
    plan = Plan.of(graph)
    dst = np.repeat(np.arange(len(plan.row)), np.diff(plan.ptr))
    levels = Levels.of(len(plan.row), plan.src.astype(np.int64), dst)
    start = np.empty(len(plan.row), np.int64)
    start[plan.row[levels.op]] = levels.starts(plan.apart_ns[levels.edge])
    assert start.tolist() == [times_by_loop(graph)[i][0] for i in graph.ops["op_id"]]


@given(graphs(longest=2**33), st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_starts_are_the_same_in_blocks_of_any_size_and_of_times_longer_than_half_a_word(graph: Graph, block: int):
    plan = Plan.of(graph)
    start = np.full(len(plan.row), -1)
    for first, pairs in zip(range(0, len(start), block), plan.forward(block), strict=True):
        starts(*pairs, start, start[first : first + block])
    times = times_by_loop(graph)
    assert start.tolist() == [times[graph.ops["op_id"][int(row)]][0] for row in plan.row]


@given(graphs())
@settings(max_examples=40, deadline=None)
def test_op_may_grow_by_its_slack_and_not_by_a_ns_more(graph: Graph):
    step_end = step_by_loop(graph)[1]
    for op_id, slack in replay(graph).ops.select("op_id", "slack_ns").iter_rows():
        if slack is None:
            assert step_by_loop(graph, grow={op_id: 10**6})[1] == step_end
        else:
            assert step_by_loop(graph, grow={op_id: slack})[1] == step_end
            assert step_by_loop(graph, grow={op_id: slack + 1})[1] == step_end + 1


@given(graphs())
@settings(max_examples=80, deadline=None)
def test_path_has_no_hole_and_its_composition_adds_up(graph: Graph):
    result = replay(graph)
    step_end = step_by_loop(graph)[1]
    path = result.path
    at = ORIGIN
    for row in path.iter_rows(named=True):
        at += row["lag_ns"] or 0
        assert at == row["start_ns"]
        at += row["path_ns"]
    assert at == ORIGIN + step_end
    assert result.composition_from_origin["time_ns"].sum() == step_end
    assert result.composition["time_ns"].sum() == max(result.step_ns, 0)
    on_path = result.ops.filter("critical")["op_id"].to_list()
    assert sorted(on_path) == sorted(path["op_id"].to_list())
    slack = dict(result.ops.select("op_id", "slack_ns").iter_rows())
    assert all(slack[i] == 0 for i in path.filter(pl.col("path_ns") > 0)["op_id"])


# --- sweep ------------------------------------------------------------------------------------------------------------

SCALES = st.fixed_dictionaries(
    {}, optional={c: st.sampled_from([0, 1, 2, 3]) for c in ("cpu", "launch", "kernel", "lag:x", "lag:y")}
)


def known(graph: Graph, scale: dict[str, int]) -> dict[str, int]:
    """The part of a scenario that the graph has classes for."""
    lagged = graph.edges.filter(pl.col("lag_ns") > 0)
    classes = {*graph.ops["kind"], *("lag:" + lagged["rule"])}
    return {c: s for c, s in scale.items() if c in classes}


@given(graphs(), st.lists(SCALES, min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_sweep_equals_replay_of_the_scaled_graph(graph: Graph, scales: list[dict[str, int]]):
    scenarios = [known(graph, s) for s in scales]
    swept = sweep(graph, scenarios, rank_ends=True)
    replayed = [replay(durations_scaled(graph, s)) for s in scenarios]
    assert swept["step_ns"].to_list() == [r.step_ns for r in replayed]
    assert swept["makespan_ns"].to_list() == [r.makespan_ns for r in replayed]
    last_step = replayed[0].step_ends["step"].max()
    for rank, step, _ in replayed[0].step_ends.iter_rows():
        if step == last_step:
            here = (pl.col("rank") == rank) & (pl.col("step") == step)
            ends = [r.step_ends.filter(here)["end_ns"].item() - ORIGIN for r in replayed]
            assert swept[f"rank{rank}_end_ns"].to_list() == ends


@given(graphs(), SCALES)
@settings(max_examples=80, deadline=None)
def test_slopes_times_scales_sum_to_the_step(graph: Graph, scale: dict[str, int]):
    scenario = known(graph, scale)
    row = sweep(graph, [scenario]).row(0, named=True)
    slopes = {c.removeprefix("d_"): d for c, d in row.items() if c.startswith("d_")}
    assert sum(d * scenario.get(c, 1) for c, d in slopes.items()) == row["step_ns"]


@given(graphs(longest=10**6))
@settings(max_examples=40, deadline=None)
def test_slope_is_the_finite_difference_away_from_ties(graph: Graph):
    names = [c.removeprefix("d_") for c in sweep(graph, [{}]).columns if c.startswith("d_")]
    h = 2.0**-20  # with it all sums below are exact
    scenarios = [{}, *({c: s} for c in names for s in (1 - h, 1 + h))]
    swept = sweep(graph, scenarios)
    for i, name in enumerate(names):
        base, less, more = (swept["step_ns"][j] for j in (0, 2 * i + 1, 2 * i + 2))
        left, right = (base - less) / h, (more - base) / h
        if left == right:  # else two paths tie, and the slope jumps
            assert swept[f"d_{name}"][0] == left


def test_unscaled_sweep_is_replay_to_the_ns_at_a_month():
    month_ns = 30 * 86_400 * 10**9
    graph = graph_of([op(0, "kernel", month_ns + 1), op(1, "kernel", 3)], [edge(0, 1, 1)])
    assert sweep(graph, [{}])["step_ns"].item() == replay(graph).step_ns == month_ns + 5


def test_classes_come_from_a_column_or_an_expression():
    graph = graph_of([op(0, "kernel", 8, name="gemm"), op(1, "kernel", 4, name="relu")], [edge(0, 1)])
    assert sweep(graph, [{"gemm": 0.5}], by="name")["step_ns"].item() == 8
    long_ones = pl.when(pl.col("dur_ns") > 5).then(pl.lit("long"))
    swept = sweep(graph, [{"long": 0.25, "scenario": "quartered"}], by=long_ones)
    assert swept.drop("makespan_ns").rows() == [("quartered", 6.0, -0.5, 8)]


def test_absent_and_null_scales_are_one_whatever_table_they_come_in():
    pandas = pytest.importorskip("pandas")
    rows = [{"scenario": "a", "kernel": 0.5}, {"scenario": "b", "cpu": 2.0}]
    swept = sweep(LAUNCHED, rows)
    assert swept["step_ns"].to_list() == [11.0, 19.0]
    assert sweep(LAUNCHED, pl.DataFrame(rows)).equals(swept)
    full = pandas.DataFrame({"scenario": ["a", "b"], "kernel": [0.5, 1], "cpu": [1, 2.0]})
    assert sweep(LAUNCHED, full).equals(swept)


def test_no_scenarios_make_an_empty_frame_with_all_columns():
    assert sweep(LAUNCHED, []).schema == sweep(LAUNCHED, [{}]).schema
    assert sweep(LAUNCHED, []).is_empty()


MANY = pl.DataFrame({"kernel": np.linspace(0, 3, 150), "cpu": np.linspace(2, 0, 150)})


@pytest.mark.parametrize("block", [1, 64, 100, 200])
def test_blocks_of_any_width_give_the_same_frame(block: int):
    assert sweep(LAUNCHED, MANY, block=block).equals(sweep(LAUNCHED, MANY))


def _pool(kind: str) -> Executor:
    if kind == "threads":
        return ThreadPoolExecutor(2)
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_executor_gives_the_same_frame(kind: str):
    with _pool(kind) as executor:
        assert sweep(LAUNCHED, MANY, executor=executor, rank_ends=True).equals(sweep(LAUNCHED, MANY, rank_ends=True))


def test_ends_are_kept_in_a_few_rows_not_one_an_op():
    n = 5000
    ops = [op(i, "launch", 1, "cpu:1") if i % 2 == 0 else op(i, "kernel", 1) for i in range(n)]
    launches = [edge(i, i + 1, 1, "launch", from_start=True) for i in range(0, n, 2)]
    order = [edge(i, i + 2) for i in range(n - 2)]
    graph = graph_of(ops, launches + order)
    assert SweepPlan.of(graph, Plan.of(graph), "kind").row.max() < 4


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        pytest.param(
            {"matmul": 2}, "class 'matmul'; the graph has boundary, cpu, kernel, launch, lag:launch", id="unknown"
        ),
        pytest.param({"kernel": -1}, "in row 1: the scale of 'kernel' is -1", id="negative"),
        pytest.param({"kernel": float("nan")}, "in row 1: the scale of 'kernel' is nan", id="not a number"),
        pytest.param({"kernel": float("inf")}, "in row 1: the scale of 'kernel' is inf", id="infinite"),
        pytest.param({"kernel": "half"}, "in row 1: the scale of 'kernel' is 'half'", id="text"),
    ],
)
def test_impossible_scenario_is_named(scenario: dict[str, object], message: str):
    with pytest.raises(ScenarioError, match=message):
        sweep(LAUNCHED, [{"kernel": 1}, scenario])


def test_scenario_error_gives_the_label():
    with pytest.raises(ScenarioError, match="scenario 'slow' in row 0"):
        sweep(LAUNCHED, [{"scenario": "slow", "kernel": -2.0}])


@pytest.mark.parametrize("by", ["color", pl.col("color"), pl.col("kind").unique()])
def test_classes_that_the_ops_do_not_have_are_refused(by: str | pl.Expr):
    with pytest.raises(ScenarioError, match="by="):
        sweep(LAUNCHED, [{}], by=by)


TWO = [op(0, "kernel", 1), op(1, "kernel", 1)]


@pytest.mark.parametrize(
    ("ops", "edges", "message"),
    [
        pytest.param(TWO, [edge(0, 7)], "edge 0 -> 7 .*row 0 .*no op has op_id 7", id="edge to an unknown op"),
        pytest.param(TWO, [edge(0, 1), edge(-3, 1)], "row 1 .*no op has op_id -3", id="edge from an unknown op"),
        pytest.param([*TWO, op(1, "cpu", 1)], [], "op_id 1 stands in rows 1 and 2", id="repeated op"),
        pytest.param([op(0, "kernel", -5)], [], "op 0 .*has dur_ns -5", id="negative duration"),
        pytest.param([op(0, "kernel", 1, dur_ns=None)], [], "op 0 .*has no dur_ns", id="no duration"),
        pytest.param([op(0, "kernel", 1) | {"op_id": None}], [], "row 0 of the ops has no op_id", id="no id"),
        pytest.param(TWO, [edge(0, 1, -2)], "edge 0 -> 1 .*lag_ns -2", id="negative lag"),
        pytest.param(TWO, [edge(0, 1) | {"from_start": None}], "edge 0 -> 1 .*no from_start", id="unfinished edge"),
        pytest.param([op(0, "kernel", 1, step=None)], [], "give the ops .* their step", id="no step"),
        pytest.param(TWO, [edge(1, 1)], r"cycle of 1 op\(s\): op 1 .* -> op 1 ", id="op that waits for itself"),
    ],
)
def test_impossible_graph_is_named(ops: list[dict[str, object]], edges: list[dict[str, object]], message: str):
    with pytest.raises(GraphError, match=message):
        replay(graph_of(ops, edges))


def test_cycle_error_follows_the_edges_of_one_cycle():
    ops = [op(i, "kernel", 1, name=f"k{i}") for i in range(6)]
    graph = graph_of(ops, [edge(0, 1), edge(1, 2), edge(2, 3), edge(3, 1), edge(3, 4), edge(4, 5)])
    with pytest.raises(GraphError, match="cycle of 3") as error:
        replay(graph)
    names = [w for w in str(error.value).replace("'", " ").split() if w in {f"k{i}" for i in range(6)}]
    assert names in (["k1", "k2", "k3", "k1"], ["k2", "k3", "k1", "k2"], ["k3", "k1", "k2", "k3"])


def test_table_without_a_column_is_refused():
    with pytest.raises(SchemaError, match=r"lacks column.*dur_ns"):
        replay(Graph(LAUNCHED.ops.drop("dur_ns"), LAUNCHED.edges, step=1))
