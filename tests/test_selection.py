"""Representative choice: medoids, weights and what they promise."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lumos_nb as ln
from lumos_nb import benchmark
from lumos_nb.errors import InputError, RunError
from lumos_nb.exchange.benchmark.selection import k_medoids
from lumos_nb.graph import Graph
from lumos_nb.schema import EDGES, OPS
from lumos_nb.traces.run import Run
from tests.trace_builder import Trace, repeated, run_of

PAIRED = ln.datasets.path("gpt-single-paired")
SPENT = st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=9)


def graph(spent: dict[str, int]) -> Graph:
    """A graph of one lane: a kernel a name, of so many ns; and what is no work."""
    rows = [
        {"op_id": at, "rank": 0, "step": 1, "lane": "gpu0:7", "kind": kind, "name": name, "start_ns": 0, "dur_ns": ns}
        for at, (kind, name, ns) in enumerate([*(("kernel", *one) for one in spent.items()), ("gap", "gap", 10**9)])
    ]
    return Graph(pl.DataFrame(rows, schema=dict(OPS.columns)), EDGES.empty(), 1)


def graphs(spent: list[list[int]]) -> list[Graph]:
    return [graph({f"op{at}": ns for at, ns in enumerate(row) if ns}) for row in spent]


@settings(max_examples=40)
@given(SPENT, st.data())
def test_weights_and_amounts_add_up_and_the_error_is_bounded(spent, data):
    k = data.draw(st.integers(1, len(spent)))
    found = benchmark.select(graphs(spent), k)
    assert found.chosen["weight"].sum() == len(spent)
    assert found.chosen["weight"].min() >= 1
    assert sorted(name for names in found.chosen["stands_for"] for name in names) == sorted(map(str, range(len(spent))))
    assert found.ops["whole"].sum() == np.sum(spent)
    weights = dict(found.chosen.select("number", "weight").iter_rows())
    assert found.ops["weighted"].sum() == sum(sum(spent[at]) * weight for at, weight in weights.items())
    assert found.error <= found.spread + 1e-12
    assert found.coverage <= 1
    assert found.chosen["share"].sum() == pytest.approx(1 if np.sum(spent) else 0)
    assert found.items["representative"].is_in(found.chosen["number"].to_list()).all()


@settings(max_examples=20)
@given(SPENT)
def test_all_items_stand_for_themselves_without_error_even_where_they_are_equal(spent):
    found = benchmark.select(graphs(spent), len(spent))
    assert found.chosen["weight"].to_list() == [1] * len(spent)
    assert (found.error, found.spread) == (0, 0)
    assert found.items["representative"].to_list() == list(range(len(spent)))


@given(st.lists(st.integers(0, 100), min_size=2, max_size=8), st.integers(1, 4))
def test_no_exchange_of_a_medoid_brings_items_nearer_and_one_is_the_best(places, k):
    apart = np.abs(np.subtract.outer(places, places)).astype(float)
    k = min(k, len(places))

    def total(chosen: Any) -> float:
        return float(apart[list(chosen)].min(axis=0).sum())

    found = k_medoids(apart, k).tolist()
    swapped = [[*{*found} - {out}, into] for out in found for into in range(len(places))]
    assert total(found) <= min(map(total, swapped))
    best = min(map(total, combinations(range(len(places)), k)))
    assert total(found) == best if k == 1 else total(found) >= best
    assert k_medoids(apart, k).tolist() == found


def test_groups_of_jobs_are_found_and_the_middle_of_each_stands_for_it():
    jobs = {f"a{n}": graph({"mm": 100 + n}) for n in range(3)} | {f"b{n}": graph({"conv": 50 + n}) for n in range(5)}
    found = benchmark.select(jobs, 2)
    assert found.chosen.select("name", "weight", "amount", "stands_for").rows() == [
        ("b2", 5, 52, ["b0", "b1", "b2", "b3", "b4"]),
        ("a1", 3, 101, ["a0", "a1", "a2"]),
    ]
    assert found.ops.sort("name").select("name", "whole", "weighted").rows() == [("conv", 260, 260), ("mm", 303, 303)]
    assert (found.error, found.coverage) == (0, 1)
    assert found.spread == pytest.approx((2 + 1 + 1 + 2 + 1 + 1) / 563)
    assert "2 of 8 stand for all: 100.0 % of operator time covered" in repr(found)
    assert "b0, b1, b2, b3, 1 more" in found._repr_html_()


def run(slow_from: int = 5, rank: int = 0) -> Run:
    """Eight steps, the later ones three times as long."""
    length = [10 if number < slow_from else 30 for number in range(9)]
    return run_of(repeated(lambda t, n, at: t.op("aten::mm", at, at + length[n]), steps=8, rank=rank))


def test_a_run_is_cut_by_steps_without_the_first():
    found = benchmark.select(run(), 2, by="step")
    assert found.chosen.select("weight", "amount").rows() == [(4, 30_000), (3, 10_000)]
    assert found.chosen["stands_for"].explode().to_list() == [f"step {n}" for n in (5, 6, 7, 8, 2, 3, 4)]


def test_runs_are_cut_by_ranks_and_ranks_keep_their_run_s_name():
    fast, slow = run(9), run(1)
    two = Run(pl.concat([fast.events, slow.events.with_columns(rank=pl.lit(1, pl.Int32))]), fast.ranks, fast.report, {})
    found = benchmark.select({"x": two, "y": two}, 2, by="rank")
    assert found.chosen["stands_for"].to_list() == [["x, rank 0", "y, rank 0"], ["x, rank 1", "y, rank 1"]]
    assert benchmark.select([two, fast], 2).items["amount"].to_list() == [40_000, 10_000]  # both ranks, and one


def test_execution_traces_are_told_apart_by_the_bytes_of_their_operands(tmp_path: Path):
    path = next(PAIRED.glob("*.et.json.gz"))
    trace = ln.load_execution_trace(path)
    found = benchmark.select([trace, trace, path], 1)
    assert found.measure == "bytes"
    operators = trace.nodes.filter(kind="operator")["node_id"]
    sized = trace.tensors.filter(pl.col("node_id").is_in(operators.implode()))
    assert found.ops["whole"].sum() == 3 * sized.select((pl.col("numel") * pl.col("itemsize")).sum()).item()
    assert found.error == 0
    assert found.items["name"].to_list() == ["0", "1", str(path)]


def test_steps_of_a_real_run_need_few_representatives():
    path = ln.datasets.path("gpt-ddp")
    few, more = (benchmark.select(path, k, by="step") for k in (1, 3))
    assert 0 < more.spread < few.spread
    assert 0.5 < few.coverage <= 1


@pytest.mark.parametrize("k", [0, -1, 4, 1.0, True, "2", None])
def test_a_k_that_cannot_be_is_refused(k):
    with pytest.raises(InputError, match=r"of 3 items: give a whole number from 1"):
        benchmark.select(graphs([[1, 2, 3]] * 3), k)


@pytest.mark.parametrize(
    ("traces", "how", "message"),
    [
        pytest.param([], {}, "of 0 items", id="nothing"),
        pytest.param(
            [run(), graph({"mm": 1})], {}, "'1' is a Graph and '0' a Run: give traces of one kind", id="mixed"
        ),
        pytest.param([graph({"mm": 1})], {"by": "step"}, "only runs are cut by step", id="a graph by steps"),
        pytest.param([run()], {"by": "layer"}, "by is 'layer'", id="by what there is not"),
        pytest.param({"x": 3}, {}, "'x' is a int; give a run", id="no trace"),
        pytest.param(3, {}, "traces is a int", id="no traces"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused_by_name(traces, how, message):
    with pytest.raises(InputError, match=message):
        benchmark.select(traces, 1, **how)


def test_runs_without_marked_steps_are_refused():
    unmarked = Trace()
    unmarked.op("aten::mm", 0, 10)
    with pytest.raises(RunError, match="no ProfilerStep mark"):
        benchmark.select([run_of(unmarked)], 1)
