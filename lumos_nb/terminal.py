"""What the verbs of `lumos-nb` share: how one is added, progress on a terminal, runs read several files at a time."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lumos_nb as ln
from lumos_nb.errors import harmless

KEPT = "\n\t"
"""What of the characters that control a terminal is printed."""

Verb = Callable[[argparse.Namespace], str | tuple[str, int]]
"""Returns what is to be printed, with the exit code unless that is 0."""
AddVerb = Callable[[str, Verb, str, str], argparse.ArgumentParser]
"""Name, function, what it gives and examples of a verb -> its parser."""


class Verbs:
    """The verbs of a parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.verbs = parser.add_subparsers(required=True, metavar="VERB")

    def group(self, name: str, what: str, examples: str) -> Verbs:
        """Add a verb that has verbs of its own, and return these."""
        return Verbs(self._parser(name, what, examples))

    def add(self, name: str, run: Verb, what: str, examples: str) -> argparse.ArgumentParser:
        """Add a verb and return its parser, for what it takes."""
        added = self._parser(name, what, examples)
        added.set_defaults(verb=run)
        added.add_argument("--json", action="store_true", help="print JSON, times in ns")
        return added

    def _parser(self, name: str, what: str, examples: str) -> argparse.ArgumentParser:
        form = argparse.RawDescriptionHelpFormatter
        return self.verbs.add_parser(name, help=what, description=what, epilog=examples, formatter_class=form)


def reads_runs(*parsers: argparse.ArgumentParser) -> None:
    """Let verbs that `load` runs say how many files are read at a time."""
    for parser in parsers:
        parser.add_argument("-j", "--jobs", type=count, default=1, metavar="N", help="read N files at a time (1)")


def count(text: str) -> int:
    """A number of files, from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of files: give 1 or more")
    return int(text)


def as_json(rows: object) -> str:
    """Rows as JSON text, in ASCII: no name in it can steer a terminal."""
    return json.dumps(rows, indent=1, allow_nan=False)


def written_files(arguments: argparse.Namespace, written: Sequence[Path], said: object = "") -> str:
    """What was said of files, and which were written into `arguments.out`; or these as JSON."""
    names = [path.name for path in written]
    if arguments.json:
        return as_json({"written": [str(path) for path in written]})
    middle = [f"... ({len(names) - 4} more)"] if len(names) > 6 else names[2:-2]
    where = f"In {arguments.out}: {', '.join([*names[:2], *middle, *names[2:][-2:]])}"
    return f"{said}\n\n{where}" if said else where


def print_whole(text: str) -> None:
    """All of a report at once, without what steers a terminal; what its encoding lacks becomes a question mark."""
    if sys.stdout is None:  # closed before the start
        raise OSError("standard output is closed; the report has no place to go")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(f"{harmless(text, KEPT)}\n")
        sys.stdout.flush()
    except OSError:  # or Python tries once more when it ends, and says so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def tell(text: str) -> None:
    """Write to standard error, on a terminal in the place of what was being done; nowhere where it is closed."""
    if sys.stderr is None:
        return
    shown = harmless(text, KEPT)
    sys.stderr.write(f"\r\x1b[K{shown}" if sys.stderr.isatty() else shown)
    sys.stderr.flush()


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is being done and since when; nothing elsewhere."""
    began = time.monotonic()

    def say(doing: str) -> None:
        if sys.stderr and sys.stderr.isatty():
            tell(f"[{time.monotonic() - began:5.1f} s] {doing} …")

    try:
        yield say
    finally:
        tell("")


class _Told(Executor):
    """Reads one file after the other, or as many at once as a pool does, and tells how many are done."""

    def __init__(self, jobs: int, say: Callable[[str], None]) -> None:
        self.jobs, self.say = jobs, say

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_options: Any) -> Iterator[Any]:
        """As `Executor.map`, of one iterable."""
        files: list[Any] = list(*iterables)
        with _pool(min(self.jobs, len(files))) as pool:  # which starts all of its workers, needed or not
            for done, outcome in enumerate((pool.map if pool else map)(fn, files)):
                self.say(f"read {done + 1} of {len(files)} files")
                yield outcome


def load(path: str, jobs: int, say: Callable[[str], None]) -> ln.Run:
    """A run, with progress told file by file."""
    say(f"reading {path}")
    return ln.load_run(path, executor=_Told(jobs, say))


def _pool(jobs: int) -> AbstractContextManager[Executor | None]:
    if jobs < 2:
        return nullcontext()
    spawn = multiprocessing.get_context("spawn")
    ignore = (signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C this process hears, and tells its workers to stop
    return ProcessPoolExecutor(jobs, mp_context=spawn, initializer=signal.signal, initargs=ignore)
