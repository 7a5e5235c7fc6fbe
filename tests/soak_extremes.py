"""Files that no mutation comes upon: nesting a million deep, a million ranks or groups, endless shapes, bombs."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import polars as pl

from tests import soak_seeds as seeds
from tests.chakra_files import COLL, framed, head, message, varint
from tests.mutations import JSON, of_json, tar_of
from tests.soak_readers import READERS

MILLION = 10**6


@cache
def extremes(name: str) -> list[bytes]:
    """Those for a reader."""
    reader = READERS[name]
    found = [b"", b"\0" * 10_000, *_SPECIAL.get(name, list)()]
    if reader.mutate in (JSON, of_json):
        text = next(iter(reader.seeds().values()))
        found += _of_json(json.JSONDecoder().raw_decode(text.decode())[0])  # of lines of JSON the first
    return found


def _of_json(tree: Any) -> Iterator[bytes]:
    """A tree with one value, or all of it, that is extreme."""
    for odd in (
        *(
            b"[" * MILLION,
            b"[" * MILLION + b"]" * MILLION,
            b'{"a":' * MILLION,
            b'{"a":' * MILLION + b"1" + b"}" * MILLION,
        ),
        *(b"9" * MILLION, b"-0." + b"1" * MILLION, b'"' + b"x" * 3 * MILLION + b'"', b"[" + b"1," * MILLION + b"1]"),
        *(b'"' + b"\\ud83d" * 100_000 + b'"', b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}"),
    ):
        yield odd
        mark = "\x01mark"
        whole = {**tree, next(iter(tree)): mark} if isinstance(tree, dict) else [mark, *tree]
        yield json.dumps(whole).encode().replace(b'"\\u0001mark"', odd)
        if isinstance(tree, dict):
            yield json.dumps({**tree, "another": mark}).encode().replace(b'"\\u0001mark"', odd)


def _kineto() -> Iterator[bytes]:
    whole = json.loads(seeds.made_kineto())
    group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": MILLION, "ranks": []}
    for about in (
        *(
            {"rank": rank, "world_size": size}
            for rank, size in ((5, MILLION), (2**31 - 1, 2**31), (2**70, 2**80), (-1, -5))
        ),
        {"rank": 0, "world_size": MILLION, "pg_config": [group | {"ranks": list(range(MILLION))}]},
        {"rank": 0, "world_size": 2, "pg_config": [group | {"pg_name": str(i)} for i in range(50_000)]},
    ):
        yield json.dumps(whole | {"distributedInfo": about}).encode()
    shapes = {"Input Dims": [[10**9] * 9, [2**63], [-1], [[2**40] * 3] * 2], "Input type": ["float"] * 4}
    said = {
        "Collective name": "allreduce",
        "In msg nelems": 2**62,
        "Group size": MILLION,
        "Process Group Ranks": "[0, ...]",
    }
    events = [event | {"args": event["args"] | shapes | said} for event in whole["traceEvents"]]
    yield json.dumps(whole | {"traceEvents": events}).encode()
    yield json.dumps(whole | {"traceEvents": [e | {"tid": i, "pid": i} for i, e in enumerate(events * 400)]}).encode()


def _execution_traces() -> Iterator[bytes]:
    whole = json.loads(seeds.execution_traces()["made"])
    for groups in (50_000, 1):
        one = {"pg_name": "0", "pg_desc": "default_pg", "ranks": [*range(MILLION // groups)], "group_size": MILLION}
        text = json.dumps(
            [one | {"pg_name": str(i), "ranks": one["ranks"] if groups == 1 else []} for i in range(groups)]
        )
        nodes = json.loads(json.dumps(whole["nodes"]))
        for node in nodes:
            if node["name"].startswith("## process_group"):
                node["inputs"]["values"] = [text]
        yield json.dumps(whole | {"nodes": nodes}).encode()
    yield json.dumps(whole).replace("[3, 4]", str([10**9] * 9)).encode()
    yield json.dumps(whole).replace("[3, 4]", "[-1, 9223372036854775807]").encode()


def _messages() -> Iterator[bytes]:
    huge = {"comm_size": ("int64", 2**62), "involved_dim": ("bool_list", [True] * MILLION)}
    yield framed([head(), message(1, COLL, huge)])
    yield framed([head(), message(1, COLL, name="x" * 3 * MILLION, data_deps=list(range(MILLION)))])
    yield framed([head(), message(1, inputs={"values": "[" * MILLION, "shapes": str([[10**9] * 9]), "types": "[]"})])
    yield framed([head()]) + varint(2**40) + b"\x08\x01"
    yield framed([head(), b"\x82\x01" + varint(2**62) + b"x"])
    yield framed([head(), *[message(i) for i in range(20_000)]])
    yield framed([head()] * 50_000)
    yield gzip.compress(framed([head()]) + b"\0" * (8 << 20))


def _rows(frame: pl.DataFrame) -> Iterator[bytes]:
    """A few kB of Parquet that are ten million rows."""
    out = io.BytesIO()
    frame[:1].select(pl.all().repeat_by(10 * MILLION).list.explode()).write_parquet(out, row_group_size=10 * MILLION)
    yield out.getvalue()


def _archives() -> Iterator[bytes]:
    bomb = tar_of([("rank-0.json", b" " * (8 << 20)), ("rank-1.json", seeds.made_kineto(1, 2))])
    yield bomb
    yield gzip.compress(bomb)
    yield tar_of([(f"rank-{i}.json", b"{}") for i in range(2000)])


_SPECIAL: dict[str, Any] = {
    "Kineto JSON": _kineto,
    "Kineto JSON, gzip": lambda: [gzip.compress(each) for each in (*_kineto(), b" " * (8 << 20), b"[" * MILLION)],
    "Nsight Systems SQLite": lambda: [b"SQLite format 3\0" + b"\xff" * 5000],
    "timeline, Parquet": lambda: _rows(pl.read_parquet(seeds.timeline_tables()["made"])),
    "embedding tables, Parquet": lambda: _rows(seeds.embedding_tables()),
    "saved job": lambda: _rows(pl.read_parquet(seeds.job()["edges-00000.parquet"])),
    "cached parse": lambda: _rows(pl.DataFrame({"rank": [0]})),
    "execution trace": _execution_traces,
    "Chakra protobuf": _messages,
    "Chakra, checked": _messages,
    "Chakra to a graph": _messages,
    "Chakra groups": lambda: [
        json.dumps({"0": [*range(MILLION)]}).encode(),
        json.dumps({str(i): [0, i] for i in range(100_000)}).encode(),
    ],
    "tar of a run": _archives,
    "tar.gz of a run": _archives,
}
