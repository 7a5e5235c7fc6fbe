"""Intervals of a prediction from what it missed on groups that its fit had not seen.

Split conformal prediction (Vovk et al., *Algorithmic Learning in a Random World*, 2005) assumes that new rows are like
the rows of the calibration set. Rows of one sweep are alike, new models or GPUs are not: so the residuals are those of
whole groups left out in turn, every group weighs the same, and the width depends on how hard a row is (Mondrian bins).
"""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from lumos_nb.errors import InputError

Floats = NDArray[np.float64]

_ROWS_A_BIN = 40
"""Fewer rows than this say too little about a 5 % quantile."""


class Band(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantiles of log(true / predicted) over a difficulty, linear between the centres of its bins.

    `low` and `high` are factors in log space for each of `centres`; beyond the first and last they stay constant.
    """

    level: float
    groups: int
    rows: int
    centres: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def fitted(
        cls, residual: Floats, difficulty: Floats, group: NDArray[np.generic], level: float = 0.9, bins: int = 6
    ) -> Self:
        """A band from the residuals log(true / predicted) of rows, each predicted without its own group.

        Parameters
        ----------
        residual, difficulty
            One value a row; the difficulty is any number on which the width may depend, as log(predicted time).
        group
            What the row's group is called: the model, GPU or source that was left out when it was predicted.
        level
            Nominal coverage.
        bins
            At most so many bins of equally many rows; fewer where there are less than 40 rows for each.

        Raises
        ------
        InputError
            Lengths differ, there is no row, or a value is not finite.
        """
        if not len(residual) == len(difficulty) == len(group) > 0 or not np.isfinite([residual, difficulty]).all():
            raise InputError(
                f"an interval needs finite residuals: {len(residual)} of them, {len(difficulty)} difficulties and "
                f"{len(group)} groups were given, {int((~np.isfinite(residual)).sum())} residuals not finite."
            )
        _, of_row, size = np.unique(group, return_inverse=True, return_counts=True)
        weight = 1.0 / size[of_row]
        order = np.argsort(difficulty, kind="stable")
        parts = np.array_split(order, max(1, min(bins, len(order) // _ROWS_A_BIN)))
        tail = (1.0 - level) / 2.0
        return cls(
            level=level,
            groups=len(size),
            rows=len(residual),
            centres=tuple(float(np.median(difficulty[part])) for part in parts),
            low=tuple(_quantile(residual[part], weight[part], tail) for part in parts),
            high=tuple(_quantile(residual[part], weight[part], 1.0 - tail) for part in parts),
        )

    def around(self, predicted: Floats, difficulty: Floats) -> tuple[Floats, Floats]:
        """Lower and upper end for each prediction, in its unit."""
        low = np.interp(difficulty, self.centres, self.low)
        high = np.interp(difficulty, self.centres, self.high)
        return predicted * np.exp(low), predicted * np.exp(high)


def _quantile(values: Floats, weight: Floats, share: float) -> float:
    """The weighted quantile, moved outwards by the one more row that conformal prediction asks for."""
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    total = below[-1] + weight.max()
    target = share * total if share > 0.5 else below[-1] - (1.0 - share) * total
    return float(values[order][min(np.searchsorted(below, target), len(values) - 1)])
