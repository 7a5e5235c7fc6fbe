"""The compiled loop of the simulation: a heap of events over ops, streams that keep the order of issue, shared pools.

What is found out while it runs (the op before another on its stream, the last op issued when a sync is reached) is one
more op to wait for, like an edge.
"""

from __future__ import annotations

import heapq

import numpy as np

from lumos_nb._jit import jit
from lumos_nb._replay_kernels import NEVER, Bools, Floats, Int32s, Int64s, UInt32s

FIELDS = READY, MISSING, START, END, DUR, STREAM, FOLLOWER, BEFORE, NEXT, SYNC, WAITER, FREED_BY = tuple(range(12))
"""Columns of the ops' state (n, 12), int64; -1 where there is none. READY: when all that has ended lets the op start.
MISSING: what it still waits for. STREAM: whose queue it goes through. FOLLOWER: the op that is issued with it. BEFORE
and NEXT: its neighbours on the stream, as issued. SYNC: the first row of `syncs` that is the op's. WAITER: the first
row of `syncs` that waits for the op. FREED_BY: the op whose end made room for it in a pool."""

UNISSUED = -2
"""BEFORE of an op of a stream that nothing has issued yet."""

OF, ON, LAG, LAST, ALSO = range(5)
"""Columns of `syncs`: op OF waits for all that stream ON holds, and a LAG; the LAST op of these; next row of WAITER."""

DST, DELAY, KIND = range(3)
AFTER_START, ISSUES = 1, 2
"""Columns of the edges by source; and bits of KIND: it counts from the start of its source, or that issues the op."""

DUST = 1e-9
"""Parts of a pool's capacity, and with `EARLY` of a ns, that are rounding."""

EARLY = 1e-3

Events = list[tuple[np.int64, np.int64]]
"""A heap of times and ops: an op when it is ready, the number of ops later in number when it ends."""

_EVENTS = "List(UniTuple(int64, 2))"
_OPS = "int64[:, ::1]"


@jit(f"void({_OPS}, uint32[::1], uint32[::1], bool_[::1])")
def chain_followers(op: Int64s, ptr: UInt32s, src: UInt32s, issued: Bools) -> None:
    """Fill FOLLOWER: what no call issues is issued with the op before it on its stream, after all that already is."""
    leader = np.arange(len(op))
    end = leader.copy()
    for v in range(len(op)):
        before = np.int64(-1)
        for e in range(ptr[v], ptr[v + 1]):
            if op[src[e], STREAM] == op[v, STREAM]:
                before = max(before, np.int64(src[e]))
        if op[v, STREAM] >= 0 and before >= 0 and not issued[v]:
            first = leader[before]
            leader[v] = first
            op[end[first], FOLLOWER] = v
            end[first] = v


@jit(f"void({_EVENTS}, {_OPS}, int64, int64)")
def _release(events: Events, op: Int64s, v: np.int64, at: np.int64) -> None:
    """One of the things that v waits for has happened: it lets v start at `at`."""
    op[v, READY] = max(op[v, READY], at)
    op[v, MISSING] -= 1
    if op[v, MISSING] == 0:
        heapq.heappush(events, (op[v, READY], v))


@jit(f"void({_OPS}, int32[::1], int64)")
def _issue(op: Int64s, tail: Int32s, v: np.int64) -> None:
    """Put v and what is issued with it at the end of its stream."""
    while v >= 0 and op[v, BEFORE] == UNISSUED:
        before = np.int64(tail[op[v, STREAM]])
        op[v, BEFORE] = before
        tail[op[v, STREAM]] = v
        if before >= 0 and op[before, END] < 0:
            op[before, NEXT] = v
            op[v, MISSING] += 1
        v = op[v, FOLLOWER]


@jit(f"bool_({_EVENTS}, {_OPS}, int32[::1], {_OPS}, int64, int64)")
def _is_held(events: Events, op: Int64s, tail: Int32s, syncs: Int64s, v: np.int64, now: np.int64) -> bool:
    """Whether v, all of whose edges are satisfied, must wait for its stream, or for what others hold at this moment."""
    if op[v, BEFORE] == UNISSUED:
        _issue(op, tail, v)
    i = op[v, SYNC]
    op[v, SYNC] = -1
    while 0 <= i < len(syncs) and syncs[i, OF] == v:
        last = np.int64(tail[syncs[i, ON]])
        syncs[i, LAST] = last
        if last >= 0 and op[last, END] < 0:
            op[v, MISSING] += 1
            syncs[i, ALSO] = op[last, WAITER]
            op[last, WAITER] = i
        elif last >= 0:
            op[v, READY] = max(op[v, READY], op[last, END] + syncs[i, LAG])
        i += 1
    if op[v, MISSING] == 0 and op[v, READY] > now:
        heapq.heappush(events, (op[v, READY], v))
    return bool(op[v, MISSING] > 0 or op[v, READY] > now)


_OUT = "uint32[::1], int64[:, ::1]"


@jit(f"void({_EVENTS}, {_OPS}, int32[::1], {_OUT}, int64, int64)")
def _start(events: Events, op: Int64s, tail: Int32s, out_ptr: UInt32s, out: Int64s, v: np.int64, now: np.int64) -> None:
    op[v, START] = now
    for e in range(out_ptr[v], out_ptr[v + 1]):
        if out[e, KIND] & ISSUES:
            _issue(op, tail, out[e, DST])
        if out[e, KIND] & AFTER_START:
            _release(events, op, out[e, DST], now + out[e, DELAY])


@jit(f"void({_EVENTS}, {_OPS}, {_OPS}, {_OUT}, int64, int64)")
def _end(events: Events, op: Int64s, syncs: Int64s, out_ptr: UInt32s, out: Int64s, v: np.int64, now: np.int64) -> None:
    op[v, END] = now
    for e in range(out_ptr[v], out_ptr[v + 1]):
        if not out[e, KIND] & AFTER_START:
            _release(events, op, out[e, DST], now + out[e, DELAY])
    if op[v, NEXT] >= 0:
        _release(events, op, op[v, NEXT], now)
    i = op[v, WAITER]
    while i >= 0:
        _release(events, op, syncs[i, OF], now + syncs[i, LAG])
        i = syncs[i, ALSO]


@jit("void(int32[::1], int32[::1], int32[::1], bool_, int64[:, ::1], int64)")
def _enter(first: Int32s, after: Int32s, priority: Int32s, in_turn: bool, op: Int64s, v: np.int64) -> None:
    """Put v into the list of a pool: after all of its priority, and of what goes in turn, after all that runs."""
    at, p = np.int64(-1), np.int64(first[0])
    while p >= 0 and (priority[p] >= priority[v] or (in_turn and op[p, START] >= 0)):
        at, p = p, np.int64(after[p])
    after[v] = p
    if at < 0:
        first[0] = v
    else:
        after[at] = v


@jit("void(int32[::1], int32[::1], int64)")
def _leave(first: Int32s, after: Int32s, v: np.int64) -> None:
    at, p = np.int64(-1), np.int64(first[0])
    while p != v:
        at, p = p, np.int64(after[p])
    if at < 0:
        first[0] = after[v]
    else:
        after[at] = after[v]


@jit("void(int64, int32[::1], int32[::1], float64[::1], bool_, float64[::1])")
def _share_out(first: np.int64, after: Int32s, priority: Int32s, demand: Floats, in_turn: bool, share: Floats) -> None:
    """The `share` of its speed at which each op of a pool runs: by priority, equals alike; in turn, all or none."""
    free, v = 1.0, np.int64(first)
    while v >= 0:
        wanted, w = 0.0, v
        while w >= 0 and priority[w] == priority[v] and not (in_turn and w != v):
            wanted += demand[w]
            w = np.int64(after[w])
        part = 1.0 if wanted <= free + DUST else (0.0 if in_turn or free < DUST else free / wanted)
        free = max(free - wanted, 0.0)
        while v != w:
            share[v] = part
            v = np.int64(after[v])


@jit(f"int64({_OPS}, {_OUT}, int32[::1], {_OPS}, int32[:, ::1], int32[::1], float64[:, ::1], int32[::1], bool_[::1])")
def run(
    op: Int64s,
    out_ptr: UInt32s,
    out: Int64s,
    tail: Int32s,
    syncs: Int64s,
    pool: Int32s,
    priority: Int32s,
    demand: Floats,
    kind_of: Int32s,
    in_turn: Bools,
) -> int:
    """Run all ops; the number of those that have ended.

    `tail` (streams,) is scratch, -1. Of each kind of pool and op: which `pool` it uses (-1: none), and its `demand`
    (kinds, n). Of each op its `priority` (n,). Of each pool its kind, and whether its ops go `in_turn`.
    """
    n = len(op)
    done = 0
    n_kinds, n_pooled = pool.shape[0], n if pool.shape[0] else 0
    after, share = np.full((n_kinds, n_pooled), -1, np.int32), np.ones((n_kinds, n_pooled))
    first, freed_by = np.full((len(kind_of), 1), -1, np.int32), np.full(len(kind_of), -1, np.int64)
    left, speed = np.zeros(n_pooled), np.zeros(n_pooled)
    since, due = np.zeros(n_pooled, np.int64), np.full(n_pooled, NEVER, np.int64)
    changed = [np.int64(0) for _ in range(0)]
    events = [(np.int64(0), np.int64(v)) for v in range(n) if op[v, MISSING] == 0]  # in order, so a heap
    while events:
        now, code = heapq.heappop(events)
        v = code if code < n else code - n
        pooled = n_kinds > 0 and pool[:, v].max() >= 0
        if code < n and not _is_held(events, op, tail, syncs, v, now):
            if not pooled:
                _start(events, op, tail, out_ptr, out, v, now)
                heapq.heappush(events, (now + op[v, DUR], n + v))
            else:
                left[v], since[v] = op[v, DUR], now
                for s in range(n_kinds):
                    if pool[s, v] >= 0:
                        q = pool[s, v]
                        share[s, v] = 0.0
                        _enter(first[q], after[s], priority, in_turn[q], op, v)
                        changed.append(np.int64(q))
        elif code >= n and (not pooled or due[v] == now) and op[v, END] < 0:
            _end(events, op, syncs, out_ptr, out, v, now)
            done += 1
            for s in range(n_kinds):
                if pool[s, v] >= 0:
                    _leave(first[pool[s, v]], after[s], v)
                    freed_by[pool[s, v]] = v
                    changed.append(np.int64(pool[s, v]))
        while changed and (not events or events[0][0] > now):  # once all that happens now has happened
            q = changed.pop()
            s = kind_of[q]
            _share_out(np.int64(first[q, 0]), after[s], priority, demand[s], in_turn[q], share[s])
            v = np.int64(first[q, 0])
            while v >= 0:
                new = share[:, v].min()
                if new != speed[v]:
                    left[v] -= (now - since[v]) * speed[v]
                    if op[v, START] < 0 and new > 0.0:
                        op[v, FREED_BY] = freed_by[q] if since[v] < now else -1
                        _start(events, op, tail, out_ptr, out, v, now)
                    since[v], speed[v] = now, new
                    due[v] = now + np.int64(np.ceil(max(left[v] / new - EARLY, 0.0))) if new > 0.0 else NEVER
                    if new > 0.0:
                        heapq.heappush(events, (due[v], n + v))
                v = np.int64(after[s, v])
    return done
