"""Charts shown: in JupyterLab without a network, as PNG and SVG, in a light or a dark theme."""

from __future__ import annotations

import base64
import builtins
import os
import struct
import zlib
from typing import Any, Literal, get_args

import altair as alt

from lumos_nb.charts.style import EDGE, INK, PALER, PREDICTED
from lumos_nb.errors import InputError, require_kinds, require_number, require_word

Theme = Literal["light", "dark"]

CHART = alt.TopLevelMixin
"""What every function of the package returns."""
JUPYTERLAB_MIME = "application/vnd.vegalite.v5+json"
"""JupyterLab 4 brings Vega-Lite 5, which draws these charts; altair's own type it ignores, and nbformat refuses it."""


UNTITLED = "a chart"
"""What is said of the picture of a chart without a title."""
_PAPER, _LETTERS, _LINES = "#111111", "#DDDDDD", "#444444"
_LABELS = {"labelColor": _LETTERS, "titleColor": _LETTERS}
DARK = {
    "background": _PAPER,
    "title": {"color": _LETTERS, "subtitleColor": _LETTERS},
    "axis": {**_LABELS, "gridColor": _LINES, "domainColor": "#888888", "tickColor": "#888888"},
    "legend": _LABELS,
    "header": _LABELS,
    "text": {"color": _LETTERS},
    "view": {"stroke": _LINES},
}
"""What the dark theme sets; its paper is that of JupyterLab's."""
_ON_DARK = "(isString(background) && luminance(background) < 0.4)"
_EXCHANGED = {
    INK: {"expr": f"{_ON_DARK} ? '{EDGE}' : '{INK}'"},
    EDGE: {"expr": "background"},
    PREDICTED: {"expr": f"{_ON_DARK} ? '{PALER}' : '{PREDICTED}'"},
}
_FOLLOWING = {
    "text": {"color": _EXCHANGED[INK]},
    "axis": {"gridColor": {"expr": f"{_ON_DARK} ? '#555555' : '#DDDDDD'"}},
}


def in_theme(spec: dict[str, Any], theme: Theme) -> dict[str, Any]:
    """A chart's specification in a theme: dark is drawn on black, light in the colours of what shows it.

    That draws on white, but for JupyterLab in its dark theme: ink and edges are what its background wants.
    """
    setting = {**_FOLLOWING, **DARK} if theme == "dark" else _FOLLOWING
    config = spec.get("config", {})
    merged = {key: {**value, **config.get(key, {})} for key, value in setting.items() if isinstance(value, dict)}
    paper = {"background": DARK["background"]} if theme == "dark" else {}
    drawn = {key: value if key == "datasets" else _exchanged(value) for key, value in spec.items()}
    return {**drawn, "config": {**_exchanged(config), **merged, **paper}}


def _exchanged(value: Any) -> Any:
    """The same with ink and edges as expressions."""
    if isinstance(value, dict):
        return {key: _exchanged(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_exchanged(one) for one in value]
    return _EXCHANGED.get(value, value) if isinstance(value, str) else value


def asked_theme() -> Theme:
    """What `LUMOS_NB_THEME` says."""
    return "dark" if os.environ.get("LUMOS_NB_THEME") == "dark" else "light"


def mime_bundle(spec: dict[str, Any], *, still: bool = True, **_options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A chart as notebooks keep it: its specification, a PNG of it (unless `LUMOS_NB_STATIC=0`), and a line of text.

    JupyterLab draws it in its own theme, its image is light; with `LUMOS_NB_THEME=dark` both are dark everywhere.

    A panel that redraws it leaves the PNG out (`still=False`).

    altair's renderer "lumos_nb".
    """
    spec = in_theme(spec, asked_theme())
    interactive = {**spec, "$schema": "https://vega.github.io/schema/vega-lite/v5.json"}
    bundle: dict[str, Any] = {JUPYTERLAB_MIME: interactive, "text/plain": "a chart, which this program cannot show"}
    if os.environ.get("LUMOS_NB_STATIC") == "0" or not still:
        return bundle, {}
    png = to_png(spec)
    width, height = struct.unpack(">II", png[16:24])
    seen = {"width": width // 2, "height": height // 2, "alt": described(spec)}
    return {**bundle, "image/png": base64.b64encode(png).decode()}, {"image/png": seen}


def described(spec: dict[str, Any]) -> str:
    """What a chart's picture shows, for who cannot see it: its title and subtitle, else those of its parts."""
    title = spec.get("title", "")
    lines = [title.get("text", ""), title.get("subtitle", "")] if isinstance(title, dict) else [title]
    text = ". ".join(" ".join(line) if isinstance(line, list) else line for line in lines if line)
    parts = [part for key in ("hconcat", "vconcat", "concat", "layer") for part in spec.get(key, ())]
    inner = (described(part) for part in (*parts, *([spec["spec"]] if "spec" in spec else ())))
    return text or next((found for found in inner if found != UNTITLED), UNTITLED)


def to_png(chart: alt.TopLevelMixin | dict[str, Any], *, scale: float = 2, theme: Theme = "light") -> bytes:
    """Draw a chart, or its specification, as the bytes of a PNG file with `scale` times the chart's pixels.

    Raises
    ------
    InputError
        It is no chart, or nothing that Vega-Lite draws; `scale` is not from 0.1 to 10, or there is no such `theme`.

    Examples
    --------
    >>> Path("step.png").write_bytes(to_png(timeline(result)))
    """
    import vl_convert

    require_kinds(chart=(chart, CHART | dict))
    require_word(get_args(Theme), theme=theme)
    require_number(0.1, 10, scale=scale)
    spec = in_theme(chart if isinstance(chart, dict) else chart.to_dict(), theme)
    try:
        png = vl_convert.vegalite_to_png(spec, vl_version=_vega_lite(), scale=float(scale))
    except ValueError as error:
        raise InputError(f"chart is nothing that Vega-Lite draws: {error}") from None
    return _deflated(png)


def to_svg(chart: alt.TopLevelMixin) -> str:
    """Draw a chart as the text of an SVG file, without what its tooltips say.

    Raises
    ------
    InputError
        It is no chart.

    Examples
    --------
    >>> Path("step.svg").write_text(to_svg(timeline(result)))
    """
    import vl_convert

    require_kinds(chart=(chart, CHART))
    spec = chart.to_dict()
    spec["config"] = spec.get("config", {}) | {"aria": False}  # else each bar repeats its tooltip
    spec["padding"] = {"left": 40, "right": 40, "top": 5, "bottom": 5}  # for a reader whose letters are wider
    svg: str = vl_convert.vegalite_to_svg(spec, vl_version=_vega_lite())
    return svg


def _vega_lite() -> str:
    """The version of Vega-Lite that altair writes, as vl-convert calls it."""
    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def _deflated(png: bytes) -> bytes:
    """The same image, its pixels compressed as well as zlib can: vl-convert leaves it five times as large."""
    chunks, at = [], 8
    while at < len(png):
        size = int.from_bytes(png[at : at + 4]) + 12
        chunks.append((png[at + 4 : at + 8], png[at + 8 : at + size - 4]))
        at += size
    pixels = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    before, after = ([c for c in chunks if (c[0] == b"IEND") == end and c[0] != b"IDAT"] for end in (False, True))
    kept = [*before, (b"IDAT", zlib.compress(pixels, 9)), *after]
    return png[:8] + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in kept
    )


alt.renderers.register("lumos_nb", mime_bundle)
if hasattr(builtins, "__IPYTHON__"):
    alt.renderers.enable("lumos_nb")
