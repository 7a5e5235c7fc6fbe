"""What words take and hang on, drawn as it was seen: durations, sizes and edges, conditional on the word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from lumos_nb.exchange.chakra.words import Link, Sentence

Floats = NDArray[np.float64]

KNOTS = 65
"""Quantiles that are kept of each distribution: the extremes, and every 64th part between."""
SEEN = {
    "run": pl.String(),
    "step": pl.Int64(),
    "rank": pl.Int32(),
    "word": pl.Int64(),
    "nth": pl.Int64(),  # of the same words in its sentence
    "size_bytes": pl.Int64(),  # of the message, 0 where there is none
    "dur_ns": pl.Int64(),
}
"""Columns of what durations are fitted to, a row a word."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations by run, word and message size, with what they have in common on a rank and between ranks.

    A duration is a quantile of its own distribution; the normal score of that quantile is the sum of what is usual at
    its place (the first linear layer of a step, the second), a part that a rank's whole step shares, one that equal
    places of all ranks share in that step, and its own (a Gaussian copula). Quantiles are Hazen's, linear in time
    between observed ones, which keeps the mean: what a step takes is a sum.

    Attributes
    ----------
    knots
        Run ("" for all), word, size (-1 for all) -> quantiles in ns.
    usual
        Run, word, how manieth of its like -> mean score, drawn towards 0 the more, the more scores of one place differ
        (empirical Bayes).
    spread
        Run, word -> variance of the rest, so that all scores of a word together have variance 1.
    of_rank, of_place
        Shares of the rest that words of one rank's step have in common, and equal places of several ranks.
    """

    knots: Mapping[tuple[str, int, int], Floats]
    usual: Mapping[tuple[str, int, int], float]
    spread: Mapping[tuple[str, int], float]
    of_rank: float
    of_place: float

    @classmethod
    def fit(cls, seen: pl.DataFrame) -> Durations:
        """Fit to a table of `SEEN`."""
        knots: dict[tuple[str, int, int], Floats] = {}
        at = np.linspace(0, 1, KNOTS)
        for run, size in ((pl.col("run"), pl.col("size_bytes")), (pl.col("run"), pl.lit(-1)), (pl.lit(""), pl.lit(-1))):
            for *key, durations in seen.group_by(run, "word", size.alias("size")).agg("dur_ns").iter_rows():
                knots[key[0], key[1], key[2]] = np.quantile(durations, at, method="hazen")
        scores = _scores(seen)
        places = ["run", "word", "nth"]
        within = scores.select(pl.col("z").var().over(places)).to_series().mean()
        alike = within / max(1 - within, 1e-3) if isinstance(within, float) else 1.0
        usual = scores.group_by(places).agg(mean=pl.col("z").sum() / (pl.len() + alike))
        rest = scores.join(usual, on=places).with_columns(z=pl.col("z") - pl.col("mean"))
        spread = rest.group_by("run", "word").agg(left=(1 - (pl.col("mean") ** 2).mean()).clip(0))
        by_place = {(of, word, nth): mean for of, word, nth, mean in usual.iter_rows()}
        return cls(knots, by_place, {(of, word): left for of, word, left in spread.iter_rows()}, *_in_common(rest))

    def draw(self, run: str, ranks: Sequence[tuple[list[int], list[int]]], rng: np.random.Generator) -> list[Floats]:
        """Durations in ns of every rank's words, given with their message sizes (0 without)."""
        places: dict[tuple[int, int], float] = {}
        drawn = []
        for words, sizes in ranks:
            nth, score = Counter[int](), rng.standard_normal()
            common, usual = np.empty((2, len(words)))
            for i, word in enumerate(words):
                place = (word, nth[word])
                if place not in places:
                    places[place] = float(rng.standard_normal())
                common[i], usual[i] = places[place], self.usual.get((run, *place), 0.0)
                nth[word] += 1
            own = (1 - self.of_rank - self.of_place) ** 0.5 * rng.standard_normal(len(words))
            rest = self.of_rank**0.5 * score + self.of_place**0.5 * common + own
            z = usual + np.array([self.spread.get((run, word), 1.0) for word in words]) ** 0.5 * rest
            quantile = ndtr(z) * (KNOTS - 1)
            of_words = np.array([self._knots(run, *word) for word in zip(words, sizes, strict=True)])
            low = np.minimum(quantile.astype(np.int64), KNOTS - 2)
            at, share = np.arange(len(words)), quantile - low
            drawn.append((1 - share) * of_words[at, low] + share * of_words[at, low + 1])
        return drawn

    def _knots(self, run: str, word: int, size: int) -> Floats:
        found = self.knots.get((run, word, size))
        if found is None:
            found = self.knots.get((run, word, -1))
        return self.knots["", word, -1] if found is None else found


def _scores(seen: pl.DataFrame) -> pl.DataFrame:
    """`seen` with the normal score `z` of each duration among those of its word; without words that do not vary."""
    of = ["run", "word", "size_bytes"]
    rank = (pl.col("dur_ns").rank().over(of) - 0.5) / pl.len().over(of)
    varied = (pl.len().over(of) > 4) & (pl.col("dur_ns").n_unique().over(of) > 1)
    scored = seen.with_columns(quantile=rank).filter(varied)
    return scored.with_columns(z=pl.Series(ndtri(scored["quantile"].to_numpy()), dtype=pl.Float64))


def _in_common(scores: pl.DataFrame) -> tuple[float, float]:
    """Shares of the scores' variance that a rank's step has in common, and that a place has (moments)."""
    if scores.is_empty():
        return 0.0, 0.0
    variance = float((scores["z"] ** 2).mean())  # type: ignore[arg-type]
    steps = scores.group_by("run", "step", "rank").agg(mean=pl.col("z").mean(), n=pl.len())
    of_rank = max(0.0, float(((steps["mean"] ** 2) - variance / steps["n"]).mean()))  # type: ignore[arg-type]
    left = scores.with_columns(z=pl.col("z") - pl.col("z").mean().over("run", "step", "rank"))
    places = left.group_by("run", "step", "word", "nth").agg(
        total=pl.col("z").sum(), squares=(pl.col("z") ** 2).sum(), n=pl.len()
    )
    pairs = places.filter(pl.col("n") > 1).select(
        product=(pl.col("total") ** 2 - pl.col("squares")).sum(), count=(pl.col("n") * (pl.col("n") - 1)).sum()
    )
    product, count = pairs.row(0)
    of_rank = min(of_rank, variance)
    of_place = min(max(0.0, product / count) if count else 0.0, variance - of_rank)
    return of_rank / variance, of_place / variance


@dataclass(frozen=True, slots=True)
class Links:
    """Edges into words: which there were together, by the word and the one before it, and their lags."""

    seen: Mapping[tuple[int, int], Counter[tuple[Link, ...]]]
    lags_ns: Mapping[tuple[int, Link], list[int]]

    @classmethod
    def fit(cls, sentences: Iterable[tuple[list[int], Sentence]]) -> Links:
        """Count; words by number beside their sentences. -1 stands for any word before."""
        seen: dict[tuple[int, int], Counter[tuple[Link, ...]]] = {}
        lags: dict[tuple[int, Link], list[int]] = {}
        for words, sentence in sentences:
            for before, word, links in zip([-1, *words], words, sentence.links, strict=False):
                together = tuple(link for link, _ in links)
                for context in {(before, word), (-1, word)}:
                    seen.setdefault(context, Counter())[together] += 1
                for link, lag_ns in links:
                    lags.setdefault((word, link), []).append(lag_ns)
        return cls(seen, {key: sorted(values) for key, values in lags.items()})

    def draw(
        self, before: int, word: int, there: Mapping[tuple[str, str], int], rng: np.random.Generator
    ) -> list[tuple[Link, int]]:
        """Edges into a word, with lags in ns, from among those whose sources are `there` (so many of kind and lane)."""
        for context in ((before, word), (-1, word)):
            fit = [
                (links, n) for links, n in self.seen.get(context, {}).items() if all(_is_there(x, there) for x in links)
            ]
            if fit:
                chances = np.array([n for _, n in fit], float)
                links = fit[int(rng.choice(len(fit), p=chances / chances.sum()))][0]
                return [(link, self._lag_ns(word, link, rng)) for link in links]
        return []

    def _lag_ns(self, word: int, link: Link, rng: np.random.Generator) -> int:
        seen = self.lags_ns[word, link]
        return int(np.expm1(np.interp(rng.random() * (len(seen) - 1), np.arange(len(seen)), np.log1p(seen))) + 0.5)


def _is_there(link: Link, there: Mapping[tuple[str, str], int]) -> bool:
    return link.source is None or there.get(link.source, 0) >= link.back
