"""Compiled passes over a plan's in-edges: order, longest path, slack, path.

Positions are topological: the in-edges `ptr[v]:ptr[v + 1]` of op v come from ops before v.
Times count from the replay's 0.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from lumos_nb._jit import jit

Bools = npt.NDArray[np.bool_]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

NEVER = np.iinfo(np.int64).max
"""The latest end of an op that nothing waits for."""


@jit("int32[::1](int32[::1], int32[::1], int64)")
def order_by(key: Int32s, order: Int32s, n_keys: int) -> Int32s:
    """`order` sorted by `key[order]`, equal keys as they were: a counting sort."""
    place = np.zeros(n_keys + 1, np.int64)
    for k in key:
        place[k + 1] += 1
    for k in range(n_keys):
        place[k + 1] += place[k]
    out = np.empty_like(order)
    for e in order:
        k = key[e]
        out[place[k]] = e
        place[k] += 1
    return out


@jit("int32[::1](int32[::1], int64)")
def offsets(key: Int32s, n_keys: int) -> Int32s:
    """Where each key's stretch begins once sorted: (n_keys + 1,)."""
    ptr = np.zeros(n_keys + 1, np.int32)
    for k in key:
        ptr[k + 1] += 1
    for k in range(n_keys):
        ptr[k + 1] += ptr[k]
    return ptr


@jit("int32[::1](int32[::1], int32[::1])")
def topological(out_ptr: Int32s, out_dst: Int32s) -> Int32s:
    """Kahn's order, always the lowest row that is ready; it is shorter than the graph if there is a cycle."""
    n = out_ptr.size - 1
    missing = np.zeros(n, np.int32)
    for d in out_dst:
        missing[d] += 1
    ready = [np.int64(v) for v in range(n) if missing[v] == 0]  # ascending rows already are a heap
    order = np.empty(n, np.int32)
    done = 0
    while ready:
        first = heapq.heappop(ready)
        order[done] = first
        done += 1
        for e in range(out_ptr[first], out_ptr[first + 1]):
            d = out_dst[e]
            missing[d] -= 1
            if missing[d] == 0:
                heapq.heappush(ready, np.int64(d))
    return order[:done].copy()


@jit("int64[::1](int32[::1], int32[::1], int64[::1], bool_[::1], int64[::1])")
def ends(ptr: Int32s, src: Int32s, lag: Int64s, from_start: Bools, dur: Int64s) -> Int64s:
    """Earliest end of every op: the longest path to it, in one pass."""
    end = np.empty_like(dur)
    for v in range(dur.size):
        start = np.int64(0)
        for e in range(ptr[v], ptr[v + 1]):
            u = src[e]
            ready = end[u] + lag[e]
            if from_start[e]:
                ready -= dur[u]
            start = max(start, ready)
        end[v] = start + dur[v]
    return end


@jit("int64[::1](int32[::1], int32[::1], int64[::1], bool_[::1], int64[::1], int64[::1])")
def latest_ends(ptr: Int32s, src: Int32s, lag: Int64s, from_start: Bools, dur: Int64s, due: Int64s) -> Int64s:
    """Latest end of every op that keeps each op's end within `due` (NEVER where an op has no due time of its own)."""
    latest = due.copy()
    latest_start = np.full_like(due, NEVER)  # what those ops ask of it that count from its start
    for v in range(dur.size - 1, -1, -1):
        start = latest_start[v]
        if latest[v] != NEVER:
            start = min(start, latest[v] - dur[v])
        if start == NEVER:
            continue
        for e in range(ptr[v], ptr[v + 1]):
            u = src[e]
            if from_start[e]:
                latest_start[u] = min(latest_start[u], start - lag[e])
            else:
                latest[u] = min(latest[u], start - lag[e])
    return latest


@jit("int32[:, ::1](int32[::1], int32[::1], int64[::1], bool_[::1], int64[::1], int64[::1], int64)")
def path_to(
    ptr: Int32s, src: Int32s, lag: Int64s, from_start: Bools, dur: Int64s, end: Int64s, last: int
) -> npt.NDArray[np.int32]:
    """Ops on the path to `last` and the in-edge by which each was reached (-1: none), in time order: (length, 2).

    Of several in-edges that bind an op equally it takes the first.
    """
    length = 0
    found = np.empty((256, 2), np.int32)
    v = np.int64(last)
    while v >= 0:
        if length == len(found):
            grown = np.empty((2 * length, 2), np.int32)
            grown[:length] = found
            found = grown
        before, by = np.int64(-1), np.int64(-1)
        for e in range(ptr[v], ptr[v + 1]):
            u = src[e]
            ready = end[u] + lag[e]
            if from_start[e]:
                ready -= dur[u]
            if ready == end[v] - dur[v]:
                before, by = np.int64(u), np.int64(e)
                break
        found[length, 0], found[length, 1] = v, by
        length += 1
        v = before
    return found[:length][::-1].copy()


@jit("int32[::1](int64[::1], int32[::1], int32[::1], int64)")
def last_ops(end: Int64s, group: Int32s, row: Int32s, n_groups: int) -> Int32s:
    """Position of the op that ends last in every group, of equals the one of the lowest row: (n_groups,)."""
    last = np.full(n_groups, -1, np.int32)
    for v in range(end.size):
        g = group[v]
        if g >= 0:
            u = last[g]
            if u < 0 or end[v] > end[u] or (end[v] == end[u] and row[v] < row[u]):
                last[g] = v
    return last
