"""What one device does in a step of a recommendation model: every kernel, lookup and collective in order.

All devices do the same rows; how long lookups and exchanges take differs (`step_times`). Rows are those of the work
table of language models (`llm.layers.WORK`), and `awaits` says which collectives a row has to wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import polars as pl

from lumos_nb.layout import SIZE_OF
from lumos_nb.workloads.dlrm.model import Dlrm, DlrmTraining, Matrix, dims_of
from lumos_nb.workloads.dlrm.plan import Plan
from lumos_nb.workloads.work_rows import FIRST_BUCKET_BYTES, OPTIMIZER_OPS, Block, Row, as_table
from lumos_nb.workloads.work_rows import chain as chained

INDICES, POOLED, GRADIENTS = "indices", "pooled", "gradients"
"""What travels: indices to the tables, what was looked up to the samples, gradients (of that, or of dense weights)."""
LOOKUP = "lookup"
"""Kind of the rows that a model of lookups prices."""


@dataclass(frozen=True)
class Passes:
    """Rows of a step on each device, and what waits for what beyond the order of streams.

    Attributes
    ----------
    table
        The columns of `WORK`, with `flops` and `bytes`; `weight` of a lookup or an exchange says of which tables.
    waits
        Pairs of rows: a collective, and the first row that waits for it.
    """

    table: pl.DataFrame
    waits: tuple[tuple[int, int], ...]


def passes(model: Dlrm, plan: Plan, train: DlrmTraining) -> Passes:
    """The rows of a step in the order in which a device's host issues them.

    Raises
    ------
    LayoutError
        The batch does not divide evenly, or tables do not go with the model.

    Examples
    --------
    >>> tables = pl.DataFrame({"table": ["a"], "rows": [1000], "dim": [16], "pooling": [4.0], "dtype": ["fp32"]})
    >>> plan = Plan.of(tables, pl.DataFrame({"table": ["a"], "device": [0]}), [1e9])
    >>> model = Dlrm(dense=4, bottom=(16,), top=(1,))
    >>> passes(model, plan, DlrmTraining(global_batch=32)).table["op"].drop_nulls().to_list()[:3]
    ['gemm_bias', 'relu', 'concat']
    """
    rows = [row for row in _Device(model, plan, train).rows() if row]
    sent = {row["label"]: i for i, row in enumerate(rows) if row.get("label")}
    waits = [(sent[label], i) for i, row in enumerate(rows) for label in row.get("awaits", ()) if label in sent]
    return Passes(as_table(rows), tuple(waits))


class _Device:
    """Sizes that a device sees, and the blocks made of them."""

    def __init__(self, model: Dlrm, plan: Plan, train: DlrmTraining) -> None:
        self.model, self.train, self.devices = model, train, plan.devices.height
        self.batch = train.local_batch(self.devices)
        self.dims = dims_of(plan.tables)
        self.weights = model.weights(self.dims)
        alike = plan.frame.filter(pl.col("kind") == "data_parallel").unique("table")
        self.replicated = int((alike["rows"] * alike["dim"]).sum())
        self.sharded = plan.frame.height - alike.height * self.devices > 0
        pieces = plan.frame.filter(pl.col("kind") == "row_wise").group_by("table").agg(pl.len(), pl.col("dim").first())
        self.partial = [(count, dim) for _, count, dim in pieces.sort("table").iter_rows() if count > 1]
        self.dtype = {"tf32": "fp32"}.get(train.dtype, train.dtype)

    def rows(self) -> Iterator[Row]:
        """Everything, in order."""
        bottom, rest = self.mlp("bottom"), chained([self.interaction(), self.mlp("top"), self.loss()])
        summed = [self.moves("add", self.batch * (count - 1), dim, "fwd") for count, dim in self.partial]
        backward = self.with_sums([*rest.backward, *bottom.backward])
        back = next(i for i, row in enumerate(backward) if row.get("part") == "bottom")
        yield from self.phase("forward", [self.sends(INDICES, apart=self.train.prefetch)])
        yield from self.phase("forward", self.lookups("fwd", INDICES))
        yield from self.phase("forward", [self.sends(POOLED)])
        yield from self.phase("forward", self.awaiting(bottom.forward, [summed + rest.forward], POOLED))
        yield from self.phase("backward", backward[:back])
        yield from self.phase("backward", [self.sends(GRADIENTS)])
        yield from self.phase("backward", self.awaiting(backward[back:], [self.lookups("bwd")], GRADIENTS))
        reduced = [self.reduces(self.replicated, "tables")]
        yield from self.phase("backward", reduced)
        labels = [row["label"] for row in [*backward, *reduced] if row.get("collective") == "all_reduce"]
        sizes = [row["adds"] for row in backward if row.get("adds")]
        yield from self.phase("optimizer", _waits(self.updates(sizes), *labels))

    def awaiting(self, beside: list[Row], behind: list[list[Row]], label: str) -> list[Row]:
        """Rows beside a collective and behind it, where nothing is to overlap all of them behind it."""
        rows = list(chain.from_iterable(behind))
        return [*beside, *_waits(rows, label)] if self.train.overlap else _waits([*beside, *rows], label)

    def phase(self, name: str, rows: Iterable[Row]) -> list[Row]:
        """The rows with their phase."""
        return [row | {"phase": name} if row else row for row in rows]

    # Kernels

    def moves(self, op: str, rows: int, cols: int, pass_: str, part: str = "interaction") -> Row:
        """An op that moves data."""
        row = {"kind": "compute", "part": part, "op": op, "dtype": self.dtype, "pass": pass_}
        return row | {"rows": rows, "cols": cols}

    def product(self, matrix: Matrix, bias: bool = True, inner: bool = True) -> Block:
        """A linear layer; where its input is data and not `inner`, that has no gradient."""
        part, n, k = matrix
        row = {"kind": "compute", "part": part, "dtype": self.train.dtype, "m": self.batch, "n": n, "k": k}
        back = row | {"op": "gemm"}
        backward = [back | {"pass": "bwd_grad_act"}] if inner else []
        backward.append(back | {"pass": "bwd_grad_w", "weight": f"{n}x{k}", "adds": n * k})
        if bias:
            backward.append(self.moves("reduction", n, self.batch, "any", part) | {"weight": f"{n}", "adds": n})
        return Block([row | {"op": "gemm_bias" if bias else "gemm", "pass": "fwd"}], backward)

    def mlp(self, part: str) -> Block:
        """Linear layers with a ReLU behind each, but behind the logit."""
        matrices = [matrix for matrix in self.weights if matrix[0] == part]
        blocks = []
        for i, matrix in enumerate(matrices):
            blocks.append(self.product(matrix, inner=part != "bottom" or i > 0))
            if part == "bottom" or i < len(matrices) - 1:
                sizes = self.batch, matrix[1]
                blocks.append(Block(*([self.moves("relu", *sizes, way, part)] for way in ("fwd", "bwd"))))
        return chained(blocks)

    def interaction(self) -> Block:
        """What makes one vector of a sample's dense and pooled ones."""
        width, vectors = self.model.bottom[-1] + sum(self.dims), len(self.dims) + 1
        joined = self.moves("concat", self.batch, width, "any")
        if self.model.interaction == "dot":
            return self.dots(joined, vectors)
        if self.model.interaction == "cat":
            return Block([joined], [])  # the gradient of a part is a view of the whole one
        layers = [matrix for matrix in self.weights if matrix[0] == "interaction"]
        each = len(layers) // self.model.cross_layers
        every = [self.crossed(layers[:each], width) for _ in range(self.model.cross_layers)]
        return chained([Block([joined], []), *every])

    def dots(self, joined: Row, vectors: int) -> Block:
        """Products of every pair of vectors, each pair once, behind the dense vector."""
        pairs, wide = vectors * (vectors - 1) // 2, self.model.bottom[-1]
        products = self.moves("interaction", vectors, wide, "fwd") | {"batch": self.batch}
        forward = [joined, products, self.moves("concat", self.batch, wide + pairs, "any")]
        return Block(forward, [products | {"pass": "bwd"}, self.moves("add", self.batch, wide, "fwd")])

    def crossed(self, matrices: list[Matrix], width: int) -> Block:
        """A layer of DCNv2: the input times what matrices make of the last layer's output, which is added."""
        blocks = [self.product(matrix, bias=matrix is matrices[-1]) for matrix in matrices]
        sizes = self.batch, width
        times = Block([self.moves("mul", *sizes, "fwd")], [self.moves("mul", *sizes, "fwd")] * 2)
        plus = Block([self.moves("add", *sizes, "fwd")], [self.moves("add", *sizes, "fwd")] * 2)  # of two uses each
        return chained([plus._replace(forward=[]), *blocks, times, Block(plus.forward, [])])

    def loss(self) -> Block:
        """Binary cross entropy of one logit a sample: a few kernels on next to nothing."""
        row = self.moves("elementwise", self.batch, 1, "fwd", "loss")
        mean = self.moves("reduction", 1, self.batch, "any", "loss")
        return Block([row, row, row, mean], [row, row, row])

    def updates(self, sizes: list[int]) -> list[Row]:
        """The optimizer's step: of all parameters together, or one by one."""
        sizes = [*sizes, *([self.replicated] if self.replicated else [])]
        row: Row = {"kind": "compute", "part": "optimizer", "op": OPTIMIZER_OPS[self.train.optimizer], "pass": "any"}
        row |= {"dtype": "fp32", "rows": 1}
        return [row | {"cols": size} for size in ([sum(sizes)] if self.train.fused else sizes)]

    # Tables and what travels

    def lookups(self, way: str, *awaits: str) -> list[Row]:
        """Of the tables that are spread over devices all at once, and of those that every device has."""
        row: Row = {"kind": LOOKUP, "part": "embedding", "pass": way}
        sharded = [row | {"weight": "sharded", "awaits": () if self.train.prefetch else awaits}] if self.sharded else []
        return [*sharded, *([row | {"weight": "replicated"}] if self.replicated else [])]

    def sends(self, what: str, *, apart: bool = False) -> Row:
        """An all-to-all, whose sizes the plan decides."""
        if self.devices == 1 or not self.sharded:
            return {}
        row: Row = {"kind": "comm", "part": "embedding", "weight": what, "collective": "all_to_all", "label": what}
        return row | {"stream": "input" if apart else "comm", "group_size": self.devices, "group": "world"}

    def reduces(self, numbers: int, label: str) -> Row:
        """A sum over all devices of gradients in fp32."""
        if self.devices == 1 or not numbers:
            return {}
        row: Row = {"kind": "comm", "part": "gradients", "collective": "all_reduce", "group": "world", "label": label}
        stream = "dp" if self.train.comm_streams == 2 else "comm"
        return row | {"stream": stream, "group_size": self.devices, "size_bytes": numbers * SIZE_OF["fp32"]}

    def with_sums(self, rows: list[Row]) -> list[Row]:
        """Backward rows with sums of gradients where a bucket is full, as torch's DDP makes them and at the end."""
        made: list[Row] = []
        held, buckets, full = 0, 0, min(FIRST_BUCKET_BYTES, self.train.bucket_bytes)
        for row in rows:
            made.append(row)
            held += row.get("adds", 0)
            if self.train.overlap and 0 < full <= held * SIZE_OF["fp32"]:
                made.append(self.reduces(held, f"bucket {buckets}"))
                held, buckets, full = 0, buckets + 1, self.train.bucket_bytes
        return [*made, self.reduces(held, f"bucket {buckets}")]


def _waits(rows: list[Row], *labels: str) -> list[Row]:
    """The rows, of which the first waits for collectives."""
    return [rows[0] | {"awaits": (*rows[0].get("awaits", ()), *labels)}, *rows[1:]] if rows else rows
