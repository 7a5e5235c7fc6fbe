"""Sentences of all ranks, put together into a graph: lanes, edges, joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from lumos_nb._replay_plan import Plan
from lumos_nb.errors import GraphError
from lumos_nb.exchange.chakra.word_draws import Links
from lumos_nb.exchange.chakra.words import MESSAGE, MESSAGES, Meeting, Word
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS

STEP = 1
"""The step of a generated graph; what was going on before it is of the one before."""


class Part(NamedTuple):
    """One rank's words as they are to be: by number, with layer (-1: none), duration and meeting (-1: none)."""

    words: list[int]
    layers: list[int]
    dur_ns: Sequence[float]
    meetings: list[int]
    work: list[tuple[float | None, float | None]]


@dataclass
class Build:
    """Rows and edges of a graph so far: edges as in `schema.EDGES`, between rows."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    edges: list[tuple[Any, ...]] = field(default_factory=list)
    arrived: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # meeting, how manieth time -> rows
    moved: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    unlinked: int = 0

    def add(self, **columns: Any) -> int:
        """Add an op with these columns of `schema.OPS`; returns its row."""
        self.rows.append(columns)
        return len(self.rows) - 1


def assembled(
    parts: Mapping[int, Part],
    vocabulary: Sequence[Word],
    meetings: Sequence[Meeting],
    links: Links,
    rng: np.random.Generator,
) -> Graph:
    """The graph of every rank's words; each meeting's arrivals lead to a join, and that to all its transfers.

    Raises
    ------
    GraphError
        Ranks take part in a meeting a different number of times.
    """
    build = Build()
    groups = {ranks: str(i) for i, ranks in enumerate(sorted({m.ranks for m in meetings if m.collective != MESSAGE}))}
    for rank, part in parts.items():
        _add_rank(build, rank, part, vocabulary, meetings, groups, links, rng)
    for (meeting, nth), arrivals in sorted(build.arrived.items()):
        join_ranks(build, meetings[meeting], groups, arrivals, build.moved.get((meeting, nth), []))
    return finished(build)


def _add_rank(
    build: Build,
    rank: int,
    part: Part,
    vocabulary: Sequence[Word],
    meetings: Sequence[Meeting],
    groups: Mapping[tuple[int, ...], str],
    links: Links,
    rng: np.random.Generator,
) -> None:
    last: dict[str, int] = {}
    of_kind: dict[tuple[str, str], list[int]] = {}
    times: Counter[tuple[int, bool]] = Counter()
    sequence: Counter[tuple[str, Any]] = Counter()
    there = _Counts(of_kind)
    for at, number in enumerate(part.words):
        word, comm = vocabulary[number], {}
        if part.meetings[at] >= 0:
            meeting, moves = meetings[part.meetings[at]], word.kind != "event"
            comm = communication(meeting, rank, groups)
            key = (comm["collective"], comm["group"], comm["peer"], moves)
            comm["comm_seq"] = sequence[str(key), moves]
            sequence[str(key), moves] += 1
        row = build.add(
            rank=rank, step=STEP - (word.kind == "boundary"), lane=_lane(word, comm), kind=word.kind, name=word.name,
            device=0 if word.lane.startswith("stream") else None, dur_ns=round(part.dur_ns[at]), phase=word.phase,
            layer=str(part.layers[at]) if part.layers[at] >= 0 else None,
            flops=part.work[at][0], bytes=part.work[at][1],
            **comm,
        )  # fmt: skip
        lane = build.rows[row]["lane"]
        drawn = links.draw(part.words[at - 1] if at else -1, number, there, rng)
        build.unlinked += not drawn and lane in last
        for link, lag_ns in drawn:
            src = last.get(lane) if link.source is None else of_kind[link.source][-link.back]
            if src is not None:
                build.edges.append((src, row, lag_ns, link.from_start, link.rule, link.evidence, link.hard))
        if part.meetings[at] >= 0:
            key_of = (part.meetings[at], times[part.meetings[at], moves])
            times[part.meetings[at], moves] += 1
            (build.moved if moves else build.arrived).setdefault(key_of, []).append(row)
        last[lane] = row
        of_kind.setdefault((word.kind, word.lane), []).append(row)


class _Counts(Mapping[tuple[str, str], int]):
    """How many ops there are of a kind and lane."""

    def __init__(self, rows: Mapping[tuple[str, str], list[int]]) -> None:
        self._rows = rows

    def __getitem__(self, key: tuple[str, str]) -> int:
        return len(self._rows[key])

    def __iter__(self) -> Any:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


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
    moved = edges.with_columns(src=pl.Series(place[edges["src"]]), dst=pl.Series(place[edges["dst"]])).sort(
        "src", "dst"
    )
    report = pl.DataFrame(
        {
            "what": ["ops without an edge from their lane"], "rank": [None], "count": [build.unlinked], "time_ns": [0],
            "detail": ["no edge of the words learned had its source here"],
        },
        schema={"what": pl.String, "rank": pl.Int32, "count": pl.Int64, "time_ns": pl.Int64, "detail": pl.String},
    )  # fmt: skip
    return Graph(OPS.check(ordered.select([*OPS.columns])), EDGES.check(moved), STEP, report)
