"""The reader of Kineto files by msgspec and Python objects: the reference that `read_kineto` must agree with.

It decodes batches of whole events to objects and makes columns of these. On sound files, and on events that are not
quite JSON, it gives the same table, notes and metadata as the compiled scanner, several times more slowly. It does not
find its way behind an unescaped quote.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal, DecimalException
from hashlib import blake2b
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import polars as pl

from lumos_nb.errors import UNDECODABLE
from lumos_nb.schema import EVENTS
from lumos_nb.traces.exact import LATEST_NS, integer, strings
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.traces.json_text import find_events, mend, surrounding
from lumos_nb.traces.kineto import rank_of
from lumos_nb.traces.kineto_events import CATEGORIES, DEVICE_CATEGORIES, DROPPED_PHASES, LONGEST_NS, like_cuda
from lumos_nb.traces.trace import NOTES, Trace

T = TypeVar("T")

BLOCK_BYTES = 4 << 20
KEPT_PHASES = frozenset(("X", "i", "I", "B", "E"))
PSEUDO_PROCESSES = frozenset(("", "Spans", "Traces"))
UNREADABLE = "unreadable"

_NAMES = ("process_name", "process_labels", "thread_name")
_NO_STREAM = 2**32 - 1
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_BETWEEN_WINDOW_BYTES = 1 << 16
_SPACE = b" \t\r\n"


def read_reference(path: Path) -> Trace:
    blocks = Blocks(path)
    table = EventTable()
    stream = EventStream(iter(blocks), decode_compact, table.rescue)
    for batch in stream:
        table.add(batch)
    metadata, complete = surrounding(stream.head, stream.tail)
    assert stream.found
    table.note_damage(stream, blocks, complete)
    if again := metadata.pop("traceEvents", None):
        table.notes.append(("not read", len(again), "a second traceEvents after the first"))
    events = table.frame(base_ns=table.base_ns(metadata), rank=rank_of(metadata) or 0)
    metadata |= table.names() | {"event_count": table.count}
    return Trace(events, metadata, pl.DataFrame(table.notes, schema=NOTES, orient="row"))


# --- numbers and strings ----------------------------------------------------------------------------------------------


def integers(values: list[Any]) -> pl.Series:
    """Each value as an int64, null where it is none; see `integer`."""
    try:
        return pl.Series(values, dtype=pl.Int64)
    except (TypeError, OverflowError):
        return pl.Series([integer(v) for v in values], dtype=pl.Int64)


def nanoseconds(texts: list[bytes | msgspec.Raw]) -> pl.Series:
    """Decimal microseconds, as JSON writes them, to int64 ns; null where the text is no number in range.

    Exact to the last digit that a ns can show; further digits round half up.

    Examples
    --------
    >>> nanoseconds([b"1712195495519689.123", b"1.5e6", b""]).to_list()
    [1712195495519689123, 1500000000, None]
    """
    text = pl.col("text")
    parts = text.str.split_exact(".", 1).struct
    whole = parts.field("field_0").cast(pl.Int64, strict=False)
    digits = parts.field("field_1").fill_null("").str.pad_end(4, "0")
    thousandths = digits.str.head(3).cast(pl.Int64, strict=False) + (digits.str.slice(3, 1) >= "5")
    plain = text.str.contains(r"^\d{1,16}(\.\d+)?$") & (whole < LATEST_NS // 1000)
    frame = strings(texts).to_frame("text").select("text", ns=pl.when(plain).then(whole * 1000 + thousandths))
    if not frame["ns"].null_count():
        return frame["ns"]
    return pl.Series([_decimal_ns(t) if ns is None else ns for t, ns in frame.rows()], dtype=pl.Int64)


def _decimal_ns(text: str) -> int | None:
    """One time stamp in an unusual notation: a sign, an exponent, quotes."""
    try:
        ns = Decimal(text.strip('"')) * 1000
        return int(ns.to_integral_value(ROUND_HALF_UP)) if abs(ns) < LATEST_NS else None
    except DecimalException:
        return None


_OPEN = ord("{")
_CLOSE = ord("}")


def object_spans(text: bytes) -> tuple[list[tuple[int, int]], int | None]:
    """Spans of the complete objects of an array's text, and the offset of the array's closing bracket if it is there.

    `text` starts inside the array, between two of its objects. Brackets in strings do not count: quotes that an odd
    number of backslashes precede are part of a string, the others alternate between opening and closing one.
    """
    codes = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(codes == ord('"'))
    if b"\\" in text:
        slashes = np.flatnonzero(codes == ord("\\"))
        starts = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
        within = np.arange(len(slashes)) - np.repeat(starts, np.diff(starts, append=len(slashes)))
        escaped = np.zeros(len(codes) + 1, np.bool_)
        escaped[slashes[within % 2 == 0] + 1] = True
        quotes = quotes[~escaped[quotes]]
    folded = codes | 0x20  # [ and { differ by this bit alone, and so do ] and }
    brackets = np.flatnonzero((folded == _OPEN) | (folded == _CLOSE))
    brackets = brackets[np.searchsorted(quotes, brackets) % 2 == 0]
    depth = np.cumsum(np.where(folded[brackets] == _OPEN, 1, -1))
    end = None
    if len(closed := np.flatnonzero(depth < 0)):
        end = int(brackets[closed[0]])
        brackets, depth = brackets[: closed[0]], depth[: closed[0]]
    opens = brackets[(depth == 1) & (codes[brackets] == _OPEN)]
    stops = brackets[(depth == 0) & (codes[brackets] == _CLOSE)] + 1
    return list(zip(opens.tolist(), stops.tolist(), strict=False)), end  # the last may be open


@dataclass(slots=True)
class EventStream(Generic[T]):
    """The objects of a file's `traceEvents` array in batches, and the text around that array.

    A batch is cut where the text has `}, {`, and the decoder itself proves the cut: a prefix of the array, closed by
    a bracket, is valid JSON only if it was cut between two events, never inside a string or a nested object. Where it
    does not decode (a doubtful cut, the array's end, a broken event), `object_spans` finds the events one by one.

    Parameters
    ----------
    blocks
        The text of the file.
    decode
        Decodes the text of an array of events, or raises one of `UNDECODABLE`.
    rescue
        Decodes one event, given its text and byte offset, whatever it takes.

    Attributes
    ----------
    head, tail
        Text before and after the events: up to and including `[`, and from `]` on.
    found, closed
        Whether the start of the array was found, and its end.
    offset
        Bytes of text taken so far, from the start of the file to the end of the last batch.
    rest
        Bytes of an event that is not complete.
    junk, replaced
        Pieces of text between events that are no object; bytes that are not UTF-8, replaced by U+FFFD.
    """

    blocks: Iterator[bytes]
    decode: Callable[[bytes], list[T]]
    rescue: Callable[[bytes, int], T]
    head: bytes = field(default=b"", init=False)
    tail: bytes = field(default=b"", init=False)
    found: bool = field(default=False, init=False)
    closed: bool = field(default=False, init=False)
    offset: int = field(default=0, init=False)
    rest: int = field(default=0, init=False)
    junk: int = field(default=0, init=False)
    replaced: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[list[T]]:
        buffer = self._skip_head()
        if not self.found:
            return
        wanted = BLOCK_BYTES
        for block in self.blocks:
            if self.closed:
                self.tail += block
                continue
            buffer += block
            if len(buffer) < wanted:
                continue
            batch, buffer = self._take(buffer)
            # No event ends in the buffer: look again when it is twice as long.
            wanted = BLOCK_BYTES if batch else 2 * len(buffer)
            yield batch
        if not self.closed:
            batch, buffer = self._take_singly(buffer)
            self.rest = len(buffer.strip(_SPACE + b","))
            yield batch

    def _skip_head(self) -> bytes:
        """Read up to the start of the events; return what was read beyond it."""
        buffer, wanted = b"", 0
        for block in itertools.chain(self.blocks, [b""]):
            buffer += block
            if block and len(buffer) < wanted:
                continue
            if start := find_events(buffer):
                self.head, self.offset, self.found = buffer[:start], start, True
                return buffer[start:]
            wanted = 2 * len(buffer)
        self.head = buffer
        return b""

    def _take(self, buffer: bytes) -> tuple[list[T], bytes]:
        """The whole events of `buffer` and the text that is left."""
        cut = _last_cut(buffer)
        text = buffer[:cut]
        if cut and _is_utf8(text):
            try:
                return self.decode(b"[" + text + b"]"), self._after(buffer, cut)
            except UNDECODABLE:
                return self._take_singly(buffer)
        return self._take_singly(buffer)

    def _take_singly(self, buffer: bytes) -> tuple[list[T], bytes]:
        """Like `_take`, for text that may hold the end of the array or events with errors."""
        spans, end = object_spans(buffer)
        texts = [self._utf8(buffer[start:stop]) for start, stop in spans]
        self.junk += sum(buffer[a:b].strip(_SPACE) != b"," for (_, a), (b, _) in itertools.pairwise(spans))
        try:
            batch = self.decode(b"[" + b",".join(texts) + b"]")
        except UNDECODABLE:
            batch = [self.rescue(text, self.offset + start) for text, (start, _) in zip(texts, spans, strict=True)]
        if end is not None:
            self.closed, self.tail = True, buffer[end:]
            return batch, b""
        return batch, self._after(buffer, spans[-1][1] if spans else 0)

    def _after(self, buffer: bytes, cut: int) -> bytes:
        """What follows the event that ends at `cut`, and its comma."""
        rest = buffer[cut:].lstrip(_SPACE + b",")
        self.offset += len(buffer) - len(rest)
        return rest

    def _utf8(self, text: bytes) -> bytes:
        if _is_utf8(text):
            return text
        mended = text.decode(errors="replace").encode()
        self.replaced += mended.count(b"\xef\xbf\xbd") - text.count(b"\xef\xbf\xbd")
        return mended


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _last_cut(buffer: bytes) -> int:
    """Where the last `}` that a comma and a `{` follow ends, 0 if there is none near the end."""
    cuts = [match.start() + 1 for match in _BETWEEN.finditer(buffer, max(0, len(buffer) - _BETWEEN_WINDOW_BYTES))]
    return cuts[-1] if cuts else 0


class Event(msgspec.Struct, gc=False):
    """One record of `traceEvents`; numbers stay text where floats would lose digits."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    args: msgspec.Raw = msgspec.Raw()
    attr: msgspec.Raw = msgspec.Raw()


class Args(
    msgspec.Struct,
    gc=False,
    rename={"external_id": "External id", "external_id_2021": "external id", "sequence": "Sequence number"},
):
    """The arguments that have columns of their own."""

    device: int | str | float | None = None
    stream: int | str | float | None = None
    correlation: int | str | float | None = None
    external_id: int | str | float | None = None
    external_id_2021: int | str | float | None = None
    sequence: int | str | float | None = None


_decode_events = msgspec.json.Decoder(list[Event]).decode
_decode_event = msgspec.json.Decoder(Event).decode
_decode_args = msgspec.json.Decoder(list[Args]).decode
_decode_one_args = msgspec.json.Decoder(Args).decode


def decode_compact(text: bytes) -> list[Event]:
    """Decode an array of events after removing the whitespace between tokens, so that arguments are one line each."""
    return _decode_events(msgspec.json.format(text, indent=-1))


@dataclass(slots=True)
class EventTable:
    """Batches of events on their way to one table."""

    frames: list[pl.DataFrame] = field(default_factory=list)
    notes: list[tuple[str, int, str]] = field(default_factory=list)
    count: int = 0
    _dropped: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    _names: dict[tuple[Any, Any, Any], msgspec.Raw] = field(default_factory=dict)
    _threads: dict[str, int] = field(default_factory=dict)
    _odd: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, batch: list[Event]) -> None:
        """Take the next events of the file."""
        first, self.count = self.count, self.count + len(batch)
        keep = [event.ph in KEPT_PHASES and event.pid not in PSEUDO_PROCESSES for event in batch]
        ids = list(compress(range(first, self.count), keep))
        if len(ids) < len(batch):
            rest = list(compress(batch, map(not_, keep)))
            self._dropped.update([(event.ph, event.cat) for event in rest])
            self._keep_names(rest)
            batch = list(compress(batch, keep))
        if batch:
            self.frames.append(self._columns(batch, ids))

    def rescue(self, text: bytes, offset: int) -> Event:
        """Decode one event that is not quite JSON, or stand in for one that cannot be read."""
        try:
            return _decode_event(msgspec.json.format(text, indent=-1))
        except UNDECODABLE as error:
            reason = f"{error}: {text[:80]!r}"
        try:
            event = _decode_event(msgspec.json.format(mend(text), indent=-1))
        except UNDECODABLE:
            self._count("unreadable", f"the event at byte {offset:,}: {reason}")
            return Event(ph=UNREADABLE)
        self._count("mended", f"the event at byte {offset:,}: {reason}")
        return event

    def _count(self, what: str, reason: str, count: int = 1) -> None:
        """Count something odd; the first reason stands for all."""
        before, first = self._odd.get(what, (0, reason))
        self._odd[what] = (before + count, first)

    def note_damage(self, stream: EventStream[Event], blocks: Blocks, complete: bool) -> None:
        """Say what the file lacks at its end, and what its text has that JSON has not."""
        if not stream.closed or blocks.damage or not complete:
            why = blocks.damage or f"the text ends too early, {stream.rest:,} bytes after a complete event"
            lost = "" if complete else "; keys after the events are lost, perhaps the base of the times"
            self.notes.append(("truncated", 1, f"{why}; {self.count:,} events are complete{lost}"))
        if stream.junk:
            self.notes.append(("not an event", stream.junk, "text between events that is no JSON object"))
        if stream.replaced:
            self.notes.append(("not UTF-8", stream.replaced, "characters replaced by U+FFFD"))

    def base_ns(self, metadata: dict[str, Any]) -> int:
        """What the file's times count from, in ns since 1970."""
        base = integer(metadata.get("baseTimeNanoseconds", 0))
        if base is not None and abs(base) < LATEST_NS:
            return base
        self.notes.append(("times", 1, f"baseTimeNanoseconds is {metadata['baseTimeNanoseconds']!r}: taken as 0"))
        return 0

    def _keep_names(self, events: list[Event]) -> None:
        for event in events:
            key = (event.name, event.pid, event.tid)
            if event.ph == "M" and event.name in _NAMES and key not in self._names:
                self._names[key] = event.args.copy()  # the raw text alone would hold on to the whole batch

    def _columns(self, batch: list[Event], ids: list[int]) -> pl.DataFrame:
        texts = [bytes(event.args) or bytes(event.attr) or b"{}" for event in batch]
        args = self._decode_args(texts)
        external = [a.external_id if a.external_id is not None else a.external_id_2021 for a in args]
        return pl.DataFrame(
            {
                "event_id": pl.Series(ids, dtype=pl.Int64),
                "ph": pl.Series([event.ph for event in batch], dtype=pl.String),
                "category": pl.Series([event.cat for event in batch], dtype=pl.String),
                "name": pl.Series([event.name for event in batch], dtype=pl.String),
                "pid": integers([event.pid for event in batch]),
                "process": pl.Series([_process(event.pid) for event in batch], dtype=pl.String),
                "tid": self._thread_ids([event.tid for event in batch]),
                "start_ns": nanoseconds([event.ts for event in batch]),
                "dur_ns": nanoseconds([event.dur if event.ph == "X" else b"0" for event in batch]),
                "device_arg": integers([a.device for a in args]),
                "stream_arg": integers([a.stream for a in args]),
                "correlation": integers([a.correlation for a in args]),
                "external_id": integers(external),
                "sequence": integers([a.sequence for a in args]),
                "args": strings(texts),
            }
        )

    def _decode_args(self, texts: list[bytes]) -> list[Args]:
        try:
            return _decode_args(b"[" + b",".join(texts) + b"]")
        except UNDECODABLE:
            return self._decode_args_singly(texts)

    def _decode_args_singly(self, texts: list[bytes]) -> list[Args]:
        args, odd = [], 0
        for text in texts:
            try:
                args.append(_decode_one_args(text))
            except UNDECODABLE:
                args.append(Args())
                odd += 1
        self._count("odd arguments", "args of a type that no event has: kept as text, ids in them are not read", odd)
        return args

    def _thread_ids(self, tids: list[Any]) -> pl.Series:
        """Thread ids as integers; text that is no number gets a negative id that depends on the text alone."""
        known = integers(tids)
        if not known.null_count():
            return known
        ids = known.to_list()
        for i, tid in enumerate(tids):
            if ids[i] is None and tid is not None:
                ids[i] = -1 - int.from_bytes(blake2b(str(tid).encode(), digest_size=7).digest())
                self._threads[str(tid)] = ids[i]
        return pl.Series(ids, dtype=pl.Int64)

    def names(self) -> dict[str, list[dict[str, Any]]]:
        """Names of processes and threads: `processes` (pid, name, labels) and `threads` (pid, tid, name)."""
        processes: dict[Any, dict[str, Any]] = {}
        threads: list[dict[str, Any]] = []
        for (key, pid, tid), raw in self._names.items():
            try:
                value = msgspec.json.decode(raw, type=dict[str, Any])
            except UNDECODABLE:
                continue
            if key == "thread_name":
                threads.append({"pid": pid, "tid": tid, "name": value.get("name")})
            else:
                processes.setdefault(pid, {"pid": pid}).update(value)
        return {"processes": list(processes.values()), "threads": threads}

    def frame(self, base_ns: int, rank: int) -> pl.DataFrame:
        """All events as `schema.EVENTS`; those dropped are counted in `notes`."""
        for (phase, category), count in sorted(self._dropped.items(), key=str):
            reason = DROPPED_PHASES.get(phase, "a phase that no trace of Kineto has")
            self.notes.append((f"dropped {phase or 'no phase'} {category or ''}".strip(), count, reason))
        for text, thread in self._threads.items():
            self.notes.append(("thread id", 1, f"tid {text!r} is no number; it became {thread}"))
        self.notes += [(what, count, f"first: {reason}") for what, (count, reason) in self._odd.items()]
        if not self.frames:
            return EVENTS.empty()
        events = _joined(_classify(pl.concat(self.frames)))
        self.frames.clear()
        events = _near(events)
        dropped = events.filter(pl.col("reason").is_not_null())
        for phase, category, reason, count in dropped.group_by("ph", "category", "reason").len().sort(pl.all()).rows():
            self.notes.append((f"dropped {phase} {category}", count, reason))
        kept = events.filter(pl.col("reason").is_null())
        if nowhere := kept.filter(pl.col("category").is_in(DEVICE_CATEGORIES) & pl.col("device").is_null()).height:
            self.notes.append(("no device", nowhere, "device work whose pid and args name no device"))
        return like_cuda(
            kept.select(
                rank=pl.lit(rank, pl.Int32),
                start_ns=pl.col("start_ns") + base_ns,
                **{c: pl.col(c) for c in EVENTS.columns if c not in ("rank", "start_ns")},
            )
        )


def _process(pid: Any) -> str:
    """A text that tells apart what pids tell apart: 1.0 is 1, "1" is not, and none is a process of its own."""
    return repr(int(pid) if isinstance(pid, float) and pid.is_integer() else pid)


def _classify(events: pl.DataFrame) -> pl.DataFrame:
    """One vocabulary of categories, thread or device and stream, and `reason`: why a row is dropped, else null."""
    lower = pl.col("category").str.to_lowercase()
    functions = pl.when(pl.col("process") == "'CPU functions'").then(pl.lit("cpu_op")).otherwise(pl.lit("unknown"))
    default = pl.when(pl.col("ph").is_in(["i", "I"])).then(pl.lit("cpu_instant_event")).otherwise(functions)
    category = pl.coalesce(lower.replace(CATEGORIES), default)
    events = events.with_columns(category=category, name=pl.col("name").fill_null(""))
    on_device = pl.col("category").is_in(DEVICE_CATEGORIES)
    stream = pl.coalesce("stream_arg", "tid").replace(_NO_STREAM, -1)
    device = pl.coalesce("device_arg", "pid").cast(pl.Int32, strict=False)
    return events.with_columns(
        thread=pl.when(~on_device).then("tid"),
        device=pl.when(on_device).then(device),
        stream=pl.when(on_device).then(stream),
        sequence=pl.when(pl.col("sequence") >= 0).then("sequence"),
        reason=pl.when(pl.col("start_ns").is_null())
        .then(pl.lit("no time stamp, or one that is no number of microseconds"))
        .when(pl.col("dur_ns").is_null())
        .then(pl.lit("no duration that is a number: the event did not end while the profiler ran"))
        .when(pl.col("dur_ns") < 0)
        .then(pl.lit("a negative duration")),
    )


def _near(events: pl.DataFrame) -> pl.DataFrame:
    """Say of events why they are dropped whose times are weeks from the others', or that last as long."""
    halves = pl.col("reason").str.contains("pair").fill_null(value=False)
    times = sorted(events.filter(~halves)["start_ns"].drop_nulls().to_list())
    given = [time for time in times if time]
    if not given or times[-1] - times[0] <= LONGEST_NS:
        near = pl.lit(value=True)
    else:
        near = (pl.col("start_ns") - given[len(given) // 2]).abs() <= LONGEST_NS
    late = (
        pl.when(~near)
        .then(pl.lit("a time stamp of 0, or weeks from those of the other events"))
        .when(pl.col("dur_ns") > LONGEST_NS)
        .then(pl.lit("a duration of weeks"))
    )
    return events.with_columns(reason=pl.coalesce("reason", late))


def _joined(events: pl.DataFrame) -> pl.DataFrame:
    """Make whole events of beginnings and ends, with a stack for each process and thread."""
    halves = events.filter(pl.col("ph").is_in(["B", "E"])).sort("start_ns", "event_id")
    stacks: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    rows = halves.to_dicts()
    for row in rows:
        row["reason"] = "half of a pair whose other half is not in the file"
        stack = stacks[row["process"], row["tid"]]
        if row["start_ns"] is None:
            continue
        if row["ph"] == "B":
            stack.append(row)
            continue
        depth = next((d for d in reversed(range(len(stack))) if row["name"] in ("", stack[d]["name"])), None)
        if depth is not None:
            begin = stack[depth]
            del stack[depth:]
            begin |= {"ph": "X", "reason": None, "dur_ns": row["start_ns"] - begin["start_ns"]}
            begin["args"] = row["args"] if begin["args"] == "{}" else begin["args"]
            row["reason"] = "the end of a pair, which is one event now"
    whole = events.filter(~pl.col("ph").is_in(["B", "E"]))
    return pl.concat([whole, pl.DataFrame(rows, schema=events.schema)]).sort("event_id")
