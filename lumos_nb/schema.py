"""Tables as data: the columns, types, units and keys of events, ops and edges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import polars as pl

from lumos_nb.errors import InputError, SchemaError

DEVICE_KINDS = ("kernel", "memcpy", "memset", "comm")
"""Kinds of op that occupy a device stream."""

OP_KINDS = (
    "cpu",  # a stretch of a thread inside one outermost operator
    "gap",  # a stretch of a thread outside all operators: Python, the framework, the operating system
    "launch",  # a runtime call that issues device work
    "alloc",  # an allocation call: its own cost, which no what-if scales
    "wait",  # what remains of a blocking call or a thread's idling once the thing waited for has ended
    "event",  # a zero-length point on a stream: record, wait, arrival at a collective
    "join",  # the zero-length point at which every rank of a collective has arrived
    *DEVICE_KINDS,
    "unexplained",  # a delay that no rule accounts for
    "boundary",  # what was already going on when the step began: a stream's backlog, the host's lead
)
EVIDENCE = ("exact", "pattern", "time")
PHASES = ("forward", "backward", "optimizer", "other")


@contextmanager
def panics_told() -> Iterator[None]:
    """Raise what polars should of a damaged Parquet file, where it panics: a panic is no Exception.

    Raises
    ------
    pl.exceptions.ComputeError
        polars panicked.
    """
    try:
        yield
    except pl.exceptions.PanicException as error:
        raise pl.exceptions.ComputeError(f"polars gave up on it: {str(error)[:200]}") from error


@dataclass(frozen=True, slots=True)
class TableSchema:
    """Names, types and units of a table's columns, and what makes it invalid."""

    name: str
    columns: Mapping[str, pl.DataType]
    keys: tuple[str, ...] = ()

    def check(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return `frame` with its columns in schema order, or raise SchemaError.

        Columns beyond the schema are kept, after the schema's own.
        """
        if not isinstance(frame, pl.DataFrame):
            raise SchemaError(f"the {self.name} table is a {type(frame).__name__}; give a polars DataFrame.")
        if missing := [c for c in self.columns if c not in frame.columns]:
            raise SchemaError(
                f"{self.name} table lacks column(s) {', '.join(missing)}; it has {', '.join(frame.columns) or 'none'}."
            )
        wrong = {c: (frame.schema[c], t) for c, t in self.columns.items() if frame.schema[c] != t}
        if wrong:
            detail = "; ".join(f"{c} is {got}, not {want}" for c, (got, want) in wrong.items())
            raise SchemaError(f"{self.name} table has wrong type(s): {detail}. Cast them before the call.")
        if self.keys and frame.select(pl.struct(self.keys).is_duplicated().any()).item():
            raise SchemaError(f"{self.name} table repeats a key ({', '.join(self.keys)}).")
        if null := [c for c in self.keys if frame[c].has_nulls()]:
            raise SchemaError(f"{self.name} table has a row without {null[0]}, which is its key.")
        lists = [c for c, t in self.columns.items() if isinstance(t, pl.List)]
        if null := [c for c in lists if (frame[c].list.drop_nulls().list.len() != frame[c].list.len()).any()]:
            raise SchemaError(f"{self.name} table has a list with a null in it, in {null[0]}: leave it out.")
        rest = [c for c in frame.columns if c not in self.columns]
        return frame.select([*self.columns, *rest])

    def empty(self) -> pl.DataFrame:
        """A table of no rows."""
        return pl.DataFrame(schema=dict(self.columns))


_TABLES = {
    "events": "a Run: load_run(path) gives one",
    "edges": "a Graph: build_graph(run) gives one, and a Result has its own as .graph",
    "ops": "a Graph or a Result: build_graph(run) gives one, replay(graph) the other",
}


def require(source: object, table: str) -> None:
    """Raise InputError unless `source` is what has such a table: events, edges (and ops), or ops.

    Raises
    ------
    InputError
        It is something else; the message says what gives the right thing.
    """
    if not hasattr(source, table):
        raise InputError(f"this takes {_TABLES[table]}; it was given a {type(source).__name__}.")


EVENTS = TableSchema(
    "event",
    {
        "rank": pl.Int32(),
        "event_id": pl.Int64(),  # position in the rank's file, 0-based, counted over all its events
        "category": pl.String(),  # one vocabulary for all generations: cpu_op, kernel, cuda_runtime, ...
        "name": pl.String(),
        "thread": pl.Int64(),  # CPU thread; null on a device
        "device": pl.Int32(),  # device index; null on a CPU thread
        "stream": pl.Int64(),  # device stream; null on a CPU thread
        "start_ns": pl.Int64(),  # absolute: baseTimeNanoseconds is added
        "dur_ns": pl.Int64(),
        "correlation": pl.Int64(),  # joins a runtime call with its device work; null where the trace has none
        "external_id": pl.Int64(),
        "sequence": pl.Int64(),  # autograd sequence number, joins a forward op with its backward
        "args": pl.String(),  # all arguments as the file had them, JSON
    },
)

OPS = TableSchema(
    "op",
    {
        "op_id": pl.Int64(),
        "rank": pl.Int32(),
        "step": pl.Int32(),
        "lane": pl.String(),  # "cpu:<thread>" or "gpu<device>:<stream>"; "net" for a join
        "device": pl.Int32(),  # null on a CPU lane
        "kind": pl.String(),
        "name": pl.String(),
        "start_ns": pl.Int64(),
        "dur_ns": pl.Int64(),
        "correlation": pl.Int64(),
        "parent": pl.String(),  # outermost operator of the host code that ran or launched it
        "phase": pl.String(),
        "layer": pl.String(),
        "micro_batch": pl.Int32(),
        "shapes": pl.String(),
        "dtype": pl.String(),
        "flops": pl.Float64(),
        "bytes": pl.Float64(),
        "collective": pl.String(),
        "group": pl.String(),
        "group_size": pl.Int32(),
        "comm_bytes": pl.Int64(),
        "peer": pl.Int32(),
        "comm_seq": pl.Int64(),
    },
    keys=("op_id",),
)

EDGES = TableSchema(
    "edge",
    {
        "src": pl.Int64(),  # op_id
        "dst": pl.Int64(),  # op_id
        "lag_ns": pl.Int64(),
        "from_start": pl.Boolean(),  # the lag counts from the start of src (a launch), not from its end
        "rule": pl.String(),
        "evidence": pl.String(),
        "hard": pl.Boolean(),
    },
)
