"""What says how likely each word is next: n-grams, or a net and n-grams together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lumos_nb.exchange.chakra.ngrams import END, NGrams
from lumos_nb.exchange.chakra.speaking import Proposer

Floats = NDArray[np.float64]

NET_SHARE = 0.2
"""Weight of the net beside counting n-grams: these know a program that was seen, the net what is usual elsewhere."""


@dataclass
class Chain:
    """N-grams in the middle of a sentence."""

    ngrams: NGrams
    words: int
    counting: bool = False
    said: list[Any] = field(default_factory=list)
    times: Counter[int] = field(default_factory=Counter)

    def chances(self) -> Floats:
        """Chances (words + 1,), the end last."""
        chances = np.full(self.words + 1, 1 / (self.words + 1))
        for seen in self.ngrams.after(self.said):
            chances *= len(seen)
            for token, count in seen.items():
                word: Any = token[0] if isinstance(token, tuple) else token
                chances[self.words if token == END else word] += count
            chances /= seen.total() + len(seen)
        return chances

    def say(self, word: int) -> None:
        """What came next."""
        self.said.append((word, self.times[word]) if self.counting else word)
        self.times[word] += 1


@dataclass
class Mixed:
    """A net and n-grams in the middle of one sentence."""

    net: Proposer
    ngrams: Proposer

    def chances(self) -> Floats:
        """Chances (words + 1,), the end last."""
        return NET_SHARE * self.net.chances() + (1 - NET_SHARE) * self.ngrams.chances()

    def say(self, word: int) -> None:
        """What came next."""
        self.net.say(word)
        self.ngrams.say(word)


def counted(words: Sequence[int]) -> list[tuple[int, int]]:
    """Words with how manieth of their like they are."""
    times: Counter[int] = Counter()
    counted = []
    for word in words:
        counted.append((word, times[word]))
        times[word] += 1
    return counted
