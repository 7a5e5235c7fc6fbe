"""Which files a path stands for, and each of them read: by its reader or out of the cache."""

from __future__ import annotations

import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from lzma import LZMAError
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import polars as pl

from lumos_nb.errors import InputError, LumosError, RunError, TraceError, files_in, items_of, named
from lumos_nb.traces import cache as cached
from lumos_nb.traces.formats import REFUSED_SUFFIXES, read_trace
from lumos_nb.traces.json_stream import check_unpacked
from lumos_nb.traces.trace import NOTES, Trace

SUFFIXES = (".json", ".json.gz", ".sqlite", ".sqlite.gz", ".parquet")
"""Files of a folder that are taken for traces; the others are named in the report."""

ARCHIVES = (".tar", ".tar.gz", ".tgz")


class Files(NamedTuple):
    """What a path stands for."""

    traces: list[Path]
    """Files that may be traces, in the order of the numbers in their names."""

    others: list[tuple[Path, str]]
    """Further files there, with the reason why they are not read."""

    beside: Path
    """The folder that the path lies in or is: where parses are kept."""

    alone: bool = False
    """Whether the path is one trace, so that it must be read."""

    archive: Path | None = None
    """The archive that the files were unpacked from; they are gone when they have been read."""


@contextmanager
def files_of(path: str | Path | Sequence[str | Path]) -> Iterator[Files]:
    """The traces of a folder, an archive of one, or a list of files; or one file.

    Raises
    ------
    RunError
        There is no such file or folder, nothing in it that may be a trace, or a name that is no UTF-8.
    InputError
        What is given is neither a path nor a list of paths.
    """
    if not isinstance(path, str | Path):
        given = list(map(_named, dict.fromkeys(_paths(path))))
        if missing := [str(each) for each in given if not each.is_file()]:
            raise RunError(f"{', '.join(missing[:3])} is no file: a list must name the files of a run, one by one.")
        if not given:
            raise RunError("an empty list of files: give a folder of traces, or at least one file.")
        yield Files(given, [], given[0].parent)
        return
    path = _named(path)
    if path.is_file() and path.name.endswith(ARCHIVES):
        with TemporaryDirectory(prefix="lumos_nb-") as folder:
            try:
                _unpack(path, folder)
                entries = sorted(Path(folder).rglob("*"), key=lambda entry: _natural(entry.name))
                yield _sorted_out(path, entries)._replace(beside=path.parent, archive=path)
            except LumosError as error:  # says where the file was, which nobody can look at any more
                raise type(error)(str(error).replace(folder, str(path))) from error
    elif path.is_file():
        yield Files([path], [], path.parent, alone=True)
    elif path.is_dir():
        yield _sorted_out(path, sorted(files_in(path, RunError), key=lambda entry: _natural(entry.name)))
    else:
        what = "is neither a folder nor a regular file" if os.path.lexists(path) else "does not exist"
        raise RunError(f"{path} {what}: give a folder of traces, or one file.")


def _paths(given: object) -> list[Path]:
    """The paths of a list, in its order."""
    each = items_of("path", given, "the path of a run, or a list of paths")
    for wrong in (one for one in each if not isinstance(one, str | Path)):
        raise InputError(f"a list of files holds a {type(wrong).__name__} ({wrong!r}); give paths.")
    return list(map(Path, each))


def _named(path: str | Path) -> Path:
    """`path`, if tables can hold it."""
    path = named(path, RunError)
    if printable(path) != str(path):
        raise RunError(f"{printable(path)}: the name is no UTF-8, which tables cannot hold; rename it, or link to it.")
    return path


def printable(path: Path) -> str:
    """The path as text, bytes of it that are no UTF-8 spelt out."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _unpack(archive: Path, folder: str) -> None:
    try:
        with tarfile.open(archive) as packed:
            for unpacked in accumulate(tarfile.BLOCKSIZE + member.size for member in packed):
                check_unpacked(archive, archive.stat().st_size, unpacked)
            packed.fileobj.seek(packed.offset)  # tarfile takes whatever is no header for the end
            if packed.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise tarfile.ReadError(f"at byte {packed.offset:,} stands neither a file nor the archive's end")
            packed.extractall(folder, filter="data")
    except (tarfile.TarError, zlib.error, LZMAError, EOFError, KeyError, OSError) as error:
        raise TraceError(
            f"{archive} cannot be unpacked: {error}. Copy it again, or unpack what there is of it."
        ) from error


def _sorted_out(path: Path, entries: list[Path]) -> Files:
    files = [entry for entry in entries if not entry.is_dir()]
    traces = [_named(file) for file in files if _why_not(file) is None]
    if not files:
        raise RunError(
            f"{path} holds no trace: it {'holds folders only, which are not read' if entries else 'is empty'}."
        )
    return Files(traces, [(file, why) for file in files if (why := _why_not(file))], path)


def _why_not(file: Path) -> str | None:
    """Why a file of a folder is not taken for a trace; None if it is."""
    if not file.is_file():
        return "it is no regular file, or a link that leads nowhere"
    if file.name.endswith(SUFFIXES) and not file.name.startswith("."):
        return None
    if file.name == "steps.csv":
        return "it is how long steps took without the profiler: ln.timed_steps reads it"
    for suffixes, what, advice in REFUSED_SUFFIXES:
        if file.name.endswith(suffixes):
            return f"it is {what}: {advice}"
    return f"its name does not end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, or it is hidden"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts rank-2 before rank-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def read_file(path: Path, *, cache: Path | None, by_path: bool, strict: bool) -> Trace | Path | str:
    """One file: its parse, or the file of the cache that holds it, or, unless `strict`, why it cannot be read.

    `cache` is the folder beside which parses are kept, None to keep none. A worker process answers `by_path` where it
    can: a table need not be sent then.
    """
    try:
        before = path.stat()
        target = cached.cache_path(path, cache) if cache else None
        if target and target.is_file():  # nothing else may be opened: a pipe would be waited for
            return target
        parsed = _parsed(path, target, (before.st_size, before.st_mtime_ns))
    except (TraceError, OSError) as error:
        if strict:
            raise
        return str(error)
    return target if target and by_path and target.is_file() else parsed


def _parsed(path: Path, target: Path | None, seen: tuple[int, int], *notes: tuple[str, int, str]) -> Trace:
    """Read `path` and keep the parse at `target`, unless the file is no longer the one that was `seen` before."""
    parsed = read_trace(path)
    now = path.stat()
    if (now.st_size, now.st_mtime_ns) != seen:
        grown = (
            f"it changed while it was read, from {seen[0]:,} to {now.st_size:,} bytes: load it again when it is whole"
        )
        notes += (("changed", 1, grown),)
    elif target and not parsed.metadata.get("beside"):  # the cache knows a file by its own content
        try:
            cached.store(parsed, target)
        except (OSError, LumosError) as error:
            notes += (("cache", 1, f"not written: {error}"),)
    return parsed._replace(notes=parsed.notes.extend(pl.DataFrame(list(notes), schema=NOTES, orient="row")))


def loaded(path: Path, target: Path) -> Trace:
    """The parse kept at `target`; a damaged one is made anew."""
    try:
        return cached.load(target)
    except (OSError, ValueError) as error:
        now = path.stat()
        return _parsed(path, target, (now.st_size, now.st_mtime_ns), ("cache", 1, f"read again: {error}"))
