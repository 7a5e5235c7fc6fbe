"""Chakra messages <-> a table with a row a node: the wire is read and written by column.

Every field and the attributes that are met often are a column; other attributes, unknown fields and attributes of an
unusual type stay as they stand on the wire in `rest`. `frame` is the message as it was read: a row whose columns still
say the same is written as that, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.display import Shown
from lumos_nb.errors import ChakraError, shown
from lumos_nb.exchange.chakra import _wire_kernels as wire
from lumos_nb.exchange.chakra._encode_kernels import encode
from lumos_nb.exchange.chakra.messages import NODE_TYPES, message_class
from lumos_nb.schema import TableSchema

Int64s = NDArray[np.int64]

ATTRIBUTES = {
    "is_cpu_op": "bool",
    "num_ops": "int64",
    "tensor_loc": "int64",
    "tensor_size": "uint64",
    "comm_type": "int64",
    "comm_priority": "int64",
    "comm_size": "int64",
    "comm_src": "int32",
    "comm_dst": "int32",
    "comm_tag": "int32",
    "pg_name": "string",
    "rf_id": "int64",
    "fw_parent": "int64",
    "seq_id": "int64",
    "scope": "int64",
    "tid": "int64",
    "fw_tid": "int64",
    "op_schema": "string",
    "stream": "int64",
    # ours: what our charts and breakdowns know of an op
    "lane": "string",
    "kind": "string",
    "phase": "string",
    "layer": "string",
    "parent": "string",
    "micro_batch": "int64",
    "step": "int64",
    "rendezvous": "bool",  # a message begins when both sides are there, not when it is sent
}
"""Attributes with a column, and the type that they are written as; integers of every type are read."""

_TEXTS = ("name", *(f"{side}_{what}" for side in ("input", "output") for what in ("values", "shapes", "types")))
_DTYPES = {"bool": pl.Boolean(), "string": pl.String()}

NODES = TableSchema(
    "node",
    {
        "id": pl.UInt64(),
        "name": pl.String(),
        "type": pl.String(),  # as in `messages.NODE_TYPES`; an unknown one by its number
        "ctrl_deps": pl.List(pl.UInt64()),
        "data_deps": pl.List(pl.UInt64()),
        "start_us": pl.UInt64(),
        "dur_us": pl.UInt64(),
        **dict.fromkeys(_TEXTS[1:], pl.String()),
        **{name: _DTYPES.get(kind, pl.Int64()) for name, kind in ATTRIBUTES.items()},  # null where a node has none
        "rest": pl.Binary(),  # wire bytes of what has no column
        "frame": pl.Binary(),  # the message as read; null for a node that was made here
    },
)

_COLUMNS = {
    name: (wire.N_STRINGS if kind == "string" else wire.N_FIXED)
    + sum((other == "string") == (kind == "string") for other in list(ATTRIBUTES.values())[:k])
    for k, (name, kind) in enumerate(ATTRIBUTES.items())
}
"""Where the kernels have an attribute: among the numbers, or among the texts."""
_NUMBERS = [name for name, kind in ATTRIBUTES.items() if kind != "string"]
_WORDS = [name for name, kind in ATTRIBUTES.items() if kind == "string"]
_KINDS = {"bool": wire.BOOLEAN, "string": wire.TEXT, "uint32": wire.UNSIGNED, "uint64": wire.UNSIGNED}
_HOLDS = np.array([_KINDS.get(kind, wire.INTEGER) for kind in ATTRIBUTES.values()], np.uint8)
_COLUMN = np.array(list(_COLUMNS.values()))
_ROWS = 1 << 12
"""Nodes written at a time."""


@dataclass(frozen=True, slots=True, repr=False)
class Nodes(Shown):
    """The nodes of one file: `table` (`NODES`, rows in the order of the file) and its first message.

    Attributes
    ----------
    table
        One row a node.
    metadata
        `GlobalMetadata` as on the wire.
    """

    table: pl.DataFrame
    metadata: bytes = b""

    @classmethod
    def of(cls, table: pl.DataFrame, *, version: str = "", **attributes: str | int) -> Nodes:
        """Nodes made here, with the columns that `table` lacks as null; attributes of the file by name.

        Raises
        ------
        ChakraError
            A node has no id, no type that is known, or no such column exists.
        SchemaError
            A column is of another type than it should be.

        Examples
        --------
        >>> Nodes.of(pl.DataFrame({"id": [0, 1], "name": ["a", "b"], "data_deps": [[], [0]]})).table["type"].to_list()
        ['COMP_NODE', 'COMP_NODE']
        """
        message = message_class("GlobalMetadata")(version=version)
        for name, value in attributes.items():
            field = "string_val" if isinstance(value, str) else "uint64_val"
            message.attr.add(name=name, **{field: value})
        return cls(completed(table), message.SerializeToString(deterministic=True))

    @property
    def about(self) -> dict[str, Any]:
        """The file's version and attributes."""
        message = parsed("GlobalMetadata", self.metadata, 0)
        values = {one.name: getattr(one, one.WhichOneof("value") or "name") for one in message.attr}
        return {"version": message.version} | values

    def _summary(self) -> pl.DataFrame:
        of_type = self.table.group_by("type").agg(nodes=pl.len(), dur_ns=1000 * pl.col("dur_us").sum())
        return of_type.sort("nodes", "type", descending=[True, False])

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(f"Chakra file of {len(self.table):,} nodes (see .table, .about)", self._summary())]


def completed(table: pl.DataFrame) -> pl.DataFrame:
    """`table` with every column of `NODES`, integers of any width taken."""
    if not isinstance(table, pl.DataFrame):
        raise ChakraError(f"the node table is a {type(table).__name__}; give a polars DataFrame.")
    if unknown := [name for name in table.columns if name not in NODES.columns]:
        raise ChakraError(f"a node has no column {shown(unknown[0])}; it may have {', '.join(NODES.columns)}.")
    start: dict[str, Any] = {"name": "", "type": "COMP_NODE", "start_us": 0, "dur_us": 0, "rest": b""}
    lists: dict[str, Any] = {"ctrl_deps": [], "data_deps": []}
    absent = [name for name in NODES.columns if name not in table.columns]
    table = table.with_columns(pl.lit((start | lists).get(name)).alias(name) for name in absent)
    try:
        table = table.with_columns(pl.col(name).cast(kind) for name, kind in NODES.columns.items())
    except pl.exceptions.PolarsError as error:
        raise ChakraError(f"a column of the node table is of the wrong type or out of range: {error}.") from error
    table = table.with_columns(
        *(pl.col(name).fill_null(value) for name, value in start.items()),
        *(pl.col(name).fill_null([]) for name in lists),
    )
    if nulls := table["id"].null_count():
        raise ChakraError(f"{nulls} node(s) have no id; give each its own.")
    return NODES.check(table)


def parsed(kind: str, data: bytes, offset: int) -> Any:
    """One message through protobuf."""
    from google.protobuf.message import DecodeError

    try:
        return message_class(kind).FromString(data)
    except DecodeError as error:
        raise ChakraError(f"byte {offset:,}: this is no {kind} message ({error}).") from error


def decoded(data: bytes | bytearray, frames: Int64s, offset: int) -> pl.DataFrame:
    """The node table of messages that lie in `data` from frames[:, 0] to frames[:, 1], `offset` into the file."""
    n = len(frames)
    size = int(frames[-1, 1] - frames[0, 0]) if n else 0
    fixed = np.zeros((n, wire.N_FIXED + len(_NUMBERS)), np.int64)
    there = np.zeros(fixed.shape, np.uint8)
    spans = np.full((n, wire.N_STRINGS + len(_WORDS), 2), -1, np.int64)
    counts, rest_size = np.zeros((n, 2), np.int64), np.zeros(n, np.int64)
    deps, used, rest = np.empty((2, size), np.int64), np.zeros(2, np.int64), np.empty(size, np.uint8)
    names, name_at = _joined([name.encode() for name in ATTRIBUTES])
    into = (fixed, there, spans, counts, deps, used, rest, rest_size)
    view = np.frombuffer(bytearray(data), np.uint8)
    row, at, fault = wire.decode(view, frames, names, name_at, _HOLDS, _COLUMN, *into)
    if fault:
        raise ChakraError(f"byte {offset + at:,}, in the message from byte {offset + int(frames[row, 0]):,} on: "
                          f"{wire.FAULTS[fault]}.")  # fmt: skip
    whole = bytes(data)
    ends = np.cumsum(rest_size)
    columns: dict[str, pl.Series] = {
        "id": pl.Series(fixed[:, wire.ID].view(np.uint64)),
        "type": _type_names(fixed[:, wire.TYPE]),
        "ctrl_deps": _lists(deps[0], counts[:, 0]),
        "data_deps": _lists(deps[1], counts[:, 1]),
        "start_us": pl.Series(fixed[:, wire.START].view(np.uint64)),
        "dur_us": pl.Series(fixed[:, wire.DUR].view(np.uint64)),
        **{name: _texts(view, spans[:, s], offset) for s, name in enumerate((*_TEXTS, *_WORDS))},
        "rest": _pieces(rest[: rest_size.sum()].tobytes(), ends - rest_size, rest_size),
        "frame": _pieces(whole, frames[:, 0], frames[:, 1] - frames[:, 0]),
    }
    for name in _NUMBERS:
        c = _COLUMNS[name]
        columns[name] = _where(fixed[:, c], there[:, c]).cast(NODES.columns[name])
    return pl.DataFrame({name: columns[name] for name in NODES.columns}).with_columns(pl.col("name").fill_null(""))


def _where(values: Int64s, there: NDArray[Any]) -> pl.Series:
    """Values where they are there, else null."""
    if not there.any():
        return pl.Series([None], dtype=pl.Int64).new_from_index(0, len(values))
    return pl.select(pl.when(pl.Series(there > 0)).then(pl.Series(values))).to_series()


def _pieces(whole: bytes, begin: Int64s, size: Int64s) -> pl.Series:
    """Parts of some bytes."""
    parts = pl.Series([whole], dtype=pl.Binary).bin
    return parts.slice(pl.Series(begin), pl.Series(size)).head(len(begin))  # type: ignore[arg-type]  # it takes series


def _texts(view: NDArray[np.uint8], spans: Int64s, offset: int) -> pl.Series:
    there = spans[:, 0] >= 0
    if not there.any():
        return pl.Series([None], dtype=pl.String).new_from_index(0, len(spans))
    found = np.ascontiguousarray(spans[there])
    size = found[:, 1] - found[:, 0]
    out = np.empty(size.sum(), np.uint8)
    wire.gather(view, found, out)  # slices of all the bytes would copy them for every column
    try:
        texts = _pieces(out.tobytes(), np.cumsum(size) - size, size).cast(pl.String)
    except pl.exceptions.ComputeError:
        for a, b in found.tolist():
            try:
                view[a:b].tobytes().decode()
            except UnicodeDecodeError as error:
                raise ChakraError(f"byte {offset + a:,}: this text is no UTF-8 ({error.reason}).") from error
        raise
    return texts if there.all() else texts.gather(_where(np.cumsum(there) - 1, there))


def _lists(flat: Int64s, counts: Int64s) -> pl.Series:
    """Lists of numbers that stand one behind another."""
    ends = np.cumsum(counts)
    flat = flat[: ends[-1] if len(ends) else 0].view(np.uint64)
    every = pl.lit(pl.Series(flat).implode())
    part = every.list.slice(pl.lit(pl.Series(ends - counts)), pl.lit(pl.Series(counts)))
    return pl.select(part).to_series()


def _type_names(numbers: Int64s) -> pl.Series:
    named = dict(enumerate(NODE_TYPES))
    return pl.Series(numbers).replace_strict(named, default=pl.Series(numbers).cast(pl.String), return_dtype=pl.String)


def type_numbers(names: pl.Series) -> pl.Series:
    """The numbers of types of nodes; ChakraError for one that is none."""
    numbers = {name: number for number, name in enumerate(NODE_TYPES)}
    found = names.replace_strict(numbers, default=names.cast(pl.Int32, strict=False), return_dtype=pl.Int64)
    if found.has_nulls():
        unknown = names.filter(found.is_null())[0]
        raise ChakraError(f"a node is of type {shown(unknown)}; it may be {', '.join(NODE_TYPES)}.")
    return found


def encoded(table: pl.DataFrame) -> Iterator[bytes]:
    """The nodes of a table as length-delimited messages, some thousands at a time."""
    for part in NODES.check(table).iter_slices(_ROWS):
        yield _encoded(part)


def _encoded(table: pl.DataFrame) -> bytes:
    same = _unchanged(table)
    written = (*_TEXTS, *_WORDS, "rest", "ctrl_deps", "data_deps")  # of what is written as it was none is needed
    new = False if same.all() else pl.lit(pl.Series(same == 0))
    table = table.with_columns(pl.when(new).then(name).alias(name) for name in written)
    fixed = np.zeros((len(table), wire.N_FIXED + len(_NUMBERS)), np.int64)
    there = np.zeros(fixed.shape, np.uint8)
    for c, name in ((wire.ID, "id"), (wire.START, "start_us"), (wire.DUR, "dur_us")):
        fixed[:, c] = table[name].to_numpy().view(np.int64)
    fixed[:, wire.TYPE] = type_numbers(table["type"]).to_numpy()
    for name in _NUMBERS:
        if table[name].null_count() < len(table):
            fixed[:, _COLUMNS[name]] = table[name].cast(pl.Int64).fill_null(0).to_numpy()
            there[:, _COLUMNS[name]] = table[name].is_not_null().to_numpy()
    columns = [table[name] for name in (*_TEXTS, *_WORDS, "rest", "frame")]
    text, cursor = _joined([_text(column) for column in columns])
    size = np.column_stack([_sizes(column) for column in columns])
    lists = [table[name] for name in ("ctrl_deps", "data_deps")]
    counts = np.column_stack([np.array(one.list.len().fill_null(0)) for one in lists]).astype(np.int64)
    ctrl, deps = (np.array(one.explode().drop_nulls()).view(np.int64) for one in lists)
    heads = [_head(name, kind) for name, kind in ATTRIBUTES.items()]
    head, head_at = _joined(heads)
    each = sum(map(len, heads)) + 20 * len(heads) + 200  # bytes that a node takes at most besides texts and lists
    out = np.empty(len(text) + 10 * (len(ctrl) + len(deps)) + len(table) * each, np.uint8)
    numbers = (fixed, there, text, cursor[:-1].copy(), size, ctrl, deps, counts)
    done = encode(head, head_at, _HOLDS, _COLUMN, *numbers, same, out)
    return out[:done].tobytes()


def _unchanged(table: pl.DataFrame) -> NDArray[np.uint8]:
    """Rows whose columns say what their frame says."""
    same = np.zeros(len(table), np.uint8)
    rows = table.with_row_index("row").drop_nulls("frame")
    if rows.is_empty():
        return same
    size = _sizes(rows["frame"])
    frames = np.column_stack([np.cumsum(size) - size, np.cumsum(size)])
    was = decoded(_text(rows["frame"]), frames, 0)
    equal = pl.all_horizontal(rows[name].eq_missing(was[name]).alias(name) for name in NODES.columns)
    same[rows["row"].to_numpy()] = rows.select(equal).to_series().to_numpy()
    return same


def _text(values: pl.Series) -> bytes:
    """Texts, or bytes, one behind another."""
    if values.null_count() == len(values):
        return b""
    if values.dtype == pl.Binary:
        return b"".join(values.drop_nulls().to_list())
    return str(values.str.join("").item()).encode()


def _sizes(values: pl.Series) -> Int64s:
    """Bytes of each; -1 for none."""
    size = values.bin.size() if values.dtype == pl.Binary else values.str.len_bytes()
    return np.array(size.cast(pl.Int64).fill_null(-1))


def _head(name: str, kind: str) -> bytes:
    """An attribute's bytes up to its value."""
    numbers = {
        "bool": wire.BOOL,
        "string": wire.STRING,
        "int32": wire.INT32,
        "int64": wire.INT64,
        "uint64": wire.UINT64,
    }
    tag = numbers[kind] << 3 | (2 if kind == "string" else 0)
    value = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
    return bytes([10, len(name)]) + name.encode() + value


def _joined(parts: list[bytes]) -> tuple[NDArray[np.uint8], Int64s]:
    """Bytes one behind another, and where each begins (and the last ends)."""
    return np.frombuffer(bytearray(b"".join(parts)), np.uint8), np.cumsum([0, *map(len, parts)])
