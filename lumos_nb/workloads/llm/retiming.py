"""A trace's kernels with other sizes: what each dimension means, and the ratio of two predictions.

A part of an op is a kernel, or on a CPU an operator nested in it, with the sizes that its arguments say. Which symbol a
size is (tokens, hidden, ffn, ...) is looked up by where the part is: in a layer or outside, over activations or over
parameters (`MEANINGS`). New sizes are those of the new model; a part's time is multiplied by what a calibration
predicts for them over what it predicts for the old ones, so that its systematic error cancels. Whatever of an op is no
part (dispatch, Python) keeps its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.costs.calibration import Calibration
from lumos_nb.costs.operators import SIZES
from lumos_nb.costs.samples import WORK_KINDS, kernel_samples, with_requests
from lumos_nb.graph import Graph
from lumos_nb.layout import Parallelism, Training
from lumos_nb.traces.run import Run
from lumos_nb.transformer import Transformer
from lumos_nb.workloads.llm.layer_search import ACCUMULATES

KERNEL = {**dict.fromkeys(("family", "op", "pass", "dtype"), pl.String()), **SIZES}
"""Columns of a kernel frame that a part has."""

PARTS = {"op_id": pl.Int64(), **KERNEL, "time_ns": pl.Float64()}
"""Columns of a table of parts."""


def parts_of(graph: Graph, run: Run | None = None, why: str | None = None) -> pl.DataFrame:
    """The parts of a graph's ops whose sizes are known: `PARTS`.

    Parameters
    ----------
    graph
        Of one step of `run`.
    run
        Where the graph has no device, the operators nested in its ops are in the events alone: without a run only the
        outermost ones are parts, and none of a backward pass. Where it has one, events tell how matrices lie.
    why
        Instead of those with sizes, nested operators that have none for a reason that begins so.
    """
    if run is None or graph.ops["kind"].is_in(WORK_KINDS).any():
        return _kernels(graph, run)
    wanted = pl.col("why").is_null() if why is None else pl.col("why").str.starts_with(why)
    samples = kernel_samples(run).filter(wanted, pl.col("step") == graph.step)
    events = run.events.select("rank", "event_id", "thread", "start_ns")
    samples = samples.join(events, on=["rank", "event_id"])
    return _within(samples, graph, clock_shifts(graph, run))


def _kernels(graph: Graph, run: Run | None) -> pl.DataFrame:
    """Device kernels; those that count with the main kernel of their operator have its sizes."""
    asked = with_requests(graph.ops, run)
    call = ["rank", "operator_id"]
    main = asked.filter(pl.col("why").is_null()).unique(call, keep="first").drop_nulls("operator_id")
    others = asked.filter(pl.col("why") == "counted with the main kernel of its operator")
    others = others.select("op_id", "dur_ns", *call).join(main.select(*call, *KERNEL), on=call)
    known = pl.concat([asked.filter(pl.col("why").is_null()), others], how="diagonal_relaxed")
    return known.select("op_id", *KERNEL, time_ns=pl.col("dur_ns").cast(pl.Float64))


def clock_shifts(graph: Graph, run: Run) -> pl.DataFrame:
    """`rank`, `shift_ns`: the graph's clock less that of the events, from ops that start as an event of theirs does."""
    stated = graph.report.filter(pl.col("what") == "rank clock shifted").group_by("rank").agg(pl.col("time_ns").sum())
    ops = graph.ops.filter(pl.col("kind") == "cpu").select("rank", "name", at_ns="start_ns")
    events = run.events.filter(pl.col("thread").is_not_null()).select("rank", "name", "start_ns")
    events = events.join(stated, on="rank", how="left").with_columns(
        at_ns=pl.col("start_ns") + pl.col("time_ns").fill_null(0)
    )
    near = ops.sort("at_ns").join_asof(
        events.sort("at_ns").rename({"at_ns": "guess_ns"}), left_on="at_ns", right_on="guess_ns",
        by=["rank", "name"], strategy="nearest", check_sortedness=False,
    )  # fmt: skip
    return near.group_by("rank").agg(shift_ns=(pl.col("at_ns") - pl.col("start_ns")).median().cast(pl.Int64))


def _within(samples: pl.DataFrame, graph: Graph, shifts: pl.DataFrame) -> pl.DataFrame:
    """Samples as parts of the ops in whose time they lie."""
    at = samples.join(shifts, on="rank").with_columns(
        at_ns=pl.col("start_ns") + pl.col("shift_ns"), lane=pl.format("cpu:{}", "thread")
    )
    ops = graph.ops.filter(pl.col("kind").is_in(["cpu", "launch"]) & pl.col("lane").str.starts_with("cpu:"))
    ops = ops.select("op_id", "rank", "lane", "start_ns", end_ns=pl.col("start_ns") + pl.col("dur_ns")).sort("start_ns")
    found = at.drop("start_ns").sort("at_ns").join_asof(
        ops, left_on="at_ns", right_on="start_ns", by=["rank", "lane"], tolerance=2**60, check_sortedness=False
    )  # fmt: skip
    inside = found.filter(pl.col("at_ns") < pl.col("end_ns"))
    return inside.select("op_id", *KERNEL, time_ns=pl.col("time_us") * 1e3)


# --- what sizes mean

Symbols = Mapping[str, int]


def symbols(model: Transformer, layout: Parallelism, train: Training) -> dict[str, int]:
    """What one rank sees of each dimension."""
    tp, heads, keys = layout.tp, model.heads // layout.tp, max(1, model.keys // layout.tp)
    inner = heads * model.head
    tokens, moe = train.micro_batch * train.seq // layout.cp, model.moe
    expert_ffn = moe.ffn // layout.expert_tp if moe else 0
    return {
        "one": 1, "two": 2, "batch": train.micro_batch, "seq": train.seq // layout.cp, "heads": heads, "keys": keys,
        "tokens": tokens, "spread": tokens // (tp if layout.sequence_parallel else 1),  # of norms and residuals
        "hidden": model.hidden, "inner": inner, "kv": keys * model.head,
        "qkv": inner + 2 * keys * model.head, "head_dim": model.head, "head_half": model.head // 2,
        "head_v": model.head_v, "ffn": model.ffn // tp, "gate_up": 2 * model.ffn // tp, "positions": model.max_seq,
        "vocab_part": -(-model.vocab // tp), "vocab": model.vocab, "expert_ffn": expert_ffn,
        "expert_gate_up": 2 * expert_ffn, "experts": moe.experts // layout.ep if moe else 0,
        "parameters": model.size // (tp * layout.pp),
        "expert_tokens": round(tokens * moe.topk * layout.ep / moe.experts) if moe else 0,
    }  # fmt: skip


_WEIGHTS = ("qkv hidden", "inner hidden", "kv hidden", "hidden inner", "gate_up hidden", "ffn hidden", "hidden ffn")
_ENDS = ("vocab_part hidden", "vocab hidden")
_WIDTHS = ("hidden", "ffn", "inner", "qkv", "kv", "gate_up")
_HEADS = ("tokens*heads head_dim", "tokens*keys head_dim", "batch*heads*seq seq")
_HALVES = tuple(f"{n}tokens*{of} head_half" for n in ("", "two*") for of in ("heads", "keys"))
_FLAT = tuple(f"one tokens*{width}" for width in _WIDTHS)

MEANINGS: Mapping[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    # (kind of part, where): the columns that have sizes, and what these may be, the likeliest first
    ("product", "layer"): (("m", "n", "k"), tuple(f"tokens {w}" for w in _WEIGHTS)),
    ("product", "ends"): (("m", "n", "k"), tuple(f"tokens {w}" for w in _ENDS)),
    ("grouped", "layer"): (
        ("groups", "m", "n", "k"),
        tuple(
            f"experts expert_tokens {of}"
            for of in ("expert_gate_up hidden", "expert_ffn hidden", "hidden expert_ffn")
        ),
    ),
    ("batched", "layer"): (
        ("batch", "m", "n", "k"),
        tuple(f"batch*heads {of}" for of in ("seq seq head_dim", "seq head_dim seq", "seq head_v seq")),
    ),
    ("attention", "layer"): (
        ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "head_dim_v"),
        ("batch seq seq heads keys head_dim head_v", "batch seq seq heads heads head_dim head_v"),
    ),
    ("activation", "layer"): (
        ("rows", "cols"),
        (
            "spread hidden", *(f"tokens {w}" for w in _WIDTHS), *_HEADS, *_HALVES, "tokens one", "one tokens", *_FLAT,
            "one one",
        ),
    ),
    ("activation", "ends"): (
        ("rows", "cols"),
        (
            "tokens hidden", "tokens vocab_part", "tokens vocab", "positions hidden", "seq hidden", "batch seq",
            "tokens one", "one tokens", "vocab_part hidden", "vocab hidden", "one tokens*vocab_part",
            "seq*hidden batch", "one one",
        ),
    ),
    ("parameter", "layer"): (("rows", "cols"), (*_WEIGHTS, *(f"one {w}" for w in _WIDTHS), "one one")),
    ("parameter", "ends"): (
        ("rows", "cols"), (*_ENDS, "positions hidden", "seq hidden", "one hidden", "one vocab", "one one"),
    ),
}  # fmt: skip


def _kinds(parts: pl.DataFrame) -> pl.DataFrame:
    """Parts with `kind` and `where`, the keys of `MEANINGS`; `layer`, `phase` and `name` are those of their op."""
    op = pl.col("op")
    over_parameters = (pl.col("phase") == "optimizer") | pl.col("name").str.contains(ACCUMULATES)
    return parts.with_columns(
        kind=pl.when(op == "attention").then(pl.lit("attention"))
        .when((op == "bmm") & (pl.col("batch") > 1)).then(pl.lit("batched"))
        .when(op.is_in(["gemm", "gemm_bias", "bmm"])).then(pl.lit("product"))
        .when(op == "grouped_gemm").then(pl.lit("grouped"))
        .when(over_parameters).then(pl.lit("parameter")).otherwise(pl.lit("activation")),
        where=pl.when(pl.col("layer") >= 0).then(pl.lit("layer")).otherwise(pl.lit("ends")),
    )  # fmt: skip


def _value(term: str, sizes: Symbols) -> int:
    return prod(sizes[symbol] for symbol in term.split("*"))


def with_sizes(parts: pl.DataFrame, old: Symbols, new: Symbols) -> pl.DataFrame:
    """Parts with their new sizes and `meaning`, what these are in symbols; null, and sizes as before, where unknown.

    Parameters
    ----------
    parts
        `PARTS`, with `layer`, `phase` and `name` of the op.
    old, new
        `symbols` of the base and of what is asked for.
    """
    keyed = _kinds(parts).with_row_index("part")
    pieces = [keyed.clear().with_columns(meaning=pl.lit(None, pl.String))]
    for (kind, where), of_kind in keyed.group_by("kind", "where", maintain_order=True):
        columns, terms = MEANINGS.get((str(kind), str(where)), ((), ()))
        piece = _renamed(of_kind, columns, terms, old, new)
        pieces.append(_by_width(piece, old, new) if kind == "activation" else _by_count(piece, old, new))
    return pl.concat(pieces).sort("part").drop("part", "kind", "where")


def _renamed(
    parts: pl.DataFrame, columns: tuple[str, ...], terms: tuple[str, ...], old: Symbols, new: Symbols
) -> pl.DataFrame:
    """Parts of one kind: sizes that one of the terms has in the old model become those that it has in the new one."""
    table: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = {}
    # Products of the backward pass may stand as they are executed: as either gradient of the forward product.
    turns = ((0, 1, 2), (0, 2, 1), (1, 2, 0)) if columns == ("m", "n", "k") else (range(len(columns)),)
    for turn in turns:
        for term in terms:
            words = [term.split()[i] for i in turn]
            key, value = (tuple(_value(word, sizes) for word in words) for sizes in (old, new))
            table.setdefault(key, (term, value))
    rows = [(*key, term, *value) for key, (term, value) in table.items()]
    meant = [f"new_{column}" for column in columns]
    schema = dict.fromkeys(columns, pl.Int64) | {"meaning": pl.String} | dict.fromkeys(meant, pl.Int64)
    known = pl.DataFrame(rows, schema=schema, orient="row")
    if not columns:
        return parts.with_columns(meaning=pl.lit(None, pl.String))
    found = parts.join(known, on=list(columns), how="left", maintain_order="left")
    return found.with_columns(pl.coalesce(f"new_{column}", column).alias(column) for column in columns).drop(meant)


def _by_width(parts: pl.DataFrame, old: Symbols, new: Symbols) -> pl.DataFrame:
    """Activations whose rows mean nothing (several tensors at once): their width changes, rows go as tokens do."""
    widths = {old[width]: (width, new[width]) for width in reversed((*_WIDTHS, "vocab_part", "head_dim"))}
    unknown, cols = pl.col("meaning").is_null() & (pl.col("rows") >= old["tokens"] / 2), pl.col("cols")
    names, sizes = ({key: pair[i] for key, pair in widths.items()} for i in (0, 1))
    width = pl.when(unknown).then(cols.replace_strict(names, default=None, return_dtype=pl.String))
    more = new["tokens"] * new["heads"] / (old["tokens"] * old["heads"])
    more_rows = pl.when(width == "head_dim").then(more).otherwise(new["tokens"] / old["tokens"])
    return parts.with_columns(
        rows=pl.when(width.is_null()).then("rows").otherwise((pl.col("rows") * more_rows).round().cast(pl.Int64)),
        cols=pl.when(width.is_null()).then(cols).otherwise(cols.replace_strict(sizes, default=None)),
        meaning=pl.coalesce("meaning", pl.format("as tokens {}", width)),
    )


def _by_count(parts: pl.DataFrame, old: Symbols, new: Symbols) -> pl.DataFrame:
    """Updates of many tensors at once (fused, foreach): as many rows more as there are parameters more."""
    many = pl.col("meaning").is_null() & (pl.col("family") == "optimizer")
    rows = (pl.col("rows") * (new["parameters"] / old["parameters"])).round().cast(pl.Int64)
    return parts.with_columns(
        rows=pl.when(many).then(rows).otherwise("rows"),
        meaning=pl.coalesce("meaning", pl.when(many).then(pl.lit("as parameters"))),
    )


def ratios(
    before: pl.DataFrame, after: pl.DataFrame, calibration: Calibration, target: Calibration | None = None
) -> NDArray[np.float64]:
    """What a calibration predicts for some parts over what it predicts for others, shape (n,).

    `target` is the calibration of another device for `after`. Equal sizes on one device are 1 exactly.
    """
    first, second = (_prices(parts, cal) for parts, cal in ((before, calibration), (after, target or calibration)))
    ratio: NDArray[np.float64] = second / first
    if target is None:
        same = np.all([before[c].eq_missing(after[c]).to_numpy() for c in KERNEL], axis=0)
        ratio[same] = 1.0
    return ratio


def _prices(parts: pl.DataFrame, calibration: Calibration) -> NDArray[np.float64]:
    if parts.is_empty():
        return np.empty(0)
    kinds = parts.select(*KERNEL).unique(maintain_order=True)
    priced = kinds.with_columns(calibration.predict_kernels(kinds)["dur_us"])
    joined = parts.select(*KERNEL).join(priced, on=list(KERNEL), how="left", nulls_equal=True, maintain_order="left")
    prices: NDArray[np.float64] = joined["dur_us"].to_numpy()
    return prices
