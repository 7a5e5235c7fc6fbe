"""A chart that tells Python what is brushed or clicked in it, with all its JavaScript inside: it needs no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import altair as alt
import anywidget
import ipywidgets as ui
import traitlets
import vl_convert

from lumos_nb.charts.rendering import asked_theme, in_theme

PROGRAM = """
const REST_MS = 200;

async function render({ model, el }) {
    const source = await model.widget_manager.get_model(model.get("source").slice("IPY_MODEL_".length));
    let shown = null, latest = 0;
    const draw = async () => {
        const turn = ++latest, place = document.createElement("div"), spec = source.get("value");
        if (!spec) return;
        const theme = document.body.dataset.jpThemeLight === "false" ? { theme: "dark" } : {};
        const drawn = await vegaEmbed(place, JSON.parse(spec), { actions: false, ...theme });
        if (turn !== latest) return drawn.finalize();
        shown?.finalize();
        shown = drawn;
        el.replaceChildren(place);
        let rest;
        drawn.view.addSignalListener("chosen", (_, value) => {
            clearTimeout(rest);
            rest = setTimeout(() => turn === latest && model.send({ chosen: value }), REST_MS);
        });
    };
    const themes = new MutationObserver(draw);
    themes.observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
    source.on("change:value", draw);
    await draw();
    return () => { themes.disconnect(); source.off("change:value", draw); shown?.finalize(); };
}

export default { render };
"""
"""Draws the latest chart of `source` beside the page and then puts it there, so none that comes late can hide another;
tells of a selection once it has rested. The chart comes by a widget of its own: anywidget stops hearing from Python for
good where this program, with Vega inside, takes two seconds to load, as on a busy machine it does."""


@cache
def _program() -> str:
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return vl_convert.javascript_bundle(PROGRAM, vl_version=version)


class LinkedChart(anywidget.AnyWidget):
    """A place for charts, one at a time, of which one selection is listened to.

    Parameters
    ----------
    heard
        Called with what was selected: of a brush `(least, most)` or None, of a click a row's `fields` by name.
    fields
        Of the clicked row; none for a brush along x.
    """

    source = traitlets.Instance(ui.Text).tag(sync=True, **ui.widget_serialization)
    """Holds the specification of the chart as JSON."""

    def __init__(self, heard: Callable[[Any], None], fields: Sequence[str] = ()) -> None:
        self._heard, self._fields = heard, list(fields)
        LinkedChart._esm = _program()
        super().__init__(source=ui.Text())
        self.on_msg(lambda _, message, __: self._tell(message["chosen"]))

    @property
    def spec(self) -> Any:
        """The specification of what is shown."""
        return json.loads(self.source.value)

    def show(self, chart: alt.Chart | alt.LayerChart, brushed: tuple[float, float] | None = None) -> None:
        """Show a chart; `brushed` stands in it from the beginning."""
        if self._fields:
            chosen = alt.selection_point(name="chosen", fields=self._fields)
        else:
            mark = alt.BrushConfig(fill="#808080", fillOpacity=0.3, stroke="#808080", strokeWidth=2)
            at: Any = {"x": list(brushed)} if brushed else alt.Undefined
            chosen = alt.selection_interval(name="chosen", encodings=["x"], mark=mark, value=at)
        self.source.value = json.dumps(in_theme(chart.add_params(chosen).to_dict(validate=False), asked_theme()))

    def _tell(self, value: Any) -> None:
        if self._fields:
            for row in value.get("vlPoint", {}).get("or", ()):
                self._heard(row)
        else:
            self._heard(next(((min(span), max(span)) for span in value.values()), None))
