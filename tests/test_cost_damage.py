"""Costs under damage: files, recorded arguments and names that are odd, and what holds of every price."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb.config import find_gpu
from lumos_nb.costs.calibration import Calibration, calibrations, load_calibration
from lumos_nb.costs.names import kernel_families
from lumos_nb.costs.operators import OPERATORS, Call, listed, sizes_of
from lumos_nb.costs.samples import kernel_samples, with_requests
from lumos_nb.errors import CalibrationError, InputError


@pytest.fixture(scope="module")
def h100() -> Calibration:
    return load_calibration("H100")


# --- files


GOOD = json.loads((ln.datasets.root() / "calibrations" / "H100-SXM-80GB.json").read_text())


def product(file: dict[str, Any]) -> dict[str, Any]:
    cells = file["kernels"]["cells"]
    return next(cell for cell in cells if (cell["family"], cell["format"]) == ("gemm", "half"))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda file: product(file)["constants"].update(cost=0.0), "cost of cell 'gemm half' is 0"),
        (lambda file: product(file)["constants"].update(memory=-1.0), "memory of cell 'gemm half' is -1"),
        (lambda file: product(file)["constants"].update(memory=1e300), "memory of cell 'gemm half' is 1e"),
        (lambda file: product(file)["constants"].pop("cost"), "other constants than this version: cost"),
        (lambda file: product(file)["tiles"].popitem(), "other tiles than this version"),
        (lambda file: product(file)["levels"].update({"op=gemm": 1e5}), "op=gemm of cell 'gemm half' is 100000"),
        (lambda file: product(file)["band"].update(low=[0.1] * 99), "the interval of cell 'gemm half'"),
        (lambda file: product(file)["band"].update(centres=[], low=[], high=[]), "the interval of cell 'gemm half'"),
        (
            lambda file: file["bands"]["transferred"].update(low=[9.0] * len(file["bands"]["transferred"]["low"])),
            "lower end",
        ),
        (lambda file: file["bands"].pop("data sheet"), "no interval for what is data sheet"),
        (lambda file: file["covered"][0].update(region={}), "the region of .* lacks bytes, work_batch"),
        (lambda file: file["collectives"]["shared"].update(ring=-1.0), "ring of a fabric is -1"),
        (lambda file: file["gpu"].update(clock_hz=0.0), "clock_hz is 0"),
    ],
    ids=[
        *("a constant of 0", "a negative constant", "a huge constant", "a constant missing", "a tile missing"),
        *("a huge level", "an interval of other lengths", "an empty interval", "an interval upside down"),
        *("no interval of a basis", "no region", "a negative share of a fabric", "a sheet without a clock"),
    ],
)
def test_a_damaged_calibration_is_refused_when_it_is_read(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], words: str
) -> None:
    file = json.loads(json.dumps(GOOD))
    edit(file)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(file))
    with pytest.raises(CalibrationError, match=f"mine.json: not a calibration: .*{words}"):
        load_calibration(path)


@pytest.mark.parametrize(
    "text", ["[1, 2]", "null", "5", "", "{", '{"version": 1, "a": ' + "[" * 50000 + "]" * 50000 + "}"]
)
def test_json_of_something_else_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=r"mine.json: not a calibration"):
        load_calibration(path)


@pytest.mark.parametrize("name", [None, 5, b"H100", "\0.json"])
def test_what_is_no_name_of_a_calibration_is_refused(name: Any) -> None:
    with pytest.raises(InputError, match="names no calibration"):
        load_calibration(name)


@pytest.mark.parametrize("name", ["L40S", "v100", "NVIDIA L40S"])
def test_a_gpu_without_samples_has_the_generic_calibration_by_its_sheet(name: str) -> None:
    made = load_calibration(name)
    assert made == load_calibration("generic").for_gpu(find_gpu(name))
    assert made.coverage()["basis"].unique().to_list() == ["transferred"]


@pytest.mark.parametrize("name", ["H100", "a100", "P100", "Tesla T4", "MI100"])
def test_every_name_of_a_sheet_finds_the_calibration_of_its_samples(name: str) -> None:
    made = load_calibration(name)
    assert made.gpu == find_gpu(name)
    assert "measured" in made.coverage()["basis"]


def test_a_name_that_is_of_nothing_lists_calibrations_and_sheets_and_says_how_to_price_all_the_same() -> None:
    with pytest.raises(CalibrationError, match=r"there are: .*V100-PCIe-32GB.*no data sheet .*L40S.*for_gpu"):
        load_calibration("V100-PCIe")


@pytest.mark.parametrize("place", ["absent/mine.json", "mine.txt", "mine", "."])
def test_a_calibration_is_saved_where_it_can_be_read_again(h100: Calibration, tmp_path: Path, place: str) -> None:
    with pytest.raises(InputError, match=r"cannot be written|ends in .json"):
        h100.save(tmp_path / place)
    assert load_calibration(h100.save(tmp_path / "mine.json")) == h100


def test_a_name_in_place_of_a_sheet_is_refused(h100: Calibration) -> None:
    with pytest.raises(InputError, match=r"for_gpu takes a data sheet, Gpu\(...\) or find_gpu\(name\)"):
        h100.for_gpu("L40S")  # type: ignore[arg-type]


# --- recorded arguments and names


ODD: list[Any] = [
    *(None, "x", -1, 0, 8, 2**62, 1.5, True, [], {}, "[2]", [[2]], [-1, -2], [2, 3], [2, 3, 4], [2, 3, 4, 5]),
    *(["a", 2], [None, 2], [[[]]], [1.5, 2], [2**62] * 3, [True, False], [0, 0]),
]
CONSTANTS = ["", "True", "[1, 1]", "-1", "None", "0.5", "[[", "1e999", "NaN", '[1,"a"]', "5", None, "[" * 5000]
TYPES = ["float", "c10::Half", "long int", "", None, 5, "Scalar", [1]]


@pytest.mark.parametrize("key", OPERATORS)
def test_damaged_arguments_give_sizes_or_a_reason(key: str) -> None:
    rng = np.random.default_rng(0)

    def some(of: list[Any], count: int) -> list[Any]:
        return [of[i] for i in rng.integers(0, len(of), count)]

    for count in rng.integers(0, 16, 60):
        call = Call(some(ODD, count), some(ODD, count), some(TYPES, count), some(CONSTANTS, count))
        told = sizes_of(key, call)
        numbers = {name: told[name] for name in ("m", "n", "k", "rows", "cols", "batch") if told.get(name) is not None}
        assert told["why"] or all(type(size) in (int, bool) and 0 < size < 2**63 for size in numbers.values())


@pytest.mark.parametrize("text", [None, "", "5", "null", "{}", "[1,,2]", "[", "[" * 10000])
def test_a_damaged_list_is_none(text: str | None) -> None:
    assert listed(text) == []


@pytest.mark.parametrize(
    "shapes", ["[[4, 8], [8, 16]]", "[[4, 8], [8, 16", "[1,,2]", "5", "x", '[["a"], [8]]', "[[-4, 8], [8, 16]]"]
)
def test_an_op_table_with_damaged_shapes_keeps_its_rows(shapes: str) -> None:
    ops = ln.build_graph(ln.load_run(ln.datasets.path("gpt-single"))).ops.filter(pl.col("kind") == "cpu").head(3)
    ops = ops.with_columns(
        parent=pl.lit("aten::mm"), shapes=pl.lit(shapes), dtype=pl.lit("float"), phase=pl.lit("backward")
    )
    asked = with_requests(ops)
    assert asked.height == ops.height
    assert asked["why"].is_null().all() == shapes.startswith("[[4, 8], [8, 16]]")


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "\0",
        "a" * 10**5,
        "_" * 10**5,
        "at::native::" * 9000,
        "ядро 🚀" * 10**4,
        "<" * 50000 + ">" * 50000,
        "layer_" * 20000,
        "triton_poi_fused_" + "pow_" * 25000,
    ],
    ids=lambda name: f"{name[:8]!r} of {len(name)}",
)
def test_a_name_of_any_length_is_told_in_linear_time(name: str) -> None:
    kernel_families(pl.Series(["once"]))
    began = time.process_time()
    assert kernel_families(pl.Series([name])).height == 1
    assert time.process_time() - began < 2.0  # 0.05 on a free core


# --- properties of every bundled calibration


def grid(seed: int, count: int = 300) -> pl.DataFrame:
    rng = np.random.default_rng(seed)

    def sizes(least: int, most: int) -> pl.Series:
        return pl.Series(np.round(2 ** rng.uniform(least, most, count)).astype(int))

    ops = [
        ["gemm", "bmm", "softmax", "rmsnorm", "add", "gelu", "embedding_lookup", "adam", "concat"][i]
        for i in rng.integers(0, 9, count)
    ]
    frame = pl.DataFrame({"op": ops, "dtype": np.array(["fp16", "fp32"])[rng.integers(0, 2, count)]})
    frame = frame.with_columns(sizes(0, 14).alias(name) for name in ("m", "n", "k", "rows", "cols"))
    return frame.with_columns(batch=sizes(0, 5), **{"pass": pl.lit("fwd")})


@pytest.mark.parametrize("name", calibrations())
def test_prices_are_finite_inside_their_interval_and_never_below_the_roofline(name: str) -> None:
    rows = grid(1).with_columns(dtype=pl.lit("fp32")) if name == "cpu" else grid(1)  # which has no rate for fp16
    priced = load_calibration(name).predict_kernels(rows)
    assert np.isfinite(priced.select("dur_us", "low_us", "high_us", "floor_us").to_numpy()).all()
    assert (priced["dur_us"] >= priced["floor_us"]).all()
    assert (priced["low_us"] <= priced["dur_us"]).all()
    assert (priced["dur_us"] <= priced["high_us"]).all()
    assert priced["basis"].is_in(["measured", "transferred", "data sheet"]).all()


@pytest.mark.parametrize("name", calibrations())
@pytest.mark.parametrize("op", ["gemm", "bmm", "softmax", "rmsnorm", "add", "gelu"])
def test_more_work_in_whole_tiles_never_takes_less_time(name: str, op: str) -> None:
    steps = np.arange(256, 256 * 65, 256)
    for n, k in ((256, 256), (4096, 1024), (1024, 8192)):
        rows = pl.DataFrame(
            {
                "op": op,
                "dtype": "fp32" if name == "cpu" else "fp16",
                "m": steps,
                "n": n,
                "k": k,
                "rows": steps,
                "cols": n,
            }
        )
        dur_us = load_calibration(name).predict_kernels(rows)["dur_us"].to_numpy()
        assert (np.diff(dur_us) >= -1e-9 * dur_us[1:]).all()


@pytest.mark.parametrize("field", ["memory_bytes_per_s", "l2_bytes"])
def test_a_better_sheet_is_never_slower(field: str) -> None:
    gpu = find_gpu("H100")
    better = msgspec.structs.replace(gpu, name="better", **{field: 2 * getattr(gpu, field)})
    generic, rows = load_calibration("generic"), grid(2)
    plain, faster = (
        generic.for_gpu(each).predict_kernels(rows)["dur_us"]
        for each in (msgspec.structs.replace(gpu, name="plain"), better)
    )
    assert (faster <= plain * (1 + 1e-9)).all()


# --- traces


def test_a_calibration_of_a_run_prices_every_kernel_of_it() -> None:
    run = ln.load_run(ln.datasets.path("gpt-ddp"))
    samples = kernel_samples(run).filter(pl.col("why").is_null())
    priced = ln.calibrate(run).predict_kernels(samples)
    assert np.isfinite(priced.select("dur_us", "low_us", "high_us").to_numpy()).all()


@pytest.mark.parametrize(
    "folder",
    ["hta/mtia_trace_single_rank", "hta/timeline_analysis", "hta/amd_trace", "nsys", "tracelens/torch_compile_triton"],
)
def test_kernels_of_traces_of_every_make_have_prices(traces: Path, folder: str) -> None:
    samples = kernel_samples(ln.load_run(traces / folder)).filter(pl.col("why").is_null()).drop("gpu")
    priced = load_calibration("generic").predict_kernels(samples)
    assert priced.height
    assert np.isfinite(priced.select("dur_us", "low_us", "high_us").to_numpy()).all()
