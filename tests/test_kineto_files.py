"""Every real Kineto trace, and one of the installed torch, read as the standard library reads them."""

from __future__ import annotations

import gc
import gzip
import json
import tarfile
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lumos_nb.errors import TraceError, UnsupportedFormat
from lumos_nb.schema import EVENTS
from lumos_nb.traces.kineto import read_kineto
from lumos_nb.traces.trace import Trace
from tests.kineto_notes import accounted_for

KINETO_FILES = [
    "hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "hta/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
    "hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz",
    "hta/critical_path/cuda_event_sync/event_sync_trace.json.gz",
    "hta/critical_path/end_to_end/simple_add/input/trace.json.gz",
    "hta/critical_path/end_to_end/simple_add/output/overlaid_critical_path_trace.json.gz",
    "hta/cupti_profiler/benchmark_result_924719_1679055439_trace.json.gz",
    "hta/df_index_resolver/df_index_resolver.json.gz",
    "hta/distributed_info_unavailable/distributed_info_not_found.json.gz",
    "hta/execution_trace/benchmark_simple_add_trace.json.gz",
    "hta/large_integer_trace/rank-70.Mar_25_20_48_12.2861.pt.trace.json.gz",
    "hta/mtia_inference_trace/mtia_inference_rank_0.json.gz",
    "hta/mtia_trace_single_rank/mtia_rank_0.json.gz",
    "hta/nccl_parser_config/nccl_data.json.gz",
    "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "hta/timeline_analysis/sampled_rank-0.json.gz",
    "hta/trace_compare/base/base.json.gz",
    "hta/trace_diff/control/control.json.gz",
    "hta/trace_file_list/inference_rank_1.json.gz",
    "hta/trace_filter/sampled_rank-1.json.gz",
    "hta/triton_example/triton_example.json.gz",
    "kineto/docs/traces/after_fix_trace.json",
    "kineto/tb_plugin/samples/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz",
    "kineto/tb_plugin/test/gpu_metrics_input.json",
    "param/linear_kineto.json.gz",
    "particle_transformer/gpu_working_chrome_trace.json.gz",
    "torchrec/resnet18/rank-0.pt.trace.json",
    "torchrec/resnet18/rank-1.pt.trace.json",
    "torchrec/sst_long_a2a_optimizer_2/rank-2.pt.trace.json.gz",
    "torchrec/sst_long_a2a_optimizer_3/rank-0.pt.trace.json.gz",
    "torchrec/sst_long_a2a_optimizer_4/rank-3.pt.trace.json.gz",
    "tracelens/b200/eager_trace.json.gz",
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/h100/google_owlv2-large-patch14-ensemble__1016001.json.gz",
    "tracelens/inference/sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz",
    "tracelens/inference/vllm_decode_full/capture_traces/graph_capture_rank_0.1773709742341309550.pt.trace.json.gz",
    "tracelens/inference/vllm_prefilldecode_piecewise/graph_execution.json.gz",
    "tracelens/inference/xdit_sd_3.5/profile_trace_rank_0.json.gz",
    "tracelens/mi210/gpu_only_trace/gpu_only_trace.json.gz",
    "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "tracelens/mi300/google_owlv2-large-patch14-ensemble__1016001.json.gz",
    "tracelens/mi300/resnet_act_checkpoint.json.gz",
    "tracelens/torch_compile_triton/trace.json.gz",
]

CHROME_FILES = ["aiu/allreduce_tp4.json", "composer/rank_0.trace.json", "pippy/local_test_forward_hf_gpt2.json.gz"]
"""Bare lists of events; the first two with beginnings and ends."""


def reference(path: Path) -> dict[str, Any]:
    """The file by the standard library, every number with a point or an exponent left as text."""
    raw = path.read_bytes()
    gc.disable()  # a collector that looks at millions of dicts as they are made takes most of the time
    try:
        return json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw, parse_float=str)
    finally:
        gc.enable()


def assert_equals_reference(kineto: Trace, trace: dict[str, Any]) -> None:
    events = trace.pop("traceEvents")
    assert kineto.metadata["event_count"] == len(events) == accounted_for(kineto)
    assert trace.keys() == kineto.metadata.keys() - {"processes", "threads", "event_count"}
    assert kineto.notes.filter(~pl.col("what").str.starts_with("dropped")).is_empty()
    assert EVENTS.check(kineto.events).columns == list(EVENTS.columns)
    base = trace.get("baseTimeNanoseconds", 0)
    columns = ("event_id", "name", "start_ns", "dur_ns", "correlation", "external_id", "args")
    rows = kineto.events.select(columns).gather_every(max(1, len(kineto.events) // 5000)).rows()
    for event_id, name, start_ns, dur_ns, correlation, external_id, args in rows:
        event = events[event_id]
        given = event.get("args", {})
        expected = (
            event["name"],
            base + int(Decimal(event["ts"]) * 1000),
            int(Decimal(event.get("dur", 0)) * 1000),
            given.get("correlation"),
            given.get("External id", given.get("external id")),
        )
        assert (name, start_ns, dur_ns, correlation, external_id) == expected
        assert json.loads(args, parse_float=str) == given


@pytest.mark.parametrize("name", KINETO_FILES)
def test_every_real_trace_is_read_as_the_standard_library_reads_it(traces: Path, name: str) -> None:
    assert_equals_reference(read_kineto(traces / name), reference(traces / name))


def test_the_list_of_real_traces_is_complete(traces: Path) -> None:
    """What reads as a trace is in one of the two lists, or is a further rank of a run whose other ranks are."""
    readable = []
    for path in sorted(traces.rglob("*.json*")):
        name = path.relative_to(traces).as_posix()
        if ".tar" in name or path.stat().st_size > 500_000 or name.startswith("torchrec/sst"):
            continue
        try:
            read_kineto(path)
        except TraceError:
            continue
        readable.append(name)
    assert set(readable) <= {*KINETO_FILES, *CHROME_FILES}
    assert len(readable) >= 20


def test_eight_ranks_of_one_dlrm_run(traces: Path, tmp_path: Path) -> None:
    with tarfile.open(traces / "param" / "dlrm_kineto.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    files = sorted(tmp_path.rglob("*.json"))
    assert len(files) == 8
    for path in files[::3]:
        assert_equals_reference(read_kineto(path), reference(path))


# --- the current PyTorch ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_profile_of_the_installed_torch_is_read_whole(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        weight = torch.ones(64, 64, requires_grad=True)
        before_ns = time.time_ns()
        with torch.profiler.profile(record_shapes=True, with_stack=True) as profiler:
            for _ in range(3):
                with torch.profiler.record_function("my step"):
                    (weight @ weight).sum().backward()
                dist.all_reduce(weight.grad)
                profiler.step()
        after_ns = time.time_ns()
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    finally:
        dist.destroy_process_group()
    kineto = read_kineto(tmp_path / "trace.json")
    assert_equals_reference(kineto, reference(tmp_path / "trace.json"))
    assert kineto.metadata["distributedInfo"]["world_size"] == 1
    events = kineto.events
    assert {"cpu_op", "user_annotation", "python_function"} <= set(events["category"])
    assert events.filter(pl.col("name") == "my step", pl.col("category") == "user_annotation").height == 3
    assert events.filter(pl.col("name").str.contains("all_?reduce")).height >= 3
    forward = set(events.filter(pl.col("name") == "aten::mm")["sequence"].drop_nulls())
    assert forward & set(events.filter(pl.col("name") == "MmBackward0")["sequence"])
    steps = events.filter(pl.col("name") == "my step")
    ends_ns = steps["start_ns"] + steps["dur_ns"]
    assert before_ns - 1_000_000 <= steps["start_ns"].min() < ends_ns.max() <= after_ns + 1_000_000


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hta/execution_trace/benchmark_simple_add_et.json.gz", "execution trace"),
        ("param/1.1.0-chakra.0.0.4/resnet_2gpu_et.json.gz", "execution trace"),
        ("astra-sim/custom_ring_allreduce_8npus_1MB/custom_allreduce.0.et", "Chakra"),
        ("nsys/h100_2gpu_1s.sqlite.gz", "format nsys"),
        ("straggler/trace-ST.parquet", "format timeline"),
        ("straggler/timeline-ST.json.gz", "format timeline"),
        ("param/dlrm_kineto.tar.gz", "tar archive"),
        ("tracelens/rocprof/908_results.json.gz", "rocprofiler"),
        ("primus/pp8/config.json", "no profiler trace"),
    ],
)
def test_real_files_of_other_formats_are_refused(traces: Path, name: str, says: str) -> None:
    with pytest.raises(UnsupportedFormat, match=says):
        read_kineto(traces / name)
