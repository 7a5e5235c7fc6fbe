"""Loading, breakdown and critical path beside HolisticTraceAnalysis on the same files: `make bench-peers` runs it.

HTA (`traceinsight`) reads one rank and has its own words: *compute* is whenever a kernel runs that is neither a copy
nor a collective, *idle* whenever nothing runs between the first and the last device work, *other* the rest, and the
overlap is the share of the collectives' time in which a kernel computes. The same quantities come from `breakdown` of
all device ops at once. HTA leaves out device work of before the first step, so that is left out here too.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks import TRACES
from benchmarks.bench_load import UNPACK, one_cost
from benchmarks.make_large_trace import write_large_trace
from benchmarks.peers import hand_over
from benchmarks.rows import Row
from benchmarks.timing import REPEATS, in_turn, ratio
from lumos_nb.critical_path import replay
from lumos_nb.graph import Recording, build_graph
from lumos_nb.partition import breakdown
from lumos_nb.traces.run import load_run

os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"  # read at import; it would shorten every event of a trace in ns
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis  # noqa: E402

LARGEST = "hta/df_index_resolver/df_index_resolver.json.gz"
FILES = (
    LARGEST,
    "hta/nccl_parser_config/nccl_data.json.gz",
    "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "torchrec/sst_long_a2a_optimizer_4/rank-0.pt.trace.json.gz",
)
INSTANCE = 1
"""The step whose critical path is looked for, counted from 0: HTA advises against the first."""
LARGE_REPEATS = 3
"""HTA takes the better part of a minute for the made-up file."""
_LOADS = {
    "HTA": (
        "TraceAnalysis(trace_files={0: sys.argv[1]}, include_last_profiler_step=True)",
        "import logging, warnings\nlogging.disable(logging.CRITICAL)\nwarnings.simplefilter('ignore')\n"
        "from hta.trace_analysis import TraceAnalysis",
    ),
    "ours": ("read_kineto(sys.argv[1])", "from lumos_nb.traces.kineto import read_kineto"),
    "unpacking": ("unpack(sys.argv[1])", UNPACK),
}


@dataclass
class DeviceWork:
    """Device ops as if they were one step: what `breakdown` takes."""

    ops: pl.DataFrame


def load_row(path: Path, name: str, repeats: int) -> Row:
    """Loading a file, each time in a process of its own."""
    every = np.array([[one_cost(path, *load) for load in _LOADS.values()] for _ in range(repeats)])
    theirs, ours, unpacking = every[..., 0].T
    found, limit = ratio(theirs, ours), ratio(theirs, unpacking)
    note = f"median of {repeats}; HTA {np.median(theirs):.2f} s and {np.median(every[:, 0, 1]) / 1e6:,.0f} MB"
    note += f" at the peak, here {np.median(ours):.3f} s and {np.median(every[:, 1, 1]) / 1e6:,.0f} MB"
    beside = ("that unpacking alone allows", limit.median)
    return Row(f"peers/loading {name} over HTA", found.median, "x", *beside, found.noise, ">= 20", note)


def their_numbers(hta: Any) -> tuple[dict[str, float], pl.DataFrame]:
    """Times in us and the overlap in percent; and the time and count of device work by name."""
    (times,) = hta.get_temporal_breakdown(visualize=False).to_dict("records")
    (overlap,) = hta.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]
    rows, symbols = hta.t.traces[0], hta.t.symbol_table.get_sym_table()
    rows = rows[rows["stream"].ne(-1)]
    names = pl.DataFrame({"name": [symbols[i] for i in rows["name"]], "us": rows["dur"].to_numpy(dtype=float)})
    found = {"idle": times["idle_time(us)"], "compute": times["compute_time(us)"]}
    found |= {"other": times["non_compute_time(us)"], "overlap": overlap}
    return found, names.group_by("name").agg(pl.len(), pl.sum("us"))


def our_numbers(ops: pl.DataFrame) -> tuple[dict[str, float], pl.DataFrame]:
    """The same from device ops."""
    parts = breakdown(DeviceWork(ops.with_columns(step=pl.lit(0, pl.Int32))))
    us = dict(zip(parts["part"], parts["time_ns"] / 1e3, strict=True))
    comm = us["overlapped"] + us["exposed_transfer"]
    found = {"idle": us["other"], "compute": us["compute"] + us["overlapped"]}
    found |= {"other": us["exposed_transfer"] + us["copies"]}
    found |= {"overlap": 100 * us["overlapped"] / comm if comm else float("nan")}
    return found, ops.group_by("name").agg(pl.len(), us=pl.sum("dur_ns") / 1e3)


def agreement_rows(name: str, hta: Any, recording: Recording) -> Iterator[Row]:
    """The largest difference of all times and counts that both define, and that of the overlap, which HTA rounds."""
    device = recording.ops.filter(pl.col("device").is_not_null())
    ops = device.filter(pl.col("step").is_not_null())
    (theirs, their_names), (ours, our_names) = their_numbers(hta), our_numbers(ops)
    both = their_names.join(our_names, on="name", how="full", coalesce=True, suffix="_ours").fill_null(0)
    off = {f"{what} time": abs(ours[what] - theirs[what]) for what in ("idle", "compute", "other")}
    off["the time of one name"] = float((both["us"] - both["us_ours"]).abs().max())  # type: ignore[arg-type]
    off["counts by name"] = float((both["len"].cast(int) - both["len_ours"].cast(int)).abs().max())  # type: ignore[arg-type]
    worst = max(off, key=lambda what: off[what])
    note = ", ".join(f"{what} {ours[what]:,.0f}" for what in ("idle", "compute", "other"))
    note += f" us; {both.height} names of {ops.height:,} device ops"
    if left_out := device.height - ops.height:
        note += f"; without {left_out} of before the first step, which HTA leaves out"
    yield Row(f"peers/largest difference from HTA, {name}", off[worst], "us", target="<= 1", note=f"{note}; {worst}")
    if not np.isnan(theirs["overlap"]):  # there are collectives
        apart = abs(ours["overlap"] - theirs["overlap"])
        note = f"{ours['overlap']:.2f} % of the collectives' time"
        yield Row(f"peers/overlap, difference from HTA, {name}", apart, "points", target="<= 0.01", note=note)


def path_rows(name: str, hta: Any, run: Any) -> Iterator[Row]:
    """Length of the critical path of a step, and how long it takes to find."""
    recording = Recording.of(run)
    step = recording.ops["step"].drop_nulls().unique().sort()[INSTANCE]
    graph = build_graph(recording, step=step)
    theirs, good = hta.critical_path_analysis(0, "ProfilerStep", INSTANCE)
    if not good:
        raise AssertionError(f"HTA finds no critical path of {name}.")
    nodes = theirs.critical_path_nodes
    weight = sum(theirs.edges[pair]["weight"] for pair in itertools.pairwise(nodes))
    span = theirs.node_list[nodes[-1]].ts - theirs.node_list[nodes[0]].ts
    ours = replay(graph)
    note = f"step {step}; HTA's path goes over {span:,.0f} us, of which its edges cover so much"
    yield Row(f"peers/critical path of {name}", ours.step_ns / 1e3, "us", "of HTA", float(weight), note=note)
    if name != LARGEST.split("/")[1]:
        return
    size = graph.ops.estimated_size() + graph.edges.estimated_size()
    copied = np.ones(int(size), np.uint8)
    times = in_turn(
        partial(hta.critical_path_analysis, 0, "ProfilerStep", INSTANCE),
        lambda: replay(build_graph(replace(recording), step=step)),  # without what it found for earlier graphs
        lambda: replay(build_graph(recording, step=step)),
        lambda: replay(build_graph(Recording.of(run), step=step)),
        partial(np.copyto, np.empty_like(copied), copied),
    )
    step_s, further, whole, limit = (ratio(times[:, 0], times[:, i]) for i in (1, 2, 3, 4))
    rows = len(theirs.trace_df)
    note = f"step {step} of {name}: HTA {rows / np.median(times[:, 0]):,.0f} of its {rows:,} rows/s,"
    note += f" here {graph.ops.height:,} ops in {np.median(times[:, 1]):.3f} s; a graph is built and its path found"
    beside = ("that a copy of the tables of ops and edges allows", limit.median)
    yield Row("peers/graph and critical path over HTA", step_s.median, "x", *beside, step_s.noise, ">= 100", note)
    yield Row("peers/graph and critical path over HTA, of a further step", further.median, "x", noise=further.noise,
              note="what all steps of the recording say is known from an earlier graph")  # fmt: skip
    yield Row("peers/graph and critical path over HTA, ops of all steps first", whole.median, "x", noise=whole.noise,
              note="events to ops too, of five steps, of which HTA's side has done a part when it loads")  # fmt: skip


def rows() -> Iterator[Row]:
    """All rows beside HTA."""
    with tempfile.TemporaryDirectory() as folder:
        yield load_row(TRACES / LARGEST, "df_index_resolver", REPEATS)
        made = write_large_trace(Path(folder) / "rank-0.json.gz")
        yield load_row(made, "1.3 million made-up events", LARGE_REPEATS)
    for file in FILES:
        path, name = TRACES / file, file.split("/")[1]
        hta = TraceAnalysis(trace_files={0: str(path)}, include_last_profiler_step=True)
        run = load_run(path, cache=False)
        recording = Recording.of(run)
        yield from agreement_rows(name, hta, recording)
        if file == LARGEST:
            times = in_turn(partial(their_numbers, hta), partial(breakdown_of, recording))
            found = ratio(times[:, 0], times[:, 1])
            yield Row("peers/breakdown over HTA", found.median, "x", noise=found.noise,
                      note=f"times, overlap and sums by name of {name}, ops at hand")  # fmt: skip
        yield from path_rows(name, hta, run)


def breakdown_of(recording: Recording) -> object:
    """What `our_numbers` says of all device ops."""
    return our_numbers(recording.ops.filter(pl.col("device").is_not_null()))


if __name__ == "__main__":
    if not TRACES.is_dir():
        sys.exit(f"{TRACES} is not there: the files that both read")
    hand_over(rows())
