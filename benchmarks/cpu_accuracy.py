"""Operators of the bundled CPU runs, predicted by the calibration of this kind of machine, beside what traces measured.

    python -m benchmarks.cpu_accuracy

Truth is the median of an operator of a step over the even steps of a run; what the odd ones say of it is the null,
which has seen the run and is a bound. The calibration is that of `calibration-samples/cpu` without its two models of
hidden size 128: no matrix of the runs was seen. It prices one thread alone; a trace has wall time, with the profiler's
cost (0.4 us less to 2.3 us more an operator: provenance.json) and with what the other rank and other processes took.

Which of an op's times counts is `in_training`'s rule, which was reasoned out after the errors of `time_us` (all
operands cold) had been seen, and not changed by its own errors. The other states are shown beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import polars as pl

from benchmarks.machine.fit import in_training, read_samples
from benchmarks.rows import Row
from lumos_nb import datasets
from lumos_nb.config import Gpu, read_sheet
from lumos_nb.costs.calibration import GENERIC, Calibration, load_calibration
from lumos_nb.costs.fitting import calibrate, fit_gpu
from lumos_nb.costs.samples import kernel_samples
from lumos_nb.costs.work import with_work
from lumos_nb.traces.run import load_run

RUNS = ("gpt-single", "gpt-ddp", "gpt-tp", "gpt-pp")
SAMPLES = datasets.root() / "calibration-samples" / "cpu"
SEEN = r":h128$"
"""Models of the samples with the hidden size of the runs."""
STATES = {"in training": None, "all cold": "time_us", "all warm": "warm_us", "all fresh": "fresh_us"}
OURS, FLOOR, NULL = "lumos_nb", "roofline", "odd steps"
OP = ("rank", "op", "pass", "dtype", "batch", "m", "n", "k", "trans", "rows", "cols", "seq_q", "heads", "head_dim")


@cache
def traced(run: str) -> pl.DataFrame:
    """A row an operator of a step: `time_us` and `odd_us`, medians over even and odd steps; `scatter` over all."""
    samples = kernel_samples(load_run(datasets.path(run))).filter(pl.col("why").is_null() & (pl.col("time_us") > 0))
    even = pl.col("step") % 2 == 0
    return (
        samples.with_columns(number=pl.int_range(pl.len()).over("step", *OP))
        .group_by(*OP, "number", maintain_order=True)
        .agg(
            pl.col("time_us").filter(even).median().alias("even_us"),
            odd_us=pl.col("time_us").filter(~even).median(),
            scatter=(pl.col("time_us") / pl.col("time_us").median() - 1).abs().median(),
            **{c: pl.col(c).first() for c in samples.columns if c not in (*OP, "time_us", "step", "method", "source")},
        )
        .rename({"even_us": "time_us"})
        .drop_nulls(["time_us", "odd_us"])
    )


@cache
def unseen(state: str | None = None) -> Calibration:
    """The calibration of the samples without the models of hidden size 128, of one state or as in training."""
    kernels, _, _ = read_samples(SAMPLES)
    kernels = kernels.filter(~pl.col("group").str.contains(SEEN)).with_columns(licence=pl.lit("own"), model="group")
    rows = in_training(kernels) if state is None else kernels.with_columns(time_us=state)
    sheet = read_sheet(SAMPLES / "sheet.json", Gpu)
    return fit_gpu(sheet, rows, load_calibration(GENERIC).for_gpu(sheet))


def by_sheet(frame: pl.DataFrame, sheet: Gpu) -> pl.Expr:
    """The roofline: FLOPs at the peak rate, or bytes at the bandwidth."""
    rates = {dtype: sheet.peak_flops.get(dtype, sheet.peak("fp32")) for dtype in frame["dtype"].unique()}
    peak = pl.col("dtype").replace_strict(rates, return_dtype=pl.Float64)
    return 1e6 * pl.max_horizontal(pl.col("flops") / peak, pl.col("bytes") / sheet.memory_bytes_per_s)


def priced(frame: pl.DataFrame, calibration: Calibration) -> pl.DataFrame:
    """A kernel frame with the predictions of a calibration and `floor_us`, the roofline of its sheet."""
    work = with_work(calibration.predict_kernels(frame))
    return work.with_columns(floor_us=by_sheet(work, calibration.gpu))


def errors(rows: pl.DataFrame, *by: str, predicted: str = "dur_us") -> pl.DataFrame:
    """How far `predicted` is from `time_us` in every group; errors, basis and `coverage` of the interval in percent."""
    guess, time = pl.col(predicted), pl.col("time_us")
    times = pl.col("launches") if "launches" in rows.columns else pl.lit(1)
    basis = {name: 100 * (pl.col("basis") == name).mean() for name in ("measured", "transferred", "data sheet")}
    return (
        rows.group_by(by or pl.lit("all").alias("family"), maintain_order=True)
        .agg(
            pl.len().alias("ops"),
            traced_us=(times * time).sum(),
            predicted_us=(times * guess).sum(),
            ratio=(times * guess).sum() / (times * time).sum(),
            median=100 * (guess / time - 1).abs().median(),
            weighted=100 * (times * (guess - time).abs()).sum() / (times * time).sum(),
            roofline=100 * (pl.col("floor_us") / time - 1).abs().median(),
            null=100 * (pl.col("odd_us") / time - 1).abs().median() if "odd_us" in rows.columns else None,
            scatter=100 * pl.col("scatter").median() if "scatter" in rows.columns else None,
            coverage=100 * ((time >= pl.col("low_us")) & (time <= pl.col("high_us"))).mean(),
            **basis,
            outside=100 * pl.col("out_of_range").mean(),
        )
        .sort("traced_us", descending=True)
    )


def factors(tables: dict[str, pl.DataFrame]) -> dict[str, float]:
    """Of every run, traced over predicted time of all the others: what a common clock or contention would be."""
    sums = {run: table.select(pl.sum("time_us", "dur_us")).row(0) for run, table in tables.items()}
    others = {run: [sums[other] for other in sums if other != run] for run in sums}
    return {run: sum(t for t, _ in pairs) / sum(d for _, d in pairs) for run, pairs in others.items()}


def cpu_rows() -> Iterator[Row]:
    """Rows of `accuracy.json`."""
    tables = {run: priced(traced(run), unseen()) for run in RUNS}
    states = {state: {run: priced(traced(run), unseen(state)) for run in RUNS} for state in STATES.values() if state}
    adapted = calibrate(load_run(datasets.path(RUNS[0])), unseen())
    common = factors(tables)
    for run, table in tables.items():
        whole = errors(table).row(0, named=True)
        scaled = errors(table.with_columns(dur_us=pl.col("dur_us") * common[run])).row(0, named=True)
        null = errors(table, predicted="odd_us").row(0, named=True)
        floor = errors(table, predicted="floor_us").row(0, named=True)
        basis = ", ".join(f"{name} {whole[name]:.0f} %" for name in ("measured", "transferred", "data sheet"))
        note = f"{whole['ops']} operators of a step; {whole['coverage']:.0f} % in their 90 % interval; {basis}"
        note += f"; with the factor of the other runs, {common[run]:.2f}: "
        what = f"cpu_kernels/{run}"
        for statistic in ("median", "weighted"):
            yield Row(
                f"{what}, {statistic}", whole[statistic], "%", FLOOR, floor[statistic], null[statistic],
                note=f"{note}{scaled[statistic]:.1f} %",
            )  # fmt: skip
        note = f"with that factor {scaled['ratio']:.2f}"
        yield Row(f"{what}, sum of a step", whole["ratio"], "x traced", FLOOR, floor["ratio"], null["ratio"], note=note)
        for state, of_runs in states.items():
            other = errors(of_runs[run]).row(0, named=True)
            words = f"{next(name for name, s in STATES.items() if s == state)}, weighted"
            note = f"sum of a step {other['ratio']:.2f} x, median {other['median']:.1f} %"
            yield Row(f"{what}, {words}", other["weighted"], "%", OURS, whole["weighted"], note=note)
        if run != RUNS[0]:
            own = errors(priced(traced(run), adapted)).row(0, named=True)
            note = f"sum of a step {own['ratio']:.2f} x, {own['coverage']:.0f} % in their interval"
            for statistic in ("median", "weighted"):
                words = f"{what}, adapted on {RUNS[0]}, {statistic}"
                yield Row(words, own[statistic], "%", "not adapted", whole[statistic], null[statistic], note=note)


def main() -> None:
    """Print each run by family, then the rows."""
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_width_chars=250, float_precision=1, tbl_hide_dataframe_shape=True):
        for run in RUNS:
            table = priced(traced(run), unseen())
            print(run, pl.concat([errors(table, "family"), errors(table)]), sep="\n")
    for row in cpu_rows():
        beside = f"{row.baseline} {row.baseline_value:.2f}" if row.baseline_value is not None else ""
        print(f"{row.name:62} {row.value:8.2f} {row.unit:9} {beside:22} noise {row.noise or 0:6.2f}  {row.note}")


if __name__ == "__main__":
    main()
