"""What papers say of pipeline schedules: idle time in closed form, and micro-batches held; `schedule` is held to it."""

from __future__ import annotations

import polars as pl


def in_flight(schedule: pl.DataFrame) -> pl.DataFrame:
    """How many micro-batches' activations each rank holds at most, in passes of one chunk.

    Returns
    -------
    DataFrame
        `stage`, `in_flight` (forward passes whose backward or input pass has not ended), `until_weight` (whose weight
        pass has not: the same where backward passes are not split).
    """
    backward = {"in_flight": ("backward", "backward_input"), "until_weight": ("backward", "backward_weight")}
    phase = pl.col("phase").cast(pl.String)
    held = {
        name: ((phase == "forward").cast(pl.Int32) - phase.is_in(ends).cast(pl.Int32)).cum_sum().max()
        for name, ends in backward.items()
    }
    return schedule.sort("stage", "position").group_by("stage", maintain_order=True).agg(**held)


def bubble_ns(
    kind: str, stages: int, *, forward_ns: float, backward_ns: float, weight_ns: float | None = None
) -> float:
    """Idle time of a step in the ideal case: step less the work of one rank.

    Ideal are passes of equal length on all ranks and chunks, and messages and gaps of none. With p stages, v chunks and
    passes *of one chunk* f, b and w: (p - 1)(f + b) for gpipe and 1f1b, with any number of micro-batches, and for
    interleaved (of a rank's whole passes a v-th of that: Narayanan et al. 2021); (p - 1) max(f, b, f + b - w) for zb-h1
    with at least p micro-batches (Qi et al. 2023 give the last term, for a w that is the shortest); (p - 1) f for zb-v
    with f = b = w and at least 2p - 1 micro-batches: just the time until the last rank begins.
    """
    if weight_ns is None:
        each = forward_ns + backward_ns
    elif kind == "zb-v":
        each = forward_ns
    else:
        each = max(forward_ns, backward_ns, forward_ns + backward_ns - weight_ns)
    return (stages - 1) * each
