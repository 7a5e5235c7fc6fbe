"""How fast and how faithful a search is: GPT-3 175B on 512 GPUs, the screen alone and with the best replayed.

    python -m benchmarks.bench_search        prints how many layouts a second one core goes through

polars reads its number of threads when it is imported, so that `bench.py` runs this as a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

if __name__ == "__main__":
    os.environ |= dict.fromkeys(("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")

import numpy as np
import polars as pl

from benchmarks.rows import Row
from lumos_nb.costs.calibration import load_calibration
from lumos_nb.layout import Cluster, Training
from lumos_nb.transformer import Transformer
from lumos_nb.workloads.llm.candidates import candidate, candidates
from lumos_nb.workloads.llm.estimates import PricedStep, estimate
from lumos_nb.workloads.llm.pass_times import Job
from lumos_nb.workloads.llm.screening import search
from lumos_nb.workloads.llm.step_times import screen
from lumos_nb.workloads.surcharges import bundled

CALCULON = 219
"""Layouts a second of Calculon on one core, measured with its authors' code on a quiet machine."""
CLUSTER = Cluster(
    gpu="H100-SXM-80GB", nodes=64, gpus_per_node=8, inside="NVLink4 NVSwitch", between="InfiniBand NDR 400"
)
GPT3 = Transformer.named("gpt3-175b")
TRAIN = Training(micro_batch=1, global_batch=512, seq=2048)
REPEATS, WORKERS, RANDOM, MOST_FOLLOWED = 3, 2, 100, 400
OTHERS = (("llama-3-8b", 4, 8192), ("mixtral-8x7b", 8, 4096))
"""Models that the screen is held to the replay for, with nodes and sequence."""


def screened() -> tuple[int, float]:
    """How many layouts, and the least processor time in s that a screen of all takes."""
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        found = search(GPT3, CLUSTER, TRAIN, keep=0)
        times.append(time.process_time() - begin)
    return found.frame.height, min(times)


def errors(model: Transformer, nodes: int, train: Training, seed: int = 0) -> pl.DataFrame:
    """Random layouts with `off_pct`, by how much the screen is off the replay."""
    cluster = Cluster(gpu=CLUSTER.gpu, nodes=nodes, inside=CLUSTER.inside, between=CLUSTER.between)
    found = candidates(model, cluster, train, [cluster.gpus], {}).filter(pl.col("why_not").is_null())
    found = found.sample(RANDOM, seed=seed)
    prices = load_calibration(str(cluster.gpu))
    replayed = [estimate(model, *candidate(row, train, cluster), prices).step_s for row in found.iter_rows(named=True)]
    screened_s = screen(Job(model, train, cluster, prices, bundled().every), found)
    return found.with_columns(off_pct=100 * np.abs(screened_s / np.array(replayed) - 1))


def brief_errors(name: str, nodes: int, seq: int, seed: int = 0) -> np.ndarray:
    """Steps from few micro-batches against whole ones of random layouts of many, as shares (n,)."""
    model, train = Transformer.named(name), Training(micro_batch=1, global_batch=1024, seq=seq)
    cluster = Cluster(gpu=CLUSTER.gpu, nodes=nodes, inside=CLUSTER.inside, between=CLUSTER.between)
    found = candidates(model, cluster, train, [cluster.gpus], {}).filter(pl.col("why_not").is_null())
    prices, extra, off = load_calibration(str(cluster.gpu)), bundled().every, []
    for row in found.sample(40 * RANDOM, seed=seed).iter_rows(named=True):
        layout, asked, _ = candidate(row, train, cluster)
        if 12 * layout.pp <= asked.micro_batches(layout) <= MOST_FOLLOWED and layout.pp * layout.chunks <= 32:
            step = PricedStep.of(model, layout, asked, cluster, prices)
            off.append(step.brief(extra).step_s / step.estimate(extra).step_s - 1)
        if len(off) == RANDOM // 4:
            break
    return np.array(off)


def rows() -> Iterator[Row]:
    """Speed of the screen and of a whole search, and how far the screen is from the replay."""
    command = [sys.executable, "-m", "benchmarks.bench_search"]
    count, screen_s = map(float, subprocess.run(command, capture_output=True, check=True).stdout.split())
    note = f"GPT-3 175B on 512 GPUs, {count:,.0f} layouts: feasibility, memory and time; processor time of one thread"
    yield Row("llm/layouts screened", count / screen_s, "layouts/s", "Calculon", CALCULON, None, ">= 50000", note)
    begin = time.perf_counter()
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as executor:
        found = search(GPT3, CLUSTER, TRAIN, executor=executor)
    replayed = found.frame["replayed_s"].len() - found.frame["replayed_s"].null_count()
    note = f"the same, and {replayed} layouts replayed by {WORKERS} processes, which this starts"
    yield Row("llm/search of GPT-3 175B on 512 GPUs", time.perf_counter() - begin, "s", target="<= 30", note=note)
    yield from agreement_rows()


def agreement_rows() -> Iterator[Row]:
    """How far the screen is from the replay, by the stage of ZeRO too."""
    for name, nodes, seq in OTHERS:
        brief = 100 * np.abs(brief_errors(name, nodes, seq))
        note = f"{len(brief)} random layouts of many micro-batches; mean {brief.mean():.2g} %"
        yield Row(f"llm/few micro-batches against all, {name}, worst", float(brief.max()), "%", note=note)
        found = errors(Transformer.named(name), nodes, Training(micro_batch=1, global_batch=128, seq=seq))
        off, worst = found["off_pct"].to_numpy(), found.group_by("zero").agg(pl.max("off_pct")).sort("zero").rows()
        note = f"{RANDOM} random layouts on {8 * nodes} GPUs; mean {off.mean():.2g} %, 95 of 100 below"
        note += f" {np.quantile(off, 0.95):.2g} %; worst " + ", ".join(f"{pct:.2g} with ZeRO {n}" for n, pct in worst)
        yield Row(f"llm/screen against replay, {name}, worst", float(off.max()), "%", target="<= 3", note=note)


if __name__ == "__main__":
    print(*screened())
