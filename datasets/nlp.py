"""Small transformers for language, and their training steps: like BERT, GPT-2 and XLNet, four layers of 128 each.

Plain torch, nothing of lumos_nb. `benchmarks/nlp_steps.py` measures these steps and predicts them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, HIDDEN, HEADS, VOCAB, SEQ = 4, 128, 4, 2000, 64
Step = Callable[[], None]


class Relative(nn.Module):
    """Attention of contents and of relative positions, as in Transformer-XL and XLNet: two products make its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.r, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(5))
        self.by_content, self.by_position = (nn.Parameter(torch.zeros(HEADS, 1, HIDDEN // HEADS)) for _ in range(2))
        self.register_buffer("positions", torch.randn(2 * SEQ, HIDDEN))

    def heads(self, x: Tensor) -> Tensor:
        """The heads of a token apart."""
        return x.unflatten(-1, (HEADS, -1)).transpose(-2, -3)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq = x.shape[:2]
        q, k, v = (self.heads(f(x)) for f in (self.q, self.k, self.v))
        far = self.heads(self.r(self.positions)).expand(batch, -1, -1, -1)
        contents = torch.matmul(q + self.by_content, k.transpose(2, 3))
        places = torch.matmul(q + self.by_position, far.transpose(2, 3))
        shifted = places.reshape(batch, HEADS, 2 * seq, seq)[:, :, 1:].reshape(batch, HEADS, seq, 2 * seq - 1)[
            ..., :seq
        ]
        weights = torch.softmax((contents + shifted) * (HIDDEN // HEADS) ** -0.5, -1)
        return self.o(torch.matmul(weights, v).transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Attention by one kernel."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.o, self.causal = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and an MLP, each added to its input; norms before (GPT-2) or behind them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention = Relative() if kind == "xlnet" else Fused(causal=kind == "gpt2")
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.before = kind == "gpt2"

    def forward(self, x: Tensor) -> Tensor:
        for part, norm in zip((self.attention, self.mlp), self.norms, strict=True):
            x = x + part(norm(x)) if self.before else norm(x + part(x))
        return x


class Model(nn.Module):
    """Tokens to logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.layers = nn.Sequential(*(Layer(kind) for _ in range(LAYERS)))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.tokens(tokens) + self.positions(places)))


def training(kind: str, batch: int) -> Step:
    """A step of "bert", "gpt2" or "xlnet"."""
    torch.manual_seed(0)
    model = Model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCAB, (batch, SEQ))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step
