"""Names of a trace that are made to be more than text: in a terminal, in CSV, in a program, in messages of errors."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import charts, cli, widgets
from lumos_nb.errors import InputError, LumosError, harmless
from lumos_nb.exchange.benchmark.binding import Unusable, find_op
from lumos_nb.terminal import as_json
from tests.trace_builder import Trace, repeated, write_kineto

HOSTILE = "=cmd|' /C calc'!A0\x1b]0;owned\x07\x9b2J\u202e<script>alert(1)</script>|x`~~~"
STEERING = {*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e"} - {"\n", "\t"}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A trace whose operators and kernels have such names, in a folder that has one."""

    def body(trace: Trace, _: int, start: float) -> None:
        trace.op(HOSTILE, start + 100, start + 200)
        trace.launch(f"kernel {HOSTILE}", (start + 120, start + 130), (start + 300, start + 600))

    folder = tmp_path / "run \x1b[31m"
    folder.mkdir()
    return write_kineto(repeated(body), folder / "rank0.json")


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "JSON"])
def test_what_a_command_prints_cannot_steer_a_terminal(
    more: list[str], hostile: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["replay", str(hostile.parent), "--predict", "0"], ["compare", str(hostile), str(hostile)]):
        assert cli.main([*arguments, *more]) == 0
        out, err = capfd.readouterr()
        assert not STEERING & set(out + err)
        if more:
            assert "\x1b]0;owned" in json.dumps(json.loads(out), ensure_ascii=False).replace("\\u001b", "\x1b")
    assert cli.main(["replay", str(tmp_path / "gone \x1b[2J\x9b")]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert not STEERING & set(err)


def test_json_holds_what_was_given_and_nothing_that_steers() -> None:
    text = as_json({"name": HOSTILE})
    assert json.loads(text)["name"] == HOSTILE
    assert not STEERING & set(text)


def test_an_error_quotes_names_as_text() -> None:
    assert str(InputError("line 1\nx\x1b[2J\x9b\u202e")) == "line 1\nx\\x1b[2J\\x9b\\u202e"
    assert harmless("a\nb") == "a\\nb"
    with pytest.raises(LumosError) as caught:
        ln.load_run("gone\x1b[2J")
    assert not STEERING & set(str(caught.value))


def test_csv_files_of_the_package_hold_numbers_alone() -> None:
    """So that no cell is a formula: of every bundled capture, and those are written by the one function there is."""
    found = [file for name in ("gpt-ddp", "gpt-single") for file in ln.datasets.path(name).glob("*.csv")]
    assert found
    for file in found:
        with file.open(newline="") as rows:
            head, *body = csv.reader(rows)
        assert all(name.isidentifier() for name in head)
        assert all(float(cell) == float(cell) for row in body for cell in row)


@pytest.mark.parametrize(
    "name",
    [
        "os::system", "torch::load", "aten::__class__", "aten::__globals__.x", "__builtins__::eval", "aten::from_file",
        "profiler::_record_function_enter", "mine::op", "aten::mm; import os", "aten::mm.x.y", "", "aten::",
    ],
)  # fmt: skip
def test_only_operators_of_known_namespaces_that_take_tensors_and_numbers_are_called(name: str) -> None:
    with pytest.raises(Unusable):
        find_op(name)


def test_operators_that_programs_need_are_found() -> None:
    for name in ("aten::mm", "aten::add.Tensor", "_c10d_functional::all_reduce"):
        found: Any = find_op(name)
        assert found.name().split(".")[0] == name.split(".")[0]


def test_a_calibration_without_a_cluster_and_a_message_of_no_name_are_refused() -> None:
    with pytest.raises(InputError, match="give cluster= too"):
        ln.benchmark.workload(ln.datasets.path("gpt-single"), calibration=ln.load_calibration("a100"))
    with pytest.raises(InputError, match="'zz' is no message of Chakra"):
        ln.chakra.message_class("zz")


BREAKING = "'\"];alert(1)//\\</script><img src=x onerror=alert(1)>{{datum}}"
_PROGRAM = {"expr", "test", "calculate", "filter", "signal", "update", "formatType", "href", "url"}
"""Keys of a chart's specification under which Vega takes a text for a program or an address."""


def _programs(spec: object, key: str = "") -> Iterator[str]:
    if isinstance(spec, dict):
        for name, value in spec.items():
            yield from _programs(value, name)
    elif isinstance(spec, list):
        for value in spec:
            yield from _programs(value, key)
    elif isinstance(spec, str) and key in _PROGRAM:
        yield spec


@pytest.fixture
def breaking(tmp_path: Path) -> ln.Graph:
    def body(trace: Trace, _: int, start: float) -> None:
        trace.op(BREAKING, start + 100, start + 200)
        trace.launch(BREAKING, (start + 120, start + 130), (start + 300, start + 600))

    return ln.build_graph(ln.load_run(write_kineto(repeated(body), tmp_path / "rank0.json")))


CHARTS: dict[str, Callable[[ln.Graph], Any]] = {
    "timeline": lambda graph: charts.timeline(ln.replay(graph)),
    "dependencies": lambda graph: charts.dependencies(graph),
    "difference": lambda graph: charts.difference(_changes(graph), level="op"),
    "sensitivity": lambda graph: charts.sensitivity(
        ln.sweep(graph, [{"scenario": BREAKING, "kernel": 2.0}], by="kind")
    ),
}


def _changes(graph: ln.Graph) -> pl.DataFrame:
    slower = graph.ops.with_columns(dur_ns=2 * pl.col("dur_ns"))
    return ln.compare(ln.replay(graph), ln.replay(replace(graph, ops=slower)))


@pytest.mark.parametrize("name", CHARTS)
def test_a_name_is_no_program_of_a_chart(name: str, breaking: ln.Graph) -> None:
    spec = CHARTS[name](breaking).to_dict()
    assert BREAKING in json.dumps(spec, ensure_ascii=False).replace("\\\\", "\\").replace('\\"', '"')
    assert not [text for text in _programs(spec) if "alert" in text]


def _markup(widget: Any) -> Iterator[str]:
    """What a widget, those in it, and what is displayed in it give a browser to read as HTML."""
    if type(widget).__name__.startswith("HTML"):
        yield widget.value
    for output in getattr(widget, "outputs", ()):
        yield output.get("data", {}).get("text/html", "")
    for child in getattr(widget, "children", ()):
        yield from _markup(child)


@pytest.mark.parametrize("panel", ["what_if", "explore"])
def test_a_name_is_no_markup_of_a_panel(panel: str, breaking: ln.Graph) -> None:
    given = breaking if panel == "what_if" else breaking.run
    shown = "".join(_markup(getattr(widgets, panel)(given)))
    assert len(shown) > 100
    assert "<img" not in shown
    assert "</script>" not in shown.replace("</script>\n", "")


def test_a_name_is_no_markup_of_a_report(breaking: ln.Graph) -> None:
    run = breaking.run
    assert run is not None
    for shown in (run, breaking, ln.replay(breaking), ln.step_report(run)):
        text = shown._repr_html_()
        assert "&lt;img" in text or "alert(1)" not in text
        assert "<img src=x" not in text
