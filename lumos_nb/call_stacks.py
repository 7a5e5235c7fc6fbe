"""Who called whom on a thread: nesting of a thread's operators and the site of every runtime call."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lumos_nb._jit import jit

Int64s = NDArray[np.int64]

ROOT = -1


@jit("i8[:](i8[:], i8[:])")
def nearest_encloser(start: Int64s, end: Int64s) -> Int64s:
    """Index of the innermost interval that encloses each one, or -1; intervals sorted by (start, longest first).

    An interval that only overlaps the open one (a trace with rounded times) counts as inside it if it starts inside.
    """
    n = start.size
    parent = np.full(n, -1, np.int64)
    stack = np.empty(n, np.int64)
    depth = 0
    for i in range(n):
        while (
            depth > 0
            and end[stack[depth - 1]] <= start[i]
            and not (end[stack[depth - 1]] == start[i] and end[i] == start[i] and start[stack[depth - 1]] == start[i])
        ):
            depth -= 1
        if depth > 0:
            parent[i] = stack[depth - 1]
        stack[depth] = i
        depth += 1
    return parent


@jit("i8[:](i8[:], i8[:], i8[:], b1)")
def innermost_at(start: Int64s, end: Int64s, at: Int64s, strictly: bool) -> Int64s:
    """Index of the innermost interval open at each time of `at` (sorted), or -1; intervals as above.

    `strictly`: it must have begun before that time, since in a trace with rounded times one that begins with a call may
    as well follow it.
    """
    late = 1 if strictly else 0
    n = start.size
    out = np.full(at.size, -1, np.int64)
    stack = np.empty(n, np.int64)
    depth = 0
    i = 0
    for q in range(at.size):
        while i < n and start[i] + late <= at[q]:
            while depth > 0 and end[stack[depth - 1]] <= start[i]:
                depth -= 1
            stack[depth] = i
            depth += 1
            i += 1
        while depth > 0 and end[stack[depth - 1]] <= at[q]:
            depth -= 1
        if depth > 0:
            out[q] = stack[depth - 1]
    return out


@jit("i8[:](i8[:], b1[:])")
def outermost(parent: Int64s, counts: NDArray[np.bool_]) -> Int64s:
    """The outermost ancestor-or-self for which `counts` holds, or -1; parents come before their children."""
    out = np.full(parent.size, -1, np.int64)
    for i in range(parent.size):
        p = parent[i]
        if p >= 0 and out[p] >= 0:
            out[i] = out[p]
        elif counts[i]:
            out[i] = i
    return out


@jit("u8[:](i8[:], u8[:])")
def path_hash(parent: Int64s, name_hash: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of the names from the root down to each interval: equal for equal call sites, in any step or rank."""
    out = np.empty(parent.size, np.uint64)
    for i in range(parent.size):
        above = out[parent[i]] if parent[i] >= 0 else np.uint64(1469598103934665603)
        out[i] = (above ^ name_hash[i]) * np.uint64(1099511628211)
    return out
