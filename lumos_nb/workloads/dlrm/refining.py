"""Moves and swaps of pieces that make a placement faster, until none does: a local search after the greedy one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lumos_nb.workloads.dlrm.grid_search import GridSearch, Loads
from lumos_nb.workloads.dlrm.pieces import Floats, Ints

EVEN = 1e-3
"""How much the mean of squared lookup times counts beside the slowest device, so that of two slowest one can go first.
"""
MOST = 256
"""Changes of the slowest device that are priced as a whole, those after which the slower of both devices has least to
look up; and of the widest, those after which the wider of both has fewest columns."""


class _Changes(NamedTuple):
    """Positions of pieces that go, and of those that come back for them (-1: none), and between which devices."""

    give: Ints
    take: Ints
    source: Ints
    target: Ints


def refined(
    search: GridSearch, free: Ints, devices: Ints, base: Loads, gradient_bytes: Floats, rounds: int
) -> tuple[Ints, float]:
    """Improve the placement of one list of pieces, and its total time.

    Parameters
    ----------
    search
        Pieces, costs and memory.
    free, devices
        [pieces]: the pieces and where they are.
    base
        What the devices have beside them, one state.
    gradient_bytes
        [1]: as in `GridSearch.place`.
    rounds
        Changes at most, each the best of all moves and swaps of pieces on the slowest device or on that with most
        columns.
    """
    devices, pieces = devices.copy(), search.pieces
    loads = base.take(np.zeros(1, dtype=np.int64))
    for piece, device in zip(free, devices, strict=True):
        loads.add(0, device, pieces, piece)
    took = search.lookups_us(loads)
    total, goal = (float(values[0]) for values in _totals(search, took, loads.output_dim, gradient_bytes))
    for _ in range(rounds):
        slowest = int((took[0].sum(axis=1) / search.costs.speed).argmax())
        widest = int(loads.output_dim[0].argmax())
        changes = _possible(search, free, devices, loads, {slowest, widest})
        if not len(changes.give):
            break
        changes, tried, sent = _tried(search, free, changes, loads, took[0], slowest, widest)
        totals, goals = _totals(search, tried, sent, gradient_bytes.repeat(len(tried)))
        best = int(goals.argmin())
        if goals[best] >= goal * (1 - 1e-9) or totals[best] > total:
            break
        total, goal, took = float(totals[best]), float(goals[best]), tried[best][None]
        give, take, source, target = (int(column[best]) for column in changes)
        for piece, start, end in ((give, source, target), (take, target, source)):
            if piece >= 0:
                loads.add(0, start, pieces, free[piece], -1)
                loads.add(0, end, pieces, free[piece])
                devices[piece] = end
    return devices, total


def _possible(search: GridSearch, free: Ints, devices: Ints, loads: Loads, of: set[int]) -> _Changes:
    """Moves and swaps of what some devices have, for which there is room."""
    mine = np.flatnonzero(np.isin(devices, list(of)))
    count = len(search.memory_bytes)
    give = np.concatenate([mine.repeat(count), mine.repeat(len(free))])
    take = np.concatenate([np.full(len(mine) * count, -1), np.tile(np.arange(len(free)), len(mine))])
    target = np.concatenate([np.tile(np.arange(count), len(mine)), np.tile(devices, len(mine))])
    source, gained = devices[give], _gained(search.pieces.size_bytes, free, give, take)
    room = search.memory_bytes - loads.size_bytes[0]
    possible = (source != target) & (gained <= room[target]) & (-gained <= room[source])
    return _Changes(*(column[possible] for column in (give, take, source, target)))


def _tried(
    search: GridSearch, free: Ints, changes: _Changes, loads: Loads, took: Floats, slowest: int, widest: int
) -> tuple[_Changes, Floats, Floats]:
    """The most promising changes, and [changes, devices, 2] lookups and [changes, devices] columns after each."""
    parts, dim = (_gained(of, free, *changes[:2]) for of in (search.pieces.parts, search.pieces.dim.astype(float)))
    alone, both = (changes.take < 0).astype(np.int64), []
    for device, sign in ((changes.source, -1), (changes.target, 1)):
        some = loads.shards[0, device] + sign * alone > 0
        now = np.where(some[:, None], search.costs.lookup_us(loads.sums[0, device] + sign * parts), 0.0)
        both.append((device, now, loads.output_dim[0, device] + sign * dim))
    kept = np.arange(len(alone))
    if len(kept) > 2 * MOST:
        speed = np.array(search.costs.speed)
        slower = np.maximum(*(now.sum(axis=1) / speed[device] for device, now, _ in both))
        wider = np.maximum(*(sent for _, _, sent in both))
        ranked = [(slower, slowest), (wider, widest)]
        best = [np.where(changes.source == at, size, np.inf).argsort(kind="stable")[:MOST] for size, at in ranked]
        kept = np.unique(np.concatenate(best))
    at = np.arange(len(kept))
    tried, sent = took[None].repeat(len(at), axis=0), loads.output_dim.repeat(len(at), axis=0)
    for device, now, columns in both:
        tried[at, device[kept]] = now[kept]
        sent[at, device[kept]] = columns[kept]
    return _Changes(*(column[kept] for column in changes)), tried, sent


def _gained(values: Floats, free: Ints, give: Ints, take: Ints) -> Floats:
    """What targets gain and sources lose of something that pieces have."""
    back: Floats = np.where(take.reshape(-1, *[1] * (values.ndim - 1)) >= 0, values[free[take]], 0.0)
    gained: Floats = values[free[give]] - back
    return gained


def _totals(search: GridSearch, lookups_us: Floats, sent: Floats, gradient_bytes: Floats) -> tuple[Floats, Floats]:
    """[states]: the slowest device's time; and what is to become less, which sees the other devices as well."""
    total = search.costs.device_us(lookups_us, sent, gradient_bytes).sum(axis=2).max(axis=1)
    own = lookups_us.sum(axis=2) / np.array(search.costs.speed)
    return total, total + EVEN * (own**2).mean(axis=1) / np.maximum(own.max(axis=1), 1e-12)
