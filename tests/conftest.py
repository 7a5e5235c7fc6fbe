"""Fixtures of the tests."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # how long an example takes says nothing of a busy machine
settings.load_profile("any machine")

TRACES = Path(__file__).parents[2] / "shared" / "traces"
MEASURED = TRACES.parent / "measured"


@pytest.fixture(scope="session")
def traces() -> Path:
    """Folder of real traces beside the checkout; a test that asks for it is skipped where the folder is absent."""
    if not TRACES.is_dir():
        pytest.skip("no ../shared/traces beside the checkout")
    return TRACES


@pytest.fixture(scope="session")
def measured() -> Path:
    """Folder of figures that others measured, beside the checkout; skipped as `traces` where it is absent."""
    if not MEASURED.is_dir():
        pytest.skip("no ../shared/measured beside the checkout")
    return MEASURED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where shared files must be there (`LUMOS_NB_REQUIRE_SHARED`, set by make), skipping a test of them fails."""
    report = yield
    asked = {"traces", "measured"} & set(getattr(item, "fixturenames", ()))
    if report.skipped and asked and os.environ.get("LUMOS_NB_REQUIRE_SHARED"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but LUMOS_NB_REQUIRE_SHARED is set: {report.longrepr}"
    return report
