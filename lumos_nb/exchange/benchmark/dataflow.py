"""Calls as a workload table: which memory there is, which tensors lie in it, who makes, reads and empties them.

A trace names memory by address. An address that an operator gives back and was not given is new memory; what lay there
before has ended. Memory that is read before any operator made it is given before the clock starts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lumos_nb.exchange.benchmark.calls import ITEM_BYTES, Node, Tensor, tensors_of
from lumos_nb.exchange.benchmark.collectives import Communication
from lumos_nb.exchange.benchmark.values import DATA_DEPENDENT, Rule, need, stricter

STAND_IN, AS_STRIDED = "", "aten::as_strided"
"""Names of calls that are not the trace's: what takes an operator's place, and a view that no operator made."""


@dataclass(slots=True)
class Memory:
    """An allocation: from when an address is first seen until it is another's."""

    number: int
    given: bool
    dtype: str
    device: str
    bytes: int = 0
    rule: Rule | None = None
    slots: dict[Tensor, int] = field(default_factory=dict)


@dataclass(slots=True)
class Call:
    """An operator, by name, with slots and constants for arguments; empty name: a stand-in, which has a `reason`."""

    op: str
    node: Node
    arguments: dict[str, Any]
    out: list[int]
    reason: str = ""
    talk: Communication | None = None
    handle: int = -1
    """Of what communicates: what its wait is known by, in the program."""

    def slots(self) -> set[int]:
        """Slots that it reads."""
        return {*_slots_in([*self.arguments.values()])}


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a tensor without gaps, rows last."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


class Slot(int):
    """The number of a slot, where a constant could stand."""


class Dataflow:
    """Memory and slots so far, while calls are added in order."""

    def __init__(self) -> None:
        self.memories: list[Memory] = []
        self.slots: list[tuple[int, Tensor]] = []
        self.calls: list[Call] = []
        self.notes: Counter[str] = Counter()
        self._at: dict[int, Memory] = {}
        self._forced: dict[tuple[Tensor, str], Slot] = {}
        self._handles: dict[str, int] = {}

    def add(self, node: Node, op: str, arguments: dict[str, Any], reason: str = "") -> None:
        """Call an operator with these arguments, or a stand-in for the reason."""
        short = op.partition("::")[2].partition(".")[0]
        bound = {name: self._argument(short, arguments, name, value, 0) for name, value in arguments.items()}
        self.calls.append(Call(op, node, bound, self._results(short, node), reason))

    def item_bytes(self, memory: Memory) -> int:
        """Bytes of an element of the memory."""
        return ITEM_BYTES[memory.dtype]

    def communicate(self, node: Node, talk: Communication) -> None:
        """Issue a collective or a message, or wait for one that was issued in this step."""
        if talk.what == "wait":
            if (handle := self._handles.pop(talk.label, None)) is not None:
                self.calls.append(Call("wait", node, {}, [], talk=talk, handle=handle))
            return
        slots = {"out": [*map(self._read, talk.out)], "given": [*map(self._read, talk.given)]}
        handle = sum(call.talk is not None for call in self.calls)
        self.calls.append(Call(talk.what, node, slots, [], talk=talk, handle=handle))
        if talk.label:
            self._handles[talk.label] = handle

    def with_waits(self) -> list[Call]:
        """The calls; what nothing waits for is waited for where its memory is next used, and at the end."""
        waited = {call.handle for call in self.calls if call.op == "wait"}
        open_handles: dict[int, set[int]] = {}
        calls: list[Call] = []
        for call in [*self.calls, None]:
            used = {self.slots[slot][0] for slot in call.slots()} if call else set()
            for handle in [h for h, memories in open_handles.items() if call is None or memories & used]:
                del open_handles[handle]
                calls.append(Call("wait", (call or self.calls[-1]).node, {}, [], talk=WAIT, handle=handle))
            if call is None:
                break
            calls.append(call)
            if call.talk is not None and call.handle not in waited:
                open_handles[call.handle] = used
        return calls

    def _argument(self, op: str, arguments: dict[str, Any], name: str, value: Any, position: int) -> Any:
        if isinstance(value, list):
            return [self._argument(op, arguments, name, one, at) for at, one in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        wanted = need(op, arguments, name, value, position)
        if wanted is not None and wanted.forced and not self._is_given(value):
            return self._constant(value, wanted.rule)
        slot = self._read(value)
        memory = self.memories[self.slots[slot][0]]
        if wanted is not None and memory.given:
            memory.rule = stricter(memory.rule, wanted.rule)
        return slot

    def _is_given(self, tensor: Tensor) -> bool:
        memory = self._at.get(tensor.storage)
        return memory is None or memory.given

    def _constant(self, tensor: Tensor, rule: Rule) -> Slot:
        """Memory of its own for indices that a call makes: values of random numbers would be no valid ones."""
        key = tensor, str(rule)
        if key not in self._forced:
            self.notes["indices that a call makes are read from memory of their own"] += 1
            memory = self._new(tensor, given=True)
            memory.rule = rule
            self._forced[key] = self._slot(memory, tensor)
        return self._forced[key]

    def _new(self, tensor: Tensor, *, given: bool) -> Memory:
        memory = Memory(len(self.memories), given, tensor.dtype, tensor.device.partition(":")[0])
        self.memories.append(memory)
        return memory

    def _slot(self, memory: Memory, tensor: Tensor) -> Slot:
        """A slot for this part of the memory."""
        strides = contiguous(tensor.shape) if tensor.strides is None else tensor.strides
        known = tensor._replace(strides=strides)
        slot = Slot(len(self.slots))
        self.slots.append((memory.number, known))
        memory.slots[tensor] = slot
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        if tensor.numel:
            memory.bytes = max(memory.bytes, (tensor.offset + last + 1) * ITEM_BYTES[tensor.dtype])
        return slot

    def _read(self, tensor: Tensor) -> Slot:
        """The slot in which the tensor is, made if there is none."""
        if not tensor.numel:
            return self._slot(self._new(tensor, given=True), tensor)
        memory = self._at.get(tensor.storage)
        if memory is not None and tensor in memory.slots:
            return Slot(memory.slots[tensor])
        if memory is None or self._stale(memory, tensor):
            memory = self._at[tensor.storage] = self._new(tensor, given=True)
        if memory.given:
            return self._slot(memory, tensor)
        base = Slot(next(iter(memory.slots.values())))
        slot = self._slot(memory, tensor)
        _, known = self.slots[slot]
        arguments = {"self": base, "size": list(known.shape), "stride": known.strides, "storage_offset": known.offset}
        arguments["stride"] = list(known.strides or ())
        self.notes["views that no operator of the trace makes"] += 1
        self.calls.append(Call(AS_STRIDED, self.calls[-1].node, arguments, [slot]))
        return slot

    def _stale(self, memory: Memory, tensor: Tensor) -> bool:
        """Whether the address is that of memory whose making is not in the trace: it does not fit what lay there."""
        if memory.given or tensor.dtype != memory.dtype:
            return tensor.dtype != memory.dtype
        strides = contiguous(tensor.shape) if tensor.strides is None else tensor.strides
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        beyond = (tensor.offset + last + 1) * ITEM_BYTES[tensor.dtype] > memory.bytes
        return beyond or not tensor.dtype.startswith(("float", "bfloat"))

    def _results(self, op: str, node: Node) -> list[int]:
        """Slots of what the operator gives back; -1 for what is no new tensor."""
        given = {tensor.storage for tensor in tensors_of(node.inputs)}
        return [self._result(op, value, given) for value in _leaves(node.outputs)]

    def _result(self, op: str, value: Any, given: set[int]) -> int:
        if not isinstance(value, Tensor) or not value.numel:
            return -1
        memory = self._at.get(value.storage)
        if memory is not None and value.storage in given:
            return -1 if value in memory.slots else self._slot(memory, value)
        memory = self._at[value.storage] = self._new(value, given=op in DATA_DEPENDENT)
        slot = self._slot(memory, value)
        return -1 if memory.given else slot


WAIT = Communication("wait", "")


def _slots_in(values: list[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, Slot):
            yield int(value)
        elif isinstance(value, list):
            yield from _slots_in(value)


def _leaves(values: list[Any]) -> list[Any]:
    """Results in the order in which an operator gives them, lists flattened."""
    found: list[Any] = []
    for value in values:
        found += _leaves(value) if isinstance(value, list) else [value]
    return found
