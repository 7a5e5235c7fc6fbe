"""Rows of accuracy.json for op-level recordings of pipelines: StragglerAnalysis' jobs ST and AR, and Primus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rows import Row
from benchmarks.scores import coverage_rows, mechanistic_rows
from lumos_nb.critical_path import replay
from lumos_nb.evaluate import mechanistic
from lumos_nb.graph import Recording, build_graph
from lumos_nb.resampling import jitter
from lumos_nb.stragglers import waiting_caused, with_pooled_durations, without_stragglers
from lumos_nb.traces.run import load_run

JOBS = {"ST": 0.9, "AR": 1.3}
"""Job -> target of the mean mechanistic error, in percent."""

LEVELS = (0.5, 0.8, 0.9)


def pipeline_rows(traces: Path) -> Iterator[Row]:
    """Error beside null and ablation, no stragglers beside what the publishers state, coverage of the spread."""
    for job, target in JOBS.items():
        recording = Recording.of(load_run(traces / "straggler" / f"trace-{job}.parquet"))
        yield from mechanistic_rows(f"straggler_{job}", mechanistic(recording), target, without="joins")
        stated = json.loads((traces / "straggler" / f"result-{job}.json").read_text())["step_t_noblk"]
        yield from straggler_rows(job, recording, next(iter(stated.values())))
        steps = recording.step_times()["step"].to_list()
        for level in LEVELS:
            yield from coverage_rows(job, jitter(recording, steps, level=level), level)
    yield from mechanistic_rows("primus_pp8", mechanistic(load_run(traces / "primus" / "pp8")), without="joins")


def straggler_rows(job: str, recording: Recording, stated_s: float) -> Iterator[Row]:
    graphs = [build_graph(recording, step) for step in recording.step_times()["step"]]
    pooled_s = replay(with_pooled_durations(graphs[0], graphs)).step_ns / 1e9
    yield Row(
        f"no_stragglers/{job}, as its publishers define it",
        100 * (pooled_s / stated_s - 1),
        "%",
        target="<= 1.0",
        note=f"{pooled_s:.3f} s, they state {stated_s:.3f} s",
    )
    middle = build_graph(recording, recording.default_step())
    result = replay(middle)
    ours_ns = replay(without_stragglers(middle)).step_ns
    caused = waiting_caused(result)
    share = caused["waiting_caused_ns"][0] / caused["waiting_caused_ns"].sum()
    yield Row(
        f"no_stragglers/{job}, ours",
        ours_ns / result.step_ns,
        "x step",
        note=f"step {middle.step}: {result.step_ns / 1e9:.3f} s to {ours_ns / 1e9:.3f} s with each op at the median of "
        f"its replicas; rank {caused['rank'][0]} causes {share:.0%} of the waiting",
    )
