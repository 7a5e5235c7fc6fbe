"""The period of a repeated step: what bounds it, and what crosses from one repetition to the next."""

from __future__ import annotations

from itertools import pairwise

import polars as pl
import pytest

from lumos_nb.critical_path import replay
from lumos_nb.errors import GraphError
from lumos_nb.graph import Graph, build_graph
from lumos_nb.steady import repeat
from tests.trace_builder import Trace, graph_of, recording_of, repeated, scaled, second_step, spans


def period_us(graph: Graph, times: int = 5) -> float:
    """Time of the last repetition, which must be that of the one before."""
    result = replay(repeat(graph, times))
    ends = result.step_ends.group_by("step").agg(pl.col("end_ns").max()).sort("step")["end_ns"].diff()
    assert ends[-1] == ends[-2] == result.step_ns, "not steady yet"
    return result.step_ns / 1000


def host_bound(trace: Trace, step: int, s: float) -> None:
    trace.op("aten::add", s + 10, s + 40)
    trace.launch("k", (s + 20, s + 30), (s + 34, s + 64))


def test_a_host_bound_step_takes_what_its_thread_takes():
    graph = second_step(host_bound)
    assert period_us(graph) == 1000
    assert period_us(scaled(graph, cpu=0.5, gap=0.5, launch=0.5)) == 500
    assert period_us(scaled(graph, k=2)) == 1000


def test_the_boundary_as_measured_answers_another_question():
    """Of the one step alone the host's lead stays: only what the step itself does changes."""
    graph = scaled(second_step(host_bound), cpu=0.5, gap=0.5, launch=0.5)
    assert replay(graph).step_ns / 1000 == 985
    assert period_us(graph) == 500


def device_bound(trace: Trace, step: int, s: float) -> None:
    """A device that is always busy and runs 510 behind a host whose own work takes 124 of the 1000."""
    trace.op("aten::mm", s, s + 120)
    trace.launch("k", (s + 120, s + 124), (s + 510, s + 1510))


def test_a_device_bound_step_takes_what_its_stream_takes():
    graph = second_step(device_bound)
    assert period_us(graph) == 1000
    assert period_us(scaled(graph, k=2)) == 2000
    # The host's gap of 876 was never a wait, as far as the trace says.
    assert period_us(scaled(graph, k=0.5)) == 1000
    assert period_us(scaled(graph, k=0.5, gap=0)) == 500
    assert period_us(scaled(graph, k=0.1, gap=0)) == 124


def synchronised(trace: Trace, step: int, s: float) -> None:
    """Each step waits for its kernel, which takes 500 of the 700."""
    trace.launch("k", (s + 10, s + 14), (s + 20, s + 520))
    trace.call("cudaStreamSynchronize", s + 22, s + 525)
    trace.op("aten::after", s + 525, s + 600)


def test_a_synchronise_in_every_step_adds_host_and_device():
    graph = graph_of(repeated(synchronised, 700), step=2)
    assert period_us(graph) == 700
    assert period_us(scaled(graph, k=0.5)) == 450
    # 5 before the launch, 2 for it, 6 until the kernel runs, its 500, 5 to come back, 37.5 and 50.
    assert period_us(scaled(graph, gap=0.5, cpu=0.5, launch=0.5)) == 605.5


def lagging(steps: int = 5) -> Trace:
    """In each step an unrecorded wait for the kernel of the step before: a loop of one in flight.

    After the kernel's end 9 until the thread goes on, 71 of work, 10 until the launch, 4 for it, 6 until the next
    kernel starts, which takes 900 and 10 more in each step.
    """
    trace = Trace()
    now, kernel_ends = 0.0, 0.0
    for step in range(1, steps + 1):
        begin = now
        works = max(now + 5, kernel_ends + 9)
        trace.op("aten::after", works, works + 71)
        launch = works + 81
        kernel_ends = launch + 10 + 900 + 10 * step
        trace.launch("k", (launch, launch + 4), (launch + 10, kernel_ends))
        now = launch + 6
        trace.step(step, begin, now)
    return trace


def test_a_hidden_wait_for_the_step_before_crosses_repetitions():
    graph = build_graph(recording_of(lagging()), 3)
    crossing = graph.edges.filter(pl.col("rule") == "sync").join(graph.ops.select(src="op_id", ago="ago"), on="src")
    assert crossing.select("evidence", "ago").rows() == [("time", 1)]
    assert period_us(graph) == 930 + 100
    assert period_us(scaled(graph, k=0.5)) == 465 + 100
    assert period_us(scaled(graph, cpu=0)) == 930 + 29


def handed_on(trace: Trace, step: int, s: float) -> None:
    """Stream 20 waits for a record that the step before took on stream 7, whose work ends 120 into this step."""
    if step > 1:
        trace.wait_event(s + 5, s + 6, (20, 7, trace.correlations))
    trace.launch("b", (s + 10, s + 14), (s + 120 if step > 1 else s + 20, s + 220), stream=20)
    trace.launch("a", (s + 900, s + 904), (s + 910, s + 1120))
    trace.record(s + 905, s + 906)


def test_a_stream_that_waits_for_the_step_before_crosses_repetitions():
    repetitions = repeat(second_step(handed_on), 3)
    b = [spans(repetitions, "b")[n] for n in range(3)]
    a = [spans(repetitions, "a")[n] for n in range(3)]
    assert [start for start, _ in b[1:]] == [end for _, end in a[:-1]]
    longer = repeat(scaled(second_step(handed_on), a=2), 3)
    assert spans(longer, "b")[1][0] == spans(longer, "a")[0][1] == a[0][1] + 210


def test_ranks_that_meet_in_every_step_have_the_period_of_the_slower():
    traces = []
    for number, lasts in enumerate((100, 700)):

        def body(trace: Trace, step: int, s: float, number: int = number, lasts: float = lasts) -> None:
            trace.op(f"aten::work{number}", s, s + lasts)
            trace.launch("ncclAllReduce", (s + lasts, s + lasts + 4), (s + lasts + 10, s + 760), stream=20)
            trace.call("cudaStreamSynchronize", s + lasts + 6, s + 765)
            trace.op("aten::after", s + 765, s + 800)

        traces.append(repeated(body, 800, rank=number))
    graph = graph_of(*traces, step=2)
    assert period_us(graph) == 800
    assert period_us(scaled(graph, {"aten::work1": 0.5})) == 450
    assert period_us(scaled(graph, {"aten::work1": 0})) == 200  # now rank 0 is the last
    assert period_us(scaled(graph, comm=2)) == 850


def test_the_first_repetition_begins_with_idle_streams():
    result = replay(repeat(second_step(device_bound), 4))
    ends = (result.step_ends["end_ns"] - result.origin_ns).to_list()
    # 120 of work, 4 for the launch; how long after it a kernel of an idle stream starts is not to be seen here.
    assert ends[0] == 1_124_000
    assert [later - earlier for earlier, later in pairwise(ends)] == [1_000_000] * 3


@pytest.mark.parametrize("times", [1, 0, -3])
def test_fewer_than_two_repetitions_are_refused(times: int):
    with pytest.raises(GraphError, match=rf"at least 2 repetitions, not {times}"):
        repeat(second_step(host_bound), times)


def test_a_repeated_graph_says_so_and_is_not_repeated_again():
    once = second_step(host_bound)
    twice = repeat(once, 2)
    assert repr(once).startswith(f"Graph of step {once.step}: {len(once.ops)} ops, {len(once.edges)} edges")
    assert repr(twice).startswith("Graph of steps 0 to 1: ")
    with pytest.raises(GraphError, match="it is repeated already"):
        repeat(twice, 2)


def test_repetitions_are_copies_of_the_step_without_its_boundary():
    graph = second_step(synchronised)
    repetitions = repeat(graph, 3)
    own = graph.ops.filter(pl.col("kind") != "boundary")
    assert repetitions.ops.height == 3 * own.height
    assert repetitions.ops["op_id"].is_unique().all()
    assert repetitions.ops["step"].unique().sort().to_list() == [0, 1, 2]
    assert "boundary" not in repetitions.edges["rule"]
