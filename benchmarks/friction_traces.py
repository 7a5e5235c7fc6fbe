"""Device work of other people's GPU traces as the samples that `frictions` and `friction_jitter` measure.

A kernel is one by its rank, name, grid, block and its operator's shapes; a repeat of it also has its call site and
place there. Only kernels count whose work does not depend on the data; and of those that take LEAST_US or more, since
older profilers round to whole microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks import TRACES
from lumos_nb.costs.names import kernel_families
from lumos_nb.ops import build_ops
from lumos_nb.schema import DEVICE_KINDS
from lumos_nb.traces.run import Run, load_run
from lumos_nb.workloads.contention import overlap_ns

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording: its GPU, where it lies, and the job that it is of, of which there may be several."""

    gpu: str
    path: str
    job: str = ""


RUNS = {
    "torchrec_2": Trace("V100", "torchrec/sst_long_a2a_optimizer_2", "torchrec"),
    "torchrec_3": Trace("V100", "torchrec/sst_long_a2a_optimizer_3", "torchrec"),
    "torchrec_4": Trace("V100", "torchrec/sst_long_a2a_optimizer_4", "torchrec"),
    "df_index_resolver": Trace("V100", "hta/df_index_resolver"),
    "ns_resolution": Trace("V100", "hta/ns_resolution_trace"),
    "resnet50_of_2021": Trace("V100", "kineto/tb_plugin/samples/resnet50_num_workers_0"),
    "dlrm": Trace("V100", "param/dlrm_kineto.tar.gz"),
    "nccl_data": Trace("A100", "hta/nccl_parser_config"),
    "trace_diff": Trace("A100", "hta/trace_diff/control"),
    "timeline_analysis": Trace("A100", "hta/timeline_analysis", "sampled"),
    "trace_filter": Trace("A100", "hta/trace_filter", "sampled"),
    "particle_transformer": Trace("A100-PCIe", "particle_transformer/gpu_working_chrome_trace.json.gz"),
    "H100_Qwen": Trace("H100", "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"),
    "H100_OWLv2": Trace("H100", "tracelens/h100/google_owlv2-large-patch14-ensemble__1016001.json.gz"),
    "H100_nsys": Trace("H100", "nsys/h100_2gpu_1s.sqlite.gz"),
    "B200_vLLM": Trace("B200", "tracelens/b200/eager_trace.json.gz"),
    "MI300X_resnet": Trace("MI300X", "tracelens/mi300/resnet_act_checkpoint.json.gz"),
    "MI300X_Qwen": Trace("MI300X", "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"),
    "MI300X_OWLv2": Trace("MI300X", "tracelens/mi300/google_owlv2-large-patch14-ensemble__1016001.json.gz"),
    "MI300X_SD35": Trace("MI300X", "tracelens/inference/xdit_sd_3.5/profile_trace_rank_0.json.gz"),
}

PRODUCTS = ("gemm", "bmm", "grouped_gemm", "convolution", "attention")
MOVES = (
    *("elementwise", "copy", "cast", "norm", "batch_norm", "softmax", "transpose", "concat", "reduction", "fill"),
    *("dropout", "optimizer", "gated_activation", "rope"),
)
CORES = {"V100": 80, "A100": 108, "MI300X": 304}

LEAST_US = 20.0

FAR = 0.5
"""Logarithms further than this from their kernel's median are something else: a first run, another clock."""

ONE = ("rank", "name", "grid", "block", "dims")


@cache
def recorded(name: str) -> Run:
    """A recording."""
    return load_run(TRACES / RUNS[name].path)


@cache
def ops_of(name: str) -> pl.DataFrame:
    """Its ops, as `build_ops` has them."""
    return build_ops(recorded(name).events)


@cache
def device_ops(name: str) -> pl.DataFrame:
    """Device ops with `what` (products, moves, other), `us`, `log`, and `kernel` and `place`: what it is a repeat of.

    Of its time, `overlapped` is the share beside collectives, `beside` that beside other streams' work; `taken` is the
    share of the device's cores that those collectives hold meanwhile, where their grids are recorded.
    """
    ops = ops_of(name).filter(pl.col("kind").is_in(DEVICE_KINDS))
    found = recorded(name).events.select(
        *("rank", "event_id"),
        grid=pl.col("args").str.extract(r'"grid":\s*\[([^\]]*)\]'),
        block=pl.col("args").str.extract(r'"block":\s*\[([^\]]*)\]'),
        dims=pl.col("args").str.extract(r'("Input Dims":.*?\]\])'),
    )
    ops = ops.join(found.drop("dims"), on=["rank", "event_id"], how="left")
    ops = ops.join(found.select("rank", "dims", operator_id="event_id"), on=["rank", "operator_id"], how="left")
    ops = ops.join(kernel_families(ops["name"].unique()).select("name", "family"), on="name", how="left")
    is_product, is_move = pl.col("family").is_in(PRODUCTS), pl.col("family").is_in(MOVES)
    size = pl.element().str.strip_chars().cast(pl.Float64)
    ops = ops.with_columns(
        what=pl.when(is_product)
        .then(pl.lit("products"))
        .when(is_move)
        .then(pl.lit("moves"))
        .otherwise(pl.lit("other")),
        us=pl.col("dur_ns") / 1e3,
        log=pl.col("dur_ns").cast(pl.Float64).log(),
        blocks=pl.col("grid").str.split(",").list.eval(size.product()).list.first(),
        nth=pl.col("start_ns").rank("ordinal").over("rank", "step", "site", "name"),
    ).with_columns(kernel=pl.struct(ONE).hash(), place=pl.struct(*ONE, "site", "nth").hash())
    devices = ops.partition_by("rank", "device", maintain_order=True)
    return pl.concat([_shared(of_device, CORES.get(RUNS[name].gpu, 1)) for of_device in devices])


def _shared(ops: pl.DataFrame, cores: int) -> pl.DataFrame:
    """One device's ops with `overlapped`, `beside` and `taken`."""
    comm = (ops["kind"] == "comm").to_numpy()
    start, dur, blocks = (ops[column].to_numpy() for column in ("start_ns", "dur_ns", "blocks"))
    taken, beside = np.zeros(len(start)), np.zeros(len(start))
    for at in np.flatnonzero(comm):
        inside = np.minimum(start + dur, start[at] + dur[at]) - np.maximum(start, start[at])
        taken += np.clip(inside, 0, None) * np.nan_to_num(blocks[at]) / cores
    for lane in ops["lane"].unique():
        own = (ops["lane"] == lane).to_numpy()
        other = ~own & ~comm
        beside[own] = overlap_ns(start[own], dur[own], start[other], dur[other])
    overlapped = overlap_ns(start, dur, start[comm], dur[comm])
    shares = {"overlapped": overlapped, "beside": beside, "taken": taken}
    return ops.with_columns(pl.Series(name, time / np.maximum(dur, 1)) for name, time in shares.items())


def fixed_work(name: str) -> pl.DataFrame:
    """Products and moves of LEAST_US and more that no other stream's work disturbs; collectives may run beside them."""
    kernels = device_ops(name).filter(pl.col("kind") == "kernel", pl.col("us") >= LEAST_US, pl.col("beside") < 0.02)
    near = (pl.col("log") - pl.col("log").median().over("kernel")).abs() < FAR
    return kernels.filter(pl.col("what") != "other").filter(near)


def alone(name: str) -> pl.DataFrame:
    """The same without those beside collectives."""
    return fixed_work(name).filter(pl.col("overlapped") < 0.02)


def fixed_effects(rows: pl.DataFrame, cause: pl.Expr, job: str) -> pl.DataFrame:
    """A row a kernel: `job`, and `xy` and `xx`, sums of products of `cause` and `log`, each less the kernel's mean."""
    centred = rows.with_columns(x=cause).with_columns(
        x=pl.col("x") - pl.col("x").mean().over(job, "kernel"),
        y=pl.col("log") - pl.col("log").mean().over(job, "kernel"),
    )
    products = {"xy": pl.col("x") * pl.col("y"), "xx": pl.col("x") ** 2}
    sums = centred.group_by(job, "kernel", maintain_order=True).agg(**{k: each.sum() for k, each in products.items()})
    return sums.filter(pl.col("xx") > 0).rename({job: "job"})


DRAWS = 2000


def slope(sums: pl.DataFrame) -> tuple[float, float, float]:
    """Slope as the mean of jobs', and its 90 % interval from jobs and, in each, kernels drawn again."""
    jobs = [part.select("xy", "xx").to_numpy() for part in sums.partition_by("job", maintain_order=True)]
    random = np.random.default_rng(0)
    again = [part[random.integers(0, len(part), (DRAWS, len(part)))].sum(axis=1) for part in jobs]
    drawn = np.stack([both[:, 0] / both[:, 1] for both in again], axis=1)
    means = np.take_along_axis(drawn, random.integers(0, len(jobs), drawn.shape), axis=1).mean(axis=1)
    low, high = np.quantile(means, [0.05, 0.95])
    return float(np.mean([part[:, 0].sum() / part[:, 1].sum() for part in jobs])), float(low), float(high)


def scatter(values: pl.Expr) -> pl.Expr:
    """Standard deviation of the normal with as wide a middle half."""
    return (values.quantile(0.75) - values.quantile(0.25)) / 1.349
