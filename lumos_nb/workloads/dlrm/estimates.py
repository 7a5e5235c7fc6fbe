"""From a recommendation model, a plan of its tables, a batch and a cluster to the time of a step and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from lumos_nb.costs.calibration import Calibration
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.host import Overheads
from lumos_nb.costs.lookups import LookupModel
from lumos_nb.display import format_ns
from lumos_nb.errors import InputError, LayoutError, require_kinds, shown
from lumos_nb.layout import Cluster
from lumos_nb.workloads.contention import Timed, slowed
from lumos_nb.workloads.dlrm.model import Dlrm, DlrmTraining
from lumos_nb.workloads.dlrm.passes import passes
from lumos_nb.workloads.dlrm.plan import Plan
from lumos_nb.workloads.dlrm.steps import assembled, device_times, issued
from lumos_nb.workloads.predicted import Predicted
from lumos_nb.workloads.pricing import prices_of
from lumos_nb.workloads.steps import Step
from lumos_nb.workloads.surcharges import Surcharges, bundled


@dataclass(frozen=True, repr=False)
class DlrmEstimate(Predicted):
    """A predicted step of a recommendation model.

    Attributes
    ----------
    model, plan, train, cluster
        What was asked.
    calibration, surcharges
        Name of what priced it, and what a step costs beyond that.
    step
        Rows and waits of all devices.
    timed
        When each op runs.
    assumptions
        What was taken for granted because nobody said it.
    """

    model: Dlrm
    plan: Plan
    train: DlrmTraining
    cluster: Cluster
    calibration: str
    surcharges: Surcharges
    step: Step
    timed: Timed
    assumptions: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Samples of the batch by the step's time."""
        return self.train.global_batch / self.step_s

    @cached_property
    def parts(self) -> pl.DataFrame:
        """Time of lookups, MLPs, interaction and the rest on each device's own stream: `rank`, `part`, `time_us`."""
        ops = self.step.table.filter(pl.col("kind").is_in(["compute", "comm"]))
        taken = ops.group_by("rank", "part", maintain_order=True).agg(time_us=pl.col("dur_us").sum())
        return taken.drop_nulls("rank")

    @property
    def busiest_stream_s(self) -> float:
        """The most that a stream of any device has to do: what a step takes where nothing waits for anything."""
        ops = self.graph.ops.filter(pl.col("lane").str.starts_with("gpu"))
        return float(ops.group_by("rank", "lane").agg(pl.col("dur_ns").sum())["dur_ns"].max()) / 1e9  # type: ignore[arg-type]

    def _tables(self) -> dict[str, pl.DataFrame]:
        return {**super()._tables(), "parts": self.parts}

    def _caption(self) -> str:
        on = f"{self.plan.devices.height} x {self.cluster.gpu_sheet.name}"
        return f"A step of a DLRM on {on}: {format_ns(self.step_ns)}"

    def _summary(self) -> pl.DataFrame:
        by_part = self.parts.group_by("part", maintain_order=True).agg(pl.col("time_us").max())
        rows = [
            self._interval(),
            ("samples/s", f"{self.samples_per_s:,.0f}"),
            *((f"{part}, busiest device", format_ns(round(us * 1e3))) for part, us in by_part.rows()),
            ("busiest stream", format_ns(round(self.busiest_stream_s * 1e9))),
            *self._trust(),
        ]
        return pl.DataFrame(rows, schema=["what", "value"], orient="row")


def estimate_dlrm(
    model: Dlrm,
    plan: Plan,
    train: DlrmTraining,
    cluster: Cluster,
    calibration: Calibration | None = None,
    *,
    lookups: LookupModel | None = None,
    overheads: Overheads | None = None,
    surcharges: Surcharges | None = None,
) -> DlrmEstimate:
    """Predict a training step of a recommendation model from configuration alone.

    Parameters
    ----------
    model, plan, train, cluster
        The dense part; the embedding tables and which device has which part of them; the batch; the devices.
    calibration
        Prices of kernels and collectives; of the cluster's GPU by default.
    lookups
        Prices of lookups; by default the physical model on the GPU's data sheet.
    overheads
        Measured costs of the host (`ln.overheads`), T1 to T5 of each operator; else the surcharges' launches.
    surcharges
        What a step costs beyond its rows' prices; the bundled ones by default, `Surcharges()` for none.

    Raises
    ------
    LayoutError
        The plan is for another number of devices than the cluster has, or does not go with the model or the batch.
    CalibrationError, InputError
        Something has no price, or an argument is of another kind.

    Examples
    --------
    >>> tables = pl.DataFrame({"table": ["a", "b"], "rows": 10**6, "dim": 64, "pooling": [20.0, 1.0], "dtype": "fp32"})
    >>> plan = Plan.of(tables, pl.DataFrame({"table": ["a", "b"], "device": [0, 1]}), [80e9, 80e9])
    >>> cluster = Cluster(gpu="H100-SXM-80GB", gpus_per_node=2, inside="NVLink4 NVSwitch")
    >>> model = Dlrm(dense=13, bottom=(512, 64), top=(512, 1))
    >>> 100 < estimate_dlrm(model, plan, DlrmTraining(global_batch=8192), cluster).step_s * 1e6 < 10_000
    True
    """
    require_kinds(model=(model, Dlrm), plan=(plan, Plan), train=(train, DlrmTraining), cluster=(cluster, Cluster))
    require_kinds(surcharges=(surcharges, Surcharges | None))
    if overheads is not None and not isinstance(overheads, Overheads):
        raise InputError(f"overheads is {shown(overheads)}; give ln.overheads(run) of a recording.")
    if plan.devices.height != cluster.gpus:
        raise LayoutError(
            f"the plan is for {plan.devices.height} device(s), the cluster has {cluster.gpus} GPU(s): give as many of "
            "both."
        )
    prices = prices_of(cluster, calibration)
    extra = bundled().every if surcharges is None else surcharges
    lookup = PhysicalLookup.of_sheet(cluster.gpu_sheet) if lookups is None else lookups
    rows = passes(model, plan, train)
    table = device_times(rows, plan, train, cluster, prices, lookup)
    table = issued(extra.applied(table, train, cluster), overheads)
    step = assembled(table, rows, cluster.gpus)
    timed = slowed(step, extra.compute_slowed, extra.comm_slowed)
    return DlrmEstimate(model, plan, train, cluster, prices.name, extra, step, timed)
