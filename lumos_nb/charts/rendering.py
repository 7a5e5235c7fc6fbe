"""Charts shown: in JupyterLab without a network, as PNG and SVG, in a light or a dark theme."""

from __future__ import annotations

import base64
import builtins
import os
import struct
import zlib
from typing import Any

import altair as alt

CHART = alt.TopLevelMixin
"""What every function of the package returns."""
JUPYTERLAB_MIME = "application/vnd.vegalite.v5+json"
"""JupyterLab 4 brings Vega-Lite 5, which draws these charts; altair's own type it ignores, and nbformat refuses it."""


def mime_bundle(spec: dict[str, Any], *, still: bool = True, **_options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A chart as notebooks keep it: its specification, a PNG of it (unless `LUMOS_NB_STATIC=0`), and a line of text.

    A panel that redraws it leaves the PNG out (`still=False`).

    altair's renderer "lumos_nb".
    """
    interactive = {**spec, "$schema": "https://vega.github.io/schema/vega-lite/v5.json"}
    bundle: dict[str, Any] = {JUPYTERLAB_MIME: interactive, "text/plain": "a chart, which this program cannot show"}
    if os.environ.get("LUMOS_NB_STATIC") == "0" or not still:
        return bundle, {}
    png = to_png(spec)
    width, height = struct.unpack(">II", png[16:24])
    size = {"width": width // 2, "height": height // 2}
    return {**bundle, "image/png": base64.b64encode(png).decode()}, {"image/png": size}


def to_png(chart: alt.TopLevelMixin | dict[str, Any], *, scale: float = 2) -> bytes:
    """Draw a chart, or its specification, as the bytes of a PNG file with `scale` times the chart's pixels.

    Examples
    --------
    >>> Path("step.png").write_bytes(to_png(timeline(result)))  # doctest: +SKIP
    """
    import vl_convert

    spec = chart if isinstance(chart, dict) else chart.to_dict()
    return _deflated(vl_convert.vegalite_to_png(spec, vl_version=_vega_lite(), scale=scale))


def to_svg(chart: alt.TopLevelMixin) -> str:
    """Draw a chart as the text of an SVG file, without what its tooltips say.

    Examples
    --------
    >>> Path("step.svg").write_text(to_svg(timeline(result)))  # doctest: +SKIP
    """
    import vl_convert

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
