"""The tables of an execution trace, by column out of the JSON text of its nodes' lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from lumos_nb.errors import TraceError
from lumos_nb.traces._event_kernels import Int64s
from lumos_nb.traces._list_kernels import write_elements
from lumos_nb.traces.json_stream import UNDECODABLE

GROUP_NODE, COMM_NODE = "## process_group:init ##", "record_param_comms"
KEY = ["node_id", "side", "position"]
ARGUMENTS = {
    "node_id": pl.Int64(),
    "side": pl.String(),
    "position": pl.Int64(),
    **dict.fromkeys(("type", "value", "shape", "strides"), pl.String()),
}
NONE = msgspec.Raw(b"[]")
_NUMBERS = ("tensor_id", "storage_id", "offset", "numel", "itemsize")
_DIMS = pl.List(pl.Int64())
TENSORS = {
    "node_id": pl.Int64(),
    "side": pl.String(),
    "position": pl.Int64(),
    "item": pl.Int64(),
    **dict.fromkeys(_NUMBERS, pl.Int64()),
    "device": pl.String(),
    "dtype": pl.String(),
    "shape": _DIMS,
    "strides": _DIMS,
}
GROUPS = {
    "group": pl.String(),
    "description": pl.String(),
    "backend": pl.String(),
    "ranks": pl.List(pl.Int32()),
    "group_size": pl.Int32(),
}
ATTRIBUTES = {"node_id": pl.Int64(), **dict.fromkeys(("name", "type", "value"), pl.String())}
_TENSOR = r'^\[(\d+),(\d+),(-?\d+),(\d+),(\d+),"([^"\\]*)"\]$'
_DTYPE = re.compile(r"Tensor\(((?:[^()]|\([^()]*\))*)\)")
_ATTRIBUTE = re.compile(r'\{"name":"([^"\\]*)","type":"([^"\\]*)","value":')


class Side(NamedTuple):
    """The inputs or the outputs of all nodes, a list of JSON each."""

    values: Sequence[msgspec.Raw]
    shapes: Sequence[msgspec.Raw]
    types: Sequence[msgspec.Raw]
    strides: Sequence[msgspec.Raw] | None


class _Attribute(msgspec.Struct):
    name: str
    type: str
    value: msgspec.Raw


def _elements(lists: Sequence[msgspec.Raw], ids: Int64s, what: str) -> tuple[pl.Series, Int64s]:
    """The elements of all lists, and how many each has."""
    text = np.frombuffer(bytearray(b"".join(lists) + bytes(8)), np.uint8)
    lines, counts = np.empty_like(text), np.zeros(len(lists), np.int64)
    size = write_elements(text, lines, counts)
    if size < 0:
        raise TraceError(f"node {ids[-size - 1]}: its {what} are no list: {bytes(lists[-size - 1])[:80]!r}.")
    if not size:
        return pl.Series(dtype=pl.String), counts
    return pl.Series([lines[: size - 1].tobytes().decode()]).str.split("\n").explode(), counts


def _decoded(texts: pl.Series, kind: Any, dtype: pl.DataType, ids: pl.Series, what: str) -> pl.Series:
    """Values of a column of JSON, each that occurs decoded once."""
    known = texts.unique().drop_nulls()
    try:
        values = msgspec.json.decode(f"[{','.join(known)}]", type=list[kind])
        meaning = pl.DataFrame({"text": known, "value": pl.Series(values, dtype=dtype)})
    except (*UNDECODABLE, OverflowError, TypeError):
        for node_id, text in zip(ids, texts, strict=True):
            try:
                pl.Series([msgspec.json.decode(text, type=kind)], dtype=dtype)
            except (*UNDECODABLE, OverflowError, TypeError) as error:
                raise TraceError(f"node {node_id}: its {what} {text[:80]} cannot be read ({error}).") from error
        raise
    return texts.to_frame("text").join(meaning, on="text", how="left", maintain_order="left")["value"]


def arguments(ids: Int64s, inputs: Side, outputs: Side) -> pl.DataFrame:
    """One row an argument."""
    return pl.concat([_arguments(ids, "input", inputs), _arguments(ids, "output", outputs)])


def _arguments(ids: Int64s, name: str, side: Side) -> pl.DataFrame:
    types, counts = _elements(side.types, ids, f"{name} types")
    node_ids, starts = np.repeat(ids, counts), np.cumsum(counts) - counts
    if not types.str.starts_with('"').all():
        at = types.str.starts_with('"').arg_min() or 0
        raise TraceError(f"node {node_ids[at]}: the {name} type {types[at]} is no string.")
    columns: dict[str, Any] = {"node_id": node_ids, "position": np.arange(len(types)) - np.repeat(starts, counts)}
    for column, lists in (("value", side.values), ("shape", side.shapes), ("strides", side.strides)):
        texts, found = _elements(lists, ids, f"{name} {column}") if lists else (None, np.zeros_like(counts))
        wrong = found > counts if column == "strides" else found != counts  # Triton's kernels have fewer strides
        if wrong.any():
            at = int(wrong.argmax())
            raise TraceError(f"node {ids[at]}: {found[at]} {name} {column}(s) for {counts[at]} type(s).")
        if texts is not None and len(texts) < len(types):
            rows = np.arange(len(texts)) + np.repeat(starts - np.cumsum(found) + found, found)
            texts = pl.repeat(None, len(types), dtype=pl.String, eager=True).scatter(rows, texts)
        columns[column] = texts
    frame = pl.DataFrame(columns, schema_overrides={k: ARGUMENTS[k] for k in columns})
    return frame.select(
        "node_id",
        pl.lit(name).alias("side"),
        "position",
        types.str.strip_chars('"').alias("type"),
        *list(ARGUMENTS)[4:],
    )


def tensors(arguments: pl.DataFrame) -> pl.DataFrame:
    """One row for each tensor among the arguments, alone or in a list."""
    alone = pl.col("type").str.starts_with("Tensor(")
    found = arguments.filter(alone)
    fields = found.select(
        pl.col("value").str.extract_groups(_TENSOR).struct.rename_fields([*_NUMBERS, "device"]).struct.unnest()
    )
    numbers = fields.select(pl.col(_NUMBERS).cast(pl.Int64, strict=False))
    if not (sound := numbers.select(pl.all_horizontal(pl.all().is_not_null())).to_series()).all():
        node_id, side, position, _, value, *_rest = found.row(sound.arg_min() or 0)
        raise TraceError(f"node {node_id}: {side} {position} should be a tensor, [5 numbers, device]: {value[:80]}.")
    dims = {
        name: _decoded(found[name], list[int], _DIMS, found["node_id"], f"tensor's {name}")
        for name in ("shape", "strides")
    }
    single = found.select(
        *KEY,
        pl.lit(0, pl.Int64).alias("item"),
        *numbers.get_columns(),
        fields["device"],
        pl.col("type").str.slice(len("Tensor(")).str.head(-1).alias("dtype"),
        **dims,
    )
    return pl.concat([single, _listed(arguments.filter(~alone & pl.col("type").str.contains("Tensor(", literal=True)))])


def _listed(arguments: pl.DataFrame) -> pl.DataFrame:
    """The tensors in lists, tuples and lists of lists."""
    rows: list[tuple[Any, ...]] = []
    for node_id, side, position, kind, *texts in arguments.iter_rows():
        try:
            found = list(_leaves(*(None if text is None else msgspec.json.decode(text) for text in texts)))
        except (*UNDECODABLE, ValueError, TypeError) as error:
            raise TraceError(
                f"node {node_id}: {side} {position}, {kind[:80]}, has other shapes than values."
            ) from error
        dtypes = _DTYPE.findall(kind)
        if len(dtypes) != len(found):
            raise TraceError(f"node {node_id}: {side} {position}, {kind[:80]}, holds {len(found)} tensor(s).")
        rows += (
            (node_id, side, position, item, *value, dtype, shape, strides)
            for item, (dtype, (value, shape, strides)) in enumerate(zip(dtypes, found, strict=True))
        )
    try:
        return pl.DataFrame(rows, schema=TENSORS, orient="row")
    except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
        raise TraceError(f"a list of tensors has a number or a shape that cannot be: {error}") from error


def _leaves(value: Any, shape: Any, strides: Any) -> Iterator[tuple[Any, Any, Any]]:
    """(value, shape, strides) of every tensor in nested lists."""
    if not isinstance(value, list):
        return
    if len(value) == len(_NUMBERS) + 1 and isinstance(value[-1], str) and type(value[0]) is int:
        yield value, shape, strides
        return
    for one, its_shape, its_strides in zip(value, shape, strides or [None] * len(value), strict=True):
        yield from _leaves(one, its_shape, its_strides)


def attributes(ids: Int64s, lists: Sequence[msgspec.Raw]) -> dict[str, pl.DataFrame]:
    """Attribute -> the `row` of each node that has it, its `type` and its `value` as JSON."""
    texts, counts = _elements(lists, ids, "attrs")
    left = pl.DataFrame({"row": np.repeat(np.arange(len(ids)), counts), "text": texts})
    found: dict[str, list[pl.DataFrame]] = {}
    while len(left):
        row, text = left.row(0)
        if match := _ATTRIBUTE.match(text):  # all that begin alike, at once: there are a few dozen beginnings
            name, kind, start = match[1], match[2], match.end()
            same = left["text"].str.starts_with(match[0])
            value = pl.col("text").str.slice(start).str.head(-1)
        else:  # another order of keys, or escapes
            try:
                one = msgspec.json.decode(text, type=_Attribute)
            except UNDECODABLE as error:
                raise TraceError(f"node {ids[row]}: {text[:80]} is no attribute ({error}).") from error
            name, kind, same = one.name, one.type, left["text"] == text
            value = pl.lit(bytes(one.value).decode())
        own = left.filter(same).select("row", pl.lit(kind).alias("type"), value.alias("value"))
        found.setdefault(name, []).append(own)
        left = left.filter(~same)
    whole = {name: pl.concat(parts).sort("row") for name, parts in found.items()}
    for name, own in whole.items():
        if (twice := np.flatnonzero(np.diff(own["row"].to_numpy()) == 0)).size:
            raise TraceError(f"node {ids[own['row'][int(twice[0])]]} has two attributes {name}.")
    return whole


def column(own: pl.DataFrame | None, name: str, dtype: pl.DataType, ids: Int64s) -> pl.Series:
    """The values of one attribute, null at nodes that lack it."""
    empty = pl.repeat(None, len(ids), dtype=dtype, eager=True).alias(name)
    if own is None:
        return empty
    texts = own["value"]
    if dtype == pl.String and not texts.str.contains("\\", literal=True).any() and texts.str.starts_with('"').all():
        values = texts.str.strip_chars('"')
    elif dtype != pl.String and not (plain := texts.cast(pl.Int64, strict=False)).has_nulls():
        values = plain
    else:
        values = _decoded(texts, str if dtype == pl.String else int, dtype, pl.Series(ids[own["row"]]), name)
    return values.alias(name) if len(own) == len(ids) else empty.scatter(own["row"], values)


def other_attributes(ids: Int64s, attributes: dict[str, pl.DataFrame], known: set[str]) -> pl.DataFrame:
    """`ATTRIBUTES` of those that are not known."""
    parts = [
        own.select(pl.Series("node_id", ids[own["row"]]), pl.lit(name).alias("name"), "type", "value")
        for name, own in attributes.items()
        if name not in known
    ]
    return pl.concat([pl.DataFrame(schema=ATTRIBUTES), *parts])


class _Group(msgspec.Struct):
    pg_name: str | int
    group_size: int
    pg_desc: str = ""
    backend_config: str = ""
    ranks: list[int] = []


def groups(nodes: pl.DataFrame, arguments: pl.DataFrame) -> pl.DataFrame:
    """The process groups, each once however often the profiler began a cycle."""
    init = nodes.filter(pl.col("name") == GROUP_NODE).select("node_id")
    found: dict[str, tuple[Any, ...]] = {}
    for node_id, text in arguments.join(init, on="node_id", how="semi").select("node_id", "value").iter_rows():
        try:
            said = msgspec.json.decode(msgspec.json.decode(text, type=str), type=list[_Group])
        except UNDECODABLE as error:
            raise TraceError(f"node {node_id}: {text[:80]} is no list of process groups ({error}).") from error
        for one in said:
            row = (str(one.pg_name), one.pg_desc, one.backend_config, one.ranks, one.group_size)
            if found.setdefault(row[0], row) != row:
                raise TraceError(f"node {node_id}: process group {row[0]} is another one than before: {text[:80]}.")
    return pl.DataFrame(list(found.values()), schema=GROUPS, orient="row")


def comms(nodes: pl.DataFrame, arguments: pl.DataFrame, tensors: pl.DataFrame) -> pl.DataFrame:
    """Records of collectives: what stands where, counted from the collective's name, is the same in all schemas."""
    own = nodes.filter(pl.col("name") == COMM_NODE).select("node_id")
    given = arguments.filter(pl.col("side") == "input").join(own, on="node_id", how="semi")
    names = given.filter(pl.col("type") == "String").group_by("node_id", maintain_order=True).first()
    given = given.join(names.select("node_id", at="position"), on="node_id")
    place, value = pl.col("position") - pl.col("at"), pl.col("value")

    def at(offset: int) -> pl.Expr:
        return value.filter(place == offset).first()

    after = place.max()  # 2: the splits alone; 3: also the size; 5 and more: the ranks' start and stride, the size
    said = given.group_by("node_id", maintain_order=True).agg(
        collective=at(0).str.strip_chars('"'),
        sequence=at(-3).cast(pl.Int64, strict=False),
        names=at(-2),
        rank=at(-1).cast(pl.Int32, strict=False),
        in_splits=at(1),
        out_splits=at(2),
        rank_start=pl.when(after >= 5).then(at(3)).cast(pl.Int32, strict=False),
        rank_stride=pl.when(after >= 5).then(at(4)).cast(pl.Int32, strict=False),
        group_size=pl.when(after >= 5).then(at(5)).otherwise(at(3)).cast(pl.Int32, strict=False),
    )
    splits = {
        name: _decoded(said[name], list[int], _DIMS, said["node_id"], name) for name in ("in_splits", "out_splits")
    }
    quoted = pl.col("names").str.extract_groups(r'^\["([^"]*)","([^"]*)"\]$')
    said = said.with_columns(
        group=quoted.struct.field("1").fill_null(pl.col("names")), description=quoted.struct.field("2"), **splits
    )
    moved = tensors.join(said.select("node_id"), on="node_id", how="semi")
    size = pl.col("numel") * pl.col("itemsize")
    incoming, outgoing = pl.col("side") == "input", pl.col("side") == "output"
    sums = moved.group_by("node_id").agg(
        dtype=pl.col("dtype").first(),
        in_numel=pl.col("numel").filter(incoming).sum(),
        out_numel=pl.col("numel").filter(outgoing).sum(),
        in_bytes=size.filter(incoming).sum(),
    )
    zeros = pl.col("in_numel", "out_numel", "in_bytes").fill_null(0)
    found = said.join(sums, on="node_id", how="left", maintain_order="left").with_columns(zeros)
    return found.select(
        "node_id", "collective", "sequence", "group", "description", "rank", "dtype", "in_numel", "out_numel",
        "in_bytes", "in_splits", "out_splits", "rank_start", "rank_stride", "group_size",
    )  # fmt: skip
