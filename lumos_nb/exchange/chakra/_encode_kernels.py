"""Kernels that write columns of Chakra nodes in the wire format, in one pass over them."""

from __future__ import annotations

import numpy as np

from lumos_nb._jit import jit
from lumos_nb.exchange.chakra import _wire_kernels
from lumos_nb.exchange.chakra._wire_kernels import DUR, ID, NAME, START, TEXT, TYPE, Bytes, Int64s, copy_bytes


@jit("int64(uint8[::1], int64, int64)", allocates=False)
def _put(out: Bytes, at: int, value: int) -> int:
    """Write a number; what follows it."""
    left = np.uint64(value)
    while left >= np.uint64(0x80):
        out[at] = np.uint8(left & np.uint64(0x7F)) | np.uint8(0x80)
        left >>= np.uint64(7)
        at += 1
    out[at] = np.uint8(left)
    return at + 1


@jit("int64(int64)", allocates=False, inline=True)
def _width(value: int) -> int:
    """Bytes that a number takes."""
    left, width = np.uint64(value), 1
    while left >= np.uint64(0x80):
        left >>= np.uint64(7)
        width += 1
    return width


@jit("int64(uint8[::1], int64, int64, int64[::1], int64, int64)", allocates=False)
def _put_deps(out: Bytes, at: int, tag: int, deps: Int64s, begin: int, count: int) -> int:
    if count == 0:
        return at
    size = 0
    for j in range(begin, begin + count):
        size += _width(deps[j])
    out[at] = tag
    at = _put(out, at + 1, size)
    for j in range(begin, begin + count):
        at = _put(out, at, deps[j])
    return at


@jit(
    "int64(uint8[::1], int64, int64, uint8[::1], int64[::1], int64[::1], int64)", allocates=False, uses=[_wire_kernels]
)
def _put_tensors(out: Bytes, at: int, tag: int, text: Bytes, cursor: Int64s, size: Int64s, first: int) -> int:
    """Write inputs or outputs, if any of their three texts is there."""
    total = 0
    for k in range(first, first + 3):
        if size[k] >= 0:
            total += 1 + _width(size[k]) + size[k]
    if total == 0:
        return at
    out[at] = tag
    at = _put(out, at + 1, total)
    for k in range(3):
        s = first + k
        if size[s] >= 0:
            out[at] = (k + 1) << 3 | 2
            at = _put(out, at + 1, size[s])
            at = copy_bytes(out, at, text, cursor[s], size[s])
    return at


@jit(
    "int64(uint8[::1], int64[::1], uint8[::1], int64[::1], int64[:, ::1], uint8[:, ::1], uint8[::1], int64[::1],"
    " int64[:, ::1], int64[::1], int64[::1], int64[:, ::1], uint8[::1], uint8[::1])",
    allocates=False,
    uses=[_wire_kernels],
)
def encode(
    head: Bytes,
    head_at: Int64s,
    holds: Bytes,
    column: Int64s,
    fixed: Int64s,
    there: Bytes,
    text: Bytes,
    cursor: Int64s,
    size: Int64s,
    ctrl: Int64s,
    deps: Int64s,
    counts: Int64s,
    same: Bytes,
    out: Bytes,
) -> int:
    """Length-delimited messages of n nodes, one behind another; how many bytes they are.

    `text` holds the columns of text one behind another, from `cursor` on each, `size` (n, S + 2) each, -1 for none; the
    last two are what has no column, and the message as it was, which is written again where `same`. `head` are the
    bytes of each attribute up to its value.
    """
    at, n_ctrl, n_deps = 0, 0, 0
    n_text = size.shape[1]
    kept, frame = n_text - 2, n_text - 1
    for i in range(len(fixed)):
        begin = at + 5
        if same[i]:
            begin = _put(out, at, size[i, frame])
            at = copy_bytes(out, begin, text, cursor[frame], size[i, frame])
        else:
            at = begin
            for k, tag in ((ID, 8), (TYPE, 24), (START, 48), (DUR, 56)):
                if k == TYPE and size[i, NAME] > 0:
                    out[at] = 18
                    at = _put(out, at + 1, size[i, NAME])
                    at = copy_bytes(out, at, text, cursor[NAME], size[i, NAME])
                if k == START:
                    at = _put_deps(out, at, 34, ctrl, n_ctrl, counts[i, 0])
                    at = _put_deps(out, at, 42, deps, n_deps, counts[i, 1])
                if fixed[i, k] != 0:
                    out[at] = tag
                    at = _put(out, at + 1, fixed[i, k])
            at = copy_bytes(out, at, text, cursor[kept], max(size[i, kept], 0))
            at = _put_tensors(out, at, 66, text, cursor, size[i], 1)
            at = _put_tensors(out, at, 74, text, cursor, size[i], 4)
            for k in range(len(holds)):
                c, h = column[k], head_at[k + 1] - head_at[k]
                if holds[k] == TEXT and size[i, c] >= 0:
                    out[at] = 82
                    at = _put(out, at + 1, h + _width(size[i, c]) + size[i, c])
                    at = _put(out, copy_bytes(out, at, head, head_at[k], h), size[i, c])
                    at = copy_bytes(out, at, text, cursor[c], size[i, c])
                elif holds[k] != TEXT and there[i, c]:
                    out[at] = 82
                    at = _put(out, at + 1, h + _width(fixed[i, c]))
                    at = _put(out, copy_bytes(out, at, head, head_at[k], h), fixed[i, c])
        for s in range(n_text):
            cursor[s] += max(size[i, s], 0)
        n_ctrl += counts[i, 0]
        n_deps += counts[i, 1]
        if not same[i]:
            length = at - begin
            after = _put(out, begin - 5, length)
            for j in range(length):
                out[after + j] = out[begin + j]
            at = after + length
    return at
