"""The command `lumos-nb`: thin verbs over the package's functions.

Results go to standard output, all of a report or nothing; what is being done goes to standard error where that is a
terminal. Exit codes: 0 done; 1 an error of the package or the system, told in a line, or findings of a check; 2 wrong
usage; 130 interrupted; 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

import lumos_nb as ln
from lumos_nb import benchmark_cli, chakra_cli
from lumos_nb.errors import LumosError, folder_for
from lumos_nb.terminal import AddVerb, Verbs, as_json, load, print_whole, progress, reads_runs, tell

REPLAY = """
examples:
  lumos-nb replay runs/gpt                            a folder with a trace of each rank
  lumos-nb replay trace.json.gz --step 5 --out out    one rank; also Parquet, HTML and Perfetto files
  lumos-nb replay runs/gpt --scale comm=0.5 --out p   a what-if, kept in p/prediction.json to be checked later
  lumos-nb replay runs/gpt --json | jq .breakdown     for other programs; times are in ns
"""
DEMO = """
examples:
  lumos-nb demo                                       two CPU ranks, of which one is delayed on purpose
  lumos-nb demo gpt-pp --out out                      another run that comes with the package; also files
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
BENCHMARK = """
examples:
  lumos-nb benchmark generate runs/gpt bench/gpt           one VERB of several; each has examples in its own --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code.

    Examples
    --------
    >>> main(["replay", "runs/gpt", "--step", "5", "--predict", "0"])
    Step 5 of gpt, 2 ranks
    ...
    0
    """
    arguments = _parser().parse_args(argv)
    try:
        said = arguments.verb(arguments)
        text, code = said if isinstance(said, tuple) else (said, 0)
        print_whole(text)
    except BrokenPipeError:  # a reader such as head has enough
        return 141
    except (LumosError, OSError, ImportError) as error:
        tell(f"lumos-nb: {error}\n")
        return 1
    except KeyboardInterrupt:  # polars raises one and Python another, so that what is to be done on leaving may not be
        tell("lumos-nb: interrupted\n")
        return 130
    return int(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lumos-nb",
        description="Why a training step takes as long as it does, from profiler traces.",
        epilog="`lumos-nb VERB --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=f"lumos-nb {version('lumos-nb')}")
    verbs = Verbs(parser)
    _add_step_verbs(verbs.add)
    chakra_cli.add_verbs(verbs.group("chakra", "Chakra and PyTorch execution traces", CHAKRA))
    benchmark_cli.add_verbs(verbs.group("benchmark", "programs from execution traces", BENCHMARK).add)
    return parser


def _add_step_verbs(verb: AddVerb) -> None:
    replay = verb("replay", _replay, "where a step's time goes, what it hangs on, what could be otherwise", REPLAY)
    replay.add_argument("run", metavar="RUN", help="a folder of traces, one file a rank, or one file")
    demo = verb("demo", _demo, "`replay` of a run that comes with the package", DEMO)
    demo.add_argument("name", nargs="?", default="gpt-ddp-delay", metavar="NAME", help="gpt-ddp-delay unless given")
    for parser in (replay, demo):
        _add_replay_options(parser)
    compare = verb("compare", _compare, "what changed between two runs; adds up to the difference", COMPARE)
    compare.add_argument("a", metavar="A")
    compare.add_argument("b", metavar="B")
    compare.add_argument("--steps", type=int, nargs=2, default=(None, None), metavar=("N", "M"), help="a step of each")
    check = verb("check", _check, "hold a saved prediction against a run made afterwards", CHECK)
    check.add_argument("prediction", metavar="PREDICTION", help="prediction.json, as `replay --out` wrote it")
    check.add_argument("run", metavar="RUN")
    check.add_argument("--ledger", metavar="FILE", help="add the outcome to this file of JSON lines")
    reads_runs(replay, demo, compare, check)


def _add_replay_options(replay: argparse.ArgumentParser) -> None:
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
        folder_for(arguments.out)  # before the work, that it be not for nothing
    with progress() as say:
        run = load(arguments.run, arguments.jobs, say)
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
        return as_json(report.rows() | {"written": [str(path) for path in written]})
    names = ", ".join(path.name for path in written)
    return f"{report}\n\nPREDICTION\n{said}\n\nIn {arguments.out}: {names}" if written else str(report)


def _demo(arguments: argparse.Namespace) -> str:
    arguments.run = str(ln.datasets.path(arguments.name))
    return _replay(arguments)


def _compare(arguments: argparse.Namespace) -> str:
    from lumos_nb.graph import Recording
    from lumos_nb.report import comparison_report

    with progress() as say:
        paths = arguments.a, arguments.b
        found = {path: Recording.of(load(path, arguments.jobs, say)) for path in dict.fromkeys(paths)}
        say("comparing")
        report = comparison_report(found[arguments.a], found[arguments.b], arguments.steps, names=paths)
    return as_json(report.rows()) if arguments.json else str(report)


def _check(arguments: argparse.Namespace) -> str:
    from lumos_nb.ledger import load_prediction

    said = load_prediction(arguments.prediction)
    with progress() as say:
        outcome = ln.check_prediction(said, load(arguments.run, arguments.jobs, say), ledger=arguments.ledger)
    return as_json(msgspec.to_builtins(outcome)) if arguments.json else str(outcome)
