"""Rows of a scanned file to the event table: the vocabulary, what is kept, what is dropped and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import polars as pl

from lumos_nb.schema import EVENTS
from lumos_nb.traces import _event_kernels as kernels
from lumos_nb.traces._event_kernels import Bytes, Int64s
from lumos_nb.traces.exact import integer
from lumos_nb.traces.pairs import BEGIN, WHOLE, Flags, joined
from lumos_nb.traces.scan import Batch, Strings

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
    "mtia_runtime": "cuda_runtime",
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

MTIA = "mtia_ccp_events"
MTIA_WORK = {"event_wait": "cuda_sync", "event_record": MTIA, "dma_request": "gpu_memcpy"}
"""What MTIA's device rows that a call issued are, by name; others are kernels. Rows that none issued keep their own."""

_FLOW = "an arrow between two events; correlation ids and sequence numbers say the same"
_OWN = "the profiler's own row: its span, its start or its end"
_SPAN = "an asynchronous span, which Kineto does not write"
DROPPED_PHASES = {
    **dict.fromkeys(kernels.KEPT_PHASES, _OWN),  # rows of PSEUDO_PROCESSES
    "s": _FLOW,
    "t": _FLOW,
    "f": _FLOW,
    "M": "names of processes and threads, kept in the metadata, and their order in a viewer",
    "C": "a counter's sample",
    "b": _SPAN,
    "n": _SPAN,
    "e": _SPAN,
    "unreadable": "not valid JSON, or a field of a type that no event has",
}
LONGEST_NS = 21 * 24 * 3600 * 10**9
"""Three weeks: no profile is longer, so times farther apart than that are errors."""

_NO_STREAM = 2**32 - 1  # how older files write the stream -1 of a synchronisation with the whole device
_BELOW_NUMBERS = -(2**62)  # from here on stand the ids of strings where pids are compared

_UNKNOWN, _INSTANT, _CPU_OP = range(3)  # codes of categories that the file does not write; others follow
_WITHOUT = ("unknown", "cpu_instant_event", "cpu_op")


@dataclass(slots=True)
class EventTable:
    """Batches of rows on their way to one table."""

    strings: Strings
    notes: list[tuple[str, int, str]] = field(default_factory=list)
    _frames: list[pl.DataFrame] = field(default_factory=list)
    _halves: list[pl.DataFrame] = field(default_factory=list)
    _dropped: Counter[tuple[str, str | None]] = field(default_factory=Counter)
    _threads: dict[str, int] = field(default_factory=dict)
    _categories: list[str | None] = field(default_factory=lambda: list(_WITHOUT))
    _on_device: Flags = field(default_factory=lambda: np.zeros(len(_WITHOUT), np.bool_))

    @property
    def without_phase(self) -> int:
        """Objects so far that are no events of Chrome's: they have no phase."""
        return sum(count for (phase, _), count in self._dropped.items() if not phase)

    def add(self, batch: Batch) -> None:
        """Take the next events of the file."""
        texts = self.strings.decoded()
        for code, count in zip(*(a.tolist() for a in np.unique_counts(batch.dropped)), strict=True):
            category = code & 0xFFFFFFFF
            self._dropped[texts[code >> 32], texts[category - 1] if category else None] += count
        if batch.ints.shape[1]:
            frame = self._columns(batch, texts)
            half = batch.ints[kernels.PH] >= BEGIN
            if half.any():
                self._halves.append(frame.filter(half))
                frame = frame.filter(~half)
            self._frames.append(frame.drop("process", "tid"))

    def _columns(self, batch: Batch, texts: list[str]) -> pl.DataFrame:
        ints, kinds = batch.ints, batch.kinds
        given = kinds != kernels.NONE
        for of in (ints, kinds) if given[kernels.EXTERNAL_ID_2021].any() else ():
            np.copyto(of[kernels.EXTERNAL_ID], of[kernels.EXTERNAL_ID_2021], where=~given[kernels.EXTERNAL_ID])
        instant = (ints[kernels.PH] != WHOLE) & (ints[kernels.PH] < BEGIN)
        category = self._category(ints, kinds, instant, texts)
        on_device = pl.Series(self._on_device[category])
        pid, tid, device, stream, correlation, external_id, sequence = (
            self._ids(ints[at], kinds[at], texts, threads=at == kernels.TID)
            for at in (*range(kernels.PID, kernels.EXTERNAL_ID + 1), kernels.SEQUENCE)
        )
        process = ints[kernels.PID] + np.where(kinds[kernels.PID] == kernels.STRING, _BELOW_NUMBERS, 0)
        return pl.select(
            event_id=pl.Series(ints[kernels.EVENT_ID].copy()),
            ph=pl.Series(ints[kernels.PH].astype(np.uint8)),
            category=pl.Series(category.astype(np.uint32)),
            name=pl.Series(np.where(given[kernels.NAME], ints[kernels.NAME], kernels.NO_TEXT).astype(np.uint32)),
            thread=pl.when(~on_device).then(tid),
            device=pl.when(on_device).then(pl.coalesce(device, pid).cast(pl.Int32, strict=False)),
            stream=pl.when(on_device).then(pl.coalesce(stream, tid).replace(_NO_STREAM, -1)),
            start_ns=_nullable(ints[kernels.START].copy(), given[kernels.START]),
            dur_ns=_nullable(np.where(instant, 0, ints[kernels.DUR]), given[kernels.DUR] | instant),
            correlation=correlation,
            external_id=external_id,
            sequence=pl.when(sequence >= 0).then(sequence),
            args=_lines(batch.args, batch.ints.shape[1]),
            process=_nullable(process, given[kernels.PID]),
            tid=tid,
        )

    def _category(self, ints: Int64s, kinds: Bytes, instant: Flags, texts: list[str]) -> Int64s:
        """Codes of categories, after seeing to it that `_categories` and `_on_device` have them."""
        functions = (kinds[kernels.PID] == kernels.STRING) & (ints[kernels.PID] == kernels.CPU_FUNCTIONS)
        default = np.where(instant, _INSTANT, np.where(functions, _CPU_OP, _UNKNOWN))
        codes = np.where(kinds[kernels.CAT] != kernels.NONE, ints[kernels.CAT] + len(_WITHOUT), default)
        used = np.flatnonzero(np.bincount(codes)).tolist()
        more = max(0, used[-1] + 1 - len(self._categories))
        self._categories += [None] * more
        self._on_device = np.append(self._on_device, np.zeros(more, np.bool_))
        for code in used:
            if self._categories[code] is None:
                lower = texts[code - len(_WITHOUT)].lower()
                self._categories[code] = CATEGORIES.get(lower, lower)
                self._on_device[code] = self._categories[code] in DEVICE_CATEGORIES
        return codes

    def _ids(self, values: Int64s, kinds: Bytes, texts: list[str], *, threads: bool) -> pl.Series:
        """Ids as integers, null where they are none; a thread's that is no number depends on its text alone."""
        known, written = kinds != kernels.NONE, kinds == kernels.STRING
        values = values.copy()
        if written.any():
            ids, inverse = np.unique(values[written], return_inverse=True)
            numbers = [integer(texts[i]) for i in ids.tolist()]
            if threads:
                numbers = [self._thread(texts[i]) if n is None else n for i, n in zip(ids, numbers, strict=True)]
            known[written] = np.array([n is not None for n in numbers])[inverse]
            values[written] = np.array([n or 0 for n in numbers])[inverse]
        return _nullable(values, known)

    def _thread(self, text: str) -> int:
        return self._threads.setdefault(text, -1 - int.from_bytes(blake2b(text.encode(), digest_size=7).digest()))

    def frame(self, base_ns: int, rank: int, odd: Mapping[str, tuple[int, str]]) -> pl.DataFrame:
        """All events as `schema.EVENTS`; those dropped are counted in `notes`."""
        for (phase, category), count in sorted(self._dropped.items(), key=str):
            reason = DROPPED_PHASES.get(phase, "a phase that no trace of Kineto has")
            self.notes.append((f"dropped {phase or 'no phase'} {category or ''}".strip(), count, reason))
        for text, thread in self._threads.items():
            self.notes.append(("thread id", 1, f"tid {text!r} is no number; it became {thread}"))
        self.notes += [(what, count, f"first: {reason}") for what, (count, reason) in odd.items()]
        if not self._frames:
            return EVENTS.empty()
        events = pl.concat(self._frames)
        self._frames.clear()
        if self._halves:
            whole, left = joined(self._same_names(pl.concat(self._halves)))
            self._note_dropped(left)
            events = pl.concat([events, whole.select(events.columns)]).sort("event_id")
        self._halves.clear()
        events = self._with_usable_times(events)
        if nowhere := int((pl.Series(self._on_device).gather(events["category"]) & events["device"].is_null()).sum()):
            self.notes.append(("no device", nowhere, "device work whose pid and args name no device"))
        return like_cuda(
            events.select(
                rank=pl.lit(rank, pl.Int32),
                event_id="event_id",
                category=self._names_of(events["category"]),
                name=pl.Series(self.strings.decoded(), dtype=pl.String).gather(events["name"]),
                start_ns=pl.col("start_ns") + base_ns,
                **{c: c for c in EVENTS.columns if c not in ("rank", "event_id", "category", "name", "start_ns")},
            )
        )

    def _same_names(self, halves: pl.DataFrame) -> pl.DataFrame:
        """`halves` with one id for each name, also where escapes write it in several ways."""
        texts, first = self.strings.decoded(), dict[str, int]()
        ids = {known: first.setdefault(texts[known], known) for known in halves["name"].unique()}
        return halves.with_columns(pl.col("name").replace(ids))

    def _with_usable_times(self, events: pl.DataFrame) -> pl.DataFrame:
        start, dur = pl.col("start_ns"), pl.col("dur_ns")
        near = start.is_between(*_span(events["start_ns"]))
        usable = (near & (dur >= 0) & (dur <= LONGEST_NS)).fill_null(value=False)
        if events.select(usable.all()).item():
            return events
        reason = (
            pl.when(start.is_null())
            .then(pl.lit("no time stamp, or one that is no number of microseconds"))
            .when(dur.is_null())
            .then(pl.lit("no duration that is a number: the event did not end while the profiler ran"))
            .when(dur < 0)
            .then(pl.lit("a negative duration"))
            .when(near)
            .then(pl.lit("a duration of weeks"))
            .otherwise(pl.lit("a time stamp of 0, or weeks from those of the other events"))
        )
        self._note_dropped(events.filter(~usable).with_columns(reason=reason))
        return events.filter(usable)

    def _note_dropped(self, events: pl.DataFrame) -> None:
        """Count rows by phase, category and `reason`."""
        category = self._names_of(events["category"])
        counted = events.with_columns(category).group_by("ph", "category", "reason").len().rows()
        self.notes += sorted(
            (f"dropped {kernels.KNOWN[phase]} {name}", count, reason) for phase, name, reason, count in counted
        )

    def _names_of(self, categories: pl.Series) -> pl.Series:
        """Names of categories, of which several codes may have the same: one for each way to write it."""
        return pl.Series("category", self._categories, dtype=pl.String).gather(categories)


def like_cuda(events: pl.DataFrame) -> pl.DataFrame:
    """The event table with MTIA's device rows under the categories of CUDA's that mean the same."""
    issued = (pl.col("category") == MTIA) & pl.col("correlation").is_not_null()
    if events.select(issued.any()).item():
        meant = pl.col("name").replace_strict(MTIA_WORK, default="kernel", return_dtype=pl.String)
        events = events.with_columns(category=pl.when(issued).then(meant).otherwise("category"))
    return EVENTS.check(events)


def _span(start_ns: pl.Series) -> tuple[int, int]:
    """From when to when events are taken for those of one profile; around the median where times lie far apart."""
    first, last = start_ns.min(), start_ns.max()
    if not isinstance(first, int) or not isinstance(last, int):  # no event has a time
        return 0, 0
    if last - first <= LONGEST_NS:
        return first, last
    given = start_ns.filter(start_ns != 0).sort()
    middle = given[len(given) // 2]
    return middle - LONGEST_NS, middle + LONGEST_NS


def _nullable(values: Int64s, known: Flags) -> pl.Series:
    """`values`, which are shared, or a copy of them with nulls."""
    series = pl.Series(values)
    return series if known.all() else pl.select(pl.when(pl.Series(known)).then(series)).to_series()


def _lines(text: Bytes, count: int) -> pl.Series:
    """Strings of a text with a line each. Split in one go, which is much faster than decoding one by one."""
    lines = pl.read_csv(
        text.tobytes(), has_header=False, separator="\x01", quote_char=None, schema={"args": pl.String}
    ).to_series()
    if len(lines) != count:
        raise AssertionError(f"{len(lines)} lines of arguments for {count} events.")
    return lines
