"""A folder of rank files as one run: ranks, report, cache, executors."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import tarfile
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lumos_nb.errors import ExecutorError, InputError, RunError, TraceError, UnsupportedFormat
from lumos_nb.schema import EVENTS
from lumos_nb.traces import cache, files, run
from lumos_nb.traces.run import Run, load_run
from tests.test_nsys import CUPTI, export, kernel


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(cache.CACHE_ENV, str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for a run."""
    path = tmp_path / "run"
    path.mkdir()
    return path


def write(path: Path, *names: str, rank: int | None = None, world_size: int | None = None, **metadata: Any) -> Path:
    """A trace with one op a name."""
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 10 + i, "dur": 1.5}
        for i, name in enumerate(names)
    ]
    events.append({"ph": "X", "cat": "kernel", "name": "k", "pid": 3, "tid": 7, "ts": 50, "dur": 1})
    events.append({"ph": "s", "cat": "ac2g", "id": 1, "pid": 1, "tid": 1, "ts": 10})
    info = {key: value for key, value in (("rank", rank), ("world_size", world_size)) if value is not None}
    trace = {"schemaVersion": 1, "traceEvents": events} | ({"distributedInfo": info} if info else {}) | metadata
    text = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


def names_of(loaded: Run) -> list[tuple[int, str]]:
    return loaded.events.filter(pl.col("category") == "cpu_op").select("rank", "name").rows()


def sources(loaded: Run) -> dict[str, tuple[int, str]]:
    return {
        Path(path).name: (rank, source)
        for rank, path, source in loaded.ranks.select("rank", "path", "rank_source").rows()
    }


def reported(loaded: Run, what: str) -> pl.DataFrame:
    return loaded.report.filter(pl.col("what") == what)


def assert_same(one: Run, other: Run) -> None:
    assert one.events.equals(other.events)
    assert one.ranks.equals(other.ranks)
    assert one.report.equals(other.report)
    assert one.metadata == other.metadata


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_a_folder_of_ranks_is_one_run(folder: Path) -> None:
    write(folder / "b.json.gz", "x", rank=0, world_size=2)
    write(folder / "a.json", "y", "z", rank=1, world_size=2)
    loaded = load_run(folder)
    assert names_of(loaded) == [(0, "x"), (1, "y"), (1, "z")]
    assert EVENTS.check(loaded.events).columns == list(EVENTS.columns)
    assert loaded.ranks.drop("path", "bytes").rows() == [
        (0, "distributedInfo", 2, 3, 2, 1, 10_000, 51_000, [3]),
        (1, "distributedInfo", 2, 4, 3, 1, 10_000, 51_000, [3]),
    ]
    assert loaded.ranks["bytes"].to_list() == [(folder / name).stat().st_size for name in ("b.json.gz", "a.json")]
    assert loaded.metadata[1]["distributedInfo"] == {"rank": 1, "world_size": 2}
    assert loaded.report.select("rank", "what", "count").rows() == [(0, "dropped s ac2g", 1), (1, "dropped s ac2g", 1)]


def test_one_file_is_a_run_of_one_rank(folder: Path) -> None:
    loaded = load_run(write(folder / "trace.anything", "x"))
    assert names_of(loaded) == [(0, "x")]
    assert sources(loaded) == {"trace.anything": (0, "order")}


def test_the_file_itself_outranks_its_name_and_the_name_its_place(folder: Path) -> None:
    write(folder / "rank-7.json", "x", rank=2)
    write(folder / "host_rank_5.pt.trace.json", "x")
    write(folder / "another.json", "x")
    write(folder / "more.json", "y")
    loaded = load_run(folder)
    assert sources(loaded) == {
        "another.json": (0, "order"),
        "more.json": (1, "order"),
        "rank-7.json": (2, "distributedInfo"),
        "host_rank_5.pt.trace.json": (5, "file name"),
    }
    assert reported(loaded, "rank").select("rank", "reason").rows() == [
        (0, "the file names no rank: 0 is from its order"),
        (1, "the file names no rank: 1 is from its order"),
        (5, "the file names no rank: 5 is from its file name"),
    ]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-70.Mar_25_20_48_12.2861.pt.trace.json.gz", 70),
        ("rank_0.trace.json", 0),
        ("rank3_iter16_18.json", 3),
        ("worker2_step_12.1694128201554.pt.trace.json", 2),
        ("profile_trace_rank_11.json", 11),
        ("Rank.4.json", 4),
        ("frank9.json", None),
        ("ip-172-31-16-248_29220.1698955894936168439.pt.trace.json", None),
        ("rank99999999999.json", None),
    ],
)
def test_a_rank_in_a_file_name(name: str, rank: int | None) -> None:
    assert run._rank_in_name(name) == rank


def test_files_without_a_rank_are_numbered_as_a_person_counts(folder: Path) -> None:
    for i in (10, 9, 1):
        write(folder / f"gpu{i}.json", f"op{i}")
    assert names_of(load_run(folder)) == [(0, "op1"), (1, "op9"), (2, "op10")]


def test_two_files_of_one_rank_are_an_error_that_names_both(folder: Path) -> None:
    write(folder / "a.json", "x", rank=1)
    write(folder / "rank1.json", "y")
    with pytest.raises(
        RunError,
        match=r"a\.json \(distributedInfo\) and .*rank1\.json \(file name\) both claim rank 1, and differ: .*a list of",
    ):
        load_run(folder)
    assert names_of(load_run([folder / "rank1.json"])) == [(1, "y")]


@pytest.mark.parametrize(
    "names", [("rank1.json", "rank1.json.gz"), ("a.json", "a (copy).json"), ("a.json", "rank0.json")]
)
def test_a_copy_of_a_file_is_no_further_rank(folder: Path, names: tuple[str, str]) -> None:
    for name in names:
        write(folder / name, "x", rank=0 if names[1] == "rank0.json" else None)
    loaded = load_run(folder)
    assert len(loaded.ranks) == 1
    [reason] = reported(loaded, "not read")["reason"]
    assert reason == f"a copy of {loaded.ranks['path'][0]}: the same events"


def test_ranks_that_the_files_speak_of_but_are_not_there(folder: Path) -> None:
    write(folder / "a.json", "x", rank=3, world_size=8)
    [missing] = reported(load_run(folder), "missing ranks").rows(named=True)
    assert missing["count"] == 7
    assert missing["reason"] == "the files speak of 8 ranks; there is none of rank 0, 1, 2, 4, 5, 6, 7"


# --- what is not read -------------------------------------------------------------------------------------------------


def test_other_files_are_named_in_the_report(folder: Path) -> None:
    write(folder / "rank0.json", "x", rank=0)
    (folder / "et.json").write_text('{"schema": "1.1.1", "pid": 1, "nodes": []}')
    (folder / "config.json").write_text('{"tp": 4}')
    (folder / "notes.txt").write_text("slow today")
    (folder / "._rank0.json").write_text("a file system's own")
    (folder / "deeper").mkdir()
    write(folder / "deeper" / "rank1.json", "y", rank=1)
    loaded = load_run(folder)
    assert names_of(loaded) == [(0, "x")]
    skipped = {Path(path).name: reason for path, reason in reported(loaded, "not read").select("path", "reason").rows()}
    assert skipped.keys() == {"et.json", "config.json", "notes.txt", "._rank0.json"}
    assert "ln.load_execution_trace" in skipped["et.json"]


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nowhere does not exist"):
        load_run(tmp_path / "nowhere")


def test_a_folder_without_traces(folder: Path) -> None:
    with pytest.raises(RunError, match="it is empty"):
        load_run(folder)
    (folder / "step-3").mkdir()
    with pytest.raises(RunError, match="it holds folders only, which are not read"):
        load_run(folder)
    (folder / "config.json").write_text('{"tp": 4}')
    with pytest.raises(RunError, match=r"config\.json: .*no profiler trace"):
        load_run(folder)


def test_one_file_of_another_format_is_an_error(folder: Path) -> None:
    (folder / "et.json").write_text('{"schema": "1.1.1", "pid": 1, "nodes": []}')
    with pytest.raises(UnsupportedFormat, match="execution_trace"):
        load_run(folder / "et.json")


def test_ranks_of_jobs_of_different_sizes_are_no_run(folder: Path) -> None:
    write(folder / "a.json", "x", rank=0, world_size=2)
    write(folder / "b.json", "x", rank=1, world_size=8)
    with pytest.raises(RunError, match=r"a\.json of 2 ranks; \S+b\.json of 8 ranks\. Give each job a folder"):
        load_run(folder)


def test_a_path_that_the_system_refuses_is_named() -> None:
    with pytest.raises(RunError, match=r"x names no file"):
        load_run("x" * 5000)


def test_ranks_of_jobs_with_other_ranks_in_their_default_group_are_no_run(folder: Path) -> None:
    for rank, peers in ((0, [0, 1]), (1, [1, 2])):
        groups = [{"pg_name": "7", "ranks": [rank]}, {"pg_name": "0", "pg_desc": "default_pg", "ranks": peers}]
        write(folder / f"{rank}.json", "x", distributedInfo={"rank": rank, "world_size": 2, "pg_config": groups})
    with pytest.raises(RunError, match=r"0\.json of ranks \[0, 1\]; \S+1\.json of ranks \[1, 2\]"):
        load_run(folder)


def test_ranks_recorded_at_another_time_are_no_run(folder: Path) -> None:
    start_ns = 1_700_000_000 * 10**9
    for rank, later_s in ((0, 0), (1, 50), (2, 100)):
        write(folder / f"{rank}.json", f"x{rank}", rank=rank, baseTimeNanoseconds=start_ns + later_s * 10**9)
    assert len(load_run(folder).ranks) == 3
    write(folder / "3.json", "x", rank=3, baseTimeNanoseconds=start_ns + 161 * 10**9)
    with pytest.raises(RunError, match=r"3\.json begins 61 s after \S+2\.json has ended: they are not of one run"):
        load_run(folder)


def test_clocks_that_do_not_count_from_1970_need_not_agree(folder: Path) -> None:
    for rank in (0, 1):
        write(folder / f"{rank}.json", f"x{rank}", rank=rank, baseTimeNanoseconds=rank * 10**15)
    assert len(load_run(folder).ranks) == 2


@pytest.mark.parametrize("content", [b"", b'{"traceEvents": {}', b"\x1f\x8b\x08garbage", b"PAR1 and no more"])
def test_a_damaged_rank_of_several_is_named_and_missing(folder: Path, cache_folder: Path, content: bytes) -> None:
    write(folder / "rank0.json", "x", rank=0, world_size=2)
    (folder / "rank1.json").write_bytes(content)
    loaded = load_run(folder)
    assert names_of(loaded) == [(0, "x")]
    [damaged] = reported(loaded, "not read").select("path", "count", "reason").rows()
    assert damaged[:2] == (str(folder / "rank1.json"), 1)
    assert "rank1.json" in damaged[2]
    assert reported(loaded, "missing ranks")["count"].to_list() == [1]
    assert len(list(cache_folder.iterdir())) == 1


def test_where_no_file_can_be_read_each_is_named(folder: Path) -> None:
    (folder / "rank0.json").write_bytes(b"")
    (folder / "rank1.json").write_bytes(b"no trace")
    (folder / "rank2.json.tmp").write_bytes(b"{")
    (folder / "report.nsys-rep").write_bytes(b"Q")
    with pytest.raises(RunError) as caught:
        load_run(folder)
    for said in ("rank0.json is empty", "rank1.json: ", "rank2.json.tmp: its name", "nsys export --type sqlite"):
        assert said in str(caught.value)


def test_one_damaged_file_is_its_own_error(folder: Path) -> None:
    (folder / "rank1.json").write_bytes(b"")
    with pytest.raises(TraceError, match=r"rank1\.json is empty"):
        load_run(folder / "rank1.json")


def test_a_list_of_files_is_the_run_of_these(folder: Path) -> None:
    for rank in range(3):
        write(folder / f"rank{rank}.json", f"x{rank}")
    assert names_of(load_run([folder / "rank2.json", str(folder / "rank0.json")])) == [(0, "x0"), (2, "x2")]
    with pytest.raises(RunError, match=r"rank7\.json is no file"):
        load_run([folder / "rank0.json", folder / "rank7.json"])
    with pytest.raises(RunError, match="empty list"):
        load_run([])


def test_a_file_that_grows_while_it_is_read_is_reported_and_not_kept(
    folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folder / "rank0.json", "x")
    read_trace = files.read_trace

    def growing(path: Path) -> Any:
        parsed = read_trace(path)
        path.write_bytes(path.read_bytes() + b"  ")
        return parsed

    monkeypatch.setattr(files, "read_trace", growing)
    [reason] = reported(load_run(path), "changed")["reason"]
    assert reason.startswith("it changed while it was read, from ")
    assert not cache_folder.exists()


def test_a_truncated_rank_is_read_as_far_as_it_goes_and_reported(folder: Path) -> None:
    path = write(folder / "rank0.json", "x", "y")
    path.write_bytes(path.read_bytes()[:-100])
    loaded = load_run(folder)
    assert names_of(loaded) == [(0, "x"), (0, "y")]
    assert reported(loaded, "truncated").height == 1


# --- cache ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were parsed, not taken from the cache."""
    parsed: list[str] = []
    read_trace = files.read_trace

    def counting(path: Path) -> Any:
        parsed.append(path.name)
        return read_trace(path)

    monkeypatch.setattr(files, "read_trace", counting)
    return parsed


def test_a_second_load_comes_from_the_cache_and_is_the_same(folder: Path, cache_folder: Path, reads: list[str]) -> None:
    write(folder / "rank0.json", "x", big=2**70, note='é "')
    write(folder / "rank1.json.gz", "y", rank=1)
    first, second = load_run(folder), load_run(folder)
    assert_same(first, second)
    assert reads == ["rank0.json", "rank1.json.gz"]
    assert len(list(cache_folder.iterdir())) == 2


def test_the_cache_goes_by_content_not_by_name_or_place(folder: Path, reads: list[str]) -> None:
    path = write(folder / "rank0.json", "x")
    load_run(folder)
    path.rename(folder / "rank4.json")
    assert names_of(load_run(folder)) == [(4, "x")]
    assert reads == ["rank0.json"]
    write(folder / "rank4.json", "y")
    assert names_of(load_run(folder)) == [(4, "y")]
    assert reads == ["rank0.json", "rank4.json"]


def test_another_version_of_the_parser_reads_again(
    folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "rank0.json", "x")
    load_run(folder)
    monkeypatch.setattr(cache, "PARSER_VERSION", cache.PARSER_VERSION + 1)
    load_run(folder)
    assert len(reads) == 2


def test_without_cache_nothing_is_written(folder: Path, cache_folder: Path, reads: list[str]) -> None:
    write(folder / "rank0.json", "x")
    load_run(folder, cache=False)
    load_run(folder, cache=False)
    assert len(reads) == 2
    assert not cache_folder.exists()


@pytest.mark.parametrize("damage", ["garbage", "cut", "empty", "another table", "rows missing", "no count of events"])
def test_a_damaged_cache_is_read_again_reported_and_mended(
    folder: Path, cache_folder: Path, reads: list[str], damage: str
) -> None:
    write(folder / "rank0.json", "x", "y")
    first = load_run(folder)
    [entry] = cache_folder.iterdir()
    if damage == "another table":
        pl.DataFrame({"a": [1]}).write_parquet(entry)
    elif damage == "no count of events":
        own = json.dumps({"metadata": {}, "notes": [], "count": len(first.events)})
        pl.read_parquet(entry).write_parquet(entry, metadata={"lumos_nb": own})
    elif damage == "rows missing":
        metadata = pl.read_parquet_metadata(entry)
        pl.read_parquet(entry).head(1).write_parquet(entry, metadata={"lumos_nb": metadata["lumos_nb"]})
    else:
        entry.write_bytes({"garbage": b"?" * 500, "cut": entry.read_bytes()[:-300], "empty": b""}[damage])
    second = load_run(folder)
    assert second.events.equals(first.events)
    assert len(reads) == 2
    assert reported(second, "cache").height == 1
    assert_same(load_run(folder), first)
    assert len(reads) == 2


def test_a_write_that_fails_leaves_nothing_behind(
    folder: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    write(folder / "rank0.json", "x")
    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    loaded = load_run(folder)
    assert names_of(loaded) == [(0, "x")]
    assert "No space left" in reported(loaded, "cache")["reason"][0]
    assert list(cache_folder.iterdir()) == []


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, where the package's own variable is not set."""
    monkeypatch.delenv(cache.CACHE_ENV)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "lumos_nb"


def test_the_cache_lies_beside_the_files_of_a_folder_of_ones_own(folder: Path, user_cache: Path) -> None:
    write(folder / "rank0.json", "x")
    load_run(folder)
    load_run(folder)
    beside = sorted(path.name for path in (folder / ".lumos_cache").iterdir())
    assert beside[0] == ".gitignore"
    assert len(beside) == 2
    assert not user_cache.exists()


@pytest.mark.parametrize("mode", [0o555, 0o777], ids=["read-only, also to root", "writable by anybody"])
def test_a_folder_that_is_not_ones_own_stays_as_it_is(folder: Path, user_cache: Path, mode: int) -> None:
    write(folder / "rank0.json", "x")
    folder.chmod(mode)
    try:
        load_run(folder)
    finally:
        folder.chmod(0o755)
    assert [path.name for path in folder.iterdir()] == ["rank0.json"]
    assert len(list(user_cache.iterdir())) == 1


def test_a_folder_of_another_user_is_not_ones_own(
    folder: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert cache.cache_folder(folder) == user_cache


# --- executors --------------------------------------------------------------------------------------------------------


def processes() -> Executor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def threads() -> Executor:
    return ThreadPoolExecutor(2)


@pytest.mark.parametrize("workers", [processes, threads])
@pytest.mark.parametrize("cached", [True, False])
def test_an_executor_gives_the_same_run(folder: Path, workers: Any, cached: bool) -> None:
    write(folder / "rank0.json", "x")
    write(folder / "rank1.json", "y", "z")
    (folder / "config.json").write_text("{}")
    alone = load_run(folder, cache=False)
    with workers() as executor:
        assert_same(load_run(folder, executor=executor, cache=cached), alone)
        assert_same(load_run(folder, executor=executor, cache=cached), alone)


def test_a_pool_that_forks_is_refused_for_it_would_hang(folder: Path) -> None:
    write(folder / "rank0.json", "x")
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=fork) as executor, pytest.raises(ExecutorError, match=r"forks.*\"spawn\""):
        load_run(folder, executor=executor)


def test_an_error_in_a_worker_is_the_same_error(folder: Path) -> None:
    (folder / "rank1.json").write_bytes(b"")
    with processes() as executor, pytest.raises(TraceError, match=r"rank1\.json is empty"):
        load_run(folder / "rank1.json", executor=executor)


# --- several ranks in a file ------------------------------------------------------------------------------------------


def node(path: Path, *devices: int, **tables: Any) -> Path:
    """An nsys export with a kernel on each device, each by a process of its own."""
    kernels = [kernel(10 * d, 10 * d + 5, d, pid=20 + d, device=d) for d in devices]
    return export(path, **{CUPTI + "KERNEL": kernels}, **tables)


def test_one_file_of_several_ranks(folder: Path) -> None:
    host = [{"start": 1, "end": 2, "eventType": 59, "text": "t", "globalTid": 99 << 24}]
    loaded = load_run(node(folder / "report.sqlite", 0, 1, NVTX_EVENTS=host))
    assert loaded.events.select("rank", "device").rows() == [(0, 0), (1, 1)]
    columns = ("rank", "rank_source", "events", "kept", "dropped", "devices")
    assert loaded.ranks.select(columns).rows() == [(0, "order", 2, 1, 1, [0]), (1, "order", 1, 1, 0, [1])]
    assert reported(loaded, "dropped user_annotation").select("rank", "count").rows() == [(None, 1)]
    assert loaded.metadata[1]["ranks"] == [0, 1]


def test_a_file_of_several_ranks_comes_from_the_cache_as_it_was(folder: Path, reads: list[str]) -> None:
    path = node(folder / "report.sqlite", 0, 1)
    assert_same(load_run(path), load_run(path))
    assert reads == ["report.sqlite"]


def test_ranks_that_a_file_only_counts_go_on_from_file_to_file(folder: Path) -> None:
    node(folder / "host1.sqlite", 0, 1)
    node(folder / "host2.sqlite", 0, 2)
    loaded = load_run(folder)
    assert loaded.events.select("rank", "device").rows() == [(0, 0), (1, 1), (2, 0), (3, 2)]


def test_an_export_of_one_process_takes_the_rank_of_its_name(folder: Path) -> None:
    for rank in (2, 5):
        node(folder / f"report_rank{rank}.sqlite", rank)
    loaded = load_run(folder)
    assert loaded.ranks.select("rank", "rank_source", "devices").rows() == [
        (2, "file name", [2]),
        (5, "file name", [5]),
    ]


# --- archives ---------------------------------------------------------------------------------------------------------


def archive(folder: Path, path: Path) -> Path:
    with tarfile.open(path, "w:gz") as packed:
        packed.add(folder, arcname="inside")
    return path


def test_an_archive_is_the_folder_that_it_holds(folder: Path, tmp_path: Path, reads: list[str]) -> None:
    write(folder / "rank0.json", "x")
    write(folder / "rank1.json.gz", "y")
    (folder / "notes.txt").write_text("slow today")
    (folder / "rank2.json").write_bytes(b"")
    packed = archive(folder, tmp_path / "run.tar.gz")
    loaded = load_run(packed)
    assert loaded.events.equals(load_run(folder).events)
    assert loaded.ranks["path"].to_list() == [str(packed)] * 2
    assert set(loaded.report["path"]) == {str(packed)}
    assert sorted(reported(loaded, "not read")["reason"].str.head(10)) == ["notes.txt:", "rank2.json"]
    load_run(packed)
    assert sorted(reads) == ["rank0.json", "rank1.json.gz", "rank2.json", "rank2.json", "rank2.json"]


def test_an_archive_of_no_traces_names_the_archive(folder: Path, tmp_path: Path) -> None:
    (folder / "et.json").write_text('{"schema": "1.1.1", "pid": 1, "nodes": []}')
    with pytest.raises(
        RunError, match=r"run\.tgz holds no trace that can be read:\s+et\.json: \S+run\.tgz/inside/et\.json"
    ):
        load_run(archive(folder, tmp_path / "run.tgz"))


def test_an_archive_that_unpacks_to_too_much_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = write(folder / "rank0.json", "x").stat().st_size + write(folder / "rank1.json", "y").stat().st_size
    packed = archive(folder, tmp_path / "run.tar.gz")
    with tarfile.open(packed) as opened:
        size += tarfile.BLOCKSIZE * len(opened.getmembers())
    monkeypatch.setenv("LUMOS_NB_MAX_BYTES", str(size - 1))
    with pytest.raises(
        TraceError, match=rf"run\.tar\.gz \(.*unpacks to more than {size - 1:,} bytes.*LUMOS_NB_MAX_BYTES"
    ):
        load_run(packed)
    monkeypatch.setenv("LUMOS_NB_MAX_BYTES", str(size))
    assert len(load_run(packed).ranks) == 2


def test_a_damaged_archive_is_an_error(folder: Path, tmp_path: Path) -> None:
    write(folder / "rank0.json", *(f"op{i}" for i in range(2000)))
    packed = archive(folder, tmp_path / "run.tar.gz")
    packed.write_bytes(packed.read_bytes()[:-200])
    with pytest.raises(TraceError, match=r"run\.tar\.gz cannot be unpacked"):
        load_run(packed)


# --- what a person sees -----------------------------------------------------------------------------------------------


def test_a_run_shows_its_ranks_in_text_and_escaped_in_html(folder: Path) -> None:
    write(folder / "rank0.<b>.json", "x")
    write(folder / "rank1.json", "y", "z")
    loaded = load_run(folder)
    assert repr(loaded).startswith("Run of 2 ranks: 5 events, 2 dropped")
    assert "rank1.json" in repr(loaded)
    html = loaded._repr_html_()
    assert "rank0.&lt;b&gt;.json" in html
    assert "<b>" not in html


def test_a_run_of_a_trace_without_events_can_be_shown(folder: Path) -> None:
    (folder / "rank0.json").write_text('{"traceEvents": []}')
    loaded = load_run(folder)
    assert loaded.events.is_empty()
    assert "Run of 1 rank: 0 events" in repr(loaded)


# --- for other programs -----------------------------------------------------------------------------------------------


def test_a_run_goes_to_pandas_parquet_and_perfetto(folder: Path, tmp_path: Path) -> None:
    write(folder / "rank0.json", "x", rank=0)
    write(folder / "rank1.json", "y", "z", rank=1)
    loaded = load_run(folder)
    frame = loaded.to_pandas()
    assert frame["thread"].isna().tolist() == [False, True, False, False, True]
    assert frame["start_ns"].tolist() == loaded.events["start_ns"].to_list()
    written = loaded.to_parquet(tmp_path / "new" / "out")
    for name in ("events", "ranks", "report"):
        assert pl.read_parquet(written / f"{name}.parquet").equals(getattr(loaded, name))
    again = load_run(loaded.to_perfetto(tmp_path / "run.json.gz"))
    assert again.events.select("name", "start_ns", "dur_ns").equals(loaded.events.select("name", "start_ns", "dur_ns"))
    with pytest.raises(TraceError, match="cannot be written"):
        loaded.to_parquet(folder / "rank0.json")


def test_a_run_without_events_makes_no_picture(folder: Path, tmp_path: Path) -> None:
    (folder / "rank0.json").write_text('{"traceEvents": []}')
    with pytest.raises(TraceError, match="no event was recorded"):
        load_run(folder).to_perfetto(tmp_path / "run.json")


# --- real runs --------------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((path.as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("name", "ranks", "kept"),
    [
        ("torchrec/sst_long_a2a_optimizer_2", [0, 1, 2, 3], 27163),
        ("torchrec/resnet18", [0, 1], 8683),
        ("hta/cpu_only", [34], 15),
        ("hta/large_integer_trace", [70], 2),
        ("hta/execution_trace", [0], 55),
        ("param/dlrm_kineto.tar.gz", list(range(8)), 19781),
    ],
)
def test_real_folders(traces: Path, user_cache: Path, name: str, ranks: list[int], kept: int) -> None:
    before = snapshot(traces / name)
    loaded = load_run(traces / name)
    assert loaded.ranks["rank"].to_list() == ranks
    assert len(loaded.events) == loaded.ranks["kept"].sum() == kept
    dropped = loaded.report.filter(pl.col("what").str.starts_with("dropped"))["count"].sum()
    assert dropped == loaded.ranks["dropped"].sum() == loaded.ranks["events"].sum() - kept
    assert_same(load_run(traces / name), loaded)
    assert snapshot(traces / name) == before
    assert len(list(user_cache.iterdir())) == len(ranks)


@pytest.mark.parametrize("known", [True, False])
def test_a_file_that_a_list_names_twice_is_one_rank(folder: Path, known: bool) -> None:
    path = write(folder / "trace.json", "add", rank=0 if known else None)
    assert load_run([path, str(path)]).ranks["rank"].to_list() == [0]


@pytest.mark.parametrize("path", [5, None, b"runs", [None], [b"trace.json"], [["trace.json"]]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(InputError, match="path"):
        load_run(path)


def test_what_cannot_be_opened_in_a_folder_is_reported(folder: Path) -> None:
    write(folder / "rank0.json", "add", rank=0)
    (folder / "rank1.json").symlink_to("gone.json")
    os.mkfifo(folder / "rank2.json")
    found = load_run(folder)
    report = found.report.filter(pl.col("what") == "not read")
    assert report["path"].str.split("/").list.last().to_list() == ["rank1.json", "rank2.json"]
    with pytest.raises(RunError, match=r"rank2\.json is neither a folder nor a regular file"):
        load_run(folder / "rank2.json")


def test_names_that_are_no_utf8_are_refused_where_a_table_must_hold_them(folder: Path) -> None:
    write(folder / "rank0.json", "add", rank=0)
    (folder / os.fsdecode(b"notes-\xe9.txt")).write_text("")
    assert load_run(folder).report["path"].str.ends_with(r"notes-\xe9.txt").sum() == 1
    trace = write(folder / os.fsdecode(b"rank1-\xe9.json"), "add", rank=1)
    for path in (folder, trace, [trace]):
        with pytest.raises(RunError, match=r"rank1-\\xe9\.json: the name is no UTF-8"):
            load_run(path)


def test_the_cache_lies_where_brackets_and_stars_are_in_the_path(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "cache[1]*?"))
    folder = tmp_path / "run[2]*"
    folder.mkdir()
    write(folder / "rank0.json", "add", rank=0)
    first, second = load_run(folder), load_run(folder)
    assert (len(reads), second.report.rows()) == (1, first.report.rows())


def test_more_ranks_than_anyone_has_are_not_counted_one_by_one(folder: Path) -> None:
    write(folder / "rank1.json", "add", rank=1, world_size=2**31 - 1)
    [(count, reason)] = load_run(folder).report.filter(what="missing ranks").select("count", "reason").rows()
    assert count == 2**31 - 2
    assert reason.endswith("none of rank 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, ...")


@pytest.mark.parametrize("cut", [True, False])
def test_an_archive_is_not_shortened_by_damage(folder: Path, tmp_path: Path, cut: bool) -> None:
    for rank in range(2):
        write(folder / f"rank{rank}.json", "add", rank=rank)
    archive = tmp_path / "run.tar"
    with tarfile.open(archive, "w") as packed:
        packed.add(folder, "run")
    with tarfile.open(archive) as packed:
        second = packed.getmembers()[-1].offset
    content = bytearray(archive.read_bytes())
    content[second + 150] ^= 1  # of the checksum
    archive.write_bytes(content[:second] if cut else content)
    with pytest.raises(TraceError, match=f"at byte {second:,} stands neither a file nor the archive's end"):
        load_run(archive)


def test_an_archive_of_damaged_xz_is_an_error(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "run.tar"
    (folder / "rank0.json").write_bytes(os.urandom(100_000))
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(folder, "run")
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 255
    archive.write_bytes(content)
    with pytest.raises(TraceError, match=r"run\.tar cannot be unpacked"):
        load_run(archive)


def test_a_folder_called_tilde_is_no_home(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(write(folder / "rank0.json", "add", rank=0))
    monkeypatch.chdir(tmp_path)
    run.to_parquet("~/out")
    assert pl.read_parquet(tmp_path / "~" / "out" / "events.parquet").equals(run.events)
