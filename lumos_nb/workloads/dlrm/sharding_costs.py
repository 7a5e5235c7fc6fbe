"""What a plan of embedding tables costs: lookups and exchanges of every device, for many plans at once.

A device looks up its shards in one fused call a pass. Their outputs go to the devices whose samples they are for, in an
all-to-all; gradients come back in another. So a step's embedding time is that of the slowest device, as in Zha et al.,
"Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained Neural Cost Models" (MLSys 2023): backward
exchange, backward and forward lookups, forward exchange, in which the early ones wait for the late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.costs.calibration import Calibration, load_calibration
from lumos_nb.costs.collective_tiers import REQUEST
from lumos_nb.costs.collectives import CollectiveModel
from lumos_nb.costs.lookups import LookupModel
from lumos_nb.display import Shown
from lumos_nb.errors import (
    ABOVE_0,
    CalibrationError,
    InputError,
    LayoutError,
    is_number,
    require_kinds,
    require_number,
    require_whole,
    shown,
)
from lumos_nb.layout import Cluster
from lumos_nb.transformer import plain
from lumos_nb.workloads.dlrm.plan import FIGURES, Plan, element_bytes

Floats = NDArray[np.float64]
MOST_US = 1e12


class Exchange(Protocol):
    """What prices exchanges of outputs whose columns lie on several devices."""

    def forward_us(self, output_dim: Floats, late_us: Floats) -> Floats:
        """Microseconds of each device, [plans, devices], from its columns and how long after the first it begins."""
        ...

    def backward_us(self, output_dim: Floats) -> Floats:
        """The same of gradients, where all begin at once."""
        ...

    def all_reduce_us(self, size_bytes: Floats) -> Floats:
        """Microseconds in which gradients of so many bytes are added up, [plans]; none of nothing."""
        ...


@dataclass(frozen=True)
class FabricExchange:
    """Exchanges by fitted costs of collectives, over what connects the devices of a cluster.

    Of an all-to-all of unequal sizes the device that sends or receives most decides, after Lin et al. (TPDS 2024): here
    every device sends as much to each of the others, so that it takes as long as if all sent what the busiest does.

    Attributes
    ----------
    cluster
        Whose GPUs are the devices.
    collectives
        Fitted costs.
    batch
        Samples of a step on all devices.
    element_bytes
        Of an output's number.
    """

    cluster: Cluster
    collectives: CollectiveModel
    batch: int
    element_bytes: int = 4
    _known: dict[str, Floats] = field(default_factory=dict, repr=False, compare=False)

    def forward_us(self, output_dim: Floats, late_us: Floats) -> Floats:
        """See `Exchange`: it begins with the last."""
        waits: Floats = late_us.max(axis=1, keepdims=True) - late_us
        return waits + self.backward_us(output_dim)

    def backward_us(self, output_dim: Floats) -> Floats:
        """See `Exchange`."""
        most = np.ceil(output_dim.max(axis=1, initial=0)).astype(np.int64)
        return np.repeat(self._all_to_all_us(int(most.max(initial=0)))[most][:, None], output_dim.shape[1], axis=1)

    def all_reduce_us(self, size_bytes: Floats) -> Floats:
        """See `Exchange`."""
        sizes, row = np.unique(size_bytes, return_inverse=True)
        return self._collective_us("all_reduce", sizes)[row]

    def _all_to_all_us(self, most: int) -> Floats:
        """By the columns of the busiest device, from none to `most` at least; known ones are kept."""
        if "all_to_all" not in self._known or len(self._known["all_to_all"]) <= most:
            columns = np.arange(1 << most.bit_length())
            self._known["all_to_all"] = self._collective_us("all_to_all", columns * (self.batch * self.element_bytes))
        return self._known["all_to_all"]

    def _collective_us(self, name: str, size_bytes: NDArray[Any]) -> Floats:
        took, some = np.zeros(len(size_bytes)), size_bytes > 0
        if some.any() and self.cluster.gpus > 1:
            sheets = self.cluster.fabrics
            far = sheets[-1 if self.cluster.nodes > 1 else 0].name
            about = (sheets[0].name, far, self.cluster.nodes, self.cluster.gpus, name)
            asked = pl.DataFrame({"size_bytes": size_bytes[some]})
            asked = asked.with_columns(pl.lit(value).alias(key) for key, value in zip(REQUEST, about, strict=False))
            took[some] = self.collectives.predict(asked, extra=sheets)["dur_us"].to_numpy()
        return took


@dataclass(frozen=True)
class HiddenExchange:
    """Exchanges that other work hides, so that devices only wait for one another; `rest` prices sums of gradients."""

    rest: Exchange

    def forward_us(self, output_dim: Floats, late_us: Floats) -> Floats:
        """See `Exchange`."""
        waits: Floats = late_us.max(axis=1, keepdims=True) - late_us
        return waits

    def backward_us(self, output_dim: Floats) -> Floats:
        """See `Exchange`."""
        return np.zeros_like(output_dim)

    def all_reduce_us(self, size_bytes: Floats) -> Floats:
        """See `Exchange`."""
        return self.rest.all_reduce_us(size_bytes)


@dataclass(frozen=True, repr=False)
class ShardingCosts(Shown):
    """Prices of plans on one cluster, for steps of one batch.

    Attributes
    ----------
    lookup
        Prices of lookups: any `LookupModel`.
    exchange
        Prices of exchanges between the devices.
    batch
        Samples of a step on all devices. A device looks up its shards for all of them, but data-parallel tables for its
        own alone.
    speed
        How fast each device looks up, as a multiple of what `lookup` says; its length is the number of devices.
    report
        Of `pretrain`: a row a network, how well it does on samples that it has not seen.
    """

    lookup: LookupModel
    exchange: Exchange
    batch: int
    speed: tuple[float, ...]
    report: pl.DataFrame = field(default_factory=pl.DataFrame)

    @classmethod
    def of(
        cls,
        lookup: LookupModel,
        cluster: Cluster,
        batch: int,
        *,
        calibration: Calibration | None = None,
        speed: tuple[float, ...] | None = None,
    ) -> ShardingCosts:
        """Prices by a lookup model and by what is fitted of the cluster's collectives.

        Parameters
        ----------
        lookup, batch
            As the attributes.
        cluster
            Its GPUs are the devices.
        calibration
            With collectives; the bundled one of the cluster's GPU by default.
        speed
            Of each device, where they differ.

        Raises
        ------
        InputError
            The lookup model or the cluster is none, or the batch no whole number.
        CalibrationError
            The calibration has no collectives.
        LayoutError
            There are no samples, or there is not one positive speed for each device.
        """
        require_kinds(cluster=(cluster, Cluster), calibration=(calibration, Calibration | None))
        require_whole(0, batch=batch)
        if not hasattr(lookup, "parts"):
            raise InputError(f"lookup is {shown(lookup)}; give a model of them: PhysicalLookup, LookupNet.")
        found = load_calibration(cluster.gpu_sheet.name) if calibration is None else calibration
        if found.collectives is None:
            raise CalibrationError(f"the calibration {found.name} has no collectives: give one that has.")
        if not batch >= cluster.gpus:
            raise LayoutError(f"batch is {batch}; give every one of {cluster.gpus} devices a sample at least.")
        speeds = (1.0,) * cluster.gpus if speed is None else plain(speed)
        require_kinds(speed=(speeds, Sequence))
        if len(speeds) != cluster.gpus or not all(is_number(one, ABOVE_0) for one in speeds):
            raise LayoutError(f"speed is {shown(speeds)}; give a positive number for each of {cluster.gpus} devices.")
        return cls(lookup, FabricExchange(cluster, found.collectives, batch), batch, tuple(map(float, speeds)))

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        by = self.lookup._shown()[0][0] if isinstance(self.lookup, Shown) else type(self.lookup).__name__
        rows = [("lookups", by), ("exchanges", type(self.exchange).__name__), ("batch", f"{self.batch:,} samples")]
        if len(set(self.speed)) > 1:
            rows.append(("speed of devices", ", ".join(f"{one:g}" for one in self.speed)))
        table = pl.DataFrame(rows, schema=["what", "value"], orient="row")
        shown = [(f"Prices of plans on {len(self.speed)} devices", table)]
        return [*shown, ("networks on samples that they have not seen", self.report)] if self.report.height else shown

    def parts(self, tables: pl.DataFrame, batch_share: float = 1.0) -> Floats:
        """What adds up over a device's tables, [tables, k].

        Raises
        ------
        LayoutError
            A table has no finite price; the message names it.
        """
        require_number(0, batch_share=batch_share)
        parts = self.lookup.parts(tables, max(round(self.batch * float(batch_share)), 1))
        finite = np.isfinite(parts).all(axis=1) & np.isfinite(self.lookup.of_sums(parts)).all(axis=1)
        if not finite.all():
            name = tables["table"][int(np.argmin(finite))]
            raise LayoutError(
                f"table {shown(name)} has no finite price by {type(self.lookup).__name__}: give other costs."
            )
        return parts

    def lookup_us(self, sums: Floats) -> Floats:
        """Microseconds of one device's lookups, forward and backward, from sums of `parts`: [m, k] -> [m, 2].

        A network may say anything of sums far beyond what it has learned: days at most.
        """
        with np.errstate(over="ignore"):
            return np.minimum(self.lookup.of_sums(sums), MOST_US)

    def device_us(self, lookups_us: Floats, output_dim: Floats, gradient_bytes: Floats) -> Floats:
        """Times of every device of many plans.

        Parameters
        ----------
        lookups_us
            [plans, devices, 2]: lookups forward and backward at a speed of 1; zeros where there is nothing to look up.
        output_dim
            [plans, devices]: columns of outputs that a device sends.
        gradient_bytes
            [plans]: gradients of data-parallel tables.

        Returns
        -------
        times
            [plans, devices, 4] microseconds, in the order of `FIGURES`.
        """
        lookups = lookups_us / np.array(self.speed)[:, None]
        back = self.exchange.backward_us(output_dim) + self.exchange.all_reduce_us(gradient_bytes)[:, None]
        begun = lookups.sum(axis=2) + back
        ahead = self.exchange.forward_us(output_dim, begun - begun.min(axis=1, keepdims=True))
        return np.concatenate([lookups, ahead[..., None], back[..., None]], axis=2)

    def price(self, plan: Plan) -> Plan:
        """The plan with the times of its devices.

        Raises
        ------
        LayoutError
            The plan is for another number of devices, a table has no finite price, or partial sums of one are added up
            inside of nodes, which no exchange here knows: `estimate_dlrm` does.
        """
        require_kinds(plan=(plan, Plan))
        devices = plan.devices.height
        if (grid := plan.frame.filter(kind="grid_shard")).height:
            raise LayoutError(
                f"table {grid['table'][0]!r} is summed up inside of nodes, which these costs do not know: ask "
                "estimate_dlrm for a step."
            )
        if devices != len(self.speed):
            raise LayoutError(
                f"the plan has {devices} devices, the costs are of {len(self.speed)}: make one for these."
            )
        sums = np.zeros((1, 1))
        for (share,), lookups in plan.lookups.group_by("batch_share", maintain_order=True):
            parts, place = self.parts(lookups, share), lookups["device"].to_numpy()
            sums = sums + (place == np.arange(devices)[:, None]) @ parts
        used = plan.devices["shards"].to_numpy() > 0
        took = np.where(used[:, None], self.lookup_us(sums), 0.0)
        copies = plan.frame.filter((pl.col("kind") == "data_parallel") & (pl.col("device") == 0))
        weights = copies.join(plan.tables.select("table", "dtype"), on="table")
        gradients = (weights["rows"] * weights["dim"]).to_numpy() @ element_bytes(weights)
        sent = plan.devices["output_dim"].to_numpy()
        times = self.device_us(took[None], sent[None].astype(np.float64), np.array([gradients]))[0]
        return plan.with_figures(**dict(zip(FIGURES, times.T, strict=True)))
