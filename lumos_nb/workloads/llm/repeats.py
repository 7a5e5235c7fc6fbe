"""Repeated blocks in sequences: where a trace names no layer, a layer is what comes again and again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NEIGHBOURS = (1, 2, 3)
"""A period is the distance to the next equal token, or the one after it, where a block has a token several times."""

MOST_PERIODS = 200
"""Periods that are tried: distances between equal tokens, the most frequent first."""


class Tandem(NamedTuple):
    """A block of `period` tokens that stands `times` times in a row from `start` on."""

    start: int
    period: int
    times: int


def tandem(tokens: Ints, count: int | None = None, *, mirrored: bool = False) -> Tandem | None:
    """The back-to-back repetition that covers most tokens, of the shortest period; None where nothing repeats.

    What follows the last repetition often begins as one more (a model's last norm). So blocks count from where the
    repetition starts, or `mirrored` from where it ends, as in a backward pass.

    Parameters
    ----------
    tokens
        Numbers, equal where two places hold the same, shape (n,).
    count
        How often the block must stand there; None for any number of at least 2.

    Examples
    --------
    >>> tandem(np.array([9, 1, 2, 2, 1, 2, 2, 1, 2, 2, 7]))
    Tandem(start=1, period=3, times=3)
    """
    best, covered = None, 0
    for period in _periods(tokens):
        same = tokens[period:] == tokens[:-period]
        edges = np.flatnonzero(np.diff(same, prepend=False, append=False))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        counts = lengths // period + 1
        fits = counts >= 2 if count is None else counts == count
        for at in np.flatnonzero(fits):
            covers = int(counts[at]) * period
            if covers > covered or (best and covers == covered and period < best.period):
                start = starts[at] + (lengths[at] + period - covers if mirrored else 0)
                best, covered = Tandem(int(start), period, int(counts[at])), covers
    return best


def _periods(tokens: Ints) -> list[int]:
    """Distances at which tokens come again, the most frequent first, and multiples of none."""
    order = np.lexsort((np.arange(tokens.size), tokens))
    ordered = tokens[order]
    apart = np.concatenate([(order[n:] - order[:-n])[ordered[n:] == ordered[:-n]] for n in NEIGHBOURS])
    distances, times = np.unique(apart, return_counts=True)
    long_enough = distances <= tokens.size // 2
    distances, times = distances[long_enough], times[long_enough]
    weight = times * distances  # tokens that such a period would explain
    return [int(d) for d in distances[np.argsort(-weight, kind="stable")][:MOST_PERIODS]]


def common(a: Ints, b: Ints) -> tuple[int, int, int]:
    """The longest block that two sequences share: where it begins in each, and its length (0: none)."""
    best = (0, 0, 0)
    length = np.zeros(b.size + 1, np.int64)
    for i, token in enumerate(a):
        length[1:] = np.where(b == token, length[:-1] + 1, 0)
        j = int(length.argmax())
        if length[j] > best[2]:
            n = int(length[j])
            best = (i + 1 - n, j - n, n)
    return best
