"""What words of a published row mean, as data: GPUs and their usual network, frameworks, families of models, notes.

Nothing here is fitted. Patterns are read in lower case; of several that match, a later one of `FACTS` wins, and of the
other tables the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MISSING = ("", "nan", "null", "<na>", "nat", "n/a", "not stated", "unknown")
"""What says that a column has no value, besides an empty cell."""


class Platform(NamedTuple):
    """How a GPU is usually built in: fabrics inside a node and between nodes, GPUs that the inner one joins."""

    inside: str
    between: str
    gpus: int = 8


_HGX_100, _HGX_400 = "InfiniBand HDR 200", "InfiniBand NDR 400"
PLATFORMS: Mapping[str, Platform] = {
    # by the name of the GPU's sheet
    "A100-SXM-40GB": Platform("NVLink3 NVSwitch", _HGX_100),
    "A100-SXM-80GB": Platform("NVLink3 NVSwitch", _HGX_100),
    "A100-PCIe-40GB": Platform("PCIe gen 4 x16", _HGX_100),
    "A100-PCIe-80GB": Platform("PCIe gen 4 x16", _HGX_100),
    "A40": Platform("PCIe gen 4 x16", _HGX_100),
    "L40": Platform("PCIe gen 4 x16", _HGX_100),
    "L40S": Platform("PCIe gen 4 x16", _HGX_100),
    "H100-SXM-80GB": Platform("NVLink4 NVSwitch", _HGX_400),
    "H200-SXM-141GB": Platform("NVLink4 NVSwitch", _HGX_400),
    "H20": Platform("NVLink4 NVSwitch", _HGX_400),
    "H800-SXM-80GB": Platform("NVLink4 NVSwitch H800", _HGX_400),
    "H100-PCIe-80GB": Platform("PCIe gen 5 x16", _HGX_400),
    "H100-NVL": Platform("PCIe gen 5 x16", _HGX_400),
    "B200": Platform("NVLink5 NVSwitch", _HGX_400),
    "B300": Platform("NVLink5 NVSwitch", _HGX_400),
    "GB200": Platform("NVLink5 NVSwitch", _HGX_400, 72),
    "GB300": Platform("NVLink5 NVSwitch", _HGX_400, 72),
    "MI300X": Platform("Infinity Fabric MI300X", "RoCE 3200"),
    "MI325X": Platform("Infinity Fabric MI300X", "RoCE 3200"),
    "MI350X": Platform("Infinity Fabric MI350X", "RoCE 3200"),
    "MI355X": Platform("Infinity Fabric MI350X", "RoCE 3200"),
    "V100-SXM-32GB": Platform("NVLink2", "InfiniBand EDR 100"),
}

PRECISIONS = (
    # pattern, format of products, what is not in the model
    (r"fp4", "fp8", "4-bit products are priced as 8-bit ones (too slow)"),
    (r"fp8|float8|e4m3", "fp8", "all products of layers are in fp8, at one scale a tensor"),
    (r"bf16|bfloat16", "bf16", ""),
    (r"fp16|float16|half|amp", "fp16", ""),
    (r"tf32", "tf32", ""),
    (r"fp32|float32|single", "fp32", ""),
)
RECOMPUTES = (
    (r"^(none|no|off|false|0)\b", "none"),
    (r"select|core|attention|partial|sac", "selective"),
    (r"full|uniform|block|every|all|true|yes|on|1", "full"),
)
SHARDINGS = (
    # pattern, ZeRO stage, whether a shard stays inside a node
    (r"hsdp|hybrid", 3, True),
    (r"fsdp|zero[ -_]?3|full_shard", 3, False),
    (r"zero[ -_]?2|shard_grad_op", 2, False),
    (r"zero[ -_]?1|dist(ributed)?[ -_]?opt", 1, False),
    (r"ddp|zero[ -_]?0|no_shard|none|^dp$", 0, False),
    (r"zero", 1, False),
)
SCHEDULES = (
    (r"1f1b", "1f1b"), (r"interleaved|vpp", "interleaved"), (r"zb-?v|zero-?bubble-?v", "zb-v"),
    (r"zb-?[hb]|zero-?bubble", "zb-h1"), (r"gpipe|afab|all-forward", "gpipe"),
)  # fmt: skip


class Family(NamedTuple):
    """How models of a name are built."""

    pattern: str
    fields: Mapping[str, Any]


GPT = {"gated": False, "norm": "layer", "bias": True, "positions": "learned", "tied": True}
LLAMA = {"gated": True, "norm": "rms", "bias": False, "positions": "rope", "tied": False}
FAMILIES = (
    Family(r"qwen-?3", LLAMA | {"head_dim": 128}),
    Family(r"gpt-?oss", LLAMA | {"head_dim": 64, "bias": True}),
    Family(r"nemotron", LLAMA | {"gated": False, "norm": "layer"}),
    Family(r"gemma", LLAMA | {"tied": True}),
    Family(r"falcon", GPT | {"bias": False, "positions": "rope"}),
    Family(r"pythia|neox", GPT | {"positions": "rope", "tied": False}),
    Family(r"bloom", GPT | {"positions": "none"}),
    Family(r"llama|mistral|mixtral|qwen|yi-|deepseek|internlm|baichuan|olmo|smollm|granite|kimi|glm|vicuna", LLAMA),
    Family(r"gpt|mpt|opt-|megatron|turing|mt-nlg|starcoder|bert|\bt5", GPT),
)
OTHER_NAMES = {"nemotron340b": "nemotron-4-340b"} | {
    f"llama3.{minor}{size}": f"llama-3-{size}" for minor in (1, 3) for size in ("8b", "70b")
}
"""Well-known models under names that theirs do not stand in."""
VOCABULARIES = (32000, 50257, 51200, 65024, 100352, 128256, 151936, 250880, 256000)
"""Usual sizes, of which one is taken where a row gives none."""


class Framework(NamedTuple):
    """What a training framework does unless a row says otherwise.

    `pattern` is sought in "gpu | recompute | source | sharding | model | notes".
    """

    name: str
    pattern: str
    fields: Mapping[str, Any]


_SERIAL = {"overlap_grads": False, "overlap_weights": False}
_UNFLASHED = {"flash": False, "dropout": True, "zero": 0, **_SERIAL}
# a bucket has 40 million fp32 gradients, and a million for each replica if that is more
_MEGATRON = {"sequence_parallel": True, "zero": 1, "kernels": "fused", "bucket_bytes": 160_000_000}
_MEGATRON |= {"bucket_bytes_a_replica": 4_000_000}
_ENGINED = _MEGATRON | {"attention": "cuDNN"}
_TORCH = {"sequence_parallel": False, "zero": 0, "bucket_bytes": 25 << 20, "fused_grads": False, "kernels": "eager"}
_FSDP = _TORCH | {"zero": 3, "early_stop": True}
_ENGINE = r"megatron|nemo|dgxc|mlcommons|mlperf|dist-opt|distributed optimizer"
# memory of its rows says that the gathered sequence is kept
_NANOTRON = _TORCH | {"sequence_parallel": True, "regather": False, "bucket_copies": True, "logit_bytes": 14}
FRAMEWORKS = (
    # with gradients added up in fp32 and ZeRO, it has no DistributedDataParallel
    Framework("nanotron with ZeRO", r"nanotron.*\| zero", _NANOTRON | _SERIAL),
    Framework("nanotron", r"nanotron", _NANOTRON),
    # its pipelines add up gradients behind the last backward pass; it came before flash attention
    Framework(
        "Megatron-DeepSpeed",
        r"megatron-deepspeed|bigscience|vtrain",
        {"sequence_parallel": False, "kernels": "fused", **_UNFLASHED},
    ),
    # who recomputes on these GPUs wrote before flash attention, and in full before sequence parallelism too
    Framework("Megatron of 2022", rf"^[av]100[^|]*\| select.*({_ENGINE})", _MEGATRON | _UNFLASHED),
    Framework(
        "Megatron of 2021", rf"^[av]100[^|]*\| full.*({_ENGINE})", _MEGATRON | _UNFLASHED | {"sequence_parallel": False}
    ),
    Framework("NVIDIA's MLPerf code", r"mlcommons|mlperf", _ENGINED | {"launch_us": 0.0}),
    # whose recipes overlap tensor parallelism with products
    Framework("NeMo", r"^(h\d00|g?b\d00).*(nemo|dgxc|megatron-bridge)", _ENGINED | {"overlap_tp": True}),
    Framework("Megatron with Transformer Engine", rf"^(h\d00|g?b\d00).*({_ENGINE})", _ENGINED),
    Framework("Megatron", _ENGINE, _MEGATRON),
    Framework("fms-fsdp", r"fms-fsdp", _FSDP | {"grad_dtype": "bf16", "kernels": "compiled"}),
    # its attention was Triton's kernel of the first FlashAttention, its loss is fused by default
    Framework("llm-foundry", r"llm-foundry", _FSDP | {"attention": "FlashAttention-1", "logit_bytes": 6}),
    Framework("torch FSDP", r"fsdp|torchtitan|composer|zero[ -_]?3", _FSDP),
    Framework("torch", r"", _TORCH),
)

FACTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    # pattern in what a row says, fields that it settles
    (r"no (gradient bucketing/|communication )?overlap", _SERIAL),
    (r"zero( and tp)? overlap on", {"overlap_grads": True, "overlap_weights": True}),
    (r"tp (comm )?overlap (true|1|on)\b", {"overlap_tp": True}),
    (r"tp (comm )?overlap (false|0|off)\b", {"overlap_tp": False}),
    (r"pure mixed precision", {"grad_dtype": "bf16"}),
    (r"fp32 grad(ient)?s?( acc)?", {"grad_dtype": "fp32"}),
    (r"flash|sdpa", {"flash": True}),
    *((rf"flash-?(attention|attn)?[ -]?{n}\b|\bfa{n}\b", {"attention": f"FlashAttention-{n}"}) for n in (1, 2, 3)),
    (r"(no|without) flash", {"flash": False}),
    (r"sequence parallel", {"sequence_parallel": True}),
    (r"no sequence parallel|without sequence parallel", {"sequence_parallel": False}),
    (r"torch\.?compile", {"kernels": "compiled"}),
    (r"cuda ?graphs? (used|on)|with cuda ?graphs?", {"launch_us": 0.0}),
    (r"torch[. ]compile", {"kernels": "compiled"}),
    (r"cuda graphs?", {"launch_us": 0.0}),
    (r"\btied embedding", {"tied": True}),
    (r"untied|not tied", {"tied": False}),
    (r"token ?drop", {"capacity": 1.0}),
    (r"no dropout|dropout 0\b", {"dropout": False}),
)
NUMBERS = {
    # what is counted: pattern whose last group is the number
    "grad_accum": r"grad(?:ient)?_acc\w*\s*=\s*(\d+)",
    "capacity": r"capacity factor (?:of )?(\d+(?:\.\d+)?)",
    "gpus_per_node": r"nodes of (\d+)|(\d+) gpus?(?: ?/ ?| per | a )node",
}
NETWORKS = (
    # adapters of a node and Gb/s of each, or Gb/s of a node
    r"(?P<count>\d+)\s*x\s*(omni-?path|infiniband|ib|[fehnx]dr|roce|efa|ethernet|cx-?\d|connectx-?\d)\s*(?P<rate>\d+)",
    r"network (?P<rate>\d+) gb(it)?(/s|ps)?\s*(per|/|a) ?node",
)
"""How notes give the network between nodes."""
OWNERS = {"nanotron": "EFA 3200", "vtrain": "4x hdr 200"}
"""Whose runs are known to have been made on which network: a sheet, or as notes give it."""
NETWORK_SHEETS = (_HGX_100, _HGX_400)
"""Sheets that a stated rate may be one of."""
