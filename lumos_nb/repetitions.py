"""What the repetitions of a call site in other steps say of a wait: the evidence "time".

A call site is named by `site` and `nth` (waits.identify), the same in every step and rank. What a wait followed there
in other steps, right after and with nothing else to explain its delay, is elected as its target, unless some
repetition contradicts it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import polars as pl

TOLERANCE_NS = 2_000
"""A target may end this much after its waiter starts: rounding of old traces (1 us) and clock noise."""

WAKE_STREAM_NS = 20_000
"""A stream's next op starts within this after the event it waited for."""

WAKE_HOST_NS = 80_000
"""A blocked thread goes on within this after the device op it waited for: host and device clocks agree no better."""

HIDDEN_WAIT_NS = 200_000
"""A gap of a thread shorter than this is never taken for a wait that the profiler did not record."""

MIN_SUPPORT = 0.5
MIN_VOTES = 2
"""One repetition alone may be a coincidence: ends of ops are dense."""

MAX_CONTRADICTED = 0.25
"""Rounded times put a few calls of a site into the place of others, so a single contradiction is no proof."""

SITE_KEY = pl.struct("site", "nth").hash(5)
"""One number for a call site and its place among the calls of it in a step."""


Asking = Generator[pl.DataFrame, pl.DataFrame, pl.DataFrame]
"""A search that asks what all ranks say by telling what those at hand do: keys, and counts (`.._count`) to be added."""


def pooled(said: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """What ranks say together, from what each of them does."""
    table = pl.concat(said)
    return table.group_by(pl.exclude("^.*_count$")).agg(pl.col("^.*_count$").sum())


def asked(search: Asking, answers: Sequence[pl.DataFrame]) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
    """What a search asks once it has these answers, or else what it has found."""
    try:
        question = next(search)
        for answer in answers:
            question = search.send(answer)
    except StopIteration as found:
        return None, found.value
    return question, None


def among_themselves(search: Asking) -> pl.DataFrame:
    """What a search finds where all ranks are at hand."""
    try:
        said = next(search)
        while True:
            said = search.send(said)
    except StopIteration as found:
        table: pl.DataFrame = found.value
        return table


def tested(candidates: pl.DataFrame, device: pl.DataFrame, tolerance_ns: int) -> pl.DataFrame:
    """How often in each step the waiter of (`site_key`, `pattern`) was seen, and went on before its target had ended.

    A waiter goes on at `next_start_ns`; without that column, with the first op on its lane issued after the call.
    """
    issued = device.select(
        "rank", record_lane="lane", held_ns=pl.coalesce("launch_ns", "start_ns"), last_end_ns="end_ns"
    ).sort("held_ns")
    ends = device.select(target="op_id", target_end_ns="end_ns")
    seen = candidates if "next_start_ns" in candidates.columns else first_after(candidates, device)
    by_lane = (
        seen.filter(pl.col("record_lane").is_not_null())
        .sort("record_ns")
        .join_asof(issued, left_on="record_ns", right_on="held_ns", by=["rank", "record_lane"], check_sortedness=False)
    )
    by_op = seen.filter(pl.col("record_lane").is_null()).join(ends, on="target", how="left")
    ends_ns = pl.coalesce("last_end_ns", "target_end_ns")
    early = ends_ns > pl.col("next_start_ns") + tolerance_ns
    rows = pl.concat([by_lane, by_op], how="diagonal_relaxed")
    return rows.group_by("site_key", "pattern", "step").agg(early_count=early.sum(), tested_count=early.count())


def contradicted(outcomes: pl.DataFrame, unseen: int) -> Asking:
    """(`site_key`, `pattern`) whose waiter too often went on before its target had ended in other steps (`tested`)."""
    others = outcomes.filter(pl.col("step") != unseen).group_by("site_key", "pattern")
    counts = yield others.agg(pl.col("early_count", "tested_count").sum())
    return counts.filter(pl.col("early_count") > MAX_CONTRADICTED * pl.col("tested_count"))


def first_after(waits: pl.DataFrame, device: pl.DataFrame) -> pl.DataFrame:
    """Add the first op on each wait's lane issued after the call: `next_start_ns`, and when it could have begun."""
    ready = pl.max_horizontal(pl.col("end_ns").shift(1).over("rank", "lane", order_by="start_ns"), "launch_ns")
    following = device.filter(pl.col("launch_ns").is_not_null()).select(
        "rank", "lane", issue_ns="launch_ns", next_start_ns="start_ns", ready_ns=ready
    )
    return waits.sort("call_ns").join_asof(
        following.sort("issue_ns"),
        left_on="call_ns",
        right_on="issue_ns",
        by=["rank", "lane"],
        strategy="forward",
        check_sortedness=False,
    )


def followed(waits: pl.DataFrame, device: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Waits of streams, and what the next op of each started right after where nothing else explains its delay."""
    waits = first_after(waits, device).filter(pl.col("next_start_ns").is_not_null())
    waits = waits.with_columns(
        at_ns="next_start_ns", late=pl.col("next_start_ns") > pl.col("ready_ns") + WAKE_STREAM_NS
    )
    votes = _nearest_end(waits.filter("late"), device, WAKE_STREAM_NS)
    return waits, votes.filter(pl.col("target_lane") != pl.col("lane"))


def ended(stretches: pl.DataFrame, device: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Host stretches and blocking calls as waits, and what the long ones ended right after."""
    waits = stretches.with_columns(
        site_key=SITE_KEY,
        call_ns="start_ns",
        at_ns=pl.col("start_ns") + pl.col("dur_ns"),
        lane=pl.lit(None, pl.String),
        late=(pl.col("dur_ns") > HIDDEN_WAIT_NS) | (pl.col("call") == "sync_event"),
    )
    return waits, _nearest_end(waits.filter("late"), device, WAKE_HOST_NS)


def _nearest_end(waits: pl.DataFrame, device: pl.DataFrame, within_ns: int) -> pl.DataFrame:
    """The device op of the same rank that ended last before `at_ns`, within `within_ns`, and was issued before."""
    ends = device.select(
        "rank",
        "end_ns",
        target_lane="lane",
        target_site="site",
        target_nth="nth",
        target_step="step",
        target_launch_ns="launch_ns",
    ).sort("end_ns")
    found = (
        waits.with_columns(limit_ns=pl.col("at_ns") + TOLERANCE_NS)
        .drop("end_ns", strict=False)
        .sort("limit_ns")
        .join_asof(
            ends,
            left_on="limit_ns",
            right_on="end_ns",
            by="rank",
            tolerance=within_ns + TOLERANCE_NS,
            check_sortedness=False,
        )
    )
    # Ops of the backlog have no launch and so no name: they neither support nor oppose, but they are what was waited
    # for.
    return found.filter(pl.col("end_ns").is_not_null() & (pl.col("target_launch_ns").fill_null(0) <= pl.col("call_ns")))


def elected(
    waits: pl.DataFrame, votes: pl.DataFrame, device: pl.DataFrame, step: int, unseen: int, tolerance_ns: int
) -> Asking:
    """For each wait of `step` the target that explained its site's delays in other steps, and that none contradicts.

    `waits` have `at_ns`, the time at which they are over, and `late`: nothing else explains that they took as long. A
    target must explain at least `MIN_SUPPORT` of a site's late waits, and `MIN_VOTES` of them, and must have ended in
    time for all the others.
    """
    others = waits.filter(pl.col("step") != unseen)
    unnamed = votes.filter(pl.col("target_site").is_null()).select("op_id")
    held = others.filter("late").join(unnamed, on="op_id", how="anti").group_by("site_key").agg(held_count=pl.len())
    identity = ["target_site", "target_nth"]
    counted = (
        votes.filter((pl.col("step") != unseen) & pl.col("target_site").is_not_null())
        .group_by("site_key", *identity, ago=pl.col("step") - pl.col("target_step"))
        .agg(votes_count=pl.len())
    )
    said = yield pl.concat([counted, held], how="diagonal").with_columns(pl.col("^.*_count$").fill_null(0))
    held = said.filter(pl.col("target_site").is_null()).select("site_key", "held_count")
    counted = said.filter(pl.col("target_site").is_not_null()).drop("held_count")
    winners = counted.join(held, on="site_key").filter(
        (pl.col("votes_count") >= MIN_SUPPORT * pl.col("held_count")) & (pl.col("votes_count") >= MIN_VOTES)
    )
    order = ["votes_count", *identity, "ago"]
    winners = winners.sort(order, descending=True).unique("site_key", keep="first", maintain_order=True)
    if winners.is_empty():
        return pl.DataFrame(schema={"op_id": pl.Int64, "step": pl.Int32})
    targets = device.select(
        "rank",
        target="op_id",
        target_step="step",
        target_site="site",
        target_nth="nth",
        target_end_ns="end_ns",
        issued_ns="launch_ns",
    )
    named = waits.join(winners, on="site_key").with_columns(target_step=pl.col("step") - pl.col("ago"))
    named = named.join(targets, on=["rank", "target_step", *identity])
    wrong = named.filter((pl.col("step") != unseen) & (pl.col("target_end_ns") > pl.col("at_ns") + tolerance_ns))
    wrong = yield wrong.select("site_key").unique()
    return (
        named.filter((pl.col("step") == step) & (pl.col("issued_ns") <= pl.col("call_ns")))
        .join(wrong, on="site_key", how="anti")
        .select(
            "op_id",
            "rank",
            "step",
            "site_key",
            "lane",
            "target",
            evidence=pl.lit("time"),
            pattern=pl.lit("followed in other steps"),
        )
    )
