"""The ops that a microbenchmark measures, as data: name, pass, the shapes it is measured on, its tensors and the call.

Names are those that `operators` reads from a trace of the same calls. A case's product is what is executed, also where
it computes a gradient: `m, n, k` of C[m, n] = A[m, k] B[k, n]; `FORWARD` turns it into the forward product that a
kernel frame has. Other backward ops are ATen's own where it has one, else autograd's, whose empty run is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.machine.shapes import Case, Model, Sizes, sizes

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[[], object]


class Op(NamedTuple):
    """One row of the table.

    `tensors` has a letter a tensor (`Tensors.of` says which); `call` takes torch, the case and those tensors. Of a
    `differentiated` op the call is the forward, and what is timed is autograd's backward for the tensors in capitals.
    """

    op: str
    pass_: str
    kind: str
    tensors: str
    call: Callable[..., Any]
    differentiated: bool = False


def _attention(torch: Any, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    shared: Tensor = attend(q, k, v, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads)
    return shared


def _products(torch: Any, case: Case, x: Tensor, pairs: Tensor) -> Tensor:
    """Of every two vectors of a sample, as in a DLRM."""
    products: Tensor = torch.bmm(x, x.transpose(1, 2))[:, pairs[0], pairs[1]]
    return products


def _adamw(torch: Any, case: Case, p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor) -> None:
    rates = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    torch._fused_adamw_([p], [g], [m], [v], [], [step], amsgrad=False, maximize=False, **rates)


def _other(torch: Any, case: Case) -> Any:
    return DTYPES[case.out_dtype](torch) if case.out_dtype else None


OPS: tuple[Op, ...] = (
    Op("gemm", "fwd", "linear", "ab", lambda torch, c, a, b: torch.mm(a, b)),
    Op("gemm", "bwd_grad_act", "dgrad", "ab", lambda torch, c, a, b: torch.mm(a, b)),
    Op("gemm", "bwd_grad_w", "wgrad", "ab", lambda torch, c, a, b: torch.mm(a, b)),
    Op("gemm_bias", "fwd", "linear", "nab", lambda torch, c, n, a, b: torch.addmm(n, a, b)),
    Op("bmm", "fwd", "batched", "ab", lambda torch, c, a, b: torch.bmm(a, b)),
    Op("attention", "fwd", "attention", "QKK", _attention),
    Op("attention", "bwd", "attention", "QKK", _attention, True),
    Op(
        "layernorm",
        "fwd",
        "activation",
        "xvv",
        lambda torch, c, *t: torch.native_layer_norm(t[0], [c.cols], *t[1:], 1e-5),
    ),
    Op(
        *("layernorm", "bwd", "activation", "xxssvv"),
        lambda torch, c, g, x, mean, rstd, w, b: torch.ops.aten.native_layer_norm_backward(
            g, x, [c.cols], mean, rstd, w, b, [True] * 3
        ),
    ),
    Op("rmsnorm", "fwd", "activation", "XV", lambda torch, c, x, w: torch.rms_norm(x, [c.cols], w, 1e-6)),
    Op("rmsnorm", "bwd", "activation", "XV", lambda torch, c, x, w: torch.rms_norm(x, [c.cols], w, 1e-6), True),
    Op("softmax", "fwd", "scores", "x", lambda torch, c, x: torch._softmax(x, -1, False)),
    Op("softmax", "bwd", "scores", "xx", lambda torch, c, g, x: torch._softmax_backward_data(g, x, -1, x.dtype)),
    Op("softmax", "fwd", "logits", "x", lambda torch, c, x: torch._log_softmax(x, -1, False)),
    Op("softmax", "bwd", "logits", "xx", lambda torch, c, g, x: torch._log_softmax_backward_data(g, x, -1, x.dtype)),
    Op("cross_entropy", "fwd", "logits", "Xi", lambda torch, c, x, i: torch.nn.functional.cross_entropy(x, i)),
    Op("cross_entropy", "bwd", "logits", "Xi", lambda torch, c, x, i: torch.nn.functional.cross_entropy(x, i), True),
    Op("nll_loss", "fwd", "logits", "xi", lambda torch, c, x, i: torch.ops.aten.nll_loss_forward(x, i, None, 1, -100)),
    Op(
        *("nll_loss", "bwd", "logits", "1xi1"),
        lambda torch, c, g, x, i, w: torch.ops.aten.nll_loss_backward(g, x, i, None, 1, -100, w),
    ),
    Op("gelu", "fwd", "inner", "x", lambda torch, c, x: torch.nn.functional.gelu(x)),
    Op("gelu", "bwd", "inner", "xx", lambda torch, c, g, x: torch.ops.aten.gelu_backward(g, x)),
    Op("silu", "fwd", "inner", "x", lambda torch, c, x: torch.nn.functional.silu(x)),
    Op("silu", "bwd", "inner", "xx", lambda torch, c, g, x: torch.ops.aten.silu_backward(g, x)),
    Op("relu", "fwd", "inner", "x", lambda torch, c, x: torch.relu(x)),
    Op("relu", "bwd", "inner", "xx", lambda torch, c, g, x: torch.ops.aten.threshold_backward(g, x, 0)),
    Op("dropout", "fwd", "activation", "x", lambda torch, c, x: torch.native_dropout(x, 0.1, True)),
    Op("dropout", "bwd", "activation", "x?", lambda torch, c, g, k: torch.ops.aten.native_dropout_backward(g, k, 1.1)),
    Op("add", "any", "movement", "xx", lambda torch, c, x, y: torch.add(x, y)),
    Op("mul", "any", "movement", "xx", lambda torch, c, x, y: torch.mul(x, y)),
    Op("add_scalar", "any", "parameter", "x", lambda torch, c, x: x.add_(1e-9)),
    Op("mul_scalar", "any", "parameter", "x", lambda torch, c, x: x.mul_(1.0)),
    Op("div_scalar", "any", "parameter", "x", lambda torch, c, x: torch.div(x, 1.5)),
    Op("sqrt", "fwd", "parameter", "x", lambda torch, c, x: torch.sqrt(x)),
    Op("lerp", "any", "parameter", "xx", lambda torch, c, x, y: x.lerp_(y, 0.1)),
    Op("addcmul", "any", "parameter", "xxx", lambda torch, c, x, y, z: x.addcmul_(y, z, value=1e-9)),
    Op("addcdiv", "any", "parameter", "xxx", lambda torch, c, x, y, z: x.addcdiv_(y, z, value=1e-9)),
    Op("adamw", "any", "parameter", "xxxxt", _adamw),
    Op("adamw_foreach", "any", "parameter", "o", lambda torch, c, optimizer: optimizer.step()),
    Op("embedding_lookup", "fwd", "lookup", "ei", lambda torch, c, e, i: torch.embedding(e, i)),
    Op(
        *("embedding_lookup", "bwd", "lookup", "xi"),
        lambda torch, c, g, i: torch.ops.aten.embedding_dense_backward(g, i, c.n, -1, False),
    ),
    Op("index", "any", "lookup", "ei", lambda torch, c, e, i: torch.index_select(e, 0, i)),
    Op("interaction", "fwd", "vectors", "fl", _products),
    Op("interaction", "bwd", "vectors", "Fl", _products, True),
    Op("transpose", "any", "movement", "x", lambda torch, c, x: x.t().contiguous()),
    Op("concat", "any", "movement", "hh", lambda torch, c, x, y: torch.cat((x, y), -1)),
    Op("copy", "any", "movement", "xx", lambda torch, c, x, y: x.copy_(y)),
    Op("cast", "any", "movement", "x", lambda torch, c, x: x.to(_other(torch, c))),
    Op("fill", "any", "movement", "x", lambda torch, c, x: x.zero_()),
    Op("reduction", "any", "reduced", "z", lambda torch, c, x: torch.sum(x, 0)),
)
"""What is measured in fp32, bf16 and fp16. `adamw` is one fused step, `adamw_foreach` torch.optim's with its Python."""

FORWARD = {"bwd_grad_act": "mkn", "bwd_grad_w": "kmn"}
"""Which of the executed product's sizes are m, n and k of the forward product whose gradient it is."""

DTYPES: dict[str, Callable[[Any], Any]] = {
    "fp32": lambda torch: torch.float32,
    "tf32": lambda torch: torch.float32,
    "fp16": lambda torch: torch.float16,
    "bf16": lambda torch: torch.bfloat16,
    "fp8": lambda torch: torch.float8_e4m3fn,
}
PRODUCTS = ("gemm", "gemm_bias", "bmm")
"""What has a rate of its own in tf32."""


def cases(
    model: Model, number: int, dtypes: tuple[str, ...], families: tuple[str, ...] | None
) -> Iterator[tuple[Op, Case]]:
    """Every op of a model in every number format: fp32 always, another one in its turn."""
    shapes, others = sizes(model), [d for d in dtypes if d != "fp32"]
    turn = others[number % (len(others) + 1) - 1 :][:1] if number % (len(others) + 1) else []
    for dtype in ("fp32", *turn):
        for op in OPS:
            if (families is None or op.op in families) and _exists(op, dtype):
                for size in shapes[op.kind]:
                    if dtype != "fp8" or _divides(size):
                        yield op, _case(op, dtype, number, model, size)


def large_copy(size_bytes: int) -> tuple[Op, Case]:
    """The copy of a tensor of so many bytes, as a group of its own."""
    copy = next(op for op in OPS if op.op == "copy")
    return copy, Case("sheet", copy.op, "fp32", copy.pass_, copy.kind, rows=size_bytes // 4096, cols=1024)


def _exists(op: Op, dtype: str) -> bool:
    if dtype == "fp8":
        return op.op == "gemm" and op.kind == "linear"
    return dtype != "tf32" or op.op in PRODUCTS


def _divides(size: Sizes) -> bool:
    """Whether torch._scaled_mm takes it."""
    return all(int(size[c]) % 16 == 0 for c in "nk")


def _case(op: Op, dtype: str, number: int, model: Model, size: Sizes) -> Case:
    out = ("bf16" if dtype == "fp32" else "fp32") if op.op == "cast" else None
    return Case(f"{number}:h{model.hidden}", op.op, dtype, op.pass_, op.kind, out_dtype=out, **size)  # type: ignore[arg-type]


def _in_tf32(torch: Any, call: Call) -> object:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return call()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


class Tensors:
    """Makes the tensors of cases, of a pool of numbers between 0.1 and 1.1: no op meets a NaN or a denormal."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.device = torch, device
        self._pool = torch.rand(2**16, generator=torch.Generator().manual_seed(0)).add_(0.1).to(device)

    def call(self, op: Op, case: Case) -> Call:
        """What is timed: the op on tensors of its own."""
        torch, made = self.torch, [self.of(letter, case) for letter in op.tensors]
        if case.dtype == "fp8":
            a, b, one = made[0], made[1], torch.ones((), device=self.device)
            return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
        if case.dtype == "tf32":
            return lambda: _in_tf32(torch, lambda: op.call(torch, case, *made))
        if not op.differentiated:
            return lambda: op.call(torch, case, *made)
        wanted = [t.requires_grad_() for t, letter in zip(made, op.tensors, strict=True) if letter.isupper()]
        with torch.enable_grad():
            out = op.call(torch, case, *made)
        gradient = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True)

    def of(self, letter: str, case: Case) -> Any:
        """One tensor of a case, by the letter that the table has for it."""
        torch, c = self.torch, case
        if letter == "i":
            return torch.randint(c.n or c.cols, (c.rows,), device=self.device)
        if letter == "l":
            return torch.tril_indices(c.rows or 0, c.rows or 0, -1, device=self.device)
        if letter == "t":
            return torch.ones((), device=self.device)
        if letter == "?":
            return torch.rand(c.rows, c.cols, device=self.device) > 0.1
        if letter == "o":
            parameter = torch.nn.Parameter(self.new(case, c.rows, c.cols))
            parameter.grad = self.new(case, c.rows, c.cols)
            return torch.optim.AdamW([parameter], lr=1e-6, foreach=True)
        if letter in "ab":
            return self._factor(case, letter)
        if letter in "QK":  # as a model has them: the heads of a token side by side
            heads = c.heads if letter == "Q" else c.kv_heads
            return self.new(case, c.batch, c.seq_q, heads, c.head_dim).transpose(1, 2)
        shapes = {"x": (c.rows, c.cols), "v": (c.cols,), "s": (c.rows, 1), "e": (c.n, c.cols), "1": (), "n": (c.n,)}
        shapes |= {"f": (c.batch, c.rows, c.cols), "h": (c.rows, (c.cols or 0) // 2), "z": (c.cols, c.rows)}
        return self.new(case, *shapes[letter.lower()])

    def _factor(self, case: Case, letter: str) -> Tensor:
        rows, cols = (case.m, case.k) if letter == "a" else (case.k, case.n)
        batch = () if case.op != "bmm" else (case.batch,)
        if case.trans is not None and case.trans["ab".index(letter)] == "T":
            return self.new(case, *batch, cols, rows).transpose(-1, -2)
        return self.new(case, *batch, rows, cols)

    def new(self, case: Case, *shape: int | None) -> Tensor:
        """A tensor of the pool's numbers in the case's format."""
        torch = self.torch
        n = math.prod(size or 0 for size in shape)
        flat: Tensor = torch.empty(n, dtype=DTYPES[case.dtype](torch), device=self.device)
        made = min(n, len(self._pool))
        flat[:made].copy_(self._pool[:made])
        while made < n:  # twice as much each time
            more = min(made, n - made)
            flat[made : made + more].copy_(flat[:more])
            made += more
        return flat.view([size or 0 for size in shape])
