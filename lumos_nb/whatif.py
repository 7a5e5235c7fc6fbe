"""Edits of a graph: what a step would take if some of its ops were faster, gone, more, or fused.

Each edit takes a graph and gives another, so that edits compose and what was given stays as it was. Ops are chosen by a
polars expression over the op table: `pl.col("name").str.contains("nccl") & (pl.col("rank") == 3)`. It never chooses
what was going on before the step (kind `boundary`) or the points at which ranks meet (`join`): the first was measured,
the second follow from their members. Where a change also changes what earlier steps leave behind, edit first and then
`repeat`: that also counts the launch queue anew.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import polars as pl

from lumos_nb import rewire
from lumos_nb._replay_plan import LONGEST_NS, Plan
from lumos_nb.errors import ABOVE_0, InputError, ScenarioError, is_number, is_word, require_flags, require_kinds, shown
from lumos_nb.graph import Graph
from lumos_nb.schema import DEVICE_KINDS, require

UNCHOSEN_KINDS = ("boundary", "join")
INSERTED_KINDS = ("cpu", "gap", "launch", "alloc", "unexplained", *DEVICE_KINDS)
FUSED_KINDS = ("cpu", "gap", "kernel", "memcpy", "memset")


def scale(graph: Graph, where: pl.Expr, by: float | pl.Expr) -> Graph:
    """Multiply the durations of ops, and round them to whole ns.

    Durations are work: of a collective the transfer, never the waiting for its ranks.

    Parameters
    ----------
    graph
        Ops and edges.
    where
        Boolean expression over `graph.ops`.
    by
        A finite number >= 0, or an expression over `graph.ops` that gives one for each op that is chosen.

    Raises
    ------
    ScenarioError
        The expression cannot be evaluated, is not boolean or chooses nothing; a factor is negative or not finite.

    Examples
    --------
    >>> on_device = pl.col("kind").is_in(["kernel", "memcpy", "memset"])
    >>> slow = whatif.scale(graph, (pl.col("rank") == 3) & on_device, 1.2)  # rank 3 on a slower GPU
    >>> replay(slow).step_ns >= replay(graph).step_ns
    True
    """
    chosen = _chosen(graph, where)
    return replace(graph, ops=_scaled(graph.ops, "dur_ns", chosen, by))


def scale_lags(graph: Graph, where: pl.Expr, by: float | pl.Expr) -> Graph:
    """Multiply the lags of edges, as `scale` does the durations of ops.

    Parameters
    ----------
    where
        Boolean expression over `graph.edges` with the columns of the op that each leads to.
    by
        A finite number >= 0, or an expression over those columns.

    Examples
    --------
    >>> whatif.scale_lags(graph, (pl.col("rule") == "launch") & (pl.col("rank") == 0), 0.5)  # launch latency
    """
    require(graph, "edges")
    led_to = graph.ops.rename({"op_id": "dst"})
    edges = graph.edges.join(led_to, on="dst", how="left", maintain_order="left")
    chosen = _mask(edges, where, "edge")
    if not chosen.any():
        rules = ", ".join(graph.edges["rule"].drop_nulls().unique().sort())
        raise ScenarioError(f"{where} chooses no edge; the graph's rules are {rules or 'none'}.")
    return replace(graph, edges=_scaled(edges, "lag_ns", chosen, by, "edge").select(graph.edges.columns))


def network(graph: Graph, where: pl.Expr, *, bandwidth_factor: float = 1.0, latency_ns: int = 0) -> Graph:
    """Another network for some of the communication: transfers alone, since waiting follows from the graph.

    Parameters
    ----------
    where
        Boolean expression over `graph.ops`; of what it chooses only rows of kind `comm` are changed.
    bandwidth_factor
        How many times as fast as now: each transfer takes its time divided by this.
    latency_ns
        Then added to each transfer; below 0 where latency falls. No transfer takes less than 0.

    Examples
    --------
    >>> whatif.network(graph, pl.col("group") == "tp", bandwidth_factor=2)
    """
    given: object = bandwidth_factor  # whose kind nobody has looked at
    if not (isinstance(given, float) and given == math.inf) and not is_number(bandwidth_factor, ABOVE_0):
        raise ScenarioError(f"bandwidth_factor={shown(bandwidth_factor)}: give a number above 0, 2 for twice as fast.")
    if not is_number(latency_ns, 1 - LONGEST_NS, LONGEST_NS - 1) or latency_ns % 1:
        raise ScenarioError(f"latency_ns={shown(latency_ns)}: give whole ns, below 0 where latency falls.")
    chosen = _chosen(graph, where, only=("comm",))
    ops = _scaled(graph.ops, "dur_ns", chosen, 1 / bandwidth_factor)
    later = (pl.col("dur_ns") + int(latency_ns)).clip(0)
    return replace(graph, ops=ops.with_columns(dur_ns=pl.when(chosen).then(later).otherwise("dur_ns")))


def remove(graph: Graph, where: pl.Expr, *, launches: bool = True) -> Graph:
    """Take ops out; what came after them on their lane, or else waited for them, now comes after what was before them.

    With an op go the delay before it, its arrival if it is a collective's, the launches all of whose work is gone, and
    the joins all of whose members are. What an op waited for on its own account (its launch, an event, its peers, room
    in the queue) nobody waits for in its place, so removing a blocking call also removes the wait. Ranks that still
    take part in a collective don't wait for those that no longer do.

    Parameters
    ----------
    where
        Boolean expression over `graph.ops`.
    launches
        Whether launches go with their work. The host's other work to issue it stays.

    Raises
    ------
    ScenarioError
        The expression cannot be evaluated, is not boolean, or chooses nothing.

    Examples
    --------
    >>> replay(whatif.remove(graph, pl.col("kind") == "comm")).step_ns  # no communication at all
    """
    require_flags(launches=launches)
    chosen = _chosen(graph, where)
    gone = rewire.with_companions(graph, graph.ops.filter(chosen)["op_id"])
    graph = replace(graph, edges=rewire.undelayed(graph.edges, gone))
    if launches:
        gone = rewire.and_launches(graph, gone)
    joins = graph.ops.filter(pl.col("kind") == "join").select(dst="op_id")
    gone = rewire.and_all_of(graph.edges.join(joins, on="dst", how="semi"), "dst", "src", gone)
    return rewire.without(graph, gone)


def insert(
    graph: Graph,
    where: pl.Expr,
    name: str,
    dur_ns: int | pl.Expr,
    *,
    kind: str,
    before: bool = False,
    lane: str | None = None,
) -> Graph:
    """Put an op after each chosen op, or before it; a delay is such an op too.

    On the chosen op's own lane whatever waited for its end waits for the inserted op's, but for what it launched; an op
    inserted before another waits for all that this one does, and one before a collective holds up its arrival. On
    another lane of its rank the op starts after the chosen one, in the order in which the graph issues that lane's
    work, and nothing but that lane waits for it.

    Parameters
    ----------
    where
        Boolean expression over `graph.ops`.
    name, kind
        Of the new ops: kind is one of `INSERTED_KINDS`. Rank, step, phase, layer and micro-batch are the chosen op's.
    dur_ns
        Whole ns >= 0, or an expression over `graph.ops` for each chosen op.
    before
        Before each chosen op; only on its own lane.
    lane
        Another lane, "gpu<device>:<stream>" or "cpu:<thread>", which may be new.

    Examples
    --------
    >>> whatif.insert(graph, pl.col("name") == "mlp up gemm", "cast", 3_000, kind="kernel")
    >>> first = pl.col("name").str.starts_with("embedding tokens")
    >>> whatif.insert(graph, first, "late input", 5_000_000, kind="unexplained", before=True)
    """
    require(graph, "edges")
    graph = replace(graph, ops=graph.ops[Plan.of(graph).row])  # in the order of the edges
    chosen = _chosen(graph, where)
    require_flags(before=before)
    if not is_word(kind, INSERTED_KINDS):
        raise ScenarioError(
            f"an op of kind {shown(kind)} cannot be inserted; choose one of {', '.join(INSERTED_KINDS)}."
        )
    _check_name(name)
    _check_lane(lane, before)
    place, n = pl.int_range(pl.len()).cast(pl.Float64), int(graph.ops["op_id"].max()) + 1  # type: ignore[arg-type]
    beside = graph.ops.select(
        beside="op_id", place=place, start_ns=pl.col("start_ns") + (0 if before else pl.col("dur_ns"))
    )
    new = graph.ops.with_columns(dur_ns=_whole_ns(graph.ops, dur_ns, chosen)).filter(chosen)
    new = new.with_columns(beside=rewire.heads(graph, new["op_id"]) if before else "op_id").drop("start_ns")
    new = new.join(beside, on="beside", maintain_order="left").select(
        *("rank", "step", "phase", "layer", "micro_batch", "parent", "start_ns", "dur_ns", "beside"),
        op_id=n + pl.int_range(pl.len(), dtype=pl.Int64),
        name=pl.lit(name),
        kind=pl.lit(kind),
        lane="lane" if lane is None else pl.lit(lane),
        device="device" if lane is None else pl.lit(lane).str.extract(r"^gpu(\d+):").cast(pl.Int32),
        place=pl.col("place") + (-0.5 if before else 0.5),
    )  # fmt: skip
    ops = pl.concat([graph.ops.with_columns(place=place), new.drop("beside")], how="diagonal")
    ops = ops.sort("place", maintain_order=True).drop("place")
    if lane is not None:
        return replace(graph, ops=ops, edges=rewire.on_lane(graph.edges, ops, new))
    return replace(graph, ops=ops, edges=rewire.before(graph, new) if before else rewire.after(graph, new))


def fuse(graph: Graph, where: pl.Expr, name: str, *, by: float = 1.0, dur_ns: int | pl.Expr | None = None) -> Graph:
    """Make one op of each run of chosen ops that follow one another on a lane, launched once.

    A run ends before an op that waits for something besides its launch and the op before it, and at events and
    collectives, which lie between ops on a lane. The fused op has the place and the launch of the run's first; the
    other launches go, and the delays that were before the others. The host's other work to issue them stays.

    Parameters
    ----------
    where
        Boolean expression over `graph.ops`; of what it chooses only rows of `FUSED_KINDS` are fused.
    name
        Of the fused ops.
    by
        The fused op takes this times what its run took.
    dur_ns
        What it takes instead: whole ns >= 0, or an expression over `graph.ops`, of the run's first op.

    Raises
    ------
    ScenarioError
        No two chosen ops follow one another.

    Examples
    --------
    >>> whatif.fuse(graph, pl.col("name").str.contains("rope|qkv"), "fused", by=0.4)
    """
    chosen = _chosen(graph, where, only=FUSED_KINDS)
    _check_name(name)
    if not is_number(by):
        raise ScenarioError(f"by={_words(by)}: give a number, or dur_ns, which may be an expression.")
    if by != 1.0 and dur_ns is not None:
        raise ScenarioError(
            f"by={shown(by)} and dur_ns={shown(dur_ns)} both say what a fused op takes; give one of them."
        )
    given = graph.ops.select("op_id", given_ns=pl.lit(None) if dur_ns is None else _whole_ns(graph.ops, dur_ns, chosen))
    runs = rewire.runs(graph, chosen).join(given, on="op_id")
    first = runs.group_by("run").agg(
        pl.col("op_id", "given_ns").first(),
        sum_ns=pl.col("dur_ns").sum(),
        flops=pl.when(pl.col("flops").is_not_null().all()).then(pl.col("flops").sum()),
    )
    first = _scaled(first, "sum_ns", pl.Series([True] * len(first), dtype=pl.Boolean), by)
    later = runs.join(first, on="op_id", how="anti")
    into = later.join(first.select("run", first="op_id"), on="run").select(src="op_id", first="first")
    gone = rewire.with_companions(graph, later["op_id"])
    launches = rewire.and_launches(graph, gone)
    edges = graph.edges.filter(~pl.col("dst").is_in(gone.implode()))
    edges = edges.join(into, on="src", how="left", maintain_order="left")
    edges = edges.with_columns(src=pl.coalesce("first", "src")).select(graph.edges.columns)
    fused = first.select("op_id", "flops", dur_ns=pl.coalesce("given_ns", "sum_ns"), name=pl.lit(name))
    fused = fused.with_columns(bytes=pl.lit(None, pl.Float64))
    ops = graph.ops.filter(~pl.col("op_id").is_in(gone.implode())).update(fused, on="op_id", include_nulls=True)
    return rewire.without(replace(graph, ops=ops, edges=edges), launches.filter(~launches.is_in(gone.implode())))


def _check_lane(lane: str | None, before: bool) -> None:
    """Raise InputError of what is no text, ScenarioError of what is no lane, or none on which an op can be inserted."""
    require_kinds(lane=(lane, str | None))
    if lane is not None and (before or not re.match(r"gpu[0-9]{1,9}:|cpu:", lane)):
        raise ScenarioError(
            f"lane={shown(lane)}, before={shown(before)}: on another lane, 'gpu<device>:<stream>' or 'cpu:<thread>', "
            "an op comes only after the chosen one; leave out either."
        )


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise InputError(f"name={shown(name)}: give the text that the new ops are to be called.")


def _evaluated(table: pl.DataFrame, asked: object, what: str, dtype: pl.DataType | None = None) -> pl.Series:
    """A column of the table's height, cast to `dtype` (null where that fails)."""
    try:
        expression = asked if isinstance(asked, pl.Expr) else pl.lit(asked)
        column = table.select(pl.int_range(pl.len()), asked=expression)["asked"]
        if dtype is not None and column.dtype.is_nested():
            raise TypeError(f"it gives {column.dtype}")
        return column if dtype is None else column.cast(dtype, strict=False)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, TypeError, ValueError, OverflowError) as error:
        raise ScenarioError(
            f"{_words(asked)} cannot be evaluated on the {what} table: {str(error).splitlines()[0]}; "
            f"its columns are {', '.join(table.columns)}."
        ) from error


def _words(asked: object) -> str:
    """An expression as it reads, a value as errors quote it."""
    return str(asked) if isinstance(asked, pl.Expr) else shown(asked)


def _mask(table: pl.DataFrame, where: object, what: str) -> pl.Series:
    if not isinstance(where, pl.Expr):
        raise InputError(
            f"where is a {type(where).__name__}; give a polars expression over the {what} table, "
            "such as pl.col('kind') == 'kernel'."
        )
    mask = _evaluated(table, where, what)
    if mask.dtype != pl.Boolean:
        raise ScenarioError(f"{where} gives {mask.dtype}, not Boolean; compare it with something.")
    return mask.fill_null(value=False)


def _chosen(graph: Graph, where: object, only: tuple[str, ...] | None = None) -> pl.Series:
    """Which rows of the op table are chosen."""
    require(graph, "edges")
    mask = _mask(graph.ops, where, "op")
    kind = graph.ops["kind"]
    chosen = mask & (~kind.is_in(UNCHOSEN_KINDS) if only is None else kind.is_in(only))
    if not chosen.any():
        kinds = ", ".join(sorted(set(kind.filter(mask).drop_nulls())))
        found = f"only ops of kind {kinds}, which this leaves alone" if kinds else "no op"
        names = ", ".join(graph.ops["name"].drop_nulls().value_counts(sort=True)["name"].head(5).to_list())
        raise ScenarioError(f"{where} chooses {found}; the graph's most frequent names are {names}.")
    return chosen


def _scaled(table: pl.DataFrame, column: str, chosen: pl.Series, by: object, what: str = "op") -> pl.DataFrame:
    """The table with an int64 column of ns multiplied where `chosen`."""
    factor = _factors(table, by, what)
    wrong = chosen & ~(factor.is_finite() & (factor >= 0)).fill_null(value=False)
    scaled = (table[column] * factor).fill_nan(None)
    for row in (wrong | (chosen & (scaled >= LONGEST_NS))).arg_true().head(1):
        raise ScenarioError(
            f"row {row} of {column} {table[column][row]} would be multiplied by {factor[row]} (by={by}); "
            "give a finite factor >= 0 whose product stays below 2**62 ns."
        )
    product = pl.when(chosen).then(scaled.round()).otherwise(0).cast(pl.Int64)
    return table.with_columns(pl.when(chosen).then(product).otherwise(column).alias(column))


def _factors(table: pl.DataFrame, by: object, what: str) -> pl.Series:
    """A factor a row, as floats. A number must be one by `errors.is_number`, as the scales of a sweep."""
    if not isinstance(by, pl.Expr) and not is_number(by, 0):
        raise ScenarioError(
            f"by={shown(by)}: give a finite factor >= 0, or an expression that gives one for each {what}."
        )
    found = _evaluated(table, by if isinstance(by, pl.Expr) else float(by), what)  # type: ignore[arg-type]
    if not (found.dtype.is_numeric() or found.dtype == pl.Null):
        raise ScenarioError(f"by={by}: it gives {found.dtype}; give a finite factor >= 0 for each {what}.")
    return found.cast(pl.Float64)


def _whole_ns(table: pl.DataFrame, dur_ns: object, chosen: pl.Series) -> pl.Series:
    given = _evaluated(table, dur_ns, "op")
    values = _evaluated(table, dur_ns, "op", pl.Int64())
    wrong = chosen & ~values.is_between(0, LONGEST_NS, closed="left").fill_null(value=False)
    if not given.dtype.is_integer() or wrong.any():
        found = given.filter(wrong)[0] if given.dtype.is_integer() else f"{given.dtype}"
        raise ScenarioError(f"dur_ns={_words(dur_ns)} gives {found}; give whole ns, 0 or more, as an integer.")
    return values
