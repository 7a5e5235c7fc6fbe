"""Time of kernels on tiles and waves, one compiled loop for all families: `lumos_nb.costs.kernels` says what it means."""

from __future__ import annotations

import numpy as np

from lumos_nb._jit import jit

F1, F2 = "float64[::1]", "float64[:, ::1]"


@jit(f"void({F2}, {F2}, {F1}, {F1})")
def busy_us(work, tiles, constants, out):
    """Microseconds that each kernel keeps the GPU busy, without what launches it; `out` is filled.

    Columns of `work`: batch, m, n, k, us per unit of work on one core, us per clock cycle, cores, us of a byte at the
    sheet's bandwidth, compulsory bytes, bytes of the L2. Columns of `tiles`: height and width (0: the whole n), splits of
    k, cost per unit, cycles to begin and end one. `constants`: share of whole waves, cost of a partial result, cost of a
    byte, cached share, size of the cache, exponent that joins the two, granule of k.
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
            blocks = batch * np.ceil(m / height) * np.ceil(n / width) * splits
            depth = np.ceil(k / (splits * granule)) * granule
            waves = blocks / cores
            load = whole * np.ceil(waves) + (1.0 - whole) * max(waves, 1.0)
            time = load * (height * width * depth * unit * cost + begin * cycle)
            if splits > 1.0:
                time += partial * splits * batch * m * n * 8.0 * byte_us  # written and read as fp32
            option[c] = time
            best = min(best, time)
        compute = 0.0
        if count > 0:
            total = 0.0  # a smooth minimum: the library's choice is near the best, not always the best
            for c in range(count):
                share = best / option[c]
                share *= share
                share *= share
                share *= share
                share *= share
                total += share * share
            compute = best * total ** (-1.0 / 32.0)
        fill = size / (cache * l2)
        move = size * byte_us * memory * (1.0 - cached / (1.0 + fill * fill))
        longer, shorter = max(compute, move), min(compute, move)
        out[i] = longer * (1.0 + (shorter / longer) ** power) ** (1.0 / power)
