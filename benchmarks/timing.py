"""Runs timed in turn, so that what else happens on the machine happens to all of them: ratios, not seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
REPEATS = 5


class Ratio(NamedTuple):
    """How many times as long one run takes as another: the median over rounds, and half the range between quartiles."""

    median: float
    noise: float


def in_turn(*runs: Callable[[], object], repeats: int = REPEATS) -> Floats:
    """Processor time in s of each run in each round (repeats, runs)."""
    times = np.empty((repeats, len(runs)))
    for r, i in np.ndindex(*times.shape):
        began = time.process_time()
        runs[i]()
        times[r, i] = time.process_time() - began
    return times


def ratio(longer: Floats, shorter: Floats) -> Ratio:
    """`longer` over `shorter`, round by round (repeats,)."""
    each = longer / shorter
    low, middle, high = np.quantile(each, (0.25, 0.5, 0.75))
    return Ratio(float(middle), float(high - low) / 2)
