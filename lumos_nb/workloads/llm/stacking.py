"""More or fewer layers in place: each pass through a rank's layers becomes deeper or shallower, all else stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import polars as pl

from lumos_nb.errors import LayoutError
from lumos_nb.graph import Graph
from lumos_nb.workloads.llm.layer_search import OUTSIDE
from lumos_nb.workloads.llm.reading import Setup
from lumos_nb.workloads.llm.regrouping import Runs
from lumos_nb.workloads.llm.splicing import PLAN


def deepened(runs: pl.DataFrame, was: Setup, target: Setup) -> pl.DataFrame:
    """The plan with each stack of layers as deep as it is to be: its layers in turn, from the first again."""
    rows: list[tuple[int, int, int, float, int | None, int | None]] = []
    for (rank,), of_rank in runs.group_by("rank", maintain_order=True):
        held = sorted(set(of_rank.filter(pl.col("layer") >= 0)["layer"].to_list()))
        want = _share(len(held), was, target)
        place = 0
        for stack in _stacks(of_rank, held):
            for source, layer, micro_batch in _turned(stack, want):
                rows.append((source, int(str(rank)), place, 1.0, layer, micro_batch))
                place += 1
    plan = pl.DataFrame(rows, schema=PLAN, orient="row")
    return _numbered(plan, runs)


def _share(held: int, was: Setup, target: Setup) -> int:
    """How many layers a rank holds that held so many."""
    many = held * target[0].layers
    if many % was[0].layers or (held and not many):
        raise LayoutError(
            f"layers={target[0].layers}: a rank that holds {held} of {was[0].layers} layers would hold no whole number."
        )
    return many // was[0].layers


Row = tuple[int, int, int | None]


def _stacks(runs: pl.DataFrame, held: list[int]) -> Iterator[list[Row]]:
    """Runs of one rank in order, those of one pass through its layers together."""
    stack: list[Row] = []
    for source, layer, micro_batch in runs.select("source", "layer", "micro_batch").iter_rows():
        if stack and (layer < 0 or layer in [seen for _, seen, _ in stack]):
            yield stack
            stack = []
        if layer < 0:
            yield [(source, layer, micro_batch)]
        else:
            stack.append((source, layer, micro_batch))
            if len(stack) == len(held):
                yield stack
                stack = []
    if stack:
        yield stack


def _turned(stack: list[Row], want: int) -> list[Row]:
    """A stack of as many layers as are wanted, which keep its order: upwards, or downwards in a backward pass."""
    if stack[0][1] < 0:
        return stack
    upwards = sorted(stack, key=lambda row: row[1])
    made = [(upwards[i % len(upwards)][0], i, upwards[0][2]) for i in range(want)]
    return made if upwards == stack else made[::-1]


def _numbered(plan: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """Layers of the plan by their number in the whole model: stages hold the same numbers as before, spread out."""
    held = runs.filter(pl.col("layer") >= 0).group_by("rank")
    first = held.agg(first=pl.col("layer").min(), n=pl.col("layer").n_unique())
    depth = plan.filter(pl.col("layer") >= 0).group_by("to_rank").agg(want=pl.col("layer").max() + 1)
    about = first.join(depth, left_on="rank", right_on="to_rank")
    offset = about.select(to_rank="rank", offset=pl.col("first") // pl.col("n") * pl.col("want"))
    return plan.join(offset, on="to_rank", how="left", maintain_order="left").with_columns(
        layer=pl.when(pl.col("layer") >= 0).then(pl.col("layer") + pl.col("offset").fill_null(0)).otherwise(OUTSIDE)
    ).drop("offset")  # fmt: skip


def levelled(graph: Graph, runs: Runs, spliced: Graph, copies: pl.DataFrame) -> Graph:
    """With every op's time scaled: its copies take on average what the op does over all measured layers."""
    about = graph.ops.select(from_id="op_id", name="name", was_ns="dur_ns", source=runs.source)
    about = about.join(runs.table.drop("rank"), on="source").filter(pl.col("layer") >= 0)
    about = about.with_columns(nth=pl.int_range(pl.len()).over("source", "name"))
    key = ["stage", "phase", "micro_batch", "name", "nth"]
    deep = about.with_columns(n=pl.len().over(key)).filter(pl.col("n") == pl.col("n").max().over("stage", "phase"))
    deep = deep.with_columns(mean_ns=pl.col("was_ns").mean().over(key))
    used = copies.select("op_id", "from_id").join(deep.select("from_id", *key, "was_ns", "mean_ns"), on="from_id")
    factor = used.select("op_id", factor=pl.col("mean_ns") / pl.col("was_ns").mean().over(key))
    ops = spliced.ops.join(factor, on="op_id", how="left", maintain_order="left")
    level = pl.when(pl.col("factor").is_finite()).then((pl.col("dur_ns") * pl.col("factor")).round().cast(pl.Int64))
    return replace(spliced, ops=ops.with_columns(dur_ns=pl.coalesce(level, "dur_ns")).drop("factor"))
