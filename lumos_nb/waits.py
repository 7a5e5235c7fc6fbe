"""Who waits for what: event waits of streams and blocking calls of threads, with target and evidence.

Most traces name neither stream nor event of these calls, so a target comes from one of three sources, in this order:

exact    the trace's `cuda_sync` records, a blocking copy (its own copy), a device-wide wait (every stream)
pattern  the idiom that issued the call: a collective's stream waits for the stream that calls it; the caller's stream
         waits for a collective, first issued first; a block on another stream starts and ends with a wait
time     what the waiting op followed at the same call site in *other* steps (repetitions.py)

A pattern that other steps contradict (the waiting op started before its supposed target had ended) is dropped. The
step that a graph is made of never serves as its own evidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.calls import BLOCKING_COPIES, COLLECTIVE_WAITS, arguments
from lumos_nb.repetitions import (
    HIDDEN_WAIT_NS,
    SITE_KEY,
    TOLERANCE_NS,
    WAKE_HOST_NS,
    Asking,
    among_themselves,
    contradicted,
    elected,
    ended,
    followed,
    tested,
)
from lumos_nb.schema import DEVICE_KINDS
from lumos_nb.threads import rows_at

WAITS = {
    "op_id": pl.Int64(),  # the call, or the gap that hides a wait
    "rank": pl.Int32(),
    "lane": pl.String(),  # the stream that waits; null if the thread itself does
    "target": pl.Int64(),  # the device op waited for
    "record_lane": pl.String(),  # or: all that this stream held at `record_ns`
    "record_ns": pl.Int64(),
    "evidence": pl.String(),
    "pattern": pl.String(),
}


def sync_records(events: pl.DataFrame) -> pl.DataFrame:
    """The trace's synchronisation records: `rank`, `correlation`, `device`, `stream`, `wait_on_stream`, `record`."""
    fields = {
        "stream": pl.Int64(),
        "wait_on_stream": pl.Int64(),
        "wait_on_cuda_event_record_corr_id": pl.Int64(),
    }
    rows = events.filter(pl.col("category") == "cuda_sync")
    named = rows.select("rank", "correlation", "device").with_columns(arguments(rows["args"], fields))
    return named.rename({"wait_on_cuda_event_record_corr_id": "record"})


def identify(ops: pl.DataFrame) -> pl.DataFrame:
    """Add `nth`, the number of an op among those of its call site, and `of`, how many these are in its step.

    (`site`, `nth`) names an op in any rank and step.
    """
    stretch = pl.col("kind").is_in(["gap", "cpu"]) & pl.col("call").is_null()
    site = pl.when(stretch).then(pl.struct("name", "phase", "kind").hash(3)).otherwise("site")
    same = pl.struct("rank", "step", "site", "kind").hash(6)
    return (
        ops.with_columns(site=site)
        .with_columns(same=same)
        .with_columns(
            nth=pl.coalesce("launch_ns", "start_ns").rank("ordinal").over("same").cast(pl.Int32),
            of=pl.len().over("same").cast(pl.Int32),
        )
        .drop("same")
    )


ROUNDS = 4
"""How often the search that asks most does."""

_IDENTITY = ("op_id", "rank", "lane", "step", "site", "nth", "correlation")

SEEN = [*_IDENTITY, "kind", "name", "thread", "parent", "call", "around", "frame", "top_frame"]
SEEN += ["launch_ns", "start_ns", "dur_ns"]
"""Columns of ops that say something of waits."""

Tables = tuple[pl.DataFrame, pl.DataFrame]


class Sightings:
    """What ops of all steps say of waits, whichever step's are wanted: each table is made once, when first needed.

    Parameters
    ----------
    ops
        Raw ops of all ranks and steps on one clock (`clocks.align_clocks`), with `nth` (`identify`): columns `SEEN`.
    records
        `sync_records`; may be empty.
    """

    def __init__(self, ops: pl.DataFrame, records: pl.DataFrame) -> None:
        self._ops, self._records = ops.select(SEEN), records
        self._made: dict[str, Tables] = {}

    def waits(self, step: int, unseen: int) -> pl.DataFrame:
        """Waits of one step: columns `WAITS`. A call without a row waits for something that no evidence names.

        Times of step `unseen` serve as no evidence: of that which is to be predicted, else of `step` itself.
        """
        return chosen_waits(step, [among_themselves(search) for search in self.searches(step, unseen)])

    def searches(self, step: int, unseen: int) -> list[Asking]:
        """How the waits of one step are searched for: each way on its own, asking what all ranks say."""
        return [self._told(), self._stream_syncs(unseen), self._event_waits(step, unseen), self._hidden(step, unseen)]

    @cached_property
    def _device(self) -> pl.DataFrame:
        device = self._ops.filter(pl.col("kind").is_in(DEVICE_KINDS))
        return device.select(
            *_IDENTITY, "name", "kind", "launch_ns", "start_ns", end_ns=pl.col("start_ns") + pl.col("dur_ns")
        )

    @cached_property
    def _calls(self) -> pl.DataFrame:
        return _calls_with_neighbours(self._ops, self._device)

    @cached_property
    def _exact(self) -> pl.DataFrame:
        exact = _exact_waits(self._calls, self._records)
        others = _own_work(self._calls), _whole_device(self._calls, self._device)
        return pl.concat([exact, *others], how="diagonal_relaxed")

    def _told(self) -> Asking:
        """What the trace itself says, whatever others do."""
        yield from ()
        return self._exact

    @cached_property
    def _syncs(self) -> Tables:
        waits = _sync_waits(self._calls, self._records)
        return waits, tested(waits.filter(pl.col("evidence") == "pattern"), self._device, WAKE_HOST_NS)

    def _stream_syncs(self, unseen: int) -> Asking:
        """A stream synchronise waits for the stream that its record names, or that its thread launched to last."""
        waits, outcomes = self._syncs
        wrong = yield from contradicted(outcomes, unseen)
        return waits.join(wrong, on=["site_key", "pattern"], how="anti", maintain_order="left")

    @cached_property
    def _unnamed(self) -> pl.DataFrame:
        """Event waits that no record names, and the launches of collectives."""
        named = self._records.filter(pl.col("wait_on_stream") >= 0).select("rank", "correlation")
        # A wait after a collective's kernel, still inside the call that launched it, orders NCCL's own streams only.
        internal = pl.col("comm_before") & (pl.col("frame_before") == pl.col("frame"))
        about = self._calls.filter((pl.col("call") == "wait_event") | pl.col("to_comm"))
        return about.join(named, on=["rank", "correlation"], how="anti", maintain_order="left").with_columns(
            internal=internal.fill_null(value=False)
        )

    @cached_property
    def _collective_sites(self) -> pl.DataFrame:
        # DDP waits for its buckets at the end of backward, outside every operator.
        within = pl.coalesce("around", "parent").str.contains(COLLECTIVE_WAITS).fill_null(value=True)
        return self._unnamed.filter((pl.col("call") == "wait_event") & within).select("site_key").unique()

    @cached_property
    def _followed(self) -> Tables:
        is_wait = (pl.col("call") == "wait_event") & ~pl.col("internal") & pl.col("after").is_not_null()
        waits = self._unnamed.filter(is_wait)
        waits = waits.select("op_id", "rank", "step", "site_key", lane="after", call_ns="start_ns")
        return followed(waits, self._device)

    def _event_waits(self, step: int, unseen: int) -> Asking:
        """Event waits that no record names: idioms that other steps do not contradict, or what those show by time."""
        sites = yield self._collective_sites
        if "idioms" not in self._made:
            collective = _collective_waits(self._unnamed, sites["site_key"])
            ways = _caller_waits(self._unnamed), collective, _stream_switches(self._unnamed)
            candidates = pl.concat(ways, how="diagonal_relaxed")
            self._made["idioms"] = candidates, tested(candidates, self._device, TOLERANCE_NS)
        candidates, outcomes = self._made["idioms"]
        wrong = yield from contradicted(outcomes, unseen)
        sound = candidates.join(wrong, on=["site_key", "pattern"], how="anti", maintain_order="left")
        explained = pl.col("op_id").is_in(sound["op_id"].implode())
        waits, votes = (table.filter(~explained) for table in self._followed)
        by_time = yield from elected(waits, votes, self._device, step, unseen, TOLERANCE_NS)
        here = sound.filter(pl.col("step") == step)
        best = here.filter(pl.col("order") == pl.col("order").min().over("op_id"))
        return pl.concat([best, by_time], how="diagonal_relaxed")

    @cached_property
    def _stretches(self) -> pl.DataFrame:
        is_stretch = pl.col("kind").is_in(["gap", "cpu"]) & pl.col("call").is_null()
        return self._ops.filter(is_stretch).select(*_IDENTITY, "call", "start_ns", "dur_ns")

    @cached_property
    def _long_sites(self) -> pl.DataFrame:
        return self._stretches.filter(pl.col("dur_ns") > HIDDEN_WAIT_NS).select("site").unique()

    def _hidden(self, step: int, unseen: int) -> Asking:
        """Host stretches that end right after a device op in other steps: waits that the profiler did not record."""
        sites = yield self._long_sites
        if "hidden" not in self._made:
            stretches = self._stretches.filter(pl.col("site").is_in(sites["site"].implode()))
            syncs = self._calls.filter(pl.col("call") == "sync_event").select(stretches.columns)
            self._made["hidden"] = ended(pl.concat([stretches, syncs]), self._device)
        waits, votes = self._made["hidden"]
        return (yield from elected(waits, votes, self._device, step, unseen, WAKE_HOST_NS))


def chosen_waits(step: int, found: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """The step's waits of all that `Sightings.searches` found."""
    here = [table.filter(pl.col("step") == step) for table in found]
    typed = pl.concat([pl.DataFrame(schema=WAITS), *here], how="diagonal_relaxed").select(WAITS.keys())
    named = typed.filter(pl.col("evidence") == "exact")["op_id"].implode()
    apart = pl.col("lane").is_null() | pl.col("record_lane").is_null() | (pl.col("lane") != pl.col("record_lane"))
    chosen = typed.filter(apart & ((pl.col("evidence") != "time") | ~pl.col("op_id").is_in(named)))
    return chosen.unique(["op_id", "lane", "target", "record_lane"], maintain_order=True)


def _calls_with_neighbours(ops: pl.DataFrame, device: pl.DataFrame) -> pl.DataFrame:
    """Runtime calls in thread order, each with what its thread launched last before it and first after it."""
    launched = device.select(
        "rank", "correlation", target="op_id", to="lane", to_comm=pl.col("kind") == "comm", to_name="name"
    )
    launched = launched.filter(pl.col("correlation").is_not_null()).unique(["rank", "correlation"], keep="first")
    calls = ops.filter(pl.col("call").is_not_null()).join(
        launched, on=["rank", "correlation"], how="left", maintain_order="left"
    )
    calls = calls.with_columns(site_key=SITE_KEY)
    near = _Neighbours(calls.select(pl.struct("rank", "lane").rle_id()).to_series().to_numpy())
    launches, records = calls["to"].is_not_null(), calls["call"] == "record"
    plain = launches & ~calls["to_comm"].fill_null(value=True)
    last = calls.select(before="to", comm_before="to_comm", frame_before=pl.col("frame").fill_null(-1))
    calls = calls.hstack(rows_at(last, near.before(launches)))
    calls = calls.hstack(rows_at(calls.select(after="to", comm_after="to_comm"), near.after(launches)))
    calls = calls.hstack(rows_at(calls.select(plain_before="to"), near.before(plain)))
    calls = calls.hstack(rows_at(calls.select(plain_after="to"), near.after(plain)))
    record = calls.select(
        recorded_on="plain_before", recorded_ns="start_ns", recorded_in=pl.col("top_frame").fill_null(-1)
    )
    return calls.hstack(rows_at(record, near.before(records)))


class _Neighbours:
    """Rows near each row on its thread; the rows of a thread stand together, in time order."""

    def __init__(self, threads: NDArray[np.uint32]) -> None:
        self.row = np.arange(threads.size)
        self.first = np.searchsorted(threads, threads, side="left")
        self.last = np.searchsorted(threads, threads, side="right") - 1

    def before(self, which: pl.Series) -> NDArray[np.int64]:
        """The last row up to each one for which `which` holds, -1 if none."""
        at = np.maximum.accumulate(np.where(which.to_numpy(), self.row, -1))
        return np.where(at >= self.first, at, -1)

    def after(self, which: pl.Series) -> NDArray[np.int64]:
        """The first row from each one on for which `which` holds, -1 if none."""
        at = np.minimum.accumulate(np.where(which.to_numpy(), self.row, self.row.size)[::-1])[::-1]
        return np.where(at <= self.last, at, -1)


def _exact_waits(calls: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """Event waits that `cuda_sync` rows name: the stream waits for what the other held when the event was recorded.

    Traces of 2023 name the streams but not the record: then it was taken no later than the wait.
    """
    named = records.filter(pl.col("wait_on_stream") >= 0).select(
        "rank",
        "correlation",
        "record",
        waiter=pl.format("gpu{}:{}", "device", "stream"),
        awaited=pl.format("gpu{}:{}", "device", "wait_on_stream"),
    )
    recorded = calls.filter(pl.col("call") == "record").select("rank", record="correlation", record_ns="start_ns")
    waits = calls.filter(pl.col("call").is_in(["wait_event", "sync_event"]))
    return (
        waits.join(named, on=["rank", "correlation"])
        .join(recorded, on=["rank", "record"], how="left")
        .with_columns(record_ns=pl.when(pl.col("record") >= 0).then("record_ns").otherwise("start_ns"))
        .filter(pl.col("record_ns").is_not_null())
        .select(
            "op_id",
            "rank",
            "step",
            "record_ns",
            lane=pl.when(pl.col("call") == "wait_event").then("waiter"),
            target=None,
            record_lane="awaited",
            evidence=pl.lit("exact"),
            pattern=pl.lit("cuda_sync"),
        )
    )


def _own_work(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls that wait for the very work that they name: blocking copies, and waits for a CPU collective."""
    issued = (
        calls.filter(pl.col("to_comm")).select("rank", "correlation", issued="target").unique(["rank", "correlation"])
    )
    labelled = (
        calls.filter(pl.col("call") == "wait_comm")
        .join(issued, on=["rank", "correlation"])
        .with_columns(target="issued")
    )
    copies = calls.filter((pl.col("call") == "launch") & pl.col("to_name").str.contains(BLOCKING_COPIES))
    own = pl.concat([copies, labelled.select(copies.columns)])
    found = (pl.col("call") == "wait_comm") & ~pl.col("name").str.starts_with("wait::")
    return own.select(
        "op_id",
        "rank",
        "step",
        "target",
        lane=None,
        record_lane=None,
        record_ns=None,
        evidence=pl.when(found).then(pl.lit("pattern")).otherwise(pl.lit("exact")),
        pattern=pl.when(found).then(pl.lit("gap that ends with its collective")).otherwise(pl.lit("own work")),
    )


def _whole_device(calls: pl.DataFrame, device: pl.DataFrame) -> pl.DataFrame:
    waits = calls.filter(pl.col("call").is_in(["sync_device", "free"]))
    return waits.join(device.select("rank", record_lane="lane").unique(maintain_order=True), on="rank").select(
        "op_id",
        "rank",
        "step",
        "record_lane",
        lane=None,
        target=None,
        record_ns="start_ns",
        evidence=pl.lit("exact"),
        pattern=pl.lit("device"),
    )


def _sync_waits(calls: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    named = records.filter(pl.col("wait_on_stream").is_null() | (pl.col("wait_on_stream") < 0)).select(
        "rank", "correlation", named=pl.format("gpu{}:{}", "device", "stream")
    )
    waits = calls.filter(pl.col("call") == "sync_stream")
    waits = waits.join(named.unique(["rank", "correlation"]), on=["rank", "correlation"], how="left")
    exact = pl.col("named").is_not_null()
    return waits.filter(exact | pl.col("before").is_not_null()).select(
        "op_id",
        "rank",
        "step",
        "site_key",
        lane=None,
        target=pl.lit(None, pl.Int64),
        record_lane=pl.coalesce("named", "before"),
        record_ns="start_ns",
        evidence=pl.when(exact).then(pl.lit("exact")).otherwise(pl.lit("pattern")),
        pattern=pl.when(exact).then(pl.lit("cuda_sync")).otherwise(pl.lit("last stream of the thread")),
        next_start_ns=pl.col("start_ns") + pl.col("dur_ns"),
    )


def _candidates(waits: pl.DataFrame, order: int, pattern: str, **what: str) -> pl.DataFrame:
    """Waits that an idiom explains; of several idioms for one call the lowest `order` counts."""
    known = ("op_id", "rank", "step", "site_key")
    why = {"order": pl.lit(order), "evidence": pl.lit("pattern"), "pattern": pl.lit(pattern)}
    return waits.select(*known, **{name: pl.col(column) for name, column in what.items()}, call_ns="start_ns", **why)


def _caller_waits(calls: pl.DataFrame) -> pl.DataFrame:
    """Before its kernel a collective makes its own stream wait for the stream of its caller."""
    waits = calls.filter((pl.col("call") == "wait_event") & pl.col("comm_after") & pl.col("plain_before").is_not_null())
    return _candidates(
        waits, 0, "collective after its caller", lane="after", record_lane="plain_before", record_ns="start_ns"
    )


def _collective_waits(calls: pl.DataFrame, sites: pl.Series) -> pl.DataFrame:
    """`Work.wait`: the caller's stream waits for a collective, at these sites.

    It is the one that the same operator issued last, else the one that its thread issued first and has not waited for
    yet. A thread that issues none waits for those of the rank's other threads.
    """
    takes = (
        (pl.col("call") == "wait_event")
        & ~pl.col("internal")
        & ~pl.col("comm_after").fill_null(value=False)
        & pl.col("site_key").is_in(sites.implode())
    )
    rows = calls.filter((takes & pl.col("plain_after").is_not_null()) | pl.col("to_comm")).sort(
        "rank", "start_ns", "op_id"
    )
    issuers = set(rows.filter("to_comm").select("rank", "thread").iter_rows())
    columns = ("rank", "thread", "to_comm", "target", "top_frame", "site_key")
    taken: list[int | None] = []
    # (rank, thread) -> site -> (collective, operator); thread None stands for all threads of the rank
    waiting: dict[tuple[int, int | None], dict[int, tuple[int, int | None]]] = {}
    for rank, thread, is_comm, target, operator, site in rows.select(columns).iter_rows():
        own = (rank, thread) if (rank, thread) in issuers else (rank, None)
        issued = waiting.setdefault(own, {})
        if is_comm:
            for place in (issued, waiting.setdefault((rank, None), {})):
                place.pop(site, None)  # the same collective of an earlier step, which nobody waited for
                place[site] = (target, operator)
        if is_comm or not issued:
            taken.append(None)
            continue
        last = next(reversed(issued))
        same = operator is not None and issued[last][1] == operator
        chosen = last if same else next(iter(issued))
        collective = issued.pop(chosen)
        if waiting[rank, None].get(chosen) == collective:
            del waiting[rank, None][chosen]
        taken.append(collective[0])
    waits = rows.with_columns(issued=pl.Series(taken, dtype=pl.Int64)).filter(pl.col("issued").is_not_null())
    return _candidates(waits, 1, "wait for a collective", lane="plain_after", target="issued")


def _stream_switches(calls: pl.DataFrame) -> pl.DataFrame:
    """A block on another stream starts with that stream waiting for the caller's, and ends the other way round.

    Where the trace has the record, it is of the stream that its thread had launched to just before it.
    """
    recorded = pl.col("recorded_in") == pl.col("top_frame").fill_null(-1)
    calls = calls.with_columns(
        awaited=pl.coalesce(pl.when(recorded).then("recorded_on"), "plain_before"),
        awaited_ns=pl.coalesce(pl.when(recorded).then("recorded_ns"), "start_ns"),
    )
    switch = (pl.col("awaited") != pl.col("plain_after")) & ~pl.col("comm_after").fill_null(value=False)
    waits = calls.filter((pl.col("call") == "wait_event") & ~pl.col("internal") & switch)
    return _candidates(waits, 2, "stream switch", lane="plain_after", record_lane="awaited", record_ns="awaited_ns")
