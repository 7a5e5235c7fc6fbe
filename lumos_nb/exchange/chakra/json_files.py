"""Nodes as JSON, as protobuf prints messages: field names of the schema, 64-bit numbers as text.

`.json` is one document, `{"metadata": ..., "nodes": [...]}`; `.jsonl` has the metadata in its first line and a node in
each further one. What JSON has no words for (unknown fields) is there as base64. The JSON that ASTRA-sim's feeder takes
(`{"workload_graph": [...]}`) is read too.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lumos_nb.errors import ChakraError, SchemaError
from lumos_nb.exchange.chakra.messages import KINDS, NODE_TYPES, message_class
from lumos_nb.exchange.chakra.tables import ATTRIBUTES, NODES, Nodes, completed, parsed, type_numbers
from lumos_nb.traces.json_stream import Blocks

SUFFIXES = (".json", ".jsonl")
_ROWS = 10_000
_SIDES = {"inputs": "input", "outputs": "output"}
_COLUMNS = {"start_time_micros": "start_us", "duration_micros": "dur_us"}
_TENSOR = ("values", "shapes", "types")
_VALUES = {"bool": ("bool_val",), "string": ("string_val",)}
_INTEGERS = ("int32_val", "int64_val", "uint32_val", "uint64_val")
_WIDE = {f"{kind}_val" for kind in KINDS if kind.endswith("64")}


class _Node(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A node as protobuf prints it; numbers may be text."""

    id: int = 0
    name: str = ""
    type: str | int = "INVALID_NODE"
    ctrl_deps: list[int] = []
    data_deps: list[int] = []
    start_time_micros: int = 0
    duration_micros: int = 0
    inputs: dict[str, str] | None = None
    outputs: dict[str, str] | None = None
    attr: list[dict[str, Any]] = []
    unknown_fields: str = ""


class _Feeder(msgspec.Struct):
    """What ASTRA-sim's feeder takes for a workload."""

    workload_graph: list[dict[str, Any]]


class _Head(msgspec.Struct):
    metadata: dict[str, Any]
    metadata_bytes: str = ""


class _Document(_Head):
    nodes: list[_Node] = []


def lines(nodes: Nodes, suffix: str) -> Iterator[bytes]:
    """The text of a `.json` or `.jsonl` file, in pieces."""
    head = _metadata(nodes.metadata)
    whole = suffix == ".json"
    yield head[:-1] + b',"nodes":[\n' if whole else head + b"\n"
    for n, part in enumerate(nodes.table.iter_slices(_ROWS)):
        texts = map(msgspec.json.encode, _messages(part))
        if whole:
            yield b",\n" * (n > 0) + b",\n".join(texts)
        else:
            yield b"".join(text + b"\n" for text in texts)
    if whole:
        yield b"\n]}\n"


def _metadata(data: bytes) -> bytes:
    from google.protobuf import json_format

    message = parsed("GlobalMetadata", data, 0)
    head: dict[str, Any] = {"metadata": json_format.MessageToDict(message, preserving_proto_field_name=True)}
    if json_format.ParseDict(head["metadata"], message_class("GlobalMetadata")()).SerializeToString() != data:
        head["metadata_bytes"] = b64encode(data).decode()
    return msgspec.json.encode(head)


def _messages(table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """A message for each row, what is nought or nothing left out."""
    for row in table.drop("frame").iter_rows(named=True):
        kind = row["type"]
        message: dict[str, Any] = {"id": str(row["id"]), "name": row["name"]}
        message["type"] = kind if kind in NODE_TYPES else int(kind)
        for name in ("ctrl_deps", "data_deps"):
            if row[name]:
                message[name] = [str(one) for one in row[name]]
        for name, column in _COLUMNS.items():
            if row[column]:
                message[name] = str(row[column])
        for name, side in _SIDES.items():
            texts = {what: row[f"{side}_{what}"] for what in _TENSOR if row[f"{side}_{what}"] is not None}
            if texts:
                message[name] = texts
        attributes = [_attribute(name, of, row[name]) for name, of in ATTRIBUTES.items() if row[name] is not None]
        if row["rest"]:
            further, unknown = _of_rest(row["rest"])
            attributes += further
            if unknown:
                message["unknown_fields"] = b64encode(unknown).decode()
        if attributes:
            message["attr"] = attributes
        yield message


def _attribute(name: str, kind: str, value: object) -> dict[str, Any]:
    field = f"{kind}_val"
    return {"name": name, field: str(value) if field in _WIDE else value}


def _of_rest(rest: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """Attributes without a column, and the fields that JSON cannot say."""
    from google.protobuf import json_format

    attributes, unknown = [], b""
    for field, body in fields(rest):
        message = parsed("AttributeProto", body, 0) if field[0] == 82 else None
        if message is not None:
            found = json_format.MessageToDict(message, preserving_proto_field_name=True)
            again = json_format.ParseDict(found, message_class("AttributeProto")())
            if again.SerializeToString() == message.SerializeToString():
                attributes.append(found)
                continue
        unknown += field
    return attributes, unknown


def fields(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The fields of a sound message, each whole and without tag and length."""
    at = 0
    while at < len(data):
        tag, after = _number(data, at)
        size = {1: 8, 5: 4}.get(tag & 7, 0)
        if tag & 7 == 0:
            _, end = _number(data, after)
        else:
            if tag & 7 == 2:
                size, after = _number(data, after)
            end = after + size
        yield data[at:end], data[after:end]
        at = end


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def read_json(path: Path) -> Nodes:
    """The nodes of a `.json` or `.jsonl` file.

    Raises
    ------
    ChakraError
        It is no JSON, or JSON of something else; the message names the node.
    """
    blocks = Blocks(path)
    text = b"".join(blocks)
    if blocks.damage:
        raise ChakraError(f"{path}: {blocks.damage}.")
    try:
        if ".jsonl" in path.suffixes:
            first, _, others = text.partition(b"\n")
            head = msgspec.json.decode(first or b" ", type=_Head, strict=False)
            decoder = msgspec.json.Decoder(_Node, strict=False)
            return _nodes(head, decoder.decode_lines(others))
        if b'"workload_graph"' in text[:1000]:
            return _of_feeder(msgspec.json.decode(text, type=_Feeder).workload_graph)
        document = msgspec.json.decode(text, type=_Document, strict=False)
        return _nodes(document, document.nodes)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:  # msgspec's are ValueErrors
        raise ChakraError(f"{path} is no JSON of Chakra nodes: {error}; ln.chakra.write_file writes such.") from error
    except (ChakraError, SchemaError) as error:
        raise ChakraError(f"{path}: {error}") from error


def _nodes(head: _Head, messages: Iterable[_Node]) -> Nodes:
    from google.protobuf import json_format

    every = list(messages)
    columns: dict[str, list[Any]] = {name: [None] * len(every) for name in ATTRIBUTES}
    rest = [_columns_of(i, node, columns) for i, node in enumerate(every)]
    for name, side in _SIDES.items():
        given: list[dict[str, str]] = [getattr(node, name) or {} for node in every]
        columns |= {f"{side}_{what}": [one.get(what) for one in given] for what in _TENSOR}
    for field in ("id", "name", "ctrl_deps", "data_deps", "start_time_micros", "duration_micros"):
        columns[_COLUMNS.get(field, field)] = [getattr(node, field) for node in every]
    columns["type"] = [str(node.type) for node in every]
    columns["rest"] = rest
    try:
        metadata = json_format.ParseDict(head.metadata, message_class("GlobalMetadata")()).SerializeToString()
    except json_format.ParseError as error:
        raise ChakraError(f"the metadata: {error}.") from error
    return Nodes(_table(columns), b64decode(head.metadata_bytes) or metadata)


def _columns_of(i: int, node: _Node, columns: dict[str, list[Any]]) -> bytes:
    """Put a node's attributes into columns; the wire bytes of those that have none."""
    from google.protobuf import json_format

    rest = b""
    for attribute in node.attr:
        name = attribute.get("name")
        if name in ATTRIBUTES and len(attribute) == 2 and columns[name][i] is None:
            field = next(key for key in attribute if key != "name")
            value = int(attribute[field]) if field in _INTEGERS else attribute[field]
            least = 0 if ATTRIBUTES[name].startswith("u") else -(1 << 63)
            within = field not in _INTEGERS or least <= value < 1 << 63
            if field in _VALUES.get(ATTRIBUTES[name], _INTEGERS) and within:
                columns[name][i] = value
                continue
        try:
            rest += json_format.ParseDict({"attr": [attribute]}, message_class("Node")()).SerializeToString()
        except json_format.ParseError as error:
            raise ChakraError(f"node {node.id}: {error}.") from error
    unknown = b64decode(node.unknown_fields, validate=True)
    parsed("Node", unknown, 0)
    return rest + unknown


def _table(columns: dict[str, list[Any]]) -> pl.DataFrame:
    try:
        table = completed(pl.DataFrame(columns, schema_overrides={name: NODES.columns[name] for name in columns}))
        type_numbers(table["type"])
        return table
    except pl.exceptions.PolarsError as error:
        raise ChakraError(f"a column holds what it cannot: {error}.") from error


_FEEDER = {"Id": "id", "Name": "name", "NodeType": "type", "runtime": "dur_us"}
_FEEDER |= {"ctrlDeps": "ctrl_deps", "ctrl_deps": "ctrl_deps", "data_deps": "data_deps"}


def _of_feeder(graph: list[dict[str, Any]]) -> Nodes:
    columns: dict[str, list[Any]] = {}
    for i, node in enumerate(graph):
        for key, value in node.items():
            name = _FEEDER.get(key, key)
            if name not in ATTRIBUTES and name not in _FEEDER.values():
                raise ChakraError(f"node {node.get('Id', i)} has {key!r}, which is no field of a node.")
            columns.setdefault(name, [None] * len(graph))[i] = value
    columns["type"] = [NODE_TYPES[n] if n in range(len(NODE_TYPES)) else str(n) for n in columns.get("type", [])]
    if "id" not in columns:
        raise ChakraError("no node has an Id.")
    return Nodes(_table(columns))
