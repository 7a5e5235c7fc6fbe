"""Which runs of a measured step a rank of another pipeline goes through: passes by the schedule, and messages between.

A run of a pass is its layer's, or belongs to the first or the last end of the model. What stages do at their edges
(messages, what prepares them) is left behind and put in anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import polars as pl

from lumos_nb._replay_plan import Plan
from lumos_nb.errors import LayoutError, shown
from lumos_nb.graph import Graph
from lumos_nb.workloads.llm.layer_search import OUTSIDE
from lumos_nb.workloads.llm.reading import Setup
from lumos_nb.workloads.llm.schedule import schedule
from lumos_nb.workloads.llm.splicing import PLAN
from lumos_nb.workloads.llm.structure import MESSAGE, Structure

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


Piece = tuple[int, float, int]
"""A run, the share of its time, and the layer that it is of."""


@dataclass(frozen=True)
class Pipeline:
    """What is asked for, and what was measured to make it from."""

    runs: Runs
    was: Setup
    target: Setup

    def plan(self) -> pl.DataFrame:
        """`PLAN` and `pass` (row of the schedule; null outside passes) of every rank of the new pipeline."""
        passes = self.schedule()
        rows = [
            (source, stage, place, share, layer, micro_batch, row)
            for stage in range(self.target[1].pp)
            for place, ((source, share, layer), micro_batch, row) in enumerate(self._in_order(stage, passes))
        ]
        return pl.DataFrame(rows, schema={**PLAN, "pass": pl.Int64}, orient="row")

    def schedule(self) -> pl.DataFrame:
        """The passes of the new pipeline."""
        _, layout, train = self.target
        kind = layout.schedule
        if kind.startswith("zb"):
            raise LayoutError(
                f"schedule={shown(kind)}: a trace's backward passes are not split; take 1f1b or interleaved."
            )
        return schedule(kind, layout.pp, train.micro_batches(layout), layout.chunks)

    def _in_order(self, stage: int, passes: pl.DataFrame) -> Iterator[tuple[Piece, int | None, int | None]]:
        """What a rank goes through: what begins the step, its passes, what ends it."""
        layout, table = self.target[1], self._table
        depth, twin = layout.pp * layout.chunks, self._twin(stage)
        outside = table.filter((pl.col("stage") == twin) & pl.col("section").is_in([BEGIN, END]))
        for source in outside.filter(pl.col("section") == BEGIN)["source"]:
            yield (source, 1.0, OUTSIDE), None, None
        mine = passes.with_row_index("row").filter(pl.col("stage") == stage).sort("position")
        for row, phase, micro_batch, at in mine.select("row", "phase", "micro_batch", "depth").iter_rows():
            measured = self._measured(micro_batch)
            layers = self._layers(phase, self._held(at), measured)
            first = self._ends.get((phase, FIRST, measured), []) if at == 0 else []
            last = self._ends.get((phase, LAST, measured), []) if at == depth - 1 else []
            found = [*first, *layers, *last] if phase == "forward" else [*last, *layers[::-1], *first]
            yield from ((piece, micro_batch, row) for piece in found)
        for source in outside.filter(pl.col("section") == END)["source"]:
            yield (source, 1.0, OUTSIDE), None, None
        held = [layer for chunk in range(layout.chunks) for layer in self._held(chunk * layout.pp + stage)]
        first = self._ends.get(("optimizer", FIRST, None), []) if stage == 0 else []
        last = self._ends.get(("optimizer", LAST, None), []) if stage == layout.pp - 1 else []
        yield from ((piece, None, None) for piece in (*first, *self._layers("optimizer", held, None), *last))

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

    @cached_property
    def _table(self) -> pl.DataFrame:
        """The runs of the first rank of every stage; what is once a step has no micro-batch."""
        first = self.runs.table.group_by("stage").agg(pl.col("rank").min())["rank"]
        once = pl.when(pl.col("phase") != "optimizer").then("micro_batch")
        return self.runs.table.filter(pl.col("rank").is_in(first.implode())).with_columns(micro_batch=once)

    @cached_property
    def _of_layers(self) -> dict[tuple[str, int, int | None], int]:
        """Phase, layer and micro-batch -> its run."""
        inside = self._table.filter(pl.col("layer") >= 0)
        return {(phase, layer, mb): run for phase, layer, mb, run in inside[_KEY].rows()}

    @cached_property
    def _ends(self) -> dict[tuple[str, str, int | None], list[Piece]]:
        """Phase, end of the model and micro-batch -> its runs."""
        ends: dict[tuple[str, str, int | None], list[Piece]] = {}
        table = self._table.filter(pl.col("section").is_in([FIRST, LAST]))
        for phase, section, micro_batch, source in table.select(
            "phase", "section", "micro_batch", "source"
        ).iter_rows():
            ends.setdefault((phase, section, micro_batch), []).append((source, 1.0, OUTSIDE))
        return ends

    def _layers(self, phase: str, layers: Sequence[int], micro_batch: int | None) -> list[Piece]:
        """Runs of some layers: those of the measured layers of their numbers, from the first again.

        Where a trace shows several layers as one (`layer_search.WHOLE`), each has its share of that.
        """
        shown = len({layer for _, layer, _ in self._of_layers})
        together = self.was[0].layers / max(shown, 1)
        pieces: list[Piece] = []
        for layer in layers:
            block = int(layer % self.was[0].layers // together)
            source = self._of_layers.get((phase, block, micro_batch))
            if source is None and phase == "optimizer":
                continue
            if source is None:
                what = f"{phase} pass {micro_batch} of layer {block}"
                raise LayoutError(f"the structure of the trace lacks {what}: the pipeline cannot be laid out anew.")
            if pieces and pieces[-1][0] == source and together > 1:
                pieces[-1] = (source, pieces[-1][1] + 1 / together, pieces[-1][2])
            else:
                pieces.append((source, 1 / together, layer))
        return pieces


_KEY = ["phase", "layer", "micro_batch", "source"]


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
    at = passes.with_row_index("row").select(pl.col("row").cast(pl.Int64), "phase", "stage", "micro_batch", "depth")
    before = pl.col("depth") + pl.when(pl.col("phase") == "forward").then(-1).otherwise(1)
    links = at.select("phase", "micro_batch", depth=before, dst="row", to="stage").join(
        at.rename({"row": "src"}), on=["phase", "micro_batch", "depth"]
    ).filter(pl.col("stage") != pl.col("to"))  # fmt: skip
    links = links.join(ends.select("last", src="row"), on="src")
    links = links.join(ends.select(dst="row", into="first"), on="dst")
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
