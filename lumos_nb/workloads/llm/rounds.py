"""The step of many micro-batches from steps of few: once a pipeline is full, each round of it takes as long."""

from __future__ import annotations

from typing import NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

Time = TypeVar("Time", float, NDArray[np.float64])

SPLIT_SCHEDULES = ("zb-h1", "zb-v")
"""Schedules whose backward passes are two: gradients of weights pile up for some rounds before each takes as long."""
FULL, FULL_SPLIT = 2, 8
"""Rounds of a pipeline after which a replayed step grows evenly, with whole and with split backward passes."""


class Rounds(NamedTuple):
    """Numbers of micro-batches whose steps are followed: all, or two that lie one round of the pipeline apart.

    Attributes
    ----------
    counts
        Those numbers.
    left
        Rounds between the last of them and all.
    """

    counts: tuple[int, ...]
    left: float

    @classmethod
    def of(cls, micro_batches: int, pp: int, full: int) -> Self:
        """For a pipeline of `pp` ranks, of which every round after `full` ones takes as long.

        Examples
        --------
        >>> Rounds.of(64, pp=8, full=2)
        Rounds(counts=(16, 24), left=5.0)
        >>> Rounds.of(32, pp=8, full=2)
        Rounds(counts=(32,), left=0.0)
        """
        least = max(full * pp, 2) + micro_batches % pp  # one micro-batch alone adds up no gradients
        if micro_batches <= 2 * least + pp:  # the two are no less work
            return cls((micro_batches,), 0.0)
        return cls((least, least + pp), (micro_batches - least - pp) / pp)

    def total(self, times: list[Time]) -> Time:
        """The time of all, from those of `counts`."""
        return times[-1] + self.left * (times[-1] - times[0])
