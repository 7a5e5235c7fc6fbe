"""Parsed ranks kept as Parquet files, under the content of the file that they came from."""

from __future__ import annotations

import json
import os
import stat
from hashlib import blake2b
from pathlib import Path

import polars as pl

from lumos_nb.errors import SchemaError
from lumos_nb.schema import EVENTS
from lumos_nb.traces.trace import NOTES, PARSER_VERSION, Trace
from lumos_nb.whole_files import whole

CACHE_ENV = "LUMOS_NB_CACHE"
CACHE_FOLDER = ".lumos_cache"
_ENTRY = "lumos_nb"  # key of the Parquet file's own metadata
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
    if target.parent.name == CACHE_FOLDER:  # beside the traces, so maybe in somebody's repository
        (target.parent / ".gitignore").write_text("*\n")
    entry = {"metadata": parsed.metadata, "notes": parsed.notes.rows(), "count": len(parsed.events)}
    with whole(target) as part, part.open("wb") as file:
        parsed.events.write_parquet(file, statistics=False, metadata={_ENTRY: json.dumps(entry)})


def load(target: Path) -> Trace:
    """Read what `store` wrote.

    Raises
    ------
    ValueError
        The file is not what `store` wrote: damaged, or not ours.
    """
    try:
        with target.open("rb") as file:  # of a path polars would take brackets for a pattern
            entry = json.loads(pl.read_parquet_metadata(file)[_ENTRY])
            file.seek(0)
            events = EVENTS.check(pl.read_parquet(file))
        notes = pl.DataFrame(entry["notes"], schema=NOTES, orient="row")
        if isinstance(entry["metadata"]["event_count"], int) and len(events) == entry["count"]:
            return Trace(events, entry["metadata"], notes)
    except (pl.exceptions.PolarsError, SchemaError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{target} is no parse of ours: {error}") from error
    raise ValueError(f"{target} holds {len(events):,} events where {entry['count']:,} were written")
