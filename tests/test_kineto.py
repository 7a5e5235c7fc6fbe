"""Kineto files to the event table: exact times, every generation, nothing lost unseen."""

from __future__ import annotations

import gzip
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.errors import TraceError, UnsupportedFormat
from lumos_nb.schema import EVENTS
from lumos_nb.traces import json_stream, scan
from lumos_nb.traces.exact import nanoseconds
from lumos_nb.traces.kineto import read_kineto
from lumos_nb.traces.trace import Trace
from tests.kineto_notes import accounted_for, noted
from tests.reference_kineto import object_spans


def op(name: str = "aten::mm", ts: Any = 10, dur: Any = 5, **more: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 100, "tid": 101, "ts": ts, "dur": dur, "args": {}}
    return event | more


def kernel(correlation: int, ts: Any = 20, dur: Any = 3, stream: int = 7, **more: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": stream, "correlation": correlation}
    return op("gemm", ts, dur, cat="kernel", pid=0, tid=stream, args=args) | more


def text_of(events: list[dict[str, Any]], **metadata: Any) -> bytes:
    return json.dumps({"schemaVersion": 1, "traceEvents": events, **metadata}, indent=1).encode()


def read(folder: Path, content: bytes | list[dict[str, Any]], **metadata: Any) -> Trace:
    path = folder / "trace.json"
    path.write_bytes(content if isinstance(content, bytes) else text_of(content, **metadata))
    return read_kineto(path)


# --- exact times ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1698957661240677", 1698957661240677_000),
        ("1712195495519689.123", 1712195495519689_123),
        ("1712195495519689.1", 1712195495519689_100),
        ("1712195495519689.12", 1712195495519689_120),
        ("0.001", 1),
        ("0.0005", 1),
        ("0.00049999999", 0),
        ("94.83699999999999", 94837),
        ("5.9999", 6000),
        ("1.5e6", 1_500_000_000),
        ("1.712195495519689123E+15", 1712195495519689_123),
        ("12.5e-1", 1250),
        ("-3.5", -3500),
        ("-0.25", -250),
        ('"17.5"', 17500),
        ("0", 0),
        ("", None),
        ("null", None),
        ('"soon"', None),
        ("1e400", None),
        ("9999999999999999", None),
        ("99999999999999999999999", None),
    ],
)
def test_decimal_microseconds_become_exact_ns(text: str, ns: int | None) -> None:
    assert nanoseconds(text.encode()) == ns


def test_float64_would_be_wrong_where_the_text_is_exact() -> None:
    text = "1712195495519689.123"
    assert int(float(text) * 1000) - nanoseconds(text.encode()) == -163


@settings(deadline=None)
@given(st.lists(st.decimals(min_value=0, max_value=Decimal("4e15"), places=3), min_size=1, max_size=20))
def test_any_time_stamp_with_three_decimals_is_exact(stamps: list[Decimal]) -> None:
    assert [nanoseconds(f"{s:f}".encode()) for s in stamps] == [int(s * 1000) for s in stamps]


@pytest.mark.parametrize("position", ["before the events", "after the events"])
def test_the_base_is_added_wherever_the_file_has_it(tmp_path: Path, position: str) -> None:
    base = 1711964646_000_000_000
    trace = {"traceEvents": [op(ts=4203669604595.407, dur=340.024)], "baseTimeNanoseconds": base}
    if position == "before the events":
        trace = dict(reversed(trace.items()))
    kineto = read(tmp_path, json.dumps(trace).encode())
    assert kineto.events.select("start_ns", "dur_ns").row(0) == (base + 4203669604595_407, 340_024)


def test_a_base_that_is_no_number_is_reported(tmp_path: Path) -> None:
    kineto = read(tmp_path, [op(ts=1)], baseTimeNanoseconds="yesterday")
    assert kineto.events["start_ns"][0] == 1000
    assert noted(kineto, "times") == 1


# --- generations ------------------------------------------------------------------------------------------------------


def test_2021_categories_string_threads_and_lower_case_ids(tmp_path: Path) -> None:
    ids = {"correlation": 311, "external id": 31}
    kineto = read(
        tmp_path,
        [
            op("aten::to", cat="Operator", tid="101", args={"Device": 100, "External id": 31}),
            op("cudaMemcpyAsync", cat="Runtime", tid="101", args={"cbid": 41, **ids}),
            op("Memcpy HtoD", cat="Memcpy", pid=0, tid="stream 7", args={"device": 0, "stream": 7, **ids}),
            op("Memset", cat="Memset", pid=1, tid="stream 8", args={}),
            op("gemm", cat="Kernel", pid=0, tid="stream 7", args={"device": 0, "stream": 7, **ids}),
            {"ph": "i", "s": "t", "name": "[memory]", "pid": 100, "tid": 101, "ts": 3, "args": {"Bytes": 4}},
        ],
    )
    assert kineto.events["category"].to_list() == [
        "cpu_op",
        "cuda_runtime",
        "gpu_memcpy",
        "gpu_memset",
        "kernel",
        "cpu_instant_event",
    ]
    assert kineto.events["thread"].to_list() == [101, 101, None, None, None, 101]
    assert kineto.events["device"].to_list() == [None, None, 0, 1, 0, None]
    assert kineto.events["stream"].to_list() == [None, None, 7, 8, 7, None]
    assert kineto.events["external_id"].to_list() == [31, 31, 31, None, 31, None]
    assert kineto.events["correlation"].to_list() == [None, 311, 311, None, 311, None]


def test_rocm_streams_in_hexadecimal_and_an_annotation_without_arguments(tmp_path: Path) -> None:
    kineto = read(
        tmp_path,
        [
            op("hipMemcpyWithStream", cat="cuda_runtime", args={"stream": "0x0", "correlation": 117, "kind": "1"}),
            op("Cijk", cat="kernel", pid=2, tid=0, args={"device": 2, "stream": 0, "correlation": 117}),
            op("Optimizer.step", cat="gpu_user_annotation", pid=2, tid=0, args={"External id": 35}),
        ],
    )
    assert kineto.events.select("device", "stream").rows() == [(None, None), (2, 0), (2, 0)]
    assert kineto.events["correlation"].to_list() == [117, 117, None]


def test_a_synchronisation_with_the_whole_device_has_stream_minus_one(tmp_path: Path) -> None:
    old = op("Context Sync", cat="cuda_sync", pid=0, tid=-1, args={"stream": 4294967295, "device": 0})
    new = op("Context Sync", cat="cuda_sync", pid=0, tid=-1, args={"stream": -1, "device": 0})
    assert read(tmp_path, [old, new]).events["stream"].to_list() == [-1, -1]


def test_sequence_numbers_are_kept_and_minus_one_is_none(tmp_path: Path) -> None:
    events = [op(args={"Sequence number": n}) for n in (5, -1)]
    assert read(tmp_path, events).events["sequence"].to_list() == [5, None]


def test_integers_beyond_int64_stay_in_the_arguments(tmp_path: Path) -> None:
    comms, correlation = 10159970886766084423, 2**70
    kineto = read(tmp_path, [op(args={"Comms Id": comms, "correlation": correlation})])
    assert kineto.events["correlation"][0] is None
    assert json.loads(kineto.events["args"][0]) == {"Comms Id": comms, "correlation": correlation}


def test_arguments_are_kept_as_written_without_line_breaks(tmp_path: Path) -> None:
    event = (
        '{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1,"dur":1,\n"args": {"x":\n 1.50, "y": "a\\nb  c"}}'
    )
    kineto = read(tmp_path, b'{"traceEvents": [' + event.encode() + b"]}")
    assert kineto.events["args"][0] == '{"x":1.50,"y":"a\\nb  c"}'


def test_a_thread_that_is_no_number_gets_one_id_in_every_file(tmp_path: Path) -> None:
    first = read(tmp_path, [op(tid="worker"), op(tid=7)])
    second = read(tmp_path, [op(tid="other"), op(tid="worker")])
    assert first.events["thread"][0] == second.events["thread"][1] < 0
    assert first.events["thread"][1] == 7
    assert noted(first, "thread id") == 1


def test_metadata_holds_every_other_key_and_the_names(tmp_path: Path) -> None:
    info = {"backend": "nccl", "rank": 3, "world_size": 8, "pg_config": [{"ranks": [0, 1]}]}
    names = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "ts": 0, "args": {"name": "stream 7"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": 7, "ts": 0, "args": {"sort_index": 7}},
    ]
    kineto = read(tmp_path, [kernel(1), *names], distributedInfo=info, traceName="a,b}")
    assert kineto.events["rank"].to_list() == [3]
    assert kineto.metadata == {
        "schemaVersion": 1,
        "distributedInfo": info,
        "traceName": "a,b}",
        "processes": [{"pid": 0, "name": "python", "labels": "GPU 0"}],
        "threads": [{"pid": 0, "tid": 7, "name": "stream 7"}],
        "event_count": 5,
    }


# --- what is dropped, and that it is counted --------------------------------------------------------------------------


def test_dropped_events_are_counted_by_phase_and_category(tmp_path: Path) -> None:
    dropped = [
        op(ph="s", cat="ac2g", id=1),
        op(ph="f", cat="ac2g", id=1),
        op(ph="f", cat="fwdbwd", id=1),
        op(ph="M"),
        op(ph="C"),
        op(ph="?"),
        op("PyTorch Profiler (0)", cat="Trace", pid="Spans", tid="PyTorch Profiler"),
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 5},
        op("unfinished", dur=None),
        op("backwards", dur=-1),
        op("timeless", ts=None),
    ]
    del dropped[-3]["dur"]
    kineto = read(tmp_path, [op(), *dropped, kernel(1)])
    assert kineto.events["event_id"].to_list() == [0, len(dropped) + 1]
    notes = {what: (count, reason) for what, count, reason in kineto.notes.rows()}
    assert notes["dropped f ac2g"][0] == notes["dropped s ac2g"][0] == notes["dropped f fwdbwd"][0] == 1
    assert "profiler's own" in notes["dropped X Trace"][1]
    assert noted(kineto, "dropped X cpu_op") == 3
    assert noted(kineto, "dropped ? cpu_op") == 1
    assert accounted_for(kineto) == kineto.metadata["event_count"] == len(dropped) + 2
    assert noted(kineto, "thread id") == 0


def test_a_trace_without_events_is_an_empty_table(tmp_path: Path) -> None:
    kineto = read(tmp_path, [])
    assert kineto.events.schema == EVENTS.empty().schema
    assert kineto.notes.is_empty()


def test_an_event_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    bad = '{"ph": "X", "name": ["no", "name"], "ts": 1}, {"ph": X}, 17'
    text = text_of([op("a"), op("BAD"), op("b")]).decode()
    start, stop = object_spans(text.encode()[(begin := text.index("[") + 1) :])[0][1]
    kineto = read(tmp_path, (text[: begin + start] + bad + text[begin + stop :]).encode())
    assert kineto.events["name"].to_list() == ["a", "b"]
    assert noted(kineto, "dropped unreadable") == noted(kineto, "unreadable") == 2
    assert noted(kineto, "not an event") == 1
    assert accounted_for(kineto) == 4
    assert f"byte {begin + start:,}" in kineto.notes.filter(pl.col("what") == "unreadable")["reason"][0]


def test_arguments_that_nest_too_deep_cost_only_their_event(tmp_path: Path) -> None:
    text = text_of([op("a"), op("deep", args={"x": "HERE"}), op("b")])
    kineto = read(tmp_path, text.replace(b'"HERE"', b"[" * 50_000 + b"]" * 50_000))
    assert kineto.events["name"].to_list() == ["a", "b"]
    assert noted(kineto, "unreadable") == 1


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        (b'"name": "a\nb"', "a\nb"),
        (b'"name": "a\\ud83d"', "a?"),
        (b'"name": "a", "x": -inf', "a"),
        (b'"name": "nan", "x": [NaN, Infinity]', "nan"),
        (b'"name": "a\xff\xfe"', "a\ufffd\ufffd"),
    ],
    ids=["line break in a string", "half a surrogate pair", "infinity", "not a number", "bad UTF-8"],
)
def test_text_that_is_not_quite_json_is_mended_and_reported(tmp_path: Path, written: bytes, read_as: str) -> None:
    text = text_of([op("before"), op("THIS"), kernel(4)]).replace(b'"name": "THIS"', written)
    kineto = read(tmp_path, text)
    assert kineto.events["name"].to_list() == ["before", read_as, "gemm"]
    assert noted(kineto, "mended") + (noted(kineto, "not UTF-8") == 2) == 1


def test_arguments_of_an_odd_type_leave_the_event(tmp_path: Path) -> None:
    kineto = read(tmp_path, [op(args=[1, 2]), op(args={"correlation": {}}), kernel(9)])
    assert kineto.events["correlation"].to_list() == [None, None, 9]
    assert kineto.events["args"].to_list()[:2] == ["[1,2]", '{"correlation":{}}']
    assert noted(kineto, "odd arguments") == 2


def test_device_work_that_names_no_device_is_reported(tmp_path: Path) -> None:
    assert noted(read(tmp_path, [op(cat="kernel", pid="GPU", tid="x")]), "no device") == 1


# --- cutting the text into batches, and files that end too early ------------------------------------------------------

NASTY = [
    op('}, {"ph": "X"', args={"nested": [{"a": {}}, {"b": [{}, {}]}], "text": "]}, {"}),
    op('quote " and \\', args={"path": "C:\\", "end": '\\"'}),
    op("é ∑ 漢", args={}),
    kernel(1, ts=1712195.123),
    op("]", args={"long": "x" * 90}),
    op("last", tid=3),
]


@pytest.mark.parametrize("block_bytes", [64, scan.BLOCK_BYTES])
def test_bad_utf8_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    text = text_of([op(f"op {i} é ?") for i in range(10)], host="?").replace(b"?", b"\xff")
    monkeypatch.setattr(scan, "BLOCK_BYTES", block_bytes)
    kineto = read(tmp_path, text)
    assert kineto.events["name"].to_list() == [f"op {i} é \ufffd" for i in range(10)]
    assert noted(kineto, "not UTF-8") == 10


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_blocks_of_any_size_give_the_same_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, packed: bool
) -> None:
    text = json.dumps(
        {"a": [{"traceEvents": []}], "traceEvents": NASTY, "z": [{}, {"rank": 1}]}, indent=indent
    ).encode()
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text, mtime=0) if packed else text)
    whole = read_kineto(path)
    assert whole.events["name"].to_list() == [event["name"] for event in NASTY]
    assert whole.metadata["z"] == [{}, {"rank": 1}]
    for size in [*range(1, 60), 200, 500]:
        monkeypatch.setattr(scan, "BLOCK_BYTES", size)
        monkeypatch.setattr(json_stream, "READ_BYTES", max(size, len(json_stream.GZIP_MAGIC)))
        monkeypatch.setattr(json_stream, "INFLATE_BYTES", size)
        blocks = read_kineto(path)
        assert blocks.events.equals(whole.events), size
        assert blocks.metadata == whole.metadata
        assert blocks.notes.is_empty()


def test_a_file_cut_at_any_byte_gives_its_complete_events_and_a_note(tmp_path: Path) -> None:
    text = json.dumps({"schemaVersion": 1, "traceEvents": NASTY, "baseTimeNanoseconds": 7, "traceName": "x"}).encode()
    begin = text.index(b"[") + 1
    ends = [begin + stop for _, stop in object_spans(text[begin:])[0]]
    assert len(ends) == len(NASTY)
    path = tmp_path / "trace.json"
    for cut in sorted({*range(1, len(text), 5), *ends, *(end - 1 for end in ends), len(text) - 1}):
        path.write_bytes(text[:cut])
        if cut < begin:
            with pytest.raises(TraceError, match=r"trace\.json"):
                read_kineto(path)
            continue
        kineto = read_kineto(path)
        assert len(kineto.events) == sum(end <= cut for end in ends)
        assert noted(kineto, "truncated") == 1
    path.write_bytes(text)
    assert read_kineto(path).notes.is_empty()


def test_keys_after_the_events_survive_a_cut_behind_them(tmp_path: Path) -> None:
    text = text_of([op(ts=1)], baseTimeNanoseconds=7, deviceProperties=[{"name": "A, B}"}], traceName="x")
    kineto = read(tmp_path, text[: text.index(b'"traceName"') + 14])
    assert kineto.events["start_ns"][0] == 1007
    assert kineto.metadata["deviceProperties"] == [{"name": "A, B}"}]
    assert "keys after the events are lost" in kineto.notes.filter(pl.col("what") == "truncated")["reason"][0]


def test_gzip_data_cut_anywhere_gives_a_prefix_of_the_events(tmp_path: Path) -> None:
    noise = random.Random(5)
    events = [op(f"{noise.getrandbits(128):x}", ts=noise.randrange(10**9)) for _ in range(400)]
    packed = gzip.compress(text_of(events), mtime=0)
    path = tmp_path / "trace.json.gz"
    lengths = []
    for cut in range(len(packed) // 20, len(packed), len(packed) // 20):
        path.write_bytes(packed[:cut])
        kineto = read_kineto(path)
        names = kineto.events["name"].to_list()
        assert names == [event["name"] for event in events[: len(names)]]
        assert "ends in the middle" in kineto.notes.filter(pl.col("what") == "truncated")["reason"][0]
        lengths.append(len(names))
    assert lengths == sorted(lengths)
    assert lengths[-1] > 350


def test_gzip_data_with_a_flipped_byte_is_reported(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(text := text_of([op(str(i)) for i in range(2000)])))
    packed[-6] ^= 0xFF  # the checksum
    kineto = read(tmp_path, bytes(packed))
    at_least = 1 - json_stream.INFLATE_BYTES / len(text)
    assert at_least * 2000 - 1 <= len(kineto.events) <= 2000
    assert "damaged" in kineto.notes.filter(pl.col("what") == "truncated")["reason"][0]
    with pytest.raises(TraceError, match="cannot be unpacked: the gzip data is damaged"):
        read(tmp_path, bytes([*gzip.compress(text_of([op()]))[:-6], 1, 2, 3, 4, 5, 6]))


def test_gzip_members_and_padding_are_one_file(tmp_path: Path) -> None:
    text = text_of([op("a"), op("b")])
    packed = gzip.compress(text[:90], mtime=0) + gzip.compress(text[90:]) + bytes(512)
    kineto = read(tmp_path, packed)
    assert kineto.events["name"].to_list() == ["a", "b"]
    assert kineto.notes.is_empty()


def test_a_second_list_of_events_is_reported(tmp_path: Path) -> None:
    text = text_of([op("a")])[:-1] + b', "traceEvents": [{}, {}]}'
    assert noted(read(tmp_path, text), "not read") == 2


# --- what is no Kineto trace ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"", TraceError, "empty"),
        (b" \n ", TraceError, "empty"),
        (gzip.compress(b"", mtime=0), TraceError, "empty"),
        (b"step,time\n1,2\n", TraceError, "byte 0"),
        (b'{"ranks": 4, "tp": 2}', UnsupportedFormat, "ranks, tp"),
        (b'{"traceEvents": null}', UnsupportedFormat, "no profiler trace"),
        (b'{"schemaVersion": 1, "devicePro', TraceError, "ends before its traceEvents"),
        (b'{"schema": "1.1.1", "pid": 4, "nodes": [', UnsupportedFormat, "ln.load_execution_trace"),
        (b"SQLite format 3\0....", UnsupportedFormat, "format nsys"),
        (gzip.compress(b"SQLite format 3\0....", mtime=0), UnsupportedFormat, "format nsys"),
        (b"PAR1....", UnsupportedFormat, "format timeline"),
        (b"PK\x03\x04....", UnsupportedFormat, "unpack"),
        (b"\x07\n\x050.0.4\x12", UnsupportedFormat, "ln.chakra"),
    ],
)
def test_other_files_are_named_with_what_takes_them(
    tmp_path: Path, content: bytes, error: type[TraceError], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        read(tmp_path, content)
    assert type(caught.value) is error
    assert "trace.json" in str(caught.value)


def test_a_folder_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="load_run"):
        read_kineto(tmp_path)
