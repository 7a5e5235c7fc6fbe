"""Time of kernels on tiles and waves, one compiled loop for all families; `costs/kernels.py` says what it means."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lumos_nb._jit import jit

Floats = NDArray[np.float64]

OWN = 6
"""Columns of the gradient before those of the tilings."""


@jit("void(float64[:, ::1], float64[:, ::1], float64[::1], float64[::1], float64[:, ::1])")
def busy_us(work: Floats, tiles: Floats, constants: Floats, out: Floats, gradient: Floats) -> None:
    """Microseconds that each kernel keeps the GPU busy, without what launches it; `out` is filled.

    Columns of `work`: batch, m, n, k, us per unit of work on one core, us per clock cycle, cores, us of a byte at the
    sheet's bandwidth, compulsory bytes, bytes of the L2. Columns of `tiles`: height and width (0: the whole n), splits
    of k, cost per unit, cycles to begin and end one. `constants`: share of whole waves, cost of a partial result, cost
    of a byte, cached share, share of the L2, exponent that joins the two, granule of k. `gradient`, if it has rows,
    becomes that of the logarithm of time: by the first six constants (logarithms of all but the two shares), then for
    each tiling by the logarithm of its cost, then of its cycles.
    """
    whole, partial, memory, cached, cache, power, granule = constants
    count = tiles.shape[0]
    option = np.empty(max(count, 1))
    for i in range(work.shape[0]):
        batch, m, n, k, unit, cycle, cores, byte_us, size, l2 = work[i]
        best = np.inf
        for c in range(count):
            height, width, splits, cost, begin = tiles[c]
            if width == 0.0:
                width = n
            waves = batch * np.ceil(m / height) * np.ceil(n / width) * splits / cores
            load = whole * np.ceil(waves) + (1.0 - whole) * max(waves, 1.0)
            depth = np.ceil(k / (splits * granule)) * granule
            time = load * (height * width * depth * unit * cost + begin * cycle)
            if splits > 1.0:
                time += partial * splits * batch * m * n * 8.0 * byte_us  # as fp32, there and back
            option[c] = time
            best = min(best, time)
        total = 0.0  # a smooth minimum: the library's choice is near the best, not always the best
        for c in range(count):
            option[c] = (best / option[c]) ** 32
            total += option[c]
        compute = best * total ** (-1.0 / 32.0) if count > 0 else 0.0
        fill = size / (cache * l2)
        held = cached / (1.0 + fill * fill)
        move = size * byte_us * memory * (1.0 - held)
        longer, shorter = max(compute, move), min(compute, move)
        joined = 1.0 + (shorter / longer) ** power
        out[i] = longer * joined ** (1.0 / power)
        if gradient.shape[0] == 0:
            continue
        row = gradient[i]
        row[:] = 0.0
        by_compute = (compute / longer) ** power / joined
        by_move = 1.0 - by_compute
        row[2] = by_move
        row[3] = -by_move * held / cached / (1.0 - held)
        row[4] = -by_move * held / (1.0 - held) * 2.0 * fill * fill / (1.0 + fill * fill)
        ratio = shorter / longer
        if ratio > 0.0:
            row[5] = ((joined - 1.0) * np.log(ratio) - joined * np.log(joined) / power) / joined
        for c in range(count):
            chosen = by_compute * option[c] / total
            if chosen < 1e-9:
                continue
            height, width, splits, cost, begin = tiles[c]
            if width == 0.0:
                width = n
            waves = batch * np.ceil(m / height) * np.ceil(n / width) * splits / cores
            load = whole * np.ceil(waves) + (1.0 - whole) * max(waves, 1.0)
            inside = height * width * np.ceil(k / (splits * granule)) * granule * unit * cost
            adding = partial * splits * batch * m * n * 8.0 * byte_us if splits > 1.0 else 0.0
            chosen /= load * (inside + begin * cycle) + adding
            row[0] += chosen * (np.ceil(waves) - max(waves, 1.0)) * (inside + begin * cycle)
            row[1] += chosen * adding
            row[6 + c] = chosen * load * inside
            row[6 + count + c] = chosen * load * begin * cycle
