"""What tests and notebooks share: a temporary cache, kernels that raise on warnings, and `../shared` left as it was."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[1] / "shared"

# A notebook's kernel is a process of its own: it inherits neither pytest's warning filters nor, to any use, `-W error`,
# which would also stop it on its own deprecated calls. IPython runs this file when a kernel starts.
KERNEL_STARTUP = r"""
import warnings
warnings.simplefilter("error")
warnings.filterwarnings("default", module=r"(asyncio|debugpy|ipykernel|IPython|jupyter_\w+|tornado|traitlets|zmq)\b")
"""


def shared_files() -> dict[str, tuple[int, int]]:
    """Size and time of change of everything in `../shared`."""
    stats = {str(path): path.lstat() for path in [SHARED, *SHARED.rglob("*")]} if SHARED.exists() else {}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def pytest_configure(config: pytest.Config) -> None:
    """Give the whole session, its workers and its kernels, one temporary cache and one IPython profile."""
    if hasattr(config, "workerinput"):
        return
    folder = Path(tempfile.mkdtemp(prefix="lumos-nb-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    startup = folder / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00-warnings-are-errors.py").write_text(KERNEL_STARTUP)
    os.environ["LUMOS_NB_CACHE"] = str(folder / "cache")
    os.environ["IPYTHONDIR"] = str(folder / "ipython")
    config.stash[_SHARED_BEFORE] = shared_files()


_SHARED_BEFORE = pytest.StashKey[dict[str, tuple[int, int]]]()
_SHARED_CHANGED = pytest.StashKey[list[str]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that has written into `../shared`."""
    if hasattr(session.config, "workerinput"):
        return
    before, after = session.config.stash[_SHARED_BEFORE], shared_files()
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    session.config.stash[_SHARED_CHANGED] = changed
    if changed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the files in `../shared` that the session has changed."""
    for path in config.stash.get(_SHARED_CHANGED, []):
        terminalreporter.write_line(f"FAILED: the tests changed {path}; give what wrote it another folder", red=True)
