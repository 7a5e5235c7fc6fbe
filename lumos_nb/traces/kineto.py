"""PyTorch profiler (Kineto) traces, of every generation since 2021, to the one event table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import polars as pl

from lumos_nb.errors import TraceError
from lumos_nb.schema import EVENTS
from lumos_nb.traces.formats import refuse_other_formats
from lumos_nb.traces.json_stream import Blocks, EventStream, surrounding

PARSER_VERSION = 1
"""Part of the key of cached parses: raise it when the same file would give another table."""

CATEGORIES = {
    # 2021: capitalised, without a device prefix
    "operator": "cpu_op",
    "python": "python_function",
    "runtime": "cuda_runtime",
    "driver": "cuda_driver",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "memory": "cpu_instant_event",
    "userannotation": "user_annotation",
    "gpuuserannotation": "gpu_user_annotation",
    # other back ends that follow CUDA's model of calls, streams and correlation ids
    "hip_runtime": "cuda_runtime",
    "xpu_runtime": "cuda_runtime",
    "xpu_driver": "cuda_driver",
    "privateuse1_runtime": "cuda_runtime",
    "privateuse1_driver": "cuda_driver",
}
"""A category in lower case -> its name in the event table; others keep their own name, in lower case."""

DEVICE_CATEGORIES = (
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "gpu_user_annotation",
    "cuda_sync",
    "cuda_profiler_range",
    "mtia_ccp_events",
)
"""Categories whose rows lie on a device's stream: their pid is the device, their tid the stream."""

PSEUDO_PROCESSES = ("", "Spans", "Traces")
"""Processes of the profiler's own rows: the recorded span, its start and its end."""

KEPT_PHASES = ("X", "i", "I")
UNREADABLE = "unreadable"
_FLOW = "an arrow between two events; correlation ids and sequence numbers say the same"
_PAIR = "one half of a pair of events, which Kineto does not write"
_OWN = "the profiler's own row: its span, its start or its end"
_SPAN = "an asynchronous span, which Kineto does not write"
DROPPED_PHASES = {
    **dict.fromkeys(KEPT_PHASES, _OWN),  # rows of PSEUDO_PROCESSES
    "s": _FLOW,
    "t": _FLOW,
    "f": _FLOW,
    "M": "names of processes and threads, kept in the metadata",
    "C": "a counter's sample",
    "B": _PAIR,
    "E": _PAIR,
    "b": _SPAN,
    "n": _SPAN,
    "e": _SPAN,
    UNREADABLE: "not valid JSON, or a field of a type that no event has",
}
_NAMES = ("process_name", "process_labels", "thread_name")

_NO_STREAM = 2**32 - 1  # how older files write the stream -1 of a synchronisation with the whole device
_LATEST_NS = 2**62  # the year 2116; leaves room to add the base without overflow
NOTES = {"what": pl.String(), "count": pl.Int64(), "reason": pl.String()}


class Kineto(NamedTuple):
    """One rank's file, read.

    Attributes
    ----------
    events
        `schema.EVENTS`, in the file's order.
    metadata
        All top-level keys of the file but `traceEvents`; plus `processes` and `threads` (their names), and `event_count`
        (events in the file).
    notes
        Columns `what`, `count`, `reason`: every event that is not in `events`, and what else is off about the file.
    """

    events: pl.DataFrame
    metadata: dict[str, Any]
    notes: pl.DataFrame


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


def read_kineto(path: str | Path) -> Kineto:
    """Read one Kineto trace, plain or gzip (the file's first bytes decide).

    Times are exact: decimal microseconds become int64 ns without passing through float64. A file that ends early gives
    all its complete events and a note.

    Parameters
    ----------
    path
        A file that `torch.profiler` wrote, of any generation since 2021.

    Returns
    -------
    Kineto
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
    refuse_other_formats(path)
    blocks = Blocks(path)
    stream = EventStream(iter(blocks), _decode_compact, _rescue)
    table = _Table()
    for batch in stream:
        table.add(batch)
    if stream.closed and not stream.tail:
        raise TraceError(
            f"{path} has no traceEvents in its {len(stream.head):,} bytes of text, so it is no profiler trace"
            f"{f': {blocks.damage}' if blocks.damage else '.'}"
        )
    metadata = surrounding(stream.head, stream.tail) | table.names() | {"event_count": table.count}
    metadata.pop("traceEvents", None)
    _note_damage(table, stream, blocks)
    events = table.frame(base_ns=_base_ns(metadata), rank=rank_of(metadata) or 0)
    return Kineto(events, metadata, pl.DataFrame(table.notes, schema=NOTES, orient="row"))


def rank_of(metadata: dict[str, Any]) -> int | None:
    """The rank that a trace says it is of (`distributedInfo.rank`), None if it names none."""
    return _distributed(metadata, "rank")


def world_size_of(metadata: dict[str, Any]) -> int | None:
    """The number of ranks that a trace says its run had (`distributedInfo.world_size`), None if it does not say."""
    return _distributed(metadata, "world_size")


def _distributed(metadata: dict[str, Any], key: str) -> int | None:
    info = metadata.get("distributedInfo")
    value = _integer(info.get(key)) if isinstance(info, dict) else None
    return value if value is not None and 0 <= value < 2**31 else None


def _base_ns(metadata: dict[str, Any]) -> int:
    base = _integer(metadata.get("baseTimeNanoseconds"))
    return base if base is not None and abs(base) < _LATEST_NS else 0


def _note_damage(table: _Table, stream: EventStream[Event], blocks: Blocks) -> None:
    if not stream.closed or blocks.damage:
        why = blocks.damage or "the text ends before the array of events does"
        table.notes.append(("truncated", 1, f"{why}; {table.count:,} complete events, {stream.rest:,} bytes left over"))
    if stream.junk:
        table.notes.append(("not an event", stream.junk, "text between events that is no JSON object"))
    if stream.replaced:
        table.notes.append(("not UTF-8", stream.replaced, "bytes replaced by U+FFFD"))
    if table.unreadable:
        table.notes.append(("first unreadable", 1, table.unreadable))


def _decode_compact(text: bytes) -> list[Event]:
    """Decode an array of events after removing the whitespace between tokens, so that arguments are one line each."""
    return _decode_events(msgspec.json.format(text, indent=-1))


def _rescue(text: bytes, offset: int) -> Event:
    try:
        return _decode_event(msgspec.json.format(text, indent=-1))
    except msgspec.MsgspecError as error:
        return Event(ph=UNREADABLE, name=f"{error} in the event at byte {offset:,}: {text[:80]!r}")


@dataclass(slots=True)
class _Table:
    """Batches of events on their way to one table."""

    frames: list[pl.DataFrame] = field(default_factory=list)
    notes: list[tuple[str, int, str]] = field(default_factory=list)
    count: int = 0
    unreadable: str = ""
    _dropped: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    _names: dict[tuple[str, Any, Any], msgspec.Raw] = field(default_factory=dict)
    _threads: dict[str, int] = field(default_factory=dict)

    def add(self, batch: list[Event]) -> None:
        """Take the next events of the file."""
        first, self.count = self.count, self.count + len(batch)
        keep = [event.ph in KEPT_PHASES and event.pid not in PSEUDO_PROCESSES for event in batch]
        ids = [first + i for i, kept in enumerate(keep) if kept]
        if len(ids) < len(batch):
            rest = [event for event, kept in zip(batch, keep, strict=True) if not kept]
            self._dropped.update([(event.ph, event.cat) for event in rest])
            self._keep_names(rest)
            batch = [event for event, kept in zip(batch, keep, strict=True) if kept]
        if batch:
            self.frames.append(self._columns(batch, ids))

    def _keep_names(self, events: list[Event]) -> None:
        for event in events:
            if event.ph == "M" and event.name in _NAMES:
                self._names.setdefault((event.name, event.pid, event.tid), event.args.copy())
            elif event.ph == UNREADABLE and not self.unreadable:
                self.unreadable = event.name or ""

    def _columns(self, batch: list[Event], ids: list[int]) -> pl.DataFrame:
        texts = [bytes(event.args) or b"{}" for event in batch]
        args = self._decode_args(texts)
        external = [a.external_id if a.external_id is not None else a.external_id_2021 for a in args]
        return pl.DataFrame(
            {
                "event_id": pl.Series(ids, dtype=pl.Int64),
                "ph": pl.Series([event.ph for event in batch], dtype=pl.String),
                "category": pl.Series([event.cat for event in batch], dtype=pl.String),
                "name": pl.Series([event.name for event in batch], dtype=pl.String),
                "pid": _integers([event.pid for event in batch]),
                "tid": self._thread_ids([event.tid for event in batch]),
                "start_ns": nanoseconds([event.ts for event in batch]),
                "dur_ns": nanoseconds([event.dur if event.ph == "X" else b"0" for event in batch]),
                "device_arg": _integers([a.device for a in args]),
                "stream_arg": _integers([a.stream for a in args]),
                "correlation": _integers([a.correlation for a in args]),
                "external_id": _integers(external),
                "sequence": _integers([a.sequence for a in args]),
                "args": _strings(texts),
            }
        )

    def _decode_args(self, texts: list[bytes]) -> list[Args]:
        try:
            return _decode_args(b"[" + b",".join(texts) + b"]")
        except msgspec.MsgspecError:
            pass
        args, odd = [], 0
        for text in texts:
            try:
                args.append(_decode_one_args(text))
            except msgspec.MsgspecError:
                args.append(Args())
                odd += 1
        self.notes.append(("odd arguments", odd, "args of an unexpected type: kept as text, their ids are null"))
        return args

    def _thread_ids(self, tids: list[Any]) -> pl.Series:
        """Thread ids as integers; text that is no number gets a negative id that depends on the text alone."""
        known = _integers(tids)
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
            except msgspec.MsgspecError:
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
        if not self.frames:
            return EVENTS.empty()
        events = _classify(pl.concat(self.frames))
        self.frames.clear()
        dropped = events.filter(pl.col("reason").is_not_null())
        for phase, category, reason, count in dropped.group_by("ph", "category", "reason").len().sort(pl.all()).rows():
            self.notes.append((f"dropped {phase} {category}", count, reason))
        kept = events.filter(pl.col("reason").is_null())
        return EVENTS.check(
            kept.select(
                rank=pl.lit(rank, pl.Int32),
                start_ns=pl.col("start_ns") + base_ns,
                **{c: pl.col(c) for c in EVENTS.columns if c not in ("rank", "start_ns")},
            )
        )


def _classify(events: pl.DataFrame) -> pl.DataFrame:
    """One vocabulary of categories, thread or device and stream, and `reason`: why a row is dropped, else null."""
    lower = pl.col("category").str.to_lowercase()
    instant = pl.col("ph") != "X"
    default = pl.when(instant).then(pl.lit("cpu_instant_event")).otherwise(pl.lit("unknown"))
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
        .then(pl.lit("no duration: the event did not end while the profiler ran"))
        .when(pl.col("dur_ns") < 0)
        .then(pl.lit("a negative duration")),
    )


def _integer(value: Any) -> int | None:
    """`value` as an int64 if it is one, in whatever notation: 7, "24572", "stream 7", "0x0"; else None."""
    if isinstance(value, str):
        text = value.removeprefix("stream ").strip()
        try:
            value = int(text, 16) if text.startswith("0x") else int(text)
        except ValueError:
            return None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    if value is None or isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**63 else None


def _integers(values: list[Any]) -> pl.Series:
    try:
        return pl.Series(values, dtype=pl.Int64)
    except (TypeError, OverflowError):
        return pl.Series([_integer(v) for v in values], dtype=pl.Int64)


def _strings(texts: list[bytes]) -> pl.Series:
    """One string a text. Split in one go, which is much faster than decoding one by one."""
    series = pl.Series([b"\n".join(texts).decode()]).str.split("\n").explode()
    if len(series) != len(texts):  # a string with a raw line break, which JSON forbids
        series = pl.Series([text.decode() for text in texts], dtype=pl.String)
    return series


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
    plain = text.str.contains(r"^\d{1,16}(\.\d+)?$") & (whole < _LATEST_NS // 1000)
    frame = _strings(texts).to_frame("text").select("text", ns=pl.when(plain).then(whole * 1000 + thousandths))
    if not frame["ns"].null_count():
        return frame["ns"]
    return pl.Series([_decimal_ns(t) if ns is None else ns for t, ns in frame.rows()], dtype=pl.Int64)


def _decimal_ns(text: str) -> int | None:
    """One time stamp in an unusual notation: a sign, an exponent, quotes."""
    try:
        ns = int((Decimal(text.strip('"')) * 1000).to_integral_value(ROUND_HALF_UP))
    except (InvalidOperation, ValueError, OverflowError):
        return None
    return ns if abs(ns) < _LATEST_NS else None
