"""Which family, format and pass the name of a kernel tells."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import lumos_nb as ln
from benchmarks.kernel_names import TRAINING
from lumos_nb.costs.names import FALLBACK, FAMILIES, HOST_COPY, UNKNOWN, kernel_families
from lumos_nb.errors import InputError

ATEN = "void at::native::"

NAMED = [
    # (name as a library spells it, family, format, pass)
    ("volta_sgemm_128x64_nt", "gemm", "fp32", "any"),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn", "gemm", "bf16", "any"),
    ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nt_align4>(P)", "gemm", "tf32", "any"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "gemm", "bf16", "any"),
    ("nvjet_tst_64x16_64x16_2x4_2cta_h_bz_bias_TNT", "gemm", "bf16", "any"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, __half, float>(P)", "gemm", "fp16", "any"),
    ("Cijk_Ailk_Bjlk_SB_Bias_AS_SAV_UserArgs_MT64x16x16", "gemm", "fp32", "any"),
    ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64", "gemm", "bf16", "any"),
    ("Cijk_Alik_Bljk_HHS_BH_MT128x128x32", "gemm", "fp16", "any"),
    ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::T<64, cutlass::bfloat16_t>>(P)", "attention", "bf16", "fwd"),
    ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T<128, cutlass::half_t>>(P)", "attention", None, "bwd"),
    ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(AttentionKernel::Params)", "attention", "bf16", "any"),
    ("attn_fwd", "attention", None, "fwd"),
    ("bwd_kernel_dk_dv", "attention", None, "bwd"),
    ("void cudnn::cnn::wgrad_alg0_engine<float, 128, 5>(int)", "convolution", "fp32", "bwd_grad_w"),
    ("void cudnn::detail::dgrad_engine<float, 512>(int)", "convolution", "fp32", "bwd_grad_act"),
    ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_cudnn", "convolution", "tf32", "fwd"),
    ("cudnn_infer_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1", "convolution", "fp32", "any"),
    ("igemm_wrw_gtcx2_nhwc_bf16_bx0_ex1_bt256x128x16", "convolution", "bf16", "bwd_grad_w"),
    (ATEN + "(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>(int)", "norm", "fp16", "any"),
    (ATEN + "(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long)", "norm", "fp32", "bwd"),
    ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(P)", "norm", "bf16", "any"),
    ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(T)", "norm", "fp32", "fwd"),
    ("void (anonymous namespace)::softmax_warp_backward<float, float, float, 10>(P)", "softmax", "fp32", "bwd"),
    (ATEN + "nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(P)", "cross_entropy", "fp32", "fwd"),
    (ATEN + "(anonymous namespace)::fused_dropout_kernel_vec<float, float>(P)", "dropout", "fp32", "any"),
    (ATEN + "vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", "elementwise", "fp32", "any"),
    (ATEN + "vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)", "fill", None, "any"),
    (ATEN + "elementwise_kernel<4, gpu_kernel_impl_nocast<direct_copy_kernel_cuda(float)>>()", "copy", "fp32", "any"),
    (ATEN + "vectorized_elementwise_kernel<4, bfloat16_copy_kernel_cuda(float)>(int)", "cast", "bf16", "any"),
    (ATEN + "(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2>(P)", "concat", "fp32", "any"),
    (ATEN + "(anonymous namespace)::indexSelectLargeIndex<float, long>(P)", "index", "fp32", "any"),
    (ATEN + "reduce_kernel<512, 1, at::native::ReduceOp<float, NormTwoOps<float>>>(R)", "reduction", "fp32", "any"),
    ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(long)", "optimizer", "fp32", "any"),
    ("void split_embedding_backward_codegen_adagrad_kernel<c10::Half>(P)", "embedding_lookup", "fp16", "bwd"),
    ("void split_embedding_codegen_forward_unweighted_kernel<float, float>(P)", "embedding_lookup", "fp32", "fwd"),
    ("void dot_based_interact_kernel<float>(P)", "interaction", "fp32", "any"),
    ("void cub::DeviceRadixSortOnesweepKernel<long>(P)", "sort", None, "any"),
    ("void rocprim::detail::lookback_scan_kernel<int>(P)", "sort", None, "any"),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(P)", "rope", "bf16", "any"),
    ("void vllm::act_and_mul_kernel<c10::BFloat16>(P)", "gated_activation", "bf16", "any"),
    ("batched_transpose_16x32_half", "transpose", None, "any"),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", "communication", "fp32", "any"),
    ("Memcpy DtoD (Device -> Device)", "copy", None, "any"),
    ("Memcpy HtoD (Pinned -> Device)", HOST_COPY, None, "any"),
    ("Memset (Device)", "fill", None, "any"),
]


@pytest.mark.parametrize(("name", "family", "dtype", "direction"), NAMED, ids=[row[0][:60] for row in NAMED])
def test_a_library_s_name_tells(name: str, family: str, dtype: str | None, direction: str) -> None:
    assert kernel_families(pl.Series([name])).row(0) == (name, family, dtype, direction, None)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("triton_poi_fused_add_cos_sin_0", "elementwise"),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_0", "norm"),
        ("triton_per_fused__softmax_3", "softmax"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_cat_transpose_view_10", "elementwise"),
        ("triton_tem_fused_addmm_2", "gemm"),
        ("_my_triton_kernel_0d1d2d3de", UNKNOWN),
        ("void transformer_engine::scaled_thing_kernel<float>(P)", UNKNOWN),
        ("void transformer_engine::normalization::rmsnorm_fwd_general_kernel<float>(P)", "norm"),
    ],
)
def test_a_generated_kernel_is_labelled_as_one_whose_sizes_its_name_cannot_tell(name: str, family: str) -> None:
    found = kernel_families(pl.Series([name])).row(0, named=True)
    assert (found["family"], found["fallback"]) == (family, FALLBACK)


MADE_UP = [
    "regroup_and_sorting_hat",
    "my_secret_kernel",
    "void foo::Bar<float, 4>::operator()(float*)",
    "void acme::physics::advance_particles<double>(double*, int)",
    "step_kernel(float*, int)",
    "copy_that",
    "performance_counter_kernel",
    "scattering_amplitude<float>",
    "abnormal_detector",
    "_ZN4acme8simulateEPfi",
    "reducer",
    "conversion_rate_kernel",
    "attentive_reader",
    "indexed_by_nobody",
    "europe_kernel",
    "triton_bay_water_level",
    "fused_kernel",
    "Kernel",
    "",
]


@pytest.mark.parametrize("name", MADE_UP)
def test_a_made_up_name_is_unknown(name: str) -> None:
    found = kernel_families(pl.Series([name])).row(0, named=True)
    assert (found["family"], found["fallback"]) == (UNKNOWN, None)


def test_random_words_are_unknown() -> None:
    words = ["solve", "step", "update", "force", "mesh", "flux", "grid", "cell", "track", "photon", "apply", "kernel"]
    names = [f"{a}_{b}_{c}" for a in words for b in words for c in words]
    assert set(kernel_families(pl.Series(names))["family"]) == {UNKNOWN}


def test_each_distinct_name_is_one_row_in_order_of_appearance() -> None:
    found = kernel_families(pl.Series(["b", "Memset (Device)", None, "b"]))
    assert found["name"].to_list() == ["b", "Memset (Device)"]


def test_no_names_give_an_empty_table_of_the_same_columns() -> None:
    assert kernel_families(pl.Series([], dtype=pl.String)).columns == kernel_families(pl.Series(["a"])).columns


def test_numbers_are_no_names() -> None:
    with pytest.raises(InputError, match="Series of strings"):
        kernel_families(pl.Series([1, 2]))


def test_every_family_is_one_word_in_lower_case() -> None:
    assert all(family.isidentifier() and family.islower() for family, _ in FAMILIES)


@pytest.mark.parametrize("trace", TRAINING)
def test_almost_all_kernel_time_of_a_real_training_run_has_a_family(traces: Path, trace: str) -> None:
    events = ln.load_run(traces / trace).events
    device = events.filter(pl.col("category").is_in(["kernel", "gpu_memcpy", "gpu_memset"]))
    found = device.join(kernel_families(device["name"]), on="name")
    known = pl.col("dur_ns").filter(pl.col("family") != UNKNOWN).sum() / pl.col("dur_ns").sum()
    assert found.select(known).item() >= 0.995  # the rules were written with these names in view
