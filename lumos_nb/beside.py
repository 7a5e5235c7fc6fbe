"""A run's files: what it is called by them, and what lies beside them, the times of steps that no profiler slowed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from lumos_nb.csv_files import read_numbers
from lumos_nb.display import format_ns, how_many
from lumos_nb.errors import RunError, require_kinds
from lumos_nb.traces.run import Run


def files_beside(run: Run, *patterns: str) -> list[Path]:
    """Files of such names in the folder of a run's traces; none of several folders, an archive, or made-up events."""
    folders = {Path(path).parent for path in run.ranks["path"].drop_nulls()}
    if len(folders) != 1:
        return []
    folder = folders.pop()
    return sorted(file for pattern in patterns for file in folder.glob(pattern))


def timed_steps(run: Run) -> pl.DataFrame:
    """How long steps took before the profiler began, of a run that `capture` or a generated program recorded.

    Parameters
    ----------
    run
        What `load_run` gives; beside its traces lies `steps.csv`, or one such file a rank.

    Returns
    -------
    DataFrame
        One row a step: `step`, counted from 0, and `wall_ns` of its slowest rank. Without rows where there is no file.

    Raises
    ------
    InputError
        It is no run.
    RunError
        A file is no table of numbers with these columns, or holds what is no step or no time.

    Examples
    --------
    >>> timed_steps(run)["wall_ns"].median() / 1e6
    """
    require_kinds(run=(run, Run))
    rows = read_numbers(files_beside(run, "steps.csv", "steps-[0-9]*.csv"), ["step", "wall_ns"], RunError)
    is_step = (pl.col("step") == pl.col("step").round()) & pl.col("step").is_between(0, 2**53)
    if (odd := rows.filter(~(is_step & pl.col("wall_ns").is_between(0, 2**53)))).height:
        step, wall_ns = odd.row(0)
        raise RunError(f"steps.csv has a step {step:g} of {wall_ns:g} ns; give steps counted from 0, and times in ns.")
    return rows.group_by("step").agg(pl.col("wall_ns").max()).sort("step").cast(pl.Int64)


def timed_in_words(run: Run, profiled_ns: float) -> str:
    """A sentence on how much longer steps take with the profiler; nothing where no file tells."""
    try:
        timed_ns = timed_steps(run)["wall_ns"].to_numpy()
    except RunError as error:  # anybody may have such a file
        return f" {error}"
    if not len(timed_ns) or not (median_ns := float(np.median(timed_ns))):
        return ""
    steps = how_many(len(timed_ns), "step")
    busier = " (less: others used the machine meanwhile)" if profiled_ns < median_ns else ""
    return (
        f" Before the profiler began, {steps} took {format_ns(median_ns)} in the median (steps.csv): those with it take"
        f" {profiled_ns / median_ns:.2f} times as long{busier}."
    )


def run_in_words(run: Run, world_size: int) -> str:
    """What a run is called in a heading: its file or folder, and how many ranks it has."""
    held, files = run.ranks.height, run.ranks["path"].drop_nulls().unique()
    name = "events of no file"
    if len(files):
        name = Path(files[0]).name if len(files) == 1 else Path(files[0]).absolute().parent.name
    if held < world_size:
        return f"{name}: {held} of {world_size} ranks, what the others did is estimated"
    return f"{name}, {how_many(world_size, 'rank')}"
