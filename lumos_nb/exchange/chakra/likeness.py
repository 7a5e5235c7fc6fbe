"""How like generated steps are to real ones, and whether they are copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon
from scipy.stats import ks_2samp

from lumos_nb.critical_path import replay
from lumos_nb.errors import InputError, require_kinds
from lumos_nb.graph import Graph
from lumos_nb.partition import breakdown
from lumos_nb.schema import require

Floats = NDArray[np.float64]

FIDELITY = {
    "measure": pl.String(),
    "value": pl.Float64(),
    "p_value": pl.Float64(),  # of two-sample tests
    "among_real": pl.Float64(),  # the same between every second real step and the others
}
"""Columns of `fidelity`."""

KINDS = {"compute": ("cpu", "kernel", "memcpy", "memset"), "gaps of threads": ("gap",), "transfers": ("comm",)}


def fidelity(real: Sequence[Graph], generated: Sequence[Graph]) -> pl.DataFrame:
    """Compare two sets of steps.

    Parameters
    ----------
    real
        Steps of one run, at least four.
    generated
        Steps that are to be like these.

    Returns
    -------
    frame
        Columns of `FIDELITY`, a row a measure:

        - `duration of ...`, `size of messages`, `idle time`: the statistic of Kolmogorov and Smirnov, 0 (equal) to 1;
          idle time is that between two ops of a lane when the step is replayed;
        - `1-grams` to `3-grams`: Jensen-Shannon divergence in bits of how often one to three ops follow each other on a
          lane, 0 (equal) to 1 (nothing in common);
        - `makespan`: median replayed step over that of the real ones; `breakdown`: by what share of the step its parts
          differ, rank by rank;
        - `nearest step`: mean difference of the logarithms of the durations of equal ops to the most similar real step,
          0 for a copy. Beside it that of each real step to the most similar other one.

    Raises
    ------
    InputError
        There are fewer than four real steps or no generated one, or they are no graphs.

    Examples
    --------
    >>> steps = [ln.build_graph(recording, step) for step in (2, 3, 4, 5)]
    >>> fidelity(steps, steps[:1]).filter(measure="nearest step")["value"].item()  # a copy
    0.0
    """
    require_kinds(real=(real, Sequence), generated=(generated, Sequence))
    if len(real) < 4 or not generated:
        raise InputError(f"{len(real)} real and {len(generated)} generated steps; give at least four and one.")
    for graph in [*real, *generated]:
        require(graph, "edges")
    originals, drawn = ([_Replayed(graph) for graph in graphs] for graphs in (real, generated))
    rows = [
        (name, *measure(originals, drawn), measure(originals[::2], originals[1::2])[0]) for name, measure in _measures()
    ]
    among = [_nearest(step, [*originals[:i], *originals[i + 1 :]]) for i, step in enumerate(originals)]
    nearest = [_nearest(step, originals) for step in drawn]
    rows.append(("nearest step", float(np.mean(nearest)), None, float(np.mean(among))))
    return pl.DataFrame(rows, schema=FIDELITY, orient="row")


class _Replayed:
    """A step with what is compared of it."""

    def __init__(self, graph: Graph) -> None:
        self.result = replay(graph)
        ops = self.result.ops.with_columns(graph.ops["dur_ns"], name=pl.col("name").str.replace(r" \w+=.*$", ""))
        self.ops = ops.filter(~pl.col("kind").is_in(["join", "boundary"])).sort("rank", "start_ns", maintain_order=True)
        nth = pl.int_range(pl.len()).over("rank", "kind", "name")
        timed = self.ops.filter(pl.col("dur_ns") > 0)
        self.profile = timed.select("rank", "kind", "name", log_ns=pl.col("dur_ns").log(), nth=nth)
        self.words = [lane.select("kind", "name").rows() for _, lane in self.ops.group_by("rank", "lane")]

    def column(self, name: str, kinds: Sequence[str]) -> Floats:
        return self.ops.filter(pl.col("kind").is_in(kinds))[name].drop_nulls().to_numpy().astype(np.float64)

    def idle(self) -> Floats:
        end_ns = pl.col("start_ns") + pl.col("dur_ns")
        idle_ns = (pl.col("start_ns") - end_ns.shift(1)).over("rank", "lane")
        return self.ops.select(idle_ns.alias("idle"))["idle"].drop_nulls().to_numpy().astype(np.float64)


Steps = Sequence[_Replayed]
Measure = Callable[[Steps, Steps], tuple[float, float | None]]


def _measures() -> Iterator[tuple[str, Measure]]:
    for name, kinds in KINDS.items():
        yield f"duration of {name}", partial(_two_sample, partial(_Replayed.column, name="dur_ns", kinds=kinds))
    yield "size of messages", partial(_two_sample, partial(_Replayed.column, name="comm_bytes", kinds=["comm"]))
    yield "idle time", partial(_two_sample, _Replayed.idle)
    for n in (1, 2, 3):
        yield f"{n}-grams", partial(_divergence, n)
    yield "makespan", _makespan
    yield "breakdown", _breakdown


def _two_sample(values: Callable[[_Replayed], Floats], a: Steps, b: Steps) -> tuple[float, float | None]:
    ours, theirs = (np.concatenate([values(step) for step in steps]) for steps in (a, b))
    if not len(ours) or not len(theirs):
        return float(len(ours) != len(theirs)), None
    test = ks_2samp(ours, theirs, method="asymp")
    return float(test.statistic), float(test.pvalue)


def _divergence(n: int, a: Steps, b: Steps) -> tuple[float, float | None]:
    def grams(steps: Steps) -> Counter[tuple[object, ...]]:
        lanes = (lane for step in steps for lane in step.words)
        return Counter(gram for lane in lanes for gram in zip(*(lane[i:] for i in range(n)), strict=False))

    ours, theirs = grams(a), grams(b)
    p, q = (np.array([of[key] for key in ours | theirs]) / of.total() for of in (ours, theirs))
    return float(jensenshannon(p, q, base=2) ** 2), None


def _makespan(a: Steps, b: Steps) -> tuple[float, float | None]:
    ours, theirs = (float(np.median([step.result.step_ns for step in steps])) for steps in (a, b))
    return theirs / ours, None


def _breakdown(a: Steps, b: Steps) -> tuple[float, float | None]:
    def mean(steps: Steps) -> pl.DataFrame:
        shares = pl.concat(
            [breakdown(step.result).select("rank", "part", pl.col("share").fill_null(0)) for step in steps]
        )
        return shares.group_by("rank", "part").agg(share=pl.col("share").sum() / len(steps))

    both = mean(a).join(mean(b), on=["rank", "part"], how="full", coalesce=True).fill_null(0.0)
    return float((both["share"] - both["share_right"]).abs().sum()) / 2 / both["rank"].n_unique(), None


def _nearest(step: _Replayed, others: Steps) -> float:
    """Least mean difference of log durations of equal ops: of a rank, kind and name, and of the same number."""
    return min(_apart(step.profile, other.profile) for other in others)


def _apart(a: pl.DataFrame, b: pl.DataFrame) -> float:
    both = a.join(b, on=["rank", "kind", "name", "nth"])
    mean = (both["log_ns"] - both["log_ns_right"]).abs().mean()
    return float("inf") if mean is None else float(mean)  # type: ignore[arg-type]
