"""How much a step's time varies by itself: replays with durations drawn from other steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb._replay_kernels import Int64s, last_ops
from lumos_nb._replay_plan import Plan
from lumos_nb.display import format_ns
from lumos_nb.errors import ABOVE_0, InputError, is_number, require_whole, shown
from lumos_nb.evaluate import chosen_steps, leave_one_out
from lumos_nb.graph import Graph, Recording
from lumos_nb.lanes import lacks_ranks
from lumos_nb.symmetry import Layout, fill_ranks
from lumos_nb.traces.run import Run

DRAWS = 200
LEVEL = 0.9

_SAME_OP = ("rank", "lane", "kind", "name", "number")
"""What names an op in every step: the how manieth of its name on its lane."""


def jitter(
    run: Run | Recording, steps: Sequence[int] | None = None, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0
) -> pl.DataFrame:
    """Predict the spread of each step's time from the other steps, and whether the measured time lies in it.

    The graph of the step before (after, for the first) is replayed `draws` times. Each time every rank takes the
    durations of all its ops from one other step, drawn for it alone: what varies with the rank and the step stays
    together, and a join meets the latest of independent ranks. Medians in place of draws would make a pipeline too
    fast, since a join waits for the latest. Nothing of the predicted step is used.

    Parameters
    ----------
    run
        A run with at least three steps whose beginning is known.
    steps
        The steps to predict and to draw from; None takes all but the first and last profiled ones, which the profiler's
        own start and end disturb, or all but the first where that leaves fewer than three.
    level
        The share of steps that the interval is to hold, between 0 and 1.
    draws
        Replays a step.
    seed
        Of the random numbers: equal seeds give equal tables.

    Returns
    -------
    table
        A row a step: `step`, `measured_ns`, `low_ns`, `median_ns`, `high_ns`, `inside`, and the same interval from the
        other steps' measured times alone: `null_low_ns`, `null_high_ns`, `null_inside`. The coverage is the mean of
        `inside`; hold it against `level`, and the width against the null's.

    Raises
    ------
    GraphError
        There are fewer than three such steps.
    InputError
        `level` or `draws` is out of range.

    Examples
    --------
    >>> table = ln.jitter(run, [3, 4, 5], draws=20)
    >>> table["step"].to_list()
    [3, 4, 5]
    """
    level = _checked(level, draws, seed)
    recording = run if isinstance(run, Recording) else Recording.of(run)
    times = recording.step_times()
    measured = dict(times.select("step", "step_ns").iter_rows())
    inner = times.filter(~pl.col("edge"))["step"].to_list()
    chosen = chosen_steps(recording, inner if steps is None and len(inner) > 2 else steps, least=3)
    rng, sides = np.random.default_rng(seed), [(1 - level) / 2, 0.5, (1 + level) / 2]
    rows = []
    for before, own, others in leave_one_out(recording, chosen):
        drawn = resampled_steps(others[before], list(others.values()), draws=draws, rng=rng)
        low, middle, high = (int(x) for x in np.quantile(drawn, sides))
        null_low, _, null_high = (int(x) for x in np.quantile([measured[step] for step in others], sides))
        time_ns = measured[own.step]
        rows.append((own.step, time_ns, low, middle, high, low <= time_ns <= high, null_low, null_high))
    names = ["step", "measured_ns", "low_ns", "median_ns", "high_ns", "inside", "null_low_ns", "null_high_ns"]
    inside_null = pl.col("measured_ns").is_between("null_low_ns", "null_high_ns")
    return pl.DataFrame(rows, schema=names, orient="row").with_columns(null_inside=inside_null)


def _checked(level: float, draws: object, seed: object) -> float:
    if not is_number(level, ABOVE_0, math.nextafter(1, 0)):
        raise InputError(
            f"level is the share of steps that the interval is to hold, between 0 and 1, not {shown(level)}."
        )
    require_whole(1, 10**6, draws=draws)
    require_whole(0, seed=seed)
    return float(level)


def resampled_steps(
    graph: Graph, others: Sequence[Graph], *, draws: int = DRAWS, rng: np.random.Generator | None = None
) -> Int64s:
    """Step times of `graph` (draws,) with each rank's durations from one of `others`, drawn for every rank and replay.

    An op that a drawn step lacks keeps the duration that it has in `graph`; so do boundary rows and lags.
    """
    rng = rng or np.random.default_rng()
    plan = Plan.of(graph)
    choices = _durations(graph, others)[plan.row]
    ranks, rank_at = np.unique(graph.ops["rank"].to_numpy()[plan.row], return_inverse=True)
    at = np.arange(len(plan.row))
    drawn = rng.integers(0, choices.shape[1], (draws, ranks.size))
    return np.array([_step_ns(plan, choices[at, pick[rank_at]]) for pick in drawn], np.int64)


def _step_ns(plan: Plan, dur_ns: Int64s) -> int:
    """Time of the last step with other durations, (n,) in the plan's order."""
    end = replace(plan, dur_ns=dur_ns).starts() + dur_ns
    ends = end[last_ops(end, plan.group, plan.row, len(plan.groups))]
    steps = plan.groups["step"].to_numpy()  # in order
    by_step = np.maximum.reduceat(ends, np.flatnonzero(np.diff(steps, prepend=steps[0] - 1)))
    return int(by_step[-1] - (by_step[-2] if by_step.size > 1 else 0))


def _durations(graph: Graph, others: Sequence[Graph]) -> NDArray[np.int64]:
    """Durations of `graph`'s ops in each of `others`, (n, len(others))."""
    own = _named(graph)
    fixed = (graph.ops["kind"] == "boundary").to_numpy()
    columns = []
    for other in others:
        same = own.join(_named(other), on=list(_SAME_OP), how="left", suffix="_there", maintain_order="left")
        there = same.select(pl.coalesce("dur_ns_there", "dur_ns")).to_series().to_numpy()
        columns.append(np.where(fixed, own["dur_ns"].to_numpy(), there))
    return np.column_stack(columns)


def _named(graph: Graph) -> pl.DataFrame:
    number = pl.int_range(pl.len()).over("rank", "lane", "kind", "name", order_by="start_ns")
    return graph.ops.select("rank", "lane", "kind", "name", "dur_ns", number=number)


NEAR_STEPS = 8
"""How late absent ranks were is drawn from so many of the steps around the one that is asked for, and from itself."""


def step_interval(
    run: Run | Recording,
    step: int | None = None,
    *,
    replicas: Sequence[Sequence[int]] | None = None,
    level: float = LEVEL,
    draws: int = 10 * DRAWS,
    seed: int = 0,
) -> pl.DataFrame:
    """The time of a step of which some ranks have no trace, with an interval for what these may change about it.

    A step lasts from the latest end over ranks of the step before to its own latest end. What traced ranks waited for
    absent ones is measured, so absent ranks can change it only by ending after all traced ones, in this step or in the
    one before. How much later is drawn, for each rank that can be filled (`fill_ranks`) and both times, from how much
    later than all other traced ranks its replicas ended the steps around. Nothing is replayed: a copy with another
    step's durations would be late for what the traced ranks know it was in time for.

    Parameters
    ----------
    run
        A run of which some ranks have a trace, not yet filled.
    step, replicas
        As in `build_graph` and in `fill_ranks`.
    level
        The share of steps that the interval is to hold, between 0 and 1.
    draws
        Of the absent ranks' lateness.
    seed
        Of the random numbers: equal seeds give equal intervals.

    Returns
    -------
    table
        One row: `step`, `step_ns` (on traced ranks), `low_ns`, `median_ns`, `high_ns` (null with one traced rank, which
        tells nothing of how far ranks are apart), `level`, `ranks_measured`, `ranks_filled`, `ranks_absent` (of whose
        lateness the interval knows nothing), `transfers_estimated` (as in the filled step's graph).

    Raises
    ------
    InputError
        `level` or `draws` is out of range, or as in `fill_ranks`.

    Examples
    --------
    >>> some = [datasets.path("gpt-grid") / f"rank-{rank}.json.gz" for rank in range(17)]  # of 20
    >>> step_interval(load_run(some), step=4, draws=20)
    """
    level = _checked(level, draws, seed)
    traced = run if isinstance(run, Recording) else Recording.of(run)
    filled, layout = fill_ranks(traced, replicas=replicas), Layout.of(traced, replicas)
    step = traced.known_step(traced.default_step() if step is None else step)
    measured_ns = traced.step_times().filter(step=step)["step_ns"].item()
    interval: list[int | None] = [None] * 3
    if len(layout.traced) > 1:
        at = traced.steps.index(step)
        near = sorted(traced.steps[:-1] or traced.steps, key=lambda one: abs(traced.steps.index(one) - at))
        late = [_lateness(traced, one) for one in near[: NEAR_STEPS + 1]]
        rng, later = np.random.default_rng(seed), np.zeros((2, draws), np.int64)
        for rank in filled.filled:
            known = [ranks[like] for ranks in late for like in layout.equals(rank)]
            later = np.maximum(later, rng.choice(known, later.shape))
        quantiles = np.quantile(later[1] - later[0], [(1 - level) / 2, 0.5, (1 + level) / 2])
        interval = [measured_ns + round(change_ns) for change_ns in quantiles]
    row = {"step": step, "step_ns": measured_ns} | dict(zip(("low_ns", "median_ns", "high_ns"), interval, strict=True))
    counts = {"ranks_measured": len(layout.traced), "ranks_filled": len(filled.filled)}
    row |= {"level": level, **counts, "ranks_absent": len(layout.kin) - sum(counts.values())}
    is_estimated = (pl.col("step") == step) & (pl.col("kind") == "comm") & lacks_ranks(traced.world_size, filled.filled)
    estimated = filled.ops.filter(is_estimated).height
    return pl.DataFrame(row | {"transfers_estimated": estimated}, schema_overrides=dict.fromkeys(_INTERVAL, pl.Int64))


_INTERVAL = ("step", "step_ns", "low_ns", "median_ns", "high_ns", "transfers_estimated")


def _lateness(traced: Recording, step: int) -> dict[int, int]:
    """How much later than all others each rank ended a step; below 0 for all but the last."""
    at_ns = dict(traced.rank_starts(step + 1).select("rank", "at_ns").iter_rows())
    return {rank: end_ns - max(at_ns[other] for other in at_ns if other != rank) for rank, end_ns in at_ns.items()}


def interval_in_words(recording: Recording, step: int) -> str:
    """A sentence on what ranks without a trace may change about a step, empty where all ranks have one."""
    if recording.world_size <= recording.ops["rank"].n_unique():
        return ""
    found = step_interval(recording, step).row(0, named=True)
    if found["high_ns"] is None or not found["ranks_filled"]:
        return " What ranks without a trace may change about it is not known: there are no two traced replicas of them."
    between = f"{format_ns(found['low_ns'])} to {format_ns(found['high_ns'])}"
    unknown = f"; of {found['ranks_absent']} more nothing is known" if found["ranks_absent"] else ""
    return f" With {found['ranks_filled']} ranks without a trace it takes {between} ({found['level']:.0%}){unknown}."
