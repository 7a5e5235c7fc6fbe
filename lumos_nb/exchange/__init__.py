"""Workloads in the formats of others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def on_first_use(namespace: dict[str, object], module_of: Mapping[str, str]) -> Callable[[str], object]:
    """`__getattr__` of a package whose names, of `module_of`, are imported when they are first used."""
    package = str(namespace["__name__"])

    def load(name: str) -> object:
        if name not in module_of:
            called = f"ln.{package.rpartition('.')[2]}"
            raise AttributeError(f"{called} has no {name!r}; it has {', '.join(module_of)}.", name=name)
        value: object = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        namespace[name] = value
        return value

    return load
