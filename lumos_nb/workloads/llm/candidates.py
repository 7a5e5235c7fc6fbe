"""Every layout that a search looks at, as a frame, and why some of them cannot be."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import msgspec
import polars as pl

from lumos_nb.errors import InputError, LayoutError, shown
from lumos_nb.layout import CHUNKS, Cluster, Parallelism, Training, Transformer, problems
from lumos_nb.transformer import MOST, plain

OF_LAYOUT: Mapping[str, pl.DataType] = {
    "tp": pl.Int64(),
    "sequence_parallel": pl.Boolean(),
    "pp": pl.Int64(),
    "schedule": pl.String(),
    "chunks": pl.Int64(),
    "dp": pl.Int64(),
    "zero": pl.Int64(),
    "shard": pl.Int64(),
    "cp": pl.Int64(),
    "cp_mode": pl.String(),
    "ep": pl.Int64(),
    "etp": pl.Int64(),
}
OF_TRAINING: Mapping[str, pl.DataType] = {"micro_batch": pl.Int64(), "recompute": pl.String()}
AXES: Mapping[str, pl.DataType] = {"gpus": pl.Int64(), **OF_LAYOUT, **OF_TRAINING}
"""Columns of a frame of candidates: what a search goes through."""

MOST_CHUNKS, MOST_SEQUENCES = 8, 16
"""Chunks a rank, and sequences a micro-batch, that are tried if nothing else is asked for."""
A_NODE = -1
"""As `shard`: as many ranks as a node has."""


class Candidate(NamedTuple):
    """What `estimate(model, *candidate)` takes behind the model."""

    layout: Parallelism
    train: Training
    cluster: Cluster


def cluster_of(cluster: Cluster, gpus: object) -> Cluster:
    """As many GPUs of a cluster: whole nodes, or a part of one.

    Raises
    ------
    LayoutError
        The cluster has fewer, or nodes would be left in part.
    """
    room = f"a part of one node of {cluster.gpus_per_node}, or whole ones of the {cluster.nodes}"
    if isinstance(gpus, bool) or not isinstance(gpus, numbers.Integral):
        raise InputError(f"gpus={shown(gpus)}: give {room}.")
    gpus = int(gpus)
    per_node = min(gpus, cluster.gpus_per_node)
    if not 0 < gpus <= cluster.gpus or gpus % per_node:
        raise LayoutError(f"gpus={shown(gpus)}: give {room}.")
    return msgspec.structs.replace(cluster, nodes=gpus // per_node, gpus_per_node=per_node)


def candidate(row: Mapping[str, Any], train: Training, cluster: Cluster) -> Candidate:
    """Layout, training and cluster of a row of a frame of candidates."""
    changed = msgspec.structs.replace(train, **{name: row[name] for name in OF_TRAINING})
    return Candidate(Parallelism(**{name: row[name] for name in OF_LAYOUT}), changed, cluster_of(cluster, row["gpus"]))


_REPLICAS = pl.col("dp") * pl.col("cp")
_CUT = pl.when(pl.col("etp") > 0).then("etp").otherwise("tp")
_STEPS: tuple[tuple[tuple[str, ...], Mapping[str, pl.Expr]], ...] = (
    (
        ("schedule", "chunks"),
        {
            "schedule": pl.when(pl.col("pp") > 1).then("schedule").otherwise(pl.lit("1f1b")),
            "chunks": pl.when(pl.col("pp") > 1).then("chunks").otherwise(1),
        },
    ),
    (("sequence_parallel",), {"sequence_parallel": pl.col("sequence_parallel") & (pl.col("tp") > 1)}),
    (("cp_mode",), {"cp_mode": pl.when(pl.col("cp") > 1).then("cp_mode").otherwise(pl.lit("ring"))}),
    (("ep", "etp"), {"etp": pl.when(pl.col("etp") != pl.col("tp")).then("etp").otherwise(0)}),
    (("zero",), {"zero": pl.when(_REPLICAS > 1).then("zero").otherwise(0)}),
    (("shard",), {"shard": pl.when((pl.col("zero") > 0) & (pl.col("shard") != _REPLICAS)).then("shard").otherwise(0)}),
    (("micro_batch", "recompute"), {}),
)
"""Axes in the order in which they are crossed, each with what it is where it would change nothing."""


def candidates(
    model: Transformer, cluster: Cluster, train: Training, gpus: Sequence[object], ranges: Mapping[str, object]
) -> pl.DataFrame:
    """Every combination of `AXES` whose sizes multiply to the number of GPUs, each once.

    Options that would change nothing (sequence parallelism without tensor parallelism, ZeRO without replicas) are off.

    Returns
    -------
    DataFrame
        `AXES` and `why_not`: null, or every reason why a combination cannot be.

    Raises
    ------
    InputError
        No axis has a name, or a value is of the wrong kind.
    LayoutError
        The cluster has no such part, or no layout at all can be: a format that the GPU lacks, a sequence too long.
    """
    axes = _axes(model, cluster, train, gpus, ranges)
    one = msgspec.structs.replace(train, micro_batch=1, global_batch=1)
    if always := problems(model, Parallelism(), one, cluster_of(cluster, 1)):
        raise LayoutError("\n".join(always))
    parts = pl.col("tp") * pl.col("cp") * pl.col("pp")
    frame = _cross(axes, ("gpus", "tp", "cp", "pp")).filter(pl.col("gpus") % parts == 0)
    frame = frame.with_columns(dp=pl.col("gpus") // parts)
    if "dp" in axes:
        frame = frame.filter(pl.col("dp").is_in(axes["dp"].implode()))
    legal = [(kind, n) for kind, (fewest, most) in CHUNKS.items() for n in axes["chunks"] if fewest <= n <= most]
    for names, off in _STEPS:
        crossed = _cross(axes, names)
        if names == ("schedule", "chunks"):
            crossed = crossed.filter(pl.struct(names).is_in([dict(zip(names, pair, strict=True)) for pair in legal]))
        frame = frame.join(crossed, how="cross")
        if names == ("shard",):
            frame = _with_nodes(frame, cluster.gpus_per_node)
        frame = frame.with_columns(**off).unique(maintain_order=True) if off else frame
        if "ep" in names:
            frame = frame.filter(pl.col("tp") * _REPLICAS % (pl.col("ep") * _CUT) == 0)
    if frame.is_empty():
        asked = ", ".join(f"{name}={shown(ranges[name])}" for name in ranges) or "the usual values"
        raise LayoutError(f"no layout of {', '.join(map(str, gpus))} GPUs has {asked}: sizes must multiply to them.")
    return _with_reasons(frame, model, train)


def _with_nodes(frame: pl.DataFrame, per_node: int) -> pl.DataFrame:
    """`A_NODE` as a number of ranks, none where these are no part of all."""
    ranks = per_node // pl.col("tp")
    fits = (ranks > 1) & (_REPLICAS % ranks == 0)
    node = pl.when(fits).then(ranks).otherwise(0)
    return frame.with_columns(shard=pl.when(pl.col("shard") == A_NODE).then(node).otherwise("shard"))


def _axes(
    model: Transformer, cluster: Cluster, train: Training, gpus: Sequence[object], ranges: Mapping[str, object]
) -> dict[str, pl.Series]:
    """Values of each axis: those asked for, else the usual ones."""
    if unknown := set(ranges) - set(AXES):
        raise InputError(f"no axis is called {', '.join(sorted(unknown))}; there are: {', '.join(AXES)}.")
    if not gpus:
        raise InputError("gpus=[]: give a number of GPUs, or several.")
    counts = [cluster_of(cluster, number).gpus for number in gpus]
    divisors = [n for n in range(1, max(counts) + 1) if any(number % n == 0 for number in counts)]
    inside = [n for n in divisors if n <= cluster.gpus_per_node]
    values: dict[str, object] = {
        "gpus": counts,
        "tp": inside,
        "cp": inside,
        "pp": [n for n in divisors if n <= model.layers],
        "schedule": [kind for kind in CHUNKS if kind != "gpipe"],  # 1f1b takes as long, and less memory
        "chunks": [n for n in range(1, MOST_CHUNKS + 1) if model.layers % n == 0],
        "sequence_parallel": [False, True],
        "cp_mode": ["ring"],
        "ep": [n for n in range(1, model.moe.experts + 1) if model.moe.experts % n == 0] if model.moe else [1],
        "etp": [0, 1] if model.moe else [0],
        "zero": [0, 1, 2, 3],
        "shard": [0, A_NODE],
        "micro_batch": [2**n for n in range(MOST_SEQUENCES.bit_length()) if 2**n <= train.global_batch],
        "recompute": ["none", "selective", "full"],
    }
    return {name: _series(name, given) for name, given in {**values, **ranges}.items()}


_WORDS: Mapping[str, tuple[object, ...]] = {
    "schedule": tuple(CHUNKS), "cp_mode": ("ring", "all_gather"), "recompute": ("none", "selective", "full"),
    "zero": (0, 1, 2, 3),
}  # fmt: skip
"""Values of the axes that have few."""


def _series(name: str, given: object) -> pl.Series:
    """Distinct values of an axis, of its type."""
    wanted: type = {pl.String(): str, pl.Boolean(): bool, pl.Int64(): int}[AXES[name]]
    asked = plain(given)
    one = not isinstance(asked, Iterable) or isinstance(asked, str | bytes | bytearray | memoryview | Mapping)
    values: list[Any] = [asked] if one else [*asked]
    least = {"zero": 0, "etp": 0, "shard": A_NODE}.get(name, 1)
    if not values:
        raise InputError(f"{name}={shown(given)}: give at least one value.")
    for value in values:
        if type(value) is not wanted or (type(value) is int and not least <= value <= MOST):
            raise InputError(f"{name}={shown(value)}: give one {wanted.__name__} or several in a list.")
        if value not in _WORDS.get(name, (value,)):
            raise InputError(f"{name}={shown(value)}: there are {', '.join(map(repr, _WORDS[name]))}.")
    return pl.Series(name, values, dtype=AXES[name]).unique(maintain_order=True)


def _cross(axes: Mapping[str, pl.Series], names: Sequence[str]) -> pl.DataFrame:
    return reduce(lambda left, right: left.join(right, how="cross"), [axes[name].to_frame() for name in names])


_REASONS = (
    ("tp", "sequence_parallel", "cp"),
    ("pp", "schedule", "chunks", "dp", "micro_batch"),
    ("tp", "cp", "dp", "ep", "etp"),
    ("cp", "dp", "zero", "shard"),
)
"""Axes that decide together whether a layout can be; each group is looked at by itself."""
_TEXTS = pl.List(pl.String())


def _with_reasons(frame: pl.DataFrame, model: Transformer, train: Training) -> pl.DataFrame:
    """The frame with `why_not`: the `problems` of its groups of axes, all else being one."""
    found = []
    for number, names in enumerate(_REASONS):
        distinct = frame.select(names).unique(maintain_order=True)
        texts = pl.Series([_problems(row, model, train) for row in distinct.iter_rows(named=True)], dtype=_TEXTS)
        reasons = distinct.with_columns(texts.alias(f"why_not/{number}"))
        frame = frame.join(reasons, on=names, how="left", maintain_order="left")
        found.append(f"why_not/{number}")
    every = pl.concat_list(found).list.unique(maintain_order=True)
    return frame.select(*AXES, why_not=every.list.join(" ").replace("", None))


def _problems(row: dict[str, Any], model: Transformer, train: Training) -> list[str]:
    changed = msgspec.structs.replace(train, micro_batch=row.pop("micro_batch", 1))
    try:
        return problems(model, Parallelism(**row), changed)
    except LayoutError as error:
        return [str(error)]
