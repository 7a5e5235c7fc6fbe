"""Every layout of a model on a cluster: which can be, which fit, how long a step takes, and the best replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import polars as pl

from lumos_nb.costs.calibration import Calibration
from lumos_nb.display import format_bytes
from lumos_nb.errors import InputError, LayoutError, is_number, require_kinds, require_whole, shown
from lumos_nb.executors import check_executor, spread
from lumos_nb.layout import Cluster, Training, Transformer
from lumos_nb.traces.export import Tables
from lumos_nb.workloads.llm.candidates import AXES, Candidate, candidate, candidates, cluster_of
from lumos_nb.workloads.llm.estimates import Brief, PricedStep
from lumos_nb.workloads.llm.memory import peaks
from lumos_nb.workloads.llm.pass_times import Job
from lumos_nb.workloads.llm.step_times import screen
from lumos_nb.workloads.pricing import prices_of
from lumos_nb.workloads.surcharges import Surcharges, bundled

SPARE = 0.1
"""Share of a GPU's memory that a search leaves to CUDA, NCCL and a fragmented allocator: about as much as the median
error of predicted memory. Settled after two of nanotron's layouts with 92 and 101 % of it predicted had been seen to
run three times slower than their neighbours."""
Progress = Callable[[str, int, int], object]
"""Called with what is being done, how many layouts are done and how many there are."""


@dataclass(frozen=True, repr=False)
class Found(Tables):
    """What a search went through.

    Attributes
    ----------
    model, train, cluster
        What was asked.
    frame
        A row a layout: the replayed ones by time, then the others by the screen, last those that cannot be. Its axes
        (`candidates.AXES`); `memory_bytes` of the fullest rank, on pipeline rank `memory_stage`; `feasible`, else
        `why_not`; `screened_s`, the step's time by the screen, and `replayed_s` with `low_s` and `high_s` of those
        replayed; `step_s`, the replayed time where there is one, and `tokens_per_s`.
    """

    model: Transformer
    train: Training
    cluster: Cluster
    frame: pl.DataFrame

    def pick(self, row: int = 0) -> Candidate:
        """Layout, training and cluster of a row: `estimate(model, *found.pick(3))` is its estimate.

        Raises
        ------
        InputError
            There is no such row.
        """
        if type(row) is not int or not 0 <= row < self.frame.height:
            raise InputError(f"row {shown(row)}: the search has {self.frame.height} layouts, counted from 0.")
        return candidate(self.frame.row(row, named=True), self.train, self.cluster)

    @property
    def best(self) -> Candidate:
        """The fastest of all that fit, by the replay.

        Raises
        ------
        LayoutError
            None does; the message says what is in the way of most.
        """
        if not self.feasible.height:
            raise LayoutError(f"no layout of {self.frame.height} can be. {self._obstacles()}")
        return self.pick()

    @cached_property
    def feasible(self) -> pl.DataFrame:
        """Those that can be and fit."""
        return self.frame.filter("feasible")

    @cached_property
    def pareto(self) -> pl.DataFrame:
        """Layouts than which none is better in time, memory and GPUs at once, by GPUs and time."""
        found = self.feasible.sort("gpus", "step_s", "memory_bytes")
        less = pl.col("memory_bytes") < pl.col("memory_bytes").cum_min().shift(fill_value=np.inf)
        front = found.filter(less.over("gpus"))
        return front.filter(~_beaten(front))

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._caption(), self._summary())]

    def _summary(self) -> pl.DataFrame:
        varied = [name for name in AXES if self.feasible[name].n_unique() > 1] or [*AXES]
        return self.feasible.select(*varied, "memory_bytes", "step_s", "low_s", "high_s", "tokens_per_s")

    def _caption(self) -> str:
        replayed = self.frame.height - self.frame["replayed_s"].null_count()
        return (
            f"{self.model.name or 'The model'} on {self.cluster.gpu_sheet.name}: {self.feasible.height:,} of "
            f"{self.frame.height:,} layouts can be and fit, {replayed:,} replayed. {self._obstacles()}"
        )

    def _obstacles(self) -> str:
        reasons = self.frame["why_not"].drop_nulls().str.extract(r"^(\w+: \w+|memory)")
        counts = reasons.value_counts(sort=True).head(3)
        return "In the way: " + ", ".join(f"{name} ({n:,})" for name, n in counts.rows()) if counts.height else ""


def _beaten(front: pl.DataFrame) -> pl.Series:
    """Whether fewer GPUs do as well in time and memory."""
    gpus, step, memory = (front[name].to_numpy()[:, None] for name in ("gpus", "step_s", "memory_bytes"))
    better = (gpus > gpus.T) & (step >= step.T) & (memory >= memory.T)
    return pl.Series(better.any(axis=1), dtype=pl.Boolean)


def search(
    model: Transformer,
    cluster: Cluster,
    train: Training,
    calibration: Calibration | None = None,
    *,
    gpus: int | Sequence[int] | None = None,
    keep: int = 50,
    spare: float = SPARE,
    executor: Executor | str | None = None,
    progress: Progress | None = None,
    surcharges: Surcharges | None = None,
    **ranges: object,
) -> Found:
    """Go through every layout of a model on a cluster: feasibility, memory, a screen of all, a replay of the best.

    The screen has the prices of `estimate` and follows a pipeline pass by pass; the best by it are replayed, of many
    micro-batches some rounds of the pipeline.

    Parameters
    ----------
    model, cluster
        What is trained, on what.
    train
        Global batch, sequence and formats; micro-batch and recomputation are searched for.
    calibration, surcharges
        As for `estimate`.
    gpus
        How many GPUs, or several numbers; all of the cluster by default.
    keep, spare
        How many are replayed, and which share of the GPU's memory is to stay free.
    executor
        Replays there, as in `executors.spread`.
    progress
        Called with what is being done, how much of it is done, and of how much.
    ranges
        Values of axes (`candidates.AXES`), one or several (`tp=8, recompute=["none", "full"]`); else the usual.

    Returns
    -------
    found
        All layouts, the best, and the Pareto front of time, memory and GPUs.

    Raises
    ------
    InputError, LayoutError, CalibrationError
        An axis or a value is none, the cluster has no such part, or something has no price.

    Examples
    --------
    >>> cluster = Cluster(gpu="H100-SXM-80GB", inside="NVLink4 NVSwitch")
    >>> train = Training(micro_batch=1, global_batch=64, seq=4096)
    >>> found = search(Transformer.named("llama-3-8b"), cluster, train, keep=4, tp=[1, 2], cp=1, schedule="1f1b")
    >>> found.best.layout.world
    8
    """
    _require(model, cluster, train, surcharges, keep, spare, executor, progress)
    counts = [*gpus] if isinstance(gpus, list | tuple | range) else [cluster.gpus if gpus is None else gpus]
    say: Progress = progress or (lambda *_: None)
    calibration, extra = prices_of(cluster, calibration), bundled().every if surcharges is None else surcharges
    frame = _with_memory(candidates(model, cluster, train, counts, ranges), model, train, cluster, spare)
    say("memory", frame.height, frame.height)
    frame = _screened(frame, Job(model, train, cluster, calibration, extra), say)
    best = [candidate(row, train, cluster) for row in frame.filter("feasible").head(keep).iter_rows(named=True)]
    replayed: list[Brief] = []
    for found in spread(executor, partial(_replayed, model, calibration, extra), best):
        replayed.append(found)
        say("replay", len(replayed), len(best))
    return Found(model, train, cluster, _ranked(frame, replayed, train))


def _require(
    model: object, cluster: object, train: object, surcharges: object, keep: object, spare: object, executor: object,
    progress: object,
) -> None:  # fmt: skip
    """Raise InputError for the first argument that is of another kind than it should be."""
    require_kinds(model=(model, Transformer), cluster=(cluster, Cluster), train=(train, Training))
    require_kinds(surcharges=(surcharges, Surcharges | None))
    require_whole(0, 2**31 - 1, keep=keep)
    if not is_number(spare, 0, math.nextafter(1, 0)):
        raise InputError(f"spare={shown(spare)}: give the share of memory to leave free, from 0 to below 1.")
    if progress is not None and not callable(progress):
        raise InputError(f"progress is {shown(progress)}; give a function of three arguments.")
    check_executor(executor)


def _screened(frame: pl.DataFrame, job: Job, say: Progress) -> pl.DataFrame:
    """With `screened_s`, the fastest first."""
    parts, done = [], 0
    for (gpus, feasible), part in frame.group_by("gpus", "feasible", maintain_order=True):
        some = job._replace(cluster=cluster_of(job.cluster, gpus))
        times = screen(some, part) if feasible else np.full(part.height, np.nan)
        parts.append(part.with_columns(screened_s=pl.Series(times).fill_nan(None)))
        done += part.height
        say("screen", done, frame.height)
    return pl.concat(parts).sort("feasible", *_order("screened_s"), descending=_descending(1), nulls_last=True)


def _with_memory(
    frame: pl.DataFrame, model: Transformer, train: Training, cluster: Cluster, spare: float
) -> pl.DataFrame:
    """With `memory_bytes`, `memory_stage` and `feasible`; what needs more than a GPU can give says so in `why_not`."""
    numbered = frame.with_row_index("row")
    could = numbered.filter(pl.col("why_not").is_null())
    used, stage = peaks(model, train, could)
    memory = could.select("row", memory_bytes=pl.Series(used), memory_stage=pl.Series(stage))
    has = cluster.gpu_sheet.memory_bytes
    of = format_bytes(has) + (f", of which {float(spare):.0%} are to stay free" if spare else "")
    needs = pl.format(
        f"memory: pipeline rank {{}} needs {{}} GB of {of}; cut further, recompute or spread more.",
        "memory_stage",
        (pl.col("memory_bytes") / 1e9).round(1),
    )
    over = pl.col("memory_bytes") > has * (1 - float(spare))
    frame = numbered.join(memory, on="row", how="left", maintain_order="left").drop("row")
    frame = frame.with_columns(why_not=pl.when(over).then(needs).otherwise("why_not"))
    return frame.with_columns(feasible=pl.col("why_not").is_null())


def _replayed(model: Transformer, calibration: Calibration, extra: Surcharges, asked: Candidate) -> Brief:
    """Step time of a layout and its interval."""
    return PricedStep.of(model, *asked, calibration).brief(extra)


def _ranked(frame: pl.DataFrame, replayed: Sequence[Brief], train: Training) -> pl.DataFrame:
    """The frame with replayed times; those that were replayed come first."""
    names = ("replayed_s", "low_s", "high_s")
    times = pl.DataFrame(replayed, schema=dict.fromkeys(names, pl.Float64), orient="row")
    times = pl.concat([times, times.clear(frame.height - len(replayed))])
    frame = pl.concat([frame, times], how="horizontal").with_columns(step_s=pl.coalesce("replayed_s", "screened_s"))
    frame = frame.with_columns(tokens_per_s=train.global_batch * train.seq / pl.col("step_s"))
    there = pl.col("replayed_s").is_not_null()
    return frame.sort("feasible", there, *_order("step_s"), descending=_descending(2), nulls_last=True)


def _order(time: str) -> tuple[str, ...]:
    """By time, and by axes where times are equal, so that the order in which values were given does not matter."""
    return (time, *AXES)


def _descending(flags: int) -> list[bool]:
    """Of so many flags, which come first where they hold, and `_order` behind them."""
    return [True] * flags + [False] * len(_order("step_s"))
