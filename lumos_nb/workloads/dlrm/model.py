"""A recommendation model beside its embedding tables, and how a step trains it: `Dlrm` and `DlrmTraining`.

A DLRM (Naumov et al., 2019) puts dense features through a bottom MLP, looks categorical ones up in embedding tables,
lets all of these vectors interact and puts the result through a top MLP that ends in one logit.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import polars as pl

from lumos_nb.errors import LayoutError, items_of, require_whole
from lumos_nb.transformer import MOST, Spec

Matrix = tuple[str, int, int]
"""A dense weight: the part that it is of, its outputs and its inputs."""


class Dlrm(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dense part of a recommendation model; its tables are a frame (`embedding_tables`).

    `dense` features go through the layers of `bottom`, which ends in the width of an embedding; `top` ends in 1. As
    `interaction`, "dot" multiplies every pair of vectors, "cat" puts them side by side, and "cross" does so and
    follows with `cross_layers` of DCNv2 (Wang et al., 2021), each of two matrices of rank `cross_rank` or of one (0).

    Raises
    ------
    LayoutError
        A width is not positive, or two fields contradict each other; the message names field and value.

    Examples
    --------
    >>> model = Dlrm(dense=13, bottom=(512, 256, 64), top=(512, 256, 1))
    >>> model.features([64] * 26)            # 64 of the bottom MLP and 27 x 26 / 2 products
    415
    """

    dense: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    interaction: Literal["dot", "cat", "cross"] = "dot"
    cross_layers: int = 0
    cross_rank: int = 0

    def __post_init__(self) -> None:
        self._checked("cross_layers", "cross_rank")
        for field in ("bottom", "top"):
            if not getattr(self, field) or min(getattr(self, field)) < 1:
                raise self.refusal(field, "give the width of each layer, at least one of at least 1")
        if self.top[-1] != 1:
            raise self.refusal("top", "the last layer makes one logit: let it end in 1")
        if (self.interaction == "cross") != (self.cross_layers > 0):
            raise self.refusal("cross_layers", f"interaction is {self.interaction!r}: cross has layers, others none")

    def features(self, dims: list[int]) -> int:
        """Inputs of the top MLP, for pooled embeddings of these widths.

        Raises
        ------
        LayoutError
            There is no table, or a dot interaction has vectors of several widths.
        """
        width, dims = self.bottom[-1], items_of("dims", dims, "the dim of each table")
        require_whole(1, MOST, **{f"dims[{at}]": dim for at, dim in enumerate(dims)})
        dims = [int(dim) for dim in dims]
        if not dims:
            raise LayoutError("Dlrm: there is no embedding table; give one or more.")
        if self.interaction != "dot":
            return width + sum(dims)
        if odd := next((dim for dim in dims if dim != width), None):
            raise LayoutError(
                f"Dlrm: a table has dim {odd} and the bottom MLP ends in {width}; a dot interaction multiplies vectors "
                'of one width: give the tables that dim, or interaction="cat".'
            )
        return width + len(dims) * (len(dims) + 1) // 2

    def weights(self, dims: list[int]) -> list[Matrix]:
        """Every dense matrix in the order of its use, each with a bias but the first of a cross layer's two."""
        inputs = self.features(dims)
        crossed = [(inputs, inputs)] if not self.cross_rank else [(self.cross_rank, inputs), (inputs, self.cross_rank)]
        return [
            *(("bottom", out, into) for into, out in pairwise((self.dense, *self.bottom))),
            *(("interaction", *matrix) for _ in range(self.cross_layers) for matrix in crossed),
            *(("top", out, into) for into, out in pairwise((inputs, *self.top))),
        ]


class DlrmTraining(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step: its batch over all devices, number formats, and what overlaps.

    `dtype` is that of products, `comm_dtype` that of pooled embeddings that travel ("" as activations), `index_bytes`
    the size of an index. With `prefetch` the indices of a batch are sent round while the batch before is trained; with
    `overlap` pooled embeddings travel beside the MLP that does not need them, and gradients of the MLPs beside what is
    left of the backward pass, in buckets of `bucket_bytes` (0: one of all). Collectives share one stream, as those of a
    process group do, or with `comm_streams=2` the sums of gradients have one of their own. `fused` has one kernel of
    the optimizer for all parameters. `kernels` and `launch_us` are as in `Training`.

    Raises
    ------
    LayoutError
        A size is not positive; the message names field and value.
    """

    global_batch: int
    dtype: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    comm_dtype: Literal["", "fp32", "fp16", "bf16"] = ""
    index_bytes: int = 8
    optimizer: Literal["sgd", "adam"] = "sgd"
    prefetch: bool = True
    overlap: bool = True
    bucket_bytes: int = 25 * 2**20
    comm_streams: Literal[1, 2] = 1
    fused: bool = True
    kernels: Literal["fused", "eager", "compiled"] = "eager"
    launch_us: float | None = None

    def __post_init__(self) -> None:
        self._checked("bucket_bytes", "launch_us")
        if not 0 <= (self.launch_us or 0) < math.inf:
            raise self.refusal("launch_us", "give what the host takes to issue an op, or 0 where it never is late")

    @property
    def logit_bytes(self) -> int:
        """As `Training` has it: the loss is of one logit a sample, whatever is kept of it."""
        return 0

    def local_batch(self, devices: int) -> int:
        """Samples of each device's part of the MLPs.

        Raises
        ------
        LayoutError
            The batch does not divide evenly.
        """
        require_whole(1, MOST, devices=devices)
        devices = int(devices)
        if self.global_batch % devices:
            raise self.refusal("global_batch", f"{devices} devices take equal parts: give a multiple of that")
        return self.global_batch // devices


def dims_of(tables: pl.DataFrame) -> list[int]:
    """Width of each table's vectors."""
    dims: list[int] = tables["dim"].to_list()
    return dims
