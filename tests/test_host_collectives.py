"""Collectives on CPU threads that no label names: issued by an operator, waited for in a gap that ends with them."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import lumos_nb as ln
from lumos_nb.graph import Recording
from tests.trace_builder import ZERO_NS, Trace, graph_of, recording_of, repeated, scaled, spans, step_us


def unlabelled(number: int, *, issues: float = 100, ends: float = 400, goes_on: float = 402) -> Trace:
    """Backward work until `issues`, an all-reduce on another thread until `ends`, and nothing until `goes_on`."""

    def body(trace: Trace, step: int, s: float) -> None:
        trace.op(f"aten::backward{number}", s + 10, s + issues)
        trace.op("c10d::allreduce_", s + issues, s + issues + 5)
        trace.annotation("gloo:all_reduce", s + issues + 3, s + ends, thread=9)
        trace.op("aten::overlapped", s + issues + 5, s + issues + 30)
        trace.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", s + goes_on, s + 500)

    return repeated(body, rank=number)


def waits(recording: Recording) -> pl.DataFrame:
    return recording.ops.filter(call="wait_comm").select("rank", "step", "start_ns", "dur_ns")


def test_the_step_of_an_unlabelled_collective_is_that_of_its_operator():
    recording = recording_of(unlabelled(0), unlabelled(1))
    comm = recording.ops.filter(kind="comm")
    assert comm.select("rank", "step", "collective").rows() == [
        (r, s, "all_reduce") for r in (0, 1) for s in range(1, 5)
    ]
    assert recording.step_times()["step_ns"].to_list() == [990_000, 1_000_000, 1_000_000, 500_000]


def test_a_gap_that_ends_with_a_collective_waits_for_it():
    graph = graph_of(unlabelled(0), unlabelled(1, issues=250), step=2)
    assert spans(graph, "wait for all_reduce", rank=0)
    assert graph.edges.filter(rule="sync")["evidence"].unique().to_list() == ["pattern"]
    assert graph.report.filter(what="waits found").select("rank", "count").rows() == [(0, 4), (1, 4)]
    # Rank 1 works for 120 less, and rank 0 goes on so much earlier.
    faster = scaled(graph, {"aten::backward1": 0.5})
    copies = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
    assert spans(graph, copies, rank=0) == [(1402, 1500)]
    assert spans(faster, copies, rank=0) == [(1282, 1380)]
    assert step_us(scaled(graph, comm=0)) == step_us(graph) - 120  # work goes on until 280, and it wakes up in 2


@pytest.mark.parametrize("goes_on", [130, 900])
def test_a_thread_that_goes_on_much_sooner_or_later_does_not_wait(goes_on: float):
    recording = recording_of(unlabelled(0, goes_on=goes_on, ends=350), unlabelled(1, goes_on=goes_on, ends=350))
    assert waits(recording).is_empty()
    assert recording.report.filter(what="waits found").is_empty()


def test_a_record_that_ends_after_its_waiter_ends_with_it():
    recording = recording_of(unlabelled(0, goes_on=370), unlabelled(1, goes_on=370))
    assert recording.ops.filter(kind="comm")["dur_ns"].unique().to_list() == [267_000]
    assert waits(recording)["dur_ns"].unique().to_list() == [240_000]


def test_an_operator_that_launches_on_a_device_issues_nothing_on_the_host():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.op("c10d::allreduce_", s + 20, s + 25)
        trace.annotation("gloo:all_reduce", s + 23, s + 90, thread=9)
        trace.op("c10d::allreduce_", s + 100, s + 130)
        trace.launch("ncclKernel_AllReduce", (s + 110, s + 114), (s + 120, s + 200))

    recording = recording_of(*(repeated(body, rank=number) for number in range(2)))
    issues = recording.ops.filter(call="launch").select("call_name", "dur_ns").unique().sort("call_name")
    assert issues.rows() == [("c10d::allreduce_", 5_000), ("cudaLaunchKernel", 4_000)]
    assert recording.ops.filter(kind="comm")["step"].to_list() == [1, 2, 3, 4] * 4
    assert recording.report.filter(what="overlaps on a thread").is_empty()


Call = tuple[str, float, float, str, float, float]
"""An operator's name, start and end, and the type, start and end of the execution of what it issued; "" is lost."""


def issued(*calls: Call, rank: int = 0) -> list[tuple[int | None, int | None, str]]:
    """When each execution was issued (us), its step and what it is; four steps of 1000, the calls in any order."""
    trace = Trace(rank)
    for step in range(1, 5):
        trace.step(step, 1000 * (step - 1), 1000 * step)
    trace.op("aten::linear", 0, 3999, thread=2)
    for operator, begins, ends, kind, starts, until in calls:
        if operator:
            trace.op(operator, begins, ends)
        if kind:
            trace.annotation(f"gloo:{kind}", starts, until, thread=9)
    comm = recording_of(trace).ops.filter(kind="comm").sort("start_ns")
    return comm.select((pl.col("launch_ns") - ZERO_NS) // 1000, "step", "collective").rows()


def test_a_reduce_scatter_runs_as_an_all_reduce_and_moves_no_others():
    calls: list[Call] = []
    for s in range(0, 4000, 1000):
        calls.append(("c10d::_reduce_scatter_base_", s + 100, s + 110, "all_reduce", s + 105, s + 200))
        calls.append(("c10d::allreduce_", s + 300, s + 310, "all_reduce", s + 305, s + 400))
    expected = [(s + at, s // 1000 + 1, kind) for s in range(0, 4000, 1000)
                for at, kind in ((100, "reduce_scatter"), (300, "all_reduce"))]  # fmt: skip
    assert issued(*calls) == expected


REDUCE = "c10d::allreduce_"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        pytest.param(
            [(REDUCE, 100, 110, "all_reduce", 105, 200), (REDUCE, 1100, 1110, "all_reduce", 1105, 1200),
             (REDUCE, 3900, 3910, "", 0, 0), (REDUCE, 3950, 3960, "", 0, 0)],
            [100, 1100], id="two that end after the window",
        ),
        pytest.param(
            [("", 0, 0, "all_reduce", 0, 90), ("", 0, 0, "all_reduce", 90, 300),
             (REDUCE, 100, 110, "all_reduce", 300, 400), (REDUCE, 1100, 1110, "all_reduce", 1105, 1200)],
            [None, None, 100, 1100], id="two issued before the window",
        ),
        pytest.param(
            [(REDUCE, 100, 110, "all_reduce", 105, 200), ("", 0, 0, "all_reduce", 1105, 1200),
             (REDUCE, 2100, 2110, "all_reduce", 2105, 2200), ("", 0, 0, "all_reduce", 3105, 3200)],
            [100, None, 2100, None], id="operators that the trace lacks",
        ),
        pytest.param(
            [(REDUCE, 100, 110, "all_reduce", 105, 200), ("c10d::allreduce_coalesced_", 1100, 1130, "", 0, 0),
             (REDUCE, 1105, 1115, "all_reduce", 1110, 1200)],
            [100, 1105], id="an operator around another",
        ),
        pytest.param(
            [(REDUCE, 100, 110, "all_reduce", 105, 500), (REDUCE, 120, 130, "all_reduce", 500, 600),
             (REDUCE, 140, 150, "all_reduce", 600, 610), (REDUCE, 700, 700, "all_reduce", 700, 700)],
            [100, 120, 140, 700], id="several in the queue, and one of no length",
        ),
        pytest.param(
            [(REDUCE, 100, 110, "all_reduce", 105, 200), ("c10d::broadcast_", 300, 310, "broadcast", 305, 400),
             (REDUCE, 500, 510, "", 0, 0), (REDUCE, 1100, 1110, "all_reduce", 1105, 1200)],
            [100, 300, 1100], id="one that a device ran",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_moves_no_other_execution_to_another_issue(calls: list[Call], expected: list[int | None]):
    assert [at for at, _, _ in issued(*calls)] == expected


def test_messages_under_way_at_a_time_do_not_wait_for_each_other():
    def body(trace: Trace, step: int, s: float) -> None:
        for at, until in ((100, 700), (200, 400), (300, 650), (450, 500)):
            trace.op("c10d::send", s + at, s + at + 20)
            trace.annotation("gloo:send", s + at + 10, s + until)
        trace.op("aten::last", s + 800, s + 900)

    recording = recording_of(repeated(body))
    sends = recording.ops.filter(kind="comm", step=2).sort("start_ns")
    assert sends["lane"].to_list() == ["net:send:-1", "net:send:-1:1", "net:send:-1:2", "net:send:-1:1"]
    graph = graph_of(repeated(body), step=2)
    assert spans(graph, "gloo:send") == [(1110, 1700), (1210, 1400), (1310, 1650), (1460, 1500)]
    assert step_us(graph) == 1000


def test_executions_of_one_thread_that_overlap_count_from_the_end_of_the_one_before():
    def body(trace: Trace, step: int, s: float) -> None:
        for at, until in ((100, 300.001), (200, 400)):
            trace.op(REDUCE, s + at, s + at + 20)
            trace.annotation("gloo:all_reduce", s + max(at + 10, 300 if at == 200 else 0), s + until, thread=9)
        trace.op("aten::last", s + 405, s + 900)

    graph = graph_of(repeated(body), step=2)
    assert graph.report.filter(what="overlaps on a stream").select("count", "time_ns").rows() == [(4, 4)]
    assert step_us(graph) == 1000


@pytest.mark.parametrize(
    ("name", "least", "most"), [("gpt-ddp", 0.99, 1.03), ("gpt-ddp-delay", 0.99, 1.03), ("gpt-pp", 0.95, 1.1)]
)
def test_without_their_labels_recorded_runs_wait_as_with_them(name: str, least: float, most: float):
    run = ln.load_run(ln.datasets.path(name))
    labels = pl.col("name").str.contains("^(comm|wait)::")
    with_labels, without = Recording.of(run), Recording.of(replace(run, events=run.events.filter(~labels)))
    assert_frame_equal(with_labels.step_times(), without.step_times())
    true, found = waits(with_labels), waits(without)
    assert least < found["dur_ns"].sum() / true["dur_ns"].sum() < most
    ends = pl.col("start_ns") + pl.col("dur_ns")
    both = true.with_columns(to=ends).join(found.with_columns(found_to=ends), on=["rank", "step"])
    covered = pl.min_horizontal("to", "found_to") - pl.max_horizontal("start_ns", "start_ns_right")
    assert both.select(covered.clip(0).sum()).item() > least * true["dur_ns"].sum()
