"""Work over many inputs, here or elsewhere: a loop, a pool of processes, or the workers of a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor
from functools import partial
from typing import Any, TypeVar

from lumos_nb.errors import ExecutorError, shown

Given = TypeVar("Given")
Made = TypeVar("Made")

CONNECT_S = 10
"""How long a scheduler may take to answer."""


def spread(
    executor: Executor | str | None, function: Callable[[Given], Made], items: Iterable[Given]
) -> Iterator[Made]:
    """What `function` makes of each item, in order; where an executor does it, with what it cannot survive named.

    Parameters
    ----------
    executor
        None: one after the other, in this process. A pool of `concurrent.futures`, or
        `dask.distributed.Client(...).get_executor()`. Text: the address of a Dask scheduler ("tcp://host:8786"), to
        which a client is opened for this call; needs the extra `cluster`. What workers had when they died Dask does
        again. Function and items travel by pickle, polars' tables as Arrow within it.
    function, items
        The function can be imported by workers; so a pool of processes needs one of a module. What a `partial` holds
        goes to a cluster once, and to the processes of a pool with each item.

    Raises
    ------
    ExecutorError
        The executor is none of these, forks, cannot be reached, or was lost. Errors of `function` are passed on.

    Examples
    --------
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor(2) as pool:
    ...     list(spread(pool, abs, [-1, 2]))
    [1, 2]
    """
    if executor is None:
        return map(function, items)
    if isinstance(executor, str):
        return _by_address(executor, function, items)
    check_executor(executor)
    return _told(executor, function, items)


def check_executor(executor: object) -> None:
    """Raise ExecutorError for what cannot run anything.

    A fork cannot: polars' threads are not there in it, and it waits for them for ever. It is what ProcessPoolExecutor
    does by default on Linux before Python 3.14.
    """
    if executor is None or isinstance(executor, str):
        return
    works = hasattr(executor, "submit") or hasattr(executor, "apply_async")  # a column of a table has a `map` too
    if isinstance(executor, type) or not (works and hasattr(executor, "map")):
        raise ExecutorError(
            f"executor is {shown(executor)}; give one as concurrent.futures has, or the address of a Dask scheduler."
        )
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise ExecutorError(
            "the executor forks this process, and polars hangs in a fork; give "
            'ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")), or threads.'
        )


def _by_address(address: str, function: Callable[[Given], Made], items: Iterable[Given]) -> Iterator[Made]:
    try:
        from distributed import Client
    except ModuleNotFoundError:
        raise ExecutorError(
            f"executor is the address {shown(address)}, which needs Dask: pip install 'lumos_nb[cluster]'."
        ) from None
    client: Any = Client.__new__(Client)  # before it connects, or nobody could close what is left where it does not
    try:
        client.__init__(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        client.close()
        raise ExecutorError(
            f"no Dask scheduler answers at {shown(address)} ({error}); give the address that it prints when it starts."
        ) from error
    with client:
        yield from _told(client.get_executor(), function, items)


def _told(executor: Executor, function: Callable[[Given], Made], items: Iterable[Given]) -> Iterator[Made]:
    done, items = 0, [*items]
    try:
        outcomes = _mapped(executor, function, items)
    except (RuntimeError, BrokenExecutor) as error:  # of a pool that is shut down
        raise ExecutorError(f"the executor takes no work ({error}): give one that is open.") from error
    try:
        for made in outcomes:
            done += 1
            yield made
    except Exception as error:
        if not _lost(error):
            raise
        raise ExecutorError(
            f"the executor was lost after {done:,} of {len(items):,} parts were done ({error}): see the logs of its "
            "workers, which may lack memory, and run it again."
        ) from error


def _mapped(executor: Executor, function: Callable[[Given], Made], items: list[Given]) -> Iterator[Made]:
    """As `Executor.map`; to Dask a partial is the result of a task, so that it is sent once, and made again if lost."""
    if not (isinstance(function, partial) and type(executor).__module__.startswith("distributed.")):
        return executor.map(function, items)
    import dask

    with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1TB"}):
        held = executor._client.submit(_same, function, pure=False)  # type: ignore[attr-defined]
    return executor.map(_applied, [held] * len(items), items)


def _same(function: Callable[[Given], Made]) -> Callable[[Given], Made]:
    return function


def _applied(function: Callable[[Given], Made], item: Given) -> Made:
    return function(item)


def _lost(error: Exception) -> bool:
    """Whether an executor says that it, and not what it ran, is at fault; Dask is not imported to ask."""
    gone = isinstance(error, BrokenExecutor | CancelledError)
    return gone or type(error).__name__ in ("KilledWorker", "CommClosedError", "ClientClosedError")
