"""Damaged traces, one kind of damage each: a named repair in the notes, or an error that names the file.

`tests.soak` damages the files of every reader at random.
"""

from __future__ import annotations

import contextlib
import gzip
import time
from pathlib import Path

import pytest

from lumos_nb.errors import TraceError, UnsupportedFormat
from lumos_nb.traces import json_stream
from lumos_nb.traces.kineto import read_kineto
from lumos_nb.traces.trace import Trace as KinetoTrace
from tests.kineto_notes import accounted_for, noted

MOST_S = 20

EVENT = '{{"ph": "X", "cat": "cpu_op", "name": {name}, "pid": 1, "tid": 2, "ts": {ts}, "dur": {dur}, "args": {{}}}}'


def event(name: str = '"op"', ts: object = 5, dur: object = 1) -> str:
    return EVENT.format(name=name, ts=ts, dur=dur)


def read(folder: Path, text: str | bytes) -> KinetoTrace:
    path = folder / "trace.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    kineto = read_kineto(path)
    assert accounted_for(kineto) == kineto.metadata["event_count"]
    return kineto


def traced(*events: str, after: str = ', "baseTimeNanoseconds": 1000') -> str:
    return f'{{"traceEvents": [{", ".join(events)}]{after}}}'


@pytest.mark.parametrize(
    "name",
    ['"a "b" c"', '"a "b', '"a"b"', '"a", {"b"', '"a }, b"c"', "nothing", '"a\\"', '"a" "b": 1, "c"'],
)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_unescaped_quotes_cost_their_event_alone(tmp_path: Path, name: str, place: int) -> None:
    events = [event(f'"op {i}"') for i in range(4)]
    events[place] = event(name)
    kineto = read(tmp_path, traced(*events))
    assert kineto.events["name"].to_list() == [f"op {i}" for i in range(4) if i != place]
    assert noted(kineto, "dropped unreadable") == noted(kineto, "unreadable") == 1
    at = traced(*events).index(name) - EVENT.replace("{{", "{").index("{name}")
    assert f"byte {at:,}:" in kineto.notes.filter(kineto.notes["what"] == "unreadable")["reason"][0]
    assert kineto.events["start_ns"][0] == 6000  # the base behind the events is read
    assert noted(kineto, "truncated") == 0


@pytest.mark.parametrize(
    ("between", "count"),
    [("17,", 1), ('"text", null,', 2), ("[1, {}], ", 1), ("} ,", 1), ("] ,", 1), ('x: "', 1), (",", 1), ("\0", 1)],
)
def test_what_is_no_event_between_events_is_counted(tmp_path: Path, between: str, count: int) -> None:
    kineto = read(tmp_path, traced(event('"a"'), between + event('"b"'), event('"c"')))
    assert kineto.events["name"].to_list() == ["a", "b", "c"]
    assert noted(kineto, "not an event") == count


def test_events_without_commas_are_read_and_counted(tmp_path: Path) -> None:
    kineto = read(tmp_path, traced(f"{event()} {event()}\n{event()}"))
    assert len(kineto.events) == 3
    assert noted(kineto, "not an event") == 2


def test_a_bare_list_may_lack_its_end(tmp_path: Path) -> None:
    for ending in ("", ",", ",\n", "]", ",]", "\n]\n"):
        kineto = read(tmp_path, f"[{event()},\n{event()}{ending}")
        assert len(kineto.events) == 2
        assert noted(kineto, "truncated") == ("]" not in ending)
    assert len(read(tmp_path, f"[{event()},\n{event()[:-9]}").events) == 1
    with pytest.raises(UnsupportedFormat, match="list of 2 objects, none of which is an event"):
        read(tmp_path, '[{"a": 1}, {}]')


def test_a_broken_head_loses_its_keys_alone(tmp_path: Path) -> None:
    text = '{"schemaVersion": 1", "distributedInfo": {"rank": 3}, ' + traced(event())[1:]
    kineto = read(tmp_path, text)
    assert len(kineto.events) == noted(kineto, "broken head") == 1


def test_text_behind_the_events_that_is_no_json_is_said(tmp_path: Path) -> None:
    kineto = read(tmp_path, traced(event(), after=', "baseTimeNanoseconds": 1000, "x": oops'))
    assert kineto.events["start_ns"][0] == 6000
    assert "no JSON" in kineto.notes.filter(kineto.notes["what"] == "truncated")["reason"][0]


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ({"ts": 0}, "a time stamp of 0"),
        ({"ts": 5e15}, "no time stamp"),
        ({"ts": "1e15"}, "weeks from those of the other events"),
        ({"ts": -7}, "weeks from those of the other events"),
        ({"dur": -2147483648}, "a negative duration"),
        ({"dur": "18446744073709551.615"}, "no duration that is a number"),
        ({"dur": 2e12}, "a duration of weeks"),
        ({"dur": "NaN"}, "no duration that is a number"),
    ],
)
def test_times_that_cannot_be_are_dropped_and_counted(tmp_path: Path, of: dict[str, object], reason: str) -> None:
    usual = [event(ts=1698957661240677 + i) for i in range(5)]
    kineto = read(tmp_path, traced(*usual, event(**({"ts": 1698957661240677} | of))))
    assert len(kineto.events) == 5
    [(what, count, why)] = kineto.notes.filter(kineto.notes["what"].str.starts_with("dropped")).rows()
    assert (what, count) == ("dropped X cpu_op", 1)
    assert reason in why


def test_times_from_zero_on_are_no_error(tmp_path: Path) -> None:
    assert len(read(tmp_path, traced(event(ts=0), event(ts=0, dur=0), event(ts=86_400_000_000))).events) == 3


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_text_of_another_encoding_is_refused_with_what_to_do(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(TraceError, match="UTF-16 or UTF-32 text: convert it to UTF-8"):
        read(tmp_path, traced(event()).encode(encoding))


def test_latin_1_is_read_but_for_what_it_does_not_share_with_utf8(tmp_path: Path) -> None:
    kineto = read(tmp_path, traced(event('"a"'), event('"é ü"')).encode("latin-1"))
    assert kineto.events["name"].to_list() == ["a", "\ufffd \ufffd"]
    assert noted(kineto, "not UTF-8") == 2


def test_a_limit_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LUMOS_NB_MAX_BYTES", "1e9")
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}'))
    with pytest.raises(TraceError, match="'1e9': it takes a number of bytes"):
        read_kineto(path)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = traced(event(), after=" " * 400_000).encode()
    packed = gzip.compress(text, mtime=0)
    assert len(text) > 100 * len(packed)
    assert len(read(tmp_path, packed).events) == 1  # it is less than a GiB
    monkeypatch.setattr(json_stream, "MAX_BYTES", 100_000)
    with pytest.raises(TraceError, match=r"trace\.json \(.* unpacks to more than 1.*LUMOS_NB_MAX_BYTES"):
        read(tmp_path, packed)
    monkeypatch.setenv(json_stream.MAX_BYTES_ENV, str(len(text)))
    assert len(read(tmp_path, packed).events) == 1
    monkeypatch.setenv(json_stream.MAX_BYTES_ENV, str(len(text) - 1))
    with pytest.raises(TraceError, match="unpacks to more than"):
        read(tmp_path, packed)


@pytest.mark.parametrize("name", ['"a "b"', '"a" NaN', "NaN", '"a\nb"', '"\\ud800"'])
def test_much_damage_takes_time_in_proportion(tmp_path: Path, name: str) -> None:
    """Twenty thousand broken events, of 4 MB with those between: none is looked for through the whole text."""
    begun = time.process_time()
    kineto = read(tmp_path, traced(*[event(name), event()] * 20_000))
    assert time.process_time() - begun < MOST_S
    assert kineto.metadata["event_count"] == 40_000
    assert len(kineto.events) >= 20_000


@pytest.mark.parametrize(
    "text",
    [
        b'{"traceEvents": [' + b"{" * 2_000_000,
        b"[" * 2_000_000,
        b"[" + b'{"a":[' * 500_000,
        b'[{"ph":"' + b"x" * 9_000_000,
        b"[{}" + b" " * 9_000_000 + b"x" + b" ," * 3_000_000,
        b"[" + b'"' * 3_000_001,
        b"[{" + b'},{"ph":' * 50_000,
    ],
)
def test_text_that_never_becomes_an_event_takes_no_time(tmp_path: Path, text: bytes) -> None:
    begun = time.process_time()
    (tmp_path / "trace.json").write_bytes(text)
    with contextlib.suppress(TraceError):
        read_kineto(tmp_path / "trace.json")
    assert time.process_time() - begun < MOST_S
