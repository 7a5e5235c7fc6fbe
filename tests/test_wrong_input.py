"""What a person may give by mistake, and odd traces: the right answer, or an error that helps."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from trace_builder import Trace, graph_of, recording_of, repeated, run_of, second_step, step_us

import lumos_nb as ln
from lumos_nb.errors import GraphError, InputError, LumosError, ScenarioError, SchemaError, TraceError
from lumos_nb.evaluate import PooledCosts
from lumos_nb.graph import Graph


def usual(trace: Trace, step: int, at: float) -> None:
    trace.op("aten::mm", at + 100, at + 200)
    trace.launch("gemm", (at + 120, at + 130), (at + 140, at + 500))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return second_step(usual)


# --- one thing in place of another


@pytest.mark.parametrize("function", [ln.build_graph, ln.mechanistic, ln.delayed_steps, ln.score_waits])
def test_a_path_in_place_of_a_run_is_refused_with_what_gives_one(function: Callable[..., object]) -> None:
    with pytest.raises(InputError, match=r"takes a Run: load_run\(path\) gives one; it was given a str"):
        function("runs/gpt")


@pytest.mark.parametrize("function", [ln.replay, ln.repeat, ln.what_ifs, lambda graph: ln.sweep(graph, [])])
def test_a_result_in_place_of_a_graph_is_refused(graph: Graph, function: Callable[..., object]) -> None:
    with pytest.raises(InputError, match=r"takes a Graph: .* has its own as \.graph; it was given a Result"):
        function(ln.replay(graph))


@pytest.mark.parametrize("function", [ln.breakdown, ln.activity, lambda source: ln.compare(source, source)])
def test_a_table_in_place_of_a_graph_is_refused(graph: Graph, function: Callable[..., object]) -> None:
    with pytest.raises(InputError, match="it was given a DataFrame"):
        function(graph.ops)


def test_a_run_in_place_of_events_is_refused() -> None:
    with pytest.raises(SchemaError, match="event table is a Run; give a polars DataFrame"):
        ln.build_ops(run_of())  # type: ignore[arg-type]


# --- arguments


COMM = pl.col("kind") == "comm"
ODD_EDITS: dict[str, Callable[[Graph], object]] = {
    "latency_ns=nan": lambda g: ln.whatif.network(g, COMM, latency_ns=float("nan")),  # type: ignore[arg-type]
    "latency_ns=9223372036854775807": lambda g: ln.whatif.network(g, COMM, latency_ns=2**63 - 1),
    "latency_ns=1.5": lambda g: ln.whatif.network(g, COMM, latency_ns=1.5),  # type: ignore[arg-type]
    "bandwidth_factor='2'": lambda g: ln.whatif.network(g, COMM, bandwidth_factor="2"),  # type: ignore[arg-type]
    "bandwidth_factor=True": lambda g: ln.whatif.network(g, COMM, bandwidth_factor=True),
    "bandwidth_factor=1000": lambda g: ln.whatif.network(g, COMM, bandwidth_factor=10**400),
    "latency_ns=True": lambda g: ln.whatif.network(g, COMM, latency_ns=True),
    "latency_ns=a number of": lambda g: ln.whatif.network(g, COMM, latency_ns=10**5000),
    "1000000000": lambda g: ln.whatif.insert(g, pl.lit(True), "n", 10**400, kind="cpu"),
    "a number of thousands of digits cannot be evaluated": lambda g: ln.whatif.insert(
        g, pl.lit(True), "n", 10**5000, kind="cpu"
    ),
    "Decimal('NaN')": lambda g: ln.whatif.insert(g, pl.lit(True), "n", Decimal("NaN"), kind="cpu"),  # type: ignore[arg-type]
    "by=a number of thousands": lambda g: ln.whatif.fuse(g, pl.lit(True), "n", by=10**5000),
    "name=5": lambda g: ln.whatif.insert(g, pl.lit(True), 5, 1, kind="cpu"),  # type: ignore[arg-type]
    "lane='gpu99999999999:1'": lambda g: ln.whatif.insert(g, pl.lit(True), "n", 1, kind="cpu", lane="gpu99999999999:1"),
    "by=<object": lambda g: ln.whatif.scale(g, pl.lit(True), object()),  # type: ignore[arg-type]
    "it gives Struct": lambda g: ln.whatif.scale(g, pl.lit(True), pl.struct("rank")),
    "or dur_ns, which may be": lambda g: ln.whatif.fuse(g, pl.lit(True), "n", by=pl.lit(1)),  # type: ignore[arg-type]
    "resources=5": lambda g: ln.simulate(g, 5),  # type: ignore[arg-type]
    "give Resources": lambda g: ln.simulate(g, ln.Resources(pools=ln.Pool(of=pl.lit("p")))),  # type: ignore[arg-type]
    "is no Pool": lambda g: ln.simulate(g, ln.Resources(pools=("p",))),  # type: ignore[arg-type]
    "priority=": lambda g: ln.simulate(g, ln.Resources(priority=object())),  # type: ignore[arg-type]
    "give groups of ranks": lambda g: ln.without_stragglers(g, replicas=[0, 1]),  # type: ignore[list-item]
    "hold rank 1099511627776": lambda g: ln.without_stragglers(g, replicas=[[2**40]]),
    "over holds no graphs": lambda g: ln.with_pooled_durations(g, []),
    "give a list of those": lambda g: ln.with_pooled_durations(g, g),  # type: ignore[arg-type]
    "give one or more columns": lambda g: ln.waiting_caused(ln.replay(g), by=[]),
    "each once": lambda g: ln.waiting_caused(ln.replay(g), by=["rank", "rank"]),
}
"""What the error says -> an argument that is none."""


@pytest.mark.parametrize("says", ODD_EDITS)
def test_an_argument_of_an_edit_that_is_none_is_named(graph: Graph, says: str) -> None:
    with pytest.raises(LumosError, match=re.escape(says)):
        ODD_EDITS[says](graph)


@pytest.mark.parametrize(("name", "value"), [("level", "x"), ("draws", 1.5), ("draws", True), ("seed", -1)])
def test_an_argument_of_jitter_that_is_none_is_named(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"^{name}.*{value!r}"):
        ln.jitter(run_of(), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [99, "2", 2.5, [2], float("nan")])
def test_a_step_that_is_none_is_answered_with_those_that_there_are(step: Any) -> None:
    recording = recording_of(repeated(usual))
    with pytest.raises(GraphError, match=r"choose one of \[1, 2, 3, 4\]"):
        ln.build_graph(recording, step)
    with pytest.raises(GraphError, match=r"choose one of \[1, 2, 3, 4\]"):
        ln.build_graph(recording, 2, unseen=step)


def test_what_a_pandas_table_of_scenarios_lacks_is_not_scaled(graph: Graph) -> None:
    scenarios = pl.DataFrame({"kernel": [0.5, None], "launch": [None, 0.5]})
    assert ln.sweep(graph, scenarios.to_pandas()).equals(ln.sweep(graph, scenarios))


@pytest.mark.parametrize(
    "scenarios",
    [{"kernel": 0.5}, "kernel", "", b"", 5, [[1]], iter([{}])],
    ids=["mapping", "text", "no text", "no bytes", "number", "lists", "iterator"],
)
def test_scenarios_that_are_no_table_are_refused(graph: Graph, scenarios: Any) -> None:
    with pytest.raises(ScenarioError, match="give a list of mappings from class to scale, or a dataframe"):
        ln.sweep(graph, scenarios)


@pytest.mark.parametrize("bin_ns", [0, 1.5, float("nan"), "1", None, 2**63])
def test_a_bin_that_is_no_whole_number_of_ns_is_refused(graph: Graph, bin_ns: Any) -> None:
    with pytest.raises(LumosError, match=r"bin_ns is .*give whole ns"):
        ln.activity(graph, bin_ns=bin_ns)


def test_more_bins_than_memory_holds_are_refused() -> None:
    with pytest.raises(LumosError, match="bin_ns=1 makes 10,000,000 bins"):
        ln.activity(graph_of(repeated(usual, 10_000), step=2), bin_ns=1)


@pytest.mark.parametrize("times", [1, 2.5, "4", None])
def test_a_number_of_repetitions_that_is_none_is_refused(graph: Graph, times: Any) -> None:
    with pytest.raises(GraphError, match="whole number of at least 2 repetitions"):
        ln.repeat(graph, times)


@pytest.mark.parametrize("place", ["absent/step.json", "absent/step.json.gz", "."])
def test_a_file_that_cannot_be_written_is_named(graph: Graph, tmp_path: Path, place: str) -> None:
    with pytest.raises(TraceError, match=r"cannot be written: .*Give one in a folder that is there"):
        ln.write_perfetto(graph, tmp_path / place)


# --- hand-made graphs


def test_a_graph_without_its_own_ops_is_not_repeated(graph: Graph) -> None:
    with pytest.raises(GraphError, match="no op of its step to repeat"):
        ln.repeat(replace(graph, ops=graph.ops.clear(), edges=graph.edges.clear()))


@pytest.mark.parametrize(("column", "table"), [("rule", "edges"), ("site", "ops")])
def test_a_graph_that_lacks_a_column_is_not_repeated(graph: Graph, column: str, table: str) -> None:
    with pytest.raises(SchemaError, match=rf"lacks column\(s\) {column}"):
        ln.repeat(replace(graph, **{table: getattr(graph, table).drop(column)}))


@pytest.mark.parametrize(("table", "column"), [("ops", "dur_ns"), ("edges", "lag_ns")])
def test_times_that_an_int64_cannot_add_up_are_refused(graph: Graph, table: str, column: str) -> None:
    long = getattr(graph, table).with_columns(pl.lit(2**61, pl.Int64).alias(column))
    with pytest.raises(GraphError, match="over a century"):
        ln.replay(replace(graph, **{table: long}))


# --- traces


def test_an_event_that_stands_twice_and_a_mark_that_does_count_once() -> None:
    trace = repeated(usual)
    trace.rows += [row | {"event_id": row["event_id"] + 1000} for row in trace.rows]
    assert step_us(graph_of(trace, step=2)) == 1000


def test_ops_that_overlap_on_a_stream_take_turns_and_the_step_keeps_its_length() -> None:
    def overlapping(trace: Trace, step: int, at: float) -> None:
        trace.op("aten::mm", at + 1, at + 90)
        for name, called, begin, end in (("a", 10, 20, 500), ("inside", 30, 100, 300), ("b", 40, 450, 600)):
            trace.launch(name, (at + called, at + called + 1), (at + begin, at + end))

    graph = graph_of(repeated(overlapping), step=2)
    assert step_us(graph) == 1000
    assert dict(graph.ops.filter(pl.col("kind") == "kernel").select("name", pl.col("dur_ns") // 1000).iter_rows()) == {
        "a": 480,
        "inside": 0,
        "b": 100,
    }
    said = graph.report.filter(pl.col("what") == "overlaps on a stream")
    assert said.select("rank", "count", "time_ns").rows() == [(0, 8, 4 * 250_000)]


def test_a_wait_of_a_stream_after_its_last_work_does_not_end_the_step_later() -> None:
    def waiting(trace: Trace, step: int, at: float) -> None:
        usual(trace, step, at)
        trace.launch("copy", (at + 150, at + 151), (at + 160, at + 170), stream=20)
        trace.op("aten::add", at + 600, at + 900)
        trace.wait_event(at + 800, at + 801)

    graph = graph_of(repeated(waiting), step=2)
    assert (graph.ops["name"] == "wait").any()
    assert step_us(graph) == 1000
    assert ln.breakdown(graph)["time_ns"].sum() == 1_000_000


def test_device_work_without_any_launch_is_said_to_be_that() -> None:
    trace = repeated(lambda trace, step, at: trace.device("gemm", at + 100, at + 200))
    with pytest.raises(GraphError, match=r"none of the recording's 4 device ops has its launch.*ProfilerActivity"):
        graph_of(trace)


@pytest.mark.parametrize(
    "args",
    [
        {"Collective name": "allreduce", "Seq": "7", "Group size": "2", "In msg nelems": "10", "dtype": "Float"},
        [1, 2],
        "text",
        {"Collective name": {"a": 1}, "Seq": [1], "Group size": 2**40, "In msg nelems": 1e30},
    ],
    ids=["numbers in quotes", "a list", "a text", "numbers beyond their columns"],
)
def test_arguments_of_other_types_are_read_where_they_can_be(args: Any) -> None:
    def body(trace: Trace, step: int, at: float) -> None:
        usual(trace, step, at)
        trace.launch("ncclDevKernel_AllReduce", (at + 140, at + 141), (at + 500, at + 600), stream=20, args=args)
        call = trace.wait_event(at + 150, at + 151)
        trace._add(
            "cuda_sync", "Stream Wait Event", at + 150, at + 151, device=0, stream=7, correlation=call, args=args
        )

    graph = graph_of(repeated(body), step=2)
    assert step_us(graph) == 1000
    [comm] = graph.ops.filter(pl.col("kind") == "comm").select("collective", "comm_seq", "group_size").rows()
    quoted = isinstance(args, dict) and args["Seq"] == "7"
    assert comm == (("all_reduce", 7, 2) if quoted else ("all_reduce", None, None))


def test_numbers_in_names_that_no_column_holds_are_none() -> None:
    def body(trace: Trace, step: int, at: float) -> None:
        trace.annotation("micro_batch 99999999999999", at + 50, at + 900)
        usual(trace, step, at)

    trace = repeated(body)
    trace.annotation("ProfilerStep#99999999999999", 3990, 3995)
    graph = graph_of(trace, step=2)
    assert graph.ops["micro_batch"].null_count() == graph.ops.height
    assert step_us(graph) == 1000


def test_a_rank_that_no_collective_ties_to_the_others_is_reported() -> None:
    graph = graph_of(repeated(usual), repeated(usual, rank=1, host_us=3.6e9), step=2)
    unknown = graph.report.filter(pl.col("what") == "rank clock unknown")
    assert unknown.select("rank", "detail").rows() == [(1, "no collective ties it to rank 0: its clock is as it was")]


def test_a_step_that_one_rank_lacks_is_said_to_be_lacking() -> None:
    graph = graph_of(repeated(usual), repeated(usual, rank=1, steps=3), step=4)
    with pytest.raises(GraphError, match="rank 1 has no op of step 4; choose a step that all ranks have"):
        ln.breakdown(graph)


def test_delays_that_are_all_the_same_predict_nothing() -> None:
    def delayed(trace: Trace, step: int, at: float) -> None:
        trace.annotation("delay=0.05ms", at + 10, at + 60)
        usual(trace, step, at)

    with pytest.raises(GraphError, match="every logged delay is 50000 ns"):
        ln.delayed_steps(run_of(repeated(delayed)))


def test_a_prediction_needs_two_different_steps() -> None:
    with pytest.raises(GraphError, match=r"at least 2 steps besides the first, not \[2\]"):
        ln.mechanistic(run_of(repeated(usual)), [2, 2])


def test_charts_say_what_they_take(graph: Graph) -> None:
    from lumos_nb import charts

    with pytest.raises(
        InputError, match=r"takes the breakdown table, .*: ln\.breakdown\(result\) gives it; it was given a Graph"
    ):
        charts.breakdown_bars(graph)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"takes a Graph or a Result: .* it was given a Run"):
        charts.timeline(run_of(Trace()))  # type: ignore[arg-type]


def test_nothing_prints_as_whole_tables(graph: Graph) -> None:
    """A dataclass's own repr would draw each of its tables."""
    recording = recording_of(repeated(usual, steps=3))
    for shown in (graph, recording, PooledCosts.of([graph])):
        assert "┌" not in repr(shown)
    assert repr(recording).startswith("Recording of 3 steps, ")
