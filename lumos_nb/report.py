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
from typing import TYPE_CHECKING, Any

import polars as pl

from lumos_nb.critical_path import Result, replay, sweep
from lumos_nb.display import format_ns, format_share, html_table, text_table
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
from lumos_nb.ledger import whole
from lumos_nb.partition import breakdown, compare
from lumos_nb.steady import repeat
from lumos_nb.traces.perfetto import write_perfetto
from lumos_nb.traces.run import Run

if TYPE_CHECKING:
    import altair as alt

TEXT_ROWS, HTML_ROWS = 12, 40
LINE_CHARACTERS = 100
NAME_CHARACTERS = {"name": 56, "mostly": 48, "key": 64, "detail": 110}
"""A kernel's name may be a page long; the text report shows so much of it, the HTML report and the JSON all."""

DRAWN_RANKS, DRAWN_BARS = 8, 2500
"""What the charts of the HTML report show at most, so that it stays within a few megabytes."""

_CAN_DRAW = all(importlib.util.find_spec(name) for name in ("altair", "vl_convert"))
_NO_CHARTS = "<p>No charts: altair and vl-convert are not installed; pip install 'lumos-nb[notebook]' brings them.</p>"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Section:
    """A table with its heading and what a reader must know about it."""

    key: str
    title: str
    note: str
    table: pl.DataFrame


@dataclass(frozen=True, slots=True)
class Report:
    """Sections under a title; `print` it, show it in a notebook, or take `page()` or `rows()`.

    Attributes
    ----------
    title, summary
        What it is about, and what comes out, in a line.
    sections
        Its tables.
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
            table = text_table(_shortened(section.table), max_rows=TEXT_ROWS) if section.table.height else ""
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
        """The report as one HTML file that loads nothing: its charts are drawings.

        Where altair or vl-convert is not installed, it says that there are none for that reason.
        """
        figures = "".join(_figure(chart, caption) for chart, caption in _charts(self)) if _CAN_DRAW else _NO_CHARTS
        title, summary = html.escape(self.title), html.escape(self.summary)
        return _PAGE.format(
            title=title,
            summary=summary,
            figures=figures,
            sections=_sections(self.sections),
            package=html.escape(version("lumos-nb")),
        )


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
    recording
        The run's, where it is made already.
    progress
        Is told what is being done.

    Returns
    -------
    Report
        Sections `steps`, `prediction`, `breakdown`, `path`, `communication`, `waits`, `what_ifs`, `evidence`, `notes`.

    Examples
    --------
    >>> print(step_report(load_run("runs/gpt"), step=3))  # doctest: +SKIP
    """
    progress("putting ranks on one clock")
    recording = recording or Recording.of(run)
    progress("building the graph")
    graph = build_graph(recording, step)
    progress(f"replaying {len(graph.ops):,} ops of step {graph.step}")
    result = replay(graph)
    chosen = _steps_to_predict(recording, graph.step, predict)
    if chosen:
        progress(f"predicting steps {', '.join(map(str, chosen))} from one another")
    scored = mechanistic(recording, chosen) if chosen else None
    progress("asking what if")
    times, changes, claim = recording.step_times(), what_ifs(graph), {"change": "none", "times": 1.0}
    if scales:
        asked = _asked(graph, scales)
        changes = pl.concat([changes, asked], how="diagonal")
        claim = dict(asked.select("change", "times").row(0, named=True))
    claim["model_error"] = scored["error"].abs().max() if scored is not None else 0.0
    measured_ns = times.filter(pl.col("step") == graph.step)["step_ns"].item()
    spread = step_spread(recording)
    progress("")
    return Report(
        title=f"Step {graph.step} of {_named(run)}",
        summary=f"Measured {format_ns(measured_ns)}, replayed {format_ns(result.step_ns)}: the same by construction, "
        "since the step is replayed with its own durations. That proves nothing; the prediction from other steps does.",
        sections=(
            Section("steps", "Measured steps", _about_steps(spread), times.select("step", "step_ns", "edge")),
            _prediction(scored, graph.step),
            Section(
                "breakdown", "Where the time goes", "By rank; the parts add up to the step.", parts_by_rank(result)
            ),
            Section(
                "path",
                "The critical path, by name",
                "Inside the step, to which the times add up.",
                path_by_name(result),
            ),
            Section(
                "communication",
                "Exposed communication",
                "While its rank does nothing else. Wait: for peers that had not arrived.",
                exposed_communication(result),
            ),
            Section(
                "waits",
                "What waits for whom",
                "Time that a thread or stream stands still for another's work, whatever else its rank does meanwhile.",
                waits_for(result),
            ),
            Section(
                "what_ifs",
                "What if half as long?",
                "In the steady state. Bound: the busiest thread or stream alone; no step is shorter.",
                changes,
            ),
            Section(
                "evidence",
                "What the links rest on",
                "Waiting by how its link was found: exact from the trace, by a pattern or from times of other steps.",
                evidence_shares(graph),
            ),
            Section("notes", "Left out, repaired and assumed", "", _notes(run, graph.report)),
        ),
        result=result,
        scored=scored,
        claim=claim,
    )


def _asked(graph: Graph, scales: Mapping[str, float]) -> pl.DataFrame:
    """One more what-if, as a row of `what_ifs`."""
    words = ", ".join(f"{name} × {scale:g}" for name, scale in scales.items())
    swept = sweep(repeat(graph), [scales])
    return swept.select(change=pl.lit(words), step_ns="step_ns", times=1 + pl.col("change"))


def _named(run: Run) -> str:
    paths = [Path(path) for path in run.ranks["path"]]
    name = paths[0].parent.name if len(paths) > 1 else paths[0].name
    return f"{name or paths[0].name}, {len(paths)} rank{'s' if len(paths) > 1 else ''}"


def _about_steps(spread: pl.DataFrame) -> str:
    row = spread.row(0, named=True)
    scatter = f", which scatter by {format_share(row['noise_share'])}" if row["noise_share"] is not None else ""
    median = f"Median {format_ns(row['median_ns'])} of {row['steps']} steps{scatter}"
    return f"{median}. Edge: the profiler began or ended there."


def _steps_to_predict(recording: Recording, step: int, count: int) -> list[int]:
    """The step and those nearest to it, the first profiled one left out; none where a prediction has no ground."""
    times = recording.step_times()
    others = [other for other in times["step"][1:] if other != step]
    if count < 2 or not others or times.filter(pl.col("step_ns") <= 0).height:
        return []
    return sorted([step, *sorted(others, key=lambda other: (abs(other - step), other))[: count - 1]])


def _prediction(scored: pl.DataFrame | None, step: int) -> Section:
    title = "Predicted from other steps"
    if scored is None:
        note = "None: it takes another step besides the first (each of some length), and to be asked for."
        return Section("prediction", title, note, pl.DataFrame())
    own = scored.filter(pl.col("step") == step)["own_share"].item()
    note = (
        "From a step's own computation; launch latencies, gaps, waits and transfers are the other steps'. Null: the "
        f"step before, unchanged. {format_share(own)} of step {step}'s path was given; near 100 % errors say little."
    )
    errors = {"error_share": "error", "null_ns": "null_ns", "null_error_share": "null_error"}
    return Section("prediction", title, note, scored.select("step", "measured_ns", "predicted_ns", **errors))


def _notes(run: Run, graph_report: pl.DataFrame) -> pl.DataFrame:
    """Everything that reading and building counted, but for the links: those are the evidence's."""
    columns = ("what", "rank", "count", "detail")
    made = graph_report.filter(~pl.col("what").str.starts_with("edges of rule ") & (pl.col("count") > 0))
    counted = pl.concat([run.report.rename({"reason": "detail"}).select(columns), made.select(columns)])
    by_what = counted.group_by("what", "detail", maintain_order=True)
    return by_what.agg(ranks=pl.col("rank").n_unique(), count=pl.sum("count")).select(
        "what", "ranks", "count", "detail"
    )


def comparison_report(a: Recording, b: Recording, steps: Sequence[int | None] = (None, None)) -> Report:
    """What changed from a step of one run to a step of another, at several levels that each add up to the difference.

    Parameters
    ----------
    a, b
        Recordings; one may stand for both.
    steps
        A step of each; None takes that of median length.

    Returns
    -------
    Report
        Sections `runs`, then one a level of `compare`: `step`, `part`, `op`, `collective`, `phase`, `layer`, `rank`.

    Examples
    --------
    >>> comparison_report(Recording.of(yesterday), Recording.of(today))  # doctest: +SKIP
    """
    graphs = [build_graph(recording, step) for recording, step in zip((a, b), steps, strict=True)]
    changed = compare(*graphs)
    spreads = [step_spread(recording).with_columns(run=pl.lit(name)) for recording, name in ((a, "a"), (b, "b"))]
    taken = pl.Series([graph.step for graph in graphs])
    runs = pl.concat(spreads).with_columns(step=taken).select("run", "step", pl.exclude("run", "step"))
    total = changed.filter(pl.col("level") == "step").row(0, named=True)
    sections = [
        Section("runs", "The two runs", "Noise: how far a run's steps scatter; a change within it is none.", runs)
    ]
    for level, rows in changed.group_by("level", maintain_order=True):
        name = str(level[0])
        sections.append(Section(name, f"By {name}", "", rows.drop("level")))
    return Report(
        title=f"Step {graphs[0].step} of a against step {graphs[1].step} of b",
        summary=f"b takes {format_ns(total['mean_diff_ns'])} more than a, in the mean of its ranks (mean diff). "
        "Each table adds up to that.",
        sections=tuple(sections),
    )


def write_report(report: Report, folder: str | Path, *, run: Run | None = None) -> list[Path]:
    """Write a step's report: `ops.parquet`, `edges.parquet`, `report.html`, `step.perfetto.json.gz`.

    Parameters
    ----------
    report
        What `step_report` gives.
    folder
        Made if it is not there; files of these names are replaced, each as a whole.
    run
        Adds what the profiler recorded to the Perfetto file.

    Returns
    -------
    list of Path
        The files written.
    """
    assert report.result is not None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    result, page = report.result, report.page()
    writers: dict[str, Callable[[Path], object]] = {
        "ops.parquet": result.ops.write_parquet,
        "edges.parquet": result.graph.edges.write_parquet,
        "report.html": lambda path: path.write_text(page, encoding="utf-8"),
        "step.perfetto.json.gz": lambda path: write_perfetto(result, path, run=run),
    }
    for name, write in writers.items():
        with whole(folder / name) as part:
            write(part)
    return [folder / name for name in writers]


def _shortened(table: pl.DataFrame) -> pl.DataFrame:
    cut = {}
    for name in NAME_CHARACTERS.keys() & set(table.columns):
        text, most = pl.col(name), NAME_CHARACTERS[name]
        cut[name] = pl.when(text.str.len_chars() > most).then(text.str.head(most - 1) + "…").otherwise(text)
    return table.with_columns(**cut)


def _sections(sections: Sequence[Section]) -> str:
    parts = []
    for section in sections:
        table = html_table(section.table, max_rows=HTML_ROWS) if section.table.height else ""
        parts.append(
            f'<section id="{section.key}"><h2>{html.escape(section.title)}</h2><p>{html.escape(section.note)}</p>'
            f'<div class="table">{table}</div></section>'
        )
    return "".join(parts)


def _charts(report: Report) -> list[tuple[alt.Chart | alt.LayerChart, str]]:
    """The charts of a step with what their captions say."""
    from lumos_nb import charts

    result = report.result
    if result is None:
        return []
    ranks = result.ops["rank"].unique().sort().to_list()
    on_path = (
        result.composition.group_by("rank").agg(pl.sum("time_ns")).sort("time_ns", "rank", descending=[True, False])
    )
    shown = sorted([*on_path["rank"], *(rank for rank in ranks if rank not in set(on_path["rank"]))][:DRAWN_RANKS])
    of_all = (
        "" if len(shown) == len(ranks) else f" Ranks {', '.join(map(str, shown))} of {len(ranks)}, by their time on it."
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
th, td {{ padding: .2em .9em .2em 0; vertical-align: top; overflow-wrap: anywhere; min-width: 3.5em }}
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
