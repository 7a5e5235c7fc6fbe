"""Graphs of dry runs: structure of every rank, joined, without durations; a generator learns from them as well."""

from __future__ import annotations

from benchmarks.trace_corpus import dry_corpus, small_ddp
from lumos_nb import replay
from lumos_nb.exchange.chakra import TraceModel


def test_dry_runs_of_all_ranks_are_one_graph():
    corpus = dict(dry_corpus(small_ddp, (2,)))
    (graph,) = corpus["dry run of 2 ranks"]
    kinds = graph.ops["kind"].to_list()
    # One bucket holds the gradients of three layers of 64 x 64 and 64: 4 bytes each.
    assert kinds.count("join") == 1
    assert set(graph.ops.filter(kind="comm")["comm_bytes"]) == {3 * (64 * 64 + 64) * 4}
    assert graph.ops["dur_ns"].sum() == replay(graph).makespan_ns == 0
    drawn = TraceModel.fit(corpus, epochs=0).sample(seed=0, ranks=6)
    assert drawn.ops["rank"].n_unique() == 6
    assert set(drawn.ops.filter(kind="comm")["group_size"]) == {6}
