"""JSON of AMD's rocprofiler-sdk (`rocprofv3 --output-format json`) to the one event table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from lumos_nb.errors import UNDECODABLE, TraceError, UnsupportedFormat, named
from lumos_nb.schema import EVENTS
from lumos_nb.traces.exact import LATEST_NS, strings
from lumos_nb.traces.formats import ROCPROFILER, format_of
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.traces.trace import NOTES, Trace

CATEGORIES = {
    "kernel_dispatch": "kernel",
    "memory_copy": "gpu_memcpy",
    "hip_api": "cuda_runtime",
    "hsa_api": "cuda_driver",
    "rccl_api": "user_annotation",
    "marker_api": "user_annotation",
}
"""List of records -> category of its events, in the order in which `event_id` counts them. Others are only counted."""

COPIES = {"HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD", "HOST_TO_HOST": "HtoH"}
GPU = 2
"""The type of an agent that is a GPU."""

NO_STREAM = -1
"""The stream of copies in files that name none: one lane of their device."""

_HANDLE = pl.Struct({"handle": pl.Int64()})
_DISPATCH = {"agent_id": _HANDLE, "queue_id": _HANDLE, "kernel_id": pl.Int64()}
_RECORD = {
    **dict.fromkeys(("kind", "operation", "thread_id", "start_timestamp", "end_timestamp"), pl.Int64()),
    "correlation_id": pl.Struct({"internal": pl.Int64()}),
    "dispatch_info": pl.Struct(_DISPATCH),
    **dict.fromkeys(("stream_id", "src_agent_id", "dst_agent_id"), _HANDLE),
}


class _Agent(msgspec.Struct):
    id: dict[str, int] = {}
    type: int = 0
    logical_node_type_id: int = -1
    product_name: str = ""
    name: str = ""
    cu_count: int = 0


class _Symbol(msgspec.Struct):
    kernel_id: int = -1
    formatted_kernel_name: str = ""
    kernel_name: str = ""


class _Kind(msgspec.Struct):
    operations: list[str] = []


class _Marker(msgspec.Struct):
    key: int = -1
    value: str = ""


class _Strings(msgspec.Struct):
    buffer_records: list[_Kind] = []
    marker_api: list[_Marker] = []


class _Process(msgspec.Struct):
    """What the file says of one process."""

    metadata: dict[str, Any] = {}
    agents: list[_Agent] = []
    kernel_symbols: list[_Symbol] = []
    strings: _Strings = msgspec.field(default_factory=_Strings)
    buffer_records: dict[str, list[msgspec.Raw]] = {}
    callback_records: dict[str, list[msgspec.Raw]] = {}

    def gpus(self) -> dict[int, tuple[int, _Agent]]:
        """Handle -> number among the node's GPUs, and what the GPU is."""
        gpus = enumerate(agent for agent in self.agents if agent.type == GPU)
        stated = ((n if agent.logical_node_type_id < 0 else agent.logical_node_type_id, agent) for n, agent in gpus)
        return {agent.id.get("handle", -1): (number, agent) for number, agent in stated}


class _File(msgspec.Struct, rename={"processes": "rocprofiler-sdk-tool"}):
    processes: list[_Process]


def read_rocprofiler(path: str | Path) -> Trace:
    """Read one JSON file of rocprofiler-sdk, plain or gzip.

    Every process in the file is a rank, in the file's order. HIP and HSA calls get the categories of CUDA's runtime and
    driver, markers and RCCL calls those of annotations. A device is the number of a GPU among those of its node; a
    stream is HIP's where the file names it, else the hardware queue. Times count from the start of the machine.

    Parameters
    ----------
    path
        What `rocprofv3 --output-format json` wrote.

    Returns
    -------
    Trace
        `args` hold the whole record; `metadata["ranks"]` lists the ranks.

    Raises
    ------
    TraceError
        The file is cut, is no JSON, or a field is of another type than the tool writes; the message says where.

    Examples
    --------
    >>> read_rocprofiler("908_results.json").events.group_by("category").len()  # doctest: +SKIP
    """
    path = named(path, TraceError)
    if (name := format_of(path)) != ROCPROFILER:
        raise UnsupportedFormat(f"{path} is of the format {name}; read_trace takes it.")
    blocks = Blocks(path)
    text = b"".join(blocks)
    try:
        processes = msgspec.json.decode(text, type=_File).processes
        rows = [_rows(process, rank) for rank, process in enumerate(processes)]
        if not rows:
            raise TraceError(
                f"{path} holds no process: rocprofiler recorded nothing. Leave it out, or record it again."
            )
    except (*UNDECODABLE, pl.exceptions.PolarsError) as error:
        why = blocks.damage or f"{error} ({len(text):,} bytes of text)"
        raise TraceError(
            f"{path} is no sound output of rocprofiler: {why}. Record it again, or copy it again."
        ) from error
    table = pl.concat([pl.DataFrame(schema={**EVENTS.columns, "reason": pl.String()}), *rows])
    dropped = table.drop_nulls("reason").group_by("category", "reason").len().sort("category", "reason")
    notes = [(f"dropped {category}", count, reason) for category, reason, count in dropped.rows()]
    for process in processes:
        unread = [(name, records) for name, records in process.buffer_records.items() if name not in CATEGORIES]
        for name, records in [*unread, *process.callback_records.items()]:
            if records:
                notes.append((f"not read {name}", len(records), "a list of which no event is made"))
    about: dict[str, Any] = {}
    for process in processes[:1]:
        gpus = process.gpus().values()
        shown = [{"id": n, "name": gpu.product_name or gpu.name, "numSms": gpu.cu_count} for n, gpu in gpus]
        about = {**process.metadata, "deviceProperties": shown}
    about |= {"ranks": list(range(len(processes))), "ranks_counted": True, "event_count": len(table)}
    events = table.filter(pl.col("reason").is_null()).drop("reason")
    return Trace(EVENTS.check(events), about, pl.DataFrame(notes, schema=NOTES, orient="row"))


def _rows(process: _Process, rank: int) -> pl.DataFrame:
    """All records of a process as rows of events, with `reason`: why one is none, else null."""
    names = {s.kernel_id: s.formatted_kernel_name or s.kernel_name for s in process.kernel_symbols}
    markers = {marker.key: marker.value for marker in process.strings.marker_api}
    kinds = enumerate(kind.operations for kind in process.strings.buffer_records)
    operations = [(kind, n, name) for kind, known in kinds for n, name in enumerate(known)]
    called = pl.DataFrame(
        operations, schema={"kind": pl.Int64, "operation": pl.Int64, "called": pl.String}, orient="row"
    )
    records = pl.concat([_records(process, name) for name in CATEGORIES])
    records = records.join(called, on=["kind", "operation"], how="left", maintain_order="left")
    number = {handle: n for handle, (n, _) in process.gpus().items()}
    agents = [
        pl.col("dispatch_info").struct.field("agent_id"), pl.col("dst_agent_id"), pl.col("src_agent_id")
    ]  # fmt: skip
    device = pl.coalesce(_known(agent.struct.field("handle"), number, pl.Int32) for agent in agents)
    on_device = pl.col("category").is_in(["kernel", "gpu_memcpy"])
    kernel = pl.col("dispatch_info").struct.field("kernel_id")
    correlation = pl.col("correlation_id").struct.field("internal")
    copy = pl.col("called").str.strip_prefix("MEMORY_COPY_").replace(COPIES)
    queue = pl.col("dispatch_info").struct.field("queue_id").struct.field("handle")
    start, end = pl.col("start_timestamp"), pl.col("end_timestamp")
    reason = (
        pl.when(start.is_null() | end.is_null() | ~start.is_between(0, LATEST_NS) | (end > LATEST_NS))
        .then(pl.lit("no time, or an absurd one"))
        .when(end < start)
        .then(pl.lit("a negative duration"))
        .when(on_device & device.is_null())
        .then(pl.lit("of no GPU of this node"))
    )
    return records.select(
        rank=pl.lit(rank, pl.Int32),
        event_id=pl.int_range(pl.len(), dtype=pl.Int64),
        category="category",
        name=pl.when(pl.col("category") == "kernel")
        .then(pl.coalesce(_known(kernel, names, pl.String), pl.format("kernel {}", kernel)))
        .when(pl.col("category") == "gpu_memcpy").then(pl.format("Memcpy {}", copy))
        .when(pl.col("list") == "marker_api").then(pl.coalesce(_known(correlation, markers, pl.String), "called"))
        .otherwise("called")
        .fill_null(pl.format("{} {}", "list", pl.col("operation").fill_null(-1))),
        thread=pl.when(~on_device).then("thread_id"),
        device=pl.when(on_device).then(device),
        stream=pl.when(on_device)
        .then(pl.coalesce(pl.col("stream_id").struct.field("handle"), queue, pl.lit(NO_STREAM, pl.Int64))),
        start_ns=start,
        dur_ns=end - start,
        correlation=correlation,
        external_id=pl.lit(None, pl.Int64),
        sequence=pl.lit(None, pl.Int64),
        args="args",
        reason=reason,
    )  # fmt: skip


def _records(process: _Process, name: str) -> pl.DataFrame:
    """The records of one list, with `args`, their text."""
    texts = strings([msgspec.json.format(raw, indent=-1) for raw in process.buffer_records.get(name, [])])
    fields = texts.str.json_decode(pl.Struct(_RECORD)).struct.unnest()
    return fields.with_columns(args=texts, list=pl.lit(name), category=pl.lit(CATEGORIES[name]))


def _known(value: pl.Expr, known: dict[int, Any], dtype: type[pl.DataType]) -> pl.Expr:
    """What `known` has for each value, else null."""
    known = {key: what for key, what in known.items() if -(2**63) <= key < 2**63}  # no record has a greater one
    return value.replace_strict(known, default=None, return_dtype=dtype)
