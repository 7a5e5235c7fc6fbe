"""Rows of figures in JSON, and the Markdown tables that quote them.

A document holds `<!-- table:accuracy/mechanistic -->` and `<!-- /table -->`; between the two stands the table of those
rows of `accuracy.json` whose names begin with `mechanistic/`. A marker `<!-- table:accuracy` may instead list rows, a
line each, as `group/what` or `group/what = what it is called there`, before its `-->`; such a table leaves notes to the
page of the group. `python -m benchmarks.rows` writes all tables anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lumos_nb.errors import LumosError
from lumos_nb.job import describe_machine

FOLDER = Path(__file__).parent
ACCURACY = FOLDER / "accuracy.json"
RESULTS = FOLDER / "results.json"

_MARKED = re.compile(
    r"(?P<mark><!-- table:(?P<file>\w+)(?:/(?P<group>[\w/.-]+)|(?P<named>(?:\n[^\n]+/[^\n]+)+)\n)? ?-->\n)"
    r".*?(?P<end><!-- /table -->)",
    re.DOTALL,
)
_TARGET = re.compile(r"(<=|>=) (-?\d+(?:\.\d+)?)")


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure.

    Attributes
    ----------
    name
        `group/what`; a later measurement of the same group replaces all its rows.
    value, unit
        The figure. All numbers of a row are in `unit`.
    baseline, baseline_value
        What it is to be seen beside (a null prediction, another program), and that one's figure.
    noise
        How far the truth itself scatters: repeats of one measurement.
    target
        `"<= 1.5"` or `">= 20"`.
    note
        What a reader must know to read the row right.
    """

    name: str
    value: float
    unit: str
    baseline: str = ""
    baseline_value: float | None = None
    noise: float | None = None
    target: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse what could not be read back or judged."""
        if "/" not in self.name:
            raise ValueError(f"row {self.name!r} has no group; name it group/what.")
        if self.target and not _TARGET.fullmatch(self.target):
            raise ValueError(f"row {self.name!r} has target {self.target!r}; write '<= number' or '>= number'.")
        if not abs(self.value) < float("inf"):
            raise ValueError(f"row {self.name!r} has value {self.value}; a figure is finite.")

    @property
    def group(self) -> str:
        """The part of the name before its first slash."""
        return self.name.partition("/")[0]

    @property
    def met(self) -> bool | None:
        """Whether the value meets the target; None without one."""
        if not (match := _TARGET.fullmatch(self.target)):
            return None
        bound = float(match[2])
        return self.value <= bound if match[1] == "<=" else self.value >= bound


def read(path: Path) -> list[Row]:
    """Rows of a JSON file; none where there is no file yet."""
    return msgspec.json.decode(path.read_bytes(), type=list[Row]) if path.exists() else []


def record(path: Path, rows: Sequence[Row]) -> None:
    """Put `rows` into a JSON file in place of all rows of their groups; other groups stay."""
    if len({row.name for row in rows}) < len(rows):
        raise ValueError(f"two rows of one name among {sorted(row.name for row in rows)}.")
    groups = {row.group for row in rows}
    kept = [row for row in read(path) if row.group not in groups]
    lines = [msgspec.json.encode(row, enc_hook=float).decode() for row in [*kept, *rows]]  # numpy's floats
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def record_timed(path: Path, rows: Sequence[Row]) -> None:
    """The same, with the machine of each of the groups in rows of the group `machines`."""
    about, groups = describe_machine("cpu"), sorted({row.group for row in rows})
    here = [
        Row(f"machines/{group}", float(str(about["cpu_count"])), "cores", note=str(about["cpu"])) for group in groups
    ]
    others = [row for row in read(path) if row.group == "machines" and row.name not in {one.name for one in here}]
    record(path, [*rows, *sorted([*others, *here], key=lambda row: row.name)])


def table(rows: Sequence[Row]) -> str:
    """Draw rows as a Markdown table, without the columns that none of them fills."""
    columns = [
        ("", [row.name.partition("/")[2] for row in rows]),
        ("value", [_figure(row.value, row.unit) for row in rows]),
        ("beside", [f"{_figure(row.baseline_value, row.unit)} {row.baseline}".strip() for row in rows]),
        ("noise", [_figure(row.noise, row.unit) for row in rows]),
        ("target", [f"{_SIGN[row.target[:2]]}{row.target[2:]}, {_MET[row.met]}" if row.target else "" for row in rows]),
        ("note", [row.note for row in rows]),
    ]
    if not rows:
        raise LumosError("a table of no rows: measure some, or take its marks out of the document.")
    shown = [(head, [cell.replace("|", "\\|") for cell in cells]) for head, cells in columns if any(cells)]
    heads, bodies = zip(*shown, strict=True)
    lines = [heads, ["---"] * len(heads), *zip(*bodies, strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


_SIGN = {"<=": "≤", ">=": "≥"}
_MET = {True: "met", False: "**missed**"}


def _figure(value: float | None, unit: str) -> str:
    """Three significant digits, or all digits of a number of a thousand and more."""
    if value is None:
        return ""
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number} {unit}".strip()


def quote(text: str) -> str:
    """Return a document with each of its marked tables drawn from the JSON files as they are now."""

    def redraw(match: re.Match[str]) -> str:
        rows = read(FOLDER / f"{match['file']}.json")
        if match["named"]:
            rows = _named(rows, match["named"].strip().splitlines())
        elif group := match["group"]:
            rows = [row for row in rows if row.name.startswith(f"{group}/")]
        if not rows:
            raise ValueError(f"no rows for the table {match['mark'].strip()}; run make accuracy or make bench.")
        return f"{match['mark']}{table(rows)}{match['end']}"

    return _MARKED.sub(redraw, text)


def _named(rows: Sequence[Row], lines: Sequence[str]) -> list[Row]:
    """The rows that lines name, without notes, under the names that lines give them."""
    by_name = {row.name: row for row in rows}
    chosen = []
    for line in lines:
        name, _, label = line.partition(" = ")
        if name not in by_name:
            raise ValueError(f"no row {name!r} for a table; is it spelt as in the JSON file?")
        shown = f"/{label}" if label else name
        chosen.append(msgspec.structs.replace(by_name[name], name=shown, note=""))
    return chosen


def documents() -> list[Path]:
    """The files that may quote figures."""
    return [FOLDER.parent / "README.md", FOLDER / "README.md", *sorted((FOLDER.parent / "docs").glob("*.md"))]


def main() -> None:
    """Write the tables of every document anew and print the targets that are missed."""
    for path in documents():
        path.write_text(quote(path.read_text(encoding="utf-8")), encoding="utf-8")
    for row in [*read(ACCURACY), *read(RESULTS)]:
        if row.met is False:
            print(f"missed: {row.name} is {_figure(row.value, row.unit)}, target {row.target}")


if __name__ == "__main__":
    main()
