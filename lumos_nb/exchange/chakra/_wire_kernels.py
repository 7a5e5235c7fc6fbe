"""Kernels that read the wire format of Chakra nodes into columns, in one pass over the bytes.

A fault is a negative code; `FAULTS` says it in words. What has no column (other attributes, unknown fields) is copied
as it stands, so that it can be written again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lumos_nb._jit import jit

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]

TRUNCATED, LONG_VARINT, TOO_LONG, EMPTY, GROUP, NO_FIELD = -1, -2, -3, -4, -5, -6
FAULTS = {
    TRUNCATED: "it ends in the middle of a field",
    LONG_VARINT: "a number has more than 64 bits",
    TOO_LONG: "a message states a length of more than 64 MiB",
    EMPTY: "a node is of no bytes, which other readers take for the end of the file",
    GROUP: "a field is of a kind that protobuf 3 does not have",
    NO_FIELD: "a field has number 0",
}
MOST_BYTES = 1 << 26
"""Of one message: a node of a real trace has thousands."""
ID, TYPE, START, DUR, N_FIXED = 0, 1, 2, 3, 4
"""Columns of numbers before those of attributes."""
NAME, N_STRINGS = 0, 7
"""Columns of text before those of attributes: the name, then values, shapes and types of inputs and of outputs."""
INTEGER, BOOLEAN, TEXT, UNSIGNED = range(4)
"""What an attribute's column holds."""
INT32, INT64, UINT32, UINT64, BOOL, STRING = 7, 9, 11, 13, 27, 29
"""Field numbers of an attribute's value."""


@jit("UniTuple(int64, 2)(uint8[::1], int64, int64)", allocates=False, inline=True)
def _varint(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, and what follows it; a fault in the latter's place."""
    value = np.uint64(0)
    shift = np.uint64(0)
    for k in range(10):
        if at + k >= end:
            return 0, TRUNCATED
        byte = data[at + k]
        if k == 9 and byte > 1:
            break
        value |= np.uint64(byte & 0x7F) << shift
        if byte < 0x80:
            found: int = np.int64(value)
            return found, at + k + 1
        shift += np.uint64(7)
    return 0, LONG_VARINT


@jit("UniTuple(int64, 2)(uint8[::1], int64, int64)", allocates=False, inline=True)
def _sized(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Begin and end of what is there with its length before it; a fault in the latter's place."""
    size, begin = _varint(data, at, end)
    if begin < 0:
        return at, begin
    if size < 0 or size > end - begin:
        return at, TRUNCATED
    return begin, begin + size


@jit("int64(uint8[::1], int64, int64, int64)", allocates=False)
def _skipped(data: Bytes, at: int, end: int, wire: int) -> int:
    """What follows a value of wire type `wire`, or a fault."""
    if wire == 0:
        return _varint(data, at, end)[1]
    if wire == 2:
        return _sized(data, at, end)[1]
    if wire != 1 and wire != 5:
        return GROUP
    after = at + (8 if wire == 1 else 4)
    return after if after <= end else TRUNCATED


@jit("int64(uint8[::1], int64, uint8[::1], int64, int64)", allocates=False, inline=True)
def copy_bytes(out: Bytes, at: int, data: Bytes, begin: int, size: int) -> int:
    """Copy; what follows the copy. Through views, whose indices are known not to be negative: nine times as fast."""
    source, copy = data[begin : begin + size], out[at : at + size]
    for j in range(size):
        copy[j] = source[j]
    return at + size


@jit("UniTuple(int64, 3)(uint8[::1], int64, boolean, int64[:, ::1])", allocates=False)
def find_frames(data: Bytes, at: int, first: bool, frames: Int64s) -> tuple[int, int, int]:
    """Begin and end (n, 2) of the whole messages from `at` on; how many, where the next begins, 0 or a fault.

    The first message of a file may be of no bytes. A message that is not all there is left for later.
    """
    n = 0
    while at < len(data):
        size, begin = _varint(data, at, min(len(data), at + 5))
        if begin == TRUNCATED and len(data) - at < 5:
            return n, at, 0
        if begin < 0 or size > MOST_BYTES:
            return n, at, TOO_LONG
        if size == 0 and not first:
            return n, at, EMPTY
        if size > len(data) - begin:
            return n, at, 0
        frames[n, 0], frames[n, 1] = begin, begin + size
        n += 1
        at = begin + size
        first = False
    return n, at, 0


@jit("int64(uint8[::1], int64, int64, int64[:, ::1], int64)", allocates=False)
def _tensors(data: Bytes, at: int, end: int, spans: Int64s, first: int) -> int:
    """Texts of inputs or outputs; 1, 0 where something else is there as well, or a fault."""
    plain = 1
    while at < end:
        tag, at = _varint(data, at, end)
        if at < 0:
            return at
        if tag in (10, 18, 26):
            begin, after = _sized(data, at, end)
            if after >= 0:
                spans[first + (tag >> 3) - 1, 0], spans[first + (tag >> 3) - 1, 1] = begin, after
            at = after
        else:
            plain = 0
            at = _skipped(data, at, end, tag & 7) if tag >= 8 else NO_FIELD
        if at < 0:
            return at
    return plain


@jit("int64(uint8[::1], int64, int64, uint8[::1], int64[::1])", allocates=False)
def _known(data: Bytes, at: int, end: int, names: Bytes, name_at: Int64s) -> int:
    """Which attribute a name is of; -1 for none that has a column."""
    size = end - at
    for k in range(len(name_at) - 1):
        begin = name_at[k]
        if name_at[k + 1] - begin == size:
            same = True
            for j in range(size):
                if names[begin + j] != data[at + j]:
                    same = False
                    break
            if same:
                return k
    return -1


@jit(
    "int64(uint8[::1], int64, int64, uint8[::1], int64[::1], uint8[::1], int64[::1], int64[::1], uint8[::1],"
    " int64[:, ::1])",
    allocates=False,
)
def _attribute(
    data: Bytes,
    at: int,
    end: int,
    names: Bytes,
    name_at: Int64s,
    holds: Bytes,
    column: Int64s,
    fixed: Int64s,
    there: Bytes,
    spans: Int64s,
) -> int:
    """Put an attribute into its column; 1, 0 if it has none (or is more than a name and a value), or a fault."""
    which, field, value, begin, after, parts = -1, 0, np.int64(0), at, at, 0
    while at < end:
        tag, at = _varint(data, at, end)
        if at < 0:
            return at
        parts += 1
        number, wire = tag >> 3, tag & 7
        if number == 0:
            return NO_FIELD
        if tag == 10:
            a, at = _sized(data, at, end)
            if at >= 0:
                which = _known(data, a, at, names, name_at)
        elif wire == 2:
            field = number
            begin, after = _sized(data, at, end)
            at = after
        elif wire == 0:
            field = number
            value, at = _varint(data, at, end)
        else:
            at = _skipped(data, at, end, wire)
        if at < 0:
            return at
    if which < 0 or parts != 2:
        return 0
    c = column[which]
    if holds[which] == TEXT:
        if field != STRING or spans[c, 0] >= 0:
            return 0
        spans[c, 0], spans[c, 1] = begin, after
        return 1
    if holds[which] == BOOLEAN:
        fits = field == BOOL and (value == 0 or value == 1)
    else:
        signed = field in (INT32, INT64, UINT32) and holds[which] != UNSIGNED
        fits = signed or (field in (INT32, INT64, UINT32, UINT64) and value >= 0)
    if not fits or there[c]:
        return 0
    fixed[c], there[c] = value, 1
    return 1


_NAMES = "uint8[::1], int64[::1], uint8[::1], int64[::1]"
_INTO = "int64[::1], uint8[::1], int64[:, ::1], int64[::1], int64[:, ::1]"


@jit("int64(int64, int64, int64[::1], int64[::1], int64[:, ::1], int64[::1])", allocates=False)
def _put_number(field: int, value: int, fixed: Int64s, counts: Int64s, deps: Int64s, used: Int64s) -> int:
    """Put a number of a node into its column; 1, or 0 if it has none."""
    if field == 1:
        fixed[ID] = value
    elif field == 3:
        fixed[TYPE] = np.int32(value)
    elif field == 6:
        fixed[START] = value
    elif field == 7:
        fixed[DUR] = value
    elif field == 4 or field == 5:
        which = field - 4
        deps[which, used[which]] = value
        used[which] += 1
        counts[which] += 1
    else:
        return 0
    return 1


@jit(f"int64(uint8[::1], int64, int64, int64, {_NAMES}, {_INTO}, int64[::1])", allocates=False)
def _put_sized(
    data: Bytes,
    field: int,
    at: int,
    end: int,
    names: Bytes,
    name_at: Int64s,
    holds: Bytes,
    column: Int64s,
    fixed: Int64s,
    there: Bytes,
    spans: Int64s,
    counts: Int64s,
    deps: Int64s,
    used: Int64s,
) -> int:
    """Put what has a length into its columns; 1, 0 if it has none, or a fault."""
    if field == 2:
        spans[NAME, 0], spans[NAME, 1] = at, end
    elif field == 4 or field == 5:
        while at < end:
            value, at = _varint(data, at, end)
            if at < 0:
                return at
            _put_number(field, value, fixed, counts, deps, used)
    elif field == 8 or field == 9:
        return _tensors(data, at, end, spans, 1 + 3 * (field - 8))
    elif field == 10:
        return _attribute(data, at, end, names, name_at, holds, column, fixed, there, spans)
    else:
        return 0
    return 1


@jit(
    f"UniTuple(int64, 3)(uint8[::1], int64[:, ::1], {_NAMES}, int64[:, ::1], uint8[:, ::1], int64[:, :, ::1],"
    " int64[:, ::1], int64[:, ::1], int64[::1], uint8[::1], int64[::1])",
    allocates=False,
)
def decode(
    data: Bytes,
    frames: Int64s,
    names: Bytes,
    name_at: Int64s,
    holds: Bytes,
    column: Int64s,
    fixed: Int64s,
    there: Bytes,
    spans: Int64s,
    counts: Int64s,
    deps: Int64s,
    used: Int64s,
    rest: Bytes,
    rest_size: Int64s,
) -> tuple[int, int, int]:
    """Columns of the messages `frames`: row and offset of the first that cannot be read, and 0 or its fault.

    `fixed` (n, F) are numbers and `there` says which of them are; `spans` (n, S, 2) are texts by where they lie, -1 for
    none; `deps` (2, m) are the control and data dependencies of all nodes one behind another, `used` of them in all
    and `counts` (n, 2) each; `rest` is what has no column, `rest_size` of it each.
    """
    n_rest = 0
    for i in range(len(frames)):
        at, end = frames[i]
        first = n_rest
        while at < end:
            begin = at
            tag, at = _varint(data, at, end)
            if at < 0:
                return i, begin, at
            field, wire = tag >> 3, tag & 7
            state: int = 0
            if field == 0:
                return i, begin, NO_FIELD
            if wire == 0:
                value, at = _varint(data, at, end)
                if at >= 0:
                    state = _put_number(field, value, fixed[i], counts[i], deps, used)
            elif wire == 2:
                a, at = _sized(data, at, end)
                if at >= 0:
                    into = (fixed[i], there[i], spans[i], counts[i], deps, used)
                    state = _put_sized(data, field, a, at, names, name_at, holds, column, *into)
            else:
                at = _skipped(data, at, end, wire)
            if at < 0 or state < 0:
                return i, begin, at if at < 0 else state
            if state == 0:
                n_rest = copy_bytes(rest, n_rest, data, begin, at - begin)
        rest_size[i] = n_rest - first
    return len(frames), 0, 0


@jit("void(uint8[::1], int64[:, ::1], uint8[::1])", allocates=False)
def gather(data: Bytes, spans: Int64s, out: Bytes) -> None:
    """Copy what lies from spans[:, 0] to spans[:, 1], one behind another."""
    at = 0
    for i in range(len(spans)):
        at = copy_bytes(out, at, data, spans[i, 0], spans[i, 1] - spans[i, 0])
