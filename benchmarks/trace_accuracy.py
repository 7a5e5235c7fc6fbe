"""Kernels of other people's traces, predicted by the shipped calibration of their GPU, beside what was measured.

    python -m benchmarks.trace_accuracy

No fit has seen these runs. A row of a table is a kernel of one shape: its truth is the median over its launches, by
whose number it weighs. MI300X and A100-SXM-40GB have no samples of their own: what was measured is transferred there.
*Adapted* is what `calibrate` makes of the run: each shape priced by a fit, begun at the shipped one, on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import polars as pl

from benchmarks import TRACES
from benchmarks.cpu_accuracy import FLOOR, OP, errors, priced
from benchmarks.rows import Row
from lumos_nb.costs.calibration import Calibration, load_calibration
from lumos_nb.costs.fitting import fit_gpu
from lumos_nb.costs.heldout import shape_groups
from lumos_nb.costs.samples import kernel_samples
from lumos_nb.traces.run import load_run

RUNS = {
    "H100, OWLv2 forward": "tracelens/h100/google_owlv2-large-patch14-ensemble__1016001.json.gz",
    "H100, Qwen forward": "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "MI300X, OWLv2 forward": "tracelens/mi300/google_owlv2-large-patch14-ensemble__1016001.json.gz",
    "MI300X, Qwen forward": "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "MI300X, ResNet training, DDP": "tracelens/mi300/resnet_act_checkpoint.json.gz",
    "MI300X, SD 3.5, Inductor": "tracelens/inference/xdit_sd_3.5/profile_trace_rank_0.json.gz",
    "A100, particle transformer": "particle_transformer/gpu_working_chrome_trace.json.gz",
    "A100, recommender training": "hta/trace_diff/control/control.json.gz",
    "V100, ResNet-50 training": "kineto/tb_plugin/samples/resnet50_num_workers_0",
    "V100, DLRM training": "param/dlrm_kineto.tar.gz",
}
FOLDS = 4
SHAPE = [column for column in OP if column != "rank"] + ["seq_kv", "kv_heads", "causal", "groups", "out_dtype"]


def shapes(path: Path) -> tuple[pl.DataFrame, float]:
    """A row a shape: `time_us` (median), `launches`, `scatter`; and the share of all kernels' time that has sizes."""
    samples = kernel_samples(load_run(path))
    sized = samples.filter(pl.col("why").is_null() & (pl.col("time_us") > 0) & pl.col("gpu").is_not_null())
    time = pl.col("time_us")
    table = sized.group_by("gpu", *SHAPE, maintain_order=True).agg(
        pl.col("family").first(),
        pl.len().alias("launches"),
        scatter=(time / time.median() - 1).abs().median(),
        time_us=time.median(),
    )
    return table, float(sized["time_us"].sum()) / float(samples["time_us"].sum())


def adapted(table: pl.DataFrame, base: Calibration) -> pl.DataFrame:
    """Each shape priced by what the others adapt the calibration to; shapes of one sweep stay together."""
    samples = table.with_columns(source=pl.lit("trace"), licence=pl.lit("own"))
    fold = shape_groups(samples).rank("dense").to_numpy() % FOLDS
    parts = ((samples.filter(fold != i), samples.filter(fold == i)) for i in range(FOLDS))
    fits = ((fit_gpu(base.gpu, train, base, adapt=True), test) for train, test in parts if test.height)
    return pl.concat([priced(test, made) for made, test in fits])


def trace_kernel_rows() -> Iterator[Row]:
    """Rows of `accuracy.json`."""
    for run, path in RUNS.items():
        table, share = shapes(TRACES / path)
        base = load_calibration(table["gpu"][0])
        rows = priced(table, base)
        whole, floor = (errors(rows, predicted=p).row(0, named=True) for p in ("dur_us", "floor_us"))
        own = errors(adapted(table, base)).row(0, named=True)
        basis = ", ".join(f"{name} {whole[name]:.0f} %" for name in ("measured", "transferred", "data sheet"))
        note = f"{whole['ops']} shapes, {share:.0%} of the kernels' time; {basis}; {whole['coverage']:.0f} % in their"
        note += f" 90 % interval, {whole['outside']:.0f} % outside the sizes measured; adapted "
        for statistic in ("median", "weighted"):
            yield Row(
                f"trace_kernels/{run}, {statistic}", whole[statistic], "%", FLOOR, floor[statistic], whole["scatter"],
                note=f"{note}{own[statistic]:.1f} %",
            )  # fmt: skip
        yield Row(f"trace_kernels/{run}, sum", whole["ratio"], "x traced", FLOOR, floor["ratio"])


def main() -> None:
    """Print each run by family, then the rows."""
    with pl.Config(tbl_rows=-1, tbl_cols=-1, tbl_width_chars=250, float_precision=1, tbl_hide_dataframe_shape=True):
        for run, path in RUNS.items():
            table, share = shapes(TRACES / path)
            rows = priced(table, load_calibration(table["gpu"][0]))
            print(f"{run}: {share:.0%} of the time has sizes")
            print(pl.concat([errors(rows, "family"), errors(rows)]))
    for row in trace_kernel_rows():
        print(f"{row.name:50}{row.value:7.2f} {row.unit:9}{row.baseline} {row.baseline_value:.2f}", row.noise, row.note)


if __name__ == "__main__":
    main()
