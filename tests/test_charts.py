"""Charts: what is drawn, that nothing is lost where ops are merged, and that every renderer draws it."""

from __future__ import annotations

import base64
import json
import struct
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from xml.etree import ElementTree as ET

import altair as alt
import numpy as np
import polars as pl
import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st

from lumos_nb import charts
from lumos_nb.charts import breakdown_bars, mime_bundle, predicted_vs_measured, style, timeline
from lumos_nb.charts.lane_bars import ACTIVITIES, lane_bars
from lumos_nb.critical_path import Result, replay
from lumos_nb.errors import LumosError, SchemaError
from lumos_nb.graph import Graph
from lumos_nb.partition import PARTS, breakdown
from lumos_nb.schema import EDGES, OP_KINDS, OPS

ZERO_NS = 1_712_195_495_519_689_123
MS = 1_000_000


@dataclass(frozen=True)
class Workload:
    ops: pl.DataFrame


def op(kind: str, start: int, dur: int, lane: str = "gpu0:7", **more: object) -> dict[str, object]:
    """A row of rank 0 in step 1, in ns from `ZERO_NS`; the device follows from the lane."""
    device = int(lane[3 : lane.index(":")]) if lane.startswith("gpu") else None
    row = {"rank": 0, "step": 1, "lane": lane, "device": device, "kind": kind, "name": f"a {kind}"}
    return row | {"start_ns": ZERO_NS + start, "dur_ns": dur} | more


def table(*rows: dict[str, object]) -> pl.DataFrame:
    return pl.DataFrame([{"op_id": n} | row for n, row in enumerate(rows)], schema=dict(OPS.columns))


def late_rank() -> Result:
    """Rank 0 waits at a collective for rank 1, which computes longer, and computes once more after it."""
    ops = table(
        op("boundary", 0, MS, "net", step=0, device=0),
        op("cpu", 0, 2 * MS, "cpu:9", name="forward"),
        op("kernel", 2 * MS, 3 * MS, name="matmul"),
        op("event", 5 * MS, 0, collective="all_reduce"),
        op("cpu", 0, 2 * MS, "cpu:9", rank=1, name="forward"),
        op("kernel", 2 * MS, 7 * MS, rank=1, name="matmul"),
        op("event", 9 * MS, 0, rank=1, collective="all_reduce"),
        op("join", 9 * MS, 0, "net", name="all_reduce of 2 ranks"),
        op("comm", 9 * MS, 2 * MS, collective="all_reduce", name="ring"),
        op("comm", 9 * MS, 1 * MS, rank=1, collective="all_reduce", name="ring"),
        op("kernel", 11 * MS, 4 * MS, name="optimizer"),
    )
    pairs = [(1, 2), (2, 3), (4, 5), (5, 6), (3, 7), (6, 7), (7, 8), (7, 9), (8, 10)]
    edges = [(src, dst, 0, False, "any", "exact", True) for src, dst in pairs]
    return replay(Graph(ops, pl.DataFrame(edges, schema=dict(EDGES.columns), orient="row"), 1))


@pytest.fixture(scope="module")
def result() -> Result:
    return late_rank()


def spec_of(chart: alt.TopLevelMixin) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict()
    return spec


def data_of(spec: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Rows of every layer of a chart, or of its only one."""
    return [spec["datasets"][layer["data"]["name"]] for layer in spec.get("layer", [spec])]


def marks(spec: dict[str, Any], version: str = "6.4") -> Counter[str]:
    """How many marks of each role the SVG has, axes and legends not counted."""
    root = ET.fromstring(vl_convert.vegalite_to_svg(spec, vl_version=version))
    found: Counter[str] = Counter()
    for group in root.iter("{http://www.w3.org/2000/svg}g"):
        role = group.get("class", "")
        if "role-mark" in role and "role-mark" in role.split():
            found[role.split()[0].removeprefix("mark-")] += len(group)
    return found


def texts(spec: dict[str, Any]) -> list[str]:
    root = ET.fromstring(vl_convert.vegalite_to_svg(spec, vl_version="6.4"))
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_timeline_has_a_bar_an_op_and_one_for_each_wait(result):
    bars, stays, links, _ = data_of(spec_of(timeline(result)))
    drawn = {(bar["label"], bar["name"], bar["start_ms"], bar["end_ms"]) for bar in bars}
    assert drawn == {
        ("rank 0 · cpu:9", "forward", 0, 2),
        ("rank 0 · gpu0:7", "matmul", 2, 5),
        ("rank 0 · gpu0:7", "waiting: all_reduce", 5, 9),
        ("rank 0 · gpu0:7", "ring", 9, 11),
        ("rank 0 · gpu0:7", "optimizer", 11, 15),
        ("rank 1 · cpu:9", "forward", 0, 2),
        ("rank 1 · gpu0:7", "matmul", 2, 9),
        ("rank 1 · gpu0:7", "ring", 9, 10),
    }
    assert [(stay["label"], stay["start_ms"], stay["end_ms"]) for stay in stays] == [
        ("rank 1 · cpu:9", 0, 2),
        ("rank 1 · gpu0:7", 2, 9),
        ("rank 0 · gpu0:7", 9, 15),
    ]
    assert [(link["from_label"], link["from_ms"], link["label"], link["start_ms"]) for link in links] == [
        ("rank 1 · cpu:9", 2, "rank 1 · gpu0:7", 2),
        ("rank 1 · gpu0:7", 9, "rank 0 · gpu0:7", 9),
    ]


def test_a_line_along_the_path_leads_over_the_lag_between_two_ops():
    ops = table(op("launch", 0, 2 * MS, "cpu:9"), op("kernel", 3 * MS, 5 * MS))
    late = pl.DataFrame([(0, 1, MS, False, "launch", "exact", True)], schema=dict(EDGES.columns), orient="row")
    *_, links = data_of(spec_of(timeline(replay(Graph(ops, late, 1)))))
    assert [(link["from_ms"], link["start_ms"]) for link in links] == [(2, 3)]


def test_lanes_are_in_order_and_axes_have_units(result):
    spec = spec_of(timeline(result))
    encoding = spec["layer"][0]["encoding"]
    assert encoding["y"]["scale"]["domain"] == [
        "rank 0 · cpu:9",
        "rank 0 · gpu0:7",
        "rank 1 · cpu:9",
        "rank 1 · gpu0:7",
    ]
    assert encoding["x"]["title"] == "time (ms)"
    assert encoding["x"]["scale"]["domain"] == [0, 15]
    assert spec["title"]["text"] == "Step 1 as replayed"


def test_streams_go_by_number_after_the_threads():
    lanes = ["gpu1:7", "gpu0:20", "gpu0:7", "cpu:10", "cpu:9", "net:send:1"]
    drawn = lane_bars(table(*(op("kernel", 0, 5, lane) for lane in lanes)))
    assert [lane.split(" · ")[1] for lane in drawn.lanes] == [
        *("cpu:9", "cpu:10"),
        *("gpu0:7", "gpu0:20", "gpu1:7", "net:send:1"),
    ]


def test_tooltips_name_the_op_its_place_duration_and_slack(result):
    spec = spec_of(timeline(result))
    assert [field["field"] for field in spec["layer"][0]["encoding"]["tooltip"]] == [
        *("name", "kind", "shapes", "rank", "lane", "start", "duration", "slack", "ops")
    ]
    matmul = next(bar for bar in data_of(spec)[0] if bar["name"] == "matmul" and bar["rank"] == 0)
    expected = {"kind": "kernel", "lane": "gpu0:7", "duration": "3.00 ms", "slack": "4.00 ms", "ops": 1}
    assert matmul.items() >= expected.items()


def test_operators_are_compute_only_where_there_is_no_device():
    ops = table(op("cpu", 0, 5, "cpu:9"), op("kernel", 0, 5), op("cpu", 0, 5, "cpu:9", rank=1))
    bars = lane_bars(ops).bars
    assert dict(bars.select("label", "activity").iter_rows()) == {
        "rank 0 · cpu:9": "host operator",
        "rank 0 · gpu0:7": "compute",
        "rank 1 · cpu:9": "compute",
    }


def test_a_blocking_call_waits_from_the_op_before_it_to_what_remains_of_it():
    sync = op("wait", 10, 1, "cpu:9", name="cudaStreamSynchronize")
    ops = table(op("launch", 0, 2, "cpu:9"), op("kernel", 1, 9), sync)
    waits = lane_bars(ops).bars.filter("waits")
    assert waits.select("label", "name", "start_ns", "end_ns").rows() == [
        ("rank 0 · cpu:9", "waiting: cudaStreamSynchronize", 2, 10)
    ]


def test_a_window_cuts_and_ranks_choose(result):
    bars, stays, links = data_of(spec_of(timeline(result, window_ns=(4 * MS, 10 * MS), ranks=[0])))
    assert [(bar["name"], bar["start_ms"], bar["end_ms"]) for bar in sorted(bars, key=lambda bar: bar["start_ms"])] == [
        ("matmul", 4, 5),
        ("waiting: all_reduce", 5, 9),
        ("ring", 9, 10),
    ]
    assert [(stay["start_ms"], stay["end_ms"]) for stay in stays] == [(9, 10)]
    assert links == []


def busy_ns(ops: pl.DataFrame) -> dict[str, int]:
    """Time of the ops on each lane."""
    lanes = ops.group_by("rank", "lane").agg(pl.col("dur_ns").sum()).filter(pl.col("dur_ns") > 0)
    return {f"rank {rank} · {lane}": dur for rank, lane, dur in lanes.iter_rows()}


@st.composite
def busy_lanes(draw: st.DrawFn) -> pl.DataFrame:
    """Lanes of ops one after the other, some of them far longer than others."""
    rows = []
    for lane in ("cpu:1", "cpu:2", "gpu0:7"):
        end = 0
        for gap, dur in draw(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 3, 50, 900])), max_size=80)):
            rows.append(op("kernel" if lane.startswith("gpu") else "cpu", end + gap, dur, lane))
            end += gap + dur
    return table(*rows, op("cpu", 0, 1, "cpu:3"))


@settings(max_examples=60, deadline=None)
@given(ops=busy_lanes(), columns=st.integers(1, 400), max_rows=st.integers(8, 300))
def test_merging_keeps_to_the_rows_allowed_and_loses_no_op_and_no_busy_time(ops, columns, max_rows):
    drawn = lane_bars(ops, columns=columns, max_rows=max_rows)
    assert drawn.rows <= max_rows
    assert dict(drawn.bars.group_by("label").agg(pl.col("busy_ns").sum()).iter_rows()) == busy_ns(ops)
    assert drawn.bars["ops"].sum() == (ops["dur_ns"] > 0).sum()
    assert drawn.bars.filter(pl.col("end_ns") - pl.col("start_ns") < pl.col("busy_ns")).is_empty()


@pytest.mark.parametrize("max_rows", [30, 100, 3000])
def test_the_longest_ops_are_drawn_by_themselves_whatever_is_merged(max_rows):
    rows = [op("cpu", 10 * n, 1 + n % 9, "cpu:1") for n in range(2000)]
    longest = [op("cpu", 20_000 + 3000 * n, 2000 + n, "cpu:1") for n in range(10)]
    bars = lane_bars(table(*rows, *longest), columns=5000, max_rows=max_rows).bars
    alone = bars.filter(pl.col("ops") == 1).sort("dur_ns", descending=True)
    assert alone["dur_ns"].head(10).to_list() == [2000 + n for n in reversed(range(10))]


def zigzag(n: int) -> Result:
    """A path that goes back and forth between a thread and a stream, `n` times, beside a lane that it never touches."""
    rows, edges = [], []
    for k in range(n):
        rows += [op("launch", 20 * k, 10, "cpu:1"), op("kernel", 20 * k + 10, 10), op("cpu", 20 * k, 5, "cpu:2")]
        edges += [(3 * k, 3 * k + 1), *([(3 * k - 2, 3 * k)] if k else [])]
    full = [(src, dst, 0, False, "any", "exact", True) for src, dst in edges]
    return replay(Graph(table(*rows), pl.DataFrame(full, schema=dict(EDGES.columns), orient="row"), 1))


@pytest.mark.parametrize("max_rows", [12, 200, 5000])
def test_the_path_is_outlined_however_much_is_merged(max_rows):
    result = zigzag(1000)
    assert len(result.path) == 2000
    drawn = lane_bars(result, columns=100_000, max_rows=max_rows)
    assert drawn.rows <= max_rows
    at_ns = result.path["start_ns"] - result.origin_ns
    for label, start, end in drawn.stays.select("label", "start_ns", "end_ns").iter_rows():
        on_lane = at_ns.filter("rank 0 · " + result.path["lane"] == label)
        assert on_lane.is_between(start, end).any()
    for lane in ("cpu:1", "gpu0:7"):
        stays = drawn.stays.filter(pl.col("lane") == lane)
        for at in at_ns.filter(result.path["lane"] == lane):
            assert any(start <= at < end for start, end in stays.select("start_ns", "end_ns").iter_rows())
    assert "rank 0 · cpu:2" not in set(drawn.stays["label"])


def test_the_subtitle_counts_what_was_merged():
    rows = [op("cpu", n, 1, "cpu:1") for n in range(500)] + [op("cpu", 500, 500, "cpu:1")]
    title = spec_of(timeline(table(*rows), width_px=10))["title"]
    assert title["text"] == "Ops"
    assert title["subtitle"] == "500 of 501 ops are short: merged into 5 bars"


@pytest.mark.parametrize("version", ["6.4", "5.20"], ids=["Vega-Lite 6 draws it", "JupyterLab's 5 draws it"])
def test_every_row_becomes_a_mark(result, version):
    spec = spec_of(timeline(result))
    bars, stays, links, begins = data_of(spec)
    assert marks(spec, version) == {"rect": len(bars) + len(stays), "rule": len(links) + len(begins)}


def test_a_dashed_line_marks_where_the_step_begins_once_earlier_work_has_ended():
    backlog = op("boundary", 0, 3 * MS, step=0, name="backlog")
    rows = table(backlog, op("cpu", 0, 1 * MS, "cpu:9"), op("kernel", 3 * MS, 4 * MS))
    spec = spec_of(timeline(rows))
    assert data_of(spec)[-1] == [{"step_ms": 3}]
    assert spec["title"]["subtitle"] == "every op drawn; dashed: the step begins"
    beyond = spec_of(timeline(rows, window_ns=(4 * MS, 5 * MS)))
    assert len(beyond["layer"]) == 3
    assert beyond["title"]["subtitle"] == "every op drawn"


def test_an_svg_draws_the_same_marks_without_the_names_of_ops():
    rows = table(op("kernel", 0, 4 * MS, name="<script>alert(1)</script>"))
    svg = charts.to_svg(timeline(rows))
    assert "alert" not in svg
    assert "rank 0 · gpu0:7" in svg


def test_breakdowns_are_drawn_part_by_part_beside_each_other(result):
    spec = spec_of(breakdown_bars({"measured": breakdown(result.graph), "replayed": breakdown(result)}))
    (rows,) = data_of(spec)
    encoding = spec["encoding"]
    assert encoding["y"]["scale"]["domain"] == [f"rank {r} {what}" for r in (0, 1) for what in ("measured", "replayed")]
    present = encoding["color"]["scale"]["domain"]
    assert present == [part for part in PARTS if part in present]
    assert set(present) == {row["part"] for row in rows}
    assert encoding["x"]["title"] == "time in the step (ms)"
    by_rank = Counter[str]()
    for row in rows:
        by_rank[row["label"]] += row["time_ms"]
    assert by_rank["rank 0 replayed"] == pytest.approx(14)
    assert [row["place"] for row in rows] == [PARTS.index(row["part"]) for row in rows]
    assert encoding["order"]["field"] == "place"
    assert marks(spec)["rect"] == len(rows)


def test_one_breakdown_needs_no_name(result):
    spec = spec_of(breakdown_bars(breakdown(result)))
    assert spec["encoding"]["y"]["scale"]["domain"] == ["rank 0", "rank 1"]


SCORED = pl.DataFrame(
    {
        "step": [3, 4, 5],
        "measured_ns": [20 * MS, 22 * MS, 21 * MS],
        "predicted_ns": [20 * MS, 23 * MS, 20 * MS],
        "null_ns": [22 * MS, 20 * MS, 22 * MS],
    }
)


def test_a_prediction_is_three_points_a_step_with_its_error():
    spec = spec_of(predicted_vs_measured(SCORED))
    (rows,) = data_of(spec)
    assert len(rows) == 9
    assert [row["error"] for row in rows if row["step"] == 4 and row["series"] == "predicted"] == ["4.5 %"]
    assert spec["encoding"]["y"]["title"] == "step time (ms)"
    assert marks(spec)["symbol"] == 9


ODD = "</script><b>\"x\"</b>\\ & 'y' {z} [0].a\tÜ"


def test_odd_names_are_shown_as_they_are():
    chart = timeline(table(op("cpu", 0, MS, f"cpu:{ODD}", name=ODD)), title=ODD)
    spec = spec_of(chart)
    assert data_of(spec)[0][0]["name"] == ODD
    shown = texts(spec)
    assert any("</script><b>" in text for text in shown)
    assert marks(spec)["rect"] == 1


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        pytest.param(lambda: timeline(OPS.empty()), LumosError, "The table has 0 ops", id="an op table without rows"),
        pytest.param(
            lambda: timeline(table(op("event", 0, 0))), LumosError, "no op takes time", id="ops without duration"
        ),
        pytest.param(
            lambda: timeline(table(op("cpu", 0, 5, "cpu:1")), ranks=[7]),
            LumosError,
            r"of ranks \[0\]",
            id="no such rank",
        ),
        pytest.param(
            lambda: timeline(table(op("cpu", 0, 5, "cpu:1")), window_ns=(9, 20)),
            LumosError,
            "nothing runs from 9 to 20 ns; the ops run from 0 to 5 ns",
            id="an empty window",
        ),
        pytest.param(
            lambda: timeline(table(*(op("cpu", 0, 5, f"cpu:{n}") for n in range(9))), max_rows=8),
            LumosError,
            "9 lanes need 9 rows",
            id="more lanes than rows",
        ),
        pytest.param(lambda: timeline(table().drop("lane")), SchemaError, "lacks column.* lane", id="no lanes"),
        pytest.param(
            lambda: timeline(table(op("nap", 0, 5))), SchemaError, "op 0 is of kind 'nap'", id="a kind that is none"
        ),
        pytest.param(
            lambda: breakdown_bars(pl.DataFrame({"rank": [0], "part": ["other"], "time_ns": [0]})),
            LumosError,
            "no part of any rank takes time",
            id="a breakdown of nothing",
        ),
        pytest.param(lambda: breakdown_bars({}), LumosError, "no part of any rank", id="no breakdown"),
        pytest.param(
            lambda: breakdown_bars(pl.DataFrame({"rank": [0], "part": ["sleep"], "time_ns": [1]})),
            SchemaError,
            "the part 'sleep'",
            id="a part that is none",
        ),
        pytest.param(
            lambda: breakdown_bars(pl.DataFrame({"rank": [0]})), SchemaError, "lacks .* part, time_ns", id="no parts"
        ),
        pytest.param(lambda: predicted_vs_measured(SCORED.clear()), LumosError, "no row", id="no steps"),
        pytest.param(
            lambda: predicted_vs_measured(SCORED.drop("null_ns")), SchemaError, "lacks .* null_ns", id="no null"
        ),
    ],
)
def test_what_cannot_be_drawn_says_why(draw, error, message):
    with pytest.raises(error, match=message):
        draw()


def test_every_kind_and_every_part_has_a_colour():
    assert set(ACTIVITIES) == set(OP_KINDS)
    assert set(ACTIVITIES.values()) | {"compute"} == set(style.ACTIVITY_COLOURS)
    assert set(style.PART_COLOURS) == set(PARTS)


def seen(colour: str, matrix: np.ndarray) -> np.ndarray:
    """CIELAB of a colour as an eye sees it whose linear RGB is `matrix` times ours."""
    srgb = np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(matrix @ linear, 0, 1) / (to_xyz @ np.ones(3))
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


EYES = {
    "most people": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopes": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.052]],
    "deuteranopes": [[0.3673, 0.8606, -0.228], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
}


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("palette", ["ACTIVITY_COLOURS", "PART_COLOURS"])
@pytest.mark.parametrize("blue", [style.COMPUTE, style.PALER], ids=["on light", "on dark"])
def test_colours_are_told_apart_by(eyes, palette, blue):
    """Colour blindness after Machado, Oliveira and Fernandes (2009), severity 1."""
    matrix, colours = np.array(EYES[eyes]), {**getattr(style, palette), "compute": blue}
    for (a, first), (b, second) in combinations(colours.items(), 2):
        assert np.linalg.norm(seen(first, matrix) - seen(second, matrix)) > 10, f"{a} and {b}"


@pytest.mark.parametrize("static", ["1", "0"], ids=["with a PNG", "without"])
def test_a_notebook_gets_what_jupyterlab_draws_and_a_png(result, monkeypatch, static):
    monkeypatch.setenv("LUMOS_NB_STATIC", static)
    bundle, metadata = mime_bundle(spec_of(timeline(result, width_px=300)))
    drawn = bundle["application/vnd.vegalite.v5+json"]
    assert json.loads(json.dumps(drawn)) == drawn
    assert drawn["$schema"].endswith("/v5.json")
    assert ("image/png" in bundle) == (static == "1")
    if static == "1":
        assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
        assert 300 < metadata["image/png"]["width"] < 700
        assert metadata["image/png"]["alt"].startswith(spec_of(timeline(result, width_px=300))["title"]["text"])


def pixels(png: bytes) -> bytes:
    """What the image data of a PNG file holds, its checksums checked."""
    data, at = b"", 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        body, checksum = png[at + 8 : at + 8 + size], png[at + 8 + size : at + 12 + size]
        assert zlib.crc32(kind + body) == int.from_bytes(checksum)
        data += body if kind == b"IDAT" else b""
        at += size + 12
    return zlib.decompress(data)


def test_a_png_is_vl_converts_image_in_half_the_bytes_or_less(result):
    spec = spec_of(timeline(result))
    drawn = vl_convert.vegalite_to_png(spec, vl_version="6.4", scale=2)
    png = charts.to_png(spec)
    assert png.startswith(drawn[:33])  # signature and header: the same size and depth
    assert pixels(png) == pixels(drawn)
    assert len(png) < len(drawn) / 2
    assert len(charts.to_png(timeline(result), scale=1)) < len(png)


def test_importing_charts_in_ipython_makes_it_the_renderer_and_elsewhere_does_not():
    code = "from lumos_nb import charts; import altair; print(altair.renderers.active)"
    in_ipython = f"from IPython.core.interactiveshell import InteractiveShell as S; S.instance().run_cell({code!r})"
    active = [
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True).stdout.split()
        for c in (in_ipython, code)
    ]
    assert active == [["lumos_nb"], ["default"]]
