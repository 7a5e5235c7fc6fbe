"""The tables of an execution trace, by column out of the JSON text of its nodes' lists."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl

from lumos_nb.errors import UNDECODABLE, TraceError
from lumos_nb.traces._event_kernels import Int64s
from lumos_nb.traces._list_kernels import write_elements, write_values

GROUP_NODE, COMM_NODE = "## process_group:init ##", "record_param_comms"
KEY = ["node_id", "side", "position"]
ARGUMENTS = {
    "node_id": pl.Int64(),
    "side": pl.String(),
    "position": pl.Int64(),
    **dict.fromkeys(("type", "value", "shape", "strides"), pl.String()),
}
NONE = msgspec.Raw(b"[]")
_PAD = bytes(8)
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
_DTYPE = re.compile(r"Tensor\(((?:[^()]|\([^()]*\))*)\)")
_BEGINNING = re.compile(
    rb'[\[,]\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"type"\s*:\s*"([^"\\]*)"\s*,\s*"value"\s*:\s*(?=[^\s\[{])'
)
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
    texts, counts, wrong = _cut(bytearray().join([*lists, _PAD]), len(lists))
    if wrong >= 0:
        raise TraceError(f"node {ids[wrong]}: its {what} are no list, or no UTF-8: {bytes(lists[wrong])[:80]!r}.")
    return texts, counts


def _cut(lists: bytearray, count: int) -> tuple[pl.Series, Int64s, int]:
    """The elements of lists that stand one after the other, how many each has, and which is no list (-1: none)."""
    text, counts = np.frombuffer(lists, np.uint8), np.zeros(count, np.int64)
    lines = np.empty_like(text)
    size = write_elements(text, lines, counts)
    if size <= 0:
        return pl.Series(dtype=pl.String), counts, -size - 1
    return pl.Series([str(lines[: size - 1].data, "utf-8")]).str.split("\n").explode(), counts, -1


def _decoded(texts: pl.Series, kind: Any, dtype: pl.DataType, ids: pl.Series, what: str) -> pl.Series:
    """Values of a column of JSON, each that occurs decoded once."""
    known = texts.unique().drop_nulls()
    try:
        values = msgspec.json.decode(f"[{','.join(known)}]", type=list[kind])
        meaning = pl.DataFrame({"text": known, "value": pl.Series(values, dtype=dtype)})
    except (*UNDECODABLE, OverflowError, TypeError):
        for node_id, text in pl.DataFrame([ids, texts]).drop_nulls().iter_rows():
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
    several = arguments.filter(~alone & pl.col("type").str.contains("Tensor(", literal=True))
    found = arguments.filter(alone)
    single = found.select(
        *KEY,
        pl.lit(0, pl.Int64).alias("item"),
        *_fields(found),
        pl.col("type").str.strip_prefix("Tensor(").str.strip_suffix(")").alias("dtype"),
        "shape",
        "strides",
    )
    found = pl.concat([single, _listed(several)])
    return found.with_columns(
        _decoded(found[name], list[int], _DIMS, found["node_id"], f"tensor's {name}").alias(name)
        for name in ("shape", "strides")
    )


def _fields(found: pl.DataFrame) -> list[pl.Series]:
    """The five numbers and the device that stand for a tensor."""
    names = [*_NUMBERS, "device"]
    texts, counts, wrong = _cut(bytearray(found["value"].str.join("").item().encode() + _PAD), len(found))
    uneven = counts != len(names)
    if wrong < 0 and not uneven.any():
        columns = [texts.gather_every(len(names), k).alias(name) for k, name in enumerate(names)]
        fields = [each.cast(pl.Int64, strict=False) for each in columns[:-1]]
        unsound = pl.DataFrame(fields).select(pl.any_horizontal(pl.all().is_null())).to_series()
        unsound |= ~columns[-1].str.starts_with('"')
        if not unsound.any():
            return [*fields, columns[-1].str.strip_chars('"')]
        uneven = unsound.to_numpy()
    node_id, side, position, _, value, *_rest = found.row(wrong if wrong >= 0 else int(uneven.argmax()))
    raise TraceError(f"node {node_id}: {side} {position} should be a tensor, [5 numbers, device]: {value[:80]}.")


def _listed(arguments: pl.DataFrame) -> pl.DataFrame:
    """The tensors in lists, tuples and lists of lists."""
    columns: dict[str, list[Any]] = {name: [] for name in TENSORS}
    for node_id, side, position, kind, *texts in arguments.iter_rows():
        place = f"node {node_id}: {side} {position}, {kind[:80]}"
        try:
            found = _leaves(*(None if text is None else msgspec.json.decode(text) for text in texts))
        except (*UNDECODABLE, ValueError, TypeError) as error:
            raise TraceError(f"{place}, has other shapes than values.") from error
        dtypes = _DTYPE.findall(kind)
        if not len(dtypes) == len(found) > 0:
            raise TraceError(f"{place}, holds {len(found)} tensor(s).")
        values, *dims = zip(*found, strict=True)
        rows = ([node_id] * len(found), [side] * len(found), [position] * len(found), range(len(found)))
        encoded = ([None if one is None else msgspec.json.encode(one).decode() for one in each] for each in dims)
        parts: list[Any] = [*rows, *zip(*values, strict=True), dtypes, *encoded]
        for column, more in zip(columns.values(), parts, strict=True):
            column.extend(more)
    try:
        return pl.DataFrame(columns, schema=TENSORS | dict.fromkeys(("shape", "strides"), pl.String()))
    except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
        raise TraceError(f"a list of tensors has a number that cannot be: {error}") from error


def _leaves(value: Any, shape: Any, strides: Any) -> list[tuple[Any, Any, Any]]:
    """(value, shape, strides) of every tensor in nested lists."""
    found = []
    for one in zip(value, shape, strides or [None] * len(value), strict=True):
        if isinstance(one[0], list):
            is_tensor = len(one[0]) == len(_NUMBERS) + 1 and type(one[0][0]) is int and isinstance(one[0][-1], str)
            found += [one] if is_tensor else _leaves(*one)
    return found


def attributes(ids: Int64s, lists: Sequence[msgspec.Raw]) -> dict[str, pl.DataFrame]:
    """Attribute -> the `row` of each node that has it, its `type` and its `value` as JSON."""
    found: dict[str, list[pl.DataFrame]] = {}
    first, rows = _alike(lists, found)
    texts, counts = _elements([lists[row] for row in rows], ids[rows], "attrs")
    further = np.arange(len(texts)) - np.repeat(np.cumsum(counts) - counts, counts) >= first
    own = pl.DataFrame({"row": np.repeat(rows, counts), "text": texts}, schema_overrides={"text": pl.String()})
    _take(own.filter(further), ids, found)
    whole = {name: pl.concat(parts).sort("row") if len(parts) > 1 else parts[0] for name, parts in found.items()}
    for name, own in whole.items():
        if (twice := np.flatnonzero(np.diff(own["row"].to_numpy()) == 0)).size:
            raise TraceError(f"node {ids[own['row'][int(twice[0])]]} has two attributes {name}.")
    return whole


def _alike(lists: Sequence[msgspec.Raw], found: dict[str, list[pl.DataFrame]]) -> tuple[int, Int64s]:
    """Take the attributes with which all lists begin, as those of torch do; their number, and which lists have more."""
    beginnings = list(_BEGINNING.finditer(bytes(lists[0])))
    text = np.frombuffer(bytearray().join([*lists, _PAD]), np.uint8)
    edges = np.cumsum([0, *(len(one[0]) for one in beginnings)])
    lines, more = np.empty_like(text), np.zeros(len(lists), np.bool_)
    ours = np.frombuffer(bytearray().join([*(one[0] for one in beginnings), _PAD]), np.uint8)
    size = write_values(text, ours, edges, lines, more) if beginnings else -1
    if size <= 0:
        return 0, np.arange(len(lists))
    values = pl.Series([str(lines[: size - 1].data, "utf-8")]).str.split("\n").explode()
    row = pl.Series("row", np.arange(len(lists)))
    for k, one in enumerate(beginnings):
        kind = pl.lit(one[2].decode()).alias("type")
        own = values.gather_every(len(beginnings), k).alias("value")
        found.setdefault(one[1].decode(), []).append(row.to_frame().select("row", kind, own))
    return len(beginnings), np.flatnonzero(more)


def _take(left: pl.DataFrame, ids: Int64s, found: dict[str, list[pl.DataFrame]]) -> None:
    """Sort attributes by name: all that begin alike at once, which is a few dozen beginnings."""
    while len(left):
        row, text = left.row(0)
        if match := _ATTRIBUTE.match(text):
            name, kind, beginning = match[1], match[2], match[0]
            same = left["text"].str.starts_with(beginning)
            value = pl.col("text").str.strip_prefix(beginning).str.strip_suffix("}")
        else:  # another order of keys, or escapes
            try:
                one = msgspec.json.decode(text, type=_Attribute)
            except UNDECODABLE as error:
                raise TraceError(f"node {ids[row]}: {text[:80]} is no attribute ({error}).") from error
            name, kind, same = one.name, one.type, left["text"] == text
            value = pl.lit(bytes(one.value).decode())
        own = left if same.all() else left.filter(same)
        found.setdefault(name, []).append(own.select("row", pl.lit(kind).alias("type"), value.alias("value")))
        left = left.clear() if len(own) == len(left) else left.filter(~same)


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
