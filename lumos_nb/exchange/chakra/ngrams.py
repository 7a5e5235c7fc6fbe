"""Words by the few before them: n-grams with back-off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

START = (-1, 0)
Token = tuple[int, int]
"""A word, and how often it stood before; 0 always where that is not counted."""


@dataclass(frozen=True, slots=True)
class NGrams:
    """How often each word followed each context of `shortest` to `order` tokens.

    Words are numbers from 0 to `words` - 1; number `words` ends a sentence. Contexts of words alone, of all lengths,
    are the Markov chain of that order. A context that counts how often its words stood before knows where in a program
    it is. Only words that every sentence has equally often are counted, for one more or less of the others shifts what
    follows; and one word alone is no such context, where two lanes may take turns.
    """

    most: Ints  # (words + 1,): how often each word and the end stood in a sentence at most
    counted: frozenset[int]
    shortest: int
    order: int
    counts: Mapping[tuple[Token, ...], tuple[Ints, Ints]]

    @classmethod
    def fit(cls, sentences: Sequence[Sequence[int]], words: int, *, counting: bool, order: int = 3) -> NGrams:
        """Count what follows what."""
        shortest = 2 if counting else 0
        most = np.max([np.bincount([*sentence, words], minlength=words + 1) for sentence in sentences], axis=0)
        often = {frozenset(Counter(sentence).items()) for sentence in sentences} if counting else set()
        counted = frozenset(word for word, _ in frozenset.intersection(*often)) if often else frozenset()
        seen: dict[tuple[Token, ...], dict[int, int]] = {}
        for sentence in sentences:
            nth = zip(sentence, times(sentence), strict=True)
            tokens = [START, *((word, n if word in counted else 0) for word, n in nth)]
            for at, word in enumerate([*sentence, words], start=1):
                for length in range(shortest, min(order, at) + 1):
                    after = seen.setdefault(tuple(tokens[at - length : at]), {})
                    after[word] = after.get(word, 0) + 1
        counts = {context: (np.array([*after]), np.array([*after.values()])) for context, after in seen.items()}
        return cls(most, counted, shortest, order, counts)

    def token(self, word: int, nth: int) -> Token:
        """What stands for a word in a context."""
        return word, nth if word in self.counted else 0

    def smooth(self, chances: Floats, tokens: Sequence[Token]) -> None:
        """Interpolate chances (words + 1,) with what came after the last `tokens` (Witten and Bell, 1991), in place."""
        for length in range(self.shortest, min(self.order, len(tokens)) + 1):
            if (found := self.counts.get(tuple(tokens[len(tokens) - length :]))) is None:
                break
            after, count = found
            chances *= len(after)
            chances[after] += count
            chances /= count.sum() + len(after)


def times(sentence: Iterable[int]) -> list[int]:
    """How often each word of a sentence stood before."""
    before: Counter[int] = Counter()
    nth = []
    for word in sentence:
        nth.append(before[word])
        before[word] += 1
    return nth
