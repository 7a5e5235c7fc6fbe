"""Greedy placement of many lists of pieces under many caps of columns, all advanced together, a piece at a time.

Zha et al. (MLSys 2023) place the tables of a list by cost, the largest first, on the device whose fused lookups then
take least, among those with room and with few enough output columns; and do so for a grid of caps, since the cap trades
lookups for exchanges. Lists and caps that have led to the same state share it until they part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos_nb._jit import jit
from lumos_nb.workloads.dlrm.pieces import Floats, Ints, Pieces
from lumos_nb.workloads.dlrm.sharding_costs import ShardingCosts

PRICED = 8
"""Devices that are priced for a piece, the least busy of those that may have it: all of a node, and enough of many."""


class Loads(NamedTuple):
    """What the devices of many states have: [states, devices], and `sums` [states, devices, k]."""

    sums: Floats
    size_bytes: Floats
    output_dim: Floats
    shards: Ints

    def take(self, states: Ints) -> Loads:
        """The same of some states, in arrays of their own."""
        return Loads(self.sums[states], self.size_bytes[states], self.output_dim[states], self.shards[states])

    def add(self, states: Ints | int, devices: Ints | int, pieces: Pieces, added: Ints | int, sign: int = 1) -> None:
        """Put a piece on a device of each of these states, or take it away."""
        self.sums[states, devices] += sign * pieces.parts[added]
        self.size_bytes[states, devices] += sign * pieces.size_bytes[added]
        self.output_dim[states, devices] += sign * pieces.dim[added]
        self.shards[states, devices] += sign


class Placed(NamedTuple):
    """The best placement of each list: total time, bytes that found no room, and a device for each piece (-1: none)."""

    total_us: Floats
    unplaced_bytes: Floats
    devices: Ints


@dataclass(frozen=True)
class GridSearch:
    """Placement of pieces on devices that may hold `memory_bytes` each, for a grid of `caps`.

    A cap is a multiple of the mean columns of a device, but for a piece that is larger.
    """

    pieces: Pieces
    costs: ShardingCosts
    memory_bytes: Floats
    caps: Floats

    def place(self, lists: Ints, base: Loads, gradient_bytes: Floats) -> Placed:
        """Place lists of pieces, [lists, pieces], each in its order and filled up with -1 behind.

        `base` is what the devices have before, `gradient_bytes` [lists] what is added up.
        """
        pieces, (count, devices), grid = self.pieces, base.shards.shape, len(self.caps)
        speed = np.array(self.costs.speed)
        dims = np.where(lists >= 0, pieces.dim[lists], 0)
        mean = (dims.sum(axis=1) + base.output_dim.sum(axis=1)) / devices
        most = np.maximum(np.maximum(mean, 1e-9)[:, None] * self.caps, dims.max(axis=1, initial=0)[:, None]).ravel()
        # a state is what some of the runs (a list under a cap) have in common
        state, list_of, loads, unplaced = np.arange(count).repeat(grid), np.arange(count), base, np.zeros(count)
        busy = self.lookups_us(loads).sum(axis=2) / speed
        steps = []
        for column in lists.T:
            piece = column[list_of]
            sent = loads.output_dim + pieces.dim[piece, None]
            room = loads.size_bytes + pieces.size_bytes[piece, None] <= self.memory_bytes
            room[piece < 0] = False
            at, device = np.nonzero(_least_busy(state, busy, room, sent, most) if devices > PRICED else room)
            took = self.costs.lookup_us(loads.sums[at, device] + pieces.parts[piece[at]])
            cost = np.full((len(piece), devices), np.inf)
            cost[at, device] = (took[:, 0] + took[:, 1]) / speed[device]
            before, device, state = _choose(state, cost, loads.size_bytes, sent, most)
            loads, list_of, unplaced, piece = loads.take(before), list_of[before], unplaced[before], piece[before]
            placed, busy = np.flatnonzero(device >= 0), busy[before]
            loads.add(placed, device[placed], pieces, piece[placed])
            busy[placed, device[placed]] = cost[before[placed], device[placed]]
            lost = np.flatnonzero((device < 0) & (piece >= 0))
            unplaced[lost] += pieces.size_bytes[piece[lost]]
            steps.append((before, device))
        total = self.total_us(loads, gradient_bytes[list_of])
        run = np.arange(len(state))
        at = state[np.lexsort((run, total[state], unplaced[state], run // grid))[::grid]]
        return Placed(total[at], unplaced[at], _traced(steps, at))

    def lookups_us(self, loads: Loads) -> Floats:
        """[states, devices, 2]: lookups of each device at a speed of 1."""
        took = self.costs.lookup_us(loads.sums.reshape(-1, loads.sums.shape[-1])).reshape(*loads.shards.shape, 2)
        return np.where(loads.shards[..., None] > 0, took, 0.0)

    def total_us(self, loads: Loads, gradient_bytes: Floats) -> Floats:
        """[states]: time of the slowest device."""
        times = self.costs.device_us(self.lookups_us(loads), loads.output_dim, gradient_bytes)
        slowest: Floats = times.sum(axis=2).max(axis=1)
        return slowest


@jit("boolean[:, ::1](int64[::1], float64[:, ::1], boolean[:, ::1], float64[:, ::1], float64[::1])")
def _least_busy(state: Ints, busy: Floats, room: NDArray[np.bool_], sent: Floats, most: Floats) -> NDArray[np.bool_]:
    """[states, devices]: those that any run may want, the `PRICED` least busy of those with room for it.

    `busy` is what a device looks up without the piece; the others are as in `_choose`.
    """
    states, devices = busy.shape
    wanted = np.zeros((states, devices), np.bool_)
    least = np.empty(PRICED, np.int64)
    for run in range(len(state)):
        old, count = state[run], 0
        for at in range(devices):
            if not room[old, at] or sent[old, at] > most[run]:
                continue
            place = count
            while place > 0 and busy[old, at] < busy[old, least[place - 1]]:
                place -= 1
            if place == PRICED:
                continue
            count = min(count + 1, PRICED)
            for behind in range(count - 1, place, -1):
                least[behind] = least[behind - 1]
            least[place] = at
        for number in range(count):
            wanted[old, least[number]] = True
    return wanted


@jit(
    "Tuple((int64[::1], int64[::1], int64[::1]))(int64[::1], float64[:, ::1], float64[:, ::1], float64[:, ::1], "
    "float64[::1])"
)
def _choose(state: Ints, cost: Floats, size_bytes: Floats, sent: Floats, most: Floats) -> tuple[Ints, Ints, Ints]:
    """Choose a device for the next piece of every run; runs that have a state and choose alike have one again.

    Parameters
    ----------
    state, most
        [runs]: the state of each, and the columns that a device of it may have.
    cost, size_bytes, sent
        [states, devices]: what a device would take with the piece (infinite: no room), its bytes without, its columns
        with it. Of equal costs the fewest bytes decide.

    Returns
    -------
    before, device, state
        Of each new state the one that it was and the device chosen (-1: none); and the new state of each run.
    """
    states, devices = cost.shape
    new = np.full((states, devices + 1), -1)
    before, device, after = np.empty(len(state), np.int64), np.empty(len(state), np.int64), np.empty_like(state)
    count = 0
    for run in range(len(state)):
        old, chosen, least, fewest = state[run], -1, np.inf, np.inf
        for at in range(devices):
            if sent[old, at] > most[run] or cost[old, at] == np.inf:
                continue
            tied = abs(cost[old, at] - least) <= 1e-9 * least
            if size_bytes[old, at] < fewest if tied else cost[old, at] < least:
                chosen, least, fewest = at, cost[old, at], size_bytes[old, at]
        if new[old, chosen] < 0:
            new[old, chosen] = count
            before[count], device[count] = old, chosen
            count += 1
        after[run] = new[old, chosen]
    return before[:count].copy(), device[:count].copy(), after


def _traced(steps: list[tuple[Ints, Ints]], at: Ints) -> Ints:
    """[states, pieces]: the devices that were chosen on the way to some final states."""
    chosen = np.empty((len(at), len(steps)), dtype=np.int64)
    for number, (before, device) in reversed(list(enumerate(steps))):
        chosen[:, number] = device[at]
        at = before[at]
    return chosen
