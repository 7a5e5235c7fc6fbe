"""What was fuzzed with which sources: `tests.soak` writes it to `benchmarks/results.json` and does it once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS, Row, read, record
from tests.soak_readers import FAULTY, READERS

ROOT = Path(__file__).parents[1]


@cache
def _imports() -> Any:
    import grimp

    return grimp.build_graph("lumos_nb")


def modules(name: str) -> set[Path]:
    """Files of the modules that a reader runs, and of all that these import."""
    runs = (READERS.get(name) or FAULTY[name][0]).runs.split()
    others = {module for module in runs if module.startswith("benchmarks.")}
    called = {f"lumos_nb.{module}" for module in runs if module not in others}
    found = called.union(*map(_imports().find_upstream_modules, called), others)
    paths = [ROOT / module.replace(".", "/") for module in found]
    packages = {
        parent / "__init__.py" for path in paths for parent in path.parents if ROOT / "lumos_nb" in parent.parents
    }
    return packages | {path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in paths}


def sources(name: str) -> str:
    """A hash of what a reader runs, and of what damages files."""
    digest = blake2b(digest_size=4)
    tests = [ROOT / "tests" / f"{each}.py" for each in ("mutations", "soak_extremes", "soak_readers", "soak_seeds")]
    for file in [*sorted(modules(name)), *sorted(tests)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def recorded(inputs: Mapping[str, int]) -> set[str]:
    """Those of some readers of which so many files, or more, are recorded of the sources as they are."""
    rows = {row.name: row for row in read(RESULTS)}
    found = {name: row for name in inputs if (row := rows.get(f"soak/{name}"))}
    return {name for name, row in found.items() if not row.value and (row.baseline_value or 0) >= inputs[name]
            and row.note.endswith(f" {sources(name)}")}  # fmt: skip


def record_counts(counts: Mapping[str, Mapping[str, Any]], outcomes: tuple[str, ...]) -> None:
    """Write what came of readers' files where documents quote it from, in place of earlier rows of the same readers."""
    rows = {row.name: row for row in read(RESULTS) if row.group == "soak"}
    for name, came in counts.items():
        note = ", ".join(f"{came[what]:,} {what}" for what in outcomes)
        note += f"; {came['slowest_s'] * 1e3:.0f} ms and {came['peak_mib']:.0f} MiB more at most; of {sources(name)}"
        beside = ("files", came["inputs"])
        rows[f"soak/{name}"] = Row(f"soak/{name}", came["escapes"], "", *beside, target="<= 0", note=note)
    record(RESULTS, [rows[f"soak/{name}"] for name in READERS if f"soak/{name}" in rows])
