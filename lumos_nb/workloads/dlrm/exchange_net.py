"""Exchanges priced by networks, one forward and one backward, from each device's columns and how late it begins.

Sizes are those of Zha et al. (MLSys 2023): 128, 64, 32 and 16. They are trained on samples of placements, measured or
priced, and on the same with the devices in other orders; targets are logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from lumos_nb.costs.networks import Floats, Layers, evaluated, layer_shapes, trained
from lumos_nb.errors import CalibrationError
from lumos_nb.schema import TableSchema
from lumos_nb.workloads.dlrm.pieces import Ints
from lumos_nb.workloads.dlrm.sharding_costs import Exchange

WIDTHS = (128, 64, 32, 16)
ORDERS, MINIBATCH, EPOCHS, PATIENCE = 4, 512, 150, 15
"""Orders of the devices that a sample is trained in; and of the training."""
TEST, STOP = 0.1, 0.1
"""Shares of the samples that score a network, and that decide when its training stops."""
TABLES, DIMS = (10, 60), (4, 8, 16, 32, 64, 128)
MOST_LATE_US, MOST_LOG = 20_000.0, 30.0
"""Lateness that is drawn at most; and the logarithm of a time at most, far from all that a network has learned."""

EXCHANGES = TableSchema(
    "exchange sample",
    {
        "exchange": pl.Int64(),
        "device": pl.Int64(),
        "output_dim": pl.Float64(),
        "late_us": pl.Float64(),  # how long after the first device it begins, forward
        "forward_us": pl.Float64(),
        "backward_us": pl.Float64(),
    },
    keys=("exchange", "device"),
)


def drawn_placements(devices: int, count: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Columns of each device, and how late it begins, in random placements: [count, devices] each.

    10 to 59 tables of random dims go to the device with fewest columns, or, with a chance that is drawn anew for every
    placement, to any device; so placements are more or less even (NeuroShard's "random-dim-greedy"). Devices are up to
    1 to 20 ms late.
    """
    rng = np.random.default_rng(seed)
    dims, late = np.zeros((count, devices)), np.zeros((count, devices))
    for at in range(count):
        chance = rng.random()
        for dim in rng.choice(DIMS, rng.integers(*TABLES)):
            anywhere = rng.random() < chance
            dims[at, rng.integers(devices) if anywhere else dims[at].argmin()] += dim
        late[at] = rng.uniform(0, rng.uniform(MOST_LATE_US / 20, MOST_LATE_US), devices)
    return dims, late - late.min(axis=1, keepdims=True)


def priced_exchanges(exchange: Exchange, devices: int, count: int = 4000, seed: int = 0) -> pl.DataFrame:
    """Samples of `drawn_placements`, priced: a row a device, as `EXCHANGES`."""
    dims, late = drawn_placements(devices, count, seed)
    times = exchange.forward_us(dims, late), exchange.backward_us(dims)
    columns = zip(EXCHANGES.columns, (*np.indices(dims.shape), dims, late, *times), strict=True)
    return EXCHANGES.check(pl.DataFrame({name: np.ravel(values) for name, values in columns}))


PASSES, _SCALES = ("forward", "backward"), ("mean", "std", "shift", "scale")


@dataclass(frozen=True, repr=False)
class ExchangeNet:
    """Networks of exchanges between so many devices; `rest` prices what they do not.

    Attributes
    ----------
    layers
        Forward and backward.
    mean, std
        Of the inputs: of columns and of lateness, (2,) each.
    shift, scale
        Of the logarithms of microseconds, forward and backward, (2,) each.
    rest
        Prices sums of gradients.
    """

    layers: tuple[Layers, Layers]
    mean: Floats
    std: Floats
    shift: Floats
    scale: Floats
    rest: Exchange

    @classmethod
    def fit(cls, samples: pl.DataFrame, rest: Exchange, seed: int = 0) -> tuple[ExchangeNet, pl.DataFrame]:
        """Train on samples; with a row a network of what it says of those that it had not seen.

        Parameters
        ----------
        samples
            As `EXCHANGES`: of every exchange a row for each device.
        rest
            See the attributes.
        seed
            Of weights, minibatches, and which samples are held back.

        Raises
        ------
        CalibrationError
            There are fewer than 50 exchanges, they are not of the same devices, or a time is not positive.
        """
        dims, late, forward, backward = _arrays(samples)
        shift, scale = (np.array([take(np.log(t)) for t in (forward, backward)]) for take in (np.mean, np.std))
        mean, std = (np.array([take(x) for x in (dims, late)]) for take in (np.mean, np.std))
        order = np.random.default_rng(seed).permutation(len(dims))
        ends = np.cumsum([round(len(dims) * share) for share in (TEST, STOP)])
        test, stop, train = np.split(order, ends)
        std, scale = np.maximum(std, 1e-9), np.maximum(scale, 1e-9)
        made = cls(((), ()), mean, std, shift, scale, rest)
        layers = tuple(
            _trained(made._inputs(*given), (np.log(times) - shift[k]) / scale[k], train, stop, seed)
            for k, (given, times) in enumerate((((dims, late), forward), ((dims,), backward)))
        )
        made = cls((layers[0], layers[1]), mean, std, shift, scale, rest)
        says = made.forward_us(dims[test], late[test]), made.backward_us(dims[test])
        rows = [
            scored(name, len(train), said.ravel(), times[test].ravel())
            for name, said, times in zip(
                ("forward exchange", "backward exchange"), says, (forward, backward), strict=True
            )
        ]
        return made, pl.DataFrame(rows)

    def forward_us(self, output_dim: Floats, late_us: Floats) -> Floats:
        """See `Exchange`; what a device is late beyond all that was learned, the others wait for as it is."""
        within = np.minimum(late_us, MOST_LATE_US)
        waits = late_us.max(axis=1, keepdims=True) - late_us - within.max(axis=1, keepdims=True) + within
        took: Floats = self._says(0, output_dim, within) + np.maximum(waits, 0.0)
        return took

    def backward_us(self, output_dim: Floats) -> Floats:
        """See `Exchange`."""
        return self._says(1, output_dim)

    def all_reduce_us(self, size_bytes: Floats) -> Floats:
        """See `Exchange`."""
        return self.rest.all_reduce_us(size_bytes)

    def arrays(self) -> dict[str, Floats]:
        """What `of_arrays` takes."""
        layers = {f"{name}_{k}": one for name, of in zip(PASSES, self.layers, strict=True) for k, one in enumerate(of)}
        return {**layers, **{name: getattr(self, name) for name in _SCALES}}

    @classmethod
    def of_arrays(cls, arrays: dict[str, Floats], devices: int, rest: Exchange) -> ExchangeNet:
        """The networks between so many devices that `arrays` gave.

        Raises
        ------
        KeyError, ValueError
            An array is missing or of another shape.
        """
        layers = []
        for name, inputs in zip(PASSES, (2 * devices, devices), strict=True):
            shapes = layer_shapes([inputs, *WIDTHS, devices])
            layers.append(tuple(arrays[f"{name}_{k}"] for k in range(len(shapes))))
            if [one.shape for one in layers[-1]] != shapes:
                raise ValueError(f"the {name} layers are not of {devices} devices")
        return cls((layers[0], layers[1]), **{name: arrays[name] for name in _SCALES}, rest=rest)

    def _inputs(self, *given: Floats) -> Floats:
        scaled: Floats = np.concatenate([(x - self.mean[k]) / self.std[k] for k, x in enumerate(given)], axis=1)
        return scaled

    def _says(self, which: int, *given: Floats) -> Floats:
        logs = evaluated(self.layers[which], self._inputs(*given)) * self.scale[which] + self.shift[which]
        some = given[0].any(axis=1, keepdims=True)  # nothing is exchanged where no device has outputs
        return np.where(some, np.exp(np.minimum(logs, MOST_LOG)), 0.0)


def scored(name: str, samples: int, predicted: Floats, measured: Floats) -> dict[str, object]:
    """A row of a report: `net`, `samples` that it was trained on, and how far it is right about others."""
    from scipy.stats import spearmanr

    error = float(np.median(np.abs(predicted / measured - 1)))
    rank = float(spearmanr(predicted, measured).statistic)
    return {"net": name, "samples": samples, "unseen": len(measured), "median_error": error, "rank_correlation": rank}


def _arrays(samples: pl.DataFrame) -> tuple[Floats, Floats, Floats, Floats]:
    """[exchanges, devices]: columns, lateness, and the two times."""
    frame = EXCHANGES.check(samples).sort("exchange", "device")
    count, devices = frame["exchange"].n_unique(), frame["device"].n_unique()
    if frame.height != count * devices or count < 50:
        raise CalibrationError(
            f"{frame.height} rows of {count} exchanges between {devices} devices: give 50 exchanges or more, and of "
            "each one row for every device."
        )
    for name in ("forward_us", "backward_us"):
        if not (frame[name].is_finite() & (frame[name] > 0)).all():
            raise CalibrationError(f"samples of exchanges have {name} that is not positive: leave such exchanges out.")
    dims, late, forward, backward = (
        frame[name].to_numpy().reshape(count, devices) for name in list(EXCHANGES.columns)[2:]
    )
    return dims, late, forward, backward


def _trained(inputs: Floats, targets: Floats, train: Ints, stop: Ints, seed: int) -> Layers:
    """Layers, trained on some of the rows in several orders of the devices; both are scaled already."""
    import torch

    rng, devices = np.random.default_rng(seed), targets.shape[1]
    orders = np.stack([rng.permutation(devices) for _ in range(ORDERS)])
    turned = inputs.reshape(len(inputs), -1, devices)[:, :, orders].transpose(2, 0, 1, 3).reshape(-1, inputs.shape[1])
    x, y = torch.from_numpy(turned).float(), torch.from_numpy(targets[:, orders].transpose(1, 0, 2)).float()
    y = y.reshape(-1, devices)
    linear, relu = torch.nn.functional.linear, torch.relu

    def loss(layers: list[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        out = x[rows]
        for number in range(0, len(layers), 2):
            out = linear(out, *layers[number : number + 2])
            out = relu(out) if number + 2 < len(layers) else out
        return torch.mean((out - y[rows]) ** 2)

    every = np.arange(ORDERS)[:, None] * len(inputs)
    train, stop = ((every + rows).ravel() for rows in (train, stop))
    shapes = layer_shapes([inputs.shape[1], *WIDTHS, devices])
    return trained(shapes, loss, train, stop, seed=seed, minibatch=MINIBATCH, epochs=EPOCHS, patience=PATIENCE)
