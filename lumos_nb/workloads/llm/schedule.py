"""Pipeline schedules as data: in what order each rank runs its passes, what each waits for, and the graph of both.

A *schedule* is a frame of one row a pass: `stage` (pipeline rank), `position` (order on that rank), `phase` (forward,
backward; where a backward pass is split, backward_input and backward_weight), `micro_batch`, `chunk` (of the rank's
layers) and `depth` (of that chunk in the whole model: its layers come after those of depth - 1).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from lumos_nb.errors import GraphError, InputError, LayoutError
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS

CHUNKS = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved": (2, 2**16), "zb-h1": (1, 1), "zb-v": (2, 2)}
"""Kind of schedule -> fewest and most chunks of layers that a rank holds."""

LEADS = {"1f1b": 1, "interleaved": 2, "zb-h1": 1}
"""Kind -> how many more passes than the rank behind it a rank runs forward before its first backward pass."""

PHASES = ("forward", "backward", "backward_input", "backward_weight")
SPLIT = ("forward", "backward_input", "backward_weight")

COLUMNS = {
    "stage": pl.Int32(),
    "position": pl.Int32(),
    "phase": pl.Enum(PHASES),
    "micro_batch": pl.Int32(),
    "chunk": pl.Int32(),
    "depth": pl.Int32(),
}

COMPUTE_LANE = "gpu0:0"
SEND_LANES = {"forward": "gpu0:1", "backward": "gpu0:2"}
"""A rank computes on one stream, and sends activations and gradients on one each."""

Ints = NDArray[np.int64]


def schedule(kind: str, stages: int, micro_batches: int, chunks: int = 1) -> pl.DataFrame:
    """In what order each of `stages` ranks runs the passes of `micro_batches`.

    `gpipe` (Huang et al. 2019) runs all forward passes first; `1f1b` and `interleaved` are Megatron's, the latter with
    `chunks` of layers a rank and groups of `stages` micro-batches that go through one chunk together (Narayanan et al.
    2021); `zb-h1` is 1F1B that puts off what nobody waits for, the gradients of weights, on rank s by s micro-batches,
    so that no rank holds more than the first one of 1F1B; `zb-v` has two chunks a rank, of which the second goes the
    ranks back (both Qi et al. 2023; `zb-v` as for forward, input and weight passes of equal length).

    Parameters
    ----------
    kind
        A key of `CHUNKS`.
    stages, micro_batches, chunks
        Pipeline ranks, micro-batches a step and chunks a rank, at least one each.

    Returns
    -------
    DataFrame
        One row a pass, `COLUMNS`, by rank and position.

    Raises
    ------
    LayoutError
        No such schedule, or not of these sizes.

    Examples
    --------
    >>> first = schedule("1f1b", stages=2, micro_batches=3).filter(stage=0)
    >>> [f"{phase[0]}{n}" for phase, n in first.select("phase", "micro_batch").iter_rows()]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    stage, phase, micro_batch, chunk, depth = order(kind, stages, micro_batches, chunks)
    names = PHASES[:2] if kind in ("gpipe", "1f1b", "interleaved") else SPLIT
    table = pl.DataFrame(
        {
            "stage": stage,
            "phase": pl.Series(phase).replace_strict(dict(enumerate(names)), return_dtype=COLUMNS["phase"]),
            "micro_batch": micro_batch,
            "chunk": chunk,
            "depth": depth,
        }
    )
    numbered = table.with_columns(position=pl.int_range(pl.len()).over("stage"))
    return numbered.select(pl.col(c).cast(dtype) for c, dtype in COLUMNS.items())


def order(kind: str, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The same as arrays: stage, phase (its number), micro-batch, chunk and depth of each pass."""
    _check(kind, stages, micro_batches, chunks)
    make = _of_folded if kind == "zb-v" else _of_leads
    stage, phase, micro_batch, chunk = make(kind, stages, micro_batches, chunks)
    back = (kind == "zb-v") & (chunk % 2 == 1)
    return stage, phase, micro_batch, chunk, chunk * stages + np.where(back, stages - 1 - stage, stage)


def _check(kind: str, stages: int, micro_batches: int, chunks: int) -> None:
    if kind not in CHUNKS:
        raise LayoutError(f"no schedule is called {kind!r}; there are: {', '.join(CHUNKS)}.")
    for name, size in {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}.items():
        if type(size) is not int or size < 1:
            raise LayoutError(f"{name}={size!r}: a schedule has at least one; give a whole number.")
    fewest, most = CHUNKS[kind]
    if not fewest <= chunks <= most:
        takes = f"{fewest} chunk(s)" if fewest == most else f"{fewest} chunks or more"
        raise LayoutError(f"chunks={chunks}: {kind} takes {takes} a rank.")
    if kind == "interleaved" and micro_batches % stages:
        raise LayoutError(
            f"micro_batches={micro_batches}: interleaved takes a multiple of the {stages} stages; change either."
        )


def _of_leads(kind: str, stages: int, micro_batches: int, chunks: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Stage, phase, micro-batch and chunk of each pass where backward passes follow forward ones at a distance.

    In step t a rank runs its t-th forward pass, its (t - warm-up)-th backward pass and, if these are split, the weight
    pass that is `stage` behind that.
    """
    passes = micro_batches * chunks
    stage, number = np.arange(stages), np.arange(passes)
    behind = LEADS.get(kind, 0) * (stages - 1 - stage) + (chunks - 1) * stages
    warm_up = np.full(stages, passes) if kind == "gpipe" else behind
    steps_later = [np.zeros_like(stage), warm_up, warm_up + stage][: 3 if kind == "zb-h1" else 2]
    phases = len(steps_later)
    step = np.stack(steps_later, axis=1)[:, :, None] + number  # (stages, phases, passes)
    order = np.argsort((step * phases + np.arange(phases)[:, None]).reshape(stages, -1), axis=1)
    phase, number = np.divmod(order, passes)
    group, within = np.divmod(number, stages * chunks)
    turn, member = np.divmod(within, stages)
    chunk = np.where(phase == 0, turn, chunks - 1 - turn)
    every = np.broadcast_to(stage[:, None], order.shape)
    return every.ravel(), phase.ravel(), (group * stages + member).ravel(), chunk.ravel()


def _of_folded(kind: str, stages: int, micro_batches: int, chunks: int) -> tuple[Ints, Ints, Ints, Ints]:
    """The same for `zb-v`: sections of repeated passes, micro-batches counted up within each phase and chunk.

    A schedule of few micro-batches is that of 2 x stages - 1 without those that are not there.
    """
    planned = max(2 * stages - 1, micro_batches)
    first, second = [(phase, 0) for phase in range(3)], [(phase, 1) for phase in range(3)]
    ranks = []
    for stage in range(stages):
        behind = stages - stage
        sections = [
            ([first[0]], 2 * behind - 1),
            ([second[0], first[0]], stage),
            (second, behind),
            ([*first, *second], planned - stages - behind + 1),
            ([*first[1:], *second], behind - 1),
            ([first[1], second[1]], stage),
            (first[1:], behind),
            (second[2:], stage),
            (first[2:], stage),
        ]
        passes = np.concatenate([np.tile(np.array(section), (times, 1)) for section, times in sections])
        ranks.append(np.column_stack([np.full(len(passes), stage), passes]))
    table = pl.DataFrame(np.concatenate(ranks), schema=["stage", "phase", "chunk"])
    table = table.with_columns(micro_batch=pl.int_range(pl.len()).over("stage", "phase", "chunk"))
    table = table.filter(pl.col("micro_batch") < micro_batches)
    stage_of, phase, micro_batch, chunk = (table[c].to_numpy() for c in ("stage", "phase", "micro_batch", "chunk"))
    return stage_of, phase, micro_batch, chunk


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


def in_flight(schedule: pl.DataFrame) -> pl.DataFrame:
    """How many micro-batches' activations each rank holds at most, in passes of one chunk.

    Returns
    -------
    DataFrame
        `stage`, `in_flight` (forward passes whose backward or input pass has not ended), `until_weight` (whose weight
        pass has not: the same where backward passes are not split).
    """
    backward = {"in_flight": ("backward", "backward_input"), "until_weight": ("backward", "backward_weight")}
    phase = pl.col("phase").cast(pl.String)
    held = {
        name: ((phase == "forward").cast(pl.Int32) - phase.is_in(ends).cast(pl.Int32)).cum_sum().max()
        for name, ends in backward.items()
    }
    return schedule.sort("stage", "position").group_by("stage", maintain_order=True).agg(**held)


def bubble_ns(
    kind: str,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    forward_ns: float,
    backward_ns: float,
    weight_ns: float = 0,
) -> float:
    """Idle time of a step in the ideal case, in closed form: step less the work of one rank.

    Ideal are passes of equal length on all ranks and chunks, and messages and gaps of none. With p stages, v chunks and
    passes *of one chunk* f, b and w: (p - 1)(f + b) for gpipe and 1f1b, with any number of micro-batches, and for
    interleaved (of a rank's whole passes a v-th of that: Narayanan et al. 2021); (p - 1) max(f, b, f + b - w) for zb-h1
    with at least p micro-batches (Qi et al. 2023 give the last term, for a w that is the shortest); (p - 1) f for zb-v
    with f = b = w and at least 2p - 1 micro-batches: just the time until the last rank begins.

    Parameters
    ----------
    kind, stages, micro_batches, chunks
        As for `schedule`.
    forward_ns, backward_ns, weight_ns
        A pass of one chunk: forward, backward (of split ones the part for the input), the part for weights.

    Raises
    ------
    LayoutError
        There is no such schedule, or no closed form for these sizes and times; `replay` takes all.

    Examples
    --------
    >>> bubble_ns("interleaved", stages=4, micro_batches=8, chunks=2, forward_ns=5, backward_ns=10)
    45
    """
    _check(kind, stages, micro_batches, chunks)
    if kind == "zb-v":
        known, each = micro_batches >= 2 * stages - 1 and forward_ns == backward_ns == weight_ns, forward_ns
    elif kind == "zb-h1":
        known = micro_batches >= stages
        each = max(forward_ns, backward_ns, forward_ns + backward_ns - weight_ns)
    else:
        known, each = weight_ns == 0, forward_ns + backward_ns
    if not known:
        raise LayoutError(
            f"no closed form for {kind}, {stages} stages, {micro_batches} micro-batches and passes of {forward_ns}, "
            f"{backward_ns} and {weight_ns} ns; replay as_graph(schedule(...), ...) instead."
        )
    return (stages - 1) * each


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
    >>> from lumos_nb import replay
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
