"""Lists of JSON cut into their elements."""

from __future__ import annotations

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
    copy,
    space_end,
    string_end,
)


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
