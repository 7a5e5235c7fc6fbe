"""A run -> the kernels that it measured, as rows of a kernel frame; an op table -> the same rows as requests.

On a device a sample is a kernel with the sizes of the innermost operator around its launch that `operators.OPERATORS`
knows. An operator's kernels of its own family count as one, on the row of the longest; the others go by their names. On
a CPU a sample is an operator: the outermost that the table knows, so that no time counts twice. What has no sizes keeps
its row and says `why`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb import call_stacks
from lumos_nb.calls import COMM_OPERATORS, ENGINE_OPERATORS
from lumos_nb.config import find_gpu
from lumos_nb.costs.names import FALLBACK, HOST_COPY, UNKNOWN, kernel_families
from lumos_nb.costs.operators import GENERATED, OPERATORS, SIZES, Call, listed, operator_key, sizes_of
from lumos_nb.costs.work import MOVES, PRODUCTS
from lumos_nb.errors import InputError
from lumos_nb.number_formats import ELEMENT_BYTES
from lumos_nb.ops import build_ops, step_marks
from lumos_nb.schema import OPS, require
from lumos_nb.threads import rows_at
from lumos_nb.traces.run import Run

REQUEST = {**dict.fromkeys(("family", "op", "pass", "dtype"), pl.String()), **SIZES, "why": pl.String()}
"""Columns that `with_requests` gives an op table; `why` says what is missing, and is null where nothing is."""

WORK_KINDS = ("kernel", "memcpy", "memset")

_HALVES = {"input": "bwd_grad_act", "weight": "bwd_grad_w"}

ARGUMENTS = {"dims": "Input Dims", "strides": "Input Strides", "types": "Input type", "constants": "Concrete Inputs"}
_LIST = r"(\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\])"

KINDRED = (
    *("copy>cast", "copy>transpose", "copy>elementwise", "cast>copy", "cast>elementwise", "transpose>copy"),
    *("transpose>elementwise", "elementwise>cast", "elementwise>optimizer", "convolution>gemm", "fill>elementwise"),
    *("batch_norm>norm", "embedding_lookup>index", "optimizer>elementwise", "dropout>elementwise"),
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
        "cpu" without a device), `REQUEST`, `time_us` (adding up to the measured time of all kernels, or on a CPU of all
        operators), `source`, `method`. Communication kernels are not in it. The sizes of the gradient of a product are
        those of the forward product, as `work.with_work` has them.

    Raises
    ------
    InputError
        `run` is no run, or has neither device kernels nor operators with shapes: record them, with `record_shapes`.

    Examples
    --------
    >>> samples = kernel_samples(run)
    >>> samples["gpu"].unique().to_list()
    ['cpu']
    >>> undecoded(samples)
    """
    require(run, "events")
    on_device = build_ops(run.events).filter(pl.col("kind").is_in(WORK_KINDS))
    rows = on_device if on_device.height else _host_operators(run.events)
    if rows.is_empty():
        raise InputError(
            "the run has no device kernels and no operators with shapes: record it with record_shapes=True."
        )
    devices = pl.DataFrame(_devices(run), schema={"rank": pl.Int32, "device": pl.Int32, "gpu": pl.String}, orient="row")
    priced = _requests(rows, run).join(devices, on=["rank", "device"], how="left", maintain_order="left")
    return priced.select(
        *("rank", "step", "event_id", "name", "operator"),
        gpu=pl.col("gpu") if on_device.height else pl.lit("cpu"),
        **{name: pl.col(name) for name in REQUEST},
        time_us=pl.col("counted_ns") / 1e3,
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
        `why`, `name` (the operator's, or the kernel's where it has none), `count`, `time_us`, `share` of all the time.
    """
    total_us = samples["time_us"].sum()
    lost = samples.filter(pl.col("why").is_not_null())
    by_name = lost.group_by("why", name=pl.coalesce("operator", "name"))
    lost = by_name.agg(count=pl.len(), time_us=pl.col("time_us").sum())
    return lost.sort("time_us", descending=True).with_columns(share=pl.col("time_us") / total_us)


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
    >>> requests = with_requests(graph.ops)
    >>> requests.filter(pl.col("why").is_null()).select("op", "m", "n", "k")
    """
    return _requests(OPS.check(ops), run).drop("counted_ns")


def _requests(ops: pl.DataFrame, run: Run | None) -> pl.DataFrame:
    """`with_requests`, and `counted_ns`: the time of each op with that of the kernels which count as one with it."""
    work = ops.with_row_index("row").filter(pl.col("kind").is_in(WORK_KINDS) | (pl.col("kind") == "cpu"))
    calls = _calls(work)
    if run is not None:
        known = _recorded(run.events).select("rank", "operator_id", "asked_id", "key", *ARGUMENTS, "gradient")
        calls = calls.drop("key", "asked_id", *ARGUMENTS, "gradient").join(
            known, on=["rank", "operator_id"], how="left", maintain_order="left"
        )
    names = kernel_families(work.filter(pl.col("kind").is_in(WORK_KINDS))["name"])
    names = names.select("name", *(pl.col(c).alias(f"named_{c}") for c in names.columns[1:]))
    told = _decoded(calls).join(names, on="name", how="left", maintain_order="left")
    told = told.with_columns(named_pass=pl.coalesce("half", "named_pass"))
    settled = _settled(told)
    settled = settled if run is None else _by_grid(settled, work, run.events)
    rows = (
        ops.drop("dtype")
        .with_row_index("row")
        .join(settled.with_columns(work["row"]), on="row", how="left", maintain_order="left")
    )
    no_work = pl.lit("no work of a kernel")
    return rows.with_columns(
        why=pl.when(pl.col("row").is_in(work["row"].implode())).then("why").otherwise(no_work),
        counted_ns=pl.coalesce("counted_ns", "dur_ns"),
    ).drop("row")


def _calls(work: pl.DataFrame) -> pl.DataFrame:
    """The operator that each op asks for, by `key`, and its arguments as far as an op table has them."""
    text, number = pl.lit(None, pl.String), pl.lit(None, pl.Int64)
    operator = pl.col("operator") if "operator" in work.columns else text
    calls = work.select(
        *("row", "rank", "step", "kind", "name", "dur_ns", "bytes"),
        operator=pl.when(_ON_DEVICE).then(operator).otherwise("parent"),
        operator_id=pl.col("operator_id") if "operator_id" in work.columns else number,
        asked_id=pl.col("operator_id") if "operator_id" in work.columns else number,
        backward=pl.col("phase") == "backward",
        dims="shapes",
        types=pl.format('["{}"]', "dtype"),
        **dict.fromkeys(("strides", "constants", "gradient"), text),
    )
    half = pl.col("operator").str.extract(r"_backward_(input|weight)$").replace_strict(_HALVES, default=None)
    words = calls.select("operator").unique().with_columns(key=operator_key(pl.col("operator")), half=half)
    return calls.join(words, on="operator", how="left", maintain_order="left")


def _decoded(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls with what their arguments say; each distinct one is read once."""
    distinct = ["key", *ARGUMENTS, "gradient", "backward"]
    readable = pl.col("key").is_in(list(OPERATORS)) & pl.col("dims").is_not_null()
    calls = calls.with_columns(same=pl.when(readable).then(pl.struct(distinct).hash()))
    known = calls.filter(pl.col("same").is_not_null()).unique("same").select("same", *distinct)
    rows = [_read(**row) for row in known.select(distinct).iter_rows(named=True)]
    sizes = pl.DataFrame(rows, schema=REQUEST, orient="row") if rows else pl.DataFrame(schema=REQUEST)
    known = known.select("same", sizes.to_struct("sizes"), decoded=pl.lit(value=True)).unnest("sizes")
    return calls.join(known, on="same", how="left", maintain_order="left")


def _read(key: str, backward: bool, gradient: str | None, **texts: str | None) -> dict[str, Any]:
    """One call's sizes; a product in the backward pass becomes the gradient that it is."""
    call = Call(*(listed(texts[name]) for name in ("dims", "strides", "types", "constants")))
    told = sizes_of(key, call)
    if backward and told["op"] in ("gemm", "bmm") and told["why"] is None:
        told |= _gradient(told, next(iter(listed(gradient)), []))
    return {name: told.get(name) for name in REQUEST}


def _gradient(told: dict[str, Any], incoming: Any) -> dict[str, Any]:
    """Which gradient a product of the backward pass is, in sizes of the forward product; any if that is not to be told.

    By the weight it contracts over the rows, so that its left side lies transposed; where strides are not recorded, the
    shape of the gradient that came in tells the rows.
    """
    m, n, k = told["m"], told["n"], told["k"]
    if told["trans"]:
        by_weight = told["trans"][0] == "T"
    else:
        known = isinstance(incoming, list) and all(isinstance(size, int) for size in incoming)
        rows = prod(incoming[:-1]) if known and incoming else 0
        if (rows == k) == (rows == m * told["batch"]):
            return {"pass": "any"}
        by_weight = rows == k
    if by_weight:
        return {"pass": "bwd_grad_w", "m": k, "n": m, "k": n}
    return {"pass": "bwd_grad_act", "m": m, "n": k, "k": n}


_ON_DEVICE = pl.col("kind").is_in(WORK_KINDS)
_GENERATED = pl.col("key") == GENERATED
_ONE_GRADIENT = _ON_DEVICE & (pl.col("family") == "convolution") & (pl.col("pass") == "bwd")
"""The kernels of a convolution's backward are two gradients, of which each kernel is one."""
_NAMED_OP = pl.when(pl.col("named_family").is_in([*MOVES, *PRODUCTS])).then("named_family")


def _settled(told: pl.DataFrame) -> pl.DataFrame:
    """`REQUEST` and `counted_ns`: by arguments for the main kernel of an operator, by name for the others."""
    told = _united(_matched(told))
    sized, moved = pl.col("fits") & pl.col("main"), pl.col("moved")
    by_name = {
        "family": pl.col("named_family"),
        "op": _NAMED_OP,
        "pass": pl.col("named_pass"),
        "dtype": pl.when(moved).then(pl.lit("uint8")).otherwise("named_dtype"),
        "rows": pl.when(moved).then(pl.lit(1, pl.Int64)),
        "cols": pl.when(moved).then(pl.col("bytes").cast(pl.Int64, strict=False)),
    }
    by_arguments = {name: pl.col(name) for name in REQUEST} | {
        "pass": pl.when(_ONE_GRADIENT).then("named_pass").otherwise("pass"),
        **{name: pl.when(_GENERATED).then(by_name[name]).otherwise(name) for name in ("family", "op")},
    }
    return told.select(
        *(
            pl.when(sized).then(by_arguments[name]).otherwise(by_name.get(name)).alias(name)
            for name in REQUEST
            if name != "why"
        ),
        "counted_ns",
        why=pl.when(~(sized | moved)).then(_why()),
    )


def _matched(told: pl.DataFrame) -> pl.DataFrame:
    """Whether an op `fits` what was asked for, with all sizes; and whether it only `moved` a known number of bytes."""
    related = pl.format("{}>{}", "family", "named_family").is_in(KINDRED) | (pl.col("family") == pl.col("named_family"))
    does_it = pl.when(~_ON_DEVICE).then(pl.lit(value=True)).when(_GENERATED).then(_NAMED_OP.is_not_null())
    tf32 = pl.when((pl.col("dtype") == "fp32") & (pl.col("named_dtype") == "tf32")).then("named_dtype")
    told = told.with_columns(dtype=pl.coalesce(tf32, "dtype", "named_dtype"), does_it=does_it.otherwise(related))
    no_format = ~pl.col("dtype").is_in(list(ELEMENT_BYTES)).fill_null(value=False)
    which = _ONE_GRADIENT & ~pl.col("named_pass").str.starts_with("bwd_grad") & pl.col("does_it")
    lacks = pl.coalesce(
        pl.when(pl.col("decoded") & no_format).then(pl.lit("its number format is not recorded")),
        pl.when(which).then(pl.lit("its name does not tell which gradient it is")),
    )
    told = told.with_columns(why=pl.coalesce("why", lacks))
    fits = pl.col("decoded") & pl.col("does_it") & pl.col("why").is_null()
    moved = pl.col("kind").is_in(["memcpy", "memset"]) & (pl.col("bytes") > 0) & _NAMED_OP.is_not_null()
    return told.with_columns(fits=fits.fill_null(value=False)).with_columns(
        moved=(moved & ~pl.col("fits")).fill_null(value=False)
    )


def _united(told: pl.DataFrame) -> pl.DataFrame:
    """Kernels of one operator, but for the two gradients of a convolution, count on the longest of them, the `main`."""
    part = pl.when(_ONE_GRADIENT).then("named_pass")
    several = told.with_row_index("at").filter(pl.col("fits") & pl.col("asked_id").is_not_null() & _ON_DEVICE)
    several = several.select("at", "dur_ns", call=pl.struct("rank", "step", "asked_id", part).hash())
    several = several.with_columns(
        main=pl.col("at") == pl.col("at").sort_by("dur_ns", "at", descending=[True, False]).first().over("call"),
        total_ns=pl.col("dur_ns").sum().over("call"),
    )
    counted_ns = several.select(pl.when("main").then("total_ns").otherwise(0)).to_series()
    main = pl.repeat(value=True, n=told.height, eager=True).scatter(several["at"], several["main"])
    return told.with_columns(main=main, counted_ns=told["dur_ns"].scatter(several["at"], counted_ns))


def _why() -> pl.Expr:
    """Why an op has no sizes of its own."""
    host, unread = ~_ON_DEVICE, pl.col("decoded").is_null()
    reasons = (
        (host & pl.col("name").str.contains(COMM_OPERATORS + "|^record_param_comms"), "communication"),
        (host & unread, "own time of an operator without a known schema, or without shapes"),
        (pl.col("fits"), "counted with the main kernel of its operator"),
        (pl.col("named_family") == HOST_COPY, "crosses the link to the host"),
        (pl.col("named_family") == UNKNOWN, "a kernel of unknown name"),
        (pl.col("asked_id").is_null() & unread, "no launch in the trace, or no operator with shapes around it"),
        (unread, "its operator has no known schema"),
        (pl.col("why").is_null(), "beside the main kernel of its operator"),
    )
    chosen = pl.col("why")
    for condition, reason in reversed(reasons):
        chosen = pl.when(condition.fill_null(value=False)).then(pl.lit(reason)).otherwise(chosen)
    return pl.coalesce(pl.col("named_fallback") + ": " + chosen, chosen)


def _by_grid(settled: pl.DataFrame, ops: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Generated kernels without shapes: 4 elements a thread of their grid, a guess that stays labelled as one."""
    guessed = settled.select("why", row=pl.int_range(pl.len())).filter(pl.col("why").str.starts_with(FALLBACK))
    if guessed.is_empty() or "event_id" not in ops.columns:
        return settled
    kernels = ops[guessed["row"]].select("rank", "event_id")
    kernels = kernels.join(events, on=["rank", "event_id"], how="left", maintain_order="left")
    size = pl.element().str.strip_chars().cast(pl.Float64, strict=False)
    threads = (
        pl.col("args").str.extract(rf'"{each}":\s*\[([\d, ]+)\]').str.split(",").list.agg(size.product())
        for each in ("grid", "block")
    )
    cols = kernels.select((4 * next(threads) * next(threads)).cast(pl.Int64, strict=False)).to_series()
    return settled.with_columns(
        rows=settled["rows"].scatter(guessed["row"], pl.select(pl.when(cols.is_not_null()).then(1)).to_series()),
        cols=settled["cols"].scatter(guessed["row"], cols),
    )


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


def _wrappers(parent: NDArray[np.int64], known: NDArray[np.bool_], key: pl.Series) -> NDArray[np.bool_]:
    """Which known operators leave the work to one of their own name in them, as DTensor's to a local one, or have such.

    `parent` is the nearest encloser of each, -1 for none.
    """
    code = key.rank("dense").to_numpy()
    above = call_stacks.innermost(parent, known)
    above = np.where(parent >= 0, above[parent], -1)  # without itself
    inside = above[known & (above >= 0) & (code == code[above])]
    wraps = np.zeros(parent.size, dtype=bool)
    while inside.size:
        wraps[inside] = True
        inside = np.unique(parent[inside][parent[inside] >= 0])
    return wraps & known


def _recorded(events: pl.DataFrame) -> pl.DataFrame:
    """Operators, each with the known one that is innermost around it or itself, and the gradient that came in.

    `operator_id` is the operator's event, `asked_id`, `key` and `ARGUMENTS` those of the known one; `outermost` says
    that no other known one is around it, `backward` that the autograd engine runs it; `self_ns` is its time outside the
    operators in it.
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
    if events["device"].null_count() == events.height:  # a device's kernels go by the innermost, whatever is around
        known &= ~_wrappers(parent, known, table["key"])
    asked = call_stacks.innermost(parent, known)
    top = call_stacks.outermost(parent, known)
    inside = np.bincount(parent + 1, weights=table["dur_ns"].to_numpy(), minlength=parent.size + 1)[1:]
    arguments = {name: pl.when(pl.Series(known)).then(_list(argument)) for name, argument in ARGUMENTS.items()}
    asks = table.select("key", asked_id="event_id", **arguments)
    nodes = table.select(gradient=_list("Input Dims"))
    table = table.rename({"event_id": "operator_id"}).with_columns(
        *rows_at(asks, asked).get_columns(),
        *rows_at(nodes, call_stacks.innermost(parent, node)).get_columns(),
        known=pl.Series(known),
        outermost=pl.Series((top == size) | (top < 0)),
        self_ns=(pl.col("dur_ns") - pl.Series(inside).cast(pl.Int64)).clip(0),
        backward=pl.Series(call_stacks.outermost(parent, engine) >= 0),
    )
    return table.filter(pl.col("outermost") | (pl.col("shaped") & pl.col("asked_id").is_not_null()))


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
    used = dict(run.ranks.select("rank", "devices").rows())
    rows = []
    for rank, metadata in run.metadata.items():
        listed = [each for each in metadata.get("deviceProperties") or [] if isinstance(each, dict)]
        names = {each.get("id"): _sheet_name(each["name"]) for each in listed if each.get("name")}
        if len(only := set(names.values())) == 1:  # a file may number its only kind of device otherwise
            names = dict.fromkeys(used.get(rank) or [], *only)
        rows += [(rank, at, name) for at, name in names.items() if isinstance(at, int)]
    return rows


def _sheet_name(name: str) -> str:
    try:
        return find_gpu(name).name
    except InputError:
        return name
