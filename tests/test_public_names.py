"""The front door: what `import lumos_nb` gives, and what it costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import lumos_nb

SOURCE = Path(lumos_nb.__file__).read_text()
HEAVY = ("torch", "altair", "polars", "numba", "pandas", "ipywidgets", "numpy", "scipy")


def submodules() -> list[str]:
    return [found.name for found in pkgutil.walk_packages(lumos_nb.__path__, "lumos_nb.")]


def run_python(code: str) -> str:
    """Standard output of a fresh process, in which any warning is an error."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_takes_under_300_ms_and_loads_nothing_heavy():
    code = (
        "import sys, time; start = time.perf_counter(); import lumos_nb; took = time.perf_counter() - start;"
        f"print(took, *[name for name in {HEAVY} if name in sys.modules])"
    )
    took, *loaded = min((run_python(code).split() for _ in range(3)), key=lambda fields: float(fields[0]))
    assert loaded == []
    assert float(took) < 0.3


def test_no_module_loads_torch_or_altair_when_imported():
    apart = tuple(name for name in submodules() if name.startswith(("lumos_nb.charts", "lumos_nb.widgets")))
    program = ("bench", "binding", "peers")  # which the folders of benchmarks get
    apart += tuple(f"lumos_nb.exchange.benchmark.{part}" for part in program)
    modules = [name for name in submodules() if name not in apart]
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    assert run_python(code + "print(*{'torch', 'altair', 'ipywidgets'} & set(sys.modules))").split() == []


def test_public_names_stay_functions_and_classes_after_every_module_is_imported():
    for name in submodules():
        importlib.import_module(name)
    for name in set(lumos_nb.__all__) - {"__version__"}:
        value = getattr(lumos_nb, name)
        assert callable(value), f"{name} is {value!r}"
        assert not isinstance(value, types.ModuleType)
        assert value.__name__ == name
        assert inspect.getdoc(value), f"{name} has no docstring"


def test_no_module_bears_the_name_of_a_public_name():
    assert {name.rpartition(".")[2] for name in submodules()} & set(lumos_nb.__all__) == set()


def test_type_checkers_are_told_the_same_names_from_the_same_modules():
    block = next(node for node in ast.parse(SOURCE).body if isinstance(node, ast.If))
    told = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert told == lumos_nb._MODULE_OF


def test_the_tab_key_shows_the_twenty_names_that_matter_and_modules():
    shown = {name for name in dir(lumos_nb) if not name.startswith("_")}
    modules = {name for name in shown if isinstance(getattr(lumos_nb, name), types.ModuleType)}
    assert modules == {"benchmark", "chakra", "charts", "datasets", "whatif", "widgets"}
    assert len(shown - modules) == 20
    assert shown - modules <= set(lumos_nb.__all__)
    with pytest.raises(AttributeError, match="no attribute 'reply'"):
        lumos_nb.reply  # noqa: B018


@pytest.mark.parametrize("name", ["Run", "Graph", "Result", "Found", "Plan", "Calibration"])
def test_the_tab_key_shows_at_most_twenty_names_of_an_object(name):
    assert len([one for one in dir(getattr(lumos_nb, name)) if not one.startswith("_")]) <= 20
