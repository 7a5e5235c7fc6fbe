"""Estimates from configuration: the laid-out step against closed forms, and what must hold for any configuration."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks.schedule_graphs import as_graph
from lumos_nb.config import find_fabric, find_gpu
from lumos_nb.costs.calibration import load_calibration
from lumos_nb.critical_path import replay
from lumos_nb.errors import InputError, LayoutError
from lumos_nb.layout import Cluster, Parallelism, Training, problems
from lumos_nb.transformer import Mla, Moe, Transformer
from lumos_nb.workloads.contention import overlap_ns
from lumos_nb.workloads.llm.assembly import assembled
from lumos_nb.workloads.llm.estimates import Estimate, PricedStep, estimate, stages_of
from lumos_nb.workloads.llm.schedule import schedule
from lumos_nb.workloads.llm.stages import work
from lumos_nb.workloads.surcharges import Surcharges, bundled

SIZES: dict[str, Any] = {"layers": 8, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 32000}
LLAMA = Transformer(**SIZES)
MOE = Transformer(**SIZES, moe=Moe(experts=8, topk=2, ffn=512))
DEEPSEEK = Transformer(**SIZES, moe=Moe(experts=8, topk=2, ffn=512, shared=1, first=1), mla=Mla(kv_rank=64, q_rank=96))
H100 = load_calibration("H100-SXM-80GB")
NONE = Surcharges()
INSIDE, BETWEEN = find_fabric("NVLink4 NVSwitch"), find_fabric("InfiniBand NDR 400")


def cluster(gpus: int, faster: float = 1.0) -> Cluster:
    """Nodes of at most eight H100, on fabrics with so many times their bandwidth."""
    inside, between = (
        msgspec.structs.replace(sheet, bytes_per_s=sheet.bytes_per_s * faster) for sheet in (INSIDE, BETWEEN)
    )
    return Cluster(gpu=H100.gpu, nodes=-(-gpus // 8), gpus_per_node=min(gpus, 8), inside=inside, between=between)


def of(
    layout: Parallelism, model: Transformer = LLAMA, *, faster: float = 1.0, extra: Surcharges = NONE, **train: Any
) -> Estimate:
    """The estimate of a layout."""
    made = Training(**{"micro_batch": 1, "global_batch": 16, "seq": 1024, **train})
    return estimate(model, layout, made, cluster(layout.world, faster), H100, surcharges=extra)


def flat(layout: Parallelism, train: Training, took_us: float) -> list[pl.DataFrame]:
    """Work tables in which every product takes as long and nothing else takes any time."""
    price = pl.when((pl.col("kind") == "compute") & (pl.col("when") == "each")).then(took_us).otherwise(0.0)
    priced = dict.fromkeys(("dur_us", "low_us", "high_us"), price)
    return [
        work(LLAMA, layout, train, depth).with_columns(stage=pl.lit(stage), depth=pl.lit(depth, pl.Int32), **priced)
        for depth, stage in enumerate(stages_of(layout))
    ]


@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2)])
def test_a_step_of_passes_alone_takes_what_its_schedule_takes(kind: Any, chunks: int) -> None:
    layout = Parallelism(pp=4, chunks=chunks, schedule=kind)
    train = Training(micro_batch=1, global_batch=8, seq=1024)
    tables = flat(layout, train, 10.0)
    phases = {"forward": ("forward",), "backward_input": ("backward",), "backward_weight": ("backward_weight",)}
    if not kind.startswith("zb"):
        phases = {"forward": ("forward",), "backward": ("backward", "backward_weight")}
    took = {
        name: np.array([t.filter(pl.col("phase").is_in(of))["dur_us"].sum() * 1e3 for t in tables])
        for name, of in phases.items()
    }
    stages = np.array(stages_of(layout))
    by_rank = {
        name: np.array([[us[np.flatnonzero(stages == s)[c]] for c in range(chunks)] for s in range(4)])
        for name, us in took.items()
    }
    expected = replay(as_graph(schedule(kind, 4, 8, chunks), by_rank)).step_ns
    assert replay(assembled(pl.concat(tables), layout, train).graph()).step_ns == expected


@pytest.mark.parametrize("model", [LLAMA, MOE, DEEPSEEK], ids=["llama", "moe", "mla"])
@pytest.mark.parametrize(
    "layout",
    [
        Parallelism(tp=2, pp=2, dp=2, zero=1, sequence_parallel=True),
        Parallelism(dp=8, zero=3),
        Parallelism(dp=4, cp=2, zero=2),
        Parallelism(tp=2, dp=2, pp=2, chunks=2, schedule="interleaved"),
        Parallelism(pp=4, schedule="zb-h1", dp=2),
        Parallelism(pp=4, schedule="zb-v", chunks=2),
    ],
    ids=["tp2-pp2-zero1", "fsdp", "cp2-zero2", "interleaved", "zb-h1", "zb-v"],
)
def test_every_row_of_every_pass_is_in_the_graph_once(model: Transformer, layout: Parallelism) -> None:
    found = of(layout, model)
    count = found.train.micro_batches(layout)
    times = pl.col("when").replace_strict({"each": count, "last": 1, "step": 1})
    tables = [work(model, layout, found.train, depth) for depth in range(layout.pp * layout.chunks)]
    assert len(found.graph.ops) == sum(int(table.select(times.sum()).item()) for table in tables)
    assert found.step_s > 0


@pytest.mark.parametrize(
    ("layout", "off"),
    [
        (Parallelism(dp=2, zero=3), 1e-6),
        (Parallelism(pp=4, dp=2, zero=1), 1e-6),
        (Parallelism(tp=2, pp=2, chunks=4, schedule="interleaved"), 1e-6),
        (Parallelism(pp=4, schedule="zb-h1", zero=3, dp=2), 5e-3),
        (Parallelism(pp=2, schedule="zb-v", chunks=2), 5e-3),
    ],
)
def test_a_step_of_many_micro_batches_follows_from_few(layout: Parallelism, off: float) -> None:
    train = Training(micro_batch=1, global_batch=layout.dp * 90, seq=512)
    cluster = Cluster(gpu=H100.gpu, gpus_per_node=layout.world, inside="NVLink4 NVSwitch")
    step = PricedStep.of(LLAMA, layout, train, cluster, H100)
    few, whole = step.brief(bundled().every), step.estimate(bundled().every)
    assert few.step_s == pytest.approx(whole.step_s, rel=off)
    assert few.high_s / few.low_s == pytest.approx(whole.high_s / whole.low_s, rel=1e-2)


def test_gradients_are_summed_beside_products_unless_that_is_switched_off() -> None:
    layout = Parallelism(dp=16)
    beside, behind = (of(layout, bucket_bytes=2**22, overlap_grads=on).step_s for on in (True, False))
    transfers = of(layout).step.table.filter(part="gradients")["dur_us"].sum() / 1e6
    assert beside < behind < beside + 1.5 * transfers


def test_weights_are_gathered_beside_products_unless_that_is_switched_off() -> None:
    for zero in (1, 3):
        layout = Parallelism(dp=16, zero=zero)
        train = {"bucket_bytes": 2**22}
        assert of(layout, **train).step_s < of(layout, overlap_weights=False, **train).step_s


def test_a_host_that_is_slow_decides_and_a_fast_one_does_not() -> None:
    layout = Parallelism(dp=2)
    rows = len(of(layout).graph.ops)
    assert of(layout, launch_us=500.0).step_s == pytest.approx(rows * 500e-6, rel=0.02)
    assert of(layout, launch_us=0.5).step_s == pytest.approx(of(layout).step_s, rel=0.01)


def test_tensor_parallel_sums_hide_behind_products_for_weights_and_more_if_cut_up() -> None:
    layout = Parallelism(tp=8, sequence_parallel=True)
    no, by_weight, all_of_it = (
        of(layout, seq=4096, **switch).step_s for switch in ({"overlap_wgrad": False}, {}, {"overlap_tp": True})
    )
    assert all_of_it < by_weight < no


def test_flops_utilisation_counts_a_model_once() -> None:
    layout = Parallelism(dp=2, pp=2)
    plain, again = of(layout), of(layout, recompute="full")
    tokens = plain.train.global_batch * plain.train.seq
    products = 6 * (LLAMA.size - LLAMA.vocab * LLAMA.hidden) * tokens  # the embedding is looked up
    attention = 3 * 2 * LLAMA.layers * plain.train.seq * LLAMA.hidden * tokens
    assert plain.mfu * plain._peak_flops == pytest.approx(products + attention, rel=0.02)
    assert again.mfu * again._peak_flops == pytest.approx(plain.mfu * plain._peak_flops)
    assert again.hfu / again.mfu > 1.25 > 1.1 > plain.hfu / plain.mfu


layouts = st.builds(
    dict,
    tp=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]),
)
trainings = st.builds(
    dict,
    recompute=st.sampled_from(["none", "selective", "full"]),
    overlap_grads=st.booleans(),
    overlap_weights=st.booleans(),
    overlap_tp=st.booleans(),
    overlap_wgrad=st.booleans(),
    overlap_pp=st.booleans(),
    bucket_bytes=st.sampled_from([0, 2**22]),
    launch_us=st.sampled_from([None, 0.0, 5.0]),
    kernels=st.sampled_from(["fused", "compiled", "eager"]),
)
extras = st.sampled_from([NONE, bundled().every])


def possible(sizes: dict[str, Any], train: dict[str, Any], model: Transformer = LLAMA) -> Parallelism:
    """A layout of drawn sizes; impossible ones are drawn again."""
    sizes = sizes | {"sequence_parallel": sizes["sequence_parallel"] and sizes["tp"] > 1}
    if sizes["pp"] == 1:
        sizes["schedule"] = "1f1b"
    sizes["chunks"] = 2 if sizes["schedule"] in ("interleaved", "zb-v") else 1
    layout = Parallelism(**sizes)
    assume(not problems(model, layout, Training(micro_batch=1, global_batch=16, seq=1024, **train)))
    return layout


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(layouts, trainings, extras)
def test_more_bandwidth_never_slows_a_step(sizes: dict[str, Any], train: dict[str, Any], extra: Surcharges) -> None:
    layout = possible(sizes, train)
    assert of(layout, faster=1.5, extra=extra, **train).step_s <= of(layout, extra=extra, **train).step_s


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(layouts, trainings, st.sampled_from([LLAMA, MOE]), extras)
def test_more_layers_never_speed_a_step(
    sizes: dict[str, Any], train: dict[str, Any], model: Transformer, extra: Surcharges
) -> None:
    layout = possible(sizes, train, model)
    deeper = msgspec.structs.replace(model, layers=16)
    assert of(layout, deeper, extra=extra, **train).step_s >= of(layout, model, extra=extra, **train).step_s


def test_what_does_not_go_together_is_refused_before_anything_is_priced() -> None:
    with pytest.raises(LayoutError, match=r"heads \(16\) is no multiple"):
        of(Parallelism(tp=3))
    one, train = Parallelism(), Training(micro_batch=1, global_batch=1, seq=128)
    older = Cluster(gpu="A100-SXM-80GB", nodes=1, gpus_per_node=1)
    with pytest.raises(InputError, match="the calibration is of H100-SXM-80GB, the cluster of A100"):
        estimate(LLAMA, one, train, older, H100)
    with pytest.raises(InputError, match="give one of load_calibration"):
        estimate(LLAMA, one, train, cluster(1), "h100")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["model", "layout", "train", "cluster", "surcharges"])
def test_an_argument_of_another_kind_is_named(wrong: str) -> None:
    train = Training(micro_batch=1, global_batch=1, seq=128)
    given: dict[str, Any] = {"model": LLAMA, "layout": Parallelism(), "train": train, "cluster": cluster(1)}
    with pytest.raises(InputError, match=f"{wrong} is 'x'; give a "):
        estimate(**given | {wrong: "x"})


def test_a_schedule_without_a_pipeline_is_refused() -> None:
    with pytest.raises(LayoutError, match="schedule is 'gpipe'; with pp=1 there is no pipeline"):
        of(Parallelism(dp=2, schedule="gpipe"))


def test_no_more_is_done_than_counted_as_hardware_flops() -> None:
    tiny = Transformer(layers=1, hidden=64, heads=1, ffn=1000, vocab=1, norm="layer", positions="none", tied=True)
    found = of(Parallelism(dp=4), tiny, flash=False)
    assert found.hfu >= found.mfu > 0


def test_a_step_without_end_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(LayoutError, match="give fewer layers, or a larger micro_batch"):
        of(Parallelism(), msgspec.structs.replace(LLAMA, layers=10**5), global_batch=2048)


def test_an_attention_that_nobody_measured_is_warned_of() -> None:
    one = Parallelism()
    assert not any("attention" in text for text in of(one).warnings)
    assert any("'mine' has no price here" in text for text in of(one, attention="mine").warnings)


def test_a_gpu_of_ones_own_is_priced_by_its_sheet() -> None:
    mine = msgspec.structs.replace(find_gpu("L40S"), name="mine")
    train = Training(micro_batch=1, global_batch=1, seq=1024)
    found = estimate(LLAMA, Parallelism(), train, Cluster(gpu=mine, nodes=1, gpus_per_node=1))
    assert "measured" not in found.basis["basis"].to_list()
    assert found.low_s < found.step_s < found.high_s


def test_overlap_with_a_union_is_counted_once() -> None:
    starts, durs = np.array([0, 10, 100]), np.array([10, 30, 5])
    found = overlap_ns(starts, durs, np.array([5, 8, 20, 25]), np.array([10, 4, 3, 50]))
    assert found.tolist() == [5, 23, 0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"near": 0.0}, "near is 0.0; give a number above 0"),
        ({"sustained": {"H100-SXM-80GB": -0.7}}, "sustained of H100-SXM-80GB is -0.7; give a number above 0"),
        ({"spread": float("nan")}, "spread is nan; give a number of at least 0"),
        ({"launch_us": {"eager": "slow"}}, "launch_us of eager is 'slow'; give a number of at least 0"),
        ({"moves": {"Fused": 1.1}}, "moves of Fused is 1.1; kinds of kernels are fused, compiled, eager"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_surcharges_that_cannot_be_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Surcharges(**given)


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_a_bubble_is_all_time_in_which_devices_do_nothing(kind: Any) -> None:
    layout = Parallelism(pp=4, schedule=kind)
    model = msgspec.structs.replace(LLAMA, layers=64, vocab=64)  # so that every stage takes nearly as long
    slow, fast = (of(layout, model, faster=100, launch_us=launch_us) for launch_us in (None, 0.001))
    assert slow.step_ns == pytest.approx(fast.step_ns, abs=10)
    assert slow.bubble == pytest.approx(fast.bubble, abs=1e-6)
    assert slow.bubble == pytest.approx(3 / (16 + 3), abs=0.02)  # of 4 stages and 16 micro-batches
    more = of(layout, model, faster=100, global_batch=64)
    assert more.bubble == pytest.approx(3 / (64 + 3), abs=0.02)
