"""Benchmarks from traces: a program that runs the operators of an execution trace, and how alike the two are.

The idea, operators replayed from a trace with communication and memory kept, is that of Liang et al., "Mystique:
Enabling Accurate and Scalable Generation of Production AI Benchmarks" (ISCA 2023). The names load their module when
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lumos_nb.exchange import on_first_use

if TYPE_CHECKING:
    from lumos_nb.exchange.benchmark.other_devices import portability as portability
    from lumos_nb.exchange.benchmark.program import generate as generate
    from lumos_nb.exchange.benchmark.program import replay as replay
    from lumos_nb.exchange.benchmark.selection import Selection as Selection
    from lumos_nb.exchange.benchmark.selection import select as select
    from lumos_nb.exchange.benchmark.similarity import Similarity as Similarity
    from lumos_nb.exchange.benchmark.similarity import compare as compare
    from lumos_nb.exchange.benchmark.tables import Workload as Workload
    from lumos_nb.exchange.benchmark.tables import workload as workload

_MODULES = {
    "other_devices": ("portability",),
    "program": ("generate", "replay"),
    "selection": ("Selection", "select"),
    "similarity": ("Similarity", "compare"),
    "tables": ("Workload", "workload"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_MODULE_OF]

if not TYPE_CHECKING:  # else a misspelt name would pass every type checker
    __getattr__ = on_first_use(globals(), _MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "annotations", "on_first_use"})
