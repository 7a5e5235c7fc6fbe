"""Run notebooks and store the outputs of the cells that nbval compares, and no others: `make outputs`."""

from __future__ import annotations

import sys

import nbformat
from nbclient import NotebookClient

CHECKED = "# NBVAL_CHECK_OUTPUT"


def keep(path: str) -> None:
    """Run one notebook in place."""
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": "notebooks"}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code" and not cell.source.startswith(CHECKED):
            cell.outputs, cell.execution_count = [], None
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        keep(path)
