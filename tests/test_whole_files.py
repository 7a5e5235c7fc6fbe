"""Files whose writers are killed, fail, or write at once: each is there whole or not at all, and nothing piles up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lumos_nb import whole_files
from lumos_nb.errors import InputError, LumosError
from lumos_nb.whole_files import PART, STALE_S, scratch, whole

WRITER = """
import sys
from lumos_nb.whole_files import whole
with whole("held.txt") as part, part.open("w") as file:
    file.write("half of it")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
    file.write(" and the rest")
"""


@pytest.fixture(autouse=True)
def as_a_new_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program looks for what others left once a folder."""
    whole_files.remove_stale.cache_clear()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def writer() -> Iterator[subprocess.Popen[str]]:
    """A program that has written half of a file and waits."""
    command = [sys.executable, "-c", WRITER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "writing\n"
        yield program
        program.kill()


def parts() -> list[Path]:
    return [path for path in Path().iterdir() if path.name.endswith(PART)]


def age() -> None:
    """Let all parts have been written last before they count as stale."""
    for part in parts():
        os.utime(part, (0, time.time() - STALE_S - 5))


def test_a_killed_writer_leaves_no_file_and_its_part_goes_with_the_next_one(writer: subprocess.Popen[str]) -> None:
    writer.kill()
    writer.wait()
    assert not Path("held.txt").exists()
    assert len(parts()) == 1
    with whole("other.txt") as part:
        part.write_text("a")
    assert len(parts()) == 1  # it is new: its writer might be about to lock it
    age()
    whole_files.remove_stale.cache_clear()
    with whole("held.txt") as part:
        part.write_text("b")
    assert {path.name: path.read_text() for path in Path().iterdir()} == {"other.txt": "a", "held.txt": "b"}


def test_a_writer_at_work_keeps_its_part_however_old(writer: subprocess.Popen[str]) -> None:
    age()
    with whole("other.txt") as part:
        part.write_text("a")
    assert len(parts()) == 1
    assert not Path("held.txt").exists()
    writer.communicate()
    assert writer.returncode == 0
    assert Path("held.txt").read_text() == "half of it and the rest"
    assert parts() == []


def test_other_files_are_not_taken_for_parts() -> None:
    for name in ("notes.lumos-part.txt", "a.part", ".lumos-partial"):
        Path(name).write_text("mine")
        os.utime(name, (0, 0))
    Path(f"folder{PART}").mkdir()
    Path(f"link{PART}").symlink_to("a.part")
    os.utime(f"folder{PART}", (0, 0))
    with whole("new.txt") as part:
        part.write_text("a")
    assert len(list(Path().iterdir())) == 6


def test_a_scratch_folder_is_gone_in_the_end_or_with_the_next_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch(Path()) as made:
        (made / "a").write_text("")
        os.utime(made, (0, 0))
        whole_files.remove_stale.cache_clear()
        with scratch(Path()) as other:  # the first is old, but in use
            assert made.exists()
            assert made != other
    assert not [*Path().iterdir()]
    with monkeypatch.context() as killed:
        killed.setattr("shutil.rmtree", lambda *_, **__: None)
        with scratch(Path()) as left:
            (left / "a").write_text("")
            os.utime(left, (0, 0))
    assert left.exists()
    whole_files.remove_stale.cache_clear()
    with scratch(Path()):
        assert not left.exists()


def test_an_error_while_writing_keeps_the_file_that_was_there() -> None:
    Path("a.txt").write_text("old")
    with pytest.raises(UnicodeEncodeError), whole("a.txt") as part, part.open("w", encoding="ascii") as file:
        file.writelines(["new", "\ud800"])
    assert Path("a.txt").read_text() == "old"
    assert len(list(Path().iterdir())) == 1


def test_what_is_written_is_on_the_disk_before_it_gets_its_name_and_the_name_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[tuple[str, int]] = []
    sync, replace = os.fsync, Path.replace

    def synced(file: int) -> None:
        done.append(("folder" if os.path.samestat(os.fstat(file), Path().stat()) else "file", os.fstat(file).st_size))
        sync(file)

    def renamed(self: Path, target: Any) -> Path:
        done.append(("name", self.stat().st_size))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    with whole("a.txt") as part:
        part.write_text("12345")
    assert [what for what, _ in done] == ["file", "name", "folder"]
    assert [size for _, size in done[:2]] == [5, 5]


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "x.json.gz"])
def test_any_name_that_a_file_can_have_will_do(name: str) -> None:
    with whole(name) as part:
        part.write_text("a")
    assert [path.name for path in Path().iterdir()] == [name]


def test_a_link_is_replaced_and_not_written_through() -> None:
    Path("target.txt").write_text("untouched")
    Path("link.txt").symlink_to("target.txt")
    with whole("link.txt") as part:
        part.write_text("new")
    assert (Path("target.txt").read_text(), Path("link.txt").read_text()) == ("untouched", "new")
    assert not Path("link.txt").is_symlink()


@pytest.mark.parametrize("name", ["", ".", "..", "a\0b", "x" * 256, "missing/a.txt", "/proc/a.txt", "\ud800"])
def test_what_cannot_be_written_is_an_error_of_the_kind_that_was_asked_for(name: str) -> None:
    with pytest.raises(InputError, match=r"no file|cannot be written|no path"), whole(name, InputError) as part:
        part.write_text("a")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("why", ["no space (os error 28)", "parquet: Invalid thrift: transport error"])
def test_what_polars_says_of_a_full_disk_is_an_error_of_that_kind(why: str) -> None:
    with pytest.raises(InputError, match=r"cannot be written: .*has room"), whole("a.parquet", InputError):
        raise pl.exceptions.ComputeError(why)


def test_what_is_no_path_at_all_is_refused() -> None:
    for wrong in (5, None, b"a.txt"):
        with pytest.raises(LumosError, match="is no path"), whole(wrong):  # type: ignore[arg-type]
            pass
