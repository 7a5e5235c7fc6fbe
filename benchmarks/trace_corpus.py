"""A corpus of steps to learn a generator from: `python -m benchmarks.trace_corpus`.

Three sources, and what durations they carry. The bundled runs and the recordings of `../shared/traces` have measured
ones, on a CPU and on GPUs. Dry runs of torch models under layouts of your own have none: their graphs say which
operators and collectives follow each other on every rank, and all ops take 0 ns. Every collective of a dry run is
waited for at once, as it does not say when its result is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from benchmarks import TRACES
from lumos_nb import datasets
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


def dry_corpus(step_of: Callable[[], Callable[[], object]], worlds: Sequence[int]) -> Iterator[tuple[str, list[Graph]]]:
    """Structure-only graphs of a step (made by `step_of` under the process group) on several numbers of ranks."""
    for ranks in worlds:
        runs = [dry_run(lambda step: step(), ranks, rank, setup=step_of) for rank in range(ranks)]
        yield f"dry run of {ranks} ranks", [structure(runs)]


def small_ddp() -> Callable[[], object]:
    """A step of data parallelism on three layers."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()

    step()
    step()
    return step


def main() -> None:
    """Say what the corpus holds."""
    rows = []
    sources = [*measured_corpus(), *dry_corpus(small_ddp, (2, 4, 8))]
    for name, graphs in sources:
        ops = pl.concat([graph.ops.select("rank", "kind", "dur_ns", "collective") for graph in graphs])
        timed = float((ops["dur_ns"] > 0).mean())  # type: ignore[arg-type]
        rows.append(
            {"run": name, "graphs": len(graphs), "ranks": ops["rank"].n_unique(), "ops": len(ops), "timed": timed}
        )
    print(pl.DataFrame(rows))


if __name__ == "__main__":
    main()
