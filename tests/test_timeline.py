"""Op-level timelines: made by hand, and the two published jobs against what their publishers measured and simulated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lumos_nb import (
    Graph,
    Recording,
    build_graph,
    load_run,
    mechanistic,
    replay,
    waiting_caused,
    with_pooled_durations,
    without_stragglers,
)
from lumos_nb.errors import TraceError
from lumos_nb.evaluate import without_rules
from lumos_nb.traces.formats import read_trace
from lumos_nb.traces.timeline import read_timeline

TYPES = {"dp_rank": pl.Int8, "stage": pl.Int8, "rank": pl.Int16, "step": pl.Int64, "optype": pl.Categorical}
FLOATS = {"start_ts": pl.Float32, "duration": pl.Float32}
INTS = {"seq_id": pl.Int32, "mb_id": pl.Int8}

Row = tuple[int, int, str, float, float, int]
"""Stage, step, op, begin and end in ms, order."""

TWO_STAGES: list[Row] = [
    (0, 1, "forward-compute", 0, 10, 0),
    (0, 1, "forward-send", 10, 31, 0),  # waits 19 ms for its receiver
    (0, 1, "backward-recv", 31, 62, 0),
    (0, 1, "backward-compute", 62, 70, 0),
    (1, 1, "gc", 0, 29, 0),
    (1, 1, "forward-recv", 29, 31, 0),
    (1, 1, "forward-compute", 31, 45, 0),
    (1, 1, "backward-compute", 45, 60, 0),
    (1, 1, "backward-send", 60, 62, 0),
]


def parquet(path: Path, rows: Iterable[Row]) -> Path:
    """A table of one replica, as StragglerAnalysis writes it."""
    named = [
        {"dp_rank": 0, "stage": s, "rank": s, "step": step, "optype": op, "seq_id": order}
        | {"start_ts": a / 1e3, "duration": (b - a) / 1e3, "mb_id": order if op.endswith("compute") else -1}
        for s, step, op, a, b, order in rows
    ]
    pl.DataFrame(named, schema=TYPES | FLOATS | INTS).write_parquet(path)
    return path


def graph_of(path: Path) -> Graph:
    return build_graph(load_run(path, cache=False), 1)


def durations(graph: Graph, name: str) -> list[float]:
    return [ns / 1e6 for ns in graph.ops.filter(pl.col("name") == name).sort("rank")["dur_ns"]]


def close(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-4)  # the file holds single-precision seconds


# --- made by hand -----------------------------------------------------------------------------------------------------


def test_a_send_and_its_receive_are_one_exchange_whose_transfer_begins_when_both_are_there(tmp_path):
    graph = graph_of(parquet(tmp_path / "trace-a.parquet", TWO_STAGES))
    assert durations(graph, "forward-send") == close(2)
    assert durations(graph, "forward-recv") == close(2)
    assert durations(graph, "backward-recv") == close(2)
    assert replay(graph).step_ns / 1e6 == pytest.approx(70, abs=1e-4)
    late = graph.ops.with_columns(dur_ns=pl.when(pl.col("name") == "gc").then(0).otherwise("dur_ns"))
    assert replay(Graph(late, graph.edges, graph.step)).step_ns / 1e6 == pytest.approx(70 - 19, abs=1e-4)


def test_what_a_rank_issues_at_one_moment_is_one_exchange_with_all_that_it_touches(tmp_path):
    rows: list[Row] = [
        (0, 1, "forward-compute", 0, 10, 1),
        (0, 1, "forward-send", 10, 22, 1),
        (0, 1, "backward-recv", 10, 22, 0),
        (0, 1, "backward-compute", 22, 30, 0),
        (1, 1, "backward-compute", 0, 20, 0),
        (1, 1, "backward-send", 20, 22, 0),
        (1, 1, "forward-recv", 20, 22, 1),
        (1, 1, "forward-compute", 22, 40, 1),
    ]
    graph = graph_of(parquet(tmp_path / "trace-a.parquet", rows))
    assert durations(graph, "backward-recv+forward-send") == durations(graph, "backward-send+forward-recv") == close(2)
    joins = graph.ops.filter(pl.col("kind") == "join")
    assert joins["name"].to_list() == ["send_recv of 2 ranks"]


def test_steps_are_laid_end_to_end_and_keep_their_length(tmp_path):
    later = [(s, 7, op, a, b * 1.0, o) for s, _, op, a, b, o in TWO_STAGES]
    run = load_run(parquet(tmp_path / "trace-a.parquet", [*TWO_STAGES, *later]), cache=False)
    times = Recording.of(run).step_times()
    assert times["step"].to_list() == [1, 7]
    assert [ns / 1e6 for ns in times["step_ns"]] == close(70, 70)
    assert run.report.filter(pl.col("what") == "times")["count"].to_list() == [1]


def test_phases_and_micro_batches_are_the_ops_own(tmp_path):
    ops = graph_of(parquet(tmp_path / "trace-a.parquet", TWO_STAGES)).ops
    rows = ops.filter(pl.col("kind") == "cpu").select("name", "phase", "micro_batch").unique().sort("name").rows()
    assert rows == [
        ("backward-compute", "backward", 0),
        ("forward-compute", "forward", 0),
        ("gc", "other", None),
    ]


def test_json_without_the_waiting_gets_it_back(tmp_path):
    """The export to JSON begins each exchange when its last rank has arrived."""
    whole = {("forward-send", 0): 29, ("backward-recv", 0): 60}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 5 * s, "args": {"name": f"PP rank {s}, TP rank 0, compute"}}
        for s in range(2)
    ]
    for s, step, op, a, b, order in TWO_STAGES:
        begin = whole.get((op, s), a)
        args = {"step": step, "mb_id": -1, "seq_id": order, "model_chunk": 0}
        times = {"ts": begin * 1e3, "dur": (b - begin) * 1e3}
        events.append({"name": op, "cat": op, "ph": "X", "pid": 0, "tid": 5 * s, "args": args} | times)
    path = tmp_path / "timeline-a.json"
    path.write_text(json.dumps(events))
    graph = graph_of(path)
    assert durations(graph, "forward-send") == close(2)
    assert "waiting" in load_run(path, cache=False).report["what"].to_list()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda t: t.drop("optype"), "lacks the column.s. optype", id="a column is missing"),
        pytest.param(lambda t: t.clear(), "without ops", id="no rows"),
        pytest.param(lambda t: t.with_columns(step=None), "without ops", id="no op has a step"),
    ],
)
def test_a_table_that_is_no_timeline_is_refused(tmp_path, change, message):
    path = parquet(tmp_path / "trace-a.parquet", TWO_STAGES)
    change(pl.read_parquet(path)).write_parquet(path)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_damaged_table_is_refused(tmp_path):
    path = parquet(tmp_path / "trace-a.parquet", TWO_STAGES)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TraceError, match="no whole Parquet file"):
        read_trace(path)


def test_impossible_durations_are_dropped_and_counted(tmp_path):
    path = parquet(tmp_path / "trace-a.parquet", [*TWO_STAGES, (1, 1, "optimizer", 80, 70, 0)])
    notes = read_trace(path).notes
    assert notes.filter(pl.col("what") == "unreadable")["count"].to_list() == [1]


# --- the published jobs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["ST", "AR"])
def job(request, traces: Path) -> tuple[str, Recording]:
    return request.param, Recording.of(load_run(traces / "straggler" / f"trace-{request.param}.parquet", cache=False))


def published(traces: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((traces / "straggler" / f"result-{name}.json").read_text())
    return found


def test_step_times_are_the_published_ones(job, traces):
    name, recording = job
    stated = published(traces, name)["step_t_base"]
    measured = {str(step): ns / 1e9 for step, ns in recording.step_times().select("step", "step_ns").iter_rows()}
    assert measured == pytest.approx(stated, abs=2e-4)


def test_each_step_replays_as_measured(job):
    _, recording = job
    for step, step_ns in recording.step_times().select("step", "step_ns")[::8].iter_rows():
        assert replay(build_graph(recording, step)).step_ns == step_ns


def test_steps_are_predicted_from_the_others(job):
    name, recording = job
    steps = recording.step_times()["step"].to_list()
    scored = mechanistic(recording, steps[5:21])
    error, null = (scored[column].abs().mean() for column in ("error", "null_error"))
    assert error < {"ST": 0.004, "AR": 0.004}[name]
    assert error < null


def test_joins_are_what_makes_the_pipeline(job):
    name, recording = job
    graph = build_graph(recording, recording.default_step())
    alone = replay(without_rules(graph, "collective")).step_ns / replay(graph).step_ns
    assert alone < {"ST": 0.75, "AR": 0.999}[name]  # AR's slowest rank is nearly all of its step by itself


def test_a_step_without_stragglers_as_its_publishers_define_it(job, traces):
    name, recording = job
    stated = next(iter(published(traces, name)["step_t_noblk"].values()))
    graphs = [build_graph(recording, step) for step in recording.step_times()["step"][::4]]
    assert replay(with_pooled_durations(graphs[0], graphs)).step_ns / 1e9 == pytest.approx(stated, rel=0.01)


def test_the_straggler_of_ar_is_found_with_the_waits_that_no_record_names(traces):
    recording = Recording.of(load_run(traces / "straggler" / "trace-AR.parquet", cache=False))
    graph = build_graph(recording, 21)
    assert waiting_caused(replay(graph))["rank"][0] == 0
    hidden = graph.ops.filter((pl.col("collective") == "hidden") & (pl.col("kind") == "comm"))
    ranks = hidden.group_by("match").agg(pl.col("rank").sort()).sort(pl.col("rank").list.get(1))["rank"].to_list()
    assert ranks == [[0, 16, 32, 48], [48, 52, 56, 60]]  # the slow replica's pipeline; its last stage's replicas
    assert replay(without_stragglers(graph)).step_ns < 0.5 * replay(graph).step_ns


LANE = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "PP rank 0, TP rank 0, compute"}}
OP_OF_LANE = {"ph": "X", "name": "forward-compute", "pid": 0, "tid": 0, "ts": 0, "dur": 5}
OP_OF_LANE |= {"args": {"step": 1, "mb_id": 0, "seq_id": 0}}


@pytest.mark.parametrize(
    "odd", [LANE | {"args": 5}, LANE | {"pid": []}, OP_OF_LANE | {"ts": 1e300}, OP_OF_LANE | {"pid": {}}, None]
)
def test_odd_events_between_sound_ones_cost_themselves_alone(tmp_path, odd):
    path = tmp_path / "timeline-x.json"
    path.write_text(json.dumps([LANE, odd, OP_OF_LANE]))
    assert read_timeline(path).events.filter(name="forward-compute")["dur_ns"].to_list() == [5000]


@pytest.mark.parametrize("value", [pl.lit(b"x"), pl.lit([1]), pl.struct("rank"), pl.lit("1").cast(pl.Categorical)])
def test_a_column_of_another_kind_is_refused_and_brackets_are_no_pattern(tmp_path, value):
    columns = ("rank", "dp_rank", "stage", "step", "start_ts", "duration", "mb_id", "seq_id")
    table = pl.DataFrame({c: [1] for c in columns}).with_columns(optype=pl.lit("forward-compute"))
    path = tmp_path / "trace-[x].parquet"
    table.write_parquet(path)
    assert read_timeline(path).events.filter(name="forward-compute").height == 1
    table.with_columns(stage=value).write_parquet(path)
    with pytest.raises(TraceError, match=r"its stage is .*, where it has numbers and names"):
        read_timeline(path)


def test_what_is_no_list_is_refused_and_numbers_beyond_all_sizes_are_left_out(tmp_path):
    path = tmp_path / "timeline-x.json"
    path.write_text("5")
    with pytest.raises(TraceError, match="it holds a int, not a list"):
        read_timeline(path)
    path.write_text(json.dumps([LANE, OP_OF_LANE]))
    (tmp_path / "meta-x.yaml").write_text(f"one: {'9' * 5000}\ntensor_parallel: 2\n")
    assert read_timeline(path).metadata["layout"]["tensor_parallel"] == 2


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_one_file_of_a_pipeline_is_a_graph_also_where_its_sends_take_no_time(traces, rank):
    recording = Recording.of(load_run(traces / f"primus/pp8/pp_rank_{rank}.json", cache=False))
    graph = build_graph(recording)
    assert "waiting for ranks without a trace" in graph.ops["name"].to_list()
    measured = recording.step_times().filter(step=graph.step)["step_ns"].item()
    assert replay(graph).step_ns == measured
