"""Changes to the bundled runs, predicted from a trace of the base and measured by alternating steps.

    python -m benchmarks.interventions

Predicted is the ratio of the rewritten, replayed step to the step as traced: the mean over the traced steps but the
first and last. Measured is the median over launches of the ratio of steps that took turns in one process
(variants.csv), with a bootstrap interval over launches and rounds. The baseline is what a person computes in an hour:
of every operator of the same trace the time, by FLOPs if it multiplies, else by bytes; layers by their number; Python's
time as it is.

The bundled calibration of this kind of machine prices kernels. The form of the rewriting was settled on other grounds
(docs/llm.md); its errors here were seen while it was written, and nothing was fitted to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import polars as pl

from benchmarks.rows import Row
from lumos_nb import datasets
from lumos_nb.costs.work import with_work
from lumos_nb.critical_path import replay
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.traces.run import load_run
from lumos_nb.workloads.llm.retiming import KERNEL, symbols, with_sizes
from lumos_nb.workloads.llm.rewriting import Rewritten, rewrite
from lumos_nb.workloads.llm.structure import find_structure

WIDE = {"hidden": 256, "ffn": 1024}
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    # run -> variant of variants.csv -> the fields that it changes
    "single": {
        "layers_1": {"layers": 1},
        "layers_4": {"layers": 4},
        "hidden_256": WIDE,
        "layers_4_hidden_256": {"layers": 4, **WIDE},
        "batch_4": {"micro_batch": 4, "global_batch": 4},
        "batch_16": {"micro_batch": 16, "global_batch": 16},
        "seq_128": {"seq": 128, "max_seq": 128},
    },
    "ddp": {
        "layers_4": {"layers": 4},
        "hidden_256": WIDE,
        "batch_16": {"micro_batch": 16, "global_batch": 32},
    },
    "tp": {
        "layers_4": {"layers": 4},
        "hidden_256": WIDE,
        "batch_16": {"micro_batch": 16, "global_batch": 16},
    },
    "pp": {
        "layers_4": {"layers": 4},
        "hidden_256": WIDE,
        "batch_16": {"micro_batch": 4, "global_batch": 16},
        "micro_batches_2": {"micro_batch": 4},
        "micro_batches_8": {"micro_batch": 1},
    },
}
ONTO_TWO = {
    # run on two ranks -> the fields by which it differs from the run on one
    "ddp": {"dp": 2, "global_batch": 16},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "micro_batch": 2},
}
BOOTSTRAPS = 2000


@cache
def steps_of(kind: str) -> list[Rewritten]:
    """The traced steps of a run but the first and last."""
    recording = Recording.of(load_run(datasets.path(f"gpt-{kind}")))
    inner = recording.step_times().filter(~pl.col("edge"))["step"]
    return [rewrite(build_graph(recording, step)) for step in inner]


def predicted(kind: str, **fields: Any) -> np.ndarray:
    """Ratio of the rewritten step to the step as traced, of every step (n,)."""
    return np.array([_step_ns(rewrite(step, **fields)) / _step_ns(step) for step in steps_of(kind)])


def _step_ns(graph: Graph) -> int:
    return replay(graph).step_ns


def by_work(step: Rewritten, target: Rewritten) -> float:
    """The same of one rank by FLOPs and bytes: every part's time by its work, every layer's by the number of layers."""
    assert step.setup
    assert target.setup
    (model, *_), (other, *_) = step.setup, target.setup
    places = find_structure(step).ops.select("op_id", "phase", "layer")
    parts = step.parts.join(places, on="op_id", maintain_order="left")
    parts = parts.join(step.ops.select("op_id", "name"), on="op_id", maintain_order="left")
    sized = with_sizes(parts, symbols(*step.setup), symbols(*target.setup))
    before, after = (with_work(table.select(*KERNEL)) for table in (parts, sized))
    multiplies = before["op"].is_in(["gemm", "gemm_bias", "bmm", "attention"]).to_numpy()
    more = np.where(multiplies, after["flops"] / before["flops"], after["bytes"] / before["bytes"])
    grown = parts.select("op_id", more_ns=pl.col("time_ns") * pl.Series(more - 1)).group_by("op_id").sum()
    ops = step.ops.join(places.drop("phase"), on="op_id", suffix="_of").join(grown, on="op_id", how="left")
    repeated = pl.when(pl.col("layer_of") >= 0).then(other.layers / model.layers).otherwise(1.0)
    took = (pl.col("dur_ns") + pl.col("more_ns").fill_null(0)) * repeated
    return float(ops.filter(pl.col("kind") != "boundary").select(took.sum()).item() / _step_ns(step))


@cache
def rounds() -> pl.DataFrame:
    """`kind`, `launch`, `variant`, `ratio`: of every round, the variant's step to the base's."""
    steps = pl.read_csv(datasets.root() / "variant-steps.csv").filter(pl.col("rank") == 0)
    key = ["kind", "launch", "round"]
    base = steps.filter(pl.col("variant") == "base").select(*key, base_ns="step_ns")
    return steps.join(base, on=key).with_columns(ratio=pl.col("step_ns") / pl.col("base_ns"))


def measured(kind: str, variant: str) -> tuple[float, float, float]:
    """Median over launches of their median ratio, and its 95 % interval over launches and rounds."""
    of_variant = rounds().filter((pl.col("kind") == kind) & (pl.col("variant") == variant))
    launches = [part["ratio"].to_numpy() for part in of_variant.partition_by("launch", maintain_order=True)]
    rng = np.random.default_rng(0)
    drawn = [
        np.median(
            [
                np.median(rng.choice(launches[i], len(launches[i])))
                for i in rng.integers(len(launches), size=len(launches))
            ]
        )
        for _ in range(BOOTSTRAPS)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(np.median([np.median(launch) for launch in launches])), float(low), float(high)


def variant_rows(kind: str) -> Iterator[tuple[Row, float, float]]:
    """A row a variant, with its error and the baseline's, in percent."""
    for variant, fields in CHANGES[kind].items():
        guess = predicted(kind, **fields)
        truth, low, high = measured(kind, variant)
        error = 100 * (guess.mean() / truth - 1)
        alone = kind == "single"
        toy = np.mean([by_work(step, rewrite(step, **fields)) for step in steps_of(kind)]) if alone else float("nan")
        plain = 100 * (float(toy) / truth - 1)
        note = f"predicted {guess.mean():.3f} (steps {guess.min():.3f} to {guess.max():.3f}), measured {truth:.3f} "
        note += f"({low:.3f} to {high:.3f}), error {error:+.1f} %"
        yield Row(
            f"interventions/{kind}, {variant}", abs(error), "%", "FLOPs and bytes" if alone else "",
            abs(plain) if alone else None, 100 * (high - low) / 2 / truth, note=note,
        ), error, plain  # fmt: skip


def intervention_rows() -> Iterator[Row]:
    """Rows of `accuracy.json`."""
    alone = [*variant_rows("single")]
    ours, plain = (float(np.mean(np.abs([row[i] for row in alone]))) for i in (1, 2))
    yield from (row for row, *_ in alone)
    yield Row("interventions/one rank, mean", ours, "%", "FLOPs and bytes", plain, target="<= 4.0", note="7 changes")
    yield Row(
        "interventions/one rank, mean over that of FLOPs and bytes", ours / plain, "x", target="<= 0.667",
        note="of the same trace, with the layers and sizes that the structure finds",
    )  # fmt: skip
    for kind in ("ddp", "tp", "pp"):
        rows = [*variant_rows(kind)]
        yield from (row for row, *_ in rows)
        yield Row(f"interventions/{kind}, mean", float(np.mean([abs(error) for _, error, _ in rows])), "%")
    table = pl.read_csv(datasets.root() / "variants.csv").filter(pl.col("variant") == "again")
    single = table.filter(pl.col("kind") == "single")["base_ms"].to_numpy()
    for kind, fields in ONTO_TWO.items():
        two = table.filter(pl.col("kind") == kind)["base_ms"].to_numpy()
        spread = (two[:, None] / single).ravel()
        guess = predicted("single", **fields).mean()
        yield Row(
            f"interventions/one rank to two, {kind}", float(guess), "x step", "measured", float(np.median(spread)),
            note=f"launches on two ranks over launches on one: {spread.min():.2f} to {spread.max():.2f}",
        )  # fmt: skip


def main() -> None:
    """Print the rows."""
    for row in intervention_rows():
        beside = f"{row.baseline} {row.baseline_value:.2f}" if row.baseline_value is not None else ""
        print(f"{row.name:58} {row.value:7.2f} {row.unit:7} {beside:24} noise {row.noise or 0:5.2f}  {row.note}")


if __name__ == "__main__":
    main()
