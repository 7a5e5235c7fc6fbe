"""Constants beyond kernels' own times, and what they do."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rows import ACCURACY, read
from lumos_nb.errors import InputError
from lumos_nb.workloads.llm.frictions import Frictions, Measured, expected_late_us, segment_sigma_us, slowed_us

ROWS = {
    # constant: row of accuracy.json, and what its figure is divided by
    "products_slowed": ("products beside collectives, NVIDIA", 100),
    "moves_slowed": ("moves beside collectives, NVIDIA", 100),
    "collectives_slowed": ("collectives beside kernels, V100", 100),
    "kernel_jitter_us": ("jitter of a kernel, NVIDIA", 1),
    "kernel_jitter": ("jitter of a kernel, share of its time, NVIDIA", 100),
    "pass_jitter": ("jitter of a pass, Primus", 100),
    "gpus_apart": ("GPUs apart, AR", 100),
    "documents_apart": ("micro-batches apart, AR", 100),
    "launch_us": ("between two launches, H100_Qwen forward", 1),
    "gap_us": ("gap on a busy stream, nccl_data", 1),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_constant_is_what_was_measured(name):
    row, divisor = ROWS[name]
    measured = {row.name: row.value for row in read(ACCURACY)}[f"frictions/{row}"] / divisor
    assert getattr(Frictions(), name).value == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("name", "trace"), [("kernels_a_row_eager", "H100_Qwen"), ("kernels_a_row_fused", "Megatron_TP8")]
)
def test_kernels_a_row_are_a_layer_of_a_trace_over_rows_of_the_work_table(name, trace):
    row = {row.name: row for row in read(ACCURACY)}[f"frictions/kernels of a layer forward, {trace}"]
    assert getattr(Frictions(), name).value == pytest.approx(row.value / row.baseline_value, rel=0.02)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), 0.3])
def test_a_constant_that_no_time_could_be_or_outside_its_interval_is_refused(value):
    with pytest.raises(InputError, match=f"a friction of {value}"):
        Measured(value, -1.0, 0.2, "")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, 0.0),
        (2, 1 / np.sqrt(np.pi)),
        (3, 1.5 / np.sqrt(np.pi)),
        (4, 1.0293753730),
        (5, 1.1629644736),
        (10, 1.5387527308),
        (100, 2.5075936365),
        (1000, 3.2414357690),
    ],
)
def test_the_last_of_n_ranks_is_late_by_the_expected_maximum_of_normals(ranks, expected):
    assert expected_late_us(1.0, ranks) == pytest.approx(expected, abs=1e-6)


def test_more_ranks_are_later_and_hundred_thousands_are_no_trouble():
    late = expected_late_us(2.0, [1, 2, 3, 64, 512, 11_616, 100_000, 10_000_000])
    assert np.all(np.diff(late) > 0)
    assert late[-1] / 2 == pytest.approx(5.2, abs=0.2)  # near sqrt(2 ln n)


def test_lateness_is_given_for_each_group_in_the_shape_it_was_asked_in():
    late = expected_late_us(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[2, 8], [8, 2]]))
    once = expected_late_us(1.0, [2, 8])
    np.testing.assert_allclose(late, [[once[0], 2 * once[1]], [3 * once[1], 4 * once[0]]])


def test_lateness_agrees_with_drawn_ranks():
    drawn = np.random.default_rng(1).normal(0, 3.0, (20_000, 16)).max(axis=1)
    assert expected_late_us(3.0, 16) == pytest.approx(drawn.mean(), abs=4 * drawn.std() / np.sqrt(20_000))


def test_fewer_than_one_rank_is_refused():
    with pytest.raises(InputError, match="ranks holds 0"):
        expected_late_us(1.0, [4, 0])


def test_what_runs_beside_something_half_the_time_is_slowed_by_half():
    np.testing.assert_allclose(slowed_us([100, 200], [0.5, 1.0], [0.1, 0.2]), [105, 240])
    np.testing.assert_array_equal(slowed_us([100.0], [0.0], 0.3), [100.0])


@pytest.mark.parametrize("share", [-0.01, 1.01, np.nan])
def test_a_share_outside_0_to_1_is_refused(share):
    with pytest.raises(InputError, match="give shares of 0 to 1"):
        slowed_us([1.0, 1.0], [0.5, share], 0.1)


def test_a_segment_varies_by_its_kernels_apart_and_by_its_whole():
    three, percent, none = (Measured(value, 0, 5, "") for value in (3, 0.01, 0))
    only_apart = Frictions(kernel_jitter_us=three, kernel_jitter=percent, pass_jitter=none)
    np.testing.assert_allclose(segment_sigma_us([400.0] * 4 + [0.0], [0, 0, 0, 0, 1], only_apart), [10.0, 3.0])
    only_whole = Frictions(kernel_jitter_us=none, kernel_jitter=none, pass_jitter=percent)
    np.testing.assert_allclose(segment_sigma_us([400.0, 100.0, 50.0], [0, 0, 2], only_whole), [5.0, 0.0, 0.5])
