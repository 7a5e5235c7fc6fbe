"""Rows of published training tables: what is read, what is assumed and said, what is refused and why."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import polars as pl
import pytest

from lumos_nb.errors import InputError
from lumos_nb.layout import Parallelism
from lumos_nb.transformer import Moe, Transformer
from lumos_nb.workloads.llm.estimates import estimate
from lumos_nb.workloads.llm.table_rows import COLUMNS, estimate_row, read_row

LLAMA = {
    "gpu": "H100", "num_gpus": 16, "precision": "bf16", "model": "Llama3-8B", "hidden": 4096, "heads": 32,
    "layers": 32, "vocab": 128256, "ffn": 14336, "kv_heads": 8, "moe_experts": 0, "seq": 8192, "tp": 2, "pp": 2,
    "cp": 1, "vp": 1, "ep": 1, "dp": 4, "sharding": "zero1", "micro_batch": 1, "global_batch": 64,
    "recompute": "selective",
}  # fmt: skip
GPT = LLAMA | {
    "gpu": "A100-SXM-80GB", "model": "GPT-1.3B", "hidden": 2048, "heads": 16, "layers": 24, "vocab": 50304,
    "ffn": 8192, "kv_heads": 16, "seq": 2048, "precision": "fp16",
}  # fmt: skip


def without(row: dict[str, object], *columns: str) -> dict[str, object]:
    return {name: value for name, value in row.items() if name not in columns}


def test_a_full_row_is_read_as_it_stands():
    setup = read_row(LLAMA)
    assert setup.model == Transformer(
        name="llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256
    )
    assert setup.layout == Parallelism(tp=2, pp=2, dp=4, zero=1)
    assert (setup.train.micro_batch, setup.train.global_batch, setup.train.seq) == (1, 64, 8192)
    assert (setup.train.dtype, setup.train.recompute, setup.train.grad_dtype) == ("bf16", "selective", "fp32")
    assert setup.cluster.nodes == 2
    assert setup.cluster.inside_sheet.name == "NVLink4 NVSwitch"
    assert setup.stated["model"] == "Llama3-8B"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({name: str(value) for name, value in LLAMA.items()}, id="text"),
        pytest.param({n: float(v) if isinstance(v, int) else v for n, v in LLAMA.items()}, id="floats"),
        pytest.param(pd.Series(LLAMA), id="a row of pandas"),
        pytest.param(pd.DataFrame([LLAMA, GPT]).astype({"tp": "Int64"}).iloc[0], id="a row of a frame of pandas"),
        pytest.param(pl.DataFrame([LLAMA]), id="a frame of one row"),
        pytest.param(LLAMA | {"params_b": math.nan, "notes": None, "task": "", "mfu_pct": "x"}, id="empty cells"),
        pytest.param(LLAMA | {"params_b": pd.NA, "notes": "nan", "source": "not stated"}, id="cells of no value"),
    ],
)
def test_the_same_row_is_read_alike_however_it_is_written(row):
    assert replace(read_row(row), stated={}) == replace(read_row(LLAMA), stated={})


def test_pandas_and_polars_read_the_shared_table_alike(measured):
    file = measured / "llm_training.csv"
    rows = pl.read_csv(file, infer_schema_length=None).filter(pl.col("source").str.contains("Galvatron|fms|Bridge"))
    frame = pd.read_csv(file).set_index("row_id", drop=False)
    for row in rows.head(20).iter_rows(named=True):
        try:
            setup = read_row(row)
        except InputError:
            continue
        assert read_row(frame.loc[row["row_id"]]).assumptions == setup.assumptions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": None, "model": "GPT-52B"}, "column hidden is 'not stated'"),
        ({"heads": "", "model": "mine"}, "column heads is 'not stated'"),
        ({"layers": math.nan, "model": "mine"}, "column layers is 'not stated'"),
        ({"seq": None}, "column seq is 'not stated'"),
        ({"global_batch": None}, "column global_batch is 'not stated'"),
        ({"gpu": None}, "column gpu is 'not stated'"),
        ({"gpu": "TPU v5p"}, "no data sheet is called 'tpu v5p'"),
        ({"gpu": "H200-PCIe-141GB"}, "no data sheet is called 'h200-pcie-141gb'"),
        ({"tp": "two"}, "column tp is 'two'; give a number"),
        ({"tp": 2.5}, "column tp is 2.5; give a whole number"),
        ({"layers": -1}, "column layers is -1; give a whole number of at least 1"),
        ({"num_gpus": 18}, "column num_gpus is 18; tp x pp x cp is 4"),
        ({"dp": 2}, "column dp is 2; 16 GPUs over tp x pp x cp = 4 leave 4"),
        ({"global_batch": 6}, "global_batch is 6; give a multiple of micro_batch x dp"),
        ({"heads": 36, "kv_heads": 36}, "heads is 36; hidden .4096. is no multiple"),
        ({"tp": 16, "dp": None, "pp": 1, "heads": 8}, "tp is 16; heads .8. is no multiple"),
        ({"moe_experts": 8, "model": "mine"}, "column moe_topk is 'not stated'"),
        ({"sharding": "sliced"}, "column sharding is 'sliced'; give ddp"),
        ({"recompute": "maybe"}, "column recompute is 'maybe'; give none"),
        ({"precision": "posit8"}, "column precision is 'posit8'; give one of"),
        ({"precision": "int8"}, "give one of fp8, bf16, fp16, tf32, fp32"),
        ({"layers": 3, "pp": 8, "dp": 1}, "column pp is 8; 3 layers leave some of 8 stages empty: give fewer"),
        ({"layers": 13, "pp": 8, "dp": 1, "vp": 2}, "column vp is 2; 13 layers leave some of 16 stages empty"),
        ({"notes": "schedule=v-half"}, "no schedule is called 'v-half'"),
        ({"gpu": "V100", "precision": "bf16"}, "dtype is 'bf16'; V100-SXM-32GB computes in"),
        ({"row_id": "L7", "seq": None}, "row L7: column seq"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_read_is_refused_by_column_value_and_reason(change, message):
    with pytest.raises(InputError, match=message):
        read_row(LLAMA | change)


@pytest.mark.parametrize("row", [7, "a row", [LLAMA], pl.DataFrame([LLAMA, LLAMA]), pd.DataFrame([LLAMA])])
def test_what_is_no_row_is_refused(row):
    with pytest.raises(InputError, match="read_row takes"):
        read_row(row)


@pytest.mark.parametrize("column", sorted({*LLAMA} - {"seq", "global_batch", "gpu", "model", "dp", "num_gpus"}))
def test_what_is_assumed_for_an_empty_column_is_said(column):
    full, empty = read_row(LLAMA), read_row(without(LLAMA, column, "dp"))
    new = [line for line in empty.assumptions if line not in full.assumptions]
    assert any(line.startswith(f"{column} is not stated: ") for line in new)


def test_sizes_of_a_well_known_model_need_not_stand_there():
    sizes = ("hidden", "heads", "layers", "ffn", "kv_heads", "vocab")
    assert read_row(without(LLAMA, *sizes)).model == read_row(LLAMA).model
    assert read_row(without(LLAMA, *sizes) | {"model": "Llama 3.1 8B"}).model.hidden == 4096
    mixtral = {"model": "Mixtral 8x7B", "num_gpus": 8, "tp": 1, "pp": 1, "dp": 8, "ep": 8}
    assert read_row(without(LLAMA, *sizes, "moe_experts") | mixtral).model.moe == Moe(experts=8, topk=2, ffn=14336)


@pytest.mark.parametrize(
    ("model", "built"),
    [
        ("Qwen3-30B-A3B", {"gated": True, "head_dim": 128, "norm": "rms"}),
        ("Nemotron4-15B", {"gated": False, "positions": "rope", "norm": "layer"}),
        ("MPT-7b", {"gated": False, "tied": True, "positions": "learned", "max_seq": 8192}),
        ("mine", {"gated": True, "positions": "rope"}),
    ],
)
def test_a_model_is_built_as_its_name_or_its_sizes_say(model, built):
    found = read_row(LLAMA | {"model": model}).model
    assert {name: getattr(found, name) for name in built} == built


def test_a_vocabulary_is_found_by_the_number_of_parameters_and_filled_up():
    bloom = {"hidden": 14336, "heads": 112, "layers": 70, "ffn": None, "kv_heads": None, "model": "GPT-176B"}
    setup = read_row(without(GPT, "vocab") | bloom | {"params_b": 176})
    assert setup.model.vocab == 250880
    assert "vocab is not stated: 250880, which fits params_b best of usual ones" in setup.assumptions
    assert read_row(GPT | {"vocab": 50257}).model.vocab == 50432


@pytest.mark.parametrize(
    ("stated", "line"),
    [
        (900, "params_b is 900, but the sizes make 1.316"),
        (1.55, "params_b is 1.55, but the sizes make 1.316"),
        (1.3, None),
        (1.21, None),  # 1.208 without the ends, and 9 % off with them
    ],
)
def test_a_number_of_parameters_that_the_sizes_contradict_is_said(stated, line):
    found = [line for line in read_row(GPT | {"params_b": stated}).assumptions if line.startswith("params_b")]
    assert found == ([line] if line else [])


def test_a_number_of_parameters_may_leave_out_the_ends():
    line = "params_b is 7, but the sizes make 8.03, with the embedding and the head, which it seems to leave out"
    assert line in read_row(LLAMA | {"params_b": 7}).assumptions
    assert line not in read_row(LLAMA | {"params_b": 8}).assumptions


@pytest.mark.parametrize(
    ("said", "field", "value"),
    [
        ("no gradient bucketing/overlap", "overlap_grads", False),
        ("no communication overlap flags", "overlap_weights", False),
        ("TP comm overlap True", "overlap_tp", True),
        ("TP comm overlap 0", "overlap_tp", False),
        ("PyTorch FSDP, PURE mixed precision", "grad_dtype", "bf16"),
        ("natural routing, capacity factor 2", "capacity", 2.0),
        ("tokendrop", "capacity", 1.0),
        ("Megatron-DeepSpeed", "flash", False),
        ("Megatron-DeepSpeed; SDPA flash", "flash", True),
    ],
)
def test_facts_in_notes_settle_how_a_step_runs(said, field, value):
    assert getattr(read_row(LLAMA | {"notes": said}).train, field) == value


@pytest.mark.parametrize(
    ("said", "sp"),
    [("Megatron-LM", True), ("sequence parallel with TP", True), ("Megatron-LM, no sequence parallelism", False)],
)
def test_sequence_parallelism_is_that_of_the_notes_or_the_framework(said, sp):
    assert read_row(LLAMA | {"notes": said}).layout.sequence_parallel is sp
    assert not read_row(LLAMA | {"notes": said, "tp": 1, "dp": 8}).layout.sequence_parallel


@pytest.mark.parametrize(
    ("said", "bytes_per_s"),
    [
        ("4x OmniPath 100Gb/s per node", 6.25e9),
        ("network 800 Gb/s per node", 12.5e9),
        ("8x NDR 400 per node", 50e9),
        ("config_DGXH100_96x8x128x4x8_mbs1.sh", 50e9),
    ],
)
def test_a_stated_network_is_taken_for_each_gpus_part_of_it(said, bytes_per_s):
    assert read_row(LLAMA | {"notes": said}).cluster.between_sheet.bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    ("source", "network"),
    [
        ("huggingface/nanotron", "EFA 3200"),
        ("VIA-Research/vTrain multi-node", "4x hdr 200"),
        ("", "InfiniBand NDR 400"),
    ],
)
def test_a_network_that_is_not_stated_is_its_owners_or_the_usual_one(source, network):
    setup = read_row(LLAMA | {"source": source})
    assert setup.cluster.between_sheet.name == network
    assert any(line.startswith("the network is not stated: ") for line in setup.assumptions)


@pytest.mark.parametrize(
    ("gpu", "sheet"),
    [
        ("NVIDIA H100 SXM5 80GB", "H100-SXM-80GB"),
        ("A100 40GB", "A100-SXM-40GB"),
        ("A100-SXM-40/80GB", "A100-SXM-80GB"),
        ("V100-SXM2-32GB", "V100-SXM-32GB"),
        ("H800", "H800-SXM-80GB"),
    ],
)
def test_a_gpu_is_the_sheet_that_its_name_begins_with(gpu, sheet):
    assert read_row(LLAMA | {"gpu": gpu, "precision": "fp16"}).cluster.gpu == sheet


def test_nodes_are_as_large_as_stated_or_usual_and_racks_are_one_domain():
    assert read_row(LLAMA | {"notes": "4 nodes of 4"}).cluster.gpus_per_node == 4
    assert read_row(LLAMA | {"num_gpus": 4, "dp": 1}).cluster.nodes == 1
    rack = read_row(LLAMA | {"gpu": "GB200", "num_gpus": 128, "dp": 32, "notes": "32 nodes of 4"}).cluster
    assert (rack.nodes, rack.gpus_per_node, rack.inside_sheet.max_gpus) == (2, 64, 72)


@pytest.mark.parametrize(
    ("change", "split"),
    [
        ({"layers": 30, "pp": 4, "dp": 2}, (7, 8, 8, 7)),
        ({"layers": 33}, (17, 16)),
        ({"notes": "nanotron", "layers": 16, "hidden": 2048, "ffn": 8192, "vocab": 131072, "pp": 2}, (11, 5)),
        ({"notes": "nanotron", "layers": 3, "pp": 8, "dp": 1}, (1, 1, 1, 0, 0, 0, 0, 0)),  # its grid has such rows
    ],
    ids=["the ends stand for a layer each", "one more in front", "nanotron's cut by cost", "nanotron's empty stages"],
)
def test_layers_that_do_not_divide_are_cut_as_frameworks_do(change, split):
    assert read_row(LLAMA | change).layout.split == split


def test_chunks_are_interleaved_where_micro_batches_allow_it():
    setup = read_row(LLAMA | {"vp": 4})
    assert (setup.layout.schedule, setup.layout.chunks) == ("interleaved", 4)
    setup = read_row(LLAMA | {"vp": 4, "global_batch": 12})
    assert (setup.layout.schedule, setup.layout.chunks) == ("1f1b", 1)
    assert any("cannot be interleaved" in line for line in setup.assumptions)
    assert read_row(LLAMA | {"vp": 2, "notes": "schedule=zbv; more"}).layout.schedule == "zb-v"


@pytest.mark.parametrize(
    ("sharding", "zero", "shard"),
    [
        ("ddp", 0, 0),
        ("dist-opt(zero1)", 1, 0),
        ("zero2", 2, 0),
        ("fsdp", 3, 0),
        ("hsdp", 3, 8),
        ("megatron-fsdp", 3, 0),
    ],
)
def test_words_of_sharding_are_zero_stages(sharding, zero, shard):
    layout = read_row(LLAMA | {"sharding": sharding, "tp": 1, "pp": 1, "dp": 16}).layout
    assert (layout.zero, layout.shard) == (zero, shard)


@pytest.mark.parametrize(("gpus", "bucket_bytes"), [(16, 160_000_000), (1024, 1_024_000_000)])
def test_megatrons_buckets_grow_with_replicas(gpus, bucket_bytes):
    row = LLAMA | {"num_gpus": gpus, "dp": gpus // 4, "global_batch": gpus, "notes": "Megatron-LM"}
    assert read_row(row).train.bucket_bytes == bucket_bytes


def test_either_batch_follows_from_the_other_and_the_accumulation_of_gradients():
    said = LLAMA | {"notes": "grad_accum=16"}
    assert read_row(without(said, "global_batch")).train.global_batch == 64
    assert read_row(without(said, "micro_batch")).train.micro_batch == 1


def test_recomputation_that_nobody_states_is_what_memory_needs():
    plain = without(LLAMA, "recompute")
    assert read_row(plain).train.recompute == "none"
    assert read_row(plain | {"tp": 1, "pp": 1, "dp": 16, "micro_batch": 4}).train.recompute == "full"
    assert read_row(LLAMA | {"recompute": "none"}).train.recompute == "none"


def test_an_estimate_of_a_row_is_that_of_what_was_read_and_says_what_was_assumed():
    setup, found = read_row(LLAMA), estimate_row(LLAMA)
    assert found.step_s == estimate(setup.model, setup.layout, setup.train, setup.cluster).step_s
    assert found.assumptions == setup.assumptions


def test_every_row_of_the_shared_table_is_read_or_refused_with_a_column(measured):
    rows = pl.read_csv(measured / "llm_training.csv", infer_schema_length=None)
    refused = []
    for row in rows.sample(400, seed=0).iter_rows(named=True):
        try:
            setup = read_row(row)
        except InputError as error:
            refused.append(str(error))
        else:
            assert setup.layout.world == setup.cluster.gpus == row["num_gpus"]
    assert len(refused) < 50
    assert all(any(f"column {column} is " in line for column in COLUMNS) for line in refused)


@pytest.mark.parametrize("value", [1e308, "inf", -1e300])
def test_what_nobody_could_train_is_refused_by_column(value: object):
    with pytest.raises(InputError, match=r"column hidden is .*; give a number of at most"):
        read_row(LLAMA | {"hidden": value})
