"""A small recurrent network that says what word comes next, trained on a CPU in a minute or two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COUNTS = 64
"""How often a word stood before is told apart up to this."""
HIDDEN, EMBEDDED = 64, 24
CHUNK = 128
"""Words through which a gradient goes back."""
UNKNOWN_ROLE = 0.1
"""Share of the sentences in a batch whose role is not told, so that the net can do without."""


@dataclass(frozen=True, slots=True)
class SequenceNet:
    """A gated recurrent net (Cho et al., 2014) over words; it is told the role and how often each word stood before.

    Words are numbers from 0 to `words` - 1; number `words` ends a sentence. The count lets it end a loop when it has
    gone round often enough, which a memory of 64 numbers alone does not learn from a few steps.

    Attributes
    ----------
    words
        How many words there are.
    weights
        Parameters by name.
    losses_bits
        Mean bits a word of the training sentences, an epoch each.
    """

    words: int
    weights: dict[str, Any]
    losses_bits: tuple[float, ...]

    @property
    def parameters(self) -> int:
        """How many numbers were fitted."""
        return sum(int(weight.numel()) for weight in self.weights.values())

    @classmethod
    def fit(
        cls,
        sentences: Sequence[Ints],
        roles: Sequence[int],
        weights: Sequence[int],
        words: int,
        *,
        seed: int,
        epochs: int,
    ) -> SequenceNet:
        """Fit by maximum likelihood (Adam, one cycle); `weights` say how often each sentence occurred."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = _net(words, max(roles) + 2)
            batch = _batch(sentences, roles, words)
            share = torch.tensor(np.asarray(weights) ** 0.5, dtype=torch.float32)
            chunks = range(0, batch[0].shape[1] - 1, CHUNK)
            steps = epochs * len(chunks)
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
            losses = [_epoch(net, optimizer, schedule, batch, share, chunks) for _ in range(epochs)]
        state = {name: value.detach().clone() for name, value in net.state_dict().items()}
        return cls(words, state, tuple(losses))

    def _loaded(self) -> Any:
        net = _net(self.words, self.weights["role.weight"].shape[0])
        net.load_state_dict(self.weights)
        return net.eval()

    def chances(self, sentence: Ints, role: int) -> Floats:
        """Chances (n + 1,) of every word and the end, role -1: not told; meaningless for a word below 0 (unknown)."""
        import torch

        known = np.where(sentence < 0, self.words, sentence)
        before, counts, after, at = _batch([known], [role], self.words)
        with torch.no_grad():
            logits, _ = _forward(self._loaded(), before, counts, at, None)
        chances: Floats = torch.softmax(logits[0], -1).gather(1, after[0][:, None])[:, 0].numpy().astype(np.float64)
        return chances

    def speaker(self, role: int) -> Speaker:
        """What tells, word by word, how likely each is next."""
        import torch

        net = self._loaded()
        return Speaker(net, np.zeros(self.words + 2, np.int64), torch.tensor([role + 1]), [None, self.words + 1])


@dataclass(frozen=True, slots=True)
class Speaker:
    """A net in the middle of a sentence."""

    net: Any
    counts: Ints
    role: Any
    state: list[Any]  # hidden state, last word

    def chances(self) -> Floats:
        """Chances (words + 1,) of what comes next, the end last."""
        import torch

        last = self.state[1]
        with torch.no_grad():
            word, count = torch.tensor([[last]]), torch.tensor([[min(int(self.counts[last]), COUNTS - 1)]])
            logits, self.state[0] = _forward(self.net, word, count, self.role, self.state[0])
            chances: Floats = torch.softmax(logits[0, 0], -1).numpy().astype(np.float64)
        return chances

    def say(self, word: int) -> None:
        """What came next; to be told after each call of `chances`."""
        self.counts[word] += 1
        self.state[1] = word


def _net(words: int, roles: int) -> Any:
    from torch import nn

    return nn.ModuleDict(
        {
            "word": nn.Embedding(words + 2, EMBEDDED),
            "count": nn.Embedding(COUNTS, EMBEDDED),
            "role": nn.Embedding(roles, EMBEDDED),
            "memory": nn.GRU(EMBEDDED, HIDDEN, batch_first=True),
            "out": nn.Linear(HIDDEN, words + 1),
        }
    )


def _batch(sentences: Sequence[Ints], roles: Sequence[int], words: int) -> tuple[Any, Any, Any, Any]:
    """Word before, how often it stood, word after (-100 behind the end), role; shapes (b, t), (b, t), (b, t), (b,)."""
    import torch

    longest = max(len(s) for s in sentences) + 1
    before = np.full((len(sentences), longest), words + 1)
    counts, after = np.zeros_like(before), np.full_like(before, -100)
    for i, sentence in enumerate(sentences):
        n = len(sentence)
        before[i, 1 : n + 1], after[i, :n], after[i, n] = sentence, sentence, words
        order = np.argsort(sentence, kind="stable")
        first = np.searchsorted(sentence[order], sentence[order])
        counts[i, order + 1] = np.minimum(np.arange(n) - first + 1, COUNTS - 1)
    at = torch.tensor([role + 1 for role in roles])
    return torch.from_numpy(before), torch.from_numpy(counts), torch.from_numpy(after), at


def _forward(net: Any, before: Any, counts: Any, roles: Any, state: Any) -> tuple[Any, Any]:
    given = net["word"](before) + net["count"](counts) + net["role"](roles)[:, None]
    hidden, state = net["memory"](given, state)
    return net["out"](hidden), state


def _epoch(net: Any, optimizer: Any, schedule: Any, batch: tuple[Any, ...], share: Any, chunks: range) -> float:
    import torch

    before, counts, after, roles = batch
    told = torch.where(torch.rand(roles.shape) < UNKNOWN_ROLE, 0, roles)
    state, bits, total = None, 0.0, 0.0
    for at in chunks:
        here = slice(at, at + CHUNK)
        logits, state = _forward(net, before[:, here], counts[:, here], told, state)
        state = state.detach()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), after[:, here], reduction="none")
        weight = share[:, None] * (after[:, here] >= 0)
        optimizer.zero_grad()
        ((loss * weight).sum() / weight.sum().clamp(min=1)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bits += float((loss * weight).sum().detach()) / math.log(2)
        total += float(weight.sum())
    return bits / total
