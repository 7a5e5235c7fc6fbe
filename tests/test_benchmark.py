"""Benchmarks from traces: programs of captured steps run in processes of their own, and resemble what they are from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import torch

from datasets.gpt import Gpt, GptConfig, loss_fn, make_batch
from lumos_nb import benchmark
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
    assert similar.coverage_by_time > 0.9  # the rest is the own time of composites, large where tensors are tiny
    kernels = similar.ops.filter(pl.col("name").is_in(["aten::mm", "aten::addmm", "aten::copy_", "aten::lerp_"]))
    assert kernels["count"].to_list() == kernels["replayed_count"].to_list()
    assert kernels["count"].min() > 0
    assert similar.verdict in repr(similar)


def test_the_program_needs_only_torch(gpt_capture: Path, tmp_path: Path):
    benchmark.generate(gpt_capture, tmp_path, rank=0)
    text = "\n".join((tmp_path / name).read_text() for name in ("bench.py", "binding.py"))
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported - set(sys.stdlib_module_names) == {"torch", "binding"}
