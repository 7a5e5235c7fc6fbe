"""What the notes of a Kineto file count; shared by the tests of the reader."""

from __future__ import annotations

import polars as pl

from lumos_nb.traces.kineto import Kineto


def noted(kineto: Kineto, what: str) -> int:
    """How many of `what` the notes count."""
    return int(kineto.notes.filter(pl.col("what").str.starts_with(what))["count"].sum())


def accounted_for(kineto: Kineto) -> int:
    """Events kept plus events dropped."""
    return len(kineto.events) + noted(kineto, "dropped")
