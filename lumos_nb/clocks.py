"""One clock for a run: host against device in each rank, collectives matched across ranks, rank against rank."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.hidden import find_hidden_collectives
from lumos_nb.lanes import is_send
from lumos_nb.repairs import REPORT, counted

LAUNCH_FLOOR_NS = 1_000
"""No kernel starts earlier than this after its launch call starts; the shortest seen on idle streams is 2 to 4 us."""

MAX_EDGE_LOSS = 4
"""How many collectives more a rank may have lost at the end of its window than the rank that it is matched with."""

SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""Collectives that end together on all ranks, to within their last message; the others may end apart."""


def align_clocks(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Shift device clocks and rank clocks, and number the collectives that belong together.

    Parameters
    ----------
    ops : table
        Raw ops of all ranks (`build_ops`).

    Returns
    -------
    ops, report
        `ops` with `start_ns` on the clock of the lowest rank and a column `match` (the same number for one collective
        on all its ranks; null elsewhere); `report` as in `Graph.report`.
    """
    ops, shifts = shift_device_clocks(ops)
    ops = match_collectives(ops)
    ops, offsets = align_ranks(ops)
    reports = [shifts, offsets, unmatched(ops)]
    if ops["rank"].n_unique() > 1:
        ops, hidden = find_hidden_collectives(ops)
        early = early_messages(ops)
        ops = begun_early(ops, early)
        reports += [hidden, about_messages(early)]
    return ops, pl.concat(reports)


def unmatched(ops: pl.DataFrame) -> pl.DataFrame:
    """Report the messages of which nothing says which belong together."""
    nobody = ops.filter(pl.col("collective").is_in(MESSAGES) & pl.col("match").is_null())
    detail = (
        "messages that name neither number nor peer, in a group of more than two ranks: their waiting is an estimate"
    )
    return counted("messages unmatched", nobody.with_columns(time_ns="dur_ns"), detail)


def shift_device_clocks(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Shift each rank's device ops so that none starts before its launch call.

    Method: the host sees a launch start before the device can run it, so the smallest difference of the two clocks is
    an upper bound of their offset; blocking calls, which return after their target, bound it from the other side.
    """
    linked = ops.filter(pl.col("device").is_not_null() & pl.col("launch_ns").is_not_null())
    lead = pl.col("start_ns") - pl.col("launch_ns")
    least = linked.group_by("rank").agg(least=lead.min(), early=(lead < 0).sum())
    shift = pl.when(pl.col("least") < LAUNCH_FLOOR_NS).then(LAUNCH_FLOOR_NS - pl.col("least")).otherwise(0)
    shifts = least.with_columns(shift=shift).sort("rank")
    ops = ops.join(shifts.select("rank", "shift"), on="rank", how="left", maintain_order="left").with_columns(
        start_ns=pl.col("start_ns")
        + pl.when(pl.col("device").is_not_null()).then(pl.col("shift")).otherwise(0).fill_null(0)
    )
    report = shifts.filter(pl.col("shift") > 0).select(
        what=pl.lit("device clock shifted"),
        rank="rank",
        count=pl.col("early").cast(pl.Int64),
        time_ns="shift",
        detail=pl.format(
            "{} device ops started before their launch call, the earliest by {} ns", "early", -pl.col("least")
        ),
    )
    return ops.drop("shift"), report


def match_collectives(ops: pl.DataFrame) -> pl.DataFrame:
    """Add `match`: the number of the collective that each comm op takes part in, equal on all its ranks.

    By group and sequence number where the trace has them; else by group, type and whether a device runs them, in the
    order of their launches, which is one on all ranks, counted from the end of each rank's window, since ranks lose
    different numbers at its start. How many a rank lost at its end is what its steps lack; where they do not say, it
    is shifted until the ends of its collectives keep the steadiest distance from those of the rank that has most; what
    then stands in different steps does not match. Messages that name neither number
    nor peer match where only two ranks can have exchanged them.
    """
    about, times = ("op_id", "rank", "step", "device", "collective", "group"), ("launch_ns", "start_ns", "dur_ns")
    columns = (*about, "group_size", "comm_seq", "peer", *times)
    comm = _with_peers(ops.select("kind", *columns).filter(pl.col("kind") == "comm"))
    comm = comm.with_columns(end_ns=pl.col("start_ns") + pl.col("dur_ns"), number=pl.lit(None, pl.Int64))
    # A message is one thing on both its ranks: a send there is a receive here.
    message = pl.col("collective").is_in(["send", "recv"]) & pl.col("peer").is_not_null()
    sends = pl.col("collective") == "send"
    # Not pl.format: over conditions on rows of a slice it panics in polars 2.1.
    source, sink = (
        pl.when(sends).then(one).otherwise(other).cast(pl.String) for one, other in (("rank", "peer"), ("peer", "rank"))
    )
    comm = comm.with_columns(kind=pl.when(message).then("message " + source + "->" + sink).otherwise("collective"))
    on_device = pl.col("device").is_not_null()  # no rank meets others on a device that are on their hosts
    comm = comm.with_columns(on_device=on_device, in_step=pl.lit(None, pl.Int32))
    numbered = []
    for part in comm.partition_by("group", "kind", "on_device", maintain_order=True):
        if part["comm_seq"].null_count() == 0:
            numbered.append(part.with_columns(number="comm_seq"))
        else:
            numbered.append(_number_from_end(part))
    if not numbered:
        return ops.with_columns(match=pl.lit(None, pl.Int64))
    table = pl.concat(numbered)
    key = pl.struct(pl.col("group").fill_null(""), "kind", "on_device", "number", "in_step")
    table = table.with_columns(match=key.rank("dense").cast(pl.Int64))
    return ops.join(table.select("op_id", "match"), on="op_id", how="left", maintain_order="left")


MESSAGES = ("send", "recv", "send_recv")


def _with_peers(comm: pl.DataFrame) -> pl.DataFrame:
    """Communication ops; of the messages that name nobody those with one possible peer, and that peer."""
    nameless = pl.col("collective").is_in(MESSAGES) & pl.col("peer").is_null() & pl.col("comm_seq").is_null()
    key = pl.col("group").fill_null("")
    ranks = (
        comm.filter(nameless)
        .group_by(key)
        .agg(
            ranks=pl.col("rank").unique(),
            pair=(pl.col("rank").n_unique() <= 2) & (pl.col("group_size").max().fill_null(2) == 2),
        )
    )
    found = comm.with_columns(key=key).join(ranks, left_on="key", right_on="group", how="left", maintain_order="left")
    single = pl.col("ranks").list.len() == 2
    other = pl.when(nameless & single & (pl.col("collective") != "send_recv")).then(
        pl.col("ranks").list.sum() - pl.col("rank")
    )
    return found.filter(~nameless | pl.col("pair")).with_columns(peer=pl.coalesce("peer", other.cast(pl.Int32)))


def _number_from_end(part: pl.DataFrame) -> pl.DataFrame:
    by_rank = {int(p["rank"][0]): _in_order(p) for p in part.partition_by("rank", maintain_order=True)}
    reference = max(by_rank.values(), key=lambda p: (p.height, -int(p["rank"][0])))
    anchor = reference["end_ns"].to_numpy()[::-1]
    out = []
    for table in by_rank.values():
        shifts = _likely_shifts(table["step"], reference["step"])
        shift = shifts[0] if len(shifts) == 1 else _tail_shift(table["end_ns"].to_numpy()[::-1], anchor, shifts)
        out.append(table.with_columns(number=-(pl.int_range(pl.len(), 0, -1, dtype=pl.Int64) - 1) - shift))
    # Without its launch the step is not known: that of the work before it on its lane, or one before the window.
    step, launched = pl.col("step"), pl.col("launch_ns").is_not_null()
    told = step.filter(launched).max().over("number")
    may_be = pl.when(step.is_null()).then(told < step.min().over("rank")).otherwise(~launched & (told > step))
    return pl.concat(out).with_columns(in_step=pl.when(may_be).then(told).otherwise(step))


def _in_order(comm: pl.DataFrame) -> pl.DataFrame:
    """Communication ops of a rank in the order of their launches; a lost launch was no later than the next one."""
    comm = comm.sort("start_ns", "end_ns")
    launched_ns = pl.min_horizontal("start_ns", pl.col("launch_ns").backward_fill())
    return comm.sort(pl.coalesce("launch_ns", launched_ns), maintain_order=True)


def _likely_shifts(own: pl.Series, reference: pl.Series) -> list[int]:
    """How many more collectives than another rank one may have lost at its end: where most are of the same step.

    The steps of both are in their order; null is not known. Few losses come first, and all of them where steps say
    nothing.
    """
    few = sorted(range(-MAX_EDGE_LOSS, MAX_EDGE_LOSS + 1), key=abs)
    if pl.concat([own, reference]).drop_nulls().n_unique() < 2:
        return few
    ours, theirs = (steps.reverse().fill_null(UNKNOWN).to_numpy() for steps in (own, reference))
    lost = {int((theirs > step).sum() - (ours > step).sum()) for step in np.intersect1d(ours, theirs)}
    shifts = [*few, *sorted(lost.difference(few), key=abs)]
    agreed = []
    for shift in shifts:
        here, there = ours[max(-shift, 0) :], theirs[max(shift, 0) :]
        n = min(here.size, there.size)
        known = (here[:n] != UNKNOWN) & (there[:n] != UNKNOWN)
        agreed.append(int(np.where(here[:n] == there[:n], 1, -1)[known].sum()))
    return [shift for shift, n in zip(shifts, agreed, strict=True) if n == max(agreed)]


UNKNOWN = -(2**31)
"""In place of a step that is not known."""


def _tail_shift(ends: NDArray[np.int64], anchor: NDArray[np.int64], shifts: list[int]) -> int:
    """Of these the one at which the ends keep the steadiest distance from `anchor`; both arrays are latest first."""
    best, best_spread = shifts[0], np.inf
    for shift in shifts:
        ours, theirs = (ends, anchor[shift:]) if shift >= 0 else (ends[-shift:], anchor)
        n = min(ours.size, theirs.size)
        if n < max(1, min(ends.size, anchor.size) - MAX_EDGE_LOSS):
            continue
        apart = (ours[:n] - theirs[:n]).astype(float)
        spread = float(np.median(np.abs(apart - np.median(apart)))) if n > 2 else float(np.abs(apart).max())
        if spread < best_spread * 0.5:  # a shift must be clearly better than none
            best, best_spread = shift, spread
    return best


def align_ranks(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Shift each rank's clock by one constant so that collectives end together.

    Method: the median over collectives of this rank's end minus the lowest rank's, on symmetric collectives if there
    are any. A message ends later on the rank that receives it: the two directions are taken apart, and their mean is
    the offset. A rank that the lowest never meets is aligned with those that were aligned before it. Where a line
    through the medians of at least `DRIFT_STEPS` steps fits clearly better than a constant, the clock also drifts.
    Clocks stay as they are where shifts would let more collectives end before their last rank had issued them, which
    cannot be: then it is not its clock by which a rank ends later than the others.
    """
    offsets, report = rank_offsets(ops, ops["rank"].unique())
    return corrected(ops, offsets), report


def rank_offsets(ops: pl.DataFrame, ranks: pl.Series) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What `corrected` takes off the clocks of these ranks, from their communication ops; and the report."""
    matched = ops.filter(pl.col("match").is_not_null()).select(
        "match", "rank", "step", "collective", "launch_ns", "start_ns", "dur_ns"
    )
    ends = matched.with_columns(end_ns=pl.col("start_ns") + pl.col("dur_ns")).drop("launch_ns", "start_ns", "dur_ns")
    first = pl.lit(ends["rank"].min() if ends.height else ranks.min(), pl.Int32)
    origin_ns = pl.lit(ends["end_ns"].min(), pl.Int64)
    zero = pl.lit(0, pl.Int64)
    offsets = pl.select(rank=first, offset=zero, drift=pl.lit(0.0), residual=zero, count=zero)
    pools = (ends.filter(pl.col("collective").is_in(SYMMETRIC)), ends)
    while found := [rows for pool in pools if (rows := _offsets(pool, offsets, origin_ns)).height]:
        offsets = pl.concat([offsets, found[0]])
    offsets = offsets.filter(pl.col("rank") != first).sort("rank").with_columns(origin_ns=origin_ns)
    if (worse := _contradicted(corrected(matched, offsets))) > _contradicted(matched):
        of = matched["match"].n_unique()
        detail = f"shifts by collectives' ends would let {worse:,} of {of:,} end before their last rank had issued them"
        kept = {"what": "rank clocks kept", "rank": None, "count": offsets.height, "time_ns": 0, "detail": detail}
        return offsets.clear(), pl.DataFrame([kept], schema=REPORT, orient="row")
    report = offsets.select(
        what=pl.lit("rank clock shifted"),
        rank="rank",
        count="count",
        time_ns=-pl.col("offset"),
        detail=pl.format(
            "to make {} collectives end with rank {}'s; they are {} ns apart after it (median){}",
            "count",
            first,
            "residual",
            pl.when(pl.col("drift") != 0)
            .then(pl.format("; its clock gains {} ns a second", (pl.col("drift") * 1e9).round().cast(pl.Int64)))
            .otherwise(pl.lit("")),
        ),
    )
    alone = ranks.to_frame("rank").filter(pl.col("rank") != first).join(offsets, on="rank", how="anti")
    unknown = alone.sort("rank").select(
        what=pl.lit("rank clock unknown"),
        rank="rank",
        count=pl.lit(0, pl.Int64),
        time_ns=pl.lit(None, pl.Int64),
        detail=pl.format("no collective ties it to rank {}: its clock is as it was", first),
    )
    return offsets, pl.concat([report, unknown])


def _right(at_ns: str, origin_ns: pl.Expr) -> pl.Expr:
    """A time on its rank's clock -> on the lowest rank's."""
    drifted = ((pl.col(at_ns) - origin_ns) * pl.col("drift")).round().cast(pl.Int64)
    return pl.col(at_ns) - pl.col("offset") - drifted


def corrected(ops: pl.DataFrame, offsets: pl.DataFrame) -> pl.DataFrame:
    """Ops on the lowest rank's clock; what touches on a lane still does, since ends are corrected like starts."""
    if offsets.is_empty():
        return ops
    by = ("offset", "drift", "origin_ns")
    rows = ops.join(offsets.select("rank", *by), on="rank", how="left", maintain_order="left")
    rows = rows.with_columns(pl.col(by).fill_null(0), end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    rows = rows.with_columns(_right(c, pl.col("origin_ns")) for c in ("start_ns", "end_ns", "launch_ns"))
    return rows.with_columns(dur_ns=pl.col("end_ns") - pl.col("start_ns")).drop(*by, "end_ns")


def early_messages(ops: pl.DataFrame) -> pl.DataFrame:
    """Messages of the host whose peer had ended before their record begins: `op_id`, `rank`, `time_ns` before it.

    gloo sends and receives within the call and opens the record after that: on a busy host milliseconds later.
    """
    message = pl.col("match").is_not_null() & pl.col("device").is_null() & pl.col("collective").is_in(["send", "recv"])
    host, end_ns = ops.filter(message), pl.col("start_ns") + pl.col("dur_ns")
    ended = host.group_by("match").agg(ended_ns=end_ns.filter(~is_send()).min())  # a small send waits for nobody
    early = (pl.col("start_ns") > pl.col("ended_ns")) & (pl.col("launch_ns") <= pl.col("ended_ns"))
    found = host.join(ended, on="match").filter(early)
    return found.select("op_id", "rank", time_ns=pl.col("start_ns") - pl.col("ended_ns")).sort("op_id")


def begun_early(ops: pl.DataFrame, early: pl.DataFrame) -> pl.DataFrame:
    """Ops in which those of `early_messages` begin when their peer ended; they end when they did."""
    if early.is_empty():
        return ops
    rows = ops.join(early.select("op_id", "time_ns"), on="op_id", how="left", maintain_order="left")
    before_ns = pl.col("time_ns").fill_null(0)
    return rows.with_columns(pl.col("start_ns") - before_ns, pl.col("dur_ns") + before_ns).drop("time_ns")


def about_messages(early: pl.DataFrame) -> pl.DataFrame:
    """The report of `early_messages`."""
    return counted(
        "messages begun earlier", early, "their peer had ended before their record begins: they begin with its end"
    )


def _contradicted(matched: pl.DataFrame) -> int:
    """How many collectives end on a rank before all their ranks have issued them."""
    issued_ns, end_ns = pl.coalesce("launch_ns", "start_ns"), pl.col("start_ns") + pl.col("dur_ns")
    return int(matched.group_by("match").agg(early=issued_ns.max() > end_ns.min())["early"].sum())


DRIFT_STEPS = 3
DRIFT_GAIN = 0.5
"""A line must leave at most this share of what a constant leaves between the ends of collectives (median)."""


def _offsets(ends: pl.DataFrame, known: pl.DataFrame, origin_ns: pl.Expr) -> pl.DataFrame:
    """`rank`, `offset`, `drift`, `residual`, `count` of the ranks that share collectives with those of known offset."""
    base = ends.join(known, on="rank").sort("rank").group_by("match").agg(base_ns=_right("end_ns", origin_ns).first())
    way = pl.when(pl.col("collective").is_in(["send", "recv"])).then("collective")
    apart = ends.join(known, on="rank", how="anti").join(base, on="match").with_columns(way=way)
    apart = apart.with_columns(apart=pl.col("end_ns") - pl.col("base_ns"), at_ns=pl.col("end_ns") - origin_ns)
    apart = apart.with_columns(off=pl.col("apart") - pl.col("apart").median().over("rank", "way"))
    each_way = apart.group_by("rank", "way").agg(
        pl.col("apart").median(), residual=pl.col("off").abs().median(), count=pl.len()
    )
    constant = each_way.group_by("rank").agg(
        offset=pl.col("apart").mean(), residual=pl.col("residual").max(), count=pl.col("count").sum().cast(pl.Int64)
    )
    lines = [line for part in apart.partition_by("rank") if (line := _drift(part)) is not None]
    drifts = pl.DataFrame(lines, schema=["rank", "drift", "at_origin", "left"], orient="row").cast({"rank": pl.Int32})
    return constant.join(drifts, on="rank", how="left").select(
        "rank",
        offset=(pl.col("offset") + pl.col("at_origin").fill_null(0)).round().cast(pl.Int64),
        drift=pl.col("drift").cast(pl.Float64).fill_null(0.0),
        residual=pl.coalesce("left", "residual").cast(pl.Int64),
        count="count",
    )


def _drift(apart: pl.DataFrame) -> tuple[int, float, float, float] | None:
    """Rank, drift, its part of the offset and what it leaves, where a line through its steps' medians is better."""
    steps = apart.drop_nulls("step").group_by("step").agg(pl.col("at_ns", "off").median())
    if steps.height < DRIFT_STEPS:
        return None
    drift, at_origin = np.polyfit(steps["at_ns"].to_numpy(), steps["off"].to_numpy(), 1)
    left = (apart["off"] - drift * apart["at_ns"] - at_origin).abs().median()
    before = apart["off"].abs().median()
    if not (isinstance(left, float) and isinstance(before, float) and left <= DRIFT_GAIN * before and before > 0):
        return None
    return int(apart["rank"][0]), float(drift), float(at_origin), left
