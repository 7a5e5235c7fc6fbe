"""Execution traces linked with profiles: against the reference linker's published output, and by every rule."""

from __future__ import annotations

import difflib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lumos_nb import datasets
from lumos_nb.errors import ChakraError, InputError
from lumos_nb.exchange.chakra import alignment
from lumos_nb.exchange.chakra.linking import Linked, link
from lumos_nb.traces.execution_trace import ExecutionTrace, load_execution_trace
from lumos_nb.traces.run import Run, load_run
from tests.trace_builder import Trace, run_of

NO_IO = {"values": [], "shapes": [], "types": []}
Op = tuple[str, int, int]
"""Name, the operator above it in the list (-1: none), thread."""

PROGRAM: list[Op] = [
    ("forward", -1, 1), ("aten::linear", 0, 1), ("aten::addmm", 1, 1), ("aten::relu", 0, 1),
    ("LinearBackward", -1, 2), ("aten::mm", 4, 2), ("Optimizer.step", -1, 1), ("aten::add_", 6, 1),
]  # fmt: skip


def trace_of(tmp_path: Path, ops: list[Op], rf_ids: list[int] | None = None) -> ExecutionTrace:
    """An execution trace of these operators."""
    frames = [(1, 1, "[pytorch|profiler|execution_trace|process]", 0, 0)]
    frames += [(t + 1, 1, "[pytorch|profiler|execution_trace|thread]", 0, t) for t in (1, 2)]
    rows = [
        (k + 10, thread + 1 if above < 0 else above + 10, name, rf_ids[k] if rf_ids else k + 1, thread)
        for k, (name, above, thread) in enumerate(ops)
    ]
    nodes = [
        {"id": i, "name": name, "ctrl_deps": parent, "inputs": NO_IO, "outputs": NO_IO,
         "attrs": [{"name": "rf_id", "type": "uint64", "value": rf}, {"name": "tid", "type": "uint64", "value": tid}]}
        for i, parent, name, rf, tid in frames + rows
    ]  # fmt: skip
    path = tmp_path / "et.json"
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}))
    return load_execution_trace(path)


def record(trace: Trace, ops: list[Op], start: float, ids: dict[str, list[int]] | None = None) -> None:
    """The same operators as the profiler shows them: each 1 us after the one before, and around those inside."""
    above = [parent for _, parent, _ in ops]
    ends = [max([k, *(j for j in range(len(ops)) if _inside(above, j, k))]) for k in range(len(ops))]
    for k, (name, _, thread) in enumerate(ops):
        args = {key: values[k] for key, values in (ids or {}).items() if key != "external_id"}
        more = {"external_id": ids["external_id"][k]} if ids and "external_id" in ids else {}
        trace.op(name, start + k, start + ends[k] + 0.5, thread=100 + thread, args=args, **more)
        if name.startswith("aten::"):
            trace.launch(
                f"kernel of {name}",
                (start + k + 0.1, start + k + 0.2),
                (start + k + 20, start + k + 21),
                thread=100 + thread,
            )


def _inside(above: list[int], j: int, k: int) -> bool:
    return above[j] >= 0 and (above[j] == k or _inside(above, above[j], k))


def test_record_function_ids_decide(tmp_path: Path) -> None:
    rf_ids, trace = [7, 8, 9, 11, 12, 13, 20, 21], Trace()
    record(trace, PROGRAM, 0, {"Record function id": rf_ids})
    linked = link(trace_of(tmp_path, PROGRAM, rf_ids), run_of(trace))
    assert linked.report.filter(what="nodes").select("rule", "amount").rows() == [("record function", 8)]
    assert linked.share("device time") == linked.share("host ops") == 1
    own = linked.device.join(linked.nodes.select("node_id", op="name"), on="node_id")
    assert (own["name"] == "kernel of " + own["op"]).all()
    assert len(own) == 5
    row = linked.nodes.filter(name="aten::mm").row(0, named=True)
    assert (row["parent"], row["rf_id"], row["host_thread"], row["iteration"]) == (14, 13, 102, 0)


def test_external_ids_decide_where_there_are_no_others(tmp_path: Path) -> None:
    trace = Trace()
    record(trace, PROGRAM, 0, {"external_id": list(range(1, 9))})
    linked = link(trace_of(tmp_path, PROGRAM), run_of(trace))
    assert linked.report.filter(what="nodes").select("rule", "amount").rows() == [("external id", 8)]


def test_ids_of_another_session_are_not_believed(tmp_path: Path) -> None:
    """Shifted by two, some ids meet an equal name; order links all rightly."""
    ops = [("forward", -1, 1), *[("aten::add", 0, 1), ("aten::mul", 0, 1)] * 8]
    trace = Trace()
    record(trace, ops, 0, {"Record function id": [k + 11 for k in range(len(ops))]})
    linked = link(trace_of(tmp_path, ops), run_of(trace))
    assert linked.nodes.filter(pl.col("parent").is_not_null() & (pl.col("node_id") >= 10))["event_id"].is_sorted()
    assert linked.report.filter(what="nodes").select("rule", "amount").rows() == [("order", 17)]


def test_iterations_beyond_the_one_with_ids_are_linked_by_order(tmp_path: Path) -> None:
    trace, other = Trace(), [900 + k for k in range(8)]
    for k, ids in enumerate((other, list(range(1, 9)), [1900 + k for k in range(8)])):
        trace.step(k, 100 * k, 100 * k + 90, thread=101)
        record(trace, PROGRAM, 100 * k, {"Record function id": ids})
    linked = link(trace_of(tmp_path, PROGRAM), run_of(trace))
    counts = linked.nodes.filter(pl.col("rule").is_not_null()).group_by("iteration", "rule").len().sort("iteration")
    assert counts.rows() == [(0, "order", 8), (1, "record function", 8), (2, "order", 8)]
    assert linked.device.group_by("iteration").len().sort("iteration")["len"].to_list() == [5, 5, 5]
    assert linked.unlinked.rows() == [("profile", "ProfilerStep", 3)]


def test_what_one_side_has_beyond_the_other_stays_unlinked(tmp_path: Path) -> None:
    shown = [PROGRAM[0], ("aten::detach", 0, 1), ("aten::linear", 0, 1), ("aten::addmm", 2, 1), *PROGRAM[4:6]]
    shown[-1] = ("aten::mm", 4, 2)
    trace = Trace()
    record(trace, shown, 0)
    linked = link(trace_of(tmp_path, PROGRAM), run_of(trace))
    missing = [("execution trace", name, 1) for name in ("Optimizer.step", "aten::add_", "aten::relu")]
    assert linked.unlinked.rows() == [*missing, ("profile", "aten::detach", 1)]
    orphan = linked.device.filter(name="kernel of aten::detach")  # inside what is linked: forward
    assert orphan["node_id"].to_list() == [10]


def test_a_host_without_device_work(tmp_path: Path) -> None:
    trace = Trace()
    trace.op("gloo:all_reduce", 1, 3, thread=103)
    trace.op("c10d::allreduce_", 0, 2, thread=101)
    et = trace_of(tmp_path, [("c10d::allreduce_", -1, 1), ("gloo:all_reduce", -1, 2)])
    linked = link(et, run_of(trace))
    assert linked.share("nodes") == 1
    assert linked.device.is_empty()
    assert "device" not in repr(linked).splitlines()[0]


def test_nothing_linked_is_an_error(tmp_path: Path) -> None:
    trace = Trace()
    record(trace, [("aten::conv2d", -1, 1), ("aten::pool", -1, 1)], 0)
    with pytest.raises(ChakraError, match=r"no node of .*et.json is an event of rank 0"):
        link(trace_of(tmp_path, PROGRAM), run_of(trace))
    bare = Trace()
    bare.call("cudaLaunchKernel", 0, 1)
    with pytest.raises(ChakraError, match="rank 0 has no event of cpu_op"):
        link(trace_of(tmp_path, PROGRAM), run_of(bare))


def test_the_rank_must_be_told_where_there_are_several(tmp_path: Path) -> None:
    runs = [Trace(rank) for rank in (0, 1)]
    for trace in runs:
        record(trace, PROGRAM, 0)
    et = trace_of(tmp_path, PROGRAM)
    for rank in (None, 7):
        with pytest.raises(InputError, match="one of the run's ranks, 0, 1"):
            link(et, run_of(*runs), rank=rank)
    assert link(et, run_of(*runs), rank=1).rank == 1


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_the_profile_lacks_equal_names_are_linked_or_an_error_says_why(
    tmp_path: Path, data: st.DataObject
) -> None:
    trace = Trace()
    for k in range(3):
        record(
            trace,
            PROGRAM,
            100 * k,
            {"Record function id": data.draw(st.lists(st.integers(0, 9), min_size=8, max_size=8))},
        )
    kept = data.draw(st.lists(st.booleans(), min_size=len(trace.rows), max_size=len(trace.rows)))
    trace.rows = [row for row, stays in zip(trace.rows, kept, strict=True) if stays]
    for row in trace.rows:
        row["start_ns"] += data.draw(st.sampled_from([0, 0, 0, 3000, -90_000]))
    run = run_of(trace)
    linked = None
    with suppress(ChakraError):
        linked = link(trace_of(tmp_path, PROGRAM), run)
    if linked is None:  # too little is left to tell
        assert run.events.filter(category="cpu_op").height < len(PROGRAM)
        return
    names = run.events.select("event_id", event="name")
    pairs = linked.nodes.drop_nulls("event_id").join(names, on="event_id")
    assert (pairs["name"] == pairs["event"]).all()
    assert not pairs.select("event_id").is_duplicated().any()
    assert not pairs.select("node_id", "iteration").is_duplicated().any()
    assert len(linked.device) == run.events.filter(category="kernel").height


@pytest.mark.parametrize(("name", "rank"), [("gpt-single-paired", 0), ("gpt-ddp-paired", 0), ("gpt-ddp-paired", 1)])
def test_order_finds_what_ids_say(name: str, rank: int) -> None:
    """The bundled pairs, whose ids link every node: without ids order links nearly all, and these alike."""
    folder = datasets.path(name)
    run = load_run(folder)
    known = link(folder, run, rank=rank)
    assert known.report.filter(what="nodes").select("rule", "share").rows() == [("record function", 1.0)]
    no_ids = run.events.with_columns(args=pl.lit("{}"), external_id=pl.lit(None, pl.Int64))
    found = link(folder, replace(run, events=no_ids), rank=rank)
    both = known.nodes.select("node_id", "event_id").join(
        found.nodes.select("node_id", "iteration", again="event_id"), on="node_id"
    )
    assert found.nodes["iteration"].n_unique() == 1
    assert both["again"].count() > 0.999 * both["event_id"].count()
    assert (both["again"] == both["event_id"]).mean() > 0.99


def test_a_profile_of_other_steps_is_linked_step_by_step() -> None:
    """gpt-ddp: an execution trace of one step, a profile of ten others, collectives that end on gloo's threads."""
    folder = datasets.path("gpt-ddp")
    run = load_run(folder)
    for rank in (0, 1):
        linked = link(folder, run, rank=rank)
        assert linked.share("nodes") == 1
        assert linked.unlinked.rows() == [("profile", "ProfilerStep", 10)]
        gloo = linked.nodes.filter(name="gloo:all_reduce").join(run.events.filter(rank=rank), on="event_id")
        assert len(gloo) == 20
        assert set(gloo["name_right"]) == {"gloo:all_reduce"}


@pytest.fixture(scope="module")
def dlrm(traces: Path) -> tuple[Run, dict[int, Linked]]:
    run = load_run(traces / "param/dlrm_kineto.tar.gz")
    return run, {rank: link(traces / "param/dlrm_pytorch_et.tar.gz", run, rank=rank) for rank in (0, 2, 3)}


def reference(traces: Path, rank: int) -> ExecutionTrace:
    return load_execution_trace(traces / f"astra-sim/et_plus/dlrm_eg_{rank}_plus.json.gz")


def test_ops_have_the_times_that_the_reference_linker_gave_them(traces: Path, dlrm: Any) -> None:
    """5014 of 5016 ops of three ranks. The other two nest within their parents here, and not in the reference."""
    differ = []
    for rank, linked in dlrm[1].items():
        theirs = reference(traces, rank).nodes.filter(pl.col("rf_id") > 0).select("rf_id", "name", "start_ns", "dur_ns")
        both = linked.nodes.filter(pl.col("rf_id") > 0).join(theirs, on="rf_id", suffix="_theirs")
        assert len(both) == len(theirs) == 1672
        assert both["name"].equals(both["name_theirs"])
        same = (pl.col("start_ns") == pl.col("start_ns_theirs")) & (pl.col("dur_ns") == pl.col("dur_ns_theirs"))
        differ += [(rank, name) for name in both.filter(~same)["name"]]
        assert linked.report.filter(what="nesting", rule="within its parent")["share"].item() == 1
    assert sorted(differ) == [(2, "aten::as_strided"), (2, "aten::transpose")]


def test_device_work_belongs_to_the_ops_that_the_reference_linker_names(traces: Path, dlrm: Any) -> None:
    """All 790 that have a launch; the reference drops 6 kernels and gives 64 of the step before to a data loader."""
    agree, extra, without = 0, 0, []
    for rank, linked in dlrm[1].items():
        nodes = reference(traces, rank).nodes
        op = nodes.select("rf_id", parent="node_id")
        correlation = pl.col("args").str.extract(r'"correlation": (\d+)').cast(pl.Int64)
        theirs = (
            nodes.filter(kind="device")
            .join(op, on="parent")
            .select(correlation.alias("correlation"), theirs="rf_id_right")
        )
        ours = linked.device.join(linked.nodes.select("node_id", "rf_id"), on="node_id", how="left")
        both = ours.join(theirs, on="correlation", how="left")
        launched = both.filter(pl.col("launch_id").is_not_null())
        agree += (launched["rf_id"] == launched["theirs"]).sum()
        extra += launched["theirs"].null_count()
        without += both.filter(pl.col("launch_id").is_null())["rf_id"].to_list()
        assert len(theirs) == both["theirs"].count()
    assert (agree, extra, without) == (790, 6, [None] * 64)


def test_forty_iterations_against_one(traces: Path) -> None:
    """Whatever iteration: an op's kernels have the same names."""
    linked = link(traces / "param/linear_et.json.gz", traces / "param/linear_kineto.json.gz")
    assert linked.nodes["iteration"].n_unique() == 40
    assert linked.share("device time") == 1
    assert linked.share("nodes") > 0.996  # of 928 ops, 3 are in no iteration but one
    kernels = linked.device.sort("start_ns").group_by("iteration", "node_id").agg("name")
    alike = kernels.group_by("node_id").agg(pl.col("name").n_unique(), pl.len())
    assert (alike["name"] == 1).mean() > 0.98
    ends = linked.device.group_by("iteration").agg(
        pl.col("start_ns").min().alias("a"), pl.col("start_ns").max().alias("b")
    )
    ends = ends.sort("iteration")
    assert (ends["a"][1:] > ends["b"][:-1]).all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 4), st.data())
def test_what_is_aligned_has_equal_names_and_keeps_its_order(names: list[int], times: int, data: st.DataObject) -> None:
    pattern = np.array(names)
    record = np.tile(pattern, times)
    kept = data.draw(st.lists(st.booleans(), min_size=record.size, max_size=record.size))
    extra = data.draw(st.lists(st.integers(0, 8), max_size=10))
    record = np.append(record[np.array(kept)], np.array(extra, np.int64))
    places, repetitions = alignment.align(pattern, record, np.full(record.size, -1))
    found = places >= 0
    assert (pattern[places[found]] == record[found]).all()
    assert len(set(zip(places[found], repetitions[found], strict=True))) == found.sum()
    whole = repetitions[found] * pattern.size + places[found]
    assert (np.diff(whole) >= -2 * alignment.SWAPPED - 1).all()
    if all(kept) and not extra:
        assert found.all()


@given(st.data())
def test_edits_of_distinct_names_are_found_as_difflib_finds_them(data: st.DataObject) -> None:
    """Between a beginning and an end that are there: at the edges a name may as well be one beyond the other."""
    pattern = np.arange(120)
    cut = data.draw(st.sets(st.integers(16, 103), max_size=30))
    put = data.draw(st.lists(st.integers(16, 70), max_size=20))
    record = [k for k in range(120) if k not in cut]
    for k, at in enumerate(put):
        record.insert(min(at, len(record)), 1000 + k)
    places, _ = alignment.align(pattern, np.array(record), np.full(len(record), -1))
    blocks = difflib.SequenceMatcher(None, pattern.tolist(), record, autojunk=False).get_matching_blocks()
    expected = np.full(len(record), -1)
    for block in blocks:
        expected[block.b : block.b + block.size] = np.arange(block.a, block.a + block.size)
    assert places.tolist() == expected.tolist()


def test_most_of_a_noisy_record_is_placed_rightly() -> None:
    """Twelve equal layers, an optimizer of 60 equal pieces; of 30 repetitions 1 % is lost, and 1 % put in."""
    rng = np.random.default_rng(0)
    layer, head, piece = rng.integers(0, 40, 110), rng.integers(0, 40, 80), rng.integers(0, 40, 7)
    program = np.concatenate([head, *[layer] * 12, head[::-1], *[piece] * 60])
    record, truth = [], []
    for repetition in range(30):
        for k, name in enumerate(program):
            if rng.random() < 0.01:
                record.append(rng.integers(0, 45))
                truth.append(-1)
            if rng.random() >= 0.01:
                record.append(name)
                truth.append(repetition * program.size + k)
    places, repetitions = alignment.align(program, np.array(record), np.full(len(record), -1))
    whole, expected = np.where(places >= 0, repetitions * program.size + places, -1), np.array(truth)
    assert (whole >= 0).sum() > 0.99 * (expected >= 0).sum()
    assert (whole == expected)[whole >= 0].mean() > 0.97
