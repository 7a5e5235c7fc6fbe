"""What the notes of a Kineto file count; shared by the tests of the reader."""

from __future__ import annotations

import polars as pl

from lumos_nb.traces.trace import Trace


def noted(kineto: Trace, what: str) -> int:
    """How many of `what` the notes count."""
    return int(kineto.notes.filter(pl.col("what").str.starts_with(what))["count"].sum())


def accounted_for(kineto: Trace) -> int:
    """Events kept plus events dropped."""
    return len(kineto.events) + noted(kineto, "dropped")
