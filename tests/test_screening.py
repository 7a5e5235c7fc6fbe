"""What a search looks at, what it leaves out and why, and that its arrays are what single layouts give."""

from __future__ import annotations

import polars as pl
import pytest

from lumos_nb.errors import InputError, LayoutError
from lumos_nb.layout import Cluster, Training, Transformer, problems
from lumos_nb.transformer import Mla, Moe
from lumos_nb.workloads.llm.candidates import AXES, candidate, candidates
from lumos_nb.workloads.llm.memory import peak_bytes
from lumos_nb.workloads.llm.peaks import peaks

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
        pytest.param({"tp": "2"}, "tp='2': give a int", id="text for a number"),
        pytest.param({"tp": [2, True]}, "tp=True: give a int", id="truth for a number"),
        pytest.param({"pp": 0}, "pp=0: give a int that it may be", id="no stage"),
        pytest.param({"shard": -2}, "shard=-2", id="less than a node"),
        pytest.param({"recompute": 1}, "recompute=1: give a str", id="number for text"),
    ],
)
def test_axes_that_cannot_be_are_refused(ranges, message):
    with pytest.raises(InputError, match=message):
        candidates(DENSE, NODES, TRAIN, [32], ranges)


@pytest.mark.parametrize("gpus", [0, 12, 64])
def test_only_whole_nodes_of_the_cluster_are_taken(gpus):
    with pytest.raises(LayoutError, match=f"gpus={gpus}: give a part of one node of 8, or whole ones of the 4"):
        candidates(DENSE, NODES, TRAIN, [gpus], {})


SETTINGS = {
    "mixed precision": TRAIN,
    "apart": Training(
        micro_batch=1, global_batch=96, seq=1024, fused_grads=False, bucket_copies=True, regather=False, dropout=True,
        flash=False, logit_bytes=6, prefetch=2,
    ),
    "fp32": Training(micro_batch=1, global_batch=256, seq=2048, dtype="fp32", optimizer="momentum", master=False),
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "model", [pytest.param(DENSE, id="dense"), pytest.param(GPT, id="GPT"), pytest.param(MIXED, id="experts")]
)
def test_peaks_are_those_of_memory(model, setting):
    train = SETTINGS[setting]
    ranges = {"schedule": ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"], "cp_mode": ["ring", "all_gather"]}
    found = feasible(model, train, **ranges).sample(60, seed=7)
    most, stage = peaks(model, train, found)
    for row, used, at in zip(found.iter_rows(named=True), most, stage, strict=True):
        layout, changed, _ = candidate(row, train, NODES)
        assert used == pytest.approx(peak_bytes(model, layout, changed), rel=1e-9)
        assert 0 <= at < layout.pp


def test_no_layouts_have_no_peaks():
    most, stage = peaks(DENSE, TRAIN, feasible(DENSE, tp=3))
    assert most.shape == stage.shape == (0,)
