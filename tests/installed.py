"""The wheel and the source archive, installed as a user does: `make dist`, which asks the registry for the rest."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MAX_WHEEL_BYTES = 12 * 2**20
"""It has 11 MB, of which ten are bundled runs."""

EXTRAS = {"wheel": "", "sdist": "[notebook,pandas]"}
"""What is installed with each: nothing but what the package cannot do without, and what notebooks take."""

USER = """
import polars as pl
import lumos_nb as ln

run: ln.Run = ln.load_run(ln.datasets.path("gpt-ddp"))
result: ln.Result = ln.replay(ln.build_graph(run, step=3))
step_ns: int = result.step_ns
table: pl.DataFrame = ln.breakdown(result)
reveal_type(table.height)
"""
WRONG = "import lumos_nb as ln\nstep_ns: str = ln.replay(ln.build_graph(ln.load_run('x'))).step_ns\n"


def built(target: str, source: Path, out: Path) -> Path:
    """Build a "wheel" or an "sdist" of a source tree with the hatchling that is installed: no network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = out.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that nobody may write into, nor into those inside."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    try:
        yield
    finally:
        for path in folders:
            path.chmod(0o755)


def without_root_s_powers() -> None:
    """Let the program that this process becomes keep to permissions, which root need not (CAP_DAC_OVERRIDE)."""
    pr_capbset_drop, cap_dac_override = 24, 1
    if os.geteuid() == 0 and ctypes.CDLL(None, use_errno=True).prctl(pr_capbset_drop, cap_dac_override, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "root keeps its powers")


def run(*command: str | Path, cwd: Path, **options: Any) -> str:
    """Standard output of a command outside the checkout, which may not fail."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=EXTRAS)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment into which the wheel, or the source archive, is installed."""
    folder = tmp_path_factory.mktemp(request.param)
    uv, python = Path(sys.executable).with_name("uv"), folder / "venv" / "bin" / "python"
    archive = built(request.param, ROOT, folder)
    run(uv, "venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    run(uv, "pip", "install", "--quiet", "--python", python, f"{archive}{EXTRAS[request.param]}", cwd=folder)
    run(uv, "pip", "check", "--python", python, cwd=folder)
    return python


def test_the_demo_runs_on_the_installation_s_own_data_where_nobody_can_write(python: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    (site,) = (python.parents[1] / "lib").glob("*/site-packages/lumos_nb")
    before = sorted(site.rglob("*"))
    with read_only(site):
        command = python.with_name("lumos-nb"), "demo", "--json", "--predict", "2"
        told = run(*command, cwd=tmp_path, env=environment, preexec_fn=without_root_s_powers)
    assert sorted(site.rglob("*")) == before
    here = run(sys.executable, "-m", "lumos_nb", *command[1:], cwd=ROOT)
    assert json.loads(told.replace(str(site / "_datasets"), str(ROOT / "datasets"))) == json.loads(here)
    assert len(list((tmp_path / "cache" / "lumos_nb").glob("*.parquet"))) == 2


def test_every_module_is_there_and_imports_with_what_was_installed(python: Path, tmp_path: Path) -> None:
    code = (
        "import importlib, importlib.util, pkgutil, lumos_nb\n"
        "needs = set() if importlib.util.find_spec('altair') else {'altair', 'anywidget', 'ipywidgets'}\n"
        "for found in pkgutil.walk_packages(lumos_nb.__path__, 'lumos_nb.'):\n"
        "    try:\n"
        "        importlib.import_module(found.name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert error.name in needs | {'torch'}, (found.name, error)\n"
    )
    run(python, "-W", "error", "-c", code, cwd=tmp_path)


def test_a_user_s_program_is_type_checked_against_it(python: Path, tmp_path: Path) -> None:
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    (tmp_path / "program.py").write_text(USER)
    assert 'Revealed type is "int"' in run(*mypy, "program.py", cwd=tmp_path).replace("builtins.", "")
    (tmp_path / "wrong.py").write_text(WRONG)
    done = subprocess.run([*mypy, "wrong.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'expression has type "int", variable has type "str"' in done.stdout
