"""Step times that were taken without the profiler, beside the traces."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import lumos_nb as ln
from lumos_nb.beside import timed_in_words
from lumos_nb.errors import RunError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recorded run of two ranks, without its own times."""
    copied = tmp_path / "run"
    shutil.copytree(ln.datasets.path("gpt-ddp"), copied, ignore=shutil.ignore_patterns("*.csv", "*.et.*"))
    return copied


def test_a_step_lasts_as_long_as_its_slowest_rank(folder: Path) -> None:
    (folder / "steps.csv").write_text("rank,step,wall_ns,cpu_ns\n0,1,30,1\n1,1,20,1\n0,0,10,1\n1,0,40,1\n")
    assert ln.timed_steps(ln.load_run(folder)).rows() == [(0, 40), (1, 30)]


def test_a_file_a_rank_is_as_good(folder: Path) -> None:
    (folder / "steps-0.csv").write_text("rank,step,wall_ns,cpu_ns\n0,0,30,1\n")
    (folder / "steps-1.csv").write_text("rank,step,wall_ns,cpu_ns\n1,0,20,1\n")
    assert ln.timed_steps(ln.load_run(folder)).rows() == [(0, 30)]


def test_the_bundled_runs_have_theirs() -> None:
    times = ln.timed_steps(ln.load_run(ln.datasets.path("gpt-ddp")))
    assert times["step"].to_list() == list(range(30))
    assert times["wall_ns"].min() > 1_000_000


def test_the_report_says_how_much_the_profiler_slows_steps_down(folder: Path) -> None:
    run = ln.load_run(folder)
    note = {section.key: section.note for section in ln.step_report(run, predict=0).sections}["steps"]
    assert "profiler began," not in note  # nothing tells
    (folder / "steps.csv").write_text("rank,step,wall_ns,cpu_ns\n" + "".join(f"0,{i},20000000,1\n" for i in range(3)))
    note = {section.key: section.note for section in ln.step_report(run, predict=0).sections}["steps"]
    profiled_ms = float(note.split("Median ")[1].split(" ms")[0])
    assert f"3 steps took 20.0 ms in the median (steps.csv): those with it take {profiled_ms / 20:.2f} times" in note


@pytest.mark.parametrize("text", ["rank,step\n0,1\n", "step,wall_ns\na,b\n", "\xff", ""], ids=repr)
def test_a_file_of_others_is_named_and_does_not_end_a_report(folder: Path, text: str) -> None:
    (folder / "steps.csv").write_text(text, encoding="latin-1")
    run = ln.load_run(folder)
    with pytest.raises(RunError, match=r"steps\.csv is no table of numbers with the columns step, wall_ns"):
        ln.timed_steps(run)
    assert "steps.csv is no table of numbers" in ln.step_report(run, predict=0).sections[0].note


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("-inf,5", "column step holds -inf; give finite numbers"),
        ("1,nan", "column wall_ns holds nan; give finite numbers"),
        ("1.5,5", r"a step 1\.5 of 5 ns; give steps counted from 0"),
        ("-1,5", "a step -1 of 5 ns"),
        ("1,-5", "a step 1 of -5 ns"),
        ("1,1e300", r"a step 1 of 1e\+300 ns"),
    ],
)
def test_what_is_no_step_or_no_time_is_named(folder: Path, row: str, message: str) -> None:
    (folder / "steps.csv").write_text(f"step,wall_ns\n0,5.0\n{row}\n")
    with pytest.raises(RunError, match=message):
        ln.timed_steps(ln.load_run(folder))


def test_times_of_nothing_are_no_divisor(folder: Path) -> None:
    (folder / "steps.csv").write_text("step,wall_ns\n0,0\n")
    assert timed_in_words(ln.load_run(folder), 5.0) == ""


def test_steps_that_take_less_with_the_profiler_are_told_as_a_busier_machine(folder: Path) -> None:
    (folder / "steps.csv").write_text("step,wall_ns\n0,4000000\n")
    run = ln.load_run(folder)
    assert "those with it take 0.75 times as long (less: others used the machine" in timed_in_words(run, 3e6)
    assert timed_in_words(run, 6e6).endswith("take 1.50 times as long.")


def test_runs_of_several_folders_or_of_an_archive_have_none(folder: Path, tmp_path: Path) -> None:
    (folder / "steps.csv").write_text("step,wall_ns\n0,7\n")
    moved = tmp_path / "rank-1.json.gz"
    shutil.move(folder / "rank-1.json.gz", moved)
    assert ln.timed_steps(ln.load_run([folder / "rank-0.json.gz", moved])).is_empty()
    archive = shutil.make_archive(str(tmp_path / "packed"), "tar", folder)
    assert ln.timed_steps(ln.load_run(archive)).is_empty()


def test_a_pipe_of_that_name_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "steps.csv")
    with pytest.raises(RunError, match=r"steps\.csv"):
        ln.timed_steps(ln.load_run(folder))
