"""The collectives of a work table against those that real torch modules issue, one by one and in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megatron_modules as megatron
import msgspec
import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lumos_nb.fake_group import dry_run
from lumos_nb.layout import Parallelism, Training, check
from lumos_nb.transformer import Mla, Moe, Transformer
from lumos_nb.workloads.llm.stages import work

GPT = Transformer(
    layers=2,
    hidden=256,
    heads=16,
    ffn=512,
    vocab=2048,
    gated=False,
    norm="layer",
    bias=True,
    positions="learned",
    max_seq=128,
)
LLAMA = Transformer(layers=2, hidden=256, heads=16, kv_heads=8, head_dim=32, ffn=512, vocab=2048)
MIXTRAL = Transformer(layers=2, hidden=256, heads=16, ffn=512, vocab=2048, moe=Moe(experts=8, topk=2, ffn=128))
DEEPSEEK = Transformer(
    layers=2,
    hidden=256,
    heads=16,
    ffn=512,
    vocab=2048,
    moe=Moe(experts=8, topk=2, ffn=128, shared=2, first=1),
    mla=Mla(kv_rank=64, q_rank=96, rope=16, nope=32, v=32),
)
MODELS = {"gpt": GPT, "llama": LLAMA, "mixtral": MIXTRAL, "deepseek": DEEPSEEK}
TRAIN = Training(micro_batch=2, global_batch=1024, seq=128, dtype="fp32", grad_dtype="fp32")


def shape_of(model: Transformer, train: Training, layers: range) -> megatron.Shape:
    """The sizes in the words of the torch modules."""
    moe, mla = model.moe, model.mla
    return megatron.Shape(
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.keys,
        head_dim=mla.nope if mla else model.head,
        ffn=model.ffn,
        vocab=model.vocab,
        layers=tuple(model.has_experts(layer) for layer in layers),
        seq=train.seq,
        batch=train.micro_batch,
        llama=model.gated,
        experts=moe.experts if moe else 0,
        top_k=moe.topk if moe else 0,
        expert_ffn=moe.ffn if moe else 0,
        shared_ffn=moe.shared * moe.ffn if moe else 0,
        q_rank=(mla.q_rank or 0) if mla else 0,
        kv_rank=mla.kv_rank if mla else 0,
        rope_dim=mla.rope if mla else 0,
        counts=not train.capacity,
    )


def groups_of(layout: Parallelism, rank: int) -> dict[str, Any]:
    """Process groups of a rank by the layout's names; those of one rank alone are left out."""
    mine = {
        name: next(ranks for ranks in layout.groups(name).tolist() if rank in ranks)
        for name in ("tp", "cp", "dp_cp", "ep", "etp", "edp", "shard", "replica")
    }
    return {name: dist.new_group(ranks) for name, ranks in mine.items() if len(ranks) > 1}


PHASE = pl.when(~pl.col("collective").is_in(["send", "recv"])).then("phase")
"""Phase of a collective; torch code between modules, where stages send and receive, does not say which it is in."""
Wrap = Callable[[nn.Module, megatron.Split], nn.Module]


def issued(
    model: Transformer,
    layout: Parallelism,
    train: Training,
    rank: int,
    wrap: Wrap | None,
    warmup: int,
    finish: Callable[[], None] | None,
) -> pl.DataFrame:
    """What the torch modules issue for one micro-batch."""
    stage = rank // (layout.tp * layout.cp * layout.dp)
    per_stage = model.layers // layout.pp
    shape = shape_of(model, train, range(stage * per_stage, (stage + 1) * per_stage))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[train.dtype]

    def setup() -> Callable[[], None]:
        split = megatron.Split(
            groups_of(layout, rank),
            layout.sequence_parallel,
            layout.cp_mode,
            train.recompute,
            train.regather,
            stage == 0,
            stage == layout.pp - 1,
        )
        module: nn.Module = megatron.Stage(shape, split)
        module = wrap(module, split) if wrap else module.to(dtype)
        apart = layout.tp * layout.cp * layout.dp

        def step() -> None:
            megatron.micro_batch(module, shape, split, dtype, rank - apart, rank + apart)
            if finish:
                finish()

        for _ in range(warmup):
            step()
        return step

    return dry_run(lambda step: step(), layout.world, rank, setup=setup, fake=False).collectives


def assert_same_collectives(
    model: Transformer,
    layout: Parallelism,
    train: Training = TRAIN,
    rank: int = 0,
    wrap: Wrap | None = None,
    warmup: int = 0,
    finish: Callable[[], None] | None = None,
) -> None:
    """Assert that table and modules have the same collectives: phase, kind, ranks, bytes and peer, in order.

    Where `wrap` spreads no gradients, those of the table are left out; so is the step's end without `finish`.
    """
    check(model, layout, train)
    stage = rank // (layout.tp * layout.cp * layout.dp)
    table = work(model, layout, train, stage).filter(
        pl.col("kind") == "comm", pl.col("when").ne("step") | (finish is not None)
    )
    table = table if wrap else table.filter(pl.col("part") != "gradients")
    members = {
        name: next(ranks for ranks in layout.groups(name).tolist() if rank in ranks) for name in table["group"].unique()
    }
    apart = layout.tp * layout.cp * layout.dp
    peers = [
        None if peer is None else rank + peer * apart if name == "pp" else ring(members[name], rank, peer)
        for name, peer in table.select("group", "peer").rows()
    ]
    ranks = [[*range(layout.world)] if name == "pp" else members[name] for name in table["group"]]
    issued_in = pl.col("phase").replace("backward_weight", "backward")
    table = table.with_columns(phase=pl.when(pl.col("when") == "step").then(pl.lit("forward")).otherwise(issued_in))
    columns = table.select(PHASE, "collective", "size_bytes")
    expected = [(*row, group, peer) for row, group, peer in zip(columns.rows(), ranks, peers, strict=True)]
    assert expected
    got = issued(model, layout, train, rank, wrap, warmup, finish)
    assert got.select(PHASE, "collective", "comm_bytes", "group_ranks", "peer").rows() == expected


def ring(ranks: list[int], rank: int, peer: int) -> int:
    return ranks[(ranks.index(rank) + peer) % len(ranks)]


@pytest.mark.parametrize(
    ("model", "sequence_parallel", "recompute"),
    [
        ("gpt", False, "none"),
        ("gpt", True, "full"),
        ("gpt", True, "selective"),
        ("llama", True, "none"),
        ("llama", False, "full"),
        ("deepseek", True, "full"),
    ],
)
def test_tensor_parallel_layers_exchange_what_torch_does(model: str, sequence_parallel: bool, recompute: str) -> None:
    layout = Parallelism(tp=8, sequence_parallel=sequence_parallel)
    assert_same_collectives(MODELS[model], layout, msgspec.structs.replace(TRAIN, recompute=recompute), rank=3)


def test_a_sequence_that_is_kept_whole_is_gathered_once() -> None:
    kept = msgspec.structs.replace(TRAIN, regather=False)
    assert_same_collectives(GPT, Parallelism(tp=8, sequence_parallel=True), kept)


def fully_sharded(module: nn.Module, split: megatron.Split) -> nn.Module:
    """FSDP2 in the usual way: a layer at a time, weights travel as bf16 and gradients as fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = DeviceMesh.from_group(split.groups["shard"], "cpu")
    if "replica" in split.groups:
        ranks = [dist.get_process_group_ranks(split.groups[name]) for name in ("replica", "shard")]
        both = torch.tensor([[rank + other - ranks[1][0] for rank in ranks[1]] for other in ranks[0]])
        groups = [split.groups["replica"], split.groups["shard"]]
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=both, mesh_dim_names=("replica", "shard"))
    for layer in module.layers:
        if "edp" in split.groups and isinstance(layer.mlp, megatron.Moe):
            fully_shard(layer.mlp.experts, mesh=DeviceMesh.from_group(split.groups["edp"], "cpu"), mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(module, mesh=mesh, mp_policy=policy)


FSDP = {
    "gpt over 64 ranks": (GPT, Parallelism(dp=64, zero=3)),
    "gpt with replicas of shards": (GPT, Parallelism(dp=16, zero=3, shard=4)),
    "llama with tp and sp": (LLAMA, Parallelism(dp=8, tp=8, sequence_parallel=True, zero=3)),
    "llama with cp": (LLAMA, Parallelism(dp=4, cp=4, zero=3)),
    "gpt with pp, last stage": (GPT, Parallelism(dp=4, pp=3, zero=3)),
    "mixtral with ep": (MIXTRAL, Parallelism(dp=8, ep=4, zero=3)),
    "deepseek with tp, sp, cp and ep over 64 ranks": (
        DEEPSEEK,
        Parallelism(dp=8, tp=4, sequence_parallel=True, cp=2, cp_mode="all_gather", ep=4, etp=2, zero=3),
    ),
}


@pytest.mark.parametrize(("model", "layout"), FSDP.values(), ids=FSDP)
def test_fully_sharded_layers_are_gathered_and_scattered_as_torch_does(model: Transformer, layout: Parallelism) -> None:
    train, deeper = msgspec.structs.replace(TRAIN, dtype="bf16"), msgspec.structs.replace(model, layers=3)
    assert_same_collectives(deeper, layout, train, rank=layout.world - 1, wrap=fully_sharded)


@pytest.mark.parametrize(
    ("model", "layout", "bucket_bytes"),
    [
        ("gpt", Parallelism(dp=64), 2**20),
        ("llama", Parallelism(dp=2, cp=2), 2**21),
        ("gpt", Parallelism(dp=4, tp=4, sequence_parallel=True), 2**17),
    ],
    ids=["gpt in small buckets", "llama in larger ones with cp", "gpt with tp and sp"],
)
def test_replicated_gradients_are_added_up_in_the_buckets_of_ddp(
    model: str, layout: Parallelism, bucket_bytes: int
) -> None:
    def ddp(module: nn.Module, split: megatron.Split) -> nn.Module:
        return DistributedDataParallel(module, process_group=split.groups["dp_cp"], bucket_cap_mb=bucket_bytes / 2**20)

    train = msgspec.structs.replace(TRAIN, bucket_bytes=bucket_bytes)
    assert_same_collectives(MODELS[model], layout, train, rank=3, wrap=ddp, warmup=2)


@pytest.mark.parametrize("rank", [3, 11, 19], ids=["first stage", "second stage", "last stage"])
def test_stages_pass_on_what_torch_does(rank: int) -> None:
    assert_same_collectives(msgspec.structs.replace(GPT, layers=3), Parallelism(pp=3, tp=4, dp=2), rank=rank)


def test_with_sequence_parallelism_stages_pass_on_a_part_of_the_sequence() -> None:
    assert_same_collectives(LLAMA, Parallelism(pp=2, tp=4, dp=2, sequence_parallel=True), rank=11)


@pytest.mark.parametrize(
    ("model", "mode", "recompute"),
    [
        ("gpt", "ring", "none"),
        ("llama", "ring", "selective"),
        ("llama", "all_gather", "none"),
        ("gpt", "all_gather", "full"),
    ],
)
def test_context_parallel_attention_exchanges_what_torch_does(model: str, mode: str, recompute: str) -> None:
    layout = Parallelism(cp=4, tp=2, sequence_parallel=True, cp_mode=mode)
    assert_same_collectives(MODELS[model], layout, msgspec.structs.replace(TRAIN, recompute=recompute), rank=5)


EXPERTS = {
    "mixtral, ep": (MIXTRAL, Parallelism(dp=8, ep=8)),
    "deepseek, ep of half the replicas": (DEEPSEEK, Parallelism(dp=16, ep=4)),
    "mixtral, experts cut by tp": (MIXTRAL, Parallelism(tp=4, sequence_parallel=True, dp=4, ep=4)),
    "deepseek, whole experts under tp": (DEEPSEEK, Parallelism(tp=4, sequence_parallel=True, dp=16, ep=8, etp=1)),
    "mixtral, tp without sp": (MIXTRAL, Parallelism(tp=2, dp=4, ep=4)),
    "deepseek, with pp": (DEEPSEEK, Parallelism(dp=4, ep=4, pp=2)),
}


@pytest.mark.parametrize(("model", "layout"), EXPERTS.values(), ids=EXPERTS)
def test_experts_get_and_give_back_tokens_as_in_torch(model: Transformer, layout: Parallelism) -> None:
    assert_same_collectives(model, layout, rank=layout.world - 1)


def test_experts_with_a_capacity_need_no_counts() -> None:
    assert_same_collectives(MIXTRAL, Parallelism(dp=8, ep=8), msgspec.structs.replace(TRAIN, capacity=1.0))


def test_experts_that_are_recomputed_are_gathered_once_for_both() -> None:
    train = msgspec.structs.replace(TRAIN, dtype="bf16", recompute="full")
    assert_same_collectives(MIXTRAL, Parallelism(dp=8, ep=4, zero=3), train, wrap=fully_sharded)


REPLICAS = {
    "gpt": (GPT, Parallelism(dp=8, zero=1)),
    "gpt with tp, sp and pp": (GPT, Parallelism(dp=4, tp=4, pp=2, sequence_parallel=True, zero=1)),
    "llama with tp, sp and cp": (LLAMA, Parallelism(dp=2, tp=2, cp=2, sequence_parallel=True, zero=1)),
    "mixtral with ep": (MIXTRAL, Parallelism(dp=8, ep=4)),
    "deepseek with ep, tp and sp": (DEEPSEEK, Parallelism(dp=8, tp=2, ep=4, sequence_parallel=True, zero=1)),
}


@pytest.mark.parametrize(("model", "layout"), REPLICAS.values(), ids=REPLICAS)
def test_buckets_and_what_ends_a_step_are_those_of_torch(model: Transformer, layout: Parallelism) -> None:
    train, made = msgspec.structs.replace(TRAIN, bucket_bytes=2**19), []

    def replicas(module: nn.Module, split: megatron.Split) -> nn.Module:
        made.append(megatron.Replicas(module, split, train.bucket_bytes, layout.zero > 0))
        return module

    assert_same_collectives(model, layout, train, rank=layout.world - 1, wrap=replicas, finish=lambda: made[0].finish())
