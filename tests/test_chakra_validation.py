"""What is wrong with Chakra files: every mistake that ASTRA-sim was seen to accept or to stop at, a case each."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

import lumos_nb as ln
from lumos_nb.errors import ChakraError, GraphError, InputError
from tests.chakra_files import COLL, COMP, RECV, SEND, framed, head, message, published

RANKS = 4
TYPES = {"ALL_REDUCE": 0, "BARRIER": 9}


def comp(id: int, dur_us: int, *deps: int, **attributes: Any) -> bytes:
    given = {"is_cpu_op": ("bool", False)} | attributes
    return message(id, COMP, given, name=f"op{id}", duration_micros=dur_us, data_deps=deps)


def coll(id: int, *deps: int, size: int = 1 << 20, kind: int = 0, **attributes: Any) -> bytes:
    given = {"is_cpu_op": ("bool", False), "comm_type": ("int64", kind), "comm_size": ("int64", size)} | attributes
    given = {name: value for name, value in given.items() if value is not None}
    return message(id, COLL, given, name=f"coll{id}", data_deps=deps)


def message_to(id: int, peer: int, *deps: int, type: int = SEND, tag: int | None = 1, size: int = 64) -> bytes:
    given = {"comm_dst" if type == SEND else "comm_src": ("int32", peer), "comm_size": ("int64", size)}
    given |= {} if tag is None else {"comm_tag": ("int32", tag)}
    return message(id, type, given, name=f"message{id}", data_deps=deps)


def step() -> list[bytes]:
    """A step of one rank: forward, backward 1, its all-reduce beside backward 2 and that one's, the optimizer."""
    return [comp(1, 100), comp(2, 100, 1), coll(3, 2), comp(4, 100, 2), coll(5, 3, 4), comp(6, 50, 5)]


def job(folder: Path, ranks: dict[int, list[bytes]], groups: object = None, first: bytes | None = head()) -> Path:
    for rank, nodes in ranks.items():
        (folder / f"job.{rank}.et").write_bytes(framed([*([] if first is None else [first]), *nodes]))
    if groups is not None:
        (folder / "job.groups.json").write_text(json.dumps(groups))
    return folder


def found(folder: Path, target: str | None = "astra-sim") -> list[tuple[str, int | None, str]]:
    return ln.chakra.validate(folder, target).select("file", "node", "rule").rows()


def with_last(rank: int, *nodes: bytes, drop: int = 0) -> dict[int, list[bytes]]:
    """The step of all ranks, of which one has other nodes in place of its last `drop`."""
    own = step()[: len(step()) - drop]
    return {r: [*own, *nodes] if r == rank else step() for r in range(RANKS)}


def test_a_sound_job_has_no_finding(tmp_path):
    groups = {"0": [0, 1], "1": [2, 3]}
    own = {r: [*step(), coll(7, 6, pg_name=("string", str(r // 2)))] for r in range(RANKS)}
    own[0] += [message_to(8, 3, 7)]
    own[3] += [message_to(8, 0, 7, type=RECV)]
    assert found(job(tmp_path, own, groups)) == []
    assert ln.chakra.validate(tmp_path).is_empty()


def test_published_files_are_sound_as_far_as_they_are(traces, tmp_path):
    published(traces, tmp_path)
    assert found(traces / "astra-sim/custom_ring_allreduce_8npus_1MB") == []
    (tmp_path / "resnet").mkdir()
    for path in tmp_path.glob("Resnet50*.et"):
        path.rename(tmp_path / "resnet" / path.name)
    assert {rule for *_, rule in found(tmp_path / "resnet")} <= {"attribute"}
    rules = ln.chakra.validate(tmp_path / "tests/data/chakra.0.et")["rule"].value_counts().rows()
    assert dict(rules)["dependency"] > 0


ACCEPTED_BUT_WRONG = {
    "late cycle": (with_last(0, comp(6, 50, 5, 7), comp(7, 1, 6), drop=1), ("job.0.et", 6, "cycle")),
    "depends on itself": (with_last(1, comp(6, 50, 5, 6), drop=1), ("job.1.et", 6, "cycle")),
    "duplicate id": (with_last(2, comp(4, 20, 2)), ("job.2.et", 4, "id")),
    "unmatched collective": (with_last(3, coll(7, 6)), ("job.0.et", None, "collective")),
    "another order": (
        {r: [comp(1, 9), coll(2, 1, size=8 + 8 * (r == 1)), coll(3, 2, size=16 - 8 * (r == 1))] for r in range(RANKS)},
        ("job.1.et", 2, "collective"),
    ),
    "another size": (with_last(1, coll(5, 3, 4, size=8), comp(6, 50, 5), drop=2), ("job.1.et", 5, "collective")),
    "no comm_size": (with_last(0, coll(5, 3, 4, comm_size=None), comp(6, 50, 5), drop=2), ("job.0.et", 5, "attribute")),
    "no comm_type": (with_last(0, coll(5, 3, 4, comm_type=None), comp(6, 50, 5), drop=2), ("job.0.et", 5, "attribute")),
    "comm_size as text": (
        with_last(0, coll(5, 3, 4, comm_size=("string", "1048576")), comp(6, 50, 5), drop=2),
        ("job.0.et", 5, "attribute"),
    ),
    "num_ops as a float": (with_last(0, comp(7, 1, 6, num_ops=("double", 1e9))), ("job.0.et", 7, "attribute")),
    "comm on the host": ({r: [*step(), coll(7, 6, is_cpu_op=("bool", True))] for r in range(RANKS)},
                         ("job.0.et", 7, "astra-sim")),
    "barrier": ({r: [*step(), coll(7, 6, kind=9)] for r in range(RANKS)}, ("job.0.et", 7, "astra-sim")),
    "no such collective": ({r: [*step(), coll(7, 6, kind=42)] for r in range(RANKS)}, ("job.0.et", 7, "attribute")),
    "other tag": (
        with_last(0, message_to(7, 1, 6)) | {1: [*step(), message_to(7, 0, 6, type=RECV, tag=2)]},
        ("job.0.et", 7, "message"),
    ),
    "no tag": (
        with_last(0, message_to(7, 1, 6, tag=None)) | {1: [*step(), message_to(7, 0, 6, type=RECV, tag=None)]},
        ("job.0.et", 7, "astra-sim"),
    ),
    "no comm_dst": (with_last(0, message(7, SEND, {"comm_size": ("int64", 8)})), ("job.0.et", 7, "attribute")),
    "other length": (
        with_last(0, message_to(7, 1, 6)) | {1: [*step(), message_to(7, 0, 6, type=RECV, size=8)]},
        ("job.1.et", 7, "message"),
    ),
    "invalid root": (with_last(0, message(7, 0, name="x", duration_micros=1)), ("job.0.et", 7, "type")),
    "a circle of ranks": (
        {0: [comp(1, 1), coll(2, 1, pg_name=("string", "0")), coll(3, 2, pg_name=("string", "1"))],
         1: [comp(1, 1), coll(2, 1, pg_name=("string", "1")), coll(3, 2, pg_name=("string", "0"))]},
        ("job.0.et", 2, "deadlock"),
    ),
}  # fmt: skip
STOPS = {
    "absent node": (with_last(0, comp(7, 1, 99)), ("job.0.et", 7, "dependency")),
    "no root": ({0: [comp(1, 1, 2), comp(2, 1, 1)], 1: [comp(1, 1)]}, ("job.0.et", None, "root")),
    "nothing": ({0: [], 1: [comp(1, 1)]}, ("job.0.et", None, "root")),
    "metadata node": (with_last(0, message(7, 1, name="process")), ("job.0.et", 7, "astra-sim")),
    "memory node": (with_last(0, message(7, 2, {"tensor_size": ("uint64", 8)})), ("job.0.et", 7, "astra-sim")),
    "node type 99": (with_last(0, message(7, 99)), ("job.0.et", 7, "type")),
    "no file of a rank": ({0: step(), 2: step()}, ("job.0.et", None, "astra-sim")),
    "a day": (with_last(0, comp(7, 10**12, 6)), ("job.0.et", 7, "duration")),
    "no duration": ({r: [comp(1, 0), comp(2, 0)] for r in range(2)}, ("job.0.et", None, "duration")),
}


@pytest.mark.parametrize(("ranks", "finding"), [*ACCEPTED_BUT_WRONG.values(), *STOPS.values()],
                         ids=[*ACCEPTED_BUT_WRONG, *STOPS])  # fmt: skip
def test_each_mistake_is_found_where_it_is(tmp_path, ranks, finding):
    groups = {"0": [0, 1], "1": [0, 1]} if any(b"pg_name" in one for one in ranks[0]) else None
    assert finding in found(job(tmp_path, ranks, groups))


def test_unlike_collectives_of_a_group_are_in_turn(tmp_path):
    """A simulator takes them as they get ready: here on rank 1 as in the file, on rank 0 by what 1 and 2 take."""

    def nodes(first_us: int, *deps: int, size: int = 1 << 21) -> list[bytes]:
        return [comp(1, first_us), comp(2, 100), coll(3, 1), coll(4, *deps, 2, size=size)]

    assert found(job(tmp_path, {0: nodes(50), 1: nodes(200, 3)})) == [("job.0.et", 4, "astra-sim")]
    assert found(tmp_path, None) == []
    assert found(job(tmp_path, {0: nodes(50, 3), 1: nodes(200, 3)})) == []
    assert found(job(tmp_path, {0: nodes(50, size=1 << 20), 1: nodes(200, size=1 << 20)})) == []


@pytest.mark.parametrize(
    ("name", "groups", "rule"),
    [("tp_group", {"tp_group": [0, 1]}, "astra-sim"), ("7", None, "astra-sim"), ("7", {"8": [0, 1]}, "group"),
     ("7", {"7": [1, 2]}, "group")],
)  # fmt: skip
def test_groups_that_are_no_number_not_listed_or_of_others(tmp_path, name, groups, rule):
    ranks = {r: [comp(1, 5), coll(2, 1, pg_name=("string", name))] for r in range(2)}
    assert ("job.0.et", 2, rule) in found(job(tmp_path, ranks, groups))


def test_truncated_files_gzip_and_files_without_metadata_are_found(tmp_path):
    job(tmp_path, dict.fromkeys(range(RANKS), step()))
    path = tmp_path / "job.3.et"
    path.write_bytes(path.read_bytes()[:-3])
    findings = ln.chakra.validate(tmp_path)
    assert findings.select("file", "rule").rows()[0] == ("job.3.et", "framing")
    assert "ends in the middle of a message" in findings["message"][0]
    path.write_bytes(gzip.compress((tmp_path / "job.0.et").read_bytes()))
    assert found(tmp_path) == [("job.3.et", None, "astra-sim")]
    assert found(tmp_path, None) == []
    job(tmp_path, {3: step()}, first=None)
    assert ("job.3.et", None, "framing") in found(tmp_path)


def test_what_the_simulator_accepts_rightly_is_no_finding(tmp_path):
    """Any integer type, a child before its parent, control instead of data dependencies, no bytes, an empty head."""
    nodes = [
        message(6, COMP, {}, name="opt", duration_micros=50, ctrl_deps=[5]),
        coll(5, 3, 4, comm_size=("uint64", 0)), comp(4, 100, 2), coll(3, 2, comm_type=("int32", 0)), comp(2, 1, 1),
        comp(1, 100),
    ]  # fmt: skip
    assert found(job(tmp_path, dict.fromkeys(range(RANKS), nodes), first=b"")) == []


def test_long_chains_of_any_order_take_no_recursion(tmp_path):
    chain = [comp(i, 1, *([i + 1] if i < 30_000 else [])) for i in range(1, 30_001)]
    assert found(job(tmp_path, {0: chain})) == []


def test_unknown_targets_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(ChakraError, match="no Chakra file"):
        ln.chakra.validate(tmp_path)
    with pytest.raises(InputError, match="'ns3'"):
        ln.chakra.validate(job(tmp_path, {0: step()}), "ns3")


def test_flipped_bits_are_findings_and_errors_of_ours_alone(tmp_path):
    rng = random.Random(7)
    attributes = {"lane": ("string", "gpu0:7"), "kind": ("string", "lag"), "other": ("string", "x")}
    last = message(7, COMP, attributes, duration_micros=5, data_deps=[6])
    sound = framed([head(), *step(), last, message_to(8, 0, 7)])
    path = tmp_path / "job.0.et"
    replayed = 0
    for _ in range(80):
        data = bytearray(sound)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        ln.chakra.validate(path, "astra-sim")
        try:
            replayed += ln.replay(ln.chakra.to_graph(path)).makespan_ns > 0
        except (ChakraError, GraphError):
            continue
    assert 10 < replayed < 80


def test_attributes_that_cannot_be_read_and_times_beyond_all_measure(tmp_path):
    broken = message(1, COMP, duration_micros=5) + b"\x52\x03\x0a\x01\xff"
    assert ("job.0.et", 1, "attribute") in found(job(tmp_path, {0: [broken]}))
    job(tmp_path, {0: [comp(1, 2**63)]})
    assert ("job.0.et", 1, "duration") in found(tmp_path)
    with pytest.raises(ChakraError, match=r"node 1 of job\.0\.et has a time of more than 146 years"):
        ln.chakra.to_graph(tmp_path)
