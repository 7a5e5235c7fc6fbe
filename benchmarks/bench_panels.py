"""How long a panel takes from a moved slider to its chart, in a browser, in JupyterLab on this machine.

`python -m benchmarks.bench_panels` prints the rows; without a Chromium there are none.
"""

from __future__ import annotations

import statistics
import time

import polars as pl
from playwright.sync_api import Locator

from benchmarks.rows import Row, table
from lumos_nb import datasets, widgets
from lumos_nb.graph import build_graph
from lumos_nb.traces.run import load_run
from tests import browser

NOTEBOOK = "notebooks/app/what_if.ipynb"
MOVES = 20
"""Of which the first is not counted: it loads what is loaded once."""

UNTIL_DRAWN = """(panel) => new Promise((drawn) => {
    const chart = () => panel.querySelector('.jp-OutputArea .marks');
    const inked = (canvas) => {
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return pixels.some((value, at) => at % 4 === 3 && value > 0);
    };
    const before = chart(), began = performance.now();
    const look = () => (chart() && chart() !== before && chart().width && inked(chart()))
        ? drawn(performance.now() - began) : requestAnimationFrame(look);
    panel.querySelector('.noUi-handle').dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
    requestAnimationFrame(look);
})"""
"""From the key that moves a panel's first slider to the new chart with ink on its canvas, in ms."""


def moves_ms(panel: Locator) -> list[float]:
    """Milliseconds from slider to chart, of each move."""
    return [float(panel.evaluate(UNTIL_DRAWN)) for _ in range(MOVES)][1:]


def kernel_ms() -> tuple[float, str]:
    """The same moves without a browser, replay and specification of the chart alone, and of what graph."""
    graph = build_graph(load_run(datasets.path("gpt-ddp")))
    panel, times = widgets.what_if(graph), []
    for n in range(MOVES):
        began = time.perf_counter()
        panel.controls["cpu"].value = 1.05 + n / 20
        times.append(1e3 * (time.perf_counter() - began))
    edges = graph.edges.select(pl.len()).item()
    return statistics.median(
        times[1:]
    ), f"gpt-ddp, {graph.ops.height:,} ops, {edges:,} edges; median of {MOVES - 1} moves"


def rows() -> list[Row]:
    """The rows of group `panels`."""
    if browser.chromium() is None:
        return []
    alone_ms, note = kernel_ms()
    with browser.serving(*browser.lab()) as address, browser.browser() as running:
        page = browser.page_of(running, [])
        browser.run_all(page, address, NOTEBOOK)
        if wrong := browser.errors(page):
            raise AssertionError(f"{NOTEBOOK}: {wrong}")
        times = moves_ms(browser.panel_with(page, "bandwidth x"))
    middle = statistics.median(times)
    noise = statistics.median(abs(one - middle) for one in times)
    beside = ("in the kernel alone", alone_ms)
    return [Row("panels/slider to chart", middle, "ms", *beside, noise=noise, target="<= 200", note=note)]


if __name__ == "__main__":
    print(table(rows()))
