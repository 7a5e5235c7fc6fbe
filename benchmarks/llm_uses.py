"""What the rows of the published table of training runs are used for, and a part of a source that is scored apart."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from benchmarks import published
from benchmarks.llm_accuracy import BF16, PEERS, Score, noise, ours, predictions, ratios, table
from benchmarks.rows import Row

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


if __name__ == "__main__":
    for row in (*use_rows(), *blackwell_rows()):
        print(f"{row.name:60} {row.value:7.2f} {row.unit:15} {row.baseline_value or 0:7.2f} {row.note}")
