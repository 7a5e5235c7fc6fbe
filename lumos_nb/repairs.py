"""What is irregular in a recording, and what was made of it: counted, named, in the report of its graphs."""

from __future__ import annotations

import polars as pl

from lumos_nb.errors import GraphError

REPORT = {"what": pl.String(), "rank": pl.Int32(), "count": pl.Int64(), "time_ns": pl.Int64(), "detail": pl.String()}


def counted(what: str | pl.Expr, rows: pl.DataFrame, detail: str) -> pl.DataFrame:
    """Report rows on things of one kind, one row of `rows` each, with `rank` and `time_ns`: how many each rank has."""
    named = pl.lit(what) if isinstance(what, str) else what
    found = rows.group_by("rank", what=named).agg(count=pl.len(), time_ns=pl.col("time_ns").sum())
    found = found.sort("rank", "what").with_columns(detail=pl.lit(detail))
    return found.select(pl.col(name).cast(dtype) for name, dtype in REPORT.items())


def unlaunched(ops: pl.DataFrame) -> pl.DataFrame:
    """How many device ops have no launch: because that was before the window, or because the trace lost it."""
    rows = ops.filter(pl.col("device").is_not_null() & pl.col("launch_ns").is_null())
    backlog = pl.when(pl.col("step").is_null()).then(pl.lit("launched before the window"))
    detail = "device ops that no call in the trace launched: they keep their order on their stream"
    return counted(backlog.otherwise(pl.lit("launches lost")), rows.with_columns(time_ns="dur_ns"), detail)


def step_or_before(step: int) -> pl.Expr:
    """The step of work; of what was launched before the window that before its rank's first, or before `step`."""
    return pl.coalesce("step", pl.col("step").min().over("rank") - 1, pl.lit(step - 1, pl.Int32))


def unmarked() -> pl.DataFrame:
    """That the profiler marked no step."""
    detail = "the profiler marked no step (ProfilerStep#n), so the whole window is taken as step 0"
    return pl.DataFrame([("no step marks", None, 0, None, detail)], schema=REPORT, orient="row")


def one_profile(
    events: pl.DataFrame, marks: pl.DataFrame, profiles: pl.DataFrame | None = None
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Events and step marks of one of several profiles in the same files, and the report of the others.

    The profile of most steps is taken, of several such the last; `profiles` are those of all ranks (`profiles_of`), by
    default of the marks given.
    """
    steps = profiles_of(marks) if profiles is None else profiles
    if steps.is_empty():
        return events, marks, pl.DataFrame(schema=REPORT)
    begins = _begins(marks)
    events, marks = (_of_profile(table, begins) for table in (events, marks))
    here = pl.col("profile") == steps["profile"][-1]
    others = steps["step"][:-1].to_list()
    detail = f"events of {len(others)} other profiles in the same files, of {', '.join(map(str, others))} steps"
    left_out = counted("other profiles left out", events.filter(~here).with_columns(time_ns="dur_ns"), detail)
    return events.filter(here).drop("profile"), marks.filter(here).drop("profile"), left_out


def profiles_of(marks: pl.DataFrame) -> pl.DataFrame:
    """`profile`, and of how many `step`s, that of most steps last; empty if there is only one.

    A thread whose step numbers fall begins another profile, whose steps may bear the numbers of the last one's.

    Raises
    ------
    GraphError
        The ranks hold different numbers of profiles.
    """
    begins = _begins(marks)
    held = (
        marks.select("rank").unique().join(begins, on="rank", how="left").group_by("rank").agg(pl.col("profile").max())
    )
    if held["profile"].n_unique() > 1:
        rank, step, start_ns = _fallen(marks).sort("start_ns").select("rank", "step", "start_ns").row(0)
        raise GraphError(
            f"rank {rank} marks step {step} (ProfilerStep#{step}, at {start_ns} ns) after a step of that or a higher "
            "number: its trace holds more than one profile, and the ranks do not hold the same number of them; give "
            "each profile files of its own, and load one."
        )
    steps = _of_profile(marks, begins).group_by("profile").agg(pl.col("step").n_unique()).sort("step", "profile")
    return steps if begins.height else steps.clear()


def _fallen(marks: pl.DataFrame) -> pl.DataFrame:
    distinct = marks.unique(["rank", "thread", "step", "start_ns"]).sort("rank", "thread", "start_ns", "step")
    return distinct.filter((pl.col("step").diff() <= 0).over("rank", "thread"))


def _begins(marks: pl.DataFrame) -> pl.DataFrame:
    """`rank`, `profile`, `begin_ns`: when each profile but the first begins."""
    nth = pl.int_range(1, pl.len() + 1).over("rank", "thread")
    profiles = _fallen(marks).with_columns(profile=nth).group_by("rank", "profile")
    return profiles.agg(begin_ns=pl.col("start_ns").min()).sort("begin_ns")


def _of_profile(table: pl.DataFrame, begins: pl.DataFrame) -> pl.DataFrame:
    """The table with the number of the `profile` that each row belongs to, by the time at which it starts."""
    rows = table.with_row_index("at").sort("start_ns")
    found = rows.join_asof(begins, left_on="start_ns", right_on="begin_ns", by="rank", check_sortedness=False)
    return found.sort("at").with_columns(pl.col("profile").fill_null(0)).drop("at", "begin_ns")
