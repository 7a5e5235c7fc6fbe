"""The graph of a pipeline schedule on its own: passes of given lengths, and the messages between them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from lumos_nb.errors import GraphError, InputError
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS
from lumos_nb.workloads.llm.schedule import COLUMNS

COMPUTE_LANE = "gpu0:0"
SEND_LANES = {"forward": "gpu0:1", "backward": "gpu0:2"}
"""A rank computes on one stream, and sends activations and gradients on one each."""

Ints = NDArray[np.int64]


def dependencies(schedule: pl.DataFrame) -> pl.DataFrame:
    """What each pass of a schedule waits for.

    The pass before it on its rank; activations of the depth before it, gradients of the depth behind it; of a backward
    pass its own forward pass, of a weight pass its own input pass.

    Parameters
    ----------
    schedule
        As `schedule` gives it, or with the same columns and an order of one's own.

    Returns
    -------
    DataFrame
        `src`, `dst` (rows of `schedule`), `rule` (stream: order on a rank; data), `message` (between two ranks). Each
        pair once.

    Raises
    ------
    GraphError
        The schedule lacks a pass of some micro-batch, or has one twice; the message names it.
    """
    at = _rows_of_passes(schedule)
    forward, back = at["forward"], at["backward_input" if "backward_input" in at else "backward"]
    pairs = [(forward[:-1], forward[1:]), (back[1:], back[:-1]), (forward, back)]
    if "backward_weight" in at:
        pairs.append((back, at["backward_weight"]))
    src, dst = (np.concatenate([pair[end].ravel() for pair in pairs]) for end in (0, 1))
    stage = schedule["stage"].to_numpy()
    order = np.lexsort((schedule["position"].to_numpy(), stage))
    before, after = order[:-1], order[1:]
    before, after = (end[stage[before] == stage[after]] for end in (before, after))
    following = np.full(len(schedule), -1)
    following[before] = after
    is_new = following[src] != dst
    waits = {"stream": (before, after), "data": (src[is_new], dst[is_new])}
    links = pl.concat(
        pl.DataFrame({"src": ends[0], "dst": ends[1]}).with_columns(rule=pl.lit(rule)) for rule, ends in waits.items()
    )
    return links.with_columns(message=pl.Series(stage[links["src"]] != stage[links["dst"]]))


def _rows_of_passes(schedule: pl.DataFrame) -> dict[str, Ints]:
    """Phase -> rows of its passes (depths, micro_batches)."""
    if missing := [c for c in COLUMNS if c not in schedule.columns]:
        raise InputError(f"the schedule lacks column(s) {', '.join(missing)}; schedule(kind, ...) gives one.")
    depth, micro_batch = (schedule[c].to_numpy() for c in ("depth", "micro_batch"))
    found = {}
    for phase in schedule["phase"].cast(pl.String).unique():
        rows = (schedule["phase"] == phase).arg_true().to_numpy().astype(np.int64)
        count = np.zeros((depth.max() + 1, micro_batch.max() + 1), np.int64)
        np.add.at(count, (depth[rows], micro_batch[rows]), 1)
        if (wrong := np.argwhere(count != 1)).size:
            d, m = wrong[0]
            raise GraphError(f"{phase} of micro-batch {m} at depth {d} stands {count[d, m]} times in the schedule.")
        at = np.empty_like(count)
        at[depth[rows], micro_batch[rows]] = rows
        found[phase] = at
    return found


def as_graph(
    schedule: pl.DataFrame,
    dur_ns: Mapping[str, ArrayLike],
    *,
    message_ns: ArrayLike = 0,
    gap_ns: ArrayLike = 0,
) -> Graph:
    """The graph of one step of a schedule: an op a pass, and an op a message on its sender's stream of that direction.

    A sender does not wait for its receivers; messages of one rank and direction go one after the other.

    Parameters
    ----------
    schedule
        As `schedule` gives it.
    dur_ns
        Phase -> how long a pass takes: a number, or an array (stages,), (stages, chunks) or (stages, chunks,
        micro_batches).
    message_ns
        How long a message takes, a number or an array as above, of its sender.
    gap_ns
        Least time between two passes of a rank, a number or an array as above, of the later one.

    Raises
    ------
    InputError
        A phase has no duration, or an array has the wrong shape.
    GraphError
        As `dependencies`.

    Examples
    --------
    >>> plan = schedule("1f1b", stages=4, micro_batches=8)
    >>> replay(as_graph(plan, {"forward": 10, "backward": 20})).step_ns  # (8 + 4 - 1) x (10 + 20)
    330
    """
    waits = dependencies(schedule)
    passes = _passes(schedule, dur_ns)
    sends = _sends(schedule, passes, waits.filter("message"), message_ns)
    here = waits.filter(~pl.col("message"))
    gap = _of_passes("gap_ns", gap_ns, schedule)[here["dst"]]
    lane_before = pl.col("op_id").shift().over("rank", "lane", order_by="position")
    links = [
        here.select("src", "dst", "rule", lag_ns=pl.when(pl.col("rule") == "stream").then(gap).otherwise(0)),
        sends.select(src=lane_before, dst="op_id", rule=pl.lit("stream")).drop_nulls(),
        sends.select("src", dst="op_id", rule=pl.lit("event")),
        sends.select(src="op_id", dst="dst", rule=pl.lit("event")),
    ]
    return _graph(pl.concat([passes, sends.drop("src", "dst")], how="diagonal"), links)


def _passes(schedule: pl.DataFrame, dur_ns: Mapping[str, ArrayLike]) -> pl.DataFrame:
    phases = schedule["phase"].cast(pl.String)
    present = phases.unique().sort().to_list()
    if missing := [phase for phase in present if phase not in dur_ns]:
        raise InputError(f"dur_ns has no {', '.join(missing)}; it has {', '.join(dur_ns) or 'none'}.")
    took = np.zeros(len(schedule), np.int64)
    for phase in present:
        of_phase = (phases == phase).to_numpy()
        took[of_phase] = _of_passes(f"dur_ns[{phase!r}]", dur_ns[phase], schedule)[of_phase]
    return schedule.select(
        "position",
        "micro_batch",
        "chunk",
        "depth",
        op_id=pl.int_range(pl.len(), dtype=pl.Int64),
        rank="stage",
        lane=pl.lit(COMPUTE_LANE),
        kind=pl.lit("kernel"),
        name=phases,
        dur_ns=took,
        phase=phases.str.extract("^(forward|backward)"),
    )


def _sends(schedule: pl.DataFrame, passes: pl.DataFrame, messages: pl.DataFrame, message_ns: ArrayLike) -> pl.DataFrame:
    """An op a message, with `src` and `dst`, the passes between which it goes."""
    return passes[messages["src"]].with_columns(
        messages["src"],
        messages["dst"],
        op_id=len(passes) + pl.int_range(pl.len(), dtype=pl.Int64),
        lane=pl.col("phase").replace_strict(SEND_LANES),
        kind=pl.lit("comm"),
        name=pl.format("send {}", "phase"),
        dur_ns=_of_passes("message_ns", message_ns, schedule)[messages["src"]],
        collective=pl.lit("send"),
        group=pl.lit("pp"),
        group_size=pl.lit(2, pl.Int32),
        peer=schedule["stage"][messages["dst"]],
    )


def _graph(ops: pl.DataFrame, links: list[pl.DataFrame]) -> Graph:
    edges = pl.concat(links, how="diagonal_relaxed").with_columns(
        pl.col("lag_ns").fill_null(0), from_start=False, evidence=pl.lit("exact"), hard=True
    )
    ops = ops.with_columns(step=0, device=0, start_ns=0)
    ops = ops.with_columns(pl.lit(None).alias(c) for c in OPS.columns if c not in ops.columns)
    ops = ops.select(*(pl.col(c).cast(dtype) for c, dtype in OPS.columns.items()), "chunk", "depth")
    edges = edges.select(pl.col(c).cast(dtype) for c, dtype in EDGES.columns.items())
    return Graph(OPS.check(ops), EDGES.check(edges), step=0)


def _of_passes(name: str, values: ArrayLike, schedule: pl.DataFrame) -> Ints:
    """`values` of each pass (n,), in whole ns."""
    shape = tuple(schedule.select(pl.max("stage", "chunk", "micro_batch") + 1).row(0))
    given = np.asarray(values, np.float64)
    try:
        full = np.broadcast_to(given.reshape(given.shape + (1,) * (3 - given.ndim)), shape) if given.ndim else given
        full = np.broadcast_to(full, shape)
    except ValueError as error:
        raise InputError(
            f"{name} has shape {given.shape}; give a number, or an array of the first axes of "
            f"(stages, chunks, micro-batches) = {shape}."
        ) from error
    found = full[tuple(schedule[c].to_numpy() for c in ("stage", "chunk", "micro_batch"))]
    rounded: Ints = np.rint(found).astype(np.int64)
    return rounded
