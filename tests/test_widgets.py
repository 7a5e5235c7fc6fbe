"""Panels: their controls call what they say, their code makes the same, and what is refused is shown."""

import re
import time
from typing import Any

import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import charts, datasets, widgets
from lumos_nb.errors import LumosError
from lumos_nb.widgets import Panel


@pytest.fixture(scope="module")
def run() -> ln.Run:
    return ln.load_run(datasets.path("gpt-ddp"))


@pytest.fixture(scope="module")
def graph(run: ln.Run) -> ln.Graph:
    return ln.build_graph(run, step=3)


def shown(panel: Panel) -> list[dict[str, Any]]:
    return [output["data"] for output in panel._area.outputs]


def texts(panel: Panel) -> str:
    return " ".join(str(data.get("text/plain", "")) for data in shown(panel))


def test_a_run_is_explored_by_step_ranks_and_window(run: ln.Run) -> None:
    panel = widgets.explore(run)
    assert all(charts.JUPYTERLAB_MIME in data and "image/png" not in data for data in shown(panel)[:2])
    steps = panel.controls["step"].options
    panel.controls["step"].value = steps[1]
    assert panel.result[0].graph.step == steps[1]
    bars = len(str(shown(panel)[0]))
    panel.controls["ranks"].value = (1,)
    assert len(str(shown(panel)[0])) < bars
    panel.controls["window"].value = (5, 10)
    axis = re.search(r"'domain': \[5\.0, 10\.0\]", str(shown(panel)[0]))
    assert axis
    assert "ln.build_graph(run, step=" in panel.code


def test_two_runs_are_compared(run: ln.Run) -> None:
    panel = widgets.explore(run, run)
    assert len(panel.result) == 2
    assert "mean_diff_ns" in texts(panel)


def test_sliders_scale_kinds_and_the_code_says_the_same(graph: ln.Graph, run: ln.Run) -> None:
    panel = widgets.what_if(graph)
    before = panel.result.step_ns
    assert before == ln.replay(graph).step_ns
    panel.controls["cpu"].value = 0.5
    assert panel.result.step_ns < before
    names: dict[str, Any] = {"ln": ln, "run": run}
    exec(panel.code, names)
    swept = eval(panel.code.splitlines()[-1], names)
    assert swept["step_ns"].item() == pytest.approx(panel.result.step_ns, abs=len(graph.ops))


def test_a_configuration_is_estimated_and_what_cannot_be_is_said(graph: ln.Graph) -> None:
    panel = widgets.configure("llama-3-8b")
    assert panel.result.layout == ln.Parallelism(dp=8, zero=3)
    panel.controls["tp"].value = 2
    assert panel.result is None
    assert "16 ranks of 8 GPUs" in texts(panel)
    panel.controls["dp"].value = 4
    assert panel.result.layout == ln.Parallelism(dp=4, tp=2, zero=3)
    again = eval(panel.code.split("\n", 1)[1].replace("model,", "ln.Transformer.named('llama-3-8b'),", 1), {"ln": ln})
    assert again.step_ns == panel.result.step_ns


def test_a_search_runs_in_a_thread_and_stops() -> None:
    cluster = ln.Cluster(gpu="H100-SXM-80GB", inside="NVLink4 NVSwitch")
    train = ln.Training(micro_batch=1, global_batch=16, seq=2048)
    panel = widgets.choose_layout(ln.Transformer.named("llama-3-8b"), cluster, train, cp=1, schedule="1f1b", zero=3)
    panel.controls["keep"].value = 2
    assert panel.result is None
    panel.start.click()
    for _ in range(600):
        if panel._area.outputs:
            break
        time.sleep(0.1)
    assert panel.result.frame["replayed_s"].is_not_null().sum() == 2
    stop = next(
        child for row in panel.children for child in getattr(row, "children", ()) if "stop" in str(child.description)
    )
    panel._make = lambda **_: stop.click() or (_ for _ in ()).throw(widgets.Stopped("stopped"))
    panel.update()
    assert texts(panel) == "stopped"


def test_a_calibration_is_inspected() -> None:
    panel = widgets.inspect(ln.load_calibration("H100-SXM-80GB"))
    every = panel.result.height
    panel.controls["cell"].value = "gemm half"
    assert panel.result.height == 1 < every
    assert isinstance(panel.result, pl.DataFrame)


def test_markup_in_names_stays_text() -> None:
    panel = Panel({}, lambda: None, lambda _: ["<script>alert(1)</script>"], lambda: "<b>x</b>")
    assert "<script>" not in shown(panel)[0]["text/html"]
    assert "<b>" not in panel._code.value


def test_what_is_no_run_or_calibration_is_refused() -> None:
    for call in (lambda: widgets.explore(None), lambda: widgets.inspect(5), lambda: widgets.configure("nope")):  # type: ignore[arg-type]
        with pytest.raises(LumosError):
            call()
