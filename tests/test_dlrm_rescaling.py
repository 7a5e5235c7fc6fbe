"""A traced DLRM step with another batch: what grows with it, what does not, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from lumos_nb.critical_path import replay
from lumos_nb.errors import InputError
from lumos_nb.graph import Graph, build_graph
from lumos_nb.layout import Cluster
from lumos_nb.traces.run import load_run
from lumos_nb.workloads.dlrm.rescaling import rescale_batch, with_batch

BATCH = 16
V100: dict[str, Any] = {"calibration": "V100-PCIe-32GB"}


@pytest.fixture(scope="module")
def traced(traces: Path) -> Graph:
    """PARAM's DLRM on eight V100, 16 samples a rank."""
    return build_graph(load_run(traces / "param" / "dlrm_kineto.tar.gz"))


def part(op: str, phase: str = "forward", label: str = "aten::op", **sizes: int) -> dict[str, Any]:
    names = ("batch", "m", "n", "k", "rows", "cols")
    return {"op": op, "phase": phase, "label": label} | dict.fromkeys(names) | sizes


def test_sizes_that_are_the_batch_are_told_from_others() -> None:
    frame = pl.DataFrame(
        [
            part("gemm_bias", batch=1, m=16, n=512, k=13),
            part("gemm", "backward", batch=1, m=512, n=256, k=16),  # a weight's gradient as it is executed
            part("gemm", batch=1, m=16, n=16, k=128),  # a layer as wide as the batch: only the rows are meant
            part("bmm", batch=16, m=27, n=27, k=16),
            part("relu", rows=16, cols=512),
            part("add", rows=432, cols=64),  # 27 vectors a sample
            part("fill", rows=1, cols=8192),
            part("adamw", "optimizer", rows=512, cols=256),
            part("add", "backward", "torch::autograd::AccumulateGrad", rows=512, cols=256),
            part("copy", rows=13, cols=512),
        ],
        infer_schema_length=None,
    )
    found = with_batch(frame, 16, 64).select("batch", "m", "n", "k", "rows", "cols").rows()
    assert found == [
        (1, 64, 512, 13, None, None),
        (1, 512, 256, 64, None, None),
        (1, 64, 16, 128, None, None),
        (64, 27, 27, 16, None, None),
        (None, None, None, None, 64, 512),
        (None, None, None, None, 1728, 64),
        (None, None, None, None, 1, 32768),
        (None, None, None, None, 512, 256),
        (None, None, None, None, 512, 256),
        (None, None, None, None, 13, 512),
    ]


def test_the_same_batch_is_the_same_step(traced: Graph) -> None:
    again = rescale_batch(traced, BATCH, BATCH, **V100)
    assert again.ops["dur_ns"].equals(traced.ops["dur_ns"])
    assert replay(again).step_ns == replay(traced).step_ns


def test_more_samples_take_longer_where_they_are_worked_on(traced: Graph) -> None:
    four = rescale_batch(traced, BATCH, 4 * BATCH, **V100)
    ratio = traced.ops.select("kind", "name", "collective", old="dur_ns").with_columns(new=four.ops["dur_ns"])
    by = ratio.group_by("kind", "collective").agg(times=pl.sum("new") / pl.sum("old"))
    assert by.filter(kind="comm", collective="all_reduce")["times"].item() == 1.0
    assert by.filter(kind="comm", collective="all_to_all")["times"].item() == pytest.approx(4.0, rel=1e-3)
    looked_up = ratio.filter((pl.col("kind") == "kernel") & pl.col("name").str.contains("split_embedding"))
    assert looked_up["new"].sum() / looked_up["old"].sum() == pytest.approx(4.0, rel=1e-3)
    kernels = ratio.filter(kind="kernel")
    assert 1.05 < kernels["new"].sum() / kernels["old"].sum() < 4  # tiny kernels are launches most of all
    assert (
        (ratio.filter(pl.col("kind").is_in(["cpu", "gap", "launch"])).select(pl.col("new") == pl.col("old")))
        .to_series()
        .all()
    )
    assert replay(four).step_ns >= replay(traced).step_ns
    notes = four.report.tail(4)
    assert notes["what"].to_list() == ["could not see", "timed anew", "timed anew", "timed anew"]
    assert notes["count"].min() > 0


def test_tables_are_priced_by_what_is_looked_up(traced: Graph) -> None:
    tables = pl.DataFrame({"rows": [10**6] * 4, "dim": [64] * 4, "pooling": [20.0] * 4})
    often = tables.with_columns(pooling=pl.lit(40.0))
    plain, twice = (
        rescale_batch(traced, BATCH, BATCH, tables=tables, to_tables=to, **V100).ops.filter(
            (pl.col("kind") == "kernel") & pl.col("name").str.contains("split_embedding")
        )["dur_ns"].sum()
        for to in (None, often)
    )  # fmt: skip
    assert 1 < twice / plain < 2
    with pytest.raises(InputError, match="other dims"):
        rescale_batch(traced, BATCH, BATCH, tables=tables, to_tables=tables.with_columns(dim=pl.lit(32)), **V100)
    with pytest.raises(InputError, match="not tables"):
        rescale_batch(traced, BATCH, BATCH, to_tables=tables, **V100)


@pytest.mark.parametrize(
    ("batch", "to", "said"), [(0, 4, "batch is 0"), (16, 2.5, "to is 2.5"), (1013, 4, "size of 1013")]
)
def test_a_batch_that_is_none_is_refused(traced: Graph, batch: int, to: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        rescale_batch(traced, batch, to, **V100)


def test_a_cluster_prices_exchanges_of_known_size(traced: Graph) -> None:
    sent = (pl.col("collective") == "all_to_all") & (pl.col("kind") == "comm")
    known = pl.when(sent).then(2**20).otherwise("comm_bytes").cast(pl.Int64)
    ops = traced.ops.with_columns(comm_bytes=known, group_size=pl.lit(8, pl.Int32))
    graph = Graph(ops, traced.edges, traced.step, traced.report, traced.queue_sizes, run=traced.run)
    cluster = Cluster(gpu="V100-SXM-32GB", inside="NVLink2")
    larger = rescale_batch(graph, BATCH, 4 * BATCH, cluster=cluster, calibration="V100-PCIe-32GB")
    old, new = (one.ops.filter(sent)["dur_ns"].sum() for one in (graph, larger))
    assert 1 < new / old < 4  # latency does not grow
