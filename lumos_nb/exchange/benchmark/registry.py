"""torch's operators by the names that a trace has, and a trace's arguments by the names that torch has now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lumos_nb.exchange.benchmark.calls import Node, schema_names
from lumos_nb.exchange.benchmark.collectives import DEFAULT_GROUP

_NOT_FINITE = ("inf", "-inf", "nan")


class Registry:
    """torch's operators by the names that a trace has."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def find(self, name: str) -> Any:
        """The operator, or a line that says why there is none."""
        from lumos_nb.exchange.benchmark.binding import Unusable, find_op

        if name not in self._found:
            try:
                self._found[name] = find_op(name)
            except Unusable as error:
                self._found[name] = str(error)
        return self._found[name]

    def is_composite(self, name: str) -> bool | None:
        """Whether it does nothing but call other operators; None if there is no such operator to call."""
        import torch

        if isinstance(found := self.find(name), str):
            return None
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(found.name(), "CompositeImplicitAutograd"))

    def bind(self, node: Node, groups: Mapping[str, list[int]]) -> dict[str, Any] | str:
        """Arguments by the names that this torch has for them, or a line that says why they do not fit."""
        if node.op is None:
            return f"{node.name} is {'a kernel of its own' if node.kernel else 'without a schema that can be read'}"
        found = self.find(node.op)
        if isinstance(found, str):
            return found
        names = schema_names(node.schema or "")
        if len(names) != len(node.inputs):
            return f"{node.op} has {len(node.inputs)} arguments in the trace, {len(names)} in its schema"
        recorded = dict(zip(names, node.inputs, strict=True))
        bound: dict[str, Any] = {}
        for argument in found._schema.arguments:
            if argument.name in recorded:
                bound[argument.name] = _constant(argument, recorded[argument.name])
                if argument.name == "group_name" and bound[argument.name] not in groups:
                    bound[argument.name] = DEFAULT_GROUP
            elif not argument.has_default_value():
                return f"{node.op} takes {argument.name}, which the trace does not have"
        return bound


def _constant(argument: Any, value: Any) -> Any:
    """A value as recorded; a trace writes six decimals, so that an epsilon of 0 is the schema's, or a small number."""
    if argument.name in ("eps", "epsilon") and value == 0:
        return argument.default_value or 1e-8
    if isinstance(value, str) and value in _NOT_FINITE and str(argument.type) in ("number", "float"):
        return float(value)
    if value is None and "Optional" not in str(argument.type):
        if argument.has_default_value():
            return argument.default_value
        if str(argument.type) in ("number", "float"):  # not finite: what attention masks its scores with
            return -65504.0
    return value
