"""Numbers as JSON writes them, to exact integers: time stamps in ns, ids."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal, DecimalException
from typing import Any

import polars as pl

LATEST_NS = 2**62
"""The year 2116: times beyond it, either way, are taken for errors. Sums of two times stay in an int64."""


def integer(value: Any) -> int | None:
    """`value` as an int64 if it is one, in whatever notation: 7, "24572", "stream 7", "0x0"; else None."""
    if isinstance(value, str):
        text = value.removeprefix("stream ").strip()
        try:
            value = int(text, 16) if text.startswith("0x") else int(text)
        except ValueError:
            return None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    if value is None or isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**63 else None


def strings(texts: list[bytes]) -> pl.Series:
    """One string a text. Split in one go, which is much faster than decoding one by one."""
    series = pl.Series([b"\n".join(texts).decode()]).str.split("\n").explode()
    if len(series) != len(texts):  # a string with a raw line break, which JSON forbids
        series = pl.Series([text.decode() for text in texts], dtype=pl.String)
    return series


def nanoseconds(text: bytes) -> int | None:
    """Decimal microseconds, as JSON writes them, to whole ns; None where the text is no number in range.

    Exact to the last digit that a ns can show; further digits round half up.

    Examples
    --------
    >>> nanoseconds(b"1712195495519689.123"), nanoseconds(b'"1.5e6"'), nanoseconds(b"null")
    (1712195495519689123, 1500000000, None)
    """
    try:
        ns = Decimal(bytes(text).decode().strip('"')) * 1000
        return int(ns.to_integral_value(ROUND_HALF_UP)) if abs(ns) < LATEST_NS else None
    except DecimalException:
        return None
