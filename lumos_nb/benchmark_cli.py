"""The verbs of `lumos-nb benchmark`."""

from __future__ import annotations

import argparse
import io
from contextlib import redirect_stdout
from pathlib import Path

import polars as pl

from lumos_nb.display import text_table
from lumos_nb.errors import BenchmarkError
from lumos_nb.exchange import benchmark
from lumos_nb.exchange.chakra import Policy
from lumos_nb.terminal import AddVerb, as_json, progress, tell

GENERATE = """
examples:
  lumos-nb benchmark generate runs/gpt bench/gpt                of all ranks; then: python bench/gpt/bench.py
  lumos-nb benchmark generate rank-0.et.json.gz bench/small --shrink 4096=64 --shrink 512=32
  lumos-nb benchmark generate runs/gpt bench/public --hide      for others to run, without your names
"""
RUN = """
examples:
  lumos-nb benchmark run bench/gpt                              what `benchmark generate` wrote
  lumos-nb benchmark run runs/gpt --options --iterations 20 --only Optimizer.step --profile bench/out

What follows --options is for bench.py. Several ranks are launched with `torchrun bench.py`; here one runs, with fake
peers.
"""
COMPARE = """
examples:
  lumos-nb benchmark compare runs/gpt bench/gpt/out             exit code 1 if a step takes another time, beyond doubt
  lumos-nb benchmark compare runs/gpt bench/gpt/out --json
"""
SELECT = """
examples:
  lumos-nb benchmark select runs/gpt -k 3 --by step             three steps that stand for all
  lumos-nb benchmark select runs/monday runs/tuesday runs/wednesday -k 2
"""


def add_verbs(verb: AddVerb) -> None:
    """Add them to the parser of `lumos-nb benchmark`."""
    generate = verb("generate", _generate, "a program that runs the operators of an execution trace", GENERATE)
    generate.add_argument("trace", metavar="ET", help="a file, or a folder or archive with one a rank")
    generate.add_argument("out", metavar="DIR", type=Path)
    generate.add_argument("--rank", type=int, metavar="N", help="this rank alone, with fake peers")
    generate.add_argument("--step", type=int, metavar="N", help="as the profiler counts; else the first")
    generate.add_argument("--profile", metavar="RUN", help="a Kineto trace, for times; a capture's own is found")
    generate.add_argument(
        "--shrink", type=_sizes, action="append", default=[], metavar="A=B", help="dimensions of A become B"
    )
    generate.add_argument(
        "--alpha", type=float, default=0.0, metavar="X", help="skew of lookups: Zipf's law with this exponent (0: even)"
    )
    generate.add_argument("--hide", action="store_true", help="number all names but those of torch's own operators")
    run = verb("run", _run, "run a benchmark, or the operators of an execution trace", RUN)
    run.add_argument("path", metavar="PATH", help="a generated folder, or an execution trace or a folder of them")
    run.add_argument(
        "--options", nargs=argparse.REMAINDER, default=[], metavar="...", help="of bench.py, to the end of the line"
    )
    compare = verb("compare", _compare, "whether a benchmark behaves like what it was made from", COMPARE)
    compare.add_argument("original", metavar="ORIGINAL", help="a capture, or another run with marked steps")
    compare.add_argument("replayed", metavar="REPLAYED", help="what bench.py --profile wrote")
    select = verb("select", _select, "the few steps, ranks or runs that stand for all", SELECT)
    select.add_argument("paths", nargs="+", metavar="PATH", help="runs, or files of execution traces")
    select.add_argument("-k", type=int, required=True, metavar="K", help="how many")
    select.add_argument("--by", choices=["trace", "step", "rank"], default="trace", help="what is chosen (trace)")


def _sizes(text: str) -> tuple[int, int]:
    size, _, smaller = text.partition("=")
    try:
        return int(size), int(smaller)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no A=B, such as 4096=64") from None


def _generate(arguments: argparse.Namespace) -> str:
    policy = Policy(shapes="exact") if arguments.hide else None
    with progress() as say:
        say(f"reading {arguments.trace}")
        made = benchmark.generate(
            arguments.trace, arguments.out, rank=arguments.rank, step=arguments.step, profile=arguments.profile,
            shrink=dict(arguments.shrink), alpha=arguments.alpha, policy=policy,
        )  # fmt: skip
    if arguments.json:
        shares = {"coverage": made.coverage, "time_coverage": made.time_coverage}
        stand_ins = made.calls.filter(pl.col("reason") != "").select("op", "reason", "operators")
        return as_json({"calls": len(made.calls), **shares, "stand_ins": stand_ins.to_dicts()})
    return f"{made}\n\nIn {arguments.out}; run it with: python {arguments.out / 'bench.py'}"


def _run(arguments: argparse.Namespace) -> str:
    from lumos_nb.exchange.benchmark.bench import arguments_of
    from lumos_nb.exchange.benchmark.binding import Unusable

    try:  # before anything is printed elsewhere, --help too
        arguments_of(arguments.options)
    except Unusable as error:
        tell(f"usage: lumos-nb benchmark run PATH --options ...\nlumos-nb: {error}\n")
        raise SystemExit(2) from error
    folder, said = Path(arguments.path), io.StringIO()
    with progress() as say, redirect_stdout(said):
        say(f"running {folder}")
        generated = folder.is_dir() and any(folder.glob("workload*.json"))
        times = (_folder if generated else _trace)(folder, arguments.options)
    if arguments.json:
        return as_json(times.to_dicts())
    return f"{said.getvalue()}\n{text_table(times)}"


def _trace(path: Path, options: list[str]) -> pl.DataFrame:
    return benchmark.replay(path, arguments=options)


def _folder(path: Path, options: list[str]) -> pl.DataFrame:
    """Run with this package's code: what else lies in the folder is not executed."""
    from lumos_nb.exchange.benchmark.bench import main
    from lumos_nb.exchange.benchmark.binding import Unusable

    try:
        times = main(options, path)
    except Unusable as error:
        raise BenchmarkError(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BenchmarkError(f"{path}: its workload.json is damaged ({error!r:.80}): generate it again.") from error
    rows = [(at, *both) for at, both in enumerate(times)]
    return pl.DataFrame(rows, schema=["iteration", "wall_ns", "cpu_ns"], orient="row")


def _compare(arguments: argparse.Namespace) -> tuple[str, int]:
    with progress() as say:
        say("comparing")
        found = benchmark.compare(arguments.original, arguments.replayed)
    code = int(found.alike is False)
    if not arguments.json:
        return str(found), code
    shares = ("alike", "verdict", "coverage_by_count", "coverage_by_time", "distance")
    tables = {name: getattr(found, name).to_dicts() for name in ("figures", "classes", "communication", "ops")}
    return as_json({name: getattr(found, name) for name in shares} | tables), code


def _select(arguments: argparse.Namespace) -> str:
    with progress() as say:
        say(f"reading {len(arguments.paths)} traces")
        found = benchmark.select(arguments.paths, arguments.k, by=arguments.by)
    if not arguments.json:
        return str(found)
    shares = {name: getattr(found, name) for name in ("measure", "coverage", "error", "spread")}
    return as_json({**shares, "chosen": found.chosen.to_dicts(), "items": found.items.to_dicts()})
