"""The cache of parsed traces, tampered with: what is loaded is always what the trace file says."""

from __future__ import annotations

import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from threading import Barrier

import polars as pl
import pytest

from lumos_nb.traces import cache
from lumos_nb.traces.run import Run, load_run
from lumos_nb.whole_files import PART
from tests.trace_builder import Trace, repeated, write_kineto


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "cache"))
    return tmp_path / "cache"


def trace_of(path: Path, name: str = "gemm", at: float = 300) -> Path:
    """A trace of four steps, whose kernels have that name and start then."""

    def body(trace: Trace, _: int, start: float) -> None:
        trace.op("aten::mm", start + 100, start + 200)
        trace.launch(name, (start + 120, start + 130), (start + at, start + at + 200))

    return write_kineto(repeated(body), path)


def entry(trace: Path, folder: Path) -> Path:
    """The file of the cache that a trace has, after it was loaded once."""
    load_run(trace)
    return cache.cache_path(trace, folder)


def repaired(trace: Path, of: Run, reasons: str) -> None:
    """Assert that a load gives the same as before, says why the cache was no good, and mends it."""
    again = load_run(trace)
    assert again.events.equals(of.events)
    assert again.metadata == of.metadata
    [reason] = again.report.filter(what="cache")["reason"]
    assert reasons in reason
    assert load_run(trace).report.equals(of.report)


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path, cache_folder: Path) -> None:
    trace = trace_of(tmp_path / "rank0.json")
    kept, clean = entry(trace, tmp_path), load_run(trace)
    whole, noise = kept.read_bytes(), random.Random(0)
    places = sorted({noise.randrange(len(whole)) for _ in range(300)} | {*range(len(whole) - 40, len(whole))})
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << noise.randrange(8)
        kept.write_bytes(damaged)
        with pytest.raises(ValueError, match="no parse of ours"):
            cache.load(kept)
    repaired(trace, clean, "no parse of ours")
    assert kept.read_bytes() == whole


def test_no_cut_goes_unnoticed(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "rank0.json")
    kept, clean = entry(trace, tmp_path), load_run(trace)
    whole = kept.read_bytes()
    for size in {0, 1, 4, 8, *range(20, len(whole), len(whole) // 30), len(whole) - 1}:
        kept.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="no parse of ours"):
            cache.load(kept)
    kept.write_bytes(whole + b"x")
    repaired(trace, clean, "no parse of ours")


def test_a_table_that_was_edited_and_written_again_is_not_taken(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "rank0.json")
    kept, clean = entry(trace, tmp_path), load_run(trace)
    edited = pl.read_parquet(kept).with_columns(dur_ns=pl.col("dur_ns") * 2)
    edited.write_parquet(kept, metadata=pl.read_parquet_metadata(kept))
    repaired(trace, clean, "its content has changed since it was written")


def test_the_parse_of_another_trace_or_version_is_not_taken_under_this_ones_name(tmp_path: Path) -> None:
    one, other = trace_of(tmp_path / "rank0.json"), trace_of(tmp_path / "rank1.json", "other", 500)
    kept, others, clean = entry(one, tmp_path), entry(other, tmp_path), load_run(one)
    kept.write_bytes(others.read_bytes())
    repaired(one, clean, f"it was written as {others.name}")
    older = kept.with_name(kept.name.replace(f"-v{cache.PARSER_VERSION}", "-v1"))
    older.write_bytes(others.read_bytes())
    kept.unlink()
    assert load_run(one).events.equals(clean.events)  # of an older version none is looked for


def test_another_trace_of_the_same_name_size_and_time_is_another_trace(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "rank0.json", "gemm")
    before, was = load_run(trace), trace.stat()
    trace_of(trace, "conv")
    os.utime(trace, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (trace.stat().st_size, trace.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    assert before.events.filter(category="kernel")["name"].unique().to_list() == ["gemm"]
    assert load_run(trace).events.filter(category="kernel")["name"].unique().to_list() == ["conv"]


@pytest.mark.parametrize("what", ["folder", "pipe", "dead link", "link to itself", "link to a device"])
def test_what_lies_in_the_place_of_a_parse_is_no_parse_and_nothing_waits_for_it(what: str, tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "rank0.json")
    kept, clean = entry(trace, tmp_path), load_run(trace)
    kept.unlink()
    if what == "folder":
        kept.mkdir()
        (kept / "in it").write_text("")
    elif what == "pipe":
        os.mkfifo(kept)
    else:
        kept.symlink_to({"dead link": "gone", "link to itself": kept, "link to a device": "/dev/zero"}[what])
    again = load_run(trace)
    assert again.events.equals(clean.events)
    if what in ("folder", "pipe", "link to a device"):  # which are not ours to remove
        assert "not written" in again.report.filter(what="cache")["reason"][0]
    else:
        assert kept.is_file()
        assert not kept.is_symlink()
        assert load_run(trace).report.equals(clean.report)


def test_a_link_in_the_place_of_a_parse_is_read_as_the_file_and_never_written_through(tmp_path: Path) -> None:
    trace, victim = trace_of(tmp_path / "rank0.json"), tmp_path / "victim.txt"
    kept, clean = entry(trace, tmp_path), load_run(trace)
    victim.write_text("mine")
    kept.unlink()
    kept.symlink_to(victim)
    repaired(trace, clean, "no parse of ours")
    assert victim.read_text() == "mine"


def test_what_a_folder_of_traces_links_to_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder of somebody else may bring its own folder for the cache."""
    monkeypatch.delenv(cache.CACHE_ENV)
    run, victim = tmp_path / "run", tmp_path / "victim.txt"
    (run / cache.CACHE_FOLDER).mkdir(parents=True)
    (run / cache.CACHE_FOLDER / ".gitignore").symlink_to(victim)
    victim.write_text("mine")
    load_run(trace_of(run / "rank0.json"))
    assert victim.read_text() == "mine"
    assert len(list((run / cache.CACHE_FOLDER).glob("*.parquet"))) == 1


def test_a_cache_that_cannot_be_read_or_written_is_done_without(tmp_path: Path, cache_folder: Path) -> None:
    trace = trace_of(tmp_path / "rank0.json")
    clean = load_run(trace, cache=False)
    cache_folder.write_text("a file where the folder should be")
    again = load_run(trace)
    assert again.events.equals(clean.events)
    assert "not written" in again.report.filter(what="cache")["reason"][0]


_barrier: Barrier


def _with(barrier: Barrier) -> None:
    global _barrier  # what processes wait for together they get when they start
    _barrier = barrier


def _load_at_once(path: Path) -> tuple[str, list[str]]:
    _barrier.wait(60)
    run = load_run(path)
    return str(run.events.hash_rows().sum()), run.report.filter(what="cache")["reason"].to_list()


def test_processes_that_parse_one_file_at_once_all_get_it_right(tmp_path: Path, cache_folder: Path) -> None:
    spawn, processes = multiprocessing.get_context("spawn"), 3
    with ProcessPoolExecutor(processes, spawn, _with, (spawn.Barrier(processes),)) as pool:
        for number in range(30):
            trace = trace_of(tmp_path / f"rank{number}.json", f"kernel {number}")
            right = str(load_run(trace, cache=False).events.hash_rows().sum())
            damaged = cache.cache_path(trace, tmp_path)
            if number % 3 == 1:  # each finds it and mends it while the others do
                damaged.write_bytes(b"PAR1 garbage PAR1")
            found = [*pool.map(_load_at_once, [trace] * processes)]
            assert {digest for digest, _ in found} == {right}
            assert all("no parse of ours" in reason for _, reasons in found for reason in reasons)
    assert len(list(cache_folder.glob("*.parquet"))) == 30
    assert [path for path in cache_folder.iterdir() if path.name.endswith(PART)] == []
