"""Programs that are killed at any moment: what stands under a final name is whole, and the next run ends as if alone.

`make kill` starts jobs of `JOBS` 220 times, each in a folder of its own, and kills them with all their processes: half
at a moment drawn evenly from all the time that the job takes, half from its time after the first file. Then the same
job runs there to its end, and the folder is compared with that of a run that nobody disturbed.
`python -m tests.kill_soak --kills 5 --only search` does less.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from lumos_nb import datasets, whole_files
from lumos_nb.errors import LumosError
from lumos_nb.traces import cache
from lumos_nb.whole_files import PART, STALE_S

ROOT = Path(__file__).parents[1]
SEED, RUN = 0, "gpt-ddp"
OVER = 1.1
"""Moments are drawn up to so much of what a job took, so that some kills come after its end."""


# --- the jobs, each into a folder ---------------------------------------------------------------------------------


def parse(folder: Path, processes: int = 0) -> None:
    """Read a run for the first time, into a cache."""
    from lumos_nb.traces.run import load_run

    os.environ[cache.CACHE_ENV] = str(folder)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(processes, spawn) if processes else nullcontext() as pool:
        run = load_run(datasets.path(RUN), executor=pool)
    with whole_files.whole(folder / "answer.json") as part:
        of_cache = run.report.filter(what="cache")["reason"].to_list()
        part.write_text(json.dumps([run.events.hash_rows().sum(), of_cache]))


def parse_by_processes(folder: Path) -> None:
    """As `parse`, by two processes."""
    parse(folder, 2)


def tables(folder: Path) -> None:
    """Write the tables of a run."""
    from lumos_nb.traces.run import load_run

    load_run(datasets.path(RUN)).to_parquet(folder)


def perfetto(folder: Path) -> None:
    """Write a run for a viewer."""
    from lumos_nb.traces.run import load_run

    load_run(datasets.path(RUN)).to_perfetto(folder / "run.json.gz")


def chakra(folder: Path) -> None:
    """Write a run as Chakra files."""
    import lumos_nb as ln

    ln.chakra.write(ln.build_graph(ln.load_run(datasets.path(RUN))), folder)


def benchmark(folder: Path) -> None:
    """Write a run of two ranks as a program."""
    import lumos_nb as ln

    ln.benchmark.generate(datasets.path(RUN), folder)


def report(folder: Path) -> None:
    """Write a step's report as the command does."""
    from lumos_nb.cli import main

    if main(["replay", str(datasets.path(RUN)), "--out", str(folder), "--predict", "0", "--json"]):
        raise AssertionError("the command failed")


def job_of_ranks(folder: Path) -> None:
    """Cut a graph by rank into a folder, and replay it there."""
    import lumos_nb as ln

    ln.save_job(ln.build_graph(ln.load_run(datasets.path(RUN))), folder).replay()


def search(folder: Path) -> None:
    """Search layouts by two processes, and write what was found."""
    import lumos_nb as ln

    model, train = ln.Transformer.named("llama-3-8b"), ln.Training(micro_batch=1, global_batch=8, seq=4096)
    cluster = ln.Cluster(gpu="H100-SXM-80GB", inside="NVLink4 NVSwitch")
    fixed = {"pp": 1, "cp": 1, "schedule": "1f1b", "chunks": 1, "shard": 0, "micro_batch": 1, "recompute": "full"}
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = ln.search(model, cluster, train, keep=4, executor=pool, **fixed)
    found.to_parquet(folder)


def calibrate(folder: Path) -> None:
    """Measure this machine, as briefly as can be, and fit a calibration."""
    from benchmarks.machine.record import main

    if main(["--out", str(folder), "--budget", "1", "--ranks", "2"]):
        raise AssertionError("the command failed")


# --- what stands in a folder --------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, Path]:
    """Files under final names."""
    every = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {str(name): path for name, path in every.items() if not any(part.endswith(PART) for part in name.parts)}


def parts_of(folder: Path) -> list[Path]:
    """Files, and folders of a job, that somebody was writing."""
    return [*folder.rglob(f"*{PART}")]


def content(path: Path) -> object:
    """What must be the same in every run: all but the time at which a prediction was made."""
    data = path.read_bytes()
    return {**json.loads(data), "made": None} if path.name == "prediction.json" else data


def as_the_whole(folder: Path, whole: Path) -> list[str]:
    """What is wrong with the files of a folder that must be those of an undisturbed run."""
    right = files_of(whole)
    found = files_of(folder).items()
    return [name for name, path in found if name not in right or content(path) != content(right[name])]


def as_measured(folder: Path, whole: Path) -> list[str]:
    """What is wrong with the files of a calibration, whose figures are never the same."""
    import polars as pl

    import lumos_nb as ln
    from benchmarks.machine.fit import read_samples

    wrong = []
    for name, path in files_of(folder).items():
        try:
            if path.suffix == ".parquet":
                same = pl.read_parquet(path).schema == pl.read_parquet(whole / name).schema
            elif name == "cpu.json":
                same = bool(ln.load_calibration(path).coverage().height)
            elif name == "provenance.json":
                same = bool(read_samples(folder)[0].height)
            else:
                same = json.loads(path.read_bytes()).keys() == json.loads((whole / name).read_bytes()).keys()
            wrong += [] if same else [name]
        except Exception as error:
            wrong.append(f"{name}: {error}")
    return wrong


def as_a_job(folder: Path, whole: Path) -> list[str]:
    """What is wrong with a job: it may be none yet; what there is of one is all of it, and replays as it should."""
    import lumos_nb as ln

    if not (folder / "ranks.parquet").exists():
        return []
    try:
        found, right = ln.open_job(folder), ln.open_job(whole)
        same = {f"ops of rank {rank}": found.ops_of(rank).equals(right.ops_of(rank)) for rank in right.ranks["rank"]}
        same |= {f"edges to rank {r}": found.edges_to(r).equals(right.edges_to(r)) for r in right.ranks["rank"]}
        same["the step"] = found.replay().step_ns == right.replay().step_ns
    except LumosError as error:
        return [repr(error)]
    return [what for what, is_so in same.items() if not is_so]


class Job(NamedTuple):
    """What is killed, how often of 220 times, and how the files that it leaves are judged."""

    do: Callable[[Path], None]
    kills: int
    wrong: Callable[[Path, Path], list[str]] = as_the_whole


JOBS = {
    "parse": Job(parse, 60),
    "parse, 2 processes": Job(parse_by_processes, 10),
    "calibrate": Job(calibrate, 10, as_measured),
    "search": Job(search, 20),
    "job of ranks": Job(job_of_ranks, 20, as_a_job),
    "export: tables": Job(tables, 40),
    "export: Perfetto": Job(perfetto, 20),
    "export: Chakra": Job(chakra, 20),
    "export: benchmark": Job(benchmark, 10),
    "export: report": Job(report, 10),
}


# --- killing ------------------------------------------------------------------------------------------------------


@contextmanager
def started(name: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has imported what it needs and begins the job; killed in the end, with those that it started."""
    command = [sys.executable, "-m", "tests.kill_soak", "--do", name, str(folder)]
    quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **quiet) as child:  # type: ignore[call-overload]
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "begins\n"
            yield child
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(child.pid, signal.SIGKILL)


def in_a_child(name: str, folder: Path) -> None:
    """Do a job and say when it begins; its processes are killed with it, as one session."""
    import lumos_nb as ln

    ln.load_run, ln.build_graph, ln.chakra.write  # noqa: B018 (names are loaded when first used)
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    JOBS[name].do(folder)


@dataclass
class Outcome:
    """What came of the kills of a job."""

    name: str
    took_s: float = 0.0
    writing_s: float = 0.0
    """From its first file to its end."""
    before: int = 0
    """Kills before a file was there."""
    during: int = 0
    after: int = 0
    valid: int = 0
    """Files under final names that were whole after a kill."""
    parts: int = 0
    """Files that were left half written."""
    escapes: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """How many there were."""
        return self.before + self.during + self.after


def kill(name: str, times: int, seed: int, scratch: Path) -> Outcome:
    """Kill a job so many times, each in a folder of its own."""
    job, outcome, noise = JOBS[name], Outcome(name), random.Random(f"{name} {seed}")
    whole = scratch / "whole"
    whole.mkdir(parents=True)
    with started(name, whole) as child:
        began = time.monotonic()
        _wait_for_files(child, whole)
        first = time.monotonic()
        assert child.wait() == 0, f"{name} fails when nobody disturbs it"
        outcome.took_s, outcome.writing_s = (time.monotonic() - since for since in (began, first))
    assert files_of(whole)
    assert parts_of(whole) == []
    for number in range(times):
        folder = scratch / str(number)
        folder.mkdir()
        with started(name, folder) as child:
            if number % 2:
                _wait_for_files(child, folder)
            time.sleep(noise.uniform(0, OVER * (outcome.writing_s if number % 2 else outcome.took_s)))
            ended = child.poll()
        _judge(job, folder, whole, ended is not None, outcome)
        shutil.rmtree(folder)
    return outcome


def _wait_for_files(child: subprocess.Popen[str], folder: Path) -> None:
    """Wait until a job has begun to write, or has ended."""
    while child.poll() is None and not any(path.is_file() for path in folder.rglob("*")):
        time.sleep(0.001)


def _judge(job: Job, folder: Path, whole: Path, ended: bool, outcome: Outcome) -> None:
    """Look at what a kill left, run the job once more, and look again."""
    stand, parts = files_of(folder), parts_of(folder)
    wrong = job.wrong(folder, whole)
    outcome.after += ended
    outcome.during += not ended and bool(stand or parts)
    outcome.before += not ended and not (stand or parts)
    outcome.valid += len(stand) - len(wrong)
    outcome.parts += len(parts)
    if ended and stand.keys() != files_of(whole).keys():
        wrong.append("it had ended, and files were missing")
    for part in parts:  # a minute later
        os.utime(part, (0, time.time() - STALE_S - 1))
    whole_files.remove_stale.cache_clear()
    try:
        with patch.dict(os.environ), redirect_stdout(io.StringIO()):
            job.do(folder)
        wrong += [f"after the next run: {name}" for name in job.wrong(folder, whole)]
        if files_of(folder).keys() != files_of(whole).keys() or parts_of(folder):
            wrong.append("after the next run: other files than of a run that nobody disturbed")
    except Exception as error:
        wrong.append(f"the next run: {error!r}")
    outcome.escapes += wrong


def as_text(outcomes: list[Outcome]) -> str:
    """The outcomes as a table."""
    counts = ("kills", "before", "during", "after", "valid", "parts", "escapes")
    heads = f"{'job':20}{'takes':>8}" + "".join(f"{count:>8}" for count in counts)
    lines = [
        f"{one.name:20}{one.took_s:7.1f}s{one.kills:8}{one.before:8}{one.during:8}{one.after:8}{one.valid:8}"
        f"{one.parts:8}{len(one.escapes):8}"
        for one in outcomes
    ]
    sums = f"{'all':28}{sum(one.kills for one in outcomes):8}{sum(len(one.escapes) for one in outcomes):48}"
    return "\n".join([heads, *lines, sums, *(f"{one.name}: {what}" for one in outcomes for what in one.escapes)])


def record_rows(outcomes: list[Outcome]) -> None:
    """Put the outcomes into the table of documents."""
    from benchmarks.rows import RESULTS, Row, record

    rows = [
        Row(
            name=f"kills/{one.name}",
            value=one.kills - len(one.escapes),
            unit="",
            baseline="kills",
            baseline_value=one.kills,
            target=f">= {one.kills}",
            note=f"{one.before} before the first file, {one.during} beside files, {one.after} after the end; "
            f"{one.valid} files stood whole, and {one.parts} parts went with the next run",
        )
        for one in outcomes
    ]
    record(RESULTS, rows)


def main() -> int:
    """Kill jobs as the command line says; 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--do", nargs=2, metavar=("JOB", "FOLDER"), help="do a job: what is killed")
    parser.add_argument("--kills", type=int, help="of each job; 220 in all by default, which are recorded")
    parser.add_argument("--only", choices=JOBS, action="append", help="this job")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    if given.do:
        in_a_child(given.do[0], Path(given.do[1]))
        return 0
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[cache.CACHE_ENV] = f"{scratch}/cache"
        for name in given.only or JOBS:
            outcomes.append(kill(name, given.kills or JOBS[name].kills, given.seed, Path(scratch) / name))
            sys.stderr.write(f"{as_text(outcomes[-1:])}\n")
    sys.stdout.write(f"{as_text(outcomes)}\n")
    if not given.only and not given.kills:
        record_rows(outcomes)
    return int(any(one.escapes for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
