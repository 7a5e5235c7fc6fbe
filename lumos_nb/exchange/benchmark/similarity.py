"""Whether a benchmark behaves like what it was made from: operators, their time, the step, launches, communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.beside import files_beside, timed_steps
from lumos_nb.costs.names import kernel_families
from lumos_nb.costs.operators import OPERATORS, operator_key
from lumos_nb.csv_files import read_numbers
from lumos_nb.display import Shown, format_bytes, format_ns, format_share
from lumos_nb.errors import InputError, RunError
from lumos_nb.exchange.benchmark.steps import AMOUNTS, KEY, device_use, marked_steps, step_rows, typical
from lumos_nb.traces.run import Run, load_run

BOOTSTRAPS = 2000
CLOSE = 0.1
"""A step within so much of the original's is called alike."""
FIGURES = {
    "figure": pl.String(),
    "unit": pl.String(),
    "original": pl.Float64(),
    "replayed": pl.Float64(),
    "low": pl.Float64(),
    "high": pl.Float64(),
}
_ACTIVITY = "device-*.csv"
_TOLD = (
    ("SMs active", "sm_share", "share"),
    ("memory active", "memory_share", "share"),
    ("power", "power_w", "W"),
)
_FORMATS = {"ns": format_ns, "bytes": format_bytes, "share": format_share, "W": "{:.0f} W".format, "": "{:,.0f}".format}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Similarity(Shown):
    """A benchmark beside its original.

    Attributes
    ----------
    ops
        One row an operator (`where` is host; its self time) or device kernel: `where`, `class`, `name`, `count` and
        `time_ns` a step of the original, `replayed_count`, `replayed_time_ns`. Medians over steps, sums over ranks.
    communication
        The same of `collective`s, with `bytes` and `replayed_bytes`, those that ranks give (null where they were not
        recorded); times include waiting.
    figures
        `figure`, `unit`, `original`, `replayed`, `ratio`; of the step's time also `low` and `high` of the ratio (95 %,
        bootstrapped over the steps). Only what both have is there: operator and kernel time, launches, collectives,
        bytes and time in them; how busy devices are and how full their SMs; and what NVML said of activity and power,
        where both have `device-*.csv` beside the traces.
    coverage_by_count, coverage_by_time
        The share of the original's operators, and of their time, that the benchmark calls too, by name.
    distance
        Between the two distributions of operator time over names: 0 the same, 1 with nothing in common (total
        variation).
    """

    ops: pl.DataFrame
    communication: pl.DataFrame
    figures: pl.DataFrame
    coverage_by_count: float
    coverage_by_time: float
    distance: float

    @property
    def alike(self) -> bool | None:
        """Whether steps take equally long, within `CLOSE`.

        False if the whole interval of their ratio lies further away; None if they spread too much to tell.
        """
        step = self.figures.row(0, named=True)
        if abs(step["ratio"] - 1) <= CLOSE:
            return True
        return False if step["low"] > 1 + CLOSE or step["high"] < 1 - CLOSE else None

    @property
    def verdict(self) -> str:
        """One line: alike, not alike or undecided, and by how much."""
        step = self.figures.row(0, named=True)
        word = {True: "Alike", False: "Not alike", None: "Undecided"}[self.alike]
        return (
            f"{word}: a step takes {step['ratio']:.3f} ({step['low']:.3f} to {step['high']:.3f}) of the original's "
            f"{format_ns(step['original'])}; {format_share(self.coverage_by_time)} of operator time covered; "
            f"{format_share(self.distance)} of it is distributed otherwise."
        )

    @property
    def classes(self) -> pl.DataFrame:
        """`where`, `class`, `time_ns`, `replayed_time_ns`, `ratio`, the longest first, for `charts.similarity_bars`."""
        sums = self.ops.group_by("where", "class").agg(pl.col("time_ns", "replayed_time_ns").sum())
        sums = sums.with_columns(ratio=_ratio("replayed_time_ns", "time_ns"))
        return sums.sort("time_ns", "class", descending=[True, False])

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        told = [
            [None if one is None else _FORMATS[row["unit"]](one) for one in (row["original"], row["replayed"])]
            for row in self.figures.iter_rows(named=True)
        ]
        sides = pl.DataFrame(told, schema=["original", "replayed"], orient="row")
        shown = self.figures.select("figure", *sides, pl.col("ratio", "low", "high").round(3))
        others = [self.classes, *([self.communication] if len(self.communication) else [])]
        return [(self.verdict, shown), *(("", table) for table in others)]


def compare(original: Run | str | Path, replayed: Run | str | Path) -> Similarity:
    """Hold a benchmark's run against that of the program that it was made from.

    Parameters
    ----------
    original
        A capture (`ln.capture`), or another run with marked steps.
    replayed
        What `bench.py --profile OUT` wrote, or a run.

    Returns
    -------
    Similarity
        Tables, shares, and a verdict. The times of operators are those that a profiler saw; the step's time is that of
        `steps.csv` beside the traces, without a profiler, where both have one.

    Raises
    ------
    RunError
        A run has no marked step, or the files beside it are damaged.
    InputError
        It is neither a run nor the path of one.

    Examples
    --------
    >>> compare("runs/gpt", datasets.path("gpt-ddp-paired")).classes.columns
    """
    sides = _Side(original), _Side(replayed)
    amounts = pl.col([name for one in AMOUNTS for name in (one, f"{one}_replayed")])
    both = sides[0].rows.join(sides[1].rows, on=KEY, how="full", coalesce=True, suffix="_replayed")
    both = both.with_columns(amounts.fill_null(0)).rename({f"{one}_replayed": f"replayed_{one}" for one in AMOUNTS})
    both = both.sort("time_ns", *KEY, descending=[True, False, False])
    work = both.filter(pl.col("where").is_in(["host", "device"]))
    ops = work.select("where", _classes(work), "name", *_pairs("count", "time_ns"))
    talks = both.filter(where="collective").select(pl.col("name").alias("collective"), *_pairs(*AMOUNTS))
    talks = talks.with_columns(pl.col(_pairs("bytes")).replace(0, None))  # a barrier, or not recorded
    called = pl.min_horizontal("count", "replayed_count")
    shares = ops.select(pl.col("time_ns", "replayed_time_ns") / pl.col("time_ns", "replayed_time_ns").sum())
    return Similarity(
        ops,
        talks,
        _figures(both, *sides),
        ops.select(called.sum() / pl.col("count").sum()).item(),
        ops.select((pl.col("time_ns") * called / pl.col("count").clip(1)).sum() / pl.col("time_ns").sum()).item(),
        shares.select((pl.col("time_ns") - pl.col("replayed_time_ns")).abs().sum() / 2).item(),
    )


class _Side:
    """A run as it is compared: what a step does, and how long steps take."""

    def __init__(self, source: Run | str | Path) -> None:
        if not isinstance(source, Run | str | Path):
            raise InputError(f"this takes a run, or the path of one; it was given a {type(source).__name__}.")
        self.run = source if isinstance(source, Run) else load_run(source)
        self.rows = typical(step_rows(self.run))

    def timed_ns(self) -> NDArray[np.float64] | None:
        """Times of the steps that nothing was attached to; None where none are known."""
        times = timed_steps(self.run)["wall_ns"]
        return times.to_numpy() if len(times) else None

    def traced_ns(self) -> NDArray[np.float64]:
        """Times of the profiled steps."""
        steps = marked_steps(self.run)
        return (steps["end_ns"] - steps["start_ns"]).to_numpy().astype(np.float64)

    def use(self) -> pl.DataFrame:
        """Medians of how busy devices are."""
        return device_use(self.run).select(pl.col("busy_share", "occupancy_share").median())

    def told(self, column: str) -> float | None:
        """What NVML said of the devices, in the mean; None where it was not asked."""
        found = read_numbers(files_beside(self.run, _ACTIVITY), [column], RunError)[column]
        return float(found.sum()) / len(found) if len(found) else None


def _pairs(*names: str) -> list[str]:
    return [*names, *(f"replayed_{name}" for name in names)]


def _ratio(over: str, under: str) -> pl.Expr:
    return pl.when(pl.col(under) > 0).then(pl.col(over) / pl.col(under))


def _classes(work: pl.DataFrame) -> pl.Series:
    """What kind of work operators and kernels are."""
    keys = work.select(operator_key(pl.col("name"))).to_series()
    family = pl.Series([OPERATORS[key].family if key in OPERATORS else None for key in keys], dtype=pl.String)
    kernels = work.select("name").join(kernel_families(work["name"]), on="name", how="left", maintain_order="left")
    named = pl.when(work["where"] == "device").then(kernels["family"]).otherwise(family)
    return pl.select(named.fill_null("other").alias("class")).to_series()


def _figures(both: pl.DataFrame, ours: _Side, theirs: _Side) -> pl.DataFrame:
    rows = [("step", "ns", *_step_times(ours, theirs)), *_sums(both), *_shares(ours, theirs)]
    frame = pl.DataFrame(rows, schema=FIGURES, orient="row")
    return frame.with_columns(ratio=_ratio("replayed", "original")).select(*list(FIGURES)[:4], "ratio", "low", "high")


def _step_times(ours: _Side, theirs: _Side) -> tuple[float, float, float, float]:
    """Medians of both, and an interval of their ratio."""
    timed = ours.timed_ns(), theirs.timed_ns()
    known = timed[0] is not None and timed[1] is not None
    a_ns, b_ns = (one for one in timed if one is not None) if known else (ours.traced_ns(), theirs.traced_ns())
    rng = np.random.default_rng(0)
    drawn = [np.median(rng.choice(times, (BOOTSTRAPS, len(times))), axis=1) for times in (b_ns, a_ns)]
    low, high = np.quantile(drawn[0] / drawn[1], [0.025, 0.975])
    return float(np.median(a_ns)), float(np.median(b_ns)), float(low), float(high)


_Figure = tuple[str, str, float, float, float | None, float | None]


def _sums(both: pl.DataFrame) -> Iterator[_Figure]:
    """Counts, times and bytes that both sides have or lack."""
    for where, figure, column, unit in (
        ("host", "operators", "count", ""),
        ("host", "operators, self time", "time_ns", "ns"),
        ("launch", "kernel launches", "count", ""),
        ("device", "kernels", "count", ""),
        ("device", "kernels, time", "time_ns", "ns"),
        ("collective", "collectives", "count", ""),
        ("collective", "collectives, volume", "bytes", "bytes"),
        ("collective", "collectives, time", "time_ns", "ns"),
    ):
        a, b = both.filter(where=where).select(pl.col(_pairs(column)).sum()).row(0)
        if a or b:
            yield figure, unit, float(a), float(b), None, None


def _shares(ours: _Side, theirs: _Side) -> Iterator[_Figure]:
    """How busy devices are by the traces, and by NVML."""
    used = ours.use(), theirs.use()
    for figure, column in (("kernels run", "busy_share"), ("SM occupancy, estimated", "occupancy_share")):
        a, b = (one[column].item() for one in used)
        if a is not None and b is not None:
            yield figure, "share", float(a), float(b), None, None
    for figure, column, unit in _TOLD:
        a, b = ours.told(column), theirs.told(column)
        if a is not None and b is not None:
            yield f"{figure}, NVML", unit, a, b, None, None
