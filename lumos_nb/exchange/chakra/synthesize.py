"""A generator of graphs that is learned from graphs: steps that are like those seen, and none of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import polars as pl

from lumos_nb.display import Shown
from lumos_nb.errors import ABOVE_0, GraphError, InputError, require_number, require_whole, shown
from lumos_nb.exchange.chakra.ngrams import NGrams
from lumos_nb.exchange.chakra.sequence_net import SequenceNet
from lumos_nb.exchange.chakra.skeletons import TRIES, Layout, kinds_of, roles_of
from lumos_nb.exchange.chakra.speaking import Said, Speaker, deepened, speak
from lumos_nb.exchange.chakra.word_draws import Places, Told
from lumos_nb.exchange.chakra.word_graphs import assembled
from lumos_nb.exchange.chakra.words import Meeting, Step, Word
from lumos_nb.graph import Graph
from lumos_nb.schema import require

ANY = -1
"""The role of all ranks together, for steps of runs that were not seen."""

LEAST_WORDS = 2
"""Of a run that was not seen, the net says what comes next where fewer words before were seen than this."""

By = Literal["both", "counts", "net", "markov"]


@dataclass(frozen=True, slots=True, repr=False)
class TraceModel(Shown):
    """A generative model of training steps, in two levels; `fit` learns it and `sample` draws from it.

    First the skeleton: which collectives and messages there are, among whom and how large, in which order (n-grams).
    Then the words of each role of rank, by n-grams that count how often each word has come and fall back on a recurrent
    net, held to the skeleton: so the communication of all ranks agrees whatever is drawn. Then durations and edges,
    as they were seen at a word's place. Names of operators and kernels are all that survives of the strings of the
    graphs. Everything in it is plain data: `pickle` keeps it.

    Attributes
    ----------
    words
        The vocabulary.
    layouts
        Run -> what is known of it.
    net
        What says the next word where n-grams have not seen the ones before; None where fitted with `epochs=0`.
    counting, plain
        Role (`ANY` for all) -> n-grams of words that count how often each was there, and of the words alone: the Markov
        chain that is a baseline.
    places
        What words took and hung on.
    """

    words: tuple[Word, ...]
    layouts: Mapping[str, Layout]
    net: SequenceNet | None
    counting: Mapping[int, NGrams]
    plain: Mapping[int, NGrams]
    places: Places

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        by = f"n-grams and a net of {self.net.parameters:,} parameters" if self.net else "n-grams"
        runs = [
            (run, len(of.roles), len(set(of.roles)), of.steps, len(of.meetings), of.longest)
            for run, of in self.layouts.items()
        ]
        columns = ("run", "ranks", "roles", "steps", "collectives", "longest_rank")
        return [(f"Model of traces: {len(self.words):,} words, {by}", pl.DataFrame(runs, schema=columns, orient="row"))]

    @classmethod
    def fit(
        cls, graphs: Mapping[str, Sequence[Graph]] | Sequence[Graph], *, seed: int = 0, epochs: int = 40
    ) -> TraceModel:
        """Learn from graphs of steps.

        Parameters
        ----------
        graphs
            Steps by the run that they are of, or the steps of one run. All graphs of a run have the same ranks.
        seed
            Of the net's beginning and its training.
        epochs
            Passes of the net over the corpus; a minute or two on a CPU for the bundled runs. 0: n-grams only.

        Raises
        ------
        InputError
            There is no graph, or it is something else.
        GraphError
            Graphs of one run have different ranks.

        Examples
        --------
        >>> model = TraceModel.fit([ln.build_graph(recording, step) for step in (3, 4)], epochs=0)
        >>> ln.replay(model.sample(seed=1)).step_ns > 10**6
        True
        """
        require_whole(0, seed=seed)
        require_whole(0, 10**6, epochs=epochs)
        corpus = {run: [Step.of(graph) for graph in steps] for run, steps in _checked(graphs).items()}
        number: dict[Word, int] = {}
        told = [
            Told(run, i, rank, [number.setdefault(w, len(number)) for w in sentence.words], sentence, step.meetings)
            for run, steps in corpus.items()
            for i, step in enumerate(steps)
            for rank, sentence in enumerate(step.sentences)
        ]
        roles = roles_of(corpus)
        times = Counter((roles[each.run][each.rank], tuple(each.words)) for each in told)
        said: dict[int, list[tuple[int, ...]]] = {}
        for (role, sentence), n in times.items():
            for of in (role, ANY):
                said.setdefault(of, []).extend([sentence] * n)
        plain = {role: NGrams.fit(sentences, len(number), counting=False) for role, sentences in said.items()}
        counting = {role: NGrams.fit(said[role], len(number), counting=True) for role in said if role != ANY}
        net = SequenceNet.fit(times, len(number), seed=seed, epochs=epochs) if epochs else None
        layouts = {run: Layout.of(run, steps, roles[run]) for run, steps in corpus.items()}
        return cls(tuple(number), layouts, net, counting, plain, Places.fit(told))

    def sample(
        self,
        *,
        seed: int,
        like: str | None = None,
        layers: float = 1.0,
        message_size: float = 1.0,
        ranks: int | None = None,
        by: By = "both",
    ) -> Graph:
        """Draw a step.

        Parameters
        ----------
        seed
            Equal seeds give equal graphs.
        like
            The run whose layout it has; None draws one, by the number of their steps.
        layers
            How many times as many layers every rank holds.
        message_size
            How many times as large collectives and messages are. Transfers take longer by bytes on the wire
            (nccl-tests' factor of the collective and its ranks); what is latency, is told by sizes of the run that
            differ by a factor of 2. Where there are none, all is taken for bandwidth.
        ranks
            How many ranks there are: a multiple of those of the run. All ranks are copied, and the groups that only
            serve the backward pass and the optimizer (data parallelism) take in the copies.
        by
            What says the next word: the counting n-grams and the net, one of them, or the plain Markov chain.

        Raises
        ------
        InputError
            A run that was not seen, or a number that cannot be.
        GraphError
            Layers are asked of a run whose ops name none; no step comes to an end that has its communication; or the
            ranks' copies would have nothing in common.
        """
        require_whole(0, seed=seed)
        require_whole(0, **({} if ranks is None else {"ranks": ranks}))
        layout = self._layout(like, np.random.default_rng([seed, 0]))
        require_number(ABOVE_0, 1e6, layers=layers, message_size=message_size)
        layers, message_size = float(layers), float(message_size)
        copies = layout.copies(ranks)
        rng = np.random.default_rng([seed, 1])
        meetings = layout.draw(rng)
        spoken = {role: self._spoken(layout, role, meetings, by, rng) for role in sorted(set(layout.roles))}
        if layers != 1 and all(said.layer < 0 for sentence in spoken.values() for said in sentence):
            raise GraphError(
                f"layers={layers:g}: no op of {shown(layout.run)} says which layer it is of; mark layers when "
                "recording (record_function ranges named layer=0, layer=1, ...), or leave layers at 1."
            )
        deep = {role: deepened(sentence, self.words, layers) for role, sentence in spoken.items()}
        grown, place = layout.grown(meetings, copies, message_size)
        base = len(layout.roles)
        parts = dict[int, list[Said]]()
        for rank in range(base * copies):
            own = [place[i, rank // base] for i, meeting in enumerate(meetings) if rank % base in meeting.ranks]
            sentence = deep[layout.roles[rank % base]]
            parts[rank] = [said._replace(meeting=own[said.meeting]) if said.meeting >= 0 else said for said in sentence]
        together = rng.standard_normal(len(grown))
        seen = {
            rank: self.places.draw((layout.run, rank % base), part, self.words, grown, together, rng)
            for rank, part in parts.items()
        }
        return assembled(parts, seen, self.words, grown)

    def bits(self, graphs: Sequence[Graph], like: str | None = None) -> pl.DataFrame:
        """Bits a word of steps that were not learned from.

        Parameters
        ----------
        graphs
            Steps.
        like
            The run that they are of; None where it was not seen.

        Returns
        -------
        frame
            `step`, `rank`, `words`, `unknown` (share of words never seen, each costing the logarithm of all words; one
            known but for its shapes counts as known), `bits` (of counting n-grams and net together), `net_bits`,
            `counts_bits`, `markov_bits`, `uniform_bits`; those with the net are null where there is none.
        """
        rows = []
        known = {word._replace(shapes=""): i for i, word in enumerate(self.words)}
        known |= {word: i for i, word in enumerate(self.words)}
        ways: dict[str, By] = {"bits": "both", "net_bits": "net", "counts_bits": "counts", "markov_bits": "markov"}
        for i, step in enumerate(map(Step.of, _steps_of(str(like), graphs))):
            if like is not None and len(step.ranks) != len(self._layout(like).roles):
                raise InputError(
                    f"step {i} has {len(step.ranks)} ranks, those of {shown(like)} others: give like=None."
                )
            for rank, sentence in enumerate(step.sentences):
                said = [known.get(word, known.get(word._replace(shapes=""), -1)) for word in sentence.words]
                role = ANY if like is None else self._layout(like).roles[rank]
                row: dict[str, float | None] = {"step": i, "rank": step.ranks[rank], "words": len(said)}
                row["unknown"] = said.count(-1) / len(said)
                for column, by in ways.items():
                    there = self.net or by in ("counts", "markov")
                    row[column] = float(-np.log2(self._speaker(role, by).score(said)).mean()) if there else None
                rows.append(row | {"uniform_bits": math.log2(len(self.words) + 1)})
        return pl.DataFrame(rows)

    def _speaker(self, role: int, by: By) -> Speaker:
        if self.net is None and by == "net":
            raise InputError('by="net": the model was fitted with epochs=0; fit it with more.')
        if by not in get_args(By):
            raise InputError(f"by={shown(by)}: give one of {', '.join(map(repr, get_args(By)))}.")
        net = self.net if by in ("both", "net") else None
        ngrams = [] if by == "net" else [replace(self.plain[role], shortest=LEAST_WORDS if net and role == ANY else 0)]
        ngrams += [self.counting[role]] if by in ("both", "counts") and role in self.counting else []
        return Speaker(len(self.words), role, ngrams, net)

    def _layout(self, like: str | None, rng: np.random.Generator | None = None) -> Layout:
        if like is None and rng:
            steps = np.array([layout.steps for layout in self.layouts.values()], float)
            like = [*self.layouts][int(rng.choice(len(steps), p=steps / steps.sum()))]
        if like is None or like not in tuple(self.layouts):
            raise InputError(
                f"like={shown(like)}: no such run was learned from; there are {', '.join(map(repr, self.layouts))}."
            )
        return self.layouts[like]

    def _spoken(
        self, layout: Layout, role: int, meetings: Sequence[Meeting], by: By, rng: np.random.Generator
    ) -> list[Said]:
        rank = layout.roles.index(role)
        for _ in range(TRIES):
            speaker = self._speaker(role, by)
            spoken = speak(speaker, self.words, kinds_of(meetings, rank), 2 * layout.longest, rng)
            if spoken:
                return spoken
        raise GraphError(
            f"no sentence for rank {rank} of {shown(layout.run)} with its communication in {TRIES} draws; train longer."
        )


def _checked(graphs: object) -> dict[str, list[Graph]]:
    runs = graphs if isinstance(graphs, Mapping) else {"": graphs}
    checked = {}
    for run, steps in runs.items():
        checked[str(run)] = _steps_of(str(run), steps)
        if len({tuple(sorted(set(graph.ops["rank"]))) for graph in checked[str(run)]}) > 1:
            raise GraphError(f"graphs of run {shown(run)} have different ranks; give them as runs of their own.")
    if not checked:
        raise InputError("there are no graphs to learn from; give at least one: [build_graph(run)].")
    return checked


def _steps_of(run: str, steps: object) -> list[Graph]:
    if isinstance(steps, str) or not isinstance(steps, Sequence) or not steps:
        raise InputError(f"run {shown(run)} has no sequence of graphs; give at least one: [build_graph(run)].")
    for graph in steps:
        require(graph, "edges")
    return list(steps)
