"""How long a layer and the ends of a model take in each phase, for every cell of a search at once.

A pass of a stage is the sum of its layers and ends, and these depend on few axes. Of each distinct cell of them a model
of two layers of each kind is laid out as a rank of its own and replayed, all ranks in one graph: so the rules of what
waits for what, and of what slows each other, are those of an estimate. A layer's time is the distance between two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.costs.calibration import Calibration
from lumos_nb.layout import Cluster, Parallelism, Training, Transformer
from lumos_nb.workloads.contention import Timed, slowed
from lumos_nb.workloads.llm.assembly import COMPUTE, assembled
from lumos_nb.workloads.llm.layers import Rank
from lumos_nb.workloads.llm.stages import in_order
from lumos_nb.workloads.pricing import place, with_prices
from lumos_nb.workloads.steps import Step
from lumos_nb.workloads.surcharges import Surcharges
from lumos_nb.workloads.work_rows import Block, Row, as_table

Floats = NDArray[np.float64]

CELL = ("tp", "sequence_parallel", "cp", "cp_mode", "ep", "etp", "micro_batch", "recompute", "apart")
"""Axes that what a layer takes depends on, and whether its gradients are added up by kernels of their own."""
PHASES = ("forward", "backward_input", "backward_weight")
GROUPS = ("tp", "cp", "ep", "etp")
"""Groups that a layer's collectives join; the first ranks of a job are one of each kind."""
COPIES = 2
PARTS = ("first", "plain", "before", "experts", "behind", "last")
"""What a pass is made of: the ends of the model, layers without experts, and those with in three."""
OF_KIND = {False: ("plain",), True: ("before", "experts", "behind")}
"""Parts of a layer without and with experts, as they run forward."""


class Job(NamedTuple):
    """What is searched for, without the layout: as for `estimate`."""

    model: Transformer
    train: Training
    cluster: Cluster
    calibration: Calibration
    surcharges: Surcharges

    def priced(self, table: pl.DataFrame) -> pl.DataFrame:
        """Rows with `nodes` and `gpus`, with what they take in a step."""
        return self.surcharges.applied(with_prices(table, self.cluster, self.calibration), self.train, self.cluster)

    def slowed(self, step: Step) -> Timed:
        """A step with what overlaps slowed."""
        return slowed(step, self.surcharges.compute_slowed, self.surcharges.comm_slowed)


class PassTimes(NamedTuple):
    """What the parts of a pass take, by cell, phase and part (cells, 3, parts); times in us.

    Whole backward passes are in the second phase.

    Attributes
    ----------
    took
        How much longer a part of `PARTS` makes a pass.
    lone
        Time of its kernels that run beside no transfer.
    issued
        What the host takes to issue it.
    kernels
        How many it has.
    message_bytes
        What one stage sends to the next (cells,).
    """

    took: Floats
    lone: Floats
    issued: Floats
    kernels: Floats
    message_bytes: NDArray[np.int64]


def pass_times(job: Job, cells: pl.DataFrame) -> Callable[[NDArray[np.int64], bool], PassTimes]:
    """Lay out and price every cell, once; what it returns replays some of them.

    Parameters
    ----------
    job
        What is trained, and what prices it; micro-batch and recomputation are the cells'.
    cells
        Distinct values of `CELL`.

    Returns
    -------
    function
        Of the numbers of cells (n,), and of whether backward passes are split (zero-bubble schedules): their times.
    """
    model = job.model
    kinds = tuple(dict.fromkeys(sorted(model.has_experts(layer) for layer in range(model.layers))))
    ranks = [_rank(model, cell, job.train) for cell in cells.iter_rows(named=True)]
    table, own = _laid_out(ranks, kinds)
    table = job.priced(_placed(table, ranks, job.cluster))
    launch_us, table = table["launch_us"].to_numpy(), table.drop("launch_us")
    is_kernel = (table["kind"] == "compute").to_numpy()
    tables = [table[int(a) : int(b)] for a, b in pairwise(own)]
    message_bytes = np.array([rank.width(rank.rows * model.hidden) for rank in ranks])

    sections = _sections(kinds)

    def times(chosen: NDArray[np.int64], split: bool) -> PassTimes:
        ends, lone = _replayed(job, [tables[i] for i in chosen], cells[chosen], len(sections), split)
        issued, kernels = np.zeros((2, cells.height, len(PHASES), len(sections)))
        at = tuple(table.select("cell", _phase(split=split), "section").to_numpy().T)
        np.add.at(issued, at, launch_us)
        np.add.at(kernels, at, is_kernel)
        one = [sections.index(part) if part in sections else -1 for part in PARTS]
        there = np.array([part in sections for part in PARTS])
        once = [array[:, :, one] * there for array in (lone, issued[chosen], kernels[chosen])]
        return PassTimes(_apart(ends, sections), once[0], once[1], once[2], message_bytes[chosen])

    return times


def _sections(kinds: Sequence[bool]) -> list[str]:
    """The parts of a pass over both ends and `COPIES` layers of each kind, as they run forward."""
    return ["first", *(part for kind in kinds for part in OF_KIND[kind] * COPIES), "last"]


def _replayed(
    job: Job, tables: Sequence[pl.DataFrame], cells: pl.DataFrame, sections: int, split: bool
) -> tuple[Floats, Floats]:
    """When sections end, and their time of kernels alone: each cell is a rank; what a layout decides is one graph."""
    ends, lone = np.zeros((2, cells.height, len(PHASES), sections))
    one = msgspec.structs.replace(job.train, micro_batch=1, global_batch=1)
    for (tp, mode), group in cells.with_row_index().group_by("tp" if one.overlap_tp else pl.lit(1), "cp_mode"):
        chosen = group["index"].to_numpy()
        layout = Parallelism(tp=tp, cp_mode=mode, pp=len(chosen), schedule="zb-h1" if split else "gpipe")
        together = pl.concat([tables[i] for i in chosen]).with_columns(depth=pl.col("cell").rle_id().cast(pl.Int32))
        step = assembled(together, layout, one)
        timed = job.slowed(step)
        about = step.table.select("section", phase=_phase(split=split))[step.row]
        at = chosen[step.rank], about["phase"].to_numpy(), about["section"].to_numpy()
        np.maximum.at(ends, at, timed.end_ns / 1e3)
        took_us = step.table["dur_us"].to_numpy()[step.row]
        np.add.at(lone, at, (step.lane == COMPUTE) * (took_us - timed.shared_ns / 1e3))
    return ends, lone


def _rank(model: Transformer, cell: dict[str, Any], train: Training) -> Rank:
    """The smallest job with a cell's groups."""
    changed = {name: cell.pop(name) for name in ("micro_batch", "recompute")}
    room, zero = cell["ep"] * (cell["etp"] or cell["tp"]), 0 if cell.pop("apart") else 3
    train = msgspec.structs.replace(train, global_batch=2 * room * changed["micro_batch"], **changed)
    return Rank(model, Parallelism(dp=room, zero=zero, **cell), train)


def _laid_out(ranks: Sequence[Rank], kinds: Sequence[bool]) -> tuple[pl.DataFrame, NDArray[np.int64]]:
    """The passes of every cell over the sections, and where each cell's begin."""
    model, sections = ranks[0].model, _sections(kinds)
    layer_of = {kind: next(i for i in range(model.layers) if model.has_experts(i) == kind) for kind in kinds}
    weights = {kind: in_order(model.weights(layer)) for kind, layer in layer_of.items()}
    rows: list[Row] = []
    parts: list[tuple[int, int, int, int]] = []  # cell, section, first row, row behind the last
    for cell, rank in enumerate(ranks):
        blocks: dict[tuple[str, ...], Block] = {("first",): rank.first(), ("last",): rank.last()}
        blocks |= {OF_KIND[kind]: rank.layer(weights[kind]) for kind in kinds}
        places = {}
        for names, block in blocks.items():
            for phase, made in zip(("forward", "backward"), block, strict=True):
                turn = names if phase == "forward" else names[::-1]
                for name, (begin, end) in zip(turn, _cut(made, len(names)), strict=True):
                    places[name, phase] = (len(rows) + begin, len(rows) + end)
                rows += [{"phase": phase, "when": "each"} | row for row in made]
        numbered = list(enumerate(sections))
        parts += [(cell, number, *places[name, "forward"]) for number, name in numbered]
        parts += [(cell, number, *places[name, "backward"]) for number, name in reversed(numbered)]
    table = as_table(rows)
    cell, section, begin, end = np.array(parts).T
    at = np.concatenate([np.arange(a, b) for a, b in zip(begin, end, strict=True)])
    about = {"cell": np.repeat(cell, end - begin), "section": np.repeat(section, end - begin)}
    own = np.searchsorted(about["cell"], np.arange(len(ranks) + 1))
    layer = pl.when(pl.col("section").is_between(1, len(sections) - 2)).then("section").cast(pl.Int32)
    return table[at].with_columns(**{k: pl.Series(v) for k, v in about.items()}).with_columns(layer=layer), own


def _cut(rows: Sequence[Row], parts: int) -> list[tuple[int, int]]:
    """Where the parts of a layer begin and end: one, or what is before, of and behind its experts."""
    if parts == 1:
        return [(0, len(rows))]
    experts = [i for i, row in enumerate(rows) if row["part"] == "experts"]
    bounds = [0, experts[0], experts[-1] + 1, len(rows)]
    return list(pairwise(bounds))


def _placed(table: pl.DataFrame, ranks: Sequence[Rank], cluster: Cluster) -> pl.DataFrame:
    """With `nodes` and `gpus` of each collective's group."""
    layouts = {rank.layout for rank in ranks}
    places = {layout: [(group, *place(layout.groups(group), cluster)) for group in GROUPS] for layout in layouts}
    rows = [(cell, *one) for cell, rank in enumerate(ranks) for one in places[rank.layout]]
    schema = {"cell": pl.Int64, "group": pl.String, "nodes": pl.Int64, "gpus": pl.Int64}
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    return table.join(frame, on=["cell", "group"], how="left", maintain_order="left")


def _phase(*, split: bool) -> pl.Expr:
    """Number of the pass that a row is in."""
    numbers = {"forward": 0, "backward": 1, "backward_weight": 1 + split}
    return pl.col("phase").replace_strict(numbers, return_dtype=pl.Int64)


def _apart(ends: Floats, sections: Sequence[str]) -> Floats:
    """Times of parts, from when sections end: forward from first to last, backward the other way."""
    begin, found = np.zeros(len(ends)), np.zeros((*ends.shape[:2], len(PARTS)))
    for phase in range(len(PHASES)):
        turn = slice(None, None, 1 if phase == 0 else -1)
        done = np.maximum(np.maximum.accumulate(ends[:, phase, turn], axis=1), begin[:, None])
        took = np.diff(done, axis=1, prepend=begin[:, None])[:, turn]
        begin = done[:, -1]
        for i, part in enumerate(PARTS[1:], start=1):
            where = [number for number, name in enumerate(sections) if name == part]
            if where:  # of two equal layers the one that runs later
                found[:, phase, i] = took[:, where[-1 if phase == 0 else 0]]
        found[:, phase, 0] = took.sum(axis=1) - COPIES * found[:, phase, 1:-1].sum(axis=1) - found[:, phase, -1]
    return found
