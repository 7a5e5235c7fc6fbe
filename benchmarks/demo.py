"""The main job on a bundled run, printed: `make demo`."""

from __future__ import annotations

from pathlib import Path

import polars as pl

import lumos_nb as ln
from lumos_nb import datasets
from lumos_nb.display import text_table
from lumos_nb.evaluate import mechanistic, what_ifs
from lumos_nb.graph import Recording

PREFERRED = ("gpt-cuda", "gpt-ddp-delay")
"""Recorded on a GPU where the package has such a run, else two CPU ranks of which one is delayed on purpose."""


def main() -> None:
    """Load, explain, predict."""
    name = next(n for n in PREFERRED if n in datasets.names())
    folder = datasets.path(name)
    print(f"== {name}: {datasets.DATASETS[name].what}\n")
    run = ln.load_run(folder)
    print(run, "\n")
    print(
        text_table(
            run.report.select("rank", "what", "count", "reason"), caption="What was not read, and why", max_rows=8
        ),
        "\n",
    )

    recording = Recording.of(run)
    times = recording.step_times()
    print(text_table(times.select("step", "step_ns", "edge"), caption="Measured steps, over all ranks"), "\n")

    graph = ln.build_graph(recording)
    waiting = graph.report.filter(pl.col("time_ns").is_not_null()).select("what", "detail", "count", "time_ns")
    print(
        text_table(waiting, caption=f"Step {graph.step} as a graph: links, and the waiting that hangs on each kind"),
        "\n",
    )

    result = ln.replay(graph)
    parts = ln.breakdown(result).filter(pl.col("time_ns") > 0)
    print(text_table(parts, caption="Where the time goes: parts of each rank's step, which add up to it"), "\n")
    print(result, "\n")
    print(
        text_table(
            _tight(result), caption="What could grow least before the step does (ops of 0.2 ms and more off the path)"
        ),
        "\n",
    )
    print(text_table(what_ifs(graph), caption="What if half as long? Steady state, and the busiest lane alone"), "\n")

    out = Path("runs") / f"{name}-step{graph.step}.perfetto.json.gz"
    out.parent.mkdir(exist_ok=True)
    print(f"{ln.write_perfetto(result, out)} opens in ui.perfetto.dev: measured, replayed, and the path between\n")
    print(_predictions(recording, folder))


def _tight(result: ln.Result) -> pl.DataFrame:
    """Ops with the least slack that are not on the path."""
    off = result.ops.filter(~pl.col("critical") & pl.col("slack_ns").is_not_null() & (pl.col("dur_ns") >= 200_000))
    return off.sort("slack_ns").select("rank", "lane", "name", "dur_ns", "slack_ns").head(5)


def _noise(folder: Path) -> float:
    """How far equal steps scatter that nothing was attached to; equal means of the same logged delay."""
    steps = pl.read_csv(folder / "steps.csv").group_by("step").agg(pl.col("wall_ns").max())
    log = folder / "delays.csv"
    if log.exists():
        delays = pl.read_csv(log).filter(pl.col("phase") == "timed").group_by("step").agg(pl.col("delay_ms").max())
        steps = steps.join(delays, on="step")
    else:
        steps = steps.with_columns(delay_ms=0)
    middle = pl.col("wall_ns").median().over("delay_ms")
    return float(steps.select(((pl.col("wall_ns") - middle).abs() / middle).median()).item())


def _predictions(recording: Recording, folder: Path) -> str:
    """Measured, predicted, null and noise of every step."""
    scored = mechanistic(recording)
    noise = _noise(folder)
    table = scored.select(
        "step",
        "measured_ns",
        "predicted_ns",
        error_share=pl.col("error"),
        null_ns="null_ns",
        null_error_share="null_error",
    )
    caption = (
        "Step times: measured; predicted from each step's own computation and the *other* steps' gaps, waits and\n"
        "transfers; null (the step before, unchanged). An injected delay is computation: it is given.\n"
        f"Noise: equal unprofiled steps lie {noise:.1%} apart (median distance from their median)."
    )
    return text_table(table, caption=caption)


if __name__ == "__main__":
    main()
