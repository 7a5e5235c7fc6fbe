"""A small recurrent network that says what word comes next, trained on a CPU in a minute or two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax

from lumos_nb.exchange.chakra.ngrams import times

Floats = NDArray[np.float64]
Tensors = tuple[Any, Any, Any]

COUNTS = 64
"""How often a word stood before is told apart up to this."""
HIDDEN, EMBEDDED = 64, 24
CHUNK = 128
"""Words through which a gradient goes back."""
BATCH = 8
"""Sentences that are read together."""
UNKNOWN_ROLE = 0.1
"""Share of the sentences of an epoch whose role is not told, so that the net can do without."""


@dataclass(frozen=True, slots=True)
class SequenceNet:
    """A gated recurrent net (Cho et al., 2014) over words; it is told the role and how often each word stood before.

    Words are numbers from 0 to `words` - 1; number `words` ends a sentence. The count lets it end a loop when it has
    gone round often enough, which a memory of 64 numbers alone does not learn from a few steps.

    Attributes
    ----------
    weights
        Parameters by name.
    losses_bits
        Mean bits a word of the training sentences, an epoch each.
    """

    weights: Mapping[str, Floats]
    losses_bits: tuple[float, ...]

    @property
    def parameters(self) -> int:
        """How many numbers were fitted."""
        return sum(weight.size for weight in self.weights.values())

    @classmethod
    def fit(
        cls, sentences: Mapping[tuple[int, tuple[int, ...]], int], words: int, *, seed: int, epochs: int
    ) -> SequenceNet:
        """Fit by maximum likelihood (Adam, one cycle) to sentences by role, given with how often each occurred."""
        import torch

        said, roles = [sentence for _, sentence in sentences], [role + 1 for role, _ in sentences]
        share = torch.tensor([*sentences.values()]) ** 0.5
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # its products are too small to share
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = _net(words, max(roles) + 1)
            batch = _batch(said, words)
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
            turns = epochs * len(range(0, len(said), BATCH)) * len(range(0, batch[0].shape[1], CHUNK))
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=turns)
            losses = [_epoch(net, optimizer, schedule, batch, torch.tensor(roles), share) for _ in range(epochs)]
        torch.set_num_threads(threads)
        return cls({name: value.double().numpy() for name, value in net.state_dict().items()}, tuple(losses))

    def begin(self) -> Floats:
        """The hidden state before the first word."""
        return np.zeros(HIDDEN)

    def read(self, state: Floats, role: int, word: int, nth: int) -> tuple[Floats, Floats]:
        """Chances (words + 1,) of what comes behind the `nth` `word` (-1: the start), and the hidden state there.

        Role -1 is not to be told it.
        """
        w = self.weights
        given = w["word.weight"][word] + w["count.weight"][min(nth, COUNTS - 1)] + w["role.weight"][role + 1]
        new = w["memory.weight_ih_l0"] @ given + w["memory.bias_ih_l0"]
        old = w["memory.weight_hh_l0"] @ state + w["memory.bias_hh_l0"]
        reset, update = expit(new[: 2 * HIDDEN] + old[: 2 * HIDDEN]).reshape(2, HIDDEN)
        state = update * state + (1 - update) * np.tanh(new[2 * HIDDEN :] + reset * old[2 * HIDDEN :])
        return softmax(w["out.weight"] @ state + w["out.bias"]), state


def _net(words: int, roles: int) -> Any:
    from torch import nn

    return nn.ModuleDict(
        {
            "word": nn.Embedding(words + 1, EMBEDDED),  # the last is the start
            "count": nn.Embedding(COUNTS, EMBEDDED),
            "role": nn.Embedding(roles, EMBEDDED),
            "memory": nn.GRU(EMBEDDED, HIDDEN, batch_first=True),
            "out": nn.Linear(HIDDEN, words + 1),
        }
    )


def _batch(sentences: Sequence[Sequence[int]], words: int) -> Tensors:
    """Word before, how often it stood, word after (-100 behind the end), each (sentences, longest + 1)."""
    import torch

    longest = max(map(len, sentences)) + 1
    before, nth, after = (np.full((len(sentences), longest), fill) for fill in (words, 0, -100))
    for i, sentence in enumerate(sentences):
        n = len(sentence)
        before[i, 1 : n + 1], after[i, :n], after[i, n] = sentence, sentence, words
        nth[i, 1 : n + 1] = np.minimum(times(sentence), COUNTS - 1)
    return torch.from_numpy(before), torch.from_numpy(nth), torch.from_numpy(after)


def _epoch(net: Any, optimizer: Any, schedule: Any, batch: Tensors, roles: Any, share: Any) -> float:
    import torch

    told = torch.where(torch.rand(roles.shape) < UNKNOWN_ROLE, 0, roles)
    bits, total = 0.0, 0.0
    for some in torch.split(torch.randperm(len(roles)), BATCH):
        state = None
        for before, nth, after in zip(*(part[some].split(CHUNK, dim=1) for part in batch), strict=True):
            given = net["word"](before) + net["count"](nth) + net["role"](told[some])[:, None]
            hidden, state = net["memory"](given, state)
            state = state.detach()
            weight = share[some, None] * (after >= 0)
            logits = net["out"](hidden).transpose(1, 2)
            loss = (torch.nn.functional.cross_entropy(logits, after, reduction="none") * weight).sum()
            optimizer.zero_grad()
            (loss / weight.sum().clamp(min=1)).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bits, total = bits + float(loss.detach()) / math.log(2), total + float(weight.sum())
    return bits / total
