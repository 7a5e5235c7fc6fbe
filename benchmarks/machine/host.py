"""What torch's Python, dispatcher and autograd take for a row of a training step on a CPU, beyond the row's kernel.

A step comes to each of its ops once or a few times, and what it writes in between pushes torch's code out of the
caches. So a small network is trained whose kernels have next to nothing to do, and before each of its passes so much
memory is written; the same code called again at once takes a quarter.
"""

from __future__ import annotations

import polars as pl

from benchmarks.machine.clock import Clock, quiet_process
from lumos_nb.costs.host import Overheads, pooled

LAYERS, WIDTH = 4, 8
"""Linear layers with a ReLU each; their inputs, outputs and batch."""
ROWS = 8 * LAYERS - 1
"""As a work table has them: of a layer 2 forward, 4 backward (of the first no gradient of its input), 2 of updates."""
WRITTEN_BYTES = 2**25
WARM_UP = 5


def measure_host(steps: int = 60) -> Overheads:
    """The host's time for a row of a step (T1, under no name): a sample a step.

    It is one thread's processor time in forward, backward and update, less that of the same kernels called again and
    again, by the number of rows.

    Examples
    --------
    >>> measure_host().cost([None], ["T1"])      # doctest: +SKIP
    array([29.4])
    """
    import torch

    x, bias = torch.rand(WIDTH, WIDTH), torch.rand(WIDTH)
    kernels = [
        lambda: torch.addmm(bias, x, x),
        lambda: torch.relu(x),
        lambda: torch.ops.aten.threshold_backward(x, x, 0),
        *[lambda: torch.mm(x, x)] * 2,
        lambda: torch.sum(x, 0),
        *[lambda: x.add_(x, alpha=-1e-6)] * 2,
    ]
    layers = [
        of(*sizes) for _ in range(LAYERS) for of, sizes in ((torch.nn.Linear, (WIDTH, WIDTH)), (torch.nn.ReLU, ()))
    ]
    model, made = torch.nn.Sequential(*layers), [x]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def forward() -> None:
        with torch.enable_grad():
            made[0] = model(x)

    def backward() -> None:
        torch.autograd.backward(made, [x])

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    with quiet_process():
        clock = Clock("cpu", WRITTEN_BYTES)
        bare_us = LAYERS * sum(clock.least(kernel, "warm_us") for kernel in kernels)
        of_step_us = [
            sum(clock.least(call, "time_us", calls=1) for call in (forward, backward, update))
            for _ in range(WARM_UP + steps)
        ]
    dur_ns = (1e3 * (pl.Series(of_step_us[WARM_UP:]) - bare_us) / ROWS).clip(0)
    return pooled(pl.select(dur_ns=dur_ns, overhead=pl.lit("T1"), name=pl.lit(None, pl.String)))
