"""Ops -> edges: one function a dependency rule."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl


@dataclass(frozen=True, slots=True)
class Graph:
    """A workload: a table of ops and a table of edges.

    Attributes
    ----------
    ops
        `schema.OPS`, rows in issue order (a topological order of `edges`). `start_ns` and `dur_ns` are those of the
        op's own *work*: time spent waiting for another op is not in `dur_ns`, it is the gap before the op on its lane.
    edges
        `schema.EDGES`: `dst` starts no earlier than `lag_ns` after the end (or start, `from_start`) of `src`.
    step
        The step that the graph is of. Boundary ops carry `step - 1`. In a repeated graph the steps count up.
    report
        What was assumed while the graph was made: columns `what`, `rank`, `count`, `time_ns`, `detail`.
    """

    ops: pl.DataFrame
    edges: pl.DataFrame
    step: int
    report: pl.DataFrame = field(default_factory=pl.DataFrame)
