"""What lookups in embedding tables take by the traffic that they cause.

`PhysicalLookup` counts cache lines: those that a lookup reads, and those that caches miss (`embedding_reuse`). On a GPU
tables whose samples run at once share the cache, as in Lin et al., "Building a Performance Model for Deep Learning
Recommendation Model Training on GPUs" (HiPC 2022), whose hit rate for uniform indices this generalises.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
from scipy.optimize import least_squares, nnls

from lumos_nb.config import Gpu
from lumos_nb.costs.embedding_reuse import in_units, misses, new_rows, reuse
from lumos_nb.costs.embedding_samples import call_sums, call_times, checked_samples, median_errors, unseen_times
from lumos_nb.display import Shown
from lumos_nb.embedding_tables import Floats
from lumos_nb.errors import UNDECODABLE, CalibrationError, InputError, named, require_kinds
from lumos_nb.number_formats import ELEMENT_BYTES
from lumos_nb.whole_files import whole


class Cache(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds what was used last: `unit_bytes` are loaded at once, `size_bytes` kept. A TLB's unit is a page."""

    name: str
    unit_bytes: int
    size_bytes: float


class PhysicalLookup(Shown, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lookups priced by the traffic that they cause: every kind of it costs its own time, and times add up.

    One kind is of a call as a whole: a backward pass makes the gradients of all its tables before the optimizer reads
    those of the first, so that of more than a cache holds some have left it.

    Attributes
    ----------
    name
        Of the device.
    line_bytes
        What is read at once: 32 on a GPU (a sector), 64 on a CPU.
    caches
        Those whose misses count.
    resident_bags
        Samples of all tables that are looked up at once, which decides how many tables share a cache; 1 on a CPU.
    forward_us, backward_us
        Of each of `costs_named`.
    calls, errors
        What it was fitted on (0: on nothing), and the median |predicted / measured - 1|, forward and backward, of
        groups of tables that a fit had not seen; None: none was left out.

    Examples
    --------
    >>> PhysicalLookup.of_sheet(cluster.gpu_sheet)
    """

    name: str
    line_bytes: int
    caches: tuple[Cache, ...]
    resident_bags: float = 1.0
    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    calls: int = 0
    errors: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that no fit gives: they would price silently wrong."""
        wanted = len(costs_named(self.caches))
        for costs in (self.forward_us, self.backward_us):
            if len(costs) != wanted or not all(0 <= cost < np.inf for cost in costs):
                raise CalibrationError(f"lookups on {self.name}: {costs} are not {wanted} costs from 0 on; fit again.")

    def save(self, path: str | Path) -> Path:
        """Write the model as JSON; `PhysicalLookup.load` reads it.

        Raises
        ------
        InputError
            The file cannot be written.
        """
        file = named(path)
        with whole(file, InputError) as part:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        return file

    @classmethod
    def load(cls, path: str | Path) -> PhysicalLookup:
        """Read what `save` wrote.

        Raises
        ------
        CalibrationError
            The file is missing, or is no such model.
        """
        try:
            return msgspec.json.decode(named(path, CalibrationError).read_bytes(), type=cls)
        except (OSError, *UNDECODABLE, CalibrationError) as error:
            raise CalibrationError(f"{path}: no model of lookups that can be read ({error}); fit it again.") from error

    @classmethod
    def of_sheet(cls, gpu: Gpu) -> PhysicalLookup:
        """What holds before any measurement: the sheet's bandwidth, a cache 2.5 times as fast, 5 us for a launch.

        The ratio is between those that Lin et al. measured (1.6 on an A100, 3.5 on a V100), the launch theirs; 45 warps
        a multiprocessor, a sample each, are those of FBGEMM's kernel. A backward pass reads and writes what a forward
        pass reads. A sheet called "cpu", as `make calibrate` writes it, is of one thread with lines of 64 bytes and a
        TLB of 2,048 pages; there a miss costs by the sheet too, and nothing else does.
        """
        require_kinds(gpu=(gpu, Gpu))
        on_cpu, byte_us = gpu.name == "cpu", 1e6 / gpu.memory_bytes_per_s
        line, share = (64, 1.0) if on_cpu else (32, 0.9)
        caches = [Cache(name="L2", unit_bytes=line, size_bytes=share * gpu.l2_bytes)]
        caches += [Cache(name="TLB", unit_bytes=4096, size_bytes=2048 * 4096.0)] if on_cpu else []
        traffic = [line * byte_us / 2.5, 0.0, line * byte_us, *[0.0] * (3 * len(caches))]
        start = [5.0, 0.0, 0.0, 0.0, byte_us]
        return cls(
            name=gpu.name, line_bytes=line, caches=tuple(caches), resident_bags=1.0 if on_cpu else 45.0 * gpu.cores,
            forward_us=tuple(start + traffic), backward_us=tuple(start + [2 * us for us in traffic]),
        )  # fmt: skip

    @classmethod
    def fit(cls, samples: pl.DataFrame, gpu: Gpu, *, folds: int = 8) -> PhysicalLookup:
        """Fit what each kind of traffic costs, never less than nothing; caches are the sheet's.

        Least squares on logarithms of time, soft where a call is far off (`scipy.optimize.least_squares`).

        Parameters
        ----------
        samples
            As `measure_lookups` gives them.
        gpu
            The sheet of the device.
        folds
            Groups of tables are left out in so many parts to know the error; 0: it stays unknown.

        Raises
        ------
        SchemaError
            A column is missing or of another type.
        CalibrationError
            There are fewer samples than costs, or one has a time that is not positive.

        Examples
        --------
        >>> samples = datasets.load("lookup-samples").filter(pl.col("group").is_in(["0", "1"]))
        >>> PhysicalLookup.fit(samples, ln.load_calibration("cpu").gpu)
        """
        checked, start = checked_samples(samples), cls.of_sheet(gpu)
        made = start._fitted(checked)
        if not folds or checked["group"].n_unique() < 2:
            return made
        unseen = unseen_times(checked, start._fitted, folds)
        return msgspec.structs.replace(made, errors=median_errors(unseen, call_times(checked)))

    def _fitted(self, samples: pl.DataFrame) -> PhysicalLookup:
        """The same device with costs fitted on checked samples."""
        traffic, times = self._traffic(call_sums(samples, self)), call_times(samples)
        if len(times) <= traffic.shape[1]:
            raise CalibrationError(
                f"{len(times)} calls cannot tell {traffic.shape[1]} costs apart; record lookups for longer."
            )
        forward, backward = (_costs(traffic, time) for time in times.T)
        return msgspec.structs.replace(self, forward_us=forward, backward_us=backward, calls=len(times))

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(self._caption(), self.costs())]

    def costs(self) -> pl.DataFrame:
        """What each kind of traffic costs: `cost`, `forward_ns`, `backward_ns`."""
        forward, backward = (1e3 * np.array(us) for us in (self.forward_us, self.backward_us))
        return pl.DataFrame({"cost": costs_named(self.caches), "forward_ns": forward, "backward_ns": backward})

    def _caption(self) -> str:
        return f"Lookups on {self.name}: {described(self.calls, self.errors)}"

    def parts(self, tables: pl.DataFrame, batch: int) -> Floats:
        """Traffic of each table: (n, k), columns as `parts_named` has them."""
        columns = ("rows", "dim", "pooling")
        rows, dim, pooling = (tables[name].cast(pl.Float64).to_numpy() for name in columns)
        row_bytes = dim * tables["dtype"].replace_strict(ELEMENT_BYTES, return_dtype=pl.Float64).to_numpy()
        lookups, lines = batch * pooling, np.ceil(row_bytes / self.line_bytes)
        distinct, often = reuse(tables, batch)
        new = new_rows(distinct, rows)
        ones, together = np.ones(len(rows)), max(self.resident_bags / batch, 1.0)
        found = [ones, ones * batch, lookups, 12 * lookups + (8 + row_bytes) * batch, lines * lookups]
        for cache in self.caches:
            units = np.ceil(row_bytes / cache.unit_bytes)
            touched = in_units(distinct, often, rows, row_bytes / cache.unit_bytes)
            missed = misses(*touched, cache.size_bytes / together / (units * cache.unit_bytes))
            found += [missed, missed * units]
        return np.column_stack([*found, new, new * lines])

    def of_sums(self, sums: Floats) -> Floats:
        """Forward and backward microseconds from sums of parts: (m, k) -> (m, 2)."""
        priced: Floats = self._traffic(sums) @ np.array([self.forward_us, self.backward_us]).T
        return priced

    def _traffic(self, sums: Floats) -> Floats:
        """What each of `costs_named` is paid for, of calls with these sums of parts: (m, k) -> (m, costs)."""
        lines_bytes = sums[:, parts_named(self.caches).index("lines")] * self.line_bytes
        beyond = [np.maximum(lines_bytes - cache.size_bytes, 0.0) / self.line_bytes for cache in self.caches]
        return np.column_stack([np.ones(len(sums)), sums, *beyond])


def parts_named(caches: Sequence[Cache]) -> list[str]:
    """Names of the parts of a `PhysicalLookup`."""
    missed = [f"{what} beyond {cache.name}" for cache in caches for what in ("rows", "units")]
    return ["tables", "samples", "lookups", "streamed bytes", "lines", *missed, "new rows", "new lines"]


def costs_named(caches: Sequence[Cache]) -> list[str]:
    """Names of what a `PhysicalLookup` has costs of: a call, each of its parts, and lines of all the call's tables."""
    return ["call", *parts_named(caches), *(f"call's lines beyond {cache.name}" for cache in caches)]


def _costs(traffic: Floats, time_us: Floats) -> tuple[float, ...]:
    """Non-negative costs of each kind of traffic that explain times, all to about the same share."""
    relative = traffic / time_us[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)
    unit = relative / scale
    start = np.maximum(nnls(unit, np.ones(len(unit)))[0], 1e-6)
    found = least_squares(
        lambda costs: np.log(unit @ costs), start, jac=lambda costs: unit / (unit @ costs)[:, None],
        bounds=(0, np.inf), loss="soft_l1", f_scale=0.1,
    )  # fmt: skip
    kept = np.where(found.x > 1e-5, found.x, 0.0)  # of any call less than a thousandth of a percent: nothing
    return tuple(float(cost) for cost in kept / scale)


def described(calls: int, errors: tuple[float, float] | None, of: str = "tables that it had not seen") -> str:
    """What a model was fitted on and how far off it is, in words."""
    if errors is None:
        return f"{calls:,} calls, none left out to know the error" if calls else "by the data sheet, nothing measured"
    forward, backward = errors
    return f"{calls:,} calls; median error on {of} {forward:.1%} forward, {backward:.1%} backward"
