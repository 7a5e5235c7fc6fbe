"""Placements of whole tables by a rule of thumb, which need no prices: baselines, and where a search begins as well.

The greedy ones place tables by a size of theirs, the largest first, on the device with the least of it that has room:
the baselines of Zha et al. (MLSys 2023). The naive ones are those of Lin et al. (TPDS 2024), whose normalised lookups
no source defines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import polars as pl

from lumos_nb.display import format_bytes
from lumos_nb.embedding_tables import complete_tables
from lumos_nb.errors import InputError, LayoutError, is_word, shown
from lumos_nb.workloads.dlrm.pieces import Floats, Ints
from lumos_nb.workloads.dlrm.plan import Plan, element_bytes, shard_bytes

GREEDY: Mapping[str, pl.Expr] = {
    "dim": pl.col("dim"),
    "lookup": pl.col("dim") * pl.col("pooling"),
    "size": pl.col("dim") * pl.col("rows"),
    "size_lookup": pl.col("dim") * pl.col("pooling") * pl.col("rows").log10(),
}
"""What each greedy rule balances."""
HEURISTICS = ("random", *GREEDY)
NAIVE: Mapping[str, Callable[[Ints, int], Ints]] = {
    "naive": lambda at, devices: at % devices,
    "naive_chunk": lambda at, devices: at * devices // len(at),
}
"""Tables in turn, or in chunks of the same number, whatever they are."""


def place_by_rule(
    rule: str, tables: pl.DataFrame, memory_bytes: Sequence[float], *, optimizer: str = "sgd", seed: int = 0
) -> Plan:
    """The plan of a heuristic: whole tables on devices.

    Parameters
    ----------
    rule
        Of `HEURISTICS` or `NAIVE`.
    tables
        A frame of embedding tables.
    memory_bytes
        What each device may hold.
    optimizer
        Whose state counts.
    seed
        Of the random one.

    Raises
    ------
    InputError
        There is no such rule.
    LayoutError
        A table finds no room, and as `complete_tables` and `Plan.of`.

    Examples
    --------
    >>> tables = pl.DataFrame({"rows": [100, 100, 100], "dim": [8, 4, 8], "pooling": [1.0, 9.0, 2.0]})
    >>> place_by_rule("dim", tables, [1e6, 1e6]).devices["output_dim"].to_list()
    [12, 8]
    """
    frame = complete_tables(tables)
    size = shard_bytes(frame["rows"].to_numpy(), frame["dim"].to_numpy(), element_bytes(frame), optimizer)
    devices = placement(rule, frame, size, np.asarray(memory_bytes, dtype=np.float64), seed)
    if (lost := np.flatnonzero(devices < 0)).size:
        name = frame["table"][int(lost[0])]
        raise LayoutError(
            f"table {shown(name)} of {format_bytes(size[lost[0]])} finds no room by the rule {shown(rule)}: split "
            "tables, as ln.shard does, or give the devices more memory."
        )
    shards = pl.DataFrame({"table": frame["table"], "device": devices})
    return Plan.of(frame, shards, memory_bytes, optimizer=optimizer)


def placement(rule: str, tables: pl.DataFrame, size_bytes: Floats, memory_bytes: Floats, seed: int) -> Ints:
    """[tables]: the device of each by a rule, -1 where none has room; the naive ones don't look."""
    at, devices = np.arange(tables.height), len(memory_bytes)
    if is_word(rule, NAIVE):
        return NAIVE[rule](at, devices)
    if not is_word(rule, HEURISTICS):
        raise InputError(f"no rule is called {shown(rule)}; there are: {', '.join((*HEURISTICS, *NAIVE))}.")
    if rule == "random":
        rng = np.random.default_rng(seed)
        weight, load = np.zeros(len(at)), rng.random((len(at), devices))
    else:
        weight = tables.select(GREEDY[rule].cast(pl.Float64)).to_series().to_numpy()
        load = np.zeros((1, devices)).repeat(len(at), axis=0)
    chosen, held, own = np.full(len(at), -1), np.zeros(devices), np.zeros(devices)
    for table in np.argsort(-weight, kind="stable"):
        room = held + size_bytes[table] <= memory_bytes
        if room.any():
            device = int(np.where(room, load[table] + own, np.inf).argmin())
            chosen[table] = device
            held[device] += size_bytes[table]
            own[device] += weight[table]
    return chosen
