"""Collectives on CPU threads that no label names: issued by an operator, waited for in a gap that ends with them."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import lumos_nb as ln
from lumos_nb.graph import Recording
from tests.trace_builder import Trace, graph_of, recording_of, repeated, scaled, spans, step_us


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
