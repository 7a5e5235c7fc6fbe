"""Models, layouts, batches and clusters: counts against known totals, groups of ranks, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.config import find_gpu
from lumos_nb.errors import InputError, LayoutError
from lumos_nb.layout import GROUPS, Cluster, Parallelism, Training, check, problems
from lumos_nb.transformer import Mla, Moe, Transformer, models

LLAMA = Transformer.named("llama-3-8b")
TRAIN = Training(micro_batch=1, global_batch=64, seq=4096)
NODE = Cluster(gpu="H100-SXM-80GB", inside="NVLink4 NVSwitch")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        pytest.param("gpt2-small", 124_439_808, id="GPT-2"),
        pytest.param("gpt2-xl", 1_557_611_200, id="GPT-2 XL"),
        pytest.param("gpt3-175b", 174_604_259_328, id="GPT-3 (174,600 million in its table D.1)"),
        pytest.param("llama-2-7b", 6_738_415_616, id="Llama 2 7B"),
        pytest.param("llama-2-13b", 13_015_864_320, id="Llama 2 13B"),
        pytest.param("llama-2-70b", 68_976_648_192, id="Llama 2 70B with grouped queries"),
        pytest.param("llama-3-8b", 8_030_261_248, id="Llama 3 8B"),
        pytest.param("llama-3-70b", 70_553_706_496, id="Llama 3 70B"),
        pytest.param("llama-3.1-405b", 405_853_388_800, id="Llama 3.1 405B"),
        pytest.param("llama-3.2-1b", 1_235_814_400, id="Llama 3.2 1B with a tied vocabulary"),
        pytest.param("mixtral-8x7b", 46_702_792_704, id="Mixtral 8x7B"),
        pytest.param("deepseek-v2-lite", 15_706_484_224, id="DeepSeek-V2-Lite, queries not compressed"),
        pytest.param("deepseek-v2", 235_741_434_880, id="DeepSeek-V2"),
        pytest.param("deepseek-v3", 671_026_419_200, id="DeepSeek-V3 without multi-token prediction"),
    ],
)
def test_parameters_are_as_many_as_the_released_weights_have(name, parameters):
    assert Transformer.named(name).size == parameters


@pytest.mark.parametrize(
    ("size", "millions"),
    [("125m", 125), ("350m", 356), ("760m", 760), ("1.3b", 1320), ("2.7b", 2650), ("6.7b", 6660), ("13b", 12850)],
)
def test_gpt3_sizes_are_those_of_its_table_of_compute(size, millions):
    assert Transformer.named(f"gpt3-{size}").size / 1e6 == pytest.approx(millions, rel=0.004)


@pytest.mark.parametrize(
    ("size", "billions"),
    [("15b", 15), ("44b", 44), ("117b", 117), ("175b", 175), ("v1", 20), ("v2", 30), ("v3", 28), ("v4", 44)],
)
def test_lumos_models_have_the_parameters_that_it_states(size, billions):
    assert Transformer.named(f"lumos-{size}").size / 1e9 == pytest.approx(billions, rel=0.025)


def test_adapters_are_narrower_than_the_model() -> None:
    train = Training(micro_batch=1, global_batch=8, seq=2048, lora=4097)
    assert "lora is 4097" in " ".join(problems(Transformer.named("llama-3-8b"), Parallelism(), train))


def test_an_unknown_model_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(InputError, match="no model is called 'gpt5'; there are: gpt2-small"):
        Transformer.named("gpt5")


@st.composite
def layouts(draw: st.DrawFn) -> Parallelism:
    power = st.sampled_from([1, 2, 4])
    tp, cp, dp, pp = (draw(power) for _ in range(4))
    zero = draw(st.integers(0, 3))
    shard = draw(st.sampled_from([0, *(s for s in (1, 2, 4) if dp * cp % s == 0)])) if zero else 0
    etp = draw(st.sampled_from([e for e in (1, 2, 4) if tp % e == 0]))
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if tp * cp * dp % (e * etp) == 0]))
    return Parallelism(tp=tp, cp=cp, dp=dp, pp=pp, zero=zero, shard=shard, ep=ep, etp=etp)


@given(layouts())
def test_every_kind_of_group_holds_each_rank_once(layout):
    for kind in GROUPS:
        groups = layout.groups(kind)
        assert np.array_equal(np.sort(groups, axis=None), np.arange(layout.world))
        assert groups.shape[1] == layout.group_size(kind)


@given(layouts())
def test_ranks_lie_as_megatron_places_them(layout):
    for rank in range(layout.world):
        tp, rest = rank % layout.tp, rank // layout.tp
        cp, dp, pp = rest % layout.cp, rest // layout.cp % layout.dp, rest // layout.cp // layout.dp
        place = {"tp": (cp, dp, pp), "cp": (tp, dp, pp), "dp": (tp, cp, pp), "pp": (tp, cp, dp), "dp_cp": (tp, pp)}
        for kind, others in place.items():
            row = np.argwhere(layout.groups(kind) == rank)[0, 0]
            fixed = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
            for peer in layout.groups(kind)[row]:
                peers = (peer % layout.tp, peer // layout.tp % layout.cp)
                deep = peer // layout.tp // layout.cp
                at = dict(zip(("tp", "cp", "dp", "pp"), (*peers, deep % layout.dp, deep // layout.dp), strict=True))
                kept = [key for key in fixed if key not in kind.split("_")]
                assert [at[key] for key in kept] == [fixed[key] for key in kept] == list(others)


@given(layouts())
def test_all_four_come_back_from_json(layout):
    model = Transformer.named("deepseek-v3")
    cluster = Cluster(gpu=find_gpu("A40"), gpus_per_node=1)
    for spec in (model, layout, TRAIN, cluster, NODE):
        assert type(spec).from_json(spec.to_json()) == spec


def test_json_of_another_kind_is_refused_by_field():
    with pytest.raises(LayoutError, match=r"not a Parallelism: .*unknown field `micro_batch`"):
        Parallelism.from_json(TRAIN.to_json())
    with pytest.raises(LayoutError, match=r"not a Parallelism: .*Expected `int`, got `str`.*tp"):
        Parallelism.from_json('{"tp": "two"}')


SMALL = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 512}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: Transformer(**SMALL | {"layers": 0}), "layers is 0; give", id="no layer"),
        pytest.param(lambda: Transformer(**SMALL | {"heads": 5}), r"heads is 5; hidden \(64\)", id="uneven heads"),
        pytest.param(lambda: Transformer(**SMALL, kv_heads=3), "kv_heads is 3; give a divisor", id="uneven groups"),
        pytest.param(lambda: Transformer(**SMALL, positions="learned"), "max_seq is 0; give it", id="no positions"),
        pytest.param(lambda: Moe(experts=4, topk=5, ffn=8), "topk is 5; there are 4", id="more chosen than there are"),
        pytest.param(lambda: Mla(kv_rank=0), "kv_rank is 0", id="no rank"),
        pytest.param(lambda: Parallelism(tp=0), "tp is 0; give", id="no rank of tensor parallelism"),
        pytest.param(
            lambda: Parallelism(pp=2, chunks=2), "chunks is 2; 1f1b takes 1", id="chunks without interleaving"
        ),
        pytest.param(lambda: Parallelism(pp=2, schedule="interleaved"), "takes 2 or more", id="interleaving one chunk"),
        pytest.param(lambda: Parallelism(schedule="zb-v", chunks=2), "with pp=1", id="a V without a pipeline"),
        pytest.param(lambda: Parallelism(zero=4), "zero is 4; give 0", id="no such ZeRO"),
        pytest.param(lambda: Parallelism(dp=4, zero=1, shard=3), "shard is 3; give a divisor", id="uneven shards"),
        pytest.param(lambda: Parallelism(dp=4, shard=2), "shard is 2; .*zero=1", id="shards without ZeRO"),
        pytest.param(lambda: Parallelism(sequence_parallel=True), "sequence_parallel is True", id="sequence over one"),
        pytest.param(lambda: Parallelism(dp=2, ep=4), "ep is 4; ep x etp", id="more expert ranks than ranks"),
        pytest.param(lambda: Parallelism(pp=2, split=(1, 2, 3)), "split is", id="layers of stages that are not there"),
        pytest.param(lambda: Training(micro_batch=0, global_batch=1, seq=8), "micro_batch is 0", id="no micro-batch"),
        pytest.param(lambda: msgspec.structs.replace(TRAIN, capacity=-1.0), "capacity is -1", id="negative capacity"),
        pytest.param(
            lambda: msgspec.structs.replace(TRAIN, imbalance=0.5), "imbalance is 0.5", id="busiest below mean"
        ),
        pytest.param(lambda: Cluster(gpu="A40"), "inside is None; give a Fabric", id="no fabric inside"),
        pytest.param(lambda: Cluster(gpu="A40", nodes=2, gpus_per_node=1), "between is None", id="no fabric between"),
        pytest.param(
            lambda: Cluster(gpu="H100", gpus_per_node=16, inside="NVLink4 NVSwitch"), "joins 8", id="a node too wide"
        ),
    ],
)
def test_what_cannot_be_by_itself_is_refused_with_field_value_and_advice(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


def test_a_gpu_without_a_sheet_is_refused():
    with pytest.raises(InputError, match="no data sheet is called 'H900'"):
        Cluster(gpu="H900", gpus_per_node=1)


@pytest.mark.parametrize(
    ("model", "layout", "train", "message"),
    [
        pytest.param({"heads": 36, "head_dim": 64, "kv_heads": 4}, {"tp": 8}, {}, r"heads \(36\)", id="heads"),
        pytest.param({"heads": 24, "head_dim": 128, "kv_heads": 6}, {"tp": 4}, {}, r"kv_heads \(6\)", id="keys"),
        pytest.param(
            {"heads": 24, "head_dim": 9, "kv_heads": 6}, {"tp": 8}, {}, r"kv_heads \(6\)", id="copies of keys"
        ),
        pytest.param({"ffn": 14337}, {"tp": 2}, {}, r"ffn \(14337\)", id="width of the MLP"),
        pytest.param({}, {"pp": 3}, {}, r"pp is 3; layers \(32\)", id="layers over stages"),
        pytest.param({}, {"pp": 2, "split": (16, 17)}, {}, r"split is \(16, 17\); give 32", id="too many layers"),
        pytest.param({}, {"dp": 3}, {}, "global_batch is 64; give a multiple of", id="batch over replicas"),
        pytest.param({}, {"cp": 3}, {}, r"cp is 3; seq \(4096\)", id="sequence over context ranks"),
        pytest.param({}, {"tp": 8, "sequence_parallel": True}, {"seq": 4100}, r"seq / cp \(4100\)", id="sequence"),
        pytest.param(
            {}, {"pp": 8, "chunks": 2, "schedule": "interleaved"}, {"global_batch": 12}, "12 micro", id="rounds"
        ),
        pytest.param({}, {"dp": 4, "ep": 4}, {}, "ep is 4; the model has no experts", id="no experts"),
        pytest.param({"moe": Moe(experts=6, topk=2, ffn=64)}, {"dp": 4, "ep": 4}, {}, r"experts \(6\)", id="experts"),
        pytest.param({"moe": Moe(experts=6, topk=2, ffn=63)}, {"tp": 2}, {}, r"experts \(63\)", id="cut experts"),
        pytest.param({"positions": "learned", "max_seq": 2048}, {}, {}, "seq is 4096; the model has", id="positions"),
    ],
)
def test_what_cannot_be_together_is_refused_with_field_value_and_advice(model, layout, train, message):
    together = (
        msgspec.structs.replace(LLAMA, **model),
        Parallelism(**layout),
        msgspec.structs.replace(TRAIN, **train),
    )
    with pytest.raises(LayoutError, match=message):
        check(*together)
    assert len(problems(*together)) == 1


def test_a_cluster_needs_as_many_gpus_as_ranks_and_their_number_format():
    check(LLAMA, Parallelism(tp=2, dp=4), TRAIN, NODE)
    assert problems(LLAMA, Parallelism(tp=2), TRAIN, NODE) == [
        "Cluster: nodes is 1; tp x cp x dp x pp is 2 ranks of 8 GPUs: give as many of both."
    ]
    old = Cluster(gpu="V100-SXM-32GB", gpus_per_node=1)
    assert "dtype is 'bf16'; V100-SXM-32GB computes in" in problems(LLAMA, Parallelism(), TRAIN, old)[0]


@settings(max_examples=50)
@given(layouts(), st.sampled_from([1, 2, 4, 8]))
def test_a_group_spans_the_nodes_that_a_plain_count_finds(layout, per_node):
    cluster = Cluster(gpu="H100", nodes=2, gpus_per_node=per_node, inside="NVLink4 NVSwitch", between="RoCE 3200")
    for kind in GROUPS:
        groups = layout.groups(kind)
        widest = max(groups.tolist(), key=lambda group: len({rank // per_node for rank in group}))
        counts = [sum(rank // per_node == node for rank in widest) for node in {rank // per_node for rank in widest}]
        assert cluster.span(groups) == (len(counts), max(counts))


@given(st.sampled_from(sorted(models())), st.integers(1, 4))
def test_parameters_grow_by_what_a_layer_has(name, more):
    model = models()[name]
    longer = msgspec.structs.replace(model, layers=model.layers + more)
    extra = sum(math.prod(w.shape) * w.copies for w in model.weights(model.layers - 1))
    assert longer.size - model.size == more * extra


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Parallelism(schedule="1F1B", pp=2), "schedule is '1F1B'; give 'gpipe' or '1f1b'"),
        (lambda: Parallelism(tp=2.0), "tp is 2.0; give a whole number"),
        (lambda: Parallelism(tp=True), "tp is True; give a whole number"),
        (lambda: Training(micro_batch=1, global_batch=1, seq=1, recompute="Full"), "recompute is 'Full'; give 'none'"),
        (lambda: Training(micro_batch=1, global_batch=1, seq=1, kernels="triton"), "kernels is 'triton'; give 'fused'"),
        (lambda: Training(micro_batch=1, global_batch=1, seq=float("nan")), "seq is nan; give a whole number"),
        (lambda: Training(micro_batch=1, global_batch=1, seq=1, flash="no"), "flash is 'no'; give True or False"),
        (lambda: Training(micro_batch=1, global_batch=1, seq=1, attention=None), "attention is None; give text"),
        (lambda: Transformer(layers=1, hidden=8, heads=1, ffn=8, vocab=8, norm="x"), "norm is 'x'; give 'layer' or"),
        (lambda: Cluster(gpu="H100", inside=3), "inside is 3; give"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_value_of_another_kind_is_refused_by_field(make: Callable[[], object], message: str):
    with pytest.raises(LayoutError, match=re.escape(message)):
        make()


def test_what_is_the_same_in_other_words_is_taken():
    layout = Parallelism(pp=np.int64(2), split=[1, 3])
    assert (layout.pp, layout.split) == (2, (1, 3))
    assert hash(layout) == hash(Parallelism(pp=2, split=(1, 3)))
    model = Transformer(layers=1, hidden=8, heads=1, ffn=8, vocab=8, moe={"experts": 4, "topk": 2, "ffn": 8})
    assert model.moe == Moe(experts=4, topk=2, ffn=8)
