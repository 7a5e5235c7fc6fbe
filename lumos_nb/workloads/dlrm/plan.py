"""Which device holds which part of which embedding table: a plan, checked, with what each device then has to do.

A table lies on one device (`table_wise`), is cut by columns (`column_wise`: every part is looked up by the same indices
and gives some of the output's columns), by rows (`row_wise`: every device looks up the indices that it has and gives
partial sums), by rows inside of nodes (`grid_shard`: some or all of its columns are a node's, cut by rows over its
devices, and partial sums are added up before they leave the node), or is on every device (`data_parallel`: looked up
for the device's own samples, its gradients are added up). The names are TorchRec's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from lumos_nb.display import format_bytes, format_ns, format_share
from lumos_nb.embedding_tables import complete_tables
from lumos_nb.errors import (
    ABOVE_0,
    InputError,
    LayoutError,
    is_number,
    is_word,
    items_of,
    require_kinds,
    require_text,
    require_whole,
    shown,
)
from lumos_nb.number_formats import ELEMENT_BYTES
from lumos_nb.schema import TableSchema
from lumos_nb.traces.export import Tables
from lumos_nb.transformer import plain

KINDS = ("table_wise", "column_wise", "row_wise", "grid_shard", "data_parallel")

SHARDS = TableSchema(
    "shard",
    {
        "table": pl.String(),
        "device": pl.Int64(),  # 0-based
        "kind": pl.String(),  # of KINDS; one for all shards of a table
        "first_row": pl.Int64(),
        "rows": pl.Int64(),
        "first_column": pl.Int64(),
        "dim": pl.Int64(),
        "bytes": pl.Int64(),  # weights and optimizer state; gradients as well where the table is data_parallel
    },
)

STATE_BYTES = {
    # optimizer: bytes a weight, bytes a row
    "sgd": (0, 0),
    "row_wise_adagrad": (0, 4),
    "adagrad": (4, 0),
    "adam": (8, 0),
}
"""What an optimizer keeps of a shard, in fp32."""

SPLITS = {"table": pl.String(), "kind": pl.String(), "shards": pl.Int64(), "why": pl.String()}
FIGURES = ("forward_us", "backward_us", "forward_exchange_us", "backward_exchange_us")
"""Parts of a device's time: lookups, and exchanges of their outputs and of their gradients."""


def shard_bytes(
    rows: NDArray[np.int64], dim: NDArray[np.int64], element_bytes: NDArray[np.float64], optimizer: str = "sgd"
) -> NDArray[np.float64]:
    """Weights and optimizer state of shards.

    Raises
    ------
    LayoutError
        The optimizer is unknown.

    Examples
    --------
    >>> shard_bytes(np.array([1000]), np.array([64]), np.array([4.0]), "row_wise_adagrad").tolist()
    [260000.0]
    """
    if not is_word(optimizer, STATE_BYTES):
        raise LayoutError(f"no optimizer is called {shown(optimizer)}; there are: {', '.join(STATE_BYTES)}.")
    of_weight, of_row = STATE_BYTES[optimizer]
    held: NDArray[np.float64] = rows * (dim * (element_bytes + of_weight) + of_row)
    return held


def element_bytes(tables: pl.DataFrame) -> NDArray[np.float64]:
    """Bytes of one weight of each table."""
    return tables["dtype"].replace_strict(ELEMENT_BYTES, return_dtype=pl.Float64).to_numpy()


def positive_bytes(memory_bytes: float | Sequence[float], *shapes: tuple[int, ...]) -> NDArray[np.float64]:
    """What devices may hold as an array of one of the shapes, or LayoutError."""
    given = plain(memory_bytes)
    sizes = given if isinstance(given, tuple) else (given,)
    sound = all(is_number(size, ABOVE_0) or (isinstance(size, float) and size == np.inf) for size in sizes)
    memory = np.asarray(given if sound else (), dtype=np.float64)
    if memory.shape not in shapes or not memory.size:
        raise LayoutError(
            f"memory_bytes is {shown(memory_bytes)}: give positive bytes, for all or each of the devices."
        )
    return memory


def row_blocks(rows: int, devices: int) -> list[int]:
    """Rows of a table on each device when it is cut by rows: blocks of one size, what is left on the last (TorchRec).

    Examples
    --------
    >>> row_blocks(10, 4)
    [3, 3, 3, 1]
    """
    block = -(-rows // devices)
    return [max(0, min(block, rows - block * device)) for device in range(devices)]


@dataclass(frozen=True, repr=False)
class Plan(Tables):
    """Embedding tables on devices. `Plan.of` checks what makes one; `ln.shard` finds one.

    Attributes
    ----------
    tables
        The tables: `table`, `rows`, `dim`, `pooling`, `dtype`, and the bins of their reuse.
    frame
        A row a shard: `table`, `device`, `kind`, `first_row`, `rows`, `first_column`, `dim`, `bytes`.
    devices
        A row a device: `device`, `shards`, `bytes`, `memory_bytes` (what it may hold), `output_dim` (columns of outputs
        and partial sums that it sends); once priced also `forward_us`, `backward_us` of its lookups,
        `forward_exchange_us`, `backward_exchange_us` of what it exchanges (waiting for others included) and their sum
        `total_us`.
    splits
        A row a table that is not table-wise: `table`, `kind`, `shards` and `why`.
    optimizer
        Whose state is among the bytes; of `STATE_BYTES`.
    """

    tables: pl.DataFrame
    frame: pl.DataFrame
    devices: pl.DataFrame
    splits: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SPLITS))
    optimizer: str = "sgd"

    @classmethod
    def of(
        cls,
        tables: pl.DataFrame,
        shards: pl.DataFrame,
        memory_bytes: Sequence[float],
        *,
        optimizer: str = "sgd",
        why: dict[str, str] | None = None,
    ) -> Self:
        """Make a plan of shards, and check it.

        Parameters
        ----------
        tables
            What `complete_tables` takes.
        shards
            `table` and `device`; the other columns of `SHARDS` (but `bytes`) where a shard is less than its table.
        memory_bytes
            What each device may hold.
        optimizer
            Whose state counts.
        why
            Why a table is split, by its name.

        Raises
        ------
        LayoutError
            As `complete_tables`; or an element of a table lies nowhere or twice, a shard reaches beyond its table, a
            device or table is unknown, or a device holds more than it may. The message names table or device
            and says what to do.

        Examples
        --------
        >>> tables = pl.DataFrame({"table": ["a", "b"], "rows": [100, 50], "dim": 8, "pooling": 1.0, "dtype": "fp32"})
        >>> plan = Plan.of(tables, pl.DataFrame({"table": ["a", "b"], "device": [0, 1]}), [4000, 4000])
        >>> plan.devices["bytes"].to_list()
        [3200, 1600]
        """
        require_kinds(shards=(shards, pl.DataFrame), why=(why, Mapping | None))
        memory = items_of("memory_bytes", memory_bytes, "the bytes of each device")
        caps = positive_bytes(memory, (len(memory),))
        tables = complete_tables(tables)
        frame = _whole_shards(tables, shards)
        _check_cover(tables, frame, len(caps))
        size = np.ceil(_held(tables, frame, optimizer)).astype(np.int64)
        plan = frame.with_columns(bytes=pl.Series(size)).sort("device", "table", "first_column", "first_row")
        plan = SHARDS.check(plan).select(*SHARDS.columns)
        splits = _splits(tables, plan, why or {})
        return cls(tables, plan, _loads(plan, caps), splits, optimizer)

    @property
    def lookups(self) -> pl.DataFrame:
        """What each shard has to look up: the shards as tables, in the order of `frame`.

        The columns of `tables` with the shard's rows, dim and pooling (a row-wise shard has its rows' share of a
        table's lookups), `device`, `kind`, and `batch_share`, the part of a batch that it is looked up for: all of it,
        but for a data-parallel table the device's own samples.
        """
        own = self.frame.select("table", "device", "kind", shard_rows="rows", shard_dim="dim")
        joined = own.join(self.tables, on="table", how="left", maintain_order="left")
        of_rows = pl.col("shard_rows") / pl.col("rows")
        alike = pl.col("kind") == "data_parallel"
        return joined.with_columns(
            pooling=pl.col("pooling") * of_rows,
            batch_share=pl.when(alike).then(1 / self.devices.height).otherwise(1.0),
            rows="shard_rows",
            dim="shard_dim",
        ).select(*self.tables.columns, "device", "kind", "batch_share")

    @property
    def total_us(self) -> float:
        """Time of the slowest device.

        Raises
        ------
        InputError
            The plan is not priced: `ShardingCosts.price` does.
        """
        if "total_us" not in self.devices.columns:
            raise InputError("the plan has no times: costs.price(plan) gives it some.")
        return float(self.devices["total_us"].max())  # type: ignore[arg-type]

    @property
    def balanced_us(self) -> float:
        """Time if lookups were spread evenly over the devices and none waited for another."""
        _ = self.total_us
        lookups, back, ahead = FIGURES[:2], FIGURES[3], FIGURES[2]
        even = self.devices.select(pl.sum_horizontal(*lookups).mean() + pl.col(back).mean() + pl.col(ahead).min())
        return float(even.item())

    def with_figures(self, **columns: NDArray[np.float64]) -> Self:
        """The plan with these times of each device, of `FIGURES`, in place of those it had.

        Raises
        ------
        LayoutError
            They are no numbers, one a device.
        """
        count = self.devices.height
        for name, given in columns.items():
            asked: object = given  # of any kind
            if isinstance(asked, np.ndarray) and asked.dtype == np.float64 and asked.shape == (count,):
                continue  # as prices are
            times_us = plain(asked)
            if not isinstance(times_us, tuple) or len(times_us) != count or not all(map(is_number, times_us)):
                raise LayoutError(f"{name} is {shown(given)}: give the time of each of the {count} devices.")
        devices = self.devices.drop("total_us", strict=False).with_columns(
            **{k: pl.Series(v) for k, v in columns.items()}
        )
        return replace(self, devices=devices.with_columns(total_us=pl.sum_horizontal(*FIGURES)))

    def to_torchrec(
        self, module: str = "sparse_arch.embedding_bag_collection", device_type: str = "cuda", gpus_per_node: int = 8
    ) -> str:
        """The plan as JSON in the words of TorchRec.

        TorchRec has no file format of plans: the nesting and the names are those of its `ShardingPlan`,
        `ParameterSharding` and `ShardMetadata` (torchrec 1.8), and a placement is what `torch.distributed`'s
        `remote_device` reads.

        Parameters
        ----------
        module
            Where the model has its `EmbeddingBagCollection`.
        device_type
            "cuda" or "cpu".
        gpus_per_node
            A rank's GPU is its number within the node.

        Raises
        ------
        InputError
            A name is no text, or the number of GPUs none.
        """
        require_text(module=module, device_type=device_type)
        require_whole(1, gpus_per_node=gpus_per_node)
        parameters = {}
        for (table,), shards in self.frame.sort("first_column", "first_row", "device").group_by(
            "table", maintain_order=True
        ):
            kind, rows = shards["kind"][0], list(shards.iter_rows(named=True))
            spec = [
                {
                    "shard_offsets": [row["first_row"], row["first_column"]],
                    "shard_sizes": [row["rows"], row["dim"]],
                    "placement": f"rank:{row['device']}/{device_type}:{row['device'] % gpus_per_node}",
                }
                for row in rows
            ]
            alike = kind == "data_parallel"
            in_one_node = kind == "grid_shard" and shards["first_column"].n_unique() == 1
            parameters[table] = {
                "sharding_type": "table_row_wise" if in_one_node else kind,
                "compute_kernel": "dense" if alike else "fused",
                "ranks": [row["device"] for row in rows],
                "sharding_spec": None if alike else {"shards": spec},
            }
        return msgspec.json.format(msgspec.json.encode({"plan": {module: parameters}})).decode()

    def _tables(self) -> dict[str, pl.DataFrame]:
        return {"frame": self.frame, **super()._tables()}

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        """Captions and frames, times in ns, which display draws in natural units."""
        times = [name for name in (*FIGURES, "total_us") if name in self.devices.columns]
        devices = self.devices.with_columns(load_share=pl.col("bytes") / pl.col("memory_bytes"))
        devices = devices.with_columns((pl.col(times) * 1e3).name.map(lambda name: f"{name.removesuffix('_us')}_ns"))
        text = f"{self.tables.height} tables in {self.frame.height} shards on {devices.height} devices"
        if times:
            text += f": {format_ns(self.total_us * 1e3)}, spread evenly {format_ns(self.balanced_us * 1e3)}"
        fullest = devices.sort("load_share", descending=True).row(0, named=True)
        text += f"; device {fullest['device']} is the fullest, {format_share(fullest['load_share'])}"
        shown = [(text, devices.drop(*times))]
        return [*shown, ("split tables", self.splits)] if self.splits.height else shown


def _whole_shards(tables: pl.DataFrame, shards: pl.DataFrame) -> pl.DataFrame:
    """The shards with all columns but their bytes: what is not said is the whole table."""
    if missing := [name for name in ("table", "device") if name not in shards.columns]:
        raise LayoutError(f"the shards lack column(s) {', '.join(missing)}; give table and device of each.")
    sizes, numbers = tables.select("table", "rows", "dim"), {*SHARDS.columns} - {"table", "kind", "bytes"}
    try:
        exact = shards.select(pl.col(name).cast(pl.Int64) for name in shards.columns if name in numbers)
        own = shards.with_columns(pl.col("table").cast(pl.String), *exact)
    except pl.exceptions.PolarsError as error:
        raise LayoutError(f"the shards have a column that is none: {str(error).splitlines()[0]}.") from error
    for name in exact.columns:
        if (cut := shards[name].is_not_null() & (shards[name] != exact[name])).any():
            raise LayoutError(f"a shard has {name} = {shards[name].filter(cut)[0]}: give whole numbers.")
    frame = own.join(sizes, on="table", how="left", suffix="_all", maintain_order="left")
    whole = {
        "kind": pl.lit("table_wise"),
        "first_row": pl.lit(0, pl.Int64),
        "first_column": pl.lit(0, pl.Int64),
        "rows": pl.col("rows_all" if "rows" in own.columns else "rows"),
        "dim": pl.col("dim_all" if "dim" in own.columns else "dim"),
    }
    filled = [
        pl.coalesce(pl.col(name), value).alias(name) if name in own.columns else value.alias(name)
        for name, value in whole.items()
    ]
    frame = frame.with_columns(filled).select("table", "device", *whole)
    return frame.with_columns(pl.col("first_row", "first_column", "rows", "dim").cast(pl.Int64))


def _check_cover(tables: pl.DataFrame, frame: pl.DataFrame, devices: int) -> None:
    """Raise LayoutError unless every element of every table lies on one device, or all of a table on every one."""
    sizes = tables.select("table", all_rows="rows", all_dim="dim")
    own = frame.join(sizes, on="table", how="left")
    _refuse(own, pl.col("all_rows").is_null(), "is not among the tables: name one of them")
    _refuse(own, ~pl.col("kind").is_in(KINDS), f"has a shard of unknown kind: give one of {', '.join(KINDS)}")
    out = ~pl.col("device").is_between(0, devices - 1)
    _refuse(own, out.fill_null(value=True), f"has a shard on device {{device}}: there are devices 0 to {devices - 1}")
    _refuse(own, pl.col("kind").n_unique().over("table") > 1, "has shards of several kinds: give all of them one")
    empty = (pl.col("rows") < 1) | (pl.col("dim") < 1)
    _refuse(own, empty, "has a shard of {rows} rows and {dim} columns: leave out what is empty")
    widths = pl.col("dim").n_unique().over("table", "first_column")
    _refuse(own, (pl.col("kind") == "grid_shard") & (widths > 1), "has shards of several dims from {first_column} on")
    for cut, first, length, every, over in (
        ("row_wise", "first_row", "rows", "all_rows", ["table", "first_column"]),
        ("column_wise", "first_column", "dim", "all_dim", ["table"]),
    ):
        full = (pl.col(first) == 0) & (pl.col(length) == pl.col(every))
        text = (
            f"is not {cut}, yet a shard has {length} {{{length}}} from {first} {{{first}}} of {{{every}}}: give it all"
        )
        cuts = pl.col("kind").is_in([cut, "grid_shard"])
        _refuse(own, ~cuts & ~full, text)
        parts = own.filter(cuts).sort("table", "first_column", "first_row")
        if cut == "column_wise":  # of a grid's columns the first rows
            parts = parts.filter((pl.col("kind") == cut) | (pl.col("first_row") == 0))
        end = pl.col(first) + pl.col(length)
        text = f"has a shard from {first} {{{first}}}, which is not where the one before it ends: cover all once"
        _refuse(parts, pl.col(first) != end.shift(1, fill_value=0).over(over), text)
        ends = parts.group_by(over, maintain_order=True).agg(pl.col(every).first(), end=end.max())
        _refuse(
            ends,
            pl.col("end") != pl.col(every),
            f"has shards of {length} {{end}} in all, not {{{every}}}: cover all once",
        )
    count = pl.len().over("table")
    _refuse(own, (pl.col("kind") == "table_wise") & (count > 1), "is table_wise but has several shards: leave one")
    on_all = pl.struct("device").n_unique().over("table") == devices
    alike = pl.col("kind") == "data_parallel"
    _refuse(own, alike & ~(on_all & (count == devices)), "is data_parallel: give one whole shard on every device")
    lost = sizes.join(frame, on="table", how="anti")
    _refuse(lost, pl.lit(value=True), "has no shard: put it on a device")


def _refuse(frame: pl.DataFrame, bad: pl.Expr, text: str) -> None:
    """Raise LayoutError for the first bad row: its table, and the text with its values."""
    found = frame.filter(bad)
    if found.height:
        row = found.row(0, named=True)
        raise LayoutError(f"table {row['table']!r} {text.format(**row)}.")


def _held(tables: pl.DataFrame, frame: pl.DataFrame, optimizer: str) -> NDArray[np.float64]:
    """[shards]: bytes of each; a data-parallel table's gradients are there as a whole before they are added up."""
    sizes = tables.select("table", "dtype")
    own = frame.join(sizes, on="table", how="left", maintain_order="left")
    rows, dim, element = own["rows"].to_numpy(), own["dim"].to_numpy(), element_bytes(own)
    gradients: NDArray[np.float64] = (own["kind"] == "data_parallel").to_numpy() * rows * dim * element
    return shard_bytes(rows, dim, element, optimizer) + gradients


def _loads(frame: pl.DataFrame, caps: NDArray[np.float64]) -> pl.DataFrame:
    """`Plan.devices` without times, or LayoutError where one holds more than it may."""
    sent = pl.when(pl.col("kind") != "data_parallel").then("dim").otherwise(0).sum()
    held = frame.group_by("device").agg(shards=pl.len().cast(pl.Int64), bytes=pl.col("bytes").sum(), output_dim=sent)
    every = pl.DataFrame({"device": np.arange(len(caps)), "memory_bytes": caps})
    devices = every.join(held, on="device", how="left", maintain_order="left").with_columns(
        pl.col("shards", "bytes", "output_dim").fill_null(0)
    )
    if (over := devices.filter(pl.col("bytes") > pl.col("memory_bytes"))).height:
        row = over.row(0, named=True)
        largest = frame.filter(pl.col("device") == row["device"]).sort("bytes", descending=True).row(0, named=True)
        raise LayoutError(
            f"device {row['device']} would hold {format_bytes(row['bytes'])} of {format_bytes(row['memory_bytes'])}, "
            f"{format_bytes(largest['bytes'])} of it table {largest['table']!r}: move or split some of its tables."
        )
    return devices.select("device", "shards", "bytes", "memory_bytes", "output_dim")


def _splits(tables: pl.DataFrame, frame: pl.DataFrame, why: dict[str, str]) -> pl.DataFrame:
    split = frame.filter(pl.col("kind") != "table_wise")
    rows = split.group_by("table").agg(pl.col("kind").first(), shards=pl.len().cast(pl.Int64))
    order = tables.select("table").join(rows, on="table", maintain_order="left")
    reasons = pl.Series("why", [why.get(table, "") for table in order["table"]], dtype=pl.String)
    return order.with_columns(reasons).select(list(SPLITS))
