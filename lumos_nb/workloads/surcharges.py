"""What a step costs beyond the prices of its rows: power, kernels that are not fused, slow hosts, jitter, company.

Each is one number, or one by GPU or by how kernels are made (`Training.kernels`). Those that traces show were measured
on traces (`benchmarks/frictions.py`); the others are fitted on published step times (`benchmarks/fit_surcharges.py`).
`datasets/surcharges.json` holds them, and those that are fitted without each of the sources, to score that source by.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import msgspec
import numpy as np
import polars as pl

from lumos_nb import datasets
from lumos_nb.display import html_fields
from lumos_nb.errors import ABOVE_0, UNDECODABLE, InputError, is_number, shown
from lumos_nb.layout import Cluster

PRODUCTS = ("gemm", "gemm_bias", "grouped_gemm")
FUSED_LOGIT_BYTES = 6
"""With no more bytes than this alive for a logit, the loss is one kernel, whatever else is not fused."""
KERNELS = ("fused", "compiled", "eager")
OF_KERNELS = ("moves", "optimizer", "loss", "launch_us", "gap_us")
"""Fields that have a number a kind of kernels."""
FACTORS = ("sustained", "host", "moves", "optimizer", "loss", "near", "far")
"""Fields whose numbers multiply or divide a time."""
OTHER = "other"
"""Key of GPUs that have no number of their own."""


class Made(Protocol):
    """What surcharges ask of a `Training`, or of one of another workload."""

    @property
    def kernels(self) -> str:
        """How what is no product is made."""

    @property
    def logit_bytes(self) -> int:
        """What is alive at once for each logit."""

    @property
    def launch_us(self) -> float | None:
        """Host time for each row; None for what is usual."""


class Surcharges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors and times of a real step; those of none are the defaults.

    Attributes
    ----------
    sustained
        By GPU: the share of its microbenchmarked rate that matrix products keep when they run for seconds (power). Left
        alone are those in fp8, of which no burst was measured, and attention, whose kernels draw less (unfused too).
    host
        By GPU: how many times longer the hosts of its age take than those of H100s.
    moves
        By kind of kernels: how many times as long what is no product takes as the prices of fused kernels say.
    optimizer, loss
        By kind of kernels: the same of the optimizer's step and of the loss.
    launch_us
        By kind of kernels: host time for a compute row of the work table (eager ones launch several kernels each).
    launch_comm_us
        Host time for a collective.
    gap_us
        By kind of kernels: device time between the kernels of a row and before them.
    near, far
        How many times as long collectives take in a step as alone, inside a node and between nodes.
    compute_slowed, comm_slowed
        How much longer a kernel takes that runs beside collectives all the time, and the reverse.
    apart
        Standard deviation of the speed of GPUs of one kind: the slowest of all paces a step.
    spread
        Standard deviation of the logarithm of predicted over measured, of sources that no constant was fitted on.

    Raises
    ------
    InputError
        A factor is not positive, another number is negative, or there is no such kind of kernels; the message names it.

    Examples
    --------
    The bundled ones, for a network whose collectives take a tenth longer:

    >>> slower = msgspec.structs.replace(bundled().every, far=1.1 * bundled().every.far)
    >>> ln.estimate(model, layout, train, cluster, surcharges=slower).step_s >= found.step_s
    True
    """

    sustained: dict[str, float] = {}
    host: dict[str, float] = {}
    moves: dict[str, float] = {}
    optimizer: dict[str, float] = {}
    loss: dict[str, float] = {}
    launch_us: dict[str, float] = {}
    launch_comm_us: float = 0.0
    gap_us: dict[str, float] = {}
    near: float = 1.0
    far: float = 1.0
    compute_slowed: float = 0.0
    comm_slowed: float = 0.0
    apart: float = 0.0
    spread: float = 0.0

    def _repr_html_(self) -> str:
        return html_fields(self, "What a step costs beyond the prices of its rows: factors, and times in us")

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value, factor = getattr(self, name), name in FACTORS
            for key, number in (value if isinstance(value, dict) else {"": value}).items():
                given = f"Surcharges: {name}{key and f' of {key}'} is {shown(number)}"
                if name in OF_KERNELS and key not in KERNELS:
                    raise InputError(f"{given}; kinds of kernels are {', '.join(KERNELS)}.")
                if not isinstance(number, int | float) or not is_number(number, ABOVE_0 if factor else 0):
                    raise InputError(f"{given}; give a number {'above 0' if factor else 'of at least 0'}.")

    def applied(self, table: pl.DataFrame, train: Made, cluster: Cluster) -> pl.DataFrame:
        """A priced table (`pricing.priced`) with times as in a step, and `launch_us`, the host's time for each row.

        Examples
        --------
        >>> from lumos_nb.layout import Training
        >>> train, one = Training(micro_batch=1, global_batch=1, seq=2048), Cluster(gpu="H100", gpus_per_node=1)
        >>> table = pl.DataFrame({"kind": ["compute"], "op": ["gemm"], "dtype": ["bf16"], "nodes": [None]})
        >>> table = table.with_columns(phase=pl.lit("forward"), dur_us=90.0, low_us=80.0, high_us=100.0)
        >>> Surcharges(sustained={"H100-SXM-80GB": 0.75}).applied(table, train, one)["dur_us"].item()
        120.0
        """
        kind, is_compute = train.kernels, pl.col("kind") == "compute"
        loss = self.loss.get(kind, 1.0) if train.logit_bytes > FUSED_LOGIT_BYTES else 1.0
        slowest = 1 + self.apart * expected_maximum(cluster.gpus)
        factor = (
            pl.when(~is_compute)
            .then(pl.when(pl.col("nodes") > 1).then(self.far).otherwise(self.near))
            .when(pl.col("phase") == "optimizer")
            .then(slowest * self.optimizer.get(kind, 1.0))
            .when(pl.col("op").is_in(PRODUCTS))
            .then(slowest / pl.when(pl.col("dtype") == "fp8").then(1.0).otherwise(_of_gpu(self.sustained, cluster)))
            .when(pl.col("op") == "cross_entropy")
            .then(slowest * loss)
            .otherwise(slowest * self.moves.get(kind, 1.0))
        )
        gap_us = pl.when(is_compute).then(self.gap_us.get(kind, 0.0)).otherwise(0.0)
        host = pl.lit(_of_gpu(self.host, cluster))
        launch_us = pl.when(is_compute).then(self.launch_us.get(kind, 0.0)).otherwise(self.launch_comm_us) * host
        if train.launch_us is not None:
            launch_us = pl.lit(float(train.launch_us))
        return table.with_columns(pl.col("dur_us", "low_us", "high_us") * factor + gap_us, launch_us=launch_us)


def _of_gpu(values: dict[str, float], cluster: Cluster) -> float:
    return values.get(cluster.gpu_sheet.name, values.get(OTHER, 1.0))


@cache
def expected_maximum(n: int) -> float:
    """The mean of the greatest of n standard normal numbers, by quadrature.

    Examples
    --------
    >>> round(expected_maximum(2), 3), round(expected_maximum(64), 2)
    (0.564, 2.34)
    """
    from scipy.special import ndtr

    at = np.linspace(0, 12, 4001)
    return float(np.trapezoid(1 - ndtr(at) ** n - ndtr(-at) ** n, at))


class Bundled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: those fitted on every source, and by the source that was left out."""

    every: Surcharges
    without: dict[str, Surcharges] = {}


@cache
def bundled() -> Bundled:
    """The bundled surcharges.

    Raises
    ------
    InputError
        The file is missing or damaged.
    """
    file = datasets.root() / "surcharges.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Bundled)
    except (OSError, *UNDECODABLE) as error:
        raise InputError(f"{file}: no surcharges: {error}; fetch the package's datasets again.") from error
