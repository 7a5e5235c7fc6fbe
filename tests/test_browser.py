"""Notebooks and panels in a real JupyterLab and a real Voila, by a browser that reaches this machine alone.

Screenshots of what was tested lie in `build/browser`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

pytest.importorskip("playwright.sync_api", reason="no playwright")

from playwright.sync_api import Locator, Page, expect

from tests import browser

PICTURES = browser.ROOT / "build" / "browser"
NOTEBOOKS = ("00_quickstart", "10_what_if")

pytestmark = pytest.mark.skipif(browser.chromium() is None, reason="no Chromium: `make browser` installs it with apt")


BUSY = "const after = AbortSignal.timeout; AbortSignal.timeout = (ms) => after.call(AbortSignal, ms === 2000 ? 0 : ms);"
"""Makes anywidget give up at once on programs that it waits two seconds for, as it does on a busy machine: from then on
its widgets hear nothing from Python."""

SHADES = """async (chart) => {
    let canvas = chart;
    if (chart.tagName !== 'CANVAS') {
        const picture = new Image(), size = chart.getBoundingClientRect();
        picture.src = 'data:image/svg+xml,' + encodeURIComponent(new XMLSerializer().serializeToString(chart));
        await picture.decode();
        canvas = Object.assign(document.createElement('canvas'), {width: size.width, height: size.height});
        canvas.getContext('2d').drawImage(picture, 0, 0);
    }
    const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height), count = data.length / 4;
    const shades = Array.from({length: count}, (_, n) => (data[4 * n] + data[4 * n + 1] + data[4 * n + 2]) / 765);
    const many = (which) => shades.filter(which).length;
    return [shades[2 * canvas.width + 2], many((one) => one > 0.8), many((one) => one < 0.05)];
}"""
"""How light a chart's paper is, from 0 to 1, and how many of its pixels are nearly white and nearly black."""


@dataclass
class Opened:
    """Pages by name, and what they asked of other machines."""

    pages: dict[str, Page] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    """Both notebooks, running, and the app."""
    found = Opened()
    PICTURES.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=1000 * browser.PATIENCE_S)
    with ExitStack() as stack:
        lab = stack.enter_context(browser.serving(*browser.lab()))
        voila = stack.enter_context(browser.serving(*browser.voila("notebooks/app/what_if.ipynb")))
        running = stack.enter_context(browser.browser())
        for name in (*NOTEBOOKS, "app"):
            found.pages[name] = browser.page_of(running, found.outside)
            found.pages[name].add_init_script(BUSY)
        for name in NOTEBOOKS:
            browser.run_all(found.pages[name], lab, f"notebooks/{name}.ipynb")
        found.pages["app"].goto(voila.format(""), wait_until="commit")  # the rest comes as its cells run
        yield found


def keep(locator: Locator, name: str) -> None:
    locator.screenshot(path=PICTURES / f"{name}.png")


def drawn(locator: Locator) -> str:
    """A chart as the page has it: its picture."""
    box = locator.bounding_box()
    assert box is not None
    assert box["width"] > 300
    assert box["height"] > 50
    return locator.screenshot().hex()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_without_an_error_and_draws_its_charts(opened: Opened, name: str) -> None:
    page = opened.pages[name]
    assert browser.errors(page) == []
    charts = page.locator(browser.CHART)
    charts.first.wait_for()
    assert charts.count() >= 3
    for chart in charts.all():
        chart.scroll_into_view_if_needed()
        drawn(chart)


@pytest.mark.parametrize(("name", "moved"), [("10_what_if", 0.65), ("app", 1.15)])
def test_a_slider_changes_number_and_chart(opened: Opened, name: str, moved: float) -> None:
    panel = browser.panel_with(opened.pages[name], "bandwidth x")
    words, chart = panel.locator(".jp-OutputArea-output").first, panel.locator(browser.CHART).first
    before, picture = words.inner_text(), drawn(chart)
    assert "as it was" in before
    browser.slide(panel, "cpu x", "ArrowRight", 3)
    expect(panel.locator("pre").last).to_contain_text(f"'cpu': {moved}")
    expect(words).not_to_have_text(before)
    chart.wait_for()
    assert drawn(chart) != picture
    keep(panel, f"what_if-{name}")


@pytest.mark.parametrize("name", ["00_quickstart", "app"])
def test_a_brush_over_the_overview_chooses_the_window_and_a_click_the_op(opened: Opened, name: str) -> None:
    page = opened.pages[name]
    panel = browser.panel_with(page, "window (ms)")
    overview, timeline = (panel.locator(".vega-embed").nth(n).locator(".marks").first for n in range(2))
    code = panel.locator("pre").last
    before, picture = code.inner_text(), drawn(timeline)
    keep(panel, f"explore-{name}")
    overview.scroll_into_view_if_needed()
    box = overview.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.4 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], middle, steps=5)
    page.mouse.up()
    expect(code).not_to_have_text(before)
    page.wait_for_timeout(1000)  # on a busy machine the brush may rest on its way, and be heard of twice
    begin, end = (int(at) for at in code.inner_text().split("window_ns=(")[1].split(")")[0].split(","))
    length = int(before.split("window_ns=(0, ")[1].split(")")[0])
    assert 0.1 < begin / length < end / length < 0.9
    expect(timeline.get_by_text(f"{round((begin + end) / 2e6)}", exact=True).first).to_be_attached()
    assert drawn(timeline) != picture
    timeline.locator(".mark-rect path").first.click(force=True)
    expect(code).to_contain_text("ln.neighbours(result, ")
    panel.get_by_text("itself").wait_for()
    keep(panel, f"explore-brushed-{name}")


def test_a_configuration_is_estimated_anew_in_voila(opened: Opened) -> None:
    panel = browser.panel_with(opened.pages["app"], "micro batch")
    before = panel.locator(".jp-OutputArea-output").first.inner_text()
    panel.locator(".widget-text", has_text="micro batch").locator("input").fill("2")
    panel.locator(".widget-text", has_text="micro batch").locator("input").press("Enter")
    panel.get_by_text("micro_batch=2").wait_for()
    expect(panel.locator(".jp-OutputArea-output").first).not_to_have_text(before)
    assert "micro_batch=2" in panel.inner_text()
    assert panel.locator(".jp-OutputArea-output").first.inner_text() != before
    keep(panel, "configure-app")


def test_charts_and_panels_are_dark_where_jupyterlab_is(opened: Opened) -> None:
    page = opened.pages["00_quickstart"]
    panel = browser.panel_with(page, "window (ms)")
    light = [chart.evaluate(SHADES) for chart in panel.locator(browser.CHART).all()]
    assert all(paper == 1 and black > 50 for paper, _, black in light)
    page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
    browser.run_cells(page)
    assert browser.errors(page) == []
    panel = browser.panel_with(page, "window (ms)")
    panel.locator(browser.CHART).nth(2).wait_for()
    keep(panel, "explore-dark")
    for n, chart in enumerate(page.locator(browser.CHART).all()):
        chart.scroll_into_view_if_needed()
        keep(chart, f"dark-{n}")
        paper, white, black = chart.evaluate(SHADES)
        assert paper < 0.25
        assert white > 50, "letters and ink are light"
        assert black == 0, "nothing is drawn in ink for white paper"


def test_no_page_asked_for_anything_of_another_machine(opened: Opened) -> None:
    assert set(opened.pages) == {*NOTEBOOKS, "app"}
    assert opened.outside == []
