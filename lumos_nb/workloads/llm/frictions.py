"""What a step pays beyond its kernels' own times: constants, measured on other people's traces, and how they act.

`python -m benchmarks.frictions` measures them; the rows `frictions/` of `benchmarks/accuracy.json` hold what it found.
They come from single kernels, passes and gaps: no step time had a part in any of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

from lumos_nb.errors import InputError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """A constant: what is taken, its 90 % interval or range over recordings, and what it rests on.

    Raises
    ------
    InputError
        The value is negative, or not within its interval.
    """

    value: float
    low: float
    high: float
    source: str

    def __post_init__(self) -> None:
        """Refuse what no time could be."""
        if not (self.value >= 0 and self.low <= self.value <= self.high < math.inf):
            raise InputError(
                f"a friction of {self.value!r} between {self.low!r} and {self.high!r}; give a finite value of at least "
                "0 inside its interval."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frictions:
    """The constants: microseconds where a name ends in _us, else shares or numbers.

    Examples
    --------
    >>> Frictions().products_slowed.value
    0.1
    """

    # how much longer what shares the device all the time takes: kernels with collectives, and the reverse
    products_slowed: Measured = Measured(
        0.10,
        0.06,
        0.15,
        "products beside NCCL, 147 kernels of 4 jobs on V100 and A100, a fixed effect each; what slows is the cores "
        "that NCCL holds, 8 of 80 or 8 to 24 of 108. A job on MI300X shows nothing (-0.07 to 0)",
    )
    moves_slowed: Measured = Measured(0.05, 0.02, 0.08, "kernels that only move data, 108 of the same jobs")
    collectives_slowed: Measured = Measured(
        0.09,
        -0.06,
        0.24,
        "collectives beside kernels, less their waiting, 18 messages of one job on V100: hardly told",
    )
    # standard deviation of a kernel among its repeats, ||us, share of its duration||, apart from the next one's
    kernel_jitter_us: Measured = Measured(0.43, 0.19, 0.52, "repeats on V100, A100 and H100; MI300X 0.9")
    kernel_jitter: Measured = Measured(0.0034, 0.0022, 0.010, "the same; MI300X 0.03")
    # that of a long row of kernels as a whole, a share of its time
    pass_jitter: Measured = Measured(
        0.004,
        0.003,
        0.006,
        "passes of a rank beyond what their micro-batch brings: StragglerAnalysis' jobs ST and AR, Primus backward "
        "(its forward 0.014); 64 kernels in a row on V100 and A100 vary by 0.003",
    )
    # between GPUs that do the same, lasting: the slowest one paces all that wait for it
    gpus_apart: Measured = Measured(
        0.004,
        0.0018,
        0.018,
        "ST 0.0047, AR 0.0038 without a broken rank, four V100 of a node 0.0018, Primus 0.018",
    )
    # between micro-batches, alike on all stages
    documents_apart: Measured = Measured(
        0.016, 0.014, 0.017, "ST and AR, which train on real documents; nothing where lengths are fixed"
    )
    # the host, for each launched kernel, and kernels for each row of a work table
    launch_us: Measured = Measured(
        17.0,
        5.0,
        38.0,
        "eager PyTorch under the profiler: Qwen on H100 and MI300X; ResNet on MI300X 5, OWLv2 38, recommenders on A100 "
        "and V100 27 to 30",
    )
    kernels_a_row_eager: Measured = Measured(
        3.8, 2.1, 3.9, "a layer forward of Hugging Face's Qwen 42 of 11, OWLv2 21 of 10"
    )
    kernels_a_row_fused: Measured = Measured(1.45, 1.0, 2.1, "Megatron's GPT 17 of 12; 1 where everything is fused")
    # the device, between two kernels of a stream whose host is far ahead
    gap_us: Measured = Measured(
        1.15,
        0.8,
        2.2,
        "V100 0.8, A100 1.15 (PCIe 2.2), H100 1.0 to 1.2; none on MI300X, whose clock counts it in, nor on B200. "
        "Kernel times that calibrations rest on are without it",
    )


def slowed_us(dur_us: ArrayLike, overlapped_share: ArrayLike, slowed: ArrayLike) -> Floats:
    """Durations of what shares the device with something else.

    Parameters
    ----------
    dur_us
        What each takes alone (n,).
    overlapped_share
        The share of that time during which the other runs too, 0 to 1 (n,).
    slowed
        How much longer it takes where that is all the time, `Frictions.products_slowed` and its like.

    Returns
    -------
    dur_us
        dur_us x (1 + slowed x overlapped_share) (n,).

    Raises
    ------
    InputError
        A share lies outside 0 to 1.

    Examples
    --------
    >>> slowed_us([100.0, 100.0], [0.0, 0.5], 0.1)
    array([100., 105.])
    """
    share = np.asarray(overlapped_share, np.float64)
    if share.size and not (share.min() >= 0 and share.max() <= 1):
        raise InputError(f"overlapped_share reaches from {share.min():g} to {share.max():g}; give shares of 0 to 1.")
    slower: Floats = np.asarray(dur_us, np.float64) * (1 + np.asarray(slowed, np.float64) * share)
    return slower


def segment_sigma_us(dur_us: ArrayLike, segment: ArrayLike, frictions: Frictions | None = None) -> Floats:
    """Standard deviation of the time of each segment, kernels that run one after another up to a join with other ranks.

    Parameters
    ----------
    dur_us
        Durations of kernels (n,).
    segment
        The number of each one's segment, from 0 (n,).
    frictions
        Constants of one's own.

    Returns
    -------
    sigma_us
        (segments,): the kernels' own jitter, independent, beside that of the whole.

    Examples
    --------
    >>> segment_sigma_us([1000.0, 1000.0, 50.0], [0, 0, 1]).round(2)
    array([9.35, 0.5 ])
    """
    has = frictions or Frictions()
    dur, number = np.asarray(dur_us, np.float64), np.asarray(segment, np.int64)
    own = np.bincount(number, has.kernel_jitter_us.value**2 + (has.kernel_jitter.value * dur) ** 2)
    whole = has.pass_jitter.value * np.bincount(number, dur)
    sigma: Floats = np.sqrt(own + whole**2)
    return sigma


_GRID = np.linspace(-10.0, 12.0, 1409)
"""Standard deviations. Sums over it are integrals to 1e-12: what is summed is smooth and dies out at both ends."""


def expected_late_us(sigma_us: ArrayLike, ranks: ArrayLike) -> Floats:
    """How much later than the mean the last of n ranks arrives whose times vary independently, as normals.

    The expected maximum, n times the integral of x phi(x) Phi(x)^(n - 1), by logarithms, so that any n will do.

    Parameters
    ----------
    sigma_us
        Standard deviation of one rank's time.
    ranks
        How many wait for each other, 1 or more; of a shape that goes with `sigma_us`.

    Returns
    -------
    late_us
        0 for one rank, 0.56 sigma for 2, 1.4 for 8, 2.5 for 100, 3.2 for 1000.

    Raises
    ------
    InputError
        There are fewer than one rank.

    Examples
    --------
    >>> expected_late_us(10.0, [1, 2, 8, 64]).round(2)
    array([ 0.  ,  5.64, 14.24, 23.44])
    """
    count = np.asarray(ranks, np.float64)
    if count.size and not count.min() >= 1:
        raise InputError(f"ranks holds {count.min():g}; the last of a group of 1 or more arrives.")
    distinct, place = np.unique(count, return_inverse=True)
    log_density = -(_GRID**2) / 2 - math.log(math.sqrt(2 * math.pi))
    log_weight = np.log(distinct)[:, None] + log_density + (distinct[:, None] - 1) * log_ndtr(_GRID)
    expected = (_GRID * np.exp(log_weight)).sum(axis=1) * (_GRID[1] - _GRID[0])
    late: Floats = np.asarray(sigma_us, np.float64) * expected[place].reshape(count.shape)
    return late
