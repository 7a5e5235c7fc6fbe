"""Costs under bad and odd input: any table, spelling and file gives the right price, or an error that helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import polars as pl
import pytest

from lumos_nb.costs.calibration import Calibration, load_calibration
from lumos_nb.costs.work import with_work
from lumos_nb.errors import InputError, SchemaError, SheetError

GEMM = {"op": "gemm", "dtype": "bf16", "pass": "fwd", "m": 4096, "n": 4096, "k": 4096, "trans": "NT"}
ATTENTION = {"op": "attention", "dtype": "bf16", "batch": 2, "heads": 16, "seq_q": 1024, "head_dim": 128}
REDUCE = {
    "hardware": "H100-SXM-80GB",
    "interconnect": "NVLink4/NVSwitch",
    "nodes": 1,
    "gpus": 8,
    "collective": "all_reduce",
    "size_bytes": 1 << 28,
}


@pytest.fixture(scope="module")
def h100() -> Calibration:
    return load_calibration("H100")


def one(cal: Calibration, row: Mapping[str, Any]) -> float:
    frame = pl.DataFrame({name: [value] for name, value in row.items()}, strict=False)
    return float(cal.predict_kernels(frame)["dur_us"].item())


# --- tables


def as_pandas(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pandas").DataFrame(rows)


@pytest.mark.parametrize(
    "table",
    [pl.DataFrame, pl.LazyFrame, as_pandas, list, lambda rows: pl.DataFrame(rows).to_dict(as_series=False)],
    ids=["polars", "lazy", "pandas", "list of rows", "mapping of columns"],
)
def test_every_kind_of_table_has_the_same_prices(h100: Calibration, table: Callable[[Any], Any]) -> None:
    kernels = [GEMM, {**GEMM, "m": 8}]
    assert h100.predict_kernels(table(kernels)).equals(h100.predict_kernels(pl.DataFrame(kernels)))
    collectives = [REDUCE, {**REDUCE, "collective": "all_gather"}]
    assert h100.predict_collectives(table(collectives)).equals(h100.predict_collectives(pl.DataFrame(collectives)))


def test_absent_sizes_of_pandas_are_null(h100: Calibration) -> None:
    rows = [{**GEMM, "batch": None}, {"op": "softmax", "dtype": "bf16", "rows": 4096, "cols": 512}]
    priced = h100.predict_kernels(as_pandas(rows))
    assert priced["dur_us"].to_list() == [one(h100, GEMM), one(h100, rows[1])]


@pytest.mark.parametrize("thing", [None, "kernels.csv", 5, [1, 2], pl.Series([1])])
def test_what_is_no_table_is_refused(h100: Calibration, thing: Any) -> None:
    with pytest.raises(InputError, match="a kernel frame is a polars or pandas DataFrame"):
        h100.predict_kernels(thing)
    with pytest.raises(InputError, match="a collective frame is a polars or pandas DataFrame"):
        h100.predict_collectives(thing)


@pytest.mark.parametrize(
    "empty", [pl.DataFrame({"op": [], "dtype": []}), pl.DataFrame([GEMM]).clear()], ids=["without types", "with types"]
)
def test_a_frame_of_no_rows_has_no_prices_but_their_columns(h100: Calibration, empty: pl.DataFrame) -> None:
    priced = h100.predict_kernels(empty)
    assert priced.height == 0
    assert {"dur_us", "low_us", "high_us", "basis", "out_of_range", "cell", "floor_us"} < set(priced.columns)


def test_a_collective_frame_of_no_rows_too(h100: Calibration) -> None:
    priced = h100.predict_collectives(pl.DataFrame([REDUCE]).clear())
    assert priced.height == 0
    assert {"dur_us", "busbw_gbs", "basis", "out_of_range"} < set(priced.columns)
    with pytest.raises(SchemaError, match=r"lacks column.*hardware.*it has none"):
        h100.predict_collectives(pl.DataFrame())


def test_rows_keep_their_order_and_their_other_columns(h100: Calibration) -> None:
    rows = pl.DataFrame([GEMM, {**GEMM, "m": 16}, GEMM, {**GEMM, "op": "bmm"}]).with_columns(
        note=pl.Series(["d", "c", "b", "a"]), dur_us=pl.lit("old"), basis=1, family=2, kind=3, row=4, flops=5, x=6
    )
    priced = h100.predict_kernels(rows)
    assert priced["note"].to_list() == ["d", "c", "b", "a"]
    assert priced["x"].to_list() == [6] * 4
    assert priced["dur_us"].to_list() == [
        one(h100, row) for row in (GEMM, {**GEMM, "m": 16}, GEMM, {**GEMM, "op": "bmm"})
    ]


# --- sizes


@pytest.mark.parametrize("value", [0, -1, float("inf"), -float("inf"), 1e300, 2**63])
@pytest.mark.parametrize("name", ["m", "batch", "groups"])
def test_a_size_that_cannot_be_is_refused_by_row_and_value(h100: Calibration, name: str, value: float) -> None:
    rows = pl.DataFrame([GEMM, GEMM]).with_columns(pl.Series(name, [1.0, value], strict=False))
    with pytest.raises(InputError, match=rf"row 1 \(op 'gemm'\): {name} is .*needs it as a number above 0 and below 2"):
        h100.predict_kernels(rows)


def test_a_format_that_the_gpu_does_not_compute_is_refused_by_row() -> None:
    rows = pl.DataFrame([{**ATTENTION, "dtype": "fp16"}, {**GEMM, "dtype": "fp16"}, {**GEMM, "dtype": "fp8"}])
    with pytest.raises(SheetError, match=r"row 2 \(op 'gemm'\): V100-PCIe-32GB has no rate for fp8; its sheet has"):
        load_calibration("V100-PCIe-32GB").predict_kernels(rows)


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_size_that_is_not_given_is_missed_if_the_op_needs_it(h100: Calibration, value: float | None) -> None:
    assert one(h100, {**GEMM, "batch": value, "groups": value}) == one(h100, GEMM)
    with pytest.raises(InputError, match=r"row 0 \(op 'gemm'\): m is None"):
        one(h100, {**GEMM, "m": value})


@pytest.mark.parametrize("name", ["seq_kv", "kv_heads", "head_dim_v"])
@pytest.mark.parametrize("value", [0, -1, float("inf")])
def test_optional_sizes_of_attention_are_checked_too(h100: Calibration, name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"row 0 .op 'attention'.: {name} is"):
        one(h100, {**ATTENTION, name: value})


def test_sizes_that_an_op_does_not_use_may_be_anything(h100: Calibration) -> None:
    assert one(h100, {**GEMM, "seq_q": -5, "rows": float("nan"), "heads": 0}) == one(h100, GEMM)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (pl.Series(["4096", "4k"]), InputError, "row 1: m is '4k', which is no number"),
        (pl.Series([True, False]), SchemaError, "column m is Boolean; it needs numbers"),
        (pl.Series([[1], [2]]), SchemaError, "column m is List"),
        (pl.Series(["4096", "8"]).cast(pl.Categorical), SchemaError, "column m is Categorical"),
    ],
    ids=["text", "flags", "lists", "categories"],
)
def test_a_column_that_holds_no_numbers_is_named(
    h100: Calibration, values: pl.Series, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        h100.predict_kernels(pl.DataFrame([GEMM, GEMM]).with_columns(m=values))


@pytest.mark.parametrize("kind", [pl.Int32, pl.UInt32, pl.Float32, pl.Int64, pl.String, pl.Decimal(20, 2)], ids=str)
def test_the_type_of_a_size_does_not_matter(h100: Calibration, kind: Any) -> None:
    sizes = pl.DataFrame([GEMM]).with_columns(pl.lit(2**22).alias("m"), pl.lit(2**20).alias("n"))
    cast = sizes.with_columns(pl.col("m", "n").cast(kind))
    assert h100.predict_kernels(cast)["dur_us"].item() == h100.predict_kernels(sizes)["dur_us"].item()


def test_huge_sizes_have_finite_prices_that_say_they_are_out_of_range(h100: Calibration) -> None:
    priced = h100.predict_kernels(pl.DataFrame([{**GEMM, "m": 10**18, "n": 10**18, "k": 10**18, "batch": 10**18}]))
    assert np.isfinite(priced.select("dur_us", "low_us", "high_us").to_numpy()).all()
    assert priced["out_of_range"].item()


# --- words


@pytest.mark.parametrize(
    ("column", "spelling", "usual"),
    [
        *(("dtype", word, "bf16") for word in ("BF16", "bfloat16", "torch.bfloat16", "c10::BFloat16")),
        *(("dtype", word, "fp16") for word in ("float16", "torch.float16", "half", "Half", "FP16")),
        *(("dtype", word, "fp32") for word in ("float", "float32", "torch.float32")),
        *(("dtype", word, "fp8") for word in ("float8_e4m3fn", "torch.float8_e5m2", "fp8_e4m3")),
        *(("op", word, "gemm") for word in ("GEMM", "matmul", "aten::mm", "linear")),
        *(("pass", word, "fwd") for word in ("forward", "FWD")),
        *(("pass", word, "bwd_grad_w") for word in ("wgrad", "bwd_grad_w")),
        *(("pass", word, "any") for word in (None, "")),
        ("trans", "nt", "NT"),
        ("out_dtype", "float32", "fp32"),
        *(("accumulate", word, True) for word in ("True", "true", 1, "1")),
        *(("accumulate", word, False) for word in ("False", 0, None, "")),
        ("gpu", None, "H100"),
        ("gpu", "nvidia h100 80gb hbm3", "H100"),
    ],
    ids=str,
)
def test_usual_spellings_are_understood(h100: Calibration, column: str, spelling: Any, usual: Any) -> None:
    assert one(h100, {**GEMM, column: spelling}) == one(h100, {**GEMM, column: usual})


def test_torchs_own_dtypes_are_understood(h100: Calibration) -> None:
    torch = pytest.importorskip("torch")
    frame = pl.DataFrame([GEMM]).with_columns(pl.Series("dtype", [torch.bfloat16], dtype=pl.Object))
    assert h100.predict_kernels(frame)["dur_us"].item() == one(h100, GEMM)


def test_the_passes_of_a_calibration_are_found_by_any_spelling(h100: Calibration) -> None:
    frame = pl.DataFrame([{**GEMM, "pass": "forward"}, {**GEMM, "pass": "fwd"}])
    assert h100.predict_kernels(frame)["basis"].to_list() == ["measured", "measured"]


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["gemm", "bf16", "fwd", "NT"])], ids=["categorical", "enum"])
def test_words_may_be_categories(h100: Calibration, kind: Any) -> None:
    frame = pl.DataFrame([GEMM]).with_columns(pl.col("op", "dtype", "pass", "trans").cast(kind))
    assert h100.predict_kernels(frame)["dur_us"].item() == one(h100, GEMM)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "mystery"}, "op is 'mystery'; known: gemm"),
        ({"op": None}, "op is None; known: gemm"),
        ({"dtype": None}, "dtype is None; known: fp64"),
        ({"dtype": "fp12"}, "dtype is 'fp12'; known: fp64"),
        ({"pass": "sideways"}, "pass is 'sideways'; known: fwd"),
        ({"trans": "XX"}, "trans is 'XX'; known: NN, NT"),
        ({"out_dtype": "fp12"}, "out_dtype is 'fp12'"),
        ({"causal": "maybe"}, "causal is 'maybe'; known: true, false"),
        ({"gpu": "A100"}, "gpu is 'A100', but this calibration is of H100"),
        ({"gpu": 5}, "gpu is '5', but"),
    ],
    ids=str,
)
def test_unknown_words_are_refused_with_the_known_ones(h100: Calibration, change: Any, words: str) -> None:
    rows = pl.DataFrame([{**GEMM, **dict.fromkeys(change)}, {**GEMM, **change}], strict=False)
    if list(change.values()) == [None] or "dtype" in change or "op" in change:
        rows = pl.DataFrame([GEMM, {**GEMM, **change}])
    with pytest.raises(InputError, match=f"row 1.*{words}"):
        h100.predict_kernels(rows)


def test_a_method_for_every_row_costs_no_kind_of_row_each() -> None:
    rows = pl.DataFrame([GEMM] * 3).with_columns(method=pl.Series(["a; 1", "b; 2", None]))
    assert with_work(rows)["implementation"].to_list() == [""] * 3
    attends = pl.DataFrame([ATTENTION, {**ATTENTION, "op": "sdpa"}]).with_columns(method=pl.Series(["cuDNN; x", "y"]))
    assert with_work(attends)["implementation"].to_list() == ["cuDNN", "y"]


# --- collectives


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": None}, "nodes is None; it needs a whole number of 1 or more"),
        ({"nodes": 0}, "nodes is 0; it needs"),
        ({"nodes": 3}, "gpus is 8; it needs as many on each node"),
        ({"nodes": 1.5}, "nodes is 1.5; it needs a whole"),
        ({"gpus": 1}, "gpus is 1; it needs a whole number of 2 or more"),
        ({"gpus": float("inf")}, "gpus is inf"),
        ({"gpus": 2**40}, "gpus is 1099511627776"),
        ({"gpus": 16, "nodes": 2}, "gpus is 16; it needs 8 at most, which NVLink4 NVSwitch joins"),
        ({"size_bytes": float("nan")}, "size_bytes is None; it needs a number of 0 or more"),
        ({"size_bytes": float("inf")}, "size_bytes is inf"),
        ({"size_bytes": "1 GB"}, "size_bytes is '1 GB', which is no number"),
        ({"collective": None}, "collective is None; it needs one of all_reduce"),
        ({"collective": "barrier"}, "collective is 'barrier'; it needs one of all_reduce"),
        ({"interconnect": None}, "no data sheet of a fabric is called None"),
        ({"interconnect": ""}, "no data sheet of a fabric is called ''"),
    ],
    ids=str,
)
def test_a_collective_that_cannot_be_is_refused_by_value(h100: Calibration, change: Any, words: str) -> None:
    frame = pl.DataFrame({name: [value] for name, value in {**REDUCE, **change}.items()})
    with pytest.raises(InputError, match=words):
        h100.predict_collectives(frame)


@pytest.mark.parametrize(
    "name",
    ["AllReduce", "ALL_REDUCE", "allreduce", "all-reduce", "ncclAllReduce", "all reduce", "all_reduce_coalesced"],
    ids=str,
)
def test_collectives_may_be_spelled_as_others_do(h100: Calibration, name: str) -> None:
    expected = h100.predict_collectives(pl.DataFrame([REDUCE])).drop("collective")
    assert h100.predict_collectives(pl.DataFrame([{**REDUCE, "collective": name}])).drop("collective").equals(expected)


@pytest.mark.parametrize(
    "sent",
    [None, [[1, 2], [3]], [["a"]], [[5.0]], np.zeros((0, 0)), *(np.full((8, 8), x) for x in (np.nan, np.inf, -1.0))],
    ids=["nothing", "ragged", "text", "one rank", "no rank", "nan", "infinite", "negative"],
)
def test_matrices_that_cannot_be_are_refused(h100: Calibration, sent: Any) -> None:
    assert h100.collectives is not None
    with pytest.raises(InputError, match="sent_bytes"):
        h100.collectives.predict_uneven(sent, "H100-SXM-80GB", "NVLink4/NVSwitch")


@pytest.mark.parametrize(
    "collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
)
@pytest.mark.parametrize(
    ("interconnect", "nodes", "gpus"),
    [("NVLink4/NVSwitch", 1, 8), ("InfiniBand NDR 400", 4, 32), ("RoCE 3200", 128, 1024), ("PCIe 5.0", 1, 4)],
)
def test_more_bytes_never_take_less_time(
    h100: Calibration, collective: str, interconnect: str, nodes: int, gpus: int
) -> None:
    sizes = np.unique(np.geomspace(1, 2**36, 300).astype(int))
    about = {**REDUCE, "collective": collective, "interconnect": interconnect, "nodes": nodes, "gpus": gpus}
    priced = h100.predict_collectives(pl.DataFrame({**about, "size_bytes": sizes}))
    dur_us = priced["dur_us"].to_numpy()
    assert (np.diff(dur_us) >= -1e-12 * dur_us[1:]).all()
    assert (priced["low_us"] <= priced["dur_us"]).all()
    assert (priced["dur_us"] <= priced["high_us"]).all()
