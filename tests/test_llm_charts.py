"""Charts of predicted steps: every row becomes a mark, axes have units, and what cannot run says why."""

from __future__ import annotations

from itertools import combinations

import polars as pl
import pytest
from test_charts import EYES, seen
from test_cost_charts import marks, refuses_other_types, rows_of, texts

from lumos_nb.charts import agreement, layouts, memory_bars, pareto, step_times
from lumos_nb.charts.estimates import OTHER_SERIES
from lumos_nb.charts.pipelines import MEMORY_COLOURS
from lumos_nb.charts.style import SERIES
from lumos_nb.errors import LumosError, SchemaError
from lumos_nb.layout import Cluster, Parallelism, Training
from lumos_nb.transformer import Transformer
from lumos_nb.workloads.llm.memory import memory
from lumos_nb.workloads.llm.screening import Found

SCORED = pl.DataFrame(
    {
        "source": ["b", "a", "b"],
        "run": ["one", "two", "three"],
        "measured_s": [1.0, 2.0, 10.0],
        "predicted_s": [1.1, 1.5, 9.0],
        "low_s": [0.9, 1.3, 8.0],
        "high_s": [1.3, 1.9, 13.0],
    }
)
TIMES = pl.DataFrame(
    {
        "label": ["2 x 2 x 8", "2 x 2 x 4"] * 3,
        "series": ["measured"] * 2 + ["predicted"] * 2 + ["another's"] * 2,
        "time_s": [1.0, 2.0, 1.1, 1.9, 0.9, 2.2],
        "low_s": [None, None, 0.9, 1.5, None, None],
        "high_s": [None, None, 1.3, 2.4, None, None],
    }
)
MEMORY = memory(
    Transformer(layers=4, hidden=256, heads=4, ffn=1024, vocab=1024),
    Parallelism(pp=2),
    Training(micro_batch=1, global_batch=4, seq=512),
)
SEARCHED = pl.DataFrame(
    {
        "gpus": [8] * 5,
        "tp": [2, 1, 1, 2, 1],
        "pp": [1, 2, 2, 2, 1],
        "dp": [4, 4, 4, 2, 8],
        "memory_bytes": [60_000_000_000, 30_000_000_000, 50_000_000_000, None, 90_000_000_000],
        "feasible": [True, True, True, False, False],
        "why_not": [None] * 3 + ["Parallelism: pp is 2; give a divisor.", "memory: pipeline rank 0 needs 90 GB."],
        "step_s": [1.234, 2.0, 1.8, None, None],
    },
    schema_overrides={"memory_bytes": pl.Int64},
)
CLUSTER = Cluster(gpu="H100-SXM-80GB", inside="NVLink4 NVSwitch")
FOUND = Found(Transformer.named("gpt3-125m"), Training(micro_batch=1, global_batch=8, seq=512), CLUSTER, SEARCHED)


def test_a_scatter_has_a_point_and_an_interval_a_row_beside_the_diagonal():
    spec = agreement(SCORED).to_dict()
    assert marks(spec) == {"area": 1, "line": 1, "rule": 3, "symbol": 3}
    band, points = rows_of(spec, 0), rows_of(spec, 3)
    assert [corner["low_s"] / corner["measured_s"] for corner in band] == pytest.approx([0.9, 0.9])
    assert band[0]["measured_s"] < 0.9 < 13 < band[1]["measured_s"]
    assert [point["error"] for point in points] == pytest.approx([0.1, -0.25, -0.1])
    assert spec["layer"][3]["encoding"]["color"]["scale"]["domain"] == ["b", "a"]
    assert {"measured step time (s)", "predicted step time (s)"} <= set(texts(agreement(SCORED)))


def test_step_times_are_points_of_each_series_with_intervals_where_there_are_any():
    chart = step_times(TIMES)
    spec = chart.to_dict()
    assert marks(spec) == {"rule": 2, "symbol": 6}
    assert spec["layer"][1]["encoding"]["x"]["scale"]["domain"] == ["2 x 2 x 8", "2 x 2 x 4"]
    looks = [SERIES["measured"], SERIES["predicted"], OTHER_SERIES[0]]
    assert spec["layer"][1]["encoding"]["color"]["scale"]["range"] == [colour for colour, _ in looks]
    assert "step time (s)" in texts(chart)


def test_more_series_than_colours_are_refused():
    many = pl.concat([TIMES.with_columns(series=pl.lit(f"series {n}")) for n in range(4)])
    with pytest.raises(LumosError, match="4 series beside measured and predicted: give 3"):
        step_times(many)


def test_memory_is_a_bar_of_classes_a_pipeline_rank_below_the_limit():
    chart = memory_bars(MEMORY, limit_bytes=1e9)
    spec = chart.to_dict()
    there = MEMORY.filter(pl.col("bytes") > 0)
    assert marks(spec) == {"rect": there.height, "rule": 1}
    assert sum(row["gb"] for row in rows_of(spec, 0)) == pytest.approx(MEMORY["bytes"].sum() / 1e9)
    assert rows_of(spec, 1) == [{"gb": 1.0}]
    assert {"pipeline rank 0", "pipeline rank 1", "memory (GB)"} <= set(texts(chart))
    assert marks(memory_bars(MEMORY).to_dict())["rule"] == 0


def test_a_map_of_layouts_shows_the_fastest_of_each_cell_or_what_is_in_the_way():
    chart = layouts(FOUND.frame)
    assert marks(chart.to_dict()) == {"rect": 4, "text": 4}
    assert {"1.23", "1.8", "pp", "memory"} <= set(texts(chart))
    fails = rows_of(chart.to_dict(), 0)
    assert {row["why_not"] for row in fails} == set(SEARCHED["why_not"].drop_nulls())


def test_a_map_where_nothing_fits_has_reasons_only():
    assert marks(layouts(FOUND.frame.filter(~pl.col("feasible"))).to_dict()) == {"rect": 2, "text": 2}


def test_a_front_is_drawn_over_all_that_fit():
    chart = pareto(FOUND.feasible, FOUND.pareto)
    spec = chart.to_dict()
    assert FOUND.pareto["step_s"].to_list() == [1.234, 1.8, 2.0]
    assert marks(spec) == {"line": 1, "symbol": 3 + 3}
    assert {"step time (s)", "memory of the fullest rank (GB)"} <= set(texts(chart))
    few = pareto(FOUND.feasible, FOUND.pareto, max_points=1).to_dict()
    assert few["title"]["subtitle"].startswith("1 of 3 layouts")


def test_a_front_has_a_price_beside_it():
    """8 GPUs at 2.5 USD an hour make 1,000 tokens a second: a billion takes 277.8 hours."""
    tokens = pl.lit(1000.0).alias("tokens_per_s")
    chart = pareto(FOUND.feasible.with_columns(tokens), FOUND.pareto.with_columns(tokens), usd_per_gpu_hour=2.5)
    spec = chart.to_dict()
    assert marks(spec) == {"line": 1, "symbol": 2 * (3 + 3)}
    assert "cost of a billion tokens (USD)" in texts(chart)
    for rows in spec["datasets"].values():
        assert [row["usd"] for row in rows] == pytest.approx([8 * 2.5 * 1e9 / 1000 / 3600] * 3)
    told = {one.get("title") for one in spec["hconcat"][1]["layer"][-1]["encoding"]["tooltip"]}
    assert {"GPUs", "step (s)", "memory (GB)", "cost of a billion tokens (USD)"} <= told


@pytest.mark.parametrize("price", [0, -1.0, float("nan"), float("inf"), "2.5", [2]])
def test_what_is_no_price_is_refused(price):
    with pytest.raises(LumosError, match="usd_per_gpu_hour="):
        pareto(FOUND.feasible, FOUND.pareto, usd_per_gpu_hour=price)


@pytest.mark.parametrize(
    ("draw", "frame", "needed"),
    [
        pytest.param(agreement, SCORED, "low_s", id="scatter"),
        pytest.param(step_times, TIMES, "series", id="step times"),
        pytest.param(memory_bars, MEMORY, "moment", id="memory"),
        pytest.param(layouts, SEARCHED, "why_not", id="layouts"),
        pytest.param(lambda frame: pareto(frame, FOUND.pareto), FOUND.feasible, "memory_bytes", id="front"),
    ],
)
def test_no_rows_or_a_missing_column_is_an_error_that_says_so(draw, frame, needed):
    with pytest.raises(LumosError, match="nothing to draw"):
        draw(frame.clear())
    with pytest.raises(SchemaError, match=f"lacks column.* {needed}"):
        draw(frame.drop(needed))
    refuses_other_types(draw, frame)


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize(
    "palette",
    [list(MEMORY_COLOURS.values()), [SERIES["measured"][0], SERIES["predicted"][0], *(c for c, _ in OTHER_SERIES)]],
    ids=["memory", "series"],
)
def test_colours_are_told_apart_by(eyes, palette):
    """As in `test_charts`."""
    for one, other in combinations(palette, 2):
        difference = seen(one, EYES[eyes]) - seen(other, EYES[eyes])
        assert (difference**2).sum() > 10**2, f"{one} and {other}"
