"""What a microbenchmark measures: the shapes that the ops of random transformers have, one group of shapes a model.

A shape on its own says nothing about another model. So the grid is a sequence of random models, aligned and not, each
with all its ops: leave one group out, and the model is unseen. The sequence is the same for the same seed and ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """One row of a kernel frame without its time; what an op does not use is None."""

    group: str
    op: str
    dtype: str
    pass_: str
    role: str
    batch: int | None = None
    m: int | None = None
    n: int | None = None
    k: int | None = None
    trans: str | None = None
    rows: int | None = None
    cols: int | None = None
    seq_q: int | None = None
    seq_kv: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    causal: bool | None = None
    out_dtype: str | None = None


class Range(NamedTuple):
    """Within what a device's models are drawn: (least, most), every size log-uniform."""

    hidden: tuple[int, int]
    tokens: tuple[int, int]
    seq: tuple[int, int]
    vocab: tuple[int, int]
    head_dims: tuple[int, ...]


RANGES = {
    "cpu": Range((32, 1024), (16, 4096), (8, 512), (96, 8192), (16, 24, 32, 50, 64, 80, 128)),
    "cuda": Range((512, 8192), (256, 16384), (256, 8192), (8192, 131072), (64, 72, 80, 96, 128, 192, 256)),
}
"""A CPU's hold the bundled runs (hidden 128, 512 tokens), the other's what such a device trains."""


@dataclass(frozen=True, slots=True)
class Model:
    """A random transformer and its batch."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    batch: int
    seq: int
    causal: bool

    @property
    def hidden(self) -> int:
        """Width of an activation."""
        return self.heads * self.head_dim

    @property
    def tokens(self) -> int:
        """Rows of an activation."""
        return self.batch * self.seq

    @property
    def flops(self) -> float:
        """Of its largest matrix product."""
        return 2.0 * self.tokens * self.hidden * max(self.ffn, self.vocab)

    @property
    def elements(self) -> int:
        """Of its largest tensor."""
        scores = self.batch * self.heads * self.seq**2
        return max(self.tokens * max(self.ffn, self.vocab), self.hidden * max(self.ffn, self.vocab), scores)


def models(device: str, most_flops: float, most_elements: float, seed: int = 0) -> Iterator[Model]:
    """Random models without end, none with a product or a tensor beyond what is given."""
    limits, rng = RANGES[device], np.random.default_rng(seed)

    def log_uniform(least: float, most: float) -> int:
        return round(math.exp(rng.uniform(math.log(least), math.log(most))))

    while True:
        head_dim = int(rng.choice(limits.head_dims))
        heads = max(1, round(log_uniform(*limits.hidden) / head_dim))
        shared = [d for d in (2, 4, 8) if heads % d == 0 and rng.random() < 0.25]
        seq, aligned = log_uniform(*limits.seq), rng.random() < 0.5
        width, tokens = heads * head_dim, log_uniform(*limits.tokens)
        ffn = round(width * float(rng.choice([2.0, 8 / 3, 3.5, 4.0])))
        vocab = log_uniform(*limits.vocab)
        if aligned:
            seq, ffn, vocab = (max(16, round(size / 16) * 16) for size in (seq, ffn, vocab))
        model = Model(
            heads, heads // max(shared, default=1), head_dim, ffn, vocab, max(1, tokens // seq), seq, rng.random() < 0.7
        )
        if model.flops <= most_flops and model.elements <= most_elements:
            yield model


Sizes = dict[str, int | str | bool]
_ATTENTION = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "head_dim_v", "causal")


def sizes(model: Model) -> dict[str, list[Sizes]]:
    """What each kind of op is measured on in a model: the columns of a case that describe sizes."""
    h, t, b, s, d = model.hidden, model.tokens, model.batch, model.seq, model.head_dim
    layers = [(h, h), (h, model.ffn), (model.ffn, h), (h, model.vocab)]  # inputs, outputs
    vectors = max(3, d // 2)  # of a sample of a DLRM, where an activation is a batch
    attention: Sizes = dict(zip(_ATTENTION, (b, s, s, model.heads, model.kv_heads, d, d, model.causal), strict=True))
    return {
        "linear": [{"batch": 1, "m": t, "n": o, "k": i, "trans": "NT"} for i, o in layers],
        "dgrad": [{"batch": 1, "m": t, "n": i, "k": o, "trans": "NN"} for i, o in layers],
        "wgrad": [{"batch": 1, "m": o, "n": i, "k": t, "trans": "TN"} for i, o in layers],
        "batched": [
            {"batch": b * model.heads, "m": s, "n": s, "k": model.head_dim, "trans": "NT"},
            {"batch": b * model.heads, "m": s, "n": model.head_dim, "k": s, "trans": "NN"},
        ],
        "attention": [attention],
        "activation": [{"rows": t, "cols": h}],
        "inner": [{"rows": t, "cols": model.ffn}],
        "movement": [{"rows": t, "cols": h // 2 * 2}, {"rows": h, "cols": model.ffn // 2 * 2}],
        "reduced": [{"rows": h, "cols": t}, {"rows": model.ffn, "cols": t}],
        "scores": [{"rows": b * model.heads * s, "cols": s}, {"rows": t, "cols": model.vocab}],
        "logits": [{"rows": t, "cols": model.vocab}],
        "lookup": [{"rows": t, "cols": h, "n": model.vocab}, {"rows": s, "cols": h, "n": s}],
        "vectors": [{"batch": max(1, t * h // vectors // w), "rows": vectors, "cols": w} for w in (d, 2 * d)],
        "parameter": [{"rows": r, "cols": c} for r, c in ((1, 1), (1, h), (h, h), (h, model.ffn))],
    }
