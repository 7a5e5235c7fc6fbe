"""Look through runs: a step, some ranks, a window that is brushed, an op that is clicked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import ipywidgets as ui
import polars as pl

from lumos_nb import charts
from lumos_nb.critical_path import Result, replay
from lumos_nb.errors import InputError, require_kinds
from lumos_nb.findings import inner_steps, neighbours, op_at
from lumos_nb.graph import Recording, build_graph
from lumos_nb.partition import breakdown, compare
from lumos_nb.traces.run import Run
from lumos_nb.widgets.linked import LinkedChart
from lumos_nb.widgets.panel import BELOW, MOST_ROWS, WIDE, WIDTH_PX, Controls, Panel, Shown, choice

NS_PER_MS = 1_000_000
ALONE, NO_OP = "none", -1
OVERVIEW_ROWS = 600
OF_AN_OP = ("op_id", "rank", "lane", "kind", "name", "start_ns", "dur_ns", "slack_ns")


def explore(runs: Run | Mapping[str, Run]) -> Panel:
    """Look through a run: a window of a step on some ranks, where its time goes, and an op with its neighbours.

    Drag over the overview to choose the window; click a bar of the timeline for the op, its slack, what it waits for
    and what waits for it.

    Parameters
    ----------
    runs
        One to look at, or several by name, of which two can be compared.

    Raises
    ------
    InputError
        There is no run, or something else.

    Examples
    --------
    >>> explore(load_run(datasets.path("gpt-ddp")))
    >>> explore({"before": run, "after": load_run(datasets.path("gpt-ddp-paired"))})
    """
    named = runs if isinstance(runs, Mapping) else {"run": runs}
    if not named:
        raise InputError("there is no run: give one, or several by name.")
    for one in named.values():
        require_kinds(runs=(one, Run))
    return _Explorer(named, single=not isinstance(runs, Mapping))


class _Explorer(Panel):
    """Steps follow the chosen run; ranks and window follow the step."""

    def __init__(self, runs: Mapping[str, Run], *, single: bool) -> None:
        self._recordings = {name: Recording.of(run) for name, run in runs.items()}
        self._replayed = cache(lambda name, step: replay(build_graph(self._recordings[name], step)))
        self._overview = LinkedChart(self._brush)
        self._timeline = LinkedChart(self._click, ("rank", "lane", "start_ms", "end_ms"))
        self._fitted: tuple[str, int] | None = None
        self._overview_has: tuple[Any, ...] = ()
        self._timeline_has: tuple[Any, ...] = ()
        self._single = single
        names = [*runs]
        window = ui.FloatRangeSlider(max=1e9, step=0.001, readout_format=".1f", continuous_update=False, style=WIDE)
        window.description = "window (ms)"
        controls = {
            "run": choice("run", names, names[0]),
            "beside": choice("beside", [ALONE, *names], ALONE),
            "step": choice("step", self._steps(names[0]), self._steps(names[0])[0]),
            "ranks": ui.SelectMultiple(description="ranks", rows=3, style=WIDE),
            "window": window,
            "op": ui.IntText(value=NO_OP, description="op", style=WIDE),
        }
        for name in ("run", "beside") if single else ():
            controls[name].layout.display = "none"
        drawn = [self._overview, self._timeline]
        super().__init__(controls, self._results, self._shown, self._as_code, fit=self._follow, between=drawn)

    def _steps(self, run: str) -> list[int]:
        return inner_steps(self._recordings[run])["step"].to_list()

    def _follow(self, controls: Controls) -> None:
        run, step, ranks, window, op = (controls[name] for name in ("run", "step", "ranks", "window", "op"))
        if [*step.options] != self._steps(run.value):
            step.options = self._steps(run.value)
        if (run.value, step.value) == self._fitted:
            return
        result = self._replayed(run.value, step.value)
        ranks.options = tuple(result.ops["rank"].unique().sort())
        ranks.value = ranks.options
        window.max = round(result.makespan_ns / NS_PER_MS, 3)
        window.value, op.value = (0.0, window.max), NO_OP
        self._fitted = (run.value, step.value)

    def _brush(self, between: tuple[float, float] | None) -> None:
        window = self.controls["window"]
        pixel_ms, asked = window.max / WIDTH_PX, between or (0.0, window.max)
        if any(abs(now - then) > pixel_ms for now, then in zip(window.value, asked, strict=True)):
            value = tuple(round(min(max(at, 0.0), window.max), 3) for at in asked)
            self._overview_has = (*self._overview_has[:-1], value)
            window.value = value

    def _click(self, bar: Mapping[str, Any]) -> None:
        span_ns = (round(bar["start_ms"] * NS_PER_MS), round(bar["end_ms"] * NS_PER_MS))
        if self.result:
            self.controls["op"].value = op_at(self.result[0], bar["rank"], bar["lane"], span_ns)

    def _results(self, run: str, beside: str, step: int, **_: Any) -> list[Result]:
        return [self._replayed(name, step) for name in dict.fromkeys((run, beside)) if name != ALONE]

    def _shown(self, found: list[Result], *, ranks: Sequence[int], window: tuple[float, float], **asked: Any) -> Shown:
        self._draw_charts(found[0], ranks, window)
        if asked["op"] != NO_OP:
            yield _placed(neighbours(found[0], asked["op"]), found[0])
        names = [asked["run"], asked["beside"]] if len(found) > 1 else [""]
        parts = {name: breakdown(one) for name, one in zip(names, found, strict=True)}
        yield charts.breakdown_bars(parts, width_px=WIDTH_PX).configure_legend(**BELOW)
        if len(found) > 1:
            yield compare(*found).head(MOST_ROWS)
        else:
            ops = found[0].ops.filter(pl.col("rank").is_in(ranks)).select(OF_AN_OP)
            yield _placed(ops.top_k(MOST_ROWS, by="dur_ns"), found[0])

    def _draw_charts(self, result: Result, ranks: Sequence[int], window: tuple[float, float]) -> None:
        """What is not drawn yet: the brush stands in the overview already if it was drawn there."""
        asked = (self._fitted, ranks, window)
        size: dict[str, Any] = {"ranks": ranks, "width_px": WIDTH_PX}
        whole = (0.0, self.controls["window"].max)
        if asked != self._overview_has:
            title = "The whole step: drag over it to choose the window"
            chart = charts.timeline(result, title=title, max_rows=OVERVIEW_ROWS, **size)
            chart = chart.properties(height={"step": 8}).configure_legend(disable=True)
            self._overview.show(chart.configure_axisY(labelOpacity=0), None if window == whole else window)
            self._overview_has = asked
        if asked != self._timeline_has:
            chart = charts.timeline(result, window_ns=_in_ns(window), title="Click a bar for its op", **size)
            self._timeline.show(chart.configure_legend(**BELOW))
            self._timeline_has = asked

    def _as_code(
        self, *, run: str, beside: str, step: int, ranks: Sequence[int], window: tuple[float, float], op: int
    ) -> str:
        given = (
            ["run"] if self._single else [f"runs[{name!r}]" for name in dict.fromkeys((run, beside)) if name != ALONE]
        )
        results = [f"ln.replay(ln.build_graph({one}, step={step}))" for one in given]
        names = ["result", "other"][: len(results)]
        lines = [f"{name} = {made}" for name, made in zip(names, results, strict=True)]
        lines.append(f"ln.charts.timeline(result, window_ns={_in_ns(window)}, ranks={[*ranks]})")
        ask = [f"ln.neighbours(result, {op})"] if op != NO_OP else []
        return "\n".join([*lines, *ask, "ln.compare(result, other)" if len(names) > 1 else "ln.breakdown(result)"])


def _placed(ops: pl.DataFrame, result: Result) -> pl.DataFrame:
    """Ops with their start as the charts count it."""
    at_ns = (pl.col("start_ns") - result.ops["start_ns"].min()).alias("at_ns")
    return ops.select(at_ns if name == "start_ns" else name for name in ops.columns)


def _in_ns(window: tuple[float, float]) -> tuple[int, int]:
    begin, end = (round(at * NS_PER_MS) for at in window)
    return begin, end
