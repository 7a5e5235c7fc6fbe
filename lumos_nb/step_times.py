"""When steps begin and end: measured from when each rank worked on each of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from lumos_nb.errors import GraphError, is_number, require_whole, shown
from lumos_nb.lanes import ON_STREAM
from lumos_nb.repairs import step_or_before


def extents(ops: pl.DataFrame) -> pl.DataFrame:
    """One row a rank and step: when it was worked on, by the host, on devices, and by all; how many device ops."""
    end_ns, on_device = pl.col("start_ns") + pl.col("dur_ns"), pl.col("device").is_not_null()
    return ops.group_by("rank", "step").agg(
        pl.col("device").min(),
        pl.col("start_ns").min(),
        host_start_ns=pl.col("start_ns").filter(~ON_STREAM).min(),
        end_ns=end_ns.max(),
        device_end_ns=end_ns.filter(on_device).max(),
        device_ops=on_device.sum(),
    )


@dataclass(frozen=True)
class StepTimes:
    """The `extents` of all ranks, and the steps that the profiler marked."""

    extents: pl.DataFrame
    steps: tuple[int, ...]

    @cached_property
    def _ends(self) -> pl.DataFrame:
        """When the work ended that makes the end of a step (`of`): on devices, or all where there is none."""
        on_device = self.extents.filter(pl.col("device_ops") > 0)
        work = on_device.with_columns(end_ns="device_end_ns") if on_device.height else self.extents
        return work.with_columns(step_or_before(self.steps[0]).alias("of"))

    def rank_starts(self, step: int) -> pl.DataFrame:
        """As `Recording.rank_starts`."""
        require_whole(-(2**31), 2**31 - 1, step=step)
        work = self._ends
        earlier = work.filter(pl.col("of") < step).group_by("rank").agg(at_ns=pl.col("end_ns").max())
        ranks = work.group_by("rank").agg(pl.col("device").min()).sort("rank")
        # No rank begins later than the step does, also one whose trace begins with it.
        begin_ns = pl.min_horizontal(pl.lit(self._begin_ns(step), pl.Int64), pl.col("at_ns").max())
        return ranks.join(earlier, on="rank", how="left", maintain_order="left").with_columns(
            pl.col("at_ns").fill_null(begin_ns)
        )

    def origin_ns(self, step: int) -> int:
        """When the first thread begins the step, or the first rank had done with earlier ones."""
        hosts = self.extents.filter(pl.col("step") == step)["host_start_ns"]
        return int(pl.concat([hosts, self.rank_starts(step)["at_ns"]]).min())  # type: ignore[arg-type]

    def _begin_ns(self, step: int) -> object:
        return self.extents.filter(pl.col("step") == step)["start_ns"].min()

    @cached_property
    def measured(self) -> pl.DataFrame:
        """As `Recording.step_times`."""
        first = self.steps[0]
        # What a rank did before a window that begins later than others' holds up the step that it begins with, and is
        # of none before that which its graph could show.
        known = pl.col("step").is_not_null() | (pl.col("of") < first)
        end_ns = pl.col("end_ns").filter(known).max()
        ends = self._ends.group_by(step="of").agg(end_ns, done_ns=pl.col("end_ns").max()).sort("step")
        if first - 1 not in ends["step"]:  # nothing was going on before: the first step begins with its first op
            begin_ns = self._begin_ns(first)
            start = pl.DataFrame([(first - 1, begin_ns, begin_ns)], schema=ends.schema, orient="row")
            ends = pl.concat([start, ends.filter(pl.col("step") >= first)])
        times = ends.with_columns(pl.col("end_ns").cum_max(), start_ns=pl.col("done_ns").cum_max().shift(1))
        times = times.filter(pl.col("step").is_in(self.steps)).drop_nulls()
        return times.select(
            "step",
            "start_ns",
            "end_ns",
            step_ns=pl.col("end_ns") - pl.col("start_ns"),
            edge=pl.col("step").is_in([first, self.steps[-1]]) & (len(self.steps) > 1),
        )

    def known(self, step: object) -> int:
        """As `Recording.known_step`."""
        known: list[int] = self.measured["step"].to_list()
        if not is_number(step) or step not in known:
            raise GraphError(
                f"step {shown(step)} is not in the recording or has no known beginning; choose one of {known}."
            )
        return known[known.index(step)]

    def default(self) -> int:
        """As `Recording.default_step`."""
        times = self.measured
        if times.is_empty():
            lost = self.extents.filter(pl.col("step").is_null())["device_ops"].sum()
            raise GraphError(
                f"none of the recording's {lost} device ops has its launch in the trace, so that none belongs to a "
                "step; record the host's calls as well (ProfilerActivity.CPU)."
                if lost
                else "the recording has no op of any step: neither a runtime call, an operator nor device work."
            )
        inner = times.filter(~pl.col("edge"))
        chosen = inner if inner.height else times
        return int(chosen.sort("step_ns")["step"][chosen.height // 2])
