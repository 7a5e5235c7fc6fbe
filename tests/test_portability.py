"""The same operators on two devices: predicted, and measured where there are recordings."""

from __future__ import annotations

import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import benchmark
from lumos_nb.errors import CalibrationError, InputError
from lumos_nb.exchange.benchmark.steps import marked_steps
from tests.trace_builder import repeated, run_of

GPT = ln.datasets.path("gpt-single")
SHAPES = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}


def test_a_product_s_prediction_is_the_calibrations_own():
    run = run_of(
        repeated(
            lambda t, _n, at: [t.op("aten::mm", at + 20 * n, at + 20 * n + 10, args=SHAPES) for n in (0, 1)] and None
        )
    )
    found = benchmark.portability(run, ["cpu", "H100-SXM-80GB"], measured={"cpu": run})
    rows = pl.DataFrame({"op": "gemm", "dtype": "fp32", "pass": "fwd", "m": [64], "n": [16], "k": [32]})
    alone_us = [ln.load_calibration(name).predict_kernels(rows)["dur_us"].item() for name in ("cpu", "H100-SXM-80GB")]
    assert found["predicted_ns"].to_list() == pytest.approx([2000 * us for us in alone_us], rel=0.2)
    assert found["predicted_ratio"].to_list() == pytest.approx([1, found["predicted_ns"][1] / found["predicted_ns"][0]])
    assert found["measured_ns"].to_list() == [20_000, None]
    assert found["measured_basis_share"][0] == 1


def test_a_real_step_is_predicted_near_its_measured_time_and_faster_on_a_gpu():
    found = benchmark.portability(GPT, ["cpu", "H100-SXM-80GB"], measured={"cpu": GPT})
    cpu, gpu = found.iter_rows(named=True)
    samples = ln.kernel_samples(ln.load_run(GPT)).filter(pl.col("why").is_null())
    steps = marked_steps(ln.load_run(GPT))["step"]
    inside = samples.filter(pl.col("step").is_in(steps.implode()))
    assert cpu["measured_ns"] == pytest.approx(inside["time_us"].sum() * 1000 / len(steps))
    assert 0.5 < cpu["predicted_ns"] / cpu["measured_ns"] < 2
    assert gpu["predicted_ratio"] < 0.5
    assert (cpu["measured_ratio"], gpu["measured_ratio"]) == (1, None)
    assert gpu["measured_basis_share"] < cpu["measured_basis_share"]


@pytest.mark.parametrize(
    ("devices", "measured", "error", "message"),
    [
        pytest.param(["cpu"], {}, InputError, "devices are cpu; give two or more", id="one"),
        pytest.param(["cpu", "cpu"], {}, InputError, "that differ", id="one twice"),
        pytest.param([], {}, InputError, "devices are none", id="none"),
        pytest.param(["cpu", "abacus"], {}, CalibrationError, "abacus", id="an unknown device"),
        pytest.param(["cpu", "T4"], {"H20": GPT}, InputError, "a recording on H20 is given", id="of another device"),
    ],
)
def test_devices_that_cannot_be_are_refused(devices, measured, error, message):
    with pytest.raises(error, match=message):
        benchmark.portability(GPT, devices, measured=measured)


def test_a_recording_without_sizes_is_refused():
    with pytest.raises(InputError, match="record_shapes=True"):
        benchmark.portability(run_of(repeated(lambda t, _n, at: t.op("aten::mm", at, at + 1))), ["cpu", "T4"])
