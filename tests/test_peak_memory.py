"""Peaks of every rank, and of thousands of layouts, are those of a count that leaves out no pass and no layer."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from itertools import pairwise

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings

from lumos_nb.errors import InputError, LayoutError
from lumos_nb.layout import Cluster, Parallelism, Training, Transformer
from lumos_nb.transformer import Moe
from lumos_nb.workloads.llm.candidates import candidate, candidates
from lumos_nb.workloads.llm.memory import memory, peak_bytes, peaks
from lumos_nb.workloads.llm.passing_memory import _unsurpassed
from lumos_nb.workloads.llm.schedule import order
from tests.memory_jobs import SCHEDULES, jobs, plain_peaks


def by_stage(model: Transformer, layout: Parallelism, train: Training) -> list[int]:
    """Bytes of each rank at its peak."""
    frame = memory(model, layout, train)
    return frame.group_by("stage", maintain_order=True).agg(pl.col("bytes").sum())["bytes"].to_list()


def test_the_ranks_of_a_long_pipeline_hold_one_micro_batch_less_each():
    layout, train = Parallelism(tp=8, pp=8), Training(micro_batch=1, global_batch=64, seq=4096)
    used = [size / 2**30 for size in by_stage(Transformer.named("llama-3-70b"), layout, train)]
    assert used == pytest.approx([50.54, 44.57, 40.80, 37.03, 33.26, 29.49, 25.72, 24.89], abs=0.005)
    fewer = [before - behind for before, behind in pairwise(used[1:-1])]
    assert fewer == pytest.approx([fewer[0]] * len(fewer))


@settings(max_examples=150, deadline=None)
@given(job=jobs(rounds=4))
def test_every_rank_uses_what_is_counted_pass_by_pass(job):
    plain = plain_peaks(*job)
    assert by_stage(*job) == pytest.approx(plain, abs=5)
    assert peak_bytes(*job) == pytest.approx(plain.max(), rel=1e-12)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 5, 16])
def test_behind_a_forward_pass_comes_one_more_or_a_backward_pass(kind, pp):
    """So that a forward pass, which holds less than what follows it, is never the peak of a rank."""
    chunks = {"interleaved": 3, "zb-v": 2}.get(kind, 1)
    for count in (pp, 2 * pp, 5 * pp, *(() if kind == "interleaved" else (1, pp - 1, pp + 1))):
        stage, phase, *_ = order(kind, pp, count, chunks)
        behind = phase[1:][(phase[:-1] == 0) & (stage[:-1] == stage[1:])]
        assert len(behind) == pp * count * chunks
        assert set(behind.tolist()) <= {0, 1}


@pytest.mark.parametrize("sizes", [1, 2, 3, 5])
@pytest.mark.parametrize("most", [3, 30])
def test_of_each_group_what_is_greatest_by_any_weights_is_kept_and_of_a_line_its_ends(sizes, most):
    rng = np.random.default_rng(sizes)
    for _ in range(40):
        group, points = rng.integers(0, 3, 60), rng.integers(0, most, (sizes, 60))
        kept = _unsurpassed([group], [*points])
        for weights in rng.exponential(size=(50, sizes)) * rng.integers(0, 2, (50, sizes)):
            for some in range(3):
                of_all, of_kept = (weights @ points[:, rows] for rows in (group == some, kept[group[kept] == some]))
                assert of_kept.max() == pytest.approx(of_all.max(), rel=1e-12)
    line = np.arange(9)
    assert _unsurpassed([np.zeros(9, np.int64)], [line, 8 - line]).tolist() == [0, 8]
    assert _unsurpassed([line % 2], [np.ones(9, np.int64)]).tolist() == [0, 1]


CLUSTER = Cluster(
    gpu="H100-SXM-80GB", nodes=4, gpus_per_node=8, inside="NVLink4 NVSwitch", between="InfiniBand NDR 400"
)
DENSE = Transformer(layers=16, hidden=1024, heads=16, kv_heads=4, ffn=4096, vocab=50000)
MODELS = {
    "dense": DENSE,
    "small head": msgspec.structs.replace(DENSE, vocab=64, tied=True),
    "experts": msgspec.structs.replace(DENSE, moe=Moe(experts=8, topk=2, ffn=2048)),
    "experts behind dense layers": msgspec.structs.replace(DENSE, moe=Moe(experts=8, topk=2, ffn=2048, first=3)),
    "experts in turn": msgspec.structs.replace(DENSE, moe=Moe(experts=8, topk=2, ffn=2048, every=2)),
}
TRAIN = Training(micro_batch=1, global_batch=8, seq=2048)
TRAINS = {
    "usual": {},
    "apart": {"fused_grads": False, "bucket_copies": True, "dropout": True, "flash": False, "prefetch": 2},
    "adapters": {"lora": 8, "dropout": True, "prefetch": 0},
    "small loss": {"logit_bytes": 4, "regather": False},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("train", TRAINS)
def test_peaks_of_many_layouts_are_those_counted_pass_by_pass(model, train):
    training = Training(micro_batch=1, global_batch=128, seq=1024, **TRAINS[train])
    found = candidates(MODELS[model], CLUSTER, training, [32], {"schedule": SCHEDULES}).filter(
        pl.col("why_not").is_null()
    )
    long = found.filter(pl.col("pp") >= 4)
    some = pl.concat([found.sample(20, seed=3), long.sample(40, seed=5)])
    assert some["pp"].max() == 16
    most, stage = peaks(MODELS[model], training, some)
    for row, used, at in zip(some.iter_rows(named=True), most, stage, strict=True):
        layout, changed, _ = candidate(row, training, CLUSTER)
        plain = plain_peaks(MODELS[model], layout, changed)
        assert used == pytest.approx(plain.max(), rel=1e-12), row
        assert plain[at] == pytest.approx(used, rel=1e-12), row
        assert at == np.flatnonzero(plain > used * (1 - 1e-12))[0], row


@pytest.mark.parametrize(
    "fragmentation", ["0.1", None, [0.1], True, 1j, -1, -0.1, math.nan, math.inf, 10**400], ids=str
)
def test_fragmentation_is_a_finite_number(fragmentation):
    with pytest.raises(InputError, match=r"fragmentation=.+: give a finite number of at least 0\."):
        memory(DENSE, Parallelism(), TRAIN, fragmentation=fragmentation)


@pytest.mark.parametrize(
    ("seq", "fragmentation"), [(2048, 1e300), (2048, 2**1000), (2048, sys.float_info.max), (2**31 - 1, 0.0)]
)
def test_bytes_that_no_int64_counts_are_refused(seq, fragmentation):
    train = msgspec.structs.replace(TRAIN, seq=seq, flash=False)
    with pytest.raises(LayoutError, match=r"a rank needs \S+ bytes, with fragmentation=\S+, of 4.6e\+18 at most: give"):
        memory(DENSE, Parallelism(), train, fragmentation=fragmentation)


def test_a_fraction_of_any_kind_is_a_share():
    half = [
        memory(DENSE, Parallelism(), TRAIN, fragmentation=share) for share in (0.5, Fraction(1, 2), np.float64(0.5))
    ]
    assert half[0].equals(half[1])
    assert half[0].equals(half[2])
