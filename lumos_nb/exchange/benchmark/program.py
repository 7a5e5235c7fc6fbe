"""From an execution trace to a program that runs its operators: a folder with bench.py, workload.json and a README."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lumos_nb.display import format_bytes, format_share, html_table, text_table
from lumos_nb.errors import InputError
from lumos_nb.exchange.benchmark.calls import Node, Tensor, choose, read_nodes, schema_names, tensors_of
from lumos_nb.exchange.benchmark.collectives import DEFAULT_GROUP, Communications
from lumos_nb.exchange.benchmark.dataflow import STAND_IN, Call, Dataflow, Slot
from lumos_nb.exchange.benchmark.values import common
from lumos_nb.traces.execution_trace import ExecutionTrace, is_execution_trace, load_execution_trace
from lumos_nb.traces.files import files_of

RUNNER = Path(__file__).with_name("bench.py")


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """What a benchmark runs.

    Attributes
    ----------
    table
        What workload.json holds: operators, memory, slots, calls.
    calls
        One row a call: `call`, `op`, `node_id` of the trace, `operators` (nodes of the trace that it stands for), and
        for a stand-in the `reason` (else empty).
    notes
        `what` was assumed, and the `count` of it.
    """

    table: dict[str, Any]
    calls: pl.DataFrame
    notes: pl.DataFrame

    @property
    def coverage(self) -> float:
        """The share of the trace's operators that calls stand for; stand-ins stand for none."""
        covered, total = (int(rows["operators"].sum()) for rows in (self.calls.filter(reason=""), self.calls))
        return covered / total if total else 0.0

    def _title(self) -> str:
        made = {slot for call in self.table["calls"] for slot in call["out"]}
        given = {row[0] for slot, row in enumerate(self.table["slots"]) if slot not in made}
        size_bytes = sum(self.table["memory"][at][0] for at in given)
        return (
            f"Benchmark of {len(self.calls):,} calls for {self.calls['operators'].sum():,} operators, "
            f"{format_share(self.coverage)} of them covered; {format_bytes(size_bytes)} given"
        )

    def _overview(self) -> pl.DataFrame:
        stand_ins = self.calls.filter(pl.col("reason") != "")
        return stand_ins.group_by("op", "reason").agg(calls=pl.len(), operators=pl.col("operators").sum()).sort("op")

    def __repr__(self) -> str:
        return text_table(self._overview(), caption=f"{self._title()}; stand-ins:")

    def _repr_html_(self) -> str:
        return html_table(self._overview(), caption=f"{self._title()}; stand-ins:")


def workload(trace: ExecutionTrace | str | Path, *, rank: int | None = None, step: int | None = None) -> Workload:
    """Read what a trace's operators did as a table of calls.

    Parameters
    ----------
    trace
        An execution trace, or the path of one; a folder or archive of several takes a `rank`.
    rank
        Which rank's.
    step
        The number in a ProfilerStep# mark; by default the first step that is marked, or else the whole trace.

    Returns
    -------
    Workload
        Calls, memory, and what could not be called.

    Raises
    ------
    TraceError
        There is no such step, or the file is no execution trace.

    Examples
    --------
    >>> workload("runs/gpt", rank=0).coverage  # doctest: +SKIP
    """
    found = trace if isinstance(trace, ExecutionTrace) else load_execution_trace(trace, rank=rank)
    nodes = read_nodes(found, step)
    registry = Registry()
    chosen = choose(nodes, registry.is_composite)
    flow = Dataflow()
    talks = Communications(found)
    for node in chosen:
        talk = talks.of(node)
        if talk is not None:
            flow.communicate(node, talk)
            continue
        if node.kind == "comm":
            flow.notes["records of communication that no operator issues are left out"] += 1
            continue
        bound = registry.bind(node, talks.groups)
        if isinstance(bound, str):
            flow.add(node, STAND_IN, {"inputs": [*tensors_of(node.inputs)]}, bound)
        else:
            flow.add(node, node.op or "", bound)
    return _tabled(flow, nodes, found, talks.groups, _rank(found, rank))


def _rank(trace: ExecutionTrace, rank: int | None) -> int:
    """Whose trace it is: as given, else as NCCL's records say, else by the last number in the file's name."""
    said = [rank, trace.comms["rank"].drop_nulls().max(), *re.findall(r"\d+", trace.path.name)[-1:], 0]
    return next(int(str(one)) for one in said if one is not None)


class Registry:
    """torch's operators by the names that a trace has."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def find(self, name: str) -> Any:
        """The operator, or a line that says why there is none."""
        from lumos_nb.exchange.benchmark.bench import Unusable, find_op

        if name not in self._found:
            try:
                self._found[name] = find_op(name)
            except Unusable as error:
                self._found[name] = str(error)
        return self._found[name]

    def is_composite(self, name: str) -> bool | None:
        """Whether it does nothing but call other operators; None if there is no such operator to call."""
        import torch

        if isinstance(found := self.find(name), str):
            return None
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(found.name(), "CompositeImplicitAutograd"))

    def bind(self, node: Node, groups: Mapping[str, list[int]]) -> dict[str, Any] | str:
        """Arguments by the names that this torch has for them, or a line that says why they do not fit."""
        if node.op is None:
            return (
                f"{node.name} is a kernel of its own" if node.kernel else f"{node.name} has no schema that can be read"
            )
        found = self.find(node.op)
        if isinstance(found, str):
            return found
        names = schema_names(node.schema or "")
        if len(names) != len(node.inputs):
            return f"{node.op} has {len(node.inputs)} arguments in the trace, {len(names)} in its schema"
        recorded = dict(zip(names, node.inputs, strict=True))
        bound: dict[str, Any] = {}
        for argument in found._schema.arguments:
            if argument.name in recorded:
                bound[argument.name] = _constant(argument, recorded[argument.name])
                if argument.name == "group_name" and bound[argument.name] not in groups:
                    bound[argument.name] = DEFAULT_GROUP
            elif not argument.has_default_value():
                return f"{node.op} takes {argument.name}, which the trace does not have"
        return bound


def _constant(argument: Any, value: Any) -> Any:
    """A value as recorded; a trace writes six decimals, so that an epsilon of 0 is the schema's, or a small number."""
    if argument.name in ("eps", "epsilon") and value == 0:
        return argument.default_value or 1e-8
    if value is None and "Optional" not in str(argument.type):
        if argument.has_default_value():
            return argument.default_value
        if str(argument.type) in ("number", "float"):  # not finite: what attention masks its scores with
            return -65504.0
    return value


def _tabled(
    flow: Dataflow, nodes: list[Node], trace: ExecutionTrace, groups: Mapping[str, list[int]], rank: int
) -> Workload:
    calls = flow.with_waits()
    ops = sorted({call.op for call in calls})
    number = {op: at for at, op in enumerate(ops)}
    scopes = _Scopes()
    first: dict[int, Tensor] = {}
    for at, tensor in flow.slots:
        first.setdefault(at, tensor)
    table = {
        "format": "lumos_nb benchmark 1",
        "source": {"schema": trace.metadata["schema"], "nodes": len(nodes), "rank": rank},
        "groups": groups,
        "ops": ops,
        "scopes": scopes.rows,
        "memory": [[m.bytes, m.device, m.dtype, m.rule or common(first[m.number])] for m in flow.memories],
        "slots": [[at, t.offset, t.shape, t.strides, t.dtype] for at, t in flow.slots],
        "calls": [
            {
                "op": number[call.op],
                "in": {name: _encoded(value) for name, value in call.arguments.items()},
                "out": [int(slot) for slot in call.out],
                "scope": scopes.number(call.node),
                **({"why": call.reason} if call.reason else {}),
                **({"comm": _talk(call)} if call.talk else {}),
            }
            for call in calls
        ],
    }
    return Workload(table, _call_table(calls, nodes), _note_table(flow.notes))


def _talk(call: Call) -> dict[str, Any]:
    talk = call.talk
    if talk is None or talk.what == "wait":
        return {"handle": call.handle}
    return {"handle": call.handle, "group": talk.group, "peer": talk.peer, "splits": talk.splits}


def _encoded(value: Any) -> Any:
    """A slot as an object with its number: nothing else in the table is one."""
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


def _call_table(calls: list[Call], nodes: list[Node]) -> pl.DataFrame:
    seen: set[int] = set()
    rows = [
        (at, call.op or call.node.name, call.node.id, _operators(call.node, seen), call.reason)
        for at, call in enumerate(calls)
    ]
    columns = {"call": pl.Int64(), "op": pl.String(), "node_id": pl.Int64(), "operators": pl.Int64()}
    return pl.DataFrame(rows, schema=columns | {"reason": pl.String()}, orient="row")


def _operators(node: Node, seen: set[int]) -> int:
    """How many operators of the trace a call of the node stands for, the first time that it is called."""
    if node.id in seen:
        return 0
    seen.add(node.id)
    return (node.kind == "operator" or node.kernel) + sum(other.kind == "operator" for other in node.below())


def _note_table(notes: Mapping[str, int]) -> pl.DataFrame:
    return pl.DataFrame([*notes.items()], schema={"what": pl.String(), "count": pl.Int64()}, orient="row")


def generate(
    trace: ExecutionTrace | str | Path, out: str | Path, *, rank: int | None = None, step: int | None = None
) -> Workload:
    """Write a benchmark of a trace into a folder: bench.py, which needs only torch, workload.json and README.md.

    Parameters
    ----------
    trace, rank, step
        As `workload` takes them.
    out
        The folder; made if it is not there. Files of an older benchmark in it are replaced.

    Returns
    -------
    Workload
        What was written; printed, it says what is covered.

    Raises
    ------
    TraceError
        There is no such step, or the file is no execution trace.
    InputError
        `out` is a file.

    Examples
    --------
    >>> generate("runs/gpt", "bench/gpt")  # doctest: +SKIP
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder.")
    ranks = [rank] if rank is not None or isinstance(trace, ExecutionTrace) else _ranks_at(trace)
    made = [workload(trace, rank=one, step=step) for one in ranks]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("workload*.json"):
        old.unlink()
    shutil.copyfile(RUNNER, folder / RUNNER.name)
    for one in made:
        name = "workload.json" if len(made) == 1 else f"workload-{one.table['source']['rank']}.json"
        (folder / name).write_bytes(msgspec.json.encode(one.table))
    return made[0]


def _ranks_at(path: str | Path) -> list[int | None]:
    """Ranks whose execution traces are there, by the last number in a file's name; None of a single one."""
    with files_of(path) as files:
        found = [file for file in files.traces if is_execution_trace(file)]
        numbers = [int(number) for file in found for number in re.findall(r"\d+", file.name)[-1:]]
    return [*sorted(set(numbers))] if len(found) > 1 else [None]
