"""Whose lateness it is that ranks wait for: on graphs small enough to do by hand, and as sums on any graph."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.critical_path import replay
from lumos_nb.errors import InputError, SchemaError
from lumos_nb.graph import Graph
from lumos_nb.root_causes import waiting_caused
from tests.test_critical_path import edge, graph_of, op


def program(*calls: tuple[int, str, int] | tuple[str, int, tuple[int, ...]]) -> Graph:
    """Ranks that compute, `(rank, name, dur)`, and meet, `(name, transfer, ranks)`."""
    ops: list[dict[str, object]] = []
    edges: list[dict[str, object]] = []
    last: dict[int, int] = {}

    def add(rank: int, name: str, kind: str, dur: int, **more: object) -> int:
        number = len(ops)
        ops.append(op(number, kind, dur, rank=rank, name=name, **more))
        edges.extend(edge(last[rank], number) for _ in [0] if rank in last)
        last[rank] = number
        return number

    for call in calls:
        if isinstance(call[0], int):
            add(call[0], str(call[1]), "kernel", call[2])  # type: ignore[arg-type]
            continue
        name, transfer, ranks = call
        about = {"collective": name, "group": str(ranks), "comm_seq": len(ops)}
        arrivals = [add(rank, "arrival", "event", 0, **about) for rank in ranks]  # type: ignore[union-attr]
        join = len(ops)
        ops.append(op(join, "join", 0, "net", rank=min(ranks), device=None, **about))  # type: ignore[type-var]
        edges.extend(edge(arrival, join, rule="collective") for arrival in arrivals)
        transfers = [add(rank, str(name), "comm", transfer, **about) for rank in ranks]  # type: ignore[arg-type,union-attr]
        edges.extend(edge(join, number, rule="collective") for number in transfers)
    return graph_of(ops, edges)


def caused(graph: Graph) -> dict[int, tuple[int, int]]:
    frame = waiting_caused(replay(graph)).sort("rank")
    return {rank: times for rank, *times in frame.iter_rows()}


def by_name(graph: Graph) -> dict[tuple[int, str], int]:
    frame = waiting_caused(replay(graph), by=["rank", "name"]).filter(pl.col("waiting_caused_ns") > 0)
    return {(rank, name): time for rank, name, time, _ in frame.iter_rows()}


def test_the_rank_that_arrives_last_causes_what_the_others_wait():
    graph = program((0, "a", 10), (1, "a", 50), (2, "a", 30), ("reduce", 5, (0, 1, 2)))
    assert caused(graph) == {0: [0, 40], 1: [60, 0], 2: [0, 20]}


def test_a_rank_that_was_held_up_itself_passes_the_blame_on():
    """Rank 1 is late for rank 0 only because it waited 40 for rank 2."""
    graph = program(
        (1, "a", 10), (2, "slow", 50), ("send", 0, (1, 2)), (1, "b", 20), (0, "a", 30), ("reduce", 5, (0, 1))
    )  # fmt: skip
    assert caused(graph) == {0: [0, 40], 1: [0, 40], 2: [80, 0]}


def test_what_is_its_own_lateness_stays_with_the_rank():
    """Of the 60 that rank 0 waits for rank 1, 40 are rank 2's; b would have come 20 too late anyway."""
    graph = program(
        (1, "a", 10), (2, "slow", 50), ("send", 0, (1, 2)), (1, "b", 60), (0, "a", 50), ("reduce", 5, (0, 1))
    )  # fmt: skip
    assert by_name(graph) == {(2, "slow"): 80, (1, "b"): 20}


def test_lateness_from_before_a_short_wait_goes_to_what_came_before_that():
    """Rank 0 waits from 0 to 60: for rank 1's a until 40, then for rank 2, and for b."""
    graph = program((1, "a", 40), (2, "slow", 50), ("send", 0, (1, 2)), (1, "b", 10), ("reduce", 5, (0, 1)))
    assert by_name(graph) == {(1, "a"): 40, (2, "slow"): 10 + 10, (1, "b"): 10}


def test_a_wait_that_both_shared_explains_nothing_that_comes_later():
    """All waited for rank 2 at the first meeting; at the second it is only rank 1 that is late."""
    graph = program(
        (0, "a", 10), (1, "a", 20), (2, "slow", 100), ("reduce", 5, (0, 1, 2)),
        (0, "b", 10), (1, "b", 30), (2, "b", 10), ("reduce", 5, (0, 1, 2)),
    )  # fmt: skip
    assert caused(graph) == {0: [0, 90 + 20], 1: [40, 80], 2: [170, 20]}


def test_no_more_is_passed_on_than_the_other_spent_since_both_were_held_up():
    """Ranks 0 and 2 meet at 100, so of what rank 0 then waits rank 2 can have caused only its 10 until it sends."""
    graph = program(
        (0, "a", 100), (2, "a", 100), ("reduce", 0, (0, 2)), (2, "b", 10), (1, "a", 1), ("send", 0, (1, 2)),
        (1, "c", 5), ("reduce", 0, (0, 1)),
    )  # fmt: skip
    assert by_name(graph) == {(2, "b"): 10 + 10, (1, "c"): 5, (2, "a"): 99}


def test_each_op_on_the_late_path_is_charged_in_proportion():
    graph = program((0, "a", 10), (1, "load", 30), (1, "a", 10), ("reduce", 5, (0, 1)))
    assert by_name(graph) == {(1, "load"): 23, (1, "a"): 7}  # 22.5 and 7.5, in whole ns


def test_waiting_is_counted_with_the_collective_that_waited():
    graph = program((0, "a", 10), (1, "a", 50), ("reduce", 5, (0, 1)))
    frame = waiting_caused(replay(graph), by="name").filter(pl.col("waiting_ns") > 0)
    assert frame.rows() == [("reduce", 0, 40)]


@st.composite
def programs(draw: st.DrawFn) -> Graph:
    n = draw(st.integers(2, 4))
    rank = st.integers(0, n - 1)
    compute = st.tuples(rank, st.sampled_from("ab"), st.integers(0, 9))
    meet = st.tuples(
        st.sampled_from(["reduce", "send"]),
        st.integers(0, 3),
        st.lists(rank, min_size=2, unique=True).map(lambda r: tuple(sorted(r))),
    )
    return program(*draw(st.lists(st.one_of(compute, meet), min_size=1, max_size=25)))


@settings(deadline=None, max_examples=60)
@given(graph=programs())
def test_all_waiting_is_caused_by_somebody(graph: Graph):
    result = replay(graph)
    ops = result.ops.with_columns(end_ns=pl.col("start_ns") + pl.col("dur_ns"))
    joins = ops.filter(pl.col("kind") == "join").select(dst="op_id", at_ns="start_ns")
    arrivals = graph.edges.join(joins, on="dst").join(ops.select(src="op_id", end_ns="end_ns"), on="src")
    waited = arrivals.select((pl.col("at_ns") - pl.col("end_ns")).sum()).item()
    for by in ("rank", ["rank", "kind", "name"]):
        frame = waiting_caused(result, by=by)
        assert frame["waiting_caused_ns"].sum() == frame["waiting_ns"].sum() == waited
        assert (frame["waiting_caused_ns"] >= 0).all()
    per_op = waiting_caused(result, by="op_id").join(ops, on="op_id")
    assert set(waiting_caused(result)["rank"]) == set(ops["rank"])
    assert not per_op.filter((pl.col("waiting_caused_ns") > 0) & (pl.col("dur_ns") == 0)).height


def test_a_result_and_known_columns_are_needed():
    graph = program((0, "a", 10), (1, "a", 50), ("reduce", 5, (0, 1)))
    with pytest.raises(InputError, match="this takes a Result: replay"):
        waiting_caused(graph)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="op table lacks the column"):
        waiting_caused(replay(graph), by=["stage"])


def test_a_graph_without_joins_has_no_waiting():
    assert caused(program((0, "a", 10), (1, "a", 50))) == {0: [0, 0], 1: [0, 0]}
    assert waiting_caused(replay(program((0, "a", 10))), by="name").is_empty()
