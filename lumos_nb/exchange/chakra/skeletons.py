"""The communication of a step before it has anything else: which meetings there are, of whom, in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lumos_nb.costs.collective_plans import BUS_FACTOR
from lumos_nb.errors import GraphError, InputError
from lumos_nb.exchange.chakra.ngrams import END, NGrams
from lumos_nb.exchange.chakra.words import MESSAGE, Meeting, Step

TRIES = 20
"""How often a skeleton or a sentence that comes to no end is drawn anew."""

Turn = tuple[Meeting, int]
"""A meeting, its size as a power of two, and how manieth of its like it is."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What is known of one run of the corpus."""

    ranks: tuple[int, ...]  # as they were numbered; here they count from 0
    roles: Mapping[int, int]  # rank -> role: ranks of one role take part in the same kinds of meetings, in one order
    skeleton: NGrams  # of turns
    sizes: Mapping[Turn, list[int]]
    growing: frozenset[tuple[int, ...]]  # groups to which more ranks may come
    longest: int  # words of its longest sentence
    steps: int

    def role(self, rank: int) -> int:
        """The role of a rank by its number in the run."""
        return self.roles[self.ranks.index(rank)]

    def draw(self, run: str, rng: np.random.Generator) -> list[Meeting]:
        """Meetings of a step; ranks of one role have the same kinds in the same order."""
        for _ in range(TRIES):
            turns: list[Any] = []
            while (turn := self.skeleton.draw(turns, rng)) not in (END, None):
                turns.append(turn)
            kinds: dict[int, set[tuple[str, ...]]] = {}
            for rank, role in self.roles.items():
                kinds.setdefault(role, set()).add(kinds_of([m for m, _ in turns], rank))
            if all(len(alike) == 1 for alike in kinds.values()):
                return [m._replace(size_bytes=int(rng.choice(self.sizes[m, nth]))) for m, nth in turns]
        raise GraphError(f"no skeleton of {run!r} whose ranks agree in {TRIES} draws; fit with more of its steps.")

    def copies(self, ranks: int | None, run: str) -> int:
        """How many copies of the run's ranks make so many."""
        base = len(self.roles)
        if ranks is None or ranks == base:
            return 1
        if ranks < 1 or ranks % base:
            raise InputError(f"ranks={ranks}: {run!r} has {base}; give a multiple of it.")
        if not self.growing:
            raise GraphError(
                f"ranks={ranks}: {run!r} has no group that only serves the backward pass or the optimizer, so copies "
                "of its ranks would have nothing in common; take a run with data parallelism."
            )
        return ranks // base

    def grown(
        self, meetings: Sequence[Meeting], copies: int, message_size: float
    ) -> tuple[list[tuple[Meeting, int]], dict[tuple[int, int], int]]:
        """Meetings of all copies, each with the one that it is of; and (meeting, copy) -> its place."""
        base = len(self.roles)
        grown: list[tuple[Meeting, int]] = []
        place: dict[tuple[int, int], int] = {}
        for i, meeting in enumerate(meetings):
            size = max(1, round(meeting.size_bytes * message_size))
            if meeting.collective != MESSAGE and meeting.ranks in self.growing:
                ranks = tuple(rank + base * copy for copy in range(copies) for rank in meeting.ranks)
                place |= {(i, copy): len(grown) for copy in range(copies)}
                grown.append((Meeting(meeting.collective, ranks, size), i))
                continue
            for copy in range(copies):
                place[i, copy] = len(grown)
                grown.append(
                    (Meeting(meeting.collective, tuple(rank + base * copy for rank in meeting.ranks), size), i)
                )
        return grown, place


def kinds_of(meetings: Sequence[Meeting], rank: int) -> tuple[str, ...]:
    """What a rank's meetings are to it, in order."""
    return tuple(meeting.kind(rank) for meeting in meetings if rank in meeting.ranks)


def _turns(meetings: Sequence[Meeting]) -> list[Turn]:
    """Meetings by bucket of size, and how manieth each is of its like."""
    times: Counter[Meeting] = Counter()
    turns = []
    for meeting in meetings:
        bucket = meeting._replace(size_bytes=1 << max(meeting.size_bytes, 1).bit_length() - 1)
        turns.append((bucket, times[bucket]))
        times[bucket] += 1
    return turns


def layouts_of(corpus: Mapping[str, Sequence[Step]]) -> dict[str, Layout]:
    """The layout of every run, ranks counted from 0, roles over all runs."""
    layouts: dict[str, Layout] = {}
    first = 0
    for run, steps in corpus.items():
        ranks = sorted(steps[0].sentences)
        kinds = {rank: kinds_of(steps[0].meetings, rank) for rank in ranks}
        number = {kind: first + i for i, kind in enumerate(dict.fromkeys(kinds.values()))}
        first += len(number)
        place = {rank: i for i, rank in enumerate(ranks)}
        renamed = [[m._replace(ranks=tuple(place[r] for r in m.ranks)) for m in step.meetings] for step in steps]
        sizes: dict[Turn, list[int]] = {}
        for meetings in renamed:
            for turn, meeting in zip(_turns(meetings), meetings, strict=True):
                sizes.setdefault(turn, []).append(meeting.size_bytes)
        roles = {place[rank]: number[kinds[rank]] for rank in ranks}
        skeleton = NGrams.fit(_turns(meetings) for meetings in renamed)
        longest = max(len(sentence.words) for step in steps for sentence in step.sentences.values())
        layouts[run] = Layout(
            tuple(ranks), roles, skeleton, sizes, _growing(steps, renamed, roles), longest, len(steps)
        )
    return layouts


def _growing(
    steps: Sequence[Step], renamed: Sequence[Sequence[Meeting]], roles: Mapping[int, int]
) -> frozenset[tuple[int, ...]]:
    """Groups of one role whose collectives are all of the backward pass or the optimizer."""
    phases: dict[tuple[int, ...], set[str]] = {}
    for step, meetings in zip(steps, renamed, strict=True):
        for sentence in step.sentences.values():
            for word, meeting in zip(sentence.words, sentence.meeting, strict=True):
                if meeting >= 0 and meetings[meeting].collective != MESSAGE:
                    phases.setdefault(meetings[meeting].ranks, set()).add(word.phase)
    alike = {ranks for ranks in phases if len({roles[rank] for rank in ranks}) == 1}
    return frozenset(ranks for ranks in alike if phases[ranks] <= {"backward", "optimizer"})


def longer(was: Meeting, now: Meeting) -> float:
    """How many times as long a transfer takes, by its bytes on the wire."""
    factor = BUS_FACTOR.get(was.collective, np.ones_like)
    before, after = (float(factor(np.array(float(len(m.ranks))))) * m.size_bytes for m in (was, now))
    return after / before if before else 1.0
