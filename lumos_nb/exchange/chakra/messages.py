"""The messages of Chakra as published (MLCommons, package ChakraProtoMsg), made for protobuf when first used.

A file is one `GlobalMetadata` and then `Node`s, each with its length before it. Tables of nodes are read and written
without these classes, which take 30 us a node (`tables`); they serve single messages and odd attributes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lumos_nb.errors import InputError, shown

NODE_TYPES = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)
COLLECTIVES = (
    "ALL_REDUCE",
    "REDUCE",
    "ALL_GATHER",
    "GATHER",
    "SCATTER",
    "BROADCAST",
    "ALL_TO_ALL",
    "REDUCE_SCATTER",
    "REDUCE_SCATTER_BLOCK",
    "BARRIER",
)
"""What the numbers of `comm_type` mean."""

KINDS = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "string", "bytes"),
)
"""Types of an attribute's value; the k-th is field 3 + 2 k, a list of it the next one."""

_SCHEMA = {
    "GlobalMetadata": ("string version = 1", "AttributeProto* attr = 2"),
    "IOInfo": ("string values = 1", "string shapes = 2", "string types = 3"),
    "Node": (
        *("uint64 id = 1", "string name = 2", "NodeType type = 3", "uint64* ctrl_deps = 4", "uint64* data_deps = 5"),
        *("uint64 start_time_micros = 6", "uint64 duration_micros = 7", "IOInfo inputs = 8", "IOInfo outputs = 9"),
        "AttributeProto* attr = 10",
    ),
    "Tensor": (
        *("uint64 tensor_id = 1", "uint64 storage_id = 2", "uint64 offset = 3", "uint64 num_elem = 4"),
        *("uint64 elem_bytes = 5", "string device = 6"),
    ),
    **{f"{kind.capitalize()}List": (f"{kind}* values = 1",) for kind in KINDS},
    "AttributeProto": (
        *("string name = 1", "string doc_string = 2"),
        *(
            text
            for k, kind in enumerate(KINDS)
            for text in (f"{kind} {kind}_val = {3 + 2 * k}", f"{kind.capitalize()}List {kind}_list = {4 + 2 * k}")
        ),
    ),
}
"""Fields of every message; * marks those that repeat. Those of an attribute from 3 on exclude one another."""


@cache
def message_class(name: str) -> Any:
    """The protobuf class of a message.

    Raises
    ------
    InputError
        There is no message of that name.

    Examples
    --------
    >>> message_class("Node")(id=2**63, type=4).SerializeToString().hex()
    '08808080808080808080011804'
    """
    if name not in _SCHEMA:
        raise InputError(f"{shown(name)} is no message of Chakra: there are {', '.join(_SCHEMA)}.")
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"ChakraProtoMsg.{name}"))


@cache
def _pool() -> Any:
    pool = descriptor_pool.DescriptorPool()  # of our own: the default one may hold those of the reference tools
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for enum, values in (("NodeType", NODE_TYPES), ("CollectiveCommType", COLLECTIVES)):
        made = file.enum_type.add(name=enum)
        for number, value in enumerate(values):
            made.value.add(name=value, number=number)
    for message, fields in _SCHEMA.items():
        _add_message(file, message, fields)
    pool.Add(file)
    return pool


def _add_message(file: descriptor_pb2.FileDescriptorProto, name: str, fields: tuple[str, ...]) -> None:
    proto = descriptor_pb2.FieldDescriptorProto
    message = file.message_type.add(name=name)
    if name == "AttributeProto":
        message.oneof_decl.add(name="value")
    for text in fields:
        kind, field, _, number = text.split()
        base = kind.rstrip("*")
        label = proto.LABEL_REPEATED if kind != base else proto.LABEL_OPTIONAL
        added = message.field.add(name=field, number=int(number), label=label)
        if base in KINDS:
            added.type = proto.Type.Value(f"TYPE_{base.upper()}")
        else:
            added.type = proto.TYPE_ENUM if base == "NodeType" else proto.TYPE_MESSAGE
            added.type_name = f".ChakraProtoMsg.{base}"
        if name == "AttributeProto" and added.number >= 3:
            added.oneof_index = 0
