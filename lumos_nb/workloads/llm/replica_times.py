"""What replicas do for a stage beside its passes, of thousands of layouts at once: gradients, optimizer, weights.

The buckets of a stage are those of its work table, once for each of its compositions; sizes of collectives are columns,
and each distinct one is priced once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl

from lumos_nb.layout import SIZE_OF, Cluster, Parallelism, Training, Transformer
from lumos_nb.transformer import Weight
from lumos_nb.workloads.llm.layers import Rank
from lumos_nb.workloads.llm.pass_times import Job
from lumos_nb.workloads.llm.stages import Held, buckets_of, held_by, in_order, padded, units_of
from lumos_nb.workloads.pricing import place
from lumos_nb.workloads.work_rows import OPTIMIZER_OPS, WORK

MADE_OF = ("tp", "ep", "etp", "dense", "routed", "first", "last", "folded")
"""Columns that say which weights a rank has of a stage: layers without and with experts, the model's ends, and whether
both of these are on one rank (`zb-v`)."""
SPREAD = ("pp", "dp", "cp", "zero", "shard", "sequence_parallel")
"""And those that say how it shares them."""
LISTED = ("experts", "numbers", "due")
"""Of a bucket: whether its weights are experts', how many numbers it has, and which share of all is there with it."""
TIMES = ("reduce_us", "tail_us", "ready", "step_us", "gather_us", "gather_first_us", "gather_left")
UNITS = ("root", "plain", "dense", "experts")
"""What ZeRO 3 gathers as one: the ends of the model, a layer without experts, and of one with both parts."""


def replica_times(job: Job, stages: pl.DataFrame) -> pl.DataFrame:
    """Times in us of stages, each distinct row of `MADE_OF` and `SPREAD` priced once.

    Parameters
    ----------
    job
        What is trained, and what prices it.
    stages
        Columns `MADE_OF`, `SPREAD` and `begin`, the number of a stage's first layer.

    Returns
    -------
    DataFrame
        Without ZeRO 3 the columns `TIMES`: sums of all gradients and of those due last, which part of the pass is done
        when the first are due, what ends a step, all weights that the next one begins with and the first of them, and
        which part of the pass comes behind the last. With it `gather <unit>` and `reduce <unit>` of each of `UNITS`.
    """
    key = [*MADE_OF, *SPREAD]
    pairs = stages.select(key).unique(maintain_order=True).with_row_index("pair")
    made = stages.group_by(MADE_OF, maintain_order=True).agg(pl.col("begin").first())
    buckets, totals = _compositions(job, made)
    pairs = _with_groups(pairs, job.cluster).join(totals, on=MADE_OF, how="left", maintain_order="left")
    rows = pl.concat([_bucket_rows(pairs, buckets, job.train), _unit_rows(job, pairs), _step_rows(job, pairs)])
    prices = _prices(job, rows)
    times = pairs.select("pair", *key).join(_sums(prices), on="pair", how="left").drop("pair")
    return stages.join(times, on=key, how="left", maintain_order="left")


def _compositions(job: Job, made: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Buckets of each composition of a stage, and how many numbers it has in all."""
    buckets, totals = [], []
    for row in made.iter_rows():
        rank, held = _held(job.model, job.train, row)
        of_rank = dict.fromkeys((False, True), 0) | {
            unit == "experts": sum(h.weight.size for h in members) for unit, members in units_of(held).items()
        }
        seen = dict.fromkeys(of_rank, 0)
        for bucket in buckets_of(rank, held):
            experts, numbers = bucket[0].weight.part == "experts", sum(h.weight.size for h in bucket)
            seen[experts] += numbers
            buckets.append((*row[:-1], experts, numbers, seen[experts] / of_rank[experts]))
        whole = sum(h.weight.size for h in held if h.weight.split == "none" and h.weight.name != "positions")
        totals.append((*row[:-1], of_rank[False], of_rank[True], whole))
    schema = made.drop("begin").schema
    listed = dict(zip(LISTED, (pl.Boolean, pl.Int64, pl.Float64), strict=True))
    of_stage = dict.fromkeys(("dense_numbers", "expert_numbers", "whole_numbers"), pl.Int64)
    return (
        pl.DataFrame(buckets, schema={**schema, **listed}, orient="row"),
        pl.DataFrame(totals, schema={**schema, **of_stage}, orient="row"),
    )


def _held(
    model: Transformer, train: Training, row: tuple[int, ...], *, frozen: bool = False
) -> tuple[Rank, list[Held]]:
    """What a rank trains of a stage, or has with what is frozen, by `MADE_OF` and its first layer."""
    tp, ep, etp, dense, routed, first, last, folded, begin = row
    pipeline: dict[str, Any] = (
        {"pp": 2, "chunks": 2, "schedule": "zb-v"} if folded else {"pp": 1 if first and last else 3}
    )
    layout = Parallelism(tp=tp, ep=ep, etp=etp, dp=ep * (etp or tp), **pipeline)
    stage = 0 if first else layout.pp * layout.chunks - 1 if last else 1
    rank = Rank(model, layout, train)
    return rank, held_by(rank, _weights(model), stage, range(begin, begin + dense + routed), frozen=frozen)


@lru_cache(maxsize=8)
def _weights(model: Transformer) -> Mapping[bool, tuple[Weight, ...]]:
    """Weights of a layer without and with experts, in the order of their use."""
    kinds = {model.has_experts(layer): layer for layer in reversed(range(model.layers))}
    return {kind: in_order(model.weights(layer)) for kind, layer in kinds.items()}


def _with_groups(pairs: pl.DataFrame, cluster: Cluster) -> pl.DataFrame:
    """With size, nodes and GPUs of the groups that each row's stage joins."""
    replicas = pl.col("dp") * pl.col("cp")
    cut = pl.col("ep") * pl.when(pl.col("etp") > 0).then("etp").otherwise("tp")
    sharded = pl.when(pl.col("zero") == 0).then(1).when(pl.col("shard") > 0).then("shard").otherwise(replicas)
    groups = {  # ranks between two members, and members
        "tp": (pl.lit(1, pl.Int64), pl.col("tp")),
        "whole": (pl.col("tp"), replicas),
        "shard": (pl.col("tp"), sharded),
        "replica": (pl.col("tp") * sharded, replicas // sharded),
        "edp": (cut, pl.col("tp") * replicas // cut),
        "pp": (pl.col("tp") * replicas, pl.col("pp")),
    }
    for name, (apart, members) in groups.items():
        asked = [f"{name}_apart", f"{name}_size"]
        pairs = pairs.with_columns(apart.alias(asked[0]), members.alias(asked[1]))
        distinct = pairs.select(asked).unique(maintain_order=True)
        places = [place(_ranks(cluster.gpus, *row), cluster) for row in distinct.iter_rows()]
        found = pl.DataFrame(places, schema=dict.fromkeys((f"{name}_nodes", f"{name}_gpus"), pl.Int64), orient="row")
        pairs = pairs.join(pl.concat([distinct, found], how="horizontal"), on=asked, how="left", maintain_order="left")
    return pairs


def _ranks(gpus: int, apart: int, members: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """All groups of so many ranks that lie so far apart, a row each."""
    return np.arange(gpus).reshape(-1, members, apart).swapaxes(1, 2).reshape(-1, members)


def _on(group: str | pl.Expr, what: str) -> pl.Expr:
    """Size, nodes or GPUs of a group of each row, by its name."""
    if isinstance(group, str):
        return pl.col(f"{group}_{what}")
    names = ("whole", "shard", "edp")
    return pl.coalesce(pl.when(group == name).then(f"{name}_{what}") for name in names)


def _rows(
    frame: pl.DataFrame, what: str, collective: str | pl.Expr, group: str | pl.Expr, size: pl.Expr
) -> pl.DataFrame:
    """One collective a row, of so many bytes; those of a group of one are not there."""
    name = pl.lit(collective) if isinstance(collective, str) else collective
    return frame.filter(_on(group, "size") > 1).select(
        "pair", "due", "count", what=pl.lit(what), kind=pl.lit("comm"), collective=name,
        size_bytes=size.cast(pl.Int64), nodes=_on(group, "nodes"), gpus=_on(group, "gpus"),
        op=pl.lit(None, pl.String), rows=pl.lit(None, pl.Int64),
    ).filter(pl.col("size_bytes") > 0)  # fmt: skip


def _upwards(numbers: pl.Expr, members: pl.Expr) -> pl.Expr:
    """The next multiple."""
    return (numbers + members - 1) // members * members


def _bucket_rows(pairs: pl.DataFrame, buckets: pl.DataFrame, train: Training) -> pl.DataFrame:
    """Without ZeRO 3: the sums of each bucket, and its new weights."""
    at = pairs.filter(pl.col("zero") < 3).join(buckets, on=MADE_OF, how="inner").with_columns(count=pl.lit(1, pl.Int64))
    zero = pl.col("zero") > 0
    group = pl.when("experts").then(pl.lit("edp")).when(zero).then(pl.lit("shard")).otherwise(pl.lit("whole"))
    members = _on(group, "size")
    size = pl.when(zero).then(_upwards(pl.col("numbers"), members)).otherwise("numbers")
    collective = pl.when(zero).then(pl.lit("reduce_scatter")).otherwise(pl.lit("all_reduce"))
    grad, number = SIZE_OF[train.grad_dtype], SIZE_OF[train.kept_dtype]
    parts = at.filter(zero & ~pl.col("experts"))
    return pl.concat(
        [
            _rows(at, "reduce", collective, group, size * grad),
            _rows(parts, "reduce", "all_reduce", "replica", size * grad // pl.col("shard_size")),
            _rows(at.filter(zero), "new weights", "all_gather", group, size * number),
        ]
    )


def _unit_rows(job: Job, pairs: pl.DataFrame) -> pl.DataFrame:
    """ZeRO 3: what each of the units of a stage gathers and adds up."""
    asked = pairs.filter(pl.col("zero") == 3)
    distinct = asked.select(*MADE_OF, "shard_size", "edp_size").unique(maintain_order=True)
    units = [(*row, *unit) for row in distinct.iter_rows() for unit in _units(job, row[: len(MADE_OF)], *row[-2:])]
    listed = {"unit": pl.String(), **dict.fromkeys(("count", "numbers", "trained"), pl.Int64())}
    schema = pl.Schema({**distinct.schema, **listed})
    frame = pl.DataFrame(units, schema=schema, orient="row").with_columns(due=pl.lit(1.0))
    at = asked.join(frame, on=distinct.columns, how="inner")
    gathered = pl.col("numbers") * SIZE_OF[job.train.kept_dtype]
    reduced = pl.col("trained") * SIZE_OF[job.train.grad_dtype]
    found = []
    for unit in UNITS:
        some, group = at.filter(unit=unit), "edp" if unit == "experts" else "shard"
        found += [
            _rows(some, f"gather {unit}", "all_gather", group, gathered),
            _rows(some, f"reduce {unit}", "reduce_scatter", group, reduced),
        ]
        if group == "shard":
            found.append(_rows(some, f"reduce {unit}", "all_reduce", "replica", reduced // pl.col("shard_size")))
    return pl.concat(found)


def _units(job: Job, made_of: tuple[int, ...], shard: int, edp: int) -> Iterator[tuple[str, int, int, int]]:
    """Units of a stage: which, how many, numbers of one, and of these what is trained."""
    tp, ep, etp, dense, routed, first, last, folded = made_of
    yield "root", 1, *_of_ends(job.model, job.train, (tp, ep, etp, 0, 0, first, last, folded, 0), shard)
    for unit, kind, count in (("plain", False, dense), ("dense", True, routed), ("experts", True, routed)):
        members = edp if unit == "experts" else shard
        yield unit, count, *_of_layer(job.model, job.train, (tp, ep, etp), kind, unit == "experts", members)


@lru_cache(maxsize=4096)
def _of_ends(model: Transformer, train: Training, row: tuple[int, ...], members: int) -> tuple[int, int]:
    """Numbers of a stage's ends, and of these what is trained."""
    every, trained = (_held(model, train, row, frozen=frozen)[1] for frozen in (True, False))
    return _padded((h.weight for h in every), members), _padded((h.weight for h in trained), members)


@lru_cache(maxsize=4096)
def _of_layer(
    model: Transformer, train: Training, cut: tuple[int, int, int], kind: bool, experts: bool, members: int
) -> tuple[int, int]:
    """The same of a layer's dense weights, or of its experts'."""
    tp, ep, etp = cut
    rank = Rank(model, Parallelism(tp=tp, ep=ep, etp=etp, dp=ep * (etp or tp)), train)
    weights = [w for w in _weights(model).get(kind, ()) if w.name != "router bias"]
    of_unit = [weight for weight in weights if (weight.part == "experts") == experts]
    every, trained = (_padded(map(rank.shard, some), members) for some in (of_unit, rank.trained(of_unit)))
    return every, trained


def _padded(weights: Iterable[Weight], members: int) -> int:
    return sum(padded(weight, members) for weight in weights)


def _step_rows(job: Job, pairs: pl.DataFrame) -> pl.DataFrame:
    """What ends a step: sums that micro-batches leave open, and the optimizer."""
    model, train = job.model, job.train
    grad = SIZE_OF[train.grad_dtype]
    at = pairs.with_columns(due=pl.lit(1.0), count=pl.lit(1, pl.Int64))
    spread = pl.when(pl.col("zero") == 3).then("shard_size").otherwise(1)
    whole = (pl.col("whole_numbers") / spread).ceil()
    found = [_rows(at.filter("sequence_parallel"), "step", "all_reduce", "tp", whole * grad)]
    if model.tied and not train.lora:
        two = at.filter((pl.col("first") != pl.col("last")) & ~pl.col("folded")).with_columns(
            pp_nodes=pl.min_horizontal("pp_nodes", 2), pp_gpus=pl.lit(2, pl.Int64)
        )
        found.append(_rows(two, "step", "all_reduce", "pp", model.vocab * model.hidden // pl.col("tp") * grad))
    ops = [OPTIMIZER_OPS[train.optimizer], *(["cast"] if train.master else [])]
    for unit, group in (("dense", "shard"), ("expert", "edp")):
        spread = pl.when(pl.col("zero") > 0).then(f"{group}_size").otherwise(1)
        height = (pl.col(f"{unit}_numbers") / spread / model.hidden).ceil().cast(pl.Int64)
        found += [
            at.filter(pl.col(f"{unit}_numbers") > 0).select(
                "pair", "due", "count", what=pl.lit("step"), kind=pl.lit("compute"),
                collective=pl.lit(None, pl.String), size_bytes=pl.lit(None, pl.Int64),
                nodes=pl.lit(None, pl.Int64), gpus=pl.lit(None, pl.Int64), op=pl.lit(op), rows=height,
            )
            for op in ops
        ]  # fmt: skip
    return pl.concat(found)


def _prices(job: Job, rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with what `one` of each takes, and all of them: `us`, and `issue` of the host."""
    key = ["kind", "collective", "size_bytes", "nodes", "gpus", "op", "rows"]
    distinct = rows.select(key).unique(maintain_order=True)
    cast = pl.col("op") == "cast"
    compute = pl.col("kind") == "compute"
    asked = distinct.with_columns(
        phase=pl.when(compute).then(pl.lit("optimizer")),
        dtype=pl.when(compute).then(pl.lit("fp32")),
        cols=pl.when(compute).then(job.model.hidden),
        out_dtype=pl.when(cast).then(pl.lit(job.train.kept_dtype)),
    ).with_columns(pl.when(compute).then(pl.when(cast).then(pl.lit("fwd")).otherwise(pl.lit("any"))).alias("pass"))
    table = pl.concat([pl.DataFrame(schema=dict(WORK)), asked], how="diagonal_relaxed")
    took = distinct.with_columns(us=(found := job.priced(table))["dur_us"], issue=found["launch_us"])
    return rows.join(took, on=key, how="left", nulls_equal=True, maintain_order="left").with_columns(
        pl.col("us", "issue") * pl.col("count"), one=pl.col("us")
    )


def _sums(prices: pl.DataFrame) -> pl.DataFrame:
    """The columns of `replica_times` by pair, from its priced rows."""

    def of(what: str, column: str = "us") -> pl.Expr:
        return pl.col(column).filter(pl.col("what") == what)

    weights = of("new weights"), of("new weights", "size_bytes")
    sums = {
        "reduce_us": of("reduce").sum(),
        "tail_us": pl.col("us").filter((pl.col("what") == "reduce") & (pl.col("due") == 1)).sum(),
        "ready": of("reduce", "due").min().fill_null(1.0),
        "step_us": of("step").sum(),
        "gather_us": weights[0].sum(),
        "gather_first_us": weights[0].first().fill_null(0.0),
        "gather_left": (weights[1].last() / weights[1].sum()).fill_null(0.0),
    }
    for what in ("gather", "reduce"):
        sums |= {f"{what} {unit}": (of(f"{what} {unit}", "one").sum()) for unit in UNITS}
        sums[f"{what}_issue_us"] = pl.col("issue").filter(pl.col("what").str.starts_with(what)).sum()
    return prices.group_by("pair").agg(**sums)
