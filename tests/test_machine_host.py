"""The host's time for a row of a step: measured, pooled, and found by those who price steps with it."""

from __future__ import annotations

import time

import pytest

from benchmarks.machine import host
from benchmarks.machine.host import LAYERS, ROWS, measure_host


def test_what_a_module_does_beside_its_kernel_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(host, "WRITTEN_BYTES", 2**20)
    plain = measure_host(steps=20)
    (row,) = plain.rows
    assert (row.overhead, row.name, row.pooled_from, row.count) == ("T1", None, "all", 20)
    forward, spun_us = torch.nn.ReLU.forward, 1000.0

    def slow(self: object, x: object) -> object:
        until = time.thread_time_ns() + 1e3 * spun_us
        while time.thread_time_ns() < until:
            pass
        return forward(self, x)

    monkeypatch.setattr(torch.nn.ReLU, "forward", slow)
    more_us = measure_host(steps=20).cost([None], ["T1"])[0] - plain.cost([None], ["T1"])[0]
    assert more_us == pytest.approx(spun_us * LAYERS / ROWS, rel=0.3)


def test_rows_are_those_of_a_step() -> None:
    import polars as pl

    from lumos_nb.workloads.dlrm.model import Dlrm, DlrmTraining
    from lumos_nb.workloads.dlrm.passes import passes
    from lumos_nb.workloads.dlrm.plan import Plan

    tables = pl.DataFrame({"table": ["a"], "rows": [10], "dim": [8], "pooling": [1.0], "dtype": ["fp32"]})
    plan = Plan.of(tables, pl.DataFrame({"table": ["a"], "device": [0]}), [1e9])
    model = Dlrm(dense=8, bottom=(8,) * LAYERS, top=(1,), interaction="cat")
    rows = passes(model, plan, DlrmTraining(global_batch=8, fused=False)).table
    of_layers = rows.filter(part="bottom").height + rows.filter(part="optimizer").height - 2  # updates of the top layer
    assert of_layers == ROWS
