"""A graph as a job's Chakra files: groups numbered and listed, ranks that a symmetry makes equal written out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import polars as pl

from lumos_nb.errors import ChakraError, InputError, is_whole, items_of, named, require_kinds, require_text, shown
from lumos_nb.exchange.chakra.files import write_ranks
from lumos_nb.exchange.chakra.ranks import Job
from lumos_nb.exchange.chakra.tables import NODES, Nodes
from lumos_nb.exchange.chakra.to_nodes import nodes_of
from lumos_nb.exchange.chakra.validation import check, require_target
from lumos_nb.graph import Graph
from lumos_nb.layout import GROUPS, Parallelism

VERSION = "0.0.4"
"""Of the schema, as the files of ASTRA-sim's examples state it."""
TOLERATED = ("attribute", "duration")
"""Findings that only a simulator minds: a trace may lack the bytes of a collective."""


class Estimated(Protocol):
    """A predicted step; one with a `layout` has a rank of each pipeline stage, which stands for all of the stage."""

    @property
    def graph(self) -> Graph:
        """The workload."""


def write(
    source: Graph | Estimated,
    folder: str | Path,
    *,
    prefix: str = "chakra",
    target: str | None = None,
    ranks: Iterable[int] | None = None,
    progress: Callable[[str], None] = lambda _doing: None,
) -> list[Path]:
    """Write a workload as Chakra files, one a rank, with the JSON file of its process groups.

    All rules by which ops wait become data dependencies, lags become nodes, and times whole microseconds whose sum is
    kept. What the files would get wrong is refused before any is written.

    Parameters
    ----------
    source
        A graph, or an estimate, of which every rank is written: those that stand for one another differ in their groups
        and peers. One rank at a time is in memory, beside one of each pipeline stage.
    folder
        Made if it is not there. `<prefix>.<rank>.et` and `<prefix>.groups.json` are replaced.
    target
        "astra-sim": collectives that it cannot run, missing sizes and absent ranks are refused, and the latency between
        a launch and its kernel is left out, which its one host resource would serialise.
    ranks
        Those whose files are written, all by default; the groups are always those of all.
    progress
        Told which rank is written.

    Returns
    -------
    list of Path
        The files written, the groups last.

    Raises
    ------
    ChakraError
        The workload cannot be said in Chakra, or not so that the target runs it; the message names the node. Or the
        folder holds files of other ranks, which would be taken for this job's.
    GraphError
        The graph's edges make a cycle, or it is unsound otherwise.
    InputError
        The target or a rank is unknown, or the source has no graph.

    Examples
    --------
    >>> [file.name for file in write(graph, "out/", target="astra-sim")]
    ['chakra.0.et', 'chakra.1.et', 'chakra.groups.json']
    """
    job = RankFiles.of(source, target)
    require_text(prefix=prefix)
    require_kinds(progress=(progress, Callable))
    asked = [*job.tables] if ranks is None else items_of("ranks", ranks, "ranks of the workload, such as [0, 1]")
    if unknown := [rank for rank in asked if not (is_whole(rank, 0) and rank in job.tables)]:
        raise InputError(
            f"there is no rank {shown(unknown[0])}; the workload has {len(job.tables)}: {[*job.tables][:8]}."
        )
    chosen = [*dict.fromkeys(asked)]
    ours = {f"{prefix}.{rank}.et" for rank in job.tables}
    for file in sorted(named(folder, ChakraError).glob("*.et*")):
        if file.name.startswith(f"{prefix}.") and file.name not in ours:
            raise ChakraError(f"{file} is none of this job's {len(ours)} files: delete it, or give another folder.")

    def files() -> Iterator[tuple[int, Nodes]]:
        for k, rank in enumerate(chosen):
            progress(f"writing rank {rank}, {k + 1} of {len(chosen)}")
            yield rank, job.nodes(rank)

    return write_ranks(files(), folder, prefix, job.groups)


MOST_RANKS = 1_000_000
"""Of a job: its groups list each of them."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What the files of a job will hold, put together when a rank is asked for.

    Attributes
    ----------
    tables
        Nodes by rank; ranks that a symmetry makes equal share them.
    groups
        Ranks by the number of their group.
    numbers
        Of each rank: number of its group by its name.
    stride
        Ranks between two pipeline stages.
    rings
        Name of a group and rank -> ranks round which messages go.
    """

    tables: Mapping[int, pl.DataFrame]
    groups: dict[str, list[int]]
    numbers: Mapping[int, Mapping[str, str]]
    stride: int = 1
    rings: Mapping[tuple[str, int], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Graph | Estimated, target: str | None) -> RankFiles:
        """The files of a graph or an estimate; errors as of `write`."""
        require_target(target)
        graph = source if isinstance(source, Graph) else getattr(source, "graph", None)
        if not isinstance(graph, Graph):
            raise InputError(
                f"this writes a graph or an estimate, not a {type(source).__name__}: ln.build_graph makes one."
            )
        layout = getattr(source, "layout", None)
        layout = layout if isinstance(layout, Parallelism) else None
        if layout and layout.world > MOST_RANKS:
            raise InputError(f"the layout has {layout.world:,} ranks; files are made of {MOST_RANKS:,} at most.")
        nodes = nodes_of(graph, latencies=target is None, rings=layout is not None)
        nodes = _in_turn(nodes) if target else nodes
        tables = {rank: table for (rank,), table in nodes.partition_by("rank", as_dict=True).items()}
        if layout is None:
            met = _met(nodes, complete=target is not None)
        else:
            met = {kind: [[*tables]] if kind == "pp" else [[rank] for rank in tables] for kind in GROUPS}
        found = cls(tables, *_numbered(met, tables))
        _refuse(found, target)  # of an estimate one pipeline stands for all
        if layout is None:
            return found
        every = {kind: layout.groups(kind).tolist() for kind in GROUPS}
        stride = layout.world // layout.pp
        tables = {rank: tables[rank // stride] for rank in range(layout.world)}
        rings = {(kind, rank): one for kind, sets in every.items() for one in sets for rank in one}
        return cls(tables, *_numbered(every, tables), stride, rings)

    def nodes(self, rank: int) -> Nodes:
        """The nodes of a rank, groups by their number, peers by their rank, in a ring the next and the one before."""
        is_collective, sends = pl.col("type") == "COMM_COLL_NODE", pl.col("type") == "COMM_SEND_NODE"
        number = pl.col("group").replace_strict(self.numbers.get(rank, {}), default=None, return_dtype=pl.String)
        table = self.tables[rank].with_columns(
            *(pl.col(name) * self.stride + rank % self.stride for name in ("comm_src", "comm_dst")),
            pg_name=pl.when(is_collective).then(number),
        )
        for name in table["ring"].drop_nulls().unique() if self.rings else ():
            ring = self.rings[name, rank]
            at, on_it = ring.index(rank), pl.col("ring") == name
            table = table.with_columns(
                comm_dst=pl.when(on_it & sends).then(ring[at + 1 - len(ring)]).otherwise("comm_dst"),
                comm_src=pl.when(on_it & ~sends).then(ring[at - 1]).otherwise("comm_src"),
            )
        return Nodes.of(table.select(name for name in table.columns if name in NODES.columns), version=VERSION)


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
                    "needs them all: ln.fill_ranks adds those without a trace."
                )
    return {name: [sorted(one) for one in sets] for name, sets in found.items()}


def _in_turn(nodes: pl.DataFrame) -> pl.DataFrame:
    """Collectives of a group that are not ready before the one before them, as a group issues one after the other.

    Those of threads of their own (gloo) may be, and a simulator would match them as they get ready.
    """
    needs: dict[tuple[int, str], tuple[int, list[int]]] = {}
    made = []
    for rank, group, id, own in (
        nodes.filter(type="COMM_COLL_NODE").select("rank", "group", "id", "data_deps").iter_rows()
    ):
        before, of_before = needs.get((rank, group), (-1, []))
        own = own or []
        needs[rank, group] = id, own if before in own else sorted({*own, *of_before})
        made.append((rank, id, needs[rank, group][1]))
    schema = {"rank": nodes.schema["rank"], "id": pl.UInt64(), "turn": pl.List(pl.UInt64())}
    turns = pl.DataFrame(made, schema=schema, orient="row")
    nodes = nodes.join(turns, on=["rank", "id"], how="left", maintain_order="left")
    return nodes.with_columns(data_deps=pl.coalesce("turn", "data_deps")).drop("turn")


def _numbered(
    groups: Mapping[str, list[list[int]]], tables: Mapping[int, pl.DataFrame]
) -> tuple[dict[str, list[int]], dict[int, dict[str, str]]]:
    """The groups that ranks use, by number, and for each rank the numbers by name."""
    used = {id(table): {*table.filter(type="COMM_COLL_NODE").get_column("group")} for table in tables.values()}
    numbers: dict[int, dict[str, str]] = {rank: {} for rank in tables}
    listed: dict[str, list[int]] = {}
    for name, sets in groups.items():
        for members in sets:
            there = [rank for rank in members if rank in tables and name in used[id(tables[rank])]]
            if there:
                number = str(len(listed))
                listed[number] = there
                for rank in there:
                    numbers[rank][name] = number
    return listed, numbers


def _refuse(files: RankFiles, target: str | None) -> None:
    """Raise ChakraError for the first finding that would make the files wrong."""
    found = check(Job.of({rank: files.nodes(rank) for rank in files.tables}, files.groups), target)
    if target is None:
        found = found.filter(~pl.col("rule").is_in(TOLERATED))
    if not found.is_empty():
        file, node, rule, message = found.row(0)
        raise ChakraError(
            f"nothing is written, for {len(found)} node(s) would be wrong: node {node} of {file}, {rule}: {message}."
        )
