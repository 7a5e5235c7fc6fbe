"""What fitted kernel costs are shown beside: a plain roofline, the nearest neighbour, boosted trees, a small network.

Each is fitted on a kernel frame with `time_us` and the columns of `with_work`, and then prices another one in
microseconds. All but the first learn how many times longer than the roofline a kernel takes, from the same features.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.config import find_gpu

Floats = NDArray[np.float64]
Predictor = Callable[[pl.DataFrame], Floats]

SHAPE = ("batch", "groups", "m", "n", "k", "rows", "cols", "seq_q", "heads", "kv_heads", "head_dim")
TILES = ((256, 128), (128, 256), (128, 128), (64, 64))
FLAGS = ("op", "pass", "trans", "causal", "implementation")
NEIGHBOURS_OF, NETWORK_OF = 20_000, 6_000
"""Rows that the neighbour is searched among, and that the network is trained on: no more, drawn with a fixed seed."""


def with_sheet(frame: pl.DataFrame) -> pl.DataFrame:
    """Add numbers of the data sheet: `peak` (FLOP/s in the row's format), `bandwidth` (bytes/s), `cores`, `l2`."""
    pairs = frame.select("gpu", "dtype").unique().rows()
    sheets = [(find_gpu(gpu), gpu, dtype) for gpu, dtype in pairs]
    rows = [(gpu, dtype, s.peak(dtype), s.memory_bytes_per_s, float(s.cores), s.l2_bytes) for s, gpu, dtype in sheets]
    sheet = pl.DataFrame(rows, ["gpu", "dtype", "peak", "bandwidth", "cores", "l2"], orient="row")
    return frame.join(sheet, on=["gpu", "dtype"], how="left", maintain_order="left")


def roofline_us(frame: pl.DataFrame) -> Floats:
    """The longer of computing at the peak rate and moving the bytes once, at least 1 us."""
    compute, memory = pl.col("flops") / pl.col("peak"), pl.col("bytes") / pl.col("bandwidth")
    return with_sheet(frame).select(pl.max_horizontal(1e6 * compute, 1e6 * memory, 1.0)).to_series().to_numpy()


def features(frame: pl.DataFrame) -> pl.DataFrame:
    """Logarithms of shapes, of the roofline's arms and of the sheet; waves and tails of tiles; null where absent."""
    m, n = pl.col("m").cast(float), pl.col("n").cast(float)
    waves = {(a, b): (m / a).ceil() * (n / b).ceil() * pl.col("batch").fill_null(1) / pl.col("cores") for a, b in TILES}
    return with_sheet(frame).select(
        *(pl.col(name).cast(float).log().alias(name) for name in SHAPE),
        (pl.col("flops").clip(1) / pl.col("peak")).log().alias("compute"),
        (pl.col("bytes") / pl.col("bandwidth")).log().alias("memory"),
        *(pl.col(name).log().alias(name) for name in ("cores", "l2")),
        *((wave.ceil() / wave).log().alias(f"tail {a}x{b}") for (a, b), wave in waves.items()),
        waves[128, 128].log().alias("waves"),
        (m % 128).alias("m % 128"),
        (n % 128).alias("n % 128"),
    )


def flags(frame: pl.DataFrame, seen: pl.DataFrame) -> Floats:
    """One column of 0 and 1 for every value of `FLAGS` among the rows fitted on."""
    values = [(name, value) for name in FLAGS for value in seen[name].unique().sort() if value is not None]
    columns = [(frame[name] == value).fill_null(False).to_numpy() for name, value in values]
    return np.column_stack([np.zeros(frame.height), *columns]).astype(float)


def roofline(train: pl.DataFrame) -> Predictor:
    """The roofline over one efficiency an op and pass: the median; of all where an op was not seen."""
    seen = train.with_columns(ratio=train["time_us"].to_numpy() / roofline_us(train))
    ratios = seen.group_by("op", "pass").agg(pl.col("ratio").median())
    overall = seen["ratio"].median()

    def predict(frame: pl.DataFrame) -> Floats:
        ratio = frame.select("op", "pass").join(ratios, on=["op", "pass"], how="left", maintain_order="left")["ratio"]
        return np.asarray(roofline_us(frame) * ratio.fill_null(overall).to_numpy())

    return predict


def tree(train: pl.DataFrame) -> Predictor:
    """Gradient-boosted trees (scikit-learn's, as in the trials that set the targets: 300 trees, rate 0.08)."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    known = [column.name for column in features(train) if column.null_count() < train.height]

    def table(frame: pl.DataFrame) -> Floats:
        return np.column_stack([features(frame).select(known).fill_null(float("nan")).to_numpy(), flags(frame, train)])

    least = min(20, max(2, train.height // 10))
    model = HistGradientBoostingRegressor(max_iter=300, learning_rate=0.08, min_samples_leaf=least, random_state=0)
    model.fit(table(train), _log_ratio(train))
    return lambda frame: roofline_us(frame) * np.exp(model.predict(table(frame)))


def nearest(train: pl.DataFrame) -> Predictor:
    """The efficiency of the kernel whose logarithms of shape and sheet are nearest; another op is far."""
    from scipy.spatial import KDTree

    train = _drawn(train, NEIGHBOURS_OF)
    shape = [*SHAPE, "compute", "memory", "cores", "l2"]

    def table(frame: pl.DataFrame) -> Floats:
        return np.column_stack([features(frame).select(shape).fill_null(0.0).to_numpy(), 20.0 * flags(frame, train)])

    search, ratio = KDTree(table(train)), _log_ratio(train)
    return lambda frame: roofline_us(frame) * np.exp(ratio[search.query(table(frame))[1]])


def network(train: pl.DataFrame) -> Predictor:
    """Two hidden layers of 64 over the standardised features; Adam over batches of 256, rate rising, then falling.

    It does not see cores and L2 but through the tails: with them it strays on GPUs that it has not seen.
    """
    import torch

    train = _drawn(train, NETWORK_OF)

    def table(frame: pl.DataFrame) -> Floats:
        return np.column_stack([features(frame).drop("cores", "l2").fill_null(0.0).to_numpy(), flags(frame, train)])

    torch.set_num_threads(1)
    torch.manual_seed(0)
    raw, target = table(train), _log_ratio(train)
    centre, scale = raw.mean(0), np.maximum(raw.std(0), 1e-3)
    layers = [torch.nn.Linear(raw.shape[1], 64), torch.nn.SiLU(), torch.nn.Linear(64, 64), torch.nn.SiLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
    middle, spread = float(target.mean()), max(float(target.std()), 1e-3)
    x = torch.tensor((raw - centre) / scale, dtype=torch.float32)
    y = torch.tensor((target - middle) / spread, dtype=torch.float32)
    steps = 1000 if len(x) > 256 else 300
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=5e-3, total_steps=steps)
    for batch in torch.randint(len(x), (steps, min(256, len(x)))):
        adam.zero_grad()
        torch.nn.functional.smooth_l1_loss(model(x[batch])[:, 0], y[batch], beta=0.3).backward()  # type: ignore[no-untyped-call]
        adam.step()
        rate.step()

    @torch.no_grad()
    def predict(frame: pl.DataFrame) -> Floats:
        inside = torch.tensor((table(frame) - centre) / scale, dtype=torch.float32).clamp(-5, 5)
        ratio = middle + spread * model(inside)[:, 0].numpy().astype(float)
        return np.asarray(roofline_us(frame) * np.exp(ratio))

    return predict


BASELINES: dict[str, Callable[[pl.DataFrame], Predictor]] = {
    "roofline": roofline,
    "neighbour": nearest,
    "tree": tree,
    "network": network,
}


def _log_ratio(train: pl.DataFrame) -> Floats:
    return np.log(train["time_us"].to_numpy() / roofline_us(train))


def _drawn(frame: pl.DataFrame, most: int) -> pl.DataFrame:
    return frame.sample(min(most, frame.height), seed=0)
