"""Run the benchmark that workload.json beside this file describes: the operators of a trace, on tensors of its shapes.

Needs torch only. workload.json is data: operators are looked up in torch's registry, and nothing in it is evaluated.

    python bench.py --iterations 20              on the GPU if there is one; --device cpu
    python bench.py --profile out                also a Kineto trace and step times, for lumos_nb's benchmark.compare
    torchrun --nproc-per-node 2 bench.py         with as many ranks as were traced
    python bench.py --only Optimizer.step        a part: by name; --range 0:100; --part compute or comm

A *slot* holds a tensor. Slots that no call makes are filled before the clock starts; a call reads slots, makes slots,
and empties those that nobody reads later, as the traced program did.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import operator
import os
import re
import statistics
import sys
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
    if isinstance(value, dict):
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


def join(groups: dict[str, list[int]], rank: int, device: str) -> dict[str, Any]:
    """Process groups by the trace's names; one process alone has peers that torch's fake group plays."""
    world = len(groups[DEFAULT])
    if "WORLD_SIZE" not in os.environ and world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    elif int(os.environ.get("WORLD_SIZE", "1")) != world:
        raise Unusable(f"{world} ranks were traced: launch as many, or one without torchrun, with fake peers.")
    elif world > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=120))
    else:
        return {DEFAULT: None}
    every, mine = [*range(world)], {DEFAULT: dist.group.WORLD}
    for name, ranks in sorted(groups.items()):
        if ranks == every:
            mine[name] = dist.group.WORLD
        elif dist.get_rank() in ranks:
            mine[name] = dist.new_group(ranks, use_local_synchronization=True)
    return mine


class Bench:
    """The chosen calls of a workload, each bound to its operator, slots and constants."""

    def __init__(self, folder: Path, device: str, wanted: Callable[[int, list[str]], bool]) -> None:
        self.folder, self.device = folder, device
        own = folder / f"workload-{os.environ.get('RANK', '0')}.json"
        self.table = json.loads((own if own.exists() else folder / "workload.json").read_text())
        self.slots, self.memory = self.table["slots"], self.table["memory"]
        self.calls = [call for at, call in enumerate(self.table["calls"]) if wanted(at, self.path(call))]
        if not self.calls:
            raise Unusable("no call is chosen; workload.json lists operators in `ops` and parts in `scopes`.")
        self.values: list[Any] = [None] * len(self.slots)
        self.made = {slot for call in self.calls for slot in call["out"] if slot >= 0}
        self.last = {slot: at for at, call in enumerate(self.calls) for slot in slots_in([*call["in"].values()])}
        self.given = sorted(set(self.last) - self.made)
        self.stand_ins: Counter[tuple[str, str]] = Counter()
        self.groups = join(self.table["groups"], self.table["source"]["rank"], device)
        self.works: dict[int, Any] = {}

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
                fill(blocks[at].view(dtype_of(kind)), rule, self.folder / "indices.bin")
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

        if lists or moving or listed:
            return any_results
        target = kept[0][1] if kept else -1
        return one_result if kept else no_result

    def talk(self, at: int, call: dict[str, Any]) -> Run:
        """The function that issues a collective or a message, or waits for one."""
        what, said, values, works = self.table["ops"][call["op"]], call["comm"], self.values, self.works
        handle, (dead, _), group = said["handle"], self.ends(at, call), self.groups.get(said.get("group"))
        out, given = (getter([*slots_in(call["in"].get(side, []))]) for side in ("out", "given"))

        def start() -> None:
            works[handle] = issue(what, out(values), given(values), said, group)
            for slot in dead:
                values[slot] = None

        def wait() -> None:
            if (work := works.pop(handle, None)) is not None:
                work.wait()

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
        if any(slot in self.made and self.last[slot] < at for slot in slots):
            slots = []
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


def with_gaps(program: list[Run], gaps_ns: list[int]) -> list[Run]:
    """Calls that each begin so long after the last has ended, as the host's other work let them."""
    clock, ended = time.perf_counter_ns, [time.perf_counter_ns()]

    def later(run: Run, gap_ns: int) -> Run:
        def wait_and_run() -> None:
            until = ended[0] + gap_ns
            while clock() < until:
                pass
            run()
            ended[0] = clock()

        return wait_and_run

    return [later(run, gap_ns) for run, gap_ns in zip(program, gaps_ns, strict=True)]


def measure(program: list[Run], iterations: int, device: str, after: Callable[[], None]) -> list[tuple[int, int]]:
    """(wall_ns, cpu_ns) of each iteration; on a GPU by events on its stream, so that none waits for the last."""
    marks: list[tuple[Any, int]] = []
    for at in range(iterations + 1):
        if at:
            for run in program:
                run()
            after()
        mark: Any = time.perf_counter_ns()
        if device == "cuda":
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record()
        marks.append((mark, time.process_time_ns()))
    if device == "cuda":
        torch.cuda.synchronize()
        return [(round(a.elapsed_time(b) * 1e6), d - c) for (a, c), (b, d) in itertools.pairwise(marks)]
    return [(b - a, d - c) for (a, c), (b, d) in itertools.pairwise(marks)]


def profile(program: list[Run], device: str, path: Path) -> None:
    """Write a Kineto trace of three iterations."""
    from torch.profiler import ProfilerActivity, schedule
    from torch.profiler import profile as profiler

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    phases = schedule(wait=0, warmup=1, active=3, repeat=1)
    with profiler(activities=kinds, record_shapes=True, schedule=phases) as recorded:
        measure(program, 4, device, recorded.step)
    path.parent.mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(path))


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run the operators of a trace, on tensors of its shapes.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--iterations", type=int, default=10, metavar="N", help="timed ones (10)")
    parser.add_argument("--warmup", type=int, default=3, metavar="N", help="before them (3)")
    parser.add_argument("--profile", type=Path, metavar="OUT", help="a folder for step times and a Kineto trace")
    parser.add_argument("--gaps", choices=["none", "recorded"], default="none", help="between calls, on the host")
    parser.add_argument("--only", metavar="NAME", help="calls of this operator, or within what has NAME in its name")
    parser.add_argument("--range", default=":", metavar="FROM:TO", help="calls by their numbers")
    parser.add_argument("--threads", type=int, metavar="N", help="of each operator on a CPU (as traced, if known)")
    parser.add_argument("--part", choices=["all", "compute", "comm"], default="all")
    return parser.parse_args(argv)


def chosen(arguments: argparse.Namespace) -> Callable[[int, list[str]], bool]:
    """Whether a call, by its number and the names of what it is within, shall be made."""
    first, _, last = arguments.range.partition(":")
    start, end = int(first or 0), int(last) if last else sys.maxsize

    def wanted(at: int, path: list[str]) -> bool:
        within = arguments.only is None or any(arguments.only in name for name in path)
        talks = ("::" not in path[0] and bool(path[0])) or path[0].startswith("_c10d_functional")
        return start <= at < end and within and arguments.part in ("all", "comm" if talks else "compute")

    return wanted


def main(argv: Sequence[str] | None = None, folder: Path | None = None) -> list[tuple[int, int]]:
    """Run what the command line says; the times of the iterations, in ns."""
    arguments = arguments_of(argv)
    bench = Bench(folder or Path(__file__).parent, arguments.device, chosen(arguments))
    if threads := arguments.threads or bench.table["source"].get("threads"):
        torch.set_num_threads(threads)
    with torch.no_grad():
        bench.allocate()
        program = bench.bind()
        if arguments.gaps == "recorded":
            program = with_gaps(program, [call.get("gap_ns", 0) for call in bench.calls])
        measure(program, arguments.warmup, arguments.device, lambda: None)
        times = measure(program, arguments.iterations, arguments.device, lambda: None)
        if arguments.profile:
            profile(program, arguments.device, arguments.profile / "rank-0.json.gz")
            with (arguments.profile / "steps.csv").open("w", newline="") as file:
                csv.writer(file).writerows([("rank", "step", "wall_ns", "cpu_ns")])
                csv.writer(file).writerows((0, step, *both) for step, both in enumerate(times))
    for (name, reason), count in sorted(bench.stand_ins.items()):
        print(f"stand-in for {count} x {name}: {reason}")
    print(f"{len(program)} calls, {statistics.median(wall for wall, _ in times) / 1e6:.3f} ms an iteration (median)")
    return times


if __name__ == "__main__":
    try:
        main()
    except Unusable as error:
        sys.exit(f"bench.py: {error}")
