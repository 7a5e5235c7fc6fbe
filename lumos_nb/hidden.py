"""Collectives that no record names: ops and gaps that end together on several ranks although they start apart."""

from __future__ import annotations

import polars as pl

from lumos_nb.calls import HOST_COLLECTIVE

HIDDEN_SPREAD_NS = 200_000
HIDDEN_SHARE = 0.1
"""An op hides a collective if its ranks start it at least the former apart and end it within the latter share."""

GAP_SHARE = 0.05
"""The same share for gaps, which may also end together by chance, and for how late a group's last rank is."""

PLACE = ["name", "phase", "number"]
"""What names a gap in every step and rank: what follows, and the how manieth of its step it is."""


WORK = ["kind", "name", "phase"]
"""What names ops that may hide a collective, but for their number in the step."""


def find_hidden_collectives(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Make a collective of each op, and of each gap, that mostly ends together although it starts apart.

    Some operators wait for all ranks inside, and no record says so: gradient clipping, a checkpoint's barrier. Such a
    host op or kernel becomes kind "comm" with collective "hidden" and a `match` of its own, so that its wait is not
    taken for work. Gaps hide collectives of some of the ranks as well: see `in_gaps`.
    """
    work = candidates(ops, longest(ops))
    first = int(ops["match"].max() or 0)  # type: ignore[arg-type]
    hidden = numbered(in_ops(work, hiding(spans(work), ops["rank"].n_unique())), first)
    late, members = in_gaps(work) if ops["device"].null_count() == ops.height else (NEVER, NOWHERE)
    return mark(ops, hidden, late, numbered(members, first + hidden["match"].n_unique()))


def longest(ops: pl.DataFrame) -> pl.DataFrame:
    """`WORK`, `longest_ns`: how long each op or gap that may hide a collective takes at most."""
    may = pl.col("kind").is_in(["kernel", "cpu", "gap"]) & pl.col("call").is_null()
    return ops.filter(may).group_by(WORK).agg(longest_ns=pl.col("dur_ns").max())


def candidates(ops: pl.DataFrame, longest: pl.DataFrame) -> pl.DataFrame:
    """The ops and gaps of which one is as long as a wait for a late rank, with their `number` in the step."""
    least_ns = (1 - HIDDEN_SHARE) * HIDDEN_SPREAD_NS * 0.99  # that of the rank which starts first; clocks may drift
    long = longest.filter(pl.col("longest_ns") >= least_ns)
    # The last gap of a step ends where the step does, on all ranks that mark it together.
    inner = pl.col("step") == pl.col("step").shift(-1).over("rank", "lane")
    gap = pl.col("kind") == "gap"
    rows = ops.select("op_id", "rank", "step", *WORK, "call", "start_ns", "dur_ns", inner=inner.fill_null(value=False))
    rows = rows.filter(pl.col("call").is_null() & (~gap | pl.col("inner"))).drop("call", "inner")
    rows = rows.join(long.select(WORK), on=WORK, how="semi", nulls_equal=True, maintain_order="left")
    number = pl.int_range(pl.len()).over("rank", "step", *WORK, order_by="start_ns")
    return rows.with_columns(number=number, end_ns=pl.col("start_ns") + pl.col("dur_ns"))


def spans(work: pl.DataFrame) -> pl.DataFrame:
    """When the ranks at hand begin and end each op (`candidates`) of each step, first and last."""
    ends = {f"{way}_{end}": getattr(pl.col(f"{end}_ns"), way)() for end in ("start", "end") for way in ("min", "max")}
    works = work.filter(pl.col("kind") != "gap")
    return works.group_by("step", *WORK, "number").agg(pl.col("rank").n_unique().alias("ranks"), **ends)


def joined(spans: pl.DataFrame, further: pl.DataFrame) -> pl.DataFrame:
    """`spans` of some ranks and of others, where all of them have the op."""
    both = spans.join(further, on=["step", *WORK, "number"], suffix="_too", nulls_equal=True)
    ends = {
        f"{way}_{end}": getattr(pl, f"{way}_horizontal")(f"{way}_{end}", f"{way}_{end}_too")
        for end in ("start", "end")
        for way in ("min", "max")
    }
    return both.select("step", *WORK, "number", pl.col("ranks") + pl.col("ranks_too"), **ends)


def hiding(spans: pl.DataFrame, n_ranks: int) -> pl.DataFrame:
    """`WORK`, `number` of the kernels and host ops that all ranks end together in more than half of the steps."""
    starts, ends = (pl.col(f"max_{end}") - pl.col(f"min_{end}") for end in ("start", "end"))
    together = (starts >= HIDDEN_SPREAD_NS) & (ends <= HIDDEN_SHARE * starts)
    each = spans.filter((pl.col("ranks") == n_ranks) & (n_ranks > 1))
    sites = each.group_by(*WORK, "number").agg(share=together.mean(), repetitions=pl.len())
    return sites.filter((pl.col("share") > 0.5) & (pl.col("repetitions") > 1)).select(*WORK, "number")


def in_ops(work: pl.DataFrame, hiding: pl.DataFrame) -> pl.DataFrame:
    """`op_id`, `key` (equal for the rows of one collective) of the ops that hide one."""
    place = [*WORK, "number"]
    return work.join(hiding, on=place).select("op_id", key=pl.struct("step", *place))


def numbered(found: pl.DataFrame, first: int) -> pl.DataFrame:
    """`op_id`, `match`: the collectives of all ranks numbered on from `first`."""
    return found.select("op_id", match=pl.col("key").rank("dense").cast(pl.Int64) + first)


NOWHERE = pl.DataFrame(schema={"op_id": pl.Int64, "key": pl.String})
NEVER = pl.DataFrame(schema={"op_id": pl.Int64, "cut_ns": pl.Int64})


def mark(
    ops: pl.DataFrame, hidden: pl.DataFrame, late: pl.DataFrame, members: pl.DataFrame, *, renumber: bool | None = None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`ops` of which `hidden` and `members` (`numbered`) are collectives, gaps of `late` cut; and the report.

    Ops are numbered anew, lane by lane, where gaps are cut: here, or of other ranks (`renumber`).
    """
    ops, in_ops = _mark(ops, hidden, "ops")
    if not late.is_empty() or renumber:
        ops = _cut(ops, late)
        # The rows were numbered again: the ids of before stand in `was`.
        members = ops.select("op_id", "was").join(members, left_on="was", right_on="op_id").select("op_id", "match")
        ops = ops.drop("was")
    ops, in_gaps = _mark(ops, members, "gaps")
    return ops, pl.concat([in_ops, in_gaps])


def _mark(ops: pl.DataFrame, found: pl.DataFrame, what: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`ops` in which `found` are collectives, and the report."""
    hidden = found.rename({"match": "hidden"})
    marked = ops.join(hidden, on="op_id", how="left", maintain_order="left")
    is_hidden = pl.col("hidden").is_not_null()
    marked = marked.with_columns(
        match=pl.coalesce("match", "hidden"),
        kind=pl.when(is_hidden).then(pl.lit("comm")).otherwise("kind"),
        collective=pl.when(is_hidden).then(pl.lit("hidden")).otherwise("collective"),
        call=pl.when(is_hidden & pl.col("device").is_null()).then(pl.lit(HOST_COLLECTIVE)).otherwise("call"),
    ).drop("hidden")
    rows = ops.join(found, on="op_id", how="semi").group_by("rank")
    return marked, rows.agg(count=pl.len().cast(pl.Int64), time_ns=pl.col("dur_ns").sum()).sort("rank").select(
        what=pl.lit("hidden collectives"),
        rank="rank",
        count="count",
        time_ns="time_ns",
        detail=pl.lit(
            f"{what} that end together on several ranks though they start apart: split into wait and transfer"
        ),
    )


def in_gaps(work: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Gaps in which the same ranks wait for each other in more than half of the steps.

    The ranks are told by the data: those that end the gap together. Where they do so long after the last of them began
    it, they waited for another rank, which began its gap just before and goes on to wait for something else: its gap
    is cut in two there. Returns the gaps to be cut, and `op_id`, `key` of those that are collectives, of first parts
    -1 - `op_id`. Beside devices there are none: their ends explain what threads wait for.
    """
    gaps = work.filter(pl.col("kind") == "gap")
    gaps = gaps.filter(pl.col("dur_ns").max().over("name", "phase") >= HIDDEN_SPREAD_NS)
    groups = _ending_together(gaps)
    late = _latecomers(gaps, groups).unique("op_id", keep="first", maintain_order=True)
    members = groups.explode("op_ids").select("step", *PLACE, "ranks", op_id="op_ids")
    first_parts = late.with_columns(op_id=-1 - pl.col("op_id")).select(members.columns)
    key = pl.struct("step", *PLACE, "ranks")
    return late.select("op_id", "cut_ns"), pl.concat([members, first_parts]).select("op_id", key=key)


def _ending_together(gaps: pl.DataFrame) -> pl.DataFrame:
    """One row a step and group of ranks: `step`, `PLACE`, `ranks`, `op_ids`, `last_ns` (its latest begin), `end_ns`."""
    at = ["step", *PLACE]
    rows = gaps.sort(*at, "end_ns")
    longer = pl.max_horizontal("dur_ns", pl.col("dur_ns").shift(1))
    apart = (pl.col("end_ns") - pl.col("end_ns").shift(1) > GAP_SHARE * longer).fill_null(value=True)
    groups = (
        rows.with_columns(group=apart.cast(pl.Int32).cum_sum().over(at))
        .group_by(*at, "group")
        .agg(
            ranks=pl.col("rank").sort(),
            op_ids=pl.col("op_id"),
            last_ns=pl.col("start_ns").max(),
            starts=pl.col("start_ns").max() - pl.col("start_ns").min(),
            ends=pl.col("end_ns").max() - pl.col("end_ns").min(),
            end_ns=pl.col("end_ns").max(),
        )
        .filter(pl.col("ranks").list.len() > 1)
    )
    # Once most steps show a group, the others belong to it also where its ranks happened to begin at one time.
    clear = (pl.col("starts") >= HIDDEN_SPREAD_NS) & (pl.col("ends") <= GAP_SHARE * pl.col("starts"))
    repetitions = gaps.group_by(PLACE).agg(steps=pl.col("step").n_unique())
    groups = groups.with_columns(clear=clear.sum().over(*PLACE, "ranks"), times=pl.len().over(*PLACE, "ranks"))
    groups = groups.join(repetitions, on=PLACE)
    return groups.filter((pl.col("clear") > 0.5 * pl.col("steps")) & (pl.col("steps") > 1))


def _latecomers(gaps: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """The rank that each group waited for where it is none of its own: `op_id`, `cut_ns` and the group's columns.

    It is in the same gap when the group ends it, began it last of those, and is the same in more than half of the
    group's steps.
    """
    found = (
        groups.select("step", *PLACE, "ranks", "last_ns", "times", cut_ns="end_ns")
        .join(gaps.select("op_id", "rank", "step", *PLACE, "start_ns", "end_ns"), on=["step", *PLACE])
        .filter(~pl.col("ranks").list.contains(pl.col("rank")))
        .filter((pl.col("start_ns") > pl.col("last_ns")) & pl.col("cut_ns").is_between("start_ns", "end_ns"))
        .filter(pl.col("cut_ns") - pl.col("start_ns") <= GAP_SHARE * (pl.col("cut_ns") - pl.col("last_ns")))
        .sort("start_ns")
        .unique(["step", *PLACE, "ranks"], keep="last", maintain_order=True)
    )
    return found.filter(pl.len().over(*PLACE, "ranks", "rank") > 0.5 * pl.col("times"))


def _cut(ops: pl.DataFrame, late: pl.DataFrame) -> pl.DataFrame:
    """`ops`, numbered anew, with each gap of `late` in two at `cut_ns`; `was` is the old id, of first parts < 0."""
    rows = ops.join(late, on="op_id", how="left", maintain_order="left")
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    rest = rows.with_columns(
        start_ns=pl.coalesce("cut_ns", "start_ns"), dur_ns=end_ns - pl.coalesce("cut_ns", "start_ns"), was="op_id"
    )
    first = rows.filter(pl.col("cut_ns").is_not_null()).with_columns(
        dur_ns=pl.col("cut_ns") - pl.col("start_ns"), was=-1 - pl.col("op_id")
    )
    both = pl.concat([rest, first]).sort("rank", "lane", "start_ns", maintain_order=True).drop("cut_ns")
    return both.with_columns(op_id=pl.int_range(pl.len(), dtype=pl.Int64))
