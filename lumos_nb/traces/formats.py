"""What a file is, from its first bytes: a profiler trace, or a known format that another reader takes."""

from __future__ import annotations

import re
from pathlib import Path

from lumos_nb.errors import TraceError, UnsupportedFormat
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.traces.json_text import top_level_keys

_TIMELINE = "the timeline reader (lumos_nb.traces.timeline) takes it"
_UNPACK = "unpack it, and load the folder that comes out"

MAGIC = (
    (
        rb"SQLite format 3\0",
        "an SQLite database",
        "the reader of Nsight Systems exports (lumos_nb.traces.nsys) takes it",
    ),
    (rb"PAR1", "a Parquet table", _TIMELINE),
    (rb".{257}ustar", "a tar archive", _UNPACK),
    (rb"PK\x03\x04", "a zip archive", _UNPACK),
    (
        # A length, then GlobalMetadata: either its version, or an attribute that is called schema.
        rb"[\x80-\xff]{0,4}[\x00-\x7f](?:\n.\d+\.\d+|.{0,6}\n\x06schema)",
        "a Chakra trace",
        "the Chakra reader (lumos_nb.exchange.chakra) takes it",
    ),
    (rb"(?:\xef\xbb\xbf)?\s*\[", "a bare list of Chrome events", _TIMELINE),
)
"""First bytes -> what the file is, and what to do with it."""

KEYS = (
    (
        {"schema", "nodes"},
        "a PyTorch execution trace",
        "the reader of execution traces (lumos_nb.traces.execution_trace) takes it",
    ),
    ({"rocprofiler-sdk-tool"}, "a rocprofiler export", "no reader of this package takes it"),
)
"""Top-level keys of a JSON object -> what the file is, and what to do with it."""

_OBJECT = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*(?:["}]|$)')
_HEAD_BYTES = 1 << 16


def refuse_other_formats(path: Path) -> None:
    """Raise unless `path` begins as a JSON object that may hold profiler events.

    Raises
    ------
    UnsupportedFormat
        A known format; the message says which reader takes it.
    TraceError
        The file is empty, or no JSON object.
    """
    if not path.is_file():
        raise TraceError(f"{path} is no file: give the path of one trace. (load_run takes folders.)")
    blocks = Blocks(path)
    head = next(iter(blocks), b"")[:_HEAD_BYTES]
    if not head.strip():
        why = f"cannot be unpacked: {blocks.damage}" if blocks.damage else f"is empty ({path.stat().st_size:,} bytes)"
        raise TraceError(f"{path} {why}. Record it again, or leave it out.")
    if _OBJECT.match(head):
        keys = top_level_keys(head)
        for needed, what, advice in KEYS:
            if needed.issubset(keys) and "traceEvents" not in keys:
                raise UnsupportedFormat(f"{path} is {what}: {advice}.")
        return
    for magic, what, advice in MAGIC:
        if re.match(magic, head, re.DOTALL):
            raise UnsupportedFormat(f"{path} is {what}: {advice}.")
    raise TraceError(f"{path} is no JSON object: it starts with {head[:16]!r} at byte 0, where a trace has '{{'.")
