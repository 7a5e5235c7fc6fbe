"""Which layer of the model an operator belongs to: by ranges, by module calls, and backward by its forward operator."""

from __future__ import annotations

import polars as pl

from lumos_nb import call_stacks
from lumos_nb.calls import ENGINE_OPERATORS

LAYER_RANGE = r"^layer[ =#:]+(\S+)"
"""An annotation that names a layer, as a training script may put round it."""

MODULE_CALL = r"^nn\.Module: (.+)$"
"""What the profiler records of a module's call where it records Python's stack."""

LAYERS = {"event_id": pl.Int64(), "layer": pl.String()}


def layers_of(events: pl.DataFrame) -> pl.DataFrame:
    """`event_id`, `layer` of the operators of one rank: the innermost named range, else the path of module calls.

    A backward operator has the layer of the forward operator with its autograd sequence number.
    """
    marks = events.filter(
        pl.col("thread").is_not_null() & pl.col("name").str.contains(f"{LAYER_RANGE}|{MODULE_CALL}")
    ).with_columns(end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    if marks.is_empty():
        return pl.DataFrame(schema=LAYERS)
    operators = events.filter((pl.col("category") == "cpu_op") & pl.col("thread").is_not_null())
    by_thread = operators.partition_by("thread", as_dict=True)
    labelled = [
        _within(by_thread[key], part)
        for key, part in marks.partition_by("thread", as_dict=True).items()
        if key in by_thread
    ]
    direct = pl.concat([pl.DataFrame(schema=LAYERS), *labelled]).drop_nulls("layer")
    sequenced = operators.filter(pl.col("sequence").is_not_null()).join(direct, on="event_id", how="left")
    backward = pl.col("name").str.contains(ENGINE_OPERATORS)
    # Operators that record no node share the number of the next one that does, so the last of a number is its own.
    forward = (
        sequenced.filter(~backward & pl.col("layer").is_not_null()).sort("start_ns").unique("sequence", keep="last")
    )
    found = sequenced.filter(backward & pl.col("layer").is_null()).drop("layer")
    found = found.join(forward.select("sequence", "layer"), on="sequence").select(list(LAYERS))
    return pl.concat([direct, found])


def _within(operators: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """The label of the innermost mark open where each operator of a thread starts."""
    operators = operators.sort("start_ns")
    marks = marks.sort("start_ns", "end_ns", descending=[False, True], maintain_order=True)
    start, end = marks["start_ns"].to_numpy(writable=True), marks["end_ns"].to_numpy(writable=True)
    parent = call_stacks.nearest_encloser(start, end)
    names = marks.select(layer=pl.col("name").str.extract(LAYER_RANGE), module=pl.col("name").str.extract(MODULE_CALL))
    labels: list[str] = []
    for above, (layer, module) in zip(parent.tolist(), names.iter_rows(), strict=True):
        outer = labels[above] if above >= 0 else ""
        labels.append(layer if layer is not None else f"{outer}/{module}".lstrip("/"))
    inner = call_stacks.innermost_at(start, end, operators["start_ns"].to_numpy(writable=True), False)
    where = pl.Series(inner).cast(pl.UInt32, strict=False)  # -1 does not fit, so it becomes null
    return operators.select("event_id", layer=pl.Series(labels, dtype=pl.String).gather(where))
