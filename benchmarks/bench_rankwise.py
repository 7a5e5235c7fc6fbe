"""Traces of many ranks to a job, a rank at a time, beside all in one memory: `make scale-traces` writes its rows.

Ranks of a made-up data- and tensor-parallel job, each a Kineto file, are written to build/scale-traces; then each way
reads them in a process of its own, whose peak of memory counts. Nothing is taken from a cache.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lumos_nb as ln
from benchmarks.bench_scale import since, started
from benchmarks.make_large_trace import Place, write_large_trace
from benchmarks.rows import RESULTS, Row, record_timed

SCRATCH = Path(__file__).parents[1] / "build" / "scale-traces"
EVENTS, TURNS_A_STEP = 90_000, 2_000
"""Of a rank, in five steps."""
RANKS = (8, 64)
ONE_MEMORY = 64
"""More ranks than these are read a rank at a time only."""


def write(ranks: int, events: int) -> Path:
    """A folder with the traces of so many ranks."""
    folder = SCRATCH / f"{ranks}-ranks"
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_write_rank, folder, ranks, events), range(ranks)))
    return folder


def _write_rank(folder: Path, ranks: int, events: int, rank: int) -> None:
    place = Place(rank, ranks, max(TURNS_A_STEP * events // EVENTS, 2))
    write_large_trace(folder / f"rank-{rank}.json.gz", events, place)


def one(way: str, folder: str) -> None:
    """Read the traces one way in this process, and print what it took."""
    clocks = started()
    if way == "by rank":
        ops, edges = ln.load_job(folder, f"{folder}-job", cache=False).ranks.select("ops", "edges").sum().row(0)
    else:
        graph = ln.build_graph(ln.load_run(folder, cache=False))
        ops, edges = len(graph.ops), len(graph.edges)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({**since(clocks), "gib": gib, "ops": ops, "edges": edges}))


def in_a_process(way: str, folder: Path) -> dict[str, Any]:
    """What reading the traces takes."""
    command = [sys.executable, "-m", "benchmarks.bench_rankwise", "--one", json.dumps([way, str(folder)])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{folder} {way} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{folder.name} {way}: {found['cpu']:.1f} s of a processor, {found['gib']:.2f} GiB")
    return found


def rows(ranks: int, by_rank: dict[str, Any], at_once: dict[str, Any] | None) -> Iterator[Row]:
    """What it took, beside all in one memory where that was tried."""
    if at_once and (by_rank["ops"], by_rank["edges"]) != (at_once["ops"], at_once["edges"]):
        raise SystemExit(f"{ranks} ranks: {by_rank} is not {at_once}")
    beside = {"baseline": "in one memory"} if at_once else {}
    for what, key, unit in (("time", "cpu", "s"), ("memory at the peak", "gib", "GiB")):
        value = at_once[key] if at_once else None
        note = f"of a processor; {by_rank['ops']:,} ops of a step" if key == "cpu" else ""
        yield Row(f"by_rank/{ranks} ranks: {what}", by_rank[key], unit, baseline_value=value, note=note, **beside)


def main() -> None:
    """Every number of ranks, and the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="a way and a folder, in JSON")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="numbers of ranks, such as 8 64 512")
    parser.add_argument(
        "--small", action="store_true", help="a twentieth of the events, nothing recorded: to try this out"
    )
    given = parser.parse_args()
    if given.one:
        one(*json.loads(given.one))
        return
    measured: list[Row] = []
    try:
        for ranks in given.ranks:
            folder = write(ranks, EVENTS // 20 if given.small else EVENTS)
            by_rank = in_a_process("by rank", folder)
            at_once = in_a_process("at once", folder) if ranks <= ONE_MEMORY else None
            measured += rows(ranks, by_rank, at_once)
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    if not given.small:
        record_timed(RESULTS, measured)


if __name__ == "__main__":
    main()
