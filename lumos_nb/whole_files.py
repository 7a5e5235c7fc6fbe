"""Files that are there whole or not at all, whatever ends the program that writes them."""

from __future__ import annotations

import gzip
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lumos_nb.errors import LumosError

PART = ".part-"
"""What begins the name of a file that is being written; one that stays is of a program that was killed."""


@contextmanager
def whole(path: str | Path, error: type[LumosError] = LumosError) -> Iterator[Path]:
    """A path to write to that takes the place of `path` in the end.

    Raises
    ------
    LumosError
        Or the class given: the file cannot be written; the message says why.

    Examples
    --------
    >>> with whole("step.txt") as part:  # doctest: +SKIP
    ...     part.write_text("all of it")
    """
    path = Path(path)
    if not path.name or path.name == ".." or "\0" in str(path):
        raise error(f"{str(path)!r} names no file: give a file in a folder that is there.")
    part = path.with_name(f"{PART}{os.getpid()}-{threading.get_ident()}-{path.name}")
    try:
        yield part
        part.replace(path)
    except OSError as why:
        reason = f"{why.strerror or why}"
        raise error(f"{path} cannot be written: {reason}. Give a file in a folder that is there.") from why
    finally:
        with suppress(OSError):  # a name too long even to look for
            part.unlink(missing_ok=True)


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
