"""What every reader returns: the events of one file, what else the file says, and what was not read of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import polars as pl

NOTES = {"what": pl.String(), "count": pl.Int64(), "reason": pl.String()}

PARSER_VERSION = 5
"""Part of the key of cached parses: raise it when the same file would give another table."""


class Trace(NamedTuple):
    """One file, read.

    Attributes
    ----------
    events
        `schema.EVENTS`, in the file's order. Of a format with a file a rank, `rank` is what the file says, 0 if it
        says nothing; of one with several ranks in a file, each row has its own, and `metadata["ranks"]` lists them.
    metadata
        What the file says besides its events; `event_count`, the number of events in the file; and `beside`, the names
        of other files that were read for it, if any.
    notes
        Columns `what`, `count`, `reason`: every event that is not in `events`, and what else is off about the file.
    """

    events: pl.DataFrame
    metadata: dict[str, Any]
    notes: pl.DataFrame
