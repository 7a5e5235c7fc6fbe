"""Lists of JSON cut into their elements."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lumos_nb._jit import jit
from lumos_nb.traces import _json_kernels
from lumos_nb.traces._event_kernels import Bytes, Int64s
from lumos_nb.traces._json_kernels import (
    CLOSE,
    CLOSE_LIST,
    COMMA,
    OPEN,
    OPEN_LIST,
    QUOTE,
    Pointer,
    copy,
    load,
    scalar_end,
    space_end,
    string_end,
    value_end,
)

Bools = NDArray[np.bool_]


@jit("int64(uint8[::1], uint8[::1], int64[::1])", uses=(_json_kernels,))
def write_elements(text: Bytes, to: Bytes, counts: Int64s) -> int:
    """Write the elements of valid lists that stand one after the other, each without whitespace and on a line.

    `counts` takes how many elements each list has; eight zero bytes end `text`, and `to` is as long. Returns the bytes
    written, or `-k - 1` if list `k` is no list, or has a string that cannot be one.
    """
    i = at = 0
    for row in range(len(counts)):
        i = space_end(text.ctypes, i)
        if text[i] != OPEN_LIST:
            return -row - 1
        begin, depth, i = at, 0, i + 1
        while True:
            c = text[i]
            if c == QUOTE:
                end = string_end(text.ctypes, i + 1) + 1
                if end <= 0:
                    return -row - 1
                at, i = copy(text.ctypes, i, end, to.ctypes, at), end
                continue
            i += 1
            if c in (OPEN, OPEN_LIST):
                depth += 1
            elif c in (CLOSE, CLOSE_LIST):
                depth -= 1
                if depth < 0:
                    break
            elif c == COMMA and depth == 0:
                to[at] = 10
                at, counts[row] = at + 1, counts[row] + 1
                continue
            elif c == 0:
                return -row - 1
            to[at] = c
            at += c > 32
        if at > begin:
            to[at] = 10
            at, counts[row] = at + 1, counts[row] + 1
    return at


@jit("int64(CPointer(uint8), int64, CPointer(uint8), int64, int64)", uses=(_json_kernels,))
def _end_of_same(text: Pointer, i: int, other: Pointer, k: int, stop: int) -> int:
    """Where the text from `i` on ends that is the same as other[k:stop]; -1 if it is another."""
    while k + 8 <= stop and load(text, i) == load(other, k):
        k, i = k + 8, i + 8
    while k < stop and text[i] == other[k]:
        k, i = k + 1, i + 1
    return i if k == stop else -1


@jit("int64(uint8[::1], uint8[::1], int64[::1], uint8[::1], boolean[::1])", uses=(_json_kernels,))
def write_values(text: Bytes, beginnings: Bytes, edges: Int64s, to: Bytes, more: Bools) -> int:
    """Write the values of the first objects of lists that stand one after the other, each on a line.

    Up to its value, the last of its keys, object `j` of every list reads `beginnings[edges[j] : edges[j + 1]]`, with
    what is before it. `more` takes which lists have further objects. Returns the bytes written, or -1 where a text is
    another one. Eight bytes follow the last of `text` and of `beginnings`.
    """
    i = at = 0
    for row in range(len(more)):
        for j in range(len(edges) - 1):
            i = _end_of_same(text.ctypes, i, beginnings.ctypes, edges[j], edges[j + 1])
            if i < 0:
                return -1
            end = scalar_end(text.ctypes, i)
            if end < 0 or text[end] != CLOSE:
                return -1
            at = copy(text.ctypes, i, end, to.ctypes, at)
            to[at] = 10
            at, i = at + 1, end + 1
        i = space_end(text.ctypes, i)
        more[row] = text[i] == COMMA
        while text[i] == COMMA:
            i = value_end(text.ctypes, space_end(text.ctypes, i + 1))
            if i < 0:
                return -1
            i = space_end(text.ctypes, i)
        if text[i] != CLOSE_LIST:
            return -1
        i += 1
    return at
