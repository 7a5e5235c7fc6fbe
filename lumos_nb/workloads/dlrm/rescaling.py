"""A traced DLRM step with another batch, or with other tables: measured times, times the ratio of two predictions.

What of a step grows with the batch is told by sizes: a product whose rows (or, in a weight's gradient, whose inner
size) are the batch, an op on a multiple of it, lookups, exchanges of pooled embeddings. What goes over parameters does
not. Each is priced with its old and its new size, so that a systematic error of the prices cancels; what has no size,
and the host, stays as it was measured, and the report says how much that is.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from lumos_nb.config import Gpu
from lumos_nb.costs.calibration import Calibration
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.lookups import LookupModel, lookup_us
from lumos_nb.embedding_tables import complete_tables
from lumos_nb.errors import InputError, is_whole, shown
from lumos_nb.graph import Graph
from lumos_nb.layout import Cluster
from lumos_nb.schema import require
from lumos_nb.workloads.llm.exchanging import Prices
from lumos_nb.workloads.llm.layer_search import ACCUMULATES
from lumos_nb.workloads.llm.retiming import parts_of, ratios
from lumos_nb.workloads.llm.rewriting import calibration_of

PRODUCTS = ("gemm", "gemm_bias")
LOOKUPS = r"(?i)embedding"
"""What names of kernels and operators that look tables up, or update them, have in common."""
SPARSE = "a sparse tensor"
EXCHANGE = "all_to_all"


def rescale_batch(
    graph: Graph,
    batch: int,
    to: int,
    *,
    tables: pl.DataFrame | None = None,
    to_tables: pl.DataFrame | None = None,
    lookups: LookupModel | None = None,
    calibration: Calibration | str | None = None,
    cluster: Cluster | None = None,
) -> Graph:
    """A step of a recommendation model, as traced, with another batch.

    Parameters
    ----------
    graph
        One step, recorded with shapes of operators (`build_graph`); of several ranks all have the same batch.
    batch, to
        Samples of a rank in the trace, and as asked for.
    tables, to_tables
        The embedding tables of the job and, where they are other ones (of the same dims), those asked for. Without them
        lookups take time in proportion to the batch.
    lookups
        Prices of lookups; by default the physical model on the data sheet of the calibration's GPU.
    calibration
        Prices of kernels and exchanges; by default that of the GPU which the run names.
    cluster
        Where it ran; without it exchanges take time in proportion to their bytes.

    Returns
    -------
    Graph
        With other durations; `replay` says when what runs. Its report counts what was timed anew and what could not be.

    Raises
    ------
    InputError
        A batch is no positive number, no op has the traced batch, or `to_tables` come without `tables`.

    Examples
    --------
    >>> larger = rescale_batch(graph, batch=8, to=16)
    >>> ln.replay(larger).step_ns > ln.replay(graph).step_ns
    True
    """
    require(graph, "edges")
    for name, value in (("batch", batch), ("to", to)):
        if not is_whole(value, 1):
            raise InputError(f"{name} is {shown(value)}; give the samples of a rank, a whole number from 1 on.")
    if to_tables is not None and tables is None:
        raise InputError("to_tables is there, but not tables: give the tables of the trace as well.")
    prices = calibration_of(graph, calibration)
    ops = graph.ops.with_columns(more=pl.lit(0.0), how=pl.lit(None, pl.String))
    pieces = (
        _looked_up(graph, _lookup_ratio(batch, to, tables, to_tables, lookups, prices.gpu)),
        _exchanged(graph, to / batch, prices, cluster),
        _kernels(graph, batch, to, prices),
    )
    for more in pieces:
        ops = ops.join(more, on="op_id", how="left", maintain_order="left", suffix="_of").with_columns(
            more=pl.when(pl.col("how").is_null()).then(pl.col("more_of").fill_null(0.0)).otherwise("more"),
            how=pl.coalesce("how", "how_of"),
        )
        ops = ops.drop("more_of", "how_of")
    dur_ns = (pl.col("dur_ns") + pl.col("more")).round().clip(0).cast(pl.Int64)
    report = pl.concat([graph.report, _notes(ops)], how="diagonal_relaxed")
    return replace(graph, ops=ops.with_columns(dur_ns=dur_ns).drop("more", "how"), report=report)


def _kernels(graph: Graph, batch: int, to: int, prices: Calibration) -> pl.DataFrame:
    """`op_id`, `more` (ns) and `how` of the ops whose parts have sizes."""
    parts = parts_of(graph, graph.run)
    place = graph.ops.select(
        "op_id", "phase", label=pl.concat_str("name", pl.col("parent").fill_null(""), separator=" ")
    )
    placed = parts.join(place, on="op_id", how="left", maintain_order="left")
    sized, sizes = with_batch(placed, batch, to), list(parts.columns)
    if with_batch(placed, batch, 2 * batch).select(sizes).equals(parts):
        raise InputError(
            f"no op of this step has a size of {batch}, the batch that was given: give that of the trace, and a run "
            "that was recorded with record_shapes=True."
        )
    ratio = pl.Series(ratios(parts, sized.select(sizes), prices))
    timed = parts.select("op_id", more=pl.col("time_ns") * (ratio - 1))
    return timed.group_by("op_id").agg(pl.col("more").sum(), how=pl.lit("kernels: predicted over predicted"))


def with_batch(parts: pl.DataFrame, batch: int, to: int) -> pl.DataFrame:
    """Parts (`retiming.PARTS`, with `phase` and `label` of their op) whose batch is another one.

    Of a product the first of its rows, inner size and columns that is the batch is meant; of what moves data rows that
    are a multiple of it, or where there is one row, columns. What goes over parameters stays.

    Examples
    --------
    >>> part = {"op": "gemm", "batch": 1, "m": 64, "n": 512, "k": 13, "rows": None, "cols": None}
    >>> frame = pl.DataFrame([part | {"phase": "forward", "label": "aten::addmm"}])
    >>> with_batch(frame, 64, 256)["m"].item()
    256
    """
    own = (pl.col("phase") == "optimizer") | pl.col("label").str.contains(f"{ACCUMULATES}|Optimizer")
    activation = ~own.fill_null(value=False)
    product = activation & pl.col("op").is_in(PRODUCTS)
    found, made = pl.lit(value=False), {}
    for column in ("m", "k", "n"):
        here = product & (pl.col(column) == batch) & ~found
        made[column] = pl.when(here).then(to).otherwise(column).cast(pl.Int64)
        found = found | here
    made["batch"] = pl.when(activation & (pl.col("batch") == batch)).then(to).otherwise("batch").cast(pl.Int64)
    moves = activation & ~pl.col("op").is_in([*PRODUCTS, "bmm"])
    many = moves & (pl.col("rows") >= batch) & (pl.col("rows") % batch == 0) & (pl.col("batch").fill_null(0) != batch)
    flat = moves & (pl.col("rows") == 1) & (pl.col("cols") >= batch) & (pl.col("cols") % batch == 0) & ~many
    for column, which in (("rows", many), ("cols", flat)):
        made[column] = pl.when(which).then(pl.col(column) * to // batch).otherwise(column).cast(pl.Int64)
    return parts.with_columns(**made)


def _lookup_ratio(
    batch: int,
    to: int,
    tables: pl.DataFrame | None,
    to_tables: pl.DataFrame | None,
    lookups: LookupModel | None,
    gpu: Gpu,
) -> tuple[float, float]:
    """How many times as long lookups take, forward and backward."""
    if tables is None:
        return to / batch, to / batch
    model = PhysicalLookup.of_sheet(gpu) if lookups is None else lookups
    frames = [complete_tables(one) for one in (tables, tables if to_tables is None else to_tables)]
    if frames[0]["dim"].to_list() != frames[1]["dim"].to_list():
        raise InputError(
            "to_tables have other dims than tables: what is done with looked-up vectors would change too. Give tables "
            "of the same dims, of other rows, pooling or reuse; or estimate_dlrm such a step."
        )
    sizes = zip(frames, (batch, to), strict=True)
    old, new = (lookup_us(model, one, size, [range(one.height)])[0] for one, size in sizes)
    return float(new[0] / old[0]), float(new[1] / old[1])


def _looked_up(graph: Graph, ratio: tuple[float, float]) -> pl.DataFrame:
    """The same of lookups: on a device their kernels, else what their operators take."""
    work = ["kernel"] if graph.ops["device"].is_not_null().any() else ["cpu"]
    named = pl.col("name").str.contains(LOOKUPS)
    back = (pl.col("phase") == "backward") | pl.col("name").str.contains("(?i)backward")
    found = graph.ops.filter(pl.col("kind").is_in(work) & named)
    factor = pl.when(back).then(ratio[1]).otherwise(ratio[0])
    taken = found.select("op_id", more=pl.col("dur_ns") * (factor - 1), how=pl.lit("lookups"))
    if work == ["kernel"] or graph.run is None:
        return taken
    updates = parts_of(graph, graph.run, why=SPARSE)  # of tables, by an optimizer that goes through parameters
    more = updates.group_by("op_id").agg(more=pl.col("time_ns").sum() * (ratio[1] - 1), how=pl.lit("lookups"))
    return pl.concat([taken, more.join(taken, on="op_id", how="anti")])


def _exchanged(graph: Graph, factor: float, prices: Calibration, cluster: Cluster | None) -> pl.DataFrame:
    """The same of exchanges, whose bytes grow with the batch."""
    sent = graph.ops.filter((pl.col("kind") == "comm") & (pl.col("collective") == EXCHANGE))
    ratio = np.full(sent.height, factor)
    known = sent["comm_bytes"].is_not_null() & sent["group_size"].is_not_null()
    if cluster is not None and known.any():
        asked = sent.filter(known)
        size = pl.Series(np.maximum(asked["comm_bytes"].to_numpy(), 1))
        grown = (size * factor).round().cast(pl.Int64)
        both = Prices(cluster, prices)
        ns = [both.ns(asked["collective"], of, asked["group_size"]) for of in (size, grown)]
        ratio[known.to_numpy()] = ns[1] / ns[0]
    return sent.select("op_id", more=pl.col("dur_ns") * (pl.Series(ratio) - 1), how=pl.lit("exchanges"))


def _notes(ops: pl.DataFrame) -> pl.DataFrame:
    """Rows of the report."""
    on_device = pl.col("kind").is_in(["kernel", "memcpy", "memset", "comm"])
    told = ops.filter(pl.col("how").is_not_null() | on_device)
    notes = told.group_by(detail=pl.col("how").fill_null("device ops without a known size, and sums: as before")).agg(
        count=pl.len().cast(pl.Int64), time_ns=pl.col("dur_ns").sum()
    )
    what = pl.when(pl.col("detail").str.contains("as before")).then(pl.lit("could not see"))
    return notes.sort("detail").select(
        what=what.otherwise(pl.lit("timed anew")), rank=None, count="count", time_ns="time_ns", detail="detail"
    )
