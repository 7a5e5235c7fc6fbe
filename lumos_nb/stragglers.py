"""Stragglers: whose lateness ranks wait for, and what a step would take without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal

import numpy as np
import polars as pl

from lumos_nb._replay_kernels import Int32s
from lumos_nb._replay_plan import Plan
from lumos_nb.clocks import MESSAGES
from lumos_nb.critical_path import Result
from lumos_nb.errors import InputError, ScenarioError, SchemaError, is_word, shown
from lumos_nb.graph import Graph
from lumos_nb.schema import require

SAME_ON_REPLICAS = ("kind", "site", "of", "nth")
"""What names an op on each of the ranks that do the same work: the nth of its call site, of so many in the step."""


def without_stragglers(
    graph: Graph,
    *,
    replicas: Sequence[Sequence[int]] | None = None,
    statistic: Literal["median", "mean"] = "median",
) -> Graph:
    """Give each op the duration that its equals have, over the ranks that do the same work in the same step.

    What a stage has more to do than the others, or one micro-batch more than the next, stays: that is no straggling. A
    join waits for the latest of its ranks, so that equal durations take ordinary jitter away as well as stragglers:
    that alone makes a healthy pipeline 1.5 to 2 % faster with medians. With two replicas both statistics are the same.

    Parameters
    ----------
    graph
        As `build_graph` made it, or repeated.
    replicas
        Groups of ranks that do the same work (the data-parallel ranks of one pipeline stage and tensor position); by
        default the ranks that take part in one collective, unless these are stages of one pipeline (ranks that pass
        messages to one another, directly or through others).
    statistic
        "median" or "mean" over the replicas.

    Raises
    ------
    ScenarioError
        No two ranks do the same work, or `replicas` names a rank twice or one that the graph lacks.

    Examples
    --------
    >>> replay(without_stragglers(graph)).step_ns / replay(graph).step_ns
    """
    require(graph, "edges")
    if not is_word(statistic, ("median", "mean")):
        raise ScenarioError(f"statistic={shown(statistic)}: choose 'median' or 'mean'.")
    work = _replicated(graph, replicas)
    if missing := [key for key in SAME_ON_REPLICAS if key not in graph.ops.columns]:
        raise SchemaError(f"op table lacks column(s) {', '.join(missing)}, which build_graph gives.")
    ops = graph.ops.join(work, on="rank", how="left", maintain_order="left")
    equals = ["step", "work", *SAME_ON_REPLICAS]
    pooled = pl.col("dur_ns").median() if statistic == "median" else pl.col("dur_ns").mean()
    known = pl.all_horizontal(pl.col("work", "site", "nth").is_not_null()) & ~pl.col("kind").is_in(["boundary", "join"])
    dur_ns = pl.when(known).then(pooled.over(equals)).otherwise("dur_ns").round().cast(pl.Int64)
    return replace(graph, ops=ops.with_columns(dur_ns=dur_ns).drop("work"))


def _replicated(graph: Graph, replicas: Sequence[Sequence[int]] | None) -> pl.DataFrame:
    """`rank`, `work`: a number for those that do the same."""
    ranks = graph.ops.filter(pl.col("kind") != "join")["rank"].unique().sort().to_list()
    groups = _by_collectives(graph, ranks) if replicas is None else _checked(replicas, ranks)
    table = pl.DataFrame(
        [(rank, work) for work, group in enumerate(groups) for rank in group],
        schema={"rank": pl.Int32, "work": pl.Int64},
        orient="row",
    )
    if not table["work"].is_duplicated().any():
        raise ScenarioError("no two ranks of the graph do the same work, by their collectives; give replicas.")
    return table


def _checked(replicas: object, ranks: Sequence[int]) -> list[list[int]]:
    try:
        groups = [list(map(index, group)) for group in replicas]  # type: ignore[attr-defined]
    except TypeError as error:
        raise InputError(f"replicas={shown(replicas)}: give groups of ranks, such as [[0, 1], [2, 3]].") from error
    counted = Counter(rank for group in groups for rank in group)
    if wrong := sorted(rank for rank, count in counted.items() if count > 1 or rank not in ranks):
        raise ScenarioError(f"replicas hold rank {wrong[0]}, which the graph lacks or which is in them twice.")
    return groups


def _listed(given: object) -> list[Any]:
    with suppress(TypeError):  # what cannot be gone through, also an array that is one number
        return list(given)  # type: ignore[call-overload,no-any-return]
    return []


def _by_collectives(graph: Graph, ranks: Sequence[int]) -> list[list[int]]:
    """Ranks tied by collectives, other than those that hold ranks tied by messages: these are stages of a pipeline."""
    about = graph.ops.select("op_id", "rank", "collective", "kind")
    joins = about.filter(pl.col("kind") == "join").select("collective", dst="op_id")
    members = graph.edges.join(joins, on="dst").join(about.select("rank", src="op_id"), on="src")
    meets = members.group_by("dst").agg(pl.col("collective").first(), pl.col("rank").unique().sort())
    meets = meets.select(pl.col("collective").is_in(MESSAGES).fill_null(value=False), "rank").unique()
    pipelines, tied = ({rank: [rank] for rank in ranks} for _ in range(2))
    for is_message, group in meets.sort("collective", "rank", descending=[True, False]).iter_rows():
        if is_message or len({id(pipelines[rank]) for rank in group}) == len(group):
            of = pipelines if is_message else tied
            whole = sorted({other for rank in group for other in of[rank]})
            of.update(dict.fromkeys(whole, whole))
    return [list(group) for group in dict.fromkeys(map(tuple, tied.values()))]


def with_pooled_durations(graph: Graph, over: Iterable[Graph]) -> Graph:
    """Give all ops of one kind and name one duration, the same on all ranks, and let nothing pass between ops.

    What ByteDance's StragglerAnalysis (Lin et al., OSDI 2025) calls a step without stragglers: computation takes its
    mean over all ranks, stages, micro-batches and steps, communication the median of its transfers. A stage that has
    more to do counts as a straggler then, and so does all the host's time between ops.

    Parameters
    ----------
    graph
        The graph of one step.
    over
        Graphs of the steps whose ops are pooled, `graph` among them.

    Examples
    --------
    >>> graphs = [build_graph(recording, step) for step in recording.step_times()["step"]]
    >>> replay(with_pooled_durations(graphs[0], graphs)).step_ns
    """
    require(graph, "edges")
    comm, gap = pl.col("kind") == "comm", pl.col("kind").is_in(["gap", "unexplained"])
    graphs = _listed(over)
    if not graphs or not all(hasattr(g, "ops") for g in graphs):
        raise InputError("over holds no graphs: give a list of those of the steps to pool over, the graph among them.")
    durations = pl.concat([g.ops.select("kind", "name", "dur_ns") for g in graphs])
    pool = durations.group_by("kind", "name").agg(
        pooled_ns=pl.when(comm.first()).then(pl.col("dur_ns").median()).otherwise(pl.col("dur_ns").mean())
    )
    ops = graph.ops.join(pool, on=["kind", "name"], how="left", maintain_order="left")
    if lacking := ops.filter(pl.col("pooled_ns").is_null())["name"].unique().sort().to_list():
        raise ScenarioError(
            f"the graphs to pool over have no op {shown(lacking[0])}; the graph itself must be among them."
        )
    own = ~pl.col("kind").is_in(["boundary", "join"])
    dur_ns = pl.when(gap).then(0).when(own).then("pooled_ns").otherwise("dur_ns").round().cast(pl.Int64)
    return replace(graph, ops=ops.with_columns(dur_ns=dur_ns).drop("pooled_ns"))


def waiting_caused(result: Result, *, by: str | Sequence[str] = "rank") -> pl.DataFrame:
    """How long ranks wait at joins (collectives, messages), by who waits and by whose lateness it is.

    What an early rank waits at a join is charged to the rank that arrives last; but as far as that one had itself
    waited for another since the two were last held up by the same, to that other, and so on back: root causes, as in
    Scalasca's delay analysis (Böhme et al., ICPP 2010), found on the replayed graph. Each charge is spread over the
    ops on the late rank's path in proportion to their time. Waiting that a pipeline's schedule makes by itself counts
    as well: the first stage causes what the others wait while the pipeline fills.

    Parameters
    ----------
    result
        A replayed graph; the joins of its last step are counted.
    by
        Columns of the op table: "rank", or for example ["rank", "kind", "name"].

    Returns
    -------
    DataFrame
        The columns `by`, `waiting_caused_ns`, `waiting_ns` (of the collectives that waited), longest first. Both sum
        to all the waiting at joins. Waiting for ranks that have no trace is in neither.

    Examples
    --------
    >>> waiting_caused(replay(graph))
    """
    if not isinstance(result, Result):
        raise InputError(f"this takes a Result: replay(graph) gives one; it was given a {type(result).__name__}.")
    keys = [by] if isinstance(by, str) else _listed(by)
    if not keys or len({*map(str, keys)}) < len(keys) or not all(isinstance(key, str) for key in keys):
        raise InputError(f"by={shown(by)}: give one or more columns of the op table, each once.")
    if missing := [key for key in keys if key not in result.ops.columns]:
        raise SchemaError(f"op table lacks the column(s) {', '.join(missing)}; it has {', '.join(result.ops.columns)}.")
    waits = _Waits.of(result.graph)
    caused, waiting = _counted(waits, result)
    op = pl.Series([*caused, *waiting], dtype=pl.Int64)
    sums = result.ops.select(keys)[pl.Series(waits.row).gather(op)].with_columns(
        waiting_caused_ns=pl.Series([*caused.values(), *[0] * len(waiting)], dtype=pl.Int64),
        waiting_ns=pl.Series([*[0] * len(caused), *waiting.values()], dtype=pl.Int64),
    )
    if keys == ["rank"]:  # also those that neither wait nor are waited for
        sums = pl.concat([sums, result.ops.select("rank").unique()], how="diagonal")
    sums = sums.group_by(keys).agg(pl.col("waiting_caused_ns", "waiting_ns").sum())
    return sums.sort("waiting_caused_ns", "waiting_ns", *keys, descending=[True, True, *[False] * len(keys)])


def _counted(waits: _Waits, result: Result) -> tuple[Counter[int], Counter[int]]:
    """Op -> waiting caused, and op -> waiting of the last step, as positions in the plan."""
    charged, caused, waiting = Counter[int](), Counter[int](), Counter[int]()
    steps = result.ops["step"].gather(waits.row).to_list()
    for join in waits.arrivals:
        if steps[join] != result.graph.step:
            continue
        for rank, early in waits.arrivals[join].items():
            if (time_ns := waits.start[join] - waits.end[early]) > 0:
                waiting[waits.transfers.get((join, rank), early)] += time_ns
                for arrival, due_ns in waits.charges(waits.blocker[join], early, time_ns):
                    charged[arrival] += due_ns
    for arrival, time_ns in (+charged).items():
        for op, due_ns in waits.spread(arrival, time_ns):
            caused[op] += due_ns
    return caused, waiting


@dataclass(frozen=True, slots=True)
class _Waits:
    """A replayed graph by position in its plan: what each op hangs on, and who arrives at each join."""

    row: Int32s  # (n,) of the op table
    rank: list[int]
    start: list[int]
    end: list[int]
    blocker: list[int]  # the op that this one hangs on, -1 if on none
    at_start: list[bool]  # it hangs on the start of that
    arrivals: dict[int, dict[int, int]]  # join -> rank -> the op with which it arrives
    transfers: dict[tuple[int, int], int]  # join, rank -> the op that goes on

    @classmethod
    def of(cls, graph: Graph) -> _Waits:
        plan = Plan.of(graph)
        start = plan.starts()
        end, n = start + plan.dur_ns, len(start)
        dst = np.repeat(np.arange(n), np.diff(plan.ptr))
        is_join = (graph.ops["kind"] == "join").to_numpy()[plan.row]
        binds = np.flatnonzero(start[plan.src] + plan.apart_ns == start[dst])
        binds = binds[np.argsort(~is_join[plan.src[binds]], kind="stable")]  # a transfer hangs on its join
        bound, first = np.unique(dst[binds], return_index=True)
        blocker, at_start = np.full(n, -1), np.zeros(n, dtype=np.bool_)
        blocker[bound], at_start[bound] = plan.src[binds[first]], plan.from_start[binds[first]]
        rank = graph.ops["rank"].to_numpy()[plan.row].tolist()
        arrivals: dict[int, dict[int, int]] = {join: {} for join in np.flatnonzero(is_join).tolist()}
        transfers = {}
        touching = np.flatnonzero(is_join[plan.src] | is_join[dst])
        for src, to in zip(plan.src[touching].tolist(), dst[touching].tolist(), strict=True):
            if to in arrivals:
                arrives = arrivals[to].setdefault(rank[src], src)
                arrivals[to][rank[src]] = max(arrives, src, key=end.__getitem__)
            else:
                transfers[src, rank[to]] = to
        return cls(
            plan.row, rank, start.tolist(), end.tolist(), blocker.tolist(), at_start.tolist(), arrivals, transfers
        )

    def up(self, op: int) -> tuple[int, int]:
        """The join that `op` hangs on, through ops of its rank, and the op right after that; -1 if on none."""
        while (before := self.blocker[op]) >= 0 and before not in self.arrivals:
            op = before
        return before, op

    def charges(self, last: int, early: int, time_ns: int) -> Iterator[tuple[int, int]]:
        """Split the wait of `early` for `last`: arrivals, each with how much is due to the ops that lead to it."""
        since = self._last_common(last, early)
        due = [(last, time_ns)]
        while due:
            arrival, time_ns = due.pop()
            if not time_ns:
                continue
            join, after = self.up(arrival)
            if join < 0 or self.start[join] <= since:
                yield arrival, time_ns
                continue
            own = self.arrivals[join].get(self.rank[after], after)
            waited = self.start[join] - self.end[own] if own != after else time_ns
            passed_on = min(time_ns, waited, self.start[join] - since)
            kept = min(time_ns - passed_on, self.end[arrival] - self.start[join])
            yield arrival, kept
            # What remains was lateness before that join already.
            due += [(self.blocker[join], passed_on), (own, time_ns - passed_on - kept)]

    def _last_common(self, a: int, b: int) -> int:
        """When the last join was that both ops hang on, 0 if there was none."""
        a, b = self.up(a)[0], self.up(b)[0]
        while a != b:  # joins; the later position is never above the other
            a, b = min(a, b), self.up(self.blocker[max(a, b)])[0]
        return self.start[a] if a >= 0 else 0

    def spread(self, arrival: int, time_ns: int) -> Iterator[tuple[int, int]]:
        """Spread time over the ops on the path from the join above to `arrival`, in proportion to theirs."""
        begin = leaves = self.end[arrival]
        path: list[tuple[int, int]] = []
        op = arrival
        while op >= 0 and op not in self.arrivals:
            before = self.blocker[op]
            begin = 0 if before < 0 else self.start[before] if self.at_start[op] else self.end[before]
            path.append((op, leaves - begin))
            op, leaves = before, begin
        whole, past = self.end[arrival] - begin, 0
        for op, lasts in path:
            yield op, (past + lasts) * time_ns // whole - past * time_ns // whole
            past += lasts
