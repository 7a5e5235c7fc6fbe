"""What pyproject.toml, environment.yml and constraints.txt say, against each other, the code and what is installed.

And what the wheel and the source archive hold. `make dist` installs them (`installed.py`).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import lumos_nb
from lumos_nb import datasets
from lumos_nb.traces.cache import CACHE_FOLDER
from tests.installed import MAX_WHEEL_BYTES, built, read_only, without_root_s_powers

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PACKAGE = sorted((ROOT / "lumos_nb").rglob("*.py"))
# Where conda-forge has another name.
CONDA_NAMES = {"torch": "pytorch", "isal": "python-isal", "playwright": "playwright-python", "dask": "dask-core"}

# The only modules that may need an extra when they are imported.
NEED_EXTRAS = ("bench.py", "binding.py", "peers.py")  # and the packages of charts and widgets


def bounds(requirements: list[str]) -> dict[str, str]:
    """Version bounds by canonical name."""
    parsed = [Requirement(line) for line in requirements]
    return {canonicalize_name(r.name): str(r.specifier) for r in parsed}


REQUIRED = bounds(PROJECT["dependencies"])
EXTRAS = bounds([line for lines in PROJECT["optional-dependencies"].values() for line in lines])
DEVELOPMENT = bounds([line for lines in PYPROJECT["dependency-groups"].values() for line in lines])
DECLARED = REQUIRED | EXTRAS | DEVELOPMENT


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


DISTRIBUTIONS = metadata.packages_distributions()


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each distribution that a module imports, and whether it does so as soon as it is imported itself."""

    def visit(node: ast.AST, eager: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"lumos_nb"}:
            yield canonicalize_name(DISTRIBUTIONS.get(top, [top])[0]), eager
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        for child in ast.iter_child_nodes(node):
            yield from visit(child, eager and not inside)

    return visit(ast.parse(path.read_text()), True)


def test_environment_yml_states_the_bounds_of_pyproject():
    entries = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = bounds([entry for entry in entries if isinstance(entry, str)])
    assert conda.pop("python") == PROJECT["requires-python"]
    assert conda.pop("pip") == ""
    assert conda == {CONDA_NAMES.get(name, name): spec for name, spec in DECLARED.items()}
    assert entries[-1] == {"pip": ["-e ."]}


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_installed_and_pinned_versions_are_within_bounds(name):
    specifier = Requirement(name + DECLARED[name]).specifier
    assert specifier.contains(metadata.version(name)), "installed"
    assert specifier.contains(pinned()[name]), "in constraints.txt"


def test_constraints_pin_versions_that_any_machine_can_install():
    pins = pinned()
    assert all(Version(version).local is None for version in pins.values())
    assert not [name for name in pins if re.match("cuda-|nvidia-|triton|lumos", name)]


def test_the_version_is_that_of_pyproject():
    assert lumos_nb.__version__ == PROJECT["version"]


def test_the_package_imports_what_it_declares_and_declares_what_it_imports():
    used = {name for path in PACKAGE for name, _ in imports(path)}
    assert used <= REQUIRED.keys() | EXTRAS.keys()
    assert REQUIRED.keys() | {"torch"} <= used


def test_tests_and_benchmarks_use_what_is_declared():
    scripts = [path for folder in ("tests", "benchmarks", "datasets") for path in (ROOT / folder).rglob("*.py")]
    local = {canonicalize_name(path.stem) for path in scripts} | {"benchmarks", "conftest", "datasets", "tests"}
    peers = {"hta", "llm-analysis"}  # in the environment of `make bench-peers` alone
    used = {name for path in [*scripts, ROOT / "conftest.py"] for name, _ in imports(path)}
    assert used <= DECLARED.keys() | local | peers


def test_modules_import_without_any_extra():
    eager = {
        (path.name, name)
        for path in PACKAGE
        if path.name not in NEED_EXTRAS and path.parent.name not in ("charts", "widgets")
        for name, at_import in imports(path)
        if at_import and name not in REQUIRED
    }
    assert eager == set()


def test_a_cpu_build_of_torch_that_is_at_hand_is_the_one_installed():
    links = re.split(r"[\s,]+", f"{os.environ.get('PIP_FIND_LINKS', '')} {os.environ.get('UV_FIND_LINKS', '')}")
    if not any(list(Path(link).glob("torch-*+cpu-*.whl")) for link in links if link and Path(link).is_dir()):
        pytest.skip("no find-links folder with a CPU build of torch")
    assert metadata.version("torch").endswith("+cpu")
    assert not [name for name in (d.name for d in metadata.distributions()) if name.startswith(("nvidia-", "triton"))]


def test_files_and_functions_stay_short():
    files = [(path.name, len(path.read_text().splitlines()), 450) for path in PACKAGE]
    functions = [
        (f"{node.name} in {path.name}", (node.end_lineno or 0) - node.lineno + 1, 70)
        for path in PACKAGE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [f"{name}: {lines} lines" for name, lines, limit in files + functions if lines > limit] == []


# --- wheel and source archive -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def contents(path: Path) -> dict[str, tuple[int, int]]:
    """Size and checksum of every file of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {file.filename: (file.file_size, file.CRC) for file in archive.infolist()}


def data_files() -> set[str]:
    """What of `datasets/` travels: all but the scripts and the caches of parsed runs."""
    inside = [path.relative_to(ROOT / "datasets") for path in (ROOT / "datasets").rglob("*") if path.is_file()]
    return {
        path.as_posix() for path in inside if path.suffix not in (".py", ".pyc") and path.parent.name != CACHE_FOLDER
    }


def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel: Path) -> None:
    about = f"lumos_nb-{lumos_nb.__version__}.dist-info"
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE}
    of_itself = {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    data = {f"lumos_nb/_datasets/{file}" for file in data_files()}
    assert contents(wheel).keys() == modules | {"lumos_nb/py.typed"} | data | of_itself
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_the_wheel_states_licence_versions_extras_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = f"lumos_nb-{lumos_nb.__version__}.dist-info"
        told = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        licence = archive.read(f"{folder}/licenses/LICENSE").decode()
        assert "lumos-nb = lumos_nb.cli:main" in archive.read(f"{folder}/entry_points.txt").decode()
    assert licence == (ROOT / "LICENSE").read_text()
    assert (told["Name"], told["Version"]) == ("lumos-nb", lumos_nb.__version__)
    assert (told["License-Expression"], told["Requires-Python"]) == ("MIT", PROJECT["requires-python"])
    assert told.get_all("Provides-Extra") == sorted(PROJECT["optional-dependencies"])
    assert bounds([line.partition(";")[0] for line in told.get_all("Requires-Dist", [])]) == REQUIRED | EXTRAS
    assert told.get_payload() == (ROOT / "README.md").read_text()


def test_the_source_archive_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(built("sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert not (source / "tests").exists()
    assert contents(built("wheel", source, tmp_path)) == contents(wheel)


def test_an_unpacked_wheel_reads_its_own_runs_and_writes_nothing_beside_them(wheel: Path, tmp_path: Path) -> None:
    site, cache = tmp_path / "site", tmp_path / "cache"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import lumos_nb as ln\n"
        "run = ln.load_run(ln.datasets.path('gpt-ddp'))\n"
        "print(ln.__file__, ln.datasets.root(), len(run.events), *ln.datasets.names(), sep='\\n')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LUMOS_NB_CACHE"}
    environment |= {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(cache)}
    with read_only(site):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path,
            env=environment, preexec_fn=without_root_s_powers,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    module, root, events, *names = done.stdout.splitlines()
    assert (module, root) == (f"{site}/lumos_nb/__init__.py", f"{site}/lumos_nb/_datasets")
    assert int(events) == len(lumos_nb.load_run(datasets.path("gpt-ddp")).events)
    assert names == datasets.names()
    assert {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()} == contents(wheel).keys()
    assert len(list((cache / "lumos_nb").glob("*.parquet"))) == 2
