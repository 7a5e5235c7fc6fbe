"""Which few of many steps, ranks or jobs stand for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from lumos_nb.display import Shown, format_share
from lumos_nb.errors import InputError, shown
from lumos_nb.exchange.benchmark.steps import KEY, step_rows, typical
from lumos_nb.graph import Graph
from lumos_nb.traces.execution_trace import ExecutionTrace, is_execution_trace, load_execution_trace
from lumos_nb.traces.run import Run, load_run

Source = Run | Graph | ExecutionTrace | str | Path
Floats = NDArray[np.float64]
_NO_WORK = ("gap", "boundary", "join")
_NUMBERED = r" \w+=.*$"
"""What a graph's op says of its own place behind its name."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Selection(Shown):
    """Representatives, each with a weight.

    Attributes
    ----------
    chosen
        One row a representative, the heaviest first: `number` (its place among the items), `name`, `weight` (how many
        items it stands for, itself included), `share` of the whole that these are, `amount` (its own), `farthest` (by
        how much of its own amount the least similar of them differs), `stands_for` (their names).
    items
        One row an item, in the order given: `number`, `name`, `amount`, `representative` (its number), `distance`.
    ops
        One row an operator or kernel: `where`, `name`, `whole` (all items), `weighted` (representatives by weight).
    measure
        What is counted: "ns" of time in operators and kernels, or for execution traces, which have no times, "bytes" of
        the tensors that operators take and give. `amount`, `whole`, `weighted` and `distance` are in it.
    """

    chosen: pl.DataFrame
    items: pl.DataFrame
    ops: pl.DataFrame
    measure: Literal["ns", "bytes"]

    @property
    def coverage(self) -> float:
        """The share of the whole, operator by operator, that the weighted sum has too."""
        return self._of_whole(pl.min_horizontal("whole", "weighted"))

    @property
    def error(self) -> float:
        """By how much the weighted sum is off, operator by operator, as a share of the whole; at most `spread`."""
        return self._of_whole((pl.col("whole") - pl.col("weighted")).abs())

    @property
    def spread(self) -> float:
        """How far items are from their representatives, all added up, as a share of the whole."""
        whole = float(self.ops["whole"].sum())
        return float(self.items["distance"].sum()) / whole if whole else 0.0

    def _of_whole(self, part: pl.Expr) -> float:
        whole = float(self.ops["whole"].sum())
        return float(self.ops.select(part.sum()).item()) / whole if whole else 0.0

    def _title(self) -> str:
        what = "operator time" if self.measure == "ns" else "bytes of operands"
        return (
            f"{len(self.chosen)} of {len(self.items)} stand for all: {format_share(self.coverage)} of {what} covered, "
            f"the weighted sum is off by {format_share(self.error)}, each from its own by {format_share(self.spread)}"
        )

    def _summary(self) -> pl.DataFrame:
        few, others = pl.col("stands_for").list.head(4).list.join(", "), pl.col("weight") - 4
        more = pl.when(others > 0).then(pl.format(", {} more", others)).otherwise(pl.lit(""))
        unit, farthest = "time_ns" if self.measure == "ns" else "bytes", pl.col("farthest").alias("farthest_share")
        amount = pl.col("amount").alias(unit)
        return self.chosen.select("name", "weight", "share", amount, farthest, stands_for=few + more)

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._title(), self._summary())]


def select(
    traces: Source | Sequence[Source] | Mapping[str, Source],
    k: int,
    *,
    by: Literal["trace", "step", "rank"] = "trace",
) -> Selection:
    """Pick the k that represent many: medoids of what they spend on each operator.

    Items lie as far apart as the amounts that they spend on each operator differ in sum (the city-block distance of
    their histograms). The medoids are found by the build and swap phases of PAM (Kaufman and Rousseeuw, "Finding Groups
    in Data", 1990): no exchange of one of them for another item brings items nearer to theirs. With the number of items
    that each stands for as its weight, the weighted sum is off by no more than those distances add up to.

    Parameters
    ----------
    traces
        Runs, graphs or execution traces, all of one kind, or paths of them; by name, or they are called by their paths
        or places. One run alone where it is cut by steps or ranks.
    k
        How many.
    by
        What an item is: a trace ("trace"; of a run its typical step), or each marked step or rank of the runs.

    Returns
    -------
    Selection
        Representatives with weights, what each stands for, and how well; the same for the same input.

    Raises
    ------
    InputError
        k is no whole number from 1 to the number of items, there is no item, kinds are mixed, or what has no steps and
        ranks of its own is to be cut by them.
    RunError
        A run has no marked steps.

    Examples
    --------
    >>> chosen = select("runs/gpt", 2, by="step")
    >>> chosen.chosen["weight"].sum()  # of all steps
    9
    """
    if by not in ("trace", "step", "rank"):
        raise InputError(f"by is {shown(by)}; it may be 'trace', 'step' or 'rank'.")
    found = list(_items(_named(traces), by))
    if type(k) is not int or not 1 <= k <= len(found):
        raise InputError(f"k is {shown(k)}, of {len(found)} items: give a whole number from 1 to that.")
    spent, ops = _histograms([rows for _, _, rows in found])
    apart = cdist(spent, spent, "cityblock")
    medoids = k_medoids(apart, k)
    nearest = apart[:, medoids].argmin(axis=1)
    nearest[medoids] = np.arange(k)  # of equal ones the first would stand for the others
    numbers = np.arange(len(found))
    items = pl.DataFrame({"number": numbers, "name": [name for name, _, _ in found], "amount": spent.sum(axis=1)})
    items = items.with_columns(
        representative=pl.Series(medoids[nearest]), distance=pl.Series(apart[numbers, medoids[nearest]])
    )
    ops = ops.with_columns(weighted=pl.Series(np.bincount(nearest, minlength=k) @ spent[medoids]))
    return Selection(_chosen(items), items, ops, "bytes" if found[0][1] is ExecutionTrace else "ns")


def _histograms(found: Sequence[pl.DataFrame]) -> tuple[Floats, pl.DataFrame]:
    """What each item spends on each operator, (items, operators), and the operators with the sum over items."""
    rows = pl.concat([rows.with_columns(number=pl.lit(at)) for at, rows in enumerate(found)])
    ops = rows.group_by(KEY).agg(whole=pl.col("amount").sum()).sort(KEY).with_row_index("op")
    spent = np.zeros((len(found), len(ops)))
    placed = rows.join(ops, on=KEY)
    spent[placed["number"].to_numpy(), placed["op"].to_numpy()] = placed["amount"].to_numpy()
    return spent, ops.drop("op")


def k_medoids(apart: Floats, k: int) -> NDArray[np.int64]:
    """The places of k items, in order, to which all are near: `apart` is (n, n), the distances. PAM."""
    medoids = [int(apart.sum(axis=1).argmin())]
    while len(medoids) < k:
        total = np.minimum(apart, apart[medoids].min(axis=0)).sum(axis=1)
        total[medoids] = np.inf
        medoids.append(int(total.argmin()))
    least = apart[medoids].min(axis=0).sum()
    while True:
        totals = np.full((k, len(apart)), np.inf)
        for at in range(k):
            others = np.delete(medoids, at)
            kept = apart[others].min(axis=0) if k > 1 else np.full(len(apart), np.inf)
            totals[at] = np.minimum(apart, kept).sum(axis=1)
        at, item = divmod(int(totals.argmin()), len(apart))
        if not totals[at, item] < least * (1 - 1e-12):
            return np.sort(np.array(medoids, np.int64))
        medoids[at], least = item, totals[at, item]


def _chosen(items: pl.DataFrame) -> pl.DataFrame:
    of = items.group_by("representative").agg(
        weight=pl.len().cast(pl.Int64),
        share=pl.col("amount").sum(),
        farthest=pl.col("distance").max(),
        stands_for=pl.col("name").sort_by("number"),
    )
    chosen = items.drop("representative", "distance").join(of, left_on="number", right_on="representative")
    total, own = items["amount"].sum(), pl.col("amount")
    chosen = chosen.with_columns(
        pl.col("share") / (total or 1), pl.when(own > 0).then(pl.col("farthest") / own).otherwise(0.0).alias("farthest")
    )
    chosen = chosen.sort("weight", "number", descending=[True, False])
    return chosen.select("number", "name", "weight", "share", "amount", "farthest", "stands_for")


def _named(traces: Source | Sequence[Source] | Mapping[str, Source]) -> list[tuple[str, Source]]:
    if isinstance(traces, Mapping):
        return [(str(name), one) for name, one in traces.items()]
    if isinstance(traces, Source):
        return [("" if not isinstance(traces, str | Path) else str(traces), traces)]
    if not isinstance(traces, Sequence):
        raise InputError(f"traces is a {type(traces).__name__}; give runs, graphs or execution traces, or their paths.")
    return [(str(one) if isinstance(one, str | Path) else str(at), one) for at, one in enumerate(traces)]


_Item = tuple[str, type, pl.DataFrame]


def _items(named: list[tuple[str, Source]], by: str) -> Iterator[_Item]:
    """Name, kind and `where`, `name`, `amount` of every item; read one after the other, since they may be many."""
    first: tuple[str, type] | None = None
    for name, source in named:
        one = _loaded(name, source)
        first = first or (name, type(one))
        if type(one) is not first[1]:
            raise InputError(
                f"{shown(name)} is a {type(one).__name__} and {shown(first[0])} a {first[1].__name__}: give traces of "
                "one kind."
            )
        if isinstance(one, Run):
            yield from _of_run(name, one, by, alone=len(named) == 1)
        elif by != "trace":
            raise InputError(f"{shown(name)} is a {type(one).__name__}, which is one item: only runs are cut by {by}.")
        else:
            yield name, type(one), _of_graph(one) if isinstance(one, Graph) else _of_execution_trace(one)


def _loaded(name: str, source: Source) -> Run | Graph | ExecutionTrace:
    if isinstance(source, str | Path):
        path = Path(source)
        return load_execution_trace(path) if path.is_file() and is_execution_trace(path) else load_run(path)
    if not isinstance(source, Run | Graph | ExecutionTrace):
        raise InputError(
            f"{shown(name)} is a {type(source).__name__}; give a run, a graph, an execution trace or a path."
        )
    return source


def _of_run(name: str, run: Run, by: str, *, alone: bool) -> Iterator[_Item]:
    rows = step_rows(run).filter(pl.col("where").is_in(["host", "device"]))
    if by == "trace":
        yield name, Run, _amounts(typical(rows), "time_ns")
        return
    for (one,), part in sorted(rows.group_by(by)):
        label = f"{by} {one}" if alone else f"{name}, {by} {one}"
        yield label, Run, _amounts(part if by == "step" else typical(part), "time_ns")


def _of_graph(graph: Graph) -> pl.DataFrame:
    ops = graph.ops.filter(~pl.col("kind").is_in(_NO_WORK) & (pl.col("dur_ns") > 0))
    return _amounts(ops.with_columns(pl.col("name").str.replace(_NUMBERED, ""), where="kind"), "dur_ns")


def _of_execution_trace(trace: ExecutionTrace) -> pl.DataFrame:
    operators = trace.nodes.filter(kind="operator").select("node_id", "name", where=pl.lit("host"))
    sized = trace.tensors.with_columns(bytes=pl.col("numel") * pl.col("itemsize"))
    return _amounts(operators.join(sized, on="node_id"), "bytes")


def _amounts(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    return rows.group_by(KEY).agg(amount=pl.col(column).sum().cast(pl.Float64))
