"""How long a panel takes from a moved slider to its chart, in a browser, in JupyterLab on this machine.

`python -m benchmarks.bench_panels` prints the rows; without a Chromium there are none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

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
    const charts = () => [...panel.querySelectorAll('.jp-OutputArea .marks')];
    const inked = (canvas) => {
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return pixels.some((value, at) => at % 4 === 3 && value > 0);
    };
    const before = charts(), began = performance.now();
    const anew = (chart) => !before.includes(chart) && chart.width && inked(chart);
    const look = () => (charts().length === before.length && charts().every(anew))
        ? drawn(performance.now() - began) : requestAnimationFrame(look);
    const slider = panel.querySelector('.noUi-handle');
    if (slider) slider.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}));
    else {
        const rows = [...panel.querySelectorAll('.widget-text')];
        const number = rows.find((row) => row.innerText.includes('micro batch')).querySelector('input');
        number.value = 3 - number.value;
        for (const kind of ['input', 'change']) number.dispatchEvent(new Event(kind, {bubbles: true}));
    }
    requestAnimationFrame(look);
})"""
"""From the key that moves a panel's first slider (of one without, from its micro-batch, 1 or 2) to new charts with ink
on their canvases, in ms."""


def moves_ms(panel: Locator) -> list[float]:
    """Milliseconds from slider to chart, of each move."""
    return [float(panel.evaluate(UNTIL_DRAWN)) for _ in range(MOVES)][1:]


def kernel_ms(panel: widgets.Panel, control: str, values: Sequence[float]) -> float:
    """The same moves without a browser: what is computed, and the charts' specifications."""
    times = []
    for value in values:
        began = time.perf_counter()
        panel.controls[control].value = value
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def rows() -> list[Row]:
    """The rows of group `panels`."""
    if browser.chromium() is None:
        return []
    graph = build_graph(load_run(datasets.path("gpt-ddp")))
    speeds, batches = [1.05 + n / 20 for n in range(MOVES)], [2 - n % 2 for n in range(MOVES)]
    alone_ms = [
        kernel_ms(widgets.what_if(graph), "cpu", speeds),
        kernel_ms(widgets.configure("llama-3-8b"), "micro_batch", batches),
    ]
    with browser.serving(*browser.lab()) as address, browser.browser() as running:
        page = browser.page_of(running, [])
        browser.run_all(page, address, NOTEBOOK)
        if wrong := browser.errors(page):
            raise AssertionError(f"{NOTEBOOK}: {wrong}")
        moved = [moves_ms(browser.panel_with(page, control)) for control in ("bandwidth x", "micro batch")]
    edges = graph.edges.select(pl.len()).item()
    of = (f"gpt-ddp, {graph.ops.height:,} ops, {edges:,} edges", "llama-3-8b on 8 GPUs, two charts")
    names = ("slider to chart", "configuration to charts")
    return [_row(*each) for each in zip(names, moved, alone_ms, of, strict=True)]


def _row(name: str, times_ms: list[float], alone_ms: float, of: str) -> Row:
    middle = statistics.median(times_ms)
    noise = statistics.median(abs(one - middle) for one in times_ms)
    note = f"{of}; median of {len(times_ms)} moves"
    return Row(f"panels/{name}", middle, "ms", "in the kernel alone", alone_ms, noise=noise, target="<= 200", note=note)


if __name__ == "__main__":
    print(table(rows()))
