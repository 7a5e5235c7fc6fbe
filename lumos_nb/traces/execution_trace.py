"""PyTorch execution traces, schema 1.0.1 to 1.1.1: which op had which arguments, and whose child it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from lumos_nb.errors import InputError, TraceError, shown
from lumos_nb.traces import execution_tables as tables
from lumos_nb.traces.execution_nodes import (
    ATTRIBUTE_OF,
    attribute_lists,
    node_rows,
    read_file,
    sides,
    with_checked_parents,
    with_mended_parents,
)
from lumos_nb.traces.export import Tables
from lumos_nb.traces.files import files_of
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.traces.json_text import top_level_keys
from lumos_nb.traces.trace import NOTES

_METADATA = ("schema", "pid", "time", "start_ts", "finish_ts")
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExecutionTrace(Tables):
    """What one rank executed: ops with their arguments, tensors with their storage, process groups.

    Attributes
    ----------
    nodes
        One row a node, in the file's order: `node_id`, `parent` (null at the root), `name`, `kind` (process, thread,
        operator, comm: a record of a collective, group: one of a process group, annotation, function: the rest),
        `rf_id` (the record function's number, which Kineto has too), `forward_parent`, `sequence` (of autograd; -1 if
        it has none), `scope`, `thread` and `forward_thread` (numbered from 1), `op_schema`, `kernel_backend`,
        `kernel_file`, `tensor_range`; of a trace that was linked to a profile also `start_ns`, `dur_ns`, `category` and
        `args`. Null where the file says nothing.
    arguments
        One row an argument: `node_id`, `side` (input or output), `position`, `type`, and as JSON `value`, `shape` and
        `strides` (null before schema 1.1.1).
    tensors
        One row for every tensor of an argument: `node_id`, `side`, `position`, `item` (its place in a list of tensors),
        `tensor_id`, `storage_id`, `offset` and `numel` in elements, `itemsize` in bytes, `device`, `dtype`, `shape`,
        `strides`. Two tensors that share a `storage_id` share memory.
    groups
        One row a process group: `group`, `description`, `backend`, `ranks` (empty: all of them), `group_size`.
    comms
        One row a record of a collective (NCCL's; gloo leaves none): `node_id`, `collective`, `sequence`, `group`,
        `description`, `rank`, `dtype`, `in_numel`, `out_numel`, `in_bytes`, `in_splits`, `out_splits`, `rank_start`,
        `rank_stride`, `group_size`.
    attributes
        Attributes that have no column of their own: `node_id`, `name`, `type`, `value` (JSON).
    notes
        Columns `what`, `count`, `reason`: what is odd about the file.
    metadata
        `schema`, `pid`, `time`, `start_ts`, `finish_ts` (ms), as the file has them.
    path
        The file.
    """

    nodes: pl.DataFrame
    arguments: pl.DataFrame
    tensors: pl.DataFrame
    groups: pl.DataFrame
    comms: pl.DataFrame
    attributes: pl.DataFrame
    notes: pl.DataFrame
    metadata: dict[str, Any]
    path: Path

    def _title(self) -> str:
        return (
            f"Execution trace of {len(self.nodes):,} nodes, schema {self.metadata['schema']} ({self.path.name}): "
            f"{self.tensors['tensor_id'].n_unique():,} tensors in {self.tensors['storage_id'].n_unique():,} storages, "
            f"{len(self.groups)} process groups"
        )

    def _overview(self) -> pl.DataFrame:
        threads = pl.col("thread").n_unique().alias("threads")
        return self.nodes.group_by("kind").agg(nodes=pl.len(), names=pl.col("name").n_unique(), threads=threads)

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._title(), self._overview().sort("nodes", "kind", descending=[True, False]))]


def load_execution_trace(path: str | Path, *, rank: int | None = None) -> ExecutionTrace:
    """Read the execution trace of one rank, as `torch.profiler.ExecutionTraceObserver` writes it.

    Parameters
    ----------
    path
        A file, plain or gzip; or a folder or tar archive that holds one or one a rank.
    rank
        Which of several, by the last number in the files' names; not needed where there is one.

    Returns
    -------
    ExecutionTrace
        Tables of nodes, arguments, tensors, process groups and collectives.

    Raises
    ------
    TraceError
        The file ends early or is no such trace, an id is missing or there twice, parents go round in a circle, an
        argument has no type; the message names file and node. `UnsupportedFormat`: of a schema that is not known.
    RunError
        There is no such path.

    Examples
    --------
    >>> et = load_execution_trace("runs/gpt", rank=0)
    >>> et.nodes.filter(name="aten::mm").height > 0
    True
    """
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int)):
        raise InputError(f"rank is {shown(rank)}: give a whole number, or leave it out.")
    with files_of(path) as files:
        found = files.traces if files.alone else [file for file in files.traces if is_execution_trace(file)]
        where = files.archive or Path(path)
        if not found:
            raise TraceError(f"{where} holds no execution trace: files are taken that begin with a schema and nodes.")
        file = _chosen(found, rank, where)
        try:
            return _read(file, where / file.name if files.archive else file)
        except TraceError as error:
            raise type(error)(f"{file}: {error}") from error


def is_execution_trace(path: Path) -> bool:
    """Whether the file begins as an execution trace does."""
    return {"schema", "nodes"}.issubset(top_level_keys(Blocks(path).head(_HEAD_BYTES)))


def _chosen(found: list[Path], rank: int | None, where: Path) -> Path:
    if len(found) == 1 and rank is None:
        return found[0]
    numbers = {path: [int(number) for number in re.findall(r"\d+", path.name)][-1:] for path in found}
    if rank is None:
        names = ", ".join(path.name for path in found[:3])
        raise TraceError(f"{where} holds {len(found)} execution traces ({names}, ...): give the rank of one.")
    of_rank = [path for path in found if numbers[path] == [rank]]
    if len(of_rank) != 1:
        raise TraceError(
            f"{where} holds {len(of_rank)} execution traces of rank {rank}, going by the last number in a file's name "
            f"({', '.join(path.name for path in found[:3])}, ...): give the path of the one that you mean."
        )
    return of_rank[0]


def _read(file: Path, shown: Path) -> ExecutionTrace:
    said, nodes = read_file(file)
    ids = np.array([node.id for node in nodes], np.int64)
    attributes = tables.attributes(ids, attribute_lists(nodes))
    rows = node_rows(nodes, attributes, ids)
    arguments = tables.arguments(ids, *sides(nodes))
    tensors = tables.tensors(arguments)
    rows, mended = with_mended_parents(rows)
    rows, lost = with_checked_parents(rows)
    notes = [("parents", lost, "nodes whose parent is not in the file: taken for roots")] if lost else []
    if mended:
        notes.append(
            ("parents", mended, "nodes whose parent gloo's records had muddled: by the order of calls instead")
        )
    return ExecutionTrace(
        rows,
        arguments,
        tensors,
        tables.groups(rows, arguments),
        tables.comms(rows, arguments, tensors),
        tables.other_attributes(ids, attributes, set(ATTRIBUTE_OF.values())),
        pl.DataFrame(notes, schema=NOTES, orient="row"),
        {name: getattr(said, name) for name in _METADATA},
        shown,
    )
