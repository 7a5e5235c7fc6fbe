"""Names for collectives that no profiler names: issue and wait of CPU (gloo) communication.

On gloo, torch 2.13 writes no record_param_comms. What a trace then holds by itself:

* `c10d::allreduce_`, `c10d::send`, `c10d::recv_`, ... (cpu_op): the issue, on the thread that called. Neither group nor
  sequence number; the strings in "Concrete Inputs" are empty.
* `gloo:all_reduce`, ... (user_annotation): the execution, on one of two run-loop threads of the group that take work
  from one queue, from the moment it is taken, so waiting for the peers is inside it. The queue is first in, first out:
  in the order of their starts these are the group's collectives in the order of issue (a reduce_scatter runs as
  `gloo:all_reduce`). `gloo:send` and `gloo:recv` lie on the *issuing* thread from issue to completion and overlap
  other ops without nesting; their "External id" is the c10d op's plus one.
* `_c10d_functional::all_reduce`, ... and `_c10d_functional::wait_tensor` (cpu_op): issue and wait of functional
  collectives (DTensor).
* Nothing for `Work.wait`, nor for the waits inside DDP's C++ reducer.

`label_collectives` adds ranges (user_annotation) round what Python issues and waits for:

    comm::<collective> group=<name> seq=<n> bytes=<b> dtype=<d>[ peer=<global rank>]
    wait::<the same words>

The k-th collective of a group has seq k, counted from where the labels began, the same on every rank. For send and recv
seq counts per group, direction and peer: the send on rank a with peer b and seq n is the recv on b with peer a and seq
n. `bytes` is the larger of what this rank gives and gets (nccl-tests' size). A `comm::` range holds the c10d op, which
holds the moment of issue; a `wait::` range begins when the thread asks for the result and ends when it goes on. Both
together cost the thread about 40 us a collective (measured under the profiler, gloo, one rank).
Device tensors are not labelled: their kernels carry group and sequence number, and their waits do not block the host.

Rows of a data-parallel backward pass with two buckets (`ddp_hook`), of a tensor-parallel layer and of a pipeline stage;
main thread M, run loops R, times in ms:

    M  24.3 +0.2   comm::all_reduce group=0 seq=2 bytes=1050624 dtype=float32     holds c10d::allreduce_
    R  24.6 +10.0  gloo:all_reduce                                                the third of the group: seq 2
    M  35.4 +0.2   comm::all_reduce group=0 seq=3 bytes=1084416 dtype=float32
    M  35.7 +0.0   wait::all_reduce group=0 seq=2 bytes=1050624 dtype=float32     had ended: no time
    M  35.7 +3.0   wait::all_reduce group=0 seq=3 bytes=1084416 dtype=float32
    R  35.8 +2.9   gloo:all_reduce
    M  38.8 +0.0   torch.distributed.ddp.reducer::copy_bucket_to_grad             ... a parameter each

    M  20.9 +0.3   comm::all_reduce group=0 seq=8 bytes=262144 dtype=float32      holds _c10d_functional::all_reduce
    R  21.1 +0.6   gloo:all_reduce
    M  21.2 +0.5   wait::all_reduce group=0 seq=8 bytes=262144 dtype=float32      holds _c10d_functional::wait_tensor

    M  27.1 +0.1   comm::send group=0 seq=5 bytes=65536 dtype=float32 peer=1      holds c10d::send
    M  27.2 +2.6   gloo:send                                                      until completion, on thread M
    M  27.3 +0.1   comm::recv group=0 seq=4 bytes=65536 dtype=float32 peer=1      holds c10d::recv_
    M  27.3 +12.3  gloo:recv                                                      likewise
    M  27.4 +2.5   wait::send group=0 seq=5 bytes=65536 dtype=float32 peer=1
    M  29.9 +9.8   wait::recv group=0 seq=4 bytes=65536 dtype=float32 peer=1
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

GROUP_METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
"""Methods of torch's ProcessGroup, of which a torch version may lack some, and the collective that each issues."""

FUNCTIONAL_OPS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
"""Ops of torch.ops._c10d_functional and the collective that each issues."""


def tensors_in(value: object) -> Iterator[Any]:
    """Tensors in nested lists and tuples, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def bytes_in(value: object) -> int:
    """Bytes of all tensors in nested lists and tuples."""
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


def resolve_group(group: Any) -> Any:
    """The process group that a functional collective names: by its name, or in newer torch itself."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    if isinstance(group, torch.ScriptObject):
        return c10d.ProcessGroup.unbox(group)
    resolve: Any = c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(group) if isinstance(group, str) else group


class _Labeller:
    """Counts collectives a group and remembers the label of every work and result tensor not yet waited for."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.works: dict[int, tuple[Any, str]] = {}  # holds the work too, so that its id is not used again
        self.results: dict[int, str] = {}

    def label(self, collective: str, group: Any, tensors: object, size_bytes: int, peer: int | None = None) -> str:
        key = (group.group_name, "" if peer is None else f"{collective} {peer}")
        seq = self.counts[key]
        self.counts[key] += 1
        dtype = next((str(t.dtype).removeprefix("torch.") for t in tensors_in(tensors)), "none")
        words = f"{collective} group={group.group_name} seq={seq} bytes={size_bytes} dtype={dtype}"
        return words if peer is None else f"{words} peer={peer}"

    def method(self, collective: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method of ProcessGroup that issues in a `comm::` range."""
        import torch
        import torch.distributed as dist

        @functools.wraps(original)
        def issue(group: Any, *args: Any, **kwargs: Any) -> Any:
            sides = (*args, *kwargs.values())
            blocking = all(t.device.type == "cpu" for t in tensors_in(sides))
            if not blocking or (collective == "barrier" and "gloo" not in dist.get_backend(group)):
                return original(group, *args, **kwargs)
            peer = dist.get_global_rank(group, int(args[1])) if collective in ("send", "recv") else None
            label = self.label(collective, group, sides, max(map(bytes_in, sides), default=0), peer)
            with torch.profiler.record_function(f"comm::{label}"):
                work = original(group, *args, **kwargs)
            if work is not None:
                self.works[id(work)] = (work, label)
            return work

        return issue

    def work_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Work.wait, in a `wait::` range the first time, where the work was issued under a label."""
        import torch

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            _, label = self.works.pop(id(work), (None, None))
            if label is None:
                return original(work, *args, **kwargs)
            with torch.profiler.record_function(f"wait::{label}"):
                return original(work, *args, **kwargs)

        return wait

    def functional(self, collective: str, op: Any, *args: Any, **kwargs: Any) -> Any:
        """A functional collective in a `comm::` range."""
        import torch

        if any(t.device.type != "cpu" for t in tensors_in(args)):
            return op(*args, **kwargs)
        group = resolve_group((*args, *kwargs.values())[-1])
        times = group.size() if collective == "all_gather" else 1
        label = self.label(collective, group, args, bytes_in(args) * times)
        with torch.profiler.record_function(f"comm::{label}"):
            result = op(*args, **kwargs)
        self.results.update((t.data_ptr(), label) for t in tensors_in(result))
        return result

    def functional_wait(self, op: Any, tensor: Any) -> Any:
        """wait_tensor, in a `wait::` range where the tensor came from a labelled collective."""
        import torch

        label = self.results.pop(tensor.data_ptr(), None) if tensor.device.type == "cpu" else None
        if label is None:
            return op(tensor)
        with torch.profiler.record_function(f"wait::{label}"):
            return op(tensor)


class _Op:
    """An op of torch.ops with another way to call it; everything else goes to the op itself."""

    def __init__(self, op: Any, call: Callable[..., Any]) -> None:
        self._op, self._call = op, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        return self._op(*args, **kwargs) if torch.compiler.is_compiling() else self._call(self._op, *args, **kwargs)


@contextmanager
def label_collectives() -> Iterator[None]:
    """Put every CPU collective that Python issues, and every wait for one, in a named range while the context lasts.

    Enter it at the same point of the program on every rank: sequence numbers count from there. See the module's
    docstring for the names. It replaces methods of torch's ProcessGroup and Work and ops of torch.ops._c10d_functional
    and puts them back; collectives that C++ issues (DDP's reducer without `ddp_hook`) stay without a name. Without a
    torch.distributed job it does nothing.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    from torch._C._distributed_c10d import ProcessGroup, Work

    labeller, functional = _Labeller(), torch.ops._c10d_functional
    patches: list[tuple[Any, str, Any]] = [(Work, "wait", labeller.work_wait(Work.wait))]
    for name, collective in GROUP_METHODS.items():
        if (original := getattr(ProcessGroup, name, None)) is not None:
            patches.append((ProcessGroup, name, labeller.method(collective, original)))
    for name, collective in FUNCTIONAL_OPS.items():
        patches.append((functional, name, _Op(getattr(functional, name), partial(labeller.functional, collective))))
    patches.append((functional, "wait_tensor", _Op(functional.wait_tensor, labeller.functional_wait)))
    # From the class's own dict: getattr would give the bare function, which does not bind when put back.
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in patches]
    try:
        for owner, name, patch in patches:
            setattr(owner, name, patch)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def ddp_hook(state: Any, bucket: Any) -> Any:
    """Average a bucket of gradients as DDP does, issued and waited for from Python, so that a CPU trace shows both.

    DDP's own all-reduces and waits happen in C++ and leave no event on the issuing thread. With this hook each bucket's
    issue is in a `comm::` range where the bucket became ready, and its wait in a `wait::` range when the backward pass
    has ended and before the buckets are copied to the gradients, which is where DDP itself waits.

    Parameters
    ----------
    state
        The process group; None for the default one.
    bucket
        torch.distributed.GradBucket.

    Returns
    -------
    torch.futures.Future of the averaged bucket.

    Examples
    --------
    >>> model = DistributedDataParallel(net)                      # doctest: +SKIP
    >>> model.register_comm_hook(None, ln.ddp_hook)               # doctest: +SKIP
    """
    import torch
    import torch.distributed as dist

    group: Any = state if state is not None else dist.group.WORLD
    buffer = bucket.buffer().div_(group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    if buffer.device.type == "cpu":  # DDP queues its own final step after the last bucket, hence after these waits
        torch.autograd.Variable._execution_engine.queue_callback(work.wait)
    return work.get_future().then(lambda future: future.value()[0])


ddp_hook.__annotations__.clear()  # DDP takes no annotation but its own class, and torch is not imported here
