"""Paths that lead astray: names that no file has, pipes and devices, loops, archives that reach out, full folders."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb.costs.embedding_net import LookupNet
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.errors import LumosError, RunError, TraceError
from lumos_nb.graph import Graph
from lumos_nb.ledger import load_prediction, read_ledger
from lumos_nb.report import write_report
from lumos_nb.traces.formats import read_trace
from lumos_nb.traces.json_stream import MAX_BYTES_ENV
from lumos_nb.traces.run import Run, load_run
from lumos_nb.workloads.dlrm.pretraining import load_costs
from tests.trace_builder import graph_of, repeated, write_kineto

READERS: dict[str, Callable[[Any], object]] = {
    "load_run": load_run,
    "load_run of a list": lambda path: load_run([path]),
    "load_execution_trace": ln.load_execution_trace,
    "read_trace": read_trace,
    "chakra.read_file": ln.chakra.read_file,
    "chakra.stream_file": lambda path: list(ln.chakra.stream_file(path)),
    "chakra.rank_files": ln.chakra.rank_files,
    "chakra.validate": ln.chakra.validate,
    "chakra.link": lambda path: ln.chakra.link(path, path),
    "benchmark.workload": ln.benchmark.workload,
    "benchmark.compare": lambda path: ln.benchmark.compare(path, path),
    "load_prediction": load_prediction,
    "read_ledger": read_ledger,
    "load_calibration": ln.load_calibration,
    "load_costs": load_costs,
    "PhysicalLookup.load": PhysicalLookup.load,
    "LookupNet.load": LookupNet.load,
}
NODES = ln.chakra.Nodes.of(pl.DataFrame({"id": [1], "name": ["gemm"], "dur_us": [120]}))
NAMES = {
    "NUL": "a\0b",
    "more than 255 bytes": "x" * 300,
    "more than 255 bytes in a folder": "é" * 150 + "/y",
    "too deep": "a/" * 3000,
    "half a surrogate pair": "\ud800",
}
THERE = {
    **NAMES,
    "control characters": "a\x1b[2J\nb",
    "a pipe": "pipe",
    "a device": "/dev/zero",
    "a link to itself": "loop",
    "a number": 5,
    "bytes": b"x",
    "no text": "",
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pipe, and a link that leads to itself."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(trace_in(tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize("name", THERE.values(), ids=THERE)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_cannot_be_read_is_an_error_that_a_terminal_can_show(read: Callable[[Any], object], name: Any) -> None:
    with pytest.raises(LumosError) as caught:
        read(name)
    assert not set(str(caught.value)) & set("\0\x1b")
    assert len(str(caught.value)) < 13_000


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_what_no_file_can_be_called_is_not_written(name: str, run: Run, place: Path) -> None:
    graph = graph_of(repeated(lambda trace, _, start: trace.op("aten::mm", start + 100, start + 300)))
    before = sorted(place.iterdir())
    trace = ln.datasets.path("gpt-single")
    for write in (
        lambda: run.to_parquet(name),
        lambda: run.to_perfetto(name),
        lambda: ln.chakra.write(graph, name),
        lambda: ln.chakra.write_file(NODES, name),
        lambda: ln.chakra.write_ranks([(0, NODES)], name, "chakra", {}),
        lambda: ln.chakra.write_ranks([(0, NODES)], ".", name, {}),
        lambda: ln.benchmark.generate(trace, name),
        lambda: ln.load_calibration("a100").save(name),
        lambda: ln.save_prediction(name, run, change="x", times=1.0, model_error=0.1),
    ):
        with pytest.raises(LumosError):
            write()
    assert sorted(place.iterdir()) == before


def _writers(run: Run, graph: Graph) -> dict[str, Callable[[Any], object]]:
    """What makes a folder and writes into it."""
    trace, report = ln.datasets.path("gpt-single"), ln.step_report(run)
    return {
        "Run.to_parquet": run.to_parquet,
        "chakra.write": lambda folder: ln.chakra.write(graph, folder),
        "chakra.write_ranks": lambda folder: ln.chakra.write_ranks([(0, NODES)], folder, "chakra", {}),
        "benchmark.generate": lambda folder: ln.benchmark.generate(trace, folder),
        "save_job": lambda folder: ln.save_job(graph, folder),
        "load_job": lambda folder: ln.load_job(run.ranks["path"][0], folder),
        "write_report": lambda folder: write_report(report, folder),
    }


def test_no_text_is_not_the_folder_that_one_is_in(run: Run, place: Path) -> None:
    graph = graph_of(repeated(lambda trace, _, start: trace.op("aten::mm", start + 100, start + 300)))
    before = sorted(place.iterdir())
    for write in (
        *_writers(run, graph).values(),
        run.to_perfetto,
        lambda path: ln.chakra.write_file(NODES, path),
        lambda path: ln.save_prediction(path, run, change="x", times=1.0, model_error=0.1),
    ):
        with pytest.raises(LumosError, match="an empty text is no path"):
            write("")
    assert sorted(place.iterdir()) == before


def test_a_file_in_the_place_of_a_folder_is_called_one(run: Run, place: Path) -> None:
    graph = graph_of(repeated(lambda trace, _, start: trace.op("aten::mm", start + 100, start + 300)))
    (place / "taken").write_text("mine")
    for name, write in _writers(run, graph).items():
        for folder in ("taken", "taken/deeper"):
            with pytest.raises(LumosError, match="taken is a file, no folder") as caught:
                write(folder)
            assert "Errno" not in str(caught.value), name
    with pytest.raises(LumosError, match=r"step\.json cannot be written: taken is a file, no folder"):
        run.to_perfetto("taken/step.json")
    assert (place / "taken").read_text() == "mine"


def test_a_prefix_does_not_lead_out_of_the_folder(place: Path) -> None:
    for prefix in ("../out", "/tmp/out", "a/b"):
        with pytest.raises(LumosError, match="leads out of the folder"):
            ln.chakra.write_ranks([(0, NODES)], "job", prefix, {})
    assert not list(place.rglob("*.et"))


def test_a_device_is_not_replaced_by_a_file(run: Run) -> None:
    for path in ("/dev/null", "pipe"):
        with pytest.raises(TraceError, match="neither a folder nor a regular file"):
            run.to_perfetto(path)
    assert Path("/dev/null").is_char_device()
    assert Path("pipe").is_fifo()


def trace_in(folder: Path, name: str = "rank0.json") -> Path:
    """A sound trace."""
    folder.mkdir(exist_ok=True)
    return write_kineto(repeated(lambda trace, _, start: trace.op("aten::mm", start + 1, start + 3)), folder / name)


def test_links_of_a_run_are_followed_to_files_and_to_nothing_else(place: Path) -> None:
    sound = trace_in(place / "elsewhere")
    (place / "run").mkdir()
    for name, target in {
        "rank0.json": sound, "rank1.json": "rank1.json", "rank2.json": "/dev/zero", "rank3.json": "../pipe",
        "rank4.json": "..", "rank5.json": "gone",
    }.items():  # fmt: skip
        (place / "run" / name).symlink_to(target)
    found = load_run(place / "run")
    assert found.ranks["path"].str.split("/").list.last().to_list() == ["rank0.json"]
    left_out = found.report.filter(what="not read")["path"].str.split("/").list.last().to_list()
    assert sorted(left_out) == ["rank1.json", "rank2.json", "rank3.json", "rank5.json"]  # rank4 is a folder


def test_names_of_a_run_with_line_breaks_and_escapes_are_shown_as_text(place: Path) -> None:
    trace_in(place / "run", "rank0\x1b[2J\n.json")
    (place / "run" / "a\n<b>.txt").write_text("")
    found = load_run(place / "run")
    assert "\x1b" not in repr(found) + found._repr_html_()
    assert "<b>" not in found._repr_html_()
    (place / "run" / "rank0\x1b[2J\n.json").write_text("{")
    with pytest.raises(RunError) as caught:
        load_run(place / "run")
    assert "\x1b" not in str(caught.value)


def archive_of(place: Path, *members: tarfile.TarInfo) -> Path:
    """An archive of a sound trace and further members."""
    path = place / "run.tar"
    with tarfile.open(path, "w") as packed:
        packed.add(trace_in(place / "sound"), "rank0.json")
        for member in members:
            packed.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    """What an archive says of a file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(member("../escaped.json", size=1), id="a name that leads out"),
        pytest.param(member("a/../../escaped.json", size=1), id="one that does by a folder"),
        pytest.param(member("rank1.json", tarfile.SYMTYPE, "/etc/passwd"), id="a link to elsewhere"),
        pytest.param(member("rank1.json", tarfile.SYMTYPE, "../../escaped.json"), id="a link that leads out"),
        pytest.param(member("rank1.json", tarfile.LNKTYPE, "/etc/passwd"), id="a hard link to elsewhere"),
        pytest.param(member("rank1.json", tarfile.FIFOTYPE), id="a pipe"),
        pytest.param(member("rank1.json", tarfile.CHRTYPE), id="a device"),
        pytest.param(member("x" * 300 + ".json", size=1), id="a name of more than 255 bytes"),
    ],
)
def test_an_archive_that_reaches_out_is_refused(hostile: tarfile.TarInfo, place: Path) -> None:
    archive = archive_of(place, hostile)
    before = sorted(place.rglob("*"))
    with pytest.raises(TraceError, match=r"run\.tar cannot be unpacked"):
        load_run(archive)
    assert sorted(place.rglob("*")) == before


def test_an_absolute_name_in_an_archive_stays_inside(place: Path) -> None:
    archive = archive_of(place, member(f"{place}/escaped.json", size=1))
    assert len(load_run(archive).ranks) == 1
    assert not (place / "escaped.json").exists()


def test_links_of_an_archive_that_go_round_are_no_trace(place: Path) -> None:
    archive = archive_of(
        place, member("rank1.json", tarfile.SYMTYPE, "rank2.json"), member("rank2.json", tarfile.SYMTYPE, "rank1.json")
    )
    try:
        found = load_run(archive)
    except TraceError as error:
        assert "cannot be unpacked" in str(error)  # noqa: PT017 (newer versions of Python refuse them)
    else:
        assert len(found.ranks) == 1


def test_an_archive_of_very_many_empty_files_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_BYTES_ENV, str(1 << 20))
    archive = archive_of(place, *(member(f"{number}.txt") for number in range(3_000)))
    with pytest.raises(TraceError, match="unpacks to more than"):
        load_run(archive)


def test_a_folder_of_100_000_other_files_is_read_and_an_error_names_a_few(place: Path) -> None:
    folder = place / "many"
    folder.mkdir()
    for number in range(100_000):
        os.close(os.open(folder / f"{number}.txt", os.O_CREAT | os.O_WRONLY))
    with pytest.raises(RunError, match="and 99,990 more") as caught:
        load_run(folder)
    assert len(str(caught.value)) < 2_000
    trace_in(folder)
    found = load_run(folder)
    assert (len(found.ranks), found.report.filter(what="not read").height) == (1, 100_000)


def test_a_folder_of_folders_and_an_empty_one_are_no_run(place: Path) -> None:
    (place / "outer" / "inner").mkdir(parents=True)
    for folder, why in (("outer", "folders only"), ("outer/inner", "is empty")):
        with pytest.raises(RunError, match=why):
            load_run(place / folder)
        with pytest.raises(LumosError):
            ln.load_execution_trace(place / folder)
        with pytest.raises(LumosError):
            ln.chakra.rank_files(place / folder)


UNREADABLE = """
import os, sys
from pathlib import Path
import lumos_nb as ln
from lumos_nb.errors import LumosError
def names(*paths):
    for read in (ln.load_run, ln.load_execution_trace, ln.chakra.read_file, ln.chakra.rank_files):
        for path in paths:
            try:
                read(path)
            except LumosError as error:
                yield type(error).__name__
list(names("sound", "sound/rank0.json", "missing"))  # for what is imported on the way, which another user may not read
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print(*names("closed", "closed/rank0.json", "shut.json"))
"""


def test_what_may_not_be_read_is_an_error_of_ours(place: Path) -> None:
    """As another user where the tests run as root, who may read everything."""
    trace_in(place / "sound")
    trace_in(place / "closed")
    trace_in(place, "shut.json").chmod(0)
    (place / "closed").chmod(0)
    for folder in (place, *place.parents[: len(place.parents) - 2]):
        if folder.stat().st_uid == os.getuid() and folder.name.startswith(("pytest", "test")):
            folder.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(Path(ln.__file__).parents[1]), "LUMOS_NB_CACHE": str(place / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", UNREADABLE], capture_output=True, text=True, check=False, env=environment
    )
    (place / "closed").chmod(0o755)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 11  # nothing of a single file is read to tell its rank
