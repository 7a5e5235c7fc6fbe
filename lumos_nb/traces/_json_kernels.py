"""JSON in memory: where its tokens end, eight bytes at a time.

Functions that read a piece of text return where it ends, or `-i - 1` if the byte at `i` is not what must stand there.
Text ends with a zero byte, which no JSON has: what follows it is loaded, but not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
from numba import types
from numba.extending import intrinsic

from lumos_nb._jit import jit

Pointer: TypeAlias = Any

MAX_DEPTH = 60  # of brackets in brackets
QUOTE, BACKSLASH, COMMA, COLON, MINUS, PLUS, POINT, ZERO, _NINE = (ord(c) for c in '"\\,:-+.09')
OPEN, CLOSE, OPEN_LIST, CLOSE_LIST = (ord(c) for c in "{}[]")
SMALL_E, _F, SMALL_N, _T, _U = (ord(c) for c in "efntu")
_ESCAPED = np.array([chr(c) in '"\\/bfnrt' for c in range(256)])
_HEX = np.array([int(chr(c), 16) if chr(c) in "0123456789abcdefABCDEF" else -1 for c in range(256)], np.int64)


def word_of(text: str) -> int:
    """Up to eight letters as the integer that they are in memory."""
    return int.from_bytes(text.encode(), "little")


_TRUE, _FALSE, NULL = word_of("true"), word_of("false"), word_of("null")
_EACH, _TOP = 0x0101010101010101, -0x7F7F7F7F7F7F7F80  # the lowest and the highest bit of eight bytes
_QUOTES, _BACKSLASHES, _SPACES = _EACH * QUOTE, _EACH * BACKSLASH, _EACH * 32

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


load = cast("Callable[[Pointer, int], int]", intrinsic(_loaded))
_store = cast("Callable[[Pointer, int, int], None]", intrinsic(_stored))
first_of = cast("Callable[[int], int]", intrinsic(_found))


@jit("int64(CPointer(uint8), int64, int64)", inline=True)
def letters(text: Pointer, i: int, size: int) -> int:
    """The `size` bytes from `i` on, fewer than eight."""
    return int(load(text, i) & ((1 << 8 * size) - 1))


@jit("int64(CPointer(uint8), int64, int64, CPointer(uint8), int64)", inline=True)
def copy(text: Pointer, i: int, stop: int, to: Pointer, at: int) -> int:
    """Copy text[i:stop], and what follows up to a multiple of eight bytes; where the copy ends."""
    end = at + stop - i
    while at < end:
        _store(to, at, load(text, i))
        at, i = at + 8, i + 8
    return end


# --- JSON -------------------------------------------------------------------------------------------------------------


@jit("int64(CPointer(uint8), int64)", inline=True)
def space_end(text: Pointer, i: int) -> int:
    """Where the first byte from `i` on is that is no whitespace between tokens."""
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
    if text[i + 6] != BACKSLASH:
        return -i - 7
    if text[i + 7] != _U:
        return -i - 8
    low = _hex4(text, i + 8)
    if low < 0:
        return low
    return i + 12 if high < 0xDC00 <= low < 0xE000 else -i - 1


@jit("int64(CPointer(uint8), int64)")
def utf8_end(text: Pointer, i: int) -> int:
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
def special_of(word: int) -> int:
    """A bit in the first of eight bytes that is a quote, a backslash, a control character or beyond ASCII, if any is.

    Bytes after that one may have theirs too.
    """
    quote, slash = word ^ _QUOTES, word ^ _BACKSLASHES
    return (((quote - _EACH) & ~quote) | ((slash - _EACH) & ~slash) | ((word - _SPACES) & ~word) | word) & _TOP


@jit("int64(CPointer(uint8), int64)", inline=True)
def string_end(text: Pointer, i: int) -> int:
    """Where the closing quote of the string is whose first character is at `i`."""
    while True:
        special = special_of(load(text, i))
        while special == 0:
            i += 8
            special = special_of(load(text, i))
        i += first_of(special)
        c = text[i]
        if c == QUOTE:
            return i
        if c == BACKSLASH:
            i = _escape_end(text, i)
        elif c >= 0x80:
            i = utf8_end(text, i)
        else:
            return -i - 1
        if i < 0:
            return i


@jit("int64(CPointer(uint8), int64)", inline=True)
def digits_end(text: Pointer, i: int) -> int:
    """End of one or more digits."""
    if text[i] < ZERO or text[i] > _NINE:
        return -i - 1
    while ZERO <= text[i] <= _NINE:
        i += 1
    return i


@jit("int64(CPointer(uint8), int64)", inline=True)
def _number_end(text: Pointer, i: int) -> int:
    if text[i] == MINUS:
        i += 1
    zero = text[i] == ZERO
    end = digits_end(text, i)
    if end < 0 or (zero and end > i + 1):
        return end if end < 0 else -i - 2
    if text[end] == POINT:
        end = digits_end(text, end + 1)
        if end < 0:
            return end
    if text[end] | 0x20 == SMALL_E:
        end += 1
        if text[end] == PLUS or text[end] == MINUS:
            end += 1
        end = digits_end(text, end)
    return end


@jit("int64(CPointer(uint8), int64, int64, int64)", inline=True)
def word_end(text: Pointer, i: int, word: int, size: int) -> int:
    """End of the word of `size` letters that `word_of` gives as `word`."""
    wrong = letters(text, i, size) ^ word
    return -i - first_of(wrong) - 1 if wrong else i + size


@jit("int64(CPointer(uint8), int64)", inline=True)
def scalar_end(text: Pointer, i: int) -> int:
    """End of a value that is no object or list: a string, true, false, null or a number."""
    c = text[i]
    if c == QUOTE:
        end = string_end(text, i + 1)
        return end if end < 0 else end + 1
    if c == _T:
        return word_end(text, i, _TRUE, 4)
    if c == _F:
        return word_end(text, i, _FALSE, 5)
    if c == SMALL_N:
        return word_end(text, i, NULL, 4)
    return _number_end(text, i)


@jit("int64(CPointer(uint8), int64)", inline=True)
def value_of_key(text: Pointer, i: int) -> int:
    """Where the value starts whose key ends at the quote at `i`."""
    i = space_end(text, i + 1)
    return space_end(text, i + 1) if text[i] == COLON else -i - 1


@jit("int64(CPointer(uint8), int64)")
def value_end(text: Pointer, i: int) -> int:
    """End of any value, of objects and lists with up to MAX_DEPTH brackets in brackets."""
    depth, objects = 0, 0  # a bit for each open bracket: whether it is an object's
    while True:
        c = text[i]
        if c in (OPEN, OPEN_LIST):
            depth, objects = depth + 1, objects << 1 | (c == OPEN)
            if depth > MAX_DEPTH:
                return -i - 1
            i = space_end(text, i + 1)
            opened = text[i] != c + 2  # a closing bracket is two codes after the opening one
        else:
            i = scalar_end(text, i)
            if i < 0:
                return i
            opened = False
        while not opened:
            if depth == 0:
                return i
            i = space_end(text, i)
            if text[i] == (CLOSE if objects & 1 else CLOSE_LIST):
                depth, objects, i = depth - 1, objects >> 1, i + 1
            elif text[i] == COMMA:
                i = space_end(text, i + 1)
                opened = True
            else:
                return -i - 1
        if objects & 1:
            if text[i] != QUOTE:
                return -i - 1
            i = string_end(text, i + 1)
            if i >= 0:
                i = value_of_key(text, i)
            if i < 0:
                return i


@jit("int64(CPointer(uint8), int64, int64, CPointer(uint8), int64)")
def compact(text: Pointer, i: int, stop: int, to: Pointer, at: int) -> int:
    """Copy valid JSON without the whitespace between its tokens; where the copy ends."""
    quoted = False
    while i < stop:
        c = text[i]
        to[at] = c
        if c == BACKSLASH:
            to[at + 1] = text[i + 1]
            at, i = at + 2, i + 2
            continue
        quoted ^= c == QUOTE
        at += quoted | (c > 32)
        i += 1
    return at


@jit("int64(CPointer(uint8), int64)", inline=True)
def key_end(text: Pointer, i: int) -> int:
    """End of a key without escapes whose opening quote is at `i`."""
    if text[i] != QUOTE:
        return -i - 1
    i += 1
    while True:
        special = special_of(load(text, i))
        while special == 0:
            i += 8
            special = special_of(load(text, i))
        i += first_of(special)
        if text[i] < 0x80:
            return i if text[i] == QUOTE else -i - 1
        i = utf8_end(text, i)
        if i < 0:
            return i


@jit("int64(CPointer(uint8), int64)", inline=True)
def next_key(text: Pointer, i: int) -> int:
    """Past the comma that a further key follows, or at the brace that closes the object."""
    i = space_end(text, i)
    if text[i] == CLOSE:
        return i
    if text[i] != COMMA:
        return -i - 1
    i = space_end(text, i + 1)
    return i if text[i] == QUOTE else -i - 1
