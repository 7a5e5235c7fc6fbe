"""Schedule files of a pipeline: passes of each rank, with the messages that they imply."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lumos_nb import Graph, Recording, build_graph, load_run, mechanistic, replay
from lumos_nb.errors import TraceError
from lumos_nb.traces.formats import read_trace

FIRST = {"fwd_start": [0, 11], "fwd_end": [10, 20], "bwd_start": [42, 70], "bwd_end": [52, 80], "total": 82}
LAST = {"fwd_start": [12, 42], "fwd_end": [22, 52], "bwd_start": [22, 52], "bwd_end": [40, 68], "total": 70}
"""Two stages, two micro-batches, 1F1B; messages take 2 ms."""


def write(folder: Path, *ranks: dict[str, Any]) -> Path:
    for rank, times in enumerate(ranks):
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps({"1": times, "2": times}))
    return folder


def spans(graph: Graph, rank: int, name: str) -> list[tuple[float, float]]:
    ops = replay(graph).ops.filter((pl.col("rank") == rank) & (pl.col("name") == name) & (pl.col("kind") == "cpu"))
    start = (pl.col("start_ns") - 82_000_000) / 1e6  # of the second step
    return ops.sort("start_ns").select(start, end=start + pl.col("dur_ns") / 1e6).rows()


def test_a_pass_waits_for_the_stage_before_it_and_the_sender_for_nobody(tmp_path):
    graph = build_graph(load_run(write(tmp_path, FIRST, LAST), cache=False), 2)
    assert spans(graph, 1, "forward") == [(12, 22), (42, 52)]
    assert spans(graph, 0, "backward") == [(42, 52), (70, 80)]
    slow = pl.when((pl.col("rank") == 0) & (pl.col("name") == "forward")).then(pl.col("dur_ns") * 2)
    later = Graph(graph.ops.with_columns(dur_ns=slow.otherwise("dur_ns")), graph.edges, graph.step)
    assert spans(later, 0, "forward") == [(0, 20), (21, 39)]  # the second does not wait for the other stage
    assert spans(later, 1, "forward") == [(22, 32), (52, 62)]


def test_a_step_lasts_as_long_as_the_slowest_rank_says(tmp_path):
    times = Recording.of(load_run(write(tmp_path, FIRST, LAST), cache=False)).step_times()
    assert times["step_ns"].to_list() == [82_000_000, 80_000_000]  # nothing shows that the last went on
    marks = read_trace(tmp_path / "pp_rank_1.json").events.filter(pl.col("name").str.starts_with("ProfilerStep"))
    assert marks["start_ns"].to_list() == [0, 82_000_000]


def test_clocks_are_set_so_that_messages_take_as_long_both_ways(tmp_path):
    behind = {key: [ms - 1.5 for ms in times] for key, times in LAST.items() if key != "total"} | {"total": 69}
    graph = build_graph(load_run(write(tmp_path, FIRST, behind), cache=False), 2)
    assert spans(graph, 1, "forward") == [(12, 22), (42, 52)]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        pytest.param({k: v for k, v in FIRST.items() if k != "bwd_end"}, "bwd_end or total is missing", id="no ends"),
        pytest.param(FIRST | {"fwd_end": [10]}, "no intervals", id="fewer ends than begins"),
        pytest.param(FIRST | {"fwd_end": [10, 5]}, "no intervals", id="an end before its begin"),
        pytest.param(FIRST | {"total": "NaN"}, "total is missing or no number", id="a total that is no number"),
        pytest.param({key: [] for key in FIRST} | {"total": 1}, "without a pass", id="no pass"),
        pytest.param({key: [] for key in FIRST if key != "total"}, "total is missing", id="no pass and no total"),
        pytest.param({key: [] for key in FIRST} | {"total": -1}, "no intervals", id="a negative total"),
        pytest.param({key: [] for key in FIRST} | {"total": math.nan}, "no intervals", id="a total that is not finite"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(tmp_path, times, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, times) / "pp_rank_0.json")


def test_a_cut_file_is_refused(tmp_path):
    path = write(tmp_path, FIRST) / "pp_rank_0.json"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(TraceError, match="is no schedule file"):
        read_trace(path)


def test_a_recorded_pipeline_is_predicted_from_its_other_steps(traces):
    recording = Recording.of(load_run(traces / "primus" / "pp8", cache=False))
    for step, step_ns in recording.step_times().select("step", "step_ns")[1::6].iter_rows():
        assert replay(build_graph(recording, step)).step_ns == step_ns
    scored = mechanistic(recording, range(3, 9)).select(pl.col("error", "null_error", "no_joins_error").abs().mean())
    error, null, no_joins = scored.row(0)
    assert error < 0.002
    assert error < null
    assert no_joins > 0.1


def test_a_parse_that_other_files_took_part_in_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LUMOS_NB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    folder.mkdir()
    first = Recording.of(load_run(write(folder, FIRST, LAST))).step_times()["start_ns"]
    second = Recording.of(load_run(write(folder, FIRST, LAST | {"total": 90}))).step_times()["start_ns"]
    assert (second - first).to_list() == [0, 8_000_000]


@pytest.mark.parametrize("second", ["1", "01"])
def test_an_iteration_that_stands_twice_is_refused(tmp_path, second):
    path = tmp_path / "pp_rank_0.json"
    path.write_text(f'{{"1": {json.dumps(FIRST)}, "{second}": {json.dumps(FIRST)}}}')
    with pytest.raises(TraceError, match=r"the key '?1'? stands in it twice"):
        read_trace(path)


def test_a_rank_that_no_pipeline_has_is_refused_at_once(tmp_path):
    path = write(tmp_path, FIRST) / "pp_rank_0.json"
    with pytest.raises(TraceError, match="rank 1099511627776 is beyond"):
        read_trace(path.rename(tmp_path / f"pp_rank_{2**40}.json"))


def test_totals_that_no_int64_of_ns_holds_are_refused(tmp_path):
    path = tmp_path / "pp_rank_0.json"
    path.write_text(json.dumps({str(step): FIRST | {"total": 9e11} for step in range(20)}))
    with pytest.raises(TraceError, match=r"iteration 6 begins 5\.4e\+12 ms after the first"):
        read_trace(path)
