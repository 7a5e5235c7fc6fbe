"""Pipeline schedules as data: in what order each rank runs its passes, and what each waits for.

A *schedule* is a frame of one row a pass: `stage` (pipeline rank), `position` (order on that rank), `phase` (forward,
backward; where a backward pass is split, backward_input and backward_weight), `micro_batch`, `chunk` (of the rank's
layers) and `depth` (of that chunk in the whole model: its layers come after those of depth - 1).
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.errors import LayoutError, is_whole, require_kinds, shown
from lumos_nb.layout import CHUNKS as CHUNKS

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
    require_kinds(kind=(kind, str))
    if kind not in CHUNKS:
        raise LayoutError(f"no schedule is called {shown(kind)}; there are: {', '.join(CHUNKS)}.")
    for name, size in {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}.items():
        if not is_whole(size, 1):
            raise LayoutError(f"{name}={shown(size)}: a schedule has at least one; give a whole number.")
    fewest, most = CHUNKS[kind]
    if not fewest <= chunks <= most:
        takes = f"{fewest} chunk(s)" if fewest == most else f"{fewest} chunks or more"
        raise LayoutError(f"chunks={shown(chunks)}: {kind} takes {takes} a rank.")
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
