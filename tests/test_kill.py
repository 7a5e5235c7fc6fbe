"""A dozen of the kills of `make kill`: what stood was whole, and the next run ended as if alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from lumos_nb.traces import cache
from tests.kill_soak import as_text, kill


@pytest.mark.parametrize("name", ["parse", "export: tables", "export: Perfetto"])
def test_a_killed_job_leaves_whole_files_and_the_next_run_ends(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "cache"))
    outcome = kill(name, 4, 1, tmp_path / "killed")
    assert outcome.kills == 4
    assert outcome.escapes == [], as_text([outcome])
