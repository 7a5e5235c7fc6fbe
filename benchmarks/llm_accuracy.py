"""Predicted against measured step times of published training runs, by source: `python -m benchmarks.llm_accuracy`.

Each row of the table is read by `read_row` and predicted from configuration alone. Three protocols: nothing known of
the source; one factor, fitted on the other scored sources; one run of each GPU count of the source known, the mean over
which run that is. Regret is how much slower the layout with the least predicted time ran than the best one measured.

`python -m benchmarks.llm_accuracy vTrain tp pp` shows errors of one source by columns of the table instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks import published, workers
from benchmarks.llm_peers import Job, calculon_like, six_pt
from benchmarks.rows import Row
from lumos_nb.errors import InputError, LumosError
from lumos_nb.executors import spread
from lumos_nb.workloads.llm.estimates import Brief, PricedStep
from lumos_nb.workloads.llm.memory import peak_bytes
from lumos_nb.workloads.llm.screening import SPARE
from lumos_nb.workloads.llm.table_rows import read_row
from lumos_nb.workloads.pricing import prices_of
from lumos_nb.workloads.surcharges import bundled

Floats = NDArray[np.float64]
Predictor = Callable[[Job], tuple[float, float, float] | float]
"""Seconds of a step, alone or with the two ends of their interval."""
GPUS_OF_A_NODE = 8


class Source(NamedTuple):
    """Rows of one origin: how they are used and why so, and bounds of the statistic in percent by protocol."""

    name: str
    rows: pl.Expr
    use: Literal["scored", "stress", "not predictable"]
    why: str
    targets: Mapping[str, float] = {}
    statistic: str = "mean"
    clean: bool = True  # enough to fit a factor for others on

    @property
    def origin(self) -> str:
        """What is not fitted on for it: the first word of its name, as in `datasets/surcharges.json`."""
        return self.name.split()[0].rstrip(",")


def _of(*words: str) -> pl.Expr:
    return pl.any_horizontal(pl.col("source").str.contains(word, literal=True) for word in words)


def _nodes(least: int, most: int) -> pl.Expr:
    return pl.col("num_gpus").is_between(least * GPUS_OF_A_NODE, most * GPUS_OF_A_NODE)


BF16 = pl.col("precision").str.contains("bf16")
H100, LORA = pl.col("gpu").str.starts_with("H100"), pl.col("task") == "lora-finetune"
NANOTRON = _of("nanotron") & ~pl.col("notes").str.contains("SUSPECT")
SIZED = pl.col("hidden").is_not_null() & pl.col("heads").is_not_null() & pl.col("layers").is_not_null()
TIMED = pl.col("global_batch").is_not_null() & pl.col("seq").is_not_null()
BRIDGE, NEMOTRON = _of("Megatron-Bridge"), _of("nemotron/")
SOURCES = (
    Source("vTrain", _of("vTrain single-node"), "scored", "one node of A100; that all layers are recomputed and the "
           "vocabulary are the table's assumption", {"zero-shot": 20, "one run": 9}),
    Source("nanotron, 1-2 nodes", NANOTRON & _nodes(1, 2), "scored", "short runs; those that are 3 times slower than a "
           "twin are left out", {"zero-shot": 10}, "median"),
    Source("nanotron, 4-32 nodes", NANOTRON & _nodes(4, 32), "scored", "the same; the slow tail is contaminated",
           {}, "median", False),
    Source("llm-foundry", _of("llm-foundry") & BF16, "scored", "FSDP on A100 and H100",
           {"zero-shot": 12, "one run": 6}),
    Source("tr11", _of("tr11") & SIZED & TIMED, "scored", "BLOOM's log, complete rows; no vocabulary stated"),
    Source("fms-fsdp", _of("fms-fsdp"), "scored", "8 rows, which layers are recomputed is not stated"),
    Source("Megatron-Bridge, bf16 on H100", BRIDGE & BF16 & H100, "scored", "one model (GPT-OSS) over releases"),
    Source("Nemotron, bf16 on H100", NEMOTRON & BF16 & H100, "scored", "vendor's figures; sizes by name"),
    Source("Megatron 2022", _of("Korthikanti"), "scored", "8 published times, beside which Calculon was made"),
    Source("llm-foundry, fp8", _of("llm-foundry") & ~BF16, "stress", "12 products in fp8 were measured anywhere"),
    Source("Megatron-Bridge, fp8 on H100", BRIDGE & ~BF16 & H100 & SIZED, "stress", "fp8, experts or 1,024 GPUs"),
    Source("Megatron-Bridge, Blackwell", BRIDGE & ~H100 & SIZED, "stress", "GPUs with few or no measured kernels"),
    Source("NeMo", _of("NVIDIA/NeMo ") & SIZED, "stress", "fp8 throughout"),
    Source("Nemotron, fp8 or GB200", NEMOTRON & ~(BF16 & H100), "stress", "fp8, GPUs of which nothing was measured"),
    Source("B200 HGX", _of("B200 HGX"), "stress", "5 rows of 4 formats"),
    Source("xtuner", _of("xtuner"), "stress", "experts on H800, of which nothing was measured"),
    Source("nanotron, 64 nodes", NANOTRON & _nodes(64, 64), "stress", "a contaminated tail"),
    Source("MLPerf GPT-3", _of("mlcommons") & ~LORA, "stress", "fp8, CUDA graphs, SHARP, overlapped TP"),
    Source("MLPerf LoRA", _of("mlcommons") & LORA, "stress", "fp8, frozen weights with adapters of an assumed rank"),
    Source("gpt2 V100", _of("gpt2 V100"), "not predictable", "no hidden size, heads, layers or vocabulary"),
    Source("tr11, incomplete", _of("tr11") & ~(SIZED & TIMED), "not predictable", "sizes or batch missing"),
    Source("Primus blog", _of("Primus"), "not predictable", "no sequence length, no batch"),
    Source("ColossalAI", _of("ColossalAI"), "not predictable", "no sizes"),
    Source("Nemotron-H", _of("nemotronh/"), "not predictable", "no sizes, no transformer throughout"),
    Source("models without sizes", (BRIDGE | _of("NVIDIA/NeMo ")) & ~SIZED, "not predictable", "no sizes"),
)  # fmt: skip
"""Every row is in exactly one of these, but for nanotron's that ran 3 times slower than a twin."""
SAME_RUN = (
    "gpu", "num_gpus", "precision", "model", "hidden", "heads", "layers", "seq", "tp", "pp", "cp", "vp", "ep", "dp",
    "micro_batch", "global_batch", "recompute", "task",
)  # fmt: skip
"""What rows agree in that should take the same time: repeats, and twins that differ in ZeRO alone."""


def ours(job: Job) -> Brief:
    """Seconds of a step and their interval by this package; no surcharge was fitted on runs of the same origin."""
    surcharges = bundled().without.get(job.origin, bundled().every)
    prices = prices_of(job.cluster, None)
    return PricedStep.of(job.model, job.layout, job.train, job.cluster, prices).brief(surcharges)


def _predicted(predictor: Predictor, job: Job) -> tuple[float, float, float, str]:
    try:
        found = predictor(job)
    except LumosError as error:
        return np.nan, np.nan, np.nan, str(error)
    return (*found, "") if isinstance(found, tuple) else (found, found, found, "")


def _read(row: Mapping[str, Any]) -> Job | str:
    """What a row says, or why it cannot be read."""
    try:
        setup = read_row(row)
    except InputError as error:
        return str(error)
    nameless = msgspec.structs.replace(setup.model, name="")
    return Job(nameless, setup.layout, setup.train, setup.cluster, row["origin"])


def predictions(rows: pl.DataFrame, predictor: Predictor) -> pl.DataFrame:
    """The rows with `predicted_s`, `low_s`, `high_s` and why one was `refused`; what is alike is predicted once."""
    read = [_read(row) for row in rows.iter_rows(named=True)]
    jobs = [job for job in dict.fromkeys(read) if not isinstance(job, str)]
    with workers() as executor:
        by_job = dict(zip(jobs, spread(executor, partial(_predicted, predictor), jobs), strict=True))
    found = [(np.nan, np.nan, np.nan, job) if isinstance(job, str) else by_job[job] for job in read]
    names = ["predicted_s", "low_s", "high_s", "refused"]
    return rows.hstack(pl.DataFrame(found, schema=names, orient="row").with_columns(pl.col(names[:3]).fill_nan(None)))


MEGATRON_2022 = (
    # layers, hidden, heads, pp, vp, GPUs, micro-batch, global batch, seconds with full and with selective recomputation
    (48, 6144, 64, 1, 1, 8, 4, 4, 1.42, 1.10),
    (96, 12288, 96, 8, 3, 64, 1, 64, 18.13, 13.75),
    (105, 20480, 128, 35, 3, 280, 1, 280, 49.05, 37.83),
    (128, 25600, 160, 64, 1, 512, 1, 512, 94.42, 71.49),
)
"""Table 5 of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022)."""


def megatron_rows() -> pl.DataFrame:
    """The rows of `MEGATRON_2022` with the columns of the table; in full recomputation the sequence was not spread."""
    sizes = ["layers", "hidden", "heads", "pp", "vp", "num_gpus", "micro_batch", "global_batch"]
    rows = pl.DataFrame(MEGATRON_2022, schema=[*sizes, "full", "selective"], orient="row")
    rows = rows.unpivot(["full", "selective"], index=sizes, variable_name="recompute", value_name="step_time_s")
    fixed = {"gpu": "A100-SXM-80GB", "precision": "fp16", "model": "GPT", "vocab": 51200.0, "seq": 2048.0, "tp": 8.0}
    fixed |= {"source": "Korthikanti et al. 2022 (Megatron-LM)", "sharding": "ddp", "task": "pretrain", "notes": ""}
    numbers = rows.with_columns(pl.col(sizes).cast(pl.Float64))
    names = pl.format("K{}", pl.int_range(pl.len()))
    return numbers.with_columns(row_id=names, **{name: pl.lit(value) for name, value in fixed.items()})


@cache
def table() -> pl.DataFrame:
    """The measured rows that belong to a source, with `name`, `origin`, `use` and `measured_s`."""
    rows = pl.read_csv(published("llm_training.csv"), infer_schema_length=None)
    rows = pl.concat([rows, megatron_rows()], how="diagonal")
    tokens = pl.col("global_batch") * pl.col("seq")
    measured = pl.coalesce("step_time_s", tokens / pl.col("tokens_per_s_per_gpu") / pl.col("num_gpus"))
    return pl.concat(
        rows.filter(source.rows).with_columns(
            name=pl.lit(source.name), origin=pl.lit(source.origin), use=pl.lit(source.use), measured_s=measured
        )
        for source in SOURCES
    )


# How far off: all of these take ratios of predicted to measured


class Score(NamedTuple):
    """Errors in percent, and the median ratio less one."""

    mean: float
    median: float
    geometric: float
    worst: float
    within_5: float
    within_10: float
    bias: float

    @classmethod
    def of(cls, ratio: Floats) -> Score:
        size = 100 * np.abs(ratio - 1)
        geometric = 100 * (np.exp(np.abs(np.log(ratio)).mean()) - 1)
        shares = (100 * float((size <= most).mean()) for most in (5, 10))
        return cls(size.mean(), float(np.median(size)), geometric, size.max(), *shares, 100 * (np.median(ratio) - 1))

    def __str__(self) -> str:
        return (
            f"median {self.median:.1f}, mean {self.mean:.1f}, geometric {self.geometric:.1f}, worst {self.worst:.0f}; "
            f"{self.within_5:.0f} % within 5, {self.within_10:.0f} within 10; bias {self.bias:+.1f}"
        )


def ratios(rows: pl.DataFrame) -> Floats:
    """Predicted over measured of the rows that were predicted."""
    return (rows["predicted_s"] / rows["measured_s"]).drop_nulls().to_numpy()


def factor_of_others(rows: pl.DataFrame, origin: str) -> float:
    """What to multiply predictions by so that scored rows of other origins are right, each origin alike."""
    clean = [source.name for source in SOURCES if source.use == "scored" and source.clean]
    others = rows.filter(pl.col("name").is_in(clean), pl.col("origin") != origin).partition_by("origin")
    return float(np.exp(-np.mean([np.median(np.log(ratios(part))) for part in others])))


def one_run_known(rows: pl.DataFrame, by: tuple[str, ...] = ("gpu", "num_gpus")) -> Floats:
    """Ratios of all pairs of one known run and another of its group, predicted times the known one's factor."""
    pairs = []
    for part in rows.partition_by(by):
        ratio = ratios(part)
        pairs.append((ratio[None, :] / ratio[:, None])[~np.eye(len(ratio), dtype=bool)])
    return np.concatenate(pairs)


def regrets(rows: pl.DataFrame, by: tuple[str, ...], within: float = np.inf, least: int = 3) -> Floats:
    """How much slower the layout predicted as fastest ran than the best of its group, in percent.

    Of each group only rows up to `within` times the best one's time count; groups of fewer than `least` rows do not.
    The best of a group is its column `best`, if that is there: that of more rows than may be chosen.
    """
    best = pl.col("best") if "best" in rows.columns else pl.min("measured_s").over(by)
    ranked = (
        rows.drop_nulls("predicted_s").with_columns(best=best).filter(pl.col("measured_s") <= within * pl.col("best"))
    )
    groups = ranked.group_by(by, maintain_order=True).agg(
        pl.col("best").first(), chosen=pl.col("measured_s").sort_by("predicted_s").first(), count=pl.len()
    )
    found = groups.filter(pl.col("count") >= least).select(100 * (pl.col("chosen") / pl.col("best") - 1))
    return found.to_series().to_numpy()


def noise(rows: pl.DataFrame) -> float | None:
    """Median distance of repeats and twins from their median, in percent; None where there are none."""
    middle = pl.median("measured_s").over(SAME_RUN)
    twins = rows.filter(pl.len().over(SAME_RUN) > 1).select(100 * (pl.col("measured_s") / middle - 1).abs())
    return float(twins.to_series().median()) if twins.height else None  # type: ignore[arg-type]


# Rows of accuracy.json

PEERS: Mapping[str, Predictor] = {"Calculon-like": calculon_like, "6PT": six_pt}
REGRETS = (
    # sources, what a group agrees in, how many times the best is still ranked, bound of the mean
    ("vTrain", ("hidden", "layers", "num_gpus", "global_batch"), np.inf, 4.0),
    ("nanotron, 1-2 nodes", ("model", "num_gpus"), 5.0, 3.0),
    ("nanotron, 4-32 nodes", ("model", "num_gpus"), 5.0, 8.0),
)


def protocols(rows: pl.DataFrame, source: Source) -> dict[str, Floats]:
    """Ratios of a source's rows under each protocol."""
    own = rows.filter(pl.col("name") == source.name)
    plain, factor = ratios(own), factor_of_others(rows, source.origin)
    return {"zero-shot": plain, "others' factor": factor * plain, "one run": one_run_known(own)}


def step_rows(ours: pl.DataFrame, peers: Mapping[str, pl.DataFrame]) -> Iterator[Row]:
    """Errors of the scored sources under each protocol."""
    for source in (s for s in SOURCES if s.use == "scored"):
        own = ours.filter(pl.col("name") == source.name)
        beside = {name: protocols(rows, source) for name, rows in peers.items()}
        for protocol, found in protocols(ours, source).items():
            if not len(found):  # no GPU count has two runs
                continue
            score = Score.of(found)
            statistic, target = source.statistic, source.targets.get(protocol)
            others = {name: getattr(Score.of(by[protocol]), statistic) for name, by in beside.items()}
            note = f"{own['predicted_s'].count()} rows; {score}"
            fitted = getattr(Score.of(beside["6PT"]["others' factor"]), statistic)
            note += f"; 6PT {fitted if protocol == 'zero-shot' else others['6PT']:.1f}"
            yield Row(
                f"llm_steps/{source.name}, {protocol}, {statistic}", getattr(score, statistic), "%", "Calculon-like",
                others["Calculon-like"], noise(own), "" if target is None else f"<= {target}", note,
            )  # fmt: skip


def interval_rows(ours: pl.DataFrame) -> Iterator[Row]:
    """How many measured times lie in the nominal 90 % interval, and how wide that is."""
    for source in (s for s in SOURCES if s.use == "scored"):
        own = ours.filter(pl.col("name") == source.name).drop_nulls("predicted_s")
        inside = 100 * float(own.select(pl.col("measured_s").is_between("low_s", "high_s").mean()).item())
        width = 100 * own.select((pl.col("high_s") - pl.col("low_s")) / pl.col("predicted_s")).to_series()
        note = f"{own.height} rows; width {width.mean():.0f} % of the prediction, median {width.median():.0f}"
        yield Row(f"llm_intervals/{source.name}", inside, "% covered", note=note)


def with_room(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows that a planner would look at: their predicted memory leaves `SPARE` of the GPU's."""
    jobs = [_read(row) for row in rows.iter_rows(named=True)]
    share = [peak_bytes(*job[:3]) / job.cluster.gpu_sheet.memory_bytes for job in jobs if isinstance(job, Job)]
    return rows.filter(pl.Series(share) <= 1 - SPARE)


def regret_rows(ours: pl.DataFrame, peers: Mapping[str, pl.DataFrame]) -> Iterator[Row]:
    """How much slower the layouts that are predicted as fastest ran than the best ones."""
    for name, by, within, bound in REGRETS:
        own = ours.filter(pl.col("name") == name, pl.col("refused") == "")
        own = own.with_columns(best=pl.min("measured_s").over(by))
        roomy = with_room(own)
        of_all, found = regrets(own, by, within), regrets(roomy, by, within)
        others = [rows.filter(pl.col("row_id").is_in(roomy["row_id"].implode())) for rows in peers.values()]
        with_best = [rows.join(roomy.select("row_id", "best"), on="row_id") for rows in others]
        beside = {peer: regrets(rows, by, within).mean() for peer, rows in zip(peers, with_best, strict=True)}
        note = (
            f"{len(found)} groups; median {np.median(found):.1f}, worst {found.max():.0f}; {of_all.mean():.1f} without "
        )
        note += f"a look at memory; any layout {_any_layout(own, by, within):.0f}; 6PT {beside['6PT']:.1f}"
        yield Row(
            f"llm_regret/{name}, mean", found.mean(), "%", "Calculon-like", beside["Calculon-like"],
            target=f"<= {bound}", note=note,
        )  # fmt: skip


def _any_layout(rows: pl.DataFrame, by: tuple[str, ...], within: float) -> float:
    """Mean regret of a layout taken at random."""
    over = 100 * (pl.col("measured_s") / pl.min("measured_s").over(by) - 1)
    ranked = rows.with_columns(over=over).filter(pl.col("over") <= 100 * (within - 1), pl.len().over(by) >= 3)
    return float(ranked.group_by(by).agg(pl.mean("over"))["over"].mean())  # type: ignore[arg-type]


def source_rows(ours: pl.DataFrame) -> Iterator[Row]:
    """What each source is used for and why; of those for stress, the errors."""
    for source in SOURCES:
        own = ours.filter(pl.col("name") == source.name)
        read = own.filter(pl.col("refused") == "")
        note = f"of {own.height}; {source.use}: {source.why}"
        if source.use == "stress" and read.height:
            note += f"; zero-shot {Score.of(ratios(own))}"
        yield Row(f"llm_sources/{source.name}", read.height, "rows", noise=None, note=note)


def llm_rows() -> Iterator[Row]:
    """All rows of step times."""
    found = predictions(table(), ours)
    peers = {name: predictions(table(), predictor) for name, predictor in PEERS.items()}
    yield from source_rows(found)
    yield from step_rows(found, peers)
    yield from interval_rows(found)
    yield from regret_rows(found, peers)


def by_columns(name: str, columns: list[str]) -> pl.DataFrame:
    """Errors of the rows of a source by columns of the table."""
    found = predictions(table().filter(pl.col("name").str.contains(name)), ours).drop_nulls("predicted_s")
    ratio = pl.col("predicted_s") / pl.col("measured_s")
    return found.group_by(columns or ["name"]).agg(
        rows=pl.len(), median_ratio=ratio.median(), low=ratio.quantile(0.1), high=ratio.quantile(0.9),
        mean_error=100 * (ratio - 1).abs().mean(),
    ).sort(columns or ["name"])  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with pl.Config(tbl_rows=200, tbl_cols=20, float_precision=3):
            print(by_columns(sys.argv[1], sys.argv[2:]))
    else:
        for row in llm_rows():
            print(
                f"{row.name:60} {row.value:7.2f} {row.unit:9} {row.baseline_value or 0:7.2f} {row.target:8} {row.note}"
            )
