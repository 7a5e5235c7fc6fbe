"""Rows that say how well predictions did: error beside null and ablation, the spread and what it covers."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from benchmarks.rows import Row

HOST_BOUND_SHARE = 0.9
"""Any graph that keeps threads in order predicts a step well whose path is more than this the host's own chain."""

ABLATIONS = {
    # what is left out: column of `mechanistic`, the words for it, target of how many times worse that must be
    "events": ("no_events_error", "without waits between streams", ">= 3.0"),
    "joins": ("no_joins_error", "without joins between ranks", ""),
}


def percent(values: pl.Series) -> float:
    """Mean size of relative errors, in percent."""
    return 100 * float(values.abs().mean())  # type: ignore[arg-type]


def noise(measured: pl.Series) -> float:
    """Scatter of the measured steps themselves: mean distance from their median, in percent of it."""
    middle = float(measured.median())  # type: ignore[arg-type]
    return 100 * float((measured - middle).abs().mean()) / middle  # type: ignore[arg-type]


def mechanistic_rows(
    name: str, scored: pl.DataFrame, target: float | None = None, *, without: str | None = None
) -> Iterator[Row]:
    """Rows of one recording: error beside null, waiting on the path, and the error `without` one of `ABLATIONS`."""
    error, sizes = percent(scored["error"]), 100 * scored["error"].abs()
    host, own = float(scored["host_share"].mean()), float(scored["own_share"].mean())  # type: ignore[arg-type]
    note = f"{scored.height} steps, median {sizes.median():.3g} %, worst {sizes.max():.3g} %. "
    note += f"{own:.0%} of the path given"
    note += f", {host:.0%} the host's: proves nothing" if host > HOST_BOUND_SHARE and without is None else ""
    if (given := percent(scored["absent_given_error"])) != error:
        note += f"; {given:.2f} % with the collectives given whose other ranks have no trace"
    null, scatter = percent(scored["null_error"]), noise(scored["measured_ns"])
    stated = "" if target is None else f"<= {target}"
    yield Row(f"mechanistic/{name}", error, "%", "null", null, scatter, stated, note)
    waiting = 100 * float(scored["wait_share"].max())  # type: ignore[arg-type]
    yield Row(f"waiting/{name}", waiting, "% of the path", target="<= 1.0")
    if without is not None:
        column, words, least = ABLATIONS[without]
        worse = percent(scored[column])
        beside = f"{worse:.2f} % {words}"
        yield Row(f"ablation/{name}", worse / error, "x", "error with all edges = 1", 1.0, target=least, note=beside)


def coverage_rows(name: str, spread: pl.DataFrame, level: float = 0.9) -> Iterator[Row]:
    """How many steps of a table of `jitter` lie in their interval, beside one from the other steps' times alone."""
    inside, null_inside = (100 * float(spread[column].mean()) for column in ("inside", "null_inside"))  # type: ignore[arg-type]
    width, null_width = (
        100 * float(((spread[high] - spread[low]) / spread["measured_ns"]).mean())  # type: ignore[arg-type]
        for low, high in (("low_ns", "high_ns"), ("null_low_ns", "null_high_ns"))
    )
    note = f"{spread.height} steps; interval {width:.1f} % of a step wide, that of the steps' times {null_width:.1f} %"
    what = f"coverage/{name}, level {level:.0%}"
    yield Row(what, inside, "% of the steps", "of the other steps' times", null_inside, note=note)
