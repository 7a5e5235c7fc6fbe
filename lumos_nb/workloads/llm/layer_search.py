"""Layers and passes in the sequence of what a rank does in one phase: as annotations tell, or by what repeats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from lumos_nb.workloads.llm.repeats import Ints, Tandem, common, tandem

OUTSIDE = -1
"""Layer of what is known to be in none."""

ACCUMULATES = "AccumulateGrad"
"""Autograd's node that stores a gradient: it has no forward operator, so no layer of its own."""

PLACED = ("op_id", "rank", "correlation", "kind", "phase", "layer", "micro_batch")
"""What is known of where an op belongs."""


def with_phases(anchors: pl.DataFrame) -> pl.DataFrame:
    """One rank's anchors with phases where none are named: as many stacks of equally many layers as there are."""
    if anchors["phase"].null_count() < anchors.height:
        return anchors.with_columns(pl.col("phase").fill_null("other"))
    tokens = anchors["token"].to_numpy()
    most = tandem(tokens)
    begins = [most.start] if most else []
    if most:
        end = most.start + most.period * most.times
        before, behind = tandem(tokens[: most.start], most.times), tandem(tokens[end:], most.times)
        begins = [*([before.start] if before else []), *begins, *([end + behind.start] if behind else [])]
    phase = np.searchsorted(np.array(begins[1:], np.int64), np.arange(tokens.size), side="right")
    names = pl.Series(["forward", "backward", "optimizer"]).gather(phase)
    return anchors.with_columns(phase=names)


def _layer_numbers(labels: pl.Series) -> pl.Series:
    """Layers as numbers: labels that are, or what a path of modules counts: the outermost class with several."""
    numbers = labels.cast(pl.Int32, strict=False)
    if numbers.null_count() == labels.null_count():
        return numbers
    paths = labels.unique().drop_nulls().to_frame("label")
    parts = paths.with_columns(part=pl.col("label").str.split("/")).explode("part")
    parts = parts.with_columns(
        depth=pl.int_range(pl.len()).over("label"),
        kind=pl.col("part").str.extract(r"^(.*)_\d+$"),
        number=pl.col("part").str.extract(r"_(\d+)$").cast(pl.Int32),
    ).drop_nulls("number")
    kinds = parts.group_by("depth", "kind").agg(n=pl.col("number").n_unique().cast(pl.Int64)).filter(pl.col("n") > 1)
    if kinds.is_empty():
        return pl.repeat(None, len(labels), dtype=pl.Int32, eager=True)
    chosen = kinds.sort("depth", -pl.col("n"), "kind").head(1)
    known = parts.join(chosen, on=["depth", "kind"]).with_columns(number=pl.col("number").rank("dense") - 1)
    table = dict(known.select("label", "number").iter_rows())
    return labels.replace_strict(table, default=None, return_dtype=pl.Int32)


NOTHING, ANNOTATION, REPETITION, COMMON = "nothing", "annotation", "repetition", "stages in common"
WHOLE = "whole passes"
"""How layers were found: a timeline of one op a pass shows a stage's layers as one."""


@dataclass(slots=True)
class _Part:
    """The anchors of one phase on one rank: their layers, counted on this rank, and passes as far as found."""

    anchors: pl.DataFrame
    mirrored: bool
    how: str
    layer: Ints
    batch: Ints  # the pass of each anchor, OUTSIDE of all
    within: Ints  # its place in the pass
    passes: int
    count: int = 0

    @classmethod
    def of(cls, anchors: pl.DataFrame, *, mirrored: bool, several: bool) -> _Part:
        """With passes, where there are `several` or the whole repeats and has stacks of layers in it; no layers yet."""
        n, tokens = anchors.height, anchors["token"].to_numpy()
        passes = tandem(tokens)
        if passes and not several:
            inner = tandem(tokens[passes.start : passes.start + passes.period])
            nested = inner is not None and 3 * inner.period * inner.times >= 2 * passes.period
            passes = passes if nested and 10 * passes.period * passes.times >= 9 * n else None
        outside = np.full(n, OUTSIDE)
        part = cls(anchors, mirrored, NOTHING, layer=outside, batch=outside, within=np.arange(n), passes=1)
        told = anchors["micro_batch"]
        if 2 * told.null_count() < n:
            part.batch = told.fill_null(OUTSIDE).cast(pl.Int64).to_numpy()
            part.within = anchors.select(pl.int_range(pl.len()).over("micro_batch")).to_series().to_numpy()
            part.passes = told.n_unique() - (told.null_count() > 0)
        else:
            part.cut(passes or Tandem(0, n, 1))
        return part

    def cut(self, one: Tandem) -> None:
        """Into passes that stand so."""
        at = np.arange(self.anchors.height) - one.start
        self.batch = np.where((at >= 0) & (at < one.period * one.times), at // one.period, OUTSIDE)
        self.within, self.passes = at % one.period, one.times

    def together(self, passes: int) -> None:
        """Fewer passes: where nothing lies between them, a stage's layers looked like passes of their own."""
        if self.anchors["micro_batch"].null_count() and self.passes > passes and self.passes % passes == 0:
            start, size = int(np.argmax(self.batch >= 0)), int((self.batch >= 0).sum())
            self.cut(Tandem(start, size // passes, passes))

    @property
    def block(self) -> Ints:
        """Tokens of one pass."""
        first = self.batch == self.batch[self.batch >= 0].min(initial=0)
        tokens: Ints = self.anchors["token"].to_numpy()[first]
        return tokens

    def annotated(self) -> None:
        """Layers by what the ops say; a node that accumulates is where the one before it is."""
        said = pl.when(~pl.col("name").str.contains(ACCUMULATES)).then(pl.col("number").fill_null(OUTSIDE))
        layer = self.anchors.select(said.forward_fill().fill_null(OUTSIDE).cast(pl.Int64)).to_series()
        self.layer = layer.to_numpy()
        self.how, self.count = ANNOTATION, int(np.unique(self.layer[self.layer >= 0]).size)

    def repeated(self, count: int | None = None) -> None:
        """Layers by what repeats in a pass."""
        if self.passes > 1 and len(self.block) == 1:
            self.put(Tandem(0, 1, 1), WHOLE)
        elif found := tandem(self.block, count, mirrored=self.mirrored):
            self.put(found, REPETITION)

    def put(self, found: Tandem, how: str) -> None:
        """Layers at these places of every pass."""
        inside = self.within - found.start
        number = inside // found.period
        number = found.times - 1 - number if self.mirrored else number
        layered = (self.batch >= 0) & (inside >= 0) & (inside < found.period * found.times)
        self.layer = np.where(layered, number, OUTSIDE)
        self.how, self.count = how, found.times


def _in_common(parts: dict[int, _Part], stage: dict[int, int]) -> None:
    """A layer on stages that hold one each: what the passes of two stages have in common, if that is more."""
    for rank, part in parts.items():
        others = [other for other in parts if stage[other] != stage[rank]]
        if others:
            nearest = min(others, key=lambda other: (abs(stage[other] - stage[rank]), other))
            at, _, length = common(part.block, parts[nearest].block)
            if length > (part.layer >= 0).sum() // part.passes:
                part.put(Tandem(at, length, 1), COMMON)


def find_layers(anchors: pl.DataFrame, stage: dict[int, int]) -> tuple[pl.DataFrame, list[dict[str, object]]]:
    """`PLACED` of the anchors; and how each rank's phases were found."""
    anchors = anchors.with_columns(number=_layer_numbers(anchors["layer"]))
    annotated = anchors["number"].is_not_null().any()
    turns = anchors.filter(pl.col("phase").is_in(["forward", "backward"])).group_by("rank", maintain_order=True)
    back = (pl.col("phase") == "forward") & (pl.col("phase").shift(1) == "backward")
    again = dict(turns.agg(back.any()).iter_rows())
    staged = max(stage.values(), default=0) > 0
    parts: dict[str, dict[int, _Part]] = {}
    for (phase, rank), rows in anchors.group_by("phase", "rank", maintain_order=True):
        passes = (staged or again.get(rank, False)) and phase != "optimizer"
        parts.setdefault(str(phase), {})[int(str(rank))] = _Part.of(rows, mirrored=phase == "backward", several=passes)
    for phase in ("forward", "backward", "other"):
        of_phase = parts.get(phase, {})
        ends = [part.passes for rank, part in of_phase.items() if stage[rank] in (0, max(stage.values()))]
        for part in of_phase.values():
            part.together(max(ends) if staged and ends else part.passes)
        for part in of_phase.values():
            part.annotated() if annotated else part.repeated()
        if not annotated:
            _in_common(parts.get(phase, {}), stage)
    held = {rank: part.count for rank, part in parts.get("forward", {}).items()}
    for rank, part in parts.get("optimizer", {}).items():
        if held.get(rank, 0) > 1:
            part.repeated(held[rank])
    _in_common({r: p for r, p in parts.get("optimizer", {}).items() if held.get(r) == 1}, stage)
    numbers = _numbers(parts.get("forward", {}), stage)
    frames, summary = [], []
    for phase, of_phase in parts.items():
        for rank, part in of_phase.items():
            own = numbers.get(rank, np.empty(0, np.int64))
            own = own if len(own) == part.count else np.arange(part.count)  # phases that disagree count for themselves
            told = part.how == ANNOTATION
            layer = part.layer if told else np.where(part.layer < 0, OUTSIDE, np.append(own, 0)[part.layer])
            frames.append(part.anchors.select(*PLACED[:-2], layer=layer, micro_batch=part.batch))
            summary.append(
                {"rank": rank, "phase": phase, "found": part.how, "layers": part.count, "passes": part.passes}
            )
    return pl.concat(frames) if frames else anchors.select(*PLACED[:-2], layer=0, micro_batch=0), summary


def _numbers(forward: dict[int, _Part], stage: dict[int, int]) -> dict[int, Ints]:
    """Rank -> the numbers in the whole model of the layers that it holds."""
    counts = {stage[rank]: part.count for rank, part in sorted(forward.items())}
    numbers = {}
    for rank, part in forward.items():
        if part.how == ANNOTATION:
            numbers[rank] = np.unique(part.layer[part.layer >= 0])
        else:
            numbers[rank] = sum(n for s, n in counts.items() if s < stage[rank]) + np.arange(part.count)
    return numbers
