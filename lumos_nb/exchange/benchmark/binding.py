"""From the table of a workload to functions that make its calls: operators, memory and process groups of this machine.

A *slot* holds a tensor. Slots that no call makes are filled before the clock starts; a call reads slots, makes slots,
and empties those that nobody reads later, as the traced program did. What a name in the table stands for is looked up
in torch's registry; nothing of the table is evaluated.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAME = re.compile(r"([A-Za-z_]\w*)::([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?")
KINDS = {"Tensor", "SymInt", "int", "float", "bool", "number", "Scalar", "ScalarType", "Layout", "Device", "Generator"}
KINDS |= {"MemoryFormat", "NoneType"}
WORDS = {"approximate", "reduce", "mode", "rounding_mode", "padding", "padding_mode", "indexing", "equation", "ord"}
WORDS |= {"reduce_op", "group_name"}
"""Of arguments that are text."""
DEFAULT = "0"
"""Name of the group of all ranks."""
SPARE = 0.8
"""Share of the free memory that may be taken."""
Run = Callable[[], None]
"""Makes a call."""


class Unusable(Exception):
    """A workload, or a part of it, cannot be run here; the message says why and what to do."""


def find_op(name: str) -> Any:
    """The operator of torch's registry that bears this name; only such as take nothing but tensors and numbers."""
    parts = NAME.fullmatch(name)
    if not parts or any(part and part.startswith("__") for part in parts.groups()):
        raise Unusable(f"{name[:80]!r} is no operator's name")
    try:
        found = getattr(getattr(getattr(torch.ops, parts[1]), parts[2]), parts[3] or "default")
    except (AttributeError, RuntimeError):
        raise Unusable(f"{name} is not in this torch's registry") from None
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


def issue(what: str, out: Sequence[Any], given: Sequence[Any], said: dict[str, Any], group: Any) -> Any:
    """Begin a collective or a message on the tensors for its results (in place: all) and those that it gives."""
    later, peer = {"group": group, "async_op": True}, said["peer"]
    match what:
        case "all_reduce":
            return [dist.all_reduce(one, **later) for one in out][-1]
        case "all_gather" if len(out) == 1:
            return dist.all_gather_into_tensor(out[0], given[0], **later)
        case "all_gather":
            return dist.all_gather(list(out), given[0], **later)
        case "reduce_scatter" if len(given) == 1:
            return dist.reduce_scatter_tensor(out[0], given[0], **later)
        case "reduce_scatter":
            return dist.reduce_scatter(out[0], list(given), **later)
        case "all_to_all" if len(given) == 1:
            return dist.all_to_all_single(out[0], given[0], *said["splits"], **later)
        case "all_to_all":
            return dist.all_to_all(list(out), list(given), **later)
        case "broadcast":
            return dist.broadcast(out[0], group_src=peer, **later)
        case "reduce":
            return dist.reduce(out[0], group_dst=peer, **later)
        case "gather":
            return dist.gather(given[0], list(out) or None, group_dst=peer, **later)
        case "scatter":
            return dist.scatter(out[0], list(given) or None, group_src=peer, **later)
        case "send":
            return dist.isend(out[0], group=group, group_dst=peer)
        case "recv":
            return dist.irecv(out[0], group=group, group_src=peer)
        case "barrier":
            return dist.barrier(**later)
    raise Unusable(f"{what[:80]!r} is no collective")


def join(groups: dict[str, list[int]], source: dict[str, Any], device: str) -> dict[str, Any]:
    """Process groups by the trace's names; torch's fake group is those some of whose ranks are not launched."""
    every, launched = [*range(len(groups[DEFAULT]))], int(os.environ.get("WORLD_SIZE", "0"))
    present, library = source["ranks"] if launched else [], "nccl" if device == "cuda" else "gloo"
    if launched not in (0, len(source["ranks"])):
        raise Unusable(f"{len(present)} rank(s) can be launched: as many, or one without torchrun, with fake peers.")
    if not dist.is_initialized() and present == every:
        dist.init_process_group(library, timeout=timedelta(seconds=120))
    elif not dist.is_initialized():
        from torch.distributed.rendezvous import rendezvous
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store = next(iter(rendezvous("env://")))[0] if launched else FakeStore()
        dist.init_process_group("fake", store=store, rank=source["rank"], world_size=len(every))
    mine = {name: dist.group.WORLD for name, ranks in groups.items() if ranks == every}
    for name, ranks in sorted(groups.items()):
        if name not in mine and dist.get_rank() in ranks:
            backend = library if {*ranks} <= {*present} else "fake"
            mine[name] = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return mine


class Absent:
    """A group whose peers are not there: each collective takes its time after the last, on the host or on a stream."""

    def __init__(self, device: str) -> None:
        self.free_ns = 0
        self.stream: Any = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]
        self.cycles_per_ns = cycles_per_ns() if device == "cuda" else 0.0

    def begin(self, delay_ns: int) -> Run:
        """Begin one; what is given back waits for its end."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(int(delay_ns * self.cycles_per_ns))  # type: ignore[no-untyped-call]
            ended = self.stream.record_event()
            return lambda: torch.cuda.current_stream().wait_event(ended)
        self.free_ns = until = max(self.free_ns, time.perf_counter_ns()) + delay_ns

        def wait() -> None:
            while time.perf_counter_ns() < until:
                pass

        return wait


def cycles_per_ns() -> float:
    """How fast the clock goes that `torch.cuda._sleep` counts."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for cycles in (1_000_000, 10_000_000):  # the first warms up
        begin.record()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
    return 1e-6 * cycles / float(begin.elapsed_time(end))


class Bench:
    """The chosen calls of a workload, each bound to its operator, slots and constants."""

    def __init__(self, folder: Path, device: str, wanted: Callable[[int, list[str], bool], bool]) -> None:
        self.folder, self.device = folder, device
        tables = sorted(folder.glob("workload*.json"), key=lambda file: [*map(int, re.findall(r"\d+", file.name))])
        file = tables[min(int(os.environ.get("RANK", "0")), len(tables) - 1)]
        self.table, self.drawn = json.loads(file.read_text()), f"indices{file.stem.removeprefix('workload')}.bin"
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
                self.stand_ins[name, (str(error).strip() or type(error).__name__).splitlines()[0][:100]] += 1
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
