"""What there is to say about a step, or about two, in one document: text, HTML that needs no network, JSON."""

from __future__ import annotations

import base64
import html
import importlib.util
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from lumos_nb.beside import run_in_words, timed_in_words
from lumos_nb.critical_path import Result, replay, sweep
from lumos_nb.display import format_ns, format_share, how_many, html_table, text_table
from lumos_nb.errors import LumosError, named, require_kinds, require_whole
from lumos_nb.evaluate import mechanistic, what_ifs
from lumos_nb.findings import (
    evidence_shares,
    exposed_communication,
    parts_by_rank,
    path_by_name,
    step_spread,
    waits_for,
)
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.partition import breakdown, compare
from lumos_nb.resampling import interval_in_words
from lumos_nb.steady import repeat
from lumos_nb.traces.export import write_table
from lumos_nb.traces.perfetto import write_perfetto
from lumos_nb.traces.run import Run
from lumos_nb.whole_files import whole

if TYPE_CHECKING:
    import altair as alt

TEXT_ROWS, HTML_ROWS = 12, 40
LINE_CHARACTERS = 100
NAME_CHARACTERS = {"name": 56, "mostly": 48, "key": 64, "detail": 110}
"""A kernel's name may be a page long; the text report shows so much of it, the JSON all."""

HTML_CHARACTERS = 400
DRAWN_LANES, DRAWN_BARS = 100, 2500
"""What the HTML report shows at most of a name and in its charts, so that it stays within a few megabytes."""

_CAN_DRAW = all(importlib.util.find_spec(name) for name in ("altair", "vl_convert"))
_NO_CHARTS = "<p>No charts: altair and vl-convert are not installed; pip install 'lumos-nb[notebook]' brings them.</p>"

Progress = Callable[[str], None]

SECTIONS = {
    "steps": ("Measured steps", ""),
    "prediction": ("Predicted from other steps", ""),
    "breakdown": ("Where the time goes", "By rank; the parts add up to the step."),
    "path": ("The critical path, by name", "Inside the step, to which the times add up."),
    "communication": (
        "Exposed communication",
        "While its rank does nothing else. Wait: for peers that had not arrived.",
    ),
    "waits": (
        "What waits for whom",
        "Time that a thread or stream stands still for another's work, whatever else its rank does meanwhile.",
    ),
    "what_ifs": (
        "What if half as long?",
        "In the steady state. Bound: the busiest thread or stream alone; no step is shorter.",
    ),
    "evidence": (
        "What the links rest on",
        "Waiting by how its link was found: exact from the trace, by a pattern, or from times of other steps.",
    ),
    "notes": ("Left out, repaired and assumed", "By reading the files and by building the graph."),
}
"""Of a step's report: heading, and what a reader must know about the table."""

_SCORED = ("step", "measured_ns", "predicted_ns", "error", "null_ns", "null_error")
_AS_SHARES = {"error": "error_share", "null_error": "null_error_share"}


class Section(NamedTuple):
    """A table under a heading, with what a reader must know about it."""

    key: str
    title: str
    note: str
    table: pl.DataFrame


@dataclass(frozen=True, slots=True)
class Report:
    """Sections under a title; `print` it, show it in a notebook, or take `page()` or `rows()`.

    Attributes
    ----------
    title, summary, sections
        What it is about, what comes out, and its tables; `report["waits"]` is the table of a section.
    result
        What the charts of `page()` draw; None if there is nothing to draw.
    scored
        Steps predicted from other steps (`evaluate.mechanistic`); None if there are too few.
    claim
        What `save_prediction` is to be told: `change`, `times`, `model_error`.
    """

    title: str
    summary: str
    sections: tuple[Section, ...]
    result: Result | None = None
    scored: pl.DataFrame | None = None
    claim: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> pl.DataFrame:
        """The table of a section."""
        return next(section.table for section in self.sections if section.key == key)

    def __repr__(self) -> str:
        parts = [self.title, textwrap.fill(self.summary, LINE_CHARACTERS)]
        for section in self.sections:
            table = text_table(_shortened(section.table), max_rows=TEXT_ROWS) if section.table.height else "(none)"
            note = textwrap.fill(section.note, LINE_CHARACTERS)
            parts.append("\n".join(part for part in (section.title.upper(), note, table) if part))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        return f"<h2>{html.escape(self.title)}</h2><p>{html.escape(self.summary)}</p>{_sections(self.sections)}"

    def rows(self) -> dict[str, Any]:
        """The report as JSON's types, times in ns: `title`, `summary`, `package`, and a list of rows a section."""
        tables = {section.key: json.loads(section.table.write_json()) for section in self.sections}
        return {"title": self.title, "summary": self.summary, "package": version("lumos-nb"), **tables}

    def page(self) -> str:
        """The report as one HTML file that loads nothing: its charts are drawings. Without altair it has none."""
        figures = "".join(_figure(chart, caption) for chart, caption in _charts(self)) if _CAN_DRAW else _NO_CHARTS
        texts = {"title": self.title, "summary": self.summary, "package": version("lumos-nb")}
        escaped = {name: html.escape(text) for name, text in texts.items()}
        return _PAGE.format(**escaped, figures=figures, sections=_sections(self.sections))


def step_report(
    run: Run,
    step: int | None = None,
    *,
    predict: int = 3,
    scales: Mapping[str, float] | None = None,
    recording: Recording | None = None,
    progress: Progress = lambda _doing: None,
) -> Report:
    """Replay a step, and say where its time goes, what it hangs on, and how far that can be trusted.

    Parameters
    ----------
    run
        What `load_run` gives.
    step
        As in `build_graph`.
    predict
        How many steps to predict from one another, the reported one among them; takes the square of so many graphs.
        Below 2 leaves it out.
    scales
        Class of ops -> factor, as a scenario of `sweep`: one more what-if.
    recording, progress
        The run's, where it is made already; and what is to be told of each thing that is done.

    Returns
    -------
    Report
        Sections `steps`, `prediction`, `breakdown`, `path`, `communication`, `waits`, `what_ifs`, `evidence`, `notes`.

    Examples
    --------
    >>> print(step_report(run, step=3, predict=0))
    """
    require_kinds(recording=(recording, Recording | None), scales=(scales, Mapping | None))
    require_kinds(progress=(progress, Callable))
    require_whole(0, predict=predict)
    progress("building the graph")
    recording = Recording.of(run) if recording is None else recording
    graph = build_graph(recording, step)
    progress(f"replaying {len(graph.ops):,} ops of step {graph.step}")
    result = replay(graph)
    chosen = _steps_to_predict(recording, graph.step, predict)
    progress(f"predicting steps {', '.join(map(str, chosen))} from one another" if chosen else "asking what if")
    scored = mechanistic(recording, chosen) if chosen else None
    changes = pl.concat([what_ifs(graph), *([_asked(graph, scales)] if scales else [])], how="diagonal")
    said = changes[-1].select("change", "times").row(0, named=True) if scales else {}
    times = recording.step_times()
    tables = {
        "steps": times.select("step", "edge", time_ns="step_ns"),
        "prediction": pl.DataFrame() if scored is None else scored.select(_SCORED).rename(_AS_SHARES),
        "breakdown": parts_by_rank(result),
        "path": path_by_name(result),
        "communication": exposed_communication(result),
        "waits": waits_for(result),
        "what_ifs": changes,
        "evidence": evidence_shares(graph),
        "notes": _notes(run, graph.report),
    }
    notes = {"steps": _about_steps(run, recording), "prediction": _about_errors(scored, graph.step)}
    return Report(
        title=f"Step {graph.step} of {run_in_words(run, recording.world_size)}",
        summary=_summary(times, scored, result) + interval_in_words(recording, graph.step),
        sections=tuple(Section(key, head, notes.get(key, note), tables[key]) for key, (head, note) in SECTIONS.items()),
        result=result,
        scored=scored,
        claim=said | {"model_error": scored["error"].abs().max() if scored is not None else 0.0},
    )


def _asked(graph: Graph, scales: Mapping[str, Any]) -> pl.DataFrame:
    """One more what-if, as a row of `what_ifs`."""
    swept = sweep(repeat(graph), [scales])
    words = ", ".join(f"{name} × {1 if scale is None else float(scale):g}" for name, scale in scales.items())
    return swept.select(change=pl.lit(words), step_ns="step_ns", times=1 + pl.col("change"))


def _steps_to_predict(recording: Recording, step: int, count: int) -> list[int]:
    """The step and those nearest to it, the first profiled one left out; none where a prediction has no ground."""
    times = recording.step_times()
    others = [other for other in times["step"][1:] if other != step]
    if count < 2 or not others or times.filter(pl.col("step_ns") <= 0).height:
        return []
    return sorted([step, *sorted(others, key=lambda other: (abs(other - step), other))[: count - 1]])


def _summary(times: pl.DataFrame, scored: pl.DataFrame | None, result: Result) -> str:
    here = pl.col("step") == result.graph.step
    measured_ns = times.filter(here)["step_ns"].item()
    replayed = f"replayed with its own durations {format_ns(result.step_ns)}"
    same = f"Measured {format_ns(measured_ns)}; {replayed}: the same by construction, which proves nothing."
    if scored is None:
        return f"{same} There is no prediction from other steps."
    predicted_ns, *errors = scored.filter(here).select("predicted_ns", "error", "null_error").row(0)
    error, null_error = map(format_share, errors)
    return (
        f"{same} Predicted from other steps {format_ns(predicted_ns)}: an error of {error}, where the step before, "
        f"unchanged, has {null_error}."
    )


def _about_steps(run: Run, recording: Recording) -> str:
    steps, median_ns, _, _, noise = step_spread(recording).row(0)
    scatter = f", which scatter by {format_share(noise)}" if noise is not None else ""
    inner = f"Median {format_ns(median_ns)} of {how_many(steps, 'step')}{scatter}"
    edges = "Those at an edge, where the profiler began or ended, count if there are no others."
    return f"{inner}. {edges}{timed_in_words(run, median_ns)}"


def _about_errors(scored: pl.DataFrame | None, step: int) -> str:
    if scored is None:
        return "It takes another step besides the first, steps that take time, and to be asked for."
    own = format_share(scored.filter(pl.col("step") == step)["own_share"].item())
    return (
        f"Each of {how_many(scored.height, 'step')}, from the others of these alone: computation is its own; launch "
        f"latencies, gaps, waits and transfers are the other steps'. Null: the step before, unchanged. "
        f"Of step {step}'s path {own} was given; near 100 % errors say little."
    )


def _notes(run: Run, graph_report: pl.DataFrame) -> pl.DataFrame:
    """Everything that reading and building counted, but for the links: those are the evidence's."""
    columns = ("what", "rank", "count", "detail")
    made = graph_report.filter(~pl.col("what").str.starts_with("edges of rule ") & (pl.col("count") > 0))
    counted = pl.concat([run.report.rename({"reason": "detail"}).select(columns), made.select(columns)])
    by_what = counted.group_by("what", "detail", maintain_order=True)
    return by_what.agg(ranks=pl.col("rank").n_unique(), count=pl.sum("count")).select(
        "what", "ranks", "count", "detail"
    )


def comparison_report(
    a: Recording, b: Recording, steps: Sequence[int | None] = (None, None), *, names: Sequence[str] = ("a", "b")
) -> Report:
    """What changed from a step of one run to a step of another, at several levels that each add up to the difference.

    Parameters
    ----------
    a, b
        Recordings; one may stand for both.
    steps
        A step of each; None takes that of median length.
    names
        What to call the two.

    Returns
    -------
    Report
        Sections `runs`, then one a level of `compare`: `step`, `rank`, `part`, `op`, `phase`, `layer`, `collective`.

    Examples
    --------
    >>> comparison_report(recording, Recording.of(load_run(datasets.path("gpt-ddp-paired"))))
    """
    graphs = [build_graph(recording, step) for recording, step in zip((a, b), steps, strict=True)]
    changed = compare(*graphs)
    spreads = pl.concat(step_spread(recording) for recording in (a, b))
    taken = {"run": ["a", "b"], "name": names, "step": [graph.step for graph in graphs]}
    runs = pl.DataFrame(taken).hstack(spreads)
    sections = [Section("runs", "The two runs", "Noise: how far a run's own steps scatter.", runs)]
    for level, rows in changed.group_by("level", maintain_order=True):
        sections.append(Section(str(level[0]), f"By {level[0]}", "", rows.drop("level")))
    diff_ns = changed.filter(pl.col("level") == "step")["mean_diff_ns"].item()
    return Report(
        title=f"Step {graphs[0].step} of {names[0]} (a) against step {graphs[1].step} of {names[1]} (b)",
        summary=f"b takes {format_ns(abs(diff_ns))} {'less' if diff_ns < 0 else 'more'} than a in the mean of ranks: "
        "every table's mean diff adds up to that. Its other times are summed over ranks.",
        sections=tuple(sections),
    )


def write_report(report: Report, folder: str | Path, *, run: Run | None = None) -> list[Path]:
    """Write a step's report as `ops.parquet`, `edges.parquet`, `report.html` and `step.perfetto.json.gz`.

    They go into a folder that is there, each as a whole, in the place of files of the same names. `run` adds what the
    profiler recorded to the Perfetto file.

    Raises
    ------
    LumosError
        The report is not of a step, or a file cannot be written.
    """
    if (result := report.result) is None:
        raise LumosError(f"{report.title!r} has no replayed step to write; give what step_report returns.")
    page = report.page()
    folder = named(folder)
    names = ("ops.parquet", "edges.parquet", "report.html", "step.perfetto.json.gz")
    ops, edges, html_page, perfetto = written = [folder / name for name in names]
    write_table(result.ops, ops)
    write_table(result.graph.edges, edges)
    with whole(html_page) as part:
        part.write_text(page, encoding="utf-8")
    write_perfetto(result, perfetto, run=run)
    return written


_QUALIFIERS = r"^void |(?:\(anonymous namespace\)|\w+)::|\([^()]*\)$"
"""What a long name can do without: where a function lives and what it is passed."""


def _shortened(table: pl.DataFrame, most: int | None = None) -> pl.DataFrame:
    """Texts cut to `most` characters, or to what a line of text has room for."""
    limits = {name: most for name, dtype in table.schema.items() if dtype == pl.String} if most else NAME_CHARACTERS
    cut = {}
    for name in limits.keys() & set(table.columns):
        room, text = limits[name], pl.col(name)
        if not most:
            text = pl.when(text.str.len_chars() > room).then(text.str.replace_all(_QUALIFIERS, "")).otherwise(text)
        cut[name] = pl.when(text.str.len_chars() > room).then(text.str.head(room - 1) + "…").otherwise(text)
    return table.with_columns(**cut)


def _sections(sections: Sequence[Section]) -> str:
    parts = []
    for section in sections:
        table = html_table(_shortened(section.table, HTML_CHARACTERS), max_rows=HTML_ROWS)
        parts.append(
            f'<section id="{section.key}"><h2>{html.escape(section.title)}</h2><p>{html.escape(section.note)}</p>'
            f'<div class="table">{table if section.table.height else "(none)"}</div></section>'
        )
    return "".join(parts)


def _charts(report: Report) -> list[tuple[alt.Chart | alt.LayerChart, str]]:
    """The charts of a step with what their captions say."""
    from lumos_nb import charts

    result = report.result
    if result is None:
        return []
    shown = _ranks_to_draw(result)
    n_ranks = result.ops["rank"].n_unique()
    of_all = (
        f" Ranks {', '.join(map(str, shown))} of {n_ranks}, by their time on the path." if len(shown) < n_ranks else ""
    )
    parts = breakdown(result).filter(pl.col("rank").is_in(shown))
    drawn: list[tuple[alt.Chart | alt.LayerChart, str]] = [
        (
            charts.timeline(result, ranks=shown, max_rows=DRAWN_BARS),
            f"What every thread and stream does, as replayed; the critical path is outlined.{of_all} "
            "step.perfetto.json.gz has everything, for ui.perfetto.dev.",
        ),
        (charts.breakdown_bars(parts), f"Parts of each rank's step, which add up to it.{of_all}"),
    ]
    if report.scored is not None:
        drawn.append(
            (charts.predicted_vs_measured(report.scored), "Each step predicted from the others, beside the null.")
        )
    return drawn


def _ranks_to_draw(result: Result) -> list[int]:
    """Those with most time on the critical path, as long as their lanes fit."""
    on_path = result.composition.group_by("rank").agg(path_ns=pl.col("time_ns").sum())
    lanes = result.ops.group_by("rank").agg(lanes=pl.col("lane").n_unique()).join(on_path, on="rank", how="left")
    ranks = lanes.sort(pl.col("path_ns").fill_null(0), -pl.col("rank"), descending=True)
    fits = (pl.col("lanes").cum_sum() <= DRAWN_LANES) | (pl.int_range(pl.len()) == 0)
    return sorted(ranks.filter(fits)["rank"])


def _figure(chart: alt.Chart | alt.LayerChart, caption: str) -> str:
    """A drawing as an image of its own: nothing in it can run, and its names of parts meet no other's."""
    from lumos_nb import charts

    text, drawing = html.escape(caption), base64.b64encode(charts.to_svg(chart).encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{drawing}" alt="{text}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1180px; margin: 2em auto;
  padding: 0 1.5em }}
h1 {{ font-size: 1.7em; margin-bottom: .2em }} h2 {{ font-size: 1.2em; margin: 2em 0 .2em }}
p {{ max-width: 48em; margin: .3em 0 .8em }}
figure {{ margin: 2em 0 }} figure img {{ max-width: 100%; height: auto }} figcaption {{ color: #555; max-width: 60em }}
.table {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th {{ border-bottom: 1.5px solid #1a1a1a; font-weight: 600; vertical-align: bottom }}
th, td {{ padding: .2em .9em .2em 0; vertical-align: top; max-width: 46em; overflow-wrap: anywhere }}
[style*=right] {{ white-space: nowrap }}
tbody tr:nth-child(even) {{ background: #f5f5f5 }} tfoot td {{ color: #555; padding-top: .5em }}
footer {{ margin: 3em 0 1em; color: #555; font-size: .9em }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
{figures}
{sections}
<footer>Written by lumos_nb {package}.</footer>
</body>
</html>
"""
