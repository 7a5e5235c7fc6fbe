"""How step times are scored: protocols on small tables whose answers can be worked out, and closed forms of others."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
import pytest

import benchmarks
from benchmarks import llm_accuracy, llm_uses
from benchmarks.llm_accuracy import Score, factor_of_others, noise, one_run_known, protocols, ratios, regrets
from benchmarks.llm_peers import Job, calculon_like, six_pt
from benchmarks.rows import Row
from lumos_nb.layout import Cluster, Parallelism, Training
from lumos_nb.transformer import Transformer

JOB = Job(
    Transformer.named("gpt3-6.7b"), Parallelism(tp=2, dp=4), Training(micro_batch=2, global_batch=64, seq=2048),
    Cluster(gpu="A100-SXM-80GB", inside="NVLink3 NVSwitch"),
)  # fmt: skip


def runs(*rows: tuple[str, float, float]) -> pl.DataFrame:
    """Scored runs from (name of the source, predicted, measured); `group` counts them, two each."""
    frame = pl.DataFrame(rows, schema=["name", "predicted_s", "measured_s"], orient="row")
    return frame.with_columns(origin=pl.col("name"), use=pl.lit("scored"), gpu=pl.lit("A"), num_gpus=pl.lit(8))


def test_a_score_counts_sizes_of_errors_and_the_sign_of_the_middle_one():
    score = Score.of(np.array([0.5, 0.96, 1.08]))
    assert score.mean == pytest.approx((50 + 4 + 8) / 3)
    assert (score.median, score.worst) == pytest.approx((8, 50))
    assert (score.within_5, score.within_10) == pytest.approx((100 / 3, 200 / 3))
    assert score.bias == pytest.approx(-4)
    assert Score.of(np.array([0.5, 2.0])).geometric == pytest.approx(100)


def test_rows_that_were_refused_do_not_count():
    rows = runs(("a", 2, 1), ("a", 3, 1))
    assert ratios(rows.with_columns(predicted_s=pl.Series([2.0, None]))).tolist() == [2]


def test_a_factor_is_that_of_other_origins_each_of_which_counts_alike():
    rows = runs(("vTrain", 7, 1), *[("tr11", 1, 2)] * 3, ("fms-fsdp", 1, 8))
    assert factor_of_others(rows, "vTrain") == pytest.approx(4)
    contaminated = runs(("nanotron, 4-32 nodes", 1, 99), ("NeMo", 1, 99))
    assert factor_of_others(rows.vstack(contaminated), "vTrain") == pytest.approx(4)


def test_with_one_run_known_only_what_differs_from_it_is_an_error():
    assert one_run_known(runs(("a", 3, 1), ("a", 6, 2), ("a", 9, 3))).tolist() == [1] * 6
    assert sorted(one_run_known(runs(("a", 1, 1), ("a", 3, 2)))) == pytest.approx([2 / 3, 3 / 2])
    apart = runs(("a", 1, 1), ("a", 3, 1)).with_columns(num_gpus=pl.Series([8, 16]))
    assert one_run_known(apart).size == 0


def test_regret_is_how_much_slower_the_chosen_layout_ran_than_the_best():
    rows = runs(("a", 1, 1.2), ("a", 2, 1.0), ("a", 3, 9.0), ("b", 1, 5.0), ("b", 2, 4.0))
    assert regrets(rows, ("name",)).tolist() == pytest.approx([20])  # two layouts are no choice
    assert sorted(regrets(rows, ("name",), least=2)) == pytest.approx([20, 25])
    tail = runs(("a", 1, 9.0), ("a", 2, 1.0), ("a", 3, 1.1), ("a", 4, 1.2))
    assert regrets(tail, ("name",)).tolist() == pytest.approx([800])
    assert regrets(tail, ("name",), within=5.0).tolist() == [0]


def test_noise_is_the_scatter_of_repeats_alone():
    rows = runs(("a", 1, 1.0), ("a", 1, 1.1), ("a", 1, 1.2), ("a", 1, 7.0))
    same = {column: pl.lit(1) for column in llm_accuracy.SAME_RUN}
    rows = rows.with_columns(**same | {"tp": pl.Series([1, 1, 1, 2])})
    assert noise(rows) == pytest.approx(100 * 0.1 / 1.1)
    assert noise(rows.with_columns(tp=pl.Series([1, 2, 3, 4]))) is None


def test_a_factor_changes_zero_shot_alone():
    source = next(s for s in llm_accuracy.SOURCES if s.name == "vTrain")
    found = protocols(runs(("vTrain", 2, 1), ("vTrain", 2, 1), ("tr11", 2, 1)), source)
    assert {name: values.tolist() for name, values in found.items()} == {
        "zero-shot": [2, 2],
        "others' factor": [1, 1],
        "one run": [1, 1],
    }


def test_every_row_of_the_table_belongs_to_one_source_but_for_suspects(measured):
    rows = pl.read_csv(measured / "llm_training.csv", infer_schema_length=None)
    told = llm_accuracy.table()
    assert told["row_id"].n_unique() == told.height
    left = rows.join(told, on="row_id", how="anti")
    assert left["notes"].str.contains("SUSPECT").all()
    assert told.filter(pl.col("use") == "scored")["measured_s"].null_count() == 0


@pytest.mark.parametrize("peer", [six_pt, calculon_like])
@pytest.mark.parametrize(
    ("field", "change", "least", "most"),
    [
        ("model", {"layers": 64}, 1.8, 2.0),
        ("train", {"global_batch": 128}, 1.8, 2.0),
        ("train", {"recompute": "full"}, 1.0, 1.4),
        ("cluster", {"gpu": "H100-SXM-80GB"}, 0.3, 0.8),
    ],
)
def test_closed_forms_grow_with_work_and_shrink_with_faster_gpus(peer, field, change, least, most):
    other = JOB._replace(**{field: msgspec.structs.replace(getattr(JOB, field), **change)})
    assert least <= peer(other) / peer(JOB) <= most


def test_calculons_bubble_is_that_of_1f1b():
    pipeline = JOB._replace(layout=Parallelism(pp=4, dp=2), train=Training(micro_batch=2, global_batch=16, seq=2048))
    longer = pipeline._replace(train=msgspec.structs.replace(pipeline.train, global_batch=64))
    assert calculon_like(longer) / calculon_like(pipeline) == pytest.approx((16 + 3) / (4 + 3), rel=0.05)


def test_every_row_of_the_published_table_has_one_use(measured):
    rows = {row.name.partition("/")[2]: row for row in llm_uses.use_rows()}
    every = pl.read_csv(measured / "llm_training.csv", infer_schema_length=None)
    suspect = every["notes"].fill_null("").str.contains("SUSPECT").sum()
    assert sum(row.value for row in rows.values()) == every.height
    assert rows["left out"].value == suspect > 0
    assert rows["scored"].value > every.height / 2


def test_closed_forms_that_do_better_are_named():
    note = "8 rows; median 2.0; 6PT 3.1"
    rows = [
        Row("llm_steps/a, one run, mean", 4.0, "%", "Calculon-like", 2.5, note=note),
        Row("llm_steps/b, one run, mean", 4.0, "%", "Calculon-like", 5.0, note=note),
        Row("llm_steps/c, one run, mean", 3.0, "%", "Calculon-like", 5.0, note=note),
        Row("llm_regret/vTrain, mean", 12.0, "%", "Calculon-like", 20.0, note="3 groups; 6PT 39.0"),
        Row("llm_intervals/a", 90.0, "% covered", note="8 rows"),
    ]
    found = {row.name: (row.baseline, row.baseline_value) for row in llm_uses.beside_rows(rows)}
    assert found == {
        "llm_beaten/steps: a, one run, mean": ("Calculon-like", 2.5),
        "llm_beaten/steps: b, one run, mean": ("6PT", 3.1),
        "llm_calculon/regret: vTrain, mean": ("Calculon", 10.0),
    }


def test_without_the_published_figures_a_benchmark_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmarks, "MEASURED", tmp_path)
    with pytest.raises(SystemExit, match=r"llm_training.csv is not there: put the folder .* beside the checkout"):
        next(llm_uses.use_rows())
