"""What a file is, from its first bytes: a profiler trace, or a known format that another reader takes."""

from __future__ import annotations

import re
from pathlib import Path

from lumos_nb.errors import TraceError, UnsupportedFormat
from lumos_nb.traces.json_stream import Blocks, top_level_keys

_TIMELINE = "the timeline reader (lumos_nb.traces.timeline)"
_EXECUTION_TRACE = "the execution-trace reader (lumos_nb.traces.execution_trace)"
_UNPACK = "nothing until it is unpacked: load the folder that it unpacks to"

MAGIC = (
    (
        re.compile(rb"SQLite format 3\0"),
        "an SQLite database, as Nsight Systems exports",
        "the Nsight Systems reader (lumos_nb.traces.nsys)",
    ),
    (re.compile(rb"PAR1"), "a Parquet table", _TIMELINE),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive", _UNPACK),
    (re.compile(rb"PK\x03\x04"), "a zip archive", _UNPACK),
    # A length, then GlobalMetadata: its version, or an attribute that is called schema.
    (
        re.compile(rb"[\x80-\xff]{0,4}[\x00-\x7f](\n.\d+\.\d+|.{0,6}\n\x06schema)", re.DOTALL),
        "a Chakra trace",
        "the Chakra reader (lumos_nb.exchange.chakra)",
    ),
    (re.compile(rb"(\xef\xbb\xbf)?\s*\["), "a bare list of Chrome events", _TIMELINE),
)
"""First bytes -> what the file is, and the reader that takes it."""

KEYS = (
    ({"schema", "nodes"}, "a PyTorch execution trace", _EXECUTION_TRACE),
    ({"rocprofiler-sdk-tool"}, "a rocprofiler export", "no reader of this package"),
)
"""Top-level keys of a JSON object -> what the file is, and the reader that takes it."""

_HEAD_BYTES = 1 << 16


def refuse_other_formats(path: Path) -> None:
    """Raise unless `path` begins as a JSON object that may hold profiler events.

    Raises
    ------
    UnsupportedFormat
        A known format; the message names the reader that takes it.
    TraceError
        The file is empty, or no JSON object.
    """
    if not path.is_file():
        raise TraceError(f"{path} is no file: give the path of one trace; load_run takes folders.")
    blocks = Blocks(path)
    head = next(iter(blocks), b"")[:_HEAD_BYTES]
    if not head.strip():
        why = blocks.damage or "it holds no text"
        raise TraceError(f"{path} is empty ({path.stat().st_size:,} bytes; {why}): record it again, or leave it out.")
    for magic, what, reader in MAGIC:
        if magic.match(head):
            raise UnsupportedFormat(f"{path} is {what}; what takes it is {reader}.")
    if not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        raise TraceError(f"{path} is no JSON object: at byte 0 it has {head[:16]!r}, where a profiler trace has '{{'.")
    keys = top_level_keys(head)
    for needed, what, reader in KEYS:
        if needed <= keys and "traceEvents" not in keys:
            raise UnsupportedFormat(f"{path} is {what}; what takes it is {reader}.")
