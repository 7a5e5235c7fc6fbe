"""Fits of one GPU on a shipped calibration: what was measured wins, a few samples move it, and many decide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest

from lumos_nb import datasets
from lumos_nb.config import find_gpu
from lumos_nb.costs.calibration import Calibration, load_calibration
from lumos_nb.costs.fitting import calibrate, fit_gpu
from lumos_nb.costs.samples import kernel_samples
from lumos_nb.errors import CalibrationError, InputError
from lumos_nb.traces.run import load_run

BASE = load_calibration("A100-SXM-80GB")
MINE = msgspec.structs.replace(find_gpu("A100-SXM-80GB"), name="mine")
SLOWER = 2.0


def products(*tokens: int, dtype: str = "bf16") -> pl.DataFrame:
    """Products of two models' layers by numbers of tokens."""
    layers = pl.DataFrame({"model": ["small", "large"], "n": [4096, 8192], "k": [4096, 8192]})
    named = layers.join(pl.DataFrame({"m": list(tokens)}), how="cross")
    return named.with_columns(pl.lit("fwd").alias("pass"), op=pl.lit("gemm"), dtype=pl.lit(dtype))


def measured(rows: pl.DataFrame, times: float = SLOWER) -> pl.DataFrame:
    """Samples of a GPU that takes so many times as long as the shipped calibration says."""
    time_us = times * BASE.for_gpu(MINE).predict_kernels(rows)["dur_us"]
    return rows.with_columns(time_us, gpu=pl.lit("mine"), source=pl.lit("test"), licence=pl.lit("own")).rename(
        {"dur_us": "time_us"}
    )


def slowdown(made: Calibration, rows: pl.DataFrame) -> float:
    """How many times as long as the shipped calibration another one says, in the median."""
    ratio = made.predict_kernels(rows)["dur_us"] / BASE.for_gpu(MINE).predict_kernels(rows)["dur_us"]
    return float(ratio.median())  # type: ignore[arg-type]


def test_what_was_measured_is_measured_and_the_rest_transferred() -> None:
    made = fit_gpu(MINE, measured(products(512, 1024, 2048)), BASE.for_gpu(MINE), adapt=True)
    basis = dict(made.coverage().group_by("cell").agg(pl.col("basis").first()).rows())
    assert basis["gemm half"] == "measured"
    assert {b for cell, b in basis.items() if cell != "gemm half"} == {"transferred"}
    assert made.sources[0].source == "test"


def test_few_samples_move_a_calibration_and_many_decide() -> None:
    unseen = products(3000)
    few, many = (
        slowdown(fit_gpu(MINE, measured(products(*tokens)), BASE.for_gpu(MINE), adapt=True), unseen)
        for tokens in ((2048,), tuple(range(256, 8192, 128)))
    )
    assert 1.05 < few < many
    assert many == pytest.approx(SLOWER, rel=0.15)


def test_without_adapting_the_shipped_calibration_has_no_say() -> None:
    rows = measured(products(*range(256, 8192, 128)))
    cells = tuple(cell for cell in BASE.kernels.cells if cell.family != "gemm")
    without = msgspec.structs.replace(BASE, kernels=msgspec.structs.replace(BASE.kernels, cells=cells))
    one, other = (fit_gpu(MINE, rows, base.for_gpu(MINE)) for base in (BASE, without))
    own = [{c.key: c for c in made.kernels.cells}["gemm half"] for made in (one, other)]
    assert own[0] == own[1]


def test_attention_that_names_no_implementation_begins_at_the_one_that_prices_it() -> None:
    rows = pl.DataFrame(
        {"op": "attention", "dtype": "bf16", "pass": "fwd", "batch": 4, "heads": 16, "head_dim": [64, 128]}
        | {"seq_q": 1024, "causal": True}
    )
    made = fit_gpu(MINE, measured(rows, 1.0), BASE.for_gpu(MINE), adapt=True)
    assert slowdown(made, rows) == pytest.approx(1.0, abs=0.02)
    assert "attention half" in {c.cell for c in made.covered if c.basis == "measured"}


@pytest.fixture(scope="module")
def adapted() -> Calibration:
    """The calibration of a CPU, adapted to the run of one rank."""
    return calibrate(load_run(datasets.path("gpt-single")))


def error(made: Calibration, run: str) -> float:
    """Mean log error of the operators of a run."""
    samples = kernel_samples(load_run(datasets.path(run))).filter(pl.col("why").is_null() & (pl.col("time_us") > 0))
    priced = made.predict_kernels(samples)
    assert priced.select((pl.col("low_us") <= pl.col("dur_us")).all()).item()
    return float(priced.select((pl.col("dur_us") / pl.col("time_us")).log().abs().mean()).item())


@pytest.mark.parametrize("run", ["gpt-ddp", "gpt-tp"])
def test_a_run_of_ones_own_takes_a_quarter_and_more_off_the_error_on_another(adapted: Calibration, run: str) -> None:
    assert error(adapted, run) < 0.75 * error(load_calibration("cpu"), run)


def test_a_run_brings_its_host_overheads(adapted: Calibration) -> None:
    assert adapted.overheads is not None
    assert {c.basis for c in adapted.covered if c.cell == "gemm fp32"} == {"measured"}


def test_of_a_trace_that_names_no_device_one_must_say_what_it_is(traces: Path) -> None:
    run = load_run(traces / "hta" / "timeline_analysis" / "sampled_rank-0.json.gz")
    with pytest.raises(CalibrationError, match=r"say which it is: gpu=find_gpu"):
        calibrate(run)
    made = calibrate(run, gpu=find_gpu("A100-SXM-40GB"))
    assert made.sources[0].gpu == made.name == "A100-SXM-40GB"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"base": "H100"}, "base=load_calibration.*given 'H100'.*gpu=name"),
        ({"base": BASE.gpu}, r"base=load_calibration.*given Gpu\(name='A100-SXM-80GB'"),
        ({"gpu": 100}, "gpu is a data sheet.*given 100"),
        ({"gpu": BASE}, "gpu is a data sheet"),
    ],
    ids=["a name as base", "a sheet as base", "a number as GPU", "a calibration as GPU"],
)
def test_an_argument_of_another_kind_is_refused_and_told_where_it_belongs(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        calibrate(load_run(datasets.path("gpt-single")), **given)


@pytest.mark.parametrize(
    "given",
    [{"gpu": MINE}, {"gpu": "H100-SXM-80GB"}, {"base": BASE}],
    ids=["one's own sheet", "a bundled one", "a GPU's calibration"],
)
def test_a_run_on_a_cpu_is_not_read_as_one_of_a_gpu(given: dict[str, Any]) -> None:
    with pytest.raises(CalibrationError, match=r"operators of a CPU.*another device.*make calibrate.*as base"):
        calibrate(load_run(datasets.path("gpt-single")), **given)


def test_a_run_without_sizes_is_refused(traces: Path) -> None:
    run = load_run(traces / "tracelens" / "mi210" / "gpu_only_trace" / "gpu_only_trace.json.gz")
    with pytest.raises(CalibrationError, match=r"0 kinds of device \(none\).*record_shapes=True"):
        calibrate(run)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hta/trace_diff/control", "A100-SXM-40GB"),
        ("kineto/tb_plugin/samples/resnet50_num_workers_0", "V100-SXM-32GB"),
        ("tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", "MI300X"),
    ],
    ids=["A100-PG509 is an A100-SXM of 40 GB", "a DGX Station's V100 is one", "a virtual MI300X is one"],
)
def test_devices_by_other_names_find_their_sheets(traces: Path, path: str, name: str) -> None:
    assert set(kernel_samples(load_run(traces / path))["gpu"].drop_nulls()) == {name}


def test_of_a_tensor_parallel_rank_the_local_product_counts_and_not_what_dispatches_it() -> None:
    samples = kernel_samples(load_run(datasets.path("gpt-tp"))).filter(pl.col("family") == "gemm")
    sizes = samples.filter(pl.col("pass") == "fwd").select("m", "n", "k").unique().rows()
    assert set(sizes) == {(512, 64, 128), (512, 128, 64), (512, 256, 128), (512, 128, 256), (512, 512, 128)}
