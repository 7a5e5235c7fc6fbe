"""The text of a JSON file: where its keys and objects are, and what to do where it is not quite JSON."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKEN = re.compile(_STRING + rb'|[{}\[\]]|"', re.DOTALL)
_COLON = re.compile(rb"\s*:")
_ARRAY = re.compile(rb"\s*:\s*\[")
_NOT_JSON = re.compile(_STRING + rb"|-?\b(?:NaN|Infinity|nan|inf)\b", re.DOTALL)
_BARE = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_MAX_ENDINGS, _MAX_TRIED_BYTES = 1000, 1 << 26


def is_bare(text: bytes) -> bool:
    """Whether `text` begins a list."""
    return _BARE.match(text) is not None


def find_events(text: bytes, *, broken: bool = False) -> int:
    """Offset just after the `[` of the top-level key `traceEvents` or of a bare list; 0 if `text` does not reach it.

    In text that is `broken` the key may stand anywhere.
    """
    if broken:
        found = _EVENTS.search(text)
        return found.end() if found else 0
    if bare := _BARE.match(text):
        return bare.end()
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
    """The top-level keys around the events, decoded, and whether these are all; none around a bare list.

    Of a tail that the file does not finish, the keys up to the last complete one count.
    """
    if is_bare(head):
        return {}, True
    most = max(1, _MAX_TRIED_BYTES // len(head + tail))
    for tries, end in enumerate(itertools.islice(_endings(tail), most)):
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
