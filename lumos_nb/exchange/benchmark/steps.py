"""What each step of a run did: its operators, kernels, launches and collectives, counted and timed."""

from __future__ import annotations

from math import prod

import numpy as np
import polars as pl

from lumos_nb.call_stacks import nearest_encloser
from lumos_nb.calls import (
    CALL_CATEGORIES,
    CALL_PATTERNS,
    COMM_KERNELS,
    COMM_TYPES,
    DEVICE_CATEGORIES,
    HOST_COMM,
    arguments,
    classify,
)
from lumos_nb.costs.operators import listed
from lumos_nb.errors import RunError
from lumos_nb.number_formats import ELEMENT_BYTES, number_format
from lumos_nb.ops import step_marks
from lumos_nb.traces.run import Run

KEY = ["where", "name"]
AMOUNTS = ("count", "time_ns", "bytes")
_WRAPPER = r"^(autograd::|torch::autograd|.*Backward\d*$)"
_OCCUPANCY = "est. achieved occupancy %"
_COMM_ARGUMENTS = {"Collective name": pl.String(), "In msg nelems": pl.Int64(), "dtype": pl.String()}
_START = pl.col("start_ns")


def marked_steps(run: Run) -> pl.DataFrame:
    """The profiler's steps but the first of several: `rank`, `step`, `start_ns`, `end_ns`.

    In the first the profiler is still at work.

    Raises
    ------
    RunError
        No step is marked.
    """
    steps = step_marks(run.events).select("rank", "step", "start_ns", "end_ns")
    if steps.is_empty():
        raise RunError("a run has no ProfilerStep mark: record it with ln.capture, or step the profiler.")
    nth, count = pl.int_range(pl.len()).over("rank"), pl.len().over("rank")
    return steps.sort("start_ns").filter((nth > 0) | (count < 3))


def step_rows(run: Run) -> pl.DataFrame:
    """What the steps of `marked_steps` did.

    Returns
    -------
    frame
        A row for every `rank`, `step`, `where` and `name`: `count`, `time_ns`, `bytes`. `where` is "host" (operators,
        their time without that of operators within them), "device" (kernels, copies and fills), "launch" (calls that
        launch these) or "collective" (kernels of NCCL and its like, and what gloo's threads run, waiting included;
        `bytes` are those that a rank gives). Device work is of the step that launched it.

    Raises
    ------
    RunError
        No step is marked, or nothing was recorded in the steps.
    """
    events, steps = run.events, marked_steps(run)
    parts = [_host(events), _device(events), _launches(events), _collectives(events)]
    rows = pl.concat([part.select("rank", *KEY, "start_ns", "dur_ns", "bytes") for part in parts])
    rows = _in_steps(rows, steps)
    if rows.is_empty():
        raise RunError("a run has neither operators nor kernels within its ProfilerStep marks.")
    each = rows.group_by("rank", "step", *KEY)
    return each.agg(count=pl.len(), time_ns=pl.col("dur_ns").sum(), bytes=pl.col("bytes").sum())


def typical(rows: pl.DataFrame) -> pl.DataFrame:
    """A step of `step_rows`: medians over steps (0 in those that have none of a name), sums over ranks."""
    everywhere = rows.select("rank", *KEY).unique().join(rows.select("rank", "step").unique(), on="rank")
    each = everywhere.join(rows, on=["rank", "step", *KEY], how="left").with_columns(pl.col(AMOUNTS).fill_null(0))
    per_rank = each.group_by("rank", *KEY).agg(pl.col(AMOUNTS).median())
    return per_rank.group_by(KEY).agg(pl.col(AMOUNTS).sum()).filter(pl.col("count") > 0)


def device_use(run: Run) -> pl.DataFrame:
    """How busy devices are, a row a rank and step: `busy_share`, `occupancy_share`; no row without a device.

    The first is the time in which kernels that the step launched run, as a share of the step on the host (above 1 where
    the device catches up); the second how full of warps the SMs are meanwhile, as CUPTI estimates it from registers and
    shared memory (null where it does not).
    """
    steps = marked_steps(run)
    kernels = _with_launches(run.events.filter(pl.col("category") == "kernel"), run.events)
    found = arguments(kernels["args"], {_OCCUPANCY: pl.Float64()})
    kernels = kernels.with_columns(full=found[_OCCUPANCY], at_ns="start_ns", start_ns="launch_ns")
    kernels = _in_steps(kernels, steps).sort("at_ns")
    ends = pl.col("at_ns") + pl.col("dur_ns")
    before = ends.cum_max().shift(1).over("rank", "step", "device")
    alone = (ends - pl.max_horizontal("at_ns", before)).clip(0)  # time in which no earlier kernel runs
    each = kernels.with_columns(alone=alone).group_by("rank", "step")
    weighed = (pl.col("full") * pl.col("dur_ns")).sum() / pl.col("dur_ns").filter(pl.col("full").is_not_null()).sum()
    used = each.agg(busy_ns=pl.col("alone").sum() / pl.col("device").n_unique(), occupancy_share=weighed / 100)
    lengths = steps.select("rank", "step", step_ns=pl.col("end_ns") - pl.col("start_ns"))
    used = used.join(lengths, on=["rank", "step"]).with_columns(busy_share=pl.col("busy_ns") / pl.col("step_ns"))
    return used.select("rank", "step", "busy_share", pl.col("occupancy_share").fill_nan(None)).sort("rank", "step")


def _in_steps(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """The rows that start within a step, with its number."""
    of = steps.select("rank", "step", "end_ns", begin_ns="start_ns")
    found = rows.sort("start_ns").join_asof(
        of, left_on="start_ns", right_on="begin_ns", by="rank", strategy="backward", check_sortedness=False
    )
    return found.filter(pl.col("end_ns") > _START).drop("end_ns", "begin_ns")


def _host(events: pl.DataFrame) -> pl.DataFrame:
    """Operators, with what they took beyond the operators within them as `dur_ns`."""
    host = events.filter((pl.col("category") == "cpu_op") & pl.col("thread").is_not_null())
    host = host.with_columns(lane=pl.struct("rank", "thread").rank("dense").cast(pl.Int64))
    host = host.sort("lane", "start_ns", "dur_ns", descending=[False, False, True])
    start, length = (host[name].to_numpy(writable=True) for name in ("start_ns", "dur_ns"))
    parent = nearest_encloser(host["lane"].to_numpy(writable=True), start, start + length)
    inner = np.bincount(parent[parent >= 0], length[parent >= 0], minlength=len(host))
    host = host.with_columns(dur_ns=pl.Series((length - inner).clip(0).astype(np.int64)))
    return _placed(host.filter(~pl.col("name").str.contains(_WRAPPER)), "host")


def _device(events: pl.DataFrame) -> pl.DataFrame:
    work = events.filter(pl.col("category").is_in(list(DEVICE_CATEGORIES)))
    return _placed(_with_launches(work, events).with_columns(start_ns="launch_ns"), "device")


def _launches(events: pl.DataFrame) -> pl.DataFrame:
    calls = events.filter(pl.col("category").is_in(list(CALL_CATEGORIES)))
    return _placed(calls.filter(classify(pl.col("name"), CALL_PATTERNS) == "launch"), "launch")


def _collectives(events: pl.DataFrame) -> pl.DataFrame:
    """Collectives where they run, by what they are, with the bytes that the rank gives."""
    nccl = pl.col("category").is_in(list(DEVICE_CATEGORIES)) & pl.col("name").str.contains(COMM_KERNELS)
    gloo = (pl.col("category") == "user_annotation") & pl.col("name").str.contains(HOST_COMM)
    rows = _with_launches(events.filter(nccl | gloo), events)
    told = arguments(rows["args"], _COMM_ARGUMENTS)
    texts = [rows["args"].str.json_path_match(f'$["{name}"]') for name in ("Input Dims", "Input type")]
    stated = told.select("In msg nelems", "dtype").iter_rows()
    given = [
        _given_bytes(*texts) if count is None else count * _item_bytes(word)
        for (count, word), *texts in zip(stated, *texts, strict=True)
    ]
    named = told.select(classify(pl.col("Collective name"), COMM_TYPES)).to_series()
    rows = rows.with_columns(
        name=pl.coalesce(named, classify(pl.col("name"), COMM_TYPES), "name"),
        start_ns="launch_ns",
        bytes=pl.Series(given, dtype=pl.Int64),
    )
    return _placed(rows, "collective")


def _placed(rows: pl.DataFrame, where: str) -> pl.DataFrame:
    size_bytes = pl.col("bytes") if "bytes" in rows.columns else pl.lit(0, pl.Int64)
    return rows.with_columns(size_bytes.alias("bytes"), where=pl.lit(where))


def _with_launches(work: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Device work with `launch_ns`, the start of the call that launched it; its own start where there is none."""
    calls = events.filter(pl.col("category").is_in(list(CALL_CATEGORIES)) & pl.col("correlation").is_not_null())
    calls = calls.unique(["rank", "correlation"], keep="first", maintain_order=True)
    found = work.join(
        calls.select("rank", "correlation", launch_ns="start_ns"),
        on=["rank", "correlation"], how="left", maintain_order="left",
    )  # fmt: skip
    return found.with_columns(pl.coalesce("launch_ns", "start_ns").alias("launch_ns"))


def _item_bytes(word: str | None) -> int:
    return int(ELEMENT_BYTES.get(number_format(word or "") or "", 0))


def _given_bytes(dims: str | None, types: str | None) -> int:
    """Bytes of the tensors that an event was given, from its shapes and types; 0 where they were not recorded."""
    pairs = zip(listed(dims), listed(types), strict=False)
    return sum(prod(shape) * _item_bytes(word) for shape, word in pairs if all(type(size) is int for size in shape))
