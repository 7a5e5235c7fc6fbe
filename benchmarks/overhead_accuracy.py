"""The host's time of a step, put together from overheads that other steps or other recordings gave, against measured.

A step's own parts are given (which operators it runs, how often each launches), their costs are not. Recordings of a
CPU are not scored: there the host's time is that of the kernels. Nothing was fitted on these scores, but that the mean
under a name counts the long samples, as it must where parts add up, was settled with the scores of both means in view;
that families and wholes do not, on costs of names left out in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import polars as pl

from benchmarks import TRACES
from benchmarks.rows import Row
from benchmarks.scores import noise, percent
from lumos_nb.costs.host import Overheads, host_parts, launch_latencies, pooled, with_families
from lumos_nb.evaluate import chosen_steps, leave_one_out
from lumos_nb.graph import Recording
from lumos_nb.traces.run import load_run

RECORDINGS = {
    # GPU: its recordings, one a workload
    "V100": {
        "df_index_resolver": "hta/df_index_resolver",
        "ns_resolution": "hta/ns_resolution_trace",
        "torchrec_resnet18": "torchrec/resnet18",
        "torchrec_optimizer_4": "torchrec/sst_long_a2a_optimizer_4",
        "resnet50_of_2021": "kineto/tb_plugin/samples/resnet50_num_workers_0",
    },
    "A100": {"nccl_data": "hta/nccl_parser_config", "trace_diff": "hta/trace_diff/control"},
    "MI300X": {"MI300X_resnet": "tracelens/mi300/resnet_act_checkpoint.json.gz"},
}

PAPER_T4_US = 4.0
"""What Lin et al. take every launch call to cost."""


@dataclass(frozen=True, slots=True)
class Scored:
    """One recording: `steps` with the host's time of each rank and step in us, and the parts and samples of all."""

    steps: pl.DataFrame
    parts: pl.DataFrame
    samples: pl.DataFrame


def host_us(parts: pl.DataFrame, cost_us: pl.Expr) -> pl.Series:
    """Work of each rank's threads that launch (the training loop's and autograd's, which take turns), by rank."""
    launching = parts.filter(pl.col("overhead") == "T4").select("rank", "lane").unique()
    work = parts.join(launching, on=["rank", "lane"], how="semi")
    return work.group_by("step", "rank").agg(us=cost_us.sum()).sort("step", "rank")["us"]


def predictions(costs: Overheads, parts: pl.DataFrame) -> dict[str, pl.Series]:
    """Host time by the costs of its parts: as measured, with the paper's T4, and without outliers as well."""
    assumed = pl.when((pl.col("overhead") == "T4") & (pl.col("family") == "launch")).then(PAPER_T4_US)
    found, trimmed = (with_families(costs.find(parts, statistic)) for statistic in (None, "trimmed_us"))
    return {
        "predicted": host_us(found, pl.col("cost_us")),
        "assumed": host_us(found, assumed.otherwise("cost_us")),
        "paper": host_us(trimmed, assumed.otherwise("cost_us")),
    }


def score(recording: Recording) -> Scored:
    """Each step's host time, measured and from the overheads of the same rank in the other steps."""
    graphs = list(leave_one_out(recording, chosen_steps(recording, None, least=2)))
    own = {graph.step: host_parts(graph.ops).with_columns(step=pl.lit(graph.step)) for _, graph, _ in graphs}
    measured = {step: host_us(parts, pl.col("dur_ns") / 1000) for step, parts in own.items()}
    rows = []
    for before, graph, others in graphs:
        parts = [own[graph.step].filter(pl.col("rank") == rank) for rank in sorted(own[graph.step]["rank"].unique())]
        other = pl.concat([host_parts(another.ops) for another in others.values()])
        by_rank = [pl.DataFrame(predictions(pooled(other.filter(pl.col("rank") == p["rank"][0])), p)) for p in parts]
        row = pl.concat(by_rank).with_columns(measured=measured[graph.step], null=measured[before])
        rows.append(row.with_row_index("rank"))
    latencies = [launch_latencies(graph.ops) for _, graph, _ in graphs]
    parts = pl.concat(list(own.values()))
    return Scored(pl.concat(rows), parts, pl.concat([parts.drop("step"), *latencies]))


def _error(table: pl.DataFrame, column: str) -> float:
    return percent(table[column] / table["measured"] - 1)


def own_row(name: str, scored: Scored) -> Row:
    """Row of a recording whose steps are predicted from each other."""
    table = scored.steps
    note = f"{table.height} steps of ranks; with T4 = {PAPER_T4_US:.0f} us {_error(table, 'assumed'):.1f} %, "
    note += f"without outliers as well, as in the paper, {_error(table, 'paper'):.1f} %"
    by_rank = [noise(rank["measured"]) for rank in table.partition_by("rank")]
    null, scatter = _error(table, "null"), sum(by_rank) / len(by_rank)
    return Row(f"host_time/{name}", _error(table, "predicted"), "%", "null", null, scatter, note=note)


def shared_row(name: str, scored: Scored, costs: Overheads, gpu: str) -> Row:
    """Row of a recording that is predicted from the others of its GPU, by the overheads that these have."""
    parts = scored.parts.filter(pl.col("overhead").is_in(costs.table["overhead"].unique().implode()))
    table = pl.DataFrame(predictions(costs, parts)).with_columns(measured=host_us(parts, pl.col("dur_ns") / 1000))
    total_ns = scored.parts["dur_ns"].sum()
    known_ns = costs.find(parts).filter(pl.col("pooled_from") == "name")["dur_ns"].sum()
    left_out = scored.parts.join(parts.select("overhead").unique(), on="overhead", how="anti")
    ratio = float((table["predicted"] / table["measured"]).median())  # type: ignore[arg-type]
    note = f"from the other {gpu} recordings, of other hosts and profilers: {ratio:.2f} of measured; "
    note += f"{known_ns / total_ns:.0%} of the time has a name that these have"
    for overhead in sorted(left_out["overhead"].unique()):
        share = left_out.filter(pl.col("overhead") == overhead)["dur_ns"].sum() / total_ns
        note += f"; without {overhead}, {share:.0%} of the time, of which they have none"
    error, paper = _error(table, "predicted"), _error(table, "paper")
    return Row(f"host_time/{name}, shared overheads", error, "%", "as in the paper", paper, note=note)


def cost_rows(gpu: str, recordings: Mapping[str, Scored]) -> Iterator[Row]:
    """Rows of what a launch costs on each recording: its call, beside the paper's constant, and its latency."""
    for name, scored in recordings.items():
        costs = pooled(scored.samples)
        for overhead, baseline in (("T4", PAPER_T4_US), ("launch_latency", None)):
            calls = [r for r in costs.rows if (r.overhead, r.pooled_from, r.name) == (overhead, "family", "launch")]
            for r in calls:
                note = f"median; 80 % within {r.p10_us:.1f} to {r.p90_us:.1f}, {r.outliers} outliers of {r.count}"
                beside = {"baseline": "the paper's", "baseline_value": baseline} if baseline else {}
                yield Row(f"overheads/{gpu} {name}, {overhead}", r.median_us, "us", note=note, **beside)


def overhead_rows() -> Iterator[Row]:
    """Rows of all recordings: what launches cost, and the host's time from other steps and from other recordings."""
    for gpu, paths in RECORDINGS.items():
        scored = {name: score(Recording.of(load_run(TRACES / path))) for name, path in paths.items()}
        yield from cost_rows(gpu, scored)
        for name, one in scored.items():
            yield own_row(name, one)
            others = [other.samples for another, other in scored.items() if another != name]
            if others:
                yield shared_row(name, one, pooled(pl.concat(others)), gpu)
