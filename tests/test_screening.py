"""What a search looks at, what it leaves out and why, and that its arrays are what single layouts give."""

from __future__ import annotations

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest

from lumos_nb.costs.calibration import load_calibration
from lumos_nb.errors import InputError, LayoutError, LumosError
from lumos_nb.layout import Cluster, Training, Transformer, problems
from lumos_nb.transformer import Mla, Moe
from lumos_nb.workloads.llm.candidates import AXES, candidate, candidates
from lumos_nb.workloads.llm.estimates import estimate
from lumos_nb.workloads.llm.memory import memory, peak_bytes, peaks
from lumos_nb.workloads.llm.pass_times import Job
from lumos_nb.workloads.llm.screening import SPARE, Found, search
from lumos_nb.workloads.llm.step_times import screen
from lumos_nb.workloads.surcharges import Surcharges, bundled

NODES = Cluster(gpu="H100-SXM-80GB", nodes=4, gpus_per_node=8, inside="NVLink4 NVSwitch", between="InfiniBand NDR 400")
DENSE = Transformer(layers=12, hidden=2048, heads=16, kv_heads=4, ffn=8192, vocab=50000)
GPT = Transformer(
    layers=12, hidden=1024, heads=16, ffn=4096, vocab=50257, gated=False, norm="layer", bias=True,
    positions="learned", max_seq=2048, tied=True,
)  # fmt: skip
MIXED = Transformer(
    layers=12, hidden=1024, heads=16, ffn=4096, vocab=32000, moe=Moe(experts=8, topk=2, ffn=2048, shared=1, first=1),
    mla=Mla(kv_rank=512),
)  # fmt: skip
TRAIN = Training(micro_batch=1, global_batch=128, seq=2048)
PLAIN = {"micro_batch": 1, "recompute": "none"}


def feasible(model: Transformer, train: Training = TRAIN, **ranges: object) -> pl.DataFrame:
    """Layouts on 32 GPUs that can be."""
    return candidates(model, NODES, train, [32], ranges).filter(pl.col("why_not").is_null())


def test_candidates_are_all_combinations_once():
    found = candidates(DENSE, NODES, TRAIN, [32], {"cp": 1, "schedule": "1f1b", "zero": [0, 1], "shard": 0} | PLAIN)
    sizes = {(tp, pp, 32 // tp // pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if 32 % (tp * pp) == 0}
    assert set(found.select("tp", "pp", "dp").rows()) == sizes
    assert found.select(list(AXES)).is_duplicated().sum() == 0
    expected = sum((2 if tp > 1 else 1) * (2 if dp > 1 else 1) for tp, _, dp in sizes)
    assert found.height == expected


@pytest.mark.parametrize("model", [pytest.param(DENSE, id="dense"), pytest.param(MIXED, id="experts")])
def test_reasons_are_those_of_problems(model):
    found = candidates(model, NODES, TRAIN, [8, 32], {"tp": [1, 2, 3, 8], "cp": [1, 16], "micro_batch": [1, 3]})
    rows = found.sample(300, seed=1)
    assert rows["why_not"].null_count() not in (0, rows.height)
    for row in rows.iter_rows(named=True):
        why_not = row["why_not"] or ""
        try:
            said = problems(model, *candidate(row, TRAIN, NODES))
            assert len(why_not) == len(" ".join(said))
        except LayoutError as error:  # a layout that is none by itself: the first reason of all
            said = [str(error)]
        assert all(line in why_not for line in said)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        pytest.param({"tb": 1}, "no axis is called tb; there are: gpus, tp", id="unknown axis"),
        pytest.param({"tp": "2"}, "tp='2': give one int", id="text for a number"),
        pytest.param({"tp": [2, True]}, "tp=True: give one int", id="truth for a number"),
        pytest.param({"pp": 0}, "pp=0: give one int", id="no stage"),
        pytest.param({"shard": -2}, "shard=-2", id="less than a node"),
        pytest.param({"recompute": 1}, "recompute=1: give one str", id="number for text"),
    ],
)
def test_axes_that_cannot_be_are_refused(ranges, message):
    with pytest.raises(InputError, match=message):
        candidates(DENSE, NODES, TRAIN, [32], ranges)


@pytest.mark.parametrize("gpus", [0, 12, 64])
def test_only_whole_nodes_of_the_cluster_are_taken(gpus):
    with pytest.raises(LayoutError, match=f"gpus={gpus}: give a part of one node of 8, or whole ones of the 4"):
        candidates(DENSE, NODES, TRAIN, [gpus], {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"dtype": "fp8"}, "dtype is 'fp8'; A100-SXM-80GB computes in", id="format of another GPU"),
        pytest.param({"seq": 4096}, r"seq is 4096; the model has 2048 learned positions", id="sequence too long"),
    ],
)
def test_what_no_layout_can_be_for_is_refused_at_once(changes, message):
    cluster = msgspec.structs.replace(NODES, gpu="A100-SXM-80GB")
    with pytest.raises(LayoutError, match=message):
        candidates(GPT, cluster, msgspec.structs.replace(TRAIN, **changes), [32], {})


SETTINGS = {
    "mixed precision": TRAIN,
    "apart": Training(
        micro_batch=1, global_batch=96, seq=1024, fused_grads=False, bucket_copies=True, regather=False, dropout=True,
        flash=False, logit_bytes=6, prefetch=2,
    ),
    "adapters": Training(micro_batch=1, global_batch=128, seq=2048, lora=8, fused_grads=False),
    "fp32": Training(micro_batch=1, global_batch=256, seq=2048, dtype="fp32", optimizer="momentum", master=False),
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "model", [pytest.param(DENSE, id="dense"), pytest.param(GPT, id="GPT"), pytest.param(MIXED, id="experts")]
)
def test_peaks_are_those_of_memory(model, setting):
    train = SETTINGS[setting]
    ranges = {"schedule": ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"], "cp_mode": ["ring", "all_gather"]}
    found = feasible(model, train, **ranges).sample(25, seed=7)
    most, stage = peaks(model, train, found)
    for row, used, at in zip(found.iter_rows(named=True), most, stage, strict=True):
        layout, changed, _ = candidate(row, train, NODES)
        assert used == pytest.approx(peak_bytes(model, layout, changed), rel=1e-9)
        assert 0 <= at < layout.pp


def test_no_layouts_have_no_peaks():
    most, stage = peaks(DENSE, TRAIN, feasible(DENSE, tp=1).clear())
    assert most.shape == stage.shape == (0,)


ROUTED = Transformer(
    layers=8, hidden=1024, heads=16, kv_heads=4, ffn=4096, vocab=32000, moe=Moe(experts=8, topk=2, ffn=4096)
)
H100 = load_calibration("H100-SXM-80GB")
SMALL = Training(micro_batch=1, global_batch=64, seq=2048)
SEEDS = range(2)
OVERLAPS = ("overlap_tp", "overlap_wgrad", "overlap_pp")


def errors(model: Transformer, train: Training, seed: int, count: int, **ranges: object) -> pl.DataFrame:
    """Random layouts with the screen's `error` against the replay, in percent."""
    found = feasible(model, train, **ranges).sample(count, seed=seed)
    screened = screen(Job(model, train, NODES, H100, bundled().every), found)
    replayed = [estimate(model, *candidate(row, train, NODES), H100).step_s for row in found.iter_rows(named=True)]
    return found.with_columns(error=pl.Series(100 * (screened / np.array(replayed) - 1)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param(DENSE, {}, id="Llama"),
        pytest.param(GPT, {"bucket_bytes": 25_000_000}, id="GPT with small buckets"),
        pytest.param(DENSE, {"overlap_tp": True}, id="tensor parallel pieces"),
        pytest.param(DENSE, {"overlap_wgrad": False, "overlap_pp": False}, id="nothing beside products"),
        pytest.param(GPT, {"kernels": "eager"}, id="host-bound"),
        pytest.param(DENSE, {"lora": 16}, id="frozen weights with adapters"),
        pytest.param(DENSE, {"fused_grads": False, "early_stop": True}, id="gradients added apart"),
    ],
)
def test_screen_and_replay_agree_within_3_percent(model, changes, seed):
    train = msgspec.structs.replace(SMALL, **changes)
    found = errors(model, train, seed, 4, cp_mode=["ring", "all_gather"])
    assert found["error"].abs().max() < 3, found.sort(pl.col("error").abs()).tail(1).rows()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", [pytest.param(MIXED, id="DeepSeek"), pytest.param(ROUTED, id="Mixtral")])
def test_screen_of_experts_agrees_within_3_percent_and_6_where_their_weights_are_gathered(model, seed):
    found = errors(model, SMALL, seed, 4)
    most = pl.when(pl.col("zero") == 3).then(6).otherwise(3)
    assert found.filter(pl.col("error").abs() > most).is_empty(), found.sort(pl.col("error").abs()).tail(1).rows()


def test_steps_of_many_micro_batches_are_followed_as_if_all_were():
    many = msgspec.structs.replace(SMALL, global_batch=512)
    found = errors(DENSE, many, 0, 2, pp=[4, 8], micro_batch=1, cp=1)
    assert found["error"].abs().max() < 3


def found_of(**options: object) -> Found:
    """A small search."""
    ranges = {"cp": 1, "micro_batch": [1, 2], "schedule": ["1f1b", "interleaved"], "chunks": [1, 3], "tp": [1, 8]}
    return search(DENSE, NODES, SMALL, H100, **{"keep": 3, **ranges, **options})


def test_the_best_are_estimated_and_come_first():
    found = found_of()
    frame = found.frame
    feasible = frame.filter("feasible")
    assert frame["feasible"].to_list() == sorted(frame["feasible"].to_list(), reverse=True)
    assert feasible["replayed_s"].null_count() == feasible.height - 3
    assert feasible.head(3)["step_s"].is_sorted()
    assert feasible.slice(3)["screened_s"].is_sorted()
    best = estimate(DENSE, *found.best, H100)
    assert frame["step_s"][0] == frame["replayed_s"][0] == best.step_s
    assert frame["tokens_per_s"][0] == pytest.approx(best.tokens_per_s)
    assert frame["low_s"][0] == best.low_s < best.step_s < best.high_s
    assert found.pick(5).layout.world == 32
    with pytest.raises(InputError, match="row 99999"):
        found.pick(99999)


def test_an_executor_changes_nothing_and_progress_is_told():
    told: list[tuple[str, int, int]] = []
    with ThreadPoolExecutor(2) as executor:
        found = found_of(executor=executor, progress=lambda *done: told.append(done))
    assert found.frame.equals(found_of().frame)
    assert [what for what, *_ in told] == ["memory", "screen", "screen", "replay", "replay", "replay"]
    assert all(done <= of for _, done, of in told)
    assert told[-1] == ("replay", 3, 3)


def test_processes_replay():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        found = found_of(executor=executor, keep=1, tp=8, micro_batch=1, zero=0)
    assert found.frame["replayed_s"][0] == estimate(DENSE, *found.best, H100).step_s


def test_what_does_not_fit_says_how_much_it_needs_and_where():
    small = msgspec.structs.replace(H100.gpu, memory_bytes=9e9)
    cluster = msgspec.structs.replace(NODES, gpu=small)
    found = search(DENSE, cluster, SMALL, H100.for_gpu(small), keep=0, cp=1, schedule="1f1b", pp=[1, 4])
    full = found.frame.filter(pl.col("why_not").str.starts_with("memory"))
    assert 0 < full.height < found.frame.height
    assert full["memory_bytes"].min() > 9e9 * (1 - SPARE) >= found.feasible["memory_bytes"].max()
    to_the_brim = search(DENSE, cluster, SMALL, H100.for_gpu(small), keep=0, spare=0, cp=1, schedule="1f1b", pp=[1, 4])
    assert to_the_brim.feasible.height == (found.frame["memory_bytes"] <= 9e9).sum() > found.feasible.height
    row = full.row(0, named=True)
    layout, train, _ = candidate(row, SMALL, cluster)
    of_stage = memory(DENSE, layout, train).group_by("stage").agg(pl.col("bytes").sum())
    at = of_stage.filter(stage=row["memory_stage"])["bytes"].item()
    assert at == of_stage["bytes"].max() == pytest.approx(row["memory_bytes"])
    needs = f"memory: pipeline rank {row['memory_stage']} needs {at / 1e9:.1f} GB of 9.00 GB, of which 10% are to stay"
    assert row["why_not"].startswith(needs)


def test_the_front_holds_all_that_nothing_beats_and_nothing_else():
    found = found_of(gpus=[8, 16, 32], keep=0)
    rows = found.feasible.select("gpus", "step_s", "memory_bytes").unique().rows()
    unbeaten = {
        row
        for row in rows
        if not any(other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in rows)
    }
    assert set(found.pareto.select("gpus", "step_s", "memory_bytes").rows()) == unbeaten
    assert len(found.pareto["gpus"].unique()) > 1


def test_a_search_shows_itself():
    text, html = repr(found_of()), found_of()._repr_html_()
    assert "32 GPUs" in text or "layouts can be and fit, 3 replayed" in text
    assert "step s" in text
    assert "<table>" in html


def test_where_nothing_can_be_the_obstacle_is_named():
    found = found_of(tp=3, gpus=24)
    assert found.pareto.is_empty()
    with pytest.raises(LayoutError, match=r"no layout of \d+ can be. In the way: Parallelism: tp \(\d+\)"):
        _ = found.best


def test_surcharges_reach_screen_and_replay():
    slow = Surcharges(sustained={"other": 0.5})
    found = found_of(surcharges=slow, keep=1)
    assert found.frame["replayed_s"][0] == estimate(DENSE, *found.best, H100, surcharges=slow).step_s
    assert found.frame["screened_s"][0] == pytest.approx(found.frame["replayed_s"][0], rel=0.03)


@pytest.mark.parametrize("keep", [-1, 2.5, True])
def test_keep_is_a_number(keep):
    with pytest.raises(InputError, match=f"keep={keep}: give a whole number from 0"):
        found_of(keep=keep)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dp": 3}, "no layout of 8 GPUs has dp=3"),
        ({"tp": []}, "tp=[]: give at least one value"),
        ({"recompute": "all"}, "recompute='all': there are 'none', 'selective', 'full'"),
        ({"zero": 5}, "zero=5: there are 0, 1, 2, 3"),
        ({"gpus": []}, "gpus=[]: give a number of GPUs"),
        ({"gpus": "8"}, "gpus='8': give a part of one node"),
        ({"gpus": 8.0}, "gpus=8.0: give a part of one node"),
        ({"surcharges": "x"}, "surcharges is 'x'"),
        ({"executor": 3}, "executor is 3"),
        ({"progress": 3}, "progress is 3"),
    ],
    ids=str,
)
def test_what_a_search_cannot_be_asked_is_said(given: dict[str, Any], message: str):
    cluster = Cluster(gpu=H100.gpu, inside="NVLink4 NVSwitch")
    with pytest.raises(LumosError, match=re.escape(message)):
        search(DENSE, cluster, SMALL, H100, keep=0, **given)


def test_one_gpu_is_searched_too():
    found = search(DENSE, Cluster(gpu=H100.gpu, gpus_per_node=1), SMALL, H100, keep=1)
    assert found.best.layout.world == 1


def test_the_order_of_values_does_not_matter():
    cluster = Cluster(gpu=H100.gpu, inside="NVLink4 NVSwitch")
    frames = [
        search(DENSE, cluster, SMALL, H100, keep=2, pp=1, cp=1, micro_batch=1, recompute="none", **ranges).frame
        for ranges in ({"tp": [1, 2], "zero": [0, 3]}, {"tp": [2, 1], "zero": [3, 0]})
    ]
    assert frames[0].equals(frames[1])
