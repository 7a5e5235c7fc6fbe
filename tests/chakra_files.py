"""Chakra messages for tests, put together by protobuf, which is the oracle of our own reader and writer."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lumos_nb.exchange.chakra.messages import KINDS, message_class

COMP, SEND, RECV, COLL = 4, 5, 6, 7


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def framed(messages: Iterable[bytes]) -> bytes:
    return b"".join(varint(len(one)) + one for one in messages)


def frames(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = shift = 0
        while True:
            byte, at = data[at], at + 1
            size, shift = size | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        yield data[at : at + size]
        at += size


def message(id: int, type: int = COMP, attributes: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """A node; attributes as {name: (kind, value)}."""
    node = message_class("Node")(id=id, type=type, **fields)
    for name, (kind, value) in (attributes or {}).items():
        attribute = node.attr.add(name=name)
        if kind in KINDS:
            setattr(attribute, f"{kind}_val", value)
        else:
            getattr(attribute, kind).values.extend(value)
    return node.SerializeToString()


def head(**attributes: str) -> bytes:
    about = message_class("GlobalMetadata")(version="0.0.4")
    for name, value in attributes.items():
        about.attr.add(name=name, string_val=value)
    return about.SerializeToString()


def write(path: Path, *nodes: bytes) -> Path:
    path.write_bytes(framed([head(), *nodes]))
    return path


def published(traces: Path, folder: Path) -> list[Path]:
    """Every Chakra protobuf file of the shared traces."""
    for archive in (traces / "chakra/feeder_tests_trace.tar.gz", traces / "astra-sim/ASTRA-sim-2.0/resnet_dp.tar"):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return [*sorted(folder.rglob("*.et")), *sorted((traces / "astra-sim").rglob("*.et"))]
