"""Small networks of plain layers: trained in torch with early stopping, kept as arrays, evaluated in numpy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float64]
Layers = tuple[Floats, ...]
"""Weights (outputs, inputs) and biases (outputs,) in turn."""
LEARNING_RATE = 1e-3


def arrays_of(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a `.npz` file, nothing of which is unpickled.

    Raises
    ------
    OSError, ValueError
        The file cannot be opened; or is damaged, or holds something else.
    """
    try:
        with warnings.catch_warnings(), path.open("rb") as file:  # which numpy would leave open if it is damaged
            warnings.simplefilter("error")  # numpy warns of headers that it has to mend
            found = np.load(file, allow_pickle=False)
            arrays = {name: found[name] for name in found.files}
        for array in arrays.values():
            if array.dtype.kind == "U":
                array.tolist()  # fails for what are no characters
    except OSError:
        raise
    except Exception as error:  # of a damaged file whatever numpy's zip files, headers and tokens may raise
        raise ValueError(f"no file of arrays: {type(error).__name__}: {error}") from error
    return arrays


def layer_shapes(widths: Sequence[int]) -> list[tuple[int, ...]]:
    """Of the weights and biases of a network with so many inputs, of each layer between, and outputs.

    Examples
    --------
    >>> layer_shapes([2, 8, 1])
    [(8, 2), (8,), (1, 8), (1,)]
    """
    return [shape for inputs, outputs in pairwise(widths) for shape in ((outputs, inputs), (outputs,))]


def evaluated(layers: Sequence[Floats], x: Floats) -> Floats:
    """Outputs for rows of inputs, in their precision, with rectified layers between.

    Examples
    --------
    >>> one = np.array([[1.0, -1.0]]), np.array([0.0])
    >>> evaluated((*one, np.array([[2.0]]), np.array([1.0])), np.array([[3.0, 1.0], [1.0, 3.0]])).tolist()
    [[5.0], [1.0]]
    """
    for number in range(0, len(layers), 2):
        weight, bias = (layer.astype(x.dtype, copy=False) for layer in layers[number : number + 2])
        x = x @ weight.T
        x += bias
        if number + 2 < len(layers):
            np.maximum(x, 0.0, out=x)
    return x


def trained(
    shapes: Sequence[tuple[int, ...]],
    loss: Callable[[list[Tensor], Tensor], Any],
    train: NDArray[np.int64],
    held: NDArray[np.int64],
    *,
    seed: int,
    minibatch: int,
    epochs: int,
    patience: int,
    weight_decay: float = 0.0,
) -> Layers:
    """Train layers by Adam, and keep those of the epoch that was best on what was held back.

    Parameters
    ----------
    shapes
        As `layer_shapes` gives them. Weights begin as Xavier's, those of the last layer at 0, biases at 0.01.
    loss
        Of layers on some samples, given by number.
    train, held
        Numbers of the samples to train on and to stop by.
    seed
        Of initial weights and minibatches.
    minibatch, epochs, patience
        Samples of a step; epochs at most; and those without improvement after which to stop.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    layers = [
        torch.nn.init.xavier_uniform_(torch.empty(shape), generator=generator)
        if len(shape) > 1
        else torch.full(shape, 0.01)
        for shape in shapes
    ]
    layers[-2].zero_()  # so that training begins at the bias, which is a mean, or a model whose residual this is
    layers = [layer.requires_grad_() for layer in layers]
    optimizer = torch.optim.Adam(layers, lr=LEARNING_RATE, weight_decay=weight_decay)
    rows, rest = torch.from_numpy(train), torch.from_numpy(held)
    best, since, kept = np.inf, 0, layers
    for _ in range(epochs):
        for some in torch.split(rows[torch.randperm(len(rows), generator=generator)], minibatch):
            optimizer.zero_grad()
            loss(layers, some).backward()
            optimizer.step()
        with torch.no_grad():
            now = float(loss(layers, rest))
        since = 0 if now < best else since + 1
        if now < best:
            best, kept = now, [layer.detach().clone() for layer in layers]
        if since >= patience:
            break
    return tuple(layer.detach().double().numpy() for layer in kept)
