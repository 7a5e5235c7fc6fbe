"""PyTorch profiler (Kineto) traces, of every generation since 2021, to the one event table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from lumos_nb.errors import TraceError, UnsupportedFormat
from lumos_nb.traces.exact import integer
from lumos_nb.traces.formats import format_of
from lumos_nb.traces.json_stream import Blocks, EventStream
from lumos_nb.traces.json_text import surrounding, top_level_keys
from lumos_nb.traces.kineto_events import Event, EventTable, decode_compact
from lumos_nb.traces.trace import NOTES, Trace


def read_kineto(path: str | Path) -> Trace:
    """Read one Kineto trace, plain or gzip (the file's first bytes decide).

    Times are exact: decimal microseconds become int64 ns without passing through float64. A file that ends early gives
    all its complete events and a note.

    Parameters
    ----------
    path
        A file that `torch.profiler` wrote, of any generation since 2021.

    Returns
    -------
    Trace
        Events (`rank` is the file's own, 0 if it names none), metadata and notes.

    Raises
    ------
    TraceError
        The file is empty, is no JSON, or has no `traceEvents`; `UnsupportedFormat` if another reader takes it.

    Examples
    --------
    >>> read_kineto("rank-0.pt.trace.json.gz").events.group_by("category").len()  # doctest: +SKIP
    """
    path = Path(path)
    format_of(path)
    blocks = Blocks(path)
    table = EventTable()
    stream = EventStream(iter(blocks), decode_compact, table.rescue)
    for batch in stream:
        table.add(batch)
    metadata, complete = surrounding(stream.head, stream.tail)
    if not stream.found:
        raise _no_events(path, stream, blocks, complete)
    table.note_damage(stream, blocks, complete)
    if again := metadata.pop("traceEvents", None):
        table.notes.append(("not read", len(again), "a second traceEvents after the first"))
    events = table.frame(base_ns=table.base_ns(metadata), rank=rank_of(metadata) or 0)
    metadata |= table.names() | {"event_count": table.count}
    return Trace(events, metadata, pl.DataFrame(table.notes, schema=NOTES, orient="row"))


def _no_events(path: Path, stream: EventStream[Event], blocks: Blocks, complete: bool) -> TraceError:
    keys = ", ".join(top_level_keys(stream.head)[:8])
    if complete:
        return UnsupportedFormat(f"{path} is JSON without a list of traceEvents (its keys: {keys}): no profiler trace.")
    why = blocks.damage or f"its text stops being JSON within {len(stream.head):,} bytes"
    return TraceError(f"{path} ends before its traceEvents ({why}; keys so far: {keys}): no event can be read from it.")


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
