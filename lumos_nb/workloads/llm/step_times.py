"""The step time of thousands of layouts at once: `screen`.

Prices and rules are those of `estimate`; what is left out is how passes meet inside a rank. A pass is as long as its
layers, and what replicas and messages do beside it makes it longer by how much they overlap. In what order passes run
is followed one by one, for as many micro-batches as it takes until the pipeline repeats itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.transformer import Transformer
from lumos_nb.workloads.llm._step_kernels import GATHER, GATHER_LEFT, READY, REDUCE, step_us, topological
from lumos_nb.workloads.llm.pass_times import CELL, OF_KIND, PARTS, Job, PassTimes, pass_times
from lumos_nb.workloads.llm.replica_times import TIMES, UNITS, replica_times
from lumos_nb.workloads.llm.rounds import SPLIT_SCHEDULES, Rounds
from lumos_nb.workloads.llm.schedule import order
from lumos_nb.workloads.work_rows import WORK

Floats = NDArray[np.float64]
UInts = NDArray[np.uint32]


def screen(job: Job, layouts: pl.DataFrame) -> Floats:
    """Step time in s of every layout (n,).

    Parameters
    ----------
    job
        What is trained, and what prices it; micro-batch and recomputation are the layouts'.
    layouts
        A frame with the columns `candidates.AXES`, of layouts that can be, all on as many GPUs as the cluster has.
    """
    found = np.zeros(layouts.height)
    numbered = layouts.with_row_index("layout").with_columns(
        count=job.train.global_batch // (pl.col("micro_batch") * pl.col("dp"))
    )
    numbered = numbered.with_columns(apart=(pl.col("zero") < 3) & (not job.train.fused_grads))
    cells = numbered.select(CELL).unique(maintain_order=True)
    numbered = numbered.join(cells.with_row_index("cell"), on=CELL, how="left", maintain_order="left")
    times_of = pass_times(job, cells)
    stages, kinds = _stages(job.model, numbered)
    stages, is_split = replica_times(job, stages), pl.col("schedule").is_in(SPLIT_SCHEDULES)
    for split in (False, True):
        some = numbered.filter(is_split == split)
        if not some.height:
            continue
        chosen, cell = np.unique(some["cell"].to_numpy(), return_inverse=True)
        some, own = some.with_columns(cell=cell), stages.filter(is_split == split)
        own = own.with_columns(cell=np.searchsorted(chosen, own["cell"].to_numpy()))
        arrays = _Arrays.of(job, own, some, times_of(chosen, split))
        shared = ["schedule", "pp", "chunks", "count", pl.col("zero") == 3]
        for (kind, pp, chunks, count, gathers), group in some.with_row_index("at").group_by(shared):
            at = group["at"].to_numpy().astype(np.int64)
            full = max(1 + split + 4 * (split and gathers), math.ceil((32 if split and gathers else 8) / pp))
            rounds = Rounds.of(count, pp, full)
            step = [arrays.step_us(at, _order(kind, pp, chunks, n), kinds[pp * chunks], job) for n in rounds.counts]
            found[group["layout"].to_numpy()] = rounds.total(step) / 1e6
    return found


@lru_cache(maxsize=1024)
def _order(kind: str, pp: int, chunks: int, micro_batches: int) -> tuple[UInts, UInts]:
    """Passes in an order that waits follow, and the pipeline rank of each depth."""
    stage, phase, micro_batch, chunk, depth = order(kind, pp, micro_batches, chunks)
    closes = phase == phase.max()
    turn = np.arange(len(stage))
    last = np.zeros((pp, chunks), np.int64)
    np.maximum.at(last, (stage[closes], chunk[closes]), turn[closes])
    first, ends = (phase == 0) & (micro_batch == 0), closes & (turn == last[stage, chunk])
    listed = np.column_stack([stage, depth, phase, micro_batch, first, ends]).astype(np.int32)
    begins = np.searchsorted(stage, np.arange(pp + 1)).astype(np.int32)
    rank_of = np.zeros(pp * chunks, np.uint32)
    rank_of[depth] = stage
    return topological(begins, listed, pp * chunks, micro_batches, pp, phase.max() == 2), rank_of


def _stages(model: Transformer, layouts: pl.DataFrame) -> tuple[pl.DataFrame, dict[int, UInts]]:
    """The distinct stages of each layout, and by how many there are in all: which of them each is.

    Stages are alike that have as many layers of each kind and the same ends of the model.
    """
    experts = np.cumsum([0, *(model.has_experts(layer) for layer in range(model.layers))])
    kinds: dict[int, UInts] = {}
    tables = []
    for depths in layouts.select(pl.col("pp") * pl.col("chunks")).to_series().unique():
        begin = np.arange(depths) * (model.layers // depths)
        end = begin + model.layers // depths
        routed = experts[end] - experts[begin]
        made = np.column_stack([end - begin - routed, routed, begin == 0, end == model.layers])
        distinct, first, kind = np.unique(made, axis=0, return_index=True, return_inverse=True)
        kinds[depths] = kind.astype(np.uint32).ravel()
        columns = dict(zip(("dense", "routed", "first", "last"), distinct.T, strict=True))
        tables.append(pl.DataFrame({"depths": np.full(len(first), depths), **columns, "begin": begin[first]}))
    about = {"depths": pl.col("pp") * pl.col("chunks"), "folded": pl.col("schedule") == "zb-v"}
    stages = layouts.with_columns(**about).join(pl.concat(tables), on="depths", how="left", maintain_order="left_right")
    return stages, kinds


def _messages(job: Job, times: PassTimes) -> tuple[Floats, float]:
    """What a message between stages takes, inside a node and between two, us: (cells, 2); and the host to issue it."""
    if job.cluster.gpus == 1:  # nobody to send to, and no fabric that would price it
        return np.zeros((len(times.message_bytes), 2)), 0.0
    sizes, of = np.unique(times.message_bytes, return_inverse=True)
    far = min(2, job.cluster.nodes)
    rows = [
        {"kind": "comm", "collective": "send", "size_bytes": int(size), "nodes": nodes, "gpus": 2}
        for size in sizes
        for nodes in (1 if job.cluster.gpus_per_node > 1 else far, far)
    ]
    places = {"nodes": pl.Int64(), "gpus": pl.Int64()}
    table = job.priced(pl.DataFrame(rows, schema={**WORK, **places}))
    return table["dur_us"].to_numpy().reshape(-1, 2)[of], float(table["launch_us"][0])


def _issued(stages: pl.DataFrame, issued: Floats, message: float) -> Floats:
    """What the host takes to issue a pass (stages, 3): its parts, its messages, gathered weights and sums."""
    issue: Floats = issued.sum(axis=2)
    zero = stages["zero"].to_numpy() == 3
    closing = 2 if (issue[:, 2] > 0).any() else 1
    issue[:, :2] += message * (2 - stages.select(pl.col("first") + pl.col("last")).to_numpy())
    issue[:, :2] += (stages["gather_issue_us"].to_numpy() * zero)[:, None]
    issue[:, closing] += stages["reduce_issue_us"].to_numpy() * (stages["zero"].to_numpy() >= 2)
    return issue


def _left_us(left: Floats, took: Floats, head: Floats, kernels: Floats) -> Floats:
    """How long a forward pass goes on behind the last new weights (stages,): they are a share `left` of all bytes.

    A bucket is waited for where its share of the bytes begins among the kernels; those of the `head` are few, and long.
    """
    of_head = kernels[:, -1] / np.maximum(kernels.sum(axis=1), 1)
    behind: Floats = np.where(
        left < of_head,
        head * left / np.maximum(of_head, 1e-9),
        head + (took - head) * (left - of_head) / np.maximum(1 - of_head, 1e-9),
    )
    return behind


@dataclass(frozen=True)
class _Arrays:
    """What the kernel takes: by stage `about` passes and `replicas`, of each layout those from `begins` on."""

    begins: NDArray[np.int64]
    about: Floats
    replicas: Floats
    message: Floats
    block: NDArray[np.int64]
    each: NDArray[np.bool_]

    @classmethod
    def of(cls, job: Job, stages: pl.DataFrame, layouts: pl.DataFrame, times: PassTimes) -> Self:
        """From a frame of the stages of all layouts."""
        cell, routed = stages["cell"].to_numpy(), ["routed"] * len(OF_KIND[True])
        counts = np.column_stack([stages[name].to_numpy() for name in ("first", "dense", *routed, "last")])
        took, (lone, issued, kernels) = times.took[cell], (array[cell] * counts[:, None] for array in times[1:4])
        message, message_issue = _messages(job, times)
        passes, replicas = _with_units(job, stages, counts, took, lone)
        head, left = took[:, 0, -1] * counts[:, -1], replicas[:, GATHER_LEFT]
        replicas[:, GATHER_LEFT] = _left_us(left, passes[0][:, 0], head, kernels[:, 0])
        about = np.stack([*passes[:2], _issued(stages, issued, message_issue), *passes[2:]], axis=2)
        kinds = stages.group_by("layout", maintain_order=True).len()["len"].to_numpy().astype(np.int64)
        block = layouts.select(pl.col("tp") * pl.col("cp") * pl.col("dp")).to_series().to_numpy()
        each = (layouts["zero"] == 2).to_numpy()
        return cls(np.cumsum(kinds) - kinds, about, replicas, message[layouts["cell"].to_numpy()], block, each)

    def step_us(self, at: NDArray[np.int64], passes: tuple[UInts, UInts], kinds: UInts, job: Job) -> Floats:
        """Step times of some layouts that share a schedule."""
        rows = self.begins[at, None] + np.arange(kinds.max() + 1)
        found = np.zeros(len(at))
        step_us(
            passes[0], kinds, passes[1], self.about[rows], self.replicas[rows], self.message[at], self.block[at],
            self.each[at], job.cluster.gpus_per_node, job.train.overlap_pp, job.train.overlap_grads, found,
        )  # fmt: skip
        return found


def _with_units(
    job: Job, stages: pl.DataFrame, counts: Floats, took: Floats, lone: Floats
) -> tuple[list[Floats], Floats]:
    """What passes take with what ZeRO 3 gathers and adds up in them, and what replicas do beside passes.

    A lane of its own gathers a unit's weights from when the unit before begins, and adds up gradients when a unit is
    done, before the unit after the next is gathered. So a pass goes at the pace of the slower of the two but for its
    ends: its first weights are gathered before it (`NEEDS`), its last sums done behind it (`ENDS`).

    `counts` are the parts of each stage (stages, parts), `took` the times of one (stages, 3, parts), `lone` of all.
    """
    time = {name: stages[name].to_numpy() for name in TIMES}
    zero, closing = stages["zero"].to_numpy() == 3, 2 if (took[:, 2] > 0).any() else 1
    lanes = {f"{what} {unit}": stages[f"{what} {unit}"].to_numpy() * zero for what in WHATS for unit in UNITS}
    inner = counts[:, None, 1:-1]
    own, free = (took[:, :, 1:-1] * inner).sum(axis=2), lone[:, :, 1:-1].sum(axis=2)
    ends, lane = took[:, :, [0, -1]] * counts[:, None, [0, -1]], np.zeros_like(own)
    weights, sums = job.train.overlap_weights, job.train.overlap_grads
    for what, phases, overlaps in (
        ("gather", (0, 1), weights),
        ("reduce", (closing,), sums and (weights or closing == 2)),
    ):
        of_all = sum(lanes[f"{what} {unit}"] * counts[:, at] for unit, at in UNIT_AT.items())
        for phase in phases:
            if overlaps:
                lane[:, phase] += of_all
            else:  # a lane in order: what waits for weights waits for the sums before them
                ends[:, phase, 0] += of_all + (what == "gather" and phase == 0) * lanes["gather root"]
    beside = np.minimum(lane / np.maximum(own, 1e-9), 1)
    slower = 1 + job.surcharges.compute_slowed * beside * free / np.maximum(own, 1e-9)
    busy = 1 + job.surcharges.comm_slowed * np.minimum(free / np.maximum(np.maximum(lane, own), 1e-9), 1)
    took = took * slower[:, :, None]
    pace, needs, behind = np.zeros_like(own), np.full_like(own, -np.inf), np.full_like(own, -np.inf)
    for phase in range(2):
        slow_lanes = {name: values * busy[:, phase] * weights for name, values in lanes.items()}
        merged = phase == closing and sums
        pace[:, phase], first = _paced(counts, took[:, phase], slow_lanes, back=phase == 1, sums=merged)
        needs[:, phase] = first - ends[:, phase, -phase] if weights else 0.0
    if weights:
        needs[:, 0] = np.maximum(needs[:, 0], 0) + lanes["gather root"]
        routed = took[:, 0, EXPERTS] + took[:, 0, BEHIND]
        behind[:, 0] = -np.where(counts[:, EXPERTS] > 0, routed, took[:, 0, PLAIN])
    if sums:
        behind[:, closing] = _left(counts, took[:, closing], lanes, lane[:, closing], closing) + lanes["reduce root"]
    else:
        ends[:, closing, 0] += lanes["reduce root"]
    dur = ends.sum(axis=2) + np.maximum(own * slower, pace)
    slowed = job.surcharges.compute_slowed * (lone.sum(axis=2) - beside * free) / np.maximum(dur, 1e-9)
    replicas = np.column_stack([time[name] for name in TIMES])
    several = replicas[:, GATHER_LEFT] < 1  # buckets of new weights, which come beside the pass
    replicas[several, GATHER] *= 1 + job.surcharges.comm_slowed
    every = stages["zero"].to_numpy() == 2  # sums of every micro-batch run beside kernels most of the time
    replicas[every, REDUCE] *= (
        1 + job.surcharges.comm_slowed * np.minimum(free / np.maximum(own, 1e-9), 1)[every, closing]
    )
    replicas[zero, REDUCE : READY + 1] = 0, 0, 1
    needs, behind = (np.where(zero[:, None], values, -np.inf) for values in (needs, behind))
    return [dur, slowed, needs, behind], replicas


WHATS = ("gather", "reduce")
PLAIN, BEFORE, EXPERTS, BEHIND = (PARTS.index(part) for part in ("plain", "before", "experts", "behind"))
UNIT_AT = {"plain": PLAIN, "dense": EXPERTS, "experts": EXPERTS}
"""Where the counts of a unit are."""


def _paced(counts: Floats, took: Floats, lanes: dict[str, Floats], *, back: bool, sums: bool) -> tuple[Floats, Floats]:
    """How long the layers of a pass take beside their lane, and when the first of them is gathered.

    Layers without experts are the model's first: a backward pass ends with them.
    """
    plain, routed = counts[:, PLAIN], counts[:, EXPERTS]
    one, middle = took[:, PLAIN], took[:, EXPERTS]
    head, tail = took[:, BEHIND if back else BEFORE], middle + took[:, BEFORE if back else BEHIND]
    gather, dense, experts = (lanes[f"gather {unit}"] for unit in ("plain", "dense", "experts"))
    first = np.where((plain > 0) & (~back | (routed == 0)), gather, dense)
    if not sums:
        pace = plain * np.maximum(one, gather) + routed * (np.maximum(head, experts) + np.maximum(tail, dense))
        ends_plain = (plain > 0) & (back | (routed == 0))
        last = np.where(ends_plain, np.maximum(gather - one, 0), np.maximum(dense - tail, 0))
        return pace - last, first
    add, add_dense, add_experts = (lanes[f"reduce {unit}"] for unit in ("plain", "dense", "experts"))
    alone = (routed == 0) * np.minimum(plain, 2)  # begin without sums on the lane
    pace = np.minimum(alone, 1) * one + (alone > 1) * np.maximum(one, gather)
    pace += (plain - alone) * np.maximum(one, gather + add)
    again = np.maximum(tail, np.maximum(middle, dense) + add_experts) + np.maximum(head, add_dense + experts)
    pace += np.minimum(routed, 1) * (np.maximum(head, experts) + tail) + np.maximum(routed - 1, 0) * again
    return pace, first


def _left(counts: Floats, took: Floats, lanes: dict[str, Floats], lane: Floats, closing: int) -> Floats:
    """How long behind a pass the last sums of its layers are done."""
    plain, routed = counts[:, PLAIN], counts[:, EXPERTS]
    last = np.where(plain > 0, lanes["reduce plain"], lanes["reduce dense"])
    own = took[:, PLAIN] * plain + (took[:, BEFORE] + took[:, EXPERTS] + took[:, BEHIND]) * routed
    apart = np.maximum(last, lane - own * (1 - 1 / (plain + routed)))  # behind a pass of sums alone
    two = np.maximum(last, np.minimum(plain, 2) * last - (plain > 1) * took[:, PLAIN])
    over = np.maximum(took[:, EXPERTS], lanes["gather dense"]) + lanes["reduce experts"]
    of_routed = last + np.maximum(over - took[:, EXPERTS] - took[:, BEFORE], 0)
    left: Floats = apart if closing == 2 else np.where(plain > 0, two, of_routed)
    return left
