"""The graph of a window: boxes that follow from the edges, few enough to be read."""

from __future__ import annotations

import networkx as nx
import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import charts
from lumos_nb.charts.dependencies import boxes_of
from lumos_nb.charts.lane_bars import LABEL, with_activity
from lumos_nb.errors import InputError, LumosError


@pytest.fixture(scope="module")
def result() -> ln.Result:
    return ln.replay(ln.build_graph(ln.load_run(ln.datasets.path("gpt-tp"))))


def layer(name: str | None, kind: str = "kernel") -> dict[str, object]:
    return {"layer": name, "kind": kind, "phase": "forward", "rank": 0, "dur_ns": 1000}


def boxes(lanes: dict[str, list[dict[str, object]]], edges: list[tuple[int, int]], detail: str, room: int = 20):
    """Ops numbered lane by lane, each starting a microsecond after the one before it anywhere."""
    rows = [row | {"lane": lane} for lane, ops in lanes.items() for row in ops]
    ops = pl.DataFrame(rows, infer_schema_length=None).with_columns(
        op_id=pl.int_range(pl.len()), name=pl.format("op{}", pl.int_range(pl.len())), start_ns=pl.col("at"),
        device=pl.lit(0, pl.Int32), label=LABEL,
    )  # fmt: skip
    frame = pl.DataFrame(edges, schema=["src", "dst"], orient="row").with_columns(rule=pl.lit("event"))
    return boxes_of(with_activity(ops).sort("start_ns"), frame, detail, room)


def test_a_box_ends_where_its_lane_waits_for_what_waits_for_the_box():
    """Four kernels of a layer, the third behind a transfer that is behind the second; a gap; another layer."""
    compute = [layer("0") | {"at": at} for at in (0, 1, 4, 5)]
    compute += [layer(None, "gap") | {"at": 6}, layer("1") | {"at": 7}]
    moved = [layer("0", "comm") | {"at": 3}]
    order = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (1, 6), (6, 2), (0, 6)]
    found, links = boxes({"gpu0:7": compute, "gpu0:9": moved}, order, "layer")
    assert found.select("members", "column", "text").rows() == [
        ([0, 1], 0, "forward 0\n2.00 µs"), ([6], 1, "op6\n1.00 µs"), ([2, 3, 4], 2, "forward 0\n3.00 µs"),
        ([5], 3, "op5\n1.00 µs"),
    ]  # fmt: skip
    assert links.select("src", "dst", "edges").rows() == [(0, 1, 2), (1, 2, 1)]
    assert len(boxes({"gpu0:7": compute, "gpu0:9": moved}, order, "lane")[0]) == 2
    assert boxes({"gpu0:7": compute, "gpu0:9": moved}, order, "layer", room=3) is None


def test_what_other_lines_imply_is_left_out():
    """One launch a kernel: the first of the stream carries the others."""
    host = [layer(None, "launch") | {"at": 0, "phase": "other"}]
    stream = [layer(str(k)) | {"at": 1 + k} for k in range(3)]
    launches = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)]
    assert boxes({"cpu:1": host, "gpu0:7": stream}, launches, "layer")[1].select("src", "dst").rows() == [(0, 1)]


@pytest.mark.parametrize("detail", ["op", "layer", "phase"])
def test_boxes_of_a_real_step_are_a_graph_in_columns(result, detail):
    ops = with_activity(result.ops).with_columns(label=LABEL).sort("start_ns", "op_id").head(900)
    found, links = boxes_of(ops, result.graph.edges, detail, room=5000)
    assert sorted(found["members"].explode()) == sorted(ops["op_id"])
    graph = nx.DiGraph(links.select("src", "dst").rows())
    turns = found.sort("label", "column").select(pl.col("box").shift(1).over("label"), to="box").drop_nulls()
    graph.add_edges_from(turns.rows())
    assert nx.is_directed_acyclic_graph(graph)
    column = dict(found.select("box", "column").iter_rows())
    assert all(column[src] < column[dst] for src, dst in graph.edges)


def test_a_window_is_drawn_with_as_much_detail_as_can_be_read(result):
    for window, text in (((8_000_000, 8_200_000), "linear"), ((8_000_000, 22_000_000), "forward 0"), (None, "ops")):
        chart = charts.dependencies(result, window_ns=window)
        drawn = pl.concat(
            pl.DataFrame(rows) for rows in chart.to_dict()["datasets"].values() if "text" in str(rows[:1])
        )
        assert any(said.startswith(text) or text in said.split("\n")[0] for said in drawn["text"]), text
        assert drawn["column"].max() < 1100 / 78
        assert charts.to_png(chart)[:4] == b"\x89PNG"


def test_what_cannot_be_drawn_is_refused(result):
    with pytest.raises(InputError, match="takes a Graph"):
        charts.dependencies(result.ops)
    with pytest.raises(InputError, match="detail is 'all'"):
        charts.dependencies(result, detail="all")
    with pytest.raises(LumosError, match="nothing runs"):
        charts.dependencies(result, window_ns=(10**12, 2 * 10**12))
    with pytest.raises(LumosError, match="narrower than 78 px"):
        charts.dependencies(result, detail="op")


@pytest.mark.parametrize(
    "asked",
    [
        {"window_ns": 5}, {"window_ns": (1, 2, 3)}, {"window_ns": ("a", "b")}, {"window_ns": (0, float("nan"))},
        {"ranks": 3}, {"ranks": "0"}, {"ranks": [0.5]}, {"title": 3}, {"width_px": "a"},
    ],
)  # fmt: skip
def test_a_window_and_ranks_that_are_none_are_refused_by_name(asked):
    result = ln.replay(ln.chakra.pattern(1, compute_us=1))
    draws = [charts.dependencies] if "width_px" in asked else [charts.dependencies, charts.timeline]
    for draw in draws:
        with pytest.raises(InputError, match=next(iter(asked))):
            draw(result, **asked)


def test_a_single_box_waits_for_nothing():
    chart = charts.dependencies(ln.replay(ln.chakra.pattern(1, compute_us=1)))
    assert len(chart.to_dict()["layer"]) > 0
