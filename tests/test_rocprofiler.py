"""JSON of rocprofiler-sdk: kernels, HIP and HSA calls, copies, markers, agents, damage."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lumos_nb.critical_path import replay
from lumos_nb.errors import GraphError, TraceError, UnsupportedFormat
from lumos_nb.graph import build_graph
from lumos_nb.traces.formats import read_trace
from lumos_nb.traces.nsys import read_nsys
from lumos_nb.traces.rocprofiler import read_rocprofiler
from lumos_nb.traces.run import load_run
from lumos_nb.traces.trace import Trace

KINDS: list[dict[str, Any]] = [
    {"kind": "NONE", "operations": []},
    {"kind": "HIP_RUNTIME_API", "operations": ["hipLaunchKernel", "hipMemcpyAsync", "hipDeviceSynchronize"]},
    {"kind": "MEMORY_COPY", "operations": ["MEMORY_COPY_NONE", "MEMORY_COPY_DEVICE_TO_HOST"]},
    {"kind": "HSA_CORE_API", "operations": ["hsa_init"]},
    {"kind": "MARKER_CORE_RANGE_API", "operations": ["roctxThreadRangeA"]},
    {"kind": "RCCL_API", "operations": ["ncclAllReduce"]},
]
CPU, FIRST, SECOND = 100, 101, 102
AGENTS = [
    {"id": {"handle": CPU}, "type": 1},
    *({"id": {"handle": h}, "type": 2, "name": "gfx"} for h in (FIRST, SECOND)),
]


def record(
    start: Any, end: Any, correlation: int = 0, kind: int = 0, operation: int = 0, **more: Any
) -> dict[str, Any]:
    own = {
        "kind": kind,
        "operation": operation,
        "thread_id": 9,
        "correlation_id": {"internal": correlation, "external": 0},
    }
    return own | {"start_timestamp": start, "end_timestamp": end} | more


def kernel(start: Any, end: Any, correlation: int, agent: int = SECOND, stream: int | None = 4) -> dict[str, Any]:
    dispatch = {"agent_id": {"handle": agent}, "queue_id": {"handle": 18}, "kernel_id": 7, "grid_size": {"x": 64}}
    return record(
        start, end, correlation, dispatch_info=dispatch, **({"stream_id": {"handle": stream}} if stream else {})
    )


def process(**records: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "metadata": {"pid": 5},
        "agents": AGENTS,
        "kernel_symbols": [{"kernel_id": 7, "formatted_kernel_name": "gemm(float*)", "kernel_name": "_Z4gemm"}],
        "strings": {"buffer_records": KINDS, "marker_api": [{"key": 31, "value": "forward"}]},
        "buffer_records": records,
        "callback_records": {"counter_collection": []},
    }


def write(folder: Path, *processes: dict[str, Any]) -> Path:
    path = folder / "5_results.json"
    path.write_text(json.dumps({"rocprofiler-sdk-tool": processes}, indent=1))
    return path


def read(folder: Path, **records: list[dict[str, Any]]) -> Trace:
    return read_rocprofiler(write(folder, process(**records)))


def test_calls_and_work_are_as_kineto_has_them(tmp_path: Path) -> None:
    ends = {"dst_agent_id": {"handle": CPU}, "src_agent_id": {"handle": SECOND}}
    trace = read(
        tmp_path,
        kernel_dispatch=[kernel(30, 40, 11), kernel(42, 43, 13, stream=None), kernel(45, 46, 14, agent=FIRST)],
        memory_copy=[record(50, 60, 12, kind=2, operation=1, bytes=64, **ends)],
        hip_api=[
            record(20, 25, 11, kind=1),
            record(25, 61, 12, kind=1, operation=1),
            record(61, 62, 15, kind=1, operation=9),
        ],
        hsa_api=[record(1, 2, 1, kind=3)],
        rccl_api=[record(2, 3, 2, kind=5)],
        marker_api=[record(10, 62, 31, kind=4), record(62, 63, 32, kind=4)],
    )
    columns = ("category", "name", "thread", "device", "stream", "start_ns", "dur_ns", "correlation")
    assert trace.events.select(columns).rows() == [
        ("kernel", "gemm(float*)", None, 1, 4, 30, 10, 11),
        ("kernel", "gemm(float*)", None, 1, 18, 42, 1, 13),
        ("kernel", "gemm(float*)", None, 0, 4, 45, 1, 14),
        ("gpu_memcpy", "Memcpy DtoH", None, 1, -1, 50, 10, 12),
        ("cuda_runtime", "hipLaunchKernel", 9, None, None, 20, 5, 11),
        ("cuda_runtime", "hipMemcpyAsync", 9, None, None, 25, 36, 12),
        ("cuda_runtime", "hip_api 9", 9, None, None, 61, 1, 15),
        ("cuda_driver", "hsa_init", 9, None, None, 1, 1, 1),
        ("user_annotation", "ncclAllReduce", 9, None, None, 2, 1, 2),
        ("user_annotation", "forward", 9, None, None, 10, 52, 31),
        ("user_annotation", "roctxThreadRangeA", 9, None, None, 62, 1, 32),
    ]
    assert trace.events["event_id"].to_list() == list(range(11)) == list(range(trace.metadata["event_count"]))
    assert json.loads(trace.events["args"][3])["bytes"] == 64
    assert trace.metadata["deviceProperties"][1] == {"id": 1, "name": "gfx", "numSms": 0}
    assert trace.notes.is_empty()


def test_every_process_of_a_file_is_a_rank(tmp_path: Path) -> None:
    first, second = process(kernel_dispatch=[kernel(1, 2, 3)]), process(kernel_dispatch=[kernel(2, 4, 3)])
    loaded = load_run(write(tmp_path, first, second), cache=False)
    assert loaded.events.select("rank", "event_id", "dur_ns").rows() == [(0, 0, 1), (1, 0, 2)]


def test_what_is_no_event_is_counted(tmp_path: Path) -> None:
    kernels = [
        kernel(1, 2, 3),
        kernel(9, 5, 4),
        kernel(None, 5, 5),
        kernel(2**62, 2**62 + 9, 6),
        kernel(1, 2, 7, agent=CPU),
    ]
    trace = read(tmp_path, kernel_dispatch=kernels, scratch_memory=[record(1, 2)] * 3, pc_sample_host_trap=[])
    assert len(trace.events) == 1
    assert trace.notes.select("what", "count", "reason").rows() == [
        ("dropped kernel", 1, "a negative duration"),
        ("dropped kernel", 2, "no time, or an absurd one"),
        ("dropped kernel", 1, "of no GPU of this node"),
        ("not read scratch_memory", 3, "a list of which no event is made"),
    ]


def test_calls_launch_their_kernels(tmp_path: Path) -> None:
    calls = [record(20_000 * i, 20_000 * i + 5000, i, kind=1) for i in range(1, 9)]
    waits = [record(170_000, 240_000, 99, kind=1, operation=2)]
    kernels = [kernel(20_000 * i + 8000, 20_000 * i + 26_000, i) for i in range(1, 9)]
    graph = build_graph(load_run(write(tmp_path, process(hip_api=calls + waits, kernel_dispatch=kernels)), cache=False))
    rules = dict(graph.edges.group_by("rule").len().rows())
    assert rules["launch"] == 8
    assert rules["sync"] == 1
    assert replay(graph).step_ns == 8 * 20_000 + 26_000 - 20_000


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text[: len(text) // 2], "Input data was truncated"),
        (lambda text: text.replace(b'"start_timestamp": 1', b'"start_timestamp": {}', 1), "5_results"),
        (lambda text: text.replace(b'"kernel_id": 7', b'"kernel_id": "7"', 1), r"kernel_symbols\[0\]\.kernel_id"),
        (lambda text: text.replace(b"gemm", b"g\xffmm"), "invalid utf-8|Invalid UTF-8|codec"),
        (lambda text: gzip.compress(text)[:-20], "the gzip data ends in the middle"),
    ],
    ids=["cut", "an object for a time", "text for a number", "bad UTF-8", "cut when compressed"],
)
def test_a_damaged_file_is_an_error_that_says_where(tmp_path: Path, damage: Any, says: str) -> None:
    path = write(tmp_path, process(kernel_dispatch=[kernel(1, 2, 3)]))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(path)
    assert "5_results.json" in str(caught.value)


@pytest.mark.parametrize("read", [read_rocprofiler, read_nsys])
def test_a_file_of_another_format_is_refused(tmp_path: Path, read: Callable[[Path], Trace]) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(UnsupportedFormat, match="is of the format kineto; read_trace takes it"):
        read(path)


def test_a_real_file_is_read_as_the_standard_library_reads_it(traces: Path) -> None:
    path = traces / "tracelens/rocprof/908_results.json.gz"
    trace = read_trace(path)
    [tool] = json.loads(gzip.decompress(path.read_bytes()))["rocprofiler-sdk-tool"]
    dispatches = tool["buffer_records"]["kernel_dispatch"]
    names = {symbol["kernel_id"]: symbol["formatted_kernel_name"] for symbol in tool["kernel_symbols"]}
    rows = trace.events.select("name", "stream", "start_ns", "dur_ns", "correlation").rows()
    assert len(rows) == len(dispatches) == trace.metadata["event_count"] == 43915
    for row, said in list(zip(rows, dispatches, strict=True))[::97]:
        start, end = said["start_timestamp"], said["end_timestamp"]
        where = (said["stream_id"]["handle"], start, end - start, said["correlation_id"]["internal"])
        assert row == (names[said["dispatch_info"]["kernel_id"]], *where)
    assert set(trace.events["device"]) == {0}
    assert trace.notes.is_empty()


def test_kernels_without_calls_have_no_step_to_be_in(traces: Path) -> None:
    run = load_run(traces / "tracelens/rocprof/908_results.json.gz", cache=False)
    with pytest.raises(GraphError, match="none of the recording's 43915 device ops has its launch in the trace"):
        build_graph(run)
    assert run.events.filter(pl.col("dur_ns") > 0).height > 43000


def test_records_of_callbacks_are_named_as_not_read(tmp_path: Path) -> None:
    both = process(hip_api=[record(1, 2)]) | {"callback_records": {"hip_api": [record(3, 4), record(5, 6)]}}
    trace = read_rocprofiler(write(tmp_path, both))
    assert (len(trace.events), trace.notes.select("what", "count").rows()) == (1, [("not read hip_api", 2)])


def test_a_file_without_a_process_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"results\.json holds no process"):
        load_run(write(tmp_path))


@pytest.mark.parametrize("key", [10**40, 2**64, -(2**63) - 1])
def test_numbers_that_no_record_can_have_name_nothing(tmp_path: Path, key: int) -> None:
    odd = process(kernel_dispatch=[kernel(30, 40, 11)])
    odd["strings"]["marker_api"].append({"key": key, "value": "beyond"})
    odd["kernel_symbols"].append({"kernel_id": key, "formatted_kernel_name": "beyond", "kernel_name": "beyond"})
    assert read_rocprofiler(write(tmp_path, odd)).events["name"].to_list() == ["gemm(float*)"]
