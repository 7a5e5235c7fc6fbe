"""Which layer of the model an operator belongs to: by ranges, by module calls, and backward by its forward operator."""

from __future__ import annotations

import numpy as np
import polars as pl

from lumos_nb import call_stacks
from lumos_nb.calls import ENGINE_OPERATORS

LAYER_RANGE = r"^layer[ =#:]+(\S+)"
"""An annotation that names a layer, as a training script may put round it."""

MODULE_CALL = r"^nn\.Module: (.+)$"
"""What the profiler records of a module's call where it records Python's stack."""

LAYERS = {"rank": pl.Int32(), "event_id": pl.Int64(), "layer": pl.String()}


def layers_of(events: pl.DataFrame) -> pl.DataFrame:
    """`rank`, `event_id`, `layer` of operators: the innermost named range, else the path of module calls.

    A backward operator has the layer of the forward operator with its autograd sequence number.
    """
    marks = events.filter(
        pl.col("thread").is_not_null() & pl.col("name").str.contains(f"{LAYER_RANGE}|{MODULE_CALL}")
    ).with_columns(end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    if marks.is_empty():
        return pl.DataFrame(schema=LAYERS)
    operators = events.filter((pl.col("category") == "cpu_op") & pl.col("thread").is_not_null())
    direct = _within(operators, marks).drop_nulls("layer")
    sequenced = operators.filter(pl.col("sequence").is_not_null())
    sequenced = sequenced.join(direct, on=["rank", "event_id"], how="left", maintain_order="left")
    backward = pl.col("name").str.contains(ENGINE_OPERATORS)
    key = ["rank", "sequence"]
    # Operators that record no node share the number of the next one that does, so the last of a number is its own.
    forward = sequenced.filter(~backward & pl.col("layer").is_not_null()).sort("start_ns").unique(key, keep="last")
    found = sequenced.filter(backward & pl.col("layer").is_null()).drop("layer")
    found = found.join(forward.select(*key, "layer"), on=key).select(list(LAYERS))
    return pl.concat([direct, found])


def _within(operators: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """The label of the innermost mark open on its thread where each operator starts."""
    lanes = operators.select("rank", "thread").unique().with_row_index("lane").cast({"lane": pl.Int64})
    operators = operators.join(lanes, on=["rank", "thread"]).sort("lane", "start_ns")
    marks = marks.join(lanes, on=["rank", "thread"]).sort(
        "lane", "start_ns", "end_ns", descending=[False, False, True], maintain_order=True
    )
    lane, start, end = (marks[c].to_numpy(writable=True) for c in ("lane", "start_ns", "end_ns"))
    parent = call_stacks.nearest_encloser(lane, start, end)
    names = marks.select(layer=pl.col("name").str.extract(LAYER_RANGE), module=pl.col("name").str.extract(MODULE_CALL))
    labels: list[str] = []
    for above, (layer, module) in zip(parent.tolist(), names.iter_rows(), strict=True):
        outer = labels[above] if above >= 0 else ""
        labels.append(layer if layer is not None else f"{outer}/{module}".lstrip("/"))
    at_lane, at = (operators[c].to_numpy(writable=True) for c in ("lane", "start_ns"))
    inner = call_stacks.innermost_at(lane, start, end, at_lane, at, np.zeros(at.size, bool))
    where = pl.Series(inner).cast(pl.UInt32, strict=False)  # -1 does not fit, so it becomes null
    return operators.select("rank", "event_id", layer=pl.Series(labels, dtype=pl.String).gather(where))
