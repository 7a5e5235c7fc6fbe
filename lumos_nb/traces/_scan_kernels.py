"""Bytes of JSON events to rows of integers, in one strict pass.

Whatever is not both valid JSON and usual (an id that is a float, a name with half a surrogate pair, ...) is not read
here but handed back as a span of text. Functions that read a piece of text return where it ends, or `-i - 1` if the
byte at `i` is not what must stand there. Text ends with a zero byte, which no JSON has: nothing is read beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic

from lumos_nb._jit import jit

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
Pointer: TypeAlias = Any
Table: TypeAlias = tuple[Pointer, Pointer, Pointer, Pointer]

# Columns of a row. `kinds` says what the value of `ints` is: none, a number, or the id of a string.
PH, CAT, NAME, PID, TID, DEVICE, STREAM, CORRELATION, EXTERNAL_ID, EXTERNAL_ID_2021, SEQUENCE, START, DUR = range(13)
EVENT_ID = 13
N_FIELDS = 14
ARGS, ATTR, OTHER = 14, 15, -1
NONE, NUMBER, STRING = 0, 1, 2

# What `scan` keeps between calls.
POSITION, ROWS, DROPPED, EVENTS, ARGS_SIZE, STRINGS, POOL_SIZE, GAP, JUNK, BEGIN, STOP, NEXT, NO_ROOM = range(13)
_N_ARGS, _ARGS_STOP, _N_SLOTS, _N_BOUNDS, _N_POOL = range(13, 18)
_VALUE, _KIND = 18, 32  # of the event that is being read, a place for each field
_SEEN, _N_SEEN = 46, 512  # a table of the events that gave names
N_STATE = _SEEN + 3 * _N_SEEN

# Why `scan` returned: it needs more text, room, or a slower reader for text[BEGIN:STOP]; or the list is closed.
MORE_TEXT, MORE_ROOM, ODD, CLOSED = range(4)

# Strings with an id from the start: phases that are kept, processes of the profiler's own rows, events that give names.
KEPT_PHASES = ("X", "i", "I", "B", "E")
PSEUDO_PROCESSES = ("", "Spans", "Traces")
NAMES = ("process_name", "process_labels", "thread_name")
KNOWN = (*KEPT_PHASES, *PSEUDO_PROCESSES, *NAMES, "M", "CPU functions")
N_KEPT, NO_TEXT, FIRST_NAME, NAMING, CPU_FUNCTIONS = 5, 5, 8, 11, 12

AT_START, AFTER_EVENT, AFTER_COMMA, IN_JUNK = range(4)
_NEAR = 1 << 14  # bytes within which a broken event is looked for as a whole
_MAX_DEPTH = 60
_LATEST_US = 2**62 // 1000
_QUOTE, _BACKSLASH, _COMMA, _COLON, _MINUS, _PLUS, _POINT, _ZERO, _NINE = (ord(c) for c in '"\\,:-+.09')
_OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = (ord(c) for c in "{}[]")
_E, _F, _N, _T, _U = (ord(c) for c in "efntu")
_ESCAPED = np.array([chr(c) in '"\\/bfnrt' for c in range(256)])
_HEX = np.array([int(chr(c), 16) if chr(c) in "0123456789abcdefABCDEF" else -1 for c in range(256)], np.int64)


def _word(text: str) -> int:
    """Up to eight letters as the integer that they are in memory."""
    return int.from_bytes(text.encode(), "little")


_TRUE, _FALSE, _NULL = _word("true"), _word("false"), _word("null")
_PH, _TS, _CAT, _PID, _TID, _DUR = _word("ph"), _word("ts"), _word("cat"), _word("pid"), _word("tid"), _word("dur")
_NAME, _ARGS, _ATTR, _DEVICE, _STREAM = _word("name"), _word("args"), _word("attr"), _word("device"), _word("stream")
_USUAL_PH, _USUAL_TS, _USUAL_NAME, _USUAL_ARGS = (_word(f'"{key}":') for key in ("ph", "ts", "name", "args"))
_USUAL_CAT, _USUAL_PID, _USUAL_TID, _USUAL_DUR = (_word(f'"{key}":') for key in ("cat", "pid", "tid", "dur"))
_CORRELATION = _word("correlat"), _word("relation")  # the first eight letters and the last
_EXTERNAL_ID = _word("External"), _word("ernal id")
_EXTERNAL_ID_2021 = _word("external"), _word("ernal id")
_SEQUENCE = _word("Sequence"), _word("e number")
_EACH, _TOP = 0x0101010101010101, -0x7F7F7F7F7F7F7F80  # the lowest and the highest bit of eight bytes
_QUOTES, _BACKSLASHES, _SPACES = _EACH * _QUOTE, _EACH * _BACKSLASH, _EACH * 32
_MIX = -7046029254386353131

# --- eight bytes at a time --------------------------------------------------------------------------------------------


def _loaded(_: Any, text: Any, i: Any) -> Any:
    """The eight bytes from `i` on, as an integer."""

    def generated(context: Any, builder: Any, _: Any, args: Any) -> Any:
        word = context.get_value_type(types.int64)
        return builder.load(builder.bitcast(builder.gep(args[0], [args[1]]), word.as_pointer()), align=1)

    return types.int64(text, i), generated


def _stored(_: Any, text: Any, i: Any, word: Any) -> Any:
    """Put eight bytes."""

    def generated(context: Any, builder: Any, _: Any, args: Any) -> Any:
        place = builder.gep(args[0], [args[1]])
        builder.store(args[2], builder.bitcast(place, args[2].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(text, i, word), generated


def _found(_: Any, word: Any) -> Any:
    """Which byte has the lowest bit of `word` that is set."""

    def generated(context: Any, builder: Any, _: Any, args: Any) -> Any:
        bit = builder.cttz(args[0], context.get_constant(types.boolean, 1))
        return builder.lshr(bit, context.get_constant(types.int64, 3))

    return types.int64(word), generated


_load = cast("Callable[[Pointer, int], int]", intrinsic(_loaded))
_store = cast("Callable[[Pointer, int, int], None]", intrinsic(_stored))
_first = cast("Callable[[int], int]", intrinsic(_found))


@jit("int64(CPointer(uint8), int64, int64)", inline=True)
def _letters(text: Pointer, i: int, size: int) -> int:
    """The `size` bytes from `i` on, fewer than eight."""
    return int(_load(text, i) & ((1 << 8 * size) - 1))


@jit("int64(CPointer(uint8), int64, int64, CPointer(uint8), int64)", inline=True)
def _copy(text: Pointer, i: int, stop: int, to: Pointer, at: int) -> int:
    """Copy text[i:stop], and what follows up to a multiple of eight bytes; where the copy ends."""
    end = at + stop - i
    while at < end:
        _store(to, at, _load(text, i))
        at, i = at + 8, i + 8
    return end


# --- JSON -------------------------------------------------------------------------------------------------------------


@jit("int64(CPointer(uint8), int64)", inline=True)
def space_end(text: Pointer, i: int) -> int:
    while text[i] <= 32 and (text[i] == 32 or text[i] == 10 or text[i] == 13 or text[i] == 9):
        i += 1
    return i


@jit("int64(CPointer(uint8), int64)")
def _hex4(text: Pointer, i: int) -> int:
    """Value of four hexadecimal digits, or `-k - 1`."""
    value = 0
    for k in range(i, i + 4):
        digit = _HEX[text[k]]
        if digit < 0:
            return -k - 1
        value = value * 16 + digit
    return value


@jit("int64(CPointer(uint8), int64)")
def _escape_end(text: Pointer, i: int) -> int:
    if _ESCAPED[text[i + 1]]:
        return i + 2
    if text[i + 1] != _U:
        return -i - 2
    high = _hex4(text, i + 2)
    if high < 0 or high < 0xD800 or high >= 0xE000:
        return high if high < 0 else i + 6
    if text[i + 6] != _BACKSLASH:
        return -i - 7
    if text[i + 7] != _U:
        return -i - 8
    low = _hex4(text, i + 8)
    if low < 0:
        return low
    return i + 12 if high < 0xDC00 <= low < 0xE000 else -i - 1


@jit("int64(CPointer(uint8), int64)")
def _utf8_end(text: Pointer, i: int) -> int:
    """End of one character of two to four bytes: the shortest form, no surrogate, nothing beyond U+10FFFF."""
    c, low, high = text[i], 0x80, 0xBF
    if c < 0xC2 or c > 0xF4:
        return -i - 1
    if c == 0xE0:
        low = 0xA0
    elif c == 0xED:
        high = 0x9F
    elif c == 0xF0:
        low = 0x90
    elif c == 0xF4:
        high = 0x8F
    for k in range(i + 1, i + (2 if c < 0xE0 else 3 if c < 0xF0 else 4)):
        if text[k] < low or text[k] > high:
            return -k - 1
        low, high, i = 0x80, 0xBF, k
    return i + 1


@jit("int64(int64)", inline=True)
def _special(word: int) -> int:
    """A bit in the first of eight bytes that is a quote, a backslash, a control character or beyond ASCII, if any is.

    Bytes after that one may have theirs too.
    """
    quote, slash = word ^ _QUOTES, word ^ _BACKSLASHES
    return (((quote - _EACH) & ~quote) | ((slash - _EACH) & ~slash) | ((word - _SPACES) & ~word) | word) & _TOP


@jit("int64(CPointer(uint8), int64)", inline=True)
def string_end(text: Pointer, i: int) -> int:
    """Where the closing quote of the string is whose first character is at `i`."""
    while True:
        special = _special(_load(text, i))
        while special == 0:
            i += 8
            special = _special(_load(text, i))
        i += _first(special)
        c = text[i]
        if c == _QUOTE:
            return i
        if c == _BACKSLASH:
            i = _escape_end(text, i)
        elif c >= 0x80:
            i = _utf8_end(text, i)
        else:
            return -i - 1
        if i < 0:
            return i


@jit("int64(CPointer(uint8), int64)", inline=True)
def _digits_end(text: Pointer, i: int) -> int:
    if text[i] < _ZERO or text[i] > _NINE:
        return -i - 1
    while _ZERO <= text[i] <= _NINE:
        i += 1
    return i


@jit("int64(CPointer(uint8), int64)", inline=True)
def _number_end(text: Pointer, i: int) -> int:
    if text[i] == _MINUS:
        i += 1
    zero = text[i] == _ZERO
    end = _digits_end(text, i)
    if end < 0 or (zero and end > i + 1):
        return end if end < 0 else -i - 2
    if text[end] == _POINT:
        end = _digits_end(text, end + 1)
        if end < 0:
            return end
    if text[end] | 0x20 == _E:
        end += 1
        if text[end] == _PLUS or text[end] == _MINUS:
            end += 1
        end = _digits_end(text, end)
    return end


@jit("int64(CPointer(uint8), int64, int64, int64)", inline=True)
def _word_end(text: Pointer, i: int, word: int, size: int) -> int:
    wrong = _letters(text, i, size) ^ word
    return -i - _first(wrong) - 1 if wrong else i + size


@jit("int64(CPointer(uint8), int64)", inline=True)
def _scalar_end(text: Pointer, i: int) -> int:
    c = text[i]
    if c == _QUOTE:
        end = string_end(text, i + 1)
        return end if end < 0 else end + 1
    if c == _T:
        return _word_end(text, i, _TRUE, 4)
    if c == _F:
        return _word_end(text, i, _FALSE, 5)
    if c == _N:
        return _word_end(text, i, _NULL, 4)
    return _number_end(text, i)


@jit("int64(CPointer(uint8), int64)", inline=True)
def _value_of_key(text: Pointer, i: int) -> int:
    """Where the value starts whose key ends at the quote at `i`."""
    i = space_end(text, i + 1)
    return space_end(text, i + 1) if text[i] == _COLON else -i - 1


@jit("int64(CPointer(uint8), int64)")
def value_end(text: Pointer, i: int) -> int:
    depth, objects = 0, 0  # a bit for each open bracket: whether it is an object's
    while True:
        c = text[i]
        if c in (_OPEN, _OPEN_LIST):
            depth, objects = depth + 1, objects << 1 | (c == _OPEN)
            if depth > _MAX_DEPTH:
                return -i - 1
            i = space_end(text, i + 1)
            opened = text[i] != c + 2  # a closing bracket is two codes after the opening one
        else:
            i = _scalar_end(text, i)
            if i < 0:
                return i
            opened = False
        while not opened:
            if depth == 0:
                return i
            i = space_end(text, i)
            if text[i] == (_CLOSE if objects & 1 else _CLOSE_LIST):
                depth, objects, i = depth - 1, objects >> 1, i + 1
            elif text[i] == _COMMA:
                i = space_end(text, i + 1)
                opened = True
            else:
                return -i - 1
        if objects & 1:
            if text[i] != _QUOTE:
                return -i - 1
            i = string_end(text, i + 1)
            if i >= 0:
                i = _value_of_key(text, i)
            if i < 0:
                return i


@jit("int64(CPointer(uint8), int64, int64, CPointer(uint8), int64)")
def compact(text: Pointer, i: int, stop: int, to: Pointer, at: int) -> int:
    """Copy valid JSON without the whitespace between its tokens; where the copy ends."""
    quoted = False
    while i < stop:
        c = text[i]
        to[at] = c
        if c == _BACKSLASH:
            to[at + 1] = text[i + 1]
            at, i = at + 2, i + 2
            continue
        quoted ^= c == _QUOTE
        at += quoted | (c > 32)
        i += 1
    return at


# --- strings ----------------------------------------------------------------------------------------------------------


@jit("boolean(CPointer(uint8), int64, int64, int64, CPointer(int64), CPointer(uint8))", inline=True)
def _is_string(text: Pointer, begin: int, stop: int, known: int, bounds: Pointer, pool: Pointer) -> bool:
    at, size = bounds[known], stop - begin
    if bounds[known + 1] - at != size:
        return False
    while size >= 8:
        if _load(text, begin) != _load(pool, at):
            return False
        begin, at, size = begin + 8, at + 8, size - 8
    return _letters(text, begin, size) == _letters(pool, at, size)


@jit("int64(CPointer(uint8), int64, int64)", inline=True)
def _hash(text: Pointer, begin: int, stop: int) -> int:
    h = stop - begin
    while begin + 8 <= stop:
        h = (h ^ _load(text, begin)) * _MIX
        h ^= h >> 32
        begin += 8
    h = (h ^ _letters(text, begin, stop - begin)) * _MIX
    return (h ^ h >> 32) & 0x7FFFFFFF


_TABLE = "Tuple((CPointer(int64), CPointer(int64), CPointer(uint8), CPointer(int64)))"


@jit(f"int64(CPointer(uint8), int64, int64, {_TABLE})")
def intern(text: Pointer, begin: int, stop: int, table: Table) -> int:
    """Id of the string text[begin:stop]; -1, and NO_ROOM, if it is new and there is no room for it.

    A table is its slots, of `hash << 32 | id + 1`, its bounds, its pool and the state of `scan`. The bytes of a string
    are pool[bounds[id]:bounds[id + 1]].
    """
    slots, bounds, pool, state = table
    tag = _hash(text, begin, stop)
    k = tag & (state[_N_SLOTS] - 1)
    while slots[k]:
        if slots[k] >> 32 == tag:
            known = (slots[k] & 0xFFFFFFFF) - 1
            if _is_string(text, begin, stop, known, bounds, pool):
                return int(known)
        k = (k + 1) & (state[_N_SLOTS] - 1)
    n, at = state[STRINGS], state[POOL_SIZE]
    if n + 2 > state[_N_BOUNDS] or 2 * n > state[_N_SLOTS] or at + stop - begin + 8 > state[_N_POOL]:
        state[NO_ROOM] = 1
        return -1
    _copy(text, begin, stop, pool, at)
    slots[k] = tag << 32 | n + 1
    bounds[n + 1] = at + stop - begin
    state[STRINGS], state[POOL_SIZE] = n + 1, at + stop - begin
    return int(n)


@jit("int64(uint8[::1], int64[::1], int64[::1], uint8[::1], int64[::1])")
def id_of(text: Bytes, slots: Int64s, bounds: Int64s, pool: Bytes, state: Int64s) -> int:
    """`intern` for an array without its last eight bytes."""
    state[_N_SLOTS], state[_N_BOUNDS], state[_N_POOL] = slots.size, bounds.size, pool.size
    return intern(text.ctypes, 0, text.size - 8, (slots.ctypes, bounds.ctypes, pool.ctypes, state.ctypes))


@jit("void(int64[::1], int64[::1])")
def rehash(old: Int64s, slots: Int64s) -> None:
    """Put the entries of one table of `intern` into another, empty one."""
    for entry in old:
        if entry:
            k = (entry >> 32) & (slots.size - 1)
            while slots[k]:
                k = (k + 1) & (slots.size - 1)
            slots[k] = entry


# --- events -----------------------------------------------------------------------------------------------------------


@jit(f"int64(CPointer(uint8), int64, int64, {_TABLE})", inline=True)
def _read_text(text: Pointer, i: int, field: int, table: Table) -> int:
    """A string or null. Of phases and ids, those with escapes are odd."""
    state = table[3]
    if text[i] == _N and field != PH:
        state[_KIND + field] = NONE
        return _word_end(text, i, _NULL, 4)
    if text[i] != _QUOTE:
        return -i - 1
    end = string_end(text, i + 1)
    if end < 0:
        return end
    if field != NAME and field != CAT:
        for k in range(i, end):
            if text[k] == _BACKSLASH:
                return -k - 1
    if field >= NAME or not _is_string(text, i + 1, end, state[_VALUE + field], table[1], table[2]):  # the last event's
        known = intern(text, i + 1, end, table)
        if known < 0:
            return -i - 1
        state[_VALUE + field] = known
    state[_KIND + field] = STRING
    return end + 1


@jit(f"int64(CPointer(uint8), int64, int64, {_TABLE})", inline=True)
def _read_id(text: Pointer, i: int, field: int, table: Table) -> int:
    """An integer of up to 18 digits, a string or null."""
    state = table[3]
    if text[i] == _QUOTE or text[i] == _N:
        return _read_text(text, i, field, table)
    first = i + (text[i] == _MINUS)
    end = _digits_end(text, first)
    if end < 0:
        return end
    if end - first > 18 or text[end] == _POINT or text[end] | 0x20 == _E or (text[first] == _ZERO and end > first + 1):
        return -i - 1
    number = 0
    for k in range(first, end):
        number = number * 10 + (text[k] - _ZERO)
    state[_VALUE + field] = -number if first > i else number
    state[_KIND + field] = NUMBER
    return end


@jit("int64(CPointer(uint8), int64, int64, CPointer(int64))", inline=True)
def _read_ns(text: Pointer, i: int, field: int, state: Pointer) -> int:
    """Plain decimal microseconds, to the nearest ns; or null."""
    if text[i] == _N:
        state[_KIND + field] = NONE
        return _word_end(text, i, _NULL, 4)
    first = i + (text[i] == _MINUS)
    end = _digits_end(text, first)
    if end < 0:
        return end
    if end - first > 16 or (text[first] == _ZERO and end > first + 1):
        return -i - 1
    ns = 0
    for k in range(first, end):
        ns = ns * 10 + (text[k] - _ZERO)
    if ns >= _LATEST_US:
        return -i - 1
    ns *= 1000
    if text[end] == _POINT:
        unit, begin = 100, end + 1
        end = _digits_end(text, begin)
        if end < 0:
            return end
        for k in range(begin, min(end, begin + 3)):
            ns += (text[k] - _ZERO) * unit
            unit //= 10
        ns += end > begin + 3 and text[begin + 3] >= _ZERO + 5
    if text[end] | 0x20 == _E:
        return -i - 1
    state[_VALUE + field] = -ns if first > i else ns
    state[_KIND + field] = NUMBER
    return end


@jit("int64(CPointer(uint8), int64, int64)", inline=True)
def _field_of_args(text: Pointer, begin: int, stop: int) -> int:
    size = stop - begin
    if size == 6:
        word = _letters(text, begin, 6)
        return DEVICE if word == _DEVICE else STREAM if word == _STREAM else OTHER
    if size not in (11, 15):
        return OTHER
    ends = _load(text, begin), _load(text, stop - 8)
    if size == 15:
        return SEQUENCE if ends == _SEQUENCE else OTHER
    if ends == _CORRELATION:
        return CORRELATION
    return EXTERNAL_ID if ends == _EXTERNAL_ID else EXTERNAL_ID_2021 if ends == _EXTERNAL_ID_2021 else OTHER


@jit("int64(CPointer(uint8), int64, int64)", inline=True)
def _field_of_event(text: Pointer, begin: int, stop: int) -> int:
    if stop - begin > 4:
        return OTHER
    word = _letters(text, begin, stop - begin)
    if word in (_NAME, _ARGS, _ATTR):
        return NAME if word == _NAME else ARGS if word == _ARGS else ATTR
    if word in (_PID, _TID, _CAT):
        return PID if word == _PID else TID if word == _TID else CAT
    return PH if word == _PH else START if word == _TS else DUR if word == _DUR else OTHER


@jit("int64(CPointer(uint8), int64)", inline=True)
def _usual_end(text: Pointer, i: int) -> int:
    """End of the key whose opening quote is at `i` if it is one of most events' and a colon follows, else -1.

    What this finds without looking for the end lets the processor go on before it has read the key.
    """
    word = _load(text, i)
    if word & 0xFFFFFFFFFFFFFF in (_USUAL_NAME, _USUAL_ARGS):
        return i + 5
    if word & 0xFFFFFFFFFFFF in (_USUAL_PID, _USUAL_TID, _USUAL_CAT, _USUAL_DUR):
        return i + 4
    return i + 3 if word & 0xFFFFFFFFFF in (_USUAL_PH, _USUAL_TS) else -1


@jit("int64(CPointer(uint8), int64)", inline=True)
def _key_end(text: Pointer, i: int) -> int:
    """End of a key without escapes whose opening quote is at `i`."""
    if text[i] != _QUOTE:
        return -i - 1
    i += 1
    while True:
        special = _special(_load(text, i))
        while special == 0:
            i += 8
            special = _special(_load(text, i))
        i += _first(special)
        if text[i] < 0x80:
            return i if text[i] == _QUOTE else -i - 1
        i = _utf8_end(text, i)
        if i < 0:
            return i


@jit("int64(CPointer(uint8), int64)", inline=True)
def _next_key(text: Pointer, i: int) -> int:
    """Past the comma that a further key follows, or at the brace that closes the object."""
    i = space_end(text, i)
    if text[i] == _CLOSE:
        return i
    if text[i] != _COMMA:
        return -i - 1
    i = space_end(text, i + 1)
    return i if text[i] == _QUOTE else -i - 1


@jit(f"int64(CPointer(uint8), int64, CPointer(uint8), {_TABLE})", inline=True)
def _read_args(text: Pointer, i: int, to: Pointer, table: Table) -> int:
    """Read the object whose brace is at `i`, and copy it without the whitespace between its tokens."""
    state = table[3]
    for field in range(DEVICE, SEQUENCE + 1):
        state[_KIND + field] = NONE
    if text[i] != _OPEN:
        return -i - 1
    at = state[ARGS_SIZE] + 1
    to[at] = _OPEN
    i = space_end(text, i + 1)
    while text[i] != _CLOSE:
        key, end = i, _key_end(text, i)
        if end < 0:
            return end
        field = _field_of_args(text, i + 1, end)
        i = begin = _value_of_key(text, end)
        if i < 0:
            return i
        nested = text[begin] in (_OPEN, _OPEN_LIST)
        if field != OTHER:
            i = _read_id(text, i, field, table)
        else:
            i = value_end(text, i) if nested else _scalar_end(text, i)
        if i < 0:
            return i
        if at + i - key + 32 > state[_N_ARGS]:
            state[NO_ROOM] = 2
            return -i - 1
        at = _copy(text, key, end + 1, to, at + 1)
        to[at] = _COLON
        at = compact(text, begin, i, to, at + 1) if nested else _copy(text, begin, i, to, at + 1)
        to[at] = _COMMA
        i = _next_key(text, i)
        if i < 0:
            return i
    at += to[at] == _OPEN
    to[at] = _CLOSE
    state[_ARGS_STOP] = at + 1
    return i + 1


@jit(f"int64(CPointer(uint8), int64, CPointer(uint8), {_TABLE})", inline=True)
def _read_event(text: Pointer, i: int, to: Pointer, table: Table) -> int:
    """Read the object whose brace is at `i`: its fields to `state`, its arguments behind those of the event before."""
    state = table[3]
    given = OTHER
    for field in range(N_FIELDS):
        state[_KIND + field] = NONE
    state[_ARGS_STOP] = 0
    i = space_end(text, i + 1)
    while text[i] != _CLOSE:
        end = _usual_end(text, i)
        if end < 0:
            end = _key_end(text, i)
        if end < 0:
            return end
        field = _field_of_event(text, i + 1, end)
        i = _value_of_key(text, end)
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
            i = _next_key(text, i)
        if i < 0:
            return i
    return i + 1


# --- the list ---------------------------------------------------------------------------------------------------------


@jit("int64(CPointer(uint8), int64, int64, boolean)")
def _next_event(text: Pointer, i: int, end: int, anywhere: bool) -> int:
    """Where the next object starts whose first key is one of an event's; -1 if none does.

    Before it stands the end of another object, unless it may be `anywhere`.
    """
    before = False
    while i < end:
        c = text[i]
        if c == _OPEN and (before or anywhere):
            quote = space_end(text, i + 1)
            stop = _key_end(text, quote)
            if stop > 0 and _field_of_event(text, quote + 1, stop) != OTHER and _value_of_key(text, stop) > 0:
                return i
        if c > 32:
            before = c == _CLOSE or (before and c == _COMMA)
        i += 1
    return -1


@jit("int64(CPointer(uint8), int64, int64)")
def _loose_end(text: Pointer, i: int, end: int) -> int:
    """Where the object ends whose brace is at `i`, by its brackets outside of strings alone.

    -1 if it does not end before `end`, or a bracket does not fit.
    """
    depth, objects, quoted = 0, 0, False
    while i < end:
        c = text[i]
        if c == _BACKSLASH:
            i += 1
        elif c == _QUOTE:
            quoted = not quoted
        elif quoted:
            pass
        elif c in (_OPEN, _OPEN_LIST):
            depth, objects = depth + 1, objects << 1 | (c == _OPEN)
        elif c in (_CLOSE, _CLOSE_LIST):
            if depth <= _MAX_DEPTH and objects & 1 != (c == _CLOSE):
                return -1
            depth, objects = depth - 1, objects >> 1
            if depth == 0:
                return i + 1
        i += 1
    return -1


@jit("int64(CPointer(uint8), int64, int64, boolean, CPointer(int64))")
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
        if c == _OPEN and state[GAP] != IN_JUNK:
            state[JUNK] += state[GAP] == AFTER_EVENT  # no comma
            state[GAP] = AFTER_COMMA
            return i
        if c == _COMMA and state[GAP] != IN_JUNK:
            state[JUNK] += state[GAP] != AFTER_EVENT
            state[GAP] = AFTER_COMMA
            i += 1
            continue
        stop = -i - 1
        if state[GAP] != IN_JUNK:
            if c == _CLOSE_LIST:
                after = space_end(text, i + 1)
                if text[after] == _COMMA:
                    after = space_end(text, after + 1)
                if after >= end and not final:
                    return -1
                if after >= end or text[after] in (_CLOSE, _QUOTE):
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


@jit("boolean(CPointer(uint8), int64, int64, int64, boolean, CPointer(int64))")
def _is_odd(text: Pointer, i: int, bad: int, end: int, final: bool, state: Pointer) -> bool:
    """Find how far the object at `i` goes that is broken at `bad`; whether there is text enough to say."""
    after = _next_event(text, bad, end, False)
    near = i + _NEAR
    stop = _loose_end(text, i, end if after < 0 else max(after, min(end, near)))
    if not final and stop < 0 and (after < 0 or end < near):
        return False
    state[BEGIN], state[STOP], state[NEXT] = i, stop, after
    return True


@jit("boolean(CPointer(int64))")
def _is_new_name(state: Pointer) -> bool:
    """Whether the event names a process or thread, for the first time as far as a small table remembers."""
    name = state[_VALUE + NAME] if state[_KIND + NAME] else NO_TEXT
    if not FIRST_NAME <= name < NAMING:
        return False
    kinds = name << 4 | state[_KIND + PID] << 2 | state[_KIND + TID]
    pid, tid = state[_VALUE + PID], state[_VALUE + TID]
    at = _SEEN + 3 * ((pid * 31 + tid * 7 + kinds) & (_N_SEEN - 1))
    if state[at] == kinds and state[at + 1] == pid and state[at + 2] == tid:
        return False
    state[at], state[at + 1], state[at + 2] = kinds, pid, tid
    return True


@jit(
    "int64(uint8[::1], int64, boolean, int64[:, ::1], uint8[:, ::1], int64[::1], uint8[::1], "
    "int64[::1], int64[::1], uint8[::1], int64[::1])",
    allocates=False,
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
    state[_N_SLOTS], state[_N_BOUNDS], state[_N_POOL], state[_N_ARGS] = slots.size, bounds.size, pool.size, args.size
    while True:
        i = _gap(text.ctypes, state[POSITION], end, final, state.ctypes)
        if i < 0:
            return MORE_TEXT if i == -1 else CLOSED
        if state[ROWS] == ints.shape[1] or state[DROPPED] == dropped.size or state[ARGS_SIZE] + 32 > args.size:
            return MORE_ROOM
        stop = _read_event(text.ctypes, i, args.ctypes, (slots.ctypes, bounds.ctypes, pool.ctypes, state.ctypes))
        if state[NO_ROOM]:
            return MORE_ROOM
        if stop < 0:
            bad = -stop - 1
            if bad >= end or not _is_odd(text.ctypes, i, bad, end, final, state.ctypes):
                return MORE_TEXT
            return ODD
        state[GAP] = AFTER_EVENT
        phase = state[_VALUE + PH] if state[_KIND + PH] else NO_TEXT
        if phase == NAMING and _is_new_name(state.ctypes):
            state[BEGIN], state[STOP], state[NEXT] = i, stop, -1
            return ODD
        state[POSITION] = stop
        if phase >= N_KEPT or (state[_KIND + PID] == STRING and NO_TEXT <= state[_VALUE + PID] < FIRST_NAME):
            dropped[state[DROPPED]] = phase << 32 | (state[_VALUE + CAT] + 1 if state[_KIND + CAT] else 0)
            state[DROPPED] += 1
        else:
            n, at = state[ROWS], state[ARGS_SIZE]
            state[_VALUE + EVENT_ID] = state[EVENTS]
            for field in range(N_FIELDS):
                ints[field, n] = state[_VALUE + field]
                kinds[field, n] = state[_KIND + field]
            args[at] = 10
            if not state[_ARGS_STOP]:
                args[at + 1], args[at + 2], state[_ARGS_STOP] = _OPEN, _CLOSE, at + 3
            state[ARGS_SIZE], state[ROWS] = state[_ARGS_STOP], n + 1
        state[EVENTS] += 1
