"""The gallery shows every chart, in both themes, and asks no network for anything."""

from __future__ import annotations

import inspect
import re

import pytest
import vl_convert

from benchmarks.gallery import GALLERY, main
from lumos_nb import charts
from lumos_nb.charts.rendering import described, in_theme
from lumos_nb.charts.style import EDGE, INK, PALER, PREDICTED


def test_every_chart_has_its_place():
    drawn = {name for entry in GALLERY.values() for name in re.findall(r"charts\.(\w+)\(", entry.call)}
    public = {
        name
        for name, value in vars(charts).items()
        if inspect.isfunction(value) and str(value.__annotations__["return"]).startswith("alt.")
    }
    assert drawn == public


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("gallery")
    main(out, ["breakdown", "learning_curve"])
    return out


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_its_pages_draw_without_a_network(folder, theme):
    text = (folder / f"{theme}.html").read_text()
    sources = re.findall(r"""(?:src|href)=["']?([^"'> ]+)""", text)
    assert sources == ["vega.js"]
    assert (folder / "vega.js").stat().st_size > 500_000
    assert text.count("vegaEmbed(") == 2
    assert sorted(path.stem for path in (folder / theme).glob("*.png")) == ["breakdown", "learning_curve"]


@pytest.mark.parametrize("version", ["6.4", "5.20"], ids=["Vega-Lite 6", "JupyterLab's 5"])
def test_ink_and_edges_follow_the_background_that_a_chart_is_drawn_on(version):
    rows = [{"x": 1, "kind": kind} for kind in ("a", "b")]
    scale = {"domain": ["a", "b"], "range": [INK, PREDICTED]}
    spec = {
        "data": {"values": rows},
        "mark": {"type": "bar", "stroke": EDGE},
        "encoding": {
            "x": {"field": "x", "type": "quantitative"},
            "color": {"field": "kind", "type": "nominal", "scale": scale},
        },
    }

    def colours(made_for, **shown_by):
        svg = vl_convert.vegalite_to_svg(in_theme(spec, made_for), vl_version=version, **shown_by)
        marks = re.search(r'class="mark-rect role-mark.*?</g>', svg).group(0)
        return re.findall('fill="(.*?)"', marks), {*re.findall('stroke="(.*?)"', marks)}

    assert colours("light") == ([INK, PREDICTED], {"white"})
    assert colours("light", theme="dark") == (["#FFFFFF", PALER], {"#333"}), "as JupyterLab asks for in its dark theme"
    assert colours("dark") == (["#FFFFFF", PALER], {"#111111"})


def test_dark_is_drawn_on_black_and_keeps_what_a_chart_sets_itself():
    spec = GALLERY["learning_curve"].draw().to_dict() | {"config": {"view": {"continuousWidth": 300}}}
    dark = in_theme(spec, "dark")
    assert dark["config"]["background"] == "#111111"
    assert dark["config"]["view"] == {"stroke": "#444444", "continuousWidth": 300}
    assert dark["datasets"] == spec["datasets"]
    assert charts.to_png(spec, theme="dark") != charts.to_png(spec)


def test_a_notebook_gets_the_theme_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("LUMOS_NB_STATIC", "0")
    spec = GALLERY["breakdown"].draw().to_dict()
    assert "background" not in charts.mime_bundle(spec)[0][charts.JUPYTERLAB_MIME]["config"]
    monkeypatch.setenv("LUMOS_NB_THEME", "dark")
    assert charts.mime_bundle(spec)[0][charts.JUPYTERLAB_MIME]["config"]["background"] == "#111111"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"title": "Time"}, "Time"),
        ({"title": {"text": ["Two", "lines"], "subtitle": "in ms"}}, "Two lines. in ms"),
        ({"hconcat": [{"mark": "bar"}, {"spec": {"title": {"text": "Inner"}}}]}, "Inner"),
        ({"mark": "bar"}, "a chart"),
    ],
    ids=["a line", "title and subtitle", "the first part that has one", "none"],
)
def test_a_picture_is_described_by_its_title(spec, said):
    assert described(spec) == said
