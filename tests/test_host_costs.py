"""What the host costs: parts of operators with known times, idle streams, outliers, where a cost is looked up."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb.costs.host import (
    OVERHEADS,
    Overheads,
    Pool,
    host_parts,
    launch_latencies,
    overheads,
    pooled,
    with_families,
)
from lumos_nb.errors import CalibrationError, GraphError, InputError, SchemaError
from lumos_nb.evaluate import PooledCosts, with_pooled_costs
from lumos_nb.graph import build_graph
from lumos_nb.ops import build_ops
from lumos_nb.traces.run import Run
from tests.trace_builder import Body, Trace, graph_of, recording_of, repeated, run_of


def body(trace: Trace, step: int, s: float) -> None:
    """One step: an operator that launches twice, one that launches once, one that does not; then a synchronise."""
    trace.op("aten::mm", s + 10, s + 60)
    trace.launch("k1", (s + 17, s + 21), (s + 25, s + 30))  # T2 7, T4 4, idle: 4 after the call
    trace.launch("k2", (s + 33, s + 38), (s + 45, s + 50))  # T5 12, T4 5, idle: 7 after the call; T3 22
    trace.op("aten::view", s + 63, s + 72)  # T1 3, host only 9
    trace.op("aten::add_", s + 77, s + 100)  # T1 5
    trace.launch("k3", (s + 80, s + 86), (s + 92, s + 300))  # T2 3, T4 6, idle: 6 after the call; T3 14
    trace.call("cudaStreamSynchronize", s + 110, s + 311)  # T1 10, 11 beyond the wait


def parts(ops: pl.DataFrame) -> list[tuple[str, str, float]]:
    """Of the ops of step 2: overhead, name, time in us, by overhead and time."""
    found = host_parts(ops.filter(pl.col("step") == 2)).sort("overhead", "dur_ns")
    return [(o, n, d / 1000) for o, n, d in found.select("overhead", "name", "dur_ns").iter_rows()]


KNOWN = [
    ("T1", "before aten::view", 3.0),
    ("T1", "before aten::add_", 5.0),
    ("T1", "before cudaStreamSynchronize", 10.0),
    ("T2", "aten::add_", 3.0),
    ("T2", "aten::mm", 7.0),
    ("T3", "aten::add_", 14.0),
    ("T3", "aten::mm", 22.0),
    ("T4", "cudaLaunchKernel", 4.0),
    ("T4", "cudaLaunchKernel", 5.0),
    ("T4", "cudaLaunchKernel", 6.0),
    ("T5", "aten::mm", 12.0),
    ("T5_host", "aten::view", 9.0),
]


# --- the parts of the host's time -------------------------------------------------------------------------------------


def test_every_part_of_an_operator_has_its_known_time():
    graph = graph_of(repeated(body), step=2)
    found = [part for part in parts(graph.ops) if part[1] != "before the next step"]
    assert [part for part in found if part[1] != "before aten::mm"] == [
        *KNOWN,
        ("blocking", "cudaStreamSynchronize", 11.0),
    ]


def test_the_ops_of_a_run_give_the_same_but_for_blocking_calls_whose_waiting_they_hold():
    ops = build_ops(run_of(repeated(body)).events)
    found = [part for part in parts(ops) if part[1] not in ("before the next step", "before aten::mm")]
    assert found == KNOWN


def test_the_parts_are_all_of_a_threads_work():
    ops = graph_of(repeated(body), step=2).ops
    work = ops.filter(pl.col("kind").is_in(["cpu", "gap", "launch", "wait", "alloc"]))
    assert host_parts(ops)["dur_ns"].sum() == work["dur_ns"].sum() > 0


def test_an_operator_that_ends_with_its_launch_has_a_last_part_of_no_length():
    def ends_with_it(trace: Trace, _: int, s: float) -> None:
        trace.op("aten::mm", s + 10, s + 20)
        trace.launch("k", (s + 12, s + 20), (s + 30, s + 40))

    found = {part: us for part, name, us in parts(graph_of(repeated(ends_with_it), step=2).ops) if name == "aten::mm"}
    assert found == {"T2": 2.0, "T3": 0.0}


def test_two_operators_of_one_name_without_a_gap_are_two():
    def adjacent(trace: Trace, _: int, s: float) -> None:
        trace.op("aten::view", s + 10, s + 14)
        trace.op("aten::view", s + 14, s + 20)

    ops = build_ops(run_of(repeated(adjacent)).events)
    assert [us for part, name, us in parts(ops) if name == "aten::view"] == [4.0, 6.0]


def test_a_record_is_a_call_but_no_launch():
    def records(trace: Trace, _: int, s: float) -> None:
        trace.op("aten::mm", s + 10, s + 50)
        trace.record(s + 13, s + 14)
        trace.launch("k", (s + 20, s + 24), (s + 30, s + 40))

    found = [part for part in parts(graph_of(repeated(records), step=2).ops) if not part[1].startswith("before")]
    assert found == [
        ("T2", "aten::mm", 9.0),
        ("T3", "aten::mm", 26.0),
        ("T4", "cudaEventRecord", 1.0),
        ("T4", "cudaLaunchKernel", 4.0),
    ]


def test_allocations_are_apart_from_launches():
    def allocates(trace: Trace, _: int, s: float) -> None:
        trace.op("aten::empty", s + 10, s + 200)
        trace.call("cudaMalloc", s + 15, s + 190)

    found = [part for part in parts(graph_of(repeated(allocates), step=2).ops) if not part[1].startswith("before")]
    assert found == [("T5_host", "aten::empty", 15.0), ("alloc", "cudaMalloc", 175.0)]


# --- launch latency ---------------------------------------------------------------------------------------------------


def latencies(of: Body | Trace) -> list[float]:
    """Those of the graph of step 2, or of the raw ops of a trace."""
    ops = build_ops(run_of(of).events) if isinstance(of, Trace) else graph_of(repeated(of), step=2).ops
    return sorted(ns / 1000 for ns in launch_latencies(ops)["dur_ns"])


def test_latency_counts_from_the_call_to_work_on_an_idle_stream():
    found = latencies(body)
    assert found == [4.0, 6.0, 7.0]


def test_work_on_a_busy_stream_says_nothing_of_the_latency():
    def busy(trace: Trace, _: int, s: float) -> None:
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 40))
        trace.launch("b", (s + 30, s + 34), (s + 41, s + 60))  # a still runs when it is launched
        trace.launch("c", (s + 60, s + 64), (s + 67, s + 90))  # idle since that moment

    assert latencies(busy) == [3.0, 6.0]


def test_work_that_waits_for_another_stream_says_nothing_either():
    def waits(trace: Trace, _: int, s: float) -> None:
        trace.launch("z", (s + 1, s + 2), (s + 5, s + 6), stream=20)
        trace.launch("a", (s + 10, s + 14), (s + 20, s + 400))
        record = trace.record(s + 15, s + 16)
        trace.wait_event(s + 17, s + 18, (20, 7, record))
        trace.launch("b", (s + 20, s + 24), (s + 402, s + 410), stream=20)

    assert latencies(waits) == [3.0, 6.0]


def test_the_first_work_of_a_stream_is_left_out_where_nothing_tells_what_was_before_it():
    trace = Trace()
    trace.launch("a", (10, 14), (20, 40))
    trace.launch("b", (50, 54), (63, 80))
    assert latencies(trace) == [9.0]


def test_of_a_launch_of_many_kernels_the_first_counts():
    trace = Trace()
    trace.launch("a", (10, 14), (20, 40))
    correlation = trace.call("cudaGraphLaunch", 50, 60)
    trace.device("b", 65, 70, correlation=correlation)
    trace.device("c", 75, 80, correlation=correlation)
    assert latencies(trace) == [5.0]


# --- pooling ----------------------------------------------------------------------------------------------------------


def samples(*rows: tuple[str, str, float]) -> pl.DataFrame:
    """Samples from overhead, name and time in us."""
    table = pl.DataFrame(rows, schema={"overhead": pl.String, "name": pl.String, "us": pl.Float64}, orient="row")
    return table.with_columns(dur_ns=(pl.col("us") * 1000).cast(pl.Int64))


def test_what_lies_outside_the_fences_is_counted_and_left_out_of_the_mean():
    found = pooled(samples(*(("T2", "aten::mm", us) for us in (9, 10, 10, 11, 10, 1000))))
    row = next(row for row in found.rows if row.pooled_from == "name")
    assert (row.count, row.outliers, row.trimmed_us, row.mean_us) == (6, 1, 10, 175)
    assert (row.median_us, row.p10_us, row.p90_us) == pytest.approx((10, 9.5, 505.5))


LOOKED_UP = pooled(
    samples(("T2", "aten::mm", 10), ("T2", "aten::bmm", 20), ("T2", "aten::add_", 3), ("T4", "cudaLaunchKernel", 5))
)


@pytest.mark.parametrize(
    ("name", "overhead", "us", "level"),
    [
        pytest.param("aten::mm", "T2", 10, "name", id="a known name"),
        pytest.param("aten::addmm", "T2", 15, "family", id="an unknown name of a known family"),
        pytest.param("aten::mul_", "T2", 3, "family", id="another family"),
        pytest.param("FancyBackward0", "T2", 11, "all", id="an unknown family"),
        pytest.param("cudaLaunchKernelExC", "T4", 5, "family", id="another call that launches"),
        pytest.param(None, "T2", 11, "all", id="no name"),
    ],
)
def test_a_cost_is_that_of_the_name_else_the_family_else_all(name, overhead, us, level):
    found = LOOKED_UP.find(pl.DataFrame({"overhead": [overhead], "name": [name]}, schema_overrides={"name": pl.String}))
    assert found.select("cost_us", "pooled_from").row(0) == (us, level)


def test_under_a_name_the_long_ones_count_and_elsewhere_they_do_not():
    found = pooled(samples(*(("T2", "aten::mm", us) for us in (9, 10, 10, 11, 10, 1000))))
    assert found.cost(["aten::mm", "aten::bmm", None], ["T2"] * 3).tolist() == [175, 10, 10]
    assert found.cost(["aten::mm", "aten::bmm", None], ["T2"] * 3, "median_us").tolist() == [10, 10, 10]


def test_costs_come_in_the_order_asked_for():
    names, kinds = ["cudaLaunchKernel", "aten::bmm", "aten::mm"] * 1000, ["T4", "T2", "T2"] * 1000
    np.testing.assert_array_equal(LOOKED_UP.cost(names, kinds), [5, 20, 10] * 1000)


def test_a_pool_finds_under_the_finest_key_and_says_nothing_of_the_unknown():
    known = pl.DataFrame({"a": [1, 1, 2], "b": [1, 2, None], "x": [10.0, 20.0, 60.0]})
    pool = Pool.of(known, {"both": ("a", "b"), "one": ("a",)}, x=pl.col("x").mean())
    found = pool.find(pl.DataFrame({"a": [1, 1, 2, 3], "b": [2, 3, None, 1]}), "x")
    assert found.rows() == [(1, 2, 20.0, "both"), (1, 3, 15.0, "one"), (2, None, 60.0, "one"), (3, 1, None, None)]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("_c10d_functional::wait_tensor", "comm"),
        ("c10d::allreduce_", "comm all_reduce"),
        ("gloo:barrier", "comm barrier"),
        ("aten::add_", "in place"),
        ("cudaMemcpyAsync", "launch"),
    ],
)
def test_a_family_goes_by_what_dispatches(name: str, family: str):
    assert with_families(pl.DataFrame({"name": [name]}))["family"].item() == family


def test_several_recordings_are_pooled_together():
    one, other = graph_of(repeated(body), step=2), recording_of(repeated(body))
    calls = [row.count for row in overheads([one, other]).rows if (row.overhead, row.pooled_from) == ("T4", "all")]
    assert calls == [3 + 2 * 3]  # of the recording steps 2 and 3, since the first and the last are left out


def test_json_gives_back_the_same():
    found = overheads(graph_of(repeated(body), step=2))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Overheads) == found
    assert found.table.height == len(found.rows)
    assert "T4" in repr(found)
    assert "<table" in found._repr_html_()


# --- what predictions of steps take from it ---------------------------------------------------------------------------


@pytest.mark.parametrize("gap_us", [50, 500])
def test_the_gap_before_an_operator_that_no_other_step_runs_is_predicted_from_its_family(gap_us: int):
    def odd(trace: Trace, step: int, s: float) -> None:
        here, gap = ("aten::tanh", gap_us) if step == 3 else ("aten::mm", 20)
        trace.op("aten::add_", s + 10, s + 20)
        trace.op(here, s + 20 + gap, s + 620)
        trace.launch("k", (s + 600, s + 604), (s + 610, s + 620))

    recording = recording_of(repeated(odd, steps=5))
    costs = PooledCosts.of(build_graph(recording, step, unseen=3) for step in (2, 4, 5))
    ops = with_pooled_costs(build_graph(recording, 3), costs).ops
    assert ops.filter(pl.col("name") == "before aten::tanh")["dur_ns"].to_list() == [20_000]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overhead", [o for o in OVERHEADS if o not in ("T2", "T4")])
def test_what_was_not_measured_is_an_error_that_says_what_to_record(overhead):
    with pytest.raises(CalibrationError, match=f"nothing was measured of {overhead} .*'aten::mm'.* record "):
        LOOKED_UP.cost(["cudaLaunchKernel", "aten::mm"], ["T4", overhead])


def test_an_unknown_overhead_is_an_error_that_lists_the_known():
    with pytest.raises(InputError, match="no overhead is called 'T9'; there are: T1, T2"):
        LOOKED_UP.cost(["aten::mm"], ["T9"])


def test_wrong_requests_are_errors():
    with pytest.raises(InputError, match="2 names, 1 overheads"):
        LOOKED_UP.cost(["aten::mm", "aten::mm"], ["T2"])
    with pytest.raises(InputError, match="no statistic is called 'p50_us'; there are: mean_us"):
        LOOKED_UP.cost(["aten::mm"], ["T2"], "p50_us")
    with pytest.raises(SchemaError, match="overhead table lacks"):
        LOOKED_UP.find(pl.DataFrame({"name": ["aten::mm"]}))


@pytest.mark.parametrize("change", [{}, {"overhead": "T9"}, {"pooled_from": "site"}])
def test_rows_that_no_lookup_could_use_are_refused(change: dict[str, str]):
    row = LOOKED_UP.rows[0]
    with pytest.raises(CalibrationError, match="an unknown or a second row"):
        Overheads((row, msgspec.structs.replace(row, **change)))


def test_a_recording_without_host_work_is_an_error():
    trace = Trace()
    trace.device("k", 0, 10)
    with pytest.raises(CalibrationError, match="without host work: record the host"):
        overheads(build_ops(run_of(trace).events))
    with pytest.raises(CalibrationError, match=r"0 source\(s\) without host work"):
        overheads([])


def crossed(*steps: int) -> Run:
    """Two ranks that run the collectives of two groups in turn, in these steps in contrary order."""

    def body(trace: Trace, step: int, s: float) -> None:
        for n, group in enumerate("ba" if trace.rank and step in steps else "ab"):
            args = {"Collective name": "allreduce", "Process Group Name": group, "Group size": 2, "Seq": step}
            trace.op("aten::add_", s + 12 * n, s + 12 * n + 7)
            trace.launch(f"nccl{group}", (s + 12 * n, s + 12 * n + 4), (s + 20 * n + 20, s + 20 * n + 40), args=args)

    return run_of(*(repeated(body, steps=5, rank=number) for number in (0, 1)))


def test_a_step_that_contradicts_itself_is_left_out_and_counted():
    with pytest.raises(GraphError, match="step 3 make a cycle"):
        build_graph(crossed(3), 3)
    found, whole = overheads(crossed(3)), overheads(crossed())
    assert (found.left_out, whole.left_out) == (1, 0)
    counts = [one.table.select("overhead", "name", "count") for one in (found, whole)]
    assert counts[0].with_columns(pl.col("count") * 3).equals(counts[1].with_columns(pl.col("count") * 2))
    assert "1 step(s) left out" in repr(found)
    assert "left out" not in repr(whole)
    with pytest.raises(GraphError, match="step 2 make a cycle"):
        overheads(crossed(2, 3, 4))


def test_other_sources_are_errors():
    with pytest.raises(InputError, match="runs, graphs or op tables; it was given a int"):
        overheads([3])  # type: ignore[list-item]
    with pytest.raises(InputError, match="was given a int"):
        overheads(3)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="op table lacks"):
        overheads(pl.DataFrame({"name": ["a"]}))


# --- real traces ------------------------------------------------------------------------------------------------------


def test_a_real_runs_host_time_is_all_accounted_for(traces: Path):
    graph = ln.build_graph(ln.load_run(traces / "hta/nccl_parser_config"))
    found = overheads(graph)
    priced = found.find(host_parts(graph.ops))
    assert set(priced["pooled_from"]) == {"name"}
    assert priced["cost_us"].sum() == pytest.approx(priced["dur_ns"].sum() / 1000)
    launch = found.find(pl.DataFrame({"overhead": ["launch_latency"], "name": ["cudaLaunchKernel"]}), "median_us")
    assert 0 < launch["cost_us"][0] < 20
