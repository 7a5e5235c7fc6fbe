"""Parsed ranks kept as Parquet files, under the content of the file that they came from.

A file of the cache says which trace it is of and has a digest of itself: Parquet has none, and of single bits that flip
in such a file more than half would go unnoticed and change the events.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from hashlib import blake2b
from pathlib import Path

import polars as pl

from lumos_nb.errors import SchemaError
from lumos_nb.schema import EVENTS, panics_told
from lumos_nb.traces.trace import NOTES, PARSER_VERSION, Trace
from lumos_nb.whole_files import whole

CACHE_ENV = "LUMOS_NB_CACHE"
CACHE_FOLDER = ".lumos_cache"
_ENTRY, _DIGEST = "lumos_nb", "lumos_nb_digest"  # keys of the Parquet file's own metadata
_BLANK = "." * 64
"""In the place of the digest while it is taken."""
_CHUNK_BYTES = 1 << 20


def cache_path(path: Path, folder: Path) -> Path:
    """Where the parse of `path` is kept beside the files of `folder`: named by its content and the parser's version."""
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return cache_folder(folder.absolute()) / f"{digest.hexdigest()}-v{PARSER_VERSION}.parquet"


def cache_folder(folder: Path) -> Path:
    """The folder of the cache for files that lie in `folder`.

    The environment variable `LUMOS_NB_CACHE` if it is set, else `.lumos_cache` beside the files where the folder is the
    user's own, else the user's cache folder (`XDG_CACHE_HOME` or `~/.cache`).
    """
    if chosen := os.environ.get(CACHE_ENV):
        return Path(chosen)
    if _is_own(folder):
        return folder / CACHE_FOLDER
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lumos_nb"


def _is_own(folder: Path) -> bool:
    """Whether the user owns `folder`, may write into it, and nobody else may.

    The mode is asked for its write bit, since to root every folder is writable; `os.access` knows of read-only mounts.
    """
    status = folder.stat()
    others = status.st_mode & stat.S_IWOTH
    mine = status.st_mode & stat.S_IWUSR and status.st_uid == os.getuid()
    return bool(mine and not others and os.access(folder, os.W_OK))


def store(parsed: Trace, target: Path) -> None:
    """Write `parsed` to `target`, whole or not at all.

    Raises
    ------
    OSError, LumosError
        The folder cannot be made or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    ignored = target.parent / ".gitignore"
    if target.parent.name == CACHE_FOLDER and not os.path.lexists(ignored):  # maybe in somebody's repository
        ignored.write_text("*\n")
    entry = {"key": target.name, "metadata": parsed.metadata, "notes": parsed.notes.rows()}
    with whole(target) as part, part.open("w+b") as file:
        written = {_ENTRY: json.dumps(entry), _DIGEST: _BLANK}
        parsed.events.write_parquet(file, statistics=False, metadata=written)
        file.flush()
        at, digest = _digest(file.fileno(), _BLANK)
        file.seek(at)
        file.write(digest.encode())


def _digest(file: int, said: str) -> tuple[int, str]:
    """Where the digest stands in a file that says one, and what it should be: that of all the rest."""
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as data:
        at = data.rfind(said.encode())
        with memoryview(data) as view, view[:at] as before, view[at + len(said) :] as after:
            digest = blake2b(before, digest_size=len(_BLANK) // 2)
            digest.update(after)
    return at, digest.hexdigest()


def load(target: Path) -> Trace:
    """Read what `store` wrote.

    Raises
    ------
    OSError
        It cannot be opened.
    ValueError
        The file is not what `store` wrote: damaged, of another trace or version, or not ours.
    """
    try:
        with panics_told(), target.open("rb") as file:  # of a path polars would take brackets for a pattern
            written = pl.read_parquet_metadata(file)
            if _digest(file.fileno(), written[_DIGEST])[1] != written[_DIGEST]:
                raise ValueError("its content has changed since it was written")
            entry = json.loads(written[_ENTRY])
            if entry["key"] != target.name:
                raise ValueError(f"it was written as {entry['key']}")
            file.seek(0)
            events = EVENTS.check(pl.read_parquet(file))
        return Trace(events, entry["metadata"], pl.DataFrame(entry["notes"], schema=NOTES, orient="row"))
    except (pl.exceptions.PolarsError, SchemaError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{target} is no parse of ours: {error}") from error
