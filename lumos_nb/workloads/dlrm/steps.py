"""The step of a recommendation model on all devices: what each row takes on each of them, and the graph of it.

Kernels and sums of gradients take the same everywhere; lookups take what the device's shards ask for, and exchanges
begin when the last device is there and take what the busiest one sends or gets.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.costs.calibration import Calibration
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.host import Overheads
from lumos_nb.costs.lookups import LookupModel, lookup_us
from lumos_nb.errors import CalibrationError, LayoutError
from lumos_nb.layout import SIZE_OF, Cluster
from lumos_nb.workloads.dlrm.model import DlrmTraining
from lumos_nb.workloads.dlrm.passes import LOOKUP, Passes
from lumos_nb.workloads.dlrm.plan import Plan
from lumos_nb.workloads.pricing import with_prices
from lumos_nb.workloads.steps import HOST_ROW, Ints, Step, Waits

Floats = NDArray[np.float64]

LANES = ("gpu0:0", "gpu0:comm", "gpu0:dp", "gpu0:input", "cpu:0", "net")
"""A device's streams: kernels and lookups, exchanges, sums of gradients, indices of the next batch; its host; joins."""
STREAMS = {"compute": 0, "comm": 1, "dp": 2, "input": 3}
HOST, NET = 4, 5

OPERATORS = {
    # op or collective of the work table: the operator of torch that the host runs for it
    "gemm": "aten::mm",
    "gemm_bias": "aten::addmm",
    "interaction": "aten::bmm",
    "relu": "aten::relu",
    "concat": "aten::cat",
    "add": "aten::add",
    "mul": "aten::mul",
    "reduction": "aten::sum",
    "elementwise": "aten::mul",
    "sgd": "aten::_fused_sgd_",
    "adamw": "aten::_fused_adamw_",
    "lookup": "aten::embedding_bag",
    "all_to_all": "c10d::alltoall_base_",
    "all_reduce": "c10d::allreduce_",
}


LAUNCH_CALL = "cudaLaunchKernel"


def sent_bytes(plan: Plan, train: DlrmTraining, gpus_per_node: int = 1) -> dict[str, NDArray[np.float64]]:
    """What each device (row) sends to each other (column) in each exchange, of tables that are not on all devices.

    An index travels with its sample's offset, to every device that has a part of its table's columns, and to one of
    those that have a part of its rows. Pooled embeddings, and partial sums of tables that are cut by rows, travel to
    the samples' devices, and gradients back.

    Those of tables in a grid take two steps, as in TorchRec and in HugeCTR's hierarchical plans: `inside` a node to its
    device of the same number as the sample's, where partial sums are added up; then `between` devices of that number in
    different nodes. Gradients go the same ways back.

    Raises
    ------
    LayoutError
        Columns of a table in a grid lie in several nodes.

    Examples
    --------
    >>> tables = pl.DataFrame({"table": ["a"], "rows": [100], "dim": [8], "pooling": [2.0], "dtype": ["fp32"]})
    >>> plan = Plan.of(tables, pl.DataFrame({"table": ["a"], "device": [0]}), [1e6, 1e6])
    >>> sent_bytes(plan, DlrmTraining(global_batch=64))["pooled"].tolist()
    [[0.0, 1024.0], [0.0, 0.0]]
    """
    n = plan.devices.height
    batch = train.local_batch(n)
    shards = plan.lookups.filter(pl.col("kind") != "data_parallel")
    dtype = train.comm_dtype or {"tf32": "fp32"}.get(train.dtype, train.dtype)
    column = batch * SIZE_OF[dtype]
    direct, grid = shards.filter(pl.col("kind") != "grid_shard"), shards.filter(kind="grid_shard")
    pooled, partial, indices = np.zeros(n), np.zeros(n), np.zeros(n)
    np.add.at(pooled, direct["device"].to_numpy(), direct["dim"].to_numpy() * column)
    np.add.at(partial, grid["device"].to_numpy(), grid["dim"].to_numpy() * column)
    np.add.at(indices, shards["device"].to_numpy(), (shards["pooling"].to_numpy() + 1) * batch * train.index_bytes)
    others, node = 1.0 - np.eye(n), np.arange(n) // gpus_per_node
    out = others * pooled[:, None]
    summed = _columns_of_nodes(plan, gpus_per_node)[node] * column
    together, same_number = node[:, None] == node, np.arange(n)[:, None] % gpus_per_node == np.arange(n) % gpus_per_node
    return {
        "indices": others * indices,
        "pooled": out,
        "gradients": out.T,
        "inside": others * together * partial[:, None] * (node[-1] + 1),  # for as many devices as there are nodes
        "between": others * same_number * summed[:, None],
    }


def _columns_of_nodes(plan: Plan, gpus_per_node: int) -> NDArray[np.float64]:
    """[nodes]: columns of tables in a grid, each once a node."""
    grid = plan.frame.filter(kind="grid_shard").with_columns(node=pl.col("device") // gpus_per_node)
    blocks = grid.group_by("table", "first_column", maintain_order=True).agg(pl.col("dim", "node").first(), ends="node")
    if (torn := blocks.filter(pl.col("ends").list.n_unique() > 1)).height:
        raise LayoutError(
            f"table {torn['table'][0]!r} is a grid_shard with the same columns in several nodes of {gpus_per_node} "
            "devices: keep columns in one node, or make it row_wise."
        )
    columns: NDArray[np.float64] = np.zeros(-(-plan.devices.height // gpus_per_node))
    np.add.at(columns, blocks["node"].to_numpy(), blocks["dim"].to_numpy())
    return columns


def device_times(
    steps: Passes, plan: Plan, train: DlrmTraining, cluster: Cluster, calibration: Calibration, lookups: LookupModel
) -> pl.DataFrame:
    """Every row of every device with its price: the rows of `Passes.table` device by device, and `rank`.

    Raises
    ------
    CalibrationError, InputError
        Something has no price.
    """
    n, table = plan.devices.height, steps.table.with_columns(rank=pl.lit(0))
    nodes = -(-n // cluster.gpus_per_node)
    is_sum = pl.col("collective") == "all_reduce"
    alike = table.with_row_index("at").with_columns(
        nodes=pl.when(is_sum).then(nodes), gpus=pl.when(is_sum).then(nodes * min(n, cluster.gpus_per_node))
    )
    own = alike.filter((pl.col("kind") == LOOKUP) | (pl.col("collective") == "all_to_all").fill_null(value=False))
    rest = with_prices(alike.join(own.select("at"), on="at", how="anti"), cluster, calibration).drop("gpus")
    sizes = _exchanged(plan, train, cluster, calibration) if own["kind"].is_in(["comm"]).any() else {}
    taken = _looked_up(plan, train, lookups)
    parts = [rest.with_columns(rank=pl.lit(rank)) for rank in range(n)]
    for row in own.drop("gpus").iter_slices(1):
        what, kind = row["weight"].item(), row["kind"].item()
        if kind == LOOKUP:
            us, bytes_, basis = taken[what][:, 0 if row["pass"].item() == "fwd" else 1], [None] * n, _basis(lookups)
        else:
            us, bytes_, basis = np.full(n, sizes[what][0]), sizes[what][1].tolist(), sizes[what][2]
        copies = pl.concat([row] * n).with_columns(
            rank=pl.int_range(n), size_bytes=pl.Series(bytes_, dtype=pl.Int64), nodes=pl.lit(nodes),
            kind=pl.lit("compute" if kind == LOOKUP else "comm"), op=pl.lit(kind if kind == LOOKUP else None),
            dur_us=us, low_us=us, high_us=us, basis=pl.lit(basis), family=pl.lit(LOOKUP if kind == LOOKUP else what),
        )  # fmt: skip
        parts.append(copies)
    return pl.concat(parts, how="diagonal_relaxed").sort("rank", "at").drop("at")


def _basis(lookups: LookupModel) -> str:
    """What prices of lookups rest on: samples, unless the physical model was fitted on none."""
    return "data sheet" if isinstance(lookups, PhysicalLookup) and not lookups.calls else "measured"


def _looked_up(plan: Plan, train: DlrmTraining, lookups: LookupModel) -> dict[str, Floats]:
    """Forward and backward us of each device's lookups, (n, 2): sharded ones for all samples, others for its own."""
    shards, n = plan.lookups, plan.devices.height
    found = {}
    for what, batch, kept in (
        ("sharded", train.global_batch, pl.col("kind") != "data_parallel"),
        ("replicated", train.local_batch(n), pl.col("kind") == "data_parallel"),
    ):
        mine = shards.filter(kept).with_columns(table=pl.int_range(pl.len()).cast(pl.String))
        sets = [np.flatnonzero(mine["device"] == device).tolist() for device in range(n)]
        found[what] = lookup_us(lookups, mine, batch, sets) if mine.height else np.zeros((n, 2))
    return found


def _exchanged(
    plan: Plan, train: DlrmTraining, cluster: Cluster, calibration: Calibration
) -> dict[str, tuple[float, NDArray[np.int64], str]]:
    """Of each exchange: its time, the bytes of each device (the larger of what it gives and gets), what prices it."""
    if calibration.collectives is None:
        raise CalibrationError(
            f"the calibration {calibration.name} has no collectives, which several devices need; measure a size sweep "
            "of each (nccl-tests, or make calibrate)."
        )
    model, n, each = calibration.collectives, plan.devices.height, cluster.gpus_per_node
    sheets = cluster.fabrics
    nodes = -(-n // each)
    outermost = sheets[-1 if nodes > 1 else 0]
    asked = {"hardware": sheets[0].name, "interconnect": outermost.name, "nodes": nodes, "gpus": n}
    even = model.predict(pl.DataFrame({**asked, "collective": "all_to_all", "size_bytes": 1 << 20}), extra=sheets)
    sent = sent_bytes(plan, train, each)
    inside, between = sent.pop("inside"), sent.pop("between")
    apart = 0.0
    if inside.any():
        blocks = np.stack([inside[at : at + each, at : at + each] for at in range(0, n, each)])
        apart += float(model.predict_uneven(blocks, sheets[0].name, sheets[0].name, 1, extra=sheets).max())
    if between.any():
        lanes = np.stack([between[at::each, at::each] for at in range(each)])
        apart += float(model.predict_uneven(lanes, sheets[0].name, outermost.name, nodes, extra=sheets).max())
    found = {}
    for what, direct in sent.items():
        every, more = (direct, 0.0) if what == "indices" else (direct + inside + between, apart)
        us = float(model.predict_uneven(direct, sheets[0].name, outermost.name, nodes, extra=sheets))
        most = np.maximum(every.sum(axis=0), every.sum(axis=1)).astype(np.int64)
        found[what] = (us if direct.any() else 0.0) + more, most, str(even["basis"].item())
    return found


def issued(table: pl.DataFrame, overheads: Overheads | None) -> pl.DataFrame:
    """A table with `launch_us`, the host's time until each row is issued, and `after_us`, until the next one begins.

    Of measured overheads these are T1, T2 and T4 of a row's operator, and T3; else what `Surcharges.applied` said. A
    row is one launch, so that nothing is between two of its own (T5).

    Raises
    ------
    CalibrationError
        The overheads have none of one of these: they were measured where nothing is launched.
    """
    if overheads is None:
        return table.with_columns(after_us=pl.lit(0.0))
    operator = pl.coalesce("op", "collective").replace_strict(OPERATORS, default="aten::add")
    rows = table.select(operator=operator).with_row_index("at")
    asked = {"T1": pl.format("before {}", "operator"), "T2": pl.col("operator"), "T4": pl.lit(LAUNCH_CALL)}
    cost = {
        overhead: overheads.find(rows.select("at", overhead=pl.lit(overhead), name=name))["cost_us"]
        for overhead, name in (asked | {"T3": pl.col("operator")}).items()
    }
    return table.with_columns(launch_us=sum(cost[overhead] for overhead in asked), after_us=cost["T3"])


def assembled(table: pl.DataFrame, steps: Passes, devices: int) -> Step:
    """Lay out one step of all devices.

    Parameters
    ----------
    table
        Of `device_times`; with `launch_us`, what the host takes until a row is issued, and `after_us`, until it begins
        with the next one, where it may be late.
    steps
        What waits for what.
    devices
        Ranks, each with as many rows.

    Returns
    -------
    step
        Every row of every rank, arrivals at collectives and where their ranks meet, with its waits.
    """
    page, rows = table[: steps.table.height], steps.table.height
    comm = (page["kind"] == "comm").to_numpy()
    points = page.filter(pl.Series(comm)).with_columns(dur_us=0.0)
    kinds = {"event": pl.lit("arrival"), "join": pl.format("{} of {} ranks", "collective", "group_size")}
    extra = [points.with_columns(kind=pl.lit(kind), op=op, weight=None) for kind, op in kinds.items()]
    host = _host_rows(table, devices)
    whole = pl.concat([table.with_columns(kind=pl.col("kind")), *extra, host], how="diagonal_relaxed")
    # Ops in issue order: the hosts, then row by row that of every rank; of a collective arrivals, a join, transfers.
    ranks = np.arange(devices)
    before, ends = devices if host.height else 0, np.cumsum(np.where(comm, 2 * devices + 1, devices))
    last = before + ends[:, None] - devices + ranks
    first = np.where(comm[:, None], last - devices - 1, last)
    count = before + int(ends[-1])
    row, rank, lane = np.zeros((3, count), np.int64)
    row[last], rank[last] = np.arange(rows)[:, None] + rows * ranks, ranks
    lane[last] = page["stream"].replace_strict(STREAMS, return_dtype=pl.Int64).to_numpy()[:, None]
    arrivals = rows * devices + np.arange(comm.sum())
    row[first[comm]], rank[first[comm]], lane[first[comm]] = arrivals[:, None], ranks, lane[last[comm]]
    joins = last[comm, 0] - 1
    row[joins], lane[joins] = arrivals + comm.sum(), NET
    row[:before], rank[:before], lane[:before] = len(whole) - before + np.arange(before), ranks[:before], HOST
    waits = tuple(_waits(page, steps, first, last, joins, comm))
    if before:
        waits = (*waits, _launches(table, first))
    none = np.full(count, -1)
    return Step(whole, row, rank, none, np.zeros(count, np.int64), lane, waits, LANES)


def _host_rows(table: pl.DataFrame, devices: int) -> pl.DataFrame:
    """A row for each rank's host, as long as it takes to issue everything; none where it takes no time."""
    if "launch_us" not in table.columns or not (table["launch_us"] + table["after_us"]).sum():
        return pl.DataFrame()
    took = table.group_by("rank", maintain_order=True).agg(us=(pl.col("launch_us") + pl.col("after_us")).sum())["us"]
    host = pl.DataFrame({"dur_us": took, "low_us": took, "high_us": took})
    return host.with_columns(pl.lit(text).alias(name) for name, text in HOST_ROW.items())


def _waits(
    page: pl.DataFrame, steps: Passes, first: Ints, last: Ints, joins: Ints, comm: NDArray[np.bool_]
) -> Iterator[Waits]:
    """Every rule; ops by row and rank."""
    stream = page["stream"].replace_strict(STREAMS, return_dtype=pl.Int64).to_numpy()
    for lane in np.unique(stream):
        on = np.flatnonzero(stream == lane)
        yield Waits(last[on[:-1]].ravel(), first[on[1:]].ravel(), "stream")
    products = np.maximum.accumulate(np.where(stream == STREAMS["compute"], np.arange(len(stream)), -1))
    behind = np.flatnonzero(comm & (stream != STREAMS["input"]) & (products >= 0))
    yield Waits(last[products[behind]].ravel(), first[behind].ravel(), "event")
    every = np.broadcast_to(joins[:, None], first[comm].shape).ravel()
    yield Waits(first[comm].ravel(), every, "collective")
    yield Waits(every, last[comm].ravel(), "collective")
    if steps.waits:
        src, dst = np.array(steps.waits).T
        yield Waits(last[src].ravel(), first[dst].ravel(), "event")


def _launches(table: pl.DataFrame, first: Ints) -> Waits:
    """The host issues rows one after another."""
    rows, devices = first.shape
    until, after = (table[name].to_numpy().reshape(devices, rows).T for name in ("launch_us", "after_us"))
    lag_us = np.cumsum(until + after, axis=0) - after
    hosts = np.broadcast_to(np.arange(devices), first.shape)
    return Waits(hosts.ravel(), first.ravel(), "launch", lag_us.ravel(), from_start=True)
