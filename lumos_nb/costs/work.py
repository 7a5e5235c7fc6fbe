"""What a kernel has to do: its family, its FLOPs and the bytes that it must move, from the shapes in a kernel frame.

Bytes are compulsory: every operand once, whatever a cache or a second pass adds. A family is one row of data: how many
elements its kernels read and write for each element of `rows` x `cols`, or, for what multiplies, the formula of a
product. What `m`, `n` and `k` mean: the executed product (m x k)(k x n); where `pass` is `bwd_grad_act` or
`bwd_grad_w`, the forward product whose gradient is taken. `groups` of a grouped product each have m, n and k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import polars as pl

from lumos_nb.errors import InputError, SchemaError

ELEMENT_BYTES: Mapping[str, float] = {
    **{"fp64": 8.0, "int64": 8.0, "fp32": 4.0, "tf32": 4.0, "int32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp16/bf16": 2.0},
    **{"fp8": 1.0, "int8": 1.0, "uint8": 1.0, "bool": 1.0, "fp4": 0.5},
}
"""Bytes of one element by number format."""

FORMATS = {"fp16": "half", "bf16": "half", "fp16/bf16": "half", "fp8": "fp8", "int32": "fp32", "int64": "fp64"}
FORMATS |= dict.fromkeys(("uint8", "bool"), "int8")
"""Which formats are computed alike: a class of its own each, but for the two halves."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Elements read and written for each of `rows` x `cols`, forward and backward, and further bytes for each row."""

    family: str
    read: float = 1.0
    write: float = 1.0
    back_read: float = 2.0
    back_write: float = 1.0
    flops: float = 1.0
    row_bytes: float = 0.0
    row_write: float = 0.0


_ONE = ("elementwise", "add_scalar", "sub_scalar", "mul_scalar", "div_scalar", "pow_scalar", "relu", "gelu", "silu")
_ONE += ("tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "neg", "abs", "masked_fill", "where")
_TWO = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")

MOVES: Mapping[str, Traffic] = {
    **{op: Traffic("elementwise") for op in _ONE},
    **{op: Traffic("elementwise", read=2, back_read=3, back_write=2) for op in _TWO},
    "lerp": Traffic("elementwise", read=2, flops=3),
    **{op: Traffic("elementwise", read=3, flops=3) for op in ("addcmul", "addcdiv")},
    **{op: Traffic("gated_activation", read=2, back_read=3, back_write=2, flops=6) for op in ("gated_activation", "act_mul")},
    **{op: Traffic("norm", flops=8) for op in ("norm", "norm(rms/layer)", "layernorm", "rmsnorm")},
    "batchnorm": Traffic("norm", flops=8),
    "softmax": Traffic("softmax", flops=5),
    "cross_entropy": Traffic("cross_entropy", write=0, back_read=1, flops=5, row_bytes=8, row_write=1),
    "nll_loss": Traffic("cross_entropy", read=0, write=0, back_read=0, flops=0, row_bytes=12),
    "dropout": Traffic("dropout", write=1, back_read=1, flops=2),
    "rope": Traffic("rope", back_read=1, flops=3),
    "embedding_lookup": Traffic("embedding_lookup", back_read=1, flops=0, row_bytes=8),
    "optimizer": Traffic("optimizer", read=4, write=3, flops=12),
    "adam": Traffic("optimizer", read=4, write=3, flops=12),
    "adamw": Traffic("optimizer", read=4, write=3, flops=12),
    "adamw_foreach": Traffic("optimizer", read=4, write=3, flops=12),
    "sgd": Traffic("optimizer", read=2, write=1, flops=2),
    "sgd_momentum": Traffic("optimizer", read=3, write=2, flops=4),
    "transpose": Traffic("transpose", back_read=1, flops=0),
    "concat": Traffic("concat", back_read=1, flops=0),
    "index": Traffic("index", back_read=1, flops=0, row_bytes=8),
    "copy": Traffic("copy", back_read=1, flops=0),
    "cast": Traffic("cast", back_read=1, flops=0),
    "reduction": Traffic("reduction", write=0, back_read=0, row_write=1),
    "pooling": Traffic("pooling", back_read=1),
    "sort": Traffic("sort", back_read=1, flops=0),
    "random": Traffic("random", read=0, back_read=0, flops=10),
    "fill": Traffic("fill", read=0, back_read=0, flops=0),
}
"""Ops that compute little: their bytes are what they cost. `cols` of `act_mul` is the width of its output."""

PRODUCTS: Mapping[str, str] = {
    **dict.fromkeys(("gemm", "gemm_bias", "bmm", "grouped_gemm"), "gemm"),
    **{"convolution": "convolution", "attention": "attention", "interaction": "interaction"},
}
"""Ops that multiply, and their families."""

NEEDS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "convolution": ("m", "n", "k", "rows", "cols"),  # as implicit product; rows x cols: elements of the input
    "attention": ("batch", "heads", "seq_q", "head_dim"),
    "interaction": ("batch", "rows", "cols"),  # of every sample, its features and their width
}
"""Columns without which a family has no work; all others need `rows` and `cols`."""

PASSES = ("fwd", "bwd", "bwd_grad_act", "bwd_grad_w", "fwd+bwd", "any")

_SHAPES = ("batch", "groups", "m", "n", "k", "rows", "cols", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim")
_NUMBERS = (*_SHAPES, "head_dim_v")
_TEXTS = {"pass": "any", "trans": "NN", "out_dtype": None, "method": None}
_FLAGS = ("causal", "accumulate")


def with_work(frame: pl.DataFrame) -> pl.DataFrame:
    """Add what each kernel has to do.

    Parameters
    ----------
    frame
        A kernel frame: `op` and `dtype`, and the columns that its ops need (`NEEDS`); all others may be null or absent.

    Returns
    -------
    frame
        The same rows with `family`, `format` (formats that are computed alike), `flops`, `bytes`, and what the model
        reads: a product of `work_batch` matrices, `work_m` x `work_k` times `work_k` x `work_n`, of 2 FLOPs each (for
        attention a row of m is a query, n its FLOPs / 2 for each key, `work_scores` how often a score is made or used,
        `work_masked` the keys that the mask hides); for what moves data, `work_m` rows, `work_n` bytes each.

    Raises
    ------
    SchemaError
        There is no column `op` or `dtype`.
    InputError
        A row has an unknown op, pass or number format, or lacks a number that its op needs, or has one that is not
        positive; the message names row, op and column.

    Examples
    --------
    >>> with_work(pl.DataFrame({"op": ["gemm"], "dtype": ["fp16"], "m": [64], "n": [32], "k": [16]})).select(
    ...     "family", "flops", "bytes").row(0)
    ('gemm', 65536.0, 7168.0)
    """
    if missing := [name for name in ("op", "dtype") if name not in frame.columns]:
        raise SchemaError(f"the kernel frame lacks column(s) {', '.join(missing)}; it has {', '.join(frame.columns)}.")
    lean = _lean(frame)
    _check(lean)
    fallbacks = [
        pl.col("batch", "groups").fill_null(1.0),
        pl.col("seq_kv").fill_null(pl.col("seq_q")),
        pl.col("kv_heads").fill_null(pl.col("heads")),
        pl.col("head_dim_v").fill_null(pl.col("head_dim")),
        pl.col("out_bytes").fill_null(pl.col("el_bytes")),
    ]
    parts = lean.with_columns(fallbacks).with_columns(_sizes()).with_columns(**_work())
    return frame.with_columns(parts.select("family", "format", *_work()))


def _lean(frame: pl.DataFrame) -> pl.DataFrame:
    """The columns that formulas read, of one type each and all there, with the row of the op's table beside them."""
    texts = [_column(frame, name).cast(pl.String).fill_null(pl.lit(default, pl.String)).alias(name) for name, default in _TEXTS.items()]
    flags = [_flag(frame, name).alias(name) for name in _FLAGS]
    numbers = [_column(frame, name).cast(pl.Float64).alias(name) for name in _NUMBERS]
    lean = frame.select(pl.col("op", "dtype").cast(pl.String), *texts, *flags, *numbers)
    families = {op: move.family for op, move in MOVES.items()} | dict(PRODUCTS)
    traffic = pl.DataFrame([{"op": op} | _traffic(move) for op, move in MOVES.items()])
    return lean.with_columns(
        pl.col("op").replace_strict(families, default=None, return_dtype=pl.String).alias("family"),
        pl.col("dtype").replace_strict(FORMATS, default=pl.col("dtype")).alias("format"),
        pl.col("dtype").replace_strict(ELEMENT_BYTES, default=None, return_dtype=pl.Float64).alias("el_bytes"),
        pl.col("out_dtype").replace_strict(ELEMENT_BYTES, default=None, return_dtype=pl.Float64).alias("out_bytes"),
    ).join(traffic, on="op", how="left", maintain_order="left")


def _traffic(move: Traffic) -> dict[str, float]:
    return {name: float(getattr(move, name)) for name in Traffic.__dataclass_fields__ if name != "family"}


def _column(frame: pl.DataFrame, name: str) -> pl.Expr:
    return pl.col(name) if name in frame.columns else pl.lit(None).alias(name)


def _flag(frame: pl.DataFrame, name: str) -> pl.Expr:
    """A flag as true or false; figures also write it as text."""
    column = _column(frame, name)
    if frame.schema.get(name) == pl.String:
        column = column.str.to_lowercase() == "true"
    return column.cast(pl.Boolean).fill_null(False)


def _check(lean: pl.DataFrame) -> None:
    """Raise InputError for the first row that cannot be priced."""
    ops = ", ".join([*PRODUCTS, *MOVES])
    problems: list[tuple[pl.Expr, str, str]] = [
        (pl.col("family").is_null(), "op", f"is not one of {ops}"),
        (pl.col("el_bytes").is_null(), "dtype", f"is not one of {', '.join(ELEMENT_BYTES)}"),
        (~pl.col("pass").is_in(PASSES), "pass", f"is not one of {', '.join(PASSES)}"),
        (pl.col("out_dtype").is_not_null() & pl.col("out_bytes").is_null(), "out_dtype", "is no known format"),
    ]
    for family in lean["family"].drop_nulls().unique().sort():
        of_family = pl.col("family") == family
        for name in NEEDS.get(family, ("rows", "cols")):
            bad = of_family & ~(pl.col(name) > 0).fill_null(False)
            problems.append((bad, name, "is needed by this op, as a positive number"))
    wrong = lean.select(bad.fill_null(True).any().alias(str(i)) for i, (bad, _, _) in enumerate(problems))
    for i, (bad, name, reason) in enumerate(problems):
        if wrong.item(0, str(i)):
            row = lean.with_row_index("row").filter(bad.fill_null(True)).row(0, named=True)
            raise InputError(f"kernel frame, row {row['row']} (op {row['op']!r}): {name} is {row[name]!r}; it {reason}.")


def _by_family(chosen: Mapping[str, pl.Expr], otherwise: pl.Expr) -> pl.Expr:
    return reduce(
        lambda rest, one: pl.when(pl.col("family") == one[0]).then(one[1]).otherwise(rest), chosen.items(), otherwise
    )


def _col(*names: str) -> pl.Expr:
    """The product of columns."""
    return reduce(lambda a, b: a * b, (pl.col(name) for name in names))


def _sizes() -> list[pl.Expr]:
    """Sizes that more than one formula needs: of a gradient's product, of causal attention, of both passes."""
    act, weight, backward = (pl.col("pass") == name for name in ("bwd_grad_act", "bwd_grad_w", "bwd"))
    both = pl.col("pass") == "fwd+bwd"
    swapped = {
        # the gradient by the activations is (m x n)(n x k), that by the weights (n x m)(m x k)
        "work_m": pl.when(weight).then("n").otherwise("m"),
        "work_n": pl.when(act | weight).then("k").otherwise("n"),
        "work_k": pl.when(act).then("n").when(weight).then("m").otherwise("k"),
    }
    # A query sees the keys up to its own, the last query all of them; without a mask it sees every key.
    queries, keys = pl.col("seq_q"), pl.col("seq_kv")
    seen = pl.when(queries <= keys).then(keys - (queries - 1) / 2).otherwise(keys * (keys + 1) / (2 * queries))
    back = act | weight | backward
    total = [
        (pl.when(back).then(f"back_{way}").when(both).then(pl.col(way) + pl.col(f"back_{way}")).otherwise(way)).alias(
            f"total_{way}"
        )
        for way in ("read", "write")
    ]
    return [
        *(expression.alias(name) for name, expression in swapped.items()),
        pl.when("causal").then(seen).otherwise(keys).alias("keys"),
        *total,
        pl.when(both).then(3.0).when(backward).then(2.0).otherwise(1.0).alias("products"),  # both gradients at once
        pl.when(both).then(3.5).when(back).then(2.5).otherwise(1.0).alias("attention_products"),
        pl.when(both).then(3.0).when(back).then(2.0).otherwise(1.0).alias("attention_tensors"),
    ]


_moved: Callable[[], pl.Expr] = lambda: (  # noqa: E731
    (pl.col("total_read") * pl.col("el_bytes") + pl.col("total_write") * pl.col("out_bytes")) * pl.col("cols")
    + pl.col("row_bytes")
    + pl.col("row_write") * pl.col("out_bytes")
)


def _work() -> dict[str, pl.Expr]:
    """FLOPs, bytes and the product that the model reads, by family."""
    element, out, count = pl.col("el_bytes"), pl.col("out_bytes"), _col("batch", "groups")
    written = out * _col("work_m", "work_n") * (1.0 + pl.col("accumulate").cast(pl.Float64))
    read = element * (_col("work_m", "work_k") + _col("work_k", "work_n"))
    bias = pl.when(pl.col("op") == "gemm_bias").then(element * pl.col("n")).otherwise(0.0)
    widths = pl.col("head_dim") + pl.col("head_dim_v")
    queries = _col("heads", "seq_q") * widths  # queries and what is put out; backward reads and writes their gradients
    keys = _col("kv_heads", "seq_kv") * widths
    pairs = _col("batch", "rows") * (pl.col("rows") - 1.0) / 2.0
    flops = {
        "gemm": 2.0 * count * _col("m", "n", "k", "products"),
        "convolution": 2.0 * count * _col("m", "n", "k", "products"),
        "attention": 2.0 * _col("batch", "heads", "seq_q", "keys", "attention_products") * widths,
        "interaction": 2.0 * pairs * _col("cols", "products"),
    }
    size = {
        "gemm": pl.col("products") * (count * (read + written) + bias),
        "convolution": pl.col("products") * (element * (_col("rows", "cols") + count * _col("n", "k")) + count * out * _col("m", "n")),
        "attention": element * _col("batch", "attention_tensors") * (queries + keys),
        "interaction": pl.col("products") * (element * _col("batch", "rows", "cols") + out * pairs),
    }
    return {
        "flops": _by_family(flops, _col("rows", "cols", "flops")),
        "bytes": _by_family(size, pl.col("rows") * _moved()),
        "work_batch": _by_family(
            {"gemm": count, "convolution": count, "attention": _col("batch", "heads"), "interaction": pl.lit(1.0)},
            pl.lit(1.0),
        ),
        "work_m": _by_family(
            {"gemm": pl.col("work_m"), "convolution": pl.col("work_m"), "attention": pl.col("seq_q"), "interaction": pl.col("batch")},
            pl.col("rows"),
        ),
        "work_n": _by_family(
            {
                "gemm": _col("work_n", "products"),
                "convolution": _col("work_n", "products"),
                "attention": widths * pl.col("attention_products"),
                "interaction": size["interaction"] / pl.col("batch"),
            },
            _moved(),
        ),
        "work_k": _by_family(
            {"gemm": pl.col("work_k"), "convolution": pl.col("work_k"), "attention": pl.col("keys")}, pl.lit(1.0)
        ),
        "work_scores": _by_family({"attention": pl.col("attention_tensors")}, pl.lit(0.0)),
        "work_masked": _by_family({"attention": pl.col("seq_kv") - pl.col("keys")}, pl.lit(0.0)),
    }
