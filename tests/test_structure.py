"""Layers, passes and phases of a trace: by annotations, and by what repeats where there are none."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from lumos_nb import datasets
from lumos_nb.errors import GraphError, InputError
from lumos_nb.graph import Graph, build_graph
from lumos_nb.steady import repeat
from lumos_nb.traces.run import load_run
from lumos_nb.workloads.llm.repeats import Tandem, common, tandem
from lumos_nb.workloads.llm.structure import find_structure

HELD = {
    "gpt-single": {0: [0, 1]},
    "gpt-ddp": {0: [0, 1], 1: [0, 1]},
    "gpt-tp": {0: [0, 1], 1: [0, 1]},
    "gpt-pp": {0: [0], 1: [1]},
    "gpt-grid": {rank: [rank % 4] for rank in range(20)},
}
"""Bundled run -> the layers of each rank, as its script has them."""


@cache
def graph_of(name: str) -> Graph:
    return build_graph(load_run(datasets.path(name)))


def bare(graph: Graph) -> Graph:
    """Without what annotations say of layers."""
    return replace(graph, ops=graph.ops.with_columns(layer=pl.lit(None, pl.String)))


class TestTandem:
    @pytest.mark.parametrize(
        ("tokens", "found"),
        [
            ([9, 1, 2, 2, 1, 2, 2, 1, 2, 2, 7], Tandem(1, 3, 3)),
            ([1, 1, 1, 2, 3, 1, 1, 1, 2, 3], Tandem(0, 5, 2)),
            ([1, 2, 3, 4], None),
            ([], None),
        ],
        ids=["a block three times", "a block that repeats within itself", "nothing repeats", "no tokens"],
    )
    def test_the_longest_cover_wins(self, tokens: list[int], found: Tandem | None) -> None:
        assert tandem(np.array(tokens, np.int64)) == found

    def test_what_comes_behind_a_backward_pass_is_no_part_of_its_layers(self) -> None:
        tokens = np.array([5, 1, 2, 3, 1, 2, 3, 1, 2, 3])[::-1].copy()  # 3 2 1 3 2 1 3 2 1 5
        assert tandem(tokens, mirrored=True) == Tandem(0, 3, 3)
        before = np.array([3, 1, 2, 3, 1, 2, 3])  # the model's last norm, then two layers that end with one
        assert tandem(before, mirrored=True) == Tandem(1, 3, 2)
        assert tandem(before) == Tandem(0, 3, 2)

    def test_a_count_that_is_asked_for_is_kept(self) -> None:
        tokens = np.array([1, 2, 1, 2, 1, 2, 7, 3, 4, 5, 3, 4, 5])
        assert tandem(tokens) == Tandem(0, 2, 3)
        assert tandem(tokens, 2) == Tandem(7, 3, 2)

    def test_the_longest_common_block_of_two_sequences(self) -> None:
        assert common(np.array([1, 2, 3, 4, 5]), np.array([9, 3, 4, 5, 1])) == (2, 1, 3)
        assert common(np.array([1]), np.array([2])) == (0, 0, 0)


@pytest.mark.parametrize("name", HELD)
def test_annotations_name_the_layers_of_every_rank(name: str) -> None:
    found = find_structure(graph_of(name))
    assert found.layers == HELD[name]
    assert found.table.filter(pl.col("phase") != "optimizer")["found"].unique().to_list() == ["annotation"]


@pytest.mark.parametrize("name", HELD)
def test_repetition_finds_the_layers_that_annotations_name(name: str) -> None:
    graph = graph_of(name)
    told, found = find_structure(graph), find_structure(bare(graph))
    assert found.layers == told.layers
    assert "annotation" not in found.table["found"].to_list()
    both = told.ops.with_columns(again=found.ops["layer"], time=graph.ops["dur_ns"])
    same = both.filter(pl.col("layer").eq_missing(pl.col("again")))["time"].sum()
    assert same >= 0.98 * both["time"].sum()


def test_passes_and_stages_of_a_pipeline() -> None:
    found = find_structure(graph_of("gpt-pp"))
    assert found.stage == {0: 0, 1: 1}
    assert found.table.filter(pl.col("phase") != "optimizer")["passes"].to_list() == [4] * 4
    layered = found.ops.filter(pl.col("layer") >= 0, pl.col("phase") == "backward")
    assert layered.group_by("rank").agg(pl.col("micro_batch").n_unique())["micro_batch"].to_list() == [4, 4]


def test_layers_stand_in_order_forward_and_against_it_backward() -> None:
    found = find_structure(graph_of("gpt-single")).ops.filter(pl.col("layer") >= 0)
    order = found.group_by("phase", maintain_order=True).agg(pl.col("layer").unique(maintain_order=True))
    assert dict(order.iter_rows()) == {"forward": [0, 1], "backward": [1, 0], "optimizer": [0, 1]}


def test_a_collective_is_where_it_was_issued() -> None:
    graph = graph_of("gpt-tp")
    comm = find_structure(graph).ops.join(graph.ops.filter(pl.col("kind") == "comm").select("op_id"), on="op_id")
    assert comm.group_by("rank", "phase", "layer").len()["len"].to_list() == [2] * 8


def test_the_table_says_how_sure_it_is() -> None:
    table = find_structure(bare(graph_of("gpt-single"))).table
    assert table["confidence"].to_list() == [1.0] * 3
    assert table["share"].is_between(0.5, 0.9).all()


def test_a_trace_of_no_layers_is_no_error() -> None:
    graph = graph_of("gpt-single")
    odd = graph.ops.with_columns(name=pl.format("{} {}", "name", "op_id"), layer=pl.lit(None, pl.String))
    found = find_structure(replace(graph, ops=odd))
    assert found.layers == {}
    assert found.table["confidence"].to_list() == [0.0] * 3


TRANSFORMERS = {
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": 24,
    "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz": 24,
    "tracelens/inference/sglang_prefilldecode/sglang_Qwen3-8B_prefilldecode.json.gz": 36,
    "pippy/local_test_forward_hf_gpt2.json.gz": 12,
}
"""Traces of transformers that others recorded -> how many layers the model has."""


@pytest.mark.parametrize("path", TRANSFORMERS)
def test_layers_of_other_peoples_transformers(traces: Path, path: str) -> None:
    graph = build_graph(load_run(traces / path))
    found = find_structure(graph)
    assert found.layers == {0: list(range(TRANSFORMERS[path]))}
    kernels = bare(replace(graph, ops=graph.ops.with_columns(shapes=pl.lit(None, pl.String), phase=pl.lit("other"))))
    blind = find_structure(kernels)  # by the names of kernels alone
    assert blind.layers == found.layers
    assert blind.table["found"].to_list() == ["repetition"]


@pytest.mark.parametrize(
    ("path", "stages", "replicas", "passes"),
    [("straggler/trace-ST.parquet", 4, 2, 4), ("straggler/trace-AR.parquet", 4, 4, 32), ("primus/pp8", 8, 1, 16)],
)
def test_stages_and_passes_of_timelines(traces: Path, path: str, stages: int, replicas: int, passes: int) -> None:
    found = find_structure(build_graph(load_run(traces / path)))
    assert sorted(found.stage.values()) == sorted([*range(stages)] * replicas)
    assert list(found.stage.values()) == sorted(found.stage.values())
    of_passes = found.table.filter(pl.col("phase").is_in(["forward", "backward"]))
    assert of_passes["passes"].unique().to_list() == [passes]
    assert of_passes["found"].unique().to_list() == ["whole passes"]


def test_the_chart_draws_every_rank_and_phase() -> None:
    from lumos_nb import charts

    table = find_structure(graph_of("gpt-pp")).table
    assert len(charts.structure_bars(table).to_dict()["datasets"].popitem()[1]) == table.height == 6


def test_what_is_no_graph_of_one_step_is_refused() -> None:
    with pytest.raises(GraphError, match="several steps"):
        find_structure(repeat(graph_of("gpt-single"), 2))
    with pytest.raises(InputError, match="Graph"):
        find_structure("gpt-single")  # type: ignore[arg-type]
