"""PyTorch profiler (Kineto) traces, of every generation since 2021, and lists of Chrome's events: one event table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from lumos_nb.errors import TraceError, UnsupportedFormat, named
from lumos_nb.traces.exact import LATEST_NS, integer
from lumos_nb.traces.formats import KINETO, format_of
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.traces.json_text import is_bare, surrounding, top_level_keys
from lumos_nb.traces.kineto_events import EventTable
from lumos_nb.traces.odd_events import OddEvents
from lumos_nb.traces.scan import Scanner
from lumos_nb.traces.trace import NOTES, Trace

_SHOWN_BYTES = 1 << 20  # of a head that an error names the keys of


def read_kineto(path: str | Path) -> Trace:
    """Read one Kineto trace, plain or gzip (the file's first bytes decide).

    Times are exact: decimal microseconds become int64 ns without passing through float64. A file that ends early gives
    all its complete events and a note.

    Parameters
    ----------
    path
        A file that `torch.profiler` wrote, of any generation since 2021, or another list of Chrome's trace events,
        also one of beginnings and ends (B and E), which become whole events.

    Returns
    -------
    Trace
        Events (`rank` is the file's own, 0 if it names none), metadata and notes.

    Raises
    ------
    TraceError
        The file is empty, is no JSON, has no `traceEvents`, or unpacks to more than a GiB and 100 times its size
        (the environment variable `LUMOS_NB_MAX_BYTES` is the limit instead); `UnsupportedFormat` if another reader
        takes it.

    Examples
    --------
    >>> trace = read_kineto("runs/gpt/rank-0.json.gz")
    >>> "cpu_op" in trace.events["category"]
    True
    """
    path = named(path, TraceError)
    if (name := format_of(path)) != KINETO:
        raise UnsupportedFormat(f"{path} is of the format {name}; read_trace takes it.")
    blocks, odd = Blocks(path), OddEvents()
    scanner = Scanner(iter(blocks), odd.read)
    table = EventTable(scanner.strings)
    for batch in scanner:
        table.add(batch)
    metadata, complete = surrounding(scanner.head, scanner.tail)
    if not scanner.found:
        raise _no_events(path, scanner, blocks, complete)
    if is_bare(scanner.head) and table.without_phase == scanner.events:
        raise UnsupportedFormat(
            f"{path} is a list of {scanner.events:,} objects, none of which is an event (has a ph)."
        )
    notes = [*_damage(scanner, blocks, complete)]
    if again := metadata.pop("traceEvents", None):
        notes.append(("not read", len(again), "a second traceEvents after the first"))
    base_ns = integer(metadata.get("baseTimeNanoseconds", 0))
    if base_ns is None or abs(base_ns) >= LATEST_NS:
        notes.append(("times", 1, f"baseTimeNanoseconds is {metadata['baseTimeNanoseconds']!r}: taken as 0"))
        base_ns = 0
    events = table.frame(base_ns, rank_of(metadata) or 0, odd.counts)
    told = {key: value for key, value in metadata.items() if key not in ("ranks", "ranks_counted")}  # of other readers
    metadata = told | odd.names() | {"event_count": scanner.events}
    return Trace(events, metadata, pl.DataFrame(notes + table.notes, schema=NOTES, orient="row"))


def _no_events(path: Path, scanner: Scanner, blocks: Blocks, complete: bool) -> TraceError:
    keys = ", ".join(top_level_keys(scanner.head[:_SHOWN_BYTES])[:8])
    if complete:
        return UnsupportedFormat(f"{path} is JSON without a list of traceEvents (its keys: {keys}): no profiler trace.")
    why = blocks.damage or f"its text stops being JSON within {len(scanner.head):,} bytes"
    return TraceError(f"{path} ends before its traceEvents ({why}; keys so far: {keys}): no event can be read from it.")


def _damage(scanner: Scanner, blocks: Blocks, complete: bool) -> Iterator[tuple[str, int, str]]:
    """What the file lacks at its end, and what its text has that JSON has not."""
    if not scanner.closed or blocks.damage or not complete:
        why = f"the text ends too early, {scanner.rest:,} bytes after a complete event"
        why = blocks.damage or (f"{len(scanner.tail):,} bytes after the events are no JSON" if scanner.closed else why)
        lost = "" if complete else "; keys after the events are lost, perhaps the base of the times"
        yield "truncated", 1, f"{why}; {scanner.events:,} events are complete{lost}"
    if scanner.head_broken:
        yield "broken head", 1, f"the {len(scanner.head):,} bytes before the events are no JSON: their keys are lost"
    if scanner.junk:
        yield "not an event", scanner.junk, "text between events that is no JSON object"
    if scanner.replaced:
        yield "not UTF-8", scanner.replaced, "characters replaced by U+FFFD"


def rank_of(metadata: dict[str, Any]) -> int | None:
    """The rank that a trace says it is of (`distributedInfo.rank`), None if it names none."""
    return _distributed(metadata, "rank")


def world_size_of(metadata: dict[str, Any]) -> int | None:
    """The number of ranks that a trace says its run had (`distributedInfo.world_size`), None if it does not say."""
    return _distributed(metadata, "world_size")


def _distributed(metadata: dict[str, Any], key: str) -> int | None:
    info = metadata.get("distributedInfo")
    value = integer(info.get(key)) if isinstance(info, dict) else None
    return value if value is not None and 0 <= value < 2**31 else None
