"""A linked execution trace as Chakra nodes: the call tree as control dependencies, with the times of the profile.

What the reference converter makes, and what it leaves out: start times, the order of a stream, and the time of a thread
between its ops as nodes of its own. Ids are those of the execution trace. For waits between streams and threads, and
for several ranks, convert the graph of the profile (`write`).
"""

from __future__ import annotations

import polars as pl

from lumos_nb.calls import COMM_KERNELS, COMM_TYPES, classify
from lumos_nb.errors import InputError, shown
from lumos_nb.exchange.chakra.conversion import VERSION
from lumos_nb.exchange.chakra.linking import Linked
from lumos_nb.exchange.chakra.messages import COLLECTIVES
from lumos_nb.exchange.chakra.tables import NODES, Nodes
from lumos_nb.exchange.chakra.to_nodes import AS_COLLECTIVE

FRAMES = ("process", "thread")
"""Nodes that only hold others: METADATA nodes, as the reference has the process."""


def from_linked(linked: Linked, iteration: int = 0) -> Nodes:
    """The nodes of an execution trace and of the device work that it launched.

    An op has the time that it spent outside its children, so that a thread's nodes take as long as the thread did. It
    depends on its caller (control) and on what its thread did before (data), as a call precedes what it calls; a kernel
    on the op that launched it and on the one before it on its stream.

    Parameters
    ----------
    linked
        `link(execution_trace, run)`.
    iteration
        Which of the profile's iterations.

    Returns
    -------
    Nodes
        With `rf_id`, `seq_id`, `op_schema`, arguments and the other attributes of the reference converter.

    Raises
    ------
    InputError
        The profile has no such iteration, or what is given is not linked.

    Examples
    --------
    >>> folder = datasets.path("gpt-single-paired")
    >>> nodes = from_linked(ln.chakra.link(folder / "rank-0.et.json.gz", folder / "rank-0.json.gz"))
    >>> nodes.table.height > 1000
    True
    """
    if not isinstance(linked, Linked):
        raise InputError(f"this takes a Linked trace, not a {type(linked).__name__}; ln.chakra.link gives one.")
    ops = linked.nodes.filter(pl.col("iteration") == iteration)
    if ops.is_empty():
        raise InputError(
            f"iteration is {shown(iteration)}; the trace has {linked.nodes['iteration'].n_unique()}, from 0 on."
        )
    device = linked.device.filter(
        (pl.col("iteration") == iteration) & pl.col("node_id").is_in(ops["node_id"].implode())
    )
    zero_ns = pl.concat([ops["start_ns"], device["start_ns"]]).min() or 0
    host = _in_thread_order(ops)
    every = pl.concat([host, _device(linked, device)], how="diagonal")
    most = ops["node_id"].max()
    fresh = (most if isinstance(most, int) else 0) + pl.col("id").is_null().cum_sum()
    every = every.with_columns(id=pl.coalesce("id", fresh.cast(pl.Int64)))
    before = pl.col("id").shift(1).over("chain")
    end_us = (pl.col("dur_ns").fill_null(0).cum_sum() + 500) // 1000
    every = every.with_columns(
        data_deps=pl.concat_list(before).list.drop_nulls(),
        ctrl_deps=pl.concat_list("caller").list.drop_nulls(),
        dur_us=(end_us - end_us.shift(1).fill_null(0)).over("chain"),
        start_us=((pl.col("start_ns") - zero_ns) // 1000).fill_null(0),
    )
    every = every.with_columns(data_deps=pl.when(pl.col("chain").is_null()).then([]).otherwise("data_deps"))
    every = every.join(_arguments(linked), left_on="id", right_on="node_id", how="left", maintain_order="left")
    return Nodes.of(every.select(name for name in every.columns if name in NODES.columns), version=VERSION)


def _in_thread_order(ops: pl.DataFrame) -> pl.DataFrame:
    """Ops by thread and start, callers before what they call, with what lay between ops as ops of no id."""
    inside = ops.group_by(node_id="parent", host_thread="host_thread").agg(inside_ns=pl.sum("dur_ns"))
    ops = ops.join(inside, on=["node_id", "host_thread"], how="left")
    ops = ops.sort("host_thread", "start_ns", -pl.col("dur_ns"), "node_id", nulls_last=True)
    until = (pl.col("start_ns") + pl.col("dur_ns")).cum_max().shift(1).over("host_thread")
    ops = ops.with_columns(gap_ns=pl.col("start_ns") - until, place=pl.int_range(pl.len()) * 2)
    host = ops.select(
        "place", "name", "start_ns", "rf_id", "scope", "op_schema", "host_thread",
        id="node_id", caller="parent", seq_id="sequence", fw_parent="forward_parent", tid="thread",
        fw_tid="forward_thread", is_cpu_op=pl.lit(value=True),
        dur_ns=(pl.col("dur_ns") - pl.col("inside_ns").fill_null(0)).clip(0),
        type=pl.when(pl.col("kind").is_in(FRAMES)).then(pl.lit("METADATA_NODE")).otherwise(pl.lit("COMP_NODE")),
    )  # fmt: skip
    gaps = ops.filter(pl.col("gap_ns") > 0).select(
        "host_thread", place=pl.col("place") - 1, name=pl.lit("gap"), start_ns=pl.col("start_ns") - pl.col("gap_ns"),
        dur_ns="gap_ns", tid="thread", is_cpu_op=pl.lit(value=True), type=pl.lit("COMP_NODE"),
    )  # fmt: skip
    return (
        pl.concat([host, gaps], how="diagonal")
        .sort("place")
        .with_columns(chain=pl.when(pl.col("host_thread").is_not_null()).then(pl.format("cpu:{}", "host_thread")))
    )


def _device(linked: Linked, device: pl.DataFrame) -> pl.DataFrame:
    comms = linked.execution_trace.comms.select("node_id", "collective", "group", "in_bytes").unique("node_id")
    work = device.sort("start_ns", "event_id").join(comms, on="node_id", how="left", maintain_order="left")
    is_comm = (pl.col("category") == "kernel") & pl.col("name").str.contains(COMM_KERNELS)
    kind = pl.coalesce(classify(pl.col("collective"), COMM_TYPES), classify(pl.col("name"), COMM_TYPES))
    number = (
        kind.replace(AS_COLLECTIVE)
        .str.to_uppercase()
        .replace_strict({name: i for i, name in enumerate(COLLECTIVES)}, default=None, return_dtype=pl.Int64)
    )
    work = work.with_columns(comm_type=pl.when(is_comm).then(number))
    met = pl.col("comm_type").is_not_null()
    return work.select(
        "name", "start_ns", "dur_ns", "stream", "comm_type", caller="node_id", is_cpu_op=pl.lit(value=False),
        type=pl.when(met).then(pl.lit("COMM_COLL_NODE")).otherwise(pl.lit("COMP_NODE")),
        comm_size=pl.when(met).then("in_bytes"), pg_name=pl.when(met).then("group"),
        chain=pl.format("gpu{}:{}", "device", "stream"),
    )  # fmt: skip


def _arguments(linked: Linked) -> pl.DataFrame:
    """Arguments as the texts of inputs and outputs: `node_id` and six columns."""
    arguments = linked.execution_trace.arguments.sort("node_id", "side", "position")
    listed = pl.format("[{}]", pl.col("value").fill_null("null").str.join(", "))
    shapes = pl.format("[{}]", pl.col("shape").fill_null("[]").str.join(", "))
    types = pl.format("[{}]", pl.format("'{}'", pl.col("type").fill_null("")).str.join(", "))
    texts = arguments.group_by("node_id", "side").agg(values=listed, shapes=shapes, types=types)
    table = arguments.select("node_id").unique()
    for side in ("input", "output"):
        own = (
            texts.filter(side=side)
            .drop("side")
            .rename({name: f"{side}_{name}" for name in ("values", "shapes", "types")})
        )
        table = table.join(own, on="node_id", how="left")
    return table
