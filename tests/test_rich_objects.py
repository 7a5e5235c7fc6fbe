"""What objects show of themselves: tables in notebooks and terminals, in which a name is never more than text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import msgspec
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
    costs = ln.ShardingCosts.of(ln.PhysicalLookup.of_sheet(CLUSTER.gpu_sheet), CLUSTER, batch=4096)
    return ln.shard(tables, CLUSTER, costs, seed=1)


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
    "recommendation estimate": lambda: replace(
        ln.estimate_dlrm(
            ln.Dlrm(dense=13, bottom=(64, 64), top=(64, 1)), plan(), ln.DlrmTraining(global_batch=4096), CLUSTER
        ),
        assumptions=("so",),
    ),
    "Chakra nodes": lambda: ln.chakra.obfuscate(graph(), ln.chakra.Policy()).ranks[0],
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


def test_every_public_object_that_holds_results_shows_tables():
    """Layouts, models and what to run are what was typed: their text is the call that makes them."""
    typed = (ln.Pool, ln.Resources, ln.Mla, ln.Moe, ln.Transformer, ln.Cluster, ln.Parallelism, ln.Training)
    typed += (ln.Dlrm, ln.DlrmTraining, ln.ShardingCosts, ln.LookupNet, ln.Recorder)
    classes = {value for name in ln.__all__ if inspect.isclass(value := getattr(ln, name))}
    assert {one.__name__ for one in classes if not hasattr(one, "_repr_html_")} == {one.__name__ for one in typed}
