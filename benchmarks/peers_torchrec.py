"""Plans of embedding tables beside TorchRec's planner, on the tasks of `sharding_tasks`: `make bench-peers` runs it.

A judge that neither side searches by prices both plans, as in `benchmarks.sharding`: lookups by a model fitted on other
samples than those of the search, on the CPU that they were measured on. TorchRec's planner knows no such machine: it
plans by its own constants of a GPU, and what its plan costs here says as much of those as of its search.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.peers import hand_over
from benchmarks.rows import Row
from benchmarks.sharding import TORCHREC_BYTES, cluster, judge, samples, sheet
from benchmarks.sharding_tasks import BATCH, MEMORY_BYTES, SETTINGS, Task, drawn_tasks, torchrec_missing, torchrec_plan
from benchmarks.timing import ratio
from lumos_nb.costs.calibration import load_calibration
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.errors import LayoutError
from lumos_nb.workloads.dlrm.plan import Plan
from lumos_nb.workloads.dlrm.sharding import shard
from lumos_nb.workloads.dlrm.sharding_costs import ShardingCosts

DIMS, TASKS = (32, 128), 3
"""Widest tables of a setting, and tasks of each."""


def timed(make: Callable[[], Plan]) -> tuple[Plan | None, float]:
    """A plan, None where there is no room, and the processor time in s."""
    began = time.process_time()
    try:
        plan = make()
    except LayoutError:
        plan = None
    return plan, time.process_time() - began


def rows() -> Iterator[Row]:
    """How much longer TorchRec's planner takes, and how much longer its plans take."""
    lookup, judging, prices = PhysicalLookup.fit(samples()[0], sheet(), folds=0), judge(), load_calibration("cpu")
    took, judged, sizes, without = [], [], [], [0, 0]

    def ours_of(task: Task) -> Plan:
        costs = ShardingCosts.of(lookup, cluster(task.devices), BATCH, calibration=prices)
        return shard(task.tables, cluster(task.devices), costs, memory_bytes=MEMORY_BYTES)

    tasks = [task for devices in SETTINGS for dim in DIMS for task in drawn_tasks(devices, dim, TASKS)]
    for task in tasks:
        (theirs, their_s), (ours, our_s) = (
            timed(lambda task=task: torchrec_plan(task, TORCHREC_BYTES)),  # type: ignore[misc]
            timed(lambda task=task: ours_of(task)),  # type: ignore[misc]
        )
        took.append((their_s, our_s))
        without = [none + (plan is None) for none, plan in zip(without, (theirs, ours), strict=True)]
        sizes.append(task.tables.height)
        if theirs and ours:
            costs = ShardingCosts.of(judging, cluster(task.devices), BATCH, calibration=prices)
            judged.append((costs.price(theirs).total_us, costs.price(ours).total_us))
    (their_s, our_s), cost = np.array(took).T, ratio(*np.array(judged).T)
    speed = ratio(their_s, our_s)
    note = f"{len(tasks)} tasks of {min(sizes)} to {max(sizes)} tables on {' and '.join(map(str, SETTINGS))} devices;"
    note += f" medians: TorchRec {np.median(their_s):.2f} s, here {np.median(our_s):.3f} s"
    yield Row("peers/sharding time over TorchRec's planner", speed.median, "x", noise=speed.noise, note=note)
    each = np.array(judged)[:, 0] / np.array(judged)[:, 1]
    note = f"time of the exchanges and lookups of a step by a judge: TorchRec's over ours, of {len(judged)} tasks; from"
    note += f" {each.min():.2f} to {each.max():.2f}; without a plan: TorchRec {without[0]}, here {without[1]}"
    yield Row("peers/judged cost of TorchRec's plans", cost.median, "x", noise=cost.noise, note=note)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    if why := torchrec_missing():
        raise SystemExit(why)
    hand_over(rows())
