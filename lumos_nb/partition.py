"""Where a step's time goes: breakdowns that sum to the step, activity over time, the difference between two steps.

One sweep serves all of it. Every op, and every wait for the peers of a collective, lays *claim* to a piece of its
rank's step. At each instant the strongest claim holds, and among equals the one that began first, so that every
nanosecond of the step belongs to one part and to at most one op. All sums are exact, in int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.errors import GraphError, LumosError, SchemaError, is_whole, require_kinds, shown
from lumos_nb.graph import Recording, build_graph
from lumos_nb.schema import OPS, require
from lumos_nb.traces.run import Run

PARTS = (
    "compute",  # a kernel runs and no transfer; on a rank without a device, a CPU operator
    "overlapped",  # a kernel runs and so does a transfer
    "exposed_transfer",  # a transfer runs and no kernel
    "exposed_wait",  # arrived at a collective that a peer has not reached; no kernel, no transfer
    "copies",  # only a memcpy or memset runs
    "host_bound",  # the device is idle and the host at work: the device waits for the host
    "unexplained",  # only a delay that no rule of the graph accounts for
    "other",  # nothing runs at all
)
"""Parts of a step. Exposed communication is `exposed_transfer` plus `exposed_wait`."""

LEVELS = {"op": "name", "phase": "phase", "layer": "layer", "collective": "collective"}
"""Levels of `compare` that group by a column of the op table."""

# Claims, strongest first. A delay on a stream goes before the host's work: its kernel has been launched, so that the
# device does not wait for the host then, whatever a thread does meanwhile.
COMPUTE, TRANSFER, WAIT, COPY, DEVICE_DELAY, HOST, HOST_DELAY, NOTHING, OVERLAPPED = range(9)
CLAIM_PARTS = [
    "compute", "exposed_transfer", "exposed_wait", "copies", "unexplained", "host_bound", "unexplained", "other",
    "overlapped",
]  # fmt: skip
ACTIVITIES = {"compute": (COMPUTE,), "comm": (TRANSFER,), "wait": (WAIT,), "copy": (COPY,)}

MAX_BINS = 5_000_000  # of all devices, so that a series stays under a gigabyte

Int64s = NDArray[np.int64]


class HasOps(Protocol):
    """A measured `Graph`, a replayed `Result`, or anything else with an op table."""

    @property
    def ops(self) -> pl.DataFrame:
        """`schema.OPS`."""


def _step_of(source: HasOps | Run) -> HasOps:
    """The table of one step: a graph's or a result's own, of a run that of its step of median length."""
    if isinstance(source, (Run, Recording)):
        return build_graph(source)
    require(source, "ops")
    return source


def breakdown(source: HasOps | Run, *, by: str = "rank") -> pl.DataFrame:
    """Where the step's time goes on each rank, in parts that sum exactly to it.

    Exposed and overlapped time is counted as in Lumos (Liang et al., MLSys 2025), with its "other" taken apart.

    Parameters
    ----------
    source : Graph or Result
        Measured or replayed ops.
    by
        "rank", or a column of the op table (`phase`, `layer`, `name`, ...) by which to divide each part further.

    Returns
    -------
    DataFrame
        `rank`, `part`, the column `by` where it is not the rank, `time_ns`, `share` (of the rank's step; null if the
        step takes no time). By rank, all of `PARTS` are there, also those of no time.

    Examples
    --------
    >>> parts = breakdown(graph)
    >>> parts.filter(pl.col("part").str.starts_with("exposed_")).group_by("rank").agg(pl.sum("share"))
    """
    return breakdown_of(_step_of(source).ops, by)


def breakdown_of(
    ops: pl.DataFrame, by: str, *, last_step: int | None = None, begin_ns: int | None = None
) -> pl.DataFrame:
    """`breakdown` of an op table; of some ranks' alone with the last step and the first start (ns) of all ranks."""
    require_kinds(by=(by, str))
    if by not in ops.columns:
        raise SchemaError(f"op table lacks the column {shown(by)} to break down by; it has {', '.join(ops.columns)}.")
    pieces = _attributed(ops, last_step, begin_ns)
    if by == "rank":
        keys = ["rank", "part"]
        every = pieces.select("rank").unique().join(pl.DataFrame({"part": PARTS, "time_ns": 0}), how="cross")
        pieces = pl.concat([pieces.select(every.columns), every], how="vertical_relaxed")
    else:
        keys = ["rank", "part", by]
        pieces = pieces.with_columns(ops[by].gather(pieces["row"]).alias(by))
    sums = pieces.group_by(keys).agg(pl.col("time_ns").sum())
    step_ns = pl.col("time_ns").sum().over("rank")
    shares = sums.with_columns(share=pl.when(step_ns > 0).then(pl.col("time_ns") / step_ns))
    return shares.sort("rank", pl.col("part").cast(pl.Enum(PARTS)), *keys[2:])


def activity(source: HasOps | Run, *, bin_ns: int = 1_000_000) -> pl.DataFrame:
    """How busy each device is over the step, bin by bin; comparable with SM activity.

    Parameters
    ----------
    source : Graph or Result
        Measured or replayed ops.
    bin_ns
        Width of a bin. Bins are counted from the beginning of the rank's step; the last may reach past its end.

    Returns
    -------
    DataFrame
        `rank`, `device` (null on a rank without one, where CPU operators are the compute), `t_ns` (beginning of the
        bin, on the op table's clock), `kind`, `busy_ns` (exact), `share` (`busy_ns / bin_ns`). Kinds are compute, comm
        (transfers), wait (a collective holds its stream while it waits for peers), copy, and any (one or more of them).
    """
    if not is_whole(bin_ns, 1, 2**62 - 1):
        raise LumosError(
            f"bin_ns is {shown(bin_ns)}; give whole ns, 1 or more. The default, 1_000_000, is a millisecond."
        )
    ops = _numbered(_step_of(source).ops)
    intervals = _intervals(ops)
    claims = _claims(ops, intervals)
    devices = ops.select("rank", "device").unique().filter(pl.col("device").is_not_null())
    series = intervals.join(devices, on="rank", how="left").sort("rank", "device")
    bins = (pl.col("end_ns") - pl.col("begin_ns") + bin_ns - 1) // bin_ns
    if (n_bins := series.select(bins.sum()).item()) > MAX_BINS:
        raise LumosError(
            f"bin_ns={bin_ns} makes {n_bins:,} bins of the step; give one that makes at most {MAX_BINS:,}."
        )
    series = series.with_columns(bins=bins).with_columns(offset=(bins.cum_sum() - bins) * bin_ns)
    claims = _clip(claims, series, on=["rank", "device"])
    edges = np.arange(series.select(pl.sum("bins")).item() + 1) * bin_ns
    t_ns = pl.int_ranges("begin_ns", pl.col("begin_ns") + pl.col("bins") * bin_ns, bin_ns)
    at = series.select("rank", "device", t_ns=t_ns).explode("t_ns", empty_as_null=False)
    kinds = ACTIVITIES | {"any": tuple(c for claim in ACTIVITIES.values() for c in claim)}
    frames = []
    for kind, wanted in kinds.items():
        held = _held(claims.filter(pl.col("claim").is_in(wanted)))
        busy_ns = np.diff(held.until(edges))
        frames.append(at.with_columns(kind=pl.lit(kind), busy_ns=busy_ns, share=busy_ns / bin_ns))
    return pl.concat(frames)


def compare(a: HasOps | Run, b: HasOps | Run) -> pl.DataFrame:
    """What changed from step `a` to step `b`, at several levels, each of which adds up exactly to the difference.

    Every level divides the same total: the step times of all ranks together, in rank-nanoseconds. So a level's
    `diff_ns` sum to the difference of the totals, and its `mean_diff_ns` to the difference of the mean step, also
    where `a` and `b` differ in their number of ranks.

    Parameters
    ----------
    a, b : Graph, Result or Run
        Measured or replayed, in any combination; of a run its step of median length.

    Returns
    -------
    DataFrame
        `level` (step, rank, part, op, phase, layer, collective), `key`, `a_ns`, `b_ns`, `diff_ns` (b - a, exact),
        `mean_diff_ns` (`b_ns` by ranks of b less `a_ns` by ranks of a); in a level, the greatest change first. Time in
        which nothing runs has the key "(nothing runs)"; that of ops without a value "(no layer)" and the like.
    """
    columns = {"a_ns": _by_level(_step_of(a)), "b_ns": _by_level(_step_of(b))}
    n_ranks = {side: frame.filter(pl.col("level") == "rank").height for side, frame in columns.items()}
    sides = [frame.rename({"time_ns": side}) for side, frame in columns.items()]
    both = sides[0].join(sides[1], on=["level", "key"], how="full", coalesce=True)
    both = both.with_columns(pl.col("a_ns", "b_ns").fill_null(0))
    takes_time = pl.max_horizontal("a_ns", "b_ns") > 0
    both = both.filter(takes_time | pl.col("level").is_in(["step", "rank"]))
    mean_diff = pl.col("b_ns") / n_ranks["b_ns"] - pl.col("a_ns") / n_ranks["a_ns"]
    both = both.with_columns(diff_ns=pl.col("b_ns") - pl.col("a_ns"), mean_diff_ns=mean_diff)
    order = pl.Enum(["step", "rank", "part", *LEVELS])
    return both.sort(pl.col("level").cast(order), -pl.col("diff_ns").abs(), -pl.max_horizontal("a_ns", "b_ns"), "key")


def _by_level(source: HasOps) -> pl.DataFrame:
    """Attributed time by level and key, summed over ranks."""
    pieces = _attributed(source.ops)
    keys = {"step": pl.lit("all ranks, summed"), "rank": pl.col("rank").cast(pl.String), "part": pl.col("part")}
    values = source.ops.select(LEVELS.values())[pieces["row"].fill_null(0)]
    pieces = pieces.hstack(values)
    for level, column in LEVELS.items():
        value = pl.col(column).fill_null(f"(no {level})")
        keys[level] = pl.when(pl.col("row").is_null()).then(pl.lit("(nothing runs)")).otherwise(value)
    time = pl.col("time_ns").sum()
    return pl.concat(
        pieces.group_by(key=key).agg(time).select(pl.lit(level).alias("level"), "key", "time_ns")
        for level, key in keys.items()
    )


def _attributed(table: pl.DataFrame, last_step: int | None = None, begin_ns: int | None = None) -> pl.DataFrame:
    """Time of every (`rank`, `part`, `row` of the op table); `row` is null where nothing runs. Every rank is there."""
    ops = _numbered(table)
    intervals = _intervals(ops, last_step, begin_ns)
    length = pl.col("end_ns") - pl.col("begin_ns")
    intervals = intervals.with_columns(offset=length.cum_sum() - length)
    claims = _clip(_claims(ops, intervals), intervals, on=["rank"])
    held = [_held(claims.filter(pl.col("claim") == claim)) for claim in range(NOTHING)]
    offsets = intervals["offset"].to_numpy()
    bounds = [end for pieces in held for end in (pieces.start, pieces.end)]
    points = np.sort(np.concatenate([offsets, [intervals.select(length.sum()).item()], *bounds]))
    width = np.diff(points)
    at, width = points[:-1][width > 0], width[width > 0]
    claim, row = np.full(len(at), NOTHING, dtype=np.int8), np.full(len(at), -1)
    for strength in reversed(range(NOTHING)):
        holder = held[strength].row_at(at)
        claim[holder >= 0], row[holder >= 0] = strength, holder[holder >= 0]
    claim[(claim == COMPUTE) & (held[TRANSFER].row_at(at) >= 0)] = OVERLAPPED
    ranks = intervals["rank"].gather(np.searchsorted(offsets, at, side="right") - 1)
    pieces = pl.DataFrame({"rank": ranks, "claim": claim, "row": row, "time_ns": width})
    none = intervals.select("rank", claim=NOTHING, row=-1, time_ns=0)
    keys = ["rank", "claim", "row"]
    sums = pl.concat([pieces, none], how="vertical_relaxed").group_by(keys).agg(pl.col("time_ns").sum())
    part = pl.Series(CLAIM_PARTS, dtype=pl.String).gather(sums["claim"])
    return sums.select("rank", part.alias("part"), pl.col("row").replace(-1, None), "time_ns")


def _numbered(table: pl.DataFrame) -> pl.DataFrame:
    """The op table's rows that are on a rank's own lanes, with their position as `row`."""
    ops = OPS.check(table).with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    ops = ops.filter(pl.col("kind") != "join")
    broken = (pl.col("dur_ns") < 0) | pl.any_horizontal(pl.col("rank", "start_ns", "dur_ns").is_null())
    for bad in ops.filter(broken.fill_null(True)).head(1).iter_rows(named=True):
        raise GraphError(
            f"Op {bad['op_id']} ({bad['name']}) has rank {bad['rank']}, start_ns {bad['start_ns']} and dur_ns "
            f"{bad['dur_ns']}: a breakdown needs all three, and a duration >= 0. Replay the graph first."
        )
    return ops


def _intervals(ops: pl.DataFrame, last_step: int | None = None, begin_ns: int | None = None) -> pl.DataFrame:
    """The interval of the last step on each rank: `rank`, `on_device` (it has device ops), `begin_ns`, `end_ns`.

    It runs from the end of the rank's work of the step before (its boundary ops) to the end of its work of the step,
    counting device ops, or all ops on a rank that has none. A rank without ops of the step before, as in a generated
    workload, begins where the table begins.
    """
    last_step = ops.select(pl.max("step")).item() if last_step is None else last_step
    begin = pl.lit(ops["start_ns"].min() if begin_ns is None else begin_ns, pl.Int64)
    if last_step is None:
        raise GraphError("The op table has no op of any step, so that there is none to break down.")
    has_device = pl.col("device").is_not_null() & (pl.col("kind") != "event")
    counted = ops.with_columns(
        on_device=(has_device & (pl.col("step") == last_step)).any().over("rank"),
        end_ns=pl.col("start_ns") + pl.col("dur_ns"),
    ).filter(has_device | ~pl.col("on_device"))
    ends = counted.group_by("rank", "on_device").agg(
        begin_ns=pl.col("end_ns").filter(pl.col("step") == last_step - 1).max().fill_null(begin),
        end_ns=pl.col("end_ns").filter(pl.col("step") == last_step).max(),
    )
    if idle := ends.filter(pl.col("end_ns").is_null())["rank"].sort().to_list():
        raise GraphError(f"rank {idle[0]} has no op of step {last_step}; choose a step that all ranks have.")
    for bad in ends.filter((pl.col("end_ns") < pl.col("begin_ns")).fill_null(True)).iter_rows(named=True):
        raise GraphError(
            f"Step {last_step} of rank {bad['rank']} ends at {bad['end_ns']} ns, the one before at {bad['begin_ns']}; "
            f"every rank needs ops of step {last_step} that end after those before; check the op table's `step`."
        )
    return ends.sort("rank")


def _claims(ops: pl.DataFrame, intervals: pl.DataFrame) -> pl.DataFrame:
    """What occupies each rank and when: `rank`, `device`, `claim`, `row`, `start_ns`, `end_ns`."""
    kind = pl.col("kind")
    claim = (
        pl.when(kind == "kernel").then(COMPUTE)
        .when(kind == "comm").then(TRANSFER)
        .when(kind.is_in(["memcpy", "memset"])).then(COPY)
        .when(kind == "unexplained").then(pl.when(pl.col("device").is_null()).then(HOST_DELAY).otherwise(DEVICE_DELAY))
        .when((kind == "event") | pl.col("device").is_not_null()).then(None)
        .when((kind == "cpu") & ~pl.col("on_device")).then(COMPUTE)
        .otherwise(HOST)
    )  # fmt: skip
    on_device = intervals.select("rank", "on_device")
    work = ops.join(on_device, on="rank").with_columns(claim=claim, end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    columns = ["rank", "device", "claim", "row", "start_ns", "end_ns"]
    waits = _waits(ops).with_columns(claim=pl.lit(WAIT))
    return pl.concat([work.drop_nulls("claim").select(columns), waits.select(columns)], how="vertical")


def _waits(ops: pl.DataFrame) -> pl.DataFrame:
    """Waiting for peers: from a collective's arrival to the start of its transfer, the next on the lane of its number.

    The `row` is the transfer's: it is the collective that waits.
    """
    arrives = (pl.col("kind") == "event") & pl.col("collective").is_not_null()
    steps = ops.filter(arrives | (pl.col("kind") == "comm")).with_columns(end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    call = ["rank", "lane", "group", "comm_seq"]
    steps = steps.with_columns(
        arrived_ns=pl.col("end_ns").shift(1).over(call), arrived=(pl.col("kind") == "event").shift(1).over(call)
    ).filter((pl.col("kind") == "comm") & pl.col("arrived"))
    return steps.with_columns(start_ns="arrived_ns", end_ns="start_ns")


def _clip(claims: pl.DataFrame, intervals: pl.DataFrame, *, on: list[str]) -> pl.DataFrame:
    """Cut claims to the intervals that they are `on`, and lay those end to end on one axis, each from its `offset`.

    Adds `first_ns`, `till_ns` on that axis. Rows stay in the order in which the ops began, cut or not.
    """
    cut = claims.join(intervals.select(*on, "begin_ns", stop_ns="end_ns", offset="offset"), on=on, nulls_equal=True)
    begin = pl.col("begin_ns")
    cut = cut.with_columns(
        first_ns=pl.max_horizontal("start_ns", begin) - begin + pl.col("offset"),
        till_ns=pl.min_horizontal("end_ns", "stop_ns") - begin + pl.col("offset"),
    )
    return cut.filter(pl.col("first_ns") < pl.col("till_ns")).sort("offset", "start_ns", "row")


@dataclass(frozen=True, slots=True)
class _Held:
    """Disjoint pieces of the axis, in order, each with the row that holds it; shape (n,) each."""

    start: Int64s
    end: Int64s
    row: Int64s

    def row_at(self, at: Int64s) -> Int64s:
        """The row that holds each of the instants, or -1."""
        if not len(self.start):
            return np.full(len(at), -1)
        last = np.searchsorted(self.start, at, side="right") - 1
        return np.where((last >= 0) & (self.end[last] > at), self.row[last], -1)

    def until(self, at: Int64s) -> Int64s:
        """Time held before each of the instants."""
        if not len(self.start):
            return np.zeros(len(at), dtype=np.int64)
        whole = np.concatenate([[0], np.cumsum(self.end - self.start)])
        begun = np.searchsorted(self.start, at, side="left")
        return whole[begun] - np.where(begun > 0, np.maximum(self.end[begun - 1] - at, 0), 0)


def _held(claims: pl.DataFrame) -> _Held:
    """Pieces that claims of one strength hold: each from its own start or the end of all earlier ones to its end."""
    start, end, row = (claims[c].to_numpy() for c in ("first_ns", "till_ns", "row"))
    taken = np.concatenate([np.zeros(min(len(end), 1), dtype=np.int64), np.maximum.accumulate(end)[:-1]])
    start = np.maximum(start, taken)
    kept = start < end
    return _Held(start[kept], end[kept], row[kept])
