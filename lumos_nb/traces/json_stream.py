"""The events of a trace file, whole and in batches: plain or gzip, bounded memory, cut by the JSON itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec
from isal import isal_zlib

from lumos_nb.traces.json_text import find_events, object_spans

T = TypeVar("T")

GZIP_MAGIC = b"\x1f\x8b"
BLOCK_BYTES = 4 << 20  # of JSON text; what a batch holds and what memory scales with
READ_BYTES = 1 << 20  # of the file at a time
INFLATE_BYTES = 1 << 16  # of text at a time: what a damaged file may lose before the damage

_INFLATE_ERROR: type[Exception] = isal_zlib.IsalError  # type: ignore[assignment]  # the stub calls it an instance
UNDECODABLE = (msgspec.MsgspecError, RecursionError)
"""What decoders raise for text that they cannot read, the latter where it nests a thousand deep."""

_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_BETWEEN_WINDOW_BYTES = 1 << 16
_SPACE = b" \t\r\n"


@dataclass(slots=True)
class Blocks:
    """The text of a file in blocks of about `BLOCK_BYTES`, decompressed if its first bytes say gzip.

    `damage` says, once the blocks are used up, why there are fewer than there should be; None for a sound file. Of gzip
    data that ends too early all text is there, of damaged data all but at most `INFLATE_BYTES` before the damage.
    """

    path: Path
    damage: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            data = file.read(READ_BYTES)
            if data.startswith(GZIP_MAGIC):
                yield from self._inflate(data, file)
                return
            while data:
                yield data
                data = file.read(BLOCK_BYTES)

    def _inflate(self, data: bytes, file: BinaryIO) -> Iterator[bytes]:
        pieces, size = [], 0
        for piece in self._pieces(data, file):
            pieces.append(piece)
            if (size := size + len(piece)) >= BLOCK_BYTES:
                yield b"".join(pieces)
                pieces, size = [], 0
        yield b"".join(pieces)

    def _pieces(self, data: bytes, file: BinaryIO) -> Iterator[bytes]:
        member = isal_zlib.decompressobj(wbits=31)
        while data:
            try:
                yield member.decompress(data, INFLATE_BYTES)
            except _INFLATE_ERROR as error:
                self.damage = f"the gzip data is damaged before byte {file.tell():,} of the file ({error})"
                return
            if member.eof:
                data = member.unused_data or file.read(READ_BYTES)
                if not data.strip(b"\0"):  # padding; anything else is another member
                    return
                member = isal_zlib.decompressobj(wbits=31)
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
                pass
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
