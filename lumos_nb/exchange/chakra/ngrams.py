"""Sequences of tokens by the few before them: n-grams with back-off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

START, END = "<start>", "<end>"


@dataclass(frozen=True, slots=True)
class NGrams:
    """How often each token followed each context of up to `order` tokens.

    Probabilities interpolate all lengths of context (Witten and Bell, 1991), the shortest with a uniform one over the
    tokens seen and one for all others. Draws take the longest context that was seen, so that they hold what was seen.
    """

    order: int
    counts: Mapping[tuple[Hashable, ...], Counter[Hashable]]

    @classmethod
    def fit(cls, sequences: Iterable[Sequence[Hashable]], order: int = 3) -> NGrams:
        """Count; each sequence begins with `START` and ends with `END`."""
        counts: dict[tuple[Hashable, ...], Counter[Hashable]] = {}
        for sequence in sequences:
            whole = [START, *sequence, END]
            for at in range(1, len(whole)):
                for length in range(min(order, at) + 1):
                    counts.setdefault(tuple(whole[at - length : at]), Counter())[whole[at]] += 1
        return cls(order, counts)

    def after(self, before: Sequence[Hashable]) -> list[Counter[Hashable]]:
        """What was seen after the last tokens of a sequence, by length of context from 0 on, as far as one was seen."""
        last = [START, *before][-self.order :] if len(before) < self.order else before[len(before) - self.order :]
        contexts = (tuple(last[len(last) - length :]) for length in range(len(last) + 1))
        return [*takewhile(Counter.total, (self.counts.get(context, Counter()) for context in contexts))]

    def probability(self, before: Sequence[Hashable], token: Hashable) -> float:
        """Chance of `token` after `before`."""
        chance = 1 / (len(self.counts[()]) + 1)
        for seen in self.after(before):
            chance = (seen[token] + len(seen) * chance) / (seen.total() + len(seen))
        return chance

    def chances(self, sequence: Sequence[Hashable]) -> NDArray[np.float64]:
        """Chances (n + 1,) of every token of a sequence and its end."""
        whole = [*sequence, END]
        return np.array([self.probability(whole[:at], token) for at, token in enumerate(whole)])

    def draw(
        self, before: Sequence[Hashable], rng: np.random.Generator, allowed: Callable[[Hashable], bool] = lambda _: True
    ) -> Hashable | None:
        """A token after `before`, by the longest context after which an allowed one was seen; None if there is none."""
        for seen in reversed(self.after(before)):
            fit = [(token, count) for token, count in seen.items() if allowed(token)]
            if fit:
                chances = np.array([count for _, count in fit], float)
                return fit[int(rng.choice(len(fit), p=chances / chances.sum()))][0]
        return None
