"""The verbs of `lumos-nb chakra`."""

from __future__ import annotations

import argparse
from pathlib import Path

import lumos_nb as ln
from lumos_nb import generate_cli
from lumos_nb.display import text_table
from lumos_nb.errors import InputError
from lumos_nb.exchange import chakra
from lumos_nb.terminal import Verbs, as_json, load, progress, reads_runs, written_files

CONVERT = """
examples:
  lumos-nb chakra convert runs/gpt out                        out/chakra.<rank>.et and out/chakra.groups.json
  lumos-nb chakra convert runs/gpt out --target astra-sim     refuses what that simulator would get wrong
  lumos-nb chakra convert runs/gpt out --execution-trace runs/gpt   call trees instead, where runs/gpt has both
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
  lumos-nb chakra obfuscate out public --merge chains         one node for compute that nothing comes between
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
GENERATE = """
examples:
  lumos-nb chakra generate pattern out --ranks 8 --collective all_reduce --size-bytes 1048576
"""
LINK = """
examples:
  lumos-nb chakra link rank-0.et.json.gz rank-0.json.gz    which ops and kernels are whose, and how many are nobody's
  lumos-nb chakra link runs/gpt runs/gpt --rank 1 --out o  also o/nodes.parquet, o/device.parquet, o/unlinked.parquet
"""


def add_verbs(verbs: Verbs) -> None:
    """Add them to those of `lumos-nb chakra`."""
    verb = verbs.add
    generate_cli.add_verbs(verbs.group("generate", "workloads that nobody has run, as Chakra files", GENERATE).add)
    link = verb("link", _link, "an execution trace joined with a profile: times, device work, what is linked", LINK)
    link.add_argument("execution_trace", metavar="ET", help="a file, or a folder or archive with one a rank")
    link.add_argument("run", metavar="RUN", help="a Kineto trace of the same program, or a folder of them")
    link.add_argument("--rank", type=int, metavar="N", help="which rank, where there are several")
    link.add_argument("--out", type=Path, metavar="DIR", help="write every table there as Parquet")
    convert = verb("convert", _convert, "a step of a run as Chakra files, one a rank", CONVERT)
    reads_runs(link, convert)
    convert.add_argument("run", metavar="RUN", help="a folder of traces, one file a rank, or one file")
    convert.add_argument("out", metavar="DIR", type=Path)
    convert.add_argument("--step", type=int, metavar="N", help="as the profiler counts; else the one of median length")
    convert.add_argument("--execution-trace", metavar="ET", help="the call trees of this, with the times of the run")
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
    obfuscate.add_argument(
        "--merge", choices=["none", "chains"], default="none", help="chains of compute into one node"
    )
    text = verb("json", _chakra_json, "a Chakra file as JSON, or JSON as a Chakra file", CHAKRA_JSON)
    text.add_argument("path", metavar="FROM", help=".et, .json or .jsonl, perhaps with .gz")
    text.add_argument("out", metavar="TO", help="likewise")
    view = verb("view", _view, "Chakra files for ui.perfetto.dev", VIEW)
    view.add_argument("path", metavar="PATH", help="a folder of files, one a rank, or one file")
    view.add_argument("out", metavar="FILE", help="*.json or *.json.gz")


def _time_scale(text: str) -> float | None:
    try:
        return None if text == "secret" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'secret'") from None


def _link(arguments: argparse.Namespace) -> str:
    from lumos_nb.exchange.chakra.linking import link

    with progress() as say:
        run = load(arguments.run, arguments.jobs, say)
        say(f"reading {arguments.execution_trace}")
        trace = ln.load_execution_trace(arguments.execution_trace, rank=arguments.rank)
        say(f"linking {len(trace.nodes):,} nodes")
        linked = link(trace, run, rank=arguments.rank)
        written = linked.to_parquet(arguments.out) if arguments.out else None
    if arguments.json:
        return as_json({"report": linked.report.to_dicts(), "unlinked": linked.unlinked.to_dicts()})
    missing = text_table(linked.unlinked, caption="Not linked") if len(linked.unlinked) else "Nothing is left out."
    return f"{linked}\n\n{missing}" + (f"\n\nTables are in {written}." if written else "")


def _convert(arguments: argparse.Namespace) -> str:
    with progress() as say:
        run = load(arguments.run, arguments.jobs, say)
        if arguments.execution_trace:
            if arguments.target or arguments.step is not None:
                raise InputError(
                    "--execution-trace has the whole profile and no simulator's checks: leave out the other."
                )
            ranks: list[int] = run.ranks["rank"].to_list()
            groups: dict[str, list[int]] = {}
            files = []
            for rank in ranks:
                say(f"linking rank {rank}")
                linked = chakra.link(arguments.execution_trace, run, rank=rank if len(ranks) > 1 else None)
                files.append((linked.rank, chakra.from_linked(linked)))
                rows = linked.execution_trace.groups.select("group", "ranks").iter_rows()
                groups |= {name: members or ranks for name, members in rows}
            written = chakra.write_ranks(files, arguments.out, "chakra", groups)
        else:
            say("building the graph")
            graph = ln.build_graph(run, arguments.step)
            written = chakra.write(graph, arguments.out, target=arguments.target, progress=say)
    return written_files(arguments, written)


def _validate(arguments: argparse.Namespace) -> tuple[str, int]:
    with progress() as say:
        say(f"checking {arguments.path}")
        found = chakra.validate(arguments.path, arguments.target)
    if arguments.json:
        return as_json({"findings": found.to_dicts()}), int(len(found) > 0)
    if found.is_empty():
        return f"{arguments.path}: nothing found", 0
    counts = found["rule"].value_counts(sort=True).iter_rows()
    told = ", ".join(f"{count:,} {rule}" for rule, count in counts)
    return text_table(found, caption=f"{arguments.path}: {len(found):,} findings ({told})"), 1


def _obfuscate(arguments: argparse.Namespace) -> str:
    policy = chakra.Policy(
        names=arguments.names, scopes=arguments.scopes, shapes=arguments.shapes,
        time_scale=arguments.scale, time_jitter=arguments.jitter, merge=arguments.merge,
    )  # fmt: skip
    with progress() as say:
        say(f"obfuscating {arguments.path}")
        found = chakra.obfuscate(arguments.path, policy)
        written = found.write(arguments.out)
    return as_json({"report": found.report.to_dicts()}) if arguments.json else written_files(arguments, written, found)


def _chakra_json(arguments: argparse.Namespace) -> str:
    with progress() as say:
        say(f"reading {arguments.path}")
        nodes = chakra.read_file(arguments.path)
        say(f"writing {len(nodes.table):,} nodes")
        written = chakra.write_file(nodes, arguments.out)
    return (
        as_json({"written": str(written), "nodes": len(nodes.table)}) if arguments.json else f"{nodes}\n\nIn {written}"
    )


def _view(arguments: argparse.Namespace) -> str:
    with progress() as say:
        say(f"reading {arguments.path}")
        graph = chakra.to_graph(arguments.path)
        say("replaying")
        result = ln.replay(graph)
        written = ln.write_perfetto(result, arguments.out)
    return as_json({"written": str(written)}) if arguments.json else f"{result}\n\nIn {written}, for ui.perfetto.dev"
