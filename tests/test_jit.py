"""Compiled kernels: what the decorator promises, with and without a folder to cache in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from lumos_nb._jit import jit, warm

KERNEL = """
from lumos_nb._jit import cache_enabled, jit

@jit("int64(int64[::1])")
def total(values):
    sum_ = 0
    for value in values:
        sum_ += value
    return sum_
"""

USE = "import numpy, kernel; print(kernel.total(numpy.arange(5)), kernel.cache_enabled())"


def run_kernel(folder: Path, **environment: str) -> str:
    """Standard output of a process that imports `folder/kernel.py` with no cache folder named in its environment."""
    (folder / "kernel.py").write_text(KERNEL)
    keep = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", USE],
        env=keep | {"PYTHONPATH": f"{folder}{os.pathsep}{root}"} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_kernel_is_kept_on_disk_beside_its_module(tmp_path):
    assert run_kernel(tmp_path) == "10 True"
    assert list(tmp_path.glob("__pycache__/kernel.total-*.nbi"))


def test_a_kernel_compiles_where_no_folder_can_be_written(tmp_path):
    # Root may write anywhere, whatever the mode bits; but nobody can make a folder where a file is.
    (tmp_path / "__pycache__").write_text("in the way")
    assert run_kernel(tmp_path, HOME="/dev/null") == "10 False"


def test_a_kernel_is_compiled_anew_when_one_that_it_uses_is_another(tmp_path):
    base = "from lumos_nb._jit import jit\n@jit('int64(int64)')\ndef {name}(x):\n    return {value}\n"
    used = "import used\n" + base.replace("int64)'", "int64)', uses=[used]")
    for added in (1, 20):  # Python itself takes a source of the same second and length for the same
        (tmp_path / "used.py").write_text(base.format(name="add", value=f"x + {added}"))
        (tmp_path / "top.py").write_text(used.format(name="twice", value="used.add(used.add(x))"))
        code = "import top; print(top.twice(10))"
        path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"}
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | path, capture_output=True, text=True)
        assert done.stdout == f"{10 + 2 * added}\n", done.stderr


def test_other_argument_types_are_refused_not_compiled():
    @jit("int64(int64[::1])")
    def first(values):
        return values[0]

    assert first(np.array([7, 8])) == 7
    with pytest.raises(TypeError, match="No matching definition"):
        first(np.array([7.0]))


def test_an_error_in_a_kernel_is_not_taken_for_a_missing_cache():
    with pytest.raises(numba.core.errors.TypingError, match="no_such_function"):

        @jit("int64(int64)")
        def broken(value):
            return no_such_function(value)  # noqa: F821


def test_warming_imports_every_module_that_has_kernels():
    package = Path(__file__).parents[1] / "lumos_nb"
    with_kernels = {
        "lumos_nb." + ".".join(path.relative_to(package).with_suffix("").parts)
        for path in package.rglob("*.py")
        if re.search(r"^@jit\(", path.read_text(), re.MULTILINE)
    }
    assert set(warm()) == with_kernels
    assert with_kernels <= set(sys.modules)
