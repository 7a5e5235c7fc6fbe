"""Charts of changes and pipelines: sums go down to the whole, every pass is a bar, memory never loses its peak."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl
import pytest
from test_charts import EYES, MS, Workload, late_rank, marks, op, seen, table
from test_cost_charts import refuses_other_types

from lumos_nb import charts
from lumos_nb.charts.changes import CHANGE_COLOURS
from lumos_nb.charts.pipelines import PASSES
from lumos_nb.critical_path import sweep
from lumos_nb.errors import InputError, LumosError, SchemaError
from lumos_nb.partition import breakdown, compare

RESULT = late_rank()
STRUCTURE = pl.DataFrame(
    {"rank": [0], "phase": ["forward"], "found": ["annotation"], "layers": [1], "share": [0.9], "confidence": [1.0]}
)
CLASSES = pl.DataFrame({"where": ["device"], "class": ["gemm"], "time_ns": [MS], "replayed_time_ns": [2 * MS]})
Rows = list[dict[str, object]]


def rows_of(spec: Mapping[str, object], layer: int = 0) -> Rows:
    inner = spec.get("spec", spec)
    one = inner["layer"][layer] if "layer" in inner else inner  # type: ignore[index]
    data = one.get("data") or spec.get("data")  # type: ignore[union-attr]
    return spec["datasets"][data["name"]]  # type: ignore[index,no-any-return]


def test_a_waterfall_goes_from_part_to_part_down_to_the_step():
    spec = charts.waterfall(breakdown(RESULT), rank=0).to_dict()
    bars = rows_of(spec)
    assert [(bar["part"], bar["start_ms"], bar["end_ms"]) for bar in bars] == [
        ("compute", 0, 7),  # matmul 3 ms, optimizer 4 ms
        ("exposed_transfer", 7, 9),
        ("exposed_wait", 9, 13),  # for rank 1, which computes 4 ms longer
        ("host_bound", 13, 14),
        ("step", 0, 14),
    ]
    assert marks(spec) == {"rect": 5, "text": 5, "rule": 1}
    assert spec["layer"][0]["encoding"]["x"]["title"] == "time in the step (ms)"


def test_without_a_rank_it_is_the_longest_step():
    parts = breakdown(RESULT)
    longest = parts.group_by("rank").agg(pl.col("time_ns").sum()).sort("time_ns")["rank"][-1]
    assert charts.waterfall(parts).to_dict()["title"]["text"] == f"The step of rank {longest}"
    with pytest.raises(InputError, match="no rank 7; it has 0, 1"):
        charts.waterfall(parts, rank=7)


CHANGES = pl.DataFrame(
    {
        "level": ["step", *["op"] * 4],
        "key": ["all ranks, summed", "a", "b", "c", "d"],
        "a_ns": [10 * MS, 4 * MS, 3 * MS, 2 * MS, MS],
        "b_ns": [13 * MS, 9 * MS, MS, 2 * MS, MS],
        "diff_ns": [3 * MS, 5 * MS, -2 * MS, 0, 0],
    }
)


def test_a_difference_adds_up_key_by_key_and_what_is_left_out_is_one_bar():
    bars = rows_of(charts.difference(CHANGES, level="op", most=2).to_dict())
    assert [(bar["key"], bar["start_ms"], bar["end_ms"], bar["way"]) for bar in bars] == [
        ("a", 0, 5, "longer"),
        ("b", 5, 3, "shorter"),
        ("2 others", 3, 3, "shorter"),
        ("in all", 0, 3, "in all"),
    ]
    assert [bar["text"] for bar in bars] == ["+5.00 ms", "-2.00 ms", "0 ns", "+3.00 ms"]
    with pytest.raises(InputError, match="no level 'layer'; it has op, step"):
        charts.difference(CHANGES, level="layer")


def test_a_difference_of_two_steps_ends_where_they_differ():
    found = compare(RESULT.graph, RESULT)
    bars = rows_of(charts.difference(found).to_dict())
    assert bars[-1]["end_ms"] == pytest.approx(found.filter(level="step")["diff_ns"].item() / 1e6)


def test_scenarios_come_by_what_they_buy():
    swept = sweep(RESULT.graph, [{"scenario": "nothing"}, {"scenario": "kernels", "kernel": 0.5}])
    spec = charts.sensitivity(swept).to_dict()
    assert [bar["scenario"] for bar in rows_of(spec)] == ["kernels", "nothing"]
    assert rows_of(spec)[0]["change"] == pytest.approx(-5.5 / 14)  # half of 7 ms and of 4 ms on the path
    assert spec["layer"][0]["encoding"]["x"]["title"] == "change of the step time"
    assert len(rows_of(charts.sensitivity(swept, most=1).to_dict())) == 1


def test_slack_is_counted_by_how_long_ops_are():
    bars = rows_of(charts.slack_bars(RESULT).to_dict())
    time_of = {(bar["slack"], bar["activity"]): bar["time_ms"] for bar in bars}
    assert time_of["none: critical", "compute"] == 7 + 4  # of rank 1 and the optimizer
    assert time_of["below 10.0 ms", "compute"] == 3  # rank 0 waits for 4 ms
    assert sum(time_of.values()) == 2 + 2 + 3 + 7 + 4 + 2 + 1


def passes(schedule: str) -> pl.DataFrame:
    """One rank's ops: `F0 B0 W0` and so on, 10 ms each, as two kernels."""
    rows = []
    phase_of = {"F": "forward", "B": "backward", "W": "backward_weight"}
    for n, word in enumerate(schedule.split()):
        more = {"phase": phase_of[word[0]], "micro_batch": int(word[1:])}
        rows += [op("kernel", (10 * n + half) * MS, 5 * MS, **more) for half in (0, 5)]
    return table(*rows)


def test_a_schedule_has_a_bar_a_pass_by_micro_batch():
    spec = charts.schedule(Workload(passes("F0 F1 B0 B1 W0"))).to_dict()
    drawn = {
        (bar["pass"], bar["micro_batch"], bar["start_ms"], bar["end_ms"]) for n in range(3) for bar in rows_of(spec, n)
    }
    assert drawn == {
        *(("forward", 0, 0, 10), ("forward", 1, 10, 20), ("backward", 0, 20, 30), ("backward", 1, 30, 40)),
        ("weight gradients", 0, 40, 50),
    }
    assert [layer["mark"]["height"]["band"] for layer in spec["layer"][:3]] == list(PASSES.values())
    assert marks(spec) == {"rect": 5, "text": 5}


def test_weight_gradients_amid_a_backward_pass_are_part_of_it():
    bars = rows_of(charts.schedule(passes("F0 B0 W0 B0")).to_dict(), 1)
    assert [(bar["pass"], bar["start_ms"], bar["end_ms"], bar["ops"]) for bar in bars] == [("backward", 10, 40, 6)]


def test_what_is_no_pipeline_or_too_long_is_refused():
    with pytest.raises(LumosError, match="no op belongs to a micro-batch"):
        charts.schedule(RESULT)
    with pytest.raises(LumosError, match="3 passes, more than max_bars=2"):
        charts.schedule(passes("F0 F1 B0"), max_bars=2)


def memory(instants: int) -> pl.DataFrame:
    """Weights of 10 GB, and activations that are largest in an instant of their own."""
    held = [n % 7 for n in range(instants)]
    held[instants // 3] = 50
    times = pl.DataFrame({"time_ns": range(5, instants + 5), "activations": held, "weights": 10, "logits": 0})
    rows = times.unpivot(index="time_ns", variable_name="class", value_name="gb")
    return rows.select(pl.lit(0, pl.Int32).alias("stage"), "time_ns", "class", bytes=pl.col("gb") * 10**9)


@pytest.mark.parametrize("instants", [40, 5000])
def test_memory_over_time_keeps_its_peak_and_its_ends(instants):
    spec = charts.memory_over_time(memory(instants), limit_bytes=80e9, max_rows=400).to_dict()
    rows = pl.DataFrame(rows_of(spec))
    assert rows.height <= 400
    assert rows["class"].unique().sort().to_list() == ["activations", "weights"]  # there are no logits
    total = rows.group_by("time_ms").agg(pl.col("gb").sum(), pl.len())
    assert total["gb"].max() == 60
    assert total["len"].unique().to_list() == [2]
    assert total["time_ms"].min() == 0
    assert total["time_ms"].max() == pytest.approx((instants - 1) / 1e6)
    assert marks(spec) == {"area": 2, "rule": 1}


def test_a_plan_is_a_bar_a_shard():
    shards = pl.DataFrame(
        {
            "table": ["a", "a", "b"],
            "device": [1, 0, 1],
            "kind": ["column_wise", "column_wise", "table_wise"],
            **{name: [0] * 3 for name in ("first_row", "rows", "first_column", "dim")},
            "bytes": [2 * 10**9, 10**9, 3 * 10**9],
        }
    )
    spec = charts.sharding_plan(shards).to_dict()
    assert {(bar["device"], bar["table"], bar["gb"]) for bar in rows_of(spec)} == {
        *(("device 0", "a", 1), ("device 1", "a", 2), ("device 1", "b", 3)),
    }
    assert marks(spec)["rect"] == 3


@pytest.mark.parametrize(
    ("draw", "frame", "needed"),
    [
        pytest.param(charts.waterfall, breakdown(RESULT), "part", id="waterfall"),
        pytest.param(charts.difference, CHANGES, "diff_ns", id="difference"),
        pytest.param(charts.sensitivity, sweep(RESULT.graph, [{}]), "change", id="sensitivity"),
        pytest.param(charts.memory_over_time, memory(5), "class", id="memory"),
        pytest.param(charts.structure_bars, STRUCTURE, "share", id="structure"),
        pytest.param(charts.similarity_bars, CLASSES, "time_ns", id="similarity"),
    ],
)
def test_no_rows_or_a_missing_column_is_an_error_that_says_so(draw, frame, needed):
    with pytest.raises(LumosError, match="nothing to draw"):
        draw(frame.clear())
    with pytest.raises(SchemaError, match=f"lacks column.* {needed}"):
        draw(frame.drop(needed))
    refuses_other_types(draw, frame)


def test_slack_of_what_was_not_replayed_is_refused():
    with pytest.raises(SchemaError, match="slack_ns"):
        charts.slack_bars(RESULT.graph)


@pytest.mark.parametrize("eyes", EYES)
def test_longer_and_shorter_are_told_apart_by(eyes):
    difference = seen(CHANGE_COLOURS["longer"], EYES[eyes]) - seen(CHANGE_COLOURS["shorter"], EYES[eyes])
    assert (difference**2).sum() > 30**2
