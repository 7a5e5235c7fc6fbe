"""The model of a row of a table: its well-known name, its family, its sizes, and a vocabulary where none is stated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from lumos_nb.transformer import Moe, Transformer, models
from lumos_nb.workloads import table_words as words
from lumos_nb.workloads.table_cells import Reader


def model_of(reader: Reader, tied: bool | None, tp: int) -> Transformer:
    """The model by its name and sizes; a vocabulary is filled up as Megatron does, so that tensor ranks share it."""
    known = _preset(reader.text("model"))
    sizes: dict[str, Any] = {}
    for column in ("hidden", "heads", "layers"):
        like = getattr(known, column) if known else None
        sizes[column] = reader.count(column, like, f", of {known.name}" if known else "")
    same = known if known and known.hidden == sizes["hidden"] else None
    fields = msgspec.structs.asdict(same) if same else _family(reader, sizes)
    fields |= sizes | {"name": reader.text("model")}
    if tied is not None:
        fields["tied"] = tied
    wide = 4 * sizes["hidden"] if not fields["gated"] else -(-8 * sizes["hidden"] // (3 * 256)) * 256
    fields["ffn"] = reader.count("ffn", same.ffn if same else wide)
    fields["kv_heads"] = reader.count("kv_heads", same.keys if same else sizes["heads"])
    if same and same.head_dim == 0 and same.heads != sizes["heads"]:
        fields["head_dim"] = 0
    fields["moe"] = _experts(reader, same, fields["ffn"])
    fields["max_seq"] = max(fields.get("max_seq", 0), reader.count("seq")) if fields["positions"] == "learned" else 0
    if same or reader.has("vocab"):
        vocab = reader.count("vocab", same.vocab if same else None)
    else:
        vocab = _vocabulary(reader, fields)
    padded = -(-vocab // (128 * tp)) * 128 * tp if vocab % (64 * tp) else vocab
    if padded != vocab:
        reader.assume(f"the vocabulary of {vocab} is filled up to {padded}, a multiple of 128 x tp")
    model = Transformer(**fields | {"vocab": padded})
    _check_size(reader, model)
    return model


def _preset(name: str) -> Transformer | None:
    """The well-known model of the longest name that stands in a row's."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9.]", "", text)

    known = {plain(key): model for key, model in models().items()}
    known |= {key: models()[other] for key, other in words.OTHER_NAMES.items()}
    found = [model for key, model in known.items() if re.search(re.escape(key) + r"(?![0-9.])", plain(name))]
    return max(found, key=lambda model: len(model.name), default=None)


def _family(reader: Reader, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """How a model is built: by its name, else by its sizes."""
    name = reader.text("model")
    if family := next((f for f in words.FAMILIES if re.search(f.pattern, name)), None):
        return dict(family.fields)
    square = 4 * sizes["hidden"] == (reader.number("ffn") or 4 * sizes["hidden"])
    shared = (reader.number("kv_heads") or sizes["heads"]) < sizes["heads"]
    gated = shared or not square
    reader.assume(f"no family of models is called {name!r}: built like {'Llama' if gated else 'GPT'}, by its sizes")
    return dict(words.LLAMA if gated else words.GPT)


def _experts(reader: Reader, same: Transformer | None, ffn: int) -> Moe | None:
    known = same.moe if same else None
    count = reader.count("moe_experts", known.experts if known else 0, least=0)
    if not count:
        return None
    topk = reader.count("moe_topk", known.topk if known else None)
    if known:
        return msgspec.structs.replace(known, experts=count, topk=topk, ffn=known.ffn)
    reader.assume("every layer has experts, none is shared by all tokens, and ffn is the width of one")
    return Moe(experts=count, topk=topk, ffn=ffn)


def _vocabulary(reader: Reader, fields: Mapping[str, Any]) -> int:
    """Of the usual sizes the one that fits a stated number of parameters best; else GPT-2's or Llama 2's."""
    usual = 32000 if fields["positions"] == "rope" else 50257
    if size := reader.number("params_b"):
        rest = Transformer(**{**fields, "vocab": 1}).size
        copies = 1 if fields["tied"] else 2
        usual = min(words.VOCABULARIES, key=lambda v: abs(rest + copies * v * fields["hidden"] - size * 1e9))
    reader.assume(f"vocab is not stated: {usual}" + (", which fits params_b best of usual ones" if size else ""))
    return usual


def _check_size(reader: Reader, model: Transformer) -> None:
    """Say where the sizes of a row contradict its number of parameters, which some count without the ends."""
    stated = reader.number("params_b")
    if not stated or abs(model.size / (1e9 * stated) - 1) <= 0.1:
        return
    parts = model.parameters()
    inner = model.size - parts.get("embedding", 0) - parts.get("head", 0)
    alike = abs(inner / (1e9 * stated) - 1) <= 0.1
    without = ", with the embedding and the head, which it seems to leave out" if alike else ""
    reader.assume(f"params_b is {stated:g}, but the sizes make {model.size / 1e9:.4g}{without}")
