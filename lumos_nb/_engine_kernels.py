"""The compiled loop of the simulation: a heap of events over ops, streams that keep the order of issue, shared pools.

What is found out while it runs (the op before another on its stream, the last op issued when a sync is reached) is one
more op to wait for, like an edge. Nothing is allocated here, so arrays are passed on without counting references, which
would take most of the time.
"""

from __future__ import annotations

import numpy as np

from lumos_nb._jit import jit
from lumos_nb._replay_kernels import NEVER, Bools, Floats, Int32s, Int64s, UInt32s

READY, MISSING, START, END, DUR, PLACE, BEFORE, NEXT, WAITER, SYNC, STREAM, AFTER, FOLLOWER, FREED_BY, SINCE = range(15)
N_FIELDS = 16  # two lines of cache, and what every op needs in the first
"""Columns of the ops' state (n, 16), int64; -1 where there is none. READY: when what has ended lets the op start.
MISSING: what it still waits for. PLACE: in the heap, 0 outside. STREAM: whose queue it goes through; BEFORE and NEXT:
its neighbours there as issued. AFTER: the op of its stream that an edge puts before it. FOLLOWER: the op that is issued
with it. SYNC: its first row of `syncs`. WAITER: the first row of `syncs` that waits for it. FREED_BY: the op whose end
made room for it in a pool. SINCE: when its speed changed."""

UNISSUED = -2
"""BEFORE of an op of a stream that nothing has issued yet."""

DST, DELAY, KIND = range(3)
AFTER_START, ISSUES = 1, 2
"""Columns of the edges by source; and bits of KIND: it counts from the start of its source, or that issues the op."""

OF, ON, LAG, LAST, ALSO = range(5)
"""Columns of `syncs`: op OF waits for all that stream ON holds, and a LAG; the LAST op of these; next row of WAITER."""

SHARED_AS, IN_TURN, FIRST, FREED, CHANGED = range(5)
"""Columns of pools: the kind of pool, whether ops go in turn, the first op in it, the last to leave it, a stack of
pools to look at again (with its size in row 0, so that row 0 is no pool)."""

LEFT, SPEED = range(2)
"""Rows of `work` (2, n): what is left of an op at full speed, in ns; its speed."""

DUST, EARLY = 1e-9, 1e-3
"""Rounding: a part of a pool's capacity, a part of a ns."""

_OPS = "int64[:, ::1]"


@jit(f"void({_OPS}, uint32[::1], uint32[::1], bool_[::1], int64[:, ::1])")
def chain_followers(op: Int64s, ptr: UInt32s, src: UInt32s, issued: Bools, chain: Int64s) -> None:
    """Fill AFTER and FOLLOWER: what no call issues goes with the op before it on its stream, after what already does.

    `chain` (n, 2) is scratch: the first op of each op's chain, and the last op of a chain by its first.
    """
    for v in range(len(op)):
        chain[v, 0] = chain[v, 1] = v
        before = np.int64(-1)
        for e in range(ptr[v], ptr[v + 1]):
            if op[src[e], STREAM] == op[v, STREAM] and op[v, STREAM] >= 0:
                before = max(before, np.int64(src[e]))
        op[v, AFTER] = before
        if before >= 0 and not issued[v]:
            first = chain[before, 0]
            chain[v, 0] = first
            op[chain[first, 1], FOLLOWER] = v
            chain[first, 1] = v


@jit(f"void({_OPS}, {_OPS}, int64, int64)", allocates=False)
def _put(events: Int64s, op: Int64s, v: np.int64, at: np.int64) -> None:
    """Put v into the heap at time `at`, or move it there. Of one time lower ops go first. `events[0, 0]`: its size."""
    i = op[v, PLACE]
    if i == 0:
        i = events[0, 0] + 1
        events[0, 0] = i
    while i > 1:
        p = i >> 1
        if events[p, 0] < at or (events[p, 0] == at and events[p, 1] < v):
            break
        events[i, 0], events[i, 1] = events[p, 0], events[p, 1]
        op[events[i, 1], PLACE] = i
        i = p
    n = events[0, 0]
    while 2 * i <= n:
        c = 2 * i
        if c < n and (
            events[c + 1, 0] < events[c, 0] or (events[c + 1, 0] == events[c, 0] and events[c + 1, 1] < events[c, 1])
        ):
            c += 1
        if at < events[c, 0] or (at == events[c, 0] and v < events[c, 1]):
            break
        events[i, 0], events[i, 1] = events[c, 0], events[c, 1]
        op[events[i, 1], PLACE] = i
        i = c
    events[i, 0], events[i, 1] = at, v
    op[v, PLACE] = i


@jit(f"int64({_OPS}, {_OPS})", allocates=False)
def _take(events: Int64s, op: Int64s) -> np.int64:
    """Take the first op out of the heap."""
    first, n = events[1, 1], events[0, 0]
    at, last = events[n, 0], events[n, 1]
    op[first, PLACE] = 0
    events[0, 0] = n - 1
    if n > 1:
        op[last, PLACE] = 1
        _put(events, op, last, at)
    return first


@jit(f"void({_OPS}, {_OPS}, int64, int64)", allocates=False)
def _release(events: Int64s, op: Int64s, v: np.int64, at: np.int64) -> None:
    """One of the things that v waits for has happened: it lets v start at `at`."""
    op[v, READY] = max(op[v, READY], at)
    op[v, MISSING] -= 1
    if op[v, MISSING] == 0:
        _put(events, op, v, op[v, READY])


@jit(f"void({_OPS}, int32[::1], int64)", allocates=False)
def _issue(op: Int64s, tail: Int32s, v: np.int64) -> None:
    """Put v, what is issued with it and what edges put before it at the end of its stream."""
    while op[v, BEFORE] == UNISSUED:
        u = v
        while op[u, AFTER] >= 0 and op[op[u, AFTER], BEFORE] == UNISSUED:
            u = op[u, AFTER]
        while u >= 0 and op[u, BEFORE] == UNISSUED:
            before = np.int64(tail[op[u, STREAM]])
            op[u, BEFORE] = before
            tail[op[u, STREAM]] = u
            if before >= 0 and op[before, END] < 0:
                op[before, NEXT] = u
                op[u, MISSING] += 1
            u = op[u, FOLLOWER]


@jit(f"bool_({_OPS}, {_OPS}, int32[::1], {_OPS}, int64, int64)", allocates=False)
def _is_held(events: Int64s, op: Int64s, tail: Int32s, syncs: Int64s, v: np.int64, now: np.int64) -> bool:
    """Whether v, all of whose edges are satisfied, must wait for its stream, or for what others hold at this moment."""
    if op[v, BEFORE] == UNISSUED:
        _issue(op, tail, v)
    i = op[v, SYNC] if len(syncs) else -1
    while 0 <= i < len(syncs) and syncs[i, OF] == v:
        last = np.int64(tail[syncs[i, ON]])
        syncs[i, LAST] = last
        if last >= 0 and op[last, END] < 0:
            op[v, MISSING] += 1
            syncs[i, ALSO] = op[last, WAITER]
            op[last, WAITER] = i
        elif last >= 0:
            op[v, READY] = max(op[v, READY], op[last, END] + syncs[i, LAG])
        op[v, SYNC] = -1
        i += 1
    if op[v, MISSING] == 0 and op[v, READY] > now:
        _put(events, op, v, op[v, READY])
    return bool(op[v, MISSING] > 0 or op[v, READY] > now)


@jit(f"void({_OPS}, {_OPS}, int32[::1], uint32[::1], {_OPS}, int64, int64)", allocates=False)
def _start(events: Int64s, op: Int64s, tail: Int32s, out_ptr: UInt32s, out: Int64s, v: np.int64, now: np.int64) -> None:
    op[v, START] = now
    for e in range(out_ptr[v], out_ptr[v + 1]):
        if out[e, KIND] & ISSUES:
            _issue(op, tail, out[e, DST])
        if out[e, KIND] & AFTER_START:
            _release(events, op, out[e, DST], now + out[e, DELAY])


@jit(f"void({_OPS}, {_OPS}, {_OPS}, uint32[::1], {_OPS}, int64, int64)", allocates=False)
def _end(events: Int64s, op: Int64s, syncs: Int64s, out_ptr: UInt32s, out: Int64s, v: np.int64, now: np.int64) -> None:
    op[v, END] = now
    for e in range(out_ptr[v], out_ptr[v + 1]):
        if not out[e, KIND] & AFTER_START:
            _release(events, op, out[e, DST], now + out[e, DELAY])
    if op[v, NEXT] >= 0:
        _release(events, op, op[v, NEXT], now)
    i = op[v, WAITER] if len(syncs) else -1
    while i >= 0:
        _release(events, op, syncs[i, OF], now + syncs[i, LAG])
        i = syncs[i, ALSO]


@jit(f"void({_OPS}, int64[::1], int64)", allocates=False)
def _look_again(pools: Int64s, stack: Int64s, q: np.int64) -> None:
    """Put pool q on the stack (its size is `stack[0]`) of those whose ops have changed."""
    if not pools[q, CHANGED]:
        pools[q, CHANGED] = 1
        stack[0] += 1
        stack[stack[0]] = q


@jit(f"void({_OPS}, {_OPS}, int64, int32[::1], int32[::1], int64)", allocates=False)
def _enter(op: Int64s, pools: Int64s, q: np.int64, after: Int32s, priority: Int32s, v: np.int64) -> None:
    """Put v into the list of pool q: after all of its priority, and of what goes in turn, after all that runs."""
    at, p = np.int64(-1), pools[q, FIRST]
    while p >= 0 and (priority[p] >= priority[v] or (pools[q, IN_TURN] and op[p, START] >= 0)):
        at, p = p, np.int64(after[p])
    after[v] = p
    if at < 0:
        pools[q, FIRST] = v
    else:
        after[at] = v


@jit(f"void({_OPS}, int64, int32[::1], int64)", allocates=False)
def _leave(pools: Int64s, q: np.int64, after: Int32s, v: np.int64) -> None:
    at, p = np.int64(-1), pools[q, FIRST]
    while p != v:
        at, p = p, np.int64(after[p])
    if at < 0:
        pools[q, FIRST] = after[v]
    else:
        after[at] = after[v]
    pools[q, FREED] = v


@jit(f"void({_OPS}, int64, int32[::1], int32[::1], float64[::1], float64[::1])", allocates=False)
def _share_out(pools: Int64s, q: np.int64, after: Int32s, priority: Int32s, demand: Floats, share: Floats) -> None:
    """The `share` of its speed at which each op of pool q runs: by priority, equals alike; in turn, all or none."""
    in_turn = pools[q, IN_TURN] > 0
    free, v = 1.0, pools[q, FIRST]
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


@jit(
    f"void({_OPS}, {_OPS}, int32[::1], uint32[::1], {_OPS}, {_OPS}, int64, int32[::1], float64[:, ::1], "
    "float64[:, ::1], int64)",
    allocates=False,
)
def _adjust(
    events: Int64s,
    op: Int64s,
    tail: Int32s,
    out_ptr: UInt32s,
    out: Int64s,
    pools: Int64s,
    q: np.int64,
    after: Int32s,
    share: Floats,
    work: Floats,
    now: np.int64,
) -> None:
    """Let the ops of pool q run at the lowest of their shares from `now` on."""
    v = pools[q, FIRST]
    while v >= 0:
        new, speed = 1.0, work[SPEED, v]
        for s in range(len(share)):
            new = min(new, share[s, v])
        if new != speed:
            work[LEFT, v] -= (now - op[v, SINCE]) * speed
            if op[v, START] < 0:
                op[v, FREED_BY] = pools[q, FREED] if op[v, SINCE] < now else -1
                _start(events, op, tail, out_ptr, out, v, now)
            work[SPEED, v], op[v, SINCE] = new, now
            left = max(work[LEFT, v] / new - EARLY, 0.0) if new > 0.0 else 0.0
            _put(events, op, v, now + np.int64(np.ceil(left)) if new > 0.0 else NEVER)
        v = np.int64(after[v])


@jit(
    f"void({_OPS}, {_OPS}, uint32[::1], {_OPS}, int32[::1], {_OPS}, {_OPS}, int64[::1], int32[:, ::1], int32[:, ::1], "
    "int32[::1], float64[:, ::1], float64[:, ::1], float64[:, ::1])",
    allocates=False,
)
def run(
    op: Int64s,
    events: Int64s,
    out_ptr: UInt32s,
    out: Int64s,
    tail: Int32s,
    syncs: Int64s,
    pools: Int64s,
    stack: Int64s,
    pool: Int32s,
    after: Int32s,
    priority: Int32s,
    demand: Floats,
    share: Floats,
    work: Floats,
) -> None:
    """Run all ops; those that wait for each other have no END.

    Scratch: `events` (n + 1, 2) and `stack` (pools + 1,), 0; `tail` (streams,) and `after` (kinds, n), -1; `share`
    (kinds, n), 1; `work` (2, n), 0. Of each kind of pool and op: which `pool` it uses (-1: none), and its `demand`.
    """
    for v in range(len(op)):
        if op[v, MISSING] == 0:
            _put(events, op, np.int64(v), np.int64(0))
    while events[0, 0] > 0 and events[1, 0] < NEVER:
        now, v = events[1, 0], _take(events, op)
        pooled = False
        if op[v, START] >= 0:
            _end(events, op, syncs, out_ptr, out, v, now)
            for s in range(len(pool)):
                if pool[s, v] >= 0:
                    _leave(pools, np.int64(pool[s, v]), after[s], v)
                    _look_again(pools, stack, np.int64(pool[s, v]))
        elif not _is_held(events, op, tail, syncs, v, now):
            for s in range(len(pool)):
                if pool[s, v] >= 0:
                    pooled = True
                    share[s, v] = 0.0
                    work[LEFT, v], op[v, SINCE] = op[v, DUR], now
                    _enter(op, pools, np.int64(pool[s, v]), after[s], priority, v)
                    _look_again(pools, stack, np.int64(pool[s, v]))
            if not pooled:
                _start(events, op, tail, out_ptr, out, v, now)
                _put(events, op, v, now + op[v, DUR])
        while stack[0] > 0 and (events[0, 0] == 0 or events[1, 0] > now):  # once all that happens now has happened
            q = stack[stack[0]]
            stack[0] -= 1
            pools[q, CHANGED] = 0
            s = pools[q, SHARED_AS]
            _share_out(pools, q, after[s], priority, demand[s], share[s])
            _adjust(events, op, tail, out_ptr, out, pools, q, after[s], share, work, now)
