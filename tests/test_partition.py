"""Breakdowns against a loop over every single nanosecond, and the cases that each part is named after."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.critical_path import replay
from lumos_nb.errors import GraphError, LumosError, SchemaError
from lumos_nb.graph import Graph
from lumos_nb.partition import LEVELS, PARTS, _intervals, _numbered, activity, breakdown, compare
from lumos_nb.schema import EDGES, OPS

CPU, MAIN, COMMS = "cpu:1", "gpu0:7", "gpu0:20"


@dataclass(frozen=True)
class Workload:
    ops: pl.DataFrame


def op(kind: str, start: int, dur: int, lane: str = MAIN, **more: object) -> dict[str, object]:
    """One row of rank 0 in step 1; the device follows from the lane."""
    device = int(lane[3 : lane.index(":")]) if lane.startswith("gpu") else None
    row = {"rank": 0, "step": 1, "lane": lane, "device": device, "kind": kind, "name": kind}
    return row | {"start_ns": start, "dur_ns": dur} | more


def end_of_step_before(at: int, lane: str = MAIN, **more: object) -> dict[str, object]:
    return op("boundary", at, 0, lane, step=0, **more)


def workload(*rows: dict[str, object]) -> Workload:
    """Rows in issue order; op ids are far from positions, so that mixing them up shows."""
    numbered = [{"op_id": 1000 - i} | row for i, row in enumerate(rows)]
    return Workload(pl.DataFrame(numbered, schema=dict(OPS.columns)))


def parts_of(source: Workload, rank: int = 0) -> dict[str, int]:
    """The parts of a rank that take any time."""
    rows = breakdown(source).filter((pl.col("rank") == rank) & (pl.col("time_ns") > 0))
    return dict(rows.select("part", "time_ns").iter_rows())


def attribute(source: Workload) -> pl.DataFrame:
    """Time of each op in each part, and of none where nothing runs."""
    return breakdown(source, by="op_id").select("rank", "part", "op_id", "time_ns")


def step_intervals(source: Workload) -> pl.DataFrame:
    """When the step begins and ends on each rank."""
    return _intervals(_numbered(source.ops))


ARRIVED = op("event", 2, 0, COMMS, collective="all_reduce")


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        pytest.param([op("kernel", 0, 10)], {"compute": 10}, id="a kernel is compute"),
        pytest.param([op("comm", 0, 10, COMMS)], {"exposed_transfer": 10}, id="a transfer alone is exposed"),
        pytest.param(
            [op("kernel", 0, 6), op("comm", 4, 6, COMMS)],
            {"compute": 4, "overlapped": 2, "exposed_transfer": 4},
            id="a transfer under a kernel is overlapped",
        ),
        pytest.param(
            [op("kernel", 0, 4), ARRIVED, op("comm", 7, 3, COMMS)],
            {"compute": 4, "exposed_wait": 3, "exposed_transfer": 3},
            id="waiting for peers is exposed once the kernel ends",
        ),
        pytest.param(
            [op("kernel", 0, 2), op("event", 2, 0, COMMS), op("comm", 7, 3, COMMS)],
            {"compute": 2, "other": 5, "exposed_transfer": 3},
            id="an event that is no arrival begins no wait",
        ),
        pytest.param(
            [
                op("event", 0, 0, COMMS, collective="a", comm_seq=1),
                op("event", 3, 0, COMMS, collective="a", comm_seq=2),
                op("comm", 5, 2, COMMS, comm_seq=1),
                op("comm", 9, 1, COMMS, comm_seq=2),
            ],
            {"exposed_wait": 7, "exposed_transfer": 3},
            id="collectives in flight together wait by their own numbers",
        ),
        pytest.param(
            [op("memcpy", 0, 4), op("memset", 3, 4, COMMS), op("kernel", 6, 4)],
            {"copies": 6, "compute": 4},
            id="copies count where no kernel runs",
        ),
        pytest.param(
            [op("kernel", 0, 2), op("cpu", 1, 4, CPU), op("launch", 5, 1, CPU), op("kernel", 8, 2)],
            {"compute": 4, "host_bound": 4, "other": 2},
            id="an idle device waits for the host while the host works",
        ),
        pytest.param(
            [op("cpu", 0, 9, CPU), op("unexplained", 0, 5), op("kernel", 5, 5)],
            {"unexplained": 5, "compute": 5},
            id="a delay of a launched kernel is not the host's",
        ),
        pytest.param(
            [op("unexplained", 0, 5, CPU), op("cpu", 1, 2, "cpu:2"), op("kernel", 5, 5)],
            {"unexplained": 3, "host_bound": 2, "compute": 5},
            id="a delay of one thread gives way to another thread's work",
        ),
        pytest.param(
            [op("cpu", 0, 4, CPU), op("gap", 4, 2, CPU), op("comm", 6, 4, CPU)],
            {"compute": 4, "host_bound": 2, "exposed_transfer": 4},
            id="without a device operators compute and the rest of the host holds them up",
        ),
        pytest.param(
            [op("kernel", 0, 3), op("join", 0, 9, "net", rank=None), op("kernel", 8, 2)],
            {"compute": 5, "other": 5},
            id="a join is nobody's work",
        ),
    ],
)
def test_parts(rows, parts):
    lane = MAIN if any(row["device"] is not None for row in rows) else CPU
    assert parts_of(workload(end_of_step_before(0, lane), *rows)) == parts


def test_ops_are_cut_to_the_step():
    source = workload(
        op("cpu", -50, 40, CPU),
        op("memcpy", -30, 20, step=0),
        op("kernel", -20, 25, COMMS),  # begins before the step before has ended
        op("cpu", 3, 90, CPU),  # the host runs on, after the device has ended
        op("kernel", 8, 2),
    )
    assert step_intervals(source).rows() == [(0, True, -10, 10)]
    assert parts_of(source) == {"compute": 17, "host_bound": 3}


def test_a_generated_step_begins_where_its_table_begins():
    source = workload(op("kernel", 5, 5), op("kernel", 9, 4, "gpu0:7", rank=1))
    assert step_intervals(source).rows() == [(0, True, 5, 10), (1, True, 5, 13)]
    assert parts_of(source, rank=1) == {"other": 4, "compute": 4}


def test_the_last_of_repeated_steps_is_broken_down():
    steps = [op("kernel", 10 * k, 4 + k, step=k) for k in range(4)]
    assert step_intervals(workload(*steps)).select("begin_ns", "end_ns").row(0) == (26, 37)
    assert parts_of(workload(*steps)) == {"other": 4, "compute": 7}


def test_a_rank_whose_step_takes_no_time_is_there_without_shares():
    source = workload(op("kernel", 0, 3, step=0, rank=1), op("event", 3, 0, rank=1), op("kernel", 3, 4))
    rows = breakdown(source).filter(pl.col("rank") == 1)
    assert rows["part"].to_list() == list(PARTS)
    assert rows["time_ns"].sum() == 0
    assert rows["share"].null_count() == len(PARTS)


def test_an_instant_of_two_kernels_belongs_to_the_one_that_began_first():
    source = workload(end_of_step_before(0), op("kernel", 1, 9), op("kernel", 0, 4, COMMS), op("comm", 3, 2, "gpu0:9"))
    expected = [("compute", 998, 3), ("overlapped", 998, 1), ("overlapped", 999, 1), ("compute", 999, 5)]
    assert sorted(attribute(source).select("part", "op_id", "time_ns").rows()) == sorted(
        [*expected, ("other", None, 0)]
    )


def test_a_wait_belongs_to_the_collective_that_waits():
    source = workload(
        end_of_step_before(2), ARRIVED, op("comm", 7, 3, COMMS, name="all_reduce", collective="all_reduce")
    )
    waits = breakdown(source, by="collective").filter(pl.col("part") == "exposed_wait")
    assert waits.rows() == [(0, "exposed_wait", "all_reduce", 5, 5 / 8)]


def test_parts_divide_further_by_a_column():
    source = workload(
        end_of_step_before(0),
        op("kernel", 0, 4, phase="forward"),
        op("kernel", 4, 4, phase="backward"),
        op("comm", 6, 4, COMMS, phase="backward"),
    )
    rows = breakdown(source, by="phase")
    assert rows.select("part", "phase", "time_ns").filter(pl.col("time_ns") > 0).rows() == [
        ("compute", "backward", 2),
        ("compute", "forward", 4),
        ("overlapped", "backward", 2),
        ("exposed_transfer", "backward", 2),
    ]


def test_comparison_names_what_changed():
    before = workload(
        end_of_step_before(0), op("kernel", 0, 10, name="gemm", layer="0"), op("kernel", 10, 5, name="relu")
    )
    after = workload(
        end_of_step_before(0), op("kernel", 0, 14, name="gemm", layer="0"), op("kernel", 16, 4, name="gelu")
    )
    rows = compare(before, after)
    assert rows.filter(pl.col("level") == "op").drop("level", "mean_diff_ns").rows() == [
        ("relu", 5, 0, -5),
        ("gemm", 10, 14, 4),
        ("gelu", 0, 4, 4),
        ("(nothing runs)", 0, 2, 2),
    ]
    layers = rows.filter(pl.col("level") == "layer").select("key", "diff_ns")
    assert dict(layers.iter_rows()) == {"0": 4, "(no layer)": -1, "(nothing runs)": 2}


def test_comparison_of_different_numbers_of_ranks_is_by_mean_step():
    one = workload(end_of_step_before(0), op("kernel", 0, 10))
    two = workload(
        *[row for rank in (0, 1) for row in (end_of_step_before(0, rank=rank), op("kernel", 0, 8, rank=rank))]
    )
    step = compare(one, two).filter(pl.col("level") == "step")
    assert step.rows() == [("step", "all ranks, summed", 10, 16, 6, -2.0)]


def late_to_a_collective(dur: int) -> Graph:
    """Two ranks that meet in a collective, to which rank 1 comes after a kernel of `dur`."""
    rows = [end_of_step_before(0, rank=rank) | {"op_id": 10 * rank} for rank in (0, 1)]
    for rank, kernel in ((0, 5), (1, dur)):
        rows += [
            op("kernel", 0, kernel, rank=rank, op_id=10 * rank + 1),
            op("event", kernel, 0, COMMS, rank=rank, op_id=10 * rank + 2, collective="all_reduce"),
        ]
    rows.append(op("join", dur, 0, "net", rank=None, op_id=99))
    rows += [op("comm", dur, 7, COMMS, rank=rank, op_id=10 * rank + 3, collective="all_reduce") for rank in (0, 1)]
    pairs = [(rank * 10 + a, rank * 10 + b) for rank in (0, 1) for a, b in ((0, 1), (1, 2))]
    pairs += [(2, 99), (12, 99), (99, 3), (99, 13)]
    edges = [(src, dst, 0, False, "collective", "exact", True) for src, dst in pairs]
    return Graph(workload(*rows).ops, pl.DataFrame(edges, schema=dict(EDGES.columns), orient="row"), step=1)


def test_a_delay_shows_as_the_peers_waiting_measured_and_replayed_alike():
    measured, result = late_to_a_collective(9), replay(late_to_a_collective(20))
    assert parts_of(measured) == {"compute": 5, "exposed_wait": 4, "exposed_transfer": 7}
    assert parts_of(result) == {"compute": 5, "exposed_wait": 15, "exposed_transfer": 7}
    parts = compare(measured, result).filter(pl.col("level") == "part").select("key", "diff_ns", "mean_diff_ns")
    assert parts.rows() == [("compute", 11, 5.5), ("exposed_wait", 11, 5.5), ("exposed_transfer", 0, 0.0)]


def test_activity_counts_each_device_and_idle_bins():
    source = workload(
        end_of_step_before(100),
        op("kernel", 100, 5),
        op("kernel", 103, 4, COMMS),
        op("kernel", 125, 5, "gpu1:7"),
    )
    series = activity(source, bin_ns=10).filter(pl.col("kind") == "compute")
    assert series.select("device", "t_ns", "busy_ns", "share").rows() == [
        (0, 100, 7, 0.7),
        (0, 110, 0, 0.0),
        (0, 120, 0, 0.0),
        (1, 100, 0, 0.0),
        (1, 110, 0, 0.0),
        (1, 120, 5, 0.5),
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        pytest.param([], "no op of any step", id="an empty table"),
        pytest.param([op("kernel", 0, -1)], r"Op 1000 \(kernel\) .* dur_ns -1", id="a negative duration"),
        pytest.param([op("kernel", None, 1)], "start_ns None", id="an op without a time"),
        pytest.param(
            [op("kernel", 0, 1, rank=3, step=0), op("kernel", 0, 1)],
            "rank 3 has no op of step 1",
            id="a rank without the step",
        ),
        pytest.param(
            [op("kernel", 0, 9, step=0), op("kernel", 0, 1)], "ends at 1 ns", id="a step that ends before it begins"
        ),
    ],
)
def test_tables_that_have_no_step_are_refused(rows, message):
    with pytest.raises(GraphError, match=message):
        breakdown(workload(*rows))


def test_wrong_arguments_are_refused():
    source = workload(end_of_step_before(0), op("kernel", 0, 1))
    with pytest.raises(SchemaError, match="lacks the column 'colour'"):
        breakdown(source, by="colour")
    with pytest.raises(LumosError, match="bin_ns is 0"):
        activity(source, bin_ns=0)
    with pytest.raises(SchemaError, match="lacks column"):
        breakdown(Workload(source.ops.drop("lane")))


# --- against a loop over nanoseconds --------------------------------------------------------------------------------

STRENGTH = [
    ("compute", "kernel"),
    ("exposed_transfer", "comm"),
    ("exposed_wait", "waiting"),
    ("copies", "memcpy memset"),
    ("unexplained", "device delay"),
    ("host_bound", "cpu gap launch wait alloc boundary"),
    ("unexplained", "host delay"),
]

HOST_KINDS = ["cpu", "gap", "launch", "wait", "alloc"]
CPU_KINDS = [*HOST_KINDS, "comm", "event", "unexplained"]
ALL_KINDS = [*CPU_KINDS, "kernel", "memcpy", "memset"]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Workload, dict[int, list[tuple[str, int, int, int]]]]:
    """An op table of three ranks, the last without device, and what runs when: by rank (kind, start, end, op id)."""
    rows, running = [], {}
    for rank in range(3):
        device_lanes = ["gpu0:7", "gpu0:20", "gpu1:7"] if rank < 2 else ["cpu:3"]
        rows.append(op("boundary", draw(st.integers(0, 6)), 0, device_lanes[0], step=0, rank=rank))
        running[rank] = []
        for _ in range(draw(st.integers(0, 7))):
            kind, start, dur = (
                draw(st.sampled_from(ALL_KINDS if rank < 2 else CPU_KINDS)),
                draw(st.integers(-5, 30)),
                draw(st.integers(0, 9)),
            )
            lanes = ["cpu:1", "cpu:2"] if kind in HOST_KINDS else [*device_lanes, *["cpu:1"] * (kind == "unexplained")]
            lane = draw(st.sampled_from(lanes))
            if kind == "comm" and draw(st.booleans()):
                arrival = start - draw(st.integers(0, 8))
                running[rank].append(("waiting", arrival, start, 1000 - len(rows) - 1, lane))
                rows.append(op("event", arrival, 0, lane, rank=rank, collective="all_reduce"))
            meant = {"unexplained": "host delay" if lane.startswith("cpu") else "device delay"}.get(kind, kind)
            running[rank].append((meant, start, start + dur, 1000 - len(rows), lane))
            rows.append(op(kind, start, dur, lane, rank=rank, layer=draw(st.sampled_from([None, "0", "1"]))))
        rows.append(op("memset", 35 + rank, 0, device_lanes[-1], rank=rank))  # the step ends here
    return workload(*rows), running


def plain_attribution(source: Workload, running: dict) -> Counter:
    """Time by (rank, part, op id), one nanosecond at a time."""
    times = Counter()
    for rank, pieces in running.items():
        rows = source.ops.filter((pl.col("rank") == rank) & (pl.col("device").is_not_null() | (rank == 2)))
        ends = {
            step: max(r["start_ns"] + r["dur_ns"] for r in rows.iter_rows(named=True) if r["step"] == step)
            for step in (0, 1)
        }
        for t in range(ends[0], ends[1]):
            times[rank, *holder(t, pieces, compute="cpu" if rank == 2 else "kernel")] += 1
    return times


def holder(t: int, pieces: list, compute: str) -> tuple[str, int | None]:
    active = [(kind, start, -op_id) for kind, start, end, op_id, _ in pieces if start <= t < end]
    for part, kinds_of_part in STRENGTH:
        wanted = compute if part == "compute" else kinds_of_part.replace(f"{compute} ", "")
        mine = [(start, row) for kind, start, row in active if kind in wanted.split() or kind == wanted]
        if mine:
            overlapped = part == "compute" and any(kind == "comm" for kind, *_ in active)
            # Ids fall with the position, so that the smallest -id of an equal start is the first row.
            return ("overlapped" if overlapped else part, -min((s, r) for s, r in mine)[1])
    return ("other", None)


@settings(deadline=None, max_examples=60)
@given(tables())
def test_attribution_is_that_of_a_loop_over_nanoseconds(drawn):
    source, running = drawn
    found = attribute(source)
    assert {(r, p, o): t for r, p, o, t in found.iter_rows() if t} == dict(plain_attribution(source, running))


@settings(deadline=None, max_examples=60)
@given(tables())
def test_breakdowns_sum_to_the_step_of_each_rank(drawn):
    source, _ = drawn
    steps = {rank: end - begin for rank, _, begin, end in step_intervals(source).iter_rows()}
    for by in ("rank", "layer", "name"):
        sums = breakdown(source, by=by).group_by("rank").agg(pl.sum("time_ns", "share"))
        assert {rank: time for rank, time, _ in sums.iter_rows()} == steps
        assert sums["share"].to_list() == pytest.approx([1.0] * 3)


@settings(deadline=None, max_examples=60)
@given(tables(), tables())
def test_every_level_of_a_comparison_adds_up(one, other):
    rows = compare(one[0], other[0])
    totals = [
        int(step_intervals(w).select((pl.col("end_ns") - pl.col("begin_ns")).sum()).item()) for w in (one[0], other[0])
    ]
    sums = rows.group_by("level").agg(pl.sum("a_ns", "b_ns", "diff_ns", "mean_diff_ns"))
    assert set(sums["level"]) == {"step", "rank", "part", *LEVELS}
    for _, a_ns, b_ns, diff_ns, mean_diff_ns in sums.iter_rows():
        assert [a_ns, b_ns, diff_ns] == [*totals, totals[1] - totals[0]]
        assert mean_diff_ns == pytest.approx((totals[1] - totals[0]) / 3)


@settings(deadline=None, max_examples=60)
@given(tables(), st.integers(1, 50))
def test_activity_is_that_of_a_loop_over_nanoseconds(drawn, bin_ns):
    source, running = drawn
    meanings = {"comm": {"comm"}, "wait": {"waiting"}, "copy": {"memcpy", "memset"}}
    series = activity(source, bin_ns=bin_ns)
    for rank, _, begin, end in step_intervals(source).iter_rows():
        meant = meanings | {"compute": {"cpu"} if rank == 2 else {"kernel"}}
        meant |= {"any": set().union(*meant.values())}
        for device in [None] if rank == 2 else [0, 1]:
            for kind, wanted in meant.items():
                busy = {
                    t
                    for k, start, stop, _, lane in running[rank]
                    if k in wanted and (device is None or lane.startswith(f"gpu{device}"))
                    for t in range(max(start, begin), min(stop, end))
                }
                rows = series.filter(
                    (pl.col("rank") == rank) & pl.col("device").eq_missing(device) & (pl.col("kind") == kind)
                )
                bins = range(begin, end, bin_ns)
                assert rows["t_ns"].to_list() == list(bins)
                assert rows["busy_ns"].to_list() == [sum(b <= t < b + bin_ns for t in busy) for b in bins]
