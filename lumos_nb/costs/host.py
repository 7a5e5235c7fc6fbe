"""What the host costs: the parts T1 to T5 of every operator, launch latency, blocking calls, the allocator; measured.

The parts are those of Lin et al., "Towards Universal Performance Modeling for Machine Learning Training on Multi-GPU
Platforms", TPDS 2024 (section 2.5 of the notes on systems), with three differences: T4, which that work assumes to be
4 us, is measured for each runtime call; nothing is taken off for the profiler, so that a host that is not profiled is
somewhat faster; and a blocking call counts with what it costs beyond its wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.calls import CALL_PATTERNS, COMM_OPERATORS, COMM_TYPES, ENGINE_OPERATORS, classify
from lumos_nb.display import Shown
from lumos_nb.errors import CalibrationError, GraphError, InputError, is_word, items_of, shown
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.schema import DEVICE_KINDS, OPS, TableSchema
from lumos_nb.traces.run import Run

OVERHEADS: Mapping[str, tuple[str, str]] = {
    # overhead: (what it is, what to record where there is none of it)
    "T1": ("between two outermost operators", "a training loop with host operators (ProfilerActivity.CPU)"),
    "T2": ("of an operator, before its first launch", "operators that launch device work, with their runtime calls"),
    "T3": ("of an operator, after its last launch", "operators that launch device work, with their runtime calls"),
    "T4": ("the runtime call itself", "the runtime calls (cuda_runtime or its kin) of the host"),
    "T5": ("of an operator, between two of its launches", "an operator that launches twice or more"),
    "T5_host": ("all of an operator that launches nothing", "operators that launch nothing, such as aten::view"),
    "launch_latency": (
        "from the end of a launch call to the start of its work on a stream that was idle at the call",
        "launches to an idle stream: a few small kernels, each followed by a synchronise",
    ),
    "blocking": (
        "of a call or thread that waits, once what it waited for has ended",
        "a run with synchronise calls, and give the run or a graph of it: op tables of build_ops hold the waiting too",
    ),
    "alloc": ("of an allocation or release, waiting apart", "steps that allocate: cudaMalloc, cudaFree and their kin"),
}

OPERATOR_FAMILIES: tuple[tuple[str, str], ...] = (
    # (family, regular expression on an operator's name); the first that matches decides
    ("optimizer", r"^Optimizer\."),
    ("accumulate", r"AccumulateGrad"),
    ("backward", ENGINE_OPERATORS),
    *((f"comm {word}", pattern) for word, pattern in COMM_TYPES if word not in ("reduce", "gather", "scatter")),
    ("comm", COMM_OPERATORS),
    ("in place", r"^aten::\w+_$"),
    ("foreach", r"^aten::_(foreach|fused)"),
    (
        "view",
        r"^aten::(_?(reshape|unsafe_view)|view|t|transpose|permute|(un)?squeeze|expand|select|slice|detach|alias)\b",
    ),
    ("new", r"^aten::(empty|zeros|ones|full|new_|arange|rand)"),
    ("copy", r"^aten::(to|_to_copy|copy_|clone|contiguous|pin_memory|item|_local_scalar_dense)\b"),
    ("aten", r"^aten::"),
    ("other library", r"^[\w.]+::"),
)
"""Which operators the host takes about as long for: by what dispatches them more than by what their kernels do."""

LADDER: Mapping[str, Sequence[str]] = {
    "name": ("overhead", "name"),
    "family": ("overhead", "family"),
    "all": ("overhead",),
}
"""Where a cost is looked up, finest first: the samples that share these columns with what is asked for."""

FENCE = 1.5
"""Samples further than this many interquartile ranges outside the quartiles are outliers (Tukey's fences)."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Statistics of samples under ever coarser keys; what is asked for is found under the finest that knows it.

    Attributes
    ----------
    levels
        Name of the level -> its keys and its table: a row a value of the keys, with the statistics.
    """

    levels: Mapping[str, tuple[Sequence[str], pl.DataFrame]]

    @classmethod
    def of(cls, samples: pl.DataFrame, ladder: Mapping[str, Sequence[str]], **statistics: pl.Expr) -> Self:
        """Pool samples under the keys of each level of a ladder; those that lack a level's last key are not in it."""
        known = {level: samples.filter(pl.col(keys[-1]).is_not_null()) for level, keys in ladder.items()}
        return cls({level: (keys, known[level].group_by(keys).agg(**statistics)) for level, keys in ladder.items()})

    def __repr__(self) -> str:
        sizes = ", ".join(f"{table.height:,} by {level}" for level, (_, table) in self.levels.items())
        return f"<Pool of costs: {sizes}>"

    def find(self, asked: pl.DataFrame, *statistics: str) -> pl.DataFrame:
        """`asked` with these statistics and `pooled_from`, the level that knew them; null where none did.

        Columns of those names that `asked` has are replaced.
        """
        found = asked.drop(*statistics, "pooled_from", strict=False)
        columns, level_of = found.columns, pl.lit(None, pl.String)
        for number, (level, (keys, table)) in reversed([*enumerate(self.levels.items())]):
            about = table.select(*keys, *(pl.col(s).alias(f"{s}/{number}") for s in statistics))
            about = about.with_columns(pl.lit(value=True).alias(f"known/{number}"))
            found = found.join(about, on=list(keys), how="left", nulls_equal=True, maintain_order="left")
            level_of = pl.when(f"known/{number}").then(pl.lit(level)).otherwise(level_of)
        numbers = range(len(self.levels))
        coalesced = [pl.coalesce(f"{s}/{n}" for n in numbers).alias(s) for s in statistics]
        return found.select(*columns, *coalesced, pooled_from=level_of)


class Overhead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one overhead costs for a name, a family of names (`pooled_from` "family"), or on the whole ("all").

    `count` samples; `trimmed_us` is their mean without the `outliers`, all else is with these. Times in us.
    """

    overhead: str
    name: str | None
    pooled_from: str
    count: int
    outliers: int
    mean_us: float
    trimmed_us: float
    median_us: float
    p10_us: float
    p90_us: float


class Overheads(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured costs of the host: `overheads(run)` makes one. Encodes to JSON as it is.

    Attributes
    ----------
    rows
        One a name, family or whole of each overhead.
    left_out
        Steps that nothing was taken from, as their times contradict their order.
    """

    rows: tuple[Overhead, ...]
    left_out: int = 0

    def __post_init__(self) -> None:
        """Refuse rows that no lookup could tell apart or would ask for."""
        keys = [(row.overhead, row.pooled_from, row.name) for row in self.rows]
        wrong = [key for key, times in Counter(keys).items() if times > 1 or key[0] not in OVERHEADS]
        if wrong := wrong + [key for key in keys if key[1] not in LADDER]:
            raise CalibrationError(f"overheads have an unknown or a second row {wrong[0]}; measure them again.")

    @property
    def table(self) -> pl.DataFrame:
        """The rows as a table, with the columns of `Overhead`."""
        return pl.DataFrame(msgspec.to_builtins(self.rows), schema=_ROW_SCHEMA)

    def _summary(self) -> pl.DataFrame:
        whole = self.table.filter(pl.col("pooled_from") == "all")
        return whole.drop("name", "pooled_from")

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._caption(), self._summary())]

    def _caption(self) -> str:
        lost = f"; {self.left_out} step(s) left out, which contradict themselves" if self.left_out else ""
        return f"Overheads: {len(self.rows):,} rows (see .table){lost}"

    def find(self, asked: pl.DataFrame, statistic: str | None = None) -> pl.DataFrame:
        """`asked` (columns `overhead`, `name`) with `cost_us` and `pooled_from`: its name, its family, or all.

        The cost is `statistic`, a column of the table. By default it is the mean under a name, since the parts of the
        host's time add up, long ones included; what is far off in a family is likely to be another name's business, so
        there, and on the whole, it is the mean without outliers.

        Raises
        ------
        CalibrationError
            Nothing was measured of an overhead that is asked for; the message says what to measure.
        """
        if statistic is not None and not is_word(statistic, STATISTICS):
            raise InputError(f"no statistic is called {shown(statistic)}; there are: {', '.join(STATISTICS)}.")
        table, levels = self.table.rename({"name": "at"}), {}
        for level, keys in LADDER.items():
            cost_us = statistic or ("mean_us" if level == "name" else "trimmed_us")
            of_level = table.filter(pl.col("pooled_from") == level)
            columns = {"overhead": "overhead"} | ({} if level == "all" else {keys[-1]: "at"}) | {"cost_us": cost_us}
            levels[level] = (keys, of_level.select(**columns))
        found = Pool(levels).find(with_families(_ASKED.check(asked)), "cost_us")
        for overhead, name in found.filter(pl.col("cost_us").is_null()).select("overhead", "name").head(1).iter_rows():
            if overhead not in OVERHEADS:
                raise InputError(f"no overhead is called {shown(overhead)}; there are: {', '.join(OVERHEADS)}.")
            what, record = OVERHEADS[overhead]
            raise CalibrationError(
                f"nothing was measured of {overhead} ({what}), which {shown(name)} is to be priced by; record {record}."
            )
        return found.drop("family")

    def cost(
        self, names: Sequence[str | None], kinds: Sequence[str], statistic: str | None = None
    ) -> NDArray[np.float64]:
        """Cost in us of each overhead of `kinds` for the operator or call of the same place in `names`, shape (n,).

        Examples
        --------
        >>> overheads(run).cost(["aten::mm"], ["T1"]).shape  # us
        (1,)
        """
        if len(names) != len(kinds):
            raise InputError(f"cost takes an overhead for each name: {len(names)} names, {len(kinds)} overheads.")
        asked = pl.DataFrame({"overhead": kinds, "name": names}, schema=dict(_ASKED.columns))
        return self.find(asked, statistic)["cost_us"].to_numpy()


STATISTICS = ("mean_us", "trimmed_us", "median_us", "p10_us", "p90_us")
_ASKED = TableSchema("overhead", {"overhead": pl.String(), "name": pl.String()})
_ROW_SCHEMA: dict[str, pl.DataType] = {
    **_ASKED.columns,
    "pooled_from": pl.String(),
    **dict.fromkeys(("count", "outliers"), pl.Int64()),
    **dict.fromkeys(STATISTICS, pl.Float64()),
}

Source = Run | Recording | Graph | pl.DataFrame


def overheads(source: Source | Iterable[Source]) -> Overheads:
    """What the host costs by one or several recordings.

    Parameters
    ----------
    source
        A run or recording (all its steps but the first and last profiled ones, if it has others), a graph, a table of
        a graph's ops, or several of these. Tables of `build_ops` have waiting in their blocking calls, so these are
        left out, and waits between streams are not known in them: prefer the run. Steps of a run that contradict
        themselves are left out and counted.

    Raises
    ------
    GraphError
        All steps contradict themselves.
    CalibrationError
        There is no host work in any of them.

    Examples
    --------
    >>> overheads(run).table.filter(pl.col("overhead") == "T1")
    """
    one_only = isinstance(source, pl.DataFrame) or not isinstance(source, Iterable)
    sources = [source] if one_only else items_of("source", source, "recordings")
    samples, lost = [], []
    for ops in chain.from_iterable(map(_op_tables, sources)):
        if isinstance(ops, GraphError):
            lost.append(ops)
        else:
            samples += [host_parts(ops), launch_latencies(ops)]
    if lost and not samples:
        raise lost[0]
    together = pl.concat(samples) if samples else pl.DataFrame()
    if together.is_empty():
        raise CalibrationError(
            f"{len(sources)} source(s) without host work: record the host as well (ProfilerActivity.CPU)."
        )
    return msgspec.structs.replace(pooled(together), left_out=len(lost))


def pooled(samples: pl.DataFrame) -> Overheads:
    """Overheads from samples: tables of `host_parts` and `launch_latencies`, concatenated."""
    us = pl.col("dur_ns") / 1000
    low, high = us.quantile(0.25, "linear"), us.quantile(0.75, "linear")
    inside = us.is_between(low - FENCE * (high - low), high + FENCE * (high - low))
    pool = Pool.of(
        with_families(samples),
        LADDER,
        count=pl.len().cast(pl.Int64),
        outliers=(~inside).sum().cast(pl.Int64),
        mean_us=us.mean(),
        trimmed_us=us.filter(inside).mean(),
        median_us=us.median(),
        p10_us=us.quantile(0.1, "linear"),
        p90_us=us.quantile(0.9, "linear"),
    )
    tables = [
        table.with_columns(name=pl.lit(None, pl.String) if level == "all" else keys[-1], pooled_from=pl.lit(level))
        for level, (keys, table) in pool.levels.items()
    ]
    order = pl.col("overhead").replace_strict({overhead: n for n, overhead in enumerate(OVERHEADS)})
    ordered = pl.concat([table.select(*_ROW_SCHEMA) for table in tables]).sort(
        order, "pooled_from", -pl.col("count"), "name"
    )
    return Overheads(tuple(Overhead(**row) for row in ordered.iter_rows(named=True)))


def _op_tables(source: Source) -> Iterator[pl.DataFrame | GraphError]:
    """The op tables of a source, or why a step has none."""
    if isinstance(source, pl.DataFrame):
        yield OPS.check(source)
    elif isinstance(source, Graph):
        yield source.ops
    elif isinstance(source, Run | Recording):
        recording = source if isinstance(source, Recording) else Recording.of(source)
        times = recording.step_times()
        inner = times.filter(~pl.col("edge"))
        for step in (inner if inner.height else times)["step"]:
            try:
                ops: pl.DataFrame | GraphError = build_graph(recording, step).ops
            except GraphError as error:
                ops = error
            yield ops
    else:
        raise InputError(f"overheads takes runs, graphs or op tables; it was given a {type(source).__name__}.")


def with_families(named: pl.DataFrame) -> pl.DataFrame:
    """Add `family`: of a runtime call what it does (`calls.CALL_PATTERNS`), of a gap and an operator its dispatch."""
    names = named.select("name").unique()
    operator = pl.col("name").str.strip_prefix("before ")
    family = pl.coalesce(classify(operator, CALL_PATTERNS), classify(operator, OPERATOR_FAMILIES), pl.lit("annotation"))
    return named.join(names.with_columns(family=family), on="name", how="left", maintain_order="left")


_SAMPLE = ("overhead", "name", "rank", "lane", "dur_ns")


def host_parts(ops: pl.DataFrame) -> pl.DataFrame:
    """The work of every thread cut into overheads: together they are all of it, waiting apart.

    Returns
    -------
    table
        `overhead` (all of `OVERHEADS` but the latency), `name` (of the operator, of the runtime call, or of a gap:
        "before" what follows), `rank`, `lane`, `dur_ns`; a row a part, of no length too.
    """
    waiting = ("wait", "alloc") if _holds_waiting(ops) else ()
    named = _with_calls(ops).filter(pl.col("lane").str.starts_with("cpu:"))
    host = named.filter(pl.col("kind").is_in(["cpu", "gap", "launch", "wait", "alloc"]))
    host = host.sort("rank", "lane", "start_ns", "op_id")
    host = host.with_columns(
        overhead=pl.when(pl.col("call_name").is_not_null() & pl.col("kind").is_in(["launch", "cpu"]))
        .then(pl.lit("T4"))
        .otherwise(pl.col("kind").replace_strict(_OVERHEAD_OF_KIND, default=None))
    )
    own = host.filter(pl.col("overhead").is_not_null() & ~pl.col("kind").is_in(waiting))
    return pl.concat([own.select(_SAMPLE), _operator_parts(host)])


def _holds_waiting(ops: pl.DataFrame) -> bool:
    """Whether these are raw ops: blocking calls with their waiting, and nothing of what streams had still to do."""
    return "launch_ns" in ops.columns


_OVERHEAD_OF_KIND = {"gap": "T1", "wait": "blocking", "alloc": "alloc"}


def _with_calls(ops: pl.DataFrame) -> pl.DataFrame:
    """Ops with `call_name`, and `launches`: whether it is a call that gives a device work."""
    if "call_name" not in ops.columns:
        calls = pl.col("kind").is_in(["launch", "wait", "alloc"])
        ops = ops.with_columns(call_name=pl.when(calls).then("name"))
    names = ops.select("call_name").unique()
    names = names.with_columns(does=classify(pl.col("call_name"), CALL_PATTERNS).fill_null("launch"))
    ops = ops.join(names, on="call_name", how="left", maintain_order="left")
    return ops.with_columns(launches=(pl.col("kind") == "launch") & (pl.col("does") == "launch"))


def _operator_parts(host: pl.DataFrame) -> pl.DataFrame:
    """T2, T3 and T5 of every run of an operator, from the rows of threads in time order.

    A run of an operator is a stretch of rows under its name; two stretches without a call between are two runs.
    """
    where = ["rank", "lane"]
    stretch = pl.col("overhead").is_null()
    name = pl.coalesce("parent", pl.when(stretch).then("name"))
    begins = (name.ne_missing(name.shift(1)) | (stretch & stretch.shift(1))).fill_null(value=True)
    rows = host.with_columns(operator=name, run=(begins | (pl.struct(where) != pl.struct(where).shift(1))).cum_sum())
    rows = rows.filter(pl.col("operator").is_not_null())
    rows = rows.with_columns(part=pl.col("launches").cum_sum().over("run") - pl.col("launches"))
    runs = rows.group_by("run", maintain_order=True).agg(
        pl.col("rank", "lane").first(), name=pl.col("operator").first(), last=pl.col("launches").sum()
    )
    spent = rows.filter(stretch).group_by("run", "part").agg(pl.col("dur_ns").sum())
    parts = runs.with_columns(part=pl.int_ranges(0, pl.col("last") + 1, dtype=pl.UInt32)).explode("part")
    parts = parts.join(spent, on=["run", "part"], how="left", maintain_order="left")
    overhead = (
        pl.when(pl.col("last") == 0).then(pl.lit("T5_host"))
        .when(pl.col("part") == 0).then(pl.lit("T2"))
        .when(pl.col("part") == pl.col("last")).then(pl.lit("T3"))
        .otherwise(pl.lit("T5"))
    )  # fmt: skip
    return parts.with_columns(pl.col("dur_ns").fill_null(0), overhead=overhead).select(_SAMPLE)


def launch_latencies(ops: pl.DataFrame) -> pl.DataFrame:
    """From the end of each launch call to its first work on a stream that had nothing left to do when the call began.

    Of a stream that is not idle the time says how long its queue is. Collectives are left out: when they start depends
    on other ranks. So is the first work of a stream in a table that is not of a graph, since what was before it is not
    known. Columns as in `host_parts`; `name` is that of the launch call, and work that began before its call had ended
    has a time below 0.
    """
    calls = _with_calls(ops).filter("launches").drop_nulls("correlation")
    calls = calls.select(
        "rank",
        "step",
        "correlation",
        "name",
        host="lane",
        call_ns="start_ns",
        end_ns=pl.col("start_ns") + pl.col("dur_ns"),
    )
    on_device = pl.col("kind").is_in([*DEVICE_KINDS, "event", "boundary"]) & pl.col("lane").str.starts_with("gpu")
    work = ops.filter(on_device).sort("rank", "lane", "start_ns", "op_id")
    work = work.with_columns(idle_ns=(pl.col("start_ns") + pl.col("dur_ns")).cum_max().shift(1).over("rank", "lane"))
    work = work.filter(pl.col("kind").is_in(["kernel", "memcpy", "memset"]))
    first = work.unique(["rank", "step", "correlation"], keep="first", maintain_order=True).drop("name")
    idle = (pl.col("idle_ns") <= pl.col("call_ns")).fill_null(value=not _holds_waiting(ops))
    both = first.join(calls, on=["rank", "step", "correlation"]).filter(idle)
    return both.with_columns(overhead=pl.lit("launch_latency"), dur_ns=pl.col("start_ns") - pl.col("end_ns")).select(
        "overhead", "name", "rank", lane="host", dur_ns="dur_ns"
    )
