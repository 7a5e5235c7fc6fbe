"""Every reader of the package, with what `tests.soak` needs to put damaged files before it."""

from __future__ import annotations

import io
import json
import os
import signal
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

from lumos_nb import chakra, layout
from lumos_nb.config import Fabric, Gpu, read_sheet
from lumos_nb.costs.calibration import load_calibration
from lumos_nb.costs.embedding_net import LookupNet
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.critical_path import replay
from lumos_nb.embedding_tables import complete_tables
from lumos_nb.errors import BenchmarkError, InputError, LumosError
from lumos_nb.generate_cli import _spec, _table
from lumos_nb.graph import build_graph
from lumos_nb.jobs import open_job
from lumos_nb.ledger import load_prediction, read_ledger
from lumos_nb.rankwise import load_job
from lumos_nb.traces import cache as cached
from lumos_nb.traces.execution_trace import load_execution_trace
from lumos_nb.traces.run import Run, load_run
from lumos_nb.transformer import Transformer
from lumos_nb.workloads.dlrm.pretraining import load_costs
from lumos_nb.workloads.llm.table_rows import read_row
from tests import soak_seeds as seeds
from tests import test_similarity
from tests.mutations import (
    JSON,
    NUMBERS,
    Mutation,
    either,
    of_bytes,
    of_csv,
    of_json,
    of_messages,
    of_parquet,
    of_sqlite,
    of_tar,
    packed,
)

Seeds = Mapping[str, bytes]


@dataclass(frozen=True)
class Reader:
    """What reads a file.

    Attributes
    ----------
    read
        Given the path of a file, what it says of irregularities in it: a seed with another answer was repaired.
    seeds, file, mutate
        What the files are damaged from, their name, and how. Without a name, the seeds are files of one folder, each
        under its own, of which one is damaged.
    every
        One in so many inputs is put before it: of what takes long, and of what only uses what another has read.
    named
        Whether an error must name the file.
    runs
        Modules of the package, or of `benchmarks`, that it calls: `make soak` begins anew when they, or what they
        import, change.
    """

    read: Callable[[Path], object]
    seeds: Callable[[], Seeds]
    file: str
    mutate: Mutation
    every: int = 1
    named: bool = True
    runs: str = "traces.run"


def _said(run: Run) -> tuple[str, ...]:
    dropped = run.report.filter(run.report["what"].str.starts_with("dropped"))["count"].sum()
    if not any("ranks" in about for about in run.metadata.values()):  # of which several rows may be of one event
        assert dropped == run.ranks["dropped"].sum(), "an event is neither kept nor counted"
    return tuple(sorted(set(run.report["what"])))


def _run(path: Path) -> object:
    return _said(load_run(path, cache=False))


def _cached_run(path: Path) -> object:
    """Read, kept in the cache, and read from there."""
    first = load_run(path)
    again = load_run(path)
    assert again.events.equals(first.events), "the cache gives other events than the file"
    assert repr(again.metadata) == repr(first.metadata), "the cache says something else of the file"  # nan is itself
    assert again.report.equals(first.report), "the cache has other repairs than the file"
    return _said(again)


def _graph(path: Path) -> object:
    return build_graph(load_run(path, cache=False)).ops.height > 0


def _rank_by_rank(path: Path) -> object:
    """The folder as a job, which is the graph of all its ranks in one memory, or as little a result as that."""
    with TemporaryDirectory() as folder:
        graph = _or_refused(lambda: replay(build_graph(load_run(path.parent, cache=False))))
        job = _or_refused(lambda: load_job(path.parent, folder, cache=False).replay())
    if isinstance(graph, LumosError):
        assert isinstance(job, LumosError), "a job is made of what gives no graph"
        raise graph
    if isinstance(job, LumosError):
        raise AssertionError("no job is made of what gives a graph") from job
    lengths = [(result.origin_ns, result.step_ns, result.makespan_ns) for result in (graph, job)]
    assert lengths[0] == lengths[1], f"a graph and a job of the same ranks differ: {lengths}"
    return None


def _or_refused(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except LumosError as error:
        return error


def _folder(path: Path) -> object:
    return _said(load_run(path.parent, cache=False))


def _entry(path: Path) -> object:
    """The run beside `path`, whose parse in the cache is `path`."""
    trace = path.parent / "trace.json"
    trace.write_bytes(seeds.made_kineto())
    kept = cached.cache_path(trace, path.parent)
    kept.parent.mkdir(exist_ok=True)
    path.rename(kept)
    try:
        return _said(load_run(trace))
    finally:
        kept.unlink()
        trace.unlink()


@cache
def _entry_seeds() -> Seeds:
    with TemporaryDirectory() as name:
        trace = Path(name) / "trace.json"
        trace.write_bytes(seeds.made_kineto())
        load_run(trace)
        kept = cached.cache_path(trace, trace.parent).read_bytes()
    return {"made": kept}


def _tables(path: Path) -> object:
    return complete_tables(_table(path)).height


def _row(path: Path) -> object:
    try:
        row = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError("no JSON, so no row") from error
    return read_row(row).assumptions


def _steps(path: Path) -> object:
    from lumos_nb.beside import timed_steps

    ranks = _made_up().ranks.with_columns(path=pl.lit(str(path.parent / "rank-0.json")))
    return timed_steps(replace(_made_up(), ranks=ranks)).height


@cache
def _made_up() -> Run:
    return test_similarity.step()


def _capture(path: Path) -> object:
    from lumos_nb.exchange.benchmark.tables import _captured

    return _captured(path.parent) is None


def _program(path: Path) -> object:
    """The table of a benchmark program, up to the memory that it takes; a quarter of a GiB is there."""
    from lumos_nb.exchange.benchmark import binding

    binding.free_bytes = lambda _: 1 << 28
    try:
        with binding.telling_damage():
            binding.Bench(path.parent, "cpu", lambda *_: True).allocate()
    except binding.Unusable as error:
        raise BenchmarkError(f"{path.name}: {error}") from error
    return None


def _validated(path: Path) -> object:
    return chakra.validate(path).height


def _chakra_graph(path: Path) -> object:
    return chakra.to_graph(path).ops.height > 0


def _groups(path: Path) -> object:
    from lumos_nb.exchange.chakra.files import read_groups

    return read_groups(path) is None


def _read(path: Path) -> object:
    chakra.write_file(chakra.read_file(path), path.with_name("again.et"))  # what is read can be written
    path.with_name("again.et").unlink()
    return None


def _silent(function: Callable[[Path], object]) -> Callable[[Path], object]:
    """A reader that says nothing of irregularities."""

    def read(path: Path) -> object:
        function(path)
        return None

    return read


def of_npz(data: bytes, noise: Random) -> bytes:
    """Of a file of numpy's arrays: of its bytes, of which arrays there are, or of one's own bytes."""
    if noise.random() < 0.3:
        return of_bytes(data, noise)
    with zipfile.ZipFile(io.BytesIO(data)) as found:
        arrays = [(name, found.read(name)) for name in found.namelist()]
    at, how = noise.randrange(len(arrays)), noise.randrange(4)
    name, body = arrays[at]
    if how == 0:
        del arrays[at]
    else:
        arrays[at] = name, noise.choice(arrays)[1] if how == 1 else of_npy(body, noise)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, body in arrays:
            made.writestr(name, body)
    return out.getvalue()


def of_npy(data: bytes, noise: Random) -> bytes:
    """Of an array: of its header, which says type and shape, of its bytes, or of one of its numbers."""
    how = noise.randrange(3)
    if how == 0:
        return of_bytes(data[:128], noise) + data[128:]
    try:
        array = np.load(io.BytesIO(data))
        array.flat[noise.randrange(array.size)] = noise.choice(NUMBERS) if how == 1 else noise.randrange(array.size)
    except (ValueError, OverflowError, TypeError):  # no such number is of its type, or it holds none
        return of_bytes(data, noise)
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _of_file(data: bytes, noise: Random) -> bytes:
    """Of a file of one of the kinds that a folder of ours has."""
    kinds: dict[bytes, Mutation] = {b"PK": of_npz, b"PAR1": of_parquet, b"\x93NUMPY": of_npy}
    return next((how for head, how in kinds.items() if data.startswith(head)), JSON)(data, noise)


_JOB_SAYS: dict[str, str] = {}
"""What the sound job says: it is read first."""

_MADE = ("plan", "replayed")
"""Folders of a job."""


def _job(path: Path) -> object:
    """The job that `path` is of, and all that it holds; times of a replay are damaged once it has written them."""
    times, job = path.read_bytes(), open_job(path.parent.parent if path.parent.name in _MADE else path.parent)
    result = job.replay()
    if path.parent.name == "replayed":
        path.write_bytes(times)
    tables = [table for rank in job.ranks["rank"] for table in (job.edges_to(rank), result.ops_of(rank))]
    said = "".join(table.write_json() for table in [*tables, result.path, result.breakdown()])
    assert said == _JOB_SAYS.setdefault("sound", said), "a damaged job says something else than the sound one"
    return None


def _samples(path: Path) -> object:
    from benchmarks.machine.fit import read_samples

    return read_samples(path.parent)[0].height


READERS: dict[str, Reader] = {
    "Kineto JSON": Reader(_run, seeds.kineto, "rank-0.json", JSON),
    "Kineto JSON, gzip": Reader(_run, lambda: seeds.packed(seeds.kineto()), "rank-0.json.gz", packed(JSON)),
    "Chrome list of events": Reader(_run, seeds.lists, "rank-0.json", JSON),
    "Nsight Systems SQLite": Reader(_run, seeds.sqlite, "report.sqlite", of_sqlite, runs="traces.run traces.nsys"),
    "rocprofiler JSON": Reader(_run, seeds.rocprofiler, "5_results.json", JSON, runs="traces.run traces.rocprofiler"),
    "timeline, Parquet": Reader(
        _run, seeds.timeline_tables, "trace-a.parquet", of_parquet, runs="traces.run traces.timeline"
    ),
    "timeline, JSON": Reader(_run, seeds.timeline_lists, "timeline-a.json", JSON, runs="traces.run traces.timeline"),
    "pipeline schedule": Reader(_run, seeds.schedules, "pp_rank_0.json", JSON, runs="traces.run traces.schedule"),
    "tar of a run": Reader(_run, seeds.archives, "run.tar", of_tar(JSON)),
    "tar.gz of a run": Reader(_run, lambda: seeds.packed(seeds.archives()), "run.tar.gz", of_tar(JSON)),
    "folder of two ranks": Reader(_folder, seeds.two_ranks, "", JSON, named=False),
    "trace kept in the cache": Reader(_cached_run, seeds.kineto, "rank-0.json", JSON, every=4),
    "cached parse": Reader(_entry, _entry_seeds, "entry.parquet", of_parquet),
    "graph of a trace": Reader(_graph, seeds.steps, "rank-0.json", JSON, every=50, named=False, runs="graph"),
    "job of a folder": Reader(_rank_by_rank, seeds.two_ranks, "", JSON, every=100, named=False, runs="rankwise"),
    "execution trace": Reader(
        lambda path: load_execution_trace(path).notes.height,
        seeds.execution_traces,
        "et.json",
        JSON,
        runs="traces.execution_trace",
    ),
    "Chakra protobuf": Reader(
        _read, seeds.messages, "a.0.et", either(of_bytes, of_messages), runs="exchange.chakra.files"
    ),
    "Chakra JSON": Reader(_read, lambda: seeds.chakra_texts(".json"), "a.0.json", JSON, runs="exchange.chakra.files"),
    "Chakra JSON lines": Reader(
        _read, lambda: seeds.chakra_texts(".jsonl"), "a.0.jsonl", JSON, runs="exchange.chakra.files"
    ),
    "Chakra groups": Reader(
        _groups, lambda: {"made": b'{"0": [0, 1], "1": [2, 3]}'}, "a.groups.json", JSON, runs="exchange.chakra.files"
    ),
    "Chakra, checked": Reader(
        _validated, seeds.messages, "a.0.et", of_messages, every=20, named=False, runs="exchange.chakra"
    ),
    "Chakra to a graph": Reader(
        _chakra_graph, seeds.whole_messages, "a.0.et", of_messages, every=20, named=False, runs="exchange.chakra"
    ),
    "calibration": Reader(_silent(load_calibration), seeds.calibrations, "mine.json", JSON, runs="costs.calibration"),
    "data sheet of a GPU": Reader(
        _silent(lambda path: read_sheet(path, Gpu)), lambda: seeds.sheets("gpus"), "gpu.json", JSON, runs="config"
    ),
    "data sheet of a fabric": Reader(
        _silent(lambda path: read_sheet(path, Fabric)),
        lambda: seeds.sheets("fabrics"),
        "fabric.json",
        JSON,
        runs="config",
    ),
    "model of lookups": Reader(
        _silent(PhysicalLookup.load), seeds.lookups, "lookup.json", JSON, runs="costs.embeddings"
    ),
    "network of lookups": Reader(
        _silent(LookupNet.load), seeds.networks, "net.npz", of_npz, runs="costs.embedding_net"
    ),
    "costs of plans": Reader(
        _silent(lambda path: load_costs(path.parent)),
        seeds.plan_costs,
        "",
        _of_file,
        named=False,
        runs="workloads.dlrm.pretraining",
    ),
    "saved prediction": Reader(
        _silent(load_prediction), lambda: {"made": seeds.predictions()[0]}, "p.json", JSON, runs="ledger"
    ),
    "ledger": Reader(
        _silent(read_ledger), lambda: {"made": seeds.predictions()[1]}, "ledger.jsonl", JSON, runs="ledger"
    ),
    "specification": Reader(
        _silent(lambda path: _spec(Transformer, [str(path)])),
        seeds.specifications,
        "model.json",
        JSON,
        runs="generate_cli",
    ),
    "specification of a cluster": Reader(
        _silent(lambda path: _spec(layout.Cluster, [str(path)])),
        seeds.clusters,
        "cluster.json",
        JSON,
        runs="generate_cli",
    ),
    "embedding tables, CSV": Reader(_tables, seeds.tables_csv, "tables.csv", of_csv, named=False, runs="generate_cli"),
    "embedding tables, Parquet": Reader(
        _tables, seeds.tables_parquet, "tables.parquet", of_parquet, named=False, runs="generate_cli"
    ),
    "published row": Reader(
        _row, seeds.published_rows, "row.json", of_json, named=False, runs="workloads.llm.table_rows"
    ),
    "times of steps": Reader(
        _steps,
        lambda: {"made": b"step,wall_ns,cpu_ns\n1,1000,900\n2,1100,950\n"},
        "steps.csv",
        of_csv,
        runs="beside",
    ),
    "capture.json": Reader(_capture, seeds.captures, "capture.json", JSON, runs="exchange.benchmark.tables"),
    "saved job": Reader(_job, seeds.job, "", _of_file, every=4, named=False, runs="jobs"),
    "samples of a machine": Reader(
        _samples, seeds.samples, "", _of_file, named=False, runs="costs.fitting costs.host benchmarks.machine.fit"
    ),
    "benchmark program": Reader(_program, seeds.programs, "workload.json", JSON, runs="exchange.benchmark.binding"),
}
"""Name -> reader."""


def _faulty(does: Callable[[Path], object]) -> Reader:
    """A reader that does so with files below "@"."""

    def read(path: Path) -> None:
        if b"" < path.read_bytes() < b"@":
            does(path)

    return Reader(read, lambda: {"made": b""}, "x.json", lambda _, noise: bytes([noise.randrange(256)]))


def _refuse(_: Path) -> None:
    raise InputError("something is wrong")


FAULTY: dict[str, tuple[Reader, str]] = {
    "raises": (_faulty(lambda path: int(path.name)), "ValueError: invalid literal"),
    "warns": (_faulty(lambda _: warnings.warn("odd", UserWarning, stacklevel=1)), "UserWarning: odd"),
    "names no file": (_faulty(_refuse), "does not name the file"),
    "dies": (_faulty(lambda _: os.kill(os.getpid(), signal.SIGSEGV)), "the process died: -11"),
    "hangs": (_faulty(lambda _: [None for _ in iter(int, 1)]), "had not ended after"),
    "waits": (_faulty(lambda _: time.sleep(1000)), "had not ended after"),
    "takes memory": (_faulty(lambda _: len(b"x" * (500 << 20))), "MiB"),
    "leaves a file": (_faulty(lambda path: path.with_name(".part-1").write_bytes(b"")), "left behind: ['.part-1']"),
}
"""Name -> reader that fails, for a test of the soak itself; and what is said of it."""


def escape_of(error: BaseException, reader: Reader, path: Path) -> str | None:
    """Why an error is none of ours, or does not say of what file it is; None if it is as it should be."""
    if not isinstance(error, LumosError):
        return f"{type(error).__name__}: {str(error)[:200]}"
    if reader.named and path.name not in str(error):
        return f"an error that does not name the file: {type(error).__name__}: {str(error)[:200]}"
    return None
