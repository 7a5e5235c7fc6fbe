"""Beginnings and ends of events, as some writers have them, to whole events."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from lumos_nb._jit import jit
from lumos_nb.traces._event_kernels import KNOWN, NO_TEXT

Flags = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]

WHOLE, BEGIN, END = (KNOWN.index(phase) for phase in "XBE")
_NESTED = 64  # open events that an end looks for its name among


def joined(halves: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Make whole events of beginnings and ends; those, and the rows that are in none, with the `reason`.

    An end belongs to the innermost open event of its process and thread, or of its name if it has one. The event has
    its beginning's columns, and the end's arguments if the beginning has none.
    """
    halves = halves.with_columns(lane=pl.struct("process", "tid").rank("dense").cast(pl.Int64)).sort(
        "lane", "start_ns", "event_id", nulls_last=True
    )
    lane, name = (halves[column].cast(pl.Int64).to_numpy(writable=True) for column in ("lane", "name"))
    partner = _partners(lane, name, (halves["ph"] == BEGIN).to_numpy(), halves["start_ns"].is_not_null().to_numpy())
    found = pl.Series(partner >= 0)
    begins, ends = found & (halves["ph"] == BEGIN), pl.Series(partner)
    first, last = halves.filter(begins), halves[ends.filter(begins)]
    whole = first.with_columns(
        ph=pl.lit(WHOLE, pl.UInt8),
        dur_ns=last["start_ns"] - first["start_ns"],
        args=pl.when(first["args"] == "{}").then(last["args"]).otherwise(first["args"]),
    )
    left = halves.filter(~begins).with_columns(
        reason=pl.when(found.filter(~begins))
        .then(pl.lit("the end of a pair, which is one event now"))
        .otherwise(pl.lit("half of a pair whose other half is not in the file"))
    )
    return whole, left


@jit("int64[::1](int64[::1], int64[::1], boolean[::1], boolean[::1])")
def _partners(lane: Int64s, name: Int64s, begins: Flags, timed: Flags) -> Int64s:
    """Of each half of an event the row of its other half, or -1. Rows are in order of lane and time."""
    partner, stack, depth = np.full(lane.size, -1), np.empty(lane.size, np.int64), 0
    for i in range(lane.size):
        if i and lane[i] != lane[i - 1]:
            depth = 0
        if not timed[i]:
            continue
        if begins[i]:
            stack[depth], depth = i, depth + 1
            continue
        k = depth - 1
        while k >= max(0, depth - _NESTED) and name[i] != NO_TEXT and name[stack[k]] != name[i]:
            k -= 1
        if k >= max(0, depth - _NESTED):
            partner[i], partner[stack[k]], depth = stack[k], i, k
    return partner
