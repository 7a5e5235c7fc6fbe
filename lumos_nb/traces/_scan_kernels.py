"""The list of events: one after the other, and on behind what is none."""

from __future__ import annotations

from lumos_nb._jit import jit
from lumos_nb.traces import _event_kernels, _json_kernels
from lumos_nb.traces._event_kernels import (
    ARGS_SIZE,
    ARGS_STOP,
    BEGIN,
    CAT,
    DROPPED,
    EVENT_ID,
    EVENTS,
    FIRST_NAME,
    GAP,
    JUNK,
    KIND,
    N_ARGS,
    N_BOUNDS,
    N_FIELDS,
    N_KEPT,
    N_POOL,
    N_SEEN,
    N_SLOTS,
    NAME,
    NAMING,
    NEXT,
    NO_ROOM,
    NO_TEXT,
    OTHER,
    PH,
    PID,
    POSITION,
    ROWS,
    SEEN,
    STOP,
    STRING,
    TID,
    VALUE,
    Bytes,
    Int64s,
    field_of_event,
    read_event,
)
from lumos_nb.traces._json_kernels import (
    BACKSLASH,
    CLOSE,
    CLOSE_LIST,
    COMMA,
    MAX_DEPTH,
    OPEN,
    OPEN_LIST,
    QUOTE,
    Pointer,
    key_end,
    space_end,
    value_end,
    value_of_key,
)

# Why `scan` returned: it needs more text, room, or a slower reader for text[BEGIN:STOP]; or the list is closed.
MORE_TEXT, MORE_ROOM, ODD, CLOSED = range(4)

AT_START, AFTER_EVENT, AFTER_COMMA, IN_JUNK = range(4)
_USES = (_event_kernels, _json_kernels)
_NEAR = 1 << 14  # bytes within which a broken event is looked for as a whole


@jit("int64(CPointer(uint8), int64, int64, boolean)", uses=_USES)
def _next_event(text: Pointer, i: int, end: int, anywhere: bool) -> int:
    """Where the next object starts whose first key is one of an event's; -1 if none does.

    Before it stands the end of another object, unless it may be `anywhere`.
    """
    before = False
    while i < end:
        c = text[i]
        if c == OPEN and (before or anywhere):
            quote = space_end(text, i + 1)
            stop = key_end(text, quote)
            if stop > 0 and field_of_event(text, quote + 1, stop) != OTHER and value_of_key(text, stop) > 0:
                return i
        if c > 32:
            before = c == CLOSE or (before and c == COMMA)
        i += 1
    return -1


@jit("int64(CPointer(uint8), int64, int64)", uses=_USES)
def _loose_end(text: Pointer, i: int, end: int) -> int:
    """Where the object ends whose brace is at `i`, by its brackets outside of strings alone.

    -1 if it does not end before `end`, or a bracket does not fit.
    """
    depth, objects, quoted = 0, 0, False
    while i < end:
        c = text[i]
        if c == BACKSLASH:
            i += 1
        elif c == QUOTE:
            quoted = not quoted
        elif quoted:
            pass
        elif c in (OPEN, OPEN_LIST):
            depth += 1
            if depth <= MAX_DEPTH:
                objects = objects << 1 | (c == OPEN)
        elif c in (CLOSE, CLOSE_LIST):
            if depth <= MAX_DEPTH:
                if objects & 1 != (c == CLOSE):
                    return -1
                objects >>= 1
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    return -1


@jit("int64(CPointer(uint8), int64, int64, boolean, CPointer(int64))", uses=_USES)
def _gap(text: Pointer, i: int, end: int, final: bool, state: Pointer) -> int:
    """Where the next object starts; -1 if more text is needed, -2 at the end of the list.

    Commas are passed; other text is counted as JUNK, a value or a run of no JSON each.
    """
    while True:
        i = space_end(text, i)
        state[POSITION] = i
        c = text[i]
        if i >= end:
            return -1
        if c == OPEN and state[GAP] != IN_JUNK:
            state[JUNK] += state[GAP] == AFTER_EVENT  # no comma
            state[GAP] = AFTER_COMMA
            return i
        if c == COMMA and state[GAP] != IN_JUNK:
            state[JUNK] += state[GAP] != AFTER_EVENT
            state[GAP] = AFTER_COMMA
            i += 1
            continue
        stop = -i - 1
        if state[GAP] != IN_JUNK:
            if c == CLOSE_LIST:
                after = space_end(text, i + 1)
                if text[after] == COMMA:
                    after = space_end(text, after + 1)
                if after >= end and not final:
                    return -1
                if after >= end or text[after] in (CLOSE, QUOTE):
                    return -2
            else:
                stop = value_end(text, i)
                if not final and max(stop, -stop - 1) >= end:
                    return -1
            state[JUNK] += 1
        if stop > 0:
            i, state[GAP] = stop, AFTER_EVENT
            continue
        start = _next_event(text, i, end, True)
        state[GAP] = AFTER_COMMA if start >= 0 else IN_JUNK
        i = start if start >= 0 else end if final else max(i, end - 64)
        if start < 0:
            state[POSITION] = i
            return -1


@jit("boolean(CPointer(uint8), int64, int64, int64, boolean, CPointer(int64))", uses=_USES)
def _is_odd(text: Pointer, i: int, bad: int, end: int, final: bool, state: Pointer) -> bool:
    """Find how far the object at `i` goes that is odd or broken at `bad`; whether there is text enough to say."""
    stop = value_end(text, i)
    state[BEGIN], state[STOP], state[NEXT] = i, stop, -1
    if stop > 0:  # valid JSON: what its arguments hold is no event, whatever it looks like
        return True
    if not final and -stop - 1 >= end:
        return False
    after = _next_event(text, bad, end, False)
    near = i + _NEAR
    stop = _loose_end(text, i, end if after < 0 else max(after, min(end, near)))
    if not final and stop < 0 and (after < 0 or end < near):
        return False
    state[STOP], state[NEXT] = stop, after
    return True


@jit("boolean(CPointer(int64))", uses=_USES)
def _is_new_name(state: Pointer) -> bool:
    """Whether the event names a process or thread, for the first time as far as a small table remembers."""
    name = state[VALUE + NAME] if state[KIND + NAME] else NO_TEXT
    if not FIRST_NAME <= name < NAMING:
        return False
    kinds = name << 4 | state[KIND + PID] << 2 | state[KIND + TID]
    pid, tid = state[VALUE + PID], state[VALUE + TID]
    at = SEEN + 3 * ((pid * 31 + tid * 7 + kinds) & (N_SEEN - 1))
    if state[at] == kinds and state[at + 1] == pid and state[at + 2] == tid:
        return False
    state[at], state[at + 1], state[at + 2] = kinds, pid, tid
    return True


@jit(
    "int64(uint8[::1], int64, boolean, int64[:, ::1], uint8[:, ::1], int64[::1], uint8[::1], "
    "int64[::1], int64[::1], uint8[::1], int64[::1])",
    allocates=False,
    uses=_USES,
)
def scan(
    text: Bytes,
    end: int,
    final: bool,
    ints: Int64s,
    kinds: Bytes,
    dropped: Int64s,
    args: Bytes,
    slots: Int64s,
    bounds: Int64s,
    pool: Bytes,
    state: Int64s,
) -> int:
    """Read events from state[POSITION] on until something is needed; what, is returned.

    A row is a column of `ints` and `kinds`; its arguments follow a line break in `args`. Events of other phases and of
    the profiler's own processes get an entry in `dropped`, of the ids of their phase and category.
    """
    state[N_SLOTS], state[N_BOUNDS], state[N_POOL], state[N_ARGS] = slots.size, bounds.size, pool.size, args.size
    while True:
        i = _gap(text.ctypes, state[POSITION], end, final, state.ctypes)
        if i < 0:
            return MORE_TEXT if i == -1 else CLOSED
        if state[ROWS] == ints.shape[1] or state[DROPPED] == dropped.size or state[ARGS_SIZE] + 32 > args.size:
            return MORE_ROOM
        stop = read_event(text.ctypes, i, args.ctypes, (slots.ctypes, bounds.ctypes, pool.ctypes, state.ctypes))
        if state[NO_ROOM]:
            return MORE_ROOM
        if stop < 0:
            bad = -stop - 1
            if bad >= end or not _is_odd(text.ctypes, i, bad, end, final, state.ctypes):
                return MORE_TEXT
            return ODD
        state[GAP] = AFTER_EVENT
        phase = state[VALUE + PH] if state[KIND + PH] else NO_TEXT
        if phase == NAMING and _is_new_name(state.ctypes):
            state[BEGIN], state[STOP], state[NEXT] = i, stop, -1
            return ODD
        state[POSITION] = stop
        if phase >= N_KEPT or (state[KIND + PID] == STRING and NO_TEXT <= state[VALUE + PID] < FIRST_NAME):
            dropped[state[DROPPED]] = phase << 32 | (state[VALUE + CAT] + 1 if state[KIND + CAT] else 0)
            state[DROPPED] += 1
        else:
            n, at = state[ROWS], state[ARGS_SIZE]
            state[VALUE + EVENT_ID] = state[EVENTS]
            for field in range(N_FIELDS):
                ints[field, n] = state[VALUE + field]
                kinds[field, n] = state[KIND + field]
            args[at] = 10
            if not state[ARGS_STOP]:
                args[at + 1], args[at + 2], state[ARGS_STOP] = OPEN, CLOSE, at + 3
            state[ARGS_SIZE], state[ROWS] = state[ARGS_STOP], n + 1
        state[EVENTS] += 1
