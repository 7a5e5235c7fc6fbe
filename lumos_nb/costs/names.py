"""What the name of a kernel says: its family, number format, pass and library, as ordered tables of patterns.

The patterns are anchored to how a library spells its kernels; a kernel that no row knows is `unknown`, which is better
than a guess. The names are those of ATen, CUB, cuBLAS, CUTLASS, cuDNN, NCCL, FBGEMM, Apex, hipBLASLt, MIOpen, CK,
rocPRIM, RCCL, vLLM, AITER, Inductor, Triton and Transformer Engine, as traces from 2021 to 2026 have them.
"""

from __future__ import annotations

import polars as pl

from lumos_nb.calls import classify
from lumos_nb.errors import InputError, shown

UNKNOWN = "unknown"
HOST_COPY = "host_copy"
"""Copies over the link between host and device, whose speed is not the memory's."""

FALLBACK = "bytes and grid"
"""What prices a generated kernel without shapes: its name tells what it fuses, but not on how much; its grid hints."""

_FUSED = r"^triton_(?:poi|red|per|for|spl|mix)_fused_"
_ATEN = r"at::native::.*"
_ANY = r"(?:^|::|[ _])(?i:"  # a name, or a word of one, in any case

FAMILIES: tuple[tuple[str, str], ...] = (
    # (family, pattern in Rust's syntax); the first that matches decides. Messages, fills and copies name their payload.
    ("communication", r"(?i)^(?:void )?(?:nccl|rccl|oneccl|hccl|msccl)"),
    ("communication", r"multimem_(?:one_shot_)?all_|(?:one|two)_shot_all_reduce|cross_device_reduce_|userbuffers_"),
    ("fill", r"^Memset|^__amd_rocclr_fillBuffer|at::native::FillFunctor"),
    (HOST_COPY, r"^Memcpy (?:HtoD|DtoH|HtoH)|^CopyHostToDevice|^CopyDeviceToHost"),
    ("copy", r"^Memcpy|^CopyDeviceToDevice|^__amd_rocclr_copyBuffer"),
    # Inductor: what it fused, by the first that tells; templates are one product with an epilogue.
    ("attention", r"^triton_tem_fused_\w*flex_attention"),
    ("gemm", r"^triton_tem_fused_\w*mm"),
    ("convolution", r"^triton_tem_fused_\w*convolution"),
    ("norm", r"^triton_(?:red|per)_fused_\w*(?:(?:layer|rms|batch|group)_norm|pow\w*rsqrt|var_mean)"),
    ("cross_entropy", _FUSED + r"\w*nll_loss"),
    ("softmax", _FUSED + r"\w*softmax"),
    ("embedding_lookup", _FUSED + r"(?:add_)?embedding"),
    ("concat", r"^triton_poi_fused_cat_\d+$"),
    ("elementwise", r"^triton_(?:poi|for)_fused_"),
    ("reduction", r"^triton_(?:red|per|spl|mix)_fused_"),
    # Embedding tables and what moves between them
    ("embedding_lookup", r"(?:split|dense|ssd)_embedding_\w*codegen|EmbeddingBag_|embedding_bag"),
    ("embedding_lookup", r"bounds_check_indices|linearize_(?:index|cache_indices)|lxu_cache"),
    ("embedding_lookup", _ATEN + r"(?:embedding_backward|compute_grad_weight|sum_and_scatter|partials?_(?:per_)?segm)"),
    ("interaction", _ANY + r"(?:dot_?based_?|dot_)interact(?:ion)?)"),
    ("index", r"fbgemm_gpu::\w*(?:permute|offsets_range|bucketize|jagged|index_select)|permute_pooled_embs"),
    ("cast", r"fbgemm_gpu::.*(?:FP8|Fused8Bit|BFloat16|HBFP)\w*(?:quantize|qparam|rowwise|_to_)"),
    ("concat", r"\brecat_(?:copy_async|embedding_grad)"),
    # Attention
    ("attention", r"\bflash_(?:fwd|bwd)|\bflash::|FlashAttn(?:Fwd|Bwd)|(?i:fmha|cudnn\w*_sdpa|cudnn.*flash_[fb]prop)"),
    ("attention", r"^attn_(?:fwd|bwd)|^bwd_kernel_(?:dk_dv|dq|fuse)|^bwd_preprocess"),  # AOTriton
    ("attention", r"Attention(?:Backward)?Kernel|paged_attention|unified_attention|Batch(?:Prefill|Decode)With"),
    # Convolution, made of products and of changes of layout
    ("index", r"\bcask\w*::compute\w*Offsets"),
    ("transpose", r"(?i)(?:nchw|cnhw|nhwc)_?(?:to|2)_?(?:nhwc|nchw|cnhw)"),
    ("convolution", r"implicit_gemm|ImplicitGemmConv|(?:im|ex)plicit_convolve|[_\d](?:fprop|dgrad|wgrad)_"),
    ("convolution", r"(?:dgrad|wgrad)(?:2d|_alg\d|_engine)|[sh]cudnn_|cudnn::cnn::|winograd|fft[12]d_[rc]2[rc]"),
    ("convolution", r"conv_depthwise|im2col|col2im|flip_filter|^igemm_(?:fwd|bwd|wrw)_|(?i:^miopen\w*conv)"),
    ("convolution", r"(?i:^gcnAsmConv|^naive_conv)"),
    ("convolution", r"^Im2d2Col|^Col2Im2d|kernel_grouped_conv|kernel_batched_gemm_xdlops_bwd_weight"),
    # Matrix products
    ("gemm", r"^Cijk_|^nvjet_|cublasLt?::|gemvx::kernel|gemv(?:2[NT]|NSP)|gemmk1_kernel|gemmSN_|splitKreduce_kernel"),
    ("gemm", r"(?:sm\d+_xmma|ampere|volta|turing|maxwell|hopper|magma|cutlass)\w*_?.*gemm|^void [sdhc]gemm_\w+<"),
    ("gemm", r"epilogue::impl::globalKernel|^void (?:dot|reduce_1Block|scal)_kernel<.*cublas"),
    ("gemm", r"\bck(?:_tile)?::.*[gG]emm|^_ZN\d+(?:ck|ck_tile|aiter)\d.*[gG]emm|deep_gemm::|^rocblas_gem[mv]"),
    ("gemm", r"^bmm_(?:Bfloat16|Mx|E4m3|Fp16)\w*|^_(?:p_)?matmul_ogs_|^(?:fused_moe|matmul|grouped_gemm)_kernel"),
    # Normalisation, losses, activations
    ("norm", _ANY + r"\w*(?:layer|rms|batch|group|instance)_?norm)|Rmsnorm|Layernorm|MIOpenBatchNorm|\bbn_(?:fw|bw)_"),
    ("norm", _ATEN + r"(?:Norm(?:Forward|Backward)|GammaBeta|RowwiseMoments|Compute(?:Internal|Fused))"),
    ("norm", r"\bln_(?:fwd|bwd)_"),
    ("cross_entropy", _ANY + r"\w*(?:nll_?loss|cross_?entropy|ClassNLLCriterion|xentropy))"),
    ("softmax", _ANY + r"\w*soft_?max)"),
    ("dropout", _ANY + r"\w*dropout)|masked_scale_kernel"),
    ("rope", _ANY + r"\w*rotary_(?:emb|pos|kernel)|(?:\w*_)?rope_(?:fwd|bwd|forward|backward|kernel))"),
    ("gated_activation", _ANY + r"\w*(?:(?:act|silu|gelu)_and_mul|swiglu|geglu))|act_and_mul_kernel"),
    ("optimizer", r"multi_tensor_apply_kernel|lpnorm_cleanup|(?i:fused_?(?:adam|sgd|lamb)\w*_kernel|\badamw?_kernel)"),
    # Movement of data
    ("concat", r"CatArrayBatchedCopy|^concat_kernel"),
    ("cast", r"transformer_engine::.*cast"),
    ("transpose", r"transformer_engine::.*transpose|^batched_transpose_\d|^transpose_\w+_WG|cublasTransposeParams"),
    ("index", _ATEN + r"(?:index(?:Select|Func|_elementwise|_put|ing_backward)|indexing_backward|tri[lu]_indices)"),
    ("index", r"indexing_backward_kernel|vectorized_gather_kernel|_scatter_gather_|searchsorted_cuda|flatten_kernel<"),
    ("index", r"moe::dev::|^_combined_routing_|^_finalize_matmul_scatter|store_kvcache<|reshape_and_cache"),
    ("sort", r"\bcub::Device(?:Radix|Merge|Segmented\w*Sort|Scan|Select|Compact|ReduceByKey|Partition|Histogram)"),
    ("sort", r"\brocprim::.*(?:sort|scan|partition|select|merge|unique)"),
    ("sort", _ATEN + r"(?:bitonicSort|radixSort|gatherTopK)"),
    ("pooling", r"(?:max|avg|average)_pool(?:2d|_)?|adaptive_average_pool|upsample_(?:nearest|bilinear|bicubic)"),
    ("reduction", r"at::native::reduce_kernel|\bcub::Device(?:Segmented)?Reduce|\brocprim::.*reduce"),
    ("random", r"distribution_elementwise_grid_stride|distribution_nullary"),
    # Elementwise kernels by what they apply
    ("cast", r"elementwise.*b?float\w*_copy_kernel|elementwise.*direct_copy_kernel.*(?:Load|Store)WithCast"),
    ("copy", r"elementwise.*direct_copy_kernel"),
    ("elementwise", _ATEN + r"(?:elementwise|triu_tril|amp_update)|^jiterated_|^(?:SubTensorOp|Op\d?dTensor|OpTensor)"),
    ("elementwise", r"cudnn::ops::|\brocprim::.*transform_kernel"),
    ("convolution", r"cutlass_cudnn\w*::reduction::kernel::ReduceSplitK"),
    ("elementwise", r"elementwise_kernel_with_index<\w+, at::native::"),
    ("sleep", r"at::cuda::.*spin_kernel"),
)
"""Kernels by name. `optimizer` also holds the other kernels over lists of tensors (`_foreach_*`, clipping)."""

LIBRARIES: tuple[tuple[str, str], ...] = (
    ("inductor", r"^triton_[a-z]{3}_fused_"),
    ("triton", r"_(?:\d+(?:de|dc|d|c)){3,}$"),
    ("transformer engine", r"\btransformer_engine::"),
)
"""Who generated a kernel whose work the name alone does not tell: these are labelled with the fallback."""

DTYPES: tuple[tuple[str, str], ...] = (
    ("fp8", r"(?i)e4m3|e5m2|fp8|^Cijk_\w{4}_\w{4}_[FB]8"),
    ("bf16", r"(?i)bf16|bfloat16|DF16b|^nvjet_t|^Cijk_\w{4}_\w{4}_B"),
    ("fp16", r"OpaqueType<2|c10::Half|__half|[^b]f16|fp16|Fp16|hgemm|hcudnn|_h\d+gemm|^nvjet_h|^Cijk_\w{4}_\w{4}_H"),
    ("tf32", r"tf32|tensorop_s\d+gemm_\d"),
    ("fp64", r"\bdouble\b|dgemm|^Cijk_\w{4}_\w{4}_D"),
    ("fp32", r"OpaqueType<4|\bfloat\b|sgemm|scudnn|_f?p?f32|^nvjet_s|^Cijk_\w{4}_\w{4}_S"),
)
"""Number format of what a kernel reads; null where the name does not tell. Opaque elements of 2 bytes count as fp16."""

_PASSES: tuple[tuple[str, str], ...] = (
    ("bwd", r"(?i)backward|bwd|bprop|_grad(?:_|\b)|dgrad|wgrad|wrw|GammaBeta|updateGradInput|\bbn_bw_"),
    ("fwd", r"(?i)forward|fwd|fprop|updateOutput|\bbn_fw_"),
)
_GRADIENTS: tuple[tuple[str, str], ...] = (
    ("bwd_grad_w", r"(?i)wgrad|_wrw_|bwd_weight"),
    ("bwd_grad_act", r"(?i)dgrad|igemm_bwd_|bwd_data"),
)


def kernel_families(names: pl.Series) -> pl.DataFrame:
    """What the names of kernels tell, one row a distinct name.

    Parameters
    ----------
    names
        Names of device kernels, copies and fills, as a trace has them; null is left out.

    Returns
    -------
    frame
        `name`, `family` (one of `FAMILIES`, or "unknown"), `dtype` (null if the name does not tell), `pass` ("fwd",
        "bwd", "bwd_grad_w", "bwd_grad_act", or "any"), `fallback` ("bytes and grid" for generated kernels, else null).

    Raises
    ------
    InputError
        `names` is no column of strings.

    Examples
    --------
    >>> kernel_families(pl.Series(["volta_sgemm_128x64_nt"])).row(0)
    ('volta_sgemm_128x64_nt', 'gemm', 'fp32', 'any', None)
    """
    if getattr(names, "dtype", None) not in (pl.String, pl.Null):
        raise InputError(f"names of kernels are a polars Series of strings; this is {shown(names)}.")
    name = pl.col("name")
    told = names.cast(pl.String).drop_nulls().unique(maintain_order=True).to_frame("name")
    told = told.with_columns(family=classify(name, FAMILIES).fill_null(UNKNOWN), dtype=classify(name, DTYPES))
    products = pl.col("family").is_in(["gemm", "convolution"])
    gradient = pl.when(products).then(classify(name, _GRADIENTS))
    return told.with_columns(
        pl.coalesce(gradient, classify(name, _PASSES), pl.lit("any")).alias("pass"),
        fallback=pl.when(classify(name, LIBRARIES).is_not_null()).then(pl.lit(FALLBACK)),
    )
