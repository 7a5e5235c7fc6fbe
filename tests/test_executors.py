"""Work on a real Dask cluster of two processes: the same results, workers that die, a scheduler that is lost."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import dask
import polars as pl
import pytest
from distributed import Client, LocalCluster

import lumos_nb as ln
from benchmarks import llm_accuracy
from lumos_nb.errors import ExecutorError, InputError
from lumos_nb.executors import spread
from lumos_nb.graph import Recording, build_graph
from lumos_nb.traces.cache import load
from lumos_nb.traces.files import read_file

SCENARIOS = [{"cpu": 1 + i / 100} for i in range(200)]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    # A cluster gives up a worker that is not back in 15 s, which a busy machine may take.
    with (
        suppress(TimeoutError),  # of workers that a busy machine ends late
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10 minutes"}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50,
            scheduler_kwargs={"allowed_failures": 1},
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):  # fmt: skip
        yield client


@pytest.fixture
def pool(client: Client) -> Executor:
    return client.get_executor()


def numbered(folder: Path, number: int) -> int:
    """Leave a file for each time that a number was done."""
    time.sleep(0.2)
    with (folder / f"{number}-{os.getpid()}-{time.monotonic_ns()}").open("x"):
        return number * number


def killed_once(folder: Path, number: int) -> int:
    """The first worker that does the number 3 dies of it."""
    if number == 3 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return numbered(folder, number)


def deadly(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


class Arrived:
    """What leaves a file in a folder each time that a process is sent it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__dict__.update(state)
        (self.folder / f"{os.getpid()}-{time.monotonic_ns()}").touch()


def with_it(sent: Arrived, number: int) -> int:
    time.sleep(0.05)
    return number


def refusing(number: int) -> int:
    raise InputError(f"{number} is not taken.")


def test_a_run_its_prediction_a_sweep_and_a_search_are_the_same_as_here(pool: Executor, tmp_path: Path) -> None:
    path = ln.datasets.path("gpt-ddp")
    here, there = ln.load_run(path, cache=False), ln.load_run(path, executor=pool, cache=False)
    assert there.events.equals(here.events)
    assert there.report.equals(here.report)
    recording = Recording.of(there)
    assert ln.mechanistic(recording, [3, 4, 5], executor=pool).equals(ln.mechanistic(recording, [3, 4, 5]))
    graph = ln.build_graph(recording, step=3)
    assert ln.sweep(graph, SCENARIOS, executor=pool, block=64).equals(ln.sweep(graph, SCENARIOS))
    cluster = ln.Cluster(gpu="H100-SXM-80GB", inside="NVLink4 NVSwitch")
    asked = (ln.Transformer.named("llama-3-8b"), cluster, ln.Training(micro_batch=1, global_batch=16, seq=2048))
    ranges = {"tp": [1, 2], "cp": 1, "schedule": "1f1b", "keep": 2}
    assert ln.search(*asked, executor=pool, **ranges).frame.equals(ln.search(*asked, **ranges).frame)


def read_killed_once(folder: Path, file: Path) -> list[int]:
    """Events of a file; the first worker that has read that of rank 3 dies of it."""
    events = ln.load_run(file, cache=False).events
    if file.name == "rank-3.json.gz" and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [events.height, events["start_ns"].sum()]


def test_a_worker_killed_while_it_reads_costs_a_run_nothing(pool: Executor, tmp_path: Path) -> None:
    files = sorted(ln.datasets.path("gpt-grid").glob("rank-?.json.gz"))
    found = list(spread(pool, partial(read_killed_once, tmp_path), files))
    assert (tmp_path / "died").exists()
    assert found == [read_killed_once(tmp_path, file) for file in files]


def test_tables_of_embeddings_are_sharded_and_steps_predicted_as_here(
    pool: Executor, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ln.Cluster(gpu="H100-SXM-80GB", gpus_per_node=4, inside="NVLink4 NVSwitch")
    costs = ln.ShardingCosts.of(ln.PhysicalLookup.of_sheet(cluster.gpu_sheet), cluster, batch=4096)
    tasks = [pl.DataFrame({"rows": [10**5] * n, "dim": [32, 64, 128] * (n // 3), "pooling": [5.0] * n}) for n in (6, 9)]
    placed = partial(ln.shard, cluster=cluster, costs=costs)
    for there, here in zip(spread(pool, placed, tasks), map(placed, tasks), strict=True):
        assert there.frame.equals(here.frame)
    rows = ln.datasets.load("measured-training").head(4).with_columns(origin=pl.lit("none"))
    jobs = [llm_accuracy._read(row) for row in rows.iter_rows(named=True)]
    monkeypatch.setenv("SCHEDULER", client.scheduler.address)
    found = llm_accuracy.predictions(rows, llm_accuracy.ours)
    assert found["predicted_s"].to_list() == [llm_accuracy.ours(job)[0] for job in jobs]


def test_tables_travel_as_arrow_and_runs_as_paths(pool: Executor, tmp_path: Path) -> None:
    events = ln.load_run(ln.datasets.path("gpt-single")).events
    sent = pickle.dumps(events)
    assert pl.read_ipc_stream(io.BytesIO(events.__getstate__())).equals(events)
    assert len(sent) < len(events.__getstate__()) + 200
    (file,) = ln.datasets.path("gpt-single").glob("rank-0.json.gz")
    (answer,) = spread(pool, partial(read_file, cache=tmp_path, by_path=True, strict=True), [file])
    assert isinstance(answer, Path)
    assert load(answer).events.equals(events)


def test_a_recording_travels_without_what_was_found_out_of_it() -> None:
    recording = Recording.of(ln.load_run(ln.datasets.path("gpt-ddp")))
    sent = pickle.dumps(recording)
    graph, times = build_graph(recording), recording.step_times()
    assert len(pickle.dumps(recording)) == len(sent)
    arrived = pickle.loads(pickle.dumps(recording))
    assert arrived.step_times().equals(times)
    assert arrived.ops.equals(recording.ops)
    again = build_graph(arrived)
    assert again.ops.equals(graph.ops)
    assert again.edges.equals(graph.edges)


def test_what_a_partial_holds_reaches_each_worker_once_and_not_with_each_item(pool: Executor, tmp_path: Path) -> None:
    assert list(spread(pool, partial(with_it, Arrived(tmp_path)), range(30))) == [*range(30)]
    assert 1 <= len(list(tmp_path.iterdir())) <= 6


def test_an_address_is_an_executor(client: Client) -> None:
    assert list(spread(client.scheduler.address, abs, [-1, 2, -3])) == [1, 2, 3]


def test_what_a_killed_worker_did_is_done_again_once_and_in_order(pool: Executor, tmp_path: Path) -> None:
    found = list(spread(pool, partial(killed_once, tmp_path), range(8)))
    assert found == [n * n for n in range(8)]
    assert (tmp_path / "died").exists()
    assert {file.name.partition("-")[0] for file in tmp_path.iterdir()} == {"died", *map(str, range(8))}


def test_work_that_kills_every_worker_is_an_error_that_says_so(pool: Executor) -> None:
    with pytest.raises(ExecutorError, match=r"lost after 0 of 1 parts.*deadly.*run it again"):
        list(spread(pool, deadly, [1]))
    assert list(spread(pool, abs, [-1])) == [1]  # and the cluster goes on


def test_errors_of_the_work_arrive_as_they_were_raised(pool: Executor) -> None:
    with pytest.raises(InputError, match="1 is not taken"):
        list(spread(pool, refusing, [1]))


def test_a_lost_scheduler_is_one_clear_error(tmp_path: Path) -> None:
    code = (
        "from distributed import LocalCluster\nimport time\n"
        "if __name__ == '__main__':\n"
        "    cluster = LocalCluster(n_workers=1, processes=False, protocol='tcp://', dashboard_address=':0')\n"
        "    print(cluster.scheduler_address, flush=True)\n    time.sleep(60)\n"
    )
    (tmp_path / "serve.py").write_text(code)
    with subprocess.Popen([sys.executable, tmp_path / "serve.py"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        parts = spread(address, time.sleep, [0.3] * 50)
        assert next(parts) is None
        server.kill()
        with pytest.raises(ExecutorError, match=r"lost after \d+ of 50 parts"):
            list(parts)


def test_no_scheduler_and_no_executor_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lumos_nb.executors.CONNECT_S", 0.5)
    with pytest.raises(ExecutorError, match=r"no Dask scheduler answers at 'tcp://127.0.0.1:1'"):
        list(spread("tcp://127.0.0.1:1", abs, [1]))
    with pytest.raises(ExecutorError, match=r"executor is 3"):
        spread(3, abs, [1])  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ExecutorError, match=r"lumos_nb\[cluster\]"):
        list(spread("tcp://127.0.0.1:1", abs, [1]))


NOBODY = """
from lumos_nb import executors
executors.CONNECT_S = 0.5
for address in ("tcp://127.0.0.1:1", "tcp://", "inproc://x/1", "127.0.0.1:99999999"):
    try:
        list(executors.spread(address, abs, [1]))
    except executors.ExecutorError as error:
        print(type(error).__name__)
"""


def test_an_address_where_nobody_answers_leaves_nothing_behind() -> None:
    """A client that was not closed says so when the program ends."""
    done = subprocess.run([sys.executable, "-c", NOBODY], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["ExecutorError"] * 4, "")


def test_a_pool_that_is_shut_down_and_a_class_are_refused(tmp_path: Path) -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(ExecutorError, match="takes no work"):
        list(spread(pool, abs, [1]))
    with pytest.raises(ExecutorError, match="give one as concurrent"):
        list(spread(ThreadPoolExecutor, abs, [1]))  # type: ignore[arg-type]
