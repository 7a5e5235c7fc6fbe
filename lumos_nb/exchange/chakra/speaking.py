"""A rank's words, one after the other, such that its launches, arrivals and transfers are those of its meetings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lumos_nb.exchange.chakra.words import Word
from lumos_nb.workloads.llm.repeats import tandem

Floats = NDArray[np.float64]

LEAST_CHANCE = 0.1
"""A word is not drawn that is less likely than this share of the likeliest: a thousand rare slips would make a step."""

Spoken = list[tuple[int, int]]
"""Words by number, each with its meeting: the place among those of its rank, -1 for none."""


class Proposer(Protocol):
    """What says how likely each word is next, the end last: `sequence_net.Speaker`, or n-grams."""

    def chances(self) -> Floats:
        """Chances (words + 1,)."""

    def say(self, word: int) -> None:
        """What came next."""


@dataclass
class _State:
    """Which meetings are still to come, on one rank in the middle of its sentence.

    Meetings of one kind are taken in turn. Kinds may overtake each other (a receive that is posted before a send), but
    not on one lane, and then nothing is waited for before the one overtaken has come as well: so all ranks' sentences
    together never wait in a circle.
    """

    waiting: dict[str, deque[int]]
    unlaunched: dict[str, int]
    open: dict[str, int] = field(default_factory=dict)  # lane -> meeting that has arrived on it, not yet transferred
    furthest: dict[str, int] = field(default_factory=dict)  # lane -> last meeting on it

    def allows(self, word: Word) -> bool:
        """Whether `word` may come next."""
        if not word.meets:
            return word.kind != "wait" or not self._overtaken()
        if word.kind == "launch":
            return self.unlaunched.get(word.meets, 0) > 0
        if word.kind == "event":
            queue = self.waiting.get(word.meets, deque())
            return bool(queue) and word.lane not in self.open and queue[0] > self.furthest.get(word.lane, -1)
        return word.lane in self.open

    def _overtaken(self) -> bool:
        last = max(self.furthest.values(), default=-1)
        return any(queue[0] < last for queue in self.waiting.values() if queue)

    def over(self) -> bool:
        """Whether the sentence may end."""
        return not self.open and not any(self.waiting.values())

    def take(self, word: Word) -> int:
        """Take the meeting of `word`, which may be -1 for none."""
        if not word.meets:
            return -1
        if word.kind == "launch":
            self.unlaunched[word.meets] -= 1
            return -1
        if word.kind == "event":
            meeting = self.waiting[word.meets].popleft()
            self.open[word.lane] = self.furthest[word.lane] = meeting
            return meeting
        return self.open.pop(word.lane)


def speak(
    proposer: Proposer, vocabulary: Sequence[Word], meetings: Sequence[str], longest: int, rng: np.random.Generator
) -> Spoken | None:
    """One sentence that takes part in `meetings` (their kinds, in order), or None if it found no end in time."""
    waiting: dict[str, deque[int]] = {}
    for i, kind in enumerate(meetings):
        waiting.setdefault(kind, deque()).append(i)
    state = _State(waiting, {kind: len(queue) for kind, queue in waiting.items()})
    bound = [i for i, word in enumerate(vocabulary) if word.meets or word.kind == "wait"]
    spoken: Spoken = []
    while len(spoken) < longest:
        chances = proposer.chances()
        chances[[i for i in bound if not state.allows(vocabulary[i])]] = 0
        chances[-1] *= state.over()
        chances[chances < LEAST_CHANCE * chances.max()] = 0
        if not chances.any():
            return None
        word = int(rng.choice(len(chances), p=chances / chances.sum()))
        if word == len(vocabulary):
            return spoken
        spoken.append((word, state.take(vocabulary[word])))
        proposer.say(word)
    return None


def layer_numbers(words: Sequence[Word]) -> list[int]:
    """The layer that each word is of, counted on its rank; -1 outside."""
    last, numbers = 0, []
    for word in words:
        if word.layer in ("+1", "-1"):
            last += int(word.layer)
        elif word.layer.startswith("="):
            last = int(word.layer[1:])
        numbers.append(max(last, 0) if word.layer else -1)
    return numbers


def deepened(spoken: Spoken, vocabulary: Sequence[Word], times: float) -> tuple[Spoken, list[int]]:
    """A sentence with `times` as many layers, and the number of each word's layer (-1 outside).

    What stands between the first and the last op of a layer is repeated, forward or backward alike; messages between
    ranks end a layer. The loop over parameters, the longest repetition in the optimizer behind the backward pass, goes
    round so many times as well.
    """
    words = [vocabulary[word] for word, _ in spoken]
    numbers = layer_numbers(words)
    there = max(numbers, default=-1) + 1
    if not there or times == 1:
        return spoken, numbers
    upto = [round(i * times) for i in range(there + 1)]  # layer i becomes those from upto[i] to upto[i + 1]
    deep: Spoken = []
    of: list[int] = []
    at = 0
    for begin, end, layer in [*_stretches(words, numbers), (len(words), len(words), -1)]:
        deep += spoken[at:begin]
        of += [-1] * (begin - at)
        if layer >= 0:
            forward = words[begin].phase != "backward"
            for copy in (
                range(upto[layer], upto[layer + 1]) if forward else reversed(range(upto[layer], upto[layer + 1]))
            ):
                deep += spoken[begin:end]
                of += [copy if number >= 0 else -1 for number in numbers[begin:end]]
        at = end
    return _longer_loop(deep, of, vocabulary, upto[-1] / there)


def _stretches(words: Sequence[Word], numbers: list[int]) -> list[tuple[int, int, int]]:
    """Begin, end and number of what stands between ops of one layer and phase without a message."""
    found: list[tuple[int, int, int]] = []
    broken = True
    for i, word in enumerate(words):
        if word.meets in ("send", "recv"):
            broken = True
        if numbers[i] < 0:
            continue
        begin, _, layer = found[-1] if found else (0, 0, -1)
        if broken or layer != numbers[i] or words[begin].phase != word.phase:
            found.append((i, i + 1, numbers[i]))
        else:
            found[-1] = (begin, i + 1, layer)
        broken = False
    return found


def _longer_loop(spoken: Spoken, of: list[int], vocabulary: Sequence[Word], times: float) -> tuple[Spoken, list[int]]:
    words = [vocabulary[word] for word, _ in spoken]
    passes = [i for i, word in enumerate(words) if word.phase in ("forward", "backward") or word.meets]
    inside = [i for i, word in enumerate(words) if word.phase == "optimizer" and i > max(passes, default=-1)]
    if not inside:
        return spoken, of
    first, last = inside[0], inside[-1] + 1
    loop = tandem(np.array([word for word, _ in spoken[first:last]], np.int64))
    if loop is None:
        return spoken, of
    begin, end = first + loop.start, first + loop.start + loop.period * loop.times
    rounds = round(loop.times * times)
    body, numbers = spoken[begin : begin + loop.period], of[begin : begin + loop.period]
    return spoken[:begin] + body * rounds + spoken[end:], of[:begin] + numbers * rounds + of[end:]
