"""Networks over sets of tables that price lookups, alone or on what the physical model leaves unexplained.

The network is that of Zha et al., "Pre-train and Search" (MLSys 2023), after Lin et al. (TPDS 2024): one small net
describes each table, descriptions add up over the tables of a call, a second net prices the sum. Sizes are theirs
(128 and 32, 64); here it has two outputs, forward and backward, and learns logarithms. It is trained in torch and kept
as arrays, so that pricing needs numpy alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.costs.embedding_reuse import bins_of
from lumos_nb.costs.embedding_samples import (
    PASSES,
    call_times,
    checked_samples,
    median_errors,
    per_call,
    per_table,
    predicted_times,
)
from lumos_nb.costs.embeddings import PhysicalLookup, described
from lumos_nb.costs.networks import arrays_of, evaluated, layer_shapes, trained
from lumos_nb.display import Shown
from lumos_nb.embedding_tables import Floats
from lumos_nb.errors import UNDECODABLE, CalibrationError, InputError, named
from lumos_nb.whole_files import whole

if TYPE_CHECKING:
    from torch import Tensor

Features = Literal["neuroshard", "lin"]
TABLE_WIDTHS, HEAD_WIDTH = (128, 32), 64
WEIGHT_DECAY, MINIBATCH, EPOCHS, PATIENCE = 1e-4, 64, 600, 60
FARTHEST = 3.0
"""Standard deviations from the mean residual at most: what a network says of sets beyond all that it has seen would be
made up, and a search would find it."""
VALIDATION = 0.15
"""Share of the groups of tables that decide when training stops."""


def features_of(tables: pl.DataFrame, batch: int, kind: Features) -> Floats:
    """What a network reads of each table: (n, 20) or (n, 21), before scaling.

    "lin": logarithms of batch, rows, pooling (0 as 0.001) and dim, and the 17 bins. "neuroshard": the bins, dim, rows
    and lookups, as they are; its authors have the pooling for the last, since their batch is always the same.
    """
    rows, dim, pooling = (tables[name].cast(pl.Float64).to_numpy() for name in ("rows", "dim", "pooling"))
    bins = bins_of(tables, batch)
    if kind == "neuroshard":
        return np.column_stack([bins, dim, rows, batch * pooling])
    logs = np.log(np.column_stack([np.full(len(rows), float(batch)), rows, np.maximum(pooling, 1e-3), dim]))
    return np.column_stack([logs, bins])


@dataclass(frozen=True, slots=True, repr=False)
class LookupNet(Shown):
    """A trained network, on its own or (`base` is not None) on the logarithm of what a physical model misses.

    Attributes
    ----------
    features
        What it reads of a table, see `features_of`.
    mean, std
        Of the features, (f,).
    layers
        Weights (outputs, inputs) and biases in turn: two layers of a table, two of the sum.
    shift, scale
        Mean and standard deviation of the targets, (2,): logarithms of microseconds, or of the physical model's ratio.
    base
        The physical model.
    calls
        It was trained on.
    errors
        Median |predicted / measured - 1|, forward and backward, of the groups that decided when training stopped; where
        `base` has seen them, they say little of others: `unseen_times` tells.
    """

    features: Features
    mean: Floats
    std: Floats
    layers: tuple[Floats, ...]
    shift: Floats
    scale: Floats
    base: PhysicalLookup | None
    calls: int
    errors: tuple[float, float]

    @classmethod
    def fit(
        cls,
        samples: pl.DataFrame,
        *,
        base: PhysicalLookup | None = None,
        features: Features = "lin",
        seed: int = 0,
    ) -> LookupNet:
        """Train on samples of calls.

        Parameters
        ----------
        samples
            As `measure_lookups` gives them.
        base
            A physical model (fitted on the same samples): the network learns the logarithm of what it misses.
        features
            What the network reads of a table.
        seed
            Of initial weights, minibatches, and which groups decide when to stop.

        Raises
        ------
        CalibrationError
            The samples are of fewer than three groups, or have times that are not positive.

        Examples
        --------
        >>> LookupNet.fit(ln.datasets.load("lookup-samples"))      # doctest: +SKIP
        """
        samples = checked_samples(samples)
        times = call_times(samples)
        tables = per_table(samples, lambda frame, batch: features_of(frame, batch, features))
        target = np.log(times) - (0.0 if base is None else np.log(predicted_times(base, samples)))
        call = samples["call"].rle_id().to_numpy().astype(np.int64)
        stop = _held_back(per_call(samples)["group"].to_numpy(), seed)
        mean, std = tables[~stop[call]].mean(axis=0), tables[~stop[call]].std(axis=0) + 1e-6
        shift, scale = target[~stop].mean(axis=0), target[~stop].std(axis=0) + 1e-6
        layers = _trained((tables - mean) / std, call, (target - shift) / scale, stop, seed)
        made = cls(features, mean, std, layers, shift, scale, base, len(times), (np.nan, np.nan))
        return replace(made, errors=median_errors(predicted_times(made, samples)[stop], times[stop]))

    def parts(self, tables: pl.DataFrame, batch: int) -> Floats:
        """Descriptions of tables, (n, 32), and behind them what `base` has."""
        x = (features_of(tables, batch, self.features) - self.mean) / self.std
        x = np.maximum(evaluated(self.layers[:4], x), 0.0)
        return x if self.base is None else np.column_stack([x, self.base.parts(tables, batch)])

    def of_sums(self, sums: Floats) -> Floats:
        """Forward and backward microseconds from sums of parts: (m, k) -> (m, 2)."""
        width = TABLE_WIDTHS[-1]
        x = evaluated(self.layers[4:], sums[:, :width].astype(np.float32)).astype(np.float64)
        if self.base is not None:
            x = np.clip(x, -FARTHEST, FARTHEST)
        learned: Floats = np.exp(x * self.scale + self.shift)
        return learned if self.base is None else learned * self.base.of_sums(sums[:, width:])

    def save(self, path: str | Path) -> Path:
        """Write the arrays, to a file that ends in .npz; `LookupNet.load` reads it, and nothing in it is pickled.

        Raises
        ------
        InputError
            The file has another ending, or cannot be written.
        """
        file = Path(path)
        if file.suffix != ".npz":
            raise InputError(f"{file}: save a network to a file that ends in .npz.")
        arrays: dict[str, Any] = {f"layer_{number}": layer for number, layer in enumerate(self.layers)}
        arrays |= {name: np.asarray(getattr(self, name)) for name in _ARRAYS}
        arrays["base"] = np.array("" if self.base is None else msgspec.json.encode(self.base).decode())
        with whole(file, InputError) as part, part.open("wb") as out:
            np.savez(out, **arrays)
        return file

    @classmethod
    def load(cls, path: str | Path) -> LookupNet:
        """Read what `save` wrote.

        Raises
        ------
        CalibrationError
            The file is missing, or is no such network.
        """
        path = named(path, CalibrationError)
        try:
            found = arrays_of(path)
            kind, base = str(found["features"]), str(found["base"])
            layers = tuple(found[f"layer_{number}"] for number in range(8))
            scales = {name: found[name] for name in ("mean", "std", "shift", "scale")}
            shapes = tuple(layer.shape for layer in layers)
            if kind not in _WIDTHS or shapes != _shapes(_WIDTHS[kind]):
                raise ValueError(f"features {kind!r} and layers {shapes} are no network of this kind")
            if not all(array.dtype.kind == "f" and np.isfinite(array).all() for array in (*layers, *scales.values())):
                raise ValueError("an array of it has what is no finite number")
            return cls(
                features=kind,  # type: ignore[arg-type]
                layers=layers,
                base=msgspec.json.decode(base, type=PhysicalLookup) if base else None,
                calls=int(found["calls"]),
                errors=(float(found["errors"][0]), float(found["errors"][1])),
                **scales,
            )
        except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, *UNDECODABLE) as error:
            raise CalibrationError(
                f"{path}: no network of lookups that can be read ({error}); fit it again."
            ) from error

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        what = "network" if self.base is None else f"network on the physical model of {self.base.name}"
        fitted = described(self.calls, self.errors, "tables that it stopped by")
        typical = {"call_ns": 1e3 * np.exp(self.shift)} if self.base is None else {"correction": np.exp(self.shift)}
        table = pl.DataFrame({"pass": PASSES, "median_error_share": self.errors, **typical})
        return [(f"Lookups by a {what}, features of {self.features}: {fitted}", table)]


_ARRAYS = ("features", "mean", "std", "shift", "scale", "calls", "errors")
_WIDTHS = {"neuroshard": 20, "lin": 21}


def _shapes(width: int) -> tuple[tuple[int, ...], ...]:
    """Of the weights and biases of a network that reads so many features."""
    return tuple(layer_shapes((width, *TABLE_WIDTHS, HEAD_WIDTH, len(PASSES))))


def _held_back(groups: NDArray[np.object_], seed: int) -> NDArray[np.bool_]:
    """Which calls decide when to stop: those of a share of the groups, at least one."""
    names = np.unique(groups.astype(str))
    if len(names) < 3:
        raise CalibrationError(
            f"a network needs samples of 3 groups of tables to train and to stop; there are {len(names)}."
        )
    count = max(1, round(VALIDATION * len(names)))
    return np.isin(groups.astype(str), np.random.default_rng(seed).choice(names, count, replace=False))


def _trained(
    tables: Floats, call: NDArray[np.int64], target: Floats, stop: NDArray[np.bool_], seed: int
) -> tuple[Floats, ...]:
    """Weights and biases after the epoch that was best on the calls held back; everything is scaled already."""
    import torch

    x, y = torch.from_numpy(tables).float(), torch.from_numpy(target).float()
    counts = torch.from_numpy(np.bincount(call))  # the tables of a call follow one another
    firsts = counts.cumsum(0) - counts

    def loss(layers: list[Tensor], some: Tensor) -> Any:
        place = torch.arange(len(some)).repeat_interleave(counts[some])
        ends = counts[some].cumsum(0)
        rows = torch.arange(len(place)) + (firsts[some] - ends + counts[some])[place]
        return _loss(torch, layers, x[rows], place, y[some])

    train, held = np.flatnonzero(~stop), np.flatnonzero(stop)
    return trained(
        _shapes(tables.shape[1]), loss, train, held,
        seed=seed, minibatch=MINIBATCH, epochs=EPOCHS, patience=PATIENCE, weight_decay=WEIGHT_DECAY,
    )  # fmt: skip


def _loss(torch: Any, layers: list[Tensor], x: Tensor, whose: Tensor, y: Tensor) -> Any:
    """Mean squared error of calls; `whose` says which call a row of `x` is of."""
    relu, linear = torch.relu, torch.nn.functional.linear
    of_table = relu(linear(relu(linear(x, *layers[:2])), *layers[2:4]))
    summed = torch.zeros(len(y), of_table.shape[1]).index_add(0, whose, of_table)
    return torch.mean((linear(relu(linear(summed, *layers[4:6])), *layers[6:8]) - y) ** 2)
