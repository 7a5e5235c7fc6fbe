"""What fitted collective costs are shown beside: a latency-bandwidth line, an 8-parameter curve, the nearest sweep.

Each prices one held-out sweep from those training rows that are most like it: of the same source, nodes and collective;
else of the same source and nodes, else of the same collective and nodes, else of the same nodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import OptimizeWarning, curve_fit, nnls
from scipy.special import expit

from lumos_nb.costs.collective_plans import BUS_FACTOR

Floats = NDArray[np.float64]

ALIKE = (("source", "nodes", "collective"), ("source", "nodes"), ("collective", "nodes"), ("nodes",))


def related(train: pl.DataFrame, sweep: pl.DataFrame) -> pl.DataFrame:
    """The training rows most like a sweep."""
    for columns in ALIKE:
        found = train.filter(*(pl.col(column) == sweep[column][0] for column in columns))
        if found.height:
            return found
    return train


def bus(frame: pl.DataFrame) -> Floats:
    """[rows]: bytes that count for the bus bandwidth."""
    factor = np.empty(frame.height)
    for kind in frame["collective"].unique():
        rows = (frame["collective"] == kind).to_numpy()
        factor[rows] = BUS_FACTOR[kind](frame["gpus"].to_numpy()[rows].astype(float))
    return factor * frame["size_bytes"].to_numpy()


def line(train: pl.DataFrame, sweep: pl.DataFrame) -> Floats:
    """Latency plus bus bytes over a bandwidth, of the least relative error."""
    times = train["time_us"].to_numpy()
    terms = np.stack([np.ones_like(times), bus(train)], axis=1) / times[:, None]
    latency_us, us_a_byte = nnls(terms, np.ones_like(times))[0]
    return latency_us + us_a_byte * bus(sweep)


def curve(train: pl.DataFrame, sweep: pl.DataFrame) -> Floats:
    """The curve of Lin et al. (arXiv 2404.12674): constant, then a logistic of log bandwidth, then a line.

    Their turning points: the curve begins before the first size at which time has grown by a fifth, and ends two after
    the last that reaches less than 95 % of the best bandwidth.
    """
    if train.height < 10:
        return line(train, sweep)  # too few for eight parameters
    train = train.sort("size_bytes")
    log_size, time = np.log2(train["size_bytes"].to_numpy()), train["time_us"].to_numpy()
    rate = bus(train) / time
    grown = np.flatnonzero(np.abs(np.diff(time)) / 2 / time[:-1] > 0.1)
    begins = max(int(next(iter(grown[grown >= 5]), 5)) - 1, 1)
    slow = np.flatnonzero(rate < 0.95 * rate.max())
    ends = min(int(slow[-1]) + 2 if slow.size else begins + 5, len(time) - 1)
    overhead_us, best = time[begins - 1], rate.max()
    part = slice(begins, max(ends, begins + 4) + 1)

    def logistic(s: Floats, height: float, middle: float, steepness: float, base: float) -> Floats:
        return height * expit(steepness * (s - middle)) + base

    y = np.log10(rate[part])
    first = (y.max(), float(np.median(log_size[part])), 1.0, y.min())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizeWarning)  # of the covariance, which nobody reads
        try:
            found = curve_fit(logistic, log_size[part], y, p0=first, method="dogbox", maxfev=5000)[0]
        except RuntimeError:  # no least error found: where it started
            found = np.array(first)
    asked, wire = np.log2(sweep["size_bytes"].to_numpy()), bus(sweep)
    middle = wire / 10 ** logistic(asked, *found)
    large = np.where(asked > log_size[min(ends, len(log_size) - 1)], wire / best + overhead_us, middle)
    return np.where(asked <= log_size[begins], overhead_us, large)


def nearest(train: pl.DataFrame, sweep: pl.DataFrame) -> Floats:
    """The bus bandwidth at this size of the sweep with the nearest number of GPUs, linear between its sizes in log."""
    distance = (pl.col("gpus").log() - np.log(sweep["gpus"][0])).abs()
    train = train.filter(distance == distance.min()).group_by("size_bytes").agg(
        pl.col("gpus", "collective").first(), time_us=pl.col("time_us").median()
    )  # fmt: skip
    train = train.sort("size_bytes")
    size = np.log(train["size_bytes"].to_numpy())
    rate = np.log(bus(train) / train["time_us"].to_numpy())
    asked = np.log(sweep["size_bytes"].to_numpy())
    below = np.minimum(asked - size[0], 0.0)  # below the smallest size, its time
    return bus(sweep) / np.exp(np.interp(asked, size, rate) + below)


BASELINES: dict[str, Callable[[pl.DataFrame, pl.DataFrame], Floats]] = {
    "line": line,
    "8-parameter curve": curve,
    "nearest sweep": nearest,
}
