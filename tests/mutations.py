"""Ways to damage a file: its bytes, the tree of a JSON text, the fields of protobuf messages, the columns of tables.

Each takes the bytes of a sound file and a `Random`, and gives the bytes of one that may not be.
"""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
import tarfile
from collections.abc import Callable, Iterator
from datetime import date
from functools import cache
from random import Random
from typing import Any

import polars as pl

from tests.chakra_files import varint

Mutation = Callable[[bytes, Random], bytes]

TOKENS = [
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\0", b"\xff", b"\n", b"\\ud83d", b"\xed\xa0\xbd", b"\x1f\x8b"),
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"9" * 30, b"null", b"{}", b'"ph":"X",', b"}, {", b'"args":[', b'"]}'),
]
NUMBERS = [
    0,
    -1,
    1,
    2**31,
    -(2**31) - 1,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**40,
    0.5,
    -0.0,
    1e-320,
    1e308,
]
ODD = [
    *(*NUMBERS, float("nan"), float("inf"), -float("inf"), None, True, False, "", "NaN", "-1", "1e999", "9" * 50, "\0"),
    *("\ud83d", "ядро 🚀", "x" * 5000, "..", "/etc/passwd", '=1+1"', "<b>", [], {}, [[]], [None], {"": None}, [[1], 2]),
]


def cut(data: bytes, noise: Random) -> bytes:
    return data[: noise.randrange(len(data) + 1)]


def flip(data: bytes, noise: Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(noise.choice([1, 1, 2, 8, 64])):
        changed[noise.randrange(len(changed))] ^= 1 << noise.randrange(8)
    return bytes(changed)


def splice(data: bytes, noise: Random) -> bytes:
    a, b = sorted(noise.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[b:] if noise.random() < 0.5 else data[:b] + data[a:]


def duplicate(data: bytes, noise: Random) -> bytes:
    begin, at = (noise.randrange(len(data) + 1) for _ in range(2))
    piece = data[begin : begin + noise.choice([1, 30, 300, 3000])]
    return data[:at] + piece * noise.choice([1, 1, 2, 50]) + data[at:]


def insert(data: bytes, noise: Random) -> bytes:
    for _ in range(noise.choice([1, 1, 3, 20])):
        at = noise.randrange(len(data) + 1)
        data = data[:at] + noise.choice([*TOKENS, noise.randbytes(3)]) + data[at + noise.randrange(3) :]
    return data


BYTES: tuple[Mutation, ...] = (cut, flip, splice, duplicate, insert)


def of_bytes(data: bytes, noise: Random) -> bytes:
    """One or two mutations of bytes."""
    for _ in range(noise.choice([1, 1, 2])):
        data = noise.choice(BYTES)(data, noise)
    return data


# --- JSON -------------------------------------------------------------------------------------------------------------


def of_json(data: bytes, noise: Random) -> bytes:
    """One to three mutations of the tree of a JSON text; of lines of JSON, of one line's."""
    try:
        tree = json.loads(data)
    except ValueError:
        lines = data.split(b"\n")
        at = noise.randrange(len(lines))
        lines[at] = of_json(lines[at], noise) if lines[at].startswith((b"{", b"[")) else noise.choice(lines)
        return b"\n".join(lines)
    for _ in range(noise.choice([1, 1, 2, 3])):
        tree = _mutated_tree(tree, noise)
    text = json.dumps(tree, ensure_ascii=noise.random() < 0.7, separators=noise.choice([None, (",", ":")]))
    if noise.random() < 0.05:  # a key twice
        text = text.replace("{", '{"' + noise.choice(["id", "ts", "name", "args", "x"]) + '": 1, ', 2)
    return _deep(text.encode(errors="surrogatepass"), noise)


def _deep(text: bytes, noise: Random) -> bytes:
    """The text with each mark of `_mutated_tree` made a value that nests deep."""
    pair = noise.choice([(b"[", b"]"), (b'{"a":', b"}")])
    deep = noise.choice([200, 1100, 30_000])
    return text.replace(b'"\\u0001deep"', pair[0] * deep + b"1" + pair[1] * deep)


def _mutated_tree(tree: Any, noise: Random) -> Any:
    places = list(_places(tree))
    if not places:
        return _copy(noise.choice(ODD))
    holder, key = noise.choice(places)
    other, also = noise.choice(places)
    how = noise.randrange(9)
    if how == 0:
        del holder[key]
    elif how == 1:  # of one place into another
        holder[key] = _copy(other[also])
    elif how == 2:
        holder[key], other[also] = other[also], _copy(holder[key])
    elif how == 3 and isinstance(holder, list):
        text = json.dumps(holder[key])
        times = noise.choice([1, 2, 40]) if len(text) < 1000 else 1
        holder[key:key] = [json.loads(text) for _ in range(times)]  # shared values could come to hold themselves
    elif how == 4 and isinstance(holder, dict):
        name = also if isinstance(also, str) else noise.choice(["", "\0", "id", key.upper()])
        holder[name] = holder.pop(key)
    elif how == 5 and isinstance(holder[key], int | float):
        holder[key] = noise.choice([-holder[key], str(holder[key]), float(holder[key]), holder[key] + 1, *NUMBERS])
    elif how == 6:
        holder[key] = [holder[key]] if noise.random() < 0.5 else {"x": holder[key]}
    elif how == 7 and noise.random() < 0.1:
        holder[key] = "\x01deep"
    else:
        holder[key] = _copy(noise.choice(ODD))
    return tree


def _copy(tree: Any) -> Any:
    return json.loads(json.dumps(tree))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(object or list, key or position) of all values of a tree."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


# --- gzip -------------------------------------------------------------------------------------------------------------


def packed(text: Mutation) -> Mutation:
    """Of a gzip file: of its text by `text`, of its bytes, of its members; now and then 8 MiB of spaces in it."""

    def mutate(data: bytes, noise: Random) -> bytes:
        how = noise.random()
        if how < 0.6:
            return gzip.compress(text(_unpacked(data), noise), 1, mtime=0)
        if how < 0.9:
            return of_bytes(data, noise)
        if how < 0.92:
            return data + _bomb()
        more = gzip.compress(noise.randbytes(5), mtime=0)
        return noise.choice([data + data, data + more, more + data, data + b"\0" * 600, data + b"x", data[:12] * 2])

    return mutate


_unpacked = cache(gzip.decompress)


@cache
def _bomb() -> bytes:
    return gzip.compress(b" " * (8 << 20), 9, mtime=0)


# --- protobuf ---------------------------------------------------------------------------------------------------------


def of_messages(data: bytes, noise: Random) -> bytes:
    """Of a field of one of the messages that a file has behind their lengths, which are put right; or of a length."""
    messages = list(_parts(data, noise, framed=True))
    at = noise.randrange(len(messages))
    length, body = messages[at]
    messages[at] = (length, _mutated_message(body, noise, 3))
    if noise.random() < 0.2:
        messages.insert(noise.randrange(len(messages)), messages[noise.randrange(len(messages))])
    lengths = [varint(len(body)) for _, body in messages]
    if noise.random() < 0.1:
        lengths[at] = noise.choice([varint(noise.choice([0, 1, 2**31, 2**63, 2**64 - 1])), b"\xff" * 11, b""])
    return b"".join(length + body for length, (_, body) in zip(lengths, messages, strict=True))


def _mutated_message(body: bytes, noise: Random, depth: int) -> bytes:
    fields = list(_parts(body, noise, framed=False))
    if not fields:
        return noise.randbytes(3)
    at = noise.randrange(len(fields))
    tag, value = fields[at]
    how = noise.randrange(7)
    if how == 0:
        del fields[at]
    elif how == 1:
        fields.insert(noise.randrange(len(fields) + 1), fields[at])
    elif how == 2:
        tag = varint(noise.choice([0, 1, 8, 10, 26, 82, 2**29, 2**32]) | noise.randrange(8))
        fields[at] = tag, value
    elif how == 3 and depth and tag[0] & 7 == 2:
        inner = _mutated_message(value[1:], noise, depth - 1)
        fields[at] = tag, varint(len(inner)) + inner
    elif how == 4 and tag[0] & 7 == 0:
        fields[at] = tag, varint(noise.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1, 2**65]))
    elif how == 5:
        fields[at] = tag, of_bytes(value, noise)
    else:
        text = noise.choice([b"", b"\xff\xfe", b"\xed\xa0\xbd", "ядро".encode(), b"[" * 2000, b"9" * 40, b"x" * 20_000])
        fields[at] = tag, varint(len(text)) + text
    return b"".join(tag + value for tag, value in fields)


def _parts(data: bytes, noise: Random, *, framed: bool) -> Iterator[tuple[bytes, bytes]]:
    """(length, message) of a file of messages, or (tag, the rest) of the fields of one; what is no field as it is."""
    at = 0
    while at < len(data):
        first = _varint_end(data, at)
        kind = 2 if framed else data[at] & 7
        end = {0: _varint_end(data, first), 1: first + 8, 5: first + 4}.get(kind, first)
        if kind == 2:
            body = first if framed else _varint_end(data, first)
            size = data[at:first] if framed else data[first:body]
            end = body + sum((byte & 127) << 7 * k for k, byte in enumerate(size))
        yield data[at:first], data[first:end]
        at = max(end, at + 1)


def _varint_end(data: bytes, at: int) -> int:
    while at < len(data) and data[at] > 127:
        at += 1
    return at + 1


# --- tables -----------------------------------------------------------------------------------------------------------

_CELLS = [value for value in ODD if value is None or (isinstance(value, int | float | str) and value != "\ud83d")]
_CASTS: list[Any] = [
    *(
        pl.String(),
        pl.Binary(),
        pl.Float64(),
        pl.Float32(),
        pl.Int8(),
        pl.UInt64(),
        pl.Int64(),
        pl.Boolean(),
        pl.Null(),
    ),
    *(pl.Null(), pl.Categorical(), pl.Date(), pl.Duration("ns"), pl.Decimal(20, 2), pl.Int128()),
]


def mutated_frame(frame: pl.DataFrame, noise: Random) -> pl.DataFrame:
    """A frame with a column gone, renamed, of another type or with odd values, or with other rows."""
    if not frame.width:
        return pl.DataFrame({"x": [1]})
    name, other = noise.choice(frame.columns), noise.choice(frame.columns)
    column, how = frame[name], noise.randrange(9)
    if how == 0:
        return frame.drop(name)
    if how == 1:
        return frame.rename({name: noise.choice([name.upper(), name + " ", "", "ядро"])})
    if how == 2:
        return frame.with_columns(column.cast(noise.choice(_CASTS), strict=False).alias(name))
    if how == 3:
        nested = [pl.struct(name, pl.lit(1).alias("x")), pl.concat_list(name), pl.lit(date(2000, 1, 1)), pl.lit(None)]
        return frame.with_columns(noise.choice(nested).alias(name))
    if how == 4:
        return frame.with_columns(frame[other].alias(name))
    if how == 5:
        return noise.choice(
            [frame.clear(), frame[:1], pl.concat([frame, frame]), frame.reverse(), frame.head(0).drop(name)]
        )
    value = noise.choice(_CELLS)
    odd = pl.Series([value], dtype=noise.choice([column.dtype, None]), strict=False)
    at = noise.randrange(len(frame) + 1)
    every = how == 6 or odd.dtype != column.dtype
    return frame.with_columns(pl.when(pl.int_range(pl.len()) == at).then(name).otherwise(odd[0]).alias(name)
        if not every else pl.lit(odd).first().alias(name))  # fmt: skip


def of_parquet(data: bytes, noise: Random) -> bytes:
    """Of the columns of a Parquet file, properly written; or of its bytes."""
    if noise.random() < 0.5:
        return of_bytes(data, noise)
    out = io.BytesIO()
    frame = _frame(data)
    try:
        for _ in range(noise.choice([1, 1, 2])):
            frame = mutated_frame(frame, noise)
        frame.write_parquet(out, compression=noise.choice(["zstd", "uncompressed", "snappy"]), metadata=_metadata(data))
    except (pl.exceptions.PolarsError, OverflowError, TypeError, ValueError):  # there is no such table
        return of_bytes(data, noise)
    return out.getvalue()


@cache
def _frame(data: bytes) -> pl.DataFrame:
    return pl.read_parquet(data)


@cache
def _metadata(data: bytes) -> dict[str, str]:
    return {key: text for key, text in pl.read_parquet_metadata(io.BytesIO(data)).items() if key != "ARROW:schema"}


def of_csv(data: bytes, noise: Random) -> bytes:
    """Of the columns of a CSV file; or of its bytes, or of a cell."""
    how = noise.random()
    if how < 0.3:
        return of_bytes(data, noise)
    if how < 0.6:
        lines = [line.split(b",") for line in data.split(b"\n")]
        row = noise.choice(lines)
        row[noise.randrange(len(row))] = str(noise.choice(ODD)).encode(errors="replace")
        return b"\n".join(b",".join(row) for row in lines)
    try:
        return mutated_frame(pl.read_csv(data), noise).write_csv().encode()
    except (pl.exceptions.PolarsError, OverflowError, TypeError, ValueError):
        return of_bytes(data, noise)


# --- databases, archives ----------------------------------------------------------------------------------------------


def of_sqlite(data: bytes, noise: Random) -> bytes:
    """Of the tables of a database, properly written; or of its bytes."""
    if noise.random() < 0.5:
        return of_bytes(data, noise)
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(data)
        connection.text_factory = bytes
        for _ in range(noise.choice([1, 1, 2, 3])):
            _mutate_database(connection, noise)
        connection.commit()
        return connection.serialize()
    except (sqlite3.Error, OverflowError):
        return of_bytes(data, noise)
    finally:
        connection.close()


def _mutate_database(connection: sqlite3.Connection, noise: Random) -> None:
    tables = [name.decode() for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    if not tables:
        return
    table = noise.choice(tables)
    columns = [name.decode() for _, name, *_ in connection.execute(f'PRAGMA table_info("{table}")')]
    column, other = noise.choice(columns), noise.choice(columns)
    value = noise.choice([*_CELLS, b"\xff\xfe"])
    how = noise.randrange(8)
    if how == 0:
        connection.execute(f'DROP TABLE "{table}"')
    elif how == 1:
        connection.execute(f'ALTER TABLE "{table}" RENAME TO "{noise.choice(["x", "NVTX_EVENTS", table + " "])}"')
    elif how == 2:
        connection.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
    elif how == 3:
        renamed = noise.choice(["x", "process", "event_id", "name", "rank", "start_ns", "ядро"])
        connection.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{renamed}"')
    elif how == 4:
        connection.execute(f'UPDATE "{table}" SET "{column}" = "{other}"')
    elif how == 5:
        connection.execute(f'INSERT INTO "{table}" SELECT * FROM "{table}"')
    else:
        where = "" if how == 6 else f" WHERE rowid = {noise.randrange(4)}"
        connection.execute(f'UPDATE "{table}" SET "{column}" = ?{where}', [value])


def of_tar(text: Mutation) -> Mutation:
    """Of a tar archive, plain or gzip: of its bytes, of a member by `text`, or of which members there are."""

    def mutate(data: bytes, noise: Random) -> bytes:
        zipped = data.startswith(b"\x1f\x8b")
        plain = _unpacked(data) if zipped else data
        if noise.random() < 0.4:
            plain = of_bytes(plain, noise)
        else:
            members = [*_members(plain)]
            at = noise.randrange(len(members))
            name, body = members[at]
            how = noise.randrange(4)
            if how == 0:
                members[at] = (noise.choice(["", "/x.json", "../x.json", "a/b/rank-0.json", "x" * 120]), body)
            elif how == 1:
                members.append((name, text(body, noise)))
            else:
                members[at] = (name, text(body, noise))
            plain = tar_of(members, kind=noise.choice([b"0", b"0", b"0", b"1", b"2", b"3", b"5", b"6", b"x"]))
        packed = gzip.compress(plain, 1, mtime=0) if zipped else plain
        return of_bytes(packed, noise) if noise.random() < 0.1 else packed

    return mutate


@cache
def _members(data: bytes) -> list[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [(each.name, file.read()) for each in archive if (file := archive.extractfile(each))]


def tar_of(members: list[tuple[str, bytes]], kind: bytes = tarfile.REGTYPE) -> bytes:
    """A tar archive of files, the last of which is of `kind`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for at, (name, body) in enumerate(members):
            about = tarfile.TarInfo(name)
            about.type = kind if at == len(members) - 1 else tarfile.REGTYPE
            about.linkname = "x"
            about.size = len(body) if about.isreg() else 0
            archive.addfile(about, io.BytesIO(body))
    return out.getvalue()


def either(*ways: Mutation) -> Mutation:
    """One of several ways."""
    return lambda data, noise: noise.choice(ways)(data, noise)


JSON = either(of_bytes, of_json)
