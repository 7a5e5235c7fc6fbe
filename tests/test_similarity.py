"""Similarity of a benchmark and its original, on traces made by hand: every figure can be added up on paper."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from lumos_nb import benchmark
from lumos_nb.charts import similarity_bars
from lumos_nb.errors import InputError, RunError
from lumos_nb.exchange.benchmark.steps import device_use, marked_steps, step_rows
from lumos_nb.traces.run import Run
from tests.trace_builder import Trace, repeated, run_of, write_kineto

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def step(
    scale: float = 1, *, launches: int = 2, numel: int = 1000, name: str = "aten::mm", period: float = 1000
) -> Run:
    """Four steps: an operator of 40 µs around one of 10, kernels of 100 µs each, an all-reduce of 50."""

    def body(trace: Trace, _number: int, at: float) -> None:
        trace.op("aten::linear", at, at + 40)
        trace.op(name, at + 5, at + 15)
        for nth in range(launches):
            begin = at + 100 + 100 * scale * nth
            occupied = {"est. achieved occupancy %": 40 if nth else 20}
            trace.launch("volta_sgemm", (at + 41 + nth, at + 42 + nth), (begin, begin + 100 * scale), args=occupied)
        said = {"Collective name": "allreduce", "In msg nelems": numel, "dtype": "Float"}
        trace.launch(NCCL, (at + 60, at + 61), (at + 600, at + 650), stream=9, args=said)

    return run_of(repeated(body, period))


def figures(similar: benchmark.Similarity) -> dict[str, tuple[float, float]]:
    return {row[0]: row[2:4] for row in similar.figures.iter_rows()}


def test_every_figure_is_the_sum_of_what_a_step_did():
    similar = benchmark.compare(step(), step(2, launches=3, numel=500, period=2000))
    assert figures(similar) == {
        "step": (1_000_000, 2_000_000),
        "operators": (2, 2),
        "operators, self time": (40_000, 40_000),
        "kernel launches": (3, 4),
        "kernels": (3, 4),
        "kernels, time": (250_000, 650_000),
        "collectives": (1, 1),
        "collectives, volume": (4000, 2000),
        "collectives, time": (50_000, 50_000),
        "kernels run": (0.25, 0.3),  # the all-reduce of the second runs while a kernel does
        "SM occupancy, estimated": (pytest.approx(0.3), pytest.approx((20 + 40 + 40) / 300)),
    }
    assert similar.verdict.startswith("Not alike: a step takes 2.000 (2.000 to 2.000) of the original's 1.00 ms")


def test_operators_are_matched_by_name_with_their_own_time():
    similar = benchmark.compare(step(), step(name="aten::bmm"))
    host = similar.ops.filter(where="host").sort("name").select("name", "time_ns", "replayed_time_ns")
    assert host.rows() == [("aten::bmm", 0, 10_000), ("aten::linear", 30_000, 30_000), ("aten::mm", 10_000, 0)]
    total_ns = 40_000 + 250_000
    assert similar.distance == pytest.approx(10_000 / total_ns)
    assert similar.coverage_by_time == pytest.approx(1 - 10_000 / total_ns)
    assert similar.coverage_by_count == pytest.approx(4 / 5)  # of two operators and three kernels


def test_a_run_is_like_itself_and_its_table_and_chart_say_so():
    run = step()
    similar = benchmark.compare(run, run)
    assert similar.distance == 0
    assert similar.coverage_by_count == similar.coverage_by_time == 1
    assert similar.figures["ratio"].unique().to_list() == [1]
    assert similar.verdict.startswith("Alike")
    assert "4.00 kB" in repr(similar)
    assert similar._repr_html_().count("<table") == 3
    assert len(similarity_bars(similar.classes).to_dict()["layer"]) == 2


@pytest.mark.parametrize(
    ("times_us", "word"),
    [
        pytest.param([105, 104, 106, 105], "Alike", id="within a tenth"),
        pytest.param([150, 151, 149, 150], "Not alike", id="all of the interval is away"),
        pytest.param([80, 100, 150, 160], "Undecided", id="steps spread too much to tell"),
    ],
)
def test_the_verdict_rests_on_steps_that_nothing_was_attached_to(times_us, word, tmp_path):
    trace = repeated(lambda t, _n, at: t.op("aten::mm", at, at + 10))
    for side, times in (("a", [99, 100, 101, 100]), ("b", times_us)):
        (tmp_path / side).mkdir()
        write_kineto(trace, tmp_path / side / "rank-0.json")
        rows = [f"0,{at},{1000 * us},0" for at, us in enumerate(times)]
        (tmp_path / side / "steps.csv").write_text("\n".join(["rank,step,wall_ns,cpu_ns", *rows]))
    similar = benchmark.compare(tmp_path / "a", tmp_path / "b")
    assert similar.verdict.startswith(f"{word}: ")
    assert similar.figures["original"][0] == 100_000
    (tmp_path / "b/steps.csv").unlink()  # then only the profiled steps can be held together
    assert benchmark.compare(tmp_path / "a", tmp_path / "b").figures["original"][0] == 1_000_000


@pytest.mark.parametrize("text", ["", "rank,step\n0,1\n", "rank,step,wall_ns\n0,1,soon\n", "\x00\xff"])
def test_a_damaged_table_of_times_is_named(text, tmp_path):
    write_kineto(repeated(lambda t, _n, at: t.op("aten::mm", at, at + 10)), tmp_path / "rank-0.json")
    (tmp_path / "steps.csv").write_text(text, encoding="latin-1")
    with pytest.raises(RunError, match=r"steps\.csv is no table of numbers with the columns step, wall_ns"):
        benchmark.compare(tmp_path, tmp_path)


def test_a_slowest_rank_makes_the_step_and_ranks_add_up_in_the_rest():
    ranks = [repeated(lambda t, _n, at: t.op("aten::mm", at, at + 10), rank=rank) for rank in range(2)]
    similar = benchmark.compare(run_of(*ranks), run_of(ranks[0]))
    assert similar.ops.select("count", "replayed_count").row(0) == (2, 1)
    assert similar.coverage_by_count == 0.5


def test_gloo_collectives_are_timed_where_they_run_and_say_their_bytes():
    def body(trace: Trace, _number: int, at: float) -> None:
        trace.op("c10d::allreduce_", at, at + 5)
        args = {"Input Dims": [[10, 3], [7]], "Input type": ["float", "c10::BFloat16"]}
        trace._add("user_annotation", "gloo:all_reduce", at + 6, at + 26, thread=3, args=args)

    similar = benchmark.compare(*[run_of(repeated(body))] * 2)
    assert similar.communication.row(0)[:4] == ("all_reduce", 1, 20_000, 4 * 30 + 2 * 7)


def test_work_belongs_to_the_step_that_launched_it_and_the_first_step_is_left_out():
    def body(trace: Trace, number: int, at: float) -> None:
        trace.launch(f"kernel {number}", (at, at + 1), (at + 1500, at + 1600))

    run = run_of(repeated(body))
    device = step_rows(run).filter(where="device").sort("step")
    assert device.select("step", "name").rows() == [(2, "kernel 2"), (3, "kernel 3"), (4, "kernel 4")]
    assert marked_steps(run)["step"].to_list() == [2, 3, 4]
    assert device_use(run)["busy_share"].to_list() == pytest.approx([0.1, 0.1, 0.1])
    assert device_use(run)["occupancy_share"].to_list() == [None] * 3


def test_what_only_one_step_does_is_not_typical():
    odd = repeated(lambda t, n, at: t.op("aten::item" if n == 3 else "aten::mm", at, at + 10))
    assert benchmark.compare(*[run_of(odd)] * 2).ops["name"].to_list() == ["aten::mm"]


def test_a_step_of_gpus_is_compared(traces: Path):
    path = traces / "hta/ns_resolution_trace"
    similar = benchmark.compare(path, path)
    found = figures(similar)
    assert found["kernels"] == (1219, 1219)
    assert 0.9 < found["kernels run"][0] < 1
    assert 0.4 < found["SM occupancy, estimated"][0] < 0.5
    assert {"convolution", "norm"} <= set(similar.classes.filter(where="device")["class"])


def test_what_cannot_be_compared_is_refused():
    unmarked, idle = Trace(), Trace()
    unmarked.op("aten::mm", 0, 10)
    idle.step(1, 0, 10)
    with pytest.raises(RunError, match="no ProfilerStep mark"):
        benchmark.compare(step(), run_of(unmarked))
    with pytest.raises(RunError, match="neither operators nor kernels"):
        benchmark.compare(run_of(idle), step())
    with pytest.raises(InputError, match="it was given a DataFrame"):
        benchmark.compare(step(), pl.DataFrame())  # type: ignore[arg-type]
