"""A rank's words, one after the other, such that its launches, arrivals and transfers are those of its meetings."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lumos_nb.exchange.chakra.ngrams import START, NGrams, Token
from lumos_nb.exchange.chakra.sequence_net import SequenceNet
from lumos_nb.exchange.chakra.words import Word
from lumos_nb.workloads.llm.repeats import tandem

Floats = NDArray[np.float64]

LEAST_CHANCE = 0.15
"""A word is not drawn that is less likely than this share of the likeliest: a thousand rare slips would make a step."""


class Said(NamedTuple):
    """A word in a sentence."""

    word: int
    nth: int  # how often it stood before
    meeting: int  # the place among those of its rank, -1 for none
    layer: int  # counted on its rank, -1 outside


class Speaker:
    """What comes next in the middle of a sentence: n-grams, each falling back on those before, the first on a net."""

    def __init__(self, words: int, role: int, ngrams: Sequence[NGrams], net: SequenceNet | None) -> None:
        self._words, self._role, self._ngrams, self._net = words, role, ngrams, net
        self._tokens: list[list[Token]] = [[START] for _ in ngrams]
        self._times = np.zeros(words + 1, np.int64)
        self._most = ngrams[0].most if ngrams else None  # else a loop that was left too late never ends
        self._base = np.full(words + 1, 1 / (words + 1))
        self._state = net.begin() if net else self._base
        self._read(-1, 0)

    def _read(self, word: int, nth: int) -> None:
        if self._net:
            self._base, self._state = self._net.read(self._state, self._role, word, nth)

    def chances(self) -> Floats:
        """Chances (words + 1,) of what comes next, the end last."""
        chances = self._base.copy()
        for ngrams, tokens in zip(self._ngrams, self._tokens, strict=True):
            ngrams.smooth(chances, tokens)
        return chances

    def say(self, word: int) -> int:
        """What came next; returns how often it stood before."""
        nth = int(self._times[word])
        self._times[word] += 1
        for ngrams, tokens in zip(self._ngrams, self._tokens, strict=True):
            tokens.append(ngrams.token(word, nth))
        self._read(word, nth)
        return nth

    def draw(self, rng: np.random.Generator, blocked: Sequence[int] = ()) -> int | None:
        """A word that may be next, the number behind the last for the end; None if there is none."""
        chances = self.chances()
        chances[[*blocked]] = 0
        if self._most is not None:
            chances[self._times >= self._most] = 0
        chances[chances < LEAST_CHANCE * chances.max()] = 0
        return int(rng.choice(len(chances), p=chances / chances.sum())) if chances.any() else None

    def score(self, sentence: Sequence[int]) -> Floats:
        """Chances (n + 1,) of each word of a sentence, and of its end, after those before; -1 is a word never seen."""
        scores = []
        for word in sentence:
            scores.append(self.chances()[word] if word >= 0 else 1 / (self._words + 1))
            self.say(word if word >= 0 else self._words)
        return np.array([*scores, self.chances()[-1]])


class _Agenda:
    """Which meetings are still to come, on one rank in the middle of its sentence.

    Meetings of one kind are taken in turn. Kinds may overtake each other (a receive that is posted before a send), but
    not on one lane, and then nothing is waited for before the one overtaken has come as well: so all ranks' sentences
    together never wait in a circle.
    """

    def __init__(self, meetings: Sequence[str]) -> None:
        self._waiting: dict[str, deque[int]] = {}
        for i, kind in enumerate(meetings):
            self._waiting.setdefault(kind, deque()).append(i)
        self._unlaunched = Counter(meetings)
        self._open: dict[str, int] = {}  # lane -> meeting that has arrived on it, not yet transferred
        self._furthest: dict[str, int] = {}  # lane -> last meeting on it

    def allows(self, word: Word) -> bool:
        """Whether `word` may come next."""
        queue = self._waiting.get(word.meets)
        if not word.meets:
            last = max(self._furthest.values(), default=-1)
            return word.kind != "wait" or not any(queue[0] < last for queue in self._waiting.values() if queue)
        if word.kind == "launch":
            return self._unlaunched[word.meets] > 0
        if word.kind == "event":
            return word.lane not in self._open and bool(queue and queue[0] > self._furthest.get(word.lane, -1))
        return word.lane in self._open

    def over(self) -> bool:
        """Whether the sentence may end."""
        return not self._open and not any(self._waiting.values())

    def take(self, word: Word) -> int:
        """Take the meeting of `word`, which may be -1 for none."""
        if word.meets and word.kind == "event":
            self._open[word.lane] = self._furthest[word.lane] = self._waiting[word.meets].popleft()
            return self._open[word.lane]
        if word.meets and word.kind != "launch":
            return self._open.pop(word.lane)
        self._unlaunched[word.meets] -= 1
        return -1


def speak(
    speaker: Speaker, vocabulary: Sequence[Word], meetings: Sequence[str], longest: int, rng: np.random.Generator
) -> list[Said] | None:
    """One sentence that takes part in `meetings` (their kinds, in order), or None if it found no end in time."""
    agenda, end = _Agenda(meetings), len(vocabulary)
    bound = [i for i, word in enumerate(vocabulary) if word.meets or word.kind == "wait"]
    spoken: list[Said] = []
    last = 0
    while len(spoken) < longest:
        blocked = [i for i in bound if not agenda.allows(vocabulary[i])]
        number = speaker.draw(rng, blocked if agenda.over() else [*blocked, end])
        if number is None:
            return None
        if number == end:
            return spoken
        word = vocabulary[number]
        if word.layer not in ("", "same"):
            last = max(0, int(word.layer[1:]) if word.layer.startswith("=") else last + int(word.layer))
        spoken.append(Said(number, speaker.say(number), agenda.take(word), last if word.layer else -1))
    return None


def deepened(spoken: list[Said], vocabulary: Sequence[Word], times: float) -> list[Said]:
    """A sentence with `times` as many layers.

    What stands between the first and the last op of a layer is repeated, forward or backward alike; messages between
    ranks end a layer. The loop over parameters, the longest repetition in the optimizer behind the backward pass, goes
    round so many times as well.
    """
    there = max((said.layer for said in spoken), default=-1) + 1
    if not there or times == 1:
        return spoken
    upto = [round(i * times) for i in range(there + 1)]  # layer i becomes those from upto[i] to upto[i + 1]
    deep, at = list[Said](), 0
    for begin, end in _stretches(spoken, vocabulary):
        layer = spoken[begin].layer
        copies = range(upto[layer], upto[layer + 1])
        deep += spoken[at:begin]
        for copy in reversed(copies) if vocabulary[spoken[begin].word].phase == "backward" else copies:
            deep += [said._replace(layer=copy if said.layer >= 0 else -1) for said in spoken[begin:end]]
        at = end
    return _longer_loop([*deep, *spoken[at:]], vocabulary, upto[-1] / there)


def _stretches(spoken: list[Said], vocabulary: Sequence[Word]) -> Iterator[tuple[int, int]]:
    """Begin and end of what stands between ops of one layer and phase without a message."""
    begin, end, of = 0, 0, None
    for i, said in enumerate(spoken):
        word = vocabulary[said.word]
        if of and (word.meets in ("send", "recv") or (said.layer >= 0 and (said.layer, word.phase) != of)):
            yield begin, end
            of = None
        if said.layer >= 0:
            begin, end, of = i if of is None else begin, i + 1, (said.layer, word.phase)
    if of:
        yield begin, end


def _longer_loop(spoken: list[Said], vocabulary: Sequence[Word], times: float) -> list[Said]:
    words = [vocabulary[said.word] for said in spoken]
    behind = 1 + max((i for i, w in enumerate(words) if w.meets or w.phase in ("forward", "backward")), default=-1)
    inside = [i for i, word in enumerate(words) if i >= behind and word.phase == "optimizer"]
    first, last = (inside[0], inside[-1] + 1) if inside else (0, 0)
    loop = tandem(np.array([said.word for said in spoken[first:last]], np.int64)) if inside else None
    if loop is None:
        return spoken
    begin, end = first + loop.start, first + loop.start + loop.period * loop.times
    return [*spoken[:begin], *spoken[begin : begin + loop.period] * round(loop.times * times), *spoken[end:]]
