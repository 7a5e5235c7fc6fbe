"""A chart that tells Python what is brushed or clicked in it.

altair's own widget, with all its JavaScript inside: it needs no network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

REST_MS = 200
"""How long a brush rests before Python hears of it: charts drawn while another still is may come in the wrong order."""


class LinkedChart(alt.JupyterChart):
    """A place for charts, one at a time, of which one selection is listened to.

    Parameters
    ----------
    heard
        Called with what was selected: of a brush `(least, most)` or None, of a click a row's `fields` by name.
    fields
        Of the clicked row; none for a brush along x.
    """

    def __init__(self, heard: Callable[[Any], None], fields: Sequence[str] = ()) -> None:
        alt.JupyterChart.enable_offline()
        self._heard, self._fields = heard, list(fields)
        # None is drawn at once; a chart is drawn while the page goes on, and might come after the one that follows it.
        nothing: Any = None
        super().__init__(nothing, debounce_wait=REST_MS, max_wait=False, embed_options={"actions": False})

    def show(self, chart: alt.Chart | alt.LayerChart, brushed: tuple[float, float] | None = None) -> None:
        """Show a chart; `brushed` stands in it from the beginning."""
        if self._fields:
            chosen = alt.selection_point(name="chosen", fields=self._fields)
        else:
            mark = alt.BrushConfig(fill="#808080", fillOpacity=0.3, stroke="#808080", strokeWidth=2)
            at: Any = {"x": list(brushed)} if brushed else alt.Undefined
            chosen = alt.selection_interval(name="chosen", encodings=["x"], mark=mark, value=at)
        self.chart = chart.add_params(chosen)
        self.selections.observe(lambda change: self._tell(change["new"].value), "chosen")

    def _tell(self, value: Any) -> None:
        if self._fields:
            for row in value:
                self._heard(row)
        else:
            self._heard(next(((min(span), max(span)) for span in value.values()), None))
