"""From the table of a workload to functions that make its calls: operators, memory and process groups of this machine.

A *slot* holds a tensor. Slots that no call makes are filled before the clock starts; a call reads slots, makes slots,
and empties those that nobody reads later, as the traced program did. What a name in the table stands for is looked up
in torch's registry; nothing of the table is evaluated.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lumos_nb.exchange.benchmark.peers import Absent, issue, join
from lumos_nb.exchange.benchmark.peers import Unusable as Unusable

NAME = re.compile(r"([A-Za-z_]\w*)::([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?")
NAMESPACES = {"aten", "prims", "quantized", "mkldnn", "mkl", "onednn", "c10d_functional", "_c10d_functional"}
NAMESPACES |= {"torchvision", "fbgemm"}
"""Whose operators are called: torch's, and those of two libraries that compute on tensors and do nothing else."""
KINDS = {"Tensor", "SymInt", "int", "float", "bool", "number", "Scalar", "ScalarType", "Layout", "Device", "Generator"}
KINDS |= {"MemoryFormat", "NoneType"}
WORDS = {"approximate", "reduce", "mode", "rounding_mode", "padding", "padding_mode", "indexing", "equation", "ord"}
WORDS |= {"reduce_op", "group_name"}
"""Of arguments that are text."""
SPARE = 0.8
"""Share of the free memory that may be taken."""
SUSPECT = 1 << 27
"""Elements that a call's numbers may ask for before it is tried without data."""
Run = Callable[[], None]
"""Makes a call."""


def find_op(name: str) -> Any:
    """The operator of torch's registry that bears this name; only such as take nothing but tensors and numbers."""
    parts = NAME.fullmatch(name)
    if not parts or any(part and part.startswith("__") for part in parts.groups()):
        raise Unusable(f"{name[:80]!r} is no operator's name")
    if parts[1] not in NAMESPACES:
        raise Unusable(f"{name[:80]} is none of {', '.join(sorted(NAMESPACES))}: only their operators are called")
    try:
        found = getattr(getattr(getattr(torch.ops, parts[1]), parts[2]), parts[3] or "default")
    except (AttributeError, RuntimeError):
        raise Unusable(f"{name[:80]} is not in this torch's registry") from None
    if not isinstance(found, torch._ops.OpOverload):
        raise Unusable(f"{name} is no operator")
    for argument in found._schema.arguments:
        kinds = set(re.findall(r"\w+", re.sub(r"Optional|List", "", str(argument.type))))
        if not kinds <= KINDS and not (kinds <= {"str", "Any"} and argument.name in WORDS):
            raise Unusable(f"{name} takes {argument.name}, a {argument.type}: only tensors and numbers are given")
    return found


def dtype_of(name: str) -> torch.dtype:
    """The number format that bears this name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unusable(f"{name[:80]!r} is no number format.")
    return found


def slots_in(value: Any) -> Iterator[int]:
    """Numbers of the slots in arguments: `{"slot": 7}`, alone and in lists."""
    if isinstance(value, dict) and "slot" in value:
        yield value["slot"]
    elif isinstance(value, list):
        for one in value:
            yield from slots_in(one)


def getter(slots: Sequence[int]) -> Callable[[list[Any]], Any]:
    """What reads these slots at once, in C."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    return operator.itemgetter(slice(slots[0], slots[0] + 1) if slots else slice(0))


def fill(flat: torch.Tensor, rule: Sequence[Any], drawn: Path) -> None:
    """Write values into memory: by a rule's name and its numbers."""
    kind, *numbers = rule
    if kind == "normal":
        flat.normal_(*numbers)
    elif kind == "uniform":
        flat.uniform_(*numbers)
    elif kind == "integers":  # from the first up to below the second
        flat.random_(numbers[0], max(numbers[1], numbers[0] + 1))
    elif kind == "even":  # offsets of so many bags, of so many indices
        flat.copy_(torch.arange(len(flat)) * numbers[1] // numbers[0])
    elif kind == "true":  # so many of them
        flat[torch.randperm(len(flat), device=flat.device)[: numbers[0]]] = True
    elif kind == "drawn":  # int64 numbers of indices.bin, from this one on
        with drawn.open("rb") as file:
            file.seek(8 * numbers[0])
            read = torch.frombuffer(bytearray(file.read(8 * numbers[1])), dtype=torch.int64)
        flat[: len(read)].copy_(read)
    elif kind == "definite":  # matrices of so many rows
        flat.zero_()
        whole = flat[: len(flat) // numbers[0] ** 2 * numbers[0] ** 2].view(-1, numbers[0], numbers[0])
        whole.diagonal(dim1=1, dim2=2).fill_(2.0)
    elif kind == "constant":
        flat.fill_(numbers[0])
    else:
        raise Unusable(f"{kind!r} is no rule of values.")


@contextlib.contextmanager
def telling_damage() -> Iterator[None]:
    """Say of errors on the way to memory that the table is at fault: it says all that is done there."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Unusable(f"{error}; run a part, or smaller sizes.") from error
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise Unusable(f"workload.json is damaged ({type(error).__name__}: {error}); generate it again.") from error


class Bench:
    """The chosen calls of a workload, each bound to its operator, slots and constants."""

    def __init__(self, folder: Path, device: str, wanted: Callable[[int, list[str], bool], bool]) -> None:
        self.folder, self.device = folder, device
        tables = sorted(folder.glob("workload*.json"), key=lambda file: [*map(int, re.findall(r"\d+", file.name))])
        if not tables:
            raise Unusable(f"{folder} holds no workload.json; generate it again.")
        file = tables[min(int(os.environ.get("RANK", "0")), len(tables) - 1)]
        self.table, self.drawn = json.loads(file.read_text()), f"indices{file.stem.removeprefix('workload')}.bin"
        if len(tables) != len(self.table["source"]["ranks"]):
            raise Unusable(f"{len(tables)} tables are here, not one a rank that was generated: generate it again.")
        self.slots, self.memory = self.table["slots"], self.table["memory"]
        self.calls = [
            call for at, call in enumerate(self.table["calls"]) if wanted(at, self.path(call), self.talks(call))
        ]
        if not self.calls:
            raise Unusable("no call is chosen; workload.json lists operators in `ops` and parts in `scopes`.")
        self.values: list[Any] = [None] * len(self.slots)
        self.made = {slot for call in self.calls for slot in call["out"] if slot >= 0}
        self.last = {slot: at for at, call in enumerate(self.calls) for slot in slots_in([*call["in"].values()])}
        self.given = sorted(set(self.last) - self.made)
        self.stand_ins: Counter[tuple[str, str]] = Counter()
        talks = any(map(self.talks, self.calls))
        self.groups = join(self.table["groups"], self.table["source"], device) if talks else {}
        self.works: dict[Any, Any] = {}
        """What waits for a collective: by the handle of its call, or of absent peers by its memory."""
        self.queues: dict[str, Absent] = {}

    def talks(self, call: dict[str, Any]) -> bool:
        """Whether a call communicates."""
        return "comm" in call or self.table["ops"][call["op"]].startswith("_c10d_functional")

    def path(self, call: dict[str, Any]) -> list[str]:
        """The operator's name and those of all that the call is within."""
        names, at = [self.table["ops"][call["op"]]], call["scope"]
        while at >= 0:
            name, at = self.table["scopes"][at]
            names.append(name)
            if len(names) > len(self.table["scopes"]) + 1:
                raise Unusable("workload.json is damaged: its scopes lead back to themselves; generate it again.")
        return names

    def needed_bytes(self) -> int:
        """Memory of what is given, and the most that calls hold beside it."""
        of = [row[0] for row in self.slots]
        end = {of[slot]: at for slot, at in sorted(self.last.items(), key=operator.itemgetter(1))}
        seen = {of[slot] for slot in self.given}
        held: int = sum(self.memory[at][0] for at in seen)
        most, ends = held, Counter[int]()
        for at, call in enumerate(self.calls):
            for new in {of[slot] for slot in call["out"] if slot >= 0} - seen:
                seen.add(new)
                held += self.memory[new][0]
                ends[max(end.get(new, at), at)] += self.memory[new][0]
            most = max(most, held)
            held -= ends[at]
        return most

    def allocate(self) -> None:
        """Fill the slots that no call makes; raises where that is more than there is memory for."""
        need, free = self.needed_bytes(), free_bytes(self.device)
        if need > SPARE * free:
            raise Unusable(
                f"this takes {need / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free: run a part (--range 0:100, --only "
                "NAME), or generate it with smaller sizes (`shrink` of lumos_nb's benchmark.generate)."
            )
        torch.manual_seed(0)
        blocks: dict[int, torch.Tensor] = {}
        for slot in self.given:
            at, offset, shape, strides, dtype = self.slots[slot]
            if at not in blocks:
                size, device, kind, rule = self.memory[at]
                where = self.device if device == "cuda" else "cpu"
                blocks[at] = torch.zeros(-(-size // 16) * 16, dtype=torch.uint8, device=where)
                fill(blocks[at].view(dtype_of(kind)), rule, self.folder / self.drawn)
            self.values[slot] = torch.as_strided(blocks[at].view(dtype_of(dtype)), shape, strides, offset)

    def bind(self) -> list[Run]:
        """A function a call; each is made once and put to the test. Where it fails, a stand-in is taken."""
        program = []
        for at, call in enumerate(self.calls):
            name = self.path(call)[1 if not self.table["ops"][call["op"]] else 0]
            try:
                run = self.bound(at, call)
                run()
                self.check(call)
            except torch.OutOfMemoryError as error:
                raise Unusable(f"{name}: {error}; run a part, or smaller sizes.") from error
            except Exception as error:
                self.stand_ins[name[:80], (str(error).strip() or type(error).__name__).splitlines()[0][:100]] += 1
                run = self.stand_in(at, call)
                run()
            program.append(run)
        return program

    def check(self, call: dict[str, Any]) -> None:
        """Raise unless the results have the shapes that they had in the trace."""
        for slot in call["out"]:
            value = self.values[slot] if slot >= 0 else None
            if value is not None and list(value.shape) != self.slots[slot][2]:
                raise Unusable(f"its result is {list(value.shape)}, not {self.slots[slot][2]}")

    def bound(self, at: int, call: dict[str, Any]) -> Run:
        """The function that makes a call. As little as can be is done in it: what can be settled is settled here."""
        if "comm" in call:
            return self.talk(at, call)
        if not self.table["ops"][call["op"]]:
            raise Unusable(call["why"])
        found = find_op(self.table["ops"][call["op"]])
        self.check_size(found, call)
        schema, given, values = found._schema.arguments, call["in"], self.values
        positional: list[int] = []
        fixed: dict[str, Any] = {}
        moving: dict[str, int] = {}
        lists: list[tuple[int, Callable[[list[Any]], Any]]] = []
        for argument in schema[: max((n + 1 for n, one in enumerate(schema) if one.name in given), default=0)]:
            value = given.get(argument.name, argument.default_value)
            if isinstance(value, dict) and "number" in value:  # JSON has none that are not finite
                value = float(value["number"])
            if "Device" in str(argument.type) and value is not None:
                value = torch.device(self.device if str(value).startswith("cuda") else "cpu")
            if argument.name == "group_name":
                value = self.groups[value].group_name
            slot = value["slot"] if isinstance(value, dict) else self.constant(value)
            if isinstance(value, list) and any(slots_in(value)):
                parts = [one["slot"] if isinstance(one, dict) else self.constant(one) for one in value]
                lists.append((slot, getter(parts)))
            if not argument.kwarg_only:
                positional.append(slot)
            elif isinstance(value, dict) or (lists and lists[-1][0] == slot):
                moving[argument.name] = slot
            else:
                fixed[argument.name] = value
        function = functools.partial(found._op, **fixed) if fixed else found._op
        get, more, names = getter(positional), getter([*moving.values()]), [*moving]
        dead, kept = self.ends(at, call)
        listed = len(call["out"]) > 1 or "List" in str([one.type for one in found._schema.returns])

        def no_result() -> None:
            function(*get(values))
            for slot in dead:
                values[slot] = None

        def one_result() -> None:
            values[target] = function(*get(values))
            for slot in dead:
                values[slot] = None

        def any_results() -> None:
            for slot, read in lists:
                values[slot] = list(read(values))
            results = function(*get(values), **dict(zip(names, more(values), strict=True)))
            for place, slot in kept:
                values[slot] = results[place] if listed else results
            for slot, _ in lists:
                values[slot] = None
            for slot in dead:
                values[slot] = None

        target = kept[0][1] if kept else -1
        run = any_results if lists or moving or listed else one_result if kept else no_result
        return self.late(call, run) if self.talks(call) else run

    def queue(self, call: dict[str, Any], group: str) -> Absent | None:
        """Where the call waits for peers that are not there; None if they are, or nothing says for how long."""
        if "delay_ns" not in call or dist.get_backend(self.groups[group]) != "fake":
            return None
        return self.queues.setdefault(group, Absent(self.device))

    def late(self, call: dict[str, Any], run: Run) -> Run:
        """A functional collective that takes its time if its peers are not there, or the wait for it."""
        works = self.works
        slots = [slot for slot in call["out"] if slot >= 0] or [*slots_in([*call["in"].values()])]
        if "wait_tensor" in self.table["ops"][call["op"]]:
            memory = self.slots[next(slots_in([*call["in"].values()]))][0]

            def wait() -> None:
                works.pop((memory,), int)()
                run()

            return wait
        queue, delay_ns = self.queue(call, call["in"]["group_name"]), call.get("delay_ns", 0)
        if queue is None:
            return run
        made = (self.slots[slots[0]][0],)

        def start() -> None:
            run()
            works[made] = queue.begin(delay_ns)

        return start

    def check_size(self, found: Any, call: dict[str, Any]) -> None:
        """Raise if numbers among the arguments ask for more memory than is free: found out on tensors without data."""
        slots = [*slots_in([*call["in"].values()]), *(slot for slot in call["out"] if slot >= 0)]
        numel = max([1, *(math.prod(self.slots[slot][2]) for slot in slots)])
        lists = [value if isinstance(value, list) else [value] for value in call["in"].values()]
        largest = max((math.prod(max(abs(n), 1) for n in some if type(n) is int) for some in lists), default=1)
        if largest * numel < SUSPECT or self.talks(call):
            return

        def empty(value: Any) -> Any:
            if isinstance(value, list):
                return [empty(one) for one in value]
            if not isinstance(value, dict) or "slot" not in value:
                return value
            _, _, shape, strides, dtype = self.slots[value["slot"]]
            return torch.empty_strided(shape, strides, dtype=dtype_of(dtype), device="meta")

        arguments = {name: empty(value) for name, value in call["in"].items()}
        if any(argument.name == "device" for argument in found._schema.arguments):
            arguments["device"] = "meta"
        try:
            made = found(**arguments)
        except Exception:  # it has no kernel that only tells the size
            if largest > max(1 << 20, numel):
                raise Unusable("nothing says how much memory it takes, and its numbers are large") from None
            return
        tensors = [one for one in (made if isinstance(made, list | tuple) else [made]) if isinstance(one, torch.Tensor)]
        if (need := sum(one.numel() * one.element_size() for one in tensors)) > SPARE * free_bytes(self.device):
            raise Unusable(f"its result would take {need / 1e9:.3g} GB")

    def talk(self, at: int, call: dict[str, Any]) -> Run:
        """The function that issues a collective or a message, or waits for one."""
        what, said, values, works = self.table["ops"][call["op"]], call["comm"], self.values, self.works
        handle, (dead, _), group = said["handle"], self.ends(at, call), self.groups.get(said.get("group"))
        out, given = (getter([*slots_in(call["in"].get(side, []))]) for side in ("out", "given"))
        queue, delay_ns = None if what == "wait" else self.queue(call, said["group"]), call.get("delay_ns", 0)

        def start() -> None:
            work = issue(what, out(values), given(values), said, group)
            works[handle] = queue.begin(delay_ns) if queue else work.wait
            for slot in dead:
                values[slot] = None

        def wait() -> None:
            works.pop(handle, int)()

        return wait if what == "wait" else start

    def constant(self, value: Any) -> int:
        """Where a constant lies while calls are made."""
        self.values.append(value)
        return len(self.values) - 1

    def ends(self, at: int, call: dict[str, Any]) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Slots that are empty after a call, and (place, slot) of those of its results that are read later."""
        used = {*slots_in([*call["in"].values()])} & self.made
        dead = tuple(slot for slot in sorted(used) if self.last[slot] == at)
        return dead, [(place, slot) for place, slot in enumerate(call["out"]) if self.last.get(slot, -1) > at]

    def stand_in(self, at: int, call: dict[str, Any]) -> Run:
        """What takes the place of a call that cannot be made: reads what it read, writes what it wrote, once."""
        values, (dead, kept) = self.values, self.ends(at, call)
        slots = [slot for slot in slots_in([*call["in"].values()]) if values[slot] is not None]
        made = []
        for _, slot in kept:
            memory, _, shape, strides, dtype = self.slots[slot]
            where = self.device if self.memory[memory][1] == "cuda" else "cpu"
            made.append((slot, shape, strides, dtype_of(dtype), where))

        def run() -> None:
            for slot in slots:
                values[slot].clone()
            for slot, shape, strides, dtype, where in made:
                values[slot] = torch.empty_strided(shape, strides, dtype=dtype, device=where).fill_(0)
            for slot in dead:
                values[slot] = None

        return run


def free_bytes(device: str) -> int:
    """Memory that is free where the benchmark runs."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
