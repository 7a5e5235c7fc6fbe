"""Op-level timelines of pipeline-parallel training: one record an op of a rank, no kernels, no threads.

Two exports of the same jobs are read (StragglerAnalysis, ByteDance 2025): a bare list of Chrome events, and a Parquet
table; each takes the job's sizes from `meta-<job>.yaml` beside it where that is there.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.errors import TraceError, named
from lumos_nb.schema import EVENTS
from lumos_nb.traces.exact import LATEST_NS
from lumos_nb.traces.export import read_table
from lumos_nb.traces.json_stream import Blocks
from lumos_nb.traces.trace import NOTES, Trace

THREAD = 0
"""The one thread that each rank's ops lie on: they run one after the other."""

LANES_OF_A_RANK = 5
"""Chrome threads that the export gives each rank: compute, pp-comm, tp-comm, dp-comm, misc."""

COLLECTIVES = {
    "params-all-gather": ("all_gather", "stage"),
    "grads-reduce-scatter": ("reduce_scatter", "stage"),
    "embedding-grads-all-reduce": ("all_reduce", "replica"),
    "optimizer-clip-main-grad": ("all_reduce", "job"),
}
"""Op -> which collective it is, and what its ranks share: all replicas of a stage, all stages of a replica that show
the op, all of the job. `layernorm-grads-all-reduce` is among tensor ranks, which the files do not tell apart."""

_SCOPES = {op: scope for op, (_, scope) in COLLECTIVES.items()}

ROUNDING_NS = 1_000
"""Times in the files are single-precision seconds that were shifted afterwards; peers' begins agree to within this."""

_COLUMNS = {
    "rank": pl.Int32(),
    "replica": pl.Int32(),  # data-parallel rank
    "stage": pl.Int32(),  # pipeline rank
    "step": pl.Int32(),
    "name": pl.String(),
    "start_ns": pl.Int64(),
    "dur_ns": pl.Int64(),
    "micro_batch": pl.Int32(),  # null where the op belongs to none
    "order": pl.Int32(),  # the op's number among those of its name, rank and step
}


def read_timeline(path: str | Path) -> Trace:
    """Read a timeline of all ranks of a job, JSON or Parquet.

    Ops become rows of one thread a rank; communication carries the arguments that say who takes part: sends and
    receives of one moment are one exchange of all the ranks that they touch, data-parallel collectives join the
    replicas of a stage. Between recorded steps (a sample of the job's) lies no time: they are laid end to end.

    Raises
    ------
    TraceError
        The file is damaged, or lacks what a timeline has; the message names what.
    """
    path = named(path, TraceError)
    records, notes, count = _of_parquet(path) if _is_parquet(path) else _of_json(path)
    if records.is_empty():
        raise TraceError(f"{path} is a timeline without ops ({count:,} records): nothing can be read from it.")
    records = records.sort("rank", "step", "start_ns", "dur_ns", "order")
    records, moved = _end_to_end(records)
    replicas, stages = records["replica"].n_unique(), records["stage"].n_unique()
    notes.append(("times", moved, f"steps laid end to end: the job's other steps lay between these {moved + 1}"))
    rows, merged = _communication(records)
    rows, restored = _with_waiting(rows)
    rows, cut = _in_turn(rows)
    if restored:
        reason = (
            "communication that holds no waiting, so that it begins on all its ranks at once: from the op before it on"
        )
        notes.append(("waiting", restored, reason))
    if cut:
        notes.append(("overlap", cut, "ops that begin before the one before them on their rank ends: begin at its end"))
    notes.append(("merged", merged, "sends and receives that a rank issued together are one exchange"))
    events = pl.concat([_events(rows), _marks(records, count)], how="diagonal_relaxed")
    events = events.with_columns(pl.lit(None, dtype).alias(c) for c, dtype in EVENTS.columns.items() if c not in events)
    meta = path.with_name(f"meta-{path.name.split('.')[0].rpartition('-')[2]}.yaml")
    sizes = {"data_parallel": replicas, "pipeline_parallel": stages, **_sizes(meta)}
    metadata: dict[str, Any] = {
        "ranks": records["rank"].unique().sort().to_list(),
        "event_count": count,
        "layout": {**sizes, "groups": _groups(rows)},
        "beside": [meta.name] if meta.is_file() else [],
    }
    order = events.sort("rank", "start_ns", pl.col("category") == "cpu_op", "event_id")
    return Trace(
        EVENTS.check(order.select(pl.col(c).cast(dtype) for c, dtype in EVENTS.columns.items())),
        metadata,
        pl.DataFrame(notes, schema=NOTES, orient="row"),
    )


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _of_parquet(path: Path) -> tuple[pl.DataFrame, list[tuple[str, int, str]], int]:
    needed = ("rank", "dp_rank", "stage", "step", "optype", "start_ts", "duration", "mb_id", "seq_id")
    try:
        table = read_table(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise TraceError(f"{path} cannot be read as Parquet: {error}. Export it again.") from error
    if missing := [c for c in needed if c not in table.columns]:
        raise TraceError(f"{path} is no timeline: it lacks the column(s) {', '.join(missing)}.")
    if isinstance(table["optype"].dtype, pl.Categorical | pl.Enum):
        table = table.cast({"optype": pl.String})
    _refuse_others(path, {c: table[c].dtype for c in needed})
    seconds = [pl.col(c).cast(pl.Float64, strict=False) * 1e9 for c in ("start_ts", "duration")]
    return _checked(
        path,
        table.select(
            "rank",
            "stage",
            "step",
            replica="dp_rank",
            name=pl.col("optype").cast(pl.String),
            start_ns=seconds[0].round(),
            dur_ns=seconds[1].round(),
            micro_batch="mb_id",
            order="seq_id",
        ),
    )


def _of_json(path: Path) -> tuple[pl.DataFrame, list[tuple[str, int, str]], int]:
    blocks = Blocks(path)
    try:
        events = json.loads(b"".join(blocks).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} cannot be read as JSON: {blocks.damage or error}. Export it again.") from error
    if not isinstance(events, list):
        raise TraceError(f"{path} is no timeline: it holds a {type(events).__name__}, not a list of events.")
    stages: dict[tuple[str, str], int] = {}
    for event in events:
        if isinstance(event, dict) and event.get("name") == "thread_name" and isinstance(event.get("args"), dict):
            found = re.match(r"PP rank (\d{1,9}), TP rank \d+, ", str(event["args"].get("name")))
            if found:
                stages[repr(event.get("pid")), repr(event.get("tid"))] = int(found.group(1))
    rows, odd = [], 0
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            odd += not isinstance(event, dict) or event.get("ph") != "M"
            continue
        try:
            replica, lane, args = event["pid"], event["tid"], event["args"]
            place = (lane // LANES_OF_A_RANK, replica, stages[repr(replica), repr(lane)], args["step"])
            times = [round(float(event[c]) * 1000) for c in ("ts", "dur")]
            if max(map(abs, times)) >= LATEST_NS:
                raise OverflowError
            rows.append((*place, event["name"], *times, args["mb_id"], args["seq_id"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            odd += 1
    try:
        table = pl.DataFrame(rows, schema=list(_COLUMNS), orient="row", infer_schema_length=None)
    except (pl.exceptions.PolarsError, OverflowError, TypeError, UnicodeEncodeError) as error:  # or half a character
        raise TraceError(f"{path} is no timeline: its fields are of changing types ({error}).") from error
    records, notes, _ = _checked(path, table)
    if odd:
        notes.append(("unreadable", odd, "events that are no op with a rank, step, order and time"))
    named = sum(isinstance(event, dict) and event.get("ph") == "M" for event in events)
    notes.append(("dropped M", named, "names of lanes, kept in the rows' ranks and stages"))
    return records, notes, len(events)


def _checked(path: Path, table: pl.DataFrame) -> tuple[pl.DataFrame, list[tuple[str, int, str]], int]:
    """Rows of `_COLUMNS`; those without a rank, step or possible time are dropped and counted."""
    _refuse_others(path, {c: table[c].dtype for c in _COLUMNS})
    cast = table.select(pl.col(c).cast(dtype, strict=False) for c, dtype in _COLUMNS.items())
    sound = pl.all_horizontal(pl.col("rank", "replica", "stage", "step", "start_ns", "order").is_not_null())
    possible = sound & pl.col("dur_ns").is_between(0, 2**62) & pl.col("start_ns").is_between(-(2**62), 2**62)
    kept = cast.filter(possible).with_columns(
        micro_batch=pl.when(pl.col("micro_batch") >= 0).then("micro_batch"), name=pl.col("name").fill_null("")
    )
    lost = len(table) - len(kept)
    reason = "ops without a rank, stage, step, order, or with a time or duration that cannot be"
    return kept, [("unreadable", lost, reason)] if lost else [], len(table)


def _refuse_others(path: Path, dtypes: dict[str, pl.DataType]) -> None:
    plain = {c: dtype.is_numeric() or dtype in (pl.String, pl.Boolean, pl.Null) for c, dtype in dtypes.items()}
    if odd := [f"{c} is {dtypes[c]}" for c, is_plain in plain.items() if not is_plain]:
        raise TraceError(
            f"{path} is no timeline: its {', '.join(odd)}, where it has numbers and names. Export it again."
        )


def _sizes(meta: Path) -> dict[str, int]:
    """Sizes that the file `meta-<job>.yaml` beside the timeline states, {} if there is none."""
    text = meta.read_text(errors="replace") if meta.is_file() else ""
    return {key: int(value) for key, value in re.findall(r"^(\w+): *(\d{1,9}) *$", text, re.MULTILINE)}


def _end_to_end(records: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Steps one after the other: the next begins when the last op of the one before it has ended, over all ranks."""
    end_ns = (pl.col("start_ns") + pl.col("dur_ns")).max()
    steps = records.group_by("step").agg(first_ns=pl.col("start_ns").min(), length_ns=end_ns - pl.col("start_ns").min())
    steps = steps.sort("step").with_columns(begin_ns=pl.col("length_ns").cum_sum() - pl.col("length_ns"))
    moved = records.join(steps, on="step", maintain_order="left")
    return moved.with_columns(start_ns=pl.col("start_ns") - pl.col("first_ns") + pl.col("begin_ns")), len(steps) - 1


def _with_waiting(rows: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Communication from its arrival on: the export to JSON has cut off what each rank waited for its peers.

    That it did shows in peers that all begin at once, to within the rounding of the file's times.
    """
    shared = pl.col("group_size") > 1
    together = (
        rows.filter(shared).group_by("group", "seq").agg(apart=pl.col("start_ns").max() - pl.col("start_ns").min())
    )
    if together.is_empty() or together.select((pl.col("apart") > ROUNDING_NS).mean()).item() > 0.5:
        return rows, 0
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    table = rows.with_columns(before_ns=end_ns.cum_max().shift(1).over("rank", "step"), end_ns=end_ns)
    arrival = pl.when(shared & (pl.col("before_ns") < pl.col("start_ns"))).then("before_ns").otherwise("start_ns")
    table = table.with_columns(start_ns=arrival, dur_ns=pl.col("end_ns") - arrival)
    return table.drop("before_ns", "end_ns"), rows.filter(shared).height


def _in_turn(rows: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Ops of a rank without partial overlap, which the export's rounding makes; an op within another one stays."""
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    table = rows.with_columns(before_ns=end_ns.cum_max().shift(1).over("rank"), end_ns=end_ns)
    late = (pl.col("start_ns") < pl.col("before_ns")) & (pl.col("end_ns") > pl.col("before_ns"))
    late = late.fill_null(value=False)
    start_ns = pl.when(late).then("before_ns").otherwise("start_ns")
    cut = table.with_columns(start_ns=start_ns, dur_ns=pl.col("end_ns") - start_ns, late=late)
    return cut.drop("before_ns", "end_ns", "late"), int(cut["late"].sum())


def _communication(records: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Add `collective`, `group`, `group_size`, `seq` to the ops that other ranks take part in; null elsewhere.

    Sends and receives that a rank issues together become one row; how many rows that saves is the second result.
    """
    name = pl.col("name")
    table = records.with_row_index("row")
    is_message = name.str.contains(r"^(forward|backward)-(send|recv)$")
    exchanges = _exchanges(table.filter(is_message))
    scope = name.replace_strict(_SCOPES, default=None)
    group = pl.when(scope == "stage").then("stage").when(scope == "replica").then("replica").cast(pl.String)
    joint = table.filter(name.is_in(list(COLLECTIVES))).with_columns(
        collective=name.replace_strict({op: collective for op, (collective, _) in COLLECTIVES.items()}, default=None),
        group=pl.concat_str(scope, group, separator=" ", ignore_nulls=True),
    )
    # One sequence number a kind of op: its group may be another op's as well.
    joint = joint.with_columns(group=pl.format("{} of {}", "name", "group")).with_columns(
        group_size=pl.col("rank").n_unique().over("group"),
        seq=pl.int_range(pl.len()).over("rank", "group", order_by="start_ns"),
    )
    alone = table.filter(~is_message & ~name.is_in(list(COLLECTIVES)))
    rows = pl.concat([exchanges, joint, alone], how="diagonal_relaxed")
    return rows.sort("rank", "row"), len(table) - len(rows)


def _exchanges(messages: pl.DataFrame) -> pl.DataFrame:
    """Add which exchange each row of sends and receives is part of: all that they reach through other ranks' calls.

    Stage s sends forward to s + 1 and backward to s - 1, round the ring of stages; the k-th forward send of a stage is
    the k-th forward receive of the next. `calls` holds, for each row, the names of the messages that it issues.
    """
    size = messages["stage"].max() or 0
    assert isinstance(size, int)
    forward = pl.col("name").str.starts_with("forward")
    sends = pl.col("name").str.ends_with("send")
    back = pl.when(forward).then(-1).otherwise(1)
    source = pl.when(sends).then("stage").otherwise((pl.col("stage") + back) % (size + 1))
    table = messages.with_columns(
        call=pl.struct("rank", "step", "start_ns", "dur_ns").rank("dense").cast(pl.Int64) - 1,
        message=pl.struct("replica", "step", source.alias("source"), forward.alias("forward"), "order").rank("dense"),
    )
    part = _components(table["message"].to_numpy(), table["call"].to_numpy())
    table = table.with_columns(part=pl.Series(part))
    calls = (
        table.group_by("call", maintain_order=True)
        .agg(pl.col(c).first() for c in table.columns if c not in ("call", "name", "micro_batch"))
        .join(table.group_by("call").agg(name=pl.col("name").sort().str.join("+")), on="call")
    )
    ranks = pl.col("rank").unique().sort().cast(pl.String).str.join("+").over("part")
    named = calls.with_columns(
        collective=pl.lit("send_recv"),
        group=pl.lit("stages of ranks ") + ranks,
        group_size=pl.col("rank").n_unique().over("part"),
        begin_ns=pl.col("start_ns").min().over("part"),
        micro_batch=pl.lit(None, pl.Int32),
    )
    return named.with_columns(seq=pl.struct("begin_ns", "part").rank("dense").over("group").cast(pl.Int64) - 1)


def _components(message: NDArray[Any], call: NDArray[Any]) -> NDArray[np.int64]:
    """For each row the lowest call that its call is tied to by messages, directly or through others."""
    order = np.argsort(message, kind="stable")
    root = np.arange(call.max(initial=0) + 1)

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = int(root[node])
        return node

    for a, b in pairwise(order.tolist()):
        if message[a] == message[b]:
            low, high = sorted((find(int(call[a])), find(int(call[b]))))
            root[high] = low
    return np.array([find(int(c)) for c in call], np.int64)


def _groups(rows: pl.DataFrame) -> list[dict[str, Any]]:
    """The groups of ranks that communicate, in the words of the profiler's `pg_config`."""
    members = rows.filter(pl.col("group").is_not_null()).group_by("group", maintain_order=True)
    scope = pl.col("name").first().replace_strict(_SCOPES, default="pipeline", return_dtype=pl.String)
    listed = members.agg(scope.replace({"stage": "data", "replica": "embedding"}), pl.col("rank").unique().sort())
    return [{"pg_name": name, "pg_desc": about, "ranks": ranks} for name, about, ranks in listed.iter_rows()]


def _events(table: pl.DataFrame) -> pl.DataFrame:
    own = pl.struct("micro_batch", "order").struct.json_encode()
    shared = pl.struct(
        pl.col("collective").alias("Collective name"),
        pl.col("group").alias("Process Group Name"),
        pl.col("group_size").alias("Group size"),
        pl.col("seq").alias("Seq"),
        "micro_batch",
        "order",
    ).struct.json_encode()
    return table.select(
        "rank",
        "name",
        "start_ns",
        "dur_ns",
        event_id=pl.col("row").cast(pl.Int64),
        category=pl.when(pl.col("collective").is_null()).then(pl.lit("cpu_op")).otherwise(pl.lit("collective")),
        thread=pl.lit(THREAD, pl.Int64),
        args=pl.when(pl.col("collective").is_null()).then(own).otherwise(shared),
    )


def _marks(records: pl.DataFrame, count: int) -> pl.DataFrame:
    """The steps, as a profiler marks them, the same on all ranks: rows that the file lacks, numbered after its own."""
    end_ns = (pl.col("start_ns") + pl.col("dur_ns")).max()
    steps = records.group_by("step").agg(pl.col("start_ns").min(), dur_ns=end_ns - pl.col("start_ns").min())
    marks = records.select(pl.col("rank").unique()).join(steps, how="cross").sort("rank", "start_ns")
    return marks.select(
        "rank",
        "start_ns",
        "dur_ns",
        event_id=count + pl.int_range(pl.len(), dtype=pl.Int64),
        category=pl.lit("user_annotation"),
        name=pl.format("ProfilerStep#{}", "step"),
        thread=pl.lit(THREAD, pl.Int64),
        args=pl.lit("{}"),
    )
