"""Published DLRM steps (MLPerf's DLRM-DCNv2, 39 submissions) predicted from shipped calibrations: no target.

    python -m benchmarks.dlrm_published

Nothing was fitted on these rows. Rows of one GPU, number of GPUs and batch have one prediction; how far they are apart
is the noise. What had to be assumed stands in `lumos_nb.workloads.dlrm.table_rows.ASSUMED`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from benchmarks import published
from benchmarks.rows import Row
from lumos_nb.workloads.dlrm.table_rows import COLUMNS, estimate_dlrm_row

SETUP = ["gpu", "num_gpus", "nodes", "gpus_per_node", "global_batch"]


def predicted() -> pl.DataFrame:
    """A row a setup: `rows`, `measured_ms` (median), `apart` (half their range, %), `predicted_ms`, `stream_ms`."""
    table = pl.read_csv(published("dlrm_training.csv")).with_columns(gpu=pl.col("gpu").str.replace(" CTS", ""))
    step = pl.col("step_time_ms")
    setups = table.group_by(SETUP, maintain_order=True).agg(
        pl.col("network", "model", "sharding_plan").drop_nulls().first(),
        measured_ms=step.median(),
        apart=100 * (step.max() - step.min()) / 2 / step.median(),
        rows=pl.len(),
    )
    found = [estimate_dlrm_row(row) for row in setups.select(COLUMNS).iter_rows(named=True)]
    return setups.with_columns(
        predicted_ms=pl.Series([1e3 * one.step_s for one in found]),
        stream_ms=pl.Series([1e3 * one.busiest_stream_s for one in found]),
    )


def published_rows() -> Iterator[Row]:
    """Rows of `accuracy.json`: a row a setup, and the mean over rows of one node and of several."""
    setups = predicted().with_columns(
        error=100 * (pl.col("predicted_ms") / pl.col("measured_ms") - 1),
        stream=100 * (pl.col("stream_ms") / pl.col("measured_ms") - 1),
    )
    for row in setups.iter_rows(named=True):
        gpu = row["gpu"].removeprefix("NVIDIA ")
        nodes = f", {row['nodes']} nodes" if row["nodes"] > 1 else ""
        note = f"{row['rows']} submission(s): {row['measured_ms']:.2f} ms, predicted {row['predicted_ms']:.2f} ms"
        yield Row(
            f"dlrm_published/{row['num_gpus']} x {gpu}{nodes}, batch {row['global_batch']:,}", abs(row["error"]), "%",
            "busiest stream", abs(row["stream"]), row["apart"] or None, note=f"{note} ({row['error']:+.0f} %)",
        )  # fmt: skip
    for name, which in (("one node", pl.col("nodes") == 1), ("several nodes", pl.col("nodes") > 1)):
        part = setups.filter(which)
        each, beside = (np.repeat(part[c].abs().to_numpy(), part["rows"].to_numpy()) for c in ("error", "stream"))
        note = f"{len(each)} submissions of {part.height} setups; median {np.median(each):.1f} %, geometric mean "
        note += f"{np.exp(np.log(np.maximum(each, 0.04)).mean()):.1f} %, worst {each.max():.0f} %"
        yield Row(
            f"dlrm_published/{name}, mean", float(each.mean()), "%", "busiest stream", float(beside.mean()), note=note
        )


def main() -> None:
    """Print the rows."""
    for row in published_rows():
        beside = f"{row.baseline} {row.baseline_value:.1f}" if row.baseline_value is not None else ""
        print(f"{row.name:66} {row.value:7.1f} {row.unit:3} {beside:24} noise {row.noise or 0:5.1f}  {row.note}")


if __name__ == "__main__":
    main()
