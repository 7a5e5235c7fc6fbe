"""A measured step under another model, batch or layout: nothing changes but what changes, and edits compose."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest

from lumos_nb import datasets, whatif
from lumos_nb.costs.calibration import load_calibration
from lumos_nb.critical_path import replay
from lumos_nb.errors import InputError, LayoutError
from lumos_nb.graph import Graph, build_graph
from lumos_nb.layout import Cluster, Parallelism, Training
from lumos_nb.traces.run import Run, load_run
from lumos_nb.transformer import Transformer
from lumos_nb.workloads.llm.estimates import estimate
from lumos_nb.workloads.llm.retiming import KERNEL
from lumos_nb.workloads.llm.rewriting import Rewritten, rewrite
from lumos_nb.workloads.llm.stages import work
from lumos_nb.workloads.llm.structure import find_structure
from lumos_nb.workloads.pricing import priced

RUNS = ("gpt-single", "gpt-ddp", "gpt-tp", "gpt-pp")
WIDER = {"hidden": 256, "ffn": 1024}


@cache
def run_of(name: str) -> Run:
    return load_run(datasets.path(name))


@cache
def graph_of(name: str) -> Graph:
    return build_graph(run_of(name))


@cache
def same(name: str) -> Rewritten:
    """The run's own step, which remembers its kernels."""
    return rewrite(graph_of(name))


@cache
def edited(name: str, **sizes: Any) -> Rewritten:
    return rewrite(same(name), **sizes)


def step_ns(graph: Graph) -> int:
    return replay(graph).step_ns


def forgotten(graph: Rewritten) -> Rewritten:
    """A rewritten graph that does not know what it was made from, as after another edit."""
    return replace(graph, measured=None)


@pytest.mark.parametrize("name", RUNS)
def test_the_setup_is_read_from_the_trace(name: str) -> None:
    model, layout, train = edited(name).setup or (None, None, None)
    assert model
    assert layout
    assert train
    sizes = (model.layers, model.hidden, model.heads, model.ffn, model.vocab, model.max_seq, model.gated, model.norm)
    assert sizes == (2, 128, 4, 512, 512, 64, False, "layer")
    other = {"gpt-ddp": "dp", "gpt-tp": "tp", "gpt-pp": "pp"}.get(name)
    assert {axis: getattr(layout, axis) for axis in ("tp", "pp", "dp")} == {
        axis: 2 if axis == other else 1 for axis in ("tp", "pp", "dp")
    }
    assert (train.seq, train.dtype, train.global_batch) == (64, "fp32", 16 if other == "dp" else 8)


@pytest.mark.parametrize("name", RUNS)
def test_the_identity_gives_the_same_time(name: str) -> None:
    for graph in (same(name), edited(name)):
        assert step_ns(graph) == step_ns(graph_of(name))
        assert graph.ops.equals(graph_of(name).ops)


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        ("gpt-single", {"layers": 4}, {"layers": 2}),
        ("gpt-single", {"layers": 1}, {"layers": 2}),
        ("gpt-single", WIDER, {"hidden": 128, "ffn": 512}),
        ("gpt-single", {"micro_batch": 2, "pp": 2}, {"micro_batch": 8, "pp": 1}),
        ("gpt-pp", {"layers": 8, "micro_batch": 1}, {"layers": 2, "micro_batch": 2}),
        ("gpt-tp", {"tp": 1}, {"tp": 2}),
        ("gpt-ddp", {"dp": 1, "global_batch": 8}, {"dp": 2, "global_batch": 16}),
    ],
    ids=["more layers", "fewer", "width", "stages", "layers and micro-batches", "tensor ranks", "replicas"],
)
def test_there_and_back_is_as_measured(name: str, there: dict[str, Any], back: dict[str, Any]) -> None:
    made = edited(name, **there)
    assert step_ns(made) != step_ns(graph_of(name))
    assert step_ns(rewrite(made, **back)) == step_ns(graph_of(name))


@pytest.mark.parametrize(
    ("there", "back"),
    [
        ({"layers": 4}, {"layers": 2}),
        (WIDER, {"hidden": 128, "ffn": 512}),
        ({"micro_batch": 16, "global_batch": 16}, {}),
    ],
    ids=["layers", "width", "batch"],
)
def test_there_and_back_without_memory_is_within_a_thousandth(there: dict[str, Any], back: dict[str, Any]) -> None:
    made = forgotten(edited("gpt-single", **there))
    again = rewrite(made, **(back or {"micro_batch": 8, "global_batch": 8}))
    assert step_ns(again) == pytest.approx(step_ns(graph_of("gpt-single")), rel=1e-3)


@pytest.mark.parametrize("remembers", [True, False])
@pytest.mark.parametrize(
    ("first", "second"),
    [({"layers": 4}, WIDER), (WIDER, {"layers": 6}), ({"seq": 128, "max_seq": 128}, {"layers": 4})],
    ids=["layers, then width", "width, then layers", "sequence, then layers"],
)
def test_edits_compose(first: dict[str, Any], second: dict[str, Any], *, remembers: bool) -> None:
    one = edited("gpt-single", **first)
    turned = rewrite(one if remembers else forgotten(one), **second)
    assert step_ns(turned) == pytest.approx(step_ns(edited("gpt-single", **first, **second)), rel=1e-3)


def test_an_edit_of_a_rewritten_graph_is_not_lost() -> None:
    deep = edited("gpt-single", layers=4)
    slow = whatif.scale(deep, pl.col("name") == "aten::linear", 3)
    assert isinstance(slow, Rewritten)
    back = rewrite(slow, layers=2)
    plain = whatif.scale(graph_of("gpt-single"), pl.col("name") == "aten::linear", 3)
    assert step_ns(back) == pytest.approx(step_ns(plain), rel=0.02)


def test_layers_repeat_with_all_that_is_in_them() -> None:
    graph = graph_of("gpt-single")
    inside = find_structure(graph).ops["layer"] >= 0
    in_layers = graph.ops.filter(inside.fill_null(value=False))["dur_ns"].sum()
    assert step_ns(edited("gpt-single", layers=6)) == pytest.approx(step_ns(graph) + 2 * in_layers, abs=10_000)
    assert find_structure(edited("gpt-single", layers=6)).layers == {0: [0, 1, 2, 3, 4, 5]}


@pytest.mark.parametrize("name", ["gpt-single", "gpt-tp"])
@pytest.mark.parametrize(
    "series",
    [
        [{"layers": n} for n in (1, 2, 3, 5)],
        [{"hidden": 64 * n, "ffn": 256 * n} for n in (1, 2, 3, 6)],
        [{"micro_batch": n, "global_batch": n} for n in (4, 8, 24)],
        [{"seq": n, "max_seq": n} for n in (32, 64, 512)],
    ],
    ids=["layers", "width", "batch", "sequence"],
)
def test_more_of_anything_takes_longer(name: str, series: list[dict[str, int]]) -> None:
    times = [step_ns(edited(name, **fields)) for fields in series]
    assert times == sorted(set(times))


def test_kernels_take_the_ratio_of_two_predictions() -> None:
    graph, wide = graph_of("gpt-single"), edited("gpt-single", **WIDER)
    before, after = edited("gpt-single").parts, wide.parts
    cal = load_calibration("cpu")
    prices = [cal.predict_kernels(parts.select(*KERNEL))["dur_us"].to_numpy() for parts in (before, after)]
    known = (before["op"] == "gemm").to_numpy()
    assert after.filter(pl.Series(known)).select(pl.max("n", "k")).row(0) == (1024, 1024)
    expected = before["time_ns"].to_numpy() * prices[1] / prices[0]
    np.testing.assert_allclose(after["time_ns"].to_numpy()[known], expected[known])
    added = (after["time_ns"] - before["time_ns"]).sum()
    assert wide.ops["dur_ns"].sum() - graph.ops["dur_ns"].sum() == pytest.approx(added, abs=500)


def test_gaps_do_not_grow_with_the_model() -> None:
    wide = edited("gpt-single", **WIDER)
    gaps = [graph.ops.filter(pl.col("kind") == "gap")["dur_ns"] for graph in (graph_of("gpt-single"), wide)]
    assert gaps[0].equals(gaps[1])


@pytest.mark.parametrize(
    ("stages", "micro_batch", "schedule", "chunks"), [(2, 2, "1f1b", 1), (4, 1, "1f1b", 1), (2, 1, "interleaved", 2)]
)
def test_stages_pass_on_what_they_made(stages: int, micro_batch: int, schedule: str, chunks: int) -> None:
    to = Parallelism(pp=stages, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    made = rewrite(same("gpt-single"), to, layers=8, micro_batch=micro_batch)
    micro_batches = 8 // micro_batch
    assert made.ops["rank"].unique().sort().to_list() == list(range(stages))
    sends = made.ops.filter(pl.col("collective") == "send", pl.col("kind") == "comm")
    assert sends.height == 2 * (stages * chunks - 1) * micro_batches
    ends = replay(made).step_ends.filter(step=made.step)
    assert step_ns(made) < step_ns(edited("gpt-single", layers=8, micro_batch=micro_batch))
    assert ends.height == stages
    assert find_structure(made).stage == {rank: rank for rank in range(stages)}


def test_replicas_add_up_gradients_before_the_optimizer() -> None:
    made = edited("gpt-single", dp=2, global_batch=16)
    result = replay(made)
    comm = result.ops.filter(pl.col("kind") == "comm")
    assert comm["group"].unique().to_list() == ["dp"]
    assert comm["dur_ns"].min() > 0
    ends = (comm["start_ns"] + comm["dur_ns"]).max()
    first = find_structure(made).ops.filter(pl.col("phase") == "optimizer")["op_id"]
    steps = result.ops.filter(pl.col("op_id").is_in(first.implode()), pl.col("name").str.contains("addcdiv"))
    assert steps["start_ns"].min() >= ends  # type: ignore[operator]


def test_tensor_ranks_add_up_twice_a_layer_and_pass() -> None:
    made = edited("gpt-single", tp=2)
    comm = made.ops.filter(pl.col("kind") == "comm")
    in_layers = comm.filter(pl.col("layer").is_not_null())
    assert in_layers["comm_bytes"].to_list() == [8 * 64 * 128 * 4] * 8
    cluster = Cluster(gpu=load_calibration("cpu").gpu, gpus_per_node=2, inside="Loopback")
    model, layout, train = made.setup or (None, None, None)
    assert model
    assert layout
    assert train
    rows = work(model, layout, train).filter(pl.col("stream") == "tp").with_columns(stage=0)
    due = priced(rows, layout, cluster, load_calibration("cpu"))["dur_us"].sum()
    assert comm["dur_ns"].sum() == pytest.approx(1e3 * due, rel=1e-3)
    products = made.parts.filter(pl.col("op") == "gemm", (pl.col("n") == 64) | (pl.col("k") == 64))
    assert products.height == 2 * 4 * 3  # attention's, cut to 64 of 128


def test_tensor_ranks_of_a_pipeline_add_up_on_every_stage() -> None:
    made = edited("gpt-single", tp=2, pp=4, layers=8, micro_batch=2)
    sums = made.ops.filter(pl.col("group") == "tp", pl.col("layer").is_not_null())
    assert sums.group_by("rank").len().sort("rank")["len"].to_list() == [2 * 2 * 2 * 4] * 4
    bare = made.ops.with_columns(layer=pl.lit(None, pl.String), micro_batch=pl.lit(None, pl.Int32))
    found = find_structure(replace(made, ops=bare))  # stages between have nothing but layers
    assert found.layers == {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7]}
    passes = found.table.filter(pl.col("phase").is_in(["forward", "backward"]))["passes"]
    assert passes.to_list() == [4] * 8


def test_what_is_gone_is_not_waited_for() -> None:
    alone = edited("gpt-ddp", dp=1, global_batch=8)
    assert alone.ops["rank"].unique().to_list() == [0]
    assert not alone.ops["kind"].is_in(["comm", "join"]).any()


def test_the_report_says_what_was_done() -> None:
    odd = [pl.when(pl.col("op") == "gelu").then(7).otherwise(size).alias(size) for size in ("rows", "cols")]
    strange = replace(forgotten(edited("gpt-pp")), parts=edited("gpt-pp").parts.with_columns(odd))
    report = rewrite(strange, layers=4, micro_batch=4).report
    said = report.filter(pl.col("what").is_in(["inserted", "dropped", "timed anew", "could not see"]))
    assert set(said["what"]) == {"inserted", "dropped", "timed anew", "could not see"}
    assert (said["count"] > 0).all()
    unseen = said.filter(what="could not see")
    assert unseen["count"].to_list() == [2 * 4 * 2]  # forward and backward, two micro-batches of four layers


def test_an_optimizer_of_all_tensors_at_once_grows_with_the_parameters() -> None:
    one = same("gpt-single")
    last = find_structure(one).ops.filter(pl.col("phase") == "optimizer", pl.col("layer") < 0)["op_id"][-2]
    fused = {
        "op_id": last,
        "family": "optimizer",
        "op": "adamw",
        "pass": "any",
        "dtype": "fp32",
        "rows": 10**6,
        "cols": 7,
    }
    parts = pl.DataFrame([fused | {"time_ns": 1e6}], schema=one.parts.schema)
    deep = rewrite(replace(forgotten(one), parts=parts), layers=8).parts
    assert one.setup
    more = edited("gpt-single", layers=8).setup[0].size / one.setup[0].size  # type: ignore[index]
    assert deep["rows"].to_list() == [round(10**6 * more)]
    assert deep["time_ns"][0] == pytest.approx(1e6 * more, rel=0.05)


def test_a_trace_of_a_gpu_is_rewritten_by_its_kernels(traces: Path) -> None:
    path = traces / "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"
    graph = build_graph(load_run(path))
    base = rewrite(graph)
    model = (base.setup or (None,))[0]
    assert model
    assert (model.layers, model.hidden, model.heads, model.ffn, model.vocab) == (24, 1024, 16, 2816, 151936)
    assert step_ns(base) == step_ns(graph)

    def kernels_ns(of: Graph) -> int:
        return int(of.ops.filter(pl.col("kind") == "kernel")["dur_ns"].sum())

    deep = rewrite(base, layers=48)
    assert kernels_ns(deep) == pytest.approx(2 * kernels_ns(base), rel=0.02)
    wide = rewrite(base, hidden=2048, ffn=5632, heads=32, kv_heads=32)
    assert 2 < kernels_ns(wide) / kernels_ns(base) < 4
    older = Cluster(gpu="A100-SXM-80GB", gpus_per_node=1)
    assert 1.5 < kernels_ns(rewrite(base, onto=older)) / kernels_ns(base) < 3.2
    assert step_ns(rewrite(deep, layers=24)) == step_ns(graph)
    with pytest.raises(InputError, match="calibration="):
        rewrite(replace(graph, run=None), hidden=2048)
    with pytest.raises(InputError, match="cluster="):
        rewrite(base, dp=2, global_batch=32)


def test_a_timeline_of_whole_passes_is_scheduled_anew(traces: Path) -> None:
    graph = build_graph(load_run(traces / "primus/pp8"))
    model = Transformer(layers=64, hidden=8192, heads=64, ffn=28672, vocab=32000)
    of = (model, Parallelism(pp=8), Training(micro_batch=1, global_batch=16, seq=4096))

    def under(**fields: Any) -> int:
        return step_ns(rewrite(graph, Parallelism(**fields), of=of))

    assert under(pp=8) == step_ns(graph)
    assert under(pp=8, schedule="gpipe") == pytest.approx(step_ns(graph), rel=0.01)  # the same bubble
    busy = graph.ops.filter(pl.col("kind") == "cpu").group_by("rank").agg(pl.col("dur_ns").sum())["dur_ns"].mean()
    assert isinstance(busy, float)
    idle = [under(pp=8, chunks=chunks, schedule=kind) - busy for chunks, kind in ((1, "gpipe"), (2, "interleaved"))]
    assert 0.4 < idle[1] / idle[0] < 0.65  # Narayanan et al. 2021: half
    assert under(pp=4) == pytest.approx(2 * (16 + 3) / (16 + 7) * step_ns(graph), rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ({"depth": 4}, InputError, "no field of Transformer, Parallelism or Training"),
        ({"heads": 3}, LayoutError, "heads is 3"),
        ({"pp": 2, "schedule": "zb-h1", "micro_batch": 2}, LayoutError, "not split"),
        ({"pp": 3}, LayoutError, "pp is 3"),
        ({"seq": 128}, LayoutError, "max_seq"),
        ({"cp": 2}, LayoutError, "cp is 2; the trace has 1"),
        ({"recompute": "full"}, LayoutError, "no rewrite changes"),
        ({"kernels": "eager"}, LayoutError, "no rewrite changes"),
        ({"kv_heads": 1}, LayoutError, "no rewrite changes"),
        ({"layers": "4"}, LayoutError, "layers is '4'; give a whole number"),
        ({"global_batch": 10**6}, LayoutError, "ops a step"),
        ({"model": "llama"}, InputError, "model is 'llama'; give a Transformer"),
        ({"of": (1, 2, 3)}, InputError, "of is"),
        ({"onto": "H100"}, InputError, "onto is 'H100'; give a Cluster"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else None,
)
def test_what_cannot_be_is_refused(sizes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rewrite(same("gpt-single"), **sizes)


def test_what_a_whole_model_says_and_no_rewrite_applies_is_listed() -> None:
    was = same("gpt-single").setup
    assert was is not None
    made = rewrite(graph_of("gpt-single"), model=msgspec.structs.replace(was[0], tied=not was[0].tied))
    assert made.report.filter(what="not applied")["detail"].to_list() == ["left as traced: tied"]
    assert made.setup == was


def test_what_is_missing_is_asked_for() -> None:
    alone = replace(graph_of("gpt-single"), run=None)
    assert step_ns(rewrite(alone, layers=4)) == step_ns(edited("gpt-single", layers=4))
    with pytest.raises(InputError, match="Give the run"):
        rewrite(alone, **WIDER)


def test_a_graph_that_nobody_measured_is_refused() -> None:
    cluster = Cluster(gpu="H100-SXM-80GB", inside="NVLink4 NVSwitch")
    found = estimate(
        Transformer.named("llama-3-8b"), Parallelism(dp=8), Training(micro_batch=1, global_batch=8, seq=512), cluster
    )
    with pytest.raises(InputError, match="was not measured"):
        rewrite(found.graph, layers=4)
