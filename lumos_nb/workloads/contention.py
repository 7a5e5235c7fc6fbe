"""What runs at the same time on one device slows each other: kernels and collectives share its cores and its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb._replay_plan import Plan
from lumos_nb.critical_path import Result, result_of
from lumos_nb.graph import Graph
from lumos_nb.workloads.steps import Step

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Timed:
    """A step of which every op is as long as what runs beside it makes it.

    Attributes
    ----------
    graph
        Its ops and edges.
    plan, start_ns
        The same in the order of a replay, and when each op starts (n,).
    shared_ns
        How long each op of `graph` would have run beside what slows it, had it not been slowed (n,).
    """

    graph: Graph
    plan: Plan
    start_ns: Ints
    shared_ns: Ints

    @property
    def end_ns(self) -> Ints:
        """When each op of `graph` ends (n,)."""
        end = np.empty_like(self.start_ns)
        end[self.plan.row] = self.start_ns + self.plan.dur_ns
        return end

    @property
    def step_ns(self) -> int:
        """Time of the step."""
        return int((self.start_ns + self.plan.dur_ns).max())

    @property
    def result(self) -> Result:
        """The replay with its slack and path."""
        return result_of(self.graph, self.plan, self.start_ns)


def slowed(step: Step, compute_slowed: float, comm_slowed: float) -> Timed:
    """A step replayed, and once more with what overlaps slowed by how much of it does.

    Parameters
    ----------
    step
        What was laid out.
    compute_slowed, comm_slowed
        How much longer a kernel takes that runs beside collectives all the time, and the reverse.
    """
    graph = step.graph()
    plan = Plan.of(graph)
    start, took = np.empty((2, len(plan.row)), np.int64)
    start[plan.row], took[plan.row] = plan.starts(), plan.dur_ns
    computes, comm = ((graph.ops["kind"] == kind).to_numpy() for kind in ("kernel", "comm"))
    transfers = comm & (took > 0)
    begins = start + step.rank * (int((start + took).max()) + 1)  # ranks one after another, so that one pass does all
    shared, longer = np.zeros_like(took), took.astype(np.float64)
    for own, other, slower in ((computes, transfers, compute_slowed), (transfers, computes, comm_slowed)):
        shared[own] = overlap_ns(begins[own], took[own], begins[other], took[other])
        longer[own] += slower * shared[own]
    dur_ns = np.rint(longer).astype(np.int64)
    plan = replace(plan, dur_ns=dur_ns[plan.row])
    graph = replace(graph, ops=graph.ops.with_columns(pl.Series("dur_ns", dur_ns)))
    return Timed(graph, plan, plan.starts(), shared)


def overlap_ns(start: Ints, dur: Ints, other_start: Ints, other_dur: Ints) -> Ints:
    """How long each interval (n,) overlaps with the union of others (m,)."""
    order = np.argsort(other_start)
    begin, end = other_start[order], (other_start + other_dur)[order]
    if not len(begin):
        return np.zeros_like(start)
    reach = np.maximum.accumulate(end)
    busy_from = np.maximum(begin, np.concatenate([[begin[0]], reach[:-1]]))
    busy = np.concatenate([[0], np.cumsum(np.maximum(reach - busy_from, 0))])

    def until(time: Ints) -> Ints:
        """Busy time of the others up to a time."""
        behind = np.searchsorted(begin, time, side="right")
        last = np.maximum(behind - 1, 0)
        unfinished = np.maximum(reach[last] - time, 0)  # whoever reaches so far has begun before
        return np.where(behind > 0, busy[behind] - unfinished, 0)

    return until(start + dur) - until(start)
