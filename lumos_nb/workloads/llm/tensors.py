"""What a layer keeps of one micro-batch: its ops with their tensors, and what is alive while autograd runs.

Autograd keeps what an op saves until the op's backward has run, a tensor that two ops save once. From this follow what
a layer keeps after its forward pass (`kept`) and how far its backward pass rises above that (`rise`): gradients of what
lies in between, the sequence gathered anew, what is computed again.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from lumos_nb.layout import SIZE_OF, Parallelism, Training, Transformer
from lumos_nb.transformer import ADAPTED, Weight


class Op(NamedTuple):
    """One op of a layer: tensors that it reads (and gives gradients of), the one it makes, those it saves.

    `repeats` are saved ones that selective recomputation makes again, `whole_bytes` what is alive beside, in the
    backward, because the sequence is gathered from the tensor parallel ranks, `also` a second tensor that it makes.
    """

    name: str
    reads: tuple[str, ...]
    makes: str
    saves: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()
    whole_bytes: float = 0.0
    also: str = ""


class LayerTensors(NamedTuple):
    """Ops of a layer, in order, and the bytes that each tensor takes on a rank."""

    ops: tuple[Op, ...]
    size_bytes: Mapping[str, float]

    def kept(self, recompute: str = "none") -> dict[str, float]:
        """Bytes by tensor that the layer keeps for its backward pass."""
        if recompute == "full":
            return {"x": self.size_bytes["x"]}
        again = {name for op in self.ops for name in op.repeats} if recompute == "selective" else set()
        return {name: self.size_bytes[name] for op in self.ops for name in op.saves if name not in again}

    def rise(self, recompute: str = "none") -> float:
        """Most bytes alive in the backward pass above what the layer kept (the gradient of its output included)."""
        return self.climbs(recompute)[0]

    def climbs(self, recompute: str = "none", marks: Container[str] = ()) -> list[float]:
        """The same until the first of the marked ops goes back, and from each of these until the next."""
        kept = self.kept("none" if recompute == "full" else recompute)
        again = {name: self.size_bytes[name] for op in self.ops for name in op.repeats if name not in kept}
        needed = {name: op for op in reversed(self.ops) for name in op.saves}  # the op whose backward needs it last
        gradients = {self.ops[-1].makes: self.size_bytes[self.ops[-1].makes]}
        start, most = sum(self.kept(recompute).values()), [0.0]
        for op in reversed(self.ops):
            made = {name: 0.0 if op.name.startswith("add") else self.size_bytes[name] for name in op.reads}
            if op.repeats:  # what they all saved is made again before the last of them goes back
                kept, again = kept | again, {}
            if op.name in marks:
                most.append(0.0)
            most[-1] = max(most[-1], sum(sum(some.values()) for some in (kept, gradients, made)) + op.whole_bytes)
            passed = gradients.pop(op.makes)
            gradients.pop(op.also, None)
            if op.name.startswith("add"):  # both inputs have the gradient of the sum: one tensor
                made[op.reads[0]] = passed
            gradients = {**made, **gradients}
            kept = {name: size for name, size in kept.items() if needed[name] is not op}
        return [size - start for size in most]

    def put_off(self) -> float:
        """Bytes that weight gradients need which are put off (zero-bubble schedules): inputs and output gradients."""
        linear = [op for op in self.ops if op.name.endswith("linear") and op.saves]
        return sum({name: self.size_bytes[name] for op in linear for name in (*op.reads, op.makes)}.values())


def op_of(weight: Weight) -> str:
    """The op of a layer that makes the gradient of a weight or of its bias; norms have none that counts."""
    name = weight.name.split(" of ")[-1].removesuffix(" bias").replace(" down", " narrow")
    of = {"experts": "expert ", "shared": "shared "}.get(weight.part, "")
    return f"{of}{name} linear"


class _Widths(NamedTuple):
    """Bytes a number, and tokens on a rank: of the `whole` sequence, of the `part` outside tensor parallel layers."""

    number: int
    whole: float
    part: float
    regather: bool

    @property
    def spread(self) -> bool:
        return self.part < self.whole


def layer_tensors(model: Transformer, layout: Parallelism, train: Training, *, experts: bool = False) -> LayerTensors:
    """The ops of a layer with a dense MLP, or with `experts`, for one micro-batch on one rank.

    The terms are those of Korthikanti et al. 2022 (arXiv 2205.05198, section 4), for any width, gate, kind of attention
    and layout; numbers are counted in the format of `train` (fp8: bf16, in which products hand their results on).

    Examples
    --------
    >>> model = Transformer.named("gpt3-175b")
    >>> train = Training(micro_batch=1, global_batch=64, seq=2048, flash=False, dropout=True)
    >>> kept = layer_tensors(model, Parallelism(tp=8, sequence_parallel=True), train).kept("selective")
    >>> sum(size for name, size in kept.items() if "statistics" not in name) == 34 * 2048 * 12288 / 8
    True
    """
    tokens = train.micro_batch * train.seq / layout.cp
    part = tokens / layout.tp if layout.sequence_parallel else tokens
    at = _Widths(SIZE_OF[train.kept_dtype], tokens, part, train.regather)
    sizes = dict.fromkeys(("x", "between", "y"), model.hidden * at.part * at.number)
    ops = list(_latent(model, layout, at, sizes) if model.mla else _heads(model, layout, at, sizes))
    ops += _core(model, layout, train, at, sizes)
    ops += _joined("attention", "projection", "x", "between", model, train, at, sizes)
    ops += _norm("mlp", "between", model, at, sizes)
    if experts:
        ops += _experts(model, layout, train, at, sizes)
    else:
        ops += _mlp("", model, layout.tp, model.ffn, at, at.whole, sizes)
    ops += _joined("mlp", "routed" if experts else "down", "between", "y", model, train, at, sizes)
    if train.lora:  # only the gradient of an adapter needs the input of a product
        adapted = [f"{name} linear" for name in ADAPTED]
        ops = [op._replace(saves=()) if op.name.endswith("linear") and op.name not in adapted else op for op in ops]
    return LayerTensors(tuple(ops), sizes)


def _norm(of: str, reads: str, model: Transformer, at: _Widths, sizes: dict[str, float]) -> Iterator[Op]:
    sizes[f"{of} normed"] = model.hidden * at.part * at.number
    sizes[f"{of} norm statistics"] = (4 if model.norm == "rms" else 8) * at.part
    yield Op(f"{of} norm", (reads,), f"{of} normed", (reads, f"{of} norm statistics"))


def _joined(
    of: str, reads: str, beside: str, makes: str, model: Transformer, train: Training, at: _Widths,
    sizes: dict[str, float],
) -> Iterator[Op]:  # fmt: skip
    """What follows a block: dropout, and the residual."""
    if train.dropout:
        sizes[f"{of} mask"] = model.hidden * at.part
        sizes[f"{of} dropped"] = model.hidden * at.part * at.number
        yield Op(f"{of} dropout", (reads,), f"{of} dropped", (f"{of} mask",))
    yield Op(f"add {of}", (beside, f"{of} dropped" if train.dropout else reads), makes)


def _heads(model: Transformer, layout: Parallelism, at: _Widths, sizes: dict[str, float]) -> Iterator[Op]:
    keys = max(model.keys / layout.tp, 1)
    sizes["qkv"] = (model.heads / layout.tp + 2 * keys) * model.head * at.whole * at.number
    yield from _norm("attention", "x", model, at, sizes)
    made = "qkv" if model.positions != "rope" else "unturned"
    yield from _spread("qkv linear", "attention normed", made, model, at, sizes)
    if model.positions == "rope":
        sizes["unturned"] = sizes["qkv"]
        yield Op("rotation", ("unturned",), "qkv")


def _spread(
    name: str, reads: str, makes: str, model: Transformer, at: _Widths, sizes: dict[str, float]
) -> Iterator[Op]:
    """A linear layer whose outputs are spread over ranks; its input is gathered again or kept, its gradient whole."""
    whole = model.hidden * at.whole * at.number if at.spread else 0.0
    if at.spread and not at.regather:
        sizes[f"{reads} whole"] = whole
        yield Op("gather", (reads,), f"{reads} whole")
        yield Op(name, (f"{reads} whole",), makes, (f"{reads} whole",))
    else:
        yield Op(name, (reads,), makes, (reads,), (), 2 * whole)


def _latent(model: Transformer, layout: Parallelism, at: _Widths, sizes: dict[str, float]) -> Iterator[Op]:
    """MLA: queries, and keys with values, through a narrow layer, a norm and a wide one."""
    assert model.mla is not None
    heads, mla = model.heads / layout.tp, model.mla
    yield from _norm("attention", "x", model, at, sizes)
    wide = {"q": heads * model.head, "kv": heads * (model.head + mla.v)}
    sizes["qkv"] = sum(wide.values()) * at.whole * at.number
    for name, rank, more in (("q", mla.q_rank, 0), ("kv", mla.kv_rank, mla.rope)):
        sizes[name] = wide[name] * at.whole * at.number
        if not rank:
            yield from _spread(f"{name} linear", "attention normed", name, model, at, sizes)
            continue
        sizes |= {f"{name} narrow": (rank + more) * at.part * at.number, f"{name} normed": rank * at.part * at.number}
        sizes[f"{name} norm statistics"] = 4 * at.part
        yield Op(f"{name} narrow linear", ("attention normed",), f"{name} narrow", ("attention normed",))
        saved = (f"{name} narrow", f"{name} norm statistics")
        yield Op(f"{name} norm", (f"{name} narrow",), f"{name} normed", saved)
        yield Op(f"{name} linear", (f"{name} normed",), name, (f"{name} normed",))
    yield Op("rotation", ("q", "kv"), "qkv")


def _core(
    model: Transformer, layout: Parallelism, train: Training, at: _Widths, sizes: dict[str, float]
) -> Iterator[Op]:
    heads = model.heads / layout.tp
    sizes["mixed"] = heads * model.head_v * at.whole * at.number
    sizes["projection"] = model.hidden * at.part * at.number
    if train.flash:
        sizes["softmax statistics"] = 4 * heads * at.whole
        yield Op("attention", ("qkv",), "mixed", ("qkv", "mixed", "softmax statistics"), ("softmax statistics",))
    else:
        pairs = heads * at.whole * train.seq
        sizes |= {"scores": pairs * at.number, "shares": pairs * at.number, "shares mask": pairs}
        sizes["shares dropped"] = pairs * at.number
        used = "shares dropped" if train.dropout else "shares"
        yield Op("scores", ("qkv",), "scores", ("qkv",))
        yield Op("softmax", ("scores",), "shares", ("shares",), ("shares",))
        if train.dropout:
            yield Op("shares dropout", ("shares",), used, ("shares mask",), ("shares mask",))
        yield Op("mix", (used, "qkv"), "mixed", (used, "qkv"), (used,))
    gathered = model.hidden * at.whole * at.number if at.spread else 0.0
    yield Op("projection linear", ("mixed",), "projection", ("mixed",), (), gathered)


def _mlp(
    of: str, model: Transformer, cut: int, width: float, at: _Widths, tokens: float, sizes: dict[str, float],
    reads: str = "mlp normed",
) -> Iterator[Op]:  # fmt: skip
    """Up, activation, down: `width` wide, cut into `cut`, for a number of `tokens`."""
    size = width / cut * tokens * at.number
    sizes |= {f"{of}up": (1 + model.gated) * size, f"{of}gate": size, f"{of}inner": size}
    sizes[f"{of}down"] = sizes[reads]
    yield from _spread(f"{of}up linear", reads, f"{of}up", model, at, sizes)
    if model.gated:
        sizes |= {f"{of}first half": size, f"{of}second half": size}
        yield Op(f"{of}halves", (f"{of}up",), f"{of}first half", also=f"{of}second half")
        yield Op(f"{of}gate", (f"{of}first half",), f"{of}gate", (f"{of}up",))
        yield Op(f"{of}gated", (f"{of}gate", f"{of}second half"), f"{of}inner", (f"{of}gate", f"{of}up"))
    else:
        yield Op(f"{of}activation", (f"{of}up",), f"{of}inner", (f"{of}up",))
    gathered = model.hidden * at.whole * at.number if at.spread else 0.0
    yield Op(f"{of}down linear", (f"{of}inner",), f"{of}down", (f"{of}inner",), (), gathered)


def _experts(
    model: Transformer, layout: Parallelism, train: Training, at: _Widths, sizes: dict[str, float]
) -> Iterator[Op]:
    """Router, experts with the tokens sent to them, and what all tokens share."""
    assert model.moe is not None
    moe, cut = model.moe, layout.expert_tp
    busiest = train.capacity or train.imbalance  # buffers of a capacity are filled up to it on every rank
    tokens = (at.part * cut if at.spread else at.whole) * moe.topk * busiest
    sent = model.hidden * tokens * at.number
    sizes |= {"slots": sent, "shares of experts": 4 * moe.experts * at.part, "routed": sizes["mlp normed"]}
    yield Op("router linear", ("mlp normed",), "shares of experts", ("mlp normed", "shares of experts"))
    yield Op("dispatch", ("mlp normed",), "slots")
    yield from _mlp("expert ", model, cut, moe.ffn, at, tokens, sizes, reads="slots")
    reads = ["expert down", "shares of experts"]
    if moe.shared:
        yield from _mlp("shared ", model, layout.tp, moe.shared * moe.ffn, at, at.whole, sizes)
        reads.append("shared down")
    yield Op("combine", tuple(reads), "routed", tuple(reads[:2]))
