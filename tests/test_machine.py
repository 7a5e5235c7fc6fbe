"""Samples of this machine: the same grid for the same seed, every op, and files that say where they are from."""

from __future__ import annotations

import itertools
import platform
import re
import time
from pathlib import Path

import polars as pl
import pytest

from benchmarks.machine import lookups, ranks, record
from benchmarks.machine.clock import Clock, quiet_process
from benchmarks.machine.fit import in_training, machine_sheet, read_samples
from benchmarks.machine.ops import OPS, cases
from benchmarks.machine.ranks import COLLECTIVES, SIZES_BYTES, measure_collectives
from benchmarks.machine.record import main, measure_kernels
from benchmarks.machine.shapes import Model, models, sizes
from lumos_nb.config import Gpu, read_sheet
from lumos_nb.costs.calibration import load_calibration
from lumos_nb.costs.work import with_work
from lumos_nb.errors import CalibrationError, CaptureError, InputError

COMMITTED = Path(__file__).parents[1] / "datasets" / "calibration-samples" / "cpu"
SMALL = Model(heads=2, kv_heads=1, head_dim=16, ffn=128, vocab=96, batch=2, seq=8, causal=True)
TIMES = ("time_us", "warm_us", "min_us")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of a few seconds and two ranks."""
    out = tmp_path_factory.mktemp("samples")
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("DRAWN", 2**14), ("TABLE_BYTES", 2**24), ("BUFFER_BYTES", 2**27)):
            patch.setattr(lookups, name, size)
        record.record("cpu", out, budget_s=2.0, world_sizes=(2,))
    return out


def test_every_op_has_times_of_all_states(recorded: Path) -> None:
    kernels, _, _ = read_samples(recorded)
    assert set(kernels["op"]) == {op.op for op in OPS}
    assert kernels.select(pl.all_horizontal(pl.col(*TIMES) > 0).all()).item()
    assert kernels["rounds"].min() >= 3
    assert (kernels["min_us"] <= kernels["time_us"]).all()
    assert (kernels["spread"] >= 0).all()
    assert set(kernels["gpu"]) == {"cpu"}


def test_the_rows_of_a_model_are_of_one_group(recorded: Path) -> None:
    kernels, _, _ = read_samples(recorded)
    rows = kernels.filter(pl.col("role") == "activation")
    hidden = rows["group"].str.extract(r":h(\d+)$").cast(pl.Int64)
    assert (rows["cols"] == hidden).all()


def test_provenance_says_where_the_samples_are_from(recorded: Path) -> None:
    kernels, collectives, about = read_samples(recorded)
    assert collectives is not None
    assert (about["kernels"]["rows"], about["collectives"]["rows"]) == (kernels.height, collectives.height)
    assert about["machine"]["torch"] in kernels["source"][0]
    assert about["overhead"]["aten::linear traced_us"] > 0
    assert about["lookups"]["rows"] == pl.read_parquet(recorded / "lookups.parquet").height
    assert about["threads"] == 1


def test_a_changed_file_is_refused(recorded: Path, tmp_path: Path) -> None:
    for file in recorded.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    pl.read_parquet(tmp_path / "kernels.parquet").head(3).write_parquet(tmp_path / "kernels.parquet")
    with pytest.raises(CalibrationError, match=r"kernels\.parquet is not the file of provenance\.json"):
        read_samples(tmp_path)
    (tmp_path / "provenance.json").unlink()
    with pytest.raises(CalibrationError, match="run make calibrate"):
        read_samples(tmp_path)


def test_the_command_ends_with_a_table(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "record", lambda *_: None)
    assert main(["--out", str(recorded), "--calibration", str(tmp_path / "made")]) == 0
    printed = capsys.readouterr().out
    made = load_calibration(tmp_path / "made" / "cpu.json")
    assert made.collectives is not None
    assert made.overheads is not None
    assert 0 < made.overheads.cost([None], ["T1"])[0] < 1000
    assert re.search(r"class +pass +rows +median +mean +in 90 %\n(.* (\d+\.\d%|-)\n)+$", printed)
    kernels, collectives, _ = read_samples(recorded)
    assert collectives is not None
    for name in {*kernels["op"], *collectives["collective"]}:
        assert f"\n{name} " in printed
    assert f"kernels: {kernels.height} rows in " in printed


def test_without_a_sheet_there_are_samples_and_no_calibration(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in recorded.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "sheet.json").unlink()
    monkeypatch.setattr(record, "record", lambda *_: None)
    assert main(["--out", str(tmp_path)]) == 1
    assert "no sheet.json; record again, or give a sheet" in capsys.readouterr().err


def sample(**columns: object) -> pl.DataFrame:
    """One row of samples with three times, of 1, 2 and 3 microseconds."""
    row = {"op": "add", "pass": "any", "dtype": "fp32", "role": "movement", "rows": 1, "cols": 1} | columns
    rest = dict.fromkeys(("batch", "m", "n", "k", "seq_q", "heads", "head_dim"), pl.Int64)
    times = {"time_us": 2.0, "warm_us": 1.0, "fresh_us": 3.0}
    schema = rest | {"out_dtype": pl.String, "fresh_us": pl.Float64}
    return pl.DataFrame([times | {"out_dtype": None} | dict.fromkeys(rest) | row], schema_overrides=schema)


PRODUCT = {"op": "gemm", "batch": 1, "rows": None, "cols": None}


@pytest.mark.parametrize(
    ("columns", "time_us"),
    [
        ({"rows": 127, "cols": 256}, 1.0),
        ({"rows": 128, "cols": 256}, 3.0),
        ({"rows": 128, "cols": 256, "dtype": "bf16"}, 1.0),
        ({"rows": 128, "cols": 256, "dtype": "bf16", "op": "cast", "out_dtype": "fp32"}, 3.0),
        ({"rows": 512, "cols": 512, "role": "parameter"}, 1.0),
        ({"rows": 512, "cols": 512, "op": "copy"}, 1.0),
        (PRODUCT | {"pass": "fwd", "m": 64, "n": 512, "k": 8}, 3.0),
        (PRODUCT | {"pass": "bwd_grad_act", "m": 64, "n": 512, "k": 8}, 1.0),
        (PRODUCT | {"pass": "bwd_grad_w", "m": 64, "n": 512, "k": 64}, 3.0),
        ({"op": "embedding_lookup", "pass": "bwd", "rows": 4, "cols": 128, "n": 256}, 3.0),
        ({"rows": 512, "cols": 512, "fresh_us": None}, 2.0),
    ],
    ids=[
        *("a small output is warm", "a large output is fresh", "its bytes count", "those of the format that is made"),
        *("the optimizer makes none that stays", "nor does what writes in place", "a product's output counts"),
        *("of its gradient by the input that one's", "by the weight that one's", "of a lookup's the table"),
        "what has no such states stays",
    ],
)
def test_the_time_in_training_is_that_of_the_state_a_step_leaves(columns: dict[str, object], time_us: float) -> None:
    assert in_training(sample(**columns))["time_us"].item() == time_us


def test_a_gradient_is_recorded_in_sizes_of_the_forward_product() -> None:
    model = next(models("cpu", 1e9, 2**20))
    rows = [record.Row(op, case).sizes() for op, case in cases(model, 0, ("fp32",), ("gemm",))]
    found = {(row["role"], tuple(row[size] for size in "mnk")) for row in rows}
    layers = {(m, n, k) for role, (m, n, k) in found if role == "linear"}
    assert {sizes for role, sizes in found if role == "dgrad"} == layers
    assert {sizes for role, sizes in found if role == "wgrad"} == layers


def test_two_ranks_measure_every_collective_at_every_size(recorded: Path) -> None:
    _, frame, _ = read_samples(recorded)
    assert frame is not None
    cells = sorted(itertools.product(COLLECTIVES, SIZES_BYTES[::3]))
    assert frame.select("collective", "size_bytes").rows() == cells
    assert frame.select(pl.all_horizontal(pl.col("time_us", "min_us") > 0).all()).item()
    assert set(frame.select("hardware", "nodes", "gpus").rows()) == {("cpu", 1, 2)}


def test_a_collective_lasts_from_the_last_arrival_to_the_last_end() -> None:
    rounds = [([1000, 9000], [5000, 12000]), ([4000, 8000], [7000, 15000])]  # starts and ends of two ranks, in ns
    of_ranks = [[("broadcast", 1024, number, *times) for number in range(3)] for times in rounds]
    frame = ranks._frame(of_ranks, 2, "gloo")
    assert frame["time_us"].to_list() == [4.5]  # 4 to 7 and 9 to 15 microseconds
    assert frame.select("spread", "drift").row(0) == (0.0, 1.0)


def test_a_row_is_the_median_of_its_rounds() -> None:
    op, case = next(iter(cases(SMALL, 0, ("fp32",), ("gelu",))))
    row = record.Row(op, case)
    row.times |= {"time_us": [4.0, 2.0, 3.0, 9.0, 3.0], "warm_us": [1.0, 2.0]}
    values = row.values()
    assert [values[c] for c in ("time_us", "warm_us", "fresh_us", "min_us")] == [3.0, 1.5, None, 2.0]
    assert [values[c] for c in ("spread", "drift", "rounds")] == [pytest.approx(1 / 3, abs=1e-4), 0.75, 5]


def test_a_call_of_a_known_length_is_measured_as_such() -> None:
    def half_a_millisecond() -> None:
        until = time.thread_time_ns() + 500_000
        while time.thread_time_ns() < until:
            pass

    for state in ("time_us", "warm_us"):
        assert Clock("cpu").least(half_a_millisecond, state) == pytest.approx(500, rel=0.1)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to give memory back")
def test_fresh_memory_costs_its_pages() -> None:
    import torch

    with quiet_process():
        clock = Clock("cpu")
        cost = {state: clock.least(lambda: torch.zeros(2**20), state) for state in ("time_us", "fresh_us")}
    assert cost["fresh_us"] > 1.3 * cost["time_us"]


def test_every_row_can_be_priced(recorded: Path) -> None:
    kernels, _, _ = read_samples(recorded)
    work = with_work(kernels)
    assert work.select((pl.col("bytes") > 0).all()).item()


def test_nothing_is_below_the_floor_of_the_sheet() -> None:
    kernels, _, _ = read_samples(COMMITTED)
    sheet = read_sheet(COMMITTED / "sheet.json", Gpu)
    made = machine_sheet(kernels)  # clock and memory are those of the machine at hand
    assert (made.peak_flops, made.memory_bytes_per_s) == (sheet.peak_flops, sheet.memory_bytes_per_s)
    products = kernels.filter(pl.col("op") == "gemm")
    for dtype in ("fp32", "bf16"):
        rate = products.filter(pl.col("dtype") == dtype).select(
            (2e6 * pl.col("m") * pl.col("n") * pl.col("k") / pl.col("time_us")).max()
        )
        assert rate.item() <= sheet.peak(dtype)
    with pytest.raises(CalibrationError, match="measure gemm and copy for longer"):
        machine_sheet(kernels.filter(pl.col("op") == "gemm"))


def test_the_grid_is_the_same_for_the_same_seed() -> None:
    first, again, other = (list(itertools.islice(models("cpu", 1e9, 2**20, seed), 8)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len({model.hidden for model in first}) > 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_model_is_larger_than_asked(device: str) -> None:
    for model in itertools.islice(models(device, 1e10, 2**25), 50):
        assert model.flops <= 1e10
        assert model.elements <= 2**25
        largest = max(int(s["rows"]) * int(s["cols"]) for kind in sizes(model).values() for s in kind if "rows" in s)
        assert largest <= model.elements


def test_sizes_are_aligned_and_not() -> None:
    seqs = [model.seq % 16 == 0 for model in itertools.islice(models("cpu", 1e9, 2**20), 40)]
    assert 10 < sum(seqs) < 35


def test_the_gradients_of_a_layer_have_its_sizes_turned_round() -> None:
    shapes = sizes(SMALL)
    for forward, by_input, by_weight in zip(shapes["linear"], shapes["dgrad"], shapes["wgrad"], strict=True):
        m, n, k = (forward[c] for c in "mnk")
        assert [by_input[c] for c in "mnk"] == [m, k, n]
        assert [by_weight[c] for c in "mnk"] == [n, k, m]


def test_other_number_formats_take_turns() -> None:
    formats = ("fp32", "bf16", "fp8", "tf32")
    seen = [{case.dtype for _, case in cases(SMALL, number, formats, None)} for number in range(5)]
    assert seen == [{"fp32"}, {"fp32", "bf16"}, {"fp32", "fp8"}, {"fp32", "tf32"}, {"fp32"}]
    assert {case.op for _, case in cases(SMALL, 2, formats, None) if case.dtype == "fp8"} == {"gemm"}


def test_families_choose_what_is_measured() -> None:
    frame = measure_kernels(budget_s=0.2, families=["gemm", "softmax"])
    assert set(frame["op"]) == {"gemm", "softmax"}


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(CaptureError, match="sees no CUDA device here"):
        measure_kernels("cuda")
    with pytest.raises(CaptureError, match="2 ranks of nccl need as many GPUs; torch sees 0 here"):
        measure_collectives(2, "nccl")
    assert main(["--device", "cuda", "--out", str(tmp_path)]) == 1
    assert "sees no CUDA device here" in capsys.readouterr().err
    assert not (tmp_path / "provenance.json").exists()


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(InputError, match="unknown families gem; there are adamw, "):
        measure_kernels(families=["gem"])
    with pytest.raises(InputError, match="device is 'tpu'"):
        measure_kernels("tpu")
    with pytest.raises(InputError, match="'mpi', 2 ranks"):
        measure_collectives(2, "mpi")
    with pytest.raises(InputError, match="that 16 divides"):
        measure_collectives(4, sizes_bytes=(1000,))


def test_the_committed_samples_are_those_of_their_provenance() -> None:
    kernels, collectives, about = read_samples(COMMITTED)
    assert collectives is not None
    assert set(kernels["op"]) == {op.op for op in OPS}
    assert set(collectives["gpus"]) == {2, 4}
    assert sum(file.stat().st_size for file in COMMITTED.iterdir()) < 500_000
    assert "/" not in about["command"]
