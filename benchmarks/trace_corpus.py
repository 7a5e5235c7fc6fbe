"""A corpus of steps to learn a generator from: `python -m benchmarks.trace_corpus`.

Three sources, and what durations they carry. The bundled runs and the recordings of `../shared/traces` have measured
ones, on a CPU and on GPUs. Dry runs of torch models under layouts of your own have none: their graphs say which
operators and collectives follow each other on every rank, and all ops take 0 ns. Every collective of a dry run is
waited for at once, as it does not say when its result is first used.

`dry_corpus` makes a graph when it is asked for, and keeps it in the user's cache folder (or `LUMOS_NB_CACHE`) under the
layout, torch's version and the text of what makes it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from benchmarks import TRACES
from lumos_nb import datasets, fake_group
from lumos_nb.exchange.chakra import word_graphs
from lumos_nb.exchange.chakra.word_graphs import STEP, Build, communication, finished, join_ranks
from lumos_nb.exchange.chakra.words import MESSAGE, Meeting
from lumos_nb.fake_group import DryRun, dry_run
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.traces.run import load_run

RECORDINGS = (
    "torchrec/sst_long_a2a_optimizer_4",
    "hta/ns_resolution_trace",
    "hta/trace_diff/control",
    "torchrec/resnet18",
)


def measured_corpus() -> Iterator[tuple[str, list[Graph]]]:
    """The steps of the bundled runs, and of recordings of others where they are at hand, but for the first."""
    paths = {name: datasets.path(name) for name in datasets.names() if datasets.DATASETS[name].is_run}
    paths |= {name: TRACES / name for name in RECORDINGS if (TRACES / name).exists()}
    for name, path in paths.items():
        recording = Recording.of(load_run(path))
        yield name, [build_graph(recording, step) for step in recording.steps[len(recording.steps) > 1 :]]


def structure(runs: Sequence[DryRun]) -> Graph:
    """The graph of one step of all ranks of a job, from a dry run of each: no op takes any time."""
    build, places = Build(), dict[tuple[str, tuple[int, ...], int], tuple[list[int], list[int], int]]()
    for run in runs:
        last: int | None = None
        comm_of = {row["index"]: row for row in run.collectives.to_dicts()}
        times: dict[tuple[str, tuple[int, ...]], int] = {}
        for op in run.ops.to_dicts():
            comm = comm_of.get(op["index"])
            about = {"rank": run.rank, "step": STEP, "phase": op["phase"], "device": None, "dur_ns": 0}
            lane = {"lane": "cpu:0", "name": op["name"], "dtype": op["dtype"]}
            row = build.add(**about, **lane, kind="launch" if comm else "cpu", shapes=op["shapes"])
            build.edges += [(last, row, 0, False, "thread", "exact", True)] if last is not None else []
            last = row if comm is None else _communicated(build, places, times, row, comm, about)
    for (collective, ranks, _), (arrivals, transfers, size) in places.items():
        if len(arrivals) == len(ranks) > 1:
            join_ranks(build, Meeting(collective, ranks, size), {ranks: str(sorted(ranks))}, arrivals, transfers)
    return finished(build)


def _communicated(
    build: Build,
    places: Any,
    times: dict[tuple[str, tuple[int, ...]], int],
    launch: int,
    comm: Mapping[str, Any],
    about: Any,
) -> int:
    """Arrival and transfer of one collective behind its launch; returns the wait, at which the rank goes on."""
    rank, size = about["rank"], comm["comm_bytes"]
    message = comm["collective"] in ("send", "recv")
    pair = (rank, comm["peer"]) if comm["collective"] == "send" else (comm["peer"], rank)
    key = (MESSAGE, pair) if message else (comm["collective"], tuple(comm["group_ranks"]))
    nth = times.get(key, 0)
    times[key] = nth + 1
    said = communication(Meeting(*key, size), rank, {key[1]: str(sorted(key[1]))}) | {"comm_seq": nth}
    lane = f"net:{comm['collective']}:{comm['peer']}" if message else f"net:{said['group']}"
    arrival = build.add(**about, **said, lane=lane, kind="event", name="arrival")
    transfer = build.add(**about, **said, lane=lane, kind="comm", name=comm["collective"])
    wait = build.add(**about, lane="cpu:0", kind="wait", name="wait")
    ends = (
        (launch, arrival, "launch"),
        (arrival, transfer, "stream"),
        (transfer, wait, "sync"),
        (launch, wait, "thread"),
    )
    build.edges += [(src, dst, 0, False, rule, "exact", True) for src, dst, rule in ends]
    arrivals, transfers, _ = places.setdefault((*key, nth), ([], [], size))
    arrivals.append(arrival)
    transfers.append(transfer)
    return wait


Step = Callable[[], object]
DEPTHS, OPTIMIZERS = (1, 2, 3, 4, 6), ("AdamW", "SGD")
WORLDS = (2, 4, 8)
MODELS = ("gpt", "encoder", "convolutions", "perceptron")


class Layout(NamedTuple):
    """How many ranks a job has, what makes the step of one of them under its process group, and whether all are alike.

    Ranks that are all in one group and do the same are run once.
    """

    ranks: int
    setup: Callable[[], Step]
    alike: bool = False

    def runs(self) -> list[DryRun]:
        """A dry run of every rank."""
        if self.alike:
            first = dry_run(lambda step: step(), self.ranks, 0, setup=self.setup)
            return [replace(first, rank=rank) for rank in range(self.ranks)]
        return [dry_run(lambda step: step(), self.ranks, rank, setup=self.setup) for rank in range(self.ranks)]


def layouts() -> dict[str, Layout]:
    """The layouts of the corpus by name."""
    found: dict[str, Layout] = {}
    for model, depth, optimizer, ranks in product(MODELS, DEPTHS, OPTIMIZERS, WORLDS):
        about = f"{model} of {depth} layers, {optimizer}"
        for way in ("ddp", "fsdp"):
            found[f"{about}, {way} {ranks}"] = Layout(ranks, partial(_replicated, model, depth, optimizer, way), True)
    for depth, ranks in product(DEPTHS, WORLDS):
        found[f"gpt of {depth} layers, tp {ranks}"] = Layout(ranks, partial(_split, depth, 1, ranks), True)
        if ranks <= depth:
            found[f"gpt of {depth} layers, pp {ranks}"] = Layout(ranks, partial(_staged, depth))
    for depth, fsdp, tp in product(DEPTHS, (2, 4), (2, 4)):
        found[f"gpt of {depth} layers, fsdp {fsdp} x tp {tp}"] = Layout(fsdp * tp, partial(_split, depth, fsdp, tp))
    return found


def dry_graph(name: str) -> Graph:
    """The structure of one of `layouts`, from the cache or made anew."""
    base = Path(os.environ.get("LUMOS_NB_CACHE") or Path.home() / ".cache" / "lumos_nb")
    folder = base / "dry_runs" / blake2b(f"{name} {_made_by()}".encode(), digest_size=16).hexdigest()
    if not folder.exists():
        graph = structure(layouts()[name].runs())
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = tempfile.mkdtemp(dir=folder.parent, prefix=".part-")
        graph.to_parquet(unfinished)
        try:
            Path(unfinished).rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(unfinished)
    ops, edges, report = (pl.read_parquet(folder / f"{table}.parquet") for table in ("ops", "edges", "report"))
    return Graph(ops, edges, STEP, report)


def dry_corpus(names: Iterable[str] | None = None) -> Iterator[tuple[str, list[Graph]]]:
    """Structure-only graphs of layouts (all of `layouts()` where none are named), one after the other."""
    for name in layouts() if names is None else names:
        yield name, [dry_graph(name)]


@cache
def _made_by() -> str:
    import torch

    from datasets import gpt

    texts = (Path(file).read_bytes() for file in (__file__, fake_group.__file__, word_graphs.__file__, gpt.__file__))
    return f"{torch.__version__} {blake2b(b''.join(texts)).hexdigest()}"


def _config(depth: int) -> Any:
    from datasets import gpt

    return gpt.GptConfig(layers=depth, hidden=128, heads=8, vocab=512, seq=64, batch=4)


def _model(name: str, depth: int) -> tuple[Any, Any, list[Any]]:
    """A model, its inputs, and the modules that FSDP shards one by one."""
    import torch
    from torch import nn

    from datasets import gpt

    if name == "gpt":
        model = gpt.make_model(_config(depth), "cpu")
        return model, gpt.make_batch(_config(depth), "cpu")[:, :-1], [*model.blocks]
    if name == "encoder":
        blocks = [nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True) for _ in range(depth)]
        return nn.Sequential(*blocks), torch.randn(8, 32, 64), blocks
    if name == "convolutions":
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(depth)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
        return nn.Sequential(*blocks, *head), torch.randn(4, 8, 16, 16), blocks
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*blocks), torch.randn(8, 64), blocks


def _training(model: Any, inputs: Any, optimizer: str, warmup: int = 1) -> Step:
    """A step of forward, backward and optimizer, after others that make the optimizer's state."""
    import torch

    options: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
    updates = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3, **options)

    def step() -> None:
        updates.zero_grad()
        model(inputs).float().pow(2).mean().backward()
        updates.step()

    for _ in range(warmup):
        step()
    return step


def _replicated(name: str, depth: int, optimizer: str, way: str) -> Step:
    """All ranks have the model and parts of the batch; parameters whole (DDP) or in parts (FSDP)."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model, inputs, blocks = _model(name, depth)
    if way == "ddp":
        return _training(
            DistributedDataParallel(model), inputs, optimizer, warmup=2
        )  # buckets are settled in two steps
    for block in blocks:
        fully_shard(block)
    return _training(fully_shard(model), inputs, optimizer)


def _split(depth: int, fsdp: int, tp: int) -> Step:
    """The GPT's layers split over `tp` ranks, and over `fsdp` such groups in parts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from datasets import gpt

    mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    model = gpt.parallelize(gpt.make_model(_config(depth), "cpu"), mesh["tp"])
    for block in [*model.blocks, model] if fsdp > 1 else []:
        fully_shard(block, mesh=mesh["fsdp"])
    return _training(model, gpt.make_batch(_config(depth), "cpu")[:, :-1], "AdamW")


def _staged(depth: int) -> Step:
    """One stage of the GPT, sends and receives written out: all micro-batches forward, then all backward (GPipe)."""
    import torch
    import torch.distributed as dist

    from datasets import gpt

    config, rank, stages = _config(depth), dist.get_rank(), dist.get_world_size()
    model = gpt.make_model(config, "cpu", rank, stages)
    tokens, optimizer = gpt.make_batch(config, "cpu")[:, :-1], torch.optim.AdamW(model.parameters())
    first, last, shape = rank == 0, rank == stages - 1, (config.batch, config.seq, config.hidden)

    def step() -> None:
        optimizer.zero_grad()
        kept = []
        for _ in range(config.micro_batches):
            into = tokens if first else torch.empty(shape, requires_grad=True)
            if not first:
                dist.recv(into.detach(), rank - 1)
            kept.append((into, model(into)))
            if not last:
                dist.send(kept[-1][1].detach(), rank + 1)
        for into, out in kept:
            grad = torch.empty(shape)
            if last:
                out.float().pow(2).mean().backward()
            else:
                dist.recv(grad, rank + 1)
                out.backward(grad)
            if not first:
                dist.send(into.grad, rank - 1)
        optimizer.step()

    step()
    return step


def main() -> None:
    """Say what the corpus holds; given a number, make about so many dry runs of all kinds and say how long it takes."""
    sources = (measured_corpus(), dry_corpus())
    if len(sys.argv) > 1:
        names = [*layouts()]
        sources = (dry_corpus(names[:: max(1, len(names) // int(sys.argv[1]))]),)
    rows = []
    for source in sources:
        began = time.perf_counter()
        for name, graphs in source:
            ops = pl.concat([graph.ops.select("rank", "dur_ns") for graph in graphs])
            timed = float((ops["dur_ns"] > 0).mean())  # type: ignore[arg-type]
            about = {"run": name, "graphs": len(graphs), "ranks": ops["rank"].n_unique(), "ops": len(ops)}
            rows.append({**about, "timed": timed, "seconds": time.perf_counter() - began})
            began = time.perf_counter()
    table = pl.DataFrame(rows)
    with pl.Config(tbl_rows=len(rows), fmt_str_lengths=60):
        print(table)
    print(f"{table['graphs'].sum()} graphs, {table['seconds'].sum() / table['graphs'].sum():.2f} s each")


if __name__ == "__main__":
    main()
