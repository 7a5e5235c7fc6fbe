"""What holds of any step's times, and traces whose numbers are odd: a result that keeps it, or an error of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lumos_nb as ln
from lumos_nb.critical_path import sweep
from lumos_nb.errors import LumosError
from lumos_nb.findings import parts_by_rank
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.traces.run import Run, load_run
from tests.trace_builder import ZERO_NS, Trace, recording_of, repeated, write_kineto


@pytest.fixture(scope="module")
def run() -> Run:
    return load_run(ln.datasets.path("gpt-ddp"))


@pytest.fixture(scope="module")
def graph(run: Run) -> Graph:
    return build_graph(run)


def _ranks(name: str, ranks: list[int] | None) -> list[Path] | Path:
    folder = ln.datasets.path(name)
    return folder if ranks is None else [folder / f"rank-{rank}.json.gz" for rank in ranks]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, None) for name in ("gpt-ddp", "gpt-ddp-delay", "gpt-grid", "gpt-pp", "gpt-single", "gpt-tp")),
        ("gpt-pp", [1]),
        ("gpt-grid", [12]),
        ("gpt-grid", [1, 4, 7, 9, 10, 12, 13, 15, 16]),  # their collectives' ends gave clocks that are 5 ms wrong
        ("gpt-grid", [rank for rank in range(20) if rank != 18]),
    ],
)
def test_every_step_takes_as_long_as_measured_whichever_ranks_have_a_trace(name: str, ranks: list[int] | None) -> None:
    """Of runs on one machine, to the nanosecond: where their clocks contradict the order of messages it is longer."""
    recording = Recording.of(load_run(_ranks(name, ranks)))
    measured = dict(recording.step_times().select("step", "step_ns").rows())
    assert {step: ln.replay(build_graph(recording, step)).step_ns for step in measured} == measured


def holds(graph: Graph) -> None:
    """Assert that a step's parts add up to it on every rank, and that no lane works on two things at once.

    Delays that nothing explains, and what went on when the step began, are no work of their lane: of these several may
    run beside each other, as long as two collectives that a lane waits for.
    """
    result = ln.replay(graph)
    parts = parts_by_rank(result)
    assert parts.select(pl.sum_horizontal(pl.exclude("rank", "step_ns")) == pl.col("step_ns")).to_series().all()
    work = result.ops.filter(~pl.col("kind").is_in(["unexplained", "boundary", "join"]) & (pl.col("dur_ns") > 0))
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    overlapping = work.sort("start_ns").filter(pl.col("start_ns") < end_ns.shift(1).over("rank", "lane"))
    assert overlapping.is_empty()
    busiest_ns = work.group_by("rank", "lane").agg(pl.sum("dur_ns"))["dur_ns"].max() or 0
    assert busiest_ns <= result.makespan_ns


def test_a_step_adds_up_and_takes_no_less_than_its_busiest_lane(graph: Graph) -> None:
    holds(graph)


@given(st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_the_order_of_ops_changes_no_time(graph: Graph, noise: Random) -> None:
    ops = graph.ops.sample(fraction=1.0, shuffle=True, seed=noise.randrange(2**31))
    found, expected = ln.replay(replace(graph, ops=ops)), ln.replay(graph)
    for column in ("start_ns", "slack_ns"):
        assert found.ops.sort("op_id")[column].equals(expected.ops.sort("op_id")[column])
    assert (found.step_ns, found.makespan_ns) == (expected.step_ns, expected.makespan_ns)
    assert found.step_ends.equals(expected.step_ends)


@given(st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_other_numbers_of_ops_change_no_time(graph: Graph, noise: Random) -> None:
    """Ids are names: drawn anew, with edges that follow them, they give the same."""
    ids = graph.ops["op_id"]
    drawn = pl.Series(noise.sample(range(-(2**40), 2**40), len(ids)), dtype=pl.Int64)
    edges = graph.edges.with_columns(pl.col("src", "dst").replace_strict(ids, drawn))
    found = ln.replay(replace(graph, ops=graph.ops.with_columns(op_id=drawn), edges=edges))
    expected = ln.replay(graph)
    assert found.ops.drop("op_id").equals(expected.ops.drop("op_id"))
    assert found.composition.equals(expected.composition)


@given(st.integers(0, 50))
def test_scaling_every_time_scales_the_step(graph: Graph, factor: int) -> None:
    scaled = replace(
        graph,
        ops=graph.ops.with_columns(pl.col("dur_ns") * factor),
        edges=graph.edges.with_columns(pl.col("lag_ns") * factor),
    )
    first_ns = ln.replay(graph).ops["start_ns"].min()
    assert isinstance(first_ns, int)
    ends = (
        (ln.replay(one).ops.select(pl.col("start_ns") + pl.col("dur_ns")).max().item() - first_ns)
        for one in (graph, scaled)
    )
    once, many = ends
    assert many == factor * once


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=20))
def test_further_edges_never_shorten_a_step(graph: Graph, drawn: list[tuple[int, int, int]]) -> None:
    """From ops that begin earlier to such as begin later, so that there is no cycle."""
    result = ln.replay(graph)
    ops = result.ops.drop_nulls("start_ns").select("op_id", "start_ns").rows()
    pairs = [(*sorted((ops[a % len(ops)], ops[b % len(ops)]), key=lambda op: op[1]), lag) for a, b, lag in drawn]
    rows = [{"src": one[0], "dst": other[0], "lag_ns": lag} for one, other, lag in pairs if one[1] < other[1]]
    rest = {"from_start": False, "rule": "drawn", "evidence": "drawn", "hard": True}
    more = pl.DataFrame([row | rest for row in rows], schema=graph.edges.schema)
    edges = pl.concat([graph.edges, more])
    assert ln.replay(replace(graph, edges=edges)).step_ns >= result.step_ns


@given(st.randoms(use_true_random=False))
def test_the_order_of_edges_changes_nothing(graph: Graph, noise: object) -> None:
    shuffled = graph.edges.sample(fraction=1.0, shuffle=True, seed=hash(str(noise)) % 2**31)
    result = ln.replay(replace(graph, edges=shuffled))
    assert result.ops["start_ns"].equals(ln.replay(graph).ops["start_ns"])


def test_a_sweep_that_scales_by_one_is_the_replay(graph: Graph) -> None:
    kinds = graph.ops["kind"].unique().to_list()
    assert sweep(graph, [dict.fromkeys(kinds, 1.0)])["step_ns"].item() == ln.replay(graph).step_ns


def changed(run: Run, events: pl.DataFrame) -> Run:
    """The run with other events."""
    return replace(run, events=events)


ODD = {
    "steps that take no time": pl.all_horizontal(pl.col("dur_ns") >= 0),
    "one rank without events": pl.col("rank") != 1,
    "one op a rank": pl.col("event_id") < 1,
    "nothing at all": pl.lit(value=False),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs_end_in_a_step_that_keeps_what_must_hold_or_in_our_error(run: Run, name: str) -> None:
    events = run.events.filter(ODD[name])
    if name == "steps that take no time":
        marks = pl.col("name").str.starts_with("ProfilerStep#")
        events = events.with_columns(dur_ns=pl.when(marks).then(0).otherwise("dur_ns"))
    try:
        holds(build_graph(changed(run, events)))
    except LumosError as error:
        assert str(error)  # noqa: PT017 (either is right)


@pytest.mark.parametrize("skew_s", [-30, -1, 1, 30])
def test_clocks_that_are_seconds_apart_leave_each_rank_its_time(run: Run, graph: Graph, skew_s: int) -> None:
    moved = pl.when(pl.col("rank") == 1).then(pl.col("start_ns") + skew_s * 10**9).otherwise("start_ns")
    skewed = build_graph(changed(run, run.events.with_columns(start_ns=moved)), graph.step)
    holds(skewed)
    assert ln.replay(skewed).step_ns == pytest.approx(ln.replay(graph).step_ns, rel=0.02)


@pytest.mark.parametrize("seed", range(24))
def test_a_tenth_of_the_events_missing_is_a_step(run: Run, seed: int) -> None:
    kept = pl.col("event_id").hash(seed) % 10 > 0
    holds(build_graph(changed(run, run.events.filter(kept))))


@pytest.fixture(scope="module")
def launching(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps of fifty kernels each, on two streams, and a wait for the device at the end of each."""

    def body(trace: Trace, _: int, start: float) -> None:
        for i in range(50):
            at, runs = start + 10 + 10 * i, start + 100 + 15 * i
            trace.launch(f"gemm {i % 3}", (at, at + 6), (runs, runs + 14 - i % 5), stream=7 + i % 2)
        trace.call("cudaDeviceSynchronize", start + 520, start + 860)

    return load_run(write_kineto(repeated(body), tmp_path_factory.mktemp("launching") / "rank0.json"), cache=False)


@pytest.mark.parametrize("seed", range(24))
def test_a_tenth_of_the_launches_missing_is_a_step_of_what_is_left(launching: Run, seed: int) -> None:
    launch = pl.col("name") == "cudaLaunchKernel"
    lost = launch & (pl.col("event_id").hash(seed) % 10 == 0)
    count = launching.events.filter(lost).height
    assert 0 < count < launching.events.filter(launch).height / 3
    graph = build_graph(changed(launching, launching.events.filter(~lost)))
    holds(graph)
    assert graph.report.filter(pl.col("what").str.contains("launch"))["count"].sum() >= count


def test_negative_durations_are_refused(graph: Graph) -> None:
    ops = graph.ops.with_columns(dur_ns=pl.when(pl.col("op_id") == graph.ops["op_id"][3]).then(-1).otherwise("dur_ns"))
    with pytest.raises(LumosError, match="-1"):
        ln.replay(replace(graph, ops=ops))


def test_a_rank_whose_trace_begins_with_a_step_leaves_the_step_its_length() -> None:
    def body(trace: Trace, step: int, s: float) -> None:
        trace.launch("kernel", (s + 500, s + 510), (s + 520, s + 900))

    late = repeated(body, rank=1)
    late.rows = [row for row in late.rows if row["start_ns"] >= ZERO_NS + 1_000_000]
    recording = recording_of(repeated(lambda trace, step, s: body(trace, step, s - 200)), late)
    for step, step_ns in recording.step_times().select("step", "step_ns").rows():
        assert ln.replay(build_graph(recording, step)).step_ns == step_ns
