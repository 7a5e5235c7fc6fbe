"""Every file of the real traces: its format and how many events it has, or the one error that it ends in.

The counts were made with json, sqlite3 and pyarrow: records of `traceEvents` or of the list, rows of the tables that
hold events, forwards and backwards of a schedule.
"""

# ruff: noqa: E501  (a file's name must be in one piece)

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import polars as pl
import pytest

from lumos_nb.errors import LumosError, RunError, TraceError, UnsupportedFormat
from lumos_nb.schema import EVENTS
from lumos_nb.traces.files import ARCHIVES
from lumos_nb.traces.formats import format_of, read_trace
from lumos_nb.traces.run import load_run

FILES = """
nothing           -  PROVENANCE.tsv
nothing           -  README.md
kineto           56  aiu/allreduce_tp4.json
Chakra            -  astra-sim/ASTRA-sim-2.0/resnet_dp.tar
Chakra            -  astra-sim/custom_ring_allreduce_8npus_1MB/custom_allreduce.0.et
Chakra            -  astra-sim/custom_ring_allreduce_8npus_1MB/custom_allreduce.1.et
Chakra            -  astra-sim/custom_ring_allreduce_8npus_1MB/custom_allreduce.2.et
Chakra            -  astra-sim/custom_ring_allreduce_8npus_1MB/custom_allreduce.3.et
Chakra            -  astra-sim/custom_ring_allreduce_8npus_1MB/custom_allreduce.4.et
Chakra            -  astra-sim/custom_ring_allreduce_8npus_1MB/custom_allreduce.5.et
Chakra            -  astra-sim/custom_ring_allreduce_8npus_1MB/custom_allreduce.6.et
Chakra            -  astra-sim/custom_ring_allreduce_8npus_1MB/custom_allreduce.7.et
ET                -  astra-sim/et_plus/dlrm_eg_0_plus.json.gz
ET                -  astra-sim/et_plus/dlrm_eg_1_plus.json.gz
ET                -  astra-sim/et_plus/dlrm_eg_2_plus.json.gz
ET                -  astra-sim/et_plus/dlrm_eg_3_plus.json.gz
ET                -  astra-sim/et_plus/dlrm_eg_4_plus.json.gz
ET                -  astra-sim/et_plus/dlrm_eg_5_plus.json.gz
ET                -  astra-sim/et_plus/dlrm_eg_6_plus.json.gz
ET                -  astra-sim/et_plus/dlrm_eg_7_plus.json.gz
ET                -  astra-sim/megatron-tp8/megatron_et_0.json.gz
ET                -  astra-sim/megatron-tp8/megatron_et_1.json.gz
ET                -  astra-sim/megatron-tp8/megatron_et_2.json.gz
ET                -  astra-sim/megatron-tp8/megatron_et_3.json.gz
ET                -  astra-sim/megatron-tp8/megatron_et_4.json.gz
ET                -  astra-sim/megatron-tp8/megatron_et_5.json.gz
ET                -  astra-sim/megatron-tp8/megatron_et_6.json.gz
ET                -  astra-sim/megatron-tp8/megatron_et_7.json.gz
ET                -  chakra/1.0.2-chakra.0.0.4.tgz
Chakra            -  chakra/feeder_tests_trace.tar.gz
Chakra            -  chakra/json_trace.tar.gz
kineto          772  composer/rank_0.trace.json
kineto          220  hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz
kineto           30  hta/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz
kineto         1408  hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz
kineto           92  hta/critical_path/cuda_event_sync/event_sync_trace.json.gz
kineto         1348  hta/critical_path/end_to_end/simple_add/input/trace.json.gz
kineto         1732  hta/critical_path/end_to_end/simple_add/output/overlaid_critical_path_trace.json.gz
kineto         4222  hta/cupti_profiler/benchmark_result_924719_1679055439_trace.json.gz
kineto       216092  hta/df_index_resolver/df_index_resolver.json.gz
kineto         2467  hta/distributed_info_unavailable/distributed_info_not_found.json.gz
ET                -  hta/execution_trace/benchmark_simple_add_et.json.gz
kineto          111  hta/execution_trace/benchmark_simple_add_trace.json.gz
kineto            2  hta/large_integer_trace/rank-70.Mar_25_20_48_12.2861.pt.trace.json.gz
kineto        16158  hta/mtia_inference_trace/mtia_inference_rank_0.json.gz
kineto       455739  hta/mtia_trace_single_rank/mtia_rank_0.json.gz
kineto        40573  hta/nccl_parser_config/nccl_data.json.gz
kineto        68692  hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz
kineto         4855  hta/timeline_analysis/sampled_rank-0.json.gz
kineto           33  hta/trace_compare/base/base.json.gz
kineto       109123  hta/trace_diff/control/control.json.gz
kineto           54  hta/trace_file_list/inference_rank_1.json.gz
kineto         4720  hta/trace_filter/sampled_rank-1.json.gz
kineto           71  hta/triton_example/triton_example.json.gz
kineto           75  kineto/docs/traces/after_fix_trace.json
kineto        75718  kineto/tb_plugin/samples/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz
kineto          340  kineto/tb_plugin/test/gpu_metrics_input.json
nsys           5951  nsys/cloverleaf-nsys/perlmutter-cloverleaf-cuda.sqlite.gz
nsys          27190  nsys/h100_2gpu_1s.sqlite.gz
ET                -  param/1.0.3-chakra.0.0.4/resnet_1gpu_et.json.gz
ET                -  param/1.1.0-chakra.0.0.4/resnet_2gpu_et.json.gz
archive       26538  param/dlrm_kineto.tar.gz
ET                -  param/dlrm_pytorch_et.tar.gz
ET                -  param/hf_GPT2_et.json.tar.gz
ET                -  param/linear_et.json.gz
kineto        86859  param/linear_kineto.json.gz
ET                -  param/pt2_et.json.tar.gz
kineto         7129  particle_transformer/gpu_working_chrome_trace.json.gz
kineto         2304  pippy/local_test_forward_hf_gpt2.json.gz
nothing           -  primus/pp8/config.json
schedule        640  primus/pp8/pp_rank_0.json
schedule        640  primus/pp8/pp_rank_1.json
schedule        640  primus/pp8/pp_rank_2.json
schedule        640  primus/pp8/pp_rank_3.json
schedule        640  primus/pp8/pp_rank_4.json
schedule        640  primus/pp8/pp_rank_5.json
schedule        640  primus/pp8/pp_rank_6.json
schedule        640  primus/pp8/pp_rank_7.json
timeline     117380  straggler/ideal-timeline-AR.json.gz
timeline       6866  straggler/ideal-timeline-ST.json.gz
nothing           -  straggler/meta-AR.yaml
nothing           -  straggler/meta-ST.yaml
nothing           -  straggler/result-AR.json
nothing           -  straggler/result-ST.json
timeline     117380  straggler/timeline-AR.json.gz
timeline       6866  straggler/timeline-ST.json.gz
timeline     117216  straggler/trace-AR.parquet
timeline       6784  straggler/trace-ST.parquet
kineto         5082  torchrec/resnet18/rank-0.pt.trace.json
kineto         5072  torchrec/resnet18/rank-1.pt.trace.json
kineto         9426  torchrec/sst_long_a2a_optimizer_2/rank-0.pt.trace.json.gz
kineto         9428  torchrec/sst_long_a2a_optimizer_2/rank-1.pt.trace.json.gz
kineto         9356  torchrec/sst_long_a2a_optimizer_2/rank-2.pt.trace.json.gz
kineto         9428  torchrec/sst_long_a2a_optimizer_2/rank-3.pt.trace.json.gz
kineto         9428  torchrec/sst_long_a2a_optimizer_3/rank-0.pt.trace.json.gz
kineto         9426  torchrec/sst_long_a2a_optimizer_3/rank-1.pt.trace.json.gz
kineto         9382  torchrec/sst_long_a2a_optimizer_3/rank-2.pt.trace.json.gz
kineto         9428  torchrec/sst_long_a2a_optimizer_3/rank-3.pt.trace.json.gz
kineto         9850  torchrec/sst_long_a2a_optimizer_4/rank-0.pt.trace.json.gz
kineto         9852  torchrec/sst_long_a2a_optimizer_4/rank-1.pt.trace.json.gz
kineto         9832  torchrec/sst_long_a2a_optimizer_4/rank-2.pt.trace.json.gz
kineto         9852  torchrec/sst_long_a2a_optimizer_4/rank-3.pt.trace.json.gz
kineto        24656  tracelens/b200/eager_trace.json.gz
kineto        18221  tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz
kineto       132152  tracelens/h100/google_owlv2-large-patch14-ensemble__1016001.json.gz
kineto        60315  tracelens/inference/sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz
kineto       131243  tracelens/inference/vllm_decode_full/capture_traces/graph_capture_rank_0.1773709742341309550.pt.trace.json.gz
kineto        19289  tracelens/inference/vllm_prefilldecode_piecewise/graph_execution.json.gz
kineto       239093  tracelens/inference/xdit_sd_3.5/profile_trace_rank_0.json.gz
kineto         2443  tracelens/mi210/gpu_only_trace/gpu_only_trace.json.gz
kineto        18090  tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz
kineto       130780  tracelens/mi300/google_owlv2-large-patch14-ensemble__1016001.json.gz
kineto        56451  tracelens/mi300/resnet_act_checkpoint.json.gz
rocprofiler   43915  tracelens/rocprof/908_results.json.gz
kineto          246  tracelens/torch_compile_triton/trace.json.gz
"""

TABLE = [(kind, count, name) for kind, count, name in (line.split() for line in FILES.strip().splitlines())]

ERRORS: dict[str, tuple[type[LumosError], str]] = {
    "ET": (UnsupportedFormat, r"a PyTorch execution trace: .*ln\.load_execution_trace"),
    "Chakra": (UnsupportedFormat, r"a Chakra trace.*: .*ln\.chakra"),
    "nothing": (TraceError, "no profiler trace|is no JSON object"),
}
"""What a file that holds no events is -> the error that it ends in."""


def test_no_file_is_missing_in_the_table(traces: Path) -> None:
    found = {path.relative_to(traces).as_posix() for path in traces.rglob("*") if path.is_file()}
    assert found == {name for _, _, name in TABLE}


@pytest.mark.parametrize(("kind", "count", "name"), TABLE, ids=[name for _, _, name in TABLE])
def test_every_file_has_its_events_or_its_error(traces: Path, kind: str, count: str, name: str) -> None:
    path = traces / name
    if kind in ERRORS and not name.endswith(ARCHIVES):
        error, says = ERRORS[kind]
        with pytest.raises(error, match=says):
            read_trace(path)
    elif kind in ERRORS:
        with pytest.raises(RunError, match=ERRORS[kind][1]):
            load_run(path, cache=False)
    elif kind == "archive":
        assert load_run(path, cache=False).ranks["events"].sum() == int(count)
    else:
        trace = read_trace(path)
        assert format_of(path) == kind
        assert trace.metadata["event_count"] == int(count)
        assert len(EVENTS.check(trace.events)) > 0
        assert set(trace.events["rank"]) == set(trace.metadata.get("ranks", trace.events["rank"]))


@pytest.mark.parametrize(
    "name",
    [
        "aiu/allreduce_tp4.json",
        "composer/rank_0.trace.json",
        "hta/critical_path/cuda_event_sync/event_sync_trace.json.gz",
        "hta/mtia_inference_trace/mtia_inference_rank_0.json.gz",
        "kineto/tb_plugin/test/gpu_metrics_input.json",
        "nsys/h100_2gpu_1s.sqlite.gz",
        "param/dlrm_kineto.tar.gz",
        "pippy/local_test_forward_hf_gpt2.json.gz",
        "primus/pp8",
        "straggler/timeline-ST.json.gz",
        "straggler/trace-ST.parquet",
        "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
        "tracelens/rocprof/908_results.json.gz",
    ],
)
def test_every_format_goes_to_pandas_parquet_and_perfetto(traces: Path, tmp_path: Path, name: str) -> None:
    run = load_run(traces / name, cache=False)
    frame = run.to_pandas()
    assert frame["dur_ns"].sum() == run.events["dur_ns"].sum()
    assert frame["thread"].isna().sum() == run.events["thread"].null_count()
    assert pl.read_parquet(run.to_parquet(tmp_path) / "events.parquet").equals(run.events)
    picture = msgspec.json.decode(gzip.decompress(run.to_perfetto(tmp_path / "run.json.gz").read_bytes()))
    slices = [event for event in picture["traceEvents"] if event["ph"] == "X"]
    assert sorted(event["name"] for event in slices) == sorted(run.events["name"])
    assert sum(round(event["dur"] * 1000) for event in slices) == run.events["dur_ns"].sum()
    assert picture["baseTimeNanoseconds"] == run.events["start_ns"].min()
    processes = {event["pid"] for event in slices}
    assert len(processes) == len(run.ranks)
