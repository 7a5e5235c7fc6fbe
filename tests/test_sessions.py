"""The conftest files themselves: what a session of tests, or of notebooks, must not get away with."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A checkout of nothing but the conftest files, with a `shared` folder beside it."""
    main = tmp_path / "main"
    (main / "tests").mkdir(parents=True)
    (tmp_path / "shared").mkdir()
    for name in ("conftest.py", "tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, main / name)
    return main


WITHOUT_PLUGINS = ("-p", "no:nbval", "-p", "no:hypothesispytest")  # they take three seconds to import


def run_pytest(checkout: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of a pytest process in `checkout`."""
    outer = ("LUMOS_NB_", "PYTEST_", "IPYTHONDIR", "CI")
    keep = {key: value for key, value in os.environ.items() if not key.startswith(outer)}
    command = [sys.executable, "-m", "pytest", "-q", *(arguments or WITHOUT_PLUGINS)]
    done = subprocess.run(command, cwd=checkout, env=keep | environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def notebook(path: Path, *cells: str) -> Path:
    """A notebook of code cells, without outputs."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(exist_ok=True)
    nbformat.write(made, path)
    return path


ASKS = "def test_asks(traces):\n    assert traces.is_dir()\n"
SKIPS = "import pytest\ndef test_skips(traces):\n    pytest.skip('not today')\n"


def test_without_traces_a_test_of_them_is_skipped(checkout):
    (checkout / "tests/test_a.py").write_text(ASKS)
    status, output = run_pytest(checkout)
    assert status == 0
    assert "1 skipped" in output


def test_with_traces_a_test_of_them_runs(checkout):
    (checkout.parent / "shared/traces").mkdir()
    (checkout / "tests/test_a.py").write_text(ASKS)
    status, output = run_pytest(checkout, LUMOS_NB_REQUIRE_SHARED="1")
    assert status == 0
    assert "1 passed" in output


@pytest.mark.parametrize(
    ("test", "folder"),
    [
        pytest.param(ASKS, "shared", id="because the folder is absent"),
        pytest.param(SKIPS, "shared/traces", id="for a reason of its own"),
    ],
)
def test_where_traces_are_required_a_skipped_test_of_them_fails(checkout, test, folder):
    (checkout.parent / folder).mkdir(exist_ok=True)
    (checkout / "tests/test_a.py").write_text(test)
    status, output = run_pytest(checkout, LUMOS_NB_REQUIRE_SHARED="1")
    assert status == 1
    assert "skipped, but LUMOS_NB_REQUIRE_SHARED is set" in output


def test_other_tests_may_skip(checkout):
    (checkout / "tests/test_a.py").write_text("import pytest\ndef test_a():\n    pytest.skip('no GPU')\n")
    assert run_pytest(checkout, LUMOS_NB_REQUIRE_SHARED="1")[0] == 0


def test_a_session_that_writes_into_shared_fails(checkout):
    (checkout / "tests/test_a.py").write_text(
        "from pathlib import Path\ndef test_a():\n    (Path(__file__).parents[2] / 'shared/trace.parquet').touch()\n"
    )
    status, output = run_pytest(checkout, "-n", "1", *WITHOUT_PLUGINS)
    assert status == 1
    assert "the tests changed" in output
    assert "trace.parquet" in output


def test_the_parse_cache_is_a_temporary_folder_that_goes_away(checkout):
    (checkout / "tests/test_a.py").write_text(
        "import os\nfrom pathlib import Path\ndef test_a():\n"
        "    cache = Path(os.environ['LUMOS_NB_CACHE'])\n    cache.mkdir()\n"
        "    Path('where').write_text(str(cache))\n"
    )
    assert run_pytest(checkout)[0] == 0
    assert not Path((checkout / "where").read_text()).parent.exists()


LIBRARY = """
import warnings
def call():
    warnings.warn("use new()", DeprecationWarning)
def guess():
    warnings.warn("guessed")
"""


def test_a_warning_in_a_notebook_is_an_error(checkout):
    path = notebook(
        checkout / "notebooks/a.ipynb",
        "sum([1, 2])",
        "import warnings; warnings.warn('old', DeprecationWarning)",
        "import old; old.call()",
        "old.guess()",
        "import ipykernel_like; ipykernel_like.call()",
        "exec(\"import warnings; warnings.warn('the kernel itself')\", {'__name__': 'ipykernel.kernelbase'})",
    )
    (path.parent / "ipykernel_like.py").write_text(LIBRARY)
    (path.parent / "old.py").write_text(LIBRARY)
    _, output = run_pytest(checkout, "--nbval-lax", "--nbval-current-env", "notebooks")
    assert output.startswith(".FFFF."), output
