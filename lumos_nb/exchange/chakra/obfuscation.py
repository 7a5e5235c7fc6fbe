"""Chakra files that may leave the house: what they are for is kept, what they say of their maker is not.

Types, dependencies, who communicates with whom and how long things take make a workload; names, scopes, shapes, ids and
the files' own remarks do not. Whatever has no column of its own is left out, whoever wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from lumos_nb.display import Shown, format_bytes, format_share, html_fields
from lumos_nb.errors import ABOVE_0, InputError, is_number, require_number, require_whole, shown
from lumos_nb.exchange.chakra.conversion import VERSION, Estimated, RankFiles
from lumos_nb.exchange.chakra.files import rank_files, read_file, read_groups, write_ranks
from lumos_nb.exchange.chakra.messages import COLLECTIVES
from lumos_nb.exchange.chakra.ranks import Job
from lumos_nb.exchange.chakra.tables import NODES, Nodes
from lumos_nb.exchange.chakra.to_nodes import LAG
from lumos_nb.graph import Graph

_KEPT = (
    *("id", "type", "ctrl_deps", "data_deps", "is_cpu_op", "tensor_loc", "comm_type", "comm_priority", "comm_src"),
    *("comm_dst", "comm_tag", "kind", "micro_batch", "step", "rendezvous"),
)
"""Columns that are kept as they are; those of `_SCOPES` and of shapes as the policy says, names and ids made new."""
_SCOPES = ("phase", "layer", "parent")
_SHAPES = ("input_shapes", "output_shapes", "input_types", "output_types")
_COUNTS = ("num_ops", "tensor_size")
_NUMBER = r"\d+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is given away.

    Attributes
    ----------
    names
        "numbered": equal names become one number each. "kept": as they are, but without digits unless shapes are exact.
    scopes
        "hidden", or "kept": phase, layer and outermost operator.
    shapes
        "hidden": neither shapes nor counts of FLOPs and bytes; what goes over the network in powers of two. "bucketed":
        all of these in powers of two, rounded up. "exact".
    time_scale
        What all times are multiplied by; None draws it between a half and two.
    time_jitter
        By how much at most a duration is off, as a share of it; start times are left out then.
    merge
        "none", or "chains": compute nodes of a lane that nothing else comes between are one, which takes as long; so
        nobody sees how many there were, how long each took, or of what kind.
    seed
        Of what is drawn; None takes the system's randomness, so that nobody can draw it again.

    Raises
    ------
    InputError
        A value that is none of these.

    Examples
    --------
    >>> Policy(shapes="bucketed", time_jitter=0.05).names
    'numbered'
    """

    names: Literal["numbered", "kept"] = "numbered"
    scopes: Literal["hidden", "kept"] = "hidden"
    shapes: Literal["hidden", "bucketed", "exact"] = "hidden"
    time_scale: float | None = 1.0
    time_jitter: float = 0.0
    merge: Literal["none", "chains"] = "none"
    seed: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no policy can say."""
        allowed = {
            "names": ("numbered", "kept"), "scopes": ("hidden", "kept"), "shapes": ("hidden", "bucketed", "exact"),
            "merge": ("none", "chains"),
        }  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise InputError(f"{name} is {shown(getattr(self, name))}; it may be {' or '.join(map(repr, values))}.")
        if self.time_scale is not None:  # a secret one
            require_number(ABOVE_0, 1e6, time_scale=self.time_scale)
            object.__setattr__(self, "time_scale", float(self.time_scale))
        if not is_number(self.time_jitter, 0, math.nextafter(1, 0)):
            raise InputError(f"time_jitter is {shown(self.time_jitter)}; give a share from 0 to below 1.")
        object.__setattr__(self, "time_jitter", float(self.time_jitter))
        if self.seed is not None:
            require_whole(0, seed=self.seed)

    def _repr_html_(self) -> str:
        return html_fields(self, "What is given away")


@dataclass(frozen=True, slots=True, repr=False)
class Obfuscated(Shown):
    """A job that may leave the house.

    Attributes
    ----------
    ranks, groups
        Nodes by rank, and ranks by group.
    report
        `what` an outsider can look at, and what is `learned` from it.
    """

    ranks: Mapping[int, Nodes]
    groups: Mapping[str, list[int]]
    report: pl.DataFrame

    def write(self, folder: str | Path, *, prefix: str = "chakra") -> list[Path]:
        """Write a file a rank, and the groups.

        Raises
        ------
        ChakraError
            The folder cannot be written.

        Examples
        --------
        >>> ln.chakra.write(graph, "out/")
        >>> obfuscate("out/", Policy()).write("public/")
        """
        return write_ranks(self.ranks.items(), folder, prefix, self.groups)

    def _shown(self) -> list[tuple[str, pl.DataFrame]]:
        return [(f"What the obfuscated files of {len(self.ranks)} rank(s) still say", self.report)]


def obfuscate(source: str | Path | Nodes | Graph | Estimated, policy: Policy | None = None) -> Obfuscated:
    """Take out of a workload what a policy does not give away.

    Parameters
    ----------
    source
        A folder of Chakra files or one file, nodes, a graph, or an estimate.
    policy
        By default everything is hidden that a simulator does not need, and times are exact.

    Returns
    -------
    Obfuscated
        Nodes of the same types, dependencies and communication, with a report of what these still say.

    Raises
    ------
    ChakraError
        The source cannot be read, or not be said in Chakra.
    InputError
        The policy is none.

    Examples
    --------
    >>> ln.chakra.write(graph, "out/")
    >>> obfuscate("out/", Policy(shapes="bucketed", time_scale=None)).report
    """
    policy = Policy() if policy is None else policy
    if not isinstance(policy, Policy):
        raise InputError(f"policy is a {type(policy).__name__}; give a ln.chakra.Policy.")
    ranks, groups = _read(source)
    rng = np.random.default_rng(policy.seed)
    job = Job.of(ranks, groups)
    tables = _merged(job) if policy.merge == "chains" else job.nodes
    used = [*groups, *sorted({*tables["pg_name"].drop_nulls()} - set(groups))]
    numbers = {name: str(i) for i, name in enumerate(used)}
    scale = 2 ** rng.uniform(-1, 1) if policy.time_scale is None else policy.time_scale
    made = _made(tables, policy, numbers, scale, rng)
    split = made.partition_by("rank", as_dict=True, include_key=False)
    files = {rank: Nodes.of(split[rank,] if (rank,) in split else NODES.empty(), version=VERSION) for rank in ranks}
    listed = {numbers[name]: list(members) for name, members in groups.items()}
    return Obfuscated(files, listed, _report(made, policy, listed))


def _read(source: str | Path | Nodes | Graph | Estimated) -> tuple[dict[int, Nodes], dict[str, list[int]]]:
    if isinstance(source, Nodes):
        return {0: source}, {}
    if isinstance(source, str | Path):
        return {rank: read_file(file) for rank, file in rank_files(source).items()}, read_groups(source)
    files = RankFiles.of(source, None)
    return {rank: files.nodes(rank) for rank in files.tables}, files.groups


def _merged(job: Job) -> pl.DataFrame:
    """The nodes with each chain of compute as one: of what only the next one on its lane waits for, and that one."""
    lane = (
        pl.coalesce("lane", pl.format("{} {}", pl.col("stream").fill_null(0), pl.col("tid").fill_null(0))),
        "is_cpu_op",
    )
    alike = pl.struct("rank", *lane, "step", "micro_batch")
    plain = (pl.col("type") == "COMP_NODE") & (pl.col("kind").fill_null("") != LAG)
    before = pl.when(plain & plain.shift(1).over(alike)).then(pl.col("row").shift(1).over(alike))
    only = job.edges.unique(["src", "dst"]).with_columns(outs=pl.len().over("src"), ins=pl.len().over("dst"))
    only = only.filter((pl.col("outs") == 1) & (pl.col("ins") == 1)).select("src", row="dst")
    pairs = (
        job.nodes[job.order].select("row", before=before).join(only, on="row").filter(pl.col("before") == pl.col("src"))
    )
    head = np.arange(len(job.nodes))
    head[pairs["row"].to_numpy()] = pairs["src"].to_numpy()
    for _ in range(len(head).bit_length()):
        head = head[head]
    nodes = job.nodes.with_columns(head=pl.Series(head))
    ids = nodes.select("rank", "id", now=pl.col("id").gather(pl.col("head")))
    first = pl.all().exclude("dur_us", *_COUNTS, "name", "kind", *_SHAPES).first()
    several, same = pl.len() > 1, pl.col("name").n_unique() == 1
    made = nodes.group_by("head", maintain_order=True).agg(
        first, pl.sum("dur_us"), *(pl.when(pl.col(one).count() > 0).then(pl.sum(one)).alias(one) for one in _COUNTS),
        *(pl.when(~several).then(pl.col(one).first()).alias(one) for one in _SHAPES),
        name=pl.when(same).then(pl.col("name").first()).otherwise(pl.lit("merged")),
        kind=pl.col("kind").sort_by("dur_us").last(),
    )  # fmt: skip
    for name in ("ctrl_deps", "data_deps"):
        needs = (
            made.select("row", "rank", id=name).explode("id").drop_nulls("id").join(ids, on=["rank", "id"], how="left")
        )
        now = needs.group_by("row").agg(pl.coalesce("now", "id").alias(name))
        made = made.drop(name).join(now, on="row", how="left", maintain_order="left")
    return made


def _made(
    tables: pl.DataFrame, policy: Policy, groups: Mapping[str, str], scale: float, rng: np.random.Generator
) -> pl.DataFrame:
    """The nodes that are given away, with `rank`."""
    kept = tables.select("rank", *_KEPT, *(_SCOPES if policy.scopes == "kept" else ()))
    stretch = rng.uniform(1 - policy.time_jitter, 1 + policy.time_jitter, len(tables)) * scale
    names = tables["name"].str.replace_all(_NUMBER, "#") if policy.shapes != "exact" else tables["name"]
    if policy.names == "numbered":
        distinct = tables["name"].unique(maintain_order=True)
        codes = pl.Series(rng.permutation(len(distinct))).cast(pl.String)
        names = tables["name"].replace_strict(distinct, "op" + codes, return_dtype=pl.String)
    made = _renumbered(kept.with_columns(
        name=names, pg_name=tables["pg_name"].replace_strict(dict(groups), default=None, return_dtype=pl.String),
        dur_us=(tables["dur_us"] * stretch).round().cast(pl.UInt64),
        start_us=(tables["start_us"] * (0 if policy.time_jitter else scale)).round().cast(pl.UInt64),
        comm_size=_coarse(tables["comm_size"]) if policy.shapes != "exact" else tables["comm_size"],
        **_lanes(tables),
    ))  # fmt: skip
    if policy.scopes == "kept" and policy.shapes != "exact":
        made = made.with_columns(pl.col("parent", "layer").str.replace_all(_NUMBER, "#"))
    if policy.shapes == "hidden":
        return made
    coarse = policy.shapes == "bucketed"
    made = made.with_columns(_coarse(tables[name]) if coarse else tables[name] for name in _COUNTS)
    return made.with_columns(
        _coarse_text(tables[name]) if coarse and name.endswith("shapes") else tables[name] for name in _SHAPES
    )


def _renumbered(nodes: pl.DataFrame) -> pl.DataFrame:
    """Ids from 0 on, rank by rank, in the order of the file; what names a node that is not there is left out."""
    nodes = nodes.with_row_index("row")
    ids = nodes.select("rank", "id", new=pl.int_range(pl.len(), dtype=pl.UInt64).over("rank")).unique(
        ["rank", "id"], keep="first"
    )
    for name in ("ctrl_deps", "data_deps"):
        needs = nodes.select("row", "rank", id=name).explode("id").drop_nulls("id")
        named = needs.join(ids, on=["rank", "id"]).group_by("row").agg(pl.col("new").alias(name))
        nodes = nodes.drop(name).join(named, on="row", how="left", maintain_order="left")
    return nodes.with_columns(id=pl.int_range(pl.len(), dtype=pl.UInt64).over("rank")).drop("row")


def _lanes(tables: pl.DataFrame) -> dict[str, pl.Series]:
    """Threads and streams under new numbers, a rank's own in the order in which they come."""
    head = pl.col("lane").str.extract(r"^((?:cpu|gpu\d+|net)):?")
    number = pl.col("lane").rank("dense").over("rank")
    own = tables.select(
        lane=pl.when(pl.col("lane").is_not_null()).then(pl.format("{}:{}", head.fill_null("lane"), number)),
        tid=pl.col("tid").rank("dense").over("rank").cast(pl.Int64),
        stream=pl.col("stream").rank("dense").over("rank").cast(pl.Int64),
    )
    return {name: own[name] for name in own.columns}


def _coarse(counts: pl.Series) -> pl.Series:
    """Counts rounded up to a power of two."""
    known = counts.cast(pl.Float64)
    up = pl.select(pl.when(known > 0).then(2 ** known.log(2).round(9).ceil()).otherwise(known)).to_series()
    return up.cast(pl.Int64).alias(counts.name)


def _coarse_text(shapes: pl.Series) -> pl.Series:
    """Shapes whose every extent is rounded up to a power of two."""
    distinct = shapes.drop_nulls().unique()
    numbers = distinct.str.extract_all(_NUMBER)
    texts = distinct.str.replace_all(_NUMBER, "\0")
    made = [_filled(text, found) for text, found in zip(texts, numbers, strict=True)]
    return shapes.replace_strict(distinct, pl.Series(made, dtype=pl.String), default=None).alias(shapes.name)


def _filled(text: str, numbers: list[str]) -> str:
    first, *others = text.split("\0")
    coarse = (str(1 << max(int(number) - 1, 0).bit_length() if int(number) else 0) for number in numbers)
    return first + "".join(number + part for number, part in zip(coarse, others, strict=True))


def _report(nodes: pl.DataFrame, policy: Policy, groups: Mapping[str, list[int]]) -> pl.DataFrame:
    """What is still to be seen."""
    types = nodes["type"].value_counts(sort=True).rows()
    of_name = nodes["name"].value_counts()["count"]
    comm = (
        nodes.filter(type="COMM_COLL_NODE").group_by("comm_type").agg(pl.len(), pl.sum("comm_size")).sort("comm_type")
    )
    named = dict(enumerate(COLLECTIVES))
    said = [f"{n:,} {named.get(kind, kind)} of {format_bytes(size)} in all" for kind, n, size in comm.iter_rows()]
    sizes = "powers of two" if policy.shapes != "exact" else "exact"
    times = "by a factor that is secret" if policy.time_scale is None else f"by a factor of {policy.time_scale:g}"
    times = "exact" if policy.time_scale == 1 else times
    spread = f", each off by up to {format_share(policy.time_jitter)}" if policy.time_jitter else ""
    extents = {"hidden": "none", "bucketed": "powers of two", "exact": "exact, with dtypes and FLOPs"}[policy.shapes]
    of = " or ".join(map(str, sorted({*map(len, groups.values())}))) or "no"
    most = max(of_name.to_list(), default=0)
    words = "their words hidden" if policy.names == "numbered" else "as they are"
    rows = [
        ("ranks", f"{nodes['rank'].n_unique()}, in {len(groups)} groups of {of} ranks"),
        ("nodes", ", ".join(f"{n:,} {kind}" for kind, n in types)),
        ("dependencies", f"all {nodes['data_deps'].list.len().sum():,}: the order of the work, and what can overlap"),
        ("names", f"{len(of_name):,} distinct, {words}"),
        ("repetition", f"one op {most:,} times: counts of layers, steps and micro-batches can be guessed"),
        ("merged", "chains of compute: not how many ops, nor their times" if policy.merge == "chains" else "nothing"),
        ("scopes", "phase, layer and operator" if policy.scopes == "kept" else "none"),
        ("shapes", extents),
        ("network", f"{'; '.join(said) or 'no collective'}; sizes {sizes}"),
        ("times", times + spread),
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=["what", "learned"], orient="row")
