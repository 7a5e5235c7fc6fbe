"""Plans of embedding tables beside those of others: `python -m benchmarks.sharding 10` does 10 tasks of each setting.

Tasks are drawn as NeuroShard's are. Every plan is scored by costs that no contestant has: lookups by the physical model
with its network, fitted on the odd groups of the measured samples of a CPU, where contestants have the even ones; and
exchanges by the collectives measured between 2 to 4 processes of that machine, composed for 8. So a search that trusts
its own costs too much loses here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from benchmarks import workers
from benchmarks.embedding_accuracy import SAMPLES
from benchmarks.planner_constants import PlannerConstants
from benchmarks.rows import ACCURACY, Row, record
from benchmarks.sharding_tasks import (
    BATCH,
    MAX_DIMS,
    MEMORY_BYTES,
    SETTINGS,
    Task,
    drawn_tasks,
    fastest_of_all,
    pool,
    torchrec_missing,
    torchrec_plan,
)
from lumos_nb import datasets
from lumos_nb.config import Gpu, read_sheet
from lumos_nb.costs.calibration import load_calibration
from lumos_nb.costs.embedding_net import LookupNet
from lumos_nb.costs.embedding_samples import call_times, checked_samples, median_errors, predicted_times
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.lookups import LookupModel
from lumos_nb.errors import LayoutError
from lumos_nb.executors import spread
from lumos_nb.layout import Cluster
from lumos_nb.workloads.dlrm.estimates import estimate_dlrm
from lumos_nb.workloads.dlrm.heuristics import HEURISTICS, NAIVE, place_by_rule
from lumos_nb.workloads.dlrm.model import Dlrm, DlrmTraining
from lumos_nb.workloads.dlrm.plan import Plan
from lumos_nb.workloads.dlrm.pretraining import priced_lookups
from lumos_nb.workloads.dlrm.sharding import shard
from lumos_nb.workloads.dlrm.sharding_costs import ShardingCosts

TORCHREC = "TorchRec"
TASKS = 8
"""Of each setting by default; the paper has 100."""
SMALL, SMALL_TASKS = 7, 20
TIMED = 60
STEP_BATCH, STEP_TASKS = 65536, 6
PRICED_CALLS = 24_000
"""For the network without a physical model: with 1,500 it is a quarter off what taught it, with so many a fortieth."""
CLOSE = 1.1
"""A pick that takes at most as many times the fastest is right, as in Lin et al."""
TORCHREC_BYTES = 3 * MEMORY_BYTES
"""Given to TorchRec's planner, which counts buffers as well; its plans must fit all the same."""
TORCHREC_TASKS = 1
"""Of each setting: it takes seconds a task."""


def sheet() -> Gpu:
    """Of the CPU that the samples are of."""
    return read_sheet(SAMPLES["embedding_lookups"][1], Gpu)


@cache
def samples() -> tuple[pl.DataFrame, pl.DataFrame]:
    """Measured lookups: those of contestants, and those of the judge."""
    every = checked_samples(pl.read_parquet(datasets.path("lookup-samples")))
    odd = pl.col("group").cast(pl.Int64) % 2 == 1
    return every.filter(~odd), every.filter(odd)


@cache
def models() -> dict[str, LookupModel]:
    """What contestants search by."""
    if found := _KNOWN.get("models"):
        return found
    own, _ = samples()
    physical = PhysicalLookup.fit(own, sheet(), folds=0)
    dims = np.random.default_rng(0).choice(MAX_DIMS[3:], pool().height)
    tables = pool().with_columns(dim=pl.Series(dims))
    calls = priced_lookups(physical, tables, [BATCH, BATCH // 4, BATCH // 8], PRICED_CALLS)
    return {
        "physical": physical,
        "both": LookupNet.fit(own, base=physical),
        "network": LookupNet.fit(calls),
        "constants": PlannerConstants(),
    }


@cache
def judge() -> LookupModel:
    """What scores, and nobody searches by."""
    found: LookupModel | None = _KNOWN.get("judge")
    if found is not None:
        return found
    _, others = samples()
    return LookupNet.fit(others, base=PhysicalLookup.fit(others, sheet(), folds=0))


@cache
def costs(model: str, devices: int) -> ShardingCosts:
    """Prices on so many CPUs."""
    lookup = judge() if model == "judge" else models()[model]
    return ShardingCosts.of(lookup, cluster(devices), BATCH, calibration=load_calibration("cpu"))


@cache
def cluster(devices: int) -> Cluster:
    """Processes of one machine."""
    return Cluster(gpu=sheet(), gpus_per_node=devices, inside="Loopback")


class Scored(NamedTuple):
    """What a contestant did with a task: seconds to plan, and the judge's microseconds (None: no valid plan)."""

    task: Task
    contestant: str
    took_s: float
    judged_us: float | None


def contestants() -> dict[str, Callable[[Task], Plan]]:
    """Name -> what makes a plan of a task."""
    memory = MEMORY_BYTES

    def by_rule(rule: str, task: Task) -> Plan:
        return place_by_rule(rule, task.tables, [memory] * task.devices)

    def by_search(model: str, task: Task) -> Plan:
        return shard(task.tables, cluster(task.devices), costs(model, task.devices), memory_bytes=memory)

    found: dict[str, Callable[[Task], Plan]] = {rule: partial(by_rule, rule) for rule in (*HEURISTICS, *NAIVE)}
    found |= {f"search by {model}": partial(by_search, model) for model in models()}
    if not torchrec_missing():
        found[TORCHREC] = lambda task: torchrec_plan(task, TORCHREC_BYTES)
    return found


def played(count: int) -> tuple[list[Scored], pl.DataFrame]:
    """Every contestant on every task; and what each model says of the rules' plans, beside the judge."""
    tasks = [
        (task, number)
        for devices in SETTINGS
        for max_dim in MAX_DIMS
        for number, task in enumerate(drawn_tasks(devices, max_dim, count))
    ]
    scores, picks = [], []
    fitted = {"models": models(), "judge": judge()}
    with workers() as executor:
        for of_task, picked in spread(executor, partial(_played, fitted), tasks):
            scores += of_task
            picks += picked
    return scores, pl.DataFrame(picks)


_KNOWN: dict[str, Any] = {}
"""What a process was given: models that it need not fit again."""


def _played(fitted: dict[str, Any], one: tuple[Task, int]) -> tuple[list[Scored], list[dict[str, Any]]]:
    """Every contestant on a task, the `number`th of its setting."""
    _KNOWN.update(fitted)
    task, number = one
    scores, picks = [], []
    for name, plan_of in contestants().items():
        if name == TORCHREC and number >= TORCHREC_TASKS:
            continue
        begun, judged = time.process_time(), None
        try:
            plan = plan_of(task)
        except LayoutError:  # no room
            plan = None
        took = time.process_time() - begun
        if plan is not None:
            judged = costs("judge", task.devices).price(plan).total_us
            if name in HEURISTICS or name in NAIVE:
                says = {model: costs(model, task.devices).price(plan).total_us for model in models()}
                picks.append({"task": task.name, "rule": name, "judged": judged, **says})
        scores.append(Scored(task, name, took, judged))
    return scores, picks


def comparison_rows(scores: list[Scored]) -> Iterator[Row]:
    """Rows of each setting and of each contestant over all of them, beside the best rule of each task."""
    table = pl.DataFrame(
        [(s.task.name, s.task.devices, s.task.max_dim, s.contestant, s.took_s, s.judged_us) for s in scores],
        schema={"task": pl.String, "devices": pl.Int64, "max_dim": pl.Int64, "contestant": pl.String,
                "took_s": pl.Float64, "judged_us": pl.Float64}, orient="row",
    )  # fmt: skip
    rules = table.filter(pl.col("contestant").is_in(HEURISTICS))
    best = rules.group_by("task").agg(rule_us=pl.col("judged_us").min())
    table = table.join(best, on="task").with_columns(gain=100 * (1 - pl.col("judged_us") / pl.col("rule_us")))
    for (devices, max_dim), some in table.filter(pl.col("contestant") == "search by both").group_by(
        ["devices", "max_dim"], maintain_order=True
    ):
        yield _row(f"{devices} devices, dims to {max_dim}", some)
    for (name,), some in table.filter(~pl.col("contestant").is_in(NAIVE)).group_by("contestant", maintain_order=True):
        yield _row(f"all, {name}", some)
    if missing := torchrec_missing():
        print(f"TorchRec's planner is left out: {missing}", file=sys.stderr)


def _row(name: str, some: pl.DataFrame) -> Row:
    """The mean gain over the best rule of each task, of tasks where both have a plan."""
    both = some.drop_nulls("gain")
    valid, rule = some["judged_us"].is_not_null().sum(), some["rule_us"].is_not_null().sum()
    note = (
        f"at most {both['gain'].max():.1f} %, at least {both['gain'].min():.1f} %; plans for {valid} of {some.height} "
    )
    note += f"tasks, rules for {rule}; {some['took_s'].mean():.2f} s of CPU a plan"
    return Row(f"sharding/{name}", float(both["gain"].mean()), "% faster", note=note)  # type: ignore[arg-type]


def selection_rows(picks: pl.DataFrame) -> Iterator[Row]:
    """How often the plan that a model takes for the fastest is: within a tenth, by the judge."""
    best = picks.group_by("task").agg(
        best=pl.col("judged").min(), random=(pl.col("judged") <= CLOSE * pl.col("judged").min()).mean()
    )
    for model in models():
        chosen = picks.sort(model).unique("task", keep="first", maintain_order=True).join(best, on="task")
        right = 100 * float((chosen["judged"] <= CLOSE * chosen["best"]).mean())  # type: ignore[arg-type]
        worst = 100 * float((chosen["judged"] / chosen["best"] - 1).max())  # type: ignore[arg-type, operator]
        yield Row(
            f"sharding_selection/{model}", right, "% of the tasks", "at random", 100 * float(best["random"].mean()),  # type: ignore[arg-type]
            target=">= 85", note=f"{chosen.height} tasks, 7 rules; worst pick {worst:.0f} % slower",
        )  # fmt: skip


def gap_rows() -> Iterator[Row]:
    """How far the search is from the best of all placements, by its own costs, on small tasks without splits."""
    gaps: dict[str, list[float]] = {}
    for task in drawn_tasks(4, 128, SMALL_TASKS):
        small = task._replace(tables=task.tables.head(SMALL))
        for model in ("physical", "both"):
            own = costs(model, 4)
            plan = shard(small.tables, cluster(4), own, memory_bytes=MEMORY_BYTES, splits=())
            gaps.setdefault(model, []).append(100 * (plan.total_us / fastest_of_all(small, own) - 1))
    for model, gap in gaps.items():
        note = (
            f"{len(gap)} tasks of {SMALL} tables on 4 devices, {4**SMALL:,} placements each; mean {np.mean(gap):.3f} %"
        )
        yield Row(f"sharding_gap/{model}, largest", max(gap), "% slower than the best of all", target="<= 2", note=note)


def speed_rows() -> Iterator[Row]:
    """Seconds of one core that the search takes for a plan of so many tables on 8 devices."""
    tables = next(task.tables for task in drawn_tasks(8, 128, 9) if task.tables.height >= TIMED).head(TIMED)
    for model in ("physical", "both"):
        took = []
        for _ in range(4):
            begun = time.process_time()
            shard(tables, cluster(8), costs(model, 8), memory_bytes=MEMORY_BYTES)
            took.append(time.process_time() - begun)
        note = f"least of {len(took)} in CPU time"
        yield Row(f"sharding_speed/{TIMED} tables on 8 devices, {model}", min(took), "s", target="<= 0.5", note=note)


def step_rows() -> Iterator[Row]:
    """How much faster a step is with the plan that is best for it than with the one that is best for embeddings."""
    gpus = Cluster(gpu="H100-SXM-80GB", gpus_per_node=8, inside="NVLink4 NVSwitch")
    lookup = PhysicalLookup.of_sheet(gpus.gpu_sheet)
    priced = ShardingCosts.of(lookup, gpus, STEP_BATCH)
    train = DlrmTraining(global_batch=STEP_BATCH, dtype="bf16", launch_us=0, kernels="fused")
    for name, width in (("small MLPs", 512), ("large MLPs", 4096)):
        model = Dlrm(dense=512, bottom=(width, width, 128), top=(width, width, 1), interaction="cat")

        def step_s(plan: Plan, model: Dlrm = model) -> float:
            return estimate_dlrm(model, plan, train, gpus, lookups=lookup).step_s

        gains = []
        for task in drawn_tasks(8, 128, STEP_TASKS):
            plain, best = (shard(task.tables, gpus, priced, objective=asked) for asked in (None, step_s))
            gains.append(100 * (1 - step_s(best) / step_s(plain)))
        note = (
            f"{len(gains)} tasks on 8 H100, batch {STEP_BATCH:,}; at most {max(gains):.2f} %; predicted, not measured"
        )
        yield Row(f"sharding_step/{name} of {width}", float(np.mean(gains)), "% faster", note=note)


def model_rows() -> Iterator[Row]:
    """How far contestants' models and the judge are from the measured lookups that each has not seen."""
    own, others = samples()
    for name, model, unseen in (*((name, model, others) for name, model in models().items()), ("judge", judge(), own)):
        forward, backward = (100 * one for one in median_errors(predicted_times(model, unseen), call_times(unseen)))
        note = f"forward; backward {backward:.1f} %; {unseen['call'].n_unique()} calls measured on other tables"
        yield Row(f"sharding_models/{name}, median error", forward, "%", note=note)


def sharding_rows(count: int = TASKS) -> list[Row]:
    """Rows of `accuracy.json`."""
    scores, picks = played(count)
    return [*comparison_rows(scores), *selection_rows(picks), *gap_rows(), *speed_rows(), *step_rows(), *model_rows()]


def main() -> None:
    """Write the rows down and print them."""
    begun, rows = time.monotonic(), sharding_rows(int(sys.argv[1]) if len(sys.argv) > 1 else TASKS)
    record(ACCURACY, rows)
    for row in rows:
        print(f"{row.name:45} {row.value:8.2f} {row.unit:12} {row.target:6} {row.note}")
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
