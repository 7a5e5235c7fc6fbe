"""What runs at the same time on one device slows each other: kernels and collectives share its cores and its memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb._replay_plan import Plan
from lumos_nb.critical_path import Result, replay
from lumos_nb.graph import Graph
from lumos_nb.workloads.llm.assembly import COMPUTE, HOST, Step

Ints = NDArray[np.int64]


def slowed(step: Step, result: Result, compute_slowed: float, comm_slowed: float) -> Result:
    """A step replayed once more, with what overlaps slowed by how much of it does in `result`.

    Parameters
    ----------
    step, result
        What was laid out, and its replay.
    compute_slowed, comm_slowed
        How much longer a kernel takes that runs beside collectives all the time, and the reverse.
    """
    start, took = (result.ops[name].to_numpy() for name in ("start_ns", "dur_ns"))
    dur_ns = pl.Series("dur_ns", _longer(step, start, took, compute_slowed, comm_slowed))
    return replay(replace(result.graph, ops=result.graph.ops.with_columns(dur_ns)))


def slowed_ns(step: Step, graph: Graph, compute_slowed: float, comm_slowed: float) -> tuple[Ints, int]:
    """The same without its slack and path: how long each op takes (n,), and the step."""
    plan = Plan.of(graph)
    start, took = np.empty((2, len(plan.row)), np.int64)
    start[plan.row], took[plan.row] = plan.starts(), plan.dur_ns
    longer = _longer(step, start, took, compute_slowed, comm_slowed)
    again = replace(plan, dur_ns=longer[plan.row])
    return longer, int((again.starts() + again.dur_ns).max())


def _longer(step: Step, start: Ints, took: Ints, compute_slowed: float, comm_slowed: float) -> Ints:
    computes, transfers = step.lane == COMPUTE, (step.lane != COMPUTE) & (step.lane != HOST) & (took > 0)
    begins = start + step.rank * (int((start + took).max()) + 1)  # ranks one after another, so that one pass does all
    factor = np.ones(len(took))
    for own, other, slower in ((computes, transfers, compute_slowed), (transfers, computes, comm_slowed)):
        shared = overlap_ns(begins[own], took[own], begins[other], took[other])
        factor[own] += slower * shared / np.maximum(took[own], 1)
    longer: Ints = np.rint(took * factor).astype(np.int64)
    return longer


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
