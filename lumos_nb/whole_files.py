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

from isal import igzip

from lumos_nb.errors import LumosError, named

PART = ".lumos-part"
"""What ends the name of a file that is being written, so that no reader takes it for what it will be."""

STALE_S = 60
"""Parts that nobody has a lock on are left for so long: it may be about to be locked."""

_NAME_BYTES = 255
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
    try:
        remove_stale(path.parent)
        with _locked(part) as file:
            yield part
            os.fsync(file)
            part.replace(path)
        _sync(path.parent)
    except OSError as why:
        raise error(f"{path} cannot be written: {why.strerror or why}. Give a file in a folder that is there.") from why


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
            if entry.name.endswith(PART) and entry.is_file(follow_symlinks=False):
                _remove_unlocked(Path(entry))


def _remove_unlocked(part: Path) -> None:
    with suppress(OSError):  # somebody holds a lock on it, has removed it, or it is not ours to remove
        file = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(file).st_mtime > STALE_S:
                part.unlink()
        finally:
            os.close(file)


def _sync(folder: Path) -> None:
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
