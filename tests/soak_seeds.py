"""Seeds of `tests.soak`: files of a few kB, made here, or real ones of the shared traces cut down to that."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sqlite3
import tarfile
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import polars as pl

from lumos_nb import chakra, datasets, layout, ledger
from lumos_nb.config import find_gpu
from lumos_nb.costs.embedding_net import _WIDTHS, LookupNet, _shapes
from lumos_nb.costs.embeddings import PhysicalLookup
from lumos_nb.costs.networks import layer_shapes
from lumos_nb.graph import build_graph
from lumos_nb.jobs import save_job
from lumos_nb.traces.run import load_run
from lumos_nb.workloads.dlrm import pretraining
from lumos_nb.workloads.dlrm.exchange_net import WIDTHS, ExchangeNet
from lumos_nb.workloads.dlrm.sharding_costs import ShardingCosts
from tests import chakra_files, test_execution_trace, test_ledger, test_nsys, test_rocprofiler, test_timeline
from tests.chakra_files import framed
from tests.conftest import TRACES
from tests.mutations import tar_of
from tests.trace_builder import Trace, repeated, write_kineto

KINETO = {
    "of CUDA": "hta/critical_path/cuda_event_sync/event_sync_trace.json.gz",
    "of AMD": "hta/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "of MTIA": "hta/mtia_trace_single_rank/mtia_rank_0.json.gz",
    "of AIU": "aiu/allreduce_tp4.json",
    "of Composer": "composer/rank_0.trace.json",
    "with SM metrics": "kineto/tb_plugin/test/gpu_metrics_input.json",
    "of torch.compile": "tracelens/torch_compile_triton/trace.json.gz",
}
CLUSTER = layout.Cluster(gpu="A100-SXM-80GB", nodes=1, gpus_per_node=2, inside="NVLink3 NVSwitch")
_HEAD_BYTES = 3 << 20
Seeds = dict[str, bytes]


def _text(path: Path) -> bytes:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def _json(tree: Any) -> bytes:
    return json.dumps(tree).encode()


# --- Kineto -----------------------------------------------------------------------------------------------------------


def _step(trace: Trace, step: int, at: float) -> None:
    trace.op("aten::mm", at + 100, at + 300)
    trace.launch("gemm", (at + 120, at + 130), (at + 140, at + 500))
    record = trace.record(at + 310, at + 311)
    trace.wait_event(at + 320, at + 321, waits=(20, 7, record))
    trace.launch("ncclDevKernel_AllReduce", (at + 330, at + 331), (at + 510, at + 700), stream=20)
    trace.call("cudaDeviceSynchronize", at + 400, at + 720)


@cache
def made_kineto(rank: int = 0, world_size: int = 1) -> bytes:
    with TemporaryDirectory() as folder:
        trace = repeated(_step, world_size=world_size, steps=2, rank=rank)
        return write_kineto(trace, Path(folder) / "x.json").read_bytes()


def cut_kineto(text: bytes) -> bytes:
    """The head of a trace, and of its events two of each kind with those that share their correlation."""
    try:
        whole = json.loads(text)
    except ValueError:  # only its beginning was read
        end = text.rfind(b"},", 0, text.rfind(b'"ph"'))
        whole = json.loads(text[: end + 1] + b"]}")
    whole = whole if isinstance(whole, dict) else {"traceEvents": whole}
    seen: Counter[object] = Counter()
    kept, ids = [], set()
    for event in whole["traceEvents"]:
        args = event.get("args") or {}
        joined = args.get("correlation", args.get("External id"))
        if len(_json(event)) > 1500 or len(kept) > 30:
            continue
        seen[event.get("ph"), event.get("cat")] += 1
        if seen[event.get("ph"), event.get("cat")] <= 2 or joined in ids:
            kept.append(event)
            ids.add(joined if joined else object())
    head = {key: value for key, value in whole.items() if len(_json(value)) < 1500}
    return _json(head | {"traceEvents": kept})


def kineto() -> Seeds:
    real = {what: cut_kineto(_text(TRACES / name)) for what, name in KINETO.items() if TRACES.is_dir()}
    gloo = gzip.decompress((datasets.path("gpt-ddp") / "rank-0.json.gz").read_bytes())[:_HEAD_BYTES]
    return {"steps": made_kineto(), "of gloo": cut_kineto(gloo), **real}


def steps() -> Seeds:
    """What a graph can be made of."""
    return {"steps": made_kineto()}


def lists() -> Seeds:
    plain = {what: json.loads(text) for what, text in kineto().items()}
    return {what: json.dumps(tree["traceEvents"], indent=0).encode() for what, tree in plain.items()}


def packed(seeds: Seeds) -> Seeds:
    return {what: gzip.compress(text, mtime=0) for what, text in seeds.items()}


# --- other traces -----------------------------------------------------------------------------------------------------


def sqlite() -> Seeds:
    kernels = [test_nsys.kernel(100 * i, 100 * i + 50, i) for i in range(1, 4)]
    calls = [test_nsys.call(test_nsys.LAUNCH, 100 * i - 20, 100 * i - 10, i) for i in range(1, 4)]
    marks = [test_nsys.said(f"step {i}", 100 * i - 30, 100 * i + 60) for i in range(1, 4)]
    tables = {test_nsys.CUPTI + "KERNEL": kernels, test_nsys.CUPTI + "RUNTIME": calls, "NVTX_EVENTS": marks}
    with TemporaryDirectory() as folder:
        made = {"made": test_nsys.export(Path(folder) / "made.sqlite", **tables).read_bytes()}
    real = TRACES / "nsys/cloverleaf-nsys/perlmutter-cloverleaf-cuda.sqlite.gz"
    return made | ({"real": _cut_sqlite(gzip.decompress(real.read_bytes()))} if real.exists() else {})


def _cut_sqlite(data: bytes) -> bytes:
    """Four rows of each table that is read, in pages of 512 bytes."""
    connection = sqlite3.connect(":memory:")
    connection.deserialize(data)
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    for (name,) in names:
        if name.startswith(("CUPTI_", "NVTX_EVENTS", "StringIds", "TARGET_INFO_SESSION", "PROCESSES", "ThreadNames")):
            connection.execute(f'DELETE FROM "{name}" WHERE rowid > 4')
        else:
            connection.execute(f'DROP TABLE "{name}"')
    connection.commit()
    connection.execute("PRAGMA page_size = 512")
    connection.execute("VACUUM")
    cut = connection.serialize()
    connection.close()
    return cut


def rocprofiler() -> Seeds:
    records = {"kernel_dispatch": [test_rocprofiler.kernel(20, 30, 1), test_rocprofiler.kernel(30, 50, 2)]}
    records |= {"hip_api": [test_rocprofiler.record(10, 12, 1, kind=1), test_rocprofiler.record(12, 14, 2, kind=1)]}
    made = {"made": _json({"rocprofiler-sdk-tool": [test_rocprofiler.process(**records)]})}
    real = TRACES / "tracelens/rocprof/908_results.json.gz"
    if not real.exists():
        return made
    whole = json.loads(gzip.decompress(real.read_bytes()))
    return made | {"real": _json(_few(whole, 3))}


def _few(tree: Any, most: int) -> Any:
    """A tree whose lists have so many items at most."""
    if isinstance(tree, dict):
        return {key: _few(value, most) for key, value in tree.items()}
    return [_few(value, most) for value in tree[:most]] if isinstance(tree, list) else tree


def timeline_tables() -> Seeds:
    with TemporaryDirectory() as folder:
        made = test_timeline.parquet(Path(folder) / "trace-a.parquet", test_timeline.TWO_STAGES).read_bytes()
    real = TRACES / "straggler/trace-ST.parquet"
    if not real.exists():
        return {"made": made}
    out = io.BytesIO()
    pl.read_parquet(real).sort("step", "start_ts").head(24).write_parquet(out)
    return {"made": made, "real": out.getvalue()}


def timeline_lists() -> Seeds:
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": 5 * s, "args": {"name": f"PP rank {s}, TP rank 0, compute"}}
        for s in range(2)
    ]
    ops = [
        {"name": op, "cat": op, "ph": "X", "pid": 0, "tid": 5 * s, "ts": a * 1e3, "dur": (b - a) * 1e3,
         "args": {"step": step, "mb_id": -1, "seq_id": order, "model_chunk": 0}}
        for s, step, op, a, b, order in test_timeline.TWO_STAGES
    ]  # fmt: skip
    real = TRACES / "straggler/timeline-ST.json.gz"
    if not real.exists():
        return {"made": _json([*names, *ops])}
    events = json.loads(gzip.decompress(real.read_bytes()))
    own = [event for event in events if event["ph"] == "M"][:10]
    return {"made": _json([*names, *ops]), "real": _json(own + [e for e in events if e["ph"] == "X"][:20])}


def schedules() -> Seeds:
    passes = {"fwd_start": [0.0, 2.0], "fwd_end": [1.0, 3.0], "bwd_start": [4.0, 6.0], "bwd_end": [5.0, 7.5]}
    made = _json({str(step): {"total": 9.0, **passes} for step in (3, 4)})
    real = TRACES / "primus/pp8/pp_rank_0.json"
    if not real.exists():
        return {"made": made}
    whole = dict(list(json.loads(real.read_bytes()).items())[:2])
    return {"made": made, "real": _json(_few(whole, 4))}


def execution_traces() -> Seeds:
    made = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": test_execution_trace.small()}
    seeds = {"made": _json(made)}
    own = json.loads(gzip.decompress((datasets.path("gpt-ddp") / "rank-0.et.json.gz").read_bytes()))
    seeds["bundled"] = _json(own | {"nodes": own["nodes"][:4]})
    for what, name in (("of 1.0.1", "param/linear_et.json.gz"), ("linked", "astra-sim/et_plus/dlrm_eg_0_plus.json.gz")):
        if TRACES.is_dir():
            whole = json.loads(gzip.decompress((TRACES / name).read_bytes()))
            seeds[what] = _json(whole | {"nodes": whole["nodes"][:5]})
    return seeds


# --- Chakra -----------------------------------------------------------------------------------------------------------


def messages() -> Seeds:
    collective = {"comm_type": ("int64", 0), "comm_size": ("int64", 4096), "pg_name": ("string", "0")}
    nodes = [
        chakra_files.message(1, chakra_files.COMP, {"num_ops": ("int64", 5)}, name="gemm", duration_micros=7),
        chakra_files.message(2, chakra_files.COLL, collective, name="all", data_deps=[1], duration_micros=2),
        chakra_files.message(3, chakra_files.COMP, {"list": ("int64_list", [1, 2])}, data_deps=[2], ctrl_deps=[1]),
        chakra_files.message(4, chakra_files.COMP, inputs={"values": "[1]", "shapes": "[[2]]", "types": "['x']"}),
    ]
    seeds = {"made": framed([chakra_files.head(schema="1.0.2"), *nodes])}
    if TRACES.is_dir():
        for what, data in _published().items():
            _, *nodes = chakra_files.frames(data)
            seeds[what] = framed([chakra_files.head(), *[node for node in nodes if len(node) < 1000][:5]])
    return seeds


def whole_messages() -> Seeds:
    """Those of which no node waits for one that is not there."""
    return {"made": messages()["made"]}


def _published() -> Seeds:
    own = (TRACES / "astra-sim/custom_ring_allreduce_8npus_1MB/custom_allreduce.0.et").read_bytes()
    with tarfile.open(TRACES / "chakra/feeder_tests_trace.tar.gz") as archive:
        [first] = [each for each in archive if each.name.endswith(".et")][:1]
        file = archive.extractfile(first)
        assert file is not None
        return {"of ASTRA-sim": own, "of the feeder": file.read()}


def chakra_texts(suffix: str) -> Seeds:
    texts = {}
    with TemporaryDirectory() as folder:
        for what, data in messages().items():
            path = Path(folder) / "a.0.et"
            path.write_bytes(data)
            texts[what] = chakra.write_file(chakra.read_file(path), path.with_suffix(suffix)).read_bytes()
    if suffix == ".json":
        nodes = [{"Id": 1, "Name": "a", "NodeType": 4, "runtime": 5, "num_ops": 7}]
        nodes.append({"Id": 2, "NodeType": 4, "data_deps": [1]})
        texts["of the feeder"] = _json({"workload_graph": nodes})
    return texts


# --- runs -------------------------------------------------------------------------------------------------------------


def archives() -> Seeds:
    return {"of one rank": tar_of([("rank-0.json", made_kineto()), ("notes.txt", b"nothing")])}


def two_ranks() -> Seeds:
    return {f"rank-{rank}.json": made_kineto(rank, 2) for rank in range(2)}


# --- what the package has written -------------------------------------------------------------------------------------


def calibrations() -> Seeds:
    whole = json.loads((datasets.root() / "calibrations" / "generic.json").read_bytes())
    whole["kernels"]["cells"], whole["covered"] = whole["kernels"]["cells"][:2], whole["covered"][:2]
    overheads = json.loads((datasets.root() / "calibrations" / "cpu.json").read_bytes())["overheads"]
    few = whole | {"held_out": whole["held_out"][:1], "sources": whole["sources"][:1]}
    return {"generic": _json(few), "with a host": _json(few | {"overheads": _few(overheads, 3)})}


def lookup() -> PhysicalLookup:
    return PhysicalLookup.of_sheet(find_gpu("A100"))


@cache
def network(*, based: bool = False) -> LookupNet:
    rng = np.random.default_rng(0)
    kind = min(_WIDTHS, key=lambda each: _WIDTHS[each])
    layers = tuple(rng.normal(0, 0.1, shape).astype(np.float32) for shape in _shapes(_WIDTHS[kind]))
    mean, pair = np.zeros(_WIDTHS[kind]), np.ones(2)
    return LookupNet(kind, mean, mean + 1, layers, pair, pair, lookup() if based else None, 99, (0.1, 0.1))  # type: ignore[arg-type]


def networks() -> Seeds:
    with TemporaryDirectory() as folder:
        files = {what: network(based=what == "based").save(Path(folder) / f"{what}.npz") for what in ("alone", "based")}
        return {what: file.read_bytes() for what, file in files.items()}


def plan_costs() -> Seeds:
    """The folder that `save_costs` writes."""
    costs = ShardingCosts.of(network(), CLUSTER, 16384)
    rng, arrays = np.random.default_rng(0), dict.fromkeys(("mean", "std", "shift", "scale"), np.ones(2))
    for name, inputs in (("forward", 4), ("backward", 2)):
        for k, shape in enumerate(layer_shapes([inputs, *WIDTHS, 2])):
            arrays[f"{name}_{k}"] = rng.normal(0, 0.1, shape)
    exchange = ExchangeNet.of_arrays(arrays, 2, costs.exchange)
    report = pl.DataFrame({"network": ["lookup"], "samples": [9], "unseen": [3], "median_error": [0.1]})
    with TemporaryDirectory() as folder:
        made = ShardingCosts(costs.lookup, exchange, costs.batch, costs.speed, report=report)
        return _files_of(pretraining.save_costs(made, Path(folder) / "costs"))


def _files_of(folder: Path) -> Seeds:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@cache
def predictions() -> tuple[bytes, bytes]:
    """A saved prediction, and a ledger of two outcomes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        said = ledger.save_prediction(folder / "p.json", test_ledger.run_with(folder, "base"), change="half", times=0.5)
        came = test_ledger.run_with(folder, "new", scale=0.6)
        for _ in range(2):
            ledger.check_prediction(said, came, ledger=folder / "ledger.jsonl")
        return (folder / "p.json").read_bytes(), (folder / "ledger.jsonl").read_bytes()


def sheets(kind: str) -> Seeds:
    first = sorted((datasets.root() / "hardware" / kind).iterdir())[0]
    return {first.name: first.read_bytes()}


def specifications() -> Seeds:
    from tests.test_chakra_conversion import MODEL

    return {"model": MODEL.to_json().encode()}


def clusters() -> Seeds:
    return {"made": CLUSTER.to_json().encode()}


def lookups() -> Seeds:
    return {"of a sheet": json.dumps(msgspec.to_builtins(lookup())).encode()}


def captures() -> Seeds:
    return {"bundled": (datasets.path("gpt-ddp") / "capture.json").read_bytes()}


def embedding_tables() -> pl.DataFrame:
    """Columns that a user may give."""
    bins = {"bin_0": 0.5, "bin_3": 0.5} | {f"bin_{i}": 0.0 for i in (1, 2, *range(4, 17))}
    own = {"table": ["a", "b", "c"], "rows": [1000, 20, 10**7], "dim": [64, 8, 128], "pooling": [2.0, 1.0, 30.5]}
    return pl.DataFrame(own).with_columns(pl.lit("fp16").alias("dtype"), **{k: pl.lit(v) for k, v in bins.items()})


def tables_csv() -> Seeds:
    return {"made": embedding_tables().write_csv().encode()}


def tables_parquet() -> Seeds:
    out = io.BytesIO()
    embedding_tables().write_parquet(out)
    return {"made": out.getvalue()}


def published_rows() -> Seeds:
    from tests.test_table_rows import GPT, LLAMA

    return {"llama": _json(LLAMA), "gpt": _json({name: str(value) for name, value in GPT.items()})}


def job() -> Seeds:
    """A job of two ranks saved in a folder, planned and replayed."""
    with TemporaryDirectory() as name:
        traces, folder = Path(name) / "traces", Path(name) / "job"
        traces.mkdir()
        for file, data in two_ranks().items():
            (traces / file).write_bytes(data)
        save_job(build_graph(load_run(traces, cache=False)), folder).replay()
        files = [file for file in folder.rglob("*") if file.is_file()]
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def samples() -> Seeds:
    """Rows of the samples of a machine, and where they are from."""
    folder = datasets.root() / "calibration-samples" / "cpu"
    about = json.loads((folder / "provenance.json").read_bytes())
    seeds = {}
    for what in ("kernels", "collectives"):
        out = io.BytesIO()
        pl.read_parquet(folder / f"{what}.parquet").head(3).write_parquet(out)
        seeds[f"{what}.parquet"] = out.getvalue()
        about[what]["sha256"] = hashlib.sha256(out.getvalue()).hexdigest()
    return seeds | {"provenance.json": _json(about)}


def programs() -> Seeds:
    """The table of a benchmark program."""
    from lumos_nb.exchange.benchmark import generate

    with TemporaryDirectory() as name:
        path = test_execution_trace.write(Path(name) / "et.json", test_execution_trace.small())
        generate(path, Path(name) / "program")
        return {"made": (Path(name) / "program" / "workload.json").read_bytes()}
