"""Reading an execution trace of 109,000 nodes and linking it with its profile, beside the reference linker.

The bundled pair of one rank, 20 times over with new ids and times. Every figure is processor time of one thread of a
process of its own: `python -m benchmarks.bench_execution` prints the rows.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.bench_load import one_cost
from benchmarks.rows import Row, table
from lumos_nb import datasets

TIMES, RUNS = 20, 3
FAR = 10**7
"""Between the ids of two copies; as microseconds, longer than the run."""

REFERENCE_LINKED_PER_S, REFERENCE_CONVERTED_PER_S = 127, 3800
"""Nodes a second of mlcommons/chakra's trace_link (14,392 nodes of resnet, 113 s) and of its converter, which reads the
linked file, on a machine of this kind; ../shared/research/execution_trace_tools.md has the runs."""

_LOAD = """from pathlib import Path
from lumos_nb.exchange.chakra.linking import link
from lumos_nb.traces.execution_trace import load_execution_trace
from lumos_nb.traces.run import load_run
folder = Path(sys.argv[1])
trace, run = load_execution_trace(folder / "et.json"), load_run(folder / "{profile}.json", cache=False)"""


def write_large_pair(folder: Path) -> int:
    """`et.json`, `ids.json` (its profile) and `order.json` (the same without ids); the number of nodes."""
    pair = datasets.path("gpt-single-paired")
    trace, profile = (
        json.loads(gzip.decompress((pair / f"rank-0{kind}.json.gz").read_bytes())) for kind in (".et", "")
    )
    nodes = [_moved(node, k) for k in range(TIMES) for node in trace["nodes"] if k == 0 or node["id"] > 2]
    (folder / "et.json").write_text(json.dumps(trace | {"nodes": nodes}))
    events = [_later(event, k) for k in range(TIMES) for event in profile["traceEvents"] if k == 0 or "dur" in event]
    for name, ids in (("ids", True), ("order", False)):
        kept = events if ids else [_without_ids(event) for event in events]
        (folder / f"{name}.json").write_text(json.dumps(profile | {"traceEvents": kept}))
    return len(nodes)


def _moved(node: dict[str, Any], k: int) -> dict[str, Any]:
    far = k * FAR
    parent = node["ctrl_deps"] + far if node["ctrl_deps"] > 2 else node["ctrl_deps"]
    attrs = [a | {"value": a["value"] + far} if a["name"] == "rf_id" and k else a for a in node["attrs"]]
    return node | {"id": node["id"] + far if node["id"] > 2 else node["id"], "ctrl_deps": parent, "attrs": attrs}


def _later(event: dict[str, Any], k: int) -> dict[str, Any]:
    if "dur" not in event:
        return event
    ids = {key: event["args"][key] + k * FAR for key in ("Record function id", "External id") if key in event["args"]}
    return event | {"ts": event["ts"] + k * FAR, "args": event["args"] | ids}


def _without_ids(event: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in event.get("args", {}).items() if not key.endswith(" id")}
    return event | {"args": kept}


class Cost(NamedTuple):
    """Processor time and its spread, and the memory at the peak, of a few processes: medians."""

    cpu_s: float
    spread_s: float
    peak_bytes: float


def cost(path: Path, call: str, imports: str) -> Cost:
    """Run `call`, which may use `sys.argv[1]`, the path."""
    times, peaks, _ = zip(*(one_cost(path, call, imports) for _ in range(RUNS)), strict=True)
    return Cost(median(times), max(times) - min(times), median(peaks))


def rows() -> list[Row]:
    """All rows of group `execution`."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        count = write_large_pair(folder)
        size = (folder / "et.json").stat().st_size / 1e6
        imports = "from lumos_nb.traces.execution_trace import load_execution_trace"
        reading = cost(folder / "et.json", "load_execution_trace(sys.argv[1])", imports)
        linking = {way: cost(folder, "link(trace, run)", _LOAD.format(profile=way)) for way in ("ids", "order")}
    found = [
        Row("execution/nodes read", count / reading.cpu_s, "nodes/s", "mlcommons' converter", REFERENCE_CONVERTED_PER_S,
            target=">= 100000", note=f"{count:,} nodes, {size:.0f} MB of JSON, {reading.peak_bytes / 1e6:,.0f} MB of "
            f"memory at the peak; spread {reading.spread_s / reading.cpu_s:.0%}"),
    ]  # fmt: skip
    for way, taken in linking.items():
        note = f"the same nodes and their profile; spread {taken.spread_s / taken.cpu_s:.0%}"
        found.append(
            Row(f"execution/nodes linked by {way}", count / taken.cpu_s, "nodes/s", "mlcommons' trace_link",
                REFERENCE_LINKED_PER_S, target=">= 50000", note=note)
        )  # fmt: skip
    return found


if __name__ == "__main__":
    print(table(rows()))
