"""What a step pays beyond its kernels, measured on other people's GPU traces: `python -m benchmarks.frictions`.

* Contention: one kernel beside a collective and without, by a fixed effect of each kernel; the reverse where all ranks
  of a message are there, so that its waiting can be taken out.
* Jitter: repeats of a kernel, passes of a pipeline, GPUs that do the same (`friction_jitter`).
* Host: time between two launches; how many kernels a layer is.
* Gaps between kernels of a busy stream, and whether products slow down while a recording goes on.

Those of `datasets/surcharges.json` that traces can tell are these; no step time had a part in them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache

import numpy as np
import polars as pl

from benchmarks import TRACES
from benchmarks.friction_jitter import devices_apart, jitter_law, kernel_jitter, passes, primus, together
from benchmarks.friction_traces import (
    RUNS,
    alone,
    device_ops,
    fixed_effects,
    fixed_work,
    ops_of,
    recorded,
    slope,
)
from benchmarks.rows import Row
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.layout import Parallelism, Training
from lumos_nb.schema import DEVICE_KINDS
from lumos_nb.transformer import Transformer
from lumos_nb.workloads.contention import overlap_ns
from lumos_nb.workloads.llm.stages import work

BESIDE = (
    *("torchrec_2", "torchrec_3", "torchrec_4", "nccl_data", "trace_diff", "timeline_analysis", "trace_filter"),
    "MI300X_resnet",
)
NVIDIA = pl.col("gpu") != "MI300X"
LEAST_KERNELS = 4


@cache
def beside_collectives() -> pl.DataFrame:
    """Kernels that ran both beside collectives and without, of all recordings."""
    kept = []
    for name in BESIDE:
        share = pl.col("overlapped")
        both = (share.max().over("kernel") > 0.9) & (share.min().over("kernel") < 0.1)
        named = {"trace": name, "job": RUNS[name].job or name, "gpu": RUNS[name].gpu}
        kernels = fixed_work(name).filter(both).with_columns(pl.lit(text).alias(key) for key, text in named.items())
        kept.append(kernels.select(*named, "what", "kernel", "log", "overlapped", "taken"))
    return pl.concat(kept)


def contention() -> pl.DataFrame:
    """A row a recording and what, and one of all NVIDIA jobs: `slowed`, `low`, `high`, `ratio`, `cores`.

    `slowed` is the slope of a kernel's logarithm over its overlapped share; `ratio` the median over kernels of the
    median beside collectives over that without; `cores` the share of cores that those collectives hold.
    """
    everything, rows = beside_collectives(), []
    groups = [*everything.group_by("trace", "gpu", "what", maintain_order=True)]
    groups += [(("all", "NVIDIA", what), everything.filter(NVIDIA, what=what)) for what in ("products", "moves")]
    for key, kernels in groups:
        sums = fixed_effects(kernels, pl.col("overlapped"), "job")
        beside, free = (pl.col("log").filter(which).median() for which in (_BESIDE, pl.col("overlapped") < 0.1))
        ratio = kernels.group_by("trace", "kernel").agg(ratio=(beside - free).exp())["ratio"].median()
        cores = kernels.filter(_BESIDE, pl.col("taken") > 0)["taken"].median()
        if len(sums) >= LEAST_KERNELS:
            rows.append((*key, len(sums), *slope(sums), ratio, cores))
    columns = ["trace", "gpu", "what", "kernels", "slowed", "low", "high", "ratio", "cores"]
    return pl.DataFrame(rows, schema=columns, orient="row")


_BESIDE = pl.col("overlapped") > 0.9


def by_cores() -> tuple[float, float, float]:
    """Slope of products' logarithms over that of the cores left to them: 1 where losing cores is what slows."""
    rows = beside_collectives().filter(NVIDIA, what="products")
    return slope(fixed_effects(rows, -(1 - pl.col("taken")).log(), "job"))


@cache
def collectives() -> pl.DataFrame:
    """Collectives whose ranks are all recorded, less their waiting: `log`, `overlapped`; `kernel` is what repeats.

    Bytes are not recorded: a message is told by recording and place in the step. Those that are not far longer than
    the clocks disagree are left out.
    """
    found = []
    for name in ("torchrec_2", "torchrec_3", "torchrec_4"):
        recording = Recording.of(recorded(name))
        kernels = device_ops(name).filter(kind="kernel")
        graphs = ((step, build_graph(recording, step)) for step in recording.steps)
        named = {"trace": pl.lit(name)}
        found += [_transfers(graph, kernels).with_columns(step=pl.lit(step), **named) for step, graph in graphs]
    number = pl.col("joined_ns").rank("ordinal").over("trace", "step", "collective")
    message = pl.struct("trace", "collective", number=number).hash()
    table = pl.concat(found).with_columns(kernel=message, job=pl.lit("torchrec"), log=pl.col("us").log())
    return table.filter(pl.col("us") >= 200)


def _transfers(graph: Graph, kernels: pl.DataFrame) -> pl.DataFrame:
    """A row a collective: `joined_ns` (all have arrived), `us` from there, and `overlapped` by kernels meanwhile."""
    joins = graph.ops.filter(kind="join").select(src="op_id", joined_ns="start_ns")
    edges = graph.edges.filter(rule="collective").join(joins, on="src").select("src", "dst", "joined_ns")
    members = edges.join(graph.ops.filter(kind="comm"), left_on="dst", right_on="op_id")
    by_rank = []
    for rank in members["rank"].unique().sort():
        own, others = members.filter(rank=rank), kernels.filter(rank=rank)
        spans = (own["joined_ns"], own["dur_ns"], others["start_ns"], others["dur_ns"])
        by_rank.append(own.with_columns(pl.Series("shared_ns", overlap_ns(*(span.to_numpy() for span in spans)))))
    return pl.concat(by_rank).group_by("src", "joined_ns", "collective", maintain_order=True).agg(
        us=pl.col("dur_ns").max() / 1e3, overlapped=pl.col("shared_ns").sum() / pl.col("dur_ns").sum()
    )  # fmt: skip


WAITING = r"sync|free|elapsed"
"""Calls after which a thread has not been at work alone."""

LONGEST_US = 500.0
"""More than this between two launches is a data loader, a print, a full queue."""


def host() -> pl.DataFrame:
    """A row a recording and phase: `us` and `mean_us` between two launches of a thread, `call_us` of it in the call."""
    rows, thread = [], ["rank", "thread"]
    phase = pl.when(pl.col("phase").is_in(["backward", "optimizer"])).then("phase").otherwise(pl.lit("forward"))
    for name, trace in RUNS.items():
        calls = ops_of(name).filter(pl.col("call").is_not_null(), pl.col("stream").is_null()).sort(*thread, "start_ns")
        waits = pl.col("call").str.contains(WAITING).cum_sum().over(thread)
        launches = calls.with_columns(waits=waits).filter(call="launch")
        since = launches.with_columns(pl.col("start_ns", "waits") - pl.col("start_ns", "waits").shift().over(thread))
        since = since.with_columns(us=pl.col("start_ns") / 1e3).filter(pl.col("us") < LONGEST_US, waits=0)
        by_phase = since.group_by(phase.alias("phase")).agg(
            pl.col("us").median(),
            mean_us=pl.col("us").mean(),
            call_us=pl.col("dur_ns").median() / 1e3,
            launches=pl.len(),
        )
        named = by_phase.with_columns(trace=pl.lit(name), gpu=pl.lit(trace.gpu)).sort("phase")
        rows.append(named.filter(pl.col("launches") >= 100).select("trace", "gpu", pl.exclude("trace", "gpu")))
    return pl.concat(rows)


LAYERS = {
    # recording: a model with the same rows a layer
    "H100_Qwen": "llama-3.2-1b",
    "MI300X_Qwen": "llama-3.2-1b",
    "H100_OWLv2": "gpt3-350m",
}
PERIODS = range(8, 141)

MEGATRON = (
    # what of a layer of Megatron's GPT launches a kernel, as its execution trace names it
    *("aten::mm", "aten::bmm", "aten::baddbmm", "aten::clone", "aten::dropout", "aten::add", "nccl:all_reduce"),
    *("FusedLayerNormAffineFunction", "ScaledUpperTriangMaskedSoftmax", "triton_poi_fused_add_0"),
    "triton_poi_fused_add_mul_tanh_0",
)


def layers() -> pl.DataFrame:
    """A row a recording of a transformer: `kernels` of a layer's forward pass, and `rows` of its work table."""
    found = []
    for name, model in LAYERS.items():
        names = device_ops(name).filter(kind="kernel").sort("start_ns")["name"].rank("dense").to_numpy()
        same = np.array([np.mean(names[period:] == names[:-period]) for period in PERIODS])
        found.append((name, float(PERIODS[int(np.argmax(same > 0.9 * same.max()))]), rows_of(model, 1)))
    trace = (TRACES / "astra-sim" / "megatron-tp8" / "megatron_et_0.json.gz").read_bytes()
    names = [node["name"] for node in json.loads(gzip.decompress(trace))["nodes"]]
    kernels = sum(name in MEGATRON for name in names) / names.count("ScaledUpperTriangMaskedSoftmax")
    found.append(("Megatron_TP8", kernels, rows_of("gpt3-6.7b", 8)))
    return pl.DataFrame(found, schema=["trace", "kernels", "rows"], orient="row")


def rows_of(model: str, tp: int) -> int:
    """Rows of a layer's forward pass in the work table."""
    train = Training(micro_batch=1, global_batch=8, seq=2048, recompute="none")
    return len(work(Transformer.named(model), Parallelism(tp=tp), train, 0).filter(phase="forward", layer=1))


AHEAD_NS = 50_000
"""A host that issued a kernel this long before the one ahead of it ended does not cause the gap."""


def gaps() -> pl.DataFrame:
    """A row a recording: quartiles of the gap on a busy stream between one kernel's end and the next one's start."""
    rows = []
    for name, trace in RUNS.items():
        ops = ops_of(name).filter(pl.col("kind").is_in(DEVICE_KINDS)).sort("rank", "lane", "start_ns")
        kind, start_ns, dur_ns = (pl.col(c).shift().over("rank", "lane") for c in ("kind", "start_ns", "dur_ns"))
        ended_ns = start_ns + dur_ns
        busy = (pl.col("kind") == "kernel") & (kind == "kernel") & (ended_ns - pl.col("launch_ns") > AHEAD_NS)
        graphs = pl.col("call_name").str.contains("Graph").fill_null(value=False)
        gap = pl.when(busy & ~graphs).then((pl.col("start_ns") - ended_ns) / 1e3)
        found = ops.select(gap=gap)["gap"].drop_nulls()
        if len(found) >= 50 and trace.job != "sampled":  # there kernels are missing between others
            rows.append((name, trace.gpu, len(found), *(found.quantile(share) for share in (0.25, 0.5, 0.75))))
    return pl.DataFrame(rows, schema=["trace", "gpu", "gaps", "low_us", "us", "high_us"], orient="row")


def drift() -> pl.DataFrame:
    """A row a recording: its `ms`, and how much `slower` the same products are at its end than at its beginning."""
    rows = []
    for name, trace in RUNS.items():
        products = alone(name).filter(pl.col("what") == "products").filter(pl.len().over("kernel") >= LEAST_KERNELS)
        begin_ns, end_ns = products.select(pl.col("start_ns").min(), pl.col("start_ns").max().alias("end")).row(0)
        if begin_ns is None:
            continue
        when = (pl.col("start_ns") - begin_ns) / (end_ns - begin_ns)
        sums = fixed_effects(products.with_columns(job=pl.lit(name)), when, "job")
        if len(sums) >= LEAST_KERNELS:
            rows.append((name, trace.gpu, (end_ns - begin_ns) / 1e6, len(sums), *slope(sums)))
    return pl.DataFrame(rows, schema=["trace", "gpu", "ms", "kernels", "slower", "low", "high"], orient="row")


LAUNCHING = ("H100_Qwen", "MI300X_Qwen", "MI300X_resnet", "trace_diff", "dlrm")
"""Recordings of which the host's time is quoted: those whose profiler was the least in the way."""

FINE = ("ns_resolution", "nccl_data", "particle_transformer", "H100_Qwen", "H100_OWLv2", "B200_vLLM", "MI300X_resnet")
"""Recordings of which gaps are quoted: their clocks are finer than a microsecond."""


def friction_rows() -> Iterator[Row]:
    """Rows of `accuracy.json`."""
    yield from contention_rows()
    yield from jitter_rows()
    for row in host().filter(pl.col("trace").is_in(LAUNCHING)).to_dicts():
        note = f"{row['gpu']}; median of {row['launches']}, mean {row['mean_us']:.0f}; {row['call_us']:.0f} in the call"
        yield Row(f"frictions/between two launches, {row['trace']} {row['phase']}", row["us"], "us", note=note)
    for row in layers().to_dicts():
        name = f"frictions/kernels of a layer forward, {row['trace']}"
        yield Row(name, row["kernels"], "", "rows of a work table", row["rows"])
    for row in gaps().filter(pl.col("trace").is_in(FINE)).to_dicts():
        note = f"{row['gpu']}; middle half {row['low_us']:.2f} to {row['high_us']:.2f}, {row['gaps']} gaps"
        yield Row(f"frictions/gap on a busy stream, {row['trace']}", row["us"], "us", note=note)
    slower = drift()
    worst = slower.sort(pl.col("slower").abs()).row(-1, named=True)
    note = f"median of {len(slower)} recordings of {slower['ms'].min():.0f} to {slower['ms'].max():.0f} ms; farthest "
    note += f"{100 * worst['slower']:.1f} % ({worst['trace']}, {100 * worst['low']:.0f} to {100 * worst['high']:.0f})"
    yield Row("frictions/products at the end over the beginning", 100 * slower["slower"].median(), "%", note=note)


def contention_rows() -> Iterator[Row]:
    """Rows of what runs side by side."""
    table = contention()
    for row in table.filter(pl.col("gpu").is_in(["NVIDIA", "MI300X"])).to_dicts():
        note = f"90 % interval {100 * row['low']:.0f} to {100 * row['high']:.0f} %, {row['kernels']} kernels"
        note += f"; collectives hold {row['cores']:.0%} of the cores"
        single = table.filter(pl.col("what") == row["what"], pl.col("gpu").is_in(["V100", "A100"]))
        parts = [f"{one['trace']} ({one['gpu']}) {100 * one['slowed']:.0f}" for one in single.to_dicts()]
        note += f"; {', '.join(parts)}" if row["trace"] == "all" else ""
        yield Row(f"frictions/{row['what']} beside collectives, {row['gpu']}", 100 * row["slowed"], "%", note=note)
    value, low, high = by_cores()
    note = f"1 where losing cores is what slows; 90 % interval {low:.2f} to {high:.2f}"
    yield Row("frictions/products over the cores left, NVIDIA", value, "", note=note)
    value, low, high = slope(fixed_effects(collectives(), pl.col("overlapped"), "job"))
    note = f"90 % interval {100 * low:.0f} to {100 * high:.0f} %; one job, bytes not recorded: a message is its place"
    yield Row("frictions/collectives beside kernels, V100", 100 * value, "%", note=note)


def jitter_rows() -> Iterator[Row]:
    """Rows of what varies."""
    table = kernel_jitter()
    for gpus, which in (("NVIDIA", NVIDIA), ("MI300X", ~NVIDIA)):
        (a_us, b), tail = jitter_law(table.filter(which)), table.filter(which)["tail"].median()
        note = f"beside the share; with outliers {100 * tail:.1f} % of the duration, median of classes"
        yield Row(f"frictions/jitter of a kernel, {gpus}", a_us, "us", note=note)
        yield Row(f"frictions/jitter of a kernel, share of its time, {gpus}", 100 * b, "%")
    windows = together()
    sigma = 100 * windows["sigma"].median()
    note = f"of any two among 64 in a row, median of {len(windows)} recordings; the 64 together vary by {sigma:.2f} %"
    yield Row("frictions/correlation of kernels", windows["correlation"].median(), "", note=note)
    node = 100 * devices_apart()["sigma"].mean()
    for job in ("ST", "AR"):
        told = {what: 100 * value if what != "faults" else value for what, value in passes(job).items()}
        left_out = f"; {told['faults']} broken rank left out" if told["faults"] else ""
        yield Row(f"frictions/jitter of a pass, {job}", told["own"], "%", note=f"beyond its micro-batch's{left_out}")
        yield Row(
            f"frictions/micro-batches apart, {job}",
            told["documents"],
            "%",
            note="what all stages share: presumably documents",
        )
        note = f"lasting; with micro-batches the sums of a step {told['steps']:.2f} %; 4 V100 of a node {node:.2f} %"
        yield Row(f"frictions/GPUs apart, {job}", told["ranks"], "%", note=note)
    told = {what: 100 * value for what, value in primus().items()}
    note = f"backward; forward {told['forward']:.1f} %"
    yield Row("frictions/jitter of a pass, Primus", told["backward"], "%", note=note)
    note = "the ranks between first and last, which hold the same layers; its GPU is not stated"
    yield Row("frictions/GPUs apart, Primus", told["ranks"], "%", note=note)


def main() -> None:
    """Print every table."""
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_width_chars=200, float_precision=4, tbl_hide_dataframe_shape=True):
        for table in (contention(), kernel_jitter(), together(), devices_apart(), host(), layers(), gaps(), drift()):
            print(table)
    print(f"products over the cores left: {by_cores()}; ST {passes('ST')}; AR {passes('AR')}; Primus {primus()}")
    for row in friction_rows():
        print(f"{row.name:62}{row.value:8.3f} {row.unit:3}{row.baseline_value or ''} {row.note}")


if __name__ == "__main__":
    main()
