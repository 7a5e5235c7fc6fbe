"""The compiled scanner and the reader by msgspec and Python objects read the same of every file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_kineto_files import CHROME_FILES, KINETO_FILES

from lumos_nb.errors import UnsupportedFormat
from lumos_nb.traces import scan
from lumos_nb.traces._json_kernels import MAX_DEPTH
from lumos_nb.traces.kineto import read_kineto
from lumos_nb.traces.trace import Trace
from tests.kineto_notes import noted
from tests.reference_kineto import read_reference

DEEPER_THAN_KERNELS_READ = MAX_DEPTH + 40


def assert_same(read: Trace, reference: Trace) -> None:
    assert sorted(read.notes.rows()) == sorted(reference.notes.rows())
    assert read.metadata == reference.metadata
    assert read.events.schema == reference.events.schema
    for column in reference.events.columns:
        assert read.events[column].equals(reference.events[column], null_equal=True), column


@pytest.mark.parametrize("name", [*KINETO_FILES, *CHROME_FILES])
def test_every_real_trace_is_read_as_the_reference_reads_it(traces: Path, name: str) -> None:
    assert_same(read_kineto(traces / name), read_reference(traces / name))


# --- made-up events ---------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["aten::mm", "X", "ph", 'say "this"', "a\\b", "\n", "}, {", "🙂", "é", "stream 7", "12", "0x1f", "Spans", ""]
)
INTEGERS = st.integers(-(2**66), 2**66) | st.integers(-1, 9) | st.sampled_from([2**63 - 1, 2**63, -(2**63), 2**32 - 1])
NUMBERS = INTEGERS | st.floats(allow_nan=False, allow_infinity=False, width=32) | st.floats(-1e16, 1e16)
IDS = INTEGERS | st.sampled_from(
    [1.0, 7.5, -0.0, None, True, [], {}, "stream 7", "7", "x", "Spans", "CPU functions", ""]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ID_KEYS = ["device", "stream", "correlation", "External id", "external id", "Sequence number"]
ARGS = st.dictionaries(st.sampled_from(ID_KEYS), IDS, max_size=4) | st.dictionaries(TEXT, VALUES, max_size=3) | VALUES
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from("XXXXiIBEMsfC?") | TEXT.filter(bool)},
    optional={
        "cat": TEXT | st.sampled_from(["kernel", "Kernel", "cpu_op", "hip_runtime"]) | VALUES,
        "name": TEXT | st.sampled_from(["process_name", "thread_name"]) | VALUES,
        "pid": IDS,
        "tid": IDS,
        "ts": NUMBERS | VALUES,
        "dur": NUMBERS | VALUES,
        "args": ARGS,
        "attr": ARGS,
        "id": VALUES,
        "s": TEXT,
    },
)


def written(value: Any, noise: random.Random) -> str:
    """`value` as JSON of one of many forms: space, escapes, order and repetition of keys."""
    space = noise.choice(["", "", " ", "\n  ", "\t\r\n "])
    match value:
        case dict():
            items = list(value.items())
            noise.shuffle(items)
            items += items[: noise.random() < 0.1]
            inner = f",{space}".join(f"{written(k, noise)}{space}:{space}{written(v, noise)}" for k, v in items)
            return f"{{{space}{inner}{space}}}"
        case list():
            return f"[{space}{f'{space},'.join(written(v, noise) for v in value)}{space}]"
        case str():
            text = json.dumps(value, ensure_ascii=noise.random() < 0.5)
            if value and noise.random() < 0.1 and value.isascii() and value.isalnum():
                text = f'"\\u{ord(value[0]):04x}{value[1:]}"'
            return text
        case float() if noise.random() < 0.3:
            return f"{value:.{noise.randrange(12)}{noise.choice('feE')}}"
        case int() if not isinstance(value, bool) and noise.random() < 0.1:
            return f"{value}.{noise.randrange(10**5)}" if noise.random() < 0.5 else f"{value}e{noise.randrange(3)}"
    return json.dumps(value)


def texts(events: list[Any], noise: random.Random) -> Iterator[str]:
    listed = written(events, noise)
    yield listed
    yield f'{{"baseTimeNanoseconds":7, "traceEvents" : {listed} , "z": [{{}}]}}'


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENTS, max_size=8), st.integers(0, 2**32), st.sampled_from([7, 64, 1 << 20]))
def test_made_up_events_are_read_as_the_reference_reads_them(
    tmp_path: Path, events: list[Any], seed: int, block_bytes: int
) -> None:
    path = tmp_path / "trace.json"
    for text in texts(events, random.Random(seed)):
        path.write_text(text, encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scan, "BLOCK_BYTES", block_bytes)
            reference = read_reference(path)
            if text.startswith("[") and not events:
                with pytest.raises(UnsupportedFormat, match="none of which is an event"):
                    read_kineto(path)
            else:
                assert_same(read_kineto(path), reference)


def test_more_strings_and_rows_than_there_is_room_for_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        {"ph": "X", "name": f"op {i} {'x' * (i % 90)}", "cat": "cpu_op", "pid": 1, "tid": f"thread {i % 7}", "ts": i}
        | {"dur": 1, "args": {"correlation": i, "text": "y" * (i % 1000)}}
        for i in range(20_000)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    monkeypatch.setattr(scan, "BATCH_ROWS", 700)
    monkeypatch.setattr(scan, "BLOCK_BYTES", 1 << 12)
    assert_same(read_kineto(path), read_reference(path))


# --- one kind of oddness each -----------------------------------------------------------------------------------------


def event(**more: Any) -> str:
    return json.dumps({"ph": "X", "cat": "cpu_op", "name": "op", "pid": 1, "tid": 2, "ts": 5, "dur": 1} | more)


def half(phase: str, ts: int, **more: Any) -> str:
    return json.dumps({"ph": phase, "cat": "cpu_op", "name": "", "pid": 1, "tid": 2, "ts": ts} | more)


def read(folder: Path, *events: str) -> Trace:
    """The events as both read them, or a failure."""
    path = folder / "trace.json"
    path.write_text(f'{{"traceEvents": [{", ".join(events)}]}}')
    kineto = read_kineto(path)
    assert_same(kineto, read_reference(path))
    return kineto


def test_a_broken_event_ends_with_its_brace_however_deep_its_brackets(tmp_path: Path) -> None:
    lists = "[" * DEEPER_THAN_KERNELS_READ + "]" * DEEPER_THAN_KERNELS_READ
    broken = event(name="broken", args={"x": "HERE"}).replace('"HERE"', f"[NaN, {lists}]")
    kineto = read(tmp_path, event(name="before"), broken, event(name="behind"))
    assert kineto.events["name"].to_list() == ["before", "broken", "behind"]
    assert noted(kineto, "mended") == 1


@pytest.mark.parametrize("block_bytes", [1 << 10, 1 << 20], ids=["in many blocks", "in one block"])
def test_long_arguments_that_look_like_events_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(scan, "BLOCK_BYTES", block_bytes)
    frames = [{"name": f"forward {i}", "ts": i} for i in range(2_000)]
    odd = event(name="odd", pid=1.0, args={"frames": frames})
    kineto = read(tmp_path, event(name="before"), odd, event(name="behind"))
    assert kineto.events["name"].to_list() == ["before", "odd", "behind"]
    assert kineto.notes.is_empty()


def test_halves_whose_name_is_written_in_two_ways_are_one_event(tmp_path: Path) -> None:
    begin, end = half("B", ts=5, name="step/1"), half("E", ts=8, name="step/1").replace("/", r"\/")
    kineto = read(tmp_path, begin, half("B", ts=6, name="inner"), end)
    assert kineto.events.select("name", "dur_ns").rows() == [("step/1", 3000)]


def test_a_category_written_in_several_ways_is_counted_as_one(tmp_path: Path) -> None:
    ways = ["cpu_op", "CPU_OP", r"cpu\u005fop"]
    kineto = read(tmp_path, event(), *[event(cat="HERE", dur=-1).replace("HERE", way) for way in ways])
    assert kineto.notes.select("what", "count").rows() == [("dropped X cpu_op", 3)]


@pytest.mark.parametrize("pid", ["worker", "-20", None], ids=["a name", "a number as text", "none"])
def test_halves_are_joined_within_their_process_alone(tmp_path: Path, pid: str | None) -> None:
    others = [half("E", ts=7, pid=-other) for other in range(40)]
    kineto = read(tmp_path, half("B", ts=5, pid=pid), *others, half("E", ts=9, pid=pid))
    assert kineto.events["dur_ns"].to_list() == [4000]
    assert noted(kineto, "dropped E") == len(others) + 1


def test_a_process_may_be_written_as_a_float(tmp_path: Path) -> None:
    kineto = read(tmp_path, half("B", ts=5, pid=1.0), half("E", ts=7, pid="1"), half("E", ts=9, pid=1))
    assert kineto.events["dur_ns"].to_list() == [4000]
