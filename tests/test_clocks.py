"""One clock for all: device against host, rank against rank, and which collectives belong together."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl
import pytest

from lumos_nb.clocks import (
    about_messages,
    align_clocks,
    align_ranks,
    begun_early,
    early_messages,
    match_collectives,
    shift_device_clocks,
)
from lumos_nb.ops import build_ops
from tests.trace_builder import ZERO_NS, Trace, run_of

ENDS = (1000, 1300, 1900, 2250, 2900, 4000)
"""When the collectives of a window end, in µs: at no regular distance, so that a wrong pairing shows."""


def ops_of(*traces: Trace) -> pl.DataFrame:
    return build_ops(run_of(*traces).events)


def starts(ops: pl.DataFrame, rank: int = 0) -> dict[str, float]:
    """Start in µs of every op of a rank, by name."""
    here = ops.filter(pl.col("rank") == rank)
    return dict(here.select("name", s=(pl.col("start_ns") - ZERO_NS) / 1000).rows())


def collectives(
    rank: int,
    ends: Sequence[float] = ENDS,
    *,
    lasts: float = 100,
    host_us: float = 0,
    kernel: str = "ncclKernel_AllReduce",
    group: str | None = None,
    seq: int | None = None,
) -> Trace:
    """A rank whose collectives end at `ends`; numbered from `seq` if it is given."""
    trace = Trace(rank, host_us=host_us)
    for n, end in enumerate(ends):
        args = {"Process Group Name": group, "Seq": None if seq is None else seq + n, "Collective name": "allreduce"}
        given = {key: value for key, value in args.items() if value is not None} if group else {}
        trace.device(kernel, end - lasts, end, stream=20, args=given)
    return trace


def matched(ops: pl.DataFrame, clock_us: dict[int, float] | None = None) -> list[dict[int, float]]:
    """Each collective's end on every rank that takes part, in µs without the ranks' clock offsets, in order."""
    clock = pl.col("rank").replace_strict(clock_us or {}, default=0.0)
    end_us = (pl.col("start_ns") + pl.col("dur_ns") - ZERO_NS) / 1000 - clock
    rows = ops.filter(pl.col("match").is_not_null()).with_columns(end_us=end_us).sort("end_us")
    parts = rows.partition_by("match", maintain_order=True)
    return [dict(part.sort("rank").select("rank", "end_us").rows()) for part in parts]


# --- device against host ----------------------------------------------------------------------------------------------


def launched(device_us: float, rank: int = 0) -> Trace:
    """Two kernels, the first 3 µs after its launch began, on a device whose clock shows `device_us` too much."""
    trace = Trace(rank, device_us=device_us)
    trace.op("aten::mm", 0, 100)
    trace.device("backlog", 1, 8)
    trace.launch("first", (10, 20), (13, 33))
    trace.launch("second", (50, 55), (60, 90))
    return trace


def test_a_device_clock_that_is_behind_is_shifted_until_no_kernel_starts_before_its_launch():
    ops, report = shift_device_clocks(ops_of(launched(-9)))
    # It showed the first kernel at 4, 6 before its launch: 7 more put it 1 after it, where the truth is 3.
    assert starts(ops) | {"aten::mm": 0} == {
        "aten::mm": 0, "cudaLaunchKernel": 50, "backlog": -1, "first": 11, "second": 58,
    }  # fmt: skip
    assert report.select("what", "rank", "count", "time_ns").rows() == [("device clock shifted", 0, 1, 7_000)]
    assert report["detail"].item() == "1 device ops started before their launch call, the earliest by 6000 ns"


def test_a_kernel_that_starts_before_its_launch_returns_needs_no_shift():
    ops, report = shift_device_clocks(ops_of(launched(0)))
    assert starts(ops)["first"] == 13
    assert report.is_empty()


def test_the_shift_is_each_ranks_own():
    ops, report = shift_device_clocks(ops_of(launched(0, rank=0), launched(-5, rank=1), launched(-30, rank=2)))
    assert [starts(ops, rank)["second"] for rank in range(3)] == [60, 58, 58]
    assert report.select("rank", "count", "time_ns").rows() == [(1, 1, 3_000), (2, 2, 28_000)]


def test_launches_stay_where_they_are():
    ops, _ = shift_device_clocks(ops_of(launched(-30)))
    assert ops.filter(pl.col("name") == "first")["launch_ns"].item() == ZERO_NS + 10_000


# --- which collectives belong together --------------------------------------------------------------------------------


def test_all_collectives_match_where_no_rank_lost_any():
    assert matched(match_collectives(ops_of(collectives(0), collectives(1)))) == [{0: e, 1: e} for e in ENDS]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_collectives_lost_at_the_start_of_a_window_leave_their_peers_alone(lost: int):
    pairs = matched(match_collectives(ops_of(collectives(0), collectives(1, ENDS[lost:]))))
    assert pairs == [{0: e} for e in ENDS[:lost]] + [{0: e, 1: e} for e in ENDS[lost:]]


@pytest.mark.parametrize("clock_us", [0, 7_000, -2_345])
def test_collectives_lost_at_the_end_are_found_by_the_distances_between_ends(clock_us: float):
    other = collectives(1, ENDS[1:-1], host_us=clock_us)
    pairs = matched(match_collectives(ops_of(collectives(0), other)), {1: clock_us})
    assert pairs == [{0: ENDS[0]}, *({0: e, 1: e} for e in ENDS[1:-1]), {0: ENDS[-1]}]


def test_two_ranks_that_each_lost_what_the_other_has():
    early, late = collectives(0, ENDS[:-1]), collectives(1, ENDS[1:], host_us=3_000)
    pairs = matched(match_collectives(ops_of(early, late)), {1: 3_000})
    assert pairs == [{0: ENDS[0]}, *({0: e, 1: e} for e in ENDS[1:-1]), {1: ENDS[-1]}]


def test_sequence_numbers_decide_where_the_trace_has_them():
    # By their ends the three would match in order; the numbers say that rank 1 lost the first.
    traces = [collectives(rank, (1000, 2000, 3000), group="0", seq=7 + rank) for rank in range(2)]
    pairs = matched(match_collectives(ops_of(*traces)))
    assert pairs == [{0: 1000}, {0: 2000, 1: 1000}, {0: 3000, 1: 2000}, {1: 3000}]


def test_groups_do_not_match_each_other():
    traces = [collectives(rank, group=group, seq=0) for rank, group in enumerate("aabb")]
    pairs = matched(match_collectives(ops_of(*traces)))
    assert sorted(tuple(pair) for pair in pairs) == [(0, 1)] * 6 + [(2, 3)] * 6


def test_types_do_not_match_each_other():
    one = collectives(0, ENDS[:3])
    other = collectives(1, ENDS[:3], kernel="ncclKernel_AllGather")
    assert all(len(pair) == 1 for pair in matched(match_collectives(ops_of(one, other))))


def test_what_a_device_runs_does_not_match_what_hosts_run():
    one, other = collectives(0, (1000, 2000)), collectives(1, (1000,))
    other.annotation("gloo:all_reduce", 1900, 2000, thread=9)
    pairs = matched(match_collectives(ops_of(one, other)))
    assert sorted(tuple(pair) for pair in pairs) == [(0,), (0, 1), (1,)]


def two_streams(rank: int, *, loses: bool = False) -> Trace:
    """Each step issues a collective that ends second and one that ends first; a rank may lose a launch in each."""
    trace = Trace(rank)
    for step in range(1, 5):
        s = 1000 * step
        trace.step(step, s, s + 1000)
        trace.launch("ncclKernel_AllReduce", (s + 100, s + 110), (s + 120, s + 900), stream=20)
        if loses and step == 2:
            trace.device("ncclKernel_AllReduce", s + 220, s + 300, stream=21)
        else:
            trace.launch("ncclKernel_AllReduce", (s + 200, s + 210), (s + 220, s + 300), stream=21)
    return trace


def test_a_lost_launch_leaves_the_order_of_the_others():
    pairs = matched(match_collectives(ops_of(two_streams(0), two_streams(1, loses=True))))
    assert len(pairs) == 8
    assert all(pair[0] == pair[1] for pair in pairs)


def in_steps(rank: int, steps: range, lost: int = 0) -> Trace:
    """Three collectives a step at regular distances, the last `lost` of which are not there."""
    trace = Trace(rank)
    ends = [(step, 1000 * step + 300 * n) for step in steps for n in (1, 2, 3)]
    for step in steps:
        trace.step(step, 1000 * step, 1000 * step + 1000)
    for _, end in ends[: len(ends) - lost]:
        trace.launch("ncclKernel_AllReduce", (end - 200, end - 190), (end - 150, end), stream=20)
    return trace


@pytest.mark.parametrize(
    ("own", "lost", "shared"),
    [
        pytest.param(range(1, 3), 0, 6, id="two steps"),
        pytest.param(range(1, 3), 2, 4, id="two steps, of the last of which one is left"),
        pytest.param(range(2, 4), 0, 3, id="a rank that begins and ends a step later"),
        pytest.param(range(3, 9), 0, 0, id="no step that both have"),
    ],
)
def test_collectives_match_in_the_same_step(own: range, lost: int, shared: int):
    ops = match_collectives(ops_of(in_steps(0, range(1, 3)), in_steps(1, own, lost)))
    pairs = [pair for pair in matched(ops) if len(pair) == 2]
    assert len(pairs) == shared
    assert all(pair[0] == pair[1] for pair in pairs)


def message(trace: Trace, kind: str, peer: int, seq: int, start: float, end: float) -> None:
    words = f"{kind} group=0 seq={seq} bytes=64 dtype=float32 peer={peer}"
    trace.annotation(f"comm::{words}", start, start + 1)
    trace.annotation(f"gloo:{kind}", start, end)


def test_a_send_matches_the_receive_of_its_peer_and_no_other():
    first, second, third = Trace(0), Trace(1), Trace(2)
    message(first, "send", 1, 0, 0, 20)
    message(second, "recv", 0, 0, 5, 22)
    message(second, "send", 2, 0, 30, 50)
    message(third, "recv", 1, 0, 10, 52)
    assert matched(match_collectives(ops_of(first, second, third))) == [{0: 20, 1: 22}, {1: 50, 2: 52}]


def nameless(rank: int, *kinds: str, group_size: int | None = None) -> Trace:
    """A rank whose kernels send and receive, 100 each, without a word about whom they speak to."""
    trace = Trace(rank)
    for n, kind in enumerate(kinds):
        args = {"Collective name": kind} | ({"Group size": group_size} if group_size else {})
        if kind:
            trace.device("ncclDevKernel_SendRecv", 100 * n, 100 * n + 90 + rank, stream=20, args=args)
    return trace


def test_nameless_messages_of_two_ranks_match_a_send_with_a_receive():
    ops = match_collectives(ops_of(nameless(0, "send", "recv", "send"), nameless(1, "recv", "send", "recv")))
    assert matched(ops) == [{0: 90, 1: 91}, {0: 190, 1: 191}, {0: 290, 1: 291}]
    kinds = ops.filter(pl.col("match").is_not_null()).group_by("match").agg(pl.col("collective").sort())
    assert kinds["collective"].to_list() == [["recv", "send"]] * 3


@pytest.mark.parametrize(
    "traces",
    [
        pytest.param([("send", ""), ("recv", "send"), ("", "recv")], id="three ranks in a row"),
        pytest.param([("send_recv",)] * 4, id="four ranks that exchange"),
    ],
)
def test_nameless_messages_of_more_ranks_match_nobody_and_are_reported(traces: list[tuple[str, ...]]):
    ops, report = align_clocks(ops_of(*(nameless(rank, *kinds) for rank, kinds in enumerate(traces))))
    assert matched(ops) == []
    unmatched = report.filter(pl.col("what") == "messages unmatched")
    assert unmatched["count"].sum() == ops.height


def test_two_ranks_of_a_larger_group_may_have_spoken_to_others():
    traces = [nameless(0, "send", group_size=4), nameless(1, "recv", group_size=4)]
    assert matched(match_collectives(ops_of(*traces))) == []


# --- rank against rank ------------------------------------------------------------------------------------------------


def test_a_ranks_clock_is_shifted_so_that_its_collectives_end_with_the_lowest_ranks():
    other = collectives(3, lasts=20, host_us=8_250.5)
    other.op("aten::mm", 0, 10)
    ops, report = align_ranks(match_collectives(ops_of(collectives(1), other)))
    assert matched(ops) == [{1: e, 3: e} for e in ENDS]
    assert starts(ops, 3)["aten::mm"] == 0
    assert report.select("what", "rank", "count", "time_ns").rows() == [("rank clock shifted", 3, 6, -8_250_500)]


def test_one_collective_that_ends_late_on_one_rank_does_not_move_its_clock():
    late = collectives(1, (*ENDS[:-1], ENDS[-1] + 500), host_us=4_000)
    ops, _ = align_ranks(match_collectives(ops_of(collectives(0), late)))
    assert matched(ops)[-1] == {0: 4000, 1: 4500}
    assert matched(ops)[:-1] == [{0: e, 1: e} for e in ENDS[:-1]]


def test_ranks_on_one_clock_stay_where_they_are():
    ops = match_collectives(ops_of(collectives(0), collectives(1)))
    aligned, report = align_ranks(ops)
    assert aligned["start_ns"].equals(ops["start_ns"])
    assert report["time_ns"].to_list() == [0]


def test_collectives_that_may_end_apart_do_not_count_where_symmetric_ones_exist():
    traces = [collectives(rank, (1000, 2000, 3000), host_us=600 * rank) for rank in range(2)]
    for rank, trace in enumerate(traces):
        for n in range(5):
            trace.device("ncclKernel_Broadcast", 4000 + 100 * n, 4050 + 100 * n + 40 * rank, stream=21)
    ops, report = align_ranks(match_collectives(ops_of(*traces)))
    assert report.select("count", "time_ns").rows() == [(3, -600_000)]
    assert matched(ops)[0] == {0: 1000, 1: 1000}


def test_a_rank_that_meets_the_lowest_only_through_others_is_aligned_through_them():
    traces = [Trace(rank, host_us=clock) for rank, clock in enumerate((0, 5_000, -3_000))]
    for rank, group in ((0, "01"), (1, "01"), (1, "12"), (2, "12")):
        args = {"Process Group Name": group, "Group size": 2, "Collective name": "allreduce"}
        for seq, end in enumerate(ENDS):
            late = 25 if group == "12" else 0
            traces[rank].device("ncclAllReduce", end + late - 9, end + late, 20, args=args | {"Seq": seq})
    ops, report = align_ranks(match_collectives(ops_of(*traces)))
    assert report.select("rank", "time_ns").rows() == [(1, -5_000_000), (2, 3_000_000)]
    assert matched(ops)[:2] == [{0: 1000, 1: 1000}, {1: 1025, 2: 1025}]


def test_messages_that_arrive_late_in_both_directions_give_the_offset_between():
    one, other = Trace(0), Trace(1, host_us=1_000)
    for seq in range(3):
        at = 100 * seq
        message(one, "send", 1, seq, at, at + 20)
        message(other, "recv", 0, seq, at, at + 26)
        message(other, "send", 0, seq, at + 50, at + 70)
        message(one, "recv", 1, seq, at + 50, at + 76)
    ops, report = align_ranks(match_collectives(ops_of(one, other)))
    assert report["time_ns"].to_list() == [-1_000_000]
    assert matched(ops)[:2] == [{0: 20, 1: 26}, {0: 76, 1: 70}]


def exchange(sent: tuple[float, float, float], received: tuple[float, float, float]) -> pl.DataFrame:
    """Ops of one message: when each side calls, when its record begins, when that ends."""
    sides = Trace(0), Trace(1)
    for trace, kind, (call, begin, end) in zip(sides, ("send", "recv"), (sent, received), strict=True):
        trace.annotation(f"comm::{kind} group=0 seq=0 bytes=4096 dtype=float32 peer={1 - trace.rank}", call, call + 9)
        trace.annotation(f"gloo:{kind}", begin, end)
    return match_collectives(ops_of(*sides))


def spans(ops: pl.DataFrame) -> list[tuple[float, float]]:
    begin, end = ((ns - ZERO_NS) / 1000 for ns in (pl.col("start_ns"), pl.col("start_ns") + pl.col("dur_ns")))
    return ops.filter(pl.col("kind") == "comm").sort("rank").select(begin, end=end).rows()


@pytest.mark.parametrize(
    ("sent", "received", "sent_us", "received_us", "told"),
    [
        # The peer ends while this side's process is off its core, before it opens the record.
        pytest.param((10, 18, 20), (0, 1, 14), (14, 20), (1, 14), [(0, 4000)], id="send"),
        pytest.param((0, 1, 14), (10, 18, 20), (1, 14), (14, 20), [(1, 4000)], id="receive"),
        pytest.param((10, 12, 20), (0, 1, 14), (12, 20), (1, 14), [], id="nothing contradicts"),
        pytest.param((16, 18, 20), (0, 1, 14), (18, 20), (1, 14), [], id="clocks do: it was not called yet"),
    ],
)
def test_a_message_of_the_host_begins_at_its_peers_end_where_its_record_begins_later(
    sent, received, sent_us, received_us, told
):
    ops = exchange(sent, received)
    early = early_messages(ops)
    assert spans(begun_early(ops, early)) == [sent_us, received_us]
    assert about_messages(early).select("rank", "time_ns").rows() == told


def test_messages_of_a_device_begin_when_they_are_recorded_to():
    traces = Trace(0), Trace(1)
    for trace, kind, (begin, end) in zip(traces, ("send", "recv"), ((18, 20), (5, 14)), strict=True):
        args = {"Collective name": kind, "Process Group Name": "0", "Group size": 2}
        trace.launch("ncclDevKernel_SendRecv", (0, 2), (begin, end), stream=20, args=args)
    ops = match_collectives(ops_of(*traces))
    assert ops.filter(pl.col("kind") == "comm")["match"].n_unique() == 1
    assert early_messages(ops).is_empty()


def test_clocks_stay_where_shifts_would_end_collectives_before_they_are_issued():
    """A rank whose records end late, as where its process waits for a core, is no rank whose clock is late."""
    sides = Trace(0), Trace(1)
    for seq in range(9):
        at, late = 1000 * seq, 300 if seq % 3 else 0
        for trace in sides:
            trace.annotation(f"comm::all_reduce group=0 seq={seq} bytes=64 dtype=float32", at + 5, at + 6)
            trace.annotation("gloo:all_reduce", at + 7, at + 60 + (late if trace.rank else 0))
    ops, report = align_ranks(match_collectives(ops_of(*sides)))
    (told,) = report.rows(named=True)
    assert told["what"] == "rank clocks kept"
    assert "3 of 9 end before their last rank had issued them" in told["detail"]
    assert ops["start_ns"].equals(ops_of(*sides)["start_ns"])


def test_the_device_is_shifted_before_the_rank_and_both_are_reported():
    traces = [collectives(0), collectives(1, host_us=2_000)]
    for trace in traces:
        trace.op("aten::mm", 0, 50)
    traces[1].launch("early", (10, 20), (4, 9))
    ops, report = align_clocks(ops_of(*traces))
    # 7 for the device clock of rank 1, so that its collectives end 7 later than before, and 2007 back for its rank.
    assert report.select("what", "rank", "time_ns").rows()[:2] == [
        ("device clock shifted", 1, 7_000),
        ("rank clock shifted", 1, -2_007_000),
    ]
    assert starts(ops, 1)["early"] == 4
    assert starts(ops, 1)["aten::mm"] == 20 - 7


def drifting(rank: int, steps: int, gain: float, jitter_us: float = 0) -> Trace:
    """Three collectives a step of 100 ms, which end together, on a clock that gains `gain` of the time that passes."""
    trace = Trace(rank)

    def shown(at: float) -> float:
        return 7_000 * rank + at * (1 + gain)

    for step in range(1, steps + 1):
        begin = 100_000 * (step - 1)
        trace.step(step, shown(begin), shown(begin + 100_000))
        for n in range(3):
            end = begin + 20_000 * n + 15_000
            late = jitter_us * (1 if (step + n) % 2 else -1)
            call = (shown(end - 9_000), shown(end - 8_990))
            trace.launch("ncclKernel_AllReduce", call, (shown(end - 5_000) + late, shown(end) + late), stream=20)
    return trace


def apart_us(ops: pl.DataFrame) -> float:
    """The most that the ends of one collective are apart."""
    ends = ops.filter(pl.col("match").is_not_null()).with_columns(end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    return float(ends.group_by("match").agg(pl.col("end_ns").max() - pl.col("end_ns").min())["end_ns"].max()) / 1000


def test_a_clock_that_drifts_is_corrected_along_a_line():
    ops, report = align_clocks(ops_of(drifting(0, 4, 0), drifting(1, 4, 50e-6)))
    assert apart_us(ops) < 0.1
    assert report.filter(pl.col("rank") == 1)["detail"].item().endswith("its clock gains 49998 ns a second")
    on_lane = ops.filter((pl.col("rank") == 1) & pl.col("device").is_null()).sort("start_ns")
    ends = on_lane.select(pl.col("start_ns") + pl.col("dur_ns")).to_series()
    assert ends[:-1].equals(on_lane["start_ns"][1:].alias("start_ns"), check_names=False)


@pytest.mark.parametrize(
    ("steps", "gain", "jitter_us"),
    [
        pytest.param(2, 50e-6, 0, id="two steps are a line through any clock"),
        pytest.param(4, 0, 0, id="a clock that keeps time"),
        pytest.param(4, 10e-6, 20, id="less than the ends of collectives differ anyway"),
    ],
)
def test_no_drift_is_claimed_without_clear_evidence(steps: int, gain: float, jitter_us: float):
    ops, report = align_clocks(ops_of(drifting(0, steps, 0), drifting(1, steps, gain, jitter_us)))
    assert "gains" not in report.filter(pl.col("what") == "rank clock shifted")["detail"].item()
    raw = ops_of(drifting(0, steps, 0), drifting(1, steps, gain, jitter_us))
    assert ops["dur_ns"].equals(raw["dur_ns"])
