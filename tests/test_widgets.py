"""Panels: their controls call what they say, their code makes the same, and what is refused is shown."""

import ast
import time
from dataclasses import replace
from typing import Any

import msgspec
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import charts, datasets, widgets
from lumos_nb.display import format_ns
from lumos_nb.errors import LumosError
from lumos_nb.findings import inner_steps
from lumos_nb.widgets import Panel
from lumos_nb.widgets.planners import Stopped


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


def made_by_code(panel: Panel, **given: Any) -> Any:
    """What a panel's lines make, run as a user would run them: the last value."""
    names: dict[str, Any] = {"ln": ln, "pl": pl, "msgspec": msgspec, **given}
    *lines, last = ast.parse(panel.code).body
    exec(compile(ast.Module(lines, []), "panel", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "panel", "eval"), names)
    exec(compile(ast.Module([last], []), "panel", "exec"), names)
    return names[last.targets[0].id]  # type: ignore[attr-defined]


def brush(panel: Any, *between: float) -> None:
    """As a browser tells it that the overview was brushed."""
    chosen(panel._overview, {"start_ms": list(between)} if between else {})


def chosen(chart: Any, value: dict[str, Any]) -> None:
    """A message of a chart's selection."""
    chart._handle_custom_msg({"chosen": value}, [])


def test_a_run_is_explored_by_step_ranks_and_window(run: ln.Run) -> None:
    panel = widgets.explore(run)
    steps = panel.controls["step"].options
    panel.controls["step"].value = steps[1]
    assert panel.result[0].graph.step == steps[1]
    bars = len(str(panel._timeline.spec))
    panel.controls["ranks"].value = (1,)
    assert len(str(panel._timeline.spec)) < bars
    panel.controls["window"].value = (5, 10)
    assert "'domain': [5.0, 10.0]" in str(panel._timeline.spec)
    assert "'value': {'x': [5.0, 10.0]}" in str(panel._overview.spec), "the overview shows the window as its brush"
    assert made_by_code(panel, run=run).equals(ln.breakdown(panel.result[0]))
    panel.controls["step"].value = steps[0]
    assert panel.controls["ranks"].value == (0, 1), "another step is shown whole"
    assert panel.controls["window"].value == (0, panel.controls["window"].max)


def test_a_brush_drives_the_window_and_leaves_the_overview_alone(run: ln.Run) -> None:
    panel = widgets.explore(run)
    overview, whole = panel._overview.spec, panel.controls["window"].value
    brush(panel, 12.34567, 4.0)
    assert panel.controls["window"].value == (4.0, 12.346)
    assert panel._overview.spec == overview
    assert "'domain': [4.0, 12.346]" in str(panel._timeline.spec)
    brush(panel)
    assert panel.controls["window"].value == whole


def test_a_clicked_bar_is_an_op_with_what_it_waits_for(run: ln.Run) -> None:
    panel = widgets.explore(run)
    result = panel.result[0]
    op = result.ops.filter(pl.col("kind") == "comm").row(0, named=True)
    begin_ms = (op["start_ns"] - result.ops["start_ns"].min()) / 1e6
    bar = {"rank": op["rank"], "lane": op["lane"], "start_ms": begin_ms, "end_ms": begin_ms + op["dur_ns"] / 1e6}
    chosen(panel._timeline, {"vlPoint": {"or": [bar]}})
    assert panel.controls["op"].value == op["op_id"]
    assert "itself" in texts(panel)
    assert f"ln.neighbours(result, {op['op_id']})" in panel.code
    panel.controls["op"].value = 10**6
    assert "no op 1000000" in texts(panel)


def test_an_op_starts_when_the_last_that_it_waits_for_lets_it(run: ln.Run) -> None:
    result = ln.replay(ln.build_graph(run, step=3))
    ends = result.ops.select("op_id", end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    for op in result.ops.filter(pl.col("kind").is_in(["comm", "wait", "join"]))["op_id"]:
        near = ln.neighbours(result, op)
        before = near.filter(pl.col("relation") == "waits for")
        assert before["spare_ns"].min() == 0
        assert set(before["op_id"]) == set(result.graph.edges.filter(pl.col("dst") == op)["src"])
        assert set(near.filter(relation="awaited by")["op_id"]) == set(result.graph.edges.filter(src=op)["dst"])
        edges = result.graph.edges.filter(~pl.col("from_start"), dst=op).join(ends, left_on="src", right_on="op_id")
        spare = dict(before.select("op_id", "spare_ns").iter_rows())
        start = near.filter(relation="itself")["start_ns"].item()
        assert {
            src: start - end - lag for src, end, lag in edges.select("src", "end_ns", "lag_ns").iter_rows()
        }.items() <= (spare.items())


def test_two_runs_are_compared(run: ln.Run) -> None:
    slept = ln.load_run(datasets.path("gpt-ddp-delay"))
    runs = {"even": run, "late": slept}
    panel = widgets.explore(runs)
    panel.controls["beside"].value = "late"
    assert len(panel.result) == 2
    assert "mean_diff_ns" in texts(panel)
    assert made_by_code(panel, runs=runs).equals(ln.compare(*panel.result))
    panel.controls["run"].value = "late"
    assert [*panel.controls["step"].options] == inner_steps(ln.Recording.of(slept))["step"].to_list()
    assert len(panel.result) == 1, "a run beside itself is one run"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"cpu": 0.5},
        {"cpu": 0.7000000000000001, "gap": 0.0},
        {"bandwidth_factor": 0.5, "latency_us": 100},
        {"comm": 2.0, "bandwidth_factor": 4.0},
    ],
)
def test_the_lines_of_a_what_if_make_its_result(graph: ln.Graph, run: ln.Run, asked: dict[str, float]) -> None:
    panel = widgets.what_if(graph)
    before = panel.result.step_ns
    for name, value in asked.items():
        panel.controls[name].value = value
    assert (panel.result.step_ns == before) == (not asked)
    again = made_by_code(panel, run=run)
    assert again.step_ns == panel.result.step_ns
    assert again.ops.equals(panel.result.ops)
    assert ln.breakdown(again).equals(ln.breakdown(panel.result))


def test_a_what_if_says_how_far_steps_lie_apart(graph: ln.Graph, run: ln.Run) -> None:
    panel = widgets.what_if(graph)
    times = inner_steps(ln.Recording.of(run))["step_ns"]
    assert f"{format_ns(times.min())} to {format_ns(times.max())}" in texts(panel)
    panel.controls["launch"].value = 1.05
    assert "differ by" in texts(panel), "a change below the noise is no finding"
    assert "not built from a run" in texts(widgets.what_if(replace(graph, run=None)))


def test_a_value_that_is_no_number_is_refused_and_its_lines_still_run(graph: ln.Graph, run: ln.Run) -> None:
    panel = widgets.what_if(graph)
    panel.controls["cpu"].value = float("nan")
    assert panel.result is None
    with pytest.raises(LumosError) as refused:
        made_by_code(panel, run=run)
    assert str(refused.value) in texts(panel)


def test_a_slider_moves_the_chart_within_its_time(graph: ln.Graph) -> None:
    panel = widgets.what_if(graph)
    times = []
    for scale in (0.5, 0.6, 0.7, 0.8, 0.9):
        began = time.process_time()
        panel.controls["cpu"].value = scale
        times.append(time.process_time() - began)
    assert min(times) < 0.2


def test_a_configuration_is_estimated_and_what_cannot_be_is_said() -> None:
    panel = widgets.configure("llama-3-8b")
    assert panel.result.layout == ln.Parallelism(dp=8, zero=3)
    panel.controls["tp"].value = 2
    assert panel.result is None
    assert "16 ranks of 8 GPUs" in texts(panel)
    panel.controls["dp"].value = 4
    assert panel.result.layout == ln.Parallelism(dp=4, tp=2, zero=3)
    for name, value in {"layers": 12, "hidden": 2048, "lora": 16, "recompute": "full"}.items():
        panel.controls[name].value = value
    assert (panel.result.model.layers, panel.result.model.hidden, panel.result.train.lora) == (12, 2048, 16)
    again = made_by_code(panel)
    assert again.step_ns == panel.result.step_ns
    assert again.memory.equals(panel.result.memory)
    titles = " ".join(str(data) for data in shown(panel))
    assert "Memory at its peak" in titles
    assert "rank 0 before" in titles
    panel.controls["model"].value = "gpt3-13b"
    own = ln.Transformer.named("gpt3-13b")
    assert (panel.controls["layers"].value, panel.controls["hidden"].value) == (own.layers, own.hidden)
    assert panel.result is None, "learned positions: seq 4096 is beyond them"
    panel.controls["seq"].value = own.max_seq
    assert panel.result.model == own


def test_tables_are_placed_and_the_lines_make_the_same_plan() -> None:
    tables = pl.DataFrame({"rows": [10**6, 10**5, 10**4, 10**7], "dim": [64, 128, 32, 64], "pooling": [5.0, 1, 20, 3]})
    panel = widgets.place_tables(tables, devices=2)
    assert panel.result is None, "it takes seconds: not before it is asked to"
    panel.controls["optimizer"].value = "adam"
    panel.update()
    assert panel.result.devices.height == 2
    assert charts.JUPYTERLAB_MIME in shown(panel)[1]
    again = made_by_code(panel, tables=tables)
    assert again.frame.equals(panel.result.frame)
    assert again.total_us == panel.result.total_us
    panel.controls["memory_gb"].value = 1
    panel.update()
    assert panel.result is None
    assert texts(panel)


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
    panel._make = lambda **_: stop.click() or (_ for _ in ()).throw(Stopped("stopped"))
    panel.update()
    assert texts(panel) == "stopped"


def test_a_calibration_is_inspected() -> None:
    calibration = ln.load_calibration("H100-SXM-80GB")
    panel = widgets.inspect(calibration)
    every = panel.result[0].height
    panel.controls["cell"].value = "gemm half"
    panel.controls["m"].value = 512
    known, priced = panel.result
    assert known.height == 1 < every
    assert made_by_code(panel).equals(priced)
    row = {"op": "gemm", "dtype": "bf16", "pass": "fwd", "m": 512, "n": 4096, "k": 4096}
    assert priced["dur_us"].item() == calibration.predict_kernels([row])["dur_us"].item()


def test_markup_in_names_stays_text() -> None:
    panel = Panel({}, lambda: None, lambda _: ["<script>alert(1)</script>"], lambda: "<b>x</b>")
    assert "<script>" not in shown(panel)[0]["text/html"]
    assert "<b>" not in panel._code.value


def test_what_is_no_run_or_calibration_is_refused(run: ln.Run) -> None:
    for call in (
        lambda: widgets.explore(None),
        lambda: widgets.explore({}),
        lambda: widgets.what_if(run),
        lambda: widgets.inspect(5),
        lambda: widgets.configure("nope"),
    ):  # type: ignore[arg-type]
        with pytest.raises(LumosError):
            call()


@pytest.mark.parametrize("asked", [{"nodes": 0}, {"nodes": "x"}, {"nodes": 1.5}, {"gpu": None}])
def test_a_configuration_begins_with_what_can_be(asked: dict[str, Any]) -> None:
    with pytest.raises(LumosError):
        widgets.configure(**asked)


def test_what_a_search_has_controls_for_is_no_argument() -> None:
    with pytest.raises(LumosError, match="keep is the panel's own"):
        widgets.choose_layout(None, None, None, keep=3)  # type: ignore[arg-type]
