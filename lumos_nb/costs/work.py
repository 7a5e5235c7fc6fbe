"""What a kernel has to do: its family, its FLOPs and the bytes that it must move, from the shapes in a kernel frame.

Bytes are compulsory: every operand once, whatever a cache or a second pass adds. A family is one row of data: how many
elements its kernels read and write for each element of `rows` x `cols`, or, for what multiplies, the formula of a
product. What `m`, `n` and `k` mean: the executed product (m x k)(k x n); where `pass` is `bwd_grad_act` or
`bwd_grad_w`, the forward product whose gradient is taken. `groups` of a grouped product each have m, n and k.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import reduce

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.costs.tables import Table, as_frame, numbers, spelled, words
from lumos_nb.errors import InputError, SchemaError, shown
from lumos_nb.number_formats import ELEMENT_BYTES, FORMAT_NAMES

FORMATS = dict.fromkeys(("fp16", "bf16", "fp16/bf16", "int16"), "half") | {"int32": "fp32", "int64": "fp64"}
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


_ONE = (
    *("elementwise", "add_scalar", "sub_scalar", "mul_scalar", "div_scalar", "pow_scalar", "relu", "gelu", "silu"),
    *("tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "neg", "abs", "masked_fill", "where"),
)
_TWO = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")

MOVES: Mapping[str, Traffic] = {
    **{op: Traffic("elementwise") for op in _ONE},
    **{op: Traffic("elementwise", read=2, back_read=3, back_write=2) for op in _TWO},
    "lerp": Traffic("elementwise", read=2, flops=3),
    **{op: Traffic("elementwise", read=3, flops=3) for op in ("addcmul", "addcdiv")},
    "add_twice": Traffic("elementwise", read=4, write=2, back_read=4, back_write=4, flops=2),  # one add after another
    **dict.fromkeys(
        ("gated_activation", "act_mul"), Traffic("gated_activation", read=2, back_read=3, back_write=2, flops=6)
    ),
    **dict.fromkeys(("norm", "norm(rms/layer)", "layernorm", "rmsnorm"), Traffic("norm", flops=8)),
    "batchnorm": Traffic("batch_norm", flops=8),  # its statistics are of columns: no block a row
    "softmax": Traffic("softmax", flops=5),
    "cross_entropy": Traffic("cross_entropy", write=0, back_read=1, flops=5, row_bytes=8, row_write=1),
    "nll_loss": Traffic("cross_entropy", read=0, write=0, back_read=0, flops=0, row_bytes=12),
    "dropout": Traffic("dropout", write=1, back_read=1, flops=2),
    "rope": Traffic("rope", back_read=1, flops=3),
    "embedding_lookup": Traffic("embedding_lookup", back_read=1, flops=0, row_bytes=8),
    **{op: Traffic("optimizer", read=4, write=3, flops=12) for op in ("optimizer", "adam", "adamw", "adamw_foreach")},
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
    "convolution": "convolution",
    "attention": "attention",
    "interaction": "interaction",
}
"""Ops that multiply, and their families."""

NEEDS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "convolution": ("m", "n", "k", "rows", "cols"),  # as implicit product; rows x cols: elements of the input
    "attention": ("batch", "heads", "seq_q", "head_dim"),
    "interaction": ("batch", "rows", "cols"),  # of every sample, its features and their width
}
"""Columns without which a family has no work; all others need `rows` and `cols`."""

MAY_HAVE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gemm", "convolution"), ("batch", "groups")),
    "attention": ("seq_kv", "kv_heads", "head_dim_v"),
}
"""Further sizes that a family reads where they are given."""

PASSES = ("fwd", "bwd", "bwd_grad_act", "bwd_grad_w", "fwd+bwd", "any")

NUMBERS = (
    *("batch", "groups", "m", "n", "k", "rows", "cols", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim"),
    "head_dim_v",
)
"""Columns of sizes."""
_LARGEST = 2.0**63
"""Sizes lie below this, so that no product of them overflows."""

_OP_NAMES = {
    **dict.fromkeys(("matmul", "mm", "linear"), "gemm"),
    "addmm": "gemm_bias",
    **dict.fromkeys(("scaled_dot_product_attention", "sdpa", "flash_attention"), "attention"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "convolution"),
    **{name: name.replace("_", "") for name in ("layer_norm", "rms_norm", "batch_norm")},
    "embedding": "embedding_lookup",
    "cat": "concat",
}
_PASS_NAMES = {"": "any", "forward": "fwd", "backward": "bwd", "dgrad": "bwd_grad_act", "wgrad": "bwd_grad_w"}
_FLAG_NAMES = dict.fromkeys(("1", "1.0", "yes"), "true") | dict.fromkeys(("0", "0.0", "no", "nan", ""), "false")
_TEXTS: Mapping[str, tuple[str | None, Collection[str], Mapping[str, str]]] = {
    # column: (what stands for null, what it may hold, other spellings)
    "op": (None, (*PRODUCTS, *MOVES), _OP_NAMES),
    "dtype": (None, ELEMENT_BYTES, FORMAT_NAMES),
    "pass": ("any", PASSES, _PASS_NAMES),
    "trans": ("", ("", "NN", "NT", "TN", "TT"), {}),
    "out_dtype": (None, ELEMENT_BYTES, FORMAT_NAMES),
    "causal": ("false", ("true", "false"), _FLAG_NAMES),
    "accumulate": ("false", ("true", "false"), _FLAG_NAMES),
}

RESULTS = ("flops", "bytes", "work_batch", "work_m", "work_n", "work_k", "work_scores", "work_masked")
"""Columns that `with_work` computes from the sizes."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one family: where they are in the frame, and their `kind`, `cols` and `RESULTS`."""

    family: str
    rows: NDArray[np.uint32]
    sizes: pl.DataFrame


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel frame's work: what does not depend on sizes once for every kind of row, the rest by family."""

    kinds: pl.DataFrame
    parts: tuple[Part, ...]


def with_work(table: Table) -> pl.DataFrame:
    """Add what each kernel has to do.

    Parameters
    ----------
    table
        A kernel frame: `op` and `dtype`, and the columns that its ops need (`NEEDS`); all others may be null or absent.
        polars, pandas, a mapping of columns or a list of rows. NaN is null; formats may be spelled as torch does.

    Returns
    -------
    frame
        The same rows with `family`, `format` (formats that are computed alike), `implementation` (of attention:
        `method` up to the first ";"), `flops`, `bytes`, and what the model reads: a product of `work_batch` matrices,
        `work_m` x `work_k` times `work_k` x `work_n`, of 2 FLOPs each (for attention a row of m is a query, n its
        FLOPs / 2 for each key, `work_scores` how often a score is made or used, `work_masked` the keys that the mask
        hides); for what moves data, `work_m` rows, `work_n` bytes each.

    Raises
    ------
    SchemaError
        There is no column `op` or `dtype`.
    InputError
        A row has an unknown op, pass, layout, flag or number format, or lacks a number that its op needs, or has one
        that is not positive; the message names row, op and column.

    Examples
    --------
    >>> with_work(pl.DataFrame({"op": ["gemm"], "dtype": ["fp16"], "m": [64], "n": [32], "k": [16]})).select(
    ...     "family", "flops", "bytes").row(0)
    ('gemm', 65536.0, 7168.0)
    """
    frame = as_frame(table, "kernel")
    return joined(frame, work_of(frame))


def joined(frame: pl.DataFrame, work: Work) -> pl.DataFrame:
    """A kernel frame with its work in columns; the second half of `with_work`."""
    kind = np.zeros(frame.height, dtype=np.uint32)
    found = np.zeros((len(RESULTS), frame.height))
    for part in work.parts:
        kind[part.rows] = part.sizes["kind"].to_numpy()
        for values, name in zip(found, RESULTS, strict=True):
            values[part.rows] = part.sizes[name].to_numpy()
    texts = work.kinds.select("family", "format", "implementation")[kind]
    return frame.with_columns(*texts, *(pl.Series(name, values) for name, values in zip(RESULTS, found, strict=True)))


def work_of(frame: pl.DataFrame) -> Work:
    """The same as `with_work` in the form that the model reads: kinds of rows, and sizes by family.

    Raises
    ------
    SchemaError, InputError
        As `with_work`.
    """
    if missing := [name for name in ("op", "dtype") if name not in frame.columns]:
        raise SchemaError(
            f"the kernel frame lacks column(s) {', '.join(missing)}; it has {', '.join(frame.columns) or 'none'}."
        )
    given = _texts(frame)
    distinct = given.unique(maintain_order=True)
    kinds = _kinds(distinct)
    kind = given.join(
        distinct.with_row_index("kind"), on=given.columns, how="left", nulls_equal=True, maintain_order="left"
    )["kind"]
    _check_kinds(kinds, kind)
    rows = numbers(frame, NUMBERS, "kernel").with_columns(kind, kinds["family"].gather(kind)).with_row_index("row")
    parts = []
    for family in kinds["family"].unique(maintain_order=True):
        chosen = rows if kinds["family"].n_unique() == 1 else rows.filter(pl.col("family") == family)
        _check_sizes(family, chosen, kinds)
        of_kind = kinds.select("kind", *_FACTORS).with_columns(pl.col("causal", "accumulate") == "true")
        chosen = chosen.join(of_kind, on="kind", how="left", maintain_order="left").with_columns(
            pl.col("batch", "groups", "cols").fill_null(1.0),
            pl.col("seq_kv").fill_null(pl.col("seq_q")),
            pl.col("kv_heads").fill_null(pl.col("heads")),
            pl.col("head_dim_v").fill_null(pl.col("head_dim")),
        )
        sizes = chosen.with_columns(**_SHAPES.get(family, {})).select("kind", "cols", **_WORK.get(family, _MOVED))
        parts.append(Part(family, chosen["row"].to_numpy(), sizes))
    return Work(kinds, tuple(parts))


def text_of(frame: pl.DataFrame, name: str) -> pl.Series:
    """A column of words of a kernel frame, in this module's spelling."""
    default, known, others = _TEXTS[name]
    return spelled(words(frame, name, "kernel").fill_null(pl.lit(default, pl.String)), known, others)


def _texts(frame: pl.DataFrame) -> pl.DataFrame:
    """The columns of words that a frame has, as they are; of `method` what attention runs, or how others were timed."""
    texts = pl.DataFrame([words(frame, name, "kernel") for name in (*_TEXTS, "method") if name in frame.columns])
    if "method" in frame.columns:
        ops = texts.select(pl.col("op").unique())
        attends = ops.filter(text_of(ops, "op") == "attention")["op"]
        attention, gap = pl.col("op").is_in(attends.implode()), pl.col("method").str.contains(LAUNCH_GAP, literal=True)
        texts = texts.with_columns(pl.when(attention).then("method").when(gap).then(pl.lit(LAUNCH_GAP)).alias("method"))
    return texts


LAUNCH_GAP = "launch gap"
"""What `method` holds where a time has the host's way from one kernel to the next in it, as of events round single
calls; a profiler's times have not, nor has a request that says nothing."""

_FACTORS = (
    *("causal", "accumulate", "el_bytes", "out_bytes", "act", "weight", "products", "passes", "scores", "bias"),
    *("col_bytes", "fixed_bytes", "op_flops"),
)
"""Columns of a kind that formulas read."""


def _kinds(kinds: pl.DataFrame) -> pl.DataFrame:
    """What op, format, pass and flags say, before any size."""
    kinds = pl.DataFrame([*(text_of(kinds, name) for name in _TEXTS), words(kinds, "method", "kernel")])
    families = {op: move.family for op, move in MOVES.items()} | dict(PRODUCTS)
    traffic = pl.DataFrame([{"op": op} | asdict(move) for op, move in MOVES.items()]).drop("family")
    act, weight, back, both = (pl.col("pass") == name for name in ("bwd_grad_act", "bwd_grad_w", "bwd", "fwd+bwd"))
    any_back = act | weight | back

    def by_pass(forward: pl.Expr, backward: pl.Expr) -> pl.Expr:
        return pl.when(any_back).then(backward).when(both).then(forward + backward).otherwise(forward)

    one = pl.lit(1.0)
    size = [
        pl.col(name).replace_strict(ELEMENT_BYTES, default=None, return_dtype=pl.Float64)
        for name in ("dtype", "out_dtype")
    ]
    return (
        kinds.with_row_index("kind")
        .with_columns(
            family=pl.col("op").replace_strict(families, default=None, return_dtype=pl.String),
            format=pl.col("dtype").replace_strict(FORMATS, default=pl.col("dtype")),
            el_bytes=size[0],
            out_bytes=pl.when(pl.col("out_dtype").is_null()).then(size[0]).otherwise(size[1]),
            act=act,
            weight=weight,
            products=pl.when(back).then(2.0).when(both).then(3.0).otherwise(1.0),  # both gradients, or one
            passes=by_pass(one, 2.5 * one),  # products of attention, of which backward makes the scores anew
            scores=by_pass(one, 2.0 * one),
            bias=(pl.col("op") == "gemm_bias").cast(pl.Float64),
        )
        .join(traffic, on="op", how="left", maintain_order="left")
        .with_columns(
            implementation=pl.when(pl.col("op") == "attention")
            .then(pl.col("method").fill_null("").str.split(";").list.first())
            .otherwise(pl.lit("")),
            gap=pl.col("method").fill_null("").str.contains(LAUNCH_GAP, literal=True).cast(pl.Float64),
            col_bytes=by_pass(pl.col("read"), pl.col("back_read")) * pl.col("el_bytes")
            + by_pass(pl.col("write"), pl.col("back_write")) * pl.col("out_bytes"),
            fixed_bytes=pl.col("row_bytes") + pl.col("row_write") * pl.col("out_bytes"),
            op_flops=pl.col("flops").cast(pl.Float64),
        )
    )


def _check_kinds(kinds: pl.DataFrame, of_row: pl.Series) -> None:
    """Raise InputError for the first kind of row that no formula is for."""
    unknown = {n: ~pl.col(n).is_in(list(known)).fill_null(n == "out_dtype") for n, (_, known, _) in _TEXTS.items()}
    unknown["trans"] &= pl.col("family") == "gemm"
    for name, bad in unknown.items():
        if (wrong := kinds.filter(bad)).height:
            first = wrong.row(0, named=True)
            raise InputError(
                f"kernel frame, row {of_row.index_of(first['kind'])} (op {first['op']!r}): {name} is "
                f"{shown(first[name])}; known: {', '.join(_TEXTS[name][1]).lstrip(', ')}."
            )


def _check_sizes(family: str, rows: pl.DataFrame, kinds: pl.DataFrame) -> None:
    """Raise InputError for the first row of a family that lacks a size, or has one that cannot be."""
    needed = NEEDS.get(family, ("rows", "cols"))
    for name in (*needed, *MAY_HAVE.get(family, ())):
        size = rows[name]
        fits = ((size > 0) & (size < _LARGEST)).fill_null(value=name not in needed)
        if not fits.all():
            row = rows.row(int(fits.arg_min() or 0), named=True)
            raise InputError(
                f"kernel frame, row {row['row']} (op {kinds['op'][row['kind']]!r}): {name} is "
                f"{shown(row[name])}; this op needs it as a number above 0 and below 2**63."
            )


def _col(*names: str) -> pl.Expr:
    """The product of columns."""
    return reduce(lambda a, b: a * b, (pl.col(name) for name in names))


_zero = pl.lit(0.0)
_queries, _keys = pl.col("seq_q"), pl.col("seq_kv")
_widths = pl.col("head_dim") + pl.col("head_dim_v")
_pairs = _col("batch", "rows") * (pl.col("rows") - 1.0) / 2.0
# A query sees the keys up to its own, the last query all of them; without a mask it sees every key.
_seen = pl.when(_queries <= _keys).then(_keys - (_queries - 1) / 2).otherwise(_keys * (_keys + 1) / (2 * _queries))

_SWAPPED = {
    # the gradient by the activations is (m x n)(n x k), that by the weights (n x m)(m x k)
    "x": pl.when("weight").then("n").otherwise("m"),
    "y": pl.when(pl.col("act") | pl.col("weight")).then("k").otherwise("n"),
    "z": pl.when("act").then("n").when("weight").then("m").otherwise("k"),
    "count": _col("batch", "groups"),
}
_SHAPES: Mapping[str, Mapping[str, pl.Expr]] = {
    "gemm": _SWAPPED,
    "convolution": _SWAPPED,
    "attention": {"seen": pl.when("causal").then(_seen).otherwise(_keys)},
}
"""Sizes that several formulas of a family need."""

_PRODUCT = {
    "flops": 2.0 * _col("count", "m", "n", "k", "products"),
    "work_batch": pl.col("count"),
    "work_m": pl.col("x"),
    "work_n": _col("y", "products"),
    "work_k": pl.col("z"),
    "work_scores": _zero,
    "work_masked": _zero,
}
_MOVED = {
    "flops": _col("rows", "cols", "op_flops"),
    "bytes": pl.col("rows") * (_col("cols", "col_bytes") + pl.col("fixed_bytes")),
    "work_batch": pl.lit(1.0),
    "work_m": pl.col("rows"),
    "work_n": _col("cols", "col_bytes") + pl.col("fixed_bytes"),
    "work_k": pl.lit(1.0),
    "work_scores": _zero,
    "work_masked": _zero,
}
_joint_bytes = pl.col("products") * (_col("el_bytes", "batch", "rows", "cols") + pl.col("out_bytes") * _pairs)
_WORK: Mapping[str, Mapping[str, pl.Expr]] = {
    "gemm": _PRODUCT
    | {
        "bytes": pl.col("products")
        * (
            pl.col("el_bytes") * (pl.col("count") * (_col("x", "z") + _col("z", "y")) + _col("bias", "n"))
            + _col("out_bytes", "count", "x", "y") * (1.0 + pl.col("accumulate").cast(pl.Float64))
        )
    },
    "convolution": _PRODUCT
    | {
        "bytes": pl.col("products")
        * (pl.col("el_bytes") * (_col("rows", "cols") + _col("count", "n", "k")) + _col("out_bytes", "count", "m", "n"))
    },
    "attention": {
        "flops": 2.0 * _col("batch", "heads", "seq_q", "seen", "passes") * _widths,
        # queries, keys, values and what is put out; backward reads them and writes as many gradients
        "bytes": _col("el_bytes", "batch", "scores") * _widths * (_col("heads", "seq_q") + _col("kv_heads", "seq_kv")),
        "work_batch": _col("batch", "heads"),
        "work_m": _queries,
        "work_n": _widths * pl.col("passes"),
        "work_k": pl.col("seen"),
        "work_scores": pl.col("scores"),
        "work_masked": _keys - pl.col("seen"),
    },
    "interaction": _MOVED
    | {
        "flops": 2.0 * _pairs * _col("cols", "products"),
        "bytes": _joint_bytes,
        "work_m": pl.col("batch"),
        "work_n": _joint_bytes / pl.col("batch"),
    },
}
"""Formulas by family; one that is not here moves data (`MOVES`)."""
