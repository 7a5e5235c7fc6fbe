"""Chakra files read, written, printed as JSON and checked, beside protobuf's own runtime doing the same node by node.

Processor time of one process, the best of three: `python -m benchmarks.bench_chakra` prints the rows, in two minutes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
from google.protobuf import json_format

import lumos_nb as ln
from benchmarks.rows import Row, table
from lumos_nb.exchange.chakra.messages import message_class

COPIES = 25
REPEATS = 3


def rate(count: int, run: Callable[[], object]) -> float:
    """How many a second of processor time."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return count / min(times)


def many(folder: Path) -> ln.chakra.Nodes:
    """Rank 0 of the bundled tensor-parallel run, one behind another, written and read: `many.0.et`."""
    graph = ln.build_graph(ln.load_run(ln.datasets.path("gpt-tp")))
    ln.chakra.write(graph, folder / "job")
    one = ln.chakra.read_file(folder / "job" / "chakra.0.et")
    ids = len(one.table)
    copies = [
        one.table.with_columns(
            id=pl.col("id") + k * ids, data_deps=pl.col("data_deps").list.eval(pl.element() + k * ids)
        )
        for k in range(COPIES)
    ]
    return ln.chakra.read_file(ln.chakra.write_file(ln.chakra.Nodes(pl.concat(copies)), folder / "many.0.et"))


def by_protobuf(frames: list[bytes]) -> list[dict[str, object]]:
    """Every field and attribute of every node, one after the other."""
    parse = message_class("Node").FromString
    nodes = []
    for frame in frames:
        node = parse(frame)
        said = {one.name: getattr(one, one.WhichOneof("value")) for one in node.attr}
        said |= {"id": node.id, "name": node.name, "type": node.type, "dur_us": node.duration_micros}
        nodes.append(said | {"data_deps": list(node.data_deps)})
    return nodes


def to_protobuf(nodes: list[dict[str, object]]) -> list[bytes]:
    """The same back into messages."""
    make = message_class("Node")
    frames = []
    for said in nodes:
        node = make(id=said.pop("id"), name=said.pop("name"), type=said.pop("type"))
        node.duration_micros = said.pop("dur_us")
        node.data_deps.extend(said.pop("data_deps"))
        for name, value in said.items():
            kind = "bool_val" if isinstance(value, bool) else "int64_val" if isinstance(value, int) else "string_val"
            node.attr.add(name=name, **{kind: value})
        frames.append(node.SerializeToString())
    return frames


def rows() -> Iterator[Row]:
    """All rows of group `chakra`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nodes = many(folder)
        count, path = len(nodes.table), folder / "many.0.et"
        anew = ln.chakra.Nodes(nodes.table.with_columns(frame=pl.lit(None, pl.Binary)), nodes.metadata)
        frames = nodes.table["frame"].to_list()[: count // 5]
        part = len(frames)
        said = by_protobuf(frames)
        parse = message_class("Node").FromString
        text = [json_format.MessageToJson(parse(frame)) for frame in frames[:2000]]
        some, make = frames[:2000], message_class("Node")
        calls: dict[str, tuple[Callable[[], object], Callable[[], object] | None, int, str]] = {
            "read into a table": (
                *(lambda: ln.chakra.read_file(path), lambda: by_protobuf(frames), part),
                f"{count:,} nodes of {path.stat().st_size / count:.0f} bytes",
            ),
            "write a table": (
                *(
                    lambda: ln.chakra.write_file(anew, folder / "a.et"),
                    lambda: to_protobuf([dict(one) for one in said]),
                ),
                *(part, ""),
            ),
            "write what was read": (
                *(lambda: ln.chakra.write_file(nodes, folder / "a.et"), None, 0),
                "byte for byte, each node compared with what it was",
            ),
            "to JSON lines": (
                *(lambda: ln.chakra.write_file(nodes, folder / "a.jsonl"),),
                *(lambda: [json_format.MessageToJson(parse(frame)) for frame in some], len(some)),
                "the reference's chakra_jsonizer: 4,600 elsewhere",
            ),
            "from JSON lines": (
                *(lambda: ln.chakra.read_file(folder / "a.jsonl"),),
                *(lambda: [json_format.Parse(one, make()) for one in text], len(text), ""),
            ),
            "validate": (
                *(lambda: ln.chakra.validate(path, "astra-sim"), None, 0),
                "all rules; the reference's converter, which looks for cycles alone: 3,800 elsewhere",
            ),
        }
        for what, (ours, theirs, of, note) in calls.items():
            beside = {"baseline": "protobuf, node by node", "baseline_value": rate(of, theirs)} if theirs else {}
            goal = ">= 100000" if what.startswith(("read", "write")) else ""
            yield Row(f"chakra/{what}", rate(count, ours), "nodes/s", target=goal, note=note, **beside)
        yield from layout_rows(folder)


def layout_rows(folder: Path) -> Iterator[Row]:
    """A predicted step of GPT-3 for each of 32 ranks."""
    cluster = ln.Cluster(gpu="H100-SXM-80GB", nodes=4, inside="NVLink4 NVSwitch", between="InfiniBand NDR 400")
    train = ln.Training(micro_batch=1, global_batch=16, seq=2048)
    layout = ln.Parallelism(tp=4, pp=4, dp=2, zero=1)
    found = ln.estimate(ln.Transformer.named("gpt3-175b"), layout, train, cluster)
    began = time.process_time()
    written = ln.chakra.write(found, folder / "gpt3", target="astra-sim")
    took_s = time.process_time() - began
    size = sum(path.stat().st_size for path in written)
    yield Row(
        "chakra/GPT-3 of 96 layers for 32 ranks", took_s, "s", note=f"{size / 1e6:.0f} MB, checked before it is written"
    )


if __name__ == "__main__":
    began = time.monotonic()
    print(table(list(rows())))
    print(f"{time.monotonic() - began:.0f} s")
