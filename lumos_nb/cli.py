"""The command `lumos-nb`: thin verbs over the package's functions.

Results go to standard output, all of a report or nothing; what is being done goes to standard error where that is a
terminal. Exit codes: 0 done; 1 an error of the package or the system, told in a line, or findings of a check; 2 wrong
usage; 130 interrupted; 141 nobody reads the output any more.
"""

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
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

import lumos_nb as ln
from lumos_nb.display import text_table
from lumos_nb.errors import LumosError
from lumos_nb.exchange import chakra

_AS_WRITTEN = argparse.RawDescriptionHelpFormatter
REPLAY = """
examples:
  lumos-nb replay runs/gpt                            a folder with a trace of each rank
  lumos-nb replay trace.json.gz --step 5 --out out    one rank; also Parquet, HTML and Perfetto files
  lumos-nb replay runs/gpt --scale comm=0.5 --out p   a what-if, kept in p/prediction.json to be checked later
  lumos-nb replay runs/gpt --json | jq .breakdown     for other programs; times are in ns
"""
COMPARE = """
examples:
  lumos-nb compare runs/monday runs/tuesday           their steps of median length
  lumos-nb compare runs/gpt runs/gpt --steps 3 8      two steps of one run
"""
CHECK = """
examples:
  lumos-nb replay runs/base --scale comm=0.5 --out p              say what will be
  lumos-nb check p/prediction.json runs/faster --ledger l.jsonl   see what is, and keep the score
"""

CHAKRA = """
examples:
  lumos-nb chakra link rank-0.et.json.gz rank-0.json.gz    one VERB of several; each has examples in its own --help
"""
CONVERT = """
examples:
  lumos-nb chakra convert runs/gpt out                        out/chakra.<rank>.et and out/chakra.groups.json
  lumos-nb chakra convert runs/gpt out --target astra-sim     refuses what that simulator would get wrong
  lumos-nb chakra convert rank-0.json.gz out --execution-trace rank-0.et.json.gz
"""
VALIDATE = """
examples:
  lumos-nb chakra validate out                                exit code 1 if anything is found
  lumos-nb chakra validate out --target astra-sim --json      also what that simulator would get wrong
"""
OBFUSCATE = """
examples:
  lumos-nb chakra obfuscate out public                        nothing but structure, communication and times
  lumos-nb chakra obfuscate out public --shapes bucketed --scale secret --jitter 0.05
"""
CHAKRA_JSON = """
examples:
  lumos-nb chakra json out/chakra.0.et nodes.jsonl            a node a line; .json for one document; .gz to compress
  lumos-nb chakra json nodes.jsonl again.0.et                 and back
"""
VIEW = """
examples:
  lumos-nb chakra view out job.json.gz                        for ui.perfetto.dev: as recorded, and as replayed
  lumos-nb chakra view out/chakra.0.et rank-0.json.gz         one rank
"""
LINK = """
examples:
  lumos-nb chakra link rank-0.et.json.gz rank-0.json.gz    which ops and kernels are whose, and how many are nobody's
  lumos-nb chakra link runs/gpt runs/gpt --rank 1 --out o  also o/nodes.parquet, o/device.parquet, o/unlinked.parquet
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code.

    Examples
    --------
    >>> main(["replay", "runs/gpt", "--step", "5"])  # doctest: +SKIP
    """
    arguments = _parser().parse_args(argv)
    try:
        said = arguments.verb(arguments)
        text, code = said if isinstance(said, tuple) else (said, 0)
        _print(text)
    except BrokenPipeError:  # a reader such as head has enough
        return 141
    except (LumosError, OSError, ImportError) as error:
        _tell(f"lumos-nb: {error}\n")
        return 1
    except KeyboardInterrupt:  # polars raises one and Python another, so that what is to be done on leaving may not be
        _tell("lumos-nb: interrupted\n")
        return 130
    return int(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lumos-nb",
        description="Why a training step takes as long as it does, from profiler traces.",
        epilog="`lumos-nb VERB --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=f"lumos-nb {version('lumos-nb')}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_step_verbs(partial(_verb, verbs))
    what = "Chakra and PyTorch execution traces"
    added = verbs.add_parser("chakra", help=what, description=what, epilog=CHAKRA, formatter_class=_AS_WRITTEN)
    _add_chakra_verbs(partial(_verb, added.add_subparsers(required=True, metavar="VERB")))
    return parser


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], str | tuple[str, int]], what: str, epilog: str
) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = verbs.add_parser(
        name, help=what, description=what, epilog=epilog, formatter_class=_AS_WRITTEN
    )
    added.set_defaults(verb=run)
    added.add_argument("--json", action="store_true", help="print JSON, times in ns")
    added.add_argument("-j", "--jobs", type=_count, default=1, metavar="N", help="read N files at a time (1)")
    return added


def _add_step_verbs(verb: Callable[..., argparse.ArgumentParser]) -> None:
    replay = verb("replay", _replay, "where a step's time goes, what it hangs on, what could be otherwise", REPLAY)
    replay.add_argument("run", metavar="RUN", help="a folder of traces, one file a rank, or one file")
    replay.add_argument("--step", type=int, metavar="N", help="as the profiler counts; else the one of median length")
    replay.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write ops.parquet, edges.parquet, report.html, step.perfetto.json.gz and prediction.json there",
    )
    replay.add_argument(
        "--scale",
        type=_scale,
        action="append",
        default=[],
        metavar="KIND=X",
        help="what if ops of this kind took X times as long; may be repeated",
    )
    replay.add_argument(
        "--predict",
        type=int,
        default=3,
        metavar="N",
        help="predict N steps from one another (3), which takes N * N graphs; 0: none",
    )
    compare = verb("compare", _compare, "what changed between two runs; adds up to the difference", COMPARE)
    compare.add_argument("a", metavar="A")
    compare.add_argument("b", metavar="B")
    compare.add_argument("--steps", type=int, nargs=2, default=(None, None), metavar=("N", "M"), help="a step of each")
    check = verb("check", _check, "hold a saved prediction against a run made afterwards", CHECK)
    check.add_argument("prediction", metavar="PREDICTION", help="prediction.json, as `replay --out` wrote it")
    check.add_argument("run", metavar="RUN")
    check.add_argument("--ledger", metavar="FILE", help="add the outcome to this file of JSON lines")


def _add_chakra_verbs(verb: Callable[..., argparse.ArgumentParser]) -> None:
    link = verb("link", _link, "an execution trace joined with a profile: times, device work, what is linked", LINK)
    link.add_argument("execution_trace", metavar="ET", help="a file, or a folder or archive with one a rank")
    link.add_argument("run", metavar="RUN", help="a Kineto trace of the same program, or a folder of them")
    link.add_argument("--rank", type=int, metavar="N", help="which rank, where there are several")
    link.add_argument("--out", type=Path, metavar="DIR", help="write every table there as Parquet")
    convert = verb("convert", _convert, "a step of a run as Chakra files, one a rank", CONVERT)
    convert.add_argument("run", metavar="RUN", help="a folder of traces, one file a rank, or one file")
    convert.add_argument("out", metavar="DIR", type=Path)
    convert.add_argument("--step", type=int, metavar="N", help="as the profiler counts; else the one of median length")
    convert.add_argument("--execution-trace", metavar="ET", help="the call tree of this, with the times of the run")
    validate = verb("validate", _validate, "what is wrong with a job's Chakra files", VALIDATE)
    validate.add_argument("path", metavar="PATH", help="a folder of files, one a rank, or one file")
    for one in (convert, validate):
        one.add_argument("--target", choices=["astra-sim"], help="a simulator that must run them")
    obfuscate = verb("obfuscate", _obfuscate, "Chakra files without what they say of their maker", OBFUSCATE)
    obfuscate.add_argument("path", metavar="PATH", help="a folder of files, one a rank, or one file")
    obfuscate.add_argument("out", metavar="DIR", type=Path)
    obfuscate.add_argument("--names", choices=["numbered", "kept"], default="numbered")
    obfuscate.add_argument("--scopes", choices=["hidden", "kept"], default="hidden")
    obfuscate.add_argument("--shapes", choices=["hidden", "bucketed", "exact"], default="hidden")
    obfuscate.add_argument(
        "--scale", type=_time_scale, default=1.0, metavar="X", help="all times by X, or 'secret' (1)"
    )
    obfuscate.add_argument("--jitter", type=float, default=0.0, metavar="SHARE", help="each off by so much at most (0)")
    text = verb("json", _chakra_json, "a Chakra file as JSON, or JSON as a Chakra file", CHAKRA_JSON)
    text.add_argument("path", metavar="FROM", help=".et, .json or .jsonl, perhaps with .gz")
    text.add_argument("out", metavar="TO", help="likewise")
    view = verb("view", _view, "Chakra files for ui.perfetto.dev", VIEW)
    view.add_argument("path", metavar="PATH", help="a folder of files, one a rank, or one file")
    view.add_argument("out", metavar="FILE", help="*.json or *.json.gz")


def _time_scale(text: str) -> float | None:
    return None if text == "secret" else float(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of files: give 1 or more")
    return int(text)


def _scale(text: str) -> tuple[str, float]:
    name, _, scale = text.rpartition("=")
    try:
        return name, float(scale)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no KIND=X, such as comm=0.5") from None


def _replay(arguments: argparse.Namespace) -> str:
    from lumos_nb.graph import Recording
    from lumos_nb.report import step_report, write_report

    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)  # before the work, that it be not for nothing
    with _progress() as say:
        run = _load(arguments.run, arguments.jobs, say)
        say("putting ranks on one clock")
        recording = Recording.of(run)
        if len(scales := dict(arguments.scale)) < len(arguments.scale):
            raise LumosError("--scale names a kind twice; give each one factor.")
        report = step_report(
            run, arguments.step, predict=arguments.predict, scales=scales, recording=recording, progress=say
        )
        written: list[Path] = []
        if arguments.out:
            say("writing")
            written = write_report(report, arguments.out, run=run)
            written.append(arguments.out / "prediction.json")
            said = ln.save_prediction(written[-1], run, **report.claim, recording=recording)
    if arguments.json:
        return _json(report.rows() | {"written": [str(path) for path in written]})
    names = ", ".join(path.name for path in written)
    return f"{report}\n\nPREDICTION\n{said}\n\nIn {arguments.out}: {names}" if written else str(report)


def _compare(arguments: argparse.Namespace) -> str:
    from lumos_nb.graph import Recording
    from lumos_nb.report import comparison_report

    with _progress() as say:
        paths = arguments.a, arguments.b
        found = {path: Recording.of(_load(path, arguments.jobs, say)) for path in dict.fromkeys(paths)}
        say("comparing")
        report = comparison_report(found[arguments.a], found[arguments.b], arguments.steps, names=paths)
    return _json(report.rows()) if arguments.json else str(report)


def _check(arguments: argparse.Namespace) -> str:
    from lumos_nb.ledger import load_prediction

    said = load_prediction(arguments.prediction)
    with _progress() as say:
        outcome = ln.check_prediction(said, _load(arguments.run, arguments.jobs, say), ledger=arguments.ledger)
    return msgspec.json.format(msgspec.json.encode(outcome)).decode() if arguments.json else str(outcome)


def _link(arguments: argparse.Namespace) -> str:
    from lumos_nb.exchange.chakra.linking import link

    with _progress() as say:
        run = _load(arguments.run, arguments.jobs, say)
        say(f"reading {arguments.execution_trace}")
        trace = ln.load_execution_trace(arguments.execution_trace, rank=arguments.rank)
        say(f"linking {len(trace.nodes):,} nodes")
        linked = link(trace, run, rank=arguments.rank)
        written = linked.to_parquet(arguments.out) if arguments.out else None
    if arguments.json:
        return _json({"report": linked.report.to_dicts(), "unlinked": linked.unlinked.to_dicts()})
    missing = text_table(linked.unlinked, caption="Not linked") if len(linked.unlinked) else "Nothing is left out."
    return f"{linked}\n\n{missing}" + (f"\n\nTables are in {written}." if written else "")


def _convert(arguments: argparse.Namespace) -> str:
    with _progress() as say:
        run = _load(arguments.run, arguments.jobs, say)
        if arguments.execution_trace:
            say(f"linking {arguments.execution_trace}")
            linked = chakra.link(arguments.execution_trace, run)
            written = chakra.write_ranks([(linked.rank, chakra.from_linked(linked))], arguments.out, "chakra", {})
        else:
            say("building the graph")
            graph = ln.build_graph(run, arguments.step)
            say("writing")
            written = chakra.write(graph, arguments.out, target=arguments.target)
    return _json({"written": [str(path) for path in written]}) if arguments.json else _names(arguments.out, written)


def _names(folder: Path, written: Sequence[Path]) -> str:
    names = [path.name for path in written]
    middle = [f"... ({len(names) - 4} more)"] if len(names) > 6 else names[2:-2]
    return f"In {folder}: {', '.join([*names[:2], *middle, *names[2:][-2:]])}"


def _validate(arguments: argparse.Namespace) -> tuple[str, int]:
    with _progress() as say:
        say(f"checking {arguments.path}")
        found = chakra.validate(arguments.path, arguments.target)
    if arguments.json:
        return _json({"findings": found.to_dicts()}), int(len(found) > 0)
    if found.is_empty():
        return f"{arguments.path}: nothing found", 0
    counts = found["rule"].value_counts(sort=True).iter_rows()
    told = ", ".join(f"{count:,} {rule}" for rule, count in counts)
    return text_table(found, caption=f"{arguments.path}: {len(found):,} findings ({told})"), 1


def _obfuscate(arguments: argparse.Namespace) -> str:
    policy = chakra.Policy(
        names=arguments.names, scopes=arguments.scopes, shapes=arguments.shapes,
        time_scale=arguments.scale, time_jitter=arguments.jitter,
    )  # fmt: skip
    with _progress() as say:
        say(f"obfuscating {arguments.path}")
        found = chakra.obfuscate(arguments.path, policy)
        written = found.write(arguments.out)
    return (
        _json({"report": found.report.to_dicts()}) if arguments.json else f"{found}\n\n{_names(arguments.out, written)}"
    )


def _chakra_json(arguments: argparse.Namespace) -> str:
    with _progress() as say:
        say(f"reading {arguments.path}")
        nodes = chakra.read_file(arguments.path)
        say(f"writing {len(nodes.table):,} nodes")
        written = chakra.write_file(nodes, arguments.out)
    return _json({"written": str(written), "nodes": len(nodes.table)}) if arguments.json else f"{nodes}\n\nIn {written}"


def _view(arguments: argparse.Namespace) -> str:
    with _progress() as say:
        say(f"reading {arguments.path}")
        graph = chakra.to_graph(arguments.path)
        say("replaying")
        result = ln.replay(graph)
        written = ln.write_perfetto(result, arguments.out)
    return _json({"written": str(written)}) if arguments.json else f"{result}\n\nIn {written}, for ui.perfetto.dev"


def _json(rows: object) -> str:
    return json.dumps(rows, indent=1, ensure_ascii=False, allow_nan=False)


def _print(text: str) -> None:
    """All of a report at once; what the terminal's encoding lacks becomes a question mark."""
    if sys.stdout is None:  # closed before the start
        raise OSError("standard output is closed; the report has no place to go")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError:  # or Python tries once more when it ends, and says so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _tell(text: str) -> None:
    """Write to standard error, on a terminal in the place of what was being done; nowhere where it is closed."""
    if sys.stderr is None:
        return
    sys.stderr.write(f"\r\x1b[K{text}" if sys.stderr.isatty() else text)
    sys.stderr.flush()


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is being done and since when; nothing elsewhere."""
    began = time.monotonic()

    def say(doing: str) -> None:
        if sys.stderr and sys.stderr.isatty():
            _tell(f"[{time.monotonic() - began:5.1f} s] {doing} …")

    try:
        yield say
    finally:
        _tell("")


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


def _load(path: str, jobs: int, say: Callable[[str], None]) -> ln.Run:
    say(f"reading {path}")
    return ln.load_run(path, executor=_Told(jobs, say))


def _pool(jobs: int) -> AbstractContextManager[Executor | None]:
    if jobs < 2:
        return nullcontext()
    spawn = multiprocessing.get_context("spawn")
    ignore = (signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C this process hears, and tells its workers to stop
    return ProcessPoolExecutor(jobs, mp_context=spawn, initializer=signal.signal, initargs=ignore)
