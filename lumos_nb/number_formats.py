"""Number formats: how large an element is, and how torch, C++, NCCL, traces and papers spell them."""

from __future__ import annotations

import re
from collections.abc import Mapping

ELEMENT_BYTES: Mapping[str, float] = {
    **dict.fromkeys(("fp64", "int64"), 8.0),
    **dict.fromkeys(("fp32", "tf32", "int32"), 4.0),
    **dict.fromkeys(("fp16", "bf16", "fp16/bf16", "int16"), 2.0),
    **dict.fromkeys(("fp8", "int8", "uint8", "bool"), 1.0),
    "fp4": 0.5,
}
"""Bytes of one element by number format."""

FORMAT_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("float", "float32", "single", "f32"), "fp32"),
    **dict.fromkeys(("double", "float64", "f64"), "fp64"),
    **dict.fromkeys(("half", "float16", "f16"), "fp16"),
    "bfloat16": "bf16",
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "e4m3", "e5m2"), "fp8"),
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "float8"), "fp8"),
    **dict.fromkeys(("float4_e2m1fn_x2", "nvfp4", "mxfp4"), "fp4"),
    **dict.fromkeys(("long", "long int"), "int64"),
    "int": "int32",
    **dict.fromkeys(("short", "short int"), "int16"),
    **dict.fromkeys(("char", "signed char"), "int8"),
    **dict.fromkeys(("byte", "unsigned char"), "uint8"),
}
"""Other spellings, in lower case."""

_PREFIX = re.compile(r"^(?:torch\.|c10::|aten::)")


def bare(word: str) -> str:
    """A word in lower case, without blanks round it and without torch's prefix."""
    return _PREFIX.sub("", word.strip().lower())


def number_format(word: str) -> str | None:
    """The number format that a word means, else None.

    Examples
    --------
    >>> number_format("c10::BFloat16")
    'bf16'
    """
    short = bare(word)
    return short if short in ELEMENT_BYTES else FORMAT_NAMES.get(short)
