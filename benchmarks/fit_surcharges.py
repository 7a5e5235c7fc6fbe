"""Fit the surcharges of a step on published step times: `python -m benchmarks.fit_surcharges` writes the bundled file.

Least squares of the logarithm of predicted over measured, robust against outliers, every source of equal weight, with
a prior on every constant: what traces show (`benchmarks/frictions.py`), else round numbers with a wide spread. Fitted
once on all sources, and once without each: a source is only ever scored by constants that have not seen it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Self

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks import published, workers
from benchmarks.rows import Row
from lumos_nb import datasets, executors
from lumos_nb.errors import LumosError
from lumos_nb.workloads.llm.estimates import PricedStep
from lumos_nb.workloads.llm.table_rows import read_row
from lumos_nb.workloads.predicted import NORMAL_90
from lumos_nb.workloads.pricing import prices_of
from lumos_nb.workloads.surcharges import Bundled, Surcharges, bundled

Floats = NDArray[np.float64]

SOURCES = {
    # name: what its rows' source holds, and which of them
    "vTrain": ("vTrain", pl.lit(value=True)),
    "llm-foundry": ("llm-foundry", pl.col("precision") == "bf16"),
    "nanotron": ("nanotron", pl.col("num_gpus") <= 16),
    "tr11": ("tr11", pl.col("config_complete")),
    "fms-fsdp": ("fms-fsdp", pl.lit(value=True)),
    "Nemotron": ("nemotron/", (pl.col("precision") == "bf16") & pl.col("gpu").str.contains("H100")),
    "Megatron-Bridge": ("Megatron-Bridge", (pl.col("precision") == "bf16") & pl.col("gpu").str.contains("H100")),
}
ROWS = 12
"""Rows of a source at most, drawn with a seed. Every source weighs as one of so many rows."""
SCALE = 0.1
"""Size of a residual from which on it counts less than squared."""

PRIORS: Mapping[str, tuple[float, float]] = {
    # constant: its value before any step time, and how far it may be, in log
    "sustained A100-SXM-80GB": (0.9, 0.1),
    "sustained H100-SXM-80GB": (0.85, 0.15),
    "host A100-SXM-80GB": (1.75, 0.3),  # 27 to 30 us a kernel on hosts of A100 and V100, 16 of H100
    "moves fused": (1.0, 0.15),
    "moves eager": (1.5, 0.4),
    "optimizer fused": (1.5, 0.4),
    "optimizer eager": (6.0, 0.5),  # passes of an optimizer that works tensor list by tensor list, over a fused one's
    "launch_us fused": (25.0, 0.4),  # 17 us a kernel, 1.45 kernels a row
    "launch_us eager": (65.0, 0.4),  # 3.8 kernels a row
    "launch_comm_us": (100.0, 0.6),
    "near": (1.0, 0.15),
    "far": (1.0, 0.2),
}
MEASURED_ON_TRACES = {
    "gap_us": {"fused": 1.15 * 1.45, "compiled": 1.15, "eager": 1.15 * 3.8},
    "compute_slowed": 0.08,
    "comm_slowed": 0.09,
    "apart": 0.004,
}
# counted: bytes a logit in fp32 that kernels one by one move (cast, max, minus, exp, sum, div, and back) over 12 fused
LOSS = {"fused": 40 / 12, "compiled": 1.0, "eager": 52 / 12}
UNKNOWN_GPU = "other"
COMPILED = {"moves": 1.0, "optimizer": 1.0, "launch_us": 1 / 1.45}


def surcharges(values: Mapping[str, float], spread: float = 0.0) -> Surcharges:
    """Constants by name as `Surcharges`; a GPU without one has the mean of the others' logarithms."""
    fields: dict[str, object] = MEASURED_ON_TRACES | {"loss": LOSS, "spread": spread}
    for name, value in values.items():
        field, _, key = name.partition(" ")
        fields[field] = {**fields.get(field, {}), key: value} if key else value  # type: ignore[dict-item]
    sustained, host = fields["sustained"], fields["host"]
    assert isinstance(sustained, dict)
    assert isinstance(host, dict)
    sustained[UNKNOWN_GPU] = math.exp(sum(map(math.log, sustained.values())) / len(sustained))
    host[UNKNOWN_GPU] = 1.0
    for of in COMPILED:  # few rows have such kernels: what a compiler fuses costs as what is fused by hand
        fields[of] = {**fields[of], "compiled": fields[of]["fused"] * COMPILED[of]}  # type: ignore[dict-item,index]
    return msgspec.convert(fields, Surcharges)


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """To three digits: more would pretend."""
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def chosen() -> pl.DataFrame:
    """Rows to fit on, with the name of their source as `of`."""
    table = pl.read_csv(published("llm_training.csv"), infer_schema_length=None)
    table = table.filter(~pl.col("notes").fill_null("").str.contains("SUSPECT"), pl.col("step_time_s") > 0)
    parts = []
    for name, (pattern, which) in SOURCES.items():
        rows = table.filter(pl.col("source").str.contains(pattern), which).with_columns(of=pl.lit(name))
        parts.append(rows.sample(min(ROWS, rows.height), seed=1))
    return pl.concat(parts)


def _priced(row: Mapping[str, object]) -> PricedStep:
    setup = read_row(row)
    return PricedStep.of(setup.model, setup.layout, setup.train, setup.cluster, prices_of(setup.cluster, None))


@cache
def _rows() -> dict[str, Mapping[str, object]]:
    return {str(row["row_id"]): row for row in chosen().iter_rows(named=True)}


_ready = lru_cache(maxsize=None)(lambda row_id: _priced(_rows()[row_id]))


def predicted_s(row_id: str, extra: Sequence[Surcharges]) -> list[float]:
    """Step times of a row under several surcharges; NaN for a row that cannot be read."""
    try:
        return [_ready(row_id).brief(one).step_s for one in extra]
    except LumosError:
        return [math.nan] * len(extra)


Evaluate = Callable[[Sequence[Surcharges]], Floats]


@dataclass(frozen=True)
class Slopes:
    """Logarithms of predicted over measured of every row at some constants, and how they move with each of these."""

    at: Floats  # logarithms of the constants (k,)
    off: Floats  # (n,)
    slope: Floats  # (n, k)

    @classmethod
    def of(cls, evaluate: Evaluate, at: Floats, measured_s: Floats) -> Self:
        """By differences."""
        points = [at, *(at + NUDGE * unit for unit in np.eye(len(at)))]
        log_s = np.log(evaluate([surcharges(named(point)) for point in points]))
        return cls(at, log_s[:, 0] - np.log(measured_s), (log_s[:, 1:] - log_s[:, :1]) / NUDGE)

    def solved(self, weight: Floats) -> Floats:
        """Constants of greatest posterior probability if the slopes stayed, by reweighted least squares."""
        prior, spread = np.log([PRIORS[name][0] for name in PRIORS]), np.array([PRIORS[name][1] for name in PRIORS])
        to = self.at
        for _ in range(20):
            off = self.off + self.slope @ (to - self.at)
            robust = weight / np.sqrt(1 + (off / SCALE) ** 2) / SCALE**2
            normal = self.slope.T @ (robust[:, None] * self.slope) + np.diag(spread**-2.0)
            to = to - np.linalg.solve(normal, self.slope.T @ (robust * off) + (to - prior) / spread**2)
        moved: Floats = self.at + np.clip(to - self.at, -MOST_MOVED, MOST_MOVED)
        return moved


NUDGE = 0.1
MOST_MOVED = 0.5


def named(at: Floats) -> dict[str, float]:
    """Constants by name."""
    return dict(zip(PRIORS, np.exp(at).tolist(), strict=True))


def constants(of: Surcharges) -> dict[str, float]:
    """The constants of `PRIORS` by name; the prior where there is none."""
    fields = msgspec.to_builtins(of)
    names = {name: name.partition(" ")[::2] for name in PRIORS}
    return {
        name: fields[field].get(key, PRIORS[name][0]) if key else fields[field] for name, (field, key) in names.items()
    }


def surcharge_rows() -> Iterator[Row]:
    """Rows of `accuracy.json`: the bundled constants beside their priors, and how far they move without a source."""
    every, without = constants(bundled().every), [constants(one) for one in bundled().without.values()]
    for name, (prior, _) in PRIORS.items():
        others = [one[name] for one in without]
        note = f"{min(others):.3g} to {max(others):.3g} without one of {len(others)} sources"
        unit = "us" if name.startswith("launch") else ""
        yield Row(f"surcharges/{name}", every[name], unit, "prior", prior, note=note)
    yield Row("surcharges/spread", 100 * bundled().every.spread, "%", note="of sources that were not fitted on, in log")


def all_together(rounds: int) -> tuple[dict[str, dict[str, float]], pl.DataFrame]:
    """Constants fitted on every source ("") and without each, and the rows with the errors of both."""
    rows = chosen()
    with workers() as executor:

        def evaluate(extra: Sequence[Surcharges]) -> Floats:
            return np.array([*executors.spread(executor, partial(predicted_s, extra=extra), rows["row_id"])])

        known = ~np.isnan(evaluate([Surcharges()])[:, 0])
        rows = rows.filter(pl.Series(known))
        measured_s, of = rows["step_time_s"].to_numpy(), rows["of"].to_numpy()
        # neighbours of a sweep err together: a source is worth a quarter of so many rows
        weight = ROWS / rows.select(pl.len().over("of")).to_series().to_numpy() / 4
        at = np.log([*constants(bundled().every).values()])  # a new fit goes on from the bundled one
        for _ in range(rounds):
            slopes = Slopes.of(evaluate, at, measured_s)
            at = slopes.solved(weight)
            print(rounded(named(at)), flush=True)
        slopes = Slopes.of(evaluate, at, measured_s)
        found = {"": rounded(named(slopes.solved(weight)))}
        found |= {name: rounded(named(slopes.solved(weight * (of != name)))) for name in SOURCES}
        within = evaluate([surcharges(values) for values in found.values()])
    own = {name: i for i, name in enumerate(found)}
    unseen = within[np.arange(rows.height), [own[name] for name in of]]
    return found, rows.with_columns(fitted_s=pl.Series(within[:, 0]), unseen_s=pl.Series(unseen))


def spread(rows: pl.DataFrame) -> float:
    """So wide that 90 % of the rows of unseen sources, each of equal weight, are within the normal's 90 %."""
    off = rows.select(
        off=(pl.col("unseen_s") / pl.col("step_time_s")).log().abs(), weight=1 / pl.len().over("of")
    ).sort("off")
    reached = off["weight"].cum_sum() / off["weight"].sum()
    return float(f"{off['off'].filter(reached >= 0.9)[0] / NORMAL_90:.3g}")


def main() -> None:
    """Fit, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    found, rows = all_together(parser.parse_args().rounds)
    made = Bundled(
        every=surcharges(found[""], spread(rows)),
        without={
            name: surcharges(values, spread(rows.filter(pl.col("of") != name)))
            for name, values in found.items()
            if name
        },
    )
    file = datasets.root() / "surcharges.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
    table = pl.DataFrame([{"constant": name, "prior": PRIORS[name][0]} for name in PRIORS])
    table = table.with_columns(pl.Series(of or "every", [*values.values()]) for of, values in found.items())
    errors = rows.group_by("of", "gpu", maintain_order=True).agg(
        rows=pl.len(),
        **{
            f"{name}_{what}": of
            for name in ("fitted", "unseen")
            for what, of in (
                ("median", (pl.col(f"{name}_s") / pl.col("step_time_s") - 1).abs().median()),
                ("bias", (pl.col(f"{name}_s") / pl.col("step_time_s")).log().median().exp()),
            )
        },
    )
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_width_chars=220, float_precision=3, tbl_hide_dataframe_shape=True):
        print(table)
        print(errors)


if __name__ == "__main__":
    main()
