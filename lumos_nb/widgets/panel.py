"""A panel: controls, what they make, and the lines that make the same."""

from __future__ import annotations

import html
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import ipywidgets as ui
import polars as pl

from lumos_nb import charts
from lumos_nb.display import html_table
from lumos_nb.errors import LumosError, require_whole

Controls = Mapping[str, ui.ValueWidget]
Shown = Iterable[Any]
"""What is displayed: charts, frames, texts, rich objects."""

WIDE = {"description_width": "110px"}
MOST_ROWS, WIDTH_PX = 10, 620
"""Of a table and of a chart: what a notebook's cell has room for beside labels, without a bar to scroll."""
BELOW: dict[str, Any] = {"orient": "bottom", "columns": 4}
"""A legend that leaves the width to the plot."""


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
    fit
        Called first, to give controls what follows from others; that makes nothing by itself.
    between
        Widgets of its own between the controls and what they make.
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
        fit: Callable[[Controls], None] = lambda _: None,
        between: Sequence[ui.Widget] = (),
        button: str | None = None,
    ) -> None:
        self.controls, self.result = dict(controls), None
        self._make, self._draw, self._lines, self._fit, self._fitting = make, draw, code, fit, False
        self._area, self._code = ui.Output(), ui.HTML()
        grid = ui.Layout(grid_template_columns="repeat(auto-fill, minmax(310px, 1fr))")
        rows: list[ui.Widget] = [ui.GridBox([*self.controls.values()], layout=grid)]
        if button is not None:
            self.start = ui.Button(description=button, button_style="primary")
            self.start.on_click(lambda _: threading.Thread(target=self.update, daemon=True).start())
            rows.append(self.start)
        super().__init__([*rows, *between, self._area, self._code])
        self.add_class("lumos-panel")
        changed = self._tell if button is not None else self.update
        for control in self.controls.values():
            control.observe(lambda _: changed(), "value")
        changed()

    @property
    def values(self) -> dict[str, Any]:
        """The controls' values by name, numbers as `code` writes them."""
        given = {name: control.value for name, control in self.controls.items()}
        return {name: round(value, 9) if isinstance(value, float) else value for name, value in given.items()}

    @property
    def code(self) -> str:
        """The lines that make `result` again."""
        return self._lines(**self.values)

    def update(self) -> None:
        """Make and display the result of the controls as they stand; a refusal is displayed as it says."""
        if self._fitting:
            return
        try:
            self._fitting = True
            self._fit(self.controls)
            self._fitting = False
            values = self.values
            self.result = self._make(**values)
            shown = [_output(one) for one in self._draw(self.result, **values)]
        except LumosError as error:
            self.result, shown = None, [_output(str(error))]
        finally:
            self._fitting = False
        self._area.outputs = tuple(shown)  # at once, and from any thread
        self._tell()

    def _tell(self) -> None:
        self._code.value = (
            f"<pre style='margin: 8px 0; font-family: monospace; line-height: 1.4'>{html.escape(self.code)}</pre>"
        )


def _output(one: Any) -> dict[str, Any]:
    """One thing as a notebook's output: a chart without its PNG and unchecked, which would take longer than all."""
    metadata: dict[str, Any] = {}
    if isinstance(one, charts.CHART):
        data, metadata = charts.mime_bundle(one.to_dict(validate=False), still=False)
    elif isinstance(one, str):
        data = {"text/html": f"<div style='white-space: pre-line'>{html.escape(one)}</div>", "text/plain": one}
    elif isinstance(one, pl.DataFrame):
        data = {"text/html": html_table(one), "text/plain": str(one)}
    else:
        data = {"text/html": one._repr_html_(), "text/plain": repr(one)}
    return {"output_type": "display_data", "data": data, "metadata": metadata}


def choice(name: str, options: Sequence[Any], value: Any) -> ui.Dropdown:
    """One of several."""
    return ui.Dropdown(options=options, value=value, description=name.replace("_", " "), style=WIDE)


MOST = 10**12


def number(name: str, value: int, *, least: int = 0) -> ui.BoundedIntText:
    """A whole number."""
    require_whole(least, MOST, **{name: value})
    return ui.BoundedIntText(value=value, min=least, max=MOST, description=name.replace("_", " "), style=WIDE)


slider = partial(ui.FloatSlider, continuous_update=False, style=WIDE)
"""A number that is drawn; its value counts once it is let go."""


def literal(value: Any) -> str:
    """A value as Python writes it; what is no number so that it runs."""
    return repr(value) if not isinstance(value, float) or math.isfinite(value) else f"float('{value}')"


def arguments(values: Mapping[str, Any]) -> str:
    """Values by name as the arguments of a call."""
    return ", ".join(f"{name}={literal(value)}" for name, value in values.items())
