"""Traces read a rank at a time give the job that a graph of all of them in one memory gives, to the nanosecond."""

from __future__ import annotations

import gzip
import json
import shutil
import tarfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from test_hidden import HOUSES, waiting
from test_repairs import profiles
from trace_builder import Trace

import lumos_nb as ln
from benchmarks.make_large_trace import Place, write_large_trace
from lumos_nb import cut_ranks, rankwise
from lumos_nb.errors import GraphError, LumosError, RunError
from lumos_nb.jobs import Job

NAMES = pl.struct("rank", "lane", "kind", "name", "start_ns", "dur_ns", "site", "nth", "match").hash()


def assert_same(found: Job, expected: Job) -> None:
    """Both jobs are one: their ops, but for ids; edges between them; what a replay and breakdowns say of them."""
    assert_frame_equal(found.ranks.drop("total_ns"), expected.ranks.drop("total_ns"))
    replayed, result = found.replay(), expected.replay()
    for name in ("origin_ns", "step_ns", "makespan_ns"):
        assert getattr(replayed, name) == getattr(result, name), name
    for name in ("step_ends", "composition", "composition_from_origin"):
        assert_frame_equal(getattr(replayed, name), getattr(result, name))
    for by in ("rank", "name"):
        assert_frame_equal(replayed.breakdown(by=by), result.breakdown(by=by))
    for rank in expected.ranks["rank"]:
        ops = [one.ops_of(rank).drop("op_id", "critical") for one in (replayed, result)]
        assert_frame_equal(*(table.sort(table.columns) for table in ops))
        assert_frame_equal(edges(found, rank), edges(expected, rank))


def edges(job: Job, rank: int) -> pl.DataFrame:
    """The edges to a rank, with what their ends are in place of ids."""
    ops = pl.concat([job.ops_of(other).select("op_id", src_rank="rank", names=NAMES) for other in job.ranks["rank"]])
    found = job.edges_to(rank).join(ops.rename({"op_id": "src", "names": "source"}), on=["src", "src_rank"])
    found = found.join(ops.filter(src_rank=rank).select(dst="op_id", target="names"), on="dst").drop("src", "dst")
    return found.sort(found.columns)


def assumed(report: pl.DataFrame) -> pl.DataFrame:
    """What a report says, whoever counted it."""
    return (
        report.group_by("what", "rank", "detail").agg(pl.col("count", "time_ns").sum()).sort("what", "rank", "detail")
    )


def both(path: object, folder: Path, step: int | None = None, **options: object) -> tuple[Job, Job]:
    """The job of traces read a rank at a time, and of a graph of all of them."""
    found = ln.load_job(path, folder / "found", step=step, **options)
    graph = ln.build_graph(ln.load_run(path), step)
    told = found.report.join(graph.run.report, on="what", how="anti")
    assert_frame_equal(assumed(told), assumed(graph.report))
    assert found.report.height > told.height or graph.run.report.is_empty()
    return found, ln.save_job(graph, folder / "expected")


def test_bundled_runs_are_the_same(tmp_path: Path) -> None:
    for name in ("gpt-ddp", "gpt-pp"):
        assert_same(*both(ln.datasets.path(name), tmp_path))
    grid = ln.datasets.path("gpt-grid")
    some = [grid / f"rank-{rank}.json.gz" for rank in (0, 1, 2, 5, 9, 17)]
    assert_same(*both(some, tmp_path, step=3))  # of 20: collectives lack ranks


@pytest.mark.parametrize("name", ["torchrec/sst_long_a2a_optimizer_2", "primus/pp8", "param/dlrm_kineto.tar.gz"])
def test_traces_of_others_are_the_same(traces: Path, name: str, tmp_path: Path) -> None:
    assert_same(*both(traces / name, tmp_path))


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten ranks with kernels: they meet all together, and in groups of eight and of two."""
    folder = tmp_path_factory.mktemp("made-up")
    for rank in range(10):
        write_large_trace(folder / f"rank-{rank}.json.gz", 4_500, Place(rank, 10, turns_a_step=100))
    return folder


def test_groups_that_not_all_ranks_belong_to(made_up: Path, tmp_path: Path) -> None:
    found, expected = both(made_up, tmp_path)
    assert_same(found, expected)
    joins = expected.ops_of(8).filter(kind="join")
    assert joins["group"].unique().to_list() == ["9"]  # those of all ranks stand with rank 0
    assert found.edges_to(0)["src_rank"].n_unique() == 10


def test_other_processes_do_the_same(made_up: Path, tmp_path: Path) -> None:
    some = [made_up / f"rank-{rank}.json.gz" for rank in range(3)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found, expected = both(some, tmp_path, step=2, executor=pool)
    assert_same(found, expected)


def test_clocks_that_differ_and_ranks_that_are_missing(made_up: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in (0, 2, 3, 9):
        name = f"rank-{rank}.json.gz"
        trace = json.loads(gzip.decompress((made_up / name).read_bytes()))
        for event in trace["traceEvents"]:
            event["ts"] += 1_234_567 * rank + (5 if event["cat"] == "kernel" else 0)
        (folder / name).write_bytes(gzip.compress(json.dumps(trace).encode()))
    found, expected = both(folder, tmp_path)
    assert_same(found, expected)
    assert found.report.filter(what="rank clock shifted")["rank"].to_list() == [2, 3, 9]
    assert found.report.filter(what="missing ranks")["count"].to_list() == [6]
    assert "unexplained" in found.ops_of(3)["kind"]


def written(folder: Path, *made: Trace) -> Path:
    """A folder with a file of each trace."""
    folder.mkdir()
    for trace in made:
        events = [
            {
                "ph": "X", "cat": row["category"], "name": row["name"], "pid": 1, "tid": row.get("thread", 7),
                "ts": row["start_ns"] / 1000, "dur": row["dur_ns"] / 1000,
                "args": json.loads(row["args"]) | {k: row[k] for k in ("device", "stream", "correlation") if k in row},
            }
            for row in trace.rows
        ]  # fmt: skip
        told = {"distributedInfo": {"rank": trace.rank, "world_size": len(made)}, "traceEvents": events}
        (folder / f"rank-{trace.rank}.json").write_text(json.dumps(told))
    return folder


def in_ops(rank: int) -> Trace:
    """Each rank's operator ends with the last one's; beside it a device."""
    trace = Trace(rank)
    for step in range(1, 5):
        at = 1000.0 * step
        trace.step(step, at, at + 1000)
        trace.op("aten::clip", at + 200 * rank, at + 700)
        trace.launch("k", (at + 710, at + 715), (at + 720, at + 800))
    return trace


@pytest.mark.parametrize(
    ("made", "hidden"),
    [
        pytest.param([waiting(r, w) for r, w in HOUSES.items()] + [waiting(3, 50, until=60)], 3, id="in gaps"),
        pytest.param(
            [waiting(0, 100, until=510), waiting(1, 310, until=510), waiting(2, 500, until=900), waiting(3, 890, 900)],
            4,
            id="in gaps that are cut",
        ),
        pytest.param([in_ops(rank) for rank in range(3)], 3, id="in operators"),
    ],
)
def test_collectives_that_no_record_names(made: list[Trace], hidden: int, tmp_path: Path) -> None:
    found, expected = both(written(tmp_path / "run", *made), tmp_path)
    assert_same(found, expected)
    assert found.report.filter(what="hidden collectives")["rank"].n_unique() == hidden


def test_the_profile_of_most_steps_of_all_ranks_is_taken(tmp_path: Path) -> None:
    """Rank 1 alone would take its last profile: what it was cut into before is of no use."""
    run = written(tmp_path / "run", profiles((1, 2, 3), (1, 2)), profiles((1, 2), (2, 3), rank=1))
    assert_same(*both(run, tmp_path))


def refusal(run: object, *given: object, **options: object) -> tuple[type, str]:
    with pytest.raises(LumosError) as refused:
        run(*given, **options)  # type: ignore[operator]
    return type(refused.value), str(refused.value)


def test_what_cannot_be_is_refused_alike(made_up: Path, tmp_path: Path) -> None:
    def alike(path: object, step: int | None = None) -> str:
        found = refusal(ln.load_job, path, tmp_path / "job", step=step)
        assert found == refusal(lambda: ln.build_graph(ln.load_run(path), step))
        assert not list((tmp_path / "job").glob("*"))
        return found[1]

    assert "step 77 is not in the recording" in alike(made_up, step=77)
    assert "does not exist" in alike(tmp_path / "nowhere")
    two = written(tmp_path / "two", profiles((1, 2)), profiles((1, 2), (1, 2), rank=1))
    assert "do not hold the same number" in alike(two)
    shutil.copy(made_up / "rank-1.json.gz", tmp_path / "two" / "rank-0.json.gz")
    assert "different jobs" in alike([tmp_path / "two" / "rank-1.json", made_up / "rank-0.json.gz"])
    with gzip.open(made_up / "rank-2.json.gz") as file:
        (tmp_path / "two" / "rank-1.json").write_bytes(file.read().replace(b'"rank": 2', b'"rank": 1'))
    assert "both claim rank 1" in alike(tmp_path / "two")


def test_copies_damaged_files_and_archives(made_up: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for rank in range(3):
        shutil.copy(made_up / f"rank-{rank}.json.gz", folder)
    (folder / "rank-1.json.gz").write_bytes((folder / "rank-1.json.gz").read_bytes()[:40])
    shutil.copy(folder / "rank-0.json.gz", folder / "again.json.gz")
    assert_same(*both(folder, tmp_path))
    with tarfile.open(tmp_path / "run.tar.gz", "w:gz") as archive:
        archive.add(folder, "run")
    found, expected = both(tmp_path / "run.tar.gz", tmp_path, cache=False)
    assert_same(found, expected)
    assert found.report.filter(what="not read").height == 2


def test_a_rank_without_work(made_up: Path, tmp_path: Path) -> None:
    """It is of the run, but nothing of it is in the graph."""
    idle = Trace(1)
    idle.op("aten::later", 10, 20)
    for row in idle.rows:
        row["category"] = "ac2g_of_nobody"
    run = written(tmp_path / "run", profiles((1, 2, 3)), idle, profiles((1, 2, 3), rank=2))
    found, expected = both(run, tmp_path)
    assert_same(found, expected)
    assert found.ranks["rank"].to_list() == [0, 2]


def test_a_cycle_over_several_ranks_is_found_by_the_replay(tmp_path: Path) -> None:
    """Two ranks whose streams take two collectives in turn, each the other way round."""
    made = []
    for rank, numbers in enumerate([(1, 2), (2, 1)]):
        trace = Trace(rank)
        for step in (1, 2):
            at = 1000.0 * step
            trace.step(step, at, at + 1000)
            for place, number in enumerate(numbers):
                begin = at + 100 + 300 * place
                about = {"Collective name": "allreduce", "Process Group Name": "0", "Seq": 10 * step + number}
                trace.launch("ncclKernel", (begin, begin + 10), (begin + 20, begin + 200), args=about)
        made.append(trace)
    run = written(tmp_path / "run", *made)
    with pytest.raises(GraphError, match="make a cycle"):
        ln.build_graph(ln.load_run(run))
    job = ln.load_job(run, tmp_path / "job")
    with pytest.raises(GraphError, match="cycle"):
        job.replay()


def interrupted(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """From here on the second rank that is built raises this."""
    build, ranks = rankwise._build, [0]

    def killed(*given: object) -> object:
        if not ranks:
            raise error
        ranks.pop()
        return build(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(rankwise, "_build", killed)


def test_a_job_is_replaced_when_all_of_the_new_one_is_made(
    made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, folder = [made_up / f"rank-{rank}.json.gz" for rank in range(4)], tmp_path / "job"
    for error in (KeyboardInterrupt(), MemoryError()):
        interrupted(monkeypatch, error)
        with pytest.raises(type(error)):
            ln.load_job(some, folder)
        assert not folder.exists()
        monkeypatch.undo()
    first = ln.load_job(some, folder)
    replayed = first.replay()
    interrupted(monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ln.load_job(some[:2], folder)
    monkeypatch.undo()
    assert not [*folder.glob(".*")]
    assert ln.open_job(folder).replay().step_ns == replayed.step_ns
    second = ln.load_job(some[:2], folder)
    assert sorted(second.ranks["rank"]) == [0, 1]
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"{what}-0000{rank}.parquet" for what in ("edges", "ops") for rank in range(2)),
        "ranks.parquet",
        "report.parquet",
    ]
    with pytest.raises(RunError, match=r"report\.parquet has changed"):
        assert first.report
    second.report.with_columns(count=7).write_parquet(folder / "report.parquet")
    with pytest.raises(RunError, match=r"report\.parquet has changed"):
        assert second.report


def test_what_others_keep_in_the_folder_of_a_job_stays(made_up: Path, tmp_path: Path) -> None:
    kept = ["reading/mine.txt", "plan/mine.txt", "ops-1.parquet", "ops-00007.parquet.bak", ".hidden", "replayed"]
    for name in kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    job = ln.load_job([made_up / f"rank-{rank}.json.gz" for rank in range(2)], tmp_path)
    ln.save_job(ln.build_graph(ln.load_run(made_up / "rank-0.json.gz")), tmp_path)
    assert sorted(ln.open_job(tmp_path).ranks["rank"]) == [0]
    assert {name: (tmp_path / name).read_text() for name in kept} == {name: name for name in kept}
    with pytest.raises(RunError, match=r"ops-00001\.parquet cannot be read .*: write the job anew"):
        job.ops_of(1)


def test_two_at_once_make_one_whole_job(made_up: Path, tmp_path: Path) -> None:
    given = [[made_up / f"rank-{rank}.json.gz" for rank in range(ranks)] for ranks in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        [*pool.map(ln.load_job, given, [tmp_path] * 3)]
    job = ln.open_job(tmp_path)
    assert job.replay().step_ns > 0
    assert len([*tmp_path.glob("ops-*")]) == job.ranks.height
    assert job.report.height


def test_files_of_earlier_passes_that_are_gone_or_cannot_be_written_are_named(
    made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [made_up / f"rank-{rank}.json.gz" for rank in range(2)]
    on_one_clock = rankwise.on_one_clock

    def removed(ranks: list[cut_ranks.Cut], *given: object) -> object:
        ranks[1].path.unlink()
        return on_one_clock(ranks, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(rankwise, "on_one_clock", removed)
    with pytest.raises(RunError, match=r"has changed while the job was made .*: load it again"):
        ln.load_job(some, tmp_path / "a")
    monkeypatch.undo()

    def full(*_: object, **__: object) -> None:
        raise pl.exceptions.ComputeError("No space left on device (os error 28)")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(RunError, match=r"cannot be written: No space left .* has room"):
        ln.load_job(some, tmp_path / "b", cache=False)
    assert not [*tmp_path.iterdir()]
