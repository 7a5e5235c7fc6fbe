"""MTIA: its calls and device work follow CUDA's model under other names."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from trace_builder import scaled

from lumos_nb.critical_path import replay
from lumos_nb.graph import Recording, build_graph
from lumos_nb.traces.run import load_run

NAMES = ["hta/mtia_inference_trace/mtia_inference_rank_0.json.gz", "hta/mtia_trace_single_rank/mtia_rank_0.json.gz"]


@pytest.mark.parametrize(
    ("name", "work"),
    [
        (NAMES[0], {"kernel": 73, "gpu_memcpy": 657, "cuda_sync": 37, "cuda_runtime": 823, "mtia_ccp_events": 546}),
        (NAMES[1], {"kernel": 3453, "cuda_runtime": 3453, "mtia_ccp_events": 22361}),
    ],
)
def test_work_that_a_call_issued_has_the_category_of_what_it_is(traces: Path, name: str, work: dict[str, int]) -> None:
    """Events recorded on the device, and requests of its DMA engines that no call issued, keep their own."""
    counts = dict(load_run(traces / name, cache=False).events.group_by("category").len().rows())
    assert {category: n for category, n in counts.items() if category not in ("cpu_op", "user_annotation")} == work


@pytest.mark.parametrize("name", NAMES)
def test_real_traces_replay(traces: Path, name: str) -> None:
    recording = Recording.of(load_run(traces / name, cache=False))
    [measured_ns] = recording.step_times()["step_ns"]
    graph = build_graph(recording)
    assert replay(graph).step_ns == measured_ns
    issued = graph.ops.filter(pl.col("kind").is_in(["kernel", "memcpy", "comm"]))  # gloo's barriers are the operators'
    assert graph.edges.filter(rule="launch").height == issued.height
    assert replay(scaled(graph, cpu=0.5, gap=0.5, launch=0.5)).step_ns < 0.65 * measured_ns


def test_waits_for_events_are_those_that_the_trace_names(traces: Path) -> None:
    graph = build_graph(load_run(traces / NAMES[0], cache=False))
    waits = graph.edges.filter(rule="event")
    assert (waits.height, set(waits["evidence"])) == (37, {"exact"})
