"""`dry_run`: the collectives of real torch code, against counts and bytes worked out by hand."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import polars as pl
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import gpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lumos_nb.errors import CaptureError
from lumos_nb.fake_group import DryRun, dry_run

BIG = gpt.GptConfig(layers=12, hidden=1024, heads=64, vocab=50304, seq=1024, batch=2)
SMALL = gpt.GptConfig(layers=2, hidden=64, heads=64, vocab=128, seq=16, batch=2)
FP32 = 4


def block_parameters(config: gpt.GptConfig) -> int:
    """Parameters of one layer: four square projections, an MLP four times as wide, two LayerNorms."""
    return 4 * config.hidden**2 + 8 * config.hidden**2 + 4 * config.hidden


def outer_parameters(config: gpt.GptConfig) -> int:
    """Parameters outside the layers: two embeddings, the last LayerNorm, the head."""
    return (2 * config.vocab + config.seq + 2) * config.hidden


def activation_bytes(config: gpt.GptConfig) -> int:
    return config.batch * config.seq * config.hidden * FP32


def shard(model: gpt.Gpt, **kwargs: object) -> gpt.Gpt:
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return model


def fsdp(config: gpt.GptConfig) -> gpt.Step:
    return gpt.plain_step(shard(gpt.make_model(config, "cpu")), config, "cpu")


def fsdp_and_tp(config: gpt.GptConfig) -> gpt.Step:
    mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
    model = shard(gpt.parallelize(gpt.make_model(config, "cpu"), mesh["tp"]), mesh=mesh["dp"])
    return gpt.plain_step(model, config, "cpu")


def warm(setup: Callable[[gpt.GptConfig], gpt.Step], config: gpt.GptConfig, steps: int) -> gpt.Step:
    step = setup(config)
    for _ in range(steps):
        step()
    return step


def run(
    setup: Callable[[gpt.GptConfig], gpt.Step],
    config: gpt.GptConfig,
    *,
    world_size: int = 64,
    rank: int = 3,
    fake: bool = True,
    warmup: int = 0,
) -> DryRun:
    def one(step: gpt.Step) -> None:
        step()

    return dry_run(one, world_size, rank, setup=lambda: warm(setup, config, warmup), fake=fake)


def calls(result: DryRun) -> list[tuple[str, str, int]]:
    return result.collectives.select("phase", "collective", "comm_bytes").rows()


def test_fsdp_gathers_each_layer_twice_and_scatters_it_once() -> None:
    layer, outer = block_parameters(BIG) * FP32, outer_parameters(BIG) * FP32
    forward = [("forward", "all_gather", size) for size in (outer, *[layer] * 12)]
    # The root keeps its parameters between forward and backward; each layer is gathered ahead of the one before it.
    gathers = [("backward", "all_gather", layer)] * 12
    scatters = [("backward", "reduce_scatter", layer)] * 12 + [("backward", "reduce_scatter", outer)]
    result = run(fsdp, BIG)
    got = calls(result)
    assert got[:13] == forward
    assert [call for call in got[13:] if call[1] == "all_gather"] == gathers
    assert [call for call in got[13:] if call[1] == "reduce_scatter"] == scatters
    assert len(got) == 13 + 12 + 13
    # Every gather of the backward pass but the first two is issued before the scatter of the layer after it.
    assert [call[1] for call in got[13:17]] == ["all_gather", "all_gather", "reduce_scatter", "all_gather"]
    assert result.collectives["group_ranks"].to_list() == [list(range(64))] * 38


def test_tensor_parallel_reduces_twice_a_layer_each_way() -> None:
    size = activation_bytes(BIG)
    expected = [("forward", "all_reduce", size)] * 24 + [("backward", "all_reduce", size)] * 24
    assert calls(run(gpt.tensor_parallel, BIG)) == expected


def test_two_dimensions_use_the_groups_of_their_own() -> None:
    config = replace(SMALL, hidden=128)
    result = run(fsdp_and_tp, config, rank=11)
    layer = (12 * config.hidden**2 // 8 + 4 * config.hidden) * FP32  # a tensor rank's eighth, LayerNorms whole
    size = activation_bytes(config)
    expected = {
        ("forward", "all_gather", outer_parameters(config) * FP32): 1,
        ("forward", "all_gather", layer): 2,
        ("forward", "all_reduce", size): 4,
        ("backward", "all_gather", layer): 2,
        ("backward", "all_reduce", size): 4,
        ("backward", "reduce_scatter", layer): 2,
        ("backward", "reduce_scatter", outer_parameters(config) * FP32): 1,
    }
    assert {call: calls(result).count(call) for call in calls(result)} == expected
    groups = dict(result.collectives.select("collective", "group_ranks").unique().rows())
    assert groups["all_gather"] == groups["reduce_scatter"] == [3, 11, 19, 27, 35, 43, 51, 59]
    assert groups["all_reduce"] == [8, 9, 10, 11, 12, 13, 14, 15]
    assert result.collectives["group_size"].unique().to_list() == [8]


def test_ddp_reduces_every_gradient_once_in_buckets() -> None:
    result = run(gpt.data_parallel, BIG, warmup=2)  # DDP settles its buckets in its first two steps
    buckets = result.collectives["comm_bytes"].to_list()
    assert set(result.collectives["collective"]) == {"all_reduce"}
    assert set(result.collectives["phase"]) == {"backward"}
    assert sum(buckets) == (12 * block_parameters(BIG) + outer_parameters(BIG)) * FP32
    # The first bucket closes at 1 MiB and the others at 25 MiB: with the tensor that goes over.
    assert buckets[0] >= 2**20
    assert all(size >= 25 * 2**20 for size in buckets[1:-1])


def pipeline_stage(config: gpt.GptConfig) -> gpt.Step:
    """A stage with sends and receives written out: one micro-batch forward and backward."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    model = gpt.make_model(config, "cpu", rank, stages)
    shape = (config.batch, config.seq, config.hidden)

    def step(_: float = 0.0) -> None:
        x = torch.empty(shape, requires_grad=True)
        dist.recv(x.detach(), rank - 1)
        y = model(x)
        work = dist.isend(y.detach(), rank + 1)
        grad = torch.empty(shape)
        dist.recv(grad, rank + 1)
        y.backward(grad)
        for each in dist.batch_isend_irecv([dist.P2POp(dist.isend, x.grad, rank - 1)]):
            each.wait()
        work.wait()

    return step


def test_a_pipeline_stage_talks_to_its_neighbours() -> None:
    result = run(pipeline_stage, replace(BIG, layers=12), world_size=6, rank=2)
    assert result.collectives.select("collective", "peer").rows() == [
        ("recv", 1),
        ("send", 3),
        ("recv", 3),
        ("send", 1),
    ]
    assert result.collectives["comm_bytes"].unique().to_list() == [activation_bytes(BIG)]


def every_collective() -> None:
    import torch.distributed._functional_collectives as functional

    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(size * 4)
    parts = [torch.empty(4) for _ in range(size)]
    dist.all_to_all_single(torch.empty_like(x), x)
    dist.all_to_all(list(torch.empty_like(x).chunk(size)), list(x.chunk(size)))
    dist.all_gather(parts, torch.randn(4))
    dist.reduce_scatter(torch.empty(4), parts)
    dist.broadcast(x, 5)
    dist.reduce(x, 6)
    dist.gather(torch.randn(4), parts if rank == 3 else None, 3)
    dist.scatter(torch.empty(4), parts if rank == 3 else None, 3)
    dist.barrier()
    group = dist.new_group([1, 3, 5])
    dist.broadcast(x, 5, group=group)
    functional.wait_tensor(functional.all_gather_single(x, 0, group))


@pytest.mark.parametrize("fake", [pytest.param(True, id="fake tensors"), pytest.param(False, id="real tensors")])
def test_every_kind_of_collective_is_seen(fake: bool) -> None:
    size = 8 * 4 * FP32
    assert dry_run(every_collective, 8, 3, fake=fake).collectives.select(
        "collective", "group_size", "comm_bytes", "peer"
    ).rows() == [
        ("all_to_all", 8, size, None),
        ("all_to_all", 8, size, None),
        ("all_gather", 8, size, None),
        ("reduce_scatter", 8, size, None),
        ("broadcast", 8, size, 5),
        ("reduce", 8, size, 6),
        ("gather", 8, size, 3),
        ("scatter", 8, size, 3),
        ("barrier", 8, 0, None),
        ("broadcast", 3, size, 5),
        ("all_gather", 3, 3 * size, None),
    ]


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(gpt.single, id="alone"),
        pytest.param(gpt.data_parallel, id="data parallel"),
        pytest.param(fsdp, id="FSDP"),
        pytest.param(gpt.tensor_parallel, id="tensor parallel"),
        pytest.param(fsdp_and_tp, id="FSDP and tensor parallel"),
    ],
)
def test_fake_tensors_issue_the_same_ops_as_real_ones(setup: Callable[[gpt.GptConfig], gpt.Step]) -> None:
    fake, real = (run(setup, SMALL, fake=fake) for fake in (True, False))
    assert fake.collectives.drop("index").equals(real.collectives.drop("index"))
    free = ["aten.view.default", "aten.detach.default", "_c10d_functional.wait_tensor.default"]
    work = [
        each.ops.filter(~pl.col("name").is_in(free)).select("name", "shapes", "dtype", "phase") for each in (fake, real)
    ]
    assert work[0].rows() == work[1].rows()


def test_ops_have_shapes_and_phases() -> None:
    result = run(gpt.single, SMALL)
    products = result.ops.filter(pl.col("name") == "aten.mm.default")
    # Three products a linear layer: forward, gradient of the input, gradient of the weight.
    linear = 6 * SMALL.layers + 1
    assert products["phase"].value_counts(sort=True).rows() == [("backward", 2 * linear), ("forward", linear)]
    tokens = SMALL.batch * SMALL.seq
    assert products["shapes"][0] == str([[tokens, SMALL.hidden], [SMALL.hidden, SMALL.hidden]])
    assert "optimizer" in set(result.ops["phase"])
    assert result.ops["index"].to_list() == list(range(result.ops.height))
    assert result.collectives.is_empty()


def test_what_happens_without_gradients_is_neither_forward_nor_backward() -> None:
    def norm() -> None:
        with torch.no_grad():
            dist.all_reduce(torch.ones(1))

    assert dry_run(norm, 4).collectives["phase"].to_list() == ["other"]


def test_totals_add_up_the_calls() -> None:
    totals = run(gpt.tensor_parallel, SMALL).totals()
    size = activation_bytes(SMALL)
    assert totals.select("phase", "collective", "calls", "comm_bytes").rows() == [
        ("forward", "all_reduce", 4, 4 * size),
        ("backward", "all_reduce", 4, 4 * size),
    ]


def test_the_process_is_left_as_it_was() -> None:
    before = dict(os.environ)
    first = run(fsdp_and_tp, SMALL)
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    assert run(fsdp_and_tp, SMALL).collectives.equals(first.collectives)


def fsdp_and_tp_by_four(config: gpt.GptConfig) -> gpt.Step:
    mesh = init_device_mesh("cpu", (16, 4), mesh_dim_names=("dp", "tp"))
    model = shard(gpt.parallelize(gpt.make_model(config, "cpu"), mesh["tp"]), mesh=mesh["dp"])
    return gpt.plain_step(model, config, "cpu")


@pytest.mark.parametrize("fake", [pytest.param(True, id="fake tensors"), pytest.param(False, id="real tensors")])
@pytest.mark.parametrize("order", [pytest.param((3, 37), id="3 then 37"), pytest.param((37, 3), id="37 then 3")])
def test_ranks_of_other_groups_run_one_after_the_other(order: tuple[int, int], fake: bool) -> None:
    runs = {rank: run(fsdp_and_tp_by_four, SMALL, rank=rank, fake=fake) for rank in order}
    for rank, tensor_ranks in ((3, [0, 1, 2, 3]), (37, [36, 37, 38, 39])):
        groups = dict(runs[rank].collectives.select("collective", "group_ranks").unique().rows())
        data_ranks = list(range(rank % 4, 64, 4))
        assert groups == {"all_reduce": tensor_ranks, "all_gather": data_ranks, "reduce_scatter": data_ranks}
    assert calls(runs[3]) == calls(runs[37])
    assert runs[3].ops.equals(runs[37].ops)


def test_an_error_of_the_users_code_passes_and_ends_the_job() -> None:
    def broken() -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        dry_run(broken, 8)
    assert not dist.is_initialized()


def test_code_that_leaves_the_job_itself_is_no_error() -> None:
    left = dry_run(dist.destroy_process_group, 8)
    assert left.ops.is_empty()
    assert repr(left).startswith("Rank 0 of 8: 0 ops, 0 collectives")
    assert not dist.is_initialized()


def test_a_running_job_is_not_disturbed() -> None:
    def nested() -> None:
        with pytest.raises(CaptureError, match=r"already initialised.*destroy_process_group"):
            dry_run(lambda: None, 2)
        assert dist.get_world_size() == 8

    dry_run(nested, 8)


@pytest.mark.parametrize("rank", [-1, 4, 1.5])
def test_a_rank_outside_the_job_is_refused(rank: float) -> None:
    with pytest.raises(CaptureError, match=f"rank={rank} of world_size=4"):
        dry_run(lambda: None, 4, rank)
