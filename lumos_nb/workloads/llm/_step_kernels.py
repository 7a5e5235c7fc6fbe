"""Compiled: the order of a pipeline schedule's passes, and the step time of many layouts that share it.

Pass i of an order is a row of `passes`: rank, depth, phase (0 forward, 1 backward, 2 weights), the pass that it waits
for (their number: none), whether that is on another rank, and whether it is its chunk's first or last.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lumos_nb._jit import jit

Ints = npt.NDArray[np.int32]
UInts = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

RANK, DEPTH, PHASE, WAITS, CROSSES, FIRST, LAST = range(7)
TOOK, SLOWED, ISSUED, NEEDS, ENDS = range(5)
"""Of a pass: what it takes, how much of it more where it runs beside transfers, and the host to issue it; of ZeRO 3 how
long behind what went before its first weights are there, and its last sums done behind its end (else minus infinity).
"""
DP = 2
"""The lane of gradients and weights, behind those of messages by phase."""
REDUCE, TAIL, READY, STEP, GATHER, GATHER_FIRST, GATHER_LEFT = range(7)
"""Of what replicas do for a stage: sums of all its gradients, of those due last, and which part of a pass is done when
the first are; what ends the step; all weights that its first pass waits for, the first of them, and how long that
pass goes on behind the last."""


@jit("uint32[:, ::1](int32[::1], int32[:, ::1], int64, int64, int64, boolean)")
def topological(begins: Ints, listed: Ints, depths: int, micro_batches: int, ranks: int, split: bool) -> UInts:
    """Passes in an order that waits follow: each rank goes on as far as it can, one after the other.

    `listed` has rank, depth, phase, micro-batch, first and last of every pass by rank and position; rank r's begin at
    `begins[r]`.
    """
    phases = 2 + split
    done = np.full((phases, depths, micro_batches), -1, np.int32)
    passes = np.empty((len(listed), 7), np.uint32)
    at = begins[:-1].copy()
    count, before = 0, -1
    while count > before:
        before = count
        for rank in range(ranks):
            while at[rank] < begins[rank + 1]:
                one = listed[at[rank]]
                depth, phase, micro_batch = one[1], one[2], one[3]
                source_phase, source_depth = phase, depth
                if phase == 0:
                    source_depth = depth - 1
                elif phase == 1 and depth < depths - 1:
                    source_depth = depth + 1
                else:
                    source_phase = phase - 1
                waits = np.int32(-1)
                if source_depth >= 0:
                    waits = done[source_phase, source_depth, micro_batch]
                    if waits < 0:
                        break
                passes[count, 0] = rank
                passes[count, 1] = depth
                passes[count, 2] = phase
                passes[count, 3] = waits if waits >= 0 else len(listed)
                passes[count, 4] = waits >= 0 and passes[waits, 0] != rank
                passes[count, 5] = one[4]
                passes[count, 6] = one[5]
                done[phase, depth, micro_batch] = count
                count += 1
                at[rank] += 1
    return passes[:count]


@jit("float64[:, ::1](uint32[::1], float64[::1], int64, int64)")
def message_us(rank_of: UInts, message: Floats, block: int, per_node: int) -> Floats:
    """What each depth's pass sends, forward and backward (2, depths): minus one for nothing.

    `message` takes a message inside a node and between two; of a stage's `block` of ranks the widest pair counts.
    """
    depths, ranks = len(rank_of), np.int64(rank_of.max()) + 1
    found = np.full((2, depths), -1.0)
    for depth in range(depths):
        for back in range(2):
            to = depth - 1 if back else depth + 1
            if 0 <= to < depths and rank_of[to] != rank_of[depth]:
                leaves = block >= per_node
                for j in range(0 if leaves else block):
                    here, there = rank_of[depth] * block + j, rank_of[to] * block + j
                    leaves |= np.int64(here) // per_node != np.int64(there) // per_node
                found[back, depth] = message[1 if leaves and ranks > 1 else 0]
    return found


@jit(
    "void(uint32[:, ::1], uint32[::1], uint32[::1], float64[:, :, :, ::1], float64[:, :, ::1], float64[:, ::1], "
    "int64[::1], boolean[::1], int64, boolean, boolean, float64[::1])"
)
def step_us(
    passes: UInts, kinds: UInts, rank_of: UInts, about: Floats, replicas: Floats, message: Floats,
    block: npt.NDArray[np.int64], each: Bools, per_node: int, overlaps: bool, sums_overlap: bool, found: Floats,
) -> None:  # fmt: skip
    """Step time of every layout, into `found` (n,).

    A rank computes one pass after another; what it sends goes out on a lane for each direction, and gradients and
    weights on one more. A pass is slower while these are busy.

    `kinds` is the kind of stage at each depth, `rank_of` its rank. By layout and kind of stage: `about` a pass of each
    phase (see `TOOK`), and `replicas` (see `REDUCE`). By layout: `message` inside a node and between two, `block`, how
    many ranks a stage has, and whether gradients are summed in `each` micro-batch. `overlaps`, `sums_overlap`: passes
    go on meanwhile.
    """
    n, ranks = len(passes), np.int64(rank_of.max()) + 1
    end, arrival = np.zeros(n + 1), np.zeros(n + 1)  # the last is for what waits for nothing
    closes = passes[:, PHASE].max()
    busy, host, closing = np.zeros((3, ranks))
    begins, ends = np.zeros((2, 3, ranks))  # since when each lane is busy, and until when
    for k in range(len(found)):
        for rank in range(ranks):
            busy[rank] = host[rank] = closing[rank] = 0.0
            for lane in range(3):
                begins[lane, rank] = ends[lane, rank] = 0.0
        sent = message_us(rank_of, message[k], block[k], per_node)
        for i in range(n):
            rank, depth, phase, waits = passes[i, RANK], passes[i, DEPTH], passes[i, PHASE], passes[i, WAITS]
            kind = kinds[depth]
            due = arrival[waits] if passes[i, CROSSES] else end[waits]
            start = max(busy[rank], due, ends[DP, rank] + about[k, kind, phase, NEEDS])
            took, late, sums, left = about[k, kind, phase, TOOK], 0.0, 0.0, 0.0
            if passes[i, FIRST]:
                start = max(start, ends[DP, rank] + replicas[k, kind, GATHER_FIRST])
                ends[DP, rank] += replicas[k, kind, GATHER]
                late = ends[DP, rank] + replicas[k, kind, GATHER_LEFT]
            beside = 0.0
            for lane in range(3):
                if ends[lane, rank] > start:
                    beside += max(min(start + took, ends[lane, rank]) - max(start, begins[lane, rank]), 0.0)
            if phase == closes and (each[k] or passes[i, LAST]):
                sums, left = replicas[k, kind, REDUCE], (1 - replicas[k, kind, READY]) * took
                if sums_overlap:
                    beside += min(sums, left)
                else:
                    took, sums = took + sums, 0.0
            host[rank] += about[k, kind, phase, ISSUED]
            done = max(start + took + about[k, kind, phase, SLOWED] * min(beside, took), late, host[rank])
            end[i] = busy[rank] = done
            if about[k, kind, phase, ENDS] > -np.inf:
                if done > ends[DP, rank]:
                    begins[DP, rank] = done
                ends[DP, rank] = max(ends[DP, rank], done + about[k, kind, phase, ENDS])
            if sums > 0:
                if done - left > ends[DP, rank]:
                    begins[DP, rank] = done - left
                ends[DP, rank] = max(max(ends[DP, rank], done - left) + sums, done + replicas[k, kind, TAIL])
            if passes[i, LAST]:
                closing[rank] += replicas[k, kind, STEP]
            if phase < 2 and sent[phase, depth] >= 0:
                if done > ends[phase, rank]:
                    begins[phase, rank] = done
                ends[phase, rank] = arrival[i] = max(ends[phase, rank], done) + sent[phase, depth]
                if not overlaps:
                    busy[rank] = arrival[i]
        most = 0.0
        for rank in range(ranks):
            most = max(most, max(busy[rank], ends[DP, rank]) + closing[rank])
        found[k] = most
