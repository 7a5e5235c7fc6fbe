"""The gallery shows every chart, in both themes, and asks no network for anything."""

from __future__ import annotations

import inspect
import json
import re

import pytest

from benchmarks.gallery import GALLERY, main
from lumos_nb import charts
from lumos_nb.charts.rendering import described, in_theme
from lumos_nb.charts.style import EDGE, INK


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


def test_dark_is_drawn_on_black_with_white_where_light_has_black():
    spec = GALLERY["learning_curve"].draw().to_dict() | {"mark": {"type": "line", "stroke": INK}}
    spec["config"] = {"view": {"continuousWidth": 300}}
    dark = in_theme(spec, "dark")
    assert in_theme(spec, "light") is spec
    assert dark["mark"]["stroke"] == EDGE
    assert dark["config"]["background"] == "#111111"
    assert dark["config"]["view"] == {"stroke": "#444444", "continuousWidth": 300}
    assert dark["datasets"] == spec["datasets"]
    assert charts.to_png(spec, theme="dark") != charts.to_png(spec)


def test_a_notebook_gets_the_theme_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("LUMOS_NB_STATIC", "0")
    spec = GALLERY["breakdown"].draw().to_dict()
    assert "background" not in json.dumps(charts.mime_bundle(spec)[0])
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
