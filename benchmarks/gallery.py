"""Every chart drawn from bundled data, in light and dark: `make gallery` writes pages and PNGs to build/gallery."""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import altair as alt
import numpy as np
import polars as pl
import vl_convert

import lumos_nb as ln
from lumos_nb import charts, datasets
from lumos_nb.charts.rendering import Theme, in_theme
from lumos_nb.costs.calibration import calibrations
from lumos_nb.costs.kernels import fit_kernels
from lumos_nb.costs.work import with_work
from lumos_nb.exchange import benchmark
from lumos_nb.workloads.llm.table_rows import read_row

OUT = Path(__file__).parents[1] / "build" / "gallery"
PAPER = {"light": ("#ffffff", "#222222"), "dark": ("#111111", "#dddddd")}


@dataclass(frozen=True)
class Entry:
    """A chart of the gallery: what it answers, the call, and what draws it."""

    question: str
    call: str
    draw: Callable[[], alt.TopLevelMixin]


@cache
def graph(name: str, step: int | None = None) -> ln.Graph:
    """A step of a bundled run."""
    return ln.build_graph(ln.load_run(datasets.path(name)), step)


@cache
def result(name: str) -> ln.Result:
    return ln.replay(graph(name))


@cache
def halves() -> pl.DataFrame:
    """What the step would take with each kind of op, or each latency, twice as fast."""
    one = graph("gpt-pp")
    slopes = ln.sweep(one, [{}])
    kinds = [name[2:] for name in slopes.columns if name.startswith("d_") and slopes[name][0]]
    return ln.sweep(one, [{"scenario": f"{kind} x 0.5", kind: 0.5} for kind in kinds])


@cache
def kernels() -> pl.DataFrame:
    """Half-precision products that others measured on an H100, priced."""
    rows = datasets.load("measured-kernels").filter(gpu="H100-SXM-80GB", op="gemm", source="microsoft/vidur")
    return with_work(ln.load_calibration("H100-SXM-80GB").predict_kernels(rows.sample(2000, seed=0)))


@cache
def priced() -> pl.DataFrame:
    """Kernels of all ops on an H100 with their signed error."""
    rows = datasets.load("measured-kernels").filter(gpu="H100-SXM-80GB", source="microsoft/vidur")
    rows = ln.load_calibration("H100-SXM-80GB").predict_kernels(rows.sample(4000, seed=0))
    return rows.with_columns(error=pl.col("dur_us") / pl.col("time_us") - 1).sort("op")


@cache
def sizes() -> pl.DataFrame:
    """Bus bandwidth of all-reduces, measured and priced."""
    rows = datasets.load("measured-collectives").filter(collective="all_reduce", hardware="H100-SXM-80GB")
    bytes_on_bus = pl.col("busbw_gbs") * pl.col("time_us")
    rows = rows.drop_nulls("interconnect").with_columns(measured="busbw_gbs", moved=bytes_on_bus)
    found = ln.load_calibration("H100-SXM-80GB").predict_collectives(rows.drop("busbw_gbs", "algbw_gbs"))
    return found.with_columns(
        panel=pl.format("{} GPUs, {}", "gpus", "interconnect"),
        predicted=pl.col("moved") / pl.col("dur_us"),
        low=pl.col("moved") / pl.col("high_us"),
        high=pl.col("moved") / pl.col("low_us"),
    ).sort("nodes", "gpus", "size_bytes")


def learning() -> pl.DataFrame:
    """Errors on a model left out over rows that the fit had."""
    samples = datasets.load("measured-kernels").filter(gpu="H100-SXM-80GB", op="gemm", source="microsoft/vidur")
    left_out, sheet = "meta-llama/Llama-2-7b-hf", ln.find_gpu("H100-SXM-80GB")
    held, rest = samples.filter(model=left_out), samples.filter(pl.col("model") != left_out)
    counts = (10, 30, 100, 300, 1000)
    errors = [
        (fit_kernels(rest.sample(count, seed=1)).predict(held, sheet)["dur_us"] / held["time_us"] - 1).abs().median()
        for count in counts
    ]
    return pl.DataFrame({"rows": counts, "error": errors, "series": "gemm, Llama 2 7B left out"})


@cache
def held_out() -> pl.DataFrame:
    """What calibrations score on what their fits had not seen."""
    columns = ("cell", "left_out", "groups", "rows", "median", "coverage", "width")
    rows = [
        (name, *(getattr(score, column) for column in columns))
        for name in calibrations()
        for score in ln.load_calibration(name).held_out
        if score.rows >= 20
    ]
    table = pl.DataFrame(rows, schema=["gpu", *columns], orient="row").filter(pl.col("coverage").is_not_nan())
    return table.with_columns(name=pl.format("{}, {}", "cell", "gpu"))


@cache
def scored() -> pl.DataFrame:
    """Published steps beside predicted ones."""
    rows = []
    for row in datasets.load("measured-training").iter_rows(named=True):
        setup = read_row(row)
        found = ln.estimate(setup.model, setup.layout, setup.train, setup.cluster)
        label = f"{setup.model.name}: {setup.layout.tp} x {setup.layout.pp} x {setup.layout.dp}"
        rows.append((row["source"], label, row["step_time_s"], found.step_s, found.low_s, found.high_s))
    schema = ["source", "run", "measured_s", "predicted_s", "low_s", "high_s"]
    return pl.DataFrame(rows, schema=schema, orient="row")


def times() -> pl.DataFrame:
    """A source's steps in the long form."""
    rows = scored().filter(pl.col("source") == scored()["source"].mode()[0]).unique("run", maintain_order=True).head(12)
    none = pl.lit(None, pl.Float64)
    measured = rows.select(label="run", series=pl.lit("measured"), time_s="measured_s", low_s=none, high_s=none)
    predicted = rows.select(
        label="run", series=pl.lit("predicted"), time_s="predicted_s", low_s="low_s", high_s="high_s"
    )
    return pl.concat([measured, predicted])


def h100s(nodes: int) -> ln.Cluster:
    return ln.Cluster(gpu="H100-SXM-80GB", nodes=nodes, inside="NVLink4 NVSwitch", between="InfiniBand NDR 400")


@cache
def gpt3(schedule: str = "1f1b") -> Any:
    """GPT-3 175B on 128 H100s."""
    layout = ln.Parallelism(tp=8, sequence_parallel=True, pp=4, dp=4, zero=1, schedule=schedule)
    train = ln.Training(micro_batch=1, global_batch=32, seq=2048, recompute="selective")
    return ln.estimate(ln.Transformer.named("gpt3-175b"), layout, train, h100s(16))


@cache
def found(*gpus: int) -> ln.Found:
    """Layouts of Llama 3 70B on 64 H100s, or on others."""
    train = ln.Training(micro_batch=1, global_batch=128, seq=4096)
    narrow = {"cp": 1, "schedule": "1f1b", "chunks": 1, "shard": 0, "sequence_parallel": True, "zero": 1}
    narrow |= {"micro_batch": [1, 2], "recompute": ["none", "full"], "gpus": gpus or 64}
    return ln.search(ln.Transformer.named("llama-3-70b"), h100s(8), train, keep=4, **narrow)


@cache
def plan() -> ln.Plan:
    """A plan of 40 embedding tables, some of them cut."""
    rng = np.random.default_rng(7)
    rows = np.exp(rng.uniform(np.log(1e5), np.log(1e8), 40)).astype(int)
    tables = pl.DataFrame({"rows": rows, "dim": rng.choice([32, 64, 128], 40), "pooling": rng.uniform(1, 30, 40)})
    gpus = ln.Cluster(gpu="A100-SXM-80GB", inside="NVLink3 NVSwitch")
    costs = ln.ShardingCosts.of(ln.PhysicalLookup.of_sheet(gpus.gpu_sheet), gpus, batch=65536)
    return costs.price(ln.shard(tables, gpus, costs, seed=1))


def measured_schedule() -> alt.TopLevelMixin:
    """The pipeline of a bundled run: its micro-batches are found by `find_structure`."""
    one = graph("gpt-pp")
    of_ops = ln.find_structure(one).ops.drop("rank", "run").with_columns(pl.col("layer").cast(pl.String))
    ops = one.ops.drop("phase", "layer", "micro_batch").join(of_ops, on="op_id", how="left")
    return charts.schedule(ops, title="Two stages and four micro-batches as measured", width_px=700)


SWEEP_TITLES = {"x": "message size (bytes)", "y": "bus bandwidth (GB/s)", "chart": "All-reduces of H100s"}

GALLERY = {
    "timeline": Entry(
        "What runs when, and where is the critical path?",
        "charts.timeline(ln.replay(graph))",
        lambda: charts.timeline(result("gpt-ddp"), width_px=760),
    ),
    "dependencies": Entry(
        "What waits for what in fifteen milliseconds of it?",
        "charts.dependencies(result, window_ns=(23_000_000, 38_000_000))",
        lambda: charts.dependencies(result("gpt-ddp"), window_ns=(23_000_000, 38_000_000), width_px=900),
    ),
    "timeline_window": Entry(
        "And in three milliseconds of it?",
        "charts.timeline(result, window_ns=(20_000_000, 23_000_000))",
        lambda: charts.timeline(result("gpt-ddp"), window_ns=(20_000_000, 23_000_000), width_px=760),
    ),
    "breakdown": Entry(
        "Where does each rank's step go, measured and replayed?",
        'charts.breakdown_bars({"measured": ln.breakdown(graph), "replayed": ln.breakdown(result)})',
        lambda: charts.breakdown_bars(
            {"measured": ln.breakdown(graph("gpt-pp")), "replayed": ln.breakdown(result("gpt-pp"))}
        ),
    ),
    "waterfall": Entry(
        "What does one rank's step add up from?",
        "charts.waterfall(ln.breakdown(graph))",
        lambda: charts.waterfall(ln.breakdown(graph("gpt-pp"))),
    ),
    "difference": Entry(
        "What changed between two steps?",
        'charts.difference(ln.compare(graph, another), level="part")',
        lambda: charts.difference(ln.compare(graph("gpt-ddp-delay", 3), graph("gpt-ddp-delay", 5))),
    ),
    "difference_by_op": Entry(
        "Which ops changed?",
        'charts.difference(ln.compare(graph, another), level="op")',
        lambda: charts.difference(ln.compare(graph("gpt-ddp-delay", 3), graph("gpt-ddp-delay", 5)), level="op"),
    ),
    "sensitivity": Entry(
        "Which class of ops buys most?",
        'charts.sensitivity(ln.sweep(graph, [{"scenario": "cpu x 0.5", "cpu": 0.5}, ...]))',
        lambda: charts.sensitivity(halves()),
    ),
    "slack": Entry(
        "How much longer could ops take before the step does?",
        "charts.slack_bars(ln.replay(graph))",
        lambda: charts.slack_bars(result("gpt-pp")),
    ),
    "predicted": Entry(
        "How well is each step predicted from the others?",
        "charts.predicted_vs_measured(ln.mechanistic(run))",
        lambda: charts.predicted_vs_measured(ln.mechanistic(ln.load_run(datasets.path("gpt-ddp-delay")))),
    ),
    "structure": Entry(
        "Which layers were found, and how surely?",
        "charts.structure_bars(ln.find_structure(graph).table)",
        lambda: charts.structure_bars(ln.find_structure(graph("gpt-pp")).table),
    ),
    "schedule": Entry(
        "Which micro-batch runs when, as predicted?",
        "charts.schedule(found.result)",
        lambda: charts.schedule(gpt3().result, title="GPT-3 175B, 1F1B", width_px=760),
    ),
    "schedule_zb": Entry(
        "And with weight gradients put off?",
        "charts.schedule(found.result)",
        lambda: charts.schedule(gpt3("zb-h1").result, title="GPT-3 175B, ZB-H1", width_px=760),
    ),
    "schedule_measured": Entry(
        "And of a trace?", "charts.schedule(ops)  # with the columns of find_structure(graph).ops", measured_schedule
    ),
    "memory": Entry(
        "What fills memory when most is in use?",
        "charts.memory_bars(found.memory, limit_bytes=80e9)",
        lambda: charts.memory_bars(gpt3().memory, limit_bytes=gpt3().cluster.gpu_sheet.memory_bytes),
    ),
    "memory_over_time": Entry(
        "And over the step?",
        "charts.memory_over_time(found.memory_over_time, limit_bytes=80e9)",
        lambda: charts.memory_over_time(
            gpt3().memory_over_time, limit_bytes=gpt3().cluster.gpu_sheet.memory_bytes, title="GPT-3 175B, 1F1B"
        ),
    ),
    "layouts": Entry(
        "Which layout is fast, and what keeps others from running?",
        "charts.layouts(found.frame)",
        lambda: charts.layouts(found().frame, title="Llama 3 70B on 64 H100s"),
    ),
    "pareto": Entry(
        "What does time cost in memory, and in money?",
        "charts.pareto(found.feasible, found.pareto, usd_per_gpu_hour=2.5)",
        lambda: charts.pareto(
            found(16, 32, 64).feasible,
            found(16, 32, 64).pareto,
            usd_per_gpu_hour=2.5,
            title="Llama 3 70B on up to 64 H100s",
            width_px=400,
        ),
    ),
    "agreement": Entry(
        "How far off are predictions of published steps?",
        "charts.agreement(scored)",
        lambda: charts.agreement(scored()),
    ),
    "step_times": Entry("And run by run?", "charts.step_times(rows)", lambda: charts.step_times(times())),
    "roofline": Entry(
        "How near do kernels come to what the GPU can do?",
        'charts.roofline(with_work(cal.predict_kernels(samples)), cal.gpu, "fp16")',
        lambda: charts.roofline(kernels(), ln.find_gpu("H100-SXM-80GB"), "fp16"),
    ),
    "bandwidth": Entry(
        "How does bandwidth grow with the message?",
        'charts.sweeps(rows, x="size_bytes", panel="panel", titles=..., log_x=True)',
        lambda: charts.sweeps(sizes(), x="size_bytes", panel="panel", titles=SWEEP_TITLES, log_x=True),
    ),
    "error_spread": Entry(
        "Which classes of ops are priced too high or too low?",
        'charts.error_spread(priced, by="op")',
        lambda: charts.error_spread(priced(), by="op", title="Kernels of an H100"),
    ),
    "learning_curve": Entry(
        "How many samples does a fit need?", "charts.learning_curve(scored)", lambda: charts.learning_curve(learning())
    ),
    "interval_check": Entry(
        "Do intervals hold what they promise?",
        "charts.interval_check(scores)",
        lambda: charts.interval_check(held_out(), title="Nominal 90 % intervals"),
    ),
    "heat_map": Entry(
        "Where are errors large?",
        'charts.heat_map(cells, x="gpu", y="cell", value="median", heat="error", titles=...)',
        lambda: charts.heat_map(
            held_out().filter(pl.col("cell").str.starts_with("gemm")).sort("cell", "gpu"),
            x="gpu",
            y="cell",
            value="median",
            heat="error",
            titles={"value": "median error", "chart": "Median error on what was left out"},
            cell_px=(62, 20),
        ),
    ),
    "sharding_plan": Entry(
        "Which device holds which tables?",
        "charts.sharding_plan(plan.frame)",
        lambda: charts.sharding_plan(plan().frame),
    ),
    "device_loads": Entry(
        "Is the work spread evenly?", "charts.device_loads(plan.devices)", lambda: charts.device_loads(plan().devices)
    ),
    "similarity": Entry(
        "Does one program do the same work as another?",
        "charts.similarity_bars(ln.benchmark.compare(original, replayed).classes)",
        lambda: charts.similarity_bars(
            benchmark.compare(datasets.path("gpt-ddp-paired"), datasets.path("gpt-single-paired")).classes
        ),
    ),
}
"""Every public chart at least once; a test compares."""


def page(specs: Mapping[str, dict[str, Any]], theme: Theme) -> str:
    """An HTML page of all charts that draws them without a network."""
    paper, letters = PAPER[theme]
    parts = []
    for name, spec in specs.items():
        entry = GALLERY[name]
        drawn = json.dumps(in_theme(spec, theme)).replace("</", "<\\/")
        parts.append(
            f'<h2 id="{name}">{html.escape(entry.question)}</h2><pre>{html.escape(entry.call)}</pre>'
            f'<div id="chart-{name}"></div><script>vegaEmbed("#chart-{name}", {drawn}, {{actions: false}})</script>'
        )
    style = f"body {{background: {paper}; color: {letters}; font-family: sans-serif; margin: 2em}}"
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Charts of lumos_nb, {theme}</title>'
        f'<style>{style}</style><script src="vega.js"></script></head><body>{"".join(parts)}</body></html>'
    )


def main(out: Path = OUT, names: list[str] | None = None) -> None:
    """Draw all charts, or some of them."""
    specs = {name: GALLERY[name].draw().to_dict() for name in names or GALLERY}
    themes: tuple[Theme, ...] = get_args(Theme)
    for theme in themes:
        (out / theme).mkdir(parents=True, exist_ok=True)
        for name, spec in specs.items():
            (out / theme / f"{name}.png").write_bytes(charts.to_png(spec, theme=theme))
        (out / f"{theme}.html").write_text(page(specs, theme))
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    (out / "vega.js").write_text(bundle)
    print(f"{len(specs)} charts in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="charts to draw; by default all")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    main(arguments.out, arguments.names)
