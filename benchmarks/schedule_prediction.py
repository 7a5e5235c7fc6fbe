"""Rows of accuracy.json: Primus' recorded 1F1B pipeline re-scheduled as interleaved. A prediction: no truth is at hand.

What is assumed, beyond what was recorded of each step, rank and micro-batch:

* Each of two chunks takes half of the rank's pass. What the last rank's passes take beyond those of the ranks between
  first and last (its head and loss) is the last chunk's alone. The first rank's forward passes are no longer than the
  others', so that no embedding is told apart. What a rank's first forward and last backward pass take beyond its usual
  ones (warming up; summing gradients) is the first chunk's alone, as these are the first and last of the step.
* A message is as large as before and takes as long: the quickest of each step. Between two passes of a rank lies, as
  recorded, the time in which it sends and receives; beside it stands the step were all of that overlapped.
* What follows a rank's last pass stays.

Each recorded step but the first (which compiles) is re-scheduled with its own times, so that ranks wait for whichever
is late; the median over steps is the prediction. Of the recorded schedule itself the same is compared with the record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.rows import Row
from benchmarks.schedule_graphs import as_graph
from lumos_nb.critical_path import replay
from lumos_nb.graph import Recording
from lumos_nb.traces.run import load_run
from lumos_nb.workloads.llm.schedule import schedule

Floats = NDArray[np.float64]
CHUNKS = 2


@dataclass(frozen=True, slots=True)
class Recorded:
    """Times of n steps on p ranks with m micro-batches, ns."""

    forward: Floats  # (n, p, m)
    backward: Floats  # (n, p, m)
    message: float
    gap: float  # between two passes of a rank that waits for nothing
    tail: Floats  # (n, p) after the last pass
    total: Floats  # (n, p)

    @classmethod
    def of(cls, folder: Path) -> Recorded:
        """Read the steps of a folder of schedule files, but the first."""
        run = load_run(folder)
        ops = Recording.of(run).ops.filter(pl.col("name").is_in(["forward", "backward"]), pl.col("step") > 1)
        ops = ops.select("step", "rank", "name", "start_ns", end_ns=pl.col("start_ns") + pl.col("dur_ns"))
        ops = ops.sort("step", "rank", "start_ns")
        shape = (ops["step"].n_unique(), ops["rank"].n_unique(), -1)
        start, end = (
            {name: of_name[column].to_numpy().reshape(shape) for (name,), of_name in ops.group_by("name")}
            for column in ("start_ns", "end_ns")
        )
        ahead = (start["forward"][:, 1:] - end["forward"][:, :-1]).min(
            axis=2
        )  # clocks are set so that both ways are equal
        gaps = ops.with_columns(
            gap=pl.col("start_ns") - pl.col("end_ns").shift().over("step", "rank"),
            before=pl.col("name").shift().over("step", "rank"),
        ).filter(before="backward", name="forward")
        marks = run.events.filter(pl.col("name").str.starts_with("ProfilerStep")).sort("start_ns", "rank")
        ends = (marks["start_ns"] + marks["dur_ns"]).to_numpy().reshape(-1, shape[1])[1:]
        begins = marks["start_ns"].to_numpy().reshape(-1, shape[1])[1:]
        return cls(
            forward=end["forward"] - start["forward"],
            backward=end["backward"] - start["backward"],
            message=float(np.median(ahead)),
            gap=float(gaps.filter(pl.col("rank") > 0)["gap"].median()),  # type: ignore[arg-type]
            tail=ends - end["backward"][:, :, -1],
            total=ends - begins,
        )

    def totals(self, kind: str, forward: Floats, backward: Floats, *, gap: float | None = None) -> Floats:
        """When each rank is done with each step (n, p) of passes (n, p, chunks, m)."""
        _, stages, chunks, micro_batches = forward.shape
        plan = schedule(kind, stages, micro_batches, chunks)
        gap_ns = self.gap if gap is None else gap
        done = []
        for times in zip(forward, backward, strict=True):
            graph = as_graph(
                plan, dict(zip(("forward", "backward"), times, strict=True)), message_ns=self.message, gap_ns=gap_ns
            )
            passes = replay(graph).ops.filter(kind="kernel")
            last = passes.group_by("rank").agg((pl.col("start_ns") + pl.col("dur_ns")).max()).sort("rank")
            done.append(last["start_ns"].to_numpy())
        return np.array(done) + self.tail


def in_chunks(times: Floats, lone: int) -> Floats:
    """Passes (n, p, m) as those of two chunks (n, p, 2, m); `lone`: micro-batch of the step's first or last pass."""
    usual = np.median(times, axis=2, keepdims=True)
    alone, head = np.zeros_like(times), np.zeros_like(usual)
    alone[:, :, lone] = times[:, :, lone] - usual[:, :, 0]
    head[:, -1] = usual[:, -1] - np.median(usual[:, 1:-1], axis=1)
    half = (times - alone - head) / CHUNKS
    return np.stack([half + alone, half + head], axis=2)


def schedule_rows(traces: Path) -> Iterator[Row]:
    """The predicted time of each rank, and how near the same comes to the record under the recorded schedule."""
    recorded = Recorded.of(traces / "primus" / "pp8")
    same = recorded.totals("1f1b", recorded.forward[:, :, None], recorded.backward[:, :, None])
    error = 100 * (same / recorded.total - 1)
    worst = np.abs(error).mean(axis=0)
    yield Row(
        "schedules/pp8 as recorded (1F1B), all ranks",
        float(np.abs(error).mean()),
        "%",
        noise=float(np.mean(100 * np.abs(recorded.total / np.median(recorded.total, axis=0) - 1))),
        note=f"{error.size} times of a rank and step, from that step's own passes; worst rank {worst.argmax()}, "
        f"{worst.max():.2g} %; messages {recorded.message / 1e6:.2f} ms, {recorded.gap / 1e6:.2f} ms between passes",
    )
    chunks = in_chunks(recorded.forward, 0), in_chunks(recorded.backward, -1)
    predicted = recorded.totals("interleaved", *chunks)
    overlapped = recorded.totals("interleaved", *chunks, gap=0.0)
    middle, was, hidden = (np.median(times, axis=0) / 1e6 for times in (predicted, recorded.total, overlapped))
    low, high = np.quantile(predicted, [0.05, 0.95], axis=0) / 1e6
    for rank, value in enumerate(middle):
        yield Row(
            f"schedules/pp8 as interleaved, {CHUNKS} chunks, rank {rank}",
            float(value),
            "ms",
            "as recorded (1F1B)",
            float(was[rank]),
            note=f"a prediction; steps {low[rank]:,.0f} to {high[rank]:,.0f} ms; {hidden[rank]:,.0f} ms if sends and "
            "receives hide behind passes",
        )
