"""The verbs of `lumos-nb chakra generate`: workloads that nobody has run, as Chakra files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import polars as pl

import lumos_nb as ln
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.csv_files import read_csv
from lumos_nb.errors import UNDECODABLE, InputError, LayoutError
from lumos_nb.exchange import chakra
from lumos_nb.exchange.chakra.conversion import Estimated
from lumos_nb.exchange.chakra.patterns import COLLECTIVES
from lumos_nb.terminal import AddVerb, progress, written_files
from lumos_nb.traces.export import read_table

LLM = """
examples:
  lumos-nb chakra generate llm gpt3-175b out --layout tp=4 pp=4 dp=2 zero=1 \\
    --train micro_batch=1 global_batch=16 seq=2048 \\
    --cluster gpu=H100-SXM-80GB nodes=4 inside=NVLink4-NVSwitch between=InfiniBand-NDR-400
  lumos-nb chakra generate llm model.json out --layout layout.json --train train.json --cluster cluster.json --only 0 8

MODEL is a well-known name, or a file of what Transformer.to_json gives. Fields are those of Parallelism, Training and
Cluster in Python: FIELD=VALUE each, lists as split=[3,3,2], or all in a JSON file.
"""
DLRM = """
examples:
  lumos-nb chakra generate dlrm model.json tables.csv out --train global_batch=65536 \\
    --cluster gpu=H100-SXM-80GB inside=NVLink4-NVSwitch
  lumos-nb chakra generate dlrm model.json tables.csv out --train train.json --cluster cluster.json --target astra-sim

MODEL is a file such as {"dense": 13, "bottom": [512, 128], "top": [1024, 1]}, TABLES one with the columns table, rows,
dim and pooling. Tables are placed by `ln.shard`; lookups are priced by the GPU's data sheet. Fields are those of Dlrm,
DlrmTraining and Cluster in Python.
"""
PATTERN = """
examples:
  lumos-nb chakra generate pattern out --ranks 8 --collective all_reduce --size-bytes 1048576   one collective
  lumos-nb chakra generate pattern out --ranks 1 --rounds 100 --compute-us 50                   a chain of compute
  lumos-nb chakra generate pattern out --ranks 8 --rounds 4 --compute-us 100 --collective all_gather   side by side
  lumos-nb chakra generate pattern out --ranks 8 --rounds 4 --compute-us 100 --collective all_gather --in-turn
"""

S = TypeVar("S", ln.Transformer, ln.Parallelism, ln.Training, ln.Cluster, ln.Dlrm, ln.DlrmTraining)


def add_verbs(verb: AddVerb) -> None:
    """Add them to the parser of `lumos-nb chakra generate`."""
    llm = verb("llm", _llm, "a predicted step of a transformer, one file a rank", LLM)
    llm.add_argument("model", metavar="MODEL", help="a well-known name, such as gpt3-175b, or a JSON file")
    dlrm = verb("dlrm", _dlrm, "a predicted step of a recommendation model, one file a device", DLRM)
    dlrm.add_argument("model", metavar="MODEL", help="a JSON file")
    dlrm.add_argument("tables", metavar="TABLES", help="a CSV or Parquet file with a row an embedding table")
    pattern = verb("pattern", _pattern, "rounds of one kernel and one collective on every rank", PATTERN)
    for one in (llm, dlrm, pattern):
        one.add_argument("out", metavar="DIR", type=Path)
        one.add_argument("--target", choices=["astra-sim"], help="a simulator that must run them")
        one.add_argument("--only", type=int, nargs="+", metavar="RANK", help="write the files of these ranks alone")
    llm.add_argument("--layout", nargs="+", default=[], metavar="FIELD=VALUE", help="how it is spread (one rank)")
    for one in (llm, dlrm):
        one.add_argument("--train", nargs="+", required=True, metavar="FIELD=VALUE", help="in what batches")
        one.add_argument("--cluster", nargs="+", required=True, metavar="FIELD=VALUE", help="on what GPUs")
    pattern.add_argument("--ranks", type=int, required=True, metavar="N")
    pattern.add_argument("--rounds", type=int, default=1, metavar="N")
    pattern.add_argument("--compute-us", type=float, metavar="X", help="time of each round's kernel (there is none)")
    pattern.add_argument("--flops", type=float, metavar="X", help="its work, for simulators that price it")
    pattern.add_argument("--collective", choices=COLLECTIVES, help="of each round (there is none)")
    pattern.add_argument("--size-bytes", type=int, default=0, metavar="N", help="its size, as nccl-tests count (0)")
    pattern.add_argument("--transfer-us", type=float, default=0.0, metavar="X", help="its time once all are there (0)")
    pattern.add_argument("--in-turn", action="store_true", help="kernels wait for the collective before them")


def _llm(arguments: argparse.Namespace) -> str:
    is_file = arguments.model.endswith(".json")
    model = _spec(ln.Transformer, [arguments.model]) if is_file else ln.Transformer.named(arguments.model)
    layout, train = _spec(ln.Parallelism, arguments.layout), _spec(ln.Training, arguments.train)
    cluster = _spec(ln.Cluster, arguments.cluster)
    return _generated(arguments, lambda: ln.estimate(model, layout, train, cluster))


def _dlrm(arguments: argparse.Namespace) -> str:
    model, tables = _spec(ln.Dlrm, [arguments.model]), _table(Path(arguments.tables))
    train, cluster = _spec(ln.DlrmTraining, arguments.train), _spec(ln.Cluster, arguments.cluster)

    def predicted() -> Estimated:
        costs = ln.ShardingCosts.of(PhysicalLookup.of_sheet(cluster.gpu_sheet), cluster, train.global_batch)
        return ln.estimate_dlrm(model, ln.shard(tables, cluster, costs), train, cluster)

    return _generated(arguments, predicted)


def _pattern(arguments: argparse.Namespace) -> str:
    names = ("ranks", "rounds", "compute_us", "flops", "collective", "size_bytes", "transfer_us")
    asked = {name: getattr(arguments, name) for name in names}
    return _generated(arguments, lambda: chakra.pattern(**asked, overlapped=not arguments.in_turn))


def _generated(arguments: argparse.Namespace, make: Callable[[], Estimated | ln.Graph]) -> str:
    with progress() as say:
        say("predicting")
        made = make()
        say("checking")
        written = chakra.write(made, arguments.out, target=arguments.target, ranks=arguments.only, progress=say)
    return written_files(arguments, written, "" if isinstance(made, ln.Graph) else made)


def _spec(kind: type[S], words: Sequence[str]) -> S:
    """A specification of FIELD=VALUE words, values as in JSON or text; or of a JSON file."""
    if len(words) == 1 and Path(words[0]).is_file():
        try:
            return kind.from_json(Path(words[0]).read_bytes())
        except LayoutError as error:
            raise LayoutError(f"{words[0]}: {error}") from error
    fields = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            such = f"FIELD=VALUE of {kind.__name__}, such as {kind.__struct_fields__[0]}=..."
            raise InputError(f"{word!r} is no {such}; nor is it a JSON file of one.")
        try:
            fields[name] = msgspec.json.decode(value)
        except UNDECODABLE:
            fields[name] = value
    return kind.from_json(msgspec.json.encode(fields))


def _table(path: Path) -> pl.DataFrame:
    if path.suffix != ".parquet":
        return read_csv(path, InputError)
    try:
        return read_table(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputError(f"{path} is no table: {error}. Give Parquet, or CSV with a header.") from error
