"""Runs of which some ranks have no trace: who stands in for whom, what that changes, and the interval of a step."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from trace_builder import Trace, repeated, run_of

import lumos_nb as ln
from lumos_nb.errors import InputError
from lumos_nb.graph import Graph, Recording
from lumos_nb.lanes import ABSENT
from lumos_nb.traces.run import Run

Groups = list[tuple[str, str, list[int]]]
"""Name, description, ranks."""


def without(run: Run, gone: Iterable[int]) -> Run:
    """The run as if some files were missing."""
    kept = ~pl.col("rank").is_in(list(gone))
    metadata = {rank: about for rank, about in run.metadata.items() if rank not in set(gone)}
    return replace(run, events=run.events.filter(kept), ranks=run.ranks.filter(kept), metadata=metadata)


def grid(dp: int, pp: int, tp: int = 1) -> Groups:
    """The groups of a job whose ranks are numbered tensor position first, then data, then stage."""
    world = dp * pp * tp
    shape = {"tp": (1, tp), "dp": (tp, dp), "pp": (tp * dp, pp)}
    groups = [("0", "default_pg", [*range(world)])]
    for about, (stride, size) in shape.items():
        firsts = [rank for rank in range(world) if rank // stride % size == 0 and size > 1]
        groups += [(f"{about}{first}", f"mesh_{about}", [first + i * stride for i in range(size)]) for first in firsts]
    return groups


def job(traced: Iterable[int], groups: Groups, body: Callable[[Trace, int, float], None], world: int) -> Run:
    """Ranks with a trace, each of which lists the groups that it is in, as torch does."""
    run = run_of(*(repeated(body, rank=rank, world_size=world) for rank in traced))
    listed = {
        rank: [{"pg_name": name, "pg_desc": about, "ranks": ranks} for name, about, ranks in groups if rank in ranks]
        for rank in traced
    }
    return replace(run, metadata={rank: {"distributedInfo": {"pg_config": own}} for rank, own in listed.items()})


def comm(group: str, size: int, collective: str = "allreduce", **more: Any) -> dict[str, Any]:
    args = {"Collective name": collective, "Process Group Name": group, "Group size": size, "dtype": "Float"}
    return {"args": args | {"In msg nelems": 10, "Out msg nelems": 10} | more}


def stages(trace: Trace, step: int, start: float) -> None:
    """dp2 x pp2: ranks 0, 1 send to 2, 3; each stage then averages. In step 2 ranks 1 and 3 are 20 us later."""
    replica, latest = trace.rank % 2, 20 * (step == 2)
    late = latest * replica
    begin = start + 10 + late
    trace.launch("work", (start, start + 5), (begin, begin + 100))
    if trace.rank < 2:
        sends = comm(f"pp{replica}", 2, "send", **{"Dst Rank": trace.rank + 2, "Seq": step})
        trace.launch("ncclSend", (start + 6, start + 8), (begin + 100, begin + 110), **sends)
    else:
        receives = comm(f"pp{replica}", 2, "recv", **{"Src Rank": trace.rank - 2, "Seq": step})
        trace.launch("ncclRecv", (start + 6, start + 8), (begin + 100, begin + 110), **receives)
    stage = "dp0" if trace.rank < 2 else "dp2"
    end = start + 10 + latest + 110 + 50  # when the later replica has arrived, and the transfer
    trace.launch("ncclAllReduce", (start + 9, start + 12), (begin + 110, end), **comm(stage, 2, Seq=step))
    trace.launch("optimizer", (start + 13, start + 15), (end, end + 30))


def test_a_rank_is_filled_from_its_data_parallel_replica():
    recording = ln.fill_ranks(job([0, 1, 3], grid(2, 2), stages, 4))
    assert recording.filled == {2: 3}
    said = recording.report.filter(what="rank filled from rank 3")
    assert said["rank"].to_list() == [2]
    assert "same position in mesh_pp" in said["detail"].item()
    graph = ln.build_graph(recording, 2)
    assert graph.filled == {2: 3}
    assert "1 ranks filled" in repr(graph)
    assert "3 of 4 ranks and 1 filled" in repr(recording)


def test_a_copy_takes_part_in_its_own_messages_and_in_the_shared_collective():
    ops = ln.fill_ranks(job([0, 1, 3], grid(2, 2), stages, 4)).ops.filter(pl.col("step") == 2)
    shared = ops.filter(kind="comm").group_by("match").agg(pl.col("rank").sort(), pl.col("group").first())
    meetings = {group: ranks for _, ranks, group in shared.iter_rows()}
    assert meetings == {"pp0": [0, 2], "pp1": [1, 3], "dp0": [0, 1], "dp2": [2, 3]}
    assert ops.filter((pl.col("rank") == 2) & (pl.col("collective") == "recv"))["peer"].to_list() == [0]


def test_traced_ranks_stay_as_measured_and_the_copy_goes_on_with_them():
    whole = ln.replay(ln.build_graph(job([0, 1, 2, 3], grid(2, 2), stages, 4), 2))
    graph = ln.build_graph(ln.fill_ranks(job([0, 1, 3], grid(2, 2), stages, 4)), 2)
    filled = ln.replay(graph)
    assert filled.step_ns == whole.step_ns
    traced = filled.ops.filter(pl.col("rank") != 2)
    assert (traced["start_ns"] == traced["measured_start_ns"]).all()
    ends = filled.ops.filter(name="optimizer").select("rank", end=pl.col("start_ns") + pl.col("dur_ns")).sort("rank")
    assert ends["end"].n_unique() == 1
    assert graph.report.filter(what="transfers estimated")["rank"].to_list() == [0, 2, 3]


def test_what_a_traced_rank_waited_for_an_absent_one_is_a_wait_of_its_own():
    graph = ln.build_graph(ln.fill_ranks(job([0, 2, 3], grid(2, 2), stages, 4)), 2)
    waits = graph.ops.filter(pl.col("name") == ABSENT).select("rank", "dur_ns").rows()
    assert waits == [(0, 20_000), (3, 0)]  # rank 0 for rank 1, in their all-reduce: 50 us are the transfer


def test_a_breakdown_has_filled_ranks_too():
    graph = ln.build_graph(ln.fill_ranks(job([0, 1, 3], grid(2, 2), stages, 4)), 2)
    parts = ln.breakdown(graph)
    assert parts["rank"].unique().sort().to_list() == [0, 1, 2, 3]
    assert parts.filter(part="compute", rank=2)["time_ns"].item() == 130_000


def quiet(trace: Trace, step: int, start: float) -> None:
    trace.launch("work", (start, start + 5), (start + 10, start + 100))
    trace.launch("ncclAllReduce", (start + 6, start + 8), (start + 100, start + 120), **comm("tp0", 4, Seq=step))


@pytest.mark.parametrize(
    ("traced", "filled"),
    [
        pytest.param([0], {4: 0, 8: 0, 12: 0}, id="one rank of 64: its replicas alone"),
        pytest.param([0, 1, 2, 3], {r: r % 4 for r in range(4, 16)}, id="one node: all of its stage"),
        pytest.param([0, 16, 33], {4: 0, 8: 0, 12: 0, 20: 16, 24: 16, 28: 16, 37: 33, 41: 33, 45: 33}, id="stages"),
    ],
)
def test_a_few_ranks_of_64_stand_in_for_those_of_their_stage_and_tensor_position(
    traced: list[int], filled: dict[int, int]
):
    recording = ln.fill_ranks(job(traced, grid(4, 4, 4), quiet, 64))
    assert recording.filled == filled
    refused = recording.report.filter(what="rank not filled")
    assert len(refused) == 64 - len(traced) - len(filled)
    assert refused["detail"].str.contains("none of its replicas has a trace: .* explicit wait").all()
    groups = recording.ops.filter(kind="comm").select("rank", "group").unique()
    tensor = {rank: group for rank, group in groups.iter_rows() if rank < 16}
    assert tensor[0] == "tp0"
    assert tensor[4] == "mesh_tp 4+5+6+7"  # nobody in it has a trace


NAMELESS: Groups = [("0", "default_pg", [0, 1, 2, 3]), ("7", "undefined", [0, 1]), ("8", "undefined", [2, 3])]


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        pytest.param(NAMELESS, "no group that is data-parallel", id="no description"),
        pytest.param(
            [("0", "default_pg", [0, 1, 2, 3]), ("t", "TENSOR_MODEL_PARALLEL_GROUP", [0, 1])], "no group", id="tp"
        ),
        pytest.param(
            [*grid(2, 2), ("9", "", [2, 3])], "group 9 of rank 3 does not say", id="one group that says nothing"
        ),
        pytest.param(
            [*grid(2, 2), ("e", "EXPERT_MODEL_PARALLEL_GROUP", [2, 3])],
            "is with it in EXPERT_MODEL_PARALLEL_GROUP",
            id="parts of the model beside",
        ),
    ],
)
def test_where_the_groups_do_not_tell_nothing_is_filled(groups: Groups, why: str):
    run = job([0, 1, 3], groups, stages, 4)
    recording = ln.fill_ranks(run)
    assert recording.filled == {}
    assert why in recording.report.filter(what="rank not filled")["detail"].item()
    before, after = (ln.build_graph(one, 2) for one in (Recording.of(run), recording))
    assert before.ops.equals(after.ops)


def test_replicas_can_be_given():
    recording = ln.fill_ranks(job([0, 1, 3], [], stages, 4), replicas=[[0, 1], [2, 3]])
    assert recording.filled == {2: 3}


def test_a_group_of_all_ranks_is_of_replicas_only_if_all_do_the_same_in_it():
    world: Groups = [("0", "default_pg", [0, 1, 2])]

    def body(collective: str) -> Callable[[Trace, int, float], None]:
        return lambda trace, step, start: (
            trace.launch("nccl", (start, start + 5), (start + 10, start + 50), **comm("0", 3, collective, Seq=step))
            and None
        )

    assert ln.fill_ranks(job([0, 2], world, body("allreduce"), 3)).filled == {1: 0}
    assert ln.fill_ranks(job([0, 2], world, body("all_to_all"), 3)).filled == {}


def test_wrong_use_says_what_is_wrong():
    run = job([0, 1, 3], grid(2, 2), stages, 4)
    with pytest.raises(InputError, match="has been filled already"):
        ln.fill_ranks(ln.fill_ranks(run))
    with pytest.raises(InputError, match="replicas holds rank 9; the job has the ranks 0, 1, 2, 3"):
        ln.fill_ranks(run, replicas=[[0, 9]])
    with pytest.raises(InputError, match="level is the share"):
        ln.step_interval(run, level=2)


def test_one_traced_rank_gives_no_interval():
    row = ln.step_interval(job([0], grid(4, 4, 4), quiet, 64), 2).row(0, named=True)
    assert (row["ranks_measured"], row["ranks_filled"], row["ranks_absent"]) == (1, 3, 60)
    assert row["low_ns"] is None


CHOICES = [sorted(random.Random(seed).sample(range(20), 3)) for seed in range(6)]


def test_a_run_of_20_ranks_with_3_files_missing_has_the_step_of_the_whole_run_in_its_interval():
    run = ln.load_run(ln.datasets.path("gpt-grid"))
    times = Recording.of(run).step_times().filter(~pl.col("edge"))
    rows = []
    for gone in CHOICES:
        part = Recording.of(without(run, gone))
        intervals = pl.concat([ln.step_interval(part, step) for step in times["step"]])
        assert set(intervals.select("ranks_measured", "ranks_filled", "ranks_absent").unique().rows()) == {(17, 3, 0)}
        assert intervals["transfers_estimated"].min() > 0
        rows.append(intervals.join(times.select("step", true_ns="step_ns"), on="step"))
    table = pl.concat(rows)
    inside = pl.col("true_ns").is_between("low_ns", "high_ns")
    coverage, width = table.select(
        inside.mean(), ((pl.col("high_ns") - pl.col("low_ns")) / pl.col("true_ns")).mean()
    ).row(0)
    assert coverage >= 0.85  # at level 0.9, of 48
    assert width <= 0.04  # ranks end a step a tenth of it apart


def test_the_20_rank_run_with_3_files_missing_replays_as_labelled():
    run = ln.load_run(ln.datasets.path("gpt-grid"))
    recording = ln.fill_ranks(without(run, CHOICES[0]))
    assert set(recording.filled) == set(CHOICES[0])
    assert all(rank % 4 == original % 4 for rank, original in recording.filled.items())  # the same stage
    step = recording.default_step()
    measured_ns = recording.step_times().filter(step=step)["step_ns"].item()
    assert ln.replay(ln.build_graph(recording, step)).step_ns == pytest.approx(measured_ns, rel=0.05)


def exposed_ns(graph: Graph) -> float:
    """Exposed communication of a rank on average, what it waits for absent ranks included."""
    parts = ln.breakdown(ln.replay(graph))
    waits = parts.filter(pl.col("part").is_in(["exposed_wait", "exposed_transfer", "unexplained"]))
    return float(waits["time_ns"].sum() / parts["rank"].n_unique())


@pytest.mark.parametrize(
    ("job", "gone", "most"),
    [
        pytest.param("ST", [1], 0.002, id="1 of 8"),
        pytest.param("ST", [3, 4], 0.002, id="2 of 8"),
        pytest.param("ST", [0, 2, 5, 7], 0.01, id="4 of 8"),
        pytest.param("AR", [4, 24, 60], 0.04, id="3 of 16"),
        pytest.param("AR", [24], 0.002, id="1 of 16"),
    ],
)
def test_a_pipeline_with_lanes_missing_has_the_step_and_the_exposed_communication_of_the_whole(
    traces: Path, job: str, gone: list[int], most: float
):
    run = ln.load_run(traces / "straggler" / f"timeline-{job}.json.gz")
    whole, filled = Recording.of(run), ln.fill_ranks(without(run, gone))
    assert set(filled.filled) == set(gone)
    step = whole.default_step()
    true, graph = ln.build_graph(whole, step), ln.build_graph(filled, step)
    step_ns = ln.replay(true).step_ns
    assert ln.replay(graph).step_ns == pytest.approx(step_ns, rel=0.001)
    assert abs(exposed_ns(graph) - exposed_ns(true)) / step_ns <= most


@pytest.mark.parametrize("world", [2 * 10**7, 2**31 - 1])
def test_groups_of_all_ranks_take_no_room_however_many_ranks_a_file_states(world: int, tmp_path: Path) -> None:
    """A file of some kilobytes: what it states of ranks and groups must not become as many numbers."""
    groups = [{"pg_name": str(number), "pg_desc": "mesh_dp", "ranks": []} for number in range(100)]
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
    about = {"rank": 0, "world_size": world, "pg_config": groups}
    (tmp_path / "rank0.json").write_text(json.dumps({"distributedInfo": about, "traceEvents": [op]}))
    recording = Recording.of(ln.load_run(tmp_path / "rank0.json"))
    assert recording.world_size == world
    assert recording.groups.height == 100
    assert recording.groups["ranks"].null_count() == 100
    assert recording.groups.estimated_size() < 10_000
    assert ln.load_job(tmp_path / "rank0.json", tmp_path / "job").replay().step_ns == 2000
    if world > 10**9:
        with pytest.raises(InputError, match="a job of 2,147,483,647 ranks, as its files state, takes some"):
            ln.fill_ranks(recording)


@pytest.mark.parametrize("fully", [{0}, {0, 1}], ids=["one file", "every file"])
def test_a_group_that_lists_no_rank_is_of_all_ranks(fully: set[int]) -> None:
    """As if it listed them, also where another file does list them."""

    def body(trace: Trace, _: int, start: float) -> None:
        trace.launch("work", (start, start + 5), (start + 10, start + 100))
        unsized = comm("0", 4)
        del unsized["args"]["Group size"]
        trace.launch("ncclAllReduce", (start + 6, start + 8), (start + 100, start + 140), **unsized)

    listed = job([0, 1], [("0", "default_pg", [0, 1, 2, 3])], body, 4)
    metadata = {
        rank: {"distributedInfo": {"pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "ranks": []}]}}
        for rank in fully
    }
    unlisted = replace(listed, metadata={**listed.metadata, **metadata})
    in_full, short = (Recording.of(run) for run in (listed, unlisted))
    assert short.ops.filter(kind="comm")["group_size"].unique().to_list() == [4]
    assert short.ops.equals(in_full.ops)
    assert ln.fill_ranks(short).ops.equals(ln.fill_ranks(in_full).ops)
    assert ln.fill_ranks(short).filled == {2: 1, 3: 1}
