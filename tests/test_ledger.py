"""Predictions saved before the run that tests them, and how they came out."""

from __future__ import annotations

import json
import math
import time
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb.errors import LumosError
from lumos_nb.ledger import load_prediction, run_digest, whole
from tests.trace_builder import ZERO_NS, Trace, write_kineto

STEPS_US = (700, 1000, 900, 1000, 1500, 1000, 800)
"""Lengths of steps; the first and last are at the edges."""


def run_with(
    folder: Path, name: str, *, scale: float = 1, steps: tuple[int, ...] = STEPS_US, at_us: float = 0
) -> ln.Run:
    """A run whose device is busy all through steps of these lengths times `scale`."""
    trace, start = Trace(), at_us
    for number, length in enumerate(steps, 1):
        end = start + length * scale
        trace.step(number, start, end)
        trace.launch("matmul", (start + 1, start + 3), (start + 10, end))
        start = end
    return ln.load_run(write_kineto(trace, folder / f"{name}.json"), cache=False)


@pytest.fixture
def base(tmp_path) -> ln.Run:
    return run_with(tmp_path, "base")


def test_a_prediction_scales_the_bases_steps_and_is_read_back_as_it_was(base, tmp_path):
    said = ln.save_prediction(tmp_path / "p.json", base, change="half", times=0.5, model_error=0.1)
    assert load_prediction(tmp_path / "p.json") == said
    assert (said.null_ns, said.predicted_ns) == (1_000_000, 500_000)
    assert (said.low_ns, said.high_ns) == (round(0.5 * 900_000 * 0.9), round(0.5 * 1_500_000 * 1.1))
    assert (said.base_steps, said.coverage) == (5, 4 / 6)
    assert said.base_digest == run_digest(base)
    assert str(said) == "half: 500 µs a step, 405 µs to 825 µs; null 1.00 ms, from 5 steps of the base"
    assert abs((datetime.now(UTC) - said.made).total_seconds()) < 60


def test_a_check_has_the_error_beside_that_of_the_null_and_the_noise(base, tmp_path):
    said = ln.save_prediction(tmp_path / "p.json", base, change="half", times=0.5)
    came = ln.check_prediction(said, run_with(tmp_path, "new", scale=0.6))
    assert came.measured_ns == 600_000
    assert came.error == pytest.approx(500 / 600 - 1)
    assert came.null_error == pytest.approx(1000 / 600 - 1)
    assert came.within
    assert came.covered == 4 / 5  # 900 µs is beyond 750
    assert came.noise == 0.0
    assert "an error of -16.7 % (null 66.7 %)" in str(came)
    assert "inside the interval of 450 µs to 750 µs; its steps scatter by 0.0 %." in str(came)
    far = ln.check_prediction(said, run_with(tmp_path, "far", scale=2))
    assert not far.within
    assert "outside the interval" in str(far)


def test_the_interval_covers_one_more_step_as_often_as_it_says(tmp_path):
    lengths = [1000 + 37 * ((k * k * 7 + 3 * k) % 41) for k in range(12)]
    base = run_with(tmp_path, "base", steps=(500, *lengths[:9], 500))
    said = ln.save_prediction(tmp_path / "p.json", base)
    assert said.coverage == 8 / 10
    inside = [said.low_ns <= length * 1000 <= said.high_ns for length in lengths[9:]]
    came = ln.check_prediction(said, run_with(tmp_path, "more", steps=(500, *lengths[9:], 500)))
    assert came.covered == sum(inside) / 3


def test_one_step_has_no_noise(tmp_path):
    said = ln.save_prediction(tmp_path / "p.json", run_with(tmp_path, "base", steps=(1000,)))
    assert (said.base_steps, said.coverage) == (1, 0)
    came = ln.check_prediction(said, run_with(tmp_path, "new", steps=(1200,)))
    assert came.noise is None
    assert "scatter" not in str(came)


def test_whether_the_run_came_after_the_prediction_is_said_where_its_clock_tells(base, tmp_path):
    said = ln.save_prediction(tmp_path / "p.json", base)
    older = ln.check_prediction(said, run_with(tmp_path, "older", scale=1.1))
    assert older.afterwards is False
    assert str(older).endswith("The run is older than the prediction.")
    ahead_us = (time.time_ns() - ZERO_NS) / 1000 + 3.6e9
    assert ln.check_prediction(said, run_with(tmp_path, "newer", at_us=ahead_us)).afterwards is True
    since_boot = run_with(tmp_path, "boot", scale=1.2)
    ranks = since_boot.ranks.with_columns(start_ns=pl.lit(5_000_000_000))
    unknown = ln.check_prediction(said, ln.Run(since_boot.events, ranks, since_boot.report, since_boot.metadata))
    assert unknown.afterwards is None


def test_the_run_that_a_prediction_was_made_from_cannot_test_it(base, tmp_path):
    ln.save_prediction(tmp_path / "p.json", base)
    again = tmp_path / "again.json"
    again.write_bytes((tmp_path / "base.json").read_bytes())
    with pytest.raises(LumosError, match=r"again\.json is the run that the prediction was made from"):
        ln.check_prediction(tmp_path / "p.json", ln.load_run(again, cache=False))


def test_a_ledger_keeps_every_outcome_in_order(base, tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    said = ln.save_prediction(tmp_path / "p.json", base, change="half", times=0.5)
    came = [ln.check_prediction(said, run_with(tmp_path, f"new{n}", scale=n), ledger=ledger) for n in (0.5, 2)]
    table = ln.read_ledger(ledger)
    assert table["error"].to_list() == [outcome.error for outcome in came]
    assert table["within"].to_list() == [True, False]
    assert table["change"].to_list() == ["half", "half"]
    ledger.write_text(ledger.read_text() + "{}\n")
    with pytest.raises(LumosError, match=r"ledger\.jsonl \(line 3\) is no ledger: "):
        ln.read_ledger(ledger)
    with pytest.raises(LumosError, match="the ledger cannot be written"):
        ln.check_prediction(said, run_with(tmp_path, "new", scale=3), ledger=tmp_path)


def test_an_empty_ledger_has_no_outcome(tmp_path):
    (tmp_path / "ledger.jsonl").write_text("")
    assert ln.read_ledger(tmp_path / "ledger.jsonl").is_empty()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param("{", "truncated", id="half a file"),
        pytest.param('{"traceEvents": []}', "change", id="a trace"),
        pytest.param('{"format": "lumos_nb outcome 1"}', "outcome", id="an outcome"),
    ],
)
def test_a_file_that_is_no_prediction_is_named(content, why, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(LumosError, match=rf"p\.json is no saved prediction: .*{why}"):
        load_prediction(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LumosError, match=r"absent\.json is no saved prediction: .*No such file"):
        load_prediction(tmp_path / "absent.json")
    with pytest.raises(LumosError, match=r"absent\.jsonl is no ledger: .*No such file"):
        ln.read_ledger(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("times", [-1, math.nan, math.inf, None, "half"], ids=str)
def test_only_a_number_can_be_predicted(times, base, tmp_path):
    with pytest.raises(LumosError, match=r"times=.*: give a finite number of at least 0"):
        ln.save_prediction(tmp_path / "p.json", base, times=times)
    assert not (tmp_path / "p.json").exists()


def test_the_digest_is_of_what_the_files_hold_not_of_their_names(base, tmp_path):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "renamed.json").write_bytes((tmp_path / "base.json").read_bytes())
    assert run_digest(ln.load_run(other / "renamed.json", cache=False)) == run_digest(base)
    (tmp_path / "base.json").unlink()
    with pytest.raises(LumosError, match=r"base\.json, of which the run was read, cannot be read again"):
        run_digest(base)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("before")

    def write_half() -> None:
        with whole(path) as part:
            part.write_text("af")
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        write_half()
    assert path.read_text() == "before"
    with whole(path) as part:
        part.write_text("after")
    assert path.read_text() == "after"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept.txt"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("times", "half"), ("predicted_ns", 1.5), ("made", "yesterday")),  # of the wrong type
        *(("low_ns", 10**30), ("predicted_ns", -5), ("times", -1.0), ("made", "2026-01-01T00:00:00")),
        ("null_ns", 2**62),
    ],
)
def test_a_value_that_cannot_be_is_named(field, value, base, tmp_path):
    path = tmp_path / "p.json"
    ln.save_prediction(path, base)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(LumosError, match=rf"p\.json is no saved prediction: .*{field}"):
        load_prediction(path)


@pytest.mark.parametrize("given", [{"times": 1e300}, {"times": 10**400}, {"model_error": 1e300}, {"change": 5}])
def test_what_could_not_be_read_back_is_not_saved(given, base, tmp_path):
    with pytest.raises(LumosError, match=r"of over a century|change is 5; give a str|times=1.*: give a finite"):
        ln.save_prediction(tmp_path / "p.json", base, **given)
    assert not list(tmp_path.glob("*p.json*"))


def test_a_line_that_was_not_finished_does_not_spoil_the_next(base, tmp_path):
    ledger, said = tmp_path / "ledger.jsonl", ln.save_prediction(tmp_path / "p.json", base)
    ledger.write_text('{"format":"lumos_nb outc')
    outcome = ln.check_prediction(said, run_with(tmp_path, "new", scale=2), ledger=ledger)
    with pytest.raises(LumosError, match="line 1"):
        ln.read_ledger(ledger)
    ledger.write_text(ledger.read_text().splitlines()[1])
    assert ln.read_ledger(ledger)["error"].to_list() == [outcome.error]


@pytest.mark.parametrize("name", ["", ".", "a\0b", "x" * 300])
def test_a_name_that_no_file_can_have_is_refused(name, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LumosError, match=r"names no file|cannot be written|is no path"):
        ln.save_prediction(name, base)
