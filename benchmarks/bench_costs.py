"""How fast a calibration prices: a million kernels and collectives of distinct sizes, on one core.

    python -m benchmarks.bench_costs        prints the two figures

polars reads its number of threads when it is imported, so that `bench.py` runs this as a process of its own.
"""

from __future__ import annotations

import os
import sys
import time

os.environ |= dict.fromkeys(("POLARS_MAX_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")

import numpy as np
import polars as pl

from lumos_nb.costs.calibration import load_calibration

COUNT = 1_000_000
REPEATS = 3


def kernels(count: int = COUNT, seed: int = 0) -> pl.DataFrame:
    """Requests of six families, hardly two alike: half of them products, as in a transformer."""
    rng = np.random.default_rng(seed)
    ops = ["gemm", "gelu", "layernorm", "softmax", "attention", "add"]
    op = rng.choice(ops, count, p=[0.5, *[0.1] * 5])

    def size(least: float, most: float) -> np.ndarray:
        return np.exp(rng.uniform(np.log(least), np.log(most), count)).astype(np.int64)

    return pl.DataFrame(
        {"op": op, "dtype": rng.choice(["fp16", "bf16"], count), "pass": "fwd"}
        | {"m": size(64, 16384), "n": size(64, 16384), "k": size(64, 16384)}
        | {"rows": size(64, 1e6), "cols": size(64, 16384)}
        | {"batch": size(1, 16), "heads": size(1, 64), "seq_q": size(128, 16384), "head_dim": 128}
    ).with_columns(batch=pl.when(pl.col("op") == "attention").then("batch"))


def collectives(count: int = COUNT, seed: int = 0) -> pl.DataFrame:
    """Requests of four collectives, of any size."""
    rng = np.random.default_rng(seed)
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    return pl.DataFrame(
        {"hardware": "H100-SXM-80GB", "interconnect": "NVLink4/NVSwitch", "nodes": 1, "gpus": rng.integers(2, 9, count)}
        | {"collective": rng.choice(names, count), "size_bytes": np.exp(rng.uniform(7, 23, count)).astype(np.int64)}
    )


def main() -> int:
    """Print op/s of kernels and of collectives, the best of a few passes."""
    calibration = load_calibration("H100-SXM-80GB")
    for price, rows in (
        (calibration.predict_kernels, kernels()),
        (calibration.predict_collectives, collectives()),
    ):
        price(rows.head(1000))
        times = []
        for _ in range(REPEATS):
            start = time.process_time()
            price(rows)
            times.append(time.process_time() - start)
        print(min(times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
