"""The data that comes with the package: recorded runs and tables, found on disk, never fetched.

`datasets/README.md` of the source says how each was made, on what hardware, and what every column means.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from lumos_nb.errors import LumosError, require_kinds, shown


class DatasetError(LumosError, KeyError):
    """No bundled data set has this name; the message lists those that exist."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show its representation


@dataclass(frozen=True, slots=True)
class Dataset:
    """One bundled data set: a folder that `capture` wrote, or a table (CSV or Parquet)."""

    file: str
    what: str
    columns: tuple[str, ...] = ()

    @property
    def is_run(self) -> bool:
        """Whether `load_run` reads it."""
        return not Path(self.file).suffix


_RATIOS = (
    *("kind", "launch", "variant", "base", "n", "base_ms", "variant_ms", "delta_ms"),
    *("ratio", "ratio_lo", "ratio_hi", "cpu_ratio"),
)
_STEPS = ("kind", "launch", "round", "turn", "variant", "rank", "step_ns", "wall_ns", "cpu_ns")
_KERNELS = (
    *("gpu", "op", "dtype", "pass", "batch", "m", "n", "k", "trans", "rows", "cols", "seq_q", "seq_kv", "heads"),
    *("kv_heads", "head_dim", "head_dim_v", "causal", "time_us", "source", "method", "model", "tp", "role", "groups"),
    *("accumulate", "out_dtype", "qkv_contiguous", "licence"),
)
_COLLECTIVES = (
    *("hardware", "interconnect", "nodes", "gpus", "gpus_per_node", "collective", "dtype", "size_bytes", "time_us"),
    *("published_busbw", "method", "source", "notes", "algbw_gbs", "busbw_gbs", "licence"),
)
_TRAINING = (
    *("row_id", "source", "gpu", "num_gpus", "precision", "model", "params_b", "hidden", "heads", "layers", "vocab"),
    *("ffn", "kv_heads", "moe_experts", "moe_topk", "seq", "tp", "pp", "cp", "vp", "ep", "dp", "sharding"),
    *("micro_batch", "global_batch", "recompute", "task", "notes", "step_time_s", "licence"),
)
_REUSE_BINS = (*(f"reuse_le_{2**i}" for i in range(16)), "reuse_gt_32768")
_REUSE = (
    *("year", "dataset", "num_tables", "batch_size", "indices_per_batch", "unique_rows_touched"),
    *(f"frac_{of}_{name}" for of in ("rows", "accesses") for name in _REUSE_BINS),
    *("mean_pooling_per_table", "mean_reuse", "source", "licence"),
)
_TABLES = (
    *("workload", "table", "rows", "dim", "pooling_factor", "index_distribution", "weights_dtype"),
    *("source", "licence"),
)
_LOOKUPS = (
    *("call", "group", "batch", "table", "rows", "dim", "pooling", "dtype", *(f"bin_{i}" for i in range(17))),
    *("distribution", *(f"forward_{of}" for of in ("time_us", "min_us", "spread", "drift"))),
    *(*(f"backward_{of}" for of in ("time_us", "min_us", "spread", "drift")), "rounds", "implementation"),
    *("device", "source"),
)

DATASETS = {
    "gpt-single": Dataset("gpt-single", "GPT of 2 layers on one CPU core, 10 traced steps"),
    "gpt-ddp": Dataset("gpt-ddp", "the same on two ranks, data parallel (DDP, gloo)"),
    "gpt-tp": Dataset("gpt-tp", "the same on two ranks, tensor parallel (DTensor, gloo)"),
    "gpt-pp": Dataset("gpt-pp", "the same in two stages, 1F1B with four micro-batches (gloo)"),
    "gpt-grid": Dataset("gpt-grid", "a smaller one on 20 ranks: five pipelines of four stages (gloo)"),
    "gpt-ddp-delay": Dataset("gpt-ddp-delay", "gpt-ddp with a logged delay on rank 1 that changes from step to step"),
    "gpt-single-paired": Dataset("gpt-single-paired", "gpt-single with the execution trace of its 3 traced steps"),
    "gpt-ddp-paired": Dataset("gpt-ddp-paired", "gpt-ddp with the execution traces of its 3 traced steps"),
    "variants": Dataset("variants.csv", "step time of changed CPU runs as a ratio to the base", _RATIOS),
    "variant-steps": Dataset("variant-steps.csv", "the step times behind `variants`", _STEPS),
    "gpt-cuda": Dataset("gpt-cuda", "GPT of 12 layers, hidden 1024, bf16, on one GPU"),
    "gpt-cuda-layers_24": Dataset("gpt-cuda-layers_24", "gpt-cuda with 24 layers"),
    "gpt-cuda-hidden_2048": Dataset("gpt-cuda-hidden_2048", "gpt-cuda with hidden 2048"),
    "gpt-cuda-batch_16": Dataset("gpt-cuda-batch_16", "gpt-cuda with batch 16 instead of 8"),
    "cuda-variants": Dataset("cuda-variants.csv", "step time of changed GPU runs as a ratio to the base", _RATIOS),
    "measured-kernels": Dataset("measured/kernels.parquet", "kernel times that others measured, by shape", _KERNELS),
    "measured-collectives": Dataset("measured/collectives.parquet", "collectives that others measured", _COLLECTIVES),
    "measured-training": Dataset("measured/llm_training.parquet", "steps that others measured, a sample", _TRAINING),
    "embedding-locality": Dataset("measured/embedding_locality.parquet", "how often public traces reuse rows", _REUSE),
    "embedding-tables": Dataset("measured/embedding_tables.parquet", "the 26 tables of MLPerf's DLRM-DCNv2", _TABLES),
    "lookup-samples": Dataset(
        "calibration-samples/cpu/lookups.parquet", "lookups in embedding tables on a CPU, measured", _LOOKUPS
    ),
    "cuda-variant-steps": Dataset("cuda-variant-steps.csv", "the step times behind `cuda-variants`", _STEPS),
}
"""Every data set that the package knows by name; a source tree or an installation may hold fewer."""


def root() -> Path:
    """The folder of the data: inside an installed package, or beside it in a checkout."""
    installed = Path(__file__).parent / "_datasets"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "datasets"


def names() -> list[str]:
    """Names of the data sets that are there."""
    return [name for name, dataset in DATASETS.items() if (root() / dataset.file).exists()]


def path(name: str) -> Path:
    """Where a data set lies: the folder of a run, or the file of a table.

    Raises
    ------
    DatasetError
        If there is no data set of that name; it is a KeyError too. InputError of what is no text.

    Examples
    --------
    >>> len(ln.load_run(ln.datasets.path("gpt-ddp")).ranks)
    2
    """
    require_kinds(name=(name, str))
    if name not in names():
        why = "is not in this installation" if name in DATASETS else "is no data set"
        raise DatasetError(f"{shown(name)} {why}; there are: {', '.join(names()) or 'none'} (in {root()}).")
    return root() / DATASETS[name].file


def load(name: str) -> pl.DataFrame | Path:
    """A table as a frame; of a run the folder, which `load_run` reads.

    Raises
    ------
    DatasetError
        As `path`.

    Examples
    --------
    >>> ln.datasets.load("variants").filter(pl.col("variant") == "again")["kind"].unique(maintain_order=True).to_list()
    ['single', 'ddp', 'tp', 'pp']
    """
    found = path(name)
    if DATASETS[name].is_run:
        return found
    with found.open("rb") as file:  # of ~ or brackets in a path polars would make others
        return pl.read_parquet(file) if found.suffix == ".parquet" else pl.read_csv(file)


def describe() -> pl.DataFrame:
    """What is there: `name`, `kind` (run or table), `what`, `size_bytes`."""
    rows = [
        (name, "run" if DATASETS[name].is_run else "table", DATASETS[name].what, _size_bytes(path(name)))
        for name in names()
    ]
    return pl.DataFrame(rows, schema=["name", "kind", "what", "size_bytes"], orient="row")


def _size_bytes(found: Path) -> int:
    files = found.rglob("*") if found.is_dir() else [found]
    return sum(file.stat().st_size for file in files if file.is_file())
