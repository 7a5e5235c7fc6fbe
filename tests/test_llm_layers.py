"""Work tables: FLOPs against 6PT, what the ranks of a split do together, prices, and speed by gather."""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.costs.calibration import load_calibration
from lumos_nb.costs.work import with_work
from lumos_nb.errors import InputError
from lumos_nb.layout import Parallelism, Training, check
from lumos_nb.transformer import Mla, Moe, Transformer
from lumos_nb.workloads.llm.stages import work
from lumos_nb.workloads.work_rows import WORK

SIZES: dict[str, Any] = {"layers": 4, "hidden": 512, "heads": 8, "ffn": 1024, "vocab": 4096}
GPT = Transformer(**SIZES, gated=False, norm="layer", bias=True, positions="learned", max_seq=4096)
LLAMA = Transformer(**SIZES, kv_heads=4)
DEEPSEEK = Transformer(
    **SIZES, moe=Moe(experts=8, topk=2, ffn=128, shared=1, first=1), mla=Mla(kv_rank=64, q_rank=96, rope=16)
)
TRAIN = Training(micro_batch=1, global_batch=64, seq=1024, bucket_bytes=0)
PRODUCTS = ("gemm", "gemm_bias", "grouped_gemm")


def multiplied(model: Transformer, layer: int) -> int:
    """Parameters of a layer that multiply a token; of the experts only those that it is sent to."""
    weights = [w for w in model.weights(layer) if len(w.shape) == 2]
    share = model.moe.topk / model.moe.experts if model.moe else 1
    return int(sum(w.size * (share if w.part == "experts" else 1) for w in weights))


layouts = st.builds(
    Parallelism,
    tp=st.sampled_from([2, 4]),
    sequence_parallel=st.booleans(),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2, 4]),
    cp_mode=st.sampled_from(["ring", "all_gather"]),
    dp=st.sampled_from([1, 2, 8]),
    zero=st.integers(0, 3),
)
trainings = st.builds(
    msgspec.structs.replace,
    st.just(TRAIN),
    micro_batch=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    flash=st.booleans(),
    dropout=st.booleans(),
    bucket_bytes=st.sampled_from([0, 2**20]),
    dtype=st.sampled_from(["bf16", "fp16", "fp32", "tf32", "fp8"]),
    optimizer=st.sampled_from(["adam", "momentum", "sgd"]),
)


def whole(model: Transformer, layout: Parallelism, train: Training) -> pl.DataFrame:
    """The rows of one rank of every stage."""
    check(model, layout, train)
    return pl.concat(work(model, layout, train, stage) for stage in range(layout.pp * layout.chunks))


@settings(max_examples=12, deadline=None)
@given(model=st.sampled_from([GPT, LLAMA]), layout=layouts, train=trainings)
def test_flops_are_six_for_each_parameter_and_token_and_eight_with_full_recompute(
    model: Transformer, layout: Parallelism, train: Training
) -> None:
    table = whole(model, layout, train)
    tokens = train.micro_batch * train.seq
    products = table.filter(pl.col("op").is_in(PRODUCTS)).with_columns(head=pl.col("part") == "head")
    flops = dict(products.group_by("head").agg(pl.col("flops").sum() * layout.tp * layout.cp).rows())
    layers = sum(multiplied(model, layer) for layer in range(model.layers))
    assert flops[True] == 6 * model.vocab * model.hidden * tokens
    assert flops[False] == (8 if train.recompute == "full" else 6) * layers * tokens


@settings(max_examples=12, deadline=None)
@given(model=st.sampled_from([GPT, LLAMA, DEEPSEEK]), layout=layouts)
def test_frozen_weights_have_no_gradients_and_adapters_all_of_theirs(model: Transformer, layout: Parallelism) -> None:
    train = msgspec.structs.replace(TRAIN, lora=8)
    table, tokens = whole(model, layout, train), train.micro_batch * train.seq
    products = table.filter(pl.col("op").is_in(PRODUCTS))
    narrow = pl.col("weight").str.starts_with("lora").fill_null(value=False)
    frozen = products.filter(~narrow)
    assert frozen.filter(phase="backward_weight").is_empty()
    layers = sum(multiplied(model, layer) for layer in range(model.layers))
    if model is not DEEPSEEK:  # some of whose products every tensor rank does
        flops = frozen["flops"].sum() * layout.tp * layout.cp
        assert flops == 4 * (layers + model.vocab * model.hidden) * tokens
    pairs = {w.name: w.adapters(8) for w in model.weights(0) if w.adapters(8)}
    assert {name for pair in pairs.values() for name in (w.name for w in pair)} == {*products.filter(narrow)["weight"]}
    for weight in (one for pair in pairs.values() for one in pair):
        own = products.filter(weight=weight.name, phase="backward_weight")
        assert own.height == model.layers
        assert own["dtype"].unique().to_list() == ["bf16"]
    sizes = sum(one.size for layer in range(model.layers) for w in model.weights(layer) for one in w.adapters(8))
    held = whole(model, layout, msgspec.structs.replace(train, master=False)).filter(op="adamw")
    states = (held["rows"] * held["cols"]).sum() * (layout.dp * layout.cp if layout.zero else 1)
    assert sizes / layout.tp <= states <= sizes + held.height * model.hidden * layout.dp * layout.cp


@settings(max_examples=10, deadline=None)
@given(layout=layouts, recompute=st.sampled_from(["none", "selective", "full"]))
def test_attention_sees_half_the_keys_however_the_sequence_is_split(layout: Parallelism, recompute: str) -> None:
    train = msgspec.structs.replace(TRAIN, recompute=recompute)
    attention = whole(LLAMA, layout, train).filter(op="attention")
    flops = attention["flops"].sum() * layout.tp * layout.cp
    forward = 2 * 2 * LLAMA.heads * LLAMA.head * LLAMA.layers * train.seq**2 / 2
    assert flops == pytest.approx((3.5 if recompute == "none" else 4.5) * forward, rel=2 / train.seq * layout.cp)


@pytest.mark.parametrize("etp", [1, 2])
def test_experts_compute_for_every_token_as_often_as_it_is_routed(etp: int) -> None:
    layout = Parallelism(tp=2, sequence_parallel=True, dp=4, ep=4, etp=etp)
    grouped = work(DEEPSEEK, layout, TRAIN).filter(op="grouped_gemm")
    moe = DEEPSEEK.moe
    assert moe
    tokens = TRAIN.seq * layout.dp * moe.topk * 3  # of all replicas, in three layers with experts
    assert grouped["flops"].sum() * layout.world == 6 * tokens * 3 * moe.ffn * DEEPSEEK.hidden


def test_the_busiest_rank_has_as_much_more_to_do_as_the_imbalance_says() -> None:
    layout = Parallelism(dp=4, ep=4)
    even, uneven = (
        work(DEEPSEEK, layout, msgspec.structs.replace(TRAIN, imbalance=imbalance)) for imbalance in (1.0, 1.5)
    )
    for column, of in (("flops", pl.col("op") == "grouped_gemm"), ("size_bytes", pl.col("collective") == "all_to_all")):
        assert uneven.filter(of)[column].sum() == 1.5 * even.filter(of)[column].sum()


@settings(max_examples=12, deadline=None)
@given(model=st.sampled_from([GPT, LLAMA, DEEPSEEK]), layout=layouts, train=trainings, data=st.data())
def test_every_row_is_priced_or_has_a_size(
    model: Transformer, layout: Parallelism, train: Training, data: st.DataObject
) -> None:
    table = work(model, layout, train, data.draw(st.integers(0, layout.pp - 1)))
    assert table.columns == [*WORK, "flops", "bytes"]
    compute, comm = table.filter(kind="compute"), table.filter(kind="comm")
    assert compute.height + comm.height == table.height
    assert with_work(compute)["flops"].equals(compute["flops"])
    priced = load_calibration("H100-SXM-80GB").predict_kernels(compute)
    assert (priced["dur_us"] > 0).all()
    assert priced["dur_us"].is_finite().all()
    assert comm.filter(pl.col("size_bytes") > 0, pl.col("group_size") > 1).height == comm.height
    assert not table["phase"].has_nulls()
    assert not table["part"].has_nulls()
    assert not table["when"].has_nulls()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [GPT, DEEPSEEK], ids=["gpt", "deepseek"])
def test_every_gradient_is_added_up_and_every_weight_updated_once(model: Transformer, zero: int) -> None:
    layout = Parallelism(dp=8, ep=4, zero=zero) if model.moe else Parallelism(dp=8, zero=zero)
    train = msgspec.structs.replace(TRAIN, bucket_bytes=2**20, master=False)
    table = work(model, layout, train)
    experts = model.parameters().get("experts", 0)
    dense, mine = model.size - experts, experts // layout.ep
    reduced = table.filter(pl.col("part") == "gradients", pl.col("group") != "edp")
    assert reduced["size_bytes"].sum() == pytest.approx(dense * 4, rel=1e-4)
    assert reduced["collective"].unique().to_list() == ["reduce_scatter" if zero else "all_reduce"]
    assert table.filter(part="gradients", group="edp")["size_bytes"].sum() == mine * 4
    updated = table.filter(phase="optimizer", op="adamw").select(pl.col("rows") * pl.col("cols")).sum().item()
    expected = dense / 8 + mine / 2 if zero else dense + mine
    assert updated == pytest.approx(expected, abs=2 * model.hidden)
    gathered = table.filter(part="weights")["size_bytes"].sum()
    passes = {0: 0, 1: 1, 2: 1, 3: 2}[zero]
    ends = sum(w.size for w in (*model.first_weights(), *model.last_weights()))  # these stay between the passes
    kept = ends if zero == 3 else 0
    assert gathered == pytest.approx(2 * (passes * (dense + mine) - kept), rel=1e-4)


def test_the_last_micro_batch_and_the_step_are_told_from_the_others() -> None:
    layout = Parallelism(tp=2, sequence_parallel=True, dp=4, zero=1)
    table = work(LLAMA, layout, TRAIN)
    shown = table.filter(pl.col("when") != "each").group_by("when", "phase", "part", "group", maintain_order=True).len()
    assert shown.rows() == [
        ("last", "backward", "gradients", "shard", 1),
        ("step", "backward", "gradients", "tp", 1),
        ("step", "optimizer", "optimizer", None, 2),
        ("step", "optimizer", "weights", "shard", 1),
    ]
    norms = sum(w.size for w in (*LLAMA.weights(0), *LLAMA.weights(0)) if len(w.shape) == 1) * 2 + LLAMA.hidden
    assert table.filter(when="step", group="tp")["size_bytes"].item() == 4 * norms


def test_tied_ends_of_a_pipeline_add_up_their_vocabulary() -> None:
    model = msgspec.structs.replace(LLAMA, tied=True)
    tables = [work(model, Parallelism(pp=4), TRAIN, stage) for stage in range(4)]
    tied = [table.filter(when="step", kind="comm").select("group_size", "size_bytes").rows() for table in tables]
    size = model.vocab * model.hidden * 4
    assert tied == [[(2, size)], [], [], [(2, size)]]


def test_stages_of_chunks_have_their_own_layers() -> None:
    layout = Parallelism(pp=2, chunks=2, schedule="interleaved")
    layers = [work(LLAMA, layout, TRAIN, stage)["layer"].drop_nulls().unique().to_list() for stage in range(4)]
    assert layers == [[0], [1], [2], [3]]


@pytest.mark.parametrize("zero", [0, 3])
def test_a_stage_may_hold_an_end_alone(zero: int) -> None:
    layout = Parallelism(pp=4, dp=2, zero=zero, split=(0, 2, 2, 0))
    tables = [work(LLAMA, layout, TRAIN, stage) for stage in range(4)]
    assert [table["layer"].drop_nulls().n_unique() for table in tables] == [0, 2, 2, 0]
    ends = {"embedding", "norm", "head", "loss", "message", "gradients", "optimizer"} | ({"weights"} if zero else set())
    assert set(tables[0]["part"]) | set(tables[3]["part"]) == ends
    if zero:
        gathers = [table.filter(part="weights").height for table in tables]
        assert gathers == [1, 4, 4, 1]


def test_a_deep_model_repeats_one_layer() -> None:
    model = msgspec.structs.replace(LLAMA, layers=96)
    table = work(model, Parallelism(tp=2), TRAIN)
    rows = table.filter(pl.col("layer").is_not_null()).group_by("layer").len()
    assert rows.height == 96
    assert rows["len"].n_unique() == 1


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="stage is 4; this layout has 4 virtual stages"):
        work(LLAMA, Parallelism(pp=4), TRAIN, 4)
