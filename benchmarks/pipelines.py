"""Rows of accuracy.json for op-level recordings of pipelines: StragglerAnalysis' jobs ST and AR, and Primus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from benchmarks.rows import Row
from lumos_nb.critical_path import replay
from lumos_nb.evaluate import mechanistic
from lumos_nb.graph import Recording, build_graph
from lumos_nb.resampling import jitter
from lumos_nb.stragglers import waiting_caused, with_pooled_durations, without_stragglers
from lumos_nb.traces.run import load_run

JOBS = {"ST": 0.9, "AR": 1.3}
"""Job -> target of the mean mechanistic error, in percent."""

LEVELS = (0.5, 0.8, 0.9)


def percent(values: pl.Series) -> float:
    return 100 * float(values.abs().mean())  # type: ignore[arg-type]


def pipeline_rows(traces: Path) -> Iterator[Row]:
    """Error beside null and ablation, no stragglers beside what the publishers state, coverage of the spread."""
    for job, target in JOBS.items():
        recording = Recording.of(load_run(traces / "straggler" / f"trace-{job}.parquet"))
        yield from error_rows(f"straggler_{job}", recording, target)
        stated = json.loads((traces / "straggler" / f"result-{job}.json").read_text())["step_t_noblk"]
        yield from straggler_rows(job, recording, next(iter(stated.values())))
        yield from coverage_rows(job, recording, recording.step_times()["step"].to_list())
    yield from error_rows("primus_pp8", Recording.of(load_run(traces / "primus" / "pp8")), None)


def error_rows(name: str, recording: Recording, target: float | None) -> Iterator[Row]:
    scored = mechanistic(recording)
    error, worst = percent(scored["error"]), 100 * float(scored["error"].abs().max())  # type: ignore[arg-type]
    middle = 100 * float(scored["error"].abs().median())  # type: ignore[arg-type]
    yield Row(
        f"mechanistic/{name}",
        error,
        "%",
        "null",
        percent(scored["null_error"]),
        target="" if target is None else f"<= {target}",
        note=f"{scored.height} steps; median {middle:.2f} %, worst {worst:.1f} %. "
        f"{scored['own_share'].mean():.0%} of the path is given",
    )
    without = percent(scored["no_joins_error"])
    note = f"{without:.2f} % without joins between ranks"
    yield Row(f"ablation/{name}", without / error, "x", "error with all edges = 1", 1.0, note=note)


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


def coverage_rows(
    job: str, recording: Recording, steps: list[int] | None = None, levels: tuple[float, ...] = LEVELS
) -> Iterator[Row]:
    for level in levels:
        table = jitter(recording, steps, level=level)
        width = 100 * ((table["high_ns"] - table["low_ns"]) / table["measured_ns"]).mean()  # type: ignore[operator]
        null = 100 * ((table["null_high_ns"] - table["null_low_ns"]) / table["measured_ns"]).mean()  # type: ignore[operator]
        yield Row(
            f"coverage/{job}, level {level:.0%}",
            100 * float(table["inside"].mean()),  # type: ignore[arg-type]
            "% of the steps",
            "of the other steps' times",
            100 * float(table["null_inside"].mean()),  # type: ignore[arg-type]
            note=f"{table.height} steps; interval {width:.1f} % of a step wide, that of the steps' times {null:.1f} %",
        )
