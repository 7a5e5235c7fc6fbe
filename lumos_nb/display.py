"""Text and HTML tables for the package's objects: escaped, with units that a person reads."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from lumos_nb.errors import harmless

if TYPE_CHECKING:
    import polars as pl

_TIME = ((1, "ns"), (1e3, "µs"), (1e6, "ms"), (1e9, "s"))
_SIZE = ((1, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))


def format_ns(time_ns: float) -> str:
    """A time in ns to three significant digits in its natural unit: `1_234_567` is `"1.23 ms"`."""
    return _scaled(time_ns, _TIME)


def format_bytes(size_bytes: float) -> str:
    """A size in bytes to three significant digits, decimal prefixes: `2_500_000` is `"2.50 MB"`."""
    return _scaled(size_bytes, _SIZE)


def how_many(count: int, what: str) -> str:
    """A number of things: `(1, "rank")` is `"1 rank"`, `(1000, "op")` is `"1,000 ops"`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def format_share(share: float) -> str:
    """A fraction as a percentage with one decimal: `0.1234` is `"12.3 %"`."""
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # plus zero: what rounds to nothing has no sign


def text_table(frame: pl.DataFrame, *, caption: str = "", max_rows: int = 20) -> str:
    """Draw a frame as aligned text, numbers to the right.

    Columns whose name ends in `_ns`, `bytes` or `share` are shown in natural units, without that ending in the heading;
    readings of a clock (`start_ns` and the like) as ms after the earliest in the table, with a plus.
    Rows after the first `max_rows` are counted, not shown.
    """
    heads, rows, numeric, more = _cells(frame, max_rows)
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=True))
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([*([caption] if caption else []), line(heads), rule, *map(line, rows), *([more] if more else [])])


def html_table(frame: pl.DataFrame, *, caption: str = "", max_rows: int = 20) -> str:
    """Draw a frame as an HTML table, everything in it escaped; otherwise as `text_table`."""
    heads, rows, numeric, more = _cells(frame, max_rows)
    align = [' style="text-align: right"' if n else ' style="text-align: left"' for n in numeric]

    def line(row: Sequence[str], tag: str) -> str:
        cells = (f"<{tag}{a}>{html.escape(c)}</{tag}>" for c, a in zip(row, align, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    foot = f'<tfoot><tr><td colspan="{max(len(heads), 1)}">{more}</td></tr></tfoot>' if more else ""
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead>{line(heads, 'th')}</thead><tbody>{body}</tbody>{foot}</table>"


class Shown:
    """What shows itself as tables, in a terminal as text and in a notebook as HTML in which a name is never more."""

    __slots__ = ()
    _most_rows: ClassVar[int] = 20

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        """The tables, each with its caption."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n\n".join(text_table(one, caption=text, max_rows=self._most_rows) for text, one in self._shown())

    def _repr_html_(self) -> str:
        return "".join(html_table(one, caption=text, max_rows=self._most_rows) for text, one in self._shown())


def html_fields(one: Any, caption: str) -> str:
    """Draw the fields of a struct or dataclass as an HTML table, of a dictionary entry by entry; without empty ones."""
    import polars as pl

    rows = []
    for name in getattr(one, "__struct_fields__", None) or [field.name for field in fields(one)]:
        value = getattr(one, name)
        entries = {f"{name}: {key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        rows += [(key, _plain(each)) for key, each in entries.items() if each not in (None, (), "")]
    return html_table(pl.DataFrame(rows, schema=["field", "value"], orient="row"), caption=caption, max_rows=60)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Three significant digits in the largest unit that keeps the number at 1 or more."""
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.3g}")  # first, so that 999.9996 µs is 1.00 ms and not 1000 µs
    size, unit = next((pair for pair in reversed(units) if abs(rounded) >= pair[0]), units[0])
    if size == 1:
        return f"{rounded:g} {unit}"
    number = rounded / size
    return f"{number:.{max(0, 2 - math.floor(math.log10(abs(number))))}f} {unit}"


def _plain(value: object) -> str:
    """A value as text that cannot steer a terminal."""
    return harmless(f"{value:.4g}" if isinstance(value, float) else str(value))


_INSTANTS = ("start_ns", "end_ns", "begin_ns", "at_ns")
_LONG_AGO_NS = 10**13
"""No step begins so long after its trace's zero: beyond, a time in a column that ends so is a clock's reading."""


def _zero_ns(frame: pl.DataFrame) -> dict[str, int]:
    """Columns of clock readings -> the earliest of them all: its nineteen digits nobody could read."""
    least = {name: frame[name].min() for name in frame.columns if name.endswith(_INSTANTS)}
    clocks = {name: at for name, at in least.items() if isinstance(at, int) and at >= _LONG_AGO_NS}
    return dict.fromkeys(clocks, min(clocks.values(), default=0))


def _after(zero_ns: int, time_ns: float) -> str:
    return f"+{(time_ns - zero_ns) / 1e6:.3f} ms"


_BY_ENDING: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("_ns", format_ns),
    ("bytes", format_bytes),
    ("share", format_share),
)


def _cells(frame: pl.DataFrame, max_rows: int) -> tuple[list[str], list[list[str]], list[bool], str]:
    """Headings, rows of formatted cells, which columns are numbers, and the line that counts the rows left out."""
    numeric = [dtype.is_numeric() for dtype in frame.dtypes]
    zero_ns = _zero_ns(frame)
    heads: list[str] = []
    formats: list[Callable[[float], str]] = []
    for name, is_number in zip(frame.columns, numeric, strict=True):
        ending, write = next(((e, f) for e, f in _BY_ENDING if is_number and name.endswith(e)), ("", _plain))
        short = name.removesuffix(ending).rstrip("_") or name
        heads.append((f"{short}_time" if short != name and short in frame.columns else short).replace("_", " "))
        formats.append(partial(_after, zero_ns[name]) if name in zero_ns else write)
    rows = [
        ["" if value is None else write(value) for value, write in zip(row, formats, strict=True)]
        for row in frame.head(max_rows).iter_rows()
    ]
    left = frame.height - max_rows
    more = f"… {how_many(left, 'more row')}" if left > 0 else ""
    return heads, rows, numeric, more
