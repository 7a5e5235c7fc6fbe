"""What charts have in common: colours, headings, axes, tooltips, and what they ask of a frame.

One colour means one thing in all charts. The colours are Okabe and Ito's (2008), which the colour-blind tell apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from numbers import Real
from operator import index
from typing import Any, ParamSpec, TypeVar

import altair as alt
import polars as pl

from lumos_nb.errors import (
    InputError,
    LumosError,
    SchemaError,
    items_of,
    require_flags,
    require_kinds,
    require_text,
    require_whole,
    shown,
)

P = ParamSpec("P")
T = TypeVar("T")
_MOST = 10**7


def as_annotated(function: Callable[P, T]) -> Callable[P, T]:
    """A chart whose arguments are refused where they are not of the kind that its signature says."""
    signature = inspect.signature(function)
    takes = {name: _TAKES[each.annotation] for name, each in signature.parameters.items() if each.annotation in _TAKES}

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind_partial(*args, **kwargs)
        bound.arguments |= {name: takes[name](name, given) for name, given in bound.arguments.items() if name in takes}
        return function(*bound.args, **bound.kwargs)

    return checked


def _size(name: str, given: Any, least: int = 1) -> int:
    require_whole(least, _MOST, **{name: given})
    return index(given)  # of numpy's it may be too narrow to be multiplied


def _text(name: str, given: Any) -> Any:
    require_text(**{name: given})
    return given


def _flag(name: str, given: Any) -> bool:
    require_flags(**{name: given})
    return bool(given)


def _texts(name: str, given: Any) -> Any:
    require_kinds(**{name: (given, Mapping)})
    require_text(**{f"{name}[{shown(key)}]": text for key, text in given.items()})
    return given


def _two_sizes(name: str, given: Any) -> tuple[int, ...]:
    sizes = items_of(name, given, "a width and a height")
    if len(sizes) != 2:
        raise InputError(f"{name}={shown(given)}: give a width and a height.")
    return tuple(_size(name, one) for one in sizes)


def _ranks(name: str, given: Any) -> list[int]:
    return [_size(name, rank, 0) for rank in items_of(name, given, "ranks, such as [0, 1]")]


def _if_any(takes: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, given: None if given is None else takes(name, given)


_TAKES: dict[str, Callable[[str, Any], Any]] = {
    "int": _size,
    "str": _text,
    "bool": _flag,
    "tuple[int, int]": _two_sizes,
    "Mapping[str, str]": _texts,
    "int | None": _if_any(lambda name, given: _size(name, given, 0)),
    "str | None": _if_any(_text),
    "Collection[int] | None": _if_any(_ranks),
}
"""Annotation of an argument -> what takes it, or raises InputError."""


COMPUTE, TRANSFER, WAITING, COPY, HOST, UNEXPLAINED, NOTHING = (
    *("#0072B2", "#D55E00", "#F7CDB0", "#009E73", "#56B4E9"),
    *("#4D4D4D", "#E6E6E6"),
)
INK, EDGE, GREY, ON_LIGHT = "#000000", "#FFFFFF", "#808080", "#222222"
"""Of what is measured or outlined and of what lies between marks, which a dark theme exchanges; of lines to compare
with, and of letters on a light mark, which it keeps."""
PALER = "#2B8FD6"
"""Of the dark blue on a dark paper."""
ACTIVITY_COLOURS = {
    "compute": COMPUTE,  # a kernel; on a rank without a device, an operator
    "transfer": TRANSFER,
    "waiting": WAITING,
    "copy": COPY,
    "host operator": HOST,
    "runtime call": "#F0E442",
    "between operators": "#B9DDF5",
    "unexplained": UNEXPLAINED,
    "before the step": NOTHING,
}
PART_COLOURS = {
    "compute": COMPUTE,
    "overlapped": "#CC79A7",
    "exposed_transfer": TRANSFER,
    "exposed_wait": WAITING,
    "copies": COPY,
    "host_bound": HOST,
    "unexplained": UNEXPLAINED,
    "other": NOTHING,
}
SERIES = {
    # series of a prediction, held in <series>_ns: its colour and shape
    "measured": (INK, "stroke"),
    "predicted": ("#0072B2", "circle"),
    "null": ("#E69F00", "cross"),
}
MEASURED, PREDICTED = (SERIES[series][0] for series in ("measured", "predicted"))
CLASS_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK, "#F0E442")
"""Classes that a chart compares, in the order of its legend."""


def heading(text: str, subtitle: str = "") -> alt.Title:
    """A title flush with the plot, so that charts below one another line up."""
    require_kinds(title=(text, str))
    return alt.Title(text, subtitle=subtitle, anchor="start", frame="group")


def check_rows(frame: pl.DataFrame, what: str, **columns: Collection[str]) -> pl.DataFrame:
    """The rows of a frame, if there is something to draw.

    Columns by what is in them: `numbers`, `words`, `labels` (either of these), `flags`. Nulls alone are any of these;
    further columns stay if a chart can hold them.

    Raises
    ------
    InputError
        `frame` is no DataFrame.
    SchemaError
        It lacks a column, or has one of another type.
    LumosError
        It has no row.
    """
    if not isinstance(frame, pl.DataFrame):
        source = f": {_GIVEN_BY[what]} gives it" if what in _GIVEN_BY else ""
        raise InputError(
            f"this takes the {what} table, a polars DataFrame{source}; it was given a {type(frame).__name__}."
        )
    wanted = {name: kind for kind, names in columns.items() for name in names}
    if missing := [c for c in wanted if c not in frame.columns]:
        raise SchemaError(f"{what} table lacks column(s) {', '.join(missing)}; it has {', '.join(frame.columns)}.")
    frame = frame.cast({c: _IF_NULL[kind] for c, kind in wanted.items() if frame.schema[c] == pl.Null})
    for column, kind in wanted.items():
        if not _FITS[kind](frame.schema[column]):
            raise SchemaError(f"{what} table: column {column} is of {frame.schema[column]}; give {kind}.")
    if frame.is_empty():
        raise LumosError(f"nothing to draw: the {what} table has no row.")
    return frame.select(c for c, dtype in frame.schema.items() if any(fits(dtype) for fits in _FITS.values()))


_GIVEN_BY = {
    "breakdown": "ln.breakdown(result)",
    "comparison": "ln.compare(a, b)",
    "device": "Plan.devices",
    "memory": "Estimate.memory",
    "prediction": "ln.mechanistic(run)",
    "search": "Found.frame of ln.search",
    "structure": "Structure.table of ln.find_structure(graph)",
    "sweep": "ln.sweep(graph, scenarios)",
}
"""Table that a chart takes -> what a user asks for it."""

_FITS: dict[str, Callable[[pl.DataType], bool]] = {
    "numbers": lambda dtype: dtype.is_numeric(),
    "words": lambda dtype: dtype in (pl.String, pl.Categorical, pl.Enum),
    "labels": lambda dtype: dtype.is_numeric() or dtype in (pl.String, pl.Categorical, pl.Enum),
    "flags": lambda dtype: dtype == pl.Boolean,
}
_IF_NULL = {"numbers": pl.Float64, "words": pl.String, "labels": pl.String, "flags": pl.Boolean}


def check_window(window_ns: object) -> None:
    """Raise InputError unless this is None, or a time from which and one to which."""
    if window_ns is not None:
        ends = [*window_ns] if isinstance(window_ns, Sequence) else []
        if len(ends) != 2 or not all(isinstance(end, Real) and abs(float(end)) < 2**63 for end in ends):
            raise InputError(f"window_ns is {shown(window_ns)}; give from and to in ns, such as (0, 5_000_000).")


def in_ms(frame: pl.DataFrame) -> pl.DataFrame:
    """Columns in ns as ms: JavaScript counts exactly to 2**53 only."""
    return frame.select(
        (pl.col(c) / 1e6).alias(f"{c.removesuffix('_ns')}_ms") if c.endswith("_ns") else c for c in frame.columns
    )


def texts(values: pl.Series, write: Callable[[float], str]) -> pl.Series:
    """Numbers written out, nulls kept."""
    return pl.Series([None if value is None else write(value) for value in values], dtype=pl.String)


def names(field: str, in_order: Sequence[str] | None = None, *, title: str | None = None) -> alt.Y:
    """An axis of names from top to bottom, in this order or as they stand."""
    y = alt.Y(f"{field}:N", sort=None) if in_order is None else alt.Y(f"{field}:N").scale(domain=list(in_order))
    return y.title(title).axis(labelLimit=320, labelPadding=5, ticks=False, domain=False)


LOG_LOOK: dict[str, Any] = {"gridOpacity": 0.4, "labelSeparation": 8}
"""Of a logarithmic axis: its many lines pale, its labels apart."""


def room(values: pl.Series) -> list[float]:
    """Ends of a logarithmic axis, a little beyond what it shows.

    Raises
    ------
    LumosError
        It can show nothing: there is no positive number.
    """
    shown = values.cast(pl.Float64)
    shown = shown.filter((shown > 0) & shown.is_finite())
    if shown.is_empty():
        raise LumosError(f"nothing to draw: no {values.name} is a positive number, which its logarithmic axis takes.")
    return [float(shown.min()) / 1.3, float(shown.max()) * 1.3]  # type: ignore[arg-type]


def told(*columns: str) -> list[alt.Tooltip]:
    """Tooltips of columns as they are; altair would take 5 ms to make one of a name alone."""
    return [alt.Tooltip(column) for column in columns]


def figures(*columns: str) -> list[alt.Tooltip]:
    """Tooltips of numbers."""
    return [alt.Tooltip(f"{column}:Q", format=",.4~r") for column in columns]


def seconds(*columns: str) -> list[alt.Tooltip]:
    """Tooltips of times in s."""
    return [alt.Tooltip(f"{name}:Q", format=",.4~r", title=f"{name.removesuffix('_s')} (s)") for name in columns]


def series_colour() -> alt.Color:
    """The colours of what was measured and of what is predicted."""
    return (
        alt.Color("series:N")
        .scale(domain=["measured", "predicted"], range=[MEASURED, PREDICTED])
        .title(None)
        .legend(symbolOpacity=1)
    )
