"""Collectives that no record names, in ops and in gaps of some of the ranks."""

from __future__ import annotations

import polars as pl
from trace_builder import Trace, graph_of, recording_of, repeated, scaled, spans, step_us

HOUSES = {0: 100, 1: 500, 2: 300}
"""Rank -> when its work ends, in µs of the step; nothing says that they wait for each other until 600."""


def waiting(rank: int, works: float, until: float = 600, device: bool = False) -> Trace:
    def body(trace: Trace, step: int, s: float) -> None:
        trace.op(f"aten::work{rank}", s, s + works)
        if device:
            trace.launch("k", (s + works - 5, s + works), (s + works, s + until))
        trace.op("aten::after", s + until, s + until + 50)

    return repeated(body, rank=rank)


def test_gaps_that_end_together_are_a_collective_of_the_ranks_that_do_so():
    traces = [waiting(rank, works) for rank, works in HOUSES.items()] + [waiting(3, 50, until=60)]
    graph = graph_of(*traces, step=2)
    hidden = graph.ops.filter((pl.col("collective") == "hidden") & (pl.col("kind") == "comm"))
    assert hidden.sort("rank").select("rank", "name", "dur_ns").rows() == [
        (rank, "before aten::after", 100_000) for rank in HOUSES
    ]
    assert spans(scaled(graph, {"aten::work1": 0.8}), "aten::after") == [(1060, 1110), *[(1500, 1550)] * 3]
    assert graph.report.filter(pl.col("what") == "hidden collectives")["count"].to_list() == [4, 4, 4]


def test_the_rank_that_a_group_waited_for_may_go_on_to_wait_for_others():
    """Ranks 0 and 1 wait for rank 2, which itself waits for rank 3 from then on."""
    traces = [
        waiting(0, 100, until=510),
        waiting(1, 60 + 250, until=510),
        waiting(2, 500, until=900),
        waiting(3, 890, until=900),
    ]
    graph = graph_of(*traces, step=2)
    hidden = graph.ops.filter((pl.col("collective") == "hidden") & (pl.col("kind") == "comm"))
    groups = hidden.group_by("match").agg(pl.col("rank").sort())["rank"].to_list()
    assert sorted(groups) == [[0, 1, 2], [2, 3]]
    assert step_us(graph) == 1000
    assert spans(graph, "aten::after") == [(1510, 1560), (1510, 1560), (1900, 1950), (1900, 1950)]
    quick = scaled(graph, {"aten::work2": 0.5})
    assert spans(quick, "aten::after", rank=0) == [(1320, 1370)]  # now rank 1 is the last: 310 + 10
    assert spans(quick, "aten::after", rank=2) == [(1900, 1950)]


def test_ranks_that_merely_do_alike_hide_nothing():
    traces = [waiting(rank, 100 + rank) for rank in range(3)]
    hidden = recording_of(*traces).ops.filter(pl.col("collective") == "hidden")
    assert "before aten::after" not in hidden["name"].to_list()


def test_beside_a_device_a_gap_hides_no_collective():
    traces = [waiting(rank, works, device=True) for rank, works in HOUSES.items()]
    hidden = recording_of(*traces).ops.filter(pl.col("collective") == "hidden")
    assert "before aten::after" not in hidden["name"].to_list()
