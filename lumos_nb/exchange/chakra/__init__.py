"""Chakra execution traces: read, check, convert, obfuscate and write them.

A file is a table with a row a node (`read_file`, `write_file`); a job is a folder with a file a rank. The names load
their module when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lumos_nb.exchange import on_first_use

if TYPE_CHECKING:
    from lumos_nb.exchange.chakra.call_tree import from_linked as from_linked
    from lumos_nb.exchange.chakra.conversion import write as write
    from lumos_nb.exchange.chakra.files import rank_files as rank_files
    from lumos_nb.exchange.chakra.files import read_file as read_file
    from lumos_nb.exchange.chakra.files import read_groups as read_groups
    from lumos_nb.exchange.chakra.files import stream_file as stream_file
    from lumos_nb.exchange.chakra.files import write_file as write_file
    from lumos_nb.exchange.chakra.files import write_ranks as write_ranks
    from lumos_nb.exchange.chakra.from_nodes import to_graph as to_graph
    from lumos_nb.exchange.chakra.likeness import fidelity as fidelity
    from lumos_nb.exchange.chakra.linking import Linked as Linked
    from lumos_nb.exchange.chakra.linking import link as link
    from lumos_nb.exchange.chakra.messages import message_class as message_class
    from lumos_nb.exchange.chakra.obfuscation import Obfuscated as Obfuscated
    from lumos_nb.exchange.chakra.obfuscation import Policy as Policy
    from lumos_nb.exchange.chakra.obfuscation import obfuscate as obfuscate
    from lumos_nb.exchange.chakra.patterns import pattern as pattern
    from lumos_nb.exchange.chakra.synthesize import TraceModel as TraceModel
    from lumos_nb.exchange.chakra.tables import NODES as NODES
    from lumos_nb.exchange.chakra.tables import Nodes as Nodes
    from lumos_nb.exchange.chakra.validation import validate as validate

_MODULES = {
    "call_tree": ("from_linked",),
    "conversion": ("write",),
    "from_nodes": ("to_graph",),
    "files": ("rank_files", "read_file", "read_groups", "stream_file", "write_file", "write_ranks"),
    "likeness": ("fidelity",),
    "linking": ("Linked", "link"),
    "messages": ("message_class",),
    "obfuscation": ("Obfuscated", "Policy", "obfuscate"),
    "patterns": ("pattern",),
    "synthesize": ("TraceModel",),
    "tables": ("NODES", "Nodes"),
    "validation": ("validate",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_MODULE_OF]

if not TYPE_CHECKING:  # else a misspelt name would pass every type checker
    __getattr__ = on_first_use(globals(), _MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "annotations", "on_first_use"})
