"""Rule 7: what several ranks do together starts when the last of them is there."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pytest

from lumos_nb.critical_path import replay
from lumos_nb.errors import GraphError
from lumos_nb.graph import Graph, build_graph
from lumos_nb.lanes import ABSENT
from lumos_nb.partition import breakdown
from tests.trace_builder import Trace, graph_of, recording_of, repeated, scaled, spans, step_us

REDUCE = "ncclKernel_AllReduce"


def rank(
    number: int, arrives: float, ends: float = 300, kernel: str = REDUCE, group: str | None = None, **options: float
) -> Trace:
    """In each step work c until `arrives`, then a collective until `ends`, on one stream.

    Steps 1, 3 and 4 come later by times of their own, so that a collective of another step does not fit.
    """

    def body(trace: Trace, step: int, s: float) -> None:
        s += (17, 0, 41, 110)[step - 1]
        args = {"Collective name": "allreduce", "Process Group Name": group, "Group size": 2, "Seq": 10 + step}
        trace.launch(f"c{number}", (s + 10, s + 14), (s + 20, s + arrives))
        trace.launch(kernel, (s + 16, s + 19), (s + arrives, s + ends), args=args if group else {})

    return repeated(body, rank=number, **options)


def together(*arrivals: float, **options: float) -> Graph:
    """The second step of as many ranks as there are arrivals."""
    return graph_of(*(rank(number, arrives, **options) for number, arrives in enumerate(arrivals)), step=2)


def comm(graph: Graph, ranks: int, kernel: str = REDUCE) -> list[tuple[float, float]]:
    """When each rank's transfer runs."""
    return [spans(graph, kernel, rank=number)[0] for number in range(ranks)]


# --- joins ------------------------------------------------------------------------------------------------------------


def test_a_transfer_starts_on_both_ranks_when_the_later_has_arrived():
    graph = together(100, 250)
    assert comm(graph, 2) == [(1250, 1300)] * 2
    assert spans(graph, "join") == [(1250, 1250)]
    assert graph.ops.filter(pl.col("kind") == "join")["name"].to_list() == ["all_reduce of 2 ranks"]


def test_a_faster_straggler_shortens_everyones_wait_and_the_transfer_stays():
    graph = together(100, 250)
    assert comm(scaled(graph, c1=0.5), 2) == [(1135, 1185)] * 2  # c1 now ends at 1020 + 115
    assert comm(scaled(graph, c1=0.1), 2) == [(1100, 1150)] * 2  # and here c0 is the last
    assert step_us(graph) - step_us(scaled(graph, c1=0.5)) == 115


def test_a_slower_network_lengthens_the_transfer_alone():
    graph = together(100, 250)
    assert comm(scaled(graph, comm=2), 2) == [(1250, 1350)] * 2


def test_four_ranks_wait_for_the_last_of_them():
    graph = together(100, 150, 200, 250)
    assert comm(graph, 4) == [(1250, 1300)] * 4
    assert comm(scaled(graph, c3=0.1), 4) == [(1200, 1250)] * 4
    assert comm(scaled(graph, c0=5), 4) == [(1420, 1470)] * 4


def test_waiting_for_a_peer_is_no_work():
    parts = breakdown(together(100, 250)).filter(pl.col("rank") == 0)
    waited = parts.filter(pl.col("part") == "exposed_wait")["time_ns"].sum()
    assert (waited, parts.filter(pl.col("part") == "exposed_transfer")["time_ns"].sum()) == (150_000, 50_000)


def test_ranks_that_end_apart_have_transfers_of_their_own():
    graph = graph_of(rank(0, 100, 310), rank(1, 250, 300, "ncclKernel_AllReduce"), step=2)
    # One rank's clock is shifted by the 10 that its all-reduces end apart; a broadcast may end apart.
    assert comm(graph, 2) == [(1260, 1310)] * 2
    apart = [
        rank(number, arrives, ends, "ncclKernel_Broadcast") for number, arrives, ends in ((0, 100, 310), (1, 250, 300))
    ]
    for trace in apart:
        for step in range(4):
            trace.device("ncclKernel_Barrier", 1000 * step + 600, 1000 * step + 610, stream=9)
    graph = graph_of(*apart, step=2)
    assert comm(graph, 2, "ncclKernel_Broadcast") == [(1250, 1310), (1250, 1300)]


def test_a_rank_whose_clock_is_milliseconds_off_joins_all_the_same():
    graph = graph_of(rank(0, 100), rank(1, 250, host_us=7_300), step=2)
    assert comm(graph, 2) == [(1250, 1300)] * 2
    assert comm(scaled(graph, c1=0.5), 2) == [(1135, 1185)] * 2
    shift = graph.report.filter(pl.col("what") == "rank clock shifted")
    assert shift.select("rank", "count", "time_ns").rows() == [(1, 4, -7_300_000)]


def test_groups_join_apart():
    groups = [rank(number, arrives, group=group) for number, (arrives, group) in enumerate(
        [(100, "0"), (250, "0"), (120, "1"), (200, "1")]
    )]  # fmt: skip
    graph = graph_of(*groups, step=2)
    assert comm(graph, 4) == [(1250, 1300)] * 2 + [(1200, 1300)] * 2
    assert comm(scaled(graph, c1=0.5), 4) == [(1135, 1185)] * 2 + [(1200, 1300)] * 2


def test_a_batched_send_and_receive_joins_its_two_ranks():
    graph = together(100, 250, kernel="ncclDevKernel_SendRecv(ncclDevComm*)")
    assert comm(scaled(graph, c1=0.5), 2, "ncclDevKernel_SendRecv(ncclDevComm*)") == [(1135, 1185)] * 2


def test_collectives_in_another_order_on_each_rank_are_refused():
    traces = []
    for number, groups in enumerate(("ab", "ba")):

        def body(trace: Trace, step: int, s: float, groups: str = groups) -> None:
            for n, group in enumerate(groups):
                args = {"Collective name": "allreduce", "Process Group Name": group, "Group size": 2, "Seq": step}
                trace.launch(
                    f"ncclAllReduce{group}", (s + 10 * n, s + 10 * n + 4), (s + 20 * n + 20, s + 20 * n + 40), args=args
                )

        traces.append(repeated(body, rank=number))
    with pytest.raises(GraphError, match=r"cycle of \d+ ops, one of them 'ncclAllReduce|cycle of \d+ ops, one of them"):
        graph_of(*traces, step=2)


# --- ranks that lack some ---------------------------------------------------------------------------------------------


def without(trace: Trace, *lost: int) -> Trace:
    """The trace without the collectives of those numbers, counted over the window."""
    collectives = [row for row in trace.rows if row["name"] == REDUCE]
    gone = {collectives[n]["event_id"] for n in lost}
    trace.rows = [row for row in trace.rows if row["event_id"] not in gone]
    return trace


@pytest.mark.parametrize("lost", [(0,), (-1,), (0, -1)], ids=["first", "last", "first and last"])
def test_collectives_lost_at_the_edges_leave_the_inner_steps_joined(lost: tuple[int, ...]):
    graph = graph_of(rank(0, 100), without(rank(1, 250, steps=4), *lost), step=2)
    assert comm(graph, 2) == [(1250, 1300)] * 2
    assert comm(scaled(graph, c1=0.5), 2) == [(1135, 1185)] * 2


def test_a_collective_that_a_peer_lost_is_a_wait_and_then_the_usual_transfer():
    graph = build_graph(recording_of(rank(0, 100), without(rank(1, 250), 0)), 1)
    assert not spans(graph, "join")
    # In the other steps rank 0 takes 50 from when rank 1 is there.
    assert spans(graph, ABSENT) == [(117, 267)]
    assert spans(graph, REDUCE, rank=0) == [(267, 317)]


def alone(lengths: Sequence[float], **options: float) -> Trace:
    """One rank of several: its all-reduces take `lengths`, step by step."""

    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("c", (s + 10, s + 14), (s + 20, s + 100))
        trace.launch(REDUCE, (s + 16, s + 19), (s + 100, s + 100 + lengths[step - 1]))
        trace.launch("d", (s + 20, s + 24), (s + 100 + lengths[step - 1], s + 500))

    return repeated(body, steps=len(lengths), **options)


def test_where_ranks_have_no_trace_the_transfer_is_a_low_quantile_and_the_rest_an_explicit_wait():
    graph = graph_of(alone((60, 200, 50, 90), world_size=4), step=2)
    assert spans(graph, ABSENT) == [(1100, 1250)]
    assert spans(graph, REDUCE) == [(1250, 1300)]
    assert spans(graph, "d") == [(1300, 1500)]
    estimated = graph.report.filter(pl.col("what") == "transfers estimated")
    assert estimated.select("rank", "count", "time_ns").rows() == [(0, 1, 50_000)]
    assert spans(scaled(graph, comm=2), "d") == [(1350, 1550)]
    assert spans(scaled(graph, {ABSENT: 0}), REDUCE) == [(1100, 1150)]
    assert spans(scaled(graph, c=0.5), REDUCE) == [(1210, 1260)]


def test_a_rank_of_a_job_of_one_waits_for_nobody():
    graph = graph_of(alone((60, 200, 50, 90), world_size=1), step=2)
    assert spans(graph, ABSENT) == []
    assert spans(graph, REDUCE) == [(1100, 1300)]


def test_two_of_four_ranks_wait_for_each_other_and_then_for_the_others():
    traces = []
    for number, arrives in enumerate((100, 150)):

        def body(trace: Trace, step: int, s: float, number: int = number, arrives: float = arrives) -> None:
            trace.launch(f"c{number}", (s + 10, s + 14), (s + 20, s + arrives))
            trace.launch(REDUCE, (s + 16, s + 19), (s + arrives, s + (400 if step == 2 else 210)))

        traces.append(repeated(body, rank=number, world_size=4))
    graph = graph_of(*traces, step=2)
    # Once both are there it usually takes 60; the rest of the 250 is for the other two.
    assert comm(graph, 2) == [(1340, 1400)] * 2
    assert [spans(graph, ABSENT, rank=number) for number in range(2)] == [[(1150, 1340)]] * 2
    assert comm(scaled(graph, c1=0.5), 2) == [(1290, 1350)] * 2  # c0 is the last now, at 1100


def test_a_clock_that_steps_while_ranks_are_missing_gives_no_wait_of_less_than_nothing():
    traces = []
    for number in range(2):

        def body(trace: Trace, step: int, s: float, number: int = number) -> None:
            s += 500 * (number == 1 and step == 2)  # rank 1 joins after rank 0 has ended, by what the clocks show
            trace.launch(f"c{number}", (s + 10, s + 14), (s + 20, s + 100))
            trace.launch(REDUCE, (s + 16, s + 19), (s + 100, s + 200 + 50 * step))

        traces.append(repeated(body, rank=number, world_size=4, period=2000))
    graph = graph_of(*traces, step=2)
    assert graph.ops["dur_ns"].min() == 0
    assert spans(graph, ABSENT, rank=0) == [(2600, 2600)]
    assert breakdown(replay(graph)).filter(rank=1)["time_ns"].sum() == 1000 * step_us(graph)


# --- on CPUs ----------------------------------------------------------------------------------------------------------


def gloo(number: int, issues: float, label: str = "all_reduce group=0 seq={} bytes=64 dtype=float32") -> Trace:
    """Forward until `issues`, an asynchronous collective on another thread until 400, and a wait for it."""

    def body(trace: Trace, step: int, s: float) -> None:
        words = label.format(step)
        kind = words.split()[0]
        trace.op(f"aten::forward{number}", s + 10, s + issues)
        trace.annotation(f"comm::{words}", s + issues, s + issues + 4)
        trace.op(f"c10d::{kind}_", s + issues + 1, s + issues + 3)
        trace.annotation(f"gloo:{kind}", s + issues + 6, s + 400, thread=9)
        trace.op("aten::overlapped", s + issues + 10, s + issues + 30)
        trace.annotation(f"wait::{words}", s + issues + 40, s + 405)
        trace.op("aten::optimizer", s + 405, s + 500)

    return repeated(body, rank=number)


def test_a_gloo_collective_joins_the_threads_that_execute_it():
    graph = graph_of(gloo(0, 100), gloo(1, 250), step=2)
    assert comm(graph, 2, "gloo:all_reduce") == [(1256, 1400)] * 2
    assert [spans(graph, "aten::optimizer", rank=number) for number in range(2)] == [[(1405, 1500)]] * 2
    faster = scaled(graph, {"aten::forward1": 0.5})  # 120 less, so that rank 1 issues at 1130
    assert comm(faster, 2, "gloo:all_reduce") == [(1136, 1280)] * 2
    assert [spans(faster, "aten::optimizer", rank=number) for number in range(2)] == [[(1285, 1380)]] * 2


def test_a_wait_that_comes_after_its_collective_costs_only_itself():
    graph = graph_of(gloo(0, 100), gloo(1, 250), step=2)
    quick = scaled(graph, comm=0)  # done at 1256, when rank 1 gets to its wait at 1290 and rank 0 at 1140
    assert spans(quick, "aten::optimizer", rank=0) == [(1261, 1356)]
    assert spans(quick, "aten::optimizer", rank=1) == [(1295, 1390)]


def test_a_receive_waits_for_its_send():
    send = gloo(0, 250, "send group=0 seq={} bytes=64 dtype=float32 peer=1")
    receive = gloo(1, 100, "recv group=0 seq={} bytes=64 dtype=float32 peer=0")
    graph = graph_of(send, receive, step=2)
    assert spans(graph, "join") == [(1256, 1256)]
    later = scaled(graph, {"aten::forward0": 1.5})  # 120 more
    assert spans(later, "gloo:recv") == [(1376, 1520)]
    assert spans(later, "aten::optimizer", rank=1) == [(1525, 1620)]


# --- hidden in other ops ----------------------------------------------------------------------------------------------


def test_an_op_that_ends_together_but_starts_apart_hides_a_collective():
    traces = []
    for number, starts in enumerate((100, 700)):

        def body(trace: Trace, step: int, s: float, number: int = number, starts: float = starts) -> None:
            trace.op(f"aten::backward{number}", s + 10, s + starts)
            trace.op("clip_grad_norm", s + starts, s + 800)
            trace.op("aten::step", s + 800, s + 900)

        traces.append(repeated(body, rank=number))
    graph = graph_of(*traces, step=2)
    assert graph.ops.filter(pl.col("name") == "clip_grad_norm")["kind"].to_list() == ["comm", "comm"]
    assert comm(graph, 2, "clip_grad_norm") == [(1700, 1800)] * 2
    assert spans(scaled(graph, {"aten::backward1": 0.5}), "aten::step") == [(1455, 1555)] * 2
    assert graph.report.filter(pl.col("what") == "hidden collectives")["count"].to_list() == [4, 4]
