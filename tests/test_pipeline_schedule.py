"""Pipeline schedules: complete, without deadlock, as long as closed forms say, in the orders of Megatron and torch."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule_graphs import as_graph, dependencies
from benchmarks.schedule_prediction import in_chunks, schedule_rows
from lumos_nb import replay
from lumos_nb.errors import GraphError, InputError, LayoutError
from lumos_nb.workloads.llm.schedule import CHUNKS, PHASES, schedule
from tests.schedule_forms import bubble_ns, in_flight

LETTERS = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
TIMES = st.integers(1, 50)
FEW = settings(max_examples=25, deadline=None)


@st.composite
def sizes(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(CHUNKS)) -> tuple[str, int, int, int]:
    kind, stages = draw(st.sampled_from(kinds)), draw(st.integers(1, 9))
    most = 5 if kind == "interleaved" else 16
    micro_batches = draw(st.integers(1, most)) * (stages if kind == "interleaved" else 1)
    return kind, stages, micro_batches, draw(st.integers(CHUNKS[kind][0], min(CHUNKS[kind][1], 4)))


def idle_ns(kind: str, stages: int, micro_batches: int, chunks: int, *times: int) -> int:
    table = schedule(kind, stages, micro_batches, chunks)
    graph = as_graph(table, dict(zip(("forward", *PHASES[2:]), times, strict=False)) | {"backward": times[1]})
    phases = table["phase"].n_unique()
    return replay(graph).step_ns - micro_batches * chunks * sum(times[:phases])


def order(table: pl.DataFrame, stage: int) -> list[str]:
    """Passes of a rank as `F<chunk>.<micro-batch>`."""
    rows = table.filter(stage=stage).sort("position").select("phase", "chunk", "micro_batch").iter_rows()
    return [f"{LETTERS[phase]}{chunk}.{micro_batch}" for phase, chunk, micro_batch in rows]


@FEW
@given(sizes())
def test_a_schedule_has_each_pass_once_and_never_deadlocks(size):
    kind, stages, micro_batches, chunks = size
    table = schedule(*size)
    phases = 3 if kind.startswith("zb") else 2
    assert len(table) == stages * micro_batches * chunks * phases
    assert not table.select("stage", "phase", "micro_batch", "chunk").is_duplicated().any()
    assert not table.select("phase", "micro_batch", "depth").is_duplicated().any()
    assert table["depth"].n_unique() == stages * chunks
    replay(as_graph(table, dict.fromkeys(PHASES, 1)))  # a cycle is an error


@FEW
@given(sizes(), TIMES, TIMES, TIMES)
def test_a_pass_starts_after_what_it_needs(size, forward, backward, message):
    table = schedule(*size)
    times = dict.fromkeys(PHASES, backward) | {"forward": forward}
    ops = replay(as_graph(table, times, message_ns=message)).ops.filter(kind="kernel")
    end = {
        (n, d, m): s + t for n, d, m, s, t in ops.select("name", "depth", "micro_batch", "start_ns", "dur_ns").rows()
    }
    stage_of = dict(table.select("depth", "stage").unique().iter_rows())
    for name, depth, micro_batch, start, rank in ops.select("name", "depth", "micro_batch", "start_ns", "rank").rows():
        beside, needs = {"forward": (depth - 1, []), "backward_weight": (-1, ["backward_input"])}.get(
            name, (depth + 1, ["forward"])
        )
        assert all(start >= end[need, depth, micro_batch] for need in needs)
        if beside in stage_of:
            assert start >= end[name, beside, micro_batch] + (message if stage_of[beside] != rank else 0)


@FEW
@given(sizes(("gpipe", "1f1b", "interleaved")), TIMES, TIMES)
def test_the_bubble_is_the_closed_form_whatever_the_passes_take(size, forward, backward):
    assert idle_ns(*size, forward, backward) == bubble_ns(*size[:2], forward_ns=forward, backward_ns=backward)


@FEW
@given(st.integers(1, 9), st.integers(0, 20), TIMES, TIMES, TIMES)
def test_the_bubble_of_zb_h1_is_the_closed_form(stages, more, forward, backward, weight):
    size = ("zb-h1", stages, stages + more, 1)
    closed = bubble_ns(*size[:2], forward_ns=forward, backward_ns=backward, weight_ns=weight)
    assert idle_ns(*size, forward, backward, weight) == closed
    if weight <= min(forward, backward):  # as Qi et al. state it
        assert closed == (stages - 1) * (forward + backward - weight)


@FEW
@given(st.integers(1, 9), st.integers(0, 20), TIMES)
def test_zb_v_has_no_bubble_but_the_last_ranks_late_begin(stages, more, each):
    size = ("zb-v", stages, 2 * stages - 1 + more, 2)
    idle = idle_ns(*size, each, each, each)
    assert idle == bubble_ns(*size[:2], forward_ns=each, backward_ns=each, weight_ns=each) == (stages - 1) * each


@FEW
@given(sizes())
def test_ranks_hold_as_many_micro_batches_as_the_schedules_are_known_for(size):
    kind, stages, micro_batches, chunks = size
    held, stage = in_flight(schedule(*size)), np.arange(stages)
    least = {
        "gpipe": np.full(stages, micro_batches),
        "1f1b": stages - stage,
        "zb-h1": stages - stage,
        "interleaved": 2 * (stages - 1 - stage) + (chunks - 1) * stages + 1,
    }
    if kind in least:
        assert (held["in_flight"].to_numpy() == np.minimum(least[kind], micro_batches * chunks)).all()
    # Zero-bubble schedules hold no more than the first rank of 1F1B, until the weights' gradients are there.
    if kind in ("zb-h1", "zb-v"):
        assert held["until_weight"].max() <= stages * chunks


MEGATRON = {
    0: "F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 F0.4 F0.5 F0.6 B1.0 F0.7 B1.1 F1.4 B1.2 F1.5 B1.3 F1.6 B0.0 F1.7 B0.1 "
    "B0.2 B0.3 B1.4 B1.5 B1.6 B1.7 B0.4 B0.5 B0.6 B0.7",
    3: "F0.0 F0.1 F0.2 F0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F0.4 B0.0 F0.5 B0.1 F0.6 B0.2 F0.7 B0.3 "
    "F1.4 B1.4 F1.5 B1.5 F1.6 B1.6 F1.7 B1.7 B0.4 B0.5 B0.6 B0.7",
}
"""Four ranks, eight micro-batches, two chunks: `forward_backward_pipelining_with_interleaving`, by hand."""


@pytest.mark.parametrize("stage", MEGATRON)
def test_interleaved_is_megatrons_order(stage):
    assert " ".join(order(schedule("interleaved", 4, 8, 2), stage)) == MEGATRON[stage]


def test_zb_h1_puts_weights_off_by_as_many_micro_batches_as_the_ranks_number():
    table = schedule("zb-h1", 3, 4)
    assert " ".join(order(table, 0)) == "F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3"
    assert " ".join(order(table, 2)) == "F0.0 I0.0 F0.1 I0.1 F0.2 I0.2 W0.0 F0.3 I0.3 W0.1 W0.2 W0.3"


def torch_order(name: str, stages: int, micro_batches: int, chunks: int) -> dict[int, list[str]]:
    """What torch runs on each rank, `<letter><stage>.<micro-batch>`."""
    import torch
    from torch.distributed.pipelining import schedules

    def stage(index: int) -> Any:
        sizes = {"group_size": stages, "num_stages": stages * chunks, "group_rank": 0, "stage_index": index}
        return SimpleNamespace(**sizes, submod=torch.nn.Identity(), is_last=False, has_backward=True)

    made = getattr(schedules, name)
    held = stage(0) if name in ("Schedule1F1B", "ScheduleGPipe") else [stage(c * stages) for c in range(chunks)]
    ranks = made(held, micro_batches).pipeline_order
    return {
        rank: [
            f"{a.computation_type.value}{a.stage_index}.{a.microbatch_index}"
            for a in actions
            if a is not None and a.computation_type.value in "FBIW"
        ]
        for rank, actions in ranks.items()
    }


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [
        ("ScheduleGPipe", "gpipe", 1),
        ("Schedule1F1B", "1f1b", 1),
        ("ScheduleInterleaved1F1B", "interleaved", 2),
        ("ScheduleInterleaved1F1B", "interleaved", 3),
        ("ScheduleInterleavedZeroBubble", "zb-h1", 1),
        ("ScheduleZBVZeroBubble", "zb-v", 2),
    ],
)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 4), (4, 8), (3, 12)])
def test_the_order_is_that_of_torch(name, kind, chunks, stages, micro_batches):
    reference = torch_order(name, stages, micro_batches, chunks)
    table = schedule(kind, stages, micro_batches, chunks)
    ours = {stage: order(table.with_columns(chunk="depth"), stage) for stage in range(stages)}
    if (
        name == "Schedule1F1B"
    ):  # torch 2.13 lists the last rank's forward passes from micro-batch 1 on, and one too many
        del reference[stages - 1]
        last = [(f"F{stages - 1}.{m}", f"B{stages - 1}.{m}") for m in range(micro_batches)]
        assert ours.pop(stages - 1) == [passed for pair in last for passed in pair]
    assert ours == reference


@pytest.mark.parametrize(
    ("size", "message"),
    [
        pytest.param(("2f2b", 2, 2, 1), "no schedule is called '2f2b'", id="a kind that is none"),
        pytest.param(("1f1b", 0, 2, 1), "stages=0: a schedule has at least one", id="no stage"),
        pytest.param(("1f1b", 2, 2.0, 1), "micro_batches=2.0", id="a number of micro-batches that is not whole"),
        pytest.param(("1f1b", 2, 2, 2), "chunks=2: 1f1b takes 1 chunk", id="chunks where there are none"),
        pytest.param(("interleaved", 2, 2, 1), "takes 2 chunks or more", id="one chunk to interleave"),
        pytest.param(("interleaved", 4, 6, 2), "a multiple of the 4 stages", id="a group that is not full"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(size, message):
    with pytest.raises(LayoutError, match=message):
        schedule(*size)


def test_a_schedule_that_lacks_a_pass_is_refused():
    table = schedule("1f1b", 2, 3)
    with pytest.raises(GraphError, match="forward of micro-batch 1 at depth 0 stands 0 times"):
        dependencies(pl.concat([table[:1], table[2:]]))
    with pytest.raises(InputError, match="lacks column"):
        dependencies(table.drop("depth"))


def test_an_order_that_waits_for_itself_is_refused():
    table = schedule("1f1b", 2, 2)
    backwards = table.with_columns(
        position=pl.when(pl.col("stage") == 1).then(-pl.col("position")).otherwise("position")
    )
    with pytest.raises(GraphError, match="cycle"):
        replay(as_graph(backwards, dict.fromkeys(PHASES, 1)))


def test_times_may_differ_by_rank_chunk_and_micro_batch():
    table = schedule("interleaved", 2, 4, 2)
    by_pass = np.arange(16).reshape(2, 2, 4)
    ops = as_graph(table, {"forward": by_pass, "backward": [1, 2]}).ops.filter(kind="kernel")
    forward = ops.filter(name="forward").select("rank", "chunk", "micro_batch", "dur_ns").rows()
    assert {row[:3]: row[3] for row in forward} == dict(np.ndenumerate(by_pass))
    backward = ops.filter(name="backward").group_by("rank").agg(pl.col("dur_ns").unique()).sort("rank")
    assert backward["dur_ns"].to_list() == [[1], [2]]
    with pytest.raises(InputError, match=r"dur_ns has no backward; it has forward"):
        as_graph(table, {"forward": 1})
    with pytest.raises(InputError, match=r"message_ns has shape \(3,\)"):
        as_graph(table, {"forward": 1, "backward": 1}, message_ns=[1, 2, 3])


def test_messages_go_one_after_the_other_and_gaps_lie_between_passes():
    table = schedule("gpipe", 2, 3)
    result = replay(as_graph(table, {"forward": 10, "backward": 1}, message_ns=25, gap_ns=2))
    ops = result.ops.filter(pl.col("rank") == 0, name="forward")
    assert ops.sort("start_ns")["start_ns"].to_list() == [0, 12, 24]
    arrive = result.ops.filter(pl.col("rank") == 1, name="forward").sort("start_ns")["start_ns"]
    assert arrive.to_list() == [35, 60, 85]  # the link is the bottleneck


def test_a_schedule_of_131_072_passes_is_made_in_a_moment():
    begin = time.process_time()
    table = schedule("interleaved", 64, 512, 2)
    assert len(table) == 64 * 512 * 2 * 2
    assert time.process_time() - begin < 1


def test_a_recorded_pipeline_is_met_as_it_was_and_interleaving_shortens_it(traces):
    same, *ranks = schedule_rows(traces)
    assert same.value < 0.1  # percent
    assert len(ranks) == 8
    assert [row.value for row in ranks] == sorted((row.value for row in ranks), reverse=True)
    saved = np.array([row.baseline_value - row.value for row in ranks])
    # The last rank, which bounds the step, waits half as long: 7 x 130 ms / 2, less a gap of 0.8 ms for each new pass.
    assert saved[0] == pytest.approx(7 * 130 / 2 - 32 * 0.8, rel=0.1)


def test_chunks_take_together_what_the_pass_took_and_the_last_has_the_head():
    times = np.array([[[10, 6, 6], [6, 6, 6], [9, 9, 9]]], float)
    chunks = in_chunks(times, 0)
    assert (chunks.sum(axis=2) == times).all()
    assert chunks[0, 0].tolist() == [[7, 3, 3], [3, 3, 3]]  # the first pass warms up
    assert chunks[0, 2].tolist() == [[3, 3, 3], [6, 6, 6]]
