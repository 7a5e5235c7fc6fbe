"""How much of the kernels' time has a family, and how much has sizes, in real traces and in the bundled runs.

    python -m benchmarks.kernel_names            # all of ../shared/traces that hold device work, and the bundled runs
    python -m benchmarks.kernel_names --unknown  # the names that have none, longest first

The rules of `costs/names.py` were written with the names of these very traces in view: the shares say that they are
complete for them, not what they would be on others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import polars as pl

import lumos_nb as ln
from benchmarks import TRACES
from lumos_nb.costs.names import FALLBACK, UNKNOWN, kernel_families
from lumos_nb.costs.samples import kernel_samples, undecoded

TRAINING = {
    "hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz": "MI250, toy",
    "hta/critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz": "A100, AlexNet",
    "hta/df_index_resolver/df_index_resolver.json.gz": "V100, SGD, 2 ranks",
    "hta/nccl_parser_config/nccl_data.json.gz": "A100, DDP, convolutions",
    "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz": "V100, DDP, convolutions",
    "hta/timeline_analysis/sampled_rank-0.json.gz": "A100, recommender (sampled)",
    "hta/trace_diff/control/control.json.gz": "A100, recommender",
    "hta/trace_filter/sampled_rank-1.json.gz": "A100, recommender (sampled)",
    "kineto/tb_plugin/samples/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz": "V100, ResNet-50, 2021",
    "param/dlrm_kineto.tar.gz": "V100, DLRM, 8 ranks",
    "param/linear_kineto.json.gz": "RTX 2080 Ti, linear layers",
    "torchrec/resnet18": "V100, 2 ranks",
    "torchrec/sst_long_a2a_optimizer_2": "V100, TorchRec, 4 ranks",
    "torchrec/sst_long_a2a_optimizer_3": "V100, TorchRec, 4 ranks",
    "torchrec/sst_long_a2a_optimizer_4": "V100, TorchRec, 4 ranks",
    "tracelens/mi210/gpu_only_trace/gpu_only_trace.json.gz": "MI210, ResNet",
    "tracelens/mi300/resnet_act_checkpoint.json.gz": "MI300X, ResNet, DDP",
    "tracelens/rocprof/908_results.json.gz": "MI350X, BERT-like (rocprofiler)",
}
OTHERS = {
    "particle_transformer/gpu_working_chrome_trace.json.gz": "A100, inference",
    "tracelens/b200/eager_trace.json.gz": "B200, vLLM decode",
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": "H100, Qwen forward",
    "tracelens/h100/google_owlv2-large-patch14-ensemble__1016001.json.gz": "H100, OWLv2 forward",
    "tracelens/inference/sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz": "MI300X, SGLang",
    "tracelens/inference/vllm_prefilldecode_piecewise/graph_execution.json.gz": "vLLM, CUDA graphs",
    "tracelens/inference/xdit_sd_3.5/profile_trace_rank_0.json.gz": "MI300X, SD 3.5, Inductor",
    "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": "MI300X, Qwen forward",
    "tracelens/mi300/google_owlv2-large-patch14-ensemble__1016001.json.gz": "MI300X, OWLv2 forward",
    "tracelens/torch_compile_triton/trace.json.gz": "MI300X, torch.compile",
}


def coverage(run: ln.Run) -> dict[str, float]:
    """Shares of the time of a run's kernels: with a `family` by name, by the `fallback`, and with all `sizes`.

    `family` counts device kernels, copies, fills and communication; `sizes` those that are priced as kernels (no
    communication), on a CPU the time of all operators.
    """
    device = run.events.filter(pl.col("category").is_in(["kernel", "gpu_memcpy", "gpu_memset"]))
    families = device.join(kernel_families(device["name"]), on="name", how="left")
    samples = kernel_samples(run)
    time = pl.col("time_us")
    measured = device if device.height else samples.with_columns(dur_ns=time * 1e3)
    return {
        "time_ms": measured.select(pl.col("dur_ns").sum()).item() / 1e6,
        "family": _share(families, pl.col("family") != UNKNOWN, pl.col("dur_ns")),
        "fallback": _share(families, pl.col("fallback") == FALLBACK, pl.col("dur_ns")),
        "sizes": _share(samples, pl.col("why").is_null(), time),
        "sized_ms": samples.select(time.filter(pl.col("why").is_null()).sum()).item() / 1e3,
    }


def _share(frame: pl.DataFrame, which: pl.Expr, time: pl.Expr) -> float:
    return float(frame.select(time.filter(which).sum() / time.sum()).item() or 0.0)


def _runs() -> Iterator[tuple[str, str, str, Path]]:
    for kind, listed in (("training", TRAINING), ("other", OTHERS)):
        yield from ((kind, name, what, TRACES / name) for name, what in listed.items() if (TRACES / name).exists())
    bundled = ln.datasets.describe().filter(pl.col("kind") == "run")
    yield from (("bundled", name, what, ln.datasets.path(name)) for name, what in bundled.select("name", "what").rows())


def main() -> None:
    """Print the shares, or the names and operators that have none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unknown", action="store_true", help="list what has no family or no sizes instead")
    listing = parser.parse_args().unknown
    if not listing:
        print(f"{'kind':9s}{'run':34s}{'time ms':>9s}{'family':>9s}{'fallback':>10s}{'sizes':>8s}{'sized ms':>10s}")
    for kind, name, what, path in _runs():
        run = ln.load_run(path)
        if listing:
            print(kind, name, undecoded(kernel_samples(run)).head(12), sep="\n")
            continue
        row = coverage(run)
        named = f"{row['family']:9.2%}{row['fallback']:10.2%}" if kind != "bundled" else f"{'':19s}"
        shares = f"{named}{row['sizes']:8.1%}{row['sized_ms']:10.1f}"
        print(f"{kind:9s}{(what if kind != 'bundled' else name):34s}{row['time_ms']:9.1f}{shares}", flush=True)


if __name__ == "__main__":
    main()
