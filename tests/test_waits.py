"""Streams that wait for each other: by record, by idiom and by time."""

from __future__ import annotations

import pytest

from lumos_nb.waits import Sightings
from tests.trace_builder import (
    ENGINE,
    PERIOD,
    Trace,
    recording_of,
    repeated,
    scaled,
    second_step,
    spans,
    step_us,
    waits,
    waits_of,
)

# --- streams that wait, named by the trace ----------------------------------------------------------------------------


def named_wait(trace: Trace, step: int, s: float) -> None:
    """Work b on stream 20 after a on stream 7."""
    trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
    record = trace.record(s + 15, s + 16)
    trace.wait_event(s + 17, s + 18, (20, 7, record))
    trace.launch("b", (s + 20, s + 24), (s + 120, s + 150), stream=20)


def test_a_wait_that_the_trace_names_holds_the_stream_until_the_other_is_done():
    base = second_step(named_wait)
    assert spans(base, "b") == [(1120, 1150)]
    assert spans(scaled(base, a=2), "b") == [(1220, 1250)]
    assert step_us(scaled(base, a=2)) == 1100
    # Halved twenty times over, b waits for its own launch, which returns at 1024, and 6 more.
    assert spans(scaled(base, a=0.05), "b") == [(1030, 1060)]


def empty_stream(trace: Trace, step: int, s: float) -> None:
    """Stream 21, which never runs anything, waits for 7; stream 20 waits for 21."""
    trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
    first = trace.record(s + 15, s + 16)
    trace.wait_event(s + 16, s + 17, (21, 7, first))
    second = trace.record(s + 17, s + 18)
    trace.wait_event(s + 18, s + 19, (20, 21, second))
    trace.launch("b", (s + 20, s + 24), (s + 120, s + 150), stream=20)


def test_a_record_on_a_stream_without_work_carries_what_that_stream_waited_for():
    base = second_step(empty_stream)
    assert spans(base, "b") == [(1120, 1150)]
    assert spans(scaled(base, a=2), "b") == [(1220, 1250)]


def idle_stream(trace: Trace, step: int, s: float) -> None:
    """The same with a record on stream 21 taken before 21 waits: it carries nothing."""
    trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
    first = trace.record(s + 14, s + 15)
    second = trace.record(s + 15, s + 16)
    trace.wait_event(s + 16, s + 17, (21, 7, first))
    trace.wait_event(s + 18, s + 19, (20, 21, second))
    trace.launch("b", (s + 20, s + 24), (s + 30, s + 60), stream=20)


def test_a_record_carries_only_what_its_stream_waited_for_before_it():
    base = second_step(idle_stream)
    assert spans(scaled(base, a=2), "b") == [(1030, 1060)]


def three_streams(trace: Trace, step: int, s: float) -> None:
    trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
    first = trace.record(s + 14, s + 15)
    trace.wait_event(s + 15, s + 16, (21, 7, first))
    trace.launch("c", (s + 16, s + 18), (s + 120, s + 140), stream=21)
    second = trace.record(s + 18, s + 19)
    trace.wait_event(s + 19, s + 20, (20, 21, second))
    trace.launch("b", (s + 20, s + 24), (s + 140, s + 170), stream=20)


def test_waits_pass_through_three_streams():
    base = second_step(three_streams)
    assert [spans(scaled(base, a=2), name) for name in "cb"] == [[(1220, 1240)], [(1240, 1270)]]
    assert [spans(scaled(base, c=3), name) for name in "cb"] == [[(1120, 1180)], [(1180, 1210)]]


def test_a_stream_that_does_not_wait_is_not_ordered_by_the_legacy_stream():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("legacy", (s + 10, s + 14), (s + 20, s + 120), stream=7)
        trace.launch("other", (s + 20, s + 24), (s + 30, s + 60), stream=20)
        trace.launch("legacy too", (s + 30, s + 34), (s + 120, s + 130), stream=7)

    base = second_step(body)
    assert spans(scaled(base, legacy=3), "other") == [(1030, 1060)]
    assert spans(scaled(base, other=30), "legacy too") == [(1120, 1130)]


@pytest.mark.parametrize(
    ("which", "b_runs", "b_runs_after"), [(0, (1120, 1150), (1120, 1150)), (1, (1220, 1250), (1320, 1350))]
)
def test_a_wait_takes_the_record_that_was_last_when_it_was_made(
    which: int, b_runs: tuple[float, float], b_runs_after: tuple[float, float]
):
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
        first = trace.record(s + 15, s + 16)
        trace.launch("c", (s + 17, s + 19), (s + 120, s + 220))
        again = trace.record(s + 20, s + 21)
        trace.wait_event(s + 22, s + 23, (20, 7, (first, again)[which]))
        start = b_runs[0] - 1000
        trace.launch("b", (s + 24, s + 28), (s + start, s + start + 30), stream=20)

    base = second_step(body)
    assert spans(base, "b") == [b_runs]
    assert spans(scaled(base, c=2), "b") == [b_runs_after]


def test_a_record_long_before_its_wait_does_not_hold_what_comes_between():
    """The host records, launches c, blocks until c is done, and only then makes stream 20 wait for the record."""

    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
        record = trace.record(s + 15, s + 16)
        trace.launch("c", (s + 17, s + 21), (s + 120, s + 220))
        trace.call("cudaStreamSynchronize", s + 22, s + 225)
        trace.wait_event(s + 226, s + 227, (20, 7, record))
        trace.launch("b", (s + 230, s + 234), (s + 240, s + 270), stream=20)

    base = second_step(body)
    assert [spans(base, name) for name in "acb"] == [[(1020, 1120)], [(1120, 1220)], [(1240, 1270)]]
    assert [spans(scaled(base, c=2), name) for name in "cb"] == [[(1120, 1320)], [(1340, 1370)]]


def test_a_record_of_the_step_before_holds_for_what_that_stream_had_then():
    def body(trace: Trace, step: int, s: float) -> None:
        if step > 1:
            trace.wait_event(s + 5, s + 6, (20, 7, trace.kept))
        trace.launch("b", (s + 10, s + 14), (s + 120 if step > 1 else s + 20, s + 150), stream=20)
        trace.launch("a", (s + 900, s + 904), (s + 910, s + 1120))
        trace.kept = trace.record(s + 905, s + 906)

    base = second_step(body)
    assert spans(base, "b") == [(1120, 1150)]
    assert spans(scaled(base, {"boundary": 0.5}), "b")[0][0] < 1120


def test_streams_named_without_their_record_wait_for_all_that_was_issued():
    """Traces of 2023 name the streams and an event's number, but not the record."""

    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
        correlation = trace.wait_event(s + 17, s + 18)
        trace.names("Stream Wait Event", s + 17, s + 18, correlation, 20, 7, None)
        trace.launch("b", (s + 20, s + 24), (s + 120, s + 150), stream=20)

    assert waits_of(body) == [("cudaStreamWaitEvent", "gpu0:20", "gpu0:7", "exact", "cuda_sync")]
    assert spans(scaled(second_step(body), a=2), "b") == [(1220, 1250)]


# --- streams that wait, by idiom --------------------------------------------------------------------------------------


def collective(trace: Trace, step: int, s: float) -> None:
    """An all-reduce of a's result while c runs; d needs it."""
    trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
    trace.op("c10d::allreduce_", s + 20, s + 40)
    trace.wait_event(s + 24, s + 25)
    trace.launch("ncclAllReduce", (s + 30, s + 34), (s + 120, s + 200), stream=20)
    trace.launch("c", (s + 52, s + 56), (s + 120, s + 150))
    trace.op("c10d::wait_tensor", s + 70, s + 80)
    trace.wait_event(s + 72, s + 73)
    trace.launch("d", (s + 92, s + 96), (s + 200, s + 220))


def test_a_collective_waits_for_its_callers_stream_which_waits_for_it_in_turn():
    assert waits_of(collective) == [
        ("cudaStreamWaitEvent", "gpu0:20", "gpu0:7", "pattern", "collective after its caller"),
        ("cudaStreamWaitEvent", "gpu0:7", "ncclAllReduce", "pattern", "wait for a collective"),
    ]
    base = second_step(collective)
    assert [spans(scaled(base, a=2), name) for name in ("ncclAllReduce", "c", "d")] == [
        [(1220, 1300)], [(1220, 1250)], [(1300, 1320)],
    ]  # fmt: skip
    assert spans(scaled(base, c=5), "d") == [(1270, 1290)]
    assert spans(scaled(base, ncclAllReduce=2), "d") == [(1280, 1300)]


def two_buckets(trace: Trace, step: int, s: float, first_waited: str = "first") -> None:
    """Two collectives in flight on their own streams; one wait outside every operator, then an op that needs it."""
    for n, stream in enumerate((20, 21)):
        at = s + 100 * n
        trace.launch(f"a{n}", (at + 10, at + 14), (at + 20, at + 60))
        trace.op(f"c10d::allreduce_{n}", at + 20, at + 40)
        trace.wait_event(at + 24, at + 25)
        trace.launch(f"nccl {n} allReduce", (at + 30, at + 34), (at + 60, at + 400), stream=stream)
    trace.wait_event(s + 200, s + 201)
    trace.launch("d", (s + 210, s + 214), (s + 400, s + 420))
    trace.wait_event(s + 220, s + 221)
    trace.launch("e", (s + 230, s + 234), (s + 500, s + 510))


def test_waits_for_collectives_take_the_first_issued_first():
    assert [row[1:3] for row in waits_of(two_buckets) if row[4] == "wait for a collective"] == [
        ("gpu0:7", "nccl 0 allReduce"), ("gpu0:7", "nccl 1 allReduce"),
    ]  # fmt: skip
    base = second_step(two_buckets)
    longer = scaled(base, **{"nccl 0 allReduce": 1.5})
    assert [spans(longer, name) for name in "de"] == [[(1570, 1590)], [(1590, 1600)]]
    longer = scaled(base, **{"nccl 1 allReduce": 1.5})
    assert [spans(longer, name) for name in "de"] == [[(1400, 1420)], [(1670, 1680)]]


def test_a_thread_that_issues_no_collective_waits_for_those_of_another():
    def body(trace: Trace, step: int, s: float) -> None:
        for n, name in enumerate(("first", "second")):
            at = s + 20 * n
            trace.op("c10d::allreduce_", at + 8, at + 22, thread=ENGINE)
            trace.launch(f"nccl {name}", (at + 10, at + 14), (s + 100 + 200 * n, s + 300 + 200 * n), 20, ENGINE)
        for n in range(2):
            at = s + 60 + 20 * n
            trace.op("Optimizer.step", at, at + 15)
            trace.wait_event(at + 2, at + 3)
            trace.launch(f"update {n}", (at + 5, at + 9), (s + 310 + 200 * n, s + 320 + 200 * n))

    assert [row[1:3] for row in waits_of(body) if row[4] == "wait for a collective"] == [
        ("gpu0:7", "nccl first"),
        ("gpu0:7", "nccl second"),
    ]


def test_an_operator_that_issues_and_waits_waits_for_its_own_collective():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 1, s + 2), (s + 8, s + 20))
        trace.op("fsdp::prefetch", s + 5, s + 30)
        trace.op("record_param_comms", s + 10, s + 28)
        trace.wait_event(s + 12, s + 13)
        trace.launch("nccl early allReduce", (s + 16, s + 20), (s + 26, s + 626), stream=20)
        trace.op("fsdp::all_gather_copy_in", s + 50, s + 90)
        trace.op("record_param_comms", s + 55, s + 75)
        trace.wait_event(s + 57, s + 58)
        trace.launch("nccl own allGather", (s + 60, s + 64), (s + 70, s + 170), stream=21)
        trace.wait_event(s + 80, s + 81)
        trace.launch("b", (s + 100, s + 104), (s + 170, s + 190))

    assert [row[2] for row in waits_of(body) if row[4] == "wait for a collective"] == ["nccl own allGather"]
    assert spans(scaled(second_step(body), **{"nccl own allGather": 2}), "b") == [(1270, 1290)]
    assert spans(scaled(second_step(body), **{"nccl early allReduce": 2}), "b") == [(1170, 1190)]


def side_stream(trace: Trace, step: int, s: float) -> None:
    """`with torch.cuda.stream(side)`: it waits for the caller's stream, and the caller's for it when the block ends."""
    trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
    trace.wait_event(s + 17, s + 18)
    trace.launch("b", (s + 20, s + 24), (s + 120, s + 220), stream=20)
    trace.wait_event(s + 27, s + 28)
    trace.launch("c", (s + 30, s + 34), (s + 220, s + 240))


def test_a_block_on_another_stream_begins_and_ends_with_a_wait():
    assert [row[1:] for row in waits_of(side_stream) if row[3] == "pattern"] == [
        ("gpu0:20", "gpu0:7", "pattern", "stream switch"), ("gpu0:7", "gpu0:20", "pattern", "stream switch"),
    ]  # fmt: skip
    base = second_step(side_stream)
    assert spans(scaled(base, a=2), "b") == [(1220, 1320)]
    assert spans(scaled(base, b=2), "c") == [(1320, 1340)]


def test_an_idiom_that_the_other_steps_contradict_is_dropped():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
        trace.wait_event(s + 17, s + 18)
        early = 30 if step != 2 else 120  # in step 2 alone b happens to start when a ends
        trace.launch("b", (s + 20, s + 24), (s + early, s + early + 30), stream=20)

    assert waits_of(body) == []
    assert spans(scaled(second_step(body), a=2), "a") == [(1020, 1220)]
    assert "event" not in second_step(body).edges["rule"]


def test_without_a_wait_call_nothing_waits_however_the_times_look():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
        trace.launch("b", (s + 20, s + 24), (s + 120, s + 150), stream=20)

    assert waits_of(body) == []


# --- streams that wait, by time ---------------------------------------------------------------------------------------


def prefetched(trace: Trace, step: int, s: float, p_ends: float | None = None) -> None:
    """Work b waits for p, which another thread launched: no idiom knows. p takes another time in every step."""
    p_ends = s + 300 + 40 * step if p_ends is None else s + p_ends
    trace.launch("p", (s + 2, s + 6), (s + 12, p_ends), stream=20, thread=ENGINE)
    trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
    trace.wait_event(s + 17, s + 18)
    trace.launch("b", (s + 20, s + 24), (p_ends + 1, p_ends + 31))


def test_what_the_waiting_op_followed_in_other_steps_is_what_it_waits_for():
    assert waits_of(prefetched) == [("cudaStreamWaitEvent", "gpu0:7", "p", "time", "followed in other steps")]
    base = second_step(prefetched)
    assert spans(base, "b") == [(1381, 1411)]
    assert spans(scaled(base, p=0.5), "b") == [(1197, 1227)]  # p now ends at 1012 + 184


@pytest.mark.parametrize("p_ends", [100, 250, 500])
def test_the_step_itself_is_no_evidence_for_its_own_waits(p_ends: float):
    def body(trace: Trace, step: int, s: float) -> None:
        prefetched(trace, step, s, p_ends if step == 2 else None)

    def contrary(trace: Trace, step: int, s: float) -> None:
        """In step 2 alone b follows p; elsewhere it starts as soon as it can."""
        prefetched(trace, step, s, p_ends) if step == 2 else prefetched(trace, step, s, 119)

    assert waits_of(body) == waits_of(prefetched)
    assert waits_of(contrary) == []


def test_a_step_that_is_to_be_predicted_is_no_evidence_for_the_others():
    def body(trace: Trace, step: int, s: float) -> None:
        """Only in steps 2 and 4 does p hold b up; in the others it ends before b could start anyway."""
        prefetched(trace, step, s, 400 if step in (2, 4) else 119)

    recording = recording_of(repeated(body, PERIOD))
    assert [row[2] for row in waits(recording, 3)] == ["p"]
    assert Sightings(recording.ops, recording.records).waits(3, unseen=2).is_empty()  # one step alone is no evidence


def test_a_target_that_had_not_ended_in_one_of_the_other_steps_is_none():
    def body(trace: Trace, step: int, s: float) -> None:
        prefetched(trace, step, s)
        if step == 4:
            trace.rows[-1]["start_ns"] -= 100_000  # b overlaps p here

    assert waits_of(body) == []
