"""Algorithms of collectives as steps and bytes on each tier's wire, and the time that they take with given constants.

The bytes are those of Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH*
(2005), and of nccl-tests (PERFORMANCE.md). A ring between nodes uses every GPU's network card for its part; tree and
switch (NVLS, SHARP) reduce inside a node and exchange one part a GPU between nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lumos_nb.costs.collective_tiers import Floats, Layout, Rows

BUS_FACTOR: Mapping[str, Callable[[Floats], Floats]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": np.ones_like,
    "send_recv": np.ones_like,
}
"""Bus bandwidth over size / time, by number of GPUs: nccl-tests' convention."""

CHANNELS = 32
"""Channels that NCCL divides among the peers of a GPU."""
GROWING_BYTES = 64 * 2**20
"""A larger message to one peer gets more channels, in proportion."""
HOST_TIMED = ("torch.distributed", "torch all_reduce_bench")
"""Values of a sample's `method` where the host's calls are in the time."""


class Constants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a fabric does beside its sheet; the defaults are round numbers from which a fit starts.

    Attributes
    ----------
    launch_us, host_us
        What a call takes at least; and on top of it where the host timed it.
    step, gather, hop
        Latency of a step inside a node, of the switch's reduction, of a step between nodes: in the sheet's latencies.
    ring, tree, switch, pair, network
        Share of the sheet's rate that each algorithm reaches inside a node, and all of them between nodes.
    fill
        Steps that it takes to fill a ring's pipeline.
    half, pair_half, power; far_half, far_power
        Where the rate has halved, in latency x rate of the sheet, and how steeply it climbs: by bytes on the wire
        inside a node (rings and trees, pairs), by message between nodes.
    channel_bytes_per_s
        What one of the `CHANNELS` carries.
    """

    launch_us: float = 7.0
    host_us: float = 40.0
    step: float = 1.0
    gather: float = 20.0
    hop: float = 1.0
    ring: float = 0.8
    tree: float = 0.6
    switch: float = 0.55
    pair: float = 0.8
    network: float = 0.8
    fill: float = 0.5
    half: float = 1.0
    pair_half: float = 1.0
    power: float = 0.6
    far_half: float = 0.3
    far_power: float = 0.6
    channel_bytes_per_s: float = 20e9


class Plan(NamedTuple):
    """The work of one algorithm, per byte of size where it has to do with size; one value a row."""

    share: str  # of the sheet's rate that it reaches inside a node
    delay: str  # what one of its steps takes there
    steps: Floats
    hops: Floats
    near: Floats  # bytes on the wire of one GPU inside its node
    far: Floats  # and between nodes
    message: Floats  # bytes that go to one peer at a time
    stages: Floats | float = np.inf  # of a ring's pipeline
    peers: Floats | None = None  # among which channels are divided


def _ring(passes: float) -> Callable[[Floats, Floats, Floats], list[Plan]]:
    def plan(n: Floats, g: Floats, nodes: Floats) -> list[Plan]:
        stages, crossing = passes * (n - 1.0), np.where(nodes > 1, 1.0 / g, 0.0)
        hops, wire = stages * crossing, np.asarray(stages / n, dtype=np.float64)
        return [Plan("ring", "step", stages - hops, hops, wire * (g > 1), wire * crossing, 1.0 / (n * g), stages)]

    return plan


def _all_reduce(n: Floats, g: Floats, nodes: Floats) -> list[Plan]:
    hops, far = 2 * np.log2(nodes), 2 * (nodes - 1) / nodes / g
    tree = Plan("tree", "step", 2 * np.log2(g), hops, 2 * (g - 1) / g, far, 1.0 / n)
    switch = Plan("switch", "gather", np.ones_like(n), hops, np.where(g > 1, 1.0, 0.0), far, 1.0 / n)
    return [*_ring(2.0)(n, g, nodes), tree, switch]


def _broadcast(n: Floats, g: Floats, nodes: Floats) -> list[Plan]:
    crossing = np.where(nodes > 1, 1.0 / g, 0.0)
    hops = (n - 1) * crossing
    return [Plan("ring", "step", n - 1 - hops, hops, np.where(g > 1, 1.0, 0.0), crossing, 1.0 / (n * g), n - 1)]


def _all_to_all(n: Floats, g: Floats, nodes: Floats) -> list[Plan]:
    hops = np.where(nodes > 1, np.log2(n), 0.0)
    return [Plan("pair", "step", np.maximum(np.log2(g), 1 - hops), hops, (g - 1) / n, (n - g) / n, 1 / n, peers=n)]


def _send_recv(n: Floats, g: Floats, nodes: Floats) -> list[Plan]:
    away = np.where(nodes > 1, 1.0, 0.0)
    return [Plan("pair", "step", 1 - away, away, 1 - away, away, np.ones_like(n), peers=n)]


PLANS: Mapping[str, Callable[[Floats, Floats, Floats], list[Plan]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _ring(1.0),
    "reduce_scatter": _ring(1.0),
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}
"""Collective -> its algorithms, from the numbers of GPUs, of GPUs a node and of nodes."""


class Case(NamedTuple):
    """The rows of one collective, and its algorithms on them."""

    collective: str
    rows: Rows
    size: Floats
    hosted: NDArray[np.bool_]
    layout: Layout
    plans: list[Plan]


def fastest(cases: list[Case], height: int, constants: Mapping[str, Floats]) -> Floats:
    """[height]: microseconds of the fastest algorithm of each row."""
    dur_us = np.empty(height)
    for case in cases:
        dur_us[case.rows] = np.min([time_us(plan, case, constants) for plan in case.plans], axis=0)
    return dur_us


def time_us(plan: Plan, case: Case, constants: Mapping[str, Floats]) -> Floats:
    """[rows]: microseconds of one algorithm; `constants` hold one value a sheet."""
    near, far, sheets = case.layout.near, case.layout.far, case.layout.sheets
    rate = np.array([sheet.bytes_per_s * 1e-6 for sheet in sheets])  # bytes a microsecond
    latency = np.array([sheet.latency_us for sheet in sheets])
    sent, message = plan.near * case.size, plan.message * case.size
    half = constants["pair_half" if plan.share == "pair" else "half"] * rate * latency
    climb = 1 + (half[near] / np.maximum(sent, 1)) ** constants["power"][near]
    wire = sent / (rate * constants[plan.share])[near] * climb
    time = constants["launch_us"][near] + constants["host_us"][near] * case.hosted
    time += plan.steps * (constants[plan.delay] * latency)[near]
    if plan.far.any():
        far_half = (constants["far_half"] * rate * latency)[far]
        climb = 1 + (far_half / np.maximum(message, 1)) ** constants["far_power"][far]
        wire = np.maximum(wire, plan.far * case.size / (rate * constants["network"])[far] * climb)
        time += plan.hops * (constants["hop"] * latency)[far]
    wire = wire * (1 + constants["fill"][near] / plan.stages)
    if plan.peers is not None:
        channels = np.maximum(CHANNELS / plan.peers, 1) * np.clip(message / GROWING_BYTES, 1, plan.peers)
        wire = np.maximum(wire, message / (channels * constants["channel_bytes_per_s"][near] * 1e-6))
    if plan.share == "switch":
        wire = np.where(np.array([sheet.reduces for sheet in sheets])[near], wire, np.inf)
    return np.asarray(time + wire, dtype=np.float64)
