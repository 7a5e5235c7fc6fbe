"""What a file is, from its first bytes, and which reader takes it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from lumos_nb.errors import TraceError, UnsupportedFormat, named
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.traces.json_text import top_level_keys
from lumos_nb.traces.trace import Trace

KINETO, NSYS, ROCPROFILER, TIMELINE, SCHEDULE = "kineto", "nsys", "rocprofiler", "timeline", "schedule"

READERS = {
    KINETO: ("lumos_nb.traces.kineto", "read_kineto"),
    NSYS: ("lumos_nb.traces.nsys", "read_nsys"),
    ROCPROFILER: ("lumos_nb.traces.rocprofiler", "read_rocprofiler"),
    TIMELINE: ("lumos_nb.traces.timeline", "read_timeline"),
    SCHEDULE: ("lumos_nb.traces.schedule", "read_schedule"),
}
"""Format -> module and function that reads it; a function takes a path and returns a `Trace`."""

_CHAKRA = "ln.chakra.to_graph makes a graph of it, ln.chakra.read_file a table"

MAGIC = (
    (rb"SQLite format 3\0", NSYS),
    (rb"PAR1", TIMELINE),
    (rb"\{\s*\"\d+\"\s*:\s*\{.{0,200}\"fwd_start\"", SCHEDULE),
    (rb"(?:\xef\xbb\xbf)?\s*\[\s*\{.{0,4000}\"(?:forward|backward)-(?:compute|send|recv)\"", TIMELINE),
    (rb"(?:\xef\xbb\xbf)?\s*\[", KINETO),
)
"""First bytes -> format."""

REFUSED_MAGIC = (
    (rb"\xff\xfe|\xfe\xff|\0*[\[{]\0", "UTF-16 or UTF-32 text", "convert it to UTF-8, for example with iconv"),
    (rb".{257}ustar", "a tar archive", "load_run takes it, by the ending .tar, .tar.gz or .tgz"),
    (rb"PK\x03\x04", "a zip archive", "unpack it, and load the folder that comes out"),
    (
        # A length, then GlobalMetadata: either its version, or an attribute that is called schema.
        rb"[\x80-\xff]{0,4}[\x00-\x7f](?:\n.\d+\.\d+|.{0,6}\n\x06schema)",
        "a Chakra trace",
        _CHAKRA,
    ),
)
"""First bytes -> what the file is, and what to do with it: no reader of this package's `traces` takes it."""

REFUSED_SUFFIXES = (
    (
        (".nsys-rep", ".qdrep", ".qdstrm"),
        "a report of Nsight Systems in its own format",
        "nsys export --type sqlite makes of it a file that can be read",
    ),
    ((".et",), "a Chakra trace", _CHAKRA),
)
"""Ends of names -> what the file is, and what to do with it."""

KEYS = (({"rocprofiler-sdk-tool"}, ROCPROFILER),)
"""Top-level keys of a JSON object -> format; an object with none of these is Kineto's."""

REFUSED_KEYS = (
    (
        {"schema", "nodes"},
        "a PyTorch execution trace",
        "ln.load_execution_trace takes it",
    ),
    ({"workload_graph"}, "a Chakra trace as JSON", _CHAKRA),
)
"""Top-level keys of a JSON object -> what the file is, and what to do with it."""

_OBJECT = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*(?:["}]|$)')
_HEAD_BYTES = 1 << 16


def read_trace(path: str | Path) -> Trace:
    """Read one trace file with the reader of its format, whatever its name.

    Raises
    ------
    UnsupportedFormat
        A known format that no reader here takes; the message says which one does.
    TraceError
        The file is empty, or of no known format, or damaged beyond use.
    """
    path = named(path, TraceError)
    module, function = READERS[format_of(path)]
    trace: Trace = getattr(importlib.import_module(module), function)(path)
    return trace


def format_of(path: Path) -> str:
    """Format of the file at `path`, a key of `READERS`; errors as in `read_trace`."""
    if not path.is_file():
        raise TraceError(f"{path} is no file: give the path of one trace. (load_run takes folders.)")
    for suffixes, what, advice in REFUSED_SUFFIXES:
        if path.name.endswith(suffixes):
            raise UnsupportedFormat(f"{path} is {what}: {advice}.")
    blocks = Blocks(path)
    head = blocks.head(_HEAD_BYTES)
    if not head.strip():
        why = f"cannot be unpacked: {blocks.damage}" if blocks.damage else f"is empty ({path.stat().st_size:,} bytes)"
        raise TraceError(f"{path} {why}. Record it again, or leave it out.")
    for magic, name in MAGIC:
        if re.match(magic, head, re.DOTALL):
            return name
    if _OBJECT.match(head):
        return _format_of_object(path, set(top_level_keys(head)))
    for magic, what, advice in REFUSED_MAGIC:
        if re.match(magic, head, re.DOTALL):
            raise UnsupportedFormat(f"{path} is {what}: {advice}.")
    raise TraceError(f"{path} is no JSON object: it starts with {head[:16]!r} at byte 0, where a trace has '{{'.")


def _format_of_object(path: Path, keys: set[str]) -> str:
    if "traceEvents" in keys:
        return KINETO
    for needed, what, advice in REFUSED_KEYS:
        if needed.issubset(keys):
            raise UnsupportedFormat(f"{path} is {what}: {advice}.")
    return next((name for needed, name in KEYS if needed.issubset(keys)), KINETO)
