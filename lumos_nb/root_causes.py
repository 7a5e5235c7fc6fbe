"""Who is slow: the time that ranks wait for one another, charged to what made the last one late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from lumos_nb._replay_kernels import Int32s
from lumos_nb._replay_plan import Plan
from lumos_nb.critical_path import Result
from lumos_nb.errors import InputError, SchemaError
from lumos_nb.graph import Graph


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
    >>> waiting_caused(replay(graph))  # doctest: +SKIP
    """
    if not isinstance(result, Result):
        raise InputError(f"this takes a Result: replay(graph) gives one; it was given a {type(result).__name__}.")
    keys = [by] if isinstance(by, str) else list(by)
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
