"""Jobs cut by rank give what graphs give, to the nanosecond."""

import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import cycle
from multiprocessing import get_context

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import lumos_nb as ln
from benchmarks import made_up_job
from lumos_nb import _job_files
from lumos_nb._job_files import EDGES_TO_RANK, write_rank
from lumos_nb.errors import GraphError, InputError, RunError, SchemaError
from lumos_nb.graph import Graph
from lumos_nb.jobs import Job, ReplayedJob, finish_job
from lumos_nb.schema import EDGES, OPS


def by_rank(graph: Graph) -> Graph:
    """The graph with its rows rank by rank, as a job has them: of equals the path takes the lowest row."""
    return replace(graph, ops=graph.ops.sort("rank", maintain_order=True))


def whole(job: Job) -> Graph:
    """A job as one graph."""
    ranks = job.ranks["rank"]
    edges = pl.concat([job.edges_to(rank) for rank in ranks]).select(*EDGES.columns)
    return Graph(pl.concat([job.ops_of(rank) for rank in ranks]), edges, step=0)


def assert_same(found: ReplayedJob, graph: Graph) -> None:
    expected = ln.replay(graph)
    for name in ("origin_ns", "step_ns", "makespan_ns"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("step_ends", "path", "composition", "composition_from_origin"):
        assert_frame_equal(getattr(found, name), getattr(expected, name))
    for rank in found.job.ranks["rank"]:
        assert_frame_equal(found.ops_of(rank), expected.ops.filter(rank=rank))
    for by in ("rank", "name"):
        assert_frame_equal(found.breakdown(by=by), ln.breakdown(expected, by=by))


@pytest.mark.parametrize("name", ["gpt-ddp", "gpt-pp", "gpt-tp", "gpt-grid"])
def test_a_job_of_a_recorded_run_gives_what_its_graph_gives(name, tmp_path):
    graph = ln.build_graph(ln.load_run(ln.datasets.path(name)))
    assert_same(ln.save_job(graph, tmp_path).replay(), by_rank(graph))


@pytest.fixture(scope="module")
def gpt3():
    """Two tensor-parallel, two data-parallel ranks and two stages, as many ops a rank as make a test last seconds."""
    return made_up_job.gpt3(tp=2, dp=2, pp=2, ops_per_rank=1_000)


@pytest.fixture(scope="module")
def job(gpt3, tmp_path_factory):
    return made_up_job.write(tmp_path_factory.mktemp("job"), gpt3)


def test_a_made_up_job_gives_what_its_graph_gives(job):
    assert job.ranks["ops"].min() > 500
    assert_same(job.replay(), whole(job))


def test_made_up_ranks_differ_and_wait_for_each_other(job):
    result = job.replay()
    durations = [job.ops_of(rank).filter(kind="kernel")["dur_ns"].sum() for rank in range(8)]
    assert len(set(durations)) == 8
    waits = result.breakdown().filter(part="exposed_wait")["time_ns"]
    assert (waits > 0).sum() >= 6
    assert (waits.sum() / 8) < result.step_ns / 2


def test_made_up_collectives_start_together(job):
    graph = ln.replay(whole(job)).ops.filter(pl.col("comm_seq").is_not_null() & (pl.col("kind") == "comm"))
    together = graph.group_by("group", "comm_seq").agg(pl.len(), starts=pl.col("start_ns").n_unique())
    assert together["len"].to_list() == [2] * len(together)
    on_one_lane = together.filter(pl.col("group").str.starts_with("tp"))
    assert len(on_one_lane) > 100
    assert (on_one_lane["starts"] == 1).all()


def test_a_made_up_job_is_the_same_each_time_and_another_of_another_seed(gpt3, job, tmp_path):
    again = made_up_job.write(tmp_path / "again", gpt3)
    other = made_up_job.write(tmp_path / "other", gpt3, seed=1)
    assert_frame_equal(again.ops_of(3), job.ops_of(3))
    assert not other.ops_of(3)["dur_ns"].equals(job.ops_of(3)["dur_ns"])


def test_some_ranks_of_a_job_run_as_they_did_among_all(gpt3, job, tmp_path):
    result = job.replay()
    some = made_up_job.write(tmp_path, gpt3, ranks=[1, 4, 6], measured=result)
    found = some.replay()
    assert_same(found, whole(some))
    for rank in (1, 4, 6):
        alone = found.ops_of(rank).filter(~pl.col("kind").is_in(["join", "unexplained"]))
        among = result.ops_of(rank).filter(pl.col("kind") != "join")
        assert_frame_equal(alone.select("op_id", "start_ns"), among.select("op_id", "start_ns"))
        assert (found.ops_of(rank)["kind"] == "unexplained").sum() > 50


def test_other_processes_write_and_break_down_the_same(gpt3, job, tmp_path):
    result = job.replay()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        written = made_up_job.write(tmp_path, gpt3, executor=pool)
        assert_frame_equal(result.breakdown(executor=pool), result.breakdown())
    assert_frame_equal(written.edges_to(5), job.edges_to(5))
    assert written.replay().step_ns == result.step_ns


N_OPS = st.integers(1, 14)


@st.composite
def graphs(draw):
    """Ops of up to three ranks in any order, some joins, on a device or not, edges forward of a hidden order."""
    n = draw(N_OPS)
    of = lambda values: draw(st.lists(values, min_size=n, max_size=n))  # noqa: E731
    kinds, ranks, starts = (
        of(st.sampled_from(["kernel", "comm", "cpu", "event", "join"])),
        of(st.sampled_from([2, 5, 9])),
        of(st.integers(0, 50)),
    )
    on_device = draw(st.booleans())
    ops = pl.DataFrame(
        {"rank": ranks, "kind": kinds, "start_ns": starts, "dur_ns": of(st.integers(0, 9))}
    ).with_columns(
        op_id=pl.Series(draw(st.permutations(range(n)))),
        name="kind",
        lane=pl.when(pl.col("kind") == "join").then(pl.lit("net")).otherwise(pl.lit("gpu0:7")),
        device=pl.when(on_device & pl.col("kind").is_in(["kernel", "comm", "event"])).then(0),
        step=4,
    )
    ops = ops.with_columns(pl.lit(None).alias(c) for c in OPS.columns if c not in ops.columns)
    ends = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=3 * n, unique=True))
    order = draw(st.permutations(range(n)))
    rows = [(order[a], order[b], draw(st.integers(0, 5)), draw(st.booleans())) for a, b in ends if a < b]
    edges = pl.DataFrame(rows, schema=["src", "dst", "lag_ns", "from_start"], orient="row")
    edges = edges.with_columns(rule=pl.lit("stream"), evidence=pl.lit("exact"), hard=True)
    typed = (
        frame.select(pl.col(c).cast(t) for c, t in schema.columns.items())
        for frame, schema in ((ops, OPS), (edges, EDGES))
    )
    return Graph(*typed, step=4)


@settings(max_examples=30, deadline=None)
@given(graphs())
def test_any_graph_gives_the_same_as_a_job(tmp_path_factory, graph):
    folder = tmp_path_factory.mktemp("job")
    job = ln.save_job(graph, folder)
    if refusal := refused(lambda: ln.breakdown(ln.replay(by_rank(graph)))):
        assert refused(lambda: job.replay().breakdown()) == refusal
    else:
        assert_same(ln.open_job(folder).replay(), by_rank(graph))
    shutil.rmtree(folder)


def refused(run) -> str:
    """Why `run` raises GraphError; "" if it does not."""
    try:
        run()
    except GraphError as error:
        return str(error)
    return ""


def one_rank(rank: int = 0, **columns) -> pl.DataFrame:
    ops = {
        "op_id": 7,
        "rank": rank,
        "step": 0,
        "lane": "gpu0:7",
        "device": 0,
        "kind": "kernel",
        "start_ns": 0,
        "dur_ns": 5,
    }
    return pl.DataFrame({**dict.fromkeys(OPS.columns), **ops, **columns}, schema=dict(OPS.columns))


def edge(**columns) -> pl.DataFrame:
    ends = {
        "src_rank": 0,
        "src": 7,
        "dst": 7,
        "lag_ns": 0,
        "from_start": False,
        "rule": "x",
        "evidence": "exact",
        "hard": True,
    }
    return pl.DataFrame({**ends, **columns}, schema=dict(EDGES_TO_RANK.columns))


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        pytest.param(edge(src_rank=3), "rank 3 has no op with op_id 7", id="from a rank that is not there"),
        pytest.param(edge(src=8), "rank 0 has no op with op_id 8", id="from an op that is not there"),
        pytest.param(edge(dst=8), "rank 0 has no op with op_id 8", id="to an op that is not there"),
        pytest.param(edge(), r"cycle of 1 op\(s\): op 7 \(kernel None, rank 0", id="from an op to itself"),
    ],
)
def test_edges_that_cannot_be_are_named(edges, message, tmp_path):
    with pytest.raises(GraphError, match=message):
        finish_job(tmp_path, [write_rank(tmp_path, 0, one_rank(), edges)]).replay()


def test_tables_that_cannot_be_a_rank_are_named(tmp_path):
    none = EDGES_TO_RANK.empty()
    with pytest.raises(GraphError, match="ops of other ranks"):
        write_rank(tmp_path, 1, one_rank(), none)
    with pytest.raises(GraphError, match="has dur_ns -1"):
        write_rank(tmp_path, 0, one_rank(dur_ns=-1), none)
    with pytest.raises(GraphError, match="has lag_ns -2"):
        write_rank(tmp_path, 0, one_rank(), edge(lag_ns=-2))
    with pytest.raises(GraphError, match="has no src_rank"):
        write_rank(tmp_path, 0, one_rank(), edge(src_rank=None))
    with pytest.raises(GraphError, match="a century"):
        finish_job(tmp_path, [write_rank(tmp_path, rank, one_rank(rank, dur_ns=2**61), none) for rank in range(3)])
    with pytest.raises(GraphError, match="at least one rank"):
        finish_job(tmp_path, [])
    with pytest.raises(SchemaError, match="repeats a key"):
        finish_job(tmp_path, [write_rank(tmp_path, 0, one_rank(), none)] * 2)
    with pytest.raises(GraphError, match="no rank"):
        ln.save_job(Graph(one_rank(rank=None), EDGES.empty(), step=0), tmp_path)


@pytest.fixture
def small(tmp_path):
    """A job of two ranks in a folder whose name polars would take for a pattern, planned and replayed."""
    folder = tmp_path / "job [1]"
    folder.mkdir()
    ranks = [
        write_rank(folder, 0, one_rank(), EDGES_TO_RANK.empty()),
        write_rank(folder, 3, one_rank(3, step=[0, 0], op_id=[7, 8], dur_ns=[5, 6]), edge(src_rank=3, dst=8)),
    ]
    job = finish_job(folder, ranks)
    assert job.replay().step_ns == 11
    return folder


OTHER_TABLES = {
    "another type": lambda frame: frame.with_columns(pl.all().cast(pl.String)),
    "a column less": lambda frame: frame.select(frame.columns[1:]),
    "another order": lambda frame: frame.reverse(),
    "rows twice": lambda frame: pl.concat([frame, frame]),
    "no rows": lambda frame: frame.clear(),
    "negative numbers": lambda frame: frame.with_columns(pl.col(pl.Int64) * -1),
    "missing numbers": lambda frame: frame.with_columns(pl.lit(None, pl.Int64).alias(frame.columns[0])),
    "huge numbers": lambda frame: frame.with_columns(pl.lit(2**62).alias(frame.columns[-1])),
}


@pytest.mark.parametrize("name", ["ranks", "ops-00003", "edges-00003"])
@pytest.mark.parametrize("how", OTHER_TABLES)
def test_tables_that_are_not_those_that_were_written_are_named(small, name, how):
    path = small / f"{name}.parquet"
    frame = pl.read_parquet(path.read_bytes())
    changed = OTHER_TABLES[how](frame)
    changed.write_parquet(path, metadata={"lumos_nb_crc": "0"})
    if name != "ranks" or how not in ("another type", "a column less", "rows twice", "missing numbers", "huge numbers"):
        says = rf"{name}\.parquet has changed since the job was written"
    else:
        says = "has no job .*rank table"
    with pytest.raises(RunError, match=says):
        whole(ln.open_job(small))
    (small / "plan" / "row.npy").unlink()
    with pytest.raises(RunError, match=says):
        ln.open_job(small).replay()


def test_a_table_with_another_schema_is_named_though_its_checksum_is_right(small):
    """What another version may have written."""
    job = ln.open_job(small)
    path = small / "ops-00003.parquet"
    pl.read_parquet(path.read_bytes()).drop("phase").write_parquet(path)
    crc = pl.lit(_job_files._checksum(path), pl.UInt32)
    job.files.ranks = job.ranks.with_columns(ops_crc=crc, edges_crc=crc)
    with pytest.raises(RunError, match=r"ops-00003\.parquet cannot be read \(op table lacks column\(s\) phase"):
        job.ops_of(3)


@pytest.mark.parametrize("rank", ["x", -1, True, 1.0, 2**70, None, 4, np.float64(3)])
def test_a_rank_that_the_job_has_not_is_named(small, rank):
    job = ln.open_job(small)
    for asked in (job.ops_of, job.edges_to, job.replay().ops_of):
        with pytest.raises(InputError, match=r"the job has no rank .*it has 2, see"):
            asked(rank)
    assert job.ops_of(np.int32(3)).height == 2


def test_a_plan_that_has_changed_is_made_anew(small):
    expected = ln.open_job(small).replay()
    files = sorted((small / "plan").iterdir())
    assert len(files) == 10
    for path, how in zip(files, cycle(["nothing", "another", "a bit"]), strict=False):
        sound = path.read_bytes()
        path.unlink()
        if how != "nothing":
            path.write_bytes(b"[" * 10_000 if how == "another" else sound[:-1] + bytes([sound[-1] ^ 1]))
        assert_frame_equal(ln.open_job(small).replay().path, expected.path)
        assert path.read_bytes() == sound


NPY = "{{'descr': '{}', 'fortran_order': False, 'shape': {}, }}"


def npy(about: str, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00v\x00" + about.ljust(117).encode() + b"\n" + body


OTHER_ARRAYS = {
    "none": b"",
    "cut": npy(NPY.format("<i8", "(3,)"), bytes(23)),
    "another type": npy(NPY.format("<f8", "(3,)"), bytes(24)),
    "one number": npy(NPY.format("<i8", "()"), bytes(8)),
    "a table": npy(NPY.format("<i8", "(3, 1)"), bytes(24)),
    "other numbers": npy(NPY.format("<i8", "(3,)"), b"\1" * 24),
    "endless": npy(NPY.format("<i8", "(999999999999999,)"), bytes(24)),
    "objects": npy(NPY.format("|O", "(3,)"), bytes(24)),
    "broken": npy("{'descr': ("),
    "mended": npy(NPY.format("<i8", "(3L,)"), bytes(24)),
    "an archive": b"PK\x03\x04" + bytes(50),
}


@pytest.mark.parametrize("name", ["start_ns", "slack_ns"])
@pytest.mark.parametrize("how", OTHER_ARRAYS)
def test_times_that_have_changed_since_the_replay_are_named(small, name, how):
    result = ln.open_job(small).replay()
    (small / "replayed" / f"{name}.npy").write_bytes(OTHER_ARRAYS[how])
    for asked in (result.breakdown, lambda: result.ops_of(3)):
        with pytest.raises(RunError, match=rf"{name}\.npy cannot be read|is of another replay, or has changed"):
            asked()


def test_a_replay_does_not_take_the_times_of_a_later_one_for_its_own(small):
    result = ln.open_job(small).replay()
    finish_job(small, [write_rank(small, 0, one_rank(dur_ns=9), EDGES_TO_RANK.empty())]).replay()
    with pytest.raises(RunError, match=r"has changed|of another replay"):
        result.breakdown()


def test_a_folder_that_cannot_hold_a_plan_is_named(small):
    shutil.rmtree(small / "plan")
    (small / "plan").write_text("")
    with pytest.raises(RunError, match="plan cannot be written into: "):
        ln.open_job(small).replay()


def test_a_job_that_lacks_files_is_named(tmp_path):
    with pytest.raises(RunError, match="has no job"):
        ln.open_job(tmp_path)
    finish_job(tmp_path, [write_rank(tmp_path, 0, one_rank(), EDGES_TO_RANK.empty())])
    (tmp_path / "edges-00000.parquet").unlink()
    with pytest.raises(RunError, match=r"edges-00000\.parquet is missing"):
        ln.open_job(tmp_path)


@pytest.mark.parametrize("rank", ["x", True, 2**40, None])
def test_a_rank_that_none_can_have_is_not_written(tmp_path, rank):
    with pytest.raises(InputError, match="give a whole number"):
        write_rank(tmp_path, rank, one_rank(), EDGES_TO_RANK.empty())


@pytest.mark.parametrize("ranks", [5, None, [one_rank()], ["x"]])
def test_what_no_rank_returned_is_no_job(tmp_path, ranks):
    with pytest.raises((InputError, SchemaError), match=r"give a Iterable|rank table"):
        finish_job(tmp_path, ranks)


def test_a_job_that_is_written_again_is_planned_again(tmp_path):
    for dur_ns in (5, 9):
        job = finish_job(tmp_path, [write_rank(tmp_path, 0, one_rank(dur_ns=dur_ns), EDGES_TO_RANK.empty())])
        assert job.replay().step_ns == dur_ns
    assert ln.open_job(tmp_path).replay().step_ns == 9
    write_rank(tmp_path, 0, one_rank(), EDGES_TO_RANK.empty())
    with pytest.raises(RunError, match="has no job"):
        ln.open_job(tmp_path)


def test_what_takes_graphs_says_so_of_a_job(job):
    with pytest.raises(InputError, match="it was given a Job"):
        ln.replay(job)
    with pytest.raises(InputError, match="it was given a ReplayedJob"):
        ln.breakdown(job.replay())


def test_a_notebook_shows_jobs(job):
    assert "Job of 8 ranks" in repr(job)
    assert "on 8 ranks" in job.replay()._repr_html_()


def test_jitter_is_as_stated(gpt3, job):
    base = gpt3.stages[0].ops["dur_ns"].to_numpy()
    long = base > 100_000  # of shorter ones the rounding to ns shows
    ranks = [job.ops_of(rank)["dur_ns"].to_numpy()[: len(base)][long] for rank in range(4)]
    assert np.mean([np.std(np.log(rank / base[long])) for rank in ranks]) == pytest.approx(
        made_up_job.OP_JITTER, rel=0.1
    )


def test_names_that_are_none_of_a_job_are_errors(tmp_path):
    graph = ln.build_graph(ln.load_run(ln.datasets.path("gpt-ddp")), step=3)
    (tmp_path / "file").write_text("")
    for name in ("\0", "file", "file/under"):
        with pytest.raises((RunError, InputError)):
            ln.save_job(graph, name if name == "\0" else tmp_path / name)
    with pytest.raises((RunError, InputError)):
        ln.open_job(None)
