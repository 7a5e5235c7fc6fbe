"""What recordings have that they should not: each is counted in the report, and the graph is the one it should be."""

from __future__ import annotations

import polars as pl
import pytest

from lumos_nb.critical_path import replay
from lumos_nb.errors import GraphError
from lumos_nb.graph import Recording, build_graph
from lumos_nb.ops import NO_DEVICE, build_ops
from lumos_nb.repairs import profiles_of
from tests.trace_builder import Trace, graph_of, recording_of, repeated, run_of, spans, step_us


def body(trace: Trace, step: int, start: float) -> None:
    trace.op("aten::mm", start + 5, start + 50)
    trace.launch("k", (start + 10, start + 20), (start + 30, start + 200 + 10 * step))


def counts(recording: Recording, what: str) -> list[tuple[int, int, int]]:
    """Rank, number and time in µs of one kind of repair."""
    rows = recording.report.filter(pl.col("what") == what)
    return [(rank, count, time_ns // 1000) for rank, count, time_ns in rows.select("rank", "count", "time_ns").rows()]


# --- several profiles of one loop -------------------------------------------------------------------------------------


def profiles(*numbers: tuple[int, ...], rank: int = 0) -> Trace:
    """One profile after the other in a file, 10 ms apart, with the steps of these numbers."""
    trace = Trace(rank)
    for cycle, steps in enumerate(numbers):
        for place, step in enumerate(steps):
            at = 10_000 * cycle + 1000 * place
            trace.step(step, at, at + 1000)
            body(trace, step, at)
    return trace


@pytest.mark.parametrize(
    ("numbers", "chosen", "left_out"),
    [
        pytest.param([(1, 2), (1, 2, 3), (1,)], 1, 12, id="the one of most steps"),
        pytest.param([(1, 2, 3), (1, 2, 3)], 1, 12, id="of equals the last"),
        pytest.param([(7, 8, 9), (5,)], 0, 4, id="numbers that fall"),
        pytest.param([(5,), (5, 6, 7)], 1, 4, id="the same step twice"),
    ],
)
def test_of_several_profiles_in_a_file_one_is_taken(numbers: list[tuple[int, ...]], chosen: int, left_out: int) -> None:
    recording = recording_of(profiles(*numbers))
    assert recording.steps == numbers[chosen]
    assert [row[:2] for row in counts(recording, "other profiles left out")] == [(0, left_out)]
    alone = recording_of(profiles(*((n if cycle == chosen else ()) for cycle, n in enumerate(numbers))))
    assert recording.step_times().equals(alone.step_times())


def test_ranks_with_different_numbers_of_profiles_are_refused() -> None:
    with pytest.raises(GraphError, match=r"rank 1 marks step 1 \(ProfilerStep#1, at .*do not hold the same number"):
        recording_of(profiles((1, 2)), profiles((1, 2), (1, 2), rank=1))


# --- places and ids that are missing ----------------------------------------------------------------------------------


def test_work_that_names_no_device_is_on_one_of_its_own_and_defines_the_step() -> None:
    trace = repeated(body)
    for row in trace.rows:
        if row["category"] == "kernel":
            row["device"] = None
    recording = recording_of(trace)
    kernels = recording.ops.filter(pl.col("kind") == "kernel")
    assert kernels["device"].unique().to_list() == [NO_DEVICE]
    assert kernels["lane"].unique().to_list() == ["gpu-1:7"]
    assert [row[:2] for row in counts(recording, "no device named")] == [(0, 4)]
    assert replay(build_graph(recording, 2)).step_ns == recording.step_times().filter(step=2)["step_ns"].item()
    assert step_us(build_graph(recording, 2)) == 1010  # from the end of one step's kernel to that of the next


def test_a_correlation_id_that_is_used_again_links_each_kernel_to_the_launch_before_it() -> None:
    trace = Trace()
    for n in range(3):
        at = 100 * n
        correlation = trace.call("cudaLaunchKernel", at, at + 5, correlation=7)
        trace.device(f"k{n}", at + 10, at + 40, correlation=correlation)
    recording = recording_of(trace)
    assert counts(recording, "correlation ids used again") == [(0, 2, 0)]
    launched = recording.ops.filter(pl.col("kind") == "kernel")
    assert (launched["start_ns"] - launched["launch_ns"]).to_list() == [10_000] * 3


# --- times that contradict each other ---------------------------------------------------------------------------------


def test_operators_and_calls_of_a_thread_that_overlap_are_counted() -> None:
    trace = Trace()
    trace.op("aten::mm", 0, 100)
    trace.op("aten::add", 80, 130)  # 30 longer than the one it begins in
    trace.call("cudaLaunchKernel", 200, 230)  # 10 into the next
    trace.call("cudaLaunchKernel", 220, 240)
    assert counts(recording_of(trace), "overlaps on a thread") == [(0, 2, 40)]
    ops = build_ops(run_of(trace).events).filter(pl.col("lane") == "cpu:1").sort("start_ns")
    assert ops.select(end=pl.col("start_ns") + pl.col("dur_ns"))["end"][:-1].to_list() == ops["start_ns"][1:].to_list()


def test_nested_operators_and_calls_do_not_overlap() -> None:
    trace = repeated(body)
    assert counts(recording_of(trace), "overlaps on a thread") == []
    assert spans(graph_of(trace, step=2), "k") == [(1030, 1220)]


def test_steps_that_begin_in_one_instant_are_of_one_profile_in_whatever_order_they_stand() -> None:
    marks = pl.DataFrame({"rank": 1, "step": [2, 1, 3], "thread": 7, "start_ns": [0, 0, 5]})
    for _ in range(50):  # rows without an order of their own come in another one each time
        assert profiles_of(marks).is_empty()
