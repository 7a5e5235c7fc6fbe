"""The rows of one step's graph: what lies on each thread and stream, with event points, arrivals and backlog."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import polars as pl

from lumos_nb.calls import BLOCKING_COPIES, HOST_COLLECTIVE
from lumos_nb.repairs import counted, step_or_before
from lumos_nb.schema import DEVICE_KINDS, EVIDENCE, OP_KINDS

ROLES = ARRIVAL, ABSENT_PEERS, OWN, BLOCKED, WAIT_POINT, RECORD_POINT, DELAY, BACKLOG, ENGINE_RETURN = tuple(range(9))
"""Roles of the rows that one raw op becomes: row id = 9 x raw op id + role. Joins have ids below 0, leads far below."""

LEAD_ID = -(1 << 40)

BLOCKING_CALLS = ("sync_stream", "sync_event", "sync_device", "free", "wait_comm")

IS_HIDDEN_ON_HOST = (pl.col("call") == HOST_COLLECTIVE).fill_null(value=False)
"""A collective inside a host op, which its thread waits for: it stays on its thread."""

ON_STREAM = pl.col("kind").is_in(DEVICE_KINDS) & ~IS_HIDDEN_ON_HOST
"""What does not stand on a thread."""

ABSENT = "waiting for ranks without a trace"

TRANSFER_QUANTILE = 0.1
"""Where ranks are missing, the transfer of a collective is this quantile of the equal calls of its rank."""


RULES = pl.Enum(
    [
        "launch",
        "stream",
        "queue",
        "wake",
        "thread",
        "autograd",
        "issue",
        "event",
        "sync",
        "collective",
        "boundary",
        "delay",
    ]
)
"""Rules of edges while a graph is made."""

EVIDENCES, KINDS = pl.Enum(EVIDENCE), pl.Enum(OP_KINDS)


def in_numbers(ops: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """Raw ops with lanes and kinds as numbers, in the order of names: cheaper to sort and to compare.

    The lanes are all that a row may be on: those of ops, those that `records` (`waits.sync_records`) name, and "net".
    """
    named = (
        records.select(pl.format("gpu{}:{}", "device", stream)).to_series() for stream in ("stream", "wait_on_stream")
    )
    lane = pl.concat([ops["lane"], *named, pl.Series(["net"])]).drop_nulls().unique().sort()
    return ops.cast({"lane": pl.Enum(lane), "kind": KINDS})


def row_id(raw: str, role: int) -> pl.Expr:
    """Id of the row that raw op `raw` becomes in `role`."""
    return pl.col(raw) * len(ROLES) + role


def in_role(id_column: str, role: int) -> pl.Expr:
    """Id of the row that the same raw op becomes in another role."""
    return pl.col(id_column) // len(ROLES) * len(ROLES) + role


def has_role(role: int) -> pl.Expr:
    """Whether a row, by its `id`, is its raw op's in that role."""
    return (pl.col("id") >= 0) & (pl.col("id") % len(ROLES) == role)


def in_turn(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Raw ops of which those of one stream do not overlap, and a report of what that cut off.

    A stream runs its work in order; where a trace shows an op before the end of the one before it (programmatic
    dependent launch, rounding, an event that stands there twice), what counts of it is what goes on after that end.
    """
    work = ops.filter(ON_STREAM & pl.col("lane").is_not_null()).sort("start_ns", "op_id")
    work = work.select("op_id", "rank", "lane", "start_ns", end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    before_ns = pl.col("end_ns").cum_max().shift(1).over("rank", "lane")
    late = work.with_columns(from_ns=before_ns).filter(pl.col("start_ns") < pl.col("from_ns"))
    cut = late.with_columns(dur_ns=(pl.col("end_ns") - pl.col("from_ns")).clip(0))
    at = cut["op_id"]
    ops = ops.with_columns(
        start_ns=ops["start_ns"].scatter(at, cut["from_ns"]), dur_ns=ops["dur_ns"].scatter(at, cut["dur_ns"])
    )
    detail = "ops that begin before the one before them on their stream ends: they count from that end"
    lost_ns = pl.col("end_ns") - pl.col("start_ns") - pl.col("dur_ns")
    return ops, counted("overlaps on a stream", cut.with_columns(time_ns=lost_ns), detail)


def usual_issues(ops: pl.DataFrame, full_queue: pl.Series) -> pl.DataFrame:
    """`rank`, `call_name`, `typical_ns`: what issuing costs by itself, the median over the calls that did not block.

    A call that always blocks (it copies to pageable memory, or is in `full_queue`) costs what the rank's others do.
    """
    used = ops.select("op_id", "rank", "kind", "name", "call", "call_name", "correlation", "dur_ns")
    copies = used.filter(pl.col("kind").is_in(DEVICE_KINDS)).filter(pl.col("name").str.contains(BLOCKING_COPIES))
    issues = used.filter(pl.col("kind") == "launch")
    suspects = issues.filter(pl.col("correlation").is_in(copies["correlation"].implode()))
    blocking = suspects.join(copies, on=["rank", "correlation"], how="semi")["op_id"]
    free = ~pl.col("op_id").is_in(pl.concat([full_queue, blocking]).implode())
    dur_ns = pl.col("dur_ns")
    by_rank = issues.filter(free & (pl.col("call") == "launch")).group_by("rank").agg(rank_ns=dur_ns.median())
    by_call = issues.group_by("rank", "call_name").agg(own_ns=dur_ns.filter(free).median(), least_ns=dur_ns.min())
    known = by_call.join(by_rank, on="rank", how="left")
    return known.select("rank", "call_name", typical_ns=pl.coalesce("own_ns", "rank_ns", "least_ns").cast(pl.Int64))


def host_rows(ops: pl.DataFrame, waits: pl.DataFrame, full_queue: pl.Series, usual: pl.DataFrame) -> pl.DataFrame:
    """Rows of the threads in time order; `from_ns`, `to_ns` are the raw extent, `blocks` that the row waits inside it.

    A blocking call is one row, all of whose time is waiting until `measure` finds what remains; a copy that blocks is
    two, its issue and its wait. A launch in `full_queue` (raw op ids) waited for room in the launch queue.
    """
    ops = ops.join(usual, on=["rank", "call_name"], how="left")
    awaited = waits.filter(pl.col("lane").is_null())["op_id"].unique()
    host_wait = pl.col("op_id").is_in(awaited.implode())
    unresolved = pl.col("call").is_in(BLOCKING_CALLS) & ~host_wait
    issue = (pl.col("call") == "launch").fill_null(value=False)
    queued = pl.col("op_id").is_in(full_queue.implode()) & (pl.col("dur_ns") > pl.col("typical_ns"))
    short = pl.min_horizontal("dur_ns", "typical_ns")
    rows = ops.with_columns(from_ns="start_ns", to_ns=pl.col("start_ns") + pl.col("dur_ns"))
    plain = rows.filter(~host_wait | issue).with_columns(
        id=row_id("op_id", OWN),
        kind=pl.when(unresolved).then(pl.lit("unexplained")).otherwise("kind"),
        dur_ns=pl.when(queued | (host_wait & issue)).then(short).otherwise("dur_ns"),
        start_ns=pl.when(queued).then(pl.col("to_ns") - short).otherwise("start_ns"),
        to_ns=pl.when(host_wait & issue).then(pl.col("from_ns") + short).otherwise("to_ns"),
        blocks=IS_HIDDEN_ON_HOST,
    )
    arrivals = _arrivals(plain.filter("blocks"))
    blocked = rows.filter(host_wait).with_columns(
        id=row_id("op_id", BLOCKED),
        kind=pl.when(pl.col("call") == "free").then(pl.lit("alloc", KINDS)).otherwise(pl.lit("wait", KINDS)),
        from_ns=pl.when(issue).then(pl.col("from_ns") + short).otherwise("from_ns"),
        blocks=pl.lit(value=True),
    )
    return (
        pl.concat([plain, arrivals, blocked])
        .drop("typical_ns")
        .sort("rank", "lane", "from_ns", "to_ns", "id", maintain_order=True)
    )


def stream_rows(ops: pl.DataFrame, waits: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Rows of the streams in issue order: work (by rank, lane, time), arrivals at collectives, and points of events.

    Events lie where they were issued, between the work issued before and after them, also on a stream without work: a
    record on an empty stream still carries what that stream waited for.
    """
    work = ops.with_columns(
        id=row_id("op_id", OWN),
        issue_ns=pl.coalesce("launch_ns", "start_ns").cum_max().over("rank", "lane"),
        place=pl.int_range(pl.len()).over("rank", "lane").cast(pl.Float64),
        from_ns="start_ns",
        to_ns=pl.col("start_ns") + pl.col("dur_ns"),
        blocks=pl.col("kind") == "comm",
    )
    arrivals = _arrivals(work.filter(pl.col("kind") == "comm")).with_columns(place=pl.col("place") - 0.1)
    points = _event_points(waits, calls)
    before = work.select("rank", "lane", "issue_ns", before="place").sort("issue_ns")
    # A launch takes time, so that what is issued in the ns in which it begins was issued before it.
    points = points.sort("issue_ns").join_asof(
        before, on="issue_ns", by=["rank", "lane"], check_sortedness=False, allow_exact_matches=False
    )
    points = points.with_columns(place=pl.col("before").fill_null(-1.0) + 0.5).drop("before")
    return pl.concat([work, arrivals, points], how="diagonal_relaxed").sort(
        "rank", "lane", "place", "issue_ns", "id", maintain_order=True
    )


def _arrivals(comm: pl.DataFrame) -> pl.DataFrame:
    """The zero-length rows at which a rank arrives at its collectives."""
    return comm.with_columns(
        id=row_id("op_id", ARRIVAL),
        kind=pl.lit("event", KINDS),
        name=pl.lit("arrival"),
        dur_ns=pl.lit(0, pl.Int64),
        to_ns="from_ns",
        blocks=pl.lit(value=False),
    )


def _event_points(waits: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Zero-length rows on stream lanes: a wait where a stream waits, and a record on the stream that it waits for."""
    about = calls.select("op_id", "step", "parent", "phase", "thread", "call_name", "site", "nth", call_ns="start_ns")
    device = pl.col("lane").cast(pl.String).str.extract(r"^gpu(-?\d+):").cast(pl.Int32)
    stream_waits = waits.filter(pl.col("lane").is_not_null()).join(about, on="op_id")
    waiting = stream_waits.unique("op_id", maintain_order=True).with_columns(
        id=row_id("op_id", WAIT_POINT), name=pl.lit("wait"), issue_ns="call_ns"
    )
    recording = stream_waits.filter(pl.col("record_lane").is_not_null()).with_columns(
        id=row_id("op_id", RECORD_POINT), name=pl.lit("record"), lane="record_lane", issue_ns="record_ns"
    )
    points = pl.concat([recording.unique("op_id", maintain_order=True), waiting])
    return points.select(
        "id",
        "op_id",
        "rank",
        "step",
        "lane",
        "name",
        "parent",
        "phase",
        "thread",
        "call_name",
        "site",
        "nth",
        "issue_ns",
        device=device,
        kind=pl.lit("event", KINDS),
        dur_ns=pl.lit(0, pl.Int64),
        blocks=pl.lit(value=True),
        start_ns="issue_ns",
        from_ns="issue_ns",
        to_ns="issue_ns",
    )


def lacks_ranks(world_size: int, filled: Iterable[int]) -> pl.Expr:
    """Whether some ranks of a collective have no trace, of communication ops or rows of one step, all of them.

    A group of unknown size is taken to be all ranks; where a thread waits inside an op, those that do so.
    """
    together = pl.coalesce("match", -1 - pl.col("op_id"))
    message = pl.col("peer").is_not_null() & pl.col("collective").is_in(["send", "recv"])
    others = pl.when(~IS_HIDDEN_ON_HOST).then(pl.lit(world_size, pl.Int32))
    size = pl.coalesce(pl.when(message).then(2), "group_size", others)
    return ((~pl.col("rank").is_in(list(filled))).sum().over(together) < size).fill_null(value=False)


def absent_peers(
    rows: pl.DataFrame, joins: pl.DataFrame, transfers: pl.DataFrame, filled: Collection[int] = ()
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows of the streams, or threads, where collectives lack ranks (`transfers`): an explicit wait, then a transfer.

    Returns the rows, and the ids of the transfers so estimated. Ranks `filled` from others have no trace either: they
    do not hold up traced ones, whose wait is as measured, and their own transfer begins and ends with those of the
    traced ranks that they meet.
    """
    if not (rows["kind"] == "comm").any() or (transfers.is_empty() and not filled):
        return rows, rows.clear().select("id")
    copied = pl.col("rank").is_in(list(filled))
    whole = joins.select("match", joined_ns="from_ns")
    comm = rows.filter(pl.col("kind") == "comm").join(whole, on="match", how="left")
    partial = comm.join(transfers, on="op_id", maintain_order="left")
    joined_ns = pl.max_horizontal("from_ns", "joined_ns")
    ended_ns = pl.when(~copied).then("to_ns")  # it was joined later than this where a rank's clock is off
    partial = partial.with_columns(from_ns=pl.min_horizontal(joined_ns, ended_ns))
    together = pl.coalesce("match", -1 - pl.col("op_id"))
    begin_ns = pl.max_horizontal("from_ns", pl.col("to_ns") - pl.col("transfer_ns"))
    partial = partial.with_columns(begin_ns=pl.when(copied).then("from_ns").otherwise(begin_ns))
    met_ns = pl.when(copied).then(pl.col("begin_ns").filter(~copied).max().over(together))
    met_end_ns = pl.col("to_ns").filter(~copied).median().cast(pl.Int64).over(together)
    ends_ns = pl.coalesce(met_end_ns, pl.col("begin_ns") + pl.col("transfer_ns"))
    partial = partial.with_columns(begin_ns=pl.max_horizontal("begin_ns", met_ns))
    partial = partial.with_columns(
        until_ns=pl.when(copied).then(pl.max_horizontal("begin_ns", ends_ns)).otherwise("to_ns")
    )
    cut = rows.join(partial.select("id", "begin_ns", "until_ns"), on="id", how="left", maintain_order="left")
    cut = cut.with_columns(
        from_ns=pl.coalesce("begin_ns", "from_ns"),
        start_ns=pl.coalesce("begin_ns", "start_ns"),
        to_ns=pl.coalesce("until_ns", "to_ns"),
        dur_ns=pl.coalesce(pl.col("until_ns") - pl.col("begin_ns"), "dur_ns"),
        blocks=pl.col("blocks") & pl.col("begin_ns").is_null(),
    )
    # One of no length as well: that a step did not wait is not to be known from its rows when others predict it.
    waiting = partial.filter(~copied).with_columns(
        id=in_role("id", ABSENT_PEERS),
        kind=pl.lit("unexplained", KINDS),
        name=pl.lit(ABSENT),
        start_ns="from_ns",
        to_ns="begin_ns",
        blocks=pl.lit(value=False),
        dur_ns=pl.col("begin_ns") - pl.col("from_ns"),
    )
    order = ["from_ns", "to_ns"]
    if "place" in rows.columns:
        waiting, order = waiting.with_columns(place=pl.col("place") - 0.05), ["place", "issue_ns"]
    else:  # what the original waited before it arrived is no delay of the copy
        cut = cut.with_columns(blocks=pl.col("blocks") | (copied & (pl.col("name") == "arrival")))
    both = pl.concat([cut.drop("begin_ns", "until_ns"), waiting.select(rows.columns)])
    return both.sort("rank", "lane", *order, "id", maintain_order=True), partial.select("id")


ORIGINAL = "original"
"""Column of raw ops where some are copies: the `op_id` of what each is a copy of."""


def communication(ops: pl.DataFrame) -> pl.DataFrame:
    """What several ranks must know of each other's communication ops; `equal` calls of a rank bear the same number."""
    comm = ops.filter(pl.col("kind") == "comm")
    named = pl.when(IS_HIDDEN_ON_HOST & (pl.col("collective") != "hidden")).then(
        "name"
    )  # of timelines: says all there is
    size = pl.coalesce(pl.col("comm_bytes").cast(pl.String), "shapes", named, pl.format("{}/{}", "site", "nth"))
    about = ("op_id", "rank", "step", "lane", "kind", "call", "collective", "group", "group_size", "peer", "phase")
    return comm.select(
        *about,
        "match",
        "start_ns",
        "dur_ns",
        *({ORIGINAL} & {*ops.columns}),
        equal=pl.struct("collective", "group", size=size).hash(9),
    ).sort("rank", "lane", "start_ns", "op_id")


def absent_transfers(comm: pl.DataFrame, step: int, world_size: int, filled: Iterable[int] = ()) -> pl.DataFrame:
    """`op_id`, `transfer_ns` of a step's collectives (`communication`) that lack ranks; one of theirs may know best."""
    partial = comm.filter(pl.col("step") == step).filter(lacks_ranks(world_size, filled))
    known = partial.join(usual_transfers(comm), on="op_id", maintain_order="left")
    together = pl.coalesce("match", -1 - pl.col("op_id"))
    return known.select("op_id", pl.col("transfer_ns").min().over(together))


def usual_transfers(comm: pl.DataFrame) -> pl.DataFrame:
    """`op_id`, `transfer_ns`: the low quantile of the equal communication calls of the same rank, in all steps.

    A call lasts from when the last of the traced ranks had arrived; a copy's takes as long as its original's.
    """
    copies = comm.filter(pl.col(ORIGINAL).is_not_null()) if ORIGINAL in comm.columns else comm.clear()
    comm = comm.join(copies, on="op_id", how="anti", maintain_order="left")
    begun = pl.when(pl.col("match").is_not_null()).then(pl.col("start_ns").max().over("match"))
    comm = comm.with_columns(lasts_ns=pl.col("start_ns") + pl.col("dur_ns") - pl.coalesce(begun, "start_ns"))
    low = pl.col("lasts_ns").clip(0).quantile(TRANSFER_QUANTILE, "lower")
    usual = comm.select("op_id", transfer_ns=low.over("rank", "equal").cast(pl.Int64))
    if copies.is_empty():
        return usual
    of_copies = copies.select("op_id", original=ORIGINAL).join(usual, left_on="original", right_on="op_id")
    return pl.concat([usual, of_copies.select("op_id", "transfer_ns")])


def join_rows(comm: pl.DataFrame, filled: Iterable[int] = ()) -> pl.DataFrame:
    """One zero-length row a matched collective of a step (`communication`): when all its ranks have arrived.

    Of its `members`, `traced` are not `filled` from others: these alone are waited for, if there are any.
    """
    traced = ~pl.col("rank").is_in(list(filled))
    matched = comm.filter(pl.col("match").is_not_null()).with_columns(from_ns="start_ns")
    shared = matched.group_by("match", maintain_order=True).agg(
        pl.col("rank").min(),
        pl.col("step").first(),
        pl.col("collective").first(),
        pl.col("group").first(),
        pl.coalesce(pl.col("from_ns").filter(traced).max(), pl.col("from_ns").max()),
        pl.col("phase").first(),
        members=pl.len(),
        traced=traced.sum(),
    )
    return shared.filter(pl.col("members") > 1).select(
        "rank",
        "step",
        "collective",
        "group",
        "phase",
        "match",
        "members",
        "traced",
        id=-1 - pl.col("match"),
        lane=pl.lit("net"),
        kind=pl.lit("join", KINDS),
        name=pl.format("{} of {} ranks", "collective", "members"),
        start_ns="from_ns",
        from_ns="from_ns",
        to_ns="from_ns",
        dur_ns=pl.lit(0, pl.Int64),
        blocks=pl.lit(value=True),
    )


EAGER_BYTES = 0
"""A send of at most this size completes on its own; larger ones wait for their receiver. gloo, NCCL: none does."""


def is_send() -> pl.Expr:
    """A send that completes without its receiver."""
    small = pl.col("comm_bytes").fill_null(EAGER_BYTES + 1) <= EAGER_BYTES
    return (pl.col("collective") == "send") & small


def backlog_rows(work: pl.DataFrame, awaited: pl.Series, step: int, origin_ns: int) -> pl.DataFrame:
    """Device work of earlier steps that ended after `origin_ns` or that the step waits for (`awaited`, raw ids)."""
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    earlier = work.with_columns(ago=step - step_or_before(step)).filter(pl.col("ago") > 0)
    kept = earlier.filter((end_ns > origin_ns) | pl.col("op_id").is_in(awaited.drop_nulls().implode()))
    kept = kept.with_columns(to_ns=pl.max_horizontal(end_ns, pl.lit(origin_ns, pl.Int64)))
    return kept.with_columns(
        id=row_id("op_id", BACKLOG),
        kind=pl.lit("boundary", KINDS),
        step=pl.lit(step - 1, pl.Int32),
        from_ns=pl.lit(origin_ns, pl.Int64),
        start_ns=pl.lit(origin_ns, pl.Int64),
        dur_ns=pl.col("to_ns") - origin_ns,
        blocks=pl.lit(value=False),
        issue_ns=pl.coalesce("launch_ns", "start_ns"),
    ).sort("rank", "lane", "to_ns")


def lead_rows(hosts: pl.DataFrame, started: pl.Series, step: int, origin_ns: int) -> pl.DataFrame:
    """One row a thread: from the graph's origin until its first op of the step begins.

    A thread whose first op another thread starts (`started`, row ids) has no lead: it begins when it is started.
    """
    first = hosts.group_by("rank", "lane", maintain_order=True).agg(pl.col("from_ns").min(), pl.col("id").first())
    first = first.filter(~pl.col("id").is_in(started.implode()))
    return first.select(
        "rank",
        "lane",
        id=LEAD_ID - pl.int_range(pl.len(), dtype=pl.Int64),
        kind=pl.lit("boundary", KINDS),
        name=pl.lit("host lead"),
        step=pl.lit(step, pl.Int32),
        start_ns=pl.lit(origin_ns, pl.Int64),
        from_ns=pl.lit(origin_ns, pl.Int64),
        to_ns="from_ns",
        dur_ns=pl.col("from_ns") - origin_ns,
        blocks=pl.lit(value=False),
        phase=pl.lit("other"),
    )


def start_rows(starts: pl.DataFrame, step: int, origin_ns: int) -> pl.DataFrame:
    """One row a rank that ends where its step begins (`Recording.rank_starts`); nothing waits for it."""
    return starts.select(
        "rank",
        "device",
        id=2 * LEAD_ID - pl.int_range(pl.len(), dtype=pl.Int64),
        kind=pl.lit("boundary", KINDS),
        name=pl.lit("step start"),
        lane=pl.lit("net"),
        step=pl.lit(step - 1, pl.Int32),
        start_ns=pl.lit(origin_ns, pl.Int64),
        from_ns=pl.lit(origin_ns, pl.Int64),
        to_ns="at_ns",
        dur_ns=pl.col("at_ns") - origin_ns,
        blocks=pl.lit(value=False),
        phase=pl.lit("other"),
    )
