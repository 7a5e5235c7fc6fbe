"""Data sheets: what a maker states about a GPU and about what connects GPUs. Numbers only; nothing here is fitted.

The bundled ones lie in `datasets/hardware`, each with its source. One's own is a call of `Gpu` or `Fabric`, or a JSON
file of the same fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec

from lumos_nb import datasets
from lumos_nb.display import html_fields
from lumos_nb.errors import (
    ABOVE_0,
    UNDECODABLE,
    InputError,
    SheetError,
    harmless,
    is_number,
    is_whole,
    named,
    require_kinds,
    shown,
)

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
"""Names of number formats; `fp16/bf16`, as some figures say, is read as fp16, which runs at the same rate."""


class Sheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every data sheet has: a name, other names of the same thing, and where the numbers are from."""

    name: str
    aliases: tuple[str, ...] = ()
    source: str

    def __post_init__(self) -> None:
        name: object = self.name
        called = name if isinstance(name, str) else type(self).__name__
        for field, kind in _kinds(type(self)).items():
            given = getattr(self, field)
            if kind == dict[str, float]:
                taken: object = _rates(called, field, given)
            elif given is None and type(None) in get_args(kind):
                continue
            else:
                taken = _taken(called, field, given, kind if kind in _TAKEN else get_args(kind)[0])
            msgspec.structs.force_setattr(self, field, taken)

    def to_json(self) -> str:
        """The sheet as JSON text; `read_sheet` takes it back."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def _repr_html_(self) -> str:
        return html_fields(self, f"Data sheet of {self.name}")


class Gpu(Sheet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU (or a CPU, as a device of that kind), from its data sheet.

    `peak_flops` holds dense operations a second by number format, without sparsity; `memory_bytes_per_s` and
    `clock_hz` (boost) are as stated; `cores` counts streaming multiprocessors or compute units. `board_power_w` (TDP)
    and `process_nm`, what its maker calls the process, are optional: they tell a board that its power holds back.

    Raises
    ------
    SheetError
        A number is not positive, a field of another kind than it should be, or a format is unknown.

    Examples
    --------
    >>> mine = Gpu(
    ...     name="my GPU", source="its data sheet", cores=142, clock_hz=2.52e9, memory_bytes=48e9,
    ...     memory_bytes_per_s=864e9, l2_bytes=96e6, peak_flops={"fp32": 91.6e12, "bf16": 362e12, "fp16": 362e12},
    ... )
    >>> mine.peak("bf16") / mine.memory_bytes_per_s      # FLOPs that a byte must be worth
    418.98...
    """

    cores: int
    clock_hz: float
    memory_bytes: float
    memory_bytes_per_s: float
    l2_bytes: float
    peak_flops: dict[str, float]
    board_power_w: float | None = None
    process_nm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := set(self.peak_flops) - set(DTYPES):
            raise SheetError(
                f"{self.name}: unknown number format(s) {', '.join(sorted(unknown))}; known: {', '.join(DTYPES)}."
            )
        if "fp32" not in self.peak_flops:
            raise SheetError(f"{self.name}: peak_flops needs fp32: what has no rate of its own runs at it.")

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of a number format.

        Raises
        ------
        SheetError
            The GPU has no such rate: it does not compute in this format.
        """
        require_kinds(dtype=(dtype, str))
        rate = self.peak_flops.get(dtype.split("/")[0])
        if rate is None:
            raise SheetError(
                f"{self.name} has no rate for {harmless(dtype)}; its sheet has {', '.join(self.peak_flops)}. "
                "Add it to the sheet, or price the op in one of these formats."
            )
        return rate


class Fabric(Sheet, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What connects GPUs on one tier: inside a node, or between nodes.

    `bytes_per_s` is what one GPU can send while it receives as much (one direction); `max_gpus` is how many the tier
    joins (None: any number, as a network between nodes does). `reduces` says whether switches add up themselves (NVLS,
    SHARP): an all-reduce may then exceed the wire rate.

    Raises
    ------
    SheetError
        As of `Gpu`.
    """

    bytes_per_s: float
    latency_us: float
    max_gpus: int | None = None
    reduces: bool = False


AnySheet = TypeVar("AnySheet", Gpu, Fabric)


class _Takes(NamedTuple):
    """What a field of a kind takes: a test, what makes one of Python's of it, and words for it."""

    fits: Callable[[Any], bool]
    made: Callable[[Any], object]
    words: str


_TAKEN: dict[Any, _Takes] = {
    bool: _Takes(lambda given: isinstance(given, bool), bool, "True or False"),
    str: _Takes(lambda given: isinstance(given, str), str, "text"),
    tuple[str, ...]: _Takes(
        lambda given: isinstance(given, list | tuple) and all(isinstance(one, str) for one in given), tuple, "texts"
    ),
    int: _Takes(lambda given: is_whole(given, 1), int, "a positive whole number"),
    float: _Takes(lambda given: is_number(given, ABOVE_0), float, "a positive number"),
}


@cache
def _kinds(sheet: type[Sheet]) -> dict[str, Any]:
    return get_type_hints(sheet)


def _taken(called: str, field: str, given: object, kind: Any) -> object:
    """A field's value as one of its kind, whoever wrote it: nothing else checks what one makes in Python."""
    takes = _TAKEN[kind]
    if not takes.fits(given):
        raise SheetError(f"{called}: {field} is {shown(given)}; a data sheet needs {takes.words}.")
    return takes.made(given)


def _rates(called: str, field: str, given: object) -> dict[str, object]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise SheetError(f"{called}: {field} is {shown(given)}; give a rate for each number format, by its name.")
    return {name: _taken(called, name, rate, float) for name, rate in given.items()}


def read_sheet(path: str | Path, kind: type[AnySheet]) -> AnySheet:
    """One sheet of `kind` (`Gpu` or `Fabric`) from a JSON file.

    Raises
    ------
    SheetError
        The file is not there, is no JSON, lacks a field or has one too many; the message names file and field.
    """
    return _decoded(named(path, SheetError), kind)


def _decoded(path: Path, kind: type[AnySheet]) -> AnySheet:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNDECODABLE, SheetError) as error:
        raise SheetError(f"{path}: not a data sheet of a {kind.__name__}: {error}") from error


@cache
def gpus() -> tuple[Gpu, ...]:
    """The bundled data sheets of GPUs."""
    return tuple(_decoded(file, Gpu) for file in _files("gpus"))


@cache
def fabrics() -> tuple[Fabric, ...]:
    """The bundled data sheets of fabrics."""
    return tuple(_decoded(file, Fabric) for file in _files("fabrics"))


def _files(kind: str) -> list[Path]:
    return sorted((datasets.root() / "hardware" / kind).glob("*.json"))


def find_gpu(name: str) -> Gpu:
    """The bundled sheet of a GPU, by its name or one of its aliases, in any case and punctuation.

    Raises
    ------
    InputError
        There is none; the message lists the names.

    Examples
    --------
    >>> find_gpu("h100-sxm-80gb").cores
    132
    """
    require_kinds(name=(name, str))
    return _gpu(name)


def find_fabric(name: str) -> Fabric:
    """The bundled sheet of a fabric; else as `find_gpu`."""
    require_kinds(name=(name, str))
    return _fabric(name)


@cache
def _gpu(name: str) -> Gpu:
    return _found(name, gpus())


@cache
def _fabric(name: str) -> Fabric:
    return _found(name, fabrics())


def same_name(one: str, other: str) -> bool:
    """Whether two names differ in case, blanks and punctuation only."""
    return _plain(one) == _plain(other)


def names_of(sheet: Sheet) -> tuple[str, ...]:
    """Every name of a sheet, its own first."""
    return (sheet.name, *sheet.aliases)


def _found(name: str, sheets: Iterable[AnySheet]) -> AnySheet:
    known, plain = list(sheets), _plain(name)
    for sheet in known:
        if plain in map(_plain, names_of(sheet)):
            return sheet
    there = ", ".join(s.name for s in known)
    raise InputError(f"no data sheet is called {shown(name)}; there are: {there}. Make your own: Gpu or Fabric.")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
