"""Numbers that people type: what cannot be, or would take more than a machine has, is an error that says the bound."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import charts
from lumos_nb.errors import ABOVE_0, InputError, LayoutError, LumosError, require_memory, require_number, shown
from lumos_nb.graph import Graph, build_graph
from lumos_nb.workloads.llm.schedule import schedule

NO_SIZE = [10**5000, 10**400, 2**63, 10**12, True, "3", 1.5, math.nan, math.inf, -1, np.float64(4), None]

SIZES: dict[str, Callable[[Any], object]] = {
    "Parallelism: tp": lambda x: ln.Parallelism(tp=x),
    "Parallelism: split": lambda x: ln.Parallelism(split=(x,)),
    "Transformer: hidden": lambda x: ln.Transformer(layers=4, hidden=x, heads=4, ffn=64, vocab=100, head_dim=8),
    "Transformer: layers": lambda x: ln.Transformer(layers=x, hidden=64, heads=4, ffn=64, vocab=100),
    "Training: seq": lambda x: ln.Training(micro_batch=1, global_batch=8, seq=x),
    "Cluster: nodes": lambda x: ln.Cluster(gpu="H100-SXM-80GB", nodes=x, gpus_per_node=1, between="InfiniBand NDR 400"),
    "Dlrm: dense": lambda x: ln.Dlrm(dense=x, bottom=(8,), top=(1,)),
    "Dlrm: bottom": lambda x: ln.Dlrm(dense=8, bottom=(x,), top=(1,)),
    "DlrmTraining: global_batch": lambda x: ln.DlrmTraining(global_batch=x),
}


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", NO_SIZE, ids=shown)
def test_a_size_that_none_can_have_is_named(field: str, value: object) -> None:
    with pytest.raises(LumosError, match=rf"^{field} is .*; give"):
        SIZES[field](value)


@pytest.mark.parametrize("field", [field for field in SIZES if field not in ("Parallelism: split", "Dlrm: bottom")])
def test_a_size_of_numpy_is_taken(field: str) -> None:
    assert repr(SIZES[field](np.int32(64))) == repr(SIZES[field](64))


def _sequences(*numbers: int) -> list[Any]:
    pandas = pytest.importorskip("pandas")
    array = np.array(numbers)
    made = [[*numbers], array, array.astype(np.int8), pl.Series(numbers), pandas.Series(numbers), pandas.Index(numbers)]
    return [
        *made,
        pandas.array(numbers, dtype="Int64"),
        pl.Series(numbers).to_arrow(),
        tuple(array),
        [array[0], *numbers[1:]],
    ]


def test_sequences_of_any_library_are_taken_as_tuples() -> None:
    for split in _sequences(2, 2):
        layout = ln.Parallelism(pp=2, split=split)
        assert layout == ln.Parallelism(pp=2, split=(2, 2))
        assert hash(layout) == hash(ln.Parallelism(pp=2, split=(2, 2)))
        assert ln.Parallelism.from_json(layout.to_json()) == layout
        assert {type(size) for size in layout.split} == {int}
    for widths in _sequences(8, 4):
        assert ln.Dlrm(dense=8, bottom=widths, top=np.array([1])) == ln.Dlrm(dense=8, bottom=(8, 4), top=(1,))


@pytest.mark.parametrize(
    "split",
    [
        np.array([2.5, 2]), np.array([[2, 2]]), np.array([True, True]), np.array(["2", "2"]), np.array(2),
        np.array([2, 2], "m8[ns]"), pl.Series([2.0, 2.0]), pl.Series([2, None]), pl.Series(["2", "2"]), (2, None), "22",
        b"22", (2, np.float64(2)), [np.array([2]), 2], pl.DataFrame({"a": [2, 2]}), np.ndarray,
        [10**5000, 2], {2: 2},
    ],
    ids=shown,
)  # fmt: skip
def test_a_sequence_that_is_none_of_sizes_is_named(split: Any) -> None:
    with pytest.raises(LayoutError, match=r"^Parallelism: split is .*; give"):
        ln.Parallelism(pp=2, split=split)


@pytest.mark.parametrize(
    "value", [np.array([2]), np.array([2, 2]), pl.Series([2, 2]), np.timedelta64(2), np.ma.masked], ids=shown
)
def test_a_size_that_is_a_sequence_or_a_time_is_named(value: Any) -> None:
    with pytest.raises(LayoutError, match=r"^Parallelism: tp is .*; give a whole number"):
        ln.Parallelism(tp=value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ln.Parallelism(tp=2**10, dp=2**10, pp=2), "2,097,152 ranks: give 1,048,576 at most"),
        (lambda: ln.Cluster(gpu="A100", nodes=2**20, inside="NVLink3 NVSwitch", between="InfiniBand NDR 400"),
         "8,388,608 GPUs: give 1,048,576 at most"),
        (lambda: ln.Training(micro_batch=1, global_batch=2**30, seq=2**30), "tokens a step: give"),
        (lambda: ln.Training(micro_batch=1, global_batch=1, seq=1, capacity=1e30), "2,147,483,647 at most"),
        (lambda: ln.Transformer(layers=10**5, hidden=2**21, heads=1, ffn=2**21, vocab=9), "parameters: give 9"),
    ],
)  # fmt: skip
def test_sizes_that_are_too_much_together_say_what_they_make(make: Callable[[], object], says: str) -> None:
    with pytest.raises(LumosError, match=says):
        make()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return build_graph(ln.load_run(ln.datasets.path("gpt-ddp")))


def test_what_takes_more_memory_than_there_is_says_how_much(graph: Graph) -> None:
    with pytest.raises(InputError, match=r"times=1,000,000,000 takes some .* GiB of memory, and this machine has"):
        ln.repeat(graph, 10**9)
    with pytest.raises(InputError, match=r"a sweep takes some 1.*GiB"):
        require_memory(2**60, "a sweep")
    require_memory(1, "nothing")


def test_a_sweep_of_too_many_scenarios_says_how_much_they_take(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = pl.DataFrame({"cpu": [0.5] * 1000})
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    with pytest.raises(InputError, match="a sweep of 1,000 scenarios takes some"):
        ln.sweep(graph, scenarios)


@pytest.mark.parametrize("value", [10**5000, True, math.nan, math.inf, "3", 0, -1, None, np.float64("nan")], ids=shown)
def test_a_number_that_is_none_says_the_bounds(value: object) -> None:
    with pytest.raises(InputError, match=r"x=.*: give a finite number above 0, 1e.09 at most"):
        require_number(ABOVE_0, 1e9, x=value)
    require_number(ABOVE_0, 1e9, x=np.float32(2), y=10**9, z=1e-300)


@pytest.fixture(scope="module")
def found() -> ln.Found:
    cluster = ln.Cluster(gpu="H100-SXM-80GB", nodes=1, inside="NVLink4 NVSwitch")
    train = ln.Training(micro_batch=1, global_batch=8, seq=8192)
    return ln.search(ln.Transformer.named("llama-3-8b"), cluster, train, keep=0, schedule="1f1b", cp=1)


@pytest.mark.parametrize("value", [10**400, True, math.nan, "3", -1])
def test_a_price_that_is_none_is_named(found: ln.Found, value: Any) -> None:
    with pytest.raises(InputError, match="usd_per_gpu_hour="):
        charts.pareto(found.feasible, found.pareto, usd_per_gpu_hour=value)


CHARTS = {
    name: [
        each.name for each in inspect.signature(getattr(charts, name)).parameters.values() if each.annotation == "int"
    ]
    for name in dir(charts)
    if inspect.isfunction(getattr(charts, name))
}


@pytest.mark.parametrize("value", [-1, 0, True, 1.5, "x", 10**30, math.nan, None], ids=str)
@pytest.mark.parametrize("name", [name for name, sizes in CHARTS.items() if sizes])
def test_a_size_of_a_chart_that_is_none_is_named(name: str, value: object) -> None:
    chart = getattr(charts, name)
    takes = inspect.signature(chart).parameters.values()
    needed = [each for each in takes if each.default is each.empty and each.kind is not each.KEYWORD_ONLY]
    given = ["" if each.annotation == "str" else None for each in needed]
    for size in CHARTS[name]:
        with pytest.raises(InputError, match=f"{size}=.*give a whole number from 1 to 10,000,000"):
            chart(*given, **{size: value})


LLM = {
    "model": ln.Transformer.named("llama-3-8b"),
    "cluster": ln.Cluster(gpu="H100-SXM-80GB", nodes=1, inside="NVLink4 NVSwitch"),
    "train": ln.Training(micro_batch=1, global_batch=8, seq=8192),
}
TABLES = pl.DataFrame({"rows": [10**4, 10**3], "dim": [64, 64], "pooling": [20.0, 1.0]})
ARGUMENTS: dict[str, Callable[[Any, Graph], object]] = {
    "repeat: times": lambda x, graph: ln.repeat(graph, x),
    "sweep: block": lambda x, graph: ln.sweep(graph, [{}], block=x),
    "search: gpus": lambda x, _: ln.search(**LLM, gpus=x),
    "search: keep": lambda x, _: ln.search(**LLM, keep=x),
    "search: spare": lambda x, _: ln.search(**LLM, keep=0, spare=x),
    "search: micro_batch": lambda x, _: ln.search(**LLM, keep=0, micro_batch=x),
    "search: zero": lambda x, _: ln.search(**LLM, keep=0, zero=x),
    "search: schedule": lambda x, _: ln.search(**LLM, keep=0, schedule=x),
    "DlrmTraining: comm_streams": lambda x, _: ln.DlrmTraining(global_batch=8, comm_streams=x),
    "Transformer.named": lambda x, _: ln.Transformer.named(x),
    "Parallelism.groups": lambda x, _: ln.Parallelism().groups(x),
    "schedule: kind": lambda x, _: schedule(x, 2, 2),
    "schedule: stages": lambda x, _: schedule("1f1b", x, 2),
    "dry_run: rank": lambda x, _: ln.dry_run(lambda: None, world_size=2, rank=x),
    "build_graph: step": lambda x, graph: build_graph(graph.run, x),  # type: ignore[arg-type]
    "activity: bin_ns": lambda x, graph: ln.activity(graph, bin_ns=x),
    "breakdown: by": lambda x, graph: ln.breakdown(graph, by=x),
    "jitter: level": lambda x, graph: ln.jitter(graph.run, level=x),  # type: ignore[arg-type]
    "without_stragglers: replicas": lambda x, graph: ln.without_stragglers(graph, replicas=x),
    "find_gpu": lambda x, _: ln.find_gpu(x),
    "datasets.path": lambda x, _: ln.datasets.path(x),
    "load_calibration": lambda x, _: ln.load_calibration(x),
    "simulate: resources": lambda x, graph: ln.simulate(graph, x),
}


SEVERAL = ("search: micro_batch", "search: zero", "search: schedule")
"""Axes, which an array gives several values of."""


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        pytest.param(argument, value, id=f"{argument}={shown(value)}")
        for argument in ARGUMENTS
        for value in (10**5000, -(10**5000), np.array([2, 3]), b"3", 1j)
        if not (argument in SEVERAL and isinstance(value, np.ndarray))
    ],
)
def test_an_argument_that_none_can_have_is_quoted_in_a_line(graph: Graph, argument: str, value: object) -> None:
    with pytest.raises(LumosError) as caught:
        ARGUMENTS[argument](value, graph)
    assert re.search(re.escape(shown(value)), str(caught.value)), caught.value


def test_whole_numbers_of_numpy_are_taken(graph: Graph) -> None:
    assert ln.repeat(graph, np.int64(2)).step == 1  # type: ignore[arg-type]
    asked = {"tp": np.array([1, 2]), "cp": np.int64(1), "schedule": pl.Series(["1f1b"]), "zero": 1, "micro_batch": (1,)}
    of_numpy = ln.search(**LLM, keep=np.int64(1), gpus=np.int64(8), spare=np.float32(0.25), **asked)  # type: ignore[arg-type]
    same = {"tp": [1, 2], "cp": 1, "schedule": "1f1b", "zero": 1, "micro_batch": 1}
    assert of_numpy.frame.equals(ln.search(**LLM, keep=1, gpus=8, spare=0.25, **same).frame)  # type: ignore[arg-type]


@pytest.mark.parametrize("half", [Fraction(1, 2), np.float32(0.5), np.float16(0.5)], ids=shown)
def test_a_number_of_any_library_is_the_same_as_a_float(
    half: Any, found: ln.Found, tmp_path: Path, graph: Graph
) -> None:
    assert graph.run is not None
    made: list[Callable[[Any], Any]] = [
        lambda x: charts.pareto(found.feasible, found.pareto, usd_per_gpu_hour=x).to_dict(),
        lambda x: (
            ln.chakra.pattern(2, 1, compute_us=x * 1000, collective="all_reduce", size_bytes=8, transfer_us=x).ops
        ),
        lambda x: ln.chakra.Policy(time_scale=x, time_jitter=x),
        lambda x: ln.save_prediction(tmp_path / "p.json", graph.run, change="x", times=x, model_error=x).predicted_ns,  # type: ignore[arg-type]
        lambda x: ln.whatif.network(graph, pl.col("kind") == "comm", bandwidth_factor=x).ops,
    ]
    for make in made:
        of_float, other = make(0.5), make(half)
        assert other.equals(of_float) if isinstance(other, pl.DataFrame) else other == of_float


def test_a_truth_is_no_number_of_surcharges() -> None:
    with pytest.raises(InputError, match="near is True; give a number above 0"):
        ln.Surcharges(near=True)
    with pytest.raises(InputError, match=r"apart is 1000.*; give a number of at least 0"):
        ln.Surcharges(apart=10**400)
