"""Costs of plans that networks have learned before any search, from samples that were measured or priced.

After Zha et al. (MLSys 2023): sets of tables in several widths, and placements that are more or less even, are drawn at
random; one network learns what lookups take, two what exchanges do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from lumos_nb.costs.collectives import CollectiveModel
from lumos_nb.costs.embedding_net import Features, LookupNet
from lumos_nb.costs.embedding_samples import LOOKUPS, call_times, checked_samples, predicted_times
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.lookups import LookupModel, lookup_us
from lumos_nb.costs.networks import arrays_of
from lumos_nb.embedding_tables import complete_tables
from lumos_nb.errors import UNDECODABLE, CalibrationError, InputError, folder_for, named
from lumos_nb.layout import Cluster
from lumos_nb.whole_files import whole
from lumos_nb.workloads.dlrm.exchange_net import ExchangeNet, scored
from lumos_nb.workloads.dlrm.pieces import SMALLEST
from lumos_nb.workloads.dlrm.sharding_costs import FabricExchange, ShardingCosts

MOST_TABLES, GROUPS = 15, 10
"""Tables of a set at most; and groups that have no table in common, one of which scores the network."""


def augmented(tables: pl.DataFrame) -> pl.DataFrame:
    """Every table as it is and with half its columns, a quarter, and so on: what column-wise shards are like.

    Examples
    --------
    >>> augmented(pl.DataFrame({"table": ["a"], "rows": [9], "dim": [16], "pooling": [1.0]}))["dim"].to_list()
    [16, 8, 4]
    """
    levels = [complete_tables(tables)]
    while (half := levels[-1].filter(pl.col("dim") % (2 * SMALLEST) == 0)).height:
        levels.append(half.with_columns(pl.col("dim") // 2))
    return pl.concat(levels)


def priced_lookups(
    model: LookupModel, tables: pl.DataFrame, batches: Sequence[int], count: int = 3000, seed: int = 0
) -> pl.DataFrame:
    """Samples of lookups in random sets of augmented tables, priced by a model: what `LookupNet.fit` takes.

    Sets are of 1 to 15 tables of one group, each for one of the batches: that of a step, and smaller ones, since copies
    of a table are looked up for a part of it.

    Raises
    ------
    LayoutError
        A table cannot be.
    CalibrationError
        There are fewer tables than groups.
    """
    pool = augmented(tables)
    names = pool["table"].unique(maintain_order=True)
    if len(names) < GROUPS:
        raise CalibrationError(f"{len(names)} tables are too few to learn from and to score by: give {GROUPS} or more.")
    rng = np.random.default_rng(seed)
    group = pool["table"].replace_strict(names, rng.permutation(len(names)) % GROUPS, return_dtype=pl.Int64).to_numpy()
    members = [np.flatnonzero(group == one) for one in range(GROUPS)]
    of_call = rng.integers(GROUPS, size=count)
    sets = [rng.choice(members[one], rng.integers(1, MOST_TABLES + 1)) for one in of_call]
    unique = pool.with_columns(table=pl.int_range(pl.len()).cast(pl.String))
    which = rng.integers(len(batches), size=count)
    times = np.empty((count, 2))
    for number, batch in enumerate(batches):
        calls = np.flatnonzero(which == number)
        times[calls] = lookup_us(model, unique, batch, [sets[call].tolist() for call in calls])
    call = np.arange(count).repeat([len(one) for one in sets])
    rows = pool[np.concatenate(sets)].with_columns(
        call=pl.Series(call),
        group=pl.Series(of_call[call]).cast(pl.String),
        batch=pl.Series(np.array(batches, dtype=np.int64)[which[call]]),
        forward_time_us=pl.Series(times[call, 0]),
        backward_time_us=pl.Series(times[call, 1]),
    )
    return LOOKUPS.check(rows).select(*LOOKUPS.columns)


def pretrain(
    samples: pl.DataFrame,
    cluster: Cluster,
    batch: int,
    *,
    exchanges: pl.DataFrame | None = None,
    base: PhysicalLookup | None = None,
    features: Features = "lin",
    speed: tuple[float, ...] | None = None,
    seed: int = 0,
) -> ShardingCosts:
    """Train a network of lookups, and maybe two of exchanges, and score them on what they have not seen.

    A search finds whatever a network is wrong about, more so the fewer samples it had: with a `base`, it has learned
    less by heart and is right further from them.

    Parameters
    ----------
    samples
        Of lookups, measured by `make calibrate` or made by `priced_lookups`: `LOOKUPS`.
    cluster, batch, speed
        As `ShardingCosts.of`.
    exchanges
        Samples of exchanges between the cluster's GPUs, measured or of `priced_exchanges`, as `EXCHANGES`; without any
        the fitted costs of the cluster's collectives price exchanges.
    base
        A physical model fitted on the same samples: the network of lookups learns what it misses.
    features
        What the network of lookups reads of a table.
    seed
        Of weights, minibatches, random placements, and of what is held back.

    Returns
    -------
    costs
        With `report`, a row a network: `samples` that it was trained on, and of those `unseen` the `median_error` and
        `rank_correlation` (Spearman's). Lookups are scored on a group of tables that was not trained on.

    Raises
    ------
    CalibrationError
        There are too few samples, or some are no times; and as `ShardingCosts.of`.

    Examples
    --------
    >>> costs = pretrain(priced_lookups(physical, tables, [65536, 8192]), cluster, 65536)            # doctest: +SKIP
    >>> costs.report                                                                         # doctest: +SKIP
    """
    samples = checked_samples(samples)
    groups = samples["group"].unique().sort()
    unseen = pl.col("group") == groups[int(np.random.default_rng(seed).integers(len(groups)))]
    lookup = LookupNet.fit(samples.filter(~unseen), base=base, features=features, seed=seed)
    test = samples.filter(unseen)
    says, took = predicted_times(lookup, test), call_times(test)
    rows = [
        scored(f"lookup {name}", lookup.calls, says[:, k], took[:, k]) for k, name in enumerate(("forward", "backward"))
    ]
    costs = ShardingCosts.of(lookup, cluster, batch, speed=speed)
    if exchanges is not None:
        net, of_exchanges = ExchangeNet.fit(exchanges, costs.exchange, seed)
        costs, rows = replace(costs, exchange=net), [*rows, *of_exchanges.iter_rows(named=True)]
    return replace(costs, report=pl.DataFrame(rows))


class _Saved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is not in arrays."""

    cluster: Cluster
    collectives: CollectiveModel
    batch: int
    element_bytes: int
    speed: tuple[float, ...]
    report: list[dict[str, str | float | int]]


def save_costs(costs: ShardingCosts, folder: str | Path) -> Path:
    """Write pre-trained costs: arrays and JSON, nothing pickled; `load_costs` reads them.

    Raises
    ------
    InputError
        The costs are not of `pretrain`, or the folder cannot be written.
    """
    lookup, exchange = costs.lookup, costs.exchange
    fabric = exchange.rest if isinstance(exchange, ExchangeNet) else exchange
    if not isinstance(lookup, LookupNet) or not isinstance(fabric, FabricExchange):
        raise InputError("these costs are not of pretrain, whose networks alone are saved: fit the others again.")
    path = folder_for(folder)
    text = _Saved(
        cluster=fabric.cluster, collectives=fabric.collectives, batch=costs.batch, speed=costs.speed,
        element_bytes=fabric.element_bytes, report=costs.report.to_dicts(),
    )  # fmt: skip
    lookup.save(path / "lookup.npz")
    if isinstance(exchange, ExchangeNet):
        arrays: dict[str, Any] = exchange.arrays()
        with whole(path / "exchange.npz", InputError) as part, part.open("wb") as out:
            np.savez(out, **arrays)
    with whole(path / "costs.json", InputError) as part:  # the last, so that there are all or none
        part.write_bytes(msgspec.json.encode(text))
    return path


def load_costs(folder: str | Path) -> ShardingCosts:
    """Read what `save_costs` wrote.

    Raises
    ------
    CalibrationError
        The folder or a file is missing or damaged; the message names it.
    """
    path = named(folder)
    try:
        saved = msgspec.json.decode((path / "costs.json").read_bytes(), type=_Saved)
        fabric = FabricExchange(saved.cluster, saved.collectives, saved.batch, saved.element_bytes)
        costs = ShardingCosts(LookupNet.load(path / "lookup.npz"), fabric, saved.batch, saved.speed)
        if len(saved.speed) != saved.cluster.gpus:
            raise ValueError(f"speeds of {len(saved.speed)} devices, a cluster of {saved.cluster.gpus}")
        if (path / "exchange.npz").exists():
            arrays = arrays_of(named(path / "exchange.npz"))
            costs = replace(costs, exchange=ExchangeNet.of_arrays(arrays, saved.cluster.gpus, fabric))
        return replace(costs, report=pl.DataFrame(saved.report))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, *UNDECODABLE, pl.exceptions.PolarsError) as error:
        raise CalibrationError(f"{path}: no costs of plans that can be read ({error}); train them again.") from error
