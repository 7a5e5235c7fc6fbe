"""Figures in JSON, and the documents that quote them."""

from __future__ import annotations

import pytest

from benchmarks import rows
from benchmarks.rows import Row, quote, read, record, record_timed, table


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", rows.documents(), ids=lambda path: path.name)
def test_documents_quote_the_figures_as_they_are(path):
    text = path.read_text()
    assert quote(text) == text, "run make tables"


def test_every_row_in_the_files_can_be_read():
    figures = [*read(rows.ACCURACY), *read(rows.RESULTS)]
    assert len({row.name for row in figures}) == len(figures)


def test_a_group_is_replaced_as_a_whole_and_others_stay(folder):
    path = folder / "accuracy.json"
    record(path, [Row("replay/a", 1.0, "%"), Row("replay/gone", 2.0, "%"), Row("other/a", 3.0, "ms")])
    record(path, [Row("replay/a", 4.0, "%", baseline="null", baseline_value=5.0, noise=0.5, target="<= 4.5")])
    assert read(path) == [
        Row("other/a", 3.0, "ms"),
        Row("replay/a", 4.0, "%", baseline="null", baseline_value=5.0, noise=0.5, target="<= 4.5"),
    ]


def test_a_table_says_what_was_met_and_leaves_out_empty_columns():
    drawn = table(
        [
            Row("speed/parse", 123_456.7, "events/s", target=">= 100000"),
            Row("speed/replay", 12.34, "events/s", baseline="a|b", baseline_value=0.5, target=">= 20"),
        ]
    )
    assert drawn.splitlines() == [
        "|  | value | beside | target |",
        "| --- | --- | --- | --- |",
        "| parse | 123,457 events/s |  | ≥ 100000, met |",
        "| replay | 12.3 events/s | 0.5 events/s a\\|b | ≥ 20, **missed** |",
    ]


def test_quoting_twice_changes_nothing_more(folder):
    record(folder / "accuracy.json", [Row("replay/a", 1.0, "%"), Row("replayed/b", 2.0, "%")])
    text = "before\n<!-- table:accuracy/replay -->\nold\n<!-- /table -->\nafter <!-- /table -->\n"
    once = quote(text)
    assert "| a | 1 % |\n<!-- /table -->\nafter" in once
    assert "old" not in once
    assert "replayed" not in once
    assert quote(once) == once


def test_a_table_without_rows_says_what_to_run(folder):
    with pytest.raises(ValueError, match=r"table:results/speed.*run make accuracy or make bench"):
        quote("<!-- table:results/speed -->\n<!-- /table -->")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param({"name": "alone"}, "has no group", id="no group"),
        pytest.param({"target": "1.5"}, "write '<= number'", id="a target without direction"),
        pytest.param({"target": "<= low"}, "write '<= number'", id="a target that is no number"),
        pytest.param({"value": float("nan")}, "a figure is finite", id="not a number"),
    ],
)
def test_rows_that_could_not_be_judged_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        Row(**({"name": "a/b", "value": 1.0, "unit": "%"} | row))


def test_two_rows_of_one_name_are_refused(folder):
    with pytest.raises(ValueError, match="two rows of one name"):
        record(folder / "accuracy.json", [Row("a/b", 1.0, "%"), Row("a/b", 2.0, "%")])


def test_a_table_of_named_rows_has_these_in_this_order_without_notes(folder):
    known = [Row("a/x, mean", 1.0, "%", note="long"), Row("b/y", 2.0, "s"), Row("b/z", 3.0, "s")]
    record(folder / "accuracy.json", known)
    text = "<!-- table:accuracy\nb/y = how long\na/x, mean\n-->\nold\n<!-- /table -->\n"
    assert quote(text).splitlines()[4:8] == ["|  | value |", "| --- | --- |", "| how long | 2 s |", "| x, mean | 1 % |"]
    assert quote(quote(text)) == quote(text)
    with pytest.raises(ValueError, match="no row 'b/w'"):
        quote(text.replace("b/y", "b/w"))


def test_the_machine_of_each_group_is_kept_beside_its_figures(folder, monkeypatch):
    for cpu, group in (("old", "load"), ("old", "graph"), ("new", "load")):
        monkeypatch.setattr("benchmarks.rows.describe_machine", lambda _device, cpu=cpu: {"cpu": cpu, "cpu_count": 2})
        record_timed(folder / "results.json", [Row(f"{group}/a", 1.0, "s")])
    rows = {row.name: row.note for row in read(folder / "results.json")}
    assert rows == {"graph/a": "", "load/a": "", "machines/graph": "old", "machines/load": "new"}
