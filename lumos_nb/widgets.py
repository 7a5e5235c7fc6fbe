"""Panels for a notebook: controls that call the functions of this package, and what these return. No arithmetic here.

Every panel has `controls` by name, `result` (what the functions returned last) and `code`, the lines that make it again
without a panel. What cannot be, says so where results stand, and the panel goes on. JupyterLab and Voila draw charts by
themselves, without a network.

This is the only module that imports ipywidgets.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import ipywidgets as ui
import polars as pl

from lumos_nb import charts, whatif
from lumos_nb.config import fabrics, find_gpu, gpus
from lumos_nb.costs.calibration import Calibration
from lumos_nb.critical_path import Result, replay
from lumos_nb.display import format_ns, format_share, html_table
from lumos_nb.errors import LumosError, require_kinds
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.layout import Cluster, Parallelism, Training
from lumos_nb.partition import breakdown, compare
from lumos_nb.traces.run import Run
from lumos_nb.transformer import Transformer, models
from lumos_nb.workloads.llm.estimates import Estimate, estimate
from lumos_nb.workloads.llm.schedule import CHUNKS
from lumos_nb.workloads.llm.screening import Found, search

Controls = Mapping[str, ui.ValueWidget]
Shown = Iterable[Any]
"""What is displayed: charts, frames, rich objects."""
NS_PER_MS = 1_000_000


class Panel(ui.VBox):  # type: ignore[misc]
    """Controls above what they make.

    Parameters
    ----------
    controls
        Widgets by the name of the argument that their value is.
    make
        Called with the controls' values; what it returns is `result`.
    draw
        What is displayed of a result, which it is called with, and with the controls' values.
    code
        The lines that make the same, of the controls' values.
    button
        Its text, for what takes seconds: make in a thread once it is pressed. None: whenever a control changes.
    """

    def __init__(
        self,
        controls: Controls,
        make: Callable[..., Any],
        draw: Callable[..., Shown],
        code: Callable[..., str],
        *,
        button: str | None = None,
    ) -> None:
        self.controls, self.result = dict(controls), None
        self._make, self._draw, self._lines = make, draw, code
        self._area, self._code = ui.Output(), ui.HTML()
        grid = ui.Layout(grid_template_columns="repeat(auto-fill, minmax(310px, 1fr))")
        rows: list[ui.Widget] = [ui.GridBox([*self.controls.values()], layout=grid)]
        if button is not None:
            self.start = ui.Button(description=button, button_style="primary")
            self.start.on_click(lambda _: threading.Thread(target=self.update, daemon=True).start())
            rows.append(self.start)
        super().__init__([*rows, self._area, self._code])
        changed = self._tell if button is not None else self.update
        for control in self.controls.values():
            control.observe(lambda _: changed(), "value")
        changed()

    @property
    def values(self) -> dict[str, Any]:
        """The controls' values by name."""
        return {name: control.value for name, control in self.controls.items()}

    @property
    def code(self) -> str:
        """The lines that make `result` again."""
        return self._lines(**self.values)

    def update(self) -> None:
        """Make and display the result of the controls as they stand; a refusal is displayed as it says."""
        try:
            values = self.values
            self.result = self._make(**values)
            shown = [_output(one) for one in self._draw(self.result, **values)]
        except LumosError as error:
            self.result, shown = None, [_output(str(error))]
        self._area.outputs = tuple(shown)  # at once, and from any thread
        self._tell()

    def _tell(self) -> None:
        self._code.value = f"<pre style='margin: 8px 0'>{html.escape(self.code)}</pre>"


def _output(one: Any) -> dict[str, Any]:
    """One thing as a notebook's output: a chart without its PNG, which would take longer than all else."""
    metadata: dict[str, Any] = {}
    if isinstance(one, charts.CHART):
        data, metadata = charts.mime_bundle(one.to_dict(), still=False)
    elif isinstance(one, str):
        data = {"text/html": f"<div style='white-space: pre-line'>{html.escape(one)}</div>", "text/plain": one}
    elif isinstance(one, pl.DataFrame):
        data = {"text/html": html_table(one), "text/plain": str(one)}
    else:
        data = {"text/html": one._repr_html_(), "text/plain": repr(one)}
    return {"output_type": "display_data", "data": data, "metadata": metadata}


def _choice(name: str, options: Sequence[Any], value: Any) -> ui.Dropdown:
    return ui.Dropdown(options=options, value=value, description=name.replace("_", " "), style=WIDE)


def _number(name: str, value: int) -> ui.BoundedIntText:
    return ui.BoundedIntText(value=value, min=0, max=10**9, description=name.replace("_", " "), style=WIDE)


WIDE = {"description_width": "110px"}
MOST_ROWS, WIDTH_PX = 10, 760
OF_AN_OP = ("rank", "lane", "kind", "name", "start_ns", "dur_ns", "slack_ns")
SCALED = ("kernel", "cpu", "gap", "launch", "memcpy", "memset", "comm", "wait")
"""Kinds of ops that get a slider."""


def explore(run: Run, other: Run | None = None) -> Panel:
    """Look through a run: a window of a step on some ranks, where its time goes, and its longest ops.

    Parameters
    ----------
    run
        To look at.
    other
        Another run of the same job: its breakdown beside the first one's, and what changed from one to the other.

    Examples
    --------
    >>> explore(load_run(datasets.path("gpt-ddp")))  # doctest: +SKIP
    """
    require_kinds(run=(run, Run), other=(other or run, Run))
    recordings = [Recording.of(one) for one in (run, other) if one is not None]
    steps = recordings[0].step_times().filter(~pl.col("edge"))["step"].to_list() or [*recordings[0].steps]
    ranks = tuple(recordings[0].ops["rank"].unique().sort())
    window = ui.IntRangeSlider(description="window (ms)", continuous_update=False, style=WIDE)

    @cache
    def replayed(step: int) -> list[Result]:
        return [replay(build_graph(one, step)) for one in recordings]

    def make(step: int, **_: Any) -> list[Result]:
        found = replayed(step)
        window.max = found[0].makespan_ns // NS_PER_MS + 1
        return found

    def draw(found: list[Result], step: int, ranks: Sequence[int], window: tuple[int, int]) -> Shown:
        begin_ns, end_ns = (ms * NS_PER_MS for ms in window)
        window_ns = (begin_ns, min(end_ns, found[0].makespan_ns)) if end_ns > begin_ns else None
        yield charts.timeline(found[0], window_ns=window_ns, ranks=ranks, width_px=WIDTH_PX)
        yield charts.breakdown_bars({name: breakdown(one) for name, one in zip(("", "other"), found, strict=False)})
        if other:
            yield compare(*found).head(MOST_ROWS)
        else:
            yield found[0].ops.filter(pl.col("rank").is_in(ranks)).select(*OF_AN_OP).top_k(MOST_ROWS, by="dur_ns")

    make(steps[0])
    window.value = (0, window.max)
    controls = {
        "step": _choice("step", steps, steps[0]),
        "ranks": ui.SelectMultiple(options=ranks, value=ranks, description="ranks", rows=3, style=WIDE),
        "window": window,
    }
    lines = "result = ln.replay(ln.build_graph(run, step={step}))\ncharts.timeline(result)\nln.breakdown(result)"
    return Panel(controls, make, draw, lambda **values: lines.format(**values))


def what_if(graph: Graph) -> Panel:
    """Make kinds of ops faster or slower, and see the step: a slider for each kind that the graph has.

    Parameters
    ----------
    graph
        Of one step.

    Examples
    --------
    >>> what_if(build_graph(load_run(datasets.path("gpt-ddp")), step=3))  # doctest: +SKIP
    """
    before = replay(graph)
    present = set(graph.ops.filter(pl.col("dur_ns") > 0)["kind"]) - {"boundary"}
    kinds = [kind for kind in SCALED if kind in present]

    def make(**scales: float) -> Result:
        edited = graph
        for kind, by in scales.items():
            if by != 1:
                edited = whatif.scale(edited, pl.col("kind") == kind, by=by)
        return before if edited is graph else replay(edited)

    def draw(after: Result, **_: float) -> Shown:
        change = format_share(after.step_ns / before.step_ns - 1)
        yield (f"{format_ns(before.step_ns)} as it was, {format_ns(after.step_ns)} then: {change}")
        yield charts.breakdown_bars({"as it was": breakdown(before), "then": breakdown(after)})

    def code(**scales: float) -> str:
        changed = {kind: round(by, 3) for kind, by in scales.items() if by != 1}
        return f"graph = ln.build_graph(run, step={graph.step})\nln.sweep(graph, [{changed!r}])"

    slider = partial(ui.FloatSlider, value=1.0, min=0.0, max=3.0, step=0.05, continuous_update=False, style=WIDE)
    return Panel({kind: slider(description=f"{kind} x") for kind in kinds}, make, draw, code)


def configure(model: str = "llama-3-8b", gpu: str = "H100-SXM-80GB", nodes: int = 1) -> Panel:
    """Estimate a step from configuration: model, layout, batch, GPU and network, each a control.

    Beside the estimate stand the breakdown of every pipeline rank and its memory, before the last change too.

    Parameters
    ----------
    model, gpu, nodes
        What to begin with: names of `Transformer.named` and of a data sheet, and nodes of eight GPUs.

    Examples
    --------
    >>> configure("gpt3-175b", nodes=16)  # doctest: +SKIP
    """
    Transformer.named(model), find_gpu(gpu)
    last: list[Estimate] = []

    def make(**values: Any) -> Estimate:
        found = estimate(*_configured(values))
        last[:] = [*last[-1:], found]
        return found

    def draw(found: Estimate, **_: Any) -> Shown:
        yield found
        names = ("",) if len(last) < 2 else ("before", "then")
        yield charts.breakdown_bars({name: one.breakdown for name, one in zip(names, last, strict=True)})
        yield charts.memory_bars(found.memory, limit_bytes=found.cluster.gpu_sheet.memory_bytes)

    return Panel(_configuration(model, gpu, nodes), make, draw, _configured_code)


def _configuration(model: str, gpu: str, nodes: int) -> dict[str, ui.ValueWidget]:
    sizes = [2**n for n in range(8)]
    named = [fabric.name for fabric in fabrics()]
    controls: dict[str, ui.ValueWidget] = {
        "model": _choice("model", list(models()), model),
        "gpu": _choice("gpu", [sheet.name for sheet in gpus()], gpu),
        "nodes": _number("nodes", nodes),
        "inside": _choice("inside", named, "NVLink4 NVSwitch"),
        "between": _choice("between", named, "InfiniBand NDR 400"),
    }
    controls |= {name: _choice(name, sizes, 1) for name in ("tp", "pp", "cp", "ep")}
    controls |= {"dp": _number("dp", 8 * nodes), "zero": _choice("zero", [0, 1, 2, 3], 3)}
    controls |= {"schedule": _choice("schedule", list(CHUNKS), "1f1b"), "chunks": _number("chunks", 1)}
    controls |= {"sequence_parallel": ui.Checkbox(value=False, description="sequence parallel")}
    controls |= {"micro_batch": _number("micro_batch", 1), "global_batch": _number("global_batch", 64 * nodes)}
    controls |= {"seq": _number("seq", 4096), "recompute": _choice("recompute", ["none", "selective", "full"], "none")}
    controls |= {"dtype": _choice("dtype", ["bf16", "fp16", "fp8", "fp32"], "bf16")}
    return controls


OF_LAYOUT = ("tp", "pp", "dp", "cp", "ep", "zero", "schedule", "chunks", "sequence_parallel")
OF_TRAINING = ("micro_batch", "global_batch", "seq", "recompute", "dtype")
OF_CLUSTER = ("gpu", "nodes", "inside", "between")


def _configured(values: Mapping[str, Any]) -> tuple[Transformer, Parallelism, Training, Cluster]:
    layout, train, cluster = ({name: values[name] for name in names} for names in (OF_LAYOUT, OF_TRAINING, OF_CLUSTER))
    return Transformer.named(values["model"]), Parallelism(**layout), Training(**train), Cluster(**cluster)


def _configured_code(**values: Any) -> str:
    def call(kind: str, names: Sequence[str]) -> str:
        return f"ln.{kind}({', '.join(f'{name}={values[name]!r}' for name in names)})"

    parts = (call("Parallelism", OF_LAYOUT), call("Training", OF_TRAINING), call("Cluster", OF_CLUSTER))
    return (
        f"model = ln.Transformer.named({values['model']!r})\nln.estimate(\n    model,\n    "
        + ",\n    ".join(parts)
        + ")"
    )


def choose_layout(model: Transformer, cluster: Cluster, train: Training, **ranges: Any) -> Panel:
    """Search for layouts with a bar of progress, and a button that stops it.

    Parameters
    ----------
    model, cluster, train, ranges
        As for `search`.

    Examples
    --------
    >>> choose_layout(Transformer.named("llama-3-70b"), cluster, train, cp=1)  # doctest: +SKIP
    """
    bar, stop, stopped = ui.IntProgress(layout={"width": "60%"}), ui.Button(description="stop"), threading.Event()
    stop.on_click(lambda _: stopped.set())

    def say(what: str, done: int, of: int) -> None:
        bar.description, bar.max, bar.value = what, of, done
        if stopped.is_set():
            raise Stopped("stopped: press search to begin again.")

    def make(keep: int, spare: float) -> Found:
        stopped.clear()
        return search(model, cluster, train, keep=keep, spare=spare, progress=say, **ranges)

    def draw(found: Found, **_: Any) -> Shown:
        yield found
        yield charts.layouts(found.frame)
        yield charts.pareto(found.feasible, found.pareto)

    controls = {
        "keep": _number("keep", 20),
        "spare": ui.FloatSlider(value=0.1, min=0, max=0.5, step=0.05, description="memory to spare", style=WIDE),
    }
    given = "".join(f", {name}={value!r}" for name, value in ranges.items())
    lines = (
        f"found = ln.search(model, cluster, train, keep={{keep}}, spare={{spare:g}}{given})\nfound.best\nfound.pareto"
    )
    panel = Panel(controls, make, draw, lambda **values: lines.format(**values), button="search")
    panel.children = (*panel.children[:2], ui.HBox([stop, bar]), *panel.children[2:])
    return panel


class Stopped(LumosError):
    """A search was stopped by its button."""


def inspect(calibration: Calibration) -> Panel:
    """What a calibration knows of an op: on how many rows, with which error on groups left out.

    Parameters
    ----------
    calibration
        One of `load_calibration`.

    Examples
    --------
    >>> inspect(load_calibration("H100-SXM-80GB"))  # doctest: +SKIP
    """
    require_kinds(calibration=(calibration, Calibration))
    table = calibration.coverage()
    cells = ["all", *table["cell"].unique().sort()]

    def make(cell: str) -> pl.DataFrame:
        return table if cell == "all" else table.filter(cell=cell)

    def code(cell: str) -> str:
        lines = f"ln.load_calibration({calibration.name!r}).coverage()"
        return lines if cell == "all" else f"{lines}.filter(cell={cell!r})"

    return Panel({"cell": _choice("cell", cells, "all")}, make, lambda rows, **_: [rows], code)
