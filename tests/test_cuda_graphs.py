"""Graphs of CUDA and HIP: all the device work of one launch shares the launch's correlation id."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from trace_builder import Trace, graph_of, repeated, scaled, spans, step_us

from lumos_nb.critical_path import replay
from lumos_nb.graph import Recording, build_graph
from lumos_nb.traces.run import load_run


def two_launches(trace: Trace, step: int, at: float) -> None:
    """A graph of three kernels, launched twice in advance; a copy waits for it on the host."""
    for nth in (0, 1):
        correlation = trace.call("cudaGraphLaunch", at + 20 * nth, at + 20 * nth + 10)
        for name, start, end in (("a", 0, 100), ("b", 102, 152), ("c", 160, 190)):
            begin = at + 30 + 200 * nth
            trace.device(name, begin + start, begin + end, correlation=correlation)
    trace.call("cudaDeviceSynchronize", at + 40, at + 430)


def test_kernels_of_a_graph_follow_one_another_as_measured() -> None:
    graph = graph_of(repeated(two_launches), step=2)
    assert spans(graph, "a") == [(1030, 1130), (1230, 1330)]
    assert spans(graph, "c") == [(1190, 1220), (1390, 1420)]
    launches = graph.edges.filter(rule="launch").join(graph.ops.select(dst="op_id", name="name"), on="dst")
    assert sorted(launches["name"]) == ["a", "a", "b", "b", "c", "c"]
    assert step_us(graph) == 1000


@pytest.mark.parametrize(("name", "saved"), [("a", 100), ("c", 30), ("kernel", 180)])
def test_shorter_kernels_bring_what_follows_them_forward(name: str, saved: float) -> None:
    """The gaps between the kernels of a launch stay as they were measured."""
    graph = graph_of(repeated(two_launches), step=2)
    [(_, before)] = spans(graph, "c")[1:]
    [(_, after)] = spans(scaled(graph, {name: 0.5}), "c")[1:]
    assert before - after == pytest.approx(saved, abs=0.01)


def test_a_graph_of_a_real_server(traces: Path) -> None:
    """25 launches of HIP graphs, 361 kernels: the GPU works for 156 of 308 ms, and half as long kernels save half."""
    run = load_run(traces / "tracelens/inference/vllm_prefilldecode_piecewise/graph_execution.json.gz", cache=False)
    recording = Recording.of(run)
    [measured_ns] = recording.step_times()["step_ns"]
    graph = build_graph(recording)
    launches = graph.ops.filter(kind="launch").with_columns(id="op_id").filter(pl.col("name") == "hipGraphLaunch")
    children = graph.edges.filter(pl.col("rule") == "launch").join(launches, left_on="src", right_on="op_id")
    assert (len(launches), len(children)) == (25, 361)
    assert replay(graph).step_ns == measured_ns
    busy_ns = graph.ops.filter(kind="kernel")["dur_ns"].sum()
    saved_ns = measured_ns - replay(scaled(graph, kernel=0.5)).step_ns
    assert saved_ns == pytest.approx(busy_ns / 2, rel=0.01)
