"""What words take and hang on, drawn as it was seen at their place: durations, work and edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.special import ndtr, ndtri

from lumos_nb.costs.collective_plans import BUS_FACTOR
from lumos_nb.exchange.chakra.ngrams import times
from lumos_nb.exchange.chakra.speaking import Said
from lumos_nb.exchange.chakra.words import Meeting, Seen, Sentence, Word

Floats = NDArray[np.float64]

APART = 2.0
"""Sizes must differ by this factor at least, to tell latency from bandwidth."""


class Told(NamedTuple):
    """A sentence of the corpus: where it is from, its words by number, its ops and its step's meetings."""

    run: str
    step: int
    rank: int
    words: list[int]
    sentence: Sentence
    meetings: Sequence[Meeting]


class Line(NamedTuple):
    """The time of a collective: `hop_ns` for each rank but the first, and `byte_ns` for each byte on the wire."""

    hop_ns: float
    byte_ns: float

    def time_ns(self, meeting: Meeting) -> float:
        """What it says of a meeting."""
        hops, wire = _hops_and_wire(meeting)
        return self.hop_ns * hops + self.byte_ns * wire

    @classmethod
    def fit(cls, seen: Mapping[Meeting, list[float]]) -> Line:
        """Least squares of relative errors of medians; all is bandwidth where sizes do not tell."""
        median = {meeting: float(np.median(dur_ns)) for meeting, dur_ns in seen.items()}
        rows = np.array([[*_hops_and_wire(m), ns] for m, ns in median.items() if ns > 0]).reshape(-1, 3)
        if not len(rows):
            return cls(0.0, 1.0)
        told = rows[:, 1].max() >= APART * rows[:, 1].min()
        fitted = rows[:, :2] / rows[:, 2:] * (1 if told else [0, 1])
        return cls(*nnls(fitted, np.ones(len(rows)))[0].tolist())


def _hops_and_wire(meeting: Meeting) -> tuple[float, float]:
    """Ranks but the first, and bytes on the wire of each (nccl-tests)."""
    ranks = len(meeting.ranks)
    factor = BUS_FACTOR.get(meeting.collective, np.ones_like)
    return ranks - 1.0, float(factor(np.array(float(ranks)))) * meeting.size_bytes


class Pool(NamedTuple):
    """What was seen at one place in several steps: durations in order, and the ops as they were."""

    dur_ns: Floats
    seen: list[Seen]


@dataclass(frozen=True, slots=True)
class Places:
    """What was seen at each place of each rank's sentence: the first linear layer of a step, the second, ...

    A duration is a quantile of those of its place, and the normal score of that quantile is the sum of a part that a
    rank's whole step shares and its own (a Gaussian copula); all transfers of a meeting have one quantile. Quantiles
    are Hazen's, linear in time between observed ones, which keeps the mean: what a step takes is a sum. Transfers are
    drawn in units of what `lines` say of their meeting, so they follow sizes and ranks that were not seen.

    Attributes
    ----------
    pools
        (run, rank, word, how often it stood before), and where there is no such place (run, word) or (word,).
    lines
        (run, collective) -> latency and bandwidth.
    of_rank
        Share of the scores' variance that words of one rank's step have in common.
    """

    pools: Mapping[tuple[object, ...], Pool]
    lines: Mapping[tuple[str, str], Line]
    of_rank: float

    @classmethod
    def fit(cls, corpus: Iterable[Told]) -> Places:
        """Collect what was seen, a rank's sentence at a time."""
        corpus = [*corpus]
        lines = _lines(corpus)
        pools: dict[tuple[object, ...], list[Seen]] = {}
        rows = []
        for run, step, rank, words, sentence, meetings in corpus:
            for word, nth, seen, about, at in zip(
                words, times(words), sentence.seen, sentence.words, sentence.meeting, strict=True
            ):
                unit_ns = _unit_ns(lines, run, about, meetings, at)
                drawn = seen._replace(dur_ns=seen.dur_ns / unit_ns)
                for key in _keys(run, rank, word, nth):
                    pools.setdefault(key, []).append(drawn)
                rows.append((run, step, rank, word, nth, drawn.dur_ns))
        ordered = {key: Pool(np.sort([each.dur_ns for each in seen]), seen) for key, seen in pools.items()}
        return cls(ordered, lines, _in_common(rows))

    def draw(
        self,
        place: tuple[str, int],
        part: Sequence[Said],
        vocabulary: Sequence[Word],
        meetings: Sequence[Meeting],
        together: Floats,
        rng: np.random.Generator,
    ) -> list[Seen]:
        """What the words of a rank's sentence take and hang on, as a rank of a run (`place`) was seen.

        `together` (meetings,) are the normal scores of transfers, which all ranks of a meeting share.
        """
        own = (1 - self.of_rank) ** 0.5 * rng.standard_normal(len(part))
        alone = own + self.of_rank**0.5 * rng.standard_normal()
        at = np.array([said.meeting if vocabulary[said.word].kind == "comm" else -1 for said in part])
        quantiles = ndtr(np.where(at < 0, alone, np.append(together, 0.0)[at]))
        there: Counter[tuple[str, str]] = Counter()
        drawn = []
        for said, quantile, pick in zip(part, quantiles, rng.random(len(part)), strict=True):
            word = vocabulary[said.word]
            pools = [self.pools[key] for key in _keys(*place, said.word, said.nth) if key in self.pools]
            fitting = (found for pool in pools if (found := _possible(pool.seen, pick, there)))
            seen = next(fitting, None) or pools[0].seen[0]._replace(links=())
            unit_ns = _unit_ns(self.lines, place[0], word, meetings, said.meeting)
            drawn.append(seen._replace(dur_ns=unit_ns * _hazen(pools[0].dur_ns, quantile)))
            there[word.kind, word.lane] += 1
        return drawn


def _keys(run: str, rank: int, word: int, nth: int) -> tuple[tuple[object, ...], ...]:
    return (run, rank, word, nth), (run, word), (word,)


def _unit_ns(
    lines: Mapping[tuple[str, str], Line], run: str, word: Word, meetings: Sequence[Meeting], at: int
) -> float:
    """In which unit durations are drawn: what the run's line says of a transfer, a nanosecond of all else."""
    if at < 0 or word.kind != "comm":
        return 1.0
    return lines.get((run, meetings[at].collective), Line(0.0, 1.0)).time_ns(meetings[at]) or 1.0


def _possible(seen: Sequence[Seen], pick: float, there: Mapping[tuple[str, str], int]) -> Seen | None:
    """One whose edges' sources are `there` (so many of kind and lane), from `pick` (0 to 1) on."""
    first = int(pick * len(seen))
    for at in range(first, first + len(seen)):
        one = seen[at % len(seen)]
        if all(link.source is None or there[link.source] >= link.back for link in one.links):
            return one
    return None


def _hazen(ordered: Floats, quantile: float) -> float:
    at = min(max(quantile * len(ordered) - 0.5, 0.0), len(ordered) - 1.0)
    low = min(int(at), max(len(ordered) - 2, 0))
    return float(ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]))


def _lines(corpus: Iterable[Told]) -> dict[tuple[str, str], Line]:
    seen: dict[tuple[str, str], dict[Meeting, list[float]]] = {}
    for told in corpus:
        for word, op, at in zip(told.sentence.words, told.sentence.seen, told.sentence.meeting, strict=True):
            if word.kind == "comm" and at >= 0:
                meeting = told.meetings[at]
                seen.setdefault((told.run, meeting.collective), {}).setdefault(meeting, []).append(op.dur_ns)
    return {key: Line.fit(of) for key, of in seen.items()}


def _in_common(rows: Sequence[tuple[str, int, int, int, int, float]]) -> float:
    """Share of the variance of scores that a rank's step has in common (moments)."""
    table = pl.DataFrame(rows, schema=["run", "step", "rank", "word", "nth", "dur"], orient="row")
    place = ["run", "rank", "word", "nth"]
    varied = table.filter(pl.len().over(place) > 2, pl.col("dur").n_unique().over(place) > 1)
    quantile = varied.select((pl.col("dur").rank().over(place) - 0.5) / pl.len().over(place)).to_series()
    scores = varied.with_columns(z=pl.Series(ndtri(quantile.to_numpy()), dtype=pl.Float64))
    steps = scores.group_by("run", "step", "rank").agg(pl.col("z").mean(), squares=(pl.col("z") ** 2).sum(), n=pl.len())
    z, squares, n = (steps[column].to_numpy() for column in ("z", "squares", "n"))
    variance = squares.sum() / max(n.sum(), 1)
    return float(np.clip((z**2 - variance / n).mean() / variance, 0, 1)) if variance else 0.0
