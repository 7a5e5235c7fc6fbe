"""What NVML says of a GPU, with other functions in the place of torch's: no GPU is needed, and none was seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lumos_nb import benchmark
from lumos_nb.device_activity import write_activity
from tests.trace_builder import repeated, write_kineto


def says(monkeypatch: pytest.MonkeyPatch, sm: int, memory: int, milliwatts: int) -> None:
    for name, value in (("utilization", sm), ("memory_usage", memory), ("power_draw", milliwatts)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


def test_activity_and_power_are_written_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trace = repeated(lambda t, _n, at: t.op("aten::mm", at, at + 10))
    for side, values in (("a", [(80, 40, 500_000), (60, 20, 300_000)]), ("b", [(70, 15, 200_000)])):
        (tmp_path / side).mkdir()
        write_kineto(trace, tmp_path / side / "rank-0.json")
        for rank, one in enumerate(values):
            says(monkeypatch, *one)
            assert write_activity(tmp_path / side / f"device-{rank}.csv", rank)
    figures = {row[0]: row[2:5] for row in benchmark.compare(tmp_path / "a", tmp_path / "b").figures.iter_rows()}
    assert figures["SMs active, NVML"] == pytest.approx((0.7, 0.7, 1))
    assert figures["memory active, NVML"] == pytest.approx((0.3, 0.15, 0.5))
    assert figures["power, NVML"] == pytest.approx((400, 200, 0.5))
    (tmp_path / "a/device-0.csv").unlink()
    (tmp_path / "a/device-1.csv").unlink()
    found = benchmark.compare(tmp_path / "a", tmp_path / "b").figures["figure"]
    assert not found.str.contains("NVML").any()


def test_where_nvml_does_not_say_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def absent() -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    says(monkeypatch, 1, 1, 1)
    monkeypatch.setattr(torch.cuda, "power_draw", absent)
    assert not write_activity(tmp_path / "device-0.csv", 0)
    assert list(tmp_path.iterdir()) == []
