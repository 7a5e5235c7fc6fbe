"""The package's errors.

LumosError
├── TraceError          a file cannot be read as the trace it should be
│   └── UnsupportedFormat   a known format that another reader takes
├── RunError            the files of a folder do not make one run
├── SchemaError         a table lacks a column, or has one of the wrong type
├── InputError          an argument is of another kind than the function takes
├── GraphError          ops and edges that no execution could follow
├── SheetError          a data sheet lacks a number, or has one that cannot be
├── LayoutError         a model, a layout, a batch or a cluster that cannot be, or not together
├── CalibrationError    a calibration that cannot be read, or that has nothing to price an op by
├── ScenarioError       a what-if that names unknown classes or impossible scales
├── CaptureError        a training loop could not be recorded
├── ExecutorError       what should have run the work elsewhere cannot, or was lost
├── BenchmarkError      a benchmark that cannot be run here: too large, or nothing of it chosen
└── ChakraError         bytes that are no Chakra file, or nodes that cannot be written as one
"""

import math
import numbers
import operator
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What msgspec raises for text that it cannot read, the last where it nests a thousand deep."""

_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_MOST_NAME_BYTES, _MOST_PATH_BYTES = 255, 4095


def harmless(text: str, keep: str = "") -> str:
    r"""Text that cannot steer a terminal: what controls it is spelt out, but for the characters to `keep`.

    Examples
    --------
    >>> print(harmless("\x1b[2J"))
    \x1b[2J
    """
    return _UNSEEN.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


class LumosError(Exception):
    """Base of every error that the package raises on purpose; what it quotes of a file cannot steer a terminal."""

    def __str__(self) -> str:
        """The message."""
        return harmless(super().__str__(), keep="\n")


class TraceError(LumosError):
    """A file cannot be read as a trace; the message names file, byte offset and event."""


class UnsupportedFormat(TraceError):
    """The file is a known format that this reader does not take; the message names the one that does."""


class RunError(LumosError):
    """The files given do not make one run of distinct ranks."""


class SchemaError(LumosError):
    """A table lacks a column, has one of the wrong type, or repeats a key."""


class InputError(LumosError, TypeError):
    """An argument is of another kind than the function takes; the message says what gives one."""


class GraphError(LumosError):
    """Ops and edges that no execution could follow: a cycle, an unknown op, a negative duration."""


class SheetError(LumosError):
    """A data sheet lacks a field or has a number that cannot be; the message names the sheet and the field."""


class LayoutError(LumosError, ValueError):
    """A model, layout, batch or cluster that cannot be, alone or together; names field, value and what to do."""


class CalibrationError(LumosError):
    """A calibration cannot be read, or has nothing to price an op by; the message says what to measure."""


class ScenarioError(LumosError):
    """A scenario names a class that the graph lacks, or a scale that is not a finite number >= 0."""


class CaptureError(LumosError):
    """A training loop could not be recorded."""


class ChakraError(LumosError):
    """Bytes that are no Chakra file, or nodes that cannot be written as one; names the byte or the node."""


class ExecutorError(LumosError):
    """What should have run the work elsewhere is no executor, cannot be reached, or was lost with its work."""


class BenchmarkError(LumosError):
    """A benchmark cannot be run here; the message says why and what to do."""


def shown(value: object) -> str:
    """A value as an error quotes it: a line of 60 characters at most, of any number of digits."""
    try:
        return " ".join(f"{value!r:.60}".split("\n"))  # tables and arrays are of several lines
    except ValueError:  # more digits than Python would write
        return "a number of thousands of digits"


def require_kinds(**given: tuple[object, Any]) -> None:
    """Raise InputError for the first argument that is of another kind than it should be, or of none of several."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            several = kind.__args__ if isinstance(kind, UnionType) else (kind,)
            kinds = " or ".join("None" if one is NoneType else one.__name__ for one in several)
            raise InputError(f"{name} is {shown(value)}; give a {kinds}.")


def require_text(**given: object) -> None:
    """Raise InputError for the first argument that is no text, or text that no file holds: halves of characters."""
    for name, value in given.items():
        if not isinstance(value, str) or (not value.isascii() and value != value.encode(errors="ignore").decode()):
            raise InputError(f"{name} is {shown(value)}; give a str, of whole characters.")


def is_word(value: object, words: Iterable[str]) -> bool:
    """Whether a value is one of some words; what is no text is none of them, and is not compared with any."""
    return isinstance(value, str) and value in tuple(words)


def require_word(words: Iterable[str], /, **given: object) -> None:
    """Raise InputError for the first argument that is none of some words."""
    for name, value in given.items():
        if not is_word(value, words):
            raise InputError(f"{name}={shown(value)}: give one of {', '.join(map(repr, words))}.")


def items_of(name: str, given: object, advice: str) -> list[Any]:
    """What a list, an array or whatever else can be gone through holds; InputError of what cannot be, and of text."""
    if not isinstance(given, str | bytes | bytearray | memoryview | Mapping):
        with suppress(TypeError):  # of an array that is one number, too
            return list(given)  # type: ignore[call-overload,no-any-return]
    raise InputError(f"{name}={shown(given)}: give {advice}.")


def require_flags(**given: object) -> None:
    """Raise InputError for the first argument that is neither True nor False, of Python or of another library."""
    for name, value in given.items():
        of_numpy = str(getattr(value, "dtype", "")) == "bool" and not hasattr(value, "__len__")
        if not (isinstance(value, bool) or of_numpy or is_whole(value, 0, 1)):
            raise InputError(f"{name}={shown(value)}: give True or False.")


def is_whole(value: object, least: int, most: int = 2**62) -> bool:
    """Whether a value is a whole number from `least` to `most`, of Python or of another library."""
    if isinstance(value, bool) or hasattr(value, "__len__"):  # an array of one number has an index, but is no number
        return False
    try:
        return least <= operator.index(value) <= most  # type: ignore[arg-type]
    except TypeError:
        return False


def require_whole(least: int, most: int = 2**62, /, **given: object) -> None:
    """Raise InputError for the first argument that is no whole number from `least` to `most`."""
    for name, value in given.items():
        if not is_whole(value, least, most):
            bounds = f"of at least {least}" if most == 2**62 else f"from {least} to {most:,}"
            raise InputError(f"{name}={shown(value)}: give a whole number {bounds}.")


ABOVE_0 = math.nextafter(0, 1)
"""As the least of `is_number` and `require_number`: any number above 0."""


def is_number(value: object, least: float = -math.inf, most: float = sys.float_info.max) -> bool:
    """Whether a value is a finite number from `least` to `most`, so that it is one as a float too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    exact: Any = value if isinstance(value, numbers.Rational) else float(value)  # of few bits most would be infinite
    return bool(least <= exact <= most)  # nan is neither


def require_number(least: float = -math.inf, most: float = sys.float_info.max, /, **given: object) -> None:
    """Raise InputError for the first argument that is no finite number from `least` to `most`."""
    for name, value in given.items():
        if not is_number(value, least, most):
            low = {-math.inf: "", ABOVE_0: " above 0"}.get(least, f" of at least {least:g}")
            high = "" if most == sys.float_info.max else f", {most:g} at most"
            raise InputError(f"{name}={shown(value)}: give a finite number{low}{high}.")


def require_memory(size_bytes: int, what: str) -> None:
    """Raise InputError for what takes more bytes than the machine has."""
    try:
        has_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # a system that does not say
        has_bytes = 2**62
    if size_bytes > has_bytes:
        raise InputError(
            f"{what} takes some {size_bytes / 2**30:,.3g} GiB of memory, and this machine has "
            f"{has_bytes / 2**30:,.3g}: give less."
        )


def named(path: object, error: type[LumosError] = InputError) -> Path:
    """A path as such, of a file or a folder, there or not.

    Raises
    ------
    LumosError
        The class given, of no name or one that no file system has, or of a pipe or a device, which would be waited for
        without end or be replaced; InputError of what is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{shown(path)} is no path: give the name of a file or a folder.")
    if isinstance(path, str) and not path:  # Path would take it for the folder that one is in
        raise error("an empty text is no path: give the name of a file or a folder, '.' for the one that you are in.")
    try:
        found = Path(path)
        longest, size = max(map(len, map(os.fsencode, found.parts)), default=0), len(os.fsencode(found))
    except (TypeError, UnicodeEncodeError):
        raise error(f"{os.fspath(path)!r:.80} is no path: give text that the file system can hold.") from None
    if "\0" in str(found) or longest > _MOST_NAME_BYTES or size > _MOST_PATH_BYTES:
        raise error(f"{str(found)!r:.80} names no file: a name has at most {_MOST_NAME_BYTES} bytes, and no NUL.")
    try:
        if stat.S_IFMT(found.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise error(f"{found} is neither a folder nor a regular file: give one of these.")
    except PermissionError as why:
        raise error(
            f"{found} may not be looked at: {why.strerror}. Ask for the right to, or give another path."
        ) from None
    except OSError:  # it is not there, or a link that leads nowhere
        pass
    return found


def in_the_way(folder: Path) -> str:
    """Of a folder that cannot be one, since it or one that it is in is a file: words that say so; of others none."""
    file = next((path for path in (folder, *folder.parents) if os.path.isfile(path)), None)
    return f"{file} is a file, no folder" if file else ""


def folder_for(path: object, error: type[LumosError] = InputError) -> Path:
    """A folder to write into, made where it is not there.

    Raises
    ------
    LumosError
        As `named`; or the class given: it cannot be made.
    """
    folder = named(path, error)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        raise error(
            f"{folder} cannot be written into: {in_the_way(folder) or why.strerror}. Give a folder that is there or "
            "can be made."
        ) from why
    return folder


def files_in(folder: Path, error: type[LumosError]) -> list[Path]:
    """What a folder holds, by name; raises `error` where it may not be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError as why:
        raise error(f"{folder} cannot be listed: {why.strerror}. Ask for the right to, or give another path.") from why
