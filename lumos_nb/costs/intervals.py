"""Intervals of a prediction from what it missed on groups that its fit had not seen.

Split conformal prediction (Vovk et al., *Algorithmic Learning in a Random World*, 2005) assumes that new rows are like
the rows of the calibration set. Rows of one sweep are alike, new models or GPUs are not: so the residuals are those of
whole groups left out in turn. A residual is its group's offset and what scatters within the group (random effects:
Laird and Ware, *Biometrics* 38, 1982). The scatter has quantiles that depend on how hard a row is (Mondrian bins),
every group weighing the same; the offset of a new group has Student's t, which is wide where few groups were left out.
"""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student

from lumos_nb.errors import InputError

Floats = NDArray[np.float64]

_ROWS_A_BIN = 40
"""Fewer rows than this say too little about a 5 % quantile."""
_PRIOR_GROUPS, _PRIOR_SHARE = 1.0, 1 / 3
"""How many groups the thought before any is seen weighs: that they differ by a third of what rows of one do."""


class Band(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantiles of log(true / predicted) over a difficulty, linear between the centres of its bins.

    `low` and `high` are those of the scatter within a group, for each of `centres`; beyond the first and last they stay
    constant. `middle` is where groups lie on average, and `between` how far a new one may lie from there: interval and
    scatter add as squares. A difficulty of several numbers is their sum weighed by `slopes`. All are in log space.
    """

    level: float
    groups: int
    rows: int
    slopes: tuple[float, ...] = (1.0,)
    centres: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    middle: float = 0.0
    between: float = 0.0

    @classmethod
    def fitted(
        cls, residual: Floats, difficulty: Floats, group: NDArray[np.generic], level: float = 0.9, bins: int = 6
    ) -> Self:
        """A band from the residuals log(true / predicted) of rows, each predicted without its own group.

        Parameters
        ----------
        residual
            One value a row.
        difficulty
            One value a row, or several (rows x values): any numbers on which the width may depend, as log(predicted
            time). Of several, a regression of the logarithm of the scatter makes one.
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
        finite = all(np.isfinite(values).all() for values in (residual, difficulty))
        if not len(residual) == len(difficulty) == len(group) > 0 or not finite:
            raise InputError(
                f"an interval needs finite residuals: {len(residual)} of them, {len(difficulty)} difficulties and "
                f"{len(group)} groups were given, {int((~np.isfinite(residual)).sum())} residuals not finite."
            )
        _, of_row, size = np.unique(group, return_inverse=True, return_counts=True)
        weight = 1.0 / size[of_row]
        offset = np.array([np.median(residual[of_row == i]) for i in range(len(size))])
        if len(size) == len(residual):  # no group has a scatter: all is between rows
            offset = np.full(len(size), np.median(residual))
        inside = residual - offset[of_row]
        slopes = _slopes(inside, difficulty, weight)
        place = difficulty.reshape(len(residual), -1) @ slopes
        order = np.argsort(place, kind="stable")
        parts = np.array_split(order, max(1, min(bins, len(order) // _ROWS_A_BIN)))
        tail = (1.0 - level) / 2.0
        return cls(
            level=level,
            groups=len(size),
            rows=len(residual),
            slopes=tuple(slopes.tolist()),
            centres=tuple(float(np.median(place[part])) for part in parts),
            low=tuple(min(0.0, _quantile(inside[part], weight[part], tail)) for part in parts),
            high=tuple(max(0.0, _quantile(inside[part], weight[part], 1.0 - tail)) for part in parts),
            middle=float(offset.mean()),
            between=_between(offset, np.sqrt(np.average(inside**2, weights=weight)), level),
        )

    def around(self, predicted: Floats, difficulty: Floats) -> tuple[Floats, Floats]:
        """Lower and upper end for each prediction, in its unit; `difficulty` as the band was fitted on."""
        place = difficulty.reshape(len(predicted), -1)[:, : len(self.slopes)] @ np.array(self.slopes)
        low, high = (np.interp(place, self.centres, ends) for ends in (self.low, self.high))
        middle = predicted * np.exp(self.middle)
        return middle * np.exp(-np.hypot(low, self.between)), middle * np.exp(np.hypot(high, self.between))


def _slopes(inside: Floats, difficulty: Floats, weight: Floats) -> Floats:
    """How the logarithm of the scatter goes with each of several difficulties: weighted least squares."""
    if difficulty.ndim == 1:
        return np.ones(1)
    root = np.sqrt(weight)[:, None]
    target = np.log(np.abs(inside) + 1e-3)
    columns = np.column_stack([difficulty, np.ones(len(target))])
    return np.asarray(np.linalg.lstsq(columns * root, target * root[:, 0], rcond=None)[0][:-1])


def _between(offset: Floats, scatter: float, level: float) -> float:
    """How far the offset of one more group may be from the mean of these."""
    count = len(offset)
    if count < 2:
        return 0.0
    freedom = _PRIOR_GROUPS + count - 1.0
    variance = (_PRIOR_GROUPS * (_PRIOR_SHARE * scatter) ** 2 + np.square(offset - offset.mean()).sum()) / freedom
    return float(student.ppf((1.0 + level) / 2.0, freedom) * np.sqrt(variance * (1.0 + 1.0 / count)))


def _quantile(values: Floats, weight: Floats, share: float) -> float:
    """The weighted quantile, moved outwards by the one more row that conformal prediction asks for."""
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    total = below[-1] + weight.max()
    target = share * total if share > 0.5 else below[-1] - (1.0 - share) * total
    return float(values[order][min(np.searchsorted(below, target), len(values) - 1)])
