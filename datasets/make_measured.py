"""Carry the figures that others measured into `datasets/measured`, source and licence in every row.

Reads the tables beside the checkout (`../shared/measured`), keeps the rows whose licence lets us, writes Parquet:

    python datasets/make_measured.py
"""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl

from lumos_nb.workloads.llm.table_rows import COLUMNS

SHARED = Path(__file__).parents[1].parent / "shared" / "measured"
OUT = Path(__file__).parent / "measured"

FREE = ("MIT", "MIT-0", "BSD-3-Clause", "Apache-2.0", "Apache-2.0 / MIT", "page or paper; figures only")
"""Licences whose rows are carried. A page or paper gives figures, which nobody owns; its text stays there."""


def licences() -> dict[str, str]:
    """Licence of every source that PROVENANCE.md names, by the first words of the source's name."""
    table = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \| [^|]*\.(?:csv|parquet) ", _provenance(), re.MULTILINE)
    return {source.strip(): licence.strip().replace("MIT-style", "MIT") for source, licence in table}


def _provenance() -> str:
    return (SHARED / "PROVENANCE.md").read_text(encoding="utf-8")


def licensed(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows that may be carried, with their `licence`."""
    known = licences()
    if unknown := set(rows["source"].unique()) - set(known):
        raise SystemExit(f"PROVENANCE.md names no licence of: {', '.join(sorted(unknown))}")
    rows = rows.with_columns(licence=pl.col("source").replace_strict(known))
    left = rows.filter(~pl.col("licence").is_in(FREE)).group_by("source", "licence").len()
    for source, licence, count in left.sort("source").iter_rows():
        print(f"left out: {count} rows of {source} ({licence})")
    return rows.filter(pl.col("licence").is_in(FREE))


PHI_2 = {"act_mul": "gelu", "add": "add_twice", "norm(rms/layer)": "layernorm"}
"""Ops of microsoft/phi-2, which the collection calls as it does those of Llama-like models. Phi-2 has a GELU without a
gate, layer norms, and blocks whose attention and MLP run side by side, so that a residual takes two additions."""


def named(kernels: pl.DataFrame) -> pl.DataFrame:
    """Ops and methods under names that say what ran."""
    phi_2 = pl.col("model").fill_null("") == "microsoft/phi-2"
    rms = pl.col("op").replace({"norm(rms/layer)": "rmsnorm"})
    unstated = (pl.col("op") == "attention") & pl.col("method").str.starts_with("time rebuilt")
    return kernels.with_columns(
        op=pl.when(phi_2).then(pl.col("op").replace(PHI_2)).otherwise(rms),
        method=pl.when(unstated).then("implementation not stated; " + pl.col("method")).otherwise("method"),
    )


MICRO_BATCHES = pl.col("global_batch") / (pl.col("micro_batch") * pl.col("dp"))
SOURCES = {
    # words of a row's source: how many of its rows are drawn with a seed, and of which
    "vTrain single-node": (8, pl.lit(value=True)),
    "mosaicml/llm-foundry": (6, pl.col("precision") == "bf16"),
    "foundation-model-stack/fms-fsdp": (4, pl.lit(value=True)),
    "tr11 prequel": (2, pl.col("config_complete") & (MICRO_BATCHES <= 64)),  # of more a replay takes long
    "NVIDIA-NeMo/Megatron-Bridge": (2, (pl.col("precision") == "bf16") & (pl.col("gpu") == "H100")),
}
GRID = pl.col("source").str.contains("nanotron") & (pl.col("num_gpus") == 16) & (pl.col("model") == "nanotron Llama-1B")


def sample(training: pl.DataFrame) -> pl.DataFrame:
    """A few training runs of each source, and of two nodes of nanotron's grid the fastest of each TP x PP."""
    training = training.filter(pl.col("step_time_s") > 0, ~pl.col("notes").fill_null("").str.contains("SUSPECT"))
    grid = training.filter(GRID).sort("step_time_s").unique(["tp", "pp"], keep="first").sort("tp", "pp")
    parts = [grid]
    for words, (count, which) in SOURCES.items():
        rows = training.filter(pl.col("source").str.contains(words, literal=True), which)
        parts.append(rows.sample(min(count, rows.height), seed=0).sort("row_id"))
    rows = pl.concat(parts).with_columns(pl.col("source").str.replace(r" assets/\S+\)", ")"))  # as PROVENANCE.md has it
    return licensed(rows).select(*COLUMNS, "step_time_s", "licence")


def main() -> None:
    """Write the tables and say how large they are."""
    OUT.mkdir(exist_ok=True)
    files = sorted(SHARED.glob("kernels_*.parquet"))
    kernels = pl.concat([pl.read_parquet(file) for file in files], how="diagonal_relaxed")
    causal = pl.col("causal").str.to_lowercase() == "true"  # some files write True, some true, some have a type for it
    kernels = named(licensed(kernels.with_columns(pl.col(pl.Int64).cast(pl.Int32), causal)))
    collectives = licensed(pl.read_csv(SHARED / "collectives.csv", infer_schema_length=None).drop("row_id"))
    training = sample(pl.read_csv(SHARED / "llm_training.csv", infer_schema_length=None))
    embeddings = {
        name: licensed(pl.read_csv(SHARED / f"{name}.csv")) for name in ("embedding_locality", "embedding_tables")
    }
    tables = {"kernels": kernels, "collectives": collectives, "llm_training": training, **embeddings}
    for name, rows in tables.items():
        file = OUT / f"{name}.parquet"
        rows.write_parquet(file, compression="zstd", compression_level=19)
        print(f"{name}: {rows.height} rows, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
