"""Two plain ways to replay a graph, to check and time the compiled one against: a loop over ops, numpy by level."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lumos_nb.graph import Graph

Int64s = npt.NDArray[np.int64]


def times_by_loop(graph: Graph, *, grow: dict[int, int] | None = None) -> dict[int, tuple[int, int]]:
    """Start and end of every op by its id, from 0, with the durations of some ops grown by so many ns."""
    waits = defaultdict(list)
    for edge in graph.edges.iter_rows(named=True):
        waits[edge["dst"]].append(edge)
    durations = {i: d + (grow or {}).get(i, 0) for i, d in graph.ops.select("op_id", "dur_ns").iter_rows()}
    times: dict[int, tuple[int, int]] = {}

    def visit(op: int) -> tuple[int, int]:
        if op not in times:
            start = max((visit(e["src"])[0 if e["from_start"] else 1] + e["lag_ns"] for e in waits[op]), default=0)
            times[op] = start, start + durations[op]
        return times[op]

    for op in durations:
        visit(op)
    return times


def step_ends_by_loop(graph: Graph, times: dict[int, tuple[int, int]]) -> dict[int, int]:
    """When each step ends, the latest over ranks: by its ops on devices, if the graph has any."""
    ops = list(graph.ops.iter_rows(named=True))
    works = [op["device"] is not None and op["kind"] != "event" for op in ops]
    ends: dict[int, int] = defaultdict(int)
    for op, on_device in zip(ops, works, strict=True):
        if op["step"] is not None and (on_device or not any(works)):
            ends[op["step"]] = max(ends[op["step"]], times[op["op_id"]][1])
    return dict(sorted(ends.items()))


def step_by_loop(graph: Graph, *, grow: dict[int, int] | None = None) -> tuple[int, int]:
    """Time of the last step, and when it ends."""
    ends = list(step_ends_by_loop(graph, times_by_loop(graph, grow=grow)).values())
    return (ends[-1] - (ends[-2] if len(ends) > 1 else 0), ends[-1]) if ends else (0, 0)


@dataclass(frozen=True)
class Levels:
    """Ops renumbered by level, so that one level is one slice; in-edges sorted by the op that they lead to."""

    op: Int64s  # (n,) position of each in the order that it was made from
    op_bounds: Int64s  # (levels + 1,)
    edge: Int64s  # (e,) in the order that it was made from
    src: Int64s  # (e,)
    edge_bounds: Int64s  # (levels + 1,)
    segments: list[Int64s]  # of each level, where the in-edges of each of its ops begin

    @classmethod
    def of(cls, n: int, src: Int64s, dst: Int64s) -> Levels:
        level = _levels(n, src, dst)
        op = np.argsort(level, kind="stable")
        place = np.empty(n, np.int64)
        place[op] = np.arange(n)
        edge = np.argsort(place[dst], kind="stable")
        to = place[dst][edge]
        op_bounds = np.searchsorted(level[op], np.arange(level.max(initial=-1) + 2))
        edge_bounds = np.searchsorted(to, op_bounds)
        begins = np.searchsorted(to, np.arange(n))
        segments = [
            begins[lo:hi] - e for lo, hi, e in zip(op_bounds[:-1], op_bounds[1:], edge_bounds[:-1], strict=True)
        ]
        return cls(op, op_bounds, edge, place[src][edge], edge_bounds, segments)

    def starts(self, apart: Int64s) -> Int64s:
        """Start of every op, renumbered; `apart` (e,), the least time between the starts of its ops, as `edge`."""
        start = np.zeros(len(self.op), np.int64)
        for level in range(1, len(self.segments)):
            edges = slice(self.edge_bounds[level], self.edge_bounds[level + 1])
            waits = start[self.src[edges]] + apart[edges]
            np.maximum.reduceat(
                waits, self.segments[level], out=start[self.op_bounds[level] : self.op_bounds[level + 1]]
            )
        return start


def _levels(n: int, src: Int64s, dst: Int64s) -> Int64s:
    """Length of the longest chain before each op."""
    by_source = np.argsort(src, kind="stable")
    dst, begins = dst[by_source], np.searchsorted(src[by_source], np.arange(n + 1))
    missing = np.bincount(dst, minlength=n)
    level = np.zeros(n, np.int64)
    ready, depth = np.flatnonzero(missing == 0), 0
    while ready.size:
        level[ready] = depth
        count = begins[ready + 1] - begins[ready]
        first = np.repeat(begins[ready] - np.concatenate([[0], np.cumsum(count)[:-1]]), count)
        reached, times = np.unique(dst[first + np.arange(count.sum())], return_counts=True)
        missing[reached] -= times
        ready, depth = reached[missing[reached] == 0], depth + 1
    return level
