"""The guard against slow-downs, and what stands for a peer that cannot be measured."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import pytest

from benchmarks import bench_check, peers
from benchmarks.bench_check import Check, bound, failures
from benchmarks.rows import Row, read, record


class Timed(Check):
    """A check whose ratio is given: each measurement is the next number."""

    def measured(self) -> float:
        return next(self.limit)


def timed(*ratios: float) -> Timed:
    return Timed("sorting", None, iter(ratios))


def stored(value: float, noise: float = 0.1) -> dict[str, Row]:
    return {"sorting": Row("check/sorting", value, "x", noise=noise)}


def test_the_bound_is_three_times_the_noise_and_at_least_fifteen_percent():
    assert bound(stored(2.0, 0.2)["sorting"]) == pytest.approx(2.6)
    assert bound(stored(2.0, 0.01)["sorting"]) == pytest.approx(2.3)
    assert bound(Row("check/sorting", 2.0, "x")) == pytest.approx(2.3)


@pytest.mark.parametrize("ratios", [(1.0,), (2.0,), (2.29,), (3.0, 2.2), (3.0, 3.0, 2.3)])
def test_noise_passes_and_so_does_what_is_slow_only_once(ratios):
    assert failures([timed(*ratios)], stored(2.0, 0.1)) == []


def test_a_slow_down_fails(capsys):
    assert failures([timed(3.0, 2.5, 2.4)], stored(2.0, 0.1)) == ["sorting"]
    assert "GROWN" in capsys.readouterr().out


def test_a_check_that_is_not_recorded_fails_and_so_does_a_record_without_a_check():
    assert failures([timed(1.0)], {}) == ["sorting"]
    assert failures([], stored(2.0)) == ["sorting"]


@pytest.fixture
def real(tmp_path, monkeypatch):
    """One real check, twice the work of its limit, with a file of its own."""

    def work(rounds: int) -> None:
        began = time.process_time()
        while time.process_time() - began < rounds * 2e-3:
            pass

    monkeypatch.setattr(bench_check, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(bench_check, "checks", lambda: [Check("twice", lambda: work(2), lambda: work(1))])
    return bench_check.RESULTS


def test_what_is_recorded_passes_and_a_doctored_record_fails(real):
    assert bench_check.main(["--record"]) == 0
    row, machine = read(real)
    assert machine.name == "machines/check"
    assert row.value == pytest.approx(2, rel=0.2)
    assert bench_check.main([]) == 0
    record(real, [Row(row.name, row.value / 2, "x", noise=0.01)])
    assert bench_check.main([]) == 1


def test_a_peer_that_is_not_there_or_fails_has_a_row_that_says_why(tmp_path):
    (row,) = peers.rows_of("HTA", "benchmarks.peers_hta", tmp_path / "python")
    assert row.name == "peers/HTA"
    assert "make bench-peers makes it" in row.note
    (row,) = peers.rows_of("nothing", "benchmarks.no_such_program", sys.executable)
    assert "No module named benchmarks.no_such_program" in row.note
    (row,) = peers.rows_of("silent", "this", sys.executable)
    assert "printed no rows" in row.note


PROGRAMS = sorted(path for path in Path(bench_check.__file__).parent.glob("*.py") if not path.stem.startswith("peers_"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_finds_what_it_imports(path: Path) -> None:
    importlib.import_module(f"benchmarks.{path.stem}")
