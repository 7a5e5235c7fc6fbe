"""What a benchmark runs, as a table: operators, memory, slots, calls; made from an execution trace."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import polars as pl

from lumos_nb.costs.calibration import Calibration
from lumos_nb.display import Shown, format_bytes, format_share, how_many
from lumos_nb.embedding_tables import BINS, complete_tables, reused_indices, zipf_indices
from lumos_nb.errors import UNDECODABLE, InputError, TraceError, require_kinds, shown
from lumos_nb.exchange.benchmark.calls import FREE, Node, Tensor, choose, read_nodes, tensors_of
from lumos_nb.exchange.benchmark.collectives import DEFAULT_GROUP, Communications, asked_of, delays_ns
from lumos_nb.exchange.benchmark.dataflow import STAND_IN, Call, Dataflow, Slot
from lumos_nb.exchange.benchmark.hiding import hidden
from lumos_nb.exchange.benchmark.registry import Registry
from lumos_nb.exchange.benchmark.values import ROWS, common
from lumos_nb.exchange.chakra.linking import link
from lumos_nb.exchange.chakra.obfuscation import Policy
from lumos_nb.layout import Cluster
from lumos_nb.traces.execution_trace import ExecutionTrace, load_execution_trace
from lumos_nb.traces.run import Run

CALLS = {
    "call": pl.Int64(),
    "op": pl.String(),
    "node_id": pl.Int64(),
    "operators": pl.Int64(),
    "reason": pl.String(),
    "dur_ns": pl.Int64(),
    "gap_ns": pl.Int64(),
}
CAPTURE = "capture.json"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Workload(Shown):
    """What a benchmark runs.

    Attributes
    ----------
    table
        What workload.json holds: operators, memory, slots, calls.
    calls
        One row a call: `call`, `op`, `node_id` of the trace, `operators` (nodes of the trace that it stands for), for a
        stand-in the `reason` (else empty), and where a profile was given `dur_ns`, and `gap_ns` since the last call's
        end, in the original.
    notes
        `what` was assumed, and the `count` of it.
    coverage, time_coverage
        The share of the trace's operators, and of the time in them (None without a profile), that is covered: an
        operator is if it is called, or within one that is, or if it has parts and all of them are covered. Stand-ins
        cover nothing.
    called_share
        The share of operator time in the calls themselves; the rest of what is covered is the own time of operators
        whose parts are called, dispatch and the profiler's. None without a profile.
    indices
        Numbers that lookups of embedding tables read, where they were drawn; int64.
    """

    table: dict[str, Any]
    calls: pl.DataFrame
    notes: pl.DataFrame
    coverage: float
    time_coverage: float | None
    called_share: float | None
    indices: np.ndarray

    def _title(self) -> str:
        made = {slot for call in self.table["calls"] for slot in call["out"]}
        given = {row[0] for slot, row in enumerate(self.table["slots"]) if slot not in made}
        size_bytes = sum(self.table["memory"][at][0] for at in given)
        share = format_share(self.coverage)
        time = "" if self.time_coverage is None else f" and {format_share(self.time_coverage)} of their time"
        return (
            f"Benchmark of {len(self.calls):,} calls for {self.calls['operators'].sum():,} operators, {share} of them"
            f"{time} covered; {format_bytes(size_bytes)} given"
        )

    def _overview(self) -> pl.DataFrame:
        stand_ins = self.calls.filter(pl.col("reason") != "")
        return stand_ins.group_by("op", "reason").agg(calls=pl.len(), operators=pl.col("operators").sum()).sort("op")

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        stand_ins = self._overview()
        words = f"{how_many(len(stand_ins), 'stand-in')}:" if len(stand_ins) else "no stand-ins"
        return [(f"{self._title()}; {words}", stand_ins)]


def workload(
    trace: ExecutionTrace | str | Path,
    *,
    rank: int | None = None,
    step: int | None = None,
    profile: Run | str | Path | None = None,
    shrink: Mapping[int, int] | None = None,
    tables: pl.DataFrame | None = None,
    alpha: float = 0.0,
    policy: Policy | None = None,
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
) -> Workload:
    """Read what a trace's operators did as a table of calls.

    Parameters
    ----------
    trace, rank
        An execution trace, or the path of one; of a folder or archive of several the rank's.
    step
        The number in a ProfilerStep# mark; by default the first step that is marked, or else the whole trace.
    profile
        A Kineto trace of the same program, for times of calls and gaps between them; a capture's own by default.
    shrink
        Sizes of dimensions and what to put in their place, in all tensors and arguments: {4096: 64}.
    tables
        Embedding tables (`embedding_tables.complete_tables`): lookups of one with so many rows reuse them as it says.
    alpha
        Skew of all other lookups (`embedding_tables.zipf_indices`); 0: each row as often.
    policy
        Which names the program may say (`hiding.hidden`).
    cluster, calibration
        Where the ranks are, neighbours on a node: a collective whose peers are not launched then takes as long as the
        calibration's (by default the bundled one's) collective model says, and no time without.

    Returns
    -------
    Workload
        Calls, memory, and what could not be called.

    Raises
    ------
    TraceError
        There is no such step, or the file is no execution trace.
    InputError
        `shrink` has an impossible size, the policy hides what a program needs, or the cluster has too few GPUs.

    Examples
    --------
    >>> workload("runs/gpt", rank=0).coverage
    1.0
    """
    found = trace if isinstance(trace, ExecutionTrace) else load_execution_trace(trace, rank=rank)
    shown = found if policy is None else hidden(found, policy)
    nodes, talks = read_nodes(shown, step, _checked_sizes(shrink)), Communications(shown)
    flow = _followed(nodes, talks)
    calls = flow.with_waits()
    rank = _rank(found, rank, talks.groups)
    recorded, source = _captured(trace)
    source |= {"schema": found.metadata["schema"], "nodes": len(nodes), "rank": rank, "ranks": [rank]}
    timed, dur_ns = _call_table(calls), None
    if (profile := recorded if profile is None else profile) is not None:
        timed, dur_ns = _timed(timed, nodes, link(found, profile, rank=rank).nodes)
    shares = _coverage(nodes, {call.node.id: not call.reason for call in reversed(calls)}, dur_ns)
    delay_ns = _delays_ns(calls, talks, rank, cluster, calibration)
    waits = {"gap_ns": timed["gap_ns"].to_list(), "delay_ns": delay_ns}
    indices = _draw(flow, tables, alpha)  # which settles rules that the table has
    table = _table(flow, calls, source, talks.groups, waits)
    notes = pl.DataFrame([*flow.notes.items()], schema={"what": pl.String(), "count": pl.Int64()}, orient="row")
    return Workload(table, timed, notes, *shares, indices)


def _delays_ns(
    calls: list[Call], talks: Communications, rank: int, cluster: Cluster | None, calibration: Calibration | None
) -> list[int | None]:
    """How long each call's collective takes where its peers are not and a cluster is known."""
    if cluster is None:
        if calibration is not None:
            raise InputError("a calibration says how long collectives take on a cluster: give cluster= too.")
        return [None] * len(calls)
    require_kinds(cluster=(cluster, Cluster))
    if calibration is not None:
        require_kinds(calibration=(calibration, Calibration))
    asked = [asked_of(call.op, call.node, call.talk, talks.groups, rank) for call in calls]
    return delays_ns(asked, cluster, calibration)


def _captured(trace: ExecutionTrace | str | Path) -> tuple[Path | None, dict[str, Any]]:
    """The folder of a capture, whose profile goes with its execution trace, and how many threads it ran on."""
    if isinstance(trace, ExecutionTrace) or not (about := Path(trace) / CAPTURE).is_file():
        return None, {}
    try:
        return Path(trace), {"threads": msgspec.json.decode(about.read_bytes(), type=_About).threads}
    except UNDECODABLE as error:
        raise TraceError(f"{about} is none of a capture: {error}. Record it again, or delete the file.") from error


class _About(msgspec.Struct):
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)]


def _followed(nodes: list[Node], talks: Communications) -> Dataflow:
    """The calls of all chosen nodes, and the memory between them."""
    registry, flow = Registry(), Dataflow()
    for node in choose(nodes, registry.is_composite):
        if (talk := talks.of(node)) is not None:
            flow.communicate(node, talk)
        elif node.kind == "comm":
            flow.notes["records of communication that no operator issues: left out"] += 1
        elif isinstance(bound := registry.bind(node, talks.groups), str):
            flow.add(node, STAND_IN, {"inputs": [*tensors_of(node.inputs)]}, bound)
        else:
            flow.add(node, node.op or "", bound)
    return flow


def _checked_sizes(shrink: Mapping[int, int] | None) -> dict[int, int]:
    require_kinds(shrink=(given := {} if shrink is None else shrink, Mapping))
    sizes = dict(given)
    numbers = all(type(size) is int for pair in sizes.items() for size in pair)
    if not numbers or not all(1 <= smaller <= size < 2**63 for size, smaller in sizes.items()):
        raise InputError(f"shrink is {shown(sizes)}: give sizes of dimensions and smaller ones, such as {{4096: 64}}.")
    return sizes


def _rank(trace: ExecutionTrace, rank: int | None, groups: Mapping[str, list[int]]) -> int:
    """Whose trace it is: as given, else as records in the default group say, else by the last number in its name."""
    records = trace.comms.filter(pl.col("group") == DEFAULT_GROUP)["rank"].drop_nulls()
    said = [rank, *records.head(1), *re.findall(r"\d+", trace.path.name)[-1:], 0]
    found = next(int(one) for one in said if one is not None)
    return found if found in groups[DEFAULT_GROUP] else 0


def _call_table(calls: list[Call]) -> pl.DataFrame:
    seen: set[int] = set()
    rows = [
        (at, call.op or call.node.name, call.node.id, _operators(call.node, seen), call.reason, None, None)
        for at, call in enumerate(calls)
    ]
    return pl.DataFrame(rows, schema=CALLS, orient="row")


def _operators(node: Node, seen: set[int]) -> int:
    """How many operators of the trace a call of the node stands for, the first time that it is called."""
    if node.id in seen:
        return 0
    seen.add(node.id)
    below = sum(other.kind == "operator" for other in node.below())
    return below + 1 if node.kind == "operator" or node.kernel else 0


def _timed(calls: pl.DataFrame, nodes: list[Node], linked: pl.DataFrame) -> tuple[pl.DataFrame, dict[int, int]]:
    """The calls with their times and gaps in the original, and the time of each node in its median iteration."""
    outer = [node.id for node in nodes if _computes(node) and not any(map(_computes, node.above()))]
    each = linked.group_by("iteration").agg(
        seen=pl.col("event_id").count(), ns=pl.col("dur_ns").filter(pl.col("node_id").is_in(outer)).sum()
    )
    whole = each.filter(pl.col("seen") >= 0.9 * pl.col("seen").max()).sort("ns", "iteration")
    median = linked.filter(pl.col("iteration") == whole["iteration"][(len(whole) - 1) // 2])
    dur_ns = {node: ns for node, ns in median.select("node_id", "dur_ns").iter_rows() if ns is not None}
    first = calls.filter(pl.col("node_id").is_first_distinct()).select("call", "node_id")
    steps = linked.filter(pl.col("iteration").is_in(whole["iteration"].implode())).join(first, on="node_id")
    ended = (pl.col("start_ns") + pl.col("dur_ns")).cum_max().shift(1)
    gaps = steps.sort("iteration", "call").with_columns(
        gap_ns=(pl.col("start_ns") - ended).clip(0).over("iteration", order_by="call")
    )
    times = pl.DataFrame({"node_id": [*dur_ns], "dur_ns": [*dur_ns.values()]}, schema_overrides={"dur_ns": pl.Int64})
    found = first.join(times, on="node_id", how="left").drop("node_id")
    found = found.join(gaps.group_by("call").agg(pl.col("gap_ns").median().cast(pl.Int64)), on="call", how="left")
    found = calls.drop("dur_ns", "gap_ns").join(found, on="call", how="left", maintain_order="left")
    return found.select(list(CALLS)), dur_ns


def _computes(node: Node) -> bool:
    return (node.kind == "operator" and not node.wrapper and node.op not in FREE) or node.kernel


def _coverage(
    nodes: list[Node], called: Mapping[int, bool], dur_ns: Mapping[int, int] | None
) -> tuple[float, float | None, float | None]:
    """Shares of operators, of their time, and of the time in calls; `called` says of nodes whether it is truly they."""
    sums: dict[int, np.ndarray] = {}  # of each node with all below it: operators, covered; their time, covered, called
    roots = [node for node in nodes if node.parent is None]
    for node in reversed([one for root in roots for one in (root, *root.below())]):
        below = sum((sums.pop(one.id) for one in node.children), np.zeros(5))
        if _computes(node):
            own_ns = (dur_ns or {}).get(node.id, 0)
            if node.id in called:
                is_true = called[node.id]
                below = np.array([below[0] + 1, is_true * (below[0] + 1), own_ns, is_true * own_ns, is_true * own_ns])
            else:
                by_parts = 0 < below[0] == below[1]
                below += [1, by_parts, own_ns - below[2], (own_ns - below[3]) * by_parts, 0]
        sums[node.id] = below
    count, covered, all_ns, covered_ns, called_ns = sum(sums.values(), np.zeros(5))
    timed = dur_ns is not None and all_ns > 0
    return (
        float(covered / count) if count else 0.0,
        float(covered_ns / all_ns) if timed else None,
        float(called_ns / all_ns) if timed else None,
    )


def _draw(flow: Dataflow, tables: pl.DataFrame | None, alpha: float) -> np.ndarray:
    """Numbers for lookups of embedding tables; the rules of their memory then say where they are."""
    known = {} if tables is None else {row["rows"]: row for row in complete_tables(tables).iter_rows(named=True)}
    drawn: list[np.ndarray] = []
    for memory in flow.memories:
        if memory.rule is None or memory.rule[0] != ROWS:
            continue
        rows, count = memory.rule[2], memory.bytes // flow.item_bytes(memory)
        bins = [known[rows][name] for name in BINS] if rows in known else []
        memory.rule = ["integers", 0, rows]
        if any(bins) or alpha:
            seed = memory.number
            found = reused_indices(rows, count, bins, seed) if any(bins) else zipf_indices(rows, count, alpha, seed)
            memory.rule = ["drawn", sum(map(len, drawn)), count]
            drawn.append(found)
    return np.concatenate([*drawn, np.zeros(0, np.int64)])


def _table(
    flow: Dataflow,
    calls: list[Call],
    source: dict[str, Any],
    groups: Mapping[str, list[int]],
    waits: Mapping[str, list[int | None]],
) -> dict[str, Any]:
    ops = sorted({call.op for call in calls})
    number = {op: at for at, op in enumerate(ops)}
    scopes = _Scopes()
    first: dict[int, Tensor] = {}
    for at, tensor in flow.slots:
        first.setdefault(at, tensor)
    rows = [
        {
            "op": number[call.op],
            "in": {name: _encoded(value) for name, value in call.arguments.items()},
            "out": [int(slot) for slot in call.out],
            "scope": scopes.number(call.node),
            **({"why": call.reason} if call.reason else {}),
            **({"comm": _talk(call)} if call.talk else {}),
            **{name: ns for name, of in waits.items() if (ns := of[at])},
        }
        for at, call in enumerate(calls)
    ]
    return {
        "format": "lumos_nb benchmark 1",
        "source": source,
        "groups": groups,
        "ops": ops,
        "scopes": scopes.rows,
        "memory": [[m.bytes, m.device, m.dtype, m.rule or common(first[m.number])] for m in flow.memories],
        "slots": [[at, t.offset, t.shape, t.strides, t.dtype] for at, t in flow.slots],
        "calls": rows,
    }


def _talk(call: Call) -> dict[str, Any]:
    talk = call.talk
    if talk is None or talk.what == "wait":
        return {"handle": call.handle}
    return {"handle": call.handle, "group": talk.group, "peer": talk.peer, "splits": talk.splits}


def _encoded(value: Any) -> Any:
    """A slot, or a number that is not finite, as an object: nothing else in the table is one."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if isinstance(value, Slot):
        return {"slot": int(value)}
    return [_encoded(one) for one in value] if isinstance(value, list) else value


class _Scopes:
    """What calls are within: functions and annotations, each with the one that it is within."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int]] = []
        self._number: dict[int, int] = {}

    def number(self, node: Node | None) -> int:
        """The place of what the node is within, itself included; -1 at the top."""
        path = []
        while node is not None and node.id not in self._number:
            path.append(node)
            node = node.parent
        at = -1 if node is None else self._number[node.id]
        for one in reversed(path):
            if one.kind not in ("process", "thread"):
                self.rows.append((one.name, at))
                at = len(self.rows) - 1
            self._number[one.id] = at
        return at
