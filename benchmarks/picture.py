"""The picture of README.md: `make picture` writes docs/picture.png."""

from __future__ import annotations

from pathlib import Path

import altair as alt

import lumos_nb as ln
from lumos_nb import charts, datasets
from lumos_nb.display import format_ns
from lumos_nb.evaluate import PooledCosts, with_pooled_costs
from lumos_nb.graph import Graph, Recording

NAME = "gpt-ddp-delay"
PATH = Path(__file__).parents[1] / "docs" / "picture.png"
WIDTH_PX, LANE_PX = 680, 19
MOST_BYTES = 150_000


def predicted_step(recording: Recording, step: int) -> Graph:
    """The graph of a step with everything but its own computation replaced by what the other steps cost."""
    others = [other for other in recording.steps[1:] if other != step]
    costs = PooledCosts.of(ln.build_graph(recording, other, unseen=step) for other in others)
    return with_pooled_costs(ln.build_graph(recording, step), costs)


def heading(text: str, subtitle: str = "") -> alt.Title:
    return alt.Title(text, subtitle=subtitle, anchor="start", frame="group")


def main() -> None:
    """One step as measured, as predicted from the other steps with its critical path, and where the time goes."""
    recording = Recording.of(ln.load_run(datasets.path(NAME)))
    measured = ln.build_graph(recording)
    predicted = ln.replay(predicted_step(recording, measured.step))
    if predicted.path["rank"].n_unique() < 2:
        raise SystemExit(f"the path of step {measured.step} of {NAME} stays on one rank; take another step or run.")
    measured_ns = dict(recording.step_times().select("step", "step_ns").iter_rows())[measured.step]
    ends_ns = [(ops["start_ns"] + ops["dur_ns"]).max() - predicted.origin_ns for ops in (measured.ops, predicted.ops)]
    window_ns = (0, max(ends_ns))
    above = charts.timeline(measured, window_ns=window_ns, width_px=WIDTH_PX).properties(
        title=heading(
            f"A training step of two data-parallel ranks, as measured: {format_ns(measured_ns)}",
            "rank 1 is late on purpose, and rank 0 waits for it",
        )
    )
    below = charts.timeline(predicted, window_ns=window_ns, width_px=WIDTH_PX).properties(
        title=heading(
            f"The same step, predicted by replay at what other steps cost: {format_ns(predicted.step_ns)}",
            "outlined: the critical path, over the late rank and, with the transfer, to the other",
        )
    )
    parts = charts.breakdown_bars(
        {"measured": ln.breakdown(measured), "predicted": ln.breakdown(predicted)},
        title="Where each rank's step goes",
        width_px=WIDTH_PX,
    )
    lanes = [chart.properties(height=alt.Step(LANE_PX)) for chart in (above, below)]
    picture = alt.vconcat(alt.vconcat(*lanes), parts).resolve_scale(color="independent")
    picture = picture.configure_view(stroke=None).configure_legend(orient="bottom")
    png = charts.to_png(picture)
    if len(png) > MOST_BYTES:
        raise SystemExit(f"the picture has {len(png):,} bytes; README.md's should have at most {MOST_BYTES:,}.")
    PATH.write_bytes(png)
    print(f"{PATH.name}: {len(png):,} bytes")


if __name__ == "__main__":
    main()
