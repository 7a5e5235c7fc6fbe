"""How far one machine carries a job of many ranks: `make scale` writes rows of `results.json` and docs/scale.png.

A made-up GPT-3 run of 1 to 512 ranks is generated, planned, replayed and broken down, each in a process of its own,
whose peak of memory counts. It needs 8 GB of disk in build/scale, which goes in the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import polars as pl

from benchmarks import made_up_job
from benchmarks.rows import RESULTS, Row, record_timed
from lumos_nb.charts.rendering import to_png
from lumos_nb.charts.style import CLASS_COLOURS, GREY, heading
from lumos_nb.display import how_many
from lumos_nb.jobs import open_job

SCRATCH = Path(__file__).parents[1] / "build" / "scale"
CHART = Path(__file__).parents[1] / "docs" / "scale.png"
STEPS = ("generate", "plan", "replay", "break down")
CORES = 2
FULL = 100_000
"""Ops of a rank."""
SOME = 20
"""Ranks of the largest job that alone have a trace: the first ones."""


class Case(NamedTuple):
    """A layout of the run: ranks are the product."""

    tp: int
    dp: int
    pp: int
    ops: int = FULL

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp


LARGEST = Case(8, 8, 8)
CASES = (Case(1, 1, 1), Case(8, 1, 1), Case(8, 1, 8), Case(8, 1, 8, FULL // 100), Case(8, 1, 8, FULL // 10), LARGEST)


def generate(folder: Path, case: Case, which: str) -> dict[str, int]:
    """Write the job: of all ranks, of one data-parallel replica, or of some, with waits for the others."""
    run = made_up_job.gpt3(*case)
    measured, ranks = None, None
    if which == "some":
        measured, ranks = open_job(SCRATCH / "all").replay(), range(SOME)
    elif which == "one replica":
        ranks = [rank for rank in range(case.ranks) if rank // case.tp % case.dp == 0]
    with ThreadPoolExecutor(CORES) as pool:
        made_up_job.write(folder, run, ranks=ranks, measured=measured, executor=pool)
    return {"alone_ops": run.alone_ops, "alone_step_ns": run.alone_step_ns}


def plan(folder: Path) -> dict[str, int]:
    """Put the numbers of all ranks together, and keep them."""
    job = open_job(folder)
    job.files.plan()
    return {"ops": job.ranks["ops"].sum(), "edges": job.ranks["edges"].sum()}


def replay(folder: Path) -> dict[str, int]:
    """Replay what has been planned: slack, critical path, and the times of all ops in files."""
    return {"step_ns": open_job(folder).replay().step_ns}


def break_down(folder: Path) -> dict[str, float]:
    """Break the step down on every rank, after a replay that doesn't count."""
    result = open_job(folder).replay()
    clocks = started()
    with ThreadPoolExecutor(CORES) as pool:
        result.breakdown(executor=pool)
    return since(clocks)


def started() -> tuple[float, float]:
    """Wall time and this process's processor time."""
    return time.perf_counter(), time.process_time()


def since(clocks: tuple[float, float]) -> dict[str, float]:
    """Seconds since then, by either."""
    now = started()
    return {"seconds": now[0] - clocks[0], "cpu": now[1] - clocks[1]}


def in_a_process(step: str, folder: Path, case: Case, which: str) -> dict[str, Any]:
    """What a step found, its seconds, of a processor too, and its peak of memory."""
    about = json.dumps([step, str(folder), list(case), which])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_scale", "--one", about], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{step} of {case} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{case.ranks} ranks of {case.ops:,} ops ({which}): {step} {found['seconds']:.1f} s, {found['gib']:.1f} GiB")
    return found


def one(step: str, folder: str, case: list[int], which: str) -> None:
    """Do one step in this process, and print what it found."""
    does: dict[str, Callable[[Path], dict[str, Any]]] = {"plan": plan, "replay": replay, "break down": break_down}
    clocks = started()
    found = generate(Path(folder), Case(*case), which) if step == "generate" else does[step](Path(folder))
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({**since(clocks), "gib": gib, **found}))


def measured(case: Case, which: str = "all") -> dict[str, Any]:
    """All steps of a case; of each its seconds, processor seconds and GiB, and what they found."""
    folder = SCRATCH / which.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, Any] = {"case": case, "which": which}
    for step in STEPS:
        of_step = in_a_process(step, folder, case, which)
        found |= {f"{step} {key}": of_step.pop(key) for key in ("seconds", "cpu", "gib")} | of_step
    return found


def largest_rows(found: dict[str, Any]) -> Iterator[Row]:
    """What the job of 512 ranks takes."""
    n = found["ops"]
    size = f"{n:,} ops, {found['edges']:,} edges"
    name = f"scale/{found['case'].ranks} ranks"
    notes = {
        "generate": f"{n / found['generate seconds'] / 1e6:.2f} M ops/s, two at a time",
        "plan": size,
        "replay": "planned before; slack, critical path, times of all ops in files",
        "break down": "of every rank, two at a time",
    }
    for step in STEPS:
        target = "<= 60" if step == "replay" else ""
        yield Row(f"{name}: {step}", found[f"{step} seconds"], "s", target=target, note=notes[step])
    yield Row(f"{name}: replay, ops", n / found["replay seconds"] / 1e6, "M ops/s")
    for step in STEPS:
        target = "<= 16" if step != "generate" else ""
        yield Row(f"{name}: {step}, memory at the peak", found[f"{step} gib"], "GiB", target=target)


def growth_rows(found: list[dict[str, Any]]) -> Iterator[Row]:
    """Processor time of all of it by ranks and by ops, and how it grows to the largest."""
    for one in found:
        case, n = one["case"], one["ops"]
        shown = ", ".join(f"{step} {one[f'{step} cpu']:.2g} s" for step in STEPS[1:])
        gib = max(one[f"{step} gib"] for step in STEPS[1:])
        name = f"scale/{how_many(case.ranks, 'rank')} of {case.ops:,} ops: plan, replay, break down"
        note = f"of a processor; {n:,} ops: {shown}; {gib:.2g} GiB at the peak"
        yield Row(name, cpu_s(one), "s", note=note)
    middle, last = (next(one for one in found if one["case"] == case) for case in (CASES[2], LARGEST))
    each = (cpu_s(last) / last["ops"]) / (cpu_s(middle) / middle["ops"])
    yield Row("scale/time an op, 512 ranks over 64", each, "x", target="<= 1.5", note="1 were linear")


def cpu_s(found: dict[str, Any]) -> float:
    """Processor seconds of what is done with a job that is there."""
    return float(sum(found[f"{step} cpu"] for step in STEPS[1:]))


def reduced_rows(full: dict[str, Any], some: dict[str, Any], replica: dict[str, Any]) -> Iterator[Row]:
    """The largest job from some of its ranks, from one replica, and from one rank a stage."""
    size = f"{some['ops']:,} ops; {some['replay gib']:.2g} GiB at the peak"
    note = f"of a processor; {size}; waits for the others as all of them have it"
    yield Row(f"scale/{SOME} of 512 ranks: plan, replay, break down", cpu_s(some), "s", note=note)
    for name, ops, step_ns in (
        ("one rank a stage, no jitter", full["alone_ops"], full["alone_step_ns"]),
        ("one of 8 replicas, with jitter", replica["ops"], replica["step_ns"]),
    ):
        yield Row(f"scale/symmetry: {name}, ops", full["ops"] / ops, "x fewer", note=f"{ops:,} ops")
        off = 100 * (step_ns / full["step_ns"] - 1)
        yield Row(f"scale/symmetry: {name}, step", off, "%", note="from the step of all 512 ranks with jitter")


def chart(found: list[dict[str, Any]]) -> alt.HConcatChart:
    """Processor seconds and GiB over ops, ranks growing and ops of a rank growing, beside a line of slope 1."""
    rows = [
        {
            "ops": one["ops"], "step": step, "seconds": one[f"{step} cpu"], "gib": one[f"{step} gib"],
            "grows": "ranks, of 100,000 ops each" if one["case"].ops == FULL else "ops of each of 64 ranks",
        }
        for one in found
        for step in STEPS[1:]
    ]  # fmt: skip
    table = pl.DataFrame(rows)
    least, most = table.select(least=pl.min("ops"), most=pl.max("ops")).row(0)
    ends = [float(least) / 1.5, float(most) * 1.5]
    x = alt.X("ops:Q").scale(type="log", domain=ends).title("ops of the job").axis(format="~s", tickCount=4)
    colour = (
        alt.Color("step:N", sort=list(STEPS)).scale(domain=list(STEPS[1:]), range=list(CLASS_COLOURS[:3])).title(None)
    )
    shape = alt.Shape("grows:N").title("what grows")
    last = table.filter(pl.col("ops") == most)
    first = last.with_columns(seconds=pl.col("seconds") * least / most, ops=pl.lit(least, pl.Int64))
    linear = pl.concat([first, last])

    def points(y: str, title: str) -> alt.Chart:
        drawn = alt.Chart(table, width=330, height=260).mark_point(filled=True, size=70)
        return drawn.encode(x, alt.Y(f"{y}:Q").scale(type="log", nice=True).title(title), colour, shape)

    slopes = alt.Chart(linear).mark_line(color=GREY, strokeWidth=1).encode(x, y="seconds:Q", detail="step:N")
    of_time = alt.layer(slopes, points("seconds", "seconds of a processor"))
    bound = alt.Chart(pl.DataFrame({"gib": [16]})).mark_rule(color=GREY, strokeDash=[4, 4]).encode(y="gib:Q")
    of_memory = alt.layer(bound, points("gib", "GiB at the peak")).properties(title=heading("Memory", "dashed: 16 GiB"))
    of_time = of_time.properties(title=heading("Time", "lines: in proportion to the ops"))
    return alt.hconcat(of_time, of_memory)


def main() -> None:
    """All cases, the rows and the chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="a step of a case, in JSON")
    parser.add_argument("--small", action="store_true", help="jobs of a hundredth, nothing recorded: to try this out")
    given = parser.parse_args()
    if given.one:
        one(*json.loads(given.one))
        return
    SCRATCH.mkdir(parents=True, exist_ok=True)
    scaled = (case._replace(ops=max(case.ops // 100, 500)) if given.small else case for case in CASES)
    try:
        found = [measured(case) for case in scaled]
        some, replica = (measured(found[-1]["case"], which) for which in ("some", "one replica"))
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    drawn = chart(found).to_dict()
    if given.small:
        return
    record_timed(RESULTS, [*largest_rows(found[-1]), *growth_rows(found), *reduced_rows(found[-1], some, replica)])
    CHART.write_bytes(to_png(drawn))


if __name__ == "__main__":
    main()
