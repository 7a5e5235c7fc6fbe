"""Scenarios of a sweep: scales and labels of any kind and library, and those that cannot be."""

from __future__ import annotations

import re
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pytest

from lumos_nb.critical_path import replay, sweep
from lumos_nb.errors import ScenarioError, shown
from tests.trace_builder import Trace, second_step


def usual(trace: Trace, _: int, at: float) -> None:
    trace.op("aten::mm", at + 100, at + 110)
    trace.launch("gemm", (at + 120, at + 130), (at + 140, at + 500))


LAUNCHED = second_step(usual)
STEP_NS = replay(LAUNCHED).step_ns
HALF_NS = sweep(LAUNCHED, [{"kernel": 0.5}])["step_ns"].item()


IMPOSSIBLE = {
    "10**5000": 10**5000, "10**400": 10**400, "True": True, "date": datetime(2024, 1, 1), "Decimal nan": Decimal("NaN"),
    "numpy nan": np.float32("nan"), "numpy inf": np.float32("inf"), "numpy bool": np.True_, "list": [2],
    "array": np.ones(2), "complex": 1j, "bytes": b"2", "expression": pl.lit(2),
    "mapping": {"kernel": 2}, "object": object,
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_scale_that_is_no_finite_number_is_named(name: str) -> None:
    value = re.escape(shown(IMPOSSIBLE[name]))
    with pytest.raises(
        ScenarioError, match=f"scenario 1 in row 1: the scale of 'kernel' is {value}; give a finite number"
    ):
        sweep(LAUNCHED, [{"kernel": 1}, {"kernel": IMPOSSIBLE[name]}])


@pytest.mark.parametrize("scale", [1e308, 2**128, 2**64, Fraction(10**300)], ids=str)
def test_a_scale_that_makes_times_that_replay_would_not_take_is_named(scale: Any) -> None:
    """Not as an infinite step."""
    with pytest.raises(
        ScenarioError, match=r"scenario 'b' in row 1: the scale of 'kernel' is .*, which makes .* of .* ns"
    ):
        sweep(LAUNCHED, [{"scenario": "a", "kernel": 1}, {"scenario": "b", "kernel": scale, "launch": 2}])


def test_a_class_of_thousands_of_digits_is_named() -> None:
    with pytest.raises(ScenarioError, match="class 'a number of thousands of digits'; the graph has"):
        sweep(LAUNCHED, [{10**5000: 1}])  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "column",
    [
        pl.Series([1, 10**30], dtype=pl.Int128), [None, float("nan")], [None, -1.0], [None, True], [None, "2"],
        [None, date(2024, 1, 1)], [None, [2.0]], pl.Series([None, object()], dtype=pl.Object),
    ],
    ids=["huge", "nan", "below 0", "bool", "text", "date", "list", "object"],
)  # fmt: skip
def test_impossible_scales_of_a_frame_are_named(column: Any) -> None:
    with pytest.raises(ScenarioError, match="in row 1: the scale of 'kernel' is"):
        sweep(LAUNCHED, pl.DataFrame({"kernel": column}))


@pytest.mark.parametrize("values", [[1.0, True], [1, "2"], [None, float("inf")]], ids=str)
def test_impossible_scales_of_pandas_are_named(values: list[object]) -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ScenarioError, match="in row 1: the scale of 'kernel' is"):
        sweep(LAUNCHED, pandas.DataFrame({"kernel": values}, dtype=object))
    with pytest.raises(ScenarioError, match="in row 0: the scale of 'kernel' is Timestamp"):
        sweep(LAUNCHED, pandas.DataFrame({"kernel": [pandas.Timestamp(2024, 1, 1)]}))


def test_scales_of_any_library_are_taken() -> None:
    pandas = pytest.importorskip("pandas")
    halves = [0.5, Fraction(1, 2), np.float32(0.5), np.float16(0.5)]
    swept = sweep(LAUNCHED, [{"kernel": scale} for scale in [*halves, np.int64(1), None]])
    assert swept["step_ns"].to_list() == [HALF_NS] * 4 + [STEP_NS] * 2
    frame = pandas.DataFrame({"kernel": pandas.array([1, None], dtype="Int64")})
    assert sweep(LAUNCHED, frame, block=np.int64(1))["step_ns"].to_list() == [STEP_NS] * 2  # type: ignore[arg-type]
    assert sweep(LAUNCHED, [{}, {}])["step_ns"].to_list() == [STEP_NS] * 2


def test_labels_of_several_kinds_are_texts() -> None:
    for labels, expected in (
        ((1, None), [1, None]), ((1, 0.5), [1.0, 0.5]), ((1, "a"), ["1", "a"]), (("a", None), ["a", None]),
        ((2**70, True), [str(2**70), "True"]), ((10**5000, "a"), ["a number of thousands of digits", "a"]),
    ):  # fmt: skip
        assert sweep(LAUNCHED, [{"scenario": label} for label in labels])["scenario"].to_list() == expected
