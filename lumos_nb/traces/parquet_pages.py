"""What the pages of a Parquet file say of themselves, checked before polars believes it.

polars reserves memory for as many values as the head of a page claims. A negative number is taken for one of nearly
2^64, the memory is refused, and the process ends: no caller can catch that. The heads are structs of Thrift's compact
protocol (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md); those of Parquet, whose
field ids are used below, are in https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from lumos_nb.errors import TraceError
from lumos_nb.traces.json_stream import check_unpacked

_MAGIC, _TAIL_BYTES = b"PAR1", 8
_FOOTER_BYTES, _DEPTH = 16 << 20, 32
"""More than any file has that says some words of each of its columns."""

_GROUPS, _COLUMNS, _COLUMN = 4, 1, 3
_NAME, _VALUES, _PACKED_BYTES, _FIRST_PAGE, _FIRST_DICTIONARY = 3, 5, 7, 9, 11
_UNPACKED_PAGE_BYTES, _PAGE_BYTES = 2, 3
_DATA, _DICTIONARY, _DATA_V2 = 5, 7, 8
_COUNTS = {_DATA: (1,), _DICTIONARY: (1,), _DATA_V2: (1, 2, 3, 5, 6)}
"""By kind of page, the fields that are numbers: how many values, and of some nulls, rows, and bytes of levels."""

Struct = dict[int, Any]


def check_pages(path: Path, file: IO[bytes]) -> None:
    """Refuse a Parquet file whose pages claim what cannot be.

    Raises
    ------
    TraceError
        The footer or the head of a page cannot be read, a page claims fewer values than none or more than its
        column has, or the pages would unpack to more than a file of its size may.

    Examples
    --------
    >>> with open("timeline.parquet", "rb") as file:  # doctest: +SKIP
    ...     check_pages(Path("timeline.parquet"), file)
    """
    size, unpacked = os.fstat(file.fileno()).st_size, 0
    if size < len(_MAGIC) + _TAIL_BYTES:
        raise TraceError(f"{path} is no Parquet file: it has {size} bytes. Write it again.")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            columns = _columns(data)
            if sum(abs(column[_PACKED_BYTES]) for column in columns) > size:  # or looking at them would never end
                raise ValueError("its columns have more bytes than it")
            for column in columns:
                for page_bytes in _pages(data, column):
                    unpacked += page_bytes
                    check_unpacked(path, size, unpacked)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise TraceError(
                f"{path} is no whole Parquet file (its footer or the head of a page is cut). Write it again."
            ) from error
        except ValueError as error:
            raise TraceError(f"{path} is no whole Parquet file ({error}). Write it again.") from error


def _columns(data: mmap.mmap) -> list[Struct]:
    """What the footer says of each column of each group of rows."""
    footer = len(data) - _TAIL_BYTES - int.from_bytes(data[-_TAIL_BYTES : -len(_MAGIC)], "little")
    if data[-len(_MAGIC) :] != _MAGIC or footer < len(_MAGIC):
        raise ValueError("it does not end with a footer of its own")
    if len(data) - footer > _FOOTER_BYTES:
        raise ValueError("its footer, with all that it says of columns, has more than 16 MiB")
    groups = _Reader(data, footer).struct()[_GROUPS]
    return [column[_COLUMN] for group in groups for column in group[_COLUMNS]]


def _pages(data: mmap.mmap, column: Struct) -> Iterator[int]:
    """How many bytes each page of a column has once unpacked; ValueError where its head claims what cannot be."""
    left: int = column[_VALUES]
    at: int = column[_FIRST_DICTIONARY if _FIRST_DICTIONARY in column else _FIRST_PAGE]
    end = min(at + column[_PACKED_BYTES], len(data))
    while left > 0 and 0 <= at < end:
        reader = _Reader(data, at)
        head = reader.struct()
        unpacked, packed = head[_UNPACKED_PAGE_BYTES], head[_PAGE_BYTES]
        claims = {kind: [head[kind].get(i, 0) for i in of] for kind, of in _COUNTS.items() if kind in head}
        for kind, counts in claims.items():
            most = max(left, 8 * unpacked) if kind == _DICTIONARY else left
            if min(unpacked, packed, *counts) < 0 or counts[0] > most:
                name = b".".join(column[_NAME]).decode(errors="replace")
                raise ValueError(
                    f"the page of {name!r} at byte {at} claims {counts}, {unpacked} bytes, of {left} values"
                )
        left -= sum(counts[0] for kind, counts in claims.items() if kind != _DICTIONARY)
        at = reader.at + packed
        yield unpacked


class _Reader:
    """Values of Thrift's compact protocol, one after another; IndexError or ValueError where there is none."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at, self.depth = data, at, 0

    def struct(self) -> Struct:
        """Fields by id."""
        fields: Struct = {}
        last = 0
        while head := self._byte():
            last = last + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            fields[last] = kind == 1 if kind in (1, 2) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        match kind:
            case 1 | 2 | 3:  # a truth within a list, a byte
                return self._byte()
            case 4 | 5 | 6:
                return self._signed()
            case 7:
                return self._bytes(8)
            case 8:
                return self._bytes(self._unsigned())
            case 9 | 10:
                return self._nested(self._list)
            case 12:
                return self._nested(self.struct)
        raise ValueError(f"type {kind} at byte {self.at} is none of Parquet's")

    def _nested(self, read: Callable[[], Any]) -> Any:
        self.depth += 1
        if self.depth > _DEPTH:
            raise ValueError(f"what stands at byte {self.at} is nested too deep")
        value = read()
        self.depth -= 1
        return value

    def _list(self) -> list[Any]:
        head = self._byte()
        return [self._value(head & 15) for _ in range(head >> 4 if head >> 4 < 15 else self._unsigned())]

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.at:  # else a list of so many would be gone through beyond the end of the file
            raise IndexError(self.at)
        self.at += count
        return self.data[self.at - count : self.at]

    def _unsigned(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError(f"the number at byte {self.at} has more than 64 bits")

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
