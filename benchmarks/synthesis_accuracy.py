"""Rows of the generator of steps that is learned from the bundled runs: `python -m benchmarks.synthesis_accuracy`.

Every run's last steps are held out: bits a word and fidelity are of these. One run is held out whole as well, and of
the dry runs all models of one depth. Fidelity is taken of many draws, for steps scatter.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl

from benchmarks.rows import ACCURACY, Row, record
from benchmarks.trace_corpus import dry_corpus, layouts
from lumos_nb import datasets
from lumos_nb.errors import GraphError
from lumos_nb.exchange.chakra.likeness import fidelity
from lumos_nb.exchange.chakra.synthesize import TraceModel
from lumos_nb.graph import Graph, Recording, build_graph
from lumos_nb.traces.run import load_run

RUNS = ("gpt-single", "gpt-ddp", "gpt-tp", "gpt-pp")
UNSEEN = "gpt-tp"
"""The run that is held out whole, once."""
LEARNED, HELD_OUT = slice(1, 6), slice(6, 10)
"""Which of a run's steps; the first is disturbed by the profiler's own start."""
DRAWS = 12
EPOCHS, DRY_EPOCHS = 40, 20
UNSEEN_DEPTH = " of 4 layers"
ONE_OF = 7
"""Of so many layouts of dry runs one is taken."""
SHOWN = {
    "duration of compute": "KS",
    "duration of gaps of threads": "KS",
    "duration of transfers": "KS",
    "idle time": "KS",
    "3-grams": "bits",
    "makespan": "x",
    "breakdown": "of the step",
    "nearest step": "log",
}


def corpus(names: Sequence[str] = RUNS, ranks_at_most: int = 2) -> dict[str, list[Graph]]:
    """All steps but the first of the bundled runs, by run."""
    graphs = {}
    for name in names:
        recording = Recording.of(load_run(datasets.path(name)))
        if recording.world_size <= ranks_at_most:
            graphs[name] = [build_graph(recording, step) for step in recording.steps]
    return graphs


def synthesis_rows() -> Iterator[Row]:
    """Rows of the group `synthesis`."""
    graphs = corpus()
    model = TraceModel.fit({run: steps[LEARNED] for run, steps in graphs.items()}, seed=0, epochs=EPOCHS)
    held_out = pl.concat([model.bits(steps[HELD_OUT], like=run) for run, steps in graphs.items()])
    yield from bit_rows("held-out steps", held_out)
    others = {run: steps[LEARNED] for run, steps in graphs.items() if run != UNSEEN}
    yield from bit_rows(
        f"held-out run {UNSEEN}", TraceModel.fit(others, seed=0, epochs=EPOCHS).bits(graphs[UNSEEN][:2])
    )
    names = [name for name in layouts() if UNSEEN_DEPTH not in name]
    dry = TraceModel.fit(dict(dry_corpus(names[::ONE_OF])), seed=0, epochs=DRY_EPOCHS)
    deep = [graph for _, (graph,) in dry_corpus([name for name in layouts() if UNSEEN_DEPTH in name][::ONE_OF])]
    yield from bit_rows(f"dry runs{UNSEEN_DEPTH}", dry.bits(deep), f"learned from {len(dry.layouts)} layouts of others")
    for run, steps in graphs.items():
        yield from fidelity_rows(model, run, steps)


def bit_rows(what: str, bits: pl.DataFrame, about: str = "") -> Iterator[Row]:
    """Bits a word of what was not learned from, beside the Markov chain."""
    weight = bits["words"].to_numpy()
    markov, unknown, uniform = (
        float(np.average(bits[c].to_numpy(), weights=weight)) for c in ("markov_bits", "unknown", "uniform_bits")
    )
    note = f"{len(bits)} sentences, {100 * unknown:.1f} % of words never seen; uniform {uniform:.1f}"
    note += f"; {about}" if about else ""
    for column, name in {
        "bits": "n-grams that count and net",
        "counts_bits": "n-grams that count",
        "net_bits": "net",
    }.items():
        value = float(np.average(bits[column].to_numpy(), weights=weight))
        yield Row(f"synthesis/{what}, {name}", value, "bits a word", "Markov, order 3", markov, note=note)


def fidelity_rows(model: TraceModel, run: str, steps: Sequence[Graph]) -> Iterator[Row]:
    """Generated steps beside held-out ones; for copying, beside those learned from."""
    drawn = [model.sample(seed=seed, like=run) for seed in range(DRAWS)]
    unseen, learned = fidelity(steps[HELD_OUT], drawn), fidelity(steps[LEARNED], drawn)
    rng = np.random.default_rng(0)
    copies = fidelity(steps[LEARNED], [steps[LEARNED][i] for i in rng.integers(0, 5, DRAWS)])
    try:
        chain = fidelity(steps[HELD_OUT], [model.sample(seed=s, like=run, by="markov") for s in range(DRAWS)])
        markov = dict(chain.select("measure", "value").iter_rows())
    except GraphError:
        markov = {}
    for measure, unit in SHOWN.items():
        table = learned if measure == "nearest step" else unseen
        value, among = table.filter(measure=measure).select("value", "among_real").row(0)
        note = f"beside the steps learned from: {learned.filter(measure=measure)['value'].item():.3f}; "
        note += f"whole real steps drawn: {copies.filter(measure=measure)['value'].item():.3f}; "
        note += f"Markov: {markov[measure]:.3f}" if markov else "Markov: no step that holds its communication"
        yield Row(f"synthesis/{run}, {measure}", value, unit, "real and real", among, note=note)


def main() -> None:
    """Measure and write down."""
    begin = time.perf_counter()
    rows = [*synthesis_rows()]
    record(ACCURACY, rows)
    for row in rows:
        print(f"{row.name:60} {row.value:8.3f} {row.unit:12} {row.baseline} {row.baseline_value:8.3f}  {row.note}")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
