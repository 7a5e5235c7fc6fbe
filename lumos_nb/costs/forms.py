"""How kernels of each family are cut into tiles, and what the constants of the kernel model are before any measurement.

Tilings are those of cuBLAS's and CUTLASS's usual kernels; the priors are what the makers' papers state or what such
kernels usually reach, and how far from it one may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lumos_nb.config import Gpu

Prior = tuple[float, float]

PRIORS: Mapping[str, Prior] = {
    "launch_cycles": (5000, 0.7),  # from one kernel's end to the next one's begin, or what a profiler counts as such
    "gap_cycles": (15000, 0.7),  # beside it, where a sample has the host's way to the next launch in it
    "memory": (1.2, 0.3),  # inverse share of the bandwidth
    "cached": (0.5, 1.0),  # odds of what the L2 saves of a working set that it holds
    "cache": (0.7, 0.5),  # share of the L2 that holds a working set
    "power": (4.0, 0.4),  # 1: compute and memory follow each other; large: they overlap
    "cost": (1.2, 0.3),  # inverse share of a core's peak that a large tile reaches
    "begin_cycles": (2000, 1.0),  # of a tile: first operands
    "whole": (2.7, 1.5),  # odds that a partial wave takes as long as a whole one
    "edge": (0.2, 0.5),  # how much more a small tile costs, in log space by 64 / height + 64 / width
    "end_cycles": (1000, 1.0),  # of a tile of 128 x 128: results
    "partial": (0.5, 1.0),  # of writing and reading each split's results
    "score_cycles": (0.1, 0.1),  # of a core for one score of attention: an exponential (1/16) and what goes with it
    "diagonal": (96, 0.5),  # keys beyond a causal mask that a tile computes all the same
}
"""What a constant is before anything is measured, and how many times it may well differ, in log space."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a family's kernels are cut, and the constants that it has.

    `tiles` are height and width (0: all of n); each may split k into `splits` parts. `bends` are the widths of rows at
    which the slowdown may change, `levels` what is other than in `LEVELS`. Attention's products and exponentials join
    by the power `joint`: 1 where they follow each other, more where those of one tile hide behind another's.
    """

    constants: Mapping[str, Prior]
    tiles: tuple[tuple[int, int], ...] = ()
    splits: tuple[int, ...] = (1,)
    bends: tuple[int, ...] = ()
    granule: float = 1.0
    joint: float = 2.0
    levels: dict[str, float] = field(default_factory=dict)

    def options(self) -> list[tuple[int, int, int]]:
        """Every tiling: height, width, splits."""
        return [(*tile, split) for tile in self.tiles for split in self.splits]


def _constants(names: str, **others: Prior) -> dict[str, Prior]:
    return {name: PRIORS[name] for name in names.split()} | others


_STREAM = Form(_constants("launch_cycles gap_cycles memory cached cache"))
_ROWS = Form(
    _constants(
        "launch_cycles gap_cycles cached cache power whole", cost=(1.0, 0.5), memory=(1.3, 0.5), begin_cycles=(500, 1.5)
    ),
    tiles=((1, 0),),
    bends=(64, 256, 1024, 4096, 16384),
)
_PRODUCT = Form(
    _constants("launch_cycles gap_cycles memory cached cache power cost begin_cycles whole edge end_cycles partial"),
    tiles=(
        *((256, 128), (128, 256), (128, 128), (256, 64), (64, 256)),
        *((128, 64), (64, 128), (64, 64), (32, 64), (16, 64)),
    ),
    splits=(1, 2, 3, 4, 6, 8),
    granule=32.0,
)
_BY_HAND = {"gpu": 0.3}  # made for one GPU, others run it at rates of their own
_ATTENTION = Form(
    _constants("launch_cycles gap_cycles memory cost begin_cycles whole score_cycles diagonal", cost=(1.4, 0.3)),
    tiles=((128, 0),),
    levels=_BY_HAND,
)
_UNFUSED = Form(
    # every score goes to memory and back several times, also those that the mask hides
    _constants(
        "launch_cycles gap_cycles memory cost begin_cycles whole score_cycles", cost=(1.4, 0.3), score_cycles=(1.0, 1.0)
    ),
    tiles=((128, 0),),
    joint=1.0,
    levels=_BY_HAND,
)
FORMS: Mapping[str, Form] = {
    "gemm": _PRODUCT,
    "convolution": _PRODUCT,
    "attention": _ATTENTION,
    **dict.fromkeys(
        ("norm", "softmax", "cross_entropy", "gated_activation", "rope", "embedding_lookup", "index"), _ROWS
    ),
}
"""Families whose kernels are cut otherwise than a plain stream of elements."""


def form_of(family: str, implementation: str) -> Form:
    """The form of a family's kernels; attention that is not fused has one of its own."""
    return _UNFUSED if "unfused" in implementation else FORMS.get(family, _STREAM)


TILE_SIGMA, BEND_SIGMA = 0.15, 0.4
LEVELS: dict[str, float] = {"op": 0.15, "pass": 0.15, "trans": 0.15, "gpu": 0.05}
"""Columns of which every value has a slowdown of its own (a GPU's is what its sheet does not say), and how far from
none it may be, in log; an unseen value has none. Above: the same of a tile and of a width of rows."""
SCATTER = 0.07
"""What a sample usually departs from a good fit, in log."""
COMPUTED = ("gemm", "convolution", "attention")
"""Families whose tiles are bound by the peak rate; the others' by the bandwidth."""


FP32_JOULES = 250 / 14e12
"""Of one FLOP outside the tensor cores at 12 nm, all that a board does for it included: what V100-PCIe's sheet has for
each at its peak, 250 W / 14 TFLOP/s, which measurement finds it to hold. Proportional to the process."""


def sustained_flops(gpu: Gpu, dtype: str) -> float:
    """FLOP/s that a core can keep up: the peak, or in fp32 what the board's power pays for.

    A T4 is a chip of V100's process on a board of 70 W: 3.9 of the 8.1 TFLOP/s on its sheet. P100, A100, H100 and their
    like have power to spare; A40, L40S and MI300X have not. Nothing is known of tensor cores, whose peak stays.
    """
    peak = gpu.peak(dtype)
    if dtype != "fp32" or gpu.board_power_w is None or gpu.process_nm is None:
        return peak
    return min(peak, gpu.board_power_w / (FP32_JOULES * gpu.process_nm / 12))
