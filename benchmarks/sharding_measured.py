"""Plans of embedding tables with lookups that are measured: `python -m benchmarks.sharding_measured`.

Every device's shards are looked up and stepped on one core of this machine, as the samples of lookups are
(`machine/lookups.py`), device after device, plans in random order in every round. Exchanges are those of
`benchmarks.sharding`, which no machine here can measure for 4 devices with a core each.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import polars as pl

from benchmarks.machine.clock import Clock, quiet_process
from benchmarks.machine.lookups import DRAWN, VARIANTS, Bag, Sample
from benchmarks.rows import ACCURACY, Row, record
from benchmarks.sharding import HEURISTICS, TORCHREC, contestants, costs
from benchmarks.sharding_tasks import BATCH, Task, drawn_tasks
from lumos_nb.embedding_tables import Floats, zipf_indices
from lumos_nb.errors import LayoutError
from lumos_nb.workloads.dlrm.plan import Plan

DEVICES, TASKS, ROUNDS = 4, 2, 5
MAX_DIMS = (8, 16, 32, 64)
MOST_BYTES = 2**31
"""Of a device's tables: plans of a task that need more are not measured."""
SHOWN = ("search by physical", "search by both", "search by network", "search by constants", TORCHREC)


def samples_of(plan: Plan) -> list[Sample]:
    """The lookups of each device; those of a table are the same in every plan."""
    found = []
    for device in range(plan.devices.height):
        bags = []
        for row in plan.lookups.filter(pl.col("device") == device).iter_rows(named=True):
            pooling = row["pooling"] * row["batch_share"]
            count = max(1, min(DRAWN, round(VARIANTS * BATCH * pooling)))
            drawn = zipf_indices(row["rows"], count, row["alpha"], int(row["table"])).astype(np.int32)
            bags.append(Bag(row["table"], row["rows"], row["dim"], pooling, False, f"Zipf {row['alpha']:g}", drawn))
        found.append(Sample(0, bags, BATCH, device))
    return found


def measured_us(plans: dict[str, Plan], seed: int) -> dict[str, float]:
    """Total time of each plan, from the medians of its devices' measured lookups."""
    import torch

    samples = {name: samples_of(plan) for name, plan in plans.items()}
    visits = [one for of_plan in samples.values() for one in of_plan if one.bags]
    size = max(sum(bag.rows * bag.dim for bag in one.bags) for one in visits)
    with quiet_process():
        buffer, clock, rng = torch.full((size + 16,), 0.01), Clock("cpu"), random.Random(seed)
        for _ in range(ROUNDS):
            for one in rng.sample(visits, len(visits)):
                one.visit(buffer, clock)
    found = {}
    for name, plan in plans.items():
        took: Floats = np.array([[np.median(t) if t else 0.0 for t in (s.forward, s.backward)] for s in samples[name]])
        sent = plan.devices["output_dim"].to_numpy().astype(np.float64)
        times = costs("judge", plan.devices.height).device_us(took[None], sent[None], np.zeros(1))
        found[name] = float(times.sum(axis=2).max())
    return found


def scored() -> pl.DataFrame:
    """A row a plan: task, contestant, microseconds measured and by the judge."""
    rows: list[tuple[str, str, float, float]] = []
    for max_dim in MAX_DIMS:
        for number, task in enumerate(drawn_tasks(DEVICES, max_dim, TASKS)):
            plans = {name: plan for name, plan in made(task) if plan.devices["bytes"].max() <= MOST_BYTES}  # type: ignore[operator]
            if set(SHOWN[:2]) <= set(plans) and set(HEURISTICS) & set(plans):
                for name, us in measured_us(plans, number).items():
                    rows.append((task.name, name, us, costs("judge", DEVICES).price(plans[name]).total_us))
    return pl.DataFrame(rows, schema=["task", "contestant", "us", "judged"], orient="row")


def made(task: Task) -> Iterator[tuple[str, Plan]]:
    """Names and plans of the contestants that have one."""
    for name, plan_of in contestants().items():
        if name in HEURISTICS or name in SHOWN:
            try:
                yield name, plan_of(task)
            except LayoutError:
                continue


def measured_rows() -> Iterator[Row]:
    """How much faster each search's plans are than the best rule's, both measured; beside what the judge says."""
    table = scored()
    rule = pl.col("contestant").is_in(HEURISTICS)
    best = table.filter(rule).group_by("task").agg(pl.col("us", "judged").min().name.prefix("best_"))
    gains = table.join(best, on="task").with_columns(
        gain=100 * (1 - pl.col("us") / pl.col("best_us")), said=100 * (1 - pl.col("judged") / pl.col("best_judged"))
    )
    for name in SHOWN:
        if (some := gains.filter(pl.col("contestant") == name)).height:
            note = f"{some.height} tasks on {DEVICES} devices; at most {some['gain'].max():.1f} %, at least "
            yield Row(
                f"sharding_measured/{name}", float(some["gain"].mean()), "% faster", "by the judge",  # type: ignore[arg-type]
                float(some["said"].mean()), note=f"{note}{some['gain'].min():.1f} %",  # type: ignore[arg-type]
            )  # fmt: skip
    ratio = (table["us"] / table["judged"]).log().to_numpy()
    note = f"{table.height} plans; the judge is {np.expm1(-ratio.mean()):+.0%} off in the mean"
    yield Row(
        "sharding_measured/judge, scatter", 100 * float(np.abs(np.expm1(ratio - ratio.mean())).mean()), "%", note=note
    )


def main() -> None:
    """Write the rows down and print them."""
    begun, rows = time.monotonic(), [*measured_rows()]
    record(ACCURACY, rows)
    for row in rows:
        print(f"{row.name:45} {row.value:8.2f} {row.unit:12} {row.baseline_value or 0:8.2f} {row.note}")
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
