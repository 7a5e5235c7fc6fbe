"""Which operators of an execution trace a benchmark calls: the topmost that make all that others use of them.

An operator's children are its own work, so that they are not called again. Only where a later operator uses a tensor
that a child made and the operator does not give back (the saved mean of a layer norm, the view that a linear layer
keeps for its backward pass) are the children called in its place; that is right for composites, which do nothing else.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import polars as pl

from lumos_nb.errors import TraceError
from lumos_nb.fake_group import BOOKKEEPING_OPS
from lumos_nb.traces.execution_trace import ExecutionTrace

SCHEMA = re.compile(r"([A-Za-z_]\w*::[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)\(")
COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_SUBCLASS = "PythonSubclass"
"""What torch calls the Python code of a tensor's subclass in a trace; DTensor's, say."""
STEP = re.compile(r"ProfilerStep#\d+")

DTYPES = {
    "float": "float32", "double": "float64", "long": "int64", "long int": "int64", "int": "int32", "short": "int16",
    "short int": "int16", "signed char": "int8", "unsigned char": "uint8", "bool": "bool", "c10::Half": "float16",
    "c10::BFloat16": "bfloat16", "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::Float8_e5m2": "float8_e5m2",
    "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
}  # fmt: skip
"""What a trace calls a number format -> what torch does."""
_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4}
ITEM_BYTES = {name: _BYTES.get(name, 2 if name in ("float16", "bfloat16", "int16") else 1) for name in DTYPES.values()}


class Tensor(NamedTuple):
    """A tensor as an argument: views are equal if they are the same part of the same memory."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    device: str

    @property
    def numel(self) -> int:
        """How many elements it has."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(slots=True)
class Node:
    """A node of the trace, with what its arguments are: tensors, lists, and numbers."""

    id: int
    name: str
    kind: str
    op: str | None
    """Name of the operator with its overload, as its schema says."""
    schema: str | None
    kernel: bool
    """Whether it is a compiled kernel (Triton's) of its own."""
    wrapper: bool = False
    """Whether it is an operator on a tensor of a subclass, whose parts the operators under it are called on."""
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    @property
    def communicates(self) -> bool:
        """Whether it is an operator that ranks call together."""
        return self.op is not None and self.op.startswith(tuple(f"{name}::" for name in COMMUNICATION))

    def above(self) -> Iterator[Node]:
        """The node that it is in, the one that that is in, and so on."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[Node]:
        """All nodes under it."""
        stack = self.children[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children[::-1]


def tensors_of(values: list[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, in lists too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from tensors_of(value)


def read_nodes(trace: ExecutionTrace, step: int | None, sizes: Mapping[int, int]) -> list[Node]:
    """The nodes of one step (of the whole file where none is marked), in order of their starts; some sizes replaced."""
    table = trace.nodes.sort("node_id")
    first, last = _window(table, step)
    table = table.filter(pl.col("node_id").is_between(first, last))
    nodes: dict[int, Node] = {}
    parents: list[int | None] = table["parent"].to_list()
    for row in table.select("node_id", "name", "kind", "op_schema", "kernel_backend", "kernel_file").iter_rows():
        node_id, name, kind, schema, *kernel = row
        found = SCHEMA.match(schema or "")
        nodes[node_id] = Node(node_id, name, kind, found[1] if found else None, schema, any(kernel))
    for node, parent in zip(nodes.values(), parents, strict=True):
        if parent in nodes:
            node.parent = nodes[parent]
            node.parent.children.append(node)
    _read_arguments(trace, nodes, sizes)
    return list(nodes.values())


def _window(table: pl.DataFrame, step: int | None) -> tuple[int, int]:
    marks = table.filter(pl.col("name").str.contains(f"^{STEP.pattern}$")).sort("node_id")
    first, last = table["node_id"][0], table["node_id"][-1]
    if not len(marks):
        if step is not None:
            raise TraceError(f"no step is marked in the trace (ProfilerStep#{step}): leave the step out.")
        return first, last
    starts = marks["node_id"].to_list()
    steps = [int(name.partition("#")[2]) for name in marks["name"]]
    whole = steps[:-1] or steps  # the last is often cut off
    chosen = whole[0] if step is None else step
    if chosen not in steps:
        raise TraceError(f"step {chosen} is not in the trace; it has {', '.join(map(str, steps))}.")
    at = steps.index(chosen)
    return starts[at], starts[at + 1] - 1 if at + 1 < len(starts) else last


def _read_arguments(trace: ExecutionTrace, nodes: dict[int, Node], sizes: Mapping[int, int]) -> None:
    rows = trace.arguments.filter(pl.col("node_id").is_in(list(nodes))).sort("node_id", "side", "position")
    columns = ("node_id", "side", "type", "value", "shape", "strides")
    known: dict[str, Any] = {}
    for node_id, side, kind, value, shape, strides in rows.select(columns).iter_rows():
        text = f"{kind}|{value}|{shape}|{strides}"
        if text not in known:
            decoded = [None if part is None else msgspec.json.decode(part) for part in (value, shape, strides)]
            read = _argument(iter(_LEAF.findall(kind)), *decoded)
            for tensor in tensors_of([read]):
                if min([tensor.offset, *tensor.shape, *(tensor.strides or ())]) < 0:
                    raise TraceError(
                        f"{trace.path}: node {node_id}: no tensor has shape {[*tensor.shape]}, strides "
                        f"{[*(tensor.strides or ())]} and offset {tensor.offset}: give a trace that torch wrote."
                    )
            known[text] = _resized(read, sizes)
        node = nodes[node_id]
        (node.inputs if side == "input" else node.outputs).append(known[text])


_LEAF = re.compile(r"Tensor\(((?:[^()]|\([^()]*\))*)\)")


def _argument(dtypes: Iterator[str], value: Any, shape: Any, strides: Any) -> Any:
    """A value of a trace: tensors as such, `<None>` and the like as None."""
    if isinstance(value, list):
        if len(value) == 6 and isinstance(value[-1], str) and type(value[0]) is int:
            dtype = next(dtypes, "")
            if dtype not in DTYPES:  # not initialised: no tensor
                return None
            dims = None if strides is None or len(strides) != len(shape) else tuple(strides)
            return Tensor(value[1], value[2], tuple(shape), dims, DTYPES[dtype], value[5])
        shapes = shape if isinstance(shape, list) and len(shape) == len(value) else [[]] * len(value)
        each = strides if isinstance(strides, list) and len(strides) == len(value) else [None] * len(value)
        return [_argument(dtypes, *one) for one in zip(value, shapes, each, strict=True)]
    if isinstance(value, str) and value.startswith("<") and value.endswith(">"):
        return None
    return value


_NAME = re.compile(r"([A-Za-z_]\w*)\s*(?:=.*)?$")


def schema_names(schema: str) -> list[str]:
    """The names of a schema's arguments, in order."""
    text, depth, parts = schema[schema.find("(") + 1 :], 0, [""]
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if depth < 0:
            break
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [found[1] for part in parts if (found := _NAME.search(part.strip()))]


def _nowhere(nodes: list[Node]) -> set[int]:
    """The address of nothing, where tensors without elements are, and those that only wrap others."""
    empty, made = set(), set()
    for node in nodes:
        for tensor in tensors_of(node.outputs):
            if not tensor.numel:
                empty.add(tensor.storage)
            elif node.name in ("aten::empty", "aten::empty_strided"):
                made.add(tensor.storage)
    return empty - made


def _resized(value: Any, sizes: Mapping[int, int]) -> Any:
    """The value with other sizes in place of some: dimensions, and numbers that equal them."""
    if isinstance(value, list):
        return [_resized(one, sizes) for one in value]
    if not isinstance(value, Tensor):
        return sizes.get(value, value) if type(value) is int else value
    shape = tuple(sizes.get(size, size) for size in value.shape)
    old = value.strides
    if shape == value.shape or old is None:
        return value._replace(shape=shape)
    strides, step = [0] * len(shape), 1
    for stride, at in sorted((stride, -at) for at, stride in enumerate(old)):  # dense, in the same order
        strides[-at] = step if stride else 0
        step *= shape[-at] if stride else 1
    return value._replace(shape=shape, strides=tuple(strides))


class Uses:
    """When each storage is made, and when each of its views is read."""

    def __init__(self, nodes: list[Node]) -> None:
        self.made: dict[int, list[int]] = {}
        self.read: dict[Tensor, list[int]] = {}
        self.nowhere = _nowhere(nodes)
        for node in nodes:
            if node.kind != "operator" and not node.kernel:
                continue
            given = set()
            for tensor in tensors_of(node.inputs):
                given.add(tensor.storage)
                self.read.setdefault(tensor, []).append(node.id)
            for tensor in tensors_of(node.outputs):
                if tensor.storage not in given:
                    self.made.setdefault(tensor.storage, []).append(node.id)

    def wraps(self, node: Node) -> bool:
        """Whether it is a wrapper."""
        if any(one.name == _SUBCLASS for one in node.below()):
            return True
        return any(one.storage in self.nowhere and one.numel for one in tensors_of([*node.inputs, *node.outputs]))

    def needs(self, tensor: Tensor, after: int) -> bool:
        """Whether it is read after this node, before its memory is another tensor's."""
        reads = self.read.get(tensor, [])
        at = bisect_right(reads, after)
        if at == len(reads) or not tensor.numel:
            return False
        made = self.made.get(tensor.storage, [])
        again = bisect_right(made, after)
        return again == len(made) or reads[at] <= made[again]


def choose(nodes: list[Node], composite: Callable[[str], bool | None]) -> list[Node]:
    """The nodes that are called, in order of their starts.

    Parameters
    ----------
    nodes
        As `read_nodes` gives them.
    composite
        Says whether an operator does nothing but call others; None of one that cannot be called.
    """
    uses = Uses(nodes)
    chosen: list[Node] = []
    stack = [node for node in nodes if node.parent is None][::-1]
    while stack:
        node = stack.pop()
        if node.kernel or node.kind == "comm" or _is_wait(node) or _is_called(node, uses, composite):
            chosen.append(node)
        else:
            stack += node.children[::-1]
    return sorted(chosen, key=lambda node: node.id)


FREE = {*BOOKKEEPING_OPS, "aten::record_stream"}
"""Operators that compute nothing, and cannot be called apart from what they keep track of."""


def _is_called(node: Node, uses: Uses, composite: Callable[[str], bool | None]) -> bool:
    if node.kind != "operator" or node.op in FREE:
        return False
    if node.wrapper or uses.wraps(node):
        node.wrapper = True
        return False
    kind = False if node.op is None or node.communicates else composite(node.op)
    if kind is None and node.name.startswith("aten::"):  # of another release of torch: what is under it may be callable
        return not any(one.kind == "operator" for one in node.below())
    return not kind or not _hides(node, uses)


def _is_wait(node: Node) -> bool:
    return (
        node.kind == "annotation" and node.name.startswith("wait::") and not any(n.communicates for n in node.below())
    )


def _hides(node: Node, uses: Uses) -> bool:
    """Whether something under the node makes what others use, and the node itself does not give."""
    own = {*tensors_of(node.inputs), *tensors_of(node.outputs)}
    below = [other for other in node.below() if other.op is not None]
    if not below:
        return False
    last = max(other.id for other in below)
    inner = {tensor for other in below for tensor in tensors_of(other.outputs)} - own
    return any(uses.needs(tensor, last) for tensor in inner)
