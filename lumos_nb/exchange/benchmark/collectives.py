"""Collectives and messages of a trace: which, on which tensors, in which group, and where their results are waited for.

Names, groups and waits come from NCCL's records where there are some; else from the recorder's `comm::` and `wait::`
labels, else from the operators' own arguments. One that nothing waits for in the trace is waited for where its memory
is next used, as DDP and NCCL's streams do, and at the latest at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from lumos_nb.calls import COMM_LABEL
from lumos_nb.costs.calibration import Calibration
from lumos_nb.errors import InputError
from lumos_nb.exchange.benchmark.calls import ITEM_BYTES, Node, Tensor, schema_names, tensors_of
from lumos_nb.fake_group import C10D_OPS, FUNCTIONAL_NAMESPACES
from lumos_nb.labels import FUNCTIONAL_OPS
from lumos_nb.layout import Cluster
from lumos_nb.traces.execution_trace import ExecutionTrace
from lumos_nb.workloads.pricing import collective_prices, place, prices_of

LABEL = re.compile(COMM_LABEL)
DEFAULT_GROUP = "0"
_OUT = {"output_tensors", "output_tensor", "output", "outputs", "output_lists"}
_IN = {"input_tensors", "input_tensor", "input", "inputs", "input_lists"}
_PEER = ("dst", "src", "root_rank")


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective, a message, or the wait for one.

    Attributes
    ----------
    what
        As `fake_group.C10D_OPS` calls it, or wait.
    label
        What a wait has in common with what it waits for; empty if nothing waits for it in the trace.
    group, peer
        The group's name, and the rank in it that sends, receives or is the root.
    out, given
        Tensors for results, and those that the rank gives; in place, the first alone.
    splits
        Rows for and from each rank (out, in), where they are not equal.
    """

    what: str
    label: str
    group: str = ""
    peer: int | None = None
    out: tuple[Tensor, ...] = ()
    given: tuple[Tensor, ...] = ()
    splits: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def group_ranks(trace: ExecutionTrace) -> dict[str, list[int]]:
    """Ranks of each process group; the default group's, all of them, stand at `DEFAULT_GROUP`."""
    ranks = {name: sorted(of) for name, of in trace.groups.select("group", "ranks").iter_rows()}
    sizes = dict(trace.groups.select("group", "group_size").iter_rows())
    said = trace.comms["group_size"].max(), trace.comms["in_splits"].list.len().max()
    world = max([1, *sizes.values(), *(int(str(one)) for one in said if one is not None)])
    known = {name: of or [*range(world)] for name, of in ranks.items()}
    return {DEFAULT_GROUP: [*range(world)], **known}


class Communications:
    """What the nodes of a trace communicate."""

    def __init__(self, trace: ExecutionTrace) -> None:
        self.groups = group_ranks(trace)
        self.records = {row["node_id"]: row for row in trace.comms.iter_rows(named=True)}

    def of(self, node: Node) -> Communication | None:
        """What the node communicates; None if it does not, or in a way that is not known."""
        if node.kind == "annotation":
            return Communication("wait", node.name.partition("::")[2])
        if node.kind == "comm":
            record = self.records.get(node.id)
            waits = record is not None and record["collective"] == "wait"
            return Communication("wait", f"seq {record['sequence']}") if record and waits else None
        name = (node.op or "").partition("::")[2]
        if not (node.op or "").startswith("c10d::") or name not in C10D_OPS:
            return None
        arguments = dict(zip(schema_names(node.schema or ""), node.inputs, strict=False))
        label, group = self._label(node)
        out = [*_tensors(arguments, _OUT)] or [*_tensors(arguments, {"tensors"})]
        splits = [tuple(arguments.get(f"{side}_split_sizes") or []) for side in ("output", "input")]
        return Communication(
            C10D_OPS[name],
            label,
            group,
            next((arguments[peer] for peer in _PEER if peer in arguments), None),
            tuple(out),
            tuple(_tensors(arguments, _IN)),
            (splits[0], splits[1]),
        )

    def _label(self, node: Node) -> tuple[str, str]:
        """What its wait is known by, and its group."""
        record = next((self.records[one.id] for one in node.below() if one.id in self.records), None)
        if record is not None:
            name = record["group"]
            return f"seq {record['sequence']}", name if name in self.groups else DEFAULT_GROUP
        for above in node.above():
            if found := LABEL.match(above.name):
                return above.name.partition("::")[2], found[3] if found[3] in self.groups else DEFAULT_GROUP
        return "", DEFAULT_GROUP


def _tensors(arguments: dict[str, Any], names: Iterable[str]) -> Iterable[Tensor]:
    for name, value in arguments.items():
        if name in names:
            yield from tensors_of([value])


_LIKE = {"send": "send_recv", "recv": "send_recv", "reduce": "broadcast", "gather": "all_gather"}
_LIKE |= {"scatter": "all_gather", "barrier": "all_reduce"}
"""Collectives that no model has -> one that moves the same bytes over the busiest link."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a collective's time depends on: its name in models, global ranks, and bytes as nccl-tests count them."""

    collective: str
    ranks: tuple[int, ...]
    size_bytes: int


def asked_of(
    op: str, node: Node, talk: Communication | None, groups: Mapping[str, list[int]], rank: int
) -> Asked | None:
    """What a call's time depends on if it begins a collective or a message; None of other calls."""
    if talk is not None:
        if talk.what == "wait":
            return None
        ranks = groups[talk.group]
        if talk.what in ("send", "recv") and talk.peer is not None:
            ranks = [rank, ranks[talk.peer]]
        size_bytes = max(_bytes_of(talk.out), _bytes_of(talk.given))
        return Asked(_LIKE.get(talk.what, talk.what), tuple(ranks), size_bytes)
    space, _, name = op.partition("::")
    what = FUNCTIONAL_OPS.get(name.partition(".")[0])
    if what is None or space not in FUNCTIONAL_NAMESPACES:
        return None
    named = dict(zip(schema_names(node.schema or ""), node.inputs, strict=False)).get("group_name")
    sides = [_bytes_of(tensors_of(side)) for side in (node.inputs, node.outputs)]
    return Asked(what, tuple(groups.get(str(named), groups[DEFAULT_GROUP])), max(sides))


def delays_ns(asked: Sequence[Asked | None], cluster: Cluster, calibration: Calibration | None) -> list[int | None]:
    """How long each takes on a cluster whose nodes hold neighbouring ranks, by a calibration's collective model."""
    last = max((rank for one in asked if one is not None for rank in one.ranks), default=0)
    if last >= cluster.gpus:
        raise InputError(f"rank {last} of the trace's groups has no place among the cluster's {cluster.gpus} GPUs.")
    several = [one for one in dict.fromkeys(asked) if one is not None and len(one.ranks) > 1]
    rows = [(one.collective, max(one.size_bytes, 1), *place(np.array([one.ranks]), cluster)) for one in several]
    took: dict[Asked | None, int | None] = {one: 0 for one in asked if one is not None}
    if rows:
        table = pl.DataFrame(rows, schema=["collective", "size_bytes", "nodes", "gpus"], orient="row")
        prices = collective_prices(table, cluster, prices_of(cluster, calibration))["dur_us"]
        took |= {one: round(1e3 * dur_us) for one, dur_us in zip(several, prices, strict=True)}
    return [took.get(one) for one in asked]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel * ITEM_BYTES[tensor.dtype] for tensor in tensors)
