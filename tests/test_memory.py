"""Memory of ranks: the published closed form, peaks of real torch modules, and what must hold of any layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.errors import LayoutError
from lumos_nb.layout import Cluster, Parallelism, Training, Transformer, problems
from lumos_nb.workloads.llm.estimates import Estimate, estimate
from lumos_nb.workloads.llm.memory import CLASSES, memory, memory_over_time, peak_bytes
from lumos_nb.workloads.llm.schedule import schedule
from lumos_nb.workloads.llm.stages import work
from lumos_nb.workloads.llm.table_rows import stages_by_cost
from lumos_nb.workloads.llm.tensors import layer_tensors
from tests.memory_jobs import jobs
from tests.schedule_forms import in_flight

GPT = Transformer(
    layers=3, hidden=1024, heads=16, ffn=4096, vocab=4096, gated=False, norm="layer", positions="none"
)  # fmt: skip
LLAMA = Transformer(layers=3, hidden=1024, heads=16, kv_heads=4, ffn=2816, vocab=4096, positions="none")
PLAIN = Training(
    micro_batch=2, global_batch=2, seq=2048, grad_dtype="bf16", optimizer="sgd", master=False, dropout=False
)  # fmt: skip
KORTHIKANTI = {  # hidden, layers, heads, micro-batch, pipeline stages, chunks a rank: their tables 2 and 3
    "GPT-22B": (6144, 48, 64, 4, 1, 1),
    "GPT-175B": (12288, 96, 96, 1, 8, 3),
}


def of(frame: pl.DataFrame, *classes: str, stage: int = 0) -> int:
    return frame.filter((pl.col("stage") == stage) & pl.col("class").is_in(classes))["bytes"].sum()


def published(model: str, recompute: str, spread: bool) -> tuple[Transformer, Parallelism, Training]:
    hidden, layers, heads, micro_batch, pp, chunks = KORTHIKANTI[model]
    gpt = Transformer(
        layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=51200, gated=False, norm="layer",
        positions="learned", max_seq=2048, tied=True,
    )  # fmt: skip
    how = "interleaved" if chunks > 1 else "1f1b"
    layout = Parallelism(tp=8, sequence_parallel=spread, pp=pp, chunks=chunks, schedule=how)
    train = Training(
        micro_batch=micro_batch, global_batch=64, seq=2048, dtype="bf16", recompute=recompute, flash=False, dropout=True
    )  # fmt: skip
    return gpt, layout, train


def test_activations_are_korthikantis_closed_form_exactly(measured):
    rows = pl.read_csv(measured / "memory_reference.csv").rows(named=True)
    assert {row["model"] for row in rows} == set(KORTHIKANTI)
    for row in rows:
        model, layout, train = published(row["model"], row["recompute"], row["sequence_parallel"])
        assert of(memory(model, layout, train), "activations") == row["activation_gib"] * 2**30
        matrices = sum(w.size for layer in range(model.layers) for w in model.weights(layer) if len(w.shape) == 2)
        assert matrices * 18 / layout.tp / layout.pp == row["param_opt_gib"] * 2**30


ALONE, CUT, SPREAD = {"tp": 1}, {"tp": 2}, {"tp": 4, "sequence_parallel": True}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("model", "layout", "train"),
    [
        pytest.param(GPT, ALONE, {"dropout": True, "flash": False}, id="GPT"),
        pytest.param(GPT, CUT, {"dropout": True, "flash": False}, id="GPT cut by TP"),
        pytest.param(GPT, SPREAD, {"dropout": True, "flash": False}, id="GPT with sequence parallelism"),
        pytest.param(LLAMA, ALONE, {}, id="Llama"),
        pytest.param(LLAMA, CUT, {}, id="Llama cut by TP"),
        pytest.param(LLAMA, SPREAD, {}, id="Llama with sequence parallelism"),
        pytest.param(LLAMA, SPREAD, {"regather": False}, id="Llama that keeps gathered sequences"),
        pytest.param(LLAMA, ALONE, {"lora": 4}, id="Llama that is frozen but for adapters"),
        pytest.param(GPT, CUT, {"lora": 4}, id="GPT that is frozen but for adapters"),
        pytest.param(LLAMA, ALONE, {"lora": 4, "logit_bytes": 2}, id="a loss that leaves a gradient for its logits"),
    ],
)
def test_torch_saves_and_peaks_as_counted(model, layout, train, recompute):
    torch = pytest.importorskip("torch")
    import saved_tensors as real

    layout = Parallelism(**layout)
    train = msgspec.structs.replace(PLAIN, recompute=recompute, **train)
    for vocab in (32768, 4096, 64):  # the peak is in the loss; in a layer
        model = msgspec.structs.replace(model, vocab=vocab)
        net = real.Decoder(model, layout, train)
        weights = list(net.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        x = torch.zeros(train.seq // (layout.tp if layout.sequence_parallel else 1), 2, model.hidden, **real.META)
        run = lambda: net.repeated(net.layers[0], x.requires_grad_())  # noqa: B023, E731
        saved = real.saved_bytes(run, but={w.untyped_storage()._cdata for w in weights})
        narrow = 0 if recompute == "full" else 2 * 2 * train.lora * train.seq * 2  # of two adapters, not counted
        assert sum(layer_tensors(model, layout, train).kept(recompute).values()) + narrow == saved
        with real.Alive() as alive:
            alive.count([*weights, *(w.grad for w in trained)])
            net(torch.zeros(train.seq, 2, dtype=torch.long, device="meta")).backward()
        assert memory(model, layout, train)["bytes"].sum() == pytest.approx(alive.most, rel=0.02)


@contextlib.contextmanager
def fake_job(ranks: int) -> Iterator[Any]:
    """A mesh of ranks of which only this one is there."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch's own, of fake tensors and process groups
@pytest.mark.parametrize(
    ("zero", "dtype", "vocab", "off"),
    [
        pytest.param(3, "fp32", 4096, 1e-4, id="ZeRO 3 in fp32"),
        pytest.param(3, "bf16", 64, 1e-4, id="ZeRO 3, most in a layer"),
        pytest.param(3, "bf16", 4096, 1e-4, id="ZeRO 3, gathered in bf16"),
        pytest.param(3, "bf16", 32768, 1e-4, id="ZeRO 3, most in the loss"),
        pytest.param(2, "bf16", 4096, 0.02, id="ZeRO 2, gathered in bf16"),
    ],
)
def test_fsdp_peaks_as_counted(zero, dtype, vocab, off):
    torch = pytest.importorskip("torch")
    import saved_tensors as real
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layout, model = Parallelism(dp=8, zero=zero), msgspec.structs.replace(LLAMA, vocab=vocab)
    train = Training(micro_batch=1, global_batch=16, seq=512, dtype=dtype)
    mixed = MixedPrecisionPolicy(param_dtype=real.FORMATS[dtype], reduce_dtype=torch.float32)
    with fake_job(8) as mesh, FakeTensorMode():
        net = real.Decoder(model, layout, msgspec.structs.replace(train, dtype="fp32"), "cpu")
        for module in (*net.layers, net):
            fully_shard(module, mesh=mesh, mp_policy=mixed, reshard_after_forward=zero == 3 and module is not net)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        with real.Alive() as alive:
            alive.count(list(net.parameters()))
            for _ in range(2):  # the states are there from the second step on
                for _ in range(2):
                    net(torch.zeros(train.seq, 1, dtype=torch.long)).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert memory(model, layout, train)["bytes"].sum() == pytest.approx(alive.most, rel=off)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("fused", [pytest.param(True, id="fused"), pytest.param(False, id="apart")])
def test_gradients_and_optimizer_states_of_mixed_precision_peak_as_counted(zero, fused, tied):
    torch = pytest.importorskip("torch")
    import saved_tensors as real

    layout = Parallelism(dp=4, zero=zero)
    train = Training(micro_batch=1, global_batch=8, seq=512, fused_grads=fused, logit_bytes=12)
    model = msgspec.structs.replace(LLAMA, tied=tied, vocab=32768)
    net = real.Decoder(model, layout, train)
    if tied:
        net.head.weight = net.embedding.weight
    weights = list(net.parameters())
    main = [torch.zeros_like(w, dtype=torch.float32) for w in weights]
    states = [torch.zeros(w.numel() // (4 if zero else 1), **real.META | {"dtype": torch.float32}) for w in weights * 3]

    def add(weight: Any) -> None:
        next(buffer for w, buffer in zip(weights, main, strict=True) if w is weight).add_(weight.grad)
        weight.grad = None

    if fused:
        for weight in weights:
            weight.register_post_accumulate_grad_hook(add)
    with real.Alive() as alive:
        alive.count([*weights, *main, *states])
        for _ in range(train.micro_batches(layout)):
            net(torch.zeros(train.seq, 1, dtype=torch.long, device="meta")).backward()
            for weight in () if fused else weights:
                add(weight)
    assert memory(model, layout, train)["bytes"].sum() == pytest.approx(alive.most, rel=0.02)


@pytest.mark.parametrize(("dtype", "logit_bytes"), [("bf16", 0), ("bf16", 1), ("fp8", 1), ("fp32", 3), ("tf32", 2)])
def test_a_loss_has_its_logits_whole_at_least(dtype, logit_bytes):
    with pytest.raises(LayoutError, match=rf"logit_bytes is {logit_bytes}; the head makes logits of . bytes \("):
        msgspec.structs.replace(PLAIN, dtype=dtype, logit_bytes=logit_bytes)


def test_a_loss_keeps_no_more_of_its_logits_than_it_ever_has_and_fp32_at_most():
    """Beside what the last micro-batch has alive, gpipe keeps the others'."""
    layout, count = Parallelism(pp=2, schedule="gpipe"), 4
    model = msgspec.structs.replace(LLAMA, layers=2, vocab=100_000)
    train = msgspec.structs.replace(PLAIN, global_batch=2 * count)
    logits = 100_000 * 2 * 2048
    used = {
        size: of(memory(model, layout, msgspec.structs.replace(train, logit_bytes=size)), "logits", stage=1)
        for size in (2, 3, 4, 6, 12)
    }
    inputs = count * 2 * 2 * 1024 * 2 * 2048  # of the norm and of the head
    assert {size: used[size] - inputs for size in used} == {
        size: logits * (size + (count - 1) * min(size, 4)) for size in used
    }


SIZES = Transformer(layers=24, hidden=512, heads=8, kv_heads=4, ffn=1024, vocab=1000)


@cache
def estimated(schedule: str, recompute: str) -> Estimate:
    model = Transformer(layers=16, hidden=1024, heads=16, ffn=4096, vocab=8192)
    layout = Parallelism(pp=4, dp=2, schedule=schedule, chunks=2 if schedule in ("interleaved", "zb-v") else 1)
    train = Training(micro_batch=1, global_batch=16, seq=1024, recompute=recompute)
    return estimate(model, layout, train, Cluster(gpu="H100-SXM-80GB", inside="NVLink4 NVSwitch"))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_memory_over_a_replayed_step_peaks_as_counted_without_it(kind, recompute):
    """Passes of a replay come and go; the moments know only how many micro-batches are in flight."""
    found = estimated(kind, recompute)
    over_time = found.memory_over_time
    total = over_time.group_by("stage", "time_ns").agg(pl.col("bytes").sum())
    peaks = total.group_by("stage").agg(pl.max("bytes")).sort("stage")["bytes"]
    counted = found.memory.group_by("stage").agg(pl.col("bytes").sum()).sort("stage")["bytes"]
    assert ((peaks / counted - 1).abs() < 1e-4).all()
    assert over_time["bytes"].min() >= 0
    ends = over_time.filter(pl.col("time_ns") == pl.col("time_ns").max())
    assert ends.filter(pl.col("class").is_in(["activations", "logits", "workspace"]))["bytes"].sum() == 0
    assert ends["stage"].n_unique() == 4


@settings(max_examples=40, deadline=None)
@given(job=jobs())
def test_memory_over_time_peaks_as_counted_and_ends_as_it_began_whatever_is_sharded_and_put_off(job):
    """To the byte, but for rounding: over time every pass and layer is counted, by its order in the replay."""
    over_time, counted = replayed(*job), memory(*job).group_by("stage").agg(pl.col("bytes").sum()).sort("stage")
    total = over_time.group_by("stage", "time_ns").agg(pl.col("bytes").sum())
    peaks = total.group_by("stage").agg(pl.max("bytes")).sort("stage")["bytes"]
    assert over_time["bytes"].min() >= 0
    assert (peaks - counted["bytes"]).abs().max() <= len(CLASSES)
    assert at_the_end(over_time) == at_the_beginning(over_time)


@pytest.mark.parametrize(
    ("schedule", "split"),
    [("gpipe", (0, 6)), ("1f1b", (0, 6)), ("interleaved", (0, 2, 2, 2)), ("zb-h1", (0, 6)), ("zb-v", (0, 3, 3, 0))],
)
@pytest.mark.parametrize("lora", [0, 8])
def test_a_stage_of_an_embedding_alone_frees_all_it_keeps(schedule, split, lora):
    """Nothing runs in the backward pass of a frozen one, and yet its dropout's mask goes."""
    model = Transformer(layers=6, hidden=512, heads=8, ffn=2048, vocab=8192)
    layout = Parallelism(pp=2, schedule=schedule, chunks=len(split) // 2, split=split)
    train = Training(micro_batch=1, global_batch=4, seq=256, lora=lora, dropout=True)
    over_time = replayed(model, layout, train)
    assert at_the_end(over_time) == at_the_beginning(over_time)
    mask = 256 * 512
    kept = over_time.filter(stage=0)["bytes"].filter(over_time.filter(stage=0)["class"] == "bookkeeping")
    assert kept.max() >= (4 if schedule == "gpipe" else 2) * mask


def replayed(model: Transformer, layout: Parallelism, train: Training) -> pl.DataFrame:
    """Memory over the time of a step that is replayed."""
    cluster = Cluster(gpu="H100-SXM-80GB", gpus_per_node=1, nodes=layout.world, between="InfiniBand NDR 400")
    return estimate(model, layout, train, cluster).memory_over_time


def at_the_end(over_time: pl.DataFrame) -> dict[tuple[int, str], int]:
    """Bytes by stage and class."""
    last = over_time.filter(pl.col("time_ns") == pl.col("time_ns").max())
    return {(stage, name): size for stage, name, size in last.select("stage", "class", "bytes").iter_rows()}


def at_the_beginning(over_time: pl.DataFrame) -> dict[tuple[int, str], int]:
    first = over_time.filter(pl.col("time_ns") == pl.col("time_ns").min().over("stage"))
    return {(stage, name): size for stage, name, size in first.select("stage", "class", "bytes").iter_rows()}


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        pytest.param({"schedule": "zb-h1"}, {}, id="passes that it has not"),
        pytest.param({"schedule": "interleaved", "chunks": 2}, {}, id="chunks that it has not"),
        pytest.param({}, {"global_batch": 32}, id="too few micro-batches"),
        pytest.param({}, {"global_batch": 8}, id="too many"),
    ],
)
def test_ops_of_other_passes_have_no_memory_over_time(layout, train):
    found = estimated("1f1b", "none")
    layout = msgspec.structs.replace(found.layout, **layout)
    train = msgspec.structs.replace(found.train, **train)
    with pytest.raises(LayoutError, match=r"ops are of other passes than \S+ has of \d+ micro-batches: give an est"):
        memory_over_time(found.model, layout, train, found.result.ops)


def test_ops_of_another_layout_have_no_memory_over_time():
    found = estimated("1f1b", "none")
    with pytest.raises(LayoutError, match="ops are of ranks \\[0, 1, 2, 3\\]; pp is 1"):
        memory_over_time(found.model, Parallelism(dp=8), found.train, found.result.ops)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_as_many_micro_batches_are_held_as_the_schedule_has_in_flight(kind):
    chunks = {"interleaved": 3, "zb-v": 2}.get(kind, 1)
    train = Training(micro_batch=1, global_batch=16, seq=256, flash=True)
    layer = layer_tensors(SIZES, Parallelism(), train)
    each = 24 // 4 // chunks * sum(size for name, size in layer.kept().items() if "statistics" not in name)
    put_off = 24 // 4 // chunks * layer.put_off()
    frame = memory(
        SIZES, Parallelism(pp=4, chunks=chunks, schedule=kind), msgspec.structs.replace(train, logit_bytes=2)
    )
    for stage, flying, until in in_flight(schedule(kind, 4, 16, chunks)).rows():
        if frame.filter(pl.col("stage") == stage)["moment"][0] in ("loss", "backward"):
            waiting = until - flying if kind == "zb-h1" else 0
            assert of(frame, "activations", stage=stage) == flying * each + waiting * put_off
    assert frame.filter(pl.col("moment").is_in(["loss", "backward"]))["stage"].n_unique() >= 3


CONFIGURATIONS = {
    "tp": st.sampled_from([1, 2, 4]),
    "pp": st.sampled_from([1, 2, 4]),
    "dp": st.sampled_from([1, 2, 8]),
    "zero": st.integers(0, 3),
    "sequence_parallel": st.booleans(),
}


@st.composite
def layouts(draw: st.DrawFn) -> Parallelism:
    fields = {name: draw(values) for name, values in CONFIGURATIONS.items()}
    fields["sequence_parallel"] &= fields["tp"] > 1
    return Parallelism(**fields)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sampled_from(["none", "selective", "full"]), st.booleans())
def test_more_costs_more_and_spreading_costs_less(layout, recompute, flash):
    train = Training(micro_batch=2, global_batch=64, seq=512, recompute=recompute, flash=flash)
    assert problems(SIZES, layout, train) == []
    peak = peak_bytes(SIZES, layout, train)
    assert peak > 0
    replace = msgspec.structs.replace
    assert peak_bytes(SIZES, layout, replace(train, seq=1024)) > peak
    assert peak_bytes(SIZES, layout, replace(train, micro_batch=4)) > peak
    assert peak_bytes(replace(SIZES, layers=28), layout, train) > peak
    assert peak_bytes(SIZES, replace(layout, tp=2 * layout.tp), train) < peak
    if layout.zero < 3 and layout.dp > 1:
        lasting = ("weights", "gradients", "optimizer")
        more = replace(layout, zero=layout.zero + 1)
        assert of(memory(SIZES, more, train), *lasting) < of(memory(SIZES, layout, train), *lasting)


def test_experts_are_spread_over_their_ranks_and_hold_the_tokens_that_come():
    model = Transformer.named("mixtral-8x7b")
    train = Training(micro_batch=1, global_batch=64, seq=4096)
    whole, spread = (memory(model, Parallelism(dp=8, ep=ep), train) for ep in (1, 8))
    assert of(whole, "weights") - of(spread, "weights") == model.parameters()["experts"] * 2 * 7 / 8
    assert of(whole, "activations") == of(spread, "activations")  # each rank works on as many tokens
    busy = memory(model, Parallelism(dp=8, ep=8), msgspec.structs.replace(train, imbalance=1.5))
    capped = memory(model, Parallelism(dp=8, ep=8), msgspec.structs.replace(train, imbalance=1.5, capacity=1.2))
    assert of(spread, "activations") < of(capped, "activations") < of(busy, "activations")


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.25, 2.0])
def test_buffers_of_a_capacity_hold_what_ranks_exchange_however_uneven_the_routing(capacity):
    model, layout = Transformer.named("mixtral-8x7b"), Parallelism(dp=8, ep=8)
    train = Training(micro_batch=1, global_batch=64, seq=4096, capacity=capacity, imbalance=1.5)
    sent = work(model, layout, train).filter(pl.col("collective") == "all_to_all", pl.col("layer") == 0)["size_bytes"]
    assert sent.unique().to_list() == [8 * (4096 * 2 / 8 * capacity) * 4096 * 2]  # experts, tokens each, hidden, bytes
    tensors = layer_tensors(model, layout, train, experts=True)
    assert tensors.size_bytes["slots"] == sent[0]
    assert tensors.kept()["expert up"] == 2 * 14336 * 4096 * 2 * capacity * 2


def test_between_products_fp8_is_bf16_and_tf32_is_fp32():
    """Transformer Engine hands activations on in bf16: kept ones, and messages between stages."""
    model, layout = Transformer.named("llama-3-8b"), Parallelism(pp=4, dp=2)
    fp8, bf16, tf32, fp32 = (
        memory(model, layout, Training(micro_batch=1, global_batch=64, seq=4096, dtype=dtype))
        for dtype in ("fp8", "bf16", "tf32", "fp32")
    )
    assert fp8.equals(bf16)
    assert tf32.equals(fp32)
    assert of(fp8, "buffers") == 2 * 4096 * 4096 * 2  # a message each way
    sent = work(model, layout, Training(micro_batch=1, global_batch=64, seq=4096, dtype="fp8"))
    assert sent.filter(pl.col("collective").str.contains("send|recv"))["size_bytes"].unique().to_list() == [2**25]


def test_latent_attention_keeps_its_narrow_tensors():
    model = Transformer.named("deepseek-v3")
    train = Training(micro_batch=1, global_batch=8, seq=4096)
    kept = layer_tensors(model, Parallelism(tp=8), train).kept()
    assert kept["q narrow"] == 1536 * 4096 * 2
    assert kept["kv narrow"] == (512 + 64) * 4096 * 2
    assert kept["qkv"] == 128 / 8 * (192 + 192 + 128) * 4096 * 2


def test_a_frame_has_every_class_of_every_stage_and_the_share_asked_for():
    train = Training(micro_batch=1, global_batch=64, seq=4096)
    layout = Parallelism(tp=2, pp=4, dp=2, zero=1)
    frame = memory(Transformer.named("llama-3-8b"), layout, train, fragmentation=0.25)
    assert frame.select("stage", "class").rows() == [(stage, name) for stage in range(4) for name in CLASSES]
    used = frame.filter(pl.col("class") != "fragmentation").group_by("stage").agg(pl.col("bytes").sum()).sort("stage")
    held = frame.filter(pl.col("class") == "fragmentation").sort("stage")
    assert held["bytes"].to_list() == pytest.approx((used["bytes"] / 4).to_list(), abs=10)
    with pytest.raises(LayoutError, match="tp is 64"):
        memory(Transformer.named("llama-3-8b"), Parallelism(tp=64), train)


@pytest.mark.parametrize(
    ("pp", "counts"),
    [(1, ()), (2, (11, 5)), (4, (6, 5, 5, 0)), (8, (3, 3, 2, 3, 2, 3, 0, 0))],
)
def test_nanotrons_stages_end_with_the_block_that_reaches_their_share_of_the_cost(pp, counts):
    assert stages_by_cost(16, pp, layer_cost=16.0, head_cost=64.0) == counts
