"""What a notebook ran with, for its last cell."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import polars as pl

PACKAGES = ("lumos-nb", "polars", "numpy", "numba", "altair", "torch")


def session_info(*data: str | Path) -> pl.DataFrame:
    """Versions and data that results depend on: `what`, `version`.

    Parameters
    ----------
    data
        Files, or folders whose files are taken: stated as the start of the SHA-256 of their names and contents.

    Examples
    --------
    >>> session_info("runs/gpt")
    """
    rows = [("Python", platform.python_version()), ("platform", f"{platform.system()} {platform.machine()}")]
    rows += [(name, _version(name)) for name in PACKAGES]
    rows += [(Path(path).name, _digest(Path(path))) for path in data]
    return pl.DataFrame(rows, schema=["what", "version"], orient="row")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _digest(path: Path) -> str:
    files = sorted(_files(path)) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.relative_to(path).as_posix().encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"sha256:{digest.hexdigest()[:12]}"


def _files(folder: Path) -> list[Path]:
    """Files of a folder, hidden ones (a cache of parsed traces) left out."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
