"""Arguments of any kind at all: each gives a result or an error of the package's own, never one of a library's."""

from __future__ import annotations

import enum
import inspect
import io
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from trace_builder import Trace, graph_of, repeated, run_of

import lumos_nb as ln
from lumos_nb import charts
from lumos_nb.errors import (
    InputError,
    LumosError,
    is_whole,
    is_word,
    items_of,
    require_flags,
    require_kinds,
    require_word,
)


class Word(enum.StrEnum):
    """A word that is text too."""

    SGD = "sgd"


class Number(enum.IntEnum):
    """A number that is an int too."""

    TWO = 2


class Unequal:
    """What gives an array where it is compared, and cannot be hashed, as arrays do."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])


ODD: tuple[Any, ...] = (
    *(np.array([1, 2]), np.array([]), np.array([1.5, np.nan]), np.array(["a", "b"]), np.ones((2, 2))),
    *(np.array([None, {}], object), np.array(1), np.array("sgd"), np.array(1.5)),
    *(np.float32(1.5), np.int64(2), np.uint8(1), np.str_("sgd"), np.bool_(True), np.datetime64("2020"), np.void(b"a")),
    *(Decimal("1.5"), Decimal("NaN"), Decimal("sNaN"), Fraction(1, 2), Fraction(10**5000, 3)),
    *(float("nan"), float("inf"), -1, 0, 2, 1.5, None, 10**400, 10**5000, 2**63, 2**31, True, 1j),
    *(Word.SGD, Number.TWO, Path("x"), "", "x", "\0", "\udcff", "x" * 5000, b"x", bytearray(b"x"), memoryview(b"x")),
    *([], [1], ["a"], [None], [np.array([1, 2])], [[1]], {}, {"a": 1}, {1}, (1, 2), range(3)),
    *(pl.Series([1, 2]), pl.Series(["a"]), pl.Series([None]), pl.DataFrame({"a": [1]}), pl.DataFrame()),
    *(pl.LazyFrame({"a": [1]}), pl.col("x"), pl.lit(1), pd.DataFrame({"a": [1]}), pd.Series([1]), pd.NA, pd.NaT),
    *(object(), Unequal(), lambda *_: 0, int, ..., np, io.BytesIO(b"x"), ValueError("x")),
)


def usual(trace: Trace, step: int, at: float) -> None:
    trace.op("aten::mm", at + 100, at + 200)
    trace.launch("gemm", (at + 120, at + 130), (at + 140, at + 500))


RUN = run_of(repeated(usual))
RECORDING = ln.Recording.of(RUN)
GRAPH = graph_of(repeated(usual), step=2)
RESULT = ln.replay(GRAPH)
ALL = pl.col("kind") == "kernel"
CLUSTER = ln.Cluster(gpu="H100-SXM-80GB", gpus_per_node=2, inside="NVLink4 NVSwitch")
LOOKUP = ln.PhysicalLookup.of_sheet(CLUSTER.gpu_sheet)
COSTS = ln.ShardingCosts.of(LOOKUP, CLUSTER, batch=1024)
TABLES = pl.DataFrame({"rows": [1000] * 2, "dim": [64, 32], "pooling": [2.0, 3.0]})
LITTLE: dict[str, Any] = {"beam": 1, "candidates": 1, "rounds": 1, "caps": 1}
PLAN = ln.shard(TABLES, CLUSTER, COSTS, **LITTLE)
DLRM = ln.Dlrm(dense=13, bottom=(64, 32), top=(64, 1), interaction="cat")
MODEL = ln.Transformer(layers=2, hidden=512, heads=8, ffn=1024, vocab=1000)


BATCH = ln.DlrmTraining(global_batch=1024)


def searched(**given: Any) -> object:
    one = {"tp": 2, "cp": 1, "pp": 1, "zero": 0, "recompute": "none", "micro_batch": 1, "sequence_parallel": False}
    return ln.search(MODEL, CLUSTER, ln.Training(micro_batch=1, global_batch=2, seq=8), keep=0, **(one | given))


def sharded(**given: Any) -> object:
    return ln.shard(TABLES, CLUSTER, COSTS, **(LITTLE | given))


def simulated(**given: Any) -> object:
    return ln.simulate(GRAPH, ln.Resources(**given))


CALLS: dict[str, Callable[[Any], object]] = {
    "shard(optimizer=)": lambda odd: sharded(optimizer=odd),
    "shard(splits=)": lambda odd: sharded(splits=odd),
    "shard(splits=[])": lambda odd: sharded(splits=[odd]),
    "shard(seed=)": lambda odd: sharded(seed=odd),
    "shard(objective=)": lambda odd: sharded(objective=lambda _: odd),
    "shard(memory_bytes=)": lambda odd: sharded(memory_bytes=odd),
    "ShardingCosts.of(calibration=)": lambda odd: ln.ShardingCosts.of(LOOKUP, CLUSTER, 64, calibration=odd),
    "ShardingCosts.of(speed=)": lambda odd: ln.ShardingCosts.of(LOOKUP, CLUSTER, 64, speed=odd),
    "ShardingCosts.parts(batch_share=)": lambda odd: COSTS.parts(PLAN.tables, odd),
    "Plan.of(memory_bytes=)": lambda odd: ln.Plan.of(PLAN.tables, PLAN.frame, odd),
    "Plan.of(why=)": lambda odd: ln.Plan.of(PLAN.tables, PLAN.frame, [1e9, 1e9], why=odd),
    "Plan.to_torchrec": lambda odd: PLAN.to_torchrec(odd, odd),
    "estimate_dlrm(surcharges=)": lambda odd: ln.estimate_dlrm(DLRM, PLAN, BATCH, CLUSTER, surcharges=odd),
    "estimate_dlrm(lookups=)": lambda odd: ln.estimate_dlrm(DLRM, PLAN, BATCH, CLUSTER, lookups=odd),
    "search(surcharges=)": lambda odd: searched(surcharges=odd),
    "search(spare=)": lambda odd: searched(spare=odd),
    "rewrite(graph)": lambda odd: ln.rewrite(odd, hidden=256),
    "rewrite(run=)": lambda odd: ln.rewrite(GRAPH, run=odd, hidden=256),
    "rewrite(calibration=)": lambda odd: ln.rewrite(GRAPH, calibration=odd, hidden=256),
    "Plan.with_figures": lambda odd: PLAN.with_figures(forward_us=odd),
    "sweep(by=)": lambda odd: ln.sweep(GRAPH, [{}], by=odd),
    "sweep(rank_ends=)": lambda odd: ln.sweep(GRAPH, [{}], rank_ends=odd),
    "sweep(executor=)": lambda odd: ln.sweep(GRAPH, [{}], executor=None if isinstance(odd, str) else odd),
    "sweep: scenarios": lambda odd: ln.sweep(GRAPH, odd),
    "sweep: a scale": lambda odd: ln.sweep(GRAPH, [{"kernel": odd}]),
    "sweep: a label": lambda odd: ln.sweep(GRAPH, [{"scenario": odd}]),
    "sweep: a class": lambda odd: ln.sweep(GRAPH, [{(odd if _hashable(odd) else "kernel"): 0.5}]),
    "network(bandwidth_factor=)": lambda odd: ln.whatif.network(GRAPH, ALL, bandwidth_factor=odd),
    "remove(launches=)": lambda odd: ln.whatif.remove(GRAPH, ALL, launches=odd),
    "insert(before=)": lambda odd: ln.whatif.insert(GRAPH, ALL, "n", 1, kind="cpu", before=odd),
    "insert(kind=)": lambda odd: ln.whatif.insert(GRAPH, ALL, "n", 1, kind=odd),
    "Pool(of=)": lambda odd: simulated(pools=(ln.Pool(of=odd),)),
    "Pool(demand=)": lambda odd: simulated(pools=(ln.Pool(of=pl.lit("p"), demand=odd),)),
    "Pool(in_turn=)": lambda odd: simulated(pools=(ln.Pool(of=pl.lit("p"), in_turn=odd),)),
    "Resources(pools=)": lambda odd: simulated(pools=odd),
    "Resources(priority=)": lambda odd: simulated(priority=odd),
    "Resources(streams=)": lambda odd: simulated(streams=odd),
    "Resources(whole_stream=)": lambda odd: simulated(whole_stream=odd),
    "without_stragglers(statistic=)": lambda odd: ln.without_stragglers(GRAPH, replicas=[[0]], statistic=odd),
    "without_stragglers(replicas=)": lambda odd: ln.without_stragglers(GRAPH, replicas=odd),
    "with_pooled_durations(over=)": lambda odd: ln.with_pooled_durations(GRAPH, odd),
    "waiting_caused(by=)": lambda odd: ln.waiting_caused(RESULT, by=odd),
    "fill_ranks(replicas=)": lambda odd: ln.fill_ranks(RECORDING, replicas=odd),
    "fill_ranks(replicas=[[]])": lambda odd: ln.fill_ranks(RECORDING, replicas=[[odd]]),
    "mechanistic(steps=)": lambda odd: ln.mechanistic(RECORDING, odd),
    "jitter(seed=)": lambda odd: ln.jitter(RECORDING, draws=2, seed=odd),
    "neighbours(op_id=)": lambda odd: ln.neighbours(RESULT, odd),
    "neighbours(result=)": lambda odd: ln.neighbours(odd, 1),
    "Recording.rank_starts": RECORDING.rank_starts,
    "Recording.known_step": RECORDING.known_step,
    "Gpu.peak": CLUSTER.gpu_sheet.peak,
    "Cluster.span": CLUSTER.span,
    "Parallelism.layers_of": ln.Parallelism().layers_of,
    "Parallelism.groups": ln.Parallelism().groups,
    "Training.micro_batches": ln.Training(micro_batch=1, global_batch=2, seq=8).micro_batches,
    "DlrmTraining.local_batch": ln.DlrmTraining(global_batch=1024).local_batch,
    "Dlrm.features": DLRM.features,
    "Dlrm.weights": DLRM.weights,
    "Transformer.from_json": ln.Transformer.from_json,
    "Transformer(moe=)": lambda odd: ln.Transformer(layers=2, hidden=512, heads=8, ffn=1024, vocab=1000, moe=odd),
    "Transformer.weights": MODEL.weights,
    "Transformer.has_experts": MODEL.has_experts,
    "Parallelism(schedule=)": lambda odd: ln.Parallelism(schedule=odd),
    "load_run": lambda odd: ln.load_run(odd, cache=False),
    "load_run(cache=)": lambda odd: ln.load_run("no such run", cache=odd),
    "load_execution_trace(rank=)": lambda odd: ln.load_execution_trace("no such trace", rank=odd),
    "chakra.write(target=)": lambda odd: ln.chakra.write(GRAPH, "x", target=odd),
    "chakra.validate(target=)": lambda odd: ln.chakra.validate("no such files", target=odd),
    "chakra.pattern(collective=)": lambda odd: ln.chakra.pattern(2, 1, collective=odd, compute_us=1),
    "chakra.pattern(overlapped=)": lambda odd: ln.chakra.pattern(2, 1, compute_us=1, overlapped=odd),
    "capture(paired=)": lambda odd: ln.capture("x", paired=odd),
    "capture(device=)": lambda odd: ln.capture("x", device=odd),
    "dry_run(step_fn=)": lambda odd: ln.dry_run(odd, 2) if not callable(odd) else None,
    "dry_run(setup=)": lambda odd: ln.dry_run(lambda *_: None, 2, setup=odd) if not callable(odd) else None,
    "dry_run(fake=)": lambda odd: ln.dry_run(lambda: None, 2, fake=odd),
    "lookup_us(sets=)": lambda odd: ln.lookup_us(LOOKUP, TABLES, 64, odd),
    "lookup_us(sets=[])": lambda odd: ln.lookup_us(LOOKUP, TABLES, 64, [odd]),
    "lookup_us(sets=[[]])": lambda odd: ln.lookup_us(LOOKUP, TABLES, 64, [[odd]]),
    "overheads": ln.overheads,
    "save_prediction(change=)": lambda odd: ln.save_prediction("x.json", RUN, change=odd, recording=RECORDING),
    "save_prediction(recording=)": lambda odd: ln.save_prediction("x.json", RUN, recording=odd),
    "step_report(predict=)": lambda odd: ln.step_report(RUN, predict=odd, recording=RECORDING),
    "step_report(scales=)": lambda odd: ln.step_report(RUN, predict=0, scales=odd, recording=RECORDING),
    "step_report(progress=)": lambda odd: (
        ln.step_report(RUN, predict=0, recording=RECORDING, progress=odd) if not callable(odd) else None
    ),
    "timed_steps": ln.timed_steps,
    "LookupNet.load": ln.LookupNet.load,
    "insert(lane=)": lambda odd: ln.whatif.insert(GRAPH, ALL, "n", 1, kind="cpu", lane=odd),
    "chakra.write(prefix=)": lambda odd: ln.chakra.write(GRAPH, "x", prefix=odd),
    "chakra.write(ranks=)": lambda odd: ln.chakra.write(GRAPH, "x", ranks=odd),
    "chakra.write(progress=)": lambda odd: ln.chakra.write(GRAPH, "x", progress=odd) if not callable(odd) else None,
    "errors.require_word": lambda odd: require_word(("sgd",), word=odd),
    "errors.require_flags": lambda odd: require_flags(flag=odd),
    "errors.items_of": lambda odd: items_of("given", odd, "a list"),
    "errors.is_whole": lambda odd: is_whole(odd, 0),
}
"""Name of the argument -> a call that is right but for it."""


CELLS = pl.DataFrame({"gpu": ["A100", "H100"], "cell": "gemm", "error": [0.1, 0.2]})
SWEEP = pl.DataFrame({"m": [1, 2], "weight": "w", "measured": [5.0, 6.0], "predicted": [5.5, 6.0]})
PARTS = ln.breakdown(RESULT)
CHARTS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "heat_map": (
        charts.heat_map,
        {"frame": CELLS, "x": "gpu", "y": "cell", "value": "error", "heat": "error", "titles": {}},
    ),
    "sweeps": (charts.sweeps, {"frame": SWEEP, "x": "m", "panel": "weight", "titles": {}}),
    "error_spread": (charts.error_spread, {"rows": CELLS, "by": "gpu"}),
    "timeline": (charts.timeline, {"source": RESULT}),
    "dependencies": (charts.dependencies, {"source": RESULT}),
    "waterfall": (charts.waterfall, {"parts": PARTS}),
    "breakdown_bars": (charts.breakdown_bars, {"parts": PARTS}),
    "difference": (charts.difference, {"changes": ln.compare(GRAPH, GRAPH)}),
    "to_png": (charts.to_png, {"chart": {"mark": "bar"}}),
    "to_svg": (charts.to_svg, {"chart": charts.waterfall(PARTS)}),
}
"""A chart -> arguments that are right, beside which any other may be odd."""


def _hashable(given: object) -> bool:
    try:
        hash(given)
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_of_any_kind_is_taken_or_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for odd in ODD:
        with suppress(LumosError):
            CALLS[name](odd)


@pytest.mark.parametrize("name", CHARTS)
def test_charts_take_arguments_of_any_kind_or_refuse_them_by_name(name: str) -> None:
    function, right = CHARTS[name]
    for argument in inspect.signature(function).parameters:
        for odd in ODD:
            with suppress(LumosError):
                function(**(right | {argument: odd}))


def test_charts_refuse_by_name_and_take_numbers_of_numpy() -> None:
    for wrong, message in (
        ({"width_px": 0}, r"width_px=0: give a whole number from 1"),
        ({"ranks": np.array(1)}, r"ranks=array\(1\): give ranks, such as \[0, 1\]"),
        ({"ranks": [-1]}, r"ranks=-1: give a whole number from 0"),
        ({"title": 5}, r"title is 5; give a str"),
    ):
        with pytest.raises(InputError, match=message):
            charts.timeline(RESULT, **wrong)
    wide = charts.timeline(RESULT, width_px=np.uint8(200), ranks=np.array([0])).to_dict()
    assert wide == charts.timeline(RESULT, width_px=200, ranks=[0]).to_dict()
    with pytest.raises(InputError, match=r"cell_px=5: give a width and a height"):
        charts.heat_map(CELLS, x="gpu", y="cell", value="error", heat="error", titles={}, cell_px=5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"heat='hot': give one of 'basis', 'error', 'signed error'"):
        charts.heat_map(CELLS, x="gpu", y="cell", value="error", heat="hot", titles={})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"scale=0: give a finite number of at least 0\.1, 10 at most"):
        charts.to_png(charts.waterfall(PARTS), scale=0)
    with pytest.raises(InputError, match="chart is nothing that Vega-Lite draws"):
        charts.to_png({"mark": 5})


def test_words_flags_and_sequences_in_other_kinds_are_what_they_say() -> None:
    assert [is_word(word, ("sgd", "adam")) for word in ("sgd", np.str_("adam"), Word.SGD)] == [True] * 3
    assert not any(is_word(word, ("sgd",)) for word in ("", "SGD", b"sgd", np.array("sgd"), ["sgd"], None))
    require_flags(a=True, b=np.bool_(False), c=0, d=np.int64(1))
    for wrong in ("False", None, 2, 1.0, np.array(True), np.array([True]), pl.Series([True])):
        with pytest.raises(InputError, match=r"flag=.*give True or False"):
            require_flags(flag=wrong)
    assert items_of("given", np.array([1, 2]), "a list") == items_of("given", (i for i in (1, 2)), "a list") == [1, 2]
    for wrong in ("ab", b"ab", {"a": 1}, 5, None, np.array(1)):
        with pytest.raises(InputError, match=r"given=.*: give a list\."):
            items_of("given", wrong, "a list")
    with pytest.raises(InputError, match="by is 5; give a str or Expr"):
        require_kinds(by=(5, str | pl.Expr))
    assert [is_whole(number, 0) for number in (2, np.uint8(2), Number.TWO)] == [True] * 3
    assert not any(is_whole(number, 0) for number in (np.array(2), np.array([2]), True, 2.0, "2"))
    assert sharded(splits=(split for split in ["row_wise"])).frame.equals(sharded(splits=["row_wise"]).frame)  # type: ignore[attr-defined]
