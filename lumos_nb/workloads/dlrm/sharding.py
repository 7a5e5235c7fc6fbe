"""Embedding tables to devices: a beam search over what is split, with a greedy placement of each candidate inside.

After Zha et al., "Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained Neural Cost Models" (MLSys
2023): each round halves the columns of a table, of those that are largest or take longest. Beyond it, a table may be
cut by rows or copied to every device, the best placements are refined by moves and swaps, and the search begins from
heuristics as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.display import format_bytes, format_ns
from lumos_nb.embedding_tables import complete_tables
from lumos_nb.errors import InputError, LayoutError, is_number, is_word, items_of, require_kinds, require_whole, shown
from lumos_nb.layout import Cluster
from lumos_nb.workloads.dlrm.grid_search import GridSearch, Loads
from lumos_nb.workloads.dlrm.heuristics import HEURISTICS, placement
from lumos_nb.workloads.dlrm.pieces import SPREAD, Floats, Pieces
from lumos_nb.workloads.dlrm.plan import Plan, element_bytes, positive_bytes, row_blocks, shard_bytes
from lumos_nb.workloads.dlrm.refining import refined
from lumos_nb.workloads.dlrm.sharding_costs import HiddenExchange, ShardingCosts

SPLITS = ("column_wise", *SPREAD)
MOST = 10**6
"""Of any number that says how wide or long a search is."""
STALE = 3
"""Rounds that find nothing better, after which no more are tried."""
EVEN_SHARES = (2.0, 1.0)
"""Multiples of a device's even share of all time or columns: the search begins with what is larger halved, as well."""
ROOM = 0.8
"""Share of a GPU's memory that embedding tables may take by default, as in Lin et al. (TPDS 2024)."""


@dataclass(frozen=True)
class State:
    """What is split so far: the free pieces in order of number, the spread tables with their kind, and why.

    `why` holds table, what was done, and the least total times before and after.
    """

    free: tuple[int, ...]
    spread: tuple[tuple[int, int], ...] = ()
    why: tuple[tuple[int, str], ...] = ()
    total_us: float = np.inf
    unplaced_bytes: float = np.inf
    order: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """What tells states apart: in what order tables were split does not matter."""
        return self.free, self.spread


def shard(
    tables: pl.DataFrame,
    cluster: Cluster,
    costs: ShardingCosts,
    *,
    memory_bytes: float | Sequence[float] | None = None,
    optimizer: str = "sgd",
    splits: Sequence[str] = SPLITS,
    beam: int = 3,
    candidates: int = 10,
    rounds: int = 10,
    caps: int = 11,
    seed: int = 0,
    objective: Callable[[Plan], float] | None = None,
) -> Plan:
    """Find a plan of embedding tables on the GPUs of a cluster, with little time on the slowest.

    Parameters
    ----------
    tables
        `rows`, `dim`, `pooling`, and what else `complete_tables` takes.
    cluster, costs
        Its GPUs are the devices; what plans are priced by, for as many: of `ShardingCosts.of` or `pretrain`.
    memory_bytes, optimizer, splits
        What each device may hold, one number or one a device, by default `ROOM` of its data sheet's; whose state
        counts, of `STATE_BYTES`; and which kinds of split may be tried, of `SPLITS`.
    beam, candidates, rounds, caps
        Of the search (K, N, L and M of the paper): states kept a round, tables tried of the largest and of the slowest,
        rounds, and caps of columns from 1 to 1.5 times the mean (and none).
    seed
        Of the random heuristic: equal seeds give equal plans.
    objective
        What is to be least instead of `total_us`, asked of the best plans by `costs`, and by costs as if other work hid
        exchanges. For example `lambda plan: ln.estimate_dlrm(model, plan, train, cluster).step_s`.

    Returns
    -------
    plan
        Priced by `costs`; never slower by them than the best of `HEURISTICS`, nor by an objective than one without.

    Raises
    ------
    LayoutError
        A table cannot be (no rows, a negative pooling), has no finite price, or finds no room however it is cut; the
        message names it. Or costs, memory or splits do not go with the cluster.
    InputError
        The cluster or the costs are of another kind, or the objective gives no number.

    Examples
    --------
    >>> from lumos_nb.costs.embeddings import PhysicalLookup
    >>> cluster = Cluster(gpu="H100-SXM-80GB", gpus_per_node=4, inside="NVLink4 NVSwitch")
    >>> costs = ShardingCosts.of(PhysicalLookup.of_sheet(cluster.gpu_sheet), cluster, batch=65536)
    >>> tables = pl.DataFrame({"rows": [10**6] * 5, "dim": [128, 64, 64, 32, 128], "pooling": [20.0, 5, 5, 80, 9]})
    >>> shard(tables, cluster, costs).frame["table"].n_unique()
    5
    """
    require_kinds(cluster=(cluster, Cluster), costs=(costs, ShardingCosts))
    _require_numbers(beam, candidates, rounds, caps, seed)
    frame, memory = complete_tables(tables), memory_of(cluster, costs, memory_bytes)
    allowed = _require(frame, splits, optimizer, memory, objective)
    made: dict[str, Plan] = {}
    for some in (costs, *([replace(costs, exchange=HiddenExchange(costs.exchange))] if objective else [])):
        pieces = Pieces.of(frame, some, optimizer)
        grid = GridSearch(pieces, some, memory, np.array([*np.linspace(1.0, 1.5, caps), np.inf]))
        search = _Search(frame, grid, allowed, candidates)
        states = [*search.beam_search(beam, rounds), *search.by_rules(seed)]
        for plan in search.plans(states, optimizer, every=objective is not None):
            made[plan.frame.write_csv()] = costs.price(plan)
    return min(made.values(), key=lambda plan: plan.total_us if objective is None else _asked(objective, plan))


def _require_numbers(beam: int, candidates: int, rounds: int, caps: int, seed: int) -> None:
    """Raise InputError for a number of the search that is none."""
    require_whole(1, MOST, beam=beam, candidates=candidates, caps=caps)
    require_whole(0, MOST, rounds=rounds)
    require_whole(0, seed=seed)


def _asked(objective: Callable[[Plan], float], plan: Plan) -> float:
    """What an objective says of a plan: a number, or InputError."""
    said: object = objective(plan)
    endless = isinstance(said, float | np.floating) and math.isinf(said)
    if not (endless or is_number(said)):
        raise InputError(f"the objective gave {shown(said)} for a plan; it must give a number, the less the better.")
    return float(said)  # type: ignore[arg-type]


def _require(
    frame: pl.DataFrame, splits: Sequence[str], optimizer: str, memory: Floats, objective: object
) -> frozenset[str]:
    """The splits; LayoutError for one that is none, and for tables that are none or find no room."""
    if not (objective is None or callable(objective)):
        raise InputError(f"objective is {shown(objective)}; give a function of a plan.")
    asked = items_of("splits", splits, f"a list, of {', '.join(SPLITS)}")
    if unknown := [split for split in asked if not is_word(split, SPLITS)]:
        raise LayoutError(f"splits has {', '.join(map(shown, unknown))}; give some of {', '.join(SPLITS)}.")
    if not frame.height:
        raise LayoutError("there is no table: give a row a table.")
    held = shard_bytes(frame["rows"].to_numpy(), frame["dim"].to_numpy(), element_bytes(frame), optimizer)
    if held.sum() > memory.sum():  # known before any table is cut, which would make many pieces of such a one
        raise LayoutError(
            f"the tables hold {format_bytes(held.sum())} with {optimizer}, all devices {format_bytes(memory.sum())} "
            f"(memory_bytes=; by default {ROOM:.0%} of each): "
            f"table {frame['table'][int(held.argmax())]!r} ({format_bytes(held.max())}, with {optimizer}) "
            "finds no room."
        )
    return frozenset(asked)


def memory_of(cluster: Cluster, costs: ShardingCosts, memory_bytes: float | Sequence[float] | None) -> Floats:
    """[devices]: what each may hold."""
    if len(costs.speed) != cluster.gpus:
        raise LayoutError(f"the costs are of {len(costs.speed)} devices, the cluster has {cluster.gpus}.")
    given = ROOM * cluster.gpu_sheet.memory_bytes if memory_bytes is None else memory_bytes
    return np.broadcast_to(positive_bytes(given, (), (cluster.gpus,)), cluster.gpus)


def _rank(state: State) -> tuple[float, float]:
    """The lower the better: what finds no room first."""
    return state.unplaced_bytes, state.total_us


def _first(count: int, states: Sequence[State], *, spread: bool) -> list[State]:
    """The first so many of the states that have spread tables, or of those that have none."""
    return [state for state in states if bool(state.spread) == spread][:count]


@dataclass(frozen=True)
class _Search:
    """The states of one set of tables: how they come from one another, and what they cost."""

    tables: pl.DataFrame
    grid: GridSearch
    splits: frozenset[str]
    candidates: int

    def beam_search(self, beam: int, rounds: int) -> list[State]:
        """The best states of all rounds, as many as the beam is wide.

        The best state with spread tables goes along beside the beam: it is seldom the best until more is split.
        """
        starts = {state.key: state for state in (self.start(), *map(self.evened, EVEN_SHARES))}
        states = sorted(self.priced(list(starts.values())), key=_rank)
        seen, best, stale = set(starts), states[:beam], 0
        for _ in range(rounds):
            children = {child.key: child for state in states for child in self.children(state)}
            found = sorted(self.priced([child for key, child in children.items() if key not in seen]), key=_rank)
            if not found:
                break
            seen |= children.keys()
            states = [*_first(beam, found, spread=False), *_first(1, found, spread=True)]
            better = min(_rank(state) for state in states) < _rank(best[0])
            stale = 0 if better or best[0].unplaced_bytes else stale + 1
            best = sorted([*best, *states], key=_rank)[:beam]
            if stale == STALE:
                break
        return best

    def start(self) -> State:
        """Whole tables, but for those that no device has room for."""
        pieces, most = self.grid.pieces, self.grid.memory_bytes.max()
        state = State(tuple(range(self.tables.height)))
        for table in range(self.tables.height):
            text = f"larger than what a device may hold ({format_bytes(most)})"
            while any(pieces.table[p] == table and pieces.size_bytes[p] > most for p in state.free):
                large = next(p for p in state.free if pieces.table[p] == table and pieces.size_bytes[p] > most)
                halves = pieces.half[large] >= 0 and "column_wise" in self.splits
                if halves:
                    state = self.halved(state, large, text)
                elif pieces.can_spread[table, 0] and "row_wise" in self.splits:
                    state = self.spread(state, table, 0, text)
                else:
                    break
        return state

    def evened(self, share: float) -> State:
        """The start with every piece halved that has more than so many times a device's even share: for many devices.

        Rounds that halve one piece each find nothing better before all of the large ones are halved.
        """
        pieces, state = self.grid.pieces, self.start()
        free = np.array(state.free, dtype=np.int64)
        sizes = [
            (size, share * size[free].sum() / len(self.grid.memory_bytes)) for size in (pieces.alone_us, pieces.dim)
        ]
        text = "halved to {} columns: more than an even share"
        while "column_wise" in self.splits:
            free = np.array(state.free, dtype=np.int64)
            large = free[np.any([size[free] > most for size, most in sizes], axis=0) & (pieces.half[free] >= 0)]
            if not large.size:
                break
            for piece in large.tolist():
                state = self.halved(state, piece, text.format(pieces.dim[pieces.half[piece]]))
        return state

    def children(self, state: State) -> list[State]:
        """States with one split more, of a table that is among the largest or the slowest."""
        pieces, free = self.grid.pieces, np.unique(np.array(state.free, dtype=np.int64))
        tried: dict[int, None] = {}
        for size in (pieces.size_bytes, pieces.alone_us):
            tried |= dict.fromkeys(free[np.argsort(-size[free], kind="stable")[: self.candidates]].tolist())
        halved = [piece for piece in tried if pieces.half[piece] >= 0 and "column_wise" in self.splits]
        kinds = [kind for kind, name in enumerate(SPREAD) if name in self.splits]
        whole = [piece for piece in tried if piece < self.tables.height or state.unplaced_bytes]
        tables = dict.fromkeys(int(pieces.table[piece]) for piece in whole)  # split ones too, while some have no room
        spread = [(table, kind) for table in tables for kind in kinds if self.worth[table, kind]]
        return [*(self.halved(state, piece) for piece in halved), *(self.spread(state, *one) for one in spread)]

    @cached_property
    def worth(self) -> NDArray[np.bool_]:
        """[tables, kinds of SPREAD]: whether it can be of use to spread a table.

        By rows, if it is more than half of a device's even share in bytes or time; as copies, if the gradients that are
        added up are fewer than a device's share of the outputs that copies need not exchange.
        """
        pieces, whole = self.grid.pieces, slice(self.tables.height)
        shares = [values[whole] / values[whole].sum() for values in (pieces.size_bytes, pieces.alone_us)]
        large = np.max(shares, axis=0) > 0.5 / len(self.grid.memory_bytes)
        few = self.tables["rows"].to_numpy() < self.grid.costs.batch / len(self.grid.memory_bytes)
        return np.stack([large, few], axis=1) & pieces.can_spread

    def halved(self, state: State, piece: int, why: str = "") -> State:
        """The state with the columns of a piece in two."""
        half = int(self.grid.pieces.half[piece])
        free = [*state.free, half, half]
        free.remove(piece)
        reason = (int(self.grid.pieces.table[piece]), why or f"halved to {self.grid.pieces.dim[half]} columns: {{}}")
        return State(tuple(sorted(free)), state.spread, (*state.why, reason), state.total_us)

    def spread(self, state: State, table: int, kind: int, why: str = "") -> State:
        """The state with a table on every device."""
        free = tuple(piece for piece in state.free if self.grid.pieces.table[piece] != table)
        text = why or f"{('cut by rows', 'copied to every device')[kind]}: {{}}"
        reasons = [(other, reason) for other, reason in state.why if other != table]
        return State(free, tuple(sorted((*state.spread, (table, kind)))), (*reasons, (table, text)), state.total_us)

    def base(self, states: Sequence[State]) -> tuple[Loads, Floats]:
        """What the devices have of spread tables, and the gradients that are added up."""
        pieces, shape = self.grid.pieces, (len(states), len(self.grid.memory_bytes))
        loads = Loads(
            np.zeros((*shape, pieces.parts.shape[1])), np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=np.int64)
        )
        gradients = np.zeros(len(states))
        for at, state in enumerate(states):
            for table, kind in state.spread:
                loads.sums[at] += pieces.spread_parts[table, kind]
                loads.size_bytes[at] += pieces.spread_bytes[table, kind]
                loads.shards[at] += 1
                loads.output_dim[at] += pieces.dim[table] if SPREAD[kind] == "row_wise" else 0
                gradients[at] += pieces.gradient_bytes[table] if SPREAD[kind] == "data_parallel" else 0
        return loads, gradients

    def priced(self, states: Sequence[State]) -> list[State]:
        """States with their best placements, of pieces by what they take alone."""
        if not states:
            return []
        lists = np.full((len(states), max(len(state.free) for state in states)), -1)
        for at, state in enumerate(states):
            free = np.array(state.free, dtype=np.int64)
            lists[at, : len(free)] = free[np.argsort(-self.grid.pieces.alone_us[free], kind="stable")]
        loads, gradients = self.base(states)
        over = np.maximum(loads.size_bytes - self.grid.memory_bytes, 0).sum(axis=1)
        placed = self.grid.place(lists, loads, gradients)
        found = []
        for at, state in enumerate(states):
            count, total = len(state.free), float(placed.total_us[at])
            change = f"{format_ns(state.total_us * 1e3)} became {format_ns(total * 1e3)}"
            if not np.isfinite(state.total_us):
                change = "so that all tables have room"
            why = tuple((table, text.format(change)) for table, text in state.why)
            order, devices = (tuple(rows[at, :count].tolist()) for rows in (lists, placed.devices))
            unplaced = float(placed.unplaced_bytes[at] + over[at])
            found.append(
                State(state.free, state.spread, why, total if not unplaced else np.inf, unplaced, order, devices)
            )
        return found

    def by_rules(self, seed: int) -> list[State]:
        """Whole tables as the heuristics place them, of those that find room: the best, and the one that has it."""
        whole = np.arange(self.tables.height)
        size, memory = self.grid.pieces.size_bytes[whole], self.grid.memory_bytes
        base, gradients = self.base([State(())])
        found = []
        for rule in HEURISTICS:
            devices = placement(rule, self.tables, size, memory, seed)
            if (devices >= 0).all():
                loads = base.take(np.zeros(1, dtype=np.int64))
                for at in whole:
                    loads.add(0, int(devices[at]), self.grid.pieces, int(at))
                total = float(self.grid.total_us(loads, gradients)[0])
                order = tuple(whole.tolist())
                found.append(
                    State(order, total_us=total, unplaced_bytes=0.0, order=order, devices=tuple(devices.tolist()))
                )
        return sorted(found, key=_rank)[:1]

    def refined(self, state: State) -> State:
        """The state with a better placement, if moves and swaps find one."""
        if state.unplaced_bytes or not state.order:
            return state
        base, gradients = self.base([state])
        order, devices = (np.array(values, dtype=np.int64) for values in (state.order, state.devices))
        better, total = refined(self.grid, order, devices, base, gradients, rounds=4 * len(order))
        return replace(state, devices=tuple(better.tolist()), total_us=total)

    def plans(self, states: Sequence[State], optimizer: str, *, every: bool) -> list[Plan]:
        """Plans of the best of some states when they are refined, or of all that have room; LayoutError if none has."""
        ranked = sorted((self.refined(state) for state in states), key=_rank)
        if ranked[0].unplaced_bytes:
            raise self.no_room(ranked[0], optimizer)
        kept = [state for state in ranked if not state.unplaced_bytes] if every else ranked[:1]
        return [self.plan(state, optimizer, merged=merged) for state in kept for merged in (True, False)]

    def no_room(self, state: State, optimizer: str) -> LayoutError:
        """The error that names a table without room."""
        pieces, memory = self.grid.pieces, self.grid.memory_bytes
        lost = [int(pieces.table[one]) for one, at in zip(state.order, state.devices, strict=True) if at < 0]
        size = pieces.size_bytes[: self.tables.height]
        table = max([*lost, *(table for table, _ in state.spread)], key=lambda one: float(size[one]))
        return LayoutError(
            f"table {self.tables['table'][table]!r} ({format_bytes(size[table])}, with {optimizer}) finds no room: the "
            f"tables need {format_bytes(size.sum())}, {len(memory)} devices may hold {format_bytes(memory.sum())}. "
            "Give more memory or devices, another optimizer, or allow more kinds of splits."
        )

    def plan(self, state: State, optimizer: str, *, merged: bool) -> Plan:
        """The state as a plan; `merged` makes one shard of a table's pieces on one device."""
        pieces, devices = self.grid.pieces, len(self.grid.memory_bytes)
        names, rows = self.tables["table"].to_list(), self.tables["rows"].to_list()
        shards = []
        of_table: dict[int, list[tuple[int, int]]] = {}
        for piece, device in sorted(zip(state.order, state.devices, strict=True)):
            of_table.setdefault(int(pieces.table[piece]), []).append((device, int(pieces.dim[piece])))
        for table, parts in of_table.items():
            if merged:
                parts = sorted(sum((Counter({device: dim}) for device, dim in parts), Counter[int]()).items())
            kind = "column_wise" if len(parts) > 1 else "table_wise"
            starts = np.cumsum([0, *(dim for _, dim in parts)])
            shards += [
                (names[table], device, kind, 0, rows[table], int(start), dim)
                for (device, dim), start in zip(parts, starts, strict=False)
            ]
        for table, number in state.spread:
            blocks = row_blocks(rows[table], devices) if SPREAD[number] == "row_wise" else [rows[table]] * devices
            firsts = np.cumsum([0, *blocks]) if SPREAD[number] == "row_wise" else [0] * devices
            dim = int(pieces.dim[table])
            shards += [
                (names[table], device, SPREAD[number], int(firsts[device]), blocks[device], 0, dim)
                for device in range(devices)
            ]
        columns = ["table", "device", "kind", "first_row", "rows", "first_column", "dim"]
        why: dict[str, str] = {}
        for table, text in state.why:
            why[names[table]] = f"{why[names[table]]}; {text}" if names[table] in why else text
        frame = pl.DataFrame(shards, schema=columns, orient="row")
        return Plan.of(self.tables, frame, self.grid.memory_bytes.tolist(), optimizer=optimizer, why=why)
