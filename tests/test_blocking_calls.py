"""Threads that wait for the device: synchronise calls, copies, allocations, and waits that nobody recorded."""

from __future__ import annotations

import polars as pl
import pytest

from tests.trace_builder import ENGINE, MAIN, Body, Trace, scaled, second_step, spans, waits_of

# --- threads that wait ------------------------------------------------------------------------------------------------


def synchronised(call: str, named: tuple[str, int, int | None] | None, returns: float) -> Body:
    """Work a on stream 7 and b (longer) on 20, a blocking call, and c, which another thread issues to 7 meanwhile."""

    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("b", (s + 4, s + 8), (s + 14, s + 314), stream=20)
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
        record = trace.record(s + 15, s + 16)
        correlation = trace.call(call, s + 22, s + returns)
        if named is not None:
            kind, stream, on = named
            trace.names(kind, s + 22, s + returns, correlation, stream, on, record if on else None)
        trace.op("aten::after", s + returns, s + returns + 10)
        trace.launch("c", (s + 50, s + 54), (s + 120, s + 220), thread=ENGINE)

    return body


@pytest.mark.parametrize(
    ("call", "named", "evidence", "pattern"),
    [
        ("cudaStreamSynchronize", None, "pattern", "last stream of the thread"),
        ("cudaStreamSynchronize", ("Stream Sync", 7, None), "exact", "cuda_sync"),
        ("cudaEventSynchronize", ("Event Sync", -1, 7), "exact", "cuda_sync"),
        ("hipStreamSynchronize", None, "pattern", "last stream of the thread"),
    ],
)
def test_a_synchronise_waits_for_what_was_issued_to_its_stream_before_it(
    call: str, named: tuple[str, int, int | None] | None, evidence: str, pattern: str
):
    body = synchronised(call, named, 125)
    assert waits_of(body) == [(call, None, "gpu0:7", evidence, pattern)]
    base = second_step(body)
    assert spans(base, call) == [(1120, 1125)]
    assert [spans(scaled(base, a=2), name) for name in (call, "aten::after")] == [[(1220, 1225)], [(1225, 1235)]]
    assert spans(scaled(base, c=3), "aten::after") == [(1125, 1135)]
    assert spans(scaled(base, b=3), "aten::after") == [(1125, 1135)]
    # Without anything to wait for, the call takes the 5 that it took to come back, from when it began.
    assert spans(scaled(base, a=0), "aten::after") == [(1027, 1037)]


def test_a_stream_synchronise_named_by_its_record_waits_for_another_stream_than_the_last():
    body = synchronised("cudaStreamSynchronize", ("Stream Sync", 20, None), 320)
    assert waits_of(body) == [("cudaStreamSynchronize", None, "gpu0:20", "exact", "cuda_sync")]
    assert spans(scaled(second_step(body), b=2), "aten::after") == [(1620, 1630)]
    assert spans(scaled(second_step(body), a=2), "aten::after") == [(1320, 1330)]


@pytest.mark.parametrize("call", ["cudaDeviceSynchronize", "hipDeviceSynchronize", "cuCtxSynchronize"])
def test_a_device_synchronise_waits_for_every_stream(call: str):
    base = second_step(synchronised(call, None, 320))
    assert spans(base, call) == [(1314, 1320)]
    assert spans(scaled(base, b=2), call) == [(1614, 1620)]
    assert spans(scaled(base, b=0.1, a=4), call) == [(1420, 1426)]


def test_a_synchronise_that_other_steps_contradict_is_dropped():
    """The last launch before it went to stream 20, but it came back long before that work was done."""

    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("b", (s + 4, s + 8), (s + 14, s + 714), stream=20)
        trace.call("cudaStreamSynchronize", s + 22, s + 30)
        trace.op("aten::after", s + 30, s + 40)

    assert waits_of(body) == []
    base = second_step(body)
    assert spans(base, "aten::after") == spans(scaled(base, b=2), "aten::after") == [(1030, 1040)]
    assert spans(base, "unexplained") == [(1022, 1030)]


def test_an_event_synchronise_without_a_name_waits_for_what_ended_before_it_in_other_steps():
    def body(trace: Trace, step: int, s: float) -> None:
        end = s + 100 + 25 * step
        trace.launch("a", (s + 10, s + 14), (s + 20, end))
        trace.launch("b", (s + 16, s + 19), (end, s + 600))
        trace.call("cudaEventSynchronize", s + 22, end + 8)
        trace.op("aten::after", end + 8, end + 20)

    assert waits_of(body) == [("cudaEventSynchronize", None, "a", "time", "followed in other steps")]
    base = second_step(body)
    assert spans(base, "cudaEventSynchronize") == [(1150, 1158)]
    assert spans(scaled(base, a=0.5), "aten::after") == [(1093, 1105)]  # a now ends at 1020 + 65


def test_a_wait_that_no_evidence_names_is_unexplained_and_says_so():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 60))
        trace.call("cudaEventSynchronize", s + 22, s + 222)
        trace.op("aten::after", s + 222, s + 230)

    base = second_step(body)
    assert waits_of(body) == []
    assert spans(base, "unexplained") == [(1022, 1222)]
    assert spans(scaled(base, a=10), "aten::after") == [(1222, 1230)]
    assert base.report.filter(pl.col("what") == "explained by nothing")["time_ns"].to_list() == [200_000]


# --- copies, allocations ----------------------------------------------------------------------------------------------


def copied(name: str, returns: float) -> Body:
    """A kernel, then a copy on its stream whose call returns at `returns`."""

    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 16, s + 20), (s + 26, s + 120))
        trace.copy(name, (s + 22, s + returns), (s + 120, s + 150))
        trace.op("aten::after", s + returns, s + returns + 10)

    return body


def test_a_copy_to_pageable_memory_waits_for_itself():
    body = copied("Memcpy DtoH (Device -> Pageable)", 159)
    assert waits_of(body) == [("cudaMemcpyAsync", None, "Memcpy DtoH (Device -> Pageable)", "exact", "own work")]
    base = second_step(body)
    assert spans(base, "aten::after") == [(1159, 1169)]
    assert spans(scaled(base, a=0.5), "aten::after") == [(1112, 1122)]  # a ends at 1073, the copy at 1103
    assert spans(scaled(base, **{"Memcpy DtoH (Device -> Pageable)": 3}), "aten::after") == [(1219, 1229)]


@pytest.mark.parametrize("name", ["Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)"])
def test_a_copy_from_pageable_or_to_pinned_memory_waits_for_nothing(name: str):
    body = copied(name, 62)
    assert waits_of(body) == []
    assert spans(scaled(second_step(body), a=3), "aten::after") == [(1062, 1072)]


def test_freeing_waits_for_the_device_and_then_costs_its_own_time():
    body = synchronised("cudaFree", None, 354)
    base = second_step(body)
    assert spans(base, "cudaFree") == [(1314, 1354)]
    assert base.ops.filter(pl.col("name") == "cudaFree").select("kind", "dur_ns").rows() == [("alloc", 40_000)]
    assert spans(scaled(base, b=0.5), "cudaFree") == [(1164, 1204)]
    # With the device done before the call, only its own time is left.
    assert spans(scaled(base, b=0, a=0, c=0), "cudaFree") == [(1022, 1062)]


@pytest.mark.parametrize("call", ["cudaMalloc", "cudaHostAlloc", "hipMalloc", "cuModuleLoadData"])
def test_allocating_costs_its_own_time_and_waits_for_nothing(call: str):
    base = second_step(synchronised(call, None, 314))
    assert spans(base, call) == [(1022, 1314)]
    assert spans(scaled(base, b=0.5), call) == [(1022, 1314)]
    start, end = spans(scaled(base, {"cpu": 0.5, "launch": 0.5, "gap": 0.5}), call)[0]
    assert (start, end - start) == (1011, 292)  # half of the 22 before it are left


# --- waits that the profiler did not record ---------------------------------------------------------------------------


def hidden(trace: Trace, step: int, s: float, a_ends: float | None = None) -> None:
    """Python waits for a in a call that is not traced: the gap before aten::after ends when a does."""
    end = s + (400 + 50 * step if a_ends is None else a_ends)
    trace.op("aten::mm", s + 10, s + 30)
    trace.launch("a", (s + 10, s + 14), (s + 20, end))
    trace.op("aten::after", end + 9, end + 30)


def test_a_gap_that_ends_with_a_device_op_in_other_steps_is_a_wait_for_it():
    assert waits_of(hidden) == [("before aten::after", None, "a", "time", "followed in other steps")]
    base = second_step(hidden)
    assert spans(base, "before aten::after") == [(1500, 1509)]
    assert spans(scaled(base, a=0.5), "aten::after") == [(1269, 1290)]  # a ends at 1260


def test_a_gap_that_ends_with_a_device_op_in_this_step_only_is_host_time():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.op("aten::mm", s + 10, s + 30)
        trace.launch("a", (s + 10, s + 14), (s + 20, s + (500 if step == 2 else 100)))
        trace.op("aten::after", s + 509, s + 530)

    assert waits_of(body) == []
    assert spans(scaled(second_step(body), a=0.5), "aten::after") == [(1509, 1530)]


def test_a_short_gap_is_never_taken_for_a_hidden_wait():
    def body(trace: Trace, step: int, s: float) -> None:
        hidden(trace, step, s, 120 + 10 * step)

    assert waits_of(body) == []


def test_threads_wait_apart_from_each_other():
    """Two threads synchronise on the stream that each launched to last."""

    def body(trace: Trace, step: int, s: float) -> None:
        for thread, stream, end in ((MAIN, 7, 200), (ENGINE, 20, 400)):
            trace.launch(f"k{thread}", (s + 10, s + 14), (s + 20, s + end), stream=stream, thread=thread)
            trace.call("cudaStreamSynchronize", s + 20, s + end + 5, thread=thread)
            trace.op(f"aten::after{thread}", s + end + 5, s + end + 10, thread=thread)

    base = second_step(body)
    assert spans(scaled(base, k1=2), "aten::after1") == [(1385, 1390)]
    assert spans(scaled(base, k1=2), "aten::after2") == [(1405, 1410)]
