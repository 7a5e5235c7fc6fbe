"""One rank of a large job on one machine: the user's torch code under torch's fake process group.

The fake group answers every collective at once and moves nothing, so a single process can run what one rank of a job of
any size would run. What it runs is recorded by a dispatch mode, since on CPU no record_param_comms appears: every aten
op, every c10d and functional collective that reaches torch's dispatcher on the calling thread. That includes the
backward pass (CPU autograd runs on the thread that called) and the all-reduces that DDP's C++ reducer issues.
With `fake` tensors (FakeTensorMode) nothing is computed and no memory is taken, so the model may be of any size. What
is recorded is the same but for views, and functional collectives are waited for at once rather than at first use.
Integer tensors stay real: ranks of a mesh and counters are read by the code that makes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import polars as pl

from lumos_nb.display import Shown
from lumos_nb.errors import CaptureError, is_whole, require_flags, require_kinds, shown
from lumos_nb.labels import FUNCTIONAL_OPS, GROUP_METHODS, bytes_in, resolve_group, tensors_in

C10D_OPS = {
    **{f"{method}_": collective for method, collective in GROUP_METHODS.items()},
    "send": "send",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "recv_any_source_": "recv",
}
"""Ops of torch.ops.c10d and the collective that each issues."""

BOOKKEEPING_OPS = ("prim::device", "_c10d_functional::_wrap_tensor_autograd")
"""What torch calls to keep track of fake tensors and pending results; no work."""

FUNCTIONAL_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
PEER_ARGUMENT = {"send": 2, "recv_": 2, "broadcast_": 2, "scatter_": 3, "gather_": 3, "reduce_": 3}
"""Where c10d ops that name another rank (of their group) have it."""

OP_COLUMNS = {
    "index": pl.Int64(),
    "name": pl.String(),
    "shapes": pl.String(),
    "dtype": pl.String(),
    "phase": pl.String(),
}
COLLECTIVE_COLUMNS = {
    "index": pl.Int64(),
    "collective": pl.String(),
    "group": pl.String(),
    "group_ranks": pl.List(pl.Int32()),
    "group_size": pl.Int32(),
    "comm_bytes": pl.Int64(),
    "dtype": pl.String(),
    "peer": pl.Int32(),
    "phase": pl.String(),
}


@dataclass(frozen=True, slots=True, repr=False)
class DryRun(Shown):
    """What one rank of a job would do.

    Attributes
    ----------
    rank, world_size
        Which rank of how many.
    ops
        One row an op in the order of issue: `index`, `name` ("aten.mm.default"), `shapes` of its tensor inputs, `dtype`
        of the first, `phase` (forward, backward, optimizer, other).
    collectives
        The rows of `ops` that communicate, same `index`: `collective` (all_reduce, all_gather, reduce_scatter,
        all_to_all, broadcast, reduce, gather, scatter, barrier, send, recv), `group` (name), `group_ranks` (global),
        `group_size`, `comm_bytes` (the larger of what the rank gives and gets: nccl-tests' size), `dtype`, `peer`
        (global rank: the other side of send and recv, the root of rooted ones), `phase`.
    """

    rank: int
    world_size: int
    ops: pl.DataFrame
    collectives: pl.DataFrame

    def _title(self) -> str:
        return f"Rank {self.rank} of {self.world_size}: {len(self.ops):,} ops, {len(self.collectives):,} collectives"

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._title(), self.totals())]

    def totals(self) -> pl.DataFrame:
        """Calls and bytes by phase, collective and group, in order of first appearance."""
        keys = ("phase", "collective", "group", "group_size")
        return self.collectives.group_by(keys, maintain_order=True).agg(
            calls=pl.len(), comm_bytes=pl.col("comm_bytes").sum()
        )


@dataclass
class _Log:
    """Rows as they are recorded, and where the program is: hooks of modules and optimizers count in and out."""

    recording: bool = False
    optimizers: int = 0
    modules: int = 0
    ops: list[tuple[Any, ...]] = field(default_factory=list)
    collectives: list[tuple[Any, ...]] = field(default_factory=list)

    def phase(self) -> str:
        import torch

        if self.optimizers:
            return "optimizer"
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "forward" if self.modules or torch.is_grad_enabled() else "other"

    def add(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note an op that ran, and its collective if it is one."""
        inputs = list(tensors_in((*args, *kwargs.values())))
        shapes = str([list(t.shape) for t in inputs])
        dtype = str(inputs[0].dtype).removeprefix("torch.") if inputs else None
        index, phase = len(self.ops), self.phase()
        self.ops.append((index, str(op), shapes, dtype, phase))
        if (found := _collective_of(op, args, kwargs, result)) is not None:
            collective, group, size_bytes, peer = found
            ranks = _ranks(group)
            self.collectives.append(
                (index, collective, group.group_name, ranks, len(ranks), size_bytes, dtype, peer, phase)
            )


def _collective_of(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[str, Any, int, int | None] | None:
    """(collective, process group, bytes, peer) of a communication op, None of any other."""
    from torch._C._distributed_c10d import ProcessGroup

    name = op._schema.name.partition("::")[2]
    every = (*args, *kwargs.values())
    if op.namespace == "c10d" and name in C10D_OPS:
        group = next(ProcessGroup.unbox(a) for a in every if _is_group(a))
        peer = PEER_ARGUMENT.get(name)
        size_bytes = 0 if C10D_OPS[name] == "barrier" else max(map(bytes_in, every))
        return C10D_OPS[name], group, size_bytes, None if peer is None else _ranks(group)[int(args[peer])]
    collective = FUNCTIONAL_OPS.get(name)
    if op.namespace not in FUNCTIONAL_NAMESPACES or collective is None:
        return None
    name_or_group = next(a for a in reversed(every) if isinstance(a, str) or _is_group(a))
    return collective, resolve_group(name_or_group), max(bytes_in(every), bytes_in(result)), None


def _is_group(value: Any) -> bool:
    import torch

    return isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith("c10d.ProcessGroup")


def _ranks(group: Any) -> list[int]:
    """Global ranks of a process group, in the group's own order."""
    import torch.distributed as dist

    return [int(rank) for rank in dist.get_process_group_ranks(group)]


def _answer(op: Any, args: tuple[Any, ...], result: Any) -> Any:
    """What a c10d op returns when it has completed: its tensors, and a work whose future holds them.

    The fake group's own works have futures without a value, which DDP refuses; under fake tensors the op did not run at
    all (`result` is None), and completes the same way.
    """
    import torch

    c10d: Any = torch._C._distributed_c10d
    future: Any = torch.futures.Future()
    future.set_result(list(tensors_in(args[0])) if args else [])
    work = c10d._create_work_from_future(future).boxed()
    returns = len(op._schema.returns)
    if returns == 2:
        return (args[0] if result is None else result[0], work)
    return work if returns == 1 else result


def _recording_mode(log: _Log) -> Any:
    """A dispatch mode that notes every op in `log` while it is recording, and completes every collective."""
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # A tensor subclass (DTensor, a collective's pending result) goes first: it issues the ops we want to see.
            if any(hasattr(t, "__tensor_flatten__") and not issubclass(t, FakeTensor) for t in types):
                return NotImplemented
            kwargs = kwargs or {}
            inputs = list(tensors_in((*args, *kwargs.values())))
            is_fake, is_collective = any(isinstance(t, FakeTensor) for t in inputs), func.namespace == "c10d"
            if is_fake and is_collective:
                result = None
            elif is_fake or not (inputs or _makes_integers(func, kwargs)):
                result = func(*args, **kwargs)
            else:  # ranks of a mesh, token ids, counters: small, and read by the code that makes them
                with unset_fake_temporarily():
                    result = func(*args, **kwargs)
            if log.recording and func._schema.name not in BOOKKEEPING_OPS:
                log.add(func, args, kwargs, result)
            return _answer(func, args, result) if is_collective else result

    return Mode()  # type: ignore[no-untyped-call]


def _makes_integers(op: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an op without tensor inputs makes an integer tensor."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        return op._schema.name in ("aten::arange", "aten::randint", "aten::randperm")
    return not (dtype.is_floating_point or dtype.is_complex)


def _forget_meshes() -> None:
    """Empty DTensor's caches, which hold the mesh of the job that filled them.

    Meshes of two ranks of a job compare equal, so a second dry run as another rank would be given the first's mesh: its
    groups, which are gone, and its local shapes. torch 2.13 finds it in the native cache; a cache that this torch
    lacks is no error.
    """
    import torch
    from torch.distributed.tensor import DTensor, _redistribute

    propagator = DTensor._op_dispatcher.sharding_propagator
    for owner, name in (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (propagator, "propagate_op_sharding.cache.cache_clear"),
        (propagator, "_propagate_tensor_meta_cached.cache_clear"),
        (_redistribute, "clear_redistribute_planner_cache"),
        (_redistribute, "_gen_transform_infos.cache_clear"),
    ):
        try:
            clear = attrgetter(name)(owner)
        except AttributeError:
            continue
        clear()


@contextmanager
def _fake_group(world_size: int, rank: int) -> Iterator[None]:
    """torch.distributed initialised as `rank` of `world_size` ranks that never answer otherwise than at once."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise CaptureError(
            "torch.distributed is already initialised in this process; call dry_run in a process without a job,"
            " or dist.destroy_process_group() first."
        )
    _forget_meshes()
    names = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    with patch.dict(os.environ, names):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            if dist.is_initialized():  # the user's code may have left the job itself
                dist.destroy_process_group()
            _forget_meshes()


@contextmanager
def _trials_unnoted(log: _Log) -> Iterator[None]:
    """What DTensor runs to learn the shapes of results is not noted."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"  # runs an op at its global size to learn the shape of its result
    propagate = getattr(ShardingPropagator, name)

    def propagate_unnoted(*args: Any) -> Any:
        recording, log.recording = log.recording, False
        try:
            return propagate(*args)
        finally:
            log.recording = recording

    with patch.object(ShardingPropagator, name, propagate_unnoted):
        yield


@contextmanager
def _fake_tensors() -> Iterator[None]:
    """FakeTensorMode, under which modules can be moved and cast."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode, swap = FakeTensorMode(allow_non_fake_inputs=True), torch.utils.swap_tensors

    def swap_tensors(one: Any, other: Any) -> None:
        # Module.to swaps fake parameters, which torch refuses while its converter's memo has weak references to them.
        mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)  # type: ignore[no-untyped-call]

    with patch.object(torch.utils, "swap_tensors", swap_tensors), mode:
        yield


@contextmanager
def _phases(log: _Log) -> Iterator[None]:
    """Let the log know when any module runs forward and any torch optimizer steps."""
    from torch.nn.modules import module
    from torch.optim import optimizer

    def count(what: str, by: int) -> Callable[..., None]:
        return lambda *_: setattr(log, what, getattr(log, what) + by)

    handles = (
        module.register_module_forward_pre_hook(count("modules", 1)),
        module.register_module_forward_hook(count("modules", -1), always_call=True),
        optimizer.register_optimizer_step_pre_hook(count("optimizers", 1)),
        optimizer.register_optimizer_step_post_hook(count("optimizers", -1)),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def dry_run(
    step_fn: Callable[..., object],
    world_size: int,
    rank: int = 0,
    *,
    setup: Callable[[], object] | None = None,
    fake: bool = True,
) -> DryRun:
    """Run your own torch code as one rank of a job of any size, here, and note its ops and collectives.

    Parameters
    ----------
    step_fn
        One training step, recorded as a whole. Called with what `setup` returns, or without arguments.
    world_size, rank
        The job's size and which rank to be. Ranks differ where the code says so (pipeline stages).
    setup
        Makes model and optimizer, under the process group and before anything is recorded. Without it `step_fn` makes
        them, and what that communicates is recorded too. Warm-up steps belong here as well: DDP's first two steps
        differ from the rest (one bucket for everything, then a broadcast of the new buckets).
    fake
        Use fake tensors: nothing is computed and no memory is taken. Code that reads values (`loss.item()`, `print`)
        then fails in torch: leave the reading out, or give False, which computes on the CPU at full size.

    Returns
    -------
    DryRun

    Raises
    ------
    CaptureError
        If torch.distributed is initialised already, or `rank` is not in `world_size`. Errors of the code itself pass.

    Notes
    -----
    Devices must be "cpu" unless torch sees a GPU. `torch.distributed.pipelining` and the `*_object` collectives read
    what peers send, and the fake group's peers send nothing: write the stage's send and recv out.

    Examples
    --------
    >>> run = ln.dry_run(train_step, world_size=64, rank=3, setup=make_model)      # doctest: +SKIP
    >>> run.totals()                                                              # doctest: +SKIP
    """
    if not is_whole(world_size, 1) or not is_whole(rank, 0, world_size - 1):
        raise CaptureError(
            f"dry_run got rank={shown(rank)} of world_size={shown(world_size)}; give whole numbers, "
            "0 <= rank < world_size."
        )
    require_kinds(step_fn=(step_fn, Callable), setup=(setup, Callable | None))
    require_flags(fake=fake)
    log = _Log()
    with ExitStack() as stack:
        stack.enter_context(_fake_group(world_size, rank))
        stack.enter_context(_phases(log))
        stack.enter_context(_trials_unnoted(log))
        if fake:
            stack.enter_context(_fake_tensors())
        stack.enter_context(_recording_mode(log))
        arguments = () if setup is None else (setup(),)
        log.recording = True
        step_fn(*arguments)
    return DryRun(
        rank,
        world_size,
        pl.DataFrame(log.ops, schema=OP_COLUMNS, orient="row"),
        pl.DataFrame(log.collectives, schema=COLLECTIVE_COLUMNS, orient="row"),
    )
