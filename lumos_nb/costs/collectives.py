"""What a collective costs: the fastest of the algorithms that a library has, on the data sheets of what connects GPUs.

An algorithm (`collective_plans`) is a number of latency steps and of bytes on each tier's wire:

    time = launch + steps x latency + bytes on the wire / rate x (1 + (half / bytes) ^ power)

with the slower of the two tiers, inside a node and between nodes, since the stages of one call overlap. Constants are
relative to a sheet's rate and latency. Each fabric has its own, pulled to shared ones by a prior; a fabric without
samples has the shared ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import polars as pl
from numpy.typing import ArrayLike
from scipy.optimize import least_squares
from scipy.sparse import csr_matrix, identity, vstack

from lumos_nb.config import Fabric, fabrics
from lumos_nb.costs.collective_plans import (
    BUS_FACTOR,
    HOST_TIMED,
    PLANS,
    Case,
    Constants,
    fastest,
    time_us,
)
from lumos_nb.costs.collective_tiers import REQUEST, Floats, Layout, Rows, kinds, layout_of, priceable, requests_of
from lumos_nb.costs.intervals import Band
from lumos_nb.costs.tables import Table, as_frame
from lumos_nb.errors import CalibrationError, InputError
from lumos_nb.graph import Graph
from lumos_nb.labels import FUNCTIONAL_OPS, GROUP_METHODS
from lumos_nb.schema import require

__all__ = ["CollectiveModel", "collective_samples", "fit_collectives", "priceable"]

SHARES = ("ring", "tree", "switch", "pair", "network", "power", "far_power")
"""Constants between 0 and 1, fitted by the logarithm of their odds; the others by their own."""
SPREAD = {
    "launch_us": 0.3,
    "power": 0.2,
    "far_power": 0.2,
    "channel_bytes_per_s": 0.2,
    "half": 2.0,
    "pair_half": 2.0,
    "far_half": 1.0,
}
"""How far a fabric's constants lie from the shared ones a priori, in these logarithms; 0.5 for the others. The shared
ones lie twice as far from the defaults."""
NOISE = 0.1
"""Scatter of a measured time, in log, that a fit takes for granted."""
SWEEP_ROWS = 10
"""How many independent rows a sweep counts for: neighbouring sizes err together."""
BAND_BINS = 3
"""How often the width of an interval may change over sizes: there are no more than twenty sweeps of a basis."""
SWEEP = ("source", "hardware", "interconnect", "nodes", "gpus", "collective", "notes")
"""Columns that tell one sweep over sizes from another; those that a frame has."""


class Seen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What samples covered of one collective on one or two tiers."""

    tiers: str
    collective: str
    rows: int
    least_gpus: int
    most_gpus: int
    least_bytes: int
    most_bytes: int


class CollectiveModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants of every fabric with samples and those of the others, and what the samples covered.

    `fit_collectives` makes one; `bands` are its intervals by basis, from sweeps that the fit had not seen.
    """

    shared: Constants
    links: dict[str, Constants]
    seen: tuple[Seen, ...]
    bands: dict[str, Band] = {}

    def predict(self, table: Table, extra: Iterable[Fabric] = ()) -> pl.DataFrame:
        """Price collectives.

        Parameters
        ----------
        table
            Columns of `REQUEST`; where it has `method`, times by the host (`HOST_TIMED`) include its calls. polars,
            pandas, a mapping of columns or a list of rows; collectives may be spelled as torch or NCCL does.
        extra
            Sheets beside the bundled ones; their names and aliases come first.

        Returns
        -------
        frame
            The same rows and `dur_us`, `busbw_gbs`; `low_us` and `high_us` where the model has bands; `basis`
            ("measured": this collective on these tiers; "transferred": another on them; else "data sheet") and
            `out_of_range`: GPUs or bytes beyond what was measured on these tiers, or nothing was.

        Raises
        ------
        SchemaError
            A column is missing.
        InputError
            A collective is unknown, no sheet has a name, or a group cannot be; the message names row and value.

        Examples
        --------
        >>> row = {"hardware": "H100-SXM-80GB", "interconnect": "InfiniBand NDR 400", "nodes": 4, "gpus": 32}
        >>> asked = pl.DataFrame({**row, "collective": "all_gather", "size_bytes": [1 << 20, 1 << 28]})
        >>> cal.collectives.predict(asked)["dur_us"].is_sorted()  # the larger takes longer
        True
        """
        frame, asked = as_frame(table, "collective"), _asked(table)
        layout = layout_of(asked, [*extra, *fabrics()])
        cases = _cases(asked, layout)
        dur_us = fastest(cases, frame.height, self._constants(layout.sheets))
        factor = np.empty(frame.height)
        for case in cases:
            factor[case.rows] = BUS_FACTOR[case.collective](case.layout.n)
        columns = {"dur_us": dur_us, "busbw_gbs": asked["size_bytes"].to_numpy() / dur_us / 1e3 * factor}
        priced = frame.with_columns(**columns).with_columns(self._covered(asked, layout, cases))
        return with_interval(priced, self.bands) if self.bands else priced

    def predict_uneven(
        self, sent_bytes: ArrayLike, hardware: str, interconnect: str, nodes: int = 1, extra: Iterable[Fabric] = ()
    ) -> Floats:
        """Price all-to-alls whose messages differ: the busiest GPU's bytes on the slower tier.

        Parameters
        ----------
        sent_bytes
            [..., n, n]: bytes from each rank (row) to each other (column); ranks of a node are neighbours. The diagonal
            stays where it is and costs nothing.

        Returns
        -------
        dur_us
            [...]: never less than a send of the largest message, and as `predict` where all messages are equal.

        Raises
        ------
        InputError
            The matrices are not square, or their ranks do not fill the nodes; and as `predict`.

        Examples
        --------
        >>> sent = np.full((8, 8), 1 << 20)
        >>> cal.collectives.predict_uneven(sent, "H100-SXM-80GB", "NVLink4/NVSwitch")
        """
        try:
            sent = np.asarray(sent_bytes, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"sent_bytes is no array of numbers: {error}") from error
        if sent.ndim < 2 or not sent.shape[-1] == sent.shape[-2] >= 2 or not ((sent >= 0) & (sent < 2.0**63)).all():
            raise InputError(
                f"sent_bytes of shape {sent.shape}: give [..., n, n] for 2 ranks or more, bytes >= 0 from rank to rank."
            )
        flat, n = sent.reshape(-1, *sent.shape[-2:]), sent.shape[-1]
        about = {"hardware": hardware, "interconnect": interconnect, "nodes": nodes, "gpus": n}
        request = _asked(pl.DataFrame({**about, "collective": "all_to_all", "size_bytes": np.ones(len(flat))}))
        layout = layout_of(request, [*extra, *fabrics()])
        if not len(flat):
            return np.zeros(sent.shape[:-2])
        (case,) = _cases(request, layout)
        node = np.arange(n) // int(layout.g[0])
        others, together = ~np.eye(n, dtype=bool), node[:, None] == node
        plan = case.plans[0]._replace(
            near=_busiest(flat * (others & together)),
            far=_busiest(flat * ~together),
            message=(flat * others).max(axis=(1, 2)),
        )
        dur_us: Floats = time_us(plan, case, self._constants(layout.sheets)).reshape(sent.shape[:-2])
        return dur_us

    def table(self) -> pl.DataFrame:
        """The constants, a row a fabric: `fabric` ("any other" last) and a column each."""
        rows = chain(self.links.items(), [("any other", self.shared)])
        return pl.DataFrame([{"fabric": name, **msgspec.structs.asdict(constants)} for name, constants in rows])

    def _constants(self, sheets: tuple[Fabric, ...]) -> dict[str, Floats]:
        each = [msgspec.structs.astuple(self.links.get(sheet.name, self.shared)) for sheet in sheets]
        return dict(zip(Constants.__struct_fields__, np.array(each).reshape(len(each), len(_IS_SHARE)).T, strict=False))

    def _covered(self, asked: pl.DataFrame, layout: Layout, cases: list[Case]) -> list[pl.Series]:
        """`basis` and `out_of_range`."""
        names, code = layout.tiers()
        seen: dict[str, list[Seen]] = {name: [one for one in self.seen if one.tiers == name] for name in names}
        basis = np.array([1 if seen[name] else 2 for name in names], dtype=np.int64)[code]
        for case in cases:
            measured = np.array([any(one.collective == case.collective for one in seen[name]) for name in names])
            basis[case.rows[measured[code[case.rows]]]] = 0
        outside = np.zeros(asked.height, dtype=bool)
        for column, least, most in (("gpus", "least_gpus", "most_gpus"), ("size_bytes", "least_bytes", "most_bytes")):
            low = np.array([min((getattr(one, least) for one in seen[name]), default=np.inf) for name in names])
            high = np.array([max((getattr(one, most) for one in seen[name]), default=-np.inf) for name in names])
            value = asked[column].to_numpy()
            outside |= (value < low[code]) | (value > high[code])
        return [pl.Series("basis", BASES).gather(basis), pl.Series("out_of_range", outside)]


BASES = ("measured", "transferred", "data sheet")


def _busiest(sent: Floats) -> Floats:
    """[k]: the most that a rank of each of the matrices [k, n, n] sends or receives."""
    most: Floats = np.maximum(sent.sum(axis=2), sent.sum(axis=1)).max(axis=1)
    return most


_OTHER_NAMES = {
    **GROUP_METHODS,
    **FUNCTIONAL_OPS,
    **{form.replace("_", ""): name for name in PLANS for form in (name, f"nccl{name}")},
    **{name.replace("_", sign): name for name in PLANS for sign in "- "},
}
"""Other spellings of collectives: torch's and NCCL's, in lower case."""


def _asked(table: Table) -> pl.DataFrame:
    return requests_of(table, PLANS, _OTHER_NAMES)


def _cases(asked: pl.DataFrame, layout: Layout) -> list[Case]:
    first, kind = kinds(asked["collective"])
    size, hosted = asked["size_bytes"].to_numpy(), asked["method"].is_in(HOST_TIMED).fill_null(value=False).to_numpy()
    cases = []
    for index, name in enumerate(asked["collective"].gather(first)):
        rows = np.flatnonzero(kind == index)
        part = layout.take(rows)
        cases.append(Case(name, rows, size[rows], hosted[rows], part, PLANS[name](part.n, part.g, part.nodes)))
    return cases


def collective_samples(graph: Graph, hardware: str, interconnect: str, gpus_per_node: int) -> pl.DataFrame:
    """Collectives that a step's graph measured, from the last rank's arrival to the last rank's end.

    Parameters
    ----------
    graph
        Of `build_graph`: a collective's transfer comes after the join of all its ranks.
    hardware, interconnect
        What the ranks are and what the outermost tier between them is, in the names of sheets.
    gpus_per_node
        Ranks of a node, which follow one another.

    Returns
    -------
    frame
        A sample a collective: `REQUEST`, `dtype`, `time_us`, `source`, `method`, `step`. What lacks a rank's trace or a
        size is left out, and so is what `PLANS` does not know; a message is timed to its receiver's end.

    Raises
    ------
    InputError
        `graph` is no graph, or none of its collectives has all ranks and a size.

    Examples
    --------
    >>> collective_samples(graph, "cpu", "loopback", 2)["collective"].unique().to_list()
    ['all_reduce']
    """
    require(graph, "edges")
    joins = graph.ops.filter(pl.col("kind") == "join").select(join="op_id", arrived_ns="start_ns")
    transfers = graph.ops.filter((pl.col("kind") == "comm") & (pl.col("collective") != "send"))
    message = pl.col("collective") == "recv"
    found = (
        graph.edges.select(join="src", op_id="dst")
        .join(joins, on="join")
        .join(transfers, on="op_id")
        .group_by("join", maintain_order=True)
        .agg(
            pl.col("step", "dtype").first(),
            collective=pl.when(message).then(pl.lit("send_recv")).otherwise("collective").first(),
            nodes=(pl.concat_list("rank", pl.when(message).then("peer").otherwise("rank")) // gpus_per_node)
            .explode()
            .n_unique()
            .cast(pl.Int64),
            gpus=pl.when(message).then(2).otherwise("group_size").max().cast(pl.Int64),
            ranks=pl.when(message).then(2).otherwise(pl.col("rank").n_unique()).max(),
            size_bytes=pl.col("comm_bytes").max(),
            time_us=((pl.col("start_ns") + pl.col("dur_ns")).max() - pl.col("arrived_ns").first()) / 1e3,
        )
        .filter((pl.col("ranks") == pl.col("gpus")) & pl.col("size_bytes").is_not_null() & (pl.col("time_us") > 0))
        .filter(pl.col("collective").is_in(list(PLANS)))
    )
    if found.is_empty():
        raise InputError(
            "no collective of this graph has the traces of all its ranks and a size: record every rank, with a torch "
            "that writes 'In msg nelems' (2.3 and later) or with lumos_nb's recorder."
        )
    about = {"hardware": hardware, "interconnect": interconnect, "source": "trace", "method": "after the last arrival"}
    return found.with_columns(pl.lit(text).alias(name) for name, text in about.items()).select(
        *REQUEST, "dtype", "time_us", "source", "method", "step"
    )


def fit_collectives(samples: pl.DataFrame, extra: Iterable[Fabric] = (), *, folds: int = 0) -> CollectiveModel:
    """Fit the constants of every fabric in `samples`, and those of the others.

    The least error of log(predicted / measured), squared while small and linear for outliers; every sweep weighs the
    same. A hierarchical prior (Gelman et al., *Bayesian Data Analysis*, ch. 5) holds the constants of a fabric to the
    shared ones, so that few samples move it little.

    Parameters
    ----------
    samples
        Columns of `REQUEST` and `time_us`; `source` and `notes` tell sweeps apart, `method` may be in `HOST_TIMED`.
    extra
        Sheets beside the bundled ones.
    folds
        Into how many parts the sweeps go, each predicted by a fit to the others, for the interval of predictions; 0:
        no interval.

    Raises
    ------
    CalibrationError
        There is no sample, or a time is not positive; and as `CollectiveModel.predict`.

    Examples
    --------
    >>> samples = datasets.load("measured-collectives").filter(hardware="H100-SXM-80GB", collective="all_reduce")
    >>> fit_collectives(samples.filter(priceable(samples)), folds=0).table()
    """
    times = samples["time_us"].cast(pl.Float64).to_numpy() if "time_us" in samples.columns else np.zeros(0)
    if not times.size or not ((times > 0) & (times < np.inf)).all():
        raise CalibrationError(
            "a fit of collectives needs rows with time_us above 0: measure a sweep over sizes of each collective, with "
            "nccl-tests or make calibrate."
        )
    asked = _asked(samples)
    layout = layout_of(asked, [*extra, *fabrics()])
    fitted = _least_error(_cases(asked, layout), times, _sweeps(samples), layout)
    shared, *links = [Constants(**dict(zip(Constants.__struct_fields__, row, strict=True))) for row in fitted.tolist()]
    names, code = layout.tiers()
    gpus, sizes = pl.col("gpus").cast(pl.Int64), pl.col("size_bytes").cast(pl.Int64)
    seen = (
        asked.with_columns(tiers=pl.Series(names).gather(code))
        .group_by("tiers", "collective", maintain_order=True)
        .agg(
            rows=pl.len(),
            least_gpus=gpus.min(),
            most_gpus=gpus.max(),
            least_bytes=sizes.min(),
            most_bytes=sizes.max(),
        )
    )
    return CollectiveModel(
        shared=shared,
        links={sheet.name: link for sheet, link in zip(layout.sheets, links, strict=True)},
        seen=tuple(msgspec.convert(row, Seen) for row in seen.to_dicts()),
        bands=bands_of(_unseen(samples, list(extra), folds)) if folds else {},
    )


def _sweeps(samples: pl.DataFrame) -> Rows:
    """[rows]: number of the sweep that a row is of."""
    return kinds(*(samples[column] for column in SWEEP if column in samples.columns))[1]


def _unseen(samples: pl.DataFrame, extra: list[Fabric], folds: int) -> pl.DataFrame:
    """The samples with their `sweep`, priced by fits without it: the sweeps are left out in so many parts."""
    samples = samples.with_columns(sweep=_sweeps(samples))
    parts = []
    for fold in range(folds):
        held = pl.col("sweep") % folds == fold
        if (rest := samples.filter(~held)).height and (part := samples.filter(held)).height:
            parts.append(fit_collectives(rest, extra).predict(part, extra))
    if not parts:
        raise CalibrationError("an interval needs two sweeps or more: measure another collective or number of GPUs.")
    return pl.concat(parts)


def bands_of(unseen: pl.DataFrame) -> dict[str, Band]:
    """Intervals by basis, from rows with `time_us`, `sweep` and the `dur_us` and `basis` of a fit without the sweep."""
    bands = {}
    for (basis,), part in unseen.group_by("basis"):
        residual = (part["time_us"] / part["dur_us"]).log().to_numpy()
        bands[str(basis)] = Band.fitted(residual, _log_size(part), part["sweep"].to_numpy(), bins=BAND_BINS)
    return bands


def _log_size(frame: pl.DataFrame) -> Floats:
    size: Floats = frame["size_bytes"].cast(pl.Float64).to_numpy()
    return np.log(np.maximum(size, 1.0))


def with_interval(priced: pl.DataFrame, bands: Mapping[str, Band]) -> pl.DataFrame:
    """Add `low_us` and `high_us` to rows with `dur_us` and `basis`; a basis without a band has that of a worse one."""
    dur_us = priced["dur_us"].to_numpy()
    low_us, high_us, log_size = np.empty_like(dur_us), np.empty_like(dur_us), _log_size(priced)
    for at, basis in enumerate(BASES):
        rows = (priced["basis"] == basis).to_numpy()
        if rows.any():
            band = next(bands[name] for name in (*BASES[at:], *reversed(BASES[:at])) if name in bands)
            low_us[rows], high_us[rows] = band.around(dur_us[rows], log_size[rows])
    return priced.with_columns(low_us=low_us, high_us=high_us)


_IS_SHARE = np.array([name in SHARES for name in Constants.__struct_fields__])
_SPREAD = np.array([SPREAD.get(name, 0.5) for name in Constants.__struct_fields__])


def _least_error(cases: list[Case], times: Floats, sweep: Rows, layout: Layout) -> Floats:
    """[1 + sheets, constants]: the shared ones and each sheet's."""
    weight = np.sqrt(SWEEP_ROWS / np.bincount(sweep)[sweep]) / NOISE
    shape = 1 + len(layout.sheets), len(_IS_SHARE)

    def residual(departures: Floats) -> Floats:
        constants = dict(zip(Constants.__struct_fields__, _natural(departures.reshape(shape))[1:].T, strict=True))
        return np.concatenate([(np.log(fastest(cases, len(times), constants) / times)) * weight, departures])

    of_sheet = np.zeros((len(times), shape[0]), dtype=bool)
    of_sheet[:, 0] = of_sheet[np.arange(len(times)), 1 + layout.near] = True
    of_sheet[np.arange(len(times)), 1 + layout.far] = True
    sparsity: Any = vstack([csr_matrix(np.repeat(of_sheet, shape[1], axis=1)), identity(shape[0] * shape[1])])
    fit = least_squares(
        residual,
        np.zeros(shape[0] * shape[1]),
        loss="soft_l1",
        x_scale="jac",
        tr_solver="lsmr",
        jac_sparsity=sparsity,
        max_nfev=80,
    )
    return _natural(fit.x.reshape(shape))


def _natural(departures: Floats) -> Floats:
    """Constants from their departures in units of `SPREAD`: row 0 the shared ones', the others from the shared ones."""
    start = np.array(msgspec.structs.astuple(Constants()))
    odds = np.log(np.where(_IS_SHARE, start / np.where(_IS_SHARE, 1 - start, 1.0), start))
    scaled = odds + _SPREAD * (2 * departures[:1] + np.vstack([np.zeros_like(departures[:1]), departures[1:]]))
    return np.where(_IS_SHARE, 1 / (1 + np.exp(-scaled)), np.exp(scaled))
