"""Every example of a docstring runs; where it shows what comes out, that is what comes out."""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import charts, datasets
from lumos_nb.graph import Recording

PROGRAMS = ("bench", "binding", "__main__")
MODEL = ln.Transformer(layers=4, hidden=256, heads=4, ffn=1024, vocab=1024)
TRAIN = ln.Training(micro_batch=1, global_batch=8, seq=512)
CLUSTER = ln.Cluster(gpu="A100-SXM-80GB", inside="NVLink3 NVSwitch")


@cache
def given() -> dict[str, Any]:
    """What examples may use without making it: a run, its graph and result, a prediction, layouts found, a plan."""
    run = ln.load_run(datasets.path("gpt-ddp"))
    graph = ln.build_graph(run)
    tables = pl.DataFrame({"table": ["a", "b"], "rows": [10**6, 10**7], "dim": 64, "pooling": 20.0})
    costs = ln.ShardingCosts.of(ln.PhysicalLookup.of_sheet(CLUSTER.gpu_sheet), CLUSTER, batch=4096)
    layout = ln.Parallelism(dp=8)
    own = {"ln": ln, "pl": pl, "np": np, "Path": Path, "charts": charts, "whatif": ln.whatif, "datasets": datasets}
    return own | {
        "run": run,
        "recording": Recording.of(run),
        "graph": graph,
        "another": ln.build_graph(run, 4),
        "result": ln.replay(graph),
        "cal": ln.load_calibration("H100-SXM-80GB"),
        "model": MODEL,
        "train": TRAIN,
        "cluster": CLUSTER,
        "layout": layout,
        "found": ln.estimate(MODEL, layout, TRAIN, CLUSTER),
        "tables": tables,
        "costs": costs,
        "plan": costs.price(ln.shard(tables, CLUSTER, costs, seed=1)),
        **{name: getattr(ln, name) for name in ln.__all__},
        **{name: value for name, value in vars(charts).items() if inspect.isfunction(value)},
    }


@cache
def of_module(module: str) -> dict[str, Any]:
    """What some modules' examples have instead: edits are shown on the graph of a predicted step on GPUs."""
    if module != "lumos_nb.whatif":
        return {}
    return {"graph": ln.estimate(MODEL, ln.Parallelism(tp=2, pp=4), TRAIN, CLUSTER).graph}


class Checker(doctest.OutputChecker):
    """Takes any output where an example shows none."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in pkgutil.walk_packages(ln.__path__, "lumos_nb."):
        if module.name.rpartition(".")[2] not in PROGRAMS:
            found = finder.find(importlib.import_module(module.name), module.name)
            yield from (test for test in found if not all(one.options.get(doctest.SKIP) for one in test.examples))


@pytest.mark.parametrize("example", list(examples()), ids=lambda test: test.name.removeprefix("lumos_nb."))
def test_it_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/gpt").symlink_to(datasets.path("gpt-ddp"))
    example.globs = given() | example.globs | of_module(example.globs["__name__"])
    said = io.StringIO()
    runner = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(example, out=said.write)
    assert runner.summarize(verbose=False).failed == 0, said.getvalue()
