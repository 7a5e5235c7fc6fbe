"""What a pipeline rank uses over a step: what each pass through a layer or the head brings, and takes away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lumos_nb.workloads.llm.rank_memory import Floats, Parts, Ranks, summed, times

Pass = tuple[int, int | None, str, int, int]
"""Micro-batch, layer (None: head and loss), phase, begin and end in ns."""


class PassingRank(Ranks):
    """One pipeline rank of one layout."""

    def changes(self, begin_ns: int, end_ns: int, passes: Sequence[Pass]) -> Iterator[tuple[int, Parts]]:
        """When what is in use on a rank changes, and by how much.

        Nothing changes when the step ends, which is told too.
        """
        yield begin_ns, self.lasting()
        yield begin_ns, self.gathered(0, 0.0, 0.0)
        yield end_ns, {"weights": np.zeros(1)}
        for _, layer, phase, first_ns, last_ns in passes:
            yield from self._of_pass(layer, phase, first_ns, last_ns)
        yield from self._added(passes)
        yield from self._reduced(passes)

    def _of_pass(self, layer: int | None, phase: str, first_ns: int, last_ns: int) -> Iterator[tuple[int, Parts]]:
        """What a pass through a layer, or through the head, keeps and makes."""
        if layer is None:
            gathered = self._more_gathered(1 + self.train.prefetch)
            if phase == "forward":
                yield last_ns, self.kept_logits()
            elif phase == "backward":  # from the loss to the gradient of its logits
                yield first_ns, self.one_loss()
                made = summed([self.head(), gathered])
                yield first_ns + 1, summed([made, times(summed([self.one_loss(), self.kept_logits()]), -1)])
                yield last_ns, times(made, -1)
            return
        of = (np.array([layer]), np.array([layer + 1]))
        waiting = {"activations": self.apart * self.of_layers("put_off", *of)}
        if phase not in ("forward", "backward"):
            yield last_ns, times(waiting, -1)
            return
        kept = summed([self.kept(*of), times(self.embedded(), (of[0] == self.chunk(0)[0]).astype(np.float64))])
        begin, end = self._chunk_of(layer)
        ahead = end - layer if phase == "forward" else 1 if layer == begin else end - begin
        gathered = self._more_gathered(min(1 + self.train.prefetch, ahead))
        made = gathered if phase == "forward" else summed([gathered, self.rise(of[0])])
        stays = kept if phase == "forward" else summed([waiting, times(kept, -1)])
        yield first_ns, made
        yield last_ns, summed([stays, times(made, -1)])

    def _ended(self, passes: Sequence[Pass]) -> dict[tuple[int, int], int]:
        """Micro-batch and first layer of a chunk -> when its backward pass through the chunk has ended."""
        ended: dict[tuple[int, int], int] = {}
        for micro_batch, layer, phase, _, last_ns in passes:
            if phase == "backward":
                key = (micro_batch, self._chunk_of(layer)[0])
                ended[key] = max(last_ns, ended.get(key, 0))
        return ended

    def _added(self, passes: Sequence[Pass]) -> Iterator[tuple[int, Parts]]:
        """Gradients of a micro-batch that are not added at once to those that last, but when their chunk is done."""
        ended, embedding = self._ended(passes), self.trained_ends - self.trained_ends * self.last
        for micro_batch, layer, phase, first_ns, last_ns in passes:
            if phase == "backward":
                made = self.unfused(self._numbers_of(layer))
                yield first_ns + 1 if layer is None else last_ns, made
                yield ended[micro_batch, self._chunk_of(layer)[0]] + 1, times(made, -1)
        for (_, begin), at_ns in ended.items():
            made = self.unfused(embedding * (begin == self.chunk(0)[0]))
            yield at_ns, made
            yield at_ns + 1, times(made, -1)

    def _reduced(self, passes: Sequence[Pass]) -> Iterator[tuple[int, Parts]]:
        """What ZeRO 2 and 3 reduce: of layers a copy until the next is done; head and embedding when their chunk is."""
        lasting, ended = self.gathered(0, 0.0, 0.0), self._ended(passes)
        head = self.trained_ends * self.last
        embedding = self.trained_ends - head

        def more(made: Floats | float, copied: Floats | float) -> Parts:
            return summed([self.gathered(0, made, copied), times(lasting, -1)])

        copy = more(0.0, self.largest(trained=True))
        for micro_batch, layer, phase, first_ns, last_ns in passes:
            if phase != "backward":
                continue
            begin, end = self._chunk_of(layer)
            if layer is None:
                yield first_ns + 1, more(head, 0.0)
                yield ended[micro_batch, begin] + 1, times(more(head, 0.0), -1)
            elif end - begin > 1 and layer in (begin, end - 1):
                yield last_ns, times(copy, -1 if layer == begin else 1)
        for (_, begin), at_ns in ended.items():
            first, last = begin == self.chunk(0)[0], begin == self.chunk(int(self.v[0]) - 1)[0]
            made = more(embedding * first, embedding * first + head * last)
            yield at_ns, made
            yield at_ns + 1, times(made, -1)

    def _more_gathered(self, layers: int) -> Parts:
        """Weights of so many layers, gathered beside those of the ends."""
        return summed([self.gathered(layers, 0.0, 0.0), times(self.gathered(0, 0.0, 0.0), -1)])

    def _chunk_of(self, layer: int | None) -> tuple[int, int]:
        """The layers of the chunk that has one, or has the head."""
        bounds = [(int(begin[0]), int(end[0])) for begin, end in map(self.chunk, range(int(self.v[0])))]
        return bounds[-1] if layer is None else next(one for one in bounds if one[0] <= layer < one[1])

    def _numbers_of(self, layer: int | None) -> Floats:
        """Numbers whose gradients a backward pass makes."""
        if layer is None:
            head: Floats = self.trained_ends * self.last
            return head
        return self.layers_numbers(np.ones(1, np.int64), self.routed(np.array([layer]), np.array([layer + 1])))
