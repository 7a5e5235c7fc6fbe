"""The file that Perfetto opens: valid, exact to the ns, and nothing in it that a viewer would drop."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lumos_nb.critical_path import replay
from lumos_nb.errors import SchemaError, TraceError
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, EVENTS, OPS
from lumos_nb.traces.kineto import read_kineto
from lumos_nb.traces.perfetto import write_perfetto

BASE_NS = 1_712_195_495_519_689_123


@dataclass(frozen=True)
class Workload:
    ops: pl.DataFrame


@dataclass(frozen=True)
class Recorded:
    events: pl.DataFrame


def op(op_id: int, kind: str, start: int, dur: int, lane: str = "gpu0:7", **more: object) -> dict[str, object]:
    device = int(lane[3 : lane.index(":")]) if lane.startswith("gpu") else None
    row = {
        "op_id": op_id,
        "rank": 0,
        "step": 1,
        "lane": lane,
        "device": device,
        "kind": kind,
        "name": f"{kind} {op_id}",
    }
    return row | {"start_ns": BASE_NS + start, "dur_ns": dur} | more


def table(*rows: dict[str, object]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=dict(OPS.columns))


def two_ranks() -> Graph:
    """Rank 1 is late to a collective for which rank 0 waits."""
    ops = table(
        op(10, "launch", 0, 5_001, "cpu:77", phase="forward", layer="h.0"),
        op(11, "kernel", 4_000, 20_003, shapes='[[2, "a"]]', dtype="bf16", flops=1e9),
        op(12, "event", 24_003, 0, "gpu0:20", collective="all_reduce"),
        op(13, "launch", 0, 9_000, "cpu:9", rank=1, name='say "hi" \\ µ\n'),
        op(14, "kernel", 9_000, 31_007, rank=1),
        op(15, "event", 40_007, 0, "gpu0:20", rank=1, collective="all_reduce"),
        op(16, "join", 40_007, 0, "net", rank=None),
        op(17, "comm", 40_007, 1_009, "gpu0:20", collective="all_reduce"),
        op(18, "comm", 40_007, 1_010, "gpu0:20", rank=1, collective="all_reduce"),
    )
    edges = [
        (10, 11, 0, True, "launch"), (11, 12, 0, False, "event"), (12, 16, 0, False, "join"),
        (13, 14, 0, False, "launch"), (14, 15, 0, False, "event"), (15, 16, 0, False, "join"),
        (16, 17, 0, False, "transfer"), (16, 18, 0, False, "transfer"),
    ]  # fmt: skip
    rows = [(*edge, "exact", True) for edge in edges]
    return Graph(ops, pl.DataFrame(rows, schema=dict(EDGES.columns), orient="row"), step=1)


def written(path) -> dict[str, Any]:
    """The file's JSON, numbers as Decimal, checked against what a viewer needs."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(text, parse_float=Decimal, parse_constant=refuse)
    check_for_viewers(trace["traceEvents"])
    return trace


def check_for_viewers(records: list[dict[str, Any]]) -> None:
    """What Perfetto's importer of this format asks for; without it records are dropped in silence."""
    threads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    names, flows = set(), defaultdict(list)
    for record in records:
        assert isinstance(record["name"], str)
        assert record["pid"] >= 1
        if record["ph"] == "M":
            names.add((record["name"], record["pid"], record.get("tid")))
            continue
        assert record["tid"] >= 1
        assert record["cat"]
        for key in ("ts", "dur"):
            if key in record:  # the ns that a reader of decimals and one that cuts floats off find
                assert ns(record[key]) == int(float(record[key]) * 1000) >= 0
        if record["ph"] == "X":
            assert ("process_name", record["pid"], None) in names
            assert ("thread_name", record["pid"], record["tid"]) in names
            assert ("thread_sort_index", record["pid"], record["tid"]) in names
            threads[record["tid"]].append((ns(record["ts"]), ns(record["ts"]) + ns(record["dur"])))
        else:
            flows[record["id"]].append(record)
    assert len({tid for name, _, tid in names if name == "thread_name"}) == sum(n == "thread_name" for n, *_ in names)
    for slices in threads.values():
        check_nesting(slices)
    for start, finish in flows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert [start[k] for k in ("name", "cat")] == [finish[k] for k in ("name", "cat")]
        assert ns(start["ts"]) <= ns(finish["ts"])
        for end in (start, finish):
            assert any(begin <= ns(end["ts"]) < stop for begin, stop in threads[end["tid"]])


def check_nesting(slices: list[tuple[int, int]]) -> None:
    """In the file's order, slices of a thread begin one after the other and lie within or after those before."""
    stack: list[int] = []
    for n, (begin, end) in enumerate(slices):
        assert n == 0 or slices[n - 1][0] <= begin
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1]
        stack.append(end)


def ns(microseconds: Decimal | int) -> int:
    return int((Decimal(microseconds) * 1000).to_integral_value())


def named(trace: dict[str, Any], key: str) -> dict[int, str]:
    """Process names by pid or thread names by tid, in the order of the file."""
    by = "pid" if key == "process_name" else "tid"
    return {r[by]: r["args"]["name"] for r in trace["traceEvents"] if r["name"] == key}


def slices_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [record for record in trace["traceEvents"] if record["ph"] == "X"]


def test_a_result_is_drawn_measured_and_replayed_on_one_clock(tmp_path):
    graph = two_ranks()
    trace = written(write_perfetto(replay(graph), tmp_path / "step.json"))
    processes = named(trace, "process_name")
    assert list(processes.values()) == [
        "rank 0 measured", "rank 0 replayed", "rank 1 measured", "rank 1 replayed",
        "all ranks measured", "all ranks replayed",
    ]  # fmt: skip
    assert trace["baseTimeNanoseconds"] == BASE_NS
    starts = {(processes[r["pid"]], r["args"]["op_id"]): ns(r["ts"]) for r in slices_of(trace)}
    assert starts["rank 0 measured", 11] == 4_000
    assert starts["rank 0 replayed", 11] == 0  # launched from the start of its launch, as the edge says
    assert len(starts) == 2 * len(graph.ops)


def test_the_critical_path_is_arrows_over_what_takes_time(tmp_path):
    trace = written(write_perfetto(replay(two_ranks()), tmp_path / "step.json"))
    processes = named(trace, "process_name")
    arrows = [r for r in trace["traceEvents"] if r["ph"] in "sf"]
    assert [(r["name"], ns(r["ts"]), processes[r["pid"]]) for r in arrows] == [
        ("launch", 8_999, "rank 1 replayed"),
        ("launch", 9_000, "rank 1 replayed"),
        ("transfer", 40_006, "rank 1 replayed"),
        ("transfer", 40_007, "rank 1 replayed"),
    ]
    critical = {r["args"]["op_id"] for r in slices_of(trace) if r["args"].get("critical")}
    assert critical == {13, 14, 15, 16, 18}


def test_an_arrow_leaves_a_launch_at_its_start(tmp_path):
    graph = two_ranks()
    alone = Graph(graph.ops[:2], graph.edges[:1], step=1)
    trace = written(write_perfetto(replay(alone), tmp_path / "step.json"))
    assert [(r["ph"], ns(r["ts"])) for r in trace["traceEvents"] if r["ph"] in "sf"] == [("s", 0), ("f", 0)]


def test_slices_carry_kind_and_columns_without_nulls(tmp_path):
    trace = written(write_perfetto(two_ranks(), tmp_path / "step.json"))
    kernel = next(r for r in slices_of(trace) if r["args"]["op_id"] == 11)
    assert (kernel["cat"], kernel["name"], ns(kernel["dur"])) == ("kernel", "kernel 11", 20_003)
    assert kernel["args"] == {
        "op_id": 11, "step": 1, "device": 0, "stream": 7, "kind": "kernel",
        "shapes": '[[2, "a"]]', "dtype": "bf16", "flops": Decimal("1e9"),
    }  # fmt: skip
    assert next(r["name"] for r in slices_of(trace) if r["args"]["op_id"] == 13) == 'say "hi" \\ µ\n'


def test_waiting_for_peers_is_a_slice_up_to_the_transfer(tmp_path):
    trace = written(write_perfetto(two_ranks(), tmp_path / "step.json"))
    waits = [r for r in slices_of(trace) if r["cat"] == "waiting"]
    assert [(r["name"], ns(r["ts"]), ns(r["dur"])) for r in waits] == [
        ("wait for peers: all_reduce", 24_003, 16_004),
        ("wait for peers: all_reduce", 40_007, 0),
    ]


def test_threads_come_before_streams_and_each_in_the_order_of_numbers(tmp_path):
    lanes = ["gpu1:7", "gpu0:20", "net", "cpu:100", "gpu0:7", "cpu:9"]
    source = Workload(table(*[op(n, "kernel", n, 1, lane) for n, lane in enumerate(lanes)]))
    trace = written(write_perfetto(source, tmp_path / "step.json"))
    threads = named(trace, "thread_name")
    assert [threads[tid] for tid in sorted(threads)] == ["cpu:9", "cpu:100", "gpu0:7", "gpu0:20", "gpu1:7", "net"]
    assert list(named(trace, "process_name").values()) == ["rank 0"]


def test_rows_that_overlap_go_to_a_thread_beside(tmp_path):
    rows = [
        op(0, "kernel", 0, 10),
        op(1, "kernel", 5, 10),
        op(2, "kernel", 6, 2),
        op(3, "kernel", 15, 5),
        op(4, "kernel", 20, 1),
    ]
    trace = written(write_perfetto(Workload(table(*rows)), tmp_path / "step.json"))
    threads = named(trace, "thread_name")
    found = {r["args"]["op_id"]: threads[r["tid"]] for r in slices_of(trace)}
    assert found == {0: "gpu0:7", 1: "gpu0:7 (2)", 2: "gpu0:7", 3: "gpu0:7", 4: "gpu0:7"}


def test_a_zipped_file_holds_the_same(tmp_path):
    result = replay(two_ranks())
    plain, zipped = (written(write_perfetto(result, tmp_path / name)) for name in ("step.json", "step.json.gz"))
    assert plain == zipped


def test_the_profilers_own_events_stand_beside(tmp_path):
    events = [
        (0, 0, "cpu_op", "aten::mm", 77, None, None, BASE_NS - 50, 5_000, None, None, None, '{"Sequence number":3}'),
        (0, 1, "kernel", "gemm", None, 0, 7, BASE_NS + 4_000, 20_003, 5, None, None, '{"device":0,"stream":7}'),
        (0, 2, "cpu_op", "long ago", 77, None, None, BASE_NS - 5_000, 10, None, None, None, None),
    ]
    recorded = Recorded(pl.DataFrame(events, schema=dict(EVENTS.columns), orient="row"))
    trace = written(write_perfetto(two_ranks(), tmp_path / "step.json", run=recorded))
    processes, threads = named(trace, "process_name"), named(trace, "thread_name")
    found = [r for r in slices_of(trace) if processes[r["pid"]] == "rank 0 trace"]
    assert [(r["name"], threads[r["tid"]], ns(r["ts"]), r["args"]) for r in found] == [
        ("aten::mm", "cpu:77", 0, {"Sequence number": 3}),
        ("gemm", "gpu0:7", 4_050, {"device": 0, "stream": 7}),
    ]


def test_our_own_reader_finds_every_slice_to_the_ns(tmp_path):
    graph = two_ranks()
    events = read_kineto(write_perfetto(graph, tmp_path / "step.json.gz")).events
    kernels = events.filter(pl.col("category") == "kernel").select("name", "device", "stream", "start_ns", "dur_ns")
    ops = graph.ops.filter(pl.col("kind") == "kernel").select(
        "name", "device", stream=pl.lit(7), start_ns="start_ns", dur_ns="dur_ns"
    )
    assert kernels.rows() == ops.rows()
    assert len(events) == len(graph.ops)


def test_tables_with_nothing_to_draw_are_refused_and_leave_no_file(tmp_path):
    path = tmp_path / "step.json"
    with pytest.raises(TraceError, match=r"step.json is not written: no op has a start"):
        write_perfetto(Workload(table(op(0, "kernel", 0, 1) | {"start_ns": None})), path)
    with pytest.raises(SchemaError, match="lacks column"):
        write_perfetto(Workload(table(op(0, "kernel", 0, 1)).drop("lane")), path)
    assert not path.exists()


rows = st.lists(
    st.tuples(
        st.sampled_from(["kernel", "event"]),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        st.sampled_from(["gpu0:7", "cpu:1"]),
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows)
def test_any_rows_give_a_file_that_viewers_take_whole(tmp_path, drawn):
    source = Workload(table(*[op(n, *row) for n, row in enumerate(drawn)]))
    trace = written(write_perfetto(source, tmp_path / "step.json"))
    found = {r["args"]["op_id"]: (trace["baseTimeNanoseconds"] + ns(r["ts"]), ns(r["dur"])) for r in slices_of(trace)}
    assert found == {n: (start, dur) for n, start, dur in source.ops.select("op_id", "start_ns", "dur_ns").iter_rows()}
