"""The text of a JSON file: where its keys and objects are, and what to do where it is not quite JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKEN = re.compile(_STRING + rb'|[{}\[\]]|"', re.DOTALL)
_COLON = re.compile(rb"\s*:")
_ARRAY = re.compile(rb"\s*:\s*\[")
_NOT_JSON = re.compile(_STRING + rb"|-?\b(?:NaN|Infinity|nan|inf)\b", re.DOTALL)
_MAX_ENDINGS = 1000
_OPEN = ord("{")
_CLOSE = ord("}")


def find_events(text: bytes) -> int:
    """Offset just after the `[` of the top-level key `traceEvents`; 0 if `text` does not reach it."""
    depth = 0
    for token in _TOKEN.finditer(text):
        match token.group():
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
                if depth == 0:
                    return 0
            case b'"':  # a string that the text does not finish
                return 0
            case b'"traceEvents"' if depth == 1:
                if array := _ARRAY.match(text, token.end()):
                    return array.end()
    return 0


def top_level_keys(text: bytes) -> list[str]:
    """Keys of the JSON object that `text` begins, as far as it goes."""
    keys, depth = [], 0
    for token in _TOKEN.finditer(text):
        match token.group():
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
            case b'"':
                break
            case string if depth == 1 and _COLON.match(text, token.end()):
                keys.append(string[1:-1].decode(errors="replace"))
    return keys


def object_spans(text: bytes) -> tuple[list[tuple[int, int]], int | None]:
    """Spans of the complete objects of an array's text, and the offset of the array's closing bracket if it is there.

    `text` starts inside the array, between two of its objects. Brackets in strings do not count: quotes that an odd
    number of backslashes precede are part of a string, the others alternate between opening and closing one.
    """
    codes = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(codes == ord('"'))
    if b"\\" in text:
        slashes = np.flatnonzero(codes == ord("\\"))
        starts = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)
        within = np.arange(len(slashes)) - np.repeat(starts, np.diff(starts, append=len(slashes)))
        escaped = np.zeros(len(codes) + 1, np.bool_)
        escaped[slashes[within % 2 == 0] + 1] = True
        quotes = quotes[~escaped[quotes]]
    folded = codes | 0x20  # [ and { differ by this bit alone, and so do ] and }
    brackets = np.flatnonzero((folded == _OPEN) | (folded == _CLOSE))
    brackets = brackets[np.searchsorted(quotes, brackets) % 2 == 0]
    depth = np.cumsum(np.where(folded[brackets] == _OPEN, 1, -1))
    end = None
    if len(closed := np.flatnonzero(depth < 0)):
        end = int(brackets[closed[0]])
        brackets, depth = brackets[: closed[0]], depth[: closed[0]]
    opens = brackets[(depth == 1) & (codes[brackets] == _OPEN)]
    stops = brackets[(depth == 0) & (codes[brackets] == _CLOSE)] + 1
    return list(zip(opens.tolist(), stops.tolist(), strict=False)), end  # the last may be open


def mend(text: bytes) -> bytes:
    """Make JSON of what some writers take for it.

    Numbers that are not finite become null; control characters in strings are escaped; half a surrogate pair becomes
    a question mark.
    """

    def mended(token: re.Match[bytes]) -> bytes:
        found = token.group()
        if not found.startswith(b'"'):
            return b"null"
        string = json.loads(found.decode(), strict=False)
        return msgspec.json.encode(string.encode(errors="replace").decode())

    try:
        return _NOT_JSON.sub(mended, text)
    except ValueError:  # an escape that no string has; the decoder will say so
        return text


def surrounding(head: bytes, tail: bytes) -> tuple[dict[str, Any], bool]:
    """The top-level keys around the events, decoded, and whether these are all.

    Of a tail that the file does not finish, the keys up to the last complete one count.
    """
    for tries, end in enumerate(_endings(tail)):
        try:
            decoded = json.loads((head + end).decode("utf-8-sig", errors="replace"), strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(decoded, dict):
            return decoded, tries == 0
    return {}, False


def _endings(tail: bytes) -> Iterator[bytes]:
    yield tail
    yield tail + b"}"
    cut = len(tail)
    for _ in range(_MAX_ENDINGS):
        if (cut := tail.rfind(b",", 0, cut)) < 0:
            break
        yield tail[:cut] + b"}"
    yield b"]}"
