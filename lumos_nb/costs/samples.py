"""A run -> the kernels that it measured, as rows of a kernel frame; an op table -> the same rows as requests.

On a device a sample is a kernel, with the sizes of the innermost operator with shapes around its launch; of the kernels
of one operator only the longest of its family (and pass) has them, the others go by their names. On a CPU a sample is an
operator: the outermost that `operators.OPERATORS` knows, so that no time counts twice. What has no sizes keeps its row
and says `why`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb import call_stacks
from lumos_nb.calls import ENGINE_OPERATORS
from lumos_nb.config import find_gpu
from lumos_nb.costs.names import HOST_COPY, UNKNOWN, kernel_families
from lumos_nb.costs.operators import GENERATED, OPERATORS, SIZES, Call, operator_key, sizes_of
from lumos_nb.costs.work import MOVES, PRODUCTS
from lumos_nb.errors import InputError
from lumos_nb.ops import build_ops, step_marks
from lumos_nb.schema import OPS, require
from lumos_nb.threads import rows_at
from lumos_nb.traces.run import Run

REQUEST = {**dict.fromkeys(("family", "op", "pass", "dtype"), pl.String()), **SIZES, "why": pl.String()}
"""Columns that `with_requests` gives an op table; `why` says what is missing, and is null where nothing is."""

WORK_KINDS = ("kernel", "memcpy", "memset")

ARGUMENTS = {"dims": "Input Dims", "strides": "Input Strides", "types": "Input type", "constants": "Concrete Inputs"}
_LIST = r"(\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\])"

KINDRED = (
    *("copy>cast", "copy>transpose", "copy>elementwise", "cast>copy", "cast>elementwise", "transpose>copy"),
    *("transpose>elementwise", "elementwise>cast", "elementwise>optimizer", "convolution>gemm", "fill>elementwise"),
    *("embedding_lookup>index", "optimizer>elementwise", "dropout>elementwise"),
)
"""Kernels of a family (on the right) that do the work of an operator of another one."""


def kernel_samples(run: Run) -> pl.DataFrame:
    """What a run measured, a row a kernel (on a CPU: an operator), as samples of a kernel frame.

    Parameters
    ----------
    run
        A run whose trace has the shapes of operators (`record_shapes`); without, kernels go by their names only.

    Returns
    -------
    frame
        `rank`, `step`, `event_id`, `name`, `operator`, `gpu` (the bundled data sheet's name, or as the trace has it;
        "cpu" without a device), `REQUEST`, `time_us`, `source`, `method`. Communication is not in it. Sizes of the
        gradients of a product are those of the forward product, as `work.with_work` has them.

    Raises
    ------
    InputError
        `run` is no run, or has neither device kernels nor operators with shapes: record them, with `record_shapes`.

    Examples
    --------
    >>> samples = kernel_samples(ln.load_run(ln.datasets.path("gpt-single")))       # doctest: +SKIP
    >>> undecoded(samples)                                                          # doctest: +SKIP
    """
    require(run, "events")
    on_device = build_ops(run.events).filter(pl.col("kind").is_in(WORK_KINDS))
    rows = on_device if on_device.height else _host_operators(run.events)
    if rows.is_empty():
        raise InputError(
            "the run has no device kernels and no operators with shapes: record it with record_shapes=True."
        )
    devices = pl.DataFrame(_devices(run), schema={"rank": pl.Int32, "device": pl.Int32, "gpu": pl.String}, orient="row")
    priced = with_requests(rows, run).join(devices, on=["rank", "device"], how="left", maintain_order="left")
    return priced.select(
        *("rank", "step", "event_id", "name", "operator"),
        gpu=pl.col("gpu") if on_device.height else pl.lit("cpu"),
        **{name: pl.col(name) for name in REQUEST},
        time_us=pl.col("dur_ns") / 1e3,
        source=pl.lit("trace"),
        method=pl.lit("torch profiler"),
    )


def undecoded(samples: pl.DataFrame) -> pl.DataFrame:
    """What of some samples has no sizes, by reason and name, the longest first.

    Parameters
    ----------
    samples
        Of `kernel_samples`.

    Returns
    -------
    frame
        `why`, `name` (the operator's, or the kernel's where it has none), `count`, `time_us`, `share` of all their time.
    """
    total_us = samples["time_us"].sum()
    lost = samples.filter(pl.col("why").is_not_null()).group_by("why", name=pl.coalesce("operator", "name"))
    lost = lost.agg(count=pl.len(), time_us=pl.col("time_us").sum()).sort("time_us", descending=True)
    return lost.with_columns(share=pl.col("time_us") / total_us)


def with_requests(ops: pl.DataFrame, run: Run | None = None) -> pl.DataFrame:
    """An op table as requests for kernels: with the columns of a kernel frame, from names, shapes and types.

    Parameters
    ----------
    ops
        `schema.OPS`; of a graph or of `build_ops` also `operator` and `operator_id`, which a device op needs for sizes.
    run
        The run that the ops are of: its events also tell how matrices lie, which mask attention has, and other
        constants, without which some ops (convolutions, layer norms without weights) stay without sizes.

    Returns
    -------
    frame
        The same rows with `REQUEST`; `dtype` becomes that of a kernel frame. Rows that are no work of a kernel (waits,
        launches, gaps, communication) have a `why` too.

    Raises
    ------
    SchemaError
        A column of the op table is missing.

    Examples
    --------
    >>> requests = with_requests(ln.build_graph(run).ops)                           # doctest: +SKIP
    >>> requests.filter(pl.col("why").is_null()).select("op", "m", "n", "k")        # doctest: +SKIP
    """
    ops = OPS.check(ops)
    calls = _calls(ops)
    if run is not None and "operator_id" in calls.columns:
        known = _recorded(run.events).select("rank", "operator_id", *ARGUMENTS, "gradient")
        calls = calls.drop(*ARGUMENTS, "gradient").join(
            known, on=["rank", "operator_id"], how="left", maintain_order="left"
        )
    names = kernel_families(ops.filter(pl.col("kind").is_in(WORK_KINDS))["name"])
    names = names.select("name", *(pl.col(c).alias(f"named_{c}") for c in names.columns[1:]))
    told = _decoded(calls).join(names, on="name", how="left", maintain_order="left")
    return ops.drop("dtype").with_columns(_settled(told).select(list(REQUEST)))


def _calls(ops: pl.DataFrame) -> pl.DataFrame:
    """The operator that each op asks for, by `key`, and its arguments as far as an op table has them."""
    name = pl.lit(None, pl.String)
    operator = pl.col("operator") if "operator" in ops.columns else name
    operator = pl.when(pl.col("kind").is_in(WORK_KINDS)).then(operator).when(pl.col("kind") == "cpu").then("parent")
    ids = [c for c in ("rank", "step", "operator_id") if c in ops.columns]
    return ops.with_row_index("row").select(
        *("row", *ids, "kind", "name", "dur_ns", "bytes"),
        key=operator_key(operator),
        backward=pl.col("phase") == "backward",
        dims="shapes",
        types=pl.format('["{}"]', "dtype"),
        **dict.fromkeys(("strides", "constants", "gradient"), name),
    )


def _decoded(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls with what their arguments say; each distinct one is read once."""
    distinct = ["key", *ARGUMENTS, "gradient", "backward"]
    known = calls.filter(pl.col("key").is_in(list(OPERATORS)) & pl.col("dims").is_not_null()).select(distinct).unique()
    rows = [_read(**row) for row in known.iter_rows(named=True)]
    sizes = pl.DataFrame(rows, schema=REQUEST, orient="row") if rows else pl.DataFrame(schema=REQUEST)
    known = known.with_columns(sizes, decoded=pl.lit(value=True))
    return calls.join(known, on=distinct, how="left", maintain_order="left", nulls_equal=True)


def _read(key: str, backward: bool, gradient: str | None, **texts: str | None) -> dict[str, Any]:
    """One call's sizes; a product in the backward pass becomes the gradient that it is."""
    call = Call(*(json.loads(texts[name] or "[]") for name in ("dims", "strides", "types", "constants")))
    told = sizes_of(key, call)
    if backward and told["op"] in ("gemm", "bmm") and told["why"] is None:
        told |= _gradient(told, json.loads(gradient or "[[]]")[0])
    return {name: told.get(name) for name in REQUEST}


def _gradient(told: dict[str, Any], incoming: Sequence[int]) -> dict[str, Any]:
    """Which gradient a product of the backward pass is, in sizes of the forward product; any if that is not to be told.

    By the weight it contracts over the rows, so that its left side lies transposed; where strides are not recorded, the
    shape of the gradient that came in tells the rows.
    """
    m, n, k = told["m"], told["n"], told["k"]
    if told["trans"]:
        by_weight = told["trans"][0] == "T"
    else:
        rows = int(np.prod(incoming[:-1])) if incoming else 0
        if (rows == k) == (rows == m * told["batch"]):
            return {"pass": "any"}
        by_weight = rows == k
    if by_weight:
        return {"pass": "bwd_grad_w", "m": k, "n": m, "k": n}
    return {"pass": "bwd_grad_act", "m": m, "n": k, "k": n}


def _settled(told: pl.DataFrame) -> pl.DataFrame:
    """The columns of `REQUEST`: all of them for the main kernel of an operator, what the name tells for the others."""
    on_device = pl.col("kind").is_in(WORK_KINDS)
    related = pl.format("{}>{}", "family", "named_family").is_in(KINDRED) | (pl.col("family") == pl.col("named_family"))
    named_op = pl.when(pl.col("named_family").is_in([*MOVES, *PRODUCTS])).then("named_family")
    generated = pl.col("key") == GENERATED
    told = told.with_columns(
        fits=pl.when(generated).then(named_op.is_not_null()).otherwise(related),
        # The gradients of a convolution are two kernels of one operator.
        part=pl.when(pl.col("family") == "convolution").then("named_pass"),
        moved=(pl.col("kind") != "kernel") & (pl.col("bytes") > 0) & named_op.is_not_null() & on_device,
        known=pl.col("decoded").fill_null(value=False) & pl.col("why").is_null(),
    )
    instance = [c for c in ("rank", "step", "operator_id") if c in told.columns and "operator_id" in told.columns]
    main = pl.col("dur_ns").rank("ordinal", descending=True).over(*(instance or ["row"]), "fits", "part") == 1
    told = told.with_columns(sized=pl.col("known") & (~on_device | (pl.col("fits") & main).fill_null(value=False)))
    sized, moved = pl.col("sized"), pl.col("moved").fill_null(value=False)
    by_name = {"family": pl.col("named_family"), "op": named_op, "pass": pl.col("named_pass")}
    by_name["dtype"] = pl.when(moved).then(pl.lit("uint8")).otherwise("named_dtype")
    by_name |= {"rows": pl.when(moved).then(pl.lit(1, pl.Int64)), "cols": pl.when(moved).then(pl.col("bytes").cast(pl.Int64))}
    passes = pl.when(on_device & (pl.col("pass") == "bwd") & (pl.col("family") == "convolution")).then(
        pl.when(pl.col("named_pass").str.starts_with("bwd_grad")).then("named_pass").otherwise(pl.lit("any"))
    )
    by_arguments = {name: pl.col(name) for name in REQUEST if name != "why"}
    by_arguments["pass"] = passes.otherwise(pl.when(generated).then("named_pass").otherwise("pass"))
    by_arguments |= {name: pl.when(generated).then(by_name[name]).otherwise(name) for name in ("family", "op")}
    tf32 = (pl.col("dtype") == "fp32") & (pl.col("named_dtype") == "tf32")
    by_arguments["dtype"] = pl.when(tf32).then(pl.lit("tf32")).otherwise("dtype")
    null = pl.lit(None)
    return told.select(
        **{name: pl.when(sized).then(told_).otherwise(by_name.get(name, null)) for name, told_ in by_arguments.items()},
        why=pl.when(sized | moved).then(null).otherwise(_why(on_device)),
    )


def _why(on_device: pl.Expr) -> pl.Expr:
    """Why an op has no sizes."""
    reason = (
        pl.when(~on_device & (pl.col("kind") != "cpu"))
        .then(pl.lit("no work of a kernel"))
        .when(pl.col("named_family") == HOST_COPY)
        .then(pl.lit("crosses the link to the host"))
        .when(pl.col("named_family") == UNKNOWN)
        .then(pl.lit("a kernel of unknown name"))
        .when(pl.col("key").is_null())
        .then(pl.lit("no operator with shapes around its launch"))
        .when(pl.col("decoded").is_null() & on_device)
        .then(pl.lit("its operator has no known schema"))
        .when(pl.col("decoded").is_null())
        .then(pl.lit("own time of an operator without a known schema"))
        .otherwise(pl.coalesce("why", pl.lit("beside the main kernel of its operator")))
    )
    label = pl.col("named_fallback") + ": "
    return pl.when(pl.col("named_fallback").is_not_null()).then(label + reason).otherwise(reason)


def _operators(events: pl.DataFrame) -> tuple[pl.DataFrame, NDArray[np.int64]]:
    """The operators of all threads, in order of their start, and the index of what encloses each."""
    operators = events.filter(
        (pl.col("category") == "cpu_op") & pl.col("thread").is_not_null() & (pl.col("dur_ns") >= 0)
    ).with_columns(
        lane=pl.struct("rank", "thread").rank("dense").cast(pl.Int64),
        end_ns=pl.col("start_ns") + pl.col("dur_ns"),
        key=operator_key(pl.col("name")),
        shaped=pl.col("args").str.contains('"Input Dims"', literal=True).fill_null(value=False),
    )
    operators = operators.sort("lane", "start_ns", -pl.col("end_ns"), maintain_order=True)
    lane, start, end = (operators[c].to_numpy(writable=True) for c in ("lane", "start_ns", "end_ns"))
    return operators, call_stacks.nearest_encloser(lane, start, end)


def _recorded(events: pl.DataFrame) -> pl.DataFrame:
    """Operators with their arguments and the gradient that came in: the known ones, and what is in none of these.

    `operator_id` is the event's; `outermost` says that no known one is around it; `self_ns` is its time outside the
    operators in it, `backward` whether the autograd engine runs it.
    """
    table, parent = _operators(events)
    size = np.arange(parent.size)
    known, node, engine = (
        table.select(each).to_series().to_numpy(writable=True)
        for each in (
            pl.col("shaped") & pl.col("key").is_in(list(OPERATORS)),
            pl.col("shaped") & pl.col("name").str.contains(r"Backward\d*$"),
            pl.col("name").str.contains(ENGINE_OPERATORS),
        )
    )
    top = call_stacks.outermost(parent, known)
    nodes = rows_at(table.select(gradient=_list("Input Dims")), call_stacks.innermost(parent, node))
    inside = np.bincount(parent + 1, weights=table["dur_ns"].to_numpy(), minlength=parent.size + 1)[1:]
    table = table.with_columns(
        nodes["gradient"],
        known=pl.Series(known),
        outermost=pl.Series((top == size) | (top < 0)),
        self_ns=(pl.col("dur_ns") - pl.Series(inside).cast(pl.Int64)).clip(0),
        backward=pl.Series(call_stacks.outermost(parent, engine) >= 0),
    )
    kept = table.filter(pl.col("known") | pl.col("outermost")).rename({"event_id": "operator_id"})
    return kept.with_columns(pl.when("known").then(_list(argument)).alias(c) for c, argument in ARGUMENTS.items())


def _list(argument: str) -> pl.Expr:
    return pl.col("args").str.extract(rf'"{argument}":\s*{_LIST}')


def _host_operators(events: pl.DataFrame) -> pl.DataFrame:
    """The outermost known operators, and the own time of those around and between them, as an op table has them."""
    marks = step_marks(events).select("rank", "step", "start_ns").sort("start_ns")
    rows = _recorded(events).filter("outermost").sort("start_ns")
    rows = rows.join_asof(marks, on="start_ns", by="rank", check_sortedness=False).with_columns(
        op_id=pl.int_range(pl.len(), dtype=pl.Int64),
        kind=pl.lit("cpu"),
        lane=pl.format("cpu:{}", "thread"),
        parent="name",
        operator="name",
        event_id="operator_id",
        dur_ns=pl.when("known").then("dur_ns").otherwise("self_ns"),
        shapes="dims",
        dtype=pl.col("types").str.extract(r'"([^"\]]+)"'),
        phase=pl.when("backward").then(pl.lit("backward")).otherwise(pl.lit("forward")),
    )
    columns = {**OPS.columns, "operator": pl.String(), "operator_id": pl.Int64(), "event_id": pl.Int64()}
    return rows.filter(pl.col("known") | (pl.col("dur_ns") > 0)).select(
        (pl.col(c) if c in rows.columns else pl.lit(None)).cast(t).alias(c) for c, t in columns.items()
    )


def _devices(run: Run) -> list[tuple[int, int, str]]:
    """Rank, device and name of the devices that the files list: the name of the bundled data sheet, if there is one."""
    listed = [
        (rank, each.get("id"), each.get("name"))
        for rank, metadata in run.metadata.items()
        for each in metadata.get("deviceProperties") or []
        if isinstance(each, dict)
    ]
    return [(rank, at, _sheet_name(name)) for rank, at, name in listed if isinstance(at, int) and name]


def _sheet_name(name: str) -> str:
    try:
        return find_gpu(name).name
    except InputError:
        return name
