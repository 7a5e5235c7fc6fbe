"""Published DLRM steps: rows are read, and what they cannot mean is refused."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from lumos_nb.errors import InputError
from lumos_nb.workloads.dlrm.table_rows import DCN, dlrm_tables, estimate_dlrm_row

ROW = {
    "gpu": "NVIDIA H100-SXM5-80GB", "num_gpus": 8, "gpus_per_node": 8, "network": "",
    "model": "DLRM-DCNv2 Criteo 4TB multi-hot (MLPerf)", "global_batch": 55296,
}  # fmt: skip


def test_the_model_is_as_large_as_mlperf_says() -> None:
    tables = dlrm_tables()
    assert tables.height == 26
    assert tables["rows"].sum() == 204_184_588
    assert tables["pooling"].sum() == 214  # lookups of a sample
    weights = DCN.weights(tables["dim"].to_list())
    assert [(n, k) for part, n, k in weights if part == "interaction"] == [(512, 3456), (3456, 512)] * 3
    assert DCN.features(tables["dim"].to_list()) == 3456


def test_a_row_becomes_a_step_on_its_cluster() -> None:
    found = estimate_dlrm_row(ROW)
    assert found.cluster.gpus == 8
    assert found.cluster.gpu_sheet.name == "H100-SXM-80GB"
    assert found.plan.devices["bytes"].max() < 80e9
    assert found.plan.frame.group_by("table").len().height == 26
    assert 0.5 < found.step_s / 4.03e-3 < 2  # MLPerf 4.0's median; how near it is belongs to make accuracy
    assert any("ln.shard" in text for text in found.assumptions)
    again = estimate_dlrm_row(pl.DataFrame(ROW))
    assert again.step_ns == found.step_ns


def test_nodes_and_their_network_are_read() -> None:
    network = "Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s, Management: 100Gb/s"
    found = estimate_dlrm_row(ROW | {"num_gpus": 16, "gpus_per_node": 8, "network": network})
    assert (found.cluster.nodes, found.cluster.gpus_per_node) == (2, 8)
    assert found.cluster.between_sheet is not None
    assert found.cluster.between_sheet.bytes_per_s == pytest.approx(50e9)
    hier = estimate_dlrm_row(ROW | {"num_gpus": 16, "network": network, "sharding_plan": "hier_auto"})
    assert set(hier.plan.frame["kind"]) == {"grid_shard"}
    assert hier.plan.devices["bytes"].max() < 80e9
    half = estimate_dlrm_row(ROW | {"gpus_per_node": 4, "network": "4x ConnectX-7 IB NDR 400Gb/Sec"})
    assert (half.cluster.nodes, half.cluster.gpus_per_node) == (2, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "Llama 2"}, "column model is 'Llama 2'"),
        ({"global_batch": 55297}, "global_batch is 55297"),
        ({"global_batch": None}, "column global_batch"),
        ({"num_gpus": "eight"}, "column num_gpus is 'eight'"),
        ({"gpu": "TPU v4"}, "tpu v4"),
        ({"num_gpus": 1, "gpus_per_node": 1}, "memory|room|hold"),
    ],
)
def test_a_row_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        estimate_dlrm_row(ROW | change)
