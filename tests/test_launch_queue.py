"""Rule 8: a launch that finds the queue full waits for room."""

from __future__ import annotations

import polars as pl
import pytest

from lumos_nb.critical_path import replay
from lumos_nb.graph import Graph, build_graph
from lumos_nb.rules import outstanding, queue_size
from lumos_nb.steady import repeat
from tests.trace_builder import Trace, recording_of, scaled, step_us

PER_STEP = 150
"""Kernels of a step."""


def driven(
    kernel: float = 10,
    launch: float = 2,
    size: int = 200,
    steps: int = 6,
    call: str = "cudaLaunchKernel",
    name: str = "k",
    stall: float = 0,
) -> Trace:
    """A host that launches as fast as a queue of `size` lets it, and a device that starts 4 after a launch at best.

    A call that finds the queue full lasts until there is room, and then `launch` more; the 500th stalls in between.
    """
    trace = Trace(world_size=1)
    ends: list[float] = []
    now = last = 0.0
    for step in range(1, steps + 1):
        begin = now
        for _ in range(PER_STEP):
            room = ends[-size] if len(ends) >= size else now
            back = max(now, room) + launch + (stall if len(ends) == 500 else 0)
            start = max(back + 4, last)
            last = start + kernel
            ends.append(last)
            trace.launch(name, (now, back), (start, last), call=call)
            now = back
        trace.step(step, begin, now)
    return trace


def graph_of_step_4(trace: Trace) -> Graph:
    return build_graph(recording_of(trace), 4)


def steady_us(graph: Graph) -> float:
    result = replay(repeat(graph, 6))
    ends = result.step_ends["end_ns"].sort().diff()
    assert ends[-1] == ends[-2], "not steady yet"
    return result.step_ns / 1000


# --- how long the queue is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [150, 200, 512])
def test_the_queues_size_is_the_plateau_of_outstanding_work(size: int):
    ops = recording_of(driven(size=size, steps=12)).ops
    assert outstanding(ops)["outstanding"].max() == size
    assert queue_size(outstanding(ops), cuda=True) == {0: size}
    assert queue_size(outstanding(ops), cuda=False) == {0: size}


def test_where_the_queue_never_fills_cuda_has_1024_and_others_are_unknown():
    ops = recording_of(driven(kernel=1)).ops
    assert outstanding(ops)["outstanding"].max() < 10
    assert queue_size(outstanding(ops), cuda=True) == {0: 1024}
    assert queue_size(outstanding(ops), cuda=False) == {}


@pytest.mark.parametrize(
    ("call", "sizes"), [("cudaLaunchKernel", {0: 1024}), ("cuLaunchKernelEx", {0: 1024}), ("hipLaunchKernel", {})]
)
def test_the_default_goes_by_the_calls_of_the_trace(call: str, sizes: dict[int, int]):
    assert graph_of_step_4(driven(kernel=1, call=call)).queue_sizes == sizes


def test_a_climb_that_never_levels_off_is_no_plateau():
    # 900 launches and the device falls behind all along: the most outstanding are seen once.
    ops = recording_of(driven(size=10_000)).ops
    assert outstanding(ops)["outstanding"].max() > 600
    assert queue_size(outstanding(ops), cuda=False) == {}


def test_each_rank_has_a_queue_of_its_own():
    one, other = driven(size=150), driven(size=200)
    other.rank = 1
    other.rows = [row | {"rank": 1} for row in other.rows]
    assert queue_size(outstanding(recording_of(one, other).ops), cuda=True) == {0: 150, 1: 200}


def two_devices(size: int = 150, steps: int = 6) -> Trace:
    """One thread that launches to two devices in turn; the second is fast and never has more than one outstanding."""
    trace = Trace(world_size=1)
    ends: list[float] = []
    now = last = 0.0
    for step in range(1, steps + 1):
        begin = now
        for _ in range(PER_STEP):
            back = max(now, ends[-size] if len(ends) >= size else now) + 2
            start = max(back + 4, last)
            last = start + 10
            ends.append(last)
            trace.launch("slow", (now, back), (start, last), device=0)
            trace.launch("fast", (back, back + 1), (back + 5, back + 6), device=1)
            now = back + 1
        trace.step(step, begin, now)
    return trace


def test_each_device_of_a_rank_has_a_queue_of_its_own():
    work = outstanding(recording_of(two_devices(steps=12)).ops)
    assert work.group_by("device").agg(pl.col("outstanding").max()).sort("device").rows() == [(0, 150), (1, 1)]
    assert queue_size(work, cuda=True) == {0: 150}


def test_a_full_queue_holds_up_the_launches_to_its_own_device_only():
    graph = graph_of_step_4(two_devices())
    queue = graph.edges.filter(pl.col("rule") == "queue")
    launched = graph.edges.filter(pl.col("rule") == "launch").join(graph.ops, left_on="dst", right_on="op_id")
    waits_for = queue.join(graph.ops.select(src="op_id", awaited="name"), on="src")
    pairs = waits_for.join(launched.select("name", dst="src"), on="dst").select("name", "awaited")
    assert sorted(pairs.unique().rows()) == [("fast", "fast"), ("slow", "slow")]
    assert steady_us(graph) == 1500
    assert steady_us(scaled(graph, slow=0.5)) == 750


# --- what it does to a step -------------------------------------------------------------------------------------------


def test_a_launch_waits_for_the_kernel_that_leaves_room_for_it():
    graph = graph_of_step_4(driven())
    queue = graph.edges.filter(pl.col("rule") == "queue")
    # Launch 450 + n of the run waits for kernel 250 + n: for the first 50 of the step that is one of step 2, which has
    # 150 to 299, and for the others one of step 3.
    waits_for = graph.ops.select(src="op_id", ago="ago", kind="kind")
    assert queue.join(waits_for, on="src")["kind"].unique().to_list() == ["boundary"]
    assert sorted(queue.join(waits_for, on="src")["ago"]) == [1] * 100 + [2] * 50
    assert queue["evidence"].unique().to_list() == ["pattern"]


def test_a_launch_that_waited_costs_what_launches_cost_that_did_not():
    graph = graph_of_step_4(driven())
    assert graph.ops.filter(pl.col("kind") == "launch")["dur_ns"].unique().to_list() == [2_000]
    assert step_us(graph) == 1500


def test_a_launch_that_took_longer_than_the_queue_explains_has_an_explicit_delay():
    graph = graph_of_step_4(driven(stall=300))
    delay = graph.ops.filter(pl.col("kind") == "unexplained")
    assert delay.select("name", "lane", "dur_ns").rows() == [("delay of cudaLaunchKernel", "cpu:1", 300_000)]
    replayed = replay(graph).ops.filter(pl.col("kind") != "boundary")
    assert replayed["start_ns"].equals(replayed["measured_start_ns"])


def test_halving_kernels_halves_a_queue_bound_step():
    graph = graph_of_step_4(driven())
    assert steady_us(graph) == 1500
    assert steady_us(scaled(graph, kernel=0.5)) == 750
    assert steady_us(scaled(graph, kernel=3)) == 4500


def test_kernels_short_enough_leave_the_host_as_the_bound():
    # 150 launches of 2 each.
    assert steady_us(scaled(graph_of_step_4(driven()), kernel=0.1)) == 300


def test_a_faster_host_does_not_shorten_a_queue_bound_step():
    assert steady_us(scaled(graph_of_step_4(driven()), launch=0.5, gap=0.5)) == 1500


def test_without_the_queue_a_host_whose_calls_were_blocked_would_look_like_the_bound():
    """The case for the rule: both graphs replay the step exactly, and answer the what-if in opposite ways."""
    trace = driven()
    measured = [row["dur_ns"] for row in trace.rows if row["name"] == "cudaLaunchKernel"]
    assert sum(measured[450:600]) == 1_500_000  # the calls of step 4 take all of it
    graph = graph_of_step_4(trace)
    assert step_us(graph) == 1500
    assert steady_us(scaled(graph, kernel=0.5)) == 750


def test_a_collective_holds_its_place_in_the_queue_until_it_has_ended():
    graph = graph_of_step_4(driven(name="ncclDevKernel_AllReduce"))
    assert steady_us(graph) == 1500
    assert steady_us(scaled(graph, comm=0.5)) == 750
    repeated = repeat(graph, 6)
    queue = repeated.edges.filter(pl.col("rule") == "queue").select(op_id="src")
    assert queue.join(repeated.ops, on="op_id")["kind"].unique().to_list() == ["comm"]


def test_slow_launches_of_a_host_bound_step_do_not_count_as_waiting():
    graph = graph_of_step_4(driven(kernel=1, launch=7))
    assert graph.ops.filter(pl.col("kind") == "launch")["dur_ns"].unique().to_list() == [7_000]
    assert graph.edges.filter(pl.col("rule") == "queue").is_empty()
    assert steady_us(scaled(graph, kernel=0.5)) == 1050
    assert steady_us(scaled(graph, launch=0.5)) == 525
