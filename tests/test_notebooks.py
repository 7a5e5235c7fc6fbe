"""What every notebook keeps to. Running them is nbval's part."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def cells(request):
    return nbformat.read(request.param, 4).cells


def code(cells):
    return [cell for cell in cells if cell.cell_type == "code"]


def test_it_begins_with_its_question_its_input_and_the_time_it_takes(cells):
    title, _, rest = cells[0].source.partition("\n")
    assert title.startswith("# ")
    assert title.endswith("?")
    assert "**Input:**" in rest
    assert "**Takes:**" in rest


def test_its_first_code_cell_takes_the_path_as_a_parameter(cells):
    first = code(cells)[0]
    assert first.metadata.get("tags") == ["parameters"]
    assert "\npath = datasets.path(" in first.source


def test_it_ends_in_asserts_and_then_says_what_it_ran_with(cells):
    checks, session = code(cells)[-2:]
    assert checks.source.count("assert ") > 3
    assert session.source.startswith("session_info(path")
    assert session.metadata["tags"] == ["nbval-ignore-output"]


def test_it_stores_no_output_but_what_is_compared(cells):
    kept = [cell for cell in code(cells) if cell.source.startswith("# NBVAL_CHECK_OUTPUT")]
    assert [cell.outputs for cell in code(cells) if cell not in kept and (cell.outputs or cell.execution_count)] == []
    assert all([output.output_type for output in cell.outputs] == ["stream"] for cell in kept)


def test_it_leaves_something_to_do_and_says_where_to_go_on(cells):
    words = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert sum("**Try it:**" in text for text in words) == 1
    assert words[-1].startswith(("Next: ", "Back"))


def test_it_says_how_far_to_trust_it(cells):
    assert sum("## How far to trust it\n" in cell.source for cell in cells if cell.cell_type == "markdown") == 1


def test_the_index_lists_every_notebook_and_the_short_course():
    index = (FOLDER / "README.md").read_text()
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if f"({path.name})" not in index] == []
    marked = [path.stem for path in NOTEBOOKS if "**●**" in nbformat.read(path, 4).cells[0].source]
    assert marked == [path.stem for path in NOTEBOOKS if f"| ● [{path.stem}]" in index]
