"""Samples of lookups on this machine: what is drawn, that calls do what they say, and files that say where from."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.machine import lookups
from benchmarks.machine.lookups import (
    MOST_BYTES,
    MOST_TABLES,
    VARIANTS,
    Bag,
    drawn_samples,
    drawn_table,
    fbgemm_calls,
    measure_lookups,
    measure_zipf,
    public_reuse,
    torch_calls,
)
from benchmarks.machine.record import main, record
from lumos_nb.charts import sweeps
from lumos_nb.config import find_gpu
from lumos_nb.costs.embedding_samples import checked_samples, predicted_times
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.embedding_tables import MEAN_LOOKUPS, reuse_factor
from lumos_nb.errors import CalibrationError, CaptureError, InputError, LayoutError

COMMITTED = Path(__file__).parents[1] / "datasets" / "calibration-samples" / "cpu"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer indices and a smaller buffer: a test has seconds."""
    monkeypatch.setattr(lookups, "DRAWN", 2**14)
    monkeypatch.setattr(lookups, "TABLE_BYTES", 2**24)
    monkeypatch.setattr(lookups, "BUFFER_BYTES", 2**27)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few samples."""
    out = tmp_path_factory.mktemp("lookups")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups, "DRAWN", 2**14)
        patch.setattr(lookups, "TABLE_BYTES", 2**24)
        patch.setattr(lookups, "BUFFER_BYTES", 2**27)
        for name in ("kernels.parquet", "provenance.json"):  # what stands there already
            (out / name).write_bytes((COMMITTED / name).read_bytes())
        about = json.loads((out / "provenance.json").read_text()) | {"collectives": "not measured"}
        (out / "provenance.json").write_text(json.dumps(about))
        assert main(["--out", str(out), "--budget", "4", "--only", "lookups"]) == 0
    return out


def test_the_public_reuse_is_that_of_its_lookups() -> None:
    share = public_reuse()
    assert share.sum() == pytest.approx(1)
    assert share @ MEAN_LOOKUPS == pytest.approx(6.906, rel=0.1)  # lookups a row, as published beside the shares
    assert share[:4] == pytest.approx([0.473, 0.152, 0.139, 0.112], abs=0.02)  # the published shares of rows


def test_samples_are_the_same_for_a_seed_and_within_limits() -> None:
    first, again = (list(islice(drawn_samples("cpu", seed=3), 40)) for _ in range(2))
    assert [(s.batch, [b.table for b in s.bags]) for s in first] == [
        (s.batch, [b.table for b in s.bags]) for s in again
    ]
    for sample in first:
        assert {bag.table.split(":")[0] for bag in sample.bags} == {str(sample.group)}
        assert 1 <= len({bag.table for bag in sample.bags}) == len(sample.bags) <= MOST_TABLES
        assert sample.batch * sum(4 * bag.pooling * bag.dim for bag in sample.bags) <= MOST_BYTES["cpu"]
    assert {len(sample.bags) == 1 for sample in first} == {True, False}
    other = next(drawn_samples("cpu", seed=4))
    assert [bag.rows for bag in other.bags] != [bag.rows for bag in first[0].bags]


def test_batches_follow_one_another_in_what_was_drawn() -> None:
    drawn = np.arange(100, dtype=np.int32)
    bag = Bag("t", 100, 4, 3.0, True, "uniform", drawn)
    (one, starts), (two, _) = islice(bag.batches(5, np.random.default_rng(0)), 2)
    assert starts.tolist() == [0, 3, 6, 9, 12]
    assert ((np.concatenate([one, two]) - one[0]) % 100).tolist() == list(range(30))


@pytest.mark.parametrize("number", range(6))
def test_tables_have_the_indices_of_their_distribution(number: int) -> None:
    bag = drawn_table(0, number)
    assert 0 <= bag.drawn.min() <= bag.drawn.max() < bag.rows
    if bag.distribution == "uniform":
        expected = bag.rows * -np.expm1(-len(bag.drawn) / bag.rows)
        assert len(np.unique(bag.drawn)) == pytest.approx(expected, rel=0.05)


def test_calls_look_up_and_step_as_a_bag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(lookups, "LEARNING_RATE", 0.5)
    bags = [Bag("a", 6, 4, 2.0, True, "", np.zeros(1, np.int32)), Bag("b", 3, 2, 1.0, True, "", np.zeros(1, np.int32))]
    batches = [[(np.array([0, 1, 1, 5]), np.array([0, 2])), (np.array([2, 2]), np.array([0, 1]))]] * 2
    buffer = torch.arange(30.0)
    before = buffer.clone()
    forward, backward = torch_calls(bags, batches, buffer)
    first, second = forward()
    rows, other = before[:24].view(6, 4), before[24:].view(3, 2)
    assert torch.equal(first, torch.stack([rows[0] + rows[1], rows[1] + rows[5]]))
    assert torch.equal(second, torch.stack([other[2], other[2]]))
    backward()
    backward()  # the graph is kept, and no gradient is left over
    moved = before - buffer.detach()
    assert moved[:24].view(6, 4)[:, 0].tolist() == [1, 2, 0, 0, 0, 1]
    assert moved[24:].view(3, 2)[:, 1].tolist() == [0, 0, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # FBGEMM's own, as it is imported
def test_fbgemm_looks_up_and_steps_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("fbgemm_gpu", reason="no FBGEMM: pip install --no-deps fbgemm-gpu-cpu==1.8.0 for torch 2.13")
    monkeypatch.setattr(lookups, "LEARNING_RATE", 0.5)
    bags = [Bag("a", 6, 4, 2.0, True, "", np.zeros(1, np.int32)), Bag("b", 3, 8, 1.0, True, "", np.zeros(1, np.int32))]
    batches = [[(np.array([0, 1, 1, 5]), np.array([0, 2])), (np.array([2, 2]), np.array([0, 1]))]] * 2
    forward, backward = fbgemm_calls(bags, batches, torch.zeros(1))
    before = forward()
    backward()
    backward()
    moved = before - forward()  # rows 0 and 5 of the first table are in one sample, its row 1 and the other's 2 in both
    assert moved.tolist() == [pytest.approx([3.0] * 4 + [2.0] * 8, abs=1e-5)] * 2


def test_a_frame_of_samples_fits_the_models_and_says_what_it_is(recorded: Path) -> None:
    frame = pl.read_parquet(recorded / "lookups.parquet")
    assert checked_samples(frame).height == frame.height
    assert frame["rounds"].min() >= 3
    assert frame.select((pl.col("forward_min_us") <= pl.col("forward_time_us")).all()).item()
    assert frame.group_by("call").agg(pl.col("forward_time_us").n_unique())["forward_time_us"].max() == 1
    assert set(frame["implementation"]) == {"embedding_bag, a call a table; one SGD step"}
    about = json.loads((recorded / "provenance.json").read_text())
    assert about["lookups"]["rows"] == frame.height
    assert about["lookups"]["machine"]["torch"] in frame["source"][0]
    assert about["lookups"]["sha256"] == hashlib.sha256((recorded / "lookups.parquet").read_bytes()).hexdigest()
    before = json.loads((COMMITTED / "provenance.json").read_text())
    assert {name: about[name] for name in ("kernels", "date", "overhead")} == {
        name: before[name] for name in ("kernels", "date", "overhead")
    }


def test_the_reuse_of_a_row_is_that_of_what_was_looked_up(recorded: Path) -> None:
    row = pl.read_parquet(recorded / "lookups.parquet").filter(pl.col("table").is_not_null()).row(0, named=True)
    _, sample = islice(drawn_samples("cpu"), 2)  # the first warms up
    counted = np.mean([reuse_factor(batch[0][0]) for batch in sample.batches()], axis=0)
    assert [row[f"bin_{i}"] for i in range(17)] == pytest.approx(counted.tolist(), abs=1e-5)
    assert row["pooling"] == pytest.approx(
        sum(len(batch[0][0]) for batch in sample.batches()) / VARIANTS / sample.batch
    )


def test_a_sweep_over_alpha_can_be_priced_and_drawn() -> None:
    frame = measure_zipf([0.0, 1.4], rows=200_000, dim=32, pooling=10, batch=256)
    assert frame["distribution"].to_list() == ["Zipf 0", "Zipf 1.4"]
    assert frame["pooling"].to_list() == [10.0, 10.0]
    even, skewed = frame["forward_time_us"]
    assert skewed < even
    assert frame["bin_0"][0] > frame["bin_0"][1]
    model = PhysicalLookup.of_sheet(find_gpu("H100-SXM-80GB"))
    predicted = predicted_times(model, checked_samples(frame))[:, 0]
    assert predicted[1] < predicted[0]
    drawn = frame.select(
        alpha=pl.Series([0.0, 1.4]), panel=pl.lit("a table"), measured="forward_time_us", predicted=pl.Series(predicted)
    )
    chart = sweeps(drawn, x="alpha", panel="panel", titles={"x": "alpha", "y": "forward (us)"})
    assert len(next(iter(chart.to_dict()["datasets"].values()))) == 2
    with pytest.raises(LayoutError, match="alpha"):
        measure_zipf([-1.0])


def test_tables_that_nobody_records_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown tables hats"):
        record("cpu", tmp_path, 1.0, only=["hats"])
    with pytest.raises(CalibrationError, match="make calibrate"):
        record("cpu", tmp_path, 1.0, only=["lookups"])


def test_a_device_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CaptureError, match="no CUDA device"):
        measure_lookups("cuda")
    assert main(["--device", "cuda", "--out", str(tmp_path)]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_the_buffer_holds_what_a_sample_looks_up() -> None:
    assert all(
        sum(4 * b.rows * b.dim for b in s.bags) <= lookups.BUFFER_BYTES for s in islice(drawn_samples("cpu"), 20)
    )
