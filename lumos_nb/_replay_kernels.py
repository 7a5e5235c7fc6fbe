"""Compiled passes over a plan's in-edges: order, longest path, slack, path.

Positions are topological: the in-edges `ptr[v]:ptr[v + 1]` of op v come from ops before v. Times count from the
replay's 0. What indexes in an inner loop is unsigned, so that numba needs no code for negative indices.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from lumos_nb._jit import jit

Bools = npt.NDArray[np.bool_]
Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

NEVER = 2**62
"""A time beyond all others, with room to subtract durations; what is past `NEVER // 2` has no limit."""


@jit("int64[::1](int64[::1], int64[::1])")
def find(ids: Int64s, wanted: Int64s) -> Int64s:
    """Place of each wanted id in `ids`, which ascend without repeats; -1: not there. Ids without gaps take one look."""
    found = np.full(wanted.size, -1, np.int64)
    for i in range(wanted.size if ids.size else 0):
        w = wanted[i]
        at = min(max(w - ids[0], 0), ids.size - 1)
        if ids[at] != w:
            at = min(np.searchsorted(ids, w), ids.size - 1)
        if ids[at] == w:
            found[i] = at
    return found


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


@jit("uint32[::1](int32[::1], int64)")
def offsets(key: Int32s, n_keys: int) -> UInt32s:
    """Where each key's stretch begins once sorted: (n_keys + 1,)."""
    ptr = np.zeros(n_keys + 1, np.uint32)
    for k in key:
        ptr[k + 1] += np.uint32(1)
    for k in range(n_keys):
        ptr[k + 1] += ptr[k]
    return ptr


@jit("int32[::1](uint32[::1], int32[::1])")
def topological(out_ptr: UInt32s, out_dst: Int32s) -> Int32s:
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


_EDGES = "uint32[::1], uint32[::1], int64[::1], bool_[::1], int64[::1]"
_PAIRS = "uint64[::1], uint64[::1], uint32[::1], uint32[::1], uint32[::1], int64[::1]"
LOW, HALF = np.uint64(2**32 - 1), np.uint64(32)


@jit("void(uint32[::1], int64[::1], bool_[::1], int64[::1], int64[::1])")
def least_apart(src: UInt32s, lag: Int64s, from_start: Bools, dur: Int64s, apart: Int64s) -> None:
    """Least time from the start of each in-edge's source to the start of the op: its lag, and what it counts from."""
    for e in range(lag.size):
        apart[e] = lag[e] + dur[src[e]] * (not from_start[e])  # a product: a branch would be mispredicted too often


@jit(f"UniTuple(int64, 2)({_EDGES}, {_PAIRS})")
def pair(
    ptr: UInt32s,
    src: UInt32s,
    lag: Int64s,
    from_start: Bools,
    dur: Int64s,
    near: Words,
    apart: Words,
    more: UInt32s,
    at: UInt32s,
    others: UInt32s,
    others_apart: Int64s,
) -> tuple[int, int]:
    """Fill what `starts` reads of the ops of `ptr` (n + 1,), and say how much of `more` and of `others` there is.

    Of an op without in-edges both are of no length, from op 0, which starts at 0.
    """
    i, x = 0, 0
    for v in range(ptr.size - 1):
        a, b = np.int64(ptr[v]), np.int64(ptr[v + 1])
        near[v] = apart[v] = 0
        if a == b:
            continue
        first = lag[a] + dur[src[a]] * (not from_start[a])
        last = lag[b - 1] + dur[src[b - 1]] * (not from_start[b - 1])
        near[v] = np.uint64(src[a]) | np.uint64(src[b - 1]) << HALF
        apart[v] = np.uint64(first) | np.uint64(last) << HALF
        if b > a + 2 or (first | last) >> 32:
            more[i], at[i] = v, x
            i += 1
            for e in range(a, b):
                others[x], others_apart[x] = src[e], lag[e] + dur[src[e]] * (not from_start[e])
                x += 1
    more[i], at[i] = ptr.size - 1, x
    return i + 1, x


@jit("int64(uint64, uint64, int64[::1])", inline=True, allocates=False)
def _later(near: int, apart: int, start: Int64s) -> int:
    return max(start[near & LOW] + np.int64(apart & LOW), start[near >> HALF] + np.int64(apart >> HALF))


@jit(f"void({_PAIRS}, int64[::1], int64[::1])")
def starts(
    near: Words,
    apart: Words,
    more: UInt32s,
    at: UInt32s,
    others: UInt32s,
    others_apart: Int64s,
    start: Int64s,
    own: Int64s,
) -> None:
    """Fill `own`, the part of `start` of some ops, with their earliest starts, once all ops before them have theirs.

    The sources of an op's first and last in-edge are the halves of a word of `near`, the times from their starts those
    of a word of `apart`. So nothing has to be predicted, most ops have one or two in no order, and few words are read.
    The ops that have `more`, or longer ones, and at the end how many ops there are, stand apart with where all their
    in-edges, the `others`, begin. Two ops a turn are 5 % faster than one.
    """
    start[:1] = 0
    one, u = np.uint64(1), np.uint64(0)
    for i in range(more.size):
        v = np.uint64(more[i])
        while u + one < v:
            own[u] = _later(near[u], apart[u], start)
            own[u + one] = _later(near[u + one], apart[u + one], start)
            u += np.uint64(2)
        if u < v:
            own[u] = _later(near[u], apart[u], start)
        if v < np.uint64(own.size):
            t = np.int64(0)
            for e in range(at[i], at[i + 1]):
                t = max(t, start[others[e]] + others_apart[e])
            own[v] = t
        u = v + one


@jit(f"void({_EDGES}, int64[:, ::1])")
def latest_ends(ptr: UInt32s, src: UInt32s, lag: Int64s, from_start: Bools, dur: Int64s, latest: Int64s) -> None:
    """Lower `latest` (n, 2) of every op, from when it must have ended by itself, so that the ops after it do so too.

    The first column is the latest start that the edges from its start allow, the second the latest end to which it
    could grow, for which those don't count; about `NEVER` where nothing limits it.
    """
    for v in range(dur.size - 1, -1, -1):
        start = min(latest[v, 0], latest[v, 1] - dur[v])
        for e in range(ptr[v], ptr[v + 1]):
            side = np.uint64(not from_start[e])
            latest[src[e], side] = min(latest[src[e], side], start - lag[e])


@jit(f"int32[:, ::1]({_EDGES}, int64[::1], int64)")
def path_to(
    ptr: UInt32s, src: UInt32s, lag: Int64s, from_start: Bools, dur: Int64s, start: Int64s, last: int
) -> Int32s:
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
            if start[src[e]] + lag[e] + dur[src[e]] * (not from_start[e]) == start[v]:
                before, by = np.int64(src[e]), np.int64(e)
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


# Sweeps: K scenarios at once, K a multiple of 64. Which in-edge bound an op in which scenario is one bit of a word.

PLAIN, LAGGED, FROM_START = 0, 1, 2
"""Kinds of edge in a sweep: without lag, with a lag after the end of its source, or after its start."""

# ptr, src, kind, lag, lag_class of edges; dur, dur_class, row, group of ops
_SWEPT = "uint32[::1], uint32[::1], uint8[::1], int64[::1], int32[::1], int64[::1], int32[::1], uint32[::1], int32[::1]"


@jit("uint32[::1](uint32[::1], uint32[::1])")
def recycled_rows(ptr: UInt32s, src: UInt32s) -> UInt32s:
    """Row of the buffer of ends that each op uses: an op's row is taken over once its last reader has run.

    An op takes over the row of its first in-edge's source where it can, so that a chain stays in one row.
    """
    n = ptr.size - 1
    reader = np.arange(n).astype(np.int32)
    for v in range(n):
        for e in range(ptr[v], ptr[v + 1]):
            reader[src[e]] = v
    rows = np.empty(n, np.uint32)
    free = np.empty(n, np.uint32)
    n_free, n_rows = 0, 0
    for v in range(n):
        a, b = np.int64(ptr[v]), np.int64(ptr[v + 1])
        if b > a and reader[src[a]] == v and (b == a + 1 or src[a + 1] != src[a]):
            rows[v] = rows[src[a]]
            reader[src[a]] = -1
        elif n_free > 0:
            n_free -= 1
            rows[v] = free[n_free]
        else:
            rows[v] = n_rows
            n_rows += 1
        for e in range(a, b):
            u = src[e]
            if reader[u] == v:
                reader[u] = -1
                free[n_free] = rows[u]
                n_free += 1
        if reader[v] == v:
            free[n_free] = rows[v]
            n_free += 1
    return rows


@jit(f"void({_SWEPT}, float64[:, ::1], float64[:, ::1], float64[:, ::1], int32[:, ::1], uint64[:, ::1])")
def scaled_ends(
    ptr: UInt32s,
    src: UInt32s,
    kind: Bytes,
    lag: Int64s,
    lag_class: Int32s,
    dur: Int64s,
    dur_class: Int32s,
    row: UInt32s,
    group: Int32s,
    scale: Floats,
    end: Floats,
    latest: Floats,
    last: Int32s,
    won: Words,
) -> None:
    """Ends of all ops in K scenarios: `dur` and `lag` times the `scale` (classes, K) of their class.

    `end` (rows, K) is scratch. Results: of each group the `latest` end and the `last` op to reach it, both (groups, K),
    and for every in-edge but an op's first, in order, the scenarios in which it bound more than those before it: `won`
    (such edges, K / 64). Rows are indexed, not sliced: a slice in this loop costs more than its arithmetic.
    """
    n_scenarios = scale.shape[1]
    x = 0
    for v in range(dur.size):
        a, b, r = np.int64(ptr[v]), np.int64(ptr[v + 1]), row[v]
        if a == b:
            for k in range(n_scenarios):
                end[r, k] = 0.0
        for e in range(a, b):
            u = src[e]
            p, c, cu = row[u], lag_class[e], dur_class[u]
            g = float(lag[e])
            d = float(dur[u]) if kind[e] == FROM_START else 0.0
            if e == a and kind[e] == PLAIN:
                if p != r:
                    for k in range(n_scenarios):
                        end[r, k] = end[p, k]
            elif e == a:
                for k in range(n_scenarios):
                    end[r, k] = end[p, k] + g * scale[c, k] - d * scale[cu, k]
            elif kind[e] == PLAIN:
                for w in range(won.shape[1]):
                    bits = np.uint64(0)
                    for j in range(64):
                        k = 64 * w + j
                        bits |= np.uint64(end[p, k] > end[r, k]) << np.uint64(j)
                        end[r, k] = max(end[r, k], end[p, k])
                    won[x, w] = bits
                x += 1
            else:
                for w in range(won.shape[1]):
                    bits = np.uint64(0)
                    for j in range(64):
                        k = 64 * w + j
                        ready = end[p, k] + g * scale[c, k] - d * scale[cu, k]
                        bits |= np.uint64(ready > end[r, k]) << np.uint64(j)
                        end[r, k] = max(end[r, k], ready)
                    won[x, w] = bits
                x += 1
        own, c = float(dur[v]), dur_class[v]
        for k in range(n_scenarios):
            end[r, k] += own * scale[c, k]
        if group[v] >= 0:
            for k in range(n_scenarios):
                if last[group[v], k] < 0 or end[r, k] > latest[group[v], k]:
                    latest[group[v], k] = end[r, k]
                    last[group[v], k] = v


@jit("void(int64[:, ::1], int32, int64, int64, uint64, uint64)")
def _add(time: Int64s, to_class: int, time_ns: int, word: int, plus: int, minus: int) -> None:
    """Add `time_ns` to a class in the scenarios of the bits `plus`, and take it away in those of `minus`."""
    for j in range(64):
        sign = np.int64((plus >> np.uint64(j)) & np.uint64(1)) - np.int64((minus >> np.uint64(j)) & np.uint64(1))
        time[to_class, 64 * word + j] += time_ns * sign


@jit(f"void({_SWEPT}, uint64[:, ::1], int32[::1], int32[::1], uint64[:, ::1], uint64[:, ::1], int64[:, ::1])")
def path_times(
    ptr: UInt32s,
    src: UInt32s,
    kind: Bytes,
    lag: Int64s,
    lag_class: Int32s,
    dur: Int64s,
    dur_class: Int32s,
    row: UInt32s,
    group: Int32s,
    won: Words,
    last: Int32s,
    before: Int32s,
    plus: Words,
    minus: Words,
    time: Int64s,
) -> None:
    """Unscaled time by class (classes, K) on the path to op `last[k]`, less that on the path to `before[k]` (-1: none).

    All K paths are walked in one pass back over the ops. `plus` and `minus` (rows, K / 64) hold the scenarios whose two
    paths go through an op, in the rows that its ends had; where the two meet they are equal from there on and cancel.
    """
    x = len(won)
    for v in range(dur.size - 1, -1, -1):
        a, b, r = np.int64(ptr[v]), np.int64(ptr[v + 1]), row[v]
        x -= max(int(b - a) - 1, 0)
        for w in range(won.shape[1]):
            p, m = plus[r, w], minus[r, w]
            plus[r, w] = minus[r, w] = 0
            if group[v] >= 0:
                for j in range(64):
                    p |= np.uint64(last[64 * w + j] == v) << np.uint64(j)
                    m |= np.uint64(before[64 * w + j] == v) << np.uint64(j)
            p, m = p & ~m, m & ~p
            if p | m == 0:
                continue
            _add(time, dur_class[v], dur[v], w, p, m)
            for e in range(b - 1, a - 1, -1):
                here = won[x + e - a - 1, w] if e > a else ~np.uint64(0)
                pe, me = p & here, m & here
                p, m = p & ~here, m & ~here
                if pe | me == 0:
                    continue
                u = src[e]
                if kind[e] != PLAIN:
                    _add(time, lag_class[e], lag[e], w, pe, me)
                if kind[e] == FROM_START:
                    _add(time, dur_class[u], -dur[u], w, pe, me)
                plus[row[u], w] |= pe
                minus[row[u], w] |= me
