"""Records of a Kineto file to rows of the event table: the vocabulary, what is kept, what is dropped and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress
from operator import not_
from typing import Any

import msgspec
import polars as pl

from lumos_nb.schema import EVENTS
from lumos_nb.traces.exact import LATEST_NS, integer, integers, nanoseconds, strings
from lumos_nb.traces.json_stream import UNDECODABLE, Blocks, EventStream
from lumos_nb.traces.json_text import mend

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

PSEUDO_PROCESSES = frozenset(("", "Spans", "Traces"))
"""Processes of the profiler's own rows: the recorded span, its start and its end."""

KEPT_PHASES = frozenset(("X", "i", "I"))
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
    "M": "names of processes and threads, kept in the metadata, and their order in a viewer",
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
        texts = [bytes(event.args) or b"{}" for event in batch]
        args = self._decode_args(texts)
        external = [a.external_id if a.external_id is not None else a.external_id_2021 for a in args]
        return pl.DataFrame(
            {
                "event_id": pl.Series(ids, dtype=pl.Int64),
                "ph": pl.Series([event.ph for event in batch], dtype=pl.String),
                "category": pl.Series([event.cat for event in batch], dtype=pl.String),
                "name": pl.Series([event.name for event in batch], dtype=pl.String),
                "pid": integers([event.pid for event in batch]),
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
            pass
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
        events = _classify(pl.concat(self.frames))
        self.frames.clear()
        dropped = events.filter(pl.col("reason").is_not_null())
        for phase, category, reason, count in dropped.group_by("ph", "category", "reason").len().sort(pl.all()).rows():
            self.notes.append((f"dropped {phase} {category}", count, reason))
        kept = events.filter(pl.col("reason").is_null())
        if nowhere := kept.filter(pl.col("category").is_in(DEVICE_CATEGORIES) & pl.col("device").is_null()).height:
            self.notes.append(("no device", nowhere, "device work whose pid and args name no device"))
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
        .then(pl.lit("no duration that is a number: the event did not end while the profiler ran"))
        .when(pl.col("dur_ns") < 0)
        .then(pl.lit("a negative duration")),
    )
