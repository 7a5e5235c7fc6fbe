"""What would a step take otherwise: a measured one with other speeds, or one that nobody ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ipywidgets as ui
import msgspec
import polars as pl

from lumos_nb import charts, whatif
from lumos_nb.config import fabrics, find_gpu, gpus
from lumos_nb.critical_path import Result, replay
from lumos_nb.display import format_ns, format_share
from lumos_nb.errors import require_kinds, require_whole
from lumos_nb.findings import step_spread
from lumos_nb.graph import Graph, Recording
from lumos_nb.layout import Cluster, Parallelism, Training
from lumos_nb.partition import breakdown
from lumos_nb.transformer import Transformer, models
from lumos_nb.widgets.panel import (
    BELOW,
    WIDE,
    WIDTH_PX,
    Controls,
    Panel,
    Shown,
    arguments,
    choice,
    literal,
    number,
    slider,
)
from lumos_nb.workloads.llm.estimates import Estimate, estimate
from lumos_nb.workloads.llm.schedule import CHUNKS

SCALED = ("kernel", "cpu", "gap", "launch", "memcpy", "memset", "comm", "wait")
"""Kinds of ops that get a slider."""
NETWORK = {"bandwidth_factor": 1.0, "latency_us": 0}
"""Controls of the network, as measured."""


def what_if(graph: Graph) -> Panel:
    """Make kinds of ops faster or slower, and the network: the step as it was and then, its parts, what to beware of.

    Parameters
    ----------
    graph
        Of one step.

    Examples
    --------
    >>> what_if(build_graph(run, step=3))
    """
    require_kinds(graph=(graph, Graph))
    before = replay(graph)
    parts_before = breakdown(before)
    spread = step_spread(Recording.of(graph.run)).row(0, named=True) if graph.run else None
    present = set(graph.ops.filter(pl.col("dur_ns") > 0)["kind"])
    kinds = [kind for kind in SCALED if kind in present]
    controls = {kind: slider(description=f"{kind} x", value=1.0, min=0.0, max=3.0, step=0.05) for kind in kinds}
    if "comm" in present:
        controls["bandwidth_factor"] = slider(description="bandwidth x", value=1.0, min=0.1, max=8.0, step=0.1)
        controls["latency_us"] = ui.IntSlider(
            description="latency + us", value=0, min=-100, max=1000, continuous_update=False, style=WIDE
        )

    def draw(after: Result, **_: float) -> Shown:
        yield "\n".join(_in_words(before, after, spread))
        parts = {"as it was": parts_before, "then": breakdown(after)}
        yield charts.breakdown_bars(parts, width_px=WIDTH_PX).configure_legend(**BELOW)

    return Panel(controls, partial(_edited, graph, before), draw, partial(_edits, graph))


def _edited(graph: Graph, before: Result, **asked: float) -> Result:
    """The replay with the speeds that the controls ask for."""
    scales, network = _asked(asked)
    changed = graph
    if scales:
        by = pl.col("kind").replace_strict(scales, default=1.0)
        changed = whatif.scale(changed, pl.col("kind").is_in([*scales]), by=by)
    if network:
        changed = whatif.network(changed, pl.col("kind") == "comm", **network)
    return before if changed is graph else replay(changed)


def _edits(graph: Graph, **asked: float) -> str:
    """The lines of `_edited`."""
    scales, network = _asked(asked)
    lines = [f"graph = ln.build_graph(run, step={graph.step})"]
    if scales:
        by = f"{{{', '.join(f'{kind!r}: {literal(by)}' for kind, by in scales.items())}}}"
        scale = f"pl.col('kind').is_in({[*scales]}), by=pl.col('kind').replace_strict({by}, default=1.0)"
        lines.append(f"graph = ln.whatif.scale(graph, {scale})")
    if network:
        lines.append(f"graph = ln.whatif.network(graph, pl.col('kind') == 'comm', {arguments(network)})")
    return "\n".join([*lines, "result = ln.replay(graph)"])


def _asked(values: Mapping[str, float]) -> tuple[dict[str, float], dict[str, Any]]:
    """Scales by kind and arguments of `whatif.network`, of what is not as measured."""
    scales = {kind: by for kind, by in values.items() if kind not in NETWORK and by != 1}
    network = {name: values[name] for name, was in NETWORK.items() if values.get(name, was) != was}
    if "latency_us" in network:
        network["latency_ns"] = 1000 * int(network.pop("latency_us"))
    return scales, network


def _in_words(before: Result, after: Result, spread: Mapping[str, Any] | None) -> Shown:
    times = after.step_ns / before.step_ns
    yield f"{format_ns(before.step_ns)} as it was, {format_ns(after.step_ns)} then: {format_share(times - 1)}"
    if spread is None:
        yield "This graph was not built from a run: how far its steps scatter is not known."
        return
    low_ns, high_ns = (format_ns(times * spread[end]) for end in ("least_ns", "most_ns"))
    yield f"As far as the {spread['steps']} inner steps of the run lie apart: {low_ns} to {high_ns}."
    if 0 < abs(times - 1) < (spread["noise_share"] or 0):
        yield f"Beware: steps of this run differ by {format_share(spread['noise_share'])} anyway."
    if before.graph.filled:
        yield f"Beware: {len(before.graph.filled)} ranks were not measured; they are copies."


OF_MODEL = ("layers", "hidden", "heads", "ffn")
OF_LAYOUT = ("tp", "pp", "dp", "cp", "ep", "zero", "schedule", "chunks", "sequence_parallel")
OF_TRAINING = ("micro_batch", "global_batch", "seq", "recompute", "lora", "dtype")
OF_CLUSTER = ("gpu", "nodes", "inside", "between")


def configure(model: str = "llama-3-8b", gpu: str = "H100-SXM-80GB", nodes: int = 1) -> Panel:
    """Estimate a step from configuration: model, layout, batch, GPU and network, each a control.

    The estimate has its interval and warnings; beside it stand the breakdown of every pipeline rank, as it is and as it
    was before the last change, and the memory of each, with what a GPU has.

    Parameters
    ----------
    model, gpu, nodes
        What to begin with: names of `Transformer.named` and of a data sheet, and nodes of eight GPUs.

    Examples
    --------
    >>> configure("llama-3-8b", nodes=1)
    """
    require_whole(1, 10**9, nodes=nodes)
    Transformer.named(model), find_gpu(gpu)
    last: list[Estimate] = []

    def make(**values: Any) -> Estimate:
        found = estimate(*_configured(values))
        last[:] = [*last[-1:], found]
        return found

    def draw(found: Estimate, **_: Any) -> Shown:
        yield found
        names = ("",) if len(last) < 2 else ("before", "then")
        parts = {name: one.breakdown for name, one in zip(names, last, strict=True)}
        yield charts.breakdown_bars(parts, width_px=WIDTH_PX).configure_legend(**BELOW)
        room = found.cluster.gpu_sheet.memory_bytes
        yield charts.memory_bars(found.memory, limit_bytes=room, width_px=WIDTH_PX).configure_legend(**BELOW)

    return Panel(_configuration(model, gpu, nodes), make, draw, _configured_code, fit=_sizes_followed())


def _configuration(model: str, gpu: str, nodes: int) -> dict[str, ui.ValueWidget]:
    sizes = [2**n for n in range(8)]
    named = [fabric.name for fabric in fabrics()]
    controls: dict[str, ui.ValueWidget] = {"model": choice("model", list(models()), model)}
    controls |= {name: number(name, 1, least=1) for name in OF_MODEL}
    controls |= {
        "gpu": choice("gpu", [sheet.name for sheet in gpus()], gpu),
        "nodes": number("nodes", nodes),
        "inside": choice("inside", named, "NVLink4 NVSwitch"),
        "between": choice("between", named, "InfiniBand NDR 400"),
    }
    controls |= {name: choice(name, sizes, 1) for name in ("tp", "pp", "cp", "ep")}
    controls |= {"dp": number("dp", 8 * nodes), "zero": choice("zero", [0, 1, 2, 3], 3)}
    controls |= {"schedule": choice("schedule", list(CHUNKS), "1f1b"), "chunks": number("chunks", 1)}
    controls |= {"sequence_parallel": ui.Checkbox(value=False, description="sequence parallel", style=WIDE)}
    controls |= {"micro_batch": number("micro_batch", 1), "global_batch": number("global_batch", 64 * nodes)}
    controls |= {"seq": number("seq", 4096), "recompute": choice("recompute", ["none", "selective", "full"], "none")}
    controls |= {"lora": number("lora", 0), "dtype": choice("dtype", ["bf16", "fp16", "fp8", "fp32"], "bf16")}
    return controls


def _configured(values: Mapping[str, Any]) -> tuple[Transformer, Parallelism, Training, Cluster]:
    layout, train, cluster = ({name: values[name] for name in names} for names in (OF_LAYOUT, OF_TRAINING, OF_CLUSTER))
    model = Transformer.named(values["model"])
    if other := _other_sizes(values):
        model = msgspec.structs.replace(model, **other)
    return model, Parallelism(**layout), Training(**train), Cluster(**cluster)


def _sizes_followed() -> Callable[[Controls], None]:
    """What gives the controls of sizes those of a model that was chosen."""
    named: list[str] = []

    def follow(controls: Controls) -> None:
        if named != [controls["model"].value]:
            named[:] = [controls["model"].value]
            for name in OF_MODEL:
                controls[name].value = getattr(Transformer.named(*named), name)

    return follow


def _other_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes in which the model is not the one that it is named after."""
    own = Transformer.named(values["model"])
    sizes = {name: values[name] for name in OF_MODEL if values[name] != getattr(own, name)}
    return sizes and {"name": f"{values['model']} with {arguments(sizes)}", **sizes}


def _configured_code(**values: Any) -> str:
    def call(kind: str, names: Sequence[str]) -> str:
        return f"ln.{kind}({arguments({name: values[name] for name in names})})"

    model = [f"model = ln.Transformer.named({values['model']!r})"]
    if other := _other_sizes(values):
        model.append(f"model = msgspec.structs.replace(model, {arguments(other)})")
    layout, train = call("Parallelism", OF_LAYOUT), call("Training", OF_TRAINING)
    cluster = f"cluster = {call('Cluster', OF_CLUSTER)}"
    return "\n".join([*model, cluster, f"found = ln.estimate(model, {layout},\n    {train}, cluster)"])
