"""Nodes of an execution trace: the text of its file to one row a node."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import polars as pl

from lumos_nb.errors import UNDECODABLE, TraceError, UnsupportedFormat
from lumos_nb.traces import execution_tables as tables
from lumos_nb.traces._event_kernels import Int64s
from lumos_nb.traces.exact import nanoseconds
from lumos_nb.traces.execution_tables import COMM_NODE, GROUP_NODE, Side
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.traces.json_text import mend

FIRST_SCHEMA, FIRST_NESTED, LAST_SCHEMA = (1, 0, 1), (1, 0, 2), (1, 1, 1)
"""Versions that are read; from FIRST_NESTED on a node has lists of attributes, and objects of its arguments."""

NODES = {
    "node_id": pl.Int64(),
    "parent": pl.Int64(),
    "name": pl.String(),
    "kind": pl.String(),
    "rf_id": pl.Int64(),
    "forward_parent": pl.Int64(),
    "sequence": pl.Int64(),
    "scope": pl.Int64(),
    "thread": pl.Int64(),
    "forward_thread": pl.Int64(),
    "op_schema": pl.String(),
    "kernel_backend": pl.String(),
    "kernel_file": pl.String(),
    "tensor_range": pl.String(),
    "start_ns": pl.Int64(),
    "dur_ns": pl.Int64(),
    "category": pl.String(),
    "args": pl.String(),
}
_SAID = {"forward_parent": "fw_parent", "sequence": "seq_id", "thread": "tid", "forward_thread": "fw_tid"}
ATTRIBUTE_OF = {name: _SAID.get(name, name) for name in list(NODES)[4:14]}
"""Column -> the attribute that it holds."""

_GLOO = "gloo:"
_NO_CALL = ("process", "thread", "group", "device", None)
_USER_SCOPE = 7  # of torch's RecordScope
_FRAME = r"^\[pytorch\|profiler\|execution_(?:trace|graph)\|(process|thread)\]$"
_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:-chakra\.[\d.]+)?")
_PLACE = re.compile(r"`\$\[(\d+)\]")

_Raw = msgspec.Raw
_ABSENT = _Raw(b"")
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Node(msgspec.Struct, gc=False, kw_only=True):
    """What a node has in every schema; times and arguments only if a linker has added them."""

    id: _Id
    name: str
    ts: _Raw = _ABSENT
    dur: _Raw = _ABSENT
    cat: str | None = None
    args: _Raw = _ABSENT


class Flat(Node, gc=False, kw_only=True):
    """A node of schema 1.0.1; device work that a linker has added lacks what is null here."""

    parent: _Int64 | None = None
    rf_id: _Int64 | None = None
    fw_parent: _Int64 | None = None
    seq_id: _Int64 | None = None
    scope: _Int64 | None = None
    tid: _Int64 | None = None
    fw_tid: _Int64 | None = None
    op_schema: str | None = None
    inputs: _Raw
    input_shapes: _Raw
    input_types: _Raw
    outputs: _Raw
    output_shapes: _Raw
    output_types: _Raw


class _Arguments(msgspec.Struct, gc=False):
    values: _Raw
    shapes: _Raw
    types: _Raw
    strides: _Raw = _ABSENT


class Nested(Node, gc=False, kw_only=True):
    """A node of schema 1.0.2 and later."""

    parent: _Int64 | None = msgspec.field(name="ctrl_deps", default=None)
    inputs: _Arguments
    outputs: _Arguments
    attrs: _Raw = _Raw(b"[]")


class File(msgspec.Struct):
    """An execution trace but for its nodes."""

    schema: str
    pid: Any = None
    time: Any = None
    start_ts: Any = None
    finish_ts: Any = None


class _Text(File, kw_only=True):
    nodes: _Raw


class _Whole(File, kw_only=True):
    nodes: list[Nested]


_WHOLE, _TEXT = msgspec.json.Decoder(_Whole), msgspec.json.Decoder(_Text)
_FLAT, _NESTED = msgspec.json.Decoder(list[Flat]), msgspec.json.Decoder(list[Nested])


def read_file(path: Path) -> tuple[File, list[Flat] | list[Nested]]:
    """What a file says, and its nodes; TraceError if it is no execution trace, naming the first node that is none."""
    text = _text(path)
    file: _Text | _Whole
    nodes: list[Flat] | list[Nested]
    try:
        file = _WHOLE.decode(text)
        nodes, nested = file.nodes, _version(file.schema) >= FIRST_NESTED
    except UNDECODABLE:  # another schema, or damage
        file = _decoded(text)
        nested = _version(file.schema) >= FIRST_NESTED
        try:
            nodes = _NESTED.decode(file.nodes) if nested else _FLAT.decode(file.nodes)
        except UNDECODABLE as error:
            raise TraceError(_which_node(file.nodes, str(error))) from error
    if not nodes:
        raise TraceError("its list of nodes is empty: nothing was recorded.")
    if isinstance(nodes[0], Nested) != nested:
        raise TraceError(f"its nodes are not those of its schema {file.schema}.")
    return file, nodes


def _text(path: Path) -> bytes:
    if not path.is_file():
        raise TraceError("it is no file: give the path of an execution trace, or of a folder of them.")
    blocks = Blocks(path)
    text = b"".join(blocks)
    if blocks.damage:
        raise TraceError(f"it cannot be read: {blocks.damage}. Copy it again, or record it again.")
    return text


def _decoded(text: bytes) -> _Text:
    with suppress(*UNDECODABLE):  # as nearly all are
        return _TEXT.decode(text)
    try:
        return _TEXT.decode(mend(text))  # numbers that are not finite, halves of surrogate pairs
    except UNDECODABLE as error:
        raise TraceError(
            f"its {len(text):,} bytes are no JSON object with a schema and nodes ({error}). An observer that is not "
            "stopped and unregistered leaves a file without an end: record it again."
        ) from error


def _version(schema: str) -> tuple[int, ...]:
    if not (found := _VERSION.fullmatch(schema)):
        raise TraceError(f"its schema {schema[:40]!r} is no version such as 1.1.1-chakra.0.0.4.")
    version = tuple(map(int, found.groups()))
    if not FIRST_SCHEMA <= version <= LAST_SCHEMA:
        first, last = (".".join(map(str, known)) for known in (FIRST_SCHEMA, LAST_SCHEMA))
        age = "newer" if version > LAST_SCHEMA else "older"
        raise UnsupportedFormat(
            f"its schema {schema} is {age} than those that are read here, {first} to {last}: record it with a release "
            "of torch that writes one of these."
        )
    return version


def _which_node(text: _Raw, error: str) -> str:
    """What is wrong with which node."""
    if not (place := _PLACE.search(error)):
        return f"its nodes cannot be read: {error}."
    node = msgspec.json.decode(text, type=list[_Raw])[int(place[1])]
    try:
        said = msgspec.json.decode(node, type=dict[str, _Raw])
        name = ", ".join(
            f"{key} {bytes(said[key])[:80].decode(errors='replace')}" for key in ("id", "name") if key in said
        )
    except UNDECODABLE:
        name = repr(bytes(node)[:80])
    return f"node {place[1]} of its list ({name}): {error}."


def attribute_lists(nodes: list[Flat] | list[Nested]) -> list[_Raw]:
    """The attributes of all nodes, as text."""
    return [tables.NONE] * len(nodes) if isinstance(nodes[0], Flat) else [node.attrs for node in nodes]


def sides(nodes: list[Flat] | list[Nested]) -> tuple[Side, Side]:
    """Inputs and outputs of all nodes, as text."""
    if isinstance(nodes[0], Flat):
        return (
            Side([n.inputs for n in nodes], [n.input_shapes for n in nodes], [n.input_types for n in nodes], None),
            Side([n.outputs for n in nodes], [n.output_shapes for n in nodes], [n.output_types for n in nodes], None),
        )
    have = [one.strides is not _ABSENT for node in nodes for one in (node.inputs, node.outputs)]
    if any(have) and not all(have):
        raise TraceError(f"node {nodes[have.index(False) // 2].id} has no strides where other nodes have some.")
    return _side([n.inputs for n in nodes], have[0]), _side([n.outputs for n in nodes], have[0])


def _side(each: list[_Arguments], strided: bool) -> Side:
    strides = [one.strides for one in each] if strided else None
    return Side([one.values for one in each], [one.shapes for one in each], [one.types for one in each], strides)


def node_rows(nodes: list[Flat] | list[Nested], attributes: dict[str, pl.DataFrame], ids: Int64s) -> pl.DataFrame:
    """`NODES` in the file's order, the parents as the file has them."""
    own: dict[str, Any]
    if isinstance(nodes[0], Flat):
        own = {name: [getattr(node, said, None) for node in nodes] for name, said in ATTRIBUTE_OF.items()}
    else:
        own = {name: tables.column(attributes.get(said), name, NODES[name], ids) for name, said in ATTRIBUTE_OF.items()}
    linked = any(node.dur is not _ABSENT for node in nodes)
    frame = pl.DataFrame(
        {
            "node_id": ids,
            "name": [node.name for node in nodes],
            **own,
            "start_ns": [nanoseconds(node.ts) for node in nodes] if linked else None,
            "dur_ns": [nanoseconds(node.dur) for node in nodes] if linked else None,
            "category": [node.cat for node in nodes] if linked else None,
            "args": [bytes(node.args).decode() or None for node in nodes] if linked else None,
            "parent": [node.parent for node in nodes],
        },
        schema_overrides=NODES,
    )
    return frame.with_columns(kind=_kind()).select(list(NODES))


def _kind() -> pl.Expr:
    name = pl.col("name")
    frame = name.str.extract(_FRAME)
    return (
        pl.when(frame.is_not_null())
        .then(frame)
        .when(name == GROUP_NODE)
        .then(pl.lit("group"))
        .when(name == COMM_NODE)
        .then(pl.lit("comm"))
        .when(pl.col("op_schema").str.len_bytes() > 0)
        .then(pl.lit("operator"))
        .when(pl.col("scope") == _USER_SCOPE)
        .then(pl.lit("annotation"))
        .when(pl.col("rf_id").is_null())
        .then(pl.lit("device"))  # added by a linker
        .otherwise(pl.lit("function"))
    )


def with_checked_parents(frame: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Parents null at roots, and how many of the others are no node; TraceError for repeated ids and circles."""
    ids, parents = frame["node_id"], frame["parent"]
    if repeated := frame.filter(ids.is_duplicated())["node_id"].head(1).to_list():
        at = (ids == repeated[0]).arg_true().to_list()
        raise TraceError(f"node {repeated[0]} is there {len(at)} times, at {at[0]} and {at[1]} of its list.")
    is_process = frame["name"].str.contains(_FRAME) & (ids == parents)
    parents = frame.select(pl.when(~is_process).then("parent"))["parent"]
    order = ids.arg_sort().to_numpy()
    at = np.minimum(np.searchsorted(ids.to_numpy()[order], parents.fill_null(-1)), len(ids) - 1)
    above = order[at].astype(np.int64)
    here = (ids.to_numpy()[above] == parents.fill_null(-1).to_numpy()) & parents.is_not_null().to_numpy()
    above = np.append(np.where(here, above, len(ids)), len(ids))  # one more node, above all
    for _ in range(len(ids).bit_length()):
        above = above[above]
    if (circle := np.flatnonzero(above[:-1] < len(ids))).size:
        node_id, name, parent = frame["node_id"][int(circle[0])], frame["name"][int(circle[0])], parents[int(circle[0])]
        raise TraceError(f"node {node_id} ({name}) is its own ancestor, through its parent {parent}.")
    return frame.with_columns(parents), int(len(ids) - here.sum() - parents.null_count())


def with_mended_parents(frame: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Parents as calls were nested where gloo's records have muddled them, and how many these are.

    The observer keeps a stack of what is open on each thread. A record of gloo's is put on the stack of the thread that
    issues, and its end, from another thread, takes off whatever is on top: so what follows lies under calls that have
    ended, or beside the call that holds it. But nodes are written when they end, and record functions are numbered when
    they begin, so both orders together say what held what. Of traces without such records that gives the file's own.
    """
    is_gloo = frame["name"].str.starts_with(_GLOO)
    muddled = frame.filter(is_gloo)["thread"].unique().drop_nulls()
    if muddled.is_empty():
        return frame, 0
    called = pl.col("thread").is_in(muddled.implode()) & (pl.col("rf_id") > 0) & ~pl.col("kind").is_in(_NO_CALL)
    calls = frame.filter(called).select("thread", "rf_id", "node_id", "parent", "name")
    kinds = dict(frame.select("node_id", "kind").iter_rows())
    roots = {thread: up for thread, up in calls.select("thread", "parent").iter_rows() if kinds.get(up) == "thread"}
    parents = _nested(calls.filter(~pl.col("name").str.starts_with(_GLOO))) | _issuers(calls)
    mended: dict[int, int] = {}
    for thread, node, said in calls.select("thread", "node_id", "parent").iter_rows():
        if (up := parents.get(node)) is None:  # what no call holds lies under its thread
            up = said if kinds.get(said) in _NO_CALL else roots.get(thread, said)
        if up != said:
            mended[node] = up
    new = pl.col("node_id").replace_strict(mended, default=pl.col("parent"), return_dtype=pl.Int64)
    return frame.with_columns(parent=new), len(mended)


def _nested(calls: pl.DataFrame) -> dict[int, int | None]:
    """The call that holds each, of calls in the order of their ends; None where none does."""
    ended: dict[int, list[tuple[int, int]]] = {}
    parents: dict[int, int | None] = {}
    for thread, began, node in calls.select("thread", "rf_id", "node_id").iter_rows():
        before = ended.setdefault(thread, [])
        while before and before[-1][0] > began:
            parents[before.pop()[1]] = node
        before.append((began, node))
        parents[node] = None
    return parents


def _issuers(calls: pl.DataFrame) -> dict[int, int]:
    """The operator that issued each of gloo's records: the call that began just before it on its thread."""
    issuers: dict[int, int] = {}
    last: dict[int, int] = {}
    for thread, node, name in calls.sort("rf_id").select("thread", "node_id", "name").iter_rows():
        if not name.startswith(_GLOO):
            last[thread] = node
        elif thread in last:
            issuers[node] = last[thread]
    return issuers
