"""Linked execution traces as Chakra nodes: the call tree, exclusive times, gaps, streams."""

from __future__ import annotations

import polars as pl
import pytest

import lumos_nb as ln
from lumos_nb.errors import InputError


@pytest.fixture(scope="module")
def linked(traces):
    et, kineto = (traces / f"hta/execution_trace/benchmark_simple_add_{kind}.json.gz" for kind in ("et", "trace"))
    return ln.chakra.link(et, kineto)


def test_the_call_tree_and_the_times_of_the_profile(linked, tmp_path):
    nodes = ln.chakra.from_linked(linked).table
    was = linked.nodes
    table = nodes.join(was.select(id=pl.col("node_id").cast(pl.UInt64), caller="parent", kind_was="kind"), on="id")
    assert len(table) == len(was) == 38
    assert table["ctrl_deps"].to_list() == [[parent] if parent is not None else [] for parent in table["caller"]]
    assert table.filter(kind_was="process")["type"].to_list() == ["METADATA_NODE"]
    thread = was.drop_nulls("start_ns")
    span_us = ((thread["start_ns"] + thread["dur_ns"]).max() - thread["start_ns"].min()) / 1000
    assert nodes.filter("is_cpu_op")["dur_us"].sum() == pytest.approx(span_us, abs=2)  # with the gaps, nothing is lost
    kernels = nodes.filter(~pl.col("is_cpu_op"))
    assert kernels["dur_us"].to_list() == [5, 5, 3, 3]
    assert kernels["ctrl_deps"].to_list()[:3] == [[8], [13], [36]]
    assert kernels["data_deps"].to_list() == [[], *([id] for id in kernels["id"][:-1])]
    empty = nodes.filter(id=5).row(0, named=True)
    assert (empty["input_values"].startswith('[[256,256], 6, "<None>"'), empty["rf_id"], empty["tid"]) == (True, 3, 1)
    path = ln.chakra.write_file(ln.chakra.Nodes(nodes), tmp_path / "a.0.et")
    assert ln.chakra.validate(path).is_empty()
    result = ln.replay(ln.chakra.to_graph(path))
    assert result.makespan_ns >= 1000 * nodes.filter("is_cpu_op")["dur_us"].sum()
    assert set(ln.chakra.validate(path, "astra-sim")["rule"]) == {"astra-sim"}  # METADATA nodes


def test_time_between_ops_is_in_nodes_of_its_own(tmp_path):
    folder = ln.datasets.path("gpt-single-paired")
    linked = ln.chakra.link(folder, folder)
    nodes = ln.chakra.from_linked(linked).table
    gaps = nodes.filter(name="gap")
    assert gaps["dur_us"].sum() > 0
    assert not {*gaps["id"]} & {*linked.nodes["node_id"]}
    for (thread,), ops in (
        linked.nodes.filter(pl.col("iteration") == 0).drop_nulls("host_thread").group_by("host_thread")
    ):
        span_us = ((ops["start_ns"] + ops["dur_ns"]).max() - ops["start_ns"].min()) / 1000
        taken = nodes.filter(pl.col("tid").is_in(ops["thread"].unique().implode()))["dur_us"].sum()
        assert taken == pytest.approx(span_us, rel=0.01, abs=2), thread
    assert set(ln.chakra.validate(ln.chakra.write_file(ln.chakra.Nodes(nodes), tmp_path / "a.0.et"))["rule"]) == set()


def test_iterations_that_are_not_there_and_traces_that_are_not_linked_are_refused(linked):
    with pytest.raises(InputError, match="iteration is 3; the trace has 1"):
        ln.chakra.from_linked(linked, 3)
    with pytest.raises(InputError, match="Linked trace, not a ExecutionTrace"):
        ln.chakra.from_linked(linked.execution_trace)
