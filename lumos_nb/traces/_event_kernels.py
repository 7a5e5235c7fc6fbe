"""Bytes of one JSON event to a row of integers, in one strict pass; strings become ids.

Whatever is not both valid JSON and usual (an id that is a float, a name with half a surrogate pair, ...) is not read:
functions return `-i - 1` then, as those of `_json_kernels` do.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lumos_nb._jit import jit
from lumos_nb.traces import _json_kernels
from lumos_nb.traces._json_kernels import (
    BACKSLASH,
    CLOSE,
    COLON,
    COMMA,
    MINUS,
    NULL,
    OPEN,
    OPEN_LIST,
    POINT,
    QUOTE,
    SMALL_E,
    SMALL_N,
    ZERO,
    Pointer,
    compact,
    copy,
    digits_end,
    key_end,
    letters,
    load,
    next_key,
    scalar_end,
    space_end,
    string_end,
    value_end,
    value_of_key,
    word_end,
    word_of,
)

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Table: TypeAlias = tuple[Pointer, Pointer, Pointer, Pointer]

# Columns of a row. `kinds` says what the value of `ints` is: none, a number, or the id of a string.
PH, CAT, NAME, PID, TID, DEVICE, STREAM, CORRELATION, EXTERNAL_ID, EXTERNAL_ID_2021, SEQUENCE, START, DUR = range(13)
EVENT_ID = 13
N_FIELDS = 14
ARGS, ATTR, OTHER = 14, 15, -1
NONE, NUMBER, STRING = 0, 1, 2

# What `scan` keeps between calls.
POSITION, ROWS, DROPPED, EVENTS, ARGS_SIZE, STRINGS, POOL_SIZE, GAP, JUNK, BEGIN, STOP, NEXT, NO_ROOM = range(13)
N_ARGS, ARGS_STOP, N_SLOTS, N_BOUNDS, N_POOL = range(13, 18)
VALUE, KIND = 18, 32  # of the event that is being read, a place for each field
SEEN, N_SEEN = 46, 512  # a table of the events that gave names
N_STATE = SEEN + 3 * N_SEEN

# Strings with an id from the start: phases that are kept, processes of the profiler's own rows, events that give names.
KEPT_PHASES = ("X", "i", "I", "B", "E")
PSEUDO_PROCESSES = ("", "Spans", "Traces")
NAMES = ("process_name", "process_labels", "thread_name")
KNOWN = (*KEPT_PHASES, *PSEUDO_PROCESSES, *NAMES, "M", "CPU functions")
N_KEPT, NO_TEXT, FIRST_NAME, NAMING, CPU_FUNCTIONS = 5, 5, 8, 11, 12

_USES = (_json_kernels,)
_LATEST_US = 2**62 // 1000
_PH, _TS, _CAT, _PID, _TID, _DUR = map(word_of, ("ph", "ts", "cat", "pid", "tid", "dur"))
_NAME, _ARGS, _ATTR, _DEVICE, _STREAM = map(word_of, ("name", "args", "attr", "device", "stream"))
_USUAL_PH, _USUAL_TS, _USUAL_NAME, _USUAL_ARGS = (word_of(f'"{key}":') for key in ("ph", "ts", "name", "args"))
_USUAL_CAT, _USUAL_PID, _USUAL_TID, _USUAL_DUR = (word_of(f'"{key}":') for key in ("cat", "pid", "tid", "dur"))
_CORRELATION = word_of("correlat"), word_of("relation")  # the first eight letters and the last
_EXTERNAL_ID = word_of("External"), word_of("ernal id")
_EXTERNAL_ID_2021 = word_of("external"), word_of("ernal id")
_SEQUENCE = word_of("Sequence"), word_of("e number")
_MIX = -7046029254386353131

# --- strings ----------------------------------------------------------------------------------------------------------


@jit("boolean(CPointer(uint8), int64, int64, int64, CPointer(int64), CPointer(uint8))", inline=True, uses=_USES)
def _is_string(text: Pointer, begin: int, stop: int, known: int, bounds: Pointer, pool: Pointer) -> bool:
    at, size = bounds[known], stop - begin
    if bounds[known + 1] - at != size:
        return False
    while size >= 8:
        if load(text, begin) != load(pool, at):
            return False
        begin, at, size = begin + 8, at + 8, size - 8
    return letters(text, begin, size) == letters(pool, at, size)


@jit("int64(CPointer(uint8), int64, int64)", inline=True, uses=_USES)
def _hash(text: Pointer, begin: int, stop: int) -> int:
    h = stop - begin
    while begin + 8 <= stop:
        h = (h ^ load(text, begin)) * _MIX
        h ^= h >> 32
        begin += 8
    h = (h ^ letters(text, begin, stop - begin)) * _MIX
    return (h ^ h >> 32) & 0x7FFFFFFF


TABLE = "Tuple((CPointer(int64), CPointer(int64), CPointer(uint8), CPointer(int64)))"


@jit(f"int64(CPointer(uint8), int64, int64, {TABLE})", uses=_USES)
def intern(text: Pointer, begin: int, stop: int, table: Table) -> int:
    """Id of the string text[begin:stop]; -1, and NO_ROOM, if it is new and there is no room for it.

    A table is its slots, of `hash << 32 | id + 1`, its bounds, its pool and the state of `scan`. The bytes of a string
    are pool[bounds[id]:bounds[id + 1]].
    """
    slots, bounds, pool, state = table
    tag = _hash(text, begin, stop)
    k = tag & (state[N_SLOTS] - 1)
    while slots[k]:
        if slots[k] >> 32 == tag:
            known = (slots[k] & 0xFFFFFFFF) - 1
            if _is_string(text, begin, stop, known, bounds, pool):
                return int(known)
        k = (k + 1) & (state[N_SLOTS] - 1)
    n, at = state[STRINGS], state[POOL_SIZE]
    if n + 2 > state[N_BOUNDS] or 2 * n > state[N_SLOTS] or at + stop - begin + 8 > state[N_POOL]:
        state[NO_ROOM] = 1
        return -1
    copy(text, begin, stop, pool, at)
    slots[k] = tag << 32 | n + 1
    bounds[n + 1] = at + stop - begin
    state[STRINGS], state[POOL_SIZE] = n + 1, at + stop - begin
    return int(n)


@jit("int64(uint8[::1], int64[::1], int64[::1], uint8[::1], int64[::1])", uses=_USES)
def id_of(text: Bytes, slots: Int64s, bounds: Int64s, pool: Bytes, state: Int64s) -> int:
    """`intern` for an array without its last eight bytes."""
    state[N_SLOTS], state[N_BOUNDS], state[N_POOL] = slots.size, bounds.size, pool.size
    return intern(text.ctypes, 0, text.size - 8, (slots.ctypes, bounds.ctypes, pool.ctypes, state.ctypes))


@jit("void(int64[::1], int64[::1])", uses=_USES)
def rehash(old: Int64s, slots: Int64s) -> None:
    """Put the entries of one table of `intern` into another, empty one."""
    for entry in old:
        if entry:
            k = (entry >> 32) & (slots.size - 1)
            while slots[k]:
                k = (k + 1) & (slots.size - 1)
            slots[k] = entry


# --- events -----------------------------------------------------------------------------------------------------------


@jit(f"int64(CPointer(uint8), int64, int64, {TABLE})", inline=True, uses=_USES)
def _read_text(text: Pointer, i: int, field: int, table: Table) -> int:
    """A string or null. Of phases and ids, those with escapes are odd."""
    state = table[3]
    if text[i] == SMALL_N and field != PH:
        state[KIND + field] = NONE
        return word_end(text, i, NULL, 4)
    if text[i] != QUOTE:
        return -i - 1
    end = string_end(text, i + 1)
    if end < 0:
        return end
    if field != NAME and field != CAT:
        for k in range(i, end):
            if text[k] == BACKSLASH:
                return -k - 1
    if field >= NAME or not _is_string(text, i + 1, end, state[VALUE + field], table[1], table[2]):  # the last event's
        known = intern(text, i + 1, end, table)
        if known < 0:
            return -i - 1
        state[VALUE + field] = known
    state[KIND + field] = STRING
    return end + 1


@jit(f"int64(CPointer(uint8), int64, int64, {TABLE})", inline=True, uses=_USES)
def _read_id(text: Pointer, i: int, field: int, table: Table) -> int:
    """An integer of up to 18 digits, a string or null."""
    state = table[3]
    if text[i] == QUOTE or text[i] == SMALL_N:
        return _read_text(text, i, field, table)
    first = i + (text[i] == MINUS)
    end = digits_end(text, first)
    if end < 0:
        return end
    if (
        end - first > 18
        or text[end] == POINT
        or text[end] | 0x20 == SMALL_E
        or (text[first] == ZERO and end > first + 1)
    ):
        return -i - 1
    number = 0
    for k in range(first, end):
        number = number * 10 + (text[k] - ZERO)
    state[VALUE + field] = -number if first > i else number
    state[KIND + field] = NUMBER
    return end


@jit("int64(CPointer(uint8), int64, int64, CPointer(int64))", inline=True, uses=_USES)
def _read_ns(text: Pointer, i: int, field: int, state: Pointer) -> int:
    """Plain decimal microseconds, to the nearest ns; or null."""
    if text[i] == SMALL_N:
        state[KIND + field] = NONE
        return word_end(text, i, NULL, 4)
    first = i + (text[i] == MINUS)
    end = digits_end(text, first)
    if end < 0:
        return end
    if end - first > 16 or (text[first] == ZERO and end > first + 1):
        return -i - 1
    ns = 0
    for k in range(first, end):
        ns = ns * 10 + (text[k] - ZERO)
    if ns >= _LATEST_US:
        return -i - 1
    ns *= 1000
    if text[end] == POINT:
        unit, begin = 100, end + 1
        end = digits_end(text, begin)
        if end < 0:
            return end
        for k in range(begin, min(end, begin + 3)):
            ns += (text[k] - ZERO) * unit
            unit //= 10
        ns += end > begin + 3 and text[begin + 3] >= ZERO + 5
    if text[end] | 0x20 == SMALL_E:
        return -i - 1
    state[VALUE + field] = -ns if first > i else ns
    state[KIND + field] = NUMBER
    return end


@jit("int64(CPointer(uint8), int64, int64)", inline=True, uses=_USES)
def _field_of_args(text: Pointer, begin: int, stop: int) -> int:
    size = stop - begin
    if size == 6:
        word = letters(text, begin, 6)
        return DEVICE if word == _DEVICE else STREAM if word == _STREAM else OTHER
    if size not in (11, 15):
        return OTHER
    ends = load(text, begin), load(text, stop - 8)
    if size == 15:
        return SEQUENCE if ends == _SEQUENCE else OTHER
    if ends == _CORRELATION:
        return CORRELATION
    return EXTERNAL_ID if ends == _EXTERNAL_ID else EXTERNAL_ID_2021 if ends == _EXTERNAL_ID_2021 else OTHER


@jit("int64(CPointer(uint8), int64, int64)", inline=True, uses=_USES)
def field_of_event(text: Pointer, begin: int, stop: int) -> int:
    """The column of an event's key text[begin:stop], or ARGS, ATTR or OTHER."""
    if stop - begin > 4:
        return OTHER
    word = letters(text, begin, stop - begin)
    if word in (_NAME, _ARGS, _ATTR):
        return NAME if word == _NAME else ARGS if word == _ARGS else ATTR
    if word in (_PID, _TID, _CAT):
        return PID if word == _PID else TID if word == _TID else CAT
    return PH if word == _PH else START if word == _TS else DUR if word == _DUR else OTHER


@jit("int64(CPointer(uint8), int64)", inline=True, uses=_USES)
def _usual_end(text: Pointer, i: int) -> int:
    """End of the key whose opening quote is at `i` if it is one of most events' and a colon follows, else -1.

    What this finds without looking for the end lets the processor go on before it has read the key.
    """
    word = load(text, i)
    if word & 0xFFFFFFFFFFFFFF in (_USUAL_NAME, _USUAL_ARGS):
        return i + 5
    if word & 0xFFFFFFFFFFFF in (_USUAL_PID, _USUAL_TID, _USUAL_CAT, _USUAL_DUR):
        return i + 4
    return i + 3 if word & 0xFFFFFFFFFF in (_USUAL_PH, _USUAL_TS) else -1


@jit(f"int64(CPointer(uint8), int64, CPointer(uint8), {TABLE})", inline=True, uses=_USES)
def _read_args(text: Pointer, i: int, to: Pointer, table: Table) -> int:
    """Read the object whose brace is at `i`, and copy it without the whitespace between its tokens."""
    state = table[3]
    for field in range(DEVICE, SEQUENCE + 1):
        state[KIND + field] = NONE
    if text[i] != OPEN:
        return -i - 1
    at = state[ARGS_SIZE] + 1
    to[at] = OPEN
    i = space_end(text, i + 1)
    while text[i] != CLOSE:
        key, end = i, key_end(text, i)
        if end < 0:
            return end
        field = _field_of_args(text, i + 1, end)
        i = begin = value_of_key(text, end)
        if i < 0:
            return i
        nested = text[begin] in (OPEN, OPEN_LIST)
        if field != OTHER:
            i = _read_id(text, i, field, table)
        else:
            i = value_end(text, i) if nested else scalar_end(text, i)
        if i < 0:
            return i
        if at + i - key + 32 > state[N_ARGS]:
            state[NO_ROOM] = 2
            return -i - 1
        at = copy(text, key, end + 1, to, at + 1)
        to[at] = COLON
        at = compact(text, begin, i, to, at + 1) if nested else copy(text, begin, i, to, at + 1)
        to[at] = COMMA
        i = next_key(text, i)
        if i < 0:
            return i
    at += to[at] == OPEN
    to[at] = CLOSE
    state[ARGS_STOP] = at + 1
    return i + 1


@jit(f"int64(CPointer(uint8), int64, CPointer(uint8), {TABLE})", inline=True, uses=_USES)
def read_event(text: Pointer, i: int, to: Pointer, table: Table) -> int:
    """Read the object whose brace is at `i`: its fields to `state`, its arguments behind those of the event before."""
    state = table[3]
    given = OTHER
    for field in range(N_FIELDS):
        state[KIND + field] = NONE
    state[ARGS_STOP] = 0
    i = space_end(text, i + 1)
    while text[i] != CLOSE:
        end = _usual_end(text, i)
        if end < 0:
            end = key_end(text, i)
        if end < 0:
            return end
        field = field_of_event(text, i + 1, end)
        i = value_of_key(text, end)
        if i < 0:
            return i
        if field == OTHER or (field == ATTR and given == ARGS):
            i = value_end(text, i)
        elif field in (START, DUR):
            i = _read_ns(text, i, field, state)
        elif field in (PID, TID):
            i = _read_id(text, i, field, table)
        elif field <= NAME:
            i = _read_text(text, i, field, table)
        else:
            i, given = _read_args(text, i, to, table), field
        if i >= 0:
            i = next_key(text, i)
        if i < 0:
            return i
    return i + 1
