"""What README.md and docs show runs as it stands: blocks marked `python`, and the commands of blocks marked `bash`.

The blocks of a page run in order, in one process, in an empty folder beside which the bundled data lies.
Blocks that need another machine are marked `py`, and say so.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rows

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE_S = 900
PAGES = [path for path in rows.documents() if BLOCK.search(path.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_its_blocks_run_as_written(page, tmp_path):
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "datasets").symlink_to(ROOT / "datasets")
    (tmp_path / "runs").mkdir()
    blocks = BLOCK.findall(page.read_text())
    program = "\n".join(text for kind, text in blocks if kind == "python")
    commands = "".join(text for kind, text in blocks if kind == "bash")
    for command in ([sys.executable, "-W", "error", "-c", program], ["bash", "-ec", commands]):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr[-3000:]


def test_the_first_page_is_short_and_shows_what_runs():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 155
    assert len(BLOCK.findall(text)) >= 8
