"""SQLite exports of Nsight Systems: calls, device work, NVTX, ranks, steps, damage."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lumos_nb.critical_path import replay
from lumos_nb.errors import TraceError, UnsupportedFormat
from lumos_nb.graph import Recording, build_graph
from lumos_nb.ops import step_marks
from lumos_nb.traces.formats import read_trace
from lumos_nb.traces.nsys import CUPTI, read_nsys
from lumos_nb.traces.run import load_run
from lumos_nb.traces.trace import Trace

START_NS = 1_700_000_000_000_000_000
NAMES = ["gemm(float*)", "cudaLaunchKernel_v7000", "cudaMemcpyAsync_ptsz_v7000", "cuLaunchKernel", "registered"]
GEMM, LAUNCH, COPY, DRIVER, REGISTERED = range(len(NAMES))
SHORT = {"MEMCPY", "MEMSET", "RUNTIME", "GRAPH_TRACE", "SYNCHRONIZATION", "CUDA_EVENT"}
PUSH_POP, START_END, MARK, CATEGORY = 59, 60, 34, 33


def process(pid: int) -> int:
    return 1 << 48 | pid << 24


def export(path: Path, **tables: list[dict[str, Any]]) -> Path:
    """A database of these tables, with strings and the session's start; a list of no rows is a table not there."""
    session = [{"utcEpochNs": START_NS, "systemClockNs": 1000}]
    strings = [{"id": i, "value": name} for i, name in enumerate(NAMES)]
    connection = sqlite3.connect(path)
    for name, rows in ({"StringIds": strings, "TARGET_INFO_SESSION_START_TIME": session} | tables).items():
        if rows:
            columns = {c: "TEXT" if isinstance(v, str) else "INTEGER" for row in rows for c, v in row.items()}
            connection.execute(f"CREATE TABLE {name} ({', '.join(f'{c} {t}' for c, t in columns.items())})")
            marks = ", ".join("?" * len(columns))
            values = [[row.get(c) for c in columns] for row in rows]
            connection.executemany(f"INSERT INTO {name} VALUES ({marks})", values)
    connection.commit()
    connection.close()
    return path


def kernel(start: Any, end: Any, correlation: int, pid: int = 5, device: int = 0, **more: Any) -> dict[str, Any]:
    where = {"deviceId": device, "contextId": pid, "streamId": 7, "globalPid": process(pid)}
    row = {
        "start": start,
        "end": end,
        "correlationId": correlation,
        "demangledName": GEMM,
        "gridX": 4,
        "graphNodeId": None,
    }
    return row | where | more


def call(name: int, start: int, end: int, correlation: int, pid: int = 5, tid: int = 9) -> dict[str, Any]:
    return {
        "start": start,
        "end": end,
        "correlationId": correlation,
        "globalTid": process(pid) | tid,
        "nameId": name,
        "eventClass": 0,
    }


def said(
    text: str | None, start: int, end: int | None, kind: int = PUSH_POP, pid: int = 5, **more: Any
) -> dict[str, Any]:
    return {"start": start, "end": end, "eventType": kind, "text": text, "globalTid": process(pid) | 9} | more


def read(folder: Path, kernels: list[dict[str, Any]] | None = None, **tables: list[dict[str, Any]]) -> Trace:
    """An export of some kernels and other tables; CUPTI's tables without their long prefix."""
    named = {CUPTI + name if name in SHORT else name: rows for name, rows in tables.items()}
    return read_nsys(export(folder / "report.sqlite", **{CUPTI + "KERNEL": kernels or [], **named}))


def notes(trace: Trace) -> dict[str, int]:
    return dict(trace.notes.select("what", "count").rows())


# --- events -----------------------------------------------------------------------------------------------------------


def test_calls_and_work_are_as_kineto_has_them(tmp_path: Path) -> None:
    copy = {"start": 5000, "end": 6000, "correlationId": 12, "copyKind": 2, "srcKind": 2, "dstKind": 0, "bytes": 64}
    where = {"deviceId": 0, "contextId": 5, "streamId": 7, "globalPid": process(5)}
    trace = read(
        tmp_path,
        [kernel(3000, 4000, 11)],
        MEMCPY=[copy | where],
        MEMSET=[{"start": 6000, "end": 6500, "correlationId": 13, "memKind": 2} | where],
        RUNTIME=[call(LAUNCH, 2000, 2500, 11), call(COPY, 2500, 6100, 12), call(DRIVER, 6100, 6200, 13)],
    )
    columns = ("category", "name", "thread", "device", "stream", "start_ns", "dur_ns", "correlation")
    zero = START_NS - 1000  # the session started at 1000 of the clock that the times are of
    assert trace.events.select(columns).rows() == [
        ("kernel", "gemm(float*)", None, 0, 7, zero + 3000, 1000, 11),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", None, 0, 7, zero + 5000, 1000, 12),
        ("gpu_memset", "Memset (Device)", None, 0, 7, zero + 6000, 500, 13),
        ("cuda_runtime", "cudaLaunchKernel", 9, None, None, zero + 2000, 500, 11),
        ("cuda_runtime", "cudaMemcpyAsync", 9, None, None, zero + 2500, 3600, 12),
        ("cuda_driver", "cuLaunchKernel", 9, None, None, zero + 6100, 100, 13),
    ]
    assert trace.events["event_id"].to_list() == list(range(6)) == list(range(trace.metadata["event_count"]))
    assert json.loads(trace.events["args"][0]) == {"deviceId": 0, "contextId": 5, "streamId": 7, "gridX": 4}
    assert json.loads(trace.events["args"][1])["bytes"] == 64
    assert trace.notes.is_empty()


def test_a_graph_traced_as_a_whole_is_one_kernel(tmp_path: Path) -> None:
    row = {
        "start": 1,
        "end": 5,
        "deviceId": 1,
        "streamId": 7,
        "globalPid": process(5),
        "correlationId": 3,
        "graphId": 40,
    }
    trace = read(tmp_path, GRAPH_TRACE=[row])
    assert trace.events.select("category", "name", "device", "dur_ns").rows() == [("kernel", "CUDA graph 40", 1, 4)]


@pytest.mark.parametrize("tables", [{"NVTX_EVENTS": [said("a", 1, 2)]}, {"RUNTIME": [call(LAUNCH, 1, 2, 3)]}])
def test_tables_that_a_report_lacks_count_as_empty(tmp_path: Path, tables: dict[str, Any]) -> None:
    trace = read(tmp_path, StringIds=[], TARGET_INFO_SESSION_START_TIME=[], **tables)
    assert trace.events.select("rank", "start_ns", "dur_ns").rows() == [(0, 1, 1)]
    assert notes(trace) == {"times": 1}


def test_ranges_marks_and_operators(tmp_path: Path) -> None:
    operator = "aten::mm, seq = 12, op_id = 34, sizes = [[2, 3], []]"
    rows = [
        said("forward, layer 3", 1, 9),
        said(operator, 2, 5),
        said(None, 5, 6, textId=REGISTERED),
        said("here", 6, None, MARK),
        said("across threads", 6, 8, START_END),
        said("NCCL", 0, None, CATEGORY),
        said("not over", 8, None),
    ]
    trace = read(tmp_path, [kernel(1, 2, 3)], NVTX_EVENTS=rows)
    found = trace.events.filter(pl.col("category") != "kernel")
    assert found.select("category", "name", "dur_ns", "sequence").rows() == [
        ("user_annotation", "forward, layer 3", 8, None),
        ("cpu_op", "aten::mm", 3, 12),
        ("user_annotation", "registered", 1, None),
        ("cpu_instant_event", "here", 0, None),
        ("nvtx_range", "across threads", 2, None),
    ]
    assert json.loads(found["args"][1])["Input Dims"] == [[2, 3], []]
    assert json.loads(found["args"][1])["text"] == operator
    assert notes(trace) == {"dropped NVTX": 1, "dropped user_annotation": 1}
    assert trace.metadata["event_count"] == 8


def test_a_synchronisation_is_on_the_device_of_its_context_and_names_the_record(tmp_path: Path) -> None:
    def sync(kind: int, correlation: int, stream: int) -> dict[str, Any]:
        where = {"deviceId": 0, "contextId": 5, "streamId": stream, "globalPid": process(5), "start": 1, "end": 2}
        return where | {"correlationId": correlation, "syncType": kind, "eventId": 70}

    records = [
        {"eventId": 70, "correlationId": c, "streamId": s, "globalPid": process(p)}
        for c, s, p in [(4, 16, 5), (6, 17, 5), (9, 18, 5), (7, 19, 6)]
    ]
    waits = [sync(2, 8, 7), sync(4, 10, 2**32 - 1)]
    trace = read(tmp_path, [kernel(1, 2, 3, device=2)], SYNCHRONIZATION=waits, CUDA_EVENT=records)
    found = trace.events.filter(pl.col("category") == "cuda_sync")
    assert found.select("name", "device", "stream").rows() == [("Stream Wait Event", 2, 7), ("Context Sync", 2, -1)]
    args = json.loads(found["args"][0])
    assert (args["stream"], args["wait_on_stream"], args["wait_on_cuda_event_record_corr_id"]) == (7, 17, 6)


def test_rows_that_are_no_events_are_dropped_and_counted(tmp_path: Path) -> None:
    kernels = [kernel(1, 2, 3), kernel(9, 5, 4), kernel(None, 5, 5), kernel("soon", 6, 6), kernel(2**62, 2**62 + 1, 7)]
    trace = read(tmp_path, kernels)
    assert len(trace.events) == 1
    assert trace.notes.filter(what="dropped kernel").select("reason", "count").rows() == [
        ("a negative duration", 1),
        ("no time, or an absurd one", 3),
    ]


def test_tables_that_are_not_read_are_named_with_their_rows(tmp_path: Path) -> None:
    calls = [{"start": i, "end": i + 1} for i in range(3)]
    trace = read(tmp_path, [kernel(1, 2, 3)], OSRT_API=calls, ENUM_COLOURS=[{"id": 1}])
    assert notes(trace) == {"not read OSRT_API": 3}


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_every_process_that_uses_a_device_is_a_rank_by_its_device(tmp_path: Path) -> None:
    kernels = [kernel(1, 2, 3, pid=8, device=0), kernel(1, 2, 3, pid=5, device=1), kernel(2, 3, 4, pid=6, device=1)]
    calls = [call(LAUNCH, 0, 1, 3, pid) for pid in (5, 6, 7, 8)]
    names = [{"globalPid": process(pid), "pid": pid, "name": f"p{pid}"} for pid in (5, 7, 8)]
    trace = read(tmp_path, kernels, RUNTIME=calls, PROCESSES=names)
    pairs = trace.events.filter(category="kernel").select("rank", "device", "correlation").rows()
    assert pairs == [(0, 0, 3), (1, 1, 3), (2, 1, 4)]
    assert trace.events.filter(category="cuda_runtime")["rank"].to_list() == [1, 2, 0]
    assert trace.metadata["ranks"] == [0, 1, 2]
    assert trace.metadata["processes"] == [{"pid": 8, "name": "p8", "rank": 0}, {"pid": 5, "name": "p5", "rank": 1}]
    assert notes(trace) == {"dropped cuda_runtime": 1}


def test_one_process_has_the_rank_that_its_environment_says(tmp_path: Path) -> None:
    settings = [{"name": "ENV", "value": text} for text in ('RANK="3"', 'WORLD_SIZE="8"', 'LOCAL_RANK="1"')]
    trace = read(tmp_path, [kernel(1, 2, 3)], META_DATA_CAPTURE=settings)
    assert trace.metadata["distributedInfo"] == {"rank": 3, "world_size": 8}
    assert trace.events["rank"].to_list() == trace.metadata["ranks"] == [3]


# --- steps ------------------------------------------------------------------------------------------------------------


def steps_of(folder: Path, *ranges: tuple[str, int, int]) -> list[int]:
    trace = read(folder, [kernel(1, 2, 3)], NVTX_EVENTS=[said(*each) for each in ranges])
    assert len(trace.events) == len(ranges) + 1
    return step_marks(trace.events)["step"].to_list()


@pytest.mark.parametrize("name", ["iteration {}", "Iter_{}", "train_step={}", "step {}", "ProfilerStep#{}"])
def test_ranges_named_after_steps_mark_them(tmp_path: Path, name: str) -> None:
    assert steps_of(tmp_path, (name.format(4), 1, 5), (name.format(5), 5, 8), (name.format(7), 9, 12)) == [4, 5, 7]


@pytest.mark.parametrize(
    "ranges",
    [
        [("step 4", 1, 5), ("step 3", 5, 8)],
        [("step 4", 1, 6), ("step 5", 5, 8)],
        [("layer 4", 1, 5), ("layer 5", 5, 8)],
        [("optimizer step", 1, 5)],
    ],
    ids=["numbers fall", "ranges overlap", "not a step", "no number"],
)
def test_other_ranges_do_not(tmp_path: Path, ranges: list[tuple[str, int, int]]) -> None:
    assert steps_of(tmp_path, *ranges) == []


def test_iterations_are_steps_rather_than_what_they_hold(tmp_path: Path) -> None:
    assert steps_of(tmp_path, ("iteration 8", 1, 9), ("step 1", 2, 3), ("step 2", 3, 4), ("iteration 9", 9, 12)) == [
        8,
        9,
    ]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of several pages."""
    kernels = [kernel(10 * i, 10 * i + 5, i) for i in range(1, 600)]
    calls = [call(LAUNCH, 10 * i - 2, 10 * i - 1, i) for i in range(1, 600)]
    path = tmp_path_factory.mktemp("sound") / "report.sqlite"
    return export(path, **{CUPTI + "KERNEL": kernels, CUPTI + "RUNTIME": calls})


def test_a_compressed_export_is_the_same(sound: Path, tmp_path: Path) -> None:
    packed = tmp_path / "report.sqlite.gz"
    packed.write_bytes(gzip.compress(sound.read_bytes()))
    plain, unpacked = read_trace(sound), read_trace(packed)
    assert plain.events.equals(unpacked.events)
    assert plain.metadata == unpacked.metadata
    assert len(plain.events) == 1198


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("packed", [False, True])
def test_a_cut_export_is_an_error(sound: Path, tmp_path: Path, share: float, packed: bool) -> None:
    whole = gzip.compress(sound.read_bytes()) if packed else sound.read_bytes()
    path = tmp_path / "report.sqlite"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(TraceError, match=r"report\.sqlite"):
        read_trace(path)


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    path = export(tmp_path / "songs.sqlite", songs=[{"title": "la"}])
    with pytest.raises(UnsupportedFormat, match=r"without events of Nsight Systems \(its tables: StringIds"):
        read_trace(path)


def test_a_report_that_was_not_exported_is_refused_with_the_command(tmp_path: Path) -> None:
    path = tmp_path / "report.nsys-rep"
    path.write_bytes(b"QDSTRM")
    with pytest.raises(UnsupportedFormat, match="nsys export --type sqlite"):
        read_trace(path)


# --- real exports -----------------------------------------------------------------------------------------------------

REAL = [
    ("nsys/h100_2gpu_1s.sqlite.gz", [0, 1], 27190, 8),
    ("nsys/cloverleaf-nsys/perlmutter-cloverleaf-cuda.sqlite.gz", [0], 5951, 13),
]


@pytest.mark.parametrize(("name", "ranks", "events", "unread"), REAL)
def test_real_exports_are_read_as_sqlite_reads_them(
    traces: Path, tmp_path: Path, name: str, ranks: list[int], events: int, unread: int
) -> None:
    trace = read_trace(traces / name)
    assert trace.metadata["ranks"] == ranks == sorted(trace.events["rank"].unique())
    assert len(trace.events) == trace.metadata["event_count"] == events
    assert trace.notes["what"].str.starts_with("not read").sum() == trace.notes.height == unread
    path = tmp_path / "report.sqlite"
    path.write_bytes(gzip.decompress((traces / name).read_bytes()))
    connection = sqlite3.connect(path)
    query = (
        f"SELECT s.value, k.end - k.start, k.streamId FROM {CUPTI}KERNEL k JOIN StringIds s ON s.id = k.demangledName"
    )
    expected = sorted(connection.execute(query).fetchall())
    linked = f"SELECT count(*) FROM {CUPTI}KERNEL k JOIN {CUPTI}RUNTIME r ON k.correlationId = r.correlationId"
    [pairs] = connection.execute(f"{linked} AND k.globalPid >> 24 = r.globalTid >> 24").fetchone()
    connection.close()
    kernels = trace.events.filter(category="kernel")
    assert sorted(kernels.select("name", "dur_ns", "stream").rows()) == expected
    calls = trace.events.filter(category="cuda_runtime")
    assert kernels.join(calls, on=["rank", "correlation"]).height == pairs > 1000


@pytest.mark.parametrize(("name", "half"), [(REAL[0][0], 0.50), (REAL[1][0], 0.74)])
def test_real_exports_replay(traces: Path, name: str, half: float) -> None:
    """Kernels of half the length: the H100 was busy all the time; CloverLeaf waits for each of its kernels."""
    recording = Recording.of(load_run(traces / name, cache=False))
    [measured_ns] = recording.step_times()["step_ns"]
    graph = build_graph(recording)
    assert replay(graph).step_ns == pytest.approx(measured_ns, rel=1e-5)
    on_device = pl.col("kind").is_in(["kernel", "memcpy", "memset"])
    faster = graph.ops.with_columns(dur_ns=pl.when(on_device).then(pl.col("dur_ns") // 2).otherwise("dur_ns"))
    assert replay(type(graph)(faster, graph.edges, graph.step)).step_ns / measured_ns == pytest.approx(half, abs=0.01)


@pytest.mark.parametrize(("start", "end"), [(-(2**61), 2**63 - 1), (-(2**62), 2**62), (-(2**63), 2**63 - 1)])
def test_times_whose_difference_no_int64_holds_are_absurd(tmp_path: Path, start: int, end: int) -> None:
    trace = read(tmp_path, [kernel(start, end, 1), kernel(5, 7, 2)])
    assert trace.events["dur_ns"].to_list() == [2]
    assert notes(trace)["dropped kernel"] == 1


def test_values_that_nsys_does_not_write_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"report\.sqlite has values that nsys does not write: .*device"):
        read(tmp_path, [kernel(1, 2, 1, device=2**40)])


def test_metadata_of_the_export_is_not_taken_for_our_own(tmp_path: Path) -> None:
    trace = read(tmp_path, [kernel(1, 2, 1)], META_DATA_EXPORT=[{"name": "distributedInfo", "value": "x"}])
    assert trace.events["rank"].to_list() == [0]


def test_sql_of_any_shape_is_read(tmp_path: Path) -> None:
    """Columns that are computed, names with quotes, and a view of a table's name that never ends."""
    path = export(tmp_path / "report.sqlite", NVTX_EVENTS=[said("forward", 1, 2)])
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE TABLE {CUPTI}MEMSET (start INTEGER, end INTEGER, globalPid AS (5))")
        connection.execute('CREATE TABLE "odd""name" (x)')
        connection.execute("""INSERT INTO "odd""name" VALUES (1)""")
        endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS start FROM n"
        connection.execute(f"CREATE VIEW {CUPTI}KERNEL AS {endless}")
    connection.close()
    trace = read_nsys(path)
    assert trace.events["name"].to_list() == ["forward"]
    assert notes(trace)['not read odd"name'] == 1


def test_a_table_whose_name_is_no_text_is_left_out(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(";".join(sqlite3.connect(sound).iterdump()).replace("COMMIT;", ""))
        connection.execute("CREATE TABLE otherwise (x)")
    connection.close()
    header = b"\x17\x1f\x1f\x01"  # of its row in the list of tables: texts of 5, 9 and 9 bytes, a number
    assert header in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(header, b"\x17\x1e\x1f\x01"))  # the name as bytes
    assert len(read_nsys(path).events) == len(read_nsys(sound).events)
