"""`capture`: what its phases write, alone and on two gloo ranks, and what its labels let a reader find."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import TINY, WORLD_SIZE, gpt, run_ranks

from lumos_nb import recorder
from lumos_nb.errors import CaptureError
from lumos_nb.fake_group import dry_run
from lumos_nb.labels import ddp_hook, label_collectives
from lumos_nb.recorder import Recorder, capture

TRACED = 2
DELAY_MS = 50.0  # well above what a busy machine makes one rank late by
LABEL = re.compile(
    r"(?P<what>comm|wait)::(?P<collective>\w+) group=(?P<group>\S+) seq=(?P<seq>\d+) bytes=(?P<bytes>\d+)"
    r" dtype=(?P<dtype>\w+)( peer=(?P<peer>\d+))?"
)


def train() -> Callable[[], None]:
    model = torch.nn.Linear(4, 4)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()

    return step


def loop(step: Callable[[], object], folder: Path, iterations: int | None = None) -> None:
    with short(folder) as rec:
        for _ in rec.wrap(range(rec.total_steps if iterations is None else iterations)):
            step()


def short(folder: Path, **kwargs: Any) -> Recorder:
    return capture(folder, **{"steps": TRACED, "warmup": 1, "timed": 3, "device": "cpu", **kwargs})


def unpack(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Complete events of a trace on threads, in order of start, the longer first."""
    events = [e for e in json.loads(unpack(path))["traceEvents"] if e["ph"] == "X" and "ts" in e]
    return sorted((e for e in events if isinstance(e["tid"], int)), key=lambda e: (e["ts"], -e["dur"]))


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


# --- alone


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captures") / "alone"
    step = train()
    with short(folder, arguments={"note": "mine"}) as rec:
        for _ in rec.wrap(range(rec.total_steps + 5)):
            step()
    assert rec.done
    return folder


def test_a_capture_has_its_files(alone: Path) -> None:
    names = ["capture.json", "groups.json", "rank-0.et.json.gz", "rank-0.json.gz", "steps.csv"]
    assert sorted(path.name for path in alone.iterdir()) == names


def test_every_traced_step_is_marked(alone: Path) -> None:
    events = read_events(alone / "rank-0.json.gz")
    marks = [e for e in events if e["name"].startswith("ProfilerStep#")]
    assert [e["name"] for e in marks] == ["ProfilerStep#1", "ProfilerStep#2"]
    for mark in marks:
        within = [e for e in events if mark["ts"] <= e["ts"] < mark["ts"] + mark["dur"]]
        assert sum(e["name"] == "aten::linear" for e in within) == 1
        assert next(e for e in within if e["name"] == "aten::linear")["args"]["Input Dims"][0] == [2, 4]


def test_a_trace_does_not_say_where_it_was_written(alone: Path) -> None:
    text = unpack(alone / "rank-0.json.gz")
    assert json.loads(text)["traceName"] == "rank-0.json"
    assert str(alone) not in text


def test_only_the_timed_steps_are_in_the_step_times(alone: Path) -> None:
    rows = read_csv(alone / "steps.csv")
    assert [(row["rank"], row["step"]) for row in rows] == [("0", "0"), ("0", "1"), ("0", "2")]
    assert all(int(row["wall_ns"]) > 0 and int(row["cpu_ns"]) >= 0 for row in rows)


def test_the_execution_trace_is_of_one_step(alone: Path) -> None:
    trace = json.loads(unpack(alone / "rank-0.et.json.gz"))
    assert Counter(node["name"] for node in trace["nodes"])["aten::linear"] == 1


def test_a_paired_execution_trace_is_of_the_traced_steps(tmp_path: Path) -> None:
    step = train()
    with short(tmp_path / "x", paired=True) as rec:
        for _ in rec.wrap(range(rec.total_steps)):
            step()
    events = [e for e in read_events(tmp_path / "x/rank-0.json.gz") if "Record function id" in e.get("args", {})]
    names = {e["args"]["Record function id"]: e["name"] for e in events}
    nodes = json.loads(unpack(tmp_path / "x/rank-0.et.json.gz"))["nodes"]
    ids = [({a["name"]: a["value"] for a in node["attrs"]}["rf_id"], node["name"]) for node in nodes]
    own = [(rf_id, name) for rf_id, name in ids if rf_id]
    assert Counter(name for _, name in own)["aten::linear"] == TRACED
    assert own == [(rf_id, names[rf_id]) for rf_id, _ in own]
    assert "executed" not in json.loads((tmp_path / "x/capture.json").read_text())["phases"]


@pytest.mark.parametrize("iterations", [3, 5])
def test_a_paired_capture_that_ends_early_leaves_nothing(tmp_path: Path, iterations: int) -> None:
    with pytest.raises(CaptureError, match=r"in the (timed|traced) phase"), short(tmp_path / "x", paired=True) as rec:
        for _ in rec.wrap(range(iterations)):
            pass
    assert list((tmp_path / "x").iterdir()) == []


def test_the_capture_says_what_times_depend_on(alone: Path) -> None:
    about = json.loads((alone / "capture.json").read_text())
    assert about["phases"] == {"warmup": 1, "timed": 3, "traced": TRACED + 1, "executed": 1}
    assert about["arguments"]["note"] == "mine"
    assert about["torch"] == torch.__version__
    assert about["threads"] == torch.get_num_threads()
    assert (about["world_size"], about["nodes"], about["wall_clock"]) == (1, [0], "host")
    assert about["seeds"] == [torch.initial_seed()]
    assert json.loads((alone / "groups.json").read_text()) == {}


def test_nothing_is_attached_while_timing(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []
    step = train()
    with short(tmp_path / "x") as rec:
        for _ in rec.wrap(range(rec.total_steps)):
            seen.append((rec.phase, torch.autograd.profiler._is_profiler_enabled))
            step()
    assert seen == [
        *[("warmup", False)] * 1,
        *[("timed", False)] * 3,
        ("traced", False),  # the profiler's own warm-up
        *[("traced", True)] * TRACED,
        *[("executed", False)] * 1,
    ]


def test_step_times_are_of_the_steps(tmp_path: Path) -> None:
    import time

    with short(tmp_path / "x", executed=0) as rec:
        assert repr(rec) == f"<Recorder of {tmp_path / 'x'}: 0 of {rec.total_steps} steps, phase warmup>"
        for _ in rec.wrap(range(rec.total_steps)):
            time.sleep(0.2 if rec.phase == "timed" and rec.phase_step == 1 else 0)
    wall = [int(row["wall_ns"]) for row in read_csv(tmp_path / "x" / "steps.csv")]
    assert wall[1] >= 200e6 > max(wall[0], wall[2])
    assert not (tmp_path / "x" / "rank-0.et.json.gz").exists()


def test_on_a_device_steps_are_timed_by_its_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock_ms = iter([10.0, 12.5, 12.75])
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.append("record")
            self.at_ms = next(clock_ms)

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    for name, value in (("utilization", 90), ("memory_usage", 45), ("power_draw", 350_000)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: calls.append("NVML") or value)
    timed = recorder._Timed(2, "cuda", 1, tmp_path / "device-1.csv")
    timed.start()
    timed.step()
    timed.step()
    timed.stop()
    asked = ["NVML"] * 3  # while the device is still at work
    assert calls == ["synchronize", "record", "record", "record", *asked, "synchronize"]  # none between the steps
    assert (tmp_path / "device-1.csv").read_text().split() == ["rank,sm_share,memory_share,power_w", "1,0.9,0.45,350.0"]
    assert [(step, wall_ns) for step, wall_ns, _ in timed.rows()] == [(0, 2_500_000), (1, 250_000)]


@pytest.mark.parametrize(
    ("iterations", "phase"),
    [
        pytest.param(0, "warmup", id="no step at all"),
        pytest.param(2, "timed", id="while timing"),
        pytest.param(4, "traced", id="before the profiler records"),
        pytest.param(6, "traced", id="while the profiler records"),
        pytest.param(7, "executed", id="in the execution trace"),
    ],
)
def test_a_loop_that_ends_early_is_an_error_and_leaves_nothing(tmp_path: Path, iterations: int, phase: str) -> None:
    step, folder = train(), tmp_path / "x"
    message = rf"ended after {iterations} of 8 steps \(1 warmup \+ 3 timed \+ 3 traced \+ 1 executed\), in the {phase}"
    with pytest.raises(CaptureError, match=message):
        loop(step, folder, iterations)
    assert list(folder.iterdir()) == []
    loop(step, folder)  # the profiler is free again
    assert (folder / "capture.json").exists()


def test_an_error_in_the_loop_passes(tmp_path: Path) -> None:
    countdown = iter(range(5, -1, -1))
    with pytest.raises(ZeroDivisionError):
        loop(lambda: 1 / next(countdown), tmp_path / "x")
    assert list((tmp_path / "x").iterdir()) == []


def test_a_second_capture_does_not_mix_with_the_first(alone: Path) -> None:
    with pytest.raises(CaptureError, match=r"alone already holds a capture.*another folder"), short(alone):
        pass
    assert (alone / "capture.json").exists()


def test_a_capture_inside_a_capture_is_refused_and_ends_both(tmp_path: Path) -> None:
    with (
        pytest.raises(CaptureError, match=r"capture into \S+outer is recording in this process"),
        short(tmp_path / "outer") as outer,
        short(tmp_path / "inner"),
    ):
        pass
    assert outer.phase == "outside"
    loop(lambda: None, tmp_path / "inner")


def test_a_capture_inside_a_profiler_is_refused(tmp_path: Path) -> None:
    with torch.profiler.profile(), pytest.raises(CaptureError, match="a torch profiler is recording"):
        short(tmp_path / "x").__enter__()


def test_a_capture_that_ended_early_is_not_taken_up_again(tmp_path: Path) -> None:
    recorder = short(tmp_path / "x")
    with pytest.raises(CaptureError, match="the loop ended after 1"), recorder:
        recorder.step()
    with pytest.raises(CaptureError, match="has been used; make another one"):
        recorder.__enter__()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError, match=r"file/x cannot be written into: .*file is a file, no folder"):
        short(tmp_path / "file" / "x").__enter__()


def test_a_step_outside_the_capture_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="outside the capture"):
        short(tmp_path / "x").step()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"steps": 0}, "steps=0; give a whole number, 1 or more"),
        ({"timed": -1}, "timed=-1; give a whole number, 0 or more"),
        ({"steps": 1.5}, "steps=1.5; give a whole number"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"arguments": {"model": object()}}, "not JSON serializable; give names with values for JSON"),
    ],
)
def test_counts_and_devices_are_checked(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        short(tmp_path / "x", **kwargs)


# --- on two ranks


def own_gradients(hook: gpt.Hook | None) -> list[torch.Tensor]:
    """Gradients of a data-parallel model on batches that differ by rank."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(gpt.make_model(TINY, "cpu"), bucket_cap_mb=0.02)
    if hook is not None:
        model.register_comm_hook(None, hook)
    for _ in range(2):
        model.zero_grad()
        gpt.loss_fn(model(torch.randint(TINY.vocab, (2, 8))), torch.randint(TINY.vocab, (2, 8))).backward()
    return [parameter.grad for parameter in model.parameters()]


def work_on_two_ranks(rank: int, folder: Path) -> None:
    """All that needs two ranks, in one job: starting one takes seconds."""
    setups = {
        "ddp": lambda: gpt.data_parallel(TINY, hook=ddp_hook),
        "tp": lambda: gpt.tensor_parallel(TINY),
        "pp": lambda: gpt.pipeline_parallel(TINY),
    }
    methods = dist.ProcessGroup.allreduce, dist.Work.wait, torch.ops._c10d_functional.all_reduce
    for name, setup in setups.items():
        step = setup()
        with short(folder / name) as rec:
            for _ in rec.wrap(range(rec.total_steps)):
                step(DELAY_MS if rank == 1 and name == "ddp" else 0.0)
        del step
    for hook, reference in zip(own_gradients(ddp_hook), own_gradients(None), strict=True):
        torch.testing.assert_close(hook, reference)
    assert methods == (dist.ProcessGroup.allreduce, dist.Work.wait, torch.ops._c10d_functional.all_reduce)
    with torch.profiler.profile() as profiler, label_collectives():
        work = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        work.wait()
        dist.barrier()
        dist.broadcast(torch.ones(5, dtype=torch.float64), 1)
        dist.all_gather_into_tensor(torch.ones(8), torch.ones(4))
    names = [e.name for e in profiler.events() if LABEL.match(e.name)]
    (folder / f"names-{rank}.json").write_text(json.dumps(names))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    run_ranks(work_on_two_ranks, folder)
    return folder


def labelled(folder: Path, rank: int) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Labelled events of a rank with the words of their labels."""
    for event in read_events(folder / f"rank-{rank}.json.gz"):
        if match := LABEL.fullmatch(event["name"]):
            yield event, match.groupdict()


def words(folder: Path, rank: int, what: str) -> list[tuple[str, int, int]]:
    found = [label for _, label in labelled(folder, rank) if label["what"] == what]
    return [(label["collective"], int(label["seq"]), int(label["bytes"])) for label in found]


@pytest.mark.parametrize("kind", ["ddp", "tp", "pp"])
def test_every_wait_follows_its_issue_on_the_same_thread(two_ranks: Path, kind: str) -> None:
    for rank in range(WORLD_SIZE):
        issued: dict[str, dict[str, Any]] = {}
        for event, label in labelled(two_ranks / kind, rank):
            key = event["name"].partition("::")[2]
            if label["what"] == "comm":
                assert key not in issued
                issued[key] = event
            else:
                issue = issued.pop(key)
                assert event["tid"] == issue["tid"]
                assert event["ts"] >= issue["ts"] + issue["dur"]
        assert issued == {}


@pytest.mark.parametrize("kind", ["ddp", "tp"])
def test_the_kth_collective_is_the_same_on_all_ranks_and_the_kth_of_gloo(two_ranks: Path, kind: str) -> None:
    issues = [words(two_ranks / kind, rank, "comm") for rank in range(WORLD_SIZE)]
    assert issues[0] == issues[1]
    sequence = [seq for _, seq, _ in issues[0]]
    assert sequence == list(range(sequence[0], sequence[0] + len(sequence)))  # 0 was in the profiler's warm-up
    for rank in range(WORLD_SIZE):
        events = read_events(two_ranks / kind / f"rank-{rank}.json.gz")
        runs = [e for e in events if e["name"] == "gloo:all_reduce"]
        opens = [e for e, label in labelled(two_ranks / kind, rank) if label["what"] == "comm"]
        assert len(runs) == len(opens)
        for run, issue, size in zip(runs, opens, issues[rank], strict=True):
            assert run["ts"] >= issue["ts"]
            dims = run["args"]["Input Dims"][0]
            assert torch.Size(dims).numel() * 4 == size[2]


@pytest.mark.parametrize(
    ("kind", "setup"),
    [
        pytest.param("ddp", gpt.data_parallel, id="data parallel"),
        pytest.param("tp", gpt.tensor_parallel, id="tensor parallel"),
    ],
)
def test_a_dry_run_foretells_the_collectives(two_ranks: Path, kind: str, setup: Callable[..., gpt.Step]) -> None:
    def make() -> gpt.Step:
        step = setup(TINY)
        step()
        step()
        return step

    foretold = dry_run(lambda step: step(), WORLD_SIZE, 1, setup=make).collectives
    measured = [(collective, size) for collective, _, size in words(two_ranks / kind, 1, "comm")]
    assert measured == foretold.select("collective", "comm_bytes").rows() * TRACED


def test_a_send_is_its_peers_receive(two_ranks: Path) -> None:
    def messages(rank: int, collective: str) -> list[tuple[int, int, int]]:
        found = [label for _, label in labelled(two_ranks / "pp", rank) if label["what"] == "comm"]
        return [
            (int(label["peer"]), int(label["seq"]), int(label["bytes"]))
            for label in found
            if label["collective"] == collective
        ]

    size = TINY.batch // TINY.micro_batches * TINY.seq * TINY.hidden * 4
    for rank, peer in ((0, 1), (1, 0)):
        sent, received = messages(rank, "send"), messages(peer, "recv")
        assert [(seq, nbytes) for _, seq, nbytes in sent] == [(seq, nbytes) for _, seq, nbytes in received]
        assert {to for to, _, _ in sent} == {peer}
        assert {nbytes for _, _, nbytes in sent} == {size}
        assert len(sent) == TRACED * TINY.micro_batches


def test_micro_batches_are_named(two_ranks: Path) -> None:
    names = Counter(e["name"] for e in read_events(two_ranks / "pp" / "rank-1.json.gz"))
    for k in range(TINY.micro_batches):
        assert names[f"Forward {k}"] == names[f"Backward {k}"] == TRACED


def test_a_delay_on_one_rank_shows_as_the_other_ranks_waiting(two_ranks: Path) -> None:
    delays = [e for e in read_events(two_ranks / "ddp" / "rank-1.json.gz") if e["name"] == "delay=50ms"]
    assert len(delays) == TRACED
    assert all(e["dur"] >= DELAY_MS * 1e3 for e in delays)
    waits = [e["dur"] for e, label in labelled(two_ranks / "ddp", 0) if label["what"] == "wait"]
    assert sum(waits) >= 0.5 * TRACED * DELAY_MS * 1e3


def test_groups_and_steps_are_of_all_ranks(two_ranks: Path) -> None:
    folder = two_ranks / "ddp"
    assert json.loads((folder / "groups.json").read_text()) == {"0": [0, 1]}
    about = json.loads((folder / "capture.json").read_text())
    assert (about["world_size"], about["nodes"]) == (2, [0, 0])
    rows = read_csv(folder / "steps.csv")
    assert [(row["rank"], row["step"]) for row in rows] == [(rank, step) for rank in "01" for step in "012"]


def test_the_execution_trace_names_collectives_too(two_ranks: Path) -> None:
    nodes = json.loads(unpack(two_ranks / "ddp" / "rank-0.et.json.gz"))["nodes"]
    assert sum(node["name"].startswith("comm::all_reduce group=0") for node in nodes) == sum(
        node["name"] == "c10d::allreduce_" for node in nodes
    )


def test_labels_have_all_words_and_a_second_wait_has_none(two_ranks: Path) -> None:
    expected = [
        "comm::all_reduce group=0 seq=0 bytes=12 dtype=float32",
        "wait::all_reduce group=0 seq=0 bytes=12 dtype=float32",
        "comm::barrier group=0 seq=1 bytes=0 dtype=none",
        "wait::barrier group=0 seq=1 bytes=0 dtype=none",
        "comm::broadcast group=0 seq=2 bytes=40 dtype=float64",
        "wait::broadcast group=0 seq=2 bytes=40 dtype=float64",
        "comm::all_gather group=0 seq=3 bytes=32 dtype=float32",
        "wait::all_gather group=0 seq=3 bytes=32 dtype=float32",
    ]
    for rank in range(WORLD_SIZE):
        assert json.loads((two_ranks / f"names-{rank}.json").read_text()) == expected
