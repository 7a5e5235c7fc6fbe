"""What tensors hold that no call makes: values with which operators work as they did, and do not fail.

A trace has no values. Memory that decides what an operator does (indices, targets, offsets, masks of a known count)
gets values that the operator can take; variances and the like are positive; all else is of the size that layers keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lumos_nb.exchange.benchmark.calls import Tensor

Rule = list[Any]
"""The name of a rule of bench.py's `fill`, and its numbers."""

ROWS = "rows"
"""Rule of memory whose numbers are rows of embedding tables, before it is known how they are drawn."""
_ROWS = {
    ("embedding", "indices"): "weight",
    ("embedding_bag", "indices"): "weight",
    ("_embedding_bag", "indices"): "weight",
    ("_embedding_bag_forward_only", "indices"): "weight",
}
"""Indices of rows -> the argument whose rows they are of."""
_NUMBER = {
    ("embedding_dense_backward", "indices"): "num_weights",
    ("embedding_sparse_backward", "indices"): "num_weights",
    ("embedding_backward", "indices"): "num_weights",
    ("_embedding_bag_dense_backward", "indices"): "num_weights",
    ("_embedding_bag_sparse_backward", "indices"): "num_weights",
    ("_embedding_bag_backward", "indices"): "num_weights",
    ("one_hot", "self"): "num_classes",
}
"""Indices of rows -> the argument that says how many there are."""
_ALONG = {
    ("index_select", "index"), ("gather", "index"), ("scatter", "index"), ("scatter_", "index"),
    ("scatter_add", "index"), ("scatter_add_", "index"), ("index_add", "index"), ("index_add_", "index"),
    ("index_copy", "index"), ("index_copy_", "index"), ("index_fill", "index"), ("index_fill_", "index"),
}  # fmt: skip
"""Indices along the dimension that `dim` says."""
_CLASSES = {"cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss_forward", "nll_loss_backward", "nll_loss2d",
            "nll_loss2d_forward", "nll_loss2d_backward"}  # fmt: skip
_BAGS = {"embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"}

_POSITIVE = {
    "running_var", "save_var", "save_invstd", "invstd", "rstd", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps",
}  # fmt: skip
_POSITIVE_SELF = {"sqrt", "_foreach_sqrt", "rsqrt", "log", "addcmul_", "_foreach_addcmul_"}
_PROBABILITIES = {
    ("binary_cross_entropy", "self"), ("binary_cross_entropy", "target"), ("binary_cross_entropy_backward", "self"),
    ("binary_cross_entropy_backward", "target"), ("bernoulli", "self"), ("bernoulli_", "p"), ("multinomial", "self"),
    ("poisson", "self"), ("kl_div", "target"), ("xlogy", "other"),
}  # fmt: skip
_DEFINITE = {"cholesky", "linalg_cholesky", "linalg_cholesky_ex", "cholesky_inverse", "cholesky_solve"}
"""Operators on matrices that are symmetric with positive eigenvalues, or their factors."""
_NORMS = ("norm",)
DATA_DEPENDENT = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"}
"""Operators whose results have sizes that depend on values: what reads them gets memory of the recorded size."""


@dataclass(frozen=True, slots=True)
class Need:
    """What an argument must hold: `rule` where it is not made by a call, and even where it is if it is `forced`."""

    rule: Rule
    forced: bool = False


def need(op: str, arguments: dict[str, Any], name: str, tensor: Tensor, position: int) -> Need | None:
    """What an argument of an operator must hold, or None if anything goes.

    Parameters
    ----------
    op
        The operator's name without namespace and overload.
    arguments
        All of its arguments by name.
    name, tensor, position
        The argument, the tensor in it, and its place if the argument is a list.
    """
    if tensor.dtype in ("int64", "int32"):
        bound = _bound(op, arguments, name, position)
        if bound is not None:
            looked_up = (op, name) in _ROWS or (op, name) in _NUMBER
            return Need([ROWS if looked_up else "integers", 0, bound], forced=True)
        if op in _BAGS and name == "offsets":
            indices = arguments["indices"]
            return Need(["even", indices.numel, bool(arguments.get("include_last_offset"))], forced=True)
    if op in ("index", "index_put", "index_put_", "_index_put_impl_") and name == "indices" and tensor.dtype == "bool":
        return Need(["true", tensor.numel // 2], forced=False)
    if name in _POSITIVE or (name == "self" and op in _POSITIVE_SELF):
        return Need(["uniform", 0.5, 1.5])
    if (op, name) in _PROBABILITIES:
        return Need(["uniform", 0.01, 0.99])
    if op in _DEFINITE and name == ("input2" if op == "cholesky_solve" else "self"):
        return Need(["definite", tensor.shape[-1]])
    if name == "weight" and op.removesuffix("_backward").endswith(_NORMS):
        return Need(["normal", 1.0, 0.02])
    if name == "attn_mask" and tensor.dtype == "bool":
        return Need(["constant", 1])
    return None


def _bound(op: str, arguments: dict[str, Any], name: str, position: int) -> int | None:
    """One more than the largest index that the argument may hold."""
    if rows := _ROWS.get((op, name)):
        return _size(arguments.get(rows), 0)
    if number := _NUMBER.get((op, name)):
        count = arguments.get(number)
        return count if isinstance(count, int) and count > 0 else None
    if (op, name) in _ALONG:
        return _size(arguments.get("self"), arguments.get("dim"))
    if op in _CLASSES and name == "target":
        logits = arguments.get("self")
        return _size(logits, 0 if isinstance(logits, Tensor) and len(logits.shape) == 1 else 1)
    if op in ("index", "index_put", "index_put_", "_index_put_impl_") and name == "indices":
        return _size(arguments.get("self"), position)
    return None


def _size(tensor: Any, dim: Any) -> int | None:
    if not isinstance(tensor, Tensor) or not isinstance(dim, int):
        return None
    return tensor.shape[dim] if -len(tensor.shape) <= dim < len(tensor.shape) else None


def common(tensor: Tensor) -> Rule:
    """What memory holds of which nothing is known: numbers that keep activations at their size; integers are 0.

    A number in the code, which a trace shows as a tensor without dimensions, is 1.
    """
    if not tensor.shape and tensor.dtype != "bool":
        return ["constant", 1]
    if not tensor.dtype.startswith(("float", "bfloat", "complex")):
        return ["constant", 0]
    if tensor.numel == 1:
        return ["constant", 1]
    fan_in = math.prod(tensor.shape[1:]) if len(tensor.shape) > 1 else 2500
    return ["normal", 0.0, round(max(fan_in, 1) ** -0.5, 6)]


def stricter(old: Rule | None, new: Rule) -> Rule:
    """Which of two rules memory obeys that two arguments share."""
    if old is None or old[0] == "normal":
        return new
    if {old[0], new[0]} <= {"integers", ROWS}:
        return [old[0], 0, min(old[2], new[2])]
    return old
