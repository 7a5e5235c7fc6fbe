"""Lists of JSON cut into their elements."""

from __future__ import annotations

from lumos_nb._jit import jit
from lumos_nb.traces import _json_kernels
from lumos_nb.traces._event_kernels import Bytes, Int64s
from lumos_nb.traces._json_kernels import CLOSE_LIST, COMMA, OPEN_LIST, compact, space_end, value_end


@jit("int64(uint8[::1], uint8[::1], int64[::1])", uses=(_json_kernels,))
def write_elements(text: Bytes, to: Bytes, counts: Int64s) -> int:
    """Write the elements of valid lists that stand one after the other, each without whitespace and on a line.

    `counts` takes how many elements each list has; eight zero bytes end `text`, and `to` is as long. Returns the
    bytes written, or `-k - 1` if list `k` is no list or nests deeper than MAX_DEPTH.
    """
    i = at = 0
    for row in range(len(counts)):
        i = space_end(text.ctypes, i)
        if text[i] != OPEN_LIST:
            return -row - 1
        i = space_end(text.ctypes, i + 1)
        while text[i] != CLOSE_LIST:
            end = value_end(text.ctypes, i)
            if end < 0:
                return -row - 1
            at = compact(text.ctypes, i, end, to.ctypes, at)
            to[at] = 10
            at, counts[row] = at + 1, counts[row] + 1
            i = space_end(text.ctypes, end)
            if text[i] == COMMA:
                i = space_end(text.ctypes, i + 1)
        i += 1
    return at
