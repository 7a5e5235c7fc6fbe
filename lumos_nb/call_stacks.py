"""Who called whom on a thread: nesting of a thread's operators and the site of every runtime call."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lumos_nb._jit import jit

Int64s = NDArray[np.int64]

ROOT = -1


@jit("i8[:](i8[:], i8[:], i8[:])")
def nearest_encloser(lane: Int64s, start: Int64s, end: Int64s) -> Int64s:
    """Index of the innermost interval of its lane that encloses each one, or -1.

    Intervals are sorted by (lane, start, longest first). One that only overlaps the open one (a trace with rounded
    times) counts as inside it if it starts inside.
    """
    n = start.size
    parent = np.full(n, -1, np.int64)
    stack = np.empty(n, np.int64)
    depth = 0
    for i in range(n):
        if i > 0 and lane[i] != lane[i - 1]:
            depth = 0
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


@jit("i8[:](i8[:], i8[:], i8[:], i8[:], i8[:], b1[:])")
def innermost_at(
    lane: Int64s, start: Int64s, end: Int64s, at_lane: Int64s, at: Int64s, strictly: NDArray[np.bool_]
) -> Int64s:
    """Index of the innermost interval open at each time of `at` (sorted by lane, time), or -1; intervals as above.

    `strictly`: it must have begun before that time, since in a trace with rounded times one that begins with a call may
    as well follow it.
    """
    n = start.size
    out = np.full(at.size, -1, np.int64)
    stack = np.empty(n, np.int64)
    depth = 0
    i = 0
    for q in range(at.size):
        if q > 0 and at_lane[q] != at_lane[q - 1]:
            depth = 0
        while i < n and lane[i] < at_lane[q]:
            i += 1
        while i < n and lane[i] == at_lane[q] and start[i] + strictly[q] <= at[q]:
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


@jit("i8[:, :](i8[:], i8[:], i8[:], i8[:], i8[:, :], i8[:])")
def cut(tops: Int64s, top_edge: Int64s, calls: Int64s, call_edge: Int64s, marks: Int64s, mark: Int64s) -> Int64s:
    """Cut each lane at the edges of its outermost intervals and of its calls, and at the marks between its edges.

    Parameters
    ----------
    tops, calls
        Offset of each lane's first outermost interval and first call, and the whole number of them at the end.
    top_edge, call_edge
        Starts and ends in turn: neither the outermost intervals of a lane nor its calls overlap.
    marks
        (lanes, 2): the range of `mark` (sorted times) that holds for the lane.

    Returns
    -------
    (5, rows)
        Lane, start, end, call (-1 between the calls) and the last mark at or before the start (-1 if none) of every
        call and of every stretch between two cuts and outside all calls; by lane and time.
    """
    most = call_edge.size // 2 + call_edge.size + top_edge.size
    for lane in range(marks.shape[0]):
        most += marks[lane, 1] - marks[lane, 0]
    rows = np.empty((5, most), np.int64)
    never = np.iinfo(np.int64).max
    n = 0
    for lane in range(marks.shape[0]):
        t, last_top = 2 * tops[lane], 2 * tops[lane + 1]
        call, c, last_call = calls[lane], 2 * calls[lane], 2 * calls[lane + 1]
        m = marks[lane, 0]
        at = min(top_edge[t] if t < last_top else never, call_edge[c] if c < last_call else never)
        busy_until = at
        while at < never:
            while m < marks[lane, 1] and mark[m] <= at:
                m += 1
            latest = m - 1 if m > marks[lane, 0] else -1
            while 2 * call < last_call and call_edge[2 * call] == at:
                busy_until = call_edge[2 * call + 1]
                rows[0, n], rows[1, n], rows[2, n], rows[3, n], rows[4, n] = lane, at, busy_until, call, latest
                n += 1
                call += 1
            while t < last_top and top_edge[t] <= at:
                t += 1
            while c < last_call and call_edge[c] <= at:
                c += 1
            following = min(top_edge[t] if t < last_top else never, call_edge[c] if c < last_call else never)
            if following < never:
                if m < marks[lane, 1]:
                    following = min(following, mark[m])
                if busy_until <= at:
                    rows[0, n], rows[1, n], rows[2, n], rows[3, n], rows[4, n] = lane, at, following, -1, latest
                    n += 1
            at = following
    return rows[:, :n]


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


def innermost(parent: Int64s, counts: NDArray[np.bool_]) -> Int64s:
    """The innermost ancestor-or-self for which `counts` holds, or -1."""
    out = np.arange(parent.size)
    while (up := np.flatnonzero((out >= 0) & ~counts[out])).size:
        out[up] = parent[out[up]]
    return out


@jit("u8[:](i8[:], u8[:])")
def path_hash(parent: Int64s, name_hash: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of the names from the root down to each interval: equal for equal call sites, in any step or rank."""
    out = np.empty(parent.size, np.uint64)
    for i in range(parent.size):
        above = out[parent[i]] if parent[i] >= 0 else np.uint64(1469598103934665603)
        out[i] = (above ^ name_hash[i]) * np.uint64(1099511628211)
    return out
