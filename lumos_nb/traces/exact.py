"""Numbers as JSON writes them, to exact integers: time stamps in ns, ids."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any

import msgspec
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


def integers(values: list[Any]) -> pl.Series:
    """Each value as an int64, null where it is none; see `integer`."""
    try:
        return pl.Series(values, dtype=pl.Int64)
    except (TypeError, OverflowError):
        return pl.Series([integer(v) for v in values], dtype=pl.Int64)


def strings(texts: list[bytes]) -> pl.Series:
    """One string a text. Split in one go, which is much faster than decoding one by one."""
    series = pl.Series([b"\n".join(texts).decode()]).str.split("\n").explode()
    if len(series) != len(texts):  # a string with a raw line break, which JSON forbids
        series = pl.Series([text.decode() for text in texts], dtype=pl.String)
    return series


def nanoseconds(texts: list[bytes | msgspec.Raw]) -> pl.Series:
    """Decimal microseconds, as JSON writes them, to int64 ns; null where the text is no number in range.

    Exact to the last digit that a ns can show; further digits round half up.

    Examples
    --------
    >>> nanoseconds([b"1712195495519689.123", b"1.5e6", b""]).to_list()
    [1712195495519689123, 1500000000, None]
    """
    text = pl.col("text")
    parts = text.str.split_exact(".", 1).struct
    whole = parts.field("field_0").cast(pl.Int64, strict=False)
    digits = parts.field("field_1").fill_null("").str.pad_end(4, "0")
    thousandths = digits.str.head(3).cast(pl.Int64, strict=False) + (digits.str.slice(3, 1) >= "5")
    plain = text.str.contains(r"^\d{1,16}(\.\d+)?$") & (whole < LATEST_NS // 1000)
    frame = strings(texts).to_frame("text").select("text", ns=pl.when(plain).then(whole * 1000 + thousandths))
    if not frame["ns"].null_count():
        return frame["ns"]
    return pl.Series([_decimal_ns(t) if ns is None else ns for t, ns in frame.rows()], dtype=pl.Int64)


def _decimal_ns(text: str) -> int | None:
    """One time stamp in an unusual notation: a sign, an exponent, quotes."""
    try:
        ns = Decimal(text.strip('"')) * 1000
        return int(ns.to_integral_value(ROUND_HALF_UP)) if abs(ns) < LATEST_NS else None
    except InvalidOperation:
        return None
