"""The thresholds that tell waiting from work: answers must not hang on their exact value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lumos_nb import repetitions, rules
from lumos_nb.evaluate import mechanistic
from lumos_nb.graph import Recording
from lumos_nb.traces.run import load_run

TORCHREC = "torchrec/sst_long_a2a_optimizer_4"
POOL = "kineto/tb_plugin/samples/resnet50_num_workers_0"


@pytest.mark.parametrize(
    ("recording", "module", "threshold"),
    [
        pytest.param(TORCHREC, repetitions, "HIDDEN_WAIT_NS", id="unrecorded host waits"),
        pytest.param(TORCHREC, repetitions, "WAKE_STREAM_NS", id="streams woken by events"),
        pytest.param(TORCHREC, repetitions, "WAKE_HOST_NS", id="host woken by the device"),
        pytest.param(POOL, rules, "IDLE_NS", id="idling of other threads"),
    ],
)
def test_half_or_twice_a_threshold_moves_no_prediction_by_a_percent(
    traces: Path, monkeypatch: pytest.MonkeyPatch, recording: str, module: object, threshold: str
) -> None:
    run = Recording.of(load_run(traces / recording))
    steps = run.step_times()["step"].to_list()[-2:]
    as_it_is = mechanistic(run, steps)["predicted_ns"]
    for factor in (0.5, 2):
        monkeypatch.setattr(module, threshold, int(factor * getattr(module, threshold)))
        moved = mechanistic(replace(run), steps)["predicted_ns"] / as_it_is - 1
        monkeypatch.undo()
        assert moved.abs().max() < 0.01, f"{threshold} x {factor}: {moved.to_list()}"
