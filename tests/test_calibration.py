"""Calibrations: what is measured, transferred or by the sheet, how it is kept, and how a run of one's own adapts it."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb.config import Fabric, Gpu, find_gpu, read_sheet
from lumos_nb.costs.calibration import Calibration, calibrations, digest, load_calibration
from lumos_nb.costs.fitting import fit_generic, fit_gpu
from lumos_nb.costs.heldout import leave_groups_out, shape_groups
from lumos_nb.errors import CalibrationError, InputError, SheetError, shown

MINE = Gpu(
    name="my GPU", source="its data sheet", cores=142, clock_hz=2.52e9, memory_bytes=48e9, memory_bytes_per_s=864e9,
    l2_bytes=96e6, peak_flops={"fp32": 91.6e12, "fp16": 362e12, "bf16": 362e12},
)  # fmt: skip


def adds(gpu: str, *, bandwidth: float, launch_us: float = 5.0, rows: int = 60, seed: int = 0) -> pl.DataFrame:
    """Samples of an op of known cost: a launch, and 3 accesses an element at a share of the bandwidth."""
    rng = np.random.default_rng(seed)
    count, cols = 2 ** rng.uniform(8, 15, rows), 2.0 ** rng.integers(9, 13, rows)
    count = np.round(count)
    time_us = launch_us + 3 * 2 * count * cols / bandwidth * 1e6
    return pl.DataFrame(
        {"gpu": gpu, "op": "add", "dtype": "fp16", "pass": "fwd", "rows": count.astype(int), "cols": cols.astype(int)}
        | {"time_us": time_us, "source": "made up", "licence": "own"}
    )


@pytest.fixture(scope="module")
def generic() -> Calibration:
    bandwidths = {"A100": 1.7e12, "H100": 2.8e12, "T4": 0.26e12}
    return fit_generic(pl.concat(adds(gpu, bandwidth=b, seed=i) for i, (gpu, b) in enumerate(bandwidths.items())))


@pytest.fixture(scope="module")
def of_a100(generic: Calibration) -> Calibration:
    return fit_gpu(find_gpu("A100"), adds("A100", bandwidth=1.7e12), generic.for_gpu(find_gpu("A100")))


def request(**columns: object) -> pl.DataFrame:
    return pl.DataFrame({"op": ["add"], "dtype": ["fp16"], "pass": ["fwd"], "rows": [4096], "cols": [4096]} | columns)


def test_what_a_gpu_measured_is_called_measured_and_is_right(of_a100: Calibration) -> None:
    priced = of_a100.predict_kernels(request()).row(0, named=True)
    assert priced["basis"] == "measured"
    assert not priced["out_of_range"]
    assert priced["dur_us"] == pytest.approx(5 + 6 * 4096 * 4096 / 1.7e6, rel=0.02)
    assert priced["low_us"] <= priced["dur_us"] <= priced["high_us"]


@pytest.mark.parametrize(
    ("columns", "basis"),
    [({"pass": ["bwd"]}, "transferred"), ({"op": ["gelu"]}, "measured"), ({"op": ["dropout"]}, "data sheet")],
    ids=["another pass of a measured cell", "another op of the family", "a family without samples"],
)
def test_what_was_not_measured_says_so(of_a100: Calibration, columns: dict[str, object], basis: str) -> None:
    priced = of_a100.predict_kernels(request(**columns)).row(0, named=True)
    assert priced["basis"] == basis
    assert np.isfinite([priced["low_us"], priced["high_us"]]).all()


def test_sizes_beyond_the_measured_ones_are_flagged(of_a100: Calibration) -> None:
    assert of_a100.predict_kernels(request(rows=[2**22]))["out_of_range"].item()


def test_a_gpu_with_a_sheet_alone_has_transferred_costs_that_scale_with_its_bandwidth(generic: Calibration) -> None:
    mine = generic.for_gpu(MINE)
    assert set(mine.coverage()["basis"]) == {"transferred"}
    twice = msgspec.structs.replace(MINE, memory_bytes_per_s=2 * MINE.memory_bytes_per_s)
    large = request(rows=[2**16], cols=[2**13])
    one, two = (generic.for_gpu(gpu).predict_kernels(large)["dur_us"].item() for gpu in (MINE, twice))
    assert one / two == pytest.approx(2.0, rel=0.05)


def test_rows_of_another_gpu_are_refused_by_row(of_a100: Calibration) -> None:
    rows = pl.concat([request(gpu=["A100"]), request(gpu=["H100"])])
    with pytest.raises(InputError, match="row 1: gpu is 'H100', but this calibration is of A100-SXM-80GB"):
        of_a100.predict_kernels(rows)


def test_the_file_is_readable_and_gives_the_same_back(of_a100: Calibration, tmp_path: Path) -> None:
    file = of_a100.save(tmp_path / "a100.json")
    assert load_calibration(file) == of_a100
    assert json.loads(file.read_text())["gpu"]["cores"] == 108


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"version": 1', '"version": 2', 1), "version 2, but this package reads 1"),
        (lambda text: text[: len(text) // 2], "not a calibration"),
        (lambda text: text.replace('"rows"', '"lines"', 1), "not a calibration"),
        (lambda _: "", "not a calibration"),
    ],
    ids=["another version", "cut off", "an unknown field", "empty"],
)
def test_a_file_that_is_no_calibration_is_refused_by_name(of_a100, tmp_path, change, message) -> None:
    file = of_a100.save(tmp_path / "a100.json")
    file.write_text(change(file.read_text()))
    with pytest.raises(CalibrationError, match=f"a100.json.*{message}"):
        load_calibration(file)


def test_an_unknown_name_lists_those_that_are_there() -> None:
    with pytest.raises(CalibrationError, match="no calibration is called 'H9000'"):
        load_calibration("H9000")


def test_few_samples_of_ones_own_move_a_shipped_cell_towards_them(of_a100: Calibration) -> None:
    slower = adds("A100", bandwidth=1.2e12, rows=12, seed=5)
    adapted = fit_gpu(of_a100.gpu, slower, of_a100, adapt=True)
    truth = 5 + 6 * 4096 * 4096 / 1.2e6
    before, after = (c.predict_kernels(request())["dur_us"].item() for c in (of_a100, adapted))
    assert abs(after / truth - 1) < 0.25 * abs(before / truth - 1)


def test_groups_left_out_are_never_in_the_fit_that_prices_them() -> None:
    samples = pl.concat([adds("A100", bandwidth=1.7e12), adds("A100", bandwidth=0.4e12, seed=3)])
    group = pl.Series(["fast"] * 60 + ["slow"] * 60)
    unseen = leave_groups_out(samples, group)
    slow = unseen.filter(pl.col("group") == "slow")
    large = slow.filter(pl.col("time_us") > 200)
    assert (large["dur_us"] / large["time_us"]).median() == pytest.approx(0.4 / 1.7, rel=0.1)


def test_rows_of_one_weight_shape_stay_together() -> None:
    rows = pl.DataFrame({"op": "gemm", "dtype": "fp16", "m": [1, 2, 3], "n": [64, 64, 128], "k": [8, 8, 8]})
    assert shape_groups(rows).to_list() == ["64x8", "64x8", "128x8"]


def test_a_digest_is_of_the_values_in_any_order() -> None:
    rows = adds("A100", bandwidth=1e12)
    assert digest(rows) == digest(rows.reverse())
    assert digest(rows) != digest(rows.with_columns(pl.col("time_us") * 2))


@pytest.mark.parametrize("name", calibrations())
def test_every_bundled_calibration_prices_its_own_samples_and_says_where_they_are_from(name: str) -> None:
    bundled = load_calibration(name)
    assert bundled.sources
    assert bundled.covered
    assert {c.basis for c in bundled.covered} <= {"measured", "transferred"}
    cells = {cell.key for cell in bundled.kernels.cells}
    assert {c.cell for c in bundled.covered} <= cells


def test_a_run_of_ones_own_becomes_a_calibration() -> None:
    run = ln.load_run(ln.datasets.path("gpt-single"))
    mine = ln.calibrate(run)
    assert mine.gpu.name == "cpu"
    assert mine.overheads is not None
    assert "measured" in mine.coverage()["basis"].to_list()


# --- data sheets ------------------------------------------------------------------------------------------------------


def test_a_sheet_goes_to_json_and_back(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(MINE.to_json())
    assert read_sheet(file, Gpu) == MINE


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("clock_hz", 0.0, "clock_hz is 0.0"),
        ("cores", -1, "cores is -1"),
        ("peak_flops", {"fp32": float("nan")}, "fp32 is nan"),
        ("peak_flops", {"fp16": 1e12}, "needs fp32"),
        ("peak_flops", {"fp32": 1e12, "half": 1e12}, "unknown number format.*half"),
    ],
)
def test_a_sheet_with_an_impossible_number_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(SheetError, match=message):
        msgspec.structs.replace(MINE, **{field: value})


NO_NUMBER = [10**5000, 10**400, True, "5", None, [5.0], np.float32("nan"), np.array([5.0, 6.0]), -1, 0, 5j]


@pytest.mark.parametrize("value", NO_NUMBER, ids=shown)
def test_what_is_no_number_of_a_sheet_is_named(value: Any) -> None:
    with pytest.raises(SheetError, match=r"memory_bytes is .*; a data sheet needs a positive number"):
        msgspec.structs.replace(MINE, memory_bytes=value)
    with pytest.raises(SheetError, match=r"bf16 is .*; a data sheet needs a positive number"):
        msgspec.structs.replace(MINE, peak_flops={"fp32": 1e12, "bf16": value})
    for field, fabric in (("bytes_per_s", {"latency_us": 1}), ("latency_us", {"bytes_per_s": 1e9})):
        with pytest.raises(SheetError, match=f"net: {field} is .*; a data sheet needs a positive number"):
            Fabric(name="net", source="", **{field: value}, **fabric)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cores", 1.5), ("cores", "8"), ("name", 5), ("name", None), ("source", b"x"),
        ("aliases", "H100"), ("aliases", [1]),
        ("peak_flops", None), ("peak_flops", [1e12]), ("peak_flops", {1: 1e12}), ("board_power_w", "700"),
        ("process_nm", True),
    ],
)  # fmt: skip
def test_a_field_of_another_kind_is_named(field: str, value: object) -> None:
    with pytest.raises(SheetError, match=rf"^(Gpu|my GPU): {field} is {re.escape(shown(value))}; "):
        msgspec.structs.replace(MINE, **{field: value})
    for field, value in (("max_gpus", 0), ("max_gpus", 2.0), ("reduces", "no")):
        with pytest.raises(SheetError, match=f"^net: {field} is {value!r}; a data sheet needs"):
            Fabric(name="net", source="", bytes_per_s=1e9, latency_us=1, **{field: value})


def test_numbers_of_any_library_are_taken_and_go_to_json(tmp_path: Path) -> None:
    there = msgspec.structs.replace(
        MINE, cores=np.int64(MINE.cores), clock_hz=np.float64(MINE.clock_hz), memory_bytes=Fraction(MINE.memory_bytes),
        peak_flops={name: np.float64(rate) for name, rate in MINE.peak_flops.items()}, aliases=["mine"],
    )  # fmt: skip
    assert there == msgspec.structs.replace(MINE, aliases=("mine",))
    (tmp_path / "mine.json").write_text(there.to_json())
    assert read_sheet(tmp_path / "mine.json", Gpu) == there


def test_a_format_that_a_gpu_does_not_compute_is_an_error() -> None:
    with pytest.raises(SheetError, match="V100-PCIe-32GB has no rate for fp8"):
        find_gpu("V100-PCIe-32GB").peak("fp8")
