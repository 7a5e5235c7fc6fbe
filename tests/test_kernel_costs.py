"""The work of kernels by formula, and the model that prices it: constants recovered, floors, order, scale, errors."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb.config import find_gpu, gpus
from lumos_nb.costs.forms import FORMS, FP32_JOULES, form_of, sustained_flops
from lumos_nb.costs.kernels import KernelModel, _Curve, _Sample, _soft, cell_keys, fit_kernels, prior_cell
from lumos_nb.costs.work import MOVES, PRODUCTS, with_work, work_of
from lumos_nb.errors import CalibrationError, InputError, SchemaError, SheetError

A100, H100 = find_gpu("A100"), find_gpu("H100")
FAMILIES = sorted({*(move.family for move in MOVES.values()), *PRODUCTS.values()})
PRIORS = KernelModel(cells=tuple(prior_cell(family, "half") for family in FAMILIES))


def frame(op="gemm", dtype="fp16", **columns):
    return pl.DataFrame({"op": op, "dtype": dtype, **columns}, strict=False)


def dur_us(request, gpu=A100, model=PRIORS):
    return model.predict(request, gpu)["dur_us"].to_numpy()


def numbers(low, high, size, seed):
    """Whole numbers, evenly spread in the logarithm."""
    return np.exp(np.random.default_rng(seed).uniform(np.log(low), np.log(high), size)).round().astype(int).tolist()


def products(count=600, **columns):
    return frame(
        m=numbers(16, 8192, count, 1), n=numbers(256, 16384, count, 2), k=numbers(256, 16384, count, 3), **columns
    )


def moves(op="add", count=300, **columns):
    return frame(op, rows=numbers(64, 65536, count, 1), cols=numbers(64, 16384, count, 2), **columns)


# --- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "flops", "size"),
    [
        pytest.param({"op": "gemm", "m": 8, "n": 4, "k": 2}, 128, 2 * (16 + 8 + 32), id="a product"),
        pytest.param({"op": "gemm_bias", "m": 8, "n": 4, "k": 2}, 128, 2 * (56 + 4), id="its bias"),
        pytest.param({"op": "bmm", "batch": 3, "m": 8, "n": 4, "k": 2}, 384, 3 * 112, id="a batch of them"),
        pytest.param({"op": "grouped_gemm", "groups": 5, "m": 8, "n": 4, "k": 2}, 640, 5 * 112, id="groups of them"),
        pytest.param(
            {"op": "gemm", "m": 8, "n": 4, "k": 2, "accumulate": True, "out_dtype": "fp32"},
            *(128, 2 * 24 + 4 * 2 * 32),
            id="a sum onto fp32 that is read and written",
        ),
        pytest.param({"op": "gemm", "m": 8, "n": 4, "k": 2, "pass": "bwd_grad_w"}, 128, 112, id="a weight's gradient"),
        pytest.param({"op": "gemm", "m": 8, "n": 4, "k": 2, "pass": "bwd"}, 256, 224, id="both gradients"),
        pytest.param(
            {"op": "attention", "batch": 2, "heads": 3, "seq_q": 4, "head_dim": 8},
            *(4 * 2 * 3 * 16 * 8, 2 * 2 * 4 * (3 * 4 * 8)),
            id="attention",
        ),
        pytest.param(
            {
                "op": "attention",
                "batch": 1,
                "heads": 4,
                "kv_heads": 2,
                "seq_q": 2,
                "seq_kv": 6,
                "head_dim": 8,
                "causal": True,
            },
            *(4 * 4 * 2 * 5.5 * 8, 2 * 2 * (4 * 2 * 8 + 2 * 6 * 8)),
            id="causal attention of few queries on many keys and fewer heads of them",
        ),
        pytest.param(
            {"op": "attention", "batch": 1, "heads": 1, "seq_q": 4, "head_dim": 6, "head_dim_v": 2, "pass": "fwd+bwd"},
            *(3.5 * 2 * 16 * 8, 3 * 2 * 2 * 4 * 8),
            id="attention there and back with narrower values",
        ),
        pytest.param({"op": "add", "rows": 8, "cols": 4}, 32, 2 * 3 * 32, id="a sum of two"),
        pytest.param(
            {"op": "gelu", "rows": 8, "cols": 4, "pass": "bwd"}, 32, 2 * 3 * 32, id="an activation's gradient"
        ),
        pytest.param({"op": "act_mul", "rows": 8, "cols": 4}, 192, 2 * 3 * 32, id="a gated activation by its output"),
        pytest.param(
            {"op": "cast", "rows": 8, "cols": 4, "out_dtype": "fp32"}, 0, 6 * 32, id="a cast to another width"
        ),
        pytest.param({"op": "embedding_lookup", "rows": 8, "cols": 4}, 0, 8 * (2 * 2 * 4 + 8), id="a lookup by index"),
        pytest.param({"op": "reduction", "rows": 8, "cols": 4}, 32, 2 * 8 * (4 + 1), id="a sum of each row"),
        pytest.param({"op": "adam", "rows": 8, "cols": 4}, 384, 2 * 7 * 32, id="a step of Adam"),
        pytest.param({"op": "fill", "rows": 8, "cols": 4}, 0, 2 * 32, id="a fill"),
        pytest.param(
            {"op": "convolution", "m": 50, "n": 4, "k": 27, "rows": 2, "cols": 75},
            *(2 * 50 * 4 * 27, 2 * (150 + 27 * 4 + 200)),
            id="a convolution reads its input once",
        ),
        pytest.param(
            {"op": "interaction", "batch": 2, "rows": 4, "cols": 3},
            2 * 2 * 6 * 3,
            2 * (24 + 12),
            id="pairs of features",
        ),
    ],
)
def test_flops_and_bytes_of(row, flops, size):
    work = with_work(pl.DataFrame([{"dtype": "fp16"} | row]))
    assert work.select("flops", "bytes").row(0) == (flops, size)


def test_products_of_the_model_are_those_of_the_flops():
    mixed = pl.concat([products(50), moves(count=50)], how="diagonal")
    attention = frame("attention", batch=2, heads=4, seq_q=128, head_dim=64, causal=[True, False])
    work = with_work(pl.concat([mixed, attention], how="diagonal")).filter(
        pl.col("family").is_in(["gemm", "attention"])
    )
    made = work.select(2 * pl.col("work_batch") * pl.col("work_m") * pl.col("work_n") * pl.col("work_k")).to_series()
    np.testing.assert_allclose(made, work["flops"])


@pytest.mark.parametrize(
    ("row", "names"),
    [
        pytest.param({"op": "gem"}, ("row 1", "'gem'", "bmm"), id="an unknown op"),
        pytest.param({"dtype": "fp12"}, ("row 1", "dtype", "fp12", "bf16"), id="an unknown format"),
        pytest.param({"pass": "sideways"}, ("row 1", "pass", "sideways", "bwd_grad_w"), id="an unknown pass"),
        pytest.param({"out_dtype": "fp12"}, ("row 1", "out_dtype", "fp12"), id="an unknown format of the output"),
        pytest.param({"k": None}, ("row 1", "'gemm'", "k is None"), id="a size that is missing"),
        pytest.param({"k": 0}, ("row 1", "'gemm'", "k is 0"), id="a size of none"),
        pytest.param({"op": "add"}, ("row 1", "'add'", "rows is None"), id="sizes of another family"),
    ],
)
def test_a_row_that_cannot_be_priced_is_named_for(row, names):
    good = {"op": "gemm", "dtype": "fp16", "m": 8, "n": 8, "k": 8, "pass": "fwd", "out_dtype": None, "rows": None}
    with pytest.raises(InputError) as caught:
        with_work(pl.DataFrame([good, good | row], schema_overrides={"out_dtype": pl.String, "rows": pl.Int64}))
    assert all(name in str(caught.value) for name in names), caught.value


def test_a_frame_without_ops_is_named_for():
    with pytest.raises(SchemaError, match=r"lacks column.*op"):
        with_work(pl.DataFrame({"dtype": ["fp16"]}))


def test_every_kernel_of_the_measured_tables_has_work(measured):
    for file in sorted(measured.glob("kernels_*.parquet")):
        table = pl.read_parquet(file)
        work = with_work(table)
        assert (work.select("flops", "bytes") >= 0).to_numpy().all(), file.name
        assert work["bytes"].min() > 0, file.name


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "moved", "exactly"),
    [
        pytest.param(products(), {"launch_cycles": 2, "memory": 1.3, "cost": 1.2}, ("memory", "cost"), id="a product"),
        pytest.param(moves(), {"launch_cycles": 2, "memory": 1.3}, ("launch_cycles", "memory"), id="a stream"),
        pytest.param(moves("softmax"), {"memory": 1.4, "begin_cycles": 3}, ("begin_cycles",), id="rows"),
    ],
)
def test_known_constants_are_recovered_from_samples_of(samples, moved, exactly):
    cell = prior_cell(with_work(samples)["family"][0], "half")
    truth = {name: value * moved.get(name, 1.0) for name, value in cell.constants.items()}
    known = KernelModel(cells=(msgspec.structs.replace(cell, constants=truth),))
    measured = known.predict(samples, A100).with_columns(time_us=pl.col("dur_us"), gpu=pl.lit("A100"))
    model = fit_kernels(measured.drop("cell", "floor_us", "dur_us", "low_us", "high_us"))
    for name in exactly:
        assert model.cells[0].constants[name] == pytest.approx(truth[name], rel=0.15), name
    np.testing.assert_allclose(dur_us(samples, model=model), measured["time_us"], rtol=0.02)


def test_a_cell_of_one_gpu_prices_another_by_its_sheet():
    samples = products(300)
    measured = samples.with_columns(gpu=pl.lit("A100"), time_us=pl.Series(dur_us(samples)))
    np.testing.assert_allclose(dur_us(samples, H100, fit_kernels(measured)), dur_us(samples, H100), rtol=0.05)


@settings(max_examples=200, deadline=None)
@given(
    op=st.sampled_from(sorted({*PRODUCTS, *MOVES})),
    sizes=st.lists(st.integers(1, 20000), min_size=3, max_size=3),
    gpu=st.sampled_from([A100, H100]),
    direction=st.sampled_from(["fwd", "bwd", "any"]),
)
def test_no_kernel_is_faster_than_the_roofline(op, sizes, gpu, direction):
    one, two, three = sizes
    shape = {"m": one, "n": two, "k": three, "rows": one, "cols": two, "batch": three % 64 + 1, "heads": 8}
    row = frame(op, **shape, seq_q=one, head_dim=64, **{"pass": direction})
    work = with_work(row).row(0, named=True)
    computed = work["flops"] / gpu.peak("fp16") if work["family"] in ("gemm", "convolution", "attention") else 0.0
    moved = (work["bytes"] - gpu.l2_bytes) / gpu.memory_bytes_per_s
    assert dur_us(row, gpu)[0] >= 1e6 * max(computed, moved) * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(
    start=st.tuples(*[st.integers(1, 64)] * 3),
    grown=st.sampled_from(["m", "n", "k"]),
    step=st.integers(1, 8),
    gpu=st.sampled_from([A100, H100]),
)
def test_a_product_never_gets_faster_as_it_grows_by_whole_tiles(start, grown, step, gpu):
    sizes = {name: [256 * size] * 40 for name, size in zip("mnk", start, strict=True)}
    sizes[grown] = [256 * (1 + step * i) for i in range(40)]
    assert (np.diff(dur_us(frame(**sizes), gpu)) >= -1e-9).all()


def test_a_board_that_lacks_the_power_for_its_peak_is_slower_in_fp32_alone():
    strong = msgspec.structs.replace(A100, board_power_w=250.0, process_nm=7.0)
    weak = msgspec.structs.replace(strong, board_power_w=50.0)
    large = {"m": [8192], "n": [8192], "k": [8192]}
    single = KernelModel(cells=(prior_cell("gemm", "fp32"),))
    paid = 50 / (FP32_JOULES * 7 / 12)
    ratio = dur_us(frame(dtype="fp32", **large), weak, single) / dur_us(frame(dtype="fp32", **large), strong, single)
    assert ratio == pytest.approx(A100.peak("fp32") / paid, rel=0.05)
    assert dur_us(frame(**large), weak) == dur_us(frame(**large), strong)
    floors = [single.predict(frame(dtype="fp32", **large), gpu)["floor_us"].item() for gpu in (weak, strong)]
    assert floors[0] == floors[1]


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)
def test_power_holds_no_bundled_gpu_below_two_fifths_of_its_peak(gpu):
    assert 0.4 * gpu.peak("fp32") <= sustained_flops(gpu, "fp32") <= gpu.peak("fp32")
    assert gpu.board_power_w
    assert gpu.process_nm


@pytest.mark.parametrize("method", ["FlashAttention-2", "PyTorch unfused"])
def test_the_gradient_of_attention_is_that_of_differences(method):
    samples = frame("attention", batch=4, heads=16, seq_q=[512, 2048, 8192], head_dim=[64, 128, 128], causal=True)
    work = work_of(samples.with_columns(method=pl.lit(method)))
    sample = _Sample.of(work.kinds, work.parts[0], H100, slice(None))
    curve = _Curve(form_of("attention", method), ())
    codes, theta = curve.codes(sample), curve.prior
    gradient = curve.log_us(theta, sample, codes, slope=True)[1]
    steps = dict(zip(curve.form.constants, 1e-5 * np.eye(len(theta)), strict=False))
    steps.pop("diagonal", None)  # whole keys: its gradient is that of the line through the steps
    for column, (name, step) in enumerate(steps.items()):
        ends = [curve.log_us(theta + sign * step, sample, codes, slope=False)[0] for sign in (1, -1)]
        np.testing.assert_allclose(gradient[:, column], (ends[0] - ends[1]) / 2e-5, rtol=1e-3, atol=1e-6, err_msg=name)


def test_exponentials_hide_behind_products_where_the_head_dim_is_wide():
    times = dur_us(frame("attention", batch=4, heads=16, seq_q=8192, head_dim=[64, 128, 256]), H100)
    assert 1.4 < times[1] / times[0] < times[2] / times[1] < 2.0


@pytest.mark.parametrize("op", [op for op in MOVES if MOVES[op].family in ("norm", "softmax", "elementwise")])
def test_what_moves_data_never_gets_faster_with_wider_rows(op):
    measured = moves(op).with_columns(gpu=pl.lit("A100"))
    slower_when_narrow = 20.0 + 500.0 * measured["rows"] / measured["cols"]
    model = fit_kernels(measured.with_columns(time_us=slower_when_narrow))
    assert (np.diff(dur_us(frame(op, rows=[4096] * 200, cols=list(range(64, 12864, 64))), model=model)) >= -1e-9).all()


@pytest.mark.parametrize("family", ["elementwise", "norm", "optimizer", "rope"])
def test_time_goes_with_bandwidth_where_bandwidth_binds(family):
    op = next(op for op in MOVES if MOVES[op].family == family)
    large = frame(op, rows=[65536, 131072], cols=[16384, 16384])
    twice = msgspec.structs.replace(A100, memory_bytes_per_s=2 * A100.memory_bytes_per_s)
    np.testing.assert_allclose(dur_us(large) / dur_us(large, twice), 2.0, rtol=0.05)


def test_causal_attention_takes_about_half_as_long_when_it_is_long():
    long = frame("attention", batch=4, heads=16, seq_q=16384, head_dim=128, causal=[False, True])
    whole, half = dur_us(long)
    assert 0.5 < half / whole < 0.6


def test_the_fastest_implementation_of_attention_is_meant_where_none_is_named():
    sizes = frame("attention", batch=4, heads=16, seq_q=[512, 1024, 2048, 4096], head_dim=128)
    base = dur_us(sizes)
    parts = [
        sizes.with_columns(gpu=pl.lit("A100"), method=pl.lit(f"{name}; a figure"), time_us=pl.Series(base * factor))
        for name, factor in (("slow", 3.0), ("fast", 1.1))
    ]
    model = fit_kernels(pl.concat(parts))
    assert [cell.key for cell in model.cells] == ["attention half fast", "attention half slow"]
    assert model.predict(sizes, A100)["cell"].unique().to_list() == ["attention half fast"]
    slow = model.predict(sizes.with_columns(method=pl.lit("slow")), A100)
    assert slow["cell"].unique().to_list() == ["attention half slow"]
    assert (slow["dur_us"] / base).median() == pytest.approx(3.0, rel=0.1)


def test_a_kind_without_samples_is_an_error_that_says_what_to_measure_or_has_no_price():
    model = KernelModel(cells=(prior_cell("gemm", "half"),))
    mixed = pl.concat([products(2), moves("softmax", 1)], how="diagonal")
    with pytest.raises(CalibrationError, match=r"softmax half; there are: gemm half\. Measure some"):
        model.predict(mixed, A100)
    priced = model.predict(mixed, A100, missing_ok=True)
    assert priced["dur_us"].is_null().to_list() == [False, False, True]
    assert priced["cell"].to_list() == ["gemm half", "gemm half", None]


def test_a_format_that_the_gpu_lacks_is_an_error_of_its_sheet():
    with pytest.raises(SheetError, match="no rate for bf16"):
        dur_us(products(2, dtype="bf16"), find_gpu("V100"))


@pytest.mark.parametrize(
    ("columns", "error", "says"),
    [
        pytest.param({"gpu": ["A100"]}, SchemaError, "time_us", id="without times"),
        pytest.param({"gpu": ["A100"], "time_us": [0.0]}, InputError, "0.0 in row 0", id="with a time of nothing"),
        pytest.param({"gpu": ["Z9"], "time_us": [1.0]}, InputError, "Z9", id="of a GPU without a sheet"),
    ],
)
def test_samples_are_refused(columns, error, says):
    with pytest.raises(error, match=says):
        fit_kernels(moves(count=1).with_columns(**{name: pl.Series(value) for name, value in columns.items()}))


def test_a_few_samples_move_a_started_model_a_little():
    samples = moves(count=400).with_columns(gpu=pl.lit("A100"))
    base = fit_kernels(samples.with_columns(time_us=pl.Series(dur_us(samples))))
    twice = samples.with_columns(time_us=pl.Series(2 * dur_us(samples)))
    big = moves("add", 50, dtype="fp16").filter(pl.col("rows") * pl.col("cols") > 10**7)
    one, many = (dur_us(big, model=fit_kernels(twice.head(n), start=base)) for n in (1, 400))
    before = dur_us(big, model=base)
    assert 1.0 < np.median(one / before) < np.median(many / before) < 2.1
    assert np.median(many / before) > 1.8


def test_a_model_is_the_same_after_json():
    assert msgspec.json.decode(msgspec.json.encode(PRIORS), type=KernelModel) == PRIORS


def test_keys_of_cells_are_those_of_predictions():
    rows = pl.concat([products(2), moves(count=2)], how="diagonal")
    assert cell_keys(with_work(rows)).to_list() == PRIORS.predict(rows, A100)["cell"].to_list()


def test_every_family_with_a_form_is_one_of_the_ops():
    assert set(FORMS) <= set(FAMILIES)


def test_a_million_distinct_kernels_are_priced_in_two_seconds_of_one_core():
    count = 1_000_000
    ops = np.random.default_rng(0).choice(["gemm", "gemm", "add", "softmax", "attention", "gelu"], count)
    sizes = {name: numbers(16, 16384, count, i) for i, name in enumerate(("m", "n", "k", "rows", "cols", "seq_q"))}
    request = frame(ops, **sizes, batch=1, heads=16, head_dim=128)
    taken = []
    for _ in range(3):
        begin = time.process_time()  # of all threads: what one core would need, whatever else the machine does
        PRIORS.predict(request, A100)
        taken.append(time.process_time() - begin)
    assert min(taken) < 2.0


def test_half_precision_products_of_an_unseen_model_are_priced_within_ten_percent(measured):
    table = pl.read_parquet(measured / "kernels_a100.parquet").filter(
        (pl.col("source") == "microsoft/vidur") & (pl.col("op") == "gemm")
    )
    unseen = pl.col("model") == "microsoft/phi-2"
    priced = fit_kernels(table.filter(~unseen)).predict(table.filter(unseen), A100)
    errors = (priced["dur_us"] / priced["time_us"] - 1).abs()
    assert errors.median() < 0.07
    assert errors.mean() < 0.10


def test_what_is_far_off_counts_by_its_distance_and_infinitely_far_off_has_no_slope() -> None:
    z = np.array([0.0, 1e-9, 0.7, -3.0, 1e3, 1e200, np.inf, -np.inf])
    value, slope = _soft(z)
    assert value[[0, 6, 7]].tolist() == [0.0, np.inf, -np.inf]
    assert (value[2:5] ** 2 / 2).tolist() == pytest.approx((np.hypot(1, z[2:5]) - 1).tolist())
    assert slope[[0, 6, 7]].tolist() == [1.0, 0.0, 0.0]
    nudged = 1e-6
    by_differences = (_soft(z[2:5] + nudged)[0] - _soft(z[2:5] - nudged)[0]) / (2 * nudged)
    assert slope[2:5].tolist() == pytest.approx(by_differences.tolist(), rel=1e-6)
