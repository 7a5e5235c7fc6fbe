"""What each row of a work table takes: kernels by a calibration, collectives by where their groups lie on a cluster."""

from __future__ import annotations

import math
from functools import lru_cache, partial

import numpy as np
import polars as pl

from lumos_nb.config import gpus, same_name
from lumos_nb.costs.calibration import GENERIC, Calibration, load_calibration
from lumos_nb.costs.collectives import CollectiveModel
from lumos_nb.errors import CalibrationError, InputError, shown
from lumos_nb.layout import GROUPS, Cluster, Parallelism
from lumos_nb.workloads.work_rows import WORK

KERNEL = ["op", "dtype", "pass", "out_dtype", "causal", "accumulate", "method"]
KERNEL += [name for name, dtype in WORK.items() if dtype == pl.Int64 and name != "size_bytes"]
"""Columns of a work table that a kernel's price depends on."""
COLLECTIVE = ["collective", "size_bytes", "nodes", "gpus"]
"""And a collective's."""
PRICE = ["dur_us", "low_us", "high_us", "basis", "family"]
"""A price: the time and its 90 % interval, what it stands on, and what errs together with it."""
MESSAGES = ("send", "recv")


def priced(table: pl.DataFrame, layout: Parallelism, cluster: Cluster, calibration: Calibration) -> pl.DataFrame:
    """A work table with the price of every row; what is alike is priced once.

    A message's time is its sender's: rows of `recv` take none.

    Parameters
    ----------
    table
        Of `work`, with the physical `stage` of every row; those of several stages may lie below one another.
    layout, cluster
        Where the ranks are. A group is priced where the widest of its kind lies.
    calibration
        Prices of the cluster's GPU, and of collectives.

    Returns
    -------
    frame
        The table, the columns of `PRICE`, and `nodes` that a collective touches. `basis` is "measured", "transferred"
        or "data sheet".

    Raises
    ------
    CalibrationError, InputError
        As `Calibration.predict_kernels` and `predict_collectives`.

    Examples
    --------
    >>> from lumos_nb.workloads.llm.stages import work
    >>> cal = load_calibration("H100-SXM-80GB")
    >>> layout, cluster = Parallelism(tp=8), Cluster(gpu=cal.gpu, inside="NVLink4 NVSwitch")
    >>> table = work(Transformer.named("llama-3-8b"), layout, Training(micro_batch=1, global_batch=1, seq=4096))
    >>> rows = priced(table.with_columns(stage=0), layout, cluster, cal)
    >>> rows.filter(collective="all_reduce")["dur_us"].min() > 0
    True
    """
    return with_prices(_placed(table, layout, cluster), cluster, calibration).drop("gpus")


def with_prices(table: pl.DataFrame, cluster: Cluster, calibration: Calibration) -> pl.DataFrame:
    """The same of rows that say themselves, in `nodes` and `gpus`, where the group of a collective lies."""
    table = table.with_row_index("place")
    is_compute, is_received = pl.col("kind") == "compute", (pl.col("collective") == "recv").fill_null(value=False)
    over = partial(collective_prices, cluster=cluster, calibration=calibration)
    found = [table.filter(is_received).select("place", *_FREE)]
    for rows, columns, price in (
        (table.filter(is_compute), KERNEL, calibration.predict_kernels),
        (table.filter(~is_compute & ~is_received), COLLECTIVE, over),
    ):
        if rows.height:
            alike = rows.select(columns).unique(maintain_order=True)
            prices = price(alike).rename({"cell": "family"}, strict=False).select(*columns, *PRICE)
            found.append(rows.select("place", *columns).join(prices, on=columns, nulls_equal=True))
    prices = pl.concat([part.select("place", *PRICE) for part in found]).sort("place")
    return table.with_columns(prices.drop("place")).drop("place")


_FREE = [
    *(pl.lit(0.0).alias(name) for name in PRICE[:3]),
    pl.lit("measured").alias("basis"),
    pl.lit("recv").alias("family"),
]


def collective_prices(rows: pl.DataFrame, cluster: Cluster, calibration: Calibration) -> pl.DataFrame:
    """Prices of distinct collectives: the columns of `COLLECTIVE`, and those of `CollectiveModel.predict`."""
    sheets = cluster.fabrics
    model: CollectiveModel | None = calibration.collectives
    if model is None:
        raise CalibrationError(
            f"the calibration {calibration.name} has no collectives, which this layout needs; measure a size sweep of "
            "each (nccl-tests, or make calibrate)."
        )
    outermost = pl.when(pl.col("nodes") > 1).then(pl.lit(sheets[-1].name)).otherwise(pl.lit(sheets[0].name))
    asked = rows.with_columns(
        pl.when(pl.col("collective").is_in(MESSAGES)).then(pl.lit("send_recv")).otherwise("collective").alias("asked"),
        hardware=pl.lit(sheets[0].name),
        interconnect=outermost,
    )
    named = asked.rename({"collective": "family", "asked": "collective"})
    return model.predict(named, extra=sheets).drop("collective").with_columns(collective="family")


def _placed(table: pl.DataFrame, layout: Parallelism, cluster: Cluster) -> pl.DataFrame:
    """With `nodes` and `gpus` of each collective's group: of messages, those of the two stages that they join."""
    wide = {group: place(layout.groups(group), cluster) for group in GROUPS}
    by_group = pl.DataFrame(
        [(group, *at) for group, at in wide.items()], schema=["group", "nodes", "gpus"], orient="row"
    )
    stages = layout.groups("pp")
    pairs = [
        ("pp", stage, peer, *place(stages[:, [stage, (stage + peer) % layout.pp]], cluster))
        for stage in range(layout.pp)
        for peer in (-1, 1)
    ]
    by_peer = pl.DataFrame(
        pairs,
        schema={"group": pl.String, "stage": pl.Int32, "peer": pl.Int32, "near": pl.Int64, "ends": pl.Int64},
        orient="row",
    )
    table = table.with_columns(pl.col("stage").cast(pl.Int32))
    joined = table.join(by_group, on="group", how="left", maintain_order="left")
    joined = joined.join(by_peer, on=["group", "stage", "peer"], how="left", maintain_order="left")
    two = pl.col("group_size") == 2  # the two ends of a pipeline that share a tied embedding are a group of their own
    return joined.with_columns(
        nodes=pl.coalesce("near", pl.when(two).then(pl.min_horizontal("nodes", 2)).otherwise("nodes")),
        gpus=pl.coalesce("ends", pl.when(two).then(2).otherwise("gpus")),
    ).drop("near", "ends")


def place(groups: np.ndarray[tuple[int, ...], np.dtype[np.int64]], cluster: Cluster) -> tuple[int, int]:
    """Nodes and GPUs of the widest group; as many GPUs on each node, as collectives are measured."""
    nodes, _ = cluster.span(groups)
    return nodes, nodes * math.ceil(groups.shape[1] / nodes)


def prices_of(cluster: Cluster, calibration: Calibration | None) -> Calibration:
    """A calibration of the cluster's GPU: the given one, else the bundled one, else the generic one by its sheet."""
    sheet = cluster.gpu_sheet
    if calibration is None:
        return _named(sheet.name) if sheet in gpus() else _named(GENERIC).for_gpu(sheet)
    if not isinstance(calibration, Calibration):
        raise InputError(f"calibration is {shown(calibration)}; give one of load_calibration(name) or calibrate(run).")
    if not same_name(calibration.gpu.name, sheet.name):
        raise InputError(
            f"the calibration is of {calibration.gpu.name}, the cluster of {sheet.name}: give "
            f"load_calibration({sheet.name!r}), or calibration.for_gpu(cluster.gpu_sheet) for what its data sheet says."
        )
    return calibration


_named = lru_cache(maxsize=8)(load_calibration)
