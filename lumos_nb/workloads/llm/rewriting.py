"""A trace's graph under another model, batch, layout or device: measured ops are the base, changed by what changes.

An edit changes which ops there are (layers, micro-batches, stages: `splicing`) or how long they take (sizes, devices:
`retiming`). A rewritten graph remembers the one that was measured, and a further rewrite of it starts there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec
import polars as pl

from lumos_nb import whatif
from lumos_nb.costs.calibration import Calibration, load_calibration
from lumos_nb.costs.samples import kernel_samples
from lumos_nb.errors import InputError, require_kinds, shown
from lumos_nb.graph import Graph
from lumos_nb.layout import SIZE_OF, Cluster, Parallelism, Training, check
from lumos_nb.repairs import REPORT
from lumos_nb.schema import require
from lumos_nb.traces.run import Run
from lumos_nb.transformer import Transformer
from lumos_nb.workloads.llm.estimates import refuse_endless
from lumos_nb.workloads.llm.exchanging import (
    Prices,
    cut_points,
    resized,
    with_gradients,
    with_sums,
    without_groups,
)
from lumos_nb.workloads.llm.reading import Setup, groups_of, read_setup
from lumos_nb.workloads.llm.regrouping import Pipeline, Runs, ends_of_passes, with_messages
from lumos_nb.workloads.llm.retiming import KERNEL, PARTS, parts_of, ratios, symbols, with_sizes
from lumos_nb.workloads.llm.splicing import splice
from lumos_nb.workloads.llm.stacking import deepened, levelled
from lumos_nb.workloads.llm.structure import MESSAGE, MESSAGES, WORK, Structure, find_structure

MADE: dict[type, tuple[str, ...]] = {
    Transformer: ("layers", "hidden", "heads", "head_dim", "ffn", "vocab", "name", "max_seq"),
    Parallelism: ("tp", "pp", "dp", "chunks", "schedule", "split", "sequence_parallel"),
    Training: ("micro_batch", "global_batch", "seq"),
}
"""Fields that a rewrite makes."""
FIXED: dict[type, tuple[str, ...]] = {
    Transformer: ("kv_heads", "gated", "norm", "moe", "mla"),
    Parallelism: ("cp", "ep", "etp", "zero", "shard"),
    Training: ("dtype", "lora", "recompute", "flash", "optimizer", "capacity", "imbalance"),
}
"""Fields that say which ops there are, which no rewrite changes; the others are left as the trace has them."""


@dataclass(frozen=True, slots=True)
class Rewritten(Graph):
    """A graph that `rewrite` made.

    Attributes
    ----------
    setup
        Model, layout and batch that it is of.
    parts
        The kernels of its ops with their sizes (`retiming.PARTS`).
    measured
        The graph that it was made from, its setup and its parts; and its own ops, by which a later edit is noticed.
    """

    setup: Setup | None = None
    parts: pl.DataFrame = field(default_factory=pl.DataFrame)
    measured: tuple[Graph, Setup, pl.DataFrame, pl.DataFrame] | None = None


def rewrite(
    graph: Graph,
    to: Parallelism | None = None,
    *,
    model: Transformer | None = None,
    train: Training | None = None,
    of: Setup | None = None,
    run: Run | None = None,
    calibration: Calibration | str | None = None,
    cluster: Cluster | None = None,
    onto: Cluster | None = None,
    **sizes: Any,
) -> Rewritten:
    """What a measured step would be with another model, batch or layout.

    The graph's `report` also says what was timed anew, inserted and dropped, and what could not be seen.

    Parameters
    ----------
    graph
        Of one step, as `build_graph` or `rewrite` made it.
    to, model, train
        What is asked for; None is as it was.
    of
        Model, layout and batch of the graph; None reads them from its kernels (`reading.read_setup`).
    run
        The run of the graph, whose events show what host operators hold; None takes `graph.run`.
    calibration
        Prices kernels and collectives before and after: a calibration or its name. None takes that of the GPU that the
        run names, and of the CPU where the graph has no device.
    cluster
        Where it ran, for communication; None is the loopback of one machine, where the graph has no device.
    onto
        Where it is to run, if elsewhere: its GPU's bundled calibration prices kernels, its fabrics communication.
    sizes
        Single fields instead of `to`, `model` and `train`: `layers=4, hidden=256, micro_batch=16, tp=2`.

    Raises
    ------
    LayoutError
        What is asked for cannot be, or cannot be made from this graph.
    InputError
        A field is unknown, or something is missing to time ops anew.

    Examples
    --------
    >>> run = load_run(datasets.path("gpt-single"))
    >>> wide = rewrite(build_graph(run), hidden=256, ffn=1024)
    >>> replay(wide).step_ns
    """
    _require(graph, run, of, cluster, onto)
    base, current, was, parts = _start(graph, of)
    structure = find_structure(base)
    parts = _parts(base, base.run if run is None else run, needed=of is None) if parts is None else parts
    placed = _placed(parts, structure, base)
    was = was or read_setup(base, structure, placed)
    target, ignored = _target(current or was, to, model, train, sizes)
    layers, count = max(was[0].layers, 1), max(was[2].micro_batches(was[1]), 1)
    refuse_endless(*target, ops_of_a_layer=len(base.ops) / (layers * count))
    seen = isinstance(graph, Rewritten) or run is not None or base.run is not None
    edit = _Edit(base, structure, placed, was, target, calibration, cluster, onto, blind=not seen)
    made = edit.graph()
    if ignored:
        edit.notes.append(("not applied", None, len(ignored), 0, f"left as traced: {', '.join(ignored)}"))
    report = pl.concat([made.report, pl.DataFrame(edit.notes, schema=REPORT, orient="row")])
    return Rewritten(
        made.ops, made.edges, made.step, report, made.queue_sizes, made.filled, base.run,
        setup=target, parts=edit.parts.select("op_id", *KERNEL, "time_ns"),
        measured=(base, was, parts, made.ops),
    )  # fmt: skip


def _require(graph: object, run: object, of: object, cluster: object, onto: object) -> None:
    """Raise InputError for what is of another kind than it should be."""
    require(graph, "edges")
    if run is not None:
        require(run, "events")
    require_setup(of)
    require_kinds(cluster=(cluster, Cluster | None), onto=(onto, Cluster | None))


def _start(graph: Graph, of: Setup | None) -> tuple[Graph, Setup | None, Setup | None, pl.DataFrame | None]:
    """The graph to start from, the setup that is changed, that of the graph, and its parts, as far as known.

    A rewritten graph that was not edited since starts from what was measured: so edits do not add up errors.
    """
    if "operator_id" not in graph.ops.columns:
        raise InputError("the graph was not measured: rewrite changes traced steps; estimate() the other one instead.")
    if not isinstance(graph, Rewritten):
        return graph, of, of, None
    current = of or graph.setup
    if graph.measured and graph.ops is graph.measured[3]:
        base, was, parts, _ = graph.measured
        return base, current, was, parts
    return graph, current, current, graph.parts


def require_setup(of: object) -> None:
    """Raise InputError unless it is None, or a model, a layout and a training."""
    kinds = (Transformer, Parallelism, Training)
    is_setup = isinstance(of, tuple) and len(of) == len(kinds) and all(map(isinstance, of, kinds))
    if of is not None and not is_setup:
        raise InputError(f"of is {shown(of)}; give (Transformer(...), Parallelism(...), Training(...)).")


def _parts(graph: Graph, run: Run | None, *, needed: bool) -> pl.DataFrame:
    """The parts of a graph's ops; none where nothing tells sizes, which some edits can do without."""
    try:
        return parts_of(graph, run)
    except InputError:
        if needed:
            raise
        return pl.DataFrame(schema=PARTS)


def _placed(parts: pl.DataFrame, structure: Structure, graph: Graph) -> pl.DataFrame:
    """Parts with the place and name of their op."""
    at = structure.ops.select("op_id", "rank", "phase", "layer", "micro_batch")
    named = parts.join(at, on="op_id", how="left", maintain_order="left")
    return named.join(graph.ops.select("op_id", "name"), on="op_id", how="left", maintain_order="left")


def _target(
    base: Setup, to: Parallelism | None, model: Transformer | None, train: Training | None, sizes: dict[str, Any]
) -> tuple[Setup, list[str]]:
    """What is asked for, checked; and the fields of whole specs that no rewrite applies, which stay as they were."""
    for name, given, kind in (("to", to, Parallelism), ("model", model, Transformer), ("train", train, Training)):
        if given is not None:
            require_kinds(**{name: (given, kind)})
    asked: list[Any] = [given or was for given, was in zip((model, to, train), base, strict=True)]
    owner = {name: i for i, spec in reversed([*enumerate(asked)]) for name in spec.__struct_fields__}
    if unknown := [name for name in sizes if name not in owner]:
        raise InputError(
            f"{unknown[0]}={shown(sizes[unknown[0]])}: no field of Transformer, Parallelism or Training is called so; "
            f"there are: {', '.join(sorted(owner))}."
        )
    ignored: list[str] = []
    for i, (was, spec) in enumerate(zip(base, asked, strict=True)):
        own = {name: value for name, value in sizes.items() if owner[name] == i}
        asks = msgspec.structs.replace(spec, **own) if own else spec
        if isinstance(asks, Transformer) and asks.keys == (
            base[0].kv_heads or asks.heads
        ):  # no key heads: as many as heads
            asks = msgspec.structs.replace(asks, kv_heads=base[0].kv_heads)
        differ = [name for name in asks.__struct_fields__ if getattr(asks, name) != getattr(was, name)]
        for name in differ:
            if name in FIXED[type(was)] or (name in own and name not in MADE[type(was)]):
                measured = getattr(was, name)
                advice = (
                    f"the trace has {shown(measured)}, which no rewrite changes: give that, or estimate() such a step"
                )
                raise asks.refusal(name, advice)
        left = [name for name in differ if name not in MADE[type(was)]]
        ignored += left
        asked[i] = msgspec.structs.replace(asks, **{name: getattr(was, name) for name in left})
    model_, layout, training = asked
    check(model_, layout, training)
    return (model_, layout, training), ignored


def calibration_of(graph: Graph, given: Calibration | str | None) -> Calibration:
    """The calibration that is given, else that of the CPU, or of the only GPU that the run names."""
    if isinstance(given, Calibration):
        return given
    if given is None and graph.ops["device"].is_not_null().any():
        gpus = kernel_samples(graph.run)["gpu"].drop_nulls().unique() if graph.run else pl.Series(dtype=pl.String)
        if len(gpus) != 1:
            raise InputError(
                f"give calibration=, the name of the GPU that was traced: the run names {', '.join(gpus) or 'none'}."
            )
        given = str(gpus[0])
    return load_calibration("cpu" if given is None else given)


@dataclass
class _Edit:
    """The steps of a rewrite; `notes` are its rows of the report."""

    base: Graph
    structure: Structure
    parts: pl.DataFrame
    was: Setup
    target: Setup
    given: Calibration | str | None
    cluster: Cluster | None
    onto: Cluster | None
    blind: bool
    notes: list[tuple[str, int | None, int, int, str]] = field(default_factory=list)

    @cached_property
    def calibration(self) -> Calibration:
        """What prices, before the edit."""
        return calibration_of(self.base, self.given)

    def graph(self) -> Graph:
        """Apply what differs."""
        graph = self._relaid(self.base)
        return self._exchanged(self._retimed(graph))

    def note(self, what: str, rows: pl.DataFrame, detail: str, time: str = "dur_ns") -> None:
        """A row of the report, where there is something to say."""
        if rows.height:
            self.notes.append((what, None, rows.height, int(rows[time].sum()), detail))

    def _pipeline_differs(self) -> bool:
        """Whether passes are other ones, or more or fewer."""
        shape = [
            (layout.pp, layout.chunks, layout.schedule if layout.pp > 1 else "", layout.split, t.micro_batches(layout))
            for _, layout, t in (self.was, self.target)
        ]
        return shape[0] != shape[1]

    def _relaid(self, graph: Graph) -> Graph:
        """With other layers, stages or micro-batches."""
        anew = self._pipeline_differs()
        if not anew and self.was[0].layers == self.target[0].layers:
            return graph
        runs = Runs.of(self.structure)
        pipeline = Pipeline(runs, self.was, self.target)
        plan = pipeline.plan() if anew else deepened(runs.table, self.was, self.target)
        spliced, copies = splice(graph, runs.source, plan.drop("pass", strict=False))
        spliced = levelled(graph, runs, spliced, copies)
        places = copies.select("op_id", "from_id", "layer", "micro_batch", rank="to_rank")
        parts = self.parts.rename({"op_id": "from_id"}).drop("layer", "micro_batch", "rank")
        self.parts = places.join(parts, on="from_id", maintain_order="left").drop("from_id")
        new = spliced.ops.filter(~pl.col("op_id").is_in(graph.ops["op_id"].implode()))
        gone = graph.ops.filter(~pl.col("op_id").is_in(spliced.ops["op_id"].implode()))
        self.note("inserted", new, "copies of measured layers and passes")
        self.note("dropped", gone, "layers, passes and messages that are not there any more")
        if anew and self.target[1].pp > 1:
            spliced = self._with_messages(spliced, copies, plan, pipeline.schedule())
        self.structure = find_structure(spliced)
        return spliced

    def _with_messages(self, graph: Graph, copies: pl.DataFrame, plan: pl.DataFrame, passes: pl.DataFrame) -> Graph:
        model, _, train = self.target
        size = train.micro_batch * train.seq * model.hidden * SIZE_OF[train.kept_dtype]
        ends = ends_of_passes(graph, copies, plan)
        made = with_messages(graph, passes, ends, self._message_ns(size))
        host_ns = _host_of_messages(self.base, self.structure)
        if host_ns:
            where = pl.col("op_id").is_in(ends["last"].implode())
            made = whatif.insert(made, where, "send and receive", host_ns, kind="cpu")
        new = made.ops.filter(~pl.col("op_id").is_in(graph.ops["op_id"].implode()))
        known = "as measured" if host_ns else "not known: none were measured"
        self.note("inserted", new, f"messages of {size} bytes between stages; the host's time for them {known}")
        return made

    def _message_ns(self, size: int) -> int:
        """How long a message takes: as measured between stages, for other sizes by the ratio of predictions."""
        model, _, train = self.was
        old = train.micro_batch * train.seq * model.hidden * SIZE_OF[train.kept_dtype]
        took = self.base.ops.filter((pl.col("kind") == "comm") & pl.col("collective").is_in(MESSAGES))
        received = took.filter(pl.col("collective") != "send")
        measured = float((received if received.height else took)["dur_ns"].median() or 0)  # type: ignore[arg-type]
        if measured and old == size and not self.onto:
            return round(measured)
        ask = (pl.Series(["send"]), pl.Series([size]), pl.Series([2]))
        new_ns = float(self._prices(self.onto).ns(*ask)[0])
        if not measured:
            return round(new_ns)
        return round(measured * new_ns / float(self._prices().ns(ask[0], pl.Series([old]), ask[2])[0]))

    def _prices(self, cluster: Cluster | None = None) -> Prices:
        """Of collectives, on this cluster or the one where it ran."""
        cluster = self.cluster if cluster is None else cluster
        if cluster is None:
            if self.base.ops["device"].is_not_null().any():
                raise InputError("give cluster=Cluster(...), over which communication is to be timed.")
            cluster = Cluster(gpu=self.calibration.gpu, gpus_per_node=1024, inside="Loopback")
        return Prices(cluster, self.calibration)

    def _retimed(self, graph: Graph) -> Graph:
        """With other sizes."""
        old, new = (symbols(*setup) for setup in (self.was, self.target))
        other = load_calibration(self.onto.gpu_sheet.name) if self.onto else None
        if old == new and other is None:
            return graph
        unknown = self.parts.is_empty() or (self.blind and not self.base.ops["kind"].is_in(WORK).any())
        if unknown and (other or old | {"parameters": 0} != new | {"parameters": 0}):
            raise InputError(
                "nothing tells what the ops of this graph compute: without a device that is in the run's events alone, "
                "and with one in the shapes of operators. Give the run, recorded with record_shapes=True: "
                "rewrite(graph, ..., run=run)."
            )
        sized = with_sizes(self.parts, old, new)
        unseen = sized.filter(pl.col("meaning").is_null())
        ratio = pl.Series(ratios(self.parts, sized, self.calibration, other))
        sized = sized.with_columns(new_ns=pl.col("time_ns") * ratio)
        self.note("timed anew", sized.filter(ratio != 1.0), "kernels: predicted over predicted", "time_ns")
        self.note("could not see", unseen, "kernels whose sizes are none of the model's: as before", "time_ns")
        work = pl.col("kind").is_in(WORK) & ~pl.col("op_id").is_in(sized["op_id"].implode())
        self.note("could not see", graph.ops.filter(work), "kernels of unknown sizes: as before")
        more = sized.group_by("op_id").agg(more_ns=(pl.col("new_ns") - pl.col("time_ns")).sum())
        ops = graph.ops.join(more, on="op_id", how="left", maintain_order="left")
        dur_ns = (pl.col("dur_ns") + pl.col("more_ns").fill_null(0)).round().clip(0).cast(pl.Int64)
        self.parts = sized.with_columns(time_ns="new_ns")
        return replace(graph, ops=ops.with_columns(dur_ns=dur_ns).drop("more_ns"))

    def _exchanged(self, graph: Graph) -> Graph:
        """With other communication."""
        layout, before = self.target[1], self.was[1]
        comm = groups_of(graph, self.structure)
        gone = [of for of in ("tp", "dp") if getattr(layout, of) == 1 < getattr(before, of)]
        graph = without_groups(graph, comm, gone)
        self.note("dropped", comm.filter(pl.col("of").is_in(gone)), f"communication of {', '.join(gone)}")
        self.structure = find_structure(graph) if gone else self.structure
        graph = self._priced(graph, comm.filter(~pl.col("of").is_in(gone) & pl.col("comm_bytes").is_not_null()))
        count = len(graph.ops)
        if layout.tp > 1 == before.tp:
            parts = with_sizes(self.parts.drop("meaning", strict=False), *[symbols(*self.target)] * 2)
            graph = with_sums(graph, self.structure, cut_points(parts), self.target, self._prices(self.onto))
        if layout.dp > 1 == before.dp:
            graph = with_gradients(graph, self.structure, self.target, self._prices(self.onto))
        if len(graph.ops) > count:
            new = graph.ops.filter(pl.col("name").is_in(["sum of tensor ranks", "sum of gradients"]))
            self.note("inserted", new, "communication; the host's time to issue it is not known")
        return graph

    def _priced(self, graph: Graph, comm: pl.DataFrame) -> Graph:
        """With the communication that was measured for other sizes and groups."""
        if comm.is_empty() or (self.was == self.target and not self.onto):
            return graph
        measured = self.base.ops.filter(pl.col("kind") == "comm").select("op_id", "rank", "group", "comm_bytes")
        new = resized(comm, measured, self.structure, self.was, self.target)
        other = (pl.col("new_bytes") != pl.col("comm_bytes")) | (pl.col("new_size") != pl.col("group_size"))
        new = new.filter(other | (self.onto is not None))
        if new.is_empty():
            return graph
        old_ns = self._prices().ns(new["collective"], new["comm_bytes"], new["group_size"])
        ratio = self._prices(self.onto).ns(new["collective"], new["new_bytes"], new["new_size"]) / old_ns
        self.note("timed anew", new, "communication: predicted over predicted")
        about = new.select(
            "op_id", comm_bytes=pl.col("new_bytes").cast(pl.Int64), group_size=pl.col("new_size").cast(pl.Int32),
            dur_ns=(pl.col("dur_ns") * pl.Series(ratio)).round().cast(pl.Int64),
        )  # fmt: skip
        return replace(graph, ops=graph.ops.update(about, on="op_id"))


def _host_of_messages(graph: Graph, structure: Structure) -> int:
    """What messages usually cost the host for a pass; 0 where none were measured."""
    rows = structure.ops.join(graph.ops.select("op_id", "kind", "dur_ns"), on="op_id")
    host_ns = pl.col("dur_ns").filter(pl.col("kind").is_in(["gap", "launch", "cpu", "wait"])).sum()
    exchanges = rows.filter(phase=MESSAGE).group_by("rank", "run").agg(host_ns)["dur_ns"]
    passes = rows.filter(pl.col("phase").is_in(["forward", "backward"]) & (pl.col("micro_batch") >= 0))
    count = passes.select("rank", "phase", "micro_batch").unique().height
    return round(float(exchanges.median()) * len(exchanges) / count) if count and len(exchanges) else 0  # type: ignore[arg-type]
