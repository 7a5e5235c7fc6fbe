"""Look into a calibration: what it knows, and what it says of one kernel."""

from __future__ import annotations

from typing import Any

import polars as pl

from lumos_nb.costs.calibration import Calibration
from lumos_nb.errors import require_kinds
from lumos_nb.widgets.panel import Panel, Shown, choice, number

SIZES = {"m": 4096, "n": 4096, "k": 4096}


def inspect(calibration: Calibration) -> Panel:
    """What a calibration knows of a class of kernels, on how many rows, with which error on groups left out.

    And what it says of a matrix product: time, interval, and whether the like was measured.

    Parameters
    ----------
    calibration
        One of `load_calibration`.

    Examples
    --------
    >>> inspect(load_calibration("H100-SXM-80GB")).code.splitlines()[0]
    "calibration = ln.load_calibration('H100-SXM-80GB')"
    """
    require_kinds(calibration=(calibration, Calibration))
    table = calibration.coverage()

    def make(cell: str, dtype: str, **sizes: int) -> tuple[pl.DataFrame, pl.DataFrame]:
        known = table if cell == ALL else table.filter(cell=cell)
        return known, calibration.predict_kernels([{"op": "gemm", "dtype": dtype, "pass": "fwd", **sizes}])

    def draw(found: tuple[pl.DataFrame, pl.DataFrame], **_: Any) -> Shown:
        known, priced = found
        yield priced.drop("op", "pass")
        yield known

    def code(cell: str, dtype: str, **sizes: int) -> str:
        which = "" if cell == ALL else f".filter(cell={cell!r})"
        row = {"op": "gemm", "dtype": dtype, "pass": "fwd", **sizes}
        made = f"calibration = ln.load_calibration({calibration.name!r})"
        return f"{made}\ncalibration.coverage(){which}\ncalibration.predict_kernels([{row!r}])"

    controls = {"cell": choice("class", [ALL, *table["cell"].unique().sort()], ALL)}
    controls["dtype"] = choice("product of", ["bf16", "fp16", "fp32", "fp8"], "bf16")
    controls |= {name: number(name, size, least=1) for name, size in SIZES.items()}
    return Panel(controls, make, draw, code)


ALL = "all"
