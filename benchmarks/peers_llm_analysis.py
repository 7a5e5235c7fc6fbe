"""Layouts a second beside llm-analysis, one core each: `make bench-peers` runs it.

No public search of layouts installs from the registry: Calculon, vTrain and SimuMax are not there (what is there as
`calculon` is another program). llm-analysis prices one layout a call, without a pipeline's bubble and without a search;
here `search` goes through all layouts of GPT-3 175B on 512 GPUs, with memory and time, none replayed.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import numpy as np

from benchmarks.bench_search import CLUSTER, GPT3, TRAIN
from benchmarks.peers import hand_over
from benchmarks.rows import Row
from benchmarks.timing import in_turn, ratio
from lumos_nb.workloads.llm.screening import search

logging.disable(logging.WARNING)
from llm_analysis.analysis import LLMAnalysis  # noqa: E402
from llm_analysis.config import (  # noqa: E402
    ModelConfig,
    ParallelismConfig,
    get_dtype_config_by_name,
    get_gpu_config_by_name,
)

LAYOUTS = [
    (tp, pp, 512 // tp // pp, micro)
    for tp, pp, micro in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8))
]


def price_each() -> list[float]:
    """Seconds of a step of each layout, as llm-analysis has it."""
    model = ModelConfig("gpt3", GPT3.layers, GPT3.heads, GPT3.hidden, GPT3.vocab, TRAIN.seq)
    gpu, dtype = get_gpu_config_by_name("h100-sxm-80gb"), get_dtype_config_by_name("w16a16e16")
    return [
        LLMAnalysis(model, gpu, dtype, ParallelismConfig(tp, pp, dp), flops_efficiency=0.5).training(
            batch_size_per_gpu=micro, global_batch_size=TRAIN.global_batch, seq_len=TRAIN.seq
        )["latency_per_iter"]
        for tp, pp, dp, micro in LAYOUTS
        if TRAIN.global_batch % (dp * micro) == 0
    ]


def rows() -> Iterator[Row]:
    """Layouts a second."""
    theirs, ours = len(price_each()), search(GPT3, CLUSTER, TRAIN, keep=0).frame.height
    times = in_turn(price_each, lambda: search(GPT3, CLUSTER, TRAIN, keep=0))
    found = ratio(times[:, 0] / theirs, times[:, 1] / ours)
    rate, their_rate = ours / np.median(times[:, 1]), theirs / np.median(times[:, 0])
    note = f"here {rate:,.0f} of {ours:,} layouts/s, llm-analysis {their_rate:,.0f} of {theirs}/s"
    yield Row("peers/layouts over llm-analysis", found.median, "x", noise=found.noise, note=note)


if __name__ == "__main__":
    hand_over(rows())
