"""Benchmarks from traces: programs of captured steps run in processes of their own, and resemble what they are from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from benchmarks.captured_models import ALONE, ON_TWO
from datasets.gpt import Gpt, GptConfig, loss_fn, make_batch
from lumos_nb import benchmark
from lumos_nb.errors import BenchmarkError, InputError, TraceError
from lumos_nb.exchange.benchmark import peers
from lumos_nb.exchange.benchmark.binding import Bench, Unusable, dtype_of, find_op
from lumos_nb.layout import Cluster
from lumos_nb.recorder import capture

TINY = GptConfig(layers=2, hidden=32, heads=2, vocab=96, seq=16, batch=2)


def gpt() -> Callable[[], None]:
    model = Gpt(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = make_batch(TINY, "cpu")

    def step() -> None:
        optimizer.zero_grad()
        loss_fn(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()

    return step


def captured(folder: Path, make: Callable[[], Callable[[], None]]) -> Path:
    torch.manual_seed(0)
    step = make()
    with capture(folder, steps=2, warmup=1, timed=3, device="cpu") as recorder:
        for _ in recorder.wrap(range(recorder.total_steps)):
            step()
    return folder


def run(folder: Path, *arguments: str) -> str:
    """What bench.py prints, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "bench.py"), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def gpt_capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(tmp_path_factory.mktemp("benchmark") / "gpt", gpt)


def test_a_training_step_becomes_a_program_that_calls_the_same_operators(gpt_capture: Path, tmp_path: Path):
    made = benchmark.generate(gpt_capture, tmp_path, rank=0)
    assert made.coverage == 1
    printed = run(tmp_path, "--iterations", "3", "--warmup", "1", "--profile", str(tmp_path / "out"))
    assert "stand-in" not in printed
    similar = benchmark.compare(gpt_capture, tmp_path / "out")
    assert similar.coverage_by_time > 0.5  # of a step of 8 ms, whose times scatter; make accuracy measures it
    kernels = similar.ops.filter(pl.col("name").is_in(["aten::mm", "aten::addmm", "aten::copy_", "aten::lerp_"]))
    assert kernels["count"].to_list() == kernels["replayed_count"].to_list()
    assert kernels["count"].min() > 0
    assert similar.verdict in repr(similar)


def test_the_program_needs_only_torch(gpt_capture: Path, tmp_path: Path):
    benchmark.generate(gpt_capture, tmp_path, rank=0)
    text = "\n".join(path.read_text() for path in tmp_path.glob("*.py"))
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported - set(sys.stdlib_module_names) == {"torch", "binding", "peers", "device_activity"}


@pytest.mark.parametrize("kind", ["resnet", "dlrm", "encoder", "lstm"])
def test_every_operator_of_other_models_is_called(kind: str, tmp_path: Path):
    folder = captured(tmp_path / kind, lambda: ALONE[kind](tiny=True))
    made = benchmark.generate(folder, tmp_path / "program", alpha=1.0)
    assert made.coverage == 1
    assert made.time_coverage == 1
    assert "stand-in" not in run(tmp_path / "program", "--iterations", "2", "--warmup", "0")
    if kind == "dlrm":  # embedding bags, whose indices are drawn and valid
        assert len(made.indices)
        assert 0 <= made.indices.min() <= made.indices.max() < 100


def test_values_stay_finite_and_memory_that_calls_make_is_freed(gpt_capture: Path, tmp_path: Path):
    benchmark.generate(gpt_capture, tmp_path, rank=0)
    bench = Bench(tmp_path, "cpu", lambda at, path, talks: True)
    with torch.enable_grad():
        bench.allocate()
        program = bench.bind()
        for _ in range(20):
            for call in program:
                call()
    assert not bench.stand_ins
    floats = [bench.values[slot] for slot in bench.given if bench.values[slot].is_floating_point()]
    assert all(torch.isfinite(one).all() for one in floats)
    assert all(bench.values[slot] is None for slot in bench.made)  # as at the step's end


def test_tensors_that_share_memory_in_the_trace_share_it_in_the_program(tmp_path: Path):
    def views() -> Callable[[], None]:
        base = torch.zeros(6, 4)

        def step() -> None:
            left, right = base[:, :2], base[:, 2:]
            left.add_(1)
            right.copy_(left.t().contiguous().t())

        return step

    benchmark.generate(captured(tmp_path / "views", views), tmp_path / "program")
    bench = Bench(tmp_path / "program", "cpu", lambda at, path, talks: True)
    with torch.enable_grad():
        bench.allocate()
        base = next(bench.values[slot] for slot in bench.given if bench.slots[slot][2] == [6, 4])
        base.zero_()
        program = bench.bind()  # which makes each call once
        assert base.tolist() == [[1, 1, 1, 1]] * 6
        for call in program:
            call()
    assert base.tolist() == [[2, 2, 2, 2]] * 6
    assert base.stride() == (4, 1)


def test_operators_that_take_only_some_values_get_them(tmp_path: Path):
    def picky() -> Callable[[], None]:
        root, shares, found = torch.randn(2, 5, 5), torch.rand(6, 8), torch.rand(6, 8)
        matrices = root @ root.mT + torch.eye(5)

        def step() -> None:
            torch.linalg.cholesky(matrices)
            torch.nn.functional.binary_cross_entropy(shares, found)
            torch.multinomial(shares, 2)
            torch.bernoulli(found)

        return step

    made = benchmark.generate(captured(tmp_path / "picky", picky), tmp_path / "program")
    assert {"aten::linalg_cholesky", "aten::multinomial"} <= {*made.calls["op"]}
    assert made.coverage == 1
    assert "stand-in" not in run(tmp_path / "program", "--iterations", "1", "--warmup", "0")


def test_a_part_can_be_run_alone(gpt_capture: Path):
    def calls(*arguments: str) -> int:
        lines: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.print", lines.append)
            given = ["--device", "cpu", "--iterations", "1", "--warmup", "0", *arguments]
            times = benchmark.replay(gpt_capture, arguments=given)
        assert times["wall_ns"].min() > 0
        return int(lines[-1].split()[0])

    every = calls()
    assert calls("--range", "10:30") == 20
    assert 0 < calls("--only", "Optimizer.step") < every
    assert calls("--only", "aten::mm") > 0
    assert calls("--part", "compute") == every
    with pytest.raises(BenchmarkError, match="no call is chosen"):
        calls("--part", "comm")


def test_gaps_of_the_original_are_waited_for(gpt_capture: Path, tmp_path: Path):
    made = benchmark.generate(gpt_capture, tmp_path)
    gaps_ns = made.calls["gap_ns"].sum()
    assert gaps_ns > 0
    given = ["--device", "cpu", "--iterations", "2", "--gaps", "recorded"]
    assert benchmark.replay(gpt_capture, arguments=given)["wall_ns"].min() >= gaps_ns


def two_ranks(rank: int, folder: Path) -> None:
    for kind, make in ON_TWO.items():
        torch.manual_seed(0)
        step = make(tiny=True)
        with capture(folder / kind, steps=1, warmup=1, timed=1, device="cpu") as recorder:
            for _ in recorder.wrap(range(recorder.total_steps)):
                step()


def test_programs_of_two_ranks_issue_the_same_collectives_on_both(tmp_path: Path):
    run_ranks(two_ranks, tmp_path)
    for kind in ON_TWO:
        folder = tmp_path / f"{kind}-program"
        benchmark.generate(tmp_path / kind, folder)
        tables = [json.loads((folder / f"workload-{rank}.json").read_text()) for rank in range(2)]
        issued = [
            [table["ops"][call["op"]] for call in table["calls"] if "reduce" in table["ops"][call["op"]]]
            for table in tables
        ]
        assert len(issued[0]) >= 1
        assert issued[0] == issued[1]
        waits = sum("wait" in table["ops"][call["op"]] for table in tables[:1] for call in table["calls"])
        assert waits == len(issued[0])
        assert "stand-in" not in run(folder, "--iterations", "1", "--warmup", "0")  # one process, a fake peer
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29617"]
        done = subprocess.run(
            [*command, str(folder / "bench.py"), "--device=cpu", "--iterations=2", "--profile", str(folder / "out")],
            capture_output=True, text=True, env=environment, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "stand-in" not in done.stdout
        talks = benchmark.compare(tmp_path / kind, folder / "out").communication
        assert talks.select("collective", "count", "bytes").rows() == [
            ("all_reduce", 2 * len(issued[0]), talks["replayed_bytes"][0])
        ]
        assert talks["replayed_count"][0] == talks["count"][0]
        assert talks["bytes"][0] > 0


def mixed(rank: int, folder: Path) -> None:
    """Of three ranks: all and a pair reduce, the pair exchanges messages, and rows go unevenly to all."""
    pair, ones, own = dist.new_group([0, 1]), torch.ones(64), torch.ones(8)
    rows = torch.arange(6.0).view(6, 1)
    into = [[1, 1, 4], [2, 2, 2], [3, 3, 0]]  # rows from each rank to each other
    back = torch.empty(sum(each[rank] for each in into), 1)

    def step() -> None:
        work = dist.all_reduce(ones, async_op=True)
        own.mul_(0.5)
        dist.all_to_all_single(back, rows, [each[rank] for each in into], into[rank])
        work.wait()
        if rank < 2:
            dist.all_reduce(own, group=pair)
            message = dist.isend(own, 1) if rank == 0 else dist.irecv(own, 0)
            message.wait()

    with capture(folder / "mixed", steps=1, warmup=1, timed=1, device="cpu") as recorder:
        for _ in recorder.wrap(range(recorder.total_steps)):
            step()


def launched(folder: Path, ranks: int, port: int) -> list[str]:
    """What each rank's program prints, as torchrun launches them."""
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "bench.py"), "--device", "cpu", "--iterations", "2"]
    every = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **job, "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = [one.communicate(timeout=150)[0] for one in every]
    assert [one.returncode for one in every] == [0] * ranks, said
    return said


def test_some_ranks_run_and_a_model_says_how_long_the_others_take(tmp_path: Path):
    run_ranks(mixed, tmp_path, 3)
    names = ["all_reduce", "all_to_all", "wait", "wait", "all_reduce", "wait", "send", "wait"]
    benchmark.generate(tmp_path / "mixed", tmp_path / "all")
    table = json.loads((tmp_path / "all" / "workload-0.json").read_text())
    issued = [call for call in table["calls"] if "comm" in call]
    assert [table["ops"][call["op"]] for call in issued] == names
    assert issued[1]["comm"]["splits"] == [[1, 2, 3], [1, 1, 4]]
    assert not any("stand-in" in said for said in launched(tmp_path / "all", 3, 29621))

    cluster = Cluster(gpu="H100-SXM-80GB", gpus_per_node=8, inside="NVLink4 NVSwitch")
    benchmark.generate(tmp_path / "mixed", tmp_path / "pair", rank=[0, 1], cluster=cluster)
    for rank in range(2):
        file = tmp_path / "pair" / f"workload-{rank}.json"
        table = json.loads(file.read_text())
        delayed = [call for call in table["calls"] if "delay_ns" in call]
        assert [table["ops"][call["op"]] for call in delayed][:3] == ["all_reduce", "all_to_all", "all_reduce"]
        assert all(1_000 < call["delay_ns"] < 1_000_000 for call in delayed)
        for call in delayed:  # the pair is there: what the model says of it must not be waited for
            call["delay_ns"] = 200_000_000 if table["groups"][call["comm"]["group"]] == [0, 1, 2] else 10**11
        file.write_text(json.dumps(table))
    took_ms = [
        float(said.split("iteration takes ")[1].split()[0]) for said in launched(tmp_path / "pair", 2, 29622)[:1]
    ]
    assert 400 <= took_ms[0] < 10_000

    few = Cluster(gpu="H100-SXM-80GB", gpus_per_node=2, inside="NVLink4 NVSwitch")
    with pytest.raises(InputError, match=r"rank 2 .* cluster's 2 GPUs"):
        benchmark.workload(tmp_path / "mixed", rank=0, cluster=few)
    with pytest.raises(InputError, match="each once"):
        benchmark.generate(tmp_path / "mixed", tmp_path / "none", rank=[0, 0])


def test_absent_peers_of_a_gpu_are_waited_for_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch):
    done: list[Any] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            done.append("after what was issued")

        def record_event(self) -> str:
            return "end"

        def wait_event(self, event: str) -> None:
            done.append(event)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "_sleep", done.append, raising=False)
    monkeypatch.setattr(peers, "cycles_per_ns", lambda: 1.5)
    wait = peers.Absent("cuda").begin(2000)
    assert done == ["after what was issued", 3000]
    wait()
    assert done[-1] == "end"


SHARED = {
    "linear": ("param/linear_et.json.gz", {}),
    "gpt2": ("param/hf_GPT2_et.json.tar.gz", {}),
    "dlrm": ("param/dlrm_pytorch_et.tar.gz", {"rank": 0}),
    "resnet": ("param/1.0.3-chakra.0.0.4/resnet_1gpu_et.json.gz", {"shrink": {32: 2, 128: 2, 224: 64}}),
    "triton": ("param/pt2_et.json.tar.gz", {}),
}


@pytest.mark.parametrize("name", SHARED)
def test_traces_of_gpus_run_on_a_cpu(name: str, traces: Path):
    path, how = SHARED[name]
    given = ["--device", "cpu", "--iterations", "1", "--warmup", "0", "--range", "20:80" if name != "triton" else ":"]
    made = benchmark.workload(traces / path, **how)
    assert made.coverage > (0.95 if name != "triton" else 0.4)
    assert len(benchmark.replay(traces / path, arguments=given, **how)) == 1


TENSOR = [7, 8, 0, 12, 4, "cpu"]


def trace_of(folder: Path, name: str, schema: str, values: list[Any], types: list[str], **more: Any) -> Path:
    """An execution trace of one operator, whose tensors are all 3 by 4."""

    def side(values: list[Any], types: list[str]) -> dict[str, Any]:
        shapes = [more.get("shape", [3, 4]) if kind.startswith("Tensor") else [] for kind in types]
        return {"values": values, "types": types, "shapes": shapes}

    attributes = [{"name": key, "type": "uint64", "value": 3} for key in ("rf_id", "fw_parent", "scope", "tid")]
    said = {"name": "op_schema", "type": "string", "value": schema}
    sides = {"inputs": side(values, types), "outputs": side([TENSOR], ["Tensor(float)"])}
    node = {"id": 3, "name": name, "ctrl_deps": 2, **sides, "attrs": [*attributes, said]}
    frame = {"inputs": side([], []), "outputs": side([], []), "attrs": attributes}
    process = {"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1, **frame}
    thread = {"id": 2, "name": "[pytorch|profiler|execution_trace|thread]", "ctrl_deps": 1, **frame}
    file = {"schema": "1.1.0-chakra.0.0.4", "pid": 1, "time": "", "start_ts": 0, "nodes": [process, thread, node]}
    path = folder / "hostile.json"
    path.write_text(json.dumps(file))
    return path


HOSTILE = {
    # name, schema, values, types: none of them may be called
    "file": ("aten::from_file", "aten::from_file(str filename, bool? shared=None, int? size=0) -> Tensor",
             ["{victim}", True, 4], ["String", "Bool", "Int"]),
    "save": ("aten::save", "aten::save(t item, str filename) -> ()", [TENSOR, "{victim}"], ["Tensor(float)", "String"]),
    "python": ("__import__('os').system('touch {victim}')", "__import__('os').system('touch {victim}')(Tensor a)",
               [TENSOR], ["Tensor(float)"]),
    "dunder": ("aten::__class__", "aten::__class__(Tensor self) -> Tensor", [TENSOR], ["Tensor(float)"]),
    "loader": ("torch::load_library", "load_library::__init__(str path)", ["{victim}"], ["String"]),
}  # fmt: skip


@pytest.mark.parametrize("which", HOSTILE)
def test_what_a_hostile_trace_names_is_not_called(which: str, tmp_path: Path):
    victim = tmp_path / "victim"
    name, schema, values, types = HOSTILE[which]
    texts = [text.replace("{victim}", str(victim)) for text in (name, schema)]
    given = [value.replace("{victim}", str(victim)) if isinstance(value, str) else value for value in values]
    made = benchmark.generate(trace_of(tmp_path, *texts, given, types), tmp_path / "program")
    assert made.coverage == 0  # a stand-in, and said to be one
    assert "stand-in" in run(tmp_path / "program", "--iterations", "1", "--warmup", "0")
    assert not victim.exists()


def test_what_is_larger_than_memory_is_refused_and_smaller_sizes_are_offered(tmp_path: Path):
    huge = 1 << 45
    tensor = [7, 8, 0, huge, 4, "cpu"]
    schema = "aten::relu(Tensor self) -> Tensor"
    path = trace_of(tmp_path, "aten::relu", schema, [tensor], ["Tensor(float)"], shape=[huge])
    with pytest.raises(BenchmarkError, match=r"free: run a part .* smaller sizes"):
        benchmark.replay(path, arguments=["--device", "cpu"])
    assert len(benchmark.replay(path, arguments=["--device", "cpu", "--iterations", "2"], shrink={huge: 8})) == 2


_REPEAT = "aten::repeat(Tensor self, SymInt[] repeats) -> Tensor"
_FULL = "aten::full(SymInt[] size, Scalar fill_value) -> Tensor"
_BINCOUNT = "aten::bincount(Tensor self, Tensor? weights=None, SymInt minlength=0) -> Tensor"
SWOLLEN = {
    # name, schema, values, types: numbers among the arguments that ask for more than memory
    "repeat": ("aten::repeat", _REPEAT, [TENSOR, [1 << 36, 1]], ["Tensor(float)", "GenericList[Int,Int]"]),
    "full": ("aten::full", _FULL, [[1 << 20, 1 << 20], 1], ["GenericList[Int,Int]", "Int"]),
    "arange": ("aten::arange", "aten::arange(Scalar end) -> Tensor", [1 << 40], ["Int"]),
    "no size": ("aten::bincount", _BINCOUNT, [TENSOR, None, 1 << 40], ["Tensor(long int)", "None", "Int"]),
}


@pytest.mark.parametrize("which", SWOLLEN)
def test_numbers_that_ask_for_more_than_memory_are_found_out_before_anything_is_allocated(which: str, tmp_path: Path):
    benchmark.generate(trace_of(tmp_path, *SWOLLEN[which]), tmp_path / "program")
    bench = Bench(tmp_path / "program", "cpu", lambda at, path, talks: True)
    bench.allocate()
    bench.bind()
    ((_, reason),) = bench.stand_ins
    assert "its result would take" in reason or "nothing says how much memory" in reason


def test_large_numbers_that_take_no_memory_are_no_harm(tmp_path: Path):
    schema = "aten::slice.Tensor(Tensor(a) self, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1)"
    values, types = [TENSOR, 0, 0, (1 << 63) - 1, 1], ["Tensor(float)", *["Int"] * 4]
    path = trace_of(tmp_path, "aten::slice.Tensor", f"{schema} -> Tensor(a)", values, types)
    assert benchmark.generate(path, tmp_path / "program").coverage == 1
    assert len(benchmark.replay(path, arguments=["--device", "cpu", "--iterations", "1"])) == 1


@pytest.mark.parametrize(
    ("tensor", "more"),
    [
        pytest.param(TENSOR, {"shape": [-3, 4]}, id="shape below 0"),
        pytest.param([7, 8, -5, 12, 4, "cpu"], {}, id="offset below 0"),
        pytest.param(TENSOR, {"shape": [1 << 70]}, id="a dimension beyond all numbers"),
        pytest.param(TENSOR, {"shape": ["x", 4]}, id="a dimension that is text"),
        pytest.param([[[[[TENSOR]]]]], {}, id="lists in lists"),
    ],
)
def test_tensors_that_cannot_be_are_refused_with_the_node(tensor: Any, more: dict[str, Any], tmp_path: Path):
    path = trace_of(tmp_path, "aten::relu", "aten::relu(Tensor self) -> Tensor", [tensor], ["Tensor(float)"], **more)
    with pytest.raises(TraceError, match="node 3"):
        benchmark.workload(path)


def test_lists_nested_without_end_are_refused(tmp_path: Path):
    path = trace_of(tmp_path, "aten::relu", "aten::relu(Tensor self) -> Tensor", ["DEEP"], ["Tensor(float)"])
    path.write_text(path.read_text().replace('"DEEP"', "[" * 50_000 + "]" * 50_000))
    with pytest.raises(TraceError):
        benchmark.workload(path)


@pytest.mark.parametrize("shrink", [{4: 0}, {4: "x"}, {-1: 2}, {4.5: 2}, {4: 2**62}, {2**80: 4}])
def test_sizes_that_make_no_sense_are_refused(shrink: dict[Any, Any], tmp_path: Path):
    path = trace_of(tmp_path, "aten::relu", "aten::relu(Tensor self) -> Tensor", [TENSOR], ["Tensor(float)"])
    with pytest.raises(InputError, match="shrink"):
        benchmark.workload(path, shrink=shrink)


def test_a_damaged_table_is_no_way_to_run_code(tmp_path: Path):
    path = trace_of(tmp_path, "aten::relu", "aten::relu(Tensor self) -> Tensor", [TENSOR], ["Tensor(float)"])
    benchmark.generate(path, tmp_path / "program")
    for op in ("aten::relu.__class__", "os::system", "aten::from_file", "aten::__dir__"):
        with pytest.raises(Unusable):
            find_op(op)
    with pytest.raises(Unusable, match="number format"):
        dtype_of("load")


def test_compare_refuses_what_is_no_run_and_gives_one_for_equal_runs(gpt_capture: Path):
    same = benchmark.compare(gpt_capture, gpt_capture)
    assert same.distance == 0
    assert same.coverage_by_count == same.coverage_by_time == 1
    assert same.figures.row(0, named=True)["ratio"] == 1
    assert same.verdict.startswith("Alike")
    with pytest.raises(InputError):
        benchmark.compare(3, gpt_capture)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    ["--iterations=0", "--iterations=x", "--warmup=-1", "--threads=0", "--threads=99999999", "--range=x",
     "--range=1:2:3", "--device=tpu", "--what"],
)  # fmt: skip
def test_what_a_program_cannot_be_told_is_refused(given: str, gpt_capture: Path):
    with pytest.raises(BenchmarkError, match=f"{given.partition('=')[0]}.*--help"):
        benchmark.replay(gpt_capture, arguments=[given])


@pytest.mark.parametrize("given", [{"shrink": 3}, {"cluster": "x"}])
def test_what_a_workload_cannot_be_told_is_refused(given: dict[str, Any], gpt_capture: Path):
    with pytest.raises(InputError, match=next(iter(given))):
        benchmark.workload(gpt_capture, **given)
