"""Predictions from other steps: what they take from the step, what from the others, and what stands beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lumos_nb.errors import GraphError
from lumos_nb.evaluate import (
    PooledCosts,
    delayed_steps,
    mechanistic,
    score_waits,
    what_ifs,
    with_pooled_costs,
    without_rules,
)
from lumos_nb.graph import Graph, build_graph
from tests.trace_builder import Trace, graph_of, recording_of, repeated, spans, step_us

GAPS, KERNELS = (30, 50, 40, 60, 20), (100, 300, 200, 500, 400)


def steps(
    gaps: Sequence[float] = GAPS,
    kernels: Sequence[float] = KERNELS,
    launches: Sequence[float] = (4,) * 5,
    operators: Sequence[float] = (20,) * 5,
) -> Trace:
    """Steps of a gap, an operator, a launch, a kernel 6 after it, a wait that takes 5 after that, and 25 more.

    From the end of one kernel to that of the next it takes 36, the gap, the operator, the launch and the kernel.
    """
    trace = Trace()
    now = 0.0
    for number, costs in enumerate(zip(gaps, operators, launches, kernels, strict=True), 1):
        gap, operator, launch, kernel = costs
        starts, calls = now + gap, now + gap + operator
        ends = calls + launch + 6 + kernel
        trace.op("aten::mm", starts, calls)
        trace.launch("k", (calls, calls + launch), (ends - kernel, ends))
        trace.call("cudaStreamSynchronize", calls + launch + 2, ends + 5)
        trace.op("aten::after", ends + 5, ends + 15)
        trace.step(number, now, ends + 30)
        now = ends + 30
    return trace


def pooled(trace: Trace, step: int = 3) -> Graph:
    """The graph of a step with what steps 2 to 5 but that one cost, which is what `mechanistic` replays."""
    recording = recording_of(trace)
    others = (build_graph(recording, other, unseen=step) for other in (2, 3, 4, 5) if other != step)
    return with_pooled_costs(build_graph(recording, step), PooledCosts.of(others))


# --- the mechanistic prediction ---------------------------------------------------------------------------------------


def test_a_step_is_predicted_from_its_own_kernels_and_the_others_gaps():
    table = mechanistic(recording_of(steps()))
    assert table["step"].to_list() == [2, 3, 4, 5]  # the first holds one-off costs
    # Step 3 takes 36 + 40 + 20 + 4 + 200; the others' gaps are 50, 60 and 20, 43.333 in the mean.
    row = table.row(1, named=True)
    assert (row["measured_ns"], row["predicted_ns"]) == (300_000, 303_333)
    assert row["error"] == pytest.approx(3_333 / 300_000)


def test_the_steps_own_gaps_do_not_enter_its_prediction():
    for own_gap in (40, 940):
        table = mechanistic(recording_of(steps(gaps=(30, 50, own_gap, 60, 20))), [2, 3, 4, 5])
        assert table["predicted_ns"][1] == 303_333


def test_the_other_steps_gaps_do():
    assert step_us(pooled(steps(gaps=(30, 80, 40, 90, 50)))) == 333.333
    assert step_us(pooled(steps(gaps=(9000, 50, 40, 60, 20)))) == 303.333  # but not the first step's


def test_the_steps_own_kernels_are_kept_and_the_others_do_not_matter():
    assert step_us(pooled(steps(kernels=(100, 300, 250, 500, 400)))) == 353.333
    assert step_us(pooled(steps(kernels=(100, 900, 200, 900, 900)))) == 303.333


def test_launches_are_pooled_too():
    assert step_us(pooled(steps(launches=(4, 7, 1000, 7, 7)))) == pytest.approx(306.333)


def test_the_steps_own_operators_are_kept():
    assert step_us(pooled(steps(operators=(20, 20, 60, 20, 20)))) == 343.333
    assert step_us(pooled(steps(operators=(20, 90, 20, 90, 90)))) == 303.333


def test_a_delay_of_the_step_is_no_part_of_its_prediction():
    def body(late: int):
        def fill(trace: Trace, step: int, s: float) -> None:
            for n in range(12):
                wait = 200 if n == 7 and step == late else 0
                at = s + 5 + 50 * n
                trace.launch(f"k{n}", (at, at + 6), (at + 10 + wait, at + 30 + wait), stream=n)

        return fill

    late = repeated(body(3), steps=5)
    assert spans(graph_of(late, step=3), "k7") == [(2565, 2585)]
    assert spans(pooled(late), "k7") == [(2365, 2385)]


def test_null_is_the_step_before_and_for_the_first_the_one_after():
    table = mechanistic(recording_of(steps()))
    assert table["measured_ns"].to_list() == [410_000, 300_000, 620_000, 480_000]
    assert table["null_ns"].to_list() == [300_000, 410_000, 300_000, 620_000]
    assert table["null_error"][1] == pytest.approx(410 / 300 - 1)


def test_chosen_steps_are_predicted_from_each_other_alone():
    table = mechanistic(recording_of(steps()), [3, 5])
    assert table["step"].to_list() == [3, 5]
    assert table["predicted_ns"].to_list() == [(60 + 20 + 200) * 1000, (60 + 40 + 400) * 1000]


def test_the_share_of_the_path_that_is_the_hosts_is_told():
    row = mechanistic(recording_of(steps())).row(1, named=True)
    # Of 303.333 the gap, the operator and the launch take 67.333; not so the lead, the latency and the kernel.
    assert row["host_share"] == pytest.approx(67.333 / 303.333)
    assert row["wait_share"] == 0


def test_one_step_besides_the_first_is_too_few():
    trace = steps(GAPS[:2], KERNELS[:2], (4, 4), (20, 20))
    with pytest.raises(GraphError, match=r"at least 2 steps besides the first, not \[2\]"):
        mechanistic(recording_of(trace))


# --- ablations --------------------------------------------------------------------------------------------------------


def overlapped(trace: Trace, step: int, s: float) -> None:
    """On stream 20 b follows a of stream 7; then the host waits for it, and d follows."""
    trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
    record = trace.record(s + 15, s + 16)
    trace.wait_event(s + 17, s + 18, (20, 7, record))
    trace.launch("b", (s + 20, s + 24), (s + 120, s + 150), stream=20)
    trace.call("cudaStreamSynchronize", s + 30, s + 155)
    trace.launch("d", (s + 160, s + 164), (s + 170, s + 200), stream=20)


def test_ablations_drop_the_rules_that_they_name():
    row = mechanistic(recording_of(repeated(overlapped, steps=5))).row(1, named=True)
    assert (row["measured_ns"], row["error"], row["no_joins_error"]) == (1_000_000, 0, 0)
    # Without the event b ends at 60, the wait for it at 65, and d, 45 later, at 110; a ends last, at 120.
    assert row["no_events_error"] == pytest.approx(-0.080)
    # Without the host's wait too it takes 5 from 30 on.
    assert row["no_waits_error"] == pytest.approx(-0.080)


def test_without_rules_leaves_the_other_edges():
    graph = graph_of(repeated(overlapped, steps=5), step=3)
    assert spans(without_rules(graph, "event"), "d") == [(2080, 2110)]
    # Only the host's wait dropped: it comes back at 35, and d is issued by 44, but b is still to end at 150.
    assert spans(without_rules(graph, "sync"), "d") == [(2150, 2180)]
    assert set(graph.edges["rule"]) - set(without_rules(graph, "sync", "event").edges["rule"]) == {"sync", "event"}


def test_without_joins_nobody_waits_for_the_other_rank():
    traces = []
    for number, arrives in enumerate((100, 250)):

        def body(trace: Trace, step: int, s: float, number: int = number, arrives: float = arrives) -> None:
            trace.launch(f"c{number}", (s + 10, s + 14), (s + 20, s + arrives))
            trace.launch("ncclAllReduce", (s + 16, s + 19), (s + arrives, s + 300))
            trace.launch(f"e{number}", (s + 22, s + 25), (s + 300, s + (600 if number == 0 else 310)))

        traces.append(repeated(body, rank=number, steps=5))
    row = mechanistic(recording_of(*traces)).row(1, named=True)
    assert row["error"] == 0
    # Rank 0's transfer then follows the launch of its own, at 25: the collective is free to run before c0 has ended.
    assert row["no_joins_error"] < -0.1


# --- what-ifs beside bounds -------------------------------------------------------------------------------------------


def synchronised(trace: Trace, step: int, s: float) -> None:
    trace.launch("k", (s + 10, s + 14), (s + 20, s + 520))
    trace.call("cudaStreamSynchronize", s + 22, s + 525)
    trace.op("aten::after", s + 525, s + 600)


def test_what_ifs_stand_beside_what_the_busiest_lane_must_do():
    table = what_ifs(graph_of(repeated(synchronised, 700), step=2))
    assert table["change"].to_list() == ["none", "kernels", "host", "transfers"]
    assert (table["step_ns"] / 1000).to_list() == [700, 450, 605.5, 700]
    assert table["times"].to_list() == pytest.approx([1, 450 / 700, 605.5 / 700, 1])
    # The stream is busy for 500. The thread for 10 + 4 + 8 + 5 + 75 + 100, which counts once kernels take 250 or less.
    assert (table["bound_ns"] / 1000).to_list() == [500, 250, 500, 500]


# --- logged delays ----------------------------------------------------------------------------------------------------


def delayed(delays_ms: Sequence[int]) -> list[Trace]:
    """Two ranks that work for 1000 and all-reduce in 500; rank 1 is late by the delay. The optimizer takes 300."""
    ranks = [Trace(0), Trace(1)]
    now = 0.0
    for step, delay in enumerate(delays_ms, 1):
        words = f"all_reduce group=0 seq={step} bytes=64 dtype=float32"
        ends = now + 1000 + 1000 * delay + 506
        for number, trace in enumerate(ranks):
            trace.op("aten::forward", now, now + 1000)
            at = now + 1000 + 1000 * delay * number
            if number:
                trace.op(f"delay={delay}ms", now + 1000, at)
            trace.annotation(f"comm::{words}", at, at + 4)
            trace.annotation("gloo:all_reduce", at + 6, ends, thread=9)
            trace.annotation(f"wait::{words}", at + 10, ends + 5)
            trace.op("aten::optimizer", ends + 5, ends + 305)
            trace.step(step, now, ends + 305)
        now = ends + 305
    return ranks


def test_a_step_with_another_delay_is_predicted_from_the_others():
    table = delayed_steps(recording_of(*delayed((1, 3, 2, 5, 4, 2))))
    assert table["step"].to_list() == [2, 3, 4, 5]
    assert table["delayed_rank"].unique().to_list() == [1]
    assert (table["delay_ns"] / 1_000_000).to_list() == [3, 2, 5, 4]
    # 1000 of work, 6 until it runs, 500, 5 to come back, 300, and the delay.
    assert table["measured_ns"].to_list() == [1_811_000 + 1_000_000 * ms for ms in (3, 2, 5, 4)]
    assert table["predicted_ns"].to_list() == table["measured_ns"].to_list()
    assert table["null_ns"].to_list() == [1_811_000 + 1_000_000 * ms for ms in (4, 4, 3, 3)]


def test_the_delay_is_on_the_path_and_in_the_peers_waiting():
    table = delayed_steps(recording_of(*delayed((1, 3, 2, 5, 4, 2))))
    assert table["peer_wait_ns"].to_list() == [1_000_000 * ms for ms in (3, 2, 5, 4)]
    for ms, share in zip((3, 2, 5, 4), table["path_share"], strict=True):
        assert share >= (1006 + 1000 * ms) / (1811 + 1000 * ms)  # up to the join; after it either rank may be named


def test_a_run_without_logged_delays_is_refused():
    with pytest.raises(GraphError, match="no step logs a delay"):
        delayed_steps(recording_of(steps()))


# --- inferred waits ---------------------------------------------------------------------------------------------------


def test_waits_are_scored_against_the_records_that_name_them():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("other", (s + 2, s + 6), (s + 12, s + 110), stream=9)
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
        trace.wait_event(s + 17, s + 18, (20, 7, trace.record(s + 15, s + 16)))
        trace.launch("b", (s + 20, s + 24), (s + 120, s + 150), stream=20)
        call = trace.call("cudaStreamSynchronize", s + 30, s + 155)
        trace.names("Stream Sync", s + 30, s + 155, call, 20, None, None)

    score = score_waits(recording_of(repeated(body)))
    assert score.rows() == [
        ("event", 4, 0, 0, 1.0, 1.0),
        ("sync", 4, 0, 0, 1.0, 1.0),
        ("all", 8, 0, 0, 1.0, 1.0),
    ]


def test_a_wait_for_another_stream_than_the_idiom_says_is_both_wrong_and_missed():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("other", (s + 2, s + 6), (s + 12, s + 130), stream=9)
        record = trace.record(s + 7, s + 8)
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
        trace.wait_event(s + 17, s + 18, (20, 9, record))
        trace.launch("b", (s + 20, s + 24), (s + 130, s + 160), stream=20)

    trace = repeated(body)
    trace.rows = [row for row in trace.rows if row["name"] != "cudaEventRecord"]
    for row in trace.rows:  # a record that the trace lacks names no time
        row["args"] = row["args"].replace("wait_on_cuda_event_record_corr_id", "wait_on_cuda_event_id")
    score = score_waits(recording_of(trace)).row(0, named=True)
    assert (score["tp"], score["fp"], score["fn"]) == (0, 4, 4)
    assert (score["precision"], score["recall"]) == (0, 0)


def test_waits_for_streams_without_work_do_not_count():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
        trace.wait_event(s + 17, s + 18, (7, 21, trace.record(s + 15, s + 16)))
        trace.launch("b", (s + 20, s + 24), (s + 120, s + 150))

    score = score_waits(recording_of(repeated(body)))
    assert score["tp"].sum() + score["fp"].sum() + score["fn"].sum() == 0
    assert score["precision"].null_count() == score["recall"].null_count() == 3
