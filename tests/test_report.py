"""A step's report: its tables add up, and it can be read as text, JSON and HTML, whatever the names in the trace."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import report as reports
from lumos_nb.critical_path import Result, replay
from lumos_nb.errors import LumosError, ScenarioError
from lumos_nb.evaluate import mechanistic
from lumos_nb.findings import evidence_shares, exposed_communication, parts_by_rank, path_by_name, waits_for
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.report import Report, comparison_report, step_report, write_report
from lumos_nb.schema import EDGES, OPS
from tests.trace_builder import Trace, repeated, write_kineto

MS = 1_000_000
HOSTILE = """</td><script>alert("1")</script> & {braces} \x1b[2J"""


@pytest.fixture(scope="module")
def run() -> ln.Run:
    return ln.load_run(ln.datasets.path("gpt-ddp"))


@pytest.fixture(scope="module")
def recording(run) -> Recording:
    return Recording.of(run)


@pytest.fixture(scope="module")
def result(recording) -> Result:
    return replay(build_graph(recording, 5))


@pytest.fixture(scope="module")
def report(run, recording) -> Report:
    return step_report(run, 5, scales={"cpu": 0.5}, recording=recording)


def op(kind: str, start: int, dur: int, lane: str = "gpu0:7", rank: int = 0, **more: object) -> dict[str, object]:
    device = int(lane[3 : lane.index(":")]) if lane.startswith("gpu") else None
    row = {"rank": rank, "step": 1, "lane": lane, "device": device, "kind": kind, "name": f"a {kind}"}
    return row | {"start_ns": start * MS, "dur_ns": dur * MS} | more


def graph_of(rows: list[dict[str, object]], edges: list[tuple[int, int, str]]) -> Graph:
    ops = pl.DataFrame([{"op_id": n} | row for n, row in enumerate(rows)], schema=dict(OPS.columns))
    links = [(src, dst, 0, False, rule, "exact", True) for src, dst, rule in edges]
    return Graph(ops, pl.DataFrame(links, schema=dict(EDGES.columns), orient="row"), 1)


def late_rank() -> Graph:
    """Rank 1's kernel is launched late; both meet in a collective; rank 0's other stream waits for a record."""
    rows = [
        op("launch", 0, 1, "cpu:1", name="launch"),
        op("kernel", 1, 2, name="matmul"),
        op("event", 3, 0, collective="all_reduce", name="arrival"),
        op("launch", 0, 5, "cpu:1", 1, name="launch"),
        op("boundary", 0, 1, rank=1, step=0, name="backlog"),
        op("memset", 1, 1, rank=1, name="clear"),
        op("kernel", 5, 3, rank=1, name="matmul"),
        op("event", 8, 0, rank=1, collective="all_reduce", name="arrival"),
        op("join", 8, 0, "net"),
        op("comm", 8, 2, collective="all_reduce", name="ring"),
        op("comm", 8, 2, rank=1, collective="all_reduce", name="ring"),
        op("event", 10, 0, name="record"),
        op("memset", 0, 1, "gpu0:9", name="clear"),
        op("event", 10, 0, "gpu0:9", name="wait"),
        op("kernel", 10, 1, "gpu0:9", name="update"),
    ]
    edges = [(0, 1, "launch"), (1, 2, "stream"), (2, 8, "collective"), (3, 6, "launch"), (4, 5, "stream")]
    edges += [(5, 6, "stream"), (6, 7, "stream"), (7, 8, "collective"), (8, 9, "collective"), (8, 10, "collective")]
    edges += [(9, 11, "stream"), (11, 13, "event"), (12, 13, "stream"), (13, 14, "stream")]
    return graph_of(rows, edges)


@pytest.mark.parametrize("source", [late_rank(), replay(late_rank())], ids=["measured", "replayed"])
def test_waiting_is_laid_to_the_launch_the_late_rank_and_the_work_before_the_record(source):
    found = waits_for(source).select("rank", "lane", "for_rank", "for_lane", "rule", "time_ns", "mostly").rows()
    assert found == [
        (0, "gpu0:9", 0, "gpu0:7", "event", 9 * MS, "all_reduce"),
        (0, "gpu0:7", 1, "gpu0:7", "collective", 5 * MS, "all_reduce"),
        (1, "gpu0:7", 1, "cpu:1", "launch", 3 * MS, "launch"),
    ]


def test_waits_are_asked_of_a_graph_not_of_a_table():
    with pytest.raises(LumosError, match="a Graph or a Result; it was given a DataFrame"):
        waits_for(pl.DataFrame())


def test_the_parts_and_the_path_add_up_to_the_step(result):
    parts = parts_by_rank(result)
    assert parts.select(pl.sum_horizontal(pl.exclude("rank", "step_ns")) == pl.col("step_ns")).to_series().all()
    assert parts["step_ns"].max() == pytest.approx(result.step_ns, rel=0.01)
    path = path_by_name(result)
    assert path["time_ns"].sum() == result.step_ns
    assert path["share"].sum() == pytest.approx(1)
    exposed = exposed_communication(result)
    of_parts = ln.breakdown(result).filter(pl.col("part").str.starts_with("exposed_"))["time_ns"].sum()
    assert exposed["exposed_ns"].sum() == of_parts > 0
    assert exposed.select((pl.col("wait_ns") + pl.col("transfer_ns") == pl.col("exposed_ns")).all()).item()


def test_evidence_counts_every_link_once(result):
    shares = evidence_shares(result.graph)
    assert shares.filter(pl.col("evidence") != "nothing")["links"].sum() == len(result.graph.edges)
    assert shares["share"].sum() == pytest.approx(1)


def test_the_report_does_not_pass_a_replay_off_as_a_prediction(report, recording):
    scored = mechanistic(recording, [4, 5, 6])
    assert report["prediction"]["predicted_ns"].to_list() == scored["predicted_ns"].to_list()
    predicted_ns, error, null_error = (
        scored.filter(pl.col("step") == 5).select("predicted_ns", "error", "null_error").row(0)
    )
    assert "the same by construction, which proves nothing" in report.summary
    assert f"{predicted_ns / 1e6:.1f} ms: an error of {error:.1%}".replace("%", " %") in report.summary
    assert f"{null_error:.1%}".replace("%", " %") in report.summary
    assert report.claim["model_error"] == scored["error"].abs().max()


def test_a_prediction_that_is_not_asked_for_or_has_no_ground_is_said_to_be_missing(run, recording, tmp_path):
    left_out = step_report(run, 5, predict=0, recording=recording)
    assert left_out["prediction"].is_empty()
    assert "There is no prediction from other steps" in left_out.summary
    trace = repeated(lambda t, _n, at: t.launch("matmul", (at + 1, at + 3), (at + 10, at + 900)) and None, steps=1)
    one = step_report(ln.load_run(write_kineto(trace, tmp_path / "one.json"), cache=False))
    assert "There is no prediction from other steps" in str(one)


def test_a_what_if_of_ones_own_stands_beside_the_others_and_becomes_the_claim(report, result):
    asked = report["what_ifs"].row(-1, named=True)
    swept = ln.sweep(ln.repeat(result.graph), [{"cpu": 0.5}])
    assert asked["change"] == "cpu × 0.5"
    assert asked["step_ns"] == swept["step_ns"][0]
    assert report.claim["change"] == "cpu × 0.5"
    assert report.claim["times"] == pytest.approx(1 + swept["change"][0])


def test_text_and_json_have_every_section(report):
    text, rows = str(report), json.loads(json.dumps(report.rows(), allow_nan=False))
    for section in report.sections:
        assert section.title.upper() in text
        assert len(rows[section.key]) == section.table.height
    assert max(map(len, text.splitlines())) < 180
    assert rows["breakdown"][0]["step_ns"] == report["breakdown"]["step_ns"][0]


def test_a_long_name_is_cut_where_it_says_least(report):
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::Array<int> >(int)"
    table = pl.DataFrame({"name": [name, "aten::mul", "y" * 99], "share": [0.5, 0.25, 0.25]})
    path = reports.Section("path", "Path", "", table)
    text = str(replace(report, sections=(path,)))
    assert "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>…" in text
    assert "aten::mul" in text
    assert "y" * 55 + "…" in text


def test_a_section_without_rows_says_so(report):
    empty = replace(report, sections=(reports.Section("waits", "Waits", "", pl.DataFrame({"rank": []})),))
    assert str(empty).endswith("WAITS\n(none)")
    assert "(none)" in Page(empty.page()).texts


class Page(HTMLParser):
    """Tags with their attributes, and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def hostile_trace() -> Trace:
    def body(trace: Trace, _step: int, at: float) -> None:
        trace.op(HOSTILE, at + 5, at + 200)
        trace.launch(HOSTILE + "x" * 3000, (at + 10, at + 12), (at + 20, at + 900))

    return repeated(body)


def test_names_of_a_trace_are_text_in_the_page_and_cannot_steer_a_terminal(tmp_path):
    path = write_kineto(hostile_trace(), tmp_path / "<b>&.json")
    report = step_report(ln.load_run(path, cache=False), 2)
    page = report.page()
    tags = Page(page).tags
    assert {tag for tag, _ in tags} & {"script", "b", "iframe", "link", "object"} == set()
    assert any("<script>" in text for text in Page(page).texts)
    assert "x" * 1000 not in page
    assert "<b>&amp;.json" not in page
    assert "\x1b" not in str(report) + page
    assert any(HOSTILE in row["name"] for row in report.rows()["path"])


def test_the_page_loads_nothing_and_holds_its_charts(report):
    page = report.page()
    tags = Page(page).tags
    sources = [value or "" for _, attributes in tags for name, value in attributes.items() if name in ("src", "href")]
    assert len(sources) == 3
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert all(attributes["alt"] for tag, attributes in tags if tag == "img")
    assert "default-src 'none'" in page
    assert len(page) < 1_000_000


def test_without_altair_the_page_says_why_it_has_no_charts(report, monkeypatch):
    monkeypatch.setattr(reports, "_CAN_DRAW", False)
    page = report.page()
    assert "altair and vl-convert are not installed" in page
    assert "img" not in {tag for tag, _ in Page(page).tags}


def test_of_many_lanes_those_of_the_ranks_on_the_path_are_drawn_and_the_rest_named(report):
    rows = [op("kernel", 0, 5 + (rank == 33), f"gpu0:{lane}", rank) for rank in range(60) for lane in range(7)]
    wide = replay(graph_of(rows, []))
    shown = reports._ranks_to_draw(wide)
    assert len(shown) == 14
    assert 33 in shown
    page = replace(report, result=wide).page()
    assert f"Ranks {', '.join(map(str, shown))} of 60" in page
    alone = [op("kernel", 0, 5, f"gpu0:{lane}", rank) for rank in range(2) for lane in range(120)]
    assert reports._ranks_to_draw(replay(graph_of(alone, []))) == [0]


def test_a_report_of_a_few_ranks_of_many_says_so(tmp_path):
    trace = repeated(
        lambda t, _n, at: t.launch("matmul", (at + 1, at + 3), (at + 10, at + 900)) and None, world_size=64
    )
    report = step_report(ln.load_run(write_kineto(trace, tmp_path / "rank-0.json"), cache=False))
    assert report.title.endswith("rank-0.json: 1 of 64 ranks, what the others did is estimated")
    assert report["notes"].filter(pl.col("what") == "missing ranks")["count"].to_list() == [63]


def test_the_files_written_are_what_was_replayed(report, run, tmp_path):
    written = write_report(report, tmp_path, run=run)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in written)
    assert pl.read_parquet(tmp_path / "ops.parquet").equals(report.result.ops)
    assert pl.read_parquet(tmp_path / "edges.parquet").equals(report.result.graph.edges)
    assert (tmp_path / "report.html").read_text() == report.page()


def test_what_cannot_be_written_is_an_error_that_names_the_file(report, tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(LumosError, match=r"report\.html cannot be written"):
        write_report(report, tmp_path)
    assert not [path for path in tmp_path.iterdir() if "part" in path.name]
    with pytest.raises(LumosError, match=r"ops\.parquet cannot be written"):
        write_report(report, tmp_path / "absent")


def test_only_the_report_of_a_step_can_be_written(recording, tmp_path):
    with pytest.raises(LumosError, match="has no replayed step to write"):
        write_report(comparison_report(recording, recording, (3, 4)), tmp_path)


def test_every_level_of_a_comparison_adds_up_to_the_difference_that_its_summary_states(recording):
    report = comparison_report(recording, recording, (3, 4), names=("monday", "tuesday"))
    total = report["step"]["mean_diff_ns"].item()
    assert f"b takes {-total / 1e6:.2f} ms less than a" in report.summary
    for section in report.sections[1:]:
        assert section.table["mean_diff_ns"].sum() == pytest.approx(total)
    assert report["runs"].select("name", "step").rows() == [("monday", 3), ("tuesday", 4)]


def test_a_report_shows_itself_in_a_notebook(report):
    assert {tag for tag, _ in Page(report._repr_html_()).tags} >= {"h2", "table"}


def test_a_real_run_of_four_ranks_is_reported_with_waits_between_them(traces: Path):
    run = ln.load_run(traces / "torchrec" / "sst_long_a2a_optimizer_4")
    report = step_report(run, 5, predict=2)
    assert abs(report["prediction"].filter(pl.col("step") == 5)["error_share"].item()) < 0.015
    between = report["waits"].filter((pl.col("rank") != pl.col("for_rank")) & (pl.col("rule") == "collective"))
    assert between.head(3)["for_rank"].to_list() == [2, 2, 2]
    assert report["path"]["time_ns"].sum() == report.result.step_ns
    assert len(report.page()) < 1_000_000


def test_a_partial_capture_says_what_the_absent_ranks_may_change(tmp_path):
    for rank in (0, 1, 2, 4, 5, 6):
        name = f"rank-{rank}.json.gz"
        (tmp_path / name).write_bytes((ln.datasets.path("gpt-grid") / name).read_bytes())
    text = str(step_report(ln.load_run(tmp_path, cache=False), predict=0))
    assert "6 of 20 ranks, what the others did is estimated" in text
    assert " ranks without a trace it takes " in " ".join(text.split())


def test_scales_of_a_report_that_cannot_be_are_named(run) -> None:
    for scales in ({"cpu": 10**400}, {"cpu": "2"}, {"cpu": True}):
        with pytest.raises(ScenarioError, match="the scale of 'cpu' is"):
            step_report(run, 5, predict=0, scales=scales)  # type: ignore[arg-type]
    assert "cpu × 0.5, comm × 1" in str(step_report(run, 5, predict=0, scales={"cpu": Fraction(1, 2), "comm": None}))
