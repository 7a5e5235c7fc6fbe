"""The model, layout and batch that a trace shows, from the sizes of its kernels and the groups that communicate."""

from __future__ import annotations

import polars as pl

from lumos_nb.errors import LayoutError
from lumos_nb.graph import Graph
from lumos_nb.layout import Parallelism, Training
from lumos_nb.transformer import Transformer
from lumos_nb.workloads.llm.structure import MESSAGES, Structure

_FORMATS = {"fp64": "fp32", "fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}

Setup = tuple[Transformer, Parallelism, Training]
FIELDS = ("op_id", "rank", "group", "collective", "group_size", "comm_bytes", "dur_ns")


def read_setup(graph: Graph, structure: Structure, parts: pl.DataFrame) -> Setup:
    """What was trained and how, as far as a trace tells.

    Layers are counted; heads, batch and sequence are those of attention, `hidden` and `ffn` the widths into the first
    and the last product of a layer, the vocabulary the width of the last product behind the layers, or else the rows of
    the first embedding table.

    Parameters
    ----------
    parts
        Of `retiming.parts_of`, with `layer` and `phase` of their op.

    Raises
    ------
    LayoutError
        A size is nowhere to be seen; the message says which, and to give `of`.
    """
    forward = parts.filter(pl.col("phase") == "forward")
    inside = forward.filter(pl.col("layer") >= 0)
    attention = _only(inside.filter(pl.col("op") == "attention"), "attention")
    products = inside.filter(pl.col("op").is_in(["gemm", "gemm_bias"]))
    one = products.filter(pl.col("op_id").is_in(_first_layer(products).implode()))
    hidden, ffn = (int(_only(end, "product")["k"]) for end in (one.head(1), one.tail(1)))
    heads, keys, head = (int(attention[c] or attention["heads"]) for c in ("heads", "kv_heads", "head_dim"))
    ranks = dict(groups_of(graph, structure).group_by("of").agg(pl.col("group_size").max()).iter_rows())
    tp, pp, dp = ranks.get("tp", 1), max(structure.stage.values()) + 1, ranks.get("dp", 1)
    tables = _tables(graph)
    learned = tables[1] if len(tables) > 1 else 0
    gated = one.filter((pl.col("n") == 2 * ffn) | ((pl.col("n") == ffn) & (pl.col("k") == hidden))).height
    behind = forward.filter((pl.col("layer") < 0) & pl.col("op").is_in(["gemm", "gemm_bias"]))
    behind = behind.filter(pl.col("k") == hidden)
    model = Transformer(
        layers=len({layer for held in structure.layers.values() for layer in held}),
        hidden=hidden, heads=heads * tp, kv_heads=0 if keys == heads else keys * tp, ffn=ffn * tp,
        head_dim=0 if heads * tp * head == hidden else head,
        vocab=tables[0] if behind.is_empty() and tables else int(_only(behind.tail(1), "product of the head")["n"]),
        gated=gated > 1 or one.filter(pl.col("n") == 2 * ffn).height > 0,
        norm="layer" if (inside["op"] == "layernorm").any() else "rms", bias=bool((one["op"] == "gemm_bias").any()),
        positions="learned" if learned else "rope", max_seq=learned,
    )  # fmt: skip
    batch = int(attention["batch"])
    passes = structure.table.filter(pl.col("phase") == "forward")["passes"].max() or 1
    train = Training(
        micro_batch=batch, global_batch=batch * dp * int(str(passes)), seq=int(attention["seq_q"]),
        dtype=_FORMATS[str(products["dtype"].drop_nulls().mode().sort()[0])],  # type: ignore[arg-type]
        bucket_bytes=25 << 20 if dp > 1 else 0,
    )  # fmt: skip
    return model, Parallelism(tp=tp, pp=pp, dp=dp), train


def _only(rows: pl.DataFrame, what: str) -> dict[str, int]:
    """The most frequent row of its kind."""
    if rows.is_empty():
        raise LayoutError(
            f"the trace shows no {what} of known sizes in its forward pass, so the model cannot be read from it; give "
            "of=(Transformer(...), Parallelism(...), Training(...))."
        )
    sizes = ("m", "n", "k", "rows", "cols", "batch", "seq_q", "heads", "kv_heads", "head_dim")
    counts = rows.group_by(sizes, maintain_order=True).len().sort("len", descending=True, maintain_order=True)
    return counts.row(0, named=True)


def _first_layer(products: pl.DataFrame) -> pl.Series:
    """Ops of one layer of one pass."""
    first = products.select("rank", "layer", "micro_batch").row(0) if products.height else (0, 0, 0)
    rank, layer, micro_batch = first
    chosen = (pl.col("rank") == rank) & (pl.col("layer") == layer) & (pl.col("micro_batch") == micro_batch)
    return products.filter(chosen)["op_id"]


def groups_of(graph: Graph, structure: Structure) -> pl.DataFrame:
    """Communication ops with `of`: tp, pp or dp."""
    comm = graph.ops.filter(pl.col("kind") == "comm").select(*FIELDS)
    placed = comm.join(structure.ops.select("op_id", "phase", "layer"), on="op_id", maintain_order="left")
    inner = placed.filter((pl.col("layer") >= 0) & (pl.col("phase") == "forward"))["group"].unique().implode()
    return placed.with_columns(
        of=pl.when(pl.col("collective").is_in(MESSAGES)).then(pl.lit("pp"))
        .when(pl.col("group").is_in(inner)).then(pl.lit("tp")).otherwise(pl.lit("dp")),
        group_size=pl.col("group_size").fill_null(graph.ops["rank"].n_unique()),
    )  # fmt: skip


def _tables(graph: Graph) -> list[int]:
    """Rows of the embedding tables, in the order of their use: the vocabulary's, then that of learned positions."""
    operator = [c for c in ("operator", "parent") if c in graph.ops.columns]
    lookups = graph.ops.filter(pl.coalesce(operator) == "aten::embedding")
    rows = lookups["shapes"].str.extract(r"^\[\[(\d+),").drop_nulls().unique(maintain_order=True)
    return [int(n) for n in rows]
