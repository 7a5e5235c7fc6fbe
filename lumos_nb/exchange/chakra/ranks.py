"""The files of a job together: nodes of all ranks, their dependencies, and which meet on the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb._jit import jit
from lumos_nb._replay_kernels import offsets, order_by, topological
from lumos_nb.errors import ChakraError
from lumos_nb.exchange.chakra.files import Groups, rank_files, read_groups, stream_file
from lumos_nb.exchange.chakra.tables import NODES, Nodes

Int64s = NDArray[np.int64]
MESSAGE_TYPES = ("COMM_SEND_NODE", "COMM_RECV_NODE")
_KEPT = [name for name in NODES.columns if name != "frame"]


@dataclass(frozen=True)
class Job:
    """The nodes of all ranks.

    Attributes
    ----------
    nodes
        `NODES` without `frame`, rank by rank, with `row` (its number here), `rank` and `file`.
    groups
        Ranks by process group; empty where no file lists them.
    faults
        Rank's file -> why what follows in it could not be read.
    files
        Rank -> name of its file.
    """

    nodes: pl.DataFrame
    groups: Groups
    files: Mapping[int, str]
    faults: Mapping[str, str]

    @classmethod
    def of(
        cls, ranks: Mapping[int, Nodes | pl.DataFrame], groups: Groups, files: Mapping[int, str] | None = None
    ) -> Job:
        """The job of nodes by rank."""
        names = files or {rank: f"chakra.{rank}.et" for rank in ranks}
        tables = [
            (nodes.table if isinstance(nodes, Nodes) else nodes)
            .select(_KEPT)
            .with_columns(pl.lit(rank, pl.Int64).alias("rank"), pl.lit(names[rank]).alias("file"))
            for rank, nodes in ranks.items()
        ]
        return cls(pl.concat(tables).with_row_index("row"), groups, names, {})

    @classmethod
    def read(cls, path: str | Path, *, strict: bool = True) -> Job:
        """The files of a folder, or one file; unless `strict`, what is sound of each, with its fault.

        Raises
        ------
        ChakraError
            There is no file, or one is no Chakra file.
        """
        ranks: dict[int, Nodes | pl.DataFrame] = {}
        faults: dict[str, str] = {}
        files = rank_files(path)
        for rank, file in files.items():
            parts = [NODES.empty().select(_KEPT)]
            try:
                parts.extend(part.select(_KEPT) for part in stream_file(file) if isinstance(part, pl.DataFrame))
            except ChakraError as error:
                if strict:
                    raise
                faults[file.name] = str(error)
            ranks[rank] = pl.concat(parts)
        named = {rank: file.name for rank, file in files.items()}
        job = cls.of(ranks, read_groups(path), named)
        return cls(job.nodes, job.groups, named, faults)

    @property
    def several(self) -> bool:
        """Whether there are several ranks, which then must go together."""
        return len(self.files) > 1

    def members(self, group: str | None) -> Sequence[int]:
        """The ranks of a group; all where a node names none."""
        return sorted(self.files) if group is None else self.groups.get(group, ())

    @cached_property
    def edges(self) -> pl.DataFrame:
        """Dependencies: `src` (null: no such node is there), `dst` (rows), `needs`, the id named, and if of `data`."""
        ids = self.nodes.select("rank", "id", src="row").unique(["rank", "id"], keep="first", maintain_order=True)
        parts = [
            self.nodes.select("rank", pl.col(name).alias("needs"), dst="row", data=pl.lit(name == "data_deps"))
            .explode("needs")
            .drop_nulls("needs")
            for name in ("ctrl_deps", "data_deps")
        ]
        return pl.concat(parts).join(ids, left_on=["rank", "needs"], right_on=["rank", "id"], how="left")

    @cached_property
    def known_edges(self) -> tuple[Int64s, Int64s]:
        """Rows that wait for each other: sources and destinations."""
        known = self.edges.drop_nulls("src").select("src", "dst").unique()
        return known["src"].cast(pl.Int64).to_numpy(), known["dst"].cast(pl.Int64).to_numpy()

    @cached_property
    def order(self) -> Int64s:
        """Rows in an order that dependencies allow, each rank's as near to its file as can be; those of cycles last."""
        order = sorted_rows(len(self.nodes), *self.known_edges)
        stuck = np.ones(len(self.nodes), bool)
        stuck[order] = False
        return np.concatenate([order, np.flatnonzero(stuck)])

    @cached_property
    def collectives(self) -> pl.DataFrame:
        """Collectives that meet: nodes, `nth` of their rank in their group; `pg_name` null for all ranks."""
        here = self._in_order().filter(
            (pl.col("type") == "COMM_COLL_NODE") & ~pl.col("is_cpu_op").fill_null(value=False)
        )
        return here.with_columns(nth=pl.int_range(pl.len()).over("rank", "pg_name"))

    @cached_property
    def messages(self) -> pl.DataFrame:
        """Sends and receives: nodes, from `source` to `target`, `nth` with that pair and tag."""
        here = self._in_order().filter(pl.col("type").is_in(MESSAGE_TYPES))
        is_send = pl.col("type") == "COMM_SEND_NODE"
        here = here.with_columns(
            source=pl.when(is_send).then("rank").otherwise("comm_src"),
            target=pl.when(is_send).then("comm_dst").otherwise("rank"),
        )
        return here.with_columns(nth=pl.int_range(pl.len()).over("type", "source", "target", "comm_tag"))

    def latest_behind(self, rows: Int64s, number: Int64s) -> Int64s:
        """Of rows with numbers in their order, the highest number of those that each waits for at last; -1: none."""
        src, dst = self.known_edges
        of = np.full(len(self.nodes), -1)
        of[rows] = number
        ptr = offsets(np.sort(src).astype(np.int32), len(of))
        return highest_before(self.order, ptr, dst[np.argsort(src, kind="stable")], of)[rows]

    def _in_order(self) -> pl.DataFrame:
        return self.nodes[self.order] if len(self.nodes) else self.nodes


def sorted_rows(n: int, src: Int64s, dst: Int64s) -> Int64s:
    """Rows in topological order, always the lowest that can go; without those that cycles hold up."""
    by_source = order_by(src.astype(np.int32), np.arange(len(src), dtype=np.int32), n)
    return topological(offsets(src.astype(np.int32), n), dst.astype(np.int32)[by_source]).astype(np.int64)


@jit("int64[::1](int64[::1], uint32[::1], int64[::1], int64[::1])")
def highest_before(order: Int64s, ptr: NDArray[np.uint32], dst: Int64s, number: Int64s) -> Int64s:
    """The highest number on any path to each row, but its own; edges lie by source from `ptr` on, -1 is none."""
    found = np.full(len(order), -1)
    for row in order:
        out = max(number[row], found[row])
        for k in range(ptr[row], ptr[row + 1]):
            found[dst[k]] = max(found[dst[k]], out)
    return found
