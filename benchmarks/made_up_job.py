"""A made-up run of a large language model: every rank of a layout, from the step that `estimate` lays out.

`estimate` has one rank of each pipeline stage; here each gets its tensor- and data-parallel replicas, whose durations
vary by rank and op, so that they wait for each other at collectives. Ranks count as Megatron-LM counts them: tensor
parallel first, then data parallel, then pipeline stages.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from lumos_nb._job_files import EDGES_TO_RANK, write_rank
from lumos_nb.executors import spread
from lumos_nb.jobs import Job, ReplayedJob, finish_job
from lumos_nb.lanes import ABSENT
from lumos_nb.layout import Cluster, Parallelism, Training
from lumos_nb.schema import OPS
from lumos_nb.transformer import Transformer
from lumos_nb.workloads.llm.estimates import estimate

OP_JITTER, RANK_JITTER = 0.05, 0.01
"""Standard deviations of the logarithm of durations: of each op, and of all ops of a rank together."""

FAMILIES = ("tp", "dp", "pp")
"""Groups whose ranks meet in collectives: tensor parallel, data parallel, and the two ends of a pipeline."""


@dataclass(frozen=True)
class Stage:
    """The ops of one pipeline stage, on any of its ranks.

    Attributes
    ----------
    ops
        `schema.OPS`, with an arrival before each collective.
    edges
        `EDGES_TO_RANK` with stages as `src_rank` and rows of their ops as ends.
    meets
        Family -> rows of the arrivals at its collectives, in order; the transfer has the next row.
    """

    ops: pl.DataFrame
    edges: pl.DataFrame
    meets: dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """What the ranks of a layout do, and what one rank of each stage alone makes of it, without jitter."""

    layout: Parallelism
    stages: tuple[Stage, ...]
    alone_ops: int
    alone_step_ns: int


@dataclass(frozen=True)
class MadeUp:
    """A run to be written: what its ranks do, and which there are."""

    layout: Parallelism
    stages: tuple[Stage, ...]
    present: frozenset[int]
    seed: int
    measured: ReplayedJob | None

    def place(self, rank: int) -> tuple[int, int, int]:
        """Tensor-parallel, data-parallel and pipeline position of a rank."""
        rest, tensor = divmod(rank, self.layout.tp)
        stage, data = divmod(rest, self.layout.dp)
        return tensor, data, stage

    def rank(self, tensor: int, data: int, stage: int) -> int:
        """The rank at a place."""
        return tensor + self.layout.tp * (data + self.layout.dp * stage)

    def members(self, family: str, rank: int) -> list[int]:
        """The ranks of a family that meet with one."""
        tensor, data, stage = self.place(rank)
        if family == "tp":
            return [self.rank(other, data, stage) for other in range(self.layout.tp)]
        if family == "dp":
            return [self.rank(tensor, other, stage) for other in range(self.layout.dp)]
        return [self.rank(tensor, data, other) for other in (0, self.layout.pp - 1)]

    def there(self, family: str, rank: int) -> list[int]:
        """Those of them that are present."""
        return [other for other in self.members(family, rank) if other in self.present]

    def stage(self, rank: int) -> Stage:
        """What a rank does."""
        return self.stages[self.place(rank)[2]]

    def joins(self, rank: int) -> dict[str, int]:
        """Family -> row of the first of its joins, of the families whose lowest present rank is `rank`."""
        row, firsts = len(self.stage(rank).ops), {}
        for family, arrivals in self.stage(rank).meets.items():
            there = self.there(family, rank)
            if len(there) > 1 and there[0] == rank:
                firsts[family] = row
                row += len(arrivals)
        return firsts


def laid_out(model: Transformer, layout: Parallelism, train: Training, cluster: Cluster) -> Run:
    """The stages of a step as `estimate` lays it out."""
    found = estimate(model, layout, train, cluster)
    graph = found.graph
    meets = (pl.col("kind") == "comm") & ~pl.col("collective").is_in(["send", "recv"])
    ops = graph.ops.with_columns(family=pl.when(meets).then(pl.col("group").str.head(2)))
    alone = ((pl.col("family") == "tp") & (layout.tp == 1)) | ((pl.col("family") == "dp") & (layout.dp == 1))
    ops = ops.with_columns(family=pl.when(~alone).then("family"))
    here = pl.col("family").is_not_null()
    ops = ops.with_columns(
        transfer=(pl.int_range(pl.len()) + here.cum_sum()).over("rank"),
        comm_seq=pl.when(here).then(pl.int_range(pl.len()).over("rank", "family")),
    )
    ends = graph.edges.join(ops.select("rank", "transfer", src="op_id"), on="src", maintain_order="left").join(
        ops.select("transfer", "family", to="rank", dst="op_id"), on="dst", maintain_order="left", suffix="_dst"
    )
    ends = ends.filter((pl.col("rank") == pl.col("to")) | pl.col("family").is_null())  # others meet in a join
    edges = ends.with_columns(
        src_rank="rank", src="transfer", dst=pl.col("transfer_dst") - pl.col("family").is_not_null()
    )
    arrivals = ops.filter(here).with_columns(
        kind=pl.lit("event"), name=pl.lit("arrival"), dur_ns=pl.lit(0, pl.Int64), transfer=pl.col("transfer") - 1
    )
    rows = pl.concat([ops, arrivals]).sort("rank", "transfer")
    stages = tuple(_stage(rows.filter(rank=stage), edges.filter(to=stage)) for stage in range(layout.pp))
    return Run(layout, stages, len(graph.ops), found.step_ns)


def _stage(rows: pl.DataFrame, edges: pl.DataFrame) -> Stage:
    arrivals = (rows["kind"] == "event").to_numpy()
    meets = {family: np.flatnonzero(arrivals & rows["family"].eq_missing(family).to_numpy()) for family in FAMILIES}
    return Stage(
        rows.select(*OPS.columns),
        edges.select(pl.col(name).cast(kind) for name, kind in EDGES_TO_RANK.columns.items()),
        {family: found for family, found in meets.items() if len(found)},
    )


def gpt3(tp: int, dp: int, pp: int, ops_per_rank: int) -> Run:
    """A step of GPT-3 175B with as many micro-batches as give the ranks about so many ops.

    A stage has 12 layers, on fewer than 8 of them too, so that a rank does the same on any number of ranks.
    """
    layout = Parallelism(tp=tp, dp=dp, pp=pp)
    inside = min(layout.world, 8)
    fabrics = {"inside": "NVLink4 NVSwitch", "between": "InfiniBand NDR 400"}
    cluster = Cluster(gpu="H100-SXM-80GB", nodes=layout.world // inside, gpus_per_node=inside, **fabrics)
    model = msgspec.structs.replace(Transformer.named("gpt3-175b"), layers=12 * pp)

    def run(batches: int) -> Run:
        return laid_out(model, layout, Training(micro_batch=1, global_batch=batches * dp, seq=2048), cluster)

    few = 2 * pp  # enough for every kind of pass; each further one adds as many ops
    counts = [max(len(stage.ops) for stage in run(batches).stages) for batches in (few, few + 1)]
    return run(max(1, few + round((ops_per_rank - counts[0]) / (counts[1] - counts[0]))))


def write(
    folder: Path,
    run: Run,
    *,
    ranks: Collection[int] | None = None,
    measured: ReplayedJob | None = None,
    seed: int = 0,
    executor: Executor | None = None,
) -> Job:
    """Write the job, a rank at a time; of some `ranks` alone with waits for the others as `measured` on all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    present = frozenset(range(run.layout.world) if ranks is None else ranks)
    made = MadeUp(run.layout, run.stages, present, seed, measured)
    return finish_job(folder, spread(executor, partial(_write_rank, folder, made), sorted(present)))


def _write_rank(folder: Path, made: MadeUp, rank: int) -> pl.DataFrame:
    ops, edges = _ops(made, rank), _edges(made, rank)
    if made.measured is not None:
        ops, edges = _with_waits(made, rank, ops, edges)
    src_rank = pl.col("src_rank").cast(pl.Int64)
    return write_rank(folder, rank, ops, edges.with_columns(src=_id(src_rank, "src"), dst=_id(rank, "dst")))


def _id(rank: pl.Expr | int, row: str) -> pl.Expr:
    """The op id of a row of a rank's table."""
    return rank * 2**32 + pl.col(row)


def _ops(made: MadeUp, rank: int) -> pl.DataFrame:
    """A rank's ops with their jitter, and the joins that it has."""
    stage, draw = made.stage(rank), np.random.default_rng([made.seed, rank])
    jitter = np.exp(draw.normal(0, RANK_JITTER) + draw.normal(0, OP_JITTER, len(stage.ops)))
    named = {family: f"{family} of rank {made.members(family, rank)[0]}" for family in stage.meets}
    family = pl.col("group").str.head(2)
    joined = [
        stage.ops[arrivals].with_columns(
            kind=pl.lit("join"), lane=pl.lit("net"), device=pl.lit(None, pl.Int32), name=pl.lit(f"join of {name}")
        )
        for name, arrivals in stage.meets.items()
        if name in made.joins(rank)
    ]
    ops = stage.ops.with_columns(dur_ns=pl.Series(np.rint(stage.ops["dur_ns"].to_numpy() * jitter).astype(np.int64)))
    return pl.concat([ops, *joined]).with_columns(
        rank=pl.lit(rank, pl.Int32),
        op_id=rank * 2**32 + pl.int_range(pl.len(), dtype=pl.Int64),
        group=pl.when(pl.col("comm_seq").is_not_null()).then(family.replace(named)).otherwise("group"),
    )


def _edges(made: MadeUp, rank: int) -> pl.DataFrame:
    """The edges that lead to a rank's ops, from ranks that are there; ends are rows of the ranks' tables."""
    stage, (tensor, data, _) = made.stage(rank), made.place(rank)
    from_rank = {other: made.rank(tensor, data, other) for other in range(made.layout.pp)}
    edges = stage.edges.with_columns(pl.col("src_rank").replace(from_rank))
    parts = [edges.filter(pl.col("src_rank").is_in(sorted(made.present)))]
    for family, arrivals in stage.meets.items():
        there = made.there(family, rank)
        if len(there) == 1:
            parts.append(_joined(rank, arrivals, arrivals + 1))
            continue
        first = made.joins(there[0])[family] + np.arange(len(arrivals))
        parts.append(_joined(there[0], first, arrivals + 1))
        if rank == there[0]:
            parts += [_joined(other, made.stage(other).meets[family], first) for other in there]
    return pl.concat(parts)


def _joined(src_rank: int, src: np.ndarray, dst: np.ndarray, rule: str = "collective") -> pl.DataFrame:
    columns = {"src_rank": src_rank, "lag_ns": 0, "from_start": False, "rule": rule, "evidence": "exact", "hard": True}
    table = pl.DataFrame({"src": src, "dst": dst}).with_columns(pl.lit(v).alias(c) for c, v in columns.items())
    return table.select(pl.col(name).cast(kind) for name, kind in EDGES_TO_RANK.columns.items())


def _with_waits(made: MadeUp, rank: int, ops: pl.DataFrame, edges: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """With an explicit wait before each op that absent ranks held up, as long as it was `measured` on all of them."""
    assert made.measured is not None
    stage, times = made.stage(rank), made.measured.ops_of(rank).select("start_ns", "dur_ns")
    lacking = [
        arrivals + 1
        for family, arrivals in stage.meets.items()
        if len(made.there(family, rank)) < len(made.members(family, rank))
    ]
    tensor, data, _ = made.place(rank)
    absent = [other for other in range(made.layout.pp) if made.rank(tensor, data, other) not in made.present]
    lost = stage.edges.filter(pl.col("src_rank").is_in(absent))["dst"].to_numpy()
    held = np.unique(np.concatenate([*lacking, lost])).astype(np.int64)
    arrivals = _joined(rank, held - 1, held).filter(pl.Series(np.isin(held, np.concatenate([*lacking, []]))))
    ready = pl.concat([edges.filter((pl.col("src_rank") == rank) & pl.col("dst").is_in(held)), arrivals])
    ended = pl.col("start_ns") + pl.when("from_start").then(0).otherwise("dur_ns") + pl.col("lag_ns")
    latest = (
        ready.hstack(times[ready["src"]])
        .with_columns(ready_ns=ended)
        .group_by("dst")
        .agg(pl.col("ready_ns").max())
        .sort("dst")
    )
    waits = len(ops) + np.arange(len(latest))
    wait_of = dict(zip(latest["dst"], waits, strict=True))
    waiting = ops[latest["dst"]].with_columns(
        op_id=rank * 2**32 + pl.Series(waits), kind=pl.lit("unexplained"), name=pl.lit(ABSENT),
        dur_ns=times["start_ns"][latest["dst"]] - latest["ready_ns"],
    )  # fmt: skip
    to_wait = ready.with_columns(pl.col("dst").replace(wait_of))
    return pl.concat([ops, waiting]), pl.concat(
        [edges, to_wait, _joined(rank, waits, latest["dst"].to_numpy(), "delay")]
    )
