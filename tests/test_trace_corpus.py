"""Graphs of dry runs: structure of every rank, joined, without durations; a generator learns from them as well."""

from __future__ import annotations

import pytest

from benchmarks.trace_corpus import dry_corpus, layouts
from lumos_nb import replay
from lumos_nb.exchange.chakra import TraceModel

FP32 = 4


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LUMOS_NB_CACHE", str(tmp_path))
    return tmp_path


def test_dry_runs_of_all_ranks_are_one_graph_and_are_kept(cache):
    name = "perceptron of 3 layers, SGD, ddp 2"
    corpus = dict(dry_corpus([name]))
    (graph,) = corpus[name]
    # One bucket holds the gradients of three layers of 64 x 64 and 64: 4 bytes each.
    assert graph.ops["kind"].to_list().count("join") == 1
    assert set(graph.ops.filter(kind="comm")["comm_bytes"]) == {3 * (64 * 64 + 64) * FP32}
    assert graph.ops["dur_ns"].sum() == replay(graph).makespan_ns == 0
    (folder,) = (cache / "dry_runs").iterdir()
    made = folder.stat().st_mtime_ns
    (again,) = dict(dry_corpus([name]))[name]
    assert again.ops.equals(graph.ops)
    assert again.edges.equals(graph.edges)
    assert folder.stat().st_mtime_ns == made
    drawn = TraceModel.fit(corpus, epochs=0).sample(seed=0, ranks=6)
    assert drawn.ops["rank"].n_unique() == 6
    assert set(drawn.ops.filter(kind="comm")["group_size"]) == {6}


@pytest.mark.parametrize(
    ("name", "collectives"),
    [
        # Sharded once a layer and once for the rest; two all-reduces a layer each way; 4 micro-batches there and back.
        pytest.param(
            "gpt of 1 layers, AdamW, fsdp 2", {"all_gather": 2 + 1, "reduce_scatter": 2, "all_reduce": 0}, id="fsdp"
        ),
        pytest.param("gpt of 1 layers, tp 2", {"all_reduce": 4}, id="tp"),
        pytest.param("gpt of 2 layers, pp 2", {"send": 4, "recv": 4}, id="pp"),
    ],
)
def test_layouts_communicate_as_they_must(name, collectives):
    (graph,) = dict(dry_corpus([name]))[name]
    comm = graph.ops.filter(kind="comm", rank=0)["collective"].to_list()
    assert {collective: comm.count(collective) for collective in collectives} == collectives


@pytest.mark.parametrize("name", ["perceptron of 1 layers, AdamW, fsdp 4", "gpt of 1 layers, tp 2"])
def test_ranks_that_are_run_once_are_alike(name):
    layout = layouts()[name]
    assert layout.alike
    for once, each in zip(layout.runs(), layout._replace(alike=False).runs(), strict=True):
        assert once.rank == each.rank
        assert once.ops.equals(each.ops)
        assert once.collectives.drop("group").equals(each.collectives.drop("group"))


def test_there_are_hundreds_of_layouts():
    assert len(layouts()) >= 200
