"""The events of a trace's text, in batches of rows of integers: buffers around the compiled scanner."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from lumos_nb.traces import _event_kernels as kernels
from lumos_nb.traces import _scan_kernels as lists
from lumos_nb.traces._event_kernels import Bytes, Int64s
from lumos_nb.traces.json_text import find_events

BLOCK_BYTES = 1 << 18  # of text that is scanned at a time: it stays in the processor's cache
ARGS_BYTES = 1 << 23  # of arguments that a batch has room for at first
BATCH_ROWS = 100_000  # no power of two: columns would share lines of the cache
_PAD = 32  # bytes that kernels may read or write beyond what is in use
MAX_AROUND_BYTES = 1 << 26  # of text before the events, and after them, that is looked at
_SPACE = b" \t\r\n"
_LAST_BRACKET = re.compile(rb".*\}(?=\s*\])", re.DOTALL)


class Batch(NamedTuple):
    """Rows, as `_scan_kernels.scan` writes them, in buffers that the next batch overwrites."""

    ints: Int64s
    kinds: Bytes
    dropped: Int64s
    args: Bytes


class Row(NamedTuple):
    """One event: its fields, numbered as in `_event_kernels`, and the text of its arguments."""

    fields: dict[int, int | str]
    args: bytes


UNREADABLE = Row({kernels.PH: "unreadable"}, b"{}")


@dataclass(slots=True)
class Strings:
    """Strings with ids, each the bytes between its quotes in JSON."""

    slots: Int64s = field(default_factory=lambda: np.zeros(1 << 13, np.int64))
    bounds: Int64s = field(default_factory=lambda: np.zeros(1 << 12, np.int64))
    pool: Bytes = field(default_factory=lambda: np.zeros(1 << 18, np.uint8))
    state: Int64s = field(default_factory=lambda: np.zeros(kernels.N_STATE, np.int64))
    _decoded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for text in kernels.KNOWN:
            self.intern(text)

    @property
    def table(self) -> tuple[Int64s, Int64s, Bytes, Int64s]:
        """What the kernels take."""
        return self.slots, self.bounds, self.pool, self.state

    def grow(self) -> None:
        """Make room for twice as many strings."""
        slots = np.zeros(2 * len(self.slots), np.int64)
        kernels.rehash(self.slots, slots)
        self.slots = slots
        self.bounds = np.append(self.bounds, np.zeros_like(self.bounds))
        self.pool = np.append(self.pool, np.zeros_like(self.pool))

    def intern(self, text: str) -> int:
        """Id of a string that need not be in a text."""
        raw = np.frombuffer(bytearray(msgspec.json.encode(text)[1:-1] + bytes(8)), np.uint8)
        while (known := kernels.id_of(raw, *self.table)) < 0:
            self.grow()
        return known

    def decoded(self) -> list[str]:
        """All strings, by id."""
        known, end = len(self._decoded), self.state[kernels.STRINGS]
        bounds = self.bounds[known : end + 1].tolist()
        pool = self.pool[: bounds[-1]].tobytes()
        texts = b",".join(b'"%b"' % pool[a:b] for a, b in itertools.pairwise(bounds))
        self._decoded += msgspec.json.decode(b"[%b]" % texts, type=list[str])
        return self._decoded


class Scanner:
    """Reads the events of a text as batches of rows.

    Parameters
    ----------
    pieces
        The text.
    odd
        Reads an event that the compiled scanner leaves alone, given its text and byte offset; None if it is no JSON.

    Attributes
    ----------
    head, tail
        Text before and after the events: up to and including `[`, and from `]` on.
    found, closed
        Whether the start of the array was found, and its end.
    head_broken
        Whether the text before the array is no JSON.
    rest
        Bytes of an event that is not complete.
    replaced
        Bytes that are not UTF-8, replaced by U+FFFD.
    """

    def __init__(self, pieces: Iterator[bytes], odd: Callable[[bytes, int], Row | None]) -> None:
        self._pieces, self._odd = pieces, odd
        self.head = self.tail = b""
        self.found = self.closed = self.head_broken = False
        self.rest = self.replaced = 0
        self.strings = Strings()
        self.state = self.strings.state
        self._text = np.zeros(2 * BLOCK_BYTES, np.uint8)
        self._size = 0  # bytes of it that are in use
        self._offset = 0  # of its first byte in the file
        self._ints = np.zeros((kernels.N_FIELDS, BATCH_ROWS), np.int64)
        self._kinds = np.zeros((kernels.N_FIELDS, BATCH_ROWS), np.uint8)
        self._dropped = np.zeros(BATCH_ROWS, np.int64)
        self._args = np.zeros(ARGS_BYTES, np.uint8)

    @property
    def events(self) -> int:
        """Events so far, of any kind."""
        return int(self.state[kernels.EVENTS])

    @property
    def junk(self) -> int:
        """Pieces of text between events that are no object."""
        return int(self.state[kernels.JUNK])

    def __iter__(self) -> Iterator[Batch]:
        self._append(self._skip_head())
        if not self.found:
            return
        wanted = BLOCK_BYTES
        for piece in self._pieces:
            self._append(piece)
            if self._size >= wanted:
                yield from self._scan(final=False)
                if self.closed:
                    break
                wanted = max(BLOCK_BYTES, 2 * self._size)
        if not self.closed:
            yield from self._scan(final=True)
        yield self._batch()
        left = self._text[: self._size].tobytes()
        if self.closed:
            self.tail = left
            for piece in self._pieces:
                self.tail += piece[: MAX_AROUND_BYTES - len(self.tail)]
        else:
            self.rest = len(left.strip(_SPACE + b","))

    def _skip_head(self) -> bytes:
        """Read up to the start of the events; return what was read beyond it."""
        buffer, wanted = b"", 0
        for piece in itertools.chain(self._pieces, [b""]):
            buffer += piece
            if piece and len(buffer) < wanted:
                continue
            start = find_events(buffer)
            wanted = 2 * len(buffer)
            if start or wanted > 2 * MAX_AROUND_BYTES:
                break
        if not start and (start := find_events(buffer, broken=True)):
            self.head_broken = True
        self.head, self._offset, self.found = buffer[:start] if start else buffer, start, bool(start)
        return buffer[start:] if start else b""

    def _append(self, piece: bytes) -> None:
        end = self._size + len(piece)
        if end + _PAD > len(self._text):
            self._text = np.append(self._text[: self._size], np.zeros(2 * end - self._size + _PAD, np.uint8))
        self._text[self._size : end] = np.frombuffer(piece, np.uint8)
        self._text[end] = 0
        self._size = end

    def _scan(self, *, final: bool) -> Iterator[Batch]:
        """Read what the buffer has, and keep of it what is not read."""
        state = self.state
        while True:
            why = lists.scan(
                self._text, self._size, final, self._ints, self._kinds, self._dropped, self._args, *self.strings.table
            )
            if why == lists.MORE_ROOM:
                yield from self._make_room()
            elif why != lists.ODD or not self._read_odd():
                break
        self.closed = self.closed or why == lists.CLOSED
        begin = int(state[kernels.POSITION])
        self._text[: self._size - begin + 1] = self._text[begin : self._size + 1].copy()
        self._size, self._offset = self._size - begin, self._offset + begin
        state[kernels.POSITION] = 0

    def _read_odd(self) -> bool:
        """Read an event that is odd or broken; False if it has no end."""
        begin, stop, after = self.state[[kernels.BEGIN, kernels.STOP, kernels.NEXT]].tolist()
        if stop < 0 and after < 0:
            last = _LAST_BRACKET.match(self._text[begin : self._size].tobytes())
            if not last:
                return False
            stop = begin + last.end()
        text = self._utf8(self._text[begin : stop if stop >= 0 else after].tobytes())
        row = self._odd(text, self._offset + begin)
        if row is None and after >= 0 and (stop < 0 or after < stop):
            stop = after
        self._put(row or UNREADABLE)
        self.state[kernels.POSITION], self.state[kernels.GAP] = stop, lists.AFTER_EVENT
        self.state[kernels.EVENTS] += 1
        return True

    def _put(self, row: Row) -> None:
        """Add an event to the batch, which has room for one."""
        state, fields = self.state, row.fields
        phase, category, pid = (fields.get(field) for field in (kernels.PH, kernels.CAT, kernels.PID))
        if phase not in kernels.KEPT_PHASES or pid in kernels.PSEUDO_PROCESSES:
            code = self.strings.intern(str(phase or "")) << 32
            code |= self.strings.intern(str(category)) + 1 if category is not None else 0
            self._dropped[state[kernels.DROPPED]] = code
            state[kernels.DROPPED] += 1
            return
        n, begin = state[kernels.ROWS], int(state[kernels.ARGS_SIZE])
        end = begin + 1 + len(row.args)
        if end + _PAD > len(self._args):
            self._args = np.append(self._args, np.zeros(end, np.uint8))
        self._args[begin:end] = np.frombuffer(b"\n" + row.args, np.uint8)
        self._kinds[:, n] = kernels.NONE
        for at, value in fields.items():
            text = isinstance(value, str)
            self._ints[at, n] = self.strings.intern(value) if isinstance(value, str) else value
            self._kinds[at, n] = kernels.STRING if text else kernels.NUMBER
        self._ints[kernels.EVENT_ID, n] = state[kernels.EVENTS]
        state[kernels.ROWS], state[kernels.ARGS_SIZE] = n + 1, end

    def _make_room(self) -> Iterator[Batch]:
        why = self.state[kernels.NO_ROOM]
        self.state[kernels.NO_ROOM] = 0
        if why == 1:
            self.strings.grow()
        elif self.state[kernels.ROWS] or self.state[kernels.DROPPED]:
            yield self._batch()
        else:
            self._args = np.zeros(2 * len(self._args), np.uint8)

    def _batch(self) -> Batch:
        """What was read since the last batch."""
        rows, dropped, args = self.state[[kernels.ROWS, kernels.DROPPED, kernels.ARGS_SIZE]].tolist()
        self.state[[kernels.ROWS, kernels.DROPPED, kernels.ARGS_SIZE]] = 0
        return Batch(self._ints[:, :rows], self._kinds[:, :rows], self._dropped[:dropped], self._args[1:args])

    def _utf8(self, text: bytes) -> bytes:
        try:
            text.decode()
        except UnicodeDecodeError:
            mended = text.decode(errors="replace").encode()
            self.replaced += mended.count(b"\xef\xbf\xbd") - text.count(b"\xef\xbf\xbd")
            return mended
        return text
