"""Compiled kernels: numba with explicit signatures, compiled once and kept on disk.

`python -m lumos_nb._jit` compiles every kernel of the package, so that processes started together find them ready.

numba keeps compiled kernels in `NUMBA_CACHE_DIR`, in `__pycache__` beside the module, or in the user's cache folder.
Where none of these can be written, a kernel is compiled for this process only: the same code and the same results, at
the price of compiling at each import. `cache_enabled` tells which it was. numba looks only at a kernel's own file to
see whether it has changed, so a kernel calls only kernels of its own file and of those that it `uses`.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import numba

P = ParamSpec("P")
R = TypeVar("R")

_uncached: list[str] = []


def jit(
    signature: str,
    *,
    parallel: bool = False,
    allocates: bool = True,
    inline: bool = False,
    uses: Sequence[ModuleType] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compile the decorated function now, for `signature`, without Python's lock and with numpy's division by zero.

    Parameters
    ----------
    signature
        numba's notation, e.g. `"int64(int64[::1], float64[:, ::1])"`. Arguments of other types are a TypeError, never
        another compilation.
    parallel
        Let `numba.prange` loops run on several threads.
    allocates
        False: the function makes no array, so that it need not count references to those it is given: kernels that call
        each other once an op spend half their time on that.
    inline
        Put the function's code into those that call it, instead of a call.
    uses
        Modules whose kernels the function calls: it is compiled anew when one of these files is another.

    Examples
    --------
    >>> @jit("int64(int64[::1])")
    ... def total(values):
    ...     return values.sum()
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if uses:  # numba files what it compiles under this name
            function.__qualname__ += "_" + "_".join(map(_digest, uses))

        def compiled(*, cache: bool) -> Callable[P, R]:
            options: dict[str, Any] = {"nogil": True, "parallel": parallel, "error_model": "numpy"}
            options |= {"_nrt": allocates, "forceinline": inline}
            wrapped = numba.njit(signature, cache=cache, **options)(function)
            return cast("Callable[P, R]", wrapped)

        try:
            return compiled(cache=True)
        except (RuntimeError, OSError) as error:  # no folder to cache in, or one that fails while it is written
            if isinstance(error, RuntimeError) and "cannot cache function" not in str(error):
                raise
        _uncached.append(f"{function.__module__}.{function.__qualname__}")
        return compiled(cache=False)

    return decorate


@cache
def _digest(module: ModuleType) -> str:
    return blake2b(Path(str(module.__file__)).read_bytes(), digest_size=6).hexdigest()


def cache_enabled() -> bool:
    """Whether every kernel that this process has compiled so far is kept on disk for the next one."""
    return not _uncached


def warm() -> list[str]:
    """Import, and so compile, every module of the package that has kernels; their names."""
    package = importlib.import_module("lumos_nb")
    modules = []
    for found in pkgutil.walk_packages(package.__path__, "lumos_nb."):
        spec = importlib.util.find_spec(found.name)
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        if "\nfrom lumos_nb._jit import" in source:
            importlib.import_module(found.name)
            modules.append(found.name)
    return modules


if __name__ == "__main__":
    print("kernels ready:", ", ".join(warm()) or "none")  # noqa: T201
