"""Which runs of a measured step a rank of another pipeline goes through: passes by the schedule, and messages between.

A run of a pass is its layer's, or belongs to the first or the last end of the model. What stages do at their edges
(messages, what prepares them) is left behind and put in anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import polars as pl

from lumos_nb._replay_plan import Plan
from lumos_nb.errors import LayoutError
from lumos_nb.graph import Graph
from lumos_nb.workloads.llm.reading import Setup
from lumos_nb.workloads.llm.schedule import dependencies, schedule
from lumos_nb.workloads.llm.splicing import PLAN
from lumos_nb.workloads.llm.structure import MESSAGE, OUTSIDE, Structure

FIRST, LAST, EDGE, BEGIN, END = "first", "last", "edge", "begin", "end"
"""Where a run outside the layers belongs: an end of the model, an edge of a stage, before or behind all passes."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a structure.

    Attributes
    ----------
    table
        `source` (a number over all ranks), `rank`, `stage`, `phase`, `layer`, `micro_batch`, `section` (null in layers
        and messages), in order on each rank.
    source
        The run of every op.
    """

    table: pl.DataFrame
    source: pl.Series

    @classmethod
    def of(cls, structure: Structure) -> Runs:
        """Number the runs and say where each belongs."""
        places = structure.ops.with_columns(
            source=pl.when(pl.col("run").is_not_null()).then(pl.struct("rank", "run").rank("dense")).cast(pl.Int64)
        )
        runs = places.drop_nulls("source").group_by("source").agg(
            pl.col("rank", "run", "phase", "layer", "micro_batch").first()
        ).sort("rank", "run")  # fmt: skip
        runs = runs.with_columns(stage=pl.col("rank").replace_strict(structure.stage, return_dtype=pl.Int32))
        return cls(runs.with_columns(section=_sections(runs)), places["source"])

    @property
    def passes(self) -> int:
        """Micro-batches of a step."""
        return int(self.table.filter(pl.col("phase") == "forward")["micro_batch"].max() or 0) + 1  # type: ignore[arg-type]


def _sections(runs: pl.DataFrame) -> pl.Expr:
    """Where each run belongs, by what was before it on its rank and in its pass."""
    last = runs["stage"].max()
    phase, inside = pl.col("phase"), pl.col("layer") >= 0
    of_pass = ["rank", "phase", "micro_batch"]
    optimizer, passes = phase == "optimizer", phase.is_in(["forward", "backward"]) & (pl.col("micro_batch") >= 0)
    seen = inside.cum_sum().over(of_pass) > 0
    started, left = (passes.cum_sum().over("rank") > 0), passes.cum_sum(reverse=True).over("rank") > 0
    early = (phase != "backward") ^ seen  # before the layers forward, behind them backward: the first end
    at_end = pl.when(early).then(pl.col("stage") == 0).otherwise(pl.col("stage") == last)
    end = pl.when(early).then(pl.lit(FIRST)).otherwise(pl.lit(LAST))
    return (
        pl.when(inside | (phase == MESSAGE)).then(None)
        .when(~started).then(pl.lit(BEGIN))
        .when(optimizer).then(end)
        .when(passes).then(pl.when(at_end).then(end).otherwise(pl.lit(EDGE)))
        .when(~left).then(pl.lit(END))
        .otherwise(pl.lit(EDGE))
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What is asked for, and what was measured to make it from."""

    runs: Runs
    was: Setup
    target: Setup

    def plan(self) -> pl.DataFrame:
        """`PLAN` and `pass` (row of the schedule; null outside passes) of every rank of the new pipeline."""
        passes = self.schedule()
        rows = [row for stage in range(self.target[1].pp) for row in self._rank(stage, passes)]
        return pl.DataFrame(rows, schema={**PLAN, "pass": pl.Int64}, orient="row")

    def schedule(self) -> pl.DataFrame:
        """The passes of the new pipeline."""
        _, layout, train = self.target
        kind = layout.schedule
        if kind.startswith("zb"):
            raise LayoutError(f"schedule={kind!r}: a trace's backward passes are not split; take 1f1b or interleaved.")
        return schedule(kind, layout.pp, train.micro_batches(layout), layout.chunks)

    def _rank(self, stage: int, passes: pl.DataFrame) -> Iterator[tuple[int, int, int, int, int | None, int | None]]:
        place = 0
        for sources, micro_batch, row in self._in_order(stage, passes):
            for source, layer in sources:
                yield source, stage, place, layer, micro_batch, row
                place += 1

    def _in_order(
        self, stage: int, passes: pl.DataFrame
    ) -> Iterator[tuple[list[tuple[int, int]], int | None, int | None]]:
        """Runs (and layers) of a rank: what begins the step, its passes, what ends it."""
        layout = self.target[1]
        depth = layout.pp * layout.chunks
        twin = self._twin(stage)
        yield self._outside(BEGIN, twin), None, None
        mine = passes.with_row_index("row").filter(pl.col("stage") == stage).sort("position")
        for row, phase, micro_batch, at in mine.select("row", "phase", "micro_batch", "depth").iter_rows():
            measured = self._measured(micro_batch)
            layers = [(self._layer(phase, layer, measured), layer) for layer in self._held(at)]
            first = self._end(phase, FIRST, measured) if at == 0 else []
            last = self._end(phase, LAST, measured) if at == depth - 1 else []
            found = [*first, *layers, *last] if phase == "forward" else [*last, *layers[::-1], *first]
            yield found, micro_batch, row
        yield self._outside(END, twin), None, None
        held = sorted(layer for chunk in range(layout.chunks) for layer in self._held(chunk * layout.pp + stage))
        layers = [(self._layer("optimizer", layer, None), layer) for layer in held]
        first = self._end("optimizer", FIRST, None) if stage == 0 else []
        last = self._end("optimizer", LAST, None) if stage == layout.pp - 1 else []
        yield [*first, *layers, *last], None, None

    def _twin(self, stage: int) -> int:
        """The measured stage that is most like a new one: the first and the last are."""
        most, new = int(self.runs.table["stage"].max()), self.target[1].pp - 1  # type: ignore[arg-type]
        return 0 if stage == 0 else most if stage == new else min(stage, max(most - 1, 0))

    def _held(self, depth: int) -> range:
        counts = self.target[1].layers_of(self.target[0])
        return range(sum(counts[:depth]), sum(counts[: depth + 1]))

    def _measured(self, micro_batch: int) -> int:
        """The measured pass that stands for a new one: first for first, last for last, those between in turn."""
        here, there = self.runs.passes, self.target[2].micro_batches(self.target[1])
        if micro_batch == 0 or here == 1:
            return 0
        if micro_batch == there - 1 or here == 2:
            return here - 1
        return 1 + (micro_batch - 1) % (here - 2)

    def _table(self) -> pl.DataFrame:
        first = self.runs.table.group_by("stage").agg(pl.col("rank").min())["rank"]
        return self.runs.table.filter(pl.col("rank").is_in(first.implode()))

    def _outside(self, section: str, stage: int) -> list[tuple[int, int]]:
        found = self._table().filter((pl.col("section") == section) & (pl.col("stage") == stage))
        return [(source, OUTSIDE) for source in found["source"]]

    def _end(self, phase: str, section: str, micro_batch: int | None) -> list[tuple[int, int]]:
        stage = 0 if section == FIRST else self.runs.table["stage"].max()
        chosen = (pl.col("section") == section) & (pl.col("phase") == phase) & (pl.col("stage") == stage)
        found = self._table().filter(chosen)
        if micro_batch is not None:
            found = found.filter(pl.col("micro_batch") == micro_batch)
        return [(source, OUTSIDE) for source in found["source"]]

    def _layer(self, phase: str, layer: int, micro_batch: int | None) -> int:
        """The run of a layer: that of the measured layer of this number, from the first again."""
        chosen = (pl.col("phase") == phase) & (pl.col("layer") == layer % self.was[0].layers)
        found = self._table().filter(chosen)
        if micro_batch is not None:
            found = found.filter(pl.col("micro_batch") == micro_batch)
        if found.is_empty():
            what = f"the {phase} pass of layer {layer % self.was[0].layers}"
            raise LayoutError(f"the structure of the trace lacks {what}, so the pipeline cannot be laid out anew.")
        return int(found["source"][0])


def ends_of_passes(graph: Graph, copies: pl.DataFrame, plan: pl.DataFrame) -> pl.DataFrame:
    """`row` (of the schedule), `first`, `last`: the ops with which each pass begins and ends where it computes."""
    working = "kernel" if (graph.ops["kind"] == "kernel").any() else "cpu"
    lanes = graph.ops.filter(pl.col("kind") == working).group_by("rank", "lane", maintain_order=True).len()
    main = lanes.sort("len", descending=True, maintain_order=True).unique("rank", keep="first").drop("len")
    ops = graph.ops.filter(pl.col("kind").is_in([working, "gap"])).join(main, on=["rank", "lane"], how="semi")
    passes = plan.drop_nulls("pass").select("to_rank", "place", pass_row="pass")
    inside = copies.select("op_id", "to_rank", "place", "row").join(passes, on=["to_rank", "place"])
    inside = inside.join(ops.select("op_id"), on="op_id", how="semi").sort("to_rank", "place", "row")
    return inside.group_by(row="pass_row", maintain_order=True).agg(
        first=pl.col("op_id").first(), last=pl.col("op_id").last()
    )


def with_messages(graph: Graph, passes: pl.DataFrame, ends: pl.DataFrame, message_ns: int) -> Graph:
    """The graph with a message wherever a pass waits for one of another rank.

    A message goes on a lane of its sender when the pass has ended, and arrives on a lane of its receiver.

    Parameters
    ----------
    passes
        The schedule.
    ends
        Of `ends_of_passes`.
    message_ns
        How long a message takes.
    """
    about = passes.with_row_index("row").select(pl.col("row").cast(pl.Int64), "phase", "stage", "micro_batch")
    links = dependencies(passes).filter("message").select(pl.col("src", "dst").cast(pl.Int64))
    links = links.join(ends.rename({"row": "src"}).drop("first"), on="src").join(
        ends.select(dst="row", into="first"), on="dst"
    ).join(about.rename({"row": "src"}), on="src").join(about.select(dst="row", to="stage"), on="dst")  # fmt: skip
    if links.is_empty():
        return graph
    links = links.sort("stage", "src").with_columns(at=pl.int_range(pl.len()))
    fresh = int(graph.ops["op_id"].max()) + 1  # type: ignore[arg-type]
    ended = graph.ops.select(last="op_id", start_ns=pl.col("start_ns") + pl.col("dur_ns"))
    links = links.join(ended, on="last", maintain_order="left")
    alike = {"step": pl.lit(graph.step), "group": pl.lit("pp"), "group_size": pl.lit(2), "phase": pl.lit(MESSAGE)}
    sides = [
        links.select(
            "start_ns", "micro_batch", rank=here, peer=there, kind=pl.lit(kind), collective=pl.lit(what),
            name=pl.format("{} {}", pl.lit(what), "phase"), dur_ns=pl.lit(dur_ns),
            op_id=fresh + n * len(links) + pl.col("at"), lane=pl.format("net:{}:{}", pl.lit(what), there), **alike,
        )
        for n, (what, kind, here, there, dur_ns) in enumerate(
            (("send", "comm", "stage", "to", message_ns), ("recv", "event", "to", "stage", 0))
        )
    ]  # fmt: skip
    new = pl.concat(sides, how="diagonal_relaxed")
    sent, got = (side["op_id"] for side in sides)
    turn = new.select(src=pl.col("op_id").shift(1).over("rank", "lane"), dst="op_id", rule=pl.lit("stream"))
    ties = ((links["last"], sent, "event"), (sent, got, "collective"), (got, links["into"], "sync"))
    edges = pl.concat(
        [turn.drop_nulls("src"), *(pl.DataFrame({"src": a, "dst": b}).with_columns(rule=pl.lit(r)) for a, b, r in ties)]
    ).with_columns(lag_ns=pl.lit(0, pl.Int64), from_start=False, evidence=pl.lit("exact"), hard=True)
    ops = pl.concat([graph.ops, new], how="diagonal_relaxed")
    made = replace(
        graph,
        ops=ops.select(pl.col(c).cast(t) for c, t in graph.ops.schema.items()),
        edges=pl.concat([graph.edges, edges.select(graph.edges.columns)]),
    )
    return replace(made, ops=made.ops[Plan.of(made).row])
