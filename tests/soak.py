"""Damaged files before every reader: a result or one of our own errors, in bounded time and memory, and nothing left.

`make soak` puts 100,000 files before each reader of `tests.soak_readers`, goes on where it was ended with the readers
whose modules have not changed since, and writes what came of them to `benchmarks/results.json`, with a hash of the
sources that they are of: what is there of these sources is not done again. `python -m tests.soak
--reader "Kineto JSON" --inputs 2000` puts some before one; `--show 1234` writes a file to standard output and says what
comes of it.

File i of a reader is always the same for one `--seed`. Files are read in processes of their own (`serve`), which are
watched: one that dies, or takes longer than `MOST_S` for a file, is ended, the file named, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "soak"
MOST_S, MOST_WALL_S = 10, 300
"""Of one file: processor time, and time on the clock of a machine that may be busy."""

MOST_MIB, MOST_TIMES = 384, 64
"""Memory that a file may take beyond what the reader took for sound ones, and so many times its size more."""

UNPACKED_BYTES = 4 << 20
"""`LUMOS_NB_MAX_BYTES` of the processes: the bombs of `tests.mutations`, of 8 MiB, are refused."""

ADDRESSES = 6 << 30
"""More than these a process does not get beyond what it has when a reader begins: what takes all memory dies alone."""

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A folder in memory, where there is one: files are synced to the disk, which takes longer than they do."""

CHUNK, INPUTS, SEED, BY_HAND = 2_000, 100_000, 0, -1
_NONE = 2**64 - 1
"""In place of the number of the file that is read: none yet."""

OUTCOMES = ("accepted", "repaired", "refused")
Counts = dict[str, Any]


# --- in a process of its own --------------------------------------------------------------------------------------


def damaged(name: str, seed: int, i: int) -> tuple[str, bytes]:
    """The name and bytes of file `i` of a reader; of `BY_HAND`, one of `extremes`."""
    from tests.soak_extremes import extremes

    reader, noise = _reader(name), Random(f"{name} {seed} {i}")
    if seed == BY_HAND:
        return reader.file or min(_seeds(name)), extremes(name)[i]
    what = noise.choice(sorted(_seeds(name)))
    return reader.file or what, reader.mutate(_seeds(name)[what], noise)


def _reader(name: str) -> Any:
    from tests.soak_readers import FAULTY, READERS

    return READERS.get(name) or FAULTY[name][0]


@cache
def _seeds(name: str) -> dict[str, bytes]:
    return dict(_reader(name).seeds())


class Bench:
    """A folder in which one reader after another reads files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self.temporary = folder / "run", folder / "cache", folder / "temporary"
        for each in (self.folder, self.cache, self.temporary):
            each.mkdir()
        os.environ |= {"LUMOS_NB_CACHE": str(self.cache), "LUMOS_NB_MAX_BYTES": str(UNPACKED_BYTES)}
        tempfile.tempdir = str(self.temporary)
        self.sound: dict[str, object] = {}

    def start(self, name: str) -> None:
        """Read the sound files of a reader, which it must accept."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        reader = _reader(name)
        if not reader.file:
            for file, data in _seeds(name).items():
                (self.folder / file).parent.mkdir(exist_ok=True)
                (self.folder / file).write_bytes(data)
        self.sound = {}
        for what, data in _seeds(name).items():
            path = self.folder / (reader.file or what)
            path.write_bytes(data)
            self.sound[what] = reader.read(path)
            self.tidied(name, path)

    def outcome(self, name: str, file: str, data: bytes) -> str:
        """One of `OUTCOMES`, or why it is none."""
        from tests.soak_readers import escape_of

        path = self.folder / file
        path.write_bytes(data)
        try:
            said = _reader(name).read(path)
            what = "accepted" if said in self.sound.values() else "repaired"
        except BaseException as error:  # a panic of polars is no Exception
            what = escape_of(error, _reader(name), path) or "refused"
            if what not in OUTCOMES:
                what += "\n" + "".join(traceback.format_exception(error)[-3:])
        return self.tidied(name, path) or what

    def tidied(self, name: str, path: Path) -> str:
        """Put the folders in order; says what of a file or an archive was left there."""
        if _reader(name).file:
            path.unlink(missing_ok=True)
            expected: set[str] = set()
        else:
            path.write_bytes(_seeds(name)[str(path.relative_to(self.folder))])
            expected = {file.partition("/")[0] for file in _seeds(name)}
        left = [*set(os.listdir(self.folder)) - expected, *os.listdir(self.temporary)]
        for entry in os.scandir(self.cache):
            left += [entry.name] * (not entry.name.endswith(".parquet") or entry.name.startswith("."))
            os.unlink(entry)
        for each in set(os.listdir(self.folder)) - expected:
            (self.folder / each).unlink()
        return f"left behind: {left}" if left else ""


def counted(bench: Bench, name: str, seed: int, inputs: range, at: mmap.mmap) -> Counts:
    """What came of these files; which one is being read stands in `at`."""
    found, escapes, slowest_s, peak_mib = Counter[str](), [], 0.0, 0.0
    bench.start(name)
    damaged(name, seed, inputs.start)  # what is made once is none of the files'
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + ADDRESSES, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before_mib = _peak_mib()
    for i in inputs:
        file, data = damaged(name, seed, i)
        at[:8] = i.to_bytes(8, "little")
        begun = time.process_time()
        what = bench.outcome(name, file, data)
        took_s = time.process_time() - begun
        slowest_s = max(slowest_s, took_s)
        grown_mib = _peak_mib() - before_mib
        if took_s > MOST_S:
            what = f"it took {took_s:.1f} s"
        elif grown_mib > MOST_MIB + MOST_TIMES * len(data) / 2**20:
            what = f"it took {grown_mib:.0f} MiB"
            Path("/proc/self/clear_refs").write_text("5")
        peak_mib = max(peak_mib, grown_mib)
        found[what if what in OUTCOMES else "escapes"] += 1
        if what not in OUTCOMES:
            escapes.append((i, what))
    return {"inputs": len(inputs), **found, "which": escapes, "slowest_s": slowest_s, "peak_mib": peak_mib}


def _peak_mib() -> float:
    """The most memory since `clear_refs`; `ru_maxrss` would begin with that of the process which started this one."""
    said = Path("/proc/self/status").read_text().partition("VmHWM:")[2]
    return int(said.split()[0]) / 1024


def serve() -> None:
    """Take (reader, seed, from, to) a line, give counts a line."""
    warnings.simplefilter("error")
    import tests.soak_readers  # noqa: F401

    own = os.dup(1)
    os.dup2(2, 1)  # what a reader prints is no answer
    with (
        os.fdopen(own, "w") as answers,
        tempfile.TemporaryDirectory(prefix="soak-", dir=MEMORY) as folder,
        open(sys.argv[2], "r+b") as shared,
    ):
        bench, at = Bench(Path(folder)), mmap.mmap(shared.fileno(), 8)
        for line in sys.stdin:
            name, seed, begin, end = json.loads(line)
            answers.write(json.dumps(counted(bench, name, seed, range(begin, end), at)) + "\n")
            answers.flush()


# --- from outside -------------------------------------------------------------------------------------------------


class Process:
    """A process that serves, and is started again when it has died."""

    def __init__(self, most_s: float = 3 * MOST_S, most_wall_s: float = MOST_WALL_S) -> None:
        self.most_s, self.most_wall_s = most_s, most_wall_s
        self.at = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._begin()
        self.child: subprocess.Popen[bytes] | None = None

    def counts(self, name: str, seed: int, begin: int, end: int) -> Counts:
        """What came of these files; RuntimeError if none of a reader's files can be read."""
        if begin >= end:
            return {"inputs": 0}
        if not self.child or self.child.poll() is not None:
            self._end()
            self.child = self._started()
        child = self.child
        assert child.stdin
        assert child.stdout
        self._begin()
        child.stdin.write(json.dumps([name, seed, begin, end]).encode() + b"\n")
        child.stdin.flush()
        told: list[bytes] = []
        waiting = threading.Thread(target=lambda: told.append(child.stdout.readline()), daemon=True)
        waiting.start()
        why = self._watched(child, waiting)
        if told[0]:
            counts: Counts = json.loads(told[0])
            return counts
        why = why or f"the process died: {child.wait(MOST_WALL_S)}"
        which = self._which()
        if not begin <= which < end:
            raise RuntimeError(f"{name}: the process ended before any file: {why}")
        escape = {"inputs": 1, "escapes": 1, "which": [(which, why)]}
        return merged([self.counts(name, seed, begin, which), escape, self.counts(name, seed, which + 1, end)])

    def _watched(self, child: subprocess.Popen[bytes], waiting: threading.Thread) -> str:
        """Wait for the answer of a process, or its end; it is ended if it reads one file too long, with the reason."""
        which, since, cpu_s = _NONE, time.monotonic(), 0.0
        while waiting.is_alive():
            waiting.join(0.5)
            if self._which() != which:
                which, since, cpu_s = self._which(), time.monotonic(), _cpu_s(child.pid)
            elif which == _NONE and time.monotonic() - since < MOST_WALL_S:
                continue  # it imports, and reads sound files
            elif (took_s := _cpu_s(child.pid) - cpu_s) > self.most_s or time.monotonic() - since > self.most_wall_s:
                child.kill()
                child.wait()  # or it would be taken for one that lives
                waiting.join()
                return f"it had not ended after {took_s:.0f} s of processor time"
        return ""

    def _begin(self) -> None:
        self.at.seek(0)
        self.at.write(_NONE.to_bytes(8, "little"))
        self.at.flush()

    def _which(self) -> int:
        return int.from_bytes(Path(self.at.name).read_bytes(), "little")

    def _started(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        command = [sys.executable, "-m", "tests.soak", "serve", self.at.name]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT)

    def _end(self) -> None:
        if self.child:
            assert self.child.stdin
            assert self.child.stdout
            with suppress(BrokenPipeError):
                self.child.stdin.close()
            self.child.wait(MOST_WALL_S)
            self.child.stdout.close()

    def close(self) -> None:
        """End the process."""
        self._end()
        self.at.close()


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def merged(parts: list[Counts]) -> Counts:
    """The counts of several parts together."""
    together: Counts = {what: sum(part.get(what, 0) for part in parts) for what in ("inputs", *OUTCOMES, "escapes")}
    together["which"] = [escape for part in parts for escape in part.get("which", [])]
    return together | {what: max((p.get(what, 0.0) for p in parts), default=0.0) for what in ("slowest_s", "peak_mib")}


def _most(name: str, inputs: int) -> int:
    return max(1, inputs // int(_reader(name).every))


class Tally:
    """Counts by reader, kept on disk a chunk at a time, so that what was ended goes on while its modules stay."""

    def __init__(self, names: list[str], seed: int, inputs: int) -> None:
        from tests.soak_rows import sources

        self.file, self.seed, self.lock = KEPT / f"{seed}.json", seed, threading.Lock()
        KEPT.mkdir(parents=True, exist_ok=True)
        self.kept: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.tasks: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        for name in names:
            of = sources(name)
            if self.kept.get(name, {}).get("sources") != of:
                self.kept[name] = {"sources": of, "chunks": {}}
            most = _most(name, inputs)
            for begin in range(0, most, CHUNK):
                end = min(begin + CHUNK, most)
                if self.kept[name]["chunks"].get(str(begin), {}).get("inputs") != end - begin:
                    self.tasks.put((name, begin, end))

    def work(self) -> None:
        """Take one chunk after another."""
        process = Process()
        while not self.tasks.empty():
            try:
                name, begin, end = self.tasks.get_nowait()
            except queue.Empty:
                break
            counts = process.counts(name, self.seed, begin, end)
            with self.lock:
                self.kept[name]["chunks"][str(begin)] = counts
                part = self.file.with_suffix(".part")
                part.write_text(json.dumps(self.kept))
                part.replace(self.file)
                for which, why in counts["which"]:
                    say(f"{name}: {which}: {why}")
        process.close()

    def counts(self, name: str) -> Counts:
        """Of a reader."""
        return merged(list(self.kept[name]["chunks"].values()))


def say(*texts: str) -> None:
    sys.stdout.write("".join(text + "\n" for text in texts))
    sys.stdout.flush()


HEADS = ("reader", "inputs", *OUTCOMES, "escapes", "slowest ms", "peak MiB")


def lines(tally: Tally, names: list[str]) -> Iterator[str]:
    """A table of what came of the files."""
    yield f"{HEADS[0]:28}" + "".join(f"{head:>12}" for head in HEADS[1:])
    for name in names:
        counts = tally.counts(name)
        cells = [*(counts[what] for what in ("inputs", *OUTCOMES, "escapes")), counts["slowest_s"] * 1e3]
        yield f"{name:28}" + "".join(f"{cell:12,.0f}" for cell in [*cells, counts["peak_mib"]])


def show(name: str, seed: int, i: int) -> None:
    """Write file `i` of a reader to standard output, and what comes of it to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        bench.start(name)
        file, data = damaged(name, seed, i)
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        sys.stderr.write(f"\n{file}: {bench.outcome(name, file, data)}\n")


def main(argv: list[str]) -> int:
    """See the module; 1 if anything escaped."""
    from tests.soak_readers import READERS
    from tests.soak_rows import record_counts, recorded

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reader", action="append", choices=READERS, help="one of them (all)")
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="write the counts to benchmarks/results.json")
    parser.add_argument("--show", type=int, metavar="I", help="one input of one reader")
    given = parser.parse_args(argv)
    names = given.reader or [*READERS]
    if given.show is not None:
        show(names[0], given.seed, given.show)
        return 0
    begun = time.monotonic()
    if given.record:
        done = recorded({name: _most(name, given.inputs) for name in names})
        say(f"{len(done)} of {len(names)} readers are recorded of the same sources")
        names = [name for name in names if name not in done]
    tally = Tally(names, given.seed, given.inputs)
    workers = [threading.Thread(target=tally.work) for _ in range(given.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    say(*lines(tally, names), f"{(time.monotonic() - begun) / 60:.1f} minutes")
    if given.record:
        record_counts({name: tally.counts(name) for name in names}, OUTCOMES)
    return int(any(tally.counts(name)["escapes"] for name in names))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    else:
        sys.exit(main(sys.argv[1:]))
