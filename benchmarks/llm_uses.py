"""What the rows of the published table of training runs are used for, a part of a source apart, and who does better."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import polars as pl

from benchmarks import published
from benchmarks.llm_accuracy import BF16, PEERS, Score, noise, ours, predictions, ratios, table
from benchmarks.rows import ACCURACY, Row, read

LEFT_OUT = "left out"
MEANT = {
    "scored": "errors are scored and may have a target",
    "stress": "errors are looked at: of formats, GPUs and software of which little was measured",
    "not predictable": "a size that nothing implies is missing",
    LEFT_OUT: "nanotron's that ran 3 times slower than a twin, as their publisher marks them",
}


def use_rows() -> Iterator[Row]:
    """How many rows of the published table are put to each use."""
    every = pl.read_csv(published("llm_training.csv"), infer_schema_length=None).select("row_id")
    used = every.join(table().select("row_id", "use"), on="row_id", how="left").with_columns(
        pl.col("use").fill_null(LEFT_OUT)
    )
    for use, meaning in MEANT.items():
        yield Row(f"llm_uses/{use}", used.filter(use=use).height, f"of {every.height:,} rows", note=meaning)


def blackwell_rows() -> Iterator[Row]:
    """Errors on Megatron-Bridge's runs on Blackwell in bf16, apart from those in fp8 and fp4."""
    runs = table().filter(pl.col("name") == "Megatron-Bridge, Blackwell", BF16)
    found = predictions(runs, ours)
    score, beside = Score.of(ratios(found)), Score.of(ratios(predictions(runs, PEERS["Calculon-like"])))
    note = f"{found['predicted_s'].count()} of {runs.height} rows; {score}"
    name = "llm_stress/Megatron-Bridge, bf16 on Blackwell, zero-shot, mean"
    yield Row(name, score.mean, "%", "Calculon-like", beside.mean, noise(runs), note=note)


CALCULON = {
    # row of ours: mean error or regret of Calculon, and on what
    "llm_steps/vTrain, zero-shot, mean": (38.9, "all 1,440 rows of the source"),
    "llm_regret/vTrain, mean": (10.0, "136 groups of all rows of the source"),
}
"""Its authors' code (caa4b11) on vTrain's rows of one node, no limit of memory: ../shared/research has the run."""


def beside_rows(scored: Iterable[Row]) -> Iterator[Row]:
    """Rows of `step_rows` and `regret_rows` beside Calculon itself, and those on which a closed form does better."""
    for row in scored:
        name = row.name.replace("/", ": ").removeprefix("llm_")
        if row.name in CALCULON:
            error, of = CALCULON[row.name]
            yield Row(f"llm_calculon/{name}", row.value, "%", "Calculon", error, note=f"its authors' code on {of}")
        if row.group in ("llm_steps", "llm_regret") and row.baseline_value is not None:
            errors = {row.baseline: row.baseline_value, "6PT": float(row.note.rpartition("6PT ")[2])}
            best = min(errors, key=lambda peer: errors[peer])
            if errors[best] < row.value:
                yield Row(f"llm_beaten/{name}", row.value, "%", best, errors[best])


if __name__ == "__main__":
    for row in (*use_rows(), *blackwell_rows(), *beside_rows(read(ACCURACY))):
        print(f"{row.name:60} {row.value:7.2f} {row.unit:15} {row.baseline_value or 0:7.2f} {row.note}")
