"""Predicted against measured, on every recording at hand: `python -m benchmarks.accuracy` writes accuracy.json.

Recordings and figures of others (`../shared/traces`, `../shared/measured`) are read where they lie; without them their
rows stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import polars as pl

from benchmarks import MEASURED, TRACES, workers
from benchmarks.collective_accuracy import collective_rows
from benchmarks.cpu_accuracy import cpu_rows
from benchmarks.dlrm_published import published_rows
from benchmarks.dlrm_steps import dlrm_rows
from benchmarks.dlrm_traced import traced_rows
from benchmarks.embedding_accuracy import embedding_rows
from benchmarks.fit_surcharges import surcharge_rows
from benchmarks.frictions import friction_rows
from benchmarks.interventions import intervention_rows
from benchmarks.kernel_accuracy import kernel_rows
from benchmarks.llm_accuracy import llm_rows
from benchmarks.llm_uses import beside_rows, blackwell_rows, use_rows
from benchmarks.memory_accuracy import memory_rows
from benchmarks.nlp_steps import nlp_rows
from benchmarks.overhead_accuracy import overhead_rows
from benchmarks.pipelines import pipeline_rows
from benchmarks.rows import ACCURACY, Row, record
from benchmarks.schedule_prediction import schedule_rows
from benchmarks.scores import coverage_rows, mechanistic_rows, noise, percent
from benchmarks.sharding import sharding_rows
from benchmarks.sharding_measured import measured_rows
from benchmarks.synthesis_accuracy import synthesis_rows
from benchmarks.trace_accuracy import trace_kernel_rows
from lumos_nb import datasets
from lumos_nb.beside import timed_steps
from lumos_nb.critical_path import replay
from lumos_nb.evaluate import delayed_steps, mechanistic, score_waits, what_ifs
from lumos_nb.executors import spread
from lumos_nb.findings import step_spread
from lumos_nb.graph import Recording, build_graph
from lumos_nb.resampling import jitter
from lumos_nb.schema import DEVICE_KINDS
from lumos_nb.traces.run import Run, load_run

OVERLAPPING = {
    # recording: its folder or file, target of the mean error in percent
    "torchrec_optimizer_2": ("torchrec/sst_long_a2a_optimizer_2", 5.0),
    "torchrec_optimizer_3": ("torchrec/sst_long_a2a_optimizer_3", 5.0),
    "torchrec_optimizer_4": ("torchrec/sst_long_a2a_optimizer_4", 1.5),
    "MI300X_resnet": ("tracelens/mi300/resnet_act_checkpoint.json.gz", 1.5),
    "trace_diff": ("hta/trace_diff/control", 1.5),
    "ns_resolution": ("hta/ns_resolution_trace", 1.5),
}
OTHERS = {
    "df_index_resolver": "hta/df_index_resolver",
    "nccl_data": "hta/nccl_parser_config",
    "torchrec_resnet18": "torchrec/resnet18",
    "resnet50_of_2021": "kineto/tb_plugin/samples/resnet50_num_workers_0",
}
ABLATED = ("torchrec_optimizer_4", "MI300X_resnet", "trace_diff")
"""Those that are scored without waits between streams as well: they use several."""

SYNC_FILES = (
    "hta/critical_path/alexnet",
    "hta/critical_path/cuda_event_sync",
    "hta/critical_path/end_to_end/simple_add/input",
    "kineto/docs/traces/after_fix_trace.json",
)


def trace_rows() -> Iterator[Row]:
    """Rows of the recordings of others."""
    errors = []
    paths = [*(path for path, _ in OVERLAPPING.values()), *OTHERS.values()]
    with workers() as executor:
        by_path = dict(zip(paths, spread(executor, _predicted, paths), strict=True))
    for name, (path, target) in OVERLAPPING.items():
        scored = by_path[path]
        errors.append(percent(scored["error"]))
        yield from mechanistic_rows(name, scored, target, without="events" if name in ABLATED else None)
    yield Row(
        "mechanistic/mean_of_overlapping",
        sum(errors) / len(errors),
        "%",
        target="<= 1.5",
        note=f"{len(errors)} recordings",
    )
    for name, path in OTHERS.items():
        yield from mechanistic_rows(name, by_path[path])
    yield from what_if_rows("ns_resolution", load_run(TRACES / OVERLAPPING["ns_resolution"][0]))
    yield from what_if_rows("MI300X_resnet", load_run(TRACES / OVERLAPPING["MI300X_resnet"][0]))
    yield from what_if_rows("torchrec_optimizer_4", load_run(TRACES / OVERLAPPING["torchrec_optimizer_4"][0]))
    for path in SYNC_FILES:
        name = path.removesuffix("/input").split("/")[-1].removesuffix(".json")
        for score in score_waits(load_run(TRACES / path)).filter(pl.col("rule") != "all").iter_rows(named=True):
            waits = score["tp"] + score["fn"]
            found = f"{score['tp']} of {waits}, {score['fp']} false"
            if waits:
                yield Row(f"inferred_waits/{name}, {score['rule']} recall", 100 * score["recall"], "%", note=found)
            if score["precision"] is not None:
                yield Row(
                    f"inferred_waits/{name}, {score['rule']} precision", 100 * score["precision"], "%", note=found
                )


def _predicted(path: str) -> pl.DataFrame:
    return mechanistic(load_run(TRACES / path))


def what_if_rows(name: str, run: Run) -> Iterator[Row]:
    """Rows of the what-if sanity table of one step."""
    graph = build_graph(run)
    composition = replay(graph).composition
    on_device = composition.filter(pl.col("kind").is_in([*DEVICE_KINDS, "lag:stream"]))["share"].sum()
    yield Row(
        f"what_if/{name}, path on the GPU", 100 * on_device, "%", target=">= 90" if name == "ns_resolution" else ""
    )
    for row in what_ifs(graph).iter_rows(named=True):
        target = "<= 0.6" if name == "ns_resolution" and row["change"] == "kernels" else ""
        change = "unchanged" if row["change"] == "none" else f"{row['change']} halved"
        yield Row(
            f"what_if/{name}, {change}",
            row["times"],
            "x step",
            "busiest lane alone",
            row["bound_ns"] / row["step_ns"] * row["times"],
            target=target,
        )


def bundled_rows() -> Iterator[Row]:
    """Rows of the recordings in `datasets/`."""
    for name in (n for n in datasets.names() if datasets.DATASETS[n].is_run):
        recording = Recording.of(load_run(datasets.path(name)))
        yield from profiler_rows(name, recording)
        if recording.step_times().height < 4:  # one step from two others says nothing of its spread
            continue
        scored = mechanistic(recording)
        yield from coverage_rows(name, jitter(recording))
        yield Row(
            f"bundled/{name}",
            percent(scored["error"]),
            "%",
            "null",
            percent(scored["null_error"]),
            noise(scored["measured_ns"]),
            note=f"{scored.height} steps on a CPU, which is host-bound by nature: own operators are given",
        )
    yield from delay_rows(delayed_steps(load_run(datasets.path("gpt-ddp-delay"))))


def profiler_rows(name: str, recording: Recording) -> Iterator[Row]:
    """How much longer steps take with the profiler than the same loop's before it began."""
    timed_ns = timed_steps(recording.run)["wall_ns"] if recording.run else []
    if len(timed_ns):
        (profiled_ns,) = step_spread(recording)["median_ns"]
        before_ns = float(timed_ns.median())
        note = (
            f"medians; {profiled_ns / 1e6:.1f} ms with it, {before_ns / 1e6:.1f} ms of {len(timed_ns)} steps before it"
        )
        yield Row(f"profiler/{name}", profiled_ns / before_ns, "x", note=note)


def delay_rows(steps: pl.DataFrame) -> Iterator[Row]:
    """Rows of the run with logged delays."""
    error, null = percent(steps["error"]), percent(steps["null_error"])
    yield Row(
        "delay/error",
        error,
        "%",
        "null",
        null,
        note=f"{steps.height} steps, each predicted from steps with other delays",
    )
    yield Row(
        "delay/error_of_plain_arithmetic", percent(steps["shifted_error"]), "%", note="times plus difference of delays"
    )
    yield Row("delay/error_over_null", error / null, "x", target="<= 0.5")
    late = steps.filter(pl.col("delay_ns") >= 10_000_000)
    yield Row(
        "delay/paths_over_the_delayed_rank",
        100 * float((late["path_share"] > 0.1).mean()),
        "%",
        target=">= 100",  # type: ignore[arg-type]
        note=f"{late.height} steps delayed by 10 ms or more",
    )
    delay_ns, wait_ns = steps["delay_ns"].to_numpy(), steps["peer_wait_ns"].to_numpy()
    slope = 100 * float(((delay_ns - delay_ns.mean()) * wait_ns).sum() / ((delay_ns - delay_ns.mean()) ** 2).sum())
    yield Row(
        "delay/shown_as_the_peer_waiting", slope, "%", target=">= 80", note="slope of the peer's waiting over the delay"
    )


def main() -> None:
    """Measure what is at hand and write it down."""
    rows = [*bundled_rows(), *kernel_rows(), *cpu_rows(), *intervention_rows(), *synthesis_rows()]
    rows += [*dlrm_rows(), *traced_rows(), *nlp_rows()]
    rows += [*embedding_rows(), *sharding_rows(), *measured_rows()]
    if TRACES.is_dir():
        rows += trace_rows()
        rows += pipeline_rows(TRACES)
        rows += [*overhead_rows(), *friction_rows(), *surcharge_rows(), *trace_kernel_rows(), *schedule_rows(TRACES)]
    if MEASURED.is_dir():
        scored = [*llm_rows()]
        rows += [*collective_rows(), *memory_rows(), *scored, *beside_rows(scored), *use_rows(), *blackwell_rows()]
        rows += published_rows()
    for folder in (TRACES, MEASURED):
        if not folder.is_dir():
            print(f"no {folder}: rows of what others recorded or published there stay as they are", file=sys.stderr)
    record(ACCURACY, rows)
    for row in rows:
        print(f"{row.name:45} {row.value:10.3f} {row.unit:14} {row.baseline} {row.baseline_value or ''} {row.target}")


if __name__ == "__main__":
    main()
