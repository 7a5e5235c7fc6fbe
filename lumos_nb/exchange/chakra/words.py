"""A step's graph as sentences, one a rank, and the meetings of its ranks: what `synthesize` learns from.

A rank's ops stand in program order: host ops as they were issued, and what they launched right behind its launch. So
a step reads the same however late the device, the network or the other ranks were.
"""

from __future__ import annotations

import zlib
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
    shapes: str  # "" without, else a checksum
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
    lag_ns: int


class Seen(NamedTuple):
    """What a word took, its FLOPs and bytes, and the edges into it from ops of its own rank."""

    dur_ns: float
    flops: float | None
    bytes: float | None
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Sentence:
    """One rank's ops of one step: each one's word, what it took, and the meeting that it takes part in (-1: none)."""

    words: list[Word]
    seen: list[Seen]
    meeting: list[int]


@dataclass(frozen=True, slots=True)
class Step:
    """One graph read: a sentence a rank, and its meetings in an order that no dependency contradicts.

    Ranks count from 0 here; `ranks` are their numbers in the graph.
    """

    ranks: tuple[int, ...]
    sentences: list[Sentence]
    meetings: list[Meeting]

    @classmethod
    def of(cls, graph: Graph) -> Step:
        """Read a graph; joins and edges between ranks live on as meetings."""
        rows = _Rows(graph)
        meetings, number = rows.meetings()
        return cls(rows.ranks, [rows.sentence(order, meetings, number) for order in rows.orders], meetings)


class _Rows:
    """The columns of a graph in topological order, as lists, with edges by place."""

    def __init__(self, graph: Graph) -> None:
        plan = Plan.of(graph)
        self.ranks = tuple(sorted(graph.ops["rank"].unique()))
        rank = pl.col("rank").replace_strict(self.ranks, range(len(self.ranks)), return_dtype=pl.Int64)
        ops = graph.ops[plan.row].with_columns(pl.col("name").str.replace(r" \w+=.*$", ""), rank)
        self.ops: dict[str, list[Any]] = ops.to_dict(as_series=False)
        self.lanes = lane_roles(ops)
        self.into: list[list[tuple[int, tuple[Any, ...]]]] = [[] for _ in range(len(plan.row))]
        about = graph.edges.select("rule", "from_start", "evidence", "hard", "lag_ns")[plan.edge].rows()
        target = np.repeat(np.arange(len(plan.row)), np.diff(plan.ptr).astype(np.int64))
        for dst, src, edge in zip(target.tolist(), plan.src.tolist(), about, strict=True):
            self.into[dst].append((src, edge))
        self.orders = self._program_orders()

    def meetings(self) -> tuple[list[Meeting], dict[int, int]]:
        """Meetings of two or more ranks by how many others must come before, and which one each op takes part in."""
        kind, rank = self.ops["kind"], self.ops["rank"]
        depth, joined = [0] * len(kind), dict[int, int]()
        for at, edges in enumerate(self.into):
            depth[at] = max((depth[src] for src, _ in edges), default=0) + (kind[at] == "join")
            for src, (rule, *_) in edges:
                if kind[src] == "join" and rule == "collective":
                    joined[at] = src
        arrivals = {at: [src for src, _ in edges] for at, edges in enumerate(self.into) if kind[at] == "join"}
        met = {join: self._meeting(rows) for join, rows in arrivals.items() if len({rank[row] for row in rows}) > 1}
        ordered = sorted(met, key=lambda join: (depth[join], met[join][:2], join))
        number = {join: i for i, join in enumerate(ordered)}
        members = {at: number[join] for at, join in joined.items() if join in number}
        for join, i in number.items():
            for row in arrivals[join]:
                launches = [src for src, (rule, *_) in self.into[row] if rule in ("launch", "issue")]
                members |= {row: i} | {src: i for src in launches if kind[src] == "launch" and src not in members}
        return [met[join] for join in ordered], members

    def _meeting(self, rows: list[int]) -> Meeting:
        collective, size = self.ops["collective"][rows[0]], max(self.ops["comm_bytes"][row] or 0 for row in rows)
        if collective in MESSAGES:
            sender, *others = sorted(rows, key=lambda row: self.ops["collective"][row] != "send")
            return Meeting(MESSAGE, (self.ops["rank"][sender], self.ops["rank"][others[0]]), size)
        return Meeting(collective or "collective", tuple(sorted({self.ops["rank"][row] for row in rows})), size)

    def _program_orders(self) -> list[list[int]]:
        """Rows of each rank: a host op where it is, what else there is behind the last host op that it depends on."""
        rank, lane, kind, host = self.ops["rank"], self.ops["lane"], self.ops["kind"], [-1] * len(self.into)
        orders: list[list[int]] = [[] for _ in self.ranks]
        for row, edges in enumerate(self.into):
            if kind[row] != "join":
                own = (src for src, _ in edges if rank[src] == rank[row] and kind[src] != "join")
                on_host = self.lanes[rank[row], lane[row]].startswith("host")
                host[row] = row if on_host else max((host[src] for src in own), default=-1)
                orders[rank[row]].append(row)
        return [sorted(rows, key=lambda row: (host[row], row)) for rows in orders]

    def sentence(self, order: list[int], meetings: list[Meeting], number: dict[int, int]) -> Sentence:
        """The sentence of one rank, whose rows stand in `order`."""
        words = [*self._words(order, meetings, number)]
        dur_ns, flops, size = (self.ops[column] for column in ("dur_ns", "flops", "bytes"))
        links = self._links(order, words)
        seen = [Seen(dur_ns[row], flops[row], size[row], into) for row, into in zip(order, links, strict=True)]
        return Sentence(words, seen, [number.get(row, -1) for row in order])

    def _words(self, order: list[int], meetings: list[Meeting], number: dict[int, int]) -> Iterator[Word]:
        columns = [self.ops[column] for column in ("rank", "lane", "kind", "name", "phase", "shapes", "layer")]
        last, numbers = -1, dict[str, int]()
        for row in order:
            rank, lane, kind, name, phase, shapes, layer = (column[row] for column in columns)
            beside = ""
            if layer is not None:
                now = numbers.setdefault(layer, len(numbers))
                beside = {0: "same", 1: "+1", -1: "-1"}.get(now - last, f"={now}") if last >= 0 else f"={now}"
                last = now
            meets = meetings[number[row]].kind(rank) if row in number else ""
            checksum = f"{zlib.crc32(shapes.encode()):08x}" if shapes else ""
            yield Word(self.lanes[rank, lane], kind, name, phase, checksum, meets, beside)

    def _links(self, order: list[int], words: list[Word]) -> Iterator[tuple[Link, ...]]:
        on_lane: dict[str, int] = {}
        of_kind: dict[tuple[str, str], int] = {}
        nth: dict[int, tuple[tuple[str, str], int]] = {}  # row -> kind and lane, how manieth of these
        for word, row in zip(words, order, strict=True):
            found, lane = [], self.ops["lane"][row]
            for src, (rule, from_start, evidence, hard, lag_ns) in self.into[row]:
                if on_lane.get(lane) == src:
                    found.append(Link(rule, from_start, evidence, hard, None, 1, lag_ns))
                elif src in nth:
                    source, before = nth[src]
                    back = of_kind[source] - before
                    found.append(Link(rule, from_start, evidence, hard, source, back, lag_ns))
            yield tuple(found)
            on_lane[lane] = row
            source = word.kind, word.lane
            nth[row] = source, of_kind.get(source, 0)
            of_kind[source] = nth[row][1] + 1


def lane_roles(ops: pl.DataFrame) -> dict[tuple[int, str], str]:
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
