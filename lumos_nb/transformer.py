"""The model that is trained: `Transformer`, well-known ones by name, and their parameters tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints

import msgspec

from lumos_nb.errors import UNDECODABLE, InputError, LayoutError, require_kinds, shown

Split = Literal["out", "in", "none"]
"""How tensor parallelism cuts a matrix: by its outputs (column parallel), by its inputs (row parallel), not at all."""


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the four have in common: whole numbers are positive, and JSON gives them back."""

    def to_json(self) -> str:
        """Give JSON text, which `from_json` takes back."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What `to_json` wrote.

        Raises
        ------
        LayoutError
            A field is missing, unknown or of another type; the message names it.
        """
        require_kinds(text=(text, str | bytes | bytearray | memoryview))
        try:
            return msgspec.json.decode(text[:], type=cls)  # of a kind of text that is its own, as text
        except UNDECODABLE as error:
            raise LayoutError(f"not a {cls.__name__}: {error}") from error

    def refusal(self, field: str, advice: str) -> LayoutError:
        """The error that names a field of this, its value and what to do."""
        return LayoutError(f"{type(self).__name__}: {field} is {shown(getattr(self, field))}; {advice}.")

    def _checked(self, *may_be_zero: str) -> None:
        """Refuse values of another kind, and sizes below 1 (or 0) or above `MOST`; the same in other words is taken."""
        for field, (kind, words) in _kinds(type(self)).items():
            value = getattr(self, field)
            if type(value) is not kind and not (type(value) is str and value in words):  # most are as they should be
                value = self._as(field, kind)
            least = int(field not in may_be_zero and kind is int)
            most = MOST_BYTES if field.endswith("_bytes") else MOST
            sizes = value if kind == tuple[int, ...] else [value] if type(value) in (int, float) else []
            if any(size > most or (type(size) is int and size < least) for size in sizes):
                number = "a number of" if kind is float else f"a whole number from {least} to"
                raise self.refusal(field, f"give {number} {most:,}" + " at most" * (kind is float))

    def _as(self, field: str, kind: Any) -> Any:
        """The value of a field as one of its kind."""
        given = getattr(self, field)
        try:
            value = msgspec.convert(plain(given), kind)
        except Exception:  # of tables msgspec asks for fields, of ints of thousands of digits it would write these
            options = " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else ""
            advice = options or _WORDS.get(kind, "what its documentation says")
            raise self.refusal(field, f"give {advice}") from None
        if value is not given:
            msgspec.structs.force_setattr(self, field, value)
        return value


MOST, MOST_BYTES = 2**31 - 1, 2**50
"""Of a size, and of one in bytes: a product of two sizes is an int64."""

MOST_RANKS, MOST_LAYERS, MOST_PARAMETERS = 2**20, 10**5, 2**53
"""Far beyond what there is. A float64 counts parameters one by one."""


def plain(given: Any) -> Any:
    """Numbers, words and sequences of numpy, polars, pandas and their like as Python's, within sequences too."""
    if isinstance(given, list | tuple):
        return tuple(map(plain, given))
    is_time = getattr(getattr(given, "dtype", None), "kind", "") in ("m", "M")  # which would become numbers
    name = next((name for name in ("tolist", "to_list", "to_pylist") if hasattr(given, name)), None)
    return given if name is None or is_time or isinstance(given, type) else plain(getattr(given, name)())


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    tuple[int, ...]: "whole numbers",
}


@cache
def _kinds(spec: type[Spec]) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """What each field of a spec takes: its kind, and the words if it is one of some."""
    hints = get_type_hints(spec).items()
    return {field: (kind, get_args(kind) if get_origin(kind) is Literal else ()) for field, kind in hints}


class Moe(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts of a layer: `topk` of `experts` for each token, each `ffn` wide, and `shared` of that width for all.

    Layers before `first` are dense, and of the others every `every`-th has experts. `router_bias` is one number an
    expert that steers the routing (DeepSeek-V3).

    Raises
    ------
    LayoutError
        A size is not positive, or `topk` exceeds `experts`; the message names field and value.

    Examples
    --------
    >>> lite = Moe(experts=64, topk=6, ffn=1408, shared=2, first=1)                  # DeepSeek-V2-Lite
    >>> sizes = {"layers": 27, "hidden": 2048, "heads": 16, "ffn": 10944, "vocab": 102400}
    >>> round(Transformer(**sizes, moe=lite, mla=Mla(kv_rank=512)).size / 1e9, 1)    # its authors say 15.7 billion
    15.7
    """

    experts: int
    topk: int
    ffn: int
    shared: int = 0
    first: int = 0
    every: int = 1
    router_bias: bool = False

    def __post_init__(self) -> None:
        self._checked("shared", "first")
        if self.topk > self.experts:
            raise self.refusal("topk", f"there are {self.experts} experts: give at most as many")


class Mla(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2).

    Ranks of the compressed queries (None: not compressed) and of keys and values, and the sizes of a head: `nope`
    without and `rope` with rotation for queries and keys, `v` for values.

    Raises
    ------
    LayoutError
        A size is not positive; the message names field and value.

    Examples
    --------
    >>> Transformer.named("deepseek-v3").mla == Mla(kv_rank=512, q_rank=1536)
    True
    """

    kv_rank: int
    q_rank: int | None = None
    rope: int = 64
    nope: int = 128
    v: int = 128

    def __post_init__(self) -> None:
        self._checked()


class Weight(NamedTuple):
    """One parameter tensor: the `part` of the model, its shape, how many alike, and how tensor parallelism cuts it.

    `split` is "out" (cut along the first dimension: column parallel), "in" (along the second: row parallel) or "none"
    (every rank of the group has all of it); those of part "experts" are spread over the expert group as well.
    """

    part: str
    name: str
    shape: tuple[int, ...]
    split: Split = "none"
    copies: int = 1

    @property
    def size(self) -> int:
        """Numbers in it."""
        return self.copies * math.prod(self.shape)

    def adapters(self, rank: int) -> tuple[Weight, ...]:
        """The two narrow matrices that LoRA (Hu et al., 2021) trains beside a product of attention; none of others."""
        if self.part != "attention" or self.name not in ADAPTED:
            return ()
        (out, into), by_row = self.shape, self.split == "in"
        return (
            Weight(self.part, f"{ADAPTER} a of {self.name}", (rank, into), "in" if by_row else "none"),
            Weight(self.part, f"{ADAPTER} b of {self.name}", (out, rank), "none" if by_row else self.split),
        )

    @property
    def is_adapter(self) -> bool:
        """Whether it is one of these."""
        return self.name.startswith(ADAPTER)


ADAPTED = ("qkv", "q", "kv", "projection")
ADAPTER = "lora"


class Transformer(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only language model.

    `head_dim` is hidden / heads where it is not given; heads x head_dim may differ from `hidden`. `kv_heads` below
    `heads` shares keys and values (GQA). `gated` is SwiGLU: three matrices of width `ffn`, not two. `max_seq` counts
    learned positions. `bias` adds one to every linear layer but router and head.

    Raises
    ------
    LayoutError
        A size is not positive, or two contradict each other; the message names field and value.

    Examples
    --------
    >>> llama = Transformer.named("llama-3-8b")
    >>> llama.size
    8030261248
    >>> sorted(llama.parameters())
    ['attention', 'embedding', 'head', 'mlp', 'norm']
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    name: str = ""
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = True
    norm: Literal["layer", "rms"] = "rms"
    bias: bool = False
    positions: Literal["learned", "rope", "none"] = "rope"
    max_seq: int = 0
    tied: bool = False
    moe: Moe | None = None
    mla: Mla | None = None

    def __post_init__(self) -> None:
        self._checked("kv_heads", "head_dim", "max_seq")
        if not self.head_dim and not self.mla and self.hidden % self.heads:
            raise self.refusal("heads", f"hidden ({self.hidden}) is no multiple of it: give head_dim too")
        if self.heads % self.keys:
            raise self.refusal("kv_heads", f"give a divisor of heads ({self.heads})")
        if (self.positions == "learned") != (self.max_seq > 0):
            raise self.refusal("max_seq", "give it with positions='learned', and only then")
        if self.layers > MOST_LAYERS:
            raise self.refusal("layers", f"give {MOST_LAYERS:,} at most")
        largest = max(sum(weight.size for weight in self.weights(layer)) for layer in {0, self.layers - 1})
        ends = sum(weight.size for weight in (*self.first_weights(), *self.last_weights()))
        if (count := largest * self.layers + ends) > MOST_PARAMETERS:
            raise self.refusal("hidden", f"that makes {count:.3g} parameters: give {MOST_PARAMETERS:.3g} at most")

    @classmethod
    def named(cls, name: str) -> Transformer:
        """A well-known model, by its name in any case; `models` has them all.

        Raises
        ------
        InputError
            None is called so; the message lists the names.
        """
        require_kinds(name=(name, str))
        if model := models().get(name.lower()):
            return model
        raise InputError(
            f"no model is called {shown(name)}; there are: {', '.join(models())}. Make your own: Transformer."
        )

    @property
    def keys(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head(self) -> int:
        """Width of a head of queries and keys."""
        return self.mla.nope + self.mla.rope if self.mla else self.head_dim or self.hidden // self.heads

    @property
    def head_v(self) -> int:
        """Width of a head of values."""
        return self.mla.v if self.mla else self.head

    def has_experts(self, layer: int) -> bool:
        """Whether a layer (0-based) has experts instead of a dense MLP."""
        moe = self.moe
        return moe is not None and layer >= moe.first and (layer - moe.first) % moe.every == 0

    def weights(self, layer: int) -> tuple[Weight, ...]:
        """The parameter tensors of one layer (0-based)."""
        norms = (*self._norm("norm", "before attention"), *self._norm("norm", "before mlp"))
        mlp = self._experts(self.moe) if self.moe and self.has_experts(layer) else self._mlp("mlp", self.ffn)
        return (*self._attention(), *mlp, *norms)

    def first_weights(self) -> tuple[Weight, ...]:
        """The parameter tensors before the first layer."""
        learned = (Weight("embedding", "positions", (self.max_seq, self.hidden)),) if self.max_seq else ()
        return (Weight("embedding", "tokens", (self.vocab, self.hidden), "out"), *learned)

    def last_weights(self) -> tuple[Weight, ...]:
        """The parameter tensors after the last layer; a tied head counts as the embedding's, so it is not here."""
        head = () if self.tied else (Weight("head", "head", (self.vocab, self.hidden), "out"),)
        return (*self._norm("norm", "last"), *head)

    def parameters(self) -> dict[str, int]:
        """Number of parameters by part: embedding, attention, mlp, experts, shared, router, norm, head."""
        parts: dict[str, int] = {}
        layers = (w for layer in range(self.layers) for w in self.weights(layer))
        for weight in (*self.first_weights(), *layers, *self.last_weights()):
            parts[weight.part] = parts.get(weight.part, 0) + weight.size
        return parts

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(self.parameters().values())

    def _norm(self, part: str, name: str, width: int = 0) -> Iterator[Weight]:
        yield Weight(part, name, (width or self.hidden,))
        if self.norm == "layer":
            yield Weight(part, f"{name} bias", (width or self.hidden,))

    def _linear(self, part: str, name: str, out: int, into: int, split: Split, copies: int = 1) -> Iterator[Weight]:
        yield Weight(part, name, (out, into), split, copies)
        if self.bias:
            yield Weight(part, f"{name} bias", (out,), "out" if split == "out" else "none", copies)

    def _attention(self) -> Iterator[Weight]:
        part, inner = "attention", self.heads * self.head_v
        if mla := self.mla:
            if mla.q_rank:
                yield from self._linear(part, "q down", mla.q_rank, self.hidden, "none")
                yield from self._norm(part, "q norm", mla.q_rank)
            yield from self._linear(part, "q", self.heads * self.head, mla.q_rank or self.hidden, "out")
            yield from self._linear(part, "kv down", mla.kv_rank + mla.rope, self.hidden, "none")
            yield from self._norm(part, "kv norm", mla.kv_rank)
            yield from self._linear(part, "kv", self.heads * (mla.nope + mla.v), mla.kv_rank, "out")
        else:
            yield from self._linear(part, "qkv", (self.heads + 2 * self.keys) * self.head, self.hidden, "out")
        yield from self._linear(part, "projection", self.hidden, inner, "in")

    def _mlp(self, part: str, width: int, copies: int = 1) -> Iterator[Weight]:
        yield from self._linear(part, "up", (1 + self.gated) * width, self.hidden, "out", copies)
        yield from self._linear(part, "down", self.hidden, width, "in", copies)

    def _experts(self, moe: Moe) -> Iterator[Weight]:
        yield Weight("router", "router", (moe.experts, self.hidden))
        if moe.router_bias:
            yield Weight("router", "router bias", (moe.experts,))
        yield from self._mlp("experts", moe.ffn, moe.experts)
        if moe.shared:
            yield from self._mlp("shared", moe.shared * moe.ffn)


@cache
def models() -> dict[str, Transformer]:
    """The well-known models by name."""
    found = (*_gpts(), *_lumos(), *_llamas(), *_nemotrons(), *_mixtures())
    return {model.name: model for model in found}


def _gpt(
    name: str, layers: int, hidden: int, heads: int, *, ffn: int = 0, head_dim: int = 0, vocab: int = 50257,
    max_seq: int = 2048,
) -> Transformer:  # fmt: skip
    """A GPT: GELU of four times the hidden size, biases, learned positions, tied vocabulary, if not said otherwise."""
    return Transformer(
        name=name, layers=layers, hidden=hidden, heads=heads, head_dim=head_dim, ffn=ffn or 4 * hidden, vocab=vocab,
        max_seq=max_seq, gated=False, norm="layer", bias=True, positions="learned", tied=True,
    )  # fmt: skip


def _gpts() -> Iterator[Transformer]:
    """GPT-2 (released weights) and GPT-3 (Brown et al. 2020, table 2.1; its XL and 13B with heads x 128 = hidden)."""
    for size, layers, hidden, heads in (
        ("small", 12, 768, 12), ("medium", 24, 1024, 16), ("large", 36, 1280, 20), ("xl", 48, 1600, 25),
    ):  # fmt: skip
        yield _gpt(f"gpt2-{size}", layers, hidden, heads, max_seq=1024)
    for size, layers, hidden, heads in (
        ("125m", 12, 768, 12), ("350m", 24, 1024, 16), ("760m", 24, 1536, 16), ("1.3b", 24, 2048, 16),
        ("2.7b", 32, 2560, 32), ("6.7b", 32, 4096, 32), ("13b", 40, 5120, 40), ("175b", 96, 12288, 96),
    ):  # fmt: skip
        yield _gpt(f"gpt3-{size}", layers, hidden, heads)


def _lumos() -> Iterator[Transformer]:
    """Lumos' models (arXiv 2504.09307, tables 1 and 2).

    The parameter counts that it states need an attention 6144 wide in 44B, V3 and V4; the vocabulary is that of the
    GPT-3 of MLPerf, which it trains.
    """
    for size, layers, hidden, heads, ffn in (
        ("15b", 48, 6144, 48, 12288), ("44b", 48, 12288, 48, 24576), ("117b", 96, 12288, 96, 24576),
        ("175b", 96, 12288, 96, 49152), ("v1", 64, 6144, 48, 12288), ("v2", 96, 6144, 48, 12288),
        ("v3", 48, 9216, 48, 18432), ("v4", 48, 12288, 48, 24576),
    ):  # fmt: skip
        yield _gpt(f"lumos-{size}", layers, hidden, heads, ffn=ffn, head_dim=128, vocab=51200)


def _llamas() -> Iterator[Transformer]:
    """Llama 2 and 3 (released configurations)."""
    for name, layers, hidden, heads, kv_heads, ffn, vocab in (
        ("llama-2-7b", 32, 4096, 32, 32, 11008, 32000), ("llama-2-13b", 40, 5120, 40, 40, 13824, 32000),
        ("llama-2-70b", 80, 8192, 64, 8, 28672, 32000), ("llama-3-8b", 32, 4096, 32, 8, 14336, 128256),
        ("llama-3-70b", 80, 8192, 64, 8, 28672, 128256), ("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256),
    ):  # fmt: skip
        yield Transformer(name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab)
    yield Transformer(
        name="llama-3.2-1b", layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, tied=True
    )


def _nemotrons() -> Iterator[Transformer]:
    """Nemotron-4 (released configurations): squared ReLU, no biases."""
    for size, layers, hidden, heads, ffn in (("15b", 32, 6144, 48, 24576), ("340b", 96, 18432, 96, 73728)):
        yield Transformer(
            name=f"nemotron-4-{size}", layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocab=256000,
            gated=False, norm="layer",
        )  # fmt: skip


def _mixtures() -> Iterator[Transformer]:
    """Mixtral and DeepSeek (released configurations; V3 without its multi-token prediction)."""
    for name, layers, hidden, heads, ffn, vocab in (
        ("mixtral-8x7b", 32, 4096, 32, 14336, 32000), ("mixtral-8x22b", 56, 6144, 48, 16384, 32768),
    ):  # fmt: skip
        yield Transformer(
            name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocab=vocab,
            moe=Moe(experts=8, topk=2, ffn=ffn),
        )  # fmt: skip
    for name, layers, hidden, heads, ffn, vocab, q_rank, moe in (
        ("deepseek-v2-lite", 27, 2048, 16, 10944, 102400, None, Moe(experts=64, topk=6, ffn=1408, shared=2, first=1)),
        ("deepseek-v2", 60, 5120, 128, 12288, 102400, 1536, Moe(experts=160, topk=6, ffn=1536, shared=2, first=1)),
        (
            "deepseek-v3", 61, 7168, 128, 18432, 129280, 1536,
            Moe(experts=256, topk=8, ffn=2048, shared=1, first=3, router_bias=True),
        ),
    ):  # fmt: skip
        yield Transformer(
            name=name, layers=layers, hidden=hidden, heads=heads, ffn=ffn, vocab=vocab, moe=moe,
            mla=Mla(q_rank=q_rank, kv_rank=512),
        )  # fmt: skip
