"""What a runtime call, a kernel name or an annotation means, as data.

One row a pattern; CUDA, HIP and gloo names map to the same words, so no rule elsewhere looks at a vendor's spelling.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

CALL_PATTERNS: tuple[tuple[str, str], ...] = (
    # (what the call does, regular expression on its name); the first that matches decides
    ("launch", r"^(cuda|hip|cu)(Ext|ExtModule|Module)?(Graph)?Launch"),
    ("launch", r"^(cuda|hip)(Memcpy|Memset)\w*$|^cu(Memcpy|Memset)\w+$"),
    ("record", r"^(cuda|hip|cu)EventRecord"),
    ("wait_event", r"^(cuda|hip|cu)StreamWaitEvent$"),
    ("sync_stream", r"^(cuda|hip|cu)StreamSynchronize"),
    ("sync_event", r"^(cuda|hip|cu)EventSynchronize$"),
    ("sync_device", r"^(cuda|hip)DeviceSynchronize$|^cuCtxSynchronize$"),
    ("free", r"^(cuda|hip)(Free|FreeHost|HostFree|HostUnregister)$|^cuMemFree|^cuModuleUnload$"),
    ("elapsed", r"^(cuda|hip)EventElapsedTime"),
    ("alloc", r"^(cuda|hip)(Malloc|HostAlloc|MallocHost|HostRegister|HostMalloc)$|^cuMemAlloc"),
    ("alloc", r"^cu(Module|Library)Load|^hipModuleLoad"),
    ("launch", r"^runFunction|^enqueueCommand mem(cpy|set)"),  # MTIA, here and below
    ("record", r"^recordEvent$"),
    ("wait_event", r"^enqueueCommand waitOnEvent$"),
    ("sync_stream", r"^synchronizeStream$"),
)
"""`free` waits for the whole device and then costs its own time; `alloc` only costs its own time. `elapsed` is kept
because a wait for the events that it reads, which many profilers do not record, lies in the gap before it."""

DEVICE_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
CALL_CATEGORIES = ("cuda_runtime", "cuda_driver")
COLLECTIVE_CATEGORY = "collective"
"""Events of a thread that are a collective or an exchange of messages: it goes on when all ranks have arrived."""

HOST_COLLECTIVE = "collective"
"""What such a call does, in the words of `CALL_PATTERNS`."""

COMM_KERNELS = r"(?i)^(nccl|rccl|oneccl|hccl)"
COMM_TYPES: tuple[tuple[str, str], ...] = (
    # (collective, regular expression on a kernel name, an annotation or an operator); the first that matches decides
    ("all_to_all", r"(?i)all_?to_?all"),
    ("all_reduce", r"(?i)all_?reduce"),
    ("all_gather", r"(?i)all_?gather"),
    ("reduce_scatter", r"(?i)reduce_?scatter"),
    ("broadcast", r"(?i)broadcast"),
    ("barrier", r"(?i)barrier"),
    ("gather", r"(?i)(^|[:_])gather"),
    ("scatter", r"(?i)(^|[:_])scatter"),
    ("reduce", r"(?i)reduce"),
    ("send_recv", r"(?i)send_?recv|coalesced"),
    ("send", r"(?i)(^|[:_])i?send"),
    ("recv", r"(?i)(^|[:_])i?recv"),
)

BLOCKING_COPIES = r"DtoH.*Pageable"
"""A copy to pageable host memory returns only when it is done; the other way the call may return long before."""

ENGINE_OPERATORS = r"^autograd::engine::evaluate_function|Backward\d*$|^torch::autograd::AccumulateGrad$"
"""Operators that the autograd engine runs: since 2021 under its own name, before by the name of the backward node."""
STEP_MARK = r"^ProfilerStep#?\s*(\d+)"


HOST_COMM = r"^gloo:"
"""Annotations that mark the execution of a collective on a CPU thread."""

COMM_OPERATORS = r"^(?:c10d|_c10d_functional\w*|gloo|nccl|torch\.distributed)\b"
"""Operators and annotations of libraries of collectives."""

COMM_ISSUE = r"^c10d::_?(?:all|reduce|broadcast|gather|scatter|barrier|send|recv)"
"""Operators that issue a collective: all that a trace has of it where the recorder has not labelled it (DDP's own)."""

COMM_LABEL = r"^(comm|wait)::(\w+) group=(\S*) seq=(\d+) bytes=(\d+) dtype=(\w+)(?: peer=(\d+))?"
"""What the recorder writes round the issue (`comm::`) and the wait (`wait::`) of a CPU collective: see labels.py."""

COLLECTIVE_WAITS = (
    r"(?i)wait\(\)|awaitable|wait_tensor|_wait\b|sparse_data_dist|record_param_comms|c10d|finalize|Optimizer|copy_bucket|"
    r"fsdp|FullyShard"
)
"""Operators and annotations in which a stream waits for a collective issued earlier: c10d's Work.wait and its users."""


def arguments(args: pl.Series, fields: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """The named arguments of events, one column each; null where there is none, or one of another type."""
    try:
        return args.str.json_decode(pl.Struct(fields)).struct.unnest()
    except pl.exceptions.ComputeError:  # numbers in quotes, lists in their place, no JSON: what can be read
        found = {name: args.str.json_path_match(f'$["{name}"]') for name in fields}
        return pl.DataFrame({name: found[name].cast(dtype, strict=False) for name, dtype in fields.items()})


def classify(name: pl.Expr, patterns: tuple[tuple[str, str], ...]) -> pl.Expr:
    """The word of the first pattern that `name` matches, else null."""
    out = pl.lit(None, pl.String)
    for word, pattern in reversed(patterns):
        out = pl.when(name.str.contains(pattern)).then(pl.lit(word)).otherwise(out)
    return out
