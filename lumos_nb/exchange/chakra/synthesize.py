"""A generator of graphs that is learned from graphs: steps that are like those seen, and none of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.errors import GraphError, InputError
from lumos_nb.exchange.chakra.ngrams import NGrams
from lumos_nb.exchange.chakra.proposers import NET_SHARE, Chain, Mixed, counted
from lumos_nb.exchange.chakra.sequence_net import SequenceNet
from lumos_nb.exchange.chakra.skeletons import TRIES, Layout, kinds_of, layouts_of, longer
from lumos_nb.exchange.chakra.speaking import Proposer, Spoken, deepened, speak
from lumos_nb.exchange.chakra.word_draws import SEEN, Durations, Links
from lumos_nb.exchange.chakra.word_graphs import Part, assembled
from lumos_nb.exchange.chakra.words import Meeting, Sentence, Step, Word
from lumos_nb.graph import Graph
from lumos_nb.schema import require

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ANY = -1
"""The role of all ranks together, for steps of runs that were not seen."""

By = Literal["both", "counts", "net", "markov"]


@dataclass(frozen=True, slots=True)
class TraceModel:
    """A generative model of training steps, in two levels; `fit` learns it and `sample` draws from it.

    First the skeleton: which collectives and messages there are, among whom and how large, in which order (n-grams).
    Then the words of each role of rank, by n-grams that count how often each word has come and a recurrent net, held to
    the skeleton: so the communication of all ranks agrees whatever is drawn. Then durations and edges, conditional on
    the words. Names of operators and kernels are all that survives of the strings of the graphs.

    Attributes
    ----------
    words
        The vocabulary.
    layouts
        Run -> what is known of it.
    net
        What says the next word beside the n-grams; None where it was fitted with `epochs=0`.
    counting, plain
        Role (`ANY` for all) -> n-grams of its words with how manieth of their like they are, and of the words alone:
        the Markov chain that is a baseline.
    durations, links, work
        What words take, hang on, and their median FLOPs and bytes.
    """

    words: tuple[Word, ...]
    layouts: Mapping[str, Layout]
    net: SequenceNet | None
    counting: Mapping[int, NGrams]
    plain: Mapping[int, NGrams]
    durations: Durations
    links: Links
    work: Mapping[int, tuple[float | None, float | None]]
    _shapes: Mapping[tuple[str, str], str] = field(repr=False)

    def __repr__(self) -> str:
        by = f"net of {self.net.parameters:,} parameters" if self.net else "n-grams"
        return f"TraceModel of {', '.join(map(repr, self.layouts))}: {len(self.words)} words, {by}"

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
        >>> recording = ln.Recording.of(ln.load_run(ln.datasets.path("gpt-ddp")))               # doctest: +SKIP
        >>> model = TraceModel.fit([ln.build_graph(recording, step) for step in range(2, 9)])   # doctest: +SKIP
        >>> ln.replay(model.sample(seed=1)).step_ns                                             # doctest: +SKIP
        """
        corpus = {run: [Step.of(graph) for graph in steps] for run, steps in _checked(graphs).items()}
        shapes = _numbered_shapes(corpus)
        coded = [(run, i, rank, _coded(s, shapes), s) for run, i, rank, s in _sentences(corpus)]
        words = tuple(dict.fromkeys(word for *_, sentence, _ in coded for word in sentence))
        number = {word: i for i, word in enumerate(words)}
        layouts = layouts_of(corpus)
        numbered = [(run, i, rank, [number[w] for w in said], s) for run, i, rank, said, s in coded]
        roles = [layouts[run].role(rank) for run, _, rank, *_ in numbered]
        of_role: dict[int, list[list[int]]] = {}
        for role, (*_, said, _) in zip(roles, numbered, strict=True):
            of_role.setdefault(role, []).append(said)
            of_role.setdefault(ANY, []).append(said)
        counting = {role: NGrams.fit(map(counted, said)) for role, said in of_role.items()}
        plain = {role: NGrams.fit(said) for role, said in of_role.items()}
        seen = pl.concat([_seen(corpus, *row) for row in numbered])
        net = _fitted_net(of_role, len(words), seed, epochs) if epochs else None
        links = Links.fit((said, sentence) for *_, said, sentence in numbered)
        return cls(words, layouts, net, counting, plain, Durations.fit(seen), links, _work(numbered), shapes)

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
            (nccl-tests' factor of the collective and its ranks): as if all of their time were bandwidth.
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
            No step comes to an end that has its communication, or the ranks' copies would have nothing in common.
        """
        layout = self._layout(like, np.random.default_rng([_whole("seed", seed), 0]))
        run, known = layout
        if by not in get_args(By):
            raise InputError(f"by={by!r}: give one of {', '.join(map(repr, get_args(By)))}.")
        _positive("layers", layers)
        _positive("message_size", message_size)
        copies = known.copies(ranks if ranks is None else _whole("ranks", ranks), run)
        rng = np.random.default_rng([seed, 1])
        meetings = known.draw(run, rng)
        spoken = {role: self._spoken(run, role, meetings, by, rng) for role in sorted(set(known.roles.values()))}
        deep = {role: deepened(said, self.words, layers) for role, said in spoken.items()}
        grown, place = known.grown(meetings, copies, message_size)
        parts, factors = {}, {}
        for rank in range(len(known.roles) * copies):
            base, copy = rank % len(known.roles), rank // len(known.roles)
            said, of_layer = deep[known.roles[base]]
            own = [place[i, copy] for i, m in enumerate(meetings) if base in m.ranks]
            mine = [own[at] if at >= 0 else -1 for _, at in said]
            before = [meetings[grown[at][1]] if at >= 0 else None for at in mine]
            parts[rank] = ([word for word, _ in said], of_layer, mine, [m.size_bytes if m else 0 for m in before])
            factors[rank] = [longer(m, grown[at][0]) if m else 1.0 for m, at in zip(before, mine, strict=True)]
        times = self.durations.draw(run, [(p[0], p[3]) for p in parts.values()], rng)
        work = {rank: [self.work[word] for word in p[0]] for rank, p in parts.items()}
        built = {
            rank: Part(p[0], p[1], dur_ns * np.array(factors[rank]), p[2], work[rank])
            for (rank, p), dur_ns in zip(parts.items(), times, strict=True)
        }
        return assembled(built, self.words, [m for m, _ in grown], self.links, rng)

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
            known but for its shapes counts as known), `bits` (of net and counting n-grams together), `net_bits`,
            `counts_bits`, `markov_bits`, `uniform_bits`; those with the net are null where there is none.
        """
        rows = []
        known = {word._replace(shapes=""): i for i, word in enumerate(self.words)}
        known |= {word: i for i, word in enumerate(self.words)}
        for _, i, rank, sentence in _sentences({"": [Step.of(graph) for graph in graphs]}):
            coded = _coded(sentence, self._shapes)
            said = np.array([known.get(w, known.get(w._replace(shapes=""), -1)) for w in coded], np.int64)
            chances = self._chances(said, like, rank)
            there = np.append(said, len(self.words)) >= 0
            bits = {
                f"{name}_bits": float(-np.log2(np.where(there, each, 1 / (len(self.words) + 1))).mean())
                for name, each in chances.items()
            }
            both = {"bits": bits.pop("both_bits", None)}
            about = {"step": i, "rank": rank, "words": len(said), "unknown": float((said < 0).mean())}
            rows.append(about | both | bits | {"uniform_bits": math.log2(len(self.words) + 1)})
        return pl.DataFrame(rows)

    def _chances(self, said: Ints, like: str | None, rank: int) -> dict[str, Floats]:
        """Chances (n + 1,) that each way of saying gave every word of a sentence and its end."""
        words, role = said.tolist(), self.layouts[like].role(rank) if like else ANY
        chances = {
            "counts": self.counting[role].chances(counted(words)),
            "markov": self.plain[role].chances(words),
        }
        if self.net:
            chances["net"] = self.net.chances(said, role)
            chances["both"] = NET_SHARE * chances["net"] + (1 - NET_SHARE) * chances["counts"]
        return chances

    def _layout(self, like: str | None, rng: np.random.Generator) -> tuple[str, Layout]:
        if like is None:
            steps = np.array([layout.steps for layout in self.layouts.values()], float)
            like = [*self.layouts][int(rng.choice(len(steps), p=steps / steps.sum()))]
        if like not in self.layouts:
            raise InputError(
                f"like={like!r}: no such run was learned from; there are {', '.join(map(repr, self.layouts))}."
            )
        return like, self.layouts[like]

    def _spoken(self, run: str, role: int, meetings: Sequence[Meeting], by: By, rng: np.random.Generator) -> Spoken:
        layout = self.layouts[run]
        rank = next(rank for rank, of in layout.roles.items() if of == role)
        for _ in range(TRIES):
            proposer = self._proposer(role, by)
            spoken = speak(proposer, self.words, kinds_of(meetings, rank), 2 * layout.longest, rng)
            if spoken:
                return spoken
        raise GraphError(
            f"no sentence for rank {rank} of {run!r} with its communication in {TRIES} draws; train longer."
        )

    def _proposer(self, role: int, by: By) -> Proposer:
        if self.net is None and by == "net":
            raise InputError('by="net": the model was fitted with epochs=0; fit it with more.')
        if by == "markov":
            return Chain(self.plain[role], len(self.words))
        counting = Chain(self.counting[role], len(self.words), counting=True)
        if self.net is None or by == "counts":
            return counting
        speaker = self.net.speaker(role)
        return speaker if by == "net" else Mixed(speaker, counting)


def _checked(graphs: object) -> dict[str, list[Graph]]:
    runs = graphs if isinstance(graphs, Mapping) else {"": graphs}
    checked = {}
    for run, steps in runs.items():
        if isinstance(steps, str) or not isinstance(steps, Sequence) or not steps:
            raise InputError(f"run {run!r} has no sequence of graphs; give at least one: [build_graph(run)].")
        for graph in steps:
            require(graph, "edges")
        if len({tuple(sorted(set(graph.ops["rank"]))) for graph in steps}) > 1:
            raise GraphError(f"graphs of run {run!r} have different ranks; give them as runs of their own.")
        checked[str(run)] = list(steps)
    if not checked:
        raise InputError("there are no graphs to learn from; give at least one: [build_graph(run)].")
    return checked


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise InputError(f"{name}={value!r}: give a whole number of at least 0.")
    return int(value)


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{name}={value!r}: give a finite number above 0.")


def _sentences(corpus: Mapping[str, Sequence[Step]]) -> Iterator[tuple[str, int, int, Sentence]]:
    for run, steps in corpus.items():
        for i, step in enumerate(steps):
            for rank, sentence in step.sentences.items():
                yield run, i, rank, sentence


def _numbered_shapes(corpus: Mapping[str, Sequence[Step]]) -> dict[tuple[str, str], str]:
    """(name, shapes) -> which of the shapes seen with the name they are."""
    seen: dict[str, dict[str, str]] = {}
    for *_, sentence in _sentences(corpus):
        for word in sentence.words:
            if word.shapes:
                of_name = seen.setdefault(word.name, {})
                of_name.setdefault(word.shapes, str(len(of_name)))
    return {(name, shapes): number for name, of_name in seen.items() for shapes, number in of_name.items()}


def _coded(sentence: Sentence, shapes: Mapping[tuple[str, str], str]) -> list[Word]:
    """A sentence's words with shapes as numbers; shapes that were never seen are "?", a word of its own."""
    return [w._replace(shapes=shapes.get((w.name, w.shapes), "?")) if w.shapes else w for w in sentence.words]


def _seen(
    corpus: Mapping[str, Sequence[Step]], run: str, i: int, rank: int, said: Sequence[int], sentence: Sentence
) -> pl.DataFrame:
    meetings = corpus[run][i].meetings
    sizes = [meetings[m].size_bytes if m >= 0 else 0 for m in sentence.meeting]
    nth = pl.int_range(pl.len(), dtype=pl.Int64).over("word")
    about = {
        "run": run,
        "step": i,
        "rank": rank,
        "word": said,
        "nth": 0,
        "size_bytes": sizes,
        "dur_ns": sentence.dur_ns,
    }
    return pl.DataFrame(about, schema=SEEN).with_columns(nth=nth)


Numbered = Sequence[tuple[str, int, int, list[int], Sentence]]


def _fitted_net(of_role: Mapping[int, list[list[int]]], words: int, seed: int, epochs: int) -> SequenceNet:
    times = Counter((role, tuple(said)) for role, sentences in of_role.items() if role != ANY for said in sentences)
    sentences = [np.array(said, np.int64) for _, said in times]
    roles = [role for role, _ in times]
    return SequenceNet.fit(sentences, roles, [*times.values()], words, seed=seed, epochs=epochs)


def _work(numbered: Numbered) -> dict[int, tuple[float | None, float | None]]:
    table: dict[int, list[tuple[float | None, float | None]]] = {}
    for *_, said, sentence in numbered:
        for word, work in zip(said, sentence.work, strict=True):
            table.setdefault(word, []).append(work)
    return {
        word: (_median(flops for flops, _ in seen), _median(size for _, size in seen)) for word, seen in table.items()
    }


def _median(values: Iterator[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return float(np.median(there)) if there else None
