"""Charts of fitted costs: every row becomes a mark, axes have units, and what is not there is said."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from datetime import date
from itertools import combinations
from typing import Any
from xml.etree import ElementTree as ET

import altair as alt
import polars as pl
import pytest
import vl_convert
from test_charts import EYES, seen

from lumos_nb.charts import (
    device_loads,
    error_spread,
    heat_map,
    interval_check,
    learning_curve,
    roofline,
    sweeps,
)
from lumos_nb.charts.costs import BASIS_COLOURS
from lumos_nb.charts.style import CLASS_COLOURS
from lumos_nb.config import find_gpu
from lumos_nb.errors import LumosError, SchemaError, SheetError

H100 = find_gpu("H100")
KERNELS = pl.DataFrame(
    {
        "m": [1, 64, 4096],
        "flops": [2e8, 1e10, 1e12],
        "bytes": [2e8, 2e8, 4e8],
        "time_us": [90, 80, 1500],
        "dur_us": [85.0, 82.0, 1450.0],
    }
)
SWEEPS = pl.DataFrame(
    {
        "size_bytes": [1e3, 1e6, 1e9] * 2,
        "measured": [1.0, 2.0, 3.0] * 2,
        "predicted": [1.1, 2.1, 2.9] * 2,
        "panel": ["two"] * 3 + ["eight"] * 3,
    }
)
TITLES = {"x": "message size (bytes)", "y": "bus bandwidth (GB/s)"}
CURVE = pl.DataFrame({"rows": [10, 100, 1000], "error": [0.3, 0.1, 0.06], "series": "gemm"})
CELLS = pl.DataFrame(
    {
        "gpu": ["B", "A", "B"],
        "cell": ["gemm", "gemm", "norm"],
        "basis": ["measured", "transferred", "data sheet"],
        "error": [0.04, -0.3, 0.12],
        "samples": ["12", "", ""],
    }
)
MATRIX = {"x": "gpu", "y": "cell"}
ERRORS = pl.DataFrame({"op": ["gemm"] * 101 + ["add"] * 2, "error": [n / 100 - 0.5 for n in range(101)] + [0.1, 0.3]})
SCORES = pl.DataFrame(
    {
        "name": ["gemm, A", "norm, A"],
        "left_out": ["shapes", "GPU"],
        "coverage": [0.9, 0.5],
        "width": [0.2, 0.8],
        "groups": [4, 3],
        "rows": [100, 50],
    }
)


def marks(spec: dict[str, Any]) -> Counter[str]:
    """How many marks of each kind the SVG has, axes and legends not counted."""
    found: Counter[str] = Counter()
    for group in ET.fromstring(svg_of(spec)).iter("{http://www.w3.org/2000/svg}g"):
        role = group.get("class", "").split()
        if "role-mark" in role:
            found[role[0].removeprefix("mark-")] += len(group)
    return found


def svg_of(spec: dict[str, Any]) -> str:
    svg: str = vl_convert.vegalite_to_svg(spec, vl_version="6.4")
    return svg


def texts(chart: alt.TopLevelMixin) -> list[str]:
    root = ET.fromstring(svg_of(chart.to_dict()))
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def rows_of(spec: dict[str, Any], layer: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = spec["datasets"][spec["layer"][layer]["data"]["name"]]
    return rows


def test_a_roofline_has_two_points_a_kernel_below_the_sheets_roof():
    spec = roofline(KERNELS, H100, "fp16").to_dict()
    points, roof = rows_of(spec, 1), rows_of(spec, 0)
    assert marks(spec) == {"line": 1, "symbol": 2 * len(KERNELS)}
    slow = next(point for point in points if point["series"] == "measured" and point["m"] == 1)
    assert slow["intensity"] == pytest.approx(1.0)
    assert slow["rate"] == pytest.approx(2e8 / 90e-6 / 1e12)
    assert max(corner["rate"] for corner in roof) == pytest.approx(H100.peak("fp16") / 1e12)
    assert min(corner["rate"] / corner["intensity"] for corner in roof[:2]) == pytest.approx(
        H100.memory_bytes_per_s / 1e12
    )
    assert spec["layer"][1]["encoding"]["y"]["title"] == "TFLOP/s"


def test_a_roofline_of_many_kernels_draws_some_and_says_so():
    spec = roofline(pl.concat([KERNELS] * 20), H100, "fp16", max_points=10).to_dict()
    assert marks(spec)["symbol"] == 20
    assert spec["title"]["subtitle"].startswith("10 of 60 kernels")


def test_a_sweep_is_a_line_and_a_point_a_row_in_a_panel_of_its_own():
    chart = sweeps(SWEEPS, x="size_bytes", panel="panel", titles=TITLES, log_x=True)
    assert marks(chart.to_dict()) == {"line": 2, "symbol": 6}
    shown = texts(chart)
    assert [text for text in shown if text in ("two", "eight")] == ["two", "eight"]
    assert set(TITLES.values()) <= set(shown)


def test_a_sweep_with_an_interval_is_shaded():
    frame = SWEEPS.with_columns(low=pl.col("predicted") / 2, high=pl.col("predicted") * 2)
    assert marks(sweeps(frame, x="size_bytes", panel="panel", titles=TITLES).to_dict())["area"] == 2


DEVICES = pl.DataFrame(
    {
        "device": [0, 1, 2],
        "bytes": [10**9, 2 * 10**9, 0],
        "memory_bytes": 4e9,
        "forward_us": [100.0, 300.0, 0.0],
        "backward_us": [200.0, 600.0, 0.0],
        "forward_exchange_us": [650.0, 50.0, 950.0],
        "backward_exchange_us": 50.0,
    }
)


def test_devices_have_a_bar_a_part_that_ends_at_their_time_and_one_of_memory_below_its_limit():
    spec = device_loads(DEVICES, title="a plan").to_dict()
    assert marks(spec) == {"rect": 4 * 3 + 3 + 3}  # a tick is a narrow rect
    times = spec["datasets"][spec["vconcat"][0]["data"]["name"]]
    assert sum(row["ms"] for row in times if row["device"] == 1) == pytest.approx(1.0)
    assert spec["vconcat"][1]["layer"][0]["encoding"]["x"]["title"] == "memory (GB)"
    with pytest.raises(SchemaError, match="forward_us"):
        device_loads(DEVICES.drop("forward_us"))


def test_a_learning_curve_has_a_point_for_every_fit():
    spec = learning_curve(CURVE).to_dict()
    assert marks(spec)["symbol"] == len(CURVE)
    assert spec["encoding"]["y"]["axis"]["format"] == "%"


@pytest.mark.parametrize(("heat", "value"), [("basis", "basis"), ("error", "error"), ("signed error", "error")])
def test_a_matrix_has_a_cell_and_a_text_a_row(heat, value):
    spec = heat_map(CELLS, **MATRIX, value=value, heat=heat, titles={}, text="samples").to_dict()
    assert marks(spec) == {"rect": 3, "text": 3}


def test_a_matrix_writes_errors_as_percent_with_a_sign_where_it_has_one():
    assert {"4%", "12%"} <= set(texts(heat_map(CELLS, **MATRIX, value="error", heat="error", titles={})))
    signed = texts(heat_map(CELLS, **MATRIX, value="error", heat="signed error", titles={}))
    assert {"+4%", "−30%"} <= set(signed)


def test_rows_and_columns_of_a_matrix_come_as_they_stand_or_as_asked_for():
    first = heat_map(CELLS, **MATRIX, value="basis", heat="basis", titles={}).to_dict()["layer"][0]["encoding"]
    assert (first["x"]["scale"]["domain"], first["y"]["scale"]["domain"]) == (["B", "A"], ["gemm", "norm"])
    asked = heat_map(CELLS, **MATRIX, value="basis", heat="basis", titles={}, orders={"x": ["A", "B", "C"]}).to_dict()
    assert asked["layer"][0]["encoding"]["x"]["scale"]["domain"] == ["A", "B", "C"]


def test_an_error_spread_states_the_quantiles_of_every_class():
    spec = error_spread(ERRORS, by="op").to_dict()
    gemm, add = rows_of(spec, 0)
    assert (gemm["rows"], gemm["p05"], gemm["median"], gemm["p95"]) == (101, *map(pytest.approx, (-0.45, 0, 0.45)))
    assert add["median"] == pytest.approx(0.2)
    assert marks(spec)["rect"] == 3 * 2  # two bars and a tick each
    assert marks(spec)["rule"] == 1


def test_intervals_are_points_beside_the_share_that_is_wanted():
    spec = interval_check(SCORES).to_dict()
    assert marks(spec) == {"rect": 1, "symbol": 2}
    assert rows_of(spec, 0) == [{"low": 0.85, "high": 0.95}]


def refuses_other_types(draw: Callable[[pl.DataFrame], alt.TopLevelMixin], frame: pl.DataFrame) -> None:
    """Columns of another type are refused, by name, or drawn as what they are; nothing else comes to light."""
    for name, dtype in frame.schema.items():
        for other in (pl.lit("text"), pl.lit([1]), pl.lit(b"bytes"), pl.lit(None), pl.lit(date(2026, 1, 1))):
            changed = frame.with_columns(other.alias(name))
            try:
                draw(changed).to_dict()
                assert changed.schema[name] in (pl.Null, dtype) or name not in NUMBERS
            except LumosError as error:
                assert re.search(f"(column|the) {name} ", str(error)) or not isinstance(error, SchemaError)  # noqa: PT017


NUMBERS = {"time_us", "dur_us", "measured", "error", "rows", "coverage", "width", "bytes", "memory_bytes", "step_s"}
NUMBERS |= {"measured_s", "predicted_s", "low_s", "time_s", "time_ns", "diff_ns", "change"}
"""Columns that every chart which takes them draws as numbers."""


@pytest.mark.parametrize(
    ("draw", "frame"),
    [
        pytest.param(lambda frame: roofline(frame, H100, "fp16"), KERNELS, id="roofline"),
        pytest.param(lambda frame: sweeps(frame, x="size_bytes", panel="panel", titles=TITLES), SWEEPS, id="sweeps"),
        pytest.param(learning_curve, CURVE, id="learning curve"),
        pytest.param(
            lambda frame: heat_map(frame, **MATRIX, value="error", heat="error", titles={}), CELLS, id="heat map"
        ),
        pytest.param(lambda frame: error_spread(frame, by="op"), ERRORS, id="error spread"),
        pytest.param(interval_check, SCORES, id="interval check"),
        pytest.param(device_loads, DEVICES, id="devices"),
    ],
)
def test_no_rows_or_a_missing_column_is_an_error_that_says_so(draw, frame):
    with pytest.raises(LumosError, match="nothing to draw"):
        draw(frame.clear())
    needed = {"time_us", "panel", "series", "cell", "op", "coverage", "memory_bytes"} & set(frame.columns)
    with pytest.raises(SchemaError, match=f"lacks column.* {sorted(needed)[0]}"):
        draw(frame.drop(sorted(needed)[0]))
    refuses_other_types(draw, frame)


def test_a_logarithmic_axis_needs_a_positive_number():
    with pytest.raises(LumosError, match="no width is a positive number"):
        interval_check(SCORES.with_columns(width=0.0))
    with_nothing = pl.concat([SCORES, SCORES.with_columns(width=0.0)])
    scales = [interval_check(one).to_dict()["layer"][1]["encoding"]["x"]["scale"] for one in (SCORES, with_nothing)]
    assert scales[0] == scales[1]


def test_a_format_that_the_gpu_lacks_has_no_roof():
    with pytest.raises(SheetError, match="no rate for fp8"):
        roofline(KERNELS, find_gpu("A100"), "fp8")


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("palette", [list(BASIS_COLOURS.values()), CLASS_COLOURS], ids=["basis", "classes"])
def test_colours_are_told_apart_by(eyes, palette):
    """As in `test_charts`."""
    for one, other in combinations(palette, 2):
        difference = seen(one, EYES[eyes]) - seen(other, EYES[eyes])
        assert (difference**2).sum() > 10**2, f"{one} and {other}"
