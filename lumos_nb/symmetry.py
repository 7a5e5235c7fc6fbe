"""Ranks without a trace, filled from ranks that do the same work, where the process groups tell which these are.

Data-parallel replicas of one pipeline stage and tensor position do the same work. The profiler lists the process groups
of each traced rank with all their members (`distributedInfo.pg_config`), so that a few traces tell a lot of the layout:
who of the absent ranks is a replica of a rank at hand, and whom it meets in place of its replica's peers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from lumos_nb.clocks import MESSAGES, match_collectives
from lumos_nb.errors import InputError, items_of, require_memory, require_whole
from lumos_nb.graph import Recording
from lumos_nb.lanes import ORIGINAL
from lumos_nb.repairs import REPORT
from lumos_nb.traces.run import Run

REPLICATED = {"data", "dp", "ddp", "fsdp", "hsdp", "replicate", "shard"}
"""Words in a group's description: its ranks do the same work on other data."""

DIVIDED = {"tensor", "tp", "pipeline", "pipe", "pp", "model", "expert", "ep", "context", "cp", "sequence", "sp"}
DIVIDED |= {"embedding", "embd"}
"""Words in a group's description: its ranks hold other parts of the model, or of a sequence."""

UNEQUAL = (*MESSAGES, "all_to_all")
"""Collectives whose ranks need not do the same work."""


_RANK_BYTES = 2**11
"""What is held of each rank that is to be filled, its line of the report with it, without its ops."""

Meets = dict[str, tuple[str, dict[int, int]]]
"""Group of a rank -> the group that its copy has in its place, and who stands there for whom."""


def fill_ranks(run: Run | Recording, *, replicas: Sequence[Sequence[int]] | None = None) -> Recording:
    """Add the ranks of a job that have no trace, each as a copy of a replica that has one.

    A filled rank does what its replica does when that does it, but takes part in collectives and messages of its own.
    How late the absent rank really was is not known: what it shares with traced ranks keeps the low quantile of equal
    calls as its transfer ("transfers estimated" in a graph's report), and what remains of the measured time once the
    filled rank has arrived is an explicit wait. Ranks that are not known to be replicas of a traced one stay absent.
    `filled` of recordings and graphs tells copies from traced ranks.

    Parameters
    ----------
    run
        A run of which some ranks have a trace.
    replicas
        Groups of ranks that do the same work; by default the data-parallel groups, told by the descriptions of the
        process groups, or the group of all ranks if there is no other and its collectives are those of equal ranks.

    Returns
    -------
    Recording
        `report` has a row for each absent rank: what it was filled from, or why it was not.

    Raises
    ------
    InputError
        The recording has been filled already, or `replicas` names a rank that the job does not have.

    Examples
    --------
    >>> some = [datasets.path("gpt-grid") / f"rank-{rank}.json.gz" for rank in range(17)]  # of 20
    >>> sorted(fill_ranks(load_run(some)).filled)
    [17, 18, 19]
    """
    recording = run if isinstance(run, Recording) else Recording.of(run)
    if recording.filled:
        raise InputError("the recording has been filled already; give fill_ranks the one that was made of the run.")
    layout = Layout.of(recording, replicas)
    copies: dict[int, tuple[int, pl.DataFrame]] = {}
    report = []
    for rank in sorted(set(layout.kin) - set(layout.traced)):
        original, meets, why = layout.stand_in(rank)
        if original is not None:
            ops = recording.ops.filter(pl.col("rank") == original)
            copies[rank] = original, _copy(ops, rank, meets)
        what = "rank not filled" if original is None else f"rank filled from rank {original}"
        report.append((what, rank, copies[rank][1].height if rank in copies else 0, None, why))
    records = [
        recording.records.filter(pl.col("rank") == original).with_columns(rank=pl.lit(rank, pl.Int32))
        for rank, (original, _) in copies.items()
    ]
    return replace(
        recording,
        ops=_matched(recording.ops, [ops for _, ops in copies.values()], layout.kin) if copies else recording.ops,
        records=pl.concat([recording.records, *records]),
        report=pl.concat([recording.report, pl.DataFrame(report, schema=REPORT, orient="row")]),
        filled={rank: original for rank, (original, _) in copies.items()},
    )


def _copy(ops: pl.DataFrame, rank: int, meets: Meets) -> pl.DataFrame:
    """A rank's ops as those of another rank, in the groups and with the peers that this one meets."""
    groups = {group: other for group, (other, _) in meets.items()}
    peers = [(group, peer, other) for group, (_, ranks) in meets.items() for peer, other in ranks.items()]
    met = pl.DataFrame(peers, schema={"group": pl.String, "peer": pl.Int32, "met": pl.Int32}, orient="row")
    ops = ops.join(met, on=["group", "peer"], how="left", maintain_order="left")
    of_message = pl.col("lane").str.starts_with("net:") & pl.col("met").is_not_null()
    return ops.with_columns(
        pl.lit(rank, pl.Int32).alias("rank"),
        pl.col("group").replace(groups),
        pl.coalesce("met", "peer").alias("peer"),
        pl.when(of_message).then(pl.format("net:{}:{}", "collective", "met")).otherwise("lane").alias("lane"),
        pl.col("op_id").alias(ORIGINAL),
    ).drop("met")


def _matched(ops: pl.DataFrame, copies: Iterable[pl.DataFrame], kin: Mapping[int, int]) -> pl.DataFrame:
    """The ops and the copies, collectives matched anew; a copy is in a hidden one if two of its replicas are."""
    every = pl.concat([ops.with_columns(pl.lit(None, pl.Int64).alias(ORIGINAL)), *copies])
    every = every.with_columns(op_id=pl.int_range(pl.len(), dtype=pl.Int64))
    is_hidden = (pl.col("collective") == "hidden").fill_null(value=False)
    hidden = every.with_columns(
        match=pl.when(is_hidden).then("match"), of=pl.col("rank").replace(kin), traced=pl.col(ORIGINAL).is_null()
    )
    known = pl.col("traced") | (pl.col("traced").sum().over("match", "of") > 1)
    own = hidden.select(pl.when(known).then("match")).to_series()
    kind = pl.when(is_hidden).then(pl.lit("")).otherwise("kind")
    named = match_collectives(every.drop("match").with_columns(kind=kind))["match"]
    first = named.max() or 0
    return every.with_columns(match=pl.coalesce(named, own + first))


def _asked(replicas: object) -> list[list[int]]:
    """Groups of ranks as they were given."""
    advice = "groups of ranks, such as [[0, 1], [2, 3]]"
    groups = [items_of("replicas", group, advice) for group in items_of("replicas", replicas, advice)]
    for group in groups:
        require_whole(-(2**31), 2**31 - 1, **{f"replicas[..][{at}]": rank for at, rank in enumerate(group)})
    return [[int(rank) for rank in group] for group in groups]


@dataclass(frozen=True, slots=True)
class Layout:
    """Who does the same work, and which groups are known, with what their ranks are to one another."""

    traced: list[int]
    kin: dict[int, int]
    """Rank -> the lowest rank that does the same work."""
    groups: list[tuple[str, str, list[int], str]]
    """Name, description, ranks, and "replicas", "parts" of the model, "mixed", or "" where nothing says."""
    why: str
    """No replicas are known."""

    @classmethod
    def of(cls, recording: Recording, replicas: Sequence[Sequence[int]] | None) -> Layout:
        """What a recording's process groups tell, or `replicas`."""
        comm = recording.ops.filter(pl.col("kind") == "comm").select("group", "collective").unique()
        unequal = comm.filter(pl.col("collective").is_in([*MESSAGES, "all_to_all"]))["group"].drop_nulls().to_list()
        world, traced = recording.world_size, recording.ops["rank"].unique().to_list()
        require_memory(_RANK_BYTES * world, f"a job of {world:,} ranks, as its files state,")
        known = {*traced, *recording.groups["ranks"].explode().drop_nulls()}  # of a job, not always from 0 on
        everyone = sorted(known if len(known) >= world else known | set(range(world)))
        listed = [(name, about, everyone if of is None else of) for name, about, of in recording.groups.iter_rows()]
        groups = [
            (name, about, ranks, _part(about, whole=len(ranks) == world, unequal=name in unequal))
            for name, about, ranks in listed
            if len(ranks) > 1
        ]
        alike = [ranks for _, _, ranks, part in groups if part == "replicas"] if replicas is None else _asked(replicas)
        if not alike and len(groups) == 1 and groups[0][3] == "mixed" and groups[0][0] not in unequal:
            alike = [groups[0][2]]
        kin = {rank: rank for rank in everyone}
        for ranks in map(list, alike):
            if unknown := sorted(set(ranks) - set(kin)):
                raise InputError(f"replicas holds rank {unknown[0]}; the job has the ranks {', '.join(map(str, kin))}.")
            tied = {kin[rank] for rank in ranks}
            kin = {rank: min(tied) if of in tied else of for rank, of in kin.items()}
        why = "" if alike else "the files list no group that is data-parallel by its description; give replicas"
        return cls(sorted(traced), kin, groups, why)

    def equals(self, rank: int) -> list[int]:
        """The traced ranks that do the same work as `rank`."""
        return [other for other in self.traced if self.kin[other] == self.kin[rank]]

    def stand_in(self, rank: int) -> tuple[int | None, Meets, str]:
        """Which traced rank a rank is to be a copy of, the groups that it has in place of that one's, and why."""
        why = self.why or "none of its replicas has a trace"
        for other in sorted(self.equals(rank), key=lambda other: (abs(other - rank), other)):
            meets, odd = self._meets(other, rank)
            if not odd:
                parts = {about for _, about, ranks, part in self.groups if other in ranks and part == "parts"}
                same = f"same position in {', '.join(sorted(parts))}" if any(parts) else "the same work on other data"
                return other, meets, f"a copy: {same}; its own lateness is not known"
            why = odd
        return None, {}, f"{why}: what waits for it keeps an explicit wait"

    def _meets(self, original: int, rank: int) -> tuple[Meets, str]:
        """The groups of `rank` by those of `original`: those that list both, else the like one that lists `rank`.

        Where none does, ranks are numbered as in a grid: who stands for whom differs by as much as these two.
        """
        meets: Meets = {}
        for name, about, ranks, part in self.groups:
            if original not in ranks:
                continue
            if not part:
                return {}, f"group {name} of rank {original} does not say what its ranks share"
            if rank in ranks and part == "parts":
                return {}, f"rank {original} is with it in {about or name}, whose ranks do not do the same work"
            like = [one for one in self.groups if one[1] == about and rank in one[2]]
            others = ranks if rank in ranks else [one + rank - original for one in ranks]
            if rank not in ranks and len(like) == 1 and like[0][2] != others:
                others = like[0][2]
                if len(others) != len(ranks) or others.index(rank) != ranks.index(original):
                    return {}, f"rank {original} has another position in {about or name}"
            named = [other for other, _, members, _ in like if members == others]
            own = name if rank in ranks else next(iter(named), f"{about} {'+'.join(map(str, others))}")
            meets[name] = own, dict(zip(ranks, others, strict=True))
        return meets, ""


def _part(description: str, *, whole: bool, unequal: bool) -> str:
    """What the ranks of a group are to one another."""
    words = set(re.findall("[a-z]+", description.lower()))
    replicated, divided = bool(words & REPLICATED), bool(words & DIVIDED)
    if replicated != divided:
        return "replicas" if replicated else "parts"
    if replicated or whole:
        return "mixed"
    return "parts" if unequal else ""
