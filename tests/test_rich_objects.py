"""What objects show of themselves: tables in notebooks and terminals, in which a name is never more than text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import datasets
from lumos_nb.graph import Recording
from lumos_nb.workloads.surcharges import bundled

HOSTILE = "<script>alert('x')</script>"
CLUSTER = ln.Cluster(gpu="A100-SXM-80GB", inside="NVLink3 NVSwitch")
MODEL = ln.Transformer(layers=4, hidden=256, heads=4, ffn=1024, vocab=1024)
TRAIN = ln.Training(micro_batch=1, global_batch=8, seq=512)


@cache
def run(name: str) -> ln.Run:
    return ln.load_run(datasets.path(name))


@cache
def graph(name: str = "gpt-ddp") -> ln.Graph:
    return ln.build_graph(run(name))


@cache
def plan() -> ln.Plan:
    tables = pl.DataFrame({"table": ["a", "b"], "rows": [10**6, 10**9], "dim": 64, "pooling": 20.0})
    return ln.shard(tables, CLUSTER, costs(), seed=1)


def costs() -> ln.ShardingCosts:
    return ln.ShardingCosts.of(ln.PhysicalLookup.of_sheet(CLUSTER.gpu_sheet), CLUSTER, batch=4096)


def network() -> ln.LookupNet:
    """One that nobody trained: of calls of 100 us forward and 200 us backward."""
    layers, numbers = tuple(np.zeros((1, 1)) for _ in range(8)), np.zeros(1)
    shift = np.log([100.0, 200.0])
    return ln.LookupNet("lin", numbers, numbers, layers, shift, np.ones(2), None, calls=7, errors=(0.1, 0.25))


OBJECTS: dict[str, Callable[[], Any]] = {
    "run": lambda: run("gpt-ddp"),
    "execution trace": lambda: ln.load_execution_trace(datasets.path("gpt-single-paired")),
    "recording": lambda: Recording.of(run("gpt-ddp")),
    "graph": graph,
    "result": lambda: ln.replay(graph()),
    "report": lambda: ln.step_report(run("gpt-single")),
    "calibration": lambda: ln.load_calibration("A40"),
    "lookups": lambda: ln.PhysicalLookup.of_sheet(CLUSTER.gpu_sheet),
    "GPU": lambda: ln.find_gpu("H100"),
    "fabric": lambda: ln.find_fabric("NVLink4 NVSwitch"),
    "surcharges": lambda: msgspec.structs.replace(bundled().every, host={HOSTILE: 2.0}),
    "structure": lambda: ln.find_structure(graph("gpt-pp")),
    "estimate": lambda: replace(ln.estimate(MODEL, ln.Parallelism(dp=8), TRAIN, CLUSTER), assumptions=("so",)),
    "search": lambda: ln.search(MODEL, CLUSTER, TRAIN, keep=1, recompute="none"),
    "plan": plan,
    "prices of plans": lambda: replace(costs(), report=pl.DataFrame({"network": ["lookups"], "unseen": [9]})),
    "network of lookups": lambda: replace(network(), base=ln.PhysicalLookup.of_sheet(CLUSTER.gpu_sheet)),
    "recommendation estimate": lambda: replace(
        ln.estimate_dlrm(
            ln.Dlrm(dense=13, bottom=(64, 64), top=(64, 1)), plan(), ln.DlrmTraining(global_batch=4096), CLUSTER
        ),
        assumptions=("so",),
    ),
    "Chakra nodes": lambda: ln.chakra.obfuscate(graph(), ln.chakra.Policy()).ranks[0],
    "model of traces": lambda: ln.chakra.TraceModel.fit({HOSTILE: [graph()]}, epochs=0),
    "obfuscated": lambda: ln.chakra.obfuscate(graph(), ln.chakra.Policy()),
    "linked": lambda: ln.chakra.link(datasets.path("gpt-single-paired"), datasets.path("gpt-single-paired")),
    "workload": lambda: ln.benchmark.workload(datasets.path("gpt-single-paired")),
    "similarity": lambda: ln.benchmark.compare(datasets.path("gpt-ddp-paired"), datasets.path("gpt-single-paired")),
    "selection": lambda: ln.benchmark.select(run("gpt-ddp"), 2, by="step"),
}


def poisoned(one: Any) -> Any:
    """The same object with a name that is a script behind every text in its tables and fields."""
    if isinstance(one, pl.DataFrame):
        return one.with_columns(pl.col(pl.String).exclude("unit") + HOSTILE)
    if isinstance(one, str):
        return one + HOSTILE
    if type(one) in (tuple, list):
        return type(one)(map(poisoned, one))
    if is_dataclass(one) and not isinstance(one, type):
        named = {f.name: getattr(one, f.name) for f in fields(one) if f.init}
        return replace(
            one, **{k: poisoned(v) for k, v in named.items() if isinstance(v, pl.DataFrame | str | tuple | list)}
        )
    if isinstance(one, msgspec.Struct):
        named = {name: getattr(one, name) for name in one.__struct_fields__}
        return msgspec.structs.replace(one, **{k: poisoned(v) for k, v in named.items() if isinstance(v, str | tuple)})
    return one


@pytest.mark.parametrize("name", OBJECTS)
def test_a_name_that_is_a_script_stays_text(name):
    one = OBJECTS[name]()
    assert "<table" in one._repr_html_()
    shown = poisoned(one)._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown


@pytest.mark.parametrize("name", sorted(OBJECTS.keys() - {"GPU", "fabric", "surcharges"}))
def test_a_terminal_gets_the_same_as_text(name):
    """Sheets show the call that makes them."""
    text = repr(OBJECTS[name]())
    assert "<" not in text.replace(HOSTILE, "")
    assert len(text.splitlines()) >= 3


def test_a_network_says_what_a_call_takes_and_how_far_it_is_off():
    assert repr(network()).splitlines() == [
        "Lookups by a network, features of lin: 7 calls; median error on tables that it stopped by 10.0% forward, "
        "25.0% backward",
        "pass      median error    call",
        "--------  ------------  ------",
        "forward         10.0 %  100 µs",
        "backward        25.0 %  200 µs",
    ]


def test_a_policy_shows_what_it_gives_away():
    assert '<td style="text-align: left">time_scale</td><td style="text-align: left">0.5</td>' in (
        ln.chakra.Policy(time_scale=0.5)._repr_html_()
    )


def test_every_public_object_that_holds_results_shows_tables():
    """Layouts, models and what to run are what was typed: their text is the call that makes them."""
    typed = (ln.Pool, ln.Resources, ln.Mla, ln.Moe, ln.Transformer, ln.Cluster, ln.Parallelism, ln.Training)
    typed += (ln.Dlrm, ln.DlrmTraining, ln.Recorder)
    public = [getattr(module, name) for module in (ln, ln.chakra, ln.benchmark) for name in module.__all__]
    classes = {value for value in public if inspect.isclass(value)}
    assert {one.__name__ for one in classes if not hasattr(one, "_repr_html_")} == {one.__name__ for one in typed}


HANDED_ON = {
    # object: its main table, and the files that it becomes
    "search": (lambda one: one.frame, {"frame"}),
    "plan": (lambda one: one.frame, {"frame", "tables", "devices", "splits"}),
    "calibration": (lambda one: one.coverage(), {"coverage", "sources"}),
    "estimate": (lambda one: one.result.ops, {"ops", "edges", "breakdown", "basis", "memory"}),
    "recommendation estimate": (lambda one: one.result.ops, {"ops", "edges", "breakdown", "basis", "parts"}),
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_what_was_found_goes_to_pandas_and_parquet(name, tmp_path):
    one, (main, files) = OBJECTS[name](), HANDED_ON[name]
    assert pl.from_pandas(one.to_pandas()).equals(main(one).with_columns(pl.col(pl.Enum).cast(pl.Categorical)))
    assert one.to_parquet(tmp_path / "new") == tmp_path / "new"
    assert {file.stem for file in (tmp_path / "new").iterdir()} == files
    assert pl.read_parquet(tmp_path / "new" / f"{next(iter(one._tables()))}.parquet").equals(main(one))


@pytest.mark.parametrize("name", ["estimate", "recommendation estimate"])
def test_an_estimate_goes_to_perfetto_as_its_replay_does(name, tmp_path):
    one = OBJECTS[name]()
    files = [each.to_perfetto(tmp_path / f"{n}.json") for n, each in enumerate((one, one.result))]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_has_no_time_has_no_timeline():
    assert not any(hasattr(one, "to_perfetto") for one in (ln.Found, ln.Plan, ln.Calibration, ln.ExecutionTrace))
