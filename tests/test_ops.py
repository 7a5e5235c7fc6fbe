"""Events -> ops: how threads are cut, what each op is called, which launch device work belongs to."""

from __future__ import annotations

from itertools import pairwise

import polars as pl
import pytest

from lumos_nb.errors import SchemaError
from lumos_nb.ops import RAW_COLUMNS, build_ops, step_marks
from lumos_nb.schema import EVENTS, OPS
from tests.trace_builder import ENGINE, ZERO_NS, Trace, run_of


def ops_of(*traces: Trace) -> pl.DataFrame:
    return build_ops(run_of(*traces).events)


def extents(ops: pl.DataFrame, lane: str = "cpu:1") -> list[tuple[str, str, float, float]]:
    """Kind, name, start and end in µs of every op of a lane."""
    start = pl.col("start_ns") - ZERO_NS
    rows = ops.filter(pl.col("lane") == lane).sort("start_ns", "dur_ns")
    return rows.select("kind", "name", s=start / 1000, e=(start + pl.col("dur_ns")) / 1000).rows()


def value(ops: pl.DataFrame, name: str, column: str) -> object:
    """The column's value in the only op of that name."""
    return ops.filter(pl.col("name") == name)[column].item()


# --- cutting a thread -------------------------------------------------------------------------------------------------


def test_a_thread_is_cut_at_outermost_operators_and_at_calls():
    trace = Trace()
    trace.op("aten::linear", 10, 50)
    trace.op("aten::addmm", 15, 45)
    trace.launch("gemm", (20, 26), (30, 90))
    trace.op("aten::relu", 60, 70)
    assert extents(ops_of(trace)) == [
        ("cpu", "aten::linear", 10, 20),
        ("launch", "cudaLaunchKernel", 20, 26),
        ("cpu", "aten::linear", 26, 50),
        ("gap", "before aten::relu", 50, 60),
        ("cpu", "aten::relu", 60, 70),
    ]


def test_every_nanosecond_between_a_threads_first_and_last_cut_is_in_one_op():
    trace = Trace()
    for step in range(3):
        trace.step(step, 100 * step, 100 * step + 97)
        trace.op("aten::mm", 100 * step + 11.5, 100 * step + 40.25)
        trace.launch("k", (100 * step + 20.125, 100 * step + 26.5), (300, 301))
    rows = extents(ops_of(trace))
    assert all(before[3] == after[2] for before, after in pairwise(rows))
    assert (rows[0][2], rows[-1][3]) == (11.5, 240.25)


def test_a_call_outside_every_operator_stands_alone():
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    trace.call("cudaDeviceSynchronize", 20, 30)
    assert extents(ops_of(trace))[1:] == [
        ("gap", "before cudaDeviceSynchronize", 10, 20),
        ("wait", "cudaDeviceSynchronize", 20, 30),
    ]


def test_annotations_are_no_operators_but_say_where_a_call_is():
    trace = Trace()
    trace.annotation("## forward ##", 0, 100)
    trace.op("aten::mm", 10, 40)
    trace.op("aten::_mm", 12, 38)
    trace.launch("k", (20, 30), (40, 50))
    ops = ops_of(trace)
    assert [row[:2] for row in extents(ops)] == [
        ("cpu", "aten::mm"),
        ("launch", "cudaLaunchKernel"),
        ("cpu", "aten::mm"),
    ]
    assert (value(ops, "k", "parent"), value(ops, "k", "around"), value(ops, "k", "phase")) == (
        "aten::mm",
        "aten::_mm",
        "forward",
    )


def test_a_call_that_overlaps_the_next_ends_where_the_next_begins():
    trace = Trace()
    trace.op("aten::mm", 0, 100)
    trace.call("cudaLaunchKernel", 10, 30)
    trace.call("cudaLaunchKernel", 20, 40)
    assert [row[2:] for row in extents(ops_of(trace)) if row[0] == "launch"] == [(10, 20), (20, 40)]


def test_calls_that_neither_launch_nor_wait_are_part_of_their_operator():
    trace = Trace()
    trace.op("aten::mm", 0, 100)
    trace.call("cudaStreamIsCapturing", 10, 20)
    trace.call("cudaEventQuery", 30, 40)
    assert extents(ops_of(trace)) == [("cpu", "aten::mm", 0, 100)]


def test_what_precedes_a_step_mark_and_what_precedes_an_operator_are_two_gaps():
    trace = Trace()
    trace.step(1, 0, 100)
    trace.step(2, 100, 200)
    trace.op("aten::mm", 10, 20)
    trace.op("aten::add", 130, 140)
    assert extents(ops_of(trace))[1:3] == [
        ("gap", "before the next step", 20, 100),
        ("gap", "before aten::add", 100, 130),
    ]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("cudaLaunchKernel", "launch"),
        ("cudaLaunchKernelExC", "launch"),
        ("cuLaunchKernelEx", "launch"),
        ("cudaGraphLaunch", "launch"),
        ("hipExtModuleLaunchKernel", "launch"),
        ("hipModuleLaunchKernel", "launch"),
        ("cudaMemcpyAsync", "launch"),
        ("hipMemcpyWithStream", "launch"),
        ("cudaMemsetAsync", "launch"),
        ("cuMemsetD32Async", "launch"),
        ("cudaEventRecordWithFlags", "launch"),
        ("hipStreamWaitEvent", "launch"),
        ("cudaStreamSynchronize", "wait"),
        ("hipEventSynchronize", "wait"),
        ("cuCtxSynchronize", "wait"),
        ("cudaFree", "alloc"),
        ("hipHostFree", "alloc"),
        ("cudaMalloc", "alloc"),
        ("cuLibraryLoadData", "alloc"),
    ],
)
def test_calls_of_every_vendor_map_to_the_same_kinds(call: str, kind: str):
    trace = Trace()
    trace.op("aten::mm", 0, 100)
    trace.call(call, 10, 20)
    assert value(ops_of(trace), call, "kind") == kind


# --- steps ------------------------------------------------------------------------------------------------------------


def test_device_work_belongs_to_the_step_that_launched_it():
    trace = Trace()
    for step in (4, 5):
        trace.step(step, 100 * step, 100 * step + 100)
        trace.op(f"aten::op{step}", 100 * step + 10, 100 * step + 50)
        trace.launch(f"k{step}", (100 * step + 20, 100 * step + 30), (100 * step + 150, 100 * step + 190))
    ops = ops_of(trace)
    assert [value(ops, f"k{step}", "step") for step in (4, 5)] == [4, 5]
    assert value(ops, "k4", "launch_ns") == ZERO_NS + 420_000


def test_what_comes_before_the_first_mark_is_the_step_before_it():
    trace = Trace()
    trace.op("aten::early", 0, 10)
    trace.step(7, 20, 40)
    trace.op("aten::late", 25, 30)
    ops = ops_of(trace)
    assert (value(ops, "aten::early", "step"), value(ops, "aten::late", "step")) == (6, 7)


def test_without_marks_everything_is_step_0():
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    trace.launch("k", (2, 4), (6, 9))
    assert set(ops_of(trace)["step"]) == {0}


def test_a_step_lasts_until_the_next_mark_begins():
    trace = Trace()
    trace.step(1, 0, 90)
    trace.step(2, 100, 180)
    marks = step_marks(run_of(trace).events)
    assert marks.select("step", "start_ns", "end_ns").rows() == [
        (1, ZERO_NS, ZERO_NS + 100_000),
        (2, ZERO_NS + 100_000, ZERO_NS + 180_000),
    ]


def test_every_thread_of_a_rank_is_cut_at_its_marks():
    trace = Trace()
    trace.step(1, 0, 100)
    trace.step(2, 100, 200)
    trace.op("aten::a", 80, 90, thread=ENGINE)
    trace.op("aten::b", 120, 130, thread=ENGINE)
    assert extents(ops_of(trace), "cpu:2") == [
        ("cpu", "aten::a", 80, 90),
        ("gap", "before the next step", 90, 100),
        ("gap", "before aten::b", 100, 120),
        ("cpu", "aten::b", 120, 130),
    ]


# --- launches and their work ------------------------------------------------------------------------------------------


def test_work_launched_before_the_window_has_no_launch_and_no_step():
    trace = Trace()
    trace.step(1, 10, 100)
    trace.device("backlog", 0, 30, correlation=17)
    trace.op("aten::mm", 20, 60)
    trace.launch("k", (30, 35), (40, 50))
    ops = ops_of(trace)
    assert value(ops, "backlog", "step") is None
    assert value(ops, "backlog", "launch_ns") is None
    assert value(ops, "k", "launch_ns") == ZERO_NS + 30_000


def test_a_correlation_of_zero_is_none():
    trace = Trace()
    trace.op("aten::mm", 0, 100)
    trace.call("cudaLaunchKernel", 10, 20, correlation=0)
    trace.device("unlinked", 30, 40, correlation=0)
    ops = ops_of(trace)
    assert value(ops, "unlinked", "launch_ns") is None
    assert ops["correlation"].null_count() == ops.height


def test_work_whose_id_two_launches_share_belongs_to_the_later_of_those_before_it():
    trace = Trace()
    trace.op("aten::first", 0, 100)
    trace.call("cudaLaunchKernel", 10, 20, correlation=5)
    trace.device("k1", 30, 40, correlation=5)
    trace.op("aten::second", 200, 300)
    trace.call("cudaLaunchKernel", 210, 220, correlation=5)
    trace.device("k2", 230, 240, correlation=5)
    ops = ops_of(trace)
    assert [value(ops, k, "parent") for k in ("k1", "k2")] == ["aten::first", "aten::second"]
    launches, kernels = (ops.filter(pl.col("kind") == kind)["correlation"].to_list() for kind in ("launch", "kernel"))
    assert launches == kernels
    assert len(set(launches)) == 2


def test_ids_of_two_ranks_do_not_meet():
    one, two = Trace(0), Trace(1)
    one.op("aten::one", 0, 100)
    one.call("cudaLaunchKernel", 10, 20, correlation=5)
    two.op("aten::two", 0, 100)
    two.call("cudaLaunchKernel", 50, 60, correlation=6)
    two.device("k", 70, 80, correlation=5)
    assert value(ops_of(one, two), "k", "launch_ns") is None


def test_kernels_of_a_graph_launch_share_its_call():
    trace = Trace()
    trace.op("aten::replay", 0, 100)
    graph = trace.call("cudaGraphLaunch", 10, 20)
    for k in range(3):
        trace.device(f"k{k}", 30 + 10 * k, 38 + 10 * k, correlation=graph)
    ops = ops_of(trace)
    assert {value(ops, f"k{k}", "launch_ns") for k in range(3)} == {ZERO_NS + 10_000}


def test_the_site_of_a_launch_is_the_same_in_every_step_and_rank():
    def one(rank: int) -> Trace:
        trace = Trace(rank)
        for step in (1, 2):
            at = 100 * step + 3 * rank
            trace.step(step, at, at + 100)
            trace.op("aten::mm", at + 10, at + 30)
            trace.launch("k", (at + 15, at + 20), (at + 25, at + 30))
            trace.op("aten::add", at + 40, at + 60)
            trace.launch("k", (at + 45, at + 50), (at + 55, at + 60))
        return trace

    kernels = ops_of(one(0), one(1)).filter(pl.col("kind") == "kernel")
    assert kernels.group_by("parent").agg(pl.col("site").n_unique())["site"].to_list() == [1, 1]
    assert kernels["site"].n_unique() == 2


# --- what an op inherits ----------------------------------------------------------------------------------------------


def test_phases_come_from_sequence_numbers_annotations_and_the_engine():
    trace = Trace()
    trace.op("aten::mm", 0, 10, sequence=3)
    trace.op("aten::detach", 10, 20)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 0, 20, thread=ENGINE)
    trace.op("MmBackward0", 2, 18, thread=ENGINE, sequence=3)
    trace.annotation("Optimizer.step#SGD.step", 20, 40)
    trace.op("aten::add_", 25, 35)
    ops = ops_of(trace)
    phases = {row["name"]: row["phase"] for row in ops.filter(pl.col("kind") == "cpu").iter_rows(named=True)}
    assert phases == {
        "aten::mm": "forward",
        "aten::detach": "other",
        "autograd::engine::evaluate_function: MmBackward0": "backward",
        "aten::add_": "optimizer",
    }


def test_micro_batches_come_from_annotations():
    trace = Trace()
    for n in range(2):
        trace.annotation(f"forward micro_batch={n}", 100 * n, 100 * n + 80)
        trace.op(f"aten::mm{n}", 100 * n + 10, 100 * n + 40)
        trace.launch(f"k{n}", (100 * n + 20, 100 * n + 30), (100 * n + 50, 100 * n + 60))
    ops = ops_of(trace)
    assert [value(ops, f"k{n}", "micro_batch") for n in range(2)] == [0, 1]


def test_shapes_dtype_and_bytes_are_read_from_arguments():
    trace = Trace()
    trace.op("aten::mm", 0, 100, args={"Input Dims": [[8, 4], [4, 2], []], "Input type": ["float", "float", ""]})
    trace.launch("gemm", (10, 20), (30, 40))
    trace.copy("Memcpy HtoD (Pageable -> Device)", (50, 60), (70, 80), args={"bytes": 4096})
    ops = ops_of(trace)
    assert (value(ops, "gemm", "shapes"), value(ops, "gemm", "dtype")) == ("[[8, 4], [4, 2], []]", "float")
    assert value(ops, "Memcpy HtoD (Pageable -> Device)", "bytes") == 4096


# --- communication ----------------------------------------------------------------------------------------------------


def test_nccl_arguments_name_the_collective_its_group_and_its_bytes():
    args = {"Collective name": "_allgather_base", "Process Group Name": "3", "Group size": 4, "Seq": 12,
            "In msg nelems": 1000, "Out msg nelems": 4000, "dtype": "BFloat16"}  # fmt: skip
    trace = Trace()
    trace.device("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 10, stream=20, args=args)
    row = ops_of(trace).row(0, named=True)
    assert (row["kind"], row["collective"], row["group"], row["group_size"], row["comm_seq"], row["comm_bytes"]) == (
        "comm", "all_gather", "3", 4, 12, 8000,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "size_bytes"),
    [
        *(("Float", 4000), ("Half", 2000), ("Short", 2000), ("Long", 8000), ("Byte", 1000), ("Bool", 1000)),
        *(("Float8_e4m3fn", 1000), ("Float8_e5m2fnuz", 1000), ("QInt8", None), (None, None)),
    ],
)
def test_bytes_of_a_collective_go_by_its_number_format(dtype: str | None, size_bytes: int | None):
    trace = Trace()
    args = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": dtype}
    trace.device("ncclKernel_AllReduce", 0, 10, args=args)
    assert ops_of(trace)["comm_bytes"].to_list() == [size_bytes]


@pytest.mark.parametrize(
    ("kernel", "collective"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("ncclDevKernel_Generic(ncclDevComm*)", "unknown"),
    ],
)
def test_without_arguments_the_kernels_name_says_which_collective(kernel: str, collective: str):
    trace = Trace()
    trace.device(kernel, 0, 10, stream=20)
    row = ops_of(trace).row(0, named=True)
    assert (row["kind"], row["collective"], row["group"]) == ("comm", collective, None)


@pytest.mark.parametrize(
    ("others", "found"), [(["all_to_all", "all_to_all"], "all_to_all"), (["all_to_all", "send"], "send_recv")]
)
def test_a_kernel_without_a_launch_is_what_all_of_its_name_on_its_stream_are(others: list[str], found: str):
    trace = Trace()
    trace.device("ncclKernel_SendRecv", 0, 5, stream=20)
    for n, other in enumerate(others, 1):
        trace.annotation(f"nccl:{other}", 100 * n, 100 * n + 20)
        trace.launch("ncclKernel_SendRecv", (100 * n + 5, 100 * n + 9), (100 * n + 15, 100 * n + 80), stream=20)
    ops = ops_of(trace).filter(pl.col("name") == "ncclKernel_SendRecv").sort("start_ns")
    assert ops["collective"].to_list() == [found, *others]


def test_the_operator_around_the_launch_tells_an_all_to_all_from_a_send():
    trace = Trace()
    trace.op("nccl:all_to_all", 0, 50)
    trace.launch("ncclKernel_SendRecv_RING_SIMPLE", (10, 20), (30, 40), stream=20)
    assert value(ops_of(trace), "ncclKernel_SendRecv_RING_SIMPLE", "collective") == "all_to_all"


def test_labelled_gloo_collectives_are_issued_run_and_waited_for():
    words = "all_reduce group=0 seq=3 bytes=4096 dtype=float32"
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    trace.annotation(f"comm::{words}", 10, 20)
    trace.op("c10d::allreduce_", 11, 19)
    trace.annotation("gloo:all_reduce", 15, 60, thread=9)
    trace.annotation(f"wait::{words}", 30, 62)
    ops = ops_of(trace)
    same = "all_reduce group=0 bytes=4096 dtype=float32"  # in every step: the sequence number is a column
    assert [row[:2] for row in extents(ops)] == [
        ("cpu", "aten::mm"), ("launch", f"comm::{same}"), ("gap", f"before wait::{same}"), ("wait", f"wait::{same}"),
    ]  # fmt: skip
    run = ops.filter(pl.col("kind") == "comm").row(0, named=True)
    assert (run["lane"], run["device"], run["collective"], run["group"], run["comm_seq"], run["comm_bytes"]) == (
        "cpu:9", None, "all_reduce", "0", 3, 4096,
    )  # fmt: skip
    ids = ops.filter(pl.col("name").str.contains("all_reduce group") & (pl.col("kind") != "gap"))["correlation"]
    assert set(ids) == {run["correlation"]}


def test_gloo_sends_and_receives_lie_on_lanes_of_their_peer():
    trace = Trace()
    for kind, peer, start in (("send", 1, 0), ("recv", 2, 5)):
        label = f"comm::{kind} group=0 seq=0 bytes=64 dtype=float32 peer={peer}"
        trace.annotation(label, start, start + 3)
        trace.annotation(f"gloo:{kind}", start + 1, start + 40)
    comm = ops_of(trace).filter(pl.col("kind") == "comm").sort("start_ns")
    assert comm.select("lane", "collective", "peer").rows() == [("net:send:1", "send", 1), ("net:recv:2", "recv", 2)]


def test_the_last_execution_belongs_to_the_last_issue_where_the_first_was_issued_before_the_window():
    trace = Trace()
    trace.annotation("gloo:all_reduce", 0, 20, thread=9)
    for seq in (4, 5):
        trace.annotation(f"comm::all_reduce group=0 seq={seq} bytes=8 dtype=float32", 100 * seq, 100 * seq + 10)
        trace.annotation("gloo:all_reduce", 100 * seq + 5, 100 * seq + 60, thread=9)
    comm = ops_of(trace).filter(pl.col("kind") == "comm").sort("start_ns")
    assert comm["comm_seq"].to_list() == [None, 4, 5]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_no_events_give_an_empty_table_of_the_same_columns():
    empty = build_ops(EVENTS.empty())
    trace = Trace()
    trace.op("aten::mm", 0, 10)
    full = ops_of(trace)
    assert empty.is_empty()
    assert empty.schema == full.schema
    assert full.columns == [*OPS.columns, *RAW_COLUMNS]


def test_a_device_alone_is_a_table_of_its_work():
    trace = Trace()
    trace.device("k", 0, 10)
    trace.device("Memset (Device)", 10, 12, category="gpu_memset")
    assert ops_of(trace)["kind"].to_list() == ["kernel", "memset"]


def test_a_table_that_is_no_event_table_is_refused_by_name():
    with pytest.raises(SchemaError, match=r"event table lacks column\(s\) .*category"):
        build_ops(pl.DataFrame({"rank": [0]}))
