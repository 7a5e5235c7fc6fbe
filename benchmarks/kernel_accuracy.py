"""How well kernels are priced on groups held out whole: `python -m benchmarks.kernel_accuracy` prints the table.

Each of `FAMILIES` says what a split leaves out; the model, the baselines and the interval see its training rows alone.
The samples are the bundled `measured-kernels`. On the A100, 910 of the 2,080 products of Llama-2-7b are in Llama-3-8B
too, and the other way: leaving a model out leaves these shapes in, as it would for a user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import polars as pl

from benchmarks import workers
from benchmarks.baselines import BASELINES, Floats, Predictor
from benchmarks.rows import Row
from lumos_nb import datasets
from lumos_nb.config import find_gpu
from lumos_nb.costs.heldout import band_of, difficulty_of
from lumos_nb.costs.kernels import fit_kernels, prior_model
from lumos_nb.costs.work import with_work
from lumos_nb.errors import CalibrationError
from lumos_nb.executors import spread

OURS, BAR = "lumos_nb", "tree"
LEVEL, SMALL_US, FOLDS, INNER = 0.9, 20.0, 8, 4
WIDTHS = (0, 320, 720, 1340, 2440)
"""Quintiles of the columns of the fp32 rows: what is left out is one of these ranges, at the ends an extrapolation."""
ANY = pl.lit(True)
VIDUR, NEUSIGHT = pl.col("source") == "microsoft/vidur", pl.col("source") == "sitar-lab/NeuSight"
GEMM, ATTENTION, BANDWIDTH = (pl.col("part") == part for part in ("gemm", "attention", "bandwidth"))
HALF, B200 = pl.col("dtype").is_in(["fp16", "bf16", "fp16/bf16"]), pl.col("gpu") == "B200"
ON_ONE_GPU = ("gpu", "implementation")
HEAD_DIMS, LENGTHS = (pl.col(column).n_unique().over(ON_ONE_GPU) for column in ("head_dim", "seq_q"))


@dataclass(frozen=True)
class Family:
    """Splits of one kind: every group of `rows` is priced by those that agree in `same` and differ in all of `unseen`.

    `least` is how many values of the first of `unseen` there must be; `tested` restricts what is left out, for the
    interval too (where the training rows are split by `unseen` in turn) if `again` says so.
    """

    name: str
    rows: pl.Expr
    unseen: tuple[str, ...]
    same: tuple[str, ...] = ()
    tested: pl.Expr = ANY
    least: int = 2
    again: bool = False

    def splits(self, samples: pl.DataFrame) -> Iterator[Split]:
        """Every group left out in turn, in the order of the samples."""
        frame = samples.filter(self.rows)
        for values, test in frame.filter(self.tested).group_by([*self.same, *self.unseen], maintain_order=True):
            key = dict(zip([*self.same, *self.unseen], values, strict=True))
            alike = frame.filter(*(pl.col(column).eq_missing(key[column]) for column in self.same))
            train = alike.filter(*(pl.col(column).ne_missing(key[column]) for column in self.unseen))
            if alike[self.unseen[0]].n_unique() >= self.least and train.height > 2:
                yield Split(self, key, train, test)

    def within(self) -> Family:
        """The splits of the training rows of one of these."""
        return replace(self, tested=self.tested if self.again else ANY, least=2)


@dataclass(frozen=True)
class Split:
    """Rows to fit on and rows to price; `key` is what the latter have in common."""

    family: Family
    key: dict[str, object]
    train: pl.DataFrame
    test: pl.DataFrame

    @property
    def left_out(self) -> str:
        """The key in words, without the GPU."""
        return ", ".join(f"{value}" for column, value in self.key.items() if column != "gpu")


FAMILIES = (
    Family("half gemm, model unseen", VIDUR & GEMM, ("model",), ("gpu",)),
    Family("half gemm, GPU unseen", VIDUR & GEMM, ("gpu",)),
    Family("half gemm, GPU and model unseen", VIDUR & GEMM, ("gpu", "model")),
    Family("half bandwidth, model unseen", VIDUR & BANDWIDTH, ("model",), ("gpu",)),
    Family("fp32, GPU unseen", NEUSIGHT, ("gpu",)),
    Family("fp32 bandwidth, widths unseen", NEUSIGHT & BANDWIDTH, ("widths",), ("gpu",)),
    # all of an implementation's rows of one head dim or length on one GPU, whatever their source, mask and pass
    Family("attention, head dim unseen", ATTENTION, ("kind of heads",), tested=HEAD_DIMS > 1, again=True),
    Family("attention, length unseen", ATTENTION, ("kind of length",), tested=LENGTHS > 3, again=True),
    Family("attention, head dim unseen on any GPU", ATTENTION, ("heads anywhere",), tested=HEAD_DIMS > 1, again=True),
    Family("half, B200 unseen", HALF & ~BANDWIDTH, ("gpu",), tested=B200),
    Family("B200 gemms, weights unseen", B200 & (GEMM | (pl.col("op") == "grouped_gemm")), ("weights",), ("gpu",)),
)
APART = ("half bandwidth, model unseen", "fp32 bandwidth, widths unseen", "fp32, GPU unseen: bandwidth")
"""Families of which rows above 20 us are shown apart."""

TARGETS = {
    # family: (statistic, bound in percent); each is a mean over splits
    "half gemm, model unseen": {"median": 5.5, "mean": 7.5},
    "half gemm, GPU and model unseen": {"mean": 9.0},
    "fp32, GPU unseen": {"mean": 14.0},
    "half bandwidth, model unseen, above 20 us": {"median": 8.0},
    "fp32 bandwidth, widths unseen, above 20 us": {"median": 8.0},
    "fp32, GPU unseen: bandwidth, above 20 us": {"median": 8.0},
    "attention, head dim unseen": {"mean": 8.0},
    "attention, length unseen": {"mean": 8.0},
}


@cache
def samples() -> pl.DataFrame:
    """The bundled kernels with their work, the columns that splits go by, and `scatter`: the doubt in a time itself."""
    frame = pl.read_parquet(datasets.path("measured-kernels"))
    sheet = {gpu: find_gpu(gpu).name for gpu in frame["gpu"].unique()}
    weights = pl.when(pl.col("trans") == "NT").then(pl.col("m")).otherwise(pl.col("k"))
    parts = ["gemm", "grouped_gemm", "gemm_bias", "bmm", "attention"]
    return with_scatter(
        with_work(frame)
        .with_columns(
            gpu=pl.col("gpu").replace_strict(sheet),
            part=pl.when(pl.col("op").is_in(parts)).then("op").otherwise(pl.lit("bandwidth")),
            implementation=pl.col("method").str.split(";").list.first(),
            widths=pl.lit("columns above ")
            + pl.max_horizontal(pl.when(pl.col("cols") > w).then(w) for w in WIDTHS).cast(pl.String),
            # the weight of a linear layer is n x k forward and backward, and m x n where its gradient is the output
            weights=pl.concat_list("n", weights).list.sort().rank("dense") % FOLDS,
        )
        .with_columns(
            pl.format("{} of {}", "head_dim", "implementation").alias("heads anywhere"),
            pl.format("{} of {} on {}", "head_dim", *reversed(ON_ONE_GPU)).alias("kind of heads"),
            pl.format("{} of {} on {}", "seq_q", *reversed(ON_ONE_GPU)).alias("kind of length"),
        )
    )


def with_scatter(frame: pl.DataFrame) -> pl.DataFrame:
    """Add `scatter`, by how much of itself a time is in doubt; null where nothing shows it.

    Repeats of one shape, or ops that do the same work on one shape, differ from their mean. A time of a sweep over
    tokens differs from the line between its neighbours: tile steps are in that, so it is an upper bound. The figures of
    FlashAttention are printed in whole TFLOP/s: a quarter of one is the mean rounding.
    """
    time, number = pl.col("time_us"), pl.len()
    twin = pl.when(NEUSIGHT & pl.col("op").is_in(["add", "mul", "div"])).then(pl.lit("add")).otherwise("op")
    apart = {"time_us", "tp", "role", "qkv_contiguous", "op"}
    repeat = [*(column for column in frame.columns if column not in apart), twin.alias("twin")]
    sweep = ["gpu", "model", "tp", "role"]
    m, before, after = pl.col("m"), pl.col("m").shift(1), pl.col("m").shift(-1)
    line = time.shift(1) + (time.shift(-1) - time.shift(1)) * (m - before) / (after - before)
    printed = pl.col("source").str.contains("flash-attention FA|PR 2605")
    return (
        frame.with_row_index("row")
        .sort(*sweep, "m")
        .with_columns(
            (time / time.mean() - 1).abs().over(repeat).alias("repeated") * (number / (number - 1)).sqrt().over(repeat),
            pl.when(VIDUR & GEMM).then((time / line - 1).abs().over(sweep)).alias("swept"),
            pl.when(printed).then(0.25e6 * time / pl.col("flops")).alias("rounded"),
        )
        .with_columns(scatter=pl.coalesce(pl.col("repeated", "swept", "rounded").fill_nan(None)))
        .sort("row")
        .drop("repeated", "swept", "rounded")
    )


def ours(train: pl.DataFrame) -> Predictor:
    """The model of the package."""
    model, known = fit_kernels(train), train["method"].unique()
    # an implementation of attention that was not seen is asked for as none: the fastest of those seen
    method = pl.when(pl.col("method").is_in(known)).then("method")

    def predict(frame: pl.DataFrame) -> Floats:
        return model.predict(frame.with_columns(method=method), find_gpu(frame["gpu"][0]))["dur_us"].to_numpy()

    return predict


METHODS: dict[str, Callable[[pl.DataFrame], Predictor]] = {OURS: ours, **BASELINES}


def priced(split: Split, fit: Callable[[pl.DataFrame], Predictor]) -> pl.DataFrame:
    """The rows of a split tested, with `dur_us`; null where the model says that it has nothing to price them by."""
    predict = fit(split.train)

    def of(part: pl.DataFrame) -> pl.DataFrame:
        try:
            return part.with_columns(dur_us=pl.Series(predict(part)), floor_us=floor_us(part))
        except CalibrationError:
            return part.with_columns(dur_us=pl.lit(None, pl.Float64), floor_us=pl.lit(None, pl.Float64))

    return pl.concat([of(part) for part in split.test.partition_by("gpu", "part", maintain_order=True)])


def floor_us(part: pl.DataFrame) -> pl.Series:
    """The roofline of kernels of one GPU as the package has it, on which the width of an interval depends."""
    model = prior_model(part.select("family", "format").unique().rows())
    return model.predict(part, find_gpu(part["gpu"][0]))["floor_us"]


def with_band(split: Split, test: pl.DataFrame, fit: Callable[[pl.DataFrame], Predictor]) -> pl.DataFrame:
    """Add `low_us` and `high_us`, from up to `INNER` groups left out of the training rows in turn; null below two."""
    groups = list(split.family.within().splits(split.train))
    chosen = groups[:: -(-len(groups) // INNER) or 1]
    inner = [priced(one, fit).with_columns(group=pl.lit(str(one.key))) for one in chosen]
    known = pl.concat(inner).filter(pl.col("dur_us").is_not_null()) if inner else None

    def of(part: pl.DataFrame) -> pl.DataFrame:
        rows = None if known is None else known.filter(pl.col("part") == part["part"][0])
        if rows is None or rows["group"].n_unique() < 2:
            return part.with_columns(low_us=pl.lit(None, pl.Float64), high_us=pl.lit(None, pl.Float64))
        low, high = band_of(rows).around(part["dur_us"].to_numpy(), difficulty_of(part))
        return part.with_columns(low_us=pl.Series(low), high_us=pl.Series(high))

    return pl.concat([of(part) for part in test.partition_by("part", maintain_order=True)])


KEPT = ["part", "time_us", "scatter", "dur_us", "low_us", "high_us"]


def results(split: Split) -> pl.DataFrame:
    """Every method's prediction of a split's rows, one below another."""
    name = {"family": split.family.name, "gpu": split.test["gpu"][0], "left_out": split.left_out}
    found = []
    for method, fit in METHODS.items():
        rows = priced(split, fit)
        rows = with_band(split, rows, fit) if method == OURS else rows.with_columns(low_us=None, high_us=None)
        label = {**name, "method": method}
        found.append(rows.select(*(pl.lit(value).alias(column) for column, value in label.items()), *KEPT))
    return pl.concat(found, how="vertical_relaxed")


@cache
def _splits(family: int) -> list[Split]:
    return list(FAMILIES[family].splits(samples()))


def _job(at: tuple[int, int]) -> pl.DataFrame:
    return results(_splits(at[0])[at[1]])


def predictions() -> pl.DataFrame:
    """Every method's prediction of every row of every split: `family, gpu, left_out, method` and `KEPT`."""
    jobs = [(family, split) for family in range(len(FAMILIES)) for split in range(len(_splits(family)))]
    longest = sorted(jobs, key=lambda job: -_splits(job[0])[job[1]].train.height)
    with workers() as executor:
        found = dict(zip(longest, spread(executor, _job, longest), strict=True))
    return views(pl.concat(found[job] for job in jobs))


def views(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the parts of families that have several, and the rows above 20 us of `APART`, under names of their own."""
    several = pl.col("part").n_unique().over("family") > 1
    parts = rows.filter(several).with_columns(family=pl.col("family") + ": " + pl.col("part"))
    rows = pl.concat([rows, parts])
    above = rows.filter(pl.col("family").is_in(APART) & (pl.col("time_us") > SMALL_US))
    return pl.concat([rows, above.with_columns(family=pl.col("family") + ", above 20 us")])


def errors(rows: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Errors (percent) of the rows in every group: |predicted / measured - 1|, and what the intervals cover.

    `width` and `width_median` are (high - low) / predicted. `width_constant` is that of one symmetric factor for all
    rows, the smallest that covers as many of these very rows: it has seen the truth, the interval has not. `noise` and
    `noise_median` are the mean and median of `scatter`.
    """
    time, dur, low, high = (pl.col(name) for name in ("time_us", "dur_us", "low_us", "high_us"))
    error, width = 100 * (dur / time - 1).abs(), 100 * (high - low) / dur
    coverage = ((time >= low) & (time <= high)).mean()
    banded = (time / dur).log().abs().filter(low.is_not_null()).sort()
    factor = banded.get((coverage * banded.len() - 1e-9).ceil().cast(pl.Int64).clip(1) - 1, null_on_oob=True).exp()
    return rows.group_by(by, maintain_order=True).agg(
        rows=pl.len(),
        unpriced=dur.null_count(),
        intervals=low.count(),
        median=error.median(),
        mean=error.mean(),
        geomean=error.clip(1e-3).log().mean().exp(),
        worst=error.max(),
        within_5=100 * (error <= 5).mean(),
        within_10=100 * (error <= 10).mean(),
        coverage=100 * coverage,
        width=width.mean(),
        width_median=width.median(),
        width_constant=100 * (factor - 1 / factor),
        noise=100 * pl.col("scatter").mean(),
        noise_median=100 * pl.col("scatter").median(),
    )


def kernel_errors(rows: pl.DataFrame | None = None) -> pl.DataFrame:
    """One row for every split and method, in percent; see `errors`."""
    return errors(predictions() if rows is None else rows, "family", "gpu", "left_out", "method").sort(
        "family", "gpu", "left_out", maintain_order=True
    )


def summary(rows: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Means over splits of the errors, and how many `splits`; coverage, widths and the worst row of all rows pooled."""
    splits, pooled = kernel_errors(rows), errors(rows, *by, "method")
    averaged = ["median", "mean", "geomean", "within_5", "within_10", "noise", "noise_median"]
    means = splits.group_by(*by, "method").agg(pl.col(averaged).mean(), splits=pl.len())
    return pooled.drop(averaged).join(means, on=[*by, "method"], how="left", maintain_order="left")


PER_GPU = ("half gemm, model unseen", "half gemm, GPU and model unseen", "fp32, GPU unseen")


def kernel_rows(rows: pl.DataFrame | None = None) -> Iterator[Row]:
    """Rows of `accuracy.json`: every family, some GPU by GPU, beside the tree; then its intervals."""
    rows = predictions() if rows is None else rows
    whole = rows.with_columns(gpu=pl.lit(""), left_out=pl.col("gpu") + ", " + pl.col("left_out"))
    shown = pl.concat([rows.filter(pl.col("family").is_in(PER_GPU)), whole])
    splits, table = kernel_errors(shown), summary(shown, "family", "gpu")
    for (family, gpu), group in table.group_by("family", "gpu", maintain_order=True):
        of_group = splits.filter((pl.col("family") == family) & (pl.col("gpu") == gpu))
        yield from _error_rows(f"{family}, {gpu or 'all'}", group, of_group, TARGETS.get(str(family), {}))
    named = [family.name for family in FAMILIES]
    banded = table.filter((pl.col("gpu") == "") & pl.col("family").is_in(named) & (pl.col("method") == OURS))
    for row in banded.filter(pl.col("coverage").is_not_null()).iter_rows(named=True):
        yield from _interval_rows(row)


def _error_rows(name: str, table: pl.DataFrame, splits: pl.DataFrame, target: dict[str, float]) -> Iterator[Row]:
    """The mean (and the median where it has a target) of our errors over splits, beside the tree's."""
    by = {row["method"]: row for row in table.iter_rows(named=True)}
    mine, bar = by[OURS], by[BAR]
    for statistic in dict.fromkeys([*target, "mean"]):
        if mine[statistic] is None:
            continue  # nothing to price by: said in the report, and no figure
        noise = mine["noise_median" if statistic == "median" else "noise"]
        others = ", ".join(f"{other} {by[other][statistic]:.1f}" for other in by if other not in (OURS, BAR))
        worst = (
            splits.filter(pl.col("method") == OURS).sort(statistic, descending=True, nulls_last=True).row(0, named=True)
        )
        note = (
            f"{mine['splits']} splits, {mine['rows']} rows; worst {worst[statistic]:.1f} % on {_name(worst)}; {others}"
        )
        note += f"; {mine['unpriced']} rows not priced" if mine["unpriced"] else ""
        yield Row(
            f"kernels/{name}, {statistic}",
            mine[statistic],
            "%",
            BAR,
            bar[statistic],
            noise,
            f"<= {target[statistic]}" if statistic in target else "",
            note + _worse_than_tree(splits, statistic),
        )


def _worse_than_tree(splits: pl.DataFrame, statistic: str) -> str:
    """On how many splits the tree does better, and where by most."""
    mine, bar = (splits.filter(pl.col("method") == method) for method in (OURS, BAR))
    gap = mine.join(bar, on=["family", "gpu", "left_out"]).with_columns(
        gap=pl.col(statistic) - pl.col(f"{statistic}_right")
    )
    worse = gap.filter(pl.col("gap") > 0).sort("gap", descending=True)
    if worse.is_empty():
        return ""
    most = worse.row(0, named=True)
    return f"; the tree is better on {worse.height}, by most ({most['gap']:.1f} points) on {_name(most)}"


def _name(split: dict[str, str]) -> str:
    return f"{split['gpu']}, {split['left_out']}".strip(", ")


def _interval_rows(row: dict[str, float]) -> Iterator[Row]:
    """How far the coverage of one family is from nominal, and how wide its intervals are beside constant ones."""
    note = f"{row['coverage']:.1f} % of {row['intervals']} rows lie in their nominal {LEVEL:.0%} interval"
    off = abs(row["coverage"] - 100 * LEVEL)
    yield Row(f"kernel_intervals/{row['family']}, coverage off nominal", off, "points", target="<= 5", note=note)
    note = f"width over prediction; median {row['width_median']:.1f} %"
    yield width_row(row["family"], row["width"], row["width_constant"], note)


def width_row(family: str, width: float, constant: float, note: str) -> Row:
    """How wide intervals are, which should be no wider than constant ones that cover as many rows."""
    beside = "constant, of the same coverage on these rows"
    name = f"kernel_intervals/{family}, width"
    return Row(name, width, "%", beside, constant, target=f"<= {constant:.2f}", note=note)


def main() -> None:
    """Print every split, then the means over splits."""
    rows = predictions()
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_width_chars=250, fmt_str_lengths=70, float_precision=1):
        print(kernel_errors(rows))
        print(summary(rows, "family", "gpu"))
        print(summary(rows, "family"))
    for row in kernel_rows(rows):
        print(f"{row.name:75} {row.value:8.2f} {row.unit:7} {row.baseline} {row.baseline_value or 0:.2f} {row.target}")


if __name__ == "__main__":
    main()
