"""The events of a trace file, whole and in batches: plain or gzip, bounded memory, cut by the JSON itself."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec
import numpy as np
from isal import isal_zlib

T = TypeVar("T")

GZIP_MAGIC = b"\x1f\x8b"
BLOCK_BYTES = 4 << 20  # of JSON text; what a batch holds and what memory scales with
READ_BYTES = 1 << 20

_INFLATE_ERROR: type[Exception] = isal_zlib.IsalError  # type: ignore[assignment]  # the stub calls it an instance
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]|"', re.DOTALL)
_COLON = re.compile(rb"\s*:")
_ARRAY = re.compile(rb"\s*:\s*\[")
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_BETWEEN_WINDOW_BYTES = 1 << 16
_OPEN = ord("{")
_CLOSE = ord("}")


@dataclass(slots=True)
class Blocks:
    """The text of a file in blocks of at most `BLOCK_BYTES`, decompressed if its first bytes say gzip.

    `damage` says, once the blocks are used up, why there are fewer than there should be; None for a sound file.
    """

    path: Path
    damage: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            first = file.read(READ_BYTES)
            if not first.startswith(GZIP_MAGIC):
                while first:
                    yield first
                    first = file.read(BLOCK_BYTES)
                return
            yield from self._inflate(first, file)

    def _inflate(self, data: bytes, file: BinaryIO) -> Iterator[bytes]:
        member = isal_zlib.decompressobj(wbits=31)
        while data:
            try:
                text = member.decompress(data, BLOCK_BYTES)
            except _INFLATE_ERROR as error:
                self.damage = f"the gzip data is damaged before byte {file.tell():,} of the file ({error})"
                return
            if text:
                yield text
            if member.eof:
                data = member.unused_data or file.read(READ_BYTES)
                if data.strip(b"\0"):  # another member follows; zero padding does not count
                    member = isal_zlib.decompressobj(wbits=31)
                else:
                    return
            else:
                data = member.unconsumed_tail or file.read(READ_BYTES)
        self.damage = f"the gzip data ends in the middle, at byte {file.tell():,} of the file"


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
        Decodes the text of an array of events, or raises `msgspec.MsgspecError`.
    rescue
        Decodes one event, given its text and byte offset, whatever it takes.

    Attributes
    ----------
    head, tail
        Text before and after the events: up to and including `[`, and from `]` on.
    closed
        Whether the end of the array was found.
    rest
        Bytes of an event that is not complete.
    junk, replaced
        Pieces of text between events that are no object; bytes that are not UTF-8, replaced by U+FFFD.
    """

    blocks: Iterator[bytes]
    decode: Callable[[bytes], list[T]]
    rescue: Callable[[bytes, int], T]
    head: bytes = b""
    tail: bytes = b""
    closed: bool = False
    rest: int = 0
    junk: int = 0
    replaced: int = 0
    offset: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[list[T]]:
        buffer = self._skip_head()
        wanted = BLOCK_BYTES
        for block in self.blocks:
            if self.closed:
                self.tail += block
                continue
            buffer += block
            if len(buffer) < wanted:
                continue
            batch, buffer = self._take(buffer)
            # An event longer than the buffer: look again when twice as much is there.
            wanted = BLOCK_BYTES if batch else 2 * len(buffer)
            yield batch
        if not self.closed:
            batch, buffer = self._take_singly(buffer)
            yield batch
            self.rest = len(buffer.strip(b" \t\r\n,"))

    def _skip_head(self) -> bytes:
        """Read up to the start of the events; return what was read beyond it."""
        buffer, wanted = b"", 0
        for block in self.blocks:
            buffer += block
            if len(buffer) < wanted:
                continue
            if start := find_events(buffer):
                self.head, self.offset = buffer[:start], start
                return buffer[start:]
            wanted = 2 * len(buffer)
        if start := find_events(buffer):
            self.head, self.offset = buffer[:start], start
            return buffer[start:]
        self.head, self.closed = buffer, True
        return b""

    def _take(self, buffer: bytes) -> tuple[list[T], bytes]:
        """The whole events of `buffer` and the text that is left."""
        cut = _last_cut(buffer)
        if cut:
            text = self._utf8(buffer[:cut])
            try:
                batch = self.decode(b"[" + text + b"]")
            except msgspec.MsgspecError:
                return self._take_singly(buffer)
            self.offset += cut
            return batch, _after_comma(buffer, cut, self)
        return self._take_singly(buffer)

    def _take_singly(self, buffer: bytes) -> tuple[list[T], bytes]:
        """Like `_take`, for text that may hold the end of the array or events with errors."""
        spans, end = object_spans(buffer)
        last = spans[-1][1] if spans else 0
        texts = [self._utf8(buffer[start:stop]) for start, stop in spans]
        gaps = [buffer[a:b] for (_, a), (b, _) in itertools.pairwise(spans)]
        self.junk += sum(gap.strip() != b"," for gap in gaps)
        try:
            batch = self.decode(b"[" + b",".join(texts) + b"]")
        except msgspec.MsgspecError:
            batch = [self.rescue(text, self.offset + a) for text, (a, _) in zip(texts, spans, strict=True)]
        if end is not None:
            self.closed, self.tail = True, buffer[end:]
            return batch, b""
        self.offset += last
        return batch, _after_comma(buffer, last, self)

    def _utf8(self, text: bytes) -> bytes:
        if text.isascii():
            return text
        try:
            text.decode()
        except UnicodeDecodeError:
            mended = text.decode(errors="replace")
            self.replaced += mended.count("\ufffd") - text.count("\ufffd".encode())
            return mended.encode()
        return text


def _after_comma(buffer: bytes, cut: int, stream: EventStream[T]) -> bytes:
    """What follows the event that ends at `cut` and its comma."""
    rest = buffer[cut:]
    stripped = rest.lstrip(b" \t\r\n,") if cut else rest
    stream.offset += len(rest) - len(stripped)
    return stripped


def _last_cut(buffer: bytes) -> int:
    """Where the last `}` that a comma and a `{` follow ends, 0 if there is none near the end."""
    window = max(0, len(buffer) - _BETWEEN_WINDOW_BYTES)
    cuts = [match.start() + 1 for match in _BETWEEN.finditer(buffer, window)]
    return cuts[-1] if cuts else 0


def find_events(text: bytes) -> int:
    """Offset just after the `[` of the top-level key `traceEvents`; 0 if `text` does not reach it."""
    depth = 0
    for token in _TOKEN.finditer(text):
        match token.group():
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
                if depth == 0:
                    return 0
            case b'"':  # a string that the text does not finish
                return 0
            case b'"traceEvents"' if depth == 1:
                if array := _ARRAY.match(text, token.end()):
                    return array.end()
    return 0


def top_level_keys(text: bytes) -> set[str]:
    """Keys of the JSON object that `text` begins, as far as it goes."""
    keys, depth = set(), 0
    for token in _TOKEN.finditer(text):
        match token.group():
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
            case b'"':
                break
            case string if depth == 1 and _COLON.match(text, token.end()):
                keys.add(string[1:-1].decode(errors="replace"))
    return keys


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
    return list(zip(opens.tolist(), stops.tolist(), strict=False)), end


def surrounding(head: bytes, tail: bytes) -> dict[str, Any]:
    """The top-level keys around the events, decoded: `traceEvents` becomes an empty list.

    A tail that the file does not finish is left out.
    """
    for end in (tail, b"]}"):
        try:
            decoded = json.loads((head + end).decode("utf-8-sig", errors="replace"), strict=False)
        except ValueError:
            continue
        return decoded if isinstance(decoded, dict) else {}
    return {}
