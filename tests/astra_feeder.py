"""How ASTRA-sim runs a job's files, written anew from what was seen of it: our exports must finish on every rank.

Its feeder gives a node out once all it depends on, data and control, have finished. A rank does one compute node of the
host at a time and one of the GPU; communication runs beside. The n-th collective that a rank issues in a group meets
the n-th of the others; a send ends by itself, its receive not before it. Times are the nodes' durations, not a
network's.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from lumos_nb.exchange.chakra.messages import message_class
from tests.chakra_files import COLL, COMP, SEND, frames

Key = tuple[int, int]
"""Rank and id."""


class Node(NamedTuple):
    type: int
    needs: set[Key]
    dur_ns: int
    about: dict[str, Any]


class Feeder:
    """`finished`: when each node ended; `unlike`: those that met one of another type or size in its collective."""

    def __init__(self, folder: Path) -> None:
        files = {int(path.name.split(".")[-2]): path for path in folder.glob("*.et")}
        self.groups = json.loads(next(folder.glob("*groups.json")).read_text()) | {"": sorted(files)}
        self.nodes = {(rank, id): node for rank, path in files.items() for id, node in nodes_of(rank, path)}
        self.finished: dict[Key, int] = {}
        self.unlike: list[Key] = []
        self.ends: list[tuple[int, Key]] = []
        self.until: dict[Key, int] = {}
        self.queues: dict[object, list[Key]] = defaultdict(list)  # compute of a rank's host, or GPU; the first runs
        self.met: dict[object, list[Key]] = defaultdict(list)
        self.run()

    def run(self) -> None:
        waits, then = {key: len(node.needs) for key, node in self.nodes.items()}, defaultdict(list)
        for key, node in self.nodes.items():
            for need in node.needs:
                then[need].append(key)
        for key in sorted(key for key, left in waits.items() if not left):
            self.issue(key, 0)
        while self.ends:
            now, key = heapq.heappop(self.ends)
            self.finished[key] = now
            if self.nodes[key].type == COMP:
                queue = self.queues[key[0], self.nodes[key].about.get("is_cpu_op", False)]
                queue.pop(0)
                if queue:
                    self.end(queue[0], now)
            for after in then[key]:
                waits[after] -= 1
                if not waits[after]:
                    self.issue(after, now)

    def end(self, key: Key, begins_ns: int) -> None:
        self.until[key] = begins_ns + self.nodes[key].dur_ns
        heapq.heappush(self.ends, (self.until[key], key))

    def issue(self, key: Key, now: int) -> None:
        rank, about, kind = key[0], self.nodes[key].about, self.nodes[key].type
        host = about.get("is_cpu_op", False)
        if kind == COMP:
            self.queues[rank, host].append(key)
            if len(self.queues[rank, host]) == 1:
                self.end(key, now)
        elif kind == COLL and not host:  # that of the host is never run
            members = self.groups[about.get("pg_name", "")]
            there = self.met[about.get("pg_name"), self.nth((rank, about.get("pg_name")))]
            there.append(key)
            what = [[self.nodes[one].about[name] for name in ("comm_type", "comm_size")] for one in (there[0], key)]
            self.unlike += [key] if what[0] != what[1] else []
            for one in there if len(there) == len(members) else ():
                self.end(one, now)
        elif not host:
            pair = (rank, about["comm_dst"]) if kind == SEND else (about["comm_src"], rank)
            both = self.met[pair, about["comm_tag"], self.nth((kind, pair, about["comm_tag"]))]
            both.append(key)
            both.sort(key=lambda one: self.nodes[one].type)  # the send, then the receive
            if kind == SEND:
                self.end(key, now)
            if len(both) == 2:
                self.end(both[1], max(now, self.until[both[0]]))

    def nth(self, what: object) -> int:
        self.met["count", what].append((0, 0))
        return len(self.met["count", what])


def nodes_of(rank: int, path: Path) -> list[tuple[int, Node]]:
    """The first message is about the file."""
    parsed = [message_class("Node").FromString(one) for one in list(frames(path.read_bytes()))[1:]]
    needs = [{(rank, id) for id in (*one.data_deps, *one.ctrl_deps)} for one in parsed]
    about = [{a.name: getattr(a, a.WhichOneof("value")) for a in one.attr} for one in parsed]
    times = [max(1000 * one.duration_micros, 1) for one in parsed]
    return [(one.id, Node(one.type, *rest)) for one, *rest in zip(parsed, needs, times, about, strict=True)]
