"""The text of a trace file, plain or gzip, in pieces: bounded memory, and what the file lacks is said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

from lumos_nb.errors import TraceError

GZIP_MAGIC = b"\x1f\x8b"
READ_BYTES = 1 << 14  # of the file at a time
INFLATE_BYTES = 1 << 17  # of text at a time: what a damaged file may lose before the damage

MAX_BYTES_ENV = "LUMOS_NB_MAX_BYTES"
MAX_BYTES, MAX_RATIO = 1 << 30, 100
"""Text that a gzip file may hold: a GiB, or 100 times its own size. Traces hold 10 to 40 times; gzip can do 1000."""

_INFLATE_ERROR: type[Exception] = isal_zlib.IsalError  # type: ignore[assignment]  # the stub calls it an instance


def most_unpacked(size: int) -> int:
    """To how many bytes a file of `size` bytes may unpack."""
    given = os.environ.get(MAX_BYTES_ENV, "")
    if given and not given.isdecimal():
        raise TraceError(f"the environment variable {MAX_BYTES_ENV} is {given!r}: it takes a number of bytes.")
    return int(given) if given else max(MAX_BYTES, MAX_RATIO * size)


def check_unpacked(path: Path, size: int, unpacked: int) -> None:
    """Raise TraceError where a file of `size` bytes unpacks to more than it may."""
    limit = most_unpacked(size)
    if unpacked > limit:
        raise TraceError(
            f"{path} ({size:,} bytes) unpacks to more than {limit:,} bytes: if it is meant to, set the "
            f"environment variable {MAX_BYTES_ENV} to the bytes that it may have."
        )


@dataclass(slots=True)
class Blocks:
    """The text of a file in pieces, decompressed if its first bytes say gzip.

    `damage` says, once the pieces are used up, why there are fewer than there should be; None for a sound file. Of gzip
    data that ends too early all text is there, of damaged data all but at most `INFLATE_BYTES` before the damage.

    Raises
    ------
    TraceError
        gzip data hold more text than `MAX_BYTES` and `MAX_RATIO` allow; the environment variable `LUMOS_NB_MAX_BYTES`
        is the limit in their place.
    """

    path: Path
    damage: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            opened = self.path.open("rb")
        except OSError as error:
            raise TraceError(f"{self.path} cannot be opened: {error.strerror}.") from error
        with opened as file:
            data = file.read(READ_BYTES)
            packed = data.startswith(GZIP_MAGIC)
            size = os.fstat(file.fileno()).st_size
            yield from self._limited(self._inflate(data, file), size) if packed else self._plain(data, file)

    def head(self, size: int) -> bytes:
        """The first `size` bytes of the text, or all if it is shorter."""
        head = b""
        for piece in self:
            head += piece
            if len(head) >= size:
                break
        return head[:size]

    @staticmethod
    def _plain(data: bytes, file: BinaryIO) -> Iterator[bytes]:
        while data:
            yield data
            data = file.read(INFLATE_BYTES)

    def _limited(self, pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
        total, limit = 0, most_unpacked(size)
        for piece in pieces:
            total += len(piece)
            if total > limit:
                check_unpacked(self.path, size, total)
            yield piece

    def _inflate(self, data: bytes, file: BinaryIO) -> Iterator[bytes]:
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
