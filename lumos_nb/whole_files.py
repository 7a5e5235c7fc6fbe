"""Files that are there whole or not at all, whatever ends the program or the machine that writes them.

A file is written under another name in the same folder and synced to the disk before it is renamed, and the folder
after that: or a machine that loses power may keep the name and lose the content. While it is written, its writer holds
a lock on it, which no dead program does: so parts that killed programs left can be told from those of others at work,
in other containers too.
"""

from __future__ import annotations

import fcntl
import gzip
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import polars as pl
from isal import igzip

from lumos_nb.errors import LumosError, in_the_way, named

PART = ".lumos-part"
"""What ends the name of a file that is being written, so that no reader takes it for what it will be."""

STALE_S = 60
"""Parts that nobody has a lock on are left for so long: it may be about to be locked."""

_OF_A_DISK = ("(os error ", "Invalid thrift: transport error")
"""What polars says of a disk that takes no more, the latter where it is full at the end of a file."""

_NAME_BYTES, _SCRATCH = 255, ".scratch."
_numbers = itertools.count()


@contextmanager
def whole(path: str | Path, error: type[LumosError] = LumosError) -> Iterator[Path]:
    """A path to write to, once, that takes the place of `path` in the end.

    Raises
    ------
    LumosError
        Or the class given: the file cannot be written; the message says why.

    Examples
    --------
    >>> with whole("step.txt") as part:
    ...     part.write_text("all of it")
    9
    """
    path = named(path, error)
    if not path.name or path.name == "..":
        raise error(f"{str(path)!r} names no file: give a file in a folder that is there.")
    ending = f".{os.getpid()}-{next(_numbers)}{PART}"
    shown = os.fsencode(path.name)[: _NAME_BYTES - 1 - len(ending)].decode(errors="ignore")
    part = path.with_name(f".{shown}{ending}")
    with told(path, error):
        remove_stale(path.parent)
        with _locked(part) as file:
            yield part
            os.fsync(file)
            part.replace(path)
        sync(path.parent)


@contextmanager
def told(path: Path, error: type[LumosError]) -> Iterator[None]:
    """Raise `error` where a path cannot be written: OSError, and what polars makes of one."""
    try:
        yield
    except (OSError, pl.exceptions.ComputeError) as why:
        if not isinstance(why, OSError) and not any(words in str(why) for words in _OF_A_DISK):
            raise
        reason = in_the_way(path.parent) or getattr(why, "strerror", None) or why
        raise error(f"{path} cannot be written: {reason}. Give one in a folder that is there and has room.") from why


@contextmanager
def scratch(folder: Path, error: type[LumosError] = LumosError) -> Iterator[Path]:
    """A folder in another, for what is needed while its files are made: gone in the end, or with the next program."""
    made = folder / f"{_SCRATCH}{os.getpid()}-{next(_numbers)}{PART}"
    with told(folder, error):
        remove_stale(folder)
        made.mkdir()
    try:
        with lock(made):
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def lock(folder: Path, *, wait: bool = False, shared: bool = False) -> Iterator[None]:
    """A lock on a folder; with `wait` once nobody else has one, or nobody but for sharing it where it is `shared`."""
    try:
        file = os.open(folder, os.O_RDONLY)
    except PermissionError:
        if not shared:
            raise
        yield  # to a reader who may read the files in it, but not list them
        return
    try:
        with suppress(OSError):  # of a file system without locks, where nobody can take one either
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(file)


@contextmanager
def whole_file(path: Path, error: type[LumosError] = LumosError) -> Iterator[IO[bytes]]:
    """As `whole`, open, and packed if the name ends in .gz: into the same bytes whenever that is."""
    with whole(path, error) as part, part.open("wb") as file:
        if path.suffix != ".gz":
            yield file
        else:
            pack: Callable[..., Any] = igzip.IGzipFile
            with pack("", "wb", mtime=0, fileobj=file) as packed:
                yield packed


def write_parquet(table: pl.DataFrame, path: Path, **how: Any) -> None:
    """Write Parquet to just this path: of ~ or file: in one polars would make another."""
    with path.open("wb") as file:
        table.write_parquet(file, **how)


@contextmanager
def _locked(part: Path) -> Iterator[int]:
    """A new file with a lock on it; gone in the end unless it was renamed."""
    file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with suppress(OSError):  # of a file system without locks, where nobody can take one either
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file
    finally:
        part.unlink(missing_ok=True)
        os.close(file)


@lru_cache(maxsize=1024)  # once a folder and program: it may get a file of each of 100,000 ranks
def remove_stale(folder: Path) -> None:
    """Remove what killed programs left in a folder: parts that are a minute old and that nobody holds a lock on."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.name.startswith(_SCRATCH) and entry.is_dir(follow_symlinks=False)
            if entry.name.endswith(PART) and (is_folder or entry.is_file(follow_symlinks=False)):
                _remove_unlocked(Path(entry), is_folder)


def _remove_unlocked(part: Path, is_folder: bool) -> None:
    with suppress(OSError):  # somebody holds a lock on it, has removed it, or it is not ours to remove
        file = os.open(part, (os.O_RDONLY if is_folder else os.O_RDWR) | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file).st_mtime > STALE_S:
                (shutil.rmtree if is_folder else os.unlink)(part)
        finally:
            os.close(file)


def sync(folder: Path) -> None:
    """Let the disk know which names a folder has."""
    with suppress(OSError):  # some file systems of networks sync no folders
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def compress(raw: Path, target: Path) -> None:
    """Replace a file by its gzip, the same bytes whenever it is made."""
    with (
        whole(target) as part,
        raw.open("rb") as source,
        part.open("wb") as file,
        gzip.GzipFile("", "wb", mtime=0, fileobj=file) as packed,
    ):
        shutil.copyfileobj(source, packed)
    raw.unlink()
