"""A graph as a job's Chakra files: groups numbered and listed, ranks that a symmetry makes equal written out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import polars as pl

from lumos_nb.errors import ChakraError, InputError
from lumos_nb.exchange.chakra.files import write_ranks
from lumos_nb.exchange.chakra.ranks import Job
from lumos_nb.exchange.chakra.tables import NODES, Nodes, completed
from lumos_nb.exchange.chakra.to_nodes import nodes_of
from lumos_nb.exchange.chakra.validation import TARGETS, check
from lumos_nb.graph import Graph
from lumos_nb.layout import GROUPS, Parallelism

VERSION = "0.0.4"
"""Of the schema, as the files of ASTRA-sim's examples state it."""
TOLERATED = ("attribute", "duration")
"""Findings that only a simulator minds: a trace may lack the bytes of a collective."""


class Estimated(Protocol):
    """A predicted step: a graph of one rank for each pipeline stage, and the layout that says who they stand for."""

    @property
    def graph(self) -> Graph:
        """The workload."""

    @property
    def layout(self) -> Parallelism:
        """How it is spread."""


def write(
    source: Graph | Estimated, folder: str | Path, *, prefix: str = "chakra", target: str | None = None
) -> list[Path]:
    """Write a workload as Chakra files, one a rank, with the JSON file of its process groups.

    All rules by which ops wait become data dependencies, lags become nodes, and times whole microseconds whose sum is
    kept. What the files would get wrong is refused before any is written.

    Parameters
    ----------
    source
        A graph, or an estimate, of which every rank of the layout is written: ranks that stand for one another differ
        in their groups and peers.
    folder
        Made if it is not there. `<prefix>.<rank>.et` and `<prefix>.groups.json` are replaced.
    target
        "astra-sim": collectives that it cannot run, missing sizes and absent ranks are refused, and the latency between
        a launch and its kernel is left out, which its one host resource would serialise.

    Returns
    -------
    list of Path
        The files written, the groups last.

    Raises
    ------
    ChakraError
        The workload cannot be said in Chakra, or not so that the target runs it; the message names the node.
    GraphError
        The graph's edges make a cycle, or it is unsound otherwise.
    InputError
        The target is unknown, or the source has no graph.

    Examples
    --------
    >>> write(build_graph(run), "out/", target="astra-sim")  # doctest: +SKIP
    """
    files, groups = files_of(source, target)
    return write_ranks(files, folder, prefix, groups)


def files_of(source: Graph | Estimated, target: str | None) -> tuple[Iterator[tuple[int, Nodes]], dict[str, list[int]]]:
    """The nodes of every rank, one after the other, and the groups; errors as of `write`, before any rank is given."""
    if target not in TARGETS:
        raise InputError(f"target is {target!r}; it may be None or 'astra-sim'.")
    graph = source if isinstance(source, Graph) else getattr(source, "graph", None)
    if not isinstance(graph, Graph):
        raise InputError(f"this writes a Graph or an estimate, not a {type(source).__name__}.")
    layout, stride = getattr(source, "layout", None), 1
    nodes = nodes_of(graph, latencies=target is None, rings=isinstance(layout, Parallelism))
    rings: dict[tuple[str, int], list[int]] = {}
    ranks = {rank: table for (rank,), table in nodes.partition_by("rank", as_dict=True).items()}
    if isinstance(layout, Parallelism):
        stages = {kind: [[*ranks]] if kind == "pp" else [[r] for r in ranks] for kind in GROUPS}
        numbers, groups = _numbered(stages, ranks)
        _refuse(Job.of(_named(ranks, numbers), groups), target)  # one pipeline stands for all
        stride = layout.world // layout.pp
        ranks = {rank: ranks[rank // stride] for rank in range(layout.world)}
        every = {kind: layout.groups(kind).tolist() for kind in GROUPS}
        numbers, groups = _numbered(every, ranks)
        rings = {(kind, rank): one for kind, sets in every.items() for one in sets for rank in one}
    else:
        numbers, groups = _numbered(_met(nodes, complete=target is not None), ranks)
        _refuse(Job.of(_named(ranks, numbers), groups), target)
    named = ((rank, _named({rank: table}, numbers, stride, rings)[rank]) for rank, table in ranks.items())
    return ((rank, Nodes.of(table, version=VERSION)) for rank, table in named), groups


Numbers = Mapping[tuple[str, int], str]
"""Name of a group, and a rank in it -> its number."""


def _met(nodes: pl.DataFrame, *, complete: bool) -> dict[str, list[list[int]]]:
    """The groups of collectives by name: ranks that meet, directly or by way of others."""
    comm = nodes.filter(type="COMM_COLL_NODE").with_columns(nth=pl.int_range(pl.len()).over("rank", "group"))
    uneven = comm.drop_nulls("meeting").filter(pl.col("nth").n_unique().over("meeting") > 1)
    if not uneven.is_empty():
        name, rank, group = uneven.select("name", "rank", "group").row(0)
        raise ChakraError(
            f"rank {rank} issues the collectives of group {group} in another order than others: {name!r}."
        )
    found: dict[str, list[set[int]]] = {}
    for name, members, rank in comm.select("group", "members", "rank").unique(maintain_order=True).iter_rows():
        tied = {*(members or ()), rank}
        apart = []
        for one in found.get(name, []):
            if one & tied:
                tied |= one
            else:
                apart.append(one)
        found[name] = [*apart, tied]
    if complete:
        size = {(name, rank): len(one) for name, sets in found.items() for one in sets for rank in one}
        for name, rank, stated in (
            comm.select("group", "rank", "group_size").drop_nulls().unique().sort("rank").iter_rows()
        ):
            if stated > size[name, rank]:
                there = size[name, rank]
                raise ChakraError(
                    f"group {name} of rank {rank} has {stated} ranks, of which {there} are in the graph; a simulator "
                    "needs them all: fill_ranks adds those without a trace."
                )
    return {name: [sorted(one) for one in sets] for name, sets in found.items()}


def _numbered(
    groups: Mapping[str, list[list[int]]], ranks: Mapping[int, pl.DataFrame]
) -> tuple[Numbers, dict[str, list[int]]]:
    """Numbers of groups, those that a rank uses, and their ranks."""
    used = {id(table): {*table.filter(type="COMM_COLL_NODE").get_column("group")} for table in ranks.values()}
    numbers: dict[tuple[str, int], str] = {}
    listed: dict[str, list[int]] = {}
    for name, sets in groups.items():
        for members in sets:
            there = [rank for rank in members if rank in ranks and name in used[id(ranks[rank])]]
            if there:
                number = str(len(listed))
                listed[number] = there
                numbers |= {(name, rank): number for rank in there}
    return numbers, listed


def _named(
    ranks: Mapping[int, pl.DataFrame],
    numbers: Numbers,
    stride: int = 1,
    rings: Mapping[tuple[str, int], list[int]] | None = None,
) -> dict[int, pl.DataFrame]:
    """Node tables of ranks, groups by their number, peers by their rank; `stride` ranks lie between two stages.

    In a ring, one of `rings` by name and rank, a rank sends to the next; where none is given, to itself.
    """
    tables = {}
    for rank, table in ranks.items():
        own = {name: number for (name, of), number in numbers.items() if of == rank}
        is_collective = pl.col("type") == "COMM_COLL_NODE"
        table = table.with_columns(
            *(pl.col(name) * stride + rank % stride for name in ("comm_src", "comm_dst")),
            pg_name=pl.when(is_collective).then(
                pl.col("group").replace_strict(own, default=None, return_dtype=pl.String)
            ),
        )
        for name in table["ring"].drop_nulls().unique() if rings and "ring" in table.columns else ():
            ring = (rings or {})[name, rank]
            at, sends = ring.index(rank), pl.col("type") == "COMM_SEND_NODE"
            table = table.with_columns(
                comm_dst=pl.when((pl.col("ring") == name) & sends).then(ring[at + 1 - len(ring)]).otherwise("comm_dst"),
                comm_src=pl.when((pl.col("ring") == name) & ~sends).then(ring[at - 1]).otherwise("comm_src"),
            )
        tables[rank] = completed(table.select(name for name in table.columns if name in NODES.columns))
    return tables


def _refuse(job: Job, target: str | None) -> None:
    """Raise ChakraError for the first finding that would make the files wrong."""
    found = check(job, target)
    if target is None:
        found = found.filter(~pl.col("rule").is_in(TOLERATED))
    if not found.is_empty():
        file, node, rule, message = found.row(0)
        raise ChakraError(
            f"nothing is written, for {len(found)} node(s) would be wrong: node {node} of {file}, {rule}: {message}."
        )
