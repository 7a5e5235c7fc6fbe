"""The graph of one step: threads, the autograd engine, launches, streams, what was going on before, and the report."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from lumos_nb.critical_path import replay
from lumos_nb.errors import GraphError
from lumos_nb.graph import build_graph
from lumos_nb.schema import EDGES, OPS
from lumos_nb.traces.run import load_run
from tests.trace_builder import (
    ENGINE,
    ZERO_NS,
    Trace,
    graph_of,
    recording_of,
    repeated,
    scaled,
    second_step,
    spans,
    step_us,
    write_kineto,
)

HOST = ("cpu", "gap", "launch")


def host(scale: float) -> dict[str, float]:
    return dict.fromkeys(HOST, scale)


# --- threads and launches ---------------------------------------------------------------------------------------------


def one_kernel(trace: Trace, step: int, s: float) -> None:
    trace.op("aten::add", s + 10, s + 40)
    trace.launch("k", (s + 20, s + 30), (s + 34, s + 64))


def test_a_step_replays_as_it_was_measured():
    graph = second_step(one_kernel)
    assert spans(graph, "aten::add") == [(1010, 1020), (1030, 1040)]
    assert spans(graph, "cudaLaunchKernel") == [(1020, 1030)]
    assert spans(graph, "k") == [(1034, 1064)]
    assert step_us(graph) == 1000


def test_a_faster_host_launches_earlier_and_its_latency_stays():
    graph = scaled(second_step(one_kernel), host(0.5))
    # Gap 5, operator 5, launch 5 from 1000 on; the kernel starts 4 after the launch has returned.
    assert spans(graph, "cudaLaunchKernel") == [(1010, 1015)]
    assert spans(graph, "k") == [(1019, 1049)]
    assert step_us(graph) == 985


def test_a_longer_kernel_ends_the_step_later_and_the_host_does_not_wait():
    graph = scaled(second_step(one_kernel), k=3)
    assert spans(graph, "k") == [(1034, 1124)]
    assert step_us(graph) == 1060
    assert spans(graph, "aten::add")[1] == (1030, 1040)


def test_gaps_between_operators_are_host_work():
    graph = scaled(second_step(one_kernel), gap=0)
    assert spans(graph, "k") == [(1024, 1054)]


def test_a_kernel_that_starts_before_its_launch_returns_counts_from_the_launchs_start():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("k", (s + 20, s + 30), (s + 26, s + 56))

    graph = second_step(body)
    edge = graph.edges.filter(pl.col("rule") == "launch")
    assert edge.select("lag_ns", "from_start").rows() == [(6_000, True)]
    assert spans(scaled(graph, launch=4), "k") == [(1026, 1056)]
    assert spans(scaled(graph, gap=0.5), "k") == [(1016, 1046)]


def test_launch_latency_is_learned_from_kernels_whose_stream_was_idle():
    """The second kernel waits for the first, so that what passes since its launch is no latency."""

    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("first", (s + 10, s + 14), (s + 20, s + 120))
        trace.launch("second", (s + 20, s + 24), (s + 120, s + 150))

    graph = second_step(body)
    assert spans(scaled(graph, first=0.01), "second") == [(1030, 1060)]
    assert spans(scaled(graph, first=2), "second") == [(1220, 1250)]


@pytest.mark.parametrize("lasts", [4, 3, 2], ids=lambda lasts: f"{8 - lasts} between kernels, 5 after each launch")
def test_what_passes_between_kernels_that_a_slow_host_launches_is_no_latency_of_the_stream(lasts: float):
    def body(trace: Trace, step: int, s: float) -> None:
        for n in range(20):
            trace.launch("k", (s + 8 * n, s + 8 * n + 4), (s + 8 * n + 9, s + 8 * n + 9 + lasts))

    graph = second_step(body)
    assert spans(graph, "k")[-1] == (1161, 1161 + lasts)
    # A launch every 4 then, the last back at 78, and its kernel 5 later unless the stream is still busy.
    assert spans(scaled(graph, host(0.5)), "k")[-1] == (1083, 1083 + lasts)


def test_kernels_of_one_stream_keep_their_order():
    def body(trace: Trace, step: int, s: float) -> None:
        for n in range(3):
            trace.launch(f"k{n}", (s + 10 * n, s + 10 * n + 4), (s + 10 + 50 * n, s + 60 + 50 * n))

    graph = scaled(second_step(body), k0=2, k1=0)
    assert [spans(graph, f"k{n}") for n in range(3)] == [[(1010, 1110)], [(1110, 1110)], [(1110, 1160)]]


def test_kernels_that_two_threads_issue_to_one_stream_are_in_todays_order_only():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 50))
        trace.launch("b", (s + 20, s + 24), (s + 50, s + 80))
        trace.launch("c", (s + 30, s + 34), (s + 80, s + 90), thread=ENGINE)

    graph = second_step(body)
    order = graph.edges.filter(pl.col("rule") == "stream").join(graph.ops.select(dst="op_id", to="name"), on="dst")
    assert dict(order.select("to", "hard").rows()) == {"b": True, "c": False}


def test_kernels_of_a_graph_launch_follow_one_call():
    def body(trace: Trace, step: int, s: float) -> None:
        call = trace.call("cudaGraphLaunch", s + 10, s + 20)
        for n in range(3):
            trace.device(f"k{n}", s + 26 + 20 * n, s + 46 + 20 * n, correlation=call)

    graph = second_step(body)
    assert [spans(scaled(graph, gap=0.5), f"k{n}") for n in range(3)] == [
        [(1021, 1041)], [(1041, 1061)], [(1061, 1081)],
    ]  # fmt: skip


# --- the autograd engine ----------------------------------------------------------------------------------------------


def evaluate(trace: Trace, number: int, start: float, end: float) -> None:
    """One node of the backward pass, which launches a kernel halfway."""
    middle = (start + end) / 2
    trace.op(f"autograd::engine::evaluate_function: Node{number}", start, end, thread=ENGINE)
    trace.launch(f"b{number}", (middle, middle + 4), (middle + 10, middle + 20), thread=ENGINE)


def backward(trace: Trace, step: int, s: float) -> None:
    """Forward to 50, backward from 100 to 250 on the other thread, the optimizer from 300."""
    trace.op("aten::forward", s + 10, s + 50)
    evaluate(trace, 1, s + 100, s + 180)
    evaluate(trace, 2, s + 190, s + 250)
    trace.op("aten::optimizer", s + 300, s + 340)
    trace.launch("o", (s + 310, s + 314), (s + 320, s + 330))


NODES = [f"autograd::engine::evaluate_function: Node{n}" for n in (1, 2)]


def test_the_engine_runs_between_two_stretches_of_the_thread_that_calls_it():
    graph = second_step(backward)
    assert spans(graph, NODES[0])[0] == (1100, 1140)
    assert spans(graph, "backward") == [(1250, 1300)]
    assert spans(graph, "aten::optimizer")[0] == (1300, 1310)
    assert sorted(graph.edges.filter(pl.col("rule") == "autograd")["evidence"]) == ["exact", "exact"]


def test_a_faster_host_reaches_the_backward_pass_and_what_follows_it_sooner():
    graph = scaled(second_step(backward), host(0.5))
    # Forward ends at 25, the gap before the engine's start at 50; its 150 take 75; 50 more until the optimizer.
    assert spans(graph, NODES[0])[0] == (1050, 1070)
    assert spans(graph, NODES[1])[-1][1] == 1125
    assert spans(graph, "backward") == [(1125, 1175)]
    assert spans(graph, "aten::optimizer")[0] == (1175, 1180)
    assert spans(graph, "b1") == [(1078, 1088)]  # launched from 1070 to 1072, and 6 later
    assert spans(graph, "o") == [(1188, 1198)]


def test_a_slower_backward_delays_the_thread_that_waits_for_it():
    graph = scaled(second_step(backward), **{NODES[0]: 2})
    # The node's 76 outside its launch become 152.
    assert spans(graph, "backward") == [(1326, 1376)]


def test_kernels_do_not_hold_up_the_engine():
    graph = scaled(second_step(backward), kernel=0.5)
    assert spans(graph, "backward") == [(1250, 1300)]
    assert spans(graph, "o") == [(1320, 1325)]


def two_engines(trace: Trace, step: int, s: float) -> None:
    """`backward`, of which another engine thread (autograd has one a device) does a part that ends 30 later."""
    backward(trace, step, s)
    trace.op("autograd::engine::evaluate_function: Other", s + 100, s + 280, thread=ENGINE + 1)


def test_a_caller_goes_on_when_all_of_its_engine_threads_are_done():
    graph = second_step(two_engines)
    assert spans(graph, "backward") == [(1280, 1300)]
    other = {"autograd::engine::evaluate_function: Other": 0.5}
    assert spans(scaled(graph, other), "backward") == [(1250, 1270)]
    assert spans(scaled(graph, {NODES[0]: 2}), "backward") == [(1326, 1346)]


def two_backwards(trace: Trace, step: int, s: float) -> None:
    """Two micro-batches, each forward on the main thread and backward on the engine's."""
    for n, at in enumerate((s, s + 400)):
        trace.op(f"aten::forward{n}", at + 10, at + 50)
        evaluate(trace, n, at + 100, at + 200)
        trace.op(f"aten::after{n}", at + 220, at + 240)


def test_the_engines_idling_between_two_bursts_is_no_work():
    graph = second_step(two_backwards)
    engine = graph.ops.filter((pl.col("lane") == "cpu:2") & (pl.col("kind") != "boundary"))
    assert engine["dur_ns"].sum() == 2 * 100_000
    assert [start for start, _ in spans(graph, "backward")] == [1200, 1600]


def test_a_second_burst_starts_when_its_caller_gets_there():
    graph = scaled(second_step(two_backwards), **{"aten::forward0": 0.5, "before aten::forward1": 0})
    # 20 less in the first forward; 170 less between its end at 240 and the second forward.
    nodes = [spans(graph, f"autograd::engine::evaluate_function: Node{n}")[0][0] for n in range(2)]
    assert nodes == [1080, 1500 - 20 - 170]


def test_a_thread_of_a_pool_is_woken_by_what_the_main_thread_did_before():
    def body(trace: Trace, step: int, s: float) -> None:
        for n in range(5):
            trace.op(f"aten::main{n}", s + 1000 * n, s + 1000 * n + 900)
        trace.op("aten::pooled", s + 2905, s + 2950, thread=8)
        trace.launch("k", (s + 2910, s + 2914), (s + 2920, s + 2930), thread=8)

    graph = graph_of(repeated(body, 6000), step=2)
    assert spans(graph, "aten::pooled")[0] == (8905, 8910)
    wake = graph.edges.filter(pl.col("rule") == "wake")
    assert wake.select("evidence", "hard").rows() == [("time", False)]
    # It keeps the 5 that it came after the end of the third operator, at 2900, which is now at 1450.
    assert spans(scaled(graph, {"cpu": 0.5, "gap": 0.5}), "aten::pooled")[0][0] == 7455


def test_a_thread_that_nobody_can_have_woken_keeps_its_idling():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.op("aten::pooled0", s + 10, s + 50, thread=8)
        trace.op("aten::pooled1", s + 1500, s + 1600, thread=8)
        for n in range(3):
            trace.op(f"aten::main{n}", s + 2000 + 100 * n, s + 2080 + 100 * n)

    trace = Trace()
    trace.step(1, 0, 5000)
    body(trace, 1, 0)
    graph = graph_of(trace)
    assert spans(graph, "aten::pooled1") == [(1500, 1600)]
    assert "wake" not in graph.edges["rule"]


# --- before the step, and its ends ------------------------------------------------------------------------------------


def behind(trace: Trace, step: int, s: float) -> None:
    """A device that is always busy and runs 510 behind the host."""
    trace.op("aten::mm", s + 10, s + 100)
    trace.launch("k", (s + 20, s + 24), (s + 510, s + 1510))


def test_a_step_ends_with_its_last_device_op_however_far_the_device_is_behind():
    times = recording_of(repeated(behind)).step_times()
    start = (pl.col("start_ns") - ZERO_NS) / 1000
    assert times.select("step", start, pl.col("step_ns") / 1000, "edge").rows() == [
        (1, 10, 1500, True), (2, 1510, 1000, False), (3, 2510, 1000, False), (4, 3510, 1000, True),
    ]  # fmt: skip


def test_what_the_device_still_had_to_do_comes_before_the_steps_own_work():
    graph = second_step(behind)
    backlog = graph.ops.filter((pl.col("kind") == "boundary") & (pl.col("name") == "k"))
    assert backlog.select((pl.col("start_ns") - ZERO_NS) / 1000, pl.col("dur_ns") / 1000, "step", "ago").rows() == [
        (1000, 510, 1, 1)
    ]
    assert spans(graph, "kernel") == [(1510, 2510)]
    assert step_us(graph) == 1000
    assert step_us(scaled(graph, {"kernel": 0.5})) == 500


def test_kernels_launched_before_the_window_are_backlog():
    def body(trace: Trace, step: int, s: float) -> None:
        if step == 1:
            for n in range(3):
                trace.device(f"old{n}", 100 * n, 100 * n + 100)
        trace.launch("k", (s + 20, s + 24), (s + 300, s + 400))

    recording = recording_of(repeated(body))
    assert recording.step_times()["step_ns"].to_list() == [100_000, 1_000_000, 1_000_000, 1_000_000]
    graph = build_graph(recording, 1)
    assert spans(graph, "k") == [(300, 400)]
    assert set(graph.ops.filter(pl.col("kind") == "boundary")["name"]) >= {"old0", "old1", "old2"}
    assert graph.report.select("what", "rank", "count", "time_ns").row(0) == (
        "launched before the window", 0, 3, 300_000,
    )  # fmt: skip


def test_what_a_rank_did_before_its_later_window_is_no_work_of_before_the_first_step():
    """Its device's work of then ended after others' first steps, which took no time or less."""
    traces = Trace(0), Trace(1)
    for trace, steps in zip(traces, ([1, 2, 3, 4], [3, 4]), strict=True):
        for step in steps:
            s = 1000 * step
            trace.step(step, s, s + 990)
            trace.launch("k", (s + 20, s + 24), (s + 300, s + 400))
    traces[1].device("old", 2500, 2600)
    recording = recording_of(*traces)
    assert recording.step_times()["step_ns"].to_list() == [380_000, 1_000_000, 800_000, 1_000_000]
    for step, measured_ns in recording.step_times().select("step", "step_ns").rows():
        assert replay(build_graph(recording, step)).step_ns == measured_ns


def test_a_kernel_without_a_launch_amid_the_window_is_an_orphan_of_its_neighbours_step():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("k", (s + 20, s + 24), (s + 30, s + 60))
        if step == 3:
            trace.device("orphan", s + 60, s + 90)
        trace.launch("last", (s + 40, s + 44), (s + 90 if step == 3 else s + 60, s + 100))

    recording = recording_of(repeated(body))
    assert recording.ops.filter(pl.col("name") == "orphan")["step"].to_list() == [3]
    assert "orphan" not in build_graph(recording, 2).ops["name"]
    graph = build_graph(recording, 3)
    assert graph.report.select("what", "rank", "count", "time_ns").row(0) == ("launches lost", 0, 1, 30_000)
    assert spans(graph, "last") == [(2090, 2100)]
    assert spans(scaled(graph, orphan=2), "last") == [(2120, 2130)]


def test_the_default_step_is_the_median_without_the_first_and_the_last():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("k", (s + 10, s + 14), (s + 20, s + 100 * (1, 5, 2, 9, 4, 9)[step - 1]))

    recording = recording_of(repeated(body, steps=6))
    # Ends at 100, 1500, 2200, 3900, 4400, 5900: steps 2 to 5 last 1400, 700, 1700 and 500.
    assert recording.default_step() == 2
    assert build_graph(recording).step == 2


def test_the_only_step_is_the_default_even_at_the_edge():
    assert recording_of(repeated(one_kernel, steps=1)).default_step() == 1


def test_a_step_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(GraphError, match=r"step 9 .*choose one of \[1, 2, 3, 4\]"):
        build_graph(recording_of(repeated(one_kernel)), 9)


def test_without_marks_the_window_is_step_0_and_the_report_says_so():
    trace = Trace()
    one_kernel(trace, 0, 0)
    graph = graph_of(trace)
    assert graph.step == 0
    # From the first op of the window, at 10.
    assert (spans(graph, "k"), step_us(graph)) == ([(34, 64)], 54)
    assert "no step marks" in graph.report["what"]


def test_an_empty_recording_is_refused():
    with pytest.raises(GraphError, match="no op of any step"):
        recording_of(Trace()).default_step()


def on_a_cpu(trace: Trace, step: int, s: float) -> None:
    trace.op("aten::mm", s + 100, s + 4000)
    trace.op("aten::add", s + 4500, s + 9000)
    trace.op("aten::pooled", s + 5000, s + 7000, thread=9)


def test_on_a_cpu_a_step_ends_with_its_last_op():
    graph = graph_of(repeated(on_a_cpu, 10_000), step=2)
    assert step_us(graph) == 10_000
    assert step_us(scaled(graph, {"aten::mm": 0.5, "aten::add": 0.5})) == 10_000 - 1950 - 2250
    assert step_us(scaled(graph, gap=0)) == 10_000 - 1600
    assert spans(scaled(graph, gap=0), "aten::pooled") == [(15_000 - 600, 17_000 - 600)]


# --- several ranks ----------------------------------------------------------------------------------------------------


def rank(number: int, lasts: float, **options: float) -> Trace:
    def body(trace: Trace, step: int, s: float) -> None:
        trace.op("aten::mm", s + 10, s + 30)
        trace.launch("k", (s + 20, s + 24), (s + 30, s + 30 + lasts))

    return repeated(body, rank=number, **options)


def test_a_step_ends_with_its_slowest_rank():
    graph = graph_of(rank(0, 400), rank(1, 600), step=2)
    assert step_us(graph) == 1000
    assert spans(graph, "k", rank=0) == [(1030, 1430)]
    assert step_us(scaled(graph, k=0.5)) == 1000 - 300
    ends = replay(graph).step_ends.filter(pl.col("step") == 2).sort("rank")
    assert ends.select("rank", (pl.col("end_ns") - ZERO_NS) / 1000).rows() == [(0, 1430), (1, 1630)]


def test_ranks_without_collectives_stay_on_their_own_clocks():
    graph = graph_of(rank(0, 400), rank(1, 600, host_us=50), step=2)
    assert spans(graph, "k", rank=1) == [(1080, 1680)]


# --- delays and the report --------------------------------------------------------------------------------------------


def late_kernel(trace: Trace, step: int, s: float) -> None:
    """Twelve kernels that start 4 after their launch, one of them 204 after it."""
    for n in range(12):
        late = 200 if n == 7 else 0
        at = s + 50 * n + (200 if n > 7 else 0)
        trace.launch(f"k{n}", (at, at + 6), (at + 10 + late, at + 30 + late))


def test_a_delay_that_no_rule_explains_is_a_row_of_its_own():
    graph = second_step(late_kernel)
    delay = graph.ops.filter(pl.col("kind") == "unexplained")
    assert delay.select("name", "lane", pl.col("dur_ns") / 1000).rows() == [("delay of k7", "gpu0:7", 200)]
    assert spans(graph, "delay of k7") == [(1360, 1560)]
    assert spans(graph, "k7") == [(1560, 1580)]
    assert spans(scaled(graph, unexplained=0), "k7") == [(1360, 1380)]
    nothing = graph.report.filter(pl.col("what") == "explained by nothing")
    assert nothing.select("count", "time_ns").rows() == [(1, 200_000)]


def test_the_report_counts_links_by_rule_and_evidence_and_the_time_that_hangs_on_each():
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 120))
        record = trace.record(s + 15, s + 16)
        trace.wait_event(s + 17, s + 18, (20, 7, record))
        trace.launch("b", (s + 20, s + 24), (s + 120, s + 150), stream=20)
        trace.launch("early", (s + 2, s + 6), (s + 12, s + 40), stream=20)
        trace.call("cudaStreamSynchronize", s + 30, s + 155)

    report = second_step(body).report.filter(pl.col("what").str.starts_with("edges of rule"))
    counted = {(what.removeprefix("edges of rule "), detail): (count, time_ns)
               for what, _, count, time_ns, detail in report.rows()}  # fmt: skip
    assert counted["event", "evidence: exact"] == (1, 80_000)  # stream 20 stood still from 40 to 120
    assert counted["sync", "evidence: pattern"] == (1, 120_000)  # the host from 30 to 150
    assert counted["launch", "evidence: exact"][0] == 3


# --- tables and files -------------------------------------------------------------------------------------------------


def test_rows_are_in_an_order_that_edges_only_go_down():
    graph = graph_of(repeated(backward), step=2)
    assert OPS.check(graph.ops)["op_id"].to_list() == list(range(graph.ops.height))
    assert (EDGES.check(graph.edges)["src"] < graph.edges["dst"]).all()
    assert graph.ops["dur_ns"].min() >= 0
    assert graph.edges["lag_ns"].min() >= 0


def test_a_trace_read_from_a_file_gives_the_same_graph(tmp_path: Path):
    def body(trace: Trace, step: int, s: float) -> None:
        backward(trace, step, s)
        trace.op("aten::mm", s + 400, s + 460, sequence=step)
        trace.launch("a", (s + 410, s + 414), (s + 420, s + 520.125))
        record = trace.record(s + 415, s + 416)
        trace.wait_event(s + 417, s + 418, (20, 7, record))
        trace.launch("b", (s + 420, s + 424), (s + 520.125, s + 550), stream=20)
        trace.copy("Memcpy DtoH (Device -> Pageable)", (s + 430, s + 460), (s + 550, s + 555.5), stream=20)

    trace = repeated(body)
    read = build_graph(load_run(write_kineto(trace, tmp_path / "rank-0.json"), cache=False), 2)
    made = graph_of(trace, step=2)
    assert read.ops.equals(made.ops)
    assert read.edges.equals(made.edges)
    assert read.report.equals(made.report)
