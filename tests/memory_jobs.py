"""Random steps for tests of memory, and what their ranks use, counted pass by pass and layer by layer."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from numpy.typing import NDArray

from lumos_nb.layout import Parallelism, Training, Transformer, problems
from lumos_nb.transformer import Moe
from lumos_nb.workloads.llm.passing_memory import Passes, Passing
from lumos_nb.workloads.llm.rank_memory import total
from lumos_nb.workloads.llm.schedule import order

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


@st.composite
def jobs(draw: st.DrawFn, *, rounds: int = 2) -> tuple[Transformer, Parallelism, Training]:
    """Small steps: any schedule, few or many micro-batches, experts, uneven stages, heads that weigh less or more.

    Of long pipelines the micro-batches are those of so many `rounds` at most.
    """
    schedule = draw(st.sampled_from(SCHEDULES))
    chunks = {"interleaved": draw(st.integers(2, 3)), "zb-v": 2}.get(schedule, 1)
    pp = draw(st.integers(1 if chunks == 1 else 2, 4) | st.integers(5, 16))
    dp, count = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 9 if pp < 5 else rounds * pp))
    if schedule == "interleaved":
        count = pp * (count if pp < 5 else -(-count // pp))
    layers = pp * chunks * draw(st.integers(1, 3 if pp < 5 else 1))
    routed = st.builds(
        Moe, experts=st.just(4), topk=st.just(2), ffn=st.just(1024), first=st.integers(0, 2), every=st.integers(1, 2)
    )
    model = Transformer(
        layers=layers, hidden=512, heads=8, ffn=2048, vocab=draw(st.sampled_from([64, 8192, 100_000])),
        tied=draw(st.booleans()), moe=draw(st.none() | routed),
    )  # fmt: skip
    ends = [
        0,
        *sorted(draw(st.lists(st.integers(0, layers), min_size=pp * chunks - 1, max_size=pp * chunks - 1))),
        layers,
    ]
    split = draw(st.sampled_from([(), tuple(end - begin for begin, end in pairwise(ends))]))
    train = Training(
        micro_batch=1, global_batch=count * dp, seq=draw(st.sampled_from([256, 1024])), dropout=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])), lora=draw(st.sampled_from([0, 8])),
        fused_grads=draw(st.booleans()), prefetch=draw(st.integers(0, 2)), bucket_copies=draw(st.booleans()),
    )  # fmt: skip
    zero = draw(st.integers(0, 3))
    layout = Parallelism(pp=pp, dp=dp, zero=zero, schedule=schedule, chunks=chunks, split=split)
    assume(not problems(model, layout, train))
    return model, layout, train


def plain_peaks(model: Transformer, layout: Parallelism, train: Training) -> NDArray[np.float64]:
    """Most bytes of each rank: of every layer of every pass of every micro-batch, none left out and none shared."""
    stage, phase, micro_batch, chunk, _ = order(layout.schedule, layout.pp, train.micro_batches(layout), layout.chunks)
    most = []
    for rank in range(layout.pp):
        own, flying, waiting = np.flatnonzero(stage == rank), Counter[int](), Counter[int]()
        apart, beside = (phase == 2).any(), []
        for what, of in zip(phase[own].tolist(), chunk[own].tolist(), strict=True):
            if what == 1:
                flying[of] -= 1  # what goes back is no longer beside
            elif what == 2:
                waiting[of] -= 1
            beside.append([some[at] for some in (flying, waiting) for at in range(layout.chunks)])
            if what == 0:
                flying[of] += 1
            elif what == 1 and apart:
                waiting[of] += 1
        assert not any([*flying.values(), *waiting.values()])
        counts = np.array(beside).T.reshape(2, layout.chunks, -1)
        ranks = Passing.of(model, layout, train, Passes(stage[own], phase[own], chunk[own], *counts))
        used = [np.where(moment.there, total(moment.parts), 0).max() for moment in ranks.moments(whole=True)]
        most.append(total(ranks.lasting()).max() + max(used))
    assert micro_batch.max() + 1 == train.micro_batches(layout)
    return np.array(most)
