"""Dependency rules: rows of a step's lanes -> edges, one function a rule. Ends are row ids (see lanes.py)."""

from __future__ import annotations

import polars as pl

from lumos_nb.calls import ENGINE_OPERATORS
from lumos_nb.lanes import (
    ABSENT_PEERS,
    ARRIVAL,
    BACKLOG,
    BLOCKED,
    ENGINE_RETURN,
    EVIDENCES,
    KINDS,
    ORIGINAL,
    OWN,
    RECORD_POINT,
    RULES,
    WAIT_POINT,
    has_role,
    in_role,
    is_send,
    row_id,
)
from lumos_nb.schema import DEVICE_KINDS

PLATEAU_SHARE = 0.02
"""Share of launches that must find the queue at its fullest before that counts as its size."""

PLATEAU_MARGIN = 4
IDLE_NS = 1_000_000
"""A gap of a thread besides the caller and the engine that is longer than this is idling, ended by another thread."""

DEFAULT_QUEUE = 1024
"""CUDA's launch queue where a trace never fills it."""

MIN_QUEUE = 128


def _edges(
    frame: pl.DataFrame, rule: str, evidence: str | pl.Expr = "exact", *, hard: bool | pl.Expr = True
) -> pl.DataFrame:
    shown = pl.lit(evidence, EVIDENCES) if isinstance(evidence, str) else evidence.cast(EVIDENCES)
    firm = pl.lit(hard) if isinstance(hard, bool) else hard
    return frame.select("src", "dst", rule=pl.lit(rule, RULES), evidence=shown, hard=firm)


def lane_order(rows: pl.DataFrame, rule: str) -> pl.DataFrame:
    """Rules 1 and 4: each row of a lane after the one before it. Order between two issuing threads is only today's."""
    first = ((pl.col("rank") == pl.col("rank").shift(1)) & (pl.col("lane") == pl.col("lane").shift(1))).not_()
    first = first.fill_null(value=True)
    # Work whose launch is lost has the issuer of that before it, and the first on a lane nobody's.
    issuer = pl.when(first).then(pl.col("thread").fill_null(NOBODY)).otherwise("thread").forward_fill()
    rows = rows.select("id", issuer=issuer, first=first)
    before = pl.col("issuer").shift(1)
    pairs = rows.select(
        src=pl.when(~pl.col("first")).then(pl.col("id").shift(1)),
        dst="id",
        same=(pl.col("issuer") == before) | (before == NOBODY),
    )
    return _edges(pairs, rule, hard=pl.col("same").fill_null(value=True))


NOBODY = -(2**63)


def first_on_lane(boundary: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """The first row of each lane after what was going on there when the step began."""
    first = rows.group_by("rank", "lane", maintain_order=True).agg(dst=pl.col("id").first())
    last = boundary.group_by("rank", "lane", maintain_order=True).agg(src=pl.col("id").last())
    return _edges(first.join(last, on=["rank", "lane"]), "boundary")


def launches(hosts: pl.DataFrame, streams: pl.DataFrame) -> pl.DataFrame:
    """Rule 3: device work after the call that issued it, by correlation id; event points after their call.

    A record's is the call at its time, which for an idiom is the wait's own; the trace may lack it.
    """
    calls = hosts.filter((pl.col("call") == "launch") & has_role(OWN)).select("rank", "correlation", src="id")
    work = streams.filter(pl.col("kind").is_in(DEVICE_KINDS) & pl.col("correlation").is_not_null())
    enters = pl.when(pl.col("kind") == "comm").then(row_id("op_id", ARRIVAL)).otherwise("id")
    work = work.select("rank", "correlation", dst=enters).join(
        calls.unique(["rank", "correlation"]), on=["rank", "correlation"]
    )
    issuers = hosts.filter(pl.col("call").is_in(["record", "wait_event"])).select("rank", issue_ns="from_ns", src="id")
    records = streams.filter(has_role(RECORD_POINT)).select("rank", "issue_ns", dst="id").join(
        issuers.unique(["rank", "issue_ns"], keep="first"), on=["rank", "issue_ns"]
    )  # fmt: skip
    points = streams.filter(has_role(WAIT_POINT))
    points = points.select(src=row_id("op_id", OWN), dst="id").join(hosts.select(src="id"), on="src", how="semi")
    return pl.concat([_edges(work, "launch"), _edges(points, "issue"), _edges(records, "issue")])


def event_waits(waits: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    """Rule 5: a stream's wait after the record, or after the op that the evidence names."""
    streams = waits.filter(pl.col("lane").is_not_null()).with_columns(dst=row_id("op_id", WAIT_POINT))
    recorded = streams.filter(pl.col("record_lane").is_not_null()).with_columns(src=row_id("op_id", RECORD_POINT))
    direct = _targets(streams.filter(pl.col("target").is_not_null()), known)
    return pl.concat([_edges(recorded, "event", pl.col("evidence")), _edges(direct, "event", pl.col("evidence"))])


def host_waits(waits: pl.DataFrame, streams: pl.DataFrame, backlog: pl.DataFrame) -> pl.DataFrame:
    """Rule 6: a blocking call after what it waits for: one op, or all that a stream held when the call began."""
    known = pl.concat([streams.select("id"), backlog.select("id")])
    blocked = waits.filter(pl.col("lane").is_null()).with_columns(dst=row_id("op_id", BLOCKED))
    direct = _targets(blocked.filter(pl.col("target").is_not_null()), known)
    held = pl.concat(
        [backlog.select("rank", "lane", "issue_ns", "id"), streams.select("rank", "lane", "issue_ns", "id")]
    )
    held = held.select("rank", record_lane="lane", issue_ns="issue_ns", src="id").sort("issue_ns", maintain_order=True)
    all_of = (
        blocked.filter(pl.col("record_lane").is_not_null())
        .sort("record_ns")
        .join_asof(held, left_on="record_ns", right_on="issue_ns", by=["rank", "record_lane"], check_sortedness=False)
    )
    return pl.concat([_edges(direct, "sync", pl.col("evidence")), _edges(all_of, "sync", pl.col("evidence"))])


def _targets(waits: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    """Add `src`: the row of the target op, or its row in the backlog; null if it had ended before the graph begins."""
    here = pl.concat([waits.with_columns(src=row_id("target", role)) for role in (OWN, BACKLOG)])
    return here.join(known.select(src="id"), on="src", how="semi")


def collectives(streams: pl.DataFrame, joins: pl.DataFrame) -> pl.DataFrame:
    """Rule 7: all arrivals -> join -> every rank's transfer; without a matched partner, after its own arrival.

    Copies of other ranks hold up no traced rank: what these wait for them is measured. They go on with the traced ones.
    """
    comm = streams.filter(pl.col("kind") == "comm").with_columns(
        join=-1 - pl.col("match"), arrival=row_id("op_id", ARRIVAL)
    )
    joined = comm.join(joins.select(join="id"), on="join", how="semi").filter(~is_send())
    alone = comm.join(joined.select("id"), on="id", how="anti")
    partly = streams.filter(has_role(ABSENT_PEERS))
    is_copy = pl.col(ORIGINAL).is_not_null() if ORIGINAL in comm.columns else pl.lit(value=False)
    entering = comm.join(joins.select("traced", join="id"), on="join").filter(~is_copy | (pl.col("traced") == 0))
    going_on = comm.filter(is_copy).select("match", dst="id").join(partly.select("match", src="id"), on="match")
    return pl.concat(
        [
            _edges(entering.select(src="arrival", dst="join"), "collective"),
            _edges(going_on, "collective"),
            _edges(joined.select(src="join", dst="id"), "collective"),
            _edges(alone.select(src="arrival", dst="id"), "collective"),
            _edges(partly.select(src="id", dst=in_role("id", OWN)), "collective"),
            _edges(partly.join(joins.select("match", src="id"), on="match").select("src", dst="id"), "collective"),
        ]
    )


def queue_size(work: pl.DataFrame, *, cuda: bool) -> dict[int, int]:
    """Launch-queue size of each rank's devices, from the plateau of `outstanding` work, else CUDA's default.

    A queue is full when many launches find the same number of device ops outstanding and none finds more. Ranks
    without a known size are absent.
    """
    most, found = pl.col("outstanding").max(), pl.col("outstanding")
    queues = work.group_by(QUEUE).agg(most=most, full=(found >= most - PLATEAU_MARGIN).mean() >= PLATEAU_SHARE)
    plateau = pl.col("most").filter((pl.col("most") >= MIN_QUEUE) & pl.col("full")).max()
    default = pl.when(cuda & (pl.col("most").max() < DEFAULT_QUEUE)).then(DEFAULT_QUEUE)
    sizes = queues.group_by("rank").agg(size=pl.coalesce(plateau, default)).drop_nulls().sort("rank")
    return {int(rank): int(size) for rank, size in sizes.iter_rows()}


QUEUE = ["rank", "device"]
"""Each device of a rank has a launch queue of its own."""


def outstanding(ops: pl.DataFrame) -> pl.DataFrame:
    """Launches of device work by queue and time, with their `number` and how many are `outstanding` at each."""
    work = ops.select(
        "op_id", *QUEUE, "launch_ns", "step", "correlation", end_ns=pl.col("start_ns") + pl.col("dur_ns")
    ).filter(pl.col("device").is_not_null() & pl.col("launch_ns").is_not_null())
    # A CUDA graph is one launch, which leaves the queue with its last kernel.
    work = work.sort("end_ns").unique([*QUEUE, "correlation"], keep="last", maintain_order=True)
    ended = pl.col("end_ns").sort().search_sorted(pl.col("launch_ns"), side="right")
    work = work.sort(*QUEUE, "launch_ns", "op_id").with_columns(
        number=pl.int_range(pl.len()).over(QUEUE), ended=ended.over(QUEUE).cast(pl.Int64)
    )
    return work.with_columns(outstanding=pl.col("number") - pl.col("ended"))


def launch_queue(work: pl.DataFrame, ops: pl.DataFrame, sizes: dict[int, int]) -> pl.DataFrame:
    """Rule 8: a launch waits until no more than the queue's size of earlier device ops are unfinished.

    Returns `op_id` (raw launch call), `step`, `full` (it did find the queue full) and `target` (raw op that must have
    ended), of the launches in `work` (`outstanding`).
    """
    size = pl.col("rank").replace_strict(sizes, default=None, return_dtype=pl.Int64)
    full = pl.col("outstanding") >= size - PLATEAU_MARGIN
    late = work.with_columns(full=full, size=size, room=pl.int_range(pl.len()) - size)
    late = late.filter(pl.col("number") >= pl.col("size"))
    late = late.with_columns(target=work["op_id"].gather(late["room"]))
    calls = ops.select("rank", "correlation", "call", call_id="op_id").filter(
        (pl.col("call") == "launch") & pl.col("correlation").is_in(late["correlation"].implode())
    )
    return late.join(calls.unique(["rank", "correlation"]), on=["rank", "correlation"]).select(
        "step", "target", "full", op_id="call_id"
    )


def queue_edges(queue: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    """Edges of `launch_queue`."""
    return _edges(_targets(queue.with_columns(dst=row_id("op_id", OWN)), known), "queue", "pattern")


_BACKWARD = pl.col("parent").str.contains(ENGINE_OPERATORS).fill_null(value=False)


def on_threads(hosts: pl.DataFrame) -> pl.DataFrame:
    """`hosts` with `is_main`, the rank's thread with most operators outside the autograd engine, and `is_engine`."""
    lane = ["rank", "lane"]
    own = (~_BACKWARD & pl.col("parent").is_not_null()).sum()
    threads = hosts.group_by(lane).agg(own=own, rows=pl.len(), backward=_BACKWARD.any())
    main = pl.int_range(pl.len()).over("rank") == 0
    threads = threads.sort("own", "rows", "lane", descending=True).select(
        *lane, is_main=main, is_engine=pl.col("backward") & ~main
    )
    return hosts.join(threads, on=lane, how="left", maintain_order="left")


def engine(hosts: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rule 2: the autograd thread starts when the calling thread starts it, and the caller goes on when it is done.

    The caller's stretch that spans a burst of the engine is cut in two: before the burst, and what remains after it.
    The engine's idling between bursts is no work and is dropped. Returns rows and edges.
    """
    if not hosts["is_engine"].any():
        return hosts, _edges(pl.DataFrame(schema={"src": pl.Int64, "dst": pl.Int64}), "autograd")
    bursts, idle = _bursts(hosts)
    spans = bursts.group_by("call").agg(pl.col("begin_ns").min())
    kept = hosts.filter(~pl.col("id").is_in(idle.implode())).join(
        spans, left_on="id", right_on="call", how="left", maintain_order="left"
    )
    spanning = pl.col("begin_ns").is_not_null()
    before = kept.with_columns(to_ns=pl.coalesce("begin_ns", "to_ns")).with_columns(
        dur_ns=pl.when(spanning).then(pl.col("to_ns") - pl.col("from_ns")).otherwise("dur_ns"),
        kind=pl.when(spanning & has_role(BLOCKED)).then(pl.lit("gap")).otherwise("kind"),
        blocks=pl.col("blocks") & ~spanning,
    )
    after = kept.filter(spanning).with_columns(
        id=in_role("id", ENGINE_RETURN),
        kind=pl.lit("wait", KINDS),
        name=pl.lit("backward"),
        from_ns="begin_ns",
        blocks=pl.lit(value=True),
    )
    rows = pl.concat([before, after]).drop("begin_ns").sort("rank", "lane", "from_ns", "to_ns", "id")
    start = _edges(bursts.select(src="call", dst="first"), "autograd")
    back = _edges(bursts.select(src="last", dst=in_role("call", ENGINE_RETURN)), "autograd")
    return rows, pl.concat([start, back])


def _bursts(hosts: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series]:
    """What each engine thread did within one stretch of its caller, and the ids of its gaps outside all of that."""
    stretches = hosts.filter(pl.col("is_main") & pl.col("kind").is_in(["gap", "cpu"])).select(
        "rank", "from_ns", call="id", call_end_ns="to_ns"
    )
    rows = hosts.filter("is_engine").select("rank", "lane", "kind", "id", "from_ns", "to_ns").sort("from_ns", "id")
    inside = (
        rows.filter(pl.col("kind") != "gap")
        .join_asof(stretches.sort("from_ns"), on="from_ns", by="rank", check_sortedness=False)
        .filter(pl.col("to_ns") <= pl.col("call_end_ns"))
    )
    bursts = inside.group_by("rank", "lane", "call", maintain_order=True).agg(
        first=pl.col("id").first(),
        last=pl.col("id").last(),
        begin_ns=pl.col("from_ns").first(),
        done_ns=pl.col("to_ns").max(),
    )
    spans = bursts.select("rank", "lane", "begin_ns", "done_ns").sort("begin_ns")
    gaps = rows.filter(pl.col("kind") == "gap").join_asof(
        spans, left_on="from_ns", right_on="begin_ns", by=["rank", "lane"], check_sortedness=False
    )
    return bursts, gaps.filter(pl.col("done_ns").is_null() | (pl.col("from_ns") >= pl.col("done_ns")))["id"]


def idle_threads(hosts: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rule 2, other threads: after idling a thread was woken by what the calling thread was doing just before.

    Nothing records who wakes a thread of a pool or a data loader. Gaps above `IDLE_NS` outside the caller and the
    engine are dropped as no work, and the op after each follows the caller's op that had ended last: evidence "time".
    """
    rows = hosts.drop("is_main", "is_engine")
    waits = (pl.col("kind") == "gap") & (pl.col("dur_ns") > IDLE_NS) & ~pl.col("blocks")
    idle = hosts.filter(waits & ~pl.col("is_main") & ~pl.col("is_engine"))
    if idle.is_empty():
        return rows, _edges(pl.DataFrame(schema={"src": pl.Int64, "dst": pl.Int64}), "wake", "time", hard=False)
    following = rows.select("rank", "lane", from_ns="from_ns", dst="id").sort("from_ns")
    woken = (
        idle.select("rank", "lane", "to_ns", gap="id")
        .sort("to_ns")
        .join_asof(
            following,
            left_on="to_ns",
            right_on="from_ns",
            by=["rank", "lane"],
            strategy="forward",
            check_sortedness=False,
        )
    )
    wakers = hosts.filter("is_main").select("rank", end_ns="to_ns", src="id").sort("end_ns")
    edges = woken.join_asof(wakers, left_on="to_ns", right_on="end_ns", by="rank", check_sortedness=False)
    # Where the caller had done nothing yet nobody is known to have woken the thread, and its gap stays.
    dropped = edges.filter(pl.col("src").is_not_null() | pl.col("dst").is_null()).select(id="gap")
    kept = rows.join(dropped, on="id", how="anti", maintain_order="left")
    return kept, _edges(edges.drop_nulls(["src", "dst"]), "wake", "time", hard=False)
