"""What a run measured, as rows of a kernel frame: operators read by their arguments, kernels by who launched them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from trace_builder import Trace, run_of

import lumos_nb as ln
from lumos_nb.costs.operators import OPERATORS, Call, sizes_of
from lumos_nb.costs.samples import kernel_samples, undecoded, with_requests
from lumos_nb.costs.work import with_work
from lumos_nb.errors import InputError

F32 = "float"
SGEMM, SPLIT = "volta_sgemm_64x64_nt", "void splitKreduce_kernel<32, float>()"
ADD = "void at::native::vectorized_elementwise_kernel<4, F<float>>()"
TF32 = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_tn_align4>()"


def arguments(dims: list[Any], **more: Any) -> dict[str, Any]:
    """Recorded arguments; types are all float, if not said otherwise."""
    given = {"Input Dims": dims, "Input type": more.get("types", [F32] * len(dims))}
    named = {"strides": "Input Strides", "constants": "Concrete Inputs"}
    return given | {named[key]: value for key, value in more.items() if key in named}


def one(operator: str, dims: list[Any], **more: Any) -> dict[str, Any]:
    """The sample of a CPU run of one call, without what is null."""
    trace = Trace()
    trace.op(operator, 0, 10, args=arguments(dims, **more))
    row = kernel_samples(run_of(trace)).row(0, named=True)
    assert row["time_us"] == 10
    return {key: value for key, value in row.items() if value is not None}


READ = {
    "a product": ("aten::mm", [[4, 6], [6, 8]], {}, {"op": "gemm", "m": 4, "k": 6, "n": 8, "batch": 1}),
    "a linear layer": ("aten::linear", [[2, 5, 6], [8, 6], []], {}, {"op": "gemm", "m": 10, "k": 6, "trans": "NT"}),
    "a linear layer with bias": ("aten::linear", [[5, 6], [8, 6], [8]], {}, {"op": "gemm_bias", "m": 5, "n": 8}),
    "a product with bias": ("aten::addmm", [[8], [4, 6], [6, 8]], {}, {"op": "gemm_bias", "m": 4, "k": 6, "n": 8}),
    "a batch of products": ("aten::bmm", [[3, 4, 6], [3, 6, 8]], {}, {"op": "bmm", "batch": 3, "m": 4, "k": 6, "n": 8}),
    "a product by groups": (
        *("aten::_grouped_mm", [[32, 6], [4, 6, 8]], {}),
        {"op": "grouped_gemm", "groups": 4, "m": 8, "k": 6, "n": 8},
    ),
    "attention": (
        *("aten::scaled_dot_product_attention", [[2, 8, 16, 64], [2, 4, 32, 64], [2, 4, 32, 32], [], [], []]),
        {"constants": ["", "", "", "", "0.", "True"]},
        {"op": "attention", "batch": 2, "heads": 8, "kv_heads": 4, "seq_q": 16, "seq_kv": 32, "causal": True},
    ),
    "attention with values of another width": (
        *("aten::scaled_dot_product_attention", [[2, 8, 16, 64], [2, 8, 16, 64], [2, 8, 16, 32], [], [], []], {}),
        {"head_dim": 64, "head_dim_v": 32},
    ),
    "the backward of attention, heads last": (
        *("aten::_flash_attention_backward", [[2, 16, 8, 64]] * 4),
        {"constants": [""] * 11 + ["False"]},
        {"pass": "bwd", "batch": 2, "heads": 8, "seq_q": 16, "head_dim": 64, "causal": False},
    ),
    "a convolution": (
        *("aten::convolution", [[2, 4, 9, 9], [6, 2, 3, 3], [], [], [], [], []]),
        {"constants": ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False"]},
        {"m": 2 * 5 * 5, "n": 3, "k": 2 * 3 * 3, "groups": 2, "rows": 2, "cols": 4 * 9 * 9},
    ),
    "the backward of a convolution": (
        *("aten::convolution_backward", [[2, 6, 5, 5], [2, 4, 9, 9], [6, 4, 3, 3]], {}),
        {"op": "convolution", "pass": "bwd", "m": 50, "n": 6, "k": 36, "groups": 1},
    ),
    "layer norm": ("aten::layer_norm", [[2, 3, 8], [], [8], [8]], {}, {"op": "layernorm", "rows": 6, "cols": 8}),
    "layer norm without weights": (
        *("aten::native_layer_norm", [[2, 3, 8], [], [], []], {"constants": ["", "[3, 8]"]}),
        {"rows": 2, "cols": 24},
    ),
    "the backward of layer norm": (
        *("aten::native_layer_norm_backward", [[6, 8], [6, 8], [], [6, 1], [6, 1], [8], [8]], {}),
        {"op": "layernorm", "pass": "bwd", "rows": 6, "cols": 8},
    ),
    "batch norm": ("aten::native_batch_norm", [[2, 5, 3, 3], [5], [5]], {}, {"op": "batchnorm", "rows": 18, "cols": 5}),
    "softmax along a dimension": ("aten::_softmax", [[2, 3, 4], []], {"constants": ["", "1"]}, {"rows": 8, "cols": 3}),
    "the backward of log softmax": (
        *("aten::_log_softmax_backward_data", [[6, 9], [6, 9], []], {"constants": ["", "", "1"]}),
        {"op": "softmax", "pass": "bwd", "rows": 6, "cols": 9},
    ),
    "cross entropy": ("aten::cross_entropy_loss", [[6, 9], [6]], {}, {"op": "cross_entropy", "rows": 6, "cols": 9}),
    "an activation": ("aten::gelu", [[2, 3, 8], []], {}, {"op": "gelu", "pass": "fwd", "rows": 6, "cols": 8}),
    "the backward of an activation": ("aten::threshold_backward", [[6, 8], [6, 8]], {}, {"op": "relu", "pass": "bwd"}),
    "a sum of two": ("aten::add", [[6, 8], [6, 8], []], {}, {"op": "add", "rows": 6, "cols": 8}),
    "a sum in place": ("aten::add_", [[6, 8], [6, 8], []], {}, {"op": "add"}),
    "a product with a number": ("aten::mul", [[6, 8], []], {}, {"op": "mul_scalar", "rows": 6, "cols": 8}),
    "a sum with a bias": ("aten::add", [[6, 8], [8], []], {}, {"op": "add_scalar", "rows": 6, "cols": 8}),
    "an outer product": ("aten::mul", [[6, 1], [1, 8]], {}, {"rows": 6, "cols": 8}),
    "dropout": ("aten::native_dropout", [[6, 8], [], []], {}, {"op": "dropout", "rows": 6, "cols": 8}),
    "a lookup": (
        *("aten::embedding", [[100, 8], [2, 5]], {"types": [F32, "long int"]}),
        {"op": "embedding_lookup", "rows": 10, "cols": 8, "dtype": "fp32"},
    ),
    "the gradient of a lookup": (
        *("aten::embedding_dense_backward", [[2, 5, 8], [2, 5]], {"types": [F32, "long int"]}),
        {"op": "embedding_lookup", "pass": "bwd", "rows": 10, "cols": 8},
    ),
    "a copy": ("aten::copy_", [[6, 8], [6, 8]], {}, {"op": "copy", "rows": 6, "cols": 8}),
    "a cast": (
        *("aten::copy_", [[6, 8], [6, 8]], {"types": ["c10::BFloat16", F32]}),
        {"op": "cast", "dtype": "fp32", "out_dtype": "bf16"},
    ),
    "a transpose": ("aten::clone", [[6, 8]], {"strides": [[1, 6]]}, {"op": "transpose", "rows": 6, "cols": 8}),
    "a concatenation": (
        *("aten::cat", [[[2, 3], [4, 3]], []], {"types": [F32, "Scalar"]}),
        {"op": "concat", "rows": 6, "cols": 3},
    ),
    "a reduction": ("aten::sum", [[4, 3, 8], []], {"constants": ["", "[0]"]}, {"rows": 24, "cols": 4}),
    "a mean of all": ("aten::mean", [[4, 8], []], {}, {"op": "reduction", "rows": 1, "cols": 32}),
    "zeros": ("aten::zero_", [[4, 8]], {}, {"op": "fill", "rows": 4, "cols": 8}),
    "an optimizer": (
        *("aten::_fused_adamw_", [[[4, 8], [8]]] * 4, {"types": [F32] * 4}),
        {"op": "adamw", "rows": 5, "cols": 8},
    ),
    "a sum of lists": ("aten::_foreach_add_", [[[4, 8]], [[4, 8]]], {}, {"rows": 4, "cols": 8}),
    "half precision": ("aten::mm", [[4, 6], [6, 8]], {"types": ["c10::Half"] * 2}, {"dtype": "fp16"}),
}


@pytest.mark.parametrize(("operator", "dims", "more", "expected"), READ.values(), ids=READ)
def test_an_operator_is_read(operator: str, dims: list[Any], more: dict[str, Any], expected: dict[str, Any]) -> None:
    row = one(operator, dims, **more)
    assert row | expected == row
    assert "why" not in row
    assert row["gpu"] == "cpu"
    with_work(pl.DataFrame([row]).drop("family"))  # takes it


def test_the_flops_of_a_product_are_twice_its_sizes() -> None:
    row = one("aten::mm", [[4, 6], [6, 8]])
    assert with_work(pl.DataFrame([row]).drop("family"))["flops"].item() == 2 * 4 * 6 * 8


@pytest.mark.parametrize(
    ("operator", "dims", "why"),
    [
        ("aten::mm", [[4, 6], [7, 8]], "no product"),
        ("aten::mm", [[4, 6]], "not those of the operator's schema"),
        ("aten::cat", [[], []], "list of tensors are not recorded"),
        ("aten::convolution", [[2, 4, 9, 9], [6, 4, 3, 3], [], [], [], [], []], "stride, padding or dilation"),
        ("aten::layer_norm", [[2, 8], [], [], []], "normalises over is not recorded"),
        ("aten::scaled_dot_product_attention", [[9, 8, 64]] * 3, "packed"),
        ("aten::gelu", [[0, 8]], "no elements"),
    ],
)
def test_what_the_arguments_do_not_tell_stays_with_the_reason(operator: str, dims: list[Any], why: str) -> None:
    assert why in one(operator, dims)["why"]


def test_a_format_that_is_not_recorded_is_a_reason() -> None:
    assert "number format" in one("aten::gelu", [[4, 8]], types=[""])["why"]


@pytest.mark.parametrize("key", OPERATORS)
def test_no_operator_fails_on_arguments_of_another(key: str) -> None:
    others: list[list[Any]] = [[], [[]], [[3]], [[2, 3]] * 3, [[[2, 3]]] * 3, [[2, 3, 4, 5]] * 8]
    for dims in others:
        told = sizes_of(key, Call(dims))
        assert told["why"] or told["op"]


def backward(operator: str, dims: list[Any], gradient: list[int], **more: Any) -> dict[str, Any]:
    """The sample of one product that autograd runs, with the gradient that came in."""
    trace = Trace()
    trace.op("autograd::engine::evaluate_function: MmBackward0", 0, 30)
    trace.op("MmBackward0", 1, 29, args=arguments([gradient]))
    trace.op(operator, 2, 12, args=arguments(dims, **more))
    return kernel_samples(run_of(trace)).filter(pl.col("name") == operator).row(0, named=True)


FORWARD = {"m": 10, "n": 8, "k": 6}


@pytest.mark.parametrize("strides", [True, False], ids=["by its layout", "by its shape"])
def test_the_gradient_by_the_activations_has_the_sizes_of_the_forward(strides: bool) -> None:
    more = {"strides": [[8, 1], [6, 1]]} if strides else {}
    row = backward("aten::mm", [[10, 8], [8, 6]], [2, 5, 8], **more)
    assert row["pass"] == "bwd_grad_act"
    assert row | FORWARD == row


@pytest.mark.parametrize("strides", [True, False], ids=["by its layout", "by its shape"])
def test_the_gradient_by_the_weight_has_the_sizes_of_the_forward(strides: bool) -> None:
    more = {"strides": [[1, 8], [6, 1]]} if strides else {}
    row = backward("aten::mm", [[8, 10], [10, 6]], [2, 5, 8], **more)
    assert row["pass"] == "bwd_grad_w"
    assert row | FORWARD == row


def test_a_product_of_the_backward_pass_that_could_be_either_is_one_as_it_ran() -> None:
    row = backward("aten::mm", [[8, 8], [8, 8]], [8, 8])
    assert (row["pass"], row["m"], row["n"], row["k"]) == ("any", 8, 8, 8)


def test_on_a_cpu_no_time_counts_twice_and_all_of_it_counts() -> None:
    trace = Trace()
    trace.step(1, 0, 100)
    trace.op("aten::linear", 10, 30, args=arguments([[4, 6], [8, 6], []]))
    trace.op("aten::mm", 12, 28, args=arguments([[4, 6], [6, 8]]))
    trace.op("aten::view", 40, 45, args=arguments([[4, 8], []]))
    trace.op("MyFunction", 50, 80)
    trace.op("aten::gelu", 55, 75, args=arguments([[4, 8]]))
    trace.op("c10d::allreduce_", 85, 90, args=arguments([[4, 8]]))
    samples = kernel_samples(run_of(trace))
    assert dict(samples.select("name", "time_us").rows()) == {
        "aten::linear": 20,
        "aten::view": 5,
        "MyFunction": 10,
        "aten::gelu": 20,
        "c10d::allreduce_": 5,
    }
    assert samples["step"].unique().to_list() == [1]
    lost = dict(undecoded(samples).select("name", "why").rows())
    assert lost.keys() == {"aten::view", "MyFunction", "c10d::allreduce_"}
    assert lost["c10d::allreduce_"] == "communication"
    assert undecoded(samples)["share"].sum() == pytest.approx(20 / 60)


def gpu(*kernels: tuple[str, float], operator: str = "aten::mm", args: dict[str, Any] | None = None) -> pl.DataFrame:
    """Samples of the kernels that one call launches, (name, duration) each."""
    trace = Trace()
    trace.op(operator, 0, 100, args=args or arguments([[4, 6], [6, 8]]))
    at = 200.0
    for i, (name, lasts) in enumerate(kernels):
        trace.launch(name, (10 * i + 1, 10 * i + 2), (at, at + lasts))
        at += lasts
    return kernel_samples(run_of(trace))


def test_of_an_operator_s_kernels_the_main_one_has_the_sizes_and_the_time_of_its_family() -> None:
    samples = gpu((SPLIT, 5), (SGEMM, 20), (ADD, 3))
    assert samples["m"].to_list() == [None, 4, None]
    assert samples["time_us"].to_list() == [0, 25, 3]
    assert samples["why"].to_list() == [
        "counted with the main kernel of its operator",
        None,
        "beside the main kernel of its operator",
    ]
    assert samples["op"].to_list() == ["gemm", "gemm", "elementwise"]


def test_the_innermost_operator_that_is_known_gives_the_sizes() -> None:
    trace = Trace()
    trace.op("aten::linear", 0, 90, args=arguments([[4, 6], [8, 6], []]))
    trace.op("aten::addmm", 5, 80, args=arguments([[8], [4, 6], [6, 8]]))
    trace.op("aten::some_new_thing", 6, 70, args=arguments([[3, 3]]))
    trace.launch(SGEMM, (10, 12), (200, 220))
    row = kernel_samples(run_of(trace)).row(0, named=True)
    assert (row["op"], row["m"], row["operator"]) == ("gemm_bias", 4, "aten::some_new_thing")


def test_both_gradients_of_a_convolution_are_samples() -> None:
    args = arguments([[2, 6, 5, 5], [2, 4, 9, 9], [6, 4, 3, 3]])
    dgrad, wgrad = "void cudnn::detail::dgrad_engine<float>()", "void cudnn::cnn::wgrad_alg0_engine<float>()"
    samples = gpu((dgrad, 7), (wgrad, 9), ("volta_scudnn_128x64", 4), operator="aten::convolution_backward", args=args)
    assert samples.select("pass", "m", "time_us").rows() == [
        ("bwd_grad_act", 50, 7),
        ("bwd_grad_w", 50, 9),
        ("any", None, 4),
    ]
    assert "which gradient" in samples["why"][2]


def test_a_kernel_of_tensor_cores_on_fp32_is_tf32() -> None:
    assert gpu((TF32, 5))["dtype"].item() == "tf32"


def test_a_kernel_whose_launch_is_not_in_the_trace_goes_by_its_name() -> None:
    trace = Trace()
    trace.op("aten::relu", 0, 5, args=arguments([[4, 8]]))
    trace.device(SGEMM, 10, 20)
    row = kernel_samples(run_of(trace)).row(0, named=True)
    assert (row["op"], row["dtype"], row["m"]) == ("gemm", "fp32", None)
    assert "no launch in the trace" in row["why"]


def test_a_copy_on_the_device_moves_its_bytes_and_one_to_the_host_crosses_the_link() -> None:
    trace = Trace()
    trace.copy("Memcpy DtoD (Device -> Device)", (0, 1), (10, 12), args={"bytes": 4096})
    trace.copy("Memcpy DtoH (Device -> Pinned)", (2, 3), (13, 15), args={"bytes": 4096})
    samples = kernel_samples(run_of(trace))
    assert samples.select("op", "dtype", "cols").row(0) == ("copy", "uint8", 4096)
    assert samples.select("op", "why").row(1) == (None, "crosses the link to the host")


def test_a_generated_kernel_has_sizes_from_its_arguments_and_else_a_labelled_guess_from_its_grid() -> None:
    name = "triton_poi_fused_add_mul_0"
    told = gpu((name, 5), operator=name, args=arguments([[4, 8], [4, 8], [4, 8], []]))
    assert told.select("op", "rows", "cols", "why").row(0) == ("elementwise", 6, 8, None)
    trace = Trace()
    trace.device(name, 10, 20, args={"grid": [3, 2, 1], "block": [128, 1, 1]})
    guess = kernel_samples(run_of(trace)).row(0, named=True)
    assert (guess["rows"], guess["cols"]) == (1, 4 * 6 * 128)
    assert guess["why"].startswith("bytes and grid")


@pytest.mark.parametrize(
    ("name", "expected"), [("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"), ("My Own GPU", "My Own GPU")]
)
def test_the_gpu_is_the_data_sheet_s_or_as_the_trace_has_it(name: str, expected: str) -> None:
    trace = Trace()
    trace.device(SGEMM, 10, 20)
    run = run_of(trace)
    ranks = run.ranks.with_columns(devices=pl.Series([[0]], dtype=pl.List(pl.Int32)))
    run = replace(run, ranks=ranks, metadata={0: {"deviceProperties": [{"id": 3, "name": name}]}})
    assert kernel_samples(run)["gpu"].item() == expected


def test_a_run_without_kernels_and_operators_says_what_to_record() -> None:
    trace = Trace()
    trace.annotation("forward", 0, 5)
    with pytest.raises(InputError, match="record_shapes"):
        kernel_samples(run_of(trace))


def test_a_graph_s_ops_become_requests_without_the_run() -> None:
    trace = Trace()
    trace.step(1, 0, 300)
    trace.op("aten::mm", 0, 100, args=arguments([[4, 6], [6, 8]]))
    trace.launch(SGEMM, (10, 12), (200, 220))
    requests = with_requests(ln.build_graph(run_of(trace)).ops)
    kernel = requests.filter(pl.col("kind") == "kernel").row(0, named=True)
    assert kernel | {"op": "gemm", "dtype": "fp32", "m": 4, "n": 8, "k": 6, "why": None} == kernel
    launch = requests.filter(pl.col("kind") == "launch").row(0, named=True)
    assert launch["why"] == "no work of a kernel"


def test_samples_of_the_bundled_run_have_sizes_for_nine_tenths_of_each_step_s_operator_time() -> None:
    samples = kernel_samples(ln.load_run(ln.datasets.path("gpt-single")))
    sized = pl.col("time_us").filter(pl.col("why").is_null()).sum() / pl.col("time_us").sum()
    by_step = samples.group_by("step").agg(sized=sized)
    assert by_step["sized"].min() >= 0.88  # type: ignore[operator]
    assert samples.select(sized).item() >= 0.9
    products = samples.filter(pl.col("op") == "gemm").group_by("pass").len()
    assert dict(products.rows()) == {"fwd": 130, "bwd_grad_act": 130, "bwd_grad_w": 130}


def sized_share(samples: pl.DataFrame) -> float:
    sized = pl.col("time_us").filter(pl.col("why").is_null())
    return float(samples.select(sized.sum() / pl.col("time_us").sum()).item())


@pytest.mark.parametrize(
    ("trace", "least"),
    [
        ("kineto/tb_plugin/samples/resnet50_num_workers_0/worker0.1623143089861.pt.trace.json.gz", 0.7),
        ("hta/trace_diff/control/control.json.gz", 0.45),
        ("param/dlrm_kineto.tar.gz", 0.6),
        ("tracelens/h100/google_owlv2-large-patch14-ensemble__1016001.json.gz", 0.95),
        ("tracelens/torch_compile_triton/trace.json.gz", 0.99),
    ],
)
def test_the_time_of_a_real_run_is_all_there_and_much_of_it_has_sizes(traces: Path, trace: str, least: float) -> None:
    run = ln.load_run(traces / trace)
    samples = kernel_samples(run)
    ops = ln.build_ops(run.events).filter(pl.col("kind").is_in(["kernel", "memcpy", "memset"]))
    assert samples["time_us"].sum() == pytest.approx(ops.select(pl.col("dur_ns").sum() / 1e3).item())
    sized = samples.filter(pl.col("why").is_null())
    assert sized_share(samples) >= least
    with_work(sized.drop("family"))  # takes all of it
    assert undecoded(samples)["share"].sum() == pytest.approx(1 - sized_share(samples))


def test_what_a_sparse_tensor_adds_has_no_size() -> None:
    dims = [[546996, 64], [546996, 64], []]
    assert sizes_of("aten::add", Call(dims, [[64, 1], [], []], ["float", "float", "Scalar"]))["why"].startswith(
        "a sparse"
    )
    assert sizes_of("aten::add", Call(dims, [[64, 1], [64, 1], []], ["float", "float", "Scalar"]))["why"] is None
    assert sizes_of("aten::add", Call(dims, [], ["float", "float", "Scalar"]))["why"] is None
