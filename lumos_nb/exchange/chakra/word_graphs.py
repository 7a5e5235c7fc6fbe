"""Sentences of all ranks, put together into a graph: lanes, edges, joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from lumos_nb._replay_plan import Plan
from lumos_nb.errors import GraphError
from lumos_nb.exchange.chakra.speaking import Said
from lumos_nb.exchange.chakra.words import MESSAGE, MESSAGES, Meeting, Seen, Word
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS

STEP = 1
"""The step of a generated graph; what was going on before it is of the one before."""


@dataclass
class Build:
    """Rows and edges of a graph so far: edges as in `schema.EDGES`, between rows."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    edges: list[tuple[Any, ...]] = field(default_factory=list)
    unlinked: int = 0

    def add(self, **columns: Any) -> int:
        """Add an op with these columns of `schema.OPS`; returns its row."""
        self.rows.append(columns)
        return len(self.rows) - 1


def assembled(
    ranks: Mapping[int, Sequence[Said]],
    seen: Mapping[int, Sequence[Seen]],
    vocabulary: Sequence[Word],
    meetings: Sequence[Meeting],
) -> Graph:
    """The graph of every rank's words; each meeting's arrivals lead to a join, and that to all its transfers.

    `seen` holds what each word takes and hangs on.

    Raises
    ------
    GraphError
        Ranks take part in a meeting a different number of times.
    """
    build = Build()
    groups = {ranks: str(i) for i, ranks in enumerate(sorted({m.ranks for m in meetings if m.collective != MESSAGE}))}
    met: dict[tuple[int, int], tuple[list[int], list[int]]] = {}  # meeting, how manieth time -> arrivals, transfers
    for rank, part in ranks.items():
        rows = _add_rank(build, rank, zip(part, seen[rank], strict=True), vocabulary, meetings, groups)
        times: Counter[tuple[int, bool]] = Counter()
        for row, said in zip(rows, part, strict=True):
            if said.meeting >= 0:
                moves = vocabulary[said.word].kind != "event"
                met.setdefault((said.meeting, times[said.meeting, moves]), ([], []))[moves].append(row)
                times[said.meeting, moves] += 1
    for (meeting, _), (arrivals, transfers) in sorted(met.items()):
        join_ranks(build, meetings[meeting], groups, arrivals, transfers)
    return finished(build)


def _add_rank(
    build: Build,
    rank: int,
    ops: Iterable[tuple[Said, Seen]],
    vocabulary: Sequence[Word],
    meetings: Sequence[Meeting],
    groups: Mapping[tuple[int, ...], str],
) -> list[int]:
    rows: list[int] = []
    last: dict[str, int] = {}
    of_kind: dict[tuple[str, str], list[int]] = {}
    sequence: Counter[tuple[str, bool]] = Counter()
    for said, seen in ops:
        word = vocabulary[said.word]
        comm = communication(meetings[said.meeting], rank, groups) if said.meeting >= 0 else {}
        if comm:
            pair = f"{comm['collective']} {comm['group']} {comm['peer']}", word.kind != "event"
            comm["comm_seq"] = sequence[pair]
            sequence[pair] += 1
        lane = _lane(word, comm)
        row = build.add(
            rank=rank, step=STEP - (word.kind == "boundary"), lane=lane, kind=word.kind, name=word.name,
            device=0 if word.lane.startswith("stream") else None, dur_ns=round(seen.dur_ns), phase=word.phase,
            layer=str(said.layer) if said.layer >= 0 else None, flops=seen.flops, bytes=seen.bytes, **comm,
        )  # fmt: skip
        build.unlinked += not seen.links and lane in last
        for link in seen.links:
            src = last.get(lane) if link.source is None else of_kind[link.source][-link.back]
            if src is not None:
                build.edges.append((src, row, link.lag_ns, link.from_start, link.rule, link.evidence, link.hard))
        last[lane] = row
        of_kind.setdefault((word.kind, word.lane), []).append(row)
        rows.append(row)
    return rows


def communication(meeting: Meeting, rank: int, groups: Mapping[tuple[int, ...], str]) -> dict[str, Any]:
    """Columns that say what a rank communicates in a meeting."""
    message = meeting.collective == MESSAGE
    return {
        "collective": meeting.kind(rank).split("/")[0],
        "group": "messages" if message else groups[meeting.ranks],
        "group_size": len(meeting.ranks),
        "comm_bytes": meeting.size_bytes,
        "peer": meeting.ranks[1 - meeting.ranks.index(rank)] if message else None,
    }


def _lane(word: Word, comm: Mapping[str, Any]) -> str:
    if word.lane in MESSAGES:
        return f"net:{word.lane}:{comm['peer']}" if comm else f"net:{word.lane}"
    if word.lane == "net":
        return "net"
    if word.lane.startswith("stream"):
        return f"gpu0:{word.lane.removeprefix('stream')}"
    return f"cpu:{word.lane.removeprefix('host')}"


def join_ranks(
    build: Build, meeting: Meeting, groups: Mapping[tuple[int, ...], str], arrivals: list[int], moved: list[int]
) -> None:
    """Add the join of one meeting: edges from every arrival to it, and from it to every transfer."""
    if {build.rows[row]["rank"] for row in arrivals} != set(meeting.ranks):
        here = sorted({build.rows[row]["rank"] for row in arrivals})
        raise GraphError(
            f"the {meeting.collective} of ranks {[*meeting.ranks]} is made by {here} only: their sentences repeat it a "
            "different number of times; ask for layers=1.0, or a run whose ranks hold the same layers."
        )
    first, comm = build.rows[arrivals[0]], communication(meeting, meeting.ranks[0], groups)
    join = build.add(
        rank=meeting.ranks[0], step=STEP, lane="net", kind="join",
        name=f"{comm['collective']} of {len(meeting.ranks)} ranks",
        device=None, dur_ns=0, phase=first["phase"], collective=comm["collective"], group=comm["group"],
    )  # fmt: skip
    build.edges += [(row, join, 0, False, "collective", "exact", True) for row in arrivals]
    build.edges += [(join, row, 0, False, "collective", "exact", True) for row in moved]


def finished(build: Build) -> Graph:
    """The graph, its rows in a topological order, each starting as soon as its edges let it."""
    n = len(build.rows)
    ops = pl.DataFrame(build.rows, schema_overrides=dict(OPS.columns), infer_schema_length=None)
    missing = [pl.lit(None, dtype).alias(c) for c, dtype in OPS.columns.items() if c not in ops.columns]
    ops = ops.with_columns(missing).with_columns(op_id=pl.int_range(n, dtype=pl.Int64), start_ns=pl.lit(0, pl.Int64))
    edges = pl.DataFrame(build.edges, schema=dict(EDGES.columns), orient="row").unique(["src", "dst"], keep="first")
    plan = Plan.of(Graph(ops.select([*OPS.columns]), edges, STEP))
    place = np.empty(n, np.int64)
    place[plan.row] = np.arange(n)
    ordered = ops[plan.row].with_columns(op_id=pl.int_range(n, dtype=pl.Int64), start_ns=pl.Series(plan.starts()))
    moved = edges.with_columns(src=pl.Series(place[edges["src"]]), dst=pl.Series(place[edges["dst"]]))
    report = pl.DataFrame(
        {
            "what": ["ops without an edge from their lane"], "rank": [None], "count": [build.unlinked], "time_ns": [0],
            "detail": ["no edge of the words learned had its source here"],
        },
        schema={"what": pl.String, "rank": pl.Int32, "count": pl.Int64, "time_ns": pl.Int64, "detail": pl.String},
    )  # fmt: skip
    return Graph(OPS.check(ordered.select([*OPS.columns])), EDGES.check(moved.sort("src", "dst")), STEP, report)
