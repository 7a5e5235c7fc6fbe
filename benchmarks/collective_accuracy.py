"""How well collectives are priced on sweeps held out: `python -m benchmarks.collective_accuracy` prints the tables.

The samples are `../shared/measured/collectives.csv`, less what its notes call disturbed and what no sheet can price.
Constants are fitted to training rows alone; but the form of the model and its priors were chosen with the errors of
these splits in view, so they flatter it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import polars as pl

from benchmarks import published, workers
from benchmarks.baselines_collectives import BASELINES, bus, related
from benchmarks.kernel_accuracy import errors
from benchmarks.rows import Row
from lumos_nb.costs.collectives import SWEEP, bands_of, fit_collectives, priceable, with_interval
from lumos_nb.executors import spread

OURS, BAR = "lumos_nb", "line"
LARGE, FOLDS = 2**20, 8
TARGETS = {"GPU count": "<= 10.0", "collective": "<= 10.0"}
KEPT = ("sweep", "size_bytes", "time_us", "scatter", "dur_us", "basis")

NOTES, SIZE = pl.col("notes").fill_null(""), pl.col("size_bytes")
LEFT_OUT = {
    "sizes that their source calls disturbed": NOTES.str.contains("disturbed") & SIZE.is_between(2**13, 2**28),
    "sizes that their source calls outliers": NOTES.str.contains("outliers") & SIZE.is_in([2**26, 2**28, 2**31]),
    "settings that a second variant of the same system halves": NOTES.str.contains("default settings"),
}
"""Rows that are neither fitted nor scored, and why."""

VIDUR, VTRAIN, GALVATRON, VULTR = (
    pl.col("source").str.contains(name) for name in ("vidur", "vTrain", "Galvatron", "Vultr")
)
ONE_NODE, TWO_NODES = pl.col("nodes") == 1, pl.col("nodes") == 2
A100_NODE = pl.col("hardware").str.starts_with("A100-SXM") & ONE_NODE
H100_SOURCES = {
    "AWS EFA": "aws-samples",
    "DGX InfiniBand": "2x DGX H100",
    "one DGX node": "dgxc",
    "A3 Ultra RoCE": "A3 Ultra",
    "A3 Mega TCPXO": "A3 Mega",
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


@dataclass(frozen=True)
class Split:
    """Rows that are `held` out, predicted from those to `train` on."""

    group: str
    name: str
    held: pl.Expr
    train: pl.Expr


def splits() -> Iterator[Split]:
    """Every split: what is left out, and what the fit may see."""
    of = {kind: pl.col("collective") == kind for kind in COLLECTIVES}
    for name, source, kind, seen in (
        ("vidur all_reduce, 2, 4 -> 8", VIDUR, "all_reduce", 4),
        ("vTrain all_reduce, 2 to 6 -> 8", VTRAIN, "all_reduce", 6),
        ("Galvatron all_reduce, 2, 4 -> 8", GALVATRON, "all_reduce", 4),
        ("Galvatron all_to_all, 2, 4 -> 8", GALVATRON, "all_to_all", 4),
    ):  # of A100 nodes the fit sees this source's alone, and no 8 GPUs
        own = A100_NODE & source
        yield Split(
            "GPU count", name, own & (pl.col("gpus") == 8) & of[kind], ~A100_NODE | own & (pl.col("gpus") <= seen)
        )
    for kind in COLLECTIVES:
        held = VULTR & ONE_NODE & of[kind]
        yield Split("collective", f"B200 {kind}", held, ~held)
    for name, source in H100_SOURCES.items():
        held = pl.col("source").str.contains(source)
        yield Split("source", name, held, ~held)
    for kind in COLLECTIVES:
        yield Split("one node -> two", f"B200 {kind}", VULTR & TWO_NODES & of[kind], ~(VULTR & TWO_NODES))
    every_other = pl.int_range(pl.len()).over(SWEEP) % 2 == 1
    yield Split("interpolation", "every other size of every sweep", every_other, ~every_other)
    for fold in range(FOLDS):
        held = pl.struct(SWEEP).rank("dense") % FOLDS == fold
        yield Split("sweep", f"fold {fold}", held, ~held)


@cache
def samples() -> pl.DataFrame:
    """The published rows that sheets can price, less `LEFT_OUT`, and the `scatter` of each time itself.

    The latter is how far log(time) lies from the line between its neighbours in log(size), over what that would be for
    independent noise of one: curvature and a library's steps are in it, so it is an upper bound.
    """
    rows = pl.read_csv(published("collectives.csv"), infer_schema_length=None)
    rows = rows.filter(priceable(rows) & ~pl.any_horizontal(LEFT_OUT.values())).sort(*SWEEP, "size_bytes")
    size, time = SIZE.log(), pl.col("time_us").log()
    share = (size - size.shift(1)) / (size.shift(-1) - size.shift(1))
    bend = time - time.shift(1) * (1 - share) - time.shift(-1) * share
    return rows.with_columns(
        scatter=(bend.abs() / (1 + share**2 + (1 - share) ** 2).sqrt()).over(SWEEP),
        sweep=pl.struct(SWEEP).rank("dense"),
    )


def results(split: Split) -> pl.DataFrame:
    """Every method's prediction of a split's held-out rows."""
    held, train = samples().filter(split.held), samples().filter(split.train)
    found = [fit_collectives(train).predict(held).with_columns(method=pl.lit(OURS))]
    sweeps = held.partition_by("sweep", maintain_order=True)
    for name, baseline in BASELINES.items():
        priced = [sweep.with_columns(dur_us=pl.Series(baseline(related(train, sweep), sweep))) for sweep in sweeps]
        found.append(pl.concat(priced).with_columns(method=pl.lit(name)))
    return pl.concat(found, how="diagonal").select(
        group=pl.lit(split.group), left_out=pl.lit(split.name), method="method", **{name: pl.col(name) for name in KEPT}
    )


def _job(index: int) -> pl.DataFrame:
    return results(list(splits())[index])


def predictions() -> pl.DataFrame:
    """`group, left_out, method` and `KEPT` of every split; `low_us` and `high_us` where sweeps were held out in folds.

    The band of a fold is from the residuals of the other folds, which the fits that made them had not seen either.
    """
    with workers() as executor:
        rows = pl.concat(spread(executor, _job, range(len(list(splits())))))
    banded = (pl.col("group") == "sweep") & (pl.col("method") == OURS)
    folds = rows.filter(banded).partition_by("left_out", maintain_order=True)
    rest = [pl.concat([other for other in folds if other is not fold]) for fold in folds]
    inside = [with_interval(fold, bands_of(others)) for fold, others in zip(folds, rest, strict=True)]
    return pl.concat([rows.filter(~banded), *inside], how="diagonal")


def collective_errors(rows: pl.DataFrame | None = None) -> pl.DataFrame:
    """Errors in percent of every split and method, above 1 MiB and below; see `kernel_accuracy.errors`."""
    rows = predictions() if rows is None else rows
    size = pl.when(SIZE >= LARGE).then(pl.lit("1 MiB and more")).otherwise(pl.lit("less"))
    basis = (
        pl.col("basis").fill_null("any").max().over("group", "sweep")
    )  # of our prediction, for the baselines as well
    split = pl.when(pl.col("group") == "sweep").then(basis).otherwise("left_out")
    return errors(rows.with_columns(size=size, left_out=split), "group", "size", "left_out", "method")


def collective_rows(rows: pl.DataFrame | None = None) -> Iterator[Row]:
    """Rows of `accuracy.json`: each split's mean error above 1 MiB beside the line, their mean, and the interval."""
    rows = predictions() if rows is None else rows
    table = collective_errors(rows)
    large = table.filter(pl.col("size") == "1 MiB and more")
    for (group,), part in large.group_by("group", maintain_order=True):
        mine, bar = (part.filter(pl.col("method") == method) for method in (OURS, BAR))
        for row in mine.iter_rows(named=True):
            yield _row(row, table)
        if str(group) in TARGETS:
            yield Row(
                f"collectives/{group}, mean of splits",
                _mean(mine["mean"]),
                "%",
                BAR,
                _mean(bar["mean"]),
                _mean(mine["noise"]),
                TARGETS[str(group)],
                f"{mine.height} splits, median {_mean(mine['median']):.1f} %, worst split {mine['mean'].max():.1f} %",
            )
    yield from _interval_rows(rows.filter(pl.col("low_us").is_not_null()))


def _interval_rows(rows: pl.DataFrame) -> Iterator[Row]:
    """What the intervals cover of sweeps that neither fit nor band had seen, every sweep weighing the same."""
    inside = pl.col("time_us").is_between("low_us", "high_us")
    for row in errors(rows, "basis").iter_rows(named=True):
        sweeps = rows.filter(pl.col("basis") == row["basis"]).group_by("sweep").agg(inside=100 * inside.mean())
        note = f"{sweeps.height} sweeps, {row['rows']} rows of which {row['coverage']:.0f} %; "
        note += f"{row['width']:.0f} % wide (median {row['width_median']:.0f}); one factor for all that covers as many "
        note += f"rows {row['width_constant']:.0f} % wide"
        yield Row(f"collectives/interval, {row['basis']}", _mean(sweeps["inside"]), "% covered", note=note)


def _row(row: dict[str, Any], table: pl.DataFrame) -> Row:
    same = table.filter((pl.col("group") == row["group"]) & (pl.col("left_out") == row["left_out"]))
    mean = {(size, method): value for size, method, value in same.select("size", "method", "mean").rows()}
    others = ", ".join(f"{name} {mean[row['size'], name]:.1f}" for name in BASELINES if name != BAR)
    note = f"{row['rows']} rows, median {row['median']:.1f}, geometric mean {row['geomean']:.1f}, "
    note += f"worst {row['worst']:.0f}; "
    note += f"{row['within_5']:.0f} % within 5, {row['within_10']:.0f} within 10; {others}"
    small = mean.get(("less", OURS))
    note += f"; below 1 MiB {small:.0f}" if small is not None else ""
    name = f"collectives/{row['group']}, {row['left_out']}"
    return Row(name, row["mean"], "%", BAR, mean[row["size"], BAR], row["noise"], note=note)


def _mean(values: pl.Series) -> float:
    return float(values.mean())  # type: ignore[arg-type]


def disagreements(tolerance: float = 0.01) -> pl.DataFrame:
    """Published rows whose printed bus bandwidth is not size / time x factor, beyond the digits it is printed with."""
    rows = pl.read_csv(published("collectives.csv"), infer_schema_length=None)
    rate = pl.Series(bus(rows)) / rows["time_us"] / 1e3
    off = (rows["published_busbw"] - rate).abs()
    return rows.with_columns(recomputed_busbw=rate).filter((off > 0.005 + 1e-6) & (off / rate > tolerance))


def repeats() -> pl.DataFrame:
    """How far apart sources are that measured the same: all-reduce on A100 nodes, at the sizes of the sparser one."""
    nodes = samples().filter(A100_NODE & (pl.col("collective") == "all_reduce") & (SIZE >= LARGE))
    pairs = []
    for (gpus,), part in nodes.group_by("gpus", maintain_order=True):
        sources = sorted(part.partition_by("source"), key=pl.DataFrame.height.fget)  # type: ignore[attr-defined]
        for i, sparse in enumerate(sources):
            for dense in sources[i + 1 :]:
                both = sparse.filter(SIZE.is_between(dense["size_bytes"].min(), dense["size_bytes"].max()))
                at = (np.log(frame["size_bytes"].to_numpy()) for frame in (both, dense))
                expected = np.interp(*at, np.log(dense["time_us"].to_numpy()))
                apart = 100 * np.abs(np.expm1(np.log(both["time_us"].to_numpy()) - expected)).mean()
                pairs.append((gpus, sparse["source"][0], dense["source"][0], both.height, float(apart)))
    return pl.DataFrame(pairs, ["gpus", "source", "beside", "rows", "mean_apart_pct"], orient="row")


def main() -> None:
    """Print the tables."""
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_width_chars=220, fmt_str_lengths=60, float_precision=1):
        rows = predictions()
        columns = ["group", "size", "left_out", "method", "rows", "median", "mean", "geomean", "worst"]
        print(collective_errors(rows).select(*columns, "within_5", "within_10", "noise", "coverage", "width"))
        print(
            repeats(), disagreements().select("row_id", "size_bytes", "time_us", "published_busbw", "recomputed_busbw")
        )
        for row in collective_rows(rows):
            print(f"{row.name:60} {row.value:6.1f} {row.unit} {row.baseline_value or ''} {row.target} {row.note}")


if __name__ == "__main__":
    main()
