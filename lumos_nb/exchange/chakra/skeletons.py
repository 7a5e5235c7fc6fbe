"""The communication of a step before it has anything else: which meetings there are, of whom, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lumos_nb.errors import GraphError, InputError, shown
from lumos_nb.exchange.chakra.ngrams import NGrams, times
from lumos_nb.exchange.chakra.speaking import Speaker
from lumos_nb.exchange.chakra.words import MESSAGE, Meeting, Step

TRIES = 20
"""How often a skeleton or a sentence that comes to no end is drawn anew."""
SURE = 100
"""How often each skeleton seen is counted: nothing else follows than what did."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known of one run of the corpus."""

    run: str
    roles: tuple[int, ...]  # of each rank: ranks of one role take part in the same kinds of meetings, in one order
    meetings: tuple[Meeting, ...]  # the vocabulary of its skeletons, sizes rounded down to powers of two
    orders: tuple[NGrams, ...]  # of these
    sizes: Mapping[tuple[int, int], list[int]]  # meeting, how often it was before -> sizes seen
    growing: frozenset[tuple[int, ...]]  # groups to which more ranks may come
    longest: int  # words of its longest sentence
    steps: int

    @classmethod
    def of(cls, run: str, steps: Sequence[Step], roles: Sequence[int]) -> Layout:
        """Learn the layout of a run."""
        number: dict[Meeting, int] = {}
        orders, sizes = [], dict[tuple[int, int], list[int]]()
        for step in steps:
            rounded = [m._replace(size_bytes=1 << max(m.size_bytes, 1).bit_length() - 1) for m in step.meetings]
            orders.append([number.setdefault(meeting, len(number)) for meeting in rounded])
            for at, nth, meeting in zip(orders[-1], times(orders[-1]), step.meetings, strict=True):
                sizes.setdefault((at, nth), []).append(meeting.size_bytes)
        ngrams = tuple(NGrams.fit(orders * SURE, len(number), counting=counting) for counting in (False, True))
        longest = max(len(sentence.words) for step in steps for sentence in step.sentences)
        return cls(run, tuple(roles), tuple(number), ngrams, sizes, _growing(steps, roles), longest, len(steps))

    def draw(self, rng: np.random.Generator) -> list[Meeting]:
        """Meetings of a step; ranks of one role have the same kinds in the same order."""
        for _ in range(TRIES):
            speaker, turns = Speaker(len(self.meetings), -1, self.orders, None), list[tuple[int, int]]()
            while (at := speaker.draw(rng)) is not None and at < len(self.meetings):
                turns.append((at, speaker.say(at)))
            kinds = {(role, kinds_of([self.meetings[at] for at, _ in turns], i)) for i, role in enumerate(self.roles)}
            if len(kinds) == len(set(self.roles)) and all(turn in self.sizes for turn in turns):
                return [self.meetings[turn[0]]._replace(size_bytes=int(rng.choice(self.sizes[turn]))) for turn in turns]
        raise GraphError(
            f"no skeleton of {shown(self.run)} whose ranks agree in {TRIES} draws; fit with more of its steps."
        )

    def copies(self, ranks: int | None) -> int:
        """How many copies of the run's ranks make so many."""
        base = len(self.roles)
        if ranks is None or ranks == base:
            return 1
        if ranks < 1 or ranks % base:
            raise InputError(f"ranks={ranks}: {shown(self.run)} has {base}; give a multiple of it.")
        if not self.growing:
            raise GraphError(
                f"ranks={ranks}: {shown(self.run)} has no group that only serves the backward pass or the optimizer, "
                "so copies of its ranks would have nothing in common; take a run with data parallelism."
            )
        return ranks // base

    def grown(
        self, meetings: Sequence[Meeting], copies: int, message_size: float
    ) -> tuple[list[Meeting], dict[tuple[int, int], int]]:
        """Meetings of all copies; and (meeting, copy) -> its place among them."""
        grown: list[Meeting] = []
        place: dict[tuple[int, int], int] = {}
        for i, (collective, ranks, size_bytes) in enumerate(meetings):
            size = max(1, round(size_bytes * message_size))
            of_copy = [tuple(rank + len(self.roles) * copy for rank in ranks) for copy in range(copies)]
            joined = collective != MESSAGE and ranks in self.growing
            for copy, own in enumerate([tuple(sorted(sum(of_copy, ())))] if joined else of_copy):
                place |= {(i, each): len(grown) for each in (range(copies) if joined else [copy])}
                grown.append(Meeting(collective, own, size))
        return grown, place


def kinds_of(meetings: Sequence[Meeting], rank: int) -> tuple[str, ...]:
    """What a rank's meetings are to it, in order."""
    return tuple(meeting.kind(rank) for meeting in meetings if rank in meeting.ranks)


def roles_of(corpus: Mapping[str, Sequence[Step]]) -> dict[str, list[int]]:
    """Roles of the ranks of each run, by their kinds of meetings; no two runs share one."""
    number: dict[tuple[str, tuple[str, ...]], int] = {}
    return {
        run: [number.setdefault((run, kinds_of(steps[0].meetings, rank)), len(number)) for rank in range(len(ranks))]
        for run, steps in corpus.items()
        for ranks in [steps[0].ranks]
    }


def _growing(steps: Sequence[Step], roles: Sequence[int]) -> frozenset[tuple[int, ...]]:
    """Groups of one role whose collectives are all of the backward pass or the optimizer."""
    phases: dict[tuple[int, ...], set[str]] = {}
    for step in steps:
        for sentence in step.sentences:
            for word, at in zip(sentence.words, sentence.meeting, strict=True):
                if at >= 0 and step.meetings[at].collective != MESSAGE:
                    phases.setdefault(step.meetings[at].ranks, set()).add(word.phase)
    alike = {ranks for ranks in phases if len({roles[rank] for rank in ranks}) == 1}
    return frozenset(ranks for ranks in alike if phases[ranks] <= {"backward", "optimizer"})
