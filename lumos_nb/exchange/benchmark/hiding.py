"""An execution trace without what it says of its maker, for a benchmark that may leave the house."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from lumos_nb.errors import InputError
from lumos_nb.exchange.chakra.obfuscation import Policy
from lumos_nb.traces.execution_trace import ExecutionTrace

_TORCH = r"^(aten|prims?|c10d|_c10d_functional\w*|quantized|mkldnn|inductor)::"
"""Operators that are torch's own: everybody's."""
_STRUCTURE = r"^(ProfilerStep#\d+|(comm|wait)::.*|PythonSubclass)$"
_OWN_KINDS = ("process", "thread", "group", "comm")
"""What torch names itself."""


def hidden(trace: ExecutionTrace, policy: Policy) -> ExecutionTrace:
    """A trace whose names are numbered, as far as a policy says, and whose other strings are gone.

    Torch's own operators keep their names, without which nothing runs; all others become numbers and are then stand-ins
    ("numbered"), and so do functions, modules and annotations ("hidden" scopes). Equal names have equal numbers.

    Raises
    ------
    InputError
        The policy hides shapes or changes times: the operators need sizes, and an execution trace has no times.
    """
    if not isinstance(policy, Policy):
        raise InputError(f"policy is a {type(policy).__name__}; give a chakra.Policy.")
    if policy.shapes != "exact" or policy.time_scale != 1 or policy.time_jitter:
        raise InputError(
            f"{policy} hides shapes or changes times: a program needs sizes, and has no times but gaps. Give "
            "Policy(shapes='exact'), and `shrink` to run with other sizes."
        )
    name, kind = pl.col("name"), pl.col("kind")
    operator, scope = kind == "operator", kind.is_in(["function", "annotation"])
    kept = kind.is_in(_OWN_KINDS) | name.str.contains(_STRUCTURE) | (operator & name.str.contains(_TORCH))
    kept |= operator & (policy.names == "kept") | scope & (policy.scopes == "kept")
    nodes = trace.nodes.with_columns(kept=kept)
    words = nodes.filter(~pl.col("kept"))["name"].unique(maintain_order=True)
    numbers = np.random.default_rng(policy.seed).permutation(len(words))
    numbered = name.replace_strict(words, "name" + pl.Series(numbers).cast(pl.String), default=None)
    nodes = nodes.with_columns(
        name=pl.when("kept").then(name).otherwise(numbered),
        op_schema=pl.when("kept").then("op_schema"),
        kernel_file=pl.when(pl.col("kernel_file") != "").then(pl.lit("hidden")),
    )
    public = nodes.filter(pl.col("kept") & operator)["node_id"].implode()
    told = ~pl.col("node_id").is_in(public) & pl.col("type").str.contains("String")
    arguments = trace.arguments.with_columns(pl.when(told).then(pl.lit('""')).otherwise("value").alias("value"))
    return replace(trace, nodes=nodes.drop("kept"), arguments=arguments)
