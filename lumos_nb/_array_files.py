"""Arrays in a folder, a file each."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos_nb.errors import RunError, folder_for
from lumos_nb.whole_files import whole


def save(folder: Path, **arrays: NDArray[Any]) -> None:
    """Write arrays, a file each."""
    folder_for(folder, RunError)
    for name, array in arrays.items():
        with whole(folder / f"{name}.npy", RunError) as part, part.open("wb") as file:
            np.save(file, array)


def load(folder: Path, name: str) -> NDArray[Any]:
    """An array in a file, of which only what is looked at is read; what is written to it stays in memory."""
    path = folder / f"{name}.npy"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy warns of headers that it has to mend
            array: NDArray[Any] = np.atleast_1d(np.lib.format.open_memmap(path, mode="c"))
    except Exception as error:  # of a damaged file whatever numpy's headers and tokens may raise
        raise RunError(f"{path} cannot be read ({error}): replay the job again.") from error
    return array
