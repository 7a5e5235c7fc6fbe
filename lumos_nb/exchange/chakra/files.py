"""Chakra files: read and written whole or as a stream, plain or gzip; and the files of a job's ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from lumos_nb.errors import UNDECODABLE, ChakraError, files_in, folder_for, named, require_kinds, shown
from lumos_nb.exchange.chakra import _wire_kernels as wire
from lumos_nb.exchange.chakra import json_files
from lumos_nb.exchange.chakra.tables import NODES, Nodes, decoded, encoded, parsed
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.whole_files import whole, whole_file

CHUNK_BYTES = 1 << 22
"""Of messages decoded at a time, unless one is longer."""

Groups = Mapping[str, Sequence[int]]
"""Ranks by the name of a process group."""

_RANK = re.compile(r"(?P<prefix>.*?)\.?(?P<rank>\d+)\.et(?:\.gz)?")


def stream_file(path: str | Path) -> Iterator[bytes | pl.DataFrame]:
    """The first message of a file, then tables of its nodes, some thousands at a time, in bounded memory.

    Raises
    ------
    ChakraError
        It is no Chakra file, or is cut off; the message says where. What was sound before that has been given.

    Examples
    --------
    >>> ln.chakra.write(graph, "out/")
    >>> head, *tables = stream_file("out/chakra.0.et")
    >>> sum(table.height for table in tables) == read_file("out/chakra.0.et").table.height
    True
    """
    blocks = Blocks(_there(path))
    pieces = iter(blocks)
    data, offset, first, wanted, more = bytearray(), 0, True, CHUNK_BYTES, True
    try:
        while more:
            while len(data) < wanted and (piece := next(pieces, None)) is not None:
                data += piece
            more = len(data) >= wanted
            room = np.empty((len(data) // 2 + 1, 2), np.int64)
            n, used, fault = wire.find_frames(np.frombuffer(data, np.uint8), 0, first, room)
            frames = room[:n]
            if first and n:
                head = bytes(data[frames[0, 0] : frames[0, 1]])
                if head.startswith(b"\x08"):  # the id of a node
                    raise ChakraError(
                        "byte 0: the first message is a node; a Chakra file begins with one about itself."
                    )
                parsed("GlobalMetadata", head, offset)
                yield head
                frames, first = frames[1:], False
            if len(frames):
                yield decoded(data, frames, offset)
            if fault:
                raise ChakraError(f"byte {offset + used:,}: {wire.FAULTS[fault]}.")
            data, offset, wanted = data[used:], offset + used, CHUNK_BYTES if used else 2 * wanted
        if data:
            raise ChakraError(f"byte {offset:,}: {blocks.damage or 'the file ends in the middle of a message'}.")
        if first or blocks.damage:
            raise ChakraError(blocks.damage or "it is empty; a Chakra file begins with a message about itself.")
    except ChakraError as error:
        raise ChakraError(f"{path}: {error}") from error


def _there(path: str | Path) -> Path:
    path = named(path, ChakraError)
    if not path.is_file():
        raise ChakraError(f"{path} is no file: give one as {path.stem or 'run'}.0.et, or the folder of a job's.")
    return path


def read_file(path: str | Path) -> Nodes:
    """The nodes of one file: `.et` or `.et.gz`, or what `write_file` or the feeder have as `.json` or `.jsonl`.

    Parameters
    ----------
    path
        The file; gzip is told by its first bytes.

    Returns
    -------
    Nodes
        Its `table` has a row a node, with `frame`, the message as it was, so that what is not changed is written as it
        was read.

    Raises
    ------
    ChakraError
        It is no Chakra file, or is cut off or damaged; the message names the byte.
    TraceError
        gzip data hold far more than a trace does.

    Examples
    --------
    >>> ln.chakra.write(graph, "out/")
    >>> nodes = read_file("out/chakra.0.et")
    >>> nodes.table.group_by("type").agg(pl.len(), pl.sum("dur_us"))
    """
    path = _there(path)
    if {".json", ".jsonl"} & {*path.suffixes}:
        return json_files.read_json(path)
    head, *tables = stream_file(path)
    assert isinstance(head, bytes)
    parts = [table for table in tables if isinstance(table, pl.DataFrame)]
    return Nodes(pl.concat(parts) if parts else NODES.empty(), head)


def write_file(nodes: Nodes, path: str | Path) -> Path:
    """Write nodes as `.et`, `.json` (one document) or `.jsonl` (a line a node), each with `.gz` compressed.

    A row whose columns say what its `frame` says is written as that; any other is put together from its columns and
    `rest`. So what was read and not changed is the same bytes again.

    Parameters
    ----------
    nodes
        As `read_file` gives them, or `Nodes.of(table)`.
    path
        An existing file is replaced.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    ChakraError
        A node's type is unknown, or the file cannot be written.

    Examples
    --------
    >>> nodes = Nodes.of(pl.DataFrame({"id": [1], "name": ["gemm"], "dur_us": [120]}))
    >>> read_file(write_file(nodes, "one.0.et")).table["dur_us"].to_list()
    [120]
    """
    if not isinstance(nodes, Nodes):
        raise ChakraError(f"this writes Nodes, not a {type(nodes).__name__}: ln.chakra.Nodes.of(table) makes them.")
    path = named(path, ChakraError)
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    parts = json_files.lines(nodes, kind) if kind in json_files.SUFFIXES else _messages(nodes)
    with whole_file(path, ChakraError) as file:
        file.writelines(parts)
    return path


def _messages(nodes: Nodes) -> Iterator[bytes]:
    yield _length(len(nodes.metadata)) + nodes.metadata
    yield from encoded(nodes.table)


def _length(size: int) -> bytes:
    more, low = divmod(size, 128)
    return bytes([low | 128]) + _length(more) if more else bytes([low])


def rank_files(path: str | Path) -> dict[int, Path]:
    """The files of a job by rank: those of a folder named `<prefix>.<rank>.et` (or `.et.gz`); or one file.

    Raises
    ------
    ChakraError
        There are none, or two of one rank: then the folder holds several jobs, of which one is to be given as files.
    """
    path = named(path, ChakraError)
    if not path.is_dir():
        found = _RANK.fullmatch(_there(path).name)
        return {int(found["rank"]) if found else 0: path}
    ranks: dict[int, Path] = {}
    for file in files_in(path, ChakraError):
        found = _RANK.fullmatch(file.name)
        if found and file.is_file():
            rank = int(found["rank"])
            if rank in ranks:
                raise ChakraError(f"{path} holds {ranks[rank].name} and {file.name}, two files of rank {rank}; give a "
                                  "folder a job.")  # fmt: skip
            ranks[rank] = file
    if not ranks:
        raise ChakraError(f"{path} holds no Chakra file; their names end in .<rank>.et or .<rank>.et.gz.")
    return dict(sorted(ranks.items()))


def read_groups(path: str | Path) -> dict[str, list[int]]:
    """Ranks by process group, of the JSON file beside the ranks' files; empty where there is none.

    Raises
    ------
    ChakraError
        The file is not of names and lists of ranks, or there are several.
    """
    path = named(path, ChakraError)
    files = sorted((path if path.is_dir() else path.parent).glob("*groups.json"))
    if not files:
        return {}
    if len(files) > 1:
        raise ChakraError(f"{path} holds {files[0].name} and {files[1].name}; one file lists the groups of a job.")
    try:
        return msgspec.json.decode(files[0].read_bytes(), type=dict[str, list[int]])
    except (OSError, *UNDECODABLE) as error:
        raise ChakraError(f'{files[0]}: {error}; write groups as {{"0": [0, 1], "1": [2, 3]}}.') from error


def write_ranks(ranks: Iterable[tuple[int, Nodes]], folder: str | Path, prefix: str, groups: Groups) -> list[Path]:
    """Write `<prefix>.<rank>.et` of every rank as they come, and `<prefix>.groups.json`; the folder is made if need be.

    Raises
    ------
    ChakraError
        The folder cannot be made, or a file in it not written.
    """
    require_kinds(prefix=(prefix, str))
    listed = named(folder, ChakraError) / f"{prefix}.groups.json"
    if named(listed.name, ChakraError) != Path(f"{prefix}.groups.json"):
        raise ChakraError(f"prefix {shown(prefix)} leads out of the folder: give one without slashes.")
    folder = folder_for(folder, ChakraError)
    with whole(listed, ChakraError) as part:  # the first: it says which ranks are still to come
        part.write_bytes(msgspec.json.encode({name: list(members) for name, members in groups.items()}))
    return [*(write_file(nodes, folder / f"{prefix}.{rank}.et") for rank, nodes in ranks), listed]
