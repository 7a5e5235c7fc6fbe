"""What takes seconds to find: a layout of a language model, a plan of embedding tables."""

from __future__ import annotations

import threading
from typing import Any

import ipywidgets as ui
import polars as pl

from lumos_nb import charts
from lumos_nb.config import fabrics, find_gpu, gpus
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.embedding_tables import complete_tables
from lumos_nb.errors import InputError, LumosError
from lumos_nb.layout import Cluster, Training
from lumos_nb.transformer import Transformer
from lumos_nb.widgets.panel import MOST_ROWS, WIDE, WIDTH_PX, Panel, Shown, arguments, choice, number, slider
from lumos_nb.workloads.dlrm.plan import STATE_BYTES, Plan
from lumos_nb.workloads.dlrm.sharding import ROOM, SPLITS, shard
from lumos_nb.workloads.dlrm.sharding_costs import ShardingCosts
from lumos_nb.workloads.llm.screening import Found, search


class Stopped(LumosError):
    """A search was stopped by its button."""


def choose_layout(model: Transformer, cluster: Cluster, train: Training, **ranges: Any) -> Panel:
    """Search for layouts with a bar of progress, and a button that stops it.

    Parameters
    ----------
    model, cluster, train, ranges
        As for `search`.

    Examples
    --------
    >>> choose_layout(model, cluster, train, cp=1).code.splitlines()[0]
    'found = ln.search(model, cluster, train, keep=20, spare=0.1, cp=1)'
    """
    if own := ranges.keys() & {"keep", "spare", "progress"}:
        raise InputError(f"{min(own)} is the panel's own: leave it out, and choose it there.")
    bar, stop, stopped = ui.IntProgress(layout={"width": "60%"}), ui.Button(description="stop"), threading.Event()
    stop.on_click(lambda _: stopped.set())

    def say(what: str, done: int, of: int) -> None:
        bar.description, bar.max, bar.value = what, of, done
        if stopped.is_set():
            raise Stopped("stopped: press search to begin again.")

    def make(keep: int, spare: float) -> Found:
        stopped.clear()
        return search(model, cluster, train, keep=keep, spare=spare, progress=say, **ranges)

    def draw(found: Found, **_: Any) -> Shown:
        yield found
        yield charts.layouts(found.frame)
        yield charts.pareto(found.feasible, found.pareto)

    def code(**values: Any) -> str:
        given = arguments({**values, **ranges})
        return f"found = ln.search(model, cluster, train, {given})\nfound.best\nfound.pareto"

    controls = {
        "keep": number("keep", 20),
        "spare": slider(value=0.1, min=0, max=0.5, step=0.05, description="memory to spare"),
    }
    return Panel(controls, make, draw, code, between=[ui.HBox([stop, bar])], button="search")


GB = 10**9


def place_tables(tables: pl.DataFrame, gpu: str = "H100-SXM-80GB", devices: int = 8) -> Panel:
    """Spread embedding tables over the GPUs of a node: what each does and holds, and which tables are cut, and why.

    Priced by `PhysicalLookup` of the data sheet and the calibrated collectives.

    Parameters
    ----------
    tables
        As for `shard`.
    gpu, devices
        What to begin with: the name of a data sheet, and how many of them.

    Raises
    ------
    LayoutError
        A table cannot be.

    Examples
    --------
    >>> place_tables(datasets.load("embedding-tables").rename({"pooling_factor": "pooling"}))
    """
    complete_tables(tables), find_gpu(gpu)

    def make(gpu: str, devices: int, batch: int, memory_gb: int, **chosen: Any) -> Plan:
        cluster = Cluster(gpu=gpu, gpus_per_node=devices, inside=chosen.pop("inside"))
        costs = ShardingCosts.of(PhysicalLookup.of_sheet(cluster.gpu_sheet), cluster, batch)
        return shard(tables, cluster, costs, memory_bytes=[memory_gb * GB] * devices, **chosen)

    def code(gpu: str, devices: int, batch: int, memory_gb: int, inside: str, **chosen: Any) -> str:
        cluster = f"ln.Cluster(gpu={gpu!r}, gpus_per_node={devices}, inside={inside!r})"
        costs = f"ln.ShardingCosts.of(ln.PhysicalLookup.of_sheet(cluster.gpu_sheet), cluster, {batch})"
        asked = f"memory_bytes=[{memory_gb * GB}] * {devices}, {arguments(chosen)}"
        return f"cluster = {cluster}\ncosts = {costs}\nplan = ln.shard(tables, cluster, costs, {asked})"

    room = round(ROOM * find_gpu(gpu).memory_bytes / GB)
    controls = {
        "gpu": choice("gpu", [sheet.name for sheet in gpus()], gpu),
        "inside": choice("inside", [fabric.name for fabric in fabrics()], "NVLink4 NVSwitch"),
        "devices": number("devices", devices, least=1),
        "batch": number("batch", 65536, least=1),
        "memory_gb": number("memory of one, GB", room, least=1),
        "optimizer": choice("optimizer", list(STATE_BYTES), "row_wise_adagrad"),
        "splits": ui.SelectMultiple(options=SPLITS, value=SPLITS, rows=3, description="may be cut", style=WIDE),
    }
    return Panel(controls, make, _plan_drawn, code, button="place")


def _plan_drawn(plan: Plan, **_: Any) -> Shown:
    yield plan
    yield charts.device_loads(plan.devices, width_px=WIDTH_PX)
    yield plan.frame.top_k(MOST_ROWS, by="bytes")
