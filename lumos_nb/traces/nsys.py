"""SQLite exports of Nsight Systems (`nsys export --type sqlite`) to the one event table.

Tables differ between versions of nsys: what is absent counts as empty, and what is not read is named in the notes.
Calls, streams, correlation ids and names of copies come out as Kineto has them, so that one set of rules serves both.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from lumos_nb.errors import TraceError, UnsupportedFormat, named
from lumos_nb.schema import EVENTS
from lumos_nb.traces.exact import LATEST_NS
from lumos_nb.traces.formats import NSYS, format_of
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.traces.trace import NOTES, Trace

CUPTI = "CUPTI_ACTIVITY_KIND_"
DEVICE_TABLES = {
    CUPTI + "KERNEL": "kernel",
    CUPTI + "GRAPH_TRACE": "kernel",  # a whole CUDA graph as one row, which is how nsys traces graphs by default
    CUPTI + "MEMCPY": "gpu_memcpy",
    CUPTI + "MEMSET": "gpu_memset",
}
RUNTIME, SYNC, RECORDS, NVTX = CUPTI + "RUNTIME", CUPTI + "SYNCHRONIZATION", CUPTI + "CUDA_EVENT", "NVTX_EVENTS"
EVENT_TABLES = (*DEVICE_TABLES, RUNTIME, SYNC, NVTX)
"""Tables whose rows are events, in the order in which `event_id` counts them."""

OTHER_TABLES = (
    RECORDS,
    *("StringIds", "PROCESSES", "ThreadNames"),
    *("META_DATA_CAPTURE", "META_DATA_EXPORT", "TARGET_INFO_GPU", "TARGET_INFO_SESSION_START_TIME"),
)
"""Tables that are read for what they say about events."""

COPY_KINDS = dict(enumerate(("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"), start=1))
MEMORY_KINDS = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
SYNC_KINDS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
RANGES = {34: "cpu_instant_event", 59: "user_annotation", 60: "nvtx_range"}
"""NVTX types that are events: marks, a thread's nested ranges, and ranges that may overlap or end on another thread."""

STEP_RANGES = (r"(?i)^profiler ?step$", r"(?i)^(train(ing)?[ _]?)?iter(ation)?$", r"(?i)^(train(ing)?[ _]?)?step$")
"""What ranges that mark steps are called, without their number. The first serves whose ranges in a process lie one
after another with rising numbers: they are named ProfilerStep#n, as Kineto's marks are; their text stays in `args`."""

_NO_STREAM = 2**32 - 1
_OF_TORCH = r", (?:seq|op_id|stashed seq|stashed tid|sizes|input_op_ids) = .*$"  # torch.autograd.profiler.emit_nvtx
_ROWS = 100_000
_TYPES: dict[str, pl.DataType] = {"INTEGER": pl.Int64(), "REAL": pl.Float64()}


def read_nsys(path: str | Path) -> Trace:
    """Read one SQLite export of Nsight Systems, plain or gzip.

    Every process that used a device is a rank: by the lowest device that it used, then by process id, or, if there is
    but one, as the environment variables `RANK` and `WORLD_SIZE` say that nsys recorded. Times are since 1970 by
    the session's start. What other processes did is dropped and counted.

    Parameters
    ----------
    path
        What `nsys export --type sqlite` or `nsys stats` made of a report.

    Returns
    -------
    Trace
        `event_id` counts the rows of `EVENT_TABLES`; `metadata["ranks"]` lists the ranks.

    Raises
    ------
    TraceError
        The file is damaged; `UnsupportedFormat` if it is a database of something else.

    Examples
    --------
    >>> read_nsys("report1.sqlite").events.group_by("rank", "category").len()  # doctest: +SKIP
    """
    path = named(path, TraceError)
    if (name := format_of(path)) != NSYS:
        raise UnsupportedFormat(f"{path} is of the format {name}; read_trace takes it.")
    try:
        with _opened(path) as connection:
            return _Export(connection, path).trace(path)
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:  # also names of columns that are no UTF-8
        raise TraceError(
            f"{path} is a damaged SQLite file: {error}. Export the report again (nsys export --type sqlite)."
        ) from error
    except pl.exceptions.PolarsError as error:  # a device beyond 32 bits, columns that bear the names of ours
        raise TraceError(
            f"{path} has values that nsys does not write: {str(error).splitlines()[0]}. Export the report again."
        ) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, found sound; a compressed one is unpacked to a temporary file."""
    blocks = Blocks(path)
    with contextlib.ExitStack() as stack:
        with path.open("rb") as file:
            plain = file.read(6) == b"SQLite"
        if not plain:
            unpacked = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".sqlite"))
            unpacked.writelines(blocks)
            unpacked.flush()
            if blocks.damage:
                raise TraceError(f"{path} cannot be unpacked: {blocks.damage}. Copy it again, or export it again.")
            path = Path(unpacked.name)
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        stack.callback(connection.close)
        connection.text_factory = lambda text: text.decode(errors="replace")
        [verdict] = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        yield connection


class _Export:
    """One database on its way to a table of events."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        self.tables = {name for (name,) in names if isinstance(name, str)}  # a damaged list may hold anything
        if self.tables.isdisjoint(EVENT_TABLES):
            shown = ", ".join(sorted(self.tables)[:5]) or "none"
            raise UnsupportedFormat(
                f"{path} is a database without events of Nsight Systems (its tables: {shown}); export with "
                "nsys export --type sqlite, from a report that traced cuda or nvtx."
            )
        self.notes: list[tuple[str, int, str]] = []
        self.count = 0
        strings = self.table("StringIds", "id", texts=("value",))
        self.strings = strings.select("id", name="value").unique("id", keep="first")

    def table(self, name: str, *numbers: str, texts: tuple[str, ...] = ()) -> pl.DataFrame:
        """A table's rows; the columns asked for are there, null where the table lacks them or has something else."""
        asked: dict[str, pl.DataType] = {**dict.fromkeys(numbers, pl.Int64()), **dict.fromkeys(texts, pl.String())}
        declared = self.connection.execute(f"PRAGMA table_info({_quoted(name)})") if name in self.tables else ()
        columns = {c: asked.get(c, _TYPES.get(kind, pl.String())) for _, c, kind, *_ in declared}
        frames = [pl.DataFrame(schema=columns)]
        if columns:
            cursor = self.connection.execute(f"SELECT {', '.join(map(_quoted, columns))} FROM {_quoted(name)}")
            while rows := cursor.fetchmany(_ROWS):
                values = zip(columns.items(), zip(*rows, strict=True), strict=True)
                frames.append(pl.DataFrame([pl.Series(c, v, dtype, strict=False) for (c, dtype), v in values]))
        return pl.concat(frames).with_columns(pl.lit(None, t).alias(c) for c, t in asked.items() if c not in columns)

    def rows(self, name: str, place: str, *numbers: str, texts: tuple[str, ...] = ()) -> pl.DataFrame:
        """A table of events with `event_id`, counted over all of them, and the process that `place` names."""
        frame = self.table(name, "start", "end", place, *numbers, texts=texts).with_row_index("event_id", self.count)
        self.count += len(frame)
        return frame.with_columns(pl.col("event_id").cast(pl.Int64), process=pl.col(place) // 2**24)

    def named(self, frame: pl.DataFrame, *columns: str) -> pl.Series:
        """What the first of `columns` that is the id of a string stands for."""
        ids = (frame.select(id=c) for c in columns)
        found = [one.join(self.strings, on="id", how="left", maintain_order="left")["name"] for one in ids]
        return pl.select(pl.coalesce(found).alias("name")).to_series()

    def trace(self, path: Path) -> Trace:
        device = [self.device_rows(name, category) for name, category in DEVICE_TABLES.items()]
        calls = self.calls()
        work = pl.concat(device, how="diagonal_relaxed")
        contexts = work.select("process", "contextId", on="device").drop_nulls().unique(["process", "contextId"])
        sync = self.syncs(contexts)
        ranges = self.ranges()
        events = pl.concat([*device, calls, sync, ranges], how="diagonal_relaxed")
        ranks = _ranks(work if work.height else pl.concat([calls, ranges], how="diagonal_relaxed"))
        if ranks.is_empty():
            raise TraceError(
                f"{path} has {self.count:,} events, none of a process that can be a rank. Export the report again."
            )
        metadata = self.metadata(ranks)
        stated = metadata.get("distributedInfo", {}).get("rank")
        if stated is not None:
            ranks = ranks.with_columns(rank=pl.lit(stated, pl.Int32))
        metadata |= {"ranks": ranks["rank"].to_list(), "ranks_counted": stated is None, "event_count": self.count}
        kept = self.kept(events.join(ranks, on="process", how="left", maintain_order="left"))
        for name in sorted(self.tables - {*EVENT_TABLES, *OTHER_TABLES}):
            [count] = self.connection.execute(f"SELECT count(*) FROM {_quoted(name)}").fetchone()
            if count and not name.startswith("ENUM_"):
                self.notes.append((f"not read {name}", count, "a table of which no event is made"))
        return Trace(kept, metadata, pl.DataFrame(self.notes, schema=NOTES, orient="row"))

    def device_rows(self, name: str, category: str) -> pl.DataFrame:
        """Kernels, copies, sets and graphs."""
        frame = self.rows(name, "globalPid", "deviceId", "contextId", "streamId", "correlationId", *_NAMED[name])
        if name == CUPTI + "KERNEL":
            title = pl.lit(self.named(frame, *_NAMED[name]))
        elif name == CUPTI + "MEMCPY":
            ends = (pl.col(c).replace_strict(MEMORY_KINDS, default="Unknown") for c in ("srcKind", "dstKind"))
            kind = pl.col("copyKind").replace_strict(COPY_KINDS, default="unknown")
            title = pl.format("Memcpy {} ({} -> {})", kind, *ends)
        elif name == CUPTI + "MEMSET":
            title = pl.format("Memset ({})", pl.col("memKind").replace_strict(MEMORY_KINDS, default="Unknown"))
        else:
            title = pl.format("CUDA graph {}", pl.coalesce("graphId", "graphExecId"))
        return frame.with_columns(
            category=pl.lit(category), name=title, device="deviceId", stream="streamId", args=_arguments(frame)
        )

    def calls(self) -> pl.DataFrame:
        """CUDA calls without the version in their names: cudaLaunchKernel_v7000, cudaMemcpyAsync_ptsz_v7000."""
        frame = self.rows(RUNTIME, "globalTid", "correlationId", "nameId", "eventClass")
        name = pl.lit(self.named(frame, "nameId")).str.replace(r"(_pts[zd])?_v\d+(_pts[zd])?$", "")
        driver = (pl.col("eventClass") == 1) | name.str.contains(r"^cu[A-Z]")
        category = pl.when(driver).then(pl.lit("cuda_driver")).otherwise(pl.lit("cuda_runtime"))
        return frame.with_columns(category=category, name=name, thread=_THREAD, args=_arguments(frame))

    def syncs(self, contexts: pl.DataFrame) -> pl.DataFrame:
        """Synchronisation records, on the device of their context (nsys writes device 0), with the stream waited for.

        A wait for an event is for its last record before the call, where the report has event records.
        """
        needed = ("deviceId", "contextId", "streamId", "correlationId", "syncType", "eventId")
        frame = self.rows(SYNC, "globalPid", *needed)
        records = self.table(RECORDS, "globalPid", "eventId", "correlationId", "streamId")
        frame = frame.join(contexts, on=["process", "contextId"], how="left", maintain_order="left")
        frame = frame.sort("correlationId", maintain_order=True).join_asof(
            records.select(
                "globalPid", "eventId", "correlationId", wait_on_stream="streamId",
                wait_on_cuda_event_record_corr_id="correlationId",
            ).sort("correlationId"),
            on="correlationId", by=["globalPid", "eventId"], check_sortedness=False,
        )  # fmt: skip
        kind = pl.col("syncType").replace_strict(SYNC_KINDS, default="Unknown")
        frame = frame.with_columns(
            stream=pl.col("streamId").replace(_NO_STREAM, -1), device=pl.coalesce("on", "deviceId"), cuda_sync_kind=kind
        )
        args = _arguments(frame.drop("on", "device"))
        return frame.with_columns(category=pl.lit("cuda_sync"), name=kind, args=args).sort("event_id")

    def ranges(self) -> pl.DataFrame:
        """NVTX marks and ranges; the operators that torch's `emit_nvtx` writes come with their names and numbers."""
        frame = self.rows(NVTX, "globalTid", "eventType", "textId", texts=("text",))
        frame = frame.with_columns(text=pl.coalesce("text", pl.lit(self.named(frame, "textId")), pl.lit("")))
        operator = pl.col("text").str.contains(_OF_TORCH)
        category = pl.col("eventType").replace_strict(RANGES, default=None, return_dtype=pl.String)
        frame = frame.with_columns(
            pl.col("text").str.extract(r"sizes = (\[.*?\])(?:, input_op_ids|$)").alias("Input Dims"),
            category=pl.when(operator).then(pl.lit("cpu_op")).otherwise(category),
            name=pl.col("text").str.replace(_OF_TORCH, ""),
            sequence=pl.col("text").str.extract(r", (?:stashed )?seq = (\d+)").cast(pl.Int64, strict=False),
            thread=_THREAD,
            end=pl.when(pl.col("eventType") == 34).then("start").otherwise("end"),
        )
        args = _arguments(frame.drop("name", "category", "sequence", "thread"))
        args = args.str.replace(r'"Input Dims":"(\[[^"]*\])"', '"Input Dims":$1')
        marks = _step_marks(frame.filter(category.is_not_null()))
        frame = frame.with_columns(args=args).join(marks, on="event_id", how="left", maintain_order="left")
        return frame.with_columns(name=pl.coalesce("mark", "name"))

    def kept(self, events: pl.DataFrame) -> pl.DataFrame:
        """The rows that are events of a rank, as `schema.EVENTS`; the others are counted."""
        base_ns = self.base_ns()
        start, end = pl.col("start"), pl.col("end")
        in_range = [time.is_between(-LATEST_NS, LATEST_NS - abs(base_ns), closed="none") for time in (start, end)]
        sound = in_range[0] & in_range[1].fill_null(value=True) & (end - start < LATEST_NS)
        reason = (
            pl.when(pl.col("category").is_null()).then(pl.lit("NVTX's own: a name of a domain, a category or a thread"))
            .when(pl.col("rank").is_null()).then(pl.lit("of a process that used no device"))
            .when(start.is_null() | ~sound.fill_null(value=True)).then(pl.lit("no time, or an absurd one"))
            .when(end.is_null()).then(pl.lit("no end: it did not end while nsys recorded"))
            .when(end < start).then(pl.lit("a negative duration"))
        )  # fmt: skip
        events = events.with_columns(
            reason=reason, correlation="correlationId", start_ns=start + base_ns, dur_ns=end - start
        )
        dropped = events.filter(pl.col("reason").is_not_null()).group_by("category", "reason").len()
        for category, why, count in dropped.sort("category", "reason").rows():
            self.notes.append((f"dropped {category or 'NVTX'}", count, why))
        missing = [pl.lit(None, t).alias(c) for c, t in EVENTS.columns.items() if c not in events.columns]
        kept = events.filter(pl.col("reason").is_null()).with_columns(*missing, pl.col("name").fill_null(""))
        return EVENTS.check(kept.select(pl.col(c).cast(t) for c, t in EVENTS.columns.items()))

    def base_ns(self) -> int:
        """What times count from, in ns since 1970: the session's start, less what their own clock showed then."""
        session = self.table("TARGET_INFO_SESSION_START_TIME", "utcEpochNs", "systemClockNs")
        for utc_ns, clock_ns in session.select("utcEpochNs", pl.col("systemClockNs").fill_null(0)).head(1).rows():
            if utc_ns is not None and 0 <= utc_ns < LATEST_NS and abs(clock_ns) < LATEST_NS:
                return int(utc_ns - clock_ns)
        self.notes.append(("times", 1, "the export does not say when the session began: times count from its start"))
        return 0

    def metadata(self, ranks: pl.DataFrame) -> dict[str, Any]:
        """What the export says besides its events, with the keys that Kineto uses where it has them."""
        processes = self.table("PROCESSES", "globalPid", "pid", texts=("name",))
        processes = processes.with_columns(process=pl.col("globalPid") // 2**24)
        threads = self.table("ThreadNames", "globalTid", "nameId")
        threads = threads.with_columns(
            process=pl.col("globalTid") // 2**24, tid=_THREAD, name=self.named(threads, "nameId")
        )
        said = self.table("META_DATA_EXPORT", texts=("name", "value")).select("name", "value").drop_nulls().rows()
        found: dict[str, Any] = {name: text for name, text in said if name not in ("distributedInfo", "layout")}
        found["deviceProperties"] = self.table("TARGET_INFO_GPU").to_dicts()
        found["processes"] = (
            ranks.join(processes, on="process", maintain_order="left").select("pid", "name", "rank").to_dicts()
        )
        found["threads"] = (
            ranks.join(threads, on="process", maintain_order="left_right").select("rank", "tid", "name").to_dicts()
        )
        settings = self.table("META_DATA_CAPTURE", texts=("value",))["value"].drop_nulls()
        stated = [re.fullmatch(r'(RANK|WORLD_SIZE)="?(\d{1,9})"?', text) for text in settings]
        distributed = {match[1].lower(): int(match[2]) for match in stated if match}
        return found | ({"distributedInfo": distributed} if len(ranks) == 1 and distributed else {})


_NAMED = {
    CUPTI + "KERNEL": ("demangledName", "shortName", "mangledName"),
    CUPTI + "MEMCPY": ("copyKind", "srcKind", "dstKind"),
    CUPTI + "MEMSET": ("memKind",),
    CUPTI + "GRAPH_TRACE": ("graphId", "graphExecId"),
}
_THREAD = pl.col("globalTid") % 2**24
_NO_ARGUMENTS = (
    *("event_id", "process", "start", "end", "correlationId", "globalTid", "globalPid", "nameId", "textId"),
    *_NAMED[CUPTI + "KERNEL"],
)


def _quoted(name: str) -> str:
    """A table's or column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _arguments(frame: pl.DataFrame) -> pl.Series:
    """The columns of each row as JSON under the names that the export gives them, nulls left out."""
    given = [c for c in frame.columns if c not in _NO_ARGUMENTS and frame[c].null_count() < len(frame)]
    if not given:
        return pl.Series("args", ["{}"] * len(frame), dtype=pl.String)
    text = frame.select(args=pl.struct(given).struct.json_encode())["args"]
    return text.str.replace_all(r'"[^"\\]+":null,?', "").str.replace(r",\}$", "}")


def _ranks(work: pl.DataFrame) -> pl.DataFrame:
    """`process`, `rank`: processes by the lowest device that they used, then by their number."""
    of = work.drop_nulls("process")
    of = of.with_columns(pl.col("device") if "device" in of.columns else pl.lit(None, pl.Int64).alias("device"))
    ordered = of.group_by("process").agg(pl.col("device").min()).sort("device", "process")
    return ordered.select("process", rank=pl.int_range(pl.len(), dtype=pl.Int32))


def _step_marks(ranges: pl.DataFrame) -> pl.DataFrame:
    """`event_id`, `mark` of the ranges that mark steps; see `STEP_RANGES`."""
    parts = pl.col("text").str.extract_groups(r"^(.*?)[ _#:=-]*(\d{1,9})$").struct.rename_fields(["stem", "number"])
    numbered = ranges.select("event_id", "process", "start", "end", parts.alias("parts")).unnest("parts")
    numbered = numbered.drop_nulls(["number", "start", "end"]).with_columns(pl.col("number").cast(pl.Int64))
    marks: dict[int, str] = {}
    for process in numbered.partition_by("process"):
        for pattern in STEP_RANGES:
            own = process.filter(pl.col("stem").str.contains(pattern)).sort("start")
            in_turn = (own["number"].diff() > 0).all() and (own["start"] >= own["end"].shift(1)).all()
            if own.height and in_turn:
                marks |= {event: f"ProfilerStep#{n}" for event, n in own.select("event_id", "number").iter_rows()}
                break
    columns = {"event_id": list(marks), "mark": list(marks.values())}
    return pl.DataFrame(columns, schema={"event_id": pl.Int64, "mark": pl.String})
