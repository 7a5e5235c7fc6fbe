"""Operators and their arguments -> requests for kernels: one row an operator, its sizes by position.

A row says the family and member (`op`) that the operator's main kernel is of, its pass, and the function from recorded
arguments to sizes. Sizes of a product are m, n, k of the row-major `[m, k] @ [k, n]`; `trans` is "N" or "T" for each
operand as it lies in memory (a linear layer's weight is n x k: "NT"). A convolution counts as the product that it
implies: m = images x output positions, n = output channels of a group, k = input channels of a group x filter; its
input has rows x cols elements.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import polars as pl

from lumos_nb.costs.work import MOVES, NEEDS, NUMBERS, PRODUCTS
from lumos_nb.number_formats import number_format

FLOATING = ("fp64", "fp32", "fp16", "bf16", "fp8")

_ENUM = {0: "uint8", 1: "int8", 3: "int32", 4: "int64", 5: "fp16", 6: "fp32", 7: "fp64", 11: "bool", 15: "bf16"}
"""torch's numbers of its types."""

SIZES: dict[str, pl.DataType] = {
    **dict.fromkeys(NUMBERS, pl.Int64()),
    **dict.fromkeys(("trans", "out_dtype"), pl.String()),
    "causal": pl.Boolean(),
}
"""Columns of a kernel frame that the arguments decide."""

Sizes = dict[str, Any]
Decode = Callable[["Call"], Sizes]


class Call(NamedTuple):
    """The recorded arguments of one call: shapes, strides, types and constants by position, as far as there are any."""

    dims: list[Any]
    strides: Sequence[Any] = ()
    types: Sequence[Any] = ()
    constants: Sequence[Any] = ()

    def tensor(self, at: int) -> list[int]:
        """Shape of a tensor argument."""
        shape = self.dims[at]
        if not shape or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise Undecoded(f"argument {at} has no recorded shape")
        return list(shape)

    def lists(self, at: int) -> list[list[int]]:
        """Shapes of a list of tensors."""
        shapes = self.dims[at]
        if not shapes or not all(isinstance(shape, list) for shape in shapes):
            raise Undecoded("the shapes in a list of tensors are not recorded")
        return list(shapes)

    def constant(self, at: int) -> Any:
        """A constant, read as JSON ("[2, 2]" -> [2, 2]; "True" -> True); None where it was not recorded."""
        text = str(self.constants[at]) if at < len(self.constants) else ""
        if text in ("True", "False"):
            return text == "True"
        try:
            return json.loads(text.rstrip(".")) if text else None
        except (json.JSONDecodeError, RecursionError):
            return None

    def layout(self, at: int) -> str | None:
        """How a matrix lies: "N" row by row, "T" column by column; None where strides were not recorded."""
        stride = self.strides[at] if at < len(self.strides) else []
        if len(stride) < 2:
            return None
        return "T" if stride[-1] != 1 and stride[-2] == 1 else "N"

    def elements(self, at: int) -> int:
        """Elements of an argument that lie in memory: what is expanded counts once."""
        shape, stride = self.dims[at], self.strides[at] if at < len(self.strides) else []
        return prod(size for size, step in zip(shape, stride or [1] * len(shape), strict=True) if step)

    def format(self, at: int) -> str | None:
        """Number format of an argument."""
        return number_format(str(self.types[at])) if at < len(self.types) else None

    def main_format(self) -> str | None:
        """Number format of the first tensor of floating numbers, else of the first tensor."""
        tensors = [self.format(at) for at, shape in enumerate(self.dims) if shape] or [self.format(0)]
        known = [form for form in tensors if form]
        return next((form for form in known if form in FLOATING), known[0] if known else None)


class Undecoded(ValueError):
    """The recorded arguments do not tell the sizes; the message says what is missing."""


class Operator(NamedTuple):
    """What an operator asks for: the family, member and pass of its main kernel, and its sizes from the arguments."""

    family: str
    op: str
    direction: str
    decode: Decode


def _product(a: int, b: int, *, weight: bool = False) -> Decode:
    """`a @ b` with any leading dimensions; of a `weight` the rows are the outputs, and the input lies row by row."""

    def decode(call: Call) -> Sizes:
        left, right = call.tensor(a), call.tensor(b)
        if len(right) == 1:
            right = [*right, 1]
        shared = len(right) == 2  # one matrix for all of the left: its leading dimensions are rows
        k, n = (right[-1], right[-2]) if weight else (right[-2], right[-1])
        rows = prod(left[:-1]) if shared else left[-2]
        if left[-1] != k:
            raise Undecoded(f"{left} times {right} is no product")
        sides = (call.layout(a) or "N", "T") if weight else (call.layout(a), call.layout(b))
        trans = "".join(side for side in sides if side)
        batch = 1 if shared else prod(right[:-2])
        sizes = {"batch": batch, "m": rows, "n": n, "k": k, "trans": trans if len(trans) == 2 else None}
        return sizes | ({"op": "gemm_bias"} if weight and call.dims[b + 1 : b + 2] not in ([], [[]]) else {})

    return decode


def _grouped(call: Call) -> Sizes:
    """`_grouped_mm`: rows sorted by group times a matrix a group; m is the mean of a group's rows."""
    left, right = call.tensor(0), call.tensor(1)
    if len(left) != 2 or len(right) != 3:
        raise Undecoded("grouped products other than [rows, k] x [groups, k, n]")
    return {"groups": right[0], "m": round(left[0] / right[0]), "n": right[2], "k": right[1]}


def _attention(q: int, causal: int, *, heads_first: bool = True) -> Decode:
    """Attention of `q` and the two arguments after it; `causal` is the position of the flag, or of a mask's kind."""

    def decode(call: Call) -> Sizes:
        query, key, value = (call.tensor(at) for at in (q, q + 1, q + 2))
        if len(query) != 4:
            raise Undecoded("attention of packed sequences: only the sum of their lengths is recorded")
        heads, seq = (1, 2) if heads_first else (2, 1)
        flag = call.constant(causal)
        sizes = {"batch": query[0], "seq_q": query[seq], "seq_kv": key[seq], "heads": query[heads]}
        sizes |= {"kv_heads": key[heads], "head_dim": query[-1], "head_dim_v": value[-1]}
        return sizes | {"causal": None if flag is None else flag in (True, 1, 2)}

    return decode


def _convolution(stride: int, padding: int, dilation: int, transposed: int | None = None) -> Decode:
    """A forward convolution; its output follows from the constants at these positions."""

    def decode(call: Call) -> Sizes:
        image, filters = call.tensor(0), call.tensor(1)
        space = [call.constant(at) for at in (stride, padding, dilation)]
        if any(not isinstance(each, list) for each in space):
            raise Undecoded("stride, padding or dilation is not recorded")
        if transposed is not None and call.constant(transposed):
            raise Undecoded("transposed convolution")
        steps, pads, apart = ((each * len(image))[: len(image) - 2] for each in space)
        sizes = zip(image[2:], filters[2:], steps, pads, apart, strict=True)
        return _implied(image, filters, [(size + 2 * p - d * (f - 1) - 1) // s + 1 for size, f, s, p, d in sizes])

    return decode


def _implied(image: Sequence[int], filters: Sequence[int], out: Sequence[int]) -> Sizes:
    groups = image[1] // filters[1]
    sizes = {"groups": groups, "m": image[0] * prod(out), "n": filters[0] // groups, "k": prod(filters[1:])}
    return sizes | {"rows": image[0], "cols": prod(image[1:])}


def _convolution_backward(grad: int, x: int) -> Decode:
    """The gradients of a convolution, whose filters are the third argument: each is as much work as the forward."""

    def decode(call: Call) -> Sizes:
        return _implied(call.tensor(x), call.tensor(2), call.tensor(grad)[2:])

    return decode


def _norm(x: int, weight: int, shape: int | None = None) -> Decode:
    """Rows are normalised over the last dimensions, those of `weight`, or those of the constant at `shape`."""

    def decode(call: Call) -> Sizes:
        size, over = call.tensor(x), call.dims[weight] if weight < len(call.dims) else None
        over = over or (call.constant(shape) if shape is not None else None)
        if not over:
            raise Undecoded("what it normalises over is not recorded")
        return {"rows": prod(size) // prod(over), "cols": prod(over)}

    return decode


def _channels(call: Call) -> Sizes:
    """Batch norm: a column a channel; the input and its gradient, the first two tensors, have one shape."""
    size = call.tensor(0)
    return {"rows": prod(size) // size[1], "cols": size[1]}


def _along(x: int, dim: int | None = None) -> Decode:
    """Rows along the dimension that the constant at `dim` names, else along the last."""

    def decode(call: Call) -> Sizes:
        size = call.tensor(x)
        axis = call.constant(dim) if dim is not None else None
        cols = size[axis if isinstance(axis, int) else -1]
        return {"rows": prod(size) // max(cols, 1), "cols": cols}

    return decode


def _reduced(call: Call) -> Sizes:
    """A reduction over the dimensions that the second argument lists, else over all."""
    size = call.tensor(0)
    axes = call.constant(1)
    over = size if axes is None or axes == [] else [size[a] for a in (axes if isinstance(axes, list) else [axes])]
    return {"rows": prod(size) // max(prod(over), 1), "cols": prod(over)}


def _broadcast(call: Call) -> Sizes:
    """The shape that all tensor arguments have together; a number of its own is one element."""
    strides = call.strides if any(call.strides) else call.dims  # none were recorded
    if any(shape and not stride for shape, stride in zip(call.dims, strides, strict=False)):
        raise Undecoded("a sparse tensor: how many of its elements are there is not recorded")
    shapes = [shape for shape in call.dims if shape and all(isinstance(size, int) for size in shape)]
    rank = max(map(len, shapes), default=0)
    full = [[1] * (rank - len(shape)) + shape for shape in shapes]
    size = [max(column) if 0 not in column else 0 for column in zip(*full, strict=True)] or [1]
    return {"rows": prod(size[:-1]), "cols": size[-1]}


def _gathered(table: int, index: int) -> Decode:
    """Rows of a table, one an index."""

    def decode(call: Call) -> Sizes:
        return {"rows": prod(call.dims[index]), "cols": prod(call.tensor(table)[1:])}

    return decode


def _copied(source: int, made: Callable[[Call], str | None]) -> Decode:
    """A copy of `source` into format `made`: a cast if that differs, a transpose if columns become rows."""

    def decode(call: Call) -> Sizes:
        old, new = call.format(source), made(call)
        kind = "cast" if old and new and old != new else "transpose" if call.layout(source) == "T" else "copy"
        sizes = _broadcast(Call([call.dims[0]]))
        return sizes | {"family": kind, "op": kind, "dtype": old, "out_dtype": new}

    return decode


def _binary(call: Call) -> Sizes:
    """Two operands of one member; one may be a number, or so small a tensor that only the other one costs."""
    sizes = _broadcast(call)
    whole = sizes["rows"] * sizes["cols"]
    return sizes | {"scalar": whole > 1 and min(call.elements(0), call.elements(1)) <= whole / 2}


def _is_number(call: Call) -> bool:
    """Whether the second operand of something is one number."""
    return bool(call.dims[0]) and len(call.dims) > 1 and not call.dims[1]


def _fused(call: Call) -> Sizes:
    """A generated kernel: every argument is read or written once; rows x cols is half of their elements."""
    shapes = [shape for shape in call.dims if shape]
    widest = max(shapes, key=prod)
    return {"rows": max(round(sum(map(prod, shapes)) / 2 / widest[-1]), 1), "cols": widest[-1]}


def _joined(call: Call) -> Sizes:
    """All elements of a list of tensors, by rows of the first one's last dimension."""
    shapes = call.lists(0)
    total, last = sum(map(prod, shapes)), shapes[0][-1] if shapes[0] else 1
    rows, cols = (total // last, last) if last and total % last == 0 else (1, total)
    return {"rows": rows, "cols": cols, "scalar": _is_number(call)}


_UNARY = (
    "gelu silu relu tanh sigmoid exp log sqrt rsqrt neg abs cos sin erf reciprocal clamp clamp_min clamp_max square"
)
_UNARY += (
    " hardtanh leaky_relu elu softplus mish hardswish logical_not bitwise_not isnan triu tril sign floor ceil round"
)
_BINARY = "add sub rsub mul div pow maximum minimum eq ne lt gt le ge remainder floor_divide logical_and logical_or"
_SEVERAL = (
    "lerp addcmul addcdiv masked_fill where mse_loss l1_loss binary_cross_entropy_with_logits bitwise_and bitwise_or"
)
_GRADIENT = "gelu silu tanh sigmoid hardtanh leaky_relu elu softplus mish hardswish mse_loss l1_loss"
_REDUCTION = "sum mean amax amin max min norm linalg_vector_norm var std argmax argmin prod any all logsumexp var_mean"
_LISTS = "add sub mul div addcmul addcdiv lerp sqrt neg norm copy zero maximum reciprocal pow abs clamp_min clamp_max"
_SDPA, _FLASH = "_scaled_dot_product_", "flash_attn::_flash_attn_"


def _each(names: str, form: str) -> str:
    return " ".join(form.format(name) for name in names.split())


GENERATED = "triton::fused"
"""Kernels of Inductor, which a trace also shows as operators, with their arguments: what they are, the name tells."""

_TABLE: tuple[tuple[str, str, str, str, Decode], ...] = (
    # family, member (empty: as the operator is called), pass, operators (of aten where they say nothing else), sizes
    ("gemm", "gemm", "fwd", "mm _scaled_mm matmul mv dot", _product(0, 1)),
    ("gemm", "gemm", "fwd", "linear mkldnn_linear mkldnn::_linear_pointwise", _product(0, 1, weight=True)),
    ("gemm", "gemm_bias", "fwd", "addmm addmv _addmm_activation", _product(1, 2)),
    ("gemm", "bmm", "fwd", "bmm", _product(0, 1)),
    ("gemm", "bmm", "fwd", "baddbmm", _product(1, 2)),
    ("gemm", "grouped_gemm", "fwd", "_grouped_mm _scaled_grouped_mm", _grouped),
    (
        "attention",
        "attention",
        "fwd",
        f"scaled_dot_product_attention {_SDPA}fused_attention_overrideable",
        _attention(0, 5),
    ),
    ("attention", "attention", "fwd", f"{_SDPA}flash_attention {_SDPA}flash_attention_for_cpu", _attention(0, 4)),
    ("attention", "attention", "fwd", f"{_SDPA}efficient_attention {_SDPA}cudnn_attention", _attention(0, 6)),
    ("attention", "attention", "fwd", "_flash_attention_forward", _attention(0, 8, heads_first=False)),
    ("attention", "attention", "fwd", "_efficient_attention_forward", _attention(0, 9, heads_first=False)),
    ("attention", "attention", "fwd", f"{_FLASH}forward", _attention(0, 5, heads_first=False)),
    ("attention", "attention", "bwd", f"{_SDPA}flash_attention_for_cpu_backward", _attention(1, 7)),
    ("attention", "attention", "bwd", _each("flash efficient", _SDPA + "{}_attention_backward"), _attention(1, 11)),
    ("attention", "attention", "bwd", f"{_SDPA}cudnn_attention_backward", _attention(1, 14)),
    (
        "attention",
        "attention",
        "bwd",
        f"_flash_attention_backward {_FLASH}backward",
        _attention(1, 11, heads_first=False),
    ),
    ("convolution", "convolution", "fwd", "convolution _convolution", _convolution(3, 4, 5, 6)),
    ("convolution", "convolution", "fwd", "conv1d conv2d conv3d", _convolution(3, 4, 5)),
    ("convolution", "convolution", "fwd", "cudnn_convolution", _convolution(3, 2, 4)),
    ("convolution", "convolution", "fwd", "miopen_convolution mkldnn_convolution", _convolution(4, 3, 5)),
    ("convolution", "convolution", "bwd", "convolution_backward", _convolution_backward(0, 1)),
    (
        "convolution",
        "convolution",
        "bwd",
        _each("cudnn miopen mkldnn", "{}_convolution_backward"),
        _convolution_backward(1, 0),
    ),
    ("norm", "layernorm", "fwd", "layer_norm native_layer_norm", _norm(0, 2, 1)),
    ("norm", "layernorm", "bwd", "native_layer_norm_backward", _norm(1, 5, 2)),
    ("norm", "rmsnorm", "fwd", "rms_norm _fused_rms_norm", _norm(0, 2, 1)),
    ("norm", "rmsnorm", "bwd", "_fused_rms_norm_backward", _norm(1, 4, 2)),
    ("norm", "batchnorm", "fwd", "batch_norm " + _each("native cudnn miopen", "{}_batch_norm"), _channels),
    ("norm", "batchnorm", "bwd", _each("native cudnn miopen", "{}_batch_norm_backward"), _channels),
    ("softmax", "softmax", "fwd", "softmax _softmax log_softmax _log_softmax", _along(0, 1)),
    ("softmax", "softmax", "bwd", "_softmax_backward_data _log_softmax_backward_data", _along(0, 2)),
    ("cross_entropy", "cross_entropy", "fwd", "cross_entropy_loss", _along(0)),
    ("cross_entropy", "nll_loss", "fwd", "nll_loss_nd nll_loss nll_loss_forward", _along(0)),
    ("cross_entropy", "nll_loss", "bwd", "nll_loss_backward", _along(1)),
    ("dropout", "dropout", "fwd", "dropout native_dropout _fused_dropout", _broadcast),
    ("dropout", "dropout", "bwd", "native_dropout_backward _masked_scale", _broadcast),
    ("embedding_lookup", "embedding_lookup", "fwd", "embedding", _gathered(0, 1)),
    ("embedding_lookup", "embedding_lookup", "bwd", "embedding_dense_backward embedding_backward", _along(0)),
    ("index", "", "any", "index_select", _gathered(0, 2)),
    ("copy", "copy", "any", "copy", _copied(1, lambda call: call.format(0))),
    ("copy", "copy", "any", "_to_copy", _copied(0, lambda call: _ENUM.get(call.constant(1)))),
    ("copy", "copy", "any", "clone contiguous", _copied(0, lambda call: call.format(0))),
    ("concat", "concat", "any", "cat stack", _joined),
    ("reduction", "", "any", _REDUCTION, _reduced),
    ("fill", "fill", "any", "fill zero", _broadcast),
    ("optimizer", "adam", "any", "_fused_adam", _joined),
    ("optimizer", "adamw", "any", "_fused_adamw", _joined),
    ("optimizer", "sgd", "any", "_fused_sgd", _joined),
    *(("optimizer", name, "any", f"_foreach_{name}", _joined) for name in _LISTS.split()),
    ("elementwise", "", "fwd", _UNARY, _broadcast),
    ("elementwise", "", "any", _SEVERAL, _broadcast),
    ("elementwise", "", "any", _BINARY, _binary),
    ("elementwise", "elementwise", "any", GENERATED, _fused),
    ("elementwise", "relu", "bwd", "threshold_backward", _broadcast),
    ("elementwise", "", "bwd", _each(_GRADIENT, "{}_backward"), _broadcast),
)

OPERATORS: dict[str, Operator] = {
    name if "::" in name else f"aten::{name}": Operator(family, op or name.removesuffix("_backward"), direction, decode)
    for family, op, direction, names, decode in _TABLE
    for name in names.split()
}
"""Rows by name; `aten::add_` and `aten.add.Tensor` are those of `aten::add`."""


def listed(text: str | None) -> list[Any]:
    """A list as JSON; none where it is damaged."""
    try:
        value = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def operator_key(name: pl.Expr) -> pl.Expr:
    """The key of `OPERATORS` that an operator's name would have."""
    plain = name.str.replace(r"^(\w+)\.(\w+)\.\w+$", "$1::$2")
    return plain.str.replace(r"^triton_\w+_fused_\w+$", GENERATED).str.replace(r"_$", "")


def sizes_of(key: str, call: Call) -> Sizes:
    """Columns of a kernel frame for a call: `family`, `op`, `pass`, `dtype`, sizes, and `why` they are not known."""
    row = OPERATORS[key]
    told: Sizes = {"family": row.family, "op": row.op, "pass": row.direction}
    try:
        told["dtype"] = call.main_format()
        sizes = row.decode(call)
        if not all(_is_size(sizes.get(name)) for name in NUMBERS):
            raise ValueError
        told |= sizes
    except Undecoded as reason:
        told["why"] = str(reason)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError):
        told["why"] = "the arguments are not those of the operator's schema"
    if told.pop("scalar", False) and f"{told['op']}_scalar" in MOVES:
        told["op"] += "_scalar"
    if told["op"] not in MOVES and told["op"] not in PRODUCTS:
        told["op"] = told["family"]
    if "why" not in told:
        told["why"] = _missing(told)
    return told


def _is_size(value: object) -> bool:
    return value is None or (isinstance(value, int) and 0 <= value < 2**63)


def _missing(told: Sizes) -> str | None:
    """What `with_work` would not take, if anything."""
    empty = [name for name in NEEDS.get(told["family"], ("rows", "cols")) if not told.get(name)]
    return f"no elements: {', '.join(empty)} 0" if empty else None
