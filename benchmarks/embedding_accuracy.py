"""How well lookups in embedding tables are priced, on tables held out whole.

`python -m benchmarks.embedding_accuracy` writes these rows alone, in two minutes. Samples are the bundled
`lookup-samples`, in groups that have no table in common; each group is priced by models that were fitted on the others.
The form of the physical model was chosen on these; the same is done on samples of the machine at hand (`make here`),
which no choice was made on.
Beside ours stand bytes at one bandwidth and the heuristic of Lin et al. (HiPC 2022), which knows uniform indices alone.
Both have their bandwidths, forward and backward, fitted on the same training calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
from scipy.optimize import minimize

from benchmarks.here import FOLDER, there
from benchmarks.rows import ACCURACY, Row, record
from lumos_nb import datasets
from lumos_nb.config import Gpu, read_sheet
from lumos_nb.costs.embedding_net import LookupNet
from lumos_nb.costs.embedding_samples import PASSES, call_sums, call_times, checked_samples, per_call, unseen_times
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.lookups import LookupModel
from lumos_nb.embedding_tables import Floats

LINE, INDEX_BYTES = 64, 8
BAR, LIN = "one bandwidth", "Lin et al."
TARGET = "<= 8"


def lines_of(size_bytes: Floats) -> Floats:
    """Bytes in whole cache lines."""
    whole: Floats = np.ceil(size_bytes / LINE) * LINE
    return whole


@dataclass(frozen=True)
class OneBandwidth:
    """All bytes that lookups read and write, at one bandwidth."""

    byte_us: Floats

    @classmethod
    def fit(cls, samples: pl.DataFrame) -> OneBandwidth:
        """The median of time for a byte."""
        return cls(np.median(call_times(samples) / call_sums(samples, cls(np.ones(2))), axis=0))

    def parts(self, tables: pl.DataFrame, batch: int) -> Floats:
        """Bytes of indices, weights and outputs: (n, 1)."""
        dim, pooling = tables["dim"].to_numpy(), tables["pooling"].to_numpy()
        return (batch * (pooling * (INDEX_BYTES + 4 + 4 * dim) + 8 + 4 * dim))[:, None]

    def of_sums(self, sums: Floats) -> Floats:
        """Microseconds: (m, 2)."""
        return sums * self.byte_us


@dataclass(frozen=True)
class LinHeuristic:
    """The roofline of two caches with a hit rate of uniform indices; `byte_us` of memory and cache, a row a pass."""

    byte_us: Floats
    cache_bytes: float

    @classmethod
    def fit(cls, samples: pl.DataFrame, cache_bytes: float) -> LinHeuristic:
        """The bandwidths of least median error, searched from those of one byte for all (Nelder and Mead)."""
        times, found = call_times(samples), []
        for number, at in enumerate(OneBandwidth.fit(samples).byte_us):

            def error(log_us: Floats, number: int = number) -> float:
                model = cls(np.tile(np.exp(log_us), (2, 1)), cache_bytes)
                predicted = model.of_sums(call_sums(samples, model))[:, number]
                return float(np.median(np.abs(np.log(predicted / times[:, number]))))

            start = np.log([at, at / 3])
            found.append(np.exp(minimize(error, start, method="Nelder-Mead", options={"maxiter": 60}).x))
        return cls(np.array(found), cache_bytes)

    def parts(self, tables: pl.DataFrame, batch: int) -> Floats:
        """Microseconds of each table, forward and backward: (n, 2)."""
        rows, dim, pooling = (tables[name].cast(pl.Float64).to_numpy() for name in ("rows", "dim", "pooling"))
        lookups = np.maximum(batch * pooling, 1e-9)
        held = np.minimum(np.minimum(0.9 * self.cache_bytes / (4 * dim), rows), lookups)
        touched = -rows * np.expm1(lookups * np.log1p(-np.minimum(1 / rows, 1 - 1e-12)))
        missed = np.where(touched > held, held + (lookups - held) * (rows - held) / rows, touched) / lookups
        slower = np.select([dim > 64, dim > 32], [1.0, 1.1], 1.55)
        weights, rest = (
            lookups * lines_of(4 * dim),
            batch * (lines_of(INDEX_BYTES * pooling) + 32 + 64 + lines_of(4 * dim)),
        )
        of_pass = []
        for times, (memory_us, cache_us) in zip((1, 2), self.byte_us, strict=True):  # backward reads and writes weights
            memory = (rest + missed * times * weights) * memory_us
            of_pass.append(slower * np.maximum(memory, (1 - missed) * times * weights * cache_us))
        return np.column_stack(of_pass)

    def of_sums(self, sums: Floats) -> Floats:
        """Microseconds: (m, 2)."""
        return sums


SAMPLES = {
    "embedding_lookups": (datasets.path("lookup-samples"), datasets.root() / "calibration-samples/cpu/sheet.json"),
    "embedding_lookups_here": (FOLDER / "lookups.parquet", FOLDER / "sheet.json"),
}
"""Group of rows -> its samples, and the sheet of their CPU."""


def methods(gpu: Gpu) -> dict[str, Callable[[pl.DataFrame], LookupModel]]:
    """Fits by name; the last is the network on what the physical model misses."""
    physical = partial(PhysicalLookup.fit, gpu=gpu, folds=0)
    return {
        BAR: OneBandwidth.fit,
        LIN: partial(LinHeuristic.fit, cache_bytes=gpu.l2_bytes),
        "physical": physical,
        "network": LookupNet.fit,
        "both": lambda samples: LookupNet.fit(samples, base=physical(samples)),
    }


def predictions(source: Path, gpu: Gpu) -> pl.DataFrame:
    """Every method's price of every call whose group it has not seen: a row a call, pass and method."""
    samples = checked_samples(pl.read_parquet(source))
    calls, found = per_call(samples), []
    noise = samples.group_by("call", maintain_order=True).agg(pl.first(f"{which}_spread" for which in PASSES))
    for method, fit in methods(gpu).items():
        priced = unseen_times(samples, fit)
        for number, which in enumerate(PASSES):
            found.append(
                calls.select(
                    "call", "group", "batch", pl.lit(which).alias("pass"), pl.lit(method).alias("method"),
                    time_us=f"{which}_time_us", dur_us=pl.Series(priced[:, number]), spread=noise[f"{which}_spread"],
                )
            )  # fmt: skip
    return pl.concat(found)


def embedding_rows() -> Iterator[Row]:
    """Rows of `accuracy.json`: median and mean error of each model, forward and backward, beside the baselines."""
    for group, (source, sheet) in SAMPLES.items():
        yield from _rows(group, predictions(there(source), read_sheet(sheet, Gpu)))


def _rows(group: str, priced: pl.DataFrame) -> Iterator[Row]:
    error = 100 * (pl.col("dur_us") / pl.col("time_us") - 1).abs()
    table = priced.group_by("method", "pass", maintain_order=True).agg(
        median=error.median(), mean=error.mean(), worst=error.max(), noise=100 * pl.col("spread").median(),
        calls=pl.len(), groups=pl.col("group").n_unique(),
    )  # fmt: skip
    by = {(row["method"], row["pass"]): row for row in table.iter_rows(named=True)}
    for method in ("physical", "network", "both"):
        for which in PASSES:
            row = by[method, which]
            for statistic in ("median", "mean"):
                note = f"{row['calls']} calls, {row['groups']} groups of tables; worst {row['worst']:.0f} %"
                yield Row(
                    f"{group}/{method}, {which}, {statistic}", row[statistic], "%", BAR,
                    by[BAR, which][statistic], row["noise"] if statistic == "median" else None,
                    TARGET if statistic == "median" else "", f"{note}; {LIN} {by[LIN, which][statistic]:.1f} %",
                )  # fmt: skip


def main() -> None:
    """Write the rows down and print them, and how long they took."""
    started, rows = time.monotonic(), [*embedding_rows()]
    record(ACCURACY, rows)
    for row in rows:
        beside = f"{row.baseline} {row.baseline_value:.1f}; {row.note}"
        print(f"{row.name:45} {row.value:7.2f} {row.unit} {row.target:5} {beside}")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
