"""From a model, a layout, a training and a cluster to the time and memory of a step, and how far to trust both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import msgspec
import polars as pl

from lumos_nb.costs.calibration import Calibration
from lumos_nb.display import format_bytes, format_ns
from lumos_nb.errors import LayoutError, require_kinds, shown
from lumos_nb.layout import Cluster, Parallelism, Training, check
from lumos_nb.transformer import Transformer
from lumos_nb.workloads.contention import Timed, slowed
from lumos_nb.workloads.llm.assembly import assembled
from lumos_nb.workloads.llm.memory import memory, memory_over_time
from lumos_nb.workloads.llm.rounds import FULL, FULL_SPLIT, SPLIT_SCHEDULES, Rounds
from lumos_nb.workloads.llm.stages import work
from lumos_nb.workloads.predicted import Predicted
from lumos_nb.workloads.pricing import priced, prices_of
from lumos_nb.workloads.steps import Step
from lumos_nb.workloads.surcharges import PRODUCTS, Surcharges, bundled

ATTENTION = ("attention", "bmm")


@dataclass(frozen=True, repr=False)
class Estimate(Predicted):
    """A predicted step. Times are seconds unless a name says otherwise.

    Attributes
    ----------
    model, layout, train, cluster
        What was asked.
    calibration, surcharges
        Name of what priced it, and what a step costs beyond that.
    step
        Rows and waits.
    timed
        When each op runs.
    assumptions
        What was taken for granted because nobody said it (`estimate_row`).
    """

    model: Transformer
    layout: Parallelism
    train: Training
    cluster: Cluster
    calibration: str
    surcharges: Surcharges
    step: Step
    timed: Timed
    assumptions: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the global batch by the step's time."""
        return self.train.global_batch * self.train.seq / self.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """The same of one GPU."""
        return self.tokens_per_s / self.cluster.gpus

    @property
    def mfu(self) -> float:
        """FLOPs of the model over what GPUs could do.

        Three times the forward pass's, with frozen weights (`lora`) twice; causal attention counts half.
        """
        forward = (pl.col("phase") == "forward") & ~pl.col("again")
        return (2 if self.train.lora else 3) * self._flops(forward) / self._peak_flops

    @property
    def hfu(self) -> float:
        """All FLOPs that are done, those of recomputation too, over what GPUs could do."""
        return self._flops(pl.lit(value=True)) / self._peak_flops

    def _flops(self, which: pl.Expr) -> float:
        counted = which & pl.col("op").is_in([*PRODUCTS, *ATTENTION])  # as is usual: products, and those of attention
        of_row = self.step.table.select(pl.when(counted).then("flops").fill_null(0)).to_series().to_numpy()
        return float(of_row[self.step.row].sum()) * self.layout.world / self.layout.pp

    @property
    def _peak_flops(self) -> float:
        return self.cluster.gpu_sheet.peak(self.train.dtype) * self.cluster.gpus * self.step_s

    @cached_property
    def bubble(self) -> float:
        """Share of the step in which a rank's device neither computes nor moves data, the mean of ranks.

        It waits for other ranks then, or for its host, or has done while others have not.
        """
        busy = self.breakdown.filter(pl.col("part").is_in(["compute", "overlapped", "exposed_transfer", "copies"]))
        return 1 - float(busy["time_ns"].sum()) / (self.step_ns * self.layout.pp)

    @cached_property
    def memory(self) -> pl.DataFrame:
        """Bytes by pipeline rank and class, at each rank's peak, as `memory` gives them."""
        return memory(self.model, self.layout, self.train)

    @cached_property
    def memory_over_time(self) -> pl.DataFrame:
        """The same at every instant of the replayed step at which it changes, as `memory_over_time` gives it."""
        return memory_over_time(self.model, self.layout, self.train, self.result.ops)

    @property
    def peak_bytes(self) -> int:
        """Memory that the fullest rank needs."""
        return int(self.memory.group_by("stage").agg(pl.col("bytes").sum())["bytes"].max() or 0)  # type: ignore[arg-type]

    def _warnings(self) -> Iterator[str]:
        sheet = self.cluster.gpu_sheet
        if self.peak_bytes > sheet.memory_bytes:
            yield (
                f"needs {format_bytes(self.peak_bytes)} of memory; {sheet.name} has {format_bytes(sheet.memory_bytes)}"
            )
        asked, known = self.train.attention, self.step.table.filter(op="attention")["family"].unique()
        if self.train.flash and asked and len(known) and not known.str.ends_with(asked).all():
            yield f"attention {shown(asked)} has no price here: it is priced as {known.item(0)}"
        yield from super()._warnings()

    def _tables(self) -> dict[str, pl.DataFrame]:
        return {**super()._tables(), "memory": self.memory}

    def _caption(self) -> str:
        on = f"{self.cluster.gpus} x {self.cluster.gpu_sheet.name}"
        return f"A step of {self.model.name or 'the model'} on {on}: {format_ns(self.step_ns)}"

    def _summary(self) -> pl.DataFrame:
        rows = [
            self._interval(),
            ("tokens/s", f"{self.tokens_per_s:,.0f} ({self.tokens_per_s_per_gpu:,.0f} a GPU)"),
            ("MFU, HFU", f"{self.mfu:.1%}, {self.hfu:.1%}"),
            ("bubble", f"{self.bubble:.1%}"),
            ("memory", f"{format_bytes(self.peak_bytes)} of {format_bytes(self.cluster.gpu_sheet.memory_bytes)}"),
            *self._trust(),
        ]
        return pl.DataFrame(rows, schema=["what", "value"], orient="row")


def estimate(
    model: Transformer,
    layout: Parallelism,
    train: Training,
    cluster: Cluster,
    calibration: Calibration | None = None,
    *,
    surcharges: Surcharges | None = None,
) -> Estimate:
    """Predict a training step from configuration alone.

    Every row of the work tables is priced, laid out by the pipeline's schedule and replayed; ranks that a symmetry
    makes equal are one. What runs beside something else is slowed by it (`slowed`).

    Parameters
    ----------
    model, layout, train, cluster
        What is trained, how it is spread, in what batches, on what.
    calibration
        Prices; of the cluster's GPU by default.
    surcharges
        What a step costs beyond its rows' prices; the bundled ones by default, `Surcharges()` for none.

    Returns
    -------
    estimate
        Step time with an interval, tokens/s, MFU, breakdown, memory, and the workload itself.

    Raises
    ------
    LayoutError
        The four do not go together; the message lists why.
    CalibrationError, InputError
        Something has no price.

    Examples
    --------
    >>> cluster = Cluster(gpu="H100-SXM-80GB", inside="NVLink4 NVSwitch")
    >>> train = Training(micro_batch=1, global_batch=16, seq=4096)
    >>> found = estimate(Transformer.named("llama-3-8b"), Parallelism(dp=8, zero=3), train, cluster)
    >>> 0.3 < found.mfu < 0.8
    True
    """
    require_kinds(model=(model, Transformer), layout=(layout, Parallelism), train=(train, Training))
    require_kinds(cluster=(cluster, Cluster), surcharges=(surcharges, Surcharges | None))
    priced_step = PricedStep.of(model, layout, train, cluster, prices_of(cluster, calibration))
    return priced_step.estimate(bundled().every if surcharges is None else surcharges)


class Brief(NamedTuple):
    """Time of a step and its nominal 90 % interval."""

    step_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class PricedStep:
    """A step that can be laid out under several surcharges: what was asked, and `table`, its priced work.

    The table has the work of all virtual stages below one another, by `depth`.
    """

    model: Transformer
    layout: Parallelism
    train: Training
    cluster: Cluster
    calibration: str
    table: pl.DataFrame

    @classmethod
    def of(
        cls, model: Transformer, layout: Parallelism, train: Training, cluster: Cluster, prices: Calibration
    ) -> Self:
        """Price the rows; errors as of `estimate`."""
        check(model, layout, train, cluster)
        refuse_endless(model, layout, train)
        tables = [
            work(model, layout, train, depth).with_columns(stage=pl.lit(stage), depth=pl.lit(depth, pl.Int32))
            for depth, stage in enumerate(stages_of(layout))
        ]
        table = priced(pl.concat(tables), layout, cluster, prices)
        return cls(model, layout, train, cluster, prices.name, table)

    def estimate(self, extra: Surcharges) -> Estimate:
        """The step, laid out whole."""
        return self._laid_out(self.train, extra)

    def brief(self, extra: Surcharges) -> Brief:
        """The same step's time from a few of its micro-batches (`Rounds`): for many steps, of which times are asked."""
        full = FULL_SPLIT if self.layout.schedule in SPLIT_SCHEDULES else FULL
        rounds = Rounds.of(self.train.micro_batches(self.layout), self.layout.pp, full)
        found = []
        for count in rounds.counts:
            batch = count * self.train.micro_batch * self.layout.dp
            found.append(self._laid_out(msgspec.structs.replace(self.train, global_batch=batch), extra))
        longer = rounds.total([one.step_s for one in found]) / found[-1].step_s
        return Brief(*(longer * time for time in (found[-1].step_s, found[-1].low_s, found[-1].high_s)))

    def _laid_out(self, train: Training, extra: Surcharges) -> Estimate:
        step = assembled(extra.applied(self.table, train, self.cluster), self.layout, train)
        timed = slowed(step, extra.compute_slowed, extra.comm_slowed)
        return Estimate(self.model, self.layout, train, self.cluster, self.calibration, extra, step, timed)


MOST_OPS = 30_000_000
"""Of one step: a gigabyte of tables for every three million."""
OPS_OF_A_LAYER = 40


def refuse_endless(
    model: Transformer, layout: Parallelism, train: Training, ops_of_a_layer: float = OPS_OF_A_LAYER
) -> None:
    """Raise LayoutError where a step has more ops than a memory holds."""
    count = train.micro_batches(layout)
    ops = ops_of_a_layer * model.layers * count
    if ops > MOST_OPS:
        raise LayoutError(
            f"{model.layers:,} layers and {count:,} micro-batches are some {ops:.1e} ops a step, of at most "
            f"{MOST_OPS:.0e}: give fewer layers, or a larger micro_batch, or a smaller global_batch."
        )


def stages_of(layout: Parallelism) -> list[int]:
    """The pipeline rank of each virtual stage, in the order of the model's layers."""
    there = list(range(layout.pp))
    if layout.schedule == "zb-v":
        return there + there[::-1]
    return there * layout.chunks
