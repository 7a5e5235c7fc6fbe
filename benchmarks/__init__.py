"""Measurements of lumos_nb: `make accuracy` and `make bench` run them, `rows` keeps and quotes what they find."""

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

SHARED = Path(__file__).parents[2] / "shared"
TRACES, MEASURED = SHARED / "traces", SHARED / "measured"
"""Files of others beside the checkout; what needs them is left out where they are absent."""


def published(name: str) -> Path:
    """A file of `MEASURED`; where it is not, the program ends and says what to do."""
    if not (file := MEASURED / name).exists():
        raise SystemExit(
            f"{file} is not there: put the folder of published figures beside the checkout, as shared/measured."
        )
    return file


@contextmanager
def workers() -> Iterator[Executor | str]:
    """Who does the parts of an accuracy run: the Dask cluster at the address `SCHEDULER`, else a process a core.

    Processes that begin here have one thread. Workers of a cluster run where this checkout can be imported.
    """
    with patch.dict(os.environ, OMP_NUM_THREADS="1", POLARS_MAX_THREADS="1"):
        if address := os.environ.get("SCHEDULER"):
            yield address
        else:
            with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
                yield pool
