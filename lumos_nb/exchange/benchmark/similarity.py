"""Whether a benchmark behaves like what it was made from: operators, their time, the step, launches, communication."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from lumos_nb.call_stacks import nearest_encloser
from lumos_nb.calls import COMM_KERNELS, DEVICE_CATEGORIES
from lumos_nb.costs.names import kernel_families
from lumos_nb.costs.operators import OPERATORS, operator_key
from lumos_nb.display import format_ns, format_share, html_table, text_table
from lumos_nb.errors import InputError, RunError
from lumos_nb.traces.run import Run, load_run

BOOTSTRAPS = 2000
CLOSE = 0.1
"""A step within so much of the original's is called alike."""
_STEP = r"^ProfilerStep#?\d+$"
_WRAPPER = r"^(autograd::|torch::autograd|.*Backward\d*$)"
_COMMUNICATION = rf"{COMM_KERNELS}|^(c10d|_c10d_functional|_c10d_functional_autograd)::"
_KEY = ["where", "name"]


@dataclass(frozen=True, slots=True, eq=False)
class Similarity:
    """A benchmark beside its original.

    Attributes
    ----------
    ops
        One row an operator (`where` is host; its self time) or device kernel: `where`, `class`, `name`, `count` and
        `time_ns` a step of the original, `replayed_count`, `replayed_time_ns`. Medians over steps, sums over ranks.
    figures
        `figure`, `original`, `replayed`, `ratio`: a step's time (where the step times of both are known, with
        `low` and `high` of the ratio: 95 %, bootstrapped over the steps), operator and kernel time, launches,
        collectives, time in them.
    coverage_by_count, coverage_by_time
        The share of the original's operators, and of their time, that the benchmark calls too, by name.
    distance
        Between the two distributions of operator time over names: 0 the same, 1 with nothing in common (total
        variation).
    """

    ops: pl.DataFrame
    figures: pl.DataFrame
    coverage_by_count: float
    coverage_by_time: float
    distance: float

    @property
    def verdict(self) -> str:
        """One line: alike or not, and by how much."""
        step = self.figures.row(0, named=True)
        lies = "" if step["low"] is None else f" ({step['low']:.3f} to {step['high']:.3f})"
        alike = abs(step["ratio"] - 1) <= CLOSE or (step["low"] is not None and step["low"] <= 1 <= step["high"])
        return (
            f"{'Alike' if alike else 'Not alike'}: a step takes {step['ratio']:.3f}{lies} of the original's "
            f"{format_ns(step['original'])}; {format_share(self.coverage_by_time)} of operator time covered; "
            f"{format_share(self.distance)} of it lies in other operators."
        )

    @property
    def classes(self) -> pl.DataFrame:
        """`where`, `class`, `time_ns`, `replayed_time_ns`, `ratio`, the longest first; `similarity_bars` draws it."""
        sums = self.ops.group_by("where", "class").agg(pl.col("time_ns", "replayed_time_ns").sum())
        sums = sums.with_columns(ratio=pl.col("replayed_time_ns") / pl.col("time_ns"))
        return sums.sort("time_ns", "class", descending=[True, False])

    def __repr__(self) -> str:
        return f"{self.verdict}\n\n{text_table(self.figures)}\n\n{text_table(self.classes)}"

    def _repr_html_(self) -> str:
        return html_table(self.figures, caption=self.verdict) + html_table(self.classes)


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
        `steps.csv`, without a profiler, where both folders have one.

    Raises
    ------
    RunError
        A run has no marked step.

    Examples
    --------
    >>> print(compare("runs/gpt", "bench/gpt/out").verdict)  # doctest: +SKIP
    """
    (ours, ours_ns), (theirs, theirs_ns) = (_read(source) for source in (original, replayed))
    both = ours.join(theirs, on=_KEY, how="full", coalesce=True, suffix="_replayed").with_columns(
        pl.col("class").fill_null(pl.col("class_replayed"))
    )
    zeros = pl.col("count", "time_ns", "count_replayed", "time_ns_replayed").fill_null(0)
    ops = both.with_columns(zeros).select(
        *["where", "class", "name", "count", "time_ns"],
        replayed_count="count_replayed",
        replayed_time_ns="time_ns_replayed",
    )
    ops = ops.sort("time_ns", "name", descending=[True, False])
    called = pl.min_horizontal("count", "replayed_count")
    by_count = ops.select(called.sum() / pl.col("count").sum()).item()
    by_time = ops.select((pl.col("time_ns") * called / pl.col("count").clip(1)).sum() / pl.col("time_ns").sum()).item()
    shares = ops.select(a=pl.col("time_ns") / pl.col("time_ns").sum(), b=pl.col("replayed_time_ns"))
    distance = shares.select((pl.col("a") - pl.col("b") / pl.col("b").sum()).abs().sum() / 2).item()
    return Similarity(ops, _figures(ops, ours_ns, theirs_ns), float(by_count), float(by_time), float(distance))


def _read(source: Run | str | Path) -> tuple[pl.DataFrame, np.ndarray]:
    """Operators of a run a step, and the times of its steps."""
    if not isinstance(source, Run | str | Path):
        raise InputError(f"this takes a run, or the path of one; it was given a {type(source).__name__}.")
    run = source if isinstance(source, Run) else load_run(source)
    events = run.events
    steps = events.filter((pl.col("category") == "user_annotation") & pl.col("name").str.contains(_STEP))
    if steps.is_empty():
        raise RunError("a run has no ProfilerStep mark: record it with ln.capture, or step the profiler.")
    steps = steps.select("rank", step=pl.struct("rank", "start_ns").rank("dense"), begin="start_ns", end=_END)
    if len(steps) > 2 * steps["rank"].n_unique():  # in the first the profiler is still at work
        steps = steps.filter(pl.col("begin") > pl.col("begin").min().over("rank"))
    files = [] if isinstance(source, Run) else sorted(Path(source).glob("steps*.csv"))
    if files:
        times = pl.concat([pl.read_csv(file) for file in files]).group_by("step").agg(pl.col("wall_ns").max())
        return _ops(events, steps), times.sort("step")["wall_ns"].to_numpy()
    return _ops(events, steps), (steps["end"] - steps["begin"]).to_numpy()


_END = pl.col("start_ns") + pl.col("dur_ns")


def _ops(events: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """`where`, `class`, `name`, and a step's `count` and `time_ns`: the median over steps, summed over ranks."""
    host = _self_times(events.filter((pl.col("category") == "cpu_op") & pl.col("thread").is_not_null()))
    host = host.filter(~pl.col("name").str.contains(_WRAPPER))
    device = events.filter(pl.col("category").is_in(list(DEVICE_CATEGORIES)))
    columns = ("rank", "name", "start_ns", "dur_ns")
    rows = pl.concat([host.select(*columns, where=pl.lit("host")), device.select(*columns, where=pl.lit("device"))])
    rows = rows.sort("start_ns").join_asof(
        steps.sort("begin"), left_on="start_ns", right_on="begin", by="rank", strategy="backward",
        check_sortedness=False,
    )  # fmt: skip
    rows = rows.filter(pl.col("start_ns") < pl.col("end"))
    each = rows.group_by("rank", "step", *_KEY).agg(count=pl.len(), time_ns=pl.col("dur_ns").sum())
    per_rank = each.group_by("rank", *_KEY).agg(pl.col("count", "time_ns").median())
    found = per_rank.group_by(_KEY).agg(pl.col("count", "time_ns").sum())
    family = pl.Series([OPERATORS[key].family if key in OPERATORS else None for key in _keys(found)], dtype=pl.String)
    kernels = kernel_families(found["name"])["family"]
    named = pl.when(pl.col("where") == "device").then(kernels).otherwise(family)
    return found.with_columns(named.fill_null("other").alias("class"))


def _keys(found: pl.DataFrame) -> pl.Series:
    return found.select(operator_key(pl.col("name"))).to_series()


def _self_times(host: pl.DataFrame) -> pl.DataFrame:
    """Operators with what they took beyond the operators within them as `dur_ns`."""
    host = host.with_columns(lane=pl.struct("rank", "thread").rank("dense").cast(pl.Int64))
    host = host.sort("lane", "start_ns", "dur_ns", descending=[False, False, True])
    start, length = (host[name].to_numpy(writable=True) for name in ("start_ns", "dur_ns"))
    parent = nearest_encloser(host["lane"].to_numpy(writable=True), start, start + length)
    inner = np.bincount(parent[parent >= 0], length[parent >= 0], minlength=len(host))
    return host.with_columns(dur_ns=pl.Series((length - inner).clip(0).astype(np.int64)))


def _figures(ops: pl.DataFrame, ours_ns: np.ndarray, theirs_ns: np.ndarray) -> pl.DataFrame:
    rng = np.random.default_rng(0)
    drawn = [np.median(rng.choice(times, (BOOTSTRAPS, len(times))), axis=1) for times in (theirs_ns, ours_ns)]
    low, high = np.quantile(drawn[0] / drawn[1], [0.025, 0.975])
    rows = [("step (ns)", float(np.median(ours_ns)), float(np.median(theirs_ns)), low, high)]
    device, comm = pl.col("where") == "device", pl.col("name").str.contains(_COMMUNICATION)
    for figure, which, column in (
        ("operators, self time (ns)", ~device, "time_ns"),
        ("operators", ~device, "count"),
        ("kernels, time (ns)", device, "time_ns"),
        ("kernels", device, "count"),
        ("collectives, time (ns)", comm, "time_ns"),
        ("collectives", comm, "count"),
    ):
        sums = ops.filter(which).select(pl.col(column, f"replayed_{column}").sum()).row(0)
        rows += [(figure, float(sums[0]), float(sums[1]), None, None)] if any(sums) else []
    columns = ["figure", "original", "replayed", "low", "high"]
    frame = pl.DataFrame(rows, schema=columns, orient="row")
    ratio = pl.when(pl.col("original") > 0).then(pl.col("replayed") / pl.col("original"))
    return frame.select(*columns[:3], ratio.alias("ratio"), *columns[3:])
