"""How kernels, passes of a pipeline and GPUs vary, measured on other people's traces, by their middle halves."""

from __future__ import annotations

import numpy as np
import polars as pl
from scipy.optimize import least_squares

from benchmarks import TRACES
from benchmarks.friction_traces import FAR, RUNS, alone, device_ops, scatter
from benchmarks.schedule_prediction import Recorded

EXACT = ("ns_resolution", "nccl_data", "H100_Qwen", "H100_OWLv2", "MI300X_Qwen", "MI300X_OWLv2", "MI300X_SD35")
"""Recordings with times finer than a microsecond and enough repeats."""

LONG = ("df_index_resolver", "resnet50_of_2021", "ns_resolution", "nccl_data", "trace_diff")
"""Recordings with three steps and more, in which every place repeats."""

RANKED = ("torchrec_2", "torchrec_3", "torchrec_4")

BOUNDS_US = (30.0, 100.0, 300.0, 1000.0)
WINDOW = 64

FAULT = 1.2
"""A rank this many times slower than its twins is broken."""


def repeats(name: str) -> pl.DataFrame:
    """Kernels that run alone, with `usual_us` and `off_us`, how far each is from the mean of its repeats.

    Repeats are those of the same place in other steps; where a recording has fewer than three steps, in other layers.
    """
    kernels = device_ops(name).filter(
        pl.col("kind") == "kernel", pl.col("us") >= 10, pl.col("overlapped") < 0.02, pl.col("beside") < 0.02
    )
    one = "place" if kernels["step"].n_unique() > 2 else "kernel"
    count = pl.len().over(one)
    off = (pl.col("us") - pl.col("us").mean().over(one)) * (count / (count - 1)).sqrt()
    known = kernels.filter(pl.col("what") != "other").filter(count > 2)
    return known.with_columns(off_us=off, usual_us=pl.col("us").median().over(one))


def kernel_jitter() -> pl.DataFrame:
    """A row a recording and class of durations: `usual_us`, `sigma_us`, and `sigma` and `tail` as shares of it.

    `tail` is the plain standard deviation, outliers and all.
    """
    rows = []
    for name in EXACT:
        share = pl.col("off_us") / pl.col("usual_us")
        by_class = repeats(name).group_by(pl.col("usual_us").cut(BOUNDS_US).alias("class"))
        table = by_class.agg(
            runs=pl.len(), usual_us=pl.col("usual_us").median(), sigma=scatter(share), tail=share.clip(-FAR, FAR).std()
        )
        told = table.filter(pl.col("runs") >= 30).sort("usual_us").drop("class")
        rows.append(told.select(pl.lit(name).alias("trace"), pl.lit(RUNS[name].gpu).alias("gpu"), pl.all()))
    return pl.concat(rows).with_columns(sigma_us=pl.col("sigma") * pl.col("usual_us"))


def jitter_law(table: pl.DataFrame) -> tuple[float, float]:
    """Constants a (us) and b of sigma = ||a, b x duration||, by the logarithms of classes of `kernel_jitter`."""
    usual, sigma = table["usual_us"].to_numpy(), table["sigma_us"].to_numpy()
    fit = least_squares(lambda x: np.log(np.hypot(np.exp(x[0]), np.exp(x[1]) * usual) / sigma), np.log([0.3, 0.005]))
    a_us, b = np.exp(fit.x)
    return float(a_us), float(b)


def together() -> pl.DataFrame:
    """A row a recording: `sigma` of the time of WINDOW kernels in a row, and the `correlation` of any two of them."""
    rows = []
    for name in LONG:
        kernels = repeats(name).filter(pl.col("off_us").abs() < FAR * pl.col("usual_us")).sort("rank", "start_ns")
        own = (pl.col("off_us") ** 2).mean().over("place").sqrt()
        window = (pl.int_range(pl.len()).over("rank") // WINDOW).alias("window")
        sums = kernels.with_columns(window, own=own).group_by("rank", "window").agg(
            pl.col("off_us", "usual_us").sum(), kernels=pl.len(),
            apart=(pl.col("own") ** 2).sum(), at_once=pl.col("own").sum() ** 2,
        )  # fmt: skip
        sums = sums.filter(kernels=WINDOW)
        seen, apart, at_once = ((sums[c] ** power).mean() for c, power in (("off_us", 2), ("apart", 1), ("at_once", 1)))
        sigma = sums.select(scatter(pl.col("off_us") / pl.col("usual_us"))).item()
        rows.append((name, RUNS[name].gpu, len(sums), sigma, (seen - apart) / (at_once - apart)))
    return pl.DataFrame(rows, schema=["trace", "gpu", "windows", "sigma", "correlation"], orient="row")


def devices_apart() -> pl.DataFrame:
    """A row a recording of several ranks: `sigma`, how far their GPUs differ in the kernels that all of them run."""
    rows, one = [], ["name", "grid", "block"]
    for name in RANKED:
        of_rank = alone(name).group_by(*one, "rank").agg(pl.col("log").median())
        ranks = of_rank["rank"].n_unique()
        of_all = of_rank.filter(pl.len().over(one) == ranks)
        off = of_all.with_columns(off=pl.col("log") - pl.col("log").mean().over(one))
        rows.append(
            (name, RUNS[name].gpu, len(of_all) // ranks, off.group_by("rank").agg(pl.col("off").median())["off"].std())
        )
    return pl.DataFrame(rows, schema=["trace", "gpu", "kernels", "sigma"], orient="row")


def passes(job: str) -> dict[str, float]:
    """How passes of a Megatron-style job vary (StragglerAnalysis): relative deviations.

    `documents` is what all stages of one micro-batch have in common beyond their step, `own` the rest of a pass,
    `ranks` how far the medians of data-parallel ranks differ, `steps` how far their sums of a step. `faults` counts the
    ranks that are left out for being `FAULT` times slower than their twins: that is no scatter.
    """
    table = pl.read_parquet(TRACES / "straggler" / f"trace-{job}.parquet").with_columns(
        pl.col("optype").cast(pl.String), log=pl.col("duration").cast(pl.Float64).log()
    )
    table = table.filter(pl.col("optype").is_in(["forward-compute", "backward-compute"]))
    usual, twins = (pl.col("log").median().over(one, "optype") for one in ("rank", "stage"))
    table = table.with_columns(beyond=pl.col("log") - usual, slower=usual - twins)
    sound = table.filter(pl.col("slower").max().over("rank") < np.log(FAULT))
    sound = sound.with_columns(pl.col("beyond") - pl.col("beyond").median().over("stage", "step", "optype"))
    batch = ["optype", "dp_rank", "step", "mb_id"]
    stages = pl.len().over(batch)
    own = (pl.col("beyond") - pl.col("beyond").mean().over(batch)) * (stages / (stages - 1)).sqrt()
    by_batch = sound.filter(stages > 1).group_by(batch).agg(pl.col("beyond").mean())
    medians = sound.group_by("stage", "rank", "optype").agg(pl.col("log").median())
    sums = sound.group_by("stage", "rank", "step").agg(pl.col("duration").cast(pl.Float64).sum().log().alias("log"))
    return {
        "documents": by_batch.select(scatter(pl.col("beyond"))).item(),
        "own": sound.filter(stages > 1).select(scatter(own)).item(),
        "ranks": _among_twins(medians, "stage", "optype"),
        "steps": _among_twins(sums, "stage", "step"),
        "faults": table["rank"].n_unique() - sound["rank"].n_unique(),
    }


def _among_twins(table: pl.DataFrame, *twins: str) -> float:
    """Standard deviation of `log` among rows that agree in `twins`."""
    count = pl.len().over(twins)
    squares = (pl.col("log") - pl.col("log").mean().over(twins)) ** 2 * (count / (count - 1))
    return float(table.filter(count > 1).select(squares.mean().sqrt()).item())


def primus() -> dict[str, float]:
    """The same of Primus' pipeline: passes, and the ranks between first and last, which hold the same layers."""
    record = Recorded.of(TRACES / "primus" / "pp8")
    logs = {"forward": np.log(record.forward[:, :, 1:]), "backward": np.log(record.backward[:, :, :-1])}
    found = {}
    for name, log in logs.items():
        off = pl.DataFrame({"off": (log - np.median(log, axis=(0, 2), keepdims=True)).ravel()})
        found[name] = float(off.select(scatter(pl.col("off"))).item())
    usual = [np.median(log, axis=(0, 2))[1:-1] for log in logs.values()]
    return found | {"ranks": float(np.mean([np.std(log, ddof=1) for log in usual]))}
