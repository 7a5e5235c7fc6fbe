"""What every predicted step has, whatever is trained: graph, replay, interval, what its prices rest on, warnings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import polars as pl

from lumos_nb.critical_path import Result
from lumos_nb.display import format_ns
from lumos_nb.graph import Graph
from lumos_nb.partition import breakdown
from lumos_nb.traces.export import Tables
from lumos_nb.workloads.contention import Timed
from lumos_nb.workloads.steps import Step
from lumos_nb.workloads.surcharges import Surcharges

NORMAL_90 = 1.645
"""Standard deviations on each side of a normal 90 % interval."""
UNMEASURED = 0.1
"""Share of a step from which on it is worth a warning."""


class Predicted(Tables, ABC):
    """A predicted step; `Estimate` and `DlrmEstimate` say of what. Times are seconds unless a name says otherwise."""

    surcharges: Surcharges
    step: Step
    timed: Timed
    assumptions: tuple[str, ...]

    @property
    def graph(self) -> Graph:
        """The workload: ops and edges of every rank that differs from others."""
        return self.timed.graph

    @cached_property
    def result(self) -> Result:
        """The replayed graph."""
        return self.timed.result

    @property
    def step_ns(self) -> int:
        """Time of a step."""
        return self.timed.step_ns

    @property
    def step_s(self) -> float:
        """Time of a step."""
        return self.step_ns / 1e9

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the step time's logarithm.

        That of sources which nothing was fitted on, and beside it the intervals of what data sheets alone price on the
        critical path; of one family, all err together.
        """
        path = self.result.path.filter(pl.col("path_ns") > 0)
        rows = self.step.table[self.step.row[path["op_id"].to_numpy()]].with_columns(path["path_ns"])
        width = (pl.col("high_us") / pl.col("low_us")).log() / (2 * NORMAL_90)
        unmeasured = rows.filter((pl.col("basis") == "data sheet") & (pl.col("low_us") > 0))
        by_family = unmeasured.group_by("family").agg(err=(pl.col("path_ns") * width).sum() / self.step_ns)
        return math.hypot(self.surcharges.spread, *by_family["err"])

    @property
    def low_s(self) -> float:
        """Lower end of the nominal 90 % interval."""
        return self.step_s * math.exp(-NORMAL_90 * self.spread)

    @property
    def high_s(self) -> float:
        """Upper end of it."""
        return self.step_s * math.exp(NORMAL_90 * self.spread)

    @cached_property
    def breakdown(self) -> pl.DataFrame:
        """Parts of the step on each rank, as `ln.breakdown` gives them."""
        parts: pl.DataFrame = breakdown(self.result)
        return parts

    @cached_property
    def basis(self) -> pl.DataFrame:
        """`basis` ("measured", "transferred", "data sheet", "waiting") and `share` of the critical path."""
        path = self.result.path.filter(pl.col("path_ns") > 0)
        rows = self.step.table[self.step.row[path["op_id"].to_numpy()]].select("basis", time=path["path_ns"])
        shares = rows.group_by("basis").agg(share=pl.col("time").sum() / self.step_ns)
        rest = pl.DataFrame({"basis": "waiting", "share": max(0.0, 1 - float(shares["share"].sum()))})
        every: pl.DataFrame = pl.concat([shares, rest])
        return every.sort("share", descending=True)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What should make a reader careful."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        shares = dict(self.basis.rows())
        if (unmeasured := shares.get("data sheet", 0.0)) > UNMEASURED:
            yield f"{unmeasured:.0%} of the critical path is priced by data sheets alone: nothing like it was measured"
        host = self.breakdown.filter(pl.col("part") == "host_bound")["share"].max()
        if isinstance(host, float) and host > UNMEASURED:
            yield f"the host is late for {host:.0%} of the step: launch_us and kernels of its training decide"

    def to_perfetto(self, path: str | Path) -> Path:
        """Write the replayed step for ui.perfetto.dev or chrome://tracing: see `write_perfetto`.

        Examples
        --------
        >>> found.to_perfetto("step.json.gz")
        """
        return self.result.to_perfetto(path)

    def _tables(self) -> dict[str, pl.DataFrame]:
        return {"ops": self.result.ops, "edges": self.graph.edges, "breakdown": self.breakdown, "basis": self.basis}

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._caption(), self._summary())]

    @abstractmethod
    def _caption(self) -> str: ...

    @abstractmethod
    def _summary(self) -> pl.DataFrame: ...

    def _interval(self) -> tuple[str, str]:
        """The row of the summary that has the time and its interval."""
        low, high = format_ns(round(self.low_s * 1e9)), format_ns(round(self.high_s * 1e9))
        return "step", f"{format_ns(self.step_ns)} ({low} to {high})"

    def _trust(self) -> Iterator[tuple[str, str]]:
        """Its last rows: what prices rest on, what to beware of, what was taken for granted."""
        yield "priced by", ", ".join(f"{basis} {share:.0%}" for basis, share in self.basis.rows())
        yield from (("warning", text) for text in self.warnings)
        yield from (("assumed", text) for text in self.assumptions)
