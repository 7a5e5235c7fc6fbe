"""A step's graph as sentences, one a rank, and the meetings of its ranks: what `synthesize` learns from.

A rank's ops stand in program order: host ops as they were issued, and what they launched right behind its launch. So
a step reads the same however late the device, the network or the other ranks were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from lumos_nb._replay_plan import Plan
from lumos_nb.graph import Graph

HOST_KINDS = ("cpu", "gap", "launch", "alloc", "wait")
MESSAGES = ("send", "recv")
MESSAGE = "message"


class Word(NamedTuple):
    """What kind of op stands at a place of a sentence."""

    lane: str  # role of its lane: host0 is the thread with most ops, stream1 the second stream, send, recv, worker0
    kind: str
    name: str  # without the numbers that a recorder wrote behind it
    phase: str
    shapes: str  # "" without, else a number for those seen with the name
    meets: str  # the kind of meeting that it launches, arrives at or is the transfer of, else ""
    layer: str  # beside the last op of a layer on its rank: "same", "+1", "-1", else "=number"; "" outside


class Meeting(NamedTuple):
    """A collective or message: all its ranks arrive, then each transfers."""

    collective: str  # or "message"
    ranks: tuple[int, ...]  # sender and receiver of a message
    size_bytes: int

    def kind(self, rank: int) -> str:
        """What it is to one of its ranks: the words of a sentence that can take part."""
        if self.collective == MESSAGE:
            return MESSAGES[self.ranks.index(rank)]
        return f"{self.collective}/{len(self.ranks)}"


class Link(NamedTuple):
    """An edge into a word from the `back`-th last op of a kind and lane, or from the one before it on its own lane."""

    rule: str
    from_start: bool
    evidence: str
    hard: bool
    source: tuple[str, str] | None  # kind, lane; None: the one before on the lane
    back: int


@dataclass(frozen=True, slots=True)
class Sentence:
    """One rank's ops of one step: each one's word, duration, FLOPs and bytes, edges into it, and meeting (-1: none)."""

    rank: int
    words: list[Word]
    dur_ns: list[int]
    work: list[tuple[float | None, float | None]]
    links: list[tuple[tuple[Link, int], ...]]
    meeting: list[int]


@dataclass(frozen=True, slots=True)
class Step:
    """One graph read: a sentence a rank, and its meetings in an order that no dependency contradicts."""

    sentences: dict[int, Sentence]
    meetings: list[Meeting]

    @classmethod
    def of(cls, graph: Graph) -> Step:
        """Read a graph; joins and edges between ranks live on as meetings."""
        rows = _Rows(graph)
        meetings, number = rows.meetings()
        sentences = {rank: rows.sentence(rank, meetings, number) for rank in rows.orders}
        return cls(sentences, meetings)


class _Rows:
    """The columns of a graph in topological order, as lists, with edges by place."""

    def __init__(self, graph: Graph) -> None:
        plan = Plan.of(graph)
        name = pl.col("name").str.replace(r" \w+=.*$", "")
        self.ops: dict[str, list[Any]] = graph.ops[plan.row].with_columns(name).to_dict(as_series=False)
        self.into: list[list[tuple[int, tuple[Any, ...]]]] = [[] for _ in range(len(plan.row))]
        about = graph.edges.select("rule", "from_start", "evidence", "hard", "lag_ns")[plan.edge].rows()
        target = np.repeat(np.arange(len(plan.row)), np.diff(plan.ptr).astype(np.int64))
        for dst, src, edge in zip(target.tolist(), plan.src.tolist(), about, strict=True):
            self.into[dst].append((src, edge))
        self.roles = _lane_roles(graph.ops)
        self.orders = self._program_orders()

    def meetings(self) -> tuple[list[Meeting], dict[int, int]]:
        """Meetings of two or more ranks by how many others must come before, and which one each op takes part in."""
        kind, rank = self.ops["kind"], self.ops["rank"]
        depth, part_of = [0] * len(kind), dict[int, int]()
        arrivals: dict[int, list[int]] = {}
        for at, edges in enumerate(self.into):
            depth[at] = max((depth[src] for src, _ in edges), default=0) + (kind[at] == "join")
            if kind[at] == "join":
                arrivals[at] = [src for src, _ in edges]
            for src, (rule, *_) in edges:
                if src in arrivals and rule == "collective":
                    part_of[at] = src
        met = {join: rows for join, rows in arrivals.items() if len({rank[row] for row in rows}) > 1}
        keyed = {join: self._meeting(rows) for join, rows in met.items()}
        ordered = sorted(keyed, key=lambda join: (depth[join], keyed[join][:2], join))
        number = {join: i for i, join in enumerate(ordered)}
        members = {at: number[join] for at, join in part_of.items() if join in number}
        for join, rows in met.items():
            for row in rows:
                members[row] = number[join]
                for src, (rule, *_) in self.into[row]:
                    if rule in ("launch", "issue") and kind[src] == "launch":
                        members.setdefault(src, number[join])
        return [keyed[join] for join in ordered], members

    def _meeting(self, rows: list[int]) -> Meeting:
        collective, size = self.ops["collective"][rows[0]], max(self.ops["comm_bytes"][row] or 0 for row in rows)
        if collective in MESSAGES:
            sends = [row for row in rows if self.ops["collective"][row] == "send"] or rows
            other = [row for row in rows if row != sends[0]]
            return Meeting(MESSAGE, (self.ops["rank"][sends[0]], self.ops["rank"][other[0]]), size)
        return Meeting(collective or "collective", tuple(sorted({self.ops["rank"][row] for row in rows})), size)

    def _program_orders(self) -> dict[int, list[int]]:
        """Rows of each rank: a host op where it is, what else there is behind the last host op that it depends on."""
        rank, lane, host = self.ops["rank"], self.ops["lane"], [-1] * len(self.into)
        orders: dict[int, list[int]] = {r: [] for r in sorted(set(rank))}
        for row, edges in enumerate(self.into):
            if self.ops["kind"][row] != "join":
                on_host = self.roles[rank[row], lane[row]].startswith("host")
                own = (src for src, _ in edges if rank[src] == rank[row] and self.ops["kind"][src] != "join")
                host[row] = row if on_host else max((host[src] for src in own), default=-1)
                orders[rank[row]].append(row)
        return {r: sorted(rows, key=lambda row: (host[row], row)) for r, rows in orders.items()}

    def sentence(self, rank: int, meetings: list[Meeting], number: dict[int, int]) -> Sentence:
        """The sentence of one rank."""
        order = self.orders[rank]
        place = {row: i for i, row in enumerate(order)}
        words = list(self._words(rank, order, meetings, number))
        links = list(self._links(order, place, words))
        work = [(self.ops["flops"][row], self.ops["bytes"][row]) for row in order]
        durations = [self.ops["dur_ns"][row] for row in order]
        return Sentence(rank, words, durations, work, links, [number.get(row, -1) for row in order])

    def _words(self, rank: int, order: list[int], meetings: list[Meeting], number: dict[int, int]) -> Iterator[Word]:
        ops, last, seen = self.ops, -1, dict[str, int]()
        for row in order:
            layer = ""
            if ops["layer"][row] is not None:
                now = seen.setdefault(ops["layer"][row], len(seen))
                layer = {0: "same", 1: "+1", -1: "-1"}.get(now - last, f"={now}") if last >= 0 else f"={now}"
                last = now
            meets = meetings[number[row]].kind(rank) if row in number else ""
            yield Word(
                self.roles[rank, ops["lane"][row]],
                ops["kind"][row],
                ops["name"][row],
                ops["phase"][row],
                ops["shapes"][row] or "",
                meets,
                layer,
            )

    def _links(
        self, order: list[int], place: dict[int, int], words: list[Word]
    ) -> Iterator[tuple[tuple[Link, int], ...]]:
        on_lane: dict[str, int] = {}
        of_kind: dict[tuple[str, str], list[int]] = {}
        nth: dict[int, int] = {}
        for at, row in enumerate(order):
            found = []
            for src, (rule, from_start, evidence, hard, lag_ns) in self.into[row]:
                if src not in place:
                    continue
                if on_lane.get(self.ops["lane"][row]) == src:
                    found.append((Link(rule, from_start, evidence, hard, None, 1), lag_ns))
                else:
                    source = words[place[src]].kind, words[place[src]].lane
                    found.append(
                        (Link(rule, from_start, evidence, hard, source, len(of_kind[source]) - nth[src]), lag_ns)
                    )
            yield tuple(sorted(found, key=str) if len(found) > 1 else found)
            on_lane[self.ops["lane"][row]] = row
            same = of_kind.setdefault((words[at].kind, words[at].lane), [])
            nth[row] = len(same)
            same.append(row)


def _lane_roles(ops: pl.DataFrame) -> dict[tuple[int, str], str]:
    """What a lane is on its rank: hosts, workers (threads that only transfer) and streams by how many ops they have."""
    lanes = ops.group_by("rank", "lane").agg(
        count=pl.len(), host=pl.col("kind").is_in(HOST_KINDS).any(), device=pl.col("device").is_not_null().any()
    )
    message = pl.col("lane").str.extract(r"^net:(send|recv):")
    role = (
        pl.when(pl.col("lane") == "net").then(pl.lit("net")).when("host").then(pl.lit("host"))
        .when("device").then(pl.lit("stream")).otherwise(pl.coalesce(message, pl.lit("worker")))
    )  # fmt: skip
    lanes = lanes.with_columns(role=role).sort("rank", "role", "count", "lane", descending=[False, False, True, False])
    nth = pl.int_range(pl.len()).over("rank", "role").cast(pl.String)
    alone = pl.col("role").is_in(["net", *MESSAGES])
    lanes = lanes.with_columns(role=pl.when(alone).then("role").otherwise(pl.col("role") + nth))
    return {(rank, lane): role for rank, lane, role in lanes.select("rank", "lane", "role").iter_rows()}
