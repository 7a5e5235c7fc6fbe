"""Benchmarks that may leave the house: what their files still say of the model that they were made from."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb import benchmark
from lumos_nb.errors import InputError
from lumos_nb.exchange.benchmark.hiding import hidden
from lumos_nb.exchange.chakra import Policy

PAIRED = ln.datasets.path("gpt-single-paired")
HIDE = Policy(shapes="exact", seed=1)
SECRET = "acme::secret_gelu"


@pytest.fixture(scope="module")
def trace() -> ln.ExecutionTrace:
    """A recorded step with an operator of the house in it, which takes a path."""
    found = ln.load_execution_trace(PAIRED, rank=0)
    own = pl.col("name").is_in(["aten::gelu", "aten::gelu_backward"])
    nodes = found.nodes.with_columns(
        name=pl.when(own).then(pl.lit(SECRET)).otherwise("name"),
        op_schema=pl.when(own).then(pl.lit(f"{SECRET}(Tensor x, str path) -> Tensor")).otherwise("op_schema"),
        kernel_file=pl.when(own).then(pl.lit("/home/acme/gelu.py")).otherwise("kernel_file"),
    )
    path = pl.when(pl.col("type") == "String").then(pl.lit('"/home/acme"')).otherwise("value")
    return replace(found, nodes=nodes, arguments=found.arguments.with_columns(path.alias("value")))


def test_no_word_of_the_model_is_left_and_the_same_operators_are_called(trace, tmp_path: Path):
    made = benchmark.generate(trace, tmp_path / "public", profile=PAIRED, policy=HIDE)
    told = benchmark.generate(trace, tmp_path / "told", profile=PAIRED)
    scopes = trace.nodes.filter(pl.col("kind").is_in(["function", "annotation"]))["name"].unique()
    words = [name for name in [*scopes, SECRET] if not name.startswith("ProfilerStep")]
    assert any("layer=" in word for word in words)
    texts = {folder: (tmp_path / folder / "workload.json").read_text() for folder in ("public", "told")}
    assert sum(f'"{word}"' in texts["told"] for word in words) > 10
    assert not [word for word in words if f'"{word}"' in texts["public"]]
    assert "acme" in texts["told"]
    assert "acme" not in texts["public"] + (tmp_path / "public/README.md").read_text()
    columns = ["call", "node_id", "operators", "dur_ns", "gap_ns"]
    assert made.calls.select(columns).equals(told.calls.select(columns))
    named = json.loads(texts["public"])["ops"]
    assert {name for name in named if not name.startswith("aten::")} == {""}


def test_equal_names_have_equal_numbers_and_structure_stays(trace):
    shown = hidden(trace, HIDE).nodes
    pairs = trace.nodes.select("node_id", "kind", old="name").join(shown.select("node_id", "name"), on="node_id")
    changed = pairs.filter(pl.col("old") != pl.col("name"))
    assert (
        changed.select("old", "name").unique().select(pl.all().n_unique()).row(0) == (changed["name"].n_unique(),) * 2
    )
    assert changed["name"].str.contains(r"^name\d+$").all()
    same = pairs.filter(pl.col("old") == pl.col("name"))
    assert same["name"].str.contains(r"^(aten::|ProfilerStep#|\[pytorch\||## process_group)").all()
    assert shown.filter(name="aten::addmm")["op_schema"].equals(trace.nodes.filter(name="aten::addmm")["op_schema"])


def test_a_policy_may_keep_names_and_scopes(trace):
    kept = hidden(trace, Policy(names="kept", scopes="kept", shapes="exact"))
    assert kept.nodes["name"].equals(trace.nodes["name"])
    scopes = hidden(trace, Policy(names="kept", shapes="exact")).nodes
    assert scopes.filter(name=SECRET)["op_schema"].is_not_null().all()
    assert not scopes["name"].str.contains("layer=").any()


def test_a_hidden_program_runs_with_other_sizes():
    given = ["--device", "cpu", "--iterations", "1", "--warmup", "0"]
    assert len(benchmark.replay(PAIRED, arguments=given, policy=HIDE, shrink={512: 64})) == 1


@pytest.mark.parametrize(
    "policy", [Policy(), Policy(shapes="bucketed"), Policy(shapes="exact", time_scale=None), "all"], ids=str
)
def test_what_a_program_cannot_hide_is_refused(policy, trace):
    message = "give a chakra.Policy" if policy == "all" else re.escape("Policy(shapes='exact')")
    with pytest.raises(InputError, match=message):
        benchmark.workload(trace, policy=policy)
